"""Activation checkpointing: each activation counts once a forward, whoever recomputes it, and the training does not notice."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.utils.checkpoint import CheckpointPolicy, checkpoint, checkpoint_sequential, create_selective_checkpoint_contexts

from otel_train.catalog import activations as act
from otel_train.catalog import loss as loss_catalog
from otel_train.catalog import run as run_catalog
from otel_train.stats.activations import ROWS
from otel_train.testing import capture
from tests import problems
from tests.hooks.test_activations import Watch, check, sgd

# torch's own: within a reentrant checkpoint no gradients are needed at first
pytestmark = pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")

Call = Callable[[nn.Module, torch.Tensor], Any]


def run_plainly(module: nn.Module, x: torch.Tensor) -> Any:
    """Call without checkpointing."""
    return module(x)


reentrant = partial(checkpoint, use_reentrant=True)
not_reentrant = partial(checkpoint, use_reentrant=False)


class Unit(nn.Module):
    """Half of a block: it sums inside, as our statistics do, so that a mix-up of remembered results would show."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.up, self.act, self.down = nn.Linear(width, 2 * width), nn.ReLU(), nn.Linear(2 * width, width)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to the same shape."""
        hidden = self.act(self.up(x))
        out: torch.Tensor = x + self.down(hidden - hidden.sum(1, keepdim=True) / hidden.shape[1])
        return out / (1 + out.abs().amax().detach() * out.square().sum().sqrt().detach() / 100)


class Block(nn.Module):
    """Two units, of which each may be checkpointed within the block's own checkpoint."""

    def __init__(self, width: int, inner: Call) -> None:
        super().__init__()
        self.one, self.two, self._inner = Unit(width), Unit(width), inner

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, width) to the same shape."""
        result: torch.Tensor = self._inner(self.two, self._inner(self.one, x))
        return result


class Tower(nn.Module):
    """Blocks between two linear layers."""

    def __init__(self, outer: Call = run_plainly, inner: Call = run_plainly, width: int = 24) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(64, width), nn.Linear(width, 10)
        self.blocks = nn.ModuleList(Block(width, inner) for _ in range(2))
        self._outer = outer

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 64) to logits."""
        x = self.first(x)
        for block in self.blocks:
            x = self._outer(block, x)
        logits: torch.Tensor = self.last(x)
        return logits


def selective(save: Callable[[Any], bool]) -> Call:
    """Checkpoint so that the results of some operations are kept."""

    def policy(ctx: object, op: Any, *args: object, **kwargs: object) -> CheckpointPolicy:
        del ctx, args, kwargs
        return CheckpointPolicy.MUST_SAVE if save(op) else CheckpointPolicy.PREFER_RECOMPUTE

    return partial(checkpoint, use_reentrant=False, context_fn=partial(create_selective_checkpoint_contexts, policy))


MATMULS = (torch.ops.aten.mm.default, torch.ops.aten.addmm.default)
SUMS = (torch.ops.aten.sum.dim_IntList, torch.ops.aten.sum.default, torch.ops.aten.abs.default, torch.ops.aten.amax.default,
        torch.ops.aten.square.default)  # fmt: skip
"""What our statistics call too."""

WAYS: dict[str, tuple[Call, Call]] = {
    "plain": (run_plainly, run_plainly),
    "reentrant": (reentrant, run_plainly),
    "not_reentrant": (not_reentrant, run_plainly),
    "no_early_stop": (partial(checkpoint, use_reentrant=False, early_stop=False), run_plainly),
    "nested": (not_reentrant, not_reentrant),
    "nested_reentrant": (reentrant, reentrant),
    "reentrant_in_not_reentrant": (not_reentrant, reentrant),
    "not_reentrant_in_reentrant": (reentrant, not_reentrant),
    "selective_matmuls": (selective(lambda op: op in MATMULS), run_plainly),
    "selective_sums": (selective(lambda op: op in SUMS), run_plainly),
    "selective_everything": (selective(lambda op: op.namespace == "aten"), run_plainly),
}


def tower(way: str, seed: int = 0) -> Tower:
    """Return a model that checkpoints in a way; equal weights for equal seeds."""
    torch.manual_seed(seed)
    return Tower(*WAYS[way])


def batch(step: int, rows: int = ROWS) -> torch.Tensor:
    """Return inputs that need a gradient, as reentrant checkpoints ask for."""
    return problems.vector_batch(step, batch=rows)[0].requires_grad_()


def train(model: nn.Module, optimizer: torch.optim.Optimizer, x: torch.Tensor, call: Call = run_plainly) -> float:
    """Make a step; return the loss."""
    optimizer.zero_grad()
    loss = call(model, x).square().mean()
    loss.backward()
    optimizer.step()
    return float(loss.detach())


def naive(model: Tower, x: torch.Tensor) -> dict[str, Watch]:
    """Watch a plain copy of the model map the same inputs."""
    twin = Tower()
    twin.load_state_dict(model.state_dict())
    watches = {f"blocks.{i}.{u}.act": Watch(twin.get_submodule(f"blocks.{i}.{u}.act")) for i in (0, 1) for u in ("one", "two")}
    twin(x.detach())
    return watches


@pytest.mark.parametrize("way", WAYS)
def test_what_is_recomputed_is_what_it_was_and_counts_once(way: str) -> None:
    """Values of each site equal those of a plain copy; elements that are not finite are counted once."""
    model = tower(way)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(2):
            watches = naive(model, batch(step))
            train(model, optimizer, batch(step))
            snapshot = problems.seen(monitor, sink)
            for layer, watch in watches.items():
                check(snapshot, layer, watch)
        with torch.no_grad():
            model.first.bias[0] = torch.inf
        watches = naive(model, batch(2))
        train(model, optimizer, batch(2))
        snapshot = problems.seen(monitor, sink)
        assert sum(s.value for s in snapshot.find(loss_catalog.NONFINITE, source="activation")) > 0  # type: ignore[misc]
    for layer, watch in watches.items():
        expected = sum(int((~watch.elements(site).isfinite()).sum()) for site in ("pre", "post"))
        assert snapshot.value(loss_catalog.LAYER_NONFINITE, layer=layer, source="activation") == expected > 0


@pytest.mark.parametrize("way", WAYS)
def test_a_checkpointed_training_is_bit_identical_with_and_without_a_monitor(way: str) -> None:
    """Losses and weights: nothing that a checkpoint remembers is ours."""
    results = []
    for attached in (False, True):
        model = tower(way)
        optimizer = sgd(model)
        if attached:
            with capture(model, optimizer, every_n_steps=2):
                losses = [train(model, optimizer, batch(step)) for step in range(5)]
        else:
            losses = [train(model, optimizer, batch(step)) for step in range(5)]
        results.append((losses, {name: p.detach().clone() for name, p in model.named_parameters()}))
    (losses, weights), (watched_losses, watched_weights) = results
    assert losses == watched_losses
    assert all(torch.equal(weight, watched_weights[name]) for name, weight in weights.items())


ROOTS: dict[str, Call] = {
    "reentrant": reentrant,
    "not_reentrant": not_reentrant,
    "selective": selective(lambda op: op in SUMS),
}


@pytest.mark.parametrize("how", ROOTS)
@pytest.mark.parametrize("validates", [False, True], ids=["", "with_validation"])
def test_a_root_that_is_checkpointed_as_a_whole_counts_once(how: str, *, validates: bool) -> None:
    """One micro-batch and one look at its activations a step, though a reentrant root first runs without gradients."""
    model = tower("plain")
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(3):
            if validates:
                with torch.no_grad():
                    model(100 * batch(step))
            micro_batches = [batch(10 * step + i, rows=8) for i in range(2)]
            watch = Watch(nn.ReLU())
            for x in micro_batches:
                seen = naive(model, x)["blocks.1.two.act"]
                watch.pre, watch.post = watch.pre + seen.pre, watch.post + seen.post
            optimizer.zero_grad()
            for loss in [ROOTS[how](model, x).square().mean() for x in micro_batches]:  # both forwards, then both backwards
                loss.backward()
            optimizer.step()
            check(problems.seen(monitor, sink), "blocks.1.two.act", watch)
        model(batch(9))  # closes the last step
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run_catalog.MICRO_BATCHES) == 6


def test_wrapped_blocks_keep_their_names_and_count_once() -> None:
    """torch.distributed's checkpoint_wrapper adds a module around each block."""
    model = tower("plain")
    for i, block in enumerate(model.blocks):
        model.blocks[i] = checkpoint_wrapper(block)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        twin = tower("plain")
        watch = Watch(twin.blocks[1].two.act)  # type: ignore[arg-type,union-attr]  # a module
        twin(batch(0))
        train(model, optimizer, batch(0))
        snapshot = problems.seen(monitor, sink)
        check(snapshot, "blocks.1.two.act", watch)
    assert {s.labels[0] for s in snapshot.find(act.LAYER_ACTIVATION_MEAN)} == {
        f"blocks.{i}.{unit}.act" for i in range(2) for unit in ("one", "two")
    }


def test_a_sequence_in_checkpointed_segments_counts_once() -> None:
    """torch.utils.checkpoint.checkpoint_sequential; the last segment is not checkpointed."""

    class Chain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.parts = nn.Sequential(nn.Linear(64, 16), nn.Tanh(), nn.Linear(16, 16), nn.Tanh(), nn.Linear(16, 10))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            logits: torch.Tensor = checkpoint_sequential(self.parts, 2, x, use_reentrant=False)  # type: ignore[no-untyped-call]  # torch's
            return logits

    model = Chain()
    twin = copy.deepcopy(model)
    watches = {f"parts.{i}": Watch(twin.parts[i]) for i in (1, 3)}
    twin.parts(batch(0))
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        train(model, optimizer, batch(0))
        snapshot = problems.seen(monitor, sink)
        for layer, watch in watches.items():
            check(snapshot, layer, watch)


@pytest.mark.parametrize("way", ["reentrant", "not_reentrant"])
def test_validation_between_checkpointed_steps_does_not_count(way: str) -> None:
    """In eval mode and without gradients, though a reentrant checkpoint runs without gradients too."""
    model = tower(way)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(2):
            model.eval()
            with torch.no_grad():
                model(100 * batch(step))
            model.train()
            with torch.no_grad():
                model(100 * batch(step))
            watch = naive(model, batch(step))["blocks.0.one.act"]
            train(model, optimizer, batch(step))
            check(problems.seen(monitor, sink), "blocks.0.one.act", watch)
