"""What is made of a Snapshot: once, shared between formats, and with room for other threads."""

from __future__ import annotations

import gzip
import sys
import threading
import time
from collections.abc import Iterator

import pytest

from otel_train.sinks import page, protobuf, renderings
from otel_train.sinks.exposition import Piece, Renderer
from otel_train.sinks.negotiation import Format
from otel_train.sinks.renderings import Renderings
from otel_train.snapshot import Snapshot
from tests.sinks.test_exposition import many_series
from tests.sinks.test_prometheus import awkward_snapshot


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Note what is rendered."""
    noted: list[str] = []
    pieces = Renderer.pieces

    def noted_pieces(renderer: Renderer, snapshot: Snapshot) -> Iterator[Piece]:
        noted.append("pieces")
        return pieces(renderer, snapshot)

    def noted_page(snapshot: Snapshot | None) -> str:
        noted.append("page")
        return page.render_page(snapshot)

    protobuf_pieces = protobuf.Renderer.pieces

    def noted_protobuf(renderer: protobuf.Renderer, snapshot: Snapshot) -> Iterator[protobuf.Piece]:
        noted.append("protobuf")
        return protobuf_pieces(renderer, snapshot)

    monkeypatch.setattr(Renderer, "pieces", noted_pieces)
    monkeypatch.setattr(protobuf.Renderer, "pieces", noted_protobuf)
    monkeypatch.setattr(renderings, "render_page", noted_page)
    return noted


def _everything(made: Renderings) -> list[bytes]:
    bodies = [made.exposition(form, compress=compress) for form in Format for compress in (False, True)]
    return [*bodies, made.page()]


def test_text_formats_share_one_rendering(calls: list[str]) -> None:
    """Text, OpenMetrics, both compressed, and again: the lines are written once, and so are the messages and the page."""
    snapshot = awkward_snapshot()
    made = Renderings(lambda: snapshot)
    first = _everything(made)
    assert all(again is body for again, body in zip(_everything(made), first, strict=True))
    assert calls == ["pieces", "protobuf", "page"]
    assert gzip.decompress(first[1]) == first[0]
    assert gzip.decompress(first[3]) == first[2]
    assert first[2].endswith(b"# EOF\n")
    assert gzip.decompress(first[5]) == first[4]


def test_each_snapshot_is_rendered_anew(calls: list[str]) -> None:
    """Also one that equals the last; and nothing of the last is kept."""
    snapshots = [awkward_snapshot(), awkward_snapshot()]
    made = Renderings(lambda: snapshots[0])
    first = _everything(made)
    snapshots.pop(0)
    assert _everything(made) == first
    assert calls == ["pieces", "protobuf", "page"] * 2
    assert len(made._made) == 7
    assert len(made._pieces) == 2


def test_a_failed_rendering_is_tried_again(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is kept of it, and nobody waits for it for ever."""
    snapshot = awkward_snapshot()
    made = Renderings(lambda: snapshot)

    def broken(renderer: Renderer, snapshot: Snapshot) -> Iterator[Piece]:
        raise ValueError(renderer, snapshot)

    with monkeypatch.context() as patch:
        patch.setattr(Renderer, "pieces", broken)
        for _ in range(2):
            with pytest.raises(ValueError, match="Renderer"):
                made.exposition(Format.TEXT, compress=False)
    assert made.exposition(Format.TEXT, compress=False).startswith(b"# HELP otel_train_run_info")


@pytest.fixture
def no_switching() -> Iterator[None]:
    """Let Python take the interpreter from no thread that does not give it."""
    interval = sys.getswitchinterval()
    sys.setswitchinterval(60)
    yield
    sys.setswitchinterval(interval)


@pytest.mark.usefixtures("no_switching")
@pytest.mark.parametrize("form", [Format.TEXT, Format.PROTOBUF])
def test_other_threads_run_while_many_series_are_rendered(form: Format) -> None:
    """A training asks for the interpreter at every operator."""
    snapshot = many_series(50_000)
    made = Renderings(lambda: snapshot)
    turns: list[float] = []
    done = threading.Event()

    def work() -> None:
        while not done.is_set():
            turns.append(time.perf_counter())
            time.sleep(0.0002)

    thread = threading.Thread(target=work)
    thread.start()
    began = time.perf_counter()
    made.exposition(form, compress=False)
    ended = time.perf_counter()
    done.set()
    thread.join(10)
    assert sum(began < turn < ended for turn in turns) >= 20
