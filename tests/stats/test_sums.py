"""Sums over tensors against plain fp64 arithmetic; also the list of problems that other tests of statistics share."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from otel_train.stats import sums

DTYPES = (torch.bfloat16, torch.float16, torch.float32, torch.float64)
LARGE = 3_000_000
# FakeTensorMode cannot index tensors of a device that torch is not built for; "meta" takes the same branches as an accelerator.
FAKE_DEVICE = "cuda" if torch.version.cuda else "meta"


@dataclass(frozen=True)
class Problem:
    """A named way to make a tensor of a type."""

    name: str
    make: Callable[[torch.dtype], torch.Tensor]


def _with(values: dict[int, float]) -> Callable[[torch.dtype], torch.Tensor]:
    def make(dtype: torch.dtype) -> torch.Tensor:
        tensor = torch.randn(5, 7)
        for index, value in values.items():
            tensor.view(-1)[index] = value
        return tensor.to(dtype)

    return make


def _channels_last(dtype: torch.dtype) -> torch.Tensor:
    return torch.randn(4, 6, 3, 5).to(dtype).to(memory_format=torch.channels_last)


def _mixed(dtype: torch.dtype) -> torch.Tensor:
    scales = torch.exp2(torch.randint(-9, 9, (900,)).float())
    return (torch.randn(900) * scales).to(dtype)


def _sparse(dtype: torch.dtype) -> torch.Tensor:
    # coordinates given twice are summed
    values = torch.tensor([[1.0, 2.0], [0.5, -1.0], [0.25, 3.0], [-4.0, 8.0]]).to(dtype)
    return torch.sparse_coo_tensor(torch.tensor([[0, 4, 4, 7]]), values, (9, 2), check_invariants=True)


PROBLEMS = [
    Problem("ordinary", lambda dtype: torch.randn(17, 33).to(dtype)),
    Problem("vector", lambda dtype: torch.randn(301).to(dtype)),
    Problem("scalar", lambda dtype: torch.tensor(-1.75).to(dtype)),
    Problem("empty", lambda dtype: torch.empty(0, 3, dtype=dtype)),
    Problem("one element", lambda dtype: torch.full((1, 1), 0.7).to(dtype)),
    Problem("zeros", lambda dtype: torch.zeros(8, 9, dtype=dtype)),
    Problem("constant", lambda dtype: torch.full((40, 25), 0.1).to(dtype)),
    Problem("NaN", _with({3: math.nan, 20: math.nan})),
    Problem("Inf", _with({0: math.inf})),
    Problem("minus Inf", _with({34: -math.inf})),
    Problem("Inf and NaN", _with({5: math.inf, 6: -math.inf, 7: math.nan})),
    Problem("transposed", lambda dtype: torch.randn(12, 30).to(dtype).t()),
    Problem("channels_last", _channels_last),
    Problem("every second column", lambda dtype: torch.randn(10, 14).to(dtype)[:, ::2]),
    Problem("offset", lambda dtype: torch.randn(30, 14).to(dtype).t()[3:9]),
    Problem("expanded", lambda dtype: torch.randn(5, 1).to(dtype).expand(5, 6)),
    Problem("negative view", lambda dtype: torch._neg_view(torch.randn(4, 4).to(dtype))),
    Problem("sparse", _sparse),
    Problem("mixed magnitudes", _mixed),
    Problem("one run", lambda dtype: torch.randn(sums.RUN).to(dtype)),
    Problem("runs and a rest", lambda dtype: torch.randn(2 * sums.RUN + 5).to(dtype)),
    Problem("the largest stacked", lambda dtype: torch.randn(sums.STACK).to(dtype)),
    Problem("above STACK", lambda dtype: torch.randn(sums.STACK + 1).to(dtype)),
    Problem("above STACK, transposed", lambda dtype: torch.randn(200, 201).to(dtype).t()),
    Problem("above STACK, with NaN", lambda dtype: torch.cat([torch.randn(sums.STACK), torch.tensor([math.nan])]).to(dtype)),
    Problem("above STACK, with Inf", lambda dtype: torch.cat([torch.tensor([math.inf]), torch.randn(sums.STACK)]).to(dtype)),
    Problem("above STACK, constant", lambda dtype: torch.full((sums.STACK + 100,), 0.1).to(dtype)),
]

problems = pytest.mark.parametrize("problem", PROBLEMS, ids=lambda problem: problem.name)
small_problems = pytest.mark.parametrize(
    "problem", [problem for problem in PROBLEMS if "stack" not in problem.name.lower()], ids=lambda problem: problem.name
)
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)


def numbers(tensor: torch.Tensor) -> list[float]:
    """Return the elements as Python floats, in logical order."""
    dense = tensor.to_dense() if tensor.is_sparse else tensor
    found: list[float] = dense.double().reshape(-1).tolist()
    return found


def naive_sum(values: list[float]) -> float:
    """Add floats up: exactly where they are finite."""
    return math.fsum(values) if all(map(math.isfinite, values)) else sum(values)


def naive_squares(values: list[float]) -> float:
    """Add squares up: exactly where they are finite."""
    return naive_sum([v * v for v in values])


def rms(values: list[float]) -> float:
    """Return the root of the mean square, 0 for no values and for non-finite ones."""
    root = math.sqrt(naive_squares(values) / len(values)) if values else 0.0
    return root if math.isfinite(root) else 0.0


def same(found: float, expected: float, relative: float, absolute: float = 0.0) -> bool:
    """Compare two floats; NaN equals NaN, and Inf only Inf of its sign."""
    if math.isnan(expected) or math.isinf(expected):
        return (math.isnan(found) and math.isnan(expected)) or found == expected
    return abs(found - expected) <= relative * abs(expected) + absolute


@problems
@dtypes
def test_flat_keeps_every_element_once(problem: Problem, dtype: torch.dtype) -> None:
    """One dimension, the same elements in any order."""
    tensor = problem.make(dtype)
    flat = sums.flat(tensor)
    assert flat.dim() == 1
    assert flat.dtype is dtype
    assert sorted(map(repr, numbers(flat))) == sorted(map(repr, numbers(tensor)))


@pytest.mark.parametrize("make", [lambda t: t, lambda t: t.t(), lambda t: t.to(memory_format=torch.contiguous_format)[2:]])
def test_flat_of_dense_tensors_is_no_copy(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """Dense storage in any order is looked at in place, from its own offset."""
    tensor = make(torch.randn(6, 8))
    flat = sums.flat(tensor)
    assert flat.data_ptr() == tensor.data_ptr()
    assert flat.numel() == tensor.numel()


@pytest.mark.parametrize("make", [lambda z: z, lambda z: z.t(), lambda z: z.conj(), lambda z: z[:, ::2], lambda z: z[:0]])
@pytest.mark.parametrize("dtype", [torch.complex64, torch.complex128], ids=str)
def test_complex_numbers_count_as_two_reals(dtype: torch.dtype, make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    """The sum of squares of a complex tensor is that of its absolute values."""
    tensor = make(torch.randn(6, 8, dtype=dtype))
    listed = tensor.reshape(-1).tolist()
    values = [part for z in listed for part in (z.real, z.imag)]
    assert sorted(numbers(sums.flat(tensor))) == sorted(values)
    total, squares = sums.sum_and_square_sum([tensor])[0].tolist()
    assert same(total, naive_sum(values), 1e-12, 1e-12)
    assert same(squares, naive_sum([abs(z) ** 2 for z in listed]), 1e-12)


@problems
@dtypes
def test_a_sum_of_squares_is_that_of_plain_arithmetic(problem: Problem, dtype: torch.dtype) -> None:
    """Relative error 1e-6 at most, and NaN and Inf come through."""
    tensor = problem.make(dtype)
    found = sums.square_sums([tensor])
    assert found.dtype is torch.float64
    assert found.shape == (1,)
    assert same(found.item(), naive_squares(numbers(tensor)), 1e-6)


@problems
@dtypes
def test_a_sum_is_that_of_plain_arithmetic(problem: Problem, dtype: torch.dtype) -> None:
    """Off by 1e-6 of the root mean square an element at most, and NaN and Inf come through."""
    tensor = problem.make(dtype)
    values = numbers(tensor)
    found = sums.sum_and_square_sum([tensor])
    assert found.dtype is torch.float64
    assert found.shape == (1, 2)
    assert same(found[0, 0].item(), naive_sum(values), 0.0, 1e-6 * rms(values) * len(values))


@problems
@dtypes
def test_sums_of_several_tensors_are_those_of_each(problem: Problem, dtype: torch.dtype) -> None:
    """Tensors of one shape, stacked or one by one, keep their order."""
    tensors = [problem.make(dtype) for _ in range(3)]
    pairs = sums.sum_and_square_sum(tensors)
    squares = sums.square_sums(tensors)
    assert pairs.shape == (3, 2)
    assert squares.shape == (3,)
    assert pairs.dtype is squares.dtype is torch.float64
    for tensor, (total, square), alone in zip(tensors, pairs.tolist(), squares.tolist(), strict=True):
        values = numbers(tensor)
        assert same(total, naive_sum(values), 0.0, 1e-6 * rms(values) * len(values))
        assert same(square, naive_squares(values), 1e-6)
        assert same(alone, naive_squares(values), 1e-6)


@dtypes
@pytest.mark.parametrize("make", [torch.randn, torch.rand], ids=["normal", "uniform"])
def test_three_million_elements_add_up_to_a_millionth(dtype: torch.dtype, make: Callable[[int], torch.Tensor]) -> None:
    """A large tensor's sum and sum of squares are right to 1e-6."""
    tensor = make(LARGE).to(dtype).view(1500, 2000)
    wide = tensor.double()
    total, square = sums.sum_and_square_sum([tensor])[0].tolist()
    expected = wide.square().sum().item()
    assert same(square, expected, 1e-6)
    assert same(sums.square_sums([tensor]).item(), expected, 1e-6)
    assert same(total, wide.sum().item(), 0.0, 1e-6 * math.sqrt(expected / LARGE) * LARGE)
    assert same(total, wide.sum().item(), 1e-6, 1e-6 * math.sqrt(expected))


@pytest.mark.parametrize("rest", [0, 5, sums.RUN, sums.RUN + 5])
def test_what_does_not_fill_a_piece_counts_too(rest: int) -> None:
    """Pieces, runs and single elements at the end: all are in the sum and in the sum of squares."""
    tensor = torch.rand(sums.PIECE + rest)
    tensor[-1] = 1e6
    total, square = sums.sum_and_square_sum([tensor])[0].tolist()
    assert same(total, tensor.double().sum().item(), 1e-6)
    assert same(square, tensor.double().square().sum().item(), 1e-6)


def test_a_large_constant_adds_up_to_a_millionth() -> None:
    """Equal elements all round the same way, which is where short sums drift."""
    tensor = torch.full((LARGE,), 0.1)
    total, square = sums.sum_and_square_sum([tensor])[0].tolist()
    value = tensor[0].item()
    assert same(total, LARGE * value, 1e-6)
    assert same(square, LARGE * value * value, 1e-6)


@pytest.mark.parametrize("exponent", [-46, -20, 0, 16])
@pytest.mark.parametrize("size", [100, sums.STACK + 1])
def test_sums_of_squares_hold_over_the_histograms_range(size: int, exponent: int) -> None:
    """Elements of 2^-46 to 2^16 neither overflow nor vanish in fp32."""
    tensor = torch.randn(size) * 2.0**exponent
    assert same(sums.square_sums([tensor]).item(), tensor.double().square().sum().item(), 1e-6)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_squares_that_fp32_cannot_hold_add_up_in_small_tensors(scale: float) -> None:
    """Elements are fp32 but their squares are beyond it: small tensors are squared in fp64."""
    tensor = torch.randn(sums.STACK) * scale
    assert same(sums.square_sums([tensor]).item(), tensor.double().square().sum().item(), 1e-6)


@pytest.mark.parametrize(("scale", "shown"), [(1e-25, 0.0), (1e25, math.inf)])
def test_squares_that_fp32_cannot_hold_show_as_zero_or_infinite_in_large_tensors(scale: float, shown: float) -> None:
    """The range that the docstring gives up, for half the cost: never a wrong number in between."""
    whole_runs = torch.randn(sums.STACK + sums.RUN) * scale
    assert sums.square_sums([whole_runs]).item() == shown


@problems
@dtypes
def test_nonfinite_elements_are_counted_exactly(problem: Problem, dtype: torch.dtype) -> None:
    """NaN, Inf and -Inf count one each."""
    tensor = problem.make(dtype)
    found = sums.count_nonfinite(tensor)
    assert found.dtype is torch.int64
    assert found.item() == sum(not math.isfinite(v) for v in numbers(tensor))


def test_half_a_nonfinite_complex_number_is_counted() -> None:
    """Real and imaginary parts count by themselves."""
    assert sums.count_nonfinite(torch.tensor([complex(math.nan, 1.0), complex(1.0, 2.0)])).item() == 1


@dtypes
@pytest.mark.parametrize("shape", [(0,), (9,), (8, 16), (300, 300)])
def test_sums_read_nothing_on_the_host(dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """On tensors without values everything runs: nothing waits for the device."""
    with FakeTensorMode():
        tensors = [torch.empty(shape, dtype=dtype, device=FAKE_DEVICE) for _ in range(2)]
        results = [sums.sum_and_square_sum(tensors), sums.square_sums(tensors), sums.count_nonfinite(tensors[0])]
        assert all(result.device.type == FAKE_DEVICE for result in results)


def test_a_planted_host_read_is_seen() -> None:
    """What the tests above rely on: reading a value of a tensor without values raises."""
    with FakeTensorMode():
        total = sums.square_sums([torch.empty(8, device=FAKE_DEVICE)])
        with pytest.raises(DataDependentOutputException):
            total.sum().item()
