"""The table of public reports cites what exists."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

from tests.parity.table import TABLE
from tests.reports import REPORTS, Report

FOLDER = Path(__file__).parent


def missing(report: Report) -> list[str]:
    """Return what a row cites that does not exist."""
    unknown = [row for row in report.rows if row not in TABLE]
    for test in report.tests:
        file, _, name = test.partition("::")
        path = FOLDER / file
        names = (
            {node.name for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.FunctionDef)}
            if path.exists()
            else set()
        )
        unknown += [] if name in names else [test]
    return unknown


def test_all_reports_are_there_once() -> None:
    """In the order of the research."""
    assert [report.number for report in REPORTS] == list(range(1, 86))


@pytest.mark.parametrize("report", REPORTS, ids=lambda report: str(report.number))
def test_what_covers_a_report_exists(report: Report) -> None:
    """Tests and rows, or a reason."""
    assert missing(report) == []
    assert report.tests or report.rows or report.why_not


def test_a_planted_citation_is_found() -> None:
    """The check above can fail."""
    wrong = Report(1, "x", ("test_layers.py::test_no_such_thing", "no_such_file.py::test_x"), ("no such row",))
    assert missing(wrong) == ["no such row", "test_layers.py::test_no_such_thing", "no_such_file.py::test_x"]
