"""Your own data: from arrays with a client per row, from one pair of arrays per client, or from torch Datasets."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from equipoise.data.clients import ClientSet, FederatedData
from equipoise.data.partition import by_id, to_clients
from equipoise.data.splits import How, split
from equipoise.errors import InvalidData, require


def from_arrays(
    x: Any,
    y: Any,
    client: Any,
    *,
    split_by: How = "clients",
    validation: float = 0.0,
    test: float = 0.2,
    scale: float | None = None,
    shift: float = 0.0,
    seed: int = 0,
    name: str = "arrays",
) -> FederatedData:
    """Examples x (N, …), targets y (N, …) and the client of each row (N,), as arrays, tensors or lists.

    `split_by="clients"` keeps a share `test` of the clients apart, unseen in training; "examples" keeps a share of each
    client's examples. Raw pixels: give `scale=1/255`, and they stay uint8 in memory.

    >>> from_arrays([[0.0], [1.0], [2.0], [3.0]], [0, 1, 0, 1], ["a", "a", "b", "b"], test=0.5)
    FederatedData('arrays', train: 1 clients / 2 examples, test: 1 clients / 2 examples)
    """
    x, y = _tensor("x", x), _tensor("y", y)
    owners = [str(c) for c in (client.tolist() if hasattr(client, "tolist") else client)]
    if "nan" in owners:
        raise InvalidData(f"{name}: row {owners.index('nan')} has no client (NaN). Drop it, or name its client.")
    if not len(x) == len(y) == len(owners):
        raise InvalidData(f"{name}: x has {len(x)} rows, y {len(y)} and client {len(owners)}; each example needs all three.")
    rows, ids = by_id(owners)
    clients = to_clients(x, y, rows, ids=ids, scale=scale, shift=shift, source=name)
    return split(clients, split_by, validation=validation, test=test, seed=seed, name=name)


def from_dict(
    clients: Mapping[str, tuple[Any, Any]],
    *,
    split_by: How = "clients",
    validation: float = 0.0,
    test: float = 0.2,
    scale: float | None = None,
    shift: float = 0.0,
    seed: int = 0,
    name: str = "clients",
) -> FederatedData:
    """One pair (x, y) per client id, as arrays, tensors or lists; splits as in `from_arrays`.

    >>> from_dict({"a": ([[0.0], [1.0]], [0, 1]), "b": ([[2.0]], [1])}, test=0.5)
    FederatedData('clients', train: 1 clients / 2 examples, test: 1 clients / 1 examples)
    """
    require(
        isinstance(clients, Mapping) and len(clients) > 0, "clients", "must map client ids to (x, y)", type(clients).__name__
    )
    for owner, pair in clients.items():
        if not (isinstance(pair, Sequence) and len(pair) == 2):
            raise InvalidData(f"{name}: client {owner!r} must be a pair (x, y), but is {type(pair).__name__}.")
    packed = ClientSet.pack(
        ((str(owner), _tensor("x", x), _tensor("y", y)) for owner, (x, y) in clients.items()),
        scale=scale, shift=shift, source=name,
    )  # fmt: skip
    return split(packed, split_by, validation=validation, test=test, seed=seed, name=name)


def from_datasets(datasets: Mapping[str, Any], **options: Any) -> FederatedData:
    """One torch Dataset of (x, y) examples per client id; options as in `from_dict`. Every example is read once, now."""
    pairs = {}
    for owner, dataset in datasets.items():
        examples = [dataset[i] for i in range(len(dataset))]
        if any(not isinstance(example, Sequence) or len(example) < 2 for example in examples):
            raise InvalidData(f"client {owner!r}: examples of a Dataset must be pairs (x, y).")
        if not examples:
            raise InvalidData(f"client {owner!r} has no example. Drop it, or give it data.")
        pairs[owner] = (
            torch.stack([torch.as_tensor(example[0]) for example in examples]),
            torch.stack([torch.as_tensor(example[1]) for example in examples]),
        )
    return from_dict(pairs, **options)


def _tensor(name: str, values: Any) -> Tensor:
    """Values as a tensor of numbers; float64 becomes float32, in which models work by default."""
    if isinstance(values, np.ndarray):
        values = np.ascontiguousarray(values)  # torch cannot read arrays with negative strides
    try:
        tensor = torch.as_tensor(values)
    except (TypeError, ValueError, RuntimeError) as failure:
        raise InvalidData(f"{name} must be an array of numbers with equal shapes: {failure}") from failure
    if tensor.dtype in (torch.uint16, torch.uint32, torch.uint64):  # torch has few operations for them
        tensor = tensor.to(torch.int64)
    return tensor.float() if tensor.dtype == torch.float64 else tensor
