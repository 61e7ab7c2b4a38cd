"""The public surface, and what importing it costs."""

from __future__ import annotations

import compileall
import os
import shutil
import subprocess
import sys
from pathlib import Path

import otel_train

PUBLIC = [
    "AttachError", "CatalogError", "ConfigError", "MemorySink", "MeterSink", "MissingDependencyError", "Monitor", "MonitorConfig",
    "OtelTrainError", "OtlpSink", "Sink", "Snapshot", "__version__", "attach",
]  # fmt: skip


def test_the_public_names_are_the_frozen_ones() -> None:
    """A name once public stays."""
    assert otel_train.__all__ == PUBLIC
    assert all(hasattr(otel_train, name) for name in PUBLIC)


def test_importing_brings_one_package_and_no_more_of_torch() -> None:
    """Training processes import us: of what is not the standard library's, prometheus_client, and what torch has loaded anyway."""
    code = (
        "import sys, torch; before = set(sys.modules); import otel_train;"
        "new = {name.partition('.')[0] for name in set(sys.modules) - before};"
        "print(*sorted(new - set(sys.stdlib_module_names)))"
    )
    assert _run(code).split() == ["otel_train", "prometheus_client"]


def test_the_libraries_of_pushes_are_loaded_by_those_who_push_only() -> None:
    """Both sinks can be named without them."""
    code = (
        "import sys, otel_train; otel_train.OtlpSink, otel_train.MeterSink; print([m for m in sys.modules if 'opentelemetry' in m])"
    )
    assert _run(code) == "[]"


def test_a_monitored_training_loads_no_module_that_a_bare_one_does_not() -> None:
    """Parts of torch (distributed tensors, the compiler) take seconds to load; ``attach``, samples and scrapes need none of them."""
    assert _run(_LOOP).split() == ["encodings.idna", "stringprep"], "for the endpoint's host name"


_LOOP = """
import sys, urllib.request
import otel_train, torch
from torch import nn

model = nn.Sequential(nn.Linear(64, 512), nn.ReLU(), nn.Linear(512, 8))
optimizer = torch.optim.AdamW(model.parameters())

def step(clip):
    loss = model(torch.ones(4, 64)).sum()
    loss.backward()
    clip(1.0)
    optimizer.step()
    return loss

step(lambda limit: nn.utils.clip_grad_norm_(model.parameters(), limit))
before = set(sys.modules)
with otel_train.attach(model, optimizer, port=0, every_n_steps=1) as monitor:
    monitor.observe(loss=step(monitor.clip_grad_norm_), tokens=4)
    monitor.flush()
    urllib.request.urlopen(monitor.url + "metrics").read()
print(*sorted(set(sys.modules) - before))
"""


def test_importing_takes_at_most_150_ms_after_torch(tmp_path: Path) -> None:
    """Processor time of the fastest of five fresh processes, compiled to bytecode as pip does it; 45 ms on two cores."""
    shutil.copytree(Path(otel_train.__file__).parent, tmp_path / "otel_train")
    assert compileall.compile_dir(tmp_path, quiet=1)
    code = "import time, torch; began = time.process_time(); import otel_train; print(time.process_time() - began)"
    assert min(float(_run(code, tmp_path)) for _ in range(5)) < 0.150


def _run(code: str, directory: Path | None = None) -> str:
    """Return what a fresh process prints, with the package of that directory, else the one that is tested here."""
    command = [sys.executable, "-c", code]
    environment = os.environ if directory is None else {**os.environ, "PYTHONPATH": str(directory)}
    result = subprocess.run(command, capture_output=True, text=True, check=True, env=environment, cwd=directory)
    return result.stdout.strip()


def test_importing_starts_nothing() -> None:
    """No thread, no socket, no entry in prometheus_client's default registry."""
    code = (
        "import threading, prometheus_client; before = threading.active_count();"
        "import otel_train; names = [m.name for m in prometheus_client.REGISTRY.collect()];"
        "print(threading.active_count() - before, [n for n in names if 'otel' in n])"
    )
    assert _run(code) == "0 []"
