"""
Who is left behind?
===================

The mean error hides the clients that a model serves badly. Two histograms show these clients. The upper histogram shows
FedAvg. The lower histogram shows training on the worse half of every cohort (Δ-FL, tail 0.5). Each bar counts clients
that took no part in training. The setting is that of `equipoise demo`: five seeds, each with 500 such clients.
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

methods = {"FedAvg": eq.Algorithm(), "Δ-FL, tail 0.5": eq.Algorithm(risk=eq.risk.Superquantile(tail=0.5))}
errors = {name: [] for name in methods}
for seed in range(5):
    data = eq.data.label_shift(seed=seed)
    model = eq.models.Softmax(data.features, data.classes)
    both = eq.train_many(model, data, methods, rounds=100, clients_per_round=100, seeds=[seed])
    for name, (result,) in both.results.items():
        errors[name].append(100 * result.clients.where("test").error.numpy())
tails = {name: np.mean([np.percentile(each, 90) for each in found]) for name, found in errors.items()}
print({name: f"90th percentile {tail:.1f} %, mean of five seeds" for name, tail in tails.items()})
errors = {name: np.concatenate(found) for name, found in errors.items()}  # of 2500 clients

# %%
# Both histograms have the same bins and axes. In both, the dashed line is FedAvg's 90th percentile: under FedAvg, one
# client in ten has a larger error. The grey outline in the lower histogram repeats the FedAvg histogram.

bins = np.arange(0, 81, 4)
first = errors["FedAvg"]
edge = np.percentile(first, 90)
figure, axes = plt.subplots(2, 1, sharex=True, sharey=True, figsize=(7, 4.6))
for axis, (name, error), colour in zip(axes, errors.items(), ("C0", "C1"), strict=True):
    axis.hist(error, bins=bins, color=colour, alpha=0.85)
    if error is not first:
        axis.hist(first, bins=bins, histtype="step", color="black", alpha=0.6, lw=1.2)
    axis.axvline(error.mean(), color="black", lw=1.5)
    axis.axvline(edge, color="black", ls="--", lw=1.5)
    axis.text(error.mean() + 0.7, 470, f"mean {error.mean():.1f} %")
    axis.text(edge + 0.7, 330, f"{np.sum(error > edge)} of {len(error)} clients\nare worse than {edge:.0f} %")
    axis.text(0.995, 0.98, name, transform=axis.transAxes, ha="right", va="top", fontweight="bold", color=colour)
    axis.set(ylabel="clients")
axes[-1].set(xlabel="error of a client in %", xlim=(0, 80))
plt.show()
