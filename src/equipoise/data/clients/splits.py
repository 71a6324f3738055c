"""Splits into train, validation and test: by client (others, unseen in training) or inside clients (further examples).

Where a client goes depends on (seed, id) and on the number of clients or examples, not on the order of clients.
"""

from __future__ import annotations

import math
from itertools import count
from typing import Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.core.numbers import Numbers
from equipoise.core.rng import first_uniforms, generator
from equipoise.data.clients.client_set import ClientSet
from equipoise.data.clients.federated_data import FederatedData
from equipoise.data.clients.leaves import IGNORE
from equipoise.errors import InvalidParameter, notify, require, require_number

How = Literal["clients", "examples"]


def _share(total: int, fraction: float) -> int:
    """The fraction of `total` rounded half up, so that the larger half of an odd number is for testing, as in the papers."""
    return math.floor(total * fraction + 0.5 + 1e-9)


def _spared(size: int, validation: float, test: float) -> tuple[int, int]:
    """How many of a client's examples are to test on, and to validate on; one is left for training."""
    tested = min(_share(size, test), size - 1)
    return tested, min(_share(size, validation), size - 1 - tested)


def _check(validation: float, test: float) -> None:
    for name, value in (("validation", validation), ("test", test)):
        require_number(name, value, "[0, 1)", "Write 0 for no such clients or examples.")
    require(validation + test < 1.0, "validation + test", "must be below 1, to leave data for training", validation + test)


def split_clients(
    clients: ClientSet,
    *,
    validation: float = 0.0,
    test: float = 0.5,
    seed: int = 0,
    name: str = "data",
    classes: int = 0,
    ignore_index: int = IGNORE,
) -> FederatedData:
    """Disjoint clients: a fraction to validate on, a fraction to test on, the rest to train on (each at least one client).

    Source: Pillutla, Laguel, Malick, Harchaoui, Federated Learning with Superquantile Aggregation for Heterogeneous Data
    (train and test clients disjoint, half and half).

    >>> import torch
    >>> from equipoise.data import to_clients
    >>> clients = to_clients(torch.zeros(20, 2), torch.zeros(20), torch.arange(20).split(5))
    >>> split_clients(clients, test=0.5)
    FederatedData('data', train: 2 clients / 10 examples, test: 2 clients / 10 examples)
    """
    train, validated, tested = draw_clients(clients, validation=validation, test=test, seed=seed)
    choose = clients.take if clients.store is None else clients.select
    held_out = [choose(positions) if len(positions) else None for positions in (validated, tested)]
    return FederatedData(choose(train), held_out[0], held_out[1], name, classes, ignore_index=ignore_index)


def draw_clients(clients: ClientSet, *, validation: float, test: float, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    """The positions, in order, of the clients to train on, to validate on and to test on."""
    _check(validation, test)
    tested = max(_share(len(clients), test), int(test > 0))
    validated = max(_share(len(clients), validation), int(validation > 0))
    if tested + validated >= len(clients):
        raise InvalidParameter(
            "clients", "must be enough to train, validate and test on", len(clients),
            'Use more clients, smaller fractions (0 for none), or split_by="examples".',
        )  # fmt: skip
    drawn = first_uniforms(seed, "split clients", clients.host_keys)
    for_test, held_out = (_smallest(drawn, count, clients) for count in (tested, tested + validated))
    train, validate, test_on = (torch.from_numpy(np.flatnonzero(m)) for m in (~held_out, held_out & ~for_test, for_test))
    return train, validate, test_on


def _smallest(drawn: Numbers, count: int, clients: ClientSet) -> Numbers:
    """Who has one of the `count` smallest numbers, (n,) bool; the order of ids decides between equal ones."""
    limit = np.partition(drawn, count)[count]
    chosen = drawn < limit
    if missing := count - int(chosen.sum()):
        equal = np.flatnonzero(drawn == limit).tolist()
        chosen[sorted(equal, key=lambda k: clients.ids[k])[:missing]] = True
    found: Numbers = chosen
    return found


def split_examples(
    clients: ClientSet,
    *,
    validation: float = 0.0,
    test: float = 0.1,
    seed: int = 0,
    name: str = "data",
    classes: int = 0,
    ignore_index: int = IGNORE,
) -> FederatedData:
    """Inside each client: a fraction of its examples to validate and to test on, the same ids in all parts.

    Fractions are rounded half up. Every client keeps at least one training example; one too small to spare an example for
    test or validation is absent there. Source: Tian Li, thesis, section 4.6.2 (80/10/10 on each device).

    >>> import torch
    >>> from equipoise.data import to_clients
    >>> clients = to_clients(torch.zeros(20, 2), torch.zeros(20), torch.arange(20).split(5))
    >>> split_examples(clients, test=0.2)
    FederatedData('data', train: 4 clients / 16 examples, test: 4 clients / 4 examples)
    """
    _check(validation, test)
    chosen: dict[str, list[Tensor]] = {"train": [], "validation": [], "test": []}
    for k, (start, size) in enumerate(zip(clients.starts.tolist(), clients.sizes.tolist(), strict=True)):
        tested, validated = _spared(size, validation, test)
        order = torch.from_numpy(generator(seed, "split examples", client=clients.ids[k]).permutation(size))
        pieces = torch.split(order, [tested, validated, size - tested - validated])
        for split_name, rows in zip(("test", "validation", "train"), pieces, strict=True):
            chosen[split_name].append(start + rows.sort().values)
    sets: dict[str, ClientSet] = {}
    for split_name, fraction in (("train", 1.0), ("validation", validation), ("test", test)):
        owned = {clients.ids[k]: rows for k, rows in enumerate(chosen[split_name]) if len(rows)}
        if owned:
            sizes = torch.tensor([len(rows) for rows in owned.values()])
            sets[split_name] = clients.with_rows(torch.cat(list(owned.values())), sizes, tuple(owned))
        elif fraction > 0:
            largest = int(clients.sizes.max())
            fix = "Use a larger fraction." if largest > 1 else "All clients have one example: keep clients apart instead."
            raise InvalidParameter(split_name, "leaves no client with an example to spare", fraction, fix)
    rest = sets.get("validation"), sets.get("test")
    return FederatedData(sets["train"], *rest, name, classes, ignore_index=ignore_index)


def split(
    clients: ClientSet,
    how: How,
    *,
    validation: float = 0.0,
    test: float = 0.5,
    seed: int = 0,
    name: str = "data",
    classes: int = 0,
    ignore_index: int = IGNORE,
) -> FederatedData:
    """`split_clients` or `split_examples`, by name."""
    require(how in ("clients", "examples"), "split_by", 'must be "clients" or "examples"', how)
    chosen = split_clients if how == "clients" else split_examples
    return chosen(clients, validation=validation, test=test, seed=seed, name=name, classes=classes, ignore_index=ignore_index)


def tell_of_untested(data: FederatedData, shares: tuple[float, float] | None) -> None:
    """Notices of training clients without an example to test or to validate on, by the shares that were asked for, if any."""
    for place, (part, judges) in enumerate((("test", data.test), ("validation", data.validation))):
        judged = set(data.train.ids if judges is None else judges.ids)
        if left := [repr(client) for client in data.train.ids if client not in judged]:
            shown = ", ".join(left[:5]) + (" …" if len(left) > 5 else "")
            fewest = 1 if shares is None else next(size for size in count(2) if _spared(size, *shares)[place])
            cure = f"Give them more, or leave them out{'' if shares is None else f': min_examples={fewest}'}."
            notify(f"{data.name}: clients without an example for {part}: {shown} ({len(left)} of {len(data.train)}). {cure}")
