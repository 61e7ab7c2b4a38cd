"""Configurations of the OpenTelemetry collector: an agent on each node, a gateway before the stores, and a Prometheus behind it.

Names of components and settings are those of the release in ``IMAGES``. Older ones refuse these files: ``otlp_http`` is from 0.144,
``translation_strategy`` from 0.151, the name ``prometheus_remote_write`` from 0.154, and ``http`` below it from 0.158. Tests hold
them against a table of settings, which says where it is from.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from otel_train.assets import PROMETHEUS_ADDRESS
from otel_train.generate.deploy import IMAGES, server_config
from otel_train.generate.native_histograms import FEATURE
from otel_train.generate.time_base import STANDARD
from otel_train.generate.yaml_text import comments, file_text

_SOURCE = "otel_train/generate/collector.py"
_MIB = 1 << 20
AGENT_MIB, GATEWAY_MIB = 512, 2048
"""Memory that a collector may take for what is on its way; what waits is on the disk."""
LATE = "6h"
"""How late what was pushed may arrive: as long as the queues can hold a node's pushes."""
_QUEUE = "${env:QUEUE_DIRECTORY:-/var/lib/otelcol/queue}"
_SECRETS = "/etc/otel-train/secrets"


def render_agent() -> str:
    """Return the configuration of the collector on each node."""
    comment = comments(f"""
The agent: a collector on each node with trainings, which push to it on loopback. It stores what they push on the disk, and passes
it on to the gateway: neither a gateway that is away nor a node that starts anew loses it. In this file's folder, with the token
that the gateway's administrator gave you:

  mkdir -p queue secrets && printf %s TOKEN > secrets/gateway_token

{_docker("agent", AGENT_MIB, "--env GATEWAY_ENDPOINT=https://gateway.example:4318 ")}

In the trainings' environment:

  OTEL_EXPORTER_OTLP_ENDPOINT=http://localhost:4318

Variables: GATEWAY_ENDPOINT (https, or the token goes out readable), GATEWAY_CA_FILE (else the system's authorities),
GATEWAY_TOKEN_FILE, QUEUE_DIRECTORY. Nothing listens beyond loopback: 4318 for pushes, 13133 for health, 8888 for the collector's
own metrics.

Nothing is scraped here: a training that is scraped and pushed would be stored twice, as two instances.

One request at a time goes out, the oldest first, since Prometheus wants the points of a series in order. What the gateway refuses
for good, with 401 for a wrong token, is not sent again, and the agent's log says so.
""")
    gateway = {
        "endpoint": "${env:GATEWAY_ENDPOINT}",
        "tls": {"ca_file": "${env:GATEWAY_CA_FILE:-}"},
        "auth": {"authenticator": "bearertokenauth"},
        **_stored_queue(),
    }
    config = {
        "extensions": _extensions(),
        "receivers": {"otlp": {"protocols": {"http": {"endpoint": "127.0.0.1:4318"}}}},
        "processors": _processors(AGENT_MIB),
        "exporters": {"otlp_http": gateway},
    }
    return file_text(_SOURCE, comment, _with_service(config))


def render_gateway() -> str:
    """Return the configuration of the collector that all agents send to."""
    comment = comments(f"""
The gateway: takes what agents send, and writes it to Prometheus (remote write) and to a store that takes OTLP, such as
VictoriaMetrics. If you have only one of them, delete the other's exporter, here and below `service`: a store that stays away
until its queue is full holds the other back too, and agents keep what comes. In this file's folder:

  mkdir -p queue secrets && printf %s "$(head -c 24 /dev/urandom | base64)" > secrets/gateway_token

  cp YOUR-CERTIFICATE secrets/gateway.crt && cp ITS-KEY secrets/gateway.key

{_docker("gateway", GATEWAY_MIB)}

Variables: GATEWAY_LISTEN (all addresses, port 4318: by TLS, and for bearers of the token only), GATEWAY_CERTIFICATE_FILE,
GATEWAY_KEY_FILE, GATEWAY_TOKEN_FILE, QUEUE_DIRECTORY, REMOTE_WRITE_ENDPOINT, OTLP_STORE_ENDPOINT (without /v1/metrics). Stores on
other machines: https, and `auth` as in agent.yaml. Health (13133) and the collector's own metrics (8888) are on loopback.

Prometheus: start it as prometheus.yaml beside this file says. Series have the names and labels of the scrape road: units and
_total are added; labels of the scope are not, nor those of the resource, but for job (service.name) and instance
(service.instance.id). The rest of the resource is in target_info. Exponential histograms become native ones, and a series that
ends is stale at once. VictoriaMetrics has these names with -opentelemetry.usePrometheusNaming.

Agents have made batches. What waits for Prometheus waits in memory, is little, and is lost when the gateway starts anew. One
request is tried for 5 minutes at most, since old versions answer 500 to what they will never take. What waits for the OTLP store
is on the disk. What finds no place is refused, and waits on the agents' disks.
""")
    remote_write = {
        "http": {"endpoint": f"${{env:REMOTE_WRITE_ENDPOINT:-http://{PROMETHEUS_ADDRESS}/api/v1/write}}"},
        "translation_strategy": "UnderscoreEscapingWithSuffixes",
        "disable_scope_info": True,
        "target_info": {"enabled": True},
        "remote_write_queue": {"enabled": True, "queue_size": 200},
        "retry_on_failure": {"enabled": True, "max_elapsed_time": "5m"},
    }
    store = {"endpoint": "${env:OTLP_STORE_ENDPOINT:-http://127.0.0.1:8428/opentelemetry}", **_stored_queue()}
    listener = {
        "endpoint": "${env:GATEWAY_LISTEN:-0.0.0.0:4318}",
        "tls": {
            "cert_file": f"${{env:GATEWAY_CERTIFICATE_FILE:-{_SECRETS}/gateway.crt}}",
            "key_file": f"${{env:GATEWAY_KEY_FILE:-{_SECRETS}/gateway.key}}",
        },
        "auth": {"authenticator": "bearertokenauth"},
    }
    config = {
        "extensions": _extensions(),
        "receivers": {"otlp": {"protocols": {"http": listener}}},
        "processors": _processors(GATEWAY_MIB),
        "exporters": {"prometheus_remote_write": remote_write, "otlp_http": store},
    }
    return file_text(_SOURCE, comment, _with_service(config))


def render_prometheus() -> str:
    """Return the configuration of the Prometheus that the gateway writes to."""
    comment = comments(f"""
The Prometheus that the gateway writes to. It scrapes nothing; the rules are the usual ones.

  prometheus --config.file=prometheus.yaml --web.enable-remote-write-receiver --enable-feature={FEATURE}

The last flag is needed up to 3.7; without it those refuse whole requests that have a native histogram. What waited at a training,
an agent or the gateway arrives late, with the time at which it was pushed: {LATE} late at most. Histograms may be late from 3.4 on,
and from 3.0 on with --enable-feature={FEATURE},ooo-{FEATURE}; 2.x refuses a late one, and its whole request.
""")
    config = {**server_config(STANDARD, "../prometheus/"), "storage": {"tsdb": {"out_of_order_time_window": LATE}}}
    return file_text(_SOURCE, comment, config)


def _extensions() -> dict[str, Any]:
    """Return a probe, the disk, whose files shrink again once an outage is over, and the token between agents and gateway."""
    compaction = {"on_rebound": True, "directory": _QUEUE}
    return {
        "health_check": {"endpoint": "127.0.0.1:13133"},
        "file_storage": {"directory": _QUEUE, "create_directory": True, "compaction": compaction},
        "bearertokenauth": {"filename": f"${{env:GATEWAY_TOKEN_FILE:-{_SECRETS}/gateway_token}}"},
    }


def _processors(mib: int) -> dict[str, Any]:
    """Return what refuses pushes before memory runs out: trainings and agents send them again."""
    return {"memory_limiter": {"check_interval": "1s", "limit_mib": mib, "spike_limit_mib": mib // 4}}


def _docker(name: str, mib: int, variables: str = "") -> str:
    """Return the command; Go's own limit is 80 % of the hard one, as memory_limiter's documentation advises."""
    return f"""\
  docker run --detach --name otel-train-{name} --restart unless-stopped --network host \\
    --user "$(id -u):$(id -g)" {variables}--env GOMEMLIMIT={mib * 4 // 5}MiB \\
    --volume "$PWD:/etc/otel-train:ro" --volume "$PWD/queue:/var/lib/otelcol/queue" \\
    {IMAGES["otel-collector"]} --config=/etc/otel-train/{name}.yaml"""


def _stored_queue() -> dict[str, Any]:
    """Return a queue on the disk, of a bounded size, that is never given up.

    Batches are made behind the queue, not before it by the processor ``batch``, which answers before anything is stored.
    """
    batch = {"flush_timeout": "1s", "sizer": "items", "min_size": 8192, "max_size": 8192}
    queue = {"storage": "file_storage", "sizer": "bytes", "queue_size": 1024 * _MIB, "num_consumers": 1, "batch": batch}
    return {"sending_queue": queue, "retry_on_failure": {"enabled": True, "max_elapsed_time": "0s"}}


def _with_service(config: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
    """Put all components to use, in one pipeline."""
    pipeline = {kind: list(config[kind]) for kind in ("receivers", "processors", "exporters")}
    return {**config, "service": {"extensions": list(config["extensions"]), "pipelines": {"metrics": pipeline}}}
