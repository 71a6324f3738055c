"""Makes what a trial federation needs: a certificate authority, the SuperLink's certificate, a key per node, Flower's settings.

    python make_certificates.py client-0 client-1 client-2 client-3

For a real federation: name the SuperLink's host below or take its certificate from your own authority, and let every
organisation make its own key (ssh-keygen -t ecdsa -b 384), so that only the public half ever leaves it.
"""

import datetime
import ipaddress
import os
import sys
from pathlib import Path

from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, PublicFormat

ADDRESS = "127.0.0.1:47090"  # where nodes and you reach the SuperLink
HOSTS = [x509.DNSName("localhost"), x509.IPAddress(ipaddress.ip_address("127.0.0.1"))]  # the names its certificate is for
DAYS = 90
HERE = Path(__file__).resolve().parent


def write(path: Path, content: bytes, mode: int) -> None:
    """A new file that nobody else can read for a moment if it is secret."""
    path.parent.mkdir(mode=0o700, exist_ok=True)
    path.unlink(missing_ok=True)
    with open(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, mode), "wb") as file:
        file.write(content)


def certificate(name: str, key: ec.EllipticCurvePrivateKey, issuer: str, issuer_key: ec.EllipticCurvePrivateKey) -> bytes:
    """A certificate for the hosts above, or, if it signs itself, of an authority."""
    authority = name == issuer
    now = datetime.datetime.now(datetime.UTC)
    builder = (
        x509.CertificateBuilder()
        .subject_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, name)]))
        .issuer_name(x509.Name([x509.NameAttribute(x509.NameOID.COMMON_NAME, issuer)]))
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - datetime.timedelta(minutes=5))
        .not_valid_after(now + datetime.timedelta(days=DAYS))
        .add_extension(x509.BasicConstraints(ca=authority, path_length=0 if authority else None), critical=True)
        .add_extension(x509.SubjectKeyIdentifier.from_public_key(key.public_key()), critical=False)
        .add_extension(x509.AuthorityKeyIdentifier.from_issuer_public_key(issuer_key.public_key()), critical=False)
    )
    if not authority:
        builder = builder.add_extension(x509.SubjectAlternativeName(HOSTS), critical=False)
        builder = builder.add_extension(x509.ExtendedKeyUsage([x509.ExtendedKeyUsageOID.SERVER_AUTH]), critical=False)
    return builder.sign(issuer_key, hashes.SHA256()).public_bytes(Encoding.PEM)


def main(nodes: list[str]) -> None:
    curve = ec.SECP384R1()
    authority, server = ec.generate_private_key(curve), ec.generate_private_key(curve)
    name = "Authority of a trial federation"
    write(HERE / "certificates/ca.crt", certificate(name, authority, name, authority), 0o644)
    write(HERE / "certificates/server.pem", certificate("SuperLink", server, name, authority), 0o644)
    write(HERE / "certificates/server.key", server.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()), 0o600)
    for node in nodes:
        key = ec.generate_private_key(curve)
        write(HERE / "keys" / node, key.private_bytes(Encoding.PEM, PrivateFormat.OpenSSH, NoEncryption()), 0o600)
        write(HERE / f"keys/{node}.pub", key.public_key().public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH), 0o644)
    settings = f'[superlink]\ndefault = "federation"\n\n[superlink.federation]\naddress = "{ADDRESS}"\n'
    settings += f"root-certificates = '{HERE / 'certificates/ca.crt'}'\n"
    write(HERE / ".flwr/config.toml", settings.encode(), 0o644)
    print("Made certificates/, keys/ and .flwr/config.toml for", ", ".join(nodes))


if __name__ == "__main__":
    main(sys.argv[1:] or ["client-0", "client-1", "client-2", "client-3"])
