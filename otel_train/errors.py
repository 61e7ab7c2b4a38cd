"""The exceptions of otel-train.

OtelTrainError
├── ConfigError (ValueError)      a setting, an argument of ``attach`` or of the command line
├── AttachError (ValueError)      a model or optimizer that cannot be monitored as it is
├── StackError (RuntimeError)     a local server that is missing or does not start
├── CatalogError (ValueError)     a metric that is defined twice, wrongly, or not at all
└── MissingDependencyError (ImportError)   an extra that is not installed

They are raised by ``attach``, ``Monitor.load_state_dict`` and the command line only: once a monitor is attached, nothing of ours
raises into the training.
"""

from __future__ import annotations


class OtelTrainError(Exception):
    """Base of everything that otel-train raises."""


class ConfigError(OtelTrainError, ValueError):
    """A setting has no such name or no such value; the message says what was expected, what came, and what to do."""


class AttachError(OtelTrainError, ValueError):
    """This model or optimizer cannot be monitored as it is; the message says what to do."""


class StackError(OtelTrainError, RuntimeError):
    """A server of ``otel-train stack`` is missing, or does not start; the message says what to do."""


class CatalogError(OtelTrainError, ValueError):
    """A metric definition is wrong, or a metric is used that no definition names."""


class MissingDependencyError(OtelTrainError, ImportError):
    """Something asked for needs an extra; the message names the command that installs it."""
