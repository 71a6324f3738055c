"""Every part that a configuration can name, in one table (`catalog.toml`): kind → name → "module:class".

To offer a new part, add one line to the table. Parameters, types, defaults, summary and source are read from the signature
and the docstring of the part. A module is imported when one of its parts is first used.
"""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, dataclass, field, fields, is_dataclass
from functools import cached_property
from importlib import import_module
from pathlib import Path, PurePath
from types import UnionType
from typing import Any, Union, cast, get_args, get_origin, get_type_hints

from equipoise.core.plain_text import parse_toml
from equipoise.errors import ConfigError, unknown_name
from equipoise.experiment.values import in_toml, is_plain, type_text, value_text


@dataclass(frozen=True)
class Entry:
    """The class or function of a part, "module:name"; parameters that are fixed, or have another name in a configuration."""

    target: str
    fixed: Mapping[str, Any] = field(default_factory=dict)
    renamed: Mapping[str, str] = field(default_factory=dict)  # in Python → in a configuration
    options: str | None = None  # "module:name" of the function whose keywords the target takes as **options


_TABLE = parse_toml(Path(__file__).with_name("catalog.toml"))
CATALOG: dict[str, dict[str, Any]] = _TABLE["parts"]
FUNCTIONS: list[str] = _TABLE["functions"]
KIND_HELP: dict[str, str] = _TABLE["kinds"]
ALGORITHM_PARTS: dict[str, str] = _TABLE["algorithm"]["defaults"]
OPTIONAL_PARTS: list[str] = _TABLE["algorithm"]["optional"]
CONTRACTS: dict[str, str] = _TABLE["contracts"]


@dataclass(frozen=True)
class Parameter:
    """A parameter of a part, as a configuration gives it."""

    name: str
    python_name: str
    annotation: Any  # a type whose values TOML can hold; None where the parameter takes a part or terms
    default: Any = inspect.Parameter.empty
    terms: bool = False  # whether it takes terms, each a part with a coefficient
    part_kind: str | None = None  # the kind of part that it takes, if it takes one
    optional: bool = False  # whether None may stand in the part's place
    in_config: bool = True  # False: the value is an object that only Python code, or the data, can give
    is_path: bool = False  # whether it names a file or a folder

    @property
    def required(self) -> bool:
        """Whether the parameter has no default."""
        return self.default is inspect.Parameter.empty

    @property
    def type_text(self) -> str:
        """The type as a listing shows it, e.g. "int or none"."""
        if self.terms:
            return "list of {coefficient, name, …}"
        if self.part_kind:
            return f"a {self.part_kind}" + (" or none" if self.optional else "")
        return type_text(self.annotation) if self.in_config else "object"

    @property
    def rule(self) -> str:
        """What a value must be, as the end of a sentence."""
        if self.part_kind:
            return f"the name of a {self.part_kind}, or a table with its name and parameters"
        return "a list of terms" if self.terms else type_text(self.annotation, long=True)

    @property
    def text(self) -> str:
        """Name, type and default on one line."""
        if self.required:
            return f"{self.name}: {self.type_text}"
        default = name_of(self.part_kind, self.default) if self.part_kind and self.default is not None else self.default
        return f"{self.name}: {self.type_text} = {value_text(default)}"


@dataclass(frozen=True)
class CatalogPart:
    """A part by its configuration name; `parameters`, `summary` and `source` are read from the code."""

    kind: str
    name: str
    entry: Entry
    own: Callable[..., Any] | None = None  # the class or function, if it is the user's own and not of the catalogue
    code: Mapping[str, Any] = field(default_factory=dict)  # of such a part: what the section [code] records of it

    @cached_property
    def target(self) -> Callable[..., Any]:
        """The class or function itself; its module is imported now, unless it is the user's own."""
        return self.own or imported(self.entry.target)

    @cached_property
    def parameters(self) -> dict[str, Parameter]:
        """The parameters that a configuration can give, by name."""
        return {p.name: p for p in self.all_parameters if p.in_config}

    @cached_property
    def all_parameters(self) -> tuple[Parameter, ...]:
        """All parameters, also those that only Python code can give."""
        if self.own is not None:
            return tuple(map(read_own_parameter, own_signature(self.own)))
        named = dict(signature_of(self.target))
        if self.entry.options is not None:
            more = signature_of(imported(self.entry.options)).items()
            rest = {name: p for name, p in more if p.kind is p.KEYWORD_ONLY and name not in named}
            named = {name: p for name, p in named.items() if p.kind is not p.VAR_KEYWORD} | rest
        return tuple(
            read_parameter(p, self.entry.renamed.get(name, name)) for name, p in named.items() if name not in self.entry.fixed
        )

    @property
    def python_path(self) -> str:
        """The full name in Python, e.g. equipoise.risk.Superquantile."""
        return self.entry.target.replace(":", ".")

    @cached_property
    def summary(self) -> str:
        """The first line of the docstring, and the parameters that the catalogue fixes."""
        first = (inspect.getdoc(self.target) or "").strip().partition("\n")[0]
        fixed = ", ".join(f"{key} = {value_text(value)}" for key, value in self.entry.fixed.items())
        return f"{first} ({fixed})" if fixed else first

    @cached_property
    def source(self) -> str:
        """What follows `Source:` in the docstring, up to the end of its paragraph; empty if there is none."""
        match = re.search(r"\bSources?:\s*(.+?)(?:\n\s*\n|\Z)", inspect.getdoc(self.target) or "", re.DOTALL)
        return " ".join(match.group(1).split()) if match else ""

    def make(self, parameters: Mapping[str, Any], **objects: Any) -> Any:
        """Make the part from parameters of a configuration, and from `objects` that no configuration can hold."""
        names = {p.name: p for p in self.all_parameters}
        positional: list[Any] = []
        keywords: dict[str, Any] = {**self.entry.fixed, **objects}
        for name, value in parameters.items():
            if names[name].terms:
                positional = list(value)
            else:
                keywords[names[name].python_name] = Path(value) if names[name].is_path and value is not None else value
        return self.target(*positional, **keywords)


def imported(target: str) -> Callable[..., Any]:
    """The class or function "module:name" of the library."""
    module, _, attribute = target.partition(":")
    return cast(Callable[..., Any], getattr(import_module(module), attribute))


def own_signature(target: Callable[..., Any]) -> list[inspect.Parameter]:
    """The parameters of the user's own class or function, without *args and **kwargs."""
    try:
        found = signature_of(target)
    except NameError:  # types that are imported for type checkers only
        found = inspect.signature(target).parameters
    return [p for p in found.values() if p.kind not in (p.VAR_POSITIONAL, p.VAR_KEYWORD)]


def signature_of(target: Callable[..., Any]) -> Mapping[str, inspect.Parameter]:
    """The parameters of a callable by name, with types as annotations, and with the values of default factories."""
    if not is_dataclass(target):
        return inspect.signature(target, eval_str=True).parameters
    hints = get_type_hints(target)  # resolves inherited fields in the module of their own class, as a signature does not
    factories = {f.name: f.default_factory for f in fields(target) if f.default_factory is not MISSING}
    return {
        name: p.replace(annotation=hints.get(name, p.annotation), default=factories[name]() if name in factories else p.default)
        for name, p in inspect.signature(target).parameters.items()
    }


def kind_taken(annotation: Any) -> str | None:
    """The kind of part that a parameter of this type takes, if the type is (or may be) one of `CONTRACTS`; else None."""
    from equipoise import types

    choices = get_args(annotation) if get_origin(annotation) in (Union, UnionType) else (annotation,)
    return next((kind for name, kind in CONTRACTS.items() if getattr(types, name) in choices), None)


def read_own_parameter(parameter: inspect.Parameter) -> Parameter:
    """The description of a parameter of the user's own code; without a type it takes any value that TOML can hold."""
    if parameter.kind is parameter.POSITIONAL_ONLY:  # parts are made with keywords
        return Parameter(parameter.name, parameter.name, None, parameter.default, in_config=False)
    if parameter.annotation is parameter.empty or isinstance(parameter.annotation, str):
        plain = parameter.default is parameter.empty or is_plain(parameter.default)
        return Parameter(parameter.name, parameter.name, Any | None, parameter.default, in_config=plain)
    return read_parameter(parameter, parameter.name)


def read_parameter(parameter: inspect.Parameter, name: str) -> Parameter:
    """The description of a parameter of a signature; `name` is its name in a configuration."""
    if parameter.kind is inspect.Parameter.VAR_POSITIONAL:  # Mixture((0.3, Mean()), …)
        return Parameter(name, parameter.name, None, terms=True)
    if kind := kind_taken(parameter.annotation):
        optional = type(None) in get_args(parameter.annotation)
        return Parameter(name, parameter.name, None, parameter.default, part_kind=kind, optional=optional)
    choices = get_args(parameter.annotation) or (parameter.annotation,)
    if is_path := any(os.PathLike in (c, get_origin(c)) or (isinstance(c, type) and issubclass(c, PurePath)) for c in choices):
        annotation: Any = str | None if type(None) in choices else str
    else:
        annotation = in_toml(parameter.annotation)
    given = annotation is not None and name != "name"  # the key `name` is the name of the part
    return Parameter(name, parameter.name, annotation, parameter.default, in_config=given, is_path=is_path)


def kinds() -> tuple[str, ...]:
    """Every kind of part."""
    return tuple(CATALOG)


def names(kind: str) -> tuple[str, ...]:
    """The parts of one kind."""
    return tuple(CATALOG[kind])


def part(kind: str, name: str, *, where: str = "") -> CatalogPart:
    """The part of a kind by name. An unknown name is refused; `where` is the dotted key that the error names."""
    if name not in CATALOG[kind]:
        raise ConfigError((f"{where}: " if where else "") + unknown_name(kind, name, CATALOG[kind]))
    entry = CATALOG[kind][name]
    return CatalogPart(kind, name, Entry(entry) if isinstance(entry, str) else Entry(**entry))


def name_of(kind: str, instance: object) -> str:
    """The name of the part of a kind whose class `instance` has."""
    for candidate in parts(kind):
        if candidate.entry.target.endswith(f":{type(instance).__name__}") and candidate.target is type(instance):
            return candidate.name
    raise ConfigError(f"{type(instance).__name__} is no {kind} of the catalogue. Allowed: {', '.join(sorted(names(kind)))}.")


def parts(kind: str) -> Iterator[CatalogPart]:
    """Every part of a kind, in the order of the table."""
    return (part(kind, name) for name in CATALOG[kind])
