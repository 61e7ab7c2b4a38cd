"""The webhook: takes Alertmanager's messages, refuses others, serves runbooks."""

from __future__ import annotations

import json
import socket
import struct
import urllib.error
import urllib.request
from collections.abc import Iterator
from typing import Any

import pytest

from otel_train.stack import Announcer
from otel_train.stack.receiver import ReceivedAlert, Receiver
from tests.servers import free_port, get

ALERT = {
    "status": "firing", "fingerprint": "f1", "labels": {"alertname": "A", "severity": "warning", "run": "r", "layer": "fc"},
    "annotations": {"description": "Layer fc of run r is bad.", "runbook_url": "http://x/A.md"},
}  # fmt: skip


@pytest.fixture
def messages() -> list[tuple[ReceivedAlert, ...]]:
    """Return where messages go."""
    return []


@pytest.fixture
def receiver(messages: list[tuple[ReceivedAlert, ...]]) -> Iterator[Receiver]:
    """Run a webhook."""
    running = Receiver(free_port(), "token", {"A.md": "# A"}, messages.append)
    yield running
    running.close()


def post(url: str, body: bytes, token: str = "token") -> int:
    """Send a message and return the status of the answer."""
    request = urllib.request.Request(f"{url}/alerts", body, {"Authorization": f"Bearer {token}"})
    try:
        with urllib.request.urlopen(request, timeout=5) as reply:
            return int(reply.status)
    except urllib.error.HTTPError as error:
        return error.code


def test_a_message_is_taken_as_it_was_sent(receiver: Receiver, messages: list[tuple[ReceivedAlert, ...]]) -> None:
    """Status, labels, annotations."""
    resolved = ALERT | {"status": "resolved", "fingerprint": "f2"}
    assert post(receiver.url, json.dumps({"version": "4", "alerts": [ALERT, resolved]}).encode()) == 200
    ((first, second),) = messages
    assert (first.firing, first.name, first.labels["layer"]) == (True, "A", "fc")
    assert first.annotations["runbook_url"] == "http://x/A.md"
    assert (second.firing, second.fingerprint) == (False, "f2")


@pytest.mark.parametrize(
    ("body", "token", "status"),
    [
        (b'{"alerts": []}', "guess", 401),
        (b"not JSON", "token", 400),
        (b'{"alerts": 3}', "token", 400),
        (b'{"alerts": [{"status": "firing"}]}', "token", 400),
        (b"[]", "token", 400),
    ],
)
def test_other_messages_are_refused(receiver: Receiver, messages: list[Any], body: bytes, token: str, status: int) -> None:
    """Without the token, or in another form."""
    assert post(receiver.url, body, token) == status
    assert messages == []


def test_runbooks_are_served_and_nothing_else(receiver: Receiver) -> None:
    """By name."""
    assert get(f"{receiver.url}/runbooks/A.md") == "# A"
    for path in ("/runbooks/B.md", "/", "/runbooks/../A.md"):
        with pytest.raises(urllib.error.HTTPError, match="404"):
            get(receiver.url + path)


def received(**changes: Any) -> ReceivedAlert:
    """Return an alert as the webhook tells it."""
    fields = ALERT | changes
    return ReceivedAlert(fields["status"] == "firing", fields["fingerprint"], fields["labels"], fields["annotations"])


def test_an_alert_is_said_once_when_it_fires_and_once_when_it_is_over() -> None:
    """Alertmanager repeats itself; alerts of one name are said together."""
    said: list[str] = []
    announcer = Announcer(said.append, lambda: "now")
    second = received(fingerprint="f2", labels=ALERT["labels"] | {"layer": "head"})  # type: ignore[operator]
    announcer.received((received(), second))
    announcer.received((received(), second))
    assert said == ["now  FIRING    A (warning), run r\n  Layer fc of run r is bad.\n  And 1 more: head.\n  http://x/A.md"]
    announcer.received((received(status="resolved"), second))
    announcer.received((received(status="resolved"), second))
    assert said[1:] == ["now  RESOLVED  A (warning), run r"]
    announcer.received((received(), second))
    assert len(said) == 3
    assert [alert.fingerprint for alert in announcer.fired] == ["f1", "f2", "f1"]


def test_the_end_of_an_alert_that_was_never_said_is_not_said() -> None:
    """It fired before this program began to listen."""
    said: list[str] = []
    Announcer(said.append).received((received(status="resolved"),))
    assert said == []


def test_labels_cannot_steer_the_terminal() -> None:
    """They come from whatever was scraped."""
    said: list[str] = []
    Announcer(said.append, lambda: "now").received((received(labels=ALERT["labels"] | {"run": "\x1b[2Jr"}),))  # type: ignore[operator]
    assert "\x1b" not in said[0]
    assert "run \N{REPLACEMENT CHARACTER}[2Jr" in said[0]


def test_a_client_that_goes_away_prints_nothing(receiver: Receiver, capfd: pytest.CaptureFixture[str]) -> None:
    """The screen belongs to the alerts."""
    port = int(receiver.url.rpartition(":")[2])
    with socket.create_connection(("127.0.0.1", port)) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        client.sendall(b"POST /alerts HTTP/1.1\r\nAuthorization: Bearer token\r\nContent-Length: 10\r\n\r\nab")
    assert post(receiver.url, b"[" * 100_000) == 400
    assert capfd.readouterr() == ("", "")
