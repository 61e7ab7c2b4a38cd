"""The shipped files: dashboards, rules, configurations, runbooks. They lie inside a wheel's package, and beside a checkout's."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from pathlib import Path

from otel_train.errors import ConfigError

PROMETHEUS_ADDRESS = "127.0.0.1:9090"
ALERTMANAGER_ADDRESS = "127.0.0.1:9093"
GRAFANA_ADDRESS = "127.0.0.1:3000"
TRAINING_ADDRESS = "localhost:9464"
WEBHOOK_ADDRESS = "127.0.0.1:9099"
"""Addresses in the shipped configurations: everything on one machine, and nothing reachable from another."""
RUNBOOKS = "https://github.com/otel-train/otel-train/blob/main/deploy/runbooks"
"""Where the runbook links of the shipped rules lead."""
MANIFEST = "deploy/files.json"
"""The list of all shipped files: what a user adds beside them, secrets among it, is not shipped."""
_IN_WHEEL, _IN_CHECKOUT = Path(__file__).parent / "assets", Path(__file__).parent.parent


def read() -> dict[str, str]:
    """Return the text of each shipped file by its path, ``/`` between folders.

    Raises:
        ConfigError: The installation lacks them.
    """
    root = _IN_WHEEL if _IN_WHEEL.is_dir() else _IN_CHECKOUT
    try:
        listed: list[str] = json.loads((root / MANIFEST).read_text(encoding="utf-8"))
        return {path: (root / path).read_text(encoding="utf-8") for path in listed}
    except OSError as error:
        raise ConfigError(f"expected the shipped files in {root}, got no {error.filename}; install otel-train again") from error


def write(folder: Path, replacements: Mapping[str, str] | None = None) -> list[str]:
    """Write the shipped files into a folder; other files there stay, those of the same name are replaced.

    Args:
        folder: Where to; made where it is not there.
        replacements: Text such as an address to what stands in its place.

    Returns:
        The paths, relative to the folder.

    Raises:
        ConfigError: The folder cannot be written to.
    """
    files = read()
    try:
        for path, text in files.items():
            target = folder / path
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_text(_replace(text, replacements or {}), encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"expected a folder to write to, got {folder}: {error.strerror}; choose another") from error
    return list(files)


def _replace(text: str, replacements: Mapping[str, str]) -> str:
    """Replace all at once, so that no replacement is replaced."""
    if not replacements:
        return text
    return re.sub("|".join(map(re.escape, replacements)), lambda found: replacements[found[0]], text)
