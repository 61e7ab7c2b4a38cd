"""Gradients, weights and updates of one optimizer's parameters in one sampled step."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence

import torch

from otel_train.guard import Guard
from otel_train.hooks.shape_group import ShapeGroup
from otel_train.hooks.turns import Progress, Turns
from otel_train.layers import MonitoredParameter
from otel_train.records import ParameterReading
from otel_train.sampling import ALL_MAGNITUDES, FEWEST_MAGNITUDES, MAGNITUDES, Sampler, plan
from otel_train.shards import is_partial, is_readable, local

Decode = Callable[[Sequence[Sequence[float]]], list[ParameterReading]]


class ParameterMeter:
    """Measures the parameters that have a gradient; those without one have no values, as they have no update.

    Args:
        parameters: The parameters whose steps it sees.
        updates: ``sampled``, ``exact`` or ``off``.
        turns: In which samples whose updates are measured.
        progress: How far they have come.
        guard: Counts time and failures.
        samplers: By device; shared by the meters of a model, and kept when they are made anew.
    """

    def __init__(
        self,
        parameters: Sequence[MonitoredParameter],
        updates: str,
        turns: Turns,
        progress: Progress,
        *,
        guard: Guard,
        samplers: dict[torch.device, Sampler],
    ) -> None:
        self._parameters, self._updates, self._turns, self._guard = list(parameters), updates, turns, guard
        self._progress = progress
        self._samplers = samplers
        self._groups: list[ShapeGroup] = []
        self._grouped: tuple[tuple[int, torch.dtype, torch.device, torch.Size], ...] = ()
        self._complete = self._histograms = False

    @torch.no_grad()
    def begin(self, scale: torch.Tensor | None, *, histograms: bool) -> None:
        """Read gradients and weights, before the step.

        Args:
            scale: The gradients are this many times too large, () or None.
            histograms: Whether magnitudes of gradients are counted.
        """
        self._histograms = histograms
        self._complete = read = False
        with self._guard.part("gradients"):
            self._regroup()
            self._progress.sample += 1
            for sampler in self._samplers.values():
                sampler.advance()
            for group in self._groups:
                group.forget()
                group.read_gradients(scale, histogram=self._histograms)
            read = True
        if not read:
            return
        self._count_magnitudes()
        with self._guard.part("updates"):
            for group in self._groups:
                group.read_before(self._progress.sample)
            self._complete = True

    @torch.no_grad()
    def reread_gradients(self, scale: torch.Tensor | None) -> None:
        """Read the gradients again: a closure computed them anew since ``begin``."""
        with self._guard.part("gradients"):
            for group in self._groups:
                group.read_gradients(scale, histogram=self._histograms)
        self._count_magnitudes()

    def _count_magnitudes(self) -> None:
        if self._histograms:
            with self._guard.part("histograms"):
                for group in self._groups:
                    group.count_magnitudes()

    @torch.no_grad()
    def end(self) -> tuple[list[torch.Tensor], Decode] | None:
        """Read the weights after the step; returns what to read out, None if something failed."""
        complete, self._complete = self._complete, False
        if not complete:
            return None
        with self._guard.part("updates"):
            for group in self._groups:
                group.read_after()
            return self._take()
        return None

    def _take(self) -> tuple[list[torch.Tensor], Decode]:
        taken = [group.take() for group in self._groups]
        tensors = [tensor for part, _ in taken for tensor in part]

        def decode(numbers: Sequence[Sequence[float]]) -> list[ParameterReading]:
            readings: list[ParameterReading] = []
            at = 0
            for part, decode_group in taken:
                readings += decode_group(numbers[at : at + len(part)])
                at += len(part)
            return readings

        return tensors, decode

    def _regroup(self) -> None:
        """Group parameters by shape, anew when another set of them has gradients."""
        present = [p for p in self._parameters if is_readable(p.tensor)]
        signature = tuple((id(p.tensor), p.tensor.dtype, p.tensor.device, local(p.tensor).shape) for p in present)
        if signature == self._grouped:
            return
        alike: defaultdict[tuple[object, ...], list[MonitoredParameter]] = defaultdict(list)
        for parameter in present:
            t = parameter.tensor
            grad_dtype = None if t.grad is None else t.grad.dtype
            shape = local(t).shape
            kind, turn = parameter.kind == "embedding", self._turns.of.get(id(t), 0)
            alike[shape, t.dtype, grad_dtype, t.device, kind, is_partial(t.grad), turn].append(parameter)
        counted = sum(parameter.histogram is not None for parameter in present)
        magnitudes = max(FEWEST_MAGNITUDES, min(MAGNITUDES, ALL_MAGNITUDES // max(counted, 1)))
        self._groups = [self._group(members, magnitudes) for members in alike.values()]
        self._grouped = signature

    def _group(self, members: list[MonitoredParameter], magnitudes: int) -> ShapeGroup:
        first = members[0].tensor
        if first.device not in self._samplers:
            self._samplers[first.device] = Sampler(first.device)
        sampler = self._samplers[first.device]
        own = local(first).shape
        shape = (*own, 2) if first.is_complex() else own
        sparse, exact = members[0].kind == "embedding", self._updates == "exact"
        chosen = plan(shape, embedding=sparse, exact=exact, magnitudes=magnitudes)
        turn = None if self._updates == "off" else (self._turns.of.get(id(first), 0), self._turns.count)
        return ShapeGroup(members, chosen, sampler, turn=turn, last=self._progress.last)
