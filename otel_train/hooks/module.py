"""Hooks on modules: the root's say when a training forward runs, the activation modules' add up what they see in it.

Hooks are objects that turn into no-ops in copies, so that pickles, ``torch.save`` and deep copies of a model carry nothing of ours.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from otel_train.guard import Guard
from otel_train.layers import ActivationSite
from otel_train.records import ActivationReading
from otel_train.stats import activations as stats

DEAD_ROWS = 512
"""Rows that must have been seen before a unit is called dead."""


class Gate:
    """What activation hooks look at, in and out of compiled graphs: plain flags."""

    def __init__(self) -> None:
        self.sample = False
        """The coming step is sampled."""
        self.paused = False
        """The loop is in another phase than training."""
        self.active = False
        """A forward of the root module runs in training, in a step that is sampled. False in backward, so recomputation
        under activation checkpointing is not counted."""


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

    def __call__(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        """Take part before the module's forward."""
        training = module.training and torch.is_grad_enabled() and not self._gate.paused
        if training and not torch.compiler.is_compiling():
            self._begin(module, args, kwargs)
        self._gate.active = training and self._gate.sample


class RootHook(_Hook):
    """Closes the gate at the end of the root module's forward."""

    def __init__(self, gate: Gate, end: Callable[[], None]) -> None:
        self._gate, self._end = gate, end

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Take part after the module's forward."""
        del module, args, output
        self._gate.active = False
        if not torch.compiler.is_compiling():
            self._end()


class SiteMeter:
    """Sums over one site: the input (``pre``) or the output (``post``) of an activation module.

    One tensor a site, nothing shared between sites: a shared one would make compiled graphs depend on its rows.
    """

    def __init__(self, site: ActivationSite, name: str, offsets: torch.Tensor) -> None:
        self.layer, self.depth, self.name, self.module = site.layer, site.depth, name, site.name
        post = name == "post"
        self._flat_outside = site.flat if post else None
        self._rectifying = site.rectifying and post
        self._offsets = offsets  # (ROWS,) shared with the other sites of the device, moved on once a sample
        self._sums = torch.zeros(stats.SUMS, dtype=offsets.dtype, device=offsets.device)
        self._peak = torch.zeros((), dtype=torch.float32, device=offsets.device)
        self._positive: list[torch.Tensor] = []  # (units,) bool, of the window before this one and of this one
        self._rows = [0, 0]

    def add(self, activation: torch.Tensor) -> None:
        """Add a call's sampled rows."""
        rows = stats.sample_rows(activation, self._offsets)
        sums, peak = stats.row_sums(rows, self._flat_outside)
        self._sums.add_(sums)
        self._peak.copy_(torch.maximum(self._peak, peak.to(self._peak.dtype)))
        # Under compile the buffers for units would have to be made inside the graph.
        if self._rectifying and not torch.compiler.is_compiling():
            self._add_units(rows)

    def _add_units(self, rows: torch.Tensor) -> None:
        positive = stats.positive_units(rows)
        if not self._positive or self._positive[1].shape != positive.shape:
            self._positive, self._rows = [torch.zeros_like(positive), positive], [0, rows.shape[0]]
            return
        if self._rows[1] >= DEAD_ROWS:
            self._positive, self._rows = [self._positive[1], torch.zeros_like(positive)], [self._rows[1], 0]
        self._positive[1].logical_or_(positive)
        self._rows[1] += rows.shape[0]

    def take(self) -> tuple[torch.Tensor, Callable[[Sequence[float]], ActivationReading]]:
        """Return what to read out, and the host function that makes a reading of it; starts the sums anew."""
        parts = [self._sums, self._peak.to(self._sums.dtype).reshape(1)]
        units = 0
        if self._positive and sum(self._rows) >= DEAD_ROWS:
            units = self._positive[1].numel()
            alive = self._positive[0].logical_or(self._positive[1])
            parts.append(alive.logical_not().sum().to(self._sums.dtype).reshape(1))
        packed = torch.cat(parts)
        self._sums.zero_()
        self._peak.zero_()
        flat = self._flat_outside is not None

        def decode(numbers: Sequence[float]) -> ActivationReading:
            count, total, squared, zeros, saturated, nonfinite, peak = numbers[:7]
            dead = numbers[7] if units else None
            return ActivationReading(
                self.layer, self.depth, self.name, count, total, squared, peak, zeros, nonfinite,
                saturated if flat else None, dead, units, self.module,
            )  # fmt: skip

        return packed, decode


class _SiteHook(_Hook):
    """Adds what it sees to a site's sums while the gate is open."""

    def __init__(self, gate: Gate, meter: SiteMeter, guard: Guard) -> None:
        self._gate, self._meter, self._guard = gate, meter, guard

    def _see(self, value: object) -> None:
        activation = _first_tensor(value)
        if activation is None or not activation.is_floating_point() or activation.is_nested or not activation.numel():
            return
        if torch.compiler.is_compiling():
            with torch.no_grad():
                self._meter.add(activation.detach())
            return
        with self._guard.part("activations"), torch.no_grad():
            self._meter.add(activation.detach())


class SitePreHook(_SiteHook):
    """Sees the input, before an in-place activation overwrites it."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        """Take part before the module's forward."""
        del module
        if self._gate.active:
            self._see(args)


class SitePostHook(_SiteHook):
    """Sees the output."""

    def __call__(self, module: nn.Module, args: tuple[Any, ...], output: object) -> None:
        """Take part after the module's forward."""
        del module, args
        if self._gate.active:
            self._see(output)


def _first_tensor(value: object) -> torch.Tensor | None:
    if isinstance(value, torch.Tensor):
        return value
    if isinstance(value, (tuple, list)) and value:
        return _first_tensor(value[0])
    return None


class ActivationMeter:
    """All sites of a model, each with its two hooks.

    Args:
        sites: The modules to hook.
        device: Where the model's parameters are.
        gate: Opens during sampled training forwards.
        guard: Counts time and failures.
    """

    def __init__(self, sites: Sequence[ActivationSite], device: torch.device, gate: Gate, guard: Guard) -> None:
        generator = torch.Generator(device="cpu").manual_seed(1)
        wide = torch.float32 if device.type == "mps" else torch.float64
        self._offsets = torch.rand(stats.ROWS, dtype=torch.float64, generator=generator, device="cpu").to(device, wide)
        self._meters: list[SiteMeter] = []
        self.handles: list[RemovableHandle] = []
        for site in sites:
            pre, post = (SiteMeter(site, name, self._offsets) for name in ("pre", "post"))
            self._meters += [pre, post]
            self.handles.append(site.module.register_forward_pre_hook(SitePreHook(gate, pre, guard)))
            self.handles.append(site.module.register_forward_hook(SitePostHook(gate, post, guard)))

    def take(self) -> tuple[list[torch.Tensor], Callable[[Sequence[Sequence[float]]], list[ActivationReading]]]:
        """Return what to read out and how to decode it, and go on to other rows."""
        taken = [meter.take() for meter in self._meters]
        self._offsets.add_(0.6180339887498949).frac_()

        def decode(numbers: Sequence[Sequence[float]]) -> list[ActivationReading]:
            return [make(row) for (_, make), row in zip(taken, numbers, strict=True)]

        return [packed for packed, _ in taken], decode
