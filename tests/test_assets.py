"""The shipped files, out of a checkout and out of a wheel."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from otel_train import assets, generate
from otel_train.errors import ConfigError
from tests.servers import REPOSITORY


def test_every_generated_file_is_shipped() -> None:
    """As it is committed."""
    shipped = assets.read()
    assert set(generate.ARTIFACTS) <= set(shipped)
    assert [path for path, render in generate.ARTIFACTS.items() if shipped[path] != render()] == []


def test_every_address_that_is_replaced_stands_in_the_files() -> None:
    """Or a stack would run on the wrong ports and say nothing."""
    text = "".join(assets.read().values())
    for address in ("PROMETHEUS", "ALERTMANAGER", "GRAFANA", "TRAINING", "WEBHOOK"):
        assert getattr(assets, f"{address}_ADDRESS") in text
    assert assets.RUNBOOKS in text


def test_replacements_are_made_once(tmp_path: Path) -> None:
    """One address may be put in another's place."""
    swapped = {assets.PROMETHEUS_ADDRESS: assets.ALERTMANAGER_ADDRESS, assets.ALERTMANAGER_ADDRESS: assets.PROMETHEUS_ADDRESS}
    assets.write(tmp_path, swapped)
    compose = (tmp_path / "deploy/compose.yaml").read_text()
    assert f"http://{assets.ALERTMANAGER_ADDRESS}/-/ready" in compose
    assert f"http://{assets.PROMETHEUS_ADDRESS}/-/ready" in compose


def test_what_users_added_stays(tmp_path: Path) -> None:
    """Their targets and secrets lie beside our files."""
    assets.write(tmp_path)
    own = tmp_path / "deploy/prometheus/targets/mine.json"
    own.write_text("[]")
    assets.write(tmp_path)
    assert own.read_text() == "[]"


def test_a_folder_that_cannot_be_written_to_is_said(tmp_path: Path) -> None:
    """One line."""
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"expected a folder to write to, got .*file: .*; choose another"):
        assets.write(tmp_path / "file")


def test_a_wheel_has_them_too(tmp_path: Path) -> None:
    """Built, unpacked elsewhere, asked through its own command line, without the libraries that make the files."""
    secrets = [REPOSITORY / "deploy/secrets/planted.yaml", REPOSITORY / "deploy/prometheus/targets/planted.json"]
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "--wheel-dir", str(tmp_path)]
    for secret in secrets:
        secret.parent.mkdir(exist_ok=True)
        secret.touch()
    try:
        subprocess.run([*build, str(REPOSITORY)], check=True)
        assert not any("planted" in path for path in assets.read())
    finally:
        for secret in secrets:
            secret.unlink()
    (wheel,) = tmp_path.glob("*.whl")
    subprocess.run([sys.executable, "-m", "zipfile", "-e", str(wheel), str(tmp_path / "site")], check=True)
    assert list((tmp_path / "site").rglob("planted*")) == list((tmp_path / "site").rglob("*.png")) == []
    script = (
        "import sys; sys.modules['yaml'] = sys.modules['grafana_foundation_sdk'] = None\n"
        "import otel_train.cli, sys; sys.exit(otel_train.cli.main(sys.argv[1:]))"
    )
    done = subprocess.run(
        [sys.executable, "-c", script, "assets", str(tmp_path / "out"), "--runbooks", "https://wiki.example/ml/"],
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")}, cwd=tmp_path, capture_output=True, text=True, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    for path, text in assets.read().items():
        assert (tmp_path / "out" / path).read_text() == text.replace(assets.RUNBOOKS, "https://wiki.example/ml")
    assert (
        "https://wiki.example/ml/OtelTrainLayerStalled.md" in (tmp_path / "out/deploy/prometheus/rules/otel-train.yaml").read_text()
    )
