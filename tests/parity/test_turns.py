"""Two FSDP2 ranks with uneven shards measure the same layers in the same turns, and their parts make up the value of the whole layer."""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor

from otel_train.catalog import run, updates
from otel_train.testing import capture
from tests import problems
from tests.parity.harness import Ranks

WIDTH, LAYERS, STEPS = 363, 5, 7
"""A shard of 182 rows of a matrix takes a quarter of a MiB, one of 181 a little less."""
Ratios = dict[str, float]


def whole(model: nn.Module) -> dict[str, torch.Tensor]:
    """Return the weights, unsharded."""
    found = {}
    for name, parameter in model.named_parameters():
        assert isinstance(parameter, DTensor)
        found[name.removesuffix(".weight")] = parameter.full_tensor().detach().double()
    return found


def train() -> tuple[list[Ratios], list[Ratios], set[str]]:
    """Train; return what this rank exported after each step, the truth of each step, and how the updates were measured."""
    torch.manual_seed(0)
    model = nn.Sequential(*(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(LAYERS)))
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    exported, truth, modes = [], [], set()
    with capture(model, optimizer, every_n_steps=1, updates="exact", update_memory_mb=0.51) as (monitor, sink):
        for _ in range(STEPS):
            optimizer.zero_grad()
            model(torch.randn(8, WIDTH)).square().mean().backward()
            before = whole(model)
            optimizer.step()
            truth.append(
                {name: ((after - before[name]).norm() / before[name].norm()).item() for name, after in whole(model).items()}
            )
            snapshot = problems.seen(monitor, sink)
            exported.append({layer: v for (layer, _), v in problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO).items()})
            modes |= {sample.labels[run.RUN_INFO.labels.index("update_mode")] for sample in snapshot.find(run.RUN_INFO)}
    return exported, truth, modes


def test_ranks_take_turns_together(two: Ranks) -> None:
    """Two layers fit into half a MiB: three turns, and each layer shows the update of its last one."""
    (exported, truth, modes), (others, _, other_modes) = two.run(train)
    assert modes == other_modes == {"exact in 3 turns"}
    expected: Ratios = {}
    for step in range(STEPS):
        expected |= {name: truth[step][name] for name in map(str, range(LAYERS)) if int(name) // 2 == step % 3}
        assert exported[step] | others[step] == pytest.approx(expected, rel=1e-5)
    assert len(expected) == LAYERS
