"""Names of clients and the keys of their nodes: a node proves its key, and a name stays with the key that came with it first.

A node signs the token of the server's question with the key by which the SuperLink knows it. `KnownNodes` is a file beside the
run folders, as known_hosts is for SSH: the first node that comes with a name keeps it. The operator's own list wins over it.
"""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import InvalidSignature, UnsupportedAlgorithm
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_private_key,
    load_ssh_private_key,
    load_ssh_public_key,
)

from equipoise.core.files import write_atomically
from equipoise.core.plain_text import made_of, parse_json, parse_toml
from equipoise.engines.flower.apps import left_out
from equipoise.engines.flower.transport.messages import BadMessage, MessageContent
from equipoise.errors import ConfigError, FileGuard

if TYPE_CHECKING:
    from equipoise.engines.flower.apps.members import Member

NODE_KEY = "EQUIPOISE_NODE_KEY"  # in the environment of an app: the file of the node's private key
KNOWN_NODES = "known-nodes.json"  # beside the folders of runs
NODE_NAMES = "node-names.json"  # beside the operator's list
LONGEST_KEY = 600  # characters of a public key or signature
RETIRED = "was retired by the operator"
REPLACED = "has a new key, and has not come with it"
log = logging.getLogger("flwr")  # Flower shows it to whoever watches the run


def read_private_key(path: Path) -> ec.EllipticCurvePrivateKey:
    """The node's private key, in OpenSSH's or PEM form."""
    try:
        content = path.read_bytes()
    except OSError as failure:
        raise ConfigError(f"The key {path} cannot be read: {failure.strerror}.") from failure
    for load in (load_ssh_private_key, load_pem_private_key):
        try:
            key = load(content, password=None)
        except (ValueError, TypeError, UnsupportedAlgorithm):
            continue
        if isinstance(key, ec.EllipticCurvePrivateKey):
            return key
    raise ConfigError(f"{path} is no private key of an elliptic curve without password. Make one: ssh-keygen -t ecdsa -b 384")


def public_key_text(key: ec.EllipticCurvePublicKey) -> str:
    """A public key as in a .pub file, without a comment."""
    return key.public_bytes(Encoding.OpenSSH, PublicFormat.OpenSSH).decode()


def prove_name(token: str, client: str) -> dict[str, str]:
    """What an introduction says of the node's key, if it has one: the public half, and a signature of token and name."""
    file = os.environ.get(NODE_KEY)
    if not file:
        return {}
    key = read_private_key(Path(file))
    return {
        "key": public_key_text(key.public_key()),
        "proof": key.sign(_signed(token, client), ec.ECDSA(hashes.SHA256())).hex(),
    }


def read_proof(content: MessageContent, client: str) -> str:
    """The public key that an introduction has proved; "" if it names none."""
    key, proof = content.values.get("key"), content.values.get("proof")
    if key is None:
        return ""
    try:
        if not isinstance(key, str) or not isinstance(proof, str) or max(len(key), len(proof)) > LONGEST_KEY:
            raise ValueError
        public = load_ssh_public_key(key.encode())
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise ValueError
        public.verify(bytes.fromhex(proof), _signed(content.token, client), ec.ECDSA(hashes.SHA256()))
    except (ValueError, UnsupportedAlgorithm, InvalidSignature) as failure:
        raise BadMessage(f"{client} does not have the key that it names", left_out.KEY) from failure
    return public_key_text(public)


def _signed(token: str, client: str) -> bytes:
    return f"equipoise introduction {token} {client}".encode()


def read_node_list(path: str | Path) -> dict[str, str]:
    """The operator's list of nodes: `name = "public key"` in TOML, as `equipoise flower site` writes it."""
    file = Path(path)
    with FileGuard(f"The list of nodes {file}", ConfigError):
        given = parse_toml(file)
    found = {}
    for name, key in given.items():
        try:
            public = load_ssh_public_key(str(key).encode())
        except (ValueError, UnsupportedAlgorithm) as failure:
            raise ConfigError(f"The list of nodes {file} has no public key for {name!r}: {failure}.") from failure
        if not isinstance(public, ec.EllipticCurvePublicKey):
            raise ConfigError(f"The key of {name!r} in {file} is of no elliptic curve. Make one: ssh-keygen -t ecdsa -b 384")
        found[name] = public_key_text(public)
    return found


def write_node_names(folder: Path, names: Mapping[int, str]) -> None:
    """Note, beside the operator's list, which site has which of Flower's ids: a run's log names nodes that it never met."""
    known = {**read_node_names(folder), **names}
    text = json.dumps({str(node): name for node, name in known.items()}, indent=1)
    write_atomically(folder / NODE_NAMES, f"{text}\n".encode()).chmod(0o600)


def read_node_names(folder: Path) -> dict[int, str]:
    """The sites of Flower's ids, as far as they are noted; for the log alone, so a damaged file counts as none."""
    try:
        return {int(node): str(name) for node, name in parse_json(folder / NODE_NAMES).items()}
    except (OSError, ValueError, AttributeError):
        return {}


class KnownNodes:
    """Which node each name belongs to: by the operator's list, else by the first that came with it, in a file.

    Both files are read again when they have changed: keys can be renewed and nodes retired while a run goes on.
    """

    def __init__(self, path: Path | None, listed: str | Path | None = None) -> None:
        self.path, self.list_file = path, Path(listed) if listed is not None else None
        self.known: dict[str, dict[str, Any]] = {}
        self.listed: dict[str, str] | None = None
        self._read: dict[Path, int] = {}
        self._complaint = ""
        self.refresh()

    def refresh(self) -> None:
        """Read what has changed."""
        for file in (self.path, self.list_file):
            moment = file.stat().st_mtime_ns if file is not None and file.exists() else -1
            if file is None or (moment == self._read.get(file) and moment != -1):
                continue
            self._read[file] = moment
            if file == self.list_file:
                self._read_list(file)
            elif moment != -1:
                with FileGuard(file, ConfigError, cure="Restore it, or delete it to pin names anew."):
                    self.known = made_of(dict[str, dict[str, Any]], parse_json(file))

    def _read_list(self, file: Path) -> None:
        """Read the operator's list. One that is damaged while a run goes on changes nothing: the run keeps what it has read."""
        try:
            self.listed = read_node_list(file)
        except ConfigError as failure:
            if self.listed is None:
                raise
            if str(failure) != self._complaint:
                log.warning("%s The run goes on with the list that it has read before.", failure)
            self._complaint = str(failure)

    def withdrawn(self, client: str, key: str | None) -> str:
        """Why a client of the run may take part no longer, by the operator's list; "" if it may.

        `key` is the one that its node has proved, None if no node is there.
        """
        if self.listed is None:
            return ""
        if client not in self.listed:
            return RETIRED
        return "" if key is None or key == self.listed[client] else REPLACED

    def check(self, member: Member) -> None:
        """Refuse a node that takes another one's name."""
        self.refresh()
        name = member.client
        if self.listed is not None:
            if name not in self.listed:
                raise BadMessage(f"{name} is not in the operator's list of nodes", left_out.UNLISTED)
            if member.key != self.listed[name]:
                proves = "`equipoise flower node`, which proves it"
                cure = (
                    "the operator's list has another"
                    if member.key
                    else f"start it with {proves}"
                    if member.versions
                    else f"install the server's version of Equipoise on it and start it with {proves}"
                )
                text = f"{name} does not prove the key that it is listed with: {cure}"
                raise BadMessage(text, left_out.KEY if member.key else left_out.UNPROVED)
            return
        pinned = self.known.get(name)
        if pinned is None:
            return
        by_mark = not pinned.get("mark") or member.mark == pinned["mark"]
        good = member.key == pinned["key"] if pinned.get("key") else by_mark
        if not good:
            raise BadMessage(
                f"{name} is the name of another node, which came with it first: if the node has a new key or disk, take the "
                f"name out of {KNOWN_NODES} beside the run folders, or list the keys (server_app(nodes=…))",
                left_out.TAKEN,
            )

    def pin(self, members: Mapping[str, Member]) -> None:
        """Write down who came with which name; names that are known stay with their nodes."""
        new = {
            name: {"key": member.key, "mark": member.mark}
            for name, member in members.items()
            if (member.key or member.mark)
            and not self.known.get(name, {}).get("key")
            and (name not in self.known or member.key)
        }
        if new and self.path is not None and self.listed is None:
            self.known |= new
            write_atomically(self.path, (json.dumps(self.known, indent=1) + "\n").encode()).chmod(0o600)
        self.known |= new
