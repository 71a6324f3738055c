"""What an entry of `equipoise reproduce` consists of: frozen descriptions, from which the runner does everything."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.data.clients import FederatedData
from equipoise.result import Result
from equipoise.risk import Mean
from equipoise.sampling import Uniform
from equipoise.solvers import SGD
from equipoise.types import ClientRisk, Sampler


@dataclass(frozen=True)
class Need:
    """A file (or folder) that an entry reads, and where it comes from."""

    path: str  # inside the data folder
    origin: str


@dataclass(frozen=True)
class Scale:
    """How much work is done."""

    rounds: int
    clients_per_round: int  # at most; all training clients where there are fewer
    seeds: int
    train_clients: int | None = None  # at most so many of each kind are drawn; None: all
    test_clients: int | None = None
    first_seed: int = 0
    options: Mapping[str, Any] = field(default_factory=dict)  # of the data


@dataclass(frozen=True)
class Method:
    """A row: the risk, who takes part, and what differs from the entry's local work and data."""

    name: str
    risk: ClientRisk = field(default_factory=Mean)
    sampler: Sampler = field(default_factory=Uniform)
    solver: Mapping[str, Any] = field(default_factory=dict)
    variant: Mapping[str, Any] = field(default_factory=dict)  # options of the data


@dataclass(frozen=True)
class Figure:
    """A column of the tables."""

    title: str
    digits: int = 2


@dataclass(frozen=True)
class Claim:
    """A direction that the document states: `figure` is lower for one method than for another."""

    figure: str
    lower: str
    higher: str
    source: str


@dataclass(frozen=True, eq=False)
class FinishedRun:
    """What a measure may look at when a run has ended."""

    result: Result
    data: FederatedData
    solver: SGD
    device: str | None


DataMaker = Callable[..., FederatedData]  # (folder, seed, **options)
Measure = Callable[[FinishedRun], dict[str, float]]


@dataclass(frozen=True)
class Experiment:
    """One name of `equipoise reproduce`."""

    name: str
    title: str
    tables: tuple[str, ...]  # "document/table" of the published numbers; none for a stand-in
    methods: tuple[Method, ...]
    model: Callable[[FederatedData, Path | None, int], nn.Module]  # (data, folder, seed)
    data: DataMaker
    solver: SGD  # with our learning rate
    scales: Mapping[str, Scale]  # "small" and "paper"
    figures: Mapping[str, Figure]
    measure: Measure
    paper_lr: float
    retuned: bool = False  # whether our learning rate was chosen again, from `rates`, as --tune does
    decay_after: float | None = None  # the learning rate halves whenever this share of all rounds is over
    needs: tuple[Need, ...] = ()
    claims: tuple[Claim, ...] = ()
    differences: tuple[str, ...] = ()  # from the paper, at any scale
    paper_clients: tuple[int, int] | None = None  # train and test, where they are others
    unseen: bool = True  # whether test clients are others than the training clients
    rates: tuple[float, ...] = ()  # candidates of --tune
    evaluate_share: float | None = None  # evaluate whenever this share of the rounds is over

    def local_work(self, method: Method, scale: Scale, lr: float | None = None) -> SGD:
        """The local solver of a method."""
        every = 1 if self.decay_after is None else max(1, round(self.decay_after * scale.rounds))
        decay = 1.0 if self.decay_after is None else 0.5
        return replace(self.solver, lr=lr or self.solver.lr, lr_decay=decay, lr_decay_every=every, **method.solver)

    def algorithm(self, method: Method, scale: Scale, lr: float | None = None) -> Algorithm:
        """The algorithm of a method."""
        return Algorithm(risk=method.risk, sampler=method.sampler, solver=self.local_work(method, scale, lr))
