"""Activations: sums over sampled rows against plain fp64 arithmetic on the same rows."""

from __future__ import annotations

import math
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from otel_train.stats import activations
from otel_train.stats.activations import ROWS, SUMS, Strata
from tests.stats.test_sums import FAKE_DEVICE, Problem, dtypes, naive_squares, naive_sum, numbers, rms, same, small_problems


def _strata(seed: int = 0) -> Strata:
    return Strata(torch.rand(ROWS, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)))


def _all_rows(activation: torch.Tensor) -> list[list[float]]:
    """Every row, in plain loops: a vector over the units for each place."""
    wide = activation.double()
    if wide.dim() in (4, 5):
        images = wide.flatten(2)
        return [images[n, :, p].tolist() for n in range(images.shape[0]) for p in range(images.shape[2])]
    if wide.dim() == 0:
        return [[wide.item()]]
    return [row.tolist() for row in wide.reshape(-1, wide.shape[-1])]


@small_problems
@dtypes
@pytest.mark.parametrize("flat_outside", [None, (-0.5, 0.75), (-math.inf, 0.0)])
def test_sums_of_rows_are_those_of_plain_arithmetic(
    problem: Problem, dtype: torch.dtype, flat_outside: tuple[float, float] | None
) -> None:
    """Count, sum, squares, zeros, saturated, non-finite and peak."""
    made = problem.make(dtype)
    rows = made.to_dense() if made.is_sparse else made
    rows = rows if rows.dim() == 2 else rows.reshape(-1, 1)
    values = numbers(rows)
    sums, peak = activations.row_sums(rows, flat_outside)
    assert sums.shape == (SUMS,)
    assert sums.dtype is torch.float64
    assert peak.shape == ()
    assert peak.dtype is (torch.float64 if dtype is torch.float64 else torch.float32)
    count, total, squared, zeros, saturated, nonfinite = sums.tolist()
    assert count == len(values)
    assert same(total, naive_sum(values), 0.0, 1e-9 * rms(values) * len(values))
    assert same(squared, naive_squares(values), 1e-9)
    assert zeros == sum(v == 0 for v in values)
    low, high = flat_outside or (math.nan, math.nan)
    assert saturated == sum(v <= low or v >= high for v in values)
    assert nonfinite == sum(not math.isfinite(v) for v in values)
    expected = max((abs(v) for v in values), default=0.0)
    assert same(peak.item(), math.nan if any(map(math.isnan, values)) else expected, 0.0)


def test_the_ends_of_the_flat_part_are_saturated() -> None:
    """Included, on both sides, as with ReLU6 at 0 and at 6."""
    rows = torch.tensor([[0.0, 6.0, 3.0, -1.0, 7.0, 5.9999]])
    assert activations.row_sums(rows, (0.0, 6.0))[0][4].item() == 4


def test_sums_add_up_over_calls() -> None:
    """Two calls' sums are those of one call with both calls' rows."""
    one, two = torch.randn(20, 30), torch.randn(12, 30)
    both = activations.row_sums(torch.cat([one, two]), (-1.0, 1.0))[0]
    assert torch.allclose(
        activations.row_sums(one, (-1.0, 1.0))[0] + activations.row_sums(two, (-1.0, 1.0))[0], both, rtol=1e-12, atol=1e-12
    )


@dataclass(frozen=True)
class Shape:
    """A shape of activations, and how many rows and units it has."""

    shape: tuple[int, ...]
    rows: int
    units: int


SMALL = [
    Shape((), 1, 1),
    Shape((7,), 1, 7),
    Shape((0, 7), 0, 7),
    Shape((1, 1), 1, 1),
    Shape((ROWS, 5), ROWS, 5),
    Shape((4, 8, 6), 32, 6),
    Shape((2, 5, 4, 4), 32, 5),
    Shape((32, 5, 1, 1), 32, 5),
    Shape((1, 3, 2, 4, 4), 32, 3),
    Shape((3, 5, 3, 3), 27, 5),
    Shape((0, 5, 4, 4), 0, 5),
    Shape((2, 5, 0, 4), 0, 5),
]
LARGE_SHAPES = [
    Shape((33, 5), ROWS, 5),
    Shape((8, 50, 12), ROWS, 12),
    Shape((2, 3, 40, 6), ROWS, 3),
    Shape((1, 4, 16, 16), ROWS, 4),
    Shape((64, 4, 5, 5), ROWS, 4),
    Shape((8, 4, 5, 5), ROWS, 4),
    Shape((20, 4, 5, 5), ROWS, 4),
    Shape((100, 4, 1, 1), ROWS, 4),
    Shape((4, 3, 6, 6, 6), ROWS, 3),
]


@pytest.mark.parametrize("case", SMALL, ids=str)
@dtypes
def test_few_rows_are_read_whole(case: Shape, dtype: torch.dtype) -> None:
    """Up to ROWS rows: each exactly once, units last."""
    activation = torch.randn(case.shape).to(dtype)
    rows = activations.sample_rows(activation, _strata())
    assert rows.shape == (case.rows, case.units)
    assert rows.dtype is dtype
    assert sorted(rows.double().tolist()) == sorted(_all_rows(activation))
    total, squared = activations.row_sums(rows, None)[0][1:3].tolist()
    assert same(total, naive_sum(numbers(activation)), 1e-9, 1e-9)
    assert same(squared, naive_squares(numbers(activation)), 1e-9)


@pytest.mark.parametrize("shape", [(0, 0), (3, 0), (3, 0, 2, 2)], ids=str)
def test_an_activation_without_units_has_no_elements(shape: tuple[int, ...]) -> None:
    """Nothing raises, and the count is 0."""
    rows = activations.sample_rows(torch.empty(shape), _strata())
    assert activations.row_sums(rows, (0.0, 1.0))[0].tolist() == [0.0] * SUMS


@pytest.mark.parametrize("case", LARGE_SHAPES, ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_sampled_rows_are_rows_of_the_activation(case: Shape, dtype: torch.dtype) -> None:
    """Whole vectors over the units (channels of images), and not a few rows over and over."""
    units = torch.arange(case.units, dtype=torch.float32).mul(1 / 64)
    units = units.view(-1, *[1] * (len(case.shape) - 2)) if len(case.shape) in (4, 5) else units
    activation = (torch.randn(case.shape) + units).to(dtype)
    known = _all_rows(activation)
    for seed in range(3):
        rows = activations.sample_rows(activation, _strata(seed))
        assert rows.dtype is dtype
        assert rows.shape[1] == case.units
        assert all(row in known for row in rows.double().tolist())
        assert len({tuple(row) for row in rows.tolist()}) >= ROWS // 2  # two strata may meet in one row
        assert rows.shape[0] >= ROWS // 2


@pytest.mark.parametrize("case", LARGE_SHAPES, ids=str)
def test_at_most_rows_rows_are_sampled(case: Shape) -> None:
    """ROWS: rows sampled of a call, at most."""
    assert activations.sample_rows(torch.randn(case.shape), _strata()).shape[0] <= ROWS


@pytest.mark.parametrize("offset", [0.0, 0.5, 1 - 2.0**-53])
@pytest.mark.parametrize("shape", [(33, 2), (1000, 2), (50, 2, 7, 3), (2, 2, 9, 9)], ids=str)
def test_the_ends_of_the_strata_lie_inside(shape: tuple[int, ...], offset: float) -> None:
    """Offsets at the ends of [0, 1) pick rows that exist."""
    activation = torch.randn(shape)
    rows = activations.sample_rows(activation, Strata(torch.full((ROWS,), offset, dtype=torch.float64)))
    assert all(row in _all_rows(activation) for row in rows.double().tolist())


def test_noncontiguous_images_are_sampled_as_contiguous_ones() -> None:
    """channels_last is storage only; transposed tokens too."""
    images, tokens = torch.randn(8, 6, 5, 7), torch.randn(12, 40, 10)
    for contiguous, other in (
        (images, images.to(memory_format=torch.channels_last)),
        (tokens, tokens.transpose(0, 1).contiguous().transpose(0, 1)),
    ):
        assert not other.is_contiguous()
        assert torch.equal(activations.sample_rows(other, _strata()), activations.sample_rows(contiguous, _strata()))


def test_every_token_is_sampled_in_the_end() -> None:
    """With uniform offsets no row is left out: strata cover the activation."""
    activation = torch.arange(100.0).view(100, 1)
    seen = {v for seed in range(100) for v in activations.sample_rows(activation, _strata(seed)).view(-1).tolist()}
    assert seen == set(range(100))


def test_every_position_of_an_image_is_sampled_in_the_end() -> None:
    """Images and positions alike."""
    activation = torch.arange(40.0 * 9).view(40, 1, 3, 3)
    seen = {v for seed in range(500) for v in activations.sample_rows(activation, _strata(seed)).view(-1).tolist()}
    assert len(seen) >= 0.99 * 360


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(16, 256, 512), (16, 512, 14, 14)], ids=str)
def test_mean_and_deviation_of_a_large_activation_are_right(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """32 rows of 512 units: 16,384 elements, so within 4 standard errors of the whole."""
    activation = torch.nn.functional.gelu(torch.randn(shape)).to(dtype)
    count, total, squared, *_ = activations.row_sums(activations.sample_rows(activation, _strata()), None)[0].tolist()
    mean, wide = total / count, activation.double()
    true_mean, true_deviation = wide.mean().item(), wide.std(correction=0).item()
    assert count >= ROWS * 512
    assert abs(mean - true_mean) <= 4 * true_deviation / math.sqrt(count)
    assert same(math.sqrt(squared / count - mean * mean), true_deviation, 0.05)


@dtypes
def test_a_constant_activation_has_no_deviation(dtype: torch.dtype) -> None:
    """From the sums: 0 to 1e-6 of the value."""
    activation = torch.full((8, 64, 100), 0.1).to(dtype)
    count, total, squared, *_ = activations.row_sums(activations.sample_rows(activation, _strata()), None)[0].tolist()
    assert math.sqrt(abs(squared / count - (total / count) ** 2)) <= 1e-6 * 0.1


@dtypes
def test_units_that_are_positive_somewhere_are_said(dtype: torch.dtype) -> None:
    """Any row will do; zero and NaN are not positive."""
    rows = torch.tensor([[0.0, -1.0, 2.0, math.nan, math.inf], [0.0, -0.5, -2.0, -1.0, -math.inf]]).to(dtype)
    found = activations.positive_units(rows)
    assert found.dtype is torch.bool
    assert found.tolist() == [False, False, True, False, True]
    assert activations.positive_units(rows[:0]).tolist() == [False] * 5


@pytest.mark.parametrize("shape", [(), (7,), (4, 6), (8, 50, 12), (64, 4, 5, 5), (2, 4, 5, 5), (2, 3, 4, 4, 4)], ids=str)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_activations_read_nothing_on_the_host(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """On tensors without values everything runs: nothing waits for the device."""
    with FakeTensorMode():
        strata = Strata(torch.empty(ROWS, dtype=torch.float64, device=FAKE_DEVICE))
        rows = activations.sample_rows(torch.empty(shape, dtype=dtype, device=FAKE_DEVICE), strata)
        for flat_outside in (None, (-1.0, 1.0)):
            assert activations.row_sums(rows, flat_outside)[0].shape == (SUMS,)
        assert activations.positive_units(rows).dtype is torch.bool
