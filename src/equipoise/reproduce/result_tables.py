"""What a reproduction prints and saves: published and measured figures side by side, and what differs."""

from __future__ import annotations

import math
import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from equipoise.core.version import VERSION
from equipoise.report.notices import notice
from equipoise.report.over_seeds import Spread
from equipoise.report.paired import LEAST_SEEDS, NO_SPREAD, difference_text, interval_text, lower_text, paired
from equipoise.reproduce.entry import Claim, Experiment, Scale
from equipoise.reproduce.published import PublishedTable, table

ON_TEST_MARK = "\\*"
ON_TEST_NOTE = (
    "The paper chose this parameter on the test clients that it reports, so the published numbers are somewhat too good."
)


def slug(name: str) -> str:
    """A name for files and shells: "Δ-FL 0.5" is "delta-fl-0.5"."""
    return re.sub(r"[^a-z0-9.]+", "-", name.strip().replace("Δ", "delta").replace("μ", "mu").lower()).strip("-")


def machine(device: str | None) -> str:
    """The device that runs are made on, in words."""
    if device is not None and torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''}"


def processor() -> str:
    """The model name of the processor, as far as the system tells."""
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    """The versions of the libraries that decide a result."""
    return {
        "equipoise": VERSION, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
    }  # fmt: skip


def spread_text(value: Spread | None, digits: int, seeds: int) -> str:
    """Mean ± standard deviation over seeds; the mean alone for one seed, a dash for None."""
    if value is None:
        return "–"
    return f"{value.mean:z.{digits}f}" + (f" ± {value.deviation:.{digits}f}" if seeds > 1 else "")


def duration(seconds: float) -> str:
    """Seconds as text, in seconds, minutes or hours."""
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


@dataclass(frozen=True)
class Reproduction:
    """The runs of an experiment, with the scale, seeds and learning rate that they have."""

    entry: Experiment
    scale_name: str
    scale: Scale
    seeds: tuple[int, ...]
    lr: float
    tuned: bool
    rows: Mapping[str, Mapping[int, Mapping[str, Any]]]  # method → seed → the run; some may be missing
    seconds: float  # of this call
    chosen: Mapping[str, float] | None = None  # the rate of each method, if it was chosen on validation examples
    options: str = ""  # of the command, such as " --seeds 3", as far as they change results

    @property
    def runs(self) -> list[Mapping[str, Any]]:
        """All runs, method by method."""
        return [run for runs in self.rows.values() for run in runs.values()]

    @property
    def clients(self) -> tuple[int, int]:
        """The numbers of training and of test clients."""
        return self.runs[0]["clients"]["train"], self.runs[0]["clients"]["test"]

    @property
    def total_seconds(self) -> float:
        """The wall time of all runs together."""
        return float(sum(run["seconds"] for run in self.runs))

    @property
    def machines(self) -> str:
        """The machines that made the runs."""
        return "; ".join(dict.fromkeys(run["machine"] for run in self.runs))

    @property
    def dates(self) -> str:
        """The first and the last day on which runs were made."""
        days = sorted({run["date"][:10] for run in self.runs})
        return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"

    def values(self, method: str, figure: str) -> dict[int, float]:
        """A figure of a method by seed, for the seeds that were run and did not diverge."""
        runs = self.rows.get(method, {})
        return {seed: run["figures"][figure] for seed, run in runs.items() if "figures" in run}

    def measured(self, method: str, figure: str) -> Spread | None:
        """A figure of a method over the seeds that did not diverge; None if there are none."""
        values = self.values(method, figure).values()
        return Spread.of(values) if values else None

    def expected(self, method: str) -> int:
        """How many seeds a method is to be run with."""
        limits = [m.seeds for m in self.entry.methods if m.name == method and m.seeds is not None]
        return min([len(self.seeds), *limits])

    def remarks(self, method: str) -> str:
        """How many seeds of a method diverged or are missing, as text; empty if none."""
        runs, count = self.rows.get(method, {}), self.expected(method)
        diverged = sum("failed" in run for run in runs.values())
        words = [f"{diverged} of {count} seeds diverged"] if diverged else []
        if len(runs) < count:
            words.append(f"{len(runs)} of {count} seeds run")
        return f" — {', '.join(words)}" if words else ""

    def side_by_side(self, published: PublishedTable | None) -> list[str]:
        """The lines of a Markdown table: published figures beside measured ones, or measured ones only."""
        entry, digits = self.entry, {name: figure.digits for name, figure in self.entry.figures.items()}
        rows = {m.name: published.rows.get(m.name) if published else None for m in entry.methods}
        if published is not None and published.rows:
            rows = {name: row for name, row in rows.items() if row is not None}
        with_numbers = [f for f in entry.figures if any(row is not None and f in row.figures for row in rows.values())]
        alone = [name for name, figure in entry.figures.items() if figure.unpublished and name not in with_numbers]
        figures = [*with_numbers, *alone] if with_numbers else list(entry.figures)
        heads = ["method"]
        for name in figures:
            title = entry.figures[name].title
            heads += [f"{title}, published", f"{title}, measured"] if name in with_numbers else [title]
        lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
        for method, row in rows.items():
            parameter = ""
            if row is not None and row.parameter:
                said = "" if row.parameter in method else f" ({row.parameter})"  # "q = 1" is named by its parameter
                parameter = f"{said}{ON_TEST_MARK if row.chosen_on_test else ''}"
            cells = [method + parameter + self.remarks(method)]
            for name in figures:
                if name in with_numbers:
                    seeds = 1 if row is not None and name in row.means_only else 2
                    cells.append(spread_text(row.figures.get(name) if row else None, digits[name], seeds))
                cells.append(spread_text(self.measured(method, name), digits[name], len(self.values(method, name))))
            lines.append(f"| {' | '.join(cells)} |")
        return lines

    def verdict(self, claim: Claim) -> str:
        """A sentence on whether a published claim holds, "yes", "no" or "undecided" by its 95 % interval.

        It is over the seeds in which both methods finished. A claim of "lower" does not hold if the method is higher.
        """
        title = self.entry.figures[claim.figure].title
        lower, higher = (self.values(method, claim.figure) for method in (claim.lower, claim.higher))
        found = paired(claim.lower, lower, higher)
        text = f"{title}: {claim.lower} below {claim.higher} ({claim.source})"
        if not found.seeds:
            return f"{text}: no seed in which both finished."
        word = {"lower": "yes", "higher": "no", "undecided": "undecided"}[found.verdict]
        digits = self.entry.figures[claim.figure].digits
        word += f" ({NO_SPREAD})" if found.constant and found.seeds >= LEAST_SEEDS else ""
        between = f" 95 % interval {interval_text(found, digits)}." if math.isfinite(found.interval.low) else ""
        more = f" An interval needs {LEAST_SEEDS} seeds: add --seeds {LEAST_SEEDS}."
        more = "" if found.seeds >= LEAST_SEEDS or not any(found.values) else more  # more seeds seldom part what is equal
        return f"{text}: **{word}**. Difference {difference_text(found, digits)}, lower in {lower_text(found)}.{between}{more}"

    def stated_claims(self) -> list[Claim]:
        """The published claims whose two methods were run."""
        return [claim for claim in self.entry.claims if {claim.lower, claim.higher} <= self.rows.keys()]

    def differences(self) -> list[str]:
        """Sentences on what differs from the paper."""
        entry, scale, paper = self.entry, self.scale, self.entry.scales["paper"]
        train, test = self.clients
        sentences = []
        for word, here, there in (
            ("rounds", scale.rounds, paper.rounds),
            ("clients per round", min(scale.clients_per_round, train), paper.clients_per_round),
            ("seeds", scale.seeds, paper.seeds),
        ):
            if here != there:
                sentences.append(f"{here} {word if here != 1 else word.removesuffix('s')} instead of the paper's {there}.")
        if entry.paper_clients is not None and (train, test) != entry.paper_clients:
            sentences.append(
                f"{train} training and {test} test clients instead of the paper's {entry.paper_clients[0]} and "
                f"{entry.paper_clients[1]}."
            )
        if scale.options:
            sentences.append("Data options of this scale: " + ", ".join(f"{k} = {v}" for k, v in scale.options.items()) + ".")
        rates, first = ", ".join(f"{rate:g}" for rate in entry.rates), entry.methods[0].name
        if self.chosen is not None and entry.choose is not None:
            by_method = ", ".join(f"{name} {rate:g}" for name, rate in self.chosen.items())
            rounds = min(entry.choose.rounds, scale.rounds)
            sentences.append(
                f"The learning rate of each method was chosen from {rates} by the accuracy on {entry.choose.share:.0%} of the "
                f"examples, kept from training for validation, after {rounds} rounds with a seed "
                f"that is not reported: {by_method}."
            )
        elif self.tuned or entry.retuned:
            where = "on a seed that is not reported" if self.tuned else "at the small scale, on a seed that is not reported"
            sentences.append(
                f"Learning rate {self.lr:g}, chosen from {rates} by the mean training loss of {first} {where} (the paper's is "
                f"{entry.paper_lr:g}, chosen in the same way)."
            )
        else:
            how = f"one by the training loss of {first}"
            if entry.choose is not None:
                how = f"one for each method by its accuracy on {entry.choose.share:.0%} of the examples"
            sentences.append(f"Learning rate {self.lr:g}, {entry.rate_from}; --tune would choose {how}.")
        if entry.decay_after is not None and scale.rounds != paper.rounds:
            sentences.append(f"The learning rate halves after each {entry.decay_after:.0%} of the rounds, as in the paper.")
        return [*sentences, *entry.differences]

    def markdown(self) -> str:
        """The whole report of a reproduction as Markdown."""
        entry = self.entry
        train = self.clients[0]
        tables = [table(reference) for reference in entry.tables]
        seeds = ", ".join(map(str, self.seeds))
        count = f"mean ± standard deviation over seeds {seeds}" if len(self.seeds) > 1 else f"seed {seeds} alone"
        tune = " --tune" if self.tuned or self.chosen else ""
        lines = [
            f"### {entry.name}: {entry.title}",
            "",
            f"`equipoise reproduce {entry.name} --scale {self.scale_name}{self.options}{tune}`, {self.dates}, {self.machines}, "
            f"{duration(self.total_seconds)} for {len(self.runs)} runs. {self.scale.rounds} rounds, "
            f"{min(self.scale.clients_per_round, train)} of {self.client_counts('train')} clients per round, "
            f"{self.client_counts('test')} "
            f"{'unseen test clients' if entry.unseen else 'test clients (other examples of the same)'}, {count}.",
        ]
        for published in tables:
            lines += ["", f"Published: {published.document}, {published.source}.", "", *self.side_by_side(published)]
            if any(row.chosen_on_test for name, row in published.rows.items() if name in self.rows):
                lines += ["", f"{ON_TEST_MARK} {ON_TEST_NOTE}"]
            if published.notes:
                lines += ["", *(f"- Note: {note}" for note in published.notes)]
        if not tables:
            lines += ["", "No numbers were published for these data.", "", *self.side_by_side(None)]
        if stated := self.stated_claims():
            lines += [
                "",
                f"Published directions. {notice('interval-rule')}",
                "",
                *(f"- {self.verdict(claim)}" for claim in stated),
            ]
        lines += ["", "What differs from the paper:", "", *(f"- {text}" for text in self.differences())]
        return "\n".join(lines)

    def client_counts(self, split: str) -> str:
        """The number of clients of a split, or the numbers if methods have different data."""
        return " or ".join(str(count) for count in dict.fromkeys(run["clients"][split] for run in self.runs))

    def record(self) -> dict[str, Any]:
        """The whole report of a reproduction as a JSON object."""
        entry = self.entry
        published = [table(reference) for reference in entry.tables]
        return {
            "experiment": entry.name,
            "title": entry.title,
            "scale": self.scale_name,
            "setting": {**asdict(self.scale), "options": dict(self.scale.options)},
            "learning_rate": self.lr,
            "tuned": self.tuned,
            "chosen_rates": None if self.chosen is None else dict(self.chosen),
            "seeds": list(self.seeds),
            "date": datetime.now(UTC).isoformat(timespec="seconds"),
            "machine": self.machines,
            "versions": versions(),
            "seconds": {"runs": self.total_seconds, "this_call": self.seconds},
            "published": [asdict(each) for each in published],
            "measured": {
                method: {
                    "figures": {
                        name: asdict(value) for name in entry.figures if (value := self.measured(method, name)) is not None
                    },
                    "diverged": sum("failed" in run for run in runs.values()),
                    "by_seed": {
                        seed: {
                            key: run.get(key) for key in ("figures", "failed", "training_loss", "trained_per_round", "seconds")
                        }
                        for seed, run in runs.items()
                    },
                }
                for method, runs in self.rows.items()
            },
            "directions": [self.verdict(claim) for claim in self.stated_claims()],
            "differences": self.differences(),
        }
