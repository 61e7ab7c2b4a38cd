"""Spikes of the loss and of the gradient norm, found at every step where the number is known."""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Iterable

WINDOW, LEAST, SIGMAS = 128, 64, 6.0
"""OLMo-core's SkipStepOptimizer: 128 values, 6 standard deviations. We say nothing before 64 values."""
_FLOOR = 1e-3
"""A standard deviation counts as at least this share of the mean: a window of equal values must not make noise a spike."""


class SpikeDetector:
    """Compares each value with the window of finite values before it.

    Args:
        logarithmic: Compare logarithms, for norms: they are log-normal (raw: 12 false alarms in 10,000 steps; logarithms: 0).
    """

    def __init__(self, *, logarithmic: bool) -> None:
        self._logarithmic = logarithmic
        self._window: deque[float] = deque(maxlen=WINDOW)

    @property
    def window(self) -> tuple[float, ...]:
        """What values are compared with, as it is compared; given back by ``restore``."""
        return tuple(self._window)

    def restore(self, window: Iterable[float]) -> None:
        """Go on with a window of before."""
        self._window = deque(window, maxlen=WINDOW)

    def is_spike(self, value: float) -> bool:
        """Take a value and say whether it stands out; non-finite values are no spikes and do not enter the window."""
        if not math.isfinite(value) or (self._logarithmic and value <= 0):
            return False
        number = math.log(value) if self._logarithmic else value
        spike = len(self._window) >= LEAST and number > self._threshold()
        self._window.append(number)
        return spike

    def _threshold(self) -> float:
        mean = sum(self._window) / len(self._window)
        deviation = math.sqrt(sum((v - mean) * (v - mean) for v in self._window) / len(self._window))
        least = _FLOOR if self._logarithmic else _FLOOR * abs(mean)
        return mean + SIGMAS * max(deviation, least)


def schedule_phase(step: int, warmup_steps: int | None, planned_steps: int | None) -> str:
    """Return the phase of the schedule: ``warmup``, ``peak`` or ``main``.

    The peak is a tenth of the planned run after the warmup, or as long as the warmup where no length is planned. Instability there
    is a sign of its own (BLOOM: glitches "very closely to the moment where LR warmup stopped").
    """
    if not warmup_steps:
        return "main"
    if step <= warmup_steps:
        return "warmup"
    peak = planned_steps // 10 if planned_steps else warmup_steps
    return "peak" if step <= warmup_steps + peak else "main"


class Smoothed:
    """An exponential average, bias-corrected as Adam's moments are; non-finite values do not enter it."""

    def __init__(self, decay: float = 0.99) -> None:
        self._decay, self._sum, self._weight = decay, 0.0, 0.0

    @property
    def state(self) -> tuple[float, float]:
        """Weighted sum and sum of the weights; given back by ``restore``."""
        return self._sum, self._weight

    def restore(self, total: float, weight: float) -> None:
        """Go on with a state of before."""
        self._sum, self._weight = total, weight

    def add(self, value: float) -> float:
        """Take a value and return the average; NaN for a non-finite value."""
        if not math.isfinite(value):
            return math.nan
        self._sum = self._decay * self._sum + (1 - self._decay) * value
        self._weight = self._decay * self._weight + (1 - self._decay)
        return self._sum / self._weight
