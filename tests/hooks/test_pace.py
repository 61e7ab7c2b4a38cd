"""Real trainings with a statistic that is made slow: less is measured until it fits, and training is as fast as before."""

from __future__ import annotations

import itertools
import logging
import re
import statistics
import time
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from otel_train.catalog import activations, gradients, monitor, updates
from otel_train.hooks.shape_group import ShapeGroup
from otel_train.hooks.site_meter import WaitingRows
from otel_train.testing import capture
from tests import problems
from tests.problems import Mlp

EVERY = 5
SHAPES = 5
"""Of the model's parameters: each is read on its own."""
MOST = 0.01


class Slow:
    """A method that sleeps before it does its work, and counts that."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, owner: type, name: str, seconds: float) -> None:
        self.seconds, self.slept = seconds, 0.0
        work: Callable[..., Any] = getattr(owner, name)

        def slow(*args: Any, **kwargs: Any) -> Any:
            time.sleep(self.seconds)
            self.slept += self.seconds
            return work(*args, **kwargs)

        monkeypatch.setattr(owner, name, slow)


class Loop:
    """A training whose steps take as long as is said."""

    def __init__(self, seconds: float) -> None:
        torch.manual_seed(0)
        self.model: nn.Module = Mlp(hidden=16)
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.seconds, self.number = seconds, 0

    def run(self, steps: int) -> list[float]:
        """Make steps; return the seconds that each took."""
        ends = [time.perf_counter()]
        for _ in range(steps):
            time.sleep(self.seconds)
            problems.vector_loss(self.model, self.number).backward()  # type: ignore[no-untyped-call]  # torch's
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.number += 1
            ends.append(time.perf_counter())
        return [end - began for began, end in itertools.pairwise(ends)]


def paced(snapshot: Any) -> dict[str, float]:
    """Return the steps between measurements by part."""
    return {sample.labels[0]: sample.value for sample in snapshot.find(monitor.PART_EVERY_N_STEPS)}


@pytest.mark.slow
def test_a_slow_hook_costs_less_than_1_percent_after_100_steps(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """0.5 s a sample, steps of 0.05 s, every fifth: 200 % of the time. Training is as fast as before the monitor came."""
    loop = Loop(0.05)
    loop.run(1)
    bare = loop.run(40)
    hook = Slow(monkeypatch, ShapeGroup, "read_before", 0.1)
    with (
        caplog.at_level(logging.INFO, "otel_train"),
        capture(loop.model, loop.optimizer, every_n_steps=EVERY, max_overhead=MOST) as (
            watch,
            sink,
        ),
    ):
        first = loop.run(100)
        slept, hook.slept = hook.slept, 0.0
        after = loop.run(100)
        seen = problems.seen(watch, sink)
    bare += loop.run(40)  # before and after: other programs come and go
    assert sum(first) > 100 * statistics.median(bare) + 0.9 * slept
    assert slept > 10 * MOST * sum(first)
    assert hook.slept <= MOST * sum(after)
    assert statistics.median(after) / statistics.median(bare) < 1 + 2 * MOST  # as much again for the machine's noise
    cadence = seen.value(monitor.EVERY_N_STEPS)
    assert cadence is not None
    assert cadence >= 1280
    assert seen.find(updates.LAYER_UPDATE_RATIO), "the last sample stays shown"
    first_warning, *others = [
        r.getMessage() for r in caplog.records if "own cost" in r.getMessage() and r.levelno == logging.WARNING
    ]
    assert "updates most of it" in first_warning
    assert "max_overhead" in first_warning
    stretched = re.search(r"samples come every (\d+) steps \(before: 5\)", first_warning)
    assert stretched, first_warning
    assert int(stretched[1]) >= 1280, "at once as far as is needed"
    assert f"every {cadence:g} steps" in [first_warning, *others][-1]
    assert len(others) <= 4  # what every step costs is known later, and leaves samples a tenth of the budget at least


@pytest.mark.parametrize(
    ("owner", "method", "part"), [(ShapeGroup, "count_magnitudes", "histograms"), (WaitingRows, "add", "activations")]
)
def test_a_slow_part_is_thinned_and_the_others_go_on(
    owner: type, method: str, part: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Other parts are measured as often as asked for; of the slow one the last values stand."""
    loop = Loop(0.01)
    hook = Slow(monkeypatch, owner, method, 0.1)
    with capture(loop.model, loop.optimizer, every_n_steps=EVERY, max_overhead=0.3) as (watch, sink):
        loop.run(60)
        before, hook.slept = problems.seen(watch, sink), 0.0
        loop.run(60)
        after = problems.seen(watch, sink)
    assert before.value(monitor.EVERY_N_STEPS) == after.value(monitor.EVERY_N_STEPS) == EVERY
    assert paced(after)[part] >= 320
    assert {steps for name, steps in paced(after).items() if name != part} == {EVERY}
    assert hook.slept == 0
    assert len(after.find(activations.LAYER_ACTIVATION_MEAN)) == 4
    shown = [{sample.labels: sample.value for sample in shot.find(gradients.LAYER_GRAD_MAGNITUDE)} for shot in (before, after)]
    assert (shown[0] == shown[1]) is (part == "histograms"), "counters stand where nothing is counted"
    assert shown[0]
    assert any(f"{part} every {paced(after)[part]:g} (5)" in record.getMessage() for record in caplog.records)


def test_a_hook_that_is_fast_again_is_measured_as_asked_for_again(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Step by step, and each is said."""
    loop = Loop(0.01)
    hook = Slow(monkeypatch, ShapeGroup, "count_magnitudes", 0.02)
    with (
        caplog.at_level(logging.INFO, "otel_train"),
        capture(loop.model, loop.optimizer, every_n_steps=2, max_overhead=0.5) as (watch, sink),
    ):
        loop.run(20)
        assert paced(problems.seen(watch, sink))["histograms"] > 2
        hook.seconds = 0.0
        paces: list[set[float]] = []
        while len(paces) < 60 and (not paces or paces[-1] != {2}):
            loop.run(10)
            paces.append(set(paced(problems.seen(watch, sink)).values()))
    assert paces[-1] == {2}
    assert any("leaves room" in r.getMessage() and r.levelno == logging.INFO for r in caplog.records)


def test_without_a_limit_every_sample_is_taken_and_the_overhead_is_shown(monkeypatch: pytest.MonkeyPatch) -> None:
    """max_overhead=None: 0.01 s a shape in every other step of 0.01 s."""
    loop = Loop(0.01)
    hook = Slow(monkeypatch, ShapeGroup, "read_before", 0.01)
    with capture(loop.model, loop.optimizer, every_n_steps=2, max_overhead=None) as (watch, sink):
        loop.run(20)
        seen = problems.seen(watch, sink)
    assert hook.slept == pytest.approx(11 * SHAPES * 0.01)
    assert seen.value(monitor.EVERY_N_STEPS) == 2
    assert (seen.value(monitor.OVERHEAD) or 0.0) > 0.5


def test_parts_that_are_off_have_no_pace() -> None:
    """Gradients are always read where there is an optimizer."""
    loop = Loop(0.0)
    with capture(loop.model, loop.optimizer, updates="off", histograms="off", activations=False) as (watch, sink):
        assert paced(problems.seen(watch, sink)) == {"gradients": 10}
    with capture(loop.model, None) as (watch, sink):
        assert paced(problems.seen(watch, sink)) == {"activations": 10}
