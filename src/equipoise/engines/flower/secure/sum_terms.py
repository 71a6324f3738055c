"""What the parties of one masked sum agree on."""

from __future__ import annotations

import hashlib
import os
import struct
from dataclasses import dataclass, field
from functools import cached_property, partial

from equipoise.engines.flower.secure import sum_messages as messages
from equipoise.engines.flower.secure.sum_messages import MessageKind
from equipoise.errors import InvalidParameter, is_integer, require, require_integer
from equipoise.privacy.secure_sum import check_modulus

MOST_CLIENTS = 1_000  # work grows with the square
LONGEST_VECTOR = 1 << 28
_LONGEST_NAME = 200  # bytes
_NONCE_BYTES = 16
SCORES, OF_OWN = "scores ", " of own models"  # how the purposes of evaluations begin and end, around the name of the split


def name_sum(purpose: str, round_index: int) -> str:
    """A sum in words: rounds count from 1, and an evaluation comes after a round.

    >>> name_sum("update", 3), name_sum("scores test", 4)
    ("'update' of round 4", "'scores test' after round 4")
    """
    return f"{purpose!r} after round {round_index}" if SCORES in purpose else f"{purpose!r} of round {round_index + 1}"


@dataclass(frozen=True)
class SumTerms:
    """One masked sum: of which run, round and purpose, over whom, of what, and how many clients may be lost.

    Each client shares its two secrets among all clients, and any `threshold` of them can put one together. `fewest` clients
    must be in the sum, or neither server nor clients go on. 2 · threshold must exceed the number of clients: then even lies
    about who survived cannot bring clients who follow the protocol to give away both secrets of one.

    With `colluders` the sum is signed: clients sign their keys and, before they reveal anything, who survived it on which
    terms; `colluders` of them may help the server, and 2 · threshold must exceed clients + colluders.

    The nonce is drawn: two attempts at one sum are two sums.
    """

    run: str
    round: int
    purpose: str
    clients: tuple[str, ...]  # in rising order
    length: int
    modulus: int
    threshold: int
    fewest: int
    nonce: bytes = field(default_factory=partial(os.urandom, _NONCE_BYTES))
    colluders: int | None = None  # of a signed sum

    def __post_init__(self) -> None:
        for name, text in (("run", self.run), ("purpose", self.purpose)):
            require(_is_name(text), name, f"must be a string of 1 to {_LONGEST_NAME} bytes", text)
        require(is_integer(self.round) and 0 <= self.round < 1 << 62, "round", "must be a whole number ≥ 0", self.round)
        most = len(self.clients)
        good = isinstance(self.clients, tuple) and 2 <= most <= MOST_CLIENTS
        require(good, "clients", f"must be a tuple of 2 to {MOST_CLIENTS} names", self.clients)
        good = all(map(_is_name, self.clients)) and list(self.clients) == sorted(set(self.clients))
        require(good, "clients", f"must be different names of 1 to {_LONGEST_NAME} bytes, in rising order", self.clients)
        good = is_integer(self.length) and 1 <= self.length <= LONGEST_VECTOR
        require(good, "length", f"must be a whole number from 1 to {LONGEST_VECTOR}", self.length)
        check_modulus(self.modulus)
        require_integer("colluders", self.colluders, 0, none="a sum that is not signed")
        least = (most + (self.colluders or 0)) // 2 + 1
        good = is_integer(self.threshold) and least <= self.threshold <= most
        rule = f"must lie between {least} and {most}: more than half of clients and colluders, at most all clients"
        require(good, "threshold", rule, self.threshold)
        good = is_integer(self.fewest) and self.threshold <= self.fewest <= most
        require(good, "fewest", f"must lie between the threshold ({self.threshold}) and {most}", self.fewest)
        good = isinstance(self.nonce, bytes) and len(self.nonce) == _NONCE_BYTES
        require(good, "nonce", f"must be {_NONCE_BYTES} random bytes", self.nonce)

    def __str__(self) -> str:
        return f"{name_sum(self.purpose, self.round)} in run {self.run!r}"

    def encode(self) -> bytes:
        """These terms as bytes."""
        whole = struct.pack("<6Q", self.round, self.length, self.modulus, self.threshold, self.fewest, self._mode)
        return messages.pack([self.run.encode(), self.purpose.encode(), whole, self.nonce, messages.pack_names(self.clients)])

    @classmethod
    def decode(cls, data: bytes) -> SumTerms:
        """The terms that `encode` wrote; messages.MalformedMessage for anything else."""
        if len(data) > (MOST_CLIENTS + 4) * (_LONGEST_NAME + 4):
            raise messages.MalformedMessage(f"Terms of {len(data)} bytes are too long.")
        run, purpose, whole, nonce, names = messages.unpack(data, 5)
        clients = messages.unpack_names(names)
        try:
            round_index, length, modulus, threshold, fewest, mode = struct.unpack("<6Q", whole)
            name, aim, colluders = messages.read_name(run), messages.read_name(purpose), mode - 1 if mode else None
            return cls(name, round_index, aim, clients, length, modulus, threshold, fewest, nonce, colluders)
        except (InvalidParameter, struct.error) as error:
            raise messages.MalformedMessage(f"These terms are not allowed: {error}") from None

    @property
    def _mode(self) -> int:
        """0 for a plain sum, 1 + the colluders of a signed one."""
        return 0 if self.colluders is None else self.colluders + 1

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


def _is_name(text: object) -> bool:
    if not isinstance(text, str):
        return False
    try:
        return 1 <= len(text.encode()) <= _LONGEST_NAME
    except UnicodeEncodeError:
        return False
