"""What a personalisation method may use in a round and after training."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from equipoise.attacks.malicious import corrupted
from equipoise.client_metrics import ClientMetrics
from equipoise.core import rng
from equipoise.core.abilities import attack_traits
from equipoise.core.task import Task
from equipoise.core.update_checks import as_local_work
from equipoise.data.clients import FederatedData
from equipoise.errors import notify
from equipoise.report.formats import listed
from equipoise.types import Cohort, Engine


@dataclass(frozen=True, eq=False)
class PersonalContext:
    """The engine of the run, its task and data, and a way to start an engine for another task."""

    engine: Engine
    task: Task
    data: FederatedData
    start: Callable[[Task], Engine]  # an engine of the same kind, on the same data, for another task
    metrics: ClientMetrics = field(default_factory=ClientMetrics)  # of the run

    @property
    def update_attack(self) -> bool:
        """Whether malicious clients send something else than what their work gives."""
        return bool(self.data.malicious) and attack_traits(self.data.attack).corrupt is not None

    def sent(self, cohort: Cohort, differences: Tensor, params: Tensor) -> Tensor:
        """What reaches the server of the differences (K, D) that clients send of their own models, besides w's updates.

        Those of malicious clients are as the attack makes them. What is not finite, or absurdly long, is left out: it counts as
        no difference, with a notice that names the client.
        """
        stream = rng.stream_key(cohort.seed, "batches", cohort.round)
        keys = rng.client_keys(stream, self.data.train.keys.cpu()[cohort.clients]).to(differences.device)
        arrived = corrupted(self.data, differences, cohort.clients, keys, len(cohort), cohort.shares, whole_cohort=True)
        lost = torch.isinf(as_local_work(arrived, params).sq_norms)
        if not bool(lost.any()):
            return arrived
        names = listed(list(self.data.train.ids_at(cohort.clients[lost])), 3)
        text = f"Round {cohort.round + 1}: the own model of {names} is not finite or absurdly far, and is left out of the rest."
        notify(text)
        return torch.where(lost.to(arrived.device).unsqueeze(1), 0.0, arrived)

    def own_stream(self, cohort: Cohort) -> Cohort:
        """The cohort with batches of its own: personal work does not see the batches of the shared model's work.

        Stragglers are slow at the shared model's work alone.
        """
        seed = rng.stream_key(cohort.seed, "personal") >> 1
        return replace(cohort, seed=seed).having(effort=None, rows=None)
