"""Histograms of signed gradients, on every way that gradients come: against counts of the gradients themselves."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from otel_train.catalog import gradients
from otel_train.sampling import WHOLE
from otel_train.snapshot import HistogramValue, Snapshot
from otel_train.testing import capture
from tests import problems
from tests.problems import Gpt, Mlp

STEPS = 2
SCALE = 1024.0
POWERS = [2.0**exponent for exponent in (-149, -126, -47, -46, -45, -40, -39, -1, 0, 1, 8, 15, 16, 17, 100)]
NEAR = [math.nextafter(1.0, towards) * power for power in (2.0**-46, 2.0**-3, 1.0, 2.0**16) for towards in (0.0, 2.0)]
FINITE = torch.tensor([0.0, -0.0, 1e-40, -1e-40, *(sign * size for size in POWERS + NEAR for sign in (1, -1))])
NOT_FINITE = torch.tensor([math.inf, -math.inf, math.nan, -math.nan])
Loop = Callable[[nn.Module, Optimizer], list[torch.Tensor]]
"""Trains the first layer, on gradients of all kinds among those of the loss, and returns the gradients that the optimizer used."""


def plant(model: nn.Module, special: torch.Tensor) -> torch.Tensor:
    """Put special values among the first layer's gradients, and return them all."""
    grad = model.get_parameter("first.weight").grad
    assert grad is not None
    grad.view(-1)[: len(special)] = special
    return grad.double().flatten()


def plain(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Train in fp32; NaN and Inf are among the gradients."""
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
        found.append(plant(model, torch.cat([FINITE, NOT_FINITE])))
        optimizer.step()
    return found


def accumulated(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Train on two micro-batches a step."""
    found = []
    for step in range(STEPS):
        optimizer.zero_grad()
        for micro in range(2):
            (problems.vector_loss(model, 2 * step + micro) / 2).backward()  # type: ignore[no-untyped-call]  # torch's
        found.append(plant(model, FINITE))
        optimizer.step()
    return found


def scaled(model: nn.Module, optimizer: Optimizer) -> list[torch.Tensor]:
    """Train under a GradScaler, whose scale is on the gradients until the optimizer has stepped, if it is fused."""
    scaler, found = torch.amp.GradScaler("cpu", init_scale=SCALE), []
    special = FINITE[FINITE.abs() < 2.0**100]
    for step in range(STEPS):
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = problems.vector_loss(model, step)
        scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's
        found.append(plant(model, SCALE * special) / SCALE)
        scaler.step(optimizer)
        scaler.update()
    return found


LOOPS: dict[str, tuple[Loop, Callable[[nn.Module], Optimizer]]] = {
    "plain": (plain, lambda model: SGD(model.parameters(), lr=1e-3)),
    "accumulated": (accumulated, lambda model: AdamW(model.parameters())),
    "scaled": (scaled, lambda model: AdamW(model.parameters(), fused=False)),
    "scaled, fused": (scaled, lambda model: AdamW(model.parameters(), fused=True)),
}


def value_of(snapshot: Snapshot, layer: str) -> HistogramValue:
    """Return the histogram of a layer's signed gradients."""
    (sample,) = snapshot.find(gradients.LAYER_GRAD_VALUE, layer=layer)
    assert isinstance(sample.value, HistogramValue)
    return sample.value


def check(found: HistogramValue, elements: torch.Tensor) -> None:
    """Compare each bucket of both forms with the elements in its range, one by one."""
    counted = elements[~elements.isnan()]
    below = [int((counted <= bound).sum()) for bound in found.bounds]
    assert found.cumulated(found.bounds) == (list(zip(found.bounds, below, strict=True)), len(counted))
    native = found.exponential()
    assert (native.zero_threshold, native.count) == (2.0**-46, len(counted))
    assert native.zero_count == int((counted.abs() <= native.zero_threshold).sum())
    for side, counts in ((counted, native.positive), (-counted, native.negative)):
        lower = [2.0 ** (native.first - 1 + i) for i in range(len(counts))]
        upper = [*(2 * bound for bound in lower[:-1]), math.inf]
        assert counts == tuple(int(((side > low) & (side <= high)).sum()) for low, high in zip(lower, upper, strict=True))
    assert found.total == pytest.approx(counted[counted.isfinite()].sum().item(), rel=1e-6)


@pytest.mark.parametrize("compiled", [False, True], ids=["eager", "compiled"])
@pytest.mark.parametrize("updates", ["sampled", "exact"])
@pytest.mark.parametrize("name", LOOPS)
def test_every_element_is_in_its_bucket(name: str, updates: str, *, compiled: bool) -> None:
    """Zeros, subnormals, exact powers of two, both signs; of tensors that are read whole."""
    model = Mlp(hidden=16)
    train, optimizer_of = LOOPS[name]
    assert model.get_parameter("first.weight").numel() <= WHOLE
    optimizer = optimizer_of(model)
    with capture(model, optimizer, every_n_steps=1, histograms="layer", signed_histograms=True, updates=updates) as (monitor, sink):
        if compiled:
            torch._dynamo.reset()
            model.compile(backend="aot_eager")
        elements = torch.cat(train(model, optimizer))
        snapshot = problems.seen(monitor, sink)
    check(value_of(snapshot, "first"), elements)


def test_sampled_elements_stand_for_all_of_their_tensor() -> None:
    """A large matrix, of whose gradients a quarter is negative."""
    model = nn.Sequential(nn.Linear(512, 512, bias=False))
    optimizer = SGD(model.parameters(), lr=1e-3)
    with capture(model, optimizer, every_n_steps=1, histograms="layer", signed_histograms=True) as (monitor, sink):
        for _ in range(8):
            grad = torch.rand(512, 512) - 0.25
            model[0].weight.grad = grad
            optimizer.step()
        found = value_of(problems.seen(monitor, sink), "0")
    elements = 8 * grad.numel()
    assert sum(found.counts) == pytest.approx(elements, abs=len(found.counts))
    # 32,768 elements are read: the standard error of a share of a quarter is 0.24 %
    assert sum(found.negative) / elements == pytest.approx(0.25, abs=0.01)
    assert found.total / elements == pytest.approx(0.25, abs=0.01)


def test_a_block_has_one_signed_histogram_whose_sizes_are_the_magnitudes() -> None:
    """The same elements, counted both ways."""
    model = Gpt(width=32)
    optimizer = AdamW(model.parameters())
    with capture(model, optimizer, every_n_steps=1, signed_histograms=True) as (monitor, sink):
        problems.text_loss(model, problems.byte_ids(), 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    sizes = {sample.labels: sample.value for sample in snapshot.find(gradients.LAYER_GRAD_MAGNITUDE)}
    values = {sample.labels: sample.value for sample in snapshot.find(gradients.LAYER_GRAD_VALUE)}
    assert values.keys() == sizes.keys()
    for labels, signed in values.items():
        size = sizes[labels]
        assert isinstance(signed, HistogramValue)
        assert isinstance(size, HistogramValue)
        both = signed.exponential()
        assert sum(both.negative) > 0
        together = [a + b for a, b in zip(both.positive, both.negative, strict=True)]
        assert together == pytest.approx(size.counts[1:], abs=1)


def test_without_the_setting_there_is_no_signed_histogram() -> None:
    """Nor are signs looked at."""
    model = Mlp(hidden=16)
    optimizer = SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert snapshot.find(gradients.LAYER_GRAD_MAGNITUDE)
    assert not snapshot.find(gradients.LAYER_GRAD_VALUE)
