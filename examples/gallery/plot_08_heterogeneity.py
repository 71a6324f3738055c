"""
The more clients differ, the more the proximal term helps
=========================================================

There are three data sets: identical clients, Synthetic(0, 0) and Synthetic(1, 1). Local work is long (20 epochs), so
the clients' models drift apart. The proximal term μ = 1 stabilises training if clients differ. If clients are
identical, it only slows training down (Figure 3.2 of Li's thesis, with 40 rounds instead of 200).
"""

import matplotlib.pyplot as plt

import equipoise as eq

sets = {"identical": {"alpha": 0, "beta": 0, "iid": True}, "Synthetic(0, 0)": {"alpha": 0, "beta": 0},
        "Synthetic(1, 1)": {"alpha": 1, "beta": 1}}  # fmt: skip
figure, axes = plt.subplots(1, 3, sharey=True, figsize=(9, 3.4))
for axis, (title, options) in zip(axes, sets.items(), strict=True):
    data = eq.data.synthetic(**options, clients=30, seed=0)
    model = eq.models.Softmax(data.features, data.classes)
    for mu in (0.0, 1.0):
        solver = eq.solvers.SGD(lr=0.01, batch_size=10, epochs=20, prox=mu)
        result = eq.train(model, data, eq.Algorithm(solver=solver), rounds=40, clients_per_round=10, seed=0, evaluate_every=2)
        points = result.history.evaluations
        train = [p.clients.where("train") for p in points]
        losses = [float((t.loss * t.size).sum() / t.size.sum()) for t in train]
        axis.plot([p.round for p in points], losses, label=f"μ = {mu:g}")
    axis.set(title=title, xlabel="round")
axes[0].set_ylabel("training loss")
axes[-1].legend()
plt.show()
