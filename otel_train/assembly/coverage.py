"""What the monitor does not see: parameters and layers without a gradient, activation modules that never showed a value."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator

from otel_train.catalog import monitor
from otel_train.records import Coverage, CoveredParameter, LayerSample
from otel_train.snapshot import Sample

_LOG = logging.getLogger("otel_train")

_PATIENCE = 3
"""Samples in a row after which something missing is said: an expert that a batch was not routed to comes back before."""
_NAMED = 5
"""So many are named in a log line."""


class CoverageWatch:
    """Counts what sampled steps did not see, and says it once.

    An optimizer that was not measured was not looked at, so what its own last sampled step showed holds on (GANs).
    """

    def __init__(self) -> None:
        self._covered = Coverage(0, 0, (), ())
        self._monitored: int | None = None
        self._bare_layers = 0
        self._streaks: Counter[str] = Counter()
        self._parameters_said: set[str] = set()
        self._samples = 0
        self._silent: dict[str, None] = {}
        self._seen: set[str] = set()
        self._modules_said: set[str] = set()

    def cover(self, coverage: Coverage) -> None:
        """Take what should be seen from now on: parameters were frozen, thawed or added."""
        self._covered = coverage
        self._streaks.clear()

    def add(self, sample: LayerSample) -> None:
        """Take a sampled step that happened."""
        if sample.shown.optimizers:
            self._add_gradients(sample)
        if sample.activations:
            self._add_activations(sample)

    def _add_gradients(self, sample: LayerSample) -> None:
        shown = sample.shown
        there = {reading.name for reading in shown.parameters}
        looked_at = [p for p in self._covered.parameters if p.optimizer in shown.optimizers]
        without = [p for p in looked_at if p.name not in there]
        self._monitored = sum(reading.sums.elements for reading in shown.parameters)
        present = {p.layer for p in looked_at if p.name in there}
        self._bare_layers = len({p.layer for p in without if p.layer is not None} - present)
        self._count(looked_at, {p.name for p in without}, sample.optimizers)

    def _count(self, looked_at: Iterable[CoveredParameter], without: set[str], optimizers: frozenset[int]) -> None:
        """Count samples in a row without a gradient; what has not had one for long is said."""
        for parameter in looked_at:
            if parameter.optimizer in optimizers:
                self._streaks[parameter.name] = (self._streaks[parameter.name] + 1) * (parameter.name in without)
        missing = [name for name, count in self._streaks.items() if count >= _PATIENCE]
        if self._is_news(missing, self._parameters_said):
            _LOG.warning(
                "no gradient in %d samples in a row: %s. What requires a gradient and gets none does not learn, and has no "
                "series: look whether its output reaches the loss (an unused branch, detach, no_grad), or freeze it with "
                "requires_grad_(False)",
                _PATIENCE,
                _listed(missing),
            )

    def _add_activations(self, sample: LayerSample) -> None:
        self._samples += 1
        self._seen.update(reading.module for reading in sample.activations if reading.count)
        self._silent = dict.fromkeys(r.module for r in sample.activations if r.module not in self._seen)
        if self._samples >= _PATIENCE and self._is_news(self._silent, self._modules_said):
            _LOG.warning(
                "no activation seen in %d samples: %s. A graph compiled before attach ignores its hooks: attach before the first "
                "compiled call, or call torch._dynamo.reset() now. Otherwise train in train() mode and by the model's own forward, "
                "and leave modules that are not used out with activations=(…)",
                self._samples,
                _listed(self._silent),
            )

    @staticmethod
    def _is_news(missing: Iterable[str], said: set[str]) -> bool:
        """Say whether anything is among them that has not been said, and note all as said: a line for each at most."""
        news = set(missing) - said
        said |= news
        return bool(news)

    def samples(self) -> Iterator[Sample]:
        """Yield the gauges; before the first sampled step, and on a rank whose parameters all are exported by others, fewer."""
        if self._covered.trainable_parameters or self._monitored:
            if self._monitored is not None:
                yield Sample(monitor.MONITORED_PARAMETERS, (), self._monitored)
                yield Sample(monitor.LAYERS_WITHOUT_GRADIENT, (), self._bare_layers)
            yield Sample(monitor.TRAINABLE_PARAMETERS, (), self._covered.trainable_parameters)
        if self._samples:
            yield Sample(monitor.SILENT_ACTIVATION_MODULES, (), len(self._silent))


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _NAMED
    return ", ".join(listed[:_NAMED]) + (f" and {more} more" if more > 0 else "")
