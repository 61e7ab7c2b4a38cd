"""The copy from device to host."""

from __future__ import annotations

import math

import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from otel_train.readout import peek, read_out

MIXED = [
    torch.tensor(1.5),
    torch.tensor([[1.0, -2.0], [3.0, 0.1]], dtype=torch.float64),
    torch.tensor([0.5, 2.0**-14], dtype=torch.float16),
    torch.tensor([3.0, 1e30], dtype=torch.bfloat16),
    torch.tensor([1, 2**40, -7], dtype=torch.int64),
    torch.tensor([True, False, True]),
    torch.empty(0),
    torch.tensor([255], dtype=torch.uint8),
    torch.arange(12.0).view(3, 4).t(),
    torch.ones(3, requires_grad=True),
]


def _plain(tensor: torch.Tensor) -> list[float]:
    return [float(v) for v in tensor.detach().reshape(-1).tolist()]


def test_values_of_any_types_and_shapes_are_read_out_equal() -> None:
    """Flattened, one list a tensor, in the order asked for."""
    assert read_out(MIXED).values() == [_plain(tensor) for tensor in MIXED]


def test_values_are_floats() -> None:
    """Also those of integers and bools."""
    assert all(type(v) is float for values in read_out(MIXED).values() for v in values)


def test_nonfinite_values_are_read_out_as_such() -> None:
    """NaN, Inf and -Inf."""
    nan, inf, minus = read_out([torch.tensor([math.nan, math.inf, -math.inf])]).values()[0]
    assert math.isnan(nan)
    assert (inf, minus) == (math.inf, -math.inf)


def test_nothing_to_read_is_nothing() -> None:
    """No tensors, and tensors without elements."""
    assert read_out([]).values() == []
    assert read_out([torch.empty(0), torch.empty(0, 3)]).values() == [[], []]


def test_values_are_those_at_the_time_of_asking() -> None:
    """What is written afterwards does not show, for one tensor or several, fp64 or not; taking twice is the same."""
    for dtype in (torch.float64, torch.float32):
        for count in (1, 3):
            tensors = [torch.ones(2, dtype=dtype) for _ in range(count)]
            reading = read_out(tensors)
            for tensor in tensors:
                tensor.fill_(9.0)
            assert reading.values() == [[1.0, 1.0]] * count
            assert reading.values() == [[1.0, 1.0]] * count


def test_peeking_at_the_host_gives_the_numbers() -> None:
    """CPU tensors are there already."""
    for tensor in MIXED:
        found = peek(tensor)
        assert found == _plain(tensor)
        assert all(type(v) is float for v in found or [])


def test_peeking_at_a_device_gives_nothing_and_reads_nothing() -> None:
    """Elsewhere it never waits."""
    with FakeTensorMode():
        assert peek(torch.empty(3, device="cuda")) is None
    assert peek(torch.empty(3, device="meta")) is None
