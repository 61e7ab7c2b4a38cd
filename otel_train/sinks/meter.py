"""The latest Snapshot in an OpenTelemetry pipeline that the user runs: observable instruments, which its readers ask."""

from __future__ import annotations

import math
import os
import threading
import time
import weakref
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import groupby
from typing import TYPE_CHECKING

from otel_train import naming
from otel_train._version import __version__
from otel_train.catalog import CATALOG, Instrument, MetricSpec
from otel_train.errors import ConfigError, MissingDependencyError
from otel_train.snapshot import HistogramValue, Sample, Snapshot

if TYPE_CHECKING:
    from opentelemetry.metrics import CallbackT, Meter, MeterProvider

_Labels = tuple[tuple[str, str], ...]
_Point = tuple[dict[str, str], float]
"""Attributes and a number."""


class MeterSink:
    """Publishes through a MeterProvider that you already run, with the names and labels that a scrape gives.

    ``attach(model, optimizer, sinks=[otel_train.MeterSink(provider)])``. It needs opentelemetry-api alone; the global provider is
    not touched. The provider's readers ask for the latest values in their own threads, and never wait for us. The limits of this
    road are those of OpenTelemetry's API and SDK; where they hurt, push over OTLP or let a Prometheus scrape:

    - The SDK keeps 2,000 attribute sets an instrument (since 1.45.2), counted from the provider's beginning, and frees none; what
      comes later is merged into one point with ``otel.metric.overflow``. For more layers, or many runs, give the reader, such as
      PeriodicExportingMetricReader, ``cardinality_limits={ObservableGauge: 100_000, ObservableCounter: 100_000,
      ObservableUpDownCounter: 100_000}``.
    - A reader's collection takes the SDK about 10 µs of the interpreter a point, in the reader's thread: 0.1 s for 10,000. That is
      not counted as ours, and ``max_overhead`` does not bound it.
    - The API has no observable histogram. Buckets, count and sum go as up-down counters of their own, ``le`` being an attribute, so
      that a store with Prometheus' names holds the classic histogram that a scrape gives (of signed values the buckets alone);
      exponential histograms cannot be had.
    - Numbers that are not finite have no series, since the SDK drops them; ``otel_train_nonfinite_total`` counts what was found.
    - A gauge that is gone is left out of what is exported; the store lets go of it after its own time (Prometheus: 5 minutes).
    - The start time of a counter is when the reader first saw it, not when the run began, also where a run of the same name is
      attached again and counts anew: a reader that prefers deltas then exports a negative one.
    - Forked processes export nothing of ours, though the SDK restarts its reader in them.

    After ``close`` the last values, with ``run_active`` 0, stay for `linger_seconds`, so that each reader takes them once, then
    there is nothing. Where a process ends without Python's exit handlers, call ``provider.force_flush()`` after ``Monitor.close``.

    Args:
        provider: Whose readers export the metrics. Sinks of one provider share its instruments. They must differ in the labels of
            all their series: two models of one run need ``labels={"model": …}``, else the second is refused. Each monitor needs a
            sink of its own.
        linger_seconds: How long the last values stay: longer than the interval of each reader, which is 60 s by default.

    Raises:
        MissingDependencyError: opentelemetry-api is not installed.
        ConfigError: This is no MeterProvider, or it is the API's stand-in for one that is not set yet; or no such time.
    """

    def __init__(self, provider: MeterProvider, *, linger_seconds: float = 120.0) -> None:
        if not 0 <= linger_seconds < math.inf:
            raise ConfigError(f"MeterSink: expected linger_seconds of at least 0, got {linger_seconds!r}")
        self._shown = _instruments_of(provider).shown
        self._linger = linger_seconds

    def publish(self, snapshot: Snapshot) -> None:
        """Have the readers find this Snapshot from now on.

        Raises:
            ConfigError: Another monitor has this sink, or shows the same labels: the two cannot be told apart.
        """
        self._forget_what_is_over()
        for labels, shown in list(self._shown.items()):
            if shown.until == math.inf:
                self._check(snapshot, labels, shown)
        self._shown[snapshot.base_labels] = _Shown(
            self, snapshot.started_at, _attributes(snapshot.base_labels), _by_name(snapshot), os.getpid()
        )

    def _check(self, snapshot: Snapshot, labels: _Labels, shown: _Shown) -> None:
        """Refuse what another monitor's Snapshots would be mixed with; of one that was attached again the newer one counts."""
        if shown.sink is self and (labels != snapshot.base_labels or shown.started_at > snapshot.started_at):
            raise ConfigError("sinks: this MeterSink belongs to another monitor that is open; make one for each")
        if shown.sink is not self and labels == snapshot.base_labels:
            raise ConfigError(
                f"sinks: another monitor gives this provider the labels {dict(labels)}; "
                "give each a label of its own, such as labels={'model': 'critic'}"
            )

    def _forget_what_is_over(self) -> None:
        for labels, shown in list(self._shown.items()):
            if shown.is_over():
                self._shown.pop(labels, None)

    def close(self) -> None:
        """Let the last values stay for `linger_seconds`."""
        until = time.monotonic() + self._linger
        for labels, shown in list(self._shown.items()):
            if shown.sink is self:
                self._shown[labels] = replace(shown, until=until)


@dataclass(frozen=True, slots=True)
class _Shown:
    """What readers are given of one sink."""

    sink: MeterSink
    started_at: float
    """Unix time at which its counters were 0."""
    attributes: dict[str, str]
    """Those of every series."""
    samples: Mapping[str, tuple[Sample, ...]]
    """By the name of their metric."""
    process: int
    """The process whose values they are."""
    until: float = math.inf

    def points(self, spec: MetricSpec, part: str) -> Iterator[_Point]:
        """Yield what there is of a metric, or of a part of a histogram."""
        for sample in () if self.is_over() else self.samples.get(spec.name, ()):
            attributes = {**self.attributes, **_attributes(zip(spec.labels, sample.labels, strict=True))}
            yield from (({**attributes, **more}, value) for more, value in _points(sample, part) if math.isfinite(value))

    def is_over(self) -> bool:
        """Say whether its time is up, or its process another one than this, which was forked from it."""
        return self.process != os.getpid() or time.monotonic() > self.until


def _by_name(snapshot: Snapshot) -> dict[str, tuple[Sample, ...]]:
    return {spec.name: tuple(samples) for spec, samples in groupby(snapshot.samples, key=lambda sample: sample.spec)}


def _attributes(labels: Iterable[tuple[str, str]]) -> dict[str, str]:
    """Return labels as Prometheus has them: no empty ones; what is no Unicode, which encoders refuse, is a question mark."""
    return {name: value.encode("utf-8", "replace").decode() for name, value in labels if value}


def _points(sample: Sample, part: str) -> list[_Point]:
    """Return a sample's numbers, of a histogram one part, with the attributes that they have besides the sample's labels."""
    if not isinstance(sample.value, HistogramValue):
        return [({}, float(sample.value))]
    buckets, count = sample.value.cumulated(sample.spec.bounds)
    if part == "bucket":
        return [*(({"le": repr(bound)}, float(upto)) for bound, upto in buckets), ({"le": "+Inf"}, float(count))]
    return [({}, float(count) if part == "count" else sample.value.total)]


_PARTS = ("bucket", "count", "sum")
"""Of a classic histogram; one with values below zero has the first alone, as in text."""


class _Instruments:
    """The instruments of a provider, which cannot be taken back, and what they show."""

    def __init__(self, meter: Meter) -> None:
        self.shown: dict[_Labels, _Shown] = {}
        for spec in CATALOG.values():
            self._create(meter, spec)

    def _create(self, meter: Meter, spec: MetricSpec) -> None:
        if spec.instrument is Instrument.HISTOGRAM:
            for part in _PARTS if spec.has_sum else _PARTS[:1]:
                name = naming.histogram_part(spec.name, spec.unit, part)
                meter.create_observable_up_down_counter(name, [self._callback(spec, part)], "", spec.brief)
        elif spec.instrument is Instrument.COUNTER:
            meter.create_observable_counter(spec.name, [self._callback(spec)], spec.unit, spec.brief)
        else:
            meter.create_observable_gauge(spec.name, [self._callback(spec)], spec.unit, spec.brief)

    def _callback(self, spec: MetricSpec, part: str = "") -> CallbackT:
        from opentelemetry.metrics import Observation  # noqa: PLC0415  # only who makes a sink has it

        return lambda _options: [
            Observation(value, attributes) for shown in list(self.shown.values()) for attributes, value in shown.points(spec, part)
        ]


_instruments: weakref.WeakKeyDictionary[MeterProvider, _Instruments] = weakref.WeakKeyDictionary()
_creating = threading.Lock()


def _instruments_of(provider: MeterProvider) -> _Instruments:
    try:
        from opentelemetry.metrics import MeterProvider as AnyProvider  # noqa: PLC0415  # only who makes a sink has it
    except ImportError as error:
        raise MissingDependencyError(f"MeterSink needs opentelemetry-api ({error}): pip install opentelemetry-sdk") from error
    if not isinstance(provider, AnyProvider):
        raise ConfigError(f"MeterSink: expected a MeterProvider, got {type(provider).__name__}")
    if type(provider).__name__ == "_ProxyMeterProvider":  # what is made of it stays out of reach of the one that comes
        raise ConfigError("MeterSink: the global MeterProvider is not set yet; call opentelemetry.metrics.set_meter_provider first")
    with _creating:
        if provider not in _instruments:
            _instruments[provider] = _Instruments(provider.get_meter("otel_train", __version__))
        return _instruments[provider]
