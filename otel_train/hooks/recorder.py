"""The training thread's side of a monitor: follows the loop's events and hands each step to the monitor's own thread.

A step is closed when the next training forward begins, so that ``observe`` may be called before or after ``optimizer.step``. Where
the forward cannot be seen (whole-model compile, a loop that calls a submodule), the next step of an optimizer that has stepped in
it already closes it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from otel_train.guard import Guard
from otel_train.hooks.module import ActivationMeter, Gate
from otel_train.hooks.optimizer import group_facts, named_groups
from otel_train.hooks.parameters import ParameterMeter
from otel_train.hooks.pending import PendingMicroBatches, PendingSample, Step
from otel_train.readout import read_out
from otel_train.records import ActivationReading, ParameterReading

_LONG_STEP = 16
"""Micro-batches without a step after which what they told is handed over: a step may never come, as under a GradScaler that meets
nothing but NaN, and then their losses are the news, and would pile up."""

Meters = Mapping[int, ParameterMeter]
"""A meter by the ``id`` of its optimizer."""


class Recorder:
    """Follows one model's training loop.

    Args:
        labels: The optimizers' names, by ``id``; empty where there is no optimizer, and a call of ``observe`` is a step.
        every_n_steps: Steps between samples; the first step is sampled too.
        gate: Told when the coming forward is sampled.
        guard: Counts time and failures.
        emit: Takes each closed step, and micro-batches that wait long for theirs; must not wait.
        dtype: Type of the parameters, for the run's precision.
        times_forward: Whether the host clock measures forwards (on the CPU).
    """

    def __init__(
        self,
        labels: Mapping[int, str],
        *,
        every_n_steps: int,
        gate: Gate,
        guard: Guard,
        emit: Callable[[Step | PendingMicroBatches], None],
        dtype: torch.dtype,
        times_forward: bool,
    ) -> None:
        self._labels, self._every, self._gate, self._guard, self._emit = labels, every_n_steps, gate, guard, emit
        self._dtype, self._times_forward = dtype, times_forward
        self.remeasure: Callable[[], Meters] | None = None
        """Called before a sampled step; returns the meters."""
        self.activations: ActivationMeter | None = None
        self._precision = str(dtype).removeprefix("torch.")
        self._closed = 0  # steps so far, skipped ones too
        self._step = Step(sampled=self._is_sampled())
        self._gate.sample = self._step.sampled
        self._last_end: float | None = None
        self._paused = 0.0  # seconds in other phases since the last step ended
        self._forward_began: float | None = None
        self._closure_calls = 0
        self._loss_scale: float | None = None
        self._tells_found_inf = False
        self.in_step = False
        """An optimizer's step is under way: torch is iterating over its hooks, which must stay."""
        self._meters: Meters = {}

    def _is_sampled(self) -> bool:
        number = self._closed + 1
        return number == 1 or number % self._every == 0

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward of the root module begins."""
        del module
        with self._guard.part("loop"):
            if self._step.stepped:
                self.close_step()
            self._step.forwards += 1
            self._look_at_input((*args, *kwargs.values()))
            self._forward_began = time.perf_counter()

    def forward_ends(self) -> None:
        """A forward of the root module ends."""
        with self._guard.part("loop"):
            if self._forward_began is not None and self._times_forward:
                self._step.forward += time.perf_counter() - self._forward_began
            self._forward_began = None

    def _look_at_input(self, values: Sequence[object]) -> None:
        """Note the sequence length (the second dimension of tokens or embeddings) and the type that autocast uses."""
        inside = [v for value in values for v in (value.values() if isinstance(value, Mapping) else (value,))]
        first = next((v for v in inside if isinstance(v, torch.Tensor)), None)
        if first is None:
            return
        if first.dim() == 3 or (first.dim() == 2 and not first.is_floating_point()):
            self._step.sequence_length = first.shape[1]
        kind = first.device.type
        name = str(self._dtype).removeprefix("torch.")
        if torch.amp.is_autocast_available(kind) and torch.is_autocast_enabled(kind):
            name += f", autocast {str(torch.get_autocast_dtype(kind)).removeprefix('torch.')}"
        self._precision = name

    def before_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """An optimizer's step begins."""
        self.in_step = True
        with self._guard.part("loop"):
            if id(optimizer) in self._step.stepped:
                self.close_step()
            self._closure_calls = 0
            self._note_groups(optimizer)
            found_inf = getattr(optimizer, "found_inf", None)
            if isinstance(found_inf, torch.Tensor):
                self._tells_found_inf = True
                self._step.numbers.add("found_inf", found_inf)
                self._note_scale(getattr(optimizer, "grad_scale", None))
            if self._step.sampled and self.remeasure is not None:
                self._meters = self.remeasure()
        if not closure:
            self._begin(optimizer)

    def closure_called(self, optimizer: Optimizer) -> None:
        """The closure of an optimizer's step has been called."""
        self._closure_calls += 1
        if self._closure_calls == 1:
            self._begin(optimizer)

    def _begin(self, optimizer: Optimizer) -> None:
        meter = self._meters.get(id(optimizer))
        if self._step.sampled and meter is not None:
            meter.begin(_grad_scale(optimizer))

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer's step has ended."""
        self.in_step = False
        meter = self._meters.get(id(optimizer))
        if self._step.sampled and meter is not None:
            if self._closure_calls > 1:
                meter.reread_gradients(_grad_scale(optimizer))
            self._ask(meter.end())
        with self._guard.part("loop"):
            self._step.stepped.add(id(optimizer))
            self._end_step()
            # said here too: a compiled forward does not close the step, and looks at the flag alone
            self._gate.sample = (self._closed + 2) % self._every == 0

    def _ask(self, measured: tuple[list[torch.Tensor], Callable[..., list[ParameterReading]]] | None) -> None:
        with self._guard.part("readout"):
            tensors, decode = measured or ([], _nothing)
            seen: list[torch.Tensor] = []
            decode_seen: Callable[..., list[ActivationReading]] = _nothing
            if self.activations is not None and not self._step.samples:
                seen, decode_seen = self.activations.take()
            if tensors or seen:
                self._step.samples.append(PendingSample(read_out(tensors + seen), len(tensors), decode, decode_seen))

    def _end_step(self) -> None:
        end = time.perf_counter()
        self._step.finished_at = time.time()
        if self._last_end is not None:
            # several optimizers in a step: from the end of the step before to the end of the last of them
            self._step.duration = (self._step.duration or 0.0) + max(end - self._last_end - self._paused, 0.0)
        self._last_end, self._paused = end, 0.0

    def _note_groups(self, optimizer: Optimizer) -> None:
        label = self._labels[id(optimizer)]
        for name, group in named_groups(optimizer, label if len(self._labels) > 1 else None):
            self._step.groups[label, name] = None
            for fact, value in group_facts(group):
                self._step.numbers.add((fact, label, name), value)

    def _note_scale(self, scale: object) -> None:
        if isinstance(scale, torch.Tensor):
            self._step.numbers.add("grad_scale", scale)

    def observe(
        self,
        loss: float | torch.Tensor | None,
        tokens: int | torch.Tensor | None,
        samples: int | torch.Tensor | None,
        grad_norm: float | torch.Tensor | None,
        loss_scale: float | None,
    ) -> None:
        """Take what the loop knows of a micro-batch; in other phases it is not one of the training."""
        if self._gate.paused:
            return
        with self._guard.part("loop"):
            if not self._labels:
                self.close_step()
            self._step.observed += 1
            for name, value in (("loss", loss), ("tokens", tokens), ("samples", samples), ("grad_norm", grad_norm)):
                if value is not None:
                    self._step.numbers.add(name, value)
            if loss_scale is not None:
                self._observe_scale(float(loss_scale))
            if self._step.observed % _LONG_STEP == 0 and not self._step.stepped:
                self._emit(self._step.take_micro_batches())
        if not self._labels:
            self._step_without_optimizer()

    def _observe_scale(self, scale: float) -> None:
        self._step.numbers.add("loss_scale", scale)
        # a fused optimizer tells by itself, and of the right step
        if self._loss_scale is not None and scale < self._loss_scale and not self._tells_found_inf:
            self._step.scale_fell = True
            if not self._step.stepped:  # the scaler left the optimizer's step out, so no hook told of it
                self._step.stepped.add(0)
                self._end_step()
        self._loss_scale = scale

    def _step_without_optimizer(self) -> None:
        if self._step.sampled:
            self._ask(None)
        with self._guard.part("loop"):
            self._step.stepped.add(0)
            self._end_step()

    def clipped(self, norm: torch.Tensor, max_norm: float, *, is_l2: bool) -> None:
        """Take the norm before clipping, of the whole gradient or of a part of it."""
        with self._guard.part("loop"):
            if self._step.clipped_at != self._step.forwards:  # the step before was skipped without a word
                self._step.numbers.discard("clip_norm")
                self._step.numbers.discard("part_norm")
                self._step.max_norms.clear()
            self._step.clipped_at = self._step.forwards
            self._step.numbers.add("clip_norm", norm)
            self._step.max_norms.append(float(max_norm))
            if is_l2:
                self._step.numbers.add("part_norm", norm)

    def waited(self, seconds: float) -> None:
        """The loop waited for a batch."""
        if self._gate.paused:
            return
        if self._step.stepped:
            with self._guard.part("loop"):
                self.close_step()
        self._step.data_wait += seconds

    def paused(self, seconds: float) -> None:
        """The loop was in another phase for so long, until now; a step that ended in it counted its own time."""
        since_step = seconds if self._last_end is None else time.perf_counter() - self._last_end
        self._paused += min(seconds, since_step)

    def release(self) -> None:
        """Let go of everything that holds the model's parameters, and hand over nothing more."""
        self._meters, self._emit = {}, _drop

    def close_step(self) -> None:
        """Hand the step over, if an optimizer has stepped in it, and begin the next."""
        if not self._step.stepped:
            return
        step, self._closed = self._step, self._closed + 1
        step.attempt = self._closed
        self._step = Step(sampled=self._is_sampled(), sequence_length=step.sequence_length)
        self._gate.sample = self._step.sampled
        step.precision = self._precision
        step.numbers.read_out()
        self._emit(step)


def _grad_scale(optimizer: Optimizer) -> torch.Tensor | None:
    """Return by how much a fused optimizer's gradients are scaled while a GradScaler runs its step."""
    scale = getattr(optimizer, "grad_scale", None)
    return scale if isinstance(scale, torch.Tensor) else None


def _drop(step: Step | PendingMicroBatches) -> None:
    del step


def _nothing(numbers: Sequence[Sequence[float]]) -> list[Any]:
    del numbers
    return []
