"""
A backdoor is invisible in the error
====================================

Malicious clients teach the model that a small mark means class 0. The error without the mark stays low, so look at the
success rate of the mark, too. Norm clipping hardly helps here. A median helps, but has a larger error.
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

data = eq.data.digits(clients=40, split_by="examples", test=0.25, seed=0)
model = eq.models.Softmax(data.features, data.classes)
attacked = eq.attacks.apply(data, eq.attacks.Backdoor(share=0.2, seed=1, target=0, boost=5.0))
clean = eq.attacks.apply(data, eq.attacks.Backdoor(share=0.0, seed=1, target=0))
runs = {"nobody attacks": (clean, eq.aggregators.WeightedMean()), "mean": (attacked, eq.aggregators.WeightedMean()),
        "norm clipping": (attacked, eq.aggregators.NormClip()), "median": (attacked, eq.aggregators.Median())}  # fmt: skip
error, success = [], []
for federation, aggregator in runs.values():
    result = eq.train(model, federation, eq.Algorithm(aggregator=aggregator), rounds=25, clients_per_round=20, seed=0)
    table = result.clients.benign.where("test")
    error.append(100 * float(table.error.mean()))
    success.append(100 * float(np.nanmean(np.asarray(table.metrics["backdoor_success"]))))
places = np.arange(len(runs))
plt.bar(places - 0.2, error, 0.4, label="error without the mark")
plt.bar(places + 0.2, success, 0.4, label="success of the mark")
plt.xticks(places, runs)
plt.ylabel("% of test examples of benign clients")
plt.ylim(0, 118)
plt.legend(loc="upper left", ncols=2)
plt.show()
