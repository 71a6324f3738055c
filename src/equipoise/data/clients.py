"""Federated data: the examples of all clients packed into one tensor, with offsets that say where each client begins."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.rng import name_key, signed
from equipoise.errors import InvalidData, InvalidParameter
from equipoise.types import Attack

_ROWS_PER_CHECK = 65_536


@dataclass(frozen=True, eq=False)
class ClientSet:
    """n clients: client k owns rows offsets[k] … offsets[k+1] − 1 of `x` and `y`. Clients are slices, never copies.

    `scale` says that `x` holds raw numbers (such as uint8 pixels) and that a model sees x · scale + shift; the conversion
    happens when a batch is gathered, so that the data stay small in memory. Without it integers are tokens (int64).
    """

    x: Tensor  # (N, …)
    y: Tensor  # (N, …)
    offsets: Tensor  # (n + 1,) int64
    ids: tuple[str, ...]
    scale: float | None = None
    shift: float = 0.0
    source: str = field(default="", repr=False)  # a file or generator, named in errors

    def __post_init__(self) -> None:
        origin = prefix(self.source)
        for name in ("x", "y", "offsets"):
            object.__setattr__(self, name, torch.as_tensor(getattr(self, name)))  # NumPy arrays are welcome
        if (odd := [i for i in self.ids if not isinstance(i, str)]) or not isinstance(self.ids, tuple):
            raise InvalidData(
                f"{origin}client ids must be a tuple of text, found {odd[0] if odd else self.ids!r}. Use str(id)."
            )
        if len(self.x) != len(self.y):
            raise InvalidData(f"{origin}x has {len(self.x)} rows but y has {len(self.y)}; every example needs both.")
        if len(self.offsets) != len(self.ids) + 1:
            raise InvalidData(f"{origin}{len(self.ids)} ids need {len(self.ids) + 1} offsets, got {len(self.offsets)}.")
        if not self.ids:
            raise InvalidData(f"{origin}there is no client.")
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != len(self.x):
            raise InvalidData(f"{origin}offsets must run from 0 to {len(self.x)} (the number of rows).")
        if (empty := torch.nonzero(self.offsets.diff() <= 0).flatten()).numel():
            names = ", ".join(self.ids[i] for i in empty[:5])
            raise InvalidData(
                f"{origin}{empty.numel()} of {len(self.ids)} clients have no example: {names}. Drop them, or give them data."
            )
        if len(set(self.ids)) != len(self.ids):
            twice = sorted({i for i in self.ids if self.ids.count(i) > 1} if len(self.ids) < 5000 else [])
            raise InvalidData(f"{origin}client ids must differ; repeated: {', '.join(twice[:5]) or 'some'}.")
        for name, values in (("x", self.x), ("y", self.y)):
            self._refuse_non_finite(name, values)

    def _refuse_non_finite(self, name: str, values: Tensor) -> None:
        if not values.is_floating_point():
            return
        for start in range(0, len(values), _ROWS_PER_CHECK):
            rows = values[start : start + _ROWS_PER_CHECK]
            bad = ~torch.isfinite(rows.flatten(1) if rows.dim() > 1 else rows[:, None]).all(1)
            if bad.any():
                row = start + int(bad.nonzero()[0])
                client = int(torch.searchsorted(self.offsets, row, right=True)) - 1
                origin = prefix(self.source)
                raise InvalidData(
                    f"{origin}client {self.ids[client]!r}, row {row - int(self.offsets[client])} (row {row} of {name}) holds "
                    f"NaN or infinity. Repair or drop that example."
                )

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"ClientSet({len(self)} clients, {len(self.x)} examples of shape {tuple(self.x.shape[1:])})"

    @classmethod
    def pack(
        cls, clients: Iterable[tuple[str, Tensor, Tensor]], *, scale: float | None = None, shift: float = 0.0, source: str = ""
    ) -> ClientSet:
        """Pack (id, x, y) triples, one per client."""
        origin = prefix(source)
        triples = [(name, torch.as_tensor(x), torch.as_tensor(y)) for name, x, y in clients]
        if not triples:
            raise InvalidData(f"{origin}there is no client.")
        first = triples[0]
        for name, x, y in triples:
            if x.dim() == 0 or y.dim() == 0:
                raise InvalidData(f"{origin}client {name!r} must have arrays with one row per example, not single numbers.")
            if x.shape[1:] != first[1].shape[1:] or y.shape[1:] != first[2].shape[1:]:
                raise InvalidData(
                    f"{origin}client {name!r} has inputs and targets of shapes {tuple(x.shape[1:])} and {tuple(y.shape[1:])} "
                    f"per example, but client {first[0]!r} has {tuple(first[1].shape[1:])} and {tuple(first[2].shape[1:])}."
                )
        sizes = torch.tensor([len(x) for _, x, _ in triples])
        for name, x, y in triples:
            if len(x) != len(y):
                raise InvalidData(f"{origin}client {name!r} has {len(x)} inputs but {len(y)} targets.")
        ids, inputs, targets = zip(*triples, strict=True)
        return cls(torch.cat(inputs), torch.cat(targets), offsets_of(sizes), ids, scale, shift, source)

    @cached_property
    def sizes(self) -> Tensor:
        """Examples per client, (n,) int64."""
        return self.offsets.diff()

    @cached_property
    def host_sizes(self) -> Tensor:
        """Examples per client, (n,) int64, on the CPU wherever the data are."""
        return self.sizes.cpu()

    @cached_property
    def id_array(self) -> np.ndarray[Any, np.dtype[Any]]:
        """The ids as an array (n,) of objects, which is quickly indexed by the positions of a cohort."""
        array = np.empty(len(self.ids), dtype=object)
        array[:] = self.ids
        return array

    @cached_property
    def keys(self) -> Tensor:
        """The key of each client's random stream, (n,) int64: a function of its id, whatever the order of clients."""
        return self.host_keys.to(self.offsets.device)

    @cached_property
    def host_keys(self) -> Tensor:
        """The key of each client's random stream, (n,) int64, on the CPU."""
        return torch.tensor([signed(name_key(i)) for i in self.ids])

    def rows(self, client: int) -> slice:
        """The rows of one client."""
        return slice(int(self.offsets[client]), int(self.offsets[client + 1]))

    def inputs(self, rows: Tensor | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """The rows of `x` as a model sees them: scaled if raw, floating numbers in `dtype`, tokens as int64."""
        x = _gather(self.x, rows)
        if self.scale is None:
            return _copied(x, rows, dtype if x.is_floating_point() else torch.int64)
        x = _copied(x, rows, dtype).mul_(self.scale)
        return x.add_(self.shift) if self.shift else x

    def targets(self, rows: Tensor | slice, dtype: torch.dtype = torch.float32) -> Tensor:
        """The rows of `y`: classes as int64, numbers in `dtype`."""
        y = _gather(self.y, rows)
        return _copied(y, rows, dtype if y.is_floating_point() else torch.int64)

    def client(self, which: int | str) -> tuple[Tensor, Tensor]:
        """(x, y) of one client, by position or id, as a model sees them."""
        if isinstance(which, str) and which not in self.ids:
            raise InvalidParameter(
                "which", f"must be one of the {len(self)} client ids", which, f"The first is {self.ids[0]!r}."
            )
        position = self.ids.index(which) if isinstance(which, str) else which
        return self.inputs(self.rows(position)), self.targets(self.rows(position))

    def take(self, positions: Sequence[int] | Tensor) -> ClientSet:
        """The clients at some positions, or of a boolean mask; their rows are copied."""
        if isinstance(positions, Tensor) and positions.dtype == torch.bool:
            positions = positions.nonzero().flatten()
        chosen = [int(p) for p in positions]
        if not chosen or min(chosen) < 0 or max(chosen) >= len(self):
            raise InvalidParameter("positions", f"must name at least one client, each from 0 to {len(self) - 1}", chosen)
        rows = torch.cat([torch.arange(int(self.offsets[p]), int(self.offsets[p + 1])) for p in chosen])
        return self.with_rows(rows, self.sizes[chosen], tuple(self.ids[p] for p in chosen))

    def with_rows(self, rows: Tensor, sizes: Tensor, ids: tuple[str, ...]) -> ClientSet:
        """Clients of these sizes and ids, who own some rows of this set, one after the other."""
        return replace(self, x=self.x[rows], y=self.y[rows], offsets=offsets_of(sizes), ids=ids)

    def to(self, device: torch.device) -> ClientSet:
        """The set with its tensors on a device; the same object if they are there already."""
        if self.x.device == device:
            return self
        moved = object.__new__(ClientSet)  # without the checks, which `self` has passed
        for name, value in vars(self).items():
            stays = name in ("host_sizes", "host_keys") or not isinstance(value, Tensor)
            object.__setattr__(moved, name, value if stays else value.to(device))
        return moved


def large_enough(sizes: Sequence[int], min_examples: int, source: object, noun: str = "client") -> list[int]:
    """The positions of the sizes that are at least `min_examples`; `source` and `noun` are for the error if there is none."""
    kept = [k for k, size in enumerate(sizes) if size >= min_examples]
    if not kept:
        fix = f"The largest {noun} in {source} has {max(sizes, default=0)}."
        raise InvalidParameter("min_examples", f"leaves no {noun}", min_examples, fix)
    return kept


def prefix(source: str) -> str:
    """The beginning of an error about data from a file or generator; empty without a name."""
    return f"{source}: " if source else ""


def offsets_of(sizes: Tensor) -> Tensor:
    """The first row of each of n clients that own `sizes` (n,) rows one after the other, and the number of rows: (n + 1,)."""
    return torch.cat([torch.zeros(1, dtype=torch.int64), sizes.cumsum(0)])


def _gather(values: Tensor, rows: Tensor | slice) -> Tensor:
    """values[rows] for rows of any shape, by `index_select`, which is many times faster than indexing."""
    if isinstance(rows, slice):
        return values[rows]
    return values.index_select(0, rows.flatten()).view(*rows.shape, *values.shape[1:])


def _copied(values: Tensor, rows: Tensor | slice, dtype: torch.dtype) -> Tensor:
    """The values in `dtype` and in memory of their own, because a model may work in place on its inputs."""
    return values.to(dtype, copy=isinstance(rows, slice))  # indexing by a tensor has copied already


def _hash_of(*values: object) -> str:
    """A short hash of tensors and texts, the same on every machine."""
    digest = hashlib.blake2b(digest_size=8)
    for value in values:
        if isinstance(value, Tensor):
            digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
            digest.update(value.detach().cpu().contiguous().flatten().view(torch.uint8).numpy().data)
        else:
            digest.update(repr(value).encode())
    return digest.hexdigest()


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Clients to train on, and clients to validate and test on.

    There are two kinds of split: *by client* (`test` holds other clients, unseen in training) and *inside clients* (`test`
    holds further examples of the training clients). The column `seen` of a result says which.
    """

    train: ClientSet
    validation: ClientSet | None = None
    test: ClientSet | None = None
    name: str = "data"
    classes: int = 0  # 0: read from the targets
    malicious: frozenset[str] = frozenset()  # ids of training clients under `attack` (equipoise.attacks.apply)
    attack: Attack | None = None

    def __post_init__(self) -> None:
        for split, clients in self.splits.items():
            if not isinstance(clients, ClientSet):
                raise InvalidParameter(
                    split, "must be a ClientSet", type(clients).__name__,
                    "Make the data by data.from_arrays(x, y, client) or data.from_dict({id: (x, y)}).",
                )  # fmt: skip
            if clients.x.shape[1:] != self.train.x.shape[1:]:
                raise InvalidData(
                    f"{self.name}: examples of {split} have shape {tuple(clients.x.shape[1:])}, those of train "
                    f"{tuple(self.train.x.shape[1:])}."
                )
            if clients.y.is_floating_point() != self.train.y.is_floating_point():
                raise InvalidData(
                    f"{self.name}: targets of {split} are {clients.y.dtype}, those of train {self.train.y.dtype}."
                )
        if self.train.y.is_floating_point() or self.train.y.dim() > 2:
            return
        largest = max(int(c.y.max()) for c in self.splits.values())
        smallest = min(int(c.y.min()) for c in self.splits.values())
        if smallest < 0 or (self.classes and largest >= self.classes):
            raise InvalidData(
                f"{self.name}: classes must be 0 … {self.classes - 1 if self.classes else 'C − 1'}, "
                f"found {smallest} … {largest}."
            )
        if not self.classes:
            object.__setattr__(self, "classes", largest + 1)

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of all splits and examples: equal data have equal fingerprints."""
        sets = [(name, c.ids, c.offsets, c.x, c.y, c.scale, c.shift) for name, c in self.splits.items()]
        # The repr of a plain object holds its address in memory.
        attacked = (sorted(self.malicious), re.sub(r" at 0x[0-9a-f]+", "", repr(self.attack))) if self.malicious else ()
        return _hash_of(*(value for values in sets for value in values), *attacked)

    @property
    def splits(self) -> dict[str, ClientSet]:
        """The splits that are not None, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: clients for name, clients in named.items() if clients is not None}

    @property
    def features(self) -> int:
        """The number of input features of one example."""
        return self.train.x.shape[1:].numel()

    def __repr__(self) -> str:
        splits = ", ".join(f"{name}: {len(c)} clients / {len(c.x)} examples" for name, c in self.splits.items())
        return f"FederatedData({self.name!r}, {splits})"
