"""What is trained, and how: the same on the server, on every node and in the simulation."""

import torch

import equipoise as eq

torch.set_num_threads(1)  # a small model gains nothing from more, and nodes may share a machine

algorithm = eq.Algorithm(
    risk=eq.risk.Superquantile(tail=0.5),  # the half of the clients that does worst; Mean() is FedAvg
    solver=eq.solvers.SGD(lr=0.1, batch_size=10, epochs=1),
    weights="uniform",  # each client once; "examples" would make it the worst half of all examples, small clients little of it
)


def net() -> torch.nn.Module:
    """The model: any torch module."""
    return eq.models.Softmax(64, 10)
