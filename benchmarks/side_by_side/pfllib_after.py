"""The run of PFLlib's command line by Equipoise: it reads the files that PFLlib's `generate_MNIST.py` writes.

    python benchmarks/side_by_side/pfllib_after.py PFLlib/dataset/MNIST [ROUNDS]

The comments name PFLlib's options. `run.py` does not run it, as PFLlib is not in the package registry.
"""

import sys
from pathlib import Path

import numpy as np
import torch

import equipoise as eq

FOLDER = Path(sys.argv[1])
ROUNDS = int(sys.argv[2]) if len(sys.argv) > 2 else 2000  # -gr 2000


def read(split: str) -> eq.ClientSet:
    """The clients of a split: PFLlib has one file per client, which NumPy unpickles. Read files of your own only."""
    files = sorted((FOLDER / split).glob("*.npz"), key=lambda file: int(file.stem))
    made = ((file.stem, np.load(file, allow_pickle=True)["data"].item()) for file in files)
    return eq.ClientSet.pack((name, torch.as_tensor(one["x"]).float(), torch.as_tensor(one["y"]).long()) for name, one in made)


data = eq.FederatedData(read("train"), test=read("test"), classes=10)  # -nc 20 -nb 10
model = eq.models.ConvNet(classes=10, hidden=512, seed=0)  # -m cnn
solver = eq.solvers.SGD(lr=0.005, batch_size=10, epochs=1)  # -lr 0.005 -lbs 10 -ls 1
everybody = eq.Algorithm(solver=solver, sampler=eq.sampling.Full())  # -algo FedAvg -jr 1.0
result = eq.train(model, data, everybody, rounds=ROUNDS, evaluate_every=10, seed=0)  # -eg 1 is PFLlib's default
error = result.summary().error
print(f"accuracy {1 - error.mean_by_example:.4f}; 90th percentile of the error over clients {error.percentiles[90]:.3f}")
