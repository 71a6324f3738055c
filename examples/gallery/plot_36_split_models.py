"""
Split models: each client keeps the layers that differ
======================================================

A split model has shared layers and layers that each client keeps. Here every client has pictures of its own brightness
and contrast. Clients keep the head (FedRep, FedBABU), the normalisation layers (FedBN) or everything but the head
(LG-FedAvg). Own normalisation layers can undo the brightness, and all other layers learn from all clients.
"""

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import equipoise as eq

digits = eq.data.digits(clients=20, split_by="examples", test=0.3, seed=0)
rng = np.random.default_rng(0)
x, y = np.concatenate([digits.train.x, digits.test.x]), np.concatenate([digits.train.y, digits.test.y])
order = rng.permutation(len(x))
clients = {}
for k, rows in enumerate(np.array_split(order, 20)):
    pictures = x[rows].reshape(len(rows), -1) / 16 * rng.choice([0.3, 1.0, 3.0]) + rng.uniform(-1, 1)
    clients[f"client {k}"] = (pictures.astype("float32"), y[rows])
data = eq.data.from_dict(clients, split_by="examples", test=0.3, seed=0)

torch.manual_seed(0)
net = nn.Sequential()
net.add_module("body", nn.Sequential(nn.Flatten(), nn.Linear(64, 24), nn.BatchNorm1d(24), nn.ReLU()))
net.add_module("head", nn.Linear(24, 10))
personal, own_head = eq.personal, ("head", "statistics")  # of batch normalisation: each client's own mean and variance
methods = {
    "FedAvg": None,
    "FedRep": personal.FedRep(own_head, kept_epochs=2, shared_epochs=2),
    "FedBABU": personal.FedBABU(own_head),
    "FedBN": personal.FedBN(),
    "LG-FedAvg": personal.LGFedAvg(("body", "statistics")),
}
solver = eq.solvers.SGD(lr=0.3, batch_size=None, epochs=4)
for place, method in enumerate(methods.values()):
    result = eq.train(net, data, eq.Algorithm(personal=method, solver=solver), rounds=15, clients_per_round=10, seed=0)
    error = 100 * np.asarray(result.clients.where("test").served_error)
    plt.scatter(place + rng.uniform(-0.2, 0.2, len(error)), error, s=14, alpha=0.6)
    plt.hlines(error.mean(), place - 0.35, place + 0.35, color="black", lw=2.5)
plt.xticks(range(len(methods)), methods)
plt.ylabel("test error of a client in %; line: mean")
plt.show()
