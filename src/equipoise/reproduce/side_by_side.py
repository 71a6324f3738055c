"""What a reproduction prints and saves: published and measured figures side by side, and what differs."""

from __future__ import annotations

import platform
import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from typing import Any

import numpy as np
import torch

from equipoise.core.version import VERSION
from equipoise.report.data.over_seeds import Spread
from equipoise.reproduce.entry import Claim, Experiment, Scale
from equipoise.reproduce.published import PublishedTable, table

MARK = "\\*"
ON_TEST = "The paper chose this parameter on the test clients that it reports, so the published numbers are somewhat too good."


def slug(name: str) -> str:
    """A name for files and shells: "Δ-FL 0.5" is "delta-fl-0.5"."""
    return re.sub(r"[^a-z0-9.]+", "-", name.strip().replace("Δ", "delta").replace("μ", "mu").lower()).strip("-")


@dataclass(frozen=True)
class Reproduction:
    """All runs of a reproduction."""

    entry: Experiment
    scale_name: str
    scale: Scale
    seeds: tuple[int, ...]
    lr: float
    tuned: bool
    rows: Mapping[str, Mapping[int, Mapping[str, Any]]]  # method → seed → the run; some may be missing
    seconds: float  # of this call

    @property
    def runs(self) -> list[Mapping[str, Any]]:
        return [run for runs in self.rows.values() for run in runs.values()]

    @property
    def clients(self) -> tuple[int, int]:
        """Training and test clients."""
        return self.runs[0]["clients"]["train"], self.runs[0]["clients"]["test"]

    @property
    def total_seconds(self) -> float:
        return float(sum(run["seconds"] for run in self.runs))

    @property
    def machines(self) -> str:
        """Where the runs were made."""
        return "; ".join(dict.fromkeys(run["machine"] for run in self.runs))

    @property
    def dates(self) -> str:
        days = sorted({run["date"][:10] for run in self.runs})
        return days[0] if len(days) == 1 else f"{days[0]} to {days[-1]}"

    def values(self, method: str, figure: str) -> dict[int, float]:
        """A figure by seed, for the seeds that are there and did not diverge."""
        runs = self.rows.get(method, {})
        return {seed: run["figures"][figure] for seed, run in runs.items() if "figures" in run}

    def measured(self, method: str, figure: str) -> Spread | None:
        """A figure over those seeds; None if there is none."""
        values = self.values(method, figure).values()
        return Spread.of(values) if values else None

    def remarks(self, method: str) -> str:
        """Whether seeds are missing or diverged."""
        runs, count = self.rows.get(method, {}), len(self.seeds)
        diverged = sum("failed" in run for run in runs.values())
        words = [f"{diverged} of {count} seeds diverged"] if diverged else []
        if len(runs) < count:
            words.append(f"{len(runs)} of {count} seeds run")
        return f" — {', '.join(words)}" if words else ""


def machine(device: str | None) -> str:
    """The machine in words."""
    if device is not None and torch.device(device).type == "cuda":
        return torch.cuda.get_device_name(torch.device(device))
    threads = torch.get_num_threads()
    return f"{processor()}, {threads} thread{'s' if threads > 1 else ''}"


def processor() -> str:
    try:
        with open("/proc/cpuinfo", encoding="utf-8") as file:
            return next(line.split(":", 1)[1].strip() for line in file if line.startswith("model name"))
    except (OSError, StopIteration):
        return platform.processor() or platform.machine()


def versions() -> dict[str, str]:
    return {
        "equipoise": VERSION, "torch": torch.__version__, "numpy": np.__version__, "python": platform.python_version(),
    }  # fmt: skip


def shown(value: Spread | None, digits: int, seeds: int) -> str:
    if value is None:
        return "–"
    return f"{value.mean:.{digits}f}" + (f" ± {value.deviation:.{digits}f}" if seeds > 1 else "")


def side_by_side(outcome: Reproduction, published: PublishedTable | None) -> list[str]:
    """One table: the published rows beside the measured ones, or the measured ones alone."""
    entry, digits = outcome.entry, {name: figure.digits for name, figure in outcome.entry.figures.items()}
    rows = {m.name: published.rows.get(m.name) if published else None for m in entry.methods}
    if published is not None and published.rows:
        rows = {name: row for name, row in rows.items() if row is not None}
    with_numbers = [f for f in entry.figures if any(row is not None and f in row.figures for row in rows.values())]
    figures = with_numbers or list(entry.figures)
    heads = ["method"]
    for name in figures:
        title = entry.figures[name].title
        heads += [f"{title}, published", f"{title}, measured"] if with_numbers else [title]
    lines = [f"| {' | '.join(heads)} |", "|---" * len(heads) + "|"]
    for method, row in rows.items():
        parameter = f" ({row.parameter}){MARK if row.marked else ''}" if row is not None and row.parameter else ""
        cells = [method + parameter + outcome.remarks(method)]
        for name in figures:
            if with_numbers:
                cells.append(shown(row.figures.get(name) if row else None, digits[name], 2))
            cells.append(shown(outcome.measured(method, name), digits[name], len(outcome.values(method, name))))
        lines.append(f"| {' | '.join(cells)} |")
    return lines


def verdict(outcome: Reproduction, claim: Claim) -> str:
    """Whether a published direction holds, over seeds."""
    title = outcome.entry.figures[claim.figure].title
    lower, higher = (outcome.values(method, claim.figure) for method in (claim.lower, claim.higher))
    pairs = [(lower[seed], higher[seed]) for seed in lower if seed in higher]
    text = f"{title}: {claim.lower} below {claim.higher} ({claim.source})"
    if not pairs:
        return f"{text}: no seed in which both finished."
    gap = Spread.of(high - low for low, high in pairs)
    holding = sum(low < high for low, high in pairs)
    word = "holds" if gap.mean > 0 else "does NOT hold"
    digits = outcome.entry.figures[claim.figure].digits
    return f"{text}: {word}, by {shown(gap, digits, len(pairs))}, in {holding} of {len(pairs)} seeds."


def claims(outcome: Reproduction) -> list[Claim]:
    """The claims whose methods were run."""
    return [claim for claim in outcome.entry.claims if {claim.lower, claim.higher} <= outcome.rows.keys()]


def differences(outcome: Reproduction) -> list[str]:
    """What differs from the paper, in plain words."""
    entry, scale, paper = outcome.entry, outcome.scale, outcome.entry.scales["paper"]
    train, test = outcome.clients
    found = []
    for word, here, there in (
        ("rounds", scale.rounds, paper.rounds),
        ("clients per round", min(scale.clients_per_round, train), paper.clients_per_round),
        ("seeds", scale.seeds, paper.seeds),
    ):
        if here != there:
            found.append(f"{here} {word if here != 1 else word.removesuffix('s')} instead of {there}.")
    if entry.paper_clients is not None and (train, test) != entry.paper_clients:
        found.append(
            f"{train} training and {test} test clients instead of {entry.paper_clients[0]} and {entry.paper_clients[1]}."
        )
    if scale.options:
        found.append("Data options of this scale: " + ", ".join(f"{k} = {v}" for k, v in scale.options.items()) + ".")
    rates, first = ", ".join(f"{rate:g}" for rate in entry.rates), entry.methods[0].name
    if outcome.tuned or entry.retuned:
        where = "on a seed that is not reported" if outcome.tuned else "at the small scale, on a seed that is not reported"
        found.append(
            f"Learning rate {outcome.lr:g}, chosen from {rates} by the mean training loss of {first} {where} (the paper's is "
            f"{entry.paper_lr:g}, chosen in the same way)."
        )
    else:
        found.append(f"Learning rate {outcome.lr:g}, the paper's; --tune would choose one by the training loss of {first}.")
    if entry.decay_after is not None and scale.rounds != paper.rounds:
        found.append(f"The learning rate halves after each {entry.decay_after:.0%} of the rounds, as in the paper.")
    return [*found, *entry.differences]


def markdown(outcome: Reproduction) -> str:
    """The whole report."""
    entry = outcome.entry
    train = outcome.clients[0]
    tables = [table(place) for place in entry.tables]
    seeds = ", ".join(map(str, outcome.seeds))
    count = f"mean ± standard deviation over seeds {seeds}" if len(outcome.seeds) > 1 else f"seed {seeds} alone"
    lines = [
        f"### {entry.name}: {entry.title}",
        "",
        f"`equipoise reproduce {entry.name} --scale {outcome.scale_name}`, {outcome.dates}, {outcome.machines}, "
        f"{wall(outcome.total_seconds)} for {len(outcome.runs)} runs. {outcome.scale.rounds} rounds, "
        f"{min(outcome.scale.clients_per_round, train)} of {counted(outcome, 'train')} clients per round, "
        f"{counted(outcome, 'test')} "
        f"{'unseen test clients' if entry.unseen else 'test clients (other examples of the same)'}, {count}.",
    ]
    for one in tables:
        lines += ["", f"Published: {one.document}, {one.source}.", "", *side_by_side(outcome, one)]
        if any(row.marked for name, row in one.rows.items() if name in outcome.rows):
            lines += ["", f"{MARK} {ON_TEST}"]
        if one.notes:
            lines += ["", *(f"- Note: {note}" for note in one.notes)]
    if not tables:
        lines += ["", "No numbers were published for these data.", "", *side_by_side(outcome, None)]
    if stated := claims(outcome):
        alone = " (one seed cannot tell a small difference from chance)" if len(outcome.seeds) == 1 else ""
        lines += ["", f"Published directions{alone}:", "", *(f"- {verdict(outcome, claim)}" for claim in stated)]
    lines += ["", "What differs from the paper:", "", *(f"- {text}" for text in differences(outcome))]
    return "\n".join(lines)


def counted(outcome: Reproduction, split: str) -> str:
    """The number of clients, or the numbers where rows have different data."""
    return " or ".join(str(count) for count in dict.fromkeys(run["clients"][split] for run in outcome.runs))


def wall(seconds: float) -> str:
    return f"{seconds:.0f} s" if seconds < 120 else f"{seconds / 60:.0f} min" if seconds < 7200 else f"{seconds / 3600:.1f} h"


def record(outcome: Reproduction) -> dict[str, Any]:
    """The same as JSON."""
    entry = outcome.entry
    published = [table(place) for place in entry.tables]
    return {
        "experiment": entry.name,
        "title": entry.title,
        "scale": outcome.scale_name,
        "setting": {**asdict(outcome.scale), "options": dict(outcome.scale.options)},
        "learning_rate": outcome.lr,
        "tuned": outcome.tuned,
        "seeds": list(outcome.seeds),
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "machine": outcome.machines,
        "versions": versions(),
        "seconds": {"runs": outcome.total_seconds, "this_call": outcome.seconds},
        "published": [asdict(one) for one in published],
        "measured": {
            method: {
                "figures": {
                    name: asdict(value) for name in entry.figures if (value := outcome.measured(method, name)) is not None
                },
                "diverged": sum("failed" in run for run in runs.values()),
                "by_seed": {
                    seed: {key: run.get(key) for key in ("figures", "failed", "training_loss", "trained_per_round", "seconds")}
                    for seed, run in runs.items()
                },
            }
            for method, runs in outcome.rows.items()
        },
        "directions": [verdict(outcome, claim) for claim in claims(outcome)],
        "differences": differences(outcome),
    }
