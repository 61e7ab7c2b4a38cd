"""What the monitor's threads do with the budget, without a training: steps as records, and a recorder that stands still."""

from __future__ import annotations

import logging
from dataclasses import replace
from types import SimpleNamespace

import pytest

from otel_train.budget import Pace
from otel_train.config import MonitorConfig
from otel_train.hooks.cadence import Cadence
from otel_train.pacing import Pacer
from otel_train.records import Agreement
from tests.assembly.test_assembly import STEP

EVERY = 10


def pacer(*, alone: bool = True, max_overhead: float | None = 0.01) -> Pacer:
    """Return the pacer of a training that is at its 50th step."""
    recorder = SimpleNamespace(cadence=Cadence(Pace.regular(EVERY), [1]), attempt=50)
    made = Pacer(recorder, MonitorConfig(every_n_steps=EVERY, max_overhead=max_overhead))  # type: ignore[arg-type]  # looks alike
    made.alone = alone
    return made


def take(given: Pacer, numbers: range, *, seconds: float = 0.1, gradients: float = 0.0, threads: float = 0.0) -> Pace:
    """Take steps, of which each tenth costs something; return the last wish."""
    wish = Pace.regular(EVERY)
    for number in numbers:
        costs = {"gradients": gradients} if number == 1 or number % EVERY == 0 else {}
        record = replace(STEP, duration=seconds + sum(costs.values()), attempt=number, costs=costs)
        wish = given.add(record, 0.0, threads=threads * number, ranks=0.0)
    return wish


def test_what_was_spent_is_urgent_once_it_is_more_than_the_budget_of_a_second() -> None:
    """0.01 s of samples; hooks in the loop do not count, and what has been looked at is forgotten."""
    given = pacer()
    assert not given.is_urgent({"loop": 1.0, "gradients": 0.006})
    assert given.is_urgent({"updates": 0.006})
    take(given, range(1, 2))
    assert not given.is_urgent({"updates": 0.006})
    assert not pacer(max_overhead=None).is_urgent({"updates": 60.0})


def test_alone_the_wish_comes_true_from_the_next_step_on() -> None:
    """The training is at its 50th."""
    given = pacer()
    take(given, range(1, 12), gradients=0.05)
    assert given.pace == Pace.regular(EVERY)
    schedule = given._recorder.cadence.schedule
    assert (schedule.start, schedule.following) == (51, Pace.regular(8 * EVERY))


def test_a_change_that_has_not_come_about_is_not_followed_by_another() -> None:
    """Steps of before it tell of the old pace."""
    given = pacer()
    take(given, range(1, 12), gradients=0.05)
    before = given._recorder.cadence.schedule
    take(given, range(12, 51), gradients=5.0)
    assert given._recorder.cadence.schedule is before


def test_with_others_the_wish_waits_for_what_all_agree_on() -> None:
    """And begins where they say; the log names the other rank if it is not this one's cost."""
    given = pacer(alone=False)
    assert take(given, range(1, 12), gradients=0.05) == Pace.regular(8 * EVERY)
    assert given._recorder.cadence.schedule.following == Pace.regular(EVERY)
    given.meet(60, Agreement(Pace.regular(16 * EVERY), 70))
    schedule = given._recorder.cadence.schedule
    assert (schedule.start, schedule.following) == (70, Pace.regular(16 * EVERY))


def test_what_ranks_agreed_on_at_a_sample_of_before_the_last_change_is_not_followed() -> None:
    """It was on its way when they did; at the first sample of the new pace they decide again."""
    given = pacer(alone=False)
    given.meet(50, Agreement(Pace.regular(2 * EVERY), 70))
    changed = given._recorder.cadence.schedule
    given.meet(60, Agreement(Pace.regular(8 * EVERY), 75))
    assert given._recorder.cadence.schedule == changed
    given.meet(80, Agreement(Pace.regular(4 * EVERY), 95))
    assert given._recorder.cadence.schedule == changed.then(Pace.regular(4 * EVERY), 95)


def test_ranks_that_do_not_come_for_long_leave_the_decision_to_this_one() -> None:
    """After three samples, not before; a meeting in between counts."""
    given = pacer(alone=False)
    take(given, range(1, 12), gradients=0.05)
    agreed = Agreement(Pace.regular(EVERY), 60)
    for met in (None, None, agreed, None, None):
        given.meet(40, met)
    assert given._recorder.cadence.schedule.following == Pace.regular(EVERY)
    given.meet(40, None)
    assert given._recorder.cadence.schedule.following == Pace.regular(8 * EVERY)


def test_the_horizon_is_half_a_second_away() -> None:
    """In steps of 0.1 s; before a step has been timed, the next step."""
    given = pacer()
    assert given.horizon == 51
    take(given, range(1, 12))
    assert given.horizon == 56


def test_what_every_step_costs_is_said_once_if_it_alone_is_too_much(caplog: pytest.LogCaptureFixture) -> None:
    """2 % in the monitor's own threads."""
    with caplog.at_level(logging.WARNING, "otel_train"):
        take(pacer(), range(1, 101), threads=0.002)
        (line,) = [record.getMessage() for record in caplog.records]
        assert "2.00 % of the training's time" in line
        take(pacer(max_overhead=0.03), range(1, 101), threads=0.002)
        take(pacer(max_overhead=None), range(1, 101), threads=0.002)
        assert len(caplog.records) == 1
