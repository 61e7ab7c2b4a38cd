"""The page for a person: valid, self-contained, and safe with any label value."""

from __future__ import annotations

import math
import re
from html.parser import HTMLParser

import pytest

from otel_train.catalog import gradients, loss, parameters, run, throughput, updates
from otel_train.sinks.page import number, render_fragment, render_page
from otel_train.snapshot import Sample, Snapshot

EVIL = "<script>alert('x')</script>\"&amp;' onload=\"alert(1)\n"
_VOID = {"meta", "br", "hr", "img", "input", "link", "wbr", "col"}
_ATTRIBUTES = {
    "html": {"lang"},
    "meta": {"charset", "name", "content", "http-equiv"},
    "a": {"href"},
    "body": {"style"},
    "div": {"class", "style"},
    "i": {"class", "style"},
    "b": {"style"},
    "p": {"class"},
    "td": {"class"},
    "th": {"class"},
}
_CHILDREN = {
    "html": {"head", "body"},
    "head": {"meta", "title", "style"},
    "table": {"thead", "tbody"},
    "thead": {"tr"},
    "tbody": {"tr"},
    "tr": {"td", "th"},
    "dl": {"div"},
}


class _Checker(HTMLParser):
    """Refuses what is not well-formed, and what the page has no use for."""

    def __init__(self) -> None:
        super().__init__(convert_charrefs=True)
        self.stack: list[str] = []
        self.parents: list[tuple[str, str]] = []
        self.seen: list[tuple[str, dict[str, str]]] = []
        self.declarations: list[str] = []
        self.rows: list[list[str]] = []
        self.texts: list[str] = []

    def handle_decl(self, decl: str) -> None:
        self.declarations.append(decl)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        parent = self.stack[-1] if self.stack else ""
        assert tag in _CHILDREN.get(parent, {tag}), f"<{tag}> in <{parent}>"
        names = [name for name, _ in attrs]
        assert len(names) == len(set(names)), f"an attribute of <{tag}> twice"
        assert set(names) <= _ATTRIBUTES.get(tag, set()), f"<{tag}> with {names}"
        self.parents.append((parent, tag))
        self.seen.append((tag, {name: value or "" for name, value in attrs}))
        if tag == "tr":
            self.rows.append([])
        if tag in {"td", "th"}:
            self.rows[-1].append("")
        if tag not in _VOID:
            self.stack.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.stack, f"</{tag}> closes nothing"
        assert self.stack.pop() == tag, f"</{tag}> closes another element"

    def handle_data(self, data: str) -> None:
        self.texts.append(data)
        if self.rows and self.stack[-1] in {"td", "th"}:
            self.rows[-1][-1] += data


def _check(page: str) -> _Checker:
    checker = _Checker()
    checker.feed(page)
    checker.close()
    assert checker.stack == []
    return checker


def _layer(name: str, depth: int, ratio: float, kind: str = "matrix") -> list[Sample]:
    labels = (name, str(depth), kind, "0")
    return [
        Sample(gradients.LAYER_GRAD_NORM, labels, 0.5),
        Sample(parameters.LAYER_PARAM_NORM, labels, 12.5),
        Sample(updates.LAYER_UPDATE_RATIO, labels, ratio),
    ]


def _snapshot(layers: list[Sample], *more: Sample, name: str = "a run") -> Snapshot:
    head = (Sample(run.RUN_ACTIVE, (), 1), Sample(run.STEP, (), 1200), Sample(run.PLANNED_STEPS, (), 5000))
    return Snapshot((("run", name), ("rank", "0")), 1764540000.0, (*head, *more, *layers))


FULL = _snapshot(
    [s for i, ratio in enumerate((1e-3, 5e-3, 0.5, 0.0, math.nan, math.inf)) for s in _layer(f"blocks.{i}", i, ratio)],
    Sample(loss.LOSS, (), math.nan),
    Sample(loss.NONFINITE, ("loss",), 3),
    Sample(run.LEARNING_RATE, ("AdamW", "0"), 1e-3),
    Sample(run.LEARNING_RATE, ("AdamW", "1"), 3e-4),
    Sample(gradients.GRAD_NORM, ("pre_clip",), math.inf),
    Sample(gradients.GRAD_NORM, ("post_clip",), 1.0),
    Sample(throughput.TOKENS_PER_SECOND, (), 12345.6),
)


@pytest.mark.parametrize("snapshot", [None, _snapshot([]), FULL], ids=["none", "no layers", "full"])
def test_the_page_is_well_formed_and_has_one_title(snapshot: Snapshot | None) -> None:
    """Elements close in order, tables and lists hold what they may, and only known attributes occur."""
    checker = _check(render_page(snapshot))
    assert checker.declarations == ["doctype html"]
    tags = [tag for tag, _ in checker.seen]
    assert [tags.count(t) for t in ("html", "head", "title", "body", "h1")] == [1, 1, 1, 1, 1]
    assert ("meta", {"charset": "utf-8"}) in checker.seen


@pytest.mark.parametrize("snapshot", [None, FULL], ids=["none", "full"])
def test_the_pages_style_stands_in_its_head(snapshot: Snapshot | None) -> None:
    """HTML allows a style element there and nowhere else."""
    checker = _check(render_page(snapshot))
    assert [parent for parent, tag in checker.parents if tag == "style"] == ["head"]


def test_there_is_one_row_a_layer_in_registration_order() -> None:
    """Ten comes after nine, and each row tells name, kind, norms and ratio."""
    page = render_page(_snapshot([s for depth in (10, 9, 2, 0) for s in _layer(f"layer{depth}", depth, 1e-3)]))
    head, *rows = _check(page).rows
    assert head[0] == "layer"
    assert [row[0] for row in rows] == ["layer0", "layer2", "layer9", "layer10"]
    assert rows[0][1:5] == ["matrix", "0.5", "12.5", "-3.00"]
    assert {len(row) for row in (head, *rows)} == {6}


def test_values_that_do_not_exist_are_said_and_odd_ones_are_written() -> None:
    """A layer without an update, zero, NaN and infinity all have a row."""
    page = render_page(FULL)
    ratios = [row[4] for row in _check(page).rows[1:]]
    assert ratios == ["-3.00", "-2.30", "-0.30", "-inf", "nan", "inf"]
    alone = _snapshot([Sample(gradients.LAYER_GRAD_NORM, ("x", "0", "matrix", "0"), 2.0)])
    assert _check(render_page(alone)).rows[1][2:5] == ["2", "none", "none"]


def test_bars_stay_within_their_track() -> None:
    """Also for ratios of zero and infinity."""
    widths = [float(w) for w in re.findall(r'<i class="\w+" style="width:([-\d.]+)%">', render_page(FULL))]
    assert len(widths) == 5  # not for NaN
    assert all(0 < width <= 100 for width in widths)


@pytest.mark.parametrize("where", ["run", "layer", "kind"])
def test_label_values_are_escaped(where: str) -> None:
    """A layer may be called anything: it is shown as text and never becomes markup."""
    layer = _layer(EVIL if where == "layer" else "x", 0, 1e-3, EVIL if where == "kind" else "matrix")
    page = render_page(_snapshot(layer, name=EVIL if where == "run" else "a run"))
    checker = _check(page)
    assert "<script" not in page
    assert not any(tag == "script" for tag, _ in checker.seen)
    assert EVIL in "".join(checker.texts)


@pytest.mark.parametrize("snapshot", [None, FULL], ids=["none", "full"])
def test_nothing_is_loaded_from_elsewhere(snapshot: Snapshot | None) -> None:
    """No script, no file beside the page, no other host: it works on a machine without a network."""
    page = render_page(snapshot)
    for tag, attributes in _check(page).seen:
        assert tag not in {"script", "link", "img", "iframe", "object", "embed", "base", "form"}
        assert attributes.get("href", "/").startswith("/")
        assert not attributes.get("href", "/").startswith("//")
    assert not re.search(r"https?:|url\(|@import|javascript:|\bon\w+=", page)


def test_the_facts_are_told() -> None:
    """Step, schedule, loss, rates, norms, speed, trouble."""
    text = " ".join(_check(render_fragment(FULL)).texts)
    for fact in ("1,200 of 5,000", "nan", "0.0003 to 0.001", "inf", "12,346", "non-finite values", "training"):
        assert fact in text


def test_the_end_of_the_run_is_told() -> None:
    """A page that stays open does not go on saying that it trains."""
    ended = Snapshot((("run", "r"), ("rank", "3")), 0.0, (Sample(run.RUN_ACTIVE, (), 0),))
    text = " ".join(_check(render_fragment(ended)).texts)
    assert "rank 3 · ended" in text


def test_the_median_ratio_is_told_over_the_matrices() -> None:
    """Norm layers move at other speeds; NaN has no place in a median."""
    layers = [*_layer("a", 0, 1e-3), *_layer("b", 1, 1e-2), *_layer("c", 2, 1e-4), *_layer("n", 3, 1.0, "norm")]
    for more in ([], _layer("d", 4, math.nan)):
        assert "<dt>median log10 update ratio</dt><dd>-3.00</dd>" in render_page(_snapshot([*layers, *more]))
    assert "median" not in render_page(_snapshot([]))


@pytest.mark.parametrize(
    ("ratio", "kind", "colour"),
    [
        (1e-3, "matrix", "good"),
        (6e-3, "matrix", "fair"),
        (0.5, "matrix", "poor"),
        (1e-3, "embedding", "good"),
        (0.5, "norm", "plain"),
        (0.5, "vector", "plain"),
    ],
)
def test_a_bars_colour_judges_matrices_and_embeddings_alone(ratio: float, kind: str, colour: str) -> None:
    """Gains and biases start at 1 and 0: their ratio has no usual band."""
    page = render_page(_snapshot(_layer("x", 0, ratio, kind)))
    assert re.findall(r'<i class="(\w+)"', page) == [colour]
    assert f".ot .{colour}{{" in page


def test_numbers_have_four_digits() -> None:
    """And what does not exist is said, not shown as 0."""
    assert number(None) == "none"
    assert number(1234.5678) == "1235"
    assert number(math.nan) == "nan"
