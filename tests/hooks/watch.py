"""A training loop beside a naive observer: clones in fp64 around every step of every optimizer, with a monitor or without."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from contextlib import ExitStack
from typing import Any

import pytest
import torch
from torch import nn
from torch.optim import Optimizer
from typing_extensions import Self

from otel_train.catalog import gradients, run, updates
from otel_train.catalog import monitor as monitor_catalog
from otel_train.config import KINDS
from otel_train.monitor import Monitor
from otel_train.sinks.memory import MemorySink
from otel_train.snapshot import Snapshot
from otel_train.testing import capture
from tests import problems

Tensors = dict[str, torch.Tensor]
STEPS = 6
TOLERANCE = 1e-5


class Watch:
    """What a loop calls; without a monitor it does as the loop would without one.

    Args:
        monitored: Whether there is a monitor.
        **settings: As for ``attach``.
    """

    def __init__(self, *, monitored: bool, **settings: Any) -> None:
        self.monitored = monitored
        self.settings = {"every_n_steps": 1, "updates": "exact", "kinds": KINDS, **settings}
        self.monitor: Monitor | None = None
        self.sink: MemorySink | None = None
        self.model: nn.Module = nn.Identity()
        self.gradients: Tensors = {}
        """Of each parameter at its last step, as its optimizer used it."""
        self.before: Tensors = {}
        self.after: Tensors = {}
        self.losses: list[float] = []
        self.steps = self.skipped = self.micro_batches = 0
        self._stack = ExitStack()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()

    def attach(self, root: nn.Module, optimizer: Any, model: nn.Module | None = None) -> None:
        """Attach to ``root``, or do not; ``model`` has the layers' plain names where the root is a wrapper."""
        self.model = model or root
        if self.monitored:
            self.monitor, self.sink = self._stack.enter_context(capture(root, optimizer, **self.settings))

    def observe(self, **values: Any) -> None:
        """Call the monitor's ``observe``."""
        if self.monitor is not None:
            self.monitor.observe(**values)

    def clip(self, max_norm: float, parameters: Iterable[torch.Tensor] | None = None) -> None:
        """Clip by the monitor where there is one, else as torch does."""
        if self.monitor is not None:
            self.monitor.clip_grad_norm_(max_norm, parameters=parameters)
        else:
            nn.utils.clip_grad_norm_(self.model.parameters() if parameters is None else parameters, max_norm)

    def own(self, optimizer: Optimizer) -> dict[str, nn.Parameter]:
        """Return the model's parameters that an optimizer has, by name."""
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        return {name: p for name, p in self.model.named_parameters() if id(p) in held and p.requires_grad}

    def step(self, optimizer: Optimizer, call: Callable[[], Any] | None = None, scale: float = 1.0) -> None:
        """Let an optimizer step, and note what it used and did; weights that stay as they are were not stepped.

        Args:
            optimizer: The optimizer.
            call: What makes it step. Default: ``optimizer.step``.
            scale: The gradients are this many times too large.
        """
        own = {name: p for name, p in self.own(optimizer).items() if p.grad is not None or call is not None}
        used = {name: p.grad.detach().double() / scale for name, p in own.items() if p.grad is not None}
        before = {name: p.detach().double().clone() for name, p in own.items()}
        (call or optimizer.step)()
        after = {name: p.detach().double().clone() for name, p in own.items()}
        if any(not torch.equal(before[name], after[name]) for name in own):
            self.gradients.update(used or {name: p.grad.detach().double().clone() for name, p in own.items() if p.grad is not None})
            self.before.update(before)
            self.after.update(after)

    def seen(self) -> Snapshot:
        """Return the Snapshot of everything so far."""
        assert self.monitor is not None
        assert self.sink is not None
        return problems.seen(self.monitor, self.sink)


Loop = Callable[[Watch], None]
"""Attaches, trains, and says how many steps and micro-batches that was."""


def trained(loop: Loop, *, monitored: bool) -> tuple[list[float], Tensors]:
    """Train, and return losses and weights."""
    torch.manual_seed(0)
    with Watch(monitored=monitored) as watch:
        loop(watch)
        return watch.losses, {n: p.detach().clone() for n, p in watch.model.named_parameters()}


def check_untouched(loop: Loop) -> None:
    """Losses and final weights are bit for bit those of the same loop without a monitor."""
    (bare_losses, bare), (losses, weights) = trained(loop, monitored=False), trained(loop, monitored=True)
    assert len(set(bare_losses)) > STEPS - 1
    assert losses == bare_losses
    assert all(torch.equal(weights[n], bare[n]) for n in bare)


def check_values(loop: Loop) -> Snapshot:
    """Norms, update ratios and changed shares of each layer's last step, and counts, are what the loop's own clones say."""
    with Watch(monitored=True) as watch:
        loop(watch)
        snapshot = watch.seen()
    layers = problems.by_layer(watch.model, watch.gradients)
    assert layers
    norms = {key: g.norm().item() for key, g in layers.items()}
    assert problems.layer_values(snapshot, gradients.LAYER_GRAD_NORM) == pytest.approx(norms, rel=TOLERANCE)
    whole = problems.everything(watch.gradients).norm().item()
    assert snapshot.value(gradients.GRAD_NORM, stage="post_clip") == pytest.approx(whole, rel=TOLERANCE)
    ratios = problems.naive_ratios(watch.model, watch.before, watch.after, KINDS)
    assert problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO) == pytest.approx(ratios, rel=TOLERANCE)
    late = problems.by_layer(watch.model, watch.after)
    changed = {
        key: (early != late[key]).double().mean().item() for key, early in problems.by_layer(watch.model, watch.before).items()
    }
    assert problems.layer_values(snapshot, updates.LAYER_CHANGED_RATIO) == pytest.approx(changed, rel=TOLERANCE)
    ratio = problems.ratio(problems.everything(watch.before), problems.everything(watch.after))
    assert snapshot.value(updates.UPDATE_RATIO) == pytest.approx(ratio, rel=TOLERANCE)
    assert snapshot.value(run.STEPS) == snapshot.value(run.STEP) == snapshot.value(run.SAMPLED_STEP) == watch.steps
    assert snapshot.value(run.MICRO_BATCHES) == watch.micro_batches
    assert snapshot.value(run.SKIPPED_STEPS) == watch.skipped
    assert sum(float(s.value) for s in snapshot.find(monitor_catalog.MONITOR_ERRORS) if isinstance(s.value, (int, float))) == 0
    return snapshot
