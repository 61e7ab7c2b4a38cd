"""Hooks on modules: the root's say when a training forward runs, the activation modules' add up what they see in it.

Hooks are objects that turn into no-ops in copies, so that pickles, ``torch.save`` and deep copies of a model carry nothing of ours.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils._python_dispatch import _disable_current_modes, _get_current_dispatch_mode_stack
from torch.utils.hooks import RemovableHandle

from otel_train.guard import Guard
from otel_train.hooks.compiled import keep_out_of_graphs
from otel_train.layers import ActivationSite
from otel_train.records import ActivationReading
from otel_train.stats import activations as stats

DEAD_ROWS = 512
"""Rows that must have been seen before a unit is called dead."""


class Gate:
    """What activation hooks look at: plain flags, and a tensor for compiled graphs.

    A compiled block that is checkpointed must run the same graph in forward and in recomputation, since another one may save other
    tensors, at which torch raises. So a flag that stays the same until backward is over chooses the graph, and what recomputation
    sees is left out by a tensor.
    """

    def __init__(self) -> None:
        self.sample = False
        """The coming step is sampled."""
        self.paused = False
        """The loop is in another phase than training."""
        self.active = False
        """A forward of the root module runs in training, in a step that is sampled. False in backward, so recomputation
        under activation checkpointing is not counted."""
        self.measures = False
        """Compiled graphs measure: it has been active, and backward may still be to come."""
        self.counts: torch.Tensor | None = None
        """() bool, on the sites' device: active, for compiled graphs; None where there are no sites."""
        self.taken = False
        """What the forwards showed has been taken: an optimizer has stepped."""
        self.sites: list[_SiteHook] = []
        """The hooks that look at it."""

    def open(self) -> None:
        """A training forward of the root module begins."""
        self.active = self.measures = self.sample
        self.taken = False
        if self.sample:
            for site in self.sites:
                site.runs_again = False
            self._tell_graphs(active=True)

    def shut(self) -> None:
        """A forward of the root module ends, or begins that is not counted."""
        if self.active:
            self._tell_graphs(active=False)
        self.active = False

    def rest(self) -> None:
        """No forward is waiting for its backward, as far as it can be told."""
        if self.taken:
            self.measures = False

    def _tell_graphs(self, *, active: bool) -> None:
        if self.counts is None:
            return
        if torch.compiler.is_compiling():
            self.counts.fill_(active)
            return
        with unseen_by_selective_checkpoints():
            self.counts.fill_(active)


class _Hook:
    """A hook that copies as a no-op which any Python can load: ``nullcontext().__exit__`` takes anything and returns None."""

    def __reduce__(self) -> tuple[Any, ...]:
        return (getattr, (contextlib.nullcontext(), "__exit__"))

    def __deepcopy__(self, memo: dict[int, Any]) -> Callable[..., None]:
        return contextlib.nullcontext().__exit__


class RootPreHook(_Hook):
    """Opens the gate at the start of the root module's forward."""

    def __init__(self, gate: Gate, begin: Callable[[nn.Module, tuple[Any, ...], dict[str, Any]], None]) -> None:
        self._gate, self._begin = gate, begin
        self._had_gradients = True  # the last forward outside of backward

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take part before the module's forward."""
        training = module.training and torch.is_grad_enabled() and not self._gate.paused
        if not torch.compiler.is_compiling():
            training = self._is_new(module.training) and training
            if training:
                self._begin(module, args, kwargs)
        if training:
            self._gate.open()
            return
        self._gate.shut()
        if torch.compiler.is_compiling() or not _in_backward():
            self._gate.rest()

    def _is_new(self, training: bool) -> bool:  # noqa: FBT001  # a module's state
        """Say whether a forward shows something new, and is neither recomputation nor a look at shapes.

        A root that is checkpointed as a whole runs again in backward. If that is reentrant, it is the time that counts: the first
        one is without gradients, as validation is.
        """
        if _in_backward():
            return not self._had_gradients
        if training:
            self._had_gradients = torch.is_grad_enabled()
        return not _infers_shapes()


def _in_backward() -> bool:
    return torch._C._current_graph_task_id() != -1  # noqa: SLF001  # as torch.utils.checkpoint does


def _infers_shapes() -> bool:
    """Say whether a pipeline schedule runs this forward to learn shapes, as it does before its first step, with gradients."""
    stage = "torch.distributed.pipelining.stage"
    frame = sys._getframe() if stage in sys.modules else None  # noqa: SLF001  # nothing else tells
    while frame is not None:
        if "inference" in frame.f_code.co_name and frame.f_globals.get("__name__") == stage:
            return True
        frame = frame.f_back
    return False


class RootHook(_Hook):
    """Closes the gate at the end of the root module's forward."""

    def __init__(self, gate: Gate, end: Callable[[], None]) -> None:
        self._gate, self._end = gate, end

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Take part after the module's forward."""
        del module, args, output
        self._gate.shut()
        if not torch.compiler.is_compiling():
            self._end()


keep_out_of_graphs(RootPreHook.__call__)
keep_out_of_graphs(RootHook.__call__)


class SiteMeter:
    """Sums over one site: the input (``pre``) or the output (``post``) of an activation module.

    Tensors of its own, nothing shared between sites: a shared one would make compiled graphs depend on its rows. Nothing but
    tensors changes in ``add``: what Python remembered would be a guard of a compiled graph.
    """

    def __init__(self, site: ActivationSite, name: str, offsets: torch.Tensor) -> None:
        self.layer, self.depth, self.name, self.module = site.layer, site.depth, name, site.name
        post = name == "post"
        self._flat_outside = site.flat if post else None
        self._rectifying = site.rectifying and post
        self._offsets = offsets  # (ROWS,) shared with the other sites of the device, moved on once a sample
        self._sums = torch.zeros(stats.SUMS, dtype=offsets.dtype, device=offsets.device)
        self._peak = torch.zeros((), dtype=torch.float32, device=offsets.device)
        # of the window before this one and of this one
        self._positive = [offsets.new_zeros(stats.UNITS, dtype=torch.bool) for _ in range(2 * self._rectifying)]
        # (1,) and not (): compiled graphs lose what they write into fp64 numbers on the CPU
        self._rows = [offsets.new_zeros(1) for _ in range(2)]
        self._units = offsets.new_zeros(1)

    def add(self, activation: torch.Tensor, counts: torch.Tensor | None = None) -> None:
        """Add a call's sampled rows.

        Args:
            activation: What the site showed.
            counts: () bool, whether the call counts, where only the device knows.
        """
        rows = stats.sample_rows(activation, self._offsets)
        sums, peak = stats.row_sums(rows, self._flat_outside)
        self._sums.add_(_if(counts, sums))
        self._peak.copy_(torch.maximum(self._peak, _if(counts, peak.to(self._peak.dtype))))
        if self._rectifying:
            units = min(rows.shape[1], stats.UNITS)
            positive = _if(counts, stats.positive_units(rows).narrow(0, 0, units))
            self._positive[1].narrow(0, 0, units).logical_or_(positive)
            self._rows[1].add_(rows.shape[0] if counts is None else counts * rows.shape[0])
            self._units.clamp_(min=units)

    def take(self) -> tuple[torch.Tensor, Callable[[Sequence[float]], ActivationReading]]:
        """Return what to read out, and the host function that makes a reading of it; starts the sums anew."""
        parts = [self._sums, self._peak.to(self._sums.dtype).reshape(1)]
        if self._rectifying:
            parts.append(self._take_units())
        packed = torch.cat(parts)
        self._sums.zero_()
        self._peak.zero_()
        flat = self._flat_outside is not None

        def decode(numbers: Sequence[float]) -> ActivationReading:
            count, total, squared, zeros, saturated, nonfinite, peak = numbers[:7]
            units, alive, rows = numbers[7:] or (0.0, 0.0, 0.0)
            enough = rows >= DEAD_ROWS
            return ActivationReading(
                self.layer, self.depth, self.name, count, total, squared, peak, zeros, nonfinite,
                saturated if flat else None, units - alive if enough else None, int(units) if enough else 0, self.module,
            )  # fmt: skip

        return packed, decode

    def _take_units(self) -> torch.Tensor:
        """Return units, those of them that were positive in a window, and rows, (3,); a full window becomes the one before."""
        (before, now), (rows_before, rows_now) = self._positive, self._rows
        alive = before.logical_or(now).sum(0, keepdim=True).to(self._units.dtype)
        told = torch.cat([self._units, alive, rows_before + rows_now])
        full = rows_now >= DEAD_ROWS
        before.copy_(torch.where(full, now, before))
        now.logical_and_(full.logical_not())
        rows_before.copy_(torch.where(full, rows_now, rows_before))
        rows_now.mul_(full.logical_not())
        return told


def _if(counts: torch.Tensor | None, values: torch.Tensor) -> torch.Tensor:
    return values if counts is None else torch.where(counts, values, torch.zeros_like(values))


class _SiteHook(_Hook):
    """Adds what it sees to a site's sums while the gate is open."""

    def __init__(self, gate: Gate, meter: SiteMeter, guard: Guard) -> None:
        self._gate, self._meter, self._guard = gate, meter, guard
        self.runs_again = False
        """Compiled, and within a reentrant checkpoint: the last sampled forward was without gradients, recomputation has them."""
        gate.sites.append(self)

    def _see(self, module: nn.Module, value: object) -> None:
        if torch.compiler.is_compiling():
            if self._measures_in_graph(module):
                self._add(value, self._gate.counts)
        elif self._gate.active and module.training:
            with self._guard.part("activations"), unseen_by_selective_checkpoints():
                self._add(value, None)

    def _measures_in_graph(self, module: nn.Module) -> bool:
        """Say whether this graph measures; what is looked at here is what tells graphs apart.

        Recomputation in a reentrant checkpoint need not be like its forward, which saved nothing: it keeps to one graph, which
        never measures.
        """
        with_gradients = torch.is_grad_enabled()
        if with_gradients and self.runs_again:
            return False
        measures = self._gate.measures and module.training
        if measures and not with_gradients and self._gate.active:
            self.runs_again = True
        return measures

    def _add(self, value: object, counts: torch.Tensor | None) -> None:
        with torch.no_grad():
            activation = stats.activation_in(value)
            if activation is not None:
                self._meter.add(activation.detach(), counts)


def unseen_by_selective_checkpoints() -> contextlib.AbstractContextManager[Any]:
    """Keep our operations out of what selective checkpoints remember: recomputation, where we are silent, would get our results."""
    modes = {type(mode).__name__ for mode in _get_current_dispatch_mode_stack()}
    return _disable_current_modes() if "_CachingTorchDispatchMode" in modes else contextlib.nullcontext()


class SitePreHook(_SiteHook):
    """Sees the input, before an in-place activation overwrites it."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take part before the module's forward."""
        self._see(module, (args, kwargs))


class SitePostHook(_SiteHook):
    """Sees the output."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Take part after the module's forward."""
        del args
        self._see(module, output)


class ActivationMeter:
    """All sites of a model, each with its two hooks.

    Args:
        sites: The modules to hook.
        device: Where the model's parameters are.
        gate: Opens during sampled training forwards.
        guard: Counts time and failures.
    """

    def __init__(self, sites: Sequence[ActivationSite], device: torch.device, gate: Gate, guard: Guard) -> None:
        self._gate = gate
        generator = torch.Generator(device="cpu").manual_seed(1)
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._offsets = torch.rand(stats.ROWS, dtype=torch.float64, generator=generator, device="cpu").to(device, wide)
        gate.counts = self._offsets.new_zeros((), dtype=torch.bool) if sites else None
        self._meters: list[SiteMeter] = []
        self.handles: list[RemovableHandle] = []
        for site in sites:
            pre, post = (SiteMeter(site, name, self._offsets) for name in ("pre", "post"))
            self._meters += [pre, post]
            self.handles.append(site.module.register_forward_pre_hook(SitePreHook(gate, pre, guard), with_kwargs=True))
            self.handles.append(site.module.register_forward_hook(SitePostHook(gate, post, guard)))

    def take(self) -> tuple[list[torch.Tensor], Callable[[Sequence[Sequence[float]]], list[ActivationReading]]]:
        """Return what to read out and how to decode it, and go on to other rows."""
        taken = [meter.take() for meter in self._meters]
        self._offsets.add_(0.6180339887498949).frac_()
        self._gate.taken = True

        def decode(numbers: Sequence[Sequence[float]]) -> list[ActivationReading]:
            return [make(row) for (_, make), row in zip(taken, numbers, strict=True)]

        return [packed for packed, _ in taken], decode
