"""Say how an engine does local work: which path, why not another, and what was measured."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from inspect import signature
from typing import Any

from equipoise.algorithm import Algorithm
from equipoise.core.per_example_losses import PerExample
from equipoise.data.clients import FederatedData
from equipoise.errors import nearest_name, require
from equipoise.rounds.driver_choice import choose_driver
from equipoise.runs.setup import DataOrMaker, EngineChoice, ModelOrMaker, Setting, build, refuse_swapped, set_up
from equipoise.train import train


def explain(
    model: ModelOrMaker,
    data: DataOrMaker,
    algorithm: Algorithm | None = None,
    *,
    clients_per_round: int | None = None,
    seed: int = 0,
    loss: PerExample | None = None,
    error: PerExample | None = None,
    engine: EngineChoice | str = "simulator",
    metrics: Mapping[str, Callable[[Any, Any], Any]] | None = None,
    **unused: Any,
) -> str:
    """A text that says which path trains `model` on `data` by `algorithm`, why others do not, and what was measured.

    One round is done for it, of `clients_per_round` clients (None: up to 20) drawn at random. Its result is dropped.
    `model` and `data` may be functions of the `seed`.

    `loss`, `error`, `engine` and `metrics` are those of `train`. So that the options of a run can be reused, the other options
    of `train`, such as `rounds` and `progress`, are taken, too (`unused`); they change nothing here.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(seed=0)
    >>> text = eq.explain(eq.models.Softmax(data.features, data.classes), data)
    >>> [line.strip() for line in text.splitlines() if line.endswith(" taken")]
    ['linear blocks         taken']
    """
    algorithm = algorithm or Algorithm()
    known = signature(train).parameters
    for name in unused:
        fix = nearest_name(name, known)
        require(name in known, name, "must be an option of train, which explain takes, too", unused[name], fix)
    refuse_swapped(model, data, "explain")
    data = build(data, seed, FederatedData, "data")
    count = min(20, len(data.train)) if clients_per_round is None else clients_per_round
    return explained(
        set_up(
            model, data, algorithm, rounds=1, clients_per_round=count, seed=seed, loss=loss, error=error, engine=engine,
            metrics=metrics,
        )
    )  # fmt: skip


def explained(setting: Setting) -> str:
    """How the engine of a run does local work, after one round whose result is dropped."""
    choose_driver([setting])([setting.begin()])  # what is fastest is measured before the first round
    answer = setting.engine_traits.explain
    return answer(setting.algorithm) if answer is not None else "The loop engine trains one client after another."
