"""The formats of the exposition, and which of them an Accept header asks for."""

from __future__ import annotations

from enum import Enum


class Format(Enum):
    """A format of the exposition, by its content type."""

    TEXT = "text/plain; version=0.0.4; charset=utf-8"
    OPENMETRICS = "application/openmetrics-text; version=1.0.0; charset=utf-8"
    PROTOBUF = "application/vnd.google.protobuf; proto=io.prometheus.client.MetricFamily; encoding=delimited"


_ASKED_FOR = {
    ("application/openmetrics-text", frozenset({"version=1.0.0"})): Format.OPENMETRICS,
    (
        "application/vnd.google.protobuf",
        frozenset({"proto=io.prometheus.client.metricfamily", "encoding=delimited"}),
    ): Format.PROTOBUF,
    ("text/plain", frozenset[str]()): Format.TEXT,
}
"""Media types in small letters, and the parameters that they must come with."""


def negotiate(accept: str) -> tuple[Format, str]:
    """Return the format that an Accept header asks for and its content type; nothing of the header comes back.

    Of those that are known it is the one of the highest quality, and of equals the first; text where none is known. Prometheus 3
    names an escaping, 2 none. Our names need none, but the answer must say which it is in.
    """
    chosen, escaping, highest = Format.TEXT, "underscores", 0.0
    for part in accept.lower().replace(" ", "").split(","):
        kind, *given = part.split(";")
        found, quality = _format(kind, frozenset(given)), _quality(given)
        if found is not None and quality > highest:
            chosen, highest = found, quality
            escaping = "allow-utf-8" if "escaping=allow-utf-8" in given else "underscores"
    return chosen, chosen.value if chosen is Format.TEXT else f"{chosen.value}; escaping={escaping}"


def _format(kind: str, given: frozenset[str]) -> Format | None:
    for (known, needed), found in _ASKED_FOR.items():
        if kind == known and needed <= given:
            return found
    return None


def _quality(given: list[str]) -> float:
    """Return the quality that the parameters tell, 1 where they tell none, and 0 where it is no number."""
    for parameter in given:
        if parameter.startswith("q="):
            try:
                return min(float(parameter[2:]), 1.0)
            except ValueError:
                return 0.0
    return 1.0
