"""What the monitor does not see: parameters and layers without a gradient, activation modules that never showed a value."""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Iterable, Iterator

from otel_train.catalog import monitor
from otel_train.records import GradientCoverage, Layer, LayerSample
from otel_train.snapshot import Sample

_LOG = logging.getLogger("otel_train")

_PATIENCE = 3
"""Samples in a row after which something missing is said: an expert that a batch was not routed to comes back before."""
_NAMED = 5
"""So many are named in a log line."""


class CoverageWatch:
    """Counts what sampled steps did not see, and says it once.

    An optimizer that did not step was not looked at, so what its own last sampled step showed holds on (GANs).
    """

    def __init__(self) -> None:
        self._elements: dict[str, int] = {}
        self._layers: dict[str, frozenset[Layer]] = {}
        self._streaks: dict[str, Counter[str]] = {}
        self._is_stale = False
        self._parameters_said: set[str] = set()
        self._samples = 0
        self._silent: dict[str, None] = {}
        self._shown: set[str] = set()
        self._modules_said: set[str] = set()

    def renew(self) -> None:
        """Parameters were frozen, thawed or added: what is known of them ends with the next sample."""
        self._is_stale = True

    def add(self, sample: LayerSample) -> None:
        """Take a sampled step that happened."""
        if self._is_stale:
            self._elements, self._layers, self._streaks, self._is_stale = {}, {}, {}, False
        present = {reading.layer for reading in sample.parameters}
        for covered in sample.coverage:
            self._add_gradients(covered, present)
        if sample.activations:
            self._add_activations(sample)

    def _add_gradients(self, covered: GradientCoverage, present: set[Layer | None]) -> None:
        name, before = covered.optimizer, self._streaks.get(covered.optimizer, Counter())
        self._elements[name] = covered.elements
        self._layers[name] = frozenset(p.layer for p in covered.without if p.layer is not None and p.layer not in present)
        streaks = self._streaks[name] = Counter({p.name: before[p.name] + 1 for p in covered.without})
        missing = [parameter for parameter, count in streaks.items() if count >= _PATIENCE]
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
        self._shown.update(reading.module for reading in sample.activations if reading.count)
        self._silent = dict.fromkeys(r.module for r in sample.activations if r.module not in self._shown)
        if self._samples >= _PATIENCE and self._is_news(self._silent, self._modules_said):
            _LOG.warning(
                "no activation seen in %d samples: %s. Attach before the first compiled call, train in train() mode and by the "
                "model's own forward; leave modules that are not used out with activations=(…)",
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
        """Yield the gauges; none before the first sampled step, and none of what is not measured at all."""
        if self._elements:
            yield Sample(monitor.MONITORED_PARAMETERS, (), sum(self._elements.values()))
            yield Sample(monitor.LAYERS_WITHOUT_GRADIENT, (), len(frozenset().union(*self._layers.values())))
        if self._samples:
            yield Sample(monitor.SILENT_ACTIVATION_MODULES, (), len(self._silent))


def _listed(names: Iterable[str]) -> str:
    listed = list(names)
    more = len(listed) - _NAMED
    return ", ".join(listed[:_NAMED]) + (f" and {more} more" if more > 0 else "")
