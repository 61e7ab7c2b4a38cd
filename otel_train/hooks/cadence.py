"""Whose step it is: which optimizers make up a step of the training, and at which of its steps each is measured.

Optimizers that step one after the other (matrices and the rest, a GAN's discriminator and generator) make one step together; it is
over when one steps again that has stepped in it. So five steps of a discriminator for one of the generator are five steps, the
generator's within one of them. Samples fall due by the number of the step, for all optimizers; one that does not step in that step
is measured at its next, so that none is missed whatever their rhythm.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable

from otel_train.budget import Pace, Schedule

RECENT = 100
"""An optimizer that has not stepped for so many steps is not waited for any more, nor shown from its last sample."""


class Cadence:
    """Follows the optimizers through the numbered steps.

    Args:
        pace: Steps between samples, at first.
        optimizers: Their ``id``; none where each ``observe`` is a step.
    """

    def __init__(self, pace: Pace, optimizers: Iterable[int]) -> None:
        self.schedule = Schedule(pace, pace)
        """Which pace holds when; the monitor's own thread puts another one in its place."""
        self._stepped_at = dict.fromkeys(optimizers, 0)
        self._due = dict.fromkeys(self._stepped_at, True)
        """Optimizers to be measured, and whether with histograms."""
        self._awake = frozenset(self._stepped_at)
        self._marked = 0

    def is_sampled(self, number: int) -> bool:
        """Say whether samples fall due at a step."""
        return self.schedule.at(number).is_sampled(number)

    def measures(self, part: str, number: int) -> bool:
        """Say whether a part is measured in the samples that fall due at a step."""
        return self.schedule.at(number).measures(part, number)

    def patience(self, optimizer: int | None) -> int:
        """Return after how many steps a sample is not shown any more, of an optimizer or (None) of activations."""
        pace = self.schedule.following
        return max(2 * (pace.activations if optimizer is None else pace.every_n_steps), RECENT)

    def begins(self, optimizer: int, number: int) -> bool:
        """Say whether an optimizer that steps, in step ``number``, is to be measured."""
        if self._marked != number and self.is_sampled(number):
            self._marked = number
            histograms = self.measures("histograms", number)
            self._due = {i: histograms or self._due.get(i, False) for i in self._stepped_at}
        self._stepped_at[optimizer] = number
        return optimizer in self._due

    def counts_histograms(self, optimizer: int) -> bool:
        """Say whether an optimizer that is to be measured is so with histograms."""
        return self._due.get(optimizer, False)

    def measured(self, optimizer: int) -> None:
        """An optimizer that was due has been measured."""
        self._due.pop(optimizer, None)

    def is_whole(self, stepped: Collection[int]) -> bool:
        """Say whether all optimizers that are waited for have stepped."""
        return self._awake.issubset(stepped)

    def over(self, number: int) -> None:
        """Step ``number`` is over."""
        if len(self._stepped_at) > 1:
            self._awake = frozenset(i for i, last in self._stepped_at.items() if number - last < RECENT)
