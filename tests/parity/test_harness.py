"""The harness itself: it shows what fails, and never hangs."""

from __future__ import annotations

import os
import time

import pytest
import torch
from torch import distributed

from tests.parity.harness import Died, Ranks, RanksError, ranks


def add_up() -> float:
    """Add the ranks up."""
    mine = torch.tensor([float(distributed.get_rank())])
    distributed.all_reduce(mine)
    return mine.item()


def fail_on_one() -> None:
    """Raise on rank 1 while rank 0 waits for it."""
    if distributed.get_rank() == 1:
        raise ValueError("planted")
    distributed.barrier()


def refuse() -> None:
    """Raise the same everywhere."""
    raise ValueError("everywhere")


def sleep_on_one() -> None:
    """Take too long on rank 1."""
    if distributed.get_rank() == 1:
        time.sleep(60)


def die_on_one() -> str:
    """End rank 1."""
    if distributed.get_rank() == 1:
        os._exit(3)
    return "alive"


def environment() -> list[str | None]:
    """Return what torchrun would set."""
    return [os.environ.get(name) for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE")]


def test_ranks_stand_in_one_group(two: Ranks) -> None:
    """They see each other, and what torchrun would set."""
    assert two.run(add_up) == [1.0, 1.0]
    assert two.run(environment) == [["0", "0", "2"], ["1", "1", "2"]]


def test_a_failure_that_all_ranks_share_leaves_the_group_as_it_is(two: Ranks) -> None:
    """Its text names each rank."""
    before = [process.pid for process in two._processes]
    with pytest.raises(RanksError, match=r"(?s)rank 0: .*everywhere.*rank 1: .*everywhere"):
        two.run(refuse)
    assert [process.pid for process in two._processes] == before or not before
    assert two.run(add_up) == [1.0, 1.0]


def test_failures_deaths_and_hangs_are_told_and_the_next_call_works() -> None:
    """A rank that raises alone, one that sleeps, one that dies."""
    with ranks(2) as pool:
        with pytest.raises(RanksError, match="planted"):
            pool.run(fail_on_one)
        with pytest.raises(RanksError, match=r"(?s)rank 1 was not done in time.*sleep_on_one"):
            pool.run(sleep_on_one, limit_seconds=4.0)
        with pytest.raises(RanksError, match="rank 1 died with 3"):
            pool.run(die_on_one)
        assert pool.run(die_on_one, may_die=[1]) == ["alive", Died(3)]
        assert pool.run(add_up) == [1.0, 1.0]
