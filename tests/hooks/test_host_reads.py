"""Nothing of ours in the training thread reads a value of the device, or waits for a copy: run on tensors that have no values.

A fake tensor raises where its value would be needed (``item``, ``tolist``, ``float``, ``bool``, ``nonzero``, boolean masks, ``bincount``).
It lets itself be copied to the host and indexed from there, which `NoWaitingCopies` does not.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any, Literal

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from otel_train.config import MonitorConfig
from otel_train.guard import Guard
from otel_train.hooks import pending
from otel_train.hooks.attachment import Attachment
from otel_train.hooks.pending import PendingMicroBatches, Step
from otel_train.hooks.recorder import Recorder
from otel_train.parallel.clip import clip_grad_norm_
from otel_train.stats import activations, gradients

DEVICE = "meta"
"""Takes the branches of an accelerator. In a build without CUDA fake tensors of "cuda" cannot be indexed (``x[0]``, ``x[:4]``,
``x[0] = y``: "not linked with support for cuda devices"), and autograd on them ends the process."""


class NoWaitingCopies(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Raises where a copy between host and device would make the host wait: every one that is not said to be non-blocking."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        result = func(*args, **(kwargs or {}))
        for source in _copied(func, args, kwargs or {}):
            if _place(source) != _place(result):
                raise RuntimeError(f"a copy from {_place(source)} to {_place(result)} that waits")
        return result


def _copied(func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> list[torch.Tensor]:
    """Return what an operation copies to where its result is, and waits for."""
    aten = torch.ops.aten
    if func in {aten.index.Tensor, aten.index_put.default, aten.index_put_.default}:
        return [index for index in args[1] if index is not None]
    if func is aten._to_copy.default and not kwargs.get("non_blocking"):
        return [args[0]]
    if func is aten.copy_.default and args[2:] != (True,) and not kwargs.get("non_blocking"):
        return [args[1]]
    return []


def _place(tensor: torch.Tensor) -> str:
    return "host" if tensor.device.type == "cpu" else "device"


class Event:
    """Stands for the accelerator's event, which no one may wait for here."""

    def record(self) -> None:
        """Take it."""

    def synchronize(self) -> None:
        raise AssertionError("the training thread waits for the device")


class Everything(nn.Module):
    """Every kind of parameter, and every kind of activation: rectifying, flat at both ends, in place, over images."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 64)
        self.norm, self.large, self.small = nn.LayerNorm(64), nn.Linear(64, 1024), nn.Linear(1024, 8)
        self.relu, self.tanh, self.gelu = nn.ReLU(inplace=True), nn.Tanh(), nn.GELU()
        self.conv, self.silu = nn.Conv2d(1, 4, 3), nn.SiLU()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) tokens to a loss."""
        hidden = self.relu(self.large(self.norm(self.embedding(tokens))))
        images = self.silu(self.conv(hidden.unsqueeze(1)))
        loss: torch.Tensor = self.small(self.gelu(self.tanh(hidden))).sum() + images.sum()
        return loss


class Descent(torch.optim.Optimizer):
    """Plain descent with settings on the device, and what a GradScaler tells fused optimizers; torch's own have none for "meta"."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {"lr": torch.full((), 0.1), "weight_decay": torch.zeros(()), "eps": 1e-8})
        self.grad_scale, self.found_inf = torch.ones(()), torch.zeros(())

    def step(self, closure: None = None) -> None:  # type: ignore[override]  # no closures here
        """Go down."""
        del closure
        with torch.no_grad():
            for parameter in self.param_groups[0]["params"]:
                parameter.sub_(parameter.grad * self.param_groups[0]["lr"])


def train(updates: Literal["sampled", "exact"]) -> tuple[Guard, list[Step | PendingMicroBatches]]:
    """Make three sampled steps with everything that a loop can tell; only attaching may copy to the device."""
    guard, emitted = Guard(), list[Step | PendingMicroBatches]()
    with FakeTensorMode(), torch.device(DEVICE):
        model = Everything()
        optimizer = Descent(model.parameters())
        config = MonitorConfig(every_n_steps=1, updates=updates)
        attachment = Attachment(
            model, {"Descent": optimizer}, config, guard=guard, clock=None, emit=emitted.append, cover=lambda _: None
        )
        with NoWaitingCopies():  # type: ignore[no-untyped-call]  # torch's
            for _ in range(3):
                train_step(model, optimizer, attachment.recorder, guard)
        attachment.remove()
    return guard, emitted


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, recorder: Recorder, guard: Guard) -> None:
    """Train a step and tell of it as a Monitor does; losses, norms and counts are on the device."""
    loss = model(torch.zeros(4, 16, dtype=torch.int64))
    loss.backward()
    norm, plain = clip_grad_norm_(list(model.parameters()), 1.0, 2.0, None, {})
    recorder.clipped(plain, 1.0, is_l2=True)
    optimizer.step()
    optimizer.zero_grad()
    tokens = torch.full((), 64, dtype=torch.int64)
    recorder.observe(loss=loss, tokens=tokens, samples=tokens, grad_norm=norm, loss_scale=1.0)
    with guard.part("loop"):
        recorder.close_step()


@pytest.fixture(autouse=True)
def accelerator(monkeypatch: pytest.MonkeyPatch) -> None:
    """Give "meta" what the read-out asks of an accelerator."""
    monkeypatch.setattr(torch, "get_device_module", lambda device: SimpleNamespace(Event=Event) if device.type == DEVICE else None)


@pytest.mark.parametrize("updates", ["sampled", "exact"])
def test_a_sampled_step_runs_on_values_that_are_not_there(updates: Literal["sampled", "exact"]) -> None:
    """Forward, clip, step, ``observe`` and read-out: losses, norms, learning rates and what a GradScaler tells are on the device."""
    guard, emitted = train(updates)
    assert not any(guard.errors.values()), guard.errors
    assert len(emitted) == 3
    for step in emitted:
        assert isinstance(step, Step)
        assert {part.optimizer is None for sample in step.samples for part in sample._parts} == {True, False}
        assert {key if isinstance(key, str) else key[0] for key, _ in step.numbers._device} == {  # type: ignore[index]  # a tuple
            "loss", "tokens", "samples", "grad_norm", "clip_norm", "part_norm", "found_inf", "grad_scale",
            "learning_rate", "weight_decay",
        }  # fmt: skip


READS: dict[str, Callable[[torch.Tensor], object]] = {
    "item": lambda t: t.sum().item(),
    "tolist": lambda t: t.tolist(),
    "float": lambda t: float(t.sum()),
    "int": lambda t: int(t.sum()),
    "bool": lambda t: bool(t.any()),
    "cpu": lambda t: t.cpu(),
    "to": lambda t: t.to("cpu", torch.float64),
    "copy_": lambda t: torch.empty(t.shape, device="cpu").copy_(t),
    "to the device": lambda t: torch.empty(3, device="cpu").to(t.device),
    "index of the host": lambda t: t.reshape(-1)[torch.zeros(1, dtype=torch.int64, device="cpu")],
    "list as index": lambda t: t.reshape(-1)[[0, 0]],
    "if": lambda t: 1 if t.sum() else 0,
    "nonzero": lambda t: t.nonzero(),
    "mask": lambda t: t[t > 0],
    "bincount": lambda t: torch.bincount(t.long().reshape(-1)),
    "equal": lambda t: torch.equal(t, t),
    "masked_select": lambda t: torch.masked_select(t, t > 0),
}
PLACES: dict[str, tuple[object, str]] = {
    "a hook": (activations, "activation_in"),
    "what the loop tells": (pending.Numbers, "add"),
    "a statistic": (gradients, "magnitudes"),
}


@contextmanager
def planted(monkeypatch: pytest.MonkeyPatch, where: str, read: Callable[[torch.Tensor], object]) -> Iterator[None]:
    """Read the tensors that a function is given."""
    owner, name = PLACES[where]
    plain = getattr(owner, name)

    def reading(*args: Any, **kwargs: Any) -> Any:
        for value in tree_leaves(args):
            if isinstance(value, torch.Tensor):
                read(value.detach())
        return plain(*args, **kwargs)

    with monkeypatch.context() as patch:
        patch.setattr(owner, name, reading)
        yield


@pytest.mark.parametrize("where", PLACES)
@pytest.mark.parametrize("read", READS)
def test_a_planted_read_is_found(monkeypatch: pytest.MonkeyPatch, where: str, read: str) -> None:
    """The test above can fail."""
    with planted(monkeypatch, where, READS[read]):
        guard, _ = train("sampled")
    assert any(guard.errors.values())


def test_a_planted_wait_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The read-out must leave its event to the monitor's own thread."""
    monkeypatch.setattr(Event, "record", Event.synchronize)
    guard, _ = train("sampled")
    assert guard.errors["readout"] == guard.errors["loop"] == 3
