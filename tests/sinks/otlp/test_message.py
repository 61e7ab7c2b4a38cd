"""Snapshots as OTLP requests, read back with the published messages."""

from __future__ import annotations

import dataclasses
import math

import pytest
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
from opentelemetry.sdk.resources import Resource

from otel_train.catalog import CATALOG, gradients, loss, monitor, run, throughput
from otel_train.sinks.otlp.message import Encoder, Message, halves
from otel_train.snapshot import HistogramValue, Sample, Snapshot
from tests.sinks.otlp.collector import points

LAYER = ("blocks.0", "0", "matrix", "0")
BINS = tuple(2.0**exponent for exponent in range(-46, 17))
MAGNITUDES = HistogramValue(BINS, (7, *range(1, 64)), 12.5)
DURATIONS = HistogramValue(throughput.STEP_DURATION.bounds, tuple(range(len(throughput.STEP_DURATION.bounds) + 1)), 3.25)
SAMPLES = (
    Sample(run.RUN_ACTIVE, (), 1),
    Sample(run.STEPS, (), 41),
    Sample(loss.LOSS, (), 2.5),
    Sample(gradients.LAYER_GRAD_NORM, LAYER, 0.125),
    Sample(gradients.LAYER_GRAD_MAGNITUDE, LAYER, MAGNITUDES),
    Sample(throughput.STEP_DURATION, (), DURATIONS),
)
BASE = (("run", "r"), ("rank", "3"), ("team", "a"))


def snapshot(*samples: Sample) -> Snapshot:
    """Return a Snapshot of these samples, or of one of each kind."""
    return Snapshot(BASE, 1000.0, samples or SAMPLES, started_at=900.25)


def read(message: Message) -> ExportMetricsServiceRequest:
    """Return what a collector reads."""
    return ExportMetricsServiceRequest.FromString(message.body)


def encoder() -> Encoder:
    """Return an encoder that has seen nothing."""
    return Encoder(Resource({"service.name": "mine", "process.pid": 7, "flags": (True, False), "x": 0.5}))


def test_every_value_arrives_with_its_labels_type_and_time() -> None:
    """Gauges, counters with the time when they were 0, and both kinds of histogram."""
    message = encoder().encode(snapshot(), now=1000.5)
    request = read(message)
    (of_resource,) = request.resource_metrics
    (scope,) = of_resource.scope_metrics
    kinds = {metric.name: metric.WhichOneof("data") for metric in scope.metrics}
    assert kinds == {
        "otel_train.run_active": "gauge",
        "otel_train.steps": "sum",
        "otel_train.loss": "gauge",
        "otel_train.layer.grad_norm": "gauge",
        "otel_train.layer.grad_magnitude": "exponential_histogram",
        "otel_train.step.duration": "histogram",
    }
    found = points(request)
    assert message.points == len(found) == 6
    base = tuple(sorted(BASE))
    labels = tuple(sorted((*BASE, *zip(gradients.LAYER_GRAD_NORM.labels, LAYER, strict=True))))
    assert found["otel_train.loss", base].as_double == 2.5
    assert found["otel_train.layer.grad_norm", labels].as_double == 0.125
    assert {point.time_unix_nano for point in found.values()} == {1_000_500_000_000}
    steps = found["otel_train.steps", base]
    assert (steps.as_double, steps.start_time_unix_nano) == (41.0, 900_250_000_000)
    counter = next(metric.sum for metric in scope.metrics if metric.name == "otel_train.steps")
    assert counter.is_monotonic
    assert counter.aggregation_temporality == 2, "cumulative"
    assert {attribute.key for attribute in of_resource.resource.attributes} == {"service.name", "process.pid", "flags", "x"}


def test_histograms_keep_each_count_in_its_bucket() -> None:
    """An OTLP bucket i is (2^i, 2^(i + 1)]: the bin that ends at 2^e has index e - 1."""
    found = points(read(encoder().encode(snapshot(), now=1000.5)))
    by_name = {name: point for (name, _), point in found.items()}
    exponential = by_name["otel_train.layer.grad_magnitude"]
    assert exponential.scale == 0
    assert (exponential.zero_threshold, exponential.zero_count) == (2.0**-46, 7)
    assert (exponential.count, exponential.sum, exponential.start_time_unix_nano) == (7 + sum(range(1, 64)), 12.5, 900_250_000_000)
    got = {2.0 ** (exponential.positive.offset + i + 1): count for i, count in enumerate(exponential.positive.bucket_counts)}
    assert got == {**dict(zip(BINS[1:], MAGNITUDES.counts[1:], strict=False)), 2.0**17: 63}, "the last holds what is larger"
    duration = by_name["otel_train.step.duration"]
    assert tuple(duration.explicit_bounds) == DURATIONS.bounds
    assert tuple(duration.bucket_counts) == DURATIONS.counts
    assert (duration.count, duration.sum) == (sum(DURATIONS.counts), 3.25)


def test_signed_values_have_buckets_below_zero_and_no_sum() -> None:
    """Negative elements by size, in the buckets of the positive ones; of what can fall there is no sum, as the specification has it."""
    value = HistogramValue((-1.0, -0.5, 0.5, 1.0), (2, 3, 6, 1, 4), -1.5, negative=(4, 1))
    (point,) = points(read(encoder().encode(snapshot(Sample(gradients.LAYER_GRAD_VALUE, LAYER, value)), now=1.0))).values()
    assert (point.zero_count, point.count) == (6, 16)
    assert (point.positive.offset, list(point.positive.bucket_counts)) == (-1, [1, 4])
    assert (point.negative.offset, list(point.negative.bucket_counts)) == (-1, [4, 1])
    assert not point.HasField("sum")


def test_the_next_snapshot_has_its_own_numbers_in_the_message_that_is_kept() -> None:
    """Nothing of the last one is left, and what went out does not change."""
    kept = encoder()
    first = kept.encode(snapshot(), now=1000.5)
    halved = dataclasses.replace(MAGNITUDES, counts=tuple(count // 2 for count in MAGNITUDES.counts), total=1.0)
    changed = [dataclasses.replace(sample, value=halved if sample.value is MAGNITUDES else sample.value) for sample in SAMPLES]
    changed[2] = Sample(loss.LOSS, (), math.nan)
    second = kept.encode(snapshot(*changed), now=1010.5)
    assert second.body == encoder().encode(snapshot(*changed), now=1010.5).body
    assert first.body == encoder().encode(snapshot(), now=1000.5).body
    assert first.body != second.body


def test_a_series_that_is_gone_is_sent_once_without_a_value() -> None:
    """So that a store lets go of it; and it may come back."""
    kept = encoder()
    kept.encode(snapshot(), now=1000.0)
    without = [sample for sample in SAMPLES if sample.spec not in {loss.LOSS, gradients.LAYER_GRAD_MAGNITUDE}]
    message = kept.encode(snapshot(*without), now=1010.0)
    by_name = {name: point for (name, _), point in points(read(message)).items()}
    assert message.points == len(by_name) == 6
    assert {name for name, point in by_name.items() if point.flags == 1} == {"otel_train.loss", "otel_train.layer.grad_magnitude"}
    assert by_name["otel_train.loss"].WhichOneof("value") is None
    assert by_name["otel_train.loss"].time_unix_nano == 1_010_000_000_000
    again = points(read(kept.encode(snapshot(*without), now=1020.0)))
    assert len(again) == 4
    assert not any(point.flags for point in again.values())
    back = points(read(kept.encode(snapshot(), now=1030.0)))
    assert len(back) == 6
    assert not any(point.flags for point in back.values())


def test_units_are_those_of_the_catalog() -> None:
    """Roads make names of them: seconds and bytes alone do."""
    samples = [Sample(spec, tuple("x" for _ in spec.labels), 1.0) for spec in CATALOG.values() if not spec.bounds]
    request = read(encoder().encode(snapshot(*samples), now=1.0))
    units = {metric.name: metric.unit for scope in request.resource_metrics[0].scope_metrics for metric in scope.metrics}
    assert units == {spec.name: spec.unit for spec in CATALOG.values() if not spec.bounds}


def test_a_label_that_is_no_unicode_is_sent_all_the_same() -> None:
    """A module's name may hold half a surrogate."""
    request = read(encoder().encode(snapshot(Sample(gradients.LAYER_GRAD_NORM, ("a\udc80", "0", "matrix", "0"), 1.0)), now=1.0))
    ((_, labels),) = points(request)
    assert dict(labels)["layer"] == "a?"


@pytest.mark.parametrize("count", [2, 3, 1001])
def test_a_request_is_cut_in_halves_that_hold_every_point_once(count: int) -> None:
    """Also within one metric."""
    samples = [Sample(gradients.LAYER_GRAD_NORM, (f"layer{i}", str(i), "matrix", "0"), float(i)) for i in range(count - 1)]
    samples.append(Sample(monitor.OVERHEAD, (), 0.5))
    whole = encoder().encode(snapshot(*samples), now=1.0)
    first, second = halves(whole)
    assert (first.points, second.points) == (count // 2, count - count // 2)
    parts = [points(read(part)) for part in (first, second)]
    assert [len(part) for part in parts] == [first.points, second.points]
    together = {**parts[0], **parts[1]}
    assert {key: point.as_double for key, point in together.items()} == {
        key: point.as_double for key, point in points(read(whole)).items()
    }
    for part in (first, second):
        assert all(metric.WhichOneof("data") for metric in read(part).resource_metrics[0].scope_metrics[0].metrics)
