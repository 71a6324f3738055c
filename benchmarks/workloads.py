"""The workloads of the speed benchmarks, and who runs them: each is a function that runs one round."""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import equipoise as eq

Round = Callable[[int], None]
Inputs = Literal["images", "characters", "words"]
Sizes = Literal["equal", "log-normal"]
SIZES: tuple[Sizes, ...] = ("equal", "log-normal")

LEARNING_RATE = 0.05
CHARACTERS, WORDS, LENGTH = 53, 400, 20  # vocabularies, and tokens in a sequence
LOG_SPREAD = 1.0  # σ of the log of log-normal sizes
LEAST_EXAMPLES, MOST_TIMES_MEAN = 2, 10


@dataclass(frozen=True)
class Workload:
    """So many clients with random examples, of whom some train a model for one epoch in a round.

    `examples` is how many a client has, or their mean if `sizes` is "log-normal".
    """

    title: str
    clients: int
    clients_per_round: int
    examples: int
    batch_size: int
    model: Callable[[], nn.Module]
    inputs: Inputs = "images"
    features: int = 784  # of an image
    classes: int = 62
    sizes: Sizes = "equal"

    def data(self) -> eq.FederatedData:
        """Random examples in the type in which the loaders store them; what is in them does not change the work."""
        return random_data(self.inputs, self.features, self.classes, tuple(self.client_sizes().tolist()))

    def client_sizes(self) -> Tensor:
        """Examples per client, (n,): all alike, or e^{σ z} with z ~ N(0, 1), scaled to the mean and clipped."""
        if self.sizes == "equal":
            return torch.full((self.clients,), self.examples, dtype=torch.int64)
        drawn = (LOG_SPREAD * torch.randn(self.clients, generator=torch.Generator().manual_seed(1))).exp()
        scaled = drawn * (self.examples / drawn.mean())
        return scaled.round().long().clamp(LEAST_EXAMPLES, MOST_TIMES_MEAN * self.examples)


@lru_cache(maxsize=2)  # many rows of the table use the same data
def random_data(inputs: Inputs, features: int, classes: int, sizes: tuple[int, ...]) -> eq.FederatedData:
    """Clients with so many random examples each."""
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    rows, scale = int(offsets[-1]), None
    gen = torch.Generator().manual_seed(0)
    if inputs == "images":
        x, scale = torch.randint(0, 256, (rows, features), generator=gen, dtype=torch.uint8), 1 / 255
    elif inputs == "characters":
        x = torch.randint(0, CHARACTERS, (rows, LENGTH), generator=gen, dtype=torch.uint8)
    else:
        x = torch.randint(0, WORDS, (rows, LENGTH), generator=gen, dtype=torch.int32)
    y = torch.randint(0, classes, (rows,), generator=gen)
    ids = tuple(f"client-{i}" for i in range(len(sizes)))
    return eq.FederatedData(eq.ClientSet(x, y, offsets, ids, scale=scale), classes=classes)


def softmax(features: int = 784, classes: int = 62) -> nn.Module:
    return eq.models.Softmax(features, classes)


def convnet() -> nn.Module:
    return eq.models.ConvNet(classes=62)


def character_gru() -> nn.Module:
    return eq.models.CharGRU(vocabulary=CHARACTERS, embedding=None)


def word_lstm() -> nn.Module:
    table = torch.randn(WORDS, 50, generator=torch.Generator().manual_seed(2))
    return eq.models.EmbeddingLSTM(table)


WORKLOADS = {
    "linear": Workload("linear 784→62, 100 clients per round × 100 examples, batch 10", 1000, 100, 100, 10, softmax),
    "convnet": Workload("ConvNet, 10 clients per round × 100 examples, batch 16", 200, 10, 100, 16, convnet),
}
MODELS = ("linear", "GRU characters", "LSTM embeddings", "ConvNet")  # the ConvNet last: it takes what time is left


def grid_workload(model: str, clients_per_round: int, sizes: Sizes, *, clients: int = 2000, on_gpu: bool = False) -> Workload:
    """A cell of the table: one of MODELS, so many clients per round out of `clients`, and how their sizes are spread."""
    if model == "linear":
        return Workload(model, clients, clients_per_round, 100, 10, softmax, sizes=sizes)
    if model == "ConvNet":
        return Workload(model, clients, clients_per_round, 160 if on_gpu else 100, 16, convnet, sizes=sizes)
    if model == "GRU characters":
        return Workload(model, clients, clients_per_round, 50, 10, character_gru, "characters", classes=CHARACTERS, sizes=sizes)
    if model == "LSTM embeddings":
        return Workload(model, clients, clients_per_round, 50, 10, word_lstm, "words", classes=2, sizes=sizes)
    raise ValueError(f"model must be one of {', '.join(MODELS)}, not {model!r}")


def scaling_workload(*, clients_per_round: int = 100, clients: int = 500, examples: int = 100, features: int = 784) -> Workload:
    """The linear workload with other numbers of examples or features, for how cost grows."""
    title = f"linear {features}→62, {clients_per_round} clients per round × {examples} examples"
    return Workload(title, clients, clients_per_round, examples, 10, partial(softmax, features), features=features)


class EquipoiseRounds:
    """Rounds of `train`, one for each call: an observer holds the run between them. Set-up is over before the first."""

    def __init__(self, workload: Workload, rate: float = LEARNING_RATE, risk: Any = None, **engine: Any) -> None:
        self.params, self.failure, self.closed = None, None, False
        self._go, self._done = threading.Semaphore(0), threading.Semaphore(0)
        self._work = workload, risk or eq.risk.Mean(), rate, engine, torch.get_num_threads()
        threading.Thread(target=self._train, daemon=True).start()
        self._done.acquire()

    def _train(self) -> None:
        workload, risk, rate, engine, threads = self._work
        torch.set_num_threads(threads)
        algorithm = eq.Algorithm(risk=risk, solver=eq.solvers.SGD(lr=rate, batch_size=workload.batch_size))
        try:
            eq.train(
                workload.model(), workload.data(), algorithm, rounds=10**9, clients_per_round=workload.clients_per_round,
                engine=eq.engines.Simulator(**engine), observers=[self], progress=False,
            )  # fmt: skip
        except BaseException as failure:
            self.failure = failure
        self._done.release()

    def on_state(self, state: Any) -> None:  # also of the state before the first round
        self.params = state.params
        self._done.release()
        self._go.acquire()
        if self.closed:
            raise SystemExit

    def close(self) -> None:
        """End the run, with its processes."""
        self.closed = True
        self._go.release()
        self._done.acquire()

    def __call__(self, index: int = 0) -> None:
        self._go.release()
        self._done.acquire()
        if self.failure is not None:
            raise self.failure


def plain_round(workload: Workload, device: str | None = None) -> Round:
    """What a careful person writes by hand in PyTorch: no DataLoader, one module, one optimiser step per batch, no copies."""
    where = torch.device(device or "cpu")
    clients, model = workload.data().train.to(where), workload.model().to(where)
    offsets = clients.offsets.tolist()
    parameters = list(model.parameters())
    gen, order = torch.Generator().manual_seed(0), torch.Generator(where).manual_seed(0)

    def one(index: int) -> None:
        chosen = torch.randperm(len(clients), generator=gen)[: workload.clients_per_round].tolist()
        start = [p.detach().clone() for p in parameters]
        total = [torch.zeros_like(p) for p in start]
        for client in chosen:
            with torch.no_grad():
                for p, s in zip(parameters, start, strict=True):
                    p.copy_(s)
            rows = slice(offsets[client], offsets[client + 1])
            x, y = clients.x[rows].float().div_(255), clients.y[rows]
            for batch in torch.split(torch.randperm(len(x), generator=order, device=where), workload.batch_size):
                loss = functional.cross_entropy(model(x[batch]), y[batch])
                gradients = torch.autograd.grad(loss, parameters)
                with torch.no_grad():
                    for p, g in zip(parameters, gradients, strict=True):
                        p.sub_(g, alpha=LEARNING_RATE)
            with torch.no_grad():
                for t, p, s in zip(total, parameters, start, strict=True):
                    t.add_(p - s, alpha=1 / len(chosen))
        with torch.no_grad():
            for p, s, t in zip(parameters, start, total, strict=True):
                p.copy_(s + t)

    return one
