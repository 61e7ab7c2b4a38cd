"""The benchmark measures what it says, its tables hold together, and what README quotes is what was measured."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import distributed

from tests.bench import __main__ as bench
from tests.bench import budget, tables
from tests.bench.cases import CASES, UNBOUNDED, Case, Monitored, Watch, missing
from tests.bench.claims import Claim, check_claims, cost
from tests.bench.ddp import count_collectives, run_processes
from tests.bench.measure import measure, take_turn, watched
from tests.bench.models import MODELS, Training, make_gpt
from tests.bench.ratios import means, paired, spread
from tests.bench.results import Budget, Processes, Results, Row, Table, make_table
from tests.parity.harness import ranks

RESULTS = Path(__file__).parent / "results" / "cpu.json"
README = Path(__file__).parents[2] / "README.md"
LOCAL = [name for name in CASES if not name.startswith("watch")]


@pytest.fixture
def tiny() -> Training:
    """A GPT that trains in a few milliseconds."""
    return make_gpt(64, 16, 2, 2, batch=2, context=16)


class Slow(Watch):
    """Adds a fixed time to each step, and counts its turns."""

    SECONDS = 0.02

    def observe(self, loss: torch.Tensor) -> None:
        del loss
        time.sleep(self.SECONDS)


def test_twins_share_every_tensor_and_no_hook(tiny: Training) -> None:
    """A twin trains the same weights with the same moments, and does not call the other's hooks."""
    called = []
    tiny.model.register_forward_pre_hook(lambda module, args: called.append("forward"))
    tiny.optimizer.register_step_post_hook(lambda optimizer, args, kwargs: called.append("step"))
    twin = tiny.twin()
    before = [p.detach().clone() for p in tiny.model.parameters()]
    twin.step()
    assert called == []
    assert all(a is b for a, b in zip(tiny.model.parameters(), twin.model.parameters(), strict=True))
    assert not any(torch.equal(a, b) for a, b in zip(before, tiny.model.parameters(), strict=True))
    tiny.step()
    assert called == ["forward", "step"]
    assert {state["step"].item() for state in twin.optimizer.state.values()} == {2.0}


def test_a_planted_cost_is_measured() -> None:
    """What a case adds to a step is what its ratio and its cost say, and equals come out as equals."""

    class Sleeping(Watch):
        """Its steps take as long as it sleeps, whatever the machine does."""

        def __init__(self, seconds: float) -> None:
            self._seconds = seconds

        def begin_turn(self) -> None:
            self.training = replace(_TINY, model=_TINY.model)

        def observe(self, loss: torch.Tensor) -> None:
            time.sleep(self._seconds)

    del Sleeping
