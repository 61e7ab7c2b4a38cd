"""Two processes under DDP: what the training's thread says to other ranks for us, and what the exchange costs the step."""

from __future__ import annotations

import contextlib
import sys
import threading
from collections import Counter
from collections.abc import Iterator
from dataclasses import replace
from types import FrameType, ModuleType
from typing import Any
from unittest.mock import patch

import torch
from torch.nn.parallel import DistributedDataParallel

from tests.bench.cases import UNBOUNDED, Case, Monitored, Watch
from tests.bench.measure import measure, take_turn
from tests.bench.models import MODELS, Training, make_optimizer
from tests.bench.results import Processes, make_table
from tests.parity.harness import ranks

COLLECTIVES = frozenset({
    "allgather", "allgather_coalesced", "allreduce", "allreduce_coalesced", "alltoall", "alltoall_base", "barrier", "broadcast",
    "gather", "monitored_barrier", "recv", "recv_anysource", "reduce", "reduce_scatter", "scatter", "send", "_allgather_base",
    "_reduce_scatter_base",
})  # fmt: skip
"""Methods of torch's process groups and their backends."""
_NO_GROUPS = (torch.Tensor, ModuleType, type, type(None))
_COUNTED_STEPS = 5


class Local(Monitored):
    """A monitor whose samples do not go through the exchange; its layers are never exported."""

    def __init__(self, training: Training, **settings: Any) -> None:
        super().__init__(training, **settings)
        self._patch = patch.object(self.monitor._ranks, "put")
        self._patch.start()

    def close(self) -> None:
        self._patch.stop()
        super().close()


CASES = (
    Case("none", "no monitoring", Watch),
    Case("again", "no monitoring, once more: the noise", Watch),
    Case("exchange", "otel-train, every 10 steps", lambda training: Monitored(training, **UNBOUNDED)),
    Case("local", "… without the exchange", lambda training: Local(training, **UNBOUNDED)),
)


@contextlib.contextmanager
def count_collectives() -> Iterator[Counter[str]]:
    """Count the collectives that Python calls, by thread: this one, and those that start while counting."""
    counter: Counter[str] = Counter()

    def see(frame: FrameType, event: str, called: Any) -> None:
        del frame
        # Tensor.gather, torch.scatter and the like have the same names
        if event == "c_call" and called.__name__ in COLLECTIVES and not isinstance(called.__self__, _NO_GROUPS):
            counter[threading.current_thread().name] += 1

    threading.setprofile(see)
    sys.setprofile(see)
    try:
        yield counter
    finally:
        sys.setprofile(None)
        threading.setprofile(None)


def run_processes(model: str, *, rounds: int, steps: int) -> Processes:
    """Compare trainings with and without the exchange of two processes.

    Args:
        model: A name in MODELS; each case trains a copy of it, since DDP hooks the parameters themselves.
        rounds: As for ``measure``.
        steps: As for ``measure``.
    """
    with ranks(2) as pool:
        first: Processes = pool.run(run_rank, model, rounds, steps, limit_seconds=1200.0)[0]
    return first


def run_rank(model: str, rounds: int, steps: int) -> Processes:
    """Be one of the processes."""
    collectives = _count_in_sampled_steps(model)
    with contextlib.ExitStack() as stack:
        watches = {case.name: case.attach(_wrapped(model)) for case in CASES}
        for watch in watches.values():
            stack.callback(watch.close)
        timings = measure(watches, rounds=rounds, steps=steps)
        sizes = [p.numel() for p in watches["none"].training.model.parameters()]
    table = make_table(f"{model}, DDP", sizes, steps, timings, {case.name: case.brief for case in CASES})
    return Processes(table, _COUNTED_STEPS, collectives)


def _count_in_sampled_steps(model: str) -> dict[str, int]:
    with count_collectives() as counter:  # first: threads that have started are not seen
        watch = Monitored(_wrapped(model), every_n_steps=1, **UNBOUNDED)
        counter.clear()  # attach may meet the others
        take_turn(watch, _COUNTED_STEPS)
        found = {"training": counter[threading.current_thread().name], "others": sum(counter.values())}
    watch.close()
    return {**found, "others": found["others"] - found["training"]}


def _wrapped(model: str) -> Training:
    training = MODELS[model]()
    wrapped = DistributedDataParallel(training.model)
    return replace(training, model=wrapped, optimizer=make_optimizer(wrapped))
