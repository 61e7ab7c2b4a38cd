"""The peak of a learning-rate schedule: declared, or seen."""

from __future__ import annotations

import pytest

from otel_train.assembly.schedule import SchedulePeak


def peaks(*rates: float | None, declared: float | None = None) -> list[float | None]:
    """Return the peak as known after each rate."""
    peak, known = SchedulePeak(), []
    for rate in rates:
        peak.add(rate, declared)
        known.append(peak.value)
    return known


@pytest.mark.parametrize(
    ("rates", "expected"),
    [
        ((0.1, 0.1, 0.1), [None, 0.1, 0.1]),  # constant
        ((0.0, 0.1, 0.2, 0.3, 0.3, 0.2, 0.0), [None, None, None, None, 0.3, 0.3, 0.3]),  # warmup by hand, hold, decay
        ((0.3, 0.2, 0.3, 0.4, 0.1), [None, 0.3, 0.3, None, 0.4]),  # a restart above the old peak
        ((None, None), [None, None]),  # an optimizer without a rate
        ((0.0, 0.0), [None, None]),  # nothing to divide by
    ],
)
def test_an_undeclared_peak_is_known_once_the_rate_has_stopped_rising(
    rates: tuple[float | None, ...], expected: list[float | None]
) -> None:
    """A warmup written by hand does not look like a run at its peak."""
    assert peaks(*rates) == expected


def test_a_declared_peak_is_known_at_once() -> None:
    """And a rate that goes beyond it is the new peak."""
    assert peaks(0.01, 0.02, declared=0.3) == [0.3, 0.3]
    assert peaks(0.1, 0.4, 0.2, declared=0.3) == [0.3, 0.4, 0.4]


@pytest.mark.parametrize("cut", [1, 3, 5, 6])
def test_a_peak_goes_on_with_what_was_seen_before(cut: int) -> None:
    """After a resume, in whatever part of the schedule, the same is known as without one."""
    rates = (0.1, 0.2, 0.3, 0.3, 0.2, 0.4, 0.1)
    before, after = SchedulePeak(), SchedulePeak()
    for rate in rates[:cut]:
        before.add(rate, None)
    after.restore(before.largest)
    known = []
    for rate in rates[cut:]:
        after.add(rate, None)
        known.append(after.value)
    assert known == peaks(*rates)[cut:]
