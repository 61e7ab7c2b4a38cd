"""The libraries of the extra ``dashboards``, which only ``otel-train generate`` needs."""

from __future__ import annotations

import warnings

from otel_train.errors import MissingDependencyError

with warnings.catch_warnings():
    # the SDK deprecates its own models of classic dashboards on import; files for Grafana 10 to 12 need them
    warnings.simplefilter("ignore", DeprecationWarning)
    try:
        import yaml
        from grafana_foundation_sdk.builders import common, dashboard, prometheus, stat, table, timeseries
        from grafana_foundation_sdk.cog.encoder import JSONEncoder
        from grafana_foundation_sdk.models import common as common_models
        from grafana_foundation_sdk.models import dashboard as dashboard_models
        from grafana_foundation_sdk.models.prometheus import PromQueryFormat
    except ImportError as error:
        raise MissingDependencyError(
            f"generate: expected PyYAML and grafana-foundation-sdk, got {error}; pip install 'otel-train[dashboards]' "
            "(Python 3.11 or newer)"
        ) from error

__all__ = [
    "JSONEncoder",
    "PromQueryFormat",
    "common",
    "common_models",
    "dashboard",
    "dashboard_models",
    "prometheus",
    "stat",
    "table",
    "timeseries",
    "yaml",
]
