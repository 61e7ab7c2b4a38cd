"""A run that is interrupted and resumed shows what an uninterrupted one does: detectors, schedules, steps, tokens."""

from __future__ import annotations

import io
import json
import math
import random
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import nn

from otel_train import ConfigError
from otel_train.assembly import Assembler, LiveState
from otel_train.assembly.state import VERSION, RunState, read_state
from otel_train.catalog import MetricSpec, gradients, loss, run, throughput
from otel_train.records import GroupSettings, StepRecord
from otel_train.snapshot import Snapshot
from otel_train.testing import capture
from tests import problems
from tests.assembly.test_assembly import FACTS, STEP
from tests.problems import Mlp

SPIKES = (loss.LOSS_SPIKES, gradients.GRAD_NORM_SPIKES)


def step(value: float, norm: float | None = None, rate: float = 1e-3) -> StepRecord:
    """Return a step of one loss, a gradient norm, and the rate of a schedule that no scheduler declares."""
    return replace(STEP, losses=(value,), grad_norm=norm, groups=(GroupSettings("AdamW", "0", rate, None),))


def take(assembler: Assembler, records: list[StepRecord]) -> list[tuple[Any, ...]]:
    """Add steps; return what the run showed after each: smoothed loss, rate over its peak, and spikes by this step."""
    shown: list[tuple[Any, ...]] = []
    before = dict.fromkeys(SPIKES, 0.0)
    for record in records:
        assembler.add(record)
        shot = assembler.snapshot(LiveState(), 0.0)
        counts = {spec: sum(s.value for s in shot.find(spec) if isinstance(s.value, (int, float))) for spec in SPIKES}
        spikes = tuple(counts[spec] - before[spec] for spec in SPIKES)
        shown.append((shot.value(loss.LOSS_SMOOTHED), shot.value(run.LEARNING_RATE_SCHEDULE_RATIO), *spikes))
        before = counts
    return shown


def fresh(world_size: int = 1) -> Assembler:
    """Return the assembler of a process that has just begun."""
    return Assembler(replace(FACTS, world_size=world_size), lambda _: None)


def resumed(records: list[StepRecord], cut: int, *, version: int = VERSION) -> list[tuple[Any, ...]]:
    """Take the steps in two processes, with a state in JSON between them; return what the second one showed."""
    first, second = fresh(), fresh()
    take(first, records[:cut])
    state = json.loads(json.dumps(first.state().plain(), allow_nan=False))
    if version == 1:
        state = {"step": state["step"], "tokens_seen": state["tokens_seen"]}
    second.restore(read_state(state))
    return take(second, records[cut:])


def eventful() -> list[StepRecord]:
    """Return 300 steps with spikes, NaN losses, norms that are not always known, and a rate that rises and falls."""
    rng = random.Random(0)
    losses = [3.0 + rng.gauss(0.0, 0.1) for _ in range(300)]
    norms: list[float | None] = [math.exp(rng.gauss(0.0, 0.3)) for _ in range(300)]
    for index in (70, 131, 200, 260):
        losses[index], norms[index + 1] = 9.0, 50.0
    losses[90] = losses[199] = math.nan
    norms[150:155] = [None] * 5
    norms[160], norms[161] = math.inf, 0.0
    rates = [min(i / 100, 1.0, (300 - i) / 100) * 1e-3 for i in range(300)]
    return [step(*row) for row in zip(losses, norms, rates, strict=True)]


def exact(rows: list[tuple[Any, ...]]) -> list[tuple[Any, ...]]:
    """Make NaN comparable."""
    return [tuple("NaN" if isinstance(v, float) and math.isnan(v) else v for v in row) for row in rows]


@pytest.mark.parametrize("cut", [1, 40, 69, 70, 71, 131, 199, 200, 259, 260])
def test_a_resumed_run_shows_bit_by_bit_what_an_uninterrupted_one_does(cut: int) -> None:
    """Wherever it was cut: before the 64th value, right before a spike, right after one, after a NaN, at every part of the schedule."""
    records = eventful()
    whole = take(fresh(), records)
    assert [i for i, row in enumerate(whole) if row[2]] == [70, 131, 200, 260]
    assert [i for i, row in enumerate(whole) if row[3]] == [71, 132, 201, 261]
    assert exact(resumed(records, cut)) == exact(whole[cut:])


def test_the_spike_right_after_the_resume_would_be_missed_without_the_history() -> None:
    """What the state is for: the old one, of step and tokens alone, begins anew."""
    records = eventful()
    with_history, without = resumed(records, 200), resumed(records, 200, version=1)
    assert [row[2:] for row in with_history[:2]] == [(1, 0), (0, 1)]
    assert [row[2:] for row in without[:2]] == [(0, 0), (0, 0)]
    assert without[0][0] == 9.0  # its average is of one loss


def test_no_spike_is_made_by_a_resume() -> None:
    """After a noisy time a value is no spike to a window that remembers it; to a new one it would be."""
    rng = random.Random(1)
    noisy = [3.0 + rng.gauss(0.0, 0.5) for _ in range(128)]
    records = [step(value) for value in [*noisy, *[3.0 + rng.gauss(0.0, 0.01) for _ in range(64)], 4.0]]
    assert sum(row[2] for row in take(fresh(), records)) == 0
    assert sum(row[2] for row in resumed(records, 128)) == 0
    assert sum(row[2] for row in resumed(records, 128, version=1)) == 1


def test_a_state_that_is_loaded_later_replaces_what_was_seen() -> None:
    """Rolled back within a process: windows, average, peaks are those of the checkpoint."""
    records = eventful()
    first, second = fresh(), fresh()
    take(first, records[:200])
    take(second, [replace(step(100.0, 1e6), groups=(GroupSettings("AdamW", "another", 1.0, None),))] * 70)
    second.restore(read_state(first.state().plain()))
    assert second.state() == first.state()
    assert exact(take(second, records[200:])) == exact(take(fresh(), records)[200:])
    assert second.state().step == 300


@pytest.mark.parametrize("worlds", [(4, 2), (2, 4), (4, 3, 8), (1, 1), (8, 1)])
def test_tokens_of_all_ranks_together_go_on_at_another_world_size(worlds: tuple[int, ...]) -> None:
    """An elastic restart: every rank loads the state of rank 0; to less than a token a rank, the sum is what was trained on."""
    trained, state = 0, None
    for world in worlds:
        ranks = [fresh(world) for _ in range(world)]
        for rank in ranks:
            if state is not None:
                rank.restore(read_state(state))
            for _ in range(5):
                rank.add(replace(STEP, tokens=1001))
        trained += 5 * 1001 * world
        assert sum(rank.tokens_seen for rank in ranks) == pytest.approx(trained, abs=sum(worlds))
        state = ranks[0].state().plain()
    assert ranks[0].step == 5 * len(worlds)


def test_tokens_stay_exact_where_a_float_would_not_be() -> None:
    """15 T tokens of 1,024 ranks."""
    tokens = 15 * 10**12 + 1
    assert RunState(1, tokens, 1024).tokens_on(1024) == tokens
    assert RunState(1, tokens, 1024).tokens_on(512) == 2 * tokens
    assert RunState(1, tokens).tokens_on(7) == tokens  # of before the world size was in it


def test_the_state_is_small_and_plain_however_long_the_run(tmp_path: Any) -> None:
    """torch.load reads it with weights_only, JSON has no NaN in it; after 2,000 steps it is as large as after 200."""
    assembler, sizes = fresh(), []
    for count in (200, 1800):
        for index in range(count):
            value = math.inf if index % 7 == 0 else math.nan if index % 5 == 0 else 1 / 3 + index % 3
            assembler.add(replace(step(value, value, rate=value), tokens=0))
        plain = assembler.state().plain()
        sizes.append(len(plain["loss_window"]) + len(plain["grad_norm_window"]))
        torch.save({"monitor": plain}, tmp_path / "state.pt")
        assert torch.load(tmp_path / "state.pt", weights_only=True) == {"monitor": plain}
        assert json.loads(json.dumps(plain, allow_nan=False)) == plain
        assert read_state(plain).plain() == plain
    assert sizes == [256, 256]
    assert plain["version"] == VERSION


GOOD = RunState(3, 30, 2, (1.0, 0.5), (1.0, 2.0), (0.5,), (("AdamW", "0", 0.1),)).plain()


def test_a_state_of_an_earlier_version_still_loads() -> None:
    """Step and tokens; detectors begin anew."""
    assert read_state({"step": 3, "tokens_seen": 30}) == RunState(3, 30)
    assert read_state(GOOD).plain() == GOOD


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("step", -1), ("step", "x"), ("step", None), ("step", math.inf), ("step", [1]), ("tokens_seen", -1), ("tokens_seen", None),
        ("version", 0), ("version", "new"), ("version", None), ("replicas", 0), ("replicas", "all"),
        ("smoothed_loss", [1.0]), ("smoothed_loss", [math.nan, 1.0]), ("smoothed_loss", [1.0, 0.0]), ("smoothed_loss", None),
        ("loss_window", [math.nan]), ("loss_window", ["a"]), ("loss_window", "123"), ("loss_window", 1.0), ("loss_window", [1.0] * 129),
        ("grad_norm_window", [-math.inf]), ("grad_norm_window", None),
        ("schedule_peaks", [["AdamW", "0"]]), ("schedule_peaks", [["AdamW", "0", math.nan]]), ("schedule_peaks", 3),
        ("schedule_peaks", [7]),
    ],
)  # fmt: skip
def test_a_bad_value_is_named_in_one_line(name: str, value: object) -> None:
    """And a missing one."""
    states: list[dict[str, Any]] = [{**GOOD, name: value}]
    if name != "version":
        states.append({key: kept for key, kept in GOOD.items() if key != name})
    for state in states:
        with pytest.raises(ConfigError, match=r"expected what Monitor\.state_dict returned") as raised:
            read_state(state)
        assert f"{name} is missing, or not as it was" in str(raised.value)
        assert "\n" not in str(raised.value)
        assert len(str(raised.value)) < 400


@pytest.mark.parametrize("state", [None, 3, "state", [1, 2], {}, {"model": torch.zeros(100, 100)}])
def test_what_is_no_state_at_all_is_refused_in_one_line(state: object) -> None:
    """Such as the model's."""
    with pytest.raises(ConfigError, match=r"expected what Monitor\.state_dict returned \(step, tokens_seen\), got ") as raised:
        read_state(state)
    assert "\n" not in str(raised.value)
    assert len(str(raised.value)) < 400


def test_a_state_of_a_later_version_is_refused() -> None:
    """What it means is not known yet."""
    with pytest.raises(ConfigError, match=f"has version {VERSION + 1}, this otel-train reads up to {VERSION}: update it"):
        read_state({**GOOD, "version": VERSION + 1})


def test_a_bad_state_changes_nothing() -> None:
    """Neither the step nor the number of resumes."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        monitor.load_state_dict({"step": 5, "tokens_seen": 50})
        with pytest.raises(ConfigError):
            monitor.load_state_dict({**GOOD, "loss_window": [math.nan]})
        snapshot = problems.seen(monitor, sink)
    assert (snapshot.value(run.STEP), snapshot.value(run.RESUMES)) == (5, 1)


def losses_until(count: int) -> list[float]:
    """Return losses with a spike as the last."""
    rng = random.Random(2)
    return [*(2.0 + rng.gauss(0.0, 0.05) for _ in range(count - 1)), 4.0]


def test_a_training_that_is_resumed_from_a_checkpoint_finds_the_spike_that_comes_first() -> None:
    """Through a checkpoint of torch; counters begin at 0, gauges go on, the resume is counted."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    values, buffer = losses_until(101), io.BytesIO()

    def train(monitor: Any, losses: list[float]) -> None:
        for value in losses:
            problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            monitor.observe(loss=value, tokens=8)

    with capture(model, optimizer, every_n_steps=50) as (monitor, sink):
        train(monitor, values)
        uninterrupted = problems.seen(monitor, sink)
    with capture(model, optimizer, every_n_steps=50) as (monitor, _):
        train(monitor, values[:-1])
        torch.save({"monitor": monitor.state_dict()}, buffer)
    buffer.seek(0)
    with capture(model, optimizer, every_n_steps=50) as (monitor, sink):
        monitor.load_state_dict(torch.load(buffer, weights_only=True)["monitor"])
        train(monitor, values[-1:])
        again = problems.seen(monitor, sink)
    for spec in (run.STEP, run.TOKENS_SEEN, loss.LOSS_SMOOTHED):
        assert again.value(spec) == uninterrupted.value(spec) is not None
    assert again.value(loss.LOSS_SPIKES, phase="main") == uninterrupted.value(loss.LOSS_SPIKES, phase="main") == 1
    assert (again.value(run.STEPS), again.value(throughput.TOKENS), again.value(run.RESUMES)) == (1, 8, 1)


def test_a_monitor_that_is_closed_and_attached_again_goes_on_with_its_state() -> None:
    """Within a process; a closed one can still be asked, and without its state the new one is at 0."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, _):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        monitor.observe(loss=1.0, tokens=8)
        state = monitor.state_dict()
    assert monitor.state_dict() == state
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        assert problems.seen(monitor, sink).value(run.STEP) == 0
        monitor.load_state_dict(state)
        optimizer.step()
        monitor.observe(loss=3.0, tokens=8)
        snapshot = problems.seen(monitor, sink)
    assert [snapshot.value(spec) for spec in (run.STEP, run.SAMPLED_STEP, run.TOKENS_SEEN, run.STEPS)] == [2, 2, 16, 1]
    assert snapshot.value(loss.LOSS_SMOOTHED) == pytest.approx((0.99 * 1.0 + 3.0) / 1.99)


def test_a_disabled_monitor_has_a_state_that_loads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Checkpoints of a run that is not watched are checkpoints."""
    monkeypatch.setenv("OTEL_SDK_DISABLED", "true")
    model = Mlp(hidden=16)
    with capture(model, torch.optim.SGD(model.parameters())) as (monitor, _):
        assert read_state(monitor.state_dict()) == RunState(0, 0)
        with pytest.raises(ConfigError):
            monitor.load_state_dict({})


def scheduled(model: nn.Module, *, done: int, declared: bool) -> tuple[torch.optim.Optimizer, Any]:
    """Return an optimizer, and a warmup of 100 steps to 0.1 of which some are done; as a scheduler, or as a user's own."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    if declared:
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda n: min((n + 1) / 100, 1.0))
        for _ in range(done):
            optimizer.step()
            scheduler.step()
        return optimizer, scheduler
    return optimizer, None


def first_step_after(state: dict[str, Any], *, done: int, scale: float | None = None) -> Snapshot:
    """Resume with a schedule that has done so many steps, or with a rate by hand, and make a step."""
    model = Mlp(hidden=16)
    optimizer, _ = scheduled(model, done=done, declared=scale is None)
    if scale is not None:
        optimizer.param_groups[0]["lr"] *= scale
    with capture(model, optimizer, every_n_steps=1, warmup_steps=100) as (monitor, sink):
        monitor.load_state_dict(state)
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        return problems.seen(monitor, sink)


def ratio_after(state: dict[str, Any], spec: MetricSpec, **how: Any) -> float | None:
    """Return a ratio of the learning rate at the first step after a resume."""
    return first_step_after(state, **how).value(spec)


def test_a_scheduler_that_was_not_resumed_with_the_step_shows_at_once() -> None:
    """Lightning #4655: it lags behind; huggingface/diffusers PR #8312: it runs ahead, by a step for each process."""
    state = RunState(50, 0).plain()
    for done, expected in ((50, 51 / 51), (40, 41 / 51), (0, 1 / 51), (99, 100 / 51)):
        found = ratio_after(state, run.LEARNING_RATE_EXPECTED_RATIO, done=done)
        assert found == pytest.approx(expected, rel=1e-6)


def test_a_rate_that_jumped_over_a_resume_shows_against_the_peak_of_before() -> None:
    """facebookresearch/ParlAI PR #1812: 1e-4 of it; mosaicml/llm-foundry #194, facebookresearch/DPR #99: 0, or stuck."""
    state = RunState(500, 0, 1, schedule_peaks=(("SGD", "0", 0.1),)).plain()
    for scale in (1.0, 1e-4, 0.0):
        assert ratio_after(state, run.LEARNING_RATE_SCHEDULE_RATIO, done=0, scale=scale) == pytest.approx(scale)
    # without the peak of before nothing would stand out: the first rate seen is taken for a beginning
    assert ratio_after({"step": 500, "tokens_seen": 0}, run.LEARNING_RATE_SCHEDULE_RATIO, done=0, scale=1e-4) is None


def test_a_resume_that_repeats_steps_follows_the_users_step() -> None:
    """wandb/wandb #2258: a step of its own that went on from where it had stopped, not from the checkpoint."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=2) as (monitor, sink):
        steps = []
        for index in range(8):
            if index == 2:
                state = monitor.state_dict()
            if index == 6:
                monitor.load_state_dict(state)  # back to the checkpoint
            optimizer.step()
            snapshot = problems.seen(monitor, sink)
            steps.append((snapshot.value(run.STEP), snapshot.value(run.STEPS)))
    assert steps == [(1, 1), (2, 2), (3, 3), (4, 4), (5, 5), (6, 6), (3, 7), (4, 8)]
