"""The section [train] of a configuration: rounds, cohorts, seed, evaluation, checkpoints and engine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass
from typing import Any

from equipoise.errors import ConfigError, require, require_number
from equipoise.experiment import catalog
from equipoise.experiment.config_tables import refusals_at, refuse_unknown
from equipoise.experiment.part_config import PartConfig
from equipoise.experiment.values import NONE, check_value, toml_text
from equipoise.runs.stopping import EarlyStopping


@dataclass(frozen=True)
class TrainRecord:
    """What the section [train] of any run says, also of a federated one."""

    rounds: int
    clients_per_round: int
    seed: int = 0
    name: str | None = None
    evaluate_every: int | None = None

    def table(self) -> dict[str, Any]:
        """The section as a TOML table."""
        return {name: NONE if value is None else value for name, value in asdict(self).items()}


def metric_column(name: str) -> str:
    """What results call a metric of a configuration: its name, of an import path what follows the colon."""
    return name.rpartition(":")[2]


@dataclass(frozen=True)
class TrainOptions(TrainRecord):
    """The section [train]: rounds, cohorts, seed, evaluation, checkpoints and engine.

    `name` is the name of the run in reports (None: that of its folder). `evaluate_clients` is how many clients of each
    split are evaluated, drawn at random (None: all). `metrics` are names of metrics of single clients, or import paths
    "module:name" of metrics of your own. Of a plain function more is better. For less is better, let the name be an object
    `equipoise.metrics.Metric(function, higher_is_better=False)`. The tail of clients is at the worse end. `loss` is the
    import path of a loss of your own, (outputs, targets) → one number per example (None: the model's). `error` is that of
    an error of your own, by which clients are judged, or "absolute_error" or "squared_error" for numbers (None: the
    model's). `checkpoint_every` is in rounds (None: about every ten seconds). `threads` are torch's (None: torch's own
    choice; the folder of a run holds the number). `stop`, a section [train.stop], has the parameters of EarlyStopping.
    `attributes` names a CSV file with a row per client, its id first and then attributes by which reports show subgroups.
    `conformal` is ζ, the share of test examples that conformal sets may miss (None: no sets). `evaluate_every` is in rounds
    (None: only at the end). `engine` is "simulator", "loop" or "ray". `device`, `chunk_size`, `workers`, `precision` and
    `compiled` are options of the engine. The simulator chooses `chunk_size` and `workers` by a measurement if they are None.
    """

    evaluate_clients: int | None = None
    checkpoint_every: int | None = None
    engine: str = "simulator"
    device: str | None = None
    chunk_size: int | None = None
    workers: int | None = None
    precision: str | None = None
    compiled: bool | None = None
    threads: int | None = None
    metrics: list[str] | None = None
    loss: str | None = None
    error: str | None = None
    attributes: str | None = None
    conformal: float | None = None
    stop: EarlyStopping | None = None

    def __post_init__(self) -> None:
        require(self.rounds >= 0, "rounds", "must not be negative", self.rounds)
        require(0 <= self.seed < 2**63, "seed", "must be a whole number from 0 to 2^63 − 1", self.seed)
        require(self.clients_per_round >= 1, "clients_per_round", "must be at least 1", self.clients_per_round)
        for name in ("checkpoint_every", "threads", "evaluate_every", "evaluate_clients"):
            value = getattr(self, name)
            require(value is None or value >= 1, name, 'must be at least 1, or "none"', value)
        require_number("conformal", self.conformal, "(0, 1)", none="no conformal sets")
        from equipoise.client_metrics import PROVIDED
        from equipoise.models.linear import ERRORS_OF_NUMBERS

        named: dict[str, tuple[list[str], Iterable[str]]] = {
            "metrics": (self.metrics or [], PROVIDED),
            "error": ([] if self.error is None else [self.error], ERRORS_OF_NUMBERS),
            "loss": ([] if self.loss is None else [self.loss], ()),
        }
        for key, (names, known) in named.items():
            rule = f'must be an import path, "module:name"{", or one of " * bool(known)}{", ".join(known)}'
            for name in names:
                require(":" in name or name in known, key, rule, name, "Leave it out for that of the model.")
        columns = [metric_column(name) for name in self.metrics or ()]
        require(len(set(columns)) == len(columns), "metrics", "must have different names", self.metrics)
        used = catalog.part("engine", self.engine, where="train.engine").parameters
        for name in ("device", "chunk_size", "workers", "precision", "compiled"):
            value = getattr(self, name)
            require(value is None or name in used, name, f"is not used by the engine {self.engine!r}", value, "Leave it out.")

    @property
    def import_paths(self) -> dict[str, str]:
        """The functions of the user's own code by their import paths, each with the key that names it."""
        paths = {name: "train.metrics" for name in self.metrics or () if ":" in name}
        for name, path in (("error", self.error), ("loss", self.loss)):
            paths |= {path: f"train.{name}"} if path is not None and ":" in path else {}
        return paths

    def chosen_engine(self) -> Any:
        """The engine that these options describe, not yet started."""
        parameters, options = catalog.part("engine", self.engine).parameters, asdict(self)
        given = {name: options[name] for name in parameters if options.get(name) is not None}
        return PartConfig("engine", self.engine, given).make("train")


def check_train(table: Mapping[str, Any]) -> TrainOptions:
    """Check the section [train], and [train.stop] in it, key by key."""
    stop = table.get("stop", NONE)
    if stop != NONE and not isinstance(stop, Mapping):
        fix = 'Write [train.stop] and below it figure = "validation.error_90".'
        raise ConfigError(f"train.stop must be a section, but is {toml_text(stop)}. {fix}")
    made = {} if stop == NONE else {"stop": _checked(EarlyStopping, stop, "train.stop")}
    options: TrainOptions = _checked(
        TrainOptions, {key: value for key, value in table.items() if key != "stop"}, "train", **made
    )
    return options


def _checked(kind: Callable[..., Any], table: Mapping[str, Any], where: str, **made: Any) -> Any:
    """A dataclass of a section, whose keys and types of values are checked; `made` are values that are made already."""
    parameters = {p.name: catalog.read_parameter(p, p.name) for p in catalog.signature_of(kind).values()}
    refuse_unknown(table, parameters, where)
    for name, parameter in parameters.items():
        if parameter.required and name not in table:
            raise ConfigError(f"{where}.{name} is missing: it must be {parameter.rule}.")
    values = {key: check_value(value, parameters[key].annotation, f"{where}.{key}") for key, value in table.items()}
    with refusals_at(where, parameters, kind.__name__):
        return kind(**values, **made)
