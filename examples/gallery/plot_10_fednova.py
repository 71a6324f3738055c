"""
FedNova corrects for unequal work
=================================

Clients with more examples take more local steps, so the averaged model ends nearer to their optima. FedNova divides
every update by its number of steps. For mean estimation the right answer is known: the weighted mean of the clients'
means.
"""

import matplotlib.pyplot as plt
import torch

import equipoise as eq

centres, sizes = [(-2.0, 0.0), (2.0, 0.0), (0.0, 3.0)], [10, 40, 160]
clients = {}
for k, (centre, size) in enumerate(zip(centres, sizes, strict=True)):
    noise = torch.randn(size, 2, generator=torch.Generator().manual_seed(k))
    x = torch.tensor(centre) + 0.3 * (noise - noise.mean(0))
    clients[f"client with {size} examples"] = (x, x)
data = eq.data.from_dict(clients, test=0)
right = sum(torch.tensor(c) for c in centres) / 3
solver = eq.solvers.SGD(lr=0.006, batch_size=10, epochs=2)


class Path(eq.observers.Observer):
    """Keep the model of every evaluation."""

    def __init__(self):
        self.points = [torch.zeros(2)]

    def on_evaluation(self, evaluation):
        self.points.append(evaluation.params.clone())


for centre, size in zip(centres, sizes, strict=True):
    plt.plot(*centre, "k.", ms=8)
    plt.annotate(f"{size} examples", centre, xytext=(0, 8), textcoords="offset points", ha="center")
for name, aggregator in (("FedAvg", eq.aggregators.WeightedMean()), ("FedNova", eq.aggregators.FedNova())):
    algorithm = eq.Algorithm(aggregator=aggregator, solver=solver, sampler=eq.sampling.Full(), weights="uniform")
    path = Path()
    eq.train(eq.models.MeanEstimator(2), data, algorithm, rounds=50, seed=0, evaluate_every=2, observers=[path])
    points = torch.stack(path.points)
    distance = torch.dist(points[-1], right)
    plt.plot(points[:, 0], points[:, 1], "o-", ms=4, label=f"{name}: ends {distance:.2f} from the optimum")
plt.plot(*right.tolist(), "*", color="black", ms=16, label="optimum: each client counts once")
plt.xlabel("first coordinate")
plt.ylabel("second coordinate")
plt.ylim(-0.4, 4.6)
plt.legend(loc="upper left", fontsize=10)
plt.show()
