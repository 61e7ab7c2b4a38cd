"""Histograms that grow with each sample: of sizes and times, and of gradients with their signs. No torch here."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import TypeVar

from otel_train.catalog import gradients
from otel_train.records import MAGNITUDE_EXPONENTS, Layer, ParameterReading, Signs
from otel_train.snapshot import HistogramValue, Sample

Number = TypeVar("Number", int, float)
MAGNITUDE_BINS = tuple(2.0**exponent for exponent in MAGNITUDE_EXPONENTS)
VALUE_BINS = (*(-bound for bound in reversed(MAGNITUDE_BINS)), *MAGNITUDE_BINS)
"""Upper bounds at the resolution at which gradients are counted; the catalog's are those of the classic buckets."""


@dataclass(slots=True)
class Histogram:
    """Elements added up bin by bin, fractions of them too, since a sampled one stands for several."""

    bounds: tuple[float, ...]
    """Upper bounds of the bins; the last bin has none."""
    counts: list[float] = field(init=False)
    total: float = 0.0
    """Sum of the values."""

    def __post_init__(self) -> None:
        """Start with nothing."""
        self.counts = [0.0] * (len(self.bounds) + 1)

    def add(self, counts: Iterable[float], total: float) -> None:
        """Take elements, by bin, and the sum of their values."""
        self.counts = _sums(self.counts, counts)
        self.total += total

    def value(self) -> HistogramValue:
        """Return it in whole elements."""
        return HistogramValue(self.bounds, _whole(self.counts), self.total)


@dataclass(slots=True)
class SignedHistogram:
    """Elements by size on either side of zero.

    A native histogram has a negative power of two in the bucket that it ends, farther from zero: [-2, -1). Classic buckets include
    their upper bound, and have it in (-2, -1]. So exact powers are counted apart, and both come out right.
    """

    zeros: float = 0.0
    """Elements as small as the smallest bound, of either sign."""
    positive: list[float] = field(default_factory=lambda: [0.0] * len(MAGNITUDE_BINS))
    negative: list[float] = field(default_factory=lambda: [0.0] * len(MAGNITUDE_BINS))
    """Both from the second bin of sizes on."""
    powers: list[float] = field(default_factory=lambda: [0.0] * len(MAGNITUDE_BINS))
    """Negative elements that are a bound, from the smallest on."""
    total: float = 0.0

    def add(self, magnitudes: Sequence[float], signs: Signs) -> None:
        """Take elements, by size, and what is known of the negative ones."""
        self.zeros += magnitudes[0]
        self.positive = _sums(self.positive, (size - below for size, below in zip(magnitudes[1:], signs.negatives, strict=True)))
        self.negative = _sums(self.negative, signs.negatives)
        self.powers = _sums(self.powers, signs.powers)
        self.total += signs.total

    def value(self) -> HistogramValue:
        """Return it in whole elements."""
        negative = _whole(self.negative)
        # up to a negative bound there is what is farther from zero, and what is the bound itself
        upto = _sums(accumulate(reversed(negative)), reversed(_whole(self.powers)))
        middle = sum(negative) + round(self.zeros)
        counts = [after - before for before, after in pairwise((0, *upto, middle))]
        return HistogramValue(VALUE_BINS, (*counts, *_whole(self.positive)), self.total, negative)


class GradientHistograms:
    """The gradients' histograms of all layers or blocks."""

    def __init__(self) -> None:
        self._magnitudes: dict[Layer, Histogram] = {}
        self._values: dict[Layer, SignedHistogram] = {}

    def add(self, reading: ParameterReading) -> None:
        """Take what was counted of a parameter, if anything was."""
        layer, sums = reading.histogram, reading.sums
        if layer is None or sums.magnitudes is None:
            return
        self._magnitudes.setdefault(layer, Histogram(MAGNITUDE_BINS)).add(sums.magnitudes, sums.magnitude_sum)
        if sums.signs is not None:
            self._values.setdefault(layer, SignedHistogram()).add(sums.magnitudes, sums.signs)

    def samples(self) -> Iterator[Sample]:
        """Yield them."""
        for layer, bins in self._magnitudes.items():
            yield Sample(gradients.LAYER_GRAD_MAGNITUDE, layer.labels, bins.value())
        for layer, sides in self._values.items():
            yield Sample(gradients.LAYER_GRAD_VALUE, layer.labels, sides.value())


def _sums(counts: Iterable[Number], more: Iterable[Number]) -> list[Number]:
    return [before + new for before, new in zip(counts, more, strict=True)]


def _whole(counts: Iterable[float]) -> tuple[int, ...]:
    """Round each bin by itself, so that none ever falls: to a native histogram one that does tells of a restart."""
    return tuple(map(round, counts))
