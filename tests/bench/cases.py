"""The cases that are compared: nothing, otel-train in several settings, and what others do."""

from __future__ import annotations

import contextlib
import importlib
import importlib.util
import tempfile
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

import otel_train
from otel_train.catalog.monitor import MONITOR_SECONDS
from otel_train.snapshot import HistogramValue
from tests.bench.models import Training


class Watch:
    """What a case does around the steps of a training; this one does nothing."""

    def __init__(self, training: Training) -> None:
        self.training = training

    def begin_turn(self) -> None:
        """The case's steps are timed from now on."""

    def end_turn(self) -> None:
        """The case's steps have been timed; others train."""

    def observe(self, loss: torch.Tensor) -> None:
        """Take part in a step, at its end: within the time that is measured."""

    def seconds(self) -> Mapping[str, float]:
        """Return its own measured seconds so far, by part."""
        return {}

    def values(self) -> int:
        """Return how many numbers a sample of its layers exports."""
        return 0

    def close(self) -> None:
        """Let go of the training."""


class Monitored(Watch):
    """otel-train, warm through all its turns: the training of others is a phase of its own, and is not the monitor's step time."""

    def __init__(self, training: Training, **settings: Any) -> None:
        super().__init__(training)
        self.monitor = otel_train.attach(training.model, training.optimizer, **{"port": 0, "run": "bench", **settings})
        self._away = contextlib.ExitStack()
        self._away.enter_context(self.monitor.phase("others"))

    def begin_turn(self) -> None:
        self._away.close()
        self.monitor.flush()

    def end_turn(self) -> None:
        # its own thread must not work while others are timed; what it costs is in its seconds
        self.monitor.flush()
        self._away.enter_context(self.monitor.phase("others"))
        self.monitor.flush()

    def observe(self, loss: torch.Tensor) -> None:
        self.monitor.observe(loss=loss, tokens=self.training.tokens)

    def seconds(self) -> Mapping[str, float]:
        snapshot = self.monitor.snapshot
        samples = [] if snapshot is None else snapshot.find(MONITOR_SECONDS)
        return {s.labels[0]: s.value for s in samples if isinstance(s.value, float)}

    def values(self) -> int:
        snapshot = self.monitor.snapshot
        samples = [] if snapshot is None else [s.value for s in snapshot.samples if "layer" in s.spec.labels]
        return sum(len(value.counts) + 1 if isinstance(value, HistogramValue) else 1 for value in samples)

    def close(self) -> None:
        self.monitor.close(linger_seconds=0)


class Seed(Watch):
    """What the request for this monitor showed as its way: a host read a value, and `lr * grad` for the update."""

    def __init__(self, training: Training) -> None:
        super().__init__(training)
        self._read: list[float] = []
        self._values, self._seconds = 0, 0.0
        modules = [module for module in training.model.modules() if isinstance(module, nn.GELU)]
        self._handles = [module.register_forward_hook(self._see) for module in modules]

    def _see(self, module: nn.Module, args: tuple[torch.Tensor, ...], output: torch.Tensor) -> None:
        del module
        started = time.perf_counter()
        for value in (args[0].detach(), output.detach()):
            self._read += [value.mean().item(), value.std().item()]
        self._seconds += time.perf_counter() - started

    def observe(self, loss: torch.Tensor) -> None:
        del loss
        started = time.perf_counter()
        for parameter in self.training.model.parameters():
            gradient, rate = parameter.grad, self.training.optimizer.param_groups[0]["lr"]
            if gradient is not None:
                update = (gradient * rate).std().cpu() / parameter.detach().std().cpu()
                self._read += [update.log10().item(), gradient.mean().item(), gradient.std().item()]
        self._values, self._read = len(self._read), []
        self._seconds += time.perf_counter() - started

    def seconds(self) -> Mapping[str, float]:
        return {"seed": self._seconds}

    def values(self) -> int:
        return self._values

    def close(self) -> None:
        for handle in self._handles:
            handle.remove()


class Wandb(Watch):
    """The real ``wandb.watch(log="all")``, offline, with ``wandb.log`` at the steps at which it has something to send.

    It hooks the parameters themselves, which all cases share: so it watches during its turns only.
    """

    _BINS = 64

    def __init__(self, training: Training, every_n_steps: int) -> None:
        super().__init__(training)
        self._wandb, self._every, self._step = importlib.import_module("wandb"), every_n_steps, 0
        self._folder = tempfile.TemporaryDirectory(prefix="bench-wandb-")
        quiet = self._wandb.Settings(silent=True, console="off", x_disable_stats=True)
        self._wandb.init(mode="offline", dir=self._folder.name, settings=quiet, reinit="return_previous")

    def begin_turn(self) -> None:
        self._step = 0
        self._wandb.watch(self.training.model, log="all", log_freq=self._every, idx=0)

    def end_turn(self) -> None:
        self._wandb.unwatch(self.training.model)

    def observe(self, loss: torch.Tensor) -> None:
        self._step += 1
        if self._step % self._every == 0:
            self._wandb.log({"loss": loss.item()})

    def values(self) -> int:
        tensors = 2 * sum(1 for _ in self.training.model.parameters())  # weights and gradients
        return tensors * (self._BINS + 2)  # the ends of the bins follow from two of them

    def close(self) -> None:
        self._wandb.finish()
        self._folder.cleanup()


@dataclass(frozen=True)
class Case:
    """A case by name: what it is in a few words, and how it takes part in a training."""

    name: str
    brief: str
    attach: Callable[[Training], Watch]


UNBOUNDED: dict[str, Any] = {"max_overhead": None}
"""Settings without the budget: what is asked for is measured, whatever it costs."""
_GRADIENTS: dict[str, Any] = {"histograms": "off", "updates": "off", "activations": False}


def _monitored(**settings: Any) -> Callable[[Training], Watch]:
    return lambda training: Monitored(training, **{**UNBOUNDED, **settings})


CASES = {
    case.name: case
    for case in (
        Case("none", "no monitoring", Watch),
        Case("again", "no monitoring, once more: the noise", Watch),
        Case("default", "otel-train, default settings", Monitored),
        Case("every-10", "otel-train, every 10 steps, without a budget", _monitored(every_n_steps=10)),
        Case("every-step", "otel-train, a sampled step, everything on", _monitored(every_n_steps=1)),
        Case("between", "otel-train, a step between samples", _monitored(every_n_steps=10**6)),
        Case("gradients", "a sampled step, gradients alone", _monitored(every_n_steps=1, **_GRADIENTS)),
        Case("histograms", "… and histograms", _monitored(every_n_steps=1, **{**_GRADIENTS, "histograms": "block"})),
        Case("updates", "… gradients and updates", _monitored(every_n_steps=1, **{**_GRADIENTS, "updates": "sampled"})),
        Case("activations", "… gradients and activations", _monitored(every_n_steps=1, **{**_GRADIENTS, "activations": True})),
        Case("exact", "a sampled step, everything on, updates exact", _monitored(every_n_steps=1, updates="exact")),
        Case("seed", "the seed's method, every step", Seed),
        Case("watch", 'wandb.watch(log="all"), every step', lambda training: Wandb(training, 1)),
        Case("watch-10", 'wandb.watch(log="all"), every 10 steps', lambda training: Wandb(training, 10)),
    )
}


def missing() -> dict[str, str]:
    """Return the cases that cannot run here, and why."""
    if importlib.util.find_spec("wandb") is not None:
        return {}
    return dict.fromkeys(("watch", "watch-10"), "wandb is not installed (the extra `test`)")
