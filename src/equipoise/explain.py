"""Say how an engine does local work: which path, why not another, and what was measured."""

from __future__ import annotations

from torch import nn

from equipoise.algorithm import Algorithm
from equipoise.core.per_example_losses import PerExample
from equipoise.data.federated_data import FederatedData
from equipoise.round import Rounds
from equipoise.runs.setup import EngineChoice, Setting, set_up


def explain(
    model: nn.Module,
    data: FederatedData,
    algorithm: Algorithm | None = None,
    *,
    clients_per_round: int | None = None,
    loss: PerExample | None = None,
    engine: EngineChoice | str = "simulator",
) -> str:
    """A text that says which path trains `model` on `data` by `algorithm`, why others do not, and what was measured.

    One round is done for it, of `clients_per_round` clients (None: up to 20) drawn at random. Its result is dropped.

    >>> import equipoise as eq
    >>> data = eq.data.label_shift(seed=0)
    >>> text = eq.explain(eq.models.Softmax(data.features, data.classes), data)
    >>> [line.strip() for line in text.splitlines() if line.endswith(" taken")]
    ['linear blocks         taken']
    """
    algorithm = algorithm or Algorithm()
    count = min(20, len(data.train)) if clients_per_round is None else clients_per_round
    return explained(
        set_up(model, data, algorithm, rounds=1, clients_per_round=count, seed=0, loss=loss, error=None, engine=engine)
    )


def explained(setting: Setting) -> str:
    """How the engine of a run does local work, after one round whose result is dropped."""
    Rounds([setting])([setting.begin()])  # what is fastest is measured before the first round
    answer = setting.engine_traits.explain
    return answer(setting.algorithm) if answer is not None else "The loop engine trains one client after another."
