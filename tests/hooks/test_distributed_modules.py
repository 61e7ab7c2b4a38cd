"""What torch.distributed does with modules: a pipeline's look at shapes, and activations that are DTensors. One process suffices."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch._C._distributed_c10d import HashStore
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor, Partial, Placement, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.nn import functional

from otel_train.catalog import activations as act
from otel_train.catalog import run as run_catalog
from otel_train.stats.activations import activation_in
from otel_train.testing import capture
from tests import problems
from tests.hooks.test_activations import Watch, check, sgd


@pytest.fixture(autouse=True)
def _process_group() -> Iterator[None]:
    """Be the only rank of a world."""
    distributed.init_process_group("gloo", store=HashStore(), rank=0, world_size=1)
    yield
    distributed.destroy_process_group()


def chain() -> nn.Sequential:
    """Return a stage."""
    return nn.Sequential(nn.Linear(64, 16), nn.ReLU(), nn.Linear(16, 10))


class Counting(nn.Module):
    """Counts its forwards, however they come about."""

    def __init__(self) -> None:
        super().__init__()
        self.chain, self.forwards = chain(), 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 64) to logits."""
        self.forwards += 1
        logits: torch.Tensor = self.chain(x)
        return logits


@pytest.mark.parametrize("schedule", [ScheduleGPipe, Schedule1F1B], ids=lambda kind: kind.__name__)
def test_the_forward_by_which_a_pipeline_learns_shapes_does_not_count(schedule: type[Any]) -> None:
    """At the first step a stage runs once more than it has micro-batches, with gradients; its values and itself do not count."""
    model = Counting()
    optimizer = sgd(model)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    pipeline = schedule(stage, n_microbatches=2, loss_fn=functional.cross_entropy)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(2):
            x, y = problems.vector_batch(step, batch=16)
            twin = chain()
            twin.load_state_dict(model.chain.state_dict())
            watch = Watch(twin[1])
            for micro_batch in x.chunk(2):
                twin(micro_batch)
            optimizer.zero_grad()
            pipeline.step(x, target=y)
            optimizer.step()
            snapshot = problems.seen(monitor, sink)
            check(snapshot, "chain.1", watch)
        model(x)  # closes the last step
        snapshot = problems.seen(monitor, sink)
    assert model.forwards == 1 + 2 * 2 + 1
    assert snapshot.value(run_catalog.MICRO_BATCHES) == 4


def test_the_count_of_micro_batches_of_a_pipeline_is_zeros_free_of_the_extra_forward() -> None:
    """Rows of the extra forward would halve the share of zeros that an odd first micro-batch has."""
    model = Counting()
    optimizer = sgd(model)
    stage = PipelineStage(model, 0, 1, torch.device("cpu"))
    pipeline = ScheduleGPipe(stage, n_microbatches=2, loss_fn=functional.cross_entropy)
    x, y = problems.vector_batch(0, batch=16)
    x = torch.cat([100 * x[:8], x[8:]])  # the extra forward is given the first micro-batch
    twin = chain()
    twin.load_state_dict(model.chain.state_dict())
    watch = Watch(twin[1])
    twin(x)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        pipeline.step(x, target=y)
        optimizer.step()
        check(problems.seen(monitor, sink), "chain.1", watch)


class Placed(nn.Module):
    """Gives a DTensor."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self._mesh, self._placement = init_device_mesh("cpu", (1,)), placement

    def forward(self, x: torch.Tensor) -> DTensor:
        """Map (batch, units) to the same shape."""
        return DTensor.from_local(x, self._mesh, [self._placement])


class Sharded(nn.Module):
    """An activation that is a DTensor, as tensor parallelism makes them, between plain layers."""

    def __init__(self, placement: Placement) -> None:
        super().__init__()
        self.first, self.place, self.act, self.last = nn.Linear(64, 16), Placed(placement), nn.ReLU(), nn.Linear(16, 10)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 64) to logits."""
        hidden = self.act(self.place(self.first(x)))
        logits: torch.Tensor = self.last(hidden.redistribute(placements=[Replicate()]).to_local())
        return logits


@pytest.mark.parametrize("placement", [Shard(0), Shard(1), Replicate()], ids=str)
def test_activations_that_are_dtensors_are_read_where_they_are(placement: Placement) -> None:
    """The local part, without a collective of ours."""
    model = Sharded(placement)
    local: list[torch.Tensor] = []
    model.first.register_forward_hook(lambda _module, _args, output: local.append(output.detach().double()))
    optimizer = sgd(model)
    collectives = []
    with capture(model, optimizer, every_n_steps=2) as (monitor, sink):
        for step in range(1, 4):
            local.clear()
            x, y = problems.vector_batch(step)
            with CommDebugMode() as seen:  # type: ignore[no-untyped-call]  # torch's
                # its hooks want an input with a gradient
                functional.cross_entropy(model(x.requires_grad_()), y).backward()  # type: ignore[no-untyped-call]  # torch's
                optimizer.step()
            collectives.append(seen.get_total_counts())
            if step == 2:
                snapshot = problems.seen(monitor, sink)
                for site, seen_there in (("pre", local[0]), ("post", local[0].relu())):
                    assert snapshot.value(act.LAYER_ACTIVATION_MEAN, layer="act", site=site) == pytest.approx(
                        seen_there.mean().item(), rel=1e-6
                    )
                    std = snapshot.value(act.LAYER_ACTIVATION_STD, layer="act", site=site)
                    assert std == pytest.approx(seen_there.std(correction=0).item(), rel=1e-6)
        assert not any(monitor._guard.errors.values())
    assert len(set(collectives)) == 1  # the third step is not sampled


def test_a_sum_that_is_yet_to_be_made_is_no_activation() -> None:
    """The local part of a Partial DTensor is a share of the values, not some of them."""
    mesh = init_device_mesh("cpu", (1,))
    x = torch.randn(4, 8)
    assert activation_in(DTensor.from_local(x, mesh, [Partial()])) is None
    assert activation_in(DTensor.from_local(x, mesh, [Shard(1)])) is not None
