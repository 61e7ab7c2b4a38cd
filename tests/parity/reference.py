"""The same training in one process, fp32, with the same split of the batch, and naive statistics of it in fp64; no otel-train."""

from __future__ import annotations

import copy
import statistics
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn

from tests.parity.cases import GIVEN_FLOPS, Case, stage_children
from tests.parity.model import LENGTH, Net, batch, loss_of
from tests.problems import kind_of

EPSILON = 1e-5
"""AdamW's. With its default, 1e-8, the last bits of gradients that are near 0 decide over the first steps."""
SMALLEST = 2.0**-46
"""What is as small as that has no sign in a histogram."""
Key = tuple[int, str, str]
"""Owning rank, layer, and kind or site."""


@dataclass
class Step:
    """What one step should show."""

    layers: dict[str, dict[Key, float]] = field(default_factory=lambda: defaultdict(dict))
    """By metric, without the prefix ``otel_train_layer_``."""
    whole: dict[str, float] = field(default_factory=dict)
    """Values of the whole model."""
    elements: dict[Key, int] = field(default_factory=dict)
    rms: dict[Key, float] = field(default_factory=dict)
    """Root mean square of the gradient, or of the activation: what errors of means are measured by."""
    losses: list[float] = field(default_factory=list)
    """By piece."""
    absolute_sum: float = 0.0
    """Of the gradients of matrices and embeddings: what their histograms add up to."""
    signed_sum: float = 0.0
    """The same with their signs."""
    negatives: int = 0
    """Elements of them below zero, by more than the smallest bound."""
    truth: dict[tuple[int, str], tuple[float, float]] = field(default_factory=dict)
    """Owner and parameter to the norms of its gradient and of its new value: what the row's own training must have."""


@dataclass
class Reference:
    """What the whole training should show."""

    steps: list[Step]
    """Those that happened, in order."""
    trainable: int
    flops: float
    """A token needs."""
    order: list[tuple[int, str]]
    """Owner and path of everything with a depth, in the order of registration."""


class Places:
    """Where the series of a parameter or module of the whole model stand: owner and path, as the sharded model has it."""

    def __init__(self, case: Case) -> None:
        self.prefixes: dict[str, tuple[int, str]] = {}
        if case.stages > 1:
            for stage, children in enumerate(stage_children(case.net, case.stages)):
                self.prefixes.update({child: (case.owner(stage), str(i)) for i, child in enumerate(children)})
        if case.own_experts:
            self.prefixes.update({f"experts.{i}": (0, "experts.0") for i in range(case.net.experts)})

    def __call__(self, path: str) -> tuple[int, str]:
        """Return the owner and the path there."""
        for prefix, (owner, name) in self.prefixes.items():
            if path == prefix or path.startswith(prefix + "."):
                return owner, name + path.removeprefix(prefix)
        return 0, path


class _Activations:
    """Clones what goes into and out of activation modules."""

    def __init__(self, case: Case, model: nn.Module, places: Places) -> None:
        self.seen: defaultdict[Key, list[torch.Tensor]] = defaultdict(list)
        for path, module in model.named_modules():
            if isinstance(module, nn.GELU):
                owner, name = places(path)
                place = owner, _layer(name, case)
                module.register_forward_hook(lambda _, inputs, output, place=place: self._see(place, inputs[0], output))

    def _see(self, place: tuple[int, str], before: torch.Tensor, after: torch.Tensor) -> None:
        for site, value in (("pre", before), ("post", after)):
            self.seen[(*place, site)].append(value.detach().double().flatten())

    def into(self, step: Step) -> None:
        """Write their statistics, and forget."""
        for key, parts in self.seen.items():
            x = torch.cat(parts)
            step.layers["activation_mean"][key] = x.mean().item()
            step.layers["activation_std"][key] = x.std(correction=0).item()
            step.layers["activation_absmax"][key] = x.abs().max().item()
            step.layers["activation_zero_ratio"][key] = (x == 0).double().mean().item()
            step.rms[key] = x.square().mean().sqrt().item()
        self.seen.clear()


def optimizers_of(kind: str, model: nn.Module) -> dict[str, torch.optim.Optimizer]:
    """Make the optimizers of a row."""
    parameters = [p for p in model.parameters() if p.requires_grad]
    if kind == "sgd":
        return {"sgd": torch.optim.SGD(parameters, lr=0.05, momentum=0.9)}
    if kind == "several":
        small = [p for p in parameters if p.dim() < 2]
        large = [p for p in parameters if p.dim() >= 2]
        return {
            "large": torch.optim.SGD(large, lr=0.05, momentum=0.9),
            "small": torch.optim.AdamW(small, lr=1e-3, eps=EPSILON),
        }
    return {"adamw": torch.optim.AdamW(parameters, lr=1e-3, eps=EPSILON, fused=kind == "fused")}


def backward(case: Case, model: Net, step: int) -> list[float]:
    """Fill the gradients with the average over all pieces, and return the pieces' losses."""
    half = case.precision == "bf16 shards"
    runs = copy.deepcopy(model).bfloat16() if half else model  # with its hooks
    losses = []
    for piece in range(case.pieces):
        if hasattr(runs, "experts"):
            runs.tokens_of = piece // case.micro
        inputs, targets = batch(case.net, step, piece)
        with torch.autocast("cpu", torch.bfloat16, enabled=case.precision == "autocast"):
            loss = loss_of(runs(inputs), targets)
        losses.append(loss.item())
        (loss if half else loss / case.pieces).backward()  # type: ignore[no-untyped-call]  # torch's
        if half:  # as FSDP2 does: gradients in bf16, their average in fp32
            for mine, theirs in zip(model.parameters(), runs.parameters(), strict=True):
                grad = theirs.grad.float() / case.pieces if theirs.grad is not None else torch.zeros_like(mine)
                mine.grad = grad if mine.grad is None else mine.grad + grad
                theirs.grad = None
    return losses


def clip(parameters: Any, max_norm: float) -> float:
    """Clip as torch defines it, and return the norm before."""
    grads = [p.grad for p in parameters if p.grad is not None]
    norm: float = torch.cat([g.double().flatten() for g in grads]).norm().item()
    for grad in grads:
        grad.mul_(min(1.0, max_norm / (norm + 1e-6)))
    return norm


def reference(case: Case) -> Reference:
    """Train, and look."""
    model, places = case.build(), Places(case)
    activations = _Activations(case, model, places)
    optimizers = optimizers_of(case.optimizer, model)
    steps = []
    for number in range(case.steps):
        step = Step()
        step.losses = backward(case, model, number)
        activations.into(step)
        if number != case.infinite_step:
            if case.clip is not None:
                step.whole["pre_clip"] = clip(model.parameters(), case.clip)
            before = _by_key(model, places, {n: p for n, p in model.named_parameters() if p.requires_grad}, case)
            grads = _by_key(model, places, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}, case)
            for optimizer in optimizers.values():
                optimizer.step()
            after = _by_key(model, places, {n: p for n, p in model.named_parameters() if p.requires_grad}, case)
            _layers_into(step, grads, before, after)
            _whole_into(step, grads, before, after)
            for name, p in model.named_parameters():
                if p.grad is not None:
                    owner, path = places(name.rpartition(".")[0])
                    norms = p.grad.double().norm().item(), p.detach().double().norm().item()
                    step.truth[owner, f"{path}.{name.rpartition('.')[2]}"] = norms
            steps.append(step)
        model.zero_grad()
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    return Reference(steps, trainable, _flops(case, model), _order(model, places))


def _flops(case: Case, model: nn.Module) -> float:
    if not case.net.attention:
        return GIVEN_FLOPS
    matrices = sum(m.weight.numel() for m in model.modules() if isinstance(m, nn.Linear))
    return 6 * matrices + 12 * case.net.blocks * case.net.width * LENGTH


def _order(model: nn.Module, places: Places) -> list[tuple[int, str]]:
    seen: set[int] = set()
    found = []
    for path, module in model.named_modules():
        own = [p for p in module.parameters(recurse=False) if id(p) not in seen]
        seen.update(id(p) for p in own)
        if (own or isinstance(module, nn.GELU)) and places(path) not in found:
            found.append(places(path))
    return found


def _layer(path: str, case: Case) -> str:
    if case.settings.get("layers") == "block":
        return ".".join(path.split(".")[:2]) if path.startswith("blocks.") else path.partition(".")[0]
    return path


def _by_key(model: nn.Module, places: Places, tensors: Mapping[str, torch.Tensor | None], case: Case) -> dict[Key, torch.Tensor]:
    parts: defaultdict[Key, list[torch.Tensor]] = defaultdict(list)
    for name, tensor in tensors.items():
        assert tensor is not None
        owner, path = places(name.rpartition(".")[0])
        parts[owner, _layer(path, case), kind_of(model, name)].append(tensor.detach().double().flatten())
    return {key: torch.cat(found).clone() for key, found in parts.items()}


def _layers_into(
    step: Step, grads: Mapping[Key, torch.Tensor], before: Mapping[Key, torch.Tensor], after: Mapping[Key, torch.Tensor]
) -> None:
    for key, grad in grads.items():
        step.elements[key] = grad.numel()
        if key[2] in {"matrix", "embedding"}:
            step.absolute_sum += grad.abs().sum().item()
            step.signed_sum += grad.sum().item()
            step.negatives += int((grad < -SMALLEST).sum())
        step.rms[key] = grad.norm().item() / grad.numel() ** 0.5
        step.layers["grad_norm"][key] = grad.norm().item()
        step.layers["grad_mean"][key] = grad.mean().item()
        step.layers["grad_std"][key] = grad.std(correction=0).item()
        step.layers["param_norm"][key] = before[key].norm().item()
        step.layers["parameters"][key] = float(grad.numel())
        step.layers["changed_ratio"][key] = (before[key] != after[key]).double().mean().item()
        if before[key].norm() > 0:
            step.layers["update_ratio"][key] = ((after[key] - before[key]).norm() / before[key].norm()).item()
    ratios = step.layers["update_ratio"]
    median = statistics.median([value for key, value in ratios.items() if key[2] == "matrix"] or ratios.values())
    step.layers["relative_speed"] = {key: value / median for key, value in ratios.items()}


def _whole_into(
    step: Step, grads: Mapping[Key, torch.Tensor], before: Mapping[Key, torch.Tensor], after: Mapping[Key, torch.Tensor]
) -> None:
    old, new = torch.cat(list(before.values())), torch.cat([after[key] for key in before])
    step.whole["post_clip"] = torch.cat(list(grads.values())).norm().item()
    step.whole["param_norm"] = old.norm().item()
    step.whole["update_ratio"] = ((new - old).norm() / old.norm()).item()
