"""The training thread's side of a monitor: follows the loop's events and hands each step to the monitor's own thread.

A step is closed when the next training forward begins, so that ``observe`` may be called before or after ``optimizer.step``. Where
the forward cannot be seen (whole-model compile, a loop that calls a submodule), the next step of an optimizer that has stepped in
it already closes it. Of several optimizers some may not have stepped yet when the next forward begins: then the step is held, and
who steps next decides whether what came in between belongs to it.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer

from otel_train.budget import Pace
from otel_train.device import DeviceClock
from otel_train.guard import Guard
from otel_train.hooks.cadence import Cadence
from otel_train.hooks.module import ActivationMeter, Gate
from otel_train.hooks.optimizer import group_facts, named_groups
from otel_train.hooks.parameters import ParameterMeter
from otel_train.hooks.pending import Part, PendingMicroBatches, PendingSample, Settings, Shown, Step
from otel_train.readout import read_out

_LONG_STEP = 16
"""Micro-batches without a step after which what they told is handed over: a step may never come, as under a GradScaler that meets
nothing but NaN, and then their losses are the news, and would pile up."""

Meters = Mapping[int, ParameterMeter]
"""A meter by the ``id`` of its optimizer."""


class Recorder:
    """Follows one model's training loop.

    Args:
        labels: The optimizers' names, by ``id``; empty where there is no optimizer, and a call of ``observe`` is a step.
        every_n_steps: Steps between samples, at first; the first step is sampled too.
        gate: Told when the coming forward is sampled.
        guard: Counts time and failures.
        emit: Takes each closed step, and micro-batches that wait long for theirs; must not wait.
        dtype: Type of the parameters, for the run's precision.
        times_forward: Whether the host clock measures forwards (on the CPU).
        clock: Marks parts on the device; None on the CPU.
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
        clock: DeviceClock | None,
    ) -> None:
        self._labels, self._gate, self._guard, self._emit = labels, gate, guard, emit
        self.cadence = Cadence(Pace.regular(every_n_steps), labels)
        self._shown = Shown(self.cadence.patience)
        self._clock = clock
        self._dtype, self._times_forward = dtype, times_forward
        self.remeasure: Callable[[Optimizer | None], Meters] | None = None
        """Called before an optimizer is measured, with None before the first of a step; returns the meters."""
        self.activations: ActivationMeter | None = None
        self._precision = str(dtype).removeprefix("torch.")
        self._closed = 0  # steps so far, skipped ones too
        self._step = Step()
        self._held: Step | None = None
        """A step that some optimizers have made and others, maybe, not yet."""
        self._settings: dict[int, Settings] = {}
        self._measures = False
        self._look_ahead()
        self._last_end: float | None = None
        self._paused = 0.0  # seconds in other phases since the last step ended
        self._forward_began: float | None = None
        self._closure_calls = 0
        self._loss_scale: float | None = None
        self._tells_found_inf = False
        self.in_step = False
        """An optimizer's step is under way: torch is iterating over its hooks, which must stay."""
        self._meters: Meters = {}

    @property
    def attempt(self) -> int:
        """Number of the step under way, or of the one after it that may have begun; the monitor's own threads look too."""
        return self._closed + 2

    def _look_ahead(self) -> None:
        """Open the gate for activations if the coming forward may belong to a step in which they are measured."""
        number = self._closed + 1
        begun = self._held is not None or self._step.has_ended
        sampled = self.cadence.measures("activations", number + begun)
        if begun and not sampled and self.cadence.measures("activations", number):
            sampled = not self.cadence.is_whole(self._step.stepped)
        self._gate.sample = sampled

    def forward_begins(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """A training forward of the root module begins."""
        del module
        with self._guard.part("loop"):
            self._turn()
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

    def _turn(self) -> None:
        """A forward, a wait for data or a clip: after a step it belongs to the next, or to the next optimizer of the same."""
        if self.in_step or not self._step.has_ended:  # within a closure, or on the way to a step
            return
        if self._step.stepped and not self.cadence.is_whole(self._step.stepped):
            self._held, self._step = self._step, Step(sequence_length=self._step.sequence_length)
            self._look_ahead()
        else:
            self.close_step()

    def _join(self, optimizer: int) -> None:
        """An optimizer steps: in the step that is held, in one that is under way, or in one of its own."""
        held, self._held = self._held, None
        if held is not None and optimizer not in held.stepped:
            held.absorb(self._step)
            self._step = held
        elif held is not None:
            self._hand_over(held)
        if optimizer in self._step.stepped:
            self.close_step()

    def before_step(self, optimizer: Optimizer, *, closure: bool) -> None:
        """An optimizer's step begins."""
        self.in_step, self._measures = True, False
        with self._guard.part("loop"):
            self._join(id(optimizer))
            self._closure_calls = 0
            self._note_groups(optimizer)
            found_inf = getattr(optimizer, "found_inf", None)
            if isinstance(found_inf, torch.Tensor):
                self._tells_found_inf = True
                self._step.numbers.add(("found_inf", id(optimizer)), found_inf)
                self._note_scale(getattr(optimizer, "grad_scale", None))
            self._measures = self.cadence.begins(id(optimizer), self._closed + 1)
            if self._measures and self.remeasure is not None:
                self._meters = self.remeasure(optimizer if self._step.parts else None)
        if not closure:
            self._begin(optimizer)

    def closure_called(self, optimizer: Optimizer) -> None:
        """The closure of an optimizer's step has been called."""
        self._closure_calls += 1
        if self._closure_calls == 1:
            self._begin(optimizer)

    def _begin(self, optimizer: Optimizer) -> None:
        meter = self._meters.get(id(optimizer))
        if self._measures and meter is not None:
            meter.begin(_grad_scale(optimizer), histograms=self.cadence.counts_histograms(id(optimizer)))

    def after_step(self, optimizer: Optimizer) -> None:
        """An optimizer's step has ended."""
        self.in_step = False
        if self._measures:
            self._take_parameters(optimizer)
        if self._gate.sample:
            self._take_activations()
        with self._guard.part("loop"):
            self._step.stepped.add(id(optimizer))
            self._end_step()
            self._look_ahead()  # a compiled forward does not close the step, and looks at the flag alone
        if self._step.parts and self.cadence.is_whole(self._step.stepped):
            self._ask(self._step)

    def _take_parameters(self, optimizer: Optimizer) -> None:
        """Add what was measured around the step; that nothing could be measured is told too, so that no older values stand."""
        meter = self._meters.get(id(optimizer))
        if meter is None:
            return
        if self._closure_calls > 1:
            meter.reread_gradients(_grad_scale(optimizer))
        tensors, decode = meter.end() or ([], _nothing)
        self._step.parts.append(Part(id(optimizer), tensors, decode))
        self.cadence.measured(id(optimizer))

    def _take_activations(self) -> None:
        """Add what the forwards since the last time showed; or forget it, if they were not of a sampled step after all."""
        if self.activations is None or self._step.activations_at == self._step.forwards:
            return
        self._step.activations_at = self._step.forwards
        with self._guard.part("activations"):
            self.activations.sum_up()
        with self._guard.part("activations"):
            seen, decode = self.activations.take()
            if seen and self.cadence.measures("activations", self._closed + 1):
                self._step.parts.append(Part(None, seen, decode))

    def _ask(self, step: Step) -> None:
        with self._guard.part("readout"):
            parts, step.parts = step.parts, []
            step.samples.append(PendingSample(parts, read_out([tensor for part in parts for tensor in part.tensors])))

    def _end_step(self) -> None:
        end = time.perf_counter()
        self._step.finished_at = time.time()
        if self._last_end is not None:
            # several optimizers in a step: from the end of the step before to the end of the last of them
            self._step.duration = (self._step.duration or 0.0) + max(end - self._last_end - self._paused, 0.0)
        self._last_end, self._paused = end, 0.0

    def _note_groups(self, optimizer: Optimizer) -> None:
        label = self._labels[id(optimizer)]
        groups: list[tuple[tuple[str, str], dict[str, float | None]]] = []
        for name, group in named_groups(optimizer, label if len(self._labels) > 1 else None):
            facts: dict[str, float | None] = {}
            for fact, value in group_facts(group):
                if isinstance(value, torch.Tensor):
                    self._step.numbers.add((fact, label, name), value)
                facts[fact] = None if isinstance(value, torch.Tensor) else float(value)
            groups.append(((label, name), facts))
        self._settings[id(optimizer)] = Settings(groups, self._step.numbers)

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
                self._hand_over_held()
                self._emit(self._step.take_micro_batches())
        if not self._labels:
            self._step_without_optimizer()

    def _observe_scale(self, scale: float) -> None:
        """Take the scale, whose fall tells of a step that was left out: this one, if no optimizer steps in it.

        Where one does, it was the step before this one (the scale is observed before the scaler's ``step`` or ``update``), or that
        of another optimizer: this one happened.
        """
        self._step.numbers.add("loss_scale", scale)
        # a fused optimizer tells by itself, and of the right step
        if self._loss_scale is not None and scale < self._loss_scale and not self._tells_found_inf:
            self._step.skips += 1
            if not self._step.stepped:
                self._end_step()
        self._loss_scale = scale

    def _step_without_optimizer(self) -> None:
        if self._gate.sample:
            self._take_activations()
        if self._step.parts:
            self._ask(self._step)
        with self._guard.part("loop"):
            if not self._step.skips:
                self._step.stepped.add(0)
            self._end_step()

    def clipped(self, norm: torch.Tensor, max_norm: float, *, is_l2: bool) -> None:
        """Take the norm before clipping, of the whole gradient or of a part of it."""
        with self._guard.part("loop"):
            self._turn()
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
        if self._step.has_ended:
            with self._guard.part("loop"):
                self._turn()
        self._step.data_wait += seconds

    def paused(self, seconds: float) -> None:
        """The loop was in another phase for so long, until now; a step that ended in it counted its own time."""
        since_step = seconds if self._last_end is None else time.perf_counter() - self._last_end
        self._paused += min(seconds, since_step)

    def release(self) -> None:
        """Let go of everything that holds the model's parameters, and hand over nothing more."""
        self._meters, self._emit = {}, _drop

    def close_step(self) -> None:
        """Hand over what is held, and the step under way if it has ended; then the next begins."""
        self._hand_over_held()
        if self._step.has_ended:
            step, self._step = self._step, Step(sequence_length=self._step.sequence_length)
            self._hand_over(step)
        self._look_ahead()

    def _hand_over_held(self) -> None:
        held, self._held = self._held, None
        if held is not None:
            self._hand_over(held)

    def _hand_over(self, step: Step) -> None:
        self._closed += 1
        self.cadence.over(self._closed)
        step.number, step.precision, step.shown = self._closed, self._precision, self._shown
        step.settings = dict(self._settings)
        if step.parts:
            self._ask(step)
        step.sampled = bool(step.samples) or self.cadence.is_sampled(self._closed)
        step.numbers.read_out()
        step.costs, step.marks = self._guard.spent(), self._clock.take() if self._clock is not None else ()
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
