"""Two processes, one of them with a slow statistic: both sample less often, from the same step on."""

from __future__ import annotations

import logging
import os
import signal
import time
from dataclasses import dataclass, field
from typing import Any

import pytest
import torch
from torch import distributed, nn

from otel_train.budget import Schedule
from otel_train.hooks.parameters import ParameterMeter
from otel_train.hooks.shape_group import ShapeGroup
from otel_train.testing import capture
from tests.parity.harness import Died, ranks

EVERY, SLOW, SECONDS, STEPS = 5, 1, 0.03, 150


@dataclass
class Seen:
    """What a rank reports."""

    sampled: list[tuple[int, bool]] = field(default_factory=list)
    """Steps that were measured, and whether with histograms."""
    schedule: Schedule | None = None
    misses: int = 0
    lines: list[str] = field(default_factory=list)


class Training:
    """One rank's training, in step with the other's; the slow one sleeps in a method of ShapeGroup."""

    def __init__(self, method: str) -> None:
        torch.manual_seed(0)
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU(), nn.Linear(8, 8))
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=0.01)
        self.seen, self.number, self.is_slow = Seen(), 0, distributed.get_rank() == SLOW
        self._listen(method)

    def _listen(self, method: str) -> None:
        work, begin = getattr(ShapeGroup, method), ParameterMeter.begin

        def slow(*args: Any) -> None:
            if self.is_slow:
                time.sleep(3 * SECONDS)  # far more than a fifth of five steps
            work(*args)

        def noted(meter: ParameterMeter, scale: torch.Tensor | None, *, histograms: bool) -> None:
            self.seen.sampled.append((self.number, histograms))
            begin(meter, scale, histograms=histograms)

        setattr(ShapeGroup, method, slow)
        setattr(ParameterMeter, "begin", noted)  # noqa: B010  # as above; the process ends with the test
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record: self.seen.lines.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger("otel_train").addHandler(handler)

    def run(self, steps: int, *, together: bool = True) -> None:
        for _ in range(steps):
            self.number += 1
            self.model(torch.ones(4, 8)).square().mean().backward()
            if together:
                distributed.barrier()
            time.sleep(SECONDS)
            self.optimizer.step()
            self.optimizer.zero_grad()

    def report(self, watch: Any) -> Seen:
        watch.flush()
        self.seen.schedule = watch._attachment.recorder.cadence.schedule
        self.seen.misses = watch._guard.errors["ranks"]
        return self.seen


def one_is_slow(method: str) -> Seen:
    """Both train to the end."""
    training = Training(method)
    with capture(training.model, training.optimizer, every_n_steps=EVERY, max_overhead=0.2) as (watch, _):
        training.run(STEPS)
        return training.report(watch)


def one_dies() -> Seen:
    """Rank 0 is killed, and what rank 1 measures costs too much only then."""
    training = Training("read_before")
    training.is_slow = False
    with capture(training.model, training.optimizer, every_n_steps=EVERY, max_overhead=0.2, rank_timeout=0.5) as (watch, _):
        training.run(20)
        if distributed.get_rank() == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        training.is_slow = True
        training.run(STEPS, together=False)
        return training.report(watch)


@pytest.mark.parametrize("method", ["read_before", "count_magnitudes"])
def test_ranks_change_their_pace_at_the_same_step(method: str) -> None:
    """Every step that one measures the other measures too, in the same parts; no exchange is missed."""
    with ranks(2) as pool:
        slow, other = reversed(pool.run(one_is_slow, method))
    assert slow.schedule == other.schedule
    assert slow.sampled == other.sampled
    assert (slow.misses, other.misses) == (0, 0)
    asked = [1, *range(EVERY, STEPS + 1, EVERY)]
    taken = asked if method == "count_magnitudes" else [n for n, histograms in slow.sampled if histograms]
    assert [n for n, _ in slow.sampled] == taken
    in_full = [n for n, histograms in slow.sampled if histograms]
    assert in_full[:2] == asked[:2]
    assert len(in_full) < len(asked) / 2
    assert any("more than max_overhead" in line for line in slow.lines)
    assert any("another rank" in line for line in other.lines)


def test_a_rank_whose_peer_has_died_spares_its_training_alone() -> None:
    """After some samples that nobody came to."""
    with ranks(2, agent=True) as pool:
        dead, alive = pool.run(one_dies, may_die=[0])
    assert dead == Died(-signal.SIGKILL)
    assert alive.misses >= 3
    assert alive.schedule.following.every_n_steps > EVERY
