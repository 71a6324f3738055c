"""Which classes the worst clients of the demo hold (docs/results.md, "Who is left behind").

    python benchmarks/worst_clients.py [--seeds 5]

Trains FedAvg and Δ-FL 0.5 as `equipoise demo` does, takes the worst tenth of the test clients by FedAvg's error, and prints
what share of their examples is of one class, how many of them share their class, and the errors with either method.
"""

from __future__ import annotations

import argparse

import torch
from torch import Tensor

import equipoise as eq
from equipoise.cli.demo import CLIENTS_PER_ROUND, ROUNDS, demo_methods
from equipoise.compare import Spread


def class_counts(clients: eq.ClientSet, classes: int) -> Tensor:
    """How many examples of each class each client has, (K, classes)."""
    sizes = clients.sizes.tolist()
    return torch.stack([torch.bincount(y.long(), minlength=classes) for y in clients.y.split(sizes)])


def figures(seed: int) -> dict[str, float]:
    """The figures of a seed, in %."""
    data = eq.data.label_shift(seed=seed)
    methods, errors = demo_methods(), {}
    for name in ("FedAvg", "Δ-FL 0.5"):
        model = eq.models.Softmax(data.features, data.classes)
        result = eq.train(
            model, data, methods[name], rounds=ROUNDS, clients_per_round=CLIENTS_PER_ROUND, seed=seed, progress=False
        )
        rows = result.clients.where("test")
        assert data.test is not None
        assert list(rows.client) == list(data.test.ids)
        errors[name] = 100 * rows.error
    counts = class_counts(data.test, data.classes).double()
    share, label = (100 * counts / counts.sum(1, keepdim=True)).max(1)
    worst = errors["FedAvg"].argsort(descending=True)[: round(0.1 * len(share))]
    hardest = int(label[worst].mode().values)
    rest = label != hardest
    return {
        "share of the most frequent class, worst tenth": float(share[worst].mean()),
        "share of the most frequent class, all test clients": float(share.mean()),
        "worst tenth that have the commonest class of the worst tenth": 100 * float((label[worst] == hardest).double().mean()),
        "all test clients that have this class": 100 * float((~rest).double().mean()),
        **{f"error of {name}, clients with this class": float(each[~rest].mean()) for name, each in errors.items()},
        **{f"error of {name}, other clients": float(each[rest].mean()) for name, each in errors.items()},
    }


def main() -> None:
    """Print each figure, mean ± standard deviation over the seeds."""
    parser = argparse.ArgumentParser(description="Which classes the worst clients of the demo hold.")
    parser.add_argument("--seeds", type=int, default=5)
    found = [figures(seed) for seed in range(parser.parse_args().seeds)]
    for name in found[0]:
        over = Spread.of(each[name] for each in found)
        print(f"{name}: {over.mean:.1f} ± {over.deviation:.1f} %")


if __name__ == "__main__":
    main()
