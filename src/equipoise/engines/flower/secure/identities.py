"""Long-lived keys by which nodes know each other, so that a server cannot put keys of its own in their place.

Each node has a private Ed25519 key. The owners of the nodes exchange the public halves without the server, and each node keeps
those of all others in a file. With them nodes sign the keys of a sum, and later who survived it and on which terms.
"""

from __future__ import annotations

import base64
import binascii
import os
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from cryptography.exceptions import InvalidSignature
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey, Ed25519PublicKey
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat, load_pem_private_key

from equipoise.core.plain_text import content_of, parse_toml
from equipoise.errors import ConfigError, FileGuard

SIGNATURE_BYTES, PUBLIC_BYTES = 64, 32


@dataclass(frozen=True, eq=False)
class Identity:
    """A node's own key, and the public keys of the nodes that its owner knows, by client name.

    `colluders` is how many nodes may help the server; None is the most below a third of those invited.
    """

    key: Ed25519PrivateKey
    peers: Mapping[str, bytes]
    colluders: int | None = None

    @property
    def public(self) -> bytes:
        """The public half of the key."""
        return self.key.public_key().public_bytes_raw()

    def sign(self, text: bytes) -> bytes:
        """The signature of a text."""
        return self.key.sign(text)

    def knows(self, client: str) -> bool:
        """Whether the owner has the key of a client."""
        return client in self.peers

    def has_signed(self, client: str, text: bytes, signature: bytes) -> bool:
        """Whether a client has signed a text, by the key that the owner has of it."""
        return client in self.peers and is_signed(self.peers[client], text, signature)


def is_signed(public: bytes, text: bytes, signature: bytes) -> bool:
    """Whether a signature is that of a text under a public key."""
    try:
        Ed25519PublicKey.from_public_bytes(public).verify(signature, text)
    except (InvalidSignature, ValueError):
        return False
    return True


def default_colluders(clients: int) -> int:
    """The most nodes that are fewer than a third."""
    return (clients - 1) // 3


def signed_threshold(clients: int, colluders: int) -> int:
    """The smallest t > (n + c)/2: no two lists of survivors can both have t signatures, if c nodes sign both."""
    return (clients + colluders) // 2 + 1


# ---------------------------------------------------------------------------------------------------------------------- files


def write_identity(path: Path) -> str:
    """Make a key and write its private half to a new file that its owner alone can read; the public half as text."""
    key = Ed25519PrivateKey.generate()
    text = key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption())
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    except FileExistsError as failure:
        raise ConfigError(f"{path} is there already. Nodes would no longer know who has it: name a new file.") from failure
    except OSError as failure:
        raise ConfigError(f"{path} could not be written: {failure.strerror}.") from failure
    with os.fdopen(handle, "wb") as file:
        file.write(text)
    return public_text(key.public_key().public_bytes_raw())


def read_identity(key: Path, peers: Path, colluders: int | None = None) -> Identity:
    """A node's key and those of its peers, from their files."""
    with FileGuard(key, ConfigError, "is no private key"):
        private = load_pem_private_key(content_of(key), None)
    with FileGuard(peers, ConfigError):
        known = parse_toml(peers)
    if not isinstance(private, Ed25519PrivateKey):
        raise ConfigError(f"{key} is no Ed25519 key. `equipoise flower key {key}` makes one.")
    if os.name == "posix" and key.stat().st_mode & 0o077:
        raise ConfigError(f"{key} can be read by others than its owner. chmod 600 {key}")
    return Identity(private, {name: read_public_text(name, text) for name, text in known.items()}, colluders)


def public_text(public: bytes) -> str:
    """A public key as text for the file of peers."""
    return base64.b64encode(public).decode()


def read_public_text(name: str, text: object) -> bytes:
    """The public key that `public_text` wrote; ConfigError for anything else."""
    try:
        public = base64.b64decode(text, validate=True) if isinstance(text, str) else b""
    except binascii.Error:
        public = b""
    if len(public) != PUBLIC_BYTES:
        raise ConfigError(f"The key of {name!r} must be {PUBLIC_BYTES} bytes in base64, as `equipoise flower key` prints it.")
    return public
