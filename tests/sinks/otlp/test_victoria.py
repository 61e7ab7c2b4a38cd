"""Pushes into a real store: VictoriaMetrics."""

from __future__ import annotations

import contextlib
import json
import subprocess
import time
import urllib.parse
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from otel_train.catalog import gradients, loss, run
from otel_train.sinks.otlp import OtlpSink
from otel_train.snapshot import HistogramValue, Sample, Snapshot
from tests.servers import find_program, free_port, get, stop, wait_until

LAYER = ("blocks.0", "0", "matrix", "0")
BINS = tuple(2.0**exponent for exponent in range(-46, 17))


class Victoria:
    """A VictoriaMetrics on loopback that names as Prometheus does."""

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        with (folder / "log").open("wb") as log:
            self.process = subprocess.Popen(
                [
                    find_program("current", "victoria-metrics"),
                    f"-httpListenAddr=127.0.0.1:{self.port}",
                    f"-storageDataPath={folder / 'data'}",
                    "-search.latencyOffset=0s",
                    "-opentelemetry.usePrometheusNaming",
                    "-opentelemetry.promoteAllResourceAttributes=false",
                    "-opentelemetry.promoteResourceAttributes=service.name,service.instance.id",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def is_ready(self) -> bool:
        with contextlib.suppress(OSError):
            return get(f"{self.url}/health") == "OK"
        return False

    def query(self, expression: str) -> list[dict[str, Any]]:
        """Return the answer of an instant query; what came in is made visible first."""
        get(f"{self.url}/internal/force_flush")
        answer = json.loads(get(f"{self.url}/api/v1/query?{urllib.parse.urlencode({'query': expression, 'nocache': 1})}"))
        assert answer["status"] == "success", answer
        found: list[dict[str, Any]] = answer["data"]["result"]
        return found


@pytest.fixture
def victoria(tmp_path: Path) -> Iterator[Victoria]:
    """Run one."""
    server = Victoria(tmp_path)
    try:
        wait_until(server.is_ready, 30, "VictoriaMetrics is ready")
        yield server
    finally:
        stop(server.process)


def snapshot(*samples: Sample) -> Snapshot:
    """Return a Snapshot of now."""
    return Snapshot((("run", "r"), ("rank", "0")), time.time(), samples, started_at=time.time() - 60)


@pytest.mark.slow
def test_values_are_stored_and_let_go_of(victoria: Victoria) -> None:
    """Names and labels as on the scrape road; a series that is gone is gone at once, not after five minutes."""
    sink = OtlpSink(f"{victoria.url}/opentelemetry", interval_seconds=0.2)
    counts = (0, *([0] * 40), 600, 300, 100, *([0] * 20))
    always = (
        Sample(run.STEPS, (), 41),
        Sample(gradients.LAYER_GRAD_MAGNITUDE, LAYER, HistogramValue(BINS, counts, 50.0)),
    )
    sink.publish(snapshot(*always, Sample(loss.LOSS, (), 2.5)))
    wait_until(lambda: bool(victoria.query("otel_train_loss")), 30, "the loss is stored")
    (steps,) = victoria.query("otel_train_steps_total")
    assert float(steps["value"][1]) == 41
    labels = steps["metric"]
    assert (labels["run"], labels["rank"], labels["service.name" if "service.name" in labels else "service_name"]) == (
        "r",
        "0",
        "otel-train",
    )
    (count,) = victoria.query("otel_train_layer_grad_magnitude_count")
    assert float(count["value"][1]) == 1000
    buckets = {
        entry["metric"]["vmrange"]: float(entry["value"][1]) for entry in victoria.query("otel_train_layer_grad_magnitude_bucket")
    }
    upper = {float(name.partition("...")[2]): value for name, value in buckets.items()}
    assert upper == pytest.approx({2.0**-5: 600, 2.0**-4: 300, 2.0**-3: 100}, rel=1e-3)
    sink.publish(snapshot(*always))
    wait_until(lambda: not victoria.query("otel_train_loss"), 30, "the loss is gone")
    assert victoria.query("otel_train_steps_total")
    sink.close()
