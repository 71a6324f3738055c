"""
How often is a new threshold needed?
====================================

Δ-FL computes its threshold η in every round. `eta_every=10` keeps one threshold for ten rounds, which saves nine of ten
quantiles. Under privacy each quantile has a cost. Losses fall during training, so fewer and fewer clients reach an old
threshold. The question is that of Figure 17 of Laguel, Pillutla, Malick and Harchaoui, *Device Heterogeneity in
Federated Learning: A Superquantile Approach*, here on synthetic clients with one seed.
"""

import matplotlib.pyplot as plt

import equipoise as eq

data = eq.data.label_shift(train_clients=300, validation_clients=10, test_clients=300, seed=0)
model = eq.models.Softmax(data.features, data.classes)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
for period, style in ((1, "-"), (5, "--"), (20, ":")):
    risk = eq.risk.Superquantile(tail=0.5, rule="threshold", eta_every=period)
    algorithm = eq.Algorithm(risk=risk)
    result = eq.train(model, data, algorithm, rounds=60, clients_per_round=50, seed=0, evaluate_every=3)
    reports, points = result.history.rounds, result.history.evaluations
    label = f"new η every {period} rounds" if period > 1 else "new η every round"
    left.plot([report.round + 1 for report in reports], [report.trained for report in reports], style, label=label)
    worst = [100 * float(point.clients.where("test").error.quantile(0.9)) for point in points]
    right.plot([point.round for point in points], worst, style, label=label)
left.set(xlabel="round", ylabel="clients that train, of 50", ylim=(0, 52))
right.set(xlabel="round", ylabel="90th percentile of the error in %")
right.legend()
plt.show()
