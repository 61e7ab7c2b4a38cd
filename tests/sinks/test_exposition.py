"""The renderer of the text formats: prometheus_client's bytes, for a tenth of its time."""

from __future__ import annotations

import math
import random
import struct
import time
import tracemalloc
from collections.abc import Callable, Iterator

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest as generate_text
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.utils import floatToGoString

from otel_train.catalog import CATALOG, Instrument, MetricSpec, gradients, updates
from otel_train.records import MAGNITUDE_EXPONENTS
from otel_train.sinks import exposition
from otel_train.sinks.exposition import TEXT_FORMATS, Renderer, assemble, go_float
from otel_train.sinks.negotiation import Format
from otel_train.sinks.prometheus import SnapshotCollector
from otel_train.snapshot import HistogramValue, Sample, Snapshot

NUMBERS = (
    [0.0, -0.0, 1.0, -1.0, 0.1, 1 / 3, 5e-324, 1e-7, 1e22, 1.7976931348623157e308, math.nan, math.inf, -math.inf]
    + [sign * (10.0**exponent + more) for exponent in range(4, 24) for more in (-1.0, 0.0, 0.5, 123.0) for sign in (1, -1)]
    + [0, 1, 999_999, 1_000_000, 1_234_500, 2**53, 10**15, 10**16, 10**17, True]
)
PARTS = [
    "",
    "a",
    "%",
    "%s",
    "%%",
    "%(x)s",
    "{}",
    "{0}",
    '"',
    "\\",
    "\n",
    "\r",
    "\t",
    "\0",
    "\x7f",
    "\u2028",
    "ü",
    "层",
    "\U0001f525",
    " ",
    ",",
    "=",
]
ODD = MetricSpec("odd.name", Instrument.GAUGE, 'A "brief" with \\ and\na line and %s.', labels=("z", "a", "mid"))


def _number(chance: random.Random) -> float:
    if chance.random() < 0.5:
        return chance.choice(NUMBERS)
    return float(struct.unpack(">d", chance.randbytes(8))[0])


def _text(chance: random.Random) -> str:
    return "".join(chance.choices(PARTS, k=chance.randrange(5)))


def _sample(chance: random.Random, spec: MetricSpec, labels: tuple[str, ...]) -> Sample:
    if not spec.bounds:
        return Sample(spec, labels, _number(chance))
    bounds = tuple(sorted({*spec.bounds, *(abs(chance.gauss(0, 1)) for _ in range(3))}))
    counts = tuple(chance.randrange(10 ** chance.randrange(1, 9)) for _ in range(len(bounds) + 1))
    return Sample(spec, labels, HistogramValue(bounds, counts, _number(chance)))


def _snapshots(seed: int) -> Iterator[Snapshot]:
    """Yield Snapshots of one run: series and metrics come and go, and once the labels of all change."""
    chance = random.Random(seed)
    pool = {
        spec: [tuple(_text(chance) for _ in spec.labels) for _ in range(chance.choice([1, 3, 30]) if spec.labels else 1)]
        for spec in (*CATALOG.values(), ODD)
    }
    base = (("run", _text(chance)), ("rank", "0"), ("Zone", _text(chance)), ("team", _text(chance)))
    for number in range(6):
        samples: list[Sample] = []
        for spec, labels in pool.items():
            if chance.random() < 0.8:
                kept = labels if chance.random() < 0.6 else [values for values in labels if chance.random() < 0.7]
                samples += [_sample(chance, spec, values) for values in kept]
        yield Snapshot(base if number < 4 else base[: 3 - seed % 4], 0.0, tuple(samples))


def _reference(snapshot: Snapshot, text_format: Format) -> bytes:
    registry, collector = CollectorRegistry(auto_describe=False), SnapshotCollector()
    collector.snapshot = snapshot
    registry.register(collector)
    return generate_text(registry) if text_format is Format.TEXT else generate_openmetrics(registry)  # type: ignore[no-untyped-call]


def _render(renderer: Renderer, snapshot: Snapshot, text_format: Format) -> bytes:
    return b"".join(assemble(renderer.pieces(snapshot), text_format))


@pytest.mark.parametrize("text_format", TEXT_FORMATS, ids=["text", "openmetrics"])
@pytest.mark.parametrize("seed", range(8))
def test_every_byte_is_prometheus_clients(seed: int, text_format: Format, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over runs made by chance: hostile labels, every kind of number, series that come and go; in small pieces, too."""
    monkeypatch.setattr(exposition, "_BLOCK_LINES", [1, 7, 40, 500][seed % 4])
    renderer = Renderer()
    for snapshot in _snapshots(seed):
        assert _render(renderer, snapshot, text_format) == _reference(snapshot, text_format)


def test_numbers_are_written_as_prometheus_client_writes_them() -> None:
    """All that are special, and ten thousand sets of 64 bits."""
    chance = random.Random(0)
    for number in (*NUMBERS, *(_number(chance) for _ in range(10_000)), *(10 ** chance.uniform(4, 18) for _ in range(10_000))):
        assert go_float(number) == floatToGoString(number)  # type: ignore[no-untyped-call]


def test_half_a_surrogate_becomes_a_question_mark() -> None:
    """A file name that is no text can be a label; prometheus_client would fail, and no scrape would come through."""
    snapshot = Snapshot((("run", "r\udc80"),), 0.0, (Sample(updates.LAYER_UPDATE_RATIO, ("a\ud800b", "0", "matrix", "0"), 1.0),))
    body = _render(Renderer(), snapshot, Format.TEXT).decode()
    assert 'layer="a?b"' in body
    assert 'run="r?"' in body


def test_pieces_are_short() -> None:
    """The caller lets other threads run between them."""
    for snapshot in (many_series(5_000), many_histograms(5_000)):
        lines = [piece.lines.count(b"\n") for piece in Renderer().pieces(snapshot)]
        assert max(lines) <= 500
        assert sum(lines) >= 4_000


def test_series_that_are_gone_leave_nothing_behind() -> None:
    """A run whose label values never come back holds no more after a hundred Snapshots than after ten."""
    renderer, held = Renderer(), []
    tracemalloc.start()
    try:
        for number in range(100):
            samples = [Sample(updates.LAYER_UPDATE_RATIO, (f"{number}.{i}", "0", "matrix", "0"), 1.0) for i in range(200)]
            _render(renderer, Snapshot((("run", f"run {number // 50}"),), 0.0, tuple(samples)), Format.TEXT)
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] < 1.2 * held[9]


def test_a_metric_that_is_gone_leaves_nothing_behind() -> None:
    """Its lines are let go of with its last series."""
    renderer = Renderer()
    tracemalloc.start()
    try:
        _render(renderer, many_series(5_000), Format.TEXT)
        full = tracemalloc.get_traced_memory()[0]
        _render(renderer, Snapshot((("run", "a-run-name"), ("rank", "0")), 0.0, ()), Format.TEXT)
        assert tracemalloc.get_traced_memory()[0] < full / 5
    finally:
        tracemalloc.stop()


# --- what it costs


def many_series(count: int, seed: int = 0) -> Snapshot:
    """Return a Snapshot of a big model: layer series of five metrics, with numbers of all sizes."""
    chance = random.Random(seed)
    specs = (
        gradients.LAYER_GRAD_NORM,
        gradients.LAYER_GRAD_MEAN,
        gradients.LAYER_GRAD_STD,
        updates.LAYER_UPDATE_RATIO,
        updates.LAYER_CHANGED_RATIO,
    )
    layers = [(f"transformer.blocks.{i}.attention.weight", str(i), "matrix", "0") for i in range(count // len(specs))]
    samples = [Sample(spec, labels, chance.gauss(0, 1) * 10 ** chance.randint(-6, 2)) for spec in specs for labels in layers]
    return Snapshot((("run", "a-run-name"), ("rank", "0")), 0.0, tuple(samples))


def many_histograms(lines: int, seed: int = 0) -> Snapshot:
    """Return a Snapshot of histograms with about so many lines: millions of gradients each, the most of them near 1e-6."""
    chance, spec = random.Random(seed), gradients.LAYER_GRAD_MAGNITUDE
    bounds = tuple(2.0**exponent for exponent in MAGNITUDE_EXPONENTS)
    samples = []
    for i in range(lines // (len(spec.bounds) + 3)):
        counts = [int(chance.uniform(1e6, 2e6) * math.exp(-(((exponent + 20) / 6) ** 2))) for exponent in MAGNITUDE_EXPONENTS]
        labels = (f"transformer.blocks.{i}", str(i), "matrix", "0")
        samples.append(Sample(spec, labels, HistogramValue(bounds, (*counts, 0), chance.random())))
    return Snapshot((("run", "a-run-name"), ("rank", "0")), 0.0, tuple(samples))


def _seconds(work: Callable[[], object]) -> float:
    began = time.thread_time()
    work()
    return time.thread_time() - began


REPR_SECONDS = 0.33e-6
"""What ``repr`` of a number takes on the machine that the limits are for, 2 cores of 2026."""


@pytest.mark.parametrize("count", [5_000, 50_000])
@pytest.mark.parametrize("make", [many_series, many_histograms], ids=["gauges", "histograms"])
def test_a_series_costs_a_microsecond(make: Callable[[int, int], Snapshot], count: int) -> None:
    """5,000 in 5 ms and 50,000 in 50 ms, all numbers new; and a sixth of what prometheus_client takes."""
    renderer = Renderer()
    numbers = [random.Random(0).gauss(0, 1) for _ in range(count)]
    list(renderer.pieces(make(count, 0)))
    ours, theirs, machine = [], [], []
    for snapshot in (make(count, seed) for seed in range(1, 5)):
        ours.append(_seconds(lambda snapshot=snapshot: list(renderer.pieces(snapshot))))  # type: ignore[misc]
        theirs.append(_seconds(lambda snapshot=snapshot: _reference(snapshot, Format.TEXT)))  # type: ignore[misc]
        machine.append(_seconds(lambda: list(map(repr, numbers))))
    slowness = min(machine) / count / REPR_SECONDS
    assert min(ours) <= slowness * count * 1e-6, f"{1e3 * min(ours):.1f} ms on a machine {slowness:.2f} times as slow"
    assert min(ours) <= min(theirs) / 6
