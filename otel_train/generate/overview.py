"""The dashboard "Training / Run overview": is this run healthy?"""

from __future__ import annotations

import math

from otel_train.catalog import LAYER_LABELS, MetricSpec, gradients, loss, monitor, parameters, run, throughput, updates
from otel_train.catalog.updates import TOLERATED_LOG10, USUAL_LOG10
from otel_train.generate.dashboard import FIRING, render_dashboard
from otel_train.generate.libraries import common, common_models, stat, table, timeseries
from otel_train.generate.panels import (
    INTERVAL,
    RUN,
    Steps,
    banded,
    coloured,
    legend,
    lines,
    listing,
    logarithmic,
    number,
    organised,
    query,
    rows,
)
from otel_train.generate.promql import increase, median, merged, rate, series
from otel_train.generate.recording import NEAR_PEAK, STALLED_RATIO

UID = "otel-train-overview"
_WEIGHTS = ("kind=~", "matrix|embedding")
_BLOCK = "(.+?[.][0-9]+)([.].+)?"
"""Layer names up to their first number: blocks.3.attn.qkv is of the block blocks.3; what has none stands for itself."""
_BAND: Steps = (
    (None, "red"),
    (TOLERATED_LOG10[0], "yellow"),
    (USUAL_LOG10[0], "green"),
    (USUAL_LOG10[1], "yellow"),
    (TOLERATED_LOG10[1], "red"),
)
_STEP_SECONDS = "{} / {}".format(
    *(merged("sum", rate(throughput.STEP_DURATION, INTERVAL, *RUN, part=part)) for part in ("sum", "count"))
)


def render_overview() -> str:
    """Return the dashboard as JSON."""
    return render_dashboard(
        UID,
        "Training / Run overview",
        "Is this run healthy?",
        {"Now": _now(), "Learning": _learning(), "Layers": _layers(), "Events and machine": _events()},
    )


def _now() -> tuple[stat.Panel, ...]:
    left = f"({_latest(run.PLANNED_STEPS)} - {_latest(run.STEP)}) * {_STEP_SECONDS}"
    return (
        number(
            "Firing alerts",
            "Alerts of this run that fire now; each links to its runbook in Alertmanager.",
            f"count({FIRING}) or vector(0)",
            "short",
            steps=((None, "green"), (1, "red")),
        ),
        number("Loss", loss.LOSS_SMOOTHED.brief, _latest(loss.LOSS_SMOOTHED), "short", decimals=3),
        number(
            "Median update ratio (log10)",
            "Of the weight matrices, as it would be at the peak of the schedule: -3 is usual; outside of "
            f"{TOLERATED_LOG10[0]:g} to {TOLERATED_LOG10[1]:g} the learning rate deserves a look.",
            median(
                f"log10({_layers_ratio('matrix')} > 0) - on (job, run, param_group) group_left () "
                f"log10({merged('max', series(run.LEARNING_RATE_SCHEDULE_RATIO, *RUN), 'param_group')} >= {NEAR_PEAK:g})"
            ),
            "short",
            decimals=2,
            steps=_BAND,
        ),
        number(
            "Tokens per second",
            throughput.TOKENS.brief,
            merged("sum", rate(throughput.TOKENS, INTERVAL, *RUN)),
            "short",
            decimals=1,
        ),
        number("MFU", throughput.MFU.brief, merged("avg", series(throughput.MFU, *RUN)), "percentunit", decimals=1),
        number("Time left", "Planned steps that are left, at the present duration of a step.", left, "s"),
    )


def _learning() -> tuple[timeseries.Panel, ...]:
    norms = merged("max", series(gradients.GRAD_NORM, *RUN), "stage")
    return (
        _update_ratio_by_block(),
        lines(
            "Loss",
            f"{loss.LOSS.brief} {loss.LOSS_SMOOTHED.brief}",
            "short",
            query(_latest(loss.LOSS), "loss"),
            query(_latest(loss.LOSS_SMOOTHED), "smoothed"),
        ),
        logarithmic(lines("Gradient norm", f"{gradients.GRAD_NORM.brief}", "short", query(norms, "{{stage}}"))),
        lines(
            "Learning rate",
            run.LEARNING_RATE.brief,
            "sci",
            query(merged("max", series(run.LEARNING_RATE, *RUN), "optimizer", "param_group"), "{{optimizer}} {{param_group}}"),
        ).decimals(2),
        banded(
            lines(
                "Update ratio over layers (log10)",
                "How far the weight matrices spread: a low p10 names slow layers, a high p90 fast ones.",
                "short",
                *(query(_quantile(share), name) for share, name in ((0.9, "p90"), (0.5, "median"), (0.1, "p10"))),
            ),
            _BAND,
        ).decimals(1),
    )


def _update_ratio_by_block() -> timeseries.Panel:
    panel = lines(
        "Update ratio by block (log10)",
        f"RMS of the real change of a block's weights in one step, over their RMS. Green, {USUAL_LOG10[0]:g} to "
        f"{USUAL_LOG10[1]:g}, is where healthy training usually is; it falls with the learning rate. What stands still is drawn at "
        f"{math.log10(STALLED_RATIO):g}.",
        "short",
        query(f"log10(clamp_min({_by_block()}, {STALLED_RATIO:g}))", "{{block}}"),
        width=24,
    )
    listed = legend(common_models.LegendPlacement.RIGHT, "lastNotNull", "min", "max")
    return banded(panel, _BAND).legend(listed).axis_soft_min(-5).axis_soft_max(-1).decimals(2).height(11)


def _by_block() -> str:
    """Return the update ratio of each block: sums of squares add up, ratios do not."""
    ratio, norm = (series(spec, *RUN, _WEIGHTS) for spec in (updates.LAYER_UPDATE_RATIO, parameters.LAYER_PARAM_NORM))
    change, weight = (_sum_by_block(squares) for squares in (f"({ratio} * {norm}) ^ 2", f"{norm} ^ 2 and {ratio}"))
    return f"sqrt({change} / {weight})"


def _sum_by_block(vector: str) -> str:
    named = f'label_replace({vector}, "block", "$1", "layer", "(.+)")'
    blocks = f'label_replace({named}, "block", "$1", "layer", "{_BLOCK}")'
    return f"sum by (job, run, block) ({blocks})"


def _layers() -> tuple[table.Panel]:
    ratios = _layers_ratio("matrix|embedding")
    grad_norms = merged("max", series(gradients.LAYER_GRAD_NORM, *RUN, _WEIGHTS), *LAYER_LABELS)
    speeds = merged("max", series(updates.LAYER_RELATIVE_SPEED, *RUN, _WEIGHTS), *LAYER_LABELS)
    columns = {
        "layer": "layer",
        "depth": "depth",
        "kind": "kind",
        "param_group": "parameter group",
        "Value #A": "update ratio (log10)",
        "Value #B": "relative speed",
        "Value #C": "gradient norm",
    }
    panel = listing(
        "Layers, slowest first",
        f"{updates.LAYER_UPDATE_RATIO.brief} {updates.LAYER_RELATIVE_SPEED.brief} {gradients.LAYER_GRAD_NORM.brief} "
        f"An update ratio of 0 is shown as {math.log10(STALLED_RATIO):g}; the parameter group `none` is of no optimizer.",
        rows(f"log10(clamp_min({ratios}, {STALLED_RATIO:g}))"),
        rows(speeds),
        rows(grad_norms),
        width=24,
    )
    panel.sort_by([common.TableSortByFieldState().display_name(columns["Value #A"]).desc(False)])
    organised(panel, columns, ("Time", "job", "run"))
    coloured(panel, "update ratio (log10)", _BAND, 2)
    coloured(panel, "relative speed", ((None, "text"),), 2)
    coloured(panel, "gradient norm", ((None, "text"),), 4)
    return (panel.height(10),)


def _events() -> tuple[timeseries.Panel, ...]:
    steps = merged("sum", increase(run.STEPS, INTERVAL, *RUN))
    own, training = monitor.MONITOR_SECONDS, throughput.STEP_DURATION
    return (
        lines(
            "NaN, Inf, spikes, skipped steps",
            "Counted over the last few scrapes, so that none is lost between two; one event shows on several points.",
            "short",
            query(merged("sum", increase(loss.NONFINITE, INTERVAL, *RUN), "source"), "non-finite, {{source}}"),
            query(merged("max", increase(loss.LOSS_SPIKES, INTERVAL, *RUN)), "loss spikes"),
            query(merged("max", increase(gradients.GRAD_NORM_SPIKES, INTERVAL, *RUN)), "gradient norm spikes"),
            query(merged("max", increase(run.SKIPPED_STEPS, INTERVAL, *RUN)), "skipped steps"),
        )
        .min(0)
        .axis_soft_max(1),
        lines(
            "Clipped steps",
            "Share of the steps whose gradient was clipped; above a half, clipping sets the learning rate.",
            "percentunit",
            query(f"{merged('sum', increase(gradients.CLIPPED_STEPS, INTERVAL, *RUN))} / {steps}", "clipped"),
        )
        .min(0)
        .max(1),
        lines(
            "Step duration",
            throughput.STEP_DURATION.brief,
            "s",
            *(
                query(f"histogram_quantile({share}, {merged('sum', rate(training, INTERVAL, *RUN, part='bucket'), 'le')})", name)
                for share, name in ((0.99, "p99"), (0.5, "median"))
            ),
            query(_STEP_SECONDS, "mean"),
        ).min(0),
        lines(
            "Share of the time that is not training",
            f"{throughput.DATA_WAIT_SECONDS.brief} {own.brief}",
            "percentunit",
            query(_share(rate(throughput.DATA_WAIT_SECONDS, INTERVAL, *RUN)), "waiting for data"),
            query(_share(rate(own, INTERVAL, *RUN)), "monitoring"),
        ).min(0),
    )


def _share(seconds: str) -> str:
    return f"{merged('sum', seconds)} / {merged('sum', rate(throughput.STEP_DURATION, INTERVAL, *RUN, part='sum'))}"


def _layers_ratio(kinds: str) -> str:
    return merged("max", series(updates.LAYER_UPDATE_RATIO, *RUN, ("kind=~", kinds)), *LAYER_LABELS)


def _quantile(share: float) -> str:
    return f"quantile by (job, run) ({share:g}, log10({_layers_ratio('matrix')} > 0))"


def _latest(spec: MetricSpec) -> str:
    return merged("max", series(spec, *RUN))
