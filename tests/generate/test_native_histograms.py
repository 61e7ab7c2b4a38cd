"""Configurations with native histograms: each for its own versions of Prometheus, which really store what its head promises."""

from __future__ import annotations

import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
import yaml
from torch.optim import SGD

import otel_train
from otel_train import assets
from otel_train.catalog import gradients, throughput
from otel_train.generate.native_histograms import RANGES, Range
from tests import problems
from tests.problems import Mlp
from tests.servers import REPOSITORY, Prometheus, Version, find_program, wait_until

FOLDER = REPOSITORY / "deploy/prometheus/native-histograms"
NAME = gradients.LAYER_GRAD_MAGNITUDE.prometheus_name
REFUSED = {
    "stable": {
        "from-2.45.yaml": "field scrape_classic_histograms not found",
        "from-3.0.yaml": "field always_scrape_classic_histograms not found",
        "from-3.8.yaml": "field scrape_native_histograms not found",
    },
    "current": {
        "from-2.45.yaml": "field scrape_classic_histograms not found",
        "from-3.8.yaml": "field scrape_native_histograms not found",
    },
}


def features(text: str) -> list[str]:
    """Return what the command in a file's head switches on."""
    return re.findall(r"--enable-feature=(\S+)", text)


@pytest.mark.servers
@pytest.mark.parametrize("versions", RANGES, ids=lambda versions: versions.first)
@pytest.mark.parametrize("version", REFUSED)
def test_promtool_accepts_the_files_of_its_version_and_refuses_later_ones(version: Version, versions: Range) -> None:
    """2.42 and 3.5: what a version does not know is an error, so that one file for all cannot be."""
    name = versions.file_name
    promtool = find_program(version, "promtool")
    done = subprocess.run([promtool, "check", "config", FOLDER / name], capture_output=True, text=True, check=False)
    said = done.stdout + done.stderr
    if expected := REFUSED[version].get(name):
        assert expected in said
        assert done.returncode == 1
    else:
        assert "1 rule files found" in said
        assert done.returncode == 0, said


def test_ranges_follow_each_other_and_each_has_its_file() -> None:
    """No version is left out, none is in two."""
    assert [versions.first for versions in RANGES] == ["2.40", "2.45", "3.0", "3.8"]
    assert [versions.last for versions in RANGES] == ["2.44", "2.55", "3.7", None]
    assert {path.name for path in FOLDER.iterdir()} == {versions.file_name for versions in RANGES}


def test_they_differ_from_the_usual_configuration_in_what_they_are_for_only() -> None:
    """Clocks, rules, targets, alerts."""
    usual = yaml.safe_load((FOLDER.parent / "prometheus.yaml").read_text())
    for versions in RANGES:
        text = (FOLDER / versions.file_name).read_text()
        config = yaml.safe_load(text.replace("../", ""))
        (job,) = config["scrape_configs"]
        assert {name: job.pop(name) for name in versions.settings} == versions.settings
        assert config == usual
        assert features(text) == (["native-histograms"] if versions.by_flag else [])
        for pattern in (*config["rule_files"], *job["file_sd_configs"][0]["files"]):
            assert list((FOLDER / "..").glob(pattern)), pattern


def test_no_shipped_query_asks_for_the_classic_form_of_a_native_histogram() -> None:
    """Prometheus before 2.45 cannot have both, and stores the native one."""
    asking = {
        path: text for path, text in assets.read().items() if path.endswith(".json") or "/rules/" in path or "/runbooks/" in path
    }
    assert any("_bucket" in text for text in asking.values()), "or this looks at nothing"
    names = (NAME, gradients.LAYER_GRAD_VALUE.prometheus_name)
    assert [path for path, text in asking.items() if any(f"{name}_bucket" in text for name in names)] == []


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    """Train a step, and serve it."""
    model = Mlp(hidden=16)
    optimizer = SGD(model.parameters(), lr=0.01)
    with otel_train.attach(model, optimizer, host="127.0.0.1", port=0, every_n_steps=1) as monitor:
        problems.vector_loss(model, 0).backward()  # type: ignore[no-untyped-call]  # torch's
        optimizer.step()
        assert monitor.flush()
        assert monitor.url is not None
        yield int(monitor.url.rstrip("/").rpartition(":")[2])
        monitor.close(linger_seconds=0)


@pytest.mark.servers
@pytest.mark.slow
@pytest.mark.parametrize(
    ("version", "name", "has_both"),
    [("stable", "from-2.40.yaml", False), ("current", "from-2.40.yaml", False), ("current", "from-3.0.yaml", True)],
)
def test_a_server_started_so_stores_native_histograms(
    version: Version,
    name: str,
    has_both: bool,  # noqa: FBT001  # a row of the table
    port: int,
    tmp_path: Path,
) -> None:
    """The file as shipped, but for the address and the clock; the flag of its head; the classic form where promised."""
    text = (FOLDER / name).read_text().replace(assets.TRAINING_ADDRESS, f"127.0.0.1:{port}")
    promised = "The classic form is kept" in text
    assert promised == has_both
    quick = re.sub(r"(scrape_interval|scrape_timeout): 1\ds?", r"\1: 1s", text)
    server = Prometheus(version, tmp_path, quick, features(text))
    try:
        server.wait_ready()
        wait_until(lambda: bool(server.query("up == 1")), 40, "the training is scraped")
        native = [entry["histogram"][1] for entry in server.ask(NAME)]
        assert native
        assert all(int(entry["count"]) > 0 and len(entry["buckets"]) > 3 for entry in native)
        classic = server.query(f'{NAME}_bucket{{le="+Inf"}}')
        assert len(classic) == (len(native) if has_both else 0)
        # histograms that have no native form stay as they are
        assert server.query(f"{throughput.STEP_DURATION.prometheus_name}_bucket")
    finally:
        server.stop()
