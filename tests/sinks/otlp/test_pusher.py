"""Pushes: one an interval, and what becomes of those that a collector cannot take now."""

from __future__ import annotations

import datetime as dt
import email.utils
import logging
import os
import threading
import time
from collections.abc import Iterator
from typing import Any

import pytest

from otel_train import ConfigError, MissingDependencyError, OtlpSink
from otel_train.catalog import gradients, otlp, run
from otel_train.sinks import ReportingSink, Sink, find_sinks
from otel_train.sinks.otlp import pusher
from otel_train.snapshot import Sample, Snapshot
from tests.servers import free_port, wait_until
from tests.sinks.otlp.collector import Answer, collector, cut_short, hanging, numbers, points, status, taken, taken_but

FAILURES: dict[str, Answer] = {
    "429": status(429),
    "502": status(502),
    "503": status(503),
    "504": status(504),
    "closing in mid-response": cut_short,
    "silent": hanging(0.3),
}


@pytest.fixture(autouse=True)
def short_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    """Have tries follow each other quickly."""
    monkeypatch.setattr(pusher, "_FIRST_PAUSE", 0.02)
    monkeypatch.setattr(pusher, "_LONGEST_PAUSE", 0.1)


def snapshot(step: int, layers: int = 3) -> Snapshot:
    """Return a Snapshot of one step and some layers."""
    of_layers = [Sample(gradients.LAYER_GRAD_NORM, (f"layer{i}", str(i), "matrix", "0"), float(step)) for i in range(layers)]
    return Snapshot((("run", "r"), ("rank", "0")), float(step), (Sample(run.STEP, (), step), *of_layers), started_at=1.0)


def counted(sink: OtlpSink) -> dict[str, float]:
    """Return what a sink says of itself."""
    values = {f"{s.spec.name.rpartition('.')[2]} {''.join(s.labels)}".strip(): s.value for s in sink.report()}
    return {name: value for name, value in values.items() if isinstance(value, (int, float))}


@pytest.fixture
def sinks() -> Iterator[list[OtlpSink]]:
    """Close what a test made."""
    made: list[OtlpSink] = []
    yield made
    for sink in made:
        sink.close()


def publish_until(sink: OtlpSink, done: Any, what: str, first: int = 1) -> int:
    """Publish steps until something is so; return the last."""
    step = first
    end = time.monotonic() + 20
    while not done():
        assert time.monotonic() < end, f"not within 20 s: {what}; {counted(sink)}"
        sink.publish(snapshot(step))
        step += 1
        time.sleep(0.02)
    return step - 1


def test_it_is_a_sink_that_reports() -> None:
    """The monitor carries what it says, and counts what it costs."""
    sink = OtlpSink()
    assert isinstance(sink, Sink)
    assert isinstance(sink, ReportingSink)
    assert set(counted(sink).values()) == {0}
    assert {name.split(" ")[-1] for name in counted(sink)} == {*otlp.REQUEST_OUTCOMES, *otlp.POINT_OUTCOMES, "queued"}


def test_the_latest_snapshot_goes_out_each_interval(sinks: list[OtlpSink]) -> None:
    """With the path, type and headers that a collector expects, on one connection."""
    with collector() as there:
        sink = OtlpSink(there.url, headers={"x-scope": "mine"}, interval_seconds=0.1)
        sinks.append(sink)
        began = time.monotonic()
        publish_until(sink, lambda: len(there.accepted) >= 5, "five pushes")
        elapsed = time.monotonic() - began
        assert elapsed > 0.35, "one an interval"
        steps = [numbers(request, "otel_train.step")[0] for request in there.accepted]
        assert steps == sorted(steps)
        assert set(there.paths) == {"/v1/metrics"}
        assert there.headers["content-type"] == "application/x-protobuf"
        assert there.headers["x-scope"] == "mine"
        assert there.headers["user-agent"].startswith("otel-train/")
        sink.close()
    # The number of pushes is read before the server ends.
    assert counted(sink)["requests accepted"] == len(there.accepted)
    assert counted(sink)["points accepted"] == 4 * len(there.accepted)
    assert sink.cpu_seconds > 0


def test_a_snapshot_goes_out_again_while_no_newer_one_comes(sinks: list[OtlpSink]) -> None:
    """A long evaluation makes no steps, but a store must not take the run for gone: a scrape would see the values too."""
    with collector() as there:
        sink = OtlpSink(there.url, interval_seconds=0.05)
        sinks.append(sink)
        sink.publish(snapshot(7))
        wait_until(lambda: len(there.accepted) >= 3, 10, "three pushes")
        times = [next(iter(points(request).values())).time_unix_nano for request in there.accepted]
        assert times == sorted(set(times)), "each at its own time"
        assert [numbers(request, "otel_train.step") for request in there.accepted[:3]] == [[7.0]] * 3


def test_the_last_snapshot_goes_out_at_close_without_waiting_for_the_interval() -> None:
    """That a run has ended is what stores must hear."""
    with collector() as there:
        sink = OtlpSink(there.url, interval_seconds=3600)
        sink.publish(snapshot(1))
        wait_until(lambda: len(there.accepted) == 1, 10, "the first push")
        sink.publish(snapshot(2))
        began = time.monotonic()
        sink.close()
        assert time.monotonic() - began < 2
        assert [numbers(request, "otel_train.step") for request in there.accepted] == [[1.0], [2.0]]
        sink.close()
        assert len(there.accepted) == 2, "once"
        assert not [thread for thread in threading.enumerate() if thread.name == "otel-train-otlp"]


@pytest.mark.parametrize("failure", FAILURES)
def test_what_could_not_be_taken_arrives_afterwards_in_order(
    failure: str, sinks: list[OtlpSink], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each with the time at which it was made."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "200")
    with collector(FAILURES[failure]) as there:
        sink = OtlpSink(there.url, interval_seconds=0.1)
        sinks.append(sink)
        publish_until(sink, lambda: counted(sink)["requests retried"] >= 4 and len(sink._pusher._waiting) >= 3, "tries that fail")
        assert counted(sink)["queued"] > 0
        assert not there.accepted
        waited = [message.body for message in sink._pusher._waiting][:3]
        there.answer = taken
        wait_until(lambda: len(there.accepted) >= 3, 20, "what waited")
        assert [request.SerializeToString() for request in there.accepted[:3]] == waited
        times = [next(iter(points(request).values())).time_unix_nano for request in there.accepted]
        assert times == sorted(times)
        assert counted(sink)["requests rejected"] == counted(sink)["requests dropped"] == 0


def test_a_collector_that_is_down_is_found_again(sinks: list[OtlpSink]) -> None:
    """A closed port, and later a collector behind it."""
    port = free_port()
    sink = OtlpSink(f"http://127.0.0.1:{port}", interval_seconds=0.05)
    sinks.append(sink)
    publish_until(sink, lambda: counted(sink)["requests retried"] >= 3, "tries that fail")
    with collector(port=port) as there:
        wait_until(lambda: len(there.accepted) >= 3, 20, "what waited")
        assert numbers(there.accepted[0], "otel_train.step") == [1.0]


@pytest.mark.parametrize("code", [400, 401, 404, 500, 501])
def test_what_a_collector_refuses_for_good_is_counted_and_not_sent_again(
    code: int, sinks: list[OtlpSink], caplog: pytest.LogCaptureFixture
) -> None:
    """OTLP forbids to send it again, after a 500 too; the next push is tried, and the log has one line."""
    with collector(status(code)) as there, caplog.at_level(logging.WARNING):
        sink = OtlpSink(there.url, interval_seconds=0.05)
        sinks.append(sink)
        publish_until(sink, lambda: counted(sink)["requests rejected"] >= 3, "three that are refused")
        assert counted(sink)["requests retried"] == 0
        assert counted(sink)["points rejected"] == 4 * counted(sink)["requests rejected"]
        assert caplog.text.count(f"HTTP {code}") == 1
        there.answer = taken
        publish_until(sink, lambda: there.accepted, "one that is taken")


@pytest.mark.parametrize("as_date", [False, True])
def test_retry_after_is_heeded(as_date: bool, sinks: list[OtlpSink]) -> None:  # noqa: FBT001
    """In seconds, and as a date."""
    in_two = dt.datetime.now(dt.timezone.utc) + dt.timedelta(seconds=2.5)
    wish = email.utils.format_datetime(in_two, usegmt=True) if as_date else "1"
    with collector(status(429, Retry_After=wish)) as there:
        sink = OtlpSink(there.url, interval_seconds=0.05)
        sinks.append(sink)
        publish_until(sink, lambda: counted(sink)["requests retried"] >= 1, "a try")
        began, there.answer = time.monotonic(), taken
        wait_until(lambda: bool(there.accepted), 20, "a push that is taken")
        assert time.monotonic() - began > 0.5, "as asked for, not the 0.02 s of our own"
        assert len(there.bodies) - len(there.accepted) == 1


def test_partial_success_is_counted_and_told_once(sinks: list[OtlpSink], caplog: pytest.LogCaptureFixture) -> None:
    """The rest is in the store: nothing is sent again."""
    with collector(taken_but(3, "label too long")) as there, caplog.at_level(logging.WARNING):
        sink = OtlpSink(there.url, interval_seconds=0.05)
        sinks.append(sink)
        publish_until(sink, lambda: counted(sink)["requests accepted"] >= 2, "two pushes")
        accepted = counted(sink)["requests accepted"]
        assert counted(sink)["points rejected"] == 3 * accepted
        assert counted(sink)["points accepted"] == accepted
        assert caplog.text.count("label too long") == 1


def test_a_request_that_is_too_large_arrives_in_parts(sinks: list[OtlpSink]) -> None:
    """413 cuts it in halves until they fit; a point that does not fit alone is refused."""
    with collector() as there:
        there.most_bytes = 4000
        sink = OtlpSink(there.url, interval_seconds=3600)
        sinks.append(sink)
        sink.publish(snapshot(5, layers=100))
        wait_until(lambda: counted(sink)["points accepted"] == 101, 20, "all points")
        together: dict[Any, Any] = {}
        for request in there.accepted:
            assert request.ByteSize() <= 4000
            together |= points(request)
        assert len(together) == 101
        there.most_bytes = 10
        sink.publish(snapshot(6, layers=100))
        sink.close()
        assert counted(sink)["points rejected"] == 101
        assert counted(sink)["queued"] == 0


def test_a_full_queue_drops_the_oldest_and_counts_it(sinks: list[OtlpSink], caplog: pytest.LogCaptureFixture) -> None:
    """Memory stays bounded while a collector is away; the newest are kept."""
    with collector(status(503)) as there, caplog.at_level(logging.WARNING):
        sink = OtlpSink(there.url, interval_seconds=0.02, queue_bytes=5000)
        sinks.append(sink)
        publish_until(sink, lambda: counted(sink)["requests dropped"] >= 20, "twenty that are dropped")
        assert counted(sink)["queued"] <= 5000
        assert counted(sink)["points dropped"] == 4 * counted(sink)["requests dropped"]
        assert caplog.text.count("dropping the oldest") == 1
        there.answer = taken
        wait_until(lambda: len(there.accepted) >= 2, 20, "the rest")
        assert numbers(there.accepted[0], "otel_train.step")[0] > 10, "the oldest are gone"


def test_a_sink_is_one_monitors() -> None:
    """Another run's Snapshots are refused, and any after its end: they would be mixed, or wait for ever."""
    with collector() as there:
        sink = OtlpSink(there.url, interval_seconds=3600)
        sink.publish(snapshot(1))
        with pytest.raises(ConfigError, match="make one for each"):
            sink.publish(Snapshot((("run", "other"), ("rank", "0")), 2.0, ()))
        sink.close()
        with pytest.raises(ConfigError, match="make one for each"):
            sink.publish(snapshot(2))
        assert numbers(there.accepted[-1], run.STEP.name) == [1.0]


def test_close_waits_for_its_deadline_and_not_longer(monkeypatch: pytest.MonkeyPatch) -> None:
    """A collector that says nothing does not hold up the end."""
    monkeypatch.setattr(pusher, "_CLOSE_SECONDS", 0.5)
    monkeypatch.setattr(pusher, "_CLOSE_PAUSE", 0.2)
    with collector(hanging(30)) as there:
        sink = OtlpSink(there.url, interval_seconds=0.05)
        sink.publish(snapshot(1))
        wait_until(lambda: bool(there.bodies), 10, "a request")
        began = time.monotonic()
        sink.close()
        assert time.monotonic() - began < 1.5
    port = free_port()
    sink = OtlpSink(f"http://127.0.0.1:{port}", interval_seconds=0.05)
    sink.publish(snapshot(1))
    began = time.monotonic()
    sink.close()
    assert time.monotonic() - began < 1.5
    wait_until(lambda: counted(sink)["requests dropped"] > 0, 5, "what is left is counted")
    assert counted(sink)["queued"] == 0


def test_nothing_is_pushed_in_a_forked_process(sinks: list[OtlpSink]) -> None:
    """A child that holds the sink has no thread of it, and makes none."""
    with collector() as there:
        sink = OtlpSink(there.url, interval_seconds=3600)
        sinks.append(sink)
        child = os.fork()
        if child == 0:
            sink.publish(snapshot(1))
            sink.close()
            os._exit(sum(thread.name == "otel-train-otlp" for thread in threading.enumerate()))
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
        assert not there.bodies


def test_bodies_are_gzipped_where_that_is_asked_for(sinks: list[OtlpSink], monkeypatch: pytest.MonkeyPatch) -> None:
    """By OpenTelemetry's variable."""
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_COMPRESSION", "gzip")
    with collector() as there:
        sink = OtlpSink(there.url, interval_seconds=0.05)
        sinks.append(sink)
        publish_until(sink, lambda: there.accepted, "a push")
        assert there.headers["content-encoding"] == "gzip"
        assert numbers(there.accepted[0], "otel_train.step") == [1.0]


def test_the_resource_says_what_pushes_and_nothing_private(sinks: list[OtlpSink], monkeypatch: pytest.MonkeyPatch) -> None:
    """OpenTelemetry's own variables win; a command line may carry secrets."""
    monkeypatch.setenv("OTEL_RESOURCE_ATTRIBUTES", "team=vision,host.name=told")
    with collector() as there:
        made = [OtlpSink(there.url, interval_seconds=3600) for _ in range(2)]
        monkeypatch.setenv("OTEL_SERVICE_NAME", "big-run")
        made.append(OtlpSink(there.url, interval_seconds=3600))
        sinks.extend(made)
        for number, sink in enumerate(made):
            sink.publish(snapshot(1))
            wait_until(lambda wanted=number + 1: len(there.accepted) == wanted, 10, "a push")  # type: ignore[misc]
        resources = [
            {a.key: a.value.string_value for a in request.resource_metrics[0].resource.attributes} for request in there.accepted
        ]
        assert [resource["service.name"] for resource in resources] == ["otel-train", "otel-train", "big-run"]
        assert len({resource["service.instance.id"] for resource in resources}) == 3
        assert resources[0]["team"] == "vision"
        assert resources[0]["host.name"] == "told"
        assert {"process.pid", "process.runtime.version", "os.type", "telemetry.sdk.language"} <= resources[0].keys()
        assert not [name for name in resources[0] if name.startswith("process.command")]


def test_the_environment_alone_turns_it_on_and_never_ends_a_training(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """A sink that the user gave is the only one; a bad address is one line in the log."""
    assert find_sinks(None) == []
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    (found,) = find_sinks(None)
    assert isinstance(found, OtlpSink)
    assert found.url == "http://127.0.0.1:9/v1/metrics"
    own = OtlpSink("http://127.0.0.1:10")
    assert find_sinks([own]) == [own]
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "collector:4318")
    with caplog.at_level(logging.WARNING):
        assert find_sinks(None) == []
    assert "nothing is pushed over OTLP: OTLP endpoint: expected an address" in caplog.text


def test_a_missing_extra_is_said_in_one_line(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """Asked for by name it is an error, asked for by a variable a line in the log."""
    monkeypatch.setitem(__import__("sys").modules, "opentelemetry.sdk.resources", None)
    monkeypatch.delitem(__import__("sys").modules, "otel_train.sinks.otlp.message", raising=False)
    with pytest.raises(MissingDependencyError, match=r"pip install 'otel-train\[otlp\]'"):
        OtlpSink()
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", "http://127.0.0.1:9")
    with caplog.at_level(logging.WARNING):
        assert find_sinks(None) == []
    assert "pip install 'otel-train[otlp]'" in caplog.text
    assert len(caplog.records) == 1


def test_a_failure_of_our_own_is_logged_and_leaves_the_training_alone(
    sinks: list[OtlpSink], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The thread ends; publishing goes on without effect."""
    with collector() as there, caplog.at_level(logging.ERROR):
        sink = OtlpSink(there.url, interval_seconds=0.05)
        sinks.append(sink)
        monkeypatch.setattr(sink._pusher._encoder, "encode", lambda *_: 1 / 0)
        sink.publish(snapshot(1))
        wait_until(lambda: not sink._pusher._thread.is_alive(), 10, "the end of the thread")
        sink.publish(snapshot(2))
        assert "the training goes on" in caplog.text
