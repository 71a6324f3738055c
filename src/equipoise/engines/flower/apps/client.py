"""A node: its own data, the ordinary engine on them, and answers to the server's requests. One node is one client."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from equipoise.core.task import PerExample, Task
from equipoise.data.clients import FederatedData
from equipoise.engines.flower.apps.node_data import NodeData, node_data
from equipoise.engines.flower.personal.kept_rows import KeptRows
from equipoise.engines.flower.transport.messages import BadMessage, Parcel, read, short, written
from equipoise.engines.flower.transport.nodes import frozen_digest, layout_digest, make_model, require_flower
from equipoise.engines.flower.transport.part_messages import NotSent, tensors_of, unpacked
from equipoise.errors import EquipoiseError, InvalidData, require
from equipoise.personal.context import PersonalContext
from equipoise.train import EngineChoice, choose_engine
from equipoise.types import Cohort, Engine, LocalSolver

if TYPE_CHECKING:
    from flwr.app import Context, Message
    from flwr.clientapp import ClientApp

Answer = tuple[dict[str, Any], dict[str, Tensor]]  # plain values and tensors
Model = nn.Module | Callable[..., nn.Module]


def client_app(
    *,
    model: Model,
    load_data: Callable[[Context], Any],
    loss: PerExample | None = None,
    error: PerExample | None = None,
    engine: EngineChoice | str = "loop",
    only_sums: bool = False,
    allow: Sequence[str] = (),
    keep: str | Path | None = None,
) -> ClientApp:
    """The Flower ClientApp of a node that takes part with its own data. One node is one client.

    `model` is a torch module, its class, or a function of nothing (or of the seed) that makes one; the server's is the same.
    `loss` and `error` are as for `equipoise.train`, and the same as the server's.

    `load_data(context)` gets Flower's Context (`context.node_config`, `context.run_config`, `context.node_id`) and gives the
    node's examples, which never leave it. It may return

    - a dictionary of splits, `{"train": (x, y), "validation": (x, y), "test": (x, y)}`, of which "train" or "test" must be
      there, and `"id"`, the client's name, may be. A node without "train" is only evaluated on.
    - two pairs `(x, y), (x, y)`, to train and to test on; or one pair `x, y` to train on; a torch Dataset may stand for a pair
    - an equipoise FederatedData or ClientSet with exactly one client, whose id is the client's name.

    A client keeps its name for good: batches and the client's own model go by it. Unless the data bring one it is "client-id"
    of the node's configuration (`flower-supernode --node-config 'client-id="hospital-3"'`), else its "partition-id", else
    Flower's node id, which is stable for nodes that authenticate.

    `engine` does the local work: "loop", "simulator", or one with options such as engines.Simulator(device="cuda").

    What the node's owner decides, whatever the server asks: with `only_sums` the node answers only to secure sums, and gives
    no one its single loss, score or update. `allow` names packages, installed here, from which the server may name classes of
    its own parts; the catalogue of Equipoise is always allowed. `keep` is a folder of this node in which the client's own model
    (Ditto and its kin) outlives the Flower run; without it the model lives in Flower's state of the run alone.
    """
    require_flower()
    from flwr.clientapp import ClientApp

    from equipoise.engines.flower.secure import secure_node

    require(callable(load_data), "load_data", "must be a function of Flower's Context that gives the data", load_data)
    good = not isinstance(allow, str) and all(isinstance(name, str) for name in allow)
    require(good, "allow", "must be a list of package names", allow, 'E.g. allow=["my_parts"].')
    place = Place(model, load_data, loss, error, choose_engine(engine), only_sums, tuple(allow), Path(keep) if keep else None)
    app = ClientApp()
    for name, handle in {**PLAIN, **secure_node.HANDLERS}.items():
        category, _, action = name.partition(".")
        getattr(app, category)(action)(_answering(place, handle))
    return app


@dataclass(eq=False)
class Place:
    """What a node's owner has set, and what was made of it in this process."""

    model: Model
    load_data: Callable[[Context], Any]
    loss: PerExample | None
    error: PerExample | None
    engine: EngineChoice
    only_sums: bool
    allow: tuple[str, ...]
    keep: Path | None
    loaded: dict[int, NodeData] = field(default_factory=dict)  # by Flower's node id
    models: dict[int, nn.Module] = field(default_factory=dict)  # by seed
    started: dict[tuple[int, int, int], tuple[Task, FederatedData, Engine]] = field(default_factory=dict)

    def data(self, context: Context) -> NodeData:
        """The node's examples, loaded once in a process."""
        if context.node_id not in self.loaded:
            self.loaded[context.node_id] = node_data(self.load_data(context), context)
        return self.loaded[context.node_id]

    def start(self, context: Context, seed: int, classes: int) -> tuple[Task, FederatedData, Engine]:
        """Task, data and engine of a run; the data have as many classes as all nodes' together."""
        key = (context.node_id, seed, classes)
        if key not in self.started:
            data = self.data(context).data
            data = replace(data, classes=max(classes, data.classes)) if classes else data
            if seed not in self.models:
                self.models[seed] = make_model(self.model, seed)
            task = Task.of(self.models[seed], self.loss, self.error).fitted(data)
            self.started[key] = task, data, self.engine.start(task, data)
        return self.started[key]


Handler = Callable[["Session"], Answer]


def _answering(place: Place, handle: Handler) -> Callable[[Message, Context], Message]:
    """A handler as Flower calls it: a refusal is an answer, with its reason; other errors are Flower's to report."""

    def answer(message: Message, context: Context) -> Message:
        from flwr.app import Message

        parcel = Parcel(-1, "")
        try:
            parcel = read(message.content)
            values, tensors = handle(Session(place, context, parcel))
        except EquipoiseError as failure:
            values, tensors = {"refused": short(failure)}, {}
        return Message(written(parcel.round, parcel.token, values, tensors), reply_to=message)

    return answer


class Session:
    """One request on a node: what it says, and the node's means to answer it."""

    def __init__(self, place: Place, context: Context, parcel: Parcel) -> None:
        self.place, self.context, self.parcel = place, context, parcel
        self.node = place.data(context)
        self.client = self.node.client
        self._means: tuple[Task, FederatedData, Engine] | None = None

    @property
    def seed(self) -> int:
        seed: int = self.parcel.value("seed", int)
        return seed

    def _start(self) -> tuple[Task, FederatedData, Engine]:
        if self._means is None:
            classes = self.parcel.values.get("classes", 0)
            seed = self.parcel.value("model", int)
            self._means = self.place.start(self.context, seed, classes if isinstance(classes, int) else 0)
        return self._means

    @property
    def task(self) -> Task:
        return self._start()[0]

    @property
    def data(self) -> FederatedData:
        return self._start()[1]

    @property
    def engine(self) -> Engine:
        return self._start()[2]

    @property
    def params(self) -> Tensor:
        """The model (D,) as the server sent it, on the engine's device."""
        return self.vector("params")

    def vector(self, name: str) -> Tensor:
        """A vector like the model, (D,)."""
        found = self.parcel.tensor(name, self.task.layout.dtype, (self.task.layout.dimension,))
        return found.to(getattr(self.engine, "device", "cpu"))

    def part(self, name: str) -> Any:
        """A part of the algorithm, made of what the request says."""
        packed = self.parcel.values.get(name)
        dtypes = {str(d).removeprefix("torch."): d for d in (torch.float32, torch.float64, torch.float16, torch.bfloat16)}
        tensors = {}
        for key, (dtype, shape) in tensors_of(packed).items():
            if dtype not in dtypes:
                raise BadMessage(f"its {key!r} is of a type that parts do not hold")
            tensors[key] = self.parcel.tensor(key, dtypes[dtype], shape).to(getattr(self.engine, "device", "cpu"))
        return unpacked(packed, tensors, self.place.allow)

    @property
    def solver(self) -> LocalSolver:
        """The round's local solver."""
        found = self.part("solver")
        if not hasattr(found, "local_steps"):
            raise NotSent(f"{type(found).__name__} is no local solver.")
        solver: LocalSolver = found
        return solver

    def cohort(self, round_index: int | None = None) -> Cohort:
        """The client alone, in the round that the request is about."""
        effort = self.parcel.values.get("effort")
        one = torch.ones(1, dtype=torch.float64)
        index = self.parcel.round if round_index is None else round_index
        return Cohort(
            index, self.seed, torch.zeros(1, dtype=torch.int64), one, one.clone(),
            torch.tensor([int(effort)]) if effort is not None else None,
        )  # fmt: skip

    @property
    def rows(self) -> KeptRows:
        """What the client keeps between rounds of this run."""
        run = self.parcel.value("run", str)
        return KeptRows(self.context.state, run, self.client, self.place.keep)

    def personal_context(self) -> PersonalContext:
        """What a personalisation method may use: the node's engine on the node's data."""
        task, data, engine = self._start()
        return PersonalContext(engine, task, data, lambda other: self.place.engine.start(other, data))

    def refuse_unless_training(self) -> None:
        """A node without training examples takes no part in rounds."""
        if not self.node.trains:
            raise InvalidData(f"{self.client} has no examples to train on.")

    def refuse_single(self) -> None:
        """A node may be set to show nobody what is its alone."""
        if self.place.only_sums:
            raise NotSent("This node takes part in secure sums only.")


# ------------------------------------------------------------------------------------------------------------ plain requests


def hello(session: Session) -> Answer:
    """Who the client is: its name, how many examples of which shape, and what must agree with the server's model."""
    node, task = session.node, session.task
    first = node.data.train
    values = {
        "client": session.client,
        "splits": node.sizes,
        "x": {"shape": list(first.x.shape[1:]), "dtype": str(first.x.dtype).removeprefix("torch.")},
        "y": {"shape": list(first.y.shape[1:]), "dtype": str(first.y.dtype).removeprefix("torch.")},
        "scale": first.scale,
        "shift": first.shift,
        "classes": node.data.classes,
        "layout": layout_digest(task),
        "frozen": frozen_digest(task),
        "fingerprint": node.data.fingerprint,
        "only_sums": session.place.only_sums,
    }
    return values, {}


def losses(session: Session) -> Answer:
    """The loss of the client's training examples at the model it was sent."""
    session.refuse_single()
    session.refuse_unless_training()
    solver = session.solver if session.parcel.values.get("solver") is not None else None
    return {}, {"loss": session.engine.losses(session.params, session.cohort(), solver).double()}


def update(session: Session) -> Answer:
    """Local work from the model it was sent: the update (D,), and the mean loss of its batches."""
    session.refuse_single()
    session.refuse_unless_training()
    work = session.engine.updates(session.params, session.cohort(), session.solver)
    return {}, {"update": work.update[0], "loss": work.losses.double()}


def scores(session: Session) -> Answer:
    """Mean loss and error of the model it was sent, on each of the client's splits."""
    session.refuse_single()
    return {}, scored(session, session.params.unsqueeze(0))


def scored(session: Session, model: Tensor) -> dict[str, Tensor]:
    """Mean loss and error (2,) of a model (1, D) on each split that the client has."""
    found = {}
    for split in session.node.sizes:
        both = session.engine.evaluate_own(model, session.data.splits[split], torch.zeros(1, dtype=torch.int64))
        found[split] = torch.cat(both).double()
    return found


# ---------------------------------------------------------------------------------------------------- the client's own model


def _row(session: Session, method: Any, params: Tensor) -> Tensor:
    """What the client has kept since the round that the request names, (1, width); at first what all clients begin with."""
    since = session.parcel.value("since", int)
    width = method.width(session.task.layout.dimension)
    if width == 0 or since == 0:
        first = session.vector("first") if "first" in session.parcel.arrays else params
        row, shared = method.begin(session.personal_context(), first)
        if shared is not None:
            raise NotSent(f"{type(method).__name__} needs what all clients' models add up to, which no node has.")
        first_row: Tensor = row.to(params).unsqueeze(0)
        return first_row
    found = session.rows.read(since, width)
    if found is None:
        raise LostRow(f"{session.client} has lost its own model of round {since - 1}")
    return found.to(params).unsqueeze(0)


class LostRow(EquipoiseError):
    """A node that was started anew has no model of its own any more."""


def own_work(session: Session) -> Answer:
    """A round's work on the client's own model, which stays here; with `send`, what the method sends for the shared one."""
    session.refuse_unless_training()
    method, solver, params = session.part("personal"), session.solver, session.params
    try:
        row = _row(session, method, params)
    except LostRow as failure:
        return {"lost": short(failure)}, {}
    cohort = session.cohort()
    if not session.parcel.values.get("send"):
        after, _ = method.work(session.personal_context(), params, cohort, row, solver, None)
        session.rows.write(session.parcel.value("since", int), cohort.round + 1, after[0])
        return {}, {}
    session.refuse_single()
    sent = method.updates(session.personal_context(), params, cohort, row, solver)
    return {}, {"update": sent[0]}


def own_scores(session: Session) -> Answer:
    """Mean loss and error of the client's own model, on each of its splits. The model itself stays here."""
    session.refuse_single()
    try:
        return {}, own_scored(session)
    except LostRow as failure:
        return {"lost": short(failure)}, {}


def own_scored(session: Session) -> dict[str, Tensor]:
    """Mean loss and error (2,) of the client's own model on each split that it has."""
    session.refuse_unless_training()
    method, solver, params = session.part("personal"), session.solver, session.params
    row = _row(session, method, params)
    with torch.enable_grad():
        model = method.models(session.personal_context(), params, session.cohort(), row, solver, None)
    if session.parcel.value("since", int) == 0 and method.width(session.task.layout.dimension) > 0:
        model = params.unsqueeze(0)  # a client that never took part is served the shared model
    return scored(session, model)


PLAIN: dict[str, Handler] = {
    "query.hello": hello,
    "train.losses": losses,
    "train.update": update,
    "train.own": own_work,
    "evaluate.scores": scores,
    "evaluate.own": own_scores,
}
