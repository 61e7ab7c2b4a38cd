"""The latest Snapshot as Prometheus metrics: a collector for any registry, and the expositions that the endpoint serves."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import groupby

from prometheus_client import CollectorRegistry
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from otel_train import naming
from otel_train.catalog import Instrument, MetricSpec
from otel_train.sinks.negotiation import negotiate
from otel_train.sinks.renderings import Renderings
from otel_train.snapshot import HistogramValue, Sample, Snapshot


class SnapshotCollector(Collector):
    """Gives prometheus_client the latest Snapshot; no series before the first."""

    def __init__(self) -> None:
        self.snapshot: Snapshot | None = None

    def collect(self) -> Iterator[Metric]:
        """Yield the metrics of the Snapshot."""
        snapshot = self.snapshot
        if snapshot is None:
            return
        base = dict(snapshot.base_labels)
        for spec, samples in groupby(snapshot.samples, key=lambda sample: sample.spec):
            yield _metric(spec, list(samples), base)


def _metric(spec: MetricSpec, samples: list[Sample], base: dict[str, str]) -> Metric:
    name = spec.prometheus_name.removesuffix("_total") if spec.instrument is Instrument.COUNTER else spec.prometheus_name
    metric = Metric(name, spec.brief, spec.instrument.value, naming.unit_word(spec.unit))
    for sample in samples:
        labels = {**base, **dict(zip(spec.labels, sample.labels, strict=True))}
        if isinstance(sample.value, HistogramValue):
            _add_histogram(metric, spec, labels, sample.value)
        else:
            metric.add_sample(spec.prometheus_name, labels, sample.value)
    return metric


def _add_histogram(metric: Metric, spec: MetricSpec, labels: dict[str, str], value: HistogramValue) -> None:
    buckets, count = value.cumulated(spec.bounds)
    name = spec.prometheus_name
    for bound, upto in buckets:
        metric.add_sample(f"{name}_bucket", {**labels, "le": repr(bound)}, upto)
    metric.add_sample(f"{name}_bucket", {**labels, "le": "+Inf"}, count)
    if spec.has_sum:
        metric.add_sample(f"{name}_count", labels, count)
        metric.add_sample(f"{name}_sum", labels, value.total)


class PrometheusSink:
    """Keeps the latest Snapshot for scrapes.

    Attributes:
        registry: Of its own; prometheus_client's default registry is not touched.
    """

    def __init__(self) -> None:
        self.registry = CollectorRegistry(auto_describe=False)
        self._collector = SnapshotCollector()
        self.registry.register(self._collector)
        self._renderings = Renderings(lambda: self._collector.snapshot)

    @property
    def snapshot(self) -> Snapshot | None:
        """The latest Snapshot."""
        return self._collector.snapshot

    def publish(self, snapshot: Snapshot) -> None:
        """Serve this Snapshot from now on; rendering waits for a scrape."""
        self._collector.snapshot = snapshot

    def close(self) -> None:
        """Nothing to let go of: a user's application may go on serving the registry."""

    def render(self, accept: str, *, compress: bool) -> tuple[bytes, str]:
        """Return the exposition and its content type, rendered once a Snapshot whatever the number of scrapers.

        Args:
            accept: The Accept header: protobuf or OpenMetrics where it is asked for, else text 0.0.4.
            compress: Whether to gzip it.
        """
        form, content_type = negotiate(accept)
        return self._renderings.exposition(form, compress=compress), content_type

    def page(self) -> bytes:
        """Return the page for a person, rendered once a Snapshot."""
        return self._renderings.page()
