"""
AFL follows the worst mixture of clients
========================================

Agnostic federated learning minimises the loss of the worst mixture of clients. Clients with a large loss gain weight
from round to round, and the other clients lose weight. In this example three of ten hospitals have patients of a rare
type.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch

import equipoise as eq

rng = np.random.default_rng(0)
clients = {}
for k in range(10):
    x = rng.normal(size=(600, 4))
    rule = np.array([1.0, -1.0, 0.5, 0.0]) if k < 7 else np.array([1.0, 1.0, -0.5, 0.0])
    clients[f"hospital {k + 1}"] = (x.astype("float32"), (x @ rule + 0.3 * rng.normal(size=600) > 0).astype("int64"))
data = eq.data.from_dict(clients, split_by="examples", test=0.25, seed=0)

risk, model = eq.risk.WorstCase(step=0.02), eq.models.Softmax(data.features, data.classes)
fair = eq.train(model, data, eq.Algorithm(risk=risk, sampler=eq.sampling.Full()), rounds=80, seed=0)
plain = eq.train(model, data, eq.Algorithm(sampler=eq.sampling.Full()), rounds=80, seed=0)

# %%
# The errors of the three hospitals fall, and so does the largest error. The errors of the other hospitals rise a
# little.

places = np.arange(10)
for shift, result, name in ((-0.2, plain, "FedAvg"), (0.2, fair, "AFL")):
    error = 100 * torch.as_tensor(result.clients.where("test").error)
    plt.bar(places + shift, error, width=0.4, label=f"{name}: worst {error.max():.0f} %, mean {error.mean():.0f} %")
plt.axvspan(6.5, 9.5, color="0.9", zorder=0)
plt.text(8, plt.ylim()[1] * 0.97, "rare patients", ha="center", va="top")
plt.xticks(places, [str(k + 1) for k in places])
plt.xlabel("hospital")
plt.ylabel("test error in %")
plt.legend(loc="upper left")
plt.show()
