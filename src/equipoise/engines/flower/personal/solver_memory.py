"""What clients keep for their solver between rounds, on their nodes: SCAFFOLD's c_k, FedDyn's g_k, momentum, Adam's moments.

The server knows of each client the round it last took part in, and never its row. A node that was started anew, and has no
folder of its owner's, has lost its row: it begins again with zeros and says so.
"""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from equipoise.core.abilities import solver_traits
from equipoise.engines.flower.apps.node_session import NodeSession
from equipoise.engines.flower.transport.messages import BadMessage
from equipoise.types import Cohort, LocalWork

if TYPE_CHECKING:
    from equipoise.engines.flower.flower_engine import FlowerEngine

KEPT = "kept_since"  # of a request: 1 + the round in which the client last changed its row, 0 before the first


class RemoteRows:
    """The rows of a run's clients, seen from the server: `places` (n,) are 1 + the round that a client's row comes from."""

    def __init__(self, engine: FlowerEngine) -> None:
        self.engine = engine

    def begin(self, path: Path | None = None) -> Tensor:
        """The places before the first round; nothing is written on the server."""
        return torch.zeros(len(self.engine.data.train), dtype=torch.int64)

    def resume(self, places: Tensor, path: Path | None) -> None:
        """The rows are on the nodes."""

    def given(self, places: Tensor, clients: Tensor) -> Tensor:
        """What the engine is told of the rows of clients at positions (K,): where they come from, (K, 1)."""
        return places[clients].unsqueeze(1)

    def change(self, places: Tensor, clients: Tensor, rows: Tensor) -> Tensor:
        """By what the rows of clients have changed, (K, width): the engine finds it from their updates."""
        return rows

    def after(self, places: Tensor, workers: Cohort, work: LocalWork) -> Tensor:
        """The places after a round's work: of clients whose update was taken, or was in the secure sum."""
        if work.told:
            arrived = torch.from_numpy(work.arrived)
        else:
            counted = self.engine.round.counted
            arrived = torch.tensor([client in counted for client in self.engine.names(workers)], dtype=torch.bool)
        after = places.clone()
        after[workers.clients[arrived]] = workers.round + 1
        return after

    def write(self, places: Tensor) -> Tensor:
        """The nodes have written their rows."""
        return places

    def flush(self) -> None:
        """Nothing: each node writes its own row."""

    def on_saved(self, places: Tensor) -> None:
        """Nothing: each node keeps the rows of its last two rounds."""


def kept_values(cohort: Cohort, place: int) -> dict[str, float | int]:
    """What a request says of the row of one client of a cohort, and of its own proximal term."""
    values: dict[str, float | int] = {} if cohort.rows is None else {KEPT: int(cohort.rows[place, 0])}
    return values if cohort.prox is None else {**values, "prox": float(cohort.prox[place])}


class NodeWork:
    """A round's local work on a node whose client keeps a row for its solver."""

    def __init__(self, session: NodeSession) -> None:
        session.refuse_unless_training()
        self.session, self.solver, cohort = session, session.solver, session.cohort
        self.since = session.request.values.get(KEPT)
        keeps, self.row, self.lost = solver_traits(self.solver).keeps, None, False
        if self.since is not None and keeps is not None:
            if type(self.since) is not int or self.since < 0:
                raise BadMessage(f"its {KEPT!r} is no round")
            width, dtype = keeps(session.task.layout.dimension), session.task.layout.dtype
            found = session.solver_rows.read(self.since, width) if self.since else None
            self.lost = self.since > 0 and found is None
            begin = torch.zeros(width, dtype=torch.promote_types(dtype, torch.float32))
            self.row = begin if found is None else found
            cohort = cohort.having(rows=self.row.unsqueeze(0))
        self.work = session.engine.updates(session.params, cohort, self.solver)

    def keep(self, *, counts: bool = True) -> None:
        """Keep the row of after this round; that of before it, if the work does not count."""
        if self.row is None or not isinstance(self.since, int):
            return
        after = self.work.rows[0] if counts and self.work.rows is not None else self.row
        self.session.solver_rows.write(self.since, self.session.request.round + 1, after.to(self.row.dtype).cpu())
