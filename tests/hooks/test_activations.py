"""Activations: what the sampled rows show, against naive values from hooks of the test's own."""

from __future__ import annotations

import contextlib
import re
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from torch.nn import functional
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.checkpoint import checkpoint

from otel_train.catalog import MetricSpec
from otel_train.catalog import activations as act
from otel_train.catalog import loss as loss_catalog
from otel_train.hooks.site_meter import DEAD_ROWS, SiteMeter, WaitingRows
from otel_train.layers import ActivationSite
from otel_train.snapshot import Snapshot
from otel_train.stats import activations as stats
from otel_train.stats.activations import ROWS, activation_in
from otel_train.testing import capture
from tests import problems
from tests.problems import ConvNet, Gpt, Mlp


class Watch:
    """Clones what goes into and out of a module, call by call, in fp64."""

    def __init__(self, module: nn.Module) -> None:
        self.pre: list[torch.Tensor] = []
        self.post: list[torch.Tensor] = []
        module.register_forward_pre_hook(self._before)
        module.register_forward_hook(self._after)

    def _before(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        del module
        self.pre.append(args[0].detach().double().clone())

    def _after(self, module: nn.Module, args: tuple[Any, ...], output: torch.Tensor) -> None:
        del module, args
        self.post.append(output.detach().double().clone())

    def elements(self, site: str) -> torch.Tensor:
        """Return all elements of a site, flat."""
        return torch.cat([tensor.reshape(-1) for tensor in getattr(self, site)])

    def clear(self) -> None:
        """Forget."""
        self.pre, self.post = [], []


def check(snapshot: Snapshot, layer: str, watch: Watch, tolerance: float = 1e-6) -> None:
    """Compare both sites of a layer with naive values."""
    for site in ("pre", "post"):
        x = watch.elements(site)
        expected = {
            act.LAYER_ACTIVATION_MEAN: x.mean(),
            act.LAYER_ACTIVATION_STD: x.std(correction=0),
            act.LAYER_ACTIVATION_ABSMAX: x.abs().max(),
            act.LAYER_ACTIVATION_ZERO_RATIO: (x == 0).double().mean(),
        }
        scale = x.square().mean().sqrt().item()
        for spec, value in expected.items():
            assert snapshot.value(spec, layer=layer, site=site) == pytest.approx(
                value.item(), rel=tolerance, abs=1e-3 * tolerance * scale
            ), spec.name


def train_step(model: nn.Module, optimizer: torch.optim.Optimizer, step: int, batch: int = ROWS) -> None:
    """Make a step on vectors."""
    optimizer.zero_grad()
    problems.vector_loss(model, step, batch=batch).backward()  # type: ignore[no-untyped-call]  # torch's
    optimizer.step()


def sgd(model: nn.Module) -> torch.optim.Optimizer:
    """Return the plainest optimizer."""
    return torch.optim.SGD(model.parameters(), lr=0.01)


def test_small_batches_are_read_whole_and_equal_naive_values() -> None:
    """Mean, std, absmax and zeros of both sites of both activations, for each step alone."""
    model = Mlp()
    relu, tanh = Watch(model.act), Watch(model.tanh)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(3):
            relu.clear()
            tanh.clear()
            train_step(model, optimizer, step)
            snapshot = problems.seen(monitor, sink)
            check(snapshot, "act", relu)
            check(snapshot, "tanh", tanh)
    assert 0.2 < (snapshot.value(act.LAYER_ACTIVATION_ZERO_RATIO, layer="act", site="post") or 0) < 0.8


def test_micro_batches_are_added_up() -> None:
    """Two forwards before a step: both are in the step's values."""
    model = Mlp(hidden=32)
    watch = Watch(model.act)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for micro in range(2):
            problems.vector_loss(model, micro, batch=16 + micro).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        check(problems.seen(monitor, sink), "act", watch)
    assert len(watch.post) == 2


def test_large_batches_are_sampled_and_close() -> None:
    """Above ROWS rows a part is read: the mean is within four standard errors of the whole, the maximum a lower bound."""
    model = Gpt(width=32)
    watch = Watch(model.blocks[0].act)  # type: ignore[arg-type]  # a module
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.text_loss(model, problems.byte_ids(), 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    rows = watch.pre[0].flatten(0, -2)
    assert len(rows) > ROWS
    found = snapshot.value(act.LAYER_ACTIVATION_MEAN, layer="blocks.0.act", site="pre")
    error = rows.mean(1).std().item() / ROWS**0.5
    assert found == pytest.approx(rows.mean().item(), abs=4 * error)
    assert found != pytest.approx(rows.mean().item(), rel=1e-9)
    peak = snapshot.value(act.LAYER_ACTIVATION_ABSMAX, layer="blocks.0.act", site="pre")
    assert peak is not None
    assert 0 < peak <= rows.abs().max().item()


def test_images_are_read_by_positions() -> None:
    """A convolution's units are its channels; with few enough positions all of them are read."""
    model = nn.Sequential(nn.Conv2d(1, 8, 5, stride=4), nn.ReLU(), nn.Flatten(), nn.Linear(8 * 9, 10))
    watch = Watch(model[1])
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.image_loss(model, 0, batch=2).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        check(problems.seen(monitor, sink), "1", watch)
    assert watch.post[0].shape == (2, 8, 3, 3)


def test_a_convolutional_network_has_all_sites() -> None:
    """Each of three ReLUs shows its input and its output."""
    model = ConvNet()
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.image_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        found = problems.seen(monitor, sink).find(act.LAYER_ACTIVATION_MEAN)
    assert {(s.labels[0], s.labels[2]) for s in found} == {(f"act{i}", site) for i in (1, 2, 3) for site in ("pre", "post")}


def test_the_input_of_an_in_place_activation_is_seen_before_it_is_overwritten() -> None:
    """nn.ReLU(inplace=True) writes over its input: `pre` still has its negative values."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(inplace=True), nn.Linear(32, 10))
    watch = Watch(model[1])
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        train_step(model, optimizer, 0)
        snapshot = problems.seen(monitor, sink)
        check(snapshot, "1", watch)
    assert (snapshot.value(act.LAYER_ACTIVATION_ZERO_RATIO, layer="1", site="pre") or 0) < 0.01
    assert (snapshot.value(act.LAYER_ACTIVATION_ZERO_RATIO, layer="1", site="post") or 0) > 0.2


class Twice(nn.Module):
    """Uses one activation module at two places."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(64, 32), nn.Linear(32, 10), nn.Tanh()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 64) to logits."""
        logits: torch.Tensor = self.act(self.second(self.act(self.first(x))))
        return logits


def test_a_module_called_twice_shows_both_calls() -> None:
    """Two calls of different shapes in one forward add up."""
    model = Twice()
    watch = Watch(model.act)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        train_step(model, optimizer, 0)
        check(problems.seen(monitor, sink), "act", watch)
    assert [tuple(x.shape) for x in watch.post] == [(ROWS, 32), (ROWS, 10)]


@pytest.mark.parametrize(
    ("module", "low", "high"),
    [(nn.Tanh(), -0.97, 0.97), (nn.Sigmoid(), 0.03, 0.97), (nn.Hardtanh(), -1.0, 1.0), (nn.ReLU6(), -1.0, 6.0)],
    ids=["tanh", "sigmoid", "hardtanh", "relu6"],
)
def test_the_saturated_ratio_is_the_share_in_the_flat_part(module: nn.Module, low: float, high: float) -> None:
    """Of the output of activations that saturate, and only there."""
    first = nn.Linear(64, 32)
    nn.init.normal_(first.weight, std=0.5)
    model = nn.Sequential(first, module, nn.Linear(32, 10), nn.GELU())
    watch = Watch(model[1])
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        train_step(model, optimizer, 0)
        snapshot = problems.seen(monitor, sink)
    x = watch.elements("post")
    expected = ((x <= low) | (x >= high)).double().mean().item()
    assert 0.01 < expected < 0.99
    found = snapshot.find(act.LAYER_ACTIVATION_SATURATED_RATIO)
    assert [(s.labels[0], s.labels[2]) for s in found] == [("1", "post")]
    assert found[0].value == pytest.approx(expected, rel=1e-9)


def test_dead_units_are_found_after_enough_rows_and_not_before() -> None:
    """Three of 32 ReLUs have a bias that no input can overcome; DEAD_ROWS rows must have been seen to say so."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        model[0].get_parameter("bias")[:3] = -1000.0
    watch = Watch(model[1])
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(DEAD_ROWS // ROWS):
            assert not problems.seen(monitor, sink).find(act.LAYER_ACTIVATION_DEAD_UNIT_RATIO)
            train_step(model, optimizer, step)
        snapshot = problems.seen(monitor, sink)
    naive = (torch.cat(watch.post) > 0).any(0).logical_not().double().mean().item()
    assert naive == 3 / 32
    (sample,) = snapshot.find(act.LAYER_ACTIVATION_DEAD_UNIT_RATIO)
    assert (sample.labels[0], sample.labels[2], sample.value) == ("1", "post", 3 / 32)


def test_a_unit_that_comes_back_to_life_is_not_dead_for_ever() -> None:
    """The window moves on: after 1,024 further rows at most, a revived unit is alive."""
    model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 10))
    with torch.no_grad():
        model[0].get_parameter("bias")[:3] = -1000.0
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(DEAD_ROWS // ROWS):
            train_step(model, optimizer, step)
        assert problems.seen(monitor, sink).value(act.LAYER_ACTIVATION_DEAD_UNIT_RATIO) == 3 / 32
        with torch.no_grad():
            model[0].get_parameter("bias")[:3] = 0.0
        train_step(model, optimizer, 99)
        assert problems.seen(monitor, sink).value(act.LAYER_ACTIVATION_DEAD_UNIT_RATIO) == 0
        with torch.no_grad():
            model[0].get_parameter("bias")[:5] = -1000.0
        for step in range(2 * DEAD_ROWS // ROWS + 1):
            train_step(model, optimizer, step)
        assert problems.seen(monitor, sink).value(act.LAYER_ACTIVATION_DEAD_UNIT_RATIO) == 5 / 32


def test_passes_in_eval_mode_and_without_gradients_are_not_counted() -> None:
    """Only the training forward is in the values, whatever runs around it."""
    model = Mlp(hidden=32)
    watch = Watch(model.act)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(2):
            model.eval()
            model(100 * torch.randn(8, 64))
            model.train()
            with torch.no_grad():
                model(100 * torch.randn(8, 64))
            with monitor.phase("eval"):
                model(100 * torch.randn(8, 64))
            model.act(100 * torch.randn(8, 32))
            watch.clear()
            train_step(model, optimizer, step)
            check(problems.seen(monitor, sink), "act", watch)
    assert len(watch.post) == 1


class Checkpointed(nn.Module):
    """Recomputes its middle in backward."""

    def __init__(self, *, reentrant: bool | None) -> None:
        super().__init__()
        self.first, self.middle, self.last = nn.Linear(64, 32), nn.Sequential(nn.Linear(32, 32), nn.ReLU()), nn.Linear(32, 10)
        self._reentrant = reentrant

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 64) to logits."""
        hidden = self.first(x)
        how = self._reentrant
        hidden = self.middle(hidden) if how is None else checkpoint(self.middle, hidden, use_reentrant=how)
        logits: torch.Tensor = self.last(hidden)
        return logits


@pytest.mark.parametrize("reentrant", [None, False, True], ids=["plain", "not_reentrant", "reentrant"])
def test_recomputation_under_activation_checkpointing_counts_once(*, reentrant: bool | None) -> None:
    """One infinite element a step is one non-finite activation at each site, and rows that were recomputed are no new rows."""
    model = Checkpointed(reentrant=reentrant)
    watch = Watch(model.middle[1])
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(DEAD_ROWS // ROWS):
            # rows counted twice would show dead units after half of these steps
            assert not problems.seen(monitor, sink).find(act.LAYER_ACTIVATION_DEAD_UNIT_RATIO)
            train_step(model, optimizer, step)
        snapshot = problems.seen(monitor, sink)
        assert len(snapshot.find(act.LAYER_ACTIVATION_DEAD_UNIT_RATIO)) == 1
        assert len(watch.pre) == DEAD_ROWS // ROWS * (1 if reentrant is None else 2)
        with torch.no_grad():
            model.middle[0].get_parameter("bias")[0] = torch.inf
        train_step(model, optimizer, 0)
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(loss_catalog.NONFINITE, source="activation") == 2 * ROWS
    assert snapshot.value(loss_catalog.LAYER_NONFINITE, layer="middle.1", source="activation") == 2 * ROWS


def test_activations_under_bf16_autocast_are_those_that_the_module_saw() -> None:
    """What autocast rounds is what is measured; sums are fp64 all the same."""
    model = Mlp(hidden=64)
    watch = Watch(model.tanh)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            loss = problems.vector_loss(model, 0)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        check(problems.seen(monitor, sink), "tanh", watch)
    assert torch.equal(watch.post[0], watch.post[0].bfloat16().double())


@pytest.mark.parametrize(
    ("wanted", "layers"),
    [(True, {"act", "tanh"}), (False, set()), ("ta*", {"tanh"}), (("act", "second"), {"act", "second"})],
    ids=["all", "none", "pattern", "any_module"],
)
def test_the_activations_setting_chooses_the_modules(wanted: object, layers: set[str]) -> None:
    """True, False, one pattern, or several, which need not name activation modules."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1, activations=wanted) as (monitor, sink):
        train_step(model, optimizer, 0)
        found = problems.seen(monitor, sink).find(act.LAYER_ACTIVATION_MEAN)
    assert {s.labels[0] for s in found} == layers
    assert len(found) == 2 * len(layers)


SPECS: tuple[MetricSpec, ...] = (act.LAYER_ACTIVATION_MEAN, act.LAYER_ACTIVATION_STD, act.LAYER_ACTIVATION_ABSMAX)


def test_a_layer_that_did_not_run_has_no_series() -> None:
    """A branch that the sampled forward left out shows nothing, rather than what it showed before."""

    class Branching(Mlp):
        uses_tanh = True

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            hidden = self.second(self.act(self.first(x)))
            logits: torch.Tensor = self.last(self.tanh(hidden) if self.uses_tanh else hidden)
            return logits

    model = Branching(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        train_step(model, optimizer, 0)
        assert all(problems.seen(monitor, sink).find(spec, layer="tanh") for spec in SPECS)
        model.uses_tanh = False
        train_step(model, optimizer, 1)
        snapshot = problems.seen(monitor, sink)
    assert not any(snapshot.find(spec, layer="tanh") for spec in SPECS)
    assert all(snapshot.find(spec, layer="act") for spec in SPECS)


def test_a_forward_that_raises_leaves_nothing_open() -> None:
    """After an exception in the model's forward, a call of a part of it outside of training is not counted."""

    class Fragile(Mlp):
        broken = False

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            if self.broken:
                raise RuntimeError("out of memory")
            return super().forward(x)

    model = Fragile(hidden=32)
    watch = Watch(model.act)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        model.broken = True
        with pytest.raises(RuntimeError, match="out of memory"):
            model(torch.randn(4, 64))
        with torch.no_grad():
            model.act(1000 * torch.randn(8, 32))
        model.broken = False
        watch.clear()
        train_step(model, optimizer, 0)
        check(problems.seen(monitor, sink), "act", watch)


class Shaped(nn.Module):
    """An inner module whose inputs and outputs are what a test wants, between two linear layers."""

    def __init__(self, inner: nn.Module, call: Callable[[nn.Module, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.first, self.inner, self.last = nn.Linear(64, 12), inner, nn.Linear(12, 10)
        self._call = call

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map (batch, 64) to logits."""
        logits: torch.Tensor = self.last(self._call(self.inner, self.first(x)))
        return logits


@dataclass
class Answer:
    """What some models return."""

    scores: torch.Tensor | None
    hidden: torch.Tensor
    more: torch.Tensor


@dataclass(frozen=True)
class Slotted:
    """A dataclass without ``__dict__``."""

    __slots__ = ("hidden",)
    hidden: torch.Tensor


class Pair(NamedTuple):
    """A named tuple."""

    ids: torch.Tensor
    hidden: torch.Tensor


class Wrap(nn.Module):
    """Doubles its input and packs the result."""

    def __init__(self, pack: Callable[[torch.Tensor], Any]) -> None:
        super().__init__()
        self._pack = pack

    def forward(self, x: torch.Tensor) -> Any:
        """Map any shape to what ``pack`` makes of it."""
        return self._pack(2 * x)


PACKS: dict[str, tuple[Callable[[torch.Tensor], Any], Callable[[Any], torch.Tensor]]] = {
    "tuple": (lambda x: (x, 1000 * x), lambda y: y[0]),
    "tuple_after_none_and_ids": (lambda x: (None, x.argmax(1), 7, "text", x), lambda y: y[4]),
    "list": (lambda x: [[x], x], lambda y: y[0][0]),
    "dict": (lambda x: {"loss": None, "hidden": x, "more": 1000 * x}, lambda y: y["hidden"]),
    "ordered_dict": (lambda x: OrderedDict(hidden=x), lambda y: y["hidden"]),
    "dataclass": (lambda x: Answer(None, x, 1000 * x), lambda y: y.hidden),
    "dataclass_with_slots": (Slotted, lambda y: y.hidden),
    "named_tuple": (lambda x: Pair(x.argmax(1), x), lambda y: y.hidden),
    "dict_of_tuples": (lambda x: {"out": (None, (x,))}, lambda y: y["out"][1][0]),
}


@pytest.mark.parametrize("pack", PACKS)
def test_outputs_in_containers_are_seen(pack: str) -> None:
    """The first tensor of real numbers in a tuple, list, mapping, dataclass or named tuple, however nested."""
    wrap, unwrap = PACKS[pack]
    model = Shaped(Wrap(wrap), lambda inner, x: unwrap(inner(x)))
    seen: list[torch.Tensor] = []
    model.inner.register_forward_hook(lambda _, args, output: seen.extend((args[0], unwrap(output))))
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1, activations=("inner",)) as (monitor, sink):
        train_step(model, optimizer, 0)
        snapshot = problems.seen(monitor, sink)
    for site, x in zip(("pre", "post"), seen, strict=True):
        assert snapshot.value(act.LAYER_ACTIVATION_MEAN, layer="inner", site=site) == pytest.approx(
            x.double().mean().item(), rel=1e-6
        )
        assert snapshot.value(act.LAYER_ACTIVATION_ABSMAX, layer="inner", site=site) == pytest.approx(
            x.abs().max().item(), rel=1e-6
        )


class Scale(nn.Module):
    """Takes keyword arguments only."""

    def forward(self, *, mask: torch.Tensor | None = None, hidden: torch.Tensor) -> torch.Tensor:
        """Map any shape to the same shape."""
        return hidden * 3 if mask is None else hidden * 3 * mask.unsqueeze(1)


@pytest.mark.parametrize("masked", [False, True])
def test_a_module_called_with_keyword_arguments_shows_its_input(*, masked: bool) -> None:
    """Its ``pre`` site is there too, whatever else is among the arguments."""
    model = Shaped(Scale(), lambda inner, x: inner(mask=x.argmax(1) if masked else None, hidden=x))
    seen: list[torch.Tensor] = []
    model.first.register_forward_hook(lambda _module, _args, output: seen.append(output.detach()))
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1, activations=("inner",)) as (monitor, sink):
        train_step(model, optimizer, 0)
        snapshot = problems.seen(monitor, sink)
    x = seen[0].double()
    for site, expected in (("pre", x), ("post", x * 3 * x.argmax(1, keepdim=True) if masked else x * 3)):
        for spec, value in ((act.LAYER_ACTIVATION_MEAN, expected.mean()), (act.LAYER_ACTIVATION_STD, expected.std(correction=0))):
            assert snapshot.value(spec, layer="inner", site=site) == pytest.approx(value.item(), rel=1e-6)


def test_an_activation_called_by_keyword_shows_its_input() -> None:
    """``self.act(input=x)`` is a call as any other."""
    model = Shaped(nn.Tanh(), lambda inner, x: inner(input=x))
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        train_step(model, optimizer, 0)
        found = problems.seen(monitor, sink).find(act.LAYER_ACTIVATION_MEAN)
    assert {s.labels[2] for s in found} == {"pre", "post"}


def _jagged(x: torch.Tensor) -> torch.Tensor:
    return torch.nested.nested_tensor_from_jagged(x, torch.tensor([0, 1, 6, len(x)]))


def _jagged_view(x: torch.Tensor) -> torch.Tensor:
    view: torch.Tensor = torch.nested.narrow(
        x.view(4, -1, 12), 1, torch.tensor([0, 1, 2, 0]), torch.tensor([2, 3, 1, 1]), layout=torch.jagged
    )
    return view


NESTED: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "jagged": _jagged,
    "jagged_vectors": lambda x: torch.nested.nested_tensor_from_jagged(x[:, 0].contiguous(), torch.tensor([0, 1, 6, len(x)])),
    "strided": lambda x: torch.nested.as_nested_tensor([x[:1], x[1:6], x[6:]]),
    "jagged_of_heads": lambda x: torch.nested.nested_tensor_from_jagged(x.view(-1, 3, 4), torch.tensor([0, 1, 6, len(x)])),
}


# torch's own
@pytest.mark.filterwarnings("ignore:The PyTorch API of nested tensors is in prototype stage")
@pytest.mark.parametrize("layout", NESTED)
def test_nested_tensors_are_read_by_their_rows(layout: str) -> None:
    """Every element once, none of a padding."""
    seen: list[torch.Tensor] = []

    def call(inner: nn.Module, x: torch.Tensor) -> torch.Tensor:
        nested = NESTED[layout](x)
        seen.extend(part.detach().double().reshape(-1) for part in nested.unbind())
        return x + torch.cat([p.reshape(-1) for p in inner(nested).unbind()]).sum()

    model = Shaped(nn.ReLU(), call)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        train_step(model, optimizer, 0, batch=10)
        snapshot = problems.seen(monitor, sink)
        assert monitor._guard.errors["activations"] == 0
    x = torch.cat(seen)
    for site, values in (("pre", x), ("post", x.relu())):
        for spec, value in (
            (act.LAYER_ACTIVATION_MEAN, values.mean()),
            (act.LAYER_ACTIVATION_STD, values.std(correction=0)),
            (act.LAYER_ACTIVATION_ZERO_RATIO, (values == 0).double().mean()),
        ):
            assert snapshot.value(spec, layer="inner", site=site) == pytest.approx(value.item(), rel=1e-6), (spec.name, site)


def test_complex_activations_are_measured_by_their_parts() -> None:
    """A complex element is two real ones, as it is for parameters."""

    class Fourier(nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            spectrum: torch.Tensor = torch.fft.rfft(x)
            return spectrum

    model = Shaped(Fourier(), lambda inner, x: torch.fft.irfft(inner(x), n=12).conj())
    seen: list[torch.Tensor] = []
    model.inner.register_forward_hook(lambda _module, _args, output: seen.append(torch.view_as_real(output.detach()).double()))
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1, activations=("inner",)) as (monitor, sink):
        train_step(model, optimizer, 0)
        snapshot = problems.seen(monitor, sink)
    values = {
        act.LAYER_ACTIVATION_MEAN: seen[0].mean(),
        act.LAYER_ACTIVATION_STD: seen[0].std(correction=0),
        act.LAYER_ACTIVATION_ABSMAX: seen[0].abs().max(),
        act.LAYER_ACTIVATION_ZERO_RATIO: (seen[0] == 0).double().mean(),
    }
    for spec, value in values.items():
        assert snapshot.value(spec, layer="inner", site="post") == pytest.approx(value.item(), rel=1e-6), spec.name


SILENT: dict[str, Callable[[torch.Tensor], Any]] = {
    "none": lambda _: None,
    "integer": lambda _: 7,
    "integers": lambda x: x.argmax(1),
    "bool": lambda x: x > 0,
    "text": lambda _: "text",
    "empty": lambda x: x[:0],
    "no_units": lambda x: x[:, :0],
    "empty_tuple": lambda _: (),
    "empty_dict": lambda _: {},
    "sparse": lambda x: x.detach().to_sparse(),
    "sparse_rows": lambda x: x.detach().to_sparse_csr(),
    "object": lambda _: object(),
    "class": lambda _: Answer,
    "deep": lambda x: [[[[[[x]]]]]],
}


# torch's own
@pytest.mark.filterwarnings("ignore:Sparse CSR tensor support is in beta state")
@pytest.mark.filterwarnings("ignore:Sparse invariant checks are implicitly disabled")
@pytest.mark.parametrize("what", SILENT)
def test_what_cannot_be_sampled_has_no_series_and_is_no_error(what: str) -> None:
    """The input has its series, the output none; nothing is counted as a failure of ours."""
    model = Shaped(Wrap(SILENT[what]), lambda inner, x: (inner(x), x)[1])
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1, activations=("inner",)) as (monitor, sink):
        train_step(model, optimizer, 0)
        found = problems.seen(monitor, sink).find(act.LAYER_ACTIVATION_MEAN)
        assert not any(monitor._guard.errors.values())
    assert [s.labels[2] for s in found] == ["pre"]


def test_views_into_nested_tensors_and_rows_of_many_lengths_are_left_out() -> None:
    """Their values hold elements that the view skips, or have no rows."""
    x = torch.randn(24, 12)
    assert activation_in(_jagged_view(x)) is None
    assert activation_in(_jagged(x).transpose(1, 2)) is None


def test_a_functional_activation_is_reached_through_its_parent() -> None:
    """F.gelu has no module: the pattern names the module around it."""

    class Functional(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.up, self.down = nn.Linear(12, 24), nn.Linear(24, 12)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            mapped: torch.Tensor = self.down(functional.gelu(self.up(x)))
            return mapped

    class Stack(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(64, 12), nn.Linear(12, 10)
            self.blocks = nn.ModuleList(nn.ModuleDict({"mlp": Functional()}) for _ in range(3))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = self.first(x)
            for block in self.blocks:
                x = x + block["mlp"](x)  # type: ignore[index]  # a ModuleDict
            logits: torch.Tensor = self.last(x)
            return logits

    model = Stack()
    watches = {f"blocks.{i}.mlp": Watch(model.get_submodule(f"blocks.{i}.mlp")) for i in range(3)}
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1, activations=("blocks.*.mlp",)) as (monitor, sink):
        train_step(model, optimizer, 0)
        snapshot = problems.seen(monitor, sink)
        for layer, watch in watches.items():
            check(snapshot, layer, watch)
    assert {s.labels[0] for s in snapshot.find(act.LAYER_ACTIVATION_MEAN)} == set(watches)


def test_a_recurrent_module_adds_up_its_calls() -> None:
    """One cell over seven places: all calls are in the values."""

    class Recurrent(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.cell, self.act, self.last = nn.Linear(64, 12), nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            state = self.first(x)
            for _ in range(7):
                state = state - self.act(self.cell(state))
            logits: torch.Tensor = self.last(state)
            return logits

    model = Recurrent()
    watch, cell = Watch(model.act), Watch(model.cell)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1, activations=("act", "cell")) as (monitor, sink):
        for step in range(2):
            watch.clear()
            cell.clear()
            train_step(model, optimizer, step)
            snapshot = problems.seen(monitor, sink)
            check(snapshot, "act", watch)
            check(snapshot, "cell", cell)
    assert len(watch.post) == 7


@pytest.mark.parametrize("way", ["eval", "no_grad", "inference"])
def test_a_pass_through_a_part_of_the_model_does_not_count(way: str) -> None:
    """Validation of an encoder alone, between training steps."""
    model = Mlp(hidden=32)
    watch = Watch(model.act)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(2):
            model.act.train(way != "eval")
            with {"eval": torch.enable_grad, "no_grad": torch.no_grad, "inference": torch.inference_mode}[way]():
                model.act(100 * torch.randn(8, 32))
            model.act.train()
            watch.clear()
            train_step(model, optimizer, step)
            check(problems.seen(monitor, sink), "act", watch)


def test_a_part_in_eval_mode_within_a_training_forward_does_not_count() -> None:
    """A frozen teacher or encoder is not what is trained; the rest is seen."""
    model = Mlp(hidden=32)
    watch = Watch(model.tanh)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        model.act.eval()
        train_step(model, optimizer, 0)
        snapshot = problems.seen(monitor, sink)
        check(snapshot, "tanh", watch)
        assert not snapshot.find(act.LAYER_ACTIVATION_MEAN, layer="act")
        model.act.train()
        train_step(model, optimizer, 1)
        assert problems.seen(monitor, sink).find(act.LAYER_ACTIVATION_MEAN, layer="act")


def test_deterministic_algorithms_are_all_that_is_used() -> None:
    """Under torch.use_deterministic_algorithms nothing of ours raises, and the values are the same."""
    values = []
    for deterministic in (False, True):
        torch.manual_seed(0)
        model = Gpt(width=32)
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        torch.use_deterministic_algorithms(deterministic)
        try:
            with capture(model, optimizer, every_n_steps=1, histograms="layer") as (monitor, sink):
                for step in range(2):
                    problems.text_loss(model, problems.byte_ids(), step).backward()  # type: ignore[no-untyped-call]  # torch's
                    optimizer.step()
                snapshot = problems.seen(monitor, sink)
                assert not any(monitor._guard.errors.values())
        finally:
            torch.use_deterministic_algorithms(False)
        values.append({(s.labels): s.value for s in snapshot.find(act.LAYER_ACTIVATION_STD)})
    assert values[0] == values[1] != {}


class Ops(TorchDispatchMode):  # type: ignore[no-untyped-call]  # torch's
    """Notes the operations that run."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's
        self.names: set[str] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        del types
        self.names.add(func.overloadpacket.__name__.rstrip("_"))
        return func(*args, **(kwargs or {}))


def without_deterministic_version() -> set[str]:
    """Return the names of operations that torch says raise under use_deterministic_algorithms."""
    text = (torch.use_deterministic_algorithms.__doc__ or "").rpartition("operations will throw")[2]
    return {name.rpartition(".")[2].rstrip("_") for name in re.findall(r":(?:func|meth|class):`~?(torch[\w.]+)", text)} - {"nn"}


def test_no_operation_of_ours_lacks_a_deterministic_version_on_cuda() -> None:
    """Against torch's own list, over every operation of sampled steps, with what the model does itself left out."""
    listed = without_deterministic_version()
    assert {"cumsum", "bincount", "histc", "put"} <= listed
    model = Gpt(vocabulary=1024, width=48)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, foreach=False)
    found = []
    for attached in (True, False):
        with Ops() as ops, capture(model, optimizer, every_n_steps=1) if attached else contextlib.nullcontext():
            for step in range(2):
                problems.text_loss(model, problems.byte_ids(), step).backward()  # type: ignore[no-untyped-call]  # torch's
                optimizer.step()
        found.append(ops.names)
    ours = found[0] - found[1]
    assert {"scatter_add", "index_select", "topk"} <= ours
    assert ours & listed == set()
    with Ops() as ops:
        torch.ones(3).cumsum(0)
    assert ops.names & listed


def test_a_site_that_cannot_be_summed_up_leaves_the_others_theirs(monkeypatch: pytest.MonkeyPatch) -> None:
    """They are summed up together, but fail alone."""
    plain = stats.row_sums

    def failing(rows: torch.Tensor, flat_outside: tuple[float, float] | None) -> tuple[torch.Tensor, torch.Tensor]:
        if rows.shape[-1] == 7:
            raise ZeroDivisionError("a bug of ours")
        return plain(rows, flat_outside)

    monkeypatch.setattr(stats, "row_sums", failing)
    model = nn.Sequential(nn.Linear(4, 7), nn.Tanh(), nn.Linear(7, 5), nn.Tanh())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for _ in range(2):
            model(torch.randn(3, 4)).square().mean().backward()
            optimizer.step()
            snapshot = problems.seen(monitor, sink)
        assert monitor._guard.errors["activations"] == 2
    assert {sample.labels[0] for sample in snapshot.find(act.LAYER_ACTIVATION_STD)} == {"3"}


def test_an_activation_on_another_device_fails_alone() -> None:
    """A model that is split by hand: the site says where it is, and the others have their values."""
    with torch.device("meta"):
        elsewhere = nn.Tanh()
    site = ActivationSite(elsewhere, "elsewhere", "elsewhere", 0, None, rectifying=False)
    meter = SiteMeter(site, "post", stats.Strata(torch.rand(ROWS).double()))
    waiting = WaitingRows()
    with pytest.raises(ValueError, match="elsewhere works on meta, where the model's first parameter is on cpu"):
        waiting.add(meter, torch.empty(4, 3, device="meta"))
    waiting.add(meter, torch.ones(4, 3))
    waiting.sum_up()
    assert meter.sums[0].item() == 12
