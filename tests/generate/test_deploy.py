"""Shipped configurations: accepted by the programs that read them, and safe as they are."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_train import assets
from otel_train.generate.alerts import alerts
from otel_train.generate.deploy import IMAGES
from otel_train.generate.time_base import DEMO, STANDARD, TimeBase
from tests.generate.queries import unknown
from tests.servers import REPOSITORY, VERSIONS, Version, find_program

FOLDERS = {"deploy": STANDARD, "deploy/demo": DEMO}


def load(path: str) -> Any:
    """Read a shipped YAML file."""
    return yaml.safe_load((REPOSITORY / path).read_text())


def run(program: Path, *arguments: str, cwd: Path = REPOSITORY) -> str:
    """Run a program; fail with what it says if it does."""
    done = subprocess.run([program, *arguments], capture_output=True, text=True, check=False, cwd=cwd)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


@pytest.mark.servers
@pytest.mark.parametrize("folder", FOLDERS)
@pytest.mark.parametrize("version", VERSIONS)
def test_promtool_and_amtool_accept_all_files(version: Version, folder: str) -> None:
    """Of Prometheus 3.5 and 2.42, Alertmanager 0.33 and 0.25."""
    promtool, amtool = find_program(version, "promtool"), find_program(version, "amtool")
    said = run(promtool, "check", "config", f"{folder}/prometheus/prometheus.yaml")
    assert "1 rule files found" in said
    assert "27 rules found" in run(promtool, "check", "rules", f"{folder}/prometheus/rules/otel-train.yaml")
    assert "1 inhibit rules" in run(amtool, "check-config", f"{folder}/alertmanager/alertmanager.yaml")


@pytest.mark.servers
@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize(
    ("labels", "receiver"), [({"run": "r", "alertname": "OtelTrainLayerStalled"}, "webhook"), ({"alertname": "Other"}, "webhook")]
)
def test_every_alert_has_a_receiver(version: Version, labels: dict[str, str], receiver: str) -> None:
    """Amtool follows the routes."""
    arguments = [f"{name}={value}" for name, value in labels.items()]
    config = f"--config.file={REPOSITORY / 'deploy/alertmanager/alertmanager.yaml'}"
    assert run(find_program(version, "amtool"), "config", "routes", "test", config, *arguments).strip() == receiver


@pytest.mark.servers
def test_compose_accepts_its_file_and_resolves_the_mounts() -> None:
    """Docker Compose 2 without an engine."""
    compose = find_program("current", "../libexec/docker/cli-plugins/docker-compose")
    resolved = json.loads(run(compose, "-f", "deploy/compose.yaml", "config", "--format", "json"))
    sources = [
        mount["source"] for service in resolved["services"].values() for mount in service["volumes"] if mount["type"] == "bind"
    ]
    assert all(Path(source).is_dir() for source in sources), sources
    assert str(REPOSITORY / "dashboards") in sources


def test_compose_pins_its_images_checks_their_health_and_opens_nothing() -> None:
    """A tag that cannot move, a probe for each, loopback only, privileges dropped."""
    services = load("deploy/compose.yaml")["services"]
    assert {service["image"] for service in services.values()} == {IMAGES[name] for name in services}
    for name, service in services.items():
        tag = service["image"].rpartition(":")[2]
        assert tag.lstrip("v").count(".") == 2, tag
        assert "http://127.0.0.1:" in service["healthcheck"]["test"][-1]
        assert service["network_mode"] == "host"
        assert service["cap_drop"] == ["ALL"]
        listening = [argument for argument in service.get("command", []) if argument.startswith("--web.listen-address=")]
        assert all(argument.startswith("--web.listen-address=127.0.0.1:") for argument in listening)
        assert listening or name == "grafana"
    assert services["grafana"]["environment"]["GF_SERVER_HTTP_ADDR"] == "127.0.0.1"


def test_no_secret_stands_in_a_file_and_no_password_is_a_default() -> None:
    """Grafana's comes from a file that is not shipped, the webhook's token too; Compose does not start without the first."""
    compose = load("deploy/compose.yaml")
    environment = compose["services"]["grafana"]["environment"]
    assert environment["GF_SECURITY_ADMIN_PASSWORD__FILE"] == "/run/secrets/grafana_admin_password"
    assert "GF_SECURITY_ADMIN_PASSWORD" not in environment
    # Grafana takes an empty file for none, and would fall back to its default
    assert compose["services"]["grafana"]["entrypoint"][2].startswith(
        f"test -s {environment['GF_SECURITY_ADMIN_PASSWORD__FILE']} || "
    )
    secret = compose["secrets"]["grafana_admin_password"]["file"]
    assert not (REPOSITORY / "deploy" / secret).exists()
    (webhook,) = load("deploy/alertmanager/alertmanager.yaml")["receivers"][0]["webhook_configs"]
    assert webhook["http_config"] == {"authorization": {"credentials_file": "secrets/webhook_token"}}
    ignored = subprocess.run(
        ["git", "check-ignore", "deploy/secrets/x", "deploy/alertmanager/secrets/x"],
        capture_output=True, text=True, check=False, cwd=REPOSITORY,
    )  # fmt: skip
    assert ignored.stdout.splitlines() == ["deploy/secrets/x", "deploy/alertmanager/secrets/x"]


@pytest.mark.parametrize(("folder", "time_base"), FOLDERS.items())
def test_the_clocks_of_a_folder_are_those_of_its_time_base(folder: str, time_base: TimeBase) -> None:
    """Scrape, evaluation, `for`, groups of messages."""
    interval = f"{time_base.scrape}s"
    config = load(f"{folder}/prometheus/prometheus.yaml")
    assert config["global"] | {"scrape_timeout": ""} == {
        "scrape_interval": interval, "evaluation_interval": interval, "scrape_timeout": "",
    }  # fmt: skip
    (group,) = load(f"{folder}/prometheus/rules/otel-train.yaml")["groups"]
    assert group["interval"] == interval
    route = load(f"{folder}/alertmanager/alertmanager.yaml")["route"]
    assert route["group_by"] == ["job", "run"]
    assert route["group_wait"] == f"{time_base.group_wait}s"


def test_trainings_are_found_by_address_and_by_file() -> None:
    """Neither sets run or rank, which each series has; the folder of the file is there, or Prometheus would not see new ones."""
    (scrape,) = load("deploy/prometheus/prometheus.yaml")["scrape_configs"]
    assert scrape["static_configs"] == [{"targets": [assets.TRAINING_ADDRESS]}]
    assert scrape["file_sd_configs"] == [{"files": ["targets/*.json"]}]
    assert (REPOSITORY / "deploy/prometheus/targets").is_dir()


def test_grafana_finds_data_sources_dashboards_and_the_alerts_of_prometheus() -> None:
    """Provisioned, and not to be changed by hand; `$__rate_interval` fits the scrapes."""
    sources = {source["type"]: source for source in load("deploy/grafana/provisioning/datasources/otel-train.yaml")["datasources"]}
    prometheus = sources["prometheus"]
    assert prometheus["jsonData"]["timeInterval"] == f"{STANDARD.scrape}s"
    assert prometheus["jsonData"]["manageAlerts"] is True
    assert prometheus["jsonData"]["alertmanagerUid"] == sources["alertmanager"]["uid"]
    assert not any(source["editable"] for source in sources.values())
    (provider,) = load("deploy/grafana/provisioning/dashboards/otel-train.yaml")["providers"]
    mounts = load("deploy/compose.yaml")["services"]["grafana"]["volumes"]
    assert f"../dashboards:{provider['options']['path']}:ro" in mounts


def test_every_alert_has_a_runbook_that_its_link_leads_to() -> None:
    """With its rule, and the four sections, each with text."""
    rules = load("deploy/prometheus/rules/otel-train.yaml")["groups"][0]["rules"]
    links = {rule["alert"]: rule["annotations"]["runbook_url"] for rule in rules if "alert" in rule}
    assert set(links) == {alert.name for alert in alerts(STANDARD)}
    for alert in alerts(STANDARD):
        assert links[alert.name] == f"{assets.RUNBOOKS}/{alert.name}.md"
        text = (REPOSITORY / f"deploy/runbooks/{alert.name}.md").read_text()
        assert alert.expr in text
        sections = {part.partition("\n")[0]: part.partition("\n")[2].strip() for part in text.split("\n## ")[1:]}
        assert list(sections) == ["Meaning", "Impact", "Diagnosis", "Mitigation"]
        assert all(len(section) > 100 for section in sections.values()), alert.name


@pytest.mark.parametrize("alert", [alert.name for alert in alerts(STANDARD)])
def test_every_query_of_a_runbook_names_what_exists(alert: str) -> None:
    """People paste them at night."""
    prose = (REPOSITORY / f"otel_train/generate/runbooks/{alert}.md").read_text()
    queries = [line.strip() for block in prose.split("```")[1::2] for line in block.splitlines() if line.strip()]
    assert len(queries) >= 3
    for query in queries:
        assert unknown(query.replace("$layer", "fc")) == set(), query
