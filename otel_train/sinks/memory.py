"""A sink that keeps what it is given, for tests and notebooks."""

from __future__ import annotations

from collections import deque

from otel_train.snapshot import Snapshot


class MemorySink:
    """Keeps the last Snapshots.

    Args:
        limit: How many.
    """

    def __init__(self, limit: int = 1024) -> None:
        self.snapshots: deque[Snapshot] = deque(maxlen=limit)
        self.closed = False

    @property
    def last(self) -> Snapshot | None:
        """The newest Snapshot, None before the first."""
        return self.snapshots[-1] if self.snapshots else None

    def publish(self, snapshot: Snapshot) -> None:
        """Keep a Snapshot."""
        self.snapshots.append(snapshot)

    def close(self) -> None:
        """Note that the run is over."""
        self.closed = True
