"""How long a round of a configured run would take on a cluster, with how much memory and traffic, and what limits it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from equipoise.core.memory import own_memory
from equipoise.engines.cluster.cost_measurement import MeasuredRound, measure_exchange, measure_round
from equipoise.engines.cluster.packing import pack
from equipoise.engines.cluster.ray_engine import Ray, RayEngine
from equipoise.engines.cluster.round_costs import Cluster, ExchangeCosts, RoundEstimate, estimate_round
from equipoise.rounds.driver_choice import choose_driver
from equipoise.runs.setup import set_up

if TYPE_CHECKING:
    from equipoise.experiment.build import PreparedRun


@dataclass(frozen=True)
class RunPlan:
    """What was measured on this machine, and the estimate for a cluster."""

    measured: MeasuredRound
    costs: ExchangeCosts
    cluster: Cluster
    data_bytes: int  # in the memory of every node; of a store on disk only names of files
    worker_bytes: int
    driver_bytes: int
    notes: tuple[str, ...] = ()

    @property
    def estimate(self) -> RoundEstimate:
        """The round on the cluster."""
        return estimate_round(self.measured.phases, self.costs, self.cluster)

    def lines(self) -> list[str]:
        """The plan for people."""
        found, here, cluster = self.estimate, estimate_round(self.measured.phases, self.costs, Cluster()), self.cluster
        phases, node = found.phases, self.data_bytes + cluster.workers_per_node * self.worker_bytes
        parts = {
            "local work": sum(phase.work for phase in phases),
            "calls": sum(phase.calls for phase in phases),
            "traffic": sum(phase.traffic for phase in phases),
            "driver": found.driver,
        }
        out, back = sum(phase.bytes_out for phase in phases), sum(phase.bytes_in for phase in phases)
        return [
            f"Measured here, one worker: {_seconds(self.measured.seconds)} a round (by the formula {_seconds(here.seconds)}).",
            f"Estimated for {cluster.nodes} nodes × {cluster.workers_per_node} workers: {_seconds(found.seconds)} a round, "
            f"{here.seconds / found.seconds:.1f} times as fast as one worker here.",
            *(f"  {phase.name}: {phase.pieces} pieces for {phase.busy} workers" for phase in phases),
            "  " + ", ".join(f"{name} {_seconds(value)}" for name, value in parts.items()),
            f"Traffic of the driver in a round: {_bytes(out)} out, {_bytes(back)} in.",
            f"Memory: {_bytes(node)} on a node ({_bytes(self.data_bytes)} of data, {_bytes(self.worker_bytes)} a worker), "
            f"{_bytes(self.driver_bytes)} at the driver.",
            f"What limits: {found.limit(cluster)}.",
            *self.notes,
        ]


def plan_run(
    experiment: PreparedRun, *, nodes: int, cpus_per_node: int, gpus_per_node: int = 0, gbit: float = 10.0, faster: float = 1.0
) -> RunPlan:
    """Measure rounds of a run by one worker of a local Ray, and estimate those of a cluster."""
    import torch

    options, notes = experiment.config.train, []
    on_gpu = gpus_per_node > 0 and torch.cuda.is_available()
    if gpus_per_node and not on_gpu:
        notes.append(f"This machine has no GPU: a worker is taken as one core here, times {faster:g} (--faster).")
    if nodes > 1 or gpus_per_node > 1:
        notes.append("Several machines and several GPUs are estimated, not measured.")
    engine = Ray("local", workers=2, device="cuda") if on_gpu else Ray("local", workers=2)
    setting = set_up(
        experiment.model, experiment.data, experiment.algorithm, rounds=options.rounds,
        clients_per_round=options.clients_per_round, seed=options.seed, loss=None, error=None, engine=engine,
    )  # fmt: skip
    running: RayEngine = setting.engine  # type: ignore[assignment]
    state, driver = setting.begin(), choose_driver([setting])

    def make_round() -> None:
        driver([state])  # the first round again and again: what it gives is dropped

    both = running.pool.sessions[running.session]
    running.pool.sessions[running.session] = both.of(1)
    try:
        measured = measure_round(running, make_round)
    finally:
        running.pool.sessions[running.session] = both
    costs = replace(measure_exchange(running), fixed=measured.driver)
    cluster = Cluster(nodes, gpus_per_node or cpus_per_node, gbit * 1e9 / 8, faster)
    return RunPlan(
        measured, costs, cluster, pack(experiment.data).size, running.pool.worker_memory(), own_memory(),
        tuple(notes),
    )  # fmt: skip


def _seconds(value: float) -> str:
    return f"{value:.2f} s" if value >= 1 else f"{1e3 * value:.1f} ms"


def _bytes(value: float) -> str:
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if value >= size:
            return f"{value / size:.1f} {unit}"
    return f"{value:.0f} bytes"
