"""FedProx against FedAvg with slow clients (Li 2023, thesis, Figures 3.1 and 3.7, synthetic panel; 3.4 and 3.11 at the side).

    python benchmarks/heterogeneity.py [--scale small|full] [--seeds N] [--rounds N]

Synthetic(1,1), 30 clients, 10 a round, learning rate 0.01, batches of 10, E = 20 epochs, a fifth of each client's examples for
test; 0, 50 and 90 % of a cohort get only 1 … E epochs done. FedAvg drops them, FedProx takes what they have. It needs no data
files. A round takes as many steps one after the other as its largest client: the published 200 rounds take hours on two cores,
so the full scale has fewer (`--rounds 200` for all).
"""

from __future__ import annotations

import itertools
import statistics
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from published import options_of, print_rows, spread

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
    rows = []
    for method, share in runs_to_make():
        own = [c for c in curves if (c.method, c.share) == (method, share)]
        finished = [c for c in own if not c.diverged]
        name = f"{FEDAVG.split(' (')[0]} = {WITHOUT}" if (method, share) == (WITHOUT, 0.0) else method
        lost = f" ({len(own) - len(finished)} of {len(own)} diverged)" if len(finished) < len(own) else ""
        last = spread((c.dissimilarity for c in finished), 2) if finished else ""
        ends, losses = spread(c.accuracy[-1] for c in own), spread((c.loss[-1] for c in own), 3)
        rows.append([f"{share:.0%}", name + lost, ends, losses, spread((c.restlessness() for c in own), 3), last])
    print_rows(["stragglers", "method", "test accuracy %", "training loss", "change of loss", "dissimilarity"], rows)


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


def main() -> None:
    options = options_of(__doc__, scale="small", seeds=None, rounds=None).parse_args()
    torch.set_num_threads(1)
    scale = SCALES[options.scale]
    rounds, seeds = options.rounds or scale.rounds, options.seeds or scale.seeds
    curves = []
    for seed in range(scale.first_seed, scale.first_seed + seeds):
        for method, share in runs_to_make():
            curves.append(run(method, share, seed, rounds))
            now = curves[-1]
            print(f"seed {seed}, {share:.0%}, {method}: accuracy {now.accuracy[-1]:.1f}, loss {now.loss[-1]:.3f}", flush=True)
    print(f"{rounds} rounds (published 200), seeds {scale.first_seed} to {scale.first_seed + seeds - 1}")
    print_table(curves)
    print_verdicts(curves)


if __name__ == "__main__":
    main()
