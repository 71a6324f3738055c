"""
Fair between groups, robust within them
=======================================

A hierarchical tilt has two knobs. Between groups a positive tilt helps the worse group. Within groups a negative tilt
ignores clients with odd data (Li's thesis, section 7.6). Here each cross is the mean of a client's data, and the model
is one point under squared loss. The large group has two broken clients.
"""

import matplotlib.pyplot as plt
import numpy as np

import equipoise as eq

rng = np.random.default_rng(0)
large, small = rng.normal((0, 0), 0.25, (12, 2)), rng.normal((2, 0), 0.25, (4, 2))
broken = np.array([[0.6, 3.4], [1.2, 3.7]])
means = np.vstack([large, small, broken])
data = eq.data.gaussian_means(means.tolist(), examples=20, exact=True)
groups = {name: "small" if 12 <= k < 16 else "large" for k, name in enumerate(data.train.ids)}
methods = {
    "mean": eq.risk.Mean(),
    "t = 2 between clients": eq.risk.Tilted(tilt=2.0),
    "t = 2 between groups": eq.risk.HierarchicalTilt(groups, tilt=2.0),
    "t = 2 between groups, −2 within": eq.risk.HierarchicalTilt(groups, tilt=2.0, inner_tilt=-2.0),
}
solver = eq.solvers.SGD(lr=0.1, steps=1, batch_size=None)
for part, colour, name in ((large, "C0", "large group"), (small, "C1", "small group"), (broken, "0.5", "broken clients")):
    plt.plot(*part.T, "x", color=colour, label=name)
for (name, risk), marker in zip(methods.items(), "osD*", strict=True):
    algorithm = eq.Algorithm(risk=risk, solver=solver, sampler=eq.sampling.Full())
    point = eq.train(eq.models.MeanEstimator(2), data, algorithm, rounds=80, seed=0).params
    plt.plot(*point.tolist(), marker, ms=10, color="black", mfc="none", label=name)
plt.legend(loc="center left", bbox_to_anchor=(1.0, 0.5))
plt.axis("equal")
plt.show()
