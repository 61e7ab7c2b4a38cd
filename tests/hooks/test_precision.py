"""Low precision: autocast, gradient scalers and the steps that they skip, weights in bf16."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import SGD, AdamW, Optimizer

from otel_train.catalog import activations, gradients, run, updates
from otel_train.catalog import loss as loss_catalog
from otel_train.config import KINDS
from otel_train.testing import capture
from tests import problems
from tests.hooks.watch import STEPS, TOLERANCE, Loop, Watch, check_untouched, check_values
from tests.problems import Mlp

SCALE = 1024.0


def autocast(dtype: torch.dtype) -> Loop:
    """Forwards in low precision, weights in fp32."""

    def loop(watch: Watch) -> None:
        model = Mlp(hidden=16)
        optimizer = AdamW(model.parameters(), lr=1e-2)
        watch.attach(model, optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            with torch.autocast("cpu", dtype=dtype):
                loss = problems.vector_loss(model, step)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            watch.step(optimizer)
            watch.losses.append(loss.item())
            watch.observe(loss=loss)
            watch.steps += 1
            watch.micro_batches += 1

    return loop


def scaled(*, fused: bool, unscaled_first: bool, skips: tuple[bool, ...] = (False,) * STEPS) -> Loop:
    """fp16 autocast under a GradScaler, two micro-batches a step; some steps meet an Inf (research P8, P9).

    wandb/wandb #9092 and #4369, Lightning #9205, #4151 and #11407: scaled gradients were logged.
    """

    def loop(watch: Watch) -> None:
        model = Mlp(hidden=16)
        optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
        scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
        watch.attach(model, optimizer)
        for step, skip in enumerate(skips):
            optimizer.zero_grad()
            for micro in range(2):
                with torch.autocast("cpu", dtype=torch.float16):
                    loss = problems.vector_loss(model, 2 * step + micro) / 2
                scaler.scale(loss * float("inf") if skip else loss).backward()  # type: ignore[no-untyped-call]  # torch's
                watch.losses.append(loss.item())
                watch.micro_batches += 1
                if not micro:
                    watch.observe(loss=loss)
            if unscaled_first:
                scaler.unscale_(optimizer)
                watch.clip(0.1)
            factor = 1.0 if unscaled_first else scaler.get_scale()
            watch.step(optimizer, lambda: scaler.step(optimizer), factor)
            scaler.update()
            watch.observe(loss=loss, loss_scale=scaler.get_scale())
            watch.steps += not skip
            watch.skipped += skip

    return loop


def pure(dtype: torch.dtype, make: Callable[[Any], Optimizer]) -> Loop:
    """Weights, gradients and optimizer states in low precision."""

    def loop(watch: Watch) -> None:
        model = Mlp(hidden=16).to(dtype)
        optimizer = make(model.parameters())
        watch.attach(model, optimizer)
        for step in range(STEPS):
            optimizer.zero_grad()
            x, y = problems.vector_batch(step)
            loss = nn.functional.cross_entropy(model(x.to(dtype)).float(), y)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            watch.clip(1.0)
            watch.step(optimizer)
            watch.losses.append(loss.item())
            watch.observe(loss=loss)
            watch.steps += 1
            watch.micro_batches += 1

    return loop


SKIPS = (False, True, False, True, True, False)
LOOPS: dict[str, Loop] = {
    "autocast bf16": autocast(torch.bfloat16),
    "autocast fp16": autocast(torch.float16),
    "scaler": scaled(fused=False, unscaled_first=False),
    "scaler, unscaled by the user": scaled(fused=False, unscaled_first=True),
    "scaler, fused": scaled(fused=True, unscaled_first=False),
    "scaler, fused, unscaled by the user": scaled(fused=True, unscaled_first=True),
    "scaler that skips": scaled(fused=False, unscaled_first=False, skips=SKIPS),
    "scaler that skips, unscaled by the user": scaled(fused=False, unscaled_first=True, skips=SKIPS),
    "scaler that skips, fused": scaled(fused=True, unscaled_first=False, skips=SKIPS),
    "scaler that skips, fused, unscaled by the user": scaled(fused=True, unscaled_first=True, skips=SKIPS),
    "bf16 weights, AdamW": pure(torch.bfloat16, lambda p: AdamW(p, lr=1e-2)),
    "bf16 weights, fused AdamW": pure(torch.bfloat16, lambda p: AdamW(p, lr=1e-2, fused=True)),
    "bf16 weights, SGD": pure(torch.bfloat16, lambda p: SGD(p, lr=1e-1)),
    "fp16 weights, SGD": pure(torch.float16, lambda p: SGD(p, lr=1e-1)),
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_bit_for_bit_as_without_a_monitor(name: str) -> None:
    """Losses and final weights."""
    check_untouched(LOOPS[name])


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_exports_what_clones_around_its_steps_say(name: str) -> None:
    """Norms unscaled and as the optimizer used them, ratios of the last step that happened, changed shares, skipped steps."""
    snapshot = check_values(LOOPS[name])
    assert snapshot.value(loss_catalog.LOSS_SCALE) is None or "scaler" in name


def after_update(monitor: Any, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """Observe where the documentation says."""
    scaler.step(optimizer)
    scaler.update()
    monitor.observe(loss_scale=scaler.get_scale())


def before_update(monitor: Any, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """The scale is that of the step before."""
    scaler.step(optimizer)
    monitor.observe(loss_scale=scaler.get_scale())
    scaler.update()


def before_step(monitor: Any, scaler: torch.amp.GradScaler, optimizer: Optimizer) -> None:
    """As where the loss is logged right after the forward."""
    monitor.observe(loss_scale=scaler.get_scale())
    scaler.step(optimizer)
    scaler.update()


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("order", [after_update, before_update, before_step])
def test_a_skipped_step_is_not_blamed_on_another(order: Callable[..., None], *, fused: bool) -> None:
    """Wherever the scale is observed, steps that happened count and show their ratio, and skipped ones neither.

    pytorch/pytorch #67590: a GradScaler gives no signal of its own.
    """
    model = Mlp(hidden=16)
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE, growth_interval=2)
    with capture(model, optimizer, every_n_steps=1, updates="exact", kinds=KINDS) as (monitor, sink):
        for step, skip in enumerate(SKIPS):
            optimizer.zero_grad()
            loss = problems.vector_loss(model, step) * (float("inf") if skip else 1.0)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's
            before = problems.weights(model)
            order(monitor, scaler, optimizer)
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEPS) == SKIPS.count(False)
    assert snapshot.value(run.SKIPPED_STEPS) == SKIPS.count(True)
    assert snapshot.value(run.MICRO_BATCHES) == len(SKIPS)
    ratios = problems.naive_ratios(model, before, problems.weights(model), KINDS)
    assert problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO) == pytest.approx(ratios, rel=TOLERANCE)


@pytest.mark.parametrize("fused", [False, True])
def test_a_skipped_step_has_no_update_ratio_and_no_layer_looks_stalled(*, fused: bool) -> None:
    """What the step before showed stands, with its number; a ratio of 0 would be a stall."""
    model = Mlp(hidden=16)
    optimizer = AdamW(model.parameters(), lr=1e-2, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    shown: list[dict[problems.Key, float]] = []
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step, factor in enumerate((1.0, float("inf"), float("inf"), 1.0)):
            optimizer.zero_grad()
            scaler.scale(problems.vector_loss(model, step) * factor).backward()  # type: ignore[no-untyped-call]  # torch's
            after_update(monitor, scaler, optimizer)
            snapshot = problems.seen(monitor, sink)
            shown.append(problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO))
            assert snapshot.value(run.SAMPLED_STEP) == (1, 1, 1, 2)[step]
            assert snapshot.value(run.SKIPPED_STEPS) == (0, 1, 2, 2)[step]
    assert shown[0] == shown[1] == shown[2] != shown[3]
    assert all(value > 0 for values in shown for value in values.values())


@pytest.mark.parametrize("fused", [False, True])
def test_one_of_two_optimizers_can_be_skipped_alone(*, fused: bool) -> None:
    """A scaler decides for each optimizer: the step of the other happens and shows, and the one left out is counted.

    PyTorch's documentation on several losses and optimizers; no hook tells of an optimizer that is not fused.
    """
    model = Mlp(hidden=16)
    parts = {
        "early": [*model.first.parameters(), *model.norm.parameters()],
        "late": [*model.second.parameters(), *model.last.parameters()],
    }
    optimizers = {name: AdamW(part, lr=1e-2, fused=fused) for name, part in parts.items()}
    scaler = torch.amp.GradScaler("cpu", init_scale=SCALE)
    expected: dict[problems.Key, float] = {}
    with capture(model, optimizers, every_n_steps=1, updates="exact", kinds=KINDS) as (monitor, sink):
        for step, bad in enumerate((None, "late", None, "early")):
            model.zero_grad()
            scaler.scale(problems.vector_loss(model, step)).backward()  # type: ignore[no-untyped-call]  # torch's
            if bad is not None:
                parts[bad][0].grad = torch.full_like(parts[bad][0], float("inf"))
            before = problems.weights(model)
            for optimizer in optimizers.values():
                scaler.step(optimizer)
            scaler.update()
            monitor.observe(loss_scale=scaler.get_scale())
            ratios = problems.naive_ratios(model, before, problems.weights(model), KINDS)
            expected.update({key: value for key, value in ratios.items() if value > 0})
            snapshot = problems.seen(monitor, sink)
            assert problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO) == pytest.approx(expected, rel=TOLERANCE)
    assert snapshot.value(run.STEPS) == 4
    assert snapshot.value(run.SKIPPED_STEPS) == 2


def test_a_scale_that_grows_skips_nothing() -> None:
    """Only a fall tells of a skipped step."""
    model = Mlp(hidden=16)
    optimizer = SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for scale in (1.0, 2.0, 2.0, 4.0):
            problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            monitor.observe(loss_scale=scale)
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEPS) == 4
    assert snapshot.value(run.SKIPPED_STEPS) == 0


def test_counts_are_whole_in_bf16_where_its_own_sums_stop_at_256() -> None:
    """bf16 has 8 bits: 256 + 1 is 256. Changed elements, gradients, zeros and magnitudes of 300 x 300 elements are all there."""
    model = nn.Sequential(nn.Linear(300, 300, bias=False), nn.ReLU(), nn.Linear(300, 1, bias=False)).bfloat16()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(300)).mul_(-1)  # type: ignore[operator]  # a parameter
        model[2].weight.fill_(1.0)  # type: ignore[operator]
    optimizer = SGD(model.parameters(), lr=1.0)
    kinds = ("matrix",)
    with capture(model, optimizer, every_n_steps=1, updates="exact", kinds=kinds, histograms="layer") as (monitor, sink):
        for parameter in model.parameters():
            parameter.grad = torch.ones_like(parameter)
        model(torch.ones(32, 300, dtype=torch.bfloat16))
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    elements = 300 * 300
    assert problems.layer_values(snapshot, updates.LAYER_CHANGED_RATIO) == {("0", "matrix"): 1.0, ("2", "matrix"): 1.0}
    assert problems.layer_values(snapshot, gradients.LAYER_GRAD_MEAN)["0", "matrix"] == 1.0
    assert problems.layer_values(snapshot, gradients.LAYER_GRAD_NORM)["0", "matrix"] == pytest.approx(elements**0.5, rel=TOLERANCE)
    assert snapshot.value(activations.LAYER_ACTIVATION_ZERO_RATIO, site="post") == 1.0
    assert snapshot.value(activations.LAYER_ACTIVATION_MEAN, site="pre") == -1.0
    (histogram, _) = snapshot.find(gradients.LAYER_GRAD_MAGNITUDE)
    assert sum(histogram.value.counts) == elements  # type: ignore[union-attr]  # it is a histogram


def test_updates_that_bf16_rounds_away_show_as_unchanged() -> None:
    """A weight of 1 and a step of 1/1024: the optimizer did its work, and nothing moved; in fp32 all of it did."""
    found = {}
    for dtype in (torch.bfloat16, torch.float32):
        model = nn.Linear(64, 64, bias=False, dtype=dtype)
        nn.init.ones_(model.weight[:32])
        nn.init.constant_(model.weight[32:], 2.0**-6)
        optimizer = SGD(model.parameters(), lr=2.0**-10)
        with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
            model.weight.grad = torch.ones_like(model.weight)
            optimizer.step()
            snapshot = problems.seen(monitor, sink)
        assert snapshot.value(gradients.GRAD_NORM, stage="post_clip") == 64.0
        found[dtype] = snapshot.find(updates.LAYER_CHANGED_RATIO)[0].value
    assert found == {torch.bfloat16: 0.5, torch.float32: 1.0}
