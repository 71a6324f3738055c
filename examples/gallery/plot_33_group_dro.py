"""
Group DRO: the worst group of clients gains weight
==================================================

Group DRO looks at the mean loss of groups of clients, and not at single clients. A group with a large loss gains weight
from round to round (Sagawa et al. 2020). In this example, two of ten clients live in another region, whose rule is
different. No model suits both regions. Group DRO evens out their losses, and the larger region pays for it.
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

rng = np.random.default_rng(0)
clients, regions = {}, {}
for k in range(10):
    x = rng.normal(size=(300, 4))
    rule = np.array([1.0, -1.0, 0.5, 0.0]) if k < 8 else np.array([1.0, 1.0, -0.5, 0.0])
    clients[f"client {k}"] = (x.astype("float32"), (x @ rule + 0.3 * rng.normal(size=300) > 0).astype("int64"))
    regions[f"client {k}"] = "north" if k < 8 else "south"
data = eq.data.from_dict(clients, split_by="examples", test=0.25, seed=0)
model = eq.models.Softmax(data.features, data.classes)
methods = {"FedAvg": eq.risk.Mean(), "group DRO": eq.risk.GroupDRO(step=0.05, groups=regions)}
places = np.arange(2)
for shift, (name, risk) in zip((-0.2, 0.2), methods.items(), strict=True):
    algorithm = eq.Algorithm(risk=risk, sampler=eq.sampling.Full())
    table = eq.train(model, data, algorithm, rounds=60, seed=0).clients.where("test")
    errors = dict(zip(table.client, 100 * np.asarray(table.error), strict=True))
    means = [np.mean([errors[who] for who in errors if regions[who] == region]) for region in ("north", "south")]
    bars = plt.bar(places + shift, means, width=0.4, label=name)
    plt.bar_label(bars, [f"{mean:.0f} %" for mean in means])
plt.xticks(places, ["north: 8 clients", "south: 2 clients"])
plt.ylabel("mean test error of the region in %")
plt.legend(loc="upper left")
plt.show()
