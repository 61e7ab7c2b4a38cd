"""No hook and no statistic reads a value of the device: run on tensors that have none.

A fake tensor raises where its value would be needed: ``item``, ``tolist``, ``cpu``, ``bincount``, boolean masks.
"""

from __future__ import annotations

import pytest
import torch
from torch import nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from otel_train.config import MonitorConfig
from otel_train.guard import Guard
from otel_train.hooks.module import ActivationMeter, Gate, RootHook, RootPreHook
from otel_train.hooks.optimizer import group_names
from otel_train.hooks.parameters import ParameterMeter
from otel_train.layers import map_layers
from otel_train.sampling import Sampler
from otel_train.stats import gradients

DEVICE = "meta"
"""Takes the branches of an accelerator; a build without CUDA cannot index fake tensors of "cuda"."""


class Everything(nn.Module):
    """Every kind of parameter, and every kind of activation: rectifying, flat at both ends, in place, over images."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(5000, 64)
        self.norm, self.large, self.small = nn.LayerNorm(64), nn.Linear(64, 512), nn.Linear(512, 8)
        self.relu, self.tanh, self.gelu = nn.ReLU(inplace=True), nn.Tanh(), nn.GELU()
        self.conv, self.silu = nn.Conv2d(1, 4, 3), nn.SiLU()

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        """Map (batch, length) tokens to logits."""
        hidden = self.relu(self.large(self.norm(self.embedding(tokens))))
        images = self.silu(self.conv(hidden.unsqueeze(1)))
        loss: torch.Tensor = self.small(self.gelu(self.tanh(hidden))).sum() + images.sum()
        return loss


@pytest.mark.parametrize("updates", ["sampled", "exact"])
def test_every_hook_runs_on_values_that_are_not_there(updates: str) -> None:
    """Forward, backward, the step and what is read out afterwards, twice: the second time with all buffers made."""
    guard = Guard()
    with FakeTensorMode(), torch.device(DEVICE):
        model = Everything()
        optimizer = torch.optim.AdamW(model.parameters())
        layer_map = map_layers(model, group_names({"AdamW": optimizer}), MonitorConfig())
        gate = Gate()
        samplers: dict[torch.device, Sampler] = {}
        activations = ActivationMeter(layer_map.sites, torch.device(DEVICE), gate, guard)
        meter = ParameterMeter(layer_map.parameters, updates, guard, samplers)
        model.register_forward_pre_hook(RootPreHook(gate, lambda *_: None), with_kwargs=True)
        model.register_forward_hook(RootHook(gate, lambda: None))
        gate.sample = True
        for scale in (None, torch.ones((), device=DEVICE)):
            model(torch.zeros(4, 16, dtype=torch.int64, device=DEVICE)).backward()
            meter.begin(scale, histograms=True)
            optimizer.step()
            measured = meter.end()
            seen, _ = activations.take()
            assert not any(guard.errors.values()), guard.errors
            assert measured is not None
            assert len(measured[0]) > 10
            assert len(seen) == 2 * len(layer_map.sites) == 8
            torch.cat([tensor.detach().reshape(-1).double() for tensor in measured[0] + seen])
    assert not any(guard.errors.values()), guard.errors


def test_a_planted_read_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above can fail."""
    plain = gradients.magnitude_samples

    def reading(*arguments: object) -> torch.Tensor:
        found: torch.Tensor = plain(*arguments)  # type: ignore[arg-type]  # as they came
        found.sum().item()
        return found

    monkeypatch.setattr(gradients, "magnitude_samples", reading)
    with pytest.raises(AssertionError, match="'histograms': 1"):
        test_every_hook_runs_on_values_that_are_not_there("sampled")
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        torch.ones(3, device=DEVICE).sum().item()
