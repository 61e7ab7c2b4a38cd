"""Turns: in which sample a parameter's update is measured, so that the copies taken before a step stay within a bound of memory.

Ranks that hold parts of the same parameters give them the same turns: those follow from shapes that all of them know.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from otel_train.layers import MonitoredParameter
from otel_train.sampling import plan, work_dtype
from otel_train.shards import even_shape
from otel_train.stats.updates import UpdateEstimate

_MIB = 1 << 20
LEAST_BYTES = 64 * _MIB
"""What samples may take in any case …"""
_SHARE = 0.01
"""… and of weights and gradients, where that is more. Optimizer states, which are not there before the first step, come on top."""


@dataclass(frozen=True, slots=True)
class Turns:
    """Which of ``count`` turns each parameter has, by its ``id``; the samples go round."""

    count: int = 1
    of: Mapping[int, int] = field(default_factory=dict)
    largest: tuple[str, int] = ("", 0)
    """The parameter whose copy is largest, and its bytes: the least that a turn can take."""


@dataclass(slots=True)
class Progress:
    """How far the turns of an optimizer's parameters have come; kept when what is measured is grouped anew."""

    sample: int = -1
    """Number of the sample under way."""
    last: dict[str, tuple[UpdateEstimate, float]] = field(default_factory=dict)
    """By parameter, of its last turn: the estimate and the sum of squares of its weights. Only the host's side looks at it."""


def take_turns(parameters: Sequence[MonitoredParameter], updates: str, bound: float) -> Turns:
    """Give each parameter a turn, in their order, so that those of one turn fit.

    Args:
        parameters: All of the model's.
        updates: ``sampled``, ``exact`` or ``off``.
        bound: Bytes; a parameter that is larger has a turn of its own.
    """
    if updates == "off":
        return Turns()
    turns: dict[int, int] = {}
    turn, held, largest = 0, 0, ("", 0)
    for parameter in parameters:
        size = copied_bytes(parameter, updates)
        largest = max(largest, (parameter.name, size), key=lambda named: named[1])
        if held and held + size > bound:
            turn, held = turn + 1, 0
        turns[id(parameter.tensor)], held = turn, held + size
    return Turns(turn + 1, turns, largest)


def memory_bound(parameters: Sequence[MonitoredParameter], updates: str, megabytes: float | None) -> float:
    """Return how many bytes the copies may take: as given (in MiB), else a share of the training's if sampled, any if exact."""
    if megabytes is not None:
        return megabytes * _MIB
    if updates == "exact":
        return math.inf
    held = sum(2 * math.prod(even_shape(p.tensor)) * p.tensor.element_size() for p in parameters)
    return max(LEAST_BYTES, _SHARE * held)


def copied_bytes(parameter: MonitoredParameter, updates: str) -> int:
    """Return what is held of a parameter while its update is measured."""
    shape = even_shape(parameter.tensor)
    chosen = plan(
        (*shape, 2) if parameter.tensor.is_complex() else shape, embedding=parameter.kind == "embedding", exact=updates == "exact"
    )
    # of samples, what is read after the step is kept as well
    return chosen.copied * (1 if chosen.whole else 2) * work_dtype(parameter.tensor).itemsize
