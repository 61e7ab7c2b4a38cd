"""What receivers that cannot be run here make of our pushes: their rules as tables with their source, and our metrics under them.

The collector (exporters ``prometheusremotewrite`` and ``prometheus``) and Prometheus' own OTLP receiver name by the same rules:

- prometheus/otlptranslator v1.0.0: metric_namer.go, label_namer.go, strategy.go; used by Prometheus 3.14
  (storage/remote/otlptranslator/prometheusremotewrite) and by the collector's pkg/translator/prometheusremotewrite;
- before it, the collector's own pkg/translator/prometheus/normalize_name.go, with the same tables.

Rows of NAMES, STRATEGIES and LABELS were compared with what the code of otlptranslator v1.0.0 itself returns.
"""

from __future__ import annotations

import math
import re
import struct

import pytest
from opentelemetry.proto.metrics.v1.metrics_pb2 import DataPointFlags

from otel_train import naming
from otel_train.catalog import BASE_LABELS, CATALOG, Instrument, MetricSpec, gradients, loss
from otel_train.sinks.otlp.resource import make_resource
from otel_train.snapshot import Sample
from tests.sinks.client_model import buckets
from tests.sinks.otlp.collector import points
from tests.sinks.otlp.test_message import LAYER, MAGNITUDES, encoder, read, snapshot
from tests.sinks.test_protobuf import one

GAUGE, COUNTER, UP_DOWN, HISTOGRAM = "gauge", "monotonic sum", "other sum", "histogram"

NAMES = [
    ("what is no letter, digit or colon parts words", "system.network.packet_loss", "", GAUGE, "system_network_packet_loss"),
    ("several in a row count as one", "a..b__c", "", GAUGE, "a_b_c"),
    ("a digit in front gets an underscore", "3d.points", "", GAUGE, "_3d_points"),
    ("the unit's word stands behind", "step.duration", "s", HISTOGRAM, "step_duration_seconds"),
    ("… of bytes", "memory.allocated", "By", GAUGE, "memory_allocated_bytes"),
    ("… unless it is a word of the name", "monitor.seconds", "s", COUNTER, "monitor_seconds_total"),
    ("… wherever in the name", "seconds.since", "s", GAUGE, "seconds_since"),
    ("an annotation is no unit", "tokens", "{token}", COUNTER, "tokens_total"),
    ("a rate has both words", "throughput", "By/s", GAUGE, "throughput_bytes_per_second"),
    ("… or the second", "requests", "1/s", GAUGE, "requests_per_second"),
    ("a unit that is not known stays", "size", "furlong", GAUGE, "size_furlong"),
    ("1 makes a gauge a ratio", "cpu.usage", "1", GAUGE, "cpu_usage_ratio"),
    ("… and nothing else", "items", "1", COUNTER, "items_total"),
    ("only a monotonic sum is a total", "queue.size", "", UP_DOWN, "queue_size"),
    ("total is moved to the end", "requests.total.bytes", "By", COUNTER, "requests_bytes_total"),
]
"""Rule, name, unit and kind in OpenTelemetry, name in Prometheus."""

STRATEGIES = {
    "UnderscoreEscapingWithSuffixes": "otel_train_monitor_seconds_total",
    "UnderscoreEscapingWithoutSuffixes": "otel_train_monitor_seconds",
    "NoUTF8EscapingWithSuffixes": "otel_train.monitor.seconds_total",
    "NoTranslation": "otel_train.monitor.seconds",
}
"""Prometheus' ``otlp.translation_strategy``, and the name of ``otel_train.monitor.seconds`` under it; the first is the default, and the
only one under which dashboards and rules find anything. In the collector: ``add_metric_suffixes: true``, its default."""

LABELS = [
    ("run", "run", "run"),
    ("param_group", "param_group", "param_group"),
    ("9x", "key_9x", "key_9x"),
    ("_team", "key_team", "_team"),
    ("a__b", "a__b", "a_b"),
]
"""An attribute, and the label that Prometheus 3.14 (with its defaults) and the collector make of it."""

_UNITS = {
    "d": "days", "h": "hours", "min": "minutes", "s": "seconds", "ms": "milliseconds", "us": "microseconds", "ns": "nanoseconds",
    "By": "bytes", "KiBy": "kibibytes", "MiBy": "mebibytes", "GiBy": "gibibytes", "KBy": "kilobytes", "MBy": "megabytes",
    "Hz": "hertz", "1": "", "%": "percent",
}  # fmt: skip
_PER = {"s": "second", "m": "minute", "h": "hour", "d": "day"}
ZERO_THRESHOLD = 1e-128
"""Both leave OTLP's out, and write this one."""
STALE = 0x7FF0_0000_0000_0002
"""Bits of the NaN that ends a series (Prometheus, model/value/value.go)."""


def translated(name: str, unit: str, kind: str) -> str:
    """Name a metric by the rules above."""
    words = re.findall(r"[A-Za-z0-9:]+", name)
    unit, _, per = unit.partition("/")
    for word in (_unit_word(unit, _UNITS, "{}"), _unit_word(per, _PER, "per_{}")):
        if word and word not in words:
            words.append(word)
    if kind == COUNTER:
        words = [*(word for word in words if word != "total"), "total"]
    if (unit, per, kind) == ("1", "", GAUGE):
        words = [*(word for word in words if word != "ratio"), "ratio"]
    result = "_".join(words)
    return f"_{result}" if result[0].isdigit() else result


def _unit_word(unit: str, words: dict[str, str], form: str) -> str:
    word = "" if "{" in unit else words.get(unit, unit)
    return form.format(word) if word else ""


def kind_of(spec: MetricSpec) -> str:
    """Return what a metric is in OTLP."""
    return {Instrument.GAUGE: GAUGE, Instrument.COUNTER: COUNTER, Instrument.HISTOGRAM: HISTOGRAM}[spec.instrument]


@pytest.mark.parametrize(("rule", "name", "unit", "kind", "expected"), NAMES, ids=[row[0] for row in NAMES])
def test_the_rules_are_those_of_the_table(rule: str, name: str, unit: str, kind: str, expected: str) -> None:
    """Or what follows says nothing."""
    assert translated(name, unit, kind) == expected, rule


@pytest.mark.parametrize("spec", CATALOG.values(), ids=lambda spec: spec.name)
def test_a_metric_is_named_as_on_the_scrape_road(spec: MetricSpec) -> None:
    """Pushed, and through a MeterProvider, where parts of histograms are metrics of their own."""
    assert translated(spec.name, spec.unit, kind_of(spec)) == spec.prometheus_name
    if spec.bounds:
        for part in ("bucket", "count", "sum"):
            name = naming.histogram_part(spec.name, spec.unit, part)
            assert translated(name, "", UP_DOWN) == f"{spec.prometheus_name}_{part}"


def test_one_strategy_alone_gives_the_names_of_the_scrape_road() -> None:
    """It is the default; README says to leave it."""
    (name,) = (spec.prometheus_name for spec in CATALOG.values() if spec.name == "otel_train.monitor.seconds")
    assert [strategy for strategy, given in STRATEGIES.items() if given == name] == ["UnderscoreEscapingWithSuffixes"]


def test_our_labels_stay_as_they_are() -> None:
    """Only users' own can be renamed: with an underscore or a digit in front, or two underscores in a row."""
    renamed = [attribute for attribute, *labels in LABELS if {*labels} != {attribute}]
    awkward = re.compile(r"^[_0-9]|__|[^A-Za-z0-9_]")
    assert [attribute for attribute, *_ in LABELS if awkward.search(attribute)] == renamed
    ours = {*BASE_LABELS, "le", *(label for spec in CATALOG.values() for label in spec.labels)}
    assert [label for label in ours if awkward.search(label)] == []
    assert not ours & {"job", "instance"}, "receivers write these over"


def test_job_and_instance_come_from_the_resource() -> None:
    """Of service.name and service.instance.id, without which there would be none: each monitor has both."""
    attributes = make_resource().attributes
    assert attributes["service.name"] == "otel-train"
    assert attributes["service.instance.id"] != make_resource().attributes["service.instance.id"]


def test_an_exponential_histogram_becomes_the_native_one_that_a_scrape_gives() -> None:
    """Schema is scale, a bucket's index one more than OTLP's; the zero bucket keeps its elements, its width gets lost."""
    (point,) = points(
        read(encoder().encode(snapshot(Sample(gradients.LAYER_GRAD_MAGNITUDE, LAYER, MAGNITUDES)), now=1000.5))
    ).values()
    scraped = one(gradients.LAYER_GRAD_MAGNITUDE, MAGNITUDES).histogram
    pushed = {point.positive.offset + 1 + i: count for i, count in enumerate(point.positive.bucket_counts) if count}
    assert pushed == {i: n for i, n in buckets(scraped.positive_span, scraped.positive_delta).items() if n}
    assert (point.scale, point.zero_count, point.count, point.sum) == (
        scraped.schema,
        scraped.zero_count,
        scraped.sample_count,
        scraped.sample_sum,
    )
    assert point.scale in range(-4, 9), "others are refused, or made coarser"
    assert ZERO_THRESHOLD < point.zero_threshold == scraped.zero_threshold


def test_sums_and_histograms_are_cumulative() -> None:
    """Deltas are dropped by both."""
    request = read(encoder().encode(snapshot(), now=1000.5))
    temporalities = {
        getattr(metric, str(metric.WhichOneof("data"))).aggregation_temporality
        for metric in request.resource_metrics[0].scope_metrics[0].metrics
        if metric.WhichOneof("data") != "gauge"
    }
    assert temporalities == {2}


def test_a_series_that_is_gone_ends_and_a_nan_does_not() -> None:
    """No recorded value becomes the NaN that ends a series; a loss that is no number must not."""
    push = encoder()
    push.encode(snapshot(), now=1000.5)
    (gone, *_) = (
        point
        for (name, _), point in points(read(push.encode(snapshot(Sample(loss.LOSS, (), math.nan)), now=1001.5))).items()
        if name == "otel_train.layer.grad_norm"
    )
    assert gone.flags == DataPointFlags.DATA_POINT_FLAGS_NO_RECORDED_VALUE_MASK
    (kept,) = (
        point
        for (name, _), point in points(read(push.encode(snapshot(Sample(loss.LOSS, (), math.nan)), now=1002.5))).items()
        if name == "otel_train.loss"
    )
    assert kept.flags == 0
    assert math.isnan(kept.as_double)
    assert struct.pack("<d", kept.as_double) != struct.pack("<Q", STALE)
