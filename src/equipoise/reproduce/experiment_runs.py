"""The runs of an experiment: makes those that are missing, one file per method and seed, so that a stopped command goes on.

Runs whose clients can work in one batch are made together; each of them equals the run that is made alone.
"""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import median
from typing import Any

import torch
from torch import nn

from equipoise.core.devices import usable_device
from equipoise.core.files import write_atomically
from equipoise.core.grouping import grouped
from equipoise.core.plain_text import parse_json
from equipoise.data.clients import FederatedData
from equipoise.engines import Simulator
from equipoise.errors import ConfigError, Diverged, InvalidParameter, require
from equipoise.metrics import mean
from equipoise.reproduce.batched_runs import ENOUGH_SECONDS, OutOfTime, RunsTogether, TimeLimit
from equipoise.reproduce.chosen_rates import CHOOSING_SEED
from equipoise.reproduce.data_sets import at_most
from equipoise.reproduce.entry import Experiment, FinishedRun, Method, Scale
from equipoise.reproduce.ray_runs import make_on_cluster
from equipoise.reproduce.result_tables import Reproduction, machine, slug, versions
from equipoise.result import Result
from equipoise.runs.many import SeededRun
from equipoise.runs.setup import build
from equipoise.train import train

PrintLine = Callable[[str], object]


@dataclass(frozen=True)
class ExperimentRuns:
    """The runs of an experiment at one scale, stored as files in a folder."""

    entry: Experiment
    scale_name: str
    scale: Scale
    folder: Path | None  # of the data
    out: Path
    device: str | None
    say: PrintLine
    precision: str = "float32"
    processes: int | None = None  # of the simulator; None: as many as are fastest
    chosen: Mapping[str, float] | None = None  # the rate of each method, if it was chosen on validation examples
    options: str = ""  # of the command, such as " --seeds 3", as far as they change results

    @property
    def engine(self) -> Simulator:
        """The engine that makes the runs."""
        return Simulator(device=self.device, workers=self.processes, precision=self.precision)

    @property
    def seeds(self) -> range:
        """The seeds of the scale."""
        return range(self.scale.first_seed, self.scale.first_seed + self.scale.seeds)

    def seeds_of(self, method: Method) -> range:
        """The seeds of a method: those of the scale, or fewer."""
        return self.seeds if method.seeds is None else self.seeds[: method.seeds]

    def rounds_of(self, method: Method) -> int:
        """The rounds of a method: those of the scale, or its own at the scale "paper"."""
        return self.scale.rounds if method.rounds is None or self.scale_name != "paper" else method.rounds

    def finish(self, *, tune: bool, limit: TimeLimit | None = None, ray: str | None = None) -> Path:
        """Make the runs that are missing, as far as the time allows, then print and save the tables.

        `ray` is the address of the Ray cluster that makes them; None: they are made here.
        """
        start, limit = time.perf_counter(), limit or TimeLimit()
        lr = self.tuned_rate() if tune else None
        wanted = [(seed, method) for seed in self.seeds for method in self.entry.methods if seed in self.seeds_of(method)]
        missing = [(seed, method) for seed, method in wanted if self.stored(method, seed, lr) is None]
        kept = len(wanted) - len(missing)
        self.say(
            f"{self.entry.name}, scale {self.scale_name}: {len(missing)} runs to make"
            + (f", {kept} kept from before" if kept else "") + f", in {self.out}"
        )  # fmt: skip
        endless = ray is None and self.scale_name == "paper" and limit.ends == float("inf")
        if missing and endless and usable_device(self.device).type == "cpu":
            self.warn_of_duration(missing[0], len(missing), lr)
        done, made = 0, self.make_here(missing, lr, limit) if ray is None else make_on_cluster(self, missing, lr, limit, ray)
        for done, run in enumerate(made, start=1):
            figures = ", ".join(f"{self.entry.figures[f].title} {v:z.2f}" for f, v in run.get("figures", {}).items())
            what, where = figures or run["failed"], f", {run['node']}" if "node" in run else ""
            self.say(f"{done}/{len(missing)} {run['method']}, seed {run['seed']}: {what} ({run['seconds']:.0f} s{where})")
        if done < len(missing):
            why = "The time is over: " if limit.left < ENOUGH_SECONDS else ""
            self.say(f"{why}{len(missing) - done} of {len(missing)} runs are left. The same command goes on.")
        if kept + done == 0 and missing:
            return self.out
        return self.report(lr, time.perf_counter() - start)

    def make_here(self, missing: list[tuple[int, Method]], lr: float | None, limit: TimeLimit) -> Iterator[dict[str, Any]]:
        """Make runs, as far as the time allows; what the file of each says, as they end."""
        for together in self.in_batches(missing, lr):
            if limit.left < ENOUGH_SECONDS:
                return
            try:
                yield from self.make(together, lr, limit)
            except OutOfTime:
                self.say(f"Stopped in {together}; the same command goes on from its checkpoint.")
                return

    def elsewhere(self, out: Path, say: PrintLine) -> ExperimentRuns:
        """The same runs in another folder, by one process that tells somebody else."""
        on_gpu = self.device is not None and self.device.startswith("cuda")
        return replace(self, out=out, say=say, processes=None if on_gpu else 1)

    def keep(self, run: dict[str, Any]) -> None:
        """Store a run that was made elsewhere."""
        write_json(self.path_of(run["method"], run["seed"]), run)

    def report(self, lr: float | None, seconds: float) -> Path:
        """Print and save the tables of the stored runs."""
        stored = {
            m.name: {seed: run for seed in self.seeds_of(m) if (run := self.stored(m, seed, lr))} for m in self.entry.methods
        }
        rows = {name: runs for name, runs in stored.items() if runs}
        if not rows:
            raise ConfigError(f"{self.out / 'runs'} holds no run with these settings.")
        rate, tuned = lr or self.entry.solver.lr, lr is not None
        reproduction = Reproduction(
            self.entry, self.scale_name, self.scale, tuple(self.seeds), rate, tuned, rows, seconds, self.chosen, self.options
        )
        text = reproduction.markdown()
        write_json(self.out / "result.json", reproduction.record(), indent=1)
        write_atomically(self.out / "result.md", (text + "\n").encode())
        self.say(f"\n{text.replace('**', '')}\n\n{self.out / 'result.md'}\n{self.out / 'result.json'}")
        return self.out

    def in_batches(self, missing: list[tuple[int, Method]], lr: float | None) -> Iterator[RunsTogether]:
        """The missing runs in groups whose clients can work in one batch, in the order of their first members.

        The data of one group are in memory at a time; groups on the same data follow each other.
        """
        for same in grouped(range(len(missing)), lambda i, j: self.data_key(*missing[i]) == self.data_key(*missing[j])):
            data = self.data(missing[same[0]][1], missing[same[0]][0])
            yield from together_on([missing[i] for i in same], self, data, lr)

    def planned(self, method: Method, seed: int, data: FederatedData, lr: float | None) -> SeededRun:
        """A run to be made."""
        model = build(lambda seed: self.entry.model(data, self.folder, seed), seed, nn.Module, "model")
        return SeededRun(method.name, self.entry.algorithm(method, self.scale, lr), seed, model, data)

    def data_key(self, seed: int, method: Method) -> tuple[object, ...]:
        """What is the same for runs that share their data. Clients of a smaller scale are drawn again for each seed."""
        drawn = self.scale.train_clients is not None or self.scale.test_clients is not None
        same = self.entry.same_data and not drawn
        return (0 if same else seed, json.dumps(dict(method.variant), sort_keys=True))

    def data(self, method: Method, seed: int) -> FederatedData:
        """The data of a method for a seed, cut to the size of the scale."""
        data = self.entry.data(self.folder, seed, **{**self.scale.options, **method.variant})
        return at_most(data, self.scale.train_clients, self.scale.test_clients, seed)

    def path_of(self, method: str, seed: int) -> Path:
        """The file of a run of a method by name."""
        return self.out / "runs" / f"{slug(method)}-seed{seed}.json"

    def settings(self, method: Method, lr: float | None) -> dict[str, Any]:
        """The settings that a stored run must have been made with to count."""
        return {
            "algorithm": repr(self.entry.algorithm(method, self.scale, lr)),
            "rounds": self.rounds_of(method),
            "clients_per_round": self.scale.clients_per_round,
            "clients": [self.scale.train_clients, self.scale.test_clients],
            "data": {**self.scale.options, **method.variant},
            **({} if self.precision == "float32" else {"precision": self.precision}),
        }

    def run_in_file(self, method: str, seed: int) -> dict[str, Any]:
        """The run in the file of a method and seed, whatever its settings; empty if there is none."""
        return read_json(self.path_of(method, seed))

    def stored(self, method: Method, seed: int, lr: float | None) -> dict[str, Any] | None:
        """The stored run with these settings, or None."""
        run = self.run_in_file(method.name, seed)
        return run if run.get("settings") == self.settings(method, lr) else None

    def train(self, method: Method, seed: int, data: FederatedData, lr: float | None, rounds: int) -> Result:
        """Train a method with a seed."""
        return train(
            lambda seed: self.entry.model(data, self.folder, seed),
            data,
            self.entry.algorithm(method, self.scale, lr),
            rounds=rounds,
            clients_per_round=min(self.scale.clients_per_round, len(data.train)),
            seed=seed,
            engine=self.engine,
            progress=False,
            name=method.name,
        )

    def make(self, together: RunsTogether, lr: float | None, limit: TimeLimit) -> list[dict[str, Any]]:
        """Make runs together and store them, one that diverges as such. Their time includes that of calls that were stopped."""
        start, data = time.perf_counter(), together.runs[0].data
        settings = {"experiment": self.entry.name, **self.settings(together.methods[0], lr)}
        checkpoint = together.checkpoint(self.out / "checkpoints", settings)
        times = checkpoint.with_suffix(".seconds.json")
        before = float(read_json(times).get("seconds", 0.0))  # of earlier calls, from whose checkpoint this one goes on
        try:
            results, curves = together.train(self.engine, min(self.scale.clients_per_round, len(data.train)), checkpoint, limit)
        except (OutOfTime, KeyboardInterrupt):
            write_json(times, {"seconds": before + time.perf_counter() - start})
            raise
        seconds = (before + time.perf_counter() - start) / len(results)
        made = []
        for method, planned, result, curve in zip(together.methods, together.runs, results, curves, strict=True):
            run = self.about(method, planned.seed, data, lr) | {"together": len(results)}
            began = time.perf_counter()
            try:
                if isinstance(result, Diverged):
                    raise result
                solver = self.entry.local_solver(method, self.scale, lr)
                run["figures"] = self.entry.measure(FinishedRun(result, data, solver, self.device, curve))
                run |= further_results(result)
                if curve:
                    run["curve"] = {str(after): accuracy for after, accuracy in sorted(curve.items())}
            except Diverged as failure:
                run["failed"] = f"diverged in round {failure.round + 1}"
            run["seconds"] = seconds + time.perf_counter() - began
            write_json(self.path_of(method.name, planned.seed), run)
            made.append(run)
        return made

    def about(self, method: Method, seed: int, data: FederatedData, lr: float | None) -> dict[str, Any]:
        """What the file of a run says besides its results."""
        return {
            "experiment": self.entry.name,
            "scale": self.scale_name,
            "method": method.name,
            "seed": seed,
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": machine(self.device),
            "versions": versions(),
            "settings": self.settings(method, lr),
            "clients": {split: len(clients) for split, clients in data.splits.items()},
            "examples": {split: clients.examples for split, clients in data.splits.items()},
        }

    def tuned_rate(self, *, only_stored: bool = False) -> float:
        """The learning rate with the smallest mean training loss of the first method, on a seed that is not reported."""
        method = self.entry.methods[0]
        path = self.out / "tuning.json"
        settings = {"rates": list(self.entry.rates), **self.settings(method, None), "seed": CHOOSING_SEED}
        stored = read_json(path)
        if stored.get("settings") != settings:
            if only_stored:
                raise ConfigError(f"{path} holds no learning rate chosen with these settings.")
            data = self.tuning_data(method)
            losses: dict[str, float | None] = {}
            for rate in self.entry.rates:
                try:
                    losses[f"{rate:g}"] = training_loss(self.train(method, CHOOSING_SEED, data, rate, self.scale.rounds))
                except Diverged:
                    losses[f"{rate:g}"] = None
                self.say(f"tuning: learning rate {rate:g}, training loss {losses[f'{rate:g}']}")
            stored = {"settings": settings, "losses": losses}
            write_json(path, stored, indent=1)
        finite = {rate: loss for rate, loss in stored["losses"].items() if loss is not None}
        if not finite:
            raise InvalidParameter("rates", "must hold one that does not diverge", list(self.entry.rates))
        return float(min(finite, key=finite.__getitem__))

    def tuning_data(self, method: Method) -> FederatedData:
        """The data of a seed that is not reported, without training clients that are test clients of a reported one."""
        data = self.data(method, CHOOSING_SEED)
        if not self.entry.needs:  # made by the seed: clients of one name differ
            return data
        sets = [self.data(method, seed).test for seed in self.seeds]
        tested = {name for clients in sets if clients is not None for name in clients.ids}
        kept = [k for k, name in enumerate(data.train.ids) if name not in tested]
        rule = "must leave training clients that no reported seed tests on, to choose a learning rate by"
        require(len(kept) > 0, "seeds", rule, self.scale.seeds, "Take fewer seeds, or do without --tune.")
        return replace(data, train=data.train.take(kept))

    def warn_of_duration(self, first: tuple[int, Method], count: int, lr: float | None) -> None:
        """Print how long the full setting will take on a processor, estimated from three rounds."""
        seed, method = first
        probe = self.train(method, seed, self.data(method, seed), lr, 3)
        hours = median(report.seconds for report in probe.history.rounds) * self.scale.rounds * count / 3600
        self.say(
            f"Warning: the paper's setting is meant for a GPU (--device cuda). On this processor {count} runs take about "
            f"{hours:.1f} hours and evaluations; --scale small takes minutes. What is done is kept when you stop it."
        )


def together_on(
    missing: list[tuple[int, Method]], runs: ExperimentRuns, data: FederatedData, lr: float | None
) -> Iterator[RunsTogether]:
    """Missing runs on the same data in groups whose clients can work in one batch."""
    planned = [runs.planned(method, seed, data, lr) for seed, method in missing]
    rounds = [runs.rounds_of(method) for _, method in missing]
    every = [runs.entry.evaluations(method, count) for (_, method), count in zip(missing, rounds, strict=True)]

    def alike(i: int, j: int) -> bool:
        return (rounds[i], every[i]) == (rounds[j], every[j]) and planned[i].goes_with(planned[j])

    for group in grouped(range(len(planned)), alike):
        first = group[0]
        yield RunsTogether([missing[i][1] for i in group], [planned[i] for i in group], rounds[first], every[first])


def read_json(path: Path) -> dict[str, Any]:
    """The object in a JSON file; empty if the file is absent or damaged."""
    try:
        content: dict[str, Any] = parse_json(path)
    except (FileNotFoundError, ValueError):
        return {}
    return content


def write_json(path: Path, content: Mapping[str, Any], indent: int | None = None) -> None:
    """Write an object as JSON; the file is whole or absent."""
    write_atomically(path, (json.dumps(content, indent=indent, ensure_ascii=False) + "\n").encode())


def training_loss(result: Result) -> float:
    """The mean training loss of a finished run, weighted by examples."""
    rows = result.clients.where("train")
    return mean(rows.loss, rows.size)


def further_results(result: Result) -> Mapping[str, Any]:
    """What the file of a run holds besides its figures: training loss, cohort sizes and errors of test clients.

    "test_errors" are those of the shared model; "served_errors", where clients have models of their own, those of these.
    """
    rows = result.clients.where("test")
    trained = [report.trained for report in result.history.rounds]
    served = {"served_errors": torch.round(rows.served_error, decimals=6).tolist()} if rows.has_own else {}
    return {
        "training_loss": training_loss(result),
        "trained_per_round": sum(trained) / max(1, len(trained)),
        "test_clients": list(rows.client),
        "test_examples": rows.size.tolist(),
        "test_errors": torch.round(rows.error, decimals=6).tolist(),
        **served,
    }
