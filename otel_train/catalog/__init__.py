"""The catalog: every metric of otel-train, defined once. No torch here."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType, ModuleType

from otel_train.catalog import activations, gradients, loss, monitor, otlp, parameters, run, throughput, updates
from otel_train.catalog.spec import BASE_LABELS, LAYER_LABELS, SITE_LABELS, Instrument, MetricSpec, Reduction
from otel_train.errors import CatalogError

FAMILIES: tuple[ModuleType, ...] = (run, loss, gradients, parameters, updates, activations, throughput, monitor, otlp)


def specs_of(family: ModuleType) -> list[MetricSpec]:
    """Return the specs of one family, in the order of definition."""
    return [value for value in vars(family).values() if isinstance(value, MetricSpec)]


def _collect() -> Mapping[str, MetricSpec]:
    by_name: dict[str, MetricSpec] = {}
    for spec in (spec for family in FAMILIES for spec in specs_of(family)):
        if spec.prometheus_name in by_name:
            raise CatalogError(f"{spec.prometheus_name} is defined twice")
        by_name[spec.prometheus_name] = spec
    return MappingProxyType(by_name)


CATALOG: Mapping[str, MetricSpec] = _collect()
"""Prometheus name to spec, in the order of the families."""

__all__ = [
    "BASE_LABELS",
    "CATALOG",
    "FAMILIES",
    "LAYER_LABELS",
    "SITE_LABELS",
    "Instrument",
    "MetricSpec",
    "Reduction",
    "specs_of",
]
