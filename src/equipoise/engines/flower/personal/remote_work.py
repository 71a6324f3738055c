"""Personalisation over a network, seen from the server: clients' own models are trained, kept and evaluated on their nodes."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.core.abilities import read
from equipoise.engines.flower.transport.messages import MessageContent
from equipoise.engines.flower.transport.messenger import ClientRequest, efforts_of
from equipoise.engines.flower.transport.part_messages import pack_part
from equipoise.errors import EquipoiseError, IncompatibleParts, notify
from equipoise.personal.context import PersonalContext
from equipoise.personal.personal_run import PersonalState
from equipoise.types import Cohort, LocalSolver, Personalisation, PersonalTraits, SentUpdates

if TYPE_CHECKING:
    from equipoise.engines.flower.flower_engine import FlowerEngine


class RemotePersonalWork:
    """Personal work on the nodes. The server knows of each client the round it last took part in, and never its model.

    `places` of the state are 1 + that round, 0 for a client that never took part: by them a node finds the row that the
    server's state goes with.
    """

    def __init__(
        self, engine: FlowerEngine, method: Personalisation, context: PersonalContext, solver: LocalSolver, seed: int
    ) -> None:
        self.engine, self.method, self.context, self.solver, self.seed = engine, method, context, solver, seed
        self.traits, self.metrics = read(PersonalTraits, method), context.metrics
        self.first: Tensor | None = None  # w^0, from which a client begins its own model
        if self.traits.sums_models:
            raise IncompatibleParts(
                f"{method!r} needs what clients' own models add up to, and these stay on their nodes.",
                "Use personal.Ditto(), or run it in a simulation.",
            )

    @property
    def keeps_rows(self) -> bool:
        """Whether clients keep anything between rounds; else all personal work is done after training."""
        return self.method.width(self.engine.task.width) > 0

    def begin(self, params: Tensor, path: Path | None = None) -> PersonalState:
        """The state before the first round at w^0; nothing is written on the server."""
        _, shared = self.method.begin(self.context, params)
        if shared is not None:
            raise IncompatibleParts(
                f"{self.method!r} keeps something that all clients share, which no node has.",
                "Use personal.Ditto(), or run it in a simulation.",
            )
        self.first = params
        return PersonalState(torch.zeros(len(self.engine.data.train), dtype=torch.int64))

    def resume(self, params: Tensor, state: PersonalState, path: Path | None) -> None:
        """Go on from a checkpoint; `params` is w^0. The rows are on the nodes."""
        self.first = params

    def work(self, state: PersonalState, params: Tensor, cohort: Cohort, solver: LocalSolver) -> PersonalState:
        """The state after a round's personal work of the whole cohort, on the nodes."""
        if not self.keeps_rows or len(cohort) == 0:
            return state
        requests = self._requests(state, params, cohort, solver)
        answers = self.engine.ask("train.own", cohort, requests, lambda answer: "lost" in answer.values)
        self.engine.require_enough(cohort)
        places = state.places.clone()
        for k, client, lost in zip(cohort.clients.tolist(), self.engine.names(cohort), answers, strict=True):
            if lost is None:
                continue
            places[k] = 0 if lost else cohort.round + 1
            if lost:
                text = f"{client} has lost its own model, and begins anew with the next round it takes part in."
                notify(text)
        return PersonalState(places)

    def losses(self, state: PersonalState, params: Tensor, cohort: Cohort) -> Tensor | None:
        """None: the shared model's losses. A method whose risk sees other losses is refused with such a risk."""
        if self.traits.losses is None:
            return None
        raise IncompatibleParts(
            f"With {self.method!r} the risk sees the losses of clients' own models, which are not asked for over a network.",
            "Use risk.Mean(), or the simulator.",
        )

    def updates(self, state: PersonalState, params: Tensor, cohort: Cohort, solver: LocalSolver) -> SentUpdates | None:
        """What clients send, for a method that has them send something else than the solver's work.

        `params` may have carried values after the D parameters. Clients send those that they do not keep, unless they took no
        step.
        """
        if self.traits.updates is None or len(cohort) == 0:
            return None
        dimension, width = self.context.task.layout.dimension, self.context.task.carried.size
        withholds = self.traits.withholds_carried
        shared = width > 0 and withholds is not None and not bool(withholds(self.context.task).all())
        unknown = torch.full((width,), math.nan, dtype=torch.float64)

        def reading(answer: MessageContent) -> tuple[Tensor, Tensor]:
            counts = shared and "carried" in answer.arrays
            carried = answer.tensor("carried", torch.float64, (width,)) if counts else unknown
            return answer.tensor("update", params.dtype, (dimension,)), carried

        requests = self._requests(state, params, cohort, solver, send=True)
        answers = self.engine.ask("train.own", cohort, requests, reading)
        self.engine.require_some(cohort, answers)
        lost = torch.full_like(params[:dimension], math.nan), unknown
        updates, carried = (torch.stack(each) for each in zip(*(answer or lost for answer in answers), strict=True))
        return SentUpdates(updates, carried if shared else None)

    def _requests(
        self, state: PersonalState, params: Tensor, cohort: Cohort, solver: LocalSolver, **more: Any
    ) -> list[ClientRequest]:
        """What to ask each client of a cohort."""
        tensors: dict[str, Tensor] = {"params": params}
        packed = {"solver": pack_part("solver", solver, tensors), "personal": pack_part("personal", self.method, tensors)}
        new = {"first": self.first} if self.first is not None and not torch.equal(self.first, params) else {}
        requests = []
        for since, effort in zip(state.places[cohort.clients].tolist(), efforts_of(cohort), strict=True):
            values = self.engine.request_values(cohort.seed, since=since, effort=effort, **packed, **more)
            alone = since and not self.engine.federation.signed  # in a signed sum all nodes get the same tensors
            requests.append(ClientRequest(values, tensors if alone else tensors | new))
        return requests

    def models(self, state: PersonalState, params: Tensor, clients: Tensor, round_index: int) -> Tensor:
        """Refused: no client's own model comes to the server."""
        raise EquipoiseError("Clients' own models are on their nodes; the server never has them.")

    def scores(
        self, state: PersonalState, params: Tensor, round_index: int, sample: Mapping[str, Tensor] | None = None
    ) -> dict[str, tuple[Tensor, ...]]:
        """By split, loss, error and metrics of the clients in the table of this evaluation, each at its own model.

        There is no `sample` over a network: all nodes that answer are evaluated.
        """
        engine, clients = self.engine, self.engine.data.train
        alike = torch.ones(len(clients), dtype=torch.float64)
        everyone = Cohort(round_index, self.seed, torch.arange(len(clients)), alike, alike)
        asked = {"metrics": list(self.metrics.functions)} if len(self.metrics) else {}
        requests = dict(zip(clients.ids, self._requests(state, params, everyone, self.solver, **asked), strict=True))
        if engine.secure is not None:
            means = engine.secure.means(engine.data, round_index, requests.__getitem__, own=True)
            return {split: (pair[:1], pair[1:]) for split, (pair, _) in means.items()}
        if not any(engine.scores.evaluated.values()):  # nobody may be asked: the table has one row without figures
            return {"train": (torch.full((1,), math.nan, dtype=torch.float64),) * 2}
        asked_of = {client: requests[client] for client in engine.scores.evaluated["train"]}
        scores = engine.scores.ask("evaluate.own", asked_of, round_index, self.metrics)
        unknown = torch.full((2 + len(self.metrics),), math.nan, dtype=torch.float64)
        result = {}
        for split, ids in engine.scores.evaluated.items():
            both = [scores.get(client, {}).get(split) for client in ids]
            known = [unknown if numbers is None else finite_scores(numbers) for numbers in both]
            result[split] = tuple((torch.stack(known) if known else unknown.new_zeros(0, len(unknown))).unbind(1))
        return result

    def commit(self, state: PersonalState) -> PersonalState:
        """The nodes have written their rows."""
        return state

    def flush(self) -> None:
        """Nothing: each node writes its own row."""

    def on_saved(self, state: PersonalState) -> None:
        """Nothing: each node keeps the rows of its last two rounds."""


def finite_scores(scores: Tensor) -> Tensor:
    """Loss, error and metrics (2 + M,) of a client's own model; a loss or error that is no number has diverged."""
    return torch.cat([scores[:2].nan_to_num(nan=math.inf, posinf=math.inf), scores[2:]])
