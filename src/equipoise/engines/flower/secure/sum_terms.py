"""What the parties of one masked sum agree on, how its messages are written, and every way in which it can fail."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from enum import IntEnum
from functools import cached_property
from itertools import pairwise

from equipoise.errors import EquipoiseError, InvalidParameter, is_whole, require
from equipoise.privacy.secure_sum import check_modulus

MOST_CLIENTS = 10_000
MOST_LINKED = 1_000  # clients of whom each is every other's neighbour
LONGEST_VECTOR = 1 << 28
_LONGEST_NAME = 200  # bytes
_NONCE_BYTES = 16
_MARK = b"EQM1"
_HEAD = len(_MARK) + 1 + 16  # mark, kind, tag

# ---------------------------------------------------------------------------------------------------------------------- errors


class MaskingError(EquipoiseError, RuntimeError):
    """A masked sum that cannot go on, or a message of it that is refused. `clients` names those concerned, where known."""

    def __init__(self, reason: str, clients: Iterable[str] = ()) -> None:
        self.clients = tuple(clients)
        super().__init__(reason)


class BadMessage(MaskingError):
    """A message that is refused. On the server its sender is left out; on a client the sum ends for that client."""


class MalformedMessage(BadMessage):
    """Bytes that are not such a message: garbage, a wrong length, a name twice, a key that is none."""


class WrongSum(BadMessage):
    """A message of another run, round, purpose or attempt."""


class UnknownSender(BadMessage):
    """A sender that has no part in this step of the sum, or speaks in another's name."""


class DuplicateMessage(BadMessage):
    """A second answer to the same request."""


class OutOfOrder(BadMessage):
    """A message of another step: too early, too late, or asked for again."""


class UnreadableShares(BadMessage):
    """Sealed shares that do not open."""


class WrongShare(BadMessage):
    """A share that does not lie on the polynomial that the others agree on."""


class NoReply(MaskingError):
    """A client that did not answer in time."""


class TooFewClients(MaskingError):
    """Fewer clients are left than the sum needs. `step`, `have` and `need` say where and how many."""

    def __init__(self, step: str, have: int, need: int, clients: Iterable[str] = ()) -> None:
        self.step, self.have, self.need = step, have, need
        super().__init__(f"{step}: {have} clients are left, but {need} are needed. Nothing was summed; try again.", clients)


class SplitSurvivors(MaskingError):
    """The clients that are left are not all linked by neighbours: the sum would fall apart into sums of fewer."""


class LostSecret(MaskingError):
    """Masks that cannot be removed: `clients` dealt shares that do not open or do not fit. Try again without them."""


class RefusedTerms(MaskingError):
    """A client does not take part on these terms."""


class RefusedToReveal(MaskingError):
    """A client keeps its shares: what it was asked for would say more than the sum."""


# -------------------------------------------------------------------------------------------------------------------- messages


class Kind(IntEnum):
    """The messages of a sum, in order: odd ones go from the server to clients, even ones are the clients' answers."""

    INVITATION = 1
    KEYS = 2
    ROSTER = 3
    SHARES = 4
    INBOX = 5
    MASKED = 6
    SURVIVORS = 7
    REVEALED = 8


def pack(parts: Iterable[bytes]) -> bytes:
    """Byte strings, each after its length."""
    return b"".join(piece for part in parts for piece in (len(part).to_bytes(4, "little"), part))


def unpack(data: bytes, count: int | None = None) -> list[bytes]:
    """The byte strings that `pack` wrote; as many as `count`, where given."""
    parts, place = [], 0
    while place < len(data):
        start = place + 4
        place = start + int.from_bytes(data[place:start], "little")
        if place > len(data) or start > len(data):
            raise MalformedMessage("A message is cut short.")
        parts.append(data[start:place])
    if count is not None and len(parts) != count:
        raise MalformedMessage(f"A message must have {count} parts, but has {len(parts)}.")
    return parts


def pack_names(names: Iterable[str]) -> bytes:
    return pack(name.encode() for name in names)


def read_name(data: bytes) -> str:
    try:
        return data.decode()
    except UnicodeDecodeError:
        raise MalformedMessage("A name is not UTF-8.") from None


def unpack_names(data: bytes) -> tuple[str, ...]:
    """Names in rising order, none twice."""
    names = tuple(read_name(part) for part in unpack(data))
    if any(first >= second for first, second in pairwise(names)):
        raise MalformedMessage("Names must rise, each once.")
    return names


def pack_table(rows: Mapping[str, Iterable[bytes]]) -> bytes:
    """A few byte strings under each name."""
    return pack(part for name in sorted(rows) for part in (name.encode(), *rows[name]))


def unpack_table(data: bytes, sizes: tuple[int, ...]) -> dict[str, tuple[bytes, ...]]:
    """The table that `pack_table` wrote, with byte strings of these sizes under each name."""
    parts, width = unpack(data), len(sizes) + 1
    if len(parts) % width:
        raise MalformedMessage("A table is cut short.")
    rows = [parts[first : first + width] for first in range(0, len(parts), width)]
    if any(len(part) != size for row in rows for part, size in zip(row[1:], sizes, strict=True)):
        raise MalformedMessage("An entry of a table has a wrong length.")
    table = {read_name(row[0]): tuple(row[1:]) for row in rows}
    if len(table) < len(rows):
        raise MalformedMessage("A table has a name twice.")
    return table


def write(kind: Kind, tag: bytes, parts: Iterable[bytes]) -> bytes:
    """A message: mark, kind, the sum's tag, and its parts."""
    return _MARK + bytes([kind]) + tag + pack(parts)


def kind_of(message: bytes) -> Kind:
    """Which message this is."""
    if not isinstance(message, bytes) or len(message) < _HEAD or message[: len(_MARK)] != _MARK:
        raise MalformedMessage("These bytes are not a message of a masked sum.")
    try:
        return Kind(message[len(_MARK)])
    except ValueError:
        raise MalformedMessage(f"There is no message of kind {message[len(_MARK)]}.") from None


def read(message: bytes, kind: Kind, terms: Terms, count: int) -> list[bytes]:
    """The parts of a message of this kind and sum."""
    found = kind_of(message)
    if message[_HEAD - 16 : _HEAD] != terms.tag:
        raise WrongSum(f"A message belongs to another sum than {terms}.")
    if found != kind:
        raise OutOfOrder(f"A message of kind {kind.name} was expected, but this is {found.name}.")
    if len(message) > terms.largest_message:
        raise MalformedMessage(f"A message has {len(message)} bytes; none of this sum has more than {terms.largest_message}.")
    return unpack(message[_HEAD:], count)


# ----------------------------------------------------------------------------------------------------------------------- terms


@dataclass(frozen=True)
class Terms:
    """One masked sum: of which run, round and purpose, over whom, of what, and how many clients may be lost.

    Each client shares its two secrets among its `neighbours` and itself, and any `threshold` of these holders can put one
    together. `fewest` clients must be in the sum, or neither server nor clients go on. `neighbours=None` is the complete graph;
    an even number k is a ring in an order drawn by `nonce`, where each client knows the k/2 next on either side (Bell et al.
    2020, who say how large k must be): cheaper, but secrets are then held by k + 1 clients only. 2 · threshold must exceed the
    number of holders: then even lies about who survived cannot bring holders who follow the protocol to give away both secrets.

    Make these with `Terms.fresh`, which draws the nonce: two attempts at one sum are two sums.
    """

    run: str
    round: int
    purpose: str
    clients: tuple[str, ...]  # in rising order
    length: int
    modulus: int
    threshold: int
    fewest: int
    neighbours: int | None
    nonce: bytes

    def __post_init__(self) -> None:
        for name, text in (("run", self.run), ("purpose", self.purpose)):
            require(_is_name(text), name, f"must be a string of 1 to {_LONGEST_NAME} bytes", text)
        require(is_whole(self.round) and 0 <= self.round < 1 << 62, "round", "must be a whole number ≥ 0", self.round)
        good = isinstance(self.clients, tuple) and 2 <= len(self.clients) <= MOST_CLIENTS
        require(good, "clients", f"must be a tuple of 2 to {MOST_CLIENTS} names", self.clients)
        good = all(map(_is_name, self.clients)) and list(self.clients) == sorted(set(self.clients))
        rule = f"must be different names of 1 to {_LONGEST_NAME} bytes, in rising order"
        require(good, "clients", rule, self.clients, "Terms.fresh(...) sorts them.")
        good = is_whole(self.length) and 1 <= self.length <= LONGEST_VECTOR
        require(good, "length", f"must be a whole number from 1 to {LONGEST_VECTOR}", self.length)
        check_modulus(self.modulus)
        near = self.neighbours
        good = near is None or (is_whole(near) and near >= 2 and near % 2 == 0 and near <= MOST_CLIENTS)
        require(good, "neighbours", "must be an even number ≥ 2, or None for all", near)
        good = near is not None or len(self.clients) <= MOST_LINKED
        require(good, "neighbours", f"must be given for more than {MOST_LINKED} clients", near, "Work grows with its square.")
        holders, most = _holders(len(self.clients), near), len(self.clients)
        good = is_whole(self.threshold) and max(2, holders // 2 + 1) <= self.threshold <= holders
        rule = (
            f"must lie between {max(2, holders // 2 + 1)} and {holders}: more than half of the holders of a secret, at most all"
        )
        require(good, "threshold", rule, self.threshold)
        good = is_whole(self.fewest) and self.threshold <= self.fewest <= most
        require(good, "fewest", f"must lie between the threshold ({self.threshold}) and {most}", self.fewest)
        good = isinstance(self.nonce, bytes) and len(self.nonce) == _NONCE_BYTES
        require(good, "nonce", f"must be {_NONCE_BYTES} random bytes", self.nonce)

    @classmethod
    def fresh(
        cls,
        *,
        run: str,
        round_index: int,
        purpose: str,
        clients: Iterable[str],
        length: int,
        modulus: int,
        threshold: int | None = None,
        fewest: int | None = None,
        neighbours: int | None = None,
    ) -> Terms:
        """New terms. Without `threshold` two thirds of a secret's holders, without `fewest` two thirds of the clients."""
        names = tuple(sorted(clients))
        if threshold is None:
            threshold = max(2, -(-2 * _holders(len(names), neighbours if is_whole(neighbours) else None) // 3))
        if fewest is None:
            fewest = max(threshold, -(-2 * len(names) // 3)) if is_whole(threshold) else threshold
        nonce = os.urandom(_NONCE_BYTES)
        return cls(run, round_index, purpose, names, length, modulus, threshold, fewest, neighbours, nonce)

    def __str__(self) -> str:
        return f"{self.purpose!r} of round {self.round} in run {self.run!r}"

    def encode(self) -> bytes:
        """These terms as bytes."""
        numbers = (self.round, self.length, self.modulus, self.threshold, self.fewest, self.neighbours or 0)
        whole = b"".join(number.to_bytes(8, "little") for number in numbers)
        return pack([self.run.encode(), self.purpose.encode(), whole, self.nonce, pack_names(self.clients)])

    @classmethod
    def decode(cls, data: bytes) -> Terms:
        """The terms that `encode` wrote; MalformedMessage for anything else."""
        if len(data) > (MOST_CLIENTS + 4) * (_LONGEST_NAME + 4):
            raise MalformedMessage(f"Terms of {len(data)} bytes are too long.")
        run, purpose, whole, nonce, names = unpack(data, 5)
        if len(whole) != 48:
            raise MalformedMessage("Terms must have six numbers.")
        numbers = [int.from_bytes(whole[place : place + 8], "little") for place in range(0, 48, 8)]
        round_index, length, modulus, threshold, fewest, near = numbers
        clients = unpack_names(names)
        try:
            return cls(
                read_name(run),
                round_index,
                read_name(purpose),
                clients,
                length,
                modulus,
                threshold,
                fewest,
                near or None,
                nonce,
            )
        except InvalidParameter as error:
            raise MalformedMessage(f"These terms are not allowed: {error}") from None

    @property
    def invitation(self) -> bytes:
        """The message that opens the sum."""
        return write(Kind.INVITATION, self.tag, [self.encode()])

    @classmethod
    def of_invitation(cls, message: bytes) -> Terms:
        """The terms of an invitation."""
        if kind_of(message) != Kind.INVITATION:
            raise OutOfOrder(f"An invitation was expected, but this is {kind_of(message).name}.")
        terms = cls.decode(unpack(message[_HEAD:], 1)[0])
        read(message, Kind.INVITATION, terms, 1)  # the tag must be that of the terms
        return terms

    @cached_property
    def tag(self) -> bytes:
        """Sixteen bytes that stand for these terms in every message and every key of the sum."""
        return hashlib.sha256(b"equipoise masked sum 1" + self.encode()).digest()[:16]

    @cached_property
    def place(self) -> dict[str, int]:
        """Where the secrets' polynomials are taken for each client."""
        return {name: place for place, name in enumerate(self.clients, 1)}

    @property
    def largest_message(self) -> int:
        """No message of this sum has more bytes: what a network may refuse before reading."""
        return 4096 + 8 * self.length + len(self.clients) * 3 * (_LONGEST_NAME + 200)

    def graph(self, present: Iterable[str]) -> dict[str, frozenset[str]]:
        """Who shares with whom among those present; symmetric, and nobody is their own neighbour."""
        names = sorted(present)
        if self.neighbours is None or self.neighbours >= len(names) - 1:
            everybody = frozenset(names)
            return {name: everybody - {name} for name in names}
        ring = sorted(names, key=lambda name: hashlib.sha256(self.nonce + name.encode()).digest())
        steps = [step for step in range(-self.neighbours // 2, self.neighbours // 2 + 1) if step]
        return {
            name: frozenset(ring[(place + step) % len(ring)] for step in steps) for place, name in enumerate(ring)
        }  # fmt: skip


def connected(graph: Mapping[str, Set[str]], names: Set[str]) -> bool:
    """Whether all of `names` are linked by neighbours among them. If not, the server would see the sum of each part."""
    if not names:
        return True
    reached: set[str] = set()
    edge = {min(names)}
    while edge:
        reached |= edge
        edge = {near for name in edge for near in graph[name] if near in names} - reached
    return len(reached) == len(names)


def _holders(clients: int, neighbours: int | None) -> int:
    return clients if neighbours is None else min(clients, neighbours + 1)


def _is_name(text: object) -> bool:
    if not isinstance(text, str):
        return False
    try:
        return 1 <= len(text.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False
