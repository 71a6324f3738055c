"""One request on a node, and the node's means to answer it: its own data, and an ordinary engine on them."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

import torch
from flwr.app import Context
from torch import Tensor, nn

from equipoise.client_metrics import ClientMetrics
from equipoise.core.abilities import engine_traits, is_part
from equipoise.core.fingerprints import tensors_fingerprint
from equipoise.core.per_example_losses import PerExample
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.engines.flower.apps.model_source import ModelSource, make_model
from equipoise.engines.flower.apps.node_data import NodeData, read_node_data
from equipoise.engines.flower.apps.node_ledger import NodeLedger
from equipoise.engines.flower.apps.node_policy import NodePolicy, PolicyRefusal, read_policy
from equipoise.engines.flower.personal.kept_rows import OF_SOLVER, KeptRows
from equipoise.engines.flower.secure.identities import Identity
from equipoise.engines.flower.transport.messages import FLOATS, BadMessage, MessageContent
from equipoise.engines.flower.transport.part_messages import PartNotSent, list_part_tensors, unpack_part
from equipoise.errors import InvalidData, is_number
from equipoise.personal.context import PersonalContext
from equipoise.runs.setup import EngineChoice
from equipoise.types import Cohort, Engine, LocalSolver

MARK = 12  # hexadecimal digits of the data's keyed hash in an answer
Answer = tuple[dict[str, Any], dict[str, Tensor]]  # plain values and tensors


@dataclass(eq=False)
class NodeSetup:
    """What a node's owner has set, and what was made of it in this process."""

    model: ModelSource
    load_data: Callable[[Context], Any]
    loss: PerExample | None
    error: PerExample | None
    engine: EngineChoice
    policy: NodePolicy  # what the node refuses whatever the server asks
    folder: Path | None  # where the client's own model is kept
    owned: bool = False  # the owner has named app and policy on the command line of the node
    owners_file: Path | None = None  # of the policy that counts besides the app's, and is read anew for each request
    app_policy: NodePolicy | None = None  # that of the app alone, where there is such a file
    metrics: ClientMetrics = field(default_factory=ClientMetrics)
    loaded: dict[int, NodeData] = field(default_factory=dict)  # by Flower's node id
    ledgers: dict[str, NodeLedger] = field(default_factory=dict)  # by client
    models: dict[int, nn.Module] = field(default_factory=dict)  # by seed
    started: dict[tuple[int, int, int], PersonalContext] = field(default_factory=dict)  # by node id, seed and classes

    def read_policy_anew(self) -> None:
        """What the owner's file says now. One that cannot be read raises ConfigError: then nothing is answered."""
        if self.owners_file is not None and self.app_policy is not None:
            self.policy = self.app_policy.stricter(read_policy(self.owners_file))

    def data(self, context: Context) -> NodeData:
        """The node's examples, loaded once in a process."""
        if context.node_id not in self.loaded:
            if self.owned:  # what the server writes into the run's configuration must not steer how data are read
                context = Context(context.run_id, context.node_id, context.node_config, context.state, {})
            self.loaded[context.node_id] = read_node_data(self.load_data(context), context)
        return self.loaded[context.node_id]

    def forget(self) -> None:
        """Load the data anew when they are needed."""
        self.loaded.clear()
        self.started.clear()

    def start(self, context: Context, seed: int, classes: int) -> PersonalContext:
        """The engine of a run, its task and its data; these have as many classes as all nodes' together."""
        key = (context.node_id, seed, classes)
        if key not in self.started:
            data = self.data(context).data
            data = replace(data, classes=max(classes, data.classes)) if classes else data
            if seed not in self.models:
                self.models[seed] = make_model(self.model, seed)
            task = try_task(Task.of(self.models[seed], self.loss, self.error), data)
            engine = self.engine.start(task, data)
            self.started[key] = PersonalContext(engine, task, data, lambda other: self.engine.start(other, data))
        return self.started[key]


class NodeSession:
    """One request on a node: what it says, and the node's means to answer it."""

    def __init__(self, setup: NodeSetup, context: Context, request: MessageContent) -> None:
        self.setup, self.context, self.given = setup, context, request
        self.node = setup.data(context)
        self.client = self.node.client
        self.request = read_common(request, self.client)
        self._own_scores: dict[str, Tensor] | None = None

    @cached_property
    def identity(self) -> Identity | None:
        """The key by which other nodes know this one, where its owner has made one; then it takes part in signed sums alone."""
        return self.policy.read_identity()

    @property
    def ledger(self) -> NodeLedger:
        """What this client has revealed, over all runs."""
        ledgers = self.setup.ledgers
        if self.client not in ledgers:
            ledgers[self.client] = NodeLedger(self.setup.folder, self.client)
        return ledgers[self.client]

    @property
    def data_mark(self) -> str:
        """The beginning of the keyed hash of the data, which every answer names: the server sees when they change."""
        return self.ledger.fingerprint(self.node.data.fingerprint)[:MARK]

    @property
    def policy(self) -> NodePolicy:
        """What the node's owner demands."""
        return self.setup.policy

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
        self.policy.check_part(packed)
        tensors = {}
        for key, (dtype, shape) in list_part_tensors(packed).items():
            if dtype not in FLOATS:
                raise BadMessage(f"its {key!r} is of a type that parts do not hold")
            tensors[key] = self.request.tensor(key, FLOATS[dtype], shape).to(engine_traits(self.engine).device)
        return unpack_part(packed, tensors, self.policy.allow)

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
        one, prox = torch.ones(1, dtype=torch.float64), self.request.values.get("prox")
        if prox is not None and not (is_number(prox) and 0 <= prox < math.inf):
            raise BadMessage("its 'prox' is no strength of a pull")
        strength = None if prox is None else torch.tensor([float(prox)], dtype=torch.float64)
        alone = torch.zeros(1, dtype=torch.int64)
        return Cohort(self.request.round, self.seed, alone, one, one.clone()).having(effort=effort, prox=strength)

    @property
    def rows(self) -> KeptRows:
        """What the client keeps between rounds of this run."""
        return KeptRows(self.context.state, self.request.value("run", str), self.client, self.setup.folder)

    @property
    def solver_rows(self) -> KeptRows:
        """What the client keeps for its solver between rounds of this run."""
        return KeptRows(self.context.state, self.request.value("run", str), self.client, self.setup.folder, OF_SOLVER)

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

    @cached_property
    def shared_scores(self) -> dict[str, Tensor]:
        """Mean loss and error (2,) of the model that the server sent, by split."""
        return self.score(self.params.unsqueeze(0))

    def own_scores(self, compute: Callable[[NodeSession], dict[str, Tensor]]) -> dict[str, Tensor]:
        """Mean loss and error (2,) of the client's own model, by split, computed once for all sums of a message."""
        if self._own_scores is None:
            self._own_scores = compute(self)
        return self._own_scores

    def check_weights(self, asked: Mapping[str, Any], split: str) -> None:
        """Refuse a signed sum in which too few clients count: all weights are in the request, for all to see."""
        each = self.given.values.get("each")
        if self.identity is None:
            return
        if not isinstance(each, dict) or self.client not in each:
            raise BadMessage("a request of a signed sum must hold what each client is asked")
        sums = [own.get("sum", asked) if isinstance(own, dict) else None for own in each.values()]
        counted = sum(isinstance(one, dict) and _counts(one, split) for one in sums)
        if counted < self.policy.minimum_crowd:
            raise PolicyRefusal(f"The clients with a weight are {counted}, and the policy demands {self.policy.minimum_crowd}.")

    def refuse_unless_training(self) -> None:
        """A node without training examples takes no part in rounds."""
        if not self.node.trains:
            raise InvalidData(f"{self.client} has no examples to train on.")

    def begin_evaluation(self, kind: str) -> None:
        """Refuse an evaluation that the owner does not allow, and count another: of the "shared" model, or of its "own"."""
        self.policy.check_single()
        self.policy.check_evaluation()
        model = tensors_fingerprint([(f"after round {self.request.round}", self.params.cpu())])
        self.ledger.begin_evaluation(self.request.value("run", str), kind, model, self.policy.evaluations)

    def refuse_single(self) -> None:
        """A node may be set to show nobody what is its alone."""
        self.policy.check_single()
        self.policy.check_round(self.request.round)

    def note_single(self, what: str) -> None:
        """Write into the node's own ledger, before the answer leaves, that something of this client alone is in it."""
        self.ledger.note_single(self.request.value("run", str), self.request.round, f"single {what}")


def read_common(request: MessageContent, client: str) -> MessageContent:
    """A request as this client is to read it: in a signed sum its own part of "each" counts as if it were sent alone."""
    each = request.values.get("each")
    own = each.get(client) if isinstance(each, dict) else None
    return replace(request, values={**request.values, **own}) if isinstance(own, dict) else request


def _counts(asked: Mapping[str, Any], split: str) -> bool:
    """Whether what a client is asked for gives it a weight in the sum; `split` is that of an evaluation."""
    shares = asked.get("shares", {split: 1.0})
    share: Any = shares.get(split) if isinstance(shares, dict) else None
    return all(is_number(weight) and weight > 0 for weight in (asked.get("base", 1.0), share))


Handler = Callable[[NodeSession], Answer]
