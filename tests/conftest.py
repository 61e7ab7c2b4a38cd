"""Fixtures for all tests: seeds, and a clean environment."""

from __future__ import annotations

import os

import pytest
import torch


@pytest.fixture(autouse=True)
def fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Seed torch, and keep variables of the machine out of the settings."""
    for name in list(os.environ):
        if name.startswith(("OTEL_", "SLURM_", "TORCHELASTIC_")) or name in {"RANK", "LOCAL_RANK", "WORLD_SIZE"}:
            monkeypatch.delenv(name)
    torch.manual_seed(0)
    torch.set_num_threads(1)  # the tests' models are too small for more
