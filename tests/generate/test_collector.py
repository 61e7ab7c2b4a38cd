"""The collector's configurations, held against what its source knows; its binary was not to be had."""

from __future__ import annotations

import copy
import re
import shlex
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
import yaml

from otel_train.generate.collector import LATE
from otel_train.generate.deploy import IMAGES
from tests.generate import remote_write
from tests.servers import REPOSITORY, Prometheus

FOLDER = REPOSITORY / "deploy/otel-collector"
NAMES = ("agent", "gateway")

RELEASE = "0.159.0"
"""That the table is of. Where it is from: ``mapstructure`` tags in open-telemetry/opentelemetry-collector at v0.159.0
(receiver/otlpreceiver/config.go, exporter/otlphttpexporter/config.go, exporter/exporterhelper/internal/queuebatch/config.go,
internal/memorylimiter/config.go, config/{confighttp/{client,server}.go,configtls,configretry,configauth,confignet},
service/config.go) and in opentelemetry-collector-contrib (exporter/prometheusremotewriteexporter/config.go as of 0.158 and later,
extension/{storage/filestorage,bearertokenauthextension,healthcheckextension}/config.go, internal/healthcheck). Components are listed
by the names of their metadata.yaml. Settings that nobody here needs are left out of it: a new one is looked up before it is used."""

DURATION = re.compile(r"\d+(ms|s|m|h)")
VARIABLE = re.compile(r"\$\{env:([A-Z_]+)(?::-([^}]*))?\}")

_TLS = {"ca_file": str, "cert_file": str, "key_file": str, "min_version": str}
_AUTH = {"authenticator": str}
_RETRY = {"enabled": bool, "initial_interval": DURATION, "max_interval": DURATION, "max_elapsed_time": DURATION}
_CLIENT = {
    "endpoint": str,
    "tls": {**_TLS, "insecure": bool, "insecure_skip_verify": bool, "server_name_override": str},
    "auth": _AUTH,
    "headers": {},
    "compression": str,
    "timeout": DURATION,
}
_SERVER = {"endpoint": str, "tls": {**_TLS, "client_ca_file": str}, "auth": _AUTH, "max_request_body_size": int}
_BATCH = {"flush_timeout": DURATION, "sizer": ("items", "bytes"), "min_size": int, "max_size": int}
_QUEUE = {
    "enabled": bool,
    "storage": str,
    "sizer": ("requests", "items", "bytes"),
    "queue_size": int,
    "num_consumers": int,
    "block_on_overflow": bool,
    "wait_for_result": bool,
    "batch": _BATCH,
}
SETTINGS: dict[str, dict[str, dict[str, Any]]] = {
    "extensions": {
        "health_check": {"endpoint": str, "path": str},
        "file_storage": {
            "directory": str,
            "timeout": DURATION,
            "fsync": bool,
            "create_directory": bool,
            "directory_permissions": str,
            "compaction": {"on_start": bool, "on_rebound": bool, "directory": str, "check_interval": DURATION},
        },
        "bearertokenauth": {"scheme": str, "token": str, "filename": str, "header": str},
    },
    "receivers": {"otlp": {"protocols": {"http": _SERVER, "grpc": {"endpoint": str, "tls": _TLS, "auth": _AUTH}}}},
    "processors": {
        "memory_limiter": {
            "check_interval": DURATION,
            "limit_mib": int,
            "spike_limit_mib": int,
            "limit_percentage": int,
            "spike_limit_percentage": int,
        },
        "batch": {"timeout": DURATION, "send_batch_size": int, "send_batch_max_size": int},
    },
    "exporters": {
        "otlp_http": {**_CLIENT, "sending_queue": _QUEUE, "retry_on_failure": _RETRY, "encoding": ("proto", "json")},
        "prometheus_remote_write": {
            "http": _CLIENT,
            "translation_strategy": ("UnderscoreEscapingWithSuffixes", "UnderscoreEscapingWithoutSuffixes"),
            "disable_scope_info": bool,
            "target_info": {"enabled": bool},
            "external_labels": {},
            "max_batch_size_bytes": int,
            "remote_write_queue": {"enabled": bool, "queue_size": int, "num_consumers": int},
            "retry_on_failure": _RETRY,
            "timeout": DURATION,
        },
    },
}
LISTS = dict.fromkeys(("receivers", "processors", "exporters"), list)
SERVICE = {"extensions": list, "pipelines": {"metrics": LISTS}}


def load(name: str) -> dict[str, Any]:
    """Read a file."""
    config: dict[str, Any] = yaml.safe_load((FOLDER / f"{name}.yaml").read_text())
    return config


def unknown(found: Any, known: Any, path: str) -> Iterator[str]:
    """Yield each setting that the table does not have, or that has another kind of value."""
    if not isinstance(known, Mapping):
        if (wanted := mismatch(found, known)) is not None:
            yield f"{path} is {found!r}, no {wanted}"
        return
    if not isinstance(found, Mapping):
        yield f"{path} is no mapping"
        return
    for name, value in found.items():
        if name in known:
            yield from unknown(value, known[name], f"{path}.{name}")
        elif known:  # an empty one takes any names
            yield f"{path}.{name} is unknown"


def mismatch(found: Any, known: Any) -> str | None:
    """Return what a value should be and is not."""
    if isinstance(known, tuple):
        return None if found in known else f"word of {known}"
    if isinstance(known, re.Pattern):
        return None if isinstance(found, str) and known.fullmatch(found) else "duration"
    return None if type(found) is known else str(known.__name__)


def unknown_settings(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield sections, components and settings that the release does not know."""
    yield from (f"{section} is unknown" for section in config.keys() - SETTINGS.keys() - {"service"})
    for section, components in SETTINGS.items():
        for name, settings in config.get(section, {}).items():
            kind = name.partition("/")[0]
            yield from unknown(settings, components[kind], name) if kind in components else [f"{section}: {kind} is unknown"]
    yield from unknown(config["service"], SERVICE, "service")


def wiring(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what is used and not there, there and not used, or in the wrong order."""
    pipelines = config["service"]["pipelines"].values()
    for section in ("receivers", "processors", "exporters"):
        used = {name for pipeline in pipelines for name in pipeline[section]}
        yield from (f"{name} of {section} is defined or used, not both" for name in used ^ config[section].keys())
    extensions = config["extensions"].keys()
    yield from (f"extension {name} is defined or started, not both" for name in extensions ^ set(config["service"]["extensions"]))
    asked = set(values(config, "authenticator")) | set(values(config, "storage"))
    yield from (f"extension {name} is asked for and missing" for name in asked - extensions)
    yield from (f"nobody asks for extension {name}" for name in extensions - asked - {"health_check"})
    yield from ("memory_limiter is not first" for pipeline in pipelines if pipeline["processors"][:1] != ["memory_limiter"])


def values(config: Any, name: str) -> Iterator[Any]:
    """Yield the values of a setting, wherever it is."""
    if isinstance(config, Mapping):
        for key, value in config.items():
            if key == name:
                yield value
            yield from values(value, name)


def secrets(config: Any) -> Iterator[str]:
    """Yield what is, or may become, a secret in the file: tokens are in files, and addresses have no passwords."""
    for name in ("token", "password", "headers", "key_pem", "cert_pem", "ca_pem"):
        yield from (f"{name} is in the file" for _ in values(config, name))
    yield from (f"{address} has credentials" for address in values(config, "endpoint") if "@" in address)
    for path in (*values(config, "filename"), *values(config, "key_file")):
        if not (VARIABLE.fullmatch(path) and "/secrets/" in path):
            yield f"{path} is no file of the folder secrets"


def limits(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what the release refuses though it knows it, or what loses data."""
    memory = config["processors"]["memory_limiter"]
    if not memory["spike_limit_mib"] < memory["limit_mib"]:
        yield "spike_limit_mib is not below limit_mib"
    for queue in values(config, "sending_queue"):
        batch = queue["batch"]
        if not 0 < batch["min_size"] <= batch["max_size"]:
            yield "min_size is above max_size"
        if "storage" not in queue or queue.get("wait_for_result"):
            yield "a queue is not on the disk"
        if queue["num_consumers"] != 1:
            yield "several requests at once change the order of a series' points"


def listeners(config: Mapping[str, Any]) -> dict[str, Mapping[str, Any]]:
    """Return each address that it listens on."""
    found = [*config["receivers"]["otlp"]["protocols"].values(), config["extensions"]["health_check"]]
    return {VARIABLE.sub(lambda match: match[2] or "", one["endpoint"]): one for one in found}


def exposed(config: Mapping[str, Any]) -> Iterator[str]:
    """Yield what listens beyond loopback for everybody."""
    for address, settings in listeners(config).items():
        if not (address.startswith("127.0.0.1:") or (settings.get("tls", {}).get("key_file") and settings.get("auth"))):
            yield f"{address} is open"


CHECKS: tuple[Callable[[Mapping[str, Any]], Iterator[str]], ...] = (unknown_settings, wiring, secrets, limits, exposed)


def problems(config: Mapping[str, Any]) -> list[str]:
    """Return all that is wrong."""
    return [problem for check in CHECKS for problem in check(config)]


@pytest.mark.parametrize("name", NAMES)
def test_every_setting_is_known_every_component_used_and_nothing_open(name: str) -> None:
    """As the collector would say at its start, and what it would not."""
    assert problems(load(name)) == []


FAULTS: dict[str, tuple[str, Callable[[dict[str, Any]], object], str]] = {
    "a section": ("agent", lambda c: c.update(exporter={}), "exporter is unknown"),
    "a component": ("agent", lambda c: c["exporters"].update(prometheusremotewrit={}), "prometheusremotewrit is unknown"),
    "the old name": ("gateway", lambda c: c["exporters"].update(otlphttp={}), "exporters: otlphttp is unknown"),
    "a setting": ("gateway", lambda c: exporter(c).update(add_metric_suffix=True), "add_metric_suffix is unknown"),
    "a deep setting": ("agent", lambda c: queue(c)["batch"].update(timeout="1s"), "batch.timeout is unknown"),
    "no duration": ("agent", lambda c: c["processors"]["memory_limiter"].update(check_interval=1), "1, no duration"),
    "no number": ("agent", lambda c: queue(c).update(queue_size="1GiB"), "'1GiB', no int"),
    "no mapping": ("gateway", lambda c: exporter(c).update(target_info=True), "target_info is no mapping"),
    "a word": ("agent", lambda c: queue(c).update(sizer="mib"), "'mib', no word of"),
    "not in the pipeline": ("agent", lambda c: c["processors"].update(batch={}), "batch of processors is defined or used"),
    "not defined": ("agent", lambda c: pipeline(c)["exporters"].append("debug"), "debug of exporters is defined or used"),
    "not started": ("agent", lambda c: c["service"]["extensions"].remove("file_storage"), "file_storage is defined or started"),
    "not there": ("agent", lambda c: queue(c).update(storage="disk"), "disk is asked for and missing"),
    "for nobody": ("agent", lambda c: c["exporters"]["otlp_http"].pop("auth"), "nobody asks for extension bearertokenauth"),
    "too late": ("gateway", lambda c: pipeline(c).update(processors=["batch", "memory_limiter"]), "memory_limiter is not first"),
    "a token": ("agent", lambda c: c["extensions"]["bearertokenauth"].update({"token": "x"}), "token is in the file"),
    "a header": ("gateway", lambda c: exporter(c)["http"].update(headers={"Authorization": "x"}), "headers is in the file"),
    "a password": ("agent", lambda c: c["exporters"]["otlp_http"].update(endpoint="https://u:p@g"), "has credentials"),
    "a key elsewhere": ("gateway", lambda c: listener(c)["tls"].update(key_file="/etc/key"), "/etc/key is no file of"),
    "a spike": ("agent", lambda c: c["processors"]["memory_limiter"].update(spike_limit_mib=512), "spike_limit_mib is not below"),
    "small batches": ("agent", lambda c: queue(c)["batch"].update(max_size=1), "min_size is above max_size"),
    "in memory": ("agent", lambda c: queue(c).pop("storage"), "a queue is not on the disk"),
    "many at once": ("agent", lambda c: queue(c).pop("num_consumers") and queue(c).update(num_consumers=10), "change the order"),
    "all addresses": ("agent", lambda c: listener(c).update(endpoint="0.0.0.0:4318"), "0.0.0.0:4318 is open"),
    "without a token": ("gateway", lambda c: listener(c).pop("auth"), "0.0.0.0:4318 is open"),
    "without TLS": ("gateway", lambda c: listener(c).pop("tls"), "0.0.0.0:4318 is open"),
    "open health": ("agent", lambda c: c["extensions"]["health_check"].update(endpoint="0.0.0.0:13133"), "0.0.0.0:13133 is open"),
}


def exporter(config: Mapping[str, Any]) -> Any:
    """Return what writes to Prometheus."""
    return config["exporters"]["prometheus_remote_write"]


def queue(config: Mapping[str, Any]) -> Any:
    """Return the queue on the disk."""
    return config["exporters"]["otlp_http"]["sending_queue"]


def listener(config: Mapping[str, Any]) -> Any:
    """Return what takes pushes."""
    return config["receivers"]["otlp"]["protocols"]["http"]


def pipeline(config: Mapping[str, Any]) -> Any:
    """Return the only one."""
    return config["service"]["pipelines"]["metrics"]


@pytest.mark.parametrize("fault", FAULTS)
def test_each_planted_fault_is_found(fault: str) -> None:
    """Or the checks above would look at nothing."""
    name, plant, expected = FAULTS[fault]
    config = copy.deepcopy(load(name))
    plant(config)
    assert any(expected in problem for problem in problems(config)), problems(config)


def test_the_table_is_of_the_pinned_release() -> None:
    """Whoever moves the image looks at the table too."""
    assert IMAGES["otel-collector"] == f"otel/opentelemetry-collector-contrib:{RELEASE}"


def test_gateway_and_agent_fit_together() -> None:
    """The same port, the same token, TLS; the gateway ends in Prometheus and in an OTLP store."""
    agent, gateway = load("agent"), load("gateway")
    assert pipeline(agent)["exporters"] == ["otlp_http"]
    assert set(pipeline(gateway)["exporters"]) == {"prometheus_remote_write", "otlp_http"}
    assert agent["extensions"]["bearertokenauth"] == gateway["extensions"]["bearertokenauth"]
    assert "GATEWAY_ENDPOINT=https://gateway.example:4318" in (FOLDER / "agent.yaml").read_text()
    assert "0.0.0.0:4318" in listeners(gateway)
    assert "127.0.0.1:4318" in listeners(agent)


def test_names_come_out_as_on_the_scrape_road() -> None:
    """Units and ``_total``, no labels of scope and resource."""
    settings = exporter(load("gateway"))
    assert settings["translation_strategy"] == "UnderscoreEscapingWithSuffixes"
    assert settings["disable_scope_info"] is True
    assert not {"resource_to_telemetry_conversion", "resource_constant_labels", "namespace"} & settings.keys()


@pytest.mark.parametrize("name", NAMES)
def test_the_head_says_how_to_start_it_and_names_every_variable(name: str) -> None:
    """With the pinned image, this file, folders that are mounted where the defaults look, and Go's own limit below the hard one."""
    text = (FOLDER / f"{name}.yaml").read_text()
    head = " ".join(line.lstrip("# ").rstrip("\\") for line in text.splitlines() if line.startswith("#"))
    command = shlex.split(head[head.index("docker run") :].partition(".yaml")[0])
    assert command[-2:] == [IMAGES["otel-collector"], f"--config=/etc/otel-train/{name}"]
    used = {match[1] for match in VARIABLE.finditer(text)}
    assert used
    assert [variable for variable in used if variable not in head] == []
    assert next(match[2] for match in VARIABLE.finditer(text) if match[1] == "QUEUE_DIRECTORY") in head
    (limit,) = re.findall(r"GOMEMLIMIT=(\d+)MiB", head)
    assert int(limit) == load(name)["processors"]["memory_limiter"]["limit_mib"] * 4 // 5


def test_what_is_stored_beside_the_files_is_neither_shipped_nor_committed(tmp_path: Path) -> None:
    """Queues and secrets."""
    from otel_train import generate

    generate.write(tmp_path)
    for path in ("queue/exporter_otlp_http.1", "secrets/gateway.key"):
        (tmp_path / "deploy/otel-collector" / path).parent.mkdir()
        (tmp_path / "deploy/otel-collector" / path).touch()
    assert generate.check(tmp_path) == []
    ignored = (REPOSITORY / ".gitignore").read_text().splitlines()
    assert {"secrets/", "deploy/otel-collector/queue/"} <= set(ignored)


@pytest.fixture
def receiver(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Prometheus]:
    """Start the Prometheus behind the gateway as the head of its file says."""
    text = (FOLDER / "prometheus.yaml").read_text()
    flags = re.findall(r" (--\S+)", text.partition("prometheus --config.file=prometheus.yaml")[2].partition("\n")[0])
    assert flags == ["--web.enable-remote-write-receiver", "--enable-feature=native-histograms"]
    server = Prometheus(request.param, tmp_path, text, flags=flags)
    try:
        server.wait_ready()
        assert remote_write.push(server.port, time.time()) == 204
        (found,) = server.ask("pushed_histogram")
        assert found["histogram"][1]["count"] == "3"
        yield server
    finally:
        server.stop()


HOURS = int(LATE.removesuffix("h"))


@pytest.mark.servers
@pytest.mark.parametrize("receiver", ["current"], indirect=True)
def test_the_prometheus_behind_the_gateway_takes_what_arrives_late(receiver: Prometheus) -> None:
    """Numbers and native histograms, as late as its head says, and not later."""
    late = time.time() - (HOURS - 0.1) * 3600
    assert remote_write.push(receiver.port, late) == 204
    assert receiver.query(f"pushed @ {late:.3f}")[0].value == 1
    assert receiver.ask(f"pushed_histogram @ {late:.3f}")[0]["histogram"][1]["count"] == "3"
    assert remote_write.push(receiver.port, time.time() - (HOURS + 0.1) * 3600) == 400


@pytest.mark.servers
@pytest.mark.parametrize("receiver", ["stable"], indirect=True)
def test_before_3_0_a_late_histogram_is_refused_and_its_request_with_it(receiver: Prometheus) -> None:
    """2.42, as the head says: numbers alone are taken."""
    late = time.time() - 3 * 3600
    assert remote_write.push(receiver.port, late) == 400
    assert receiver.query(f"pushed @ {late:.3f}") == []
    assert remote_write.push(receiver.port, late, histogram=False) == 204
    assert receiver.query(f"pushed @ {late:.3f}")[0].value == 1


@pytest.mark.servers
@pytest.mark.parametrize("features", [(), ("native-histograms",)])
def test_without_the_flag_a_request_with_a_native_histogram_is_refused_as_a_whole(
    features: tuple[str, ...], tmp_path: Path
) -> None:
    """3.5, and with an answer that a gateway tries again on: why it does not try for ever."""
    server = Prometheus("current", tmp_path, "", features, flags=["--web.enable-remote-write-receiver"])
    try:
        server.wait_ready()
        now = time.time()
        assert remote_write.push(server.port, now) == (204 if features else 500)
        assert len(server.query("pushed")) == len(features)
        assert remote_write.push(server.port, now, histogram=False) == 204
    finally:
        server.stop()
