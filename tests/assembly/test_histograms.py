"""Histograms that grow: whole elements of fractions, and two conventions of buckets from one count."""

from __future__ import annotations

import itertools
import random

import pytest

from otel_train.assembly.histograms import MAGNITUDE_BINS, VALUE_BINS, GradientHistograms, Histogram, SignedHistogram
from otel_train.catalog import gradients
from otel_train.records import Layer, ParameterReading, ParameterSums, Signs
from otel_train.snapshot import HistogramValue

BINS = len(MAGNITUDE_BINS) + 1
LAYER = Layer("fc", 1, "matrix", "0")


def counted(values: list[float], factor: float = 1.0) -> tuple[list[float], Signs]:
    """Count values as the device does, each standing for some elements."""
    bins = [next((i for i, bound in enumerate(MAGNITUDE_BINS) if abs(value) <= bound), BINS - 1) for value in values]
    below = [i for i, value in zip(bins, values, strict=True) if value < 0]
    return (
        [factor * bins.count(i) for i in range(BINS)],
        Signs(
            tuple(factor * below.count(i) for i in range(1, BINS)),
            tuple(factor * values.count(-bound) for bound in MAGNITUDE_BINS),
            factor * sum(values),
        ),
    )


def values_by(chance: random.Random, count: int) -> list[float]:
    """Return values of both signs over the whole range and beyond, the half of them exact powers of two."""
    sizes = (2.0 ** chance.randint(-50, 20) * chance.choice([1.0, chance.uniform(1, 2)]) for _ in range(count))
    return [chance.choice([-1, 1]) * size for size in sizes]


def test_each_bin_is_rounded_by_itself() -> None:
    """A bin whose count fell by one, for what the bins before it were rounded to, would be a restart to a native histogram."""
    chance = random.Random(0)
    histogram, signed = Histogram(MAGNITUDE_BINS), SignedHistogram()
    shown: list[tuple[int, ...]] = []
    for _ in range(200):
        counts, signs = counted(values_by(chance, 20), factor=0.3)
        histogram.add(counts, 1.0)
        signed.add(counts, signs)
        both = signed.value().exponential()
        shown.append((*histogram.value().counts, both.zero_count, *both.positive, *both.negative, both.count))
    for before, after in itertools.pairwise(shown):
        assert all(a <= b for a, b in zip(before, after, strict=True))
    assert shown[-1][-1] == pytest.approx(200 * 20 * 0.3, abs=2 * BINS)


@pytest.mark.parametrize("factor", [1.0, 0.3])
def test_classic_and_native_buckets_come_of_one_count(factor: float) -> None:
    """Buckets of both kinds ascend, agree on all elements, and are those of the values where each stands for itself."""
    values = [*values_by(random.Random(1), 3000), 0.0, -0.0]
    signed = SignedHistogram()
    for value in values:
        signed.add(*counted([value], factor))
    found = signed.value()
    assert found.bounds == VALUE_BINS
    assert min(found.counts) >= 0
    native = found.exponential()
    assert min(native.zero_count, *native.negative, *native.positive) >= 0
    assert native.count == sum(found.counts)
    if factor == 1.0:
        upto = [sum(value <= bound for value in values) for bound in VALUE_BINS]
        assert [count for _, count in found.cumulated(VALUE_BINS)[0]] == upto
        assert native.negative[-1] == sum(value < -(2.0**16) for value in values)
        assert native.negative[0] == sum(-(2.0**-45) <= value < -(2.0**-46) for value in values)
        assert native.zero_count == sum(abs(value) <= 2.0**-46 for value in values)


def test_parameters_of_a_block_join_one_histogram_of_each_kind() -> None:
    """Signed ones only of what has signs; none of a parameter without a layer, or one that was not counted."""
    histograms = GradientHistograms()
    counts, signs = counted([1.0, -1.0, -3.0])
    sums = ParameterSums(3, 0.0, 0.0, 0.0, 0, 0, magnitudes=tuple(counts), magnitude_sum=5.0)
    for layer, one in ((LAYER, sums), (LAYER, ParameterSums(3, 0.0, 0.0, 0.0, 0, 0)), (None, sums)):
        histograms.add(ParameterReading(layer, layer, one))
    assert [(sample.spec, sample.labels[0]) for sample in histograms.samples()] == [(gradients.LAYER_GRAD_MAGNITUDE, "fc")]
    signed = ParameterSums(3, 0.0, 0.0, 0.0, 0, 0, magnitudes=tuple(counts), magnitude_sum=5.0, signs=signs)
    histograms.add(ParameterReading(LAYER, LAYER, signed))
    magnitudes, values = (sample.value for sample in histograms.samples())
    assert isinstance(magnitudes, HistogramValue)
    assert isinstance(values, HistogramValue)
    assert (sum(magnitudes.counts), magnitudes.total, sum(magnitudes.negative)) == (6, 10.0, 0)
    assert (sum(values.counts), values.total, sum(values.negative)) == (3, -3.0, 2)
