"""
A toy example with a known answer
=================================

Three clients hold points around three means, and one model estimates a single point under squared loss. The mean risk
leads to the centroid. The superquantile with tail 2/3 minimises the mean loss of the two worst clients. For an acute
triangle, its optimum is the circumcentre. For an obtuse triangle, it is the midpoint of the longest side. Training
finds both.
"""

import matplotlib.pyplot as plt
import torch

import equipoise as eq

triangles = {
    "acute: circumcentre": [(0.0, 0.0), (2.0, 0.0), (0.8, 1.6)],
    "obtuse: midpoint of the longest side": [(0.0, 0.0), (3.0, 0.0), (1.0, 0.5)],
}
solver = eq.solvers.SGD(lr=0.05, steps=1, batch_size=None, lr_decay=0.5, lr_decay_every=60)
figure, axes = plt.subplots(1, 2, figsize=(9, 4.2))
for axis, (title, means) in zip(axes, triangles.items(), strict=True):
    data = eq.data.gaussian_means(means, exact=True)
    corners = torch.tensor([*means, means[0]])
    axis.plot(corners[:, 0], corners[:, 1], color="0.75")
    axis.plot(corners[:, 0], corners[:, 1], "k.", ms=8)
    tail = eq.risk.Superquantile(tail=2 / 3)
    for name, risk, marker in (("mean", eq.risk.Mean(), "o"), ("superquantile, tail 2/3", tail, "D")):
        algorithm = eq.Algorithm(risk=risk, solver=solver, sampler=eq.sampling.Full())
        point = eq.train(eq.models.MeanEstimator(2), data, algorithm, rounds=300, seed=0).params
        axis.plot(*point.tolist(), marker, ms=10, label=f"{name}: ({point[0]:.2f}, {point[1]:.2f})")
    axis.set(title=title, xlabel="first coordinate", ylabel="second coordinate", xlim=(-0.3, 3.3), ylim=(-0.4, 2.6))
    axis.legend(loc="upper right", fontsize=9)
plt.show()
