"""From a broken training to a message that somebody receives: the demo's scenarios, watched by both pairs of real servers."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest

from otel_train.demo.scenarios import SCENARIOS
from tests.servers import REPOSITORY, VERSIONS, Version, find_program, free_port, get, stop, wait_until

pytestmark = [pytest.mark.servers, pytest.mark.slow]

STEPS = "360"
"""Of a scenario: 20 s at 18 steps a second, where an alert takes 9 s of the servers' clocks whatever the speed of the training."""
_AFTER_THE_END = 12.0
"""Seconds in which the demo's clocks would miss a training that is gone: more than twice 5 s."""


@dataclass(frozen=True)
class Said:
    """An alert as the stack's webhook received it and showed it."""

    name: str
    severity: str
    run: str
    text: str


@dataclass
class Program:
    """A command of ours in a process of its own."""

    process: subprocess.Popen[bytes]
    log: Path

    def output(self) -> str:
        """Return what it has printed."""
        return self.log.read_text()

    def wait_for(self, text: str, seconds: float) -> None:
        """Wait until it has printed a text."""
        wait_until(lambda: text in self.output(), seconds, f"{text!r} in:\n{self.output()}")

    def firing(self, run: str) -> list[Said]:
        """Return the alerts of a run that it has shown as firing, in order."""
        pattern = r"FIRING    (\w+) \((\w+)\), run (\S+)\n((?:  .*\n)+)"
        return [Said(*match) for match in re.findall(pattern, self.output()) if match[2] == run]


@contextlib.contextmanager
def command(log: Path, *arguments: str, **environment: str) -> Iterator[Program]:
    """Run otel-train; whatever happens it has ended afterwards."""
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "otel_train", *arguments],
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=subprocess.STDOUT,
            cwd=REPOSITORY,
            env=os.environ | environment,
        )
    try:
        yield Program(process, log)
    finally:
        if process.poll() is None:
            process.send_signal(signal.SIGCONT)
        stop(process)


def servers_path(version: Version) -> str:
    """Return a PATH with the servers of one version in front."""
    folders = {str(find_program(version, name).parent) for name in ("prometheus", "prometheus-alertmanager")}
    return os.pathsep.join([*folders, os.environ["PATH"]])


@dataclass
class Stacks:
    """Both pairs of servers, watching the same port."""

    port: int
    programs: dict[Version, Program]

    def wait_for_alert(self, run: str, name: str, seconds: float = 40.0) -> None:
        """Wait until each has shown an alert of a run."""
        for version, program in self.programs.items():
            said = f"{name} of {run} from {version}"
            wait_until(lambda p=program: name in {alert.name for alert in p.firing(run)}, seconds, said)  # type: ignore[misc]

    def wait_for_steps(self, run: str, steps: int = 20) -> None:
        """Wait until each has stored so many steps of a run."""
        for program in self.programs.values():
            (url,) = re.findall(r"Prometheus    (http://\S+)", program.output())
            query = f'{url}/api/v1/query?query=otel_train_steps_total{{run="{run}"}}>={steps}'
            wait_until(lambda q=query: '"value"' in get(q), 60, f"{steps} steps of {run} at {url}")  # type: ignore[misc]

    def names(self, run: str) -> dict[Version, list[str]]:
        """Return the names of the alerts of a run, as each has shown them."""
        return {version: [alert.name for alert in program.firing(run)] for version, program in self.programs.items()}


@pytest.fixture(scope="module")
def stacks(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stacks]:
    """Start ``otel-train stack`` once with each version, one after the other, so that both find free ports; one finds trainings by file."""
    port, folder = free_port(), tmp_path_factory.mktemp("stacks")
    with contextlib.ExitStack() as started:
        programs: dict[Version, Program] = {}
        for version in VERSIONS:
            # the first target is a static one, others are found by file
            before = ("--target", f"localhost:{free_port()}") if version == "stable" else ()
            own = ("--target", f"localhost:{port}", "--data", str(folder / version))
            arguments = ("stack", "--time-base", "demo", *before, *own)
            program = started.enter_context(command(folder / f"{version}.log", *arguments, PATH=servers_path(version)))
            program.wait_for("Waiting for alerts", 40)
            programs[version] = program
        yield Stacks(port, programs)


def demo(port: int, log: Path, run: str, *arguments: str) -> contextlib.AbstractContextManager[Program]:
    """Run the demo under a name."""
    return command(log, "demo", "--port", str(port), *arguments, OTEL_TRAIN_RUN=run)


@pytest.mark.parametrize("scenario", SCENARIOS)
def test_each_scenario_delivers_its_alert_and_no_other(stacks: Stacks, tmp_path: Path, scenario: str) -> None:
    """In both versions, while it trains; the healthy one, and every clean end, deliver none."""
    run = f"scenario-{scenario}"
    with demo(stacks.port, tmp_path / "demo.log", run, "--scenario", scenario, "--steps", STEPS) as training:
        assert training.process.wait(150) == 0, training.output()
    in_time = stacks.names(run)
    time.sleep(_AFTER_THE_END)
    expected = SCENARIOS[scenario].alert
    for version in VERSIONS:
        assert in_time[version] == ([expected] if expected else []), stacks.programs[version].output()
        assert stacks.names(run)[version] == in_time[version]


def test_the_frozen_block_is_named_layer_by_layer_with_what_to_do(stacks: Stacks, tmp_path: Path) -> None:
    """The message as received names run, layers, value and the way out, and links to a runbook that is served."""
    run, pattern = "named", r"\bblocks\.\d+(?:\.\w+)+"
    with demo(stacks.port, tmp_path / "demo.log", run, "--scenario", "frozen-layer", "--steps", "1000"):
        stacks.wait_for_alert(run, "OtelTrainLayerStalled", 90)
    for program in stacks.programs.values():
        (alert,) = program.firing(run)
        assert alert.severity == "warning"
        assert sorted(re.findall(pattern, alert.text)) == [f"blocks.2.{name}" for name in ("attn.proj", "attn.qkv", "down", "up")]
        assert "of run named has an update ratio of 0, while others move." in alert.text
        assert "no attached optimizer has it: add it to one" in alert.text
        (link,) = re.findall(r"http://\S+/runbooks/OtelTrainLayerStalled\.md", alert.text)
        assert "## Mitigation" in get(link)


def test_a_killed_training_is_absent_and_not_stalled(stacks: Stacks, tmp_path: Path) -> None:
    """One message for one death."""
    with demo(stacks.port, tmp_path / "demo.log", "killed", "--steps", "100000") as training:
        stacks.wait_for_steps("killed")
        training.process.kill()
        stacks.wait_for_alert("killed", "OtelTrainExporterAbsent")
    time.sleep(_AFTER_THE_END)
    for version, names in stacks.names("killed").items():
        assert names == ["OtelTrainExporterAbsent"], version


def test_a_stopped_training_is_stalled(stacks: Stacks, tmp_path: Path) -> None:
    """SIGSTOP stops the endpoint too, so that nothing but its silence tells."""
    with demo(stacks.port, tmp_path / "demo.log", "stopped", "--steps", "100000") as training:
        stacks.wait_for_steps("stopped")
        training.process.send_signal(signal.SIGSTOP)
        stacks.wait_for_alert("stopped", "OtelTrainStepsStalled")
        training.process.send_signal(signal.SIGCONT)
        for program in stacks.programs.values():
            program.wait_for("RESOLVED  OtelTrainStepsStalled (critical), run stopped", 40)


def test_the_demo_brings_its_own_servers_and_tells_the_time_since_the_cause(tmp_path: Path) -> None:
    """``demo --stack`` in one command, down to the verdict."""
    arguments = ("demo", "--scenario", "frozen-layer", "--stack", "--steps", STEPS, "--port", "0")
    with command(tmp_path / "demo.log", *arguments, PATH=servers_path("current"), OTEL_TRAIN_RUN="own") as program:
        assert program.process.wait(150) == 0, program.output()
    assert "time base: the demo's" in program.output()
    delay = re.search(r"step (\d+), (\d+) steps and ([\d.]+) s after the cause  FIRING    OtelTrainLayerStalled", program.output())
    assert delay, program.output()
    assert int(delay[1]) - int(delay[2]) == 1
    assert 50 <= int(delay[2]) < 180
    assert program.output().endswith("Alerts delivered: OtelTrainLayerStalled; expected: OtelTrainLayerStalled.\n")


def test_without_servers_the_demo_says_what_to_install_and_trains(tmp_path: Path) -> None:
    """And leaves nothing running."""
    with command(tmp_path / "demo.log", "demo", "--stack", "--steps", "3", "--port", "0", PATH="/nonexistent") as program:
        assert program.process.wait(60) == 0, program.output()
    assert "No stack: expected Prometheus and Alertmanager on the PATH, found none; install them" in program.output()
    assert "step 3/3" in program.output()
    assert "Alerts delivered" not in program.output()
