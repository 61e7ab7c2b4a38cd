"""A webhook that takes Alertmanager's messages, and serves the runbooks that they link to."""

from __future__ import annotations

import hmac
import json
import threading
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

_LARGEST = 4_000_000
"""Bytes of a message at most."""


@dataclass(frozen=True, slots=True)
class ReceivedAlert:
    """One alert of a message, as Alertmanager sent it."""

    firing: bool
    fingerprint: str
    labels: Mapping[str, str]
    annotations: Mapping[str, str]

    @property
    def name(self) -> str:
        """The alert's name."""
        return self.labels.get("alertname", "?")


class Receiver:
    """Listens on loopback.

    Args:
        port: Where.
        token: The bearer token that a message must bring.
        runbooks: Text by file name.
        received: Called with the alerts of each message, in a thread of the receiver.
    """

    def __init__(
        self, port: int, token: str, runbooks: Mapping[str, str], received: Callable[[tuple[ReceivedAlert, ...]], None]
    ) -> None:
        self._server = _Server(("127.0.0.1", port), _Handler)
        self._server.expected, self._server.runbooks, self._server.received = f"Bearer {token}", runbooks, received
        self.url = f"http://127.0.0.1:{port}"
        threading.Thread(target=self._server.serve_forever, args=(0.1,), name="otel-train-webhook", daemon=True).start()

    def close(self) -> None:
        """Stop listening."""
        self._server.shutdown()
        self._server.server_close()


class _Server(ThreadingHTTPServer):
    daemon_threads = True

    def handle_error(self, request: object, client_address: object) -> None:
        """Say nothing of clients that went away: the screen belongs to the alerts."""

    expected: str
    runbooks: Mapping[str, str]
    received: Callable[[tuple[ReceivedAlert, ...]], None]


class _Handler(BaseHTTPRequestHandler):
    server: _Server
    timeout = 10.0

    def do_POST(self) -> None:
        """Take a message."""
        if not hmac.compare_digest(self.headers.get("Authorization", "").encode(), self.server.expected.encode()):
            return self._answer(HTTPStatus.UNAUTHORIZED, "expected the token of secrets/webhook_token\n")
        length = self.headers.get("Content-Length", "")
        if not length.isdecimal() or int(length) > _LARGEST:
            return self._answer(HTTPStatus.REQUEST_ENTITY_TOO_LARGE, f"expected at most {_LARGEST} bytes\n")
        try:
            alerts = _alerts(json.loads(self.rfile.read(int(length))))
        except (ValueError, KeyError, TypeError, AttributeError, RecursionError):
            return self._answer(HTTPStatus.BAD_REQUEST, "expected a message of Alertmanager, version 4\n")
        self.server.received(alerts)
        return self._answer(HTTPStatus.OK, "")

    def do_GET(self) -> None:
        """Serve a runbook."""
        text = self.server.runbooks.get(self.path.removeprefix("/runbooks/"))
        if text is None:
            return self._answer(HTTPStatus.NOT_FOUND, "\n".join(f"/runbooks/{name}" for name in self.server.runbooks) + "\n")
        return self._answer(HTTPStatus.OK, text)

    def log_message(self, *unused: object) -> None:
        """Say nothing: the screen belongs to the alerts."""

    def _answer(self, status: HTTPStatus, text: str) -> None:
        body = text.encode()
        self.send_response(status)
        self.send_header("Content-Type", "text/plain; charset=utf-8")
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


def _alerts(message: dict[str, Any]) -> tuple[ReceivedAlert, ...]:
    return tuple(
        ReceivedAlert(
            alert["status"] == "firing", str(alert["fingerprint"]), dict(alert["labels"]), dict(alert.get("annotations", {}))
        )
        for alert in message["alerts"]
    )
