"""The one place where failures of the monitor end: caught, counted, logged once a cause; and where its cost is counted."""

from __future__ import annotations

import logging
import time
from types import TracebackType

_LOG = logging.getLogger("otel_train")

PARTS = ("loop", "gradients", "updates", "activations", "readout", "export", "endpoint", "ranks")
"""loop: hooks and ``observe``; export: the monitor's own thread; ranks: their exchange; the others say what is measured."""


class Guard:
    """Counts the seconds and the errors of each part of a monitor."""

    def __init__(self) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.errors = dict.fromkeys(PARTS, 0)
        self._logged: set[tuple[object, ...]] = set()
        self._parts = {name: _Part(self, name) for name in PARTS}

    def part(self, name: str) -> _Part:
        """Return a context that times a part and lets none of its exceptions out."""
        return self._parts[name]

    def failed(self, name: str, error: BaseException) -> None:
        """Count a failure, and log it if its cause is new."""
        self.errors[name] += 1
        frame = error.__traceback__
        while frame is not None and frame.tb_next is not None:
            frame = frame.tb_next
        cause = (name, type(error), frame and frame.tb_frame.f_code, frame and frame.tb_lineno)
        if cause not in self._logged:
            self._logged.add(cause)
            _LOG.warning("monitoring failed in part %r, the training goes on: %r", name, error, exc_info=error)


class _Part:
    """Times and guards one part; parts do not nest, and each belongs to one thread."""

    __slots__ = ("_guard", "_name", "_started")

    def __init__(self, guard: Guard, name: str) -> None:
        self._guard, self._name, self._started = guard, name, 0.0

    def __enter__(self) -> None:
        self._started = time.perf_counter()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        self._guard.seconds[self._name] += time.perf_counter() - self._started
        if not isinstance(error, Exception):
            return False  # nothing happened, or KeyboardInterrupt, which is the user's
        self._guard.failed(self._name, error)
        return True
