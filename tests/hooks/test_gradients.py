"""Gradients: as the optimizer saw them, against naive fp64."""

from __future__ import annotations

import itertools
import math

import pytest
import torch
from torch import nn

from otel_train.catalog import gradients, run
from otel_train.catalog import monitor as monitor_catalog
from otel_train.config import KINDS
from otel_train.sampling import WHOLE
from otel_train.snapshot import HistogramValue, Snapshot
from otel_train.testing import capture
from tests import problems
from tests.problems import ConvNet, Gpt, Mlp


def check(model: nn.Module, snapshot: Snapshot, found: dict[str, torch.Tensor]) -> None:
    """Compare norm, mean and std of each layer, and the global norm, with naive values; a mean to 1e-6 of the elements' size."""
    layers = problems.by_layer(model, found)
    assert layers
    norms = {key: g.norm().item() for key, g in layers.items()}
    stds = {key: g.std(correction=0).item() for key, g in layers.items()}
    assert problems.layer_values(snapshot, gradients.LAYER_GRAD_NORM) == pytest.approx(norms, rel=1e-6)
    assert problems.layer_values(snapshot, gradients.LAYER_GRAD_STD) == pytest.approx(stds, rel=1e-6, abs=1e-15)
    means = problems.layer_values(snapshot, gradients.LAYER_GRAD_MEAN)
    for key, g in layers.items():
        assert means[key] == pytest.approx(g.mean().item(), rel=1e-6, abs=1e-6 * g.square().mean().sqrt().item())
    whole = problems.everything(found).norm().item()
    assert snapshot.value(gradients.GRAD_NORM, stage="post_clip") == pytest.approx(whole, rel=1e-6)


def test_gradients_of_every_layer_equal_naive_ones() -> None:
    """Norm, mean and std of embeddings, matrices, norms and vectors, in tensors read at once and in pieces."""
    model = Gpt(vocabulary=4096, width=64)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture(model, optimizer, every_n_steps=1, kinds=KINDS) as (monitor, sink):
        for step in range(2):
            optimizer.zero_grad()
            problems.text_loss(model, problems.word_ids(4096), step, batch=2).backward()  # type: ignore[no-untyped-call]  # torch's
            found = problems.gradients(model)
            optimizer.step()
            check(model, problems.seen(monitor, sink), found)


def test_gradients_of_convolutions_in_channels_last_equal_naive_ones() -> None:
    """Another storage order changes no number."""
    model: nn.Module = ConvNet().to(memory_format=torch.channels_last)  # type: ignore[call-overload]  # torch's stub lacks it
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1, kinds=KINDS) as (monitor, sink):
        problems.image_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        found = problems.gradients(model)
        optimizer.step()
        check(model, problems.seen(monitor, sink), found)


def test_a_sparse_gradient_equals_its_dense_one() -> None:
    """nn.Embedding(sparse=True) gives a sparse gradient, whose zeros count as elements."""
    model = nn.Sequential(nn.Embedding(512, 32, sparse=True), nn.Linear(32, 10))
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1, kinds=KINDS) as (monitor, sink):
        model(torch.tensor([3, 3, 500])).square().sum().backward()
        found = {name: p.grad.to_dense().double() for name, p in model.named_parameters() if p.grad is not None}
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
        check(model, snapshot, found)
    assert sum(s.value for s in snapshot.find(monitor_catalog.MONITOR_ERRORS) if isinstance(s.value, (int, float))) == 0


@pytest.mark.parametrize("max_norm", [0.05, 1e6], ids=["clipped", "not_clipped"])
def test_clipping_gives_the_result_of_torch_and_exports_both_norms(max_norm: float) -> None:
    """The returned norm, the clipped gradients, and the norms before and after; a step counts as clipped only if it was."""
    model, twin = Mlp(), Mlp()
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1, kinds=KINDS) as (monitor, sink):
        for step in range(3):
            optimizer.zero_grad()
            twin.zero_grad()
            twin.load_state_dict(model.state_dict())
            for copy in (model, twin):
                problems.vector_loss(copy, step).backward()  # type: ignore[no-untyped-call]  # torch's
            norm = monitor.clip_grad_norm_(max_norm)
            expected = nn.utils.clip_grad_norm_(twin.parameters(), max_norm)
            assert torch.equal(norm, expected)
            assert all(torch.equal(a, b) for a, b in zip(*(problems.gradients(m).values() for m in (model, twin)), strict=True))
            optimizer.step()
            snapshot = problems.seen(monitor, sink)
            assert snapshot.value(gradients.GRAD_NORM, stage="pre_clip") == expected.item()
            check(model, snapshot, problems.gradients(twin))
    clipped = max_norm < 1
    assert snapshot.value(gradients.CLIPPED_STEPS) == (3 if clipped else 0)
    assert (snapshot.value(gradients.GRAD_NORM, stage="post_clip") or math.inf) <= max(max_norm, 1e3)
    assert (snapshot.value(gradients.GRAD_NORM, stage="post_clip") == pytest.approx(max_norm, rel=1e-4)) == clipped


@pytest.mark.parametrize("norm_type", [1.0, math.inf])
def test_another_norm_clips_as_torch_does_and_is_not_exported_as_the_l2_norm(norm_type: float) -> None:
    """The series is the L2 norm: a p-norm of another p must not stand in it, yet the step was clipped."""
    model, twin = Mlp(hidden=16), Mlp(hidden=16)
    twin.load_state_dict(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for copy in (model, twin):
            problems.vector_loss(copy, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        norm = monitor.clip_grad_norm_(0.01, norm_type)
        assert torch.equal(norm, nn.utils.clip_grad_norm_(twin.parameters(), 0.01, norm_type))
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert not snapshot.find(gradients.GRAD_NORM, stage="pre_clip")
    assert snapshot.value(gradients.CLIPPED_STEPS) == 1


def test_parameters_clipped_in_parts_count_as_clipped_and_have_the_norm_of_the_whole() -> None:
    """Two calls on two halves of the model: the pre-clip norm is that of the whole gradient, and one clipped half clips the step."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        whole = problems.everything(problems.gradients(model)).norm().item()
        late = list(model.last.parameters())
        early = [p for p in model.parameters() if all(p is not other for other in late)]
        monitor.clip_grad_norm_(1e-3, parameters=early)
        monitor.clip_grad_norm_(1e3, parameters=late)
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert snapshot.value(gradients.CLIPPED_STEPS) == 1
    assert snapshot.value(gradients.GRAD_NORM, stage="pre_clip") == pytest.approx(whole, rel=1e-6)


def test_the_norm_that_the_user_observed_is_the_pre_clip_norm() -> None:
    """For loops that clip by other means; a tensor is taken as well as a number."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for step in range(2):
            problems.vector_loss(model, step).backward()  # type: ignore[no-untyped-call]  # torch's
            norm = nn.utils.clip_grad_norm_(model.parameters(), 0.01)
            optimizer.step()
            monitor.observe(grad_norm=norm if step else norm.item())
            assert problems.seen(monitor, sink).value(gradients.GRAD_NORM, stage="pre_clip") == norm.item()


def test_without_a_known_norm_there_is_no_pre_clip_series() -> None:
    """What is not known has no series, and no value of an earlier step either."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        for clips in (True, False):
            problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
            if clips:
                monitor.clip_grad_norm_(1.0)
            optimizer.step()
            assert bool(problems.seen(monitor, sink).find(gradients.GRAD_NORM, stage="pre_clip")) == clips


def test_accumulated_gradients_are_read_once_and_whole() -> None:
    """Two micro-batches, one step: the gradient is that of both."""
    model = Mlp()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture(model, optimizer, every_n_steps=1, kinds=KINDS) as (monitor, sink):
        for step in range(2):
            optimizer.zero_grad()
            for micro in range(2):
                (problems.vector_loss(model, 2 * step + micro) / 2).backward()  # type: ignore[no-untyped-call]  # torch's
                if not micro:
                    first = problems.gradients(model)
            found = problems.gradients(model)
            optimizer.step()
            snapshot = problems.seen(monitor, sink)
            check(model, snapshot, found)
            sizes = [problems.everything(each).norm().item() for each in (first, found)]
            assert sizes[0] != pytest.approx(sizes[1], rel=1e-3)
    assert snapshot.value(run.STEPS) == 2
    assert snapshot.value(run.MICRO_BATCHES) == 4


def test_gradients_of_a_closure_are_those_of_its_last_call() -> None:
    """LBFGS evaluates several times a step; what stands in .grad when the step ends is shown."""
    model = Mlp(hidden=32)
    optimizer = torch.optim.LBFGS(model.parameters(), lr=0.5, max_iter=4)

    def closure() -> float:
        optimizer.zero_grad()
        loss = problems.vector_loss(model, 0)
        loss.backward()  # type: ignore[no-untyped-call]  # torch's
        return loss.item()

    with capture(model, optimizer, every_n_steps=1, kinds=KINDS) as (monitor, sink):
        optimizer.step(closure)  # type: ignore[no-untyped-call]  # torch's
        check(model, problems.seen(monitor, sink), problems.gradients(model))


def naive_counts(elements: torch.Tensor, bounds: tuple[float, ...]) -> list[int]:
    """Count elements up to each bound by absolute value, then all."""
    return [int((elements.abs() <= bound).sum()) for bound in bounds] + [elements.numel()]


def cumulated(histogram: HistogramValue, bounds: tuple[float, ...]) -> list[int]:
    """Return the counts up to each of `bounds`, then all."""
    pairs, total = histogram.cumulated(bounds)
    assert [bound for bound, _ in pairs] == list(bounds)
    return [count for _, count in pairs] + [total]


def test_magnitudes_of_a_layer_that_is_read_whole_are_counted_exactly() -> None:
    """Every element falls to the bucket of its absolute value, ends included, and counts add up over sampled steps."""
    model = nn.Sequential(nn.Linear(32, 32, bias=False), nn.Tanh(), nn.Linear(32, 10, bias=False))
    assert max(p.numel() for p in model.parameters()) <= WHOLE
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    special = torch.tensor(
        [0.0, 1.0, -1.0, 2.0, -0.25, 0.250001, 1e-30, 1e30, 65536.0, 65537.0, 256.0, 257.0, 2.0**-40, -(2.0**-46)]
    )
    seen: list[torch.Tensor] = []
    with capture(model, optimizer, every_n_steps=1, histograms="layer") as (monitor, sink):
        for step in range(2):
            optimizer.zero_grad()
            problems.vector_loss(model, step, inputs=32).backward()  # type: ignore[no-untyped-call]  # torch's
            grad = model[0].weight.grad
            assert isinstance(grad, torch.Tensor)
            grad.view(-1)[: len(special)] = special
            seen.append(grad.clone().double().view(-1))
            optimizer.step()
        snapshot = problems.seen(monitor, sink)
    (sample,) = snapshot.find(gradients.LAYER_GRAD_MAGNITUDE, layer="0")
    assert isinstance(sample.value, HistogramValue)
    elements = torch.cat(seen)
    for bounds in (sample.value.bounds, gradients.MAGNITUDE_BOUNDS):
        assert cumulated(sample.value, bounds) == naive_counts(elements, bounds)
    assert sample.value.total == pytest.approx(elements.abs().sum().item(), rel=1e-6)


def test_a_block_has_one_magnitude_histogram_by_default() -> None:
    """The counts of a block's matrices add up to their elements; sampled elements stand for all of their tensor."""
    model = Gpt(width=32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.text_loss(model, problems.byte_ids(), 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    histograms = {(s.labels[0], s.labels[2]): s.value for s in snapshot.find(gradients.LAYER_GRAD_MAGNITUDE)}
    named = {"tokens", "positions", "blocks.0", "blocks.1", "head"}
    assert set(histograms) == {(name, "embedding" if name in ("tokens", "positions") else "matrix") for name in named}
    matrices = sum(p.numel() for p in model.blocks[0].parameters() if p.dim() > 1)
    block = histograms["blocks.0", "matrix"]
    assert isinstance(block, HistogramValue)
    assert sum(block.counts) == pytest.approx(matrices, abs=len(block.counts))
    every = torch.cat([p.grad.view(-1) for p in model.blocks[0].parameters() if p.dim() > 1 and p.grad is not None])
    expected = naive_counts(every, gradients.MAGNITUDE_BOUNDS)
    for a, b in itertools.zip_longest(cumulated(block, gradients.MAGNITUDE_BOUNDS), expected):
        # a share of 0.5 has a standard error of 0.5 / sqrt(2048 elements read) = 1.1 %; neighbours read together are alike, so twice it
        assert abs(a - b) / matrices < 4 * 0.022


def test_histograms_off_leaves_the_series_out() -> None:
    """No counting, no series; norms are there all the same."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1, histograms="off") as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert not snapshot.find(gradients.LAYER_GRAD_MAGNITUDE)
    assert snapshot.find(gradients.LAYER_GRAD_NORM)


def test_global_norms_include_the_kinds_without_series() -> None:
    """Biases have no series by default, yet the norm is that of the whole gradient."""
    model = Mlp(hidden=16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        found = problems.gradients(model)
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    assert {kind for _, kind in problems.layer_values(snapshot, gradients.LAYER_GRAD_NORM)} == {"matrix", "norm"}
    whole = problems.everything(found).norm().item()
    without = torch.cat([g.view(-1) for name, g in found.items() if problems.kind_of(model, name) != "vector"]).norm().item()
    assert without < 0.999 * whole
    assert snapshot.value(gradients.GRAD_NORM, stage="post_clip") == pytest.approx(whole, rel=1e-6)


def test_a_gradient_of_one_element_has_no_deviation() -> None:
    """``torch.std`` of it is NaN (research P5)."""
    model = nn.Linear(1, 1, bias=False)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    with capture(model, optimizer, every_n_steps=1) as (monitor, sink):
        model(torch.full((1, 1), 3.0)).sum().backward()
        optimizer.step()
        snapshot = problems.seen(monitor, sink)
    (deviation,) = snapshot.find(gradients.LAYER_GRAD_STD)
    assert deviation.value == 0.0
    assert snapshot.value(gradients.GRAD_NORM, stage="post_clip") == 3.0
