"""Shipped alerting rules: promtool runs the unit tests of tests/rules, which are written by hand."""

from __future__ import annotations

import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.servers import REPOSITORY, VERSIONS, Version, find_program

STANDARD_RULES = REPOSITORY / "deploy/prometheus/rules/otel-train.yaml"
DEMO_RULES = REPOSITORY / "deploy/demo/prometheus/rules/otel-train.yaml"
FOLDER = REPOSITORY / "tests/rules"
FILES = sorted(FOLDER.glob("*.yaml"))


def load(path: Path) -> Any:
    """Read a YAML file."""
    return yaml.safe_load(path.read_text(encoding="utf-8"))


def promtool(version: Version, *arguments: str) -> None:
    """Run promtool; fail with what it says if it does."""
    done = subprocess.run([find_program(version, "promtool"), *arguments], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def alerts(rules: Path) -> set[str]:
    """Return the names of the alerts in a rule file."""
    return {rule["alert"] for group in load(rules)["groups"] for rule in group["rules"] if "alert" in rule}


def expectations(file: Path, alert: str) -> list[bool]:
    """Return for each expectation about an alert in a test file whether it is to fire."""
    tests: list[dict[str, Any]] = load(file)["tests"]
    of_alerts = [entry for test in tests for entry in test.get("alert_rule_test", ()) if entry["alertname"] == alert]
    of_queries = [
        entry
        for test in tests
        for entry in test.get("promql_expr_test", ())
        if f'ALERTS{{alertname="{alert}", alertstate="firing"}}' in entry["expr"]
    ]
    return [bool(entry["exp_alerts"]) for entry in of_alerts] + [bool(entry["exp_samples"]) for entry in of_queries]


@pytest.mark.servers
@pytest.mark.parametrize("file", FILES, ids=lambda file: file.stem)
@pytest.mark.parametrize("version", VERSIONS)
def test_alerts_fire_and_are_silent_as_promised(version: Version, file: Path) -> None:
    """In Prometheus 3.5 and 2.42."""
    promtool(version, "test", "rules", str(file))


def test_each_alert_is_tested_firing_and_silent() -> None:
    """Each has a file named after it, with expectations of both kinds, and whole labels and annotations."""
    assert {file.stem for file in FILES} == alerts(STANDARD_RULES)
    for file in FILES:
        assert set(expectations(file, file.stem)) == {True, False}, file.name
        whole = [
            expected
            for test in load(file)["tests"]
            for entry in test.get("alert_rule_test", ())
            for expected in entry["exp_alerts"]
            if set(expected) == {"exp_labels", "exp_annotations"}
        ]
        assert whole, f"{file.name} shows no alert with its labels and annotations"


def test_each_file_tests_the_shipped_rules_and_says_what() -> None:
    """So that it can be run by hand, and its output be read."""
    for file in FILES:
        content = load(file)
        assert [(FOLDER / path).resolve() for path in content["rule_files"]] == [STANDARD_RULES], file.name
        names = [test["name"] for test in content["tests"]]
        assert all(name.endswith(".") for name in names), file.name
        assert len(set(names)) == len(names), file.name


@pytest.mark.servers
@pytest.mark.parametrize("rules", [STANDARD_RULES, DEMO_RULES], ids=["standard", "demo"])
@pytest.mark.parametrize("version", VERSIONS)
def test_promtool_accepts_the_rules(version: Version, rules: Path) -> None:
    """On the standard and the demo's time base."""
    promtool(version, "check", "rules", str(rules))
