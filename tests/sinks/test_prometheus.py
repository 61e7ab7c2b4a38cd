"""The exposition: golden files, promtool, and value for value what the Snapshot holds."""

from __future__ import annotations

import gzip
import math
import os
import struct
import subprocess
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import prometheus_client
import pytest
import torch
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from torch import nn

from otel_train.assembly.histograms import SignedHistogram
from otel_train.catalog import CATALOG, Instrument, gradients, loss, monitor, run, throughput, updates
from otel_train.records import MAGNITUDE_EXPONENTS, Signs
from otel_train.sinks.exposition import Piece, Renderer
from otel_train.sinks.prometheus import PrometheusSink
from otel_train.snapshot import HistogramValue, Sample, Snapshot
from otel_train.testing import capture
from tests.servers import VERSIONS, Version, find_program

GOLDEN = Path(__file__).resolve().parents[1] / "golden"
ACCEPT_OPENMETRICS = "application/openmetrics-text;version=1.0.0"
AWKWARD = 'a "quoted" \\ back\\slash,\nnew line, ünïcödé 层, <script>alert(1)</script> {x="y"} '
FORMATS = pytest.mark.parametrize("accept", ["", ACCEPT_OPENMETRICS], ids=["text", "openmetrics"])
UPDATE_GOLDEN = os.environ.get("OTEL_TRAIN_UPDATE_GOLDEN") == "1"
# read on import: the fixture of all tests takes the variable away
Values = dict[tuple[str, frozenset[tuple[str, str]]], bytes]


def awkward_snapshot() -> Snapshot:
    """Every instrument, every unit, labels that need escaping, numbers that are none."""
    magnitudes = HistogramValue(
        tuple(2.0**exponent for exponent in MAGNITUDE_EXPONENTS), tuple(range(len(MAGNITUDE_EXPONENTS) + 1)), 1 / 3
    )
    values = SignedHistogram()
    values.add([float(n) for n in range(64)], Signs((0.5,) * 63, (0.0,) * 63, -1 / 3))
    durations = HistogramValue(throughput.STEP_DURATION.bounds, (0, 3, *[0] * 15, 1, 2), 1234.5)
    one, other = (AWKWARD, "0", "matrix", "0"), ("", "1", "norm", "decay=0.1\\n")
    samples = (
        Sample(run.RUN_INFO, ("Model<T>", "1", "2.13.0+cpu", "0.1.0", "sampled", 'float32, "autocast"'), 1),
        Sample(run.RUN_ACTIVE, (), 1),
        Sample(run.STEP, (), 2**53),
        Sample(run.STEPS, (), 12345678),
        Sample(run.LAST_STEP_TIMESTAMP, (), 1764540000.123456),
        Sample(loss.LOSS, (), math.nan),
        Sample(loss.LOSS_SCALE, (), 65536.0),
        Sample(loss.NONFINITE, ("loss",), 0),
        Sample(loss.NONFINITE, ("gradient",), 1e22),
        Sample(gradients.GRAD_NORM, ("pre_clip",), math.inf),
        Sample(gradients.GRAD_NORM, ("post_clip",), 5e-324),
        Sample(gradients.LAYER_GRAD_MEAN, one, -math.inf),
        Sample(gradients.LAYER_GRAD_MEAN, other, -0.0),
        Sample(gradients.LAYER_GRAD_MAGNITUDE, one, magnitudes),
        Sample(gradients.LAYER_GRAD_VALUE, one, values.value()),
        Sample(updates.LAYER_UPDATE_RATIO, one, 0.1 + 0.2),
        Sample(updates.LAYER_UPDATE_RATIO, other, 1.7976931348623157e308),
        Sample(throughput.STEP_DURATION, (), durations),
        Sample(throughput.DATA_WAIT_SECONDS, (), 123456789.125),
        Sample(throughput.TOKENS, (), 10**15),
        Sample(throughput.MEMORY_PEAK, (), float(80 * 2**30)),
        Sample(monitor.MONITOR_SECONDS, ("loop",), 1e-7),
    )
    return Snapshot((("run", AWKWARD), ("rank", "0"), ("team", "naïve")), 1764540000.0, samples)


def _sink(snapshot: Snapshot | None) -> PrometheusSink:
    sink = PrometheusSink()
    if snapshot is not None:
        sink.publish(snapshot)
    return sink


def _families(body: bytes, accept: str) -> list[Metric]:
    return list((parse_openmetrics if accept else parse_text)(body.decode()))


def _bits(value: float) -> bytes:
    """Return a double's bits; there is one NaN, as in the exposition formats."""
    return struct.pack(">d", math.nan if math.isnan(value) else float(value))


def _parsed(body: bytes, accept: str) -> Values:
    values: Values = {}
    for family in _families(body, accept):
        for sample in family.samples:
            key = (sample.name, frozenset(sample.labels.items()))
            assert key not in values, f"{key} twice"
            values[key] = _bits(sample.value)
    return values


def _expected(snapshot: Snapshot) -> Values:
    """Write a Snapshot down as Prometheus' series, by a way of its own."""
    values: Values = {}
    for sample in snapshot.samples:
        name = sample.spec.prometheus_name
        labels = {*snapshot.base_labels, *zip(sample.spec.labels, sample.labels, strict=True)}
        if not isinstance(sample.value, HistogramValue):
            values[name, frozenset(labels)] = _bits(sample.value)
            continue
        held = sample.value
        for bound in sample.spec.bounds:
            upto = sum(count for own, count in zip(held.bounds, held.counts, strict=False) if own <= bound)
            values[f"{name}_bucket", frozenset({*labels, ("le", repr(bound))})] = _bits(upto)
        values[f"{name}_bucket", frozenset({*labels, ("le", "+Inf")})] = _bits(sum(held.counts))
        if sample.spec is not gradients.LAYER_GRAD_VALUE:
            values[f"{name}_count", frozenset(labels)] = _bits(sum(held.counts))
            values[f"{name}_sum", frozenset(labels)] = _bits(held.total)
    return values


class _Model(nn.Module):
    """Every kind of layer and of activation that has a series of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(32, 16)
        self.norm = nn.LayerNorm(16)
        self.up, self.relu = nn.Linear(16, 32), nn.ReLU()
        self.down, self.tanh = nn.Linear(32, 16), nn.Tanh()
        self.head = nn.Linear(16, 4)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.embed(tokens))
        result: torch.Tensor = self.head(self.tanh(self.down(self.relu(self.up(hidden)))).mean(1))
        return result


def train(steps: int = 24, *, full: bool = True, poison: bool = False) -> Snapshot:
    """Train for real and return the last Snapshot of the running training; with `poison` the last steps meet NaN."""
    torch.manual_seed(0)
    model = _Model()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 1000))
    settings: dict[str, Any] = {"run": "golden", "every_n_steps": 4}
    if full:
        settings |= {
            "planned_steps": 2000,
            "warmup_steps": 1000,
            "peak_flops": 1e12,
            "flops_per_token": 6e3,
            "labels": {"team": AWKWARD},
            "kinds": ("matrix", "embedding", "norm", "vector"),
            "histograms": "layer",
            "signed_histograms": True,
        }
    with capture(model, optimizer, **settings) as (watch, sink):
        for step in range(steps):
            tokens = torch.randint(0, 32, (16, 8))
            value = model(tokens).square().mean()
            if poison and step >= steps - 4:
                value = value * math.nan
            value.backward()
            if full:
                watch.clip_grad_norm_(0.1)
            optimizer.step()
            optimizer.zero_grad()
            scheduler.step()
            if full:
                watch.observe(loss=value, tokens=tokens.numel(), samples=16, loss_scale=1024.0)
                if step % 10 == 9:
                    with watch.phase("eval"), torch.no_grad():
                        model(tokens)
        watch.flush()
        assert sink.last is not None
        return sink.last


@pytest.fixture(scope="module")
def trained() -> Callable[[str], Snapshot]:
    """Give the Snapshot of a training by kind; each is trained once."""
    made: dict[str, Snapshot] = {}

    def make(kind: str) -> Snapshot:
        if kind not in made:
            made[kind] = train(full=kind != "plain", poison=kind == "poisoned")
        return made[kind]

    return make


KINDS = pytest.mark.parametrize("kind", ["plain", "full", "poisoned"])


@pytest.mark.parametrize(("accept", "name"), [("", "exposition.prom"), (ACCEPT_OPENMETRICS, "exposition.openmetrics")])
def test_the_exposition_is_the_golden_one(accept: str, name: str) -> None:
    """Every byte of both formats; OTEL_TRAIN_UPDATE_GOLDEN=1 rewrites the files."""
    body, _ = _sink(awkward_snapshot()).render(accept, compress=False)
    if UPDATE_GOLDEN:
        (GOLDEN / name).write_bytes(body)
    assert body.decode() == (GOLDEN / name).read_bytes().decode()


def test_the_golden_snapshot_has_every_instrument_and_awkward_value() -> None:
    """The golden files would show nothing if the Snapshot behind them were tame."""
    snapshot = awkward_snapshot()
    assert {sample.spec.instrument for sample in snapshot.samples} == set(Instrument)
    numbers = [sample.value for sample in snapshot.samples if not isinstance(sample.value, HistogramValue)]
    assert any(math.isnan(n) for n in numbers)
    assert {math.inf, -math.inf} <= set(numbers)
    assert all(any(c in label for sample in snapshot.samples for label in sample.labels) for c in '"\\\n<>层')


@FORMATS
def test_awkward_values_survive_prometheus_clients_own_parsers(accept: str) -> None:
    """What is escaped and written comes back the same, to the bit."""
    snapshot = awkward_snapshot()
    body, _ = _sink(snapshot).render(accept, compress=False)
    assert _parsed(body, accept) == _expected(snapshot)


@FORMATS
@KINDS
def test_a_trainings_exposition_holds_exactly_the_snapshots_values(
    trained: Callable[[str], Snapshot], kind: str, accept: str
) -> None:
    """Every sample bit for bit, NaN included, and nothing more."""
    snapshot = trained(kind)
    body, _ = _sink(snapshot).render(accept, compress=False)
    found, expected = _parsed(body, accept), _expected(snapshot)
    assert found.keys() == expected.keys()
    assert found == expected
    assert len(expected) > 100
    assert (_bits(math.nan) in expected.values()) == (kind == "poisoned")


@FORMATS
def test_types_helps_and_units_are_the_catalogs(trained: Callable[[str], Snapshot], accept: str) -> None:
    """What Prometheus shows as metadata is what the catalog defines."""
    snapshot = trained("full")
    body, _ = _sink(snapshot).render(accept, compress=False)
    families = {f.name: f for f in _families(body, accept)}
    specs = {sample.spec for sample in snapshot.samples}
    assert len(families) == len(specs)
    for spec in specs:
        family = families[spec.prometheus_name.removesuffix("_total")]
        assert family.type == spec.instrument.value
        assert family.documentation == spec.brief
        if accept:
            assert family.unit == {"s": "seconds", "By": "bytes"}.get(spec.unit, "")


@pytest.mark.servers
@pytest.mark.parametrize("version", VERSIONS)
@KINDS
def test_promtool_finds_nothing(trained: Callable[[str], Snapshot], kind: str, version: Version) -> None:
    """`promtool check metrics` of both Prometheus versions accepts names, types and helps of a real run."""
    body, _ = _sink(trained(kind)).render("", compress=False)
    check = subprocess.run(
        [find_program(version, "promtool"), "check", "metrics"], input=body, capture_output=True, timeout=60, check=False
    )
    assert (check.returncode, check.stdout.decode(), check.stderr.decode()) == (0, "", "")


@pytest.mark.servers
@pytest.mark.parametrize("version", VERSIONS)
def test_promtool_finds_what_is_wrong(version: Version) -> None:
    """The check above can fail: a counter without _total is told of."""
    check = subprocess.run(
        [find_program(version, "promtool"), "check", "metrics"],
        input=b"# HELP steps Steps.\n# TYPE steps counter\nsteps 1\n",
        capture_output=True,
        timeout=60,
        check=False,
    )
    assert check.returncode != 0


@pytest.mark.servers
@pytest.mark.parametrize("version", VERSIONS)
def test_promtool_finds_nothing_in_any_metric_of_the_catalog(version: Version) -> None:
    """Metrics that a run on the CPU does not have, such as memory, are well named too."""
    samples = []
    for spec in CATALOG.values():
        held = HistogramValue(spec.bounds, (1,) * (len(spec.bounds) + 1), 1.0) if spec.bounds else 1.0
        samples.append(Sample(spec, ("0",) * len(spec.labels), held))
    body, _ = _sink(Snapshot((("run", "r"), ("rank", "0")), 0.0, tuple(samples))).render("", compress=False)
    check = subprocess.run(
        [find_program(version, "promtool"), "check", "metrics"], input=body, capture_output=True, timeout=60, check=False
    )
    assert (check.returncode, check.stdout.decode(), check.stderr.decode()) == (0, "", "")


@FORMATS
def test_before_the_first_snapshot_there_is_no_series(accept: str) -> None:
    """An empty exposition, which both parsers accept."""
    body, _ = _sink(None).render(accept, compress=False)
    assert _families(body, accept) == []


def test_a_histograms_buckets_ascend_to_its_count(trained: Callable[[str], Snapshot]) -> None:
    """Prometheus' rule for classic histograms, with +Inf equal to the count, where there is one."""
    body, _ = _sink(trained("full")).render("", compress=False)
    histograms = [f for f in _families(body, "") if f.type == "histogram"]
    assert len(histograms) == 3
    for family in histograms:
        series: dict[frozenset[tuple[str, str]], list[tuple[float, float]]] = {}
        counts: dict[frozenset[tuple[str, str]], float] = {}
        for sample in family.samples:
            labels = frozenset((k, v) for k, v in sample.labels.items() if k != "le")
            if sample.name.endswith("_bucket"):
                series.setdefault(labels, []).append((float(sample.labels["le"]), sample.value))
            elif sample.name.endswith("_count"):
                counts[labels] = sample.value
        if family.name == gradients.LAYER_GRAD_VALUE.prometheus_name:
            assert not [sample.name for sample in family.samples if not sample.name.endswith("_bucket")]
            counts = {labels: series[labels][-1][1] for labels in series}
        assert series.keys() == counts.keys()
        for labels, buckets in series.items():
            assert [b for b, _ in buckets] == sorted(b for b, _ in buckets)
            assert [c for _, c in buckets] == sorted(c for _, c in buckets)
            assert buckets[-1] == (math.inf, counts[labels])
            assert counts[labels] > 0


def test_gzip_holds_the_same_bytes() -> None:
    """Compression changes nothing else."""
    sink = _sink(awkward_snapshot())
    plain, content_type = sink.render("", compress=False)
    packed, packed_type = sink.render("", compress=True)
    assert gzip.decompress(packed) == plain
    assert content_type == packed_type


@pytest.fixture
def rendered(monkeypatch: pytest.MonkeyPatch) -> list[Snapshot]:
    """Note the Snapshot of each rendering."""
    snapshots: list[Snapshot] = []
    pieces = Renderer.pieces

    def noted(renderer: Renderer, snapshot: Snapshot) -> Iterator[Piece]:
        snapshots.append(snapshot)
        time.sleep(0.05)  # long enough for all scrapers to meet
        return pieces(renderer, snapshot)

    monkeypatch.setattr(Renderer, "pieces", noted)
    return snapshots


def test_four_scrapers_at_once_cost_one_rendering_a_snapshot(rendered: list[Snapshot]) -> None:
    """However many scrape: the training pays for one."""
    sink = PrometheusSink()
    for round_number in range(1, 4):
        sink.publish(awkward_snapshot())
        barrier = threading.Barrier(4)
        bodies: list[bytes] = []

        def scrape(barrier: threading.Barrier = barrier, bodies: list[bytes] = bodies) -> None:
            barrier.wait(10)
            bodies.append(sink.render(ACCEPT_OPENMETRICS, compress=True)[0])

        threads = [threading.Thread(target=scrape) for _ in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(10)
        assert len(bodies) == 4
        assert len(set(bodies)) == 1
        assert len(rendered) == round_number


def test_accept_headers_of_a_strangers_making_do_not_fill_the_memory(rendered: list[Snapshot]) -> None:
    """There are three formats: made-up versions must not be rendered and kept each."""
    sink = _sink(awkward_snapshot())
    for minor in range(20):
        sink.render(f"application/openmetrics-text;version=1.0.{minor}", compress=False)
    assert len(sink._renderings._made) <= 4
    assert len(rendered) == 1


@pytest.mark.parametrize(
    "accept",
    [
        "application/openmetrics-text;version=one",
        "application/openmetrics-text;version=",
        "application/openmetrics-text;version=1.0.0\r\n X-Injected: yes",
        "application/openmetrics-text;version=99.0.0",
        "text/plain;version=x",
        ",,;;==",
        "*/*" * 1000,
    ],
)
def test_a_strange_accept_header_is_answered_in_one_of_the_two_formats(accept: str) -> None:
    """It neither fails nor finds its way into the answer's content type."""
    body, content_type = _sink(awkward_snapshot()).render(accept, compress=False)
    known = ("text/plain; version=0.0.4", "text/plain; version=1.0.0", "application/openmetrics-text; version=1.0.0")
    assert content_type.startswith(known)
    assert "\n" not in content_type
    assert body


def test_closing_the_sink_leaves_the_last_values() -> None:
    """A user's application may go on serving the registry."""
    sink = _sink(awkward_snapshot())
    before = sink.render("", compress=False)
    sink.close()
    assert sink.render("", compress=False) == before


def test_the_default_registry_is_not_touched() -> None:
    """The user's own metrics and ours do not mix."""
    sink = _sink(awkward_snapshot())
    own = prometheus_client.generate_latest(prometheus_client.REGISTRY)
    assert b"otel_train" not in own
    assert sink.registry is not prometheus_client.REGISTRY
