"""The budget of the monitor's own cost: from what samples cost to how often they are taken. Numbers only; nothing is read here."""

from __future__ import annotations

import itertools
import math
import statistics
from collections import defaultdict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass

STEADY = ("loop", "threads")
"""Parts that every step costs, sampled or not: the hooks in the loop, and the processor time of the monitor's own threads."""

_LEAST_ROOM = 0.1
"""Share of the budget that samples have in any case: what every step costs does not get less by measuring nothing."""
_WINDOW_SECONDS = 1.0
"""Seconds of training that a figure of the steady cost is made of: the threads work in bursts."""


@dataclass(frozen=True, slots=True)
class Pace:
    """Steps between samples, and between those of the parts that are thinned on their own; the first step is sampled in full.

    Every number is the setting ``every_n_steps`` times a power of two, and those of parts are multiples of the first: what a
    sparing pace measures, a denser one measures too, so ranks that do not agree yet still meet.
    """

    every_n_steps: int
    histograms: int
    activations: int

    @classmethod
    def regular(cls, every_n_steps: int) -> Pace:
        """Return the pace at which each sample measures everything."""
        return cls(every_n_steps, every_n_steps, every_n_steps)

    def common(self, other: Pace) -> Pace:
        """Return the pace that measures only what both do."""
        return Pace(
            max(self.every_n_steps, other.every_n_steps),
            max(self.histograms, other.histograms),
            max(self.activations, other.activations),
        )

    def of(self, part: str) -> int:
        """Return the steps between two measurements of a part."""
        return {"histograms": self.histograms, "activations": self.activations}.get(part, self.every_n_steps)

    def is_sampled(self, number: int) -> bool:
        """Say whether samples fall due at a step."""
        return self.measures("any", number)

    def measures(self, part: str, number: int) -> bool:
        """Say whether a part is measured in the samples that fall due at a step."""
        return number == 1 or number % self.of(part) == 0


@dataclass(frozen=True, slots=True)
class Schedule:
    """Which pace holds at which step: one, and from a step on that was agreed the next."""

    pace: Pace
    following: Pace
    start: int = 0
    """Number of the step at which the following pace begins."""

    def at(self, number: int) -> Pace:
        """Return the pace of a step."""
        return self.following if number >= self.start else self.pace

    def then(self, pace: Pace, start: int) -> Schedule:
        """Return the schedule that goes over to another pace, once the last change has come about."""
        return Schedule(self.following, pace, start)


class _Recent:
    """The last three figures of a cost."""

    def __init__(self) -> None:
        self._figures: deque[float] = deque(maxlen=3)

    def add(self, figure: float) -> None:
        self._figures.append(figure)

    def amend(self, more: float) -> None:
        """Add to the last figure."""
        self._figures.append((self._figures.pop() if self._figures else 0.0) + more)

    @property
    def typical(self) -> float:
        """The median, of two the smaller, 0 for one: neither a hiccup nor the cold first counts."""
        return statistics.median_low(self._figures) if len(self._figures) > 1 else 0.0


class Budget:
    """Follows what the monitor costs, and says at which pace it stays within its budget.

    Args:
        every_n_steps: Steps between samples that were asked for: they never come closer.
        max_overhead: Most own seconds a second of training; None: no limit.
    """

    def __init__(self, every_n_steps: int, max_overhead: float | None) -> None:
        self._every, self._most = every_n_steps, max_overhead
        self._costs: defaultdict[str, _Recent] = defaultdict(_Recent)
        self._steps: deque[float] = deque(maxlen=15)
        self._steady = _Recent()
        self._window_seconds = self._window_own = 0.0

    def add(self, seconds: float | None, costs: Mapping[str, float], *, due: bool) -> bool:
        """Take a step; return whether it tells something new of what every step costs.

        Args:
            seconds: What it took without the monitor; None where that is not known.
            costs: Own seconds in it by part.
            due: Samples fell due at it. What later steps measure belongs to the same sample, as with optimizers that step in turn.
        """
        for part, cost in costs.items():
            if cost > 0 and part not in STEADY:
                (self._costs[part].add if due else self._costs[part].amend)(cost)
        if seconds is None:
            return False
        self._steps.append(seconds)
        return self._add_steady(seconds, sum(costs.get(part, 0.0) for part in STEADY))

    def _add_steady(self, seconds: float, own: float) -> bool:
        self._window_seconds += seconds
        self._window_own += own
        if self._window_seconds < _WINDOW_SECONDS:
            return False
        self._steady.add(self._window_own / self._window_seconds)
        self._window_seconds = self._window_own = 0.0
        return True

    @property
    def step_seconds(self) -> float:
        """What a step takes without the monitor; 0 where that is not known."""
        return statistics.median(self._steps) if self._steps else 0.0

    @property
    def steady(self) -> float:
        """Share of the training's time that goes into what every step costs."""
        return self._steady.typical

    def shares(self, pace: Pace) -> dict[str, float]:
        """Return by part what samples take of the training's time at a pace; empty where a step's time is not known."""
        step, costs = self.step_seconds, tuple(self._costs.items())  # another thread may add a part meanwhile
        return {part: cost.typical / (step * pace.of(part)) for part, cost in costs} if step else {}

    def overhead(self, pace: Pace) -> float | None:
        """Return own seconds a second of training at a pace; None where that is not known."""
        return self.steady + sum(self.shares(pace).values()) if self.step_seconds else None

    def wish(self, pace: Pace) -> Pace:
        """Return the pace to go over to: the same, a more sparing one that fits, or one step denser where that leaves clear room.

        Parts that alone exceed the budget at the cadence that was asked for are thinned; what all take together sets the cadence.
        While it fits, nothing is made more sparing; while it is too much, nothing denser.
        """
        if self._most is None or not self.step_seconds:
            return pace
        room = max(self._most - self.steady, _LEAST_ROOM * self._most)
        taken = sum(self.shares(pace).values()) / room
        shares = {part: share / room for part, share in self.shares(Pace.regular(self._every)).items()}
        levels = {
            part: _part_level(shares.get(part, 0.0), self._level_of(pace.of(part)), taken) for part in ("histograms", "activations")
        }

        def together(level: int) -> float:
            return sum(share / (1 << max(level, levels.get(part, 0))) for part, share in shares.items())

        relaxed = 0.7 if taken <= 1.0 else 0.0
        level = _level(together, self._level_of(pace.every_n_steps), most=1.0, goal=0.9, relaxed=relaxed)
        every, histograms, activations = (
            self._every * 2 ** max(level, own) for own in (0, levels["histograms"], levels["activations"])
        )
        return Pace(every, histograms, activations)

    def _level_of(self, steps: int) -> int:
        return (steps // self._every).bit_length() - 1


def _part_level(share: float, level: int, taken: float) -> int:
    """Return how often to double the steps between measurements of a part that takes such a share of the room if not thinned.

    One that exceeds it alone gets a quarter: two of them are not to use up what the others need. A part that is thinned is thinned
    further before the others have to come less often for it.

    Args:
        share: What the part takes of the room where it is not thinned.
        level: The level in force.
        taken: What all parts together take of it at the pace in force.
    """

    def at(level: int) -> float:
        return share / (1 << level)

    most = math.inf if taken <= 1.0 else 0.4 if level else 1.0
    # two parts can come back at the same time, and each doubles what it takes: then all still fit, and the cadence stays
    relaxed = 0.25 if taken + 2 * at(level) <= 0.9 else 0.0
    return _level(at, level, most=most, goal=0.25, relaxed=relaxed)


def _level(share: Callable[[int], float], level: int, *, most: float, goal: float, relaxed: float) -> int:
    """Return how often to double what is asked for: as often as is needed at once, one less where that leaves clear room.

    Args:
        share: What it takes of the room there is, by level.
        level: The level in force.
        most: Share above which it is too much.
        goal: Share to get down to then.
        relaxed: Share that the level below may take to be gone back to; less than ``most`` by more than what costs vary by.
    """
    if share(level) > most:
        return next(more for more in itertools.count(level + 1) if share(more) <= goal)
    return level - 1 if level > 0 and share(level - 1) <= relaxed else level
