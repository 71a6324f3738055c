"""The client of the Flower simulation: one epoch of a careful PyTorch loop. Ray's actors import this module."""

from __future__ import annotations

import os
from functools import lru_cache

import numpy as np
import torch
from flwr.app import ArrayRecord, Context, Message, MetricRecord, RecordDict
from flwr.clientapp import ClientApp
from problem import LEARNING_RATE, PROBLEMS, Problem
from torch import Tensor, nn
from torch.nn import functional
from torch_model import initial_model, tensors

app = ClientApp()


@lru_cache(maxsize=1)
def prepared(workload: str) -> tuple[Problem, nn.Module, Tensor, Tensor, torch.Generator]:
    """What an actor keeps between messages: the data, one module, and a generator of its own."""
    torch.set_num_threads(1)
    problem = PROBLEMS[workload]
    return problem, initial_model(problem), *tensors(problem), torch.Generator().manual_seed(os.getpid())


@lru_cache(maxsize=1)
def order_of(clients: int, server_round: int) -> np.ndarray:
    """Which client a node plays in a round: nodes are as many as a cohort, clients many more."""
    return np.random.default_rng(server_round).permutation(clients)


@app.train()
def train(message: Message, context: Context) -> Message:
    config = message.content["config"]
    problem, model, x, y, generator = prepared(str(config["workload"]))
    parameters = list(model.parameters())
    with torch.no_grad():
        for parameter, array in zip(parameters, message.content["arrays"].to_numpy_ndarrays(), strict=True):
            parameter.copy_(torch.from_numpy(array))

    client = int(order_of(problem.clients, int(config["server-round"]))[int(context.node_config["partition-id"])])
    images, classes = x[client].float().div_(255), y[client]
    for batch in torch.randperm(problem.examples, generator=generator).split(problem.batch_size):
        loss = functional.cross_entropy(model(images[batch]), classes[batch])
        gradients = torch.autograd.grad(loss, parameters)
        with torch.no_grad():
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.sub_(gradient, alpha=LEARNING_RATE)

    trained = ArrayRecord([parameter.detach().numpy() for parameter in parameters])
    return Message(
        RecordDict({"arrays": trained, "metrics": MetricRecord({"num-examples": problem.examples})}), reply_to=message
    )
