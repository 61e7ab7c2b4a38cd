"""The demo's scenarios are broken as they say, and their names are those of the command line."""

from __future__ import annotations

import itertools
import math
import statistics

import pytest
import torch

from otel_train import cli
from otel_train.catalog.updates import LAYER_UPDATE_RATIO, TOLERATED_LOG10
from otel_train.demo import BATCH, CLIP_NORM, Demo, warmup_cosine
from otel_train.demo.scenarios import PEAK_LEARNING_RATE, SCENARIOS
from otel_train.generate.alerts import alerts
from otel_train.generate.time_base import DEMO
from otel_train.testing import capture


def test_the_command_line_offers_them_all() -> None:
    """It names them without waiting for torch."""
    assert tuple(SCENARIOS) == cli.SCENARIOS


def test_every_scenario_expects_an_alert_that_exists() -> None:
    """And the first none."""
    names = {alert.name for alert in alerts(DEMO)}
    assert SCENARIOS["healthy"].alert is None
    assert all(scenario.alert in names for name, scenario in SCENARIOS.items() if name != "healthy")


def test_the_forgotten_block_gets_gradients_and_stays_where_it_is() -> None:
    """All its parameters, and no other's."""
    demo = Demo.build(SCENARIOS["frozen-layer"], steps=10)
    before = {name: parameter.detach().clone() for name, parameter in demo.model.named_parameters()}
    inputs, targets = next(demo.corpus.batches(demo.corpus.training, 2, 128, torch.Generator().manual_seed(0), 1))
    demo.model(inputs, targets).backward()
    demo.optimizer.step()
    for name, parameter in demo.model.named_parameters():
        assert parameter.requires_grad
        assert parameter.grad is not None
        assert torch.equal(parameter, before[name]) == name.startswith("blocks.2."), name


@pytest.mark.parametrize(("name", "factor"), [("healthy", 1.0), ("lr-too-high", 1000.0), ("lr-too-low", 1 / 300)])
def test_learning_rates_are_off_by_what_the_screen_says(name: str, factor: float) -> None:
    """The peak, which the scheduler records."""
    demo = Demo.build(SCENARIOS[name], steps=10)
    assert demo.optimizer.param_groups[0]["initial_lr"] == pytest.approx(factor * PEAK_LEARNING_RATE)


def test_the_loss_is_nan_from_the_middle_on_and_sound_before() -> None:
    """And only in its own scenario."""
    loss = torch.tensor(2.0)
    broken = SCENARIOS["nan-loss"]
    assert broken.cause(100) == 50
    assert float(broken.loss(loss, 49, 100)) == 2.0
    assert broken.loss(loss, 50, 100).isnan()
    assert float(SCENARIOS["healthy"].loss(loss, 99, 100)) == 2.0


@pytest.mark.slow
def test_a_rate_that_is_too_high_keeps_the_ratio_high() -> None:
    """At each sample of the time in which the alert has to come, from the end of warmup on: one below the limit starts it anew."""
    steps, ratios = 180, []
    demo = Demo.build(SCENARIOS["lr-too-high"], steps)
    batches = demo.corpus.batches(demo.corpus.training, BATCH, demo.model.context, torch.Generator().manual_seed(1), steps)
    with capture(demo.model, demo.optimizer, every_n_steps=10) as (monitor, sink):
        for step, (inputs, targets) in enumerate(itertools.islice(batches, 120), start=1):
            demo.model(inputs, targets).backward()
            monitor.clip_grad_norm_(CLIP_NORM)
            demo.optimizer.step()
            demo.schedule.step()
            demo.optimizer.zero_grad()
            if step % 10 == 0 and step > demo.warmup and monitor.flush() and sink.last is not None:
                found = [s.value for s in sink.last.find(LAYER_UPDATE_RATIO, kind="matrix") if isinstance(s.value, float)]
                ratios.append(math.log10(statistics.median(found) / warmup_cosine(step - 1, demo.warmup, steps)))
    assert len(ratios) == 11
    assert min(ratios) > TOLERATED_LOG10[1]
