"""Images dealt out to clients as the code of two public benchmarks does it: PFLlib's leaderboard and the bucketing paper."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, ClassVar, Literal

import numpy as np
import torch
from torch import Tensor

from equipoise.attacks import ALIE, IPM, LabelFlip, SignFlip
from equipoise.attacks.malicious import Sent
from equipoise.core.abilities import attack_traits
from equipoise.core.rng import generator
from equipoise.data.clients import ClientSet, FederatedData, split_examples
from equipoise.data.datasets.data_files import data_file, load_arrays, load_json
from equipoise.data.datasets.idx_files import mnist_images
from equipoise.data.partition import to_clients
from equipoise.errors import InvalidData

Integers = np.ndarray[Any, np.dtype[np.int64]]
COUNTS_FILE = "pfllib_fashion_dir01_counts.json"
PFLLIB_CLIENTS, CLASSES = 20, 10
HONEST, ATTACKERS = 20, 5
MNIST_MEAN, MNIST_DEVIATION = 0.1307, 0.3081


def pfllib_fashion(
    folder: Path | None, seed: int, split: Literal["pathological", "dirichlet"], one_in: int = 1, validation: float = 0.0
) -> FederatedData:
    """Fashion-MNIST by 20 clients as in PFLlib, its 70,000 images pooled, pixels in [−1, 1]; a quarter of each client's tests.

    "pathological": clients 4j … 4j + 3 share classes 2j and 2j + 1, in the sizes that PFLlib's script draws with its seed 1.
    "dirichlet": the class counts of the Dirichlet(0.1) split that the authors publish, met exactly. Which images of a class a
    client gets, and which of them test, is drawn once: the same for all seeds. `one_in=n` keeps every n-th image.
    """
    path = data_file(folder, "fashion_mnist.npz", "arrays x_train, y_train, x_test, y_test")
    arrays = load_arrays(path, ("x_train", "y_train", "x_test", "y_test"))
    x = np.concatenate([arrays["x_train"], arrays["x_test"]])
    y = np.concatenate([arrays["y_train"], arrays["y_test"]]).astype(np.int64)
    counts = pathological_counts(y) if split == "pathological" else published_counts(folder)
    rows = deal_out(y, counts, shuffled=split == "dirichlet")
    assignment = [torch.from_numpy(chosen[::one_in]) for chosen in rows]
    packed = to_clients(torch.from_numpy(x), torch.from_numpy(y), assignment, scale=2 / 255, shift=-1.0, source=str(path))
    name = f"fashion_mnist, {split}"
    return split_examples(packed, validation=validation, test=0.25, seed=1, name=name, classes=CLASSES)


def published_counts(folder: Path | None) -> Integers:
    """How many images of each class each client has, (20, 10), in the published Dirichlet(0.1) split."""
    path = data_file(folder, COUNTS_FILE, "counts: 20 lists of 10 numbers")
    content = load_json(path)
    found = np.array(content.get("counts") if isinstance(content, dict) else None, dtype=object)
    if found.shape != (PFLLIB_CLIENTS, CLASSES) or not all(type(each) is int and each >= 0 for each in found.flat):
        raise InvalidData(f"{path}: 'counts' must be 20 lists of 10 whole numbers of at least 0.")
    return found.astype(np.int64)


def pathological_counts(y: Integers) -> Integers:
    """How many images of each class each client has, (20, 10): two classes, sizes as PFLlib's script draws them.

    Of the four clients of a class three have between a tenth of an even share and all of it, and the last has the rest.
    """
    drawn = np.random.RandomState(1)  # numpy's old generator, as in the script
    counts = np.zeros((PFLLIB_CLIENTS, CLASSES), dtype=np.int64)
    for label in range(CLASSES):
        clients = 4 * (label // 2) + np.arange(4)
        available = int((y == label).sum())
        even = available / 4
        sizes = drawn.randint(int(even / 10), int(even), 3)
        counts[clients, label] = [*sizes, available - sizes.sum()]
    return counts


def deal_out(y: Integers, counts: Integers, *, shuffled: bool) -> list[Integers]:
    """The rows of each client: counts[k, c] of class c, as in the file or shuffled; refuses counts that do not fit."""
    shares: list[list[Integers]] = [[] for _ in counts]
    for label in range(counts.shape[1]):
        rows = np.flatnonzero(y == label)
        if counts[:, label].sum() != len(rows):
            raise InvalidData(f"Class {label} has {len(rows)} images, but clients are to have {counts[:, label].sum()}.")
        if shuffled:
            rows = generator(1, "images of a class", label).permutation(rows)
        for share, part in zip(shares, np.split(rows, counts[:, label].cumsum()[:-1]), strict=True):
            share.append(part)
    return [np.concatenate(share) for share in shares]


@dataclass(frozen=True)
class MimicOneClient:
    """Every attacker sends what one honest client sends, the same in every round.

    The code of the bucketing paper takes the client that stands out in the first round, and keeps it. Here it is named.

    Source: Karimireddy, He, Jaggi 2022 (arXiv 2006.09365), its published code with a warm-up of one round.
    """

    target: int  # its place among the honest clients
    share: float = 0.2
    seed: int = 0
    omniscient: ClassVar[bool] = True

    def corrupt(self, sent: Sent) -> Tensor:
        """The target's update in place of each, (k, D)."""
        honest = sent.updates if sent.honest is None or len(sent.honest) == 0 else sent.honest
        return honest[self.target % len(honest)].expand(sent.updates.shape)


def attack_of(name: str, seed: int) -> Any:
    """The attacks of the bucketing paper's third experiment, with its parameters."""
    made = {
        "mimic": MimicOneClient(target=(7 * seed + 3) % HONEST),
        "sign flip": SignFlip(share=0.2),
        "label flip": LabelFlip(share=0.2),
        "IPM": IPM(share=0.2, epsilon=0.1),
        "ALIE": ALIE(share=0.2),
    }
    return made[name]


def bucketing_mnist(folder: Path | None, seed: int, attack: str, sorted_by_label: bool, one_in: int = 1) -> FederatedData:
    """MNIST by 20 honest clients of 3,000 images and 5 attackers; the usual test images are one test client.

    Honest clients have consecutive parts of the images sorted by label, or every 20th of them (a fair share of each class).
    Attackers have 3,000 images at random. `one_in=n` keeps every n-th test image.
    """
    x, y, test_x, test_y = mnist_images(folder)
    order = y.argsort(stable=True)
    size = len(y) // HONEST
    honest = [order[k * size : (k + 1) * size] if sorted_by_label else order[k::HONEST] for k in range(HONEST)]
    anyone = torch.from_numpy(generator(seed, "images of attackers").permutation(len(y)))
    assignment = [*honest, *(anyone[k * size : (k + 1) * size] for k in range(ATTACKERS))]
    bad = tuple(f"attacker-{k}" for k in range(ATTACKERS))
    look = {"scale": 1 / (255 * MNIST_DEVIATION), "shift": -MNIST_MEAN / MNIST_DEVIATION}
    ids = [*(f"honest-{k}" for k in range(HONEST)), *bad]
    train = to_clients(x, y, assignment, ids=ids, source="MNIST", **look)
    test = ClientSet.pack([("test", test_x[::one_in], test_y[::one_in])], source="MNIST", **look)
    made = attack_of(attack, seed)
    if (poison := attack_traits(made).poison) is not None:
        train = poison(train, bad, CLASSES)
    data = FederatedData(train, test=test, name=f"mnist, {attack}", classes=CLASSES)
    return replace(data, malicious=frozenset(bad), attack=made)
