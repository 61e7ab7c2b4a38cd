"""Connections to a collector: certificates, and what an answer means."""

from __future__ import annotations

import ssl
import subprocess
from pathlib import Path

import pytest

from otel_train.sinks.otlp.settings import make_settings
from otel_train.sinks.otlp.transport import Outcome, Transport, Verdict
from tests.servers import free_port
from tests.sinks.otlp.collector import collector, status


@pytest.fixture(scope="module")
def certificates(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Make an authority, and of it a certificate for the collector and one for a client; and an authority that made none."""
    folder = tmp_path_factory.mktemp("certificates")

    def openssl(*arguments: str) -> None:
        subprocess.run(["openssl", *arguments], cwd=folder, check=True, capture_output=True)

    for name in ("ca", "stranger"):
        openssl(
            "req",
            "-x509",
            "-newkey",
            "rsa:2048",
            "-nodes",
            "-keyout",
            f"{name}.key",
            "-out",
            f"{name}.pem",
            "-subj",
            f"/CN={name}",
            "-days",
            "2",
        )
    (folder / "names").write_text("subjectAltName=IP:127.0.0.1\nextendedKeyUsage=serverAuth,clientAuth\n")
    for name in ("server", "client"):
        openssl("req", "-newkey", "rsa:2048", "-nodes", "-keyout", f"{name}.key", "-out", f"{name}.csr", "-subj", f"/CN={name}")
        openssl(
            "x509",
            "-req",
            "-in",
            f"{name}.csr",
            "-CA",
            "ca.pem",
            "-CAkey",
            "ca.key",
            "-CAcreateserial",
            "-out",
            f"{name}.pem",
            "-days",
            "2",
            "-extfile",
            "names",
        )
    return folder


def post(url: str, environ: dict[str, str]) -> Outcome:
    """Send one request."""
    transport = Transport(make_settings(environ, endpoint=url, headers={}, interval_seconds=None))
    outcome = transport.post(b"", 5.0)
    transport.close()
    return outcome


def served_by(certificates: Path, *, asks: bool = False) -> ssl.SSLContext:
    """Return how a collector speaks TLS; `asks`: for a certificate of its client."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(certificates / "server.pem", certificates / "server.key")
    if asks:
        context.verify_mode = ssl.CERT_REQUIRED
        context.load_verify_locations(certificates / "ca.pem")
    return context


def test_a_certificate_is_checked_by_the_authority_that_is_given(certificates: Path) -> None:
    """By another one, and by the system's, it is wrong: nothing is sent, and the push waits."""
    with collector(tls=served_by(certificates)) as there:
        assert post(there.url, {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificates / "ca.pem")}).verdict is Verdict.ACCEPTED
        for environ in ({}, {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificates / "stranger.pem")}):
            outcome = post(there.url, environ)
            assert outcome.verdict is Verdict.TRY_AGAIN
            assert "CERTIFICATE_VERIFY_FAILED" in outcome.said
        assert len(there.bodies) == 1


def test_a_client_shows_its_certificate(certificates: Path) -> None:
    """To a collector that asks for one."""
    with collector(tls=served_by(certificates, asks=True)) as there:
        environ = {"OTEL_EXPORTER_OTLP_CERTIFICATE": str(certificates / "ca.pem")}
        assert post(there.url, environ).verdict is Verdict.TRY_AGAIN
        environ["OTEL_EXPORTER_OTLP_CLIENT_CERTIFICATE"] = str(certificates / "client.pem")
        environ["OTEL_EXPORTER_OTLP_CLIENT_KEY"] = str(certificates / "client.key")
        assert post(there.url, environ).verdict is Verdict.ACCEPTED


def test_a_file_that_is_not_there_is_a_reason_to_wait(certificates: Path) -> None:
    """It may be mounted later."""
    with collector(tls=served_by(certificates)) as there:
        outcome = post(there.url, {"OTEL_EXPORTER_OTLP_CERTIFICATE": "/nowhere.pem"})
        assert outcome.verdict is Verdict.TRY_AGAIN
        assert "/nowhere.pem" in outcome.said


def test_why_a_request_failed_does_not_tell_the_address() -> None:
    """It may carry a password."""
    outcome = post(f"http://me:hunter2@127.0.0.1:{free_port()}", {})
    assert outcome.verdict is Verdict.TRY_AGAIN
    assert "refused" in outcome.said
    assert "hunter2" not in outcome.said


def test_a_redirect_is_not_followed() -> None:
    """Headers with secrets go to the address that was given, and to no other."""
    with collector() as other, collector(status(307, Location=f"{other.url}/v1/metrics")) as there:
        assert post(there.url, {}) == Outcome(Verdict.REJECTED, "HTTP 307 Temporary Redirect")
        assert not other.bodies


def test_an_answer_in_another_language_still_counts_as_taken() -> None:
    """Some stores answer with JSON, or with nothing."""
    with collector(lambda handler: handler.reply(202, b'{"partialSuccess": {}}')) as there:
        assert post(there.url, {}).verdict is Verdict.ACCEPTED
