"""The servers' programs on this machine, and what to install where they are not there."""

from __future__ import annotations

import shutil
import socket
import subprocess
import sys
import time
import urllib.request
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from otel_train.errors import StackError

_NAMES = {"Prometheus": ("prometheus",), "Alertmanager": ("alertmanager", "prometheus-alertmanager")}
"""Debian calls Alertmanager's program prometheus-alertmanager."""
_START_SECONDS, _STOP_SECONDS = 30.0, 10.0


@dataclass(frozen=True, slots=True)
class Programs:
    """Where the programs are."""

    prometheus: Path
    alertmanager: Path


def find_programs() -> Programs:
    """Return the programs on the PATH.

    Raises:
        StackError: One is not there; the message says how to get it, and how to do without.
    """
    found = {server: next(filter(None, map(shutil.which, names)), None) for server, names in _NAMES.items()}
    missing = [server for server, path in found.items() if path is None]
    if missing:
        raise StackError(
            f"expected {' and '.join(missing)} on the PATH, found none; install them (Debian, Ubuntu: apt-get install prometheus "
            "prometheus-alertmanager; macOS: brew install prometheus alertmanager), or run them in Docker: otel-train assets DIR, "
            "then docker compose -f DIR/deploy/compose.yaml up (its first lines name the secrets it needs)"
        )
    return Programs(*(Path(path) for path in found.values() if path is not None))


def ask(url: str, seconds: float) -> bytes:
    """Return what a server of ours answers; a proxy that the environment names is for others.

    Raises:
        OSError: It does not answer, or answers with an error.
    """
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    with opener.open(url, timeout=seconds) as reply:
        body: bytes = reply.read()
    return body


def free_port(preferred: int) -> int:
    """Return a port of 127.0.0.1 that nobody listens on: the preferred one, if it can be had."""
    for port in (preferred, 0):
        with socket.socket() as probe:
            # as the servers do: a port whose connections are still ending can be had
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            try:
                probe.bind(("127.0.0.1", port))
            except OSError:
                continue
            return int(probe.getsockname()[1])
    raise StackError("expected a free port on 127.0.0.1, found none")


class Server:
    """A server in a process of its own, with its output in a file.

    Args:
        name: What people call it.
        command: Its program and arguments.
        url: Where it answers.
        log: Where its output goes.

    Raises:
        StackError: It cannot be started, ends at once, or does not become ready.
    """

    def __init__(self, name: str, command: Sequence[str], url: str, log: Path) -> None:
        self.name, self.url = name, url
        self._log = log
        try:
            with log.open("wb") as output:
                self._process = subprocess.Popen([*_tie(), *command], stdin=subprocess.DEVNULL, stdout=output, stderr=output)  # noqa: S603  # ours
        except OSError as error:
            raise StackError(f"{name}: expected to start {command[0]}: {error.strerror}; install it again") from error
        try:
            self._wait_ready()
        except BaseException:
            self.stop()
            raise

    @property
    def ended(self) -> bool:
        """Whether it has ended, by itself or stopped."""
        return self._process.poll() is not None

    def check(self) -> None:
        """Do nothing while it runs.

        Raises:
            StackError: It has ended by itself.
        """
        if self.ended:
            raise StackError(
                f"{self.name} ended by itself with status {self._process.returncode}: {self._last_line()} (all of it: {self._log})"
            )

    def stop(self) -> None:
        """Ask it to end, then insist; twice is harmless."""
        if self.ended:
            return
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_STOP_SECONDS)

    def _wait_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while not self._is_ready():
            if self.ended or time.monotonic() > deadline:
                what = "ended at once" if self.ended else f"did not become ready in {_START_SECONDS:.0f} s"
                raise StackError(f"{self.name} {what}: {self._last_line()} (all of it: {self._log})")
            time.sleep(0.1)

    def _is_ready(self) -> bool:
        try:
            ask(f"{self.url}/-/ready", 1)
        except OSError:
            return False
        return True

    def _last_line(self) -> str:
        lines = self._log.read_text(encoding="utf-8", errors="replace").split("\n")
        return next((line for line in reversed(lines) if line.strip()), "it said nothing")


def _tie() -> list[str]:
    """Return what makes a server end with this process, however that ends; empty where the system has no such thing."""
    setpriv = shutil.which("setpriv") if sys.platform == "linux" else None
    return [setpriv, "--pdeathsig", "TERM", "--"] if setpriv else []
