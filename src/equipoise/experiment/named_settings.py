"""Refusals of what `--set KEY=VALUE` gave: they name the setting, and the nearest key that there is."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import fields
from difflib import get_close_matches
from pathlib import Path
from typing import Any

from equipoise.errors import ConfigError
from equipoise.experiment.config_tables import read_toml
from equipoise.experiment.train_options import TrainOptions


@contextmanager
def naming_settings(path: str | Path, settings: Sequence[str]) -> Iterator[None]:
    """Add to a refusal of a key or value that a setting of the command line gave: the setting, and the nearest whole key."""
    try:
        yield
    except ConfigError as failure:
        for setting in settings:
            key, _, value = setting.partition("=")
            steps = [step.strip() for step in key.split(".")]
            unknown = [".".join(steps[:count]) for count in range(1, len(steps) + 1)]  # the first that is, or all of it
            if any(re.search(rf"(?:^|: ){re.escape(name)}: Unknown key", str(failure)) for name in unknown):
                near = _nearest_key(read_toml(path), steps, value)
                raise ConfigError(f"--set {setting}: {failure}{near}") from failure
            if re.search(rf"(?:^|: ){re.escape('.'.join(steps))}(?=[:. ])", str(failure)) and "Unknown key" not in str(failure):
                raise ConfigError(f"--set {setting}: {failure}") from failure
        raise


def _nearest_key(table: Mapping[str, Any], steps: Sequence[str], value: str) -> str:
    """What to write where the last step of an unknown key is that of a key elsewhere: of the file, or of [train]."""
    whole = [f"train.{field.name}" for field in fields(TrainOptions)]
    whole += [key for name, content in table.items() for key in _whole_keys(content, name)]
    by_end = {key.rpartition(".")[2]: key for key in whole}
    near = get_close_matches(steps[-1], by_end, n=1, cutoff=0.8)
    return f" Write --set {by_end[near[0]]}={value}" if near and by_end[near[0]] != ".".join(steps) else ""


def _whole_keys(content: Any, name: str) -> Iterator[str]:
    """The dotted keys of all values of a table."""
    if isinstance(content, Mapping):
        for key, inner in content.items():
            yield from _whole_keys(inner, f"{name}.{key}")
    else:
        yield name
