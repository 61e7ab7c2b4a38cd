"""The wire format, against what protobuf's own library writes."""

from __future__ import annotations

import math
import random

import pytest
from google.protobuf.internal import encoder

from otel_train.sinks import wire
from tests.sinks.client_model import MetricFamily

EDGES = [0, 1, *(2 ** (7 * size) + more for size in range(1, 9) for more in (-1, 0, 1)), 2**63 - 1]


def written_by_protobuf(number: int) -> bytes:
    """Return a number as protobuf's library writes it."""
    parts: list[bytes] = []
    encoder._VarintEncoder()(parts.append, number, None)  # type: ignore[attr-defined]
    return b"".join(parts)


def test_numbers_are_written_as_protobuf_writes_them() -> None:
    """At each edge of seven bits, and by chance."""
    chance = random.Random(0)
    for number in (*EDGES, *(chance.getrandbits(chance.randint(1, 63)) for _ in range(2000))):
        assert wire.varint(number) == written_by_protobuf(number)


def test_signed_numbers_are_those_that_the_library_reads() -> None:
    """One after another in a packed list, of both signs."""
    numbers = [sign * number for number in EDGES for sign in (1, -1)]
    family = MetricFamily()
    family.metric.add().histogram.MergeFromString(wire.delimited(13, wire.signed_varints(numbers)) + wire.signed(5, -3))
    histogram = family.metric[0].histogram
    assert list(histogram.positive_delta) == numbers
    assert histogram.schema == -3


@pytest.mark.parametrize("number", [0.0, -0.0, 1.5, -math.inf, 5e-324])
def test_doubles_and_texts_come_back(number: float) -> None:
    """To the bit; half a surrogate, which no text can hold, is a question mark."""
    family = MetricFamily.FromString(
        wire.text(1, "ä\udc80层") + wire.delimited(4, wire.delimited(2, wire.double(1, number))) + wire.integer(3, 300)[:0]
    )
    assert family.name == "ä?层"
    assert math.copysign(1, family.metric[0].gauge.value) == math.copysign(1, number)
    assert family.metric[0].gauge.value == number
