"""
Optimisers on the server
========================

The server may treat the averaged update as a gradient and step with momentum, Adam, Yogi or Adagrad (Reddi et al. 2021).
"""

import matplotlib.pyplot as plt

import equipoise as eq

data = eq.data.digits(clients=60, test=1 / 3, seed=0)
model = eq.models.MLP(data.features, data.classes, hidden=(32,))
work = eq.solvers.SGD(lr=0.05, batch_size=10, epochs=1)
servers = {
    "SGD (FedAvg)": eq.server_opt.SGD(),
    "momentum": eq.server_opt.Momentum(lr=0.5),
    "Adam": eq.server_opt.Adam(lr=0.03),
    "Yogi": eq.server_opt.Yogi(lr=0.03),
    "Adagrad": eq.server_opt.Adagrad(lr=0.1),
}
for name, server in servers.items():
    algorithm = eq.Algorithm(server=server, solver=work)
    result = eq.train(model, data, algorithm, rounds=40, clients_per_round=10, seed=0, evaluate_every=2)
    points = result.history.evaluations
    plt.plot([p.round for p in points], [100 * float(p.clients.where("test").error.mean()) for p in points], label=name)
plt.xlabel("round")
plt.ylabel("mean error over unseen clients in %")
plt.yscale("log")
plt.title("Digits, Dirichlet clients")
plt.legend()
plt.show()
