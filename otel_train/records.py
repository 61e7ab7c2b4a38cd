"""What the training thread hands to the host arm: plain numbers of one step, frozen. No torch here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace

from otel_train.budget import Pace


@dataclass(frozen=True, slots=True)
class Layer:
    """A series of layer metrics: its labels."""

    name: str
    depth: int
    kind: str
    param_group: str

    @property
    def labels(self) -> tuple[str, str, str, str]:
        """Label values in the order of LAYER_LABELS."""
        return (self.name, str(self.depth), self.kind, self.param_group)

    def deeper(self, depths: int) -> Layer:
        """Return the layer with so many depths before it, those of a pipeline's earlier stages."""
        return replace(self, depth=self.depth + depths) if depths else self


@dataclass(frozen=True, slots=True)
class Signs:
    """What a histogram of values needs beside one of their sizes; standing for all elements."""

    negatives: tuple[float, ...]
    """Negative elements by magnitude, from the second bin of ParameterSums.magnitudes on."""
    powers: tuple[float, ...]
    """Negative elements that are exactly the upper bound of a bin, from the first bin on."""
    total: float
    """Sum of the finite elements."""

    @classmethod
    def of(cls, numbers: Sequence[float]) -> Signs:
        """Take them apart that stand one after another."""
        half = len(numbers) // 2
        return cls(tuple(numbers[:half]), tuple(numbers[half:-1]), numbers[-1])

    @property
    def numbers(self) -> tuple[float, ...]:
        """All of them, one after another."""
        return (*self.negatives, *self.powers, self.total)


@dataclass(frozen=True, slots=True)
class ParameterSums:
    """What a sampled step measured of one parameter: sums, so that parameters combine to layers by adding."""

    elements: int
    gradient: float
    """Sum of the gradient's elements."""
    gradient_squared: float
    weight_squared: float
    """Sum of squares of the weights before the step."""
    nonfinite_gradients: int
    nonfinite_weights: int
    update_squared: float | None = None
    """Sum of squares of the change; None where updates are off or the step was skipped."""
    changed: float | None = None
    """Number of elements that changed."""
    update_relative_error: float = 0.0
    """Estimated standard error of the update's size, relative; 0 where every element was read."""
    magnitudes: tuple[float, ...] | None = None
    """Elements by magnitude, one count a bin of MAGNITUDE_EXPONENTS and one for what is larger; standing for all elements."""
    magnitude_sum: float = 0.0
    """Sum of absolute values of the finite elements, standing for all elements."""
    signs: Signs | None = None
    """Of the elements that magnitudes count; None where signs are not counted."""
    partial_gradient: tuple[float, ...] | None = None
    """The gradient's elements, where each rank holds a summand of every one: sums of squares mean nothing before they are added."""


MAGNITUDE_EXPONENTS = tuple(range(-46, 17))
"""Exponents of the full-resolution upper bounds, 2^-46 to 2^16: elements of bin i are in (2^(e-1), 2^e], zeros in the first."""


@dataclass(frozen=True, slots=True)
class ParameterReading:
    """A parameter's sums and where they belong."""

    layer: Layer | None
    """The layer whose series it joins; None where its kind has no series."""
    histogram: Layer | None
    """The layer, or block, whose magnitude histogram it joins."""
    sums: ParameterSums
    name: str = ""
    """The parameter's name."""

    def counted(self) -> ParameterReading:
        """Return the reading as counters have taken it: without what they would add up again."""
        return replace(
            self,
            sums=replace(self.sums, nonfinite_gradients=0, nonfinite_weights=0, magnitudes=None, magnitude_sum=0.0, signs=None),
        )


@dataclass(frozen=True, slots=True)
class ActivationReading:
    """What the sampled rows of one activation site showed."""

    layer: str
    depth: int
    site: str
    count: float
    total: float
    total_squared: float
    absmax: float
    zeros: float
    nonfinite: float
    saturated: float | None
    """Elements in the flat part; None where the activation has none."""
    dead_units: float | None
    """Units never positive; None where the activation cuts nothing off, or too few rows were seen."""
    units: int
    module: str = ""
    """Path of the activation module; several can join one layer."""


@dataclass(frozen=True, slots=True)
class RunSums:
    """What a sampled step measured of all parameters of the run, over all ranks."""

    gradient_squared: float
    weight_squared: float
    update_squared: float | None
    """Sum of squares of the change; None where updates are off."""
    updated_weight_squared: float
    """Sum of squares of the weights whose change was measured."""
    median_ratio: float | None
    """Update ratio of the median matrix layer, or of the median layer where there are no matrices."""
    replica_divergence: float | None = None
    """By how much, relative, norms of weights differ that are replicas of one another; None where there are none."""


@dataclass(frozen=True, slots=True)
class LayerSample:
    """Everything a sampled step measured."""

    parameters: tuple[ParameterReading, ...]
    activations: tuple[ActivationReading, ...]
    earlier_parameters: tuple[ParameterReading, ...] = ()
    """Of optimizers that were not measured in this step, from their last sample."""
    earlier_activations: tuple[ActivationReading, ...] = ()
    optimizers: frozenset[int] = frozenset()
    """Which optimizers were measured in this step."""
    earlier_optimizers: frozenset[int] = frozenset()
    run: RunSums | None = None
    """Sums over the whole run; None: they follow from the parameters, which are all there are, or some rank's are missing."""

    @property
    def shown(self) -> LayerSample:
        """What gauges show: the last known of each optimizer; counters take only what is new."""
        parameters = (*self.parameters, *self.earlier_parameters)
        activations = (*self.activations, *self.earlier_activations)
        return LayerSample(parameters, activations, optimizers=self.optimizers | self.earlier_optimizers, run=self.run)

    @property
    def merged(self) -> LayerSample:
        """The same in one, for ranks to exchange: what is not new adds nothing to counters."""
        parameters = (*self.parameters, *(reading.counted() for reading in self.earlier_parameters))
        activations = (*self.activations, *(replace(site, nonfinite=0.0) for site in self.earlier_activations))
        return LayerSample(parameters, activations, optimizers=self.optimizers, earlier_optimizers=self.earlier_optimizers)


@dataclass(frozen=True, slots=True)
class Agreement:
    """How often all ranks are to sample, and from which step on."""

    pace: Pace
    start: int
    """A step that no rank has come to."""


@dataclass(frozen=True, slots=True)
class RankSample:
    """A sampled step after the ranks have met."""

    step: int
    """The global step."""
    grad_norm: float | None
    """Norm before clipping, where known."""
    own: LayerSample
    """What this rank exports of the run's layers, reduced over the ranks."""
    local: LayerSample | None
    """What this rank measured of its own shards, if that is exported too."""
    local_weight_squared: float | None = None
    """Sum of squares of all weights that this rank holds; None where there is one rank only."""
    attempt: int = 0
    """Number of the step among all that were attempted."""
    agreed: Agreement | None = None
    """What the ranks agreed on; None where they did not meet."""


@dataclass(frozen=True, slots=True)
class GroupSettings:
    """The settings of one parameter group at a step."""

    optimizer: str
    param_group: str
    learning_rate: float | None = None
    peak_learning_rate: float | None = None
    weight_decay: float | None = None
    beta1: float | None = None
    beta2: float | None = None
    epsilon: float | None = None
    current: bool = True
    """Its optimizer stepped in this step; else this is how it was at its last."""


@dataclass(frozen=True, slots=True)
class StepRecord:
    """One optimizer step, from the end of the one before it to its own end."""

    finished_at: float
    """Unix time."""
    duration: float | None
    """Seconds since the step before it ended, other phases left out; None for the first."""
    forward: float
    """Seconds of forward passes on the host clock."""
    data_wait: float
    micro_batches: int
    tokens: int
    samples: int
    sequence_length: int | None
    """Tokens a sequence, where the model's input shows it."""
    skipped: bool
    """The gradient scaler skipped it."""
    losses: tuple[float, ...]
    grad_norm: float | None
    """Norm before clipping, where known."""
    clipped: bool
    loss_scale: float | None
    groups: tuple[GroupSettings, ...]
    precision: str
    sample: LayerSample | None
    """What was measured, if this was a sampled step."""
    also_skipped: int = 0
    """Steps of other optimizers, or of a moment before, that the gradient scaler skipped beside this one, which happened."""
    attempt: int = 0
    """Number of the step among all that were attempted, skipped ones too: equal on all ranks."""
    sampled: bool = False
    """Whether this step was to be measured; the sample is missing where it was skipped."""
    costs: Mapping[str, float] = field(default_factory=dict)
    """Seconds that the monitor took in the training's way, by part: on the host clock or on the device, whichever was longer."""


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """What micro-batches told that wait for their optimizer step, which may be long in coming."""

    tokens: int
    samples: int
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class CoveredParameter:
    """A trainable parameter."""

    name: str
    elements: int
    """Of all its shards."""
    layer: Layer | None
    optimizer: int | None
    """Which optimizer's sampled steps look at it."""


@dataclass(frozen=True, slots=True)
class Coverage:
    """What of the model is monitored; changes when parameters are frozen or thawed."""

    trainable_parameters: int
    dropped_layers: int
    layers: tuple[Layer, ...]
    sites: tuple[tuple[str, int], ...]
    """Layer and depth of each activation site."""
    parameters: tuple[CoveredParameter, ...] = ()
    update_turns: int = 1
    """Samples until the update of every parameter has been measured."""
