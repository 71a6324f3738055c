"""
Asynchronous clients: fast clients take part more often
=======================================================

FedBuff has no rounds. The server steps whenever ten clients have sent their updates. Fast clients send often. Slow
clients send seldom, and their updates start from old models. The clock is simulated, so the picture is the same on
every machine.
"""

from collections import Counter

import matplotlib.pyplot as plt

import equipoise as eq

data = eq.data.label_shift(train_clients=200, validation_clients=10, test_clients=50, seed=0)
model = eq.models.Softmax(data.features, data.classes)
algorithm = eq.Algorithm(sampler=eq.sampling.FedBuff(buffer=10, spread=0.8))
result = eq.train(model, data, algorithm, rounds=150, clients_per_round=40, seed=0)
arrivals = [arrival for report in result.history.rounds for arrival in report.arrivals]
often = Counter(client for client, _, _ in arrivals)
took = {client: duration for client, duration, _ in arrivals}
stale = {client: [age for name, _, age in arrivals if name == client] for client in took}
colours = [sum(stale[c]) / len(stale[c]) for c in took]
plt.scatter([took[c] for c in took], [often[c] for c in took], c=colours, cmap="viridis", s=22)
plt.colorbar(label="mean staleness in server steps")
plt.xscale("log")
plt.xlabel("time of one job, simulated")
plt.ylabel("updates that arrived")
plt.show()
