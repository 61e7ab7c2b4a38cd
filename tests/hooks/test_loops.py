"""Shapes of training loops: each exports what naive clones around its steps say, counts as it should, and trains as without a monitor."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import pytest
import torch
from accelerate import Accelerator  # type: ignore[import-untyped]
from torch import nn
from torch.optim import SGD, AdamW, Optimizer
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from otel_train.catalog import activations, gradients, run, throughput, updates
from otel_train.catalog import loss as loss_catalog
from otel_train.guard import IN_TRAINING
from otel_train.hooks.cadence import RECENT
from otel_train.snapshot import HistogramValue, Snapshot
from otel_train.testing import capture
from tests import problems
from tests.hooks.watch import STEPS, TOLERANCE, Watch, check_untouched, check_values
from tests.problems import Mlp

# torch's own, when the compiler is first used
pytestmark = pytest.mark.filterwarnings("ignore:.*torch.jit.*:DeprecationWarning")


@pytest.fixture(autouse=True)
def without_graphs() -> Iterator[None]:
    """Start without compiled graphs, and leave none."""
    torch.compiler.reset()
    yield
    torch.compiler.reset()


def backward(watch: Watch, model: nn.Module, step: int, share: float = 1.0) -> torch.Tensor:
    """Make a micro-batch's forward and backward, and note its loss."""
    loss = problems.vector_loss(model, step) * share
    loss.backward()  # type: ignore[no-untyped-call]  # torch's
    watch.losses.append(loss.item())
    watch.micro_batches += 1
    return loss.detach()


def simple(
    watch: Watch, optimizer: Optimizer, call: Callable[[], Any] | None = None, between: Callable[[], Any] | None = None
) -> None:
    """Train with one optimizer, one micro-batch a step; ``between`` runs before the step."""
    for step in range(STEPS):
        optimizer.zero_grad()
        loss = backward(watch, watch.model, step)
        if between is not None:
            between()
        watch.step(optimizer, call)
        watch.observe(loss=loss)
        watch.steps += 1


def plain(watch: Watch) -> None:
    """As in any tutorial; never calls ``observe``."""
    model = Mlp(hidden=16)
    optimizer = SGD(model.parameters(), lr=0.1, momentum=0.9)
    watch.attach(model, optimizer)
    for step in range(STEPS):
        optimizer.zero_grad()
        backward(watch, model, step)
        watch.step(optimizer)
        watch.steps += 1


def zero_grad_before_observe(watch: Watch) -> None:
    """The gradients are gone when the monitor hears of the micro-batch."""
    model = Mlp(hidden=16)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    watch.attach(model, optimizer)
    for step in range(STEPS):
        loss = backward(watch, model, step)
        watch.step(optimizer)
        optimizer.zero_grad(set_to_none=True)
        watch.observe(loss=loss)
        watch.steps += 1


def accumulation(watch: Watch) -> None:
    """Three micro-batches a step, each observed: gradients are those accumulated, steps are not micro-batches.

    wandb/wandb #10100 and #2258, Lightning #5405 and #20346.
    """
    model = Mlp(hidden=16)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    watch.attach(model, optimizer)
    for step in range(STEPS):
        for micro in range(3):
            watch.observe(loss=backward(watch, model, 3 * step + micro, 1 / 3))
        watch.step(optimizer)
        optimizer.zero_grad()
        watch.steps += 1


def clipping(how: str) -> Callable[[Watch], None]:
    """Clip by torch's function, by the monitor's, by value."""

    def loop(watch: Watch) -> None:
        model = Mlp(hidden=16)
        optimizer = SGD(model.parameters(), lr=0.1)
        watch.attach(model, optimizer)
        ways: dict[str, Callable[[], Any]] = {
            "torch": lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.05),
            "ours": lambda: watch.clip(0.05),
            "value": lambda: nn.utils.clip_grad_value_(model.parameters(), 0.002),
        }
        simple(watch, optimizer, between=ways[how])

    return loop


def implementation(**settings: Any) -> Callable[[Watch], None]:
    """AdamW's loops over parameters."""

    def loop(watch: Watch) -> None:
        model = Mlp(hidden=16)
        optimizer = AdamW(model.parameters(), lr=1e-2, **settings)
        watch.attach(model, optimizer)
        simple(watch, optimizer)

    return loop


def two_optimizers(watch: Watch) -> None:
    """Matrices and the rest, one after the other in every step."""
    model = Mlp(hidden=16)
    first = AdamW([p for p in model.parameters() if p.dim() > 1], lr=1e-2)
    second = SGD([p for p in model.parameters() if p.dim() == 1], lr=0.1)
    watch.attach(model, [first, second])
    for step in range(STEPS):
        model.zero_grad()
        watch.observe(loss=backward(watch, model, step))
        watch.step(first)
        watch.step(second)
        watch.steps += 1


def two_optimizers_and_a_closure(watch: Watch) -> None:
    """The second makes a forward and clips within its step."""
    model = Mlp(hidden=16)
    first = AdamW([p for p in model.parameters() if p.dim() > 1], lr=1e-2)
    second = SGD([p for p in model.parameters() if p.dim() == 1], lr=0.1)
    watch.attach(model, [first, second])
    for step in range(STEPS):

        def evaluate(step: int = step) -> float:
            model.zero_grad()
            loss = backward(watch, model, step)
            nn.utils.clip_grad_norm_(model.parameters(), 0.1)
            return loss.item()

        evaluate()
        watch.step(first)
        model.zero_grad()  # so that the observer takes the gradients after the step
        watch.step(second, lambda evaluate=evaluate: second.step(evaluate))  # type: ignore[misc]
        watch.steps += 1


class Gan(nn.Module):
    """A generator and a discriminator of vectors."""

    def __init__(self) -> None:
        super().__init__()
        self.generator = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 12))
        self.discriminator = nn.Sequential(nn.Linear(12, 16), nn.LeakyReLU(), nn.Linear(16, 1))

    def forward(self, noise: torch.Tensor, real: torch.Tensor | None = None) -> torch.Tensor:
        """Return the discriminator's loss where there are real vectors, else the generator's."""
        made = self.generator(noise)
        if real is None:
            return nn.functional.softplus(-self.discriminator(made)).mean()
        seen = self.discriminator(torch.cat([real, made.detach()]))
        return nn.functional.softplus(torch.cat([-seen[: len(real)], seen[len(real) :]])).mean()


def gan_parts(step: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return noise and real vectors."""
    generator = torch.Generator().manual_seed(step)
    return torch.randn(16, 8, generator=generator), torch.randn(16, 12, generator=generator) + 1


def train_gan(
    watch: Watch, model: Gan, optimizers: tuple[Optimizer, Optimizer], call: Callable[..., torch.Tensor], every: int
) -> None:
    """Step the discriminator each time, the generator every few times, as published code does."""
    discriminate, generate = optimizers
    for step in range(STEPS):
        noise, real = gan_parts(step)
        discriminate.zero_grad()
        loss = call(noise, real)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        watch.clip(0.1, model.discriminator.parameters())
        watch.step(discriminate)
        watch.losses.append(loss.item())
        watch.steps += 1
        if step % every == 0:
            generate.zero_grad()
            loss = call(noise)
            loss.backward()  # type: ignore[no-untyped-call]  # torch's
            watch.clip(0.1, model.generator.parameters())
            watch.step(generate)
            watch.losses.append(loss.item())


def gan(*, every: int, through_root: bool) -> Callable[[Watch], None]:
    """Discriminator and generator in turn; published code calls the two, and never the module that has both."""

    def loop(watch: Watch) -> None:
        model = Gan()
        optimizers = AdamW(model.discriminator.parameters(), lr=1e-3), AdamW(model.generator.parameters(), lr=1e-2)
        watch.attach(model, {"discriminator": optimizers[0], "generator": optimizers[1]})
        train_gan(watch, model, optimizers, model if through_root else model.forward, every)
        if through_root:
            watch.micro_batches = STEPS + -(-STEPS // every)

    return loop


def freezing_gan(watch: Watch) -> None:
    """The discriminator is frozen while the generator learns, as in pix2pix and CycleGAN; the generator steps first."""
    model = Gan()
    discriminate, generate = SGD(model.discriminator.parameters(), lr=0.1), SGD(model.generator.parameters(), lr=0.1)
    watch.attach(model, [generate, discriminate])
    for step in range(STEPS):
        noise, real = gan_parts(step)
        model.discriminator.requires_grad_(requires_grad=False)
        generate.zero_grad()
        loss = model(noise)
        loss.backward()
        watch.step(generate)
        model.discriminator.requires_grad_(requires_grad=True)
        discriminate.zero_grad()
        model(noise, real).backward()
        watch.step(discriminate)
        watch.losses.append(loss.item())
        watch.steps += 1
        watch.micro_batches += 2


def inside_backward(watch: Watch) -> None:
    """An optimizer a parameter, stepped as soon as its gradient is there, which then goes; torch's recipe for saving memory."""
    model = Mlp(hidden=16)
    optimizers = {p: SGD([p], lr=0.1) for p in model.parameters()}

    def hook(parameter: torch.Tensor) -> None:
        optimizer = optimizers[parameter]  # type: ignore[index]  # it is a parameter
        watch.step(optimizer)
        optimizer.zero_grad()

    for parameter in model.parameters():
        parameter.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's
    watch.attach(model, list(optimizers.values()))
    for step in range(STEPS):
        watch.observe(loss=backward(watch, model, step))
        assert all(p.grad is None for p in model.parameters())
        watch.steps += 1


def closure(make: Callable[[Any], Optimizer]) -> Callable[[Watch], None]:
    """Forward and backward are made by the optimizer, once or several times a step."""

    def loop(watch: Watch) -> None:
        model = Mlp(hidden=16)
        optimizer = make(model.parameters())
        watch.attach(model, optimizer)
        for step in range(STEPS):

            def evaluate(step: int = step) -> float:
                optimizer.zero_grad()
                return backward(watch, model, step).item()

            optimizer.zero_grad()  # so that the observer takes the gradients after the step
            watch.step(optimizer, lambda evaluate=evaluate: optimizer.step(evaluate))  # type: ignore[misc]
            watch.steps += 1

    return loop


def compiled_step(watch: Watch) -> None:
    """``torch.compile(optimizer.step)``."""
    model = Mlp(hidden=16)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    watch.attach(model, optimizer)
    simple(watch, optimizer, torch.compile(optimizer.step, backend="eager"))


def scheduled(watch: Watch) -> None:
    """Two schedulers, each of which wraps ``optimizer.step`` (research P12)."""
    model = Mlp(hidden=16)
    optimizer = AdamW(model.parameters(), lr=1e-2)
    first = torch.optim.lr_scheduler.LinearLR(optimizer, 0.1, total_iters=3)
    second = torch.optim.lr_scheduler.ExponentialLR(optimizer, 0.9)
    watch.attach(model, optimizer)

    def step() -> None:
        optimizer.step()
        first.step()
        second.step()

    simple(watch, optimizer, step)


def averaged(**settings: Any) -> Callable[[Watch], None]:
    """An EMA or SWA copy of the hooked model is kept, and evaluated in training mode, with gradients."""

    def loop(watch: Watch) -> None:
        model = Mlp(hidden=16)
        optimizer = SGD(model.parameters(), lr=0.1)
        watch.attach(model, optimizer)
        copied = AveragedModel(model, **settings)

        def step() -> None:
            optimizer.step()
            copied.update_parameters(model)
            watch.losses.append(problems.vector_loss(copied, 99).item())

        simple(watch, optimizer, step)

    return loop


class Lora(nn.Module):
    """A frozen matrix with a trainable low-rank one beside it."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(requires_grad=False)
        self.down, self.up = nn.Linear(base.in_features, 2, bias=False), nn.Linear(2, base.out_features, bias=False)
        nn.init.constant_(self.up.weight, 0.01)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Map as the base does, and add."""
        changed: torch.Tensor = self.base(x) + self.up(self.down(x))
        return changed


def adapters(watch: Watch) -> None:
    """Most parameters are frozen; the optimizer is given all of them, as some do."""
    model = Mlp(hidden=16)
    model.requires_grad_(requires_grad=False)
    model.first, model.second = Lora(model.first), Lora(model.second)  # type: ignore[assignment]
    optimizer = AdamW(model.parameters(), lr=1e-2)
    watch.attach(model, optimizer)
    simple(watch, optimizer)


def validated(watch: Watch) -> None:
    """A validation pass between the steps: with and without gradients, also between backward and step."""
    model = Mlp(hidden=16)
    optimizer = SGD(model.parameters(), lr=0.1)
    watch.attach(model, optimizer)

    def validate() -> None:
        model.eval()
        with torch.no_grad():
            watch.losses.append(problems.vector_loss(model, 99).item())
        watch.losses.append(problems.vector_loss(model, 98).item())
        model.train()

    for step in range(STEPS):
        optimizer.zero_grad()
        watch.observe(loss=backward(watch, model, step))
        validate()
        watch.step(optimizer)
        validate()
        watch.steps += 1


def thawed(watch: Watch) -> None:
    """A layer is frozen at first and thawed in the middle, another is frozen then (wandb/wandb #2625)."""
    model = Mlp(hidden=16)
    model.first.requires_grad_(requires_grad=False)
    optimizer = SGD(model.parameters(), lr=0.1)
    watch.attach(model, optimizer)
    for step in range(STEPS):
        if step == STEPS // 2:
            model.first.requires_grad_(requires_grad=True)
            model.second.requires_grad_(requires_grad=False)
            for found in (watch.gradients, watch.before, watch.after):
                for name in [name for name in found if name.startswith("second")]:
                    del found[name]
        optimizer.zero_grad()
        watch.observe(loss=backward(watch, model, step))
        watch.step(optimizer)
        watch.steps += 1


def grown(watch: Watch) -> None:
    """The optimizer is given the first layers in the middle of the training."""
    model = Mlp(hidden=16)
    late = [*model.first.parameters(), *model.norm.parameters()]
    optimizer = SGD([p for p in model.parameters() if all(p is not other for other in late)], lr=0.1)
    watch.attach(model, optimizer)
    for step in range(STEPS):
        if step == STEPS // 2:
            optimizer.add_param_group({"params": late, "lr": 0.01})
        model.zero_grad()
        watch.observe(loss=backward(watch, model, step))
        watch.step(optimizer)
        watch.steps += 1


def accelerated(watch: Watch) -> None:
    """The real accelerate, with its wrapped optimizer and scheduler, two micro-batches a step."""
    accelerator = Accelerator(cpu=True, gradient_accumulation_steps=2)
    model = Mlp(hidden=16)
    inner = AdamW(model.parameters(), lr=1e-2)
    schedule = torch.optim.lr_scheduler.ExponentialLR(inner, 0.9)
    root, optimizer, scheduler = accelerator.prepare(model, inner, schedule)
    watch.attach(root, optimizer)

    def step() -> None:
        optimizer.step()
        scheduler.step()

    for micro in range(2 * STEPS):
        with accelerator.accumulate(root):
            loss = problems.vector_loss(root, micro)
            accelerator.backward(loss)
            watch.losses.append(loss.item())
            watch.micro_batches += 1
            if accelerator.sync_gradients:
                accelerator.clip_grad_norm_(root.parameters(), 0.5)
                watch.steps += 1
            watch.step(inner, step)
            optimizer.zero_grad()
            watch.observe(loss=loss)


LOOPS: dict[str, Callable[[Watch], None]] = {
    "plain, never observes": plain,
    "zero_grad(set_to_none) before observe": zero_grad_before_observe,
    "accumulation": accumulation,
    "clip_grad_norm_ of torch": clipping("torch"),
    "clip_grad_norm_ of ours": clipping("ours"),
    "clip_grad_value_": clipping("value"),
    "single": implementation(foreach=False),
    "foreach": implementation(foreach=True),
    "fused": implementation(fused=True),
    "two optimizers": two_optimizers,
    "two optimizers, one with a closure": two_optimizers_and_a_closure,
    "gan": gan(every=1, through_root=False),
    "gan, root called": gan(every=1, through_root=True),
    "gan, 3 to 1": gan(every=3, through_root=False),
    "gan, 3 to 1, root called": gan(every=3, through_root=True),
    "gan, frozen in turn": freezing_gan,
    "inside backward": inside_backward,
    "SGD with a closure": closure(lambda p: SGD(p, lr=0.1)),
    "LBFGS": closure(lambda p: torch.optim.LBFGS(p, lr=0.5, max_iter=4)),
    "compiled step": compiled_step,
    "schedulers": scheduled,
    "EMA": averaged(multi_avg_fn=get_ema_multi_avg_fn(0.9)),  # type: ignore[no-untyped-call]  # torch's
    "SWA": averaged(use_buffers=True),
    "adapters": adapters,
    "validation passes": validated,
    "thawed later": thawed,
    "group added later": grown,
    "accelerate": accelerated,
}


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_trains_bit_for_bit_as_without_a_monitor(name: str) -> None:
    """Losses and final weights."""
    check_untouched(LOOPS[name])


@pytest.mark.parametrize("name", LOOPS)
def test_a_loop_exports_what_clones_around_its_steps_say(name: str) -> None:
    """Norms and update ratios of every layer, and over the model; steps and micro-batches; and no error of ours."""
    check_values(LOOPS[name])


def ratios_of(snapshot: Snapshot, part: str) -> list[float]:
    """Return the update ratios of a GAN's half."""
    found = problems.layer_values(snapshot, updates.LAYER_UPDATE_RATIO)
    return [value for (layer, _), value in sorted(found.items()) if layer.startswith(part)]


def half_step(model: Gan, part: str, optimizer: Optimizer, step: int, *, through_root: bool = False) -> list[float]:
    """Let one half learn; return the naive update ratios of its layers, in the order of ``ratios_of``."""
    call, inputs = model if through_root else model.forward, gan_parts(step)
    optimizer.zero_grad()
    call(*(inputs if part == "discriminator" else inputs[:1])).backward()
    before = problems.weights(model)
    optimizer.step()
    ratios = problems.naive_ratios(model, before, problems.weights(model), ("matrix", "vector"))
    return [value for (layer, _), value in sorted(ratios.items()) if layer.startswith(part)]


@pytest.mark.parametrize("through_root", [False, True])
@pytest.mark.parametrize(("every_n_steps", "often"), [(2, 1), (4, 1), (5, 3), (4, 2), (10, 5)])
def test_each_of_two_optimizers_in_turn_is_sampled_whatever_the_cadence(
    every_n_steps: int, often: int, *, through_root: bool
) -> None:
    """wandb/wandb #1639: a generator whose gradients are missing. It steps at every ``often``-th step of the discriminator.

    Each is measured at the step that is sampled, or at its next one; its layers show that until its next sample, and the learning
    rates of both stand at all times.
    """
    model = Gan()
    parts: dict[str, Optimizer] = {
        "discriminator": SGD(model.discriminator.parameters(), lr=0.1),
        "generator": SGD(model.generator.parameters(), lr=0.2),
    }
    due, shown = dict.fromkeys(parts, True), dict[str, list[float]]()
    with capture(model, parts, every_n_steps=every_n_steps, updates="exact", kinds=("matrix", "vector")) as (monitor, sink):
        for step in range(1, 31):
            if step % every_n_steps == 0:
                due = dict.fromkeys(parts, True)
            for part in parts if step % often == 0 else ["discriminator"]:
                ratios = half_step(model, part, parts[part], step, through_root=through_root)
                if due[part]:
                    due[part], shown[part] = False, ratios
            snapshot = problems.seen(monitor, sink)
            assert snapshot.value(run.STEP) == step
            for part, expected in shown.items():
                assert ratios_of(snapshot, part) == pytest.approx(expected, rel=TOLERANCE), (step, part)
            rates = {s.labels[0]: s.value for s in snapshot.find(run.LEARNING_RATE)}
            assert rates == ({"discriminator": 0.1, "generator": 0.2} if step >= often else {"discriminator": 0.1})
    assert len(shown) == 2


@pytest.mark.parametrize("through_root", [False, True])
def test_one_iteration_of_two_optimizers_in_turn_is_one_step_without_anybody_asking(*, through_root: bool) -> None:
    """No flush between: five steps of the discriminator for one of the generator are five, whoever begins."""
    for order in (("discriminator", "generator"), ("generator", "discriminator")):
        model = Gan()
        parts: dict[str, Optimizer] = {name: SGD(getattr(model, name).parameters(), lr=0.1) for name in order}
        with capture(model, parts, every_n_steps=4) as (monitor, sink):
            for step in range(20):
                for part in order:
                    if part == "discriminator" or step % 5 == 0:
                        half_step(model, part, parts[part], step, through_root=through_root)
            snapshot = problems.seen(monitor, sink)
        assert snapshot.value(run.STEPS) == 20
        assert snapshot.value(run.SAMPLED_STEP) == 20
        assert snapshot.value(run.MICRO_BATCHES) == (24 if through_root else 0)


@pytest.mark.parametrize("through_root", [False, True])
def test_the_pre_clip_norm_of_two_optimizers_in_turn_is_that_of_both_parts(*, through_root: bool) -> None:
    """Each part is clipped before its own step; also where one of the two parts alone is over the limit."""
    model = Gan()
    parts: dict[str, Optimizer] = {
        "discriminator": SGD(model.discriminator.parameters(), lr=0.1),
        "generator": SGD(model.generator.parameters(), lr=0.2),
    }
    with capture(model, parts, every_n_steps=1) as (monitor, sink):
        for step in range(4):
            norms = []
            for part, optimizer in parts.items():
                call, inputs = model if through_root else model.forward, gan_parts(step)
                optimizer.zero_grad()
                call(*(inputs if part == "discriminator" else inputs[:1])).backward()
                limit = 1e-3 if part == "discriminator" else 1e3
                norms.append(monitor.clip_grad_norm_(limit, parameters=getattr(model, part).parameters()).item())
                optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(gradients.GRAD_NORM, stage="pre_clip") == pytest.approx(
        (norms[0] ** 2 + norms[1] ** 2) ** 0.5, rel=TOLERANCE
    )
    assert snapshot.value(gradients.CLIPPED_STEPS) == 4


def test_an_optimizer_that_steps_no_more_is_forgotten_but_for_its_learning_rate() -> None:
    """A generator that is only used: what its last step showed is not shown for ever. Nor is it waited for."""
    model = Gan()
    parts: dict[str, Optimizer] = {
        "discriminator": SGD(model.discriminator.parameters(), lr=0.1),
        "generator": SGD(model.generator.parameters(), lr=0.2),
    }
    with capture(model, parts, every_n_steps=1) as (monitor, sink):
        for part, optimizer in parts.items():
            half_step(model, part, optimizer, 0)
        for step in range(1, RECENT + 2):
            half_step(model, "discriminator", parts["discriminator"], step)
            if step == RECENT:
                assert ratios_of(problems.seen(monitor, sink), "generator")
        model(gan_parts(0)[0])
        monitor._worker.flush(10)  # what is closed by itself
        assert sink.last is not None
        assert sink.last.value(run.STEPS) == RECENT + 2
        snapshot = problems.seen(monitor, sink)
        assert not ratios_of(snapshot, "generator")
        assert ratios_of(snapshot, "discriminator")
        assert {s.value for s in snapshot.find(run.LEARNING_RATE)} == {0.1, 0.2}
        assert snapshot.value(run.STEPS) == RECENT + 2


def test_losses_and_waits_of_an_iteration_go_with_its_step() -> None:
    """What the loop tells between the steps of two optimizers belongs to the step of both, and the next wait to the next."""
    model = Gan()
    discriminate, generate = SGD(model.discriminator.parameters(), lr=0.1), SGD(model.generator.parameters(), lr=0.1)
    with capture(model, [discriminate, generate], every_n_steps=10) as (monitor, sink):
        for step in range(3):
            monitor.waited(1.0)
            noise, real = gan_parts(step)
            for optimizer, inputs, told in ((discriminate, (noise, real), 1.0), (generate, (noise,), 3.0)):
                monitor.waited(0.5)
                optimizer.zero_grad()
                model(*inputs).backward()
                optimizer.step()
                monitor.observe(loss=told + step)
        monitor.waited(1.0)
        monitor._worker.flush(10)  # what is closed by itself
        snapshot = sink.last
        assert snapshot is not None
        assert snapshot.value(run.STEPS) == 3
        assert snapshot.value(loss_catalog.LOSS) == 4.0
        assert snapshot.value(throughput.DATA_WAIT_SECONDS) == 6.0


def test_hundreds_of_optimizers_inside_backward_are_one_step_and_cheap() -> None:
    """One a parameter: each has its series, and a step that is not sampled costs a fraction of a millisecond an optimizer."""
    count = 300
    model = nn.Sequential(*[nn.Linear(4, 4, bias=False) for _ in range(count)])
    optimizers = {f"o{i}": SGD([p], lr=1e-3) for i, p in enumerate(model.parameters())}
    for p, optimizer in zip(model.parameters(), optimizers.values(), strict=True):

        def hook(_: torch.Tensor, optimizer: Optimizer = optimizer) -> None:
            optimizer.step()
            optimizer.zero_grad()

        p.register_post_accumulate_grad_hook(hook)  # type: ignore[no-untyped-call]  # torch's
    with capture(model, optimizers, every_n_steps=1000) as (monitor, sink):
        for step in range(10):
            (model(torch.ones(2, 4)) + step).square().sum().backward()
            if not step:
                first = problems.seen(monitor, sink)
                before, began = sum(monitor._guard.seconds[part] for part in IN_TRAINING), time.process_time()
        spent = sum(monitor._guard.seconds[part] for part in IN_TRAINING) - before
        whole = time.process_time() - began
        snapshot = problems.seen(monitor, sink)
    assert len(first.find(updates.LAYER_UPDATE_RATIO)) == count
    assert snapshot.value(run.STEPS) == 10
    assert snapshot.value(run.MICRO_BATCHES) == 10
    assert len(snapshot.find(run.LEARNING_RATE)) == count
    assert spent / (9 * count) < 2e-4
    assert spent < whole


class Counting:
    """A compiler's backend that counts the graphs it is given."""

    def __init__(self) -> None:
        self.graphs = 0

    def __call__(self, graph: torch.fx.GraphModule, inputs: list[torch.Tensor]) -> Callable[..., Any]:
        """Take a graph as it is."""
        del inputs
        self.graphs += 1
        return graph.forward


def call_step(optimizer: Optimizer) -> None:
    """Step, within a function that is compiled."""
    optimizer.step()


@pytest.mark.parametrize("how", ["step", "function around it"])
def test_a_compiled_step_has_as_many_graphs_as_without_a_monitor(how: str) -> None:
    """The hooks run outside of the graph: traced, they would be a graph or more of their own and one for each step."""
    graphs = []
    for monitored in (False, True):
        torch.compiler.reset()
        model, backend = Mlp(hidden=16), Counting()
        optimizer = AdamW(model.parameters(), lr=1e-2)
        with Watch(monitored=monitored, every_n_steps=2) as watch:
            watch.attach(model, optimizer)
            called = optimizer.step if how == "step" else partial(call_step, optimizer)
            simple(watch, optimizer, torch.compile(called, backend=backend))
            assert monitored is False or watch.seen().value(run.STEPS) == STEPS
        graphs.append(backend.graphs)
    assert graphs == [1, 1]


def test_accumulation_counts_tokens_by_micro_batch_and_time_by_step() -> None:
    """Lightning #19461, torchtitan PR #4298: four micro-batches a step; the first step has no duration, and the others sum to the time."""
    model = Mlp(hidden=16)
    optimizer = SGD(model.parameters(), lr=0.1)
    ends = []
    with capture(model, optimizer, every_n_steps=2) as (monitor, sink):
        for step in range(5):
            for micro in range(4):
                loss = problems.vector_loss(model, 4 * step + micro) / 4
                loss.backward()  # type: ignore[no-untyped-call]  # torch's
                if micro == 3:
                    optimizer.step()
                    ends.append(time.perf_counter())
                    optimizer.zero_grad()
                monitor.observe(loss=loss * 4, tokens=10 * (micro + 1), samples=2)
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEPS) == 5
    assert snapshot.value(run.MICRO_BATCHES) == 20
    assert snapshot.value(throughput.TOKENS) == 500
    assert snapshot.value(throughput.SAMPLES) == 40
    (durations,) = snapshot.find(throughput.STEP_DURATION)
    assert isinstance(durations.value, HistogramValue)
    assert sum(durations.value.counts) == 4
    assert durations.value.total == pytest.approx(ends[-1] - ends[0], abs=0.05)


@pytest.mark.parametrize("stepped", [1, 2, 8])
def test_a_schedule_that_is_stepped_too_often_shows_in_the_expected_ratio(stepped: int) -> None:
    """huggingface/accelerate #2926 and #662, transformers #26827: stepped once a process, so a warmup ends too early.

    A rate that reaches 0 is exported as 0.
    """
    model = Mlp(hidden=16)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: max(0.0, min((step + 1) / 16, 2 - (step + 1) / 16)))
    found = []
    with capture(model, optimizer, every_n_steps=1, warmup_steps=16) as (monitor, sink):
        for step in range(5):
            problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            rate = optimizer.param_groups[0]["lr"]
            optimizer.step()
            for _ in range(stepped):
                scheduler.step()
            snapshot = problems.seen(monitor, sink)
            assert snapshot.value(run.LEARNING_RATE) == rate
            found.append(snapshot.value(run.LEARNING_RATE_EXPECTED_RATIO))
    assert found[0] == pytest.approx(1.0)
    assert found[1] == pytest.approx((1 + stepped) / 2)
    assert (rate == 0.0) == (stepped == 8)


@pytest.mark.parametrize("restored", [True, False])
def test_a_schedule_that_does_not_go_on_after_a_resume_shows_at_the_first_step(*, restored: bool) -> None:
    """Lightning #4655, ParlAI PR #1812, diffusers PR #8312, llm-foundry #194: it lags, jumps, or begins anew."""
    model = Mlp(hidden=16)
    optimizer = SGD(model.parameters(), lr=0.1)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / 8))
    if restored:
        scheduler.load_state_dict({**scheduler.state_dict(), "last_epoch": 4, "_step_count": 5})
        optimizer.param_groups[0]["lr"] = 0.1 * 5 / 8
    with capture(model, optimizer, every_n_steps=10, warmup_steps=8) as (monitor, sink):
        monitor.load_state_dict({"step": 4, "tokens_seen": 0})
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEP) == 5
    assert snapshot.value(run.LEARNING_RATE_EXPECTED_RATIO) == pytest.approx(1.0 if restored else 1 / 5)


def test_only_training_forwards_within_the_loop_count_in_activation_statistics() -> None:
    """Validation between the steps sees vectors a thousand times as large; what is exported is the training's."""
    model = Mlp(hidden=16)
    optimizer = SGD(model.parameters(), lr=0.1)
    kept: list[torch.Tensor] = []
    model.act.register_forward_hook(lambda module, _, output: kept.append(output.detach().double()) if module.training else None)
    with capture(model, optimizer, every_n_steps=1, activations=("act",)) as (monitor, sink):
        for step in range(3):
            optimizer.zero_grad()
            kept.clear()
            problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            model.eval()
            model(problems.vector_batch(99)[0] * 1000)
            model.train()
            optimizer.step()
            snapshot = problems.seen(monitor, sink)
    assert len(kept) == 1
    expected = kept[0].mean().item()
    assert snapshot.value(activations.LAYER_ACTIVATION_MEAN, layer="act", site="post") == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.parametrize("last", [7, 8])
@pytest.mark.parametrize("odd", [False, True])
def test_activations_of_a_step_of_two_optimizers_are_those_of_its_own_forwards(*, odd: bool, last: int) -> None:
    """A sampled step's, whichever of the optimizers it was for, and none of the steps between that might have been sampled."""
    model = Gan()
    parts: dict[str, Optimizer] = {name: SGD(getattr(model, name).parameters(), lr=0.1) for name in ("discriminator", "generator")}
    kept: list[torch.Tensor] = []
    model.discriminator[1].register_forward_hook(lambda *args: kept.append(args[2].detach().double()))
    with capture(model, parts, every_n_steps=4, activations=("discriminator.1",)) as (monitor, sink):
        for step in range(1, last + 1):
            kept.clear()
            for part, optimizer in parts.items():
                if part == "discriminator" or step % 2 == odd:
                    half_step(model, part, optimizer, step, through_root=True)
            if step in (4, 8):
                expected = torch.cat([values[:32].reshape(-1) for values in kept]).mean().item()
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEP) == last
    # what is measured of the generator after the fourth step shows no activations of its own
    assert snapshot.value(run.SAMPLED_STEP) == (8 if last == 8 else 5 if odd else 4)
    assert snapshot.value(activations.LAYER_ACTIVATION_MEAN, site="post") == pytest.approx(expected, rel=TOLERANCE)


def test_a_rate_that_rises_by_hand_has_no_peak_between_the_steps_of_its_optimizer_either() -> None:
    """A generator that steps at every third step: the two between say nothing of its schedule."""
    model = Gan()
    parts: dict[str, Optimizer] = {name: SGD(getattr(model, name).parameters(), lr=0.1) for name in ("discriminator", "generator")}
    found = set()
    with capture(model, parts, every_n_steps=10) as (monitor, sink):
        for step in range(9):
            half_step(model, "discriminator", parts["discriminator"], step)
            if step % 3 == 0:
                parts["generator"].param_groups[0]["lr"] += 0.01
                half_step(model, "generator", parts["generator"], step)
            snapshot = problems.seen(monitor, sink)
            found |= {s.labels[0] for s in snapshot.find(run.LEARNING_RATE_SCHEDULE_RATIO)}
            assert len(snapshot.find(run.LEARNING_RATE)) == 2
    assert found == {"discriminator"}


def test_many_micro_batches_after_one_optimizers_step_go_with_the_step_that_they_are_for() -> None:
    """Their losses are handed over while they wait, and not to the step that another optimizer has made already."""
    model = Gan()
    parts: dict[str, Optimizer] = {name: SGD(getattr(model, name).parameters(), lr=0.1) for name in ("discriminator", "generator")}
    with capture(model, parts, every_n_steps=10) as (monitor, sink):
        half_step(model, "discriminator", parts["discriminator"], 0, through_root=True)
        monitor.observe(loss=1.0)
        for _ in range(20):
            model(gan_parts(0)[0]).backward()
            monitor.observe(loss=3.0)
        parts["generator"].step()
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(run.STEPS) == 2
    assert snapshot.value(loss_catalog.LOSS) == 3.0
