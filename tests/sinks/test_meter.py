"""Snapshots through a MeterProvider of the user's: the real SDK, its readers, its limits."""

from __future__ import annotations

import gc
import math
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from opentelemetry.metrics import NoOpMeterProvider
from opentelemetry.sdk.metrics import MeterProvider, ObservableCounter, ObservableGauge, ObservableUpDownCounter
from opentelemetry.sdk.metrics.export import InMemoryMetricReader
from torch import nn

import otel_train
from otel_train import MeterSink, naming
from otel_train.catalog import CATALOG, Instrument, gradients, loss, monitor, run, throughput
from otel_train.errors import ConfigError
from otel_train.sinks import Sink
from otel_train.snapshot import HistogramValue, Sample, Snapshot
from tests.servers import training
from tests.sinks.otlp.collector import Collector, collector, numbers, points

LAYER = ("fc", "0", "matrix", "0")


def snapshot(*samples: Sample, name: str = "r", **labels: str) -> Snapshot:
    """Return a Snapshot of a run."""
    return Snapshot((("run", name), ("rank", "0"), *labels.items()), time.time(), samples)


def exported(reader: InMemoryMetricReader) -> dict[str, Any]:
    """Return the metrics that a reader finds now, by name."""
    data = reader.get_metrics_data()
    scopes = [scope for resource in data.resource_metrics for scope in resource.scope_metrics] if data else []
    assert {(scope.scope.name, scope.scope.version) for scope in scopes} <= {("otel_train", otel_train.__version__)}
    return {metric.name: metric for scope in scopes for metric in scope.metrics}


def values(reader: InMemoryMetricReader, name: str, label: str = "run") -> dict[Any, float]:
    """Return the values of a metric by one of its labels."""
    metric = exported(reader).get(name)
    return {point.attributes[label]: point.value for point in metric.data.data_points} if metric else {}


@pytest.fixture
def reader() -> InMemoryMetricReader:
    """Return a reader for one provider."""
    return InMemoryMetricReader()


@pytest.fixture
def provider(reader: InMemoryMetricReader) -> Iterator[MeterProvider]:
    """Run a provider as a user does."""
    running = MeterProvider([reader], shutdown_on_exit=False)
    yield running
    running.shutdown()


@pytest.fixture(autouse=True)
def silent(caplog: pytest.LogCaptureFixture) -> Iterator[None]:
    """No test here has the SDK warn of what we do."""
    yield
    assert [record.getMessage() for record in caplog.get_records("call") if record.name.startswith("opentelemetry")] == []


def train(
    provider: MeterProvider, model: nn.Module | None = None, steps: int = 2, **settings: Any
) -> tuple[otel_train.Monitor, nn.Module]:
    """Train a little, monitored through a provider."""
    model = model or nn.Sequential(nn.Linear(4, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    sink = MeterSink(provider, linger_seconds=settings.pop("linger_seconds", 60))
    watching = otel_train.attach(model, optimizer, sinks=[sink], port=None, every_n_steps=1, **settings)
    for _ in range(steps):
        model(torch.randn(3, 4)).square().mean().backward()
        optimizer.step()
    assert watching.flush()
    return watching, model


def test_it_is_a_sink(provider: MeterProvider) -> None:
    """The protocol that attach checks accepts it."""
    assert isinstance(MeterSink(provider), Sink)


def test_a_training_comes_out_of_the_users_reader(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """Names, units and descriptions are the catalog's; counters are monotonic and cumulative, labels are attributes."""
    watching, _ = train(provider, run="mine", labels={"team": "a"})
    found = exported(reader)
    steps = found[run.STEPS.name]
    assert (steps.unit, steps.description) == (run.STEPS.unit, run.STEPS.brief)
    assert (steps.data.is_monotonic, steps.data.aggregation_temporality.name) == (True, "CUMULATIVE")
    (point,) = steps.data.data_points
    assert (point.value, dict(point.attributes)) == (2.0, {"run": "mine", "rank": "0", "team": "a"})
    layers = {p.attributes["layer"]: set(p.attributes) for p in found[gradients.LAYER_GRAD_NORM.name].data.data_points}
    labels = {"run", "rank", "team", "layer", "depth", "kind", "param_group"}
    assert layers == {"0": labels, "2": labels}
    seconds = found[monitor.MONITOR_SECONDS.name]
    assert seconds.unit == "s"
    watching.close()


def test_every_series_of_a_snapshot_is_there_once(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """Under the name that makes the catalog's; nothing that the Snapshot lacks, nor what text leaves out."""
    watching, _ = train(provider, signed_histograms=True)
    taken = watching.snapshot
    assert taken is not None
    expected = {sample.spec.prometheus_name for sample in taken.samples if sample.spec.instrument is not Instrument.HISTOGRAM}
    expected |= {
        f"{sample.spec.prometheus_name}_{part}"
        for sample in taken.samples
        if sample.spec.instrument is Instrument.HISTOGRAM
        for part in (("bucket", "count", "sum") if sample.spec.has_sum else ("bucket",))
    }
    found = exported(reader)
    counters = {spec.name for spec in CATALOG.values() if spec.instrument is Instrument.COUNTER}
    assert {naming.prometheus_name(m.name, m.unit, counter=m.name in counters) for m in found.values()} == expected
    watching.close()


def test_a_histogram_goes_as_the_classic_one_in_parts(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """Buckets are cumulated, with the bounds as a scrape writes them; an up-down counter gets no suffix of its own."""
    counts = (2, 3, *([0] * (len(throughput.STEP_DURATION.bounds) - 2)), 1)
    value = HistogramValue(throughput.STEP_DURATION.bounds, counts, 7.5)
    MeterSink(provider).publish(snapshot(Sample(throughput.STEP_DURATION, (), value)))
    found = exported(reader)
    buckets = {p.attributes["le"]: p.value for p in found["otel_train.step.duration.seconds.bucket"].data.data_points}
    assert list(buckets)[:3] == ["0.001", "0.0025", "0.005"]
    assert [buckets[bound] for bound in ("0.001", "0.0025", "600.0", "+Inf")] == [2, 5, 5, 6]
    (count,) = found["otel_train.step.duration.seconds.count"].data.data_points
    (total,) = found["otel_train.step.duration.seconds.sum"].data.data_points
    assert (count.value, total.value) == (6, 7.5)
    assert not any(metric.data.is_monotonic or metric.unit for metric in found.values())


def test_what_is_not_finite_has_no_series_and_the_sdk_does_not_warn(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """It would warn at every collection, and drop the value all the same."""
    MeterSink(provider).publish(snapshot(Sample(loss.LOSS, (), math.nan), Sample(gradients.LAYER_GRAD_NORM, LAYER, math.inf)))
    assert exported(reader) == {}


def test_a_label_without_a_value_is_left_out(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """To Prometheus it is none."""
    MeterSink(provider).publish(snapshot(Sample(run.DEVICE_INFO, ("cpu", "", "0", "node"), 1)))
    (point,) = exported(reader)[run.DEVICE_INFO.name].data.data_points
    assert set(point.attributes) == {"run", "rank", "device", "local_rank", "host"}


def test_a_gauge_that_is_gone_is_not_exported_again(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """Unlike that of a synchronous gauge, its last value does not stay."""
    sink = MeterSink(provider)
    sink.publish(snapshot(Sample(run.STEPS, (), 1), Sample(loss.LOSS, (), 2.0)))
    assert set(exported(reader)) == {run.STEPS.name, loss.LOSS.name}
    sink.publish(snapshot(Sample(run.STEPS, (), 2)))
    assert set(exported(reader)) == {run.STEPS.name}


def test_a_counters_start_is_when_a_reader_first_saw_it(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """The limit that the docstring tells."""
    MeterSink(provider).publish(snapshot(Sample(run.STEPS, (), 100)))
    before = time.time_ns()
    for _ in range(2):
        (point,) = exported(reader)[run.STEPS.name].data.data_points
        assert before <= point.start_time_unix_nano <= time.time_ns()
    assert point.value == 100


@pytest.mark.parametrize(("limits", "expected"), [(None, 2001), ({ObservableGauge: 3000}, 2500)])
def test_the_sdk_merges_what_is_over_its_limit_unless_it_is_raised(limits: Any, expected: int) -> None:
    """2,000 attribute sets an instrument, and one for the rest; the docstring's way to raise it."""
    reader = InMemoryMetricReader(cardinality_limits=limits)
    sink = MeterSink(MeterProvider([reader], shutdown_on_exit=False))
    layers = (Sample(gradients.LAYER_GRAD_NORM, (f"l{i}", str(i), "matrix", "0"), 1.0) for i in range(2500))
    sink.publish(snapshot(*layers))
    found = exported(reader)[gradients.LAYER_GRAD_NORM.name].data.data_points
    assert len(found) == expected
    assert any("otel.metric.overflow" in point.attributes for point in found) is (limits is None)


def test_the_end_reaches_every_reader_and_then_there_is_nothing(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """Whoever asks while the last values linger finds them, however often; who asks later finds no series."""
    second = InMemoryMetricReader()
    provider.add_metric_reader(second)
    watching, _ = train(provider, linger_seconds=1.0)
    assert list(values(reader, run.RUN_ACTIVE.name).values()) == [1]
    watching.close()
    closed = time.monotonic()
    for one in (reader, second, reader):
        assert list(values(one, run.RUN_ACTIVE.name).values()) == [0]
    time.sleep(max(closed + 1.1 - time.monotonic(), 0))
    assert exported(reader) == exported(second) == {}


def test_shutting_the_provider_down_after_close_exports_the_end() -> None:
    """The reader collects a last time, as users end their scripts."""
    from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
    from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader

    with collector() as there:
        pushing = PeriodicExportingMetricReader(OTLPMetricExporter(f"{there.url}/v1/metrics"), export_interval_millis=60_000)
        provider = MeterProvider([pushing], shutdown_on_exit=False)
        watching, _ = train(provider)
        watching.close()
        provider.shutdown()
        assert [numbers(request, run.RUN_ACTIVE.name) for request in there.accepted] == [[0.0]]


def test_attaching_again_replaces_the_series(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """Counters of the same labels are those of the new monitor, not the sum with what lingers of the old one."""
    _, model = train(provider, steps=5, run="again")
    watching, _ = train(provider, model, steps=2, run="again")
    assert values(reader, run.STEPS.name) == {"again": 2}
    assert values(reader, run.RUN_ACTIVE.name) == {"again": 1}
    watching.close()


def test_runs_one_after_another_leave_nothing_behind(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """Each makes a sink of its own; the provider's instruments are made once, and old Snapshots are let go of."""
    sinks = []
    for number in range(20):
        sink = MeterSink(provider, linger_seconds=0)
        sink.publish(snapshot(Sample(run.STEPS, (), number), name=f"run {number}"))
        sink.close()
        sinks.append(weakref.ref(sink))
    MeterSink(provider).publish(snapshot(Sample(run.STEPS, (), 1), name="last"))
    assert values(reader, run.STEPS.name) == {"last": 1}
    del sink
    gc.collect()
    assert [sink() for sink in sinks] == [None] * 20


def test_two_models_are_told_apart_by_their_labels(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """They share the instruments, and end one by one."""
    critic, first = train(provider, run="gan", labels={"net": "critic"}, linger_seconds=0, steps=3)
    actor, second = train(provider, run="gan", labels={"net": "actor"}, steps=2)
    assert values(reader, run.STEPS.name, "net") == {"critic": 3, "actor": 2}
    critic.close()
    assert values(reader, run.STEPS.name, "net") == {"actor": 2}
    actor.close()
    assert first is not second, "a model that is gone would have ended its run"


def test_two_models_that_cannot_be_told_apart_are_not_mixed(
    provider: MeterProvider, reader: InMemoryMetricReader, caplog: pytest.LogCaptureFixture
) -> None:
    """The SDK would add their counters: the first stays, the second is told once what to do, and counts it."""
    first, first_model = train(provider, run="same", steps=3)
    second, second_model = train(provider, run="same", steps=2)
    assert values(reader, run.STEPS.name) == {"same": 3}
    said = [record.getMessage() for record in caplog.records if record.name == "otel_train"]
    assert len([line for line in said if "give each a label of its own" in line]) == 1
    second.flush()
    assert second.snapshot is not None
    assert (second.snapshot.value(monitor.MONITOR_ERRORS, part="export") or 0) >= 1
    first.close()
    second.close()
    assert first_model is not second_model


def test_a_reader_may_ask_while_snapshots_come(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """Neither waits for the other, and no collection mixes two Snapshots of one metric."""
    sinks, over = [MeterSink(provider, linger_seconds=0) for _ in range(4)], threading.Event()

    def publish(sink: MeterSink, name: str) -> None:
        number = 0
        while not over.is_set():
            number += 1
            layers = (Sample(gradients.LAYER_GRAD_NORM, (str(i), str(i), "matrix", "0"), float(number)) for i in range(20))
            sink.publish(snapshot(*layers, name=f"{name} {number % 3}"))
            sink.close()

    threads = [threading.Thread(target=publish, args=(sink, str(i))) for i, sink in enumerate(sinks)]
    for thread in threads:
        thread.start()
    collected = 0
    deadline = time.monotonic() + 2
    while time.monotonic() < deadline:
        metric = exported(reader).get(gradients.LAYER_GRAD_NORM.name)
        by_run: dict[Any, set[float]] = {}
        for point in metric.data.data_points if metric else []:
            by_run.setdefault(point.attributes["run"], set()).add(point.value)
        assert all(len(found) == 1 for found in by_run.values()), by_run
        collected += bool(by_run)
    over.set()
    for thread in threads:
        thread.join()
    assert collected > 0


def test_a_provider_is_not_kept_alive() -> None:
    """What is known of it goes with it."""
    provider = MeterProvider([InMemoryMetricReader()], shutdown_on_exit=False)
    MeterSink(provider).publish(snapshot(Sample(run.STEPS, (), 1)))
    gone = weakref.ref(provider)
    del provider
    gc.collect()
    assert gone() is None


def test_a_provider_of_the_api_alone_is_taken() -> None:
    """Another implementation, or none: nothing is exported, nothing raised."""
    MeterSink(NoOpMeterProvider()).publish(snapshot(Sample(run.STEPS, (), 1)))


def test_what_is_no_provider_is_refused() -> None:
    """None among it: nothing global is taken silently."""
    with pytest.raises(ConfigError, match="expected a MeterProvider, got NoneType"):
        MeterSink(None)  # type: ignore[arg-type]


def test_without_opentelemetry_one_line_says_what_is_missing() -> None:
    """And all else works."""
    code = (
        "import sys; sys.modules['opentelemetry.metrics'] = None\n"
        "import otel_train\n"
        "try: otel_train.MeterSink(object())\n"
        "except otel_train.MissingDependencyError as error: print(error)"
    )
    said = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert said.count("\n") == 1
    assert "pip install opentelemetry-sdk" in said


TRAINING = '''
"""Trains in a user's own pipeline, with DataLoader workers that fork, and ends without closing anything."""
import os, sys, threading, time
import torch
from opentelemetry.metrics import Observation
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from torch import nn
from torch.utils.data import DataLoader, Dataset
import otel_train

class Telling(OTLPMetricExporter):
    told = threading.Event()
    def export(self, *args, **kwargs):
        try:
            return super().export(*args, **kwargs)
        finally:
            self.told.set()

class Numbers(Dataset):
    def __len__(self):
        return 60
    def __getitem__(self, index):
        time.sleep(0.05)
        return torch.randn(8)

provider = MeterProvider([PeriodicExportingMetricReader(Telling(sys.argv[3] + "/v1/metrics"), export_interval_millis=250)])
provider.get_meter("user").create_observable_gauge("pid", [lambda options: [Observation(float(os.getpid()))]])
model = nn.Linear(8, 4)
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
monitor = otel_train.attach(model, optimizer, sinks=[otel_train.MeterSink(provider)], port=None, run="pipeline")
Telling.told.wait(30)  # what is forked in the middle of an export waits for its lock for ever, as the SDK has it
for batch in DataLoader(Numbers(), batch_size=4, num_workers=2, multiprocessing_context="fork"):
    model(batch).square().mean().backward()
    optimizer.step()
'''


@pytest.mark.slow
def test_forked_workers_export_nothing_and_a_script_that_just_ends_exports_the_end(tmp_path: Path) -> None:
    """The SDK's reader does run in the workers; the provider's own exit handler comes after ours, and takes ``run_active`` 0."""
    with collector() as there, training(tmp_path, TRAINING, [there.url]) as script:
        assert script.wait(60) == 0, script.said()
        ours, exporting = _pushed(there)
    assert len(exporting) >= 2, "workers export what is the user's"
    assert ours == {str(script.process.pid)}
    assert numbers(there.accepted[-1], run.RUN_ACTIVE.name) == [0.0]
    assert numbers(there.accepted[-1], run.STEPS.name) == [15.0]
    assert "otel_train" not in script.said()


def _pushed(there: Collector) -> tuple[set[str], set[str]]:
    """Return the processes that pushed something of ours, and those that pushed at all."""
    ours, exporting = set(), set()
    for request in there.accepted:
        (process,) = {f"{value:.0f}" for value in numbers(request, "pid")}
        exporting.add(process)
        if any(name.startswith("otel_train.") for name, _ in points(request)):
            ours.add(process)
    return ours, exporting


def test_a_sink_is_one_monitors(provider: MeterProvider, reader: InMemoryMetricReader, caplog: pytest.LogCaptureFixture) -> None:
    """A second one that is given it is refused, whatever its labels; the first goes on, and its end leaves it alone."""
    sink = MeterSink(provider, linger_seconds=0)
    made = []
    for name, steps in (("first", 3), ("second", 2)):
        model = nn.Linear(4, 2)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        made.append((otel_train.attach(model, optimizer, sinks=[sink], port=None, run=name), model))
        for _ in range(steps):
            model(torch.randn(3, 4)).sum().backward()
            optimizer.step()
        assert made[-1][0].flush()
    assert values(reader, run.STEPS.name) == {"first": 3}
    said = [record.getMessage() for record in caplog.records if record.name == "otel_train"]
    assert len([line for line in said if "make one for each" in line]) == 1
    for watching, _ in made:
        watching.close()


def test_of_two_monitors_of_one_name_the_newer_is_shown() -> None:
    """As where a model is attached again while the old monitor still ends."""
    reader = InMemoryMetricReader()
    sink = MeterSink(MeterProvider([reader], shutdown_on_exit=False))
    old, new = (
        Snapshot((("run", "r"), ("rank", "0")), 0.0, (Sample(run.STEPS, (), steps),), started_at=began)
        for steps, began in ((3, 100.0), (1, 200.0))
    )
    sink.publish(old)
    sink.publish(new)
    with pytest.raises(ConfigError, match="make one for each"):
        sink.publish(old)
    assert values(reader, run.STEPS.name) == {"r": 1}


def test_the_stand_in_for_the_global_provider_is_refused() -> None:
    """What is made of it would keep later sinks, of the provider that is set, from being seen."""
    from opentelemetry.metrics import get_meter_provider

    assert type(get_meter_provider()).__name__ == "_ProxyMeterProvider", "set by another test"
    with pytest.raises(ConfigError, match="set_meter_provider first"):
        MeterSink(get_meter_provider())


@pytest.mark.parametrize("seconds", [-1.0, math.nan, math.inf])
def test_a_time_that_the_last_values_cannot_stay_is_refused(provider: MeterProvider, seconds: float) -> None:
    """At once, not when the run ends."""
    with pytest.raises(ConfigError, match="linger_seconds"):
        MeterSink(provider, linger_seconds=seconds)


def test_labels_that_are_no_unicode_are_replaced_as_on_other_roads(provider: MeterProvider, reader: InMemoryMetricReader) -> None:
    """An exporter would drop them with a traceback."""
    MeterSink(provider).publish(snapshot(Sample(gradients.LAYER_GRAD_NORM, ("a\udc80", "0", "matrix", "0"), 1.0)))
    assert values(reader, gradients.LAYER_GRAD_NORM.name, "layer") == {"a?": 1.0}


def test_limits_as_the_docstring_has_them_let_every_series_through() -> None:
    """Gauges, counters, parts of histograms; two collections later too."""
    reader = InMemoryMetricReader(
        cardinality_limits={ObservableGauge: 100_000, ObservableCounter: 100_000, ObservableUpDownCounter: 100_000}
    )
    sink = MeterSink(MeterProvider([reader], shutdown_on_exit=False))
    count, bounds = 2500, gradients.LAYER_GRAD_MAGNITUDE.bounds
    layers = [(f"layers.{i}", str(i), "matrix", "0") for i in range(count)]
    zeros = HistogramValue(bounds, (0,) * (len(bounds) + 1), 0.0)
    sink.publish(
        snapshot(
            *(Sample(gradients.LAYER_GRAD_NORM, labels, 1.0) for labels in layers),
            *(Sample(loss.LAYER_NONFINITE, (*labels[:2], "gradient"), 1) for labels in layers),
            *(Sample(gradients.LAYER_GRAD_MAGNITUDE, labels, zeros) for labels in layers),
        )
    )
    for _ in range(2):
        found = {name: len(metric.data.data_points) for name, metric in exported(reader).items()}
    assert found == {
        gradients.LAYER_GRAD_NORM.name: count,
        loss.LAYER_NONFINITE.name: count,
        "otel_train.layer.grad_magnitude.bucket": count * (len(bounds) + 1),
        "otel_train.layer.grad_magnitude.count": count,
        "otel_train.layer.grad_magnitude.sum": count,
    }
