"""
How each risk weights clients
=============================

A risk turns the losses of a cohort into weights. The mean gives all clients the same weight. The other risks give more
weight to clients with large losses, each in its own way. The weights are the gradient of the risk's value.
"""

import matplotlib.pyplot as plt
import torch

import equipoise as eq

losses = torch.linspace(0.1, 3.0, 60)  # one loss per client, sorted
base = torch.full((60,), 1 / 60)
risks = {
    "Mean": eq.risk.Mean(),
    "Superquantile, tail 0.3": eq.risk.Superquantile(tail=0.3),
    "Superquantile, smoothed": eq.risk.Superquantile(tail=0.3, smoothing="kl", nu=0.5),
    "Tilted, t = 1": eq.risk.Tilted(tilt=1.0),
    "Tilted, t = −1": eq.risk.Tilted(tilt=-1.0),
    "q-fair, q = 2": eq.risk.QFair(q=2.0),
}
styles = ["-", "-", "--", "-", "--", ":"]
for (name, risk), style in zip(risks.items(), styles, strict=True):
    weights = risk(losses, base).weights
    plt.plot(losses, 60 * weights / weights.sum(), style, label=name, drawstyle="steps-mid" if "0.3" in name else "default")
plt.xlabel("loss of the client")
plt.ylabel("weight, relative to the mean's")
plt.title("A tail risk ignores clients that are served well")
plt.legend()
plt.show()
