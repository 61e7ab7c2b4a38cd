"""One request to a collector, and what its answer means."""

from __future__ import annotations

import datetime as dt
import email.utils
import zlib
from dataclasses import dataclass
from enum import Enum

import requests
import urllib3
from google.protobuf.message import DecodeError
from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceResponse

from otel_train._version import __version__
from otel_train.sinks.otlp.settings import OtlpSettings

_RETRYABLE = {429, 502, 503, 504}
"""What the OTLP specification (1.7, "OTLP/HTTP Response") lets a client try again; 500 and all others it forbids."""
_ANSWER_BYTES = 1 << 16
"""So much of an answer is read at most."""


class Verdict(Enum):
    """What became of a request."""

    ACCEPTED = "accepted"
    TRY_AGAIN = "retried"
    TOO_LARGE = "too large"
    REJECTED = "rejected"


@dataclass(frozen=True, slots=True)
class Outcome:
    """The answer to one request."""

    verdict: Verdict
    said: str = ""
    """Why, for the log."""
    rejected: int = 0
    """Points that a collector did not take out of an accepted request."""
    wait_seconds: float | None = None
    """How long the collector asks to wait."""


class Transport:
    """Posts requests over one connection that is kept open.

    Args:
        settings: Where and how.
    """

    def __init__(self, settings: OtlpSettings) -> None:
        self._settings = settings
        self._session = requests.Session()
        self._session.headers.clear()
        self._session.headers.update({"User-Agent": f"otel-train/{__version__}", "Content-Type": "application/x-protobuf"})
        if settings.compress:
            self._session.headers["Content-Encoding"] = "gzip"
        self._session.headers.update(settings.headers)
        if settings.certificate:
            self._session.verify = settings.certificate
        if settings.client_certificate:
            key = settings.client_key
            self._session.cert = (settings.client_certificate, key) if key else settings.client_certificate

    def post(self, body: bytes, limit_seconds: float) -> Outcome:
        """Send a request and read the answer; never raises.

        Args:
            body: The serialised request.
            limit_seconds: Longest time for connecting, and for each wait for the answer, besides the settings' time-out.
        """
        timeout = max(min(self._settings.timeout_seconds, limit_seconds), 0.05)
        data = zlib.compress(body, 1, zlib.MAX_WBITS + 16) if self._settings.compress else body
        try:
            with self._session.post(
                self._settings.url, data=data, timeout=timeout, allow_redirects=False, stream=True, verify=self._session.verify
            ) as answer:
                return _outcome(answer, answer.raw.read(_ANSWER_BYTES, decode_content=True))
        except (requests.RequestException, urllib3.exceptions.HTTPError, OSError, ValueError) as error:
            return Outcome(Verdict.TRY_AGAIN, _reason(error))

    def close(self) -> None:
        """Close the connection."""
        self._session.close()


def _outcome(answer: requests.Response, body: bytes) -> Outcome:
    status = answer.status_code
    if 200 <= status < 300:
        return _accepted(body)
    said = f"HTTP {status} {answer.reason or ''}".strip()
    if status in _RETRYABLE:
        return Outcome(Verdict.TRY_AGAIN, said, wait_seconds=_retry_after(answer.headers.get("Retry-After")))
    return Outcome(Verdict.TOO_LARGE if status == 413 else Verdict.REJECTED, said)


def _accepted(body: bytes) -> Outcome:
    try:
        partial = ExportMetricsServiceResponse.FromString(body).partial_success
    except DecodeError:  # some answer with a word, or with JSON
        return Outcome(Verdict.ACCEPTED)
    return Outcome(Verdict.ACCEPTED, partial.error_message[:200], rejected=max(partial.rejected_data_points, 0))


def _retry_after(text: str | None) -> float | None:
    """Return the seconds that a Retry-After header asks for: a number, or a date."""
    if text is None:
        return None
    if text.strip().isdigit():
        return float(text)
    try:
        date = email.utils.parsedate_to_datetime(text)
    except ValueError:
        return None
    if date.tzinfo is None:
        date = date.replace(tzinfo=dt.timezone.utc)
    return max((date - dt.datetime.now(dt.timezone.utc)).total_seconds(), 0.0)


def _reason(error: BaseException) -> str:
    """Return the innermost cause, without the address and its credentials, which the libraries' own texts repeat."""
    while (inner := error.__cause__ or error.__context__) is not None:
        error = inner
    return f"{type(error).__name__}: {str(error)[:120]}"
