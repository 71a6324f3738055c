"""Federated averaging by pfl-research: a dataset of users, a backend, an algorithm and its parameters."""

import numpy as np
import torch
from digits import BATCH, CLIENTS, RATE, ROUNDS, clients
from pfl.aggregate.simulate import SimulatedBackend
from pfl.algorithm.base import NNAlgorithmParams
from pfl.algorithm.federated_averaging import FederatedAveraging
from pfl.data.federated_dataset import FederatedDataset
from pfl.data.pytorch import PyTorchTensorDataset
from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
from pfl.metrics import Weighted
from pfl.model.pytorch import PyTorchModel
from torch import nn

np.random.seed(0)
torch.manual_seed(0)
users = clients()


class Classifier(nn.Module):
    def __init__(self):
        super().__init__()
        self.net = nn.Linear(64, 10)

    def loss(self, x, y):
        return nn.functional.cross_entropy(self.net(x), y)

    def metrics(self, x, y):
        return {"loss": Weighted(self.loss(x, y).item() * len(y), len(y))}


def dataset_of(user):
    x, y, _, _ = users[user]
    order = np.random.permutation(len(y))
    return PyTorchTensorDataset((torch.from_numpy(x[order]), torch.from_numpy(y[order])))


def everyone():
    while True:
        yield from range(CLIENTS)


module, turn = Classifier(), everyone()
dataset = FederatedDataset(dataset_of, lambda: next(turn))
model = PyTorchModel(module, torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
sizes = NNAlgorithmParams(
    central_num_iterations=ROUNDS, evaluation_frequency=10**6, train_cohort_size=CLIENTS, val_cohort_size=None
)
local = NNTrainHyperParams(local_num_epochs=1, local_learning_rate=RATE, local_batch_size=BATCH)
backend, judging = SimulatedBackend(dataset, dataset), NNEvalHyperParams(local_batch_size=None)
FederatedAveraging().run(sizes, backend, model, local, judging, send_metrics_to_platform=False)
errors = [(module.net(torch.from_numpy(x)).argmax(1) != torch.from_numpy(y)).float().mean() for _, _, x, y in users]
print(f"error {float(torch.stack(errors).mean()):.3f}")
