"""The demo itself, scraped by real Prometheus 3.5 and 2.42 at once."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from otel_train.catalog import CATALOG, Instrument, activations, gradients, loss, otlp, parameters, specs_of, throughput, updates
from tests.servers import VERSIONS, Prometheus, Version, find_program, free_port, get, prometheus, stop

NOT_IN_THE_DEMO = {
    throughput.MEMORY_ALLOCATED.prometheus_name: "no accelerator",
    throughput.MEMORY_RESERVED.prometheus_name: "no accelerator",
    throughput.MEMORY_PEAK.prometheus_name: "no accelerator",
    throughput.ALLOCATOR_RETRIES.prometheus_name: "no accelerator",
    loss.LOSS_SCALE.prometheus_name: "fp32, so no scaler",
    activations.LAYER_ACTIVATION_SATURATED_RATIO.prometheus_name: "GELU does not saturate",
    parameters.REPLICA_DIVERGENCE.prometheus_name: "there is one rank",
    parameters.LOCAL_PARAM_NORM.prometheus_name: "there is one rank",
    parameters.LOCAL_LAYER_PARAM_NORM.prometheus_name: "there is one rank",
    gradients.LOCAL_LAYER_GRAD_NORM.prometheus_name: "there is one rank",
    updates.LOCAL_LAYER_UPDATE_RATIO.prometheus_name: "there is one rank",
    **{spec.prometheus_name: "nothing is pushed" for spec in specs_of(otlp)},
    gradients.LAYER_GRAD_VALUE.prometheus_name: "signed histograms are off",
}
ROOT = Path(__file__).parent.parent.parent

pytestmark = [pytest.mark.servers, pytest.mark.slow]


def _missing(server: Prometheus) -> set[str]:
    """Return the metrics that the server has never had a value of."""
    names = {name: f"{name}_bucket" if spec.instrument is Instrument.HISTOGRAM else name for name, spec in CATALOG.items()}
    return {name for name, stored in names.items() if not server.query(f"last_over_time({stored}[10m])")}


def panel_queries() -> list[str]:
    """Return what the panels of all dashboards ask for, with the demo's run, and an interval that fits the scrapes."""
    boards = [json.loads(path.read_text()) for path in sorted((ROOT / "dashboards").glob("*.json"))]
    queries = [target["expr"] for board in boards for panel in board["panels"] for target in panel.get("targets", [])]
    assert len(queries) > 20
    variables = {"$__rate_interval": "5s", "$job": ".+", "$run": "demo"}
    for name, value in variables.items():
        queries = [query.replace(name, value) for query in queries]
    return queries


def test_both_servers_store_the_whole_catalog_of_the_demo_and_its_end(tmp_path: Path) -> None:
    """`up` is 1, each metric that applies is stored, each panel of a dashboard has data, promtool finds nothing, `run_active` ends at 0."""
    environment = {**os.environ, "OTEL_TRAIN_PEAK_FLOPS": "1e12", "OTEL_TRAIN_RUN": "demo"}
    port, log = free_port(), tmp_path / "demo.log"
    command = [sys.executable, "-u", "-m", "otel_train", "demo", "--steps", "800", "--port", str(port), "--every-n-steps", "4"]
    up: dict[str, list[float]] = {version: [] for version in VERSIONS}
    exposition, empty = "", {"never asked"}
    # the servers first: some metrics exist in the warmup only, whose 80 steps take 4 s at 18 a second and are scraped once a second
    with prometheus("current", {"demo": port}) as current, prometheus("stable", {"demo": port}) as stable:
        servers: dict[Version, Prometheus] = {"current": current, "stable": stable}
        time.sleep(6)  # they scrape about 5 s after their start
        with log.open("w") as output:
            demo = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, cwd=ROOT, env=environment)
        try:
            while demo.poll() is None:
                for version, server in servers.items():
                    up[version] += [series.value for series in server.query("up")]
                if "step 726/800" in log.read_text() and not exposition:
                    exposition = get(f"http://127.0.0.1:{port}/metrics")
                    empty = {q for server in servers.values() for q in panel_queries() if not server.query(q)}
                time.sleep(0.5)
        finally:
            stop(demo)
        assert demo.returncode == 0, log.read_text()
        assert empty == set()
        for version, server in servers.items():
            assert 1.0 in up[version]
            assert _missing(server) == set(NOT_IN_THE_DEMO)
            (active,) = server.query("last_over_time(otel_train_run_active[10m])")
            assert (active.value, active.labels["run"], active.labels["rank"]) == (0, "demo", "0")
    for version in VERSIONS:
        checked = subprocess.run(
            [find_program(version, "promtool"), "check", "metrics"], input=exposition, capture_output=True, text=True, check=False
        )
        assert (checked.returncode, checked.stdout, checked.stderr) == (0, "", "")
