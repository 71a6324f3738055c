"""
What a privacy budget costs
===========================

Each ε is a separate run. The library chooses the noise, trains, and accounts for every release. With 100 of 1000
clients per round, a budget of ε = 1 raises the mean error by one to two points.
"""

import matplotlib.pyplot as plt

import equipoise as eq

data = eq.data.label_shift(train_clients=1000, test_clients=200, seed=0)
model = eq.models.Softmax(data.features, data.classes)
budgets = (1.0, 3.0, 10.0)
plain = eq.train(model, data, rounds=30, clients_per_round=100, seed=0)
spent, errors = [], []
for epsilon in budgets:
    privacy = eq.privacy.DifferentialPrivacy(epsilon=epsilon, delta=1e-4, clip=1.0)
    result = eq.train(model, data, eq.Algorithm(privacy=privacy), rounds=30, clients_per_round=100, seed=0)
    spent.append([report.epsilon for report in result.history.rounds])
    errors.append(100 * float(result.clients.where("test").error.mean()))
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
left.semilogx(budgets, errors, "o-", label="differentially private")
left.axhline(100 * float(plain.clients.where("test").error.mean()), color="C1", ls="--", label="without privacy")
left.set(xlabel="ε at δ = 0.0001", ylabel="mean error of unseen clients in %", xticks=budgets, xticklabels=budgets)
left.minorticks_off()
left.set_ylim(20, 30)
left.legend()
for epsilon, curve in zip(budgets, spent, strict=True):
    right.plot(range(1, len(curve) + 1), curve, label=f"budget {epsilon:g}")
right.set(xlabel="round", ylabel="ε spent so far")
right.legend()
plt.show()
