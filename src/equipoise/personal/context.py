"""What a personalisation method may use in a round and after training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from equipoise.client_metrics import ClientMetrics
from equipoise.core import rng
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.types import Cohort, Engine


@dataclass(frozen=True, eq=False)
class PersonalContext:
    """The engine of the run, its task and data, and a way to start an engine for another task."""

    engine: Engine
    task: Task
    data: FederatedData
    start: Callable[[Task], Engine]  # an engine of the same kind, on the same data, for another task
    metrics: ClientMetrics = field(default_factory=ClientMetrics)  # of the run

    def own_stream(self, cohort: Cohort) -> Cohort:
        """The cohort with batches of its own: personal work does not see the batches of the shared model's work."""
        seed = rng.stream_key(cohort.seed, "personal") >> 1
        return Cohort(cohort.round, seed, cohort.clients, cohort.weights, cohort.inclusion)
