"""Runs the cases in turns: each round gives every case one turn of some steps, in shuffled order."""

from __future__ import annotations

import contextlib
import gc
import random
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from statistics import fmean, median

from tests.bench.cases import Case, Watch
from tests.bench.models import Training

_HICCUP = 1.5
"""A turn that took so many times the median one was disturbed from outside: no case does that in some turns and not in others."""


@dataclass(frozen=True)
class Turn:
    """Some steps under a case, in seconds a step."""

    seconds: float
    own: Mapping[str, float]
    """The case's own measured seconds, by part."""


@dataclass(frozen=True)
class Timing:
    """What the turns of a case took, in seconds a step."""

    turns: tuple[float, ...]
    """One a round; the same place is the same round in all cases."""
    own: Mapping[str, float]
    """The case's own measured seconds, by part: the mean, since not every turn has a sample, of the turns without a hiccup."""
    values: int
    """Numbers that a sample of its layers exports."""


@contextlib.contextmanager
def watched(training: Training, cases: Sequence[Case]) -> Iterator[dict[str, Watch]]:
    """Yield each case on a twin of the training, by name."""
    with contextlib.ExitStack() as stack:
        watches = {}
        for case in cases:
            watches[case.name] = case.attach(training.twin())
            stack.callback(watches[case.name].close)
        yield watches


def measure(watches: Mapping[str, Watch], *, rounds: int, steps: int, seed: int = 0) -> dict[str, Timing]:
    """Time the cases.

    Args:
        watches: By name; each trains by itself, or all on the same weights.
        rounds: Turns of each case that are timed; one more comes first, in which allocators, buffers and hooks get warm.
        steps: Steps a turn.
        seed: Of the order; the same on all ranks of a group, which have to train together.
    """
    order = random.Random(seed)
    turns: dict[str, list[Turn]] = {name: [] for name in watches}
    for watch in watches.values():
        take_turn(watch, steps)
    with _long_lived_objects_frozen():
        for _ in range(rounds):
            for name in order.sample(list(watches), len(watches)):
                turns[name].append(take_turn(watches[name], steps))
    return {name: _timing(turns[name], watch.values()) for name, watch in watches.items()}


def take_turn(watch: Watch, steps: int) -> Turn:
    """Train some steps under a case."""
    before = watch.seconds()
    watch.begin_turn()
    started = time.perf_counter()
    for _ in range(steps):
        watch.observe(watch.training.step())
    seconds = time.perf_counter() - started
    watch.end_turn()
    own = {part: (after - before.get(part, 0.0)) / steps for part, after in watch.seconds().items()}
    return Turn(seconds / steps, own)


def _timing(turns: Sequence[Turn], values: int) -> Timing:
    limit = _HICCUP * median(turn.seconds for turn in turns)
    calm = [turn.own for turn in turns if turn.seconds <= limit]
    own = {part: fmean(seconds[part] for seconds in calm) for part in calm[0]}
    return Timing(tuple(turn.seconds for turn in turns), own, values)


@contextlib.contextmanager
def _long_lived_objects_frozen() -> Iterator[None]:
    """Keep what exists already out of the garbage collector's way, whose passes would hit one case or another."""
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
