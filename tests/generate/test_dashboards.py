"""Dashboards: every query exists, and the conventions of Grafana's dashboard-linter hold, each with its reason."""

from __future__ import annotations

import json
from typing import Any

import pytest

from otel_train import generate
from tests.generate.queries import selectors, unknown

DASHBOARDS = {
    path: json.loads(render()) for path, render in generate.ARTIFACTS.items() if path.endswith(".json") and "dash" in path
}


@pytest.fixture(params=DASHBOARDS)
def board(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Return each dashboard in turn."""
    return dict(DASHBOARDS[request.param])


def panels(board: dict[str, Any]) -> list[dict[str, Any]]:
    """Return the panels that show data."""
    return [panel for panel in board["panels"] if panel["type"] != "row"]


def expressions(board: dict[str, Any]) -> list[str]:
    """Return all queries, those of annotations too."""
    queries = [target["expr"] for panel in panels(board) for target in panel["targets"]]
    return queries + [entry["expr"] for entry in board["annotations"]["list"] if "expr" in entry]


def test_every_query_names_metrics_and_labels_that_exist(board: dict[str, Any]) -> None:
    """Read back by another parser than wrote them."""
    for expression in expressions(board):
        assert unknown(expression) == set(), expression


def test_every_query_asks_for_the_chosen_job_and_run(board: dict[str, Any]) -> None:
    """Or a panel mixes runs."""
    for expression in expressions(board):
        for selector in selectors(expression):
            assert selector.matchers.get("run") == "r", expression
            assert "job" in selector.matchers, expression


def test_every_panel_says_what_it_shows_and_in_which_unit(board: dict[str, Any]) -> None:
    """Title, description, unit, the chosen data source."""
    for panel in panels(board):
        assert panel["title"]
        assert panel["description"].endswith((".", ".`"))
        assert panel["datasource"] == {"type": "prometheus", "uid": "${datasource}"}
        if panel["type"] != "table":  # its columns differ
            assert panel["fieldConfig"]["defaults"]["unit"], panel["title"]


def test_counters_are_only_shown_as_what_they_grew_by(board: dict[str, Any]) -> None:
    """Over an interval that fits the scrapes."""
    for expression in expressions(board):
        for selector in selectors(expression):
            if selector.name.endswith(("_total", "_bucket", "_sum", "_count")):
                assert any(f"{f}({selector.name}" in expression for f in ("rate", "increase")), expression
                assert "[$__rate_interval]" in expression


def test_ids_are_stable_and_nothing_is_editable(board: dict[str, Any]) -> None:
    """Links lead to them; what is edited by hand is lost at the next update."""
    assert board["uid"].startswith("otel-train-")
    assert board["title"].startswith("Training / ")
    assert board["editable"] is False
    assert board["tags"] == ["otel-train"]
    assert "Do not edit" in board["description"]
    assert [panel["id"] for panel in board["panels"]] == list(range(1, len(board["panels"]) + 1))


def test_variables_choose_data_source_job_and_run(board: dict[str, Any]) -> None:
    """Reloaded with the time range: runs come and go."""
    variables = {variable["name"]: variable for variable in board["templating"]["list"]}
    assert list(variables) == ["datasource", "job", "run"]
    assert variables["datasource"]["label"] == "Data source"
    assert (variables["job"]["multi"], variables["job"]["allValue"]) == (True, ".+")
    assert all(variables[name]["refresh"] == 2 for name in ("job", "run"))


def test_panels_lie_on_the_grid_without_overlap(board: dict[str, Any]) -> None:
    """24 columns."""
    taken: set[tuple[int, int]] = set()
    for panel in board["panels"]:
        at = panel["gridPos"]
        cells = {(x, y) for x in range(at["x"], at["x"] + at["w"]) for y in range(at["y"], at["y"] + at["h"])}
        assert not cells & taken, panel["title"]
        assert at["x"] + at["w"] <= 24
        taken |= cells
