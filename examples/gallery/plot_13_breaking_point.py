"""
How many attackers does an aggregator resist?
=============================================

Attackers send the negative of their update, ten times as large. A mean fails with the first attacker. A trimmed mean
resists attackers up to its trimmed fraction, and a median resists them up to one half.
"""

import matplotlib.pyplot as plt
import torch

import equipoise as eq

generator = torch.Generator().manual_seed(0)
honest = torch.tensor([1.0, 1.0]) + 0.3 * torch.randn(40, 2, generator=generator)
rules = {"weighted mean": eq.aggregators.WeightedMean(), "trimmed mean, 0.2 per side": eq.aggregators.TrimmedMean(fraction=0.2),
         "median": eq.aggregators.Median(), "geometric median": eq.aggregators.GeometricMedian()}  # fmt: skip
shares = torch.arange(0, 24) / 40
for name, rule in rules.items():
    distances = []
    for attackers in range(24):
        updates = honest.clone()
        updates[:attackers] = -10 * honest[:attackers]
        total, _ = rule(updates, torch.full((40,), 1 / 40))
        distances.append(float(torch.dist(total, honest[attackers:].mean(0))))
    plt.semilogy(100 * shares, distances, "o-", ms=4, label=name)
plt.axvline(20, color="0.6", ls=":")
plt.axvline(50, color="0.6", ls=":")
plt.ylim(1e-2, 30)
plt.xlabel("malicious clients in %")
plt.ylabel("distance to the mean of honest updates")
plt.legend()
plt.show()
