"""The budget: trainings of numbers alone, whose samples cost what the test says."""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Mapping

import pytest

from otel_train.budget import Budget, Pace, Schedule

MOST = 0.01
EVERY = 10
STEP = 0.1
"""Seconds."""
PARTS = ("gradients", "histograms", "updates", "activations", "readout")


class Training:
    """A training whose steps take 0.1 s, and a monitor that samples it.

    Args:
        costs: Seconds a sample by part.
        loop: Seconds a step.
        noise: What each cost is multiplied by.
    """

    def __init__(
        self, costs: Mapping[str, float], *, loop: float = 0.0, most: float | None = MOST, noise: Callable[[], float] = lambda: 1.0
    ) -> None:
        self.budget = Budget(EVERY, most)
        self.costs, self.loop, self.noise = dict(costs), loop, noise
        self.number = 0
        self.schedule = Schedule(Pace.regular(EVERY), Pace.regular(EVERY))
        self.paces: list[tuple[int, Pace]] = []
        """Each change, by the step at which it was decided."""
        self.own: list[float] = []
        """Own seconds in each step."""

    @property
    def pace(self) -> Pace:
        return self.schedule.following

    def run(self, steps: int) -> Training:
        """Go on for so many steps."""
        for _ in range(steps):
            self.number += 1
            pace = self.schedule.at(self.number)
            due = pace.is_sampled(self.number)
            measured = {part: cost * self.noise() for part, cost in self.costs.items() if due and pace.measures(part, self.number)}
            costs = {**measured, "loop": self.loop}
            self.own.append(sum(costs.values()))
            news = self.budget.add(STEP, costs, due=due)
            wish = self.budget.wish(self.pace) if (due or news) and self.number >= self.schedule.start else self.pace
            wish = wish if due else wish.common(self.pace)
            if wish != self.pace:
                self.paces.append((self.number, wish))
                self.schedule = self.schedule.then(wish, self.number + 1)
        return self

    def overhead(self, steps: int) -> float:
        """Return own seconds a second of training over the last steps."""
        return sum(self.own[-steps:]) / (steps * STEP)


def test_what_fits_is_sampled_as_often_as_asked_for() -> None:
    """0.9 % of the time, in many parts."""
    training = Training(dict.fromkeys(PARTS, 0.0018)).run(500)
    assert training.paces == []
    assert training.overhead(500) == pytest.approx(0.009, rel=0.03)


@pytest.mark.parametrize("cost", [0.011, 0.1, 2.0, 30.0])
def test_a_costly_sample_stretches_the_cadence_at_once_as_far_as_is_needed(cost: float) -> None:
    """After two samples, by one decision; within the budget, and more than a third of it is used."""
    training = Training({"gradients": cost}).run(100)
    ((number, pace),) = training.paces
    assert number == EVERY
    assert cost / (pace.every_n_steps * STEP) <= MOST < 3 * cost / (pace.every_n_steps * STEP)
    assert training.budget.overhead(pace) == pytest.approx(cost / (pace.every_n_steps * STEP))
    periods = 2 * pace.every_n_steps
    assert training.run(periods).overhead(periods) <= MOST


@pytest.mark.parametrize("part", ["histograms", "activations"])
def test_a_part_that_alone_exceeds_the_budget_is_thinned_and_the_rest_stays(part: str) -> None:
    """To a quarter of the budget at most, so that the others have room."""
    training = Training({"gradients": 0.004, part: 0.05}).run(400)
    assert len(training.paces) == 1
    assert training.pace.every_n_steps == EVERY
    assert training.pace.of(part) == 32 * EVERY
    assert training.pace.of("gradients") == training.pace.of({"histograms": "activations"}.get(part, "histograms")) == EVERY
    assert training.run(1600).overhead(1600) <= MOST


def test_parts_that_exceed_it_only_together_are_not_thinned() -> None:
    """0.8 % each: all come half as often."""
    training = Training({"histograms": 0.008, "activations": 0.008}).run(200)
    assert training.pace == Pace.regular(2 * EVERY)


def test_a_part_that_is_thinned_is_left_alone_while_all_fits() -> None:
    """It has come to take 0.7 % of the 1 %; with 0.4 % more of another it is thinned further, and the other is not."""
    training = Training({"gradients": 0.001, "histograms": 0.05}).run(400)
    training.paces.clear()
    training.costs["histograms"] = 0.007 * 32
    training.run(4 * training.pace.histograms)
    assert training.paces == []
    training.costs["gradients"] = 0.004
    training.run(4 * training.pace.histograms)
    assert [pace for _, pace in training.paces] == [Pace(EVERY, 128 * EVERY, EVERY)]


def test_what_is_still_too_much_after_thinning_stretches_the_cadence_too() -> None:
    """No part is thinned twice for it: it comes as often as it would alone."""
    training = Training({"gradients": 0.028, "histograms": 0.2}).run(200)
    assert training.pace == Pace(4 * EVERY, 128 * EVERY, 4 * EVERY)
    assert training.run(2560).overhead(2560) <= MOST


def test_costs_that_are_gone_bring_the_cadence_back_by_halving_and_never_denser() -> None:
    """From 128 times as sparse to what was asked for."""
    training = Training({"gradients": 1.0, "activations": 1.0}).run(100)
    training.costs = {"gradients": 1e-4, "activations": 1e-4}
    before = training.pace
    training.paces.clear()
    training.run(20 * before.every_n_steps)
    cadences = [before.every_n_steps, *(pace.every_n_steps for _, pace in training.paces)]
    assert all(old in {new, 2 * new} for old, new in itertools.pairwise(cadences))
    assert training.pace == Pace.regular(EVERY)
    assert min(pace.activations for _, pace in training.paces) == EVERY


@pytest.mark.parametrize("seed", range(20))
def test_costs_that_vary_do_not_make_the_pace_flap(seed: int) -> None:
    """Any cost, varying by a fifth: once found, it changes at most twice in 300 samples more."""
    chance = random.Random(seed)
    costs = {part: 0.01 * 4 ** chance.uniform(-2, 4) for part in ("gradients", "histograms", "activations")}
    training = Training(costs, noise=lambda: chance.uniform(0.8, 1.2)).run(5000)
    training.paces.clear()
    training.run(300 * training.pace.every_n_steps)
    assert len(training.paces) <= 2
    longest = max(training.pace.histograms, training.pace.activations)
    assert training.run(4 * longest).overhead(4 * longest) <= 1.2 * MOST


@pytest.mark.parametrize("seed", range(20))
def test_no_change_makes_one_part_denser_and_another_more_sparing(seed: int) -> None:
    """Whatever costs do: it could not be told whether there is too much or room."""
    chance = random.Random(seed)
    training = Training({})
    for _ in range(30):
        training.costs = {part: 0.01 * 4 ** chance.uniform(-3, 3) for part in ("gradients", "histograms", "activations")}
        training.run(5 * training.pace.every_n_steps)
    paces = [Pace.regular(EVERY), *(pace for _, pace in training.paces)]
    assert len(paces) > 10
    assert all(new.common(old) in {new, old} for old, new in itertools.pairwise(paces))


@pytest.mark.parametrize("hiccup", [1, 500])
def test_one_hiccup_and_the_cold_first_sample_change_nothing(hiccup: int) -> None:
    """Each a hundred times what samples cost."""
    training = Training({"updates": 0.005})
    training.run(hiccup - 1)
    training.noise = lambda: 100.0
    training.run(1)
    training.noise = lambda: 1.0
    assert training.run(500).paces == []


def test_what_every_step_costs_leaves_less_for_samples() -> None:
    """0.6 % in the loop and 0.6 % of samples: half as often."""
    assert Training({"gradients": 0.006}, loop=0.0006).run(200).pace == Pace.regular(2 * EVERY)


def test_what_every_step_costs_is_heeded_before_a_sample_that_is_far() -> None:
    """0.4 % in the loop, which is known only after the cadence has been stretched for the samples alone."""
    training = Training({"gradients": 2.0}, loop=0.0004).run(100)
    first, second = (pace for _, pace in training.paces)
    assert training.budget.overhead(first) == pytest.approx(0.0118, rel=0.01)
    assert (training.budget.overhead(second) or 1.0) <= MOST
    assert training.number < first.every_n_steps


def test_where_every_step_alone_exceeds_the_budget_samples_get_a_tenth_of_it() -> None:
    """They do not stop, and are no worse than that."""
    training = Training({"gradients": 0.006}, loop=0.005).run(2000)
    assert training.budget.steady == pytest.approx(0.05)
    assert training.pace == Pace.regular(8 * EVERY)


def test_without_a_limit_nothing_changes_and_the_overhead_is_known_all_the_same() -> None:
    """max_overhead=None."""
    training = Training({"gradients": 2.0}, most=None).run(100)
    assert training.paces == []
    assert training.budget.overhead(training.pace) == pytest.approx(2.0)


def test_before_a_step_has_been_timed_nothing_is_known_or_decided() -> None:
    """The first has no duration."""
    budget, pace = Budget(1, MOST), Pace.regular(1)
    budget.add(None, {"gradients": 1.0}, due=True)
    budget.add(None, {"gradients": 1.0}, due=True)
    assert budget.overhead(pace) is None
    assert budget.wish(pace) == pace


def test_what_optimizers_measure_in_later_steps_belongs_to_the_same_sample() -> None:
    """Two that step in turn, 0.6 % each: together too much."""
    budget, pace = Budget(EVERY, MOST), Pace.regular(EVERY)
    for number in range(1, 31):
        due = pace.is_sampled(number)
        costs = {"gradients": 0.006} if due or pace.is_sampled(number - 1) else {}
        budget.add(STEP, costs, due=due)
    assert budget.shares(pace)["gradients"] == pytest.approx(0.012)
    assert budget.wish(pace) == Pace.regular(2 * EVERY)


def test_what_a_sparing_pace_measures_a_denser_one_measures_too() -> None:
    """So ranks at different paces still meet; the first step is measured in full at any."""
    sparing, dense = Pace(40, 160, 80), Pace(20, 20, 40)
    for part in PARTS:
        steps = [{n for n in range(1, 1000) if pace.is_sampled(n) and pace.measures(part, n)} for pace in (sparing, dense)]
        assert {1} < steps[0] < steps[1]


def test_a_schedule_goes_over_at_the_agreed_step() -> None:
    """Not before it, and from there to the next."""
    first, second, third = Pace.regular(1), Pace.regular(2), Pace.regular(4)
    schedule = Schedule(first, first).then(second, 7)
    assert [schedule.at(n) for n in (1, 6, 7, 100)] == [first, first, second, second]
    assert [schedule.then(third, 20).at(n) for n in (6, 19, 20)] == [second, second, third]
