"""Results as Markdown: the report that is kept beside the JSON, and the part of it that README quotes."""

from __future__ import annotations

import re
from collections.abc import Sequence

from tests.bench.claims import Claim, check_claims, percent
from tests.bench.results import Budget, Results, Row, Table

BEGIN, END = "<!-- bench: written by make bench -->", "<!-- /bench -->"


def report(results: Results) -> str:
    """Return the whole report."""
    parts = ["# What monitoring costs", facts(results), claims_table(check_claims(results))]
    parts += [section(table) for table in results.tables]
    if results.processes is not None:
        parts.append(section(results.processes.table))
    if results.budget is not None:
        parts.append(budget_section(results.budget))
    return "\n\n".join(parts) + "\n"


def readme_block(results: Results) -> str:
    """Return what README quotes, with its markers."""
    return "\n\n".join([BEGIN, facts(results), claims_table(check_claims(results)), END])


def replace_block(readme: str, block: str) -> str:
    """Return README with another block between the markers.

    Raises:
        ValueError: There are no markers.
    """
    found = find_block(readme)
    return readme.replace(found, block)


def find_block(readme: str) -> str:
    """Return the block in README, with its markers.

    Raises:
        ValueError: There are no markers.
    """
    match = re.search(re.escape(BEGIN) + ".*?" + re.escape(END), readme, re.DOTALL)
    if match is None:
        raise ValueError(f"no block between {BEGIN} and {END}")
    return match.group()


def facts(results: Results) -> str:
    """Return where and when it was measured."""
    return "; ".join(f"{name}: {value}" for name, value in results.machine.items()) + "."


def claims_table(claims: Sequence[Claim]) -> str:
    """Return the claims beside what was measured."""
    lines = ["| claim | measured | limit | |", "|---|---|---|---|"]
    lines += [f"| {c.text} | {c.measured} | {c.limit} | {'holds' if c.holds else '**does not hold**'} |" for c in claims]
    return "\n".join(lines)


def section(table: Table) -> str:
    """Return a model's cases."""
    turn = "steps one by one" if table.steps == 1 else f"blocks of {table.steps} steps"
    said = (
        f"{table.parameters / 1e6:.1f} M parameters in {table.tensors} tensors, {1e3 * table.step_seconds:.1f} ms a step without "
        f"monitoring, {table.rounds} rounds. Noise: two unmonitored trainings differ by up to {table.floor:.4f}."
    )
    return "\n".join(
        [
            f"## {table.model}, {turn}",
            "",
            said,
            "",
            "| case | ms a step (interquartile range) | ratio (95 % interval) | own seconds over step seconds | numbers a sample |",
            "|---|---|---|---|---|",
            *(_line(row, table.step_seconds) for row in table.rows),
        ]
    )


def _line(row: Row, step_seconds: float) -> str:
    cells = [
        row.brief,
        f"{1e3 * row.seconds:.1f} ({percent(row.spread)})",
        f"{row.ratio:.4f} ({row.low:.4f} to {row.high:.4f})",
        _own(row, step_seconds),
        f"{row.values:,}" if row.values else "",
    ]
    return f"| {' | '.join(cells)} |"


def _own(row: Row, step_seconds: float) -> str:
    """Return the own share, and the parts that make up a tenth of it or more."""
    total = sum(row.own.values())
    if not total:
        return ""
    parts = sorted(row.own.items(), key=lambda part: -part[1])
    said = ", ".join(f"{name} {percent(seconds / step_seconds)}" for name, seconds in parts if seconds >= total / 10)
    return f"{percent(total / step_seconds)}: {said}"


def budget_section(budget: Budget) -> str:
    """Return how the cost came down."""
    lines = [
        "## The budget at work",
        "",
        f"Every sample sleeps for {1e3 * budget.planted_seconds:.0f} ms, where a step takes {1e3 * budget.step_seconds:.0f} ms.",
        "",
        "| steps | ratio to unmonitored steps | own share | cadence |",
        "|---|---|---|---|",
    ]
    blocks = zip(budget.ratios, budget.own_shares, budget.every_n_steps, strict=True)
    for i, (ratio, share, every) in enumerate(blocks):
        lines.append(f"| {i * budget.steps + 1} to {(i + 1) * budget.steps} | {ratio:.3f} | {percent(share)} | {every} |")
    return "\n".join(lines)
