"""``otel-train stack``: Prometheus and Alertmanager on this machine, with the shipped rules, and their alerts as they fire."""

from __future__ import annotations

import contextlib
import fcntl
import json
import os
import secrets
import shutil
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType

from typing_extensions import Self

from otel_train import assets
from otel_train.errors import ConfigError, StackError
from otel_train.stack.programs import Programs, Server, ask, find_programs, free_port
from otel_train.stack.receiver import ReceivedAlert, Receiver

TIME_BASES = {"standard": "deploy", "demo": "deploy/demo"}
"""Names of the shipped time bases, and the folders of their configurations."""
_RETENTION = "90d"
_FIRST_SCRAPE_SECONDS = 30.0


@dataclass(frozen=True, slots=True)
class StackOptions:
    """What the command line asks for."""

    targets: tuple[str, ...] = (assets.TRAINING_ADDRESS,)
    """Addresses of trainings' endpoints."""
    time_base: str = "standard"
    data: Path | None = None
    """Folder for configurations, data and logs; None for one that is deleted at the end."""


class Stack:
    """The servers, while the ``with`` block lasts.

    Args:
        options: What to scrape, and how fast.
        received: Called with the alerts of each message that the webhook gets, in a thread of its own.

    Raises:
        StackError: A program is missing, or a server does not start.
        ConfigError: The folder for the data cannot be written to.
    """

    def __init__(self, options: StackOptions, received: Callable[[tuple[ReceivedAlert, ...]], None]) -> None:
        self._options, self._received = options, received
        self._exit = contextlib.ExitStack()

    def __enter__(self) -> Self:
        """Start them."""
        with self._exit as until_started:
            programs = find_programs()
            self._folder = self._make_folder()
            self._start(programs)
            self._exit = until_started.pop_all()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None) -> None:
        """Stop them, the last started first."""
        self._exit.__exit__(kind, error, traceback)

    def _make_folder(self) -> Path:
        if self._options.data is None:
            folder = Path(tempfile.mkdtemp(prefix="otel-train-stack-"))
            self._exit.push(_remover(folder))
        else:
            folder = self._options.data.resolve()
            self._exit.push(_lock(folder))
        return folder

    def _start(self, programs: Programs) -> None:
        prometheus, alertmanager, webhook = (free_port(port) for port in (9090, 9093, 9099))
        token, folder = secrets.token_hex(16), self._folder
        config = folder / TIME_BASES[self._options.time_base]
        assets.write(
            folder,
            {
                assets.PROMETHEUS_ADDRESS: f"127.0.0.1:{prometheus}",
                assets.ALERTMANAGER_ADDRESS: f"127.0.0.1:{alertmanager}",
                assets.WEBHOOK_ADDRESS: f"127.0.0.1:{webhook}",
                assets.TRAINING_ADDRESS: json.dumps(self._options.targets[0]),  # quoted, as YAML needs it for [::1]
                assets.RUNBOOKS: f"http://127.0.0.1:{webhook}/runbooks",
            },
        )
        _write_secret(config / "alertmanager/secrets/webhook_token", token)
        (config / "prometheus/targets/stack.json").write_text(json.dumps([{"targets": self._options.targets[1:]}]))
        runbooks = {path.name: path.read_text(encoding="utf-8") for path in sorted((folder / "deploy/runbooks").glob("*.md"))}
        try:
            self.webhook = Receiver(webhook, token, runbooks, self._received)
        except OSError as error:
            raise StackError(f"the webhook cannot listen on 127.0.0.1:{webhook}: {error.strerror}; try again") from error
        self._exit.callback(self.webhook.close)
        self.alertmanager = self._server(
            "Alertmanager",
            [
                str(programs.alertmanager),
                f"--config.file={config / 'alertmanager/alertmanager.yaml'}",
                f"--storage.path={folder / 'alertmanager-data'}",
                f"--web.listen-address=127.0.0.1:{alertmanager}",
                "--cluster.listen-address=",
            ],
            alertmanager,
        )
        self.prometheus = self._server(
            "Prometheus",
            [
                str(programs.prometheus),
                f"--config.file={config / 'prometheus/prometheus.yaml'}",
                f"--storage.tsdb.path={folder / 'prometheus-data'}",
                f"--storage.tsdb.retention.time={_RETENTION}",
                f"--web.listen-address=127.0.0.1:{prometheus}",
            ],
            prometheus,
        )

    def _server(self, name: str, command: list[str], port: int) -> Server:
        server = Server(name, command, f"http://127.0.0.1:{port}", self._folder / f"{name.lower()}.log")
        self._exit.callback(server.stop)
        return server

    def wait_for_scrape(self, seconds: float) -> bool:
        """Wait until Prometheus has scraped a target; say whether it did. Its first scrape is 5 to 20 seconds after its start."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline and not self.prometheus.ended:
            with contextlib.suppress(OSError, ValueError, KeyError):
                # what is scraped now; a query would find what an earlier session stored, too
                targets = json.loads(ask(f"{self.prometheus.url}/api/v1/targets?state=active", 2))["data"]["activeTargets"]
                if any(target["health"] == "up" for target in targets):
                    return True
            time.sleep(0.2)
        return False

    def describe(self) -> Iterator[str]:
        """Say where everything is."""
        targets = ", ".join(self._options.targets)
        clocks = "the demo's (the shipped rules on faster clocks)" if self._options.time_base == "demo" else "standard"
        yield f"Prometheus    {self.prometheus.url}  scrapes {targets}; time base: {clocks}"
        yield f"Alertmanager  {self.alertmanager.url}  sends to the webhook {self.webhook.url}/alerts"
        kept = "kept" if self._options.data is not None else "deleted at the end"
        yield f"Files         {self._folder}  configurations, data and logs; {kept}"


class Announcer:
    """Turns messages into lines for a screen; says each alert once when it fires, once when it is over.

    Args:
        say: Prints a text.
        when: Says when it is, in front of an alert's name.
    """

    def __init__(self, say: Callable[[str], None], when: Callable[[], str] = lambda: time.strftime("%H:%M:%S")) -> None:
        self.say, self._when = say, when
        self._said: dict[str, bool] = {}
        self._lock = threading.Lock()  # messages about several runs come at once
        self.fired: list[ReceivedAlert] = []
        """Alerts in the order in which they came."""

    def received(self, alerts: tuple[ReceivedAlert, ...]) -> None:
        """Take a message."""
        with self._lock:
            self._announce(alerts)

    def _announce(self, alerts: tuple[ReceivedAlert, ...]) -> None:
        news = [alert for alert in alerts if self._said.get(alert.fingerprint, False) != alert.firing]
        self._said.update({alert.fingerprint: alert.firing for alert in news})
        self.fired += [alert for alert in news if alert.firing]
        for firing in (True, False):
            for name in dict.fromkeys(alert.name for alert in news if alert.firing is firing):
                lines = self._lines([a for a in news if a.firing is firing and a.name == name])
                self.say("\n".join(map(_printable, lines)))

    def _lines(self, alerts: list[ReceivedAlert]) -> Iterator[str]:
        first = alerts[0]
        state = "FIRING  " if first.firing else "RESOLVED"
        yield f"{self._when()}  {state}  {first.name} ({first.labels.get('severity')}), run {first.labels.get('run')}"
        if first.firing:
            yield f"  {first.annotations.get('description', '').strip()}"
            others = [alert.labels.get("layer") or alert.labels.get("rank") or "" for alert in alerts[1:]]
            if others:
                yield f"  And {len(others)} more: {', '.join(sorted(others))}."
            yield f"  {first.annotations.get('runbook_url')}"


def run_stack(options: StackOptions) -> None:
    """Run the stack until Ctrl-C, and say alerts as they fire.

    Raises:
        StackError: A program is missing, a server does not start, or it ends.
    """
    announcer = Announcer(lambda text: print(text, flush=True))
    with Stack(options, announcer.received) as stack:
        print("\n".join(stack.describe()), flush=True)
        print("Waiting for alerts; Ctrl-C ends it.", flush=True)
        with contextlib.suppress(KeyboardInterrupt):
            if not stack.wait_for_scrape(_FIRST_SCRAPE_SECONDS):
                print("No training answers there yet; Prometheus goes on asking.", flush=True)
            while True:
                stack.prometheus.check()
                stack.alertmanager.check()
                time.sleep(0.5)


def _write_secret(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.unlink(missing_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        file.write(text)


def _printable(line: str) -> str:
    """Replace what could steer a terminal: labels come from whatever was scraped."""
    return "".join(character if character.isprintable() else "\N{REPLACEMENT CHARACTER}" for character in line)


def _remover(folder: Path) -> Callable[..., None]:
    """Return what deletes a folder at the end, unless a server failed: its log is wanted then."""

    def remove(kind: type[BaseException] | None, *_: object) -> None:
        if kind is None or not issubclass(kind, StackError):
            shutil.rmtree(folder, ignore_errors=True)

    return remove


def _lock(folder: Path) -> Callable[..., None]:
    """Keep a second stack off a folder: it would change the first one's token and configurations.

    Raises:
        StackError: Another stack has it.
        ConfigError: It cannot be made.
    """
    try:
        folder.mkdir(parents=True, exist_ok=True)
        file = (folder / "lock").open("w")
    except OSError as error:
        raise ConfigError(f"--data: expected a folder to write to, got {folder}: {error.strerror}; choose another") from error
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        file.close()
        raise StackError(f"--data: another stack runs on {folder}; stop it, or choose another folder") from None

    def release(*_: object) -> None:
        file.close()

    return release
