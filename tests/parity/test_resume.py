"""An elastic restart: another number of real processes goes on from the state of those before."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.fsdp import fully_shard

from otel_train.testing import capture
from tests.parity.compare import values
from tests.parity.harness import ranks
from tests.parity.training import KINDS, Series, flat, full

TOKENS = 7
"""A step, on each rank."""


@dataclass(frozen=True)
class Seen:
    """What a rank reports."""

    state: dict[str, Any]
    series: Series
    norm: float
    """Of the whole gradient of the last step, naively."""


def train(state: dict[str, Any] | None, steps: int) -> Seen:
    """Make steps of a sharded model, from the beginning or from a state."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.GELU(), nn.Linear(16, 8))
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters())
    with capture(model, optimizer, every_n_steps=1, updates="exact", kinds=KINDS) as (monitor, sink):
        if state is not None:
            monitor.load_state_dict(state)
        for step in range(steps):
            x = torch.randn(4, 8, generator=torch.Generator().manual_seed(10 * step + distributed.get_rank()))
            model(x).square().mean().backward()
            norm = sum(full(p.grad).double().square().sum().item() for p in model.parameters() if p.grad is not None) ** 0.5
            optimizer.step()
            optimizer.zero_grad()
            monitor.observe(tokens=TOKENS)
        monitor.flush()
        assert sink.last is not None
        return Seen(monitor.state_dict(), flat(sink.last), norm)


def of(seen: Seen, name: str) -> float:
    """Return the one value of a metric."""
    (value,) = values(seen.series, name).values()
    return value


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 2)])
def test_ranks_of_another_number_go_on_together(before: int, after: int) -> None:
    """Step and tokens of all go on, counters begin at 0, and norms are those of the whole model on the new shards."""
    with ranks(before) as pool:
        first = pool.run(train, None, 3)
    state = first[0].state
    with ranks(after) as pool:
        second = pool.run(train, state, 2)
    assert [of(seen, "step") for seen in second] == [5] * after
    assert sum(of(seen, "tokens_seen") for seen in second) == pytest.approx(TOKENS * (3 * before + 2 * after), abs=after)
    for name, expected in (("steps_total", 2), ("tokens_total", 2 * TOKENS), ("resumes_total", 1)):
        assert [of(seen, name) for seen in second] == [expected] * after
    assert of(second[0], "grad_norm") == pytest.approx(second[0].norm, rel=1e-5)
    assert all(values(seen.series, "monitor_errors_total").get(("ranks",), 0.0) == 0 for seen in second)
