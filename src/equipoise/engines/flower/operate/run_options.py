"""The options of `equipoise flower run`: those of the app's pyproject.toml, and no others."""

from __future__ import annotations

from pathlib import Path

from equipoise.core.plain_text import parse_toml
from equipoise.engines.flower.flower_internals import read_node_config
from equipoise.errors import ConfigError, FileGuard, unknown_name


def refuse_unknown_options(folder: Path, text: str) -> None:
    """Refuse an option that the app does not have, and name it; Flower says only that the configuration is invalid."""
    example = 'rounds=100 clients=4 nodes="nodes.toml"'
    if text.strip().endswith(".toml") and "=" in text and not Path(text.strip()).exists():
        raise ConfigError(f"--run-config {text.strip()!r}: a text needs double quotes. Write options as in '{example}'.")
    if not text.strip() or text.strip().endswith(".toml"):  # Flower reads the file
        return
    file = folder / "pyproject.toml"
    with FileGuard(file, ConfigError, "has no [tool.flwr.app]", "Give the command in the folder of the app."):
        known = dict(parse_toml(file)["tool"]["flwr"]["app"].get("config", {}))
    try:
        given = read_node_config(text)
    except Exception as failure:  # of Flower's parser, which has its own kinds
        raise ConfigError(
            f"--run-config cannot be read: {failure}. A text needs double quotes. Write options as in '{example}'."
        ) from failure
    for key in given:
        if key not in known:
            where = f"They are below [tool.flwr.app.config] in {file}."
            raise ConfigError(f"{unknown_name('option of --run-config', key, known)} {where}")
