"""EMNIST with one thing changed at a time: to find out when training on the tail of clients lowers their errors."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from equipoise.core.rng import generator
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.reproduce.data_sets import emnist

Integers = np.ndarray[tuple[int, ...], np.dtype[np.int64]]


def emnist_varied(
    folder: Path | None,
    seed: int,
    writers: int | None = None,
    over_mean: bool = False,
    shuffled: float = 0.0,
    classes: float = 1.0,
    inverted: float = 0.0,
    test_examples: int | None = None,
) -> FederatedData:
    """The writers of `emnist`, and what is asked for:

    - `writers`: the most writers for training.
    - `over_mean`: pixels are divided by their mean, as in the published code.
    - `shuffled`: this share of the training images changes places among all training writers. At 1 they are IID.
    - `classes`: every writer, of training and of test, keeps the images of this share of the 62 classes, drawn for each.
    - `inverted`: this share of writers, of training and of test, writes white on black.
    - `test_examples`: the most images of every test writer.
    """
    data = emnist(folder, seed)
    test = data.splits["test"]
    train = data.train
    if writers is not None and writers < len(train):
        chosen = generator(seed, "fewer training writers").choice(len(train), size=writers, replace=False)
        train = train.take(np.sort(chosen).tolist())
    if classes < 1:
        train, test = (kept_rows(clients, few_classes(clients, classes, seed)) for clients in (train, test))
    if inverted > 0:
        train, test = (with_inverted(clients, inverted, seed) for clients in (train, test))
    if shuffled > 0:
        train = with_shuffled(train, shuffled, seed)
    if test_examples is not None:
        most = test_examples
        test = kept_rows(test, lambda who, rows: generator(seed, "test images", client=who).permutation(rows)[:most])
    if over_mean:
        mean = float(train.x.float().mean()) * float(train.scale) + float(train.shift)
        train, test = (replace(c, scale=float(c.scale) / mean, shift=float(c.shift) / mean) for c in (train, test))
    return replace(data, train=train, test=test)


def rows_of(clients: ClientSet, k: int) -> Integers:
    """The rows of a client's examples."""
    return np.arange(int(clients.offsets[k]), int(clients.offsets[k + 1]))


def kept_rows(clients: ClientSet, choose: Callable[[str, Integers], Integers]) -> ClientSet:
    """The clients with the rows that `choose` (id, rows) leaves them."""
    chosen = [np.sort(choose(who, rows_of(clients, k))) for k, who in enumerate(clients.ids)]
    triples = [(who, clients.x[rows], clients.y[rows]) for who, rows in zip(clients.ids, chosen, strict=True)]
    return ClientSet.pack(triples, scale=clients.scale, shift=clients.shift, source=clients.source)


def few_classes(clients: ClientSet, share: float, seed: int) -> Callable[[str, Integers], Integers]:
    """Leaves a client the images of a share of all classes, drawn for it; all of them if that would be none."""
    labels, count = clients.y.numpy(), round(62 * share)

    def choose(who: str, rows: Integers) -> Integers:
        drawn = generator(seed, "classes of a writer", client=who).permutation(62)[:count]
        here = rows[np.isin(labels[rows], drawn)]
        return here if len(here) else rows

    return choose


def with_inverted(clients: ClientSet, share: float, seed: int) -> ClientSet:
    """Clients of which a share, drawn by their ids, have black for white."""
    x = clients.x.clone()
    for k, who in enumerate(clients.ids):
        if generator(seed, "writes white on black", client=who).random() < share:
            rows = torch.from_numpy(rows_of(clients, k))
            x[rows] = 255 - x[rows]
    return replace(clients, x=x)


def with_shuffled(clients: ClientSet, share: float, seed: int) -> ClientSet:
    """Clients of which a share of all images have changed places; everyone has as many as before."""
    drawn = generator(seed, "images change places")
    moving = np.flatnonzero(drawn.random(len(clients.y)) < share)
    rows = np.arange(len(clients.y))
    rows[moving] = drawn.permutation(moving)
    order = torch.from_numpy(rows)
    return replace(clients, x=clients.x[order], y=clients.y[order])
