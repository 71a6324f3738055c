"""Notices on attacks that cannot show what a defence is worth: a pull of nearly 0, a mark that leaves nothing of an example."""

from __future__ import annotations

import math

from equipoise.attacks import ALIE, Backdoor
from equipoise.attacks.colluding import alie_factor
from equipoise.data.federated_data import FederatedData
from equipoise.errors import notify

_WEAK = 0.25  # of ALIE's z; the 5 attackers among 25 clients that papers have give 0.253


def tell_of_attack(data: FederatedData, clients_in_step: int) -> None:
    """Tell of malicious clients whose attack hardly acts, by the number of clients in a round or buffer."""
    attack = data.attack
    if not data.malicious:
        return
    if isinstance(attack, ALIE) and attack.factor is None:
        attackers = max(1, round(clients_in_step * len(data.malicious) / len(data.train)))
        if (z := alie_factor(clients_in_step, attackers)) < _WEAK:
            them = "1 attacker" if attackers == 1 else f"{attackers} attackers"
            notify(
                f"ALIE's factor z is {z:.2g} for about {them} among the {clients_in_step} clients of a round: they send "
                f"{'nearly ' * (z > 0)}the mean of the honest updates, and the attack hardly acts. Give a factor, e.g. "
                "attacks.ALIE(factor=1.5)."
            )
    if isinstance(attack, Backdoor):
        marked = attack.marked_leaves(data.train, data.classes)[0]
        shape = tuple(marked.shape[1:])
        if all(side <= attack.patch for side in shape[-2:]) and math.prod(shape) > 1:
            notify(
                f"The mark of the backdoor, patch={attack.patch}, covers whole inputs of shape {shape}: nothing of an example "
                "is left beside it. Take a smaller patch."
            )
