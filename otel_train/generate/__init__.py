"""Text from the catalog: every file that repeats it is written here, committed, and compared in CI."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from types import MappingProxyType

from otel_train.generate import deploy
from otel_train.generate.alerts import alerts
from otel_train.generate.overview import render_overview
from otel_train.generate.reference import render_reference
from otel_train.generate.rules import render_rules
from otel_train.generate.runbooks import render_runbook
from otel_train.generate.time_base import DEMO, STANDARD, TimeBase


def _prometheus_files(folder: str, time_base: TimeBase) -> dict[str, Callable[[], str]]:
    return {
        f"{folder}/alertmanager/alertmanager.yaml": partial(deploy.render_alertmanager, time_base),
        f"{folder}/prometheus/prometheus.yaml": partial(deploy.render_prometheus, time_base),
        f"{folder}/prometheus/rules/otel-train.yaml": partial(render_rules, time_base),
        f"{folder}/prometheus/targets/none.json": deploy.render_targets,
    }


ARTIFACTS: Mapping[str, Callable[[], str]] = MappingProxyType(
    {
        "dashboards/METRICS.md": render_reference,
        "dashboards/overview.json": render_overview,
        **_prometheus_files("deploy", STANDARD),
        "deploy/compose.yaml": deploy.render_compose,
        **_prometheus_files("deploy/demo", DEMO),
        "deploy/grafana/provisioning/dashboards/otel-train.yaml": deploy.render_dashboard_provider,
        "deploy/grafana/provisioning/datasources/otel-train.yaml": deploy.render_data_sources,
        **{f"deploy/runbooks/{alert.name}.md": partial(render_runbook, alert) for alert in alerts(STANDARD)},
    }
)
"""Path in the repository to what renders it; rendering is deterministic."""


def write(root: Path) -> list[str]:
    """Write the files that differ, and return their paths."""
    changed = [path for path, render in ARTIFACTS.items() if _read(root / path) != render()]
    for path in changed:
        (root / path).parent.mkdir(parents=True, exist_ok=True)
        (root / path).write_text(ARTIFACTS[path](), encoding="utf-8")
    return changed


def check(root: Path) -> list[str]:
    """Return a unified diff of every file that differs from what the catalog says; empty where none does."""
    differences = []
    for path, render in ARTIFACTS.items():
        found, expected = _read(root / path), render()
        if found != expected:
            lines = difflib.unified_diff(found.splitlines(), expected.splitlines(), path, f"{path} (generated)", lineterm="")
            differences.append("\n".join(lines) + "\nrun: otel-train generate")
    return differences


def _read(path: Path) -> str:
    return path.read_text(encoding="utf-8") if path.is_file() else ""
