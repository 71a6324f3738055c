"""How often a backdoor works: the share of each client's marked examples that the model calls the attackers' class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.client_metrics import ClientMetrics, SummedMetric
from equipoise.core.abilities import attack_traits, engine_traits
from equipoise.data.clients import ClientSet
from equipoise.data.federated_data import FederatedData
from equipoise.types import Engine, PersonalWork

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable

COLUMN = "backdoor_success"


def _hits(outputs: Any, targets: Any) -> Tensor:
    """How many examples get their label, and how many there are: (2,)."""
    return torch.stack([(outputs.argmax(-1) == targets).double().sum(), torch.tensor(float(len(targets))).double()]).cpu()


def _share(sums: Tensor) -> float:
    return float(sums[0] / sums[1])


SUCCESS = ClientMetrics({COLUMN: SummedMetric(_hits, _share, higher_is_better=False)})


@dataclass(frozen=True, eq=False)
class BackdoorProbe:
    """Marked examples of the clients of each split, and where these clients are in it (k,)."""

    splits: dict[str, tuple[ClientSet, Tensor]]

    @classmethod
    def of(cls, data: FederatedData) -> BackdoorProbe | None:
        """The probe of data under attack by a backdoor: of all splits but train, of train if there is no other; or None."""
        make = attack_traits(data.attack).probe
        if make is None:
            return None
        judged = {split: clients for split, clients in data.splits.items() if split != "train"} or {"train": data.train}
        found = {split: make(clients, data.train, data.classes) for split, clients in judged.items()}
        return cls({split: probe for split, probe in found.items() if probe is not None})

    def measured(self, table: ClientTable, engine: Engine, model: Tensor) -> ClientTable:
        """The table with the success rate at the shared model; NaN for clients without examples of other classes."""
        measure, values = engine_traits(engine).measure, torch.full((len(table),), torch.nan, dtype=torch.float64)
        if measure is None:
            return table
        for split, (clients, _) in self.splits.items():
            self._put(values, table, split, clients.ids, measure(model, clients, SUCCESS)[0])
        higher = {**table.higher_is_better, COLUMN: False}
        return replace(table, metrics={**table.metrics, COLUMN: values}, higher_is_better=higher)

    def measured_own(
        self,
        table: ClientTable,
        engine: Engine,
        personal: PersonalWork,
        state: Any,
        model: Tensor,
        round_index: int,
        train: Any,
    ) -> ClientTable:
        """The table with the success rate at clients' own models, too."""
        measure, values = engine_traits(engine).measure, torch.full((len(table),), torch.nan, dtype=torch.float64)
        if measure is None or COLUMN not in table.metrics:
            return table
        for positions, models in personal.all_models(state, model, round_index):
            names = train.ids_at(positions)
            for split, (clients, _) in self.splits.items():
                where = clients.positions_of(names)
                here = (where >= 0).nonzero().flatten()
                if len(here):
                    found = measure(models[here.to(models.device)], clients, SUCCESS, where[here])[0]
                    self._put(values, table, split, [names[k] for k in here.tolist()], found)
        return replace(table, personal_metrics={**table.personal_metrics, COLUMN: values})

    def _put(self, values: Tensor, table: ClientTable, split: str, ids: Any, found: Tensor) -> None:
        """Write the rates of some clients of a split into a column of the table."""
        known = dict(zip(ids, found.double().cpu().tolist(), strict=True))
        for row, (client, of) in enumerate(zip(table.client, table.split, strict=True)):
            if of == split and client in known:
                values[row] = known[client]
