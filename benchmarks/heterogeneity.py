"""FedProx against FedAvg with slow clients (Li 2023, thesis, Figures 3.1 and 3.7, synthetic panel; 3.4 and 3.11 at the side).

    python benchmarks/heterogeneity.py [--scale small|full] [--seeds N] [--rounds N] [--out bench] [--again]

Synthetic(1,1), 30 clients, 10 a round, learning rate 0.01, batches of 10, E = 20 epochs, a fifth of each client's examples for
test; 0, 50 and 90 % of a cohort get only 1 … E epochs done. FedAvg drops them, FedProx takes what they have. Prints a table,
writes figure-3-1.json, .svg and .png to the folder; `--again` draws the figure of a JSON file that is there. It needs no data
files; `--data` is taken for the sake of the other benchmarks' command lines. A round takes as many steps one after the other as
its largest client: the published 200 rounds take hours on two cores, so the full scale has fewer (`--rounds 200` for all).
"""

from __future__ import annotations

import argparse
import itertools
import json
import statistics
import time
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal

import torch

import equipoise as eq
from equipoise.compare import Spread
from equipoise.observers import History

PUBLISHED = (
    "Published (text to Figures 3.1, 3.7; no numbers for this panel): at 90 % stragglers FedProx is 22 points more accurate \
than FedAvg on average over five data sets, and μ = 1 is stabler than μ = 0, with stragglers and without."
)
SHARES = (0.0, 0.5, 0.9)
FEDAVG, WITHOUT, WITH, ADAPTIVE, DANE = (
    "FedAvg (drops stragglers)",
    "FedProx, μ = 0",
    "FedProx, μ = 1",
    "FedProx, adaptive μ from 0",
    "FedDane, μ = 1",
)


@dataclass(frozen=True)
class Scale:
    rounds: int  # 200 published
    seeds: int
    first_seed: int


SCALES = {"small": Scale(6, 1, 3), "full": Scale(60, 3, 1)}


@dataclass
class Curve:
    """A run: the training loss and test accuracy (%) over all examples after each round, and the dissimilarity at the end."""

    method: str
    share: float  # of stragglers
    seed: int
    loss: list[float] = field(default_factory=list)
    accuracy: list[float] = field(default_factory=list)
    dissimilarity: float = float("nan")
    diverged: bool = False

    def restlessness(self) -> float:
        """How much the loss changes from a round to the next: the mean absolute change over the second half of the run."""
        changes = [abs(after - before) for before, after in itertools.pairwise(self.loss)]
        return statistics.fmean(changes[len(changes) // 2 :]) if changes else float("nan")


def solver_of(method: str, share: float) -> Any:
    """The local work of a method when a share of the cohort is slow."""

    def sgd(prox: float, stragglers: Literal["keep", "drop"] = "keep") -> eq.solvers.SGD:
        return eq.solvers.SGD(lr=0.01, batch_size=10, epochs=20, prox=prox, straggler_share=share, stragglers=stragglers)

    if method == ADAPTIVE:
        return eq.solvers.AdaptiveProx(sgd(0.0))
    if method == DANE:
        return eq.solvers.FedDane(sgd(1.0))
    return sgd(1.0 if method == WITH else 0.0, "drop" if method == FEDAVG else "keep")


def runs_to_make() -> list[tuple[str, float]]:
    """Methods with shares of stragglers; without stragglers FedAvg is FedProx with μ = 0, and runs once."""
    main = [(method, share) for share in SHARES for method in (FEDAVG, WITHOUT, WITH) if share > 0 or method != FEDAVG]
    return [*main, (ADAPTIVE, 0.0), (DANE, 0.0)]


def follow(curve: Curve, history: History) -> None:
    for evaluation in history.evaluations:
        train, test = evaluation.clients.where("train"), evaluation.clients.where("test")
        curve.loss.append(eq.metrics.mean(train.loss, train.size))
        curve.accuracy.append(100 * (1 - eq.metrics.mean(test.error, test.size)))


def run(method: str, share: float, seed: int, rounds: int) -> Curve:
    data, curve = eq.data.synthetic(1, 1, clients=30, test=0.2, seed=seed), Curve(method, share, seed)
    algorithm = eq.Algorithm(solver=solver_of(method, share))
    model = eq.models.Softmax(60, 10)
    try:
        result = eq.train(
            model, data, algorithm, rounds=rounds, clients_per_round=10, seed=seed, evaluate_every=1, progress=False
        )
    except eq.errors.Diverged as failure:
        follow(curve, failure.history)
        curve.loss, curve.accuracy, curve.diverged = [*curve.loss, float("inf")], [*curve.accuracy, 0.0], True
        return curve
    follow(curve, result.history)
    curve.dissimilarity = eq.heterogeneity.dissimilarity(result.model, data).variance
    return curve


def print_table(curves: list[Curve]) -> None:
    print(
        f"\n{PUBLISHED}\n\nMeasured after the last round, mean ± standard deviation over seeds. Change: mean absolute change of"
    )
    print("the training loss from round to round in the second half. Dissimilarity: E‖∇F_k − ∇f‖² over clients at the end.\n")
    print(
        "| stragglers | method | test accuracy % | training loss | change of loss | dissimilarity |\n|---|---|---|---|---|---|"
    )
    for method, share in runs_to_make():
        own = [c for c in curves if (c.method, c.share) == (method, share)]
        finished = [c for c in own if not c.diverged]
        name = f"{FEDAVG.split(' (')[0]} = {WITHOUT}" if (method, share) == (WITHOUT, 0.0) else method
        lost = f" ({len(own) - len(finished)} of {len(own)} diverged)" if len(finished) < len(own) else ""
        figures = [
            (Spread.of(c.accuracy[-1] for c in own), 1),
            (Spread.of(c.loss[-1] for c in own), 3),
            (Spread.of(c.restlessness() for c in own), 3),
        ] + ([(Spread.of(c.dissimilarity for c in finished), 2)] if finished else [])
        cells = " | ".join(f"{figure.mean:.{digits}f} ± {figure.deviation:.{digits}f}" for figure, digits in figures)
        print(f"| {100 * share:.0f} % | {name}{lost} | {cells} |")


def print_verdicts(curves: list[Curve]) -> None:
    """Say what holds seed by seed, and what does not."""
    by = {(c.method, c.share, c.seed): c for c in curves}
    seeds = sorted({c.seed for c in curves})

    def say(text: str, better: tuple[str, float], worse: tuple[str, float]) -> None:
        pairs = [(by[*better, s], by[*worse, s]) for s in seeds]
        gain = Spread.of(a.accuracy[-1] - b.accuracy[-1] for a, b in pairs)
        higher = sum(a.accuracy[-1] > b.accuracy[-1] for a, b in pairs)
        stabler = sum(a.restlessness() < b.restlessness() for a, b in pairs)
        print(
            f"- {text}: {gain.mean:+.1f} ± {gain.deviation:.1f} points of accuracy (higher in {higher} of {len(seeds)} seeds), "
            f"stabler loss in {stabler} of {len(seeds)}."
        )

    print()
    for share in SHARES[1:]:
        say(f"{100 * share:.0f} % stragglers, FedProx μ = 1 against FedAvg", (WITH, share), (FEDAVG, share))
        say(f"{100 * share:.0f} % stragglers, partial work (μ = 0) against dropping", (WITHOUT, share), (FEDAVG, share))
    for share in SHARES:
        say(f"{100 * share:.0f} % stragglers, μ = 1 against μ = 0", (WITH, share), (WITHOUT, share))
    say("no stragglers, FedProx μ = 1 against FedDane", (WITH, 0.0), (DANE, 0.0))
    say("no stragglers, FedProx μ = 1 against adaptive μ", (WITH, 0.0), (ADAPTIVE, 0.0))


COLOURS = {FEDAVG: "#d55e00", WITHOUT: "#0072b2", WITH: "#009e73", ADAPTIVE: "#cc79a7", DANE: "#7f7f7f"}


def draw(curves: list[Curve], folder: Path) -> None:
    """Loss above, accuracy below; a panel for each share of stragglers and one for the other variants. Bands span the seeds."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    panels = [(f"{100 * share:.0f} % stragglers", share, (FEDAVG, WITHOUT, WITH)) for share in SHARES]
    panels.append(("no stragglers: variants", 0.0, (WITH, ADAPTIVE, DANE)))
    pyplot.rcParams.update({"font.size": 9, "svg.fonttype": "none", "axes.spines.top": False, "axes.spines.right": False})
    figure, axes = pyplot.subplots(2, len(panels), figsize=(12, 5.6), sharex=True, sharey="row", layout="constrained")
    for column, (title, share, methods) in enumerate(panels):
        for axis, values in ((axes[0, column], "loss"), (axes[1, column], "accuracy")):
            for method in methods:
                lines = [getattr(c, values) for c in curves if (c.method, c.share) == (method, share)]
                if not lines:
                    continue
                shown = min(len(line) for line in lines)
                table = torch.tensor([line[:shown] for line in lines], dtype=torch.float64)
                rounds = range(1, shown + 1)
                style = "--" if method == ADAPTIVE else "-"  # it often lies on the line of μ = 1
                axis.plot(rounds, table.mean(0), style, color=COLOURS[method], label=method, linewidth=1.4)
                axis.fill_between(rounds, table.amin(0), table.amax(0), color=COLOURS[method], alpha=0.15, linewidth=0)
            axis.grid(alpha=0.25)
        axes[0, column].set_title(title)
        axes[1, column].set_xlabel("round")
    axes[0, 0].set_ylabel("training loss")
    axes[1, 0].set_ylabel("test accuracy, %")
    axes[0, 0].set_ylim(0, min(4.0, 1.05 * max(max(c.loss) for c in curves)))
    axes[0, 0].annotate("without stragglers FedAvg is\nFedProx with μ = 0", (0.97, 0.95), xycoords="axes fraction", ha="right",
                        va="top", fontsize=8, color="#555555")  # fmt: skip
    found = {text: line for axis in axes[0] for line, text in zip(*axis.get_legend_handles_labels(), strict=True)}
    shown_methods = [method for method in COLOURS if method in found]
    figure.legend([found[m] for m in shown_methods], shown_methods, loc="outside lower center", ncols=5, frameon=False)
    for kind in ("svg", "png"):
        figure.savefig(folder / f"figure-3-1.{kind}", dpi=130)
    pyplot.close(figure)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--scale", choices=SCALES, default="small")
    parser.add_argument("--seeds", type=int, help="how many, instead of the scale's own number")
    parser.add_argument("--rounds", type=int, help="how many, instead of the scale's own number")
    parser.add_argument("--data", help="not used: the data are drawn")
    parser.add_argument("--out", type=Path, default=Path("bench"))
    parser.add_argument("--again", action="store_true", help="only print and draw what figure-3-1.json in the folder holds")
    options = parser.parse_args()
    torch.set_num_threads(1)
    options.out.mkdir(parents=True, exist_ok=True)
    stored = options.out / "figure-3-1.json"
    if options.again:
        curves = [Curve(**one) for one in json.loads(stored.read_text())]
    else:
        scale, curves, began = SCALES[options.scale], [], time.perf_counter()
        rounds, seeds = options.rounds or scale.rounds, options.seeds or scale.seeds
        for seed in range(scale.first_seed, scale.first_seed + seeds):
            for method, share in runs_to_make():
                curves.append(run(method, share, seed, rounds))
                now = curves[-1]
                print(f"seed {seed}, {100 * share:.0f} %, {method}: accuracy {now.accuracy[-1]:.1f}, loss {now.loss[-1]:.3f} "
                      f"({time.perf_counter() - began:.0f} s)")  # fmt: skip
                stored.write_text(json.dumps([asdict(curve) for curve in curves]))
        print(f"{rounds} rounds (published 200), seeds {scale.first_seed} to {scale.first_seed + seeds - 1}")
    print_table(curves)
    print_verdicts(curves)
    draw(curves, options.out)
    print(f"\nWritten to {stored} and figure-3-1.svg, .png beside it.")


if __name__ == "__main__":
    main()
