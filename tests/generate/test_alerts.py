"""The alerts, run by promtool 3.5 and 2.42 on series written here: each fires, and each is silent on what looks alike.

Series have a point a minute, for two hours unless they end before; the rules are evaluated every 15 s.
"""

from __future__ import annotations

import subprocess
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_train import assets
from otel_train.generate.alerts import Alert, alerts
from otel_train.generate.time_base import STANDARD
from tests.generate.queries import labels_of
from tests.servers import REPOSITORY, VERSIONS, Version, find_program

pytestmark = pytest.mark.servers

RULES = REPOSITORY / "deploy/prometheus/rules/otel-train.yaml"
MINUTES = 120
Series = dict[str, str]
"""A series as promtool reads it: its name with labels, and its values."""


def series(name: str, values: str, **labels: str) -> Series:
    """Return a series of a run's rank; values as promtool writes them, ``{n}`` for all minutes that are left."""
    known = labels_of(name)
    assert known is not None, f"{name} does not exist"
    assert not {*labels} - known - {"job", "instance", "node"}, f"{name} has no such label: {labels}"
    labels = {"job": "otel-train", "instance": "a:9464", **({} if name in {"up", "scrape_duration_seconds"} else RUN), **labels}
    written = ", ".join(f'{label}="{value}"' for label, value in labels.items())
    return {"series": f"{name}{{{written}}}", "values": values.replace("{n}", str(MINUTES))}


RUN = {"run": "r", "rank": "0"}


def training(*, active: str = "1x{n}", sampled: str = "0+10x{n}", every: str = "10x{n}", **labels: str) -> list[Series]:
    """Return what every training exports: by default 10 steps, and one sample, a minute, at 6 s a step."""
    return [
        series("otel_train_run_active", active, **labels),
        series("otel_train_sampled_step", sampled, **labels),
        series("otel_train_every_n_steps", every, **labels),
        series("otel_train_phase", "1x{n}", phase="train", **labels),
        series("otel_train_last_step_timestamp_seconds", "0+60x{n}", **labels),
        series("otel_train_step_duration_seconds_sum", "0+60x{n}", **labels),
        series("otel_train_step_duration_seconds_count", "0+10x{n}", **labels),
        series("otel_train_nonfinite_total", "0x{n}", source="loss", **labels),
    ]


def schedule(ratio: str = "1x{n}", group: str = "decay", **labels: str) -> Series:
    """Return the learning rate over its peak, of one group."""
    return series("otel_train_learning_rate_schedule_ratio", ratio, optimizer="AdamW", param_group=group, **labels)


def layer(name: str, ratio: str, kind: str = "matrix", group: str = "decay", **labels: str) -> Series:
    """Return the update ratio of a layer."""
    return series("otel_train_layer_update_ratio", ratio, layer=name, depth="1", kind=kind, param_group=group, **labels)


def layers(ratio: str, count: int = 4, **labels: str) -> list[Series]:
    """Return so many layers of one update ratio."""
    return [layer(f"h{index}", ratio, **labels) for index in range(count)]


def covered(
    monitored: str, trainable: str = "1000x{n}", *, silent: str = "0x{n}", activations: str = "10x{n}", **labels: str
) -> list[Series]:
    """Return what the monitor sees of the model: elements with a gradient, of all; modules without an activation, and how often."""
    return [
        series("otel_train_part_every_n_steps", activations, part="activations", **labels),
        series("otel_train_monitored_parameters", monitored, **labels),
        series("otel_train_trainable_parameters", trainable, **labels),
        series("otel_train_silent_activation_modules", silent, **labels),
    ]


def scraped(up: str, seconds: str) -> list[Series]:
    """Return what Prometheus notes about scrapes."""
    return [series("up", up), series("scrape_duration_seconds", seconds)]


def promtool(version: Version, folder: Path, test: dict[str, Any], rules: Path = RULES) -> str:
    """Run one unit test of rules and return what promtool said; empty where all is as expected."""
    file = folder / "test.yaml"
    file.write_text(
        yaml.safe_dump({"rule_files": [str(rules)], "evaluation_interval": "15s", "tests": [{"interval": "1m", **test}]})
    )
    done = subprocess.run(
        [find_program(version, "promtool"), "test", "rules", str(file)], capture_output=True, text=True, check=False
    )
    assert (done.returncode == 0) == ("SUCCESS" in done.stdout + done.stderr)
    return "" if done.returncode == 0 else done.stdout + done.stderr


def firing(
    version: Version, folder: Path, given: Sequence[Series], expected: dict[float, dict[str, int]], rules: Path = RULES
) -> str:
    """Compare the number of alerts of each name that fire, by minute."""
    queries = [
        {
            "expr": 'count by (alertname) (ALERTS{alertstate="firing"})',
            "eval_time": f"{round(minute * 60)}s",
            "exp_samples": [{"labels": f'{{alertname="{name}"}}', "value": count} for name, count in sorted(names.items())],
        }
        for minute, names in expected.items()
    ]
    return promtool(version, folder, {"input_series": list(given), "promql_expr_test": queries}, rules)


STALLED, LOW, HIGH = "OtelTrainLayerStalled", "OtelTrainUpdateRatioLow", "OtelTrainUpdateRatioHigh"
COVERAGE, DIVERGED = "OtelTrainCoverageLow", "OtelTrainReplicasDiverged"
NAN, STEPS, ABSENT = "OtelTrainLossNonFinite", "OtelTrainStepsStalled", "OtelTrainExporterAbsent"


def replicas(divergence: str, **labels: str) -> Series:
    """Return by how much replicas differ."""
    return series("otel_train_replica_divergence_ratio", divergence, **labels)


USUAL = [*training(), schedule(), *layers("1e-3x{n}"), *covered("1000x{n}"), replicas("0x{n}")]
"""A training with which nothing is wrong."""
FORGOTTEN = [*USUAL, layer("fc", "0x{n}", group="none")]
GONE = "1x10 stale"
"""Ten minutes, then nothing: what a scrape that fails leaves."""


FIRES: dict[str, tuple[list[Series], float, dict[str, int]]] = {
    # what, series, minute, alerts
    "a layer of no optimizer": (FORGOTTEN, 20, {STALLED: 1}),
    "a layer whose group has a learning rate": ([*USUAL, layer("fc", "1e-9x{n}")], 20, {STALLED: 1}),
    "replicas that differ from some step on": ([*USUAL[:-1], replicas("0x10 1e-4x{n}")], 20, {DIVERGED: 1}),
    "replicas of which one is not finite": ([*USUAL[:-1], replicas(" ".join(["Inf"] * MINUTES))], 10, {DIVERGED: 1}),
    "an embedding": ([*USUAL, layer("tokens", "0x{n}", kind="embedding")], 20, {STALLED: 1}),
    "nothing that moves at all, at a learning rate that always was 0": ([*training(), *layers("0x{n}")], 20, {LOW: 1}),
    "a layer that stalls later": ([*USUAL, layer("fc", "1e-3x30 0x{n}", group="none")], 50, {STALLED: 1}),
    "a layer at one sample in 6 minutes, once 50 steps have passed": (
        [*training(sampled="0x5 10x5 20x5 30x5 40x5 50x5 60x5 70x{n}"), schedule(), *layers("1e-3x{n}"), layer("fc", "0x{n}")], 45, {STALLED: 1},
    ),
    "a layer that stalls while samples come less often by and by": (
        [*training(sampled="0+10x4 200+160x{n}", every="10x4 160x{n}"), schedule(), *layers("1e-3x{n}"), layer("fc", "0x{n}")], 20, {STALLED: 1},
    ),
    "two ranks that export the same layer, once": (
        [*FORGOTTEN, *training(rank="1", instance="b:1"), layer("fc", "0x{n}", group="none", rank="1", instance="b:1")], 20, {STALLED: 1},
    ),
    "ranks whose labels differ": (
        [*(s for rank in "01" for s in [*training(rank=rank, node=f"n{rank}"), schedule(rank=rank, node=f"n{rank}"), *layers("1e-3x{n}", rank=rank, node=f"n{rank}"), layer("fc", "0x{n}", rank=rank, node=f"n{rank}")])], 20, {STALLED: 1},
    ),
    "most of the layers stalled, which says nothing about the learning rate": (
        [*USUAL, *(layer(f"s{index}", "0x{n}", group="none") for index in range(5))], 20, {STALLED: 5},
    ),
    "embeddings alone, which do not move": ([*training(), *(layer(f"e{i}", "0x{n}", kind="embedding") for i in range(2))], 20, {LOW: 1}),
    "the only matrix, of no optimizer, beside an embedding that moves": (
        [*training(), schedule(), layer("tokens", "1e-3x{n}", kind="embedding"), layer("fc", "0x{n}", group="none")], 20, {STALLED: 1},
    ),
    "a median that is low": ([*training(), schedule(), *layers("3e-5x{n}")], 20, {LOW: 1}),
    "a median that is low late in the schedule": ([*training(), schedule("0.15x{n}"), *layers("3e-6x{n}")], 20, {LOW: 1}),
    "a median that is high": ([*training(), schedule(), *layers("3e-2x{n}")], 20, {HIGH: 1}),
    "a median that will be high at the peak of the warmup": ([*training(), schedule("0.2x{n}"), *layers("5e-3x{n}")], 20, {HIGH: 1}),
    "a NaN loss": ([*USUAL[:-6], series("otel_train_nonfinite_total", "0x20 1x{n}", source="loss"), *USUAL[-5:]], 22, {NAN: 1}),
    "a NaN loss that the first scrape finds": (
        [series("otel_train_nonfinite_total", "_x30 7x{n}", source="loss"), series("otel_train_step_duration_seconds_sum", "_x30 8x{n}")], 31, {NAN: 1},
    ),
    "a NaN loss for half an hour after it": ([series("otel_train_nonfinite_total", "0x20 1x{n}", source="loss")], 54, {NAN: 1}),
    "no step for more than ten minutes": (
        [series("otel_train_last_step_timestamp_seconds", "0+60x10 600x{n}"), *(s for s in USUAL if "timestamp" not in s["series"])], 21, {STEPS: 1},
    ),
    "no step for more than ten minutes, hours later": (
        [series("otel_train_last_step_timestamp_seconds", "0+60x10 600x{n}"), *(s for s in USUAL if "timestamp" not in s["series"])], 119, {STEPS: 1},
    ),
    "an evaluation of more than an hour": (
        [series("otel_train_phase", "_x10 1x{n}", phase="eval"), series("otel_train_phase", "1x10 _x{n}", phase="train"),
         series("otel_train_last_step_timestamp_seconds", "0+60x10 600x{n}"), *(s for s in USUAL if "timestamp" not in s["series"] and "phase" not in s["series"])], 72, {STEPS: 1},
    ),
    "a process that is stopped: its endpoint times out": (
        [*(s | {"values": s["values"].replace("x120", "x10 stale")} for s in USUAL), *scraped("1x10 0x{n}", "0.01x10 10x{n}")], 22, {STEPS: 1, ABSENT: 1},
    ),
    "a process that is killed": (
        [*(s | {"values": s["values"].replace("x120", "x10 stale")} for s in USUAL), *scraped("1x10 0x{n}", "0.01x10 0.001x{n}")], 30, {ABSENT: 1},
    ),
    "each rank that is gone": ([series("otel_train_run_active", GONE, rank=rank, instance=f"n{rank}:9464") for rank in "012"], 17, {ABSENT: 3}),
    "a rank that moved and is gone, where it was last": (
        [series("otel_train_run_active", GONE), series("otel_train_run_active", "_x12 1x20 stale", instance="b:9464")], 40, {ABSENT: 1},
    ),
    "a rank that is gone while another instance has the same rank of another run": (
        [series("otel_train_run_active", GONE), series("otel_train_run_active", "1x{n}", run="other", instance="b:9464")], 17, {ABSENT: 1},
    ),
    "no step since the first, which has no duration": (
        [series("otel_train_run_active", "1x{n}"), series("otel_train_last_step_timestamp_seconds", "60x{n}"),
         series("otel_train_step_duration_seconds_sum", "0x{n}"), series("otel_train_step_duration_seconds_count", "0x{n}")], 12, {STEPS: 1},
    ),
    "no first step within an hour": ([series("otel_train_run_active", "1x{n}")], 62, {STEPS: 1}),
    "an evaluation in which the endpoint hangs too: absent at once, stalled not before an hour": (
        [series("otel_train_phase", "1x10 stale", phase="eval"), series("otel_train_run_active", "1x10 stale"),
         series("otel_train_last_step_timestamp_seconds", "0+60x10 stale"), series("otel_train_step_duration_seconds_sum", "0+60x10 stale"), series("otel_train_step_duration_seconds_count", "0+10x10 stale"), *scraped("1x10 0x{n}", "0.01x10 10x{n}")], 40, {ABSENT: 1},
    ),
    "an evaluation in which the endpoint hangs too, after an hour": (
        [series("otel_train_phase", "1x10 stale", phase="eval"), series("otel_train_run_active", "1x10 stale"),
         series("otel_train_last_step_timestamp_seconds", "0+60x10 stale"), series("otel_train_step_duration_seconds_sum", "0+60x10 stale"), series("otel_train_step_duration_seconds_count", "0+10x10 stale"), *scraped("1x10 0x{n}", "0.01x10 10x{n}")], 72, {STEPS: 1, ABSENT: 1},
    ),
    "a layer that still stalls after the steps went back": (
        [*training(sampled="5000+10x30 1000+10x{n}"), schedule(), *layers("1e-3x{n}"), layer("fc", "0x{n}", group="none")], 45, {STALLED: 1},
    ),
    "a killed run, and not as stalled when the next one at its address answers slowly once": (
        [series("otel_train_run_active", "_x14 1x30 stale 1x{n}", run="b"), series("otel_train_last_step_timestamp_seconds", "_x14 840+60x30 stale 2760+60x{n}", run="b"),
         series("otel_train_run_active", "1x3 stale"), series("otel_train_last_step_timestamp_seconds", "0+60x3 stale"),
         *scraped("1x3 0x10 1x31 0 1x{n}", "0.01x3 0.001x10 0.01x31 10 0.01x{n}")], 45, {ABSENT: 1},
    ),
    "a block without a gradient": ([*training(), *covered("970x{n}")], 20, {COVERAGE: 1}),
    "no gradient anywhere": ([*training(), *covered("0x{n}")], 20, {COVERAGE: 1}),
    "a module whose hook never fired": ([*training(), *covered("1000x{n}", silent="1x{n}")], 20, {COVERAGE: 1}),
    "a module whose hook never fired, at one sample of activations in 200 steps": (
        [*training(), *covered("1000x{n}", silent="1x{n}", activations="200x{n}")], 70, {COVERAGE: 1},
    ),
    "both at once, each for itself": ([*training(), *covered("0x{n}", silent="3x{n}")], 20, {COVERAGE: 2}),
    "a part that loses its gradient later": ([*training(), *covered("1000x30 900x{n}")], 50, {COVERAGE: 1}),
    "a part without a gradient at one sample in a thousand steps, once there were three more": (
        [*training(sampled="1000x10 2000x10 3000x10 4000x{n}", every="1000x{n}"), *covered("900x{n}")], 45, {COVERAGE: 1},
    ),
    "a stage without a gradient, in a model whose ranks each have another part": (
        [*training(rank="1", instance="b:1"), *covered("3000x{n}", "3000x{n}"), *covered("0x{n}", rank="1", instance="b:1")], 20, {COVERAGE: 1},
    ),
    "ranks of a blind spot whose labels differ, once": (
        [*(s for rank in "01" for s in [*training(rank=rank, node=f"n{rank}"), *covered("500x{n}", rank=rank, node=f"n{rank}")])], 20, {COVERAGE: 1},
    ),
    "the run with a blind spot and not the other": ([*USUAL, *training(run="s"), *covered("500x{n}", run="s")], 20, {COVERAGE: 1}),
    "the sick run and not the healthy one": ([*FORGOTTEN, *training(run="s"), schedule(run="s"), *layers("1e-3x{n}", run="s")], 20, {STALLED: 1}),
}  # fmt: skip

SILENT: dict[str, tuple[list[Series], Sequence[float]]] = {
    # what looks alike, series, minutes
    "a training with which nothing is wrong": (USUAL, (1, 20, 119)),
    "a stalled layer within the first 50 steps": (FORGOTTEN, (5, 9)),
    "a norm that stands still": ([*USUAL, layer("norm", "0x{n}", kind="norm")], (20, 60)),
    "a layer that is slow": ([*USUAL, layer("fc", "1e-5x{n}")], (20, 60)),
    "a layer without a finite update": ([*USUAL, layer("fc", " ".join(["NaN"] * MINUTES))], (20, 60)),
    "the end of a schedule that goes to zero": ([*training(), schedule("0.005x{n}"), *layers("5e-7x{n}", 3), layer("fc", "1e-9x{n}")], (20, 60)),
    "a learning rate so low that every layer is near the limit of stalled ones": (
        [*training(), *layers("5e-7x{n}"), layer("fc", "3e-7x{n}")], (20, 60),
    ),
    "bad samples between good ones": ([*USUAL, layer("fc", "1e-3x10 0x3 1e-3x3 0x3 1e-3x3 0x3 1e-3x{n}", group="none")], (14, 17, 20, 23, 26, 30)),
    "a stalled layer at one sample in 6 minutes, before 50 steps": (
        [*training(sampled="0x5 10x5 20x5 30x5 40x5 50x{n}"), schedule(), *layers("1e-3x{n}"), layer("fc", "0x{n}")], (12, 20, 29),
    ),
    "a stalled layer at one sample in a thousand steps, before three of them": (
        [*training(sampled="1000x10 2000x10 3000x10 4000x{n}", every="1000x{n}"), schedule(), *layers("1e-3x{n}"), layer("fc", "0x{n}")], (20, 30),
    ),
    "one bad sample that is shown for long, since samples have become rare": (
        [*training(sampled="0x20 1280x20 2560x20 3840x{n}", every="10x2 1280x{n}"), schedule(), *layers("1e-3x{n}"), layer("fc", "1e-3x20 0x20 1e-3x{n}")], (25, 35, 41, 60),
    ),
    "the last bad sample of before they became frequent again": (
        [*training(sampled="0x20 1280x20 1290+10x{n}", every="1280x41 10x{n}"), schedule(), *layers("1e-3x{n}"), layer("fc", "1e-3x20 0x20 1e-3x{n}")], (35, 42, 44, 60),
    ),
    "a run that has ended, and still serves its last values": (
        [*training(active="1x9 0x{n}", sampled="0+10x30 300x{n}"), schedule(), *layers("3e-5x{n}"), layer("fc", "0x{n}")], (20, 60, 119),
    ),
    "decay that makes ratios low": ([*training(), schedule("0.15x{n}"), *layers("8e-5x{n}")], (20, 60)),
    "warmup that makes ratios low": ([*training(), schedule("0.2x{n}"), *layers("5e-5x{n}")], (20, 60)),
    "decay to zero": ([*training(), schedule("0.05x{n}"), *layers("1e-6x{n}")], (20, 60)),
    "a warmup without a scheduler, whose peak is not known": ([*training(), *layers("1e-6x{n}")], (20, 60)),
    "a ratio that is low for a moment": ([*training(), schedule(), *layers("1e-3x20 3e-5x3 1e-3x{n}")], (23, 24, 30)),
    "the first steps of Adam": ([*training(), schedule(), *layers("2e-2x2 5e-3x{n}")], (2, 8, 20)),
    "embeddings and norms that are fast": ([*USUAL, *(layer(f"e{i}", "0.1x{n}", kind=kind) for i in range(5) for kind in ("embedding", "norm"))], (20,)),
    "one fast matrix of many": ([*USUAL, layer("fc", "0.5x{n}")], (20, 60)),
    "gradients that overflow under a scaler": ([*USUAL, *(series("otel_train_nonfinite_total", "0+5x{n}", source=s) for s in ("gradient", "activation"))], (20,)),
    "a NaN loss of days ago, when Prometheus begins to look": (
        [series("otel_train_nonfinite_total", "_x30 7x{n}", source="loss"), series("otel_train_step_duration_seconds_sum", "_x30 200000+60x{n}")], (31, 34),
    ),
    "a rank that moved, and then ended": (
        [series("otel_train_run_active", GONE), series("otel_train_run_active", "_x12 1x20 0 stale", instance="b:9464")], (20, 35, 45, 100),
    ),
    "a run that is taken up again under its name, before its first step": (
        [series("otel_train_run_active", "1x70 stale _ 1x{n}"), series("otel_train_last_step_timestamp_seconds", "0+60x70 stale"),
         series("otel_train_step_duration_seconds_sum", "0+60x70 stale"), series("otel_train_step_duration_seconds_count", "0+10x70 stale")], (73, 78, 100),
    ),
    "the first steps after an evaluation of half an hour": (
        [*training()[:1], series("otel_train_phase", "1x10 stale _x29 1x{n}", phase="train"), series("otel_train_phase", "_x11 1x29 stale", phase="eval"),
         series("otel_train_last_step_timestamp_seconds", "0+60x10 600x32 2580+60x{n}"), *training()[5:7]], (22, 39, 41, 42.5, 50),
    ),
    "the end of a schedule at which nothing moves": ([*training(), schedule("0x{n}"), *layers("0x{n}")], (20, 60)),
    "the first hour without a step": ([series("otel_train_run_active", "1x{n}")], (20, 59)),
    "a NaN loss of hours ago": ([series("otel_train_nonfinite_total", "7x{n}", source="loss")], (50, 119)),
    "a NaN loss of before a gap in which Prometheus was away": ([series("otel_train_nonfinite_total", "7x50 _x30 7x{n}", source="loss"), series("otel_train_step_duration_seconds_sum", "100x{n}")], (82, 90)),
    "a restart that sets the count to 0": ([series("otel_train_nonfinite_total", "7x50 0x{n}", source="loss")], (52, 60)),
    "steps of a minute: ten minutes without one": (
        [series("otel_train_last_step_timestamp_seconds", "0x{n}"), series("otel_train_step_duration_seconds_sum", "600x{n}"),
         series("otel_train_step_duration_seconds_count", "10x{n}"), series("otel_train_run_active", "1x{n}")], (11, 19),
    ),
    "an evaluation of half an hour": (
        [series("otel_train_phase", "_x10 1x30 _x{n}", phase="eval"), series("otel_train_phase", "1x10 _x30 1x{n}", phase="train"),
         series("otel_train_last_step_timestamp_seconds", "0+60x10 600x29 2400+60x{n}"), *(s for s in USUAL if "timestamp" not in s["series"] and "phase" not in s["series"])], (22, 39),
    ),
    "a run that has ended long ago, and is still served": (
        [*training(active="1x10 0x{n}")[:3], series("otel_train_last_step_timestamp_seconds", "0+60x10 600x{n}")], (30, 119),
    ),
    "one rank a little behind": ([*USUAL, series("otel_train_last_step_timestamp_seconds", "0x{n}", rank="1")], (11, 60)),
    "replicas that round differently": ([*USUAL[:-1], replicas("1e-8x{n}")], (20, 60)),
    "replicas of a run that has ended, and still serves its last values": ([*training(active="1x2 0x{n}"), replicas("1e-4x{n}")], (20, 60)),
    "layers that are frozen on purpose": ([*training(), *covered("1000x30 400x{n}", "1000x30 400x{n}")], (20, 31, 40, 60)),
    "layers that are frozen, while the old sample is still shown": ([*training(), *covered("1000x32 400x{n}", "1000x30 400x{n}")], (31, 33, 40, 60)),
    "a bias without a gradient": ([*training(), *covered("995x{n}")], (20, 60)),
    "one sample without a layer": ([*training(), *covered("1000x20 500 1000x{n}")], (20, 21, 22, 30)),
    "samples without some expert, between samples with all": ([*training(), *covered("1000x10 900x3 1000x3 900x3 1000x3 900x3 1000x{n}")], (14, 17, 20, 23, 26, 30)),
    "the start, before the first sample": ([*training()[:1], series("otel_train_trainable_parameters", "1000x{n}")], (5, 59)),
    "the first 50 steps without a part": ([*training(), *covered("900x{n}", silent="3x{n}")], (5, 9)),
    "modules that fire only now and then, where activations are measured in every 32nd sample": (
        [*training(), *covered("1000x{n}", silent="2x32 1x32 0x{n}", activations="320x{n}")], (20, 40, 60, 70),
    ),
    "modules that fire a little later": ([*training(), *covered("1000x{n}", silent="64 20 5 1 0x{n}")], (2, 4, 10, 20)),
    "a part without a gradient at one sample in a thousand steps, before three more": (
        [*training(sampled="1000x10 2000x10 3000x10 4000x{n}", every="1000x{n}"), *covered("900x{n}", silent="1x{n}", activations="1000x{n}")], (20, 30),
    ),
    "a blind spot of a run that has ended, and still serves its last values": (
        [*training(active="1x9 0x{n}", sampled="0+10x30 300x{n}"), *covered("0x{n}", silent="2x{n}")], (20, 60, 119),
    ),
    "a monitor that was given no optimizer": ([*training(), *covered("_x{n}")[1:]], (20, 60)),
    "a rank that has not sampled yet, and one that has": (
        [*USUAL, *training(rank="1", instance="b:1"), *covered("_x3 1000x{n}", rank="1", instance="b:1")], (2, 5, 12, 20),
    ),
    "ranks that each have a part of the model, and see all of it": (
        [*training(), *training(rank="1", instance="b:1"), *covered("3000x{n}", "3000x{n}"), *covered("7x{n}", "7x{n}", rank="1", instance="b:1")], (20, 60),
    ),
    "replicas of which one exports the whole": (
        [*training(), *training(rank="1", instance="b:1"), *covered("1000x{n}"), *covered("0x{n}", "0x{n}", rank="1", instance="b:1")], (20, 60),
    ),
    "a clean end": ([series("otel_train_run_active", "1x10 0 stale"), *scraped("1x11 0x{n}", "0.01x11 0.001x{n}")], (12, 17, 60)),
    "a gap of two minutes": ([series("otel_train_run_active", "1x10 stale _ 1x{n}")], (12, 13, 20)),
    "a rank that comes back elsewhere": ([series("otel_train_run_active", GONE), series("otel_train_run_active", "_x10 1x{n}", instance="b:9464")], (17, 40)),
    "a killed run after two hours": ([series("otel_train_run_active", "1x5 stale")], (130,)),
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("what", FIRES)
def test_it_fires_on(version: Version, tmp_path: Path, what: str) -> None:
    """The right alerts, and no other."""
    given, minute, expected = FIRES[what]
    assert firing(version, tmp_path, given, {minute: expected}) == ""


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("what", SILENT)
def test_it_is_silent_on(version: Version, tmp_path: Path, what: str) -> None:
    """Whatever the alert: none fires."""
    given, minutes = SILENT[what]
    assert firing(version, tmp_path, given, {minute: {} for minute in minutes}) == ""


SAYS: dict[str, tuple[str, dict[str, str], str]] = {
    # alert: the case that it is taken from, its labels besides job, run and severity, its description
    STALLED: (
        "a layer of no optimizer",
        {"layer": "fc", "depth": "1", "kind": "matrix", "param_group": "none"},
        (
            "Layer fc (depth 1, matrix) of run r has an update ratio of 0, while others move. It requires gradients, but no attached "
            "optimizer has it: add it to one, or freeze it with requires_grad_(False)."
        ),
    ),
    LOW: (
        "a median that is low",
        {},
        (
            "The median layer of run r changes by 10^-4.5 of its weights a step, as it would be at the peak of the schedule; 10^-3 is "
            "usual, 10^-4 the limit. Raise the learning rate, at most tenfold at a time, and look again; in fine-tuning it can be meant."
        ),
    ),
    HIGH: (
        "a median that is high",
        {},
        (
            "The median layer of run r changes by 10^-1.5 of its weights a step, as it would be at the peak of the schedule; 10^-3 is "
            "usual, 10^-2 the limit. Lower the learning rate, or warm up for longer if it is only so at the start."
        ),
    ),
    NAN: (
        "a NaN loss that the first scrape finds",
        {},
        (
            "Run r had about 7 non-finite losses in the last 5m. If its weights are not finite either (otel_train_nonfinite_total, source "
            "parameter), training on is useless: stop it, and go on from a checkpoint before the first one, past the batch that did it or "
            "with a lower learning rate."
        ),
    ),
    STEPS: (
        "no step for more than ten minutes",
        {},
        (
            "Run r has ended no optimizer step for 11m 0s, far longer than its steps take. It hangs: in a collective that one rank never "
            "entered, in the data loader, in storage, or it is stopped. Take a stack of every rank (py-spy dump --pid PID), then restart it "
            "from its last checkpoint. Mark long evaluations and checkpoints with monitor.phase(…)."
        ),
    ),
    DIVERGED: (
        "replicas that differ from some step on",
        {},
        (
            "Weights of run r that are replicas of one another differ by 0.0001 of their norm, so its data-parallel ranks train different "
            "models. Compare otel_train_local_param_norm between ranks to find the one that is off, take its host out, and go on from a "
            "checkpoint of before: see since when otel_train_replica_divergence_ratio is above 0."
        ),
    ),
    COVERAGE: (
        "a block without a gradient",
        {"source": "gradient"},
        (
            "Only 97% of the trainable elements of run r had a gradient when their optimizer stepped. What has none does not learn, and has "
            "no series: look in the training's log (logger otel_train) which parameters they are, mend what cuts them off from the loss, or "
            "freeze them with requires_grad_(False)."
        ),
    ),
    ABSENT: (
        "a process that is killed",
        {"rank": "0", "instance": "a:9464"},
        (
            "Rank 0 of run r (a:9464) was training when it last answered, and has not answered for 5m. Look whether the process, and its "
            "machine, still live: it was killed (out of memory, preempted), crashed in native code, or hangs. Restart it from its last checkpoint."
        ),
    ),
}


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("alert", alerts(STANDARD), ids=lambda alert: alert.name)
def test_it_says_run_layer_value_and_what_to_do(version: Version, tmp_path: Path, alert: Alert) -> None:
    """The whole message, as Alertmanager gets it."""
    what, labels, description = SAYS[alert.name]
    given, minute, _ = FIRES[what]
    expected = {
        "exp_labels": {"job": "otel-train", "run": "r", "severity": alert.severity, **labels},
        "exp_annotations": {
            "summary": alert.summary, "description": description, "runbook_url": f"{assets.RUNBOOKS}/{alert.name}.md",
        },
    }  # fmt: skip
    test = {"eval_time": f"{minute}m", "alertname": alert.name, "exp_alerts": [expected]}
    assert promtool(version, tmp_path, {"input_series": given, "alert_rule_test": [test]}) == ""


FAULTS: dict[str, tuple[str, str, str]] = {
    # a fault in the rules: what is replaced, by what, and the case that finds it
    "stalls at any speed": (":max < 1e-06", ":max < 1e-04", "a layer that is slow"),
    "stalls without comparing layers": ("run:otel_train_layer_update_ratio:median <= 0.01", "run:otel_train_layer_update_ratio:median <= 1e9", "a learning rate so low that every layer is near the limit of stalled ones"),
    "stalls of norms": ('kind=~"matrix|embedding"', 'kind=~"matrix|embedding|norm"', "a norm that stands still"),
    "stalls at the end of the schedule": ("schedule_ratio) < 0.01", "schedule_ratio) < 0", "the end of a schedule that goes to zero"),
    "no steps to hold for": (", 50)", ", 0) * 0", "a stalled layer at one sample in 6 minutes, before 50 steps"),
    "no samples to hold for": ("clamp_min(3 *", "clamp_min(0 *", "a stalled layer at one sample in a thousand steps, before three of them"),
    "ratios not normalised": ("(max by (job, run, param_group) (otel_train_learning_rate_schedule_ratio) >= 0.1)", "(max by (job, run, param_group) (otel_train_learning_rate_schedule_ratio >= 0.1) * 0 + 1)", "decay that makes ratios low"),
    "normalised by any share": ("schedule_ratio) >= 0.1", "schedule_ratio) >= 0", "decay to zero"),
    "ended runs": ("run:otel_train_run_active:max == 1", "run:otel_train_run_active:max >= 0", "a run that has ended, and still serves its last values"),
    "replicas of ended runs": ("run:otel_train_run_active:max == 1", "run:otel_train_run_active:max >= 0", "replicas of a run that has ended, and still serves its last values"),
    "any difference of replicas": ("replica_divergence_ratio) > 1e-06", "replica_divergence_ratio) > 0", "replicas that round differently"),
    "coverage of ended runs": ("run:otel_train_run_active:max == 1", "run:otel_train_run_active:max >= 0", "a blind spot of a run that has ended, and still serves its last values"),
    "coverage of each rank's own": ("sum by (job, run) (otel_train_monitored_parameters)", "avg by (job, run) (otel_train_monitored_parameters)", "replicas of which one exports the whole"),
    "any gap in the coverage": ("ratio < 0.99", "ratio < 1", "a bias without a gradient"),
    "gaps without steps to hold for": (", 50)", ", 0) * 0", "the first 50 steps without a part"),
    "gaps without samples to hold for": ("clamp_min(3 *", "clamp_min(0 *", "a part without a gradient at one sample in a thousand steps, before three more"),
    "gaps of modules without samples of activations to hold for": ('{part="activations"}', '{part="activations"} * 0', "modules that fire only now and then, where activations are measured in every 32nd sample"),
    "modules that have fired": ("run:otel_train_silent_activation_modules:sum > 0", "run:otel_train_silent_activation_modules:sum >= 0", "a training with which nothing is wrong"),
    "any source of NaN": ('{source="loss"}', "", "gradients that overflow under a scaler"),
    "old NaN losses": ('otel_train_nonfinite_total{source="loss"}[2h] offset 5m', 'otel_train_nonfinite_total{source="loss"}[1m] offset 5m', "a NaN loss of before a gap in which Prometheus was away"),
    "slow steps": ("clamp_min(20 *", "clamp_min(0 *", "steps of a minute: ten minutes without one"),
    "phases": ('otel_train_phase{phase!="train"}', 'otel_train_phase{phase="x"}', "an evaluation of half an hour"),
    "clean ends": ("last_over_time(otel_train_run_active[2h]) == 1", "last_over_time(otel_train_run_active[2h]) >= 0", "a clean end"),
    "addresses that a rank has left": ("== on (job, run, rank) group_left () max", "<= on (job, run, rank) group_left () max", "a rank that moved, and then ended"),
}  # fmt: skip


@pytest.mark.parametrize("version", VERSIONS)
def test_where_nothing_moves_the_advice_is_another(version: Version, tmp_path: Path) -> None:
    """A higher learning rate would not help."""
    given, minute, _ = FIRES["nothing that moves at all, at a learning rate that always was 0"]
    expected = {
        "exp_labels": {"job": "otel-train", "run": "r", "severity": "warning"},
        "exp_annotations": {
            "summary": "The weights hardly move: the learning rate is probably too low.",
            "description": "The median layer of run r does not change at all. Look whether its learning rate is 0, and whether attach "
            "was given the optimizer that the loop uses.",
            "runbook_url": f"{assets.RUNBOOKS}/{LOW}.md",
        },
    }  # fmt: skip
    test = {"eval_time": f"{minute}m", "alertname": LOW, "exp_alerts": [expected]}
    assert promtool(version, tmp_path, {"input_series": given, "alert_rule_test": [test]}) == ""


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_in_the_rules_is_found(tmp_path: Path, fault: str) -> None:
    """Each case of silence can fail: the rules without what keeps them silent fire."""
    old, new, what = FAULTS[fault]
    text, broken = RULES.read_text(), tmp_path / "rules.yaml"
    assert old in text
    broken.write_text(text.replace(old, new))
    given, minutes = SILENT[what]
    said = firing("current", tmp_path, given, {minute: {} for minute in minutes}, broken)
    assert "got: {alertname=" in said, said


def test_every_alert_has_cases() -> None:
    """A new one needs them."""
    assert set(SAYS) == {alert.name for alert in alerts(STANDARD)}
    assert set(SAYS) <= {name for _, _, names in FIRES.values() for name in names}
