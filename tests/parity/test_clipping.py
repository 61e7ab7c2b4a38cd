"""Clipping by other norms, and of a part of the parameters: what torch does without sharding."""

from __future__ import annotations

import math

import pytest
import torch
from torch import distributed
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from otel_train.testing import capture
from tests.parity.cases import Shard
from tests.parity.harness import Ranks
from tests.parity.model import Net, NetSpec, batch, loss_of
from tests.parity.table import ddp, fsdp, fsdp_one_block, tp, tp_sequence
from tests.parity.training import full

NORMS = (1.0, 2.0, 3.0, math.inf)
WAYS: dict[str, tuple[str, Shard]] = {
    "DDP": ("dp", ddp),
    "FSDP2": ("dp", fsdp),
    "FSDP2 of one block": ("dp", fsdp_one_block),
    "TP": ("tp", tp),
    "TP, sequence parallel": ("tp", tp_sequence),
}


def parts_of(model: torch.nn.Module) -> list[torch.nn.Parameter]:
    """Return the parameters of the blocks, and the embedding's."""
    return [p for name, p in model.named_parameters() if "blocks." in name or "embedding" in name]


def with_gradients() -> Net:
    """Return the whole model with the gradient of one batch."""
    model = NetSpec().build()
    loss_of(model(batch(NetSpec(), 0, 0)[0]), batch(NetSpec(), 0, 0)[1]).backward()  # type: ignore[no-untyped-call]  # torch's
    return model


def clipped(way: str, part: bool) -> list[tuple[float, float]]:  # noqa: FBT001  # sent to the ranks
    """Return for each p the norm that clipping returned, and the largest error of the gradients after it, relative to the largest."""
    dim, shard = WAYS[way]
    mesh: DeviceMesh = init_device_mesh("cpu", (distributed.get_world_size(),), mesh_dim_names=(dim,))
    found = []
    for p in NORMS:
        model = shard(NetSpec().build(), mesh)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        with capture(model, optimizer) as (monitor, _):
            loss_of(model(batch(NetSpec(), 0, 0)[0]), batch(NetSpec(), 0, 0)[1]).backward()  # type: ignore[no-untyped-call]  # torch's
            norm = monitor.clip_grad_norm_(0.01, p, **({"parameters": parts_of(model)} if part else {}))
        truth = with_gradients()
        torch.nn.utils.clip_grad_norm_(parts_of(truth) if part else truth.parameters(), 0.01, p)
        errors, sizes = [], []
        for mine, whole in zip(model.parameters(), truth.parameters(), strict=True):
            assert mine.grad is not None
            assert whole.grad is not None
            errors.append((full(mine.grad) - whole.grad).abs().max().item())
            sizes.append(whole.grad.abs().max().item())
        found.append((full(norm).item(), max(errors) / max(sizes)))
    return found


@pytest.mark.parametrize("part", [False, True], ids=["all", "part"])
@pytest.mark.parametrize("way", WAYS)
def test_every_norm_clips_as_torch_does_without_sharding(way: str, two: Ranks, *, part: bool) -> None:
    """By the 1-, 2-, 3- and maximum norm: the value that is returned and the gradients, on each rank."""
    model = with_gradients()
    parameters = parts_of(model) if part else list(model.parameters())
    grads = torch.cat([p.grad.double().flatten() for p in parameters if p.grad is not None])
    expected = [torch.linalg.vector_norm(grads, p).item() for p in NORMS]
    for found in two.run(clipped, way, part):
        assert [norm for norm, _ in found] == pytest.approx(expected, rel=1e-5)
        assert max(error for _, error in found) < 1e-5
