"""Pushes into a real store: VictoriaMetrics."""

from __future__ import annotations

import time
from collections.abc import Iterator

import pytest

from otel_train.catalog import gradients, loss, run
from otel_train.sinks.otlp import OtlpSink
from otel_train.snapshot import HistogramValue, Sample, Snapshot
from tests.servers import Victoria, victoria, wait_until

LAYER = ("blocks.0", "0", "matrix", "0")
BINS = tuple(2.0**exponent for exponent in range(-46, 17))


@pytest.fixture
def store() -> Iterator[Victoria]:
    """Run one."""
    with victoria() as server:
        yield server


def snapshot(*samples: Sample) -> Snapshot:
    """Return a Snapshot of now."""
    return Snapshot((("run", "r"), ("rank", "0")), time.time(), samples, started_at=time.time() - 60)


@pytest.mark.slow
def test_values_are_stored_and_let_go_of(store: Victoria) -> None:
    """Names and labels as on the scrape road; a series that is gone is gone at once, not after five minutes."""
    sink = OtlpSink(store.otlp, interval_seconds=0.2)
    counts = (0, *([0] * 40), 600, 300, 100, *([0] * 20))
    always = (
        Sample(run.STEPS, (), 41),
        Sample(gradients.LAYER_GRAD_MAGNITUDE, LAYER, HistogramValue(BINS, counts, 50.0)),
    )
    sink.publish(snapshot(*always, Sample(loss.LOSS, (), 2.5)))
    wait_until(lambda: bool(store.ask("otel_train_loss")), 30, "the loss is stored")
    (steps,) = store.ask("otel_train_steps_total")
    assert float(steps["value"][1]) == 41
    labels = steps["metric"]
    assert (labels["run"], labels["rank"], labels["service.name" if "service.name" in labels else "service_name"]) == (
        "r",
        "0",
        "otel-train",
    )
    (count,) = store.ask("otel_train_layer_grad_magnitude_count")
    assert float(count["value"][1]) == 1000
    buckets = {
        entry["metric"]["vmrange"]: float(entry["value"][1]) for entry in store.ask("otel_train_layer_grad_magnitude_bucket")
    }
    upper = {float(name.partition("...")[2]): value for name, value in buckets.items()}
    assert upper == pytest.approx({2.0**-5: 600, 2.0**-4: 300, 2.0**-3: 100}, rel=1e-3)
    sink.publish(snapshot(*always))
    wait_until(lambda: not store.ask("otel_train_loss"), 30, "the loss is gone")
    assert store.ask("otel_train_steps_total")
    sink.close()
