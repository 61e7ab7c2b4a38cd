"""The training does not notice: same losses bit by bit, same random streams, models that pickle and copy as before."""

from __future__ import annotations

import contextlib
import copy
import importlib.util
import io
import pickle
import random
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import nn

from otel_train.catalog import activations, run, updates
from otel_train.testing import capture
from tests import problems
from tests.problems import Gpt, Mlp

STEPS = 30


def train(
    steps: int, *, every_n_steps: int | None, autocast: bool, fused: bool = True
) -> tuple[list[float], dict[str, torch.Tensor], torch.Tensor]:
    """Train a byte-level GPT with dropout; return losses, weights and the state of torch's random stream."""
    torch.manual_seed(0)
    model = Gpt(width=32, dropout=0.1, length=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    losses = []
    with contextlib.ExitStack() as stack:
        monitor = None
        if every_n_steps is not None:
            monitor, sink = stack.enter_context(capture(model, optimizer, every_n_steps=every_n_steps))
        for step in range(steps):
            with torch.autocast("cpu", dtype=torch.bfloat16, enabled=autocast):
                loss = problems.text_loss(model, problems.byte_ids(), step, batch=4, length=32)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            if monitor is None:
                nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            else:
                monitor.clip_grad_norm_(1.0)
            optimizer.step()
            optimizer.zero_grad()
            if monitor is not None:
                monitor.observe(loss=loss, tokens=128)
            losses.append(loss.item())
        if monitor is not None:
            snapshot = problems.seen(monitor, sink)
            assert snapshot.value(run.STEPS) == steps
            assert snapshot.find(updates.LAYER_UPDATE_RATIO)
            assert snapshot.find(activations.LAYER_ACTIVATION_MEAN)
    return losses, {name: p.detach().clone() for name, p in model.named_parameters()}, torch.get_rng_state()


@pytest.mark.parametrize("autocast", [False, True], ids=["fp32", "bf16_autocast"])
def test_losses_weights_and_the_random_stream_are_bit_identical_with_and_without_a_monitor(*, autocast: bool) -> None:
    """Thirty steps with dropout, sampled at every step and at every third."""
    bare_losses, bare_weights, bare_stream = train(STEPS, every_n_steps=None, autocast=autocast)
    assert len(set(bare_losses)) == STEPS
    for every in (1, 3):
        losses, weights, stream = train(STEPS, every_n_steps=every, autocast=autocast)
        assert losses == bare_losses
        assert all(torch.equal(weights[name], bare_weights[name]) for name in bare_weights)
        assert torch.equal(stream, bare_stream)


def _numpy_stream() -> str:
    state = np.random.get_state(legacy=False)  # noqa: NPY002  # the global stream is the one that we could move
    return repr((state["state"]["key"].tolist(), state["state"]["pos"]))


def test_the_random_streams_of_python_and_numpy_do_not_move() -> None:
    """Attaching, sampling and closing draw nothing from the user's streams."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    random.seed(1)
    before = random.getstate(), _numpy_stream(), torch.get_rng_state()
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(3):
            problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            monitor.clip_grad_norm_(1.0)
            optimizer.step()
            monitor.observe(loss=1.0)
        assert problems.seen(monitor, sink).value(run.STEPS) == 3
    assert random.getstate() == before[0]
    assert _numpy_stream() == before[1]
    assert torch.equal(torch.get_rng_state(), before[2])


def saved_and_loaded(model: nn.Module) -> nn.Module:
    """Go through torch.save and torch.load."""
    buffer = io.BytesIO()
    torch.save(model, buffer)
    buffer.seek(0)
    loaded = torch.load(buffer, weights_only=False)
    assert isinstance(loaded, nn.Module)
    return loaded


def pickled(model: nn.Module) -> nn.Module:
    """Go through pickle."""
    loaded = pickle.loads(pickle.dumps(model))  # noqa: S301  # our own bytes
    assert isinstance(loaded, nn.Module)
    return loaded


COPIES: dict[str, Callable[[nn.Module], nn.Module]] = {"torch_save": saved_and_loaded, "pickle": pickled, "deepcopy": copy.deepcopy}


@pytest.mark.parametrize("way", COPIES)
def test_copies_of_an_attached_model_carry_nothing_that_acts(way: str) -> None:
    """A copy computes the same, and training it moves neither the counts nor the values of the original's monitor."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        before = problems.seen(monitor, sink)
        twin = COPIES[way](model)
        x, _ = problems.vector_batch(1)
        assert torch.equal(twin(x), model(x))
        assert all(torch.equal(a, b) for a, b in zip(twin.parameters(), model.parameters(), strict=True))
        twin_optimizer = torch.optim.SGD(twin.parameters(), lr=0.1)
        for step in range(3):
            problems.vector_loss(twin, step).backward()  # type: ignore[no-untyped-call]  # torch's
            twin_optimizer.step()
        # one forward of the original, and none of the copy's
        problems.vector_loss(model, 2).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        after = problems.seen(monitor, sink)
    assert before.value(run.STEPS) == 1
    assert after.value(run.STEPS) == 2
    assert after.value(run.MICRO_BATCHES) == 3


def test_a_deep_copy_of_the_optimizer_does_not_count_steps() -> None:
    """EMA and look-ahead code copies optimizers: the copy's steps are not the training's."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        twin = copy.deepcopy(optimizer)
        for group in twin.param_groups:
            for p in group["params"]:
                p.grad = torch.ones_like(p)
        twin.step()
        assert problems.seen(monitor, sink).value(run.STEPS) == 0
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        assert problems.seen(monitor, sink).value(run.STEPS) == 1


def test_a_pickle_of_an_attached_model_loads_where_otel_train_is_not_installed(tmp_path: Path) -> None:
    """In a Python that refuses to import otel_train, the file loads, computes and trains."""
    model = nn.Sequential(nn.Linear(8, 4), nn.ReLU(), nn.Linear(4, 2))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    x = torch.randn(3, 8)
    with capture(model, optimizer, every_n_steps=1):
        torch.save({"model": model, "x": x, "y": model(x).detach(), "optimizer": optimizer.state_dict()}, tmp_path / "model.pt")
    assert importlib.util.find_spec("otel_train") is not None
    code = """
import sys
from collections.abc import Callable
sys.modules["otel_train"] = None  # makes every import of it fail
import torch
saved = torch.load("model.pt", weights_only=False)
model = saved["model"]
assert torch.equal(model(saved["x"]), saved["y"])
optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
optimizer.load_state_dict(saved["optimizer"])
model(saved["x"]).sum().backward()
optimizer.step()
print("fine", [name for name in sys.modules if name.startswith("otel_train.")])
"""
    done = subprocess.run([sys.executable, "-c", code], cwd=tmp_path, capture_output=True, text=True, timeout=120, check=False)
    assert done.stdout == "fine []\n", done.stderr


def test_the_state_dict_has_no_keys_of_ours() -> None:
    """Checkpoints of a monitored model load into any other."""
    model = Mlp(hidden=16)
    names = list(model.state_dict())
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    groups = [list(group) for group in optimizer.state_dict()["param_groups"]]
    with capture(model, optimizer, every_n_steps=1):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        assert list(model.state_dict()) == names
        assert [list(group) for group in optimizer.state_dict()["param_groups"]] == groups
