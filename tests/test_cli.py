"""The command line, as a shell sees it."""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import time
import urllib.request
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent


def run(*arguments: str, cwd: Path = ROOT) -> subprocess.CompletedProcess[str]:
    """Run otel-train to its end."""
    command = [sys.executable, "-m", "otel_train", *arguments]
    return subprocess.run(command, capture_output=True, text=True, cwd=cwd, check=False, timeout=240)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), "the following arguments are required: COMMAND"),
        (("train",), "invalid choice: 'train'"),
        (("demo", "--steps", "0"), "argument --steps: expected a whole number of at least 1, got '0'"),
        (("demo", "--steps", "many"), "argument --steps: expected a whole number of at least 1, got 'many'"),
        (("demo", "--port", "99999"), "argument --port: expected a port from 0 to 65535, got '99999'"),
        (("demo", "--every-n-steps", "-1"), "argument --every-n-steps: expected a whole number"),
        (("demo", "--nonsense"), "unrecognized arguments: --nonsense"),
        (("demo", "--scenario", "lr"), "argument --scenario: invalid choice: 'lr'"),
        (("stack", "--target", "node1"), "argument --target: expected HOST:PORT, got 'node1'"),
        (("stack", "--target", "http://node1:9464"), "argument --target: expected HOST:PORT, got 'http://node1:9464'"),
        (("stack", "--target", "node1:70000"), "argument --target: expected HOST:PORT, got 'node1:70000'"),
        (("stack", "--time-base", "slow"), "argument --time-base: invalid choice: 'slow'"),
        (("assets", "x", "--runbooks", "wiki"), "argument --runbooks: expected an address such as https://wiki.example/runbooks"),
        (("assets", "x", "--runbooks", "http://x/{{ a }}"), "argument --runbooks: expected an address such as"),
        (("assets", "x", "--runbooks", ""), "argument --runbooks: expected an address such as"),
        (("assets",), "the following arguments are required: DIR"),
    ],
)
def test_bad_usage_exits_2_with_one_line(arguments: tuple[str, ...], message: str) -> None:
    """No usage block, no traceback."""
    result = run(*arguments)
    assert result.returncode == 2
    assert message in result.stderr
    assert result.stderr.count("\n") == 1
    assert result.stdout == ""


def test_a_bad_environment_exits_2_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """Settings can come from variables."""
    monkeypatch.setenv("OTEL_TRAIN_EVERY_N_STEPS", "0")
    result = run("demo", "--steps", "1", "--port", "0")
    assert (result.returncode, result.stderr) == (
        2,
        "otel-train: every_n_steps: expected an integer of at least 1, got 0\n",
    )


def test_a_stack_without_servers_exits_2_with_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    """That says what to install, and how to do without."""
    monkeypatch.setenv("PATH", "/nonexistent")
    result = run("stack")
    assert (result.returncode, result.stdout) == (2, "")
    assert result.stderr.startswith("otel-train: expected Prometheus and Alertmanager on the PATH, found none; install them")
    assert "otel-train assets DIR" in result.stderr
    assert result.stderr.count("\n") == 1


def test_generate_without_its_libraries_says_which_extra_it_needs() -> None:
    """They are an extra: trainings need none of them."""
    script = "import sys; sys.modules['yaml'] = None; import otel_train.cli; sys.exit(otel_train.cli.main(['generate']))"
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, cwd=ROOT, check=False, timeout=60)
    assert result.returncode == 2
    assert "pip install 'otel-train[dashboards]'" in result.stderr
    assert result.stderr.count("\n") == 1


def test_the_demo_gives_the_url_first_and_a_verdict_last() -> None:
    """Plain lines where there is no terminal."""
    result = run("demo", "--steps", "24", "--port", "0", "--every-n-steps", "4")
    assert result.returncode == 0, result.stderr
    assert result.stderr == ""
    lines = result.stdout.splitlines()
    assert re.match(r"Look inside:  http://localhost:\d+/", lines[0])
    assert re.search(r"step 24/24  loss \d\.\d+  lr \d\.\d\de-\d\d  median log10 update ratio -\d\.\d\d", result.stdout)
    assert re.search(r"Loss \d\.\d+ \(smoothed\), \d\.\d+ on held-out text", result.stdout)
    assert re.search(
        r"Median log10 update ratio -\d\.\d\d over the run .*: (within|below|above) the usual -3.5 to -2.5", result.stdout
    )
    assert re.search(r"Slowest layers at the end: \S+ \(-\d\.\d\d\)", result.stdout)
    assert re.search(r"Fastest: \S+ \(-\d\.\d\d\)", result.stdout)
    assert re.search(r"Monitoring took \d+\.\d\d s, \d+\.\d\d % of the training, .* every 4 steps\.", lines[-1])


def test_hold_serves_until_ctrl_c() -> None:
    """The last values, as those of a run that has ended."""
    command = [sys.executable, "-u", "-m", "otel_train", "demo", "--steps", "2", "--port", "0", "--hold"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, cwd=ROOT) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        output = ""
        while "until Ctrl-C" not in output:
            line = process.stdout.readline()
            assert line, process.stderr.read()
            output += line
        url = re.findall(r"http://localhost:\d+/", output)[-1]
        time.sleep(0.5)
        text = urllib.request.urlopen(f"{url}metrics", timeout=10).read().decode()
        assert re.search(r"^otel_train_run_active\{.*\} 0\.0$", text, re.MULTILINE)
        process.send_signal(signal.SIGINT)
        assert process.wait(30) == 0
        assert process.stderr.read() == ""


def test_generate_check_passes_here_and_fails_elsewhere(tmp_path: Path) -> None:
    """0 for a clean checkout, 2 outside of one, 1 where a file differs."""
    assert run("generate", "--check").returncode == 0
    outside = run("generate", cwd=tmp_path)
    assert outside.returncode == 2
    assert outside.stderr.count("\n") == 1
    (tmp_path / "otel_train" / "catalog").mkdir(parents=True)
    drifted = run("generate", "--check", cwd=tmp_path)
    assert drifted.returncode == 1
    assert "+# Metrics" in drifted.stdout
