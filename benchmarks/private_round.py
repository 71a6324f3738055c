"""What privacy costs in time: a private round of Δ-FL beside a plain one, on the linear workload of workloads.py.

    python benchmarks/private_round.py [--passes 15] [--rounds 1000]

Both take turns, round by round, from the same model with the same cohorts (Poisson, 100 of 1000 clients expected) and half of
the clients at work. The private round adds a private quantile (32 bins), clipping, noise on the update, and ε after the round.
ε of a run's rounds is computed at growing distances, so its time is taken for a whole run of `--rounds` rounds and spread over
them. Setting up (calibrating the noise to a budget) is paid once for a run and shown by itself. Goal: at most 1.3 times.
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Callable
from dataclasses import replace

import torch
from workloads import WORKLOADS

import equipoise as eq
from equipoise.errors import Diverged
from equipoise.privacy import DifferentialPrivacy, PrivateQuantile
from equipoise.rounds.drivers import play
from equipoise.runs.setup import set_up
from equipoise.types import RoundReport, RunSize

WORKLOAD = WORKLOADS["linear"]
TAIL, BOUND, BINS = 0.5, 16.0, 32
EPSILON = 20.0  # so much that the tail is about half of the cohort, as it is in the plain round; the time is that of any ε


def uneven_data() -> eq.FederatedData:
    """The workload's images, each client's dimmed by a factor of its own: losses then differ, and the tail is half of them."""
    data = WORKLOAD.data()
    shine = torch.linspace(0, 1, len(data.train)).repeat_interleave(WORKLOAD.examples).unsqueeze(1)
    return replace(data, train=replace(data.train, x=(data.train.x * shine).to(torch.uint8)))


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--passes", type=int, default=15, help="turns of each, five rounds a turn")
    asked.add_argument("--rounds", type=int, default=1000, help="rounds of the run that the accountant's time is spread over")
    options = asked.parse_args()
    torch.set_num_threads(1)

    data, solver = uneven_data(), eq.solvers.SGD(lr=0.05, batch_size=WORKLOAD.batch_size)
    private_risk = eq.risk.Superquantile(TAIL, quantile=PrivateQuantile(BOUND, BINS))
    algorithms = {
        "plain": eq.Algorithm(eq.risk.Superquantile(TAIL), solver, sampler=eq.sampling.Poisson(), weights="uniform"),
        "private": eq.Algorithm(private_risk, solver, privacy=DifferentialPrivacy(EPSILON, 1 / len(data.train), clip=1.0)),
    }
    plain = set_up(
        WORKLOAD.model(), data, algorithms["plain"], rounds=options.rounds, clients_per_round=WORKLOAD.clients_per_round,
        seed=0, loss=None, error=None, engine="simulator",
    )  # fmt: skip
    dimension = plain.task.layout.dimension
    size = RunSize(len(data.train), WORKLOAD.clients_per_round, options.rounds, dimension, seed=0)
    began = time.process_time()
    protection = algorithms["private"].privacy.protect(algorithms["private"], size)
    calibration = time.process_time() - began
    began = time.process_time()
    for done in range(1, options.rounds + 1):
        protection.epsilon_after(done)
    accounting = (time.process_time() - began) / options.rounds

    runs = {"plain": plain, "private": replace(plain, algorithm=algorithms["private"], protection=protection)}
    params = 0.2 * torch.randn(dimension, generator=torch.Generator().manual_seed(0))
    starts = {name: replace(run.begin(), params=params) for name, run in runs.items()}

    def round_of(name: str, index: int) -> RoundReport:
        state, cohort = replace(starts[name], round=index % options.rounds), plain.draw(index)
        with plain.engine_traits.round_context():
            outcome = play(runs[name], state, cohort)
        if isinstance(outcome, Diverged):
            raise outcome
        return outcome[1]

    times, trained = alternate(round_of, options.passes)
    usual, noisy = statistics.median(times["plain"]), statistics.median(times["private"]) + accounting
    print(f"{WORKLOAD.title}; tail {TAIL}, {BINS} bins, {dimension} parameters, one thread")
    print(f"calibration, once for a run: {calibration:.1f} s; ε of a round: {1000 * accounting:.2f} ms")
    print(f"plain Δ-FL round:   {1000 * usual:7.1f} ms, {statistics.mean(trained['plain']):.1f} clients at work")
    print(f"private Δ-FL round: {1000 * noisy:7.1f} ms, {statistics.mean(trained['private']):.1f} clients at work")
    print(f"ratio {noisy / usual:.3f} (goal: at most 1.3)")


def alternate(round_of: Callable[[str, int], RoundReport], passes: int) -> tuple[dict[str, list[float]], dict[str, list[int]]]:
    """CPU seconds of a round, and the clients at work, for each: turn by turn, so that other work on the machine hits both."""
    times: dict[str, list[float]] = {"plain": [], "private": []}
    trained: dict[str, list[int]] = {"plain": [], "private": []}
    for turn in range(passes + 1):
        for name in times:
            began = time.process_time()
            found = [round_of(name, 5 * turn + i).trained for i in range(5)]
            if turn > 0:  # the first is for warming up
                times[name].append((time.process_time() - began) / 5)
                trained[name] += found
    return times, trained


if __name__ == "__main__":
    main()
