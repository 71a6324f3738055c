"""What all rounds of a run share, checked and made ready before the first of them."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property, partial
from pathlib import Path
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor, nn

from equipoise.algorithm import Algorithm
from equipoise.attacks.malicious import sees_all_updates
from equipoise.client_metrics import ClientMetrics
from equipoise.client_table import ClientTable
from equipoise.core.abilities import engine_traits, is_of_user, is_part, named_part, read, solver_traits
from equipoise.core.numbers import plain_values
from equipoise.core.per_example_losses import PerExample
from equipoise.core.signature import Signature
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.core.trees import map_tree
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Ray, Simulator
from equipoise.errors import IncompatibleParts, InvalidParameter, is_integer, notify, require, require_kind
from equipoise.models.adapters import WHY_NOT_BOTH, freeze_lora_a, trains_lora_a
from equipoise.observers import Evaluation, History
from equipoise.personal.context import PersonalContext
from equipoise.personal.ditto import own_solver
from equipoise.personal.finetune import Adaptation
from equipoise.personal.personal_run import PersonalRun
from equipoise.personal_models import PersonalModels
from equipoise.privacy.drowned_sums import noisy_model_words
from equipoise.privacy.lookers import data_to_try, may_look
from equipoise.privacy.noise_plan import NoisePlan
from equipoise.privacy.observer_table import PrivacyTable
from equipoise.privacy.unprotected import Unprotected
from equipoise.result import Result
from equipoise.rounds.cohorts import Cohorts
from equipoise.rounds.stages import hooks_of, stages_of
from equipoise.runs.attack_notices import tell_of_attack
from equipoise.runs.averaged_model import AveragedModel
from equipoise.runs.backdoor_rate import BackdoorProbe, try_success
from equipoise.runs.carried_rules import check_smallest_batches, refuse_unfit_for_carried
from equipoise.runs.error_spread import with_error_spread
from equipoise.runs.evaluation_sample import evaluation_sample, refuse_sample, sample_sizes
from equipoise.runs.model_notices import tell_of_model
from equipoise.runs.secret_cohorts import secret_cohort
from equipoise.runs.stopping import EarlyStopping, refuse_stop
from equipoise.runs.tried_releases import try_memory, try_releases
from equipoise.runs.trivial_answer import with_trivial_answer
from equipoise.solvers.kept_rows import SolverRows
from equipoise.solvers.local_optimizer import rates_by_name, refuse_wrong_rates
from equipoise.types import (
    Cohort,
    Engine,
    EngineTraits,
    LocalSolver,
    PersonalWork,
    PrivacyTraits,
    Protection,
    RiskTraits,
    RunSize,
    Sampler,
    ServerState,
    SolverMemory,
)
from equipoise.types.round_contracts import Stage

T = TypeVar("T")
ModelOrMaker = nn.Module | Callable[[int], nn.Module]
TRIED_EXAMPLES = 32  # of the first client, on which metrics are tried
DataOrMaker = FederatedData | Callable[[int], FederatedData]


class EngineChoice(Protocol):
    """Something that starts an engine: `engines.Simulator(...)`, `engines.Loop(...)`."""

    def start(self, task: Task, data: FederatedData) -> Engine:
        """The running engine of a task on data."""


@dataclass(frozen=True, eq=False)
class Setting:
    """What all rounds of a run share: model, data, algorithm, a running engine, and who may take part."""

    model: nn.Module
    data: FederatedData
    algorithm: Algorithm
    task: Task
    engine: Engine
    sampler: Sampler
    alpha: Tensor  # (n,) base weights of the training clients
    clients_per_round: int
    rounds: int
    seed: int
    personal: PersonalWork | None
    protection: Protection
    name: str = "run"
    engine_traits: EngineTraits = field(default_factory=EngineTraits)
    sample: Mapping[str, Tensor] | None = None  # positions of the clients that are evaluated, by split; None: all clients
    kept: SolverMemory | None = None  # what clients keep for their solver between rounds
    adaptation: PersonalWork | None = None  # what clients do with the trained model before they use it, if the solver says so
    metrics: ClientMetrics = field(default_factory=ClientMetrics)
    stop: EarlyStopping | None = None

    def with_algorithm(self, algorithm: Algorithm, name: str) -> Setting:
        """Another run on the same engine: an unprotected algorithm with the same weights and cohorts."""
        protection = Unprotected(self.rounds)
        return replace(self, algorithm=algorithm, protection=protection, name=name)

    @cached_property
    def noise(self) -> NoisePlan | None:
        """The plan of the run's noise; None without differential privacy."""
        plan: NoisePlan | None = vars(self.protection).get("noise")
        return plan

    @property
    def secret(self) -> bytes:
        """What noise and cohorts follow from; empty where nothing does, and once the run has ended."""
        return b"" if self.noise is None else self.noise.secret or b""

    @property
    def first_model(self) -> Tensor:
        """The first model as engines take it, on their device: w^0 (D,), followed by carried values (C,) if there are any."""
        return self.task.read_model().to(self.engine_traits.device)

    @property
    def keeps_rows(self) -> bool:
        """Whether clients keep something between rounds."""
        return self.personal is not None and self.personal.keeps_rows

    @property
    def first_params(self) -> Tensor:
        """w^0 (D,), on the engine's device."""
        return self.task.split(self.first_model)[0]

    @cached_property
    def draw(self) -> Cohorts:
        """Draws the cohort of a round."""
        return Cohorts(self)

    def draw_over_a_network(self, round_index: int, attempt: int) -> Cohort:
        """The cohort of a try of a round; under privacy it is drawn in secret, written down, and stays for all tries."""
        book = self.protection.book
        return self.draw(round_index, attempt) if book is None else secret_cohort(self, book, round_index)

    @cached_property
    def hooks(self) -> Mapping[str, tuple[Stage, ...]]:
        """The stages that have each hook of a round."""
        return hooks_of(tuple(stages_of(self)))

    @cached_property
    def averaged(self) -> AveragedModel:
        """Which iterate of the model the run reports."""
        return AveragedModel(self.algorithm.reported, self.task.carried)

    @cached_property
    def probe(self) -> BackdoorProbe | None:
        """Marked examples, where the data are under attack by a backdoor."""
        return BackdoorProbe.of(self.data, self.task)

    def begin(self, rows: Path | None = None, solver_rows: Path | None = None) -> ServerState:
        """The state before the first round; what clients keep between rounds goes to the files `rows` and `solver_rows`."""
        model = self.first_model
        params, carried = self.task.split(model)
        own = self.personal.begin(model, rows) if self.personal is not None else None
        first = ServerState(
            0, params, server=self.algorithm.server.begin(params), personal=own, privacy=self.protection.begin(),
            carried=carried if self.task.carried.names else None,
            kept=self.kept.begin(solver_rows) if self.kept is not None else None,
        )  # fmt: skip
        return replace(first, averaging=self.averaged.begin(first))

    def evaluation(self, state: ServerState, *, final: bool = False) -> Evaluation:
        """All clients of all splits, or the sample, at the iterate that is reported, and at their own models if they have any.

        Models that are made after training are only made for the `final` evaluation.
        """
        reported, network = self.averaged.iterate(state), self.engine_traits.network
        if network is None:
            table = ClientTable.evaluate(self.engine, reported.model, self.data, self.sample, self.metrics)
        else:
            asked = (self.metrics,) if len(self.metrics) else ()
            table = network.client_table(reported.model, self.data, state.round, *asked)
        own = self.personal if self.personal is not None and (final or self.personal.keeps_rows) else None
        if own is not None:
            table = table.with_personal(own.scores(state.personal, reported.model, state.round, self.sample))
        elif self.adaptation is not None and final:
            start = self.adaptation.begin(reported.model)
            table = table.with_personal(self.adaptation.scores(start, reported.model, state.round, self.sample))
        if self.probe is not None and network is None:
            table = self.probe.measured(table, self.engine, reported.model)
            if own is not None:
                table = self.probe.measured_own(
                    table, self.engine, own, state.personal, reported.model, state.round, self.data.train
                )
        return Evaluation(state.round, table, reported.params, self.name, reported.carried, final)

    def model_at(self, model: Tensor) -> nn.Module:
        """A copy of the user's model with these parameters (D,), and with the carried values (C,) that follow them."""
        trained = copy.deepcopy(self.model).eval()
        params, carried = self.task.split(model)
        self.task.layout.write(trained, params)
        self.task.carried.write(trained, carried)
        return trained

    def _observers(self, last: ServerState, released: Tensor) -> PrivacyTable:
        """ε by observer, and in words whether the released model (D,) is mostly noise."""
        table = self.protection.privacy(last.privacy)
        noise = noisy_model_words(self.noise, self.first_params, released, last.round)
        return replace(table, noise=noise) if noise else table

    def result(self, last: ServerState, chosen: ServerState, clients: ClientTable, history: History, seconds: float) -> Result:
        """The result of a run that ended in the state `last` and reports the model of `chosen`, the same or an earlier one."""
        reported, spent = self.averaged.iterate(chosen), self.protection.spent(last.privacy, last.round)
        model = self.model_at(reported.model)
        if self.engine_traits.network is None and may_look("trivial answer", self.algorithm):
            clients = with_trivial_answer(clients, self.task, model, self.data, self.sample)
            clients = with_error_spread(clients, self.task, model, self.data, self.sample, self.engine_traits.device)
        return Result(
            name=self.name, algorithm=self.algorithm, seed=self.seed, model=model,
            params=reported.params, carried=reported.carried,
            clients=clients, history=history, seconds=seconds, data=self.data.name, rounds=last.round,
            clients_per_round=self.clients_per_round, error_is_loss=self.task.error_is_loss,
            error_name=self.task.error_name, target="" if self.data.schema is None else self.data.schema.target.name,
            inputs=() if self.data.schema is None else self.data.schema.inputs,
            personal=None if self.personal is None else PersonalModels(self, self.personal, chosen, reported.model),
            privacy=self._observers(last, reported.params),
            epsilon=None if spent is None else replace(spent, table=self.data.schema is not None),
            sampled=sample_sizes(self.data, self.sample), schema=self.data.schema, task=self.task,
            signature=Signature.of(self.data, self.task.layout.dtype),  # of a federation, as its nodes have said
        )  # fmt: skip


def _solvers_at_work(algorithm: Algorithm) -> Iterator[LocalSolver]:
    """The solver, that of the clients' own models, and each for the epochs of other phases."""
    personal = algorithm.traits.personal
    own = own_solver(personal.solver, algorithm.solver)  # without stragglers, which may not go with another number of epochs
    with_epochs = solver_traits(own).with_epochs
    yield from (algorithm.solver, own)
    yield from (with_epochs(epochs) for epochs in personal.further_epochs if with_epochs is not None)


def set_up(
    model: ModelOrMaker,
    data: DataOrMaker,
    algorithm: Algorithm,
    *,
    rounds: int,
    clients_per_round: int | None,
    seed: int,
    loss: PerExample | None,
    error: PerExample | None,
    engine: EngineChoice | str,
    evaluate_clients: int | None = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    stop: EarlyStopping | None = None,
    name: str = "run",
    trial: bool = False,
) -> Setting:
    """Check what a run is given, and start its engine; what cannot run is refused here. A `trial` run starts no further one."""
    require(is_integer(rounds) and rounds >= 0, "rounds", "must be a whole number ≥ 0", rounds)
    require(is_integer(seed) and 0 <= seed < 2**63, "seed", "must be a whole number from 0 to 2^63 − 1", seed)
    rounds, seed = int(rounds), int(seed)
    given = isinstance(algorithm, Algorithm)
    require(given, "algorithm", "must be an equipoise.Algorithm", algorithm, "Write Algorithm(risk=…).")
    refuse_swapped(model, data, "train")
    data, model = build(data, seed, FederatedData, "data"), build(model, seed, nn.Module, "model")
    model = with_adapters_for(algorithm, model)
    to_try = data_to_try(data, algorithm)
    task, measured = try_task(Task.of(model, loss, error), to_try), ClientMetrics.of(metrics)
    if algorithm.privacy is not None:
        try_memory(task, to_try, algorithm)
    refuse_unfit_for_carried(task, algorithm)
    check_smallest_batches(task, data.train, algorithm)
    sample = evaluation_sample(data, evaluate_clients)
    running = choose_engine(engine).start(task, data)
    traits, parts = engine_traits(running), algorithm.traits
    refuse_sample(sample, traits, evaluate_clients)
    try_metrics(measured, task, to_try, traits, parts.privacy)
    alpha = algorithm.base_weights(data.train)
    if parts.sampler.everyone:
        clients_per_round = len(data.train)
    if clients_per_round is None:
        fix = f"For all {len(data.train)} clients: clients_per_round=len(data.train), or Algorithm(sampler=sampling.Full())."
        raise InvalidParameter("clients_per_round", "must be given unless the sampler is sampling.Full()", None, fix)
    refuse_missing_groups(parts.risk, data.train.ids)
    with named_part("sampler", algorithm.drawn_by):  # refuses an impossible cohort before any work
        algorithm.drawn_by(0, alpha, clients_per_round=clients_per_round, seed=seed)
    in_a_step = clients_per_round if parts.sampler.buffered is None else parts.sampler.buffered.buffer
    for solver in _solvers_at_work(algorithm):
        refuse_wrong_rates(solver, rounds, int(to_try.train.host_sizes.max()))
    if traits.network is None:
        tell_of_model(task, to_try, algorithm.solver)
        if to_try.attack is not None:
            try_success(task, to_try)
            tell_of_attack(to_try, in_a_step)
    if algorithm.private and data.malicious and sees_all_updates(data):
        raise IncompatibleParts(
            f"{data.attack!r} has malicious clients see all updates: one client moves what many send, and noise covers one.",
            "Use an attack that is not omniscient, such as attacks.SignFlip(), or leave out privacy.",
        )
    from equipoise.runs.own_parts import try_own_parts  # the laws of parts are tried in small runs, which need this module

    try_own_parts(algorithm, data.train.ids, alpha, clients_per_round, seed)
    if traits.network is None and not trial:
        others: dict[str, Any] = {"rounds": 2, "clients_per_round": None, "seed": seed, "loss": loss, "error": error}
        try_releases(algorithm, model, to_try, partial(set_up, engine="simulator", trial=True, **others))
    personal: PersonalWork | None = None
    adaptation: PersonalWork | None = None
    context = PersonalContext(running, task, data, lambda other: choose_engine(engine).start(other, data), measured)
    if algorithm.personal is None and parts.solver.adaptation is not None and traits.network is None:
        adaptation = PersonalRun(Adaptation(parts.solver.adaptation), context, algorithm.solver, seed)
    if algorithm.personal is not None:
        alone = algorithm.privacy is not None and is_of_user(algorithm.personal)
        start = partial(PersonalRun, alone=alone) if traits.network is None else traits.network.personal_work
        personal = start(algorithm.personal, context, algorithm.solver, seed)
    if stop is not None:
        refuse_stop(stop, data, measured, algorithm, personal, network=traits.network is not None)
    protection: Protection = Unprotected(rounds)
    if algorithm.privacy is not None:
        require(parts.privacy.protect is not None, "privacy", "must be a part of equipoise.privacy", algorithm.privacy)
        size = RunSize(len(data.train), in_a_step, rounds, task.layout.dimension, seed, data.train.ids)
        protection = algorithm.privacy.protect(algorithm, size)
        tell_large_delta(protection, len(data.train))
    if traits.network is not None:
        protection = traits.network.protect(protection, algorithm)
    rates_by_name(parts.solver.rates, task.layout.names)  # refuses a pattern that matches no parameter
    keeps = parts.solver.keeps
    kept: SolverMemory | None = None
    if keeps is not None:
        here = SolverRows(keeps(task.layout.dimension), len(data.train), task.layout.dtype)
        kept = here if traits.network is None else traits.network.solver_rows()
    return Setting(
        model, data, algorithm, task, running, algorithm.drawn_by, alpha, clients_per_round, rounds, seed, personal, protection,
        name, traits, sample, kept, adaptation, measured, stop,
    )  # fmt: skip


def with_adapters_for(algorithm: Algorithm, model: nn.Module) -> nn.Module:
    """The model, under differential privacy with the A of low-rank adapters frozen, unless it says that they are trained."""
    if algorithm.traits.privacy.clip is None or not trains_lora_a(model):
        return model
    text = f"Under differential privacy {WHY_NOT_BOTH}: A stays as it is, and B alone is trained (FFA-LoRA)"
    notify(f"{text}. To train both, give models.freeze_lora_a(model, freeze=False).")
    return freeze_lora_a(model)


def tell_large_delta(protection: Protection, clients: int) -> None:
    """Give a notice if δ is not below 1/n: such a δ would allow to publish all data of a client drawn at random."""
    plan: NoisePlan | None = vars(protection).get("noise")
    if plan is not None and plan.privacy.delta * clients >= 1:
        notify(
            f"delta is {plan.privacy.delta:.3g}, and there are {clients} training clients: such a delta would allow to publish "
            f"all data of one client drawn at random. Choose a delta clearly below 1/{clients}, such as {0.1 / clients:.1g}."
        )


def refuse_swapped(model: object, data: object, function: str) -> None:
    """Refuse a call in which model and data have changed places."""
    if isinstance(model, FederatedData) or isinstance(data, nn.Module):
        before = "algorithm, space, " if function == "tune" else ""
        fix = f"Write {function}({before}model, data, …)."
        raise InvalidParameter("model", "comes first and the data second", type(model).__name__, fix)


def try_metrics(metrics: ClientMetrics, task: Task, data: FederatedData, engine: EngineTraits, privacy: PrivacyTraits) -> None:
    """Refuse metrics that the engine cannot find, or that fail on a few examples of the first client."""
    if not len(metrics):
        return
    if engine.network is not None and privacy.sums_alone:
        raise IncompatibleParts(
            "metrics are figures of single clients, but under secure sums the server sees sums over clients alone.",
            "Leave metrics out, or evaluate the finished model on clients that may be seen: equipoise.evaluate.",
        )
    if engine.network is not None:  # the examples are on the nodes, which measure
        return
    if engine.measure is None:
        raise IncompatibleParts("metrics need the outputs of the model, which this engine does not give.", "Use the simulator.")
    trial, clients = task.to(torch.device("cpu")), data.train
    rows = torch.arange(min(TRIED_EXAMPLES, int(clients.host_sizes[0])), device=clients.device) + int(clients.starts[0])
    x, y = (map_tree(Tensor.cpu, part(rows, task.layout.dtype)) for part in (clients.inputs, clients.targets))
    trial.scorer.eval()
    first = metrics.begin(clients.ids[0])
    with torch.no_grad(), torch.random.fork_rng(devices=[]):
        first.add(trial.outputs(task.layout.read(trial.module), x), y)
        first.values()


def refuse_missing_groups(risk: RiskTraits, clients: Sequence[str]) -> None:
    """Refuse a risk by groups that leaves training clients without one, before any work."""
    for _, inner in risk.terms:
        refuse_missing_groups(read(RiskTraits, inner), clients)
    groups = risk.groups
    if isinstance(groups, Mapping) and (missing := [client for client in clients if client not in groups]):
        shown = f"without {len(missing)}: {', '.join(missing[:5])}{', …' if len(missing) > 5 else ''}"
        raise InvalidParameter("groups", f"must name a group for each of the {len(clients)} training clients", shown)


def choose_engine(engine: EngineChoice | str) -> EngineChoice:
    """The engine by name, or the object itself."""
    named: dict[str, EngineChoice] = {"simulator": Simulator(), "loop": Loop(), "ray": Ray()}
    chosen = named.get(engine) if isinstance(engine, str) else engine
    require_kind("engine", "engine", chosen)
    if chosen is None or not is_part(chosen, "start"):
        raise InvalidParameter("engine", 'must be "simulator", "loop", "ray" or an engine object', engine)
    return chosen


def chosen_seeds(seeds: object) -> list[int]:
    """Different seeds as a list; a number n means 0 … n − 1."""
    plain = plain_values(seeds)
    numbers = list(range(plain)) if is_integer(plain) else list(plain) if isinstance(plain, Iterable) else []
    good = len(numbers) > 0 and all(is_integer(seed) for seed in numbers) and len(set(numbers)) == len(numbers)
    require(good, "seeds", "must be one or more different whole numbers, or how many", seeds, "E.g. seeds=5 for 0 … 4.")
    return [int(seed) for seed in numbers]


def build(maker: object, seed: int, kind: type[T], parameter: str) -> T:
    """The object itself, or what a function of the seed makes; random initial weights then depend on the seed alone."""
    if isinstance(maker, kind):
        return maker
    rule = f"must be a {kind.__name__}, or a function of the seed that makes one"
    name: Any = getattr(maker, "__name__", maker)
    if not callable(maker) or isinstance(maker, type):
        raise InvalidParameter(parameter, rule, name)
    with torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        try:
            built = maker(seed)
        except TypeError as failure:
            raise InvalidParameter(parameter, rule, name, f"Calling it said: {failure}.") from failure
    if not isinstance(built, kind):
        raise InvalidParameter(parameter, rule, built)
    return built
