"""Snapshots as Prometheus' text: format 0.0.4 and OpenMetrics 1.0.0, byte for byte what prometheus_client writes.

Most of the text stays as it is from one Snapshot to the next. The head of a metric, and the names and labels of its series, are
written once and kept for as long as the same series are there; what a Snapshot costs is its numbers, of which Python's own ``repr``
takes most. Both formats share the lines of the series: they differ in the heads alone.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass

from otel_train import naming
from otel_train.catalog import Instrument, MetricSpec
from otel_train.sinks.negotiation import Format
from otel_train.sinks.renderer import Blocks, Cumulation, SnapshotRenderer
from otel_train.snapshot import HistogramValue, Sample

_BLOCK_LINES = 500
"""Lines that are rendered in one go: about 0.3 ms of interpreter time."""
TEXT_FORMATS = (Format.TEXT, Format.OPENMETRICS)


@dataclass(frozen=True, slots=True)
class Piece:
    """Some lines of one metric."""

    heads: Mapping[Format, bytes]
    """What stands above the lines; empty but for the metric's first piece."""
    lines: bytes


def assemble(pieces: Iterable[Piece], text_format: Format) -> Iterator[bytes]:
    """Yield the exposition in a format, part by part."""
    for piece in pieces:
        yield piece.heads.get(text_format, b"")
        yield piece.lines
    if text_format is Format.OPENMETRICS:
        yield b"# EOF\n"


class Renderer(SnapshotRenderer[Piece]):
    """Renders one Snapshot after another; keeps the lines of series that stay."""

    def __init__(self) -> None:
        super().__init__(_Metric)


class _Metric:
    """A metric's head and blocks, as far as they stay the same."""

    def __init__(self, spec: MetricSpec, base_labels: dict[str, str], started_at: float) -> None:
        del started_at  # OpenMetrics' _created would be a series of its own to Prometheus
        self._cumulation = Cumulation(spec.bounds)
        self._heads = {text_format: _head(spec, text_format).encode() for text_format in TEXT_FORMATS}
        names = sorted(spec.labels)
        self._order = [spec.labels.index(name) for name in names]
        lines = list(_lines(spec))
        self._series_template = "".join(_line_template(name, {**base_labels, **more}, names) for name, more in lines)
        self._lines_of_series = len(lines)
        self._templates: Blocks[str] = Blocks(_BLOCK_LINES // self._lines_of_series)

    def pieces(self, samples: list[Sample]) -> Iterator[Piece]:
        """Yield the lines of these samples."""
        heads: Mapping[Format, bytes] = self._heads
        for some, template in self._templates.of(samples, self._template):
            text = template % tuple(map(go_float, self._numbers(some)))
            yield Piece(heads, text.encode("utf-8", "replace"))
            heads = {}

    def _template(self, labels: list[tuple[str, ...]]) -> str:
        """Return the lines of some series, with ``%s`` for each number."""
        return "".join(map(self._series, labels))

    def _series(self, labels: tuple[str, ...]) -> str:
        values = tuple(_literal(labels[index]) for index in self._order)
        return self._series_template % (values * self._lines_of_series)

    def _numbers(self, samples: list[Sample]) -> list[float]:
        numbers: list[float] = []
        for sample in samples:
            value = sample.value
            if isinstance(value, HistogramValue):
                upto = self._cumulation.of(value)
                numbers += (*upto, upto[-1], value.total) if sample.spec.has_sum else upto
            else:
                numbers.append(value)
        return numbers


def _lines(spec: MetricSpec) -> Iterator[tuple[str, dict[str, str]]]:
    """Yield name and labels of each line that a series has: one, or of a histogram its buckets, count and sum."""
    name = spec.prometheus_name
    if not spec.bounds:
        yield name, {}
        return
    for bound in (*map(repr, spec.bounds), "+Inf"):
        yield f"{name}_bucket", {"le": bound}
    if spec.has_sum:
        yield f"{name}_count", {}
        yield f"{name}_sum", {}


def _line_template(name: str, constant: dict[str, str], varying: list[str]) -> str:
    """Return a line with ``%s`` for each label that varies, in their order; filled in, it has a ``%s`` for the number."""
    values = {label: _literal(value).replace("%", "%%") for label, value in constant.items()} | dict.fromkeys(varying, "%s")
    labels = ",".join(f'{label}="{values[label]}"' for label in sorted(values))
    return f"{name}{{{labels}}} %%s\n" if labels else f"{name} %%s\n"


def _literal(label: str) -> str:
    """Write a label's value so that it stands in a template."""
    return _escape(label).replace("%", "%%")


def _head(spec: MetricSpec, text_format: Format) -> str:
    name, kind = spec.prometheus_name, spec.instrument.value
    if text_format is Format.TEXT:
        brief = spec.brief.replace("\\", r"\\").replace("\n", r"\n")
        return f"# HELP {name} {brief}\n# TYPE {name} {kind}\n"
    if spec.instrument is Instrument.COUNTER:
        name = name.removesuffix("_total")
    unit = naming.unit_word(spec.unit)
    return f"# HELP {name} {_escape(spec.brief)}\n# TYPE {name} {kind}\n" + (f"# UNIT {name} {unit}\n" if unit else "")


def _escape(text: str) -> str:
    return text.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


_NOT_FINITE = {"nan": "NaN", "inf": "+Inf", "-inf": "-Inf"}
_EXPONENTS = tuple(f"e+{digits - 1:02d}" for digits in range(18))
"""By the number of digits before the point; formatting them each time would double the cost of a number."""


def go_float(number: float) -> str:
    """Write a number as Go does, and after it prometheus_client: with an exponent from a million on."""
    text = repr(float(number))
    if -math.inf < number < 1e6:
        return text
    point = text.find(".")
    if point <= 6:  # no finite number, or Python writes it with an exponent too
        return _NOT_FINITE.get(text, text)
    return (text[0] + "." + text[1:point] + text[point + 1 :]).rstrip("0.") + _EXPONENTS[point]
