"""Where Snapshots go. No torch here.

A sink that users write has the two methods of `Sink`; it is called by the monitor's own thread, never by the training's.
"""

from __future__ import annotations

from typing import Protocol, runtime_checkable

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
