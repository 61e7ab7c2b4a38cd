"""What otel-train claims about its cost, held against the results; said honestly where it does not hold."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from statistics import fmean, median

from tests.bench.results import Budget, Processes, Results, Table

MAIN = "gpt-20m"
SETTLED_STEPS = 100
"""Steps after which the budget is to be kept."""
_PERIOD = 10
"""Steps between samples by default."""


@dataclass(frozen=True)
class Claim:
    """A sentence with a limit, and what was measured."""

    text: str
    measured: str
    limit: str
    holds: bool


def check_claims(results: Results) -> list[Claim]:
    """Return the claims that the results can tell something about."""
    claims: list[Claim] = []
    single, block = results.table(MAIN, 1), results.table(MAIN, _PERIOD)
    if block is not None:
        claims += _default_step(block)
    if single is not None:
        claims += _sampled_step(single)
    claims += _sizes(results)
    if single is not None and block is not None:
        claims += _seed(single, block)
    if block is not None:
        claims += _watch(block)
    if results.budget is not None:
        claims += _budget(results.budget)
    if results.processes is not None:
        claims += _processes(results.processes)
    return claims


def cost(table: Table, case: str) -> float | None:
    """Return the seconds that a case adds to a step: its own where it measures them, else the ratio's."""
    row = table.row(case)
    if row is None:
        return None
    return sum(row.own.values()) or (row.ratio - 1) * table.step_seconds


def percent(share: float) -> str:
    """Return a share in words."""
    return f"{100 * share:.2f} %"


def _default_step(table: Table) -> Iterator[Claim]:
    row, share = table.row("default"), table.own_share("default")
    if row is None or share is None:
        return
    yield Claim(f"{MAIN}, default settings: own seconds over step seconds", percent(share), "0.50 %", share <= 0.005)
    distance = abs(row.ratio - 1)
    yield Claim(
        "… and the ratio's distance from 1, against the noise", f"{distance:.4f}", f"{table.floor:.4f}", distance <= table.floor
    )


def _sampled_step(table: Table) -> Iterator[Claim]:
    row = table.row("every-step")
    if row is not None:
        yield Claim(f"{MAIN}, everything on: a sampled step", f"{row.ratio:.3f}", "1.030", row.ratio <= 1.03)


def _sizes(results: Results) -> Iterator[Claim]:
    """Compare the shares of the smallest and the largest GPT; the deep narrow one is said, and held to nothing."""
    names = ("gpt-5m", "gpt-20m", "gpt-100m", "gpt-200-layers")
    tables = {name: results.table(name, 1) for name in names}
    shares = {name: share for name, table in tables.items() if table is not None and (share := _period_share(table)) is not None}
    if "gpt-5m" in shares and "gpt-100m" in shares:
        said = ", ".join(f"{name} {percent(share)}" for name, share in shares.items())
        limit = shares["gpt-5m"]
        yield Claim("Own share does not grow with the model", said, f"gpt-100m: {percent(limit)}", shares["gpt-100m"] <= limit)


def _period_share(table: Table) -> float | None:
    """Return the own share of a sampled step and nine between, which needs no turns of ten steps of a large model."""
    sampled, between = table.own_share("every-step"), table.own_share("between")
    return None if sampled is None or between is None else (sampled + (_PERIOD - 1) * between) / _PERIOD


def _seed(single: Table, block: Table) -> Iterator[Claim]:
    theirs = cost(single, "seed")
    for ours, text, least in (
        (cost(block, "default"), "the seed's method over ours with default settings", 20.0),
        (cost(single, "every-step"), "the seed's method over ours at every step", 3.0),
    ):
        if theirs is not None and ours:
            yield _times(f"Cost of a step: {text}", theirs / ours, least)


def _watch(block: Table) -> Iterator[Claim]:
    theirs, ours = cost(block, "watch-10"), cost(block, "every-10")
    their_row, our_row = block.row("watch-10"), block.row("every-10")
    if theirs is None or not ours or their_row is None or our_row is None:
        return
    yield _times('Cost: wandb.watch(log="all") over ours, both every 10 steps', theirs / ours, 50.0)
    if our_row.values and their_row.values:
        a_value = theirs / their_row.values / (ours / our_row.values)
        said = f"{a_value:.1f} times ({their_row.values:,} and {our_row.values:,} numbers a sample)"
        yield Claim("… by exported number", said, "at least 1 times", a_value >= 1)


def _times(text: str, ratio: float, least: float) -> Claim:
    return Claim(text, f"{ratio:.1f} times", f"at least {least:g} times", ratio >= least)


def _budget(budget: Budget) -> Iterator[Claim]:
    first = SETTLED_STEPS // budget.steps
    if len(budget.ratios) <= first:
        return
    planted, share, ratio = (
        budget.planted_seconds / budget.step_seconds,
        fmean(budget.own_shares[first:]),
        median(budget.ratios[first:]),
    )
    text = f"Every sample {percent(planted)} of a step slower: own share after {SETTLED_STEPS} steps"
    yield Claim(text, percent(share), "1.00 %", share <= 0.01)
    yield Claim("… and the steps, over unmonitored ones beside them", f"{ratio:.3f}", "1.010", ratio <= 1.01)


def _processes(processes: Processes) -> Iterator[Claim]:
    """The exchange costs what lies between the two cases, within the noise of both."""
    training, others = processes.collectives["training"], processes.collectives["others"]
    text = f"DDP, 2 processes: collectives of ours in the training thread, in {processes.sampled_steps} sampled steps"
    yield Claim(text, f"{training} (in other threads: {others})", "0", training == 0 < others)
    exchange, local = processes.table.row("exchange"), processes.table.row("local")
    if exchange is not None and local is not None:
        distance, noise = exchange.ratio - local.ratio, processes.table.floor
        yield Claim(
            "… ratio with the exchange less that without, against the noise", f"{distance:+.4f}", f"{noise:.4f}", distance <= noise
        )
