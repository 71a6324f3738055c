"""The certificate authority of a federation: made once and kept; the SuperLink's certificate is renewed before it ends."""

from __future__ import annotations

import ipaddress
import os
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    NoEncryption,
    PrivateFormat,
    PublicFormat,
    load_pem_private_key,
)
from cryptography.x509.oid import ExtendedKeyUsageOID, NameOID

from equipoise.core.files import make_folder, move
from equipoise.errors import ConfigError

AUTHORITY_DAYS, SERVER_DAYS = 3650, 397
RENEW_BEFORE = 60  # days before its end at which a certificate is renewed
CURVE = ec.SECP384R1()


def write_file(path: Path, content: bytes, *, secret: bool) -> Path:
    """Write a file that is whole or absent; a secret one is its owner's alone from the first moment."""
    make_folder(path.parent)
    beside = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    beside.unlink(missing_ok=True)
    with open(os.open(beside, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600 if secret else 0o644), "wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    move(beside, path)
    return path


def private_pem(key: ec.EllipticCurvePrivateKey) -> bytes:
    """A private key as PEM, without a password."""
    return key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())


def new_node_key(private: Path, public: Path, name: str = "") -> str:
    """Make the key of a node: the private half for its owner alone; the public half, which is returned, with its name."""
    key = ec.generate_private_key(CURVE)
    write_file(private, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), secret=True)
    text = key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH)
    write_file(public, f"{text.decode()} {name}".strip().encode() + b"\n", secret=False)
    return text.decode()


@dataclass(frozen=True)
class Authority:
    """The certificates of a federation in one folder: ca.crt and ca.key, server.pem and server.key."""

    folder: Path

    @property
    def certificate(self) -> Path:
        """The authority's own certificate, which every node gets."""
        return self.folder / "ca.crt"

    @property
    def key(self) -> Path:
        """The authority's private key, which never leaves this machine."""
        return self.folder / "ca.key"

    @property
    def server(self) -> Path:
        """The SuperLink's certificate."""
        return self.folder / "server.pem"

    @property
    def server_key(self) -> Path:
        """The SuperLink's private key."""
        return self.folder / "server.key"

    def prepare(self, hosts: Sequence[str], *, renew: bool = False) -> list[str]:
        """Make what is missing and renew what ends soon, or is for other hosts; says what was done.

        The authority is made once: without its key nothing is renewed, and a new authority would lock all nodes out.
        """
        done = []
        if not self.certificate.exists() and not self.key.exists():
            self._make_authority()
            done.append(f"made the authority {self.certificate}: keep {self.key} secret, and in a backup")
        if not (self.certificate.exists() and self.key.exists()):
            missing = self.key if not self.key.exists() else self.certificate
            raise ConfigError(
                f"{missing} is missing, and a new authority would lock out all nodes. Restore it from a backup; or move "
                f"{self.folder} away, begin anew, and give every node the new ca.crt."
            )
        wanted = sorted(set(hosts))
        why = "it was asked for" if renew else self._reason_to_renew(wanted)
        if why:
            self._make_server(wanted)
            done.append(f"made the SuperLink's certificate for {', '.join(wanted)} ({why}), good until {self.ends:%Y-%m-%d}")
        return done

    @property
    def ends(self) -> datetime:
        """When the SuperLink's certificate ends."""
        return x509.load_pem_x509_certificate(self.server.read_bytes()).not_valid_after_utc

    def _reason_to_renew(self, hosts: Sequence[str]) -> str:
        if not self.server.exists() or not self.server_key.exists():
            return "there was none"
        found = x509.load_pem_x509_certificate(self.server.read_bytes())
        if found.not_valid_after_utc - datetime.now(UTC) < timedelta(days=RENEW_BEFORE):
            return f"the old one ends on {found.not_valid_after_utc:%Y-%m-%d}"
        names = found.extensions.get_extension_for_class(x509.SubjectAlternativeName).value
        return "" if sorted(str(name.value) for name in names) == list(hosts) else "for other hosts than before"

    def _make_authority(self) -> None:
        key = ec.generate_private_key(CURVE)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "Authority of a federation")])
        usage = x509.KeyUsage(
            digital_signature=False, content_commitment=False, key_encipherment=False, data_encipherment=False,
            key_agreement=False, key_cert_sign=True, crl_sign=True, encipher_only=False, decipher_only=False,
        )  # fmt: skip
        builder = self._builder(name, name, key, key, AUTHORITY_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=True, path_length=0), critical=True)
        builder = builder.add_extension(usage, critical=True)
        write_file(self.key, private_pem(key), secret=True)
        write_file(self.certificate, builder.sign(key, hashes.SHA256()).public_bytes(Encoding.PEM), secret=False)

    def _make_server(self, hosts: Sequence[str]) -> None:
        authority = x509.load_pem_x509_certificate(self.certificate.read_bytes())
        signing = load_pem_private_key(self.key.read_bytes(), password=None)
        if not isinstance(signing, ec.EllipticCurvePrivateKey):
            raise ConfigError(f"{self.key} is no key of an elliptic curve.")
        key = ec.generate_private_key(CURVE)
        name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "SuperLink")])
        builder = self._builder(name, authority.subject, key, signing, SERVER_DAYS)
        builder = builder.add_extension(x509.BasicConstraints(ca=False, path_length=None), critical=True)
        builder = builder.add_extension(x509.SubjectAlternativeName([_host(host) for host in hosts]), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
        write_file(self.server_key, private_pem(key), secret=True)
        write_file(self.server, builder.sign(signing, hashes.SHA256()).public_bytes(Encoding.PEM), secret=False)

    @staticmethod
    def _builder(
        name: x509.Name, issuer: x509.Name, key: ec.EllipticCurvePrivateKey, signing: ec.EllipticCurvePrivateKey, days: int
    ) -> x509.CertificateBuilder:
        now = datetime.now(UTC)
        return (
            x509.CertificateBuilder()
            .subject_name(name)
            .issuer_name(issuer)
            .public_key(key.public_key())
            .serial_number(x509.random_serial_number())
            .not_valid_before(now - timedelta(minutes=5))
            .not_valid_after(now + timedelta(days=days))
            .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
            .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(signing.public_key()), critical=False)
        )


def _host(host: str) -> x509.GeneralName:
    try:
        return x509.IPAddress(ipaddress.ip_address(host))
    except ValueError:
        return x509.DNSName(host)
