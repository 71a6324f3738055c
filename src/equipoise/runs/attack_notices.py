"""A notice on an attack that hardly acts, and so cannot show what a defence is worth."""

from __future__ import annotations

from equipoise.core.abilities import attack_traits
from equipoise.data.clients import FederatedData
from equipoise.errors import notify


def tell_of_attack(data: FederatedData, clients_in_step: int) -> None:
    """Tell why an attack hardly acts, if it knows a reason; `clients_in_step` is the number of clients of a round or buffer."""
    weakness = attack_traits(data.attack).weakness if data.malicious else None
    if weakness is None:
        return
    attackers = max(1, round(clients_in_step * len(data.malicious) / len(data.train)))
    if words := weakness(data.train, data.classes, attackers, clients_in_step):
        notify(words)
