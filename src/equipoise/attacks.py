"""Malicious clients: who they are, what they do to their data, and what they send in place of their update.

`apply(data, attack)` draws the malicious clients, poisons their training examples and marks them in the data. Engines then let
them send what the attack makes of their updates, and results tell benign clients from malicious ones.

Source: Li 2023 (thesis), section 2.3, Definition 2: A1 label poisoning, A2 random updates, A3 model replacement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, Literal

import torch
from torch import Tensor

from equipoise.core import rng
from equipoise.core.abilities import attack_traits, is_part
from equipoise.core.trees import map_tree
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.data.ragged import Ragged
from equipoise.errors import InvalidData, InvalidParameter, is_integer, require, require_number
from equipoise.types import Attack


@dataclass(frozen=True, eq=False)
class Sent:
    """What malicious clients would send after honest work, and what else an attack on updates may use."""

    updates: Tensor  # (k, D) of the malicious clients
    keys: Tensor  # (k,) int64, a random stream for each of them in this round
    cohort: int  # how many clients send an update in this round


def malicious_clients(clients: ClientSet, share: float, seed: int) -> tuple[str, ...]:
    """The ids of a share of the clients, to the nearest; the order of clients does not matter."""
    count = int(share * len(clients) + 0.5)
    keys = rng.client_keys(rng.stream_key(seed, "malicious clients"), clients.keys.cpu())
    return clients.ids_at(rng.random_bits(keys, 0, 1)[:, 0].argsort(stable=True)[:count].sort().values)


def apply(data: FederatedData, attack: Attack) -> FederatedData:
    """The data with malicious clients: their training examples poisoned, and their ids and the attack kept in it.

    Validation and test examples stay as they are; results are judged on benign clients.

    Source: Li 2023 (thesis), section 2.3, Definition 2.
    """
    if not is_part(attack, "share", "seed"):
        raise InvalidParameter("attack", "must be an attack with a share and a seed", attack, "E.g. attacks.LabelPoisoning().")
    require(isinstance(data, FederatedData), "data", "must be FederatedData", type(data).__name__, "Write apply(data, attack).")
    _check(attack)
    if data.attack is not None:
        raise InvalidParameter("data", "must not be under attack already", data.attack, "Apply the attack to the clean data.")
    chosen = malicious_clients(data.train, attack.share, attack.seed)
    train = data.train
    poison = attack_traits(attack).poison
    if chosen and poison is not None:
        train = poison(train, chosen, data.classes)
        if not isinstance(train, ClientSet) or train.ids != data.train.ids:
            raise InvalidData(f"{attack!r} must keep the clients and their order: poison(…) gives them as a ClientSet.")
        if data.has_ignored:
            train = train.with_targets(map_tree(partial(_keep_ignored, ignore=data.ignore_index), train.y, data.train.y))
    return replace(data, train=train, malicious=frozenset(chosen), attack=attack, name=f"{data.name} under {attack!r}")


def _keep_ignored(poisoned: Any, honest: Any, ignore: int) -> Any:
    """Poisoned targets with the ignored ones as they were: nobody learns from those."""
    if isinstance(honest, Ragged):
        return replace(poisoned, values=_keep_ignored(poisoned.values, honest.values, ignore))
    return torch.where(honest == ignore, honest, poisoned)


def corrupted(data: FederatedData, updates: Tensor, clients: Tensor, keys: Tensor, cohort: int) -> Tensor:
    """Updates (k, D) of the clients at positions (k,) as they arrive: those of malicious clients as the attack makes them.

    What arrives in another length or shape is no update: it becomes NaN, which the round rejects and names.
    """
    corrupt = attack_traits(data.attack).corrupt if data.malicious else None
    if corrupt is None:
        return updates
    bad = torch.tensor([data.train.ids[i] in data.malicious for i in clients.tolist()], device=updates.device)
    if not bool(bad.any()):
        return updates
    sent = corrupt(Sent(updates[bad], keys[bad.to(keys.device)], cohort))
    good = isinstance(sent, Tensor) and sent.shape == updates[bad].shape
    changed = updates.clone()
    changed[bad] = sent.to(updates) if good else math.nan
    return changed


def normal_noise(keys: Tensor, count: int) -> Tensor:
    """Standard normal numbers, (k, count) float64, by Box and Muller from each key's stream: the same on every engine."""
    half = -(-count // 2)
    bits = (rng.random_bits(keys, 0, 2 * half) >> 10).double() / 2.0**53  # as many as a double holds: below 1
    radius = (-2 * torch.log1p(-bits[:, :half])).sqrt()
    turn = 2 * math.pi * bits[:, half:]
    return torch.cat([radius * turn.cos(), radius * turn.sin()], 1)[:, :count]


def poison_labels(clients: ClientSet, chosen: tuple[str, ...], classes: int, seed: int) -> ClientSet:
    """The clients with the labels of the chosen ones poisoned: flipped where there are two classes, else uniformly random."""
    targets = clients.y
    if not isinstance(targets, Tensor | Ragged) or targets.is_floating_point() or classes < 2:
        raise InvalidData("Label poisoning needs classes as targets, in one tensor; these are numbers, or several tensors.")
    labels = (targets if isinstance(targets, Tensor) else targets.values).clone()
    for name, position in zip(chosen, clients.positions_of(chosen).tolist(), strict=True):
        rows = clients.rows(position)
        if isinstance(targets, Ragged):
            rows = slice(int(targets.offsets[rows.start]), int(targets.offsets[rows.stop]))
        if classes == 2:
            labels[rows] = 1 - labels[rows]
        else:
            drawn = rng.generator(seed, "poisoned labels", client=name).integers(0, classes, tuple(labels[rows].shape))
            labels[rows] = torch.as_tensor(drawn).to(labels)
    return clients.with_targets(labels if isinstance(targets, Tensor) else replace(targets, values=labels))


def _check(attack: Attack) -> None:
    require_number("share", attack.share, "[0, 1]")
    good = is_integer(attack.seed) and 0 <= attack.seed < 2**63
    require(good, "seed", "must be a whole number from 0 to 2^63 − 1", attack.seed)


@dataclass(frozen=True)
class LabelPoisoning:
    """A1: malicious clients work as they are told, on wrong labels: flipped (two classes) or uniformly random (more).

    A `share` of the training clients is malicious, drawn by `seed`.

    Source: Li 2023 (thesis), section 2.3, Definition 2 (A1).
    """

    share: float = 0.2
    seed: int = 0

    def __post_init__(self) -> None:
        _check(self)

    def poison(self, clients: ClientSet, chosen: tuple[str, ...], classes: int) -> ClientSet:
        """The training clients with the labels of the chosen ones flipped or drawn at random."""
        return poison_labels(clients, chosen, classes, self.seed)


@dataclass(frozen=True)
class RandomUpdates:
    """A2: malicious clients send noise, N(0, s²) in every parameter, s being the standard deviation of their own update.

    `scale` multiplies s.

    Source: Li 2023 (thesis), section 2.3, Definition 2 (A2).
    """

    share: float = 0.2
    seed: int = 0
    scale: float = 1.0

    def __post_init__(self) -> None:
        _check(self)
        require_number("scale", self.scale, "[0, ∞)")

    def corrupt(self, sent: Sent) -> Tensor:
        """Gaussian noise (k, D) in place of the updates, scaled to the spread of each."""
        spread = sent.updates.double().std(1, correction=0, keepdim=True) * self.scale
        keys = rng.client_keys(rng.stream_key(self.seed, "random updates"), sent.keys)
        return spread * normal_noise(keys, sent.updates.shape[1])


@dataclass(frozen=True)
class ModelReplacement:
    """A3: malicious clients scale their update by the number of clients in the round, so that it outweighs all others.

    `update` says what they scale: that of "poisoned" labels (as published), the honest update "negated", or the "honest" one.
    `factor` replaces the number of clients.

    Source: Li 2023 (thesis), section 2.3, Definition 2 (A3); Bagdasaryan et al. 2020.
    """

    share: float = 0.1
    seed: int = 0
    update: Literal["poisoned", "negated", "honest"] = "poisoned"
    factor: float | None = None

    def __post_init__(self) -> None:
        _check(self)
        allowed = ("poisoned", "negated", "honest")
        require(self.update in allowed, "update", 'must be "poisoned", "negated" or "honest"', self.update)
        require_number("factor", self.factor, "(0, ∞)", none="the size of the cohort")

    def poison(self, clients: ClientSet, chosen: tuple[str, ...], classes: int) -> ClientSet:
        """The training clients, with poisoned labels of the chosen ones if these are what is scaled."""
        return poison_labels(clients, chosen, classes, self.seed) if self.update == "poisoned" else clients

    def corrupt(self, sent: Sent) -> Tensor:
        """The updates (k, D) times the size of the cohort, or times `factor`; negated if asked for."""
        factor = float(self.factor if self.factor is not None else sent.cohort)
        return sent.updates * (-factor if self.update == "negated" else factor)
