"""One run down every road into real servers: the same series, labels and values, however a server gets them."""

from __future__ import annotations

import contextlib
import math
import re
import threading
import time
import urllib.request
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
import torch
from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.sdk.metrics import MeterProvider
from opentelemetry.sdk.metrics.export import PeriodicExportingMetricReader
from opentelemetry.sdk.resources import Resource
from torch.optim import AdamW

import otel_train
from otel_train.catalog import CATALOG, MetricSpec, gradients, loss, monitor, otlp
from otel_train.sinks.negotiation import Format
from otel_train.snapshot import HistogramValue, Sample, Snapshot
from tests import problems
from tests.generate.test_dashboards import DASHBOARDS, expressions
from tests.hooks.test_signed_histograms import FINITE, plant
from tests.problems import Mlp
from tests.servers import VERSIONS, Prometheus, Victoria, prometheus, victoria, wait_until

pytestmark = [pytest.mark.servers, pytest.mark.slow]

RUN = "roads"
SECONDS = 12.0
"""Of training, once every server has the first values."""
WINDOW = "8s"
Key = tuple[str, frozenset[tuple[str, str]]]
"""Name and labels of a series."""
Buckets = Mapping[tuple[float, float], int]
"""Elements by the bounds of their bucket."""
EXPONENTIAL = [spec.prometheus_name for spec in CATALOG.values() if spec.exponential]
MOVING = {spec.prometheus_name for spec in (monitor.MONITOR_SECONDS, otlp.OTLP_REQUESTS, otlp.OTLP_POINTS, otlp.OTLP_QUEUED)}
"""What goes on after the training's last step."""
QUANTILES = (0.05, 0.25, 0.5, 0.9, 0.99)
PROTOCOLS = {"text": "PrometheusText0.0.4", "openmetrics": "OpenMetricsText1.0.0", "protobuf": "PrometheusProto"}
TYPES = {"text": Format.TEXT, "openmetrics": Format.OPENMETRICS, "protobuf": Format.PROTOBUF}


def _queries() -> Iterator[str]:
    """Yield the queries of all dashboards; alerts are not ours to export."""
    for board in DASHBOARDS.values():
        yield from (expression for expression in expressions(board) if "ALERTS" not in expression)


QUERIES = sorted(set(_queries()))


class Gate(ThreadingHTTPServer):
    """Stands before the endpoint for one scraper: keeps the content types of answers, and can ask for another format than it."""

    daemon_threads = True

    def __init__(self, endpoint: str, accept: str | None) -> None:
        super().__init__(("127.0.0.1", 0), _GateHandler)
        self.endpoint, self.accept = endpoint, accept
        self.answered: set[str] = set()


class _GateHandler(BaseHTTPRequestHandler):
    server: Gate

    def do_GET(self) -> None:
        headers = {"Accept": self.server.accept or self.headers["Accept"]}
        with urllib.request.urlopen(urllib.request.Request(f"{self.server.endpoint}metrics", headers=headers)) as answer:
            body, content_type = answer.read(), answer.headers["Content-Type"]
        self.server.answered.add(content_type)
        self.send_response(200)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


@contextlib.contextmanager
def gate(endpoint: str, accept: str | None = None) -> Iterator[Gate]:
    """Run a gate."""
    server = Gate(endpoint, accept)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)


@dataclass(frozen=True)
class Road:
    """How a server gets the run's values."""

    server: Prometheus | Victoria
    job: str
    form: str
    """Of what was counted by powers of two: ``classic``, ``native`` or ``vmrange``."""
    keeps_nan: bool = True
    """Whether what is no number is stored; else the value before it stays for five minutes."""
    lets_go: bool = True
    """Whether a series that is gone is gone at once; else its last value stays for five minutes."""
    answered: set[str] = field(default_factory=set)
    """Content types of the answers to its scrapes."""

    def ask(self, expression: str, **parameters: float) -> list[dict[str, Any]]:
        """Return the answer of an instant query whose $job is this road's."""
        return self.server.ask(expression.replace("$job", self.job), **parameters)


@dataclass(frozen=True)
class Driven:
    """A run that has ended its steps, and is still there."""

    roads: Mapping[str, Road]
    snapshot: Snapshot
    """Its last values."""
    ended_at: float
    """Unix time before its last step, which has a loss that is no number."""
    gradients: torch.Tensor
    """All gradients of the layer ``second``, in fp64."""


class Loop:
    """Trains a small model, with every statistic on, until it is told to stop."""

    def __init__(self, *sinks: otel_train.sinks.Sink) -> None:
        torch.manual_seed(0)
        self._model = Mlp(hidden=32)
        self._optimizer = AdamW(self._model.parameters(), lr=0.01)
        self.monitor = otel_train.attach(
            self._model,
            self._optimizer,
            host="127.0.0.1",
            port=0,
            run=RUN,
            labels={"team": "a"},
            kinds=("matrix", "norm", "vector"),
            every_n_steps=1,
            max_overhead=None,
            histograms="layer",
            signed_histograms=True,
            planned_steps=10_000,
            warmup_steps=10,
            flops_per_token=1e6,
            peak_flops=1e12,
            sinks=sinks,
        )
        self.gradients: list[torch.Tensor] = []

    def train(self, until: Callable[[], bool]) -> None:
        """Make steps until something is so."""
        while not until():
            self.step()
            time.sleep(0.02)

    def step(self, told: float | None = None) -> None:
        """Make a step, and tell the monitor this loss rather than the real one."""
        self._optimizer.zero_grad()
        found = problems.vector_loss(self._model, len(self.gradients))
        found.backward()  # type: ignore[no-untyped-call]  # torch's
        if not self.gradients:
            plant(self._model, FINITE)
        grad = self._model.second.weight.grad
        assert grad is not None
        self.gradients.append(grad.double().flatten())
        self._optimizer.step()
        self.monitor.observe(loss=found if told is None else told, tokens=320)


@pytest.fixture(scope="module")
def driven() -> Iterator[Driven]:
    """Train while all servers look on."""
    with contextlib.ExitStack() as stack:
        pushed, piped = stack.enter_context(victoria()), stack.enter_context(victoria())
        variables = stack.enter_context(pytest.MonkeyPatch.context())
        # VictoriaMetrics makes no job of service.name
        variables.setenv("OTEL_RESOURCE_ATTRIBUTES", "job=pushed")
        reader = PeriodicExportingMetricReader(OTLPMetricExporter(f"{piped.otlp}/v1/metrics"), export_interval_millis=1000)
        provider = MeterProvider([reader], Resource.create({"job": "piped"}), shutdown_on_exit=False)
        stack.callback(provider.shutdown)
        pushing = otel_train.OtlpSink(pushed.otlp, interval_seconds=1.0)
        loop = Loop(pushing, otel_train.MeterSink(provider))
        stack.enter_context(loop.monitor)
        roads = {
            **_scraped(stack, str(loop.monitor.url)),
            "pushed": Road(pushed, "pushed", "vmrange", keeps_nan=False),
            "piped": Road(piped, "piped", "classic", keeps_nan=False, lets_go=False),
        }
        loop.train(lambda: all(_has_come(road) for road in roads.values()))
        began = time.monotonic()
        loop.train(lambda: time.monotonic() > began + SECONDS)
        ended_at = time.time()
        loop.step(told=math.nan)
        assert loop.monitor.flush()
        _wait_for_pushes(pushing)
        provider.force_flush()
        time.sleep(3)  # and the scrapes
        assert loop.monitor.snapshot is not None
        yield Driven(roads, loop.monitor.snapshot, ended_at, torch.cat(loop.gradients))


def _has_come(road: Road) -> bool:
    return bool(road.ask(f'otel_train_steps_total{{job="{road.job}"}}'))


def _wait_for_pushes(sink: otel_train.OtlpSink) -> None:
    def pushes() -> float:
        return sum(s.value for s in sink.report() if s.spec is otlp.OTLP_REQUESTS and not isinstance(s.value, HistogramValue))

    before = pushes()
    wait_until(lambda: pushes() >= before + 2, 20, "two more pushes")


def _scraped(stack: contextlib.ExitStack, endpoint: str) -> dict[str, Road]:
    """Return the roads of scraping: each Prometheus in each format, through a gate that sees which it is."""
    gates = {(version, form): stack.enter_context(gate(endpoint)) for version in VERSIONS for form in PROTOCOLS}
    gates["stable", "text"].accept = "text/plain"  # by itself 2.42 asks for OpenMetrics; it takes text from who has no other
    ports = {key: one.server_port for key, one in gates.items()}
    native = ["native-histograms"]
    settings = {form: f"scrape_protocols: [{protocol}]" for form, protocol in PROTOCOLS.items()}
    servers = {
        "current": prometheus("current", {form: ports["current", form] for form in PROTOCOLS}, features=native, settings=settings),
        "stable": prometheus("stable", {form: ports["stable", form] for form in ("text", "openmetrics")}),
        "stable, native": prometheus("stable", {"protobuf": ports["stable", "protobuf"]}, features=native),
    }
    running = {name: stack.enter_context(server) for name, server in servers.items()}
    return {
        f"{form} {version}": Road(
            running["stable, native" if (version, form) == ("stable", "protobuf") else version],
            form,
            "native" if form == "protobuf" else "classic",
            answered=one.answered,
        )
        for (version, form), one in gates.items()
    }


ROADS = (*(f"{form} {version}" for version in VERSIONS for form in PROTOCOLS), "pushed", "piped")


@pytest.fixture(params=ROADS)
def road(driven: Driven, request: pytest.FixtureRequest) -> Road:
    """Return each road in turn."""
    return driven.roads[request.param]


def test_each_scrape_got_the_format_that_it_is_for(driven: Driven) -> None:
    """Or the comparison below compares a format with itself."""
    assert set(driven.roads) == set(ROADS)
    for name, road in driven.roads.items():
        if road.server is not driven.roads["pushed"].server and road.server is not driven.roads["piped"].server:
            (answered,) = road.answered
            assert answered.startswith(TYPES[name.split()[0]].value)


def test_series_labels_and_values_are_those_of_the_run(driven: Driven, road: Road) -> None:
    """None is missing, none is more, no label differs; what has buckets of its own is compared below."""
    expected = dict(_numbers(driven.snapshot, classic=road.form == "classic"))
    found = {key: value for key, value in _stored(road).items() if not _is_exponential(key) or road.form == "classic"}
    if not road.lets_go:
        # before the first step its precision is not known
        found = {key: value for key, value in found.items() if ("precision", "unknown") not in key[1]}
    assert set(found) == set(expected)
    assert len(found) > 90
    assert math.isnan(expected[_key(driven.snapshot, loss.LOSS)])
    for key, value in found.items():
        if key[0] not in MOVING and (road.keeps_nan or not math.isnan(expected[key])):
            assert value == pytest.approx(expected[key], rel=1e-12, nan_ok=True), key


def test_what_was_counted_by_powers_of_two_keeps_every_bucket(driven: Driven, road: Road) -> None:
    """Each (lower, upper], exact powers of two among the elements; `le` buckets are among the numbers above."""
    expected = _counted(driven.snapshot)
    assert len(expected) == 2 * 3
    if road.form == "classic":
        assert not _native(road)
    else:
        assert (_native(road) if road.form == "native" else _ranges(road)) == expected


@pytest.mark.parametrize("spec", [gradients.LAYER_GRAD_MAGNITUDE, gradients.LAYER_GRAD_VALUE], ids=lambda spec: spec.name)
def test_quantiles_are_those_of_the_gradients_within_a_bucket(driven: Driven, road: Road, spec: MetricSpec) -> None:
    """Against torch.quantile of every gradient that the optimizer used; one query for `le` and VictoriaMetrics' buckets."""
    elements = driven.gradients if spec is gradients.LAYER_GRAD_VALUE else driven.gradients.abs()
    bounds = list(spec.bounds) if road.form == "classic" else _full_resolution(spec)
    series = f'{spec.prometheus_name}_bucket{{layer="second",job="$job"}}'
    summed = f"sum by (layer, le, vmrange) ({series})"
    if road.form == "native":
        summed = f"sum by (layer) ({series.replace('_bucket', '')})"
    for share in QUANTILES:
        (answer,) = road.ask(f"histogram_quantile({share}, {summed})")
        found, true = float(answer["value"][1]), torch.quantile(elements, share).item()
        apart = abs(bisect_left(bounds, found) - bisect_left(bounds, true))
        assert apart <= 1, f"quantile {share} is {found}, of the gradients {true}"


@pytest.mark.parametrize("expression", QUERIES)
def test_a_query_has_the_same_answer_by_scrape_and_by_push(driven: Driven, road: Road, expression: str) -> None:
    """Each of the shipped dashboards, against the scrape that everybody has: text, by Prometheus 3.5."""
    expected = _answer(driven.roads["text current"], expression, driven)
    assert expected, "or nothing is compared"
    found = _answer(road, expression, driven)
    assert set(found) == set(expected)
    over_time = "[" in expression  # roads sample at different moments, and VictoriaMetrics does not extrapolate
    most = {"rel": 0.25, "abs": 1.2 if expression.count("increase(") == 1 else 0.02} if over_time else {"rel": 1e-9}
    for labels, value in found.items():
        if not math.isnan(expected[labels]) or road.keeps_nan:  # an event at the window's edge is in it on some roads
            assert value == pytest.approx(expected[labels], nan_ok=True, **most)


def _answer(road: Road, expression: str, driven: Driven) -> Mapping[frozenset[tuple[str, str]], float]:
    """Return values by label: now that nothing moves, or over the time until just before the end."""
    parameters = {"time": driven.ended_at - 1.0} if "[" in expression else {}
    answer = road.ask(expression.replace("$run", RUN).replace("$__rate_interval", WINDOW), **parameters)
    return {_labels(one): float(one["value"][1]) for one in answer}


def _labels(entry: Mapping[str, Any]) -> frozenset[tuple[str, str]]:
    """Return the labels of a series but those that say who sent it."""
    own = ("job", "instance", "__name__", "scope_name", "scope_version", "service_name", "service_instance_id")
    return frozenset((name, value) for name, value in entry["metric"].items() if name not in own)


def _all(road: Road) -> list[dict[str, Any]]:
    return road.ask('{__name__=~"otel_train_.+",job="$job"}')


def _stored(road: Road) -> dict[Key, float]:
    """Return all series with numbers."""
    found = [one for one in _all(road) if "value" in one]
    for one in found:
        if "le" in one["metric"]:  # VictoriaMetrics writes 5 where Prometheus has 5.0
            one["metric"]["le"] = repr(float(one["metric"]["le"])).replace("inf", "+Inf")
    series = {(one["metric"]["__name__"], _labels(one)): float(one["value"][1]) for one in found}
    assert len(series) == len(found), "a series is there twice"
    return series


def _is_exponential(key: Key) -> bool:
    return re.sub(r"_(bucket|count|sum)$", "", key[0]) in EXPONENTIAL


def _numbers(snapshot: Snapshot, *, classic: bool) -> Iterator[tuple[Key, float]]:
    """Yield the series of a Snapshot as Prometheus' classic types have them; without what is exponential unless it is classic too."""
    for sample in snapshot.samples:
        name, spec, value = sample.spec.prometheus_name, sample.spec, sample.value
        labels = _labels_of(snapshot, sample)
        if not isinstance(value, HistogramValue):
            yield (name, labels), value
        elif classic or not spec.exponential:
            counted = dict(zip((*value.bounds, math.inf), value.counts, strict=True))
            for bound in (*spec.bounds, math.inf):
                le = "+Inf" if bound == math.inf else repr(bound)
                yield (f"{name}_bucket", labels | {("le", le)}), sum(n for upper, n in counted.items() if upper <= bound)
            if spec.bounds[0] >= 0:
                yield (f"{name}_count", labels), sum(value.counts)
                yield (f"{name}_sum", labels), value.total


def _labels_of(snapshot: Snapshot, sample: Sample) -> frozenset[tuple[str, str]]:
    pairs = [*snapshot.base_labels, *zip(sample.spec.labels, sample.labels, strict=True)]
    return frozenset((name, value) for name, value in pairs if value)


def _key(snapshot: Snapshot, spec: MetricSpec) -> Key:
    (sample,) = snapshot.find(spec)
    return spec.prometheus_name, _labels_of(snapshot, sample)


def _counted(snapshot: Snapshot) -> dict[Key, Buckets]:
    """Return what was counted by powers of two, without empty buckets."""
    found = {}
    for sample in snapshot.samples:
        if sample.spec.exponential:
            assert isinstance(sample.value, HistogramValue)
            found[sample.spec.prometheus_name, _labels_of(snapshot, sample)] = _buckets(sample.value)
    return found


def _buckets(value: HistogramValue) -> Buckets:
    counted = value.exponential()
    found = {(-counted.zero_threshold, counted.zero_threshold): counted.zero_count}
    for index, count in enumerate(counted.positive):
        found[2.0 ** (counted.first + index - 1), 2.0 ** (counted.first + index)] = count
    for index, count in enumerate(counted.negative):
        found[-(2.0 ** (counted.first + index)), -(2.0 ** (counted.first + index - 1))] = count
    return {bounds: count for bounds, count in found.items() if count}


def _full_resolution(spec: MetricSpec) -> list[float]:
    bounds = [2.0**exponent for exponent in range(-46, 18)]
    return [*(-bound for bound in reversed(bounds)), *bounds] if spec.bounds[0] < 0 else bounds


def _native(road: Road) -> dict[Key, Buckets]:
    """Return the native histograms that a Prometheus has stored."""
    found = [one for one in _all(road) if "histogram" in one]
    return {
        (one["metric"]["__name__"], _labels(one)): {
            (float(low), float(high)): int(count) for _, low, high, count in one["histogram"][1]["buckets"]
        }
        for one in found
    }


def _ranges(road: Road) -> dict[Key, Buckets]:
    """Return the exponential histograms that a VictoriaMetrics has stored; it writes bounds with four digits."""
    found: dict[Key, dict[tuple[float, float], int]] = {}
    for one in road.ask('{__name__=~"otel_train_.+_bucket",vmrange!="",job="$job"}'):
        low, _, high = one["metric"].pop("vmrange").partition("...")
        buckets = found.setdefault((one["metric"]["__name__"].removesuffix("_bucket"), _labels(one)), {})
        buckets[_power_of_two(float(low)), _power_of_two(float(high))] = int(one["value"][1])
    return {key: {bounds: count for bounds, count in buckets.items() if count} for key, buckets in found.items()}


def _power_of_two(number: float) -> float:
    exact = math.copysign(2.0 ** round(math.log2(abs(number))), number)
    assert number == pytest.approx(exact, rel=1e-3)
    return exact
