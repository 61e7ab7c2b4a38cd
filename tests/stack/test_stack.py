"""The servers of a stack: found, started with the shipped files, and gone afterwards."""

from __future__ import annotations

import json
import os
import shutil
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from otel_train.errors import StackError
from otel_train.stack import Stack, StackOptions
from otel_train.stack.programs import Server, find_programs, free_port
from tests.servers import VERSIONS, Version, find_program, get


def program(folder: Path, name: str, text: str = "#!/bin/sh\nexit 1\n") -> Path:
    """Write an executable."""
    path = folder / name
    path.write_text(text)
    path.chmod(0o755)
    return path


@pytest.mark.parametrize(
    ("there", "missing"),
    [((), "Prometheus and Alertmanager"), (("prometheus",), "Alertmanager"), (("alertmanager",), "Prometheus")],
)
def test_missing_programs_are_named_with_what_to_install(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, there: tuple[str, ...], missing: str
) -> None:
    """One line, with the way out."""
    for name in there:
        program(tmp_path, name)
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(StackError) as raised:
        find_programs()
    assert str(raised.value).startswith(
        f"expected {missing} on the PATH, found none; install them (Debian, Ubuntu: apt-get install"
    )
    assert "\n" not in str(raised.value)


def test_alertmanager_is_found_under_both_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Debian's, and everybody else's in front."""
    monkeypatch.setenv("PATH", str(tmp_path))
    program(tmp_path, "prometheus")
    debian = program(tmp_path, "prometheus-alertmanager")
    assert find_programs().alertmanager == debian
    own = program(tmp_path, "alertmanager")
    assert find_programs().alertmanager == own


def test_a_server_that_ends_at_once_is_said_with_its_last_words(tmp_path: Path) -> None:
    """And where the others are."""
    broken = program(tmp_path, "broken", "#!/bin/sh\necho first\necho 'no template'\n")
    log = tmp_path / "log"
    with pytest.raises(StackError) as raised:
        Server("Alertmanager", [str(broken)], "http://127.0.0.1:9", log)
    assert str(raised.value) == f"Alertmanager ended at once: no template (all of it: {log})"


def test_a_server_that_ends_later_is_said_too(tmp_path: Path) -> None:
    """Somebody stopped it, or its disk is full."""
    import http.server
    import threading

    class Ready(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200)
            self.end_headers()

        def log_message(self, *unused: object) -> None:
            pass

    with http.server.HTTPServer(("127.0.0.1", 0), Ready) as answering:
        threading.Thread(target=answering.serve_forever, args=(0.1,), daemon=True).start()
        dying = program(tmp_path, "dying", "#!/bin/sh\necho 'disk full'\nsleep 0.3\n")
        server = Server("Prometheus", [str(dying)], f"http://127.0.0.1:{answering.server_port}", tmp_path / "log")
        server.check()
        while not server.ended:
            time.sleep(0.05)
        answering.shutdown()
    with pytest.raises(StackError, match=r"Prometheus ended by itself with status 0: disk full \(all of it: .*log\)"):
        server.check()


def test_a_program_that_cannot_be_started_is_said(tmp_path: Path) -> None:
    """One line, no traceback of ours."""
    with pytest.raises(StackError, match=r"Prometheus"):
        Server("Prometheus", [str(tmp_path / "gone")], "http://127.0.0.1:9", tmp_path / "log")


def test_a_taken_port_is_replaced_by_a_free_one() -> None:
    """People have a Prometheus of their own."""
    with socket.socket() as other:
        other.bind(("127.0.0.1", 0))
        other.listen()
        taken = other.getsockname()[1]
        assert free_port(taken) not in {0, taken}
    assert free_port(taken) == taken


@pytest.mark.servers
@pytest.mark.parametrize("version", VERSIONS)
def test_a_stack_runs_the_shipped_files_and_leaves_nothing(version: Version, monkeypatch: pytest.MonkeyPatch) -> None:
    """Addresses put in, the secret readable by its owner only, every target scraped; afterwards no server and no folder."""
    monkeypatch.setenv("PATH", f"{find_program(version, 'prometheus').parent}{os.pathsep}{os.environ['PATH']}")
    targets = ("localhost:1", "localhost:2")
    with Stack(StackOptions(targets, "standard"), lambda _: None) as stack:
        described = "\n".join(stack.describe())
        folder = Path(described.split("Files         ")[1].split("  ")[0])
        assert "deleted at the end" in described
        config = json.loads(get(f"{stack.prometheus.url}/api/v1/status/config"))["data"]["yaml"]
        assert all(text in config for text in ("localhost:1", "otel-train", stack.alertmanager.url.removeprefix("http://")))
        assert "localhost:9464" not in config
        rules = json.loads(get(f"{stack.prometheus.url}/api/v1/rules"))["data"]["groups"]
        assert len(rules[0]["rules"]) == 27
        assert rules[0]["rules"][-1]["annotations"]["runbook_url"].startswith(f"{stack.webhook.url}/runbooks/")
        token = folder / "deploy/alertmanager/secrets/webhook_token"
        assert token.stat().st_mode & 0o777 == 0o600
        assert json.loads((folder / "deploy/prometheus/targets/stack.json").read_text()) == [{"targets": ["localhost:2"]}]
        assert f"url: {stack.webhook.url}/alerts" in (folder / "deploy/alertmanager/alertmanager.yaml").read_text()
    assert stack.prometheus.ended
    assert stack.alertmanager.ended
    assert not folder.exists()


@pytest.mark.servers
def test_a_failed_stack_leaves_the_log_that_it_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second stack does not disarm the first one by changing its token."""
    monkeypatch.setenv("PATH", f"{find_program('current', 'prometheus').parent}{os.pathsep}{os.environ['PATH']}")
    with Stack(StackOptions(data=tmp_path), lambda _: None) as first:
        token = (tmp_path / "deploy/alertmanager/secrets/webhook_token").read_text()
        with pytest.raises(StackError, match="another stack runs on"):
            Stack(StackOptions(data=tmp_path), lambda _: None).__enter__()
        assert (tmp_path / "deploy/alertmanager/secrets/webhook_token").read_text() == token
        first.prometheus.check()
    broken = tmp_path / "bin"
    broken.mkdir()
    program(broken, "prometheus", "#!/bin/sh\necho broken\n")
    monkeypatch.setenv("PATH", f"{broken}{os.pathsep}{os.environ['PATH']}")
    with pytest.raises(StackError) as raised:
        Stack(StackOptions(), lambda _: None).__enter__()
    log = Path(str(raised.value).split("all of it: ")[1].rstrip(")"))
    assert log.read_text() == "broken\n"
    shutil.rmtree(log.parent)


@pytest.mark.servers
def test_a_stack_starts_behind_a_proxy_and_takes_ipv6_addresses(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Clusters set http_proxy; loopback is not asked through it."""
    monkeypatch.setenv("http_proxy", "http://127.0.0.1:1")
    monkeypatch.setenv("PATH", f"{find_program('current', 'prometheus').parent}{os.pathsep}{os.environ['PATH']}")
    with Stack(StackOptions(("[::1]:9464",), data=tmp_path), lambda _: None) as stack:
        assert not stack.wait_for_scrape(0.5)
        stack.prometheus.check()


@pytest.mark.servers
def test_data_is_kept_where_it_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And a second stack on it goes on."""
    monkeypatch.setenv("PATH", f"{find_program('current', 'prometheus').parent}{os.pathsep}{os.environ['PATH']}")
    for _ in range(2):
        with Stack(StackOptions(data=tmp_path / "kept"), lambda _: None) as stack:
            assert "kept" in "\n".join(stack.describe())
    assert (tmp_path / "kept/prometheus-data").is_dir()
    assert (tmp_path / "kept/deploy/compose.yaml").is_file()


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux tells a child of its parent's death")
@pytest.mark.servers
def test_servers_end_with_a_stack_that_is_killed(tmp_path: Path) -> None:
    """SIGKILL leaves no time to stop them."""
    path = f"{find_program('current', 'prometheus').parent}{os.pathsep}{os.environ['PATH']}"
    log = tmp_path / "log"
    with log.open("wb") as output:
        process = subprocess.Popen(
            [sys.executable, "-u", "-m", "otel_train", "stack", "--data", str(tmp_path / "data")],
            stdout=output, stderr=output, env=os.environ | {"PATH": path}, cwd=Path(__file__).parents[2],
        )  # fmt: skip
    deadline = time.monotonic() + 40
    while "Waiting for alerts" not in log.read_text() and time.monotonic() < deadline:
        time.sleep(0.1)
    url = log.read_text().split("Prometheus    ")[1].split()[0]
    assert get(f"{url}/-/ready")
    process.kill()
    process.wait(10)
    deadline = time.monotonic() + 15
    while time.monotonic() < deadline:
        try:
            get(f"{url}/-/ready", timeout=1)
        except OSError:
            return
        time.sleep(0.2)
    pytest.fail("Prometheus outlived the stack that started it")
