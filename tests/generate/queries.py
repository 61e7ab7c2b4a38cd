"""What PromQL expressions name: read by a parser that is not ours."""

from __future__ import annotations

import re
from dataclasses import dataclass

import promql_parser

from otel_train.catalog import BASE_LABELS, CATALOG, Instrument
from otel_train.generate.recording import recording_rules
from otel_train.generate.time_base import STANDARD

PROMETHEUS_OWN = {"up": set(), "scrape_duration_seconds": set(), "ALERTS": {"alertname", "alertstate", "run"}}
"""Series that Prometheus makes, and labels they are asked for by."""


def parsed(expression: str) -> promql_parser.Expr:
    """Parse a query of a rule or a panel; a panel's variables get a value."""
    variables = {"$__rate_interval": "1m", "$job": ".+", "$run": "r"}
    for name, value in variables.items():
        expression = expression.replace(name, value)
    return promql_parser.parse(expression)


@dataclass(frozen=True)
class Selector:
    """A metric's name, and what its labels must be."""

    name: str
    matchers: dict[str, str]


def selectors(expression: str) -> list[Selector]:
    """Return the selectors of a query."""
    found: list[Selector] = []

    def visit(node: promql_parser.Expr) -> bool:
        if isinstance(node, promql_parser.VectorSelector):
            found.append(Selector(node.name or "", {matcher.name: matcher.value for matcher in node.matchers.matchers}))
        return True

    promql_parser.walk(parsed(expression), visit)
    return found


def labels_of(name: str) -> set[str] | None:
    """Return the labels that series of a name have, besides those of discovery; None where nothing exports it."""
    if name in PROMETHEUS_OWN:
        return PROMETHEUS_OWN[name]
    if name in {rule.record for rule in recording_rules(STANDARD)}:
        return {"run", "layer", "depth", "kind", "param_group"}
    spec = CATALOG.get(name) or CATALOG.get(re.sub(r"_(bucket|sum|count)$", "", name))
    if spec is None or (spec.instrument is Instrument.HISTOGRAM) == (name in CATALOG):
        return None
    return {*BASE_LABELS, *spec.labels, *(["le"] if name.endswith("_bucket") else [])}


def unknown(expression: str) -> set[str]:
    """Return the metrics and labels of a query that do not exist."""
    wrong: set[str] = set()
    for selector in selectors(expression):
        labels = labels_of(selector.name)
        if labels is None:
            wrong.add(selector.name)
            continue
        wrong |= {f"{selector.name}{{{label}}}" for label in selector.matchers.keys() - labels - {"job", "instance"}}
    return wrong
