"""Frozen descriptions of published experiments, the entries of `equipoise reproduce`. `runner` runs them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.aggregators import WeightedMean
from equipoise.algorithm import Algorithm
from equipoise.data.clients import FederatedData
from equipoise.result import Result
from equipoise.risk import Mean
from equipoise.sampling import Uniform
from equipoise.solvers import SGD
from equipoise.types import Aggregator, ClientRisk, LocalSolver, Personalisation, Sampler


@dataclass(frozen=True)
class Need:
    """A file or folder of data that an experiment reads, and where to get it."""

    path: str  # inside the data folder
    origin: str  # where to get it

    @property
    def names(self) -> tuple[str, ...]:
        """The names that it may have: idx files may be packed by gzip."""
        return (self.path, f"{self.path}.gz") if self.path.endswith("-ubyte") else (self.path,)


@dataclass(frozen=True)
class Scale:
    """The size of an experiment: rounds, clients and seeds."""

    rounds: int  # of each run
    clients_per_round: int  # all training clients if there are fewer
    seeds: int  # how many
    train_clients: int | None = None  # the largest number, drawn at random; None: all
    test_clients: int | None = None  # as train_clients
    first_seed: int = 0  # the others follow it
    options: Mapping[str, Any] = field(default_factory=dict)  # keyword arguments of the data


@dataclass(frozen=True)
class Method:
    """A method of an experiment, a row of its tables: parts of an algorithm, and changes to the local solver and the data."""

    name: str  # the title of its row
    risk: ClientRisk = field(default_factory=Mean)  # of the algorithm
    sampler: Sampler = field(default_factory=Uniform)  # of the algorithm
    solver: Mapping[str, Any] = field(default_factory=dict)  # changes to the solver of the experiment
    variant: Mapping[str, Any] = field(default_factory=dict)  # further keyword arguments of the data
    aggregator: Aggregator = field(default_factory=WeightedMean)  # of the algorithm
    personal: Personalisation | None = None  # of the algorithm
    local: LocalSolver | None = None  # in place of the solver of the experiment
    rounds: int | None = None  # at the scale "paper", in place of the scale's
    seeds: int | None = None  # at most, in place of the scale's
    evaluate_every: int | None = None  # in place of the experiment's; 0: at the end only


@dataclass(frozen=True)
class Choose:
    """How the learning rate of each method is chosen: by runs of some rounds, on validation examples."""

    rounds: int
    share: float  # of each client's examples


@dataclass(frozen=True)
class Figure:
    """A figure that tables show: the title of its column, and its decimals."""

    title: str  # of its column
    digits: int = 2  # decimals
    unpublished: bool = False  # whether it stands beside published figures where it was not published itself


@dataclass(frozen=True)
class Claim:
    """A published claim: `figure` is lower for the method `lower` than for the method `higher`."""

    figure: str  # what is compared
    lower: str  # the method with the lower figure
    higher: str  # the method with the higher figure
    source: str  # the paper and table of the claim


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """A run that has ended, with what it was trained on: the input of a measure."""

    result: Result
    data: FederatedData
    solver: LocalSolver
    device: str | None
    curve: Mapping[int, float] = field(default_factory=dict)  # accuracy on all test examples, in %, by number of rounds


DataMaker = Callable[..., FederatedData]  # (folder, seed, **options)
ModelMaker = Callable[[FederatedData, Path | None, int], nn.Module]  # (data, folder, seed)
Measure = Callable[[FinishedRun], dict[str, float]]


@dataclass(frozen=True)
class Experiment:
    """A published experiment: its methods, model, data and scales, what to measure, and what differs from the paper."""

    name: str  # as in `equipoise reproduce NAME`
    title: str  # of its tables
    tables: tuple[str, ...]  # "document/table" of the published numbers; none for a stand-in
    methods: tuple[Method, ...]  # the rows of its tables
    model: ModelMaker  # makes the model from (data, folder, seed)
    data: DataMaker  # makes the data from (folder, seed, **options)
    solver: SGD  # with our learning rate
    scales: Mapping[str, Scale]  # "small" and "paper"
    figures: Mapping[str, Figure]  # the columns of its tables, by the names that `measure` gives
    measure: Measure  # figures of a finished run
    paper_lr: float  # the learning rate of the paper
    rate_from: str = "the paper's"  # where it is from, in words
    retuned: bool = False  # whether our learning rate was chosen again, from `rates`, as --tune does
    decay_after: float | None = None  # the learning rate halves whenever this share of all rounds is over
    needs: tuple[Need, ...] = ()  # files of data
    claims: tuple[Claim, ...] = ()  # published claims that are checked
    differences: tuple[str, ...] = ()  # from the paper, at any scale
    paper_clients: tuple[int, int] | None = None  # training and test clients of the paper, if not those of the data
    unseen: bool = True  # whether test clients took no part in training
    rates: tuple[float, ...] = ()  # candidates of --tune
    choose: Choose | None = None  # how --tune chooses a rate for each method; None: one for all, by a training loss
    evaluate_share: float | None = None  # evaluate whenever this share of the rounds is over
    evaluate_every: int | None = None  # rounds between evaluations, in place of a share
    same_data: bool = False  # whether the data are the same for all seeds

    def local_solver(self, method: Method, scale: Scale, lr: float | None = None) -> LocalSolver:
        """The local solver of `method` at `scale`; `lr` replaces the learning rate of the experiment."""
        if method.local is not None:
            return method.local
        every = 1 if self.decay_after is None else max(1, round(self.decay_after * scale.rounds))
        decay = 1.0 if self.decay_after is None else 0.5
        usual = {"lr": lr or self.solver.lr, "lr_decay": decay, "lr_decay_every": every}
        return replace(self.solver, **{**usual, **method.solver})

    def algorithm(self, method: Method, scale: Scale, lr: float | None = None) -> Algorithm:
        """The algorithm of `method` at `scale`; `lr` replaces the learning rate of the experiment."""
        return Algorithm(
            risk=method.risk, sampler=method.sampler, solver=self.local_solver(method, scale, lr),
            aggregator=method.aggregator, personal=method.personal,
        )  # fmt: skip

    def evaluations(self, method: Method, rounds: int) -> int | None:
        """After how many of `rounds` rounds all clients of a run of `method` are evaluated each time; None: at the end only."""
        every = self.evaluate_every if method.evaluate_every is None else method.evaluate_every
        if every is not None:
            return every or None
        return None if self.evaluate_share is None else max(1, round(self.evaluate_share * rounds))
