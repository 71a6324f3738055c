"""Whose checkpoint a file is: what a run must share with it to go on, what may differ with a word, and how that is said."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.core.dropout import STREAM
from equipoise.core.fingerprints import (
    fingerprint,
    module_code,
    module_structure,
    own_code,
    tensors_fingerprint,
    without_addresses,
)
from equipoise.core.named_constants import constants_of
from equipoise.errors import CheckpointError
from equipoise.privacy.lookers import data_to_try

if TYPE_CHECKING:
    from equipoise.runs.setup import Setting

START = "start weights"  # may differ: the checkpoint's hold
DROPOUT = "dropout"  # how its masks are drawn, of a model that has any
PYTHON = "version of Python"  # may differ: the code of functions is not compared then
STOP, NO_STOP = "rule of early stopping", "none"
METRICS = "metrics", "metrics' code"
_OF_CODE = ("model's code", "loss's code", "error's code", "algorithm's own code", METRICS[1])
_SEVERAL = (METRICS[0], "model's frozen parameters", "model's buffers", "training modes of frozen parts")
NOISE = "privacy"
CONSTANTS = "loss's constants"  # not compared: they say which one differs where the code of a loss does
_LONG = 120  # characters of a text that is shown whole


def identity_of(setting: Setting) -> dict[str, str]:
    """What a run must share with a checkpoint to go on from it, by name; the number of rounds may grow."""
    task, model = setting.task, setting.model
    noise = setting.protection.describe()
    frozen = [(name, value) for name, value in model.named_parameters() if not value.requires_grad]
    trained: list[tuple[str, Tensor]] = [(name, value) for name, value in model.named_parameters() if value.requires_grad]
    trained += [(name, value) for name, value in model.named_buffers() if name in task.carried.names]
    fixed = [(name, value) for name, value in model.named_buffers() if name not in task.carried.names]
    carried = f" and {task.carried.size} carried values" if task.carried.names else ""
    dropout = {DROPOUT: STREAM} if task.drops(data_to_try(setting.data, setting.algorithm)) else {}
    modes = {"training modes of frozen parts": fingerprint(task.frozen_modes)} if task.frozen_modes else {}
    return (
        ({NOISE: noise} if noise is not None else {})
        | ({STOP: repr(setting.stop)} if setting.stop is not None else {})
        | modes
        | dropout
        | {
            "algorithm": without_addresses(repr(setting.algorithm)),
            "data": f"{setting.data.name}, {len(setting.data.train)} clients, {setting.data.fingerprint}",
            "model": f"{type(model).__name__} with {task.layout.dimension} parameters{carried}",
            "loss": _name(task.loss),
            "clients_per_round": str(setting.clients_per_round),
            "seed": str(setting.seed),
            "model's structure": module_structure(model),
            "model's frozen parameters": tensors_fingerprint(frozen),
            "model's buffers": tensors_fingerprint(fixed),
            PYTHON: ".".join(platform.python_version_tuple()[:2]),
            "model's code": module_code(model),
            "loss's code": fingerprint(task.loss),
            CONSTANTS: json.dumps(constants_of(task.loss)),
            "error's code": fingerprint(task.error),
            "algorithm's own code": own_code(setting.algorithm),
            METRICS[0]: ", ".join(sorted(setting.metrics.functions)) or "none",
            METRICS[1]: fingerprint(dict(sorted(setting.metrics.functions.items()))),
            START: tensors_fingerprint(trained),
        }
    )


def run_key(setting: Setting) -> str:
    """A short name of a run in a ledger: runs with one name would release the same bits.

    A network gives its runs names of their own, drawn at random.
    """
    network = setting.engine_traits.network
    if network is not None:
        return network.run
    # Metrics release nothing, and constants are in the code.
    known = {name: value for name, value in identity_of(setting).items() if name not in (*METRICS, CONSTANTS)}
    return hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=8).hexdigest()


def _rounds_of_noise(described: str) -> str:
    """The number of rounds that noise is for, by what `describe` of its plan says; empty if it does not say it.

    >>> _rounds_of_noise("DifferentialPrivacy(…) with …, for 20 rounds")
    '20'
    """
    return described.rpartition(", for ")[2].removesuffix(" rounds") if described.endswith(" rounds") else ""


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def refuse_other_run(path: Path, saved: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """Refuse a checkpoint of another run, naming what differs; returns what to say of what may differ."""
    rules = {STOP: NO_STOP}  # what a file without it means
    saved, given = rules | dict(saved), rules | dict(given)
    notes, unknown = [], [name for name in given if name not in (*saved, CONSTANTS)]
    if DROPOUT in unknown:
        raise CheckpointError(
            f"{path} cannot be gone on from: the model has dropout, whose masks were drawn by torch's generator when it was "
            f"written; here they are {given[DROPOUT]}. Start a new run with another file."
        )
    # Of the noise last: what else differs, such as the number of bins, is why it does.
    for name, value in sorted(given.items(), key=lambda item: item[0] == NOISE):
        if name in (*unknown, PYTHON, CONSTANTS) or saved[name] == value:
            continue
        if name == START:
            notes.append("The model starts from other weights here than there; those of the checkpoint hold.")
            continue
        if name in _OF_CODE and saved.get(PYTHON) != given.get(PYTHON):
            continue
        if name in _OF_CODE:
            raise CheckpointError(
                f"{path} is the checkpoint of another run: {_other_code(name, saved, given)}. Give the same again, or start a "
                "new run with another file."
            )
        if name == NOISE:
            there, here = (_rounds_of_noise(text) for text in (saved[name], value))
            if there != here:
                raise CheckpointError(
                    f"{path} is the checkpoint of another run: its privacy is planned for {there} rounds, here for "
                    f"{here}. A private run keeps its number of rounds. Give rounds = {there} again, or start a new run with "
                    "another file."
                )
            there, here = _differing_parts(saved[name], value)
            raise CheckpointError(
                f"{path} is the checkpoint of another run: its noise is {there}, here it is {here}. Give the same privacy "
                "again, or start a new run with another file."
            )
        there, here = _differing_parts(saved[name], value)
        raise CheckpointError(
            f"{path} is the checkpoint of another run: its {name} {'are' if name in _SEVERAL else 'is'} {there}, here "
            f"{'they are' if name in _SEVERAL else 'it is'} {here}. Give the same again, or start a new run with another file."
        )
    if unknown:
        notes.append(f"It was written by an earlier version, so that these are not compared: {', '.join(unknown)}.")
    elif saved.get(PYTHON) != given.get(PYTHON):
        notes.append(f"It was written with Python {saved[PYTHON]}, so that the code of functions is not compared.")
    return notes


def _other_code(name: str, saved: Mapping[str, str], given: Mapping[str, str]) -> str:
    """A clause on code that differs: which constants of a loss, if that is known."""
    whose = "metrics" if name == METRICS[1] else name.removesuffix("'s code").removesuffix("'s own code")
    there, here = (json.loads(each.get(CONSTANTS, "{}")) if whose == "loss" else {} for each in (saved, given))
    differ = [key for key in here if key in there and there[key] != here[key]]
    if differ and there.keys() == here.keys():
        return " and ".join(f"in its loss {key} is {there[key]}, here it is {here[key]}" for key in differ[:3])
    return f"the code or a constant of its {whose} differs from what it is here"


def _differing_parts(first: str, second: str) -> tuple[str, str]:
    """Two long texts from where they begin to differ to where they are the same again, with some words around."""
    if max(len(first), len(second)) < _LONG:
        return first, second
    start = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    start = max(first.rfind("(", 0, start), first.rfind(", ", 0, start) + 1, 0)
    return tuple(f"…{text[start : start + 60].strip()}…" for text in (first, second))  # type: ignore[return-value]
