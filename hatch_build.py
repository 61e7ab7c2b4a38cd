"""Puts the shipped files, and nothing else that lies beside them, into the wheel."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class AssetsHook(BuildHookInterface):  # type: ignore[type-arg]
    """Reads the generated list, so that secrets and targets of a developer stay where they are."""

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        """Add the files to a wheel; an editable install finds them in the checkout."""
        if version == "editable":
            return
        listed = "deploy/files.json"
        paths = [listed, *json.loads((Path(self.root) / listed).read_text(encoding="utf-8"))]
        build_data["force_include"].update({path: f"otel_train/assets/{path}" for path in paths})
