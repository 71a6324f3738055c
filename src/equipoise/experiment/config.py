"""The configuration of a run as TOML: read, checked key by key, made into parts, and written back with all defaults."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from importlib.metadata import version
from pathlib import Path
from platform import python_version
from typing import Any, Literal

from equipoise.errors import ConfigError
from equipoise.experiment import catalog, toml
from equipoise.experiment.config_tables import override, read_toml, refusals_at, refuse_unknown, section
from equipoise.experiment.own_code import CodeUse, Origin
from equipoise.experiment.part_config import NOWHERE, PartConfig, check_part, own_function
from equipoise.experiment.train_options import TrainOptions, check_train, metric_column
from equipoise.experiment.values import NONE, check_value, toml_text

Weights = Literal["examples", "uniform"]
SECTIONS = ("data", "model", "algorithm", "train", "attack", "family")
KNOBS = {"tails": "tail", "qs": "q", "tilts": "tilt"}  # the keys of [family], and the knobs that they turn
PYTHON = "python"  # the section of a run that `result.save` wrote: a record, which cannot be run


@dataclass(frozen=True)
class FamilyConfig:
    """The section [family]: one of tails, qs or tilts, with the values that models are trained for."""

    key: str
    values: tuple[float, ...]

    @classmethod
    def of(cls, table: Mapping[str, Any]) -> FamilyConfig:
        """The configuration of a family by its section, which is checked."""
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
    functions: dict[str, catalog.CatalogPart] = field(default_factory=dict, compare=False)  # own losses, errors, metrics

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
        """The configuration by nested tables, as TOML gives them, which are checked; `origin` is where they were read."""
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

    def error(self) -> Any:
        """The error by which clients are judged that the configuration names; None for the model's."""
        from equipoise.models.linear import ERRORS_OF_NUMBERS

        name = self.train.error
        return None if name is None else ERRORS_OF_NUMBERS[name] if name in ERRORS_OF_NUMBERS else self.functions[name].own

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
        parts_of_own: list[Any] = [*self._all_parts(), *self.functions.values()]
        code = {path: entry for each in parts_of_own for path, entry in each.code.items()}
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
