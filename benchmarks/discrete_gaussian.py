"""How fast exact discrete Gaussian noise is drawn on one core, and what a private quantile costs beyond it.

    python benchmarks/discrete_gaussian.py [--repeats 5]

The goal: a million draws at σ² = 100 in under two seconds. Best of the repeats; the first call of a variance is not counted.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable
from fractions import Fraction

import torch

from equipoise.privacy.discrete_gaussian import sample_discrete_gaussian
from equipoise.privacy.private_quantile import PrivateQuantile
from equipoise.privacy.random_source import RandomSource, Seeded, SystemSource

VARIANCES: tuple[int | float | Fraction, ...] = (0.25, 1, 5, 100, 12.3456, 10**4, 10**6, 10**9)


def best(work: Callable[[], object], repeats: int) -> float:
    """Seconds of the fastest of several calls, after one that is not counted."""
    work()
    seconds = []
    for _ in range(repeats):
        began = time.perf_counter()
        work()
        seconds.append(time.perf_counter() - began)
    return min(seconds)


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--repeats", type=int, default=5)
    repeats = parser.parse_args().repeats
    torch.set_num_threads(1)
    seeded = Seeded(0, "benchmark")

    def draws(sigma2: int | float | Fraction, count: int, source: RandomSource) -> float:
        return best(lambda: sample_discrete_gaussian(sigma2, count, source=source), repeats)

    print(
        "| σ² | a million draws, seeded | a million, operating system | 6,200 draws (100 clients, 32 bins) |\n|---|---|---|---|"
    )
    for sigma2 in VARIANCES:
        million, system, few = draws(sigma2, 10**6, seeded), draws(sigma2, 10**6, SystemSource()), draws(sigma2, 6200, seeded)
        print(f"| {sigma2} | {million:.2f} s | {system:.2f} s | {1e3 * few:.1f} ms |")

    print("\n| clients | bins | private quantile | of it noise | the rest |\n|---|---|---|---|---|")
    for clients, bins in ((100, 32), (256, 64), (1000, 128)):
        losses = torch.rand(clients, generator=torch.Generator().manual_seed(0))

        def release(sigma: float, losses: torch.Tensor = losses, bins: int = bins) -> object:
            source = PrivateQuantile(1.0, bins, sigma, scale=2, modulus=1 << 20).at(seeded, clients=len(losses))
            return source(losses, torch.ones_like(losses), 0.5)

        whole, rest = best(lambda: release(2.25), 4 * repeats), best(lambda: release(0.0), 4 * repeats)
        print(f"| {clients} | {bins} | {1e3 * whole:.1f} ms | {1e3 * (whole - rest):.1f} ms | {1e3 * rest:.2f} ms |")


if __name__ == "__main__":
    main()
