"""Evaluation on the nodes, in the open: the server asks for each client's loss, error and metrics, and names the silent."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from functools import partial
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.client_metrics import ClientMetrics
from equipoise.client_table import ClientTable
from equipoise.core.error_names import SHARES
from equipoise.core.words import counted
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.engines.flower.secure.evaluations import BY_POLICY, UNKNOWN, list_absent, unknown_table
from equipoise.engines.flower.transport.answer_readings import asked_metrics, wrong_scores
from equipoise.engines.flower.transport.messages import MessageContent
from equipoise.engines.flower.transport.messenger import ClientRequest, TooFewClients, show_faults
from equipoise.errors import notify

if TYPE_CHECKING:
    from equipoise.engines.flower.flower_engine import FlowerEngine


class NodeScores:
    """What the nodes of a federation score, client by client. `SecureEvaluation` is in its place where only sums are open."""

    def __init__(self, engine: FlowerEngine) -> None:
        self.engine = engine
        self.evaluated: dict[str, list[str]] = {}  # who answered the last evaluation, by split
        self.unanswered: dict[str, str] = {}  # who did not, and why

    def shared(self, params: Tensor, clients: ClientSet, which: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Mean loss and mean error of every client of a set, or of those at positions `which`, at one model: (n,) and (n,)."""
        split = next((name for name, holders in self.engine.data.splits.items() if holders is clients), "train")
        ids = clients.ids if which is None else [clients.ids[k] for k in which.tolist()]
        wanted = set(ids)
        members = self.engine.federation.members.items()
        there = [client for client, member in members if split in member.splits and not member.only_sums]
        asked = [client for client in there if which is None or client in wanted]
        scores = self._ask_at(params, asked)
        losses, errors = torch.stack([scores.get(client, {}).get(split, UNKNOWN) for client in ids], 1)
        return losses, errors

    def table(self, params: Tensor, data: FederatedData, metrics: ClientMetrics | None = None) -> ClientTable:
        """Every client of every split at `params`, in one exchange; clients that do not answer have no row, and are named."""
        engine, members = self.engine, self.engine.federation.members
        may = [client for client, member in members.items() if member.evaluates and not member.only_sums]
        scores = self._ask_at(params, may, metrics) if may else {}
        shares = engine.task.error_name in SHARES
        wrong = {client: why for client, found in scores.items() if (why := wrong_scores(found.values(), shares=shares))}
        if len(wrong) < len(scores):  # where all are wrong, the model is
            scores = {client: found for client, found in scores.items() if client not in wrong}
            self.unanswered |= wrong
        self.evaluated = {s: [i for i in clients.ids if s in scores.get(i, {})] for s, clients in data.splits.items()}
        if not may:
            return unknown_table(data)
        if not self.evaluated["train"]:
            raise TooFewClients("No client that trains has answered the evaluation.")
        reasons = {**engine.messenger.barred, **self.unanswered, **dict.fromkeys(members.keys() - may, BY_POLICY)}
        rows = [(client, split) for split, ids in self.evaluated.items() for client in ids]
        ids, splits = zip(*rows, strict=True)
        seen = set(data.train.ids)
        loss, error, *more = torch.stack([scores[client][split] for client, split in rows], 1)
        table = ClientTable(
            ids,
            splits,
            torch.tensor([client in seen for client in ids]),
            torch.tensor([members[client].splits[split] for client, split in rows]),
            loss,
            error,
            not_evaluated=list_absent(data, self.evaluated, reasons),
        )
        return table if metrics is None or not more else table.with_metrics(metrics, torch.stack(more))

    def _ask_at(
        self, params: Tensor, asked: Iterable[str], metrics: ClientMetrics | None = None
    ) -> dict[str, dict[str, Tensor]]:
        """Loss, error and metrics (2 + M,) of the shared model by client and split."""
        values = self.engine.request_values(self.engine.federation.seed, **asked_metrics(metrics))
        return self.ask("evaluate.scores", dict.fromkeys(asked, ClientRequest(values, {"params": params})), 0, metrics)

    def ask(
        self, action: str, left: Mapping[str, ClientRequest], round_index: int, metrics: ClientMetrics | None = None
    ) -> dict[str, dict[str, Tensor]]:
        """Loss, error and metrics by client and split; silent clients are asked again, as often as a round is tried."""
        messenger, minimum = self.engine.messenger, self.engine.patience.minimum
        scores: dict[str, dict[str, Tensor]] = {}
        reading = partial(self._read, 2 + len(metrics or ()))
        reasons: dict[str, str] = {}
        for number in self.engine.numbered_tries():
            left = {client: request for client, request in left.items() if client not in messenger.barred}
            if number and all(client in messenger.resting for client in left):
                break  # they have not even said who they are
            scores |= messenger.ask(action, left, round_index, reading)
            left = {client: request for client, request in left.items() if client not in scores}
            reasons = {client: messenger.faults.get(client, "") for client in left}
            if not left:
                break
        self.unanswered = reasons
        if left:
            notify(f"{counted(len(left), 'client')} could not be evaluated: {show_faults(reasons)}.")
        if len(scores) < min(minimum, len(scores) + len(left)):
            answered = f"{counted(len(scores), 'client')} answered the evaluation"
            raise TooFewClients(f"{answered}, and {minimum} are needed: {show_faults(reasons)}.")
        return scores

    def _read(self, count: int, answer: MessageContent) -> dict[str, Tensor]:
        if "lost" in answer.values:
            return {}
        splits = self.engine.data.splits
        return {split: answer.tensor(split, torch.float64, (count,)) for split in splits if split in answer.arrays}
