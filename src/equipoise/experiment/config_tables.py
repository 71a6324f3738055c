"""The tables of a configuration: read from TOML, with settings of the command line; unknown keys and refusals are named."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from equipoise.core.plain_text import parse_toml
from equipoise.errors import ConfigError, FileGuard, IncompatibleParts, InvalidParameter, unknown_name
from equipoise.experiment import catalog
from equipoise.experiment.values import toml_text


def read_toml(path: str | Path) -> dict[str, Any]:
    """The tables of a TOML file. What cannot be read is refused with the path, and wrong TOML with the line."""
    fix = "Name a TOML file, e.g. examples/tail.toml."
    if Path(path).suffix.lower() in (".csv", ".tsv", ".txt"):
        fix = f'A table is named in a TOML file, by [data] with name = "csv" and path = "{path}".'
    with FileGuard(path, ConfigError, cure=fix):
        return parse_toml(Path(path))


def _steps(key: str) -> list[str]:
    """The names along a dotted key; a name in double quotes may have dots in it, as in TOML.

    >>> _steps('data.kinds."visit no."'), _steps("train.seed")
    (['data', 'kinds', 'visit no.'], ['train', 'seed'])
    """
    try:
        found: Any = parse_toml(f"{key} = 0") if '"' in key else key
        steps = []
        while isinstance(found, dict):
            ((step, found),) = found.items()
            steps.append(step)
    except ValueError:
        steps = []
    return steps or [step.strip() for step in key.split(".")]


def override(table: dict[str, Any], overrides: Iterable[str]) -> dict[str, Any]:
    """The table with settings `a.b=value` applied. A value is TOML (3, 0.5, true, [1, 2], "text"), or else plain text."""
    for setting in overrides:
        key, equals, text = setting.partition("=")
        path = _steps(key)
        if not equals or not all(path):
            rule = "must have the form key=value, e.g. --set train.seed=3. A name with a dot in it needs double quotes, e.g."
            raise ConfigError(f"--set {setting} {rule} --set 'data.kinds.\"visit no.\"=left out'.")
        try:
            parsed = parse_toml(f"value = {text}")
        except ValueError:
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


@contextmanager
def naming_settings(settings: Sequence[str]) -> Iterator[None]:
    """Add to a refusal of a key or value that a setting of the command line, KEY=VALUE, gave: the setting."""
    try:
        yield
    except ConfigError as failure:
        for setting in settings:
            steps = [step.strip() for step in setting.partition("=")[0].split(".")]
            keys = "|".join(re.escape(".".join(steps[:count])) for count in range(1, len(steps) + 1))
            whole = re.escape(".".join(steps))
            if re.search(rf"(?:^|: )(?:(?:{keys}): Unknown key|{whole}(?=[:. ]))", str(failure)):
                raise ConfigError(f"--set {setting}: {failure}") from failure
        raise
