"""Where and how to push: arguments and OpenTelemetry's variables."""

from __future__ import annotations

import logging

import pytest

from otel_train.errors import ConfigError
from otel_train.sinks.otlp.settings import OtlpSettings, is_asked_for, make_settings


def settings(environ: dict[str, str], endpoint: str | None = None, interval_seconds: float | None = None) -> OtlpSettings:
    """Return what is read of an environment."""
    return make_settings(environ, endpoint=endpoint, headers={}, interval_seconds=interval_seconds)


@pytest.mark.parametrize(
    ("environ", "asked"),
    [
        ({}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318"}, True),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/x"}, True),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": ""}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_METRICS_EXPORTER": "none"}, False),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318", "OTEL_METRICS_EXPORTER": "prometheus, otlp"}, True),
        ({"OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": "http://c:4318"}, False),
    ],
)
def test_the_variables_of_opentelemetry_ask_for_a_push(environ: dict[str, str], asked: bool) -> None:  # noqa: FBT001
    """An endpoint does, unless metrics are to go elsewhere."""
    assert is_asked_for(environ) is asked


@pytest.mark.parametrize(
    ("environ", "endpoint", "url"),
    [
        ({}, None, "http://localhost:4318/v1/metrics"),
        ({}, "https://c:4318/", "https://c:4318/v1/metrics"),
        ({"OTEL_EXPORTER_OTLP_ENDPOINT": "http://c:4318/base"}, None, "http://c:4318/base/v1/metrics"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/own"}, None, "http://c:4318/own"),
        ({"OTEL_EXPORTER_OTLP_METRICS_ENDPOINT": "http://c:4318/own"}, "http://d:1", "http://d:1/v1/metrics"),
    ],
)
def test_the_path_is_added_to_a_general_endpoint_alone(environ: dict[str, str], endpoint: str | None, url: str) -> None:
    """As OpenTelemetry's specification has it; an argument wins."""
    assert settings(environ, endpoint).url == url


@pytest.mark.parametrize("url", ["collector:4318", "ftp://c", "http://", "http://c:port", "http://c:0"])
def test_an_address_that_cannot_be_used_is_said_in_one_line(url: str) -> None:
    """What was expected, and what came."""
    with pytest.raises(ConfigError, match=r"OTLP endpoint: expected an address like http://collector:4318, got"):
        settings({}, url)


def test_times_are_milliseconds_and_those_of_metrics_come_first() -> None:
    """The specification's unit, though opentelemetry-python takes a time-out as seconds."""
    made = settings(
        {
            "OTEL_EXPORTER_OTLP_TIMEOUT": "3000",
            "OTEL_EXPORTER_OTLP_METRICS_TIMEOUT": "2500",
            "OTEL_METRIC_EXPORT_INTERVAL": "15000",
            "OTEL_EXPORTER_OTLP_COMPRESSION": "gzip",
            "OTEL_EXPORTER_OTLP_CERTIFICATE": "/ca.pem",
            "OTEL_EXPORTER_OTLP_METRICS_CLIENT_CERTIFICATE": "/own.pem",
            "OTEL_EXPORTER_OTLP_CLIENT_KEY": "/own.key",
        }
    )
    assert (made.timeout_seconds, made.interval_seconds, made.compress) == (2.5, 15.0, True)
    assert (made.certificate, made.client_certificate, made.client_key) == ("/ca.pem", "/own.pem", "/own.key")
    assert settings({"OTEL_METRIC_EXPORT_INTERVAL": "15000"}, interval_seconds=1.5).interval_seconds == 1.5
    assert (settings({}).timeout_seconds, settings({}).interval_seconds, settings({}).compress) == (10.0, 10.0, False)


def test_headers_are_percent_encoded_pairs_and_a_bad_one_does_not_show_in_the_log(caplog: pytest.LogCaptureFixture) -> None:
    """A header may be a secret."""
    with caplog.at_level(logging.WARNING):
        made = settings({"OTEL_EXPORTER_OTLP_HEADERS": "Authorization=Bearer%20a=b, x-scope=1,hunter2,"})
    assert made.headers == {"authorization": "Bearer a=b", "x-scope": "1"}
    assert len(caplog.records) == 1
    assert "hunter2" not in caplog.text


@pytest.mark.parametrize("text", ["soon", "-1", "0", "nan", "inf"])
def test_a_time_that_is_none_is_said_and_the_default_taken(text: str, caplog: pytest.LogCaptureFixture) -> None:
    """A variable meant for others does not end a training."""
    with caplog.at_level(logging.WARNING):
        assert settings({"OTEL_METRIC_EXPORT_INTERVAL": text}).interval_seconds == 10.0
    assert "OTEL_METRIC_EXPORT_INTERVAL: expected milliseconds above 0" in caplog.text


def test_seconds_where_milliseconds_are_expected_are_asked_about(caplog: pytest.LogCaptureFixture) -> None:
    """10 is what opentelemetry-python's users write for ten seconds."""
    with caplog.at_level(logging.WARNING):
        assert settings({"OTEL_EXPORTER_OTLP_TIMEOUT": "10"}).timeout_seconds == 0.01
    assert "are seconds meant?" in caplog.text


def test_grpc_is_answered_with_what_is_spoken(caplog: pytest.LogCaptureFixture) -> None:
    """One line, and the push goes on over HTTP."""
    with caplog.at_level(logging.WARNING):
        settings({"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"})
    assert "pushing http/protobuf" in caplog.text


@pytest.mark.parametrize("seconds", [0.0, -1.0, float("nan")])
def test_an_interval_that_is_none_is_refused(seconds: float) -> None:
    """An argument is the user's own."""
    with pytest.raises(ConfigError, match="interval_seconds: expected seconds above 0"):
        settings({}, interval_seconds=seconds)
