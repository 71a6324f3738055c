"""Attacks of clients that each act alone: on their labels, on their examples, and on their own update."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Literal

import torch
from torch import Tensor

from equipoise.attacks.malicious import Sent, check_attack_parameters
from equipoise.core import rng
from equipoise.data.clients import ClientSet, Ragged
from equipoise.errors import InvalidData, require, require_number


def normal_noise(keys: Tensor, count: int) -> Tensor:
    """Standard normal numbers, (k, count) float64, by Box and Muller from each key's stream: the same on every engine."""
    half = -(-count // 2)
    bits = (rng.random_bits(keys, 0, 2 * half) >> 10).double() / 2.0**53  # as many as a double holds: below 1
    radius = (-2 * torch.log1p(-bits[:, :half])).sqrt()
    turn = 2 * math.pi * bits[:, half:]
    return torch.cat([radius * turn.cos(), radius * turn.sin()], 1)[:, :count]


def with_changed_labels(
    clients: ClientSet, chosen: tuple[str, ...], classes: int, change: Callable[[Tensor, str], Tensor]
) -> ClientSet:
    """The clients with the labels of the chosen ones changed by a function of labels and the client's id."""
    targets = clients.y
    if not isinstance(targets, Tensor | Ragged) or targets.is_floating_point() or classes < 2:
        raise InvalidData("Label poisoning needs classes as targets, in one tensor; these are numbers, or several tensors.")
    labels = (targets if isinstance(targets, Tensor) else targets.values).clone()
    for name, position in zip(chosen, clients.positions_of(chosen).tolist(), strict=True):
        rows = clients.rows(position)
        if isinstance(targets, Ragged):
            rows = slice(int(targets.offsets[rows.start]), int(targets.offsets[rows.stop]))
        labels[rows] = change(labels[rows], name).to(labels)
    return clients.with_targets(labels if isinstance(targets, Tensor) else replace(targets, values=labels))


def poison_labels(clients: ClientSet, chosen: tuple[str, ...], classes: int, seed: int) -> ClientSet:
    """The clients with the labels of the chosen ones poisoned: flipped where there are two classes, else uniformly random."""

    def poison(labels: Tensor, name: str) -> Tensor:
        if classes == 2:
            return 1 - labels
        return torch.as_tensor(rng.generator(seed, "poisoned labels", client=name).integers(0, classes, tuple(labels.shape)))

    return with_changed_labels(clients, chosen, classes, poison)


@dataclass(frozen=True)
class LabelPoisoning:
    """A1: malicious clients train as others do, but on wrong labels: flipped (two classes) or uniformly random (more).

    Source: Li 2023 (thesis), section 2.3, Definition 2 (A1).

    >>> honest = ClientSet.pack([("a", torch.zeros(3, 1), torch.tensor([0, 1, 1]))])
    >>> LabelPoisoning().poison(honest, ("a",), classes=2).y
    tensor([1, 0, 0])
    """

    share: float = 0.2  # the share of training clients that are malicious, in [0, 1]
    seed: int = 0  # which clients are malicious, and what is random in the attack

    def __post_init__(self) -> None:
        check_attack_parameters(self)

    def poison(self, clients: ClientSet, chosen: tuple[str, ...], classes: int) -> ClientSet:
        """The training clients with the labels of the chosen ones flipped or drawn at random.

        `chosen` are the ids of the malicious clients among `clients`, and `classes` is the number of classes.
        """
        return poison_labels(clients, chosen, classes, self.seed)


@dataclass(frozen=True)
class RandomUpdates:
    """A2: malicious clients send noise, `scale` · N(0, s²) in every parameter; s is the standard deviation of their own update.

    Source: Li 2023 (thesis), section 2.3, Definition 2 (A2).

    >>> sent = Sent(torch.tensor([[2.0, 2.0]]), keys=torch.tensor([0]), cohort=10)  # all numbers alike: s = 0
    >>> RandomUpdates().corrupt(sent).abs().tolist()
    [[0.0, 0.0]]
    """

    share: float = 0.2  # the share of training clients that are malicious, in [0, 1]
    seed: int = 0  # which clients are malicious, and what is random in the attack
    scale: float = 1.0  # multiplies s

    def __post_init__(self) -> None:
        check_attack_parameters(self)
        require_number("scale", self.scale, "[0, ∞)")

    def corrupt(self, sent: Sent) -> Tensor:
        """Gaussian noise (k, D) in place of the updates in `sent`, scaled to the spread of each."""
        spread = sent.updates.double().std(1, correction=0, keepdim=True) * self.scale
        keys = rng.client_keys(rng.stream_key(self.seed, "random updates"), sent.keys)
        return spread * normal_noise(keys, sent.updates.shape[1])


@dataclass(frozen=True)
class ModelReplacement:
    """A3: malicious clients scale their update by the number of clients in the round, so that it outweighs all others.

    `update` says what they scale: that of "poisoned" labels (as published), the honest update "negated", or the "honest" one.
    `factor` replaces the number of clients.

    Source: Li 2023 (thesis), section 2.3, Definition 2 (A3); Bagdasaryan et al. 2020.

    >>> sent = Sent(torch.tensor([[1.0, -2.0]]), keys=torch.tensor([0]), cohort=10)
    >>> ModelReplacement().corrupt(sent), ModelReplacement(update="negated").corrupt(sent)
    (tensor([[ 10., -20.]]), tensor([[-10.,  20.]]))
    """

    share: float = 0.1  # the share of training clients that are malicious, in [0, 1]
    seed: int = 0  # which clients are malicious, and what is random in the attack
    update: Literal["poisoned", "negated", "honest"] = "poisoned"  # which update they scale
    factor: float | None = None  # multiplies the update; None: the number of clients in the round

    def __post_init__(self) -> None:
        check_attack_parameters(self)
        allowed = ("poisoned", "negated", "honest")
        require(self.update in allowed, "update", 'must be "poisoned", "negated" or "honest"', self.update)
        require_number("factor", self.factor, "(0, ∞)", none="the size of the cohort")

    def poison(self, clients: ClientSet, chosen: tuple[str, ...], classes: int) -> ClientSet:
        """The training clients; if poisoned labels are what is scaled, with those of the chosen ones poisoned.

        `chosen` are the ids of the malicious clients among `clients`, and `classes` is the number of classes.
        """
        return poison_labels(clients, chosen, classes, self.seed) if self.update == "poisoned" else clients

    def corrupt(self, sent: Sent) -> Tensor:
        """The updates (k, D) in `sent` times the size of the cohort, or times `factor`; negated if asked for."""
        factor = float(self.factor if self.factor is not None else sent.cohort)
        return sent.updates * (-factor if self.update == "negated" else factor)


@dataclass(frozen=True)
class SignFlip:
    """Malicious clients train as others do and send the negative of their update.

    Other code uses this name for IPM(epsilon=1), or for a flip of every local gradient.

    Source: Karimireddy, He, Jaggi 2022 (arXiv 2006.09365).

    >>> SignFlip().corrupt(Sent(torch.tensor([[1.0, -2.0]]), keys=torch.tensor([0]), cohort=10))
    tensor([[-1.,  2.]])
    """

    share: float = 0.2  # the share of training clients that are malicious, in [0, 1]
    seed: int = 0  # which clients are malicious

    def __post_init__(self) -> None:
        check_attack_parameters(self)

    def corrupt(self, sent: Sent) -> Tensor:
        """The negative of each update in `sent`, (k, D)."""
        return -sent.updates


@dataclass(frozen=True)
class LabelFlip:
    """Malicious clients train as others do, but on labels C − 1 − y, for C classes. Applied twice it changes nothing.

    Source: Karimireddy, He, Jaggi 2022 (arXiv 2006.09365).

    >>> honest = ClientSet.pack([("a", torch.zeros(3, 1), torch.tensor([0, 1, 2]))])
    >>> LabelFlip().poison(honest, ("a",), classes=3).y
    tensor([2, 1, 0])
    """

    share: float = 0.2  # the share of training clients that are malicious, in [0, 1]
    seed: int = 0  # which clients are malicious

    def __post_init__(self) -> None:
        check_attack_parameters(self)

    def poison(self, clients: ClientSet, chosen: tuple[str, ...], classes: int) -> ClientSet:
        """The training clients with the labels of the chosen ones reversed.

        `chosen` are the ids of the malicious clients among `clients`, and `classes` is the number of classes.
        """
        return with_changed_labels(clients, chosen, classes, lambda labels, name: classes - 1 - labels)
