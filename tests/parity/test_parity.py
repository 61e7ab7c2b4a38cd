"""The table: every way of training shows what the unsharded one shows, and is what it is without the monitor."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.parity.compare import compare
from tests.parity.harness import Ranks
from tests.parity.reference import reference
from tests.parity.table import TABLE
from tests.parity.training import Outcome, run_case


def outcomes_of(name: str, request: pytest.FixtureRequest) -> list[Outcome]:
    """Run a row, in this process or on a pool of ranks."""
    case = TABLE[name]
    if case.ranks == 1:
        return [run_case(case)]
    pool: Ranks = request.getfixturevalue({2: "two", 4: "four"}[case.ranks])
    return pool.run(run_row, name)


def run_row(name: str) -> Outcome:
    """Run a row on this rank."""
    return run_case(TABLE[name])


@pytest.mark.parametrize("name", TABLE)
def test_sharded_training_exports_what_the_unsharded_one_does(
    name: str, request: pytest.FixtureRequest, note: Callable[[str], None]
) -> None:
    """Norms, means, ratios, activations, counts; each once, by its owner; and losses as without the monitor."""
    case, verdict = TABLE[name], "failed"
    try:
        report = compare(case, outcomes_of(name, request), reference(case))
        verdict = "pass" if not report.problems else f"{len(report.problems)} wrong"
        shown = f"{report.values:4} values, worst error {report.worst:5.1%} of its tolerance: {report.where}"
    finally:
        note(f"{name:42} {verdict:9} {shown if verdict != 'failed' else ''}")
    assert not report.problems, "\n".join(report.problems[:40])
