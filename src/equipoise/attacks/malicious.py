"""Malicious clients: who they are, what they do to their data, and what they send in place of their update.

`apply(data, attack)` draws the malicious clients, poisons their training examples and marks them in the data. Engines then let
them send what the attack makes of their updates, and results tell benign clients from malicious ones.

Source: Li 2023 (thesis), section 2.3, Definition 2: A1 label poisoning, A2 random updates, A3 model replacement.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from equipoise.core import rng
from equipoise.core.abilities import attack_traits, is_of_user, is_part
from equipoise.core.carried import mean_carried
from equipoise.core.trees import map_tree
from equipoise.core.update_checks import as_local_work
from equipoise.data.clients import ClientSet, FederatedData, Ragged
from equipoise.errors import InvalidData, InvalidParameter, is_integer, require, require_kind, require_number
from equipoise.types import Aggregator, Attack, Cohort, LocalWork


@dataclass(frozen=True, eq=False)
class Sent:
    """The updates that malicious clients would send after honest work, and what else an attack on updates may use.

    >>> sent = Sent(torch.tensor([[1.0, -2.0]]), keys=torch.tensor([0]), cohort=10)
    >>> len(sent.updates), sent.cohort, sent.honest  # one malicious client in a round of ten
    (1, 10, None)
    """

    updates: Tensor  # (k, D) of the malicious clients
    keys: Tensor  # (k,) int64, a random stream for each of them in this round
    cohort: int  # how many clients send an update in this round
    honest: Tensor | None = None  # (h, D) of the other clients of the round, for attacks that see them (`omniscient`)
    honest_names: Tensor | None = None  # (h,) int64, a number of each of these clients, the same in every round
    weights: Tensor | None = None  # (k,) float64, π_k of the malicious clients in the aggregate, where it is known


def malicious_clients(clients: ClientSet, share: float, seed: int) -> tuple[str, ...]:
    """The ids of a share of the clients, to the nearest whole number of them; the order of clients does not matter.

    `clients` are the training clients, `share` is in [0, 1], and `seed` decides who is drawn.

    >>> clients = ClientSet.pack([(name, torch.zeros(1, 1), torch.tensor([0])) for name in "abcde"])
    >>> len(malicious_clients(clients, share=0.5, seed=0))  # 2.5, rounded up
    3
    """
    count = int(share * len(clients) + 0.5)
    keys = rng.client_keys(rng.stream_key(seed, "malicious clients"), clients.keys.cpu())
    return clients.ids_at(rng.random_bits(keys, 0, 1)[:, 0].argsort(stable=True)[:count].sort().values)


def apply(data: FederatedData, attack: Attack) -> FederatedData:
    """The data with malicious clients: their training examples poisoned, and their ids and the attack kept in it.

    Validation and test examples stay as they are; results are judged on benign clients.

    `data` are clean data, and `attack` says which share of the training clients is malicious and what they do.

    Source: Li 2023 (thesis), section 2.3, Definition 2.

    >>> from equipoise.attacks import LabelFlip
    >>> clients = ClientSet.pack([(name, torch.zeros(1, 1), torch.tensor([0])) for name in "abcd"])
    >>> attacked = apply(FederatedData(clients, classes=2), LabelFlip(share=0.5))
    >>> len(attacked.malicious), int(attacked.train.y.sum())  # two of four clients, each with its label 0 made 1
    (2, 2)
    """
    require_kind("attack", "attack", attack)
    if not is_part(attack, "share", "seed"):
        raise InvalidParameter("attack", "must be an attack with a share and a seed", attack, "E.g. attacks.LabelPoisoning().")
    require(isinstance(data, FederatedData), "data", "must be FederatedData", type(data).__name__, "Write apply(data, attack).")
    check_attack_parameters(attack)
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


def sees_all_updates(data: FederatedData) -> bool:
    """Whether malicious clients see all updates of a round, so that an engine must have them all before anyone sends."""
    return bool(data.malicious) and attack_traits(data.attack).omniscient


def corrupted(
    data: FederatedData, updates: Tensor, clients: Tensor, keys: Tensor, cohort: int, shares: Tensor | None = None, *,
    whole_cohort: bool = False,
) -> Tensor:  # fmt: skip
    """Updates (k, D) of the clients at positions (k,) as they arrive: those of malicious clients as the attack makes them.

    `shares` (k,) are the clients' weights in the aggregate. An attack that sees all updates of a round waits until it is given
    the `whole_cohort`; another one of the user's own is asked client by client. What arrives in another length or shape is no
    update: it becomes NaN, which the round rejects and names.
    """
    traits = attack_traits(data.attack)
    corrupt = traits.corrupt if data.malicious else None
    if corrupt is None or (traits.omniscient and not whole_cohort):
        return updates
    bad = torch.tensor([data.train.ids[i] in data.malicious for i in clients.tolist()], device=updates.device)
    if not bool(bad.any()):
        return updates
    honest, names = (None, None)
    if traits.omniscient:
        honest, names = updates[~bad], data.train.keys[clients.to(data.train.keys.device)].cpu()[~bad.cpu()]
    own, streams = updates[bad], keys[bad.to(keys.device)]
    weights = None if shares is None else shares[bad.to(shares.device)]
    alone = is_of_user(data.attack) and not traits.omniscient  # then a client sees no update but its own
    parts = [slice(k, k + 1) for k in range(len(own))] if alone else [slice(None)]
    sent = [corrupt(Sent(own[k], streams[k], cohort, honest, names, None if weights is None else weights[k])) for k in parts]
    good = all(isinstance(each, Tensor) and each.shape == own[k].shape for each, k in zip(sent, parts, strict=True))
    changed = updates.clone()
    changed[bad] = torch.cat(sent).to(updates) if good else math.nan
    return changed


def corrupted_work(data: FederatedData, work: LocalWork, params: Tensor, cohort: Cohort) -> LocalWork:
    """Updates (K, D) of a whole cohort as they arrive, where malicious clients see all of them before they send."""
    names = data.train.keys[cohort.clients.to(data.train.keys.device)].cpu()
    keys = rng.client_keys(rng.stream_key(cohort.seed, "batches", cohort.round), names)
    sent = corrupted(data, work.update, cohort.clients, keys, len(cohort), cohort.shares, whole_cohort=True)
    return replace(as_local_work(sent, params, work.losses), rows=work.rows)


def summed_rows(work: LocalWork, weights: Tensor, aggregator: Aggregator) -> LocalWork:
    """Updates (K, D) as the total (D,) of a linear aggregator; those that cannot be used are left out."""
    arrived = torch.isfinite(work.sq_norms)
    here = arrived.to(work.update.device)
    total = aggregator(work.update[here], weights.to(work.update.device)[here])[0]
    known = None if work.carried is None else work.carried[arrived]
    return replace(work, update=total, carried=mean_carried(known, weights[arrived].tolist()))


def check_attack_parameters(attack: Attack) -> None:
    """Refuse a share outside [0, 1] and a seed that is no integer from 0 to 2^63 − 1."""
    require_number("share", attack.share, "[0, 1]")
    good = is_integer(attack.seed) and 0 <= attack.seed < 2**63
    require(good, "seed", "must be a whole number from 0 to 2^63 − 1", attack.seed)
