"""The nodes that a SuperLink knows, by the names of their sites: Flower tells them apart by numbers of twenty digits.

A node's name is that of its key: in the operator's list, in a kit, or as it was registered.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cryptography.exceptions import UnsupportedAlgorithm
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import (
    Encoding,
    PublicFormat,
    load_pem_public_key,
    load_ssh_public_key,
)

from equipoise.core.words import table_lines
from equipoise.engines.flower.apps.node_keys import public_key_text, read_node_list, write_node_names
from equipoise.engines.flower.operate.kits import NODE_LIST
from equipoise.errors import ConfigError

if TYPE_CHECKING:
    from equipoise.engines.flower.flower_internals import Registry

WAIT = 60.0  # seconds in which a SuperLink that was just begun must answer
UNKNOWN = "(unknown)"


@dataclass(frozen=True)
class RegisteredNode:
    """A node that the SuperLink lets in."""

    id: int
    name: str
    state: str  # "online", "offline", or "registered" if it never came
    since: str
    listed: bool  # whether its key is that of its name in the operator's list


def names_by_key(folder: Path) -> dict[str, str]:
    """The site of each public key: keys of kits, also those that were replaced, and those of the operator's list."""
    found = {}
    for file in sorted((folder / "sites").glob("*/node.pub*")):
        text = read_public(file.read_bytes())
        if text is not None:
            found[text] = file.parent.name
    return found | {key: name for name, key in read_node_list(folder / NODE_LIST).items()}


def read_public(content: bytes) -> str | None:
    """A public key, in OpenSSH's or PEM form, as the operator's list has it; None if it is none of a node's."""
    for load in (load_ssh_public_key, load_pem_public_key):
        try:
            key = load(content)
        except (ValueError, UnsupportedAlgorithm):
            continue
        return public_key_text(key) if isinstance(key, ec.EllipticCurvePublicKey) else None
    return None


def list_nodes(folder: Path, registry: Registry) -> list[RegisteredNode]:
    """The nodes that the SuperLink lets in, in the order of their names."""
    names, listed = names_by_key(folder), read_node_list(folder / NODE_LIST)
    found = []
    for entry in registry.nodes():
        key = read_public(entry["key"])
        name = names.get(key or "", "") or entry["name"] or UNKNOWN
        if entry["state"] != "unregistered":
            since = f"{entry['since']}Z" if entry["since"] else ""
            found.append(RegisteredNode(entry["id"], name, entry["state"], since, listed.get(name) == key))
    return sorted(found, key=lambda node: (node.name, not node.listed, node.id))


def await_superlink(registry: Registry, seconds: float = WAIT, tell: Callable[[str], None] = lambda text: None) -> None:
    """Wait until the SuperLink answers: it takes some seconds to begin. `tell` is called once if it does not answer at once."""
    end, told = time.monotonic() + seconds, False
    while True:
        try:
            registry.nodes()
            return
        except Exception as failure:  # of Flower, of HTTP, or of TLS
            if time.monotonic() >= end:
                raise ConfigError(
                    f"The SuperLink does not answer ({type(failure).__name__}: {failure}). Start it: equipoise flower superlink"
                ) from failure
            if not told:
                tell(f"The SuperLink does not answer yet. This command waits for it, {seconds:.0f} s at most.")
            told = True
            time.sleep(0.5)


def register(folder: Path, names: Sequence[str], registry: Registry) -> dict[str, tuple[int, bool]]:
    """Let sites in by the keys of the operator's list; Flower's id of each node, and whether it is a new one."""
    listed = read_node_list(folder / NODE_LIST)
    for name in names:
        if name not in listed:
            raise ConfigError(f"{name} is not in {folder / NODE_LIST}. Make its kit first: equipoise flower site {name}")
    there = {read_public(entry["key"]): entry for entry in registry.nodes()}
    found = {}
    for name in names:
        entry = there.get(listed[name])
        if entry is not None and entry["state"] == "unregistered":
            raise ConfigError(
                f"The key of {name} was unregistered, for good. Make a new one: equipoise flower site {name} --renew"
            )
        found[name] = (entry["id"], False) if entry is not None else (registry.register(as_pem(listed[name]), name), True)
    write_node_names(folder, {node: name for name, (node, _) in found.items()})
    return found


def as_pem(text: str) -> bytes:
    """A public key of the operator's list as Flower takes it."""
    key = load_ssh_public_key(text.encode())
    return key.public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo)


def unregister(folder: Path, names: Sequence[str], registry: Registry) -> dict[str, list[int]]:
    """Let in no longer the nodes of sites whose key is not, or no longer, the one in the operator's list; their ids."""
    nodes = list_nodes(folder, registry)
    found: dict[str, list[int]] = {}
    for name in names:
        of_site = [node for node in nodes if node.name == name]
        old = [node.id for node in of_site if not node.listed]
        if not old:
            raise ConfigError(_nothing_to_end(name, bool(of_site), nodes))
        found[name] = old
    for node in (each for ids in found.values() for each in ids):
        registry.unregister(node)
    return found


def _nothing_to_end(name: str, there: bool, nodes: Sequence[RegisteredNode]) -> str:
    if there:
        return (
            f"The only key of {name} is the one on the list. Take it off the list first: equipoise flower site {name} --retire"
        )
    known = sorted({node.name for node in nodes})
    return f"The SuperLink knows no node of {name}, but: {', '.join(known) or 'none'}."


def table_of(nodes: Sequence[RegisteredNode]) -> list[str]:
    """Nodes as lines of text."""
    head = ("name", "state", "since", "key", "Flower's id")
    rows = [head, *((n.name, n.state, n.since, "listed" if n.listed else "not listed", str(n.id)) for n in nodes)]
    return table_lines(rows)


def plain(nodes: Sequence[RegisteredNode]) -> list[Mapping[str, Any]]:
    """Nodes as JSON; ids as text, as numbers of twenty digits lose their last ones elsewhere."""
    return [{"name": n.name, "state": n.state, "since": n.since, "listed": n.listed, "id": str(n.id)} for n in nodes]
