"""Facts about torch that the design rests on: rows P1 to P13 of the research, so that a torch that changes one is noticed.

That otel-train is right in each of these situations is shown elsewhere: in the parity table, in tests/hooks and in tests/e2e.
"""

from __future__ import annotations

import os
import socket
from typing import Any

import pytest
import torch
from torch import distributed, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.utils.checkpoint import checkpoint

from tests.parity.harness import Ranks
from tests.parity.model import NetSpec, batch, loss_of


def sharded() -> tuple[nn.Module, torch.optim.Optimizer]:
    """Return the model of the parity table under fully_shard."""
    model: nn.Module = NetSpec().build()
    for block in model.blocks:  # type: ignore[union-attr]  # a ModuleList
        fully_shard(block)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=1e-2)


def backward(model: nn.Module) -> None:
    """Compute the gradient of one batch."""
    x, y = batch(NetSpec(), 0, 0)
    loss_of(model(x), y).backward()  # type: ignore[no-untyped-call]  # torch's


def hooks_of_parameters() -> tuple[int, int]:
    """Return how often tensor hooks and post-accumulate hooks fire under FSDP2."""
    model, _ = sharded()
    seen: list[str] = []
    for parameter in model.parameters():
        parameter.register_hook(lambda _: seen.append("tensor"))  # type: ignore[no-untyped-call]  # torch's
        parameter.register_post_accumulate_grad_hook(lambda _: seen.append("accumulated"))  # type: ignore[no-untyped-call]  # torch's
    backward(model)
    return seen.count("tensor"), seen.count("accumulated")


def test_p1_tensor_hooks_never_fire_under_fsdp2(two: Ranks) -> None:
    """So gradients are read where the optimizer steps."""
    count = len(list(NetSpec().build().parameters()))
    assert two.run(hooks_of_parameters) == [(0, count), (0, count)]


def norms_of_a_shard() -> tuple[float, float, float]:
    """Return a gradient's local norm, its norm from local squares added up over the ranks, and the whole one's."""
    model, _ = sharded()
    backward(model)
    gradient: Any = model.head.weight.grad  # type: ignore[union-attr]  # a Linear
    local = gradient.to_local().double().square().sum()
    total = local.clone()
    distributed.all_reduce(total)
    return local.sqrt().item(), total.sqrt().item(), gradient.full_tensor().double().norm().item()


def test_p2_the_norm_of_a_shard_is_not_the_layers(two: Ranks) -> None:
    """Squares of shards add up to it."""
    for local, added, whole in two.run(norms_of_a_shard):
        assert local < 0.9 * whole
        assert added == pytest.approx(whole, rel=1e-6)


def hybrid_norms() -> tuple[float, float]:
    """Return a gradient's norm from local squares added up over the world, over the whole one's; and over the shard group."""
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("replicate", "shard"))
    model: nn.Module = NetSpec().build()
    fully_shard(model, mesh=mesh)
    backward(model)
    gradient: Any = model.head.weight.grad  # type: ignore[union-attr]  # a Linear
    whole = gradient.full_tensor().double().norm()
    local = gradient.to_local().double().square().sum()
    world, shards = local.clone(), local.clone()
    distributed.all_reduce(world)
    distributed.all_reduce(shards, group=mesh["shard"].get_group())
    return (world.sqrt() / whole).item(), (shards.sqrt() / whole).item()


def test_p3_a_sum_over_the_world_counts_replicas_twice(four: Ranks) -> None:
    """By the root of the number of replicas."""
    for world, shards in four.run(hybrid_norms):
        assert world == pytest.approx(2**0.5, rel=1e-5)
        assert shards == pytest.approx(1.0, rel=1e-5)


def empty_shard() -> tuple[int, float, bool, bool]:
    """Return elements of this rank's part of a bias of 3, its norm, and whether its mean is NaN and its maximum raises."""
    layer = nn.Linear(8, 3)
    fully_shard(layer)
    layer(torch.randn(4, 8)).square().sum().backward()
    gradient: Any = layer.bias.grad
    part = gradient.to_local()
    try:
        part.abs().max()
    except (RuntimeError, IndexError):
        raises = True
    else:
        raises = False
    return part.numel(), torch.linalg.vector_norm(part).item(), bool(part.mean().isnan()), raises


def test_p4_an_empty_shard_has_a_norm_and_no_mean_and_its_maximum_raises(four: Ranks) -> None:
    """On that rank only: no statistic may leave a rank out of an exchange."""
    found = four.run(empty_shard)
    assert [count for count, *_ in found] == [1, 1, 1, 0]
    assert found[3] == (0, 0.0, True, True)
    assert not any(raises for *_, raises in found[:3])


@pytest.mark.filterwarnings("ignore:.*degrees of freedom.*:UserWarning")
def test_p5_one_element_has_no_sample_deviation() -> None:
    """Deviations here are of the population, from sums."""
    assert torch.ones(1).std().isnan()
    assert torch.ones(1).std(correction=0) == 0


def update_of_a_shard() -> tuple[float, float]:
    """Return the size of a step from copies of the local part around it, added up over the ranks; and that of the whole weights."""
    model, optimizer = sharded()
    backward(model)
    weight: Any = model.head.weight  # type: ignore[union-attr]  # a Linear
    before, whole = weight.to_local().detach().double().clone(), weight.full_tensor().detach().double()
    optimizer.step()
    change = (weight.to_local().detach().double() - before).square().sum()
    distributed.all_reduce(change)
    return change.sqrt().item(), (weight.full_tensor().detach().double() - whole).norm().item()


def test_p6_copies_of_shards_around_the_step_add_up_to_the_update(two: Ranks) -> None:
    """With one reduction."""
    for added, whole in two.run(update_of_a_shard):
        assert added == pytest.approx(whole, rel=1e-9)


def gradients_without_sync() -> tuple[bool, bool]:
    """Return whether gradients are None after a micro-batch without and with synchronisation."""
    model, _ = sharded()
    model.set_requires_gradient_sync(False)  # type: ignore[operator]  # fully_shard's
    backward(model)
    without = all(parameter.grad is None for parameter in model.parameters())
    model.set_requires_gradient_sync(True)  # type: ignore[operator]  # fully_shard's
    backward(model)
    return without, any(parameter.grad is None for parameter in model.parameters())


def test_p7_a_micro_batch_without_synchronisation_leaves_no_gradient(two: Ranks) -> None:
    """Steps are counted by the optimizer, not by backward."""
    assert two.run(gradients_without_sync) == [(True, False)] * 2


@pytest.mark.parametrize("fused", [False, True])
def test_p8_p9_a_fused_optimizer_is_called_on_inf_with_scaled_gradients_and_others_are_not(*, fused: bool) -> None:
    """So a skipped step is a hook that was missed, or one that is told ``found_inf``."""
    layer = nn.Linear(4, 4)
    optimizer = torch.optim.AdamW(layer.parameters(), fused=fused)
    scaler = torch.amp.GradScaler("cpu", init_scale=1024.0)
    seen: list[tuple[float, float, bool]] = []

    def before(given: Any, _args: object, _kwargs: object) -> None:
        found_inf = getattr(given, "found_inf", None)
        seen.append((float(layer.bias.grad.abs().max()), float(getattr(given, "grad_scale", None) or 1), bool(found_inf)))  # type: ignore[union-attr]  # it has one

    optimizer.register_step_pre_hook(before)
    for spoil in (False, True):
        scaler.scale(layer(torch.ones(2, 4)).sum()).backward()
        if spoil:
            assert layer.weight.grad is not None
            layer.weight.grad[0, 0] = torch.inf
        scaler.step(optimizer)
        scaler.update()
        optimizer.zero_grad()
    assert seen == ([(2048.0, 1024.0, False), (2048.0, 1024.0, True)] if fused else [(2.0, 1.0, False)])


@pytest.mark.parametrize("reentrant", [True, False])
def test_p10_forward_hooks_fire_again_in_recomputation(*, reentrant: bool) -> None:
    """Twice under reentrant checkpointing, the first time without gradients; else the last module once, by an early stop."""
    chain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    seen: list[bool] = []
    for module in chain:
        module.register_forward_hook(lambda *_: seen.append(torch.is_grad_enabled()))
    x = torch.randn(2, 4, requires_grad=True)
    output: Any = checkpoint(chain, x, use_reentrant=reentrant)
    in_forward = len(seen)
    output.sum().backward()
    assert in_forward == 2
    assert len(seen) == (4 if reentrant else 3)
    assert seen[:2] == ([False, False] if reentrant else [True, True])


@pytest.mark.parametrize("early", [True, False])
def test_p11_hooks_of_after_the_first_compiled_call_are_ignored(*, early: bool) -> None:
    """Without a word; pytorch/pytorch #117758."""
    torch._dynamo.reset()
    inner = nn.Sequential(nn.Linear(4, 4), nn.ReLU())
    model = torch.compile(inner, backend="eager")
    count = torch.zeros(())

    def hook(_module: nn.Module, _args: object, output: torch.Tensor) -> None:
        count.add_(output.detach().numel() > 0)

    if early:
        inner[1].register_forward_hook(hook)
    model(torch.randn(2, 4))
    if not early:
        inner[1].register_forward_hook(hook)
    for _ in range(3):
        model(torch.randn(2, 4))
    assert count == (4 if early else 0)


def test_p12_a_scheduler_that_wraps_the_step_leaves_step_hooks_alone() -> None:
    """One pair of calls a step."""
    layer = nn.Linear(2, 2)
    optimizer = torch.optim.SGD(layer.parameters(), lr=0.1)
    seen: list[str] = []
    optimizer.register_step_pre_hook(lambda *_: seen.append("before"))
    scheduler = torch.optim.lr_scheduler.StepLR(optimizer, 1)
    optimizer.register_step_post_hook(lambda *_: seen.append("after"))
    for _ in range(2):
        layer(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        scheduler.step()
    assert seen == ["before", "after"] * 2


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_p13_a_forked_child_keeps_a_listening_socket_open() -> None:
    """Until it closes it itself: as DataLoader workers would hold our port, and half-answer it."""
    listener = socket.create_server(("127.0.0.1", 0))
    port, (reading, writing) = listener.getsockname()[1], os.pipe()
    child = os.fork()
    if child == 0:  # pragma: no cover  # ends here
        os.read(reading, 1)
        os._exit(0)
    listener.close()
    try:
        with socket.create_connection(("127.0.0.1", port), timeout=5) as client:
            client.settimeout(0.2)
            with pytest.raises(TimeoutError):
                client.recv(1)
        with pytest.raises(OSError, match="in use"):
            socket.create_server(("127.0.0.1", port))
    finally:
        os.write(writing, b"x")
        os.waitpid(child, 0)
        os.close(reading)
        os.close(writing)
