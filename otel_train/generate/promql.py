"""PromQL out of MetricSpecs: a query cannot name a metric or a label that the catalog does not define."""

from __future__ import annotations

from otel_train.catalog import BASE_LABELS, CATALOG, Instrument, MetricSpec
from otel_train.errors import CatalogError

RUN_LABELS = ("job", "run")
"""What tells runs apart. Ranks and whatever labels discovery adds are merged: a label that differed between ranks would make joins
ambiguous, and an ambiguous join fails for every run."""
TARGET_LABELS = ("job", "instance")
"""Labels that a scrape adds."""

_LABELS = {label for spec in CATALOG.values() for label in spec.labels} | {"rank", "instance", "le"}

Matcher = tuple[str, str]
"""A label with an operator at its end, and the value: ``("kind=~", "matrix|norm")``."""


def series(spec: MetricSpec, *matchers: Matcher, part: str = "") -> str:
    """Return a selector of a metric's series.

    Args:
        spec: The metric.
        matchers: What its labels must be.
        part: Of a histogram: ``bucket``, ``sum`` or ``count``.

    Raises:
        CatalogError: The catalog has no such metric, the metric no such label, or no such part.
    """
    if CATALOG.get(spec.prometheus_name) is not spec:
        raise CatalogError(f"{spec.name} is not in the catalog")
    if (spec.instrument is Instrument.HISTOGRAM) != (part in {"bucket", "sum", "count"}):
        raise CatalogError(f"{spec.name}: expected the part of a histogram, and of nothing else, got {part!r}")
    labels = (*BASE_LABELS, *TARGET_LABELS, *spec.labels, *(("le",) if part == "bucket" else ()))
    for label, _ in matchers:
        if label.rstrip("=~!") not in labels:
            raise CatalogError(f"{spec.name}: expected one of the labels {', '.join(labels)}, got {label}")
    return f"{spec.prometheus_name}{'_' + part if part else ''}{_braces(matchers)}"


def rate(spec: MetricSpec, window: str, *matchers: Matcher, part: str = "") -> str:
    """Return the per-second rate of a counter, or of a part of a histogram, over a window such as ``5m``."""
    return _over_window("rate", spec, window, matchers, part)


def increase(spec: MetricSpec, window: str, *matchers: Matcher, part: str = "") -> str:
    """Return by how much a counter, or a part of a histogram, grew in a window."""
    return _over_window("increase", spec, window, matchers, part)


def _over_window(function: str, spec: MetricSpec, window: str, matchers: tuple[Matcher, ...], part: str) -> str:
    if spec.instrument is Instrument.GAUGE:
        raise CatalogError(f"{spec.name}: expected a counter or a histogram for {function}(), got a gauge")
    return f"{function}({series(spec, *matchers, part=part)}[{window}])"


def merged(function: str, vector: str, *more: str) -> str:
    """Aggregate the ranks of each run, apart by `more` labels.

    Raises:
        CatalogError: No metric has such a label.
    """
    for label in more:
        if label not in _LABELS:
            raise CatalogError(f"expected one of the labels {', '.join(sorted(_LABELS))}, got {label}")
    return f"{function} by ({', '.join((*RUN_LABELS, *more))}) ({vector})"


def median(vector: str) -> str:
    """Return the median of each run."""
    return f"quantile by ({', '.join(RUN_LABELS)}) (0.5, {vector})"


def seconds(count: int) -> str:
    """Write a duration as Prometheus does: ``90s``, ``5m``, ``2h``."""
    for unit, size in (("h", 3600), ("m", 60)):
        if count and count % size == 0:
            return f"{count // size}{unit}"
    return f"{count}s"


def _braces(matchers: tuple[Matcher, ...]) -> str:
    written = ", ".join(f'{_operator(label)}"{value}"' for label, value in matchers)
    return f"{{{written}}}" if written else ""


def _operator(label: str) -> str:
    return label if label.endswith(("=", "~")) else f"{label}="
