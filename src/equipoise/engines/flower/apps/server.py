"""The server: wait for the nodes, learn who they are, and run the ordinary loop over rounds on them."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.core.files import write_atomically
from equipoise.core.task import PerExample, Task
from equipoise.data.clients import FederatedData
from equipoise.engines.flower.apps import run_record as record
from equipoise.engines.flower.engine import Federation, Patience, introduced
from equipoise.engines.flower.transport.messages import BadMessage
from equipoise.engines.flower.transport.nodes import Member, TooFewClients, Wire, make_model, natural, require_flower, stand_in
from equipoise.errors import ConfigError, IncompatibleParts, InvalidData, InvalidParameter, is_number, is_whole, require
from equipoise.result import Result
from equipoise.runs.checkpoint import Checkpoints
from equipoise.train import train
from equipoise.types import Observer, RoundReport

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp

log = logging.getLogger("flwr")  # Flower shows it to whoever watches the run
Model = nn.Module | Callable[..., nn.Module]
ROSTER = "federation.json"


def server_app(
    algorithm: Algorithm,
    *,
    model: Model,
    rounds: int,
    clients_per_round: int | None = None,
    clients: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    loss: PerExample | None = None,
    error: PerExample | None = None,
    evaluate_every: int | None = None,
    timeout: float = 600.0,
    minimum: int = 1,
    retries: int = 2,
    pause: float = 10.0,
    patience: float = 600.0,
    data: str = "federation",
    name: str | None = None,
    observers: Sequence[Observer] = (),
    on_result: Callable[[Result], None] | None = None,
) -> ServerApp:
    """The Flower ServerApp that trains `model` over the nodes by an Algorithm, as `equipoise.train` does in a simulation.

    The same algorithm, model, seed and data give the model of a simulation. `model` is a torch module, its class, or a function
    of nothing (or of the seed) that makes one, made under `seed`; `loss` and `error` are as for `equipoise.train`; all three
    are the same on the nodes. Clients count in the natural order of their names ("2" before "10").

    The run begins when `clients` nodes have said who they are (None: as many as `clients_per_round`), and gives up after
    `patience` seconds. Each round draws `clients_per_round` of them. An answer that does not come within `timeout` seconds,
    or is not what was asked for (not finite, of a wrong shape, of another round, garbage), is left out: the others share its
    weight, and the round's report names the client and the fault (`report.missing`). If fewer than `minimum` clients of a
    cohort have done their part, the round is tried again after `pause` seconds with a cohort drawn anew, up to `retries`
    times; then the run stops with TooFewClients, and its folder can be resumed.

    `folder` is the run's folder (config.toml, rounds.jsonl, checkpoint/, clients.parquet, model.safetensors, report.html as in
    a simulation, and federation.json, who took part). A relative path is seen from where Flower starts the app. If it holds a
    run that has not ended, that run goes on from its checkpoint, which is written after every round: nodes say again who they
    are, and must have the data they had. Without a folder nothing is written; `on_result(result)` is called at the end either
    way. `data` is what reports call the data, `name` what they call the run (None: its folder), `evaluate_every` and
    `observers` are as for `equipoise.train`.

    What a number or a text in Flower's run configuration names ("rounds", "clients-per-round", "clients", "seed", "folder",
    "evaluate-every", "timeout", "minimum", "retries", "pause", "patience", "data", "name") is taken from there:
    `flwr run . --run-config 'rounds=5 folder="runs/a"'`.
    """
    require_flower()
    from flwr.serverapp import ServerApp

    plan = Plan(
        algorithm, model, rounds, clients_per_round, clients, seed, str(folder) if folder is not None else None, loss, error,
        evaluate_every, timeout, minimum, retries, pause, patience, data, name, tuple(observers), on_result,
    )  # fmt: skip
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        run_plan(plan.configured(context.run_config), grid)

    return app


@dataclass(frozen=True, eq=False)
class Plan:
    """What `server_app` was given, checked."""

    algorithm: Algorithm
    model: Model
    rounds: int
    clients_per_round: int | None
    clients: int | None
    seed: int
    folder: str | None
    loss: PerExample | None
    error: PerExample | None
    evaluate_every: int | None
    timeout: float
    minimum: int
    retries: int
    pause: float
    patience: float
    data: str
    name: str | None
    observers: tuple[Observer, ...]
    on_result: Callable[[Result], None] | None

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            raise InvalidParameter("algorithm", "must be an equipoise.Algorithm", self.algorithm, "Write Algorithm(risk=…).")
        for key, least in (("rounds", 0), ("seed", 0), ("minimum", 1), ("retries", 0)):
            value = getattr(self, key)
            require(is_whole(value) and value >= least, key, f"must be a whole number ≥ {least}", value)
        for key in ("clients_per_round", "clients", "evaluate_every"):
            value = getattr(self, key)
            require(value is None or (is_whole(value) and value >= 1), key, "must be a whole number ≥ 1, or None", value)
        for key in ("timeout", "patience"):
            require(is_number(getattr(self, key)) and getattr(self, key) > 0, key, "must be seconds > 0", getattr(self, key))
        require(is_number(self.pause) and self.pause >= 0, "pause", "must be seconds ≥ 0", self.pause)
        enough = self.clients_per_round is None or self.minimum <= self.clients_per_round
        require(enough, "minimum", f"must not exceed clients_per_round ({self.clients_per_round})", self.minimum)
        given = self.clients is not None or self.clients_per_round is not None
        require(given, "clients", "or clients_per_round must be given", None, "Say how many nodes the run waits for.")

    def configured(self, config: Mapping[str, Any]) -> Plan:
        """The plan with what Flower's run configuration says otherwise."""
        whole = ("rounds", "clients_per_round", "clients", "seed", "evaluate_every", "minimum", "retries")
        numbers, texts = ("timeout", "pause", "patience"), ("folder", "data", "name")
        changed: dict[str, Any] = {}
        for key in (*whole, *numbers, *texts):
            value = config.get(key.replace("_", "-"))
            if value is None or value == "":
                continue
            good = is_whole(value) if key in whole else is_number(value) if key in numbers else isinstance(value, str)
            kind = "a whole number" if key in whole else "a number" if key in numbers else "text"
            require(good, key.replace("_", "-"), f"of the run configuration must be {kind}", value)
            changed[key] = value
        return replace(self, **changed) if changed else self

    @property
    def awaited(self) -> int:
        """How many nodes the run waits for."""
        return max(self.clients or 0, self.clients_per_round or 0)


def run_plan(plan: Plan, grid: Grid) -> Result:
    """The whole run: nodes, rounds, files."""
    from equipoise.experiment.folder import RunFolder, claim

    place, known, run = None, None, secrets.token_hex(8)
    if plan.folder is not None:
        place = RunFolder(Path(plan.folder))
        if place.config.exists():
            if place.finished:
                raise ConfigError(f"The run in {place.path} has ended. Name another folder.")
            known, run = read_roster(place.path / ROSTER)
        else:
            place = claim(place.path)
    model = make_model(plan.model, plan.seed)
    task = Task.of(model, plan.loss, plan.error)
    wire = Wire(grid, timeout=float(plan.timeout))
    members = gather(wire, task, plan, known)
    refuse_secretive(members, plan.algorithm)
    federation = Federation(
        wire, members, Patience(float(plan.timeout), plan.minimum, plan.retries, float(plan.pause)), run, plan.seed
    )
    experiment = Experiment(plan, model, stand_in(members.values(), plan.data), federation)
    if place is None:
        result = experiment.train()
    else:
        if known is None:
            write_atomically(place.path / ROSTER, roster_text(members, run).encode())
        from equipoise.experiment import folder

        result = folder.run(cast(Any, experiment), place, progress=False)
    if plan.on_result is not None:
        plan.on_result(result)
    return result


def gather(wire: Wire, task: Task, plan: Plan, known: Mapping[str, Member] | None) -> dict[str, Member]:
    """Wait for the nodes and ask who they are: the clients by name. A run that goes on waits for those it began with."""
    wanted = len(known) if known is not None else plan.awaited
    log.info("Waiting for %d nodes.", wanted)
    found: dict[str, Member] = {}
    asked: set[int] = set()
    end, pause = time.monotonic() + plan.patience, 0.05
    while len(found) < wanted:
        new = [node for node in wire.connected() if node not in asked]
        asked |= set(new)
        for node, member in introduced(wire, new, task, plan.seed).items():
            welcome(wire, found, known, node, member)
        if len(found) >= wanted or time.monotonic() >= end:
            break
        time.sleep(pause)
        pause = min(1.5 * pause, 3.0)
    strangers = {node: why for node, why in wire.faults.items() if node.startswith("node ")}
    for stranger, why in strangers.items():
        log.warning("%s takes no part: it %s.", stranger, why)
    enough = plan.minimum if known is not None else wanted
    if len(found) < enough:
        shown = "".join(f" {stranger} {why}." for stranger, why in list(strangers.items())[:5])
        raise TooFewClients(f"{len(found)} nodes came within {plan.patience:g} s, and {enough} are needed.{shown}")
    log.info("%d clients: %s.", len(found), ", ".join(sorted(found, key=natural)))
    return dict(known) if known is not None else found


def welcome(wire: Wire, found: dict[str, Member], known: Mapping[str, Member] | None, node: int, member: Member) -> None:
    """Note which node a client is at; refuse a second node with its name, and one with other data than before."""
    if known is not None:
        if member.client not in known:
            log.warning("Node %d is client %s, who was not there when the run began, and takes no part.", node, member.client)
            return
        try:
            known[member.client].refuse_change(member)
        except BadMessage as failure:
            raise InvalidData(f"{failure}: the run cannot go on. Give the node its data back, or begin a new run.") from failure
    if member.client in found:
        raise InvalidData(
            f"Two nodes have the client name {member.client!r}. Give each its own: --node-config 'client-id=\"…\"'."
        )
    found[member.client] = member
    wire.nodes[member.client] = node


def refuse_secretive(members: Mapping[str, Member], algorithm: Algorithm) -> None:
    """Refuse to begin a run in which some nodes would answer nothing."""
    from equipoise.engines.flower.secure.protections import by_sums_only

    silent = [client for client, member in members.items() if member.only_sums]
    if silent and not by_sums_only(algorithm):
        raise IncompatibleParts(
            f"{', '.join(silent[:5])} take part in secure sums only, and this algorithm asks for single updates.",
            "Add privacy=privacy.SecureAggregation() to the Algorithm.",
        )


# ------------------------------------------------------------------------------------------------------- the run as a folder


@dataclass(frozen=True, eq=False)
class Experiment:
    """A federated run as the writer of run folders sees any run."""

    plan: Plan
    model: nn.Module
    data: FederatedData
    federation: Federation

    @property
    def algorithm(self) -> Algorithm:
        return self.plan.algorithm

    @property
    def config(self) -> record.FederatedConfig:
        """What the folder's config.toml says."""
        plan = self.plan
        options = {f.name: getattr(plan, f.name) for f in fields(record.TrainRecord)}
        options["clients_per_round"] = plan.clients_per_round or len(self.data.train)
        kind = type(self.model)
        network = {key: getattr(plan, key) for key in ("timeout", "minimum", "retries", "pause")}
        about = {"data": plan.data, "clients": len(self.federation.members), "model": f"{kind.__module__}:{kind.__qualname__}"}
        return record.FederatedConfig(plan.algorithm, record.TrainRecord(**options), {**about, **network})

    def train(
        self,
        *,
        name: str = "run",
        observers: Sequence[Observer] = (),
        progress: bool | None = False,
        checkpoint: Path | None = None,
    ) -> Result:
        """Train on the federation, from the checkpoint if there is one."""
        plan = self.plan
        result = train(
            self.model,
            self.data,
            plan.algorithm,
            rounds=plan.rounds,
            clients_per_round=plan.clients_per_round,
            seed=plan.seed,
            loss=plan.loss,
            error=plan.error,
            engine=self.federation,
            evaluate_every=plan.evaluate_every,
            observers=[*observers, *plan.observers, LogRounds()],
            progress=progress,
            name=plan.name or name,
            checkpoint=Checkpoints(checkpoint, every=1) if checkpoint is not None else None,
        )
        return replace(result, personal=None)  # clients' own models are on their nodes


class LogRounds(Observer):
    """One line per round in Flower's log."""

    def on_round(self, report: RoundReport) -> None:
        text = f"Round {report.round}: loss {report.loss:.4f}, worst 10 % {report.tail_loss:.4f}, {report.trained} trained"
        text += f", {report.bytes_sent / 1e3:.1f} kB out, {report.bytes_received / 1e3:.1f} kB in"
        log.info(text)
        for client, why in report.missing.items():
            log.warning("Round %d goes on without %s, who %s.", report.round, client, why)


def roster_text(members: Mapping[str, Member], run: str) -> str:
    """Who takes part, as JSON: sizes and shapes, nothing of the examples."""
    ordered = sorted(members.values(), key=lambda m: natural(m.client))
    return json.dumps({"run": run, "clients": [asdict(member) for member in ordered]}, indent=1) + "\n"


def read_roster(path: Path) -> tuple[dict[str, Member], str]:
    """Who took part when the run began, and the run's name among the nodes."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        members = [Member(**entry) for entry in whole["clients"]]
        return {member.client: member for member in members}, str(whole["run"])
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise ConfigError(f"{path} does not say who took part in the run: {failure}. Begin a new run.") from failure
