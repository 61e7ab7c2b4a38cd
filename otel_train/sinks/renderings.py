"""What the endpoint serves of the latest Snapshot: each made once, whatever the number of those who ask."""

from __future__ import annotations

import threading
import time
import zlib
from collections.abc import Callable, Hashable, Iterator
from typing import Any, TypeVar

from otel_train.sinks import exposition, protobuf
from otel_train.sinks.negotiation import Format
from otel_train.sinks.page import render_page
from otel_train.sinks.renderer import SnapshotRenderer
from otel_train.snapshot import Snapshot

PieceT = TypeVar("PieceT")

_STRETCH_SECONDS = 0.0005
_PAUSE_SECONDS = 0.001
"""Rendering sleeps that long after each such stretch. Python takes the interpreter from a thread after 5 ms only, and a training
asks for it back at every operator: 50,000 series in one go held an operator up by 10 ms, with the pauses by 2 to 4."""


class Renderings:
    """Keeps what was made of the latest Snapshot until the next one comes; who asks while it is being made waits for it.

    Args:
        latest: Returns the latest Snapshot, None before the first.
    """

    def __init__(self, latest: Callable[[], Snapshot | None]) -> None:
        self._latest = latest
        self._lock = threading.Lock()
        self._text, self._protobuf = exposition.Renderer(), protobuf.Renderer()
        self._snapshot: Snapshot | None = None
        self._pieces: dict[Hashable, tuple[Any, ...]] = {}
        self._made: dict[Hashable, bytes] = {}

    def exposition(self, form: Format, *, compress: bool) -> bytes:
        """Return the exposition in a format; the text formats share one rendering.

        Args:
            form: Which one.
            compress: Whether to gzip it.
        """
        with self._lock:
            return self._once((form, compress), lambda: self._assembled(form, compress=compress))

    def page(self) -> bytes:
        """Return the page for a person."""
        with self._lock:
            return self._once("page", lambda: render_page(self._snapshot).encode("utf-8", "replace"))

    def _once(self, key: Hashable, make: Callable[[], bytes]) -> bytes:
        snapshot = self._latest()
        if snapshot is not self._snapshot:
            self._snapshot, self._pieces, self._made = snapshot, {}, {}
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def _assembled(self, form: Format, *, compress: bool) -> bytes:
        if form is Format.PROTOBUF:
            parts = protobuf.assemble(self._rendered(self._protobuf))
        else:
            parts = exposition.assemble(self._rendered(self._text), form)
        return b"".join(_gzipped(parts) if compress else parts)

    def _rendered(self, renderer: SnapshotRenderer[PieceT]) -> tuple[PieceT, ...]:
        if renderer not in self._pieces:
            self._pieces[renderer] = () if self._snapshot is None else tuple(_with_pauses(renderer.pieces(self._snapshot)))
        return self._pieces[renderer]


def _with_pauses(pieces: Iterator[PieceT]) -> Iterator[PieceT]:
    began = time.perf_counter()
    for piece in pieces:
        yield piece
        if time.perf_counter() - began > _STRETCH_SECONDS:
            time.sleep(_PAUSE_SECONDS)
            began = time.perf_counter()


def _gzipped(parts: Iterator[bytes]) -> Iterator[bytes]:
    """Compress at level 1: a tenth of the time of prometheus_client's level 9 for a tenth more bytes, without the interpreter."""
    packer = zlib.compressobj(1, wbits=zlib.MAX_WBITS + 16)
    for part in parts:
        yield packer.compress(part)
    yield packer.flush()
