"""Real servers and real trainings for tests: found, started on loopback, asked, and stopped by their process ids."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import socket
import subprocess
import sys
import tempfile
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import MappingProxyType
from typing import Any, Literal

import pytest

Version = Literal["current", "stable"]
VERSIONS: tuple[Version, ...] = ("current", "stable")
"""Prometheus 3.5 and 2.42."""
REPOSITORY = Path(__file__).resolve().parents[1]
_SERVERS = Path(os.environ.get("OTEL_TRAIN_SERVERS") or REPOSITORY / ".servers")
# read on import: the fixture of all tests takes the variable away


def find_program(version: Version, name: str) -> Path:
    """Return a server's program; without it skip the test, or fail it where CI is set."""
    program = _SERVERS / version / "usr/bin" / name
    if not os.access(program, os.X_OK):
        said = f"{program} is missing: run scripts/get-servers.sh, or set OTEL_TRAIN_SERVERS"
        if os.environ.get("CI"):
            pytest.fail(said)
        pytest.skip(said)
    return program


def free_port() -> int:
    """Return a port of 127.0.0.1 that nobody listens on."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def wait_until(condition: Callable[[], bool], seconds: float, what: str, pause: float = 0.05) -> None:
    """Wait for a condition; fail the test with `what` when it does not come about in time."""
    deadline = time.monotonic() + seconds
    while not condition():
        if time.monotonic() > deadline:
            pytest.fail(f"not within {seconds:g} s: {what}")
        time.sleep(pause)


def get(url: str, headers: dict[str, str] | None = None, timeout: float = 5.0) -> str:
    """Return what a URL answers."""
    with urllib.request.urlopen(urllib.request.Request(url, headers=headers or {}), timeout=timeout) as reply:
        return str(reply.read().decode())


@dataclass(frozen=True)
class Series:
    """A series of an instant query's answer."""

    labels: dict[str, str]
    value: float


def _ask(url: str, parameters: Mapping[str, object]) -> list[dict[str, Any]]:
    answer: dict[str, Any] = json.loads(get(f"{url}/api/v1/query?{urllib.parse.urlencode(parameters)}", timeout=10))
    assert answer["status"] == "success", answer
    found: list[dict[str, Any]] = answer["data"]["result"]
    return found


class Prometheus:
    """A Prometheus on loopback with data of its own.

    Args:
        version: Which one.
        folder: An empty folder for its configuration, data and log.
        config: The text of its configuration.
        features: What is on beyond the version's usual.
        flags: More of its command line.
    """

    def __init__(
        self, version: Version, folder: Path, config: str, features: Sequence[str] = (), flags: Sequence[str] = ()
    ) -> None:
        self.port = free_port()
        self._log = folder / "prometheus.log"
        (folder / "prometheus.yml").write_text(config)
        with self._log.open("wb") as log:
            self._process = subprocess.Popen(
                [
                    find_program(version, "prometheus"),
                    f"--config.file={folder / 'prometheus.yml'}",
                    f"--storage.tsdb.path={folder / 'data'}",
                    f"--web.listen-address=127.0.0.1:{self.port}",
                    *(f"--enable-feature={feature}" for feature in features),
                    *flags,
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self, seconds: float = 30.0) -> None:
        """Wait until it answers queries."""
        wait_until(self._is_ready, seconds, f"Prometheus is ready; its log:\n{self._log.read_text()[-2000:]}")

    def _is_ready(self) -> bool:
        if self._process.poll() is not None:
            pytest.fail(f"Prometheus ended with {self._process.returncode}:\n{self._log.read_text()[-2000:]}")
        with contextlib.suppress(OSError):
            return "ready" in get(f"http://127.0.0.1:{self.port}/-/ready").lower()
        return False

    def query(self, expression: str) -> list[Series]:
        """Return the answer of an instant query; series that are native histograms have no number."""
        return [Series(entry["metric"], float(entry["value"][1])) for entry in self.ask(expression)]

    def ask(self, expression: str, **parameters: float) -> list[dict[str, Any]]:
        """Return the answer of an instant query as the server gives it."""
        return _ask(f"http://127.0.0.1:{self.port}", {"query": expression, **parameters})

    def stop(self) -> None:
        """End it."""
        stop(self._process)


def stop(process: subprocess.Popen[bytes], seconds: float = 20.0) -> None:
    """End a process that a test started: ask, then insist."""
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(seconds)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait(seconds)


@contextlib.contextmanager
def prometheus(
    version: Version,
    jobs: Mapping[str, int],
    scrape_interval: str = "1s",
    features: Sequence[str] = (),
    settings: Mapping[str, str] = MappingProxyType({}),
) -> Iterator[Prometheus]:
    """Run a Prometheus that scrapes ports of 127.0.0.1, given by job.

    Args:
        version: Which one.
        jobs: Ports by job.
        scrape_interval: As in its configuration.
        features: What is on beyond the version's usual.
        settings: More of the configuration of a job, as `name: value`, by job.
    """
    lines = [f"global: {{scrape_interval: {scrape_interval}, scrape_timeout: {scrape_interval}}}", "scrape_configs:"]
    more = {job: f", {setting}" for job, setting in settings.items()}
    lines += [
        f"- {{job_name: {job}, static_configs: [{{targets: ['127.0.0.1:{port}']}}]{more.get(job, '')}}}"
        for job, port in jobs.items()
    ]
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = Prometheus(version, Path(folder), "\n".join(lines) + "\n", features)
        try:
            server.wait_ready()
            yield server
        finally:
            server.stop()


class Victoria:
    """A VictoriaMetrics on loopback that takes OTLP and names as Prometheus does.

    Args:
        folder: An empty folder for its data and log.
    """

    def __init__(self, folder: Path) -> None:
        self.port = free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        with (folder / "log").open("wb") as log:
            self._process = subprocess.Popen(
                [
                    find_program("current", "victoria-metrics"),
                    f"-httpListenAddr=127.0.0.1:{self.port}",
                    f"-storageDataPath={folder / 'data'}",
                    "-search.latencyOffset=0s",
                    "-opentelemetry.usePrometheusNaming",
                    "-opentelemetry.promoteAllResourceAttributes=false",
                    "-opentelemetry.promoteResourceAttributes=job,service.name,service.instance.id",
                ],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=log,
            )

    @property
    def otlp(self) -> str:
        """Where it takes OTLP, without ``/v1/metrics``."""
        return f"{self.url}/opentelemetry"

    def is_ready(self) -> bool:
        """Say whether it answers."""
        with contextlib.suppress(OSError):
            return get(f"{self.url}/health") == "OK"
        return False

    def ask(self, expression: str, **parameters: float) -> list[dict[str, Any]]:
        """Return the answer of an instant query as the server gives it; what came in is made visible first."""
        get(f"{self.url}/internal/force_flush")
        return _ask(self.url, {"query": expression, "nocache": 1, **parameters})

    def stop(self) -> None:
        """End it."""
        stop(self._process)


@contextlib.contextmanager
def victoria() -> Iterator[Victoria]:
    """Run a VictoriaMetrics."""
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        server = Victoria(Path(folder))
        try:
            wait_until(server.is_ready, 30, "VictoriaMetrics is ready")
            yield server
        finally:
            server.stop()


@dataclass
class Training:
    """A training in a process of its own."""

    process: subprocess.Popen[bytes]
    port: int
    folder: Path
    errors: Path = field(init=False)
    """What it wrote to stderr."""

    def __post_init__(self) -> None:
        self.errors = self.folder / "stderr"

    @property
    def url(self) -> str:
        """Address of its metrics."""
        return f"http://127.0.0.1:{self.port}/metrics"

    def said(self) -> str:
        """Return what it wrote to stderr."""
        return self.errors.read_text()

    def value(self, series: str, headers: dict[str, str] | None = None) -> float | None:
        """Return the value of the first series whose line begins so; None without one, or without an answer."""
        with contextlib.suppress(OSError):
            for line in get(self.url, headers).splitlines():
                if line.startswith(series):
                    return float(line.rsplit(" ", 1)[1])
        return None

    def wait_for_steps(self, steps: int = 3, seconds: float = 60.0) -> None:
        """Wait until so many steps are exported."""
        wait_until(lambda: self._is_at(steps), seconds, f"{steps} steps of the training; stderr:\n{self.said()[-2000:]}")

    def _is_at(self, steps: int) -> bool:
        assert self.process.poll() is None, f"the training ended with {self.process.returncode}:\n{self.said()[-2000:]}"
        return (self.value("otel_train_steps_total") or 0) >= steps

    def finish(self) -> None:
        """Let the training's loop come to its end."""
        (self.folder / "finish").touch()

    def wait(self, seconds: float = 30.0) -> int:
        """Wait for the end and return the exit status."""
        try:
            return self.process.wait(seconds)
        except subprocess.TimeoutExpired:
            pytest.fail(f"the training did not end within {seconds:g} s; stderr:\n{self.said()[-2000:]}")

    def send(self, number: signal.Signals) -> None:
        """Send a signal."""
        self.process.send_signal(number)


@contextlib.contextmanager
def training(folder: Path, script: str, arguments: Sequence[str] = ()) -> Iterator[Training]:
    """Run a script as ``script PORT FOLDER …``; whatever happens it has ended afterwards."""
    folder.mkdir(parents=True, exist_ok=True)
    path, port = folder / "train.py", free_port()
    path.write_text(script)
    environment = {k: v for k, v in os.environ.items() if not k.startswith(("OTEL_TRAIN", "OTEL_EXPORTER", "OTEL_SDK"))}
    environment |= {"PYTHONPATH": str(REPOSITORY), "OMP_NUM_THREADS": "1"}
    with (folder / "stderr").open("wb") as errors:
        process = subprocess.Popen(
            [sys.executable, str(path), str(port), str(folder), *arguments],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.DEVNULL,
            stderr=errors,
        )
    try:
        yield Training(process, port, folder)
    finally:
        if process.poll() is None:
            process.kill()
            process.wait(20)


FULL_TRAINING = '''
"""Trains a small model with every feature of the monitor on, until it is told to finish; MODE says how it ends."""
import os, sys, time
from pathlib import Path
import torch
from torch import nn
import otel_train

port, folder, mode = int(sys.argv[1]), Path(sys.argv[2]), sys.argv[3] if len(sys.argv) > 3 else "close"
torch.manual_seed(0)
model = nn.Sequential(nn.Embedding(32, 16), nn.Flatten(), nn.LayerNorm(64), nn.Linear(64, 32), nn.ReLU(),
                      nn.Linear(32, 16), nn.Tanh(), nn.Linear(16, 4))
optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
warmup = 1_000_000
scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: min(1.0, (step + 1) / warmup))
monitor = otel_train.attach(
    model, optimizer, host="127.0.0.1", port=port, run="e2e", every_n_steps=2, warmup_steps=warmup, planned_steps=2 * warmup,
    max_overhead=None,
    flops_per_token=6e3, peak_flops=1e12, labels={"team": "tests"}, handle_sigterm=mode == "sigterm",
)
began = time.monotonic()
step = 0
while not (folder / "finish").exists() and time.monotonic() - began < 90:
    inputs, targets = torch.randint(0, 32, (64, 4)), torch.randint(0, 4, (64,))
    loss = nn.functional.cross_entropy(model(inputs), targets)
    loss.backward()
    monitor.clip_grad_norm_(0.01)
    optimizer.step()
    scheduler.step()
    optimizer.zero_grad()
    monitor.observe(loss=loss, tokens=inputs.numel(), samples=len(inputs), loss_scale=1024.0)
    step += 1
    if step % 20 == 0:
        with monitor.phase("eval"), torch.no_grad():
            model(inputs)
    time.sleep(0.05)
if mode == "raise":
    raise RuntimeError("the training fell over")
if mode == "sys_exit":
    sys.exit(3)
if mode == "close":
    ending = time.monotonic()
    monitor.close()
    (folder / "closed").write_text(str(time.monotonic() - ending))
if mode == "close_and_live_on":
    monitor.close()
    (folder / "closed").touch()
    time.sleep(8)
if mode == "close_and_die":
    monitor.close()
    os._exit(0)
'''
