"""The budget at work: every sample is made slow, and the monitor is to sample so rarely that the training does not notice."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from statistics import median
from typing import Any
from unittest.mock import patch

from otel_train.catalog.monitor import EVERY_N_STEPS
from otel_train.hooks.parameters import ParameterMeter
from tests.bench.cases import Case, Monitored, Watch
from tests.bench.measure import take_turn, watched
from tests.bench.models import Training
from tests.bench.results import Budget

_BLOCK = 10
"""Steps that are compared at once."""
CASES = (Case("none", "no monitoring", Watch), Case("slow", "slow samples", lambda training: Monitored(training, every_n_steps=1)))


def run_budget(training: Training, *, blocks: int, share: float = 0.5) -> Budget:
    """Plant a sleep in every sample and follow the cost.

    Args:
        training: What is trained.
        blocks: Blocks of ten steps that are followed.
        share: Length of the sleep in steps; every step is to be sampled at first.
    """
    with watched(training, CASES) as watches:
        none, slow = watches.values()
        take_turn(none, 3)
        step_seconds = take_turn(none, _BLOCK).seconds
        with slow_samples(step_seconds * share):
            followed = [_follow(none, slow) for _ in range(blocks)]
    bare, monitored, own, every = zip(*followed, strict=True)
    return Budget(
        planted_seconds=step_seconds * share,
        step_seconds=median(bare),
        steps=_BLOCK,
        ratios=tuple(m / b for m, b in zip(monitored, bare, strict=True)),
        own_shares=tuple(o / median(bare) for o in own),
        every_n_steps=every,
    )


def _follow(none: Watch, slow: Watch) -> tuple[float, float, float, int]:
    """Return the seconds of an unmonitored step, of a monitored one, of the monitor itself, and the cadence, over a block."""
    assert isinstance(slow, Monitored)
    bare, monitored = take_turn(none, _BLOCK), take_turn(slow, _BLOCK)
    snapshot = slow.monitor.snapshot
    every = None if snapshot is None else snapshot.value(EVERY_N_STEPS)
    return bare.seconds, monitored.seconds, sum(monitored.own.values()), int(every or 0)


@contextmanager
def slow_samples(seconds: float) -> Iterator[None]:
    """Have every sample sleep while it reads gradients."""
    regroup = ParameterMeter._regroup

    def slow(meter: ParameterMeter, *args: Any, **kwargs: Any) -> Any:
        time.sleep(seconds)
        return regroup(meter, *args, **kwargs)

    with patch.object(ParameterMeter, "_regroup", slow):
        yield
