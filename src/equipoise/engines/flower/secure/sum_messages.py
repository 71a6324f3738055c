"""The messages of a masked sum, as bytes, and every way in which a sum can fail."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from itertools import pairwise

from equipoise.errors import EquipoiseError

_MARK = b"EQM1"
_TAG_BYTES = 16
HEAD_BYTES = len(_MARK) + 1 + _TAG_BYTES  # mark, kind, tag

# ---------------------------------------------------------------------------------------------------------------------- errors


class MaskingError(EquipoiseError, RuntimeError):
    """A masked sum that cannot go on, or a message of it that is refused. `clients` names those concerned, where known."""

    def __init__(self, reason: str, clients: Iterable[str] = ()) -> None:
        self.clients = tuple(clients)
        super().__init__(reason)


class RefusedMessage(MaskingError):
    """A message that is refused. On the server its sender is left out; on a client the sum ends for that client."""


class MalformedMessage(RefusedMessage):
    """Bytes that are not such a message: garbage, a wrong length, a name twice, a key that is none."""


class WrongSum(RefusedMessage):
    """A message of another run, round, purpose or attempt."""


class UnknownSender(RefusedMessage):
    """A sender that has no part in this step of the sum, or speaks in another's name."""


class DuplicateMessage(RefusedMessage):
    """A second answer to the same request."""


class OutOfOrder(RefusedMessage):
    """A message of another step: too early, too late, or asked for again."""


class UnreadableShares(RefusedMessage):
    """Sealed shares that do not open."""


class WrongShare(RefusedMessage):
    """A share that does not lie on the polynomial that the others agree on."""


class NotSigned(RefusedMessage):
    """A key, or a list of survivors, that lacks the signature of a client whose key is known."""


class NoReply(MaskingError):
    """A client that did not answer in time."""


class SumTooSmall(MaskingError):
    """Fewer clients are left than the sum needs. `step`, `have` and `need` say where and how many."""

    def __init__(self, step: str, have: int, need: int, clients: Iterable[str] = ()) -> None:
        self.step, self.have, self.need = step, have, need
        left = f"{have} client is" if have == 1 else f"{have} clients are"
        super().__init__(f"{step}: {left} left, but {need} are needed. Nothing was summed.", clients)


class LostSecret(MaskingError):
    """Masks that cannot be removed: `clients` dealt shares that do not open or do not fit. Try again without them."""


class RefusedTerms(MaskingError):
    """A client does not take part on these terms."""


class RefusedToReveal(MaskingError):
    """A client keeps its shares: what it was asked for would say more than the sum."""


# -------------------------------------------------------------------------------------------------------------------- messages


class MessageKind(IntEnum):
    """The messages of a sum: odd ones go from the server to clients, even ones are the clients' answers."""

    INVITATION = 1
    KEYS = 2
    ROSTER = 3
    SHARES = 4
    INBOX = 5
    MASKED = 6
    SURVIVORS = 7
    REVEALED = 8
    CONFIRM = 9  # of a signed sum, between MASKED and SURVIVORS
    SIGNED = 10


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
    """Names as byte strings, each after its length."""
    return pack(name.encode() for name in names)


def read_name(data: bytes) -> str:
    """A name in UTF-8."""
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


def write_sum_message(kind: MessageKind, tag: bytes, parts: Iterable[bytes]) -> bytes:
    """A message: mark, kind, the sum's tag, and its parts."""
    return _MARK + bytes([kind]) + tag + pack(parts)


def read_kind(message: bytes) -> MessageKind:
    """Which message this is."""
    if not isinstance(message, bytes) or len(message) < HEAD_BYTES or message[: len(_MARK)] != _MARK:
        raise MalformedMessage("These bytes are not a message of a masked sum.")
    try:
        return MessageKind(message[len(_MARK)])
    except ValueError:
        raise MalformedMessage(f"There is no message of kind {message[len(_MARK)]}.") from None


def read_tag(message: bytes) -> bytes:
    """The tag of the sum that a message belongs to."""
    return message[HEAD_BYTES - _TAG_BYTES : HEAD_BYTES]


def read_parts(message: bytes, count: int) -> list[bytes]:
    """The parts of a message; MalformedMessage unless there are `count` of them."""
    return unpack(message[HEAD_BYTES:], count)
