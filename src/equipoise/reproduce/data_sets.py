"""The data of published experiments: loaders with the settings of the papers, and refusals for missing files."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Literal

import numpy as np
import torch

from equipoise.core.rng import generator
from equipoise.data import ClientSet, WordVectors, femnist, glove, leaf, shakespeare, split_clients, split_examples, texts
from equipoise.data.clients import FederatedData
from equipoise.data.datasets.data_files import FOLDER_VARIABLE
from equipoise.data.datasets.generators import synthetic
from equipoise.data.datasets.text import UNKNOWN, Features
from equipoise.errors import InvalidData
from equipoise.reproduce.entry import Need

SENT140_FOLDER = "sent140"  # inside the data folder


def data_folder(given: Path | None) -> Path | None:
    """The folder of --data, else that of the environment variable, else none."""
    chosen = given or os.environ.get(FOLDER_VARIABLE)
    return Path(chosen).expanduser() if chosen else None


def require_files(name: str, needs: Sequence[Need], folder: Path | None) -> None:
    """Refuse an experiment whose files are missing, and say where to get them."""
    missing = [need for need in needs if folder is None or not any((folder / name).exists() for name in need.names)]
    if not missing:
        return
    looked = f"looked in {folder}" if folder is not None else "no folder was named"
    files = "\n".join(f"  {need.path}: {need.origin}." for need in missing)
    raise InvalidData(
        f"{name} needs files that are not there ({looked}):\n{files}\n"
        f"Put them into one folder and name it: --data DIR, or the environment variable {FOLDER_VARIABLE}."
    )


def at_most(data: FederatedData, train: int | None, test: int | None, seed: int) -> FederatedData:
    """The data with at most `train` training and `test` test clients (None: all), drawn with the seed."""

    def drawn(clients: ClientSet | None, most: int | None, purpose: str) -> ClientSet | None:
        if clients is None or most is None or len(clients) <= most:
            return clients
        chosen = generator(seed, purpose).choice(len(clients), size=most, replace=False)
        return clients.take(np.sort(chosen).tolist())

    trained = drawn(data.train, train, "training clients of a smaller scale") or data.train
    return replace(data, train=trained, test=drawn(data.test, test, "test clients of a smaller scale"))


def emnist(folder: Path | None, seed: int) -> FederatedData:
    """EMNIST writers with 100 images or more, half for training and half for testing, drawn again for each seed."""
    return femnist(folder, min_examples=100, seed=seed)


def roles(folder: Path | None, seed: int, step: int = 1) -> FederatedData:
    """Shakespeare's roles with 100 windows or more, half for testing, split alike for all seeds; every `step`-th window."""
    return shakespeare(folder, length=20, step=step, min_examples=max(2, 100 // step))


@lru_cache(maxsize=1)
def word_vectors(folder: Path | None) -> WordVectors:
    """The GloVe vectors of a folder, read once."""
    return glove(folder)


def reviews(folder: Path | None, seed: int, name: Literal["clothing", "stackoverflow"], features: Features) -> FederatedData:
    """Texts that stand in for Sent140, split alike for all seeds. Their results must not be called Sent140's."""
    return texts(name, folder, vectors=word_vectors(folder), features=features, length=20, min_examples=50)


def tweets(folder: Path | None, seed: int, features: Features) -> FederatedData:
    """Sent140 from a LEAF folder: users with 50 tweets or more; LEAF's split if it is by user, else half and half."""
    if folder is None:
        raise InvalidData("Sent140 needs a folder.")
    vectors = word_vectors(folder)
    # A tweet has at most 140 characters, so at most 140 words; the recurrent model sees the first 20.
    length = 20 if features == "tokens" else 140
    data = leaf(folder / SENT140_FOLDER, vectors=vectors, length=length, min_examples=50, classes=2)
    if data.test is None:
        data = split_clients(data.train, test=0.5, seed=0, classes=2)
    elif set(data.test.ids) & set(data.train.ids):
        raise InvalidData(
            f"{folder / SENT140_FOLDER}: LEAF split tweets inside users; the papers split users. Use -t user --tf 0.5."
        )
    test = data.splits["test"]
    test = test.take((test.sizes >= 50).nonzero().flatten())
    if features == "tokens":
        return replace(data, test=test, name="sent140")
    return replace(data, train=mean_vectors(data.train, vectors), test=mean_vectors(test, vectors), name="sent140")


def mean_vectors(clients: ClientSet, vectors: WordVectors) -> ClientSet:
    """Clients whose texts, as tokens, are replaced by the mean vector of their known words, (N, 50); zero without any."""
    known = (clients.x > UNKNOWN).float()  # (N, length)
    total = torch.zeros(clients.examples, vectors.vectors.shape[1])
    for column in range(clients.x.shape[1]):  # column by column: (N, length, 50) would be large
        total += vectors.vectors[clients.x[:, column].long()] * known[:, column, None]
    return replace(clients, x=total / known.sum(1, keepdim=True).clamp(min=1))


def synthetic_30(folder: Path | None, seed: int) -> FederatedData:
    """Synthetic(1,1) with 30 clients; a fifth of the examples of each is for testing."""
    return synthetic(1, 1, clients=30, test=0.2, seed=seed)


def synthetic_with_sizes_of_table_4_4(
    folder: Path | None, seed: int, clients: int = 100, beta: float = 1.0, iid: bool = False
) -> FederatedData:
    """Synthetic(β, β) of `equipoise.data.synthetic` with ⌊exp(N(4, 1²))⌋ + 50 examples per client.

    Table 4.4 of the thesis has 12,697 examples for 100 clients with standard deviation 73. The published generator of
    "Synthetic" draws sizes ⌊exp(N(4, 2²))⌋ + 50, about nine times as spread out (the median standard deviation of 100 sizes is
    970, and 104 here); the one beside it, of the hybrid data, draws these.
    (α only adds the same number to the score of every class, so labels do not depend on it.) With `iid=True` all clients have
    one W and b, and x ~ N(0, 1) in every feature, as the text above Table 4.10 says.
    """
    deviation = np.arange(1, 61) ** -0.6
    shared = generator(seed, "synthetic model")
    common = shared.normal(size=(10, 60)), shared.normal(size=10)
    triples = []
    for name in (f"client-{k}" for k in range(clients)):
        rng = generator(seed, "synthetic of table 4.4", client=name)
        size = int(rng.lognormal(4.0, 1.0)) + 50
        weight, bias = rng.normal(size=(10, 60)), rng.normal(size=10)
        centre = rng.normal(beta * rng.normal(), 1.0, 60)
        if iid:
            (weight, bias), centre = common, np.zeros(60)
        x = centre + (1.0 if iid else deviation) * rng.normal(size=(size, 60))
        triples.append((name, torch.from_numpy(x).float(), torch.from_numpy((x @ weight.T + bias).argmax(1))))
    packed = ClientSet.pack(triples, source="synthetic")
    return split_examples(packed, validation=0.1, test=0.1, seed=seed, name="synthetic", classes=10)
