"""What the renderers of all formats have in common: metric by metric, keeping what stays the same from one Snapshot to the next."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from itertools import accumulate, groupby
from operator import attrgetter, itemgetter
from typing import Generic, Protocol, TypeVar

from otel_train.catalog import MetricSpec
from otel_train.snapshot import HistogramValue, Sample, Snapshot

Piece_co = TypeVar("Piece_co", covariant=True)
Made = TypeVar("Made")


class Metric(Protocol[Piece_co]):
    """Renders the series of one metric."""

    def pieces(self, samples: list[Sample]) -> Iterator[Piece_co]:
        """Yield what these samples make, a little at a time."""


class SnapshotRenderer(Generic[Piece_co]):
    """Renders one Snapshot after another; keeps what they have in common, and nothing of series that are gone.

    Args:
        metric: Makes what renders a metric, of its definition and what is the same in all Snapshots of a run: the labels of every
            series, and the time at which counting began.
    """

    def __init__(self, metric: Callable[[MetricSpec, dict[str, str], float], Metric[Piece_co]]) -> None:
        self._metric = metric
        self._common: tuple[tuple[tuple[str, str], ...], float] = (), 0.0
        self._metrics: dict[str, Metric[Piece_co]] = {}

    def pieces(self, snapshot: Snapshot) -> Iterator[Piece_co]:
        """Yield the Snapshot's series, a little at a time, so that the caller can let other threads run in between."""
        common = snapshot.base_labels, snapshot.started_at
        if common != self._common:
            self._common, self._metrics = common, {}
        known, self._metrics = self._metrics, {}
        for spec, samples in groupby(snapshot.samples, key=attrgetter("spec")):
            name = spec.prometheus_name
            self._metrics[name] = metric = known.get(name) or self._metric(spec, dict(common[0]), common[1])
            yield from metric.pieces(list(samples))


class Blocks(Generic[Made]):
    """Splits a metric's series into blocks, and keeps what was made of the labels in each for as long as they stay.

    Args:
        size: Series a block.
    """

    def __init__(self, size: int) -> None:
        self._size = max(1, size)
        self._kept: list[tuple[list[tuple[str, ...]], Made]] = []

    def of(self, samples: list[Sample], make: Callable[[list[tuple[str, ...]]], Made]) -> Iterator[tuple[list[Sample], Made]]:
        """Yield the samples block by block, each with what `make` makes of its labels."""
        kept, self._kept = iter(self._kept), []
        for start in range(0, len(samples), self._size):
            some = samples[start : start + self._size]
            labels = [sample.labels for sample in some]
            before, made = next(kept, (None, None))
            block = labels, made if made is not None and before == labels else make(labels)
            self._kept.append(block)
            yield some, block[1]


class Cumulation:
    """Counts the elements up to each of a metric's bounds; where these stand among a histogram's own is looked up once.

    Args:
        bounds: The metric's, without +Inf.
    """

    def __init__(self, bounds: tuple[float, ...]) -> None:
        self._bounds = bounds
        self._known: tuple[float, ...] = ()
        self._pick: Callable[[list[int]], tuple[int, ...]]

    def of(self, value: HistogramValue) -> tuple[int, ...]:
        """Return the elements up to each bound, then all of them."""
        if value.bounds != self._known:
            self._known = value.bounds
            self._pick = itemgetter(*map(value.bounds.index, self._bounds), -1)
        return self._pick(list(accumulate(value.counts)))
