"""AdaDPS and DP² (Li 2023, thesis, chapter 6): the toy regression of 6.2.1, and IMDB reviews beside Tables 6.11 and 6.14.

    python benchmarks/adadps.py [--data DIR] [--parts toy,imdb] [--methods main|all] [--seeds 3] [--workers 2]
                                [--device cpu] [--tune]

IMDB: logistic regression on relative word frequencies of 10,000 words, batches of 64 expected, 100 epochs, noise multiplier 1,
δ = 1e-5, as published. The source's split of the reviews is lost, so each seed draws its own: 25,000 training, 5,000
validation and 20,000 test reviews; 250 of the training reviews become public and leave the private set of *every* method, so
that all have the same ε. A seed draws the split, the batches and the noise.
The settings were chosen by `--tune --methods all`: a search near the published ones on the validation reviews of a seed that is
not reported; test reviews were never looked at for it. ε counts the run that is reported and not the search. One run takes
about a minute on a free core, two with public examples.
"""

from __future__ import annotations

import itertools
import math
import multiprocessing
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from statistics import fmean, stdev

import torch
from published import has, options_of, print_rows, spread
from torch import Tensor

import equipoise as eq
from equipoise import optim
from equipoise.core.rng import generator, torch_generator
from equipoise.models import LinearRegression, Logistic
from equipoise.privacy.accounting import epsilon_of

CHOOSING_SEED = 100  # of the split, batches and noise on which settings are chosen; none of the reported seeds
Settings = Mapping[str, float]

# ------------------------------------------------------------------------------------------------------------------ the toy

TOY_STEPS, TOY_BATCH, TOY_NOISE, TOY_CLIP, TOY_DELTA = 2250, 8, 0.7, 0.5, 1e-3  # published: ε = 4.13 by RDP
TOY_FREE_STEPS = 10_000  # without privacy (published: 40,000)


def toy_data(seed: int, n: int = 1000, d: int = 500) -> tuple[Tensor, Tensor, Tensor]:
    """Thesis 6.2.1: a tenth of the features are frequent (0.9) and mean little (w = 0.01), the others rare (0.01), w = 1.

    Also A as the engineer knows it: 1 for frequent, 0.01 for rare features. N(0, 0.01) is read as a standard deviation of
    0.01, as in the published code.
    """
    source = torch_generator(seed, "toy regression")
    frequent = torch.arange(d) < d // 10
    x = (torch.rand(n, d, generator=source) < torch.where(frequent, 0.9, 0.01)).float()
    y = x @ torch.where(frequent, 0.01, 1.0) + 0.01 * torch.randn(n, generator=source)
    return x, y, torch.where(frequent, 1.0, 0.01)


def toy_loss(net: LinearRegression, x: Tensor, y: Tensor) -> float:
    """The thesis's objective, ½ (wᵀx − y)² on average."""
    with torch.no_grad():
        return 0.5 * float(net.loss(net(x), y).mean())


def toy_run(seed: int, lr: float, *, informed: bool, private: bool) -> tuple[float, optim.PrivateOptimizer]:
    """The training loss at the end, averaged over the last twentieth of the run, and the optimiser.

    The model's loss has no factor ½: with twice the clip and half the learning rate the steps are those of the thesis's loss.
    """
    x, y, side = toy_data(seed)
    net = LinearRegression(x.shape[1], bias=False)
    steps = TOY_STEPS if private else TOY_FREE_STEPS
    privacy = {"clip": 2 * TOY_CLIP if private else math.inf, "noise_multiplier": TOY_NOISE if private else 0.0}
    common = {"lr": lr / 2, **privacy, "sample_rate": TOY_BATCH / len(x), "expected_batch_size": TOY_BATCH, "noise_seed": seed}
    made = optim.AdaDPS(net, side_information={"weight": side}, **common) if informed else optim.DPSGD(net, **common)
    losses = []
    for step, batch in enumerate(made.batches(x, y, steps=steps)):
        made.step(*batch)
        if step >= 0.95 * steps and step % 10 == 0:
            losses.append(toy_loss(net, x, y))
    return fmean(losses), made


def toy(runs: int = 5) -> None:
    x, y, _ = toy_data(0)
    start = toy_loss(LinearRegression(x.shape[1], bias=False), x, y)
    print("\n## Toy regression, thesis 6.2.1 and Figure 6.4 (a picture without numbers; private axis from 0.75 to 3.3)")
    print(f"\nTraining loss at the end, {runs} runs; at w = 0 it is {start:.2f}.\n")
    rows = []
    grids = {  # wider than the published choices 0.03, 0.003, 0.1 and 0.2
        (False, False): (0.01, 0.03, 0.1),
        (False, True): (0.001, 0.003, 0.01, 0.03),
        (True, False): (0.02, 0.05, 0.1, 0.2, 0.5),
        (True, True): (0.05, 0.1, 0.2, 0.5, 1.0),
    }
    for (private, informed), grid in grids.items():
        tried = {lr: toy_run(CHOOSING_SEED, lr, informed=informed, private=private)[0] for lr in grid}
        lr = min(tried, key=lambda rate: tried[rate] if math.isfinite(tried[rate]) else math.inf)
        found = [toy_run(seed, lr, informed=informed, private=private) for seed in range(runs)]
        losses = [loss for loss, _ in found]
        name = ("AdaDPS" if private else "AdaS") if informed else ("DP-SGD" if private else "SGD")
        spent = (
            [found[0][1].nominal_epsilon(TOY_DELTA, method=method) for method in ("rdp", "pld")] if private else [math.inf] * 2
        )
        kind = "private" if private else "not private"
        figures = f"{fmean(losses):.3g} ± {stdev(losses):.2g}"
        rows.append([kind, name, f"{lr:g}", figures, *(f"{epsilon:.2f}" for epsilon in spent)])
    print_rows(["training", "method", "lr", "loss", "ε by RDP (published 4.13)", "ε by PLD"], rows)


# --------------------------------------------------------------------------------------------------------------------- IMDB

EPOCHS, BATCH, NOISE, DELTA, WORDS = 100, 64, 1.0, 1e-5, 10_000
TRAINING, VALIDATION, PUBLIC = 25_000, 5_000, 250


@dataclass(frozen=True, eq=False)
class Reviews:
    """One seed's split: relative word frequencies and classes; `public` are no longer among `private`."""

    private: tuple[Tensor, Tensor]
    public: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    public_counts: Tensor
    seed: int

    @property
    def steps(self) -> int:
        return EPOCHS * (len(self.private[0]) // BATCH)


@lru_cache(maxsize=1)
def counts(folder: str) -> tuple[Tensor, Tensor]:
    x, y, _ = eq.data.imdb(folder, words=WORDS)
    return x, y


@lru_cache(maxsize=1)
def reviews(folder: str, seed: int, device: str) -> Reviews:
    x, y = (part.to(device) for part in counts(folder))
    order = torch.from_numpy(generator(seed, "split of the reviews").permutation(len(x))).to(device)
    training, validation, test = order.split([TRAINING, VALIDATION, len(x) - TRAINING - VALIDATION])
    (public, public_y), (private, private_y) = optim.set_aside(x[training], y[training], examples=PUBLIC, seed=seed)
    return Reviews(
        (frequencies(private), private_y), (frequencies(public), public_y), (x[validation], y[validation]), (x[test], y[test]),
        public, seed,
    )  # fmt: skip


def frequencies(x: Tensor) -> Tensor:
    values = x.float()
    return values.div_(values.sum(1, keepdim=True).clamp(min=1))


def accuracy(net: Logistic, examples: tuple[Tensor, Tensor]) -> float:
    with torch.no_grad():
        wrong = [net.error(net(frequencies(x)), y).sum() for x, y in zip(*(part.split(1000) for part in examples), strict=True)]
    return 1 - float(sum(wrong)) / len(examples[0])


def privacy(data: Reviews, clip: float) -> dict[str, float | int]:
    rate = BATCH / len(data.private[0])
    return {"clip": clip, "noise_multiplier": NOISE, "sample_rate": rate, "expected_batch_size": BATCH, "noise_seed": data.seed}


def dp_sgd(net: Logistic, data: Reviews, s: Settings) -> optim.PrivateOptimizer:
    return optim.DPSGD(net, lr=s["lr"], **privacy(data, s["clip"]))


def dp_rmsprop(net: Logistic, data: Reviews, s: Settings) -> optim.PrivateOptimizer:
    return optim.DPRMSProp(net, lr=s["lr"], eps=s["eps"], **privacy(data, s["clip"]))


def pda_dpmd(net: Logistic, data: Reviews, s: Settings) -> optim.PrivateOptimizer:
    share = optim.cosine_share(data.steps)
    return optim.PDADPMD(net, lr=s["lr"], public=data.public, private_share=share, **privacy(data, s["clip"]))


def adadps(net: Logistic, data: Reviews, s: Settings) -> optim.PrivateOptimizer:
    return optim.AdaDPS(net, lr=s["lr"], eps=s["eps"], public=data.public, **privacy(data, s["clip"]))


def adadps_frequency(net: Logistic, data: Reviews, s: Settings) -> optim.PrivateOptimizer:
    side = {"weight": optim.token_frequency(data.public_counts, floor=s["floor"])}
    return optim.AdaDPS(net, lr=s["lr"], side_information=side, **privacy(data, s["clip"]))


def adadps_tfidf(net: Logistic, data: Reviews, s: Settings) -> optim.PrivateOptimizer:
    side = {"weight": optim.inverse_tfidf(data.public_counts, floor=s["floor"])}
    return optim.AdaDPS(net, lr=s["lr"], side_information=side, **privacy(data, s["clip"]))


def dp_r_pub(net: Logistic, data: Reviews, s: Settings) -> optim.PrivateOptimizer:
    return optim.DPRPub(net, lr=s["lr"], eps=s["eps"], public=data.public, **privacy(data, s["clip"]))


def dp2(net: Logistic, data: Reviews, s: Settings) -> optim.PrivateOptimizer:
    own = {"lr_adaptive": s["lr_adaptive"], "clip_adaptive": s["clip_adaptive"], "delay": int(s["delay"]), "eps": s["eps"]}
    return optim.DP2(net, lr=s["lr"], **own, **privacy(data, s["clip"]))


def dp2_extra_query(net: Logistic, data: Reviews, s: Settings) -> optim.PrivateOptimizer:
    own = {"lr_adaptive": s["lr_adaptive"], "clip_adaptive": s["clip_adaptive"], "delay": int(s["delay"]), "eps": s["eps"]}
    return optim.DP2(net, lr=s["lr"], variant="extra_query", **own, **privacy(data, s["clip"]))


def dp2_noise_first(net: Logistic, data: Reviews, s: Settings) -> optim.PrivateOptimizer:
    own = {"lr_adaptive": s["lr_adaptive"], "delay": int(s["delay"]), "eps": s["eps"]}
    return optim.DP2(net, lr=s["lr"], variant="noise_first", **own, **privacy(data, s["clip"]))


@dataclass(frozen=True)
class Method:
    make: Callable[[Logistic, Reviews, Settings], optim.PrivateOptimizer]
    published: str
    chosen: Settings  # by --tune, on validation reviews
    grid: Mapping[str, tuple[float, ...]]  # what --tune tries besides the chosen values, one product of all
    main: bool = True


METHODS = {
    "DP-SGD": Method(
        dp_sgd, ".687 ± .018", {"lr": 5.0, "clip": 0.5}, {"lr": (2.0, 5.0, 10.0), "clip": (0.25, 0.5)},
    ),
    "DP-RMSProp": Method(
        dp_rmsprop, ".713 ± .005", {"lr": 0.3, "clip": 0.1, "eps": 1e-3},
        {"lr": (0.03, 0.1, 0.3, 1.0), "clip": (0.1, 0.5), "eps": (1e-3,)},
    ),
    "PDA-DPMD": Method(
        pda_dpmd, ".703 ± .005", {"lr": 10.0, "clip": 0.5}, {"lr": (2.0, 5.0, 10.0), "clip": (0.5,)},
    ),
    "AdaDPS": Method(
        adadps, ".826 ± .003", {"lr": 1.0, "clip": 10.0, "eps": 1e-3},
        {"lr": (0.3, 1.0, 3.0), "clip": (2.0, 5.0, 10.0), "eps": (1e-3,)},
    ),
    "DP²": Method(
        dp2, ".815 ± .011", {"lr": 0.1, "lr_adaptive": 3.0, "clip": 0.5, "clip_adaptive": 5.0, "delay": 780, "eps": 1e-7},
        {
            "lr": (0.1, 1.0), "lr_adaptive": (1.0, 3.0), "clip": (0.5,), "clip_adaptive": (2.0, 5.0), "delay": (195, 780),
            "eps": (1e-7,),
        },
    ),
    "AdaDPS, token frequency": Method(
        adadps_frequency, "(.75 at ε 1.5)", {"lr": 1.0, "clip": 5.0, "floor": 1e-3},
        {"lr": (0.03, 0.1, 0.3, 1.0), "clip": (1.0, 5.0), "floor": (1e-3,)}, main=False,
    ),
    "AdaDPS, inverse TF-IDF": Method(
        adadps_tfidf, "(.75 at ε 1.5)", {"lr": 5.0, "clip": 0.5, "floor": 1e-2},
        {"lr": (5.0, 20.0, 100.0), "clip": (0.1, 0.5), "floor": (1e-2,)}, main=False,
    ),
    "DP-R-Pub": Method(
        dp_r_pub, "—", {"lr": 0.01, "clip": 0.5, "eps": 1e-3},
        {"lr": (0.003, 0.01, 0.03, 0.1), "clip": (0.5,), "eps": (1e-3,)}, main=False,
    ),
    "DP², extra query": Method(
        dp2_extra_query, ".799 ± .006",
        {"lr": 3.0, "lr_adaptive": 1.0, "clip": 0.5, "clip_adaptive": 2.0, "delay": 780, "eps": 1e-7},
        {"lr": (3.0,), "lr_adaptive": (0.1, 1.0), "clip": (0.5,), "clip_adaptive": (2.0,), "delay": (780,), "eps": (1e-7,)},
        main=False,
    ),
    "DP², noise first": Method(
        dp2_noise_first, ".643 ± .007", {"lr": 0.3, "lr_adaptive": 0.03, "clip": 0.25, "delay": 780, "eps": 1e-3},
        {"lr": (0.3,), "lr_adaptive": (0.03, 0.3), "clip": (0.25,), "delay": (780,), "eps": (1e-3,)}, main=False,
    ),
}  # fmt: skip


@dataclass(frozen=True)
class Job:
    method: str
    seed: int
    settings: Settings
    on: str  # "validation" or "test"
    folder: str
    device: str


@dataclass(frozen=True)
class Outcome:
    accuracy: float
    events: list[tuple[object, int]]  # what was released
    seconds: float


def run(job: Job) -> Outcome:
    torch.set_num_threads(1)
    data = reviews(job.folder, job.seed, job.device)
    net = Logistic(WORDS).to(job.device)
    optimizer = METHODS[job.method].make(net, data, job.settings)
    begin = time.perf_counter()
    for batch in optimizer.batches(*data.private, steps=data.steps):
        optimizer.step(*batch)
    seconds = time.perf_counter() - begin
    return Outcome(accuracy(net, getattr(data, job.on)), optimizer.events(), seconds)


def outcomes(jobs: Sequence[Job], workers: int) -> Iterator[Outcome]:
    """The outcomes in the order of the jobs, which should go by seed: a worker keeps the split of one seed only."""
    if workers <= 1:
        yield from map(run, jobs)
        return
    with multiprocessing.get_context("spawn").Pool(workers) as pool:
        yield from pool.imap(run, jobs)


def shown(settings: Settings) -> str:
    return ", ".join(f"{name} {value:g}" for name, value in settings.items())


def tune(names: Sequence[str], workers: int, folder: str, device: str) -> None:
    """Print the validation accuracy of every point of the grids, at the seed that is not reported, and the best of each."""
    jobs = [
        Job(name, CHOOSING_SEED, dict(zip(METHODS[name].grid, values, strict=True)), "validation", folder, device)
        for name in names
        for values in itertools.product(*METHODS[name].grid.values())
    ]
    print(f"\n## Search on validation reviews, seed {CHOOSING_SEED}, {len(jobs)} runs\n")
    print("| method | settings | validation accuracy |\n|---|---|---|")
    best: dict[str, tuple[float, Settings]] = {}
    for job, outcome in zip(jobs, outcomes(jobs, workers), strict=True):
        print(f"| {job.method} | {shown(job.settings)} | {outcome.accuracy:.4f} |", flush=True)
        if job.method not in best or outcome.accuracy > best[job.method][0]:
            best[job.method] = (outcome.accuracy, job.settings)
    for name, (found, settings) in best.items():
        print(f"best for {name}: {found:.4f} with {shown(settings)}")


def imdb(names: Sequence[str], seeds: int, workers: int, folder: str, device: str) -> None:
    jobs = [Job(name, seed, METHODS[name].chosen, "test", folder, device) for seed in range(seeds) for name in names]
    found = list(zip(jobs, outcomes(jobs, workers), strict=True))
    private = TRAINING - PUBLIC
    print(f"\n## IMDB, logistic regression: test accuracy, {seeds} seeds\n\n{private} private and {PUBLIC} public reviews,")
    print(f"batch {BATCH}, {EPOCHS} epochs, noise multiplier {NOISE:g}, δ = {DELTA:g}.\n")
    rows = []
    for name in names:
        own = [outcome for job, outcome in found if job.method == name]
        spent = [f"{epsilon_of(own[0].events, DELTA, method=method):.3f}" for method in ("rdp", "pld")]
        about = [shown(METHODS[name].chosen), f"{fmean(o.seconds for o in own):.0f}"]
        rows.append([name, METHODS[name].published, spread((o.accuracy for o in own), 3), *spent, *about])
    heads = ["method", "published", "ours", "ε by RDP", "ε by PLD", "settings, chosen on validation", "seconds"]
    print_rows(heads, rows)


def main() -> None:
    options = options_of(
        __doc__, parts="toy,imdb", methods="main", seeds=3, workers=2, device="cpu", tune=False
    ).parse_args()  # methods: main (Table 6.11), all, or names separated by ;
    torch.set_num_threads(1)
    parts = options.parts.split(",")
    if "toy" in parts and not options.tune:
        toy()
    if "imdb" not in parts:
        return
    if not has(options.data, "imdb_bow.npz"):
        return
    folder = str(options.data)
    kinds = {"main": [name for name in METHODS if METHODS[name].main], "all": list(METHODS)}
    names = kinds.get(options.methods) or options.methods.split(";")
    if options.tune:
        tune(names, options.workers, folder, options.device)
    else:
        imdb(names, options.seeds, options.workers, folder, options.device)


if __name__ == "__main__":
    main()
