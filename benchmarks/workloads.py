"""The workloads of the speed benchmark, and the contenders that run them. Each contender is a function that runs one round."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, fields, replace
from functools import lru_cache, partial
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn import functional

import equipoise as eq
from equipoise.errors import Diverged
from equipoise.rounds.driver_choice import choose_driver
from equipoise.rounds.drivers import Outcome
from equipoise.runs.setup import set_up
from equipoise.types import Cohort, ServerState

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

    def steps_of(self, sizes: Tensor) -> Tensor:
        """Local steps of clients with so many examples."""
        return -(-sizes // self.batch_size)


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
    "many clients": Workload("linear 784→62, 10,000 clients × 100 examples held in memory, 100 per round", 10_000, 100, 100, 10,
                             softmax),
    "tails 10": Workload("linear 784→62, four tails, 10 clients per round × 100 examples, batch 10", 200, 10, 100, 10, softmax),
    "tails 100": Workload("linear 784→62, four tails, 100 clients per round × 100 examples, batch 10", 1000, 100, 100, 10,
                          softmax),
}  # fmt: skip
TAILS = (1.0, 0.8, 0.5, 0.1)
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
    return Workload(
        title, clients, clients_per_round, examples, 10, partial(softmax, features), features=features
    )  # fmt: skip


def precisions() -> tuple[str | None, ...]:
    """The precisions that the simulator can be asked for on a GPU; None where it has no choice."""
    has_choice = any(field.name == "precision" for field in fields(eq.engines.Simulator))
    return ("float32", "tf32", "bf16") if has_choice else (None,)


def states_of(outcomes: Iterable[Outcome]) -> list[ServerState]:
    """The states after a round; a run that diverges stops the benchmark."""
    states = []
    for outcome in outcomes:
        if isinstance(outcome, Diverged):
            raise outcome
        states.append(outcome[0])
    return states


class EquipoiseRounds:
    """Rounds of Equipoise with an engine, as `train` runs them: calling it with an index runs that round."""

    def __init__(
        self, workload: Workload, engine: str = "simulator", device: str | None = None, precision: str | None = None
    ) -> None:
        options: dict[str, Any] = {"device": device} | ({"precision": precision} if precision is not None else {})
        choice = eq.engines.Loop(device=device) if engine == "loop" else eq.engines.Simulator(**options)
        self.workload, self.data = workload, workload.data()
        self.algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=LEARNING_RATE, batch_size=workload.batch_size))
        self.setting = set_up(
            workload.model(), self.data, self.algorithm, rounds=10**9, clients_per_round=workload.clients_per_round, seed=0,
            loss=None, error=None, engine=choice,
        )  # fmt: skip
        self.engine, self.state = self.setting.engine, self.setting.begin()
        self.clients_per_round = workload.clients_per_round

    @property
    def clients_per_round(self) -> int:
        return self.setting.clients_per_round

    @clients_per_round.setter
    def clients_per_round(self, count: int) -> None:
        self.setting = replace(self.setting, clients_per_round=count)
        self.driver = choose_driver([self.setting])

    def cohort(self, index: int) -> Cohort:
        return self.setting.draw(index)

    def __call__(self, index: int) -> None:
        if self.state.round != index:
            self.state = replace(self.state, round=index)
        (self.state,) = states_of(self.driver([self.state]))

    def local_work(self, cohort: Cohort) -> None:
        """The engine's part of a round alone, from the present model; the result is dropped."""
        self.engine.summed_update(
            self.state.params, cohort, self.algorithm.solver, cohort.weights, self.algorithm.aggregator
        )  # fmt: skip

    def tally(self, indices: Iterable[int]) -> tuple[int, int]:
        """Examples seen and local steps taken in these rounds, by all clients together."""
        sizes = torch.cat([self.data.train.sizes[self.cohort(index).clients] for index in indices])
        return int(sizes.sum()), int(self.workload.steps_of(sizes).sum())

    @property
    def waste(self) -> float | None:
        """The share of computed example slots that were padding in the last round, if the engine says so."""
        found = getattr(self.engine, "waste", None)
        return None if found is None else float(found)

    @property
    def works_by(self) -> str:
        """The paths that did the last round's local work; "loop" for the loop engine, which the simulator may have chosen."""
        return ", ".join(getattr(self.engine, "paths_taken", ("loop",)))

    def close(self) -> None:
        getattr(self.engine, "close", lambda: None)()


def equipoise_round(workload: Workload, engine: str) -> Round:
    """One round of Equipoise with an engine, as `train` runs it."""
    return EquipoiseRounds(workload, engine)


def tails_round(workload: Workload, together: bool, device: str | None = None) -> Round:
    """One round of Δ-FL with each of four tails: as a family in one batch, or as four runs of their own."""
    data, solver = workload.data(), eq.solvers.SGD(lr=LEARNING_RATE, batch_size=workload.batch_size)
    algorithms = [eq.Algorithm(risk=eq.risk.Superquantile(tail), solver=solver) for tail in TAILS]
    torch.manual_seed(0)
    model = workload.model()
    for parameter in model.parameters():
        nn.init.normal_(parameter, std=0.01)
    setting = set_up(
        model, data, algorithms[0], rounds=10**9, clients_per_round=workload.clients_per_round, seed=0, loss=None, error=None,
        engine=eq.engines.Simulator(device=device),
    )  # fmt: skip
    settings = [setting.with_algorithm(one, f"tail {tail}") for one, tail in zip(algorithms, TAILS, strict=True)]
    states = [one.begin() for one in settings]
    drivers = [choose_driver(settings)] if together else [choose_driver([one]) for one in settings]

    def one(index: int) -> None:
        nonlocal states
        if states[0].round != index:
            states = [replace(state, round=index) for state in states]
        given = [states] if together else [[state] for state in states]
        states = [state for driver, some in zip(drivers, given, strict=True) for state in states_of(driver(some))]

    return one


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


CONTENDERS: dict[str, Callable[..., Round]] = {
    "plain PyTorch loop": plain_round,
    "equipoise loop": lambda workload, device=None: EquipoiseRounds(workload, "loop", device),
    "equipoise simulator": lambda workload, device=None, precision=None: EquipoiseRounds(
        workload, "simulator", device, precision
    ),
    "four runs": lambda workload, device=None: tails_round(workload, together=False, device=device),
    "family of four": lambda workload, device=None: tails_round(workload, together=True, device=device),
}
