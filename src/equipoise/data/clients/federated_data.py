"""Federated data: a named data set of clients to train on, and of clients to validate and test on."""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core.trees import leaves
from equipoise.core.words import counted
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.leaves import IGNORE, shown_shape
from equipoise.data.clients.ragged import Ragged
from equipoise.errors import InvalidData, InvalidParameter, is_integer, notify, require
from equipoise.subgroups import checked_attributes
from equipoise.types import Attack

# Of the clients of a split: their ids, where the rows of each end, and the rows of all, as the table counts them.
TablePlaces = tuple[Sequence[str], NDArray[np.int64], NDArray[np.int64]]


@dataclass(frozen=True, eq=False)
class FederatedData:
    """Clients to train on, and clients to validate and test on.

    There are two kinds of split: *by client* (`test` holds other clients, unseen in training) and *inside clients* (`test`
    holds further examples of the training clients). The column `seen` of a result says which. Integer targets are classes;
    places of the class `ignore_index` count neither in losses nor in errors. `schema` says how a table became these inputs.

    >>> import torch
    >>> ids, y = ["a", "b"], torch.tensor([0, 1, 0, 1])
    >>> FederatedData(ClientSet(torch.zeros(4, 2), y, torch.tensor([0, 3, 4]), ids))
    FederatedData('data', train: 2 clients / 4 examples)
    """

    train: ClientSet
    validation: ClientSet | None = None
    test: ClientSet | None = None
    name: str = "data"
    classes: int = 0  # 0: read from the targets
    malicious: frozenset[str] = frozenset()  # ids of training clients under `attack` (equipoise.attacks.apply)
    attack: Attack | None = None
    ignore_index: int = IGNORE
    schema: Any = None  # equipoise.data.Schema: how each column of a table was encoded; not part of the fingerprint
    attributes: Mapping[str, Mapping[str, str]] = field(default_factory=dict)  # of clients, by name; not in the fingerprint
    table_places: Mapping[str, TablePlaces] = field(default_factory=dict, repr=False)  # by split, of a table; see `table_rows`

    def __post_init__(self) -> None:
        fix = "Without targets to ignore, leave it away."
        require(is_integer(self.ignore_index), "ignore_index", "must be an integer", self.ignore_index, fix)
        for split, clients in self.splits.items():
            if not isinstance(clients, ClientSet):
                raise InvalidParameter(
                    split, "must be a ClientSet", type(clients).__name__,
                    "Make the data by data.from_arrays(x, y, client) or data.from_dict({id: (x, y)}).",
                )  # fmt: skip
            if shown_shape(clients.x) != shown_shape(self.train.x):
                raise InvalidData(
                    f"{self.name}: examples of {split} have shape {shown_shape(clients.x)}, those of train "
                    f"{shown_shape(self.train.x)}."
                )
            if _types(clients.y) != _types(self.train.y):
                mine, other = (", ".join(str(leaf.dtype) for leaf in leaves(each.y)) for each in (clients, self.train))
                raise InvalidData(f"{self.name}: targets of {split} are {mine}, those of train {other}.")
        ranges = {name: labels for name, c in self.splits.items() if (labels := c.label_range(self.ignore_index)) is not None}
        if not ranges:
            return
        lowest, highest = min(each.lowest for each in ranges.values()), max(each.highest for each in ranges.values())
        if lowest < 0 or (self.classes and highest >= self.classes):
            raise InvalidData(
                f"{self.name}: classes must be 0 … {self.classes - 1 if self.classes else 'C − 1'}, "
                f"found {lowest} … {highest}. Only {self.ignore_index} may stand for a target to ignore."
            )
        if not self.classes:
            object.__setattr__(self, "classes", highest + 1)

    @cached_property
    def has_ignored(self) -> bool:
        """Whether some targets are to be ignored."""
        ranges = [clients.label_range(self.ignore_index) for clients in self.splits.values()]
        return any(labels is not None and labels.ignored for labels in ranges)

    def may_pad_further(self, rows: Tensor) -> bool:
        """Whether a split has, in every leaf, longer sequences than a batch of these training rows is padded to."""
        parts = [[leaf for leaf in (*leaves(c.x), *leaves(c.y)) if isinstance(leaf, Ragged)] for c in self.splits.values()]
        return all(max(leaf.longest for leaf in each) > each[0].width(rows) for each in zip(*parts, strict=True))

    @cached_property
    def fingerprint(self) -> str:
        """A short hash of all splits and examples: equal data have equal fingerprints."""
        sets = [(name, *clients.hashed) for name, clients in self.splits.items()]
        # The repr of a plain object holds its address in memory.
        attacked = (sorted(self.malicious), re.sub(r" at 0x[0-9a-f]+", "", repr(self.attack))) if self.malicious else ()
        ignored = (self.ignore_index,) if self.ignore_index != IGNORE else ()
        return _hash_of(*(value for values in sets for value in values), *attacked, *ignored)

    def with_attributes(self, attributes: Mapping[str, Mapping[str, Any]]) -> FederatedData:
        """The data with attributes of clients, {name: {client id: value}}: tables and reports then show subgroups by them.

        Attributes of which no client has a value are refused. A notice names ids that no client has, and clients without a
        value.
        """
        given = checked_attributes(attributes)
        known = dict.fromkeys(client for clients in self.splits.values() for client in clients.ids)
        for name, values in given.items():
            _compare_ids(name, values, known)
        return replace(self, attributes={**self.attributes, **given})

    def table_rows(self, split: str = "test") -> dict[str, NDArray[np.int64]]:
        """By client, the rows of the table that are its examples of a split, in the order of the examples.

        Rows are counted from 0 and without the header, as `frame.iloc` does, also those that `min_examples` left out. Data of
        `data.csv`, `data.parquet` and `data.from_frame` have them.

        >>> import equipoise as eq
        >>> part = ["train", "train", "test", "test"]
        >>> frame = {"who": ["a", "b", "a", "b"], "age": [3, 4, 5, 6], "ill": ["no", "yes", "no", "yes"], "part": part}
        >>> data = eq.data.from_frame(frame, client="who", target="ill", split="part", split_by="examples")
        >>> data.table_rows("test")
        {'a': array([2]), 'b': array([3])}
        """
        if not self.table_places:
            fix = "Split the rows yourself: split=… of data.from_frame names a column that says train, validation or test."
            raise InvalidParameter("data", "must be made by data.csv, data.parquet or data.from_frame", self.name, fix)
        known = list(self.table_places)
        require(split in known, "split", f"must be one of {', '.join(known)}", split)
        ids, ends, rows = self.table_places[split]
        return dict(zip(ids, np.split(rows, ends[:-1]), strict=True))

    @property
    def splits(self) -> dict[str, ClientSet]:
        """The splits that are not None, by name."""
        named = {"train": self.train, "validation": self.validation, "test": self.test}
        return {name: clients for name, clients in named.items() if clients is not None}

    @property
    def features(self) -> int:
        """The number of input features of one example."""
        return self.train.features

    def __repr__(self) -> str:
        counts = {name: (counted(len(c), "client"), counted(c.examples, "example")) for name, c in self.splits.items()}
        splits = ", ".join(f"{name}: {clients} / {examples}" for name, (clients, examples) in counts.items())
        return f"FederatedData({self.name!r}, {splits})"


def _compare_ids(attribute: str, values: Mapping[str, str], known: Mapping[str, None]) -> None:
    """Refuse an attribute that no client of the data has; a notice tells of unknown ids and of clients without a value."""
    unknown = [client for client in values if client not in known]
    lacking = [client for client in known if client not in values]
    if not unknown and not lacking:
        return
    text = f"{len(unknown)} of its ids are no clients, {len(lacking)} of {len(known)} clients have no value"
    if len(lacking) == len(known):
        rule, fix = "must map ids of clients to values", f"Ids are written as in the data, e.g. {next(iter(known))!r}."
        raise InvalidParameter(f"attributes[{attribute!r}]", rule, list(values)[:3], fix)
    notify(f"attribute {attribute!r}: {text}, e.g. {(unknown or lacking)[0]!r}. These are a subgroup of their own, –.")


def _types(tree: Any) -> list[bool]:
    return [leaf.is_floating_point() for leaf in leaves(tree)]


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
