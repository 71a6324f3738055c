"""pfl (Apple): SimulatedBackend and FederatedAveraging with a PyTorch model, in one process or several."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
from collections.abc import Iterator
from importlib.metadata import version
from typing import Any

from problem import LEARNING_RATE, PROBLEMS, Problem, as_arrays
from turns import Turns, options

ENDLESS = 10**9


def start_helpers(processes: int) -> list[subprocess.Popen[bytes]]:
    """pfl's workers share a round through torch.distributed; this process is the first, the others follow it.

    pfl reads the addresses when it is imported, so they have to be there before.
    """
    if processes == 1 or "PFL_WORKER_RANK" in os.environ:
        return []
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    os.environ["PFL_WORKER_ADDRESSES"] = ",".join(f"127.0.0.1:{port + i}" for i in range(processes))
    ranks = [os.environ | {"PFL_WORKER_RANK": str(rank)} for rank in range(1, processes)]
    helpers = [
        subprocess.Popen([sys.executable, *sys.argv], env=rank, stdin=subprocess.DEVNULL, stdout=sys.stderr) for rank in ranks
    ]
    os.environ["PFL_WORKER_RANK"] = "0"
    return helpers


def users(problem: Problem) -> Iterator[int]:
    for cohort in problem.cohorts():
        yield from cohort.tolist()


def main() -> None:
    chosen = options()
    helpers = start_helpers(chosen.processes)

    import numpy as np
    import torch
    from pfl.aggregate.simulate import SimulatedBackend
    from pfl.algorithm.base import NNAlgorithmParams
    from pfl.algorithm.federated_averaging import FederatedAveraging
    from pfl.callback.base import TrainingProcessCallback
    from pfl.data.federated_dataset import FederatedDataset
    from pfl.data.pytorch import PyTorchTensorDataset
    from pfl.hyperparam import NNEvalHyperParams, NNTrainHyperParams
    from pfl.metrics import Metrics, Weighted
    from pfl.model.pytorch import PyTorchModel
    from torch import Tensor, nn
    from torch.nn import functional
    from torch_model import initial_model, tensors

    torch.set_num_threads(chosen.threads)
    np.random.seed(0)  # pfl draws its seeds from numpy's global generator, alike in all its processes
    problem = PROBLEMS[chosen.workload]
    module, (x, y) = initial_model(problem), tensors(problem)
    order = torch.Generator().manual_seed(os.getpid())

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.module = module

        def loss(self, images: Tensor, classes: Tensor) -> Tensor:
            return functional.cross_entropy(self.module(images), classes)

        def metrics(self, images: Tensor, classes: Tensor) -> dict[str, Any]:  # pfl asks for it once, in the first round
            return {"loss": Weighted(self.loss(images, classes).item() * len(images), len(images))}

    def dataset_of(user: int) -> PyTorchTensorDataset:
        """A user's examples in a new order; pfl cuts batches from them as they lie."""
        shuffled = torch.randperm(problem.examples, generator=order)
        return PyTorchTensorDataset((x[user][shuffled].float().div_(255), y[user][shuffled]))

    def make_turns() -> Turns:
        turns = Turns(problem, lambda: as_arrays([p.detach() for p in module.parameters()]))
        turns.ready(f"{version('pfl')} (torch {torch.__version__})")
        return turns

    follows = os.environ.get("PFL_WORKER_RANK", "0") != "0"
    turns = None if follows else make_turns()

    def proceed() -> bool:
        going = turns.proceed() if turns is not None else False
        if chosen.processes > 1:
            told = torch.tensor([int(going)])
            torch.distributed.broadcast(told, src=0)
            going = bool(told.item())
        return going

    class Wait(TrainingProcessCallback):
        def after_central_iteration(
            self, aggregate_metrics: Any, model: Any, *, central_iteration: int
        ) -> tuple[bool, Metrics]:
            return not proceed(), Metrics()

    model = PyTorchModel(Classifier(), torch.optim.SGD, torch.optim.SGD(module.parameters(), lr=1.0))
    population = users(problem)
    dataset = FederatedDataset(dataset_of, lambda: next(population))
    sizes = NNAlgorithmParams(
        central_num_iterations=ENDLESS, evaluation_frequency=ENDLESS, train_cohort_size=problem.clients_per_round,
        val_cohort_size=None,
    )  # fmt: skip
    local = NNTrainHyperParams(
        local_num_epochs=1, local_learning_rate=LEARNING_RATE, local_batch_size=problem.batch_size
    )  # fmt: skip
    if proceed():
        FederatedAveraging().run(
            sizes, SimulatedBackend(dataset, dataset), model, local, NNEvalHyperParams(local_batch_size=None),
            callbacks=[Wait()], send_metrics_to_platform=False,
        )  # fmt: skip
    for helper in helpers:
        helper.wait()


if __name__ == "__main__":
    main()
