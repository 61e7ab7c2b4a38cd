"""How fast strangers may make the training's process work."""

from __future__ import annotations

import threading
import time


class Throttle:
    """Lets everybody pass at once up to a burst, then so many a second; the others sleep until it is their turn.

    Args:
        per_second: Turns a second in the long run.
        burst: Turns that may be taken at once after a pause.
    """

    def __init__(self, per_second: float, burst: int) -> None:
        self._interval, self._burst = 1 / per_second, burst
        self._lock = threading.Lock()
        self._ended = threading.Event()
        self._next = 0.0
        """When the next turn would be had nobody a burst, on the monotonic clock."""

    def wait(self) -> None:
        """Sleep until it is the caller's turn."""
        with self._lock:
            now = time.monotonic()
            self._next = max(self._next, now) + self._interval
            delay = self._next - now - self._burst * self._interval
        if delay > 0:
            self._ended.wait(delay)

    def end(self) -> None:
        """Wake everybody up, and let no one wait any more."""
        self._ended.set()
