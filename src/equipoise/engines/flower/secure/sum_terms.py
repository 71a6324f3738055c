"""What the parties of one masked sum agree on."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Iterable, Mapping, Set
from dataclasses import dataclass
from functools import cached_property

from equipoise.engines.flower.secure import sum_messages as messages
from equipoise.engines.flower.secure.sum_messages import MessageKind
from equipoise.errors import InvalidParameter, is_integer, require
from equipoise.privacy.secure_sum import check_modulus

MOST_CLIENTS = 10_000
MOST_LINKED = 1_000  # clients of whom each is every other's neighbour
LONGEST_VECTOR = 1 << 28
_LONGEST_NAME = 200  # bytes
_NONCE_BYTES = 16


@dataclass(frozen=True)
class SumTerms:
    """One masked sum: of which run, round and purpose, over whom, of what, and how many clients may be lost.

    Each client shares its two secrets among its `neighbours` and itself, and any `threshold` of these holders can put one
    together. `fewest` clients must be in the sum, or neither server nor clients go on. `neighbours=None` is the complete graph;
    an even number k is a ring in an order drawn by `nonce`, where each client knows the k/2 next on either side (Bell et al.
    2020, who say how large k must be): cheaper, but secrets are then held by k + 1 clients only. 2 · threshold must exceed the
    number of holders: then even lies about who survived cannot bring holders who follow the protocol to give away both secrets.

    Make these with `SumTerms.fresh`, which draws the nonce: two attempts at one sum are two sums.
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
        require(is_integer(self.round) and 0 <= self.round < 1 << 62, "round", "must be a whole number ≥ 0", self.round)
        good = isinstance(self.clients, tuple) and 2 <= len(self.clients) <= MOST_CLIENTS
        require(good, "clients", f"must be a tuple of 2 to {MOST_CLIENTS} names", self.clients)
        good = all(map(_is_name, self.clients)) and list(self.clients) == sorted(set(self.clients))
        rule = f"must be different names of 1 to {_LONGEST_NAME} bytes, in rising order"
        require(good, "clients", rule, self.clients, "SumTerms.fresh(...) sorts them.")
        good = is_integer(self.length) and 1 <= self.length <= LONGEST_VECTOR
        require(good, "length", f"must be a whole number from 1 to {LONGEST_VECTOR}", self.length)
        check_modulus(self.modulus)
        near = self.neighbours
        good = near is None or (is_integer(near) and near >= 2 and near % 2 == 0 and near <= MOST_CLIENTS)
        require(good, "neighbours", "must be an even number ≥ 2, or None for all", near)
        good = near is not None or len(self.clients) <= MOST_LINKED
        require(good, "neighbours", f"must be given for more than {MOST_LINKED} clients", near, "Work grows with its square.")
        holders, most = _holders(len(self.clients), near), len(self.clients)
        good = is_integer(self.threshold) and max(2, holders // 2 + 1) <= self.threshold <= holders
        rule = (
            f"must lie between {max(2, holders // 2 + 1)} and {holders}: more than half of the holders of a secret, at most all"
        )
        require(good, "threshold", rule, self.threshold)
        good = is_integer(self.fewest) and self.threshold <= self.fewest <= most
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
    ) -> SumTerms:
        """New terms. Without `threshold` two thirds of a secret's holders, without `fewest` two thirds of the clients."""
        names = tuple(sorted(clients))
        if threshold is None:
            threshold = max(2, -(-2 * _holders(len(names), neighbours if is_integer(neighbours) else None) // 3))
        if fewest is None:
            fewest = max(threshold, -(-2 * len(names) // 3)) if is_integer(threshold) else threshold
        nonce = os.urandom(_NONCE_BYTES)
        return cls(run, round_index, purpose, names, length, modulus, threshold, fewest, neighbours, nonce)

    def __str__(self) -> str:
        return f"{self.purpose!r} of round {self.round} in run {self.run!r}"

    def encode(self) -> bytes:
        """These terms as bytes."""
        numbers = (self.round, self.length, self.modulus, self.threshold, self.fewest, self.neighbours or 0)
        whole = b"".join(number.to_bytes(8, "little") for number in numbers)
        return messages.pack([self.run.encode(), self.purpose.encode(), whole, self.nonce, messages.pack_names(self.clients)])

    @classmethod
    def decode(cls, data: bytes) -> SumTerms:
        """The terms that `encode` wrote; messages.MalformedMessage for anything else."""
        if len(data) > (MOST_CLIENTS + 4) * (_LONGEST_NAME + 4):
            raise messages.MalformedMessage(f"Terms of {len(data)} bytes are too long.")
        run, purpose, whole, nonce, names = messages.unpack(data, 5)
        if len(whole) != 48:
            raise messages.MalformedMessage("Terms must have six numbers.")
        numbers = [int.from_bytes(whole[place : place + 8], "little") for place in range(0, 48, 8)]
        round_index, length, modulus, threshold, fewest, near = numbers
        clients = messages.unpack_names(names)
        try:
            name, aim = messages.read_name(run), messages.read_name(purpose)
            return cls(name, round_index, aim, clients, length, modulus, threshold, fewest, near or None, nonce)
        except InvalidParameter as error:
            raise messages.MalformedMessage(f"These terms are not allowed: {error}") from None

    def write(self, kind: MessageKind, *parts: bytes) -> bytes:
        """A message of this sum."""
        return messages.write_sum_message(kind, self.tag, parts)

    def read(self, message: bytes, kind: MessageKind, count: int) -> list[bytes]:
        """The parts of a message of this sum and this kind."""
        here = messages.read_kind(message)
        if messages.read_tag(message) != self.tag:
            raise messages.WrongSum(f"A message belongs to another sum than {self}.")
        if here != kind:
            raise messages.OutOfOrder(f"A message of kind {kind.name} was expected, but this is {here.name}.")
        if len(message) > self.largest_message:
            raise messages.MalformedMessage(
                f"A message has {len(message)} bytes; none of this sum has more than {self.largest_message}."
            )
        return messages.read_parts(message, count)

    @property
    def invitation(self) -> bytes:
        """The message that opens the sum."""
        return self.write(MessageKind.INVITATION, self.encode())

    @classmethod
    def of_invitation(cls, message: bytes) -> SumTerms:
        """The terms of an invitation."""
        if messages.read_kind(message) != MessageKind.INVITATION:
            raise messages.OutOfOrder(f"An invitation was expected, but this is {messages.read_kind(message).name}.")
        terms = cls.decode(messages.read_parts(message, 1)[0])
        terms.read(message, MessageKind.INVITATION, 1)  # the tag must be that of the terms
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


def is_connected(graph: Mapping[str, Set[str]], names: Set[str]) -> bool:
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
