"""What update ratios say: their logarithm, the band they are in, the median layer."""

from __future__ import annotations

import math
import statistics

from otel_train.catalog import updates
from otel_train.catalog.updates import TOLERATED_LOG10, USUAL_LOG10
from otel_train.snapshot import Snapshot

BANDED_KINDS = ("matrix", "embedding")
"""Kinds of layers whose update ratio is judged by the usual band."""


def log10(ratio: float | None) -> float | None:
    """Return the logarithm of a ratio; -inf for 0, NaN for NaN, None for None."""
    if ratio is None:
        return None
    if ratio > 0:
        return math.log10(ratio)
    return -math.inf if ratio == 0 else math.nan


def band(log: float, kind: str) -> str:
    """Return ``good`` for a usual log10 update ratio, ``fair`` within a decade of 1e-3, else ``poor``.

    The band is one of weight matrices and embeddings; gains and biases, which start at 1 and 0, have none: ``plain``.
    """
    if kind not in BANDED_KINDS:
        return "plain"
    if USUAL_LOG10[0] <= log <= USUAL_LOG10[1]:
        return "good"
    return "fair" if TOLERATED_LOG10[0] <= log <= TOLERATED_LOG10[1] else "poor"


def layer_log10_ratios(snapshot: Snapshot) -> dict[tuple[str, str], float]:
    """Return (layer, kind) to log10 update ratio, in the order of depth."""
    logs: dict[tuple[str, str], float] = {}
    for sample in snapshot.find(updates.LAYER_UPDATE_RATIO):
        log = log10(sample.value) if isinstance(sample.value, (int, float)) else None
        if log is not None:
            logs[sample.labels[0], sample.labels[2]] = log
    return logs


def median_log10_ratio(snapshot: Snapshot) -> float | None:
    """Return the median of the matrices' log10 update ratios, of all layers where there is no matrix; None where there is none."""
    logs = {key: log for key, log in layer_log10_ratios(snapshot).items() if not math.isnan(log)}
    matrices = [log for (_, kind), log in logs.items() if kind == "matrix"]
    chosen = matrices or list(logs.values())
    return statistics.median(chosen) if chosen else None
