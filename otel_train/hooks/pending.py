"""The step under way, and steps whose numbers are still on their way to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass, field

import torch

from otel_train.readout import Reading, read_out
from otel_train.records import ActivationReading, GroupSettings, LayerSample, MicroBatches, ParameterReading, StepRecord
from otel_train.shards import is_partial, local

GROUP_FACTS = ("learning_rate", "peak_learning_rate", "weight_decay", "beta1", "beta2", "epsilon")
"""The numbers of GroupSettings, in the order of its fields."""


class Numbers:
    """Numbers under keys, some on the host and some on a device; read out together."""

    def __init__(self) -> None:
        self._host: dict[Hashable, list[float]] = {}
        self._device: list[tuple[Hashable, torch.Tensor]] = []
        self._reading: Reading | None = None

    def add(self, key: Hashable, value: float | torch.Tensor) -> None:
        """Take a number, or a tensor of one element.

        Raises:
            ValueError: A tensor has more elements than one, or none.
            TypeError: It is no number.
        """
        if is_partial(value):
            raise ValueError(
                f"{key}: expected a number or a whole tensor, got one that ranks still have to add up; give full_tensor()"
            )
        if not isinstance(value, torch.Tensor):
            self._host.setdefault(key, []).append(float(value))
        elif value.numel() == 1:
            self._device.append((key, local(value).clone()))  # the loop may write into its own
        else:
            raise ValueError(f"{key}: expected a number or a tensor of one element, got shape {tuple(value.shape)}")

    def discard(self, key: Hashable) -> None:
        """Forget the numbers of a key."""
        self._host.pop(key, None)
        self._device = [(k, tensor) for k, tensor in self._device if k != key]

    def split(self, keys: Collection[Hashable]) -> Numbers:
        """Take the numbers of some keys out, and return them."""
        taken = Numbers()
        taken._host = {key: self._host.pop(key) for key in keys if key in self._host}
        taken._device = [entry for entry in self._device if entry[0] in keys]
        self._device = [entry for entry in self._device if entry[0] not in keys]
        return taken

    def read_out(self) -> None:
        """Ask for the device's numbers; does not synchronise."""
        self._reading = read_out([tensor for _, tensor in self._device]) if self._device else None

    def values(self) -> dict[Hashable, list[float]]:
        """Return all numbers in the order in which they came, a key's host numbers first; waits for the device's."""
        values = {key: list(numbers) for key, numbers in self._host.items()}
        if self._reading is not None:
            for (key, _), numbers in zip(self._device, self._reading.values(), strict=True):
                values.setdefault(key, []).extend(numbers)
        return values


@dataclass(frozen=True, slots=True)
class PendingSample:
    """What one optimizer's sampled step measured, not yet on the host."""

    reading: Reading
    split: int
    """Tensors of the reading that belong to parameters; the rest belongs to activations."""
    decode_parameters: Callable[[Sequence[Sequence[float]]], list[ParameterReading]]
    decode_activations: Callable[[Sequence[Sequence[float]]], list[ActivationReading]]

    def resolve(self) -> LayerSample:
        """Wait for the numbers and decode them; for the monitor's own thread."""
        numbers = self.reading.values()
        return LayerSample(
            tuple(self.decode_parameters(numbers[: self.split])), tuple(self.decode_activations(numbers[self.split :]))
        )


@dataclass(frozen=True, slots=True)
class PendingMicroBatches:
    """Numbers of micro-batches without a step yet, not yet on the host."""

    numbers: Numbers

    def resolve(self) -> MicroBatches:
        """Wait for the numbers; for the monitor's own thread."""
        return _micro_batches(self.numbers.values())


@dataclass(slots=True)
class Step:
    """A step as the training thread fills it; once handed over, only the monitor's own thread touches it."""

    sampled: bool
    attempt: int = 0
    """Number of the step among all that were attempted; known when it is closed."""
    stepped: set[int] = field(default_factory=set)
    """``id`` of the optimizers that have stepped."""
    finished_at: float = 0.0
    duration: float | None = None
    forward: float = 0.0
    data_wait: float = 0.0
    forwards: int = 0
    observed: int = 0
    """Calls of ``observe``."""
    sequence_length: int | None = None
    precision: str = "unknown"
    clipped_at: int = 0
    """Forwards that had begun when a part of the gradient was last clipped."""
    max_norms: list[float] = field(default_factory=list)
    """Of each call that clipped, in the order of the numbers ``clip_norm``."""
    scale_fell: bool = False
    groups: dict[tuple[str, str], None] = field(default_factory=dict)
    """(optimizer, param_group) of the groups that stepped; their settings are in the numbers."""
    numbers: Numbers = field(default_factory=Numbers)
    samples: list[PendingSample] = field(default_factory=list)

    def take_micro_batches(self) -> PendingMicroBatches:
        """Take out what the micro-batches so far told, and ask for it; does not synchronise."""
        pending = PendingMicroBatches(self.numbers.split(("loss", "tokens", "samples")))
        pending.numbers.read_out()
        return pending

    def resolve(self) -> StepRecord:
        """Wait for the numbers and return the record; for the monitor's own thread."""
        numbers = self.numbers.values()
        observed_scale = _last(numbers, "loss_scale")
        told = _micro_batches(numbers)
        skipped = self.scale_fell or any(value > 0 for value in numbers.get("found_inf", ()))
        return StepRecord(
            finished_at=self.finished_at,
            duration=self.duration,
            forward=self.forward,
            data_wait=self.data_wait,
            micro_batches=self.observed or self.forwards,
            tokens=told.tokens,
            samples=told.samples,
            sequence_length=self.sequence_length,
            skipped=skipped,
            losses=told.losses,
            grad_norm=_grad_norm(numbers),
            # torch scales by max_norm / (norm + 1e-6) where that is below 1
            clipped=any(norm + 1e-6 > limit for norm, limit in zip(numbers.get("clip_norm", ()), self.max_norms, strict=False)),
            loss_scale=observed_scale if observed_scale is not None else _last(numbers, "grad_scale"),
            groups=tuple(_settings(labels, numbers) for labels in self.groups),
            precision=self.precision,
            # what was measured around a step that did not happen says nothing
            sample=self._sample() if self.samples and not skipped else None,
            attempt=self.attempt,
            sampled=self.sampled,
        )

    def _sample(self) -> LayerSample:
        parts = [sample.resolve() for sample in self.samples]
        return LayerSample(
            tuple(reading for part in parts for reading in part.parameters),
            tuple(reading for part in parts for reading in part.activations),
        )


def _micro_batches(numbers: dict[Hashable, list[float]]) -> MicroBatches:
    tokens, samples = (int(sum(numbers.get(name, ()))) for name in ("tokens", "samples"))
    return MicroBatches(tokens, samples, tuple(numbers.get("loss", ())))


def _last(numbers: dict[Hashable, list[float]], key: Hashable) -> float | None:
    values = numbers.get(key)
    return values[-1] if values else None


def _grad_norm(numbers: dict[Hashable, list[float]]) -> float | None:
    """Return the norm before clipping: as observed, else of the parts that were clipped together."""
    observed, parts = numbers.get("grad_norm"), numbers.get("part_norm")
    if observed:
        return observed[-1]
    return math.sqrt(sum(norm * norm for norm in parts)) if parts else None


def _settings(labels: tuple[str, str], numbers: dict[Hashable, list[float]]) -> GroupSettings:
    return GroupSettings(*labels, *(_last(numbers, (name, *labels)) for name in GROUP_FACTS))
