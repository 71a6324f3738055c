"""One request on a node, and the node's means to answer it: its own data, and an ordinary engine on them."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor, nn

from equipoise.client_metrics import ClientMetrics
from equipoise.core.abilities import engine_traits, is_part
from equipoise.core.task import PerExample, Task
from equipoise.engines.flower.apps.model_source import ModelSource, make_model
from equipoise.engines.flower.apps.node_data import NodeData, read_node_data
from equipoise.engines.flower.personal.kept_rows import KeptRows
from equipoise.engines.flower.transport.messages import FLOATS, BadMessage, MessageContent
from equipoise.engines.flower.transport.part_messages import PartNotSent, list_part_tensors, unpack_part
from equipoise.errors import EquipoiseError, InvalidData
from equipoise.personal.context import PersonalContext
from equipoise.runs.setup import EngineChoice
from equipoise.types import Cohort, Engine, LocalSolver

Answer = tuple[dict[str, Any], dict[str, Tensor]]  # plain values and tensors


@dataclass(eq=False)
class NodeSetup:
    """What a node's owner has set, and what was made of it in this process."""

    model: ModelSource
    load_data: Callable[[Context], Any]
    loss: PerExample | None
    error: PerExample | None
    engine: EngineChoice
    only_sums: bool
    allow: tuple[str, ...]
    folder: Path | None  # where the client's own model is kept
    metrics: ClientMetrics = field(default_factory=ClientMetrics)
    loaded: dict[int, NodeData] = field(default_factory=dict)  # by Flower's node id
    models: dict[int, nn.Module] = field(default_factory=dict)  # by seed
    started: dict[tuple[int, int, int], PersonalContext] = field(default_factory=dict)  # by node id, seed and classes

    def data(self, context: Context) -> NodeData:
        """The node's examples, loaded once in a process."""
        if context.node_id not in self.loaded:
            self.loaded[context.node_id] = read_node_data(self.load_data(context), context)
        return self.loaded[context.node_id]

    def start(self, context: Context, seed: int, classes: int) -> PersonalContext:
        """The engine of a run, its task and its data; these have as many classes as all nodes' together."""
        key = (context.node_id, seed, classes)
        if key not in self.started:
            data = self.data(context).data
            data = replace(data, classes=max(classes, data.classes)) if classes else data
            if seed not in self.models:
                self.models[seed] = make_model(self.model, seed)
            task = Task.of(self.models[seed], self.loss, self.error).fitted(data)
            engine = self.engine.start(task, data)
            self.started[key] = PersonalContext(engine, task, data, lambda other: self.engine.start(other, data))
        return self.started[key]


class NodeSession:
    """One request on a node: what it says, and the node's means to answer it."""

    def __init__(self, setup: NodeSetup, context: Context, request: MessageContent) -> None:
        self.setup, self.context, self.request = setup, context, request
        self.node = setup.data(context)
        self.client = self.node.client

    @cached_property
    def started(self) -> PersonalContext:
        """The node's engine, its task and its data, as a personalisation method takes them."""
        seed, classes = self.request.value("model", int), self.request.values.get("classes", 0)
        return self.setup.start(self.context, seed, classes if isinstance(classes, int) else 0)

    @property
    def task(self) -> Task:
        """The task of the run."""
        return self.started.task

    @property
    def engine(self) -> Engine:
        """The engine on the node's data."""
        return self.started.engine

    @property
    def seed(self) -> int:
        """The seed of the run."""
        return int(self.request.value("seed", int))

    @property
    def params(self) -> Tensor:
        """The model as the server sent it, (D,) and perhaps carried values (C,), on the engine's device."""
        return self.vector("params")

    def vector(self, name: str) -> Tensor:
        """A vector of the request that is shaped like the model as engines take it, on the engine's device."""
        task = self.task
        return self.request.tensor(name, task.layout.dtype, (task.width,)).to(engine_traits(self.engine).device)

    def part(self, name: str) -> Any:
        """A part of the algorithm, made of what the request says."""
        packed = self.request.values.get(name)
        tensors = {}
        for key, (dtype, shape) in list_part_tensors(packed).items():
            if dtype not in FLOATS:
                raise BadMessage(f"its {key!r} is of a type that parts do not hold")
            tensors[key] = self.request.tensor(key, FLOATS[dtype], shape).to(engine_traits(self.engine).device)
        return unpack_part(packed, tensors, self.setup.allow)

    @property
    def solver(self) -> LocalSolver:
        """The round's local solver."""
        solver: LocalSolver = self.part("solver")
        if not is_part(solver, "local_steps"):
            raise PartNotSent(f"{type(solver).__name__} is no local solver.")
        return solver

    @property
    def cohort(self) -> Cohort:
        """The client alone, in the round that the request is about."""
        given = self.request.values.get("effort")
        effort = torch.tensor([int(given)]) if given is not None else None
        one = torch.ones(1, dtype=torch.float64)
        return Cohort(self.request.round, self.seed, torch.zeros(1, dtype=torch.int64), one, one.clone(), effort)

    @property
    def rows(self) -> KeptRows:
        """What the client keeps between rounds of this run."""
        return KeptRows(self.context.state, self.request.value("run", str), self.client, self.setup.folder)

    def score(self, model: Tensor) -> dict[str, Tensor]:
        """Mean loss, mean error and the metrics asked for, (2 + M,), of a model (1, D) on each split that the client has."""
        alone, splits = torch.zeros(1, dtype=torch.int64), self.started.data.splits
        scores = {s: torch.cat(self.engine.evaluate_own(model, splits[s], alone)).double() for s in self.node.sizes}
        metrics, measure = (
            self.setup.metrics.named(self.request.values.get("metrics") or ()),
            engine_traits(self.engine).measure,
        )
        if len(metrics) and measure is not None:
            found = {s: measure(model, splits[s], metrics, alone)[:, 0] for s in scores}
            scores = {s: torch.cat([pair, found[s]]) for s, pair in scores.items()}
        return scores

    def refuse_unless_training(self) -> None:
        """A node without training examples takes no part in rounds."""
        if not self.node.trains:
            raise InvalidData(f"{self.client} has no examples to train on.")

    def refuse_single(self) -> None:
        """A node may be set to show nobody what is its alone."""
        if self.setup.only_sums:
            raise EquipoiseError("This node takes part in secure sums only.")


Handler = Callable[[NodeSession], Answer]
