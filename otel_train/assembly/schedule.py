"""The peak of a learning-rate schedule, which update ratios are compared at."""

from __future__ import annotations


class SchedulePeak:
    """The peak learning rate of one parameter group, as far as it is known."""

    def __init__(self) -> None:
        self._declared: float | None = None
        self._largest = 0.0
        self._rising = True

    def add(self, rate: float | None, declared: float | None) -> None:
        """Take the learning rate of a step, and the peak that the scheduler records, if it does."""
        self._declared = declared
        if rate is None:
            return
        # at the first step nobody knows yet; afterwards a new record means that the top is still to come
        self._rising = not self._largest or rate > self._largest
        self._largest = max(self._largest, rate)

    @property
    def largest(self) -> float:
        """The largest rate seen; given back by ``restore``."""
        return self._largest

    def restore(self, largest: float) -> None:
        """Go on with what was seen before; whether the rate still rises, the next one shows."""
        self._largest, self._rising = largest, True

    @property
    def value(self) -> float | None:
        """The peak; None while an undeclared rate still rises, and where there is no rate at all."""
        if self._declared:
            return max(self._declared, self._largest)
        return None if self._rising else self._largest or None
