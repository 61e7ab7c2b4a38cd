"""Optimizers: several of them, closures, groups and their settings, accumulation, compiled models."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, cast

import pytest
import torch
from torch import nn
from torch.optim import Optimizer

from otel_train.catalog import gradients, run, throughput, updates
from otel_train.catalog import loss as loss_catalog
from otel_train.catalog import monitor as monitor_catalog
from otel_train.config import KINDS
from otel_train.testing import capture
from tests import problems
from tests.problems import Gpt, Mlp


@pytest.fixture(autouse=True)
def without_graphs() -> Iterator[None]:
    """Start without compiled graphs, and leave none."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def test_one_step_is_counted_however_often_the_closure_runs() -> None:
    """LBFGS runs forward and backward several times in a step: micro-batches rise by the calls, steps by one."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)
    calls = 0

    def closure() -> float:
        nonlocal calls
        calls += 1
        optimizer.zero_grad()
        loss = problems.vector_loss(model, 0)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        return loss.item()

    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(2):
            optimizer.step(closure)  # type: ignore[no-untyped-call]  # torch's
            snapshot = problems.seen(monitor, sink)
            assert snapshot.value(run.STEPS) == step + 1
            assert snapshot.value(run.SAMPLED_STEP) == step + 1
            assert snapshot.value(run.MICRO_BATCHES) == calls
    assert calls > 4


def test_the_closure_gets_its_result_through_to_the_caller() -> None:
    """``optimizer.step(closure)`` returns what it returned before."""
    model = nn.Linear(4, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def closure() -> torch.Tensor:
        optimizer.zero_grad()
        loss: torch.Tensor = model(torch.ones(2, 4)).square().sum()
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        return loss

    expected = model(torch.ones(2, 4)).square().sum().item()
    with capture(model, optimizer, every_n_steps=1):
        assert optimizer.step(closure).item() == expected


def test_a_closure_that_raises_reaches_the_user_and_the_next_step_is_right() -> None:
    """An exception in the closure is the user's; what the monitor began is forgotten."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def broken() -> float:
        raise RuntimeError("no memory")

    with capture(model, optimizer, every_n_steps=1, updates="exact", kinds=KINDS) as (monitor, sink):
        with pytest.raises(RuntimeError, match="no memory"):
            optimizer.step(broken)
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        before = problems.weights(model)
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEPS) == 1
    expected = problems.naive_ratios(model, before, problems.weights(model), KINDS)
    assert problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO) == pytest.approx(expected, rel=1e-6)


def two_optimizers(model: Mlp) -> tuple[Optimizer, Optimizer]:
    """Split the model between AdamW for matrices and SGD for the rest."""
    matrices = [p for p in model.parameters() if p.dim() > 1]
    rest = [p for p in model.parameters() if p.dim() == 1]
    return torch.optim.AdamW(matrices, lr=1e-3), torch.optim.SGD(rest, lr=0.1)


@pytest.mark.parametrize("named", [False, True], ids=["list", "mapping"])
def test_two_optimizers_make_one_step_with_values_from_both(*, named: bool) -> None:
    """Both step once in a step; each layer has its optimizer's group, and the global numbers are over both."""
    model = Mlp(hidden=32)
    first, second = two_optimizers(model)
    given: Any = {"matrices": first, "rest": second} if named else [first, second]
    with capture(model, given, every_n_steps=1, updates="exact", kinds=KINDS) as (monitor, sink):
        for step in range(2):
            first.zero_grad()
            second.zero_grad()
            problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            before, grads = problems.weights(model), problems.gradients(model)
            first.step()
            second.step()
            snapshot = problems.seen(monitor, sink)
            after = problems.weights(model)
            assert snapshot.value(run.STEPS) == step + 1
            expected = problems.naive_ratios(model, before, after, KINDS)
            assert problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO) == pytest.approx(expected, rel=1e-6)
            whole = problems.ratio(problems.everything(before), problems.everything(after))
            assert snapshot.value(updates.UPDATE_RATIO) == pytest.approx(whole, rel=1e-6)
            norm = problems.everything(grads).norm().item()
            assert snapshot.value(gradients.GRAD_NORM, stage="post_clip") == pytest.approx(norm, rel=1e-6)
    names = ("matrices", "rest") if named else ("AdamW", "SGD")
    groups = {s.labels[2]: s.labels[3] for s in snapshot.find(updates.LAYER_UPDATE_RATIO)}
    assert groups == {"matrix": f"{names[0]}/0", "norm": f"{names[1]}/0", "vector": f"{names[1]}/0"}
    rates = {s.labels: s.value for s in snapshot.find(run.LEARNING_RATE)}
    assert rates == {(names[0], f"{names[0]}/0"): 1e-3, (names[1], f"{names[1]}/0"): 0.1}


def test_two_optimizers_of_one_class_are_told_apart() -> None:
    """A list of two SGDs: the second has a number."""
    model = Mlp(hidden=16)
    halves = list(model.first.parameters()), list(model.last.parameters())
    optimizers = [torch.optim.SGD(half, lr=0.1 * (i + 1)) for i, half in enumerate(halves)]
    with capture(model, optimizers, every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        for optimizer in optimizers:
            optimizer.step()
        rates = {s.labels[0]: s.value for s in problems.seen(monitor, sink).find(run.LEARNING_RATE)}
    assert rates == {"SGD": 0.1, "SGD2": 0.2}


def test_parameter_groups_are_named_and_their_settings_exported() -> None:
    """A group's own name where it has one, else its index; rate, decay, betas and epsilon as they are at the step."""
    model = Mlp(hidden=16)
    groups: list[dict[str, Any]] = [
        {"params": list(model.first.parameters()), "name": "early", "lr": 3e-4, "weight_decay": 0.2},
        {"params": [*model.second.parameters(), *model.last.parameters(), *model.norm.parameters()]},
    ]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.8, 0.95), eps=1e-6, weight_decay=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.param_groups[1]["lr"] = 5e-4
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    expected = {
        run.LEARNING_RATE: (3e-4, 5e-4), run.WEIGHT_DECAY: (0.2, 0.1), run.OPTIMIZER_BETA1: (0.8, 0.8),
        run.OPTIMIZER_BETA2: (0.95, 0.95), run.OPTIMIZER_EPSILON: (1e-6, 1e-6),
    }  # fmt: skip
    for spec, (early, late) in expected.items():
        assert {s.labels: s.value for s in snapshot.find(spec)} == {("AdamW", "early"): early, ("AdamW", "1"): late}
    assert {s.labels[0]: s.labels[3] for s in snapshot.find(updates.LAYER_UPDATE_RATIO)} == {
        "first": "early", "norm": "1", "second": "1", "last": "1",
    }  # fmt: skip


def test_a_learning_rate_that_is_a_tensor_is_exported() -> None:
    """Capturable optimizers keep it on the device."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=torch.tensor(2.0**-10))
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        assert problems.seen(monitor, sink).value(run.LEARNING_RATE) == 2.0**-10


def test_the_expected_learning_rate_follows_a_declared_warmup() -> None:
    """A scheduler that warms up as declared has the ratio 1; after the warmup there is none."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 4))
    found = []
    with capture(model, optimizer, every_n_steps=1, warmup_steps=4, planned_steps=8) as (monitor, sink):
        for step in range(5):
            problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            scheduler.step()
            found.append(problems.seen(monitor, sink).value(run.LEARNING_RATE_EXPECTED_RATIO))
    assert found == [pytest.approx(1.0)] * 4 + [None]


SCHEDULES: dict[str, Any] = {
    "a constant rate": None,
    "a warmup": lambda o: torch.optim.lr_scheduler.LambdaLR(o, lambda step: min(1.0, (step + 1) / 4)),
    "a decay": lambda o: torch.optim.lr_scheduler.ExponentialLR(o, 0.5),
    "one cycle": lambda o: torch.optim.lr_scheduler.OneCycleLR(o, max_lr=0.4, total_steps=6, pct_start=0.5),
}


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_schedule_ratio_is_the_rate_over_the_peak_that_the_scheduler_declares(schedule: str) -> None:
    """Known from the first step, also where the schedule starts far below its peak."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    make = SCHEDULES[schedule]
    scheduler = make(optimizer) if make else None
    peak = 0.4 if schedule == "one cycle" else 0.1
    expected, found = [], []
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(5):
            problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            expected.append(optimizer.param_groups[0]["lr"] / peak)
            optimizer.step()
            if scheduler:
                scheduler.step()
            found.append(problems.seen(monitor, sink).value(run.LEARNING_RATE_SCHEDULE_RATIO))
    if make is None:  # nothing says that the first rate is the peak; the second does
        assert found.pop(0) is None
        del expected[0]
    assert found == pytest.approx(expected)


class Accelerated:
    """Wraps an optimizer as frameworks do."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer

    def step(self) -> None:
        """Step."""
        self.optimizer.step()


def test_a_wrapper_with_an_inner_optimizer_is_unwrapped() -> None:
    """As accelerate's is: the hooks go to the real one."""
    model = Mlp(hidden=16)
    wrapped = Accelerated(torch.optim.SGD(model.parameters(), lr=0.1))
    with capture(model, Accelerated(wrapped), every_n_steps=1) as (monitor, sink):  # type: ignore[arg-type]  # duck-typed
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        wrapped.step()
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEPS) == 1
    assert snapshot.find(updates.LAYER_UPDATE_RATIO)


def test_every_n_steps_samples_the_first_step_and_every_nth() -> None:
    """The layer gauges show the last sampled step, and say which it was."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    found, ratios = [], []
    with capture(model, optimizer, every_n_steps=3) as (monitor, sink):
        for step in range(7):
            optimizer.zero_grad()
            problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
            snapshot = problems.seen(monitor, sink)
            found.append(snapshot.value(run.SAMPLED_STEP))
            ratios.append(snapshot.value(updates.UPDATE_RATIO))
            assert snapshot.value(run.STEP) == step + 1
    assert found == [1, 1, 3, 3, 3, 6, 6]
    assert len(set(ratios)) == 3


def test_optimizers_that_share_a_parameter_show_it_once() -> None:
    """The first optimizer has it; nothing is counted twice."""
    model = nn.Sequential(nn.Linear(64, 16, bias=False), nn.Linear(16, 10, bias=False))
    first = torch.optim.SGD(model.parameters(), lr=0.1)
    second = torch.optim.SGD(model[1].parameters(), lr=0.1)
    with capture(model, [first, second], every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        norm = problems.everything(problems.gradients(model)).norm().item()
        first.step()
        second.step()
        snapshot = problems.seen(monitor, sink)
    assert len(snapshot.find(updates.LAYER_UPDATE_RATIO)) == 2
    assert snapshot.value(gradients.GRAD_NORM, stage="post_clip") == pytest.approx(norm, rel=1e-6)
    assert snapshot.value(monitor_catalog.MONITORED_PARAMETERS) == sum(p.numel() for p in model.parameters())


# torch's own: the compiler looks whether tensors between its graphs have a gradient, with and without a monitor
@pytest.mark.filterwarnings("ignore:The .grad attribute of a Tensor that is not a leaf:UserWarning")
@pytest.mark.parametrize("how", ["whole_then_attach", "attach_then_whole", "submodules"])
def test_compiled_models_export_update_ratios_that_equal_clones(how: str) -> None:
    """torch.compile of the whole model, before or after attaching, and block by block; layers keep their plain names."""
    model = Gpt(width=32, length=32)
    names = {name.rpartition(".")[0] for name, p in model.named_parameters() if p.dim() > 1}
    root: nn.Module = model
    if how == "whole_then_attach":
        root = cast("nn.Module", torch.compile(model, backend="eager"))
    if how == "submodules":
        for block in model.blocks:
            block.compile(backend="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture(root, optimizer, every_n_steps=1, updates="exact") as (monitor, sink):
        if how == "attach_then_whole":
            root = cast("nn.Module", torch.compile(model, backend="eager"))
        for step in range(3):
            optimizer.zero_grad()
            problems.text_loss(root, problems.byte_ids(), step, batch=2, length=32).backward()  # type: ignore[no-untyped-call]  # torch's
            before = problems.weights(model)
            optimizer.step()
            monitor.observe(tokens=64)
            snapshot = problems.seen(monitor, sink)
            expected = problems.naive_ratios(model, before, problems.weights(model), ("matrix", "embedding", "norm"))
            assert problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO) == pytest.approx(expected, rel=1e-6)
    assert {layer for layer, kind in expected if kind != "norm"} == names
    assert snapshot.value(run.STEPS) == 3
    assert snapshot.value(throughput.TOKENS) == 192
    assert sum(s.value for s in snapshot.find(monitor_catalog.MONITOR_ERRORS) if isinstance(s.value, (int, float))) == 0
    (info,) = snapshot.find(run.RUN_INFO)
    assert info.labels[0] == "Gpt"


@pytest.mark.parametrize("fused", [False, True])
@pytest.mark.parametrize("unscaled_first", [False, True])
def test_a_grad_scalers_gradients_are_shown_unscaled_and_its_skipped_steps_counted(*, fused: bool, unscaled_first: bool) -> None:
    """A fused optimizer sees scaled gradients in its step, and is called even for a step that does not happen."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
    true_norm = problems.everything(problems.gradients(model)).norm().item()
    optimizer.zero_grad()
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for factor in (1.0, float("inf")):
            loss = problems.vector_loss(model, 0) * factor
            scaler.scale(loss).backward()  # type: ignore[no-untyped-call]  # torch's
            if unscaled_first:
                scaler.unscale_(optimizer)
            scaler.step(optimizer)
            scaler.update()
            optimizer.zero_grad()
            monitor.observe(loss_scale=scaler.get_scale())
            snapshot = problems.seen(monitor, sink)
            assert snapshot.value(gradients.GRAD_NORM, stage="post_clip") == pytest.approx(true_norm, rel=1e-5)
    assert snapshot.value(run.STEPS) == 1
    assert snapshot.value(run.SKIPPED_STEPS) == 1
    assert snapshot.value(loss_catalog.LOSS_SCALE) == 512.0
    assert (snapshot.value(updates.UPDATE_RATIO) or 0) > 0


class Plain(Optimizer):
    """An optimizer whose groups have no settings at all."""

    def __init__(self, parameters: Iterator[nn.Parameter]) -> None:
        super().__init__(parameters, {})

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:  # type: ignore[override]  # as optimizers are written by hand
        """Descend."""
        del closure
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.sub_(0.1 * parameter.grad)


def test_a_group_without_a_learning_rate_has_no_series_of_one() -> None:
    """Neither NaN nor 0."""
    model = Mlp(hidden=16)
    optimizer = Plain(model.parameters())
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert snapshot.find(run.LEARNING_RATE) == []
    assert (snapshot.value(updates.UPDATE_RATIO) or 0) > 0


class Odd(nn.Module):
    """Parameters of every kind that a model may have."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.tensor(2.0))
        self.mix = nn.Parameter(torch.randn(8, 8, dtype=torch.complex64))
        self.tokens = nn.Embedding(3000, 8, sparse=True)
        self.wide = nn.Linear(8, 8, dtype=torch.float64)
        self.narrow = nn.Linear(8, 8, dtype=torch.bfloat16)
        self.parts = nn.ParameterList([nn.Parameter(torch.randn(4, 4)) for _ in range(2)])
        self.nothing = nn.Parameter(torch.empty(0, 3))

    def forward(self, *, ids: torch.Tensor) -> torch.Tensor:
        """Map (batch,) ids to a loss, ()."""
        x = self.narrow(self.wide((self.tokens(ids) * self.scale).double()).bfloat16())
        mixed = (x.to(torch.complex64) @ self.mix).abs().square().mean()
        rest: torch.Tensor = mixed + sum(part.square().sum() for part in self.parts) + self.nothing.sum()
        return rest


def test_parameters_of_every_kind_are_measured() -> None:
    """0-d, complex, sparse gradients, fp64, bf16, empty; keyword arguments only; a learning rate that is a tensor."""
    model = Odd()
    optimizer = torch.optim.SGD(model.parameters(), lr=torch.tensor(0.01))
    with capture(model, optimizer, every_n_steps=1, kinds=KINDS) as (monitor, sink):
        for _ in range(3):
            optimizer.zero_grad()
            model(ids=torch.randint(0, 3000, (4,))).backward()
            optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert sum(float(s.value) for s in snapshot.find(monitor_catalog.MONITOR_ERRORS) if isinstance(s.value, (int, float))) == 0
    ratios = problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO)
    assert {name for name, _ in ratios} == {"scale", "mix", "tokens", "wide", "narrow", "parts"}
    assert all(value > 0 for value in ratios.values())
    assert snapshot.value(monitor_catalog.MONITORED_PARAMETERS) == snapshot.value(monitor_catalog.TRAINABLE_PARAMETERS)
    assert snapshot.value(run.LEARNING_RATE) == pytest.approx(0.01)


def test_a_value_that_the_loop_overwrites_is_exported_as_it_was() -> None:
    """Running losses and learning rates that are tensors change in place before the step is closed."""
    model = Mlp(hidden=16)
    rate = torch.tensor(0.5)
    optimizer = torch.optim.SGD(model.parameters(), lr=rate)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        running = problems.vector_loss(model, 0)
        running.backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        kept = running.detach()
        expected = kept.item()
        monitor.observe(loss=kept)
        kept.zero_()
        rate.fill_(0.1)
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(loss_catalog.LOSS) == pytest.approx(expected)
    assert snapshot.value(run.LEARNING_RATE) == 0.5


def test_closing_within_a_step_does_not_reach_the_loop() -> None:
    """A signal handler or another thread may close while the optimizer runs its hooks; the user's hooks after ours still run."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    called: list[str] = []
    with capture(model, optimizer, every_n_steps=1) as (monitor, _):
        optimizer.register_step_pre_hook(lambda *_: monitor.close())
        optimizer.register_step_pre_hook(lambda *_: called.append("before"))
        optimizer.register_step_post_hook(lambda *_: called.append("after"))
        for _ in range(2):
            problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
            optimizer.step()
    assert called == ["before", "after"] * 2


def test_a_clip_whose_step_was_skipped_does_not_count_in_the_next() -> None:
    """A scaler that skips says nothing to hooks: the parts clipped for it are forgotten at the next clip."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for factor in (1e6, 1.0):
            optimizer.zero_grad()
            (problems.vector_loss(model, 0) * factor).backward()  # type: ignore[no-untyped-call]  # torch's
            norm = monitor.clip_grad_norm_(1e3)
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(gradients.GRAD_NORM, stage="pre_clip") == pytest.approx(norm.item())
    assert snapshot.value(gradients.CLIPPED_STEPS) == 0


def test_groups_of_one_name_have_series_of_their_own() -> None:
    """A group called as another one's index."""
    model = Mlp(hidden=16)
    first, *rest = model.parameters()
    optimizer = torch.optim.SGD([{"params": [first], "name": "1", "lr": 0.1}, {"params": rest, "lr": 0.2}], lr=0.3)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert {s.labels[1]: s.value for s in snapshot.find(run.LEARNING_RATE)} == {"1": 0.1, "1_1": 0.2}
