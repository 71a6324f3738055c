"""`server_app`: the Flower app of the server, and what it is given, checked before anything runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, get_args, get_type_hints

from equipoise.algorithm import Algorithm
from equipoise.client_metrics import ClientMetrics
from equipoise.core.per_example_losses import PerExample
from equipoise.engines.flower.apps.flower_extra import require_flower
from equipoise.engines.flower.apps.model_source import ModelSource
from equipoise.errors import InvalidParameter, is_integer, is_number, require
from equipoise.experiment.values import check_value, in_toml
from equipoise.result import Result
from equipoise.runs.stopping import EarlyStopping
from equipoise.types import Observer

if TYPE_CHECKING:
    from flwr.app import Context
    from flwr.serverapp import Grid, ServerApp


def server_app(
    algorithm: Algorithm,
    *,
    model: ModelSource,
    rounds: int,
    clients_per_round: int | None = None,
    clients: int | None = None,
    seed: int = 0,
    folder: str | Path | None = None,
    loss: PerExample | None = None,
    error: PerExample | None = None,
    evaluate_every: int | None = None,
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    stop: EarlyStopping | None = None,
    timeout: float = 600.0,
    minimum: int = 1,
    retries: int = 2,
    pause: float = 10.0,
    patience: float = 600.0,
    signed: bool = False,
    colluders: int | None = None,
    most_examples: int = 1_000_000,
    longest: float = 100.0,
    begin_with: int | None = None,
    nodes: str | Path | None = None,
    data: str = "federation",
    name: str | None = None,
    observers: Sequence[Observer] = (),
    on_result: Callable[[Result], None] | None = None,
) -> ServerApp:
    """The Flower ServerApp that trains `model` over the nodes by an Algorithm, as `equipoise.train` does in a simulation.

    If no node fails and no noise is drawn, a simulation of the algorithm with this model, seed and data gives the same
    result up to rounding. `model` is a torch module, its class, or a function of nothing (or of the seed) that makes one, made
    under `seed`; `loss` and `error` are as for `equipoise.train`; all three are the same on the nodes. Clients count in the
    natural order of their names ("2" before "10").

    The run begins when `clients` nodes have said who they are (None: as many as `clients_per_round`), and gives up after
    `patience` seconds. Each round draws `clients_per_round` of them (None: all). An answer that does not come within
    `timeout` seconds, or is not what was asked for (not finite, of a wrong shape, of another round, garbage), is left out:
    the others share its weight, and the round's report names the client and the fault (`report.missing`). If fewer than
    `minimum` clients of a cohort have done their part, the round is repeated after `pause` seconds with a new cohort, up to
    `retries` times; then the run stops with TooFewClients, and its folder can be resumed.

    `folder` is the run's folder (config.toml, rounds.jsonl, checkpoint/, clients.parquet, model.safetensors, report.html as
    in a simulation, and federation.json, who took part). A relative path is relative to the folder in which Flower starts
    the app. If the folder holds a run that has not ended, that run resumes from its checkpoint, which is written after
    every round. Nodes then identify themselves again, and must have the same data as before. Without a folder nothing is
    written; `on_result(result)` is called at the end either way. `data` is the name of the data in reports, `name` the name
    of the run (None: its folder), `evaluate_every`, `stop` and `observers` are as for `equipoise.train`. So are `metrics`,
    which the nodes compute: each must have them in its client_app.

    What nodes claim is bounded. A split of more than `most_examples` examples is refused, as their number sets a client's
    weight. An update that is over `longest` times as long as the median of its round is left out, and its client named.

    A client that does not answer gets no work until it has identified itself again, so that it costs one timeout and not
    one in every round. With `begin_with=n` a run begins after `patience` seconds if n nodes are there; latecomers join
    between two rounds (not under privacy or with personal models, where they take part from the next run on). `nodes` names
    the file of the nodes' public keys, by name; without it a name belongs to the first node that comes with it
    (known-nodes.json beside the run folders). The run writes status.json and events.jsonl while it is active, and obeys
    `equipoise flower pause`, `resume`, `stop` and `extend`. A run that has ended continues if `rounds` is larger than
    before.

    `signed` has nodes sign their secure sums, against a server that does not follow the protocol: all of them need keys that
    their owners have exchanged (docs/protect-federation.md). `colluders` nodes may help such a server (None: the largest
    number below a third).

    Numbers and texts in Flower's run configuration override the arguments: `flwr run . --run-config 'rounds=5
    folder="runs/a"'`. 0 stands for None. The keys are "rounds", "clients-per-round", "clients", "seed", "folder",
    "evaluate-every", "timeout", "minimum", "retries", "pause", "patience", "signed", "colluders", "most-examples",
    "longest", "begin-with", "nodes", "data" and "name".

    `algorithm` says what is minimised, and how.
    """
    require_flower()
    from flwr.serverapp import ServerApp

    from equipoise.engines.flower.apps.federated_run import run_plan
    from equipoise.engines.flower.apps.server_log import say_end, speak_plainly
    from equipoise.engines.flower.flower_internals import look_again_soon

    plan = ServerPlan(
        algorithm, model, rounds, clients_per_round, clients, seed, str(folder) if folder is not None else None, loss, error,
        evaluate_every, timeout, minimum, retries, pause, patience, signed, colluders, most_examples, data, name,
        tuple(observers), on_result, metrics, stop, longest, begin_with, str(nodes) if nodes is not None else None,
    )  # fmt: skip
    app = ServerApp()

    @app.main()
    def main(grid: Grid, context: Context) -> None:
        look_again_soon()
        speak_plainly(str(context.run_config.get("folder") or "") or plan.folder)
        configured = plan.configured(context.run_config)
        result = run_plan(configured, grid)
        say_end(configured.folder, result.rounds)

    return app


@dataclass(frozen=True, eq=False)
class ServerPlan:
    """What `server_app` was given, checked."""

    algorithm: Algorithm
    model: ModelSource
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
    signed: bool
    colluders: int | None
    most_examples: int
    data: str
    name: str | None
    observers: tuple[Observer, ...]
    on_result: Callable[[Result], None] | None
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None
    stop: EarlyStopping | None = None
    longest: float = 100.0
    begin_with: int | None = None
    nodes: str | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.algorithm, Algorithm):
            raise InvalidParameter("algorithm", "must be an equipoise.Algorithm", self.algorithm, "Write Algorithm(risk=…).")
        ClientMetrics.of(self.metrics)  # refuses what is none
        for key, least in (("rounds", 0), ("seed", 0), ("minimum", 1), ("retries", 0), ("most_examples", 1)):
            value = getattr(self, key)
            require(is_integer(value) and value >= least, key, f"must be a whole number ≥ {least}", value)
        for key in ("clients_per_round", "clients", "evaluate_every", "begin_with"):
            value = getattr(self, key)
            require(value is None or (is_integer(value) and value >= 1), key, "must be a whole number ≥ 1, or None", value)
        require(is_number(self.longest) and self.longest > 1, "longest", "must be a number > 1", self.longest)
        for key in ("timeout", "patience"):
            require(is_number(getattr(self, key)) and getattr(self, key) > 0, key, "must be seconds > 0", getattr(self, key))
        require(isinstance(self.signed, bool), "signed", "must be True or False", self.signed)
        good = self.colluders is None or (is_integer(self.colluders) and self.colluders >= 0)
        require(good, "colluders", "must be a whole number ≥ 0, or None", self.colluders)
        require(is_number(self.pause) and self.pause >= 0, "pause", "must be seconds ≥ 0", self.pause)
        self._check_minimum()
        given = self.clients is not None or self.clients_per_round is not None
        require(given, "clients", "or clients_per_round must be given", None, "Say how many nodes the run waits for.")

    def _check_minimum(self) -> None:
        """Refuse a `minimum` that no round, or not every one, can have: it would have no effect."""
        for key in ("clients_per_round", "clients", "begin_with"):
            most, word = getattr(self, key), key.replace("_", "-")
            fix = f"Lower minimum to {most} or less, or raise {word}: a round has no more clients."
            require(most is None or self.minimum <= most, "minimum", f"must not exceed {word} ({most})", self.minimum, fix)

    def configured(self, config: Mapping[str, Any]) -> ServerPlan:
        """The plan with what Flower's run configuration says otherwise."""
        changed: dict[str, Any] = {}
        for key, kind in get_type_hints(ServerPlan).items():
            name = key.replace("_", "-")
            optional = type(None) in get_args(kind) and key != "colluders"  # nobody, there, is a number like others
            if in_toml(kind) is None or config.get(name, "") == "":
                continue
            nothing = optional and config[name] == 0
            changed[key] = None if nothing else check_value(config[name], kind, f"{name} of the run configuration")
        return replace(self, **changed)

    @property
    def awaited(self) -> int:
        """How many nodes the run waits for."""
        return max(self.clients or 0, self.clients_per_round or 0)
