"""How many clients a secure sum needs, and which setting demands it."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING, NamedTuple

from equipoise.errors import IncompatibleParts

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.engines.flower.flower_engine import Federation


class Demand(NamedTuple):
    """The fewest clients that a secure sum may have, and the setting that says so."""

    clients: int
    setting: str


def find_demand(federation: Federation, clients: Collection[str], *, minimum: int, fewest: int = 2) -> Demand:
    """The strictest setting for a sum over these clients: the run's, the nodes' policies, or the protocol's own."""
    demands = [Demand(minimum, f"minimum = {minimum} of the run"), Demand(fewest, f"fewest = {fewest} of the run's privacy")]
    _, threshold = federation.choose_threshold(len(clients))
    kind = "signed sums with colluders" if federation.signed else "secure sums"
    demands.append(Demand(threshold, f"the protocol ({kind} need more than half of {len(clients)} clients)"))
    if clients:
        strictest = max(clients, key=lambda client: federation.members[client].minimum_crowd)
        crowd = federation.members[strictest].minimum_crowd
        demands.append(Demand(crowd, f"minimum_crowd = {crowd} in the policy of {strictest}"))
    return max(demands, key=lambda demand: demand.clients)


def check_crowd(federation: Federation, algorithm: Algorithm, clients_per_round: int) -> str | None:
    """What to say at the start of a run whose rounds need more clients than `minimum`; one that can have no sum is refused."""
    if not algorithm.traits.privacy.sums_alone:
        return None
    minimum, retries = federation.patience.minimum, federation.patience.retries
    strictest = sorted(federation.members, key=lambda client: -federation.members[client].minimum_crowd)
    demand = find_demand(federation, strictest[:clients_per_round], minimum=minimum)
    if demand.clients > clients_per_round:
        raise IncompatibleParts(
            f"A secure sum needs {demand.clients} clients by {demand.setting}, and a round has {clients_per_round}.",
            "Invite more nodes, or ask the owners to lower minimum_crowd in policy.toml, and begin a new run.",
        )
    if demand.clients <= minimum:
        return None
    return (
        f"minimum={minimum} has no effect: a secure sum needs {demand.clients} of {clients_per_round} clients by "
        f"{demand.setting}. A round with fewer is tried again {retries} times after {federation.patience.pause:g} s (retries, "
        "pause), and then the run stops."
    )
