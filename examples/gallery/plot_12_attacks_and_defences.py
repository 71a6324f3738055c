"""
Attacks against defences
========================

A fifth of the clients run one of four attacks. The server combines updates in one of four ways. The number in a cell is
the mean test error over benign clients. Scaled updates (model replacement) break the plain mean. Centred clipping has
the lowest error under each of the four attacks. A median raises the error even without an attack, because it treats
unusual honest clients as attackers. ALIE has a factor of 1.5, because its own rule gives 0.16 for 4 attackers among 20
clients, with which it hardly acts.
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

data = eq.data.digits(clients=40, split_by="examples", test=0.25, seed=0)
model = eq.models.Softmax(data.features, data.classes)
attacks = {
    "none": None,
    "random\nlabels": eq.attacks.LabelPoisoning(share=0.2, seed=1),
    "model\nreplacement": eq.attacks.ModelReplacement(share=0.2, seed=1),
    "sign flip": eq.attacks.SignFlip(share=0.2, seed=1),
    "ALIE": eq.attacks.ALIE(share=0.2, seed=1, factor=1.5),
}
defences = {
    "mean": eq.aggregators.WeightedMean(),
    "median": eq.aggregators.Median(),
    "multi-Krum": eq.aggregators.MultiKrum(malicious=5),
    "centred clipping": eq.aggregators.CentredClipping(),
}
errors = np.zeros((len(defences), len(attacks)))
for j, attack in enumerate(attacks.values()):
    attacked = data if attack is None else eq.attacks.apply(data, attack)
    for i, aggregator in enumerate(defences.values()):
        result = eq.train(model, attacked, eq.Algorithm(aggregator=aggregator), rounds=20, clients_per_round=20, seed=0)
        errors[i, j] = 100 * float(result.clients.benign.where("test").error.mean())

# %%
# Dark cells are runs in which the attack succeeded.

plt.imshow(errors, cmap="OrRd", vmin=0, vmax=90, aspect="auto")
for (i, j), value in np.ndenumerate(errors):
    plt.text(j, i, f"{value:.0f} %", ha="center", va="center", color="white" if value > 50 else "black")
plt.xticks(range(len(attacks)), attacks)
plt.yticks(range(len(defences)), defences)
plt.grid(visible=False)
plt.title("Mean error of benign clients")
plt.show()
