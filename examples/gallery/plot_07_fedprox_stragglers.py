"""
FedProx keeps the work of stragglers
====================================

In each round nine of ten clients finish only a part of their epochs. FedAvg drops these clients. FedProx keeps their
partial work. A proximal term with strength μ also keeps local models near the shared model. The setting is Synthetic(1,
1) with 30 clients, 10 per round, 20 epochs, as in Figure 3.1 of Li's thesis. The thesis has 200 rounds, and this
example has 60.
"""

import matplotlib.pyplot as plt

import equipoise as eq

data = eq.data.synthetic(1, 1, clients=30, seed=0)
model = eq.models.Softmax(data.features, data.classes)
work = {"lr": 0.01, "batch_size": 10, "epochs": 20, "straggler_share": 0.9}
methods = {
    "FedAvg: drops stragglers": eq.solvers.SGD(**work, stragglers="drop"),
    "FedProx, μ = 0: keeps them": eq.solvers.SGD(**work, stragglers="keep"),
    "FedProx, μ = 1": eq.solvers.SGD(**work, stragglers="keep", prox=1.0),
}
for name, solver in methods.items():
    algorithm = eq.Algorithm(solver=solver)
    result = eq.train(model, data, algorithm, rounds=60, clients_per_round=10, seed=0, evaluate_every=2)
    points = result.history.evaluations
    plt.plot([p.round for p in points], [float((p.clients.where("train").loss * p.clients.where("train").size).sum()
             / p.clients.where("train").size.sum()) for p in points], label=name)  # fmt: skip
plt.xlabel("round")
plt.ylabel("training loss over all clients")
plt.title("90 % stragglers, Synthetic(1, 1)")
plt.legend()
plt.show()
