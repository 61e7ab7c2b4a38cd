"""A collector on loopback that takes OTLP over HTTP, keeps what it was sent, and answers as a test has it answer."""

from __future__ import annotations

import contextlib
import gzip
import ssl
import threading
from collections.abc import Callable, Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest, ExportMetricsServiceResponse

Answer = Callable[["Handler"], None]


def taken(handler: Handler) -> None:
    """Take everything."""
    handler.reply(200, ExportMetricsServiceResponse().SerializeToString())


def status(code: int, **headers: str) -> Answer:
    """Answer with a status."""
    return lambda handler: handler.reply(code, b"no", **headers)


def taken_but(rejected: int, why: str) -> Answer:
    """Take all points but some."""
    answer = ExportMetricsServiceResponse()
    answer.partial_success.rejected_data_points, answer.partial_success.error_message = rejected, why
    return lambda handler: handler.reply(200, answer.SerializeToString())


def cut_short(handler: Handler) -> None:
    """Promise an answer and close the connection in the middle of it."""
    handler.wfile.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\nhalf of it")
    handler.close_connection = True


def hanging(seconds: float) -> Answer:
    """Say nothing for a while, then close the connection."""

    def hang(handler: Handler) -> None:
        handler.server.ended.wait(seconds)
        handler.close_connection = True

    return hang


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    server: Collector

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        if self.headers.get("Content-Encoding") == "gzip":
            body = gzip.decompress(body)
        self.server.take(self, body)

    def reply(self, code: int, body: bytes, **headers: str) -> None:
        self.send_response(code)
        for name, value in headers.items():
            self.send_header(name.replace("_", "-"), value)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: Any) -> None:
        pass


class Collector(ThreadingHTTPServer):
    """Listens on a free port of 127.0.0.1.

    Attributes:
        answer: What it does with a request.
        accepted: The requests that it took, in their order.
        bodies: Sizes of all requests.
        headers: Of the last request.
    """

    daemon_threads = True

    def __init__(self, answer: Answer = taken, port: int = 0, tls: ssl.SSLContext | None = None) -> None:
        self.answer, self.ended = answer, threading.Event()
        self.accepted: list[ExportMetricsServiceRequest] = []
        self.bodies: list[int] = []
        self.paths: list[str] = []
        self.headers: dict[str, str] = {}
        self.most_bytes: int | None = None
        super().__init__(("127.0.0.1", port), Handler)
        if tls is not None:
            self.socket = tls.wrap_socket(self.socket, server_side=True)
        self.url = f"http{'' if tls is None else 's'}://127.0.0.1:{self.server_port}"

    def take(self, handler: Handler, body: bytes) -> None:
        self.bodies.append(len(body))
        self.paths.append(handler.path)
        self.headers = {name.lower(): value for name, value in handler.headers.items()}
        if self.most_bytes is not None and len(body) > self.most_bytes:
            handler.reply(413, b"")
            return
        answer = self.answer
        if answer is taken:
            self.accepted.append(ExportMetricsServiceRequest.FromString(body))
        answer(handler)

    def handle_error(self, *_: Any) -> None:
        """Say nothing: clients that go away are what tests make."""


@contextlib.contextmanager
def collector(answer: Answer = taken, port: int = 0, tls: ssl.SSLContext | None = None) -> Iterator[Collector]:
    """Run a collector."""
    server = Collector(answer, port, tls)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.05}, daemon=True)
    thread.start()
    try:
        yield server
    finally:
        server.ended.set()
        server.shutdown()
        server.server_close()
        thread.join(5)


def points(request: ExportMetricsServiceRequest) -> dict[tuple[str, tuple[tuple[str, str], ...]], Any]:
    """Return the data points of a request by metric and labels."""
    found = {}
    for scope in (scope for of_resource in request.resource_metrics for scope in of_resource.scope_metrics):
        for metric in scope.metrics:
            for point in getattr(metric, str(metric.WhichOneof("data"))).data_points:
                labels = tuple(sorted((label.key, label.value.string_value) for label in point.attributes))
                assert (metric.name, labels) not in found, f"{metric.name} {labels} is there twice"
                found[metric.name, labels] = point
    return found


def numbers(request: ExportMetricsServiceRequest, name: str) -> list[float]:
    """Return the values of a metric."""
    return [point.as_double for (metric, _), point in points(request).items() if metric == name]
