"""A federated run on the server: wait for the nodes, learn who they are, and run the ordinary loop over rounds on them."""

from __future__ import annotations

import json
import logging
import secrets
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from flwr.serverapp import Grid
from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.compatibility import refuse, refuse_on_nodes
from equipoise.core.files import locked, write_atomically
from equipoise.core.plain_text import made_of, parse_json, parse_toml
from equipoise.core.task import Task
from equipoise.core.words import counted
from equipoise.data.clients import FederatedData
from equipoise.engines.flower.apps.few_updates import too_few_updates
from equipoise.engines.flower.apps.fixed_rounds import refuse_more_rounds
from equipoise.engines.flower.apps.foreseen_refusals import (
    evaluated_rounds,
    refuse_many_evaluations,
    refuse_silent,
    refuse_unmeasured,
)
from equipoise.engines.flower.apps.introductions import Introductions
from equipoise.engines.flower.apps.members import Member, make_stand_in, natural_order
from equipoise.engines.flower.apps.model_source import digest_frozen, digest_layout, make_model
from equipoise.engines.flower.apps.node_keys import KNOWN_NODES, KnownNodes, read_node_names
from equipoise.engines.flower.apps.round_log import LogRounds
from equipoise.engines.flower.apps.run_control import RunControl, give_order, read_order
from equipoise.engines.flower.apps.run_secret import batch_seed, open_secret, public_seed
from equipoise.engines.flower.apps.run_status import RunStatus
from equipoise.engines.flower.apps.welcome import MoreClients, Welcome, gather
from equipoise.engines.flower.flower_engine import Federation, Patience
from equipoise.engines.flower.secure.crowds import check_crowd
from equipoise.engines.flower.transport.messenger import ClientRequest, Messenger
from equipoise.errors import CheckpointError, ConfigError, EquipoiseNotice, FileGuard, IncompatibleParts
from equipoise.experiment.folder import claim
from equipoise.experiment.folder import run as run_in_folder
from equipoise.experiment.recorded import FEDERATION, RecordedConfig
from equipoise.experiment.run_files import RunFolder
from equipoise.experiment.train_options import TrainRecord
from equipoise.models.adapters import trains_lora_a
from equipoise.privacy.drowned_sums import drowning_words
from equipoise.result import Result
from equipoise.runs.checkpoint import Checkpoints, read_checkpoint
from equipoise.runs.setup import Setting, set_up
from equipoise.train import train
from equipoise.types import Observer

if TYPE_CHECKING:
    from equipoise.engines.flower.apps.server import ServerPlan

log = logging.getLogger("flwr")  # Flower shows it to whoever watches the run
ROSTER = "federation.json"
LOCK = ".server.lock"  # held by the server from beginning to end


def run_plan(plan: ServerPlan, grid: Grid) -> Result:
    """The whole run: nodes, rounds, files. A second server in the same folder is refused before it touches anything."""
    refuse_on_nodes(plan.algorithm, signed=plan.signed)
    if plan.folder is None:
        return serve(plan, grid, None, None)
    place = RunFolder(Path(plan.folder))
    if not place.config.exists() and not (place.path / LOCK).exists():
        place = claim(place.path)
    with locked(place.path / LOCK, wait=False):
        order = read_order(place.path)
        plan = plan if order.rounds is None or order.rounds <= plan.rounds else replace(plan, rounds=order.rounds)
        refuse_more_rounds(place.path, plan.rounds)
        if order.state == "stop":
            give_order(place.path, state="run")  # whoever begins the run again wants it to go on
        known = None
        if place.config.exists():
            done = read_checkpoint(place.checkpoint).runs[0].state.round if place.finished else None
            if done is not None and done >= plan.rounds:
                made = counted(done, "round")
                cure = f"Name another folder, or more than {made} to go on with it: rounds is {plan.rounds} here."
                raise ConfigError(f"The run in {place.path} has ended after {made}. {cure}")
            known = read_roster(place.path / ROSTER)
            refuse_other_plan(plan, grid, place, known)
        return serve(plan, grid, place, known)


def serve(plan: ServerPlan, grid: Grid, place: RunFolder | None, known: tuple[dict[str, Member], str] | None) -> Result:
    """Wait for the nodes and train; where clients join between rounds, go on with them from the checkpoint."""
    private = plan.algorithm.privacy is not None
    folder = place.path if place is not None else None
    members, run = known if known is not None else (None, secrets.token_hex(8))
    status = RunStatus(folder, plan.name or (folder.name if folder is not None else run), plan.rounds, open_scores=not private)
    status.count_trained = LogRounds(plan.algorithm).trained
    with status.watch():
        model_seed = public_seed(plan.seed) if private else plan.seed
        model = make_model(plan.model, model_seed)
        adapters = {"trains both adapters": trains_lora_a(model), "model": type(model).__name__}
        refuse(plan.algorithm, network=True, **adapters)  # every node makes its model itself
        task = Task.of(model, plan.loss, plan.error)
        messenger = Messenger(grid, timeout=float(plan.timeout))
        messenger.known = {**(read_node_names(Path(plan.nodes).parent) if plan.nodes else {}), **status.nodes}
        if private:
            messenger.own_seed = partial(batch_seed, open_secret(folder))
        welcome = open_door(plan, messenger, task, model_seed, folder)
        if members is not None:
            welcome.settle(members)
            soon = min(plan.timeout, plan.patience)
            gather(welcome, welcome.awaited, patience=plan.patience, enough=plan.minimum, soon=soon, tell=status.wait_for)
            members = dict(welcome.members)  # with what their policies say now
        else:
            enough = plan.begin_with or plan.awaited
            gather(welcome, plan.awaited, patience=plan.patience, enough=enough, tell=status.wait_for)
            members = dict(welcome.members)
        control = RunControl(folder, status.say)
        patience = Patience(float(plan.timeout), plan.minimum, plan.retries, float(plan.pause), float(plan.longest))
        begun, told = known is not None, False  # whether the run has a roster, and whether its log says what is visible
        while True:
            silent = refuse_silent(members, plan.algorithm, signed=plan.signed, minimum=plan.minimum)
            refuse_unmeasured(members, plan.metrics)
            refuse_many_evaluations(members, plan, evaluated_rounds(place))
            data = make_stand_in(members.values(), plan.data)
            welcome.settle(members)
            welcome.admits = place is not None and admits_latecomers(plan.algorithm)
            federation = Federation(
                messenger, members, patience, run, model_seed, plan.signed, plan.colluders, welcome, control
            )
            federated = FederatedRun(plan, model, data, federation, status)
            if said := check_crowd(federation, plan.algorithm, federated.clients_per_round):
                log.warning("%s", said)
                status.event("warning", text=said)
            if not told and plan.algorithm.traits.privacy.sums_alone:
                log.info("Only sums are visible to this server: no single client's loss, update or score.")
            few = too_few_updates(plan.algorithm, federated.clients_per_round, plan.longest)
            for said in () if told else filter(None, (silent, federated.drowned() or few)):
                log.warning("%s", said)
                status.event("warning", text=said)
            status.settle(members, messenger)
            if place is not None and not begun:
                write_atomically(place.path / ROSTER, write_roster(members, run).encode())
            begun = told = True
            try:
                result = federated.train() if place is None else run_federated(federated, place)
            except MoreClients as more:
                members = admit(cast(RunFolder, place), plan, members, more.members, run)
                continue
            if place is None or (rounds := read_order(place.path).rounds) is None or rounds <= plan.rounds:
                break
            refuse_more_rounds(place.path, rounds)
            plan = replace(plan, rounds=rounds)  # the operator has extended the run meanwhile
            status.about["rounds"] = rounds
    if plan.on_result is not None:
        plan.on_result(result)
    return result


def refuse_other_plan(plan: ServerPlan, grid: Grid, place: RunFolder, known: tuple[dict[str, Member], str]) -> None:
    """Refuse to go on with a run of another algorithm, model or data, before anything is written or any node is asked."""
    if not place.checkpoint.exists():
        return
    members, run = known
    seed = plan.seed if plan.algorithm.privacy is None else public_seed(plan.seed)
    patience = Patience(float(plan.timeout), plan.minimum, plan.retries, float(plan.pause), float(plan.longest))
    messenger = Messenger(grid, timeout=float(plan.timeout))
    federation = Federation(messenger, members, patience, run, seed, plan.signed, plan.colluders, None, RunControl())
    data, model = make_stand_in(members.values(), plan.data), make_model(plan.model, seed)
    status = RunStatus(None, place.path.name, plan.rounds, open_scores=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)  # which the run itself gives
        try:
            Checkpoints(place.checkpoint).open([FederatedRun(plan, model, data, federation, status).setting()])
        except CheckpointError as failure:
            another = "in another folder (`folder` of --run-config)"
            raise CheckpointError(str(failure).replace("with another file", another)) from failure


def open_door(plan: ServerPlan, messenger: Messenger, task: Task, model_seed: int, folder: Path | None) -> Welcome:
    """What lets nodes in: their introductions, and the nodes that names belong to."""
    told = {"seed": model_seed, "model": model_seed, "layout": digest_layout(task), "frozen": digest_frozen(task)}
    most = plan.most_examples
    introductions = Introductions(messenger, ClientRequest(told), lambda content: Member.read(content, task, most))
    names = KnownNodes(folder.resolve().parent / KNOWN_NODES if folder is not None else None, plan.nodes)
    return Welcome(messenger, introductions, names)


def run_federated(federated: FederatedRun, place: RunFolder) -> Result:
    """The run in its folder. One that goes on may have other rounds or more clients than before: its configuration says so."""
    if place.config.exists():
        text = federated.config.text()
        with FileGuard(place.config, ConfigError):
            before, now = (parse_toml(each) for each in (place.config, text))
        if before.get("algorithm") == now["algorithm"]:  # else the checkpoint refuses the run
            write_atomically(place.config, text.encode())
    return cast(Result, run_in_folder(cast(Any, federated), place, progress=False))


def admits_latecomers(algorithm: Algorithm) -> bool:
    """Whether clients may join between rounds: not where noise, weights or models were set for those that began the run."""
    parts = algorithm.traits
    return algorithm.privacy is None and algorithm.personal is None and parts.solver.after_rows is None


def admit(
    place: RunFolder, plan: ServerPlan, members: Mapping[str, Member], more: Mapping[str, Member], run: str
) -> dict[str, Member]:
    """The clients with those that have joined: roster and checkpoint are written for all of them."""
    everyone = {**members, **more}
    saved = read_checkpoint(place.checkpoint)
    (one,) = saved.runs
    kept = {"risk": one.state.risk, "solver": one.state.solver, "kept": one.state.kept, "personal": one.state.personal}
    if held := [name for name, value in kept.items() if value is not None]:
        raise IncompatibleParts(
            f"{', '.join(more)} cannot join a run whose {held[0]} keeps numbers for each client.", "Begin a new run with all."
        )
    before, after = (make_stand_in(each.values(), plan.data) for each in (members, everyone))
    identity = dict(one.identity)
    identity["data"] = f"{after.name}, {len(after.train)} clients, {after.fingerprint}"
    if identity.get("clients_per_round") == str(len(before.train)) and plan.clients_per_round is None:
        identity["clients_per_round"] = str(len(after.train))
    write_atomically(place.path / ROSTER, write_roster(everyone, run).encode())
    replace(saved, runs=[replace(one, identity=identity)]).write(place.checkpoint)
    log.info("%s join%s the run before round %d.", ", ".join(more), "s" * (len(more) == 1), one.state.round + 1)
    return everyone


# ------------------------------------------------------------------------------------------------------- the run as a folder


@dataclass(frozen=True, eq=False)
class FederatedRun:
    """A federated run as the writer of run folders sees any run."""

    plan: ServerPlan
    model: nn.Module
    data: FederatedData
    federation: Federation
    status: RunStatus

    @property
    def algorithm(self) -> Algorithm:
        """The algorithm of the run."""
        return self.plan.algorithm

    @property
    def evaluated_clients(self) -> int:
        """The number of rows in the table of clients."""
        return sum(len(clients) for clients in self.data.splits.values())

    @property
    def clients_per_round(self) -> int:
        """How many clients a round has: all that take part, unless the plan says a number."""
        return self.plan.clients_per_round or len(self.data.train)

    @property
    def config(self) -> RecordedConfig:
        """What the folder's config.toml says."""
        plan = self.plan
        options = {f.name: getattr(plan, f.name) for f in fields(TrainRecord)}
        options["clients_per_round"] = self.clients_per_round
        kind = type(self.model)
        network = {key: getattr(plan, key) for key in ("timeout", "minimum", "retries", "pause")}
        about = {"data": plan.data, "clients": len(self.federation.members), "model": f"{kind.__module__}:{kind.__qualname__}"}
        libraries = ("equipoise", "torch", "numpy", "flwr")
        return RecordedConfig(plan.algorithm, TrainRecord(**options), {FEDERATION: {**about, **network}}, libraries)

    def setting(self) -> Setting:
        """What all rounds of the run share; no node is asked for it."""
        plan = self.plan
        return set_up(
            self.model, self.data, plan.algorithm, rounds=plan.rounds, clients_per_round=self.clients_per_round, seed=plan.seed,
            loss=plan.loss, error=plan.error, engine=self.federation, metrics=plan.metrics, stop=plan.stop,
        )  # fmt: skip

    def drowned(self) -> str:
        """What to say before the run if its noise drowns the sums; empty without differential privacy."""
        if self.algorithm.traits.privacy.clip is None:
            return ""
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EquipoiseNotice)  # which the run itself gives
            setting = self.setting()
        if (noise := setting.noise) is None:
            return ""
        return drowning_words(
            noise.calibration.update, setting.task.layout.dimension, self.clients_per_round, noise.privacy.clip
        )

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
            self.model, self.data, plan.algorithm, rounds=plan.rounds, clients_per_round=self.clients_per_round, seed=plan.seed,
            loss=plan.loss, error=plan.error, engine=self.federation, evaluate_every=plan.evaluate_every, metrics=plan.metrics,
            stop=plan.stop, progress=progress, name=plan.name or name,
            observers=[*observers, *plan.observers, LogRounds(plan.algorithm), self.status],
            checkpoint=Checkpoints(checkpoint, every=1) if checkpoint is not None else None,
            ledger=ledger,
        )  # fmt: skip
        return replace(result, personal=None)  # clients' own models are on their nodes


def write_roster(members: Mapping[str, Member], run: str) -> str:
    """Who takes part, as JSON: sizes and shapes, nothing of the examples."""
    ordered = sorted(members.values(), key=lambda m: natural_order(m.client))
    return json.dumps({"run": run, "clients": [asdict(member) for member in ordered]}, indent=1) + "\n"


def read_roster(path: Path) -> tuple[dict[str, Member], str]:
    """Who took part when the run began, and the run's name among the nodes."""
    with FileGuard(path, ConfigError, "does not say who took part in the run", "Begin a new run."):
        whole = parse_json(path)
        return {each.client: each for each in made_of(list[Member], whole["clients"])}, str(whole["run"])
