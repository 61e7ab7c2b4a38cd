"""Generated files follow from the catalog."""

from __future__ import annotations

from pathlib import Path

from otel_train import generate
from otel_train.catalog import CATALOG
from otel_train.generate.reference import render_reference

ROOT = Path(__file__).parent.parent.parent


def test_the_committed_files_are_what_the_catalog_says() -> None:
    """`otel-train generate` was run."""
    assert generate.check(ROOT) == []


def test_a_planted_change_is_found_and_mended(tmp_path: Path) -> None:
    """The check names the file, shows the difference and says what to run."""
    assert generate.write(tmp_path) == list(generate.ARTIFACTS)
    assert generate.check(tmp_path) == []
    reference = tmp_path / "dashboards" / "METRICS.md"
    reference.write_text(reference.read_text().replace("otel_train_loss_smoothed", "otel_train_lossy"))
    (difference,) = generate.check(tmp_path)
    assert "--- dashboards/METRICS.md" in difference
    assert "otel_train_lossy" in difference
    assert "run: otel-train generate" in difference
    assert generate.write(tmp_path) == ["dashboards/METRICS.md"]
    assert generate.check(tmp_path) == []


def test_the_reference_names_every_metric_once() -> None:
    """Both names and the meaning, in rows of four cells."""
    lines = render_reference().splitlines()
    for name, spec in CATALOG.items():
        (row,) = [line for line in lines if line.startswith(f"| `{name}`")]
        assert f"`{spec.name}`" in row
        assert row.replace("\\|", "").count("|") == 5


def test_rendering_is_deterministic_and_headed() -> None:
    """Or every commit would drift."""
    for render in generate.ARTIFACTS.values():
        assert render() == render()
        assert "Do not edit" in render().splitlines()[0]
