"""What the monitor does not see: gauges, and a line in the log that names it."""

from __future__ import annotations

import logging
import threading
from collections import defaultdict
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import nn

from otel_train.assembly.coverage import CoverageWatch
from otel_train.catalog import MetricSpec, monitor
from otel_train.hooks.pending import Shown
from otel_train.records import ActivationReading, Coverage, CoveredParameter, Layer, LayerSample, ParameterReading, ParameterSums
from otel_train.snapshot import Snapshot
from otel_train.testing import capture
from tests import problems
from tests.problems import Mlp

GRADIENTS = (monitor.MONITORED_PARAMETERS, monitor.LAYERS_WITHOUT_GRADIENT)


def layer(name: str) -> Layer:
    """Return a layer of matrices."""
    return Layer(name, 0, "matrix", "0")


@dataclass(frozen=True)
class Part:
    """A sampled step of one optimizer."""

    optimizer: str
    looked_at: frozenset[str]
    without: frozenset[str]


def part(optimizer: str = "SGD", *, seen: str = "", without: str = "") -> Part:
    """Return an optimizer's sampled step: parameters of 4 elements that had a gradient, and such that had none, by their letters."""
    return Part(optimizer, frozenset(seen + without), frozenset(without))


def covered(*parts: Part) -> Coverage:
    """Return what an attachment covers whose optimizers have these parameters; each is a layer, capitals are one with the small letter."""
    own = dict.fromkeys((p.optimizer, name) for p in parts for name in sorted(p.looked_at))
    parameters = [CoveredParameter(f"{name}.weight", 4, layer(name.lower()), hash(optimizer)) for optimizer, name in own]
    return Coverage(4 * len(parameters), 0, (), (), tuple(parameters))


def shown(*modules: str, silent: str = "") -> LayerSample:
    """Return a sampled step with activations of modules, some of which showed nothing."""
    sites = [(name, 8.0) for name in modules] + [(name, 0.0) for name in silent]
    readings = (
        ActivationReading("b", 0, site, n, 0, 0, 0, 0, 0, None, None, 0, name) for name, n in sites for site in ("pre", "post")
    )
    return LayerSample((), tuple(readings))


def gauges(watch: CoverageWatch) -> dict[MetricSpec, float]:
    """Return the gauges by metric."""
    values = {sample.spec: sample.value for sample in watch.samples() if isinstance(sample.value, (int, float))}
    values.pop(monitor.TRAINABLE_PARAMETERS, None)
    return values


class Watch(CoverageWatch):
    """A watch that takes samples as an attachment makes them: of each optimizer the last one is known."""

    def __init__(self, *parts: Part) -> None:
        super().__init__()
        self.looked_at: defaultdict[str, set[str]] = defaultdict(set)
        for p in parts:
            self.looked_at[p.optimizer] |= p.looked_at
        self.known, self.number = Shown(lambda _: 100), 0
        self.cover(covered(*parts))

    def take(self, sample: Part | LayerSample) -> None:
        """Take a sample; what an optimizer looks at and this step is not without had a gradient."""
        if isinstance(sample, LayerSample):
            return self.add(sample)
        sums, self.number = ParameterSums(4, 0.0, 1.0, 1.0, 0, 0), self.number + 1
        there = sorted(self.looked_at[sample.optimizer] - sample.without)
        readings = [ParameterReading(layer(name.lower()), None, sums, f"{name}.weight") for name in there]
        return self.add(self.known.add(self.number, {hash(sample.optimizer): readings}))


def watched(*samples: Part | LayerSample) -> Watch:
    """Return a watch that has taken samples."""
    watch = Watch(*(sample for sample in samples if isinstance(sample, Part)))
    for sample in samples:
        watch.take(sample)
    return watch


class Said(logging.Handler):
    """What the logger said, and in which thread."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []
        self.threads: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())
        self.threads.add(threading.current_thread().name)


@pytest.fixture
def said() -> Iterator[Said]:
    """Listen to the logger."""
    handler = Said()
    logging.getLogger("otel_train").addHandler(handler)
    yield handler
    logging.getLogger("otel_train").removeHandler(handler)


def test_a_layer_counts_as_without_gradient_where_none_of_its_parameters_had_one() -> None:
    """A layer of two matrices with one gradient is not one, and shows in the number of elements."""
    half = part(seen="a", without="Ab")
    assert gauges(watched(half)) == {monitor.MONITORED_PARAMETERS: 4, monitor.LAYERS_WITHOUT_GRADIENT: 1}


def test_nothing_missing_is_zero_and_nothing_measured_has_no_series() -> None:
    """0 is a true value once a step was sampled; before, and without an optimizer or activation modules, it would be none."""
    assert gauges(watched()) == {}
    assert gauges(watched(part(seen="ab"))) == {monitor.MONITORED_PARAMETERS: 8, monitor.LAYERS_WITHOUT_GRADIENT: 0}
    assert gauges(watched(shown("act"))) == {monitor.SILENT_ACTIVATION_MODULES: 0}


def test_an_optimizer_that_did_not_step_was_not_looked_at() -> None:
    """A GAN's steps in turn: both of the layers are covered, whichever was sampled last."""
    generator, discriminator = part("G", seen="ab"), part("D", seen="c", without="d")
    for order in ((generator, discriminator), (discriminator, generator), (discriminator, generator, generator)):
        assert gauges(watched(*order)) == {monitor.MONITORED_PARAMETERS: 12, monitor.LAYERS_WITHOUT_GRADIENT: 1}


def test_several_optimizers_in_one_step_add_up() -> None:
    """Their parts are one sample."""
    watch = Watch(part("A", seen="ab"), part("B", seen="c", without="d"))
    sums = ParameterSums(4, 0.0, 1.0, 1.0, 0, 0)
    readings = {name: ParameterReading(layer(name), None, sums, f"{name}.weight") for name in "abc"}
    watch.add(Shown(lambda _: 100).add(1, {hash("A"): [readings["a"], readings["b"]], hash("B"): [readings["c"]]}))
    assert gauges(watch) == {monitor.MONITORED_PARAMETERS: 12, monitor.LAYERS_WITHOUT_GRADIENT: 1}


def test_what_was_known_of_frozen_layers_ends_with_the_next_sample() -> None:
    """Also of an optimizer that has not stepped since; until then the gauges stay."""
    watch = watched(part("A", seen="a"), part("B", without="b"))
    watch.cover(covered(part("A", seen="a")))
    assert gauges(watch)[monitor.LAYERS_WITHOUT_GRADIENT] == 1
    watch.take(part("A", seen="a"))
    assert gauges(watch) == {monitor.MONITORED_PARAMETERS: 4, monitor.LAYERS_WITHOUT_GRADIENT: 0}


def test_a_module_that_has_shown_a_value_once_is_not_silent_any_more() -> None:
    """Silent means never."""
    watch = watched(shown("a", silent="bc"))
    assert gauges(watch)[monitor.SILENT_ACTIVATION_MODULES] == 2
    watch.take(shown("b", silent="ac"))
    assert gauges(watch)[monitor.SILENT_ACTIVATION_MODULES] == 1


def test_one_of_several_modules_of_a_block_is_found(said: Said) -> None:
    """They share a layer, and have names of their own."""
    watched(*[shown("a", silent="b")] * 3)
    expected = (
        "no activation seen in 3 samples: b. A graph compiled before attach ignores its hooks: attach before the first compiled call, or "
        "call torch._dynamo.reset() now. Otherwise train in train() mode and by the model's own forward, and leave modules that are not "
        "used out with activations=(…)"
    )
    assert said.lines == [expected]


def test_parameters_without_gradient_are_said_after_three_samples_in_a_row(said: Said) -> None:
    """The first five by name, and what to do."""
    watch = watched(*[part(seen="x", without="abcdefg")] * 2)
    assert said.lines == []
    watch.take(part(seen="x", without="abcdefg"))
    expected = (
        "no gradient in 3 samples in a row: a.weight, b.weight, c.weight, d.weight, e.weight and 2 more. What requires a gradient and "
        "gets none does not learn, and has no series: look whether its output reaches the loss (an unused branch, detach, no_grad), or "
        "freeze it with requires_grad_(False)"
    )
    assert said.lines == [expected]


def test_experts_that_a_batch_was_not_routed_to_are_not_said(said: Said) -> None:
    """Others are without gradient each time, and one for two samples."""
    watched(*(part(seen="x", without=missing) for missing in ("ab", "ac", "bc", "ab", "c", "ac", "ad")))
    assert said.lines == []


def test_what_is_missing_is_said_again_only_with_something_new(said: Said) -> None:
    """Neither at each sample nor when some of it has come back."""
    watched(*(part(seen="x", without=missing) for missing in ["ab"] * 9 + ["a"] * 5 + ["ab"] * 5))
    assert len(said.lines) == 1
    watched(*[shown(silent="ab")] * 9, *[shown("a", silent="b")] * 9)
    assert len(said.lines) == 2
    watched(*(part(seen="x", without=missing) for missing in ["a"] * 4 + ["ab"] * 4))
    assert [line.split(".")[0] for line in said.lines[2:]] == ["no gradient in 3 samples in a row: a"] * 2
    assert "a.weight, b.weight. What" in said.lines[-1]


def test_samples_of_another_optimizer_neither_count_nor_break_the_row(said: Said) -> None:
    """Three of its own."""
    missing, other = part("D", seen="x", without="d"), part("G", seen="g")
    watch = watched(missing, other, other, missing, other)
    assert said.lines == []
    watch.take(missing)
    assert len(said.lines) == 1


class Detached(Mlp):
    """An Mlp whose front gets no gradient, and which has a module that nothing calls."""

    def __init__(self) -> None:
        super().__init__(hidden=16)
        self.unused = nn.ReLU()
        self.cut = True

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map vectors to logits."""
        hidden = self.act(self.norm(self.first(x)))
        logits: torch.Tensor = self.last(self.tanh(self.second(hidden.detach() if self.cut else hidden)))
        return logits


def train(model: nn.Module, *optimizers: torch.optim.Optimizer, steps: int = 4, forward: Callable[..., Any] | None = None) -> None:
    """Make steps of all optimizers."""
    for step in range(steps):
        x, y = problems.vector_batch(step)
        nn.functional.cross_entropy((forward or model)(x), y).backward()  # type: ignore[no-untyped-call]  # torch's
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()


def sgd(*modules: nn.Module) -> torch.optim.Optimizer:
    """Return the plainest optimizer."""
    return torch.optim.SGD([p for module in modules for p in module.parameters()], lr=0.1)


def elements(*modules: nn.Module) -> int:
    """Return the number of elements of modules."""
    return sum(p.numel() for module in modules for p in module.parameters())


def values(snapshot: Snapshot) -> list[float | None]:
    """Return monitored parameters, layers without gradient, silent modules."""
    return [snapshot.value(spec) for spec in (*GRADIENTS, monitor.SILENT_ACTIVATION_MODULES)]


def test_a_training_shows_what_it_leaves_out_and_says_it_in_the_monitors_thread(said: Said) -> None:
    """Layers before a detach, and a module that nothing calls; each is named once, however long it goes on."""
    model = Detached()
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (attached, sink):
        train(model, optimizer, steps=8)
        assert values(problems.seen(attached, sink)) == [elements(model.second, model.last), 2, 1]
        model.cut = False
        train(model, optimizer, steps=1)
        assert values(problems.seen(attached, sink)) == [elements(model), 0, 1]
    assert sorted(line.split(". ")[0] for line in said.lines) == [
        "no activation seen in 3 samples: unused",
        "no gradient in 3 samples in a row: first.weight, first.bias, norm.weight, norm.bias",
    ]
    assert said.threads == {"otel-train"}


def test_modules_are_named_also_where_layers_are_blocks(said: Said) -> None:
    """A block of three activation modules, one of which nothing calls, is one layer."""
    model = nn.Sequential(Detached())
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1, layers="block") as (attached, sink):
        train(model, optimizer)
        assert values(problems.seen(attached, sink))[2] == 1
    assert any(line.startswith("no activation seen in 3 samples: 0.unused. ") for line in said.lines)


def test_layers_that_are_frozen_on_purpose_are_not_missing(said: Said) -> None:
    """Before attach, and later."""
    model = Detached()
    model.first.requires_grad_(requires_grad=False)
    optimizer = sgd(model)
    model.cut = False
    with capture(model, optimizer, every_n_steps=1, activations=("act", "tanh")) as (attached, sink):
        train(model, optimizer)
        assert values(problems.seen(attached, sink)) == [elements(model.norm, model.second, model.last), 0, 0]
        model.second.requires_grad_(requires_grad=False)
        train(model, optimizer)
        snapshot = problems.seen(attached, sink)
        assert values(snapshot) == [elements(model.norm, model.last), 0, 0]
        assert snapshot.value(monitor.TRAINABLE_PARAMETERS) == elements(model.norm, model.last)
    assert said.lines == []


def test_parameters_that_are_thawed_later_join_the_coverage(said: Said) -> None:
    """wandb/wandb #2625: parameters unfrozen during training were not tracked."""
    model = Mlp(hidden=16)
    model.first.requires_grad_(requires_grad=False)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (attached, sink):
        train(model, optimizer)
        model.first.requires_grad_(requires_grad=True)
        train(model, optimizer)
        assert values(problems.seen(attached, sink)) == [elements(model), 0, 0]
    assert said.lines == []


def test_a_model_without_any_gradient_is_monitored_to_zero_and_named(said: Said) -> None:
    """Lightning-AI/pytorch-lightning #17512, deepspeedai/DeepSpeed #7255: nothing was logged, and no word of it."""
    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1, activations=False) as (attached, sink):
        for _ in range(3):
            optimizer.step()
        snapshot = problems.seen(attached, sink)
        assert values(snapshot) == [0, 4, None]
        assert snapshot.value(monitor.TRAINABLE_PARAMETERS) == elements(model)
    assert [line.split(". ")[0] for line in said.lines] == [
        "no gradient in 3 samples in a row: first.weight, first.bias, norm.weight, norm.bias, second.weight and 3 more"
    ]


def test_gradients_that_are_read_wrongly_are_not_covered(monkeypatch: pytest.MonkeyPatch) -> None:
    """A failure of ours shows: 0 of all elements, not those of before."""
    from otel_train.hooks.shape_group import ShapeGroup

    def fails(self: ShapeGroup, scale: torch.Tensor | None) -> None:
        del self, scale
        raise RuntimeError("planted")

    model = Mlp(hidden=16)
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (attached, sink):
        train(model, optimizer, steps=1)
        assert values(problems.seen(attached, sink))[0] == elements(model)
        monkeypatch.setattr(ShapeGroup, "read_gradients", fails)
        train(model, optimizer, steps=1)
        assert values(problems.seen(attached, sink))[0] == 0


def test_a_skipped_step_says_nothing_about_coverage(said: Said) -> None:
    """A scaler's step with an overflow has no sample: its layers are as they were."""
    model = Detached()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, fused=True)
    model.cut = False
    with capture(model, optimizer, every_n_steps=1, activations=False) as (attached, sink):
        train(model, optimizer, steps=1)
        scaler = torch.amp.GradScaler("cpu", init_scale=4.0)
        model.cut = True
        for _ in range(4):
            loss = problems.vector_loss(model, 0) * float("inf")
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
        snapshot = problems.seen(attached, sink)
        assert values(snapshot) == [elements(model), 0, None]
    assert said.lines == []


def test_optimizers_that_step_in_turn_are_both_covered(said: Said) -> None:
    """Each samples its own parameters: steps 1, 3 and 9 are the first one's, 6 and 12 the second one's."""
    model = Mlp(hidden=16)
    first, second = sgd(model.first, model.norm), sgd(model.second, model.last)
    with capture(model, [first, second], every_n_steps=3) as (attached, sink):
        for _ in range(6):
            train(model, first, steps=1)
            train(model, second, steps=1)
        assert values(problems.seen(attached, sink)) == [elements(model), 0, 0]
    assert said.lines == []


def test_a_parameter_of_no_optimizer_is_covered_if_it_has_a_gradient(said: Said) -> None:
    """It is the alert on stalled layers that finds it; without a gradient it has no series there, and counts here."""
    model = Detached()
    optimizer = sgd(model.norm, model.second, model.last)
    model.cut = False
    with capture(model, optimizer, every_n_steps=1, activations=False) as (attached, sink):
        train(model, optimizer)
        assert values(problems.seen(attached, sink)) == [elements(model), 0, None]
        assert said.lines == []
        model.cut = True
        model.zero_grad()
        train(model, optimizer)
        assert values(problems.seen(attached, sink)) == [elements(model.second, model.last), 2, None]


def test_without_an_optimizer_only_activations_are_covered() -> None:
    """Gradients are not measured, which is as asked."""
    model = Detached()
    with capture(model, None, every_n_steps=1) as (attached, sink):
        train(model)
        attached.observe(loss=1.0)
        assert values(problems.seen(attached, sink)) == [None, None, 1]


@pytest.mark.parametrize("how", ["a submodule is called", "the model is in eval mode"])
def test_a_loop_that_goes_round_the_hooks_is_found(how: str, said: Said) -> None:
    """wandb/wandb #1819: a blank page, without a word; here every activation module is named."""
    model = nn.Sequential(Mlp(hidden=16))
    optimizer = sgd(model)
    with capture(model, optimizer, every_n_steps=1) as (attached, sink):
        model.train(how == "a submodule is called")
        train(model, optimizer, forward=model[0] if model.training else model)
        assert values(problems.seen(attached, sink)) == [elements(model), 0, 2]
    assert [line.split(". ")[0] for line in said.lines] == ["no activation seen in 3 samples: 0.act, 0.tanh"]


def test_forwards_of_another_attachment_begin_anew() -> None:
    """Since attach means: since this one."""
    model = Detached()
    optimizer = sgd(model)
    for _ in range(2):
        with capture(model, optimizer, every_n_steps=1) as (attached, sink):
            assert values(problems.seen(attached, sink)) == [None, None, None]
            train(model, optimizer, steps=1)
            assert values(problems.seen(attached, sink))[2] == 1
