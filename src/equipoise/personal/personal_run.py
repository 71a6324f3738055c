"""Personalisation in a run: who keeps what between rounds, and every client's own model at the end."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from equipoise.attacks.malicious import corrupted
from equipoise.core import rng
from equipoise.core.abilities import engine_traits, read
from equipoise.errors import InvalidParameter
from equipoise.personal.context import PersonalContext
from equipoise.personal.store import ClientRows, PendingRows
from equipoise.runs.tried_calls import copied, same_state
from equipoise.types import Cohort, LocalSolver, Personalisation, PersonalTraits, SentUpdates

_MODELS_BYTES = 256 * 2**20  # of clients' models at once, when all are looked at


@dataclass(frozen=True, eq=False)
class PersonalState:
    """Where the rows of clients are (see personal.store), and what their work adds up to."""

    places: Tensor  # (n,) uint8
    shared: Any = None
    pending: PendingRows | None = None  # of a round that is not finished


class PersonalRun:
    """A personalisation method at work in one run. The rows of clients are in a file, all else in the state.

    With `alone` the method is asked for one client at a time, as on a node, and a copy of it each time: nothing that one client
    has or sends can follow another's data. That is how a method of the user's own works under protection.
    """

    def __init__(
        self, method: Personalisation, context: PersonalContext, solver: LocalSolver, seed: int, *, alone: bool = False
    ) -> None:
        self.method, self.context, self.solver, self.seed, self.alone = method, context, solver, seed, alone
        self.clients = context.data.train
        self._traits = read(PersonalTraits, method)
        self._rows: ClientRows | None = None

    @property
    def keeps_rows(self) -> bool:
        """Whether clients keep anything between rounds; else all personal work is done after training."""
        return self.method.width(self.context.task.width) > 0

    def begin(self, params: Tensor, path: Path | None = None) -> PersonalState:
        """The state before the first round at w^0; rows go to a new file at `path`, or a temporary one."""
        first, shared = self.method.begin(self.context, params)
        if self.keeps_rows:
            self._rows = ClientRows(first, len(self.clients), path)
        return PersonalState(torch.zeros(len(self.clients), dtype=torch.uint8), shared)

    def resume(self, params: Tensor, state: PersonalState, path: Path | None) -> None:
        """Open the rows of a run that goes on from a checkpoint; `params` is w^0."""
        if self.keeps_rows:
            first, _ = self.method.begin(self.context, params)
            self._rows = ClientRows(first, len(self.clients), path, places=state.places)

    def flush(self) -> None:
        """Write the rows to disk, before a checkpoint is written."""
        if self._rows is not None:
            self._rows.flush()

    def on_saved(self, state: PersonalState) -> None:
        """A checkpoint with this state was written: rows that only older ones need may be written over."""
        if self._rows is not None:
            self._rows.on_saved(state.places)

    @property
    def rows(self) -> ClientRows:
        """The rows of all clients."""
        if self._rows is None:
            raise InvalidParameter("personal", "must have begun", type(self.method).__name__)
        return self._rows

    def work(self, state: PersonalState, params: Tensor, cohort: Cohort, solver: LocalSolver) -> PersonalState:
        """A round's personal work of the whole cohort, also of clients that have no weight in the shared model."""
        if not self.keeps_rows or len(cohort) == 0:
            return state
        rows = self.rows.read(state.places, cohort.clients).to(params)
        before = copied(state.shared)
        answers = self._asked("work", params, cohort, rows, solver, state.shared)
        shared, after = answers[-1][1], _joined([own for own, _ in answers])
        same = all(each is state.shared for _, each in answers) and same_state(state.shared, before)
        if not (same or self._traits.sums_models):
            rule = "must say sums_models = True in its class, since its work changes what all clients share"
            raise InvalidParameter("personal", rule, self.method, "Or return `shared` as it was given.")
        return PersonalState(state.places, shared, PendingRows(state.places, cohort.clients, after))

    def commit(self, state: PersonalState) -> PersonalState:
        """Write the rows of a round that is finished."""
        return state if state.pending is None else PersonalState(self.rows.write(*state.pending), state.shared)

    def losses(self, state: PersonalState, params: Tensor, cohort: Cohort) -> Tensor | None:
        """The losses (K,) that the risk sees, if they are not those of the shared model."""
        if self._traits.losses is None or len(cohort) == 0:
            return None
        rows = self.rows.read(state.places, cohort.clients).to(params)
        losses: Tensor = _joined(self._asked("losses", params, cohort, rows))
        return losses

    def updates(self, state: PersonalState, params: Tensor, cohort: Cohort, solver: LocalSolver) -> SentUpdates | None:
        """What clients send, if it is not the update of the solver's work."""
        if self._traits.updates is None or len(cohort) == 0:
            return None
        rows = self._rows_of(state, params, cohort.clients)
        sent = _joined(self._asked("updates", params, cohort, rows, solver))
        if sent is None:
            return None
        stream = rng.stream_key(cohort.seed, "batches", cohort.round)
        keys = rng.client_keys(stream, self.clients.keys.cpu()[cohort.clients]).to(sent.device)
        sent = corrupted(self.context.data, sent, cohort.clients, keys, len(cohort), cohort.shares, whole_cohort=True)
        sends = self._traits.sends_carried is not None
        return SentUpdates(sent, _joined(self._asked("sends_carried", params, cohort, rows, solver)) if sends else None)

    def _asked(self, what: str, params: Tensor, cohort: Cohort, rows: Tensor, *more: Any) -> list[Any]:
        """What the method gives for a cohort, or for each of its clients alone."""
        if not self.alone or not len(cohort):
            return [getattr(self.method, what)(self.context, params, cohort, rows, *more)]
        ones = (replace(cohort.take(torch.tensor([k])), weights=torch.ones(1).double()) for k in range(len(cohort)))
        pairs = zip(ones, torch.split(rows, 1), strict=True)
        return [getattr(copied(self.method), what)(self.context, params.clone(), *pair, *more) for pair in pairs]

    def _rows_of(self, state: PersonalState, params: Tensor, clients: Tensor) -> Tensor:
        """What clients at positions (K,) keep, (K, width), like `params`."""
        if not self.keeps_rows:
            return torch.empty(len(clients), 0, dtype=params.dtype, device=params.device)
        if state.pending is not None:
            place = {client: number for number, client in enumerate(state.pending.clients.tolist())}
            return state.pending.rows[[place[client] for client in clients.tolist()]].to(params)
        return self.rows.read(state.places, clients).to(params)

    def models(self, state: PersonalState, params: Tensor, clients: Tensor, round_index: int) -> Tensor:
        """The models (K, D) of training clients at positions (K,), when the shared model is `params`.

        A client that has never taken part in a round is served the shared model, unless all clients finetune.
        """
        even = torch.full((len(clients),), 1 / max(1, len(clients)), dtype=torch.float64)
        cohort = Cohort(round_index, self.seed, clients, even, torch.ones_like(even)).after_training()
        rows = self._rows_of(state, params, clients)
        with torch.enable_grad():  # finetuning takes gradients, also inside a user's no_grad
            models: Tensor = _joined(self._asked("models", params, cohort, rows, self.solver, state.shared))
        if self.keeps_rows and not (self._traits.finetunes or self._traits.serves_all):
            never = (state.places[clients] == 0).to(models.device)
            models = torch.where(never.unsqueeze(1), params, models)
        return models

    def all_models(self, state: PersonalState, params: Tensor, round_index: int) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions (k,) and models (k, D) of all training clients, a few at a time."""
        return self._models_of(torch.arange(len(self.clients)), state, params, round_index)

    def _models_of(
        self, positions: Tensor, state: PersonalState, params: Tensor, round_index: int
    ) -> Iterator[tuple[Tensor, Tensor]]:
        """Positions (k,) and models (k, D) of some training clients, a few at a time."""
        for clients in torch.split(positions, max(1, _MODELS_BYTES // (8 * params.nbytes))):
            yield clients, self.models(state, params, clients, round_index)

    def scores(
        self, state: PersonalState, params: Tensor, round_index: int, sample: Mapping[str, Tensor] | None = None
    ) -> dict[str, tuple[Tensor, ...]]:
        """Per split, mean loss, mean error and metrics of every client at its own model; NaN for clients without one.

        Of the splits in `sample`, those at the given positions only.
        """
        splits, metrics = self.context.data.splits, self.context.metrics
        measure = engine_traits(self.context.engine).measure if len(metrics) else None
        rows = {split: torch.arange(len(clients)) for split, clients in splits.items()} | dict(sample or {})
        owners = {
            split: rows[split] if split == "train" else self.clients.find(clients.select(rows[split]))
            for split, clients in splits.items()
        }
        columns = 2 + (len(metrics) if measure is not None else 0)
        table = {s: torch.full((columns, len(chosen)), float("nan"), dtype=torch.float64) for s, chosen in rows.items()}
        if not any(bool((who >= 0).any()) for split, who in owners.items() if split != "train") and len(splits) > 1:
            owners = {"train": owners["train"]}  # no further examples of these clients: judged on what they trained on
        having = torch.unique(torch.cat(list(owners.values())))
        for clients, models in self._models_of(having[having >= 0], state, params, round_index):
            for split, who in owners.items():
                here = ((who >= clients[0]) & (who <= clients[-1])).nonzero().flatten()
                if len(here):
                    own = models[torch.searchsorted(clients, who[here]).to(models.device)]
                    scores = torch.stack(self.context.engine.evaluate_own(own, splits[split], rows[split][here]))
                    table[split][:2, here] = scores.nan_to_num(nan=math.inf, posinf=math.inf)  # diverged; not without a model
                    if measure is not None:
                        table[split][2:, here] = measure(own, splits[split], metrics, rows[split][here])
        return {split: tuple(values) for split, values in table.items()}


def _joined(answers: list[Any]) -> Any:
    """The rows of several answers below each other; None where all are."""
    return answers[0] if len(answers) == 1 or all(each is None for each in answers) else torch.cat(answers)
