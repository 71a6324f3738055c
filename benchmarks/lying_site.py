"""One site of eight lies, over Flower's messages in memory: the mean test error of the seven honest sites after 20 rounds.

    python benchmarks/lying_site.py                  # sites with alike data
    python benchmarks/lying_site.py --partition classes     # each site has two digits
    python benchmarks/lying_site.py --four                  # four sites with other mixtures of digits, and a tail: mean / worst

The tables are in docs/protect-federation.md, "A site that lies".
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path
from statistics import fmean
from typing import Any

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "engines")]

from fake_grid import federation, run_app  # noqa: E402
from lying_site import lie  # noqa: E402

import equipoise as eq  # noqa: E402
from equipoise.engines.flower import server_app  # noqa: E402

LIAR, SITES = "client-0", 8
METHODS: dict[str, dict[str, Any]] = {
    "WeightedMean, by examples": {"weights": "examples"},
    "WeightedMean": {},
    "NormClip": {"aggregator": eq.aggregators.NormClip()},
    "Median": {"aggregator": eq.aggregators.Median()},
    "GeometricMedian": {"aggregator": eq.aggregators.GeometricMedian()},
    "MultiKrum(malicious=1)": {"aggregator": eq.aggregators.MultiKrum(malicious=1)},
    "CentredClipping": {"aggregator": eq.aggregators.CentredClipping()},
}
LIES: dict[str, dict[str, Any]] = {
    "none": {},
    "−u": {"update": lambda own: -own},
    "−50u": {"update": lambda own: -50 * own},
    "−10⁴u": {"update": lambda own: -1e4 * own},
    "−u, 10⁶ examples": {"update": lambda own: -own, "examples": 1_000_000},
}

FOUR: dict[str, dict[str, Any]] = {
    "tail 0.5, WeightedMean": {"risk": eq.risk.Superquantile(tail=0.5)},
    "tail 0.7, WeightedMean": {"risk": eq.risk.Superquantile(tail=0.7)},
    "tail 0.7, NormClip": {"risk": eq.risk.Superquantile(tail=0.7), "aggregator": eq.aggregators.NormClip()},
    "tail 0.7, Median": {"risk": eq.risk.Superquantile(tail=0.7), "aggregator": eq.aggregators.Median()},
}
LIES_OF_FOUR: dict[str, dict[str, Any]] = {
    "none": {},
    "−u, loss 10": {"update": lambda own: -own, "loss": 10.0},
    "−50u, loss 10": {"update": lambda own: -50 * own, "loss": 10.0},
}


def net() -> eq.models.Softmax:
    """A softmax model of 8 × 8 pixels."""
    return eq.models.Softmax(64, 10)


def honest_errors(data: eq.data.FederatedData, rounds: int, method: dict[str, Any], lies: dict[str, Any]) -> list[float]:
    """The test errors of all sites but the liar."""
    found: list[eq.Result] = []
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.1, batch_size=10, epochs=1), **{"weights": "uniform", **method})
    app = server_app(algorithm, model=net, rounds=rounds, clients=len(data.train), timeout=30.0, on_result=found.append)
    run_app(app, lie(federation(data, net), LIAR, **lies))
    return [float(str(row["error"])) for row in found[0].clients.where("test") if row["client"] != LIAR]


def four_sites(rounds: int, seeds: int) -> None:
    """Mean and largest test error of the three honest sites of four, each averaged over seeds of the split."""
    print(f"| four sites | {' | '.join(LIES_OF_FOUR)} |\n|---|{'---:|' * len(LIES_OF_FOUR)}")
    for name, method in FOUR.items():
        cells = []
        for lies in LIES_OF_FOUR.values():
            made = (
                eq.data.digits(clients=4, partition="dirichlet", split_by="examples", test=0.25, seed=seed)
                for seed in range(seeds)
            )
            errors = [honest_errors(data, rounds, method, lies) for data in made]
            cells.append((fmean(map(fmean, errors)), fmean(map(max, errors))))
        print(f"| {name} | {' | '.join(f'{100 * mean:.1f} / {100 * worst:.1f}' for mean, worst in cells)} |", flush=True)


def main() -> None:
    """Print one row for each aggregator, one column for each lie."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partition", default="iid", choices=["iid", "dirichlet", "classes"])
    parser.add_argument("--four", action="store_true", help="four sites and a tail risk")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--seeds", type=int, default=5, help="with --four: splits of the data")
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if given.four:
        four_sites(given.rounds, given.seeds)
        return
    data = eq.data.digits(clients=SITES, partition=given.partition, split_by="examples", test=0.25, seed=0)
    print(f"| {given.partition} | {' | '.join(LIES)} |\n|---|{'---:|' * len(LIES)}")
    for name, method in METHODS.items():
        errors = [fmean(honest_errors(data, given.rounds, method, lies)) for lies in LIES.values()]
        print(f"| {name} | {' | '.join(f'{100 * error:.1f}' for error in errors)} |", flush=True)


if __name__ == "__main__":
    main()
