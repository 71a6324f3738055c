"""Objects as bytes and buffers, so that arrays are neither copied nor parsed: what crosses the border between two processes.

Tensors become buffers beside the pickle. Those that lie in Ray's object store are used where they lie, by all workers of a
node; those that lie in a file of a data store are sent as the name of the file, and opened where they arrive.
"""

from __future__ import annotations

import copyreg
import io
import os
import pickle
import warnings
from collections import ChainMap
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import Numbers
from equipoise.data.clients import ClientSet, StoredIds
from equipoise.data.store import MappedFile, file_of, map_file, read_manifest
from equipoise.engines.cluster.ray_extra import INLINE_VARIABLE, require_ray
from equipoise.errors import InvalidData

INLINE_BYTES = 1_000_000  # messages up to this size travel with the call, in parts: that takes a third of the time
_RAYS_OWN = 100 * 1024  # bytes of an object that travels with a call, where nothing else is set
_ALIGNED = 64
_LEFT_OUT = ("key_order",)  # cached, and not needed to train


class Packed(NamedTuple):
    """A pickle and the buffers beside it."""

    head: bytes | memoryview
    buffers: list[Any]

    @property
    def size(self) -> int:
        """Bytes in all."""
        return len(self.head) + sum(memoryview(each).nbytes for each in self.buffers)


def pack(value: object) -> Packed:
    """A value as a pickle and buffers that share its tensors' memory. Functions and classes of `__main__` go by value."""
    buffers: list[Any] = []
    out = io.BytesIO()
    _pickler_class()(out, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw())).dump(value)
    return Packed(out.getvalue(), buffers)


def pack_numbers(value: object) -> Packed:
    """`pack` of tensors within plain values and classes of ours, in a third of the time: nothing goes by value."""
    buffers: list[Any] = []
    out = io.BytesIO()
    _NumbersPickler(out, protocol=5, buffer_callback=lambda buffer: buffers.append(buffer.raw())).dump(value)
    return Packed(out.getvalue(), buffers)


def unpack(packed: Packed) -> Any:
    """The value; its tensors share the memory of the buffers, and must not be written to."""
    return pickle.loads(packed.head, buffers=packed.buffers)  # noqa: S301 (our own driver or worker wrote it)


def part_bytes() -> int:
    """How large an argument or a result may be that travels with its call: Ray puts larger ones into its object store.

    A process that knows of another limit than the others loses time, nothing else.
    """
    return int(os.environ.get(INLINE_VARIABLE, _RAYS_OWN)) * 9 // 10


def message(value: object) -> list[Any]:
    """A value as arguments of a call: byte strings that travel with it, or one reference to Ray's object store."""
    return arguments(pack(value))


def arguments(packed: Packed) -> list[Any]:
    """What is packed as arguments of a call."""
    if packed.size > INLINE_BYTES:
        return [require_ray().put(in_store(packed))]
    return cut(joined(packed), -(-packed.size // part_bytes()))


class Letter(NamedTuple):
    """What a worker is told: how many parts its answer has, and the parts of head, models and its own pieces."""

    answer_parts: int
    head: list[Any]
    models: list[Any]
    own: list[Any]

    def arguments(self) -> list[Any]:
        """As few arguments of a call as can be, since Ray takes its time for each: byte strings in turn are joined."""
        parts = [*self.head, *self.models, *self.own]
        lengths = [len(part) if isinstance(part, bytes) else -1 for part in parts]
        counts = [self.answer_parts, len(self.head), len(self.models), len(self.own)]
        table = np.array([*counts, *lengths], dtype=np.int64).tobytes()
        found: list[Any] = []
        together, size, most = [table], len(table), part_bytes()
        for part, length in zip(parts, lengths, strict=True):
            if together and (length < 0 or size + length + _ALIGNED > most):
                found.append(b"".join(together))
                together, size = [], 0
            if length < 0:
                found.append(part)
            elif length:
                gap = -size % _ALIGNED
                together += [b"\0" * gap, part]
                size += gap + length
        return [*found, b"".join(together)] if together else found

    @classmethod
    def read(cls, arguments: tuple[Any, ...]) -> Letter:
        """The letter of the arguments of a call."""
        counts = np.frombuffer(arguments[0], np.int64, 4).tolist()
        lengths = np.frombuffer(arguments[0], np.int64, sum(counts[1:]), 32).tolist()
        parts = _parts(arguments, 32 + 8 * len(lengths), lengths)
        head, models, own = ([next(parts) for _ in range(count)] for count in counts[1:])
        return cls(counts[0], head, models, own)


def _parts(arguments: tuple[Any, ...], place: int, lengths: list[int]) -> Iterator[Any]:
    """The parts of a letter, which begin after a place of the first argument."""
    number = 0
    for length in lengths:
        if not length:
            yield b""
            continue
        place += -place % _ALIGNED
        if place and (length < 0 or place + length > len(arguments[number])):
            number, place = number + 1, 0
        if length < 0:
            yield arguments[number]
            number += 1
        else:
            yield memoryview(arguments[number])[place : place + length]
            place += length


def in_store(packed: Packed) -> tuple[bytes, list[Any]]:
    """What Ray's object store holds of it: buffers as arrays, which Ray places beside its own pickle."""
    return bytes(packed.head), [np.frombuffer(each, np.uint8) for each in packed.buffers]


def answer_parts(packed: Packed, count: int) -> list[Any]:
    """What is packed as `count` results of a call, in small parts if they hold it."""
    whole = joined(packed) if packed.size <= count * (part_bytes() - _ALIGNED) else None
    return [in_store(packed), *[b""] * (count - 1)] if whole is None else cut(whole, count)


def opened(parts: Any) -> Any:
    """The value of a message or an answer, of its parts."""
    if isinstance(parts[0], tuple):
        head, buffers = parts[0]
        return unpack(Packed(head, buffers))
    return unpack(_apart(parts[0] if len(parts) == 1 else b"".join(parts)))


def joined(packed: Packed) -> bytes:
    """One byte string, with each buffer where its numbers are aligned."""
    sizes = [memoryview(each).nbytes for each in packed.buffers]
    table = np.array([len(packed.head), *sizes], dtype=np.int64).tobytes()
    out: list[Any] = [len(sizes).to_bytes(8, "little"), table, packed.head]
    place = 8 + len(table) + len(packed.head)
    for buffer, size in zip(packed.buffers, sizes, strict=True):
        gap = -place % _ALIGNED
        out += [b"\0" * gap, memoryview(buffer).cast("B") if size else b""]
        place += gap + size
    return b"".join(out)


def _apart(whole: bytes | memoryview) -> Packed:
    count = int.from_bytes(whole[:8], "little")
    sizes = np.frombuffer(whole, np.int64, count + 1, 8).tolist()
    place = 8 + 8 * (count + 1) + sizes[0]
    view = memoryview(whole)
    head, buffers = view[place - sizes[0] : place], []
    for size in sizes[1:]:
        place += -place % _ALIGNED
        buffers.append(view[place : place + size])
        place += size
    return Packed(head, buffers)


def cut(whole: bytes, count: int) -> list[bytes]:
    """A byte string in `count` parts of almost equal size."""
    size = -(-len(whole) // max(1, count))
    return [whole[number * size : (number + 1) * size] for number in range(max(1, count))]


@cache
def _pickler_class() -> Any:
    """A pickler of Ray's kind, which also knows functions of `__main__`, with our own treatment of tensors and clients."""
    from ray import cloudpickle

    class Pickler(cloudpickle.CloudPickler):
        def reducer_override(self, value: Any) -> Any:
            kind = type(value)
            if kind is Tensor:
                return _tensor_parts(value)
            if kind is np.ndarray:
                return _array_parts(value)
            if kind is ClientSet:
                return _clients_from, (_fields_of(value),)
            return super().reducer_override(value)  # type: ignore[no-untyped-call]

    return Pickler


def _tensor_parts(value: Tensor) -> Any:
    """How a tensor is sent: as its bytes, or as a view into a file of a data store; any other as torch does."""
    if value.device.type != "cpu" or value.layout is not torch.strided or value.requires_grad:
        return value.__reduce_ex__(pickle.HIGHEST_PROTOCOL)  # type: ignore[no-untyped-call]
    if (where := file_of(value.untyped_storage().data_ptr())) is not None:
        return _tensor_in_file, (where, value.dtype, value.shape, value.stride(), value.storage_offset())
    one_by_one = value.contiguous().as_strided((value.numel(),), (1,))  # of one number any stride is contiguous
    flat: Any = one_by_one.view(torch.uint8).numpy()
    return _tensor_from, (pickle.PickleBuffer(flat), value.dtype, tuple(value.shape))


_REDUCERS: Any = ChainMap({Tensor: _tensor_parts}, copyreg.dispatch_table)


class _NumbersPickler(pickle.Pickler):
    """A pickler that treats tensors as ours, and all else as Python does, without a question for every object."""

    dispatch_table: Any = _REDUCERS


def _array_parts(value: Numbers) -> Any:
    """An array that is the whole of a file of a data store is sent as the name of that file."""
    where = file_of(value.__array_interface__["data"][0]) if value.size else None
    if where is None or where.size != value.nbytes:
        return NotImplemented
    return _array_in_file, (where, value.dtype.str)


def _tensor_from(buffer: Any, dtype: torch.dtype, shape: tuple[int, ...]) -> Tensor:
    if not memoryview(buffer).nbytes:
        return torch.empty(shape, dtype=dtype)
    _say_once()
    return torch.frombuffer(buffer, dtype=dtype).view(shape)


@cache
def _say_once() -> None:
    """Let torch say unheard, as it does once, that some memory cannot be written to. It is Ray's, and nobody writes there."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        torch.frombuffer(b"\0", dtype=torch.uint8)


_opened: dict[MappedFile, Tensor] = {}  # files of data stores that this process has mapped for others


def _file_here(where: MappedFile) -> Tensor:
    """The file of a data store on this machine, (size,) uint8."""
    if where not in _opened:
        path = Path(where.path)
        found = path.stat().st_size if path.exists() else None
        if found is None or found < where.size:
            has = "does not exist" if found is None else f"has {found} bytes, not {where.size},"
            raise InvalidData(
                f"{path} {has} on this node, but the data of the run are a store of the driver. Copy the store to the same "
                "path on every node, or put it on a path that all nodes share."
            )
        _opened[where] = map_file(path, where.size)
    return _opened[where]


def _tensor_in_file(where: MappedFile, dtype: torch.dtype, shape: torch.Size, stride: tuple[int, ...], offset: int) -> Tensor:
    return torch.as_strided(_file_here(where).view(dtype), shape, stride, offset)


def _array_in_file(where: MappedFile, dtype: str) -> Numbers:
    return _file_here(where).numpy().view(dtype)


def _fields_of(clients: ClientSet) -> dict[str, Any]:
    """The fields of a set, with its ids as one text: a million Python strings would be copied for every worker."""
    keys = clients.host_keys
    fields = {name: value for name, value in vars(clients).items() if name not in _LEFT_OUT}
    if not isinstance(clients.ids, StoredIds):
        encoded = [name.encode() for name in clients.ids]
        offsets = np.cumsum([0, *map(len, encoded)], dtype=np.int64)
        fields["ids"] = StoredIds(np.frombuffer(b"".join(encoded), np.uint8), offsets, keys.numpy())
    return fields


def _clients_from(fields: dict[str, Any]) -> ClientSet:
    """A set of clients of these fields; that of a store is refused if the store on this machine is another one."""
    if (store := fields.get("store")) is not None and not any(
        entry["digest"] == store.digest for entry in read_manifest(store.path)["sets"].values()
    ):
        raise InvalidData(f"{store.path} on this node is not the store that the driver has opened. Copy it again.")
    return ClientSet.trusted(**fields)
