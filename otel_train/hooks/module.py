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
from otel_train.hooks.site_meter import SiteMeter, WaitingRows, take
from otel_train.layers import ActivationSite
from otel_train.records import ActivationReading
from otel_train.sampling import wide_dtype
from otel_train.stats import activations as stats


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


class _SiteHook(_Hook):
    """Adds what it sees to a site's sums while the gate is open."""

    def __init__(self, gate: Gate, meter: SiteMeter, waiting: WaitingRows, guard: Guard) -> None:
        self._gate, self._meter, self._waiting, self._guard = gate, meter, waiting, guard
        self.runs_again = False
        """Compiled, and within a reentrant checkpoint: the last sampled forward was without gradients, recomputation has them."""
        gate.sites.append(self)

    def _see(self, module: nn.Module, value: object) -> None:
        if torch.compiler.is_compiling():
            if self._measures_in_graph(module):
                self._add_in_graph(value)
        elif self._gate.active and module.training:
            with self._guard.part("activations"), unseen_by_selective_checkpoints():
                activation = stats.activation_in(value)
                if activation is not None:
                    self._waiting.add(self._meter, activation)

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

    def _add_in_graph(self, value: object) -> None:
        with torch.no_grad():
            activation = stats.activation_in(value)
            if activation is not None and self._gate.counts is not None:
                self._meter.add(activation, self._gate.counts)


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
        offsets = torch.rand(stats.ROWS, dtype=torch.float64, generator=generator, device="cpu").to(device, wide_dtype(device))
        self._strata = stats.Strata(offsets)
        gate.counts = offsets.new_zeros((), dtype=torch.bool) if sites else None
        self._waiting = WaitingRows()
        self._meters: list[SiteMeter] = []
        self.handles: list[RemovableHandle] = []
        for site in sites:
            pre, post = (SiteMeter(site, name, self._strata) for name in ("pre", "post"))
            self._meters += [pre, post]
            before = SitePreHook(gate, pre, self._waiting, guard)
            self.handles.append(site.module.register_forward_pre_hook(before, with_kwargs=True))
            self.handles.append(site.module.register_forward_hook(SitePostHook(gate, post, self._waiting, guard)))

    def sum_up(self) -> None:
        """Add the rows that wait to the sums, before they are taken."""
        self._waiting.sum_up()

    @torch.no_grad()
    def take(self) -> tuple[list[torch.Tensor], Callable[[Sequence[Sequence[float]]], list[ActivationReading]]]:
        """Return what to read out and how to decode it, and go on to other rows."""
        taken = take(self._meters)
        self._strata.advance()
        self._gate.taken = True
        return taken
