"""The monitor's own thread: everything that may wait or take time happens here, not in the training thread."""

from __future__ import annotations

import contextlib
import threading
import time
from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

Item = TypeVar("Item")


def thread_seconds() -> float:
    """Return the processor time of the calling thread; 0 where there is no clock of it."""
    with contextlib.suppress(OSError, AttributeError):
        return time.thread_time()
    return 0.0


class Worker(Generic[Item]):
    """A daemon thread that handles items in order, in batches, with a tick after each batch.

    Batches come at most once a period, so that a fast loop does not wake the thread at every step; a flush does not wait for that,
    nor does what is hurried.

    Args:
        name: The thread's name.
        handle: Called with each item; must not raise.
        tick: Called after each batch, and at every flush; must not raise.
        period_seconds: The least time between batches.
        limit: Items waiting at most; the oldest is dropped for a new one.
    """

    def __init__(
        self,
        name: str,
        handle: Callable[[Item], None],
        tick: Callable[[], None],
        *,
        period_seconds: float = 1.0,
        limit: int = 4096,
    ) -> None:
        self._handle, self._tick, self._period = handle, tick, period_seconds
        self._items: deque[Item] = deque()
        self._limit = limit
        self._changed = threading.Condition(threading.RLock())
        self._flushes = self._flushed = 0
        self._stopping = self._woken = self._hurried = False
        self._ended = True  # there is no thread to wait for
        self.dropped = 0
        self.cpu_seconds = 0.0
        """Processor time that the thread took."""
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def start(self) -> None:
        """Start the thread."""
        self._ended = False
        self._thread.start()

    def put(self, item: Item) -> None:
        """Hand over an item; never waits for the handling."""
        with self._changed:
            if len(self._items) >= self._limit:
                self._items.popleft()
                self.dropped += 1
            self._items.append(item)
            self._changed.notify_all()

    def wake(self) -> None:
        """Have a tick come at the next turn, though no item came."""
        with self._changed:
            self._woken = True
            self._changed.notify_all()

    def hurry(self) -> None:
        """Have the next batch come at once, not after its period."""
        with self._changed:
            self._hurried = True
            self._changed.notify_all()

    def flush(self, timeout_seconds: float) -> bool:
        """Wait until everything put so far is handled and ticked; say whether that came about in time.

        From within the thread itself (a sink that closes the monitor, a model that is collected there) it does so at once.
        """
        if threading.current_thread() is self._thread:
            self._handle_waiting()
            return True
        with self._changed:
            self._flushes += 1
            goal = self._flushes
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._flushed >= goal or self._ended, timeout_seconds)
            return self._flushed >= goal

    def stop(self, timeout_seconds: float) -> None:
        """Handle what waits, then end the thread; from within the thread itself it does not wait."""
        with self._changed:
            self._stopping = True
            self._changed.notify_all()
        if self._thread.is_alive() and threading.current_thread() is not self._thread:
            self._thread.join(timeout_seconds)

    def _handle_waiting(self) -> None:
        with self._changed:
            items = list(self._items)
            self._items.clear()
        for item in items:
            self._handle(item)
        self._tick()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._items or self._woken or self._flushes > self._flushed or self._stopping)
                goal, stopping = self._flushes, self._stopping
                self._woken = self._hurried = False
            self._handle_waiting()
            self.cpu_seconds = thread_seconds()
            with self._changed:
                self._flushed = goal
                self._changed.notify_all()
                if stopping:
                    self._ended = True
                    return
                self._changed.wait_for(lambda: self._flushes > self._flushed or self._stopping or self._hurried, self._period)
