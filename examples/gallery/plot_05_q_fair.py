"""
q-fair learning evens out errors
================================

With a larger q, clients with large losses weigh more, and the errors of clients move together: the spread shrinks, and the
mean error grows a little. The method is q-FedAvg (chapter 4 of Li's thesis).
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

data = eq.data.label_shift(train_clients=500, seed=0)
model = eq.models.Softmax(data.features, data.classes)
figure, axes = plt.subplots(3, 1, sharex=True, sharey=True, figsize=(7, 5.4))
for axis, q, colour in zip(axes, (0.0, 1.0, 5.0), ("C0", "C1", "C2"), strict=True):
    result = eq.train(model, data, eq.Algorithm(risk=eq.risk.QFair(q=q)), rounds=100, clients_per_round=50, seed=0)
    error = 100 * np.asarray(result.clients.where("test").error)
    axis.hist(error, bins=np.arange(0, 91, 4), color=colour, alpha=0.85)
    axis.axvline(error.mean(), color="black", label=f"mean {error.mean():.1f} %")
    axis.axvline(np.percentile(error, 90), color="black", ls="--", label=f"90th percentile {np.percentile(error, 90):.1f} %")
    axis.set(ylabel="clients", title=f"q = {q:g}: standard deviation {error.std():.1f}")
    axis.legend(loc="upper right")
axes[-1].set_xlabel("error of an unseen client in %")
plt.show()
