"""The one place where failures of the monitor end: caught, counted, logged once a cause; and where its cost is counted."""

from __future__ import annotations

import logging
import time
from types import TracebackType
from typing import Protocol

_LOG = logging.getLogger("otel_train")

IN_TRAINING = ("loop", "gradients", "histograms", "updates", "activations", "readout")
"""Parts in the training's thread. loop: hooks and ``observe``; the others say what is measured."""
PARTS = (*IN_TRAINING, "export", "endpoint", "ranks")
"""export: the monitor's own thread; ranks: their exchange."""
_ON_DEVICE = ("gradients", "histograms", "updates", "activations")


class Clock(Protocol):
    """Measures what a part takes where the host's clock does not see it; must not raise."""

    def begin(self) -> object:
        """A part begins; what is returned is given back at its end."""

    def end(self, part: str, began: object) -> None:
        """A part ends."""


class Guard:
    """Counts the seconds and the errors of each part of a monitor.

    Args:
        clock: Told of the parts in which things are measured on the device; None: the host's clock sees all.
    """

    def __init__(self, clock: Clock | None = None) -> None:
        self.seconds = dict.fromkeys(PARTS, 0.0)
        self.errors = dict.fromkeys(PARTS, 0)
        self._logged: set[tuple[object, ...]] = set()
        self._parts = {name: _Part(self, name, clock if name in _ON_DEVICE else None) for name in PARTS}
        self._told = dict(self.seconds)

    def part(self, name: str) -> _Part:
        """Return a context that times a part and lets none of its exceptions out."""
        return self._parts[name]

    def spent(self) -> dict[str, float]:
        """Return the seconds in the training's thread since the last call, by part; for that thread."""
        before, self._told = self._told, dict(self.seconds)
        return {name: self._told[name] - before[name] for name in IN_TRAINING}

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

    __slots__ = ("_began", "_clock", "_guard", "_name", "_started")

    def __init__(self, guard: Guard, name: str, clock: Clock | None) -> None:
        self._guard, self._name, self._started = guard, name, 0.0
        self._clock = clock
        self._began: object = None

    def __enter__(self) -> None:
        self._started = time.perf_counter()
        if self._clock is not None:
            self._began = self._clock.begin()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> bool:
        if self._clock is not None:
            self._clock.end(self._name, self._began)
        self._guard.seconds[self._name] += time.perf_counter() - self._started
        if not isinstance(error, Exception):
            return False  # nothing happened, or KeyboardInterrupt, which is the user's
        self._guard.failed(self._name, error)
        return True
