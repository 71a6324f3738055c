"""Several runs are checked before the first round of the first one, so that none is refused after hours of the others."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.data.clients import FederatedData
from equipoise.engines import Loop, Simulator
from equipoise.errors import EquipoiseError, without_notices
from equipoise.runs.setup import set_up

_OPTIONS = ("rounds", "clients_per_round", "loss", "error", "evaluate_clients", "metrics", "stop")


def refuse_unfit_methods(
    methods: Mapping[str, Algorithm], model: nn.Module, data: FederatedData, seed: int, options: Mapping[str, Any]
) -> None:
    """Set every method up with the model and the data, on the loop engine and without notices; no round is made.

    `options` are those of `train`. Engines that are not of this machine are left out: their data are elsewhere.
    """
    engine = options.get("engine", "simulator")
    if not isinstance(engine, str | Simulator | Loop):
        return
    given: dict[str, Any] = {"loss": None, "error": None} | {name: options[name] for name in _OPTIONS if name in options}
    for name, algorithm in methods.items():
        try:
            with without_notices():
                set_up(model, data, algorithm, seed=seed, engine="loop", **given).begin()
        except EquipoiseError as failure:
            failure.add_note(f"This was method {name!r}. No method was trained.")
            raise
