"""Layers: names, kinds, depths, merging, and the budget of series."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

from otel_train.catalog import activations as act
from otel_train.catalog import gradients, parameters, updates
from otel_train.catalog import monitor as monitor_catalog
from otel_train.config import MonitorConfig
from otel_train.errors import AttachError
from otel_train.layers import LayerMap, block_of, map_layers
from otel_train.testing import capture
from tests import problems
from tests.problems import Gpt, Mlp


def mapped(model: nn.Module, **settings: Any) -> LayerMap:
    """Map the layers of a model that has no optimizer."""
    return map_layers(model, {}, MonitorConfig(**settings))


def names(found: LayerMap) -> list[str]:
    """Return the layers in the order of their depth, each once."""
    layers = {p.layer for p in found.parameters if p.layer is not None}
    return [layer.name for layer in sorted(layers, key=lambda layer: layer.depth)]


PLAIN = ["first", "norm", "second", "last"]


class Holder(nn.Module):
    """Holds a model under a name, as wrappers do."""

    def __init__(self, name: str, inner: nn.Module) -> None:
        super().__init__()
        self.add_module(name, inner)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Call it."""
        logits: torch.Tensor = next(iter(self.children()))(x)
        return logits


def wrapped_inside() -> nn.Module:
    """Wrap two layers within the model."""
    model = Mlp(hidden=16)
    model.add_module("first", checkpoint_wrapper(model.first))
    model.add_module("second", Holder("_fsdp_wrapped_module", checkpoint_wrapper(Holder("_orig_mod", model.second))))
    model.add_module("tanh", checkpoint_wrapper(model.tanh))
    return model


WRAPPED: dict[str, Callable[[], nn.Module]] = {
    "plain": lambda: Mlp(hidden=16),
    "compiled": lambda: cast("nn.Module", torch.compile(Mlp(hidden=16), backend="eager")),
    "ddp": lambda: Holder("module", Mlp(hidden=16)),
    "ddp_twice": lambda: Holder("module", Holder("module", Mlp(hidden=16))),
    "fsdp": lambda: Holder("_fsdp_wrapped_module", Mlp(hidden=16)),
    "compiled_ddp": lambda: Holder("_orig_mod", Holder("module", Holder("_fsdp_wrapped_module", Mlp(hidden=16)))),
    "checkpoint": lambda: checkpoint_wrapper(Mlp(hidden=16)),
    "inside": wrapped_inside,
}


@pytest.mark.parametrize("how", WRAPPED)
def test_wrapper_prefixes_are_stripped(how: str) -> None:
    """A layer has the name that it has in the model as written, so that series do not change with the wrapper."""
    found = mapped(WRAPPED[how]())
    assert names(found) == PLAIN
    assert [site.layer for site in found.sites] == ["act", "tanh"]
    assert [p.name for p in found.parameters][:2] == ["first.weight", "first.bias"]


def test_a_child_called_module_among_others_keeps_its_name() -> None:
    """``module.`` is a wrapper's only where every parameter has it."""
    model = nn.Module()
    model.module, model.head = nn.Linear(4, 4), nn.Linear(4, 2)
    assert names(mapped(model)) == ["module", "head"]


def test_kinds_follow_the_module_and_the_shape() -> None:
    """Embeddings, matrices with two and more dimensions, norm weights; biases are vectors, those of norms too."""
    model = nn.ModuleDict({
        "embedding": nn.Embedding(8, 4), "bag": nn.EmbeddingBag(8, 4), "linear": nn.Linear(4, 4), "conv": nn.Conv2d(1, 2, 3),
        "layer_norm": nn.LayerNorm(4), "batch_norm": nn.BatchNorm1d(4), "rms_norm": nn.RMSNorm(4), "group_norm": nn.GroupNorm(2, 4),
        "lstm": nn.LSTM(4, 4), "prelu": nn.PReLU(),
    })  # fmt: skip
    kinds = {p.name: p.kind for p in mapped(model).parameters}
    assert kinds == {
        "embedding.weight": "embedding", "bag.weight": "embedding", "linear.weight": "matrix", "linear.bias": "vector",
        "conv.weight": "matrix", "conv.bias": "vector", "layer_norm.weight": "norm", "layer_norm.bias": "vector",
        "batch_norm.weight": "norm", "batch_norm.bias": "vector", "rms_norm.weight": "norm", "group_norm.weight": "norm",
        "group_norm.bias": "vector", "lstm.weight_ih_l0": "matrix", "lstm.weight_hh_l0": "matrix", "lstm.bias_ih_l0": "vector",
        "lstm.bias_hh_l0": "vector", "prelu.weight": "vector",
    }  # fmt: skip


def test_depth_rises_in_registration_order_with_activations_among_the_layers() -> None:
    """A plot over depth shows the model from its input to its output."""
    model = Gpt(width=32)
    found = mapped(model)
    depth = {p.layer.name: p.layer.depth for p in found.parameters if p.layer is not None}
    depth |= {site.layer: site.depth for site in found.sites}
    order = [name for name, _ in model.named_modules() if name in depth]
    assert [depth[name] for name in order] == sorted(depth.values()) == list(range(len(depth)))
    assert depth["blocks.0.up"] < depth["blocks.0.act"] < depth["blocks.0.down"] < depth["blocks.1.norm1"]


def test_the_matrices_of_an_attention_module_are_one_series() -> None:
    """Norms of q, k and v combine as the root of the sum of squares, ratios likewise; the output projection is its own module."""

    class Attending(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.attention = nn.MultiheadAttention(16, 2, kdim=8, vdim=12, batch_first=True)

        def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
            mixed: torch.Tensor = self.attention(q, k, v)[0]
            return mixed

    model = Attending()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        model(torch.randn(2, 5, 16), torch.randn(2, 5, 8), torch.randn(2, 5, 12)).square().sum().backward()
        own = [model.attention.q_proj_weight, model.attention.k_proj_weight, model.attention.v_proj_weight]
        before = [p.detach().double().clone() for p in own]
        grads = [p.grad.double() for p in own if p.grad is not None]
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    key = "attention", "matrix"
    assert set(problems.layer_values(snapshot, gradients.LAYER_GRAD_NORM)) == {key, ("attention.out_proj", "matrix")}
    norm = sum(g.square().sum() for g in grads) ** 0.5
    assert problems.layer_values(snapshot, gradients.LAYER_GRAD_NORM)[key] == pytest.approx(float(norm), rel=1e-6)
    size = sum(w.square().sum() for w in before) ** 0.5
    assert problems.layer_values(snapshot, parameters.LAYER_PARAM_NORM)[key] == pytest.approx(float(size), rel=1e-6)
    change = sum((p.detach().double() - w).square().sum() for p, w in zip(own, before, strict=True)) ** 0.5
    assert problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO)[key] == pytest.approx(float(change / size), rel=1e-5)
    assert problems.layer_values(snapshot, parameters.LAYER_PARAMETERS)[key] == sum(p.numel() for p in own)


def test_blocks_as_layers_have_one_series_a_kind() -> None:
    """A block is a path up to its first number, else the first name."""
    assert [block_of(path) for path in ("model.layers.3.mlp.up", "blocks.0", "head.out", "10", "h.2.attn.4.q")] == [
        "model.layers.3", "blocks.0", "head", "10", "h.2",
    ]  # fmt: skip
    found = mapped(Gpt(width=32), layers="block")
    assert names(found) == ["tokens", "positions", "blocks.0", "blocks.0", "blocks.1", "blocks.1", "norm", "head"]
    assert [site.layer for site in found.sites] == ["blocks.0", "blocks.1"]


def test_parameters_as_layers_have_their_own_names() -> None:
    """Each parameter is a series."""
    found = mapped(Mlp(hidden=16), layers="parameter", kinds=("matrix", "norm", "vector"))
    assert names(found) == [name for name, _ in Mlp(hidden=16).named_parameters()]


def test_a_callable_chooses_layers_and_leaves_out() -> None:
    """It is given names without wrapper prefixes; what it returns None for has no series and still counts in global norms."""
    given: list[str] = []

    def choose(name: str) -> str | None:
        given.append(name)
        return None if name.startswith("last") else "body"

    model = Holder("module", Mlp(hidden=16))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1, layers=choose, kinds="matrix") as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        found = problems.gradients(model)
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert set(given) == {name for name, _ in Mlp(hidden=16).named_parameters()}
    body = torch.cat([found[f"module.{name}.weight"].view(-1) for name in ("first", "second")]).norm().item()
    assert problems.layer_values(snapshot, gradients.LAYER_GRAD_NORM) == pytest.approx({("body", "matrix"): body}, rel=1e-6)
    whole = problems.everything(found).norm().item()
    assert snapshot.value(gradients.GRAD_NORM, stage="post_clip") == pytest.approx(whole, rel=1e-6)


def deep() -> nn.Module:
    """Return four blocks of two matrices and a norm, and a head of two matrices."""
    blocks = nn.ModuleList(nn.Sequential(nn.Linear(4, 4), nn.LayerNorm(4), nn.GELU(), nn.Linear(4, 4)) for _ in range(4))
    return nn.ModuleDict({"blocks": blocks, "head": nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))})


@pytest.mark.parametrize(
    ("budget", "layers", "kinds", "dropped"),
    [
        (14, 14, {"matrix", "norm"}, 0),
        (13, 10, {"matrix"}, 4),
        (9, 6, {"matrix"}, 8),
        (5, 2, {"matrix"}, 12),
        (1, 2, {"matrix"}, 12),
    ],
)
def test_above_max_layers_norms_go_first_and_then_layers_merge(budget: int, layers: int, kinds: set[str], dropped: int) -> None:
    """Said in words, and counted; the coarsest level is the model's children."""
    found = mapped(deep(), max_layers=budget)
    chosen = {p.layer for p in found.parameters if p.layer is not None}
    assert len(chosen) == layers
    assert {layer.kind for layer in chosen} == kinds
    assert found.dropped_layers == dropped
    assert found.note.startswith(f"max_layers={budget}: ") == (dropped > 0)


def test_merged_layers_combine_as_sums_of_squares_and_dropped_series_are_counted(caplog: pytest.LogCaptureFixture) -> None:
    """A block's norm is the root of the sum of its layers' squares; one warning for the whole run, though parameters are thawed."""
    model = Gpt(width=32)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1, max_layers=6) as (monitor, sink):
        for step in range(2):
            optimizer.zero_grad()
            problems.text_loss(model, problems.byte_ids(), step, batch=2).backward()  # type: ignore[no-untyped-call]  # torch's
            found = problems.gradients(model)
            optimizer.step()
            snapshot = problems.seen(monitor, sink)
            model.norm.requires_grad_(requires_grad=False)
    matrices = [g.view(-1) for name, g in found.items() if name.startswith("blocks.0") and g.dim() > 1]
    norms = problems.layer_values(snapshot, gradients.LAYER_GRAD_NORM)
    assert set(norms) == {
        ("tokens", "embedding"), ("positions", "embedding"), ("blocks.0", "matrix"), ("blocks.1", "matrix"), ("head", "matrix"),
    }  # fmt: skip
    assert norms["blocks.0", "matrix"] == pytest.approx(torch.cat(matrices).norm().item(), rel=1e-6)
    assert (snapshot.value(monitor_catalog.DROPPED_SERIES) or 0) > 0
    assert len([r for r in caplog.records if "max_layers" in r.getMessage()]) == 1


def test_vectors_have_series_only_on_request() -> None:
    """By default biases have none; asked for, they alone have them."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found = []
    for settings in ({}, {"kinds": ("vector",)}):
        with capture(model, optimizer, every_n_steps=1, **settings) as (monitor, sink):
            problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            snapshot = problems.seen(monitor, sink)
        found.append(set(problems.layer_values(snapshot, gradients.LAYER_GRAD_NORM)))
        assert snapshot.find(act.LAYER_ACTIVATION_MEAN)
    assert found[0] == {("first", "matrix"), ("norm", "norm"), ("second", "matrix"), ("last", "matrix")}
    assert found[1] == {(name, "vector") for name in PLAIN}


def test_parameters_of_the_root_itself_have_their_own_names() -> None:
    """They belong to no child module."""
    model = nn.Linear(4, 2)
    assert names(mapped(model, kinds=("matrix", "vector"))) == ["weight", "bias"]


def test_a_callable_that_returns_no_name_is_refused() -> None:
    """A number would fail every scrape."""
    with pytest.raises(AttachError, match="expected the callable to return a layer's name or None, got 3"):
        mapped(Mlp(hidden=16), layers=lambda _: 3)
