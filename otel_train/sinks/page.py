"""The page for a person: the run at a glance, one row a layer. Rendered on the server, no script, no file beside it."""

from __future__ import annotations

import math
from collections.abc import Iterator
from datetime import datetime, timezone
from html import escape

from otel_train.catalog import gradients, loss, parameters, run, throughput, updates
from otel_train.catalog.updates import USUAL_LOG10
from otel_train.detect.update_ratio import band, log10, median_log10_ratio
from otel_train.snapshot import Snapshot

_REFRESH_SECONDS = 5
_SCALE = (-6.0, -1.0)
"""The log10 update ratios that a bar spans."""

_NONE = "none"
_LINKS = '<p class="ot soft"><a href="/metrics">/metrics</a> · <a href="/-/healthy">/-/healthy</a></p>'
"""Of the page only: in a notebook they would lead to its own server."""

_STYLE = """
:root{color-scheme:light dark;--ink:#1c2330;--soft:#5b6575;--line:#d9dee6;--good:#2e8b57;--fair:#c9860a;--poor:#c0392b}
@media (prefers-color-scheme:dark){:root{--ink:#e6e9ef;--soft:#98a2b3;--line:#343b47;--good:#4cb27d;--fair:#e0a83c;--poor:#e66a5c}}
.ot{font:14px/1.45 system-ui,sans-serif;color:var(--ink);max-width:62rem;margin:0 auto}
.ot h1{font-size:1.25rem;margin:.2rem 0 .8rem}.ot a{color:inherit}.ot small,.soft{color:var(--soft)}
.ot dl{display:flex;flex-wrap:wrap;gap:.6rem 2rem;margin:0 0 1rem}.ot dt{color:var(--soft);font-size:.8rem}
.ot dd{margin:0;font-size:1.05rem;font-variant-numeric:tabular-nums}
.ot table{border-collapse:collapse;width:100%}.ot th{text-align:left;font-weight:600;color:var(--soft);font-size:.8rem}
.ot td,.ot th{padding:.22rem .8rem .22rem 0;border-bottom:1px solid var(--line);vertical-align:middle}
.ot td.n,.ot th.n{text-align:right;font-variant-numeric:tabular-nums;white-space:nowrap}.ot td.bar{width:40%}
.ot .track{position:relative;height:.8rem;background:var(--line);border-radius:2px}
.ot .track i{position:absolute;left:0;top:0;bottom:0;border-radius:2px}
.ot .track b{position:absolute;top:0;bottom:0;background:currentColor;opacity:.14}
.ot .good{background:var(--good)}.ot .fair{background:var(--fair)}.ot .poor{background:var(--poor)}
.ot .plain{background:var(--soft)}
"""


def render_page(snapshot: Snapshot | None) -> str:
    """Return the whole page."""
    title = "otel-train"
    if snapshot is not None:
        title = f"{dict(snapshot.base_labels)['run']} · otel-train"
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><title>{escape(title)}</title>'
        f'<meta name="viewport" content="width=device-width"><meta http-equiv="refresh" content="{_REFRESH_SECONDS}">'
        f"<style>{_STYLE}body{{margin:1.2rem}}</style></head><body>{_content(snapshot)}{_LINKS}</body></html>"
    )


def render_fragment(snapshot: Snapshot | None) -> str:
    """Return what a notebook shows, with its style."""
    return f"<style>{_STYLE}</style>{_content(snapshot)}"


def _content(snapshot: Snapshot | None) -> str:
    if snapshot is None:
        return '<div class="ot"><h1>otel-train</h1><p>No step yet.</p></div>'
    base = dict(snapshot.base_labels)
    state = "training" if snapshot.value(run.RUN_ACTIVE) else "ended"
    return (
        '<div class="ot">'
        f"<h1>{escape(base['run'])} <small>rank {escape(base['rank'])} · {state}</small></h1>"
        f"<dl>{''.join(_facts(snapshot))}</dl>{_layer_table(snapshot)}"
        f'<p class="soft">{datetime.fromtimestamp(snapshot.taken_at, timezone.utc):%Y-%m-%d %H:%M:%S} UTC</p></div>'
    )


def _facts(snapshot: Snapshot) -> Iterator[str]:
    step, planned = snapshot.value(run.STEP), snapshot.value(run.PLANNED_STEPS)
    yield _fact("step", f"{step or 0:,.0f}" + (f" of {planned:,.0f}" if planned else ""))
    yield _fact("loss", number(snapshot.value(loss.LOSS)))
    rates = sorted({float(s.value) for s in snapshot.find(run.LEARNING_RATE) if isinstance(s.value, (int, float))})
    ends = [rates[0], rates[-1]] if len(rates) > 1 else rates
    yield _fact("learning rate", " to ".join(map(number, ends)) or _NONE)
    for stage, words in (("pre_clip", "gradient norm before clipping"), ("post_clip", "gradient norm")):
        value = snapshot.value(gradients.GRAD_NORM, stage=stage)
        if value is not None:
            yield _fact(words, number(value))
    median = median_log10_ratio(snapshot)
    if median is not None:
        yield _fact("median log10 update ratio", f"{median:.2f}")
    tokens = snapshot.value(throughput.TOKENS_PER_SECOND)
    if tokens is not None:
        yield _fact("tokens per second", f"{tokens:,.0f}")
    nonfinite = sum(float(s.value) for s in snapshot.find(loss.NONFINITE) if isinstance(s.value, (int, float)))
    if nonfinite:
        yield _fact("non-finite values", f"{nonfinite:,.0f}")


def _fact(name: str, value: str) -> str:
    return f"<div><dt>{escape(name)}</dt><dd>{escape(value)}</dd></div>"


def _layer_table(snapshot: Snapshot) -> str:
    rows = "".join(_layer_rows(snapshot))
    if not rows:
        return '<p class="soft">No layer has been sampled yet.</p>'
    low, high = USUAL_LOG10
    return (
        '<table><thead><tr><th>layer</th><th>kind</th><th class="n">gradient norm</th><th class="n">weight norm</th>'
        f'<th class="n">log10 |Δw|/|w|</th><th>{_SCALE[0]:g} to {_SCALE[1]:g}, usual {low:g} to {high:g}</th></tr></thead>'
        f"<tbody>{rows}</tbody></table>"
    )


def _layer_rows(snapshot: Snapshot) -> Iterator[str]:
    by_labels: dict[tuple[str, ...], dict[str, float]] = {}
    for spec in (gradients.LAYER_GRAD_NORM, parameters.LAYER_PARAM_NORM, updates.LAYER_UPDATE_RATIO):
        for sample in snapshot.find(spec):
            if isinstance(sample.value, (int, float)):
                by_labels.setdefault(sample.labels, {})[spec.name] = sample.value
    for (layer, _, kind, _), values in sorted(by_labels.items(), key=lambda item: int(item[0][1])):
        grad = number(values.get(gradients.LAYER_GRAD_NORM.name))
        weight = number(values.get(parameters.LAYER_PARAM_NORM.name))
        log = log10(values.get(updates.LAYER_UPDATE_RATIO.name))
        yield (
            f'<tr><td>{escape(layer)}</td><td class="soft">{escape(kind)}</td><td class="n">{grad}</td><td class="n">{weight}</td>'
            f'<td class="n">{_NONE if log is None else f"{log:.2f}"}</td><td class="bar">{_bar(log, kind)}</td></tr>'
        )


def _bar(log: float | None, kind: str) -> str:
    if log is None or math.isnan(log):
        return ""
    low, high = (_percent(value) for value in USUAL_LOG10)
    return (
        f'<div class="track"><b style="left:{low:.1f}%;width:{high - low:.1f}%"></b>'
        f'<i class="{band(log, kind)}" style="width:{_percent(log):.1f}%"></i></div>'
    )


def _percent(log: float) -> float:
    low, high = _SCALE
    return 100 * min(max((log - low) / (high - low), 0.01), 1.0)


def number(value: float | None) -> str:
    """Write a number for a person: four digits."""
    return _NONE if value is None else f"{value:.4g}"
