"""What monitoring allocates in the training thread: nothing between samples, and the same at every sample."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.profiler import ProfilerActivity, profile

from otel_train.monitor import Monitor
from otel_train.testing import capture

EVERY = 4
OBSERVED = (7, 60)
"""Allocations of ours, and their bytes, where an unsampled step tells its loss and is clipped: three numbers copied (the norm, that of
the part, the loss), the same as fp64, and the three packed for the host."""
SAMPLED = (326, 7_252_000)
"""The same at a sampled step of `Loop`, at most, as measured on torch 2.13 with one thread. Lower it when it falls."""
HANDED_OVER = 8 << 10
"""Bytes at most that a sampled step leaves: its read-out, until the monitor's own thread has taken it."""


class Loop:
    """A training of 450,000 parameters: an embedding and matrices that are sampled, vectors that are read whole, an activation."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Embedding(5000, 64), nn.Linear(64, 1024), nn.ReLU(), nn.Linear(1024, 64), nn.LayerNorm(64))
        self.optimizer = torch.optim.AdamW(self.model.parameters())
        self.tokens = torch.arange(64).reshape(4, 16)

    def step(self, monitor: Monitor | None = None) -> None:
        """Train a step; with a monitor, clip by it and tell it the loss."""
        loss = self.model(self.tokens).square().mean()
        loss.backward()
        if monitor is not None:
            monitor.clip_grad_norm_(1.0)
            monitor.observe(loss=loss, tokens=64)
        self.optimizer.step()
        self.optimizer.zero_grad()

    def clipped_step(self) -> None:
        """Train a step that torch clips."""
        self.model(self.tokens).square().mean().backward()
        nn.utils.clip_grad_norm_(self.model.parameters(), 1.0)
        self.optimizer.step()
        self.optimizer.zero_grad()


def allocations(step: Callable[[], object]) -> Counter[int]:
    """Return how often a step allocates memory for tensors in this thread, by size; sizes of what it frees are negative."""
    with profile(activities=[ProfilerActivity.CPU], profile_memory=True) as profiler:
        step()
    assert profiler.profiler is not None
    events = profiler.profiler.kineto_results.events()
    return Counter(event.nbytes() for event in events if event.name() == "[memory]")


def totals(sizes: Counter[int]) -> tuple[int, int]:
    """Return the number of allocations and their bytes."""
    made = {size: count for size, count in sizes.items() if size > 0}
    return sum(made.values()), sum(size * count for size, count in made.items())


def ours(step: Callable[[], object], bare: Counter[int]) -> Counter[int]:
    """Return what a step allocates beyond a bare one."""
    found = allocations(step)
    found.subtract(bare)
    return found


@pytest.fixture
def loop() -> Loop:
    """Return a training whose optimizer has its state."""
    loop = Loop()
    loop.clipped_step()
    return loop


def test_between_samples_nothing_is_allocated(loop: Loop) -> None:
    """A step that is not sampled makes exactly the tensors of a bare one."""
    bare = allocations(loop.step)
    assert bare == allocations(loop.step), "of the loop itself"
    with capture(loop.model, loop.optimizer, every_n_steps=EVERY):
        loop.step()
        assert [allocations(loop.step) == bare for _ in range(2, EVERY)] == [True, True]


def test_what_the_loop_tells_is_copied_and_no_more(loop: Loop) -> None:
    """The loss and the norm before clipping are tensors: a copy of each number, and one read-out of all."""
    bare = allocations(loop.clipped_step)
    with capture(loop.model, loop.optimizer, every_n_steps=EVERY) as (monitor, _):
        loop.step(monitor)
        assert totals(ours(lambda: loop.step(monitor), bare)) == OBSERVED


def test_every_sample_allocates_the_same(loop: Loop) -> None:
    """The first one makes buffers that are kept; from the second on the figures stand, and only the read-out is left."""
    bare = allocations(loop.step)
    with capture(loop.model, loop.optimizer, every_n_steps=1):
        loop.step()
        allocations(loop.step)  # the profiler does not know, and tell of, memory that was there before it
        samples = [ours(loop.step, bare) for _ in range(6)]
    assert samples == [samples[0]] * 6
    count, size = totals(samples[0])
    assert 0 < count <= SAMPLED[0]
    assert size <= SAMPLED[1]
    assert 0 < sum(size * count for size, count in samples[0].items()) <= HANDED_OVER
