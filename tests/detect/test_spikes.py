"""Spikes, phases of the schedule, and the smoothed loss."""

from __future__ import annotations

import math
import random

import pytest

from otel_train.detect.spikes import LEAST, SIGMAS, WINDOW, Smoothed, SpikeDetector, schedule_phase


def _filled(values: list[float], *, logarithmic: bool = False) -> SpikeDetector:
    detector = SpikeDetector(logarithmic=logarithmic)
    for value in values:
        detector.is_spike(value)
    return detector


def _limit(values: list[float]) -> float:
    """Mean and six population standard deviations of the last 128 values, the plain way."""
    last = values[-128:]
    mean = sum(last) / len(last)
    return mean + 6 * math.sqrt(sum((v - mean) ** 2 for v in last) / len(last))


@pytest.mark.parametrize("count", [64, 100, 128, 300])
def test_six_standard_deviations_above_the_mean_are_a_spike(count: int) -> None:
    """Just below is none, just above is one; only the last 128 values count."""
    rng = random.Random(count)
    values = [100.0 if i < count - 128 else rng.gauss(3.0, 0.5) for i in range(count)]
    limit = _limit(values)
    assert not _filled(values).is_spike(limit - 1e-6)
    assert _filled(values).is_spike(limit + 1e-6)


def test_a_drop_is_no_spike() -> None:
    """However far down."""
    rng = random.Random(0)
    assert not _filled([rng.gauss(3.0, 0.5) for _ in range(128)]).is_spike(-1e9)


@pytest.mark.parametrize("logarithmic", [False, True])
def test_nothing_is_said_before_64_values(*, logarithmic: bool) -> None:
    """The 64th value is still compared with 63 only; the 65th is judged."""
    values = [1.0 + 0.01 * (i % 3) for i in range(63)]
    assert not _filled(values, logarithmic=logarithmic).is_spike(1e9)
    assert _filled([*values, 1.0], logarithmic=logarithmic).is_spike(1e9)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_nonfinite_values_are_no_spikes_and_leave_the_window_alone(bad: float, *, logarithmic: bool) -> None:
    """A NaN neither counts to the 64 nor poisons what comes after."""
    values = [1.0 + 0.01 * (i % 3) for i in range(63)]
    detector = _filled(values, logarithmic=logarithmic)
    assert not any(detector.is_spike(bad) for _ in range(200))
    assert not detector.is_spike(1.0)  # the 64th
    assert not detector.is_spike(1.01)
    assert detector.is_spike(100.0)


@pytest.mark.parametrize("bad", [0.0, -1.0])
def test_norms_that_have_no_logarithm_are_left_out(bad: float) -> None:
    """Zero and negative ones."""
    detector = _filled([1.0 + 0.01 * (i % 3) for i in range(64)], logarithmic=True)
    assert not any(detector.is_spike(bad) for _ in range(200))
    assert not detector.is_spike(1.01)
    assert detector.is_spike(100.0)


@pytest.mark.parametrize("value", [0.0, 0.1, 1 / 3, -2.7, 1e-12, 1e12])
@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_constant_series_does_not_alarm(value: float, *, logarithmic: bool) -> None:
    """Equal values never stand out."""
    detector = SpikeDetector(logarithmic=logarithmic)
    assert not any(detector.is_spike(value) for _ in range(300))


@pytest.mark.parametrize("logarithmic", [False, True])
def test_a_window_of_equal_values_makes_noise_no_spike(*, logarithmic: bool) -> None:
    """A thousandth counts as the least deviation: 0.5 % above is none, 0.7 % above is one."""
    assert not _filled([4.0] * 100, logarithmic=logarithmic).is_spike(4.0 * 1.005)
    assert _filled([4.0] * 100, logarithmic=logarithmic).is_spike(4.0 * 1.007)


def test_norms_are_compared_by_their_logarithms() -> None:
    """The limit is six deviations of the logarithms."""
    rng = random.Random(1)
    logarithms = [rng.gauss(0.0, 1.0) for _ in range(128)]
    limit = _limit(logarithms)
    values = [math.exp(v) for v in logarithms]
    assert not _filled(values, logarithmic=True).is_spike(math.exp(limit - 1e-6))
    assert _filled(values, logarithmic=True).is_spike(math.exp(limit + 1e-6))


def test_log_normal_norms_alarm_by_logarithms_hardly_ever() -> None:
    """10,000 steps without a spike: none is found by logarithms."""
    rng = random.Random(2)
    detector = SpikeDetector(logarithmic=True)
    assert sum(detector.is_spike(math.exp(rng.gauss(0.0, 0.5))) for _ in range(10_000)) == 0


def test_a_spike_enters_the_window() -> None:
    """A new level is an alarm at first, and none for ever."""
    detector = _filled([1.0 + 0.01 * (i % 3) for i in range(128)])
    found = [detector.is_spike(5.0) for _ in range(128)]
    assert found[0]
    assert not any(found[20:])


def test_the_rule_is_olmos() -> None:
    """128 values, 6 deviations, silence before 64."""
    assert (WINDOW, LEAST, SIGMAS) == (128, 64, 6.0)


@pytest.mark.parametrize(
    ("step", "warmup", "planned", "phase"),
    [
        (1, None, None, "main"),
        (1, 0, 1000, "main"),
        (1, 100, 1000, "warmup"),
        (100, 100, 1000, "warmup"),
        (101, 100, 1000, "peak"),
        (200, 100, 1000, "peak"),
        (201, 100, 1000, "main"),
        (101, 100, None, "peak"),
        (200, 100, None, "peak"),
        (201, 100, None, "main"),
        (10_500, 500, 100_000, "peak"),
        (10_501, 500, 100_000, "main"),
        (11, 10, 5, "main"),
    ],
)
def test_the_phase_follows_the_table(step: int, warmup: int | None, planned: int | None, phase: str) -> None:
    """Warmup, then a tenth of the run (or as long as the warmup), then the rest."""
    assert schedule_phase(step, warmup, planned) == phase


@pytest.mark.parametrize("decay", [0.0, 0.5, 0.99, 0.999])
def test_the_average_is_weighted_and_corrected_as_written_out(decay: float) -> None:
    """Sum of decay^age x value over sum of decay^age, at every step."""
    rng = random.Random(3)
    values = [rng.gauss(2.0, 1.0) for _ in range(200)]
    smoothed = Smoothed(decay)
    for i, value in enumerate(values):
        weights = [decay ** (i - j) for j in range(i + 1)]
        expected = math.fsum(w * v for w, v in zip(weights, values, strict=False)) / math.fsum(weights)
        assert smoothed.add(value) == pytest.approx(expected, rel=1e-9, abs=1e-12)


@pytest.mark.parametrize("bad", [math.nan, math.inf, -math.inf])
def test_nonfinite_values_do_not_enter_the_average(bad: float) -> None:
    """They give NaN, and the next value's average is as if they had not been."""
    with_bad, without = Smoothed(), Smoothed()
    assert math.isnan(with_bad.add(bad))
    assert with_bad.add(3.0) == without.add(3.0) == pytest.approx(3.0, rel=1e-12)
    assert math.isnan(with_bad.add(bad))
    assert with_bad.add(5.0) == without.add(5.0)
