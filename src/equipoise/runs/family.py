"""A family of models behind a knob: several tails, q's or tilts trained in one run on the same cohorts and batches.

Each test client then takes the member that serves it best by its own validation loss, or turns the knob itself.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import zip_longest
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.client_table import ClientTable
from equipoise.compare import Comparison
from equipoise.core.carried import join_model
from equipoise.core.numbers import plain_values
from equipoise.core.per_example_losses import PerExample
from equipoise.core.trees import leaves, map_tree
from equipoise.core.words import joined
from equipoise.data.clients import ClientSet, as_leaf, split_examples
from equipoise.errors import Diverged, InvalidData, InvalidParameter, ObserverFailed, is_number, notify, require
from equipoise.observers import History
from equipoise.report import write_report
from equipoise.report.knob import MemberClients, knob_data
from equipoise.report.notices import size_notices
from equipoise.result import Result
from equipoise.risk import QFair, Superquantile, Tilted
from equipoise.risk.groups import Groups
from equipoise.runs.checkpoint import Checkpoints
from equipoise.runs.health import divergence, rejected_updates
from equipoise.runs.setup import DataOrMaker, EngineChoice, ModelOrMaker, Setting, set_up
from equipoise.runs.stopping import EarlyStopping
from equipoise.train import Watching, train_runs
from equipoise.types import Observer, RiskValue

KNOBS: dict[str, type] = {"tail": Superquantile, "q": QFair, "tilt": Tilted}


@dataclass(frozen=True, eq=False)
class Family:
    """Models for several values of one parameter. `at(value)` is the nearest one, `select(client)` the best for a client.

    `train_family` gives it.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=5, validation_clients=0, test_clients=3, examples=20)
    >>> family = eq.train_family(eq.models.Softmax(20, 10), data, tails=[1.0, 0.5], rounds=2, clients_per_round=3)
    >>> family.knob, family.values, family.at(0.6) is family.models[0.5]
    ('tail', (1.0, 0.5), True)
    """

    knob: str  # "tail", "q" or "tilt"
    results: dict[float, Result]  # by the value of the knob
    setting: Setting  # what the runs share

    @property
    def values(self) -> tuple[float, ...]:
        """The values of the knob."""
        return tuple(self.results)

    @property
    def models(self) -> dict[float, nn.Module]:
        """The models by the value of the knob."""
        return {value: result.model for value, result in self.results.items()}

    def __repr__(self) -> str:
        return f"Family({self.knob}s {list(self.values)}, {self.setting.rounds} rounds on {self.setting.data.name!r})"

    def at(self, value: float, *, interpolate: bool = False) -> nn.Module:
        """The model trained for `value`, or the nearest one.

        `interpolate=True` gives a point on the line between the two neighbours' parameters instead. That model was not
        trained. For a convex task it is a reasonable guess. For networks it may be worse than both neighbours.
        """
        require(is_number(value) and math.isfinite(value), self.knob, "must be a number", value)
        if value in self.results or not interpolate:
            return self.results[min(self.values, key=lambda v: abs(v - value))].model
        below, above = [v for v in self.values if v < value], [v for v in self.values if v > value]
        rule = f"must lie between {min(self.values):g} and {max(self.values):g} to be interpolated"
        require(bool(below and above), self.knob, rule, value)
        low, high = max(below), min(above)
        share, ends, layout = (value - low) / (high - low), (self.results[low], self.results[high]), self.setting.task.carried
        params = torch.lerp(ends[0].params, ends[1].params, share)
        carried = None
        if ends[0].carried is not None and ends[1].carried is not None:
            carried = layout.from_moments(
                torch.lerp(layout.to_moments(ends[0].carried), layout.to_moments(ends[1].carried), share)
            )
        return self.setting.model_at(join_model(params, carried))

    def losses(self, client_data: ClientSet | tuple[Any, Any]) -> dict[float, float]:
        """Each member's mean loss on the examples of one client: an (x, y) pair, or a ClientSet with one client."""
        clients = self._one_client(client_data)
        refuse_other_labels(clients, self.setting)
        evaluate = self.setting.engine.evaluate
        return {value: float(evaluate(join_model(r.params, r.carried), clients)[0]) for value, r in self.results.items()}

    def choose(self, client_data: ClientSet | tuple[Any, Any]) -> float:
        """The value of the member with the lowest loss on a client's own examples; the first of the family if several tie."""
        losses = self.losses(client_data)
        return min(losses, key=losses.__getitem__)

    def select(self, client_data: ClientSet | tuple[Any, Any]) -> nn.Module:
        """The model that serves a client best by the loss on its own examples (which should not be those it is judged by)."""
        return self.results[self.choose(client_data)].model

    def comparison(self) -> Comparison:
        """The members and "family", where each client uses the member that it chose, judged on the same examples.

        Clients choose by their validation examples and are judged on their test examples. If some test client has no
        validation examples, all clients choose by a random half of their test examples and are judged on the other half.
        Clients with a single example are then left out, with a notice. Without test clients the validation clients are
        judged in this way. Without either, the training clients choose and are judged on the same examples.
        """
        return self._comparison

    @cached_property
    def _comparison(self) -> Comparison:
        judged_on, choosing, judging = choosing_and_judging(self.setting)
        engine, members = self.setting.engine, list(self.results.values())
        models = [join_model(r.params, r.carried) for r in members]
        chosen = torch.stack([engine.evaluate(model, choosing)[0] for model in models]).argmin(0)  # (n,)
        judged = [engine.evaluate(model, judging) for model in models]
        loss, error = map(torch.stack, zip(*judged, strict=True))  # (M, n)
        metrics, measure = self.setting.metrics, self.setting.engine_traits.measure
        found = [measure(r.params, judging, metrics) for r in members] if len(metrics) and measure is not None else []

        def table(own: Tensor) -> ClientTable:
            losses, errors = (v.gather(0, own.unsqueeze(0))[0] for v in (loss, error))
            rows = ClientTable.of(self.setting.data, {judged_on: (judging, losses, errors)})
            if not found:
                return rows
            values = torch.stack(found)  # (members, metrics, n)
            return rows.with_metrics(metrics, values.gather(0, own.expand(1, len(metrics), -1))[0])

        rows = {r.name: [replace(r, clients=table(torch.full_like(chosen, i)))] for i, r in enumerate(members)}
        first = members[0]
        everyone = replace(
            first, name="family", algorithm=replace(first.algorithm, risk=EachClientsChoice(self.knob, self.values)),
            clients=table(chosen), model=nn.ModuleList(self.models.values()),
            params=torch.stack([r.params for r in members]), carried=None, history=_together([r.history for r in members]),
            seconds=sum(r.seconds for r in members),
        )  # fmt: skip
        return Comparison({**rows, "family": [everyone]}, note=_judged_words(self.setting))

    def summary(self) -> str:
        """A table as text: mean, 90th percentile and worst 10 % of the error over clients, for each value of the knob."""
        first = next(iter(self.results.values()))
        title = f"{self.knob}: {first.measured} over {first.summary().who}"
        rows = [(f"{value:g}", result.summary().error) for value, result in self.results.items()]
        lines = [f"{title:<44}{'mean':>10}{'90th pct.':>12}{'worst 10 %':>12}"]
        lines += [f"{name:<44}{e.mean:>10.4f}{e.percentiles[90]:>12.4f}{e.worst_10:>12.4f}" for name, e in rows]
        return joined([*lines, *size_notices([first])])

    def report(self, path: str | Path, *, title: str | None = None) -> Path:
        """Write one HTML page that opens offline, with the knob, under a `title`."""
        return write_report(self.comparison().all_results, path, knob=self.knob_numbers(), title=title)

    def knob_numbers(self) -> dict[str, Any]:
        """For each value of the knob, from average to tail: figures of the error, its histogram, who gains and who loses."""
        first = next(iter(self.results.values()))
        members = [MemberClients(float(value), result.name, result.clients) for value, result in self.results.items()]
        return knob_data(self.knob, members, first.judged_on, error_is_loss=first.error_is_loss)

    def save(self, folder: str | Path) -> Path:
        """Write the folder of a run, which `equipoise serve` shows with its knob and `equipoise report` reads.

        Beside config.toml, rounds.jsonl and report.html there are family.json and, for each member, its clients, its card, and
        its model as safetensors and, with `equipoise[serve]`, as ONNX. The folder must be new or empty, and appears whole or
        not at all.
        """
        from equipoise.experiment.saved_run import save_family

        return save_family(self, folder)

    def publish(self, folder: str | Path) -> Path:
        """Write this family as the newest version of the one in `folder`, or as its first; older versions stay as they are.

        `latest` on a server then means this one. Equal models are not written again.
        """
        from equipoise.experiment.saved_run import publish_family

        return publish_family(self, folder)

    def export(self, folder: str | Path, *, groups: Groups | None = None) -> Path:
        """Write all models into one new folder: as safetensors, as ONNX where a model can be, each with its card.

        `groups` names the group of each client, and cards have a row for each group.
        """
        from equipoise.export.model_files import export_family

        return export_family(self, folder, groups=groups)

    def _one_client(self, client_data: ClientSet | tuple[Any, Any]) -> ClientSet:
        if isinstance(client_data, ClientSet):
            require(len(client_data) == 1, "client_data", "must hold one client", len(client_data), "Use clients.take([k]).")
            return client_data
        if not (isinstance(client_data, Sequence) and len(client_data) == 2):
            raise InvalidParameter("client_data", "must be a pair (x, y) or a ClientSet", type(client_data).__name__)
        x, y = (map_tree(as_leaf, part) for part in client_data)
        like = self.setting.data.train
        if isinstance(x, Tensor) and isinstance(like.x, Tensor) and x.dim() == like.x.dim() - 1:
            raise InvalidData("client_data: x must hold one row per example, as (examples, …); found a single example.")
        # Floating numbers are taken as a model sees them, as clients.client(…) gives them.
        raw = not any(leaf.is_floating_point() for leaf in leaves(x))
        scale, shift = (like.scale, like.shift) if raw else (None, 0.0)
        return ClientSet.pack([("client", x, y)], scale=scale, shift=shift, source="client_data")


def choosing_and_judging(setting: Setting) -> tuple[str, ClientSet, ClientSet]:
    """The split that is judged, and the same clients' examples to choose by and to be judged by, in one order of clients."""
    data = setting.data
    judged_on = next(name for name in ("test", "validation", "train") if name in data.splits)
    judging = data.splits[judged_on]
    if setting.sample is not None and judged_on in setting.sample:
        judging = judging.take(setting.sample[judged_on])
    if judged_on == "train":
        return judged_on, judging, judging
    if judged_on == "test" and data.validation is not None and bool(((places := data.validation.find(judging)) >= 0).all()):
        return judged_on, data.validation.take(places), judging
    single = int((judging.sizes < 2).sum())
    if single == len(judging):
        raise InvalidData(f"All {judged_on} clients have a single example: none can choose by one and be judged by another.")
    if single:
        text = f"{single} of {len(judging)} {judged_on} clients have a single example, cannot choose by it, and are left out."
        notify(text)
    parts = split_examples(judging, test=0.5, seed=setting.seed)
    if parts.test is None:  # excluded above; said for the type checker
        raise InvalidData("The clients have too few examples.")
    return judged_on, parts.train.take(parts.train.find(parts.test)), parts.test


def _judged_words(setting: Setting) -> str:
    """A clause if members are judged on half of each client's examples, the other half being for its choice; else empty."""
    data = setting.data
    judged_on = next(name for name in ("test", "validation", "train") if name in data.splits)
    if judged_on == "train":
        return ""
    if judged_on == "test" and data.validation is not None and bool((data.validation.find(data.splits["test"]) >= 0).all()):
        return ""
    return ", judged on half of their examples (the other half is for the choice)"


@dataclass(frozen=True)
class EachClientsChoice:
    """Stands for the risk in a family's own row: each client uses the member that it chose."""

    knob: str
    values: tuple[float, ...]

    def __call__(self, losses: Tensor, base_weights: Tensor, *, clients: Any = None, state: Any = None) -> RiskValue:
        """Refuse to be trained with: the clients' choices are made after training."""
        raise InvalidParameter("risk", "is not one risk but a choice among several", self, "Train with one of its members.")


def refuse_other_labels(clients: ClientSet, setting: Setting) -> None:
    """Refuse targets that the family's task does not know: other classes, or numbers where there are classes."""
    data = setting.data
    if not data.classes or data.train.label_range(data.ignore_index) is None:
        return
    labels = clients.label_range(data.ignore_index)
    good = labels is not None and labels.lowest >= 0 and labels.highest < data.classes
    shown = labels and (labels.lowest, labels.highest)
    require(good, "client_data", f"must have whole targets from 0 to {data.classes - 1}", shown)


def _together(histories: Sequence[History]) -> History:
    """The history of a family: mean losses over its members that still train, and the work of all of them."""
    rounds = []
    for every in zip_longest(*(h.rounds for h in histories)):  # members may be stopped early
        reports = [report for report in every if report is not None]
        mean = {name: sum(getattr(r, name) for r in reports) / len(reports) for name in ("loss", "tail_loss")}
        total = {name: sum(getattr(r, name) for r in reports) for name in ("trained", "seconds", "dropped")}
        rejected = tuple(dict.fromkeys(client for r in reports for client in r.rejected))
        rounds.append(replace(reports[0], risk=None, rejected=rejected, **mean, **total))
    return History(rounds)


def train_family(
    model: ModelOrMaker,
    data: DataOrMaker,
    algorithm: Algorithm | None = None,
    *,
    tails: Iterable[float] | None = None,
    qs: Iterable[float] | None = None,
    tilts: Iterable[float] | None = None,
    rounds: int,
    clients_per_round: int | None = None,
    seed: int = 0,
    loss: PerExample | None = None,
    error: PerExample | None = None,
    engine: EngineChoice | str = "simulator",
    evaluate_every: int | None = None,
    evaluate_clients: int | None = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    stop: EarlyStopping | None = None,
    observers: Sequence[Observer] = (),
    progress: bool | None = None,
    checkpoint: Checkpoints | str | Path | None = None,
) -> Family:
    """Train one model for each of several `tails` (Superquantile), `qs` (QFair) or `tilts` (Tilted), together.

    All members start from `model` and see the same cohorts and batches, so each equals the run that `train` would make of
    it alone; the simulator trains them as one batch, which costs less than separate runs. `algorithm` gives the other parts
    (and the risk's other options, if its risk is of the family's kind); the other options are those of `train`: with `stop`
    each member is stopped by its own figures, and the others continue. Observers get the reports of every member's rounds,
    with the member's name in `report.run`; the checkpoint is one file for all members.

    Source: Pillutla et al. 2023, section 4.1 and Figure 1; Li 2023 (thesis), Table 4.12.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=5, validation_clients=0, test_clients=3, examples=20)
    >>> family = eq.train_family(eq.models.Softmax(20, 10), data, tails=[1.0, 0.5], rounds=2, clients_per_round=3)
    >>> family.values
    (1.0, 0.5)
    """
    knob, members = family_members(algorithm or Algorithm(), {"tail": tails, "q": qs, "tilt": tilts})
    algorithms = list(members.values())
    fix = "Train each member by itself: equipoise.train or compare."
    for part, given in (("personal", algorithms[0].personal), ("privacy", algorithms[0].privacy)):
        require(given is None, "algorithm", f"must not have {part}=… in a family, whose members share their rounds", given, fix)
    rule = "must have a solver with a fresh state in every round in a family, whose members share their rounds"
    require(algorithms[0].traits.solver.keeps is None, "algorithm", rule, algorithms[0].solver, fix)
    short = {f"{value:g}" for value in members}
    names = [f"{knob} {value:g}" if len(short) == len(members) else f"{knob} {value!r}" for value in members]
    watch = Watching(evaluate_every, observers, progress, checkpoint)
    first = set_up(
        model, data, algorithms[0], rounds=rounds, clients_per_round=clients_per_round, seed=seed, loss=loss, error=error,
        engine=engine, evaluate_clients=evaluate_clients, metrics=metrics, stop=stop, name=names[0],
    )  # fmt: skip
    settings = [first.with_algorithm(member, name) for member, name in zip(algorithms, names, strict=True)]

    def by_value(results: Sequence[Result | Diverged]) -> dict[float, Result]:
        return {value: result for value, result in zip(members, results, strict=True) if isinstance(result, Result)}

    try:
        trained = by_value(train_runs(settings, watch, f"family of {len(members)}", stop_at_failure=True))
    except Diverged as failure:
        failure.add_note(f"This was the member with {failure.run}.")
        raise
    except ObserverFailed as failure:
        failure.finished = failure.finished and Family(knob, by_value(failure.finished), first)
        raise
    texts = [text for r in trained.values() for text in divergence(first, r, f"the member with {r.name}")]
    texts += rejected_updates(report for result in trained.values() for report in result.history.rounds)
    for text in texts:
        notify(text)
    return Family(knob, trained, first)


def family_members(algorithm: Algorithm, given: Mapping[str, Iterable[float] | None]) -> tuple[str, dict[float, Algorithm]]:
    """The knob and an algorithm for each of its values."""
    named = {knob: _numbers(f"{knob}s", values) for knob, values in given.items() if values is not None}
    found, fix = ", ".join(f"{k}s" for k in named) or "none", "E.g. train_family(model, data, tails=[1.0, 0.8, 0.5, 0.1], …)."
    require(len(named) == 1, "tails, qs, tilts", "must be given one at a time", found, fix)
    ((knob, values),) = named.items()
    require(len(values) > 0 and len(set(values)) == len(values), f"{knob}s", "must be one or more different numbers", values)
    kind, risk = KNOBS[knob], algorithm.risk
    rule = f"must have a {kind.__name__} risk, or none of its own, in a family of {knob}s"
    require(risk == Algorithm().risk or isinstance(risk, kind), "algorithm", rule, risk)
    base: Any = risk if isinstance(risk, kind) else kind()
    return knob, {value: replace(algorithm, risk=replace(base, **{knob: value})) for value in values}


def _numbers(parameter: str, values: object) -> list[float]:
    """The values of a knob as a list of numbers."""
    plain = plain_values(values)
    numbers: list[Any] = list(plain) if isinstance(plain, Iterable) else [None]
    good = all(is_number(number) for number in numbers)
    require(good, parameter, "must be a list of numbers", values, f"E.g. {parameter}=[1.0, 0.5].")
    return numbers
