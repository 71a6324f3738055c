"""One site of eight lies, over Flower's messages in memory: the mean test error of the seven honest sites after 20 rounds.

    python benchmarks/lying_site.py                  # sites with alike data
    python benchmarks/lying_site.py --partition classes     # each site has two digits

The table is in docs/protect-federation.md, "A site that lies".
"""

from __future__ import annotations

import argparse
import logging
import sys
import warnings
from pathlib import Path
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


def net() -> eq.models.Softmax:
    """A softmax model of 8 × 8 pixels."""
    return eq.models.Softmax(64, 10)


def honest_error(data: eq.data.FederatedData, rounds: int, method: dict[str, Any], lies: dict[str, Any]) -> float:
    """The mean test error of all sites but the liar."""
    found: list[eq.Result] = []
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.1, batch_size=10, epochs=1), **{"weights": "uniform", **method})
    app = server_app(algorithm, model=net, rounds=rounds, clients=SITES, timeout=30.0, on_result=found.append)
    run_app(app, lie(federation(data, net), LIAR, **lies))
    errors = [float(str(row["error"])) for row in found[0].clients.where("test") if row["client"] != LIAR]
    return sum(errors) / len(errors)


def main() -> None:
    """Print one row for each aggregator, one column for each lie."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--partition", default="iid", choices=["iid", "dirichlet", "classes"])
    parser.add_argument("--rounds", type=int, default=20)
    given = parser.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    data = eq.data.digits(clients=SITES, partition=given.partition, split_by="examples", test=0.25, seed=0)
    print(f"| {given.partition} | {' | '.join(LIES)} |\n|---|{'---:|' * len(LIES)}")
    for name, method in METHODS.items():
        errors = [honest_error(data, given.rounds, method, lies) for lies in LIES.values()]
        print(f"| {name} | {' | '.join(f'{100 * error:.1f}' for error in errors)} |", flush=True)


if __name__ == "__main__":
    main()
