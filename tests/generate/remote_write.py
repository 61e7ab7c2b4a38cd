"""Prometheus' remote write 1.0 by hand, as a gateway does it: one series with a number, one with a native histogram.

Field numbers are those of ``prompb/remote.proto`` and ``prompb/types.proto`` in Prometheus' repository at v3.5.3.
"""

from __future__ import annotations

import struct
import urllib.error
import urllib.request


def _varint(value: int) -> bytes:
    out = bytearray()
    while value > 0x7F:
        out.append(value & 0x7F | 0x80)
        value >>= 7
    return bytes([*out, value])


def _number(field: int, value: int) -> bytes:
    return _varint(field << 3) + _varint(value)


def _double(field: int, value: float) -> bytes:
    return _varint(field << 3 | 1) + struct.pack("<d", value)


def _part(field: int, body: bytes) -> bytes:
    return _varint(field << 3 | 2) + _varint(len(body)) + body


def _series(name: str, point: bytes) -> bytes:
    return _part(1, _part(1, _part(1, b"__name__") + _part(2, name.encode())) + point)


def request(at: float, *, histogram: bool) -> bytes:
    """Return a request with ``pushed`` 1 and, if wanted, the native ``pushed_histogram``: three values between 1 and 2."""
    milliseconds = int(at * 1000)
    sample = _double(1, 1.0) + _number(2, milliseconds)
    # count, sum, threshold and count of the zero bucket, one span (the bucket 1, zigzag), its count, when
    native = (
        _number(1, 3) + _double(3, 4.5) + _double(5, 2.0**-46) + _number(6, 0)
        + _part(11, _number(1, 2) + _number(2, 1)) + _part(12, _varint(6)) + _number(15, milliseconds)
    )  # fmt: skip
    return _series("pushed", _part(2, sample)) + (_series("pushed_histogram", _part(4, native)) if histogram else b"")


def _snappy(data: bytes) -> bytes:
    """Return a snappy block of one literal: not smaller, but valid."""
    assert len(data) <= 1 << 16
    return _varint(len(data)) + bytes([61 << 2]) + struct.pack("<H", len(data) - 1) + data


def push(port: int, at: float, *, histogram: bool = True) -> int:
    """Write to a Prometheus on loopback, and return its status."""
    headers = {"Content-Encoding": "snappy", "Content-Type": "application/x-protobuf", "X-Prometheus-Remote-Write-Version": "0.1.0"}
    url = f"http://127.0.0.1:{port}/api/v1/write"
    try:
        with urllib.request.urlopen(
            urllib.request.Request(url, _snappy(request(at, histogram=histogram)), headers), timeout=5
        ) as answer:
            return int(answer.status)
    except urllib.error.HTTPError as error:
        return error.code
