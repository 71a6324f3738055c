"""Evaluation by secure sums: means over clients, each found once, and who they leave out."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.client_table import MEAN_OF, NOT_EVALUATED, ClientTable
from equipoise.core.fingerprints import tensors_fingerprint
from equipoise.core.words import counted
from equipoise.engines.flower.secure.masked_sums import MaskedSums, PlannedSum, RequestMaker, split_of
from equipoise.engines.flower.secure.protections import WIDE, require_first
from equipoise.engines.flower.secure.sum_terms import OF_OWN, SCORES
from equipoise.engines.flower.transport.messenger import ClientRequest, TooFewClients
from equipoise.errors import EquipoiseError, notify
from equipoise.privacy.release_book import ReleaseBook

if TYPE_CHECKING:
    from equipoise.data.clients import FederatedData
    from equipoise.engines.flower.flower_engine import FlowerEngine

STEP_OF_SCORES = 2.0**-32
UNKNOWN = torch.full((2,), math.nan, dtype=torch.float64)  # loss and error
BY_POLICY = "allows no evaluations by its policy"  # why a client is not evaluated
NO_ANSWER = "sent no scores"


def list_absent(
    data: FederatedData, evaluated: Mapping[str, Collection[str]], reasons: Mapping[str, str]
) -> dict[str, dict[str, str]]:
    """By split, the clients that have it and were not evaluated, and why; splits of which nothing is known are left out."""
    absent = {}
    for split, ids in evaluated.items():
        there = set(ids)
        missing = [client for client in data.splits[split].ids if client not in there]
        if there and missing:
            absent[split] = {client: reasons.get(client) or NO_ANSWER for client in missing}
    return absent


def unknown_table(data: FederatedData) -> ClientTable:
    """The table of an evaluation that nobody may be asked for: one row without figures, of the training clients."""
    size, seen = torch.tensor([int(data.train.sizes.sum())]), torch.tensor([True])
    return ClientTable((NOT_EVALUATED,), ("train",), seen, size, *UNKNOWN.unsqueeze(1))


class SecureEvaluation:
    """Evaluation by sums: the mean loss and error of each split, over clients, in place of a row for each client.

    Each split is a sum of its own, over the clients that have it: a mean over fewer than the nodes' minimum crowd is not found.
    One model is evaluated once, also where rounds leave it as it is: the difference of two sums may be one client's scores.
    """

    def __init__(self, engine: FlowerEngine, book: ReleaseBook) -> None:
        self.engine, self.book = engine, book
        self.absent: dict[str, dict[str, str]] = {}  # by split: who is not in the last mean, and why
        self._told: set[str] = set()  # splits that were left out, each said once

    def table(self, params: Tensor, data: FederatedData, round_index: int) -> ClientTable:
        """One row per split, of the mean client: by examples where clients train, each client alike elsewhere."""
        values = self.engine.request_values(self.engine.federation.seed)
        model = tensors_fingerprint([("params", params)])
        means = self.means(data, round_index, lambda _: ClientRequest(values, {"params": params}), model=model)
        seen = set(data.train.ids)
        rows = {split: means.get(split, (UNKNOWN, 0)) for split in data.splits if split in means or split == "train"}
        losses, errors = torch.stack([pair for pair, _ in rows.values()], 1)
        return ClientTable(
            tuple(MEAN_OF.format(count) if count else NOT_EVALUATED for _, count in rows.values()),
            tuple(rows),
            torch.tensor([set(data.splits[split].ids) <= seen for split in rows]),
            torch.tensor([int(data.splits[split].sizes.sum()) for split in rows]),
            losses,
            errors,
            not_evaluated={split: found for split in rows if (found := self.absent.get(split))},
        )

    def means(
        self, data: FederatedData, round_index: int, base: RequestMaker, *, own: bool = False, model: str | None = None
    ) -> dict[str, tuple[Tensor, int]]:
        """Mean loss and error (2,) by split, at the shared model or at clients' own, and over how many clients.

        Splits that too few clients have are left out, with a notice. What was asked for before is not asked for again, as after
        a kill, or where `model`, a hash of the shared one, is that of an earlier evaluation. It is read from the ledger if it
        is there, and else not known.
        """
        shares = share_scores(data, trained_only=own)
        ask = {"kind": "scores", "step": STEP_OF_SCORES, "own": own}

        def with_sum(client: str) -> ClientRequest:
            request = base(client)
            return ClientRequest({**request.values, "sum": {**ask, "shares": shares[client]}}, request.tensors)

        planned = [each for split in data.splits if (each := self._plan(split, shares, own)) is not None]
        if not planned:
            return {}
        named = {each.purpose: self._name(each, data) for each in planned}
        earlier = {p: self.book.find_exact(name, model) if model is not None else None for p, name in named.items()}
        rounds = {purpose: round_index if found is None else found for purpose, found in earlier.items()}
        asked = [each for each in planned if not self.book.begun(rounds[each.purpose], named[each.purpose])]

        def begin(purpose: str, fewest: int) -> None:
            require_first(self.book.begin_exact(round_index, named[purpose], about=model), round_index, purpose)

        def sum_scores(_: int) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
            everyone = sorted({client for each in asked for client in each.clients or ()})
            sums = MaskedSums(self.engine, round_index, everyone)
            sums.prepare(asked, ClientRequest(self.engine.request_values(self.engine.federation.seed)))
            return sums.totals([each.purpose for each in asked], with_sum, begin)

        found = self._ask(sum_scores, [named[each.purpose] for each in asked], round_index) if asked else {}
        for purpose, (total, survivors) in found.items():
            loss, error, mass = (total.double() * STEP_OF_SCORES).unbind()
            mean = (torch.stack([loss, error]) / mass).tolist() if mass > 0 else None
            absent = self._find_absent(data, split_of(purpose), survivors, shares)
            self.book.end(round_index, named[purpose], {"pair": mean, "clients": len(survivors), "absent": absent})
        means, self.absent = {}, {}
        for each in planned:
            known = self.book.value(rounds[each.purpose], named[each.purpose]) or {"pair": None, "clients": 0}
            pair = UNKNOWN if known["pair"] is None else torch.tensor(known["pair"], dtype=torch.float64)
            means[split_of(each.purpose)] = pair, int(known["clients"])
            self.absent[split_of(each.purpose)] = dict(known.get("absent", {}))
        return means

    def _find_absent(
        self, data: FederatedData, split: str, survivors: Sequence[str], shares: Mapping[str, Mapping[str, float]]
    ) -> dict[str, str]:
        """The clients with a share in a split that are not in its sum, and why."""
        members, messenger = self.engine.federation.members, self.engine.messenger
        closed = {client: BY_POLICY for client in shares if not members[client].evaluates}
        found = list_absent(data, {split: survivors}, {**messenger.faults, **messenger.barred, **closed})
        return {client: why for client, why in found.get(split, {}).items() if client in shares}

    def _ask(
        self, work: Callable[[int], dict[str, tuple[Tensor, tuple[str, ...]]]], names: Sequence[str], round_index: int
    ) -> dict[str, tuple[Tensor, tuple[str, ...]]]:
        """The sums of an evaluation, tried again while nothing of them is out; nothing if they were lost half-way."""
        try:
            return self.engine.try_again(work)
        except (TooFewClients, EquipoiseError):
            if not any(self.book.begun(round_index, name) for name in names):
                raise
            text = f"The evaluation after round {round_index} was lost, and is not asked for again."
            notify(text)
            return {}

    def _name(self, planned: PlannedSum, data: FederatedData) -> str:
        """What the ledger calls a sum: whether clients that train are in it decides what the server learns of them."""
        trained = not set(data.train.ids).isdisjoint(planned.clients or ())
        return planned.purpose if trained else f"others: {planned.purpose}"

    def _plan(self, split: str, shares: Mapping[str, Mapping[str, float]], own: bool) -> PlannedSum | None:
        """The sum of a split over the clients that have it and may be asked; None if they are too few."""
        members = self.engine.federation.members
        having = tuple(client for client, own in shares.items() if own[split] > 0)
        holders = tuple(client for client in having if members[client].evaluates)
        crowd = max((members[client].minimum_crowd for client in holders), default=2)
        needed = max(crowd, self.engine.federation.choose_threshold(len(holders))[1])
        if len(holders) >= needed:
            return PlannedSum(SCORES + split + OF_OWN * own, 3, WIDE, holders)
        if split not in self._told:
            why = (
                f"{counted(len(holders), 'client')} may be asked, and a sum needs {needed}"
                if holders
                else "no client may be asked"
            )
            if barred := [client for client in having if client not in holders]:
                why += f". The policies of {', '.join(barred)} allow no exact evaluations; evaluate = true would"
            notify(f"The {split} examples are not evaluated: {why}.")
        self._told.add(split)
        return None


def share_scores(data: FederatedData, *, trained_only: bool) -> dict[str, dict[str, float]]:
    """What each client's scores count in the mean of each split: its share of the examples in train, one of n elsewhere."""
    clients = data.train.ids if trained_only else tuple(dict.fromkeys(i for c in data.splits.values() for i in c.ids))
    shares: dict[str, dict[str, float]] = {client: dict.fromkeys(data.splits, 0.0) for client in clients}
    for split, holders in data.splits.items():
        weights = holders.sizes.double() if split == "train" else torch.ones(len(holders), dtype=torch.float64)
        for client, share in zip(holders.ids, (weights / weights.sum()).tolist(), strict=True):
            if client in shares:
                shares[client][split] = share
    return shares
