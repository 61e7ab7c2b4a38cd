"""Push over OTLP: Snapshots to an OpenTelemetry collector, or to any store that takes OTLP over HTTP.

Needs the extra ``otlp``; nothing of it is loaded before a sink is made.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping

from otel_train.errors import ConfigError, MissingDependencyError
from otel_train.sinks.otlp.settings import make_settings
from otel_train.snapshot import Sample, Snapshot

__all__ = ["OtlpSink"]


class OtlpSink:
    """Pushes Snapshots over OTLP (HTTP, protobuf) from a thread of its own.

    ``attach`` makes one by itself where OTEL_EXPORTER_OTLP_ENDPOINT or OTEL_EXPORTER_OTLP_METRICS_ENDPOINT is set. OpenTelemetry's
    variables for headers, time-out (milliseconds, as the specification has it), compression and certificates are honoured, and
    OTEL_METRIC_EXPORT_INTERVAL.

    A push that the collector cannot take now waits, in memory, and goes out later with the time at which it was made; the oldest
    is dropped for a new one once they take ``queue_bytes``. Counted in ``otel_train_otlp_requests_total`` and ``_points_total``.

    Args:
        endpoint: Where to push, without ``/v1/metrics``. Default: OpenTelemetry's variables, then ``http://localhost:4318``.
        headers: Sent with each push, besides those of OpenTelemetry's variables.
        interval_seconds: Time between pushes. Default: OTEL_METRIC_EXPORT_INTERVAL, then 10 s: OpenTelemetry's own 60 s are too
            long for alerts on a training.
        queue_bytes: What waits at most.

    Each monitor needs one of its own.

    Raises:
        MissingDependencyError: The extra ``otlp`` is not installed.
        ConfigError: An argument, or a variable, cannot be used.
    """

    def __init__(
        self,
        endpoint: str | None = None,
        *,
        headers: Mapping[str, str] | None = None,
        interval_seconds: float | None = None,
        queue_bytes: int = 32 << 20,
    ) -> None:
        settings = make_settings(os.environ, endpoint=endpoint, headers=headers or {}, interval_seconds=interval_seconds)
        try:
            from otel_train.sinks.otlp.message import Encoder  # noqa: PLC0415  # only who pushes pays for the libraries
            from otel_train.sinks.otlp.pusher import Pusher  # noqa: PLC0415
            from otel_train.sinks.otlp.resource import make_resource  # noqa: PLC0415
            from otel_train.sinks.otlp.transport import Transport  # noqa: PLC0415
        except ImportError as error:
            raise MissingDependencyError(
                f"pushing over OTLP needs opentelemetry-sdk, opentelemetry-proto and requests ({error.name} is missing): "
                "pip install 'otel-train[otlp]'"
            ) from error
        self._pusher = Pusher(Encoder(make_resource()), Transport(settings), settings.interval_seconds, queue_bytes)
        self.url = settings.url
        self._labels: tuple[tuple[str, str], ...] | None = None
        self._closed = False

    def publish(self, snapshot: Snapshot) -> None:
        """Have this Snapshot go out at the next push; costs nothing here.

        Raises:
            ConfigError: The sink is another monitor's, or was until that was closed.
        """
        self._labels = snapshot.base_labels if self._labels is None else self._labels
        if self._closed or snapshot.base_labels != self._labels:
            raise ConfigError("sinks: this OtlpSink belongs to another monitor; make one for each")
        self._pusher.publish(snapshot)

    def close(self) -> None:
        """Push the last Snapshot and what waits, for at most 5 s."""
        self._closed = True
        self._pusher.close()

    def report(self) -> Iterable[Sample]:
        """Return what became of the pushes so far."""
        return self._pusher.report()

    @property
    def cpu_seconds(self) -> float:
        """Processor time that its thread took."""
        return self._pusher.cpu_seconds
