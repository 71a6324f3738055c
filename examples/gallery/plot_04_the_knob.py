"""
The knob between average and tail
=================================

One call trains a family of models, one per tail. A smaller tail lowers the error of the worst clients, and raises the
mean error a little. Each client may also choose the model that works best on its own examples.
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

data = eq.data.label_shift(train_clients=500, seed=0)
model = eq.models.Softmax(data.features, data.classes)
tails = [1.0, 0.8, 0.65, 0.5, 0.35, 0.2]
family = eq.train_family(model, data, tails=tails, rounds=120, clients_per_round=100, seed=0)
errors = {tail: 100 * np.asarray(result.clients.where("test").error) for tail, result in family.results.items()}

# %%
# Every point is one model. The line shows the trade-off that the knob offers.

means = [error.mean() for error in errors.values()]
worst = [np.percentile(error, 90) for error in errors.values()]
plt.plot(means, worst, "o-")
for tail, x, y in zip(tails, means, worst, strict=True):
    plt.annotate(f"tail {tail:g}" + (" (FedAvg)" if tail == 1 else ""), (x, y), xytext=(7, -13), textcoords="offset points")
plt.xlabel("mean error over unseen clients in %")
plt.ylabel("90th percentile of the error in %")
plt.title("Six models along one knob")
plt.margins(0.15)
plt.show()
