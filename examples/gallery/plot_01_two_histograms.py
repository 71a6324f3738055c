"""
Who is left behind?
===================

The mean error hides the clients that a model serves badly. Two histograms on one axis show them: FedAvg above, training on
the worse half of every cohort (Δ-FL, tail 0.5) below. Each bar counts clients that neither method has seen.
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

data = eq.data.label_shift(seed=0)
model = eq.models.Softmax(data.features, data.classes)
methods = {"FedAvg": eq.Algorithm(), "Δ-FL, tail 0.5": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
errors = {
    name: 100 * np.asarray(eq.train(model, data, method, rounds=150, clients_per_round=100, seed=0).clients.where("test").error)
    for name, method in methods.items()
}

# %%
# The same bins and the same axes make the two comparable. The line is the mean; the dashed line is the 90th percentile: one
# client in ten is worse off than that.

bins = np.arange(0, 81, 4)
figure, axes = plt.subplots(2, 1, sharex=True, sharey=True, figsize=(7, 4.6))
for axis, (name, error), colour in zip(axes, errors.items(), ("C0", "C1"), strict=True):
    axis.hist(error, bins=bins, color=colour, alpha=0.85)
    axis.axvline(error.mean(), color="black", label=f"mean {error.mean():.1f} %")
    axis.axvline(np.percentile(error, 90), color="black", ls="--", label=f"90th percentile {np.percentile(error, 90):.1f} %")
    axis.set(ylabel="clients", title=name)
    axis.legend()
axes[-1].set(xlabel="error of a client in %", xlim=(0, 100))
plt.show()
