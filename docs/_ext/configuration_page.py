"""The reference of configuration files, made from the schema that checks them."""

import dataclasses
import inspect
import re

from equipoise.experiment import catalog
from equipoise.experiment.config import SECTIONS
from equipoise.experiment.train_options import TrainOptions
from equipoise.experiment.values import type_text, value_text
from equipoise.runs.stopping import EarlyStopping


def _cell(text: str) -> str:
    return text.replace("|", "\\|").replace("\n", " ")


def _fields(owner: type) -> list[str]:
    from typing import get_type_hints

    hints, rows = get_type_hints(owner), []
    for field in dataclasses.fields(owner):
        if field.name == "stop":
            rows.append("| `stop` | section `[train.stop]` | none |")
            continue
        missing = field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING
        default = "required" if missing else f"`{value_text(field.default)}`"
        rows.append(f"| `{field.name}` | {_cell(type_text(hints[field.name]))} | {default} |")
    return rows


def _kind(kind: str) -> list[str]:
    lines = [f"### Kind: {kind}", "", _cell(catalog.KIND_HELP[kind])[0].upper() + _cell(catalog.KIND_HELP[kind])[1:] + ".", ""]
    for part in catalog.parts(kind):
        lines += [f'**`name = "{part.name}"`**: {_cell(part.summary)}', ""]
        rows = []
        for parameter in part.parameters.values():
            name, _, rest = parameter.text.partition(":")
            type_, _, default = rest.partition(" = ")
            rows.append(f"| `{name}` | {_cell(type_.strip())} | {f'`{default}`' if default else 'required'} |")
        lines += ["| key | value | default |", "|---|---|---|", *rows, ""] if rows else ["No parameters.", ""]
    return lines


def page() -> str:
    """The page."""
    about = {
        "data": "which clients there are", "model": "what is trained", "algorithm": "how it is trained, a part per key",
        "train": "rounds, cohorts, seed, engine", "attack": "what malicious training clients do",
        "family": "several models for the values of one knob",
    }  # fmt: skip
    rows = [f"| `[{name}]` | {about[name]} |" for name in SECTIONS]
    described = " ".join((inspect.getdoc(TrainOptions) or "").split("\n\n")[-1].split())
    lines = [
        "# Configuration files", "",
        "For people who run experiments from TOML files. After this page you know every section and every key, with its type and",
        "default, as the program checks them. An unknown key or a wrong value is refused by its dotted name, with the allowed",
        "ones.", "",
        "```toml", "[data]", 'name = "label_shift"', "[model]", 'name = "softmax"', "[algorithm.risk]", 'name = "superquantile"',
        "tail = 0.5", "[train]", "rounds = 300", "clients_per_round = 100", "seed = 0", "```", "",
        "| section | what it says |", "|---|---|", *rows, "",
        "A part is a table with its `name` and its parameters, or its name alone (`risk = \"mean\"`). `\"none\"` stands for",
        "Python's `None`. Paths are relative to the file.", "",
        "## `[train]`", "", "| key | value | default |", "|---|---|---|", *_fields(TrainOptions), "",
        re.sub(r"(?<!`)\[train\.stop\]", "`[train.stop]`", described), "",
        "### `[train.stop]`", "", "| key | value | default |", "|---|---|---|", *_fields(EarlyStopping), "",
        "## `[family]`", "", "| key | value |", "|---|---|", "| `tails` | list of numbers in (0, 1], one model each |",
        "| `qs` | list of numbers ≥ 0 |", "| `tilts` | list of numbers |", "", "## Parts", "",
    ]  # fmt: skip
    for kind in catalog.kinds():
        lines += _kind(kind)
    return "\n".join(lines)
