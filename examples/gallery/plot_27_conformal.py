"""
Coverage of conformal sets, client by client
============================================

A conformal set of classes holds the true class with probability 0.9, on average over clients. Single clients have no
guarantee. The sets of some clients always contain the true class, and those of others in eight of ten cases. A separate
threshold for every client is computed from few examples, so it does not help the worst client in this example.
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

data = eq.data.digits(clients=20, split_by="examples", validation=0.3, test=0.4, seed=0)
result = eq.train(eq.models.Softmax(data.features, data.classes), data, rounds=20, clients_per_round=10, seed=0)
figure, axes = plt.subplots(2, 1, sharex=True, sharey=True, figsize=(7, 4.6))
for axis, own, colour in zip(axes, (False, True), ("C0", "C1"), strict=True):
    table = result.with_conformal(data, miss=0.1, per_client=own).clients.where("test")
    coverage = 100 * np.sort(np.asarray(table.metrics["coverage"]))
    axis.bar(range(1, len(coverage) + 1), coverage, color=colour)
    axis.axhline(90, color="black", ls="--", label="promised on average")
    title = "one threshold per client" if own else "one threshold for all"
    axis.set(ylabel="coverage in %", ylim=(60, 103), title=f"{title}: mean {coverage.mean():.0f} %, worst {coverage[0]:.0f} %")
axes[0].legend(loc="upper left")
axes[-1].set(xlabel="client, from least to most covered", xticks=range(1, 21))
plt.show()
