"""
A model of its own for every client
===================================

Every client holds two classes. One shared model must distinguish ten classes, and serves many clients badly. Personal
models do better. They are trained alone (local), near the shared model (Ditto), from the shared model (finetuning), or
with a personal last layer (FedPer).
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

data = eq.data.digits(clients=40, partition="classes", split_by="examples", test=0.3, seed=0)
model = eq.models.MLP(data.features, data.classes, hidden=(24,))
names = [name for name, _ in model.named_parameters()]
methods = {"shared (FedAvg)": None, "local only": eq.personal.Local(), "Ditto": eq.personal.Ditto(strength=0.5),
           "finetuning": eq.personal.Finetuning(epochs=5), "FedPer: own head": eq.personal.FedPer(names[-2:])}  # fmt: skip
errors = []
for personal in methods.values():
    result = eq.train(model, data, eq.Algorithm(personal=personal), rounds=30, clients_per_round=20, seed=0)
    errors.append(100 * np.asarray(result.clients.where("test").served_error))

# %%
# A dot is a client. The bar is the mean.

rng = np.random.default_rng(0)
for place, error in enumerate(errors):
    plt.scatter(place + rng.uniform(-0.18, 0.18, len(error)), error, s=14, alpha=0.6)
    plt.hlines(error.mean(), place - 0.3, place + 0.3, color="black", lw=2.5)
    plt.text(place, -9, f"{error.mean():.1f} %", ha="center")
plt.xticks(range(len(methods)), methods)
plt.ylim(-12, 100)
plt.ylabel("test error of a client in %")
plt.title("Digits, two classes per client")
plt.show()
