"""A row of the table on one rank: trained without the monitor, then with it; what it exported, and whether it changed anything."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator
from dataclasses import dataclass, field
from math import prod
from typing import Any

import torch
from torch import distributed, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.pipelining import PipelineStage, Schedule1F1B, ScheduleGPipe
from torch.distributed.tensor import DTensor

from otel_train.sinks.memory import MemorySink
from otel_train.snapshot import HistogramValue, Snapshot
from otel_train.testing import capture
from tests.parity.cases import GIVEN_FLOPS, Case, stage_children
from tests.parity.model import TOKENS, Net, batch, loss_of
from tests.parity.reference import optimizers_of
from tests.problems import kind_of

KINDS = ("matrix", "embedding", "norm", "vector")
Series = list[tuple[str, dict[str, str], float]]
"""Name, labels, value; of a histogram, the number of its elements, their sum, and the number of those below zero."""
_meshes: dict[Any, DeviceMesh] = {}


@dataclass
class Run:
    """One training."""

    losses: list[float] = field(default_factory=list)
    """Local, averaged over the micro-batches; none on ranks without the loss."""
    norms: list[float] = field(default_factory=list)
    """What clipping returned."""
    weights: list[torch.Tensor] = field(default_factory=list)
    random_state: torch.Tensor | None = None
    series: list[Series] = field(default_factory=list)
    """After the first and after the last step."""
    base_labels: dict[str, str] = field(default_factory=dict)
    truth: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Norms of each parameter's whole gradient and whole new value in the last step, without the monitor."""
    local: dict[tuple[str, str], dict[str, float]] = field(default_factory=dict)
    """Layer and kind to what this rank's own part shows, measured naively."""


@dataclass
class Outcome:
    """What a rank reports."""

    run: Run
    bare: Run
    same_weights: bool
    same_random_state: bool
    warnings: list[str]


def full(tensor: torch.Tensor) -> torch.Tensor:
    """Return the whole of a tensor."""
    return tensor.full_tensor() if isinstance(tensor, DTensor) else tensor


def local(tensor: torch.Tensor) -> torch.Tensor:
    """Return this rank's part of a tensor."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


def mesh_of(case: Case) -> Any:
    """Return the row's mesh, None for a single process; each shape is made once, since each makes groups."""
    if not case.dims:
        return None
    names, sizes = zip(*case.dims, strict=True)
    if (names, sizes) not in _meshes:
        assert prod(sizes) == distributed.get_world_size()
        _meshes[names, sizes] = init_device_mesh("cpu", sizes, mesh_dim_names=names)
    return _meshes[names, sizes]


def run_case(case: Case) -> Outcome:
    """Train a row both ways."""
    torch._dynamo.reset()
    bare = _Training(case).train(monitored=False)
    torch._dynamo.reset()
    with _warnings() as said:
        seen = _Training(case).train(monitored=True)
    assert bare.random_state is not None
    assert seen.random_state is not None
    same = all(torch.equal(a, b) for a, b in zip(bare.weights, seen.weights, strict=True))
    bare.weights, seen.weights = [], []
    return Outcome(seen, bare, same, torch.equal(bare.random_state, seen.random_state), said)


@contextlib.contextmanager
def _warnings() -> Iterator[list[str]]:
    """Yield what the monitor's logger says from warnings up."""
    said: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("otel_train").addHandler(handler)
    try:
        yield said
    finally:
        logging.getLogger("otel_train").removeHandler(handler)


class _Training:
    def __init__(self, case: Case) -> None:
        self.case = case
        self.rank = distributed.get_rank() if case.dims else 0
        self.mesh = mesh_of(case)
        self.data = case.data_index(self.rank)
        whole = case.build()
        if case.own_experts:
            whole.experts = nn.ModuleList([whole.experts[self.data]])
        self.model: Any = self._stage(whole) if case.stages > 1 else case.shard(whole, self.mesh)
        self.optimizers = optimizers_of(case.optimizer, self.model)
        self.scaler = torch.amp.GradScaler("cpu", init_scale=1024.0) if case.infinite_step is not None else None
        self.monitor: Any = None
        self.run = Run()

    def _stage(self, whole: Net) -> nn.Module:
        case, stage = self.case, self.case.stage_of(self.rank)
        children = stage_children(case.net, case.stages)[stage]
        model = case.shard(nn.Sequential(*(whole.get_submodule(child) for child in children)), self.mesh)
        group = self.mesh["pp"].get_group()
        made = PipelineStage(model, stage, case.stages, torch.device("cpu"), group=group)
        kind = {"GPipe": ScheduleGPipe, "1F1B": Schedule1F1B}[case.schedule]
        self.schedule: Any = kind(made, n_microbatches=case.micro, loss_fn=loss_of)
        return model

    def train(self, *, monitored: bool) -> Run:
        """Make all steps."""
        if not monitored:
            self._steps(None)
        else:
            with capture(self.model, self.optimizers, **self._settings()) as (self.monitor, sink):
                self._steps(sink)
        self.run.weights = [local(p.detach()).clone() for p in self.model.parameters()]
        self.run.random_state = torch.get_rng_state()
        return self.run

    def _settings(self) -> dict[str, Any]:
        settings: dict[str, Any] = {
            "updates": "exact", "every_n_steps": 1, "kinds": KINDS, "signed_histograms": True, **self.case.settings,
        }  # fmt: skip
        if not self.case.net.attention:
            settings["flops_per_token"] = GIVEN_FLOPS
        if self.case.gives_mesh:
            settings["mesh"] = self.mesh
        if self.case.own_experts:
            settings["groups"] = {"experts.*": [self.rank]}
        return settings

    def _steps(self, sink: MemorySink | None) -> None:
        for step in range(self.case.steps):
            self._gradients(step)
            last = step == self.case.steps - 1
            before = [local(p.detach()).clone() for p in self.model.parameters()]
            self._optimize()
            if last:
                self._look(before)
            if last and sink is None:
                self._gather()
            for optimizer in self.optimizers.values():
                optimizer.zero_grad()
            if sink is not None and (step == 0 or last):
                assert self.monitor.flush()
                assert sink.last is not None
                self.run.series.append(flat(sink.last))
                self.run.base_labels = dict(sink.last.base_labels)

    def _gradients(self, step: int) -> None:
        case = self.case
        losses = self._pipeline(step) if case.stages > 1 else [self._micro_batch(step, micro) for micro in range(case.micro)]
        if losses:
            self.run.losses.append(torch.stack(losses).mean().item())
        if case.loop.startswith("manual"):
            self._average()

    def _average(self) -> None:
        """Average the gradients of plain parameters over the ranks with other data."""
        for name, p in self.model.named_parameters():
            if p.grad is not None and not isinstance(p, DTensor):
                if not (self.case.own_experts and name.startswith("experts.")):
                    distributed.all_reduce(p.grad, group=self.mesh["dp"].get_group())
                p.grad /= self.case.replicas

    def _micro_batch(self, step: int, micro: int) -> torch.Tensor:
        case, last = self.case, micro == self.case.micro - 1
        if case.loop == "late_sync":
            self.model.set_requires_gradient_sync(last)
        inputs, targets = batch(case.net, step, self.data * case.micro + micro)
        with self.model.no_sync() if case.loop == "no_sync" and not last else contextlib.nullcontext():
            with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "autocast"):
                loss = loss_of(self.model(inputs), targets)
            if step == case.infinite_step and self.data == 0:
                loss = loss * float("inf")
            scaled = loss / case.micro
            (self.scaler.scale(scaled) if self.scaler else scaled).backward()  # type: ignore[no-untyped-call]  # torch's
        if self.monitor is not None:
            self.monitor.observe(loss=loss.detach(), tokens=TOKENS)
        return loss.detach()

    def _pipeline(self, step: int) -> list[torch.Tensor]:
        case, stage = self.case, self.case.stage_of(self.rank)
        pieces = [batch(case.net, step, self.data * case.micro + micro) for micro in range(case.micro)]
        inputs, targets = (torch.cat(parts) for parts in zip(*pieces, strict=True))
        losses: list[torch.Tensor] = []
        if stage == 0:
            self.schedule.step(inputs)
        else:
            self.schedule.step(target=targets, losses=losses)
        losses = [loss.detach() for loss in losses]
        if self.monitor is not None:
            loss = {"loss": torch.stack(losses).mean()} if losses else {}
            self.monitor.observe(tokens=TOKENS * case.micro, **loss)
        return losses

    def _optimize(self) -> None:
        case = self.case
        if self.scaler and (case.unscale or case.clip is not None):
            for optimizer in self.optimizers.values():
                self.scaler.unscale_(optimizer)
        if case.clip is not None:
            ours = self.monitor is not None
            norm = self.monitor.clip_grad_norm_(case.clip) if ours else self._clip(case.clip)
            self.run.norms.append(full(norm).item())
        for optimizer in self.optimizers.values():
            if self.scaler:
                self.scaler.step(optimizer)
            else:
                optimizer.step()
        if self.scaler:
            self.scaler.update()
            if self.monitor is not None:
                self.monitor.observe(loss_scale=self.scaler.get_scale())

    def _clip(self, max_norm: float) -> torch.Tensor:
        """Clip as torch does, or would if it could."""
        parameters = [p for p in self.model.parameters() if p.grad is not None]
        if self.case.same == 0:
            return nn.utils.clip_grad_norm_(parameters, max_norm)
        squares = torch.stack([full(p.grad).square().sum() for p in parameters]).sum()
        if self.case.stages > 1:
            distributed.all_reduce(squares, group=self.mesh["pp"].get_group())
        if self.case.own_experts:
            mine = torch.stack([p.grad.square().sum() for p in self.model.experts.parameters()]).sum()
            theirs = mine.clone()
            distributed.all_reduce(theirs)
            squares += theirs - mine
        norm = squares.sqrt()
        for p in parameters:
            local(p.grad).mul_(torch.clamp(max_norm / (norm + 1e-6), max=1.0))
        return norm

    def _gather(self) -> None:
        for name, p in self.model.named_parameters():
            if p.grad is not None:
                plain_name = name.removeprefix("module.").replace("_checkpoint_wrapped_module.", "")
                self.run.truth[plain_name] = tuple(full(t.detach()).double().norm().item() for t in (p.grad, p))

    def _look(self, before: list[torch.Tensor]) -> None:
        """Measure this rank's own part of each layer, naively."""
        if self.case.settings.get("layers_on") != "all":
            return
        parts: dict[tuple[str, str], list[list[torch.Tensor]]] = {}
        for (name, p), old in zip(self.model.named_parameters(), before, strict=True):
            found = parts.setdefault((name.rpartition(".")[0], kind_of(self.model, name)), [[], [], []])
            for into, tensor in zip(found, (p.grad, old, p), strict=True):
                into.append(local(tensor.detach()).double().flatten())
        for key, found in parts.items():
            grad, early, late = (torch.cat(tensors) for tensors in found)
            norm = early.norm().item()
            self.run.local[key] = {"local_layer_grad_norm": grad.norm().item(), "local_layer_param_norm": norm}
            if norm:
                self.run.local[key]["local_layer_update_ratio"] = (late - early).norm().item() / norm


def flat(snapshot: Snapshot) -> Series:
    """Return a Snapshot as plain values that can be sent."""
    found: Series = []
    for sample in snapshot.samples:
        labels = dict(zip(sample.spec.labels, sample.labels, strict=True))
        name, value = sample.spec.prometheus_name, sample.value
        if isinstance(value, HistogramValue):
            found.append((f"{name}_sum", labels, value.total))
            found.append((f"{name}_negative", labels, float(sum(value.negative))))
            value = sum(value.counts)
        found.append((name, labels, float(value)))
    return found
