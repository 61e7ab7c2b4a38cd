"""One model and its optimizers, hooked: what is measured, kept up to date when parameters are frozen, thawed or added."""

from __future__ import annotations

import logging
import math
import weakref
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.optim import Optimizer
from torch.utils.hooks import RemovableHandle

from otel_train.config import MonitorConfig
from otel_train.device import DeviceClock
from otel_train.errors import AttachError
from otel_train.guard import Guard
from otel_train.hooks.module import ActivationMeter, Gate, RootHook, RootPreHook
from otel_train.hooks.optimizer import group_names, hook_steps
from otel_train.hooks.parameters import ParameterMeter
from otel_train.hooks.pending import PendingMicroBatches, Step
from otel_train.hooks.recorder import Meters, Recorder
from otel_train.hooks.turns import Progress, Turns, memory_bound, take_turns
from otel_train.layers import LayerMap, MonitoredParameter, map_layers
from otel_train.records import Coverage, CoveredParameter
from otel_train.sampling import Sampler

_LOG = logging.getLogger("otel_train")


class Attachment:
    """The hooks of a monitor on one model.

    The model and the optimizers are held weakly: dropping them frees them.

    Args:
        model: The root module, whose forward is a micro-batch.
        optimizers: By name.
        config: The settings.
        guard: Counts time and failures.
        clock: Marks parts on the device; None on the CPU.
        emit: Takes each closed step.
        cover: Told what is monitored, now and whenever that changes.

    Raises:
        AttachError: Nothing in the model can be monitored as the settings ask.
    """

    def __init__(
        self,
        model: nn.Module,
        optimizers: Mapping[str, Optimizer],
        config: MonitorConfig,
        *,
        guard: Guard,
        clock: DeviceClock | None,
        emit: Callable[[Step | PendingMicroBatches], None],
        cover: Callable[[Coverage], None],
    ) -> None:
        self._model = weakref.ref(model)
        self._optimizers = {name: weakref.ref(optimizer) for name, optimizer in optimizers.items()}
        self._config, self._guard, self._cover = config, guard, cover
        layer_map = map_layers(model, group_names(optimizers), config)
        self._refuse_small_memory(layer_map)
        if layer_map.note:
            _LOG.warning("%s", layer_map.note)
        first = layer_map.parameters[0].tensor
        self.gate = Gate()
        self.recorder = Recorder(
            {id(optimizer): name for name, optimizer in optimizers.items()},
            every_n_steps=config.every_n_steps,
            gate=self.gate,
            guard=guard,
            emit=emit,
            dtype=first.dtype,
            times_forward=first.device.type == "cpu",
            clock=clock,
        )
        self.measured = _measured(layer_map, config, optimizers)
        """What sampled steps measure: names of parts."""
        self._signature: tuple[bool, ...] = ()
        self._group_signatures: dict[int, tuple[Any, ...]] = {}
        # made now: a sampled step would wait while they are copied to the device
        self._samplers = {device: Sampler(device) for device in {p.tensor.device for p in layer_map.parameters}}
        self._progress: dict[int, Progress] = {}
        self._meters: Meters = {}
        self._parameters: list[nn.Parameter] = []
        self._take_map(layer_map)
        self._handles = self._hook(model, optimizers, layer_map, first.device)

    def _hook(
        self, model: nn.Module, optimizers: Mapping[str, Optimizer], layer_map: LayerMap, device: torch.device
    ) -> list[RemovableHandle]:
        recorder = self.recorder
        activations = ActivationMeter(layer_map.sites, device, self.gate, self._guard)
        recorder.activations = activations if layer_map.sites else None
        recorder.remeasure = self._up_to_date
        handles = list(activations.handles)
        begin = RootPreHook(self.gate, recorder.forward_begins)
        handles.append(model.register_forward_pre_hook(begin, with_kwargs=True))
        handles.append(model.register_forward_hook(RootHook(self.gate, recorder.forward_ends), always_call=True))
        self._step_handles = [handle for optimizer in optimizers.values() for handle in hook_steps(optimizer, recorder)]
        return handles

    def _up_to_date(self, optimizer: Optimizer | None) -> Meters:
        """Return the meters, made anew if parameters were frozen, thawed or added to an optimizer.

        Args:
            optimizer: Look at its parameters only; None: at all. A GAN freezes its discriminator while the generator steps, and
                hundreds of optimizers cannot each look at everything.
        """
        model = self._model()
        changed = self._has_changed() if optimizer is None else self._has_other_groups(optimizer)
        if model is not None and changed:
            self._take_map(map_layers(model, group_names(self._live_optimizers()), self._config))
        return self._meters

    def _has_changed(self) -> bool:
        frozen = self._signature != tuple(p.requires_grad for p in self._parameters)
        return frozen or any(self._has_other_groups(optimizer) for optimizer in self._live_optimizers().values())

    def _has_other_groups(self, optimizer: Optimizer) -> bool:
        return self._group_signatures.get(id(optimizer)) != _signature(optimizer)

    def _live_optimizers(self) -> dict[str, Optimizer]:
        found = {name: reference() for name, reference in self._optimizers.items()}
        return {name: optimizer for name, optimizer in found.items() if optimizer is not None}

    def _take_map(self, layer_map: LayerMap) -> None:
        model = self._model()
        self._parameters = list(model.parameters()) if model is not None else []
        self._signature = tuple(p.requires_grad for p in self._parameters)
        self._group_signatures = {id(optimizer): _signature(optimizer) for optimizer in self._live_optimizers().values()}
        turns = self._turns(layer_map)
        self._meters = self._make_meters(layer_map, turns)
        layers, owners = dict.fromkeys(p.layer for p in layer_map.parameters if p.layer is not None), self._owners()
        self._cover(
            Coverage(
                # a complex element is two real ones, here as in every sum
                trainable_parameters=sum(p.tensor.numel() * (1 + p.tensor.is_complex()) for p in layer_map.parameters),
                dropped_layers=layer_map.dropped_layers,
                layers=tuple(layers),
                sites=tuple((site.layer, site.depth) for site in layer_map.sites),
                parameters=tuple(
                    CoveredParameter(p.name, p.tensor.numel() * (1 + p.tensor.is_complex()), p.layer, owners(p.tensor))
                    for p in layer_map.parameters
                ),
                update_turns=turns.count,
            )
        )

    def _owners(self) -> Callable[[torch.Tensor], int | None]:
        """Return what tells the ``id`` of the optimizer whose steps look at a parameter.

        Parameters in no optimizer go with the first, so that they show as unmoved; None where there is no optimizer at all.
        """
        live = self._live_optimizers().values()
        owners = {
            id(parameter): id(optimizer)
            for optimizer in reversed(live)
            for group in optimizer.param_groups
            for parameter in group["params"]
        }
        first = next((id(optimizer) for optimizer in live), None)
        return lambda parameter: owners.get(id(parameter), first)

    def _turns(self, layer_map: LayerMap) -> Turns:
        parameters, updates = layer_map.parameters, self._config.updates
        return take_turns(parameters, updates, memory_bound(parameters, updates, self._config.update_memory_mb))

    def _refuse_small_memory(self, layer_map: LayerMap) -> None:
        given, (name, size) = self._config.update_memory_mb, self._turns(layer_map).largest
        least = size / (1 << 20)
        if given is not None and given < least:
            needed = math.ceil(10 * least) / 10
            raise AttachError(f"update_memory_mb: expected at least {needed:g}, which {name} takes alone, got {given:g}")

    def _make_meters(self, layer_map: LayerMap, turns: Turns) -> Meters:
        """Give each optimizer a meter for its parameters."""
        owner = self._owners()
        members: dict[int, list[MonitoredParameter]] = {id(optimizer): [] for optimizer in self._live_optimizers().values()}
        for parameter in layer_map.parameters:
            optimizer = owner(parameter.tensor)
            if optimizer is not None:
                members[optimizer].append(parameter)
        progress = {i: self._progress.setdefault(i, Progress()) for i in members}
        return {
            i: ParameterMeter(found, self._config.updates, turns, progress[i], guard=self._guard, samplers=self._samplers)
            for i, found in members.items()
        }

    def remove(self) -> None:
        """Remove all hooks and let go of the parameters; twice is harmless."""
        for handle in self._handles:
            handle.remove()
        if not self.recorder.in_step:  # else torch iterates over them just now; without meters they do nothing
            for handle in self._step_handles:
                handle.remove()
        self._handles, self._meters, self._parameters = [], {}, []
        self.recorder.remeasure, self.recorder.activations = None, None
        self.gate.sample = False
        self.gate.shut()
        self.gate.rest()
        self.recorder.release()


def _measured(layer_map: LayerMap, config: MonitorConfig, optimizers: Mapping[str, Optimizer]) -> tuple[str, ...]:
    around_steps = {
        "gradients": True,
        "histograms": any(parameter.histogram is not None for parameter in layer_map.parameters),
        "updates": config.updates != "off",
    }
    parts = [part for part, is_on in around_steps.items() if is_on and optimizers]
    return (*parts, "activations") if layer_map.sites else tuple(parts)


def _signature(optimizer: Optimizer) -> tuple[Any, ...]:
    """Return what changes when an optimizer is given parameters, or its own are frozen or thawed."""
    return tuple((len(group["params"]), *(p.requires_grad for p in group["params"])) for group in optimizer.param_groups)
