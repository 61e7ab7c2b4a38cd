"""What the training thread hands to the host arm: plain numbers of one step, frozen. No torch here."""

from __future__ import annotations

from dataclasses import dataclass


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
class WithoutGradient:
    """A parameter that requires a gradient and had none when it was to be stepped."""

    name: str
    layer: Layer | None


@dataclass(frozen=True, slots=True)
class GradientCoverage:
    """What a sampled step of one optimizer read of the parameters that go with it."""

    optimizer: str
    elements: int
    """Of the gradients that were read."""
    without: tuple[WithoutGradient, ...]
    """In the order of the model."""


@dataclass(frozen=True, slots=True)
class LayerSample:
    """Everything a sampled step measured."""

    parameters: tuple[ParameterReading, ...]
    activations: tuple[ActivationReading, ...]
    coverage: tuple[GradientCoverage, ...] = ()
    """One for each optimizer that stepped: others, of a GAN say, were not looked at."""


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


@dataclass(frozen=True, slots=True)
class MicroBatches:
    """What micro-batches told that wait for their optimizer step, which may be long in coming."""

    tokens: int
    samples: int
    losses: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class Coverage:
    """What of the model is monitored; changes when parameters are frozen or thawed."""

    trainable_parameters: int
    dropped_layers: int
    layers: tuple[Layer, ...]
    sites: tuple[tuple[str, int], ...]
    """Layer and depth of each activation site."""
