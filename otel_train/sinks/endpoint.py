"""The HTTP endpoint: /metrics, a page for a person, and a health check; own threads, time-outs and a limit of connections."""

from __future__ import annotations

import contextlib
import errno
import logging
import math
import os
import re
import selectors
import socket
import sys
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any
from urllib.parse import urlsplit

from otel_train.sinks.prometheus import PrometheusSink
from otel_train.sinks.throttle import Throttle

_LOG = logging.getLogger("otel_train")

_Selector = getattr(selectors, "PollSelector", selectors.SelectSelector)  # needs no file of its own, which a fork would inherit

_CLIENT_SECONDS = 10.0
"""A client that sends or takes nothing for so long is dropped."""
_SCRAPERS = 8
"""Scrapers at most that are told apart, by address and user agent: connections come and go between scrapes."""
_GONE = 5
"""A scraper that is silent for so many of its intervals has gone away; a busy machine delays one by a few."""
_CONNECTIONS = 32
"""Connections at a time; more are closed at once, so that a flood takes no threads from the training."""
_REQUESTS_PER_SECOND, _CONNECTIONS_PER_SECOND, _BURST = 5.0, 100.0, 64
"""Hasty requests that are answered, and connections that are accepted or refused, a second once a burst is used up; the others wait
for their turn, 6 s at most with so many connections. An answer holds a training on two cores up by about 2 ms."""
_HASTY_SECONDS = 0.5
"""A request is hasty if it is its connection's first, or has come so soon after the last answer. A Prometheus keeps its connection
and asks once a second at most: no storm of others delays it."""


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
        self._scrapes: dict[str, deque[_Scrape]] = {}
        self._scraped = threading.Condition()
        self._server = _listen(host, port)
        self._server.prepare(sink, failed, self._note_scrape)
        self.port = int(self._server.server_address[1])
        self.host = host
        self._thread = threading.Thread(target=self._server.serve_forever, name="otel-train-endpoint", daemon=True)
        self._thread.start()

    @property
    def cpu_seconds(self) -> float:
        """Processor time that its threads took."""
        return self._server.cpu_seconds

    @property
    def url(self) -> str:
        """Where a person or Prometheus finds it."""
        return f"http://{f'[{self.host}]' if ':' in self.host else self.host}:{self.port}/"

    def _note_scrape(self, client: str, scrape: _Scrape) -> None:
        with self._scraped:
            if client in self._scrapes or len(self._scrapes) < _SCRAPERS:
                self._scrapes.setdefault(client, deque(maxlen=4)).append(scrape)
            self._scraped.notify_all()

    def wait_for_scrape(self) -> None:
        """Wait until each Prometheus that is scraping has scraped once more, for at most twice the interval seen."""
        now = time.monotonic()
        with self._scraped:
            intervals = {client: _interval(scrapes) for client, scrapes in self._scrapes.items()}
            due = [client for client, interval in intervals.items() if now - self._scrapes[client][-1].began < _GONE * interval]

            def all_have() -> bool:
                return all(self._scrapes[client][-1].began >= now for client in due)

            self._scraped.wait_for(all_have, max((2 * intervals[client] for client in due), default=0.0))

    def close(self) -> None:
        """Stop listening, drop all connections and end the threads; from within the serving thread it does not wait for that."""
        if threading.current_thread() is not self._thread:
            self._server.stop()
            return
        with contextlib.suppress(RuntimeError):  # no thread can be started at the interpreter's end, which ends this one too
            threading.Thread(target=self._server.stop, name="otel-train-endpoint-stop", daemon=True).start()

    def close_in_child(self) -> None:
        """Let go of the sockets that a forked process has inherited, so that they do not outlive the training."""
        self._server.drop_sockets()


@dataclass(frozen=True, slots=True)
class _Scrape:
    began: float
    """On the monotonic clock."""
    timeout: float
    """What the scraper says that it waits; never longer than its interval."""


def _interval(scrapes: deque[_Scrape]) -> float:
    """Return the longest interval between the last scrapes; with one scrape only its time-out stands for it."""
    began = [scrape.began for scrape in scrapes]
    return max((b - a for a, b in pairwise(began)), default=scrapes[-1].timeout)


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
        self._deadlines: dict[socket.socket, float] = {}
        """Of each open connection: when the request under way must have come and been answered."""
        self._lock = threading.Lock()
        self.hasty = Throttle(_REQUESTS_PER_SECOND, _BURST)
        self._connecting = Throttle(_CONNECTIONS_PER_SECOND, _BURST)
        self.cpu_seconds = 0.0
        self._thread = threading.local()
        self._stopping, self._stopped = threading.Event(), threading.Event()
        super().__init__(address[1], _Handler)
        self._wakes, self._woken = socket.socketpair()

    def prepare(
        self, sink: PrometheusSink, failed: Callable[[BaseException], None], scraped: Callable[[str, _Scrape], None]
    ) -> None:
        self.sink, self.failed, self.scraped = sink, failed, scraped

    def server_bind(self) -> None:
        # HTTPServer would look up the host's name, which can take seconds
        self.socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self.socket.bind(self.server_address)
        self.server_address = self.socket.getsockname()
        self.server_name, self.server_port = str(self.server_address[0]), int(self.server_address[1])

    def serve_forever(self, poll_interval: float = 0.5) -> None:
        """Serve until ``shutdown``; asleep where nothing is due, since looking ten times a second takes 0.2 % of a busy core."""
        del poll_interval
        try:
            self._serve()
        except Exception as error:  # noqa: BLE001  # nobody else would hear of it
            self.failed(error)
        finally:
            self._stopped.set()

    def _serve(self) -> None:
        with _Selector() as selector:
            selector.register(self, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while not self._stopping.is_set():
                ready = [key.fileobj for key, _ in selector.select(self._patience())]
                if self in ready and not self._stopping.is_set():
                    self._handle_request_noblock()  # type: ignore[attr-defined]  # as socketserver does; typeshed leaves it out
                self.service_actions()

    def _patience(self) -> float | None:
        """Return the seconds until a connection may be over its time; None where there is none."""
        with self._lock:
            deadline = min(self._deadlines.values(), default=None)
        return None if deadline is None else max(deadline - time.monotonic(), 0.05)

    def shutdown(self) -> None:
        if not self._stopping.is_set():
            self._stopping.set()
            self._wakes.send(b"!")
        self._stopped.wait(_CLIENT_SECONDS)  # the training goes on in any case

    def verify_request(self, request: Any, client_address: Any) -> bool:
        del client_address
        self._connecting.wait()
        with self._lock:
            if len(self._deadlines) >= _CONNECTIONS:
                return False
            self._deadlines[request] = time.monotonic() + _CLIENT_SECONDS
            return True

    def process_request(self, request: Any, client_address: Any) -> None:
        try:
            super().process_request(request, client_address)
        except RuntimeError:  # Python 3.12 starts no thread at the interpreter's end: answer here, for the last scrape
            self.process_request_thread(request, client_address)

    def extend(self, request: Any) -> None:
        """Give a connection time for another request."""
        with self._lock:
            if request in self._deadlines:
                self._deadlines[request] = time.monotonic() + _CLIENT_SECONDS

    def service_actions(self) -> None:
        """Drop the connections that are over their time: a client that drips bytes must not keep others out."""
        self.count_cpu_seconds()
        now = time.monotonic()
        with self._lock:
            late = [connection for connection, deadline in self._deadlines.items() if deadline < now]
        for connection in late:
            _hang_up(connection)

    def shutdown_request(self, request: Any) -> None:
        with self._lock:
            self._deadlines.pop(request, None)
        super().shutdown_request(request)
        self.count_cpu_seconds()

    def count_cpu_seconds(self) -> None:
        """Count what the calling thread took since it last came here."""
        with contextlib.suppress(OSError):  # no thread clock on some platforms
            now = time.thread_time()
            with self._lock:
                self.cpu_seconds += now - getattr(self._thread, "counted", 0.0)
            self._thread.counted = now

    def handle_error(self, request: Any, client_address: Any) -> None:
        del request, client_address
        error = sys.exc_info()[1]
        if error is not None and not isinstance(error, (ConnectionError, TimeoutError)):
            self.failed(error)

    def stop(self) -> None:
        self._connecting.end()
        self.hasty.end()
        self.shutdown()
        self.server_close()
        for end in (self._wakes, self._woken):
            end.close()
        with self._lock:
            connections = list(self._deadlines)
        for connection in connections:
            _hang_up(connection)

    def drop_sockets(self) -> None:
        """Close this process's copies and nothing else: hanging up would cut off the parent's clients. Takes no lock, for forks."""
        for connection in (self.socket, self._wakes, self._woken, *list(self._deadlines)):
            with contextlib.suppress(OSError):
                os.close(connection.detach())


def _hang_up(connection: socket.socket) -> None:
    """End a connection under its handler's feet; closing it would only drop our reference."""
    with contextlib.suppress(OSError):
        connection.shutdown(socket.SHUT_RDWR)


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    protocol_version = "HTTP/1.1"
    server_version = "otel-train"
    sys_version = ""
    timeout = _CLIENT_SECONDS
    wbufsize = 1 << 16  # head and body in one packet
    _answered = math.inf  # on the monotonic clock; the first request is hasty

    def do_GET(self) -> None:
        if time.monotonic() - self._answered < _HASTY_SECONDS:
            self.server.hasty.wait()
        if self.headers.get("Content-Length") or self.headers.get("Transfer-Encoding"):
            self.close_connection = True  # its body is not read, and must not be taken for the next request
        try:
            path = urlsplit(self.path).path
            if path == "/metrics":
                self._metrics()
            elif path == "/":
                self._reply(self.server.sink.page(), "text/html; charset=utf-8")
            elif path == "/-/healthy":
                self._reply(b"otel-train is healthy.\n")
            else:
                self._reply(b"Not found. There are /, /metrics and /-/healthy.\n", status=HTTPStatus.NOT_FOUND)
        except OSError:
            raise  # the client went away
        except Exception as error:  # noqa: BLE001  # whatever it is, the client is told, and the training never
            self.server.failed(error)
            self._reply(
                b"The exposition could not be rendered; the training's log says why.\n", status=HTTPStatus.INTERNAL_SERVER_ERROR
            )
        self._answered = time.monotonic()
        self.server.extend(self.connection)
        self.server.count_cpu_seconds()

    do_HEAD = do_GET  # noqa: N815  # http.server looks for this name

    def _metrics(self) -> None:
        began = time.monotonic()
        compress = _accepts_gzip(self.headers.get("Accept-Encoding", ""))
        body, content_type = self.server.sink.render(self.headers.get("Accept", ""), compress=compress)
        self._reply(body, content_type, encoding="gzip" if compress else None)
        timeout = self.headers.get("X-Prometheus-Scrape-Timeout-Seconds")  # a Prometheus, not a person
        if timeout is not None and self.command == "GET":
            client = f"{self.client_address[0]} {self.headers.get('User-Agent', '')}"
            self.server.scraped(client, _Scrape(began, _seconds(timeout)))

    def _reply(
        self,
        body: bytes,
        content_type: str = "text/plain; charset=utf-8",
        *,
        status: HTTPStatus = HTTPStatus.OK,
        encoding: str | None = None,
    ) -> None:
        self.send_response(status)
        self.send_header("Content-Type", content_type)
        self.send_header("Content-Length", str(len(body)))
        self.send_header("X-Content-Type-Options", "nosniff")
        if encoding:
            self.send_header("Content-Encoding", encoding)
        if self.close_connection:
            self.send_header("Connection", "close")
        self.end_headers()
        if self.command != "HEAD":
            self.wfile.write(body)
        self.wfile.flush()  # a scrape counts once it is on its way

    def log_message(self, format: str, *args: Any) -> None:  # noqa: A002  # the base class names it so
        """Say nothing: the training's terminal is the user's."""


def _accepts_gzip(header: str) -> bool:
    """Say whether an Accept-Encoding header names gzip, and not with quality 0."""
    for part in header.lower().split(","):
        name, _, parameter = part.partition(";")
        if name.strip() == "gzip":
            return not re.fullmatch(r"q=0(\.0*)?", parameter.replace(" ", ""))
    return False


def _seconds(text: str) -> float:
    try:
        return min(max(float(text), 0.0), 60.0)
    except ValueError:
        return 10.0
