"""otel-train: see inside a PyTorch training, on a Prometheus endpoint.

monitor = otel_train.attach(model, optimizer)
"""

from otel_train._version import __version__
from otel_train.config import MonitorConfig
from otel_train.errors import AttachError, CatalogError, ConfigError, MissingDependencyError, OtelTrainError
from otel_train.monitor import Monitor, attach
from otel_train.sinks import Sink
from otel_train.sinks.memory import MemorySink
from otel_train.sinks.meter import MeterSink
from otel_train.sinks.otlp import OtlpSink
from otel_train.snapshot import Snapshot

__all__ = [
    "AttachError",
    "CatalogError",
    "ConfigError",
    "MemorySink",
    "MeterSink",
    "MissingDependencyError",
    "Monitor",
    "MonitorConfig",
    "OtelTrainError",
    "OtlpSink",
    "Sink",
    "Snapshot",
    "__version__",
    "attach",
]
