"""Nothing grows while a run goes on: memory, objects, threads, file descriptors; over ten thousand sampled steps, scraped."""

from __future__ import annotations

import ctypes
import gc
import os
import sys
import threading
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
import torch
from torch import nn

import otel_train
from otel_train.catalog import run
from otel_train.monitor import Monitor

WARM, STEPS, SCRAPED_EVERY = 2000, 10_000, 100
GROWTH = 512 << 10
"""Bytes by which the process may grow: what the allocators of several threads leave unused; 64 bytes a step."""
OBJECTS = 5
"""Objects of a type by which their number may differ: what is under way at one moment and not at the other."""


class Training:
    """The smallest training with a matrix, a vector, an activation, and everything told and asked for."""

    def __init__(self) -> None:
        self.model = nn.Sequential(nn.Linear(8, 8), nn.ReLU())
        self.optimizer = torch.optim.SGD(self.model.parameters(), lr=1e-3)
        self.inputs = torch.ones(4, 8)

    def run(self, monitor: Monitor, steps: int) -> None:
        """Train, telling what a loop can tell, with a scrape now and then."""
        for step in range(1, steps + 1):
            loss = self.model(self.inputs).square().mean()
            loss.backward()
            monitor.clip_grad_norm_(1.0)
            self.optimizer.step()
            self.optimizer.zero_grad()
            monitor.observe(loss=loss, tokens=4)
            if step % SCRAPED_EVERY == 0:
                monitor.flush()  # so that as many steps are under way at any one time
                scrape(monitor)


def scrape(monitor: Monitor) -> None:
    """Fetch the metrics as a scraper does, on a connection of its own."""
    with urllib.request.urlopen(f"{monitor.url}metrics") as answer:
        assert answer.read()


def resident_bytes() -> int:
    """Return the process's memory, after what is free has been given back to the system."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    return int(Path("/proc/self/statm").read_text().split()[1]) * os.sysconf("SC_PAGE_SIZE")


def census() -> Counter[str]:
    """Count objects by type, and threads and file descriptors."""
    gc.collect()
    counts = Counter(f"{type(found).__module__}.{type(found).__qualname__}" for found in gc.get_objects())
    return counts + Counter(threads=threading.active_count(), descriptors=len(list(Path("/proc/self/fd").iterdir())))


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
def test_ten_thousand_sampled_steps_leave_nothing_behind() -> None:
    """After 10,000 steps there is what was there after 2,000, when all that is bounded is full."""
    training, sink = Training(), otel_train.MemorySink(limit=2)
    with otel_train.attach(training.model, training.optimizer, port=0, every_n_steps=1, sinks=[sink]) as monitor:
        training.run(monitor, WARM)
        census()  # takes memory itself, the first time
        counted, resident = census(), resident_bytes()
        training.run(monitor, STEPS - WARM)
        grown = census() - counted
        resident = resident_bytes() - resident
    assert sink.last is not None
    assert sink.last.value(run.STEPS) == STEPS
    assert {name: count for name, count in grown.items() if count > OBJECTS} == {}
    assert resident < GROWTH
