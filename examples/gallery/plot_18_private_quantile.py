"""
The private quantile
====================

Δ-FL needs a quantile of the clients' losses. Under privacy the quantile comes from a noisy histogram (Algorithm 2 of
Pillutla et al. 2023). With more noise, the released bin edge may lie farther from the true quantile.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import equipoise as eq

losses = torch.from_numpy(np.random.default_rng(0).gamma(2.0, 0.5, 200))
true = float(np.quantile(losses, 0.5))
plt.hist(losses, bins=32, range=(0, 4), color="0.8", label="losses of 200 clients")
for height, sigma, colour in ((14, 2.0, "C0"), (11, 8.0, "C1"), (8, 24.0, "C2")):
    source = eq.privacy.PrivateQuantile(bound=4.0, bins=32, sigma=sigma, scale=8)
    released = [float(source.at(eq.privacy.Seeded(k, "quantile"))(losses, torch.full((200,), 1 / 200), 0.5)) for k in range(60)]
    places = height + np.random.default_rng(1).uniform(-1, 1, 60)
    plt.plot(released, places, ".", color=colour, label=f"60 releases, σ = {sigma:g}")
plt.axvline(true, color="black", ls="--", label=f"true median {true:.2f}")
plt.xlabel("loss")
plt.ylabel("clients")
plt.legend()
plt.show()
