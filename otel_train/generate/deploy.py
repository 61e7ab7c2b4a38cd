"""Configurations of Prometheus, Alertmanager, Grafana and Docker Compose: everything on one machine, on loopback."""

from __future__ import annotations

from typing import Any

from otel_train.assets import ALERTMANAGER_ADDRESS, GRAFANA_ADDRESS, PROMETHEUS_ADDRESS, TRAINING_ADDRESS, WEBHOOK_ADDRESS
from otel_train.generate.promql import seconds
from otel_train.generate.time_base import STANDARD, TimeBase
from otel_train.generate.yaml_text import file_text

JOB = "otel-train"
_PASSWORD = "/run/secrets/grafana_admin_password"  # noqa: S105  # where it is, not what
IMAGES = {
    "prometheus": "prom/prometheus:v3.5.3",
    "alertmanager": "prom/alertmanager:v0.33.1",
    "grafana": "grafana/grafana:12.4.10",
    "otel-collector": "otel/opentelemetry-collector-contrib:0.159.0",
}
_SOURCE = "otel_train/generate/deploy.py"
_DATA_SOURCE, _ALERT_SOURCE = "otel-train-prometheus", "otel-train-alertmanager"


def render_prometheus(time_base: TimeBase) -> str:
    """Return Prometheus' configuration."""
    comment = f"""\
# Time base {time_base.name}. Trainings are found in two ways:
# - static: the address of a training on this machine, where `attach` listens by default;
# - targets/*.json, read again when it changes: [{{"targets": ["node1:9464", "node2:9464"]}}]. Put yours into a file
#   of its own. Do not set the labels run and rank there: each series has them.
"""
    return _file(comment, {**server_config(time_base), "scrape_configs": [scrape_job()]})


def server_config(time_base: TimeBase, folder: str = "") -> dict[str, Any]:
    """Return what every Prometheus of ours has: its clocks, the rules, and where alerts go.

    Args:
        time_base: The clocks.
        folder: Way from the configuration's folder to that of the rules, with ``/`` at its end.
    """
    return {
        "global": {
            "scrape_interval": seconds(time_base.scrape),
            "scrape_timeout": seconds(time_base.scrape_timeout),
            "evaluation_interval": seconds(time_base.scrape),
        },
        "rule_files": [f"{folder}rules/*.yaml"],
        "alerting": {"alertmanagers": [{"static_configs": [{"targets": [ALERTMANAGER_ADDRESS]}]}]},
    }


def scrape_job(folder: str = "") -> dict[str, Any]:
    """Return the job that scrapes trainings; the folder is that of the targets, as in ``server_config``."""
    return {
        "job_name": JOB,
        "static_configs": [{"targets": [TRAINING_ADDRESS]}],
        "file_sd_configs": [{"files": [f"{folder}targets/*.json"]}],
    }


def render_targets() -> str:
    """Return a list of targets that is empty; JSON has no comments, so that it says nothing of where it comes from."""
    return "[]\n"


def render_alertmanager(time_base: TimeBase) -> str:
    """Return Alertmanager's configuration."""
    comment = f"""\
# Time base {time_base.name}. One message a run: its alerts belong together. The receiver is a webhook, with a bearer token from the
# file secrets/webhook_token beside this one. Yours goes into a copy of this file: `otel-train assets` writes this one anew. Secrets
# belong into files of their own (credentials_file, api_url_file, auth_password_file …).
"""
    ours = 'alertname=~"OtelTrain.+"'
    config = {
        "route": {
            "receiver": "webhook",
            "group_by": ["job", "run"],
            "group_wait": seconds(time_base.group_wait),
            "group_interval": seconds(time_base.group_interval),
            "repeat_interval": seconds(time_base.repeat_interval),
        },
        "receivers": [
            {
                "name": "webhook",
                "webhook_configs": [
                    {
                        "url": f"http://{WEBHOOK_ADDRESS}/alerts",
                        "send_resolved": True,
                        "http_config": {"authorization": {"credentials_file": "secrets/webhook_token"}},
                    }
                ],
            }
        ],
        # a run that is broken, or gone, needs no advice
        "inhibit_rules": [
            {
                "source_matchers": [ours, 'severity="critical"'],
                "target_matchers": [ours, 'severity=~"warning|info"'],
                "equal": ["job", "run"],
            }
        ],
    }
    return _file(comment, config)


def render_data_sources() -> str:
    """Return Grafana's data sources: Prometheus with its alert rules, and Alertmanager."""
    prometheus = {
        "name": "Prometheus",
        "uid": _DATA_SOURCE,
        "type": "prometheus",
        "access": "proxy",
        "url": f"http://{PROMETHEUS_ADDRESS}",
        "isDefault": True,
        "editable": False,
        "jsonData": {
            "httpMethod": "POST",
            # what $__rate_interval is made of
            "timeInterval": seconds(STANDARD.scrape),
            "manageAlerts": True,
            "alertmanagerUid": _ALERT_SOURCE,
        },
    }
    alertmanager = {
        "name": "Alertmanager",
        "uid": _ALERT_SOURCE,
        "type": "alertmanager",
        "access": "proxy",
        "url": f"http://{ALERTMANAGER_ADDRESS}",
        "editable": False,
        "jsonData": {"implementation": "prometheus", "handleGrafanaManagedAlerts": False},
    }
    comment = "# The rules of rules/*.yaml are Prometheus' own; Grafana shows them, and their alerts, through these two.\n"
    return _file(comment, {"apiVersion": 1, "prune": True, "datasources": [prometheus, alertmanager]})


def render_dashboard_provider() -> str:
    """Return where Grafana finds the dashboards."""
    provider = {
        "name": "otel-train",
        "folder": "Training",
        "type": "file",
        "allowUiUpdates": False,
        "options": {"path": "/etc/otel-train/dashboards"},
    }
    return _file("", {"apiVersion": 1, "providers": [provider]})


def render_compose() -> str:
    """Return the Compose file."""
    comment = """\
# Prometheus, Alertmanager and Grafana beside a training on the same Linux machine. In this file's folder:
#   mkdir -p secrets alertmanager/secrets
#   head -c 24 /dev/urandom | base64 > secrets/grafana_admin_password
#   printf %s TOKEN-OF-YOUR-WEBHOOK > alertmanager/secrets/webhook_token
#   cp alertmanager/alertmanager.yaml alertmanager/own.yaml    # and name your receiver in it: before that nobody gets a message
#   ALERTMANAGER_CONFIG=own.yaml docker compose up --detach
# They share the network of the machine, so that they reach the training's endpoint on loopback, and listen there only: nothing is
# open to other machines. Grafana's user is admin, its password the first file's; there is no other. The containers read the secrets
# as users of their own: the two files must be readable to all, the folders above need not be open to others.
"""
    config = {
        "name": "otel-train",
        "services": {
            "prometheus": _prometheus_service(),
            "alertmanager": _alertmanager_service(),
            "grafana": _grafana_service(),
        },
        "secrets": {"grafana_admin_password": {"file": "./secrets/grafana_admin_password"}},
        "volumes": {"prometheus": {}, "alertmanager": {}, "grafana": {}},
    }
    return _file(comment, config)


def _prometheus_service() -> dict[str, Any]:
    return _service(
        "prometheus",
        command=[
            "--config.file=/etc/prometheus/prometheus.yaml",
            "--storage.tsdb.path=/prometheus",
            "--storage.tsdb.retention.time=90d",
            f"--web.listen-address={PROMETHEUS_ADDRESS}",
        ],
        volumes=["./prometheus:/etc/prometheus:ro", "prometheus:/prometheus"],
        health=f"http://{PROMETHEUS_ADDRESS}/-/ready",
        after=["alertmanager"],
    )


def _alertmanager_service() -> dict[str, Any]:
    return _service(
        "alertmanager",
        command=[
            "--config.file=/etc/alertmanager/${ALERTMANAGER_CONFIG:-alertmanager.yaml}",
            "--storage.path=/alertmanager",
            f"--web.listen-address={ALERTMANAGER_ADDRESS}",
            "--cluster.listen-address=",
        ],
        volumes=["./alertmanager:/etc/alertmanager:ro", "alertmanager:/alertmanager"],
        health=f"http://{ALERTMANAGER_ADDRESS}/-/ready",
    )


def _grafana_service() -> dict[str, Any]:
    host, _, port = GRAFANA_ADDRESS.partition(":")
    volumes = [
        "./grafana/provisioning:/etc/grafana/provisioning:ro",
        "../dashboards:/etc/otel-train/dashboards:ro",
        "grafana:/var/lib/grafana",
    ]
    environment = {
        "GF_SERVER_HTTP_ADDR": host,
        "GF_SERVER_HTTP_PORT": port,
        "GF_SECURITY_ADMIN_PASSWORD__FILE": _PASSWORD,
        "GF_USERS_ALLOW_SIGN_UP": "false",
        "GF_AUTH_ANONYMOUS_ENABLED": "false",
        "GF_ANALYTICS_REPORTING_ENABLED": "false",
        "GF_ANALYTICS_CHECK_FOR_UPDATES": "false",
    }
    service = _service("grafana", volumes=volumes, health=f"http://{GRAFANA_ADDRESS}/api/health", after=["prometheus"])
    # with an empty file Grafana would fall back to its default password
    guard = f"test -s {_PASSWORD} || {{ echo 'secrets/grafana_admin_password is empty' >&2; exit 1; }}; exec /run.sh"
    return {**service, "entrypoint": ["/bin/sh", "-c", guard], "environment": environment, "secrets": ["grafana_admin_password"]}


def _service(
    name: str, *, volumes: list[str], health: str, command: list[str] | None = None, after: list[str] | None = None
) -> dict[str, Any]:
    service: dict[str, Any] = {"image": IMAGES[name], "network_mode": "host", "restart": "unless-stopped"}
    if command:
        service["command"] = command
    if after:
        service["depends_on"] = {other: {"condition": "service_healthy"} for other in after}
    probe = ["CMD", "wget", "--quiet", "--spider", health]
    check = {"test": probe, "interval": "10s", "timeout": "5s", "retries": 6, "start_period": "30s"}
    hardening = {"security_opt": ["no-new-privileges:true"], "cap_drop": ["ALL"]}
    return {**service, "volumes": volumes, "healthcheck": check, **hardening}


def _file(comment: str, config: dict[str, Any]) -> str:
    return file_text(_SOURCE, comment, config)
