"""A federated run on the server: wait for the nodes, learn who they are, and run the ordinary loop over rounds on them."""

from __future__ import annotations

import json
import logging
import secrets
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flwr.serverapp import Grid
from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.core.files import write_atomically
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines.flower.apps.members import Member, ask_introductions, make_stand_in, natural_order
from equipoise.engines.flower.apps.model_source import make_model
from equipoise.engines.flower.apps.run_secret import batch_seed, open_secret, public_seed
from equipoise.engines.flower.flower_engine import Federation, Patience
from equipoise.engines.flower.transport.messages import BadMessage
from equipoise.engines.flower.transport.messenger import Messenger, TooFewClients
from equipoise.errors import ConfigError, IncompatibleParts, InvalidData
from equipoise.experiment.config import TrainRecord
from equipoise.experiment.folder import claim
from equipoise.experiment.folder import run as run_in_folder
from equipoise.experiment.recorded import FEDERATION, RecordedConfig
from equipoise.experiment.run_files import RunFolder
from equipoise.models.adapters import WHY_NOT_BOTH, trains_lora_a
from equipoise.result import Result
from equipoise.runs.checkpoint import Checkpoints
from equipoise.train import train
from equipoise.types import Observer, RoundReport

if TYPE_CHECKING:
    from equipoise.engines.flower.apps.server import ServerPlan

log = logging.getLogger("flwr")  # Flower shows it to whoever watches the run
ROSTER = "federation.json"


def run_plan(plan: ServerPlan, grid: Grid) -> Result:
    """The whole run: nodes, rounds, files."""
    place, known, run = None, None, secrets.token_hex(8)
    if plan.folder is not None:
        place = RunFolder(Path(plan.folder))
        if place.config.exists():
            if place.finished:
                raise ConfigError(f"The run in {place.path} has ended. Name another folder.")
            known, run = read_roster(place.path / ROSTER)
        else:
            place = claim(place.path)
    private = plan.algorithm.privacy is not None
    model_seed = public_seed(plan.seed) if private else plan.seed
    model = make_model(plan.model, model_seed)
    refuse_both_trained(model, plan.algorithm)
    task = Task.of(model, plan.loss, plan.error)
    messenger = Messenger(grid, timeout=float(plan.timeout))
    if private:
        messenger.own_seed = partial(batch_seed, open_secret(place.path if place is not None else None))
    members = gather_members(messenger, task, plan, known, model_seed)
    refuse_silent(members, plan.algorithm, signed=plan.signed)
    refuse_unmeasured(members, plan.metrics)
    patience = Patience(float(plan.timeout), plan.minimum, plan.retries, float(plan.pause))
    federation = Federation(messenger, members, patience, run, model_seed, plan.signed, plan.colluders, plan.most_examples)
    federated = FederatedRun(plan, model, make_stand_in(members.values(), plan.data), federation)
    if place is None:
        result = federated.train()
    else:
        if known is None:
            write_atomically(place.path / ROSTER, write_roster(members, run).encode())
        result = cast(Result, run_in_folder(cast(Any, federated), place, progress=False))
    if plan.on_result is not None:
        plan.on_result(result)
    return result


def gather_members(
    messenger: Messenger, task: Task, plan: ServerPlan, known: Mapping[str, Member] | None, model_seed: int
) -> dict[str, Member]:
    """Wait for the nodes and ask who they are: the clients by name. A run that goes on waits for those it began with."""
    wanted = len(known) if known is not None else plan.awaited
    log.info("Waiting for %d nodes.", wanted)
    members: dict[str, Member] = {}
    asked: set[int] = set()
    end, pause = time.monotonic() + plan.patience, 0.05
    while len(members) < wanted:
        new = [node for node in messenger.connected() if node not in asked]
        asked |= set(new)
        for node, member in ask_introductions(messenger, new, task, model_seed, plan.most_examples).items():
            welcome(messenger, members, known, node, member)
        if len(members) >= wanted or time.monotonic() >= end:
            break
        time.sleep(pause)
        pause = min(1.5 * pause, 3.0)
    strangers = {node: why for node, why in messenger.faults.items() if node.startswith("node ")}
    for stranger, why in strangers.items():
        log.warning("%s takes no part: it %s.", stranger, why)
    enough = plan.minimum if known is not None else wanted
    if len(members) < enough:
        shown = "".join(f" {stranger} {why}." for stranger, why in list(strangers.items())[:5])
        raise TooFewClients(f"{len(members)} nodes came within {plan.patience:g} s, and {enough} are needed.{shown}")
    log.info("%d clients: %s.", len(members), ", ".join(sorted(members, key=natural_order)))
    return dict(known) if known is not None else members


def welcome(
    messenger: Messenger, members: dict[str, Member], known: Mapping[str, Member] | None, node: int, member: Member
) -> None:
    """Note which node a client is at; refuse a second node with its name, and one with other data than before."""
    if known is not None:
        if member.client not in known:
            log.warning("Node %d is client %s, who was not there when the run began, and takes no part.", node, member.client)
            return
        try:
            known[member.client].refuse_change(member)
        except BadMessage as failure:
            raise InvalidData(f"{failure}: the run cannot go on. Give the node its data back, or begin a new run.") from failure
    if member.client in members:
        raise InvalidData(
            f"Two nodes have the client name {member.client!r}. Give each its own: --node-config 'client-id=\"…\"'."
        )
    members[member.client] = member
    messenger.nodes[member.client] = node


def refuse_silent(members: Mapping[str, Member], algorithm: Algorithm, *, signed: bool) -> None:
    """Refuse to begin a run in which some nodes would answer nothing."""
    sums = algorithm.traits.privacy.sums_alone
    if signed and not sums:
        reason = "signed=True is for secure sums, and this algorithm asks for single updates."
        raise IncompatibleParts(reason, "Add privacy=privacy.SecureAggregation() to the Algorithm, or drop signed.")
    if sums and (others := [client for client, member in members.items() if bool(member.identity) != signed]):
        names = ", ".join(others[:5])
        if signed:
            fix = "Make keys (`equipoise flower key`), exchange them, and name them in the nodes' policies."
            raise IncompatibleParts(f"{names} have no key to sign sums with.", fix)
        raise IncompatibleParts(f"{names} take part in signed sums only.", "Add signed=True to server_app.")
    silent = [client for client, member in members.items() if member.only_sums]
    if silent and not algorithm.traits.privacy.sums_alone:
        raise IncompatibleParts(
            f"{', '.join(silent[:5])} take part in secure sums only, and this algorithm asks for single updates.",
            "Add privacy=privacy.SecureAggregation() to the Algorithm.",
        )


def refuse_both_trained(model: nn.Module, algorithm: Algorithm) -> None:
    """Refuse low-rank adapters that train both matrices under differential privacy: every node makes its model itself."""
    if algorithm.traits.privacy.clip is not None and trains_lora_a(model):
        raise IncompatibleParts(
            f"{type(model).__name__} trains A and B of its adapters, but under differential privacy {WHY_NOT_BOTH}.",
            "Make the model by models.freeze_lora_a(…) on the server and on every node.",
        )


def refuse_unmeasured(members: Mapping[str, Member], metrics: Mapping[str, Any] | None) -> None:
    """Refuse to begin a run with metrics that some node does not compute."""
    for name in metrics or ():
        if lacking := [client for client, member in members.items() if name not in member.metrics]:
            raise IncompatibleParts(
                f"{', '.join(lacking[:5])} cannot compute the metric {name!r}, which is computed where the examples are.",
                f"Give client_app(metrics={{{name!r}: …}}) on these nodes, too, or leave it out.",
            )


# ------------------------------------------------------------------------------------------------------- the run as a folder


@dataclass(frozen=True, eq=False)
class FederatedRun:
    """A federated run as the writer of run folders sees any run."""

    plan: ServerPlan
    model: nn.Module
    data: FederatedData
    federation: Federation

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the run."""
        return self.plan.algorithm

    @property
    def evaluated_clients(self) -> int:
        """The number of rows in the table of clients."""
        return sum(len(clients) for clients in self.data.splits.values())

    @property
    def config(self) -> RecordedConfig:
        """What the folder's config.toml says."""
        plan = self.plan
        options = {f.name: getattr(plan, f.name) for f in fields(TrainRecord)}
        options["clients_per_round"] = plan.clients_per_round or len(self.data.train)
        kind = type(self.model)
        network = {key: getattr(plan, key) for key in ("timeout", "minimum", "retries", "pause")}
        about = {"data": plan.data, "clients": len(self.federation.members), "model": f"{kind.__module__}:{kind.__qualname__}"}
        libraries = ("equipoise", "torch", "numpy", "flwr")
        return RecordedConfig(plan.algorithm, TrainRecord(**options), {FEDERATION: {**about, **network}}, libraries)

    def train(
        self,
        *,
        name: str = "run",
        observers: Sequence[Observer] = (),
        progress: bool | None = False,
        checkpoint: Path | None = None,
        ledger: Path | None = None,
    ) -> Result:
        """Train on the federation, from the checkpoint if there is one."""
        plan = self.plan
        result = train(
            self.model, self.data, plan.algorithm, rounds=plan.rounds, clients_per_round=plan.clients_per_round, seed=plan.seed,
            loss=plan.loss, error=plan.error, engine=self.federation, evaluate_every=plan.evaluate_every, metrics=plan.metrics,
            stop=plan.stop, progress=progress, name=plan.name or name, observers=[*observers, *plan.observers, LogRounds()],
            checkpoint=Checkpoints(checkpoint, every=1) if checkpoint is not None else None,
            ledger=ledger,
        )  # fmt: skip
        return replace(result, personal=None)  # clients' own models are on their nodes


class LogRounds(Observer):
    """One line per round in Flower's log."""

    def on_round(self, report: RoundReport) -> None:
        """Log the round, and a warning for each client that it went on without."""
        text = f"Round {report.round}: loss {report.loss:.4f}, worst 10 % {report.tail_loss:.4f}, {report.trained} trained"
        text += f", {report.bytes_sent / 1e3:.1f} kB out, {report.bytes_received / 1e3:.1f} kB in"
        log.info(text)
        for client, why in report.missing.items():
            log.warning("Round %d goes on without %s, who %s.", report.round, client, why)


def write_roster(members: Mapping[str, Member], run: str) -> str:
    """Who takes part, as JSON: sizes and shapes, nothing of the examples."""
    ordered = sorted(members.values(), key=lambda m: natural_order(m.client))
    return json.dumps({"run": run, "clients": [asdict(member) for member in ordered]}, indent=1) + "\n"


def read_roster(path: Path) -> tuple[dict[str, Member], str]:
    """Who took part when the run began, and the run's name among the nodes."""
    try:
        whole = json.loads(path.read_text(encoding="utf-8"))
        members = [Member(**entry) for entry in whole["clients"]]
        members = [replace(member, metrics=tuple(member.metrics)) for member in members]
        return {member.client: member for member in members}, str(whole["run"])
    except (OSError, ValueError, KeyError, TypeError) as failure:
        raise ConfigError(f"{path} does not say who took part in the run: {failure}. Begin a new run.") from failure
