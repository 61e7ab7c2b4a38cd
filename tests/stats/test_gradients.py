"""Gradients' norm, mean, deviation and magnitudes against plain fp64 arithmetic."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from otel_train.records import MAGNITUDE_EXPONENTS
from otel_train.sampling import Sampler, plan
from otel_train.stats import gradients, parameters, sums
from otel_train.stats.updates import read_whole
from tests.stats.test_sums import (
    FAKE_DEVICE,
    LARGE,
    Problem,
    dtypes,
    naive_squares,
    naive_sum,
    numbers,
    problems,
    rms,
    same,
    small_problems,
)


def _naive_deviation(values: list[float]) -> float:
    if not all(map(math.isfinite, values)):
        return math.nan
    mean = math.fsum(values) / len(values)
    return math.sqrt(math.fsum((v - mean) ** 2 for v in values) / len(values))


def _naive_bin(value: float) -> int | None:
    """Go through the bins one by one: the first one whose upper bound is not below the value."""
    if math.isnan(value):
        return None
    if math.isinf(value):
        return len(MAGNITUDE_EXPONENTS)
    mantissa, exponent = math.frexp(abs(value))  # 0.5 <= mantissa < 1
    ceiling = exponent - 1 if mantissa == 0.5 else exponent
    for i, bound in enumerate(MAGNITUDE_EXPONENTS):
        if value == 0 or ceiling <= bound:
            return i
    return len(MAGNITUDE_EXPONENTS)


def _naive_magnitudes(values: list[float]) -> tuple[list[float], float]:
    counts = [0.0] * (len(MAGNITUDE_EXPONENTS) + 1)
    for value in values:
        at = _naive_bin(value)
        if at is not None:
            counts[at] += 1
    return counts, math.fsum(abs(v) for v in values if math.isfinite(v))


def _naive_signs(values: list[float]) -> tuple[list[float], list[float]]:
    """Count negative elements bin by bin, and those that are a bound."""
    below = [value for value in values if value < 0]
    bins = list(map(_naive_bin, below))
    negatives = [float(bins.count(i)) for i in range(1, len(MAGNITUDE_EXPONENTS) + 1)]
    return negatives, [float(below.count(-(2.0**exponent))) for exponent in MAGNITUDE_EXPONENTS]


@problems
@dtypes
def test_norm_mean_and_deviation_are_those_of_plain_arithmetic(problem: Problem, dtype: torch.dtype) -> None:
    """1e-5 for norm and deviation, 1e-6 of the root mean square for the mean."""
    tensor = problem.make(dtype)
    values = numbers(tensor)
    total, squared = sums.sum_and_square_sum([tensor])[0].tolist()
    norm, mean, deviation = gradients.norm_mean_std(len(values), total, squared)
    if not values:
        assert norm == 0
        assert math.isnan(mean)
        assert math.isnan(deviation)
        return
    assert same(norm, math.sqrt(naive_squares(values)), 1e-5)
    assert same(mean, naive_sum(values) / len(values), 0.0, 1e-6 * rms(values))
    if "constant" in problem.name:
        return  # below: a deviation of 0 has no relative error
    assert same(deviation, _naive_deviation(values), 1e-5, 1e-6 * rms(values))


@dtypes
@pytest.mark.parametrize("value", [0.0, 0.1, -1.9, 1 / 3, 300.0, 2.0**-20])
@pytest.mark.parametrize("elements", [1, 2, 1000, sums.STACK])
def test_a_constant_gradient_has_no_deviation(elements: int, value: float, dtype: torch.dtype) -> None:
    """A small tensor of equal elements has a deviation of 0, to 1e-6 of the elements."""
    tensor = torch.full((elements,), value).to(dtype)
    total, squared = sums.sum_and_square_sum([tensor])[0].tolist()
    _, mean, deviation = gradients.norm_mean_std(elements, total, squared)
    assert 0 <= deviation <= 1e-6 * abs(value)
    assert same(mean, tensor[0].item(), 1e-12)


@pytest.mark.parametrize("value", [0.1, -1.9, 1 / 3])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_a_large_constant_gradient_has_next_to_no_deviation(value: float, dtype: torch.dtype) -> None:
    """Above STACK the docstring promises to lose only what is below some 5e-4 of the mean; allowed here: 1e-3."""
    tensor = torch.full((sums.STACK + 1,), value).to(dtype)
    total, squared = sums.sum_and_square_sum([tensor])[0].tolist()
    _, _, deviation = gradients.norm_mean_std(tensor.numel(), total, squared)
    assert 0 <= deviation <= 1e-3 * abs(value)


@dtypes
def test_three_million_gradients_have_the_deviation_of_plain_arithmetic(dtype: torch.dtype) -> None:
    """Large tensors: norm and deviation to 1e-5, mean to 1e-6 of the root mean square."""
    tensor = (torch.randn(LARGE) * 1e-3).to(dtype)
    wide = tensor.double()
    total, squared = sums.sum_and_square_sum([tensor])[0].tolist()
    norm, mean, deviation = gradients.norm_mean_std(LARGE, total, squared)
    assert same(norm, wide.norm().item(), 1e-5)
    assert same(mean, wide.mean().item(), 0.0, 1e-6 * wide.square().mean().sqrt().item())
    assert same(deviation, wide.std(correction=0).item(), 1e-5)


@pytest.mark.parametrize(
    ("total", "squared", "expected"),
    [
        (math.nan, math.nan, (math.nan, math.nan, math.nan)),
        (math.inf, math.inf, (math.inf, math.inf, math.nan)),
        (-math.inf, math.inf, (math.inf, -math.inf, math.nan)),
        (math.nan, math.inf, (math.inf, math.nan, math.nan)),
        (6.0, 12.0, (math.sqrt(12.0), 2.0, 0.0)),
        (6.0, 11.999999999, (math.sqrt(11.999999999), 2.0, 0.0)),
        (0.0, 12.0, (math.sqrt(12.0), 0.0, 2.0)),
    ],
)
def test_sums_of_any_kind_turn_into_values(total: float, squared: float, expected: tuple[float, float, float]) -> None:
    """NaN stays NaN, and a variance rounded below 0 is 0."""
    found = gradients.norm_mean_std(3, total, squared)
    assert all(same(f, e, 1e-12) for f, e in zip(found, expected, strict=True)), found


@small_problems
@dtypes
def test_magnitudes_are_counted_as_a_plain_loop_does(problem: Problem, dtype: torch.dtype) -> None:
    """Every element of a small tensor is in its bin."""
    tensors = [problem.make(dtype) for _ in range(2)]
    chosen = plan(tensors[0].shape, embedding=False)
    samples = gradients.magnitude_samples(tensors, chosen, Sampler(torch.device("cpu")).draw(chosen))
    found = gradients.magnitudes(samples)
    assert found.shape == (2, gradients.BINS + 1)
    assert found.dtype is torch.float64
    for tensor, (*counts, absolute) in zip(tensors, found.tolist(), strict=True):
        expected, total = _naive_magnitudes(numbers(tensor.float()))
        assert counts == expected
        assert same(absolute, total, 1e-9)


def test_bins_include_their_upper_bound_and_not_their_lower() -> None:
    """Exact powers of two, and the floats next to them, of every exponent that fp32 has."""
    powers = torch.cat([torch.tensor([2.0**e]) for e in range(-149, 128)])
    values = torch.cat([powers, -powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(math.inf))])
    counts = gradients.magnitudes(values.view(-1, 1))[:, : gradients.BINS]
    assert counts.sum(1).eq(1).all()
    for value, at in zip(values.tolist(), counts.argmax(1).tolist(), strict=True):
        assert at == _naive_bin(value), value


@pytest.mark.parametrize(
    ("value", "expected"),
    [
        (0.0, 0),
        (-0.0, 0),
        (2.0**-149, 0),
        (1e-40, 0),
        (2.0**-46, 0),
        (1.0000002 * 2.0**-46, 1),
        (1.0, 46),
        (1.5, 47),
        (2.0, 47),
        (2.0**16, 62),
        (65537.0, 63),
        (3.4e38, 63),
        (math.inf, 63),
        (-math.inf, 63),
        (math.nan, None),
        (-math.nan, None),
    ],
)
def test_an_element_is_in_the_bin_of_its_power_of_two(value: float, expected: int | None) -> None:
    """The table of the edges, written out."""
    counts = gradients.magnitudes(torch.tensor([[value]]))[0, : gradients.BINS].tolist()
    assert counts == [1.0 if i == expected else 0.0 for i in range(len(MAGNITUDE_EXPONENTS) + 1)]


def test_magnitudes_of_no_elements_are_zeros() -> None:
    """Empty tensors have empty bins and a sum of 0."""
    assert not gradients.magnitudes(torch.empty(3, 0)).any()


def test_the_sum_of_magnitudes_is_of_finite_elements_only() -> None:
    """NaN and Inf do not spoil it."""
    found = gradients.magnitudes(torch.tensor([[1.5, -2.5, math.nan, math.inf, -math.inf]]))
    assert found[0, gradients.BINS].item() == 4.0


def test_noncontiguous_samples_are_counted_alike() -> None:
    """A view is counted as its copy is."""
    samples = torch.randn(40, 6).t()
    assert torch.equal(gradients.magnitudes(samples), gradients.magnitudes(samples.clone(memory_format=torch.contiguous_format)))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize(("shape", "embedding"), [((300, 400), False), ((50_000,), False), ((6000, 32), True), ((267, 127), False)])
def test_sampled_magnitudes_are_elements_of_the_drawn_lines(shape: tuple[int, ...], dtype: torch.dtype, *, embedding: bool) -> None:
    """The histogram's samples are the neighbours at the drawn places, in fp32."""
    chosen = plan(shape, embedding=embedding)
    draw = Sampler(torch.device("cpu")).draw(chosen)
    tensors = [torch.randn(shape).to(dtype) for _ in range(2)]
    found = gradients.magnitude_samples(tensors, chosen, draw)
    assert found.dtype is torch.float32
    assert found.shape[0] == 2
    assert draw.magnitude_lines is not None
    for tensor, row in zip(tensors, found.tolist(), strict=True):
        values = numbers(tensor)
        expected = [values[line * chosen.width + i] for line in draw.magnitude_lines.tolist() for i in range(chosen.width)]
        assert row == expected


def test_the_sampled_histogram_is_that_of_all_elements_on_average() -> None:
    """Over many samples every bin's share comes near the true one."""
    chosen = plan((200, 300), embedding=False)
    tensor = torch.randn(200, 300)
    truth, _ = _naive_magnitudes(numbers(tensor))
    sampler = Sampler(torch.device("cpu"))
    counts = torch.zeros(gradients.BINS + 1, dtype=torch.float64)
    for _ in range(60):
        counts += gradients.magnitudes(gradients.magnitude_samples([tensor], chosen, sampler.draw(chosen)))[0]
        sampler.advance()
    shares = (counts[: gradients.BINS] / counts[: gradients.BINS].sum()).tolist()
    for share, true in zip(shares, truth, strict=True):
        assert abs(share - true / tensor.numel()) < 0.005


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shape", [(0,), (7,), (400, 300)])
def test_magnitudes_read_nothing_on_the_host(shape: tuple[int, ...], dtype: torch.dtype) -> None:
    """On tensors without values everything runs: nothing waits for the device."""
    with FakeTensorMode():
        chosen = plan(shape, embedding=False)
        tensors = [torch.empty(shape, dtype=dtype, device=FAKE_DEVICE)]
        sampler = Sampler(torch.device(FAKE_DEVICE))
        samples = gradients.magnitude_samples(tensors, chosen, sampler.draw(chosen))
        assert gradients.magnitudes(samples).shape == (1, gradients.BINS + 1)


@problems
@dtypes
def test_gradients_are_read_in_one_go(problem: Problem, dtype: torch.dtype) -> None:
    """Sums as of plain arithmetic, elements for the histogram, and row norms just where rows are to be chosen."""
    tensors = [problem.make(dtype) for _ in range(2)]
    chosen = plan(tensors[0].shape, embedding=False)
    read = gradients.read_gradients(tensors, chosen, Sampler(torch.device("cpu")).draw(chosen), histogram=True)
    for tensor, (total, squared) in zip(tensors, read.pairs.tolist(), strict=True):
        values = numbers(tensor)
        assert same(total, naive_sum(values), 0.0, 1e-6 * rms(values) * len(values))
        assert same(squared, naive_squares(values), 1e-6)
    assert read.samples is not None
    assert read.samples.shape == (2, chosen.magnitudes)
    assert (read.row_norms is None) == (chosen.top == 0)


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("shape", [(128, 128), (128, 129), (181, 181), (300, 400)], ids=str)
def test_complex_gradients_are_read_as_two_reals_an_element(shape: tuple[int, int], *, exact: bool) -> None:
    """Also where they are small by their elements, and large by their parts."""
    tensors = [torch.randn(shape, dtype=torch.complex64) for _ in range(3)]
    chosen = plan((*shape, 2), embedding=False, exact=exact)
    read = gradients.read_gradients(tensors, chosen, Sampler(torch.device("cpu")).draw(chosen), histogram=True)
    assert read.pairs[:, 1].tolist() == pytest.approx([t.abs().double().square().sum().item() for t in tensors], rel=1e-6)
    assert (read.row_norms is None) == (chosen.top == 0)
    copies = read_whole(tensors)
    expected = pytest.approx([t.abs().double().square().sum().item() for t in tensors], rel=1e-6)
    assert parameters.square_sums_of_copies(copies).tolist() == expected


@pytest.mark.parametrize("embedding", [False, True])
@pytest.mark.parametrize(
    "make",
    [
        lambda: torch.randn(300, 400),
        lambda: torch.randn(131, 257),
        lambda: torch.randn(4200, 9),
        lambda: torch.randn(64, 30, 5, 5),
        lambda: torch.randn(400, 300).t(),
        lambda: torch.randn(48, 40, 5, 5).to(memory_format=torch.channels_last),
        lambda: torch.randn(4200, 16).bfloat16(),
        lambda: torch.randn(200, 181, dtype=torch.complex64),
    ],
    ids=["rows of runs", "prime", "short rows", "convolution", "transposed", "channels_last", "bf16", "complex"],
)
def test_row_norms_are_those_of_each_row(make: Callable[[], torch.Tensor], *, embedding: bool) -> None:
    """Whether they come out of those of runs, or are made for themselves."""
    tensors = [make() for _ in range(2)]
    shape = (*tensors[0].shape, 2) if tensors[0].is_complex() else tuple(tensors[0].shape)
    chosen = plan(shape, embedding=embedding)
    read = gradients.read_gradients(tensors, chosen, Sampler(torch.device("cpu")).draw(chosen), histogram=False)
    assert read.samples is None
    assert read.row_norms is not None
    for tensor, row in zip(tensors, read.row_norms.tolist(), strict=True):
        wide = (torch.view_as_real(tensor) if tensor.is_complex() else tensor).double().flatten(1)
        assert row == pytest.approx(wide.norm(dim=1).tolist(), rel=1e-5)


def test_a_sparse_gradient_has_the_norms_of_its_rows() -> None:
    """Rows that are not there have 0."""
    dense = torch.zeros(5000, 16)
    dense[[3, 70, 4999]] = torch.randn(3, 16)
    chosen = plan(dense.shape, embedding=True)
    read = gradients.read_gradients([dense.to_sparse(1)], chosen, Sampler(torch.device("cpu")).draw(chosen), histogram=True)
    assert read.row_norms is not None
    assert read.row_norms[0].tolist() == pytest.approx(dense.norm(dim=1).tolist(), rel=1e-6)


@small_problems
@dtypes
def test_signs_are_counted_as_a_plain_loop_does(problem: Problem, dtype: torch.dtype) -> None:
    """Negative elements by magnitude, exact powers of two apart, and the sum of all."""
    tensors = [problem.make(dtype) for _ in range(2)]
    chosen = plan(tensors[0].shape, embedding=False)
    samples = gradients.magnitude_samples(tensors, chosen, Sampler(torch.device("cpu")).draw(chosen))
    found = gradients.signs(samples)
    assert found.shape == (2, 2 * gradients.BINS - 1)
    assert found.dtype is torch.float64
    for tensor, numbers_found in zip(tensors, found.tolist(), strict=True):
        values = numbers(tensor.float())
        negatives, powers = _naive_signs(values)
        assert numbers_found[: gradients.BINS - 1] == negatives
        assert numbers_found[gradients.BINS - 1 : -1] == powers
        finite = [value for value in values if math.isfinite(value)]
        assert same(numbers_found[-1], math.fsum(finite), 1e-9, 1e-9 * math.fsum(map(abs, finite)))


def test_every_power_of_two_has_its_place_among_the_signs() -> None:
    """Of both signs, with the floats next to them, of every exponent that fp32 has; and zeros, Inf and NaN."""
    powers = torch.cat([torch.tensor([2.0**e]) for e in range(-149, 128)])
    near = [powers, powers.nextafter(torch.tensor(0.0)), powers.nextafter(torch.tensor(math.inf))]
    special = torch.tensor([0.0, -0.0, math.inf, -math.inf, math.nan, -math.nan])
    values = torch.cat([special, *near, *(-values for values in near)])
    for value, row in zip(values.tolist(), gradients.signs(values.view(-1, 1)).tolist(), strict=True):
        negatives, exact = _naive_signs([value])
        assert (row[: gradients.BINS - 1], row[gradients.BINS - 1 : -1]) == (negatives, exact), value


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_signs_read_nothing_on_the_host(dtype: torch.dtype) -> None:
    """On tensors without values everything runs: nothing waits for the device."""
    with FakeTensorMode():
        assert gradients.signs(torch.empty((3, 40), dtype=dtype, device=FAKE_DEVICE).float()).shape == (3, 2 * gradients.BINS - 1)
