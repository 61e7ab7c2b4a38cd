"""What monitoring holds and makes is bounded: no copy of the model, no growth with steps, kilobytes to the host."""

from __future__ import annotations

import resource
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from otel_train.readout import read_out
from otel_train.testing import capture


class Largest(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes the largest tensor that an operation makes, in bytes; views and results in place are none."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.bytes = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        known = {t.untyped_storage().data_ptr() for t in tree_leaves((args, kwargs)) if isinstance(t, torch.Tensor)}
        for tensor in tree_leaves(result):
            if isinstance(tensor, torch.Tensor) and tensor.untyped_storage().data_ptr() not in known:
                self.bytes = max(self.bytes, tensor.untyped_storage().nbytes())
        return result


def step(model: nn.Module, optimizer: torch.optim.Optimizer, units: int) -> None:
    """Compute gradients and step."""
    model(torch.ones(2, units)).square().mean().backward()
    optimizer.step()
    optimizer.zero_grad(set_to_none=False)


@pytest.mark.parametrize("units", [1024, 3072])
def test_a_sampled_step_makes_no_copy_of_a_large_layer(units: int) -> None:
    """wandb/wandb #2460, THUDM/slime #451, ISEEKYAN/Megatron-LM #186: 4 and 36 MiB of weights, less than 2 MiB made at once."""
    model = nn.Linear(units, units, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=False)
    with capture(model, optimizer, every_n_steps=1):
        for _ in range(2):
            model(torch.ones(2, units)).square().mean().backward()
            with Largest() as largest:
                optimizer.step()
    assert 0 < largest.bytes < 2 << 20


def test_what_goes_to_the_host_does_not_grow_with_the_layers(monkeypatch: pytest.MonkeyPatch) -> None:
    """huggingface/transformers #27233, where a dump of the weights took 20 minutes: some hundred numbers a layer."""
    sizes: list[int] = []

    def counting(tensors: Any) -> Any:
        sizes.append(sum(tensor.numel() for tensor in tensors))
        return read_out(tensors)

    monkeypatch.setattr("otel_train.hooks.recorder.read_out", counting)
    found = []
    for units in (256, 2048):
        model = nn.Sequential(nn.Linear(units, units), nn.ReLU(), nn.Linear(units, units))
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        sizes.clear()
        with capture(model, optimizer, every_n_steps=1) as (monitor, _):
            step(model, optimizer, units)
            monitor.flush()
        found.append(sum(sizes))
    assert found[0] == found[1] < 1000


def test_memory_does_not_grow_with_steps() -> None:
    """wandb/wandb #2644: after the first steps, five hundred sampled ones leave the process as large as it was, to 8 MiB."""
    model = nn.Sequential(nn.Linear(128, 512), nn.ReLU(), nn.Linear(512, 128))
    optimizer = torch.optim.AdamW(model.parameters())
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        peaks = []
        for _ in range(3):
            for _ in range(250):
                step(model, optimizer, 128)
                monitor.observe(loss=1.0, tokens=128)
            monitor.flush()
            peaks.append(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss >> 10)
    assert sink.last is not None
    assert peaks[2] - peaks[0] < 8
