"""The protobuf exposition, read back field by field with protobuf's own library."""

from __future__ import annotations

import itertools
import math
import random
import struct
import tracemalloc
from collections.abc import Callable, Iterator
from typing import Any

import pytest

from otel_train import naming
from otel_train.assembly.histograms import MAGNITUDE_BINS, SignedHistogram
from otel_train.catalog import CATALOG, Instrument, MetricSpec, gradients, run, throughput, updates
from otel_train.records import Signs
from otel_train.sinks import protobuf
from otel_train.sinks.protobuf import Renderer, assemble
from otel_train.snapshot import HistogramValue, Sample, Snapshot
from tests.sinks.client_model import buckets, families, type_of
from tests.sinks.test_exposition import PARTS, REPR_SECONDS, _number, _seconds, many_histograms, many_series
from tests.sinks.test_prometheus import awkward_snapshot

LAYER = ("blocks.0", "0", "matrix", "0")


def written(snapshot: Snapshot, renderer: Renderer | None = None) -> list[Any]:
    """Return the messages of a Snapshot's exposition."""
    return list(families(b"".join(assemble((renderer or Renderer()).pieces(snapshot)))))


def one(spec: MetricSpec, value: float | HistogramValue) -> Any:
    """Return the one metric that a value becomes."""
    labels = LAYER if spec.labels else ()
    (family,) = written(Snapshot((("run", "r"),), 0.0, (Sample(spec, labels, value),)))
    (metric,) = family.metric
    return metric


def _bits(number: float) -> bytes:
    return struct.pack("<d", number)


def _histogram(chance: random.Random, spec: MetricSpec) -> HistogramValue:
    def some() -> int:
        return chance.choice([0, 0, 1, chance.getrandbits(chance.randint(1, 40))])

    if not spec.exponential:
        return HistogramValue(spec.bounds, tuple(some() for _ in range(len(spec.bounds) + 1)), _number(chance))
    counts = [float(some()) for _ in range(len(MAGNITUDE_BINS) + 1)]
    if spec.bounds[0] > 0:
        return HistogramValue(MAGNITUDE_BINS, tuple(map(int, counts)), _number(chance))
    negatives = tuple(float(chance.randint(0, int(count))) for count in counts[1:])
    powers = tuple(float(chance.randint(0, int(count))) for count in (counts[0], *negatives[:-1]))
    signed = SignedHistogram()
    signed.add(counts, Signs(negatives, powers, _number(chance)))
    return signed.value()


def _snapshots(seed: int) -> Iterator[Snapshot]:
    """Yield Snapshots of one run: series come and go, numbers and labels are of every kind."""
    chance = random.Random(seed)
    pool = {
        spec: list({tuple("".join(chance.choices(PARTS, k=3)) for _ in spec.labels) for _ in range(20)})
        for spec in CATALOG.values()
    }
    for number in range(4):
        base = (("run", f"r{number // 2}"), ("Zone", "z\udc80"), ("rank", "0"))
        samples = [
            Sample(spec, labels, _histogram(chance, spec) if spec.bounds else _number(chance))
            for spec, series in pool.items()
            for labels in chance.sample(series, chance.randint(0, len(series)))
        ]
        yield Snapshot(base, 0.0, tuple(samples), started_at=chance.choice([0.0, 1764540000.25]))


def _check_histogram(found: Any, spec: MetricSpec, value: HistogramValue) -> None:
    upto, count = value.cumulated(spec.bounds)
    assert found.sample_count == count
    assert _bits(found.sample_sum) == _bits(value.total)
    assert [(bucket.upper_bound, bucket.cumulative_count) for bucket in found.bucket] == upto
    assert found.HasField("schema") == found.HasField("zero_threshold") == found.HasField("zero_count") == spec.exponential
    if not spec.exponential:
        assert not [*found.positive_span, *found.negative_span]
        return
    native = value.exponential()
    assert (found.schema, found.zero_threshold, found.zero_count) == (0, native.zero_threshold, native.zero_count)
    for side, counts in (("positive", native.positive), ("negative", native.negative)):
        got = buckets(getattr(found, f"{side}_span"), getattr(found, f"{side}_delta"))
        expected = {native.first + i: n for i, n in enumerate(counts) if n}
        assert {index: n for index, n in got.items() if n} == expected
        assert set(got) <= set(range(min(expected, default=0), max(expected, default=-1) + 1)), "trimmed at both ends"
    assert sum(n for side in ("positive", "negative") for n in buckets(
        getattr(found, f"{side}_span"), getattr(found, f"{side}_delta")).values()) + found.zero_count == count  # fmt: skip


def _check(found: list[Any], snapshot: Snapshot) -> None:
    """Compare every field of every message with the Snapshot."""
    groups = [(spec, list(samples)) for spec, samples in itertools.groupby(snapshot.samples, key=lambda sample: sample.spec)]
    assert [family.name for family in found] == [spec.prometheus_name for spec, _ in groups]
    for family, (spec, samples) in zip(found, groups, strict=True):
        assert (family.help, type_of(family)) == (spec.brief, spec.instrument.value)
        assert family.unit == naming.unit_word(spec.unit)
        for metric, sample in zip(family.metric, samples, strict=True):
            labels = {**dict(snapshot.base_labels), **dict(zip(spec.labels, sample.labels, strict=True))}
            expected = sorted((name, value.encode("utf-8", "replace").decode()) for name, value in labels.items())
            assert [(pair.name, pair.value) for pair in metric.label] == expected
            held = getattr(metric, spec.instrument.value)
            assert [field.name for field, _ in metric.ListFields()] == (["label"] if labels else []) + [spec.instrument.value]
            if isinstance(sample.value, HistogramValue):
                _check_histogram(held, spec, sample.value)
            else:
                assert _bits(held.value) == _bits(sample.value)
            if spec.instrument is not Instrument.GAUGE:
                created = held.created_timestamp
                assert held.HasField("created_timestamp") == bool(snapshot.started_at)
                assert created.seconds + created.nanos / 1e9 == snapshot.started_at


@pytest.mark.parametrize("seed", range(6))
def test_every_field_comes_back(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over runs made by chance, whose series come and go; in small pieces, too."""
    monkeypatch.setattr(protobuf, "_BLOCK_SERIES", [1, 40, 500][seed % 3])
    renderer = Renderer()
    for snapshot in _snapshots(seed):
        _check(written(snapshot, renderer), snapshot)


def test_awkward_values_come_back() -> None:
    """Every instrument, numbers that are none, labels that text has to escape."""
    snapshot = awkward_snapshot()
    _check(written(snapshot), snapshot)
    assert written(Snapshot((), 0.0, ())) == []


def test_what_was_counted_is_in_native_and_classic_buckets() -> None:
    """Written out: zeros and what is smaller; (2^-46, 2^-45] is the native bucket -45; what is larger than all is in the last."""
    counts = [0] * (len(MAGNITUDE_BINS) + 1)
    counts[0], counts[1], counts[46], counts[49], counts[-1] = 5, 7, 11, 13, 17  # up to 2^-46, 2^-45, 1, 8, beyond 2^16
    found = one(gradients.LAYER_GRAD_MAGNITUDE, HistogramValue(MAGNITUDE_BINS, tuple(counts), 2.5)).histogram
    assert (found.zero_count, found.sample_count, found.sample_sum) == (5, 53, 2.5)
    filled = {index: count for index, count in buckets(found.positive_span, found.positive_delta).items() if count}
    assert filled == {-45: 7, 0: 11, 3: 13, 17: 17}
    assert {bucket.upper_bound: bucket.cumulative_count for bucket in found.bucket if bucket.upper_bound in {2.0**-40, 0.25, 1, 4, 16}} == {
        2.0**-40: 12, 0.25: 12, 1: 23, 4: 23, 16: 36,
    }  # fmt: skip


def test_negative_powers_of_two_are_in_another_bucket_of_each_kind() -> None:
    """-1: native [-1, -1/2) is bucket 0 below zero; classic (-4, -1] ends at it."""
    counts, negatives, powers = ([0.0] * 64, [0.0] * 63, [0.0] * 63)
    counts[46] = negatives[45] = powers[46] = 3.0
    signed = SignedHistogram()
    signed.add(counts, Signs(tuple(negatives), tuple(powers), -3.0))
    found = one(gradients.LAYER_GRAD_VALUE, signed.value()).histogram
    assert (found.sample_count, found.sample_sum, found.zero_count) == (3, -3.0, 0)
    assert buckets(found.negative_span, found.negative_delta) == {0: 3}
    assert not found.positive_span
    upto = {bucket.upper_bound: bucket.cumulative_count for bucket in found.bucket}
    assert (upto[-4.0], upto[-1.0], upto[-0.25]) == (0, 3, 3)


def test_a_histogram_of_zeros_is_a_native_one() -> None:
    """Servers tell by spans, or by a zero threshold above 0."""
    for zeros in (0, 9):
        found = one(gradients.LAYER_GRAD_MAGNITUDE, HistogramValue(MAGNITUDE_BINS, (zeros, *[0] * 63), 0.0)).histogram
        assert found.zero_threshold > 0
        assert (found.zero_count, found.sample_count) == (zeros, zeros)


def test_a_histogram_of_step_durations_is_classic_alone() -> None:
    """It is not counted by powers of two."""
    found = one(throughput.STEP_DURATION, HistogramValue(throughput.STEP_DURATION.bounds, (1,) * 20, 3.5)).histogram
    assert not found.HasField("schema")
    assert len(found.bucket) == len(throughput.STEP_DURATION.bounds)


def test_counters_keep_their_ending_and_start_with_the_run() -> None:
    """As client_golang writes them."""
    (family,) = written(Snapshot((), 0.0, (Sample(run.STEPS, (), 3),), started_at=1000.5))
    assert family.name == "otel_train_steps_total"
    assert family.metric[0].counter.created_timestamp.seconds == 1000
    assert family.metric[0].counter.created_timestamp.nanos == 500_000_000


def test_pieces_are_short() -> None:
    """The caller lets other threads run between them."""
    for snapshot, least in ((many_series(5_000), 10), (many_histograms(5_000), 10)):
        assert len(list(Renderer().pieces(snapshot))) >= least


def test_series_that_are_gone_leave_nothing_behind() -> None:
    """A run whose label values never come back holds no more after a hundred Snapshots than after ten."""
    renderer, held = Renderer(), []
    tracemalloc.start()
    try:
        for number in range(100):
            samples = [Sample(updates.LAYER_UPDATE_RATIO, (f"{number}.{i}", "0", "matrix", "0"), 1.0) for i in range(200)]
            for _ in renderer.pieces(Snapshot((("run", f"run {number // 50}"),), 0.0, tuple(samples))):
                pass
            held.append(tracemalloc.get_traced_memory()[0])
    finally:
        tracemalloc.stop()
    assert held[-1] < 1.2 * held[9]


@pytest.mark.parametrize("count", [5_000, 50_000])
@pytest.mark.parametrize("make", [many_series, many_histograms], ids=["gauges", "histograms"])
def test_a_series_costs_a_microsecond(make: Callable[[int, int], Snapshot], count: int) -> None:
    """As of the text: 5,000 in 5 ms and 50,000 in 50 ms, native buckets beside the classic ones that are counted here."""
    renderer = Renderer()
    numbers = [random.Random(0).gauss(0, 1) for _ in range(count)]
    list(renderer.pieces(make(count, 0)))
    ours, machine = [], []
    for snapshot in (make(count, seed) for seed in range(1, 9)):
        ours.append(_seconds(lambda snapshot=snapshot: list(renderer.pieces(snapshot))))  # type: ignore[misc]
        machine.append(_seconds(lambda: list(map(repr, numbers))))
    slowness = min(machine) / count / REPR_SECONDS
    assert min(ours) <= slowness * count * 1e-6, f"{1e3 * min(ours):.1f} ms on a machine {slowness:.2f} times as slow"


def test_not_a_number_keeps_its_sign_and_infinity_too() -> None:
    """Prometheus tells its own NaN, for what is gone, from ours by its bits."""
    for number in (math.nan, math.inf, -math.inf, -0.0):
        assert _bits(one(gradients.LAYER_GRAD_MEAN, number).gauge.value) == _bits(number)
