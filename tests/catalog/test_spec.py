"""MetricSpec and the catalog."""

from __future__ import annotations

import pytest

from otel_train.catalog import BASE_LABELS, CATALOG, FAMILIES, Instrument, MetricSpec, specs_of
from otel_train.catalog.spec import counter, gauge, histogram
from otel_train.errors import CatalogError


def test_every_metric_is_named_for_this_project_and_stands_in_one_family() -> None:
    """Families do not overlap, and nothing is named outside of the prefix."""
    named = [spec.prometheus_name for family in FAMILIES for spec in specs_of(family)]
    assert named == list(CATALOG)
    assert all(name.startswith("otel_train_") for name in named)


def test_units_and_instruments_show_in_the_names() -> None:
    """Prometheus' conventions: base units and _total."""
    for name, spec in CATALOG.items():
        assert name.endswith("_total") == (spec.instrument is Instrument.COUNTER)
        assert ("seconds" in name.removesuffix("_total").rpartition("_")[2]) == (spec.unit == "s")
        assert name.endswith("_bytes") == (spec.unit == "By")


def test_no_metric_repeats_a_base_label() -> None:
    """Run and rank are on every series already."""
    assert not [name for name, spec in CATALOG.items() if set(spec.labels) & set(BASE_LABELS)]


def test_histogram_bounds_of_magnitudes_are_powers_of_two() -> None:
    """Counted bins add up to exported buckets only if the bounds are among them."""
    bounds = CATALOG["otel_train_layer_grad_magnitude"].bounds
    assert all(bound.hex().startswith("0x1.0000000000000p") for bound in bounds)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: gauge("otel_train.x", "no full stop"), "a sentence"),
        (lambda: gauge("otel_train_x", "Flat name."), "a name like"),
        (lambda: gauge("otel_train.x", "Unit.", unit="ms"), "a unit of"),
        (lambda: histogram("otel_train.x", "Bounds.", (2.0, 1.0)), "ascending"),
        (lambda: gauge("otel_train.x", "Bounds.", bounds=(1.0,)), "a histogram has bounds"),
        (lambda: MetricSpec("otel_train.x", Instrument.HISTOGRAM, "Bounds."), "a histogram has bounds"),
    ],
)  # fmt: skip
def test_a_definition_that_no_sink_could_export_is_refused(make: object, message: str) -> None:
    """At import, so that it cannot be committed."""
    assert callable(make)
    with pytest.raises(CatalogError, match=message):
        make()


def test_a_spec_carries_its_prometheus_name() -> None:
    """Derived once, from naming.py."""
    assert counter("otel_train.data_wait", "Wait.", unit="s").prometheus_name == "otel_train_data_wait_seconds_total"
