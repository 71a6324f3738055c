"""
The tail of a cohort, round by round
====================================

In each round, Δ-FL trains only the clients with the largest losses of the cohort. The left picture shows how many these
are. The right one shows their mean loss. The left picture follows Figure 16 of Laguel, Pillutla, Malick and Harchaoui,
*Device Heterogeneity in Federated Learning: A Superquantile Approach*. Their clients hold handwritten characters, and
these hold small pictures of digits.
"""

import matplotlib.pyplot as plt

import equipoise as eq

data = eq.data.digits(clients=60, test=0.2, seed=0)
model = eq.models.Softmax(data.features, data.classes)
figure, (left, right) = plt.subplots(1, 2, figsize=(9, 3.8))
for tail in (1.0, 0.5, 0.2):
    algorithm = eq.Algorithm(risk=eq.risk.Superquantile(tail=tail))
    reports = eq.train(model, data, algorithm, rounds=50, clients_per_round=30, seed=0).history.rounds
    rounds = [report.round + 1 for report in reports]
    left.plot(rounds, [report.trained for report in reports], label=f"tail {tail:g}" + (" (FedAvg)" if tail == 1 else ""))
    right.plot(rounds, [report.tail_loss for report in reports])
left.set(xlabel="round", ylabel="clients that train, of 30", ylim=(0, 32))
right.set(xlabel="round", ylabel="mean loss in the tail, before training")
right.legend(*left.get_legend_handles_labels())
plt.show()

# %%
# In the first round all losses are equal, and all clients train. Clients count by their examples. So a tail of 0.5 is
# half of the examples, and not always half of the clients.
