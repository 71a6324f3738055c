"""Objects as bytes and buffers, so that arrays are neither copied nor parsed: what crosses the border between two processes.

Tensors become buffers beside the pickle. Those that lie in Ray's object store are used where they lie, by all workers of a
node; those that lie in a file of a data store are sent as the name of the file, and opened where they arrive.
"""

from __future__ import annotations

import io
import os
import pickle
import warnings
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import Numbers
from equipoise.data.clients import ClientSet
from equipoise.data.mapped_files import MappedFile, file_of, map_file
from equipoise.data.store_files import read_manifest
from equipoise.data.store_state import StoredIds
from equipoise.engines.cluster.ray_extra import INLINE_VARIABLE, require_ray
from equipoise.errors import InvalidData

INLINE_BYTES = 1_000_000  # messages up to this size travel with the call, in parts: that takes a third of the time
_RAYS_OWN = 100 * 1024  # bytes of an object that travels with a call, where nothing else is set
_ALIGNED = 64
_LEFT_OUT = ("key_order",)  # cached, and not needed to train


class Packed(NamedTuple):
    """A pickle and the buffers beside it."""

    head: bytes
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


def in_store(packed: Packed) -> tuple[bytes, list[Any]]:
    """What Ray's object store holds of it: buffers as arrays, which Ray places beside its own pickle."""
    return packed.head, [np.frombuffer(each, np.uint8) for each in packed.buffers]


def answer_parts(value: object, count: int) -> list[Any]:
    """A value as `count` results of a call, in small parts if they hold it."""
    packed = pack(value)
    whole = joined(packed) if packed.size <= count * (part_bytes() - _ALIGNED) else None
    return [in_store(packed), *[b""] * (count - 1)] if whole is None else cut(whole, count)


def opened(parts: Any) -> Any:
    """The value of a message or an answer, of its parts."""
    if isinstance(parts[0], tuple):
        head, buffers = parts[0]
        return unpack(Packed(head, buffers))
    return unpack(_apart(b"".join(parts)))


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


def _apart(whole: bytes) -> Packed:
    count = int.from_bytes(whole[:8], "little")
    sizes = np.frombuffer(whole, np.int64, count + 1, 8).tolist()
    place = 8 + 8 * (count + 1) + sizes[0]
    head, buffers = whole[place - sizes[0] : place], []
    for size in sizes[1:]:
        place += -place % _ALIGNED
        buffers.append(memoryview(whole)[place : place + size])
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
    """How a tensor is sent: as its bytes, or as a view into a file of a data store."""
    if value.device.type != "cpu" or value.layout is not torch.strided or value.requires_grad:
        return NotImplemented
    storage = value.untyped_storage()
    if (where := file_of(storage.data_ptr())) is not None:
        return _tensor_in_file, (where, value.dtype, value.shape, value.stride(), value.storage_offset())
    flat: Any = value.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
    return _tensor_from, (pickle.PickleBuffer(flat), value.dtype, value.shape)


def _array_parts(value: Numbers) -> Any:
    """An array that is the whole of a file of a data store is sent as the name of that file."""
    where = file_of(value.__array_interface__["data"][0]) if value.size else None
    if where is None or where.size != value.nbytes:
        return NotImplemented
    return _array_in_file, (where, value.dtype.str)


def _tensor_from(buffer: Any, dtype: torch.dtype, shape: torch.Size) -> Tensor:
    if not memoryview(buffer).nbytes:
        return torch.empty(shape, dtype=dtype)
    with warnings.catch_warnings():  # the memory may be that of Ray's object store: nobody writes there
        warnings.simplefilter("ignore")
        return torch.frombuffer(buffer, dtype=torch.uint8).view(dtype).view(shape)


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
