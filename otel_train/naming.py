"""OTel metric name and unit to Prometheus name: the only place where that happens.

The rules are those of the OpenTelemetry compatibility specification ("OTLP Metric points to Prometheus", v1.33.0), restricted to
what every road (our endpoint, the collector, Prometheus' and VictoriaMetrics' OTLP receivers) agrees on: units are empty, ``s``,
``By`` or an annotation in braces. Rates and ratios have no unit, since the roads name ``1`` and ``x/s`` differently.
"""

from __future__ import annotations

import re

from otel_train.errors import CatalogError

_UNIT_WORDS = {"s": "seconds", "By": "bytes"}
_OTEL_NAME = re.compile(r"[a-z][a-z0-9_]*(\.[a-z][a-z0-9_]*)+")
_ANNOTATION = re.compile(r"\{[a-zA-Z_]+\}")
_LABEL_NAME = re.compile(r"[a-zA-Z_][a-zA-Z0-9_]*")


def unit_word(unit: str) -> str:
    """Return the Prometheus word of an OTel unit, ``""`` for none.

    Raises:
        CatalogError: The unit is none that every road translates alike.
    """
    if unit == "" or _ANNOTATION.fullmatch(unit):
        return ""
    if unit not in _UNIT_WORDS:
        raise CatalogError(f"expected a unit of '', 's', 'By' or an annotation like '{{token}}', got {unit!r}")
    return _UNIT_WORDS[unit]


def prometheus_name(name: str, unit: str, *, counter: bool) -> str:
    """Translate an OTel metric name: dots to underscores, the unit's word, ``_total`` for counters.

    Raises:
        CatalogError: The name is not lower-case words joined by dots, or the unit is unknown.
    """
    if not _OTEL_NAME.fullmatch(name):
        raise CatalogError(f"expected a name like 'otel_train.layer.grad_norm', got {name!r}")
    result, word = name.replace(".", "_"), unit_word(unit)
    if word and not result.endswith(f"_{word}"):
        result += f"_{word}"
    return f"{result}_total" if counter else result


def histogram_part(name: str, unit: str, part: str) -> str:
    """Return the OTel name of a part of a histogram for roads that have no histograms: it has no unit, which its name says.

    It becomes the name that Prometheus gives to that part of a classic histogram, since only counters get a suffix.

    Args:
        name: OTel name of the histogram.
        unit: Its unit.
        part: ``bucket``, ``count`` or ``sum``.

    Raises:
        CatalogError: The unit is unknown.
    """
    word = unit_word(unit)
    ends_in_unit = not word or re.split(r"[._]", name)[-1] == word
    return f"{name}.{part}" if ends_in_unit else f"{name}.{word}.{part}"


def is_label_name(name: str) -> bool:
    """Say whether Prometheus accepts this as a label name that users may set (names with ``__`` in front are its own)."""
    return bool(_LABEL_NAME.fullmatch(name)) and not name.startswith("__")
