"""
Smooth tails and mixtures
=========================

The superquantile has corners, because clients enter and leave the tail. Smoothing with strength ν rounds the corners:
more clients get a weight, and weights change gradually. A mixture of the mean and the tail keeps some weight for every
client. The weights are the gradient of the risk's value.
"""

import matplotlib.pyplot as plt
import torch

import equipoise as eq

losses = torch.linspace(0.0, 3.0, 121)  # one loss per client, sorted
base = torch.full_like(losses, 1 / len(losses))
tail = eq.risk.Superquantile(tail=0.3)
smooth = {f"ν = {nu:g}": eq.risk.Superquantile(tail=0.3, smoothing="kl", nu=nu) for nu in (0.1, 0.5, 2.0)}
mixed = {f"{c:.0%} mean": eq.risk.Mixture((c, eq.risk.Mean()), (1 - c, tail)) for c in (0.2, 0.5, 0.8)}
panels = {"Smoothed superquantile, tail 0.3": {"not smoothed": tail} | smooth,
          "Mixture with the mean": {"tail alone": tail} | mixed}  # fmt: skip
figure, axes = plt.subplots(1, 2, sharey=True, figsize=(9, 3.8))
for axis, (title, risks) in zip(axes, panels.items(), strict=True):
    for name, risk in risks.items():
        axis.plot(losses, len(losses) * risk(losses, base).weights, label=name)
    axis.set(title=title, xlabel="loss of the client")
    axis.legend()
axes[0].set_ylabel("weight, relative to the mean's")
plt.show()
