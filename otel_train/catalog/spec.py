"""What a metric is: one frozen value that statistics, sinks and generated files share."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from otel_train import naming
from otel_train.errors import CatalogError


class Instrument(Enum):
    """The OTel instrument; Prometheus' metric type follows from it."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Reduction(Enum):
    """How values of several ranks or shards combine to one."""

    NONE = "each rank its own"
    SAME = "equal on all ranks"
    SUM = "sum"
    MAX = "max"
    MEAN = "mean, by sum and count"
    L2_NORM = "root of the sum of squares"


BASE_LABELS = ("run", "rank")
"""Labels of every series."""

LAYER_LABELS = ("layer", "depth", "kind", "param_group")
"""Labels of a layer's parameters."""

SITE_LABELS = ("layer", "depth", "site")
"""Labels of an activation: ``site`` is ``pre`` (the input of the activation module) or ``post`` (its output)."""


@dataclass(frozen=True, slots=True)
class MetricSpec:
    """The definition of a metric."""

    name: str
    """OTel name, dotted."""
    instrument: Instrument
    brief: str
    """One sentence for HELP texts, tables and panel descriptions; a full stop at its end."""
    unit: str = ""
    labels: tuple[str, ...] = ()
    """Labels besides run and rank."""
    reduction: Reduction = Reduction.NONE
    note: str = ""
    """What a reader must know to use it: conventions, when there is no series."""
    source: str = ""
    """Where the formula comes from."""
    bounds: tuple[float, ...] = ()
    """Upper bounds of a histogram's buckets on Prometheus' classic road, ascending, without +Inf."""
    exponential: bool = False
    """Whether it is counted by powers of two, so that it goes as a native or exponential histogram where that is understood."""
    prometheus_name: str = field(init=False)

    @property
    def has_sum(self) -> bool:
        """Whether sum and count of a classic histogram are exported: they are no counters where values can be below zero."""
        return bool(self.bounds) and self.bounds[0] >= 0

    def __hash__(self) -> int:
        """Hash the name alone, which no two specs share: hashing every field took half of what a Snapshot costs."""
        return hash(self.name)

    def __post_init__(self) -> None:
        """Derive the Prometheus name and refuse what no sink could export."""
        counter = self.instrument is Instrument.COUNTER
        object.__setattr__(self, "prometheus_name", naming.prometheus_name(self.name, self.unit, counter=counter))
        if not self.brief.endswith("."):
            raise CatalogError(f"{self.name}: expected a brief that is a sentence, got {self.brief!r}")
        if (self.instrument is Instrument.HISTOGRAM) != bool(self.bounds):
            raise CatalogError(f"{self.name}: a histogram has bounds, and nothing else has")
        if list(self.bounds) != sorted(set(self.bounds)):
            raise CatalogError(f"{self.name}: expected ascending bounds, got {self.bounds}")


def counter(name: str, brief: str, **more: object) -> MetricSpec:
    """Define a counter; keywords as in MetricSpec."""
    return MetricSpec(name, Instrument.COUNTER, brief, **more)  # type: ignore[arg-type]  # checked in MetricSpec


def gauge(name: str, brief: str, **more: object) -> MetricSpec:
    """Define a gauge; keywords as in MetricSpec."""
    return MetricSpec(name, Instrument.GAUGE, brief, **more)  # type: ignore[arg-type]  # checked in MetricSpec


def histogram(name: str, brief: str, bounds: tuple[float, ...], **more: object) -> MetricSpec:
    """Define a histogram; keywords as in MetricSpec."""
    return MetricSpec(name, Instrument.HISTOGRAM, brief, bounds=bounds, **more)  # type: ignore[arg-type]  # as above
