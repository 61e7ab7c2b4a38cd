"""Updates: the change of weights against clone-and-compare in fp64, on every element and on samples."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from otel_train.sampling import Plan, Sampler, plan
from otel_train.stats import sums, updates
from otel_train.stats.gradients import row_norms
from tests.stats.test_sums import FAKE_DEVICE, Problem, problems, same

CPU = torch.device("cpu")
weight_dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64], ids=str)


@dataclass(frozen=True)
class Truth:
    """What a clone taken before the step says."""

    update: float
    weight: float
    changed: int

    @property
    def ratio(self) -> float:
        """Norm of the update over norm of the weight."""
        return math.sqrt(self.update / self.weight)


def _truth(before: torch.Tensor, after: torch.Tensor) -> Truth:
    wide_before, wide_after = before.to_dense().double(), after.to_dense().double()
    update = (wide_after - wide_before).square().sum().item()
    return Truth(update, wide_before.square().sum().item(), int((wide_before != wide_after).sum().item()))


def _stepped(weight: torch.Tensor) -> torch.Tensor:
    """Return a weight after a step that leaves some elements as they are, in the same storage order."""
    after = weight.clone()
    step = torch.randn(after.shape).mul_(1e-2).to(after.dtype)
    return after.add_(step * (torch.rand(after.shape) < 0.7).to(after.dtype))


def _whole(before: list[torch.Tensor], after: list[torch.Tensor]) -> list[list[float]]:
    copies = updates.read_whole(before)
    rows: list[list[float]] = updates.whole_sums(copies, after).tolist()
    return rows


@pytest.mark.parametrize("shape", [(1,), (3, 5), (0, 4), (), (sums.STACK,), (sums.STACK + 1,), (300, 400), (8, 3, 2, 2)], ids=str)
@weight_dtypes
def test_whole_updates_are_those_of_clone_and_compare(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """Sums to 1e-6, and changed elements exactly, of each of three weights."""
    before = [torch.randn(shape).to(dtype) for _ in range(3)]
    after = [_stepped(weight) for weight in before]
    rows = _whole(before, after)
    assert len(rows) == 3
    for b, a, row in zip(before, after, rows, strict=True):
        truth, chosen = _truth(b, a), plan(shape, embedding=False, exact=True)
        found = updates.estimate_whole(chosen, row)
        assert same(found.update_squared, truth.update, 1e-6)
        assert found.changed == truth.changed
        assert found.relative_error == 0


@pytest.mark.parametrize(
    "view", [lambda t: t.t(), lambda t: t.view(8, 2, 3, 5).to(memory_format=torch.channels_last), lambda t: t[:, ::2]]
)
@weight_dtypes
def test_whole_updates_of_noncontiguous_weights_are_those_of_clone_and_compare(
    view: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype
) -> None:
    """The place of an element in storage does not matter."""
    before = view(torch.randn(8, 30).to(dtype))
    after = view(_stepped(torch.randn(8, 30).to(dtype)))
    truth, (row,) = _truth(before, after), _whole([before], [after])
    assert same(row[0], truth.update, 1e-6)
    assert row[1] == truth.changed


@problems
@weight_dtypes
def test_weights_that_stay_have_no_update(problem: Problem, dtype: torch.dtype) -> None:
    """No change is counted where there was none."""
    weight = problem.make(dtype)
    update, changed = _whole([weight], [weight])[0]
    truth = _truth(weight, weight)
    assert same(update, truth.update, 0.0)
    if math.isfinite(truth.weight):
        assert changed == 0


@pytest.mark.parametrize("size", [40, sums.STACK + 1])
def test_an_infinite_weight_that_stays_is_not_changed(size: int) -> None:
    """A mask of -Inf in a parameter is the same after the step as before it."""
    before = torch.randn(size)
    before[:5] = -math.inf
    before[5] = math.inf
    after = before.clone()
    after[10:13] += 1
    assert _whole([before], [after])[0][1] == 3


@pytest.mark.parametrize("size", [40, sums.STACK + 1])
def test_the_smallest_change_of_every_weight_counts(size: int) -> None:
    """One unit in the last place is a change, in every type."""
    for dtype in (torch.float32, torch.float64):
        before = torch.randn(size).to(dtype)
        after = before.nextafter(torch.tensor(math.inf, dtype=dtype))
        after[3:10] = before[3:10]
        assert _whole([before], [after])[0][1] == size - 7


@pytest.mark.parametrize("size", [40, sums.STACK + 1])
def test_the_copies_are_taken_before_the_step(size: int) -> None:
    """The optimizer writes into the weights themselves: the copy must not follow."""
    for dtype in (torch.float32, torch.bfloat16, torch.float64):
        weight = torch.ones(size, dtype=dtype)
        copies = updates.read_whole([weight])
        weight.add_(1)
        assert updates.whole_sums(copies, [weight]).tolist() == [[pytest.approx(size, rel=1e-15), size]]


# --- samples


def _sampled(
    before: list[torch.Tensor], after: list[torch.Tensor], gradients: list[torch.Tensor], chosen: Plan, seed: int
) -> list[updates.UpdateEstimate]:
    draw = Sampler(CPU, seed).draw(chosen)
    reader = updates.SampledReader(before, chosen)
    reader.choose_rows(row_norms(gradients, chosen), draw)
    reader.read(before, draw, after=False)
    reader.read(after, draw, after=True)
    return [updates.estimate_sampled(chosen, row) for row in reader.sums().tolist()]


@dataclass(frozen=True)
class Case:
    """A weight before and after a step."""

    name: str
    shape: tuple[int, ...]
    embedding: bool
    make_step: Callable[[torch.Tensor], torch.Tensor]
    """From the weight to its change."""


def _adam_like(weight: torch.Tensor) -> torch.Tensor:
    return 1e-3 * torch.randn(weight.shape).tanh()


def _half_still(weight: torch.Tensor) -> torch.Tensor:
    return 1e-3 * torch.randn(weight.shape) * (torch.rand(weight.shape) < 0.5)


def _uneven_rows(weight: torch.Tensor) -> torch.Tensor:
    return 1e-3 * torch.randn(weight.shape) * torch.linspace(0.1, 3, weight.shape[0]).view(-1, *[1] * (weight.dim() - 1))


def _few_rows(weight: torch.Tensor) -> torch.Tensor:
    """200 rows of an embedding move, each by another amount."""
    step = torch.zeros(weight.shape)
    rows = torch.randperm(weight.shape[0])[:200]
    step[rows] = 1e-2 * torch.randn(200, weight.shape[1]) * torch.rand(200, 1).mul(3).exp()
    return step


CASES = [
    Case("matrix", (160, 256), embedding=False, make_step=_adam_like),
    Case("matrix, half of it still", (160, 256), embedding=False, make_step=_half_still),
    Case("matrix of uneven rows", (160, 256), embedding=False, make_step=_uneven_rows),
    Case("vector", (50_000,), embedding=False, make_step=_adam_like),
    Case("no neighbours", (131, 257), embedding=False, make_step=_adam_like),
    Case("convolution", (128, 32, 3, 3), embedding=False, make_step=_uneven_rows),
    Case("embedding, all rows", (2500, 16), embedding=True, make_step=_uneven_rows),
    Case("tall matrix", (4096, 9), embedding=False, make_step=_uneven_rows),
    Case("embedding of few rows", (30, 1200), embedding=True, make_step=_adam_like),
]
cases = pytest.mark.parametrize("case", CASES, ids=lambda case: case.name)


@cases
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sampled_updates_are_right_on_average(case: Case, dtype: torch.dtype) -> None:
    """The mean of the estimates over draws is the true value within 4 standard errors: no bias."""
    before = torch.randn(case.shape).mul_(0.05).to(dtype)
    step = case.make_step(before)
    after = (before.float() + step).to(dtype)
    chosen, truth = plan(case.shape, embedding=case.embedding), _truth(before, after)
    assert not chosen.whole
    estimates = [_sampled([before], [after], [step.to(dtype)], chosen, seed)[0] for seed in range(40)]
    for found, expected in (
        ([e.update_squared for e in estimates], truth.update),
        ([e.changed for e in estimates], float(truth.changed)),
    ):
        mean = math.fsum(found) / len(found)
        deviation = math.sqrt(math.fsum((f - mean) ** 2 for f in found) / (len(found) - 1))
        assert abs(mean - expected) <= 4 * deviation / math.sqrt(len(found)) + 1e-5 * expected


@cases
def test_the_estimated_error_covers_the_true_one(case: Case) -> None:
    """At least 85 % of the draws are within two estimated errors of the truth, and the estimate is not 10 times too wide."""
    before = torch.randn(case.shape) * 0.05
    step = case.make_step(before)
    chosen, after = plan(case.shape, embedding=case.embedding), before + step
    root = math.sqrt(_truth(before, after).update)
    covered, errors = 0, []
    for seed in range(80):
        found = _sampled([before], [after], [step], chosen, seed)[0]
        error = math.sqrt(found.update_squared) / root - 1
        assert 0 < found.relative_error < 0.2
        covered += abs(error) <= 2 * found.relative_error
        errors.append(error / found.relative_error)
    assert covered >= 0.85 * 80
    assert math.sqrt(math.fsum(e * e for e in errors) / len(errors)) > 0.1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_the_sampled_ratio_is_right_to_a_few_percent(dtype: torch.dtype) -> None:
    """Ratio of update to weight of an even matrix, for each of two weights of one shape."""
    before = [torch.randn(256, 384).mul_(s).to(dtype) for s in (0.05, 0.5)]
    after = [(b.float() + 0.1 * b.float().std() * torch.randn(b.shape)).to(dtype) for b in before]
    chosen = plan(before[0].shape, embedding=False)
    for b, a, found in zip(before, after, _sampled(before, after, before, chosen, 0), strict=True):
        assert same(math.sqrt(found.update_squared), math.sqrt(_truth(b, a).update), 0.03)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("sparse", [False, True], ids=["dense gradient", "sparse gradient"])
def test_an_embedding_with_few_heavy_rows_is_right_to_a_few_percent(dtype: torch.dtype, *, sparse: bool) -> None:
    """The rows that move are read exactly: every single draw is within 3 %."""
    before = torch.randn(8000, 32).to(dtype)
    step = _few_rows(before)
    after = (before.float() + step).to(dtype)
    gradient = step.to(dtype).to_sparse(1) if sparse else step.to(dtype)
    chosen, truth = plan(before.shape, embedding=True), _truth(before, after)
    assert chosen.top >= 200
    for seed in range(10):
        found = _sampled([before], [after], [gradient], chosen, seed)[0]
        assert same(found.update_squared, truth.update, 1e-5)
        assert found.changed == truth.changed


@pytest.mark.parametrize("gradient_view", [lambda t: t, lambda t: t.contiguous()], ids=["as the weight", "contiguous"])
def test_an_embedding_stored_by_columns_is_read_as_one_stored_by_rows(
    gradient_view: Callable[[torch.Tensor], torch.Tensor],
) -> None:
    """Storage order changes neither which rows are read exactly nor what is drawn outside of them."""
    before = torch.randn(8000, 32).t().contiguous().t()
    step = _few_rows(before)
    after = (before + step).t().contiguous().t()
    chosen, truth = plan(before.shape, embedding=True), _truth(before, after)
    for seed in range(10):
        found = _sampled([before], [after], [gradient_view(step.t().contiguous().t())], chosen, seed)[0]
        assert same(found.update_squared, truth.update, 1e-5)
        assert found.changed == truth.changed


def test_gradients_that_are_not_numbers_choose_rows_all_the_same() -> None:
    """Rows with NaN come first, and nothing raises."""
    before = torch.zeros(4200, 8)
    after, gradient = before.clone(), torch.rand(4200, 8)
    after[7] = 1.0
    gradient[7, 3] = math.nan
    chosen = plan(before.shape, embedding=True)
    found = _sampled([before], [after], [gradient], chosen, 0)[0]
    assert same(found.update_squared, 8.0, 1e-6)
    assert found.changed == 8


@pytest.mark.parametrize("embedding", [False, True])
def test_a_weight_that_stays_has_no_sampled_update(*, embedding: bool) -> None:
    """No change, no error, no division by zero."""
    weight = torch.randn(5000, 16)
    found = _sampled([weight], [weight.clone()], [torch.randn(5000, 16)], plan(weight.shape, embedding=embedding), 0)[0]
    assert (found.update_squared, found.changed, found.relative_error) == (0.0, 0.0, 0.0)


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_a_weight_that_breaks_does_not_break_the_estimate(value: float) -> None:
    """NaN and Inf come through as such, and nothing raises."""
    before = torch.randn(300, 400)
    found = _sampled([before], [torch.full((300, 400), value)], [before], plan(before.shape, embedding=False), 0)[0]
    assert not math.isfinite(found.update_squared)


def test_a_reader_is_used_again() -> None:
    """Buffers are kept; the second sample knows nothing of the first."""
    chosen, sampler = plan((5000, 16), embedding=True), Sampler(CPU)
    kept = updates.SampledReader([torch.empty(5000, 16)], chosen)
    for _ in range(3):
        before = torch.randn(5000, 16)
        after, gradient = before + torch.randn(5000, 16), torch.randn(5000, 16)
        found = []
        for reader in (kept, updates.SampledReader([before], chosen)):
            reader.choose_rows(row_norms([gradient], chosen), sampler.draw(chosen))
            reader.read([before], sampler.draw(chosen), after=False)
            reader.read([after], sampler.draw(chosen), after=True)
            found.append(reader.sums().tolist())
        assert found[0] == found[1]
        sampler.advance()


def test_an_average_over_samples_has_no_standing_error() -> None:
    """Heavy elements at a fixed place: over 200 samples the average is within 2 % of the truth."""
    before = torch.zeros(256, 384)
    after = before.clone()
    after.view(-1)[::8] = 1.0  # one element a line
    after.view(-1)[: 256 * 384 // 2 : 16] = 5.0
    chosen, truth, sampler = plan(before.shape, embedding=False), _truth(before, after), Sampler(CPU)
    reader, found = updates.SampledReader([before], chosen), []
    for _ in range(200):
        draw = sampler.draw(chosen)
        reader.choose_rows(row_norms([after], chosen), draw)
        reader.read([before], draw, after=False)
        reader.read([after], draw, after=True)
        found.append(updates.estimate_sampled(chosen, reader.sums()[0].tolist()).update_squared)
        sampler.advance()
    assert same(math.fsum(found) / 200, truth.update, 0.02)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "embedding"), [((0,), False), ((20, 30), False), ((400, 300), False), ((9000, 16), True)])
def test_updates_read_nothing_on_the_host(shape: tuple[int, ...], dtype: torch.dtype, *, embedding: bool) -> None:
    """On tensors without values everything runs: nothing waits for the device."""
    with FakeTensorMode():
        weights = [torch.empty(shape, dtype=dtype, device=FAKE_DEVICE) for _ in range(2)]
        assert updates.whole_sums(updates.read_whole(weights), weights).shape == (2, 2)
        chosen = plan(shape, embedding=embedding)
        if not chosen.whole:
            draw, reader = Sampler(torch.device(FAKE_DEVICE)).draw(chosen), updates.SampledReader(weights, chosen)
            reader.choose_rows(row_norms(weights, chosen), draw)
            reader.read(weights, draw, after=False)
            reader.read(weights, draw, after=True)
            assert reader.sums().shape == (2, 5)
