"""Prometheus rule files."""

from __future__ import annotations

from typing import Any

from otel_train.assets import RUNBOOKS
from otel_train.generate.alerts import Alert, alerts
from otel_train.generate.promql import seconds
from otel_train.generate.recording import RecordingRule, recording_rules
from otel_train.generate.time_base import TimeBase
from otel_train.generate.yaml_text import HEAD, comment, dump, indent


def render_rules(time_base: TimeBase) -> str:
    """Return the rule file of a time base."""
    interval = seconds(time_base.scrape)
    return "\n".join(
        [
            HEAD.format(source="otel_train/generate/recording.py and alerts.py"),
            f"# Time base {time_base.name}: scraped every {interval}.",
            "groups:",
            "  # one group, so that an alert sees what the rules above it have just recorded",
            "  - name: otel-train",
            f"    interval: {interval}",
            "    rules:",
            *(indent(_recording(rule), 6) for rule in recording_rules(time_base)),
            *(indent(dump([_alert(alert)]), 6) for alert in alerts(time_base)),
            "",
        ]
    )


def runbook_url(alert: Alert) -> str:
    """Return the link to an alert's runbook, made of its name so that none can lack one."""
    return f"{RUNBOOKS}/{alert.name}.md"


def _recording(rule: RecordingRule) -> str:
    return f"{comment(rule.brief)}\n" + dump([{"record": rule.record, "expr": rule.expr}])


def _alert(alert: Alert) -> dict[str, Any]:
    rule: dict[str, Any] = {"alert": alert.name, "expr": alert.expr}
    if alert.hold_for:
        rule["for"] = seconds(alert.hold_for)
    if alert.keep_firing_for:
        rule["keep_firing_for"] = seconds(alert.keep_firing_for)
    annotations = {"summary": alert.summary, "description": alert.description, "runbook_url": runbook_url(alert)}
    return {**rule, "labels": {"severity": alert.severity}, "annotations": annotations}
