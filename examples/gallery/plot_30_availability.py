"""
Clients that are not always available
=====================================

Phones train at night. The `Availability` sampler gives every client a time window in the day. Cohorts, and the data of
each round, then differ from hour to hour.
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

data = eq.data.label_shift(train_clients=60, validation_clients=5, test_clients=20, seed=0)


class Cohorts(eq.observers.Observer):
    """Count how many clients took part in each round."""

    def __init__(self):
        self.sizes = []

    def on_round(self, report):
        self.sizes.append(report.cohort)


figure, axis = plt.subplots()
for aligned in (0.0, 0.4, 0.8):
    cohorts = Cohorts()
    sampler = eq.sampling.Availability(day=24, share=0.4, aligned=aligned)
    model = eq.models.Softmax(data.features, data.classes)
    eq.train(model, data, eq.Algorithm(sampler=sampler), rounds=72, clients_per_round=25, seed=0, observers=[cohorts])
    axis.plot(np.arange(72), cohorts.sizes, drawstyle="steps-mid", label=f"windows aligned: {aligned:g}")
axis.set(xlabel="hour (round)", ylabel="clients in the cohort, at most 25", xticks=range(0, 73, 12))
axis.legend(ncols=3, loc="lower center", bbox_to_anchor=(0.5, 1.0))
plt.show()
