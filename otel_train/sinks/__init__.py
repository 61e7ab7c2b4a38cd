"""Where Snapshots go. No torch here.

A sink that users write has the two methods of `Sink`; it is called by the monitor's own thread, never by the training's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol, runtime_checkable

from otel_train.errors import ConfigError
from otel_train.snapshot import Snapshot


@runtime_checkable
class Sink(Protocol):
    """Takes Snapshots."""

    def publish(self, snapshot: Snapshot) -> None:
        """Take a Snapshot: about once a second while steps are made, and a last one at the end.

        Called by the monitor's own thread. An exception is caught, counted and logged once; the next Snapshot comes all the same.
        """

    def close(self) -> None:
        """Let go of everything; called once."""


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
