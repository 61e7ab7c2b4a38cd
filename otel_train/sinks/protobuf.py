"""Snapshots in Prometheus' protobuf format, which carries native histograms: delimited ``io.prometheus.client.MetricFamily``.

What was counted by powers of two goes as a native histogram of schema 0 and, in the same message, by classic buckets: the server
takes what it is set to. The numbers of fields are those of client_model's ``metrics.proto``.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import chain, groupby
from operator import attrgetter, sub

from otel_train import naming
from otel_train.catalog import Instrument, MetricSpec
from otel_train.sinks.renderer import Blocks, Cumulation, SnapshotRenderer
from otel_train.sinks.wire import (
    DELIMITED,
    VARINT,
    delimited,
    double,
    integer,
    pack_double,
    signed,
    signed_varints,
    tag,
    text,
    varint,
)
from otel_train.snapshot import HistogramValue, Sample

_BLOCK_SERIES = 500
"""Series that are rendered in one go, the buckets of a histogram among them: about 0.5 ms of interpreter time."""

_FAMILY_NAME, _FAMILY_HELP, _FAMILY_TYPE, _FAMILY_METRIC, _FAMILY_UNIT = 1, 2, 3, 4, 5
_METRIC_LABEL, _METRIC_GAUGE, _METRIC_COUNTER, _METRIC_HISTOGRAM = 1, 2, 3, 7
_LABEL_NAME, _LABEL_VALUE = 1, 2
_NUMBER_VALUE = 1
_COUNTER_CREATED, _HISTOGRAM_CREATED = 3, 15
_SECONDS, _NANOS = 1, 2
_COUNT, _SUM, _BUCKET, _SCHEMA, _ZERO_THRESHOLD, _ZERO_COUNT = 1, 2, 3, 5, 6, 7
_NEGATIVE, _POSITIVE = (9, 10), (12, 13)
"""Fields of the spans and of the counts."""
_SPAN_OFFSET, _SPAN_LENGTH = 1, 2
_BUCKET_COUNT, _BUCKET_BOUND = 1, 2
_TYPES = {Instrument.COUNTER: 0, Instrument.GAUGE: 1, Instrument.HISTOGRAM: 4}
_BASE_2 = 0
"""The schema whose buckets end at the powers of two."""
_DOUBLE_BYTES = len(pack_double(0.0))
_BUCKET_STARTS = tuple(
    tag(_BUCKET, DELIMITED) + varint(1 + size + 1 + _DOUBLE_BYTES) + tag(_BUCKET_COUNT, VARINT) for size in range(10)
)
"""What stands before the count of a bucket, by the count's bytes: put together once, since a histogram has many of them."""


@dataclass(frozen=True, slots=True)
class Piece:
    """Some series of one metric."""

    family: bytes
    """The metric's name, help, type and unit: the same in each of its pieces."""
    metrics: bytes


def assemble(pieces: Iterable[Piece]) -> Iterator[bytes]:
    """Yield the exposition, part by part: one message a metric, each after its length."""
    for family, members in groupby(pieces, key=attrgetter("family")):
        parts = [family, *(piece.metrics for piece in members)]
        yield varint(sum(map(len, parts)))
        yield from parts


class Renderer(SnapshotRenderer[Piece]):
    """Renders one Snapshot after another; keeps the series' labels for as long as they are there."""

    def __init__(self) -> None:
        super().__init__(_Metric)


class _Metric:
    """A metric's head and the labels of its series, as far as they stay the same."""

    def __init__(self, spec: MetricSpec, base_labels: dict[str, str], started_at: float) -> None:
        self._spec, self._base_labels = spec, base_labels
        self._family = _family(spec)
        self._created = _timestamp(started_at) if started_at else b""
        self._cumulation = Cumulation(spec.bounds)
        self._bounds = tuple(double(_BUCKET_BOUND, bound) for bound in spec.bounds)
        self._starts: Blocks[list[bytes]] = Blocks(_BLOCK_SERIES // (len(spec.bounds) + 1))

    def pieces(self, samples: list[Sample]) -> Iterator[Piece]:
        """Yield these samples."""
        for some, starts in self._starts.of(samples, self._starts_of):
            yield Piece(self._family, b"".join(self._parts(starts, [sample.value for sample in some])))

    def _parts(self, starts: list[bytes], values: list[float | HistogramValue]) -> Iterable[bytes]:
        if self._spec.bounds:
            return (self._histogram(start, v) for start, v in zip(starts, values, strict=True) if isinstance(v, HistogramValue))
        return chain.from_iterable(zip(starts, map(pack_double, values), strict=True))

    def _starts_of(self, labels: list[tuple[str, ...]]) -> list[bytes]:
        return list(map(self._start, labels))

    def _start(self, labels: tuple[str, ...]) -> bytes:
        """Return what stands before the value: of a number everything, since its length is known; of a histogram the labels."""
        pairs = sorted({**self._base_labels, **dict(zip(self._spec.labels, labels, strict=True))}.items())
        encoded = b"".join(delimited(_METRIC_LABEL, text(_LABEL_NAME, name) + text(_LABEL_VALUE, value)) for name, value in pairs)
        if self._spec.bounds:
            return encoded
        if self._spec.instrument is Instrument.COUNTER:
            number = delimited(_METRIC_COUNTER, self._field_of_created(_COUNTER_CREATED) + double(_NUMBER_VALUE, 0.0))
        else:
            number = delimited(_METRIC_GAUGE, double(_NUMBER_VALUE, 0.0))
        return delimited(_FAMILY_METRIC, encoded + number)[:-_DOUBLE_BYTES]

    def _field_of_created(self, field: int) -> bytes:
        return delimited(field, self._created) if self._created else b""

    def _histogram(self, start: bytes, value: HistogramValue) -> bytes:
        *upto, count = self._cumulation.of(value)
        parts = [self._field_of_created(_HISTOGRAM_CREATED), integer(_COUNT, count), double(_SUM, value.total)]
        for number, bound in zip(upto, self._bounds, strict=True):
            written = varint(number)
            parts += (_BUCKET_STARTS[len(written)], written, bound)
        if self._spec.exponential:
            parts += _native(value)
        return delimited(_FAMILY_METRIC, start + delimited(_METRIC_HISTOGRAM, b"".join(parts)))


def _native(value: HistogramValue) -> Iterator[bytes]:
    """Yield what makes a histogram a native one; its zero threshold does so even where it holds nothing but zeros."""
    native = value.exponential()
    yield signed(_SCHEMA, _BASE_2)
    yield double(_ZERO_THRESHOLD, native.zero_threshold)
    yield integer(_ZERO_COUNT, native.zero_count)
    yield _counts(_NEGATIVE, native.first, native.negative)
    yield _counts(_POSITIVE, native.first, native.positive)


def _counts(fields: tuple[int, int], first: int, counts: Sequence[int]) -> bytes:
    """Write one span from the first bucket that holds something to the last, and the difference of each from the one before."""
    start, stop = 0, len(counts)
    while stop and not counts[stop - 1]:
        stop -= 1
    while start < stop and not counts[start]:
        start += 1
    if start == stop:
        return b""
    counts = counts[start:stop]
    span = signed(_SPAN_OFFSET, first + start) + integer(_SPAN_LENGTH, len(counts))
    differences = map(sub, counts, (0, *counts))
    return delimited(fields[0], span) + delimited(fields[1], signed_varints(differences))


def _timestamp(seconds: float) -> bytes:
    part, whole = math.modf(seconds)
    return integer(_SECONDS, int(whole)) + integer(_NANOS, round(part * 1e9))


def _family(spec: MetricSpec) -> bytes:
    unit = naming.unit_word(spec.unit)
    return b"".join(
        (
            text(_FAMILY_NAME, spec.prometheus_name),
            text(_FAMILY_HELP, spec.brief),
            integer(_FAMILY_TYPE, _TYPES[spec.instrument]),
            text(_FAMILY_UNIT, unit) if unit else b"",
        )
    )
