"""Methods beside each other: the same data, cohorts and batches for each, over several seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.core.words import counted, joined, table_lines
from equipoise.data.clients import FederatedData
from equipoise.errors import each_notice_once, require
from equipoise.privacy.observer_table import composed_words
from equipoise.report import export_figures, write_report
from equipoise.report.formats import Judged, ValueFormat, capital
from equipoise.report.notices import about_runs, covered, metric_notices, notice, trivial_notices
from equipoise.report.over_seeds import FIGURES, Spread, figures_of, intervals_of, metric_figures, trivial_name
from equipoise.report.paired import Differences
from equipoise.report.paper_tables import differences_of, latex_table, markdown_table, paper_table
from equipoise.result import Result
from equipoise.runs.checked_first import refuse_unfit_methods
from equipoise.runs.checkpoint import Checkpoints, checkpoint_of
from equipoise.runs.interrupted import note_finished
from equipoise.runs.setup import DataOrMaker, ModelOrMaker, build, chosen_seeds
from equipoise.subgroups import subgroup_lines
from equipoise.train import train

__all__ = ["FIGURES", "Comparison", "Differences", "Spread", "compare", "figures_of"]


@dataclass(frozen=True, eq=False)
class Comparison:
    """Results by method, one per seed. `summary()` is the table, `report(path)` writes the page, `save(folder)` all runs, and
    `to_markdown()`, `to_latex()` and `figures(folder)` give what a paper needs.

    `compare` and `train_many` give it. Source: ours.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=5, validation_clients=0, test_clients=3, examples=20)
    >>> methods = {"FedAvg": eq.Algorithm(), "tail": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
    >>> made = eq.compare(methods, eq.models.Softmax(20, 10), data, rounds=2, clients_per_round=3, seeds=2)
    >>> [(name, len(runs)) for name, runs in made.results.items()], made.results["tail"][1].seed
    ([('FedAvg', 2), ('tail', 2)], 1)
    >>> sorted(made.table()["FedAvg"])[:3]  # each with its mean and deviation over seeds
    ['mean', 'percentile_90', 'seconds']
    """

    results: dict[str, list[Result]]  # by the name of the method, in the order of the seeds
    note: str = ""  # a clause on the clients that tables add, e.g. by which of their examples they are judged

    def table(self, split: str | None = None, *, at_least: int = 0) -> dict[str, dict[str, Spread]]:
        """Per method the figures of the error, in fractions, over seeds, with trained clients per round and seconds.

        `split` and `at_least` are as in `summary`.
        """
        return {method: figures_of(runs) for method, runs in self._judged_by(split, at_least).results.items()}

    def _judged_by(self, split: str | None, at_least: int) -> Comparison:
        judged = {method: [run.judged_by(split, at_least) for run in runs] for method, runs in self.results.items()}
        return replace(self, results=judged)

    def differences(
        self, baseline: str | None = None, *, figure: str = "percentile_90", split: str | None = None, column: str = "error",
        at_least: int = 0,
    ) -> Differences:  # fmt: skip
        """Paired differences: a figure under each method minus that under `baseline` (None: the first), seed by seed.

        With the same seed, methods share data, batches and initial weights, and cohorts if they have the same sampler and are
        not private (a line says if not), so the differences vary less than the figures. Each row has the mean and standard
        deviation of the differences, and their 95 % interval. The interval is Student's t over seeds, from 3 seeds on. It
        assumes that the differences are roughly normal. Each row also says in how many seeds the method is lower, and has a
        verdict: "lower" or "higher" if the interval does not contain 0 (significant at 5 %), else "undecided". It is undecided,
        too, if all seeds give the same difference. `split` and `at_least` are as in `summary`: choose a method with
        `split="validation"`, and test it with `split="test"`. `figure` and `column` are those of `to_markdown`.
        """
        judged = self._judged_by(split, at_least)
        first = next(iter(self.results))
        return differences_of(judged.results, first if baseline is None else baseline, figure, column)

    @property
    def all_results(self) -> list[Result]:
        """All results, method by method."""
        return [run for runs in self.results.values() for run in runs]

    @property
    def privacy(self) -> str:
        """What the private runs cost, each alone and all on one data set together: empty without differential privacy.

        Runs with other seeds, methods or settings on the same data add up, whichever of them is published in the end.
        """
        private = [run for run in self.all_results if run.epsilon is not None]
        lines = []
        for data in dict.fromkeys(run.data for run in private):
            runs = [run for run in private if run.data == data]
            if together := composed_words(run.privacy for run in runs):
                most = max(runs, key=lambda run: run.epsilon.epsilon if run.epsilon is not None else 0.0)
                spent = most.epsilon
                alone = "" if spent is None or spent.nominal else f"ε of one run: {spent.epsilon:.4g} ({spent.adjacency}). "
                lines.append(f"{alone}{together} {notice('not-covered')}")
        return joined(lines)

    def to_markdown(
        self, split: str | None = None, *, column: str = "error", figures: Iterable[str] = tuple(FIGURES),
        percent: bool = False, digits: int | None = None, trivial: bool = True, baseline: str | None = None,
        at_least: int = 0,
    ) -> str:  # fmt: skip
        """The table as Markdown: figures over the clients of a split, mean ± standard deviation over seeds.

        `split` and `at_least` are as in `summary`. `column` is "error" or "loss" of the model that clients are served, or a
        metric. `figures` are any of mean, percentile_90 (also 10, 20, 25, 50, 60, 75, 80, 95), worst_10, worst_5, best_10,
        best_5, standard_deviation, variance, mean_by_example, gini, angle and the others of `metrics.Summary`. `percent`
        multiplies by 100; it is refused for a loss and for the error of a number. `digits` after the point are 3, or 1 for
        percent. `trivial` adds a row for the trivial answer. `baseline` names a method: a second table then has the paired
        differences of all others from it (see `differences`). A cell is bold if the paired 95 % intervals say that its method
        is better than every other one; the caption says so, or why nothing is bold.
        """
        return paper_table(
            self._judged_by(split, at_least).results, markdown_table, column=column, figures=figures, percent=percent,
            digits=digits, trivial=trivial, baseline=baseline, note=self.note,
        )  # fmt: skip

    def to_latex(
        self, split: str | None = None, *, column: str = "error", figures: Iterable[str] = tuple(FIGURES),
        percent: bool = False, digits: int | None = None, trivial: bool = True, baseline: str | None = None,
        at_least: int = 0,
    ) -> str:  # fmt: skip
        """The table as a LaTeX tabular for the package booktabs.

        The options are those of `to_markdown`.
        """
        return paper_table(
            self._judged_by(split, at_least).results, latex_table, column=column, figures=figures, percent=percent,
            digits=digits, trivial=trivial, baseline=baseline, note=self.note,
        )  # fmt: skip

    def summary(self, split: str | None = None, *, at_least: int = 0) -> str:
        """The table as text: error over clients, mean ± standard deviation over seeds.

        `split` is "test", "validation" or "train" (None: the first of these that the data have). `at_least=30` leaves out
        clients with fewer examples in this split; the text says how many.
        """
        if split is not None or at_least != 0:
            return self._judged_by(split, at_least).summary()
        runs, table = self.all_results, self.table()
        seeds, answer = len(next(iter(self.results.values()))), trivial_name(self.all_results)
        heads = ["method", "mean", "90th pct.", "worst 10 %", "std. dev."]
        over = f"mean ± standard deviation over seeds ({seeds})"

        def figures(name: str, row: Mapping[str, Spread], prefix: str = "") -> list[str]:
            spreads = [row[prefix + key] for key in FIGURES]
            return [name, *(f"{s.mean:z.3f}" + (f" ± {s.deviation:.3f}" if seeds > 1 else "") for s in spreads)]

        def intervals(method: str, column: str) -> list[list[str]]:
            found = intervals_of(self.results[method], column)
            texts = [found[key].text("{:.3f}".format) if key in found else "" for key in FIGURES]
            return [["  95 % interval", *texts, ""]] if found else []

        rows = [[*heads, "trained"]]
        for method, row in table.items():
            rows += [[*figures(method, row), f"{row['trained'].mean:.1f}"], *intervals(method, "error")]
            if "shared_mean" in row:
                rows += [[*figures("  shared model", row, "shared_"), ""], *intervals(method, "shared_error")]
        if trivial := next((row for row in table.values() if "trivial_mean" in row), None):
            rows.append([*figures(answer, trivial, "trivial_"), ""])
        lines = [f"{capital(runs[0].measured)} over {Judged.of(runs)}{self.note}, {over}", *table_lines(rows)]
        if seeds > 1 and len(table) == 1:
            lines.append(str(covered(runs)))
        scale = ValueFormat(percent=False, decimals=3)
        lines += map(str, trivial_notices(table, answer, runs[0].error_name, scale))
        lines += self._difference_lines()
        if spent := self.privacy:
            lines += spent.split("\n")
        lines += map(str, about_runs(self.results))
        for name in dict.fromkeys(name for run in runs for name in run.clients.metrics):
            found = {method: metric_figures(each, name) for method, each in self.results.items()}
            known = {method: each for method, each in found.items() if each is not None}
            better = "more" if all(each.higher_is_better for each in known.values()) else "less"
            lines += ["", f"{name} over the same clients, {better} is better"]
            lines += table_lines([heads, *(figures(method, each.figures) for method, each in known.items())])
            lines += map(str, metric_notices({name: max(count for each in known.values() for count in each.missing)}))
        lines += subgroup_lines(self.results)
        lines += [f"{run.name}, seed {run.seed}: {run.history.stopped}" for run in runs if run.history.stopped is not None]
        return joined(lines)

    def _difference_lines(self) -> list[str]:
        """The paired differences of the 90th percentile from the first method, and verdicts on the mean and the worst 10 %.

        None for one method, or one seed.
        """
        first, *others = self.results.values()
        clients = first[0].clients.where(first[0].judged_on)
        if not others or len(first) < 2 or clients.clients_in_mean is not None:
            return []
        beside = [self.differences(figure=figure) for figure in ("mean", "worst_10")]
        return ["", *self.differences().lines(others=beside)]

    def __repr__(self) -> str:
        return f"Comparison({counted(len(self.results), 'method')})\n{self.summary()}"

    def report(self, path: str | Path, *, title: str | None = None, at_least: int = 0) -> Path:
        """Write one HTML page that opens offline, under a `title`; `at_least` is that of `summary`."""
        return write_report(self._judged_by(None, at_least).all_results, path, title=title)

    def figures(self, folder: str | Path, format: str | Iterable[str] = "pdf", *, at_least: int = 0) -> list[Path]:
        """Write each figure of the report as a file for a paper; returns their paths.

        `format` is "pdf", "svg" or "png", or several of these. Among the figures are histogram (the error of every client),
        percentiles, tradeoff (tail against mean) and curves (over the rounds). `at_least` is that of `summary`.
        """
        return export_figures(self._judged_by(None, at_least).all_results, folder, format)

    def save(self, folder: str | Path) -> Path:
        """Write the folder of a study: a folder for each run, as `Result.save` writes it, and report.html.

        `equipoise report` reads it like that of `equipoise compare`. The folder must be new or empty, and appears whole or not
        at all.
        """
        from equipoise.experiment.saved_run import save_comparison

        return save_comparison(self, folder)


def compare(
    methods: Mapping[str, Algorithm],
    model: ModelOrMaker,
    data: DataOrMaker,
    *,
    rounds: int,
    clients_per_round: int | None = None,
    seeds: int | Iterable[int] = 1,
    **options: Any,
) -> Comparison:
    """Train every method with every seed; `seeds=5` means 0 … 4. Further options are those of `train`. Source: ours.

    All methods are checked with the model and the data before the first round of the first one. `checkpoint="c.ckpt"` gives
    each run a file beside it, named by method and seed (`c-FedAvg-seed0.ckpt`), so that methods and seeds may be added later.
    If a run fails, the attribute `finished` of the error, whatever raised it, is a Comparison of the runs that ended before.

    `methods` has an Algorithm by the name that tables show. `options` are passed on to `train`.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(train_clients=5, validation_clients=0, test_clients=3, examples=20)
    >>> methods = {"FedAvg": eq.Algorithm(), "tail": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
    >>> made = eq.compare(methods, eq.models.Softmax(20, 10), data, rounds=2, clients_per_round=3, seeds=2)
    >>> {name: len(runs) for name, runs in made.results.items()}
    {'FedAvg': 2, 'tail': 2}
    """
    chosen = chosen_seeds(seeds)
    good = isinstance(methods, Mapping) and len(methods) > 0
    require(good, "methods", "must map names to algorithms", type(methods).__name__, 'E.g. {"FedAvg": Algorithm()}.')
    require("seed" not in options, "seed", "is called seeds here", options.get("seed"), "Write seeds=[…] or seeds=5.")
    options |= {"rounds": rounds, "clients_per_round": clients_per_round}
    saving = options.pop("checkpoint", None)
    saving = Checkpoints(saving) if isinstance(saving, str | Path) else saving
    results: dict[str, list[Result]] = {name: [] for name in methods}
    with each_notice_once():
        for seed in chosen:
            # Once per seed, so that all methods start from the same model on the same data.
            start, seeded = build(model, seed, nn.Module, "model"), build(data, seed, FederatedData, "data")
            if seed == chosen[0]:
                refuse_unfit_methods(methods, start, seeded, seed, options)
            version = "" if seeded is data else seeded.fingerprint  # seeds may have data of their own
            for name, algorithm in methods.items():
                file = None if saving is None else checkpoint_of(saving, name, seed)
                try:
                    run = train(start, seeded, algorithm, seed=seed, name=name, checkpoint=file, **options)
                except Exception as failure:  # also of a part of the user's own
                    failure.add_note(f"This was method {name!r} with seed {seed}.")
                    vars(failure)["finished"] = Comparison({method: runs for method, runs in results.items() if runs})
                    raise
                except KeyboardInterrupt as stop:
                    done = Comparison({method: runs for method, runs in results.items() if runs})
                    note_finished(stop, done, len(done.all_results), len(chosen) * len(methods))
                    raise
                results[name].append(replace(run, data_version=version))
    return Comparison(results)
