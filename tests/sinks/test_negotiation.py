"""Which format an Accept header gets."""

from __future__ import annotations

import pytest

from otel_train.sinks.negotiation import Format, negotiate

PROTOBUF = "application/vnd.google.protobuf;proto=io.prometheus.client.MetricFamily;encoding=delimited"
OPENMETRICS = "application/openmetrics-text;version=1.0.0"
TEXT = "text/plain;version=0.0.4"


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        ("", Format.TEXT),
        ("*/*", Format.TEXT),
        (PROTOBUF, Format.PROTOBUF),
        (f"{PROTOBUF};q=0.1", Format.PROTOBUF),
        (f"{PROTOBUF},{OPENMETRICS};q=0.9,{TEXT};q=0.5", Format.PROTOBUF),
        (f"{PROTOBUF};q=0.6,{OPENMETRICS};q=0.5,{TEXT};q=0.2,*/*;q=0.1", Format.PROTOBUF),
        (f"{PROTOBUF};q=0.4,{OPENMETRICS};q=0.5", Format.OPENMETRICS),
        (f"{OPENMETRICS};q=0.4,{PROTOBUF};q=0.5", Format.PROTOBUF),
        (f"{OPENMETRICS},{PROTOBUF}", Format.OPENMETRICS),
        (f"{PROTOBUF};q=0,{TEXT}", Format.TEXT),
        (f"{PROTOBUF};q=0", Format.TEXT),
        (f"{TEXT};q=0.9,{OPENMETRICS};q=0.3", Format.TEXT),
        (f"{OPENMETRICS} ; q = 0.3 , {PROTOBUF} ; q = 0.5", Format.PROTOBUF),
        (f"{PROTOBUF};q=much,{OPENMETRICS};q=0.1", Format.OPENMETRICS),
        (f"{PROTOBUF};q=nan,{OPENMETRICS};q=0.1", Format.OPENMETRICS),
        (f"{OPENMETRICS};q=7,{PROTOBUF}", Format.OPENMETRICS),
        (PROTOBUF.replace("delimited", "text"), Format.TEXT),
        (PROTOBUF.replace("delimited", "compact-text"), Format.TEXT),
        (PROTOBUF.replace("io.prometheus.client.MetricFamily", "other.Message"), Format.TEXT),
        ("application/vnd.google.protobuf", Format.TEXT),
        ("application/openmetrics-text;version=0.0.1", Format.TEXT),
        (PROTOBUF.upper(), Format.PROTOBUF),
    ],
)
def test_the_known_format_of_the_highest_quality_is_chosen(accept: str, expected: Format) -> None:
    """The first of equals; text where nothing that is known is asked for."""
    assert negotiate(accept)[0] is expected


@pytest.mark.parametrize("form", [PROTOBUF, OPENMETRICS])
def test_the_answer_says_which_escaping_it_is_in(form: str) -> None:
    """That of the format that was chosen; Prometheus 2 names none."""
    assert negotiate(form)[1].endswith("; escaping=underscores")
    assert negotiate(f"{form};escaping=allow-utf-8;q=0.5,text/plain;q=0.1")[1].endswith("; escaping=allow-utf-8")
    assert negotiate(f"{form};q=0.5,{TEXT};escaping=allow-utf-8;q=0.1")[1].endswith("; escaping=underscores")
