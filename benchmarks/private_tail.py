"""Δ-FL against FedAvg with end-to-end differential privacy, beside the published figures of Pillutla et al. 2023, section 7.7.

    python benchmarks/private_tail.py                 # the published setting: 2500 clients, 1000 rounds, 5 budgets, 2 seeds
    python benchmarks/private_tail.py --rounds 200 --epsilons 5    # a look
    python benchmarks/private_tail.py --knobs private_tail.json    # again, with the settings that were chosen before

Clip bound, bound of the losses, bins and ratio of the budgets are chosen on the *validation* clients, at ε = 5 and with a seed
of their own, one after another from the published ranges; test clients are used once, at the end. The published clip bounds are
of gradients: clients take one full gradient step of length 1, the server steps by 0.1, as in the paper one step of rate 0.1.
"""

from __future__ import annotations

import json
import statistics
import time
import warnings
from dataclasses import asdict, dataclass, replace
from pathlib import Path

import torch
from published import options_of

import equipoise as eq
from equipoise.privacy import DifferentialPrivacy, PrivateQuantile

PUBLISHED = {1.0: 55.7, 0.5: 52.6, 0.25: 51.4}  # 90th percentile of the test error at ε = 5, %; 0.25: "4.3 points better"
CHOICES = {
    "clip": (0.9, 1.1, 1.3, 1.5),
    "bound": (0.7, 0.9, 1.1, 1.3, 1.5),
    "bins": (16, 32, 64),
    "ratio": (0.1, 0.25, 0.5, 0.75),
}
TUNED_AT, TUNING_SEED = 5.0, 1000


@dataclass(frozen=True)
class Knobs:
    """What is chosen on validation clients."""

    clip: float = 1.1
    bound: float = 1.5
    bins: int = 32
    ratio: float = 0.25


def algorithm(tail: float, epsilon: float, clients: int, knobs: Knobs) -> eq.Algorithm:
    """FedAvg for tail 1, else Δ-FL, private."""
    private = DifferentialPrivacy(epsilon, 1 / clients, knobs.clip, quantile_ratio=knobs.ratio)
    quantile = PrivateQuantile(knobs.bound, knobs.bins)
    risk = eq.risk.Mean() if tail == 1 else eq.risk.Superquantile(tail, quantile=quantile)
    solver = eq.solvers.SGD(lr=1.0, batch_size=None)
    return eq.Algorithm(risk=risk, solver=solver, server=eq.server_opt.SGD(lr=0.1), privacy=private)


def run(tail: float, epsilon: float, knobs: Knobs, rounds: int, seed: int) -> eq.Result:
    """One private run on the data of its seed."""
    data = eq.data.label_shift(seed=seed)
    model = eq.models.Softmax(data.features, data.classes)
    chosen = algorithm(tail, epsilon, len(data.train), knobs)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", eq.errors.EquipoiseNotice)
        return eq.train(model, data, chosen, rounds=rounds, clients_per_round=100, seed=seed, progress=False)


def tail_error(result: eq.Result, split: str) -> float:
    """The 90th percentile of the clients' errors, %."""
    return 100 * result.summary(split).error.percentiles[90]


def tuned(tail: float, rounds: int) -> Knobs:
    """The knobs with the lowest 90th percentile of the validation error, one after another."""
    knobs, names = Knobs(), ("clip",) if tail == 1 else ("clip", "bound", "ratio", "bins")
    for name in names:
        tried = {value: replace(knobs, **{name: value}) for value in CHOICES[name]}
        errors = {value: tail_error(run(tail, TUNED_AT, k, rounds, TUNING_SEED), "validation") for value, k in tried.items()}
        print(f"  tail {tail}: {name} " + ", ".join(f"{v} → {e:.1f} %" for v, e in errors.items()), flush=True)
        knobs = tried[min(errors, key=lambda value: errors[value])]
    return knobs


def main() -> None:
    options = options_of(
        __doc__, rounds=1000, epsilons="3,5,10,15,20", tails="1,0.5,0.25", seeds=2, knobs="", out=Path("private_tail.json")
    ).parse_args()  # knobs: a file of figures whose knobs are used, instead of choosing them again
    epsilons, tails = ([float(value) for value in given.split(",")] for given in (options.epsilons, options.tails))
    torch.set_num_threads(1)
    began = time.perf_counter()
    known = json.loads(Path(options.knobs).read_text())["knobs"] if options.knobs else {}
    knobs = {tail: Knobs(**known[str(tail)]) if known else tuned(tail, options.rounds) for tail in tails}
    rows = []
    print("| ε | tail | mean error, % | 90th percentile, % | published at ε = 5 | ε by the accountant |")
    print("|---|---|---|---|---|---|")
    for epsilon in epsilons:
        for tail in tails:
            runs = [run(tail, epsilon, knobs[tail], options.rounds, seed) for seed in range(options.seeds)]
            means, worst = [100 * r.summary("test").error.mean for r in runs], [tail_error(r, "test") for r in runs]
            spent = max(r.epsilon.epsilon for r in runs if r.epsilon is not None)
            published = f"{PUBLISHED[tail]:.1f}" if epsilon == 5 and tail in PUBLISHED else ""
            print(f"| {epsilon:g} | {tail:g} | {shown(means)} | {shown(worst)} | {published} | {spent:.3f} |", flush=True)
            rows.append({"epsilon": epsilon, "tail": tail, "mean": means, "percentile_90": worst, "spent": spent})
    content = {"rounds": options.rounds, "knobs": {str(t): asdict(k) for t, k in knobs.items()}, "rows": rows}
    options.out.write_text(json.dumps(content, indent=1))
    print(f"chosen on validation clients at ε = 5: {knobs}\n{time.perf_counter() - began:.0f} s; figures in {options.out}")


def shown(values: list[float]) -> str:
    """Mean ± standard deviation of these seeds (divided by n: half the difference of two)."""
    return f"{statistics.mean(values):.1f} ± {statistics.pstdev(values):.1f}"


if __name__ == "__main__":
    main()
