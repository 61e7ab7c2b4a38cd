"""Pushes over OTLP: what became of them. No series without an ``OtlpSink``."""

from otel_train.catalog.spec import counter, gauge

REQUEST_OUTCOMES = ("accepted", "retried", "rejected", "dropped")
POINT_OUTCOMES = ("accepted", "rejected", "dropped")

OTLP_REQUESTS = counter(
    "otel_train.otlp.requests",
    "Pushes over OTLP by what became of them.",
    labels=("outcome",),
    note="`accepted`; `retried` tries that failed and come again; `rejected` by the collector for good; `dropped` for want of "
    "room, or at the end. As of the Snapshot before: what a push says of itself comes with the next one.",
)
OTLP_POINTS = counter(
    "otel_train.otlp.points",
    "Data points pushed over OTLP by what became of them.",
    labels=("outcome",),
    note="`rejected` also counts points that a collector did not take out of a push that it took (partial success).",
)
OTLP_QUEUED = gauge(
    "otel_train.otlp.queued",
    "What waits to be pushed over OTLP.",
    unit="By",
)
