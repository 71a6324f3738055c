"""A set of clients: the examples of all of them packed one after the other, with offsets that say where each client begins."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.core.rng import name_keys
from equipoise.core.trees import leaves, map_tree, named_leaves
from equipoise.data.clients import leaves as leaf_of
from equipoise.data.clients.leaves import LabelRange, find_label_range, offsets_of, rows_in_turn, shown_shape
from equipoise.data.clients.ragged import MULTIPLE, Ragged, Visited
from equipoise.data.clients.store_state import StoredIds, StoreState
from equipoise.errors import InvalidData, InvalidParameter, is_integer, require


@dataclass(frozen=True, eq=False)
class ClientSet:
    """n clients: client k owns rows offsets[k] … offsets[k+1] − 1 of `x` and `y`. Clients are slices, never copies.

    `x` and `y` are a tensor, a tuple of tensors, or a dict of tensors and `Ragged` sequences, each with one row per example; a
    model is called as model(x), model(*x) or model(**x). `scale` says that `x` holds raw numbers (such as uint8 pixels) and
    that a model sees x · scale + shift; the conversion happens when a batch is gathered, so that the data stay small in
    memory. Without it integers are tokens (int64). Of a tuple or dict, `scale` and `shift` are a tuple or dict, too.

    >>> import torch
    >>> clients = ClientSet(torch.zeros(4, 2), torch.tensor([0, 1, 0, 1]), torch.tensor([0, 3, 4]), ["a", "b"])
    >>> clients, clients.sizes
    (ClientSet(2 clients, 4 examples of shape (2,)), tensor([3, 1]))
    """

    x: Any  # (N, …), or a tuple or dict of leaves
    y: Any
    offsets: Tensor  # (n + 1,) int64
    ids: Sequence[str]
    scale: Any = None
    shift: Any = 0.0
    source: str = field(default="", repr=False)  # a file or generator, named in errors

    def __post_init__(self) -> None:
        for name in ("x", "y"):
            object.__setattr__(self, name, map_tree(leaf_of.as_leaf, getattr(self, name)))
        object.__setattr__(self, "offsets", torch.as_tensor(self.offsets))
        if isinstance(self.ids, list):
            object.__setattr__(self, "ids", tuple(self.ids))
        for name, default in (("scale", None), ("shift", 0.0)):
            object.__setattr__(self, name, leaf_of.per_leaf(name, getattr(self, name), self.x, default))
        self.check_leaves()
        self._check_clients()
        self.refuse_non_finite(lambda row, name: f"{self.place(row)} (row {row} of {name})")

    @classmethod
    def trusted(cls, **given: Any) -> ClientSet:
        """A set made of fields, and of cached properties by their names, without any check."""
        made = object.__new__(cls)
        defaults = {each.name: each.default for each in fields(cls) if each.name in ("scale", "shift", "source")}
        for name, value in (defaults | given).items():
            object.__setattr__(made, name, value)
        return made

    def check_leaves(self) -> None:
        """Refuse leaves with different numbers of rows, and masks without a name of their own."""
        origin, inputs = prefix(self.source), named_leaves("x", self.x)
        if not inputs:
            raise InvalidData(f"{origin}x has no leaf; give at least one tensor.")
        counts = {name: len(leaf) for name, leaf in (inputs | named_leaves("y", self.y)).items()}
        rows = counts[next(iter(inputs))]
        for name, count in counts.items():
            if count != rows:
                first = next(iter(inputs))
                raise InvalidData(f"{origin}{first} has {rows} rows but {name} has {count}; every example needs both.")
        if odd := [key for key in self.x if not str(key).isidentifier()] if isinstance(self.x, dict) else []:
            raise InvalidData(
                f"{origin}x has the key {odd[0]!r}, but a model is called as model(**x), and that is no name of an argument. "
                "Rename it."
            )
        masks = [leaf.mask for leaf in inputs.values() if isinstance(leaf, Ragged)]
        if masks and not isinstance(self.x, dict):
            raise InvalidData(
                f"{origin}sequences of different lengths must be a leaf of a dict, so that their mask has a name: "
                'x={"input_ids": Ragged(…)}.'
            )
        named = [mask for mask in masks if mask is not None]
        if twice := [mask for mask in named if mask in self.x or named.count(mask) > 1]:
            raise InvalidData(
                f"{origin}two inputs would be called {twice[0]!r}. Give one of the Ragged leaves another mask=…, or mask=None."
            )

    def _check_clients(self) -> None:
        origin, rows = prefix(self.source), len(leaves(self.x)[0])
        if not isinstance(self.ids, tuple):
            raise InvalidData(f"{origin}client ids must be a list or tuple of text, found {type(self.ids).__name__}.")
        if odd := [i for i in self.ids if not isinstance(i, str)]:
            raise InvalidData(f"{origin}client ids must be text, found {odd[0]!r:.60}. Use str(id), or drop rows without one.")
        if len(self.offsets) != len(self.ids) + 1:
            raise InvalidData(f"{origin}{len(self.ids)} ids need {len(self.ids) + 1} offsets, got {len(self.offsets)}.")
        if not self.ids:
            raise InvalidData(f"{origin}there is no client.")
        if int(self.offsets[0]) != 0 or int(self.offsets[-1]) != rows:
            raise InvalidData(f"{origin}offsets must run from 0 to {rows} (the number of rows).")
        if (empty := torch.nonzero(self.offsets.diff() <= 0).flatten()).numel():
            names = ", ".join(self.ids[i] for i in empty[:5])
            raise InvalidData(
                f"{origin}{empty.numel()} of {len(self.ids)} clients have no example: {names}. Drop them, or give them data."
            )
        if len(set(self.ids)) != len(self.ids):
            twice = sorted({a for a, b in pairwise(sorted(self.ids)) if a == b})
            raise InvalidData(f"{origin}client ids must differ; repeated: {', '.join(twice[:5])}.")

    def refuse_non_finite(self, place: Callable[[int, str], str]) -> None:
        """Refuse NaN and infinity; `place` says in words where a row of a leaf is."""
        for name, values in (named_leaves("x", self.x) | named_leaves("y", self.y)).items():
            if (row := leaf_of.first_bad_row(values)) is not None:
                where = f"{prefix(self.source)}{place(row, name)}"
                raise InvalidData(f"{where} holds NaN or infinity. Repair or drop that example.")

    def place(self, row: int) -> str:
        """A row in words: whose it is, and its number among the rows of that client."""
        client = int(torch.searchsorted(self.offsets, row, right=True)) - 1
        return f"client {self.ids[client]!r}, row {row - int(self.offsets[client])}"

    def __len__(self) -> int:
        return len(self.ids)

    def __repr__(self) -> str:
        return f"ClientSet({len(self)} clients, {self.examples} examples of shape {shown_shape(self.x)})"

    @classmethod
    def pack(
        cls, clients: Iterable[tuple[str, Any, Any]], *, scale: Any = None, shift: Any = 0.0, source: str = ""
    ) -> ClientSet:
        """Pack (id, x, y) triples, one per client."""
        origin, triples = prefix(source), list(clients)
        if not triples:
            raise InvalidData(f"{origin}there is no client.")
        names, inputs, targets = zip(*triples, strict=True)
        x_columns, y_columns = leaf_of.columns(inputs), leaf_of.columns(targets)
        if x_columns is None or y_columns is None or not leaf_of.same_rows(*x_columns, *y_columns):
            raise _unlike_clients(triples, origin)
        x = leaf_of.tree_like(inputs[0], map(leaf_of.joined, x_columns))
        y = leaf_of.tree_like(targets[0], map(leaf_of.joined, y_columns))
        made = cls.trusted(
            x=x,
            y=y,
            offsets=offsets_of(torch.tensor([len(leaf) for leaf in (*x_columns, *y_columns)[0]])),
            ids=names,
            scale=leaf_of.per_leaf("scale", scale, x, None),
            shift=leaf_of.per_leaf("shift", shift, x, 0.0),
            source=source,
        )
        made.check_leaves()
        made._check_clients()
        made.refuse_non_finite(lambda row, name: f"{made.place(row)} of its {name}")
        return made

    @cached_property
    def starts(self) -> Tensor:
        """The first row of each client, (n,) int64."""
        return self.offsets[:-1]

    @cached_property
    def in_turn(self) -> bool:
        """Whether the rows of each client follow on those of the client before it."""
        return torch.equal(self.starts, self.offsets[:-1])

    @cached_property
    def sizes(self) -> Tensor:
        """Examples per client, (n,) int64."""
        return self.offsets.diff()

    @cached_property
    def host_sizes(self) -> Tensor:
        """Examples per client, (n,) int64, on the CPU wherever the data are."""
        return self.sizes.cpu()

    @cached_property
    def keys(self) -> Tensor:
        """The key of each client's random stream, (n,) int64: a function of its id, whatever the order of clients."""
        return self.host_keys.to(self.device)

    @cached_property
    def host_keys(self) -> Tensor:
        """The key of each client's random stream, (n,) int64, on the CPU."""
        return name_keys(self.ids)

    @property
    def hashed(self) -> tuple[object, ...]:
        """What stands for the clients in a fingerprint: ids and examples; of a store, its checksums and the chosen clients."""
        if self.store is not None:
            return self.store.digest, self.starts
        parts = *leaf_of.hashed_parts(self.x), *leaf_of.hashed_parts(self.y)
        return self.ids, self.offsets, *parts, self.scale, self.shift, *(() if self.in_turn else (self.starts,))

    @cached_property
    def store(self) -> StoreState | None:
        """The store on disk where the rows lie; None if they are in memory."""
        return None

    @cached_property
    def key_order(self) -> Tensor:
        """The clients' positions by rising key, (n,) int64, on the CPU: `find` looks ids up in it."""
        return self.host_keys.argsort()

    @property
    def examples(self) -> int:
        """The number of examples of all clients."""
        return int(self.offsets[-1])

    @property
    def device(self) -> torch.device:
        """Where the examples are."""
        device: torch.device = leaves(self.x)[0].device
        return device

    @property
    def features(self) -> int:
        """Numbers in the inputs of one example; of sequences, in the longest."""
        return sum(leaf_of.numbers_in(leaf) for leaf in leaves(self.x))

    @cached_property
    def why_not_plain(self) -> str | None:
        """Why inputs and targets are not one tensor each; None if they are."""
        if isinstance(self.x, Tensor) and isinstance(self.y, Tensor):
            return None
        return "inputs or targets are several tensors, or sequences of different lengths"

    @cached_property
    def is_visited(self) -> bool:
        """Whether some inputs are read from a Dataset at every visit, which only the loop engine does."""
        return any(isinstance(leaf, Visited) for leaf in leaves(self.x))

    @cached_property
    def has_sequences(self) -> bool:
        """Whether some leaves are sequences of different lengths, which batches pad."""
        return any(isinstance(leaf, Ragged) for leaf in (*leaves(self.x), *leaves(self.y)))

    def rows(self, client: int) -> slice:
        """The rows of one client."""
        first = int(self.starts[client])
        return slice(first, first + int(self.sizes[client]))

    def first_rows(self, count: int) -> Tensor:
        """The first rows for a trial: of sequences the shortest and the longest, and one that batches need not pad."""
        chosen = set()
        for leaf in (*leaves(self.x), *leaves(self.y)):
            if isinstance(leaf, Ragged):
                lengths = leaf.offsets[: min(count, len(leaf)) + 1].diff()
                whole = (lengths % MULTIPLE == 0).int().argmax()  # the first row if there is none
                chosen |= {int(row) for row in (lengths.argmin(), lengths.argmax(), whole)}
        return torch.tensor(sorted(chosen), device=self.device)

    def inputs(self, rows: Tensor | slice, dtype: torch.dtype = torch.float32, *, wider: int | None = 0) -> Any:
        """The rows of `x` as a model sees them: scaled if raw, floating numbers in `dtype`, tokens as int64.

        Sequences are padded and their masks added. `wider` adds that number of padding places; None pads to the longest only.
        """
        if isinstance(self.x, Tensor):
            return leaf_of.prepared(leaf_of.gather(self.x, rows, wider), rows, dtype, self.scale, self.shift)
        gathered = map_tree(
            lambda leaf, *units: leaf_of.prepared(leaf_of.gather(leaf, rows, wider), rows, dtype, *units),
            self.x,
            self.scale,
            self.shift,
        )
        if isinstance(self.x, dict):
            for name, leaf in self.x.items():
                if isinstance(leaf, Ragged) and leaf.mask is not None:
                    gathered[leaf.mask] = leaf.inside(
                        leaf_of.indices(rows, leaf.device), gathered[name].shape[leaf_of.dimensions(rows)]
                    )
        return gathered

    def targets(self, rows: Tensor | slice, dtype: torch.dtype = torch.float32, *, wider: int | None = 0) -> Any:
        """The rows of `y`: classes as int64, numbers in `dtype`."""
        return map_tree(lambda leaf: leaf_of.prepared(leaf_of.gather(leaf, rows, wider), rows, dtype, None, 0.0), self.y)

    def client(self, which: str | None = None, *, at: int | None = None) -> tuple[Any, Any]:
        """(x, y) of one client, by its id or by its position `at`, as a model sees them."""
        if is_integer(which) or (which is None) == (at is None):
            fix = "Write client(id) with text, or client(at=0) for a position."
            raise InvalidParameter("which", "must be a client id, or at a position, and not both", (which, at), fix)
        if which is not None and which not in self.ids:
            raise InvalidParameter(
                "which", f"must be one of the {len(self)} client ids", which, f"The first is {self.ids[0]!r}."
            )
        position = self.ids.index(which) if which is not None else at
        good = is_integer(position) and 0 <= int(position or 0) < len(self)
        require(good, "at", f"must be a position from 0 to {len(self) - 1}", position)
        rows = self.rows(int(position or 0))
        return self.inputs(rows), self.targets(rows)

    def take(self, positions: Sequence[int] | Tensor) -> ClientSet:
        """The clients at some positions, or of a boolean mask; their rows are copied."""
        chosen = self._positions(positions)
        sizes = self.host_sizes[chosen]
        rows = rows_in_turn(self.starts.cpu()[chosen], sizes)
        made = self.with_rows(rows, sizes, self.ids_at(chosen))
        return made if "host_keys" not in vars(self) else ClientSet.trusted(**vars(made), host_keys=self.host_keys[chosen])

    def select(self, positions: Sequence[int] | Tensor) -> ClientSet:
        """The clients at some positions, or of a boolean mask; their rows stay where they are, shared with this set."""
        chosen = self._positions(positions)
        sizes, device = self.host_sizes[chosen], self.device
        kept = {name: value for name, value in vars(self).items() if name in ("x", "y", "scale", "shift", "source", "store")}
        known = {"host_keys": self.host_keys[chosen]} if "host_keys" in vars(self) else {}
        return ClientSet.trusted(
            **kept, **known, offsets=offsets_of(sizes).to(device), starts=self.starts[chosen.to(device)],
            sizes=sizes.to(device), host_sizes=sizes,
            ids=self.ids.select(chosen) if isinstance(self.ids, StoredIds) else self.ids_at(chosen),
            label_ranges=self.label_ranges,
        )  # fmt: skip

    def _positions(self, positions: Sequence[int] | Tensor) -> Tensor:
        if isinstance(positions, Tensor) and positions.dtype == torch.bool:
            positions = positions.nonzero().flatten()
        chosen = torch.as_tensor(positions, dtype=torch.int64).cpu()
        if not len(chosen) or int(chosen.min()) < 0 or int(chosen.max()) >= len(self):
            shown = chosen.tolist()[:10]
            raise InvalidParameter("positions", f"must name at least one client, each from 0 to {len(self) - 1}", shown)
        return chosen

    def ids_at(self, positions: Tensor) -> tuple[str, ...]:
        """The ids of the clients at some positions."""
        if isinstance(self.ids, StoredIds):
            return self.ids.at(positions)
        return tuple(map(self.ids.__getitem__, positions.tolist()))

    def find(self, clients: ClientSet) -> Tensor:
        """The positions here of the clients of another set, by their ids: (n,) int64, −1 for those that are not here."""
        return self._located(clients.host_keys, clients.ids)

    def positions_of(self, names: Sequence[str]) -> Tensor:
        """The positions of the clients with these ids, (k,) int64; −1 for ids that no client has."""
        return self._located(name_keys(names), names)

    def _located(self, wanted_keys: Tensor, names: Sequence[str]) -> Tensor:
        keys, order, wanted = self.host_keys.numpy(), self.key_order.numpy(), wanted_keys.numpy()
        places = order[np.searchsorted(keys, wanted, sorter=order).clip(max=len(self) - 1)]
        found = np.where(keys[places] == wanted, places, -1)
        there = np.flatnonzero(found >= 0)
        for k, here in zip(there.tolist(), self.ids_at(torch.from_numpy(found[there])), strict=True):
            if here != names[k]:  # two ids with one key: almost never, so a slow search will do
                found[k] = next((place for place, name in enumerate(self.ids) if name == names[k]), -1)
        return torch.from_numpy(found)

    def with_rows(self, rows: Tensor, sizes: Tensor, ids: tuple[str, ...]) -> ClientSet:
        """Clients of these sizes and ids, who own some rows of this set, one after the other."""
        x, y = (map_tree(lambda leaf: leaf_of.taken(leaf, rows), tree) for tree in (self.x, self.y))
        made = ClientSet.trusted(
            x=x, y=y, offsets=offsets_of(sizes), ids=ids, scale=self.scale, shift=self.shift, source=self.source
        )
        made._check_clients()
        return made

    def with_targets(self, y: Any) -> ClientSet:
        """The clients with other targets for the rows that they have."""
        found = ("why_not_plain", "has_sequences", "label_ranges")
        return ClientSet.trusted(**{name: value for name, value in vars(self).items() if name not in found} | {"y": y})

    def to(self, device: torch.device) -> ClientSet:
        """The set with its tensors on a device; the same object if they are there already."""
        if self.device == device:
            return self
        if not self.in_turn:  # rows of other clients stay behind
            rows = rows_in_turn(self.starts.cpu(), self.host_sizes)
            return self.with_rows(rows, self.host_sizes, self.ids_at(torch.arange(len(self)))).to(device)
        stays = {name: value for name, value in vars(self).items() if name in ("host_sizes", "host_keys", "key_order")}
        return ClientSet.trusted(**{name: leaf_of.moved(value, device) for name, value in vars(self).items()} | stays)

    @cached_property
    def label_ranges(self) -> dict[int, LabelRange | None]:
        """The ranges of the classes that are known so far, by the class that is ignored."""
        return {}

    def label_range(self, ignore: int) -> LabelRange | None:
        """The smallest and the largest class, and whether some places are ignored; None if targets are not classes."""
        if ignore not in self.label_ranges:
            origin = prefix(self.source)
            self.label_ranges[ignore] = find_label_range(self.y, ignore, lambda row: f"{origin}{self.place(row)}")
        return self.label_ranges[ignore]


def _unlike_clients(triples: list[tuple[str, Any, Any]], origin: str) -> InvalidData:
    """The refusal of the first client whose inputs and targets differ in type or shape from the first client's."""
    trees = [(name, map_tree(leaf_of.as_leaf, x), map_tree(leaf_of.as_leaf, y)) for name, x, y in triples]
    first = trees[0]
    for name, x, y in trees:
        if any(isinstance(leaf, Tensor) and leaf.dim() == 0 for leaf in (*leaves(x), *leaves(y))):
            return InvalidData(f"{origin}client {name!r} must have arrays with one row per example, not single numbers.")
        if leaf_of.kinds_of(x) != leaf_of.kinds_of(first[1]) or leaf_of.kinds_of(y) != leaf_of.kinds_of(first[2]):
            return InvalidData(
                f"{origin}client {name!r} has inputs and targets of shapes {shown_shape(x)} and {shown_shape(y)} "
                f"per example, but client {first[0]!r} has {shown_shape(first[1])} and {shown_shape(first[2])}."
            )
        counts = [len(leaf) for leaf in (*leaves(x), *leaves(y))]
        if len(set(counts)) > 1:
            return InvalidData(f"{origin}client {name!r} has {counts[0]} inputs but {counts[-1]} targets.")
    return InvalidData(f"{origin}the clients' inputs and targets differ in their kinds.")


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
