"""The HTTP endpoint: /metrics, a page for a person, and a health check; own threads, time-outs and a limit of connections."""

from __future__ import annotations

import errno
import logging
import socket
import sys
import threading
import time
from collections.abc import Callable
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

from otel_train.sinks.page import render_page
from otel_train.sinks.prometheus import PrometheusSink

_LOG = logging.getLogger("otel_train")

_CLIENT_SECONDS = 10.0
"""A client that sends or takes nothing for so long is dropped."""
_CONNECTIONS = 32
"""Connections at a time; more are closed at once, so that a flood takes no threads from the training."""


class Endpoint:
    """Serves a sink over HTTP in threads of its own.

    Args:
        sink: What to serve.
        host: Address to listen on.
        port: Port to listen on; where it is taken, any free one. 0: any free one.
        failed: Told of failures.

    Raises:
        OSError: The address cannot be listened on at all.
    """

    def __init__(self, sink: PrometheusSink, host: str, port: int, failed: Callable[[BaseException], None]) -> None:
        self._scrapes: list[tuple[float, float]] = []
        self._scraped = threading.Condition()
        self._server = _listen(host, port)
        self._server.prepare(sink, failed, self._note_scrape)
        self.port = int(self._server.server_address[1])
        self.host = host
        self._thread = threading.Thread(target=self._serve, name="otel-train-endpoint", daemon=True)
        self._thread.start()

    @property
    def url(self) -> str:
        """Where a person or Prometheus finds it."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"

    def _serve(self) -> None:
        self._server.serve_forever(poll_interval=0.1)

    def _note_scrape(self, began: float, timeout: float) -> None:
        with self._scraped:
            self._scrapes = [*self._scrapes[-7:], (began, timeout)]
            self._scraped.notify_all()

    def wait_for_scrape(self) -> bool:
        """Once scraped by a Prometheus, wait for one scrape that begins after this call, for at most twice the interval seen.

        With one scrape only there is no interval yet: its time-out, which is never longer than the interval, stands for it.
        """
        now = time.monotonic()
        with self._scraped:
            if not self._scrapes:
                return False
            begins = [began for began, _ in self._scrapes]
            gaps = [b - a for a, b in pairwise(begins)]
            interval = max(gaps[-3:], default=self._scrapes[-1][1])
            deadline = begins[-1] + 2 * interval - now
            return self._scraped.wait_for(lambda: self._scrapes[-1][0] >= now, max(deadline, 0.0))

    def close(self) -> None:
        """Stop listening and end the threads; from within the serving thread it does not wait for that."""
        stop = threading.Thread(target=self._server.stop, name="otel-train-endpoint-stop", daemon=True)
        stop.start()
        if threading.current_thread() is not self._thread:
            stop.join(_CLIENT_SECONDS)

    def close_in_child(self) -> None:
        """Close the sockets that a forked process has inherited, so that they do not outlive the training."""
        self._server.close_sockets()


def _listen(host: str, port: int) -> _Server:
    address = _resolve(host, port)
    try:
        return _Server(address)
    except OSError as error:
        if error.errno != errno.EADDRINUSE:
            raise
        server = _Server((address[0], (address[1][0], 0, *address[1][2:])))
        _LOG.warning("port %d is taken: serving on port %d instead", port, server.server_address[1])
        return server


def _resolve(host: str, port: int) -> tuple[socket.AddressFamily, Any]:
    """Return family and address; IPv4 first where a name has both, as ``localhost`` has."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    found.sort(key=lambda entry: entry[0] is not socket.AF_INET)
    return found[0][0], found[0][4]


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False
    request_queue_size = 64

    def __init__(self, address: tuple[socket.AddressFamily, Any]) -> None:
        self.address_family = address[0]
        self._connections: set[socket.socket] = set()
        self._lock = threading.Lock()
        super().__init__(address[1], _Handler)

    def prepare(
        self, sink: PrometheusSink, failed: Callable[[BaseException], None], scraped: Callable[[float, float], None]
    ) -> None:
        self.sink, self.failed, self.scraped = sink, failed, scraped

    def server_bind(self) -> None:
        # HTTPServer would look up the host's name, which can take seconds
        socket.socket.setsockopt(self.socket, socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def verify_request(self, request: Any, client_address: Any) -> bool:
        del client_address
        with self._lock:
            if len(self._connections) >= _CONNECTIONS:
                return False
            self._connections.add(request)
            return True

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._connections.discard(request)
        super().shutdown_request(request)

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request, client_address
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, (ConnectionError, TimeoutError)):
            self.failed(error)

    def stop(self) -> None:
        self.shutdown()
        self.close_sockets()

    def close_sockets(self) -> None:
        self.server_close()
        for connection in list(self._connections):
            connection.close()


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "otel-train"
    sys_version = ""
    timeout = _CLIENT_SECONDS

    def do_GET(self) -> None:
        path = self.path.partition("?")[0]
        if path == "/metrics":
            self._metrics()
        elif path == "/":
            self._reply(render_page(self.server.sink.snapshot).encode(), "text/html; charset=utf-8")
        elif path == "/-/healthy":
            self._reply(b"otel-train is healthy.\n", "text/plain; charset=utf-8")
        else:
            self._reply(b"Not found. There are /, /metrics and /-/healthy.\n", "text/plain; charset=utf-8", HTTPStatus.NOT_FOUND)

    do_HEAD = do_GET  # noqa: N815  # http.server looks for this name

    def _metrics(self) -> None:
        began = time.monotonic()
        compress = "gzip" in self.headers.get("Accept-Encoding", "")
        body, content_type = self.server.sink.render(self.headers.get("Accept", ""), compress=compress)
        self._reply(body, content_type, encoding="gzip" if compress else None)
        timeout = self.headers.get("X-Prometheus-Scrape-Timeout-Seconds")  # a Prometheus, not a person
        if timeout is not None:
            self.server.scraped(began, _seconds(timeout))

    def _reply(self, body: bytes, content_type: str, status: HTTPStatus = HTTPStatus.OK, encoding: str | None = None) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if encoding:
            self.send_header("Content-Encoding", encoding)
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class names it so
        """Say nothing: the training's terminal is the user's."""


def _seconds(text: str) -> float:
    try:
        return min(max(float(text), 0.0), 60.0)
    except ValueError:
        return 10.0
