"""How the gain of q = 1 over q = 0 on Synthetic(1,1) with 100 clients depends on the last round (docs/results, q-FFL).

    python benchmarks/fairness_rounds.py [--rounds 2500] [--every 50] [--seeds 5]

The setting is that of `benchmarks/fairness.py` and of `equipoise reproduce fairness-synthetic`, which differ in the number of
rounds. Clients are judged on their test examples every few rounds. A line has the change of the worst 10 % and of the variance
from q = 0 to q = 1, seed by seed, with the 95 % interval of its mean; the last line has the mean of ten evaluations.
"""

from __future__ import annotations

import argparse
from statistics import fmean

import numpy as np

import equipoise as eq
from equipoise.compare import Spread
from equipoise.reproduce.data_sets import synthetic_with_sizes_of_table_4_4
from equipoise.serve.verdict import student_interval

Figures = dict[int, tuple[float, float]]  # by number of rounds: accuracy of the worst 10 % in %, variance


def figures(seed: int, q: float, rounds: int, every: int) -> Figures:
    """The figures of a run at each evaluation."""
    algorithm = eq.Algorithm(
        risk=eq.risk.QFair(q), solver=eq.solvers.SGD(lr=0.1, batch_size=10, epochs=1), sampler=eq.sampling.Proportional()
    )
    result = eq.train(
        eq.models.Softmax(60, 10), synthetic_with_sizes_of_table_4_4(None, seed), algorithm, rounds=rounds,
        clients_per_round=10, seed=seed, evaluate_every=every, progress=False,
    )  # fmt: skip
    found = {}
    for evaluation in result.history.evaluations:
        accuracy = 100 * (1 - evaluation.clients.where("test").error)
        found[evaluation.round] = eq.metrics.best(accuracy, 0.1), eq.metrics.standard_deviation(accuracy) ** 2
    return found


def main() -> None:
    """Print a line per evaluation."""
    parser = argparse.ArgumentParser(description="The gain of q = 1 over q = 0 by the number of rounds.")
    parser.add_argument("--rounds", type=int, default=2500)
    parser.add_argument("--every", type=int, default=50)
    parser.add_argument("--seeds", type=int, default=5)
    given = parser.parse_args()
    runs = [[figures(seed, q, given.rounds, given.every) for q in (0.0, 1.0)] for seed in range(given.seeds)]
    last = list(runs[0][0])
    for rounds in [[one] for one in last] + [last[-10:]]:
        cells = []
        for index, name in enumerate(("worst 10 %", "variance")):
            changes = [fmean(ours[each][index] - plain[each][index] for each in rounds) for plain, ours in runs]
            over, interval = Spread.of(changes), student_interval(np.array(changes))
            cells.append(f"{name} {over.mean:+.1f} ± {over.deviation:.1f} ({interval.low:.1f} to {interval.high:.1f})")
        title = f"after {rounds[0]} rounds" if len(rounds) == 1 else "mean of the last ten evaluations"
        print(f"{title}: {'; '.join(cells)}")


if __name__ == "__main__":
    main()
