"""What a run of the benchmark found: plain numbers, as they are kept in results/*.json."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

from tests.bench.measure import Timing
from tests.bench.ratios import means, paired, spread


@dataclass(frozen=True)
class Row:
    """A case beside the unmonitored training."""

    case: str
    brief: str
    seconds: float
    """Of a step, the median."""
    spread: float
    """Interquartile range of the seconds over their median."""
    ratio: float
    """To the unmonitored step of the same round, the median."""
    low: float
    high: float
    """Its 95 % interval."""
    own: dict[str, float]
    """The case's own measured seconds a step, by part; empty for those that measure none."""
    values: int
    """Numbers that a sample of its layers exports."""


@dataclass(frozen=True)
class Table:
    """All cases on one model."""

    model: str
    parameters: int
    tensors: int
    steps: int
    """Steps a turn."""
    rounds: int
    step_seconds: float
    """Without monitoring, the median."""
    floor: float
    """How far from 1 the ratio of two unmonitored trainings can be: the noise."""
    rows: tuple[Row, ...]

    def row(self, case: str) -> Row | None:
        """Return the row of a case, None where it did not run."""
        return next((row for row in self.rows if row.case == case), None)

    def own_share(self, case: str) -> float | None:
        """Return a case's own seconds over the unmonitored step's."""
        row = self.row(case)
        return sum(row.own.values()) / self.step_seconds if row is not None and row.own else None


@dataclass(frozen=True)
class Budget:
    """A training whose every sample was made slow, block of steps by block of steps."""

    planted_seconds: float
    step_seconds: float
    steps: int
    """Steps a block."""
    ratios: tuple[float, ...]
    """To the unmonitored block before or after it."""
    own_shares: tuple[float, ...]
    """Own seconds of the block over unmonitored ones."""
    every_n_steps: tuple[int, ...]
    """The cadence in force at the end of the block."""


@dataclass(frozen=True)
class Processes:
    """Two processes under DDP, as rank 0 saw them."""

    table: Table
    sampled_steps: int
    """… in which collectives were counted."""
    collectives: dict[str, int]
    """Called from Python: by the ``training`` thread, and by ``others``; DDP's own come from C++ and are not among them."""


@dataclass(frozen=True)
class Results:
    """One run."""

    machine: dict[str, str]
    tables: tuple[Table, ...]
    budget: Budget | None = None
    processes: Processes | None = None

    def table(self, model: str, steps: int) -> Table | None:
        """Return the table of a model with so many steps a turn."""
        return next((t for t in self.tables if t.model == model and t.steps == steps), None)

    def to_json(self) -> str:
        """Return the file's text."""
        return json.dumps(_rounded(dataclasses.asdict(self)), indent=1) + "\n"

    @classmethod
    def from_json(cls, text: str) -> Results:
        """Read the file's text."""
        data = json.loads(text)
        budget, processes = data["budget"], data["processes"]
        return cls(
            machine=data["machine"],
            tables=tuple(_table(table) for table in data["tables"]),
            budget=None if budget is None else _budget(budget),
            processes=None if processes is None else Processes(**{**processes, "table": _table(processes["table"])}),
        )


def make_table(model: str, sizes: Sequence[int], steps: int, timings: Mapping[str, Timing], briefs: Mapping[str, str]) -> Table:
    """Compare all cases with the mean of ``none`` and ``again`` in the same round.

    Args:
        model: Its name.
        sizes: Elements of each of its parameters.
        steps: Steps a turn.
        timings: By case.
        briefs: What each case is.
    """
    none, again = timings["none"].turns, timings["again"].turns
    base = means(none, again)
    return Table(
        model=model,
        parameters=sum(sizes),
        tensors=len(sizes),
        steps=steps,
        rounds=len(base),
        step_seconds=median(base),
        floor=paired(again, none).floor,
        rows=tuple(_row(case, briefs[case], timing, base) for case, timing in timings.items()),
    )


def _row(case: str, brief: str, timing: Timing, base: Sequence[float]) -> Row:
    ratio = paired(timing.turns, base)
    return Row(
        case, brief, median(timing.turns), spread(timing.turns), ratio.median, ratio.low, ratio.high, dict(timing.own), timing.values
    )  # fmt: skip


def _table(data: dict[str, Any]) -> Table:
    return Table(**{**data, "rows": tuple(Row(**row) for row in data["rows"])})


def _budget(data: dict[str, Any]) -> Budget:
    lists = {name: tuple(value) for name, value in data.items() if isinstance(value, list)}
    return Budget(**{**data, **lists})


def _rounded(value: Any) -> Any:
    """Keep five digits, which is more than can be measured."""
    if isinstance(value, float):
        return float(f"{value:.5g}")
    if isinstance(value, dict):
        return {key: _rounded(v) for key, v in value.items()}
    return [_rounded(v) for v in value] if isinstance(value, (list, tuple)) else value
