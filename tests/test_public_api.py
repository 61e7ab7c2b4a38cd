"""The public surface, and what importing it costs."""

from __future__ import annotations

import subprocess
import sys

import otel_train

PUBLIC = [
    "AttachError", "CatalogError", "ConfigError", "MemorySink", "MissingDependencyError", "Monitor", "MonitorConfig",
    "OtelTrainError", "Sink", "Snapshot", "__version__", "attach",
]  # fmt: skip
HEAVY = ["grafana_foundation_sdk", "lightning", "pytorch_lightning", "matplotlib", "rich", "opentelemetry", "transformers"]


def test_the_public_names_are_the_frozen_ones() -> None:
    """A name once public stays."""
    assert otel_train.__all__ == PUBLIC
    assert all(hasattr(otel_train, name) for name in PUBLIC)


def test_importing_brings_nothing_heavy() -> None:
    """Training processes import us."""
    code = f"import sys, otel_train; print([name for name in {HEAVY} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"


def test_importing_starts_nothing() -> None:
    """No thread, no socket, no entry in prometheus_client's default registry."""
    code = (
        "import threading, prometheus_client; before = threading.active_count();"
        "import otel_train; names = [m.name for m in prometheus_client.REGISTRY.collect()];"
        "print(threading.active_count() - before, [n for n in names if 'otel' in n])"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "0 []"
