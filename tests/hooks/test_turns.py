"""Copies of the weights stay within a bound of memory: layers are measured in turns, and each value is that of its turn."""

from __future__ import annotations

import contextlib
import gc
import math
from collections.abc import Iterable
from typing import Any

import pytest
import torch
from torch import nn

from otel_train.catalog import run, updates
from otel_train.errors import AttachError
from otel_train.hooks.turns import LEAST_BYTES, Turns, copied_bytes, memory_bound, take_turns
from otel_train.layers import MonitoredParameter
from otel_train.snapshot import Snapshot
from otel_train.testing import capture
from tests import problems

MIB = 1 << 20
WIDTH = 362
"""A square matrix of fp32 of this width is half a MiB."""


class Stack(nn.Module):
    """Five matrices of half a MiB each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(5))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, WIDTH) to the same."""
        for layer in self.layers:
            x = layer(x).tanh()
        return x


def _loss(model: nn.Module, step: int) -> torch.Tensor:
    loss: torch.Tensor = model(torch.randn(8, WIDTH, generator=torch.Generator().manual_seed(step))).square().mean()
    return loss


def _mode(snapshot: Snapshot) -> str:
    (info,) = snapshot.find(run.RUN_INFO)
    return info.labels[run.RUN_INFO.labels.index("update_mode")]


def _parameter(shape: tuple[int, ...], name: str, kind: str = "matrix", dtype: torch.dtype = torch.float32) -> MonitoredParameter:
    return MonitoredParameter(nn.Parameter(torch.empty(shape, dtype=dtype, device="meta")), name, kind, None, None)


def test_an_exact_value_is_that_of_the_layers_last_turn() -> None:
    """Two matrices fit in a MiB, so five take three turns; in between a layer shows what its turn showed."""
    torch.manual_seed(0)
    model = Stack()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    turn_of = [0, 0, 1, 1, 2]
    expected: dict[problems.Key, float] = {}
    with capture(model, optimizer, every_n_steps=1, updates="exact", update_memory_mb=1.01) as (monitor, sink):
        for step in range(7):
            optimizer.zero_grad()
            _loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            before = problems.weights(model)
            optimizer.step()
            truth = problems.naive_ratios(model, before, problems.weights(model), ("matrix",))
            expected |= {(f"layers.{i}", "matrix"): truth[f"layers.{i}", "matrix"] for i in range(5) if turn_of[i] == step % 3}
            snapshot = problems.seen(monitor, sink)
            assert problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO) == pytest.approx(expected, rel=1e-6)
            assert set(problems.layer_values(snapshot, updates.LAYER_CHANGED_RATIO)) == set(expected)
        assert _mode(snapshot) == "exact in 3 turns"
    assert len(expected) == 5


def test_turns_go_on_when_what_is_trained_changes() -> None:
    """A part that is frozen at every second step, as a GAN's is, must not bring the first turn back each time."""
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    seen: set[problems.Key] = set()
    with capture(model, optimizer, every_n_steps=1, updates="exact", update_memory_mb=1.01) as (monitor, sink):
        for step in range(8):
            model.layers[4].requires_grad_(step % 2 == 0)
            optimizer.zero_grad()
            _loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            found = set(problems.layer_values(problems.seen(monitor, sink), updates.LAYER_UPDATE_RATIO))
            assert found >= seen - {("layers.4", "matrix")}
            seen |= found
    assert seen == {(f"layers.{i}", "matrix") for i in range(5)}


class Failing(torch.optim.SGD):
    """Fails when told to, between our hooks."""

    fails = False

    def step(self, closure: Any = None) -> Any:
        """Fail, or go down."""
        if self.fails:
            raise ZeroDivisionError("a bug of the user's")
        return super().step(closure)


def test_what_a_step_left_behind_that_failed_is_let_go_of() -> None:
    """The copies of its turn, and its numbers: the next sample starts anew."""
    model = Stack()
    optimizer = Failing(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1, updates="exact", update_memory_mb=1.01) as (monitor, sink):
        attachment = monitor._attachment
        assert attachment is not None
        for fails in (True, False):
            optimizer.zero_grad()
            _loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.fails = fails
            with pytest.raises(ZeroDivisionError) if fails else contextlib.nullcontext():
                optimizer.step()
            groups = [group for meter in attachment._meters.values() for group in meter._groups]
            assert any(group._copies for group in groups) is fails
        problems.seen(monitor, sink)


def _all_tensors() -> Iterable[torch.Tensor]:
    gc.collect()
    return [found for found in gc.get_objects() if issubclass(type(found), torch.Tensor)]  # isinstance would wake lazy objects


class _Weighing(torch.optim.SGD):
    """Says how many bytes of tensors are there during a step that were not there before it."""

    known: frozenset[int] = frozenset()
    held = 0

    def look(self) -> None:
        """Remember what is there."""
        self.known = frozenset(id(found) for found in _all_tensors())

    def step(self, closure: Any = None) -> Any:
        """Weigh, where copies are there and the weights have not moved."""
        storages = {found.untyped_storage().data_ptr(): found for found in _all_tensors() if id(found) not in self.known}
        parameters = [p for group in self.param_groups for p in group["params"]]
        own = {t.untyped_storage().data_ptr() for p in parameters for t in (p, p.grad)}
        self.held = sum(found.untyped_storage().nbytes() for at, found in storages.items() if at not in own)
        return super().step(closure)


@pytest.mark.parametrize(("megabytes", "least", "most"), [(None, 2.4 * MIB, 3.0 * MIB), (1.01, 0.9 * MIB, 1.5 * MIB)])
def test_copies_held_during_a_step_stay_within_the_bound(megabytes: float | None, least: float, most: float) -> None:
    """Weighed inside the optimizer's step: all five copies without a bound, two with it; sums are small beside them."""
    model = Stack()
    optimizer = _Weighing(model.parameters(), lr=0.1)
    held = []
    with capture(model, optimizer, every_n_steps=1, updates="exact", update_memory_mb=megabytes, activations=False) as (
        monitor,
        sink,
    ):
        for step in range(4):
            optimizer.zero_grad()
            _loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.look()
            optimizer.step()
            held.append(optimizer.held)
            problems.seen(monitor, sink)
    assert least <= max(held) <= most


def test_without_a_bound_there_are_no_turns() -> None:
    """Every layer at every sample, and run_info says no more than the mode."""
    model = Stack()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1, updates="exact") as (monitor, sink):
        _loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert len(problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO)) == 5
    assert _mode(snapshot) == "exact"


def test_a_bound_that_one_parameter_exceeds_is_refused() -> None:
    """Attaching says which parameter it is and what would do."""
    model = Stack()
    expected = r"update_memory_mb: expected at least 0.5, which layers\.0\.weight takes alone, got 0.25"
    with pytest.raises(AttachError, match=expected), capture(model, updates="exact", update_memory_mb=0.25):
        pass


@pytest.mark.parametrize("updates_mode", ["sampled", "exact"])
@pytest.mark.parametrize("bound", [1.0, 3 * MIB, 64 * MIB, math.inf])
def test_each_parameter_has_one_turn_that_fits(updates_mode: str, bound: float) -> None:
    """In order and without a gap; only a parameter that is larger than the bound has a turn beyond it, of its own."""
    shapes = [(1000, 1000), (300,), (512, 512), (8192, 64), (3, 3), (40_000, 128), (64, 64, 3, 3)] * 5
    parameters = [_parameter(shape, f"p{i}", "embedding" if shape[0] > 8000 else "matrix") for i, shape in enumerate(shapes)]
    turns = take_turns(parameters, updates_mode, bound)
    members: list[list[MonitoredParameter]] = [[] for _ in range(turns.count)]
    for parameter in parameters:
        members[turns.of[id(parameter.tensor)]].append(parameter)
    assert [p.name for turn in members for p in turn] == [p.name for p in parameters]
    for turn in members:
        assert turn
        assert len(turn) == 1 or sum(copied_bytes(p, updates_mode) for p in turn) <= bound
    assert turns.largest[1] == max(copied_bytes(p, updates_mode) for p in parameters)
    assert (turns.count == 1) == (sum(copied_bytes(p, updates_mode) for p in parameters) <= bound)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_samples_of_a_large_language_model_take_a_hundredth_at_most(dtype: torch.dtype) -> None:
    """A model of 7 B parameters: samples are measured all at once, in less than 1 % of weights and gradients."""
    width, blocks = 4096, 32
    shapes = [(32_000, width), (32_000, width)]
    shapes += [(width, width)] * 4 * blocks + [(11_008, width)] * 2 * blocks + [(width, 11_008)] * blocks
    parameters = [_parameter(shape, f"p{i}", "embedding" if i == 0 else "matrix", dtype) for i, shape in enumerate(shapes)]
    size = sum(p.tensor.numel() for p in parameters)
    bound = memory_bound(parameters, "sampled", None)
    assert bound <= 0.01 * 2 * size * dtype.itemsize
    assert take_turns(parameters, "sampled", bound).count == 1
    assert sum(copied_bytes(p, "sampled") for p in parameters) <= bound


def test_very_many_small_tensors_are_sampled_in_turns() -> None:
    """A thousand tensors that are read whole would take 125 MiB: two turns of less than 64."""
    parameters = [_parameter((128, 256), f"p{i}") for i in range(1000)]
    assert memory_bound(parameters, "sampled", None) == LEAST_BYTES
    assert take_turns(parameters, "sampled", LEAST_BYTES).count == 2


def test_where_no_update_is_measured_nobody_has_a_turn() -> None:
    """One turn, and nothing held."""
    assert take_turns([_parameter((1000, 1000), "p")], "off", 1.0) == Turns()
