"""The step under way, and steps whose numbers are still on their way to the host."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch

from otel_train.device import Marks, device_seconds
from otel_train.readout import Reading, read_out
from otel_train.records import ActivationReading, GroupSettings, LayerSample, MicroBatches, ParameterReading, StepRecord
from otel_train.shards import is_partial, local

_GROUP_FACTS = ("learning_rate", "peak_learning_rate", "weight_decay", "beta1", "beta2", "epsilon")
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

    def absorb(self, other: Numbers) -> None:
        """Take over the numbers of another, as coming after the own; neither has been asked for yet."""
        for key, numbers in other._host.items():
            self._host.setdefault(key, []).extend(numbers)
        self._device += other._device

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
class Part:
    """What was measured around the step of one optimizer, or of activations in the forwards before it; still on the device."""

    optimizer: int | None
    """Its ``id``; None: activations."""
    tensors: Sequence[torch.Tensor]
    decode: Callable[[Sequence[Sequence[float]]], Sequence[ParameterReading] | Sequence[ActivationReading]]


class PendingSample:
    """The parts of a sampled step, on their way to the host in one copy."""

    def __init__(self, parts: Sequence[Part], reading: Reading) -> None:
        self._parts, self._reading = parts, reading

    def resolve(self, left_out: Collection[int | None] = ()) -> dict[int | None, list[Any]]:
        """Wait for the numbers, and return the readings of each optimizer and the activations; for the monitor's own thread.

        Args:
            left_out: Optimizers that did not step after all: what was measured around their step is no update.
        """
        numbers = self._reading.values()
        found: dict[int | None, list[Any]] = {}
        at = 0
        for part in self._parts:
            if part.optimizer not in left_out:
                found.setdefault(part.optimizer, []).extend(part.decode(numbers[at : at + len(part.tensors)]))
            at += len(part.tensors)
        return found


class Shown:
    """Of each optimizer the last sample, for steps at which only others are measured; for the monitor's own thread.

    Args:
        patience: Steps after which the sample of an optimizer, or (None) of activations, is forgotten, if none has followed.
    """

    def __init__(self, patience: Callable[[int | None], int]) -> None:
        self._patience = patience
        self._last: dict[int | None, tuple[int, list[Any]]] = {}

    def add(self, number: int, found: Mapping[int | None, list[Any]]) -> LayerSample:
        """Return what was found in step ``number``, and beside it what of earlier samples still holds."""
        earlier = {
            key: readings
            for key, (when, readings) in self._last.items()
            if key not in found and number - when <= self._patience(key)
        }
        self._last = {key: self._last[key] for key in earlier}
        self._last.update({key: (number, readings) for key, readings in found.items()})
        return LayerSample(
            _of_optimizers(found),
            tuple(found.get(None, ())),
            _of_optimizers(earlier),
            tuple(earlier.get(None, ())),
            frozenset(key for key in found if key is not None),
            frozenset(key for key in earlier if key is not None),
        )


def _of_optimizers(found: Mapping[int | None, list[Any]]) -> tuple[ParameterReading, ...]:
    return tuple(reading for key, readings in found.items() if key is not None for reading in readings)


class Settings:
    """The settings of an optimizer's parameter groups as they were at its last step.

    Args:
        groups: (optimizer, param_group) and the facts of each; those that are tensors stand in ``numbers`` instead.
        numbers: The numbers of that step, under (fact, optimizer, param_group).
    """

    def __init__(self, groups: Sequence[tuple[tuple[str, str], Mapping[str, float | None]]], numbers: Numbers) -> None:
        self._groups, self._numbers = groups, numbers
        self._resolved: tuple[GroupSettings, ...] | None = None

    def resolve(self, *, current: bool) -> tuple[GroupSettings, ...]:
        """Wait for the numbers; for the monitor's own thread.

        Args:
            current: The optimizer stepped in the step that is told of.
        """
        if self._resolved is None:
            device = self._numbers.values() if any(None in facts.values() for _, facts in self._groups) else {}
            self._resolved = tuple(_settings(labels, facts, device) for labels, facts in self._groups)
            self._numbers = Numbers()  # the step's are not kept
        return self._resolved if current else tuple(replace(group, current=False) for group in self._resolved)


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

    number: int = 0
    """Counted from 1 among all that were attempted, skipped ones too; known when it is handed over."""
    sampled: bool = False
    """Whether samples fall due at this step, or an optimizer's did at an earlier one."""
    stepped: set[int] = field(default_factory=set)
    """``id`` of the optimizers that have stepped."""
    skips: int = 0
    """Steps that a gradient scaler left out, so that no hook told of them: seen as a loss scale that fell."""
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
    activations_at: int | None = None
    """Forwards that had begun when activations were last taken."""
    numbers: Numbers = field(default_factory=Numbers)
    parts: list[Part] = field(default_factory=list)
    """What was measured and is not asked for yet."""
    samples: list[PendingSample] = field(default_factory=list)
    settings: Mapping[int, Settings] = field(default_factory=dict)
    """Of every optimizer that has stepped so far, by its ``id``."""
    shown: Shown | None = None
    costs: Mapping[str, float] = field(default_factory=dict)
    """Own seconds in the training's thread by part."""
    marks: Marks = ()
    """Where the device began and ended parts of it."""

    @property
    def has_ended(self) -> bool:
        """Whether an optimizer has stepped in it, or its step was left out."""
        return bool(self.stepped) or self.skips > 0

    def absorb(self, rest: Step) -> None:
        """Take over what came before the step of another optimizer, which belongs to this step too."""
        self.skips += rest.skips
        self.forward += rest.forward
        self.data_wait += rest.data_wait
        self.forwards += rest.forwards
        self.observed += rest.observed
        self.sequence_length = rest.sequence_length
        self.max_norms += rest.max_norms
        self.numbers.absorb(rest.numbers)
        if rest.skips:
            self.finished_at, self.duration = rest.finished_at, (self.duration or 0.0) + (rest.duration or 0.0)

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
        left_out = {i for i in self.stepped if any(value > 0 for value in numbers.get(("found_inf", i), ()))}
        skipped = left_out >= self.stepped
        # what was measured around a step that did not happen says nothing
        sample = self._sample(left_out) if self.samples and self.shown is not None and not skipped else None
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
            groups=tuple(g for i, settings in self.settings.items() for g in settings.resolve(current=i in self.stepped)),
            precision=self.precision,
            sample=sample,
            also_skipped=0 if skipped else self.skips + bool(left_out),
            attempt=self.number,
            sampled=self.sampled,
            costs=self._costs(),  # the device has passed its marks by now: the sample is here
        )

    def _costs(self) -> dict[str, float]:
        on_device = device_seconds(self.marks)
        return {part: max(seconds, on_device.get(part, 0.0)) for part, seconds in self.costs.items()}

    def _sample(self, left_out: Collection[int | None]) -> LayerSample:
        found: dict[int | None, list[Any]] = {}
        for sample in self.samples:
            for key, readings in sample.resolve(left_out).items():
                found.setdefault(key, []).extend(readings)
        return self.shown.add(self.number, found) if self.shown is not None else LayerSample((), ())


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


def _settings(labels: tuple[str, str], facts: Mapping[str, float | None], device: dict[Hashable, list[float]]) -> GroupSettings:
    found = (_last(device, (fact, *labels)) if facts.get(fact) is None else facts[fact] for fact in _GROUP_FACTS)
    rate, peak, decay, beta1, beta2, epsilon = found
    return GroupSettings(*labels, rate, peak, decay, beta1, beta2, epsilon)
