"""Predicted round times on clusters of 1 … 128 nodes for 10³ … 10⁷ clients, from costs that are measured here.

    python benchmarks/cluster_plan.py measure benchmarks/cluster_costs.json    # a minute: one worker of Ray, three workloads
    python benchmarks/cluster_plan.py check benchmarks/cluster_costs.json      # prediction and clock, one and two workers
    python benchmarks/cluster_plan.py plot benchmarks/cluster_costs.json docs/images/scale.png    # picture and tables

The formula is that of `equipoise.engines.cluster.round_costs`. All clients take part in every round, nodes have eight workers
of the speed measured here, and the driver a network of 10 Gbit/s: several machines were not measured.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
import warnings
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import torch
import zoo
from machine import describe_machine

import equipoise as eq
from equipoise.engines import Ray
from equipoise.engines.cluster.cost_measurement import measure_exchange, measure_round
from equipoise.engines.cluster.pieces import PieceSize
from equipoise.engines.cluster.ray_extra import connect
from equipoise.engines.cluster.round_costs import Cluster, ExchangeCosts, PhaseWork, RoundEstimate, estimate_round
from equipoise.rounds.drivers import InTurn
from equipoise.runs.setup import set_up
from models import data_of

NODES = [2**power for power in range(8)]
CLIENTS = [10**power for power in range(3, 8)]
WORKERS_PER_NODE, LINK = 8, 10e9 / 8


def random_clients(count: int, examples: int, shape: tuple[int, ...], classes: int, tokens: int = 0) -> eq.FederatedData:
    gen = torch.Generator().manual_seed(0)
    parts = []
    for k in range(count):
        x = (
            torch.randint(0, tokens, (examples, *shape), generator=gen)
            if tokens
            else torch.rand(examples, *shape, generator=gen)
        )
        parts.append((f"c{k}", x, torch.randint(0, classes, (examples,), generator=gen)))
    return eq.FederatedData(eq.ClientSet.pack(parts), classes=classes, name="random")


def workload(name: str) -> tuple[Any, eq.FederatedData, eq.Algorithm]:
    """Model, data and algorithm, with few clients: the formula scales what they take."""
    if name == "linear":
        return eq.models.Softmax(784, 62), random_clients(100, 100, (784,), 62), eq.Algorithm()
    if name == "ConvNet":
        return eq.models.ConvNet(), random_clients(12, 160, (1, 28, 28), 62), eq.Algorithm(solver=eq.solvers.SGD(batch_size=16))
    entry = zoo.ZOO["LoRA decoder"]
    return entry.model(), data_of(entry, 2), eq.Algorithm(solver=eq.solvers.SGD(lr=0.05, batch_size=entry.batch))


class Rounder:
    """Makes rounds of a workload on Ray."""

    def __init__(self, name: str, workers: int = 2) -> None:
        model, data, algorithm = workload(name)
        self.setting = set_up(
            model, data, algorithm, rounds=10**6, clients_per_round=len(data.train), seed=0, error=None,
            loss=zoo.loss_of if name == "LoRA decoder" else None, engine=Ray(workers=workers),
        )  # fmt: skip
        self.engine, self.rounds, self.state = self.setting.engine, InTurn([self.setting]), self.setting.begin()

    def __call__(self) -> None:
        self.rounds([self.state])

    def use(self, workers: int) -> None:
        sessions = self.engine.pool.sessions
        sessions[self.engine.session] = sessions[self.engine.session].of(workers)

    def seconds(self, seconds: float) -> float:
        """The median round."""
        self()
        times, until = [], time.perf_counter() + seconds
        while len(times) < 3 or time.perf_counter() < until:
            began = time.perf_counter()
            self()
            times.append(time.perf_counter() - began)
        return statistics.median(times)


def per_client_cost(exchange: ExchangeCosts) -> ExchangeCosts:
    """What the driver does in a round, fixed and per client: of cohorts of 1,000 and 50,000 tiny clients."""
    found = {}
    for count in (1_000, 50_000):
        x, y = torch.rand(count, 2), torch.randint(0, 2, (count,))
        data = eq.data.from_arrays(x, y, [f"c{k}" for k in range(count)], test=0.0)
        setting = set_up(
            eq.models.Softmax(2, 2), data, eq.Algorithm(), rounds=10**6, clients_per_round=count, seed=0, loss=None, error=None,
            engine=Ray(workers=1),
        )  # fmt: skip
        rounds, state, engine = InTurn([setting]), setting.begin(), setting.engine
        measured = measure_round(engine, lambda rounds=rounds, state=state: rounds([state]), seconds=2.0)
        found[count] = measured.seconds - estimate_round(measured.phases, exchange, Cluster()).seconds
    slope = max(0.0, (found[50_000] - found[1_000]) / 49_000)
    return replace(exchange, fixed=max(0.0, found[1_000] - 1_000 * slope), client=slope)


def measure(file: Path) -> None:
    kept: dict[str, Any] = {"machine": describe_machine("cpu", os.cpu_count() or 1), "workloads": {}}
    for name in ("linear", "ConvNet", "LoRA decoder"):
        rounder = Rounder(name)
        rounder.use(1)
        measured = measure_round(rounder.engine, rounder, seconds=4.0)
        rounder.use(2)
        kept["workloads"][name] = {"phases": [asdict(phase) for phase in measured.phases], "driver": measured.driver}
        print(name, *measured.phases, f"{1e3 * measured.seconds:.1f} ms", flush=True)
    kept["exchange"] = asdict(per_client_cost(measure_exchange(rounder.engine)))
    print(kept["exchange"], flush=True)
    file.write_text(json.dumps(kept, indent=1) + "\n")


def phases_of(kept: dict[str, Any]) -> list[PhaseWork]:
    return [PhaseWork(**{**phase, "size": PieceSize(**phase["size"])}) for phase in kept["phases"]]


def scaled(phase: PhaseWork, clients: int) -> PhaseWork:
    """The phase with another number of such clients."""
    return replace(phase, cost=phase.cost * clients / phase.clients, clients=clients)


def predicted(kept: dict[str, Any], name: str, clients: int, cluster: Cluster) -> RoundEstimate:
    costs = ExchangeCosts(**kept["exchange"])
    return estimate_round([scaled(phase, clients) for phase in phases_of(kept["workloads"][name])], costs, cluster)


def check(file: Path) -> None:
    kept = json.loads(file.read_text())
    for name, figures in kept["workloads"].items():
        rounder, costs = Rounder(name), replace(ExchangeCosts(**kept["exchange"]), fixed=figures["driver"], client=0.0)
        for workers in (1, 2):
            rounder.use(workers)
            found = rounder.seconds(3.0)
            said = estimate_round(phases_of(figures), costs, Cluster(1, workers)).seconds
            print(
                f"{name}, {workers} workers: {1e3 * found:.1f} ms, predicted {1e3 * said:.1f} ms: × {said / found:.2f}",
                flush=True,
            )


def plot(file: Path, out: Path) -> None:
    from matplotlib.figure import Figure

    kept = json.loads(file.read_text())
    figure = Figure(figsize=(11, 3.8), layout="constrained")
    for axes, name in zip(figure.subplots(1, 3, sharey=True), kept["workloads"], strict=True):
        for clients in CLIENTS:
            times = [predicted(kept, name, clients, Cluster(nodes, WORKERS_PER_NODE, LINK)).seconds for nodes in NODES]
            axes.loglog(NODES, times, marker="o", markersize=3, label=f"{clients:.0e} clients".replace("e+0", " e"))
        axes.set(title=name, xlabel=f"nodes of {WORKERS_PER_NODE} workers", xticks=NODES, xticklabels=NODES)
        axes.grid(alpha=0.3)
    figure.axes[0].set_ylabel("predicted seconds per round")
    handles, _ = figure.axes[0].get_legend_handles_labels()
    figure.legend(handles, [f"10{'³⁴⁵⁶⁷'[power]} clients" for power in range(5)], loc="outside lower center", ncols=5)
    figure.savefig(out, dpi=130)
    print("\n".join([*cost_lines(kept), "", *pays_lines(kept)]))


def cost_lines(kept: dict[str, Any]) -> list[str]:
    """The measured costs as a table."""
    costs, machine = ExchangeCosts(**kept["exchange"]), kept["machine"]
    rows = {
        "latency of a phase": f"{1e3 * costs.latency:.2f} ms",
        "call, per worker": f"{1e3 * costs.call:.2f} ms",
        "megabyte that leaves or reaches the driver": f"{1e9 * costs.byte:.2f} ms",
        "driver, per round": f"{1e3 * costs.fixed:.2f} ms",
        "driver, per 1,000 clients of the cohort": f"{1e6 * costs.client:.2f} ms",
    }
    for name, figures in kept["workloads"].items():
        (work,) = [phase for phase in phases_of(figures) if phase.name == "sums"]
        rows[f"local work of a client, {name}"] = f"{1e3 * work.cost / work.clients / work.speed:.3g} ms"
        rows[f"model, {name}"] = f"{work.model_bytes / 1e6:.3g} MB"
    said = f"{machine['processor']}, {machine['cores']} cores, load {machine['load_before']:.1f} before, {machine['date']}"
    return [said, "", "| what | measured |", "|---|---|", *(f"| {what} | {value} |" for what, value in rows.items())]


def pays_lines(kept: dict[str, Any]) -> list[str]:
    """Predicted round times, what further nodes bring, and what limits, as a table."""
    lines = ["| work | clients | 1 node | 8 nodes | 128 nodes | limit of 8 | limit of 128 |", "|---|---|---|---|---|---|---|"]
    for name in kept["workloads"]:
        for clients in CLIENTS:
            clusters = [Cluster(nodes, WORKERS_PER_NODE, LINK) for nodes in (1, 8, 128)]
            one, eight, all_of_them = found = [predicted(kept, name, clients, cluster) for cluster in clusters]
            times = [f"{each.seconds:.3g} s, × {one.seconds / each.seconds:.1f}" for each in (eight, all_of_them)]
            limits = [each.limit(cluster) for each, cluster in zip(found, clusters, strict=True)][1:]
            lines.append(f"| {name} | {clients:,} | {one.seconds:.3g} s | {' | '.join([*times, *limits])} |")
    return lines


def main() -> None:
    what, file, *rest = sys.argv[1:]
    if what == "plot":
        plot(Path(file), Path(rest[0]))
        return
    torch.set_num_threads(1)
    warnings.simplefilter("ignore")
    os.environ["PYTHONPATH"] = os.pathsep.join([str(Path(__file__).parent), os.environ.get("PYTHONPATH", "")])  # of workers
    connect("local", num_cpus=2, object_store_memory=200 * 2**20)
    time.sleep(5)
    {"measure": measure, "check": check}[what](Path(file))


if __name__ == "__main__":
    main()
