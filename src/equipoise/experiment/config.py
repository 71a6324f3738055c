"""The configuration of a run as TOML: read, checked key by key, made into parts, and written back with all defaults."""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, Literal

from equipoise.errors import ConfigError, IncompatibleParts, InvalidParameter, require, require_number, unknown_name
from equipoise.experiment import catalog, toml
from equipoise.experiment.origin import CodeUse, Origin
from equipoise.experiment.own_code import own_failures
from equipoise.experiment.values import NONE, check_value, toml_text
from equipoise.runs.stopping import EarlyStopping

Weights = Literal["examples", "uniform"]
SECTIONS = ("data", "model", "algorithm", "train", "attack", "family")
KNOBS = {"tails": "tail", "qs": "q", "tilts": "tilt"}  # the keys of [family], and the knobs that they turn
FROM_DATA = ("features", "classes", "vocabulary")  # of a model: read from the data unless given
OBJECTS_FROM_DATA = ("schema", "embeddings")  # of a model: objects that the data give
NOWHERE = Origin()  # of tables without a file: paths stay as they are, and no code of the user's own runs
PYTHON = "python"  # the section of a run that `result.save` wrote: a record, which cannot be run


@dataclass(frozen=True)
class PartConfig:
    """A part by name, with all its parameters.

    A parameter that takes a part holds a PartConfig; in a mixture's `terms` stand (coefficient, PartConfig) pairs.
    """

    kind: str
    name: str
    parameters: dict[str, Any] = field(default_factory=dict)
    own: catalog.CatalogPart | None = field(default=None, compare=False)  # the user's own part, which no catalogue has

    @property
    def part(self) -> catalog.CatalogPart:
        """The part's entry in the catalogue, or the user's own."""
        return self.own or catalog.part(self.kind, self.name)

    @property
    def files(self) -> dict[str, catalog.CodeFile]:
        """The files of the user's own code that this part and the parts in it are made of, by import path."""
        inner = [value for value in self.parameters.values() if isinstance(value, PartConfig)]
        for name, parameter in self.part.parameters.items():
            inner += [term for _, term in self.parameters.get(name, ())] if parameter.terms else []
        return dict(self.part.files) | {path: file for part in inner for path, file in part.files.items()}

    def make(self, where: str, **objects: Any) -> Any:
        """Make the part. What its constructor refuses becomes a ConfigError at the dotted key `where`."""
        values = dict(self.parameters)
        for name, value in values.items():
            if isinstance(value, PartConfig):
                values[name] = value.make(f"{where}.{name}")
            elif self.part.parameters[name].terms:
                values[name] = [(factor, inner.make(f"{where}.{name}[{i}]")) for i, (factor, inner) in enumerate(value)]
        own = own_failures(where, self.name, list(self.part.files.values())) if self.own else nullcontext()
        with refusals_at(where, self.part.parameters, self.name), own:
            return self.part.make(values, **objects)

    def table(self) -> dict[str, Any]:
        """The part as a TOML table."""
        written: dict[str, Any] = {"name": self.name}
        for name, parameter in self.part.parameters.items():  # in the order of the signature, whoever filled them in
            if name not in self.parameters:
                continue
            value = self.parameters[name]
            if parameter.terms:
                written[name] = [{"coefficient": coefficient, **inner.table()} for coefficient, inner in value]
            elif isinstance(value, PartConfig):
                written[name] = value.table()
            else:
                written[name] = NONE if value is None else value
        return written


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
    "module:name" of metrics of your own. `loss` is the import path of a loss of your own, (outputs, targets) → one number
    per example (None: the model's). `checkpoint_every` is in rounds (None: about every ten seconds). `threads` are torch's
    (None: torch's own choice; the folder of a run holds the number). `stop`, a section [train.stop], has the parameters of
    EarlyStopping. `attributes` names a CSV file with a row per client, its id first and then attributes by which reports
    show subgroups. `conformal` is ζ, the share of test examples that conformal sets may miss (None: no sets).
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
    attributes: str | None = None
    conformal: float | None = None
    stop: EarlyStopping | None = None

    def __post_init__(self) -> None:
        require(self.rounds >= 0, "rounds", "must not be negative", self.rounds)
        require(0 <= self.seed < 2**63, "seed", "must be a whole number from 0 to 2^63 − 1", self.seed)
        require(self.clients_per_round >= 1, "clients_per_round", "must be at least 1", self.clients_per_round)
        at_end = 'must be at least 1 round, or "none" to evaluate at the end only'
        rules = dict.fromkeys(("checkpoint_every", "threads"), 'must be at least 1, or "none"') | {"evaluate_every": at_end}
        rules["evaluate_clients"] = 'must be at least 1 client, or "none" for all clients'
        for name, rule in rules.items():
            value = getattr(self, name)
            require(value is None or value >= 1, name, rule, value)
        require_number("conformal", self.conformal, "(0, 1)", none="no conformal sets")
        if self.metrics:
            from equipoise.client_metrics import PROVIDED
        rule = "must be names of {}, or import paths of functions"
        for name in self.metrics or ():
            good = ":" in name or name in PROVIDED
            require(good, "metrics", rule.format(", ".join(PROVIDED)), name, 'Write "mymodule:f" for a metric of your own.')
        columns = [metric_column(name) for name in self.metrics or ()]
        require(len(set(columns)) == len(columns), "metrics", "must have different names", self.metrics)
        path_rule, fix = 'must be an import path, "module:name"', "Leave it out for the loss of the model."
        require(self.loss is None or ":" in self.loss, "loss", path_rule, self.loss, fix)
        known = catalog.part("engine", self.engine, where="train.engine").parameters
        for name in ("device", "chunk_size", "workers", "precision", "compiled"):
            value = getattr(self, name)
            require(value is None or name in known, name, f"is not used by the engine {self.engine!r}", value, "Leave it out.")

    @property
    def import_paths(self) -> dict[str, str]:
        """The functions of the user's own code by their import paths, each with the key that names it."""
        paths = {name: "train.metrics" for name in self.metrics or () if ":" in name}
        return paths | ({} if self.loss is None else {self.loss: "train.loss"})

    def chosen_engine(self) -> Any:
        """The engine that these options describe, not yet started."""
        parameters, options = catalog.part("engine", self.engine).parameters, asdict(self)
        given = {name: options[name] for name in parameters if options.get(name) is not None}
        return PartConfig("engine", self.engine, given).make("train")


@dataclass(frozen=True)
class FamilyConfig:
    """The section [family]: one of tails, qs or tilts, with the values that models are trained for."""

    key: str
    values: tuple[float, ...]

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> FamilyConfig:
        """Check the section."""
        refuse_unknown(table, KNOBS, "family")
        if len(table) != 1:
            raise ConfigError(f"[family] must have one of {', '.join(KNOBS)}, e.g. tails = [1.0, 0.5], but has {len(table)}.")
        ((key, given),) = table.items()
        if not isinstance(given, list) or not given:
            raise ConfigError(f"family.{key} must be a list of numbers, e.g. [1.0, 0.5], but is {toml_text(given)}.")
        values = tuple(check_value(value, float, f"family.{key}") for value in given)
        if len(set(values)) < len(values):
            raise ConfigError(f"family.{key} must be different numbers, but is {toml_text(given)}.")
        return cls(key, values)

    @property
    def knob(self) -> str:
        """What the family varies: "tail", "q" or "tilt"."""
        return KNOBS[self.key]

    def table(self) -> dict[str, Any]:
        """The section as a TOML table."""
        return {self.key: list(self.values)}


@dataclass(frozen=True)
class RunConfig:
    """A checked configuration. `build()` makes the parts; `text()` writes it complete."""

    data: PartConfig
    model: PartConfig
    parts: dict[str, PartConfig]  # of the algorithm, by kind; optional ones only if the configuration names them
    weights: Weights
    train: TrainOptions
    attack: PartConfig | None = None  # on the training clients
    family: FamilyConfig | None = None  # of models for several values of a knob; None: one model
    versions: dict[str, str] = field(default_factory=dict, compare=False)  # of the libraries that wrote the file, if any did
    functions: dict[str, catalog.CatalogPart] = field(default_factory=dict, compare=False)  # own losses and metrics, by path

    @classmethod
    def read(
        cls, path: str | Path, overrides: Iterable[str] = (), *, code: CodeUse = "never", trust: bool = False
    ) -> RunConfig:
        """Read a TOML file. `overrides`, each "key=value", are applied before anything is checked.

        `code` says whether code of the user's own may run, and `trust` whether it is trusted from now on: see `Origin.of`.
        """
        table = override(read_toml(path), overrides)
        return cls.of(table, Origin.of(path, table, code, trust=trust))

    @classmethod
    def of(cls, table: Mapping[str, Any], origin: Origin = NOWHERE) -> RunConfig:
        """Check nested tables, as TOML gives them, of a file at `origin`."""
        from equipoise.core.abilities import read
        from equipoise.types import RiskTraits

        if PYTHON in table:
            fix = "equipoise report reads its folder; train it in Python."
            raise ConfigError(f"[{PYTHON}] says that result.save wrote this file: a record, which cannot be run. {fix}")
        refuse_unknown(table, (*SECTIONS, "code", "versions"), "")
        train = check_train(section(table, "train"))
        algorithm = section(table, "algorithm", required=False)
        refuse_unknown(algorithm, (*catalog.ALGORITHM_PARTS, *catalog.OPTIONAL_PARTS, "weights"), "algorithm")
        parts: dict[str, PartConfig] = {}
        for kind in catalog.OPTIONAL_PARTS:
            if algorithm.get(kind, NONE) != NONE:
                parts[kind] = check_part(kind, algorithm[kind], f"algorithm.{kind}", origin=origin)
        private = "privacy" in parts and "clip" in parts["privacy"].parameters  # differential privacy has its own defaults
        for kind, default in catalog.ALGORITHM_PARTS.items():
            averaged = kind == "averaging" and read(RiskTraits, parts["risk"].make("algorithm.risk")).averaged
            name = "uniform" if averaged else "poisson" if private and kind == "sampler" else default
            parts[kind] = check_part(kind, algorithm.get(kind, {}), f"algorithm.{kind}", default=name, origin=origin)
        config = cls(
            check_part("data", section(table, "data"), "data", seed=train.seed, origin=origin),
            check_part("model", section(table, "model"), "model", seed=train.seed, origin=origin),
            parts,
            check_value(algorithm.get("weights", "uniform" if private else "examples"), Weights, "algorithm.weights"),
            train,
            check_part("attack", table["attack"], "attack", seed=train.seed, origin=origin)
            if table.get("attack", NONE) != NONE
            else None,
            FamilyConfig.of(section(table, "family")) if "family" in table else None,
            {k: check_value(v, str, f"versions.{k}") for k, v in section(table, "versions", required=False).items()},
            {path: own_function(path, where, origin) for path, where in train.import_paths.items()},
        )
        config.algorithm()  # values that break a part's own rule are refused here, before data are read
        return config

    def algorithm(self) -> Any:
        """The algorithm that the configuration describes, an equipoise.Algorithm."""
        from equipoise.algorithm import Algorithm

        parts = {kind: part.make(f"algorithm.{kind}") for kind, part in self.parts.items()}
        with refusals_at("algorithm", (), "parts"):
            return Algorithm(**parts, weights=self.weights)

    def loss(self) -> Any:
        """The loss of the user's own that the configuration names; None for the model's."""
        return None if self.train.loss is None else self.functions[self.train.loss].own

    def metrics(self) -> dict[str, Any]:
        """The metrics that the configuration names, by the names that results have for them."""
        from equipoise.client_metrics import PROVIDED

        given = self.train.metrics or ()
        return {metric_column(name): self.functions[name].own if ":" in name else PROVIDED[name] for name in given}

    def with_model(self, **parameters: Any) -> RunConfig:
        """The configuration with further parameters of the model."""
        return replace(self, model=replace(self.model, parameters={**self.model.parameters, **parameters}))

    def table(self) -> dict[str, Any]:
        """The configuration as nested TOML tables, with the versions of the installed libraries."""
        parts = {kind: part.table() for kind, part in self.parts.items()}
        left_out = {kind: NONE for kind in catalog.OPTIONAL_PARTS if kind not in self.parts}
        files = [part.files for part in self._all_parts()] + [dict(own.files) for own in self.functions.values()]
        code = {path: asdict(file) for each in files for path, file in each.items()}
        return {
            "data": self.data.table(),
            "model": self.model.table(),
            "attack": self.attack.table() if self.attack is not None else NONE,
            "algorithm": {"weights": self.weights, **left_out, **parts},
            "train": self.train.table(),
            **({"family": self.family.table()} if self.family is not None else {}),
            **({"code": code} if code else {}),
            "versions": installed_versions("equipoise", "torch", "numpy"),
        }

    def _all_parts(self) -> list[PartConfig]:
        return [self.data, self.model, *self.parts.values(), *([self.attack] if self.attack is not None else [])]

    def text(self) -> str:
        """The configuration as TOML with every default. Reading it back gives an equal configuration."""
        return toml.dumps(self.table())


def installed_versions(*names: str) -> dict[str, str]:
    """The versions of installed libraries, and of Python."""
    return {name: version(name) for name in names} | {"python": python_version()}


@contextmanager
def refusals_at(where: str, known: Iterable[str], name: str) -> Iterator[None]:
    """Turn what a part refuses (InvalidParameter, IncompatibleParts) into a ConfigError at the dotted key `where`.

    `known` are the parameters that are keys of the configuration; `name` is the name of the part.
    """
    try:
        yield
    except InvalidParameter as failure:
        if failure.parameter not in known:
            raise ConfigError(f"{where} ({name}): {failure}") from failure
        fix = f" {failure.fix}" if failure.fix else ""
        raise ConfigError(f"{where}.{failure.parameter} {failure.rule}, but is {toml_text(failure.value)}.{fix}") from failure
    except IncompatibleParts as failure:
        raise ConfigError(f"{where} ({name}): {failure}") from failure


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. What cannot be read is refused with the path, and wrong TOML with the line."""
    try:
        return tomllib.loads(Path(path).read_text(encoding="utf-8-sig"))
    except FileNotFoundError as failure:
        raise ConfigError(f"{path} does not exist. Name a TOML file, e.g. examples/tail.toml.") from failure
    except UnicodeDecodeError as failure:
        raise ConfigError(f"{path} is not a text file in UTF-8: {failure}.") from failure
    except OSError as failure:
        raise ConfigError(f"{path} cannot be read: {failure.strerror}.") from failure
    except tomllib.TOMLDecodeError as failure:
        raise ConfigError(f"{path} is not valid TOML: {failure}.") from failure


def override(table: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The table with settings `a.b=value` applied. A value is TOML (3, 0.5, true, [1, 2], "text"), or else plain text."""
    for setting in overrides:
        key, equals, text = setting.partition("=")
        path = [step.strip() for step in key.split(".")]
        if not equals or not all(path):
            raise ConfigError(f"--set {setting} must have the form key=value, e.g. --set train.seed=3.")
        try:
            parsed = tomllib.loads(f"value = {text}")
        except tomllib.TOMLDecodeError:
            parsed = {}
        value = parsed["value"] if parsed.keys() == {"value"} else text.strip()
        table = with_value(table, path, value, f"--set {setting}")
    return table


def with_value(table: Mapping[str, Any], path: Sequence[str], value: Any, origin: str) -> dict[str, Any]:
    """The table with a value at a path of keys; `origin` is where the path was given, for the error."""
    first, *rest = path
    if not rest:
        return {**table, first: value}
    inner = table.get(first, {})
    if isinstance(inner, str):  # risk = "mean" is short for risk.name = "mean"
        inner = {"name": inner}
    if not isinstance(inner, Mapping):
        raise ConfigError(f"{origin}: {first} is {toml_text(inner)}, so it has no key {'.'.join(rest)!r}.")
    return {**table, first: with_value(inner, rest, value, origin)}


def section(table: Mapping[str, Any], name: str, *, required: bool = True) -> Mapping[str, Any]:
    """A section of a configuration; empty if it is absent and not required."""
    if name not in table:
        if required:
            raise ConfigError(f"The configuration has no [{name}] section. It needs [data], [model] and [train].")
        return {}
    content = table[name]
    if isinstance(content, str) and name in catalog.CATALOG:
        return {"name": content}
    if not isinstance(content, Mapping):
        raise ConfigError(f"{name} must be a section, [{name}], but is {toml_text(content)}.")
    return content


def refuse_unknown(table: Mapping[str, Any], allowed: Iterable[str], where: str) -> None:
    """Refuse a key that is not allowed; the error names the nearest allowed key, and all of them."""
    allowed = tuple(allowed)
    for key in table:
        if key not in allowed:
            raise ConfigError(f"{where + '.' if where else ''}{key}: " + unknown_name("key", key, allowed))


def check_part(
    kind: str,
    table: Any,
    where: str,
    *,
    default: str | None = None,
    seed: int | None = None,
    origin: Origin = NOWHERE,
) -> PartConfig:
    """Check the table of a part: its name, keys and the types of values; defaults are filled in, paths made absolute.

    A bare text is short for a table with only that name. `seed` is the seed of the run, the default for a part that takes one.
    `origin` is where the table was read.
    """
    table = {"name": table} if isinstance(table, str) else table
    if not isinstance(table, Mapping):
        raise ConfigError(f"{where} must be a table with a name and parameters, but is {toml_text(table)}.")
    name = table.get("name", default)
    if name is None:
        raise ConfigError(f"{where}.name is missing. Allowed: {', '.join(sorted(catalog.names(kind)))}.")
    part = named_part(kind, check_value(name, str, f"{where}.name"), f"{where}.name", origin)
    if "name" not in table and (stranger := next((key for key in table if key not in part.parameters), None)):
        takers = [n for n in catalog.names(kind) if stranger in catalog.part(kind, n).parameters]
        if takers:
            raise ConfigError(f'{where}.{stranger} is a parameter of {" and ".join(takers)}: add name = "{takers[0]}".')
    refuse_unknown(table, ("name", *part.parameters), where)
    values: dict[str, Any] = {}
    for key, parameter in part.parameters.items():
        if key in table and parameter.terms:
            values[key] = check_terms(table[key], kind, f"{where}.{key}", origin)
        elif key in table and parameter.part_kind:
            values[key] = check_inner(table[key], parameter, f"{where}.{key}", origin)
        elif key in table:
            value = check_value(table[key], parameter.annotation, f"{where}.{key}")
            values[key] = origin.path(value) if parameter.is_path and value is not None else value
        elif kind == "model" and key in (*FROM_DATA, *OBJECTS_FROM_DATA) and (parameter.required or part.own is None):
            continue
        elif key == "seed" and seed is not None:
            values[key] = seed
        elif parameter.required:
            raise ConfigError(f"{where}.{key} is missing: {part.name} needs it, {parameter.rule}.")
        else:
            values[key] = as_config(parameter.default, parameter)
    return PartConfig(kind, part.name, values, part if part.own is not None else None)


def named_part(kind: str, name: str, where: str, origin: Origin) -> catalog.CatalogPart:
    """A part of the catalogue, or of the user's own code if the name is an import path, "module:name"."""
    if ":" not in name:
        return catalog.part(kind, name, where=where)
    if origin.code is None:
        fix = "Only equipoise run, compare and tune run it."
        raise ConfigError(f"{where}: {name} is code of the user's own, which is not run here. {fix}")
    part = origin.code.part(kind, name, where)
    for parameter in part.all_parameters:
        from_data = kind == "model" and parameter.name in OBJECTS_FROM_DATA
        if parameter.required and not parameter.in_config and not from_data:
            why = "the key name is taken" if parameter.name == "name" else "no value of TOML fits it"
            raise ConfigError(f"{where}: {name} needs {parameter.name}, but {why}. Give it a default in your code.")
    return part


def own_function(import_path: str, where: str, origin: Origin) -> catalog.CatalogPart:
    """A loss or a metric of the user's own code, a function of (outputs, targets); admitted as parts of one's own are."""
    if origin.code is None:
        fix = "Only equipoise run, compare and tune run it."
        raise ConfigError(f"{where}: {import_path} is code of the user's own, which is not run here. {fix}")
    part = origin.code.part("function", import_path, where)
    if isinstance(part.own, type):
        raise ConfigError(f"{where}: {import_path} must be a function of (outputs, targets), but is a class.")
    return part


def as_config(value: Any, parameter: catalog.Parameter) -> Any:
    """A default of a signature as a configuration holds it: parts by name, tuples as lists, mappings as tables.

    A configuration must equal what is read back from its text.
    """
    return config_of(parameter.part_kind, value) if parameter.part_kind and value is not None else _lists(value)


def config_of(kind: str, instance: Any) -> PartConfig:
    """The configuration of a part that was made in Python, from its class and attributes."""
    part = catalog.part(kind, catalog.name_of(kind, instance))
    values = {name: as_config(getattr(instance, p.python_name), p) for name, p in part.parameters.items()}
    return PartConfig(kind, part.name, values)


def _lists(value: Any) -> Any:
    """Tuples, however deep, as lists; any mapping as a dict."""
    if isinstance(value, Mapping):
        return {key: _lists(inner) for key, inner in value.items()}
    return [_lists(inner) for inner in value] if isinstance(value, tuple) else value


def check_inner(table: Any, parameter: catalog.Parameter, where: str, origin: Origin) -> PartConfig | None:
    """Check a parameter that takes a part. A table without a name changes parameters of the default part."""
    kind = parameter.part_kind or ""
    default = catalog.ALGORITHM_PARTS.get(kind)
    if parameter.optional and table == NONE:
        return None
    if isinstance(table, Mapping) and "name" not in table and not parameter.required and parameter.default is not None:
        given = config_of(kind, parameter.default).table()
        default = given.pop("name")
        table = {**given, **table}
    return check_part(kind, table, where, default=default, origin=origin)


def check_terms(terms: Any, kind: str, where: str, origin: Origin) -> tuple[tuple[float, PartConfig], ...]:
    """Check the terms of a mixture: tables with a coefficient and a part."""
    if not isinstance(terms, list) or not all(isinstance(term, Mapping) for term in terms):
        shape = 'a list of tables such as {coefficient = 0.3, name = "mean"}'
        raise ConfigError(f"{where} must be {shape}, but is {toml_text(terms)}.")
    checked = []
    for i, term in enumerate(terms):
        here = f"{where}[{i}]"
        if "coefficient" not in term:
            raise ConfigError(f"{here}.coefficient is missing: each term needs a positive number.")
        coefficient = check_value(term["coefficient"], float, f"{here}.coefficient")
        inner = {key: value for key, value in term.items() if key != "coefficient"}
        checked.append((coefficient, check_part(kind, inner, here, origin=origin)))
    return tuple(checked)


def check_train(table: Mapping[str, Any]) -> TrainOptions:
    """Check the section [train] key by key."""
    parameters = {p.name: catalog.read_parameter(p, p.name) for p in catalog.signature_of(TrainOptions).values()}
    refuse_unknown(table, parameters, "train")
    for parameter in parameters.values():
        if parameter.required and parameter.name not in table:
            raise ConfigError(f"train.{parameter.name} is missing: it must be {parameter.rule}.")
    plain = {key: value for key, value in table.items() if key != "stop"}
    values = {key: check_value(value, parameters[key].annotation, f"train.{key}") for key, value in plain.items()}
    with refusals_at("train", parameters, "options"):
        return TrainOptions(**values, stop=check_stop(table.get("stop", NONE)))


def check_stop(table: Any) -> EarlyStopping | None:
    """Check the section [train.stop]; None without one."""
    if table == NONE:
        return None
    if not isinstance(table, Mapping):
        fix = 'Write [train.stop] and below it figure = "validation.error_90".'
        raise ConfigError(f"train.stop must be a section, but is {toml_text(table)}. {fix}")
    parameters = {p.name: catalog.read_parameter(p, p.name) for p in catalog.signature_of(EarlyStopping).values()}
    refuse_unknown(table, parameters, "train.stop")
    values = {key: check_value(value, parameters[key].annotation, f"train.stop.{key}") for key, value in table.items()}
    with refusals_at("train.stop", parameters, "EarlyStopping"):
        return EarlyStopping(**values)
