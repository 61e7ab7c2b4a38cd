"""What a sampled step measured of parameters and activations, as samples: sums of parameters combine to layers."""

from __future__ import annotations

import math
import statistics
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence

from otel_train.catalog import activations as act
from otel_train.catalog import gradients, parameters, updates
from otel_train.records import ActivationReading, Layer, LayerSample, ParameterReading, RunSums
from otel_train.snapshot import Sample


def samples_of(sample: LayerSample) -> Iterator[Sample]:
    """Yield the values of layers in a sampled step."""
    median = sample.run.median_ratio if sample.run is not None else None
    for layer, members in _by_layer(sample.parameters).items():
        yield from _layer_gauges(layer, members)
        ratio = update_ratio(members)
        if ratio is not None and median is not None and median != 0:
            yield Sample(updates.LAYER_RELATIVE_SPEED, layer.labels, ratio / median)
    for labels, sites in _by_site(sample.activations).items():
        yield from _activation_gauges(labels, sites)


def run_samples_of(run: RunSums, grad_norm: float | None) -> Iterator[Sample]:
    """Yield the values of the whole run in a sampled step.

    Args:
        run: Sums over all ranks.
        grad_norm: The norm before clipping, where it is known.
    """
    if grad_norm is not None:
        yield Sample(gradients.GRAD_NORM, ("pre_clip",), grad_norm)
    yield Sample(gradients.GRAD_NORM, ("post_clip",), root(run.gradient_squared))
    yield Sample(parameters.PARAM_NORM, (), root(run.weight_squared))
    if run.update_squared is not None and run.updated_weight_squared != 0:
        yield Sample(updates.UPDATE_RATIO, (), root(run.update_squared / run.updated_weight_squared))
    if run.replica_divergence is not None:
        yield Sample(parameters.REPLICA_DIVERGENCE, (), run.replica_divergence)


def local_samples_of(sample: LayerSample) -> Iterator[Sample]:
    """Yield what a rank measured of its own shards."""
    for layer, members in _by_layer(sample.parameters).items():
        yield Sample(gradients.LOCAL_LAYER_GRAD_NORM, layer.labels, root(sum(m.sums.gradient_squared for m in members)))
        yield Sample(parameters.LOCAL_LAYER_PARAM_NORM, layer.labels, root(sum(m.sums.weight_squared for m in members)))
        ratio = update_ratio(members)
        if ratio is not None:
            yield Sample(updates.LOCAL_LAYER_UPDATE_RATIO, layer.labels, ratio)


def run_sums(parameters: Sequence[ParameterReading]) -> RunSums | None:
    """Add up all parameters of the run; None where nothing was measured."""
    if not parameters:
        return None
    measured = [reading.sums for reading in parameters if reading.sums.update_squared is not None]
    return RunSums(
        gradient_squared=sum(reading.sums.gradient_squared for reading in parameters),
        weight_squared=sum(reading.sums.weight_squared for reading in parameters),
        update_squared=sum(sums.update_squared or 0.0 for sums in measured) if measured else None,
        updated_weight_squared=sum(sums.weight_squared for sums in measured),
        median_ratio=_median_ratio(parameters),
    )


def _median_ratio(parameters: Sequence[ParameterReading]) -> float | None:
    found = [(layer.kind, update_ratio(members)) for layer, members in _by_layer(parameters).items()]
    return median_ratio([(kind, ratio) for kind, ratio in found if ratio is not None])


def median_ratio(ratios: Sequence[tuple[str, float]]) -> float | None:
    """Return the median of the layers' finite update ratios: of matrices where there are any, NaN where none is finite.

    Args:
        ratios: Kind and update ratio of each layer.
    """
    chosen = [ratio for kind, ratio in ratios if kind == "matrix"] or [ratio for _, ratio in ratios]
    finite = [ratio for ratio in chosen if math.isfinite(ratio)]
    return statistics.median(finite) if finite else (math.nan if ratios else None)


def root(squared: float) -> float:
    """Return a square root that keeps NaN and Inf."""
    return math.sqrt(squared) if squared >= 0 else math.nan


def _by_site(readings: Iterable[ActivationReading]) -> dict[tuple[str, str, str], list[ActivationReading]]:
    sites: defaultdict[tuple[str, str, str], list[ActivationReading]] = defaultdict(list)
    for reading in readings:
        if reading.count:
            sites[reading.layer, str(reading.depth), reading.site].append(reading)
    return sites


def _by_layer(readings: Iterable[ParameterReading]) -> dict[Layer, list[ParameterReading]]:
    layers: dict[Layer, list[ParameterReading]] = {}
    for reading in readings:
        if reading.layer is not None:
            layers.setdefault(reading.layer, []).append(reading)
    return dict(sorted(layers.items(), key=lambda item: item[0].depth))


def update_ratio(readings: Iterable[ParameterReading]) -> float | None:
    """Return the RMS of the change over the RMS of the weights, over all the parameters; None where it does not exist."""
    measured = [r.sums for r in readings if r.sums.update_squared is not None]
    change = sum(s.update_squared or 0.0 for s in measured)
    weight = sum(s.weight_squared for s in measured)
    return root(change / weight) if measured and weight != 0 else None


def _layer_gauges(layer: Layer, members: list[ParameterReading]) -> Iterator[Sample]:
    sums = [reading.sums for reading in members]
    elements = sum(s.elements for s in sums)
    squared = sum(s.gradient_squared for s in sums)
    mean = sum(s.gradient for s in sums) / elements if elements else math.nan
    variance = squared / elements - mean * mean if elements else math.nan
    labels = layer.labels
    yield Sample(parameters.LAYER_PARAMETERS, labels, elements)
    yield Sample(parameters.LAYER_PARAM_NORM, labels, root(sum(s.weight_squared for s in sums)))
    yield Sample(gradients.LAYER_GRAD_NORM, labels, root(squared))
    yield Sample(gradients.LAYER_GRAD_MEAN, labels, mean)
    # rounding can leave a tiny negative variance; NaN is not negative and stays
    yield Sample(gradients.LAYER_GRAD_STD, labels, math.sqrt(0.0 if variance < 0 else variance))
    ratio = update_ratio(members)
    if ratio is not None:
        yield Sample(updates.LAYER_UPDATE_RATIO, labels, ratio)
    if elements and all(s.changed is not None for s in sums):
        # sampled elements can stand for a few too many
        yield Sample(updates.LAYER_CHANGED_RATIO, labels, min(sum(s.changed or 0.0 for s in sums) / elements, 1.0))


def _activation_gauges(labels: tuple[str, str, str], members: list[ActivationReading]) -> Iterator[Sample]:
    count = sum(m.count for m in members)
    mean = sum(m.total for m in members) / count
    variance = sum(m.total_squared for m in members) / count - mean * mean
    yield Sample(act.LAYER_ACTIVATION_MEAN, labels, mean)
    yield Sample(act.LAYER_ACTIVATION_STD, labels, math.sqrt(0.0 if variance < 0 else variance))
    peaks = [m.absmax for m in members]
    # max() would lose a NaN that is not the first
    yield Sample(act.LAYER_ACTIVATION_ABSMAX, labels, math.nan if any(map(math.isnan, peaks)) else max(peaks))
    yield Sample(act.LAYER_ACTIVATION_ZERO_RATIO, labels, sum(m.zeros for m in members) / count)
    flat = [m for m in members if m.saturated is not None]
    if flat:
        share = sum(m.saturated or 0.0 for m in flat) / sum(m.count for m in flat)
        yield Sample(act.LAYER_ACTIVATION_SATURATED_RATIO, labels, share)
    cut = [m for m in members if m.dead_units is not None]
    if cut:
        share = sum(m.dead_units or 0.0 for m in cut) / sum(m.units for m in cut)
        yield Sample(act.LAYER_ACTIVATION_DEAD_UNIT_RATIO, labels, share)
