"""Which optimizers are measured at which steps, at paces that change."""

from __future__ import annotations

from otel_train.budget import Pace
from otel_train.hooks.cadence import RECENT, Cadence

FIRST, SECOND = 1, 2


def measured(cadence: Cadence, optimizer: int, steps: range) -> list[tuple[int, bool]]:
    """Let an optimizer step; return where it was measured, and whether with histograms."""
    found = []
    for number in steps:
        if cadence.begins(optimizer, number):
            found.append((number, cadence.counts_histograms(optimizer)))
            cadence.measured(optimizer)
    return found


def test_histograms_come_at_their_own_pace() -> None:
    """The first sample is whole."""
    cadence = Cadence(Pace(5, 20, 10), [FIRST])
    assert measured(cadence, FIRST, range(1, 26)) == [(1, True), (5, False), (10, False), (15, False), (20, True), (25, False)]
    assert [n for n in range(1, 31) if cadence.measures("activations", n)] == [1, 10, 20, 30]


def test_an_optimizer_that_comes_late_does_not_miss_the_histograms_that_fell_due() -> None:
    """It does not step for two samples, of which the first was whole."""
    cadence = Cadence(Pace(5, 20, 5), [FIRST, SECOND])
    measured(cadence, SECOND, range(1, 20))
    measured(cadence, FIRST, range(1, 27))
    assert measured(cadence, SECOND, range(27, 36)) == [(27, True), (30, False), (35, False)]


def test_a_new_pace_holds_from_its_step_on() -> None:
    """Not from when it was decided."""
    cadence = Cadence(Pace.regular(5), [FIRST])
    cadence.schedule = cadence.schedule.then(Pace.regular(20), 12)
    assert measured(cadence, FIRST, range(1, 45)) == [(1, True), (5, True), (10, True), (20, True), (40, True)]


def test_a_sample_is_shown_until_two_more_should_have_come() -> None:
    """Activations by their own pace; what is sampled often still for a while."""
    cadence = Cadence(Pace.regular(5), [FIRST])
    assert (cadence.patience(FIRST), cadence.patience(None)) == (RECENT, RECENT)
    cadence.schedule = cadence.schedule.then(Pace(80, 80, 640), 12)
    assert (cadence.patience(FIRST), cadence.patience(None)) == (160, 1280)
