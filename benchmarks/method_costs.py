"""What a method costs: the time of its rounds beside FedAvg's, on one core. `docs/which-method.md` quotes the table.

    python benchmarks/method_costs.py [--turns 5] [--rounds 23] [--workload linear network]

Each turn makes a short run of FedAvg and one of the method, one right after the other, for every method. A round lasts from
the end of the round before to its own end, so set-up, the first three rounds and the evaluation at the end do not count. The
ratio of a turn is the median round of the method over that of its FedAvg, in processor time of this process. The table has the
median of the turns and their range. Absolute times belong to the machine; ratios carry over better.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import time
import warnings
from dataclasses import dataclass, field
from datetime import UTC, datetime
from itertools import pairwise
from pathlib import Path

import torch

import equipoise as eq
from equipoise import aggregators, personal, privacy, risk, solvers
from equipoise.types import RoundReport

WARM_UP = 3  # rounds that are not counted: calibration, new memory


@dataclass
class Clock:
    """An observer that keeps the processor time at the end of each round."""

    ends: list[float] = field(default_factory=list)

    def on_round(self, report: RoundReport) -> None:
        self.ends.append(time.process_time())

    def seconds(self) -> float:
        """The median round after the first ones."""
        ends = self.ends[WARM_UP - 1 :]
        return statistics.median(later - former for former, later in pairwise(ends))


@dataclass(frozen=True)
class Workload:
    """Data, a model and the names of its last layer."""

    data: eq.FederatedData
    model: torch.nn.Module
    head: str


def workload(name: str) -> Workload:
    if name == "linear":
        data = eq.data.label_shift(train_clients=1000, test_clients=10, seed=0)
        return Workload(data, eq.models.Softmax(data.features, data.classes), "")
    data = eq.data.digits(clients=100, split_by="examples", test=0.1, seed=0)
    model = eq.models.MLP(data.features, data.classes, hidden=(128,))
    names = [parameter for parameter, _ in model.named_parameters()]
    return Workload(data, model, names[-1].rpartition(".")[0] + ".*")


def methods(head: str) -> dict[str, eq.Algorithm]:
    """Every method of the page whose cost is time. All of them do one epoch in batches of 10."""
    sgd, half = solvers.SGD(lr=0.05, batch_size=10, epochs=1), risk.Superquantile(tail=0.5)
    dp = {"epsilon": 10.0, "delta": 1e-4, "clip": 1.0}
    private = risk.Superquantile(tail=0.5, quantile=privacy.PrivateQuantile(bound=3.0, bins=32))
    made = {
        "FedAvg": eq.Algorithm(solver=sgd),
        "Δ-FL 0.5": eq.Algorithm(half, sgd),
        "q-fair, q = 1": eq.Algorithm(risk.QFair(q=1), sgd),
        "tilted, t = 1": eq.Algorithm(risk.Tilted(tilt=1.0), sgd),
        "CentredClipping": eq.Algorithm(solver=sgd, aggregator=aggregators.CentredClipping()),
        "MultiKrum": eq.Algorithm(solver=sgd, aggregator=aggregators.MultiKrum(malicious=3)),
        "Median": eq.Algorithm(solver=sgd, aggregator=aggregators.Median()),
        "GeometricMedian": eq.Algorithm(solver=sgd, aggregator=aggregators.GeometricMedian()),
        "NNM + Median": eq.Algorithm(solver=sgd, aggregator=aggregators.NNM(aggregators.Median(), share=0.2)),
        "Ditto": eq.Algorithm(solver=sgd, personal=personal.Ditto(strength=0.5)),
        "secure sums": eq.Algorithm(solver=sgd, privacy=privacy.SecureAggregation()),
        "differential privacy": eq.Algorithm(solver=sgd, privacy=privacy.DifferentialPrivacy(**dp)),
        "distributed noise": eq.Algorithm(solver=sgd, privacy=privacy.DifferentialPrivacy(**dp, noise="distributed")),
        "private Δ-FL 0.5": eq.Algorithm(private, sgd, privacy=privacy.DifferentialPrivacy(**dp, quantile_ratio=0.25)),
        "FedProx": eq.Algorithm(solver=solvers.SGD(lr=0.05, batch_size=10, epochs=1, prox=0.1)),
        "SCAFFOLD": eq.Algorithm(solver=solvers.Scaffold(sgd)),
        "FedDyn": eq.Algorithm(solver=solvers.FedDyn(0.1, sgd)),
        "FedNova": eq.Algorithm(solver=sgd, aggregator=aggregators.FedNova()),
    }
    if head:
        made["FedPer"] = eq.Algorithm(solver=sgd, personal=personal.FedPer(head))
        made["FedRep, 10 + 1 epochs"] = eq.Algorithm(solver=sgd, personal=personal.FedRep(head))
        made["FedBABU"] = eq.Algorithm(solver=sgd, personal=personal.FedBABU(head))
    return made


def seconds_of_a_round(work: Workload, algorithm: eq.Algorithm, rounds: int, cohort: int) -> float:
    clock = Clock()
    eq.train(work.model, work.data, algorithm, rounds=rounds, clients_per_round=cohort, seed=0, progress=False,
             observers=[clock], engine=eq.engines.Simulator(workers=1))  # fmt: skip
    return clock.seconds()


def measured(name: str, turns: int, rounds: int) -> dict[str, list[tuple[float, float]]]:
    """Method → seconds of its median round, and of FedAvg's just before, in each turn."""
    work = workload(name)
    cohort = 100 if name == "linear" else 20
    asked = methods(work.head)
    fedavg = asked.pop("FedAvg")
    found: dict[str, list[tuple[float, float]]] = {method: [] for method in asked}
    for turn in range(turns):
        for method in list(asked)[:: 1 if turn % 2 == 0 else -1]:
            base = seconds_of_a_round(work, fedavg, rounds, cohort)
            found[method].append((seconds_of_a_round(work, asked[method], rounds, cohort), base))
    return found


def processor() -> str:
    file = Path("/proc/cpuinfo")
    lines = file.read_text(encoding="utf-8").splitlines() if file.exists() else []
    return next((line.partition(": ")[2] for line in lines if line.startswith("model name")), platform.machine())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--turns", type=int, default=5)
    parser.add_argument("--rounds", type=int, default=23)
    parser.add_argument("--workload", nargs="+", choices=("linear", "network"), default=["linear", "network"])
    options = parser.parse_args()
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    print(f"{datetime.now(UTC):%Y-%m-%d}, {processor()}, one core, torch {torch.__version__}")
    for name in options.workload:
        found = measured(name, options.turns, options.rounds)
        fedavg = statistics.median(base for times in found.values() for _, base in times)
        print(f"\n{name}: a round of FedAvg takes {1000 * fedavg:.1f} ms\n")
        print("| method | × FedAvg | range of the turns |\n|---|---:|---:|")
        for method, times in found.items():
            ratios = sorted(mine / base for mine, base in times)
            print(f"| {method} | {statistics.median(ratios):.2f} | {ratios[0]:.2f} … {ratios[-1]:.2f} |", flush=True)


if __name__ == "__main__":
    main()
