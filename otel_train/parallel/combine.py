"""Samples of the ranks to one: what is added up, and what is made of the sums.

Two vectors travel: one is added over the ranks, of one the largest elements are taken. Each rank puts zeros where it contributes
nothing, so both have the same length everywhere.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch

from otel_train.assembly.layer import median_ratio, root, run_sums
from otel_train.budget import Pace
from otel_train.parallel.layout import Layout, Row, site_key
from otel_train.records import (
    MAGNITUDE_EXPONENTS,
    ActivationReading,
    Agreement,
    Layer,
    LayerSample,
    ParameterReading,
    ParameterSums,
    RunSums,
    Signs,
)

_BINS = len(MAGNITUDE_EXPONENTS) + 1
_PRESENT, _GRADIENT, _SQUARED, _WEIGHT, _BAD_GRADIENTS, _BAD_WEIGHTS = range(6)
_MEASURED, _UPDATE, _UPDATED_WEIGHT, _CHANGED, _VARIANCE, _ELEMENTS, _PARTIAL, _COUNTED, _MAGNITUDES = range(6, 15)
_ROW = _MAGNITUDES + _BINS + 1
"""Numbers a parameter; the last are the magnitudes' counts and their sum …"""
_SIGNS = 2 * (_BINS - 1) + 1
"""… and, where signs are counted, theirs."""
_SITE = 10
"""Numbers an activation site."""
_HEAD = 1
"""Ranks that have a sample."""
_TAIL = 4
"""Of what the largest counts: how often ranks wish to sample, and from which step on they can."""

Labels = Mapping[str, tuple[Layer | None, Layer | None]]
"""Layer and histogram of each parameter, by its name."""
Depths = Mapping[str, int]
"""Depth of each layer that has activation sites."""


def _row_length(*, signed: bool) -> int:
    return _ROW + _SIGNS if signed else _ROW


def pack(layout: Layout, sample: LayerSample | None, wish: Agreement, *, signed: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    """Return what this rank adds, and of what the largest counts.

    Args:
        layout: This rank's place among the others.
        sample: What it measured; None where its step was skipped.
        wish: How often it would sample, and from which step on it can.
        signed: Whether signs of gradients are counted.

    Returns:
        (n,) and (m,) fp64 on the host.
    """
    table, length = layout.table, _row_length(signed=signed)
    sums = torch.zeros(_HEAD + length * len(table.contributors) + _SITE * table.sites, dtype=torch.float64)
    largest = torch.full((table.sites + 2 * table.replica_sets + _TAIL,), -math.inf, dtype=torch.float64)
    pace = wish.pace
    largest[-_TAIL:] = torch.tensor([pace.every_n_steps, pace.histograms, pace.activations, wish.start], dtype=torch.float64)
    if sample is None:
        return sums, largest
    sums[0] = 1.0
    rows = sums[_HEAD : _HEAD + length * len(table.contributors)].view(-1, length)
    for reading in sample.parameters:
        row = layout.rows.get(reading.name)
        if row is not None and row.contributes:
            rows[row.index] = torch.tensor(_numbers(reading.sums)[:length], dtype=torch.float64)
    sites = sums[_HEAD + rows.numel() :].view(-1, _SITE)
    for site in sample.activations:
        place = layout.sites.get(site_key(site.layer, site.site))
        if place is not None:
            sites[place[0]] += torch.tensor(_site_numbers(site), dtype=torch.float64)
            peak = torch.tensor(_finite_peak(site.absmax), dtype=torch.float64)
            largest[place[0]] = torch.maximum(largest[place[0]], peak)
    _pack_replicas(layout, sample, largest[table.sites : -_TAIL].view(-1, 2))
    return sums, largest


def _pack_replicas(layout: Layout, sample: LayerSample, largest: torch.Tensor) -> None:
    """Add the weights' squared norms, and their negatives, so that the largest of both tell by how much replicas differ."""
    weights = {reading.name: reading.sums.weight_squared for reading in sample.parameters}
    for number, names in layout.replicas:
        total = sum(weights.get(name, 0.0) for name in names)
        total = total if math.isfinite(total) else math.inf
        largest[number] = torch.tensor([total, -total], dtype=torch.float64)


def _numbers(sums: ParameterSums) -> list[float]:
    partial = sums.partial_gradient is not None
    measured = sums.update_squared is not None
    update, counted = sums.update_squared or 0.0, sums.magnitudes is not None
    return [
        1.0,
        0.0 if partial else sums.gradient,
        0.0 if partial else sums.gradient_squared,
        sums.weight_squared,
        0.0 if partial else sums.nonfinite_gradients,
        sums.nonfinite_weights,
        float(measured),
        update,
        sums.weight_squared if measured else 0.0,
        sums.changed or 0.0,
        (sums.update_relative_error * update) ** 2,
        sums.elements,
        float(partial),
        float(counted),
        *(sums.magnitudes or [0.0] * _BINS),
        sums.magnitude_sum,
        *(sums.signs.numbers if sums.signs is not None else [0.0] * _SIGNS),
    ]


def _site_numbers(site: ActivationReading) -> list[float]:
    return [
        site.count,
        site.total,
        site.total_squared,
        site.zeros,
        site.nonfinite,
        float(site.saturated is not None),
        site.saturated or 0.0,
        site.dead_units or 0.0,
        0.0 if site.dead_units is None else site.units,
        float(math.isnan(site.absmax)),
    ]


def _finite_peak(value: float) -> float:
    return -math.inf if math.isnan(value) else value


class Combined:
    """The sums over all ranks.

    Args:
        layout: This rank's place among the others.
        sums: The first vector of ``pack``, added up over the ranks.
        largest: The second one's largest elements.
        signed: As given to ``pack``.
    """

    def __init__(self, layout: Layout, sums: torch.Tensor, largest: torch.Tensor, *, signed: bool = False) -> None:
        self._layout, table = layout, layout.table
        length = _row_length(signed=signed)
        count = length * len(table.contributors)
        self._rows = sums[_HEAD : _HEAD + count].view(-1, length)
        self._sites = sums[_HEAD + count :].view(-1, _SITE)
        self._peaks, self._replicas = largest[: table.sites], largest[table.sites : -_TAIL].view(-1, 2)
        *pace, start = map(int, largest[-_TAIL:].tolist())
        self.agreed = Agreement(Pace(*pace), start)
        """The most sparing of what ranks wish for, part by part, from the last step that any of them named."""
        self.complete = int(sums[0]) == table.world
        """Whether every rank had a sample: else there are no values of the whole run."""

    def partial_rows(self) -> list[int]:
        """Return rows whose gradients lie on the ranks as summands."""
        return [int(i) for i in self._rows[:, _PARTIAL].nonzero().flatten() if self._layout.table.regions[int(i)]]

    def add_partial(self, row: int, gradient: torch.Tensor) -> None:
        """Take the elements of a gradient that are added up by now, (k,) fp64."""
        self._rows[row, _GRADIENT], self._rows[row, _SQUARED] = gradient.sum(), gradient.square().sum()
        self._rows[row, _BAD_GRADIENTS] = gradient.isfinite().logical_not().sum()

    def sample(self, labels: Labels, depths: Depths) -> LayerSample:
        """Return what this rank exports."""
        rows = self._rows.tolist()
        run = self._run(rows) if self.complete else None
        return LayerSample(tuple(self._readings(rows, labels)), tuple(self._activations(depths)), run=run)

    def _readings(self, rows: Sequence[Sequence[float]], labels: Labels) -> Iterator[ParameterReading]:
        for name, row in self._layout.rows.items():
            layer, histogram = labels.get(name, (None, None))
            numbers = rows[row.index]
            if row.exports and self._is_there(row, numbers):
                yield ParameterReading(self._deeper(layer), self._deeper(histogram), _sums_of(numbers), name)

    def _deeper(self, layer: Layer | None) -> Layer | None:
        return layer and layer.deeper(self._layout.depth)

    def _is_there(self, row: Row, numbers: Sequence[float]) -> bool:
        """Say whether a row is whole: all its contributors had a gradient, or those without one had a sample all the same."""
        return numbers[_PRESENT] > 0 and (self.complete or numbers[_PRESENT] >= self._layout.table.contributors[row.index])

    def _activations(self, depths: Depths) -> Iterator[ActivationReading]:
        for key, (index, exports) in self._layout.sites.items():
            count, total, squared, zeros, bad, saturates, saturated, dead, units, lost = self._sites[index].tolist()
            if not exports:
                continue
            layer, _, which = key.partition("\n")
            peak = math.nan if lost else float(self._peaks[index])
            yield ActivationReading(
                layer, depths[layer] + self._layout.depth, which, count, total, squared, peak, zeros, bad,
                saturated if saturates else None, dead if units else None, int(units), layer,
            )  # fmt: skip

    def _run(self, rows: Sequence[Sequence[float]]) -> RunSums | None:
        there = [row for row in rows if row[_PRESENT]]
        if not there:
            return None
        measured = any(row[_MEASURED] for row in there)
        return RunSums(
            gradient_squared=sum(row[_SQUARED] for row in there),
            weight_squared=sum(row[_WEIGHT] for row in there),
            update_squared=sum(row[_UPDATE] for row in there) if measured else None,
            updated_weight_squared=sum(row[_UPDATED_WEIGHT] for row in there),
            median_ratio=self._median(rows),
            replica_divergence=self._divergence(),
        )

    def _median(self, rows: Sequence[Sequence[float]]) -> float | None:
        ratios = []
        for kind, members in self._layout.table.layers:
            update, weight = (sum(rows[i][column] for i in members) for column in (_UPDATE, _UPDATED_WEIGHT))
            if any(rows[i][_MEASURED] for i in members) and weight != 0:
                ratios.append((kind, root(update / weight)))
        return median_ratio(ratios)

    def _divergence(self) -> float | None:
        spreads = []
        for high, low in self._replicas.tolist():
            most, least = math.sqrt(max(high, 0.0)), math.sqrt(max(-low, 0.0))
            apart = math.inf if math.isinf(most) else (most - least) / max(most, math.ulp(0.0))
            spreads.append(0.0 if most == least else apart)
        return max(spreads, default=None)


def _sums_of(row: Sequence[float]) -> ParameterSums:
    # on every rank that has a part of it
    measured, counted = (0 < row[_PRESENT] <= row[column] for column in (_MEASURED, _COUNTED))
    update = row[_UPDATE] if measured else None
    return ParameterSums(
        elements=int(row[_ELEMENTS]),
        gradient=row[_GRADIENT],
        gradient_squared=row[_SQUARED],
        weight_squared=row[_WEIGHT],
        nonfinite_gradients=int(row[_BAD_GRADIENTS]),
        nonfinite_weights=int(row[_BAD_WEIGHTS]),
        update_squared=update,
        changed=row[_CHANGED] if measured else None,
        update_relative_error=math.sqrt(row[_VARIANCE]) / update if update and math.isfinite(update) else 0.0,
        magnitudes=tuple(row[_MAGNITUDES : _MAGNITUDES + _BINS]) if counted else None,
        magnitude_sum=row[_MAGNITUDES + _BINS] if counted else 0.0,
        signs=Signs.of(row[_ROW:]) if counted and len(row) > _ROW else None,
    )


def whole_rows(layout: Layout, sample: LayerSample) -> LayerSample:
    """Return what may be exported without the other ranks: what this rank holds in whole and is to export.

    Values of the run are among it only where the ranks are declared to be replicas throughout.
    """
    exported = [r for r in sample.parameters if _exports_alone(layout.rows.get(r.name), r)]
    readings = tuple(_shifted(reading, layout.depth) for reading in exported)
    sites = [s for s in sample.activations if layout.sites.get(site_key(s.layer, s.site), (0, False))[1]]
    run = run_sums(sample.parameters) if layout.replicated else None
    return LayerSample(readings, tuple(replace(site, depth=site.depth + layout.depth) for site in sites), run=run)


def _exports_alone(row: Row | None, reading: ParameterReading) -> bool:
    return row is not None and row.exports and row.whole and reading.sums.partial_gradient is None


def _shifted(reading: ParameterReading, depth: int) -> ParameterReading:
    layer, histogram = (found and found.deeper(depth) for found in (reading.layer, reading.histogram))
    return replace(reading, layer=layer, histogram=histogram)
