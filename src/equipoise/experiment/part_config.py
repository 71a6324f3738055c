"""The configuration of a part: its name and parameters, checked key by key, made into the part, and written back."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from equipoise.errors import ConfigError
from equipoise.experiment import catalog
from equipoise.experiment.config_tables import refusals_at, refuse_unknown
from equipoise.experiment.own_code import Origin, own_failures
from equipoise.experiment.values import NONE, check_value, toml_text

FROM_DATA = ("features", "classes", "vocabulary")  # of a model: read from the data unless given
OBJECTS_FROM_DATA = ("schema", "embeddings")  # of a model: objects that the data give
NOWHERE = Origin()  # of tables without a file: paths stay as they are, and no code of the user's own runs


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
    def code(self) -> dict[str, Any]:
        """What the section [code] records of the code that this part and the parts in it are made of."""
        inner = [value for value in self.parameters.values() if isinstance(value, PartConfig)]
        for name, parameter in self.part.parameters.items():
            inner += [term for _, term in self.parameters.get(name, ())] if parameter.terms else []
        return dict(self.part.code) | {path: entry for part in inner for path, entry in part.code.items()}

    def make(self, where: str, **objects: Any) -> Any:
        """Make the part. What its constructor refuses becomes a ConfigError at the dotted key `where`."""
        values = dict(self.parameters)
        for name, value in values.items():
            if isinstance(value, PartConfig):
                values[name] = value.make(f"{where}.{name}")
            elif self.part.parameters[name].terms:
                values[name] = [(factor, inner.make(f"{where}.{name}[{i}]")) for i, (factor, inner) in enumerate(value)]
        own = own_failures(where, self.name) if self.own else nullcontext()
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
                written[name] = _without_null(value)
        return written


def _without_null(value: Any) -> Any:
    """A value with "none" for None, also inside lists: TOML has no null."""
    return [_without_null(inner) for inner in value] if isinstance(value, list) else NONE if value is None else value


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
    """A loss, error or metric of the user's own code, a function of (outputs, targets); admitted as parts of one's own are."""
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


def describe_part(kind: str, part: Any) -> dict[str, Any]:
    """A part of the catalogue as a configuration writes it; ConfigError for others."""
    if catalog.name_of(kind, part) == "mixture":
        return {"name": "mixture", "terms": [{"coefficient": c, **describe_part(kind, inner)} for c, inner in part.terms]}
    return config_of(kind, part).table()


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
