"""Helpers for users' own tests: see what a training would have exported, without a server."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from torch import nn

from otel_train.monitor import Monitor, attach
from otel_train.sinks.memory import MemorySink


@contextmanager
def capture(model: nn.Module, optimizer: Any = None, **settings: Any) -> Iterator[tuple[Monitor, MemorySink]]:
    """Attach without an endpoint and keep every Snapshot.

    Call ``monitor.flush()`` before looking at ``sink.last``. Steps are sampled as asked for, whatever that costs: ``max_overhead``
    is None unless given.

    Args:
        model: The root module.
        optimizer: As for ``attach``.
        **settings: As for ``attach``.

    Yields:
        The monitor and the sink.
    """
    sink = MemorySink()
    with attach(model, optimizer, sinks=[sink], **{"port": None, "max_overhead": None, **settings}) as monitor:
        yield monitor, sink
