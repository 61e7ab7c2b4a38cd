"""Where and how to push, out of arguments and OpenTelemetry's variables."""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass
from urllib.parse import unquote, urlsplit

from otel_train.errors import ConfigError

_LOG = logging.getLogger("otel_train")

_DEFAULT_ENDPOINT = "http://localhost:4318"
_INTERVAL_SECONDS, _TIMEOUT_SECONDS = 10.0, 10.0


@dataclass(frozen=True, slots=True)
class OtlpSettings:
    """How to push."""

    url: str
    headers: Mapping[str, str]
    interval_seconds: float
    timeout_seconds: float
    """Of one request."""
    compress: bool
    certificate: str | None
    """File with the authorities that the collector's certificate is checked by; None: the system's."""
    client_certificate: str | None
    client_key: str | None


def is_asked_for(environ: Mapping[str, str]) -> bool:
    """Say whether OpenTelemetry's variables ask for a push of metrics."""
    exporters = environ.get("OTEL_METRICS_EXPORTER", "otlp").lower().replace(" ", "").split(",")
    return _of_metrics(environ, "ENDPOINT") is not None and "otlp" in exporters


def make_settings(
    environ: Mapping[str, str], *, endpoint: str | None, headers: Mapping[str, str], interval_seconds: float | None
) -> OtlpSettings:
    """Read the variables; arguments win over them.

    Args:
        environ: The environment.
        endpoint: Where to push, without ``/v1/metrics``.
        headers: Sent with each push, besides those of the variables.
        interval_seconds: Time between pushes.

    Raises:
        ConfigError: An argument, or the address, cannot be used. Other variables that cannot are told of in the log.
    """
    if interval_seconds is not None and not (math.isfinite(interval_seconds) and interval_seconds > 0):
        raise ConfigError(f"interval_seconds: expected seconds above 0, got {interval_seconds!r}")
    _check_protocol(environ)
    interval = _milliseconds(environ, "OTEL_METRIC_EXPORT_INTERVAL", _INTERVAL_SECONDS)
    name = "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT" if "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT" in environ else "OTEL_EXPORTER_OTLP_TIMEOUT"
    return OtlpSettings(
        url=_url(environ, endpoint),
        headers={**_headers(_of_metrics(environ, "HEADERS") or ""), **headers},
        interval_seconds=interval_seconds or interval,
        timeout_seconds=_milliseconds(environ, name, _TIMEOUT_SECONDS),
        compress=(_of_metrics(environ, "COMPRESSION") or "").lower() == "gzip",
        certificate=_of_metrics(environ, "CERTIFICATE"),
        client_certificate=_of_metrics(environ, "CLIENT_CERTIFICATE"),
        client_key=_of_metrics(environ, "CLIENT_KEY"),
    )


def _of_metrics(environ: Mapping[str, str], name: str) -> str | None:
    """Return a variable in its form for metrics, else in its general one; empty ones count as unset."""
    return environ.get(f"OTEL_EXPORTER_OTLP_METRICS_{name}") or environ.get(f"OTEL_EXPORTER_OTLP_{name}") or None


def _url(environ: Mapping[str, str], endpoint: str | None) -> str:
    given = environ.get("OTEL_EXPORTER_OTLP_METRICS_ENDPOINT") if endpoint is None else None
    if given:  # taken as it is; only a general one gets the path
        return _checked(given)
    general = endpoint or environ.get("OTEL_EXPORTER_OTLP_ENDPOINT") or _DEFAULT_ENDPOINT
    return _checked(general).rstrip("/") + "/v1/metrics"


def _checked(url: str) -> str:
    try:
        parts = urlsplit(url.strip())
        usable = parts.scheme in {"http", "https"} and bool(parts.hostname) and parts.port != 0
    except ValueError:  # a port that is no number
        usable = False
    if not usable:
        raise ConfigError(f"OTLP endpoint: expected an address like http://collector:4318, got {url!r}")
    return url.strip()


def _check_protocol(environ: Mapping[str, str]) -> None:
    protocol = (_of_metrics(environ, "PROTOCOL") or "http/protobuf").lower()
    if protocol != "http/protobuf":
        _LOG.warning("OTEL_EXPORTER_OTLP_PROTOCOL is %s: pushing http/protobuf, which is port 4318 of a collector", protocol[:40])


def _headers(text: str) -> dict[str, str]:
    """Read ``name=value,name=value``, percent-encoded, as the specification has it."""
    headers = {}
    for pair in filter(None, map(str.strip, text.split(","))):
        name, found, value = pair.partition("=")
        if found and name.strip():
            headers[unquote(name).strip().lower()] = unquote(value).strip()
        else:  # without the text: it may be a secret
            _LOG.warning("OTEL_EXPORTER_OTLP_HEADERS: expected name=value pairs with commas between, one of them is none: left out")
    return headers


def _milliseconds(environ: Mapping[str, str], name: str, default: float) -> float:
    text = environ.get(name, "").strip()
    if not text:
        return default
    try:
        seconds = float(text) / 1000
    except ValueError:
        seconds = math.nan
    if not (math.isfinite(seconds) and seconds > 0):
        _LOG.warning("%s: expected milliseconds above 0, got %r: taking %g s", name, text[:40], default)
        return default
    if seconds < 0.1:
        _LOG.warning("%s is %s: in milliseconds, as OpenTelemetry specifies; are seconds meant?", name, text)
    return seconds
