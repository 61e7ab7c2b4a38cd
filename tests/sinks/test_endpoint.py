"""The HTTP endpoint: what it answers, to whom, and what hostile clients can do to it."""

from __future__ import annotations

import contextlib
import gzip
import http.client
import logging
import socket
import struct
import threading
import time
import urllib.request
import wsgiref.util
from collections.abc import Callable, Iterator
from typing import Any

import prometheus_client
import pytest
import torch
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from torch import nn

import otel_train
from otel_train.catalog import run
from otel_train.catalog.monitor import MONITOR_SECONDS
from otel_train.monitor import Monitor
from otel_train.sinks import endpoint
from otel_train.sinks.endpoint import Endpoint
from otel_train.sinks.exposition import Piece, Renderer
from otel_train.sinks.prometheus import PrometheusSink
from otel_train.snapshot import Sample, Snapshot
from tests.servers import free_port, wait_until
from tests.sinks.client_model import families as protobuf_families
from tests.sinks.test_prometheus import awkward_snapshot

# as both versions sent it to a listener, 2026-11-30
PROMETHEUS_3_5 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,application/openmetrics-text;version=0.0.1;q=0.5,"
    "text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
PROMETHEUS_2_42 = (
    "application/openmetrics-text;version=1.0.0,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
_PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
NATIVE_3_5 = (
    f"{_PROTOBUF};q=0.6,application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.5,"
    "application/openmetrics-text;version=0.0.1;q=0.4,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.3,"
    "text/plain;version=0.0.4;q=0.2,*/*;q=0.1"
)
NATIVE_2_42 = (
    f"{_PROTOBUF},application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
"""With ``--enable-feature=native-histograms``."""
BROWSER = "text/html,application/xhtml+xml,application/xml;q=0.9,image/avif,image/webp,*/*;q=0.8"


class Served:
    """An endpoint with a hand-made Snapshot, without any training."""

    def __init__(self, host: str = "localhost", port: int = 0) -> None:
        self.sink = PrometheusSink()
        self.sink.publish(awkward_snapshot())
        self.failures: list[BaseException] = []
        self.endpoint = Endpoint(self.sink, host, port, self.failures.append)
        self.port = self.endpoint.port

    def connect(self, timeout: float = 10.0) -> socket.socket:
        return socket.create_connection(("127.0.0.1", self.port), timeout)

    def ask(self, path: str = "/metrics", method: str = "GET", **headers: str) -> tuple[http.client.HTTPResponse, bytes]:
        """Ask over a connection of its own; ``Accept_Encoding`` stands for ``Accept-Encoding``."""
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=10)
        try:
            connection.request(method, path, headers={name.replace("_", "-"): value for name, value in headers.items()})
            reply = connection.getresponse()
            return reply, reply.read()
        finally:
            connection.close()

    def raw(self, data: bytes, timeout: float = 10.0) -> bytes:
        """Send bytes and return everything until the server closes, or for `timeout` seconds."""
        with self.connect(timeout) as connection:
            with contextlib.suppress(OSError):  # the server may have closed already
                connection.sendall(data)
                connection.shutdown(socket.SHUT_WR)
            return _read_all(connection)


def _read_all(connection: socket.socket) -> bytes:
    parts = []
    for _ in range(10_000):
        with contextlib.suppress(OSError):
            part = connection.recv(1 << 16)
            if part:
                parts.append(part)
                continue
        break
    return b"".join(parts)


@pytest.fixture
def served() -> Iterator[Served]:
    """Serve a Snapshot."""
    server = Served()
    yield server
    server.endpoint.close()


@pytest.fixture
def impatient(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Serve a Snapshot and drop silent clients after 0.4 s."""
    monkeypatch.setattr(endpoint, "_CLIENT_SECONDS", 0.4)
    monkeypatch.setattr(endpoint._Handler, "timeout", 0.4)
    server = Served()
    yield server
    server.endpoint.close()


@contextlib.contextmanager
def _monitored(**settings: Any) -> Iterator[tuple[Monitor, Callable[[], None]]]:
    """Give a monitor and a step of its training."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)

    def step() -> None:
        model(torch.randn(16, 8)).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()

    with otel_train.attach(model, optimizer, **{"run": "endpoint", "port": 0, "max_overhead": None, **settings}) as monitor:
        yield monitor, step


def _is_closed(connection: socket.socket, seconds: float) -> bool:
    """Say whether the server closes a connection within some seconds."""
    connection.settimeout(seconds)
    try:
        while connection.recv(1 << 16):
            pass
    except ConnectionError:
        return True
    except TimeoutError:
        return False
    return True


# --- what it answers


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", "text/plain; version=0.0.4; charset=utf-8"),
        ("*/*", "text/plain; version=0.0.4; charset=utf-8"),
        (BROWSER, "text/plain; version=0.0.4; charset=utf-8"),
        ("text/plain;version=0.0.4", "text/plain; version=0.0.4; charset=utf-8"),
        (PROMETHEUS_3_5, "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=allow-utf-8"),
        (PROMETHEUS_2_42, "application/openmetrics-text; version=1.0.0; charset=utf-8; escaping=underscores"),
    ],
)
def test_the_format_is_what_the_client_accepts(served: Served, accept: str, expected: str) -> None:
    """OpenMetrics for both Prometheus versions as they really ask, else text 0.0.4."""
    reply, body = served.ask(Accept=accept)
    assert reply.status == 200
    assert reply.getheader("Content-Type") == expected
    assert reply.getheader("Content-Length") == str(len(body))
    families = list((parse_openmetrics if "openmetrics" in expected else parse_text)(body.decode()))
    assert len(families) == len({sample.spec for sample in awkward_snapshot().samples})


@pytest.mark.parametrize("accept", [NATIVE_3_5, NATIVE_2_42])
def test_a_prometheus_with_native_histograms_gets_protobuf(served: Served, accept: str) -> None:
    """It alone asks for it."""
    reply, body = served.ask(Accept=accept)
    assert reply.getheader("Content-Type") == f"{_PROTOBUF.replace(';', '; ')}; escaping=underscores"
    assert reply.getheader("Content-Length") == str(len(body))
    assert len(list(protobuf_families(body))) == len({sample.spec for sample in awkward_snapshot().samples})


@pytest.mark.parametrize("accept", ["", PROMETHEUS_3_5, NATIVE_3_5])
@pytest.mark.parametrize("encoding", ["gzip", "gzip, deflate, br", "deflate, gzip;q=0.5"])
def test_a_client_that_takes_gzip_gets_it(served: Served, accept: str, encoding: str) -> None:
    """Compressed, said so, and the same bytes inside."""
    reply, body = served.ask(Accept=accept, Accept_Encoding=encoding)
    assert reply.getheader("Content-Encoding") == "gzip"
    assert reply.getheader("Content-Length") == str(len(body))
    assert gzip.decompress(body) == served.ask(Accept=accept)[1]


@pytest.mark.parametrize("encoding", ["", "identity", "deflate, br", "gzip;q=0", "identity, gzip; q=0.0", "xgzipx"])
def test_a_client_that_does_not_take_gzip_does_not_get_it(served: Served, encoding: str) -> None:
    """A quality of 0 is a refusal, and another word is another encoding."""
    reply, body = served.ask(Accept_Encoding=encoding)
    assert reply.getheader("Content-Encoding") is None
    assert body.startswith(b"# HELP otel_train_run_info")


@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy"])
def test_head_gives_the_headers_of_get_alone(served: Served, path: str) -> None:
    """Same status, type and length, no body."""
    got, body = served.ask(path)
    reply, nothing = served.ask(path, "HEAD")
    assert nothing == b""
    assert reply.status == got.status == 200
    for name in ("Content-Type", "Content-Length"):
        assert reply.getheader(name) == got.getheader(name)
    raw = served.raw(f"HEAD {path} HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n".encode())
    assert raw.endswith(b"\r\n\r\n")
    assert len(body) > 10


def test_health_is_answered(served: Served) -> None:
    """For probes, without rendering anything."""
    reply, body = served.ask("/-/healthy")
    assert (reply.status, body) == (200, b"otel-train is healthy.\n")


@pytest.mark.parametrize("path", ["/metrics?name[]=x", "/?refresh=1", "/-/healthy?x"])
def test_a_query_does_not_change_the_path(served: Served, path: str) -> None:
    """Prometheus' params setting and a browser's caches add such."""
    assert served.ask(path)[0].status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/nothing",
        "/metrics/",
        "/Metrics",
        "/../../etc/passwd",
        "/%2e%2e/%2e%2e/etc/passwd",
        "/metrics%00",
        "//metrics/x",
        "/-/quit",
        "*",
    ],
)
def test_other_paths_are_not_found(served: Served, path: str) -> None:
    """Nothing but the three paths exists; no file is ever read, and nothing of the path comes back."""
    reply, body = served.ask(path)
    assert reply.status == 404
    assert body == b"Not found. There are /, /metrics and /-/healthy.\n"
    assert reply.getheader("Content-Type") == "text/plain; charset=utf-8"


@pytest.mark.parametrize("method", ["POST", "PUT", "DELETE", "PATCH", "OPTIONS", "TRACE", "CONNECT", "GETT", "get", "<script>"])
def test_other_methods_are_refused_and_the_connection_closed(served: Served, method: str) -> None:
    """A body that came along must not be taken for the next request."""
    answer = served.raw(f"{method} /metrics HTTP/1.1\r\nHost: x\r\nContent-Length: 3\r\n\r\nabc".encode())
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.split(b" ")[1] in {b"405", b"501"}
    assert b"connection: close" in head.lower()
    assert b"<script>" not in body
    assert answer.count(b"HTTP/1.1 ") == 1


def test_the_page_is_html_with_the_layers_in_it(served: Served) -> None:
    """The awkward layer of the golden exposition is there as text."""
    reply, body = served.ask("/")
    page = body.decode()
    assert reply.getheader("Content-Type") == "text/html; charset=utf-8"
    assert page.startswith("<!doctype html>")
    assert page.count("<tr>") == 1 + len(
        {s.labels for s in awkward_snapshot().samples if s.spec.name == "otel_train.layer.update_ratio"}
    )
    assert "<script" not in page
    assert "&lt;script&gt;" in page


@pytest.mark.parametrize("path", ["/metrics", "/", "/-/healthy", "/nothing"])
def test_no_answer_is_to_be_guessed_at_by_browsers(served: Served, path: str) -> None:
    """A label value must not make text into HTML by sniffing."""
    assert served.ask(path)[0].getheader("X-Content-Type-Options") == "nosniff"


def test_nothing_tells_the_version_of_python(served: Served) -> None:
    """The Server header says who we are and no more."""
    assert served.ask("/-/healthy")[0].getheader("Server", "").strip() == "otel-train"


def test_before_the_first_snapshot_everything_answers() -> None:
    """A scrape may come before the first step."""
    server = Served()
    server.sink._collector.snapshot = None
    try:
        assert server.ask("/metrics")[1] == b""
        assert b"No step yet" in server.ask("/")[1]
    finally:
        server.endpoint.close()
    assert server.failures == []


# --- where it listens


def test_it_listens_on_loopback_by_default() -> None:
    """Nobody else can reach a training that did not ask for it."""
    with _monitored() as (monitor, _):
        assert monitor._endpoint is not None
        assert monitor._endpoint._server.socket.getsockname()[0] in {"127.0.0.1", "::1"}
        assert monitor.url == f"http://localhost:{monitor.port}/"
        with urllib.request.urlopen(monitor.url + "-/healthy", timeout=5) as reply:
            assert reply.status == 200


@pytest.mark.parametrize(("host", "expected"), [("127.0.0.1", "http://127.0.0.1:{}/"), ("::1", "http://[::1]:{}/")])
def test_a_given_address_is_listened_on_and_its_url_works(host: str, expected: str) -> None:
    """IPv6 addresses stand in brackets."""
    if ":" in host:
        try:
            with socket.socket(socket.AF_INET6) as probe:
                probe.bind(("::1", 0))
        except OSError:
            pytest.skip("this machine has no IPv6")
    with _monitored(host=host) as (monitor, _):
        assert monitor._endpoint is not None
        assert monitor._endpoint._server.socket.getsockname()[0] == host
        assert monitor.url == expected.format(monitor.port)
        with urllib.request.urlopen(f"{monitor.url}metrics", timeout=5) as reply:
            assert b'run="endpoint"' in reply.read()


def test_a_taken_port_falls_back_to_a_free_one_and_says_which(caplog: pytest.LogCaptureFixture) -> None:
    """Training goes on, and the log tells where to look."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        with caplog.at_level(logging.WARNING, "otel_train"), _monitored(port=port) as (monitor, _):
            assert monitor.port not in {port, None, 0}
            assert [r.getMessage() for r in caplog.records] == [f"port {port} is taken: serving on port {monitor.port} instead"]
            with urllib.request.urlopen(f"{monitor.url}-/healthy", timeout=5) as reply:
                assert reply.status == 200


def test_port_none_means_no_endpoint() -> None:
    """No socket, no thread, and the values are there all the same."""
    with _monitored(port=None) as (monitor, step):
        step()
        monitor.flush()
        assert monitor.url is None
        assert monitor.port is None
        assert "otel-train-endpoint" not in {t.name for t in threading.enumerate()}
        assert monitor.snapshot is not None
        assert monitor.snapshot.value(run.STEPS) == 1


@pytest.mark.parametrize("host", ["192.0.2.1", "nowhere.invalid", "x" * 64, "a..b", "[::1]"])
def test_an_address_that_cannot_be_listened_on_does_not_stop_the_training(host: str, caplog: pytest.LogCaptureFixture) -> None:
    """Said in the log and counted; attach does not raise."""
    with caplog.at_level(logging.WARNING, "otel_train"), _monitored(host=host) as (monitor, step):
        step()
        assert monitor.flush()
        assert monitor.url is None
    assert "no endpoint" in caplog.text


def test_the_port_is_free_after_close() -> None:
    """The next run in the same process gets it."""
    port = free_port()
    for _ in range(2):
        with _monitored(port=port) as (monitor, _):
            assert monitor.port == port


def test_close_ends_connections_that_were_kept_alive(served: Served) -> None:
    """Prometheus keeps its connection: left open it would go on reading the old run's values after the port has a new owner."""
    with served.connect() as connection:
        connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        assert connection.recv(1 << 16).startswith(b"HTTP/1.1 200")
        served.endpoint.close()
        with contextlib.suppress(ConnectionError):
            connection.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n")
        connection.settimeout(2)
        with contextlib.suppress(ConnectionError):
            assert connection.recv(1 << 16) == b"", "still served after close"


def test_close_leaves_no_thread(served: Served) -> None:
    """Also not of clients that are connected and silent."""
    before = set(threading.enumerate())
    with served.connect():
        wait_until(lambda: bool(set(threading.enumerate()) - before), 5, "the connection is taken")
        own = {served.endpoint._thread, *(set(threading.enumerate()) - before)}
        assert len(own) == 2
        served.endpoint.close()
        wait_until(lambda: not any(t.is_alive() for t in own), 2, "the endpoint's threads end")


def test_attaching_again_serves_the_new_run_to_a_connection_kept_from_the_old() -> None:
    """The port stays, so a scraper does not notice; it must see the new run."""
    model = nn.Linear(8, 4)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    port = free_port()
    first = otel_train.attach(model, optimizer, port=port, run="first")
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=5)
    try:
        connection.request("GET", "/metrics")
        assert b'run="first"' in connection.getresponse().read()
        with otel_train.attach(model, optimizer, port=port, run="second") as second:
            assert second.port == port
            try:
                connection.request("GET", "/metrics")
                body = connection.getresponse().read()
            except (ConnectionError, http.client.HTTPException):  # closed: a client connects anew, as Prometheus does
                connection.close()
                connection.request("GET", "/metrics")
                body = connection.getresponse().read()
            assert b'run="second"' in body
    finally:
        connection.close()
        first.close()


def test_the_registry_can_be_mounted_in_an_application_of_the_users_own() -> None:
    """prometheus_client's WSGI application serves what the endpoint would."""
    with _monitored(port=None) as (monitor, step):
        step()
        monitor.flush()
        application = prometheus_client.make_wsgi_app(monitor.registry)
        environ: dict[str, Any] = {}
        wsgiref.util.setup_testing_defaults(environ)
        statuses: list[str] = []

        def start_response(status: str, headers: list[tuple[str, str]], exc_info: object = None) -> Callable[[bytes], object]:
            del headers, exc_info
            statuses.append(status)
            return lambda data: data

        body = b"".join(application(environ, start_response))
        assert statuses == ["200 OK"]
        assert b'otel_train_steps_total{rank="0",run="endpoint"} 1.0' in body


# --- many clients, slow clients, hostile clients


def test_four_scrapers_at_once_cost_one_rendering(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rendered on demand, once a Snapshot."""
    rendered: list[Snapshot] = []
    pieces = Renderer.pieces

    def noted(renderer: Renderer, snapshot: Snapshot) -> Iterator[Piece]:
        rendered.append(snapshot)
        time.sleep(0.05)  # long enough for all to meet
        return pieces(renderer, snapshot)

    monkeypatch.setattr(Renderer, "pieces", noted)
    bodies: list[bytes] = []
    for snapshots in (1, 2):
        served.sink.publish(awkward_snapshot())
        bodies.clear()
        assert _in_threads(4, lambda: bodies.append(served.ask(Accept=PROMETHEUS_3_5, Accept_Encoding="gzip")[1])) == []
        assert len(bodies) == 4
        assert len(set(bodies)) == 1
        assert len(rendered) == snapshots


def _in_threads(count: int, work: Callable[[], object], seconds: float = 30.0) -> list[BaseException]:
    errors: list[BaseException] = []

    def guarded() -> None:
        try:
            work()
        except Exception as error:  # noqa: BLE001  # collected for the test
            errors.append(error)

    threads = [threading.Thread(target=guarded) for _ in range(count)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(seconds)
    assert not any(thread.is_alive() for thread in threads)
    return errors


def test_a_silent_client_blocks_nobody_and_is_dropped(impatient: Served) -> None:
    """It connects and sends nothing."""
    with impatient.connect() as silent:
        began = time.monotonic()
        assert impatient.ask()[0].status == 200
        assert time.monotonic() - began < 0.4
        assert _is_closed(silent, 3)
        assert time.monotonic() - began < 3
    assert impatient.failures == []


def test_half_a_request_is_dropped(impatient: Served) -> None:
    """It begins a header and does not end it."""
    with impatient.connect() as half:
        half.sendall(b"GET /metrics HTTP/1.1\r\nHost: exam")
        assert impatient.ask()[0].status == 200
        assert _is_closed(half, 3)
    assert impatient.failures == []


def test_a_client_that_drips_bytes_is_dropped(impatient: Served) -> None:
    """A byte now and then must not hold a connection for ever: 32 of those would shut Prometheus out."""
    with impatient.connect() as drip:
        began = time.monotonic()
        with contextlib.suppress(ConnectionError):
            drip.sendall(b"GET /metrics HTTP/1.1\r\nX: ")
            while time.monotonic() - began < 4:  # ten times what a client is given
                drip.sendall(b"a")
                time.sleep(0.1)
        assert time.monotonic() - began < 3.5, "still connected after ten time-outs"


def test_a_client_that_does_not_read_is_dropped(impatient: Served) -> None:
    """It asks for more than the sockets' buffers hold and takes nothing."""
    many = tuple(Sample(run.LEARNING_RATE, ("AdamW", f"{i:0200d}"), 1.0) for i in range(40_000))
    impatient.sink.publish(Snapshot((("run", "r"), ("rank", "0")), 0.0, many))
    with socket.socket() as lazy:
        lazy.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        lazy.settimeout(10)
        lazy.connect(("127.0.0.1", impatient.port))
        lazy.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
        wait_until(lambda: bool(impatient.endpoint._server._deadlines), 5, "the request is taken")
        assert impatient.ask("/-/healthy")[0].status == 200
        wait_until(lambda: not impatient.endpoint._server._deadlines, 10, "the client is dropped")
    assert impatient.failures == []


def test_two_hundred_idle_connections_take_few_threads_and_a_scrape_comes_through(impatient: Served) -> None:
    """A flood takes neither the training's memory nor, for longer than a time-out, its scrapes."""
    before = threading.active_count()
    with contextlib.ExitStack() as stack:
        for _ in range(200):
            with contextlib.suppress(OSError):
                stack.enter_context(impatient.connect())
        most = threading.active_count() - before
        assert most <= 40
        began = time.monotonic()
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if impatient.ask()[0].status == 200:
                    break
            assert time.monotonic() - began < 5, "no scrape came through"
            time.sleep(0.05)
    wait_until(lambda: threading.active_count() <= before + 1, 5, "the threads end")
    assert impatient.failures == []


GARBAGE = {
    "nothing": b"",
    "newlines": b"\r\n" * 100,
    "binary": bytes(range(256)) * 20,
    "tls": b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\xaa" * 500,
    "half a request line": b"GET /met",
    "no version": b"GET /metrics\r\n\r\n",
    "bad version": b"GET /metrics HTTP/x.y\r\n\r\n",
    "version 2": b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n",
    "one word": b"GET\r\n\r\n",
    "five words": b"GET / metrics HTTP/1.1 x\r\n\r\n",
    "request line of 1 MB": b"GET /" + b"a" * (1 << 20) + b" HTTP/1.1\r\n\r\n",
    "header of 1 MB": b"GET /metrics HTTP/1.1\r\nX: " + b"a" * (1 << 20) + b"\r\n\r\n",
    "thousand headers": b"GET /metrics HTTP/1.1\r\n" + b"".join(b"X-%d: y\r\n" % i for i in range(1000)) + b"\r\n",
    "header without colon": b"GET /metrics HTTP/1.1\r\nnonsense\r\nHost: x\r\n\r\n",
    "header with a NUL": b"GET /metrics HTTP/1.1\r\nHo\0st: \0\r\n\r\n",
    "header that is not ascii": "GET /metrics HTTP/1.1\r\nAccept: äöü層\r\n\r\n".encode(),
    "path that is not ascii": "GET /m\u00e9trics\u5c64 HTTP/1.1\r\nHost: x\r\n\r\n".encode(),
    "accept without a number": b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=x\r\n\r\n",
    "accept with a number that is none": b"GET /metrics HTTP/1.1\r\nAccept: text/plain;version=1..\r\nConnection: close\r\n\r\n",
    "accept folded": b"GET /metrics HTTP/1.1\r\nAccept: application/openmetrics-text;version=1.0.0\r\n X-Injected: 1\r\n\r\n",
    "time-out that is none": b"GET /metrics HTTP/1.1\r\nX-Prometheus-Scrape-Timeout-Seconds: nan\r\nConnection: close\r\n\r\n",
    "wrong content length": b"GET /metrics HTTP/1.1\r\nContent-Length: -5\r\nConnection: close\r\n\r\n",
    "content length that is none": b"GET /metrics HTTP/1.1\r\nContent-Length: abc\r\nConnection: close\r\n\r\n",
    "expect": b"GET /metrics HTTP/1.1\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n",
    "expect something": b"GET /metrics HTTP/1.1\r\nExpect: the-spanish-inquisition\r\nConnection: close\r\n\r\n",
    "chunked": b"POST /metrics HTTP/1.1\r\nTransfer-Encoding: chunked\r\n\r\nffffffffff\r\nx",
    "absolute": b"GET http://example.org/metrics HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
}


@pytest.mark.parametrize("data", GARBAGE.values(), ids=GARBAGE.keys())
def test_garbage_is_survived_in_silence(
    impatient: Served, data: bytes, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Whatever comes: nothing on the terminal, no failure of ours counted, and the next scrape is answered."""
    with caplog.at_level(logging.DEBUG):
        answer = impatient.raw(data)
        reply, body = impatient.ask()
    assert reply.status == 200
    assert b"otel_train_step" in body
    assert impatient.failures == []
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")
    assert b"X-Injected" not in answer
    assert b"Traceback" not in answer


@pytest.mark.parametrize(
    "accept",
    [b"application/openmetrics-text;version=x", b"text/plain;version=1..", b"application/openmetrics-text;version=1.0.0-rc1"],
)
def test_an_accept_header_that_makes_no_sense_is_answered(served: Served, accept: bytes) -> None:
    """A strange client gets text, not a broken connection, and no failure is counted."""
    answer = served.raw(b"GET /metrics HTTP/1.1\r\nHost: x\r\nAccept: " + accept + b"\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 200 ")
    assert served.failures == []


def test_an_error_of_ours_is_told_to_the_client_and_counted(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Prometheus shows a 500 as such; a connection that is closed would look like a training that died."""

    def broken(accept: str, *, compress: bool) -> tuple[bytes, str]:
        raise ValueError(accept, compress)

    monkeypatch.setattr(served.sink, "render", broken)
    answer = served.raw(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
    assert [type(error) for error in served.failures] == [ValueError]
    assert answer.startswith(b"HTTP/1.1 500 ")
    assert b"Traceback" not in answer


def test_a_body_is_not_taken_for_the_next_request(served: Served) -> None:
    """Behind a proxy that would answer one client with another's request."""
    smuggled = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
    answer = served.raw(b"GET /nothing HTTP/1.1\r\nHost: x\r\nContent-Length: %d\r\n\r\n" % len(smuggled) + smuggled)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert b"is healthy." not in answer


def test_a_chunked_body_is_not_taken_for_the_next_request(served: Served) -> None:
    """As above, with the other way to send a body."""
    smuggled = b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n"
    body = b"%x\r\n" % len(smuggled) + smuggled + b"\r\n0\r\n\r\n"
    answer = served.raw(b"GET /nothing HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n" + body)
    assert answer.count(b"HTTP/1.1 ") == 1
    assert answer.endswith(b"Not found. There are /, /metrics and /-/healthy.\n")


def test_pipelined_requests_are_answered_in_order(served: Served) -> None:
    """HTTP/1.1 allows to send the next before the answer."""
    requests = [b"/-/healthy", b"/nothing", b"/-/healthy", b"/metrics"]
    data = b"".join(b"GET " + path + b" HTTP/1.1\r\nHost: x\r\n\r\n" for path in requests)
    answer = served.raw(data)
    statuses = [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]]
    assert statuses == [b"200", b"404", b"200", b"200"]


def test_expect_100_continue_is_answered_first(served: Served) -> None:
    """Some clients wait for it."""
    answer = served.raw(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\nExpect: 100-continue\r\nConnection: close\r\n\r\n")
    assert answer.startswith(b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 200 OK\r\n")


def test_http_1_0_clients_are_answered_and_closed(served: Served) -> None:
    """Such as old probes."""
    with served.connect() as connection:
        connection.sendall(b"GET /-/healthy HTTP/1.0\r\n\r\n")
        answer = _read_all(connection)
    assert b" 200 OK\r\n" in answer
    assert answer.endswith(b"otel-train is healthy.\n")


def test_clients_that_vanish_while_being_answered_leave_no_trace(
    served: Served, caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """They ask and reset the connection, fifty times."""
    many = tuple(Sample(run.LEARNING_RATE, ("AdamW", f"{i:0200d}"), 1.0) for i in range(5000))
    served.sink.publish(Snapshot((("run", "r"), ("rank", "0")), 0.0, many))
    with caplog.at_level(logging.DEBUG):
        for i in range(50):
            with served.connect() as connection:
                connection.sendall(b"GET /metrics HTTP/1.1\r\nHost: x\r\n\r\n")
                if i % 2:
                    connection.recv(10)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        wait_until(lambda: not served.endpoint._server._deadlines, 10, "the connections are gone")
        assert served.ask()[0].status == 200
    assert served.failures == []
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


def test_many_scrapes_over_one_connection_are_answered(served: Served) -> None:
    """Prometheus keeps its connection."""
    connection = http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)
    try:
        for _ in range(50):
            connection.request("GET", "/metrics", headers={"Accept": PROMETHEUS_3_5})
            assert connection.getresponse().read().endswith(b"# EOF\n")
        assert len(served.endpoint._server._deadlines) == 1
    finally:
        connection.close()


@pytest.fixture
def strict(monkeypatch: pytest.MonkeyPatch) -> Iterator[Served]:
    """Serve a Snapshot at 20 requests a second after a burst of 5."""
    monkeypatch.setattr(endpoint, "_REQUESTS_PER_SECOND", 20.0)
    monkeypatch.setattr(endpoint, "_BURST", 5)
    server = Served()
    yield server
    server.endpoint.close()


def _ask_over_one_connection(port: int, paths: list[str]) -> list[float]:
    """Return how long each answer took."""
    took = []
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", port, timeout=10)) as connection:
        for path in paths:
            began = time.monotonic()
            connection.request("GET", path)
            connection.getresponse().read()
            took.append(time.monotonic() - began)
    return took


def test_new_connections_are_answered_at_the_pace(strict: Served) -> None:
    """Fifteen beyond the burst, at twenty a second."""
    began = time.monotonic()
    for _ in range(20):
        assert strict.ask("/-/healthy")[0].status == 200
    assert 0.7 < time.monotonic() - began < 5


@pytest.mark.parametrize("path", ["/metrics", "/", "/nothing"])
def test_a_hasty_client_is_answered_at_the_pace(strict: Served, path: str) -> None:
    """Over a connection that it keeps; what it asks for makes no difference."""
    took = _ask_over_one_connection(strict.port, [path] * 21)
    assert 0.7 < sum(took) < 5


def test_pipelined_requests_are_answered_at_the_pace(strict: Served) -> None:
    """A client that does not wait for answers is as hasty as can be."""
    began = time.monotonic()
    answer = strict.raw(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n" * 21)
    assert 0.7 < time.monotonic() - began < 5
    assert answer.count(b"HTTP/1.1 200 ") == 21


def test_a_scraper_that_keeps_its_connection_is_not_delayed_by_a_storm(strict: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of eight hasty clients waits for half a second; the scraper, which asks after a while only, does not wait behind them."""
    monkeypatch.setattr(endpoint, "_HASTY_SECONDS", 0.3)
    done = threading.Event()

    def hurry() -> None:
        while not done.is_set():
            _ask_over_one_connection(strict.port, ["/metrics"] * 10)

    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", strict.port, timeout=10)) as scraper:
        scraper.request("GET", "/metrics")
        scraper.getresponse().read()
        storm = [threading.Thread(target=hurry) for _ in range(8)]
        for thread in storm:
            thread.start()
        took = []
        for _ in range(5):
            time.sleep(0.5)
            began = time.monotonic()
            scraper.request("GET", "/metrics")
            scraper.getresponse().read()
            took.append(time.monotonic() - began)
        done.set()
    strict.endpoint._server.hasty.end()
    for thread in storm:
        thread.join(20)
    assert sorted(took)[2] < 0.1


def test_close_does_not_wait_for_those_who_wait_for_their_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Their threads end with the endpoint."""
    monkeypatch.setattr(endpoint, "_REQUESTS_PER_SECOND", 1 / 60)
    monkeypatch.setattr(endpoint, "_BURST", 2)
    server = Served()
    before = set(threading.enumerate())
    with server.connect() as hasty:
        hasty.sendall(b"GET /-/healthy HTTP/1.1\r\nHost: x\r\n\r\n" * 5)
        wait_until(lambda: server.endpoint._server.hasty._next > time.monotonic() + 120, 5, "a request waits")
        began = time.monotonic()
        server.endpoint.close()
        assert time.monotonic() - began < 3
        wait_until(lambda: not set(threading.enumerate()) - before, 5, "the threads end")


def test_a_thousand_connections_at_once_do_not_keep_a_scrape_out_for_long(impatient: Served) -> None:
    """They come all together and stay; the next scraper is answered once those that got in are dropped."""
    with contextlib.ExitStack() as stack:
        for _ in range(1000):
            flood = stack.enter_context(socket.socket())
            flood.setblocking(False)
            flood.connect_ex(("127.0.0.1", impatient.port))
        began = time.monotonic()
        while True:
            with contextlib.suppress(OSError, http.client.HTTPException):
                if impatient.ask()[0].status == 200:
                    break
            assert time.monotonic() - began < 20, "no scrape came through"
            time.sleep(0.05)
    assert impatient.failures == []


def _burned(seconds: float) -> bytes:
    began = time.thread_time()
    while time.thread_time() - began < seconds:
        pass
    return b""


def test_all_processor_time_of_the_endpoint_is_counted_once(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    """Request by request on a connection that stays, and nothing of it again when the connection ends."""
    monkeypatch.setattr(served.sink, "page", lambda: _burned(0.1))
    began, before = time.process_time(), served.endpoint.cpu_seconds
    with contextlib.closing(http.client.HTTPConnection("127.0.0.1", served.port, timeout=10)) as connection:
        for number in range(1, 4):
            connection.request("GET", "/")
            connection.getresponse().read()
            wait_until(lambda number=number: served.endpoint.cpu_seconds - before > 0.1 * number, 5, "it is counted")  # type: ignore[misc]
    wait_until(lambda: not served.endpoint._server._deadlines, 5, "the connection ends")
    time.sleep(0.2)
    assert served.endpoint.cpu_seconds - before <= time.process_time() - began


def test_the_endpoints_processor_time_is_exported() -> None:
    """As the part `endpoint` of the monitor's own cost."""
    with _monitored() as (monitor, step):
        step()
        for _ in range(20):
            with urllib.request.urlopen(f"{monitor.url}metrics", timeout=5) as reply:
                reply.read()
        assert monitor._endpoint is not None
        wait_until(lambda: not monitor._endpoint._server._deadlines, 5, "all is counted")  # type: ignore[union-attr]
        counted = monitor._endpoint.cpu_seconds
        step()
        monitor.flush()
        assert monitor.snapshot is not None
        seconds = monitor.snapshot.value(MONITOR_SECONDS, part="endpoint")
        assert seconds is not None
        assert 0 < counted <= seconds < counted + 0.5


def test_a_storm_of_scrapes_does_not_disturb_the_training(
    caplog: pytest.LogCaptureFixture, capfd: pytest.CaptureFixture[str]
) -> None:
    """Four scrapers as fast as they can, while steps are made: every answer whole, nothing raised, every step counted."""
    with caplog.at_level(logging.WARNING, "otel_train"), _monitored(every_n_steps=2) as (monitor, step):
        done = threading.Event()
        bodies: list[bytes] = []

        def scrape() -> None:
            for _ in range(3000):
                if done.is_set():
                    return
                with urllib.request.urlopen(f"{monitor.url}metrics", timeout=10) as reply:
                    bodies.append(reply.read())

        def make_steps() -> None:
            try:
                for number in range(40):
                    step()
                    if number % 10 == 0:
                        monitor.flush()
                    time.sleep(0.01)
            finally:
                done.set()

        trainer = threading.Thread(target=make_steps)
        trainer.start()
        errors = _in_threads(4, scrape, 60)
        trainer.join(60)
        assert errors == []
        monitor.flush()
        assert len(bodies) > 50
        assert all(body.endswith(b"\n") for body in bodies)
        assert all(len(list(parse_text(body.decode()))) > 20 for body in bodies[:: max(1, len(bodies) // 10)])
        assert monitor.snapshot is not None
        assert monitor.snapshot.value(run.STEPS) == 40
        assert monitor._guard.errors == dict.fromkeys(monitor._guard.errors, 0)
    assert caplog.text == ""
    assert capfd.readouterr() == ("", "")


# --- the end


@pytest.mark.parametrize("looks", [0, 3])
def test_close_returns_at_once_where_nobody_scrapes(looks: int) -> None:
    """Nobody stores the end, so nobody waits for it; a person who looks with a browser is no Prometheus."""
    with _monitored() as (monitor, step):
        step()
        for _ in range(looks):
            with urllib.request.urlopen(f"{monitor.url}metrics", timeout=5) as reply:
                assert reply.status == 200
        began = time.monotonic()
        monitor.close()
        assert time.monotonic() - began < 1


def test_close_waits_for_the_scrape_that_stores_the_end() -> None:
    """It goes on serving until a Prometheus has seen run_active 0, and then returns."""
    with _monitored() as (monitor, step):
        step()
        url = f"{monitor.url}metrics"
        request = urllib.request.Request(url, headers={"X-Prometheus-Scrape-Timeout-Seconds": "1"})
        seen: list[bytes] = []

        def scrape() -> None:
            with urllib.request.urlopen(request, timeout=5) as reply:
                seen.append(reply.read())

        scrape()
        scraper = threading.Timer(0.7, scrape)
        scraper.start()
        began = time.monotonic()
        monitor.close()
        took = time.monotonic() - began
        scraper.join(5)
        assert 0.5 < took < 1.6
        assert b"otel_train_run_active{" in seen[0]
        assert b'otel_train_run_active{rank="0",run="endpoint"} 1.0' in seen[0]
        assert b'otel_train_run_active{rank="0",run="endpoint"} 0.0' in seen[1]


def test_close_waits_no_longer_than_twice_the_interval() -> None:
    """A Prometheus that went away does not hold the job."""
    with _monitored() as (monitor, step):
        step()
        request = urllib.request.Request(f"{monitor.url}metrics", headers={"X-Prometheus-Scrape-Timeout-Seconds": "5"})
        for _ in range(3):
            with urllib.request.urlopen(request, timeout=5) as reply:
                reply.read()
            time.sleep(0.3)
        began = time.monotonic()
        monitor.close()
        assert time.monotonic() - began < 1.5


def test_a_sink_may_close_the_monitor_without_a_wait_for_itself() -> None:
    """Snapshots are published by the monitor's own thread; a close from there must not wait for that thread."""
    took: list[float] = []

    class Ends:
        monitor: Monitor | None = None

        def publish(self, snapshot: Snapshot) -> None:
            if self.monitor is not None and snapshot.value(run.STEPS):
                monitor, self.monitor = self.monitor, None
                began = time.monotonic()
                monitor.close()
                took.append(time.monotonic() - began)

        def close(self) -> None:
            """Nothing to let go of."""

    sink = Ends()
    with _monitored(port=None, sinks=[sink]) as (monitor, step):
        sink.monitor = monitor
        step()
        monitor.flush(3)
        wait_until(lambda: bool(took), 15, "close returns")
    assert took[0] < 2


@pytest.mark.parametrize("connected", [False, True])
def test_an_endpoint_that_nobody_asks_sleeps(served: Served, *, connected: bool) -> None:
    """To look for connections ten times a second takes 2 ms a second from a training on all cores."""
    with contextlib.ExitStack() as stack:
        if connected:
            stack.enter_context(socket.create_connection(("127.0.0.1", served.endpoint.port)))
            time.sleep(0.3)
        before = served.endpoint.cpu_seconds
        time.sleep(2)
        assert served.endpoint.cpu_seconds - before < 0.0005


def test_a_serving_thread_that_fails_is_told_of_and_does_not_hold_up_the_end(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whatever the system does to it: closing is part of the user's training."""

    def failing(_: object) -> None:
        raise OSError("no more files")

    monkeypatch.setattr(endpoint._Server, "service_actions", failing)
    with served.connect():
        wait_until(lambda: not served.endpoint._thread.is_alive(), 10, "the serving thread has ended")
    assert [str(error) for error in served.failures] == ["no more files"]
    began = time.monotonic()
    served.endpoint.close()
    assert time.monotonic() - began < 2
