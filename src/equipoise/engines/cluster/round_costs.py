"""How long a round over many workers takes, on paper: a formula of measured costs per call, byte, client and unit of work.

For a phase of a round (scoring the cohort, local work) with K clients on W workers of N nodes:

    T = latency + call · W + byte · (bytes out + bytes in) + most work of a worker / speed

and for a round the sum over its phases, plus what the driver does itself: fixed + client · K. The pieces of the cohort are
those that the engine cuts, so that the formula also knows workers for which there is no piece.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np

from equipoise.engines.cluster.packing import INLINE_BYTES
from equipoise.engines.cluster.pieces import PieceSize, piece_count, share_out, whole_nodes

COHORT_BYTES = 40  # of a client in a call: position, weight, inclusion, weight in the sum, and their wrapping
ANSWER_BYTES = 16  # of a client in an answer: norm and loss
Limit = Literal["local work", "calls", "traffic", "driver", "too few pieces"]


@dataclass(frozen=True)
class ExchangeCosts:
    """What an exchange between driver and workers takes, in seconds: the driver's part, one call after the other."""

    latency: float  # of an exchange, once per phase
    call: float  # per worker
    byte: float  # per byte that leaves or reaches the driver's process
    fixed: float = 0.0  # of a round at the driver, besides its phases
    client: float = 0.0  # of a round at the driver, per client of the cohort


@dataclass(frozen=True)
class PhaseWork:
    """One phase of a round: its cost in all (examples × parameters), how it is cut, and how fast a worker is."""

    name: str
    cost: float
    clients: int
    size: PieceSize
    speed: float  # cost per second of one worker
    model_bytes: int  # sent to workers
    sum_bytes: int = 0  # of one sum that a worker sends back
    row_bytes: int = 0  # of one client that is sent back besides its norm and loss

    @property
    def pieces(self) -> int:
        """How many pieces there are."""
        return piece_count(self.cost, self.clients, self.size)


@dataclass(frozen=True)
class Cluster:
    """A number of nodes, the workers of each, and the driver's link to them in bytes per second."""

    nodes: int = 1
    workers_per_node: int = 1
    link: float = float("inf")
    faster: float = 1.0  # how many times as fast a worker is as the one that was measured

    @property
    def workers(self) -> int:
        """Workers in all."""
        return self.nodes * self.workers_per_node


@dataclass(frozen=True)
class PhaseEstimate:
    """Seconds of a phase, by what they go to, and its traffic in bytes."""

    name: str
    work: float
    calls: float
    traffic: float
    bytes_out: int
    bytes_in: int
    busy: int  # workers that have a piece
    pieces: int

    @property
    def seconds(self) -> float:
        """In all."""
        return self.work + self.calls + self.traffic


@dataclass(frozen=True)
class RoundEstimate:
    """Seconds of a round, its phases, and what limits it."""

    phases: tuple[PhaseEstimate, ...]
    driver: float

    @property
    def seconds(self) -> float:
        """In all."""
        return self.driver + sum(phase.seconds for phase in self.phases)

    @property
    def traffic(self) -> int:
        """Bytes that leave and reach the driver in a round."""
        return sum(phase.bytes_out + phase.bytes_in for phase in self.phases)

    def limit(self, cluster: Cluster) -> Limit:
        """What takes most of the time; local work that further workers would not shorten is `too few pieces`."""
        parts: dict[Limit, float] = {
            "local work": sum(phase.work for phase in self.phases),
            "calls": sum(phase.calls for phase in self.phases),
            "traffic": sum(phase.traffic for phase in self.phases),
            "driver": self.driver,
        }
        largest = max(parts, key=lambda name: parts[name])
        if largest == "local work" and max(self.phases, key=lambda phase: phase.work).busy < cluster.workers:
            return "too few pieces"
        return largest


def estimate_phase(work: PhaseWork, costs: ExchangeCosts, cluster: Cluster) -> PhaseEstimate:
    """A phase on a cluster whose workers are alike."""
    pieces = work.pieces
    shares = [share for share in share_out(np.ones(pieces), [1.0] * min(cluster.workers, pieces)) if share[0] < share[1]]
    busy = len(shares)
    copies = busy if work.model_bytes <= INLINE_BYTES else min(cluster.nodes, busy)
    sums = sum(1 for share in shares for _ in whole_nodes((0, pieces), *share)) if work.sum_bytes else 0
    bytes_out = copies * work.model_bytes + COHORT_BYTES * work.clients
    bytes_in = sums * work.sum_bytes + work.clients * (work.row_bytes + ANSWER_BYTES)
    largest = max(last - first for first, last in shares) / pieces * work.cost
    byte = max(costs.byte, 1 / cluster.link)
    return PhaseEstimate(
        work.name, largest / (work.speed * cluster.faster), costs.latency + costs.call * busy, byte * (bytes_out + bytes_in),
        bytes_out, bytes_in, busy, pieces,
    )  # fmt: skip


def estimate_round(phases: list[PhaseWork], costs: ExchangeCosts, cluster: Cluster) -> RoundEstimate:
    """A round on a cluster.

    >>> work = PhaseWork("training", 1e9, 100, PieceSize(4e7, 6), speed=1e10, model_bytes=200_000, sum_bytes=200_000)
    >>> costs = ExchangeCosts(latency=0.001, call=0.001, byte=1e-9, fixed=0.001)
    >>> one, two = (estimate_round([work], costs, Cluster(1, count)) for count in (1, 2))
    >>> round(1e3 * one.seconds, 1), round(1e3 * two.seconds, 1), two.limit(Cluster(1, 2))
    (103.4, 54.8, 'local work')
    """
    clients = max(phase.clients for phase in phases)
    return RoundEstimate(tuple(estimate_phase(phase, costs, cluster) for phase in phases), costs.fixed + costs.client * clients)
