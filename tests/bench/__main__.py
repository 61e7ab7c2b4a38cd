"""Runs the benchmark and writes its results: ``python -m tests.bench --help``."""

from __future__ import annotations

import argparse
import os
import platform
import shlex
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch

from otel_train._version import __version__
from tests.bench import budget, ddp, tables
from tests.bench.cases import CASES, missing
from tests.bench.measure import measure, watched
from tests.bench.models import MODELS
from tests.bench.results import Results, Table, make_table

_BASE = ("none", "again")


@dataclass(frozen=True)
class Plan:
    """A table that is to be measured."""

    model: str
    steps: int
    rounds: int
    cases: tuple[str, ...]


_SINGLE, _BLOCK = ("every-step", "between"), ("default",)
_PARTS = ("gradients", "histograms", "updates", "activations", "exact")
PLANS = (
    Plan("gpt-20m", 1, 24, (*_SINGLE, *_PARTS, "seed", "watch")),
    Plan("gpt-20m", 10, 8, (*_BLOCK, "every-10", "watch-10")),
    Plan("gpt-5m", 1, 40, _SINGLE),
    Plan("gpt-5m", 10, 12, _BLOCK),
    Plan("gpt-100m", 1, 12, _SINGLE),
    Plan("gpt-200-layers", 1, 24, _SINGLE),
    Plan("gpt-200-layers", 10, 4, _BLOCK),
    Plan("vit-22m", 1, 24, _SINGLE),
    Plan("vit-22m", 10, 4, _BLOCK),
)
"""In this order; about 25 minutes on two cores."""
_MODELS = tuple(dict.fromkeys(plan.model for plan in PLANS))
_BUDGET_BLOCKS, _DDP_ROUNDS = 30, 8
_QUICK_ROUNDS, _QUICK_BLOCKS, _QUICK_MODELS = 3, 14, ("gpt-5m",)
_SMALL, _DDP_STEPS = "gpt-5m", 10
"""The model of the budget and of the two processes, which are about time, not size."""


def main(arguments: Sequence[str] | None = None) -> int:
    """Run what the command line asks for."""
    options = _parser().parse_args(arguments)
    for case, reason in missing().items():
        print(f"left out: {case}: {reason}")
    results = Results.from_json(run(options).to_json())  # what is said is what the file says, digit by digit
    print(tables.report(results))
    if options.out is not None:
        write(results, options.out)
    if options.readme is not None:
        text = options.readme.read_text(encoding="utf-8")
        options.readme.write_text(tables.replace_block(text, tables.readme_block(results)), encoding="utf-8")
    return 0


def run(options: argparse.Namespace) -> Results:
    """Measure everything, or what was chosen."""
    models = options.models or (_QUICK_MODELS if options.quick else _MODELS)
    rounds = options.rounds or (_QUICK_ROUNDS if options.quick else None)
    found = tuple(run_plan(plan, options.cases, rounds or plan.rounds) for plan in PLANS if plan.model in models)
    followed, processes = None, None
    if _SMALL in models and options.cases is None:
        followed = budget.run_budget(MODELS[_SMALL](), blocks=_QUICK_BLOCKS if options.quick else _BUDGET_BLOCKS)
        processes = ddp.run_processes(_SMALL, rounds=rounds or _DDP_ROUNDS, steps=_DDP_STEPS)
    return Results(machine(), found, followed, processes)


def run_plan(plan: Plan, chosen: Sequence[str] | None, rounds: int) -> Table:
    """Measure a table; the two unmonitored cases are always in it."""
    names = [name for name in plan.cases if (chosen is None or name in chosen) and name not in missing()]
    cases = [CASES[name] for name in (*_BASE, *names)]
    print(f"{plan.model}: {', '.join(case.name for case in cases)}; {rounds} rounds of {plan.steps} steps", flush=True)
    training = MODELS[plan.model]()
    with watched(training, cases) as watches:
        timings = measure(watches, rounds=rounds, steps=plan.steps)
    sizes = [p.numel() for p in training.model.parameters()]
    return make_table(plan.model, sizes, plan.steps, timings, {case.name: case.brief for case in cases})


def machine() -> dict[str, str]:
    """Return where, when and with what it was measured."""
    return {
        "date": time.strftime("%Y-%m-%d"),
        "machine": f"{_processor()}, {os.cpu_count()} cores, {torch.get_num_threads()} threads",
        "versions": f"otel-train {__version__}, torch {torch.__version__}, Python {platform.python_version()}",
        "command": shlex.join(["python", "-m", "tests.bench", *sys.argv[1:]]),
    }


def _processor() -> str:
    """Return the processor's name, which only Linux's /proc tells in full."""
    cpuinfo = Path("/proc/cpuinfo")
    lines = cpuinfo.read_text(encoding="utf-8").splitlines() if cpuinfo.exists() else []
    return next((line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.processor())


def write(results: Results, folder: Path) -> None:
    """Write the results and the report."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "cpu.json").write_text(results.to_json(), encoding="utf-8")
    (folder / "cpu.md").write_text(tables.report(results), encoding="utf-8")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m tests.bench", description=__doc__.partition(":")[0])
    parser.add_argument("--models", nargs="+", choices=_MODELS, help="default: all")
    parser.add_argument("--cases", nargs="+", choices=sorted(CASES), help="besides none and again; default: all")
    parser.add_argument("--rounds", type=_rounds, help="of every table; default: more for small models than for large ones")
    parser.add_argument("--quick", action="store_true", help="a look in two minutes, not for figures")
    parser.add_argument("--out", type=Path, help="folder for cpu.json and cpu.md")
    parser.add_argument("--readme", type=Path, help="the README whose block is to be written anew")
    return parser


def _rounds(text: str) -> int:
    rounds = int(text)
    if rounds < 2:
        raise argparse.ArgumentTypeError("at least 2, or there is no interval")
    return rounds


if __name__ == "__main__":
    sys.exit(main())
