"""What a push costs, and that a training goes on at its speed whatever a collector does."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable
from statistics import median

import pytest
import torch
from torch import nn

import otel_train
from otel_train.catalog import gradients
from otel_train.sinks.otlp import OtlpSink, pusher
from otel_train.snapshot import Sample, Snapshot
from tests.sinks.otlp.collector import Answer, collector, cut_short, hanging, status, taken


def of_points(count: int, step: float) -> Snapshot:
    """Return a Snapshot of so many series."""
    samples = [
        Sample(gradients.LAYER_GRAD_NORM, (f"model.layers.{i}.attention", str(i), "matrix", "0"), step + i) for i in range(count)
    ]
    return Snapshot((("run", "r"), ("rank", "0")), step, tuple(samples))


@pytest.mark.parametrize(("count", "most_ms"), [(1_000, 10.0), (10_000, 60.0)])
def test_a_push_costs_its_own_thread_little(count: int, most_ms: float, capsys: pytest.CaptureFixture[str]) -> None:
    """Processor time of the thread for a push, encoding and sending; 1.4 and 10 ms on two cores."""
    with collector() as there:
        sink = OtlpSink(there.url, interval_seconds=0.05)
        seconds = []
        for step in range(12):
            before, pushed = sink.cpu_seconds, len(there.accepted)
            sink.publish(of_points(count, float(step)))
            end = time.monotonic() + 10
            while (sink.cpu_seconds == before or len(there.accepted) == pushed) and time.monotonic() < end:
                time.sleep(0.005)
            pushes = len(there.accepted) - pushed
            assert pushes, "a push"
            seconds.append((sink.cpu_seconds - before) / pushes)
        sink.close()
    cost = 1000 * median(seconds[2:])
    with capsys.disabled():
        sys.stdout.write(f" [{count} points: {cost:.2f} ms a push] ")
    assert cost < most_ms


def busy(seconds: float) -> float:
    """Return how many rounds of plain Python a second a training thread gets through."""
    end, rounds = time.perf_counter() + seconds, 0
    began = time.perf_counter()
    while time.perf_counter() < end:
        sum(range(200))
        rounds += 1
    return rounds / (time.perf_counter() - began)


def test_a_busy_python_thread_keeps_its_interpreter(capsys: pytest.CaptureFixture[str]) -> None:
    """10,000 points a second, ten times the default pace: the thread that trains loses a few per cent of its Python at most."""
    with collector() as there:
        sink = OtlpSink(there.url, interval_seconds=1.0)
        ratios = []
        sink.publish(of_points(10_000, 0.0))
        for round_ in range(8):
            alone = busy(0.25)
            sink._pusher._next_push = 0.0
            sink.publish(of_points(10_000, float(round_)))
            with sink._pusher._changed:
                sink._pusher._changed.notify_all()
            ratios.append(busy(0.75) / alone)
        assert len(there.accepted) >= 8
        sink.close()
    lost = 1 - median(ratios)
    with capsys.disabled():
        sys.stdout.write(f" [10,000 points a second take {100 * lost:.1f} % of a busy interpreter] ")
    assert lost < 0.15


COLLECTORS: dict[str, Answer] = {
    "taking": taken,
    "slow": hanging(0.4),
    "400": status(400),
    "413": status(413),
    "429": status(429),
    "500": status(500),
    "closing": cut_short,
}


@pytest.mark.parametrize("kind", [*COLLECTORS, "down", "full queue"])
def test_a_training_goes_on_at_its_speed(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two trainings in turns in one process, one that pushes 20 times a second: the ratio of their steps, and memory that is bounded."""
    monkeypatch.setattr(pusher, "_FIRST_PAUSE", 0.05)
    monkeypatch.setattr(pusher, "_LONGEST_PAUSE", 0.2)
    monkeypatch.setattr(pusher, "_CLOSE_SECONDS", 0.3)
    with collector(COLLECTORS.get(kind, status(503))) as there:
        url = "http://127.0.0.1:9" if kind == "down" else there.url
        room = 30_000 if kind == "full queue" else 1 << 20
        sink = OtlpSink(url, interval_seconds=0.05, queue_bytes=room)
        plain, pushing = training_of([]), training_of([sink])
        ratios = [pushing(0.15) / plain(0.15) for _ in range(12)]
        assert sink._pusher._bytes <= room + 30_000
        assert sum(sample.value for sample in sink.report() if isinstance(sample.value, int)) > 0, "counters tell"
        sink.close()
    assert 0.8 < median(ratios) < 1.25


def training_of(sinks: list[OtlpSink]) -> Callable[[float], float]:
    """Start a monitored training; return what makes steps for some seconds and tells the median of their times."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(256, 512), nn.ReLU(), nn.Linear(512, 256))
    optimizer = torch.optim.AdamW(model.parameters())
    monitor = otel_train.attach(model, optimizer, port=None, sinks=sinks, max_overhead=None)
    batch = torch.randn(128, 256)

    def train(seconds: float) -> float:
        end, times = time.perf_counter() + seconds, []
        while time.perf_counter() < end:
            began = time.perf_counter()
            model(batch).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
            times.append(time.perf_counter() - began)
        assert monitor is not None
        return median(times)

    return train
