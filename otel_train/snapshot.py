"""Frozen host values at one moment of a run, as sinks take them. Neither a checkpoint nor a memory snapshot. No torch here."""

from __future__ import annotations

import math
from bisect import bisect
from dataclasses import dataclass

from otel_train.catalog import MetricSpec


@dataclass(frozen=True, slots=True)
class Exponential:
    """A cumulative histogram by powers of two, as native and exponential histograms have it (base 2: schema 0, scale 0)."""

    zero_threshold: float
    """What is as small as that, or smaller, is in the zero bucket."""
    zero_count: int
    first: int
    """Power of two of the first bucket's upper bound: elements by size in (2^(first - 1), 2^first]."""
    positive: tuple[int, ...]
    """Elements a bucket, from the first on; the last holds what is larger too."""
    total: float
    """Sum of the values."""
    negative: tuple[int, ...] = ()
    """Elements below zero, by size in the same buckets; none where only sizes were counted."""

    @property
    def count(self) -> int:
        """Number of all elements."""
        return self.zero_count + sum(self.positive) + sum(self.negative)


@dataclass(frozen=True, slots=True)
class HistogramValue:
    """A cumulative histogram at the resolution at which it was counted."""

    bounds: tuple[float, ...]
    """Upper bounds, ascending, without +Inf."""
    counts: tuple[int, ...]
    """Elements in (previous bound, bound], one count a bound and one for what is larger; not cumulated over bounds."""
    total: float
    """Sum of the values."""
    negative: tuple[int, ...] = ()
    """Elements below zero as ``Exponential`` has them, which has exact powers of two in other buckets than ``counts``."""

    def cumulated(self, bounds: tuple[float, ...]) -> tuple[list[tuple[float, int]], int]:
        """Return (bound, number of elements up to it) for each of `bounds`, and the number of all elements.

        `bounds` must be among the histogram's own, so that nothing has to be divided.
        """
        running, upto = 0, {}
        for bound, count in zip(self.bounds, self.counts, strict=False):
            running += count
            upto[bound] = running
        return [(bound, upto[bound]) for bound in bounds], running + self.counts[-1]

    def exponential(self) -> Exponential:
        """Return it by powers of two; its positive bounds must be successive ones, as those of an exponential metric are."""
        middle = bisect(self.bounds, 0.0)
        smallest, positive = self.bounds[middle], self.counts[middle + 1 :]
        zeros = sum(self.counts) - sum(positive) - sum(self.negative)
        return Exponential(smallest, zeros, math.frexp(smallest)[1], positive, self.total, self.negative)


@dataclass(frozen=True, slots=True)
class Sample:
    """One value of one series."""

    spec: MetricSpec
    labels: tuple[str, ...]
    """Values of spec.labels, in their order."""
    value: float | HistogramValue


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All values of a rank at one moment."""

    base_labels: tuple[tuple[str, str], ...]
    """Names and values of the labels of every series: run, rank, and the constant labels of the settings."""
    taken_at: float
    """Unix time."""
    samples: tuple[Sample, ...]
    """In the order of the catalog; the series of one metric stand together."""
    started_at: float = 0.0
    """Unix time at which counters and histograms were 0; 0: not known."""

    def find(self, spec: MetricSpec, **labels: str) -> list[Sample]:
        """Return the samples of a metric whose labels have the given values."""
        wanted = [(spec.labels.index(name), value) for name, value in labels.items()]
        return [s for s in self.samples if s.spec is spec and all(s.labels[i] == value for i, value in wanted)]

    def value(self, spec: MetricSpec, **labels: str) -> float | None:
        """Return the one number of a metric with these labels, None where there is none."""
        found = self.find(spec, **labels)
        return found[0].value if len(found) == 1 and isinstance(found[0].value, (int, float)) else None
