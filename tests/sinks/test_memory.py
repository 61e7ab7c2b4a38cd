"""The sink that keeps what it is given."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from otel_train.catalog import run
from otel_train.sinks import Sink
from otel_train.sinks.memory import MemorySink
from otel_train.snapshot import Sample, Snapshot
from otel_train.testing import capture


def _snapshot(step: int) -> Snapshot:
    return Snapshot((("run", "r"), ("rank", "0")), float(step), (Sample(run.STEP, (), step),))


def test_it_is_a_sink_as_users_write_them() -> None:
    """The protocol that attach checks accepts it."""
    assert isinstance(MemorySink(), Sink)


def test_the_last_snapshot_is_none_before_the_first() -> None:
    """Nothing came, nothing is there."""
    sink = MemorySink()
    assert sink.last is None
    assert not sink.closed


@pytest.mark.parametrize("limit", [1, 3])
def test_it_keeps_the_newest_snapshots_up_to_its_limit(limit: int) -> None:
    """A long run does not fill the memory."""
    sink = MemorySink(limit)
    for step in range(10):
        sink.publish(_snapshot(step))
    assert [s.value(run.STEP) for s in sink.snapshots] == list(range(10))[-limit:]
    assert sink.last is sink.snapshots[-1]


def test_close_is_noted_and_leaves_the_snapshots() -> None:
    """Tests look at the Snapshots after the end."""
    sink = MemorySink()
    sink.publish(_snapshot(1))
    sink.close()
    assert sink.closed
    assert sink.last is not None


def test_capture_gives_a_trainings_snapshots_and_ends_the_run() -> None:
    """The last Snapshot says that the run has ended, and no endpoint was opened."""
    model = nn.Linear(4, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer) as (monitor, sink):
        assert monitor.port is None
        for _ in range(3):
            model(torch.randn(8, 4)).sum().backward()
            optimizer.step()
        monitor.flush()
        assert sink.last is not None
        assert sink.last.value(run.STEPS) == 3
        assert sink.last.value(run.RUN_ACTIVE) == 1
    assert sink.closed
    assert sink.last.value(run.RUN_ACTIVE) == 0
