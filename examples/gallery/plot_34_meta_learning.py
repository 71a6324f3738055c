"""
Meta-learning: a start that adapts in one step
==============================================

Every client has a sine curve with its own phase. A shared model can learn the mean of the curves only. Per-FedAvg and
MAML look for a model that fits well after one step on a client's own few points (Fallah et al. 2020, Finn et al. 2017).
The picture shows 100 clients that took no part in training. Each adapts on ten points and is judged on others.
"""

from copy import deepcopy

import matplotlib.pyplot as plt
import numpy as np
import torch
from torch import nn

import equipoise as eq

rng = np.random.default_rng(0)


def curve(phase, count=20):
    """Points of one client: inputs and targets."""
    x = rng.uniform(-3, 3, (count, 1)).astype("float32")
    return x, np.sin(x + phase).astype("float32")


data = eq.data.from_dict({str(k): curve(rng.uniform(-1.5, 1.5)) for k in range(100)}, test=0.1, seed=0)
torch.manual_seed(0)
net = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 32), nn.Tanh(), nn.Linear(32, 1))


def loss(outputs, targets):
    return (outputs - targets).square().squeeze(-1)


methods = {
    "FedAvg": eq.Algorithm(solver=eq.solvers.SGD(lr=0.05, batch_size=10, epochs=1)),
    "Per-FedAvg": eq.Algorithm(solver=eq.solvers.PerFedAvg(lr=0.05, inner_lr=0.1, batch_size=10, epochs=1)),
    "MAML": eq.Algorithm(solver=eq.solvers.MAML(lr=0.3, inner_lr=0.1)),
}
new = [
    (*map(torch.as_tensor, curve(phase, 10)), *map(torch.as_tensor, curve(phase, 50))) for phase in rng.uniform(-1.5, 1.5, 100)
]


def losses_after_steps(model, x, y, test_x, test_y, steps=5):
    """The loss on other points before the first step of size 0.1, and after each."""
    model, found = deepcopy(model), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(steps + 1):
        found.append(loss(model(test_x), test_y).mean().item())
        optimizer.zero_grad()
        loss(model(x), y).mean().backward()
        optimizer.step()
    return found


for name, algorithm in methods.items():
    model = eq.train(net, data, algorithm, rounds=60, clients_per_round=20, loss=loss, seed=0).model
    plt.plot(np.mean([losses_after_steps(model, *client) for client in new], axis=0), "o-", label=name)
plt.xlabel("steps on the client's own ten points")
plt.ylabel("mean squared error on other points")
plt.ylim(0, None)
plt.legend()
plt.show()
