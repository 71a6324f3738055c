"""What travels between server and nodes: plain values as JSON and tensors as raw bytes, inside Flower's records.

Nothing is pickled. Whoever reads a message says what it must hold: a tensor is made only of bytes whose number, type and shape
were asked for, and text beyond a bound is refused before it is parsed. Every request carries a token that its reply repeats, so
that an answer to another question (of an earlier round, say) is known for what it is.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, cast

import numpy as np
import torch
from flwr.app import Array, ArrayRecord, ConfigRecord, RecordDict
from torch import Tensor

from equipoise.core.words import printable
from equipoise.errors import EquipoiseError, is_integer, shown

PROTOCOL = 1
LARGEST_TEXT = 16 * 2**20  # of JSON in one message, in bytes
LARGEST_REASON = 300  # characters of a reason that a node gives
LARGEST_COMPACT = 65_536  # bytes of tensors that travel inside the call; larger ones are sent once for all nodes by Flower
MOST_TENSORS = 10_000  # inside a call
RAW = "equipoise.raw"  # how Flower's arrays say that they hold little-endian bytes and nothing else

# Numbers travel as the little-endian integers of the same bits: NumPy has no bfloat16, and all machines understand these.
_INTEGERS = {1: torch.int8, 2: torch.int16, 4: torch.int32, 8: torch.int64}
_SENT = (torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.uint8)
_NAMES = {dtype: str(dtype).removeprefix("torch.") for dtype in _SENT}
FLOATS = {name: dtype for dtype, name in _NAMES.items() if dtype.is_floating_point}


class BadMessage(EquipoiseError):
    """A message that cannot be used; the text says why. It is part of other messages, so that it has no code of its own.

    `cause` is a key of left_out.WORDS where the node that sent the message is to be told, in its own log, why it is left out.
    """

    code = ""

    def __init__(self, text: str, cause: str = "") -> None:
        super().__init__(text)
        self.cause = cause


@dataclass(frozen=True, eq=False)
class MessageContent:
    """What one message says: the round it is about, the token of the request, plain values, and tensors still in bytes."""

    round: int
    token: str
    values: dict[str, Any] = field(default_factory=dict)
    arrays: dict[str, Array] = field(default_factory=dict)  # not yet looked into
    data: str = ""  # the mark of the data that an answer was made with; nodes of version 0.1 say none
    size: int = 0  # bytes, as `count_bytes` counts them
    compact: bool = False  # whether it came as one record, so that the answer may, too

    def tensor(self, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
        """A tensor that must have this type and shape."""
        array = self.arrays.get(name)
        if array is None:
            raise BadMessage(f"it holds no {name!r}")
        return array_to_tensor(array, name, dtype, shape)

    def raw_bytes(self, name: str, largest: int) -> bytes:
        """Bytes that another protocol reads; no more than `largest` of them."""
        array = self.arrays.get(name)
        if array is None or array.stype != RAW or array.dtype != "uint8":
            raise BadMessage(f"it holds no bytes {name!r}")
        if not len(array.data) <= largest:
            raise BadMessage(f"its {name!r} has {len(array.data)} bytes, and {largest} is the most")
        return array.data

    def value(self, name: str, kind: type | tuple[type, ...]) -> Any:
        """A plain value of this type; a bool is no number here."""
        value = self.values.get(name)
        if not isinstance(value, kind) or (isinstance(value, bool) and kind is not bool):
            raise BadMessage(f"its {name!r} is {shown(value)}")
        return value


def tensor_to_array(tensor: Tensor) -> Array:
    """A tensor as one of Flower's arrays, in raw bytes."""
    if tensor.dtype not in _NAMES:
        raise BadMessage(f"tensors of {tensor.dtype} are not sent")
    numbers = tensor.detach().cpu().contiguous().view(_INTEGERS[tensor.itemsize]).numpy()
    data = numbers.astype(f"<i{tensor.itemsize}", copy=False).tobytes()
    return Array(_NAMES[tensor.dtype], tuple(tensor.shape), RAW, data)


def array_to_tensor(array: Array, name: str, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    """The tensor in one of Flower's arrays; it must have this type and shape, and as many bytes as they need."""
    if array.stype != RAW or array.dtype != _NAMES.get(dtype):
        raise BadMessage(f"its {name!r} is {shown(array.dtype)} ({shown(array.stype)}), not {_NAMES.get(dtype)}")
    if tuple(array.shape) != tuple(shape):
        raise BadMessage(f"its {name!r} has shape {shown(tuple(array.shape))}, not {tuple(shape)}")
    needed = torch.Size(shape).numel() * dtype.itemsize
    if len(array.data) != needed:
        raise BadMessage(f"its {name!r} has {len(array.data)} bytes, not {needed}")
    numbers = np.frombuffer(array.data, dtype=f"<i{dtype.itemsize}")
    return torch.from_numpy(numbers.astype(numbers.dtype.newbyteorder("="), copy=True)).view(dtype).reshape(shape)


def write_message(
    round_index: int, token: str, values: Mapping[str, Any], tensors: Mapping[str, Tensor], data: str = ""
) -> RecordDict:
    """The content of a message as Flower's records; `data` marks the data that an answer was made with."""
    text = json.dumps(dict(values), allow_nan=False, separators=(",", ":"))
    call = ConfigRecord({"protocol": PROTOCOL, "round": round_index, "token": token, "values": text})
    if data:
        call["data"] = data
    arrays = ArrayRecord({name: tensor_to_array(tensor) for name, tensor in tensors.items()})
    return RecordDict({"call": call, "tensors": arrays})


def compacted(records: RecordDict) -> RecordDict:
    """A message with its tensors inside the call, if they are small.

    Flower moves each record and each tensor of a message by requests of their own, twice: this way there are three where there
    were six or eight. Large tensors stay as they are: what all nodes get travels to the SuperLink once then.
    """
    call, arrays = records["call"], cast(ArrayRecord, records["tensors"])
    if sum(len(array.data) for array in arrays.values()) > LARGEST_COMPACT:
        return records
    table = [[name, array.dtype, list(array.shape), array.stype, len(array.data)] for name, array in arrays.items()]
    text, data = json.dumps(table, separators=(",", ":")), b"".join(array.data for array in arrays.values())
    return RecordDict({"call": ConfigRecord({**cast(ConfigRecord, call), "arrays": text, "bytes": data})})


def expanded(records: RecordDict) -> RecordDict:
    """A message with its tensors beside the call, whichever way it came."""
    call = records.get("call")
    if "tensors" in records or not isinstance(call, ConfigRecord) or "arrays" not in call:
        return records
    text, data = call["arrays"], call.get("bytes")
    if not isinstance(text, str) or not isinstance(data, bytes) or len(text) > LARGEST_TEXT:
        raise BadMessage("its tensors are not inside its call")
    try:
        table, arrays, at = json.loads(text), {}, 0
        if not isinstance(table, list) or len(table) > MOST_TENSORS:
            raise ValueError
        for name, dtype, shape, stype, length in table:
            good = all(isinstance(each, str) for each in (name, dtype, stype)) and is_integer(length) and length >= 0
            if not good or at + length > len(data) or not all(is_integer(n) and n >= 0 for n in shape):
                raise ValueError
            arrays[name] = Array(dtype, tuple(shape), stype, data[at : at + length])
            at += length
    except (ValueError, TypeError, RecursionError) as failure:
        raise BadMessage("the table of its tensors makes no sense") from failure
    plain = {key: value for key, value in call.items() if key not in ("arrays", "bytes")}
    return RecordDict({"call": ConfigRecord(plain), "tensors": ArrayRecord(arrays)})


def read_message(records: RecordDict) -> MessageContent:
    """What a message says; its tensors are looked into when they are asked for."""
    compact, records = "tensors" not in records, expanded(records)
    call, arrays = records.get("call"), records.get("tensors")
    if not isinstance(call, ConfigRecord) or not isinstance(arrays, ArrayRecord):
        raise BadMessage("it is no message of Equipoise")
    if call.get("protocol") != PROTOCOL:
        cure = "install a newer Equipoise where the number is lower"
        raise BadMessage(f"it speaks protocol {shown(call.get('protocol'))}, and this is {PROTOCOL}: {cure}")
    round_index, token, text = call.get("round"), call.get("token"), call.get("values")
    if type(round_index) is not int or not isinstance(token, str) or not isinstance(text, str):
        raise BadMessage("it lacks a round, a token or its values")
    if len(text) > LARGEST_TEXT:
        raise BadMessage(f"its values are {len(text)} characters long, and {LARGEST_TEXT} is the most")
    try:
        values = json.loads(text, parse_constant=_no_constant)
    except (ValueError, RecursionError) as failure:
        raise BadMessage("its values are not JSON") from failure
    if not isinstance(values, dict):
        raise BadMessage("its values are not a table")
    given = call.get("data", "")
    mark, size = given if isinstance(given, str) else "?", count_bytes(records)
    return MessageContent(round_index, token, values, dict(arrays.items()), mark, size, compact)


def count_bytes(records: RecordDict) -> int:
    """Bytes of a message: what its records hold, without what Flower and TLS wrap around them."""
    return sum(len(name.encode()) + _size(value) for record in records.values() for name, value in record.items())


def shorten(reason: object) -> str:
    """A reason as one line of bounded length: it comes from elsewhere and goes to logs and reports."""
    text = " ".join(printable(reason).split())
    return text if len(text) <= LARGEST_REASON else text[: LARGEST_REASON - 1] + "…"


def _size(value: Any) -> int:
    if isinstance(value, str):
        return len(value.encode())
    if isinstance(value, bytes):
        return len(value)
    if isinstance(value, list):
        return sum(map(_size, value))
    return len(value.data) if isinstance(value, Array) else 8  # of a number


def _no_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def bytes_to_tensor(data: bytes) -> Tensor:
    """Bytes as a tensor, to be sent."""
    return torch.from_numpy(np.frombuffer(data, dtype=np.uint8).copy())
