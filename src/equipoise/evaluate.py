"""Evaluate a model that exists on every client of some data: the client table, summary and report of a run, without a run."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from torch import nn

from equipoise.client_metrics import ClientMetrics
from equipoise.client_table import ClientTable
from equipoise.core.abilities import engine_traits
from equipoise.core.per_example_losses import PerExample
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import ClientSet, FederatedData
from equipoise.errors import EquipoiseNotice, InvalidParameter, require
from equipoise.observers import Evaluation, History
from equipoise.run_record import NoTraining, RunRecord
from equipoise.run_summary import RunSummary
from equipoise.runs.error_spread import with_error_spread
from equipoise.runs.evaluation_sample import evaluation_sample, refuse_sample, sample_sizes
from equipoise.runs.setup import EngineChoice, choose_engine, refuse_swapped, try_metrics
from equipoise.runs.trivial_answer import with_trivial_answer
from equipoise.types import PrivacyTraits


@dataclass(frozen=True, eq=False, kw_only=True, repr=False)
class EvaluatedModel(RunRecord):
    """A model on the clients of some data: `clients` (one row each), `summary()` and `report(path)`.

    `evaluate` gives it. It is read like a `Result`, without a history of rounds.

    >>> import equipoise as eq
    >>> data = eq.data.digits(clients=12)
    >>> found = eq.evaluate(eq.models.Softmax(64, 10), data, name="untrained")
    >>> found.name, len(found.clients), found.rounds
    ('untrained', 12, 0)
    """

    def summary(self, split: str | None = None, *, at_least: int = 0) -> RunSummary:
        """As of a run, with a sentence on splits of the data that are in no figure.

        No clients are called unseen: which examples the model was trained on is not known.
        """
        judged, table = split or self.judged_on, self.clients
        apart = {each: table.where(each) for each in dict.fromkeys(table.split) if each != judged}
        counts = {each: (len(rows), int(rows.size.sum())) for each, rows in apart.items()}
        return replace(super().summary(split, at_least=at_least), apart=counts)

    def __repr__(self) -> str:
        return f"EvaluatedModel({self.name!r} on {self.data!r})\n{self.summary()}"


def evaluate(
    model: nn.Module,
    data: FederatedData | ClientSet,
    *,
    loss: PerExample | None = None,
    error: PerExample | None = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    engine: EngineChoice | str = "simulator",
    evaluate_clients: int | None = None,
    name: str = "model",
) -> EvaluatedModel:
    """The client table of any model on any data: loss, error and metrics of every client of every split. Source: ours.

    On the data of the run that trained the model, the table equals the run's own. The summary is about one split of the data,
    the test clients if there are any, and names the others. To judge all rows of a table together, make the data with
    `test=0`. `data` may also be a ClientSet, whose clients are then the split "test". The options are those of `train`,
    with the same refusals. Nothing is trained, and the model is not changed. In the result `clients` is the table,
    `summary()` its figures and `report(path)` a page about it.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=5, validation_clients=0, test_clients=3, examples=20)
    >>> found = eq.evaluate(eq.models.Softmax(20, 10), data)
    >>> len(found.clients), found.summary().error.clients
    (8, 3)
    """
    began = time.perf_counter()
    refuse_swapped(model, data, "evaluate")
    known = isinstance(data, FederatedData | ClientSet)
    require(
        known, "data", "must be a FederatedData or a ClientSet", type(data).__name__, "E.g. data.from_arrays(x, y, client)."
    )
    if not isinstance(model, nn.Module):
        fix = "Give the module itself, e.g. result.model."
        raise InvalidParameter("model", "must be a torch.nn.Module", type(model).__name__, fix)
    whole = data if isinstance(data, FederatedData) else FederatedData(data, test=data, name=data.source or "clients")
    task, measured = try_task(Task.of(model, loss, error), whole), ClientMetrics.of(metrics)
    sample = evaluation_sample(whole, evaluate_clients)
    with warnings.catch_warnings():  # whether clients can be trained side by side does not matter here
        warnings.simplefilter("ignore", EquipoiseNotice)
        running = choose_engine(engine).start(task, whole)
    traits = engine_traits(running)
    refuse_sample(sample, traits, evaluate_clients)
    try_metrics(measured, task, whole, traits, PrivacyTraits())
    params = task.read_model().to(traits.device)
    table = ClientTable.evaluate(running, params, whole, sample, measured)
    if traits.network is None:
        table = with_error_spread(table, task, task.module.eval(), whole, sample, traits.device)
    if isinstance(data, ClientSet):
        table = table.where("test").unseen()
    else:
        table = with_trivial_answer(table, task, task.module.eval(), whole, sample)
    history = History()
    history.on_evaluation(Evaluation(0, table, None, name, final=True))
    return EvaluatedModel(
        name=name, algorithm=NoTraining(), seed=0, clients=table, history=history, seconds=time.perf_counter() - began,
        data=whole.name, rounds=0, clients_per_round=0, error_is_loss=task.error_is_loss, sampled=sample_sizes(whole, sample),
        error_name=task.error_name, target="" if whole.schema is None else whole.schema.target.name,
        inputs=() if whole.schema is None else whole.schema.inputs,
    )  # fmt: skip
