"""Where Snapshots go. No torch here.

A sink that users write has the two methods of `Sink`; it is called by the monitor's own thread, never by the training's.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator
from contextlib import AbstractContextManager
from typing import Protocol, runtime_checkable

from otel_train.errors import ConfigError, OtelTrainError
from otel_train.sinks.otlp import OtlpSink
from otel_train.sinks.otlp.settings import is_asked_for
from otel_train.snapshot import Sample, Snapshot

_LOG = logging.getLogger("otel_train")


@runtime_checkable
class Sink(Protocol):
    """Takes Snapshots."""

    def publish(self, snapshot: Snapshot) -> None:
        """Take a Snapshot: about once a second while steps are made, and a last one at the end.

        Called by the monitor's own thread. An exception is caught, counted and logged once; the next Snapshot comes all the same.
        """

    def close(self) -> None:
        """Let go of everything; called once."""


@runtime_checkable
class ReportingSink(Protocol):
    """A sink with a thread of its own, which says what it did and what it cost."""

    @property
    def cpu_seconds(self) -> float:
        """Processor time that its thread took."""

    def report(self) -> Iterable[Sample]:
        """Return series of its own, which the next Snapshot carries."""


class Outlets:
    """The sinks of one monitor.

    Args:
        sinks: Where Snapshots go, one after another.
        part: Returns a context that lets none of a sink's exceptions out.
    """

    def __init__(self, sinks: Iterable[Sink], part: Callable[[], AbstractContextManager[None]]) -> None:
        self._sinks, self._part = list(sinks), part

    def publish(self, snapshot: Snapshot) -> None:
        """Give every sink a Snapshot; once they are closed none gets any, not from a thread that is late either."""
        for sink in self._sinks:
            with self._part():
                sink.publish(snapshot)

    def close(self) -> None:
        """Close them."""
        closing = list(self._sinks)
        self._sinks.clear()
        for sink in closing:
            with self._part():
                sink.close()

    def reports(self) -> Iterator[Sample]:
        """Yield what sinks say of themselves."""
        for sink in self._sinks:
            if isinstance(sink, ReportingSink):
                yield from sink.report()

    @property
    def cpu_seconds(self) -> float:
        """Processor time that sinks took in threads of their own."""
        return sum(sink.cpu_seconds for sink in self._sinks if isinstance(sink, ReportingSink))


def find_sinks(sinks: object) -> list[Sink]:
    """Return the sinks that a user gave, and one that pushes over OTLP where OpenTelemetry's variables ask for it.

    Raises:
        ConfigError: Something among them is no sink.
    """
    found = check_sinks(sinks)
    if is_asked_for(os.environ) and not any(isinstance(sink, OtlpSink) for sink in found):
        try:
            found.append(OtlpSink())
        except OtelTrainError as error:  # a variable may be meant for others: it does not end the training
            _LOG.warning("nothing is pushed over OTLP: %s", error)
    return found


def check_sinks(sinks: object) -> list[Sink]:
    """Return the sinks that a user gave: several, one, or None.

    Raises:
        ConfigError: Something among them is no sink.
    """
    if sinks is None:
        return []
    found: list[Sink] = []
    for sink in sinks if isinstance(sinks, Iterable) else [sinks]:
        if not isinstance(sink, Sink):
            raise ConfigError(f"sinks: expected objects with publish and close, got {type(sink).__name__}")
        found.append(sink)
    return found
