"""What the demo says at its end, read off the last Snapshot as a user would read it off the page."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence

from otel_train.catalog import loss, monitor, run, throughput
from otel_train.catalog.updates import USUAL_LOG10
from otel_train.detect.update_ratio import BANDED_KINDS, layer_log10_ratios, median_log10_ratio
from otel_train.snapshot import HistogramValue, Snapshot

_LISTED = 3


def verdict(snapshots: Sequence[Snapshot], validation_loss: float, seconds: float) -> str:
    """Say loss, median update ratio, slowest and fastest layers, and what monitoring cost.

    Args:
        snapshots: Of the run; at least one.
        validation_loss: Mean loss on held-out text.
        seconds: How long the training took.
    """
    snapshot = snapshots[-1]
    steps = snapshot.value(run.STEPS) or 0
    rate = snapshot.value(throughput.TOKENS_PER_SECOND) or math.nan
    lines = [f"{steps:.0f} steps in {seconds:.0f} s, {rate:,.0f} tokens per second."]
    smoothed = snapshot.value(loss.LOSS_SMOOTHED)
    if smoothed is not None:
        lines.append(
            f"Loss {smoothed:.3f} (smoothed), {validation_loss:.3f} on held-out text, {math.log(256):.2f} without learning."
        )
    lines += [*_updates(snapshots), _cost(snapshot)]
    return "\n".join(lines)


def _updates(snapshots: Sequence[Snapshot]) -> list[str]:
    snapshot = snapshots[-1]
    by_step = {shot.value(run.SAMPLED_STEP): median_log10_ratio(shot) for shot in snapshots}
    medians = [median for median in by_step.values() if median is not None]
    if not medians:
        return ["No update was measured."]
    median = statistics.median(medians)
    low, high = USUAL_LOG10
    where = "within" if low <= median <= high else ("below" if median < low else "above")
    logs = {key: log for key, log in layer_log10_ratios(snapshot).items() if key[1] in BANDED_KINDS and not math.isnan(log)}
    ordered = sorted(logs, key=lambda key: logs[key])
    listed = min(_LISTED, len(ordered) // 2)
    end = f"{medians[-1]:.2f} at its end"
    lines = [f"Median log10 update ratio {median:.2f} over the run ({end}): {where} the usual {low:g} to {high:g}."]
    if listed:
        slowest = ", ".join(f"{name} ({logs[name, kind]:.2f})" for name, kind in ordered[:listed])
        fastest = ", ".join(f"{name} ({logs[name, kind]:.2f})" for name, kind in reversed(ordered[-listed:]))
        lines += [f"Slowest layers at the end: {slowest}.", f"Fastest: {fastest}."]
    return lines


def _cost(snapshot: Snapshot) -> str:
    own = sum(s.value for s in snapshot.find(monitor.MONITOR_SECONDS) if isinstance(s.value, (int, float)))
    duration = snapshot.find(throughput.STEP_DURATION)[0].value
    training = duration.total if isinstance(duration, HistogramValue) else 0.0
    every = snapshot.value(monitor.EVERY_N_STEPS) or 0
    share = f"{100 * own / training:.2f} % of the training" if training else "no step to compare with"
    return f"Monitoring took {own:.2f} s, {share}, with everything on every {every:.0f} steps."
