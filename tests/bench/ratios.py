"""The arithmetic of paired timings: ratios within a round, their median, and how far it can be trusted."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import median, quantiles

_RESAMPLES = 1000


@dataclass(frozen=True)
class Ratio:
    """The median of paired ratios with a 95 % interval (bootstrap, percentiles)."""

    median: float
    low: float
    high: float

    @property
    def floor(self) -> float:
        """How far from 1 a ratio can be by noise, where this one is of equals."""
        return max(abs(self.low - 1), abs(self.high - 1))


def paired(numerators: Sequence[float], denominators: Sequence[float]) -> Ratio:
    """Compare what was measured in the same rounds; at least two of them.

    Source: Efron and Tibshirani, An Introduction to the Bootstrap, 1993, chapter 13 (percentile intervals).
    """
    ratios = [a / b for a, b in zip(numerators, denominators, strict=True)]
    chance = random.Random(0)
    medians = [median(chance.choices(ratios, k=len(ratios))) for _ in range(_RESAMPLES)]
    percentiles = quantiles(medians, n=40)
    return Ratio(median(ratios), percentiles[0], percentiles[-1])


def spread(values: Sequence[float]) -> float:
    """Return the interquartile range over the median; at least two values."""
    lower, middle, upper = quantiles(values, n=4, method="inclusive")
    return (upper - lower) / middle


def means(first: Sequence[float], second: Sequence[float]) -> list[float]:
    """Return the mean of each pair."""
    return [(a + b) / 2 for a, b in zip(first, second, strict=True)]
