"""Snapshots: a histogram by powers of two."""

from __future__ import annotations

from otel_train.snapshot import Exponential, HistogramValue


def test_a_histogram_by_powers_of_two_keeps_each_count_in_its_bucket() -> None:
    """Zero bucket up to 1/4, then (1/4, 1/2], (1/2, 1], and (1, 2] with what is larger."""
    counted = HistogramValue((0.25, 0.5, 1.0), counts=(5, 4, 3, 2), total=7.5)

    assert counted.exponential() == Exponential(zero_threshold=0.25, zero_count=5, first=-1, positive=(4, 3, 2), total=7.5)
    assert counted.exponential().count == 14


def test_signed_values_by_powers_of_two_have_a_side_below_zero() -> None:
    """Native buckets are mirrored: -1/2 is in [-1/2, -1/4), where classic ones have it in (-1, -1/2]."""
    counted = HistogramValue((-0.5, -0.25, 0.25, 0.5), counts=(2, 3, 6, 1, 4), total=-1.5, negative=(4, 1))

    assert counted.exponential() == Exponential(0.25, zero_count=6, first=-1, positive=(1, 4), total=-1.5, negative=(4, 1))
    assert counted.exponential().count == 16
