"""Weights' norms against plain fp64 arithmetic."""

from __future__ import annotations

import math

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from otel_train.stats import parameters, sums
from tests.stats.test_sums import FAKE_DEVICE, LARGE, Problem, dtypes, naive_squares, numbers, problems, same


@problems
@dtypes
def test_squared_norms_are_those_of_plain_arithmetic(problem: Problem, dtype: torch.dtype) -> None:
    """One fp64 number a weight, in their order, right to 1e-6."""
    weights = [problem.make(dtype) for _ in range(3)]
    found = parameters.weight_square_sums(weights)
    assert found.shape == (3,)
    assert found.dtype is torch.float64
    for weight, squared in zip(weights, found.tolist(), strict=True):
        assert same(squared, naive_squares(numbers(weight)), 1e-6)


@dtypes
def test_three_million_weights_have_the_norm_of_plain_arithmetic(dtype: torch.dtype) -> None:
    """Large weights: 1e-6."""
    weight = (torch.randn(LARGE) * 0.02 + 0.01).to(dtype)
    assert same(parameters.weight_square_sums([weight]).item(), weight.double().square().sum().item(), 1e-6)


def test_squared_norms_add_up_over_tensors() -> None:
    """A layer's norm is the root of the sum over its tensors, whichever way they are cut."""
    weight = torch.randn(2 * sums.STACK)
    halves = parameters.weight_square_sums(weight.chunk(2))
    whole = parameters.weight_square_sums([weight])
    assert same(math.sqrt(halves.sum().item()), math.sqrt(whole.item()), 1e-7)


@pytest.mark.parametrize("shape", [(0,), (7,), (400, 300)])
def test_squared_norms_read_nothing_on_the_host(shape: tuple[int, ...]) -> None:
    """On tensors without values everything runs: nothing waits for the device."""
    with FakeTensorMode():
        assert parameters.weight_square_sums([torch.empty(shape, device=FAKE_DEVICE)] * 2).shape == (2,)
