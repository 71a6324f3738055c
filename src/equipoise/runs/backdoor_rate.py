"""How often a backdoor works: the share of each client's marked examples that the model calls the attackers' class."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from equipoise.client_metrics import ClientMetrics, SummedMetric, mean_of_totals
from equipoise.core.abilities import attack_traits, engine_traits
from equipoise.core.per_example_losses import PerExample
from equipoise.core.task import Task
from equipoise.core.trees import first_output, map_tree
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import InvalidParameter
from equipoise.types import Engine, PersonalWork

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable

COLUMN = "backdoor_success"
_TRIED = 8  # examples


@dataclass(frozen=True)
class LabelHits:
    """Which examples get their label, by a model's outputs; how is decided by what the model returns.

    Of one score per class (B, C), alone or as the entry "logits" of a dictionary, the largest says the class. Of other outputs
    the `error` says it, which is 0 for an example that is right and 1 for one that is wrong. Of a tuple without an error of its
    own (None), the scores are the first tensor. A tensor with fewer columns than there are `classes` holds no scores.
    """

    error: PerExample | None
    classes: int

    def __call__(self, outputs: Any, targets: Any) -> Tensor:
        """How many examples get their label, and how many there are: (2,)."""
        return torch.stack([self.right(outputs, targets).double().sum(), torch.tensor(float(len(targets))).double()]).cpu()

    def right(self, outputs: Any, targets: Tensor) -> Tensor:
        """Which examples get their label, (B,) bool; outputs that do not say so are refused."""
        scores = outputs.get("logits") if isinstance(outputs, dict) else outputs
        if self.error is None and isinstance(scores, tuple | list):
            scores = next((each for each in scores if isinstance(each, Tensor)), None)
        if isinstance(scores, Tensor) and scores.dim() == 2 and scores.shape[1] >= max(2, self.classes):
            return scores.argmax(1) == targets
        wrong = None if self.error is None else self.error(outputs, targets)
        if wrong is None or not bool(((wrong == 0) | (wrong == 1)).all()):
            shown = f"a tensor of shape {tuple(outputs.shape)}" if isinstance(outputs, Tensor) else type(outputs).__name__
            raise InvalidParameter("error", "must say under a backdoor which examples are wrong, by 0 and 1", self.error, (
                f"The model returns {shown}, without one score per class (B, C) that would say it. E.g. "
                f"error=lambda outputs, y: ({first_output(outputs)}.argmax(-1) != y).float()."
            ))  # fmt: skip
        return wrong == 0


def label_hits(task: Task, data: FederatedData) -> LabelHits:
    """How the class is found in what the model of a task returns."""
    return LabelHits(None if task.error_is_loss else task.error, data.classes)


def try_success(task: Task, data: FederatedData) -> None:
    """Before the first round, refuse a model whose outputs do not say whether a backdoor works."""
    if attack_traits(data.attack).probe is None:
        return
    trial, rows = task.to(torch.device("cpu")), torch.arange(min(_TRIED, data.train.examples))
    x, y = (map_tree(Tensor.cpu, part(rows, task.layout.dtype)) for part in (data.train.inputs, data.train.targets))
    trial.scorer.eval()
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        label_hits(task, data).right(trial.outputs(task.layout.read(trial.module), x), y)


@dataclass(frozen=True, eq=False)
class BackdoorProbe:
    """Marked examples of the clients of each split, and where these clients are in it (k,)."""

    splits: dict[str, tuple[ClientSet, Tensor]]
    metric: ClientMetrics

    @classmethod
    def of(cls, data: FederatedData, task: Task) -> BackdoorProbe | None:
        """The probe of data under attack by a backdoor: of all splits but train, of train if there is no other; or None.

        `task` says how the class is found in a model's outputs.
        """
        make = attack_traits(data.attack).probe
        if make is None:
            return None
        judged = {split: clients for split, clients in data.splits.items() if split != "train"} or {"train": data.train}
        found = {split: make(clients, data.train, data.classes) for split, clients in judged.items()}
        metric = SummedMetric(label_hits(task, data), mean_of_totals, higher_is_better=False)
        return cls({split: probe for split, probe in found.items() if probe is not None}, ClientMetrics({COLUMN: metric}))

    def measured(self, table: ClientTable, engine: Engine, model: Tensor) -> ClientTable:
        """The table with the success rate at the shared model; NaN for clients without examples of other classes."""
        measure, values = engine_traits(engine).measure, torch.full((len(table),), torch.nan, dtype=torch.float64)
        if measure is None:
            return table
        for split, (clients, _) in self.splits.items():
            self._put(values, table, split, clients.ids, measure(model, clients, self.metric)[0])
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
                    found = measure(models[here.to(models.device)], clients, self.metric, where[here])[0]
                    self._put(values, table, split, [names[k] for k in here.tolist()], found)
        return replace(table, personal_metrics={**table.personal_metrics, COLUMN: values})

    def _put(self, values: Tensor, table: ClientTable, split: str, ids: Any, found: Tensor) -> None:
        """Write the rates of some clients of a split into a column of the table."""
        known = dict(zip(ids, found.double().cpu().tolist(), strict=True))
        for row, (client, of) in enumerate(zip(table.client, table.split, strict=True)):
            if of == split and client in known:
                values[row] = known[client]
