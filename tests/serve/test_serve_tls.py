"""`equipoise serve` with a certificate: a real handshake, and what it is refused for."""

import datetime
import ipaddress
import os
import socket
import ssl
import subprocess
import sys

import httpx
import pytest
from test_choose import own_file
from typer.testing import CliRunner

from equipoise.cli.commands import app
from equipoise.errors import ConfigError
from equipoise.serve.choose import choose

TOKEN = "open-sesame-123"  # noqa: S105 — of this test


def make_certificate(folder, *addresses):
    """A certificate for addresses, which is its own authority, and its key."""
    x509 = pytest.importorskip("cryptography.x509")
    from cryptography.hazmat.primitives import hashes, serialization
    from cryptography.hazmat.primitives.asymmetric import ec

    key, name = ec.generate_private_key(ec.SECP256R1()), x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, "test")])
    names = [x509.IPAddress(ipaddress.ip_address(each)) for each in addresses]
    now = datetime.datetime.now(datetime.UTC)
    made = (
        x509.CertificateBuilder().subject_name(name).issuer_name(name).public_key(key.public_key())
        .serial_number(x509.random_serial_number()).not_valid_before(now - datetime.timedelta(days=1))
        .not_valid_after(now + datetime.timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName(names), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )  # fmt: skip
    pem = serialization.Encoding.PEM
    (folder / "cert.pem").write_bytes(made.public_bytes(pem))
    plain = serialization.PrivateFormat.PKCS8, serialization.NoEncryption()
    (folder / "key.pem").write_bytes(key.private_bytes(pem, *plain))
    return folder / "cert.pem", folder / "key.pem"


@pytest.fixture(scope="module")
def secure(root, tmp_path_factory):
    """The command itself, with a certificate and a token; its address and the certificate."""
    certificate, key = make_certificate(tmp_path_factory.mktemp("tls"), "127.0.0.1")
    command = [sys.executable, "-m", "equipoise", "serve", str(root), "--port", "0", "--token", TOKEN]
    command += ["--certificate", str(certificate), "--key", str(key)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=os.environ | {"COLUMNS": "300"}) as server:
        url = server.stdout.readline().rsplit(" ", 1)[1].strip().partition("?")[0].rstrip("/")
        yield url, certificate
        server.terminate()


def test_a_handshake_and_what_it_protects(secure, data, tmp_path):
    url, certificate = secure
    assert url.startswith("https://127.0.0.1:")
    trusting = ssl.create_default_context(cafile=str(certificate))
    with httpx.Client(verify=trusting, base_url=url, timeout=30) as client:
        assert client.get("/api/runs").status_code == 401
        answer = client.get("/run/knob", params={"token": TOKEN})
        assert answer.status_code == 303
        assert "Secure" in answer.headers["set-cookie"]  # never sent without TLS
        assert client.get("/api/runs").status_code == 200  # by the cookie
        same, other = url, url.replace("https", "http")
        assert client.get("/api/runs", headers={"origin": same}).status_code == 200
        assert client.get("/api/runs", headers={"origin": other}).status_code == 403
    file = own_file(data, tmp_path / "mine.csv")
    assert choose(url, file, run="knob", token=TOKEN, authority=certificate).verdict.examples == 15


def test_a_stranger_to_the_certificate_sends_no_token(secure, data, tmp_path):
    url, certificate = secure
    file = own_file(data, tmp_path / "mine.csv")
    with pytest.raises(ConfigError, match=r"cannot be reached: .*certificate verify failed"):
        choose(url, file, run="knob", token=TOKEN)  # an authority that nobody knows
    with pytest.raises(ConfigError, match="cannot be reached"):
        choose(url.replace("127.0.0.1", "localhost"), file, run="knob", token=TOKEN, authority=certificate)  # another name
    with pytest.raises(ConfigError, match="cannot be reached"):
        choose(url.replace("https", "http"), file, run="knob", token=TOKEN)  # without TLS
    with pytest.raises(ConfigError, match=r"nowhere\.pem"):
        choose(url, file, run="knob", token=TOKEN, authority=tmp_path / "nowhere.pem")
    old = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    old.load_verify_locations(certificate)
    old.maximum_version = ssl.TLSVersion.TLSv1_2
    host, port = url.removeprefix("https://").split(":")
    with socket.create_connection((host, int(port)), timeout=20) as plain, old.wrap_socket(plain, server_hostname=host) as made:
        assert made.version() == "TLSv1.2"


def test_a_certificate_that_cannot_be_used_is_refused(root, tmp_path):
    certificate, key = make_certificate(tmp_path, "127.0.0.1")
    (tmp_path / "other").mkdir()
    _, other_key = make_certificate(tmp_path / "other", "127.0.0.1")
    (tmp_path / "nonsense.pem").write_text("-----BEGIN CERTIFICATE-----\nnonsense\n")
    for pair, words in (
        ((certificate, other_key), "cannot be used"),
        ((tmp_path / "nonsense.pem", key), "cannot be used"),
        ((certificate, tmp_path / "absent.pem"), "absent.pem does not exist"),
        ((certificate, None), "TLS needs both"),
    ):
        given = [f"--{name}={path}" for name, path in zip(("certificate", "key"), pair, strict=True) if path is not None]
        done = CliRunner().invoke(app, ["serve", str(root), "--port", "0", *given], env={"COLUMNS": "400"})
        assert (done.exit_code, words in " ".join(done.output.split())) == (2, True), done.output
