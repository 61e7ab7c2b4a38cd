"""NaN and Inf: the training goes on, the endpoint answers, counts are exact, and no gauge keeps its last good value."""

from __future__ import annotations

import math
import re
import urllib.request

import pytest
import torch
from torch import nn

import otel_train
from otel_train.catalog import MetricSpec, gradients, parameters, run, throughput, updates
from otel_train.catalog import activations as act
from otel_train.catalog import loss as loss_catalog
from otel_train.config import KINDS
from otel_train.sinks.memory import MemorySink
from otel_train.snapshot import Snapshot
from otel_train.testing import capture
from tests import problems
from tests.problems import Mlp

LAYER_GAUGES = (
    parameters.LAYER_PARAM_NORM,
    gradients.LAYER_GRAD_NORM,
    gradients.LAYER_GRAD_MEAN,
    gradients.LAYER_GRAD_STD,
    updates.LAYER_UPDATE_RATIO,
    updates.LAYER_RELATIVE_SPEED,
    act.LAYER_ACTIVATION_MEAN,
    act.LAYER_ACTIVATION_STD,
    act.LAYER_ACTIVATION_ABSMAX,
)
"""Gauges that a weight that is NaN makes NaN: not counts and shares, which say how many elements there are of a kind."""


def nonfinite(tensors: dict[str, torch.Tensor]) -> dict[str, int]:
    """Count NaN and Inf of each tensor naively."""
    return {name: int((~t.isfinite()).sum()) for name, t in tensors.items()}


def value(snapshot: Snapshot, spec: MetricSpec, **labels: str) -> float:
    """Return a number that must be there."""
    found = snapshot.value(spec, **labels)
    assert found is not None, (spec.name, labels)
    return found


@pytest.mark.parametrize("factor", [math.nan, math.inf], ids=["nan", "inf"])
@pytest.mark.parametrize("mode", ["sampled", "exact"])
def test_a_loss_that_turns_non_finite_is_counted_everywhere_and_stops_nothing(factor: float, mode: str) -> None:
    """The loss is broken at step 3 on purpose; three more steps follow, and the endpoint answers throughout."""
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    sink, expected_gradient, expected_weight = MemorySink(), 0, 0
    by_layer: dict[str, int] = {}
    with otel_train.attach(
        model, optimizer, sinks=[sink], port=0, every_n_steps=1, max_overhead=None, updates=mode, kinds=KINDS
    ) as monitor:
        for step in range(6):
            optimizer.zero_grad()
            loss = problems.vector_loss(model, step) * (factor if step >= 3 else 1.0)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            counts = nonfinite(problems.gradients(model))
            assert (sum(counts.values()) > 0) == (step >= 3)
            expected_gradient += sum(counts.values())
            expected_weight += sum(nonfinite(problems.weights(model)).values())
            for name, count in counts.items():
                layer = name.rpartition(".")[0]
                by_layer[layer] = by_layer.get(layer, 0) + count
            optimizer.step()
            monitor.observe(loss=loss)
            snapshot = problems.seen(monitor, sink)
            assert value(snapshot, run.STEPS) == step + 1
            assert value(snapshot, run.SAMPLED_STEP) == step + 1
            assert value(snapshot, loss_catalog.NONFINITE, source="loss") == max(0, step - 2)
            assert value(snapshot, loss_catalog.NONFINITE, source="gradient") == expected_gradient
            assert value(snapshot, loss_catalog.NONFINITE, source="parameter") == expected_weight
            assert math.isfinite(value(snapshot, loss_catalog.LOSS_SMOOTHED)) == (step < 3)
            assert math.isfinite(value(snapshot, loss_catalog.LOSS)) == (step < 3)
            (line,) = re.findall(r"^otel_train_loss_smoothed\{.*\} (\S+)$", scrape(monitor.url), re.MULTILINE)
            assert math.isnan(float(line)) == (step >= 3)
    assert math.isnan(value(snapshot, loss_catalog.LOSS_SMOOTHED))
    assert expected_weight > 0
    for layer, count in by_layer.items():
        assert value(snapshot, loss_catalog.LAYER_NONFINITE, layer=layer, source="gradient") == count
    assert value(snapshot, loss_catalog.NONFINITE, source="activation") > 0
    assert value(snapshot, loss_catalog.LAYER_NONFINITE, layer="act", source="activation") > 0
    gauges = [sample for spec in LAYER_GAUGES for sample in snapshot.find(spec)]
    assert {sample.spec for sample in gauges} == set(LAYER_GAUGES)
    kept = [(s.spec.name, s.labels, s.value) for s in gauges if isinstance(s.value, (int, float)) and math.isfinite(s.value)]
    assert kept == []
    for spec, labels in (
        (gradients.GRAD_NORM, {"stage": "post_clip"}),
        (parameters.PARAM_NORM, {}),
        (updates.UPDATE_RATIO, {}),
    ):
        assert math.isnan(value(snapshot, spec, **labels))


def scrape(url: str | None) -> str:
    """Return what the endpoint serves."""
    with urllib.request.urlopen(f"{url}metrics", timeout=10) as answer:
        text: str = answer.read().decode()
    return text


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf], ids=["nan", "inf", "minus_inf"])
@pytest.mark.parametrize("hidden", [16, 256], ids=["stacked", "in_pieces"])
def test_single_non_finite_gradient_elements_are_counted_exactly_and_in_their_layer(bad: float, hidden: int) -> None:
    """Three elements of one matrix, among thousands that are fine; the other layers keep good values."""
    model = Mlp(hidden=hidden)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with capture(model, optimizer, every_n_steps=1, updates="exact") as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        grad = model.second.weight.grad
        assert grad is not None
        grad.view(-1)[torch.tensor([0, 7, grad.numel() - 1])] = bad
        first = problems.gradients(model)["first.weight"].norm().item()
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert value(snapshot, loss_catalog.NONFINITE, source="gradient") == 3
    assert value(snapshot, loss_catalog.LAYER_NONFINITE, layer="second", source="gradient") == 3
    assert value(snapshot, loss_catalog.LAYER_NONFINITE, layer="first", source="gradient") == 0
    norms = problems.layer_values(snapshot, gradients.LAYER_GRAD_NORM)
    assert not math.isfinite(norms["second", "matrix"])
    assert norms["first", "matrix"] == pytest.approx(first, rel=1e-6)


def test_infinities_of_both_signs_are_counted_too() -> None:
    """Inf and -Inf make a sum NaN, and finite values in other layers stay out of it."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        assert model.last.weight.grad is not None
        model.last.weight.grad.view(-1)[:2] = torch.tensor([math.inf, -math.inf])
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert value(snapshot, loss_catalog.NONFINITE, source="gradient") == 2


def test_large_finite_gradients_are_not_non_finite() -> None:
    """Squares of 1e30 overflow fp32, the elements do not: norm exact, nothing counted, in a tensor that is summed in pieces too."""
    model = Mlp(hidden=256)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        for parameter in (model.second.weight, model.last.weight):
            assert parameter.grad is not None
            parameter.grad.view(-1)[:3] = 1e30
        found = {name.rpartition(".")[0]: g.norm().item() for name, g in problems.gradients(model).items() if g.dim() > 1}
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert value(snapshot, loss_catalog.NONFINITE, source="gradient") == 0
    norms = problems.layer_values(snapshot, gradients.LAYER_GRAD_NORM)
    assert norms["last", "matrix"] == pytest.approx(found["last"], rel=1e-6)
    assert norms["second", "matrix"] == pytest.approx(found["second"], rel=1e-6)


def test_counters_of_non_finite_values_start_at_zero_before_the_first_step() -> None:
    """The first scrape has them, so that the first NaN is an increase."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer) as (monitor, sink):
        snapshot = problems.seen(monitor, sink)
    assert [value(snapshot, loss_catalog.NONFINITE, source=s) for s in ("loss", "gradient", "activation", "parameter")] == [0] * 4
    layers = {s.labels[0] for s in snapshot.find(loss_catalog.LAYER_NONFINITE)}
    assert layers == {"first", "norm", "act", "second", "tanh", "last"}
    assert {s.value for s in snapshot.find(loss_catalog.LAYER_NONFINITE)} == {0}


def test_nan_losses_under_a_scaler_that_steps_no_more_are_counted_and_do_not_pile_up() -> None:
    """The scaler leaves an unfused optimizer's step out, so that no hook tells of it; the loop does not tell the loss scale."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(101):
            loss = problems.vector_loss(model, step) * (math.nan if step else 1.0)
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            monitor.observe(loss=loss, tokens=4)
        snapshot = problems.seen(monitor, sink)
        assert monitor._attachment is not None
        assert len(monitor._attachment.recorder._step.numbers.values().get("loss", ())) < 16
        assert value(snapshot, loss_catalog.NONFINITE, source="loss") >= 100 - 16
        assert math.isnan(value(snapshot, loss_catalog.LOSS))
        assert math.isnan(value(snapshot, loss_catalog.LOSS_SMOOTHED))
        assert value(snapshot, run.STEPS) == 1
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert value(snapshot, loss_catalog.NONFINITE, source="loss") == 100
    assert value(snapshot, throughput.TOKENS) == 404


def test_a_step_of_many_micro_batches_has_their_mean_loss_and_all_their_tokens() -> None:
    """Those that were handed over early count with their step."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for _ in range(2):
            for micro_batch in range(40):
                problems.vector_loss(model, micro_batch).backward()  # type: ignore[no-untyped-call]  # torch's
                monitor.observe(loss=float(micro_batch), tokens=torch.tensor(3), samples=1)
            optimizer.step()
            optimizer.zero_grad()
        snapshot = problems.seen(monitor, sink)
    assert value(snapshot, loss_catalog.LOSS) == pytest.approx(sum(range(40)) / 40)
    assert value(snapshot, throughput.TOKENS) == 240
    assert value(snapshot, throughput.SAMPLES) == 80
    assert value(snapshot, run.MICRO_BATCHES) == 80
    assert value(snapshot, run.STEPS) == 2


def test_the_loss_recovers_when_it_is_finite_again() -> None:
    """One bad loss does not poison the average for ever."""
    model = nn.Linear(4, 1)
    with capture(model) as (monitor, sink):
        for loss in (1.0, math.nan, 3.0):
            monitor.observe(loss=loss)
        snapshot = problems.seen(monitor, sink)
    assert value(snapshot, loss_catalog.LOSS) == 3.0
    assert value(snapshot, loss_catalog.LOSS_SMOOTHED) == pytest.approx((0.99 * 1 + 3) / (0.99 + 1), rel=1e-9)
    assert value(snapshot, loss_catalog.NONFINITE, source="loss") == 1
