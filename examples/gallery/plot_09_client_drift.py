"""
SCAFFOLD and FedDyn correct client drift
========================================

If every client has few classes and does much local work, local models drift towards local optima. SCAFFOLD corrects
each local step by control variates. FedDyn adds a linear term to each client's objective.
"""

import matplotlib.pyplot as plt

import equipoise as eq

data = eq.data.digits(clients=20, partition="classes", split_by="examples", test=0.2, seed=0)
model = eq.models.Softmax(data.features, data.classes)
sgd = eq.solvers.SGD(lr=0.05, batch_size=10, epochs=5)
methods = {
    "FedAvg": eq.Algorithm(solver=sgd),
    "FedProx, μ = 0.1": eq.Algorithm(solver=eq.solvers.SGD(lr=0.05, batch_size=10, epochs=5, prox=0.1)),
    "SCAFFOLD": eq.Algorithm(solver=eq.solvers.Scaffold(sgd)),
    "FedDyn": eq.Algorithm(solver=eq.solvers.FedDyn(0.1, sgd)),
}
for (name, algorithm), style in zip(methods.items(), ("-", "--", "-", "-"), strict=True):
    result = eq.train(model, data, algorithm, rounds=40, clients_per_round=10, seed=0, evaluate_every=2)
    points = result.history.evaluations
    plt.semilogy([p.round for p in points], [float(p.clients.where("train").loss.mean()) for p in points], style, label=name)
plt.xlabel("round")
plt.ylabel("training loss, mean over clients")
plt.title("Digits, two classes per client, five local epochs")
plt.legend()
plt.show()
