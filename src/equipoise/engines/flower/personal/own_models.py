"""Personalisation over a network: clients' own models are trained, kept and evaluated on their nodes."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.engines.flower.transport import part_messages as parts
from equipoise.engines.flower.transport.messages import Parcel
from equipoise.engines.flower.transport.nodes import Request
from equipoise.errors import EquipoiseError, EquipoiseNotice, IncompatibleParts
from equipoise.personal.context import PersonalContext
from equipoise.personal.personal_run import PersonalRun, PersonalState
from equipoise.types import Cohort, LocalSolver

if TYPE_CHECKING:
    from equipoise.engines.flower.engine import FlowerEngine

_UNKNOWN = torch.full((2,), float("nan"), dtype=torch.float64)


class _OnNodes:
    """Where rows would be written in a simulation: here each node keeps its own (see keep.KeptRows)."""

    def flush(self) -> None: ...

    def on_saved(self, places: Tensor) -> None: ...


class RemotePersonalRun(PersonalRun):
    """Personalisation on the nodes. The server knows of each client the round it last took part in, and never its model.

    `places` of the state are 1 + that round, 0 for a client that never took part: by them a node finds the row that the
    server's state goes with.
    """

    def __init__(self, engine: FlowerEngine, method: Any, context: PersonalContext, solver: LocalSolver, seed: int) -> None:
        super().__init__(method, context, solver, seed)
        self.engine = engine
        self.first: Tensor | None = None
        if getattr(method, "sums_models", False):
            raise IncompatibleParts(
                f"{method!r} needs what clients' own models add up to, and these stay on their nodes.",
                "Use personal.Ditto(), or run it in a simulation.",
            )

    @property
    def rows(self) -> Any:
        return _OnNodes()

    def begin(self, params: Tensor, path: Any = None) -> PersonalState:
        _, shared = self.method.begin(self.context, params)
        if shared is not None:
            raise IncompatibleParts(
                f"{self.method!r} keeps something that all clients share, which no node has.",
                "Use personal.Ditto(), or run it in a simulation.",
            )
        self.first = params
        return PersonalState(torch.zeros(len(self.clients), dtype=torch.int64))

    def resume(self, params: Tensor, state: PersonalState, path: Any) -> None:
        self.first = params

    def work(self, state: PersonalState, params: Tensor, cohort: Cohort, solver: LocalSolver) -> PersonalState:
        """A round's personal work of the whole cohort, on the nodes."""
        if not self.keeps_rows or len(cohort) == 0:
            return state
        found = self._ask("train.own", state, params, cohort, solver, lambda parcel: parcel.values.get("lost", ""))
        self.engine.require_enough(cohort)
        places = state.places.clone()
        for k, client, answer in zip(cohort.clients.tolist(), self.engine.names(cohort), found, strict=True):
            if answer is None:
                continue
            places[k] = 0 if answer else cohort.round + 1
            if answer:
                text = f"{client} has lost its own model, and begins anew with the next round it takes part in."
                warnings.warn(EquipoiseNotice(text), stacklevel=2)
        return PersonalState(places)

    def updates(self, state: PersonalState, params: Tensor, cohort: Cohort, solver: LocalSolver) -> Tensor | None:
        """What clients send (K, D), for a method that has them send something else than the solver's work."""
        if not hasattr(self.method, "updates") or len(cohort) == 0:
            return None

        def reading(parcel: Parcel) -> Tensor:
            return parcel.tensor("update", params.dtype, tuple(params.shape))

        found = self._ask("train.own", state, params, cohort, solver, reading, send=True)
        self.engine.require_some(cohort, found)
        return torch.stack([torch.full_like(params, math.nan) if update is None else update for update in found])

    def _ask(
        self,
        action: str,
        state: PersonalState,
        params: Tensor,
        cohort: Cohort,
        solver: LocalSolver,
        reading: Callable[[Parcel], Any],
        **more: Any,
    ) -> list[Any]:
        request = self._request(state, params, cohort.seed, solver, cohort.effort, **more)
        return self.engine.ask(action, cohort, lambda place: request(int(cohort.clients[place]), place), reading)

    def _request(
        self, state: PersonalState, params: Tensor, seed: int, solver: LocalSolver, effort: Tensor | None, **more: Any
    ) -> Callable[[int, int], Request]:
        tensors: dict[str, Tensor] = {"params": params}
        packed = {"solver": parts.packed("solver", solver, tensors), "personal": parts.packed("personal", self.method, tensors)}

        def request(k: int, place: int) -> Request:
            since, sent = int(state.places[k]), dict(tensors)
            if since == 0 and self.first is not None and not torch.equal(self.first, params):
                sent["first"] = self.first
            done = int(effort[place]) if effort is not None else None
            return Request(self.engine.values(seed, since=since, effort=done, **packed, **more), sent)

        return request

    def models(self, state: PersonalState, params: Tensor, clients: Tensor, round_index: int) -> Tensor:
        """Not here."""
        raise EquipoiseError("Clients' own models are on their nodes; the server never has them.")

    def scores(self, state: PersonalState, params: Tensor, round_index: int) -> dict[str, tuple[Tensor, Tensor]]:
        """Per split, loss and error of the clients in the table of the same evaluation, each at its own model."""
        number = {client: k for k, client in enumerate(self.clients.ids)}
        request = self._request(state, params, self.seed, self.solver, None)
        if self.engine.secure is not None:
            means = self.engine.secure.means(
                self.engine.data, round_index, lambda client: request(number[client], 0), own=True
            )  # fmt: skip
            return {split: (pair[:1], pair[1:]) for split, pair in means.items()}
        asked = [client for client in self.engine.rows["train"] if client in number]
        found = self.engine.ask_all("evaluate.own", asked, lambda client: request(number[client], 0), round_index)
        result = {}
        for split, ids in self.engine.rows.items():
            both = [found.get(client, {}).get(split) for client in ids]
            known = [_UNKNOWN if pair is None else pair.nan_to_num(nan=math.inf, posinf=math.inf) for pair in both]
            table = torch.stack(known) if known else torch.zeros(0, 2, dtype=torch.float64)
            result[split] = (table[:, 0], table[:, 1])
        return result
