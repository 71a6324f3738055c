"""
Error against data size
=======================

Clients with little data are often left behind. Each dot is a client. The line shows the medians of equally large groups
of clients.
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

data = eq.data.synthetic(0.5, 0.5, clients=80, seed=3, test=0.3)
model = eq.models.Softmax(data.features, data.classes)
algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.05, batch_size=20, steps=20))
result = eq.train(model, data, algorithm, rounds=40, clients_per_round=20)
size = np.asarray(result.clients.where("train").size)
error = 100 * np.asarray(result.clients.where("test").error)
order = np.argsort(size)
groups = np.array_split(order, 8)
plt.scatter(size, error, s=16, alpha=0.6)
plt.plot([np.median(size[g]) for g in groups], [np.median(error[g]) for g in groups], "C1o-", label="median of ten clients")
plt.xscale("log")
plt.xlabel("training examples of the client")
plt.ylabel("test error in %")
plt.legend()
plt.show()
