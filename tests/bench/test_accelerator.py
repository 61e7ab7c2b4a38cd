"""The script for accelerators runs, skips, and fails where it should."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

from otel_train.monitor import Monitor
from tests import problems
from tests.bench import accelerator
from tests.bench.accelerator import Setting, main

CPU = Setting(torch.device("cpu"), steps=2, memory_steps=5, trace=Path("unused"))


@pytest.mark.skipif(torch.accelerator.is_available(), reason="there is an accelerator")
def test_without_an_accelerator_the_script_says_so_and_ends_well(capsys: pytest.CaptureFixture[str]) -> None:
    """One line, and exit code 0."""
    assert main([]) == 0
    assert capsys.readouterr().out == "skipped: no accelerator\n"


def test_the_script_runs_on_the_cpu(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Whatever needs no accelerator passes; the trace shows our parts."""
    trace = tmp_path / "trace.json"
    assert main(["--device", "cpu", "--steps", "2", "--memory-steps", "5", "--trace", str(trace)]) == 0
    summary = json.loads(capsys.readouterr().out.splitlines()[-1])
    figures = {check["name"]: check["figures"] for check in summary["checks"]}
    assert list(figures) == ["time", "trace", "memory", "values"]
    assert figures["trace"]["kernels_a_step"] > 100
    assert 0 < figures["trace"]["share_of_device_time"] < 1
    assert figures["values"]["values"] > 50
    assert {"otel_train.gradients", "otel_train.updates"} <= {
        event["name"] for event in json.loads(trace.read_text())["traceEvents"]
    }


def test_synchronising_is_forbidden_around_the_steps_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """First around the bare loop, then around the monitored one; the mode does not stay."""
    modes: list[str] = []
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", modes.append)
    assert accelerator.check_synchronisation(CPU) == (True, {"steps": 2})
    assert modes == ["error", "default"] * 2


def test_a_failure_of_the_monitor_fails_a_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A synchronisation raises inside a hook, where the training must not see it."""
    monkeypatch.setattr(torch.cuda, "set_sync_debug_mode", lambda _: None)
    monkeypatch.setattr("otel_train.hooks.recorder.read_out", lambda _: 1 / 0)
    with pytest.raises(AssertionError, match=r"the monitor failed in \{'readout': 5\}"):
        accelerator.check_synchronisation(CPU)


def test_memory_that_grows_fails_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """64 KiB a step, kept."""
    kept, plain = [], Monitor.observe

    def keeping(self: Monitor, **told: Any) -> None:
        kept.append(torch.zeros(1 << 14))
        plain(self, **told)

    monkeypatch.setattr(Monitor, "observe", keeping)
    passed, figures = accelerator.check_memory(CPU)
    assert not passed
    assert figures["grown_bytes"] == 5 << 16


def test_wrong_values_fail_the_check(monkeypatch: pytest.MonkeyPatch) -> None:
    """A hundred-thousandth is too much."""
    exact = problems.gradients
    monkeypatch.setattr(problems, "gradients", lambda model: {name: t * 1.00002 for name, t in exact(model).items()})
    passed, figures = accelerator.check_values(CPU)
    assert not passed
    assert figures["otel_train.layer.grad_norm"] == pytest.approx(2e-5, rel=0.01)


def test_a_check_that_fails_does_not_keep_the_others_from_running(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The device's time is short; the exit code tells of it."""
    monkeypatch.setattr(accelerator, "CHECKS", {"broken": lambda _: 1 / 0, "whole": lambda _: (True, {"share": 0.5})})
    assert main(["--device", "cpu"]) == 1
    out = capsys.readouterr().out
    assert "FAILED  broken\n    error ZeroDivisionError('division by zero')\npassed  whole\n    share 0.5\n" in out
    assert json.loads(out.splitlines()[-1])["passed"] is False
