"""Federated averaging by Equipoise: clients, a model, a number of rounds; every client is evaluated."""

import torch
from digits import BATCH, CLIENTS, RATE, ROUNDS, clients

import equipoise as eq

made = [(f"client {k}", *(torch.from_numpy(part) for part in parts)) for k, parts in enumerate(clients())]
train = eq.ClientSet.pack((name, x, y) for name, x, y, _, _ in made)
test = eq.ClientSet.pack((name, x, y) for name, _, _, x, y in made)
data = eq.FederatedData(train, test=test, classes=10)
solver = eq.solvers.SGD(lr=RATE, batch_size=BATCH, epochs=1)
result = eq.train(torch.nn.Linear(64, 10), data, eq.Algorithm(solver=solver), rounds=ROUNDS, clients_per_round=CLIENTS, seed=0)
error = result.summary().error
print(f"error {error.mean:.3f}; 90th percentile over clients {error.percentiles[90]:.3f}")
