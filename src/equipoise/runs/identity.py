"""Whose checkpoint a file is: what a run must share with it to go on, what may differ with a word, and how that is said."""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING

from torch import Tensor

from equipoise.core.dropout import STREAM
from equipoise.core.fingerprints import fingerprint, tensors_fingerprint, without_addresses
from equipoise.errors import CheckpointError
from equipoise.privacy.lookers import data_to_try

if TYPE_CHECKING:
    from equipoise.runs.setup import Setting

START = "start weights"  # may differ: the checkpoint's hold
DROPOUT = "dropout"  # how its masks are drawn, of a model that has any
PYTHON = "version of Python"  # may differ: the code of functions is not compared then
STOP = "rule of early stopping"
METRICS = "metrics", "metrics' code"
_OF_CODE = ("model's code or attributes", "loss's code", "error's code", "algorithm's own code", METRICS[1])
NOISE = "privacy"
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
    # With noise strictly: it must not be drawn again for another function.
    constant = partial(fingerprint, trained=task.trained_in(model), strict=setting.noise is not None)
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
            "model's structure": without_addresses(repr(model)),
            "model's frozen parameters": tensors_fingerprint(frozen),
            "model's buffers": tensors_fingerprint(fixed),
            PYTHON: ".".join(platform.python_version_tuple()[:2]),
            "model's code or attributes": constant(model),
            "loss's code": constant(task.loss),
            "error's code": constant(task.error),
            "algorithm's own code": constant(setting.algorithm),
            METRICS[0]: ", ".join(sorted(setting.metrics.functions)) or "none",
            METRICS[1]: constant(dict(sorted(setting.metrics.functions.items()))),
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
    return digest_of(identity_of(setting), METRICS).hex()  # which release nothing


def digest_of(identity: Mapping[str, str], without: Sequence[str]) -> bytes:
    """Eight bytes that stand for an identity, without the names of what may differ."""
    known = {name: value for name, value in identity.items() if name not in without}
    return hashlib.blake2b(json.dumps(known, sort_keys=True).encode(), digest_size=8).digest()


def _name(function: object) -> str:
    return str(getattr(function, "__qualname__", type(function).__name__))


def refuse_other_run(path: Path, saved: Mapping[str, str], given: Mapping[str, str]) -> list[str]:
    """Refuse a checkpoint of another run, naming what differs; returns what to say of what may differ."""
    other_python, notes = saved.get(PYTHON, given.get(PYTHON)) != given.get(PYTHON), []
    for name in sorted({**given, **saved}, key=lambda name: (name == NOISE, name in _OF_CODE)):  # last what others change, too
        there, here = saved.get(name, "nothing"), given.get(name, "nothing")
        if there == here or (name == PYTHON and other_python) or (name in _OF_CODE and other_python):
            continue
        if name == START and name in saved:
            notes.append("The model starts from other weights here than there; those of the checkpoint hold.")
            continue
        there, here = _from_where_they_differ(there, here)
        raise CheckpointError(
            f"{path} is the checkpoint of another run, which differs in {name}: {there} there, {here} here. "
            "Give the same again, or start a new run with another file."
        )
    return [*notes, f"It was written with Python {saved[PYTHON]}: code is not compared."] if other_python else notes


def _from_where_they_differ(first: str, second: str) -> tuple[str, str]:
    """Two texts; of long ones some words from where they begin to differ."""
    if max(len(first), len(second)) < _LONG:
        return first, second
    same = next((i for i, (a, b) in enumerate(zip(first, second, strict=False)) if a != b), min(len(first), len(second)))
    start = max(same - 20, 0)
    return f"…{first[start : start + 80]}…", f"…{second[start : start + 80]}…"
