"""Configurations of a Prometheus that scrapes native histograms: one for each range of versions that differ.

Where that is from, in Prometheus' own repository (file at tag, and CHANGELOG.md at v3.14.0):

- the flag ``native-histograms`` came with 2.40.0; it changes what is scraped until 3.8, where it is a default of the setting below,
  and does nothing from 3.9.0 on (``cmd/prometheus/main.go`` at v2.42.0, v3.5.3, v3.8.0, v3.9.0);
- ``scrape_native_histograms`` came with 3.8.0; ``config/config.go`` at v3.7.0 does not know it, and refuses what it does not know;
- ``scrape_classic_histograms``, by which the classic form is kept beside the native one, came with 2.45.0; 3.0.0 renamed it to
  ``always_scrape_classic_histograms`` (``config/config.go`` at v2.44.0, v2.45.0, v2.55.0, v3.0.0).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from otel_train.catalog import gradients
from otel_train.generate.deploy import scrape_job, server_config
from otel_train.generate.time_base import STANDARD
from otel_train.generate.yaml_text import comments, file_text

FEATURE = "native-histograms"
_SOURCE = "otel_train/generate/native_histograms.py"
_NAME = gradients.LAYER_GRAD_MAGNITUDE.prometheus_name
_KEPT = f"The classic form is kept beside the native one, so that queries of {_NAME}_bucket go on."
_GONE = (
    f"The classic form is not stored beside the native one: {_NAME}_bucket is gone, which these versions cannot help. "
    "No dashboard or rule of ours asks for it."
)


@dataclass(frozen=True, slots=True)
class Range:
    """Versions of Prometheus that are told alike."""

    first: str
    last: str | None
    """None: the newest known, 3.14, and later."""
    by_flag: bool
    settings: Mapping[str, Any] = field(default_factory=dict)
    """Of the job."""

    @property
    def file_name(self) -> str:
        """Where its configuration is, in a folder of its own."""
        return f"from-{self.first}.yaml"


RANGES = (
    Range("2.40", "2.44", by_flag=True),
    Range("2.45", "2.55", by_flag=True, settings={"scrape_classic_histograms": True}),
    Range("3.0", "3.7", by_flag=True, settings={"always_scrape_classic_histograms": True}),
    Range("3.8", None, by_flag=False, settings={"scrape_native_histograms": True, "always_scrape_classic_histograms": True}),
)


def render(versions: Range) -> str:
    """Return the configuration for a range of versions."""
    until = f"to {versions.last}" if versions.last else "and later"
    flag = f" --enable-feature={FEATURE}" if versions.by_flag else ""
    comment = comments(f"""
Native histograms, Prometheus {versions.first} {until}; other versions have files of their own beside this one.

  prometheus --config.file={versions.file_name}{flag}

{_KEPT if versions.settings else _GONE} Set no scrape_protocols: by default protobuf, which native histograms need, is asked for
first. All else is as in ../prometheus.yaml.
""")
    config = {**server_config(STANDARD, "../"), "scrape_configs": [{**scrape_job("../"), **versions.settings}]}
    return file_text(_SOURCE, comment, config)
