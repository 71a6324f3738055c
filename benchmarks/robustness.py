"""Defences, fair training and personal models under attack, beside the published table (Li 2023, thesis, Table 5.9).

    python benchmarks/robustness.py [--scale small|paper] [--data DIR] [--device cuda] [--workers 2] [--combinations]

Figures of finished methods are kept in OUT: the same command goes on where an earlier one stopped.

Fashion-MNIST (without it, scikit-learn's digits), five classes per client, 72 % of a client's examples for training, 8 % for
validation, 20 % for test; learning rate 0.05, batches of 16, one epoch a round, clients weighted equally (section 5.7.4 and
Algorithm 7). Each cell is the mean (standard deviation) of test accuracy over benign clients. Writes robustness-SCALE.json and
.md to `--out`. The small scale is softmax regression with 100 clients, all in every round; the paper's is a
convolutional network with 500 clients and wants a GPU.

What the thesis leaves open: Krum and multi-Krum need K ≥ 2f + 3, which half or more attackers break; they then expect the most
that is allowed, f = ⌊(K − 3)/2⌋. The number of rounds and of clients per round are ours.
"""

from __future__ import annotations

import json
import math
import statistics
import time
import warnings
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, replace
from functools import partial
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from published import has, options_of
from torch import Tensor, nn

import equipoise as eq
from equipoise.client_table import ClientTable
from equipoise.core.rng import generator
from equipoise.data.partition import by_classes, to_clients
from equipoise.engines.simulator import engine as simulator_engine
from equipoise.errors import Diverged, EquipoiseNotice
from equipoise.personal.ditto import STRENGTHS_UNDER_ATTACK, USUAL_STRENGTHS
from equipoise.reproduce.experiment_runs import write_json
from equipoise.result import Result
from equipoise.types import Aggregator, Attack

TILT = 1.0  # of "fair"
EPSILONS = (0.0, 0.1, 0.5, 1.0)  # of FedMGDA+, chosen on validation examples of benign clients, as published
EPOCHS = 50  # of finetuning


@dataclass(frozen=True)
class Column:
    """A column of the table: an attack on a share of the clients."""

    title: str
    share: float = 0.0
    kind: str = ""

    def attack(self, seed: int) -> Attack | None:
        made: dict[str, Callable[..., Attack]] = {
            "A1": eq.attacks.LabelPoisoning, "A2": eq.attacks.RandomUpdates, "A3": eq.attacks.ModelReplacement,
        }  # fmt: skip
        return made[self.kind](share=self.share, seed=seed) if self.kind else None

    @property
    def strong(self) -> bool:
        """What section 5.7.2 calls a strong attack: model replacement, or more than half of the clients."""
        return self.kind == "A3" or self.share > 0.5


COLUMNS = [Column("clean")] + [
    Column(f"{kind} {share:.0%}", share, kind)
    for kind, shares in (("A1", (0.2, 0.5, 0.8)), ("A2", (0.2, 0.5, 0.8)), ("A3", (0.1, 0.2, 0.5)))
    for share in shares
]

# Table 5.9; "Ditto" is the row "dynamic λ's" of Table 5.5, Fashion: λ chosen by each client.
PUBLISHED = {
    "global": ".911(.08) .897(.08) .855(.10) .753(.13) .900(.08) .882(.09) .857(.10) .753(.10) .551(.13) .275(.12)",
    "local": ".876(.10) .874(.10) .876(.11) .879(.10) .874(.10) .876(.11) .879(.10) .877(.10) .874(.10) .876(.11)",
    "fair": ".909(.07) .751(.12) .637(.13) .547(.11) .731(.13) .637(.14) .635(.14) .653(.13) .601(.12) .131(.16)",
    "median": ".884(.09) .853(.10) .818(.12) .606(.17) .885(.09) .883(.09) .864(.10) .856(.09) .829(.11) .725(.15)",
    "Krum": ".838(.13) .864(.11) .818(.13) .768(.15) .847(.12) .870(.11) .805(.13) .868(.11) .866(.11) .640(.18)",
    "multi-Krum": ".911(.08) .907(.08) .889(.10) .793(.12) .849(.10) .827(.12) .095(.12) .804(.11) .860(.09) .823(.13)",
    "clipping": ".913(.07) .905(.08) .875(.10) .753(.12) .904(.08) .886(.09) .856(.11) .901(.08) .844(.11) .477(.13)",
    "k-norm": ".911(.08) .908(.08) .888(.10) .118(.08) .906(.08) .893(.09) .096(.07) .765(.14) .854(.10) .828(.12)",
    "k-loss": ".898(.08) .856(.09) .861(.10) .851(.31) .876(.09) .866(.11) .870(.10) .538(.14) .257(.13) .092(.13)",
    "FedMGDA+": ".915(.08) .907(.08) .874(.10) .753(.13) .911(.08) .900(.09) .873(.10) .914(.08) .904(.08) .869(.10)",
    "finetuning": ".945(.06) .946(.07) .935(.07) .922(.08) .945(.07) .930(.08) .923(.08) .915(.08) .871(.11) .764(.15)",
    "Ditto": ".943(.06) .944(.07) .937(.07) .907(.10) .938(.07) .930(.08) .913(.09) .921(.09) .902(.09) .872(.11)",
}  # fmt: skip
METHODS = tuple(PUBLISHED)
COMBINATIONS = ("Ditto + clipping", "Ditto + multi-Krum", "Ditto + fair")
PERSONAL = ("finetuning", "Ditto")


def published(method: str) -> list[tuple[float, float]]:
    """Mean and standard deviation by column."""
    pairs = [part.strip(")").split("(") for part in PUBLISHED[method].split()]
    return [(float(mean), float(deviation)) for mean, deviation in pairs]


@dataclass(frozen=True)
class Scale:
    clients: int
    examples: int  # images per client, all splits together
    rounds: int
    clients_per_round: int
    network: bool


SCALES = {"small": Scale(100, 140, 100, 100, False), "paper": Scale(500, 140, 300, 100, True)}
DIGITS = Scale(20, 89, 100, 20, False)  # 1,797 images


@dataclass(frozen=True)
class Job:
    """One column with one seed, for one process."""

    column: Column
    seed: int
    scale: Scale
    folder: str | None
    device: str
    combinations: bool
    methods: tuple[str, ...]
    precision: str
    workers: int
    kept: Path  # where the figures of finished methods are


def data_of(job: Job) -> eq.FederatedData:
    """The clean data of a seed: who has which images, and the splits inside clients."""
    deal = partial(by_classes, classes_per_client=5)
    if job.folder is None:
        return eq.data.digits(
            clients=job.scale.clients, partition=deal, split_by="examples", validation=0.08, test=0.2, seed=job.seed
        )
    whole = eq.data.fashion_mnist(job.folder, clients=1, partition="iid", split_by="examples", test=0.1, seed=job.seed)
    assert whole.test is not None
    x, y = (torch.cat([getattr(part, name) for part in (whole.train, whole.test)]) for name in ("x", "y"))
    some = torch.from_numpy(generator(job.seed, "images").permutation(len(x))[: job.scale.clients * job.scale.examples])
    x, y = x[some], y[some]
    clients = to_clients(x, y, deal(y, job.scale.clients, seed=job.seed), scale=1 / 255)
    return eq.data.split_examples(clients, validation=0.08, test=0.2, seed=job.seed, name="fashion_mnist", classes=10)


class Bench:
    """Runs the methods of one job."""

    def __init__(self, job: Job) -> None:
        self.job, clean = job, data_of(job)
        attack = job.column.attack(job.seed)
        self.data = clean if attack is None else eq.attacks.apply(clean, attack)
        size = job.scale.clients_per_round
        self.malicious = round(job.column.share * size)  # expected in a cohort
        self.krum = min(self.malicious, (size - 3) // 2)
        everyone = size == job.scale.clients
        self.base = eq.Algorithm(
            solver=eq.solvers.SGD(lr=0.05, batch_size=16), weights="uniform", sampler=eq.sampling.Full() if everyone else None
        )
        self.ditto = (
            eq.personal.Ditto(0.1, choices=STRENGTHS_UNDER_ATTACK)
            if job.column.strong
            else eq.personal.Ditto(1.0, choices=USUAL_STRENGTHS)
        )
        self.global_model: nn.Module | None = None
        self.found: dict[str, dict[str, Any]] = {}

    def model(self) -> nn.Module:
        return (
            eq.models.ConvNet(classes=10, seed=self.job.seed)
            if self.job.scale.network
            else eq.models.Softmax(self.data.features, 10)
        )

    def train(self, algorithm: eq.Algorithm, *, model: nn.Module | None = None, rounds: int | None = None) -> Result:
        return eq.train(
            model or self.model(), self.data, algorithm, rounds=self.job.scale.rounds if rounds is None else rounds,
            clients_per_round=self.job.scale.clients_per_round, seed=self.job.seed, progress=False,
            engine=eq.engines.Simulator(device=self.job.device, precision=self.job.precision),
            evaluate_every=max(1, self.job.scale.rounds // 4),
        )  # fmt: skip

    def keep(self, name: str, accuracy: Tensor, **more: Any) -> None:
        figures = {"mean": float(accuracy.mean()), "deviation": float(accuracy.std(correction=0)), "clients": len(accuracy)}
        self.found[name] = figures | more

    def aggregator(self, name: str) -> Aggregator:
        made: dict[str, Aggregator] = {
            "median": eq.aggregators.Median(),
            "Krum": eq.aggregators.Krum(self.krum),
            "multi-Krum": eq.aggregators.MultiKrum(self.krum),
            "clipping": eq.aggregators.NormClip(),
            "k-norm": eq.aggregators.KNorm(self.malicious),
            "k-loss": eq.aggregators.KLoss(self.malicious),
        }
        return made[name]

    def run(self, name: str) -> None:
        """One method, and what comes along with it: personal models leave the shared model as it is."""
        began = time.perf_counter()
        more: dict[str, Any] = {}
        if name == "global":
            run = self.train(replace(self.base, personal=self.ditto))
            self.global_model = run.model
            self.keep("Ditto", own_accuracy(run), chosen=chosen(run, self.ditto))
            more = weights_on_malicious(run)
            self.keep(name, shared_accuracy(run), seconds=time.perf_counter() - began, **more)
            return
        if name in ("clipping", "multi-Krum", "fair") and self.job.combinations:
            parts = {"risk": eq.risk.Tilted(TILT)} if name == "fair" else {"aggregator": self.aggregator(name)}
            run = self.train(replace(self.base, personal=self.ditto, **parts))
            self.keep(f"Ditto + {name}", own_accuracy(run))
        elif name == "fair":
            run = self.train(replace(self.base, risk=eq.risk.Tilted(TILT)))
        elif name == "local":
            run = self.train(replace(self.base, personal=eq.personal.Local()))
        elif name == "finetuning":
            if self.global_model is None:  # an earlier process has trained it
                self.global_model = self.train(self.base).model
            run = self.train(replace(self.base, personal=eq.personal.Finetuning(EPOCHS)), model=self.global_model, rounds=0)
        elif name == "FedMGDA+":
            run, more["epsilon"] = self.fedmgda()
        else:
            run = self.train(replace(self.base, aggregator=self.aggregator(name)))
        more |= weights_on_malicious(run) if name == "fair" else {}
        accuracy = own_accuracy(run) if name in ("local", "finetuning") else shared_accuracy(run)
        self.keep(name, accuracy, seconds=time.perf_counter() - began, **more)

    def fedmgda(self) -> tuple[Result, float]:
        """The run whose ε has the best accuracy on validation examples of benign clients."""
        runs = {e: self.train(replace(self.base, aggregator=eq.aggregators.FedMGDA(e))) for e in EPSILONS}
        scores = {e: float(run.clients.where("validation").benign.error.mean()) for e, run in runs.items()}
        best = min(scores, key=scores.__getitem__)
        return runs[best], best


def shared_accuracy(run: Result) -> Tensor:
    return 1 - run.clients.where("test").benign.error


def own_accuracy(run: Result) -> Tensor:
    return 1 - run.clients.where("test").benign.served_error


def chosen(run: Result, ditto: eq.personal.Ditto) -> dict[str, int]:
    """How many benign clients were served which λ: found by comparing their models with those of every λ."""
    assert run.personal is not None
    ids = run.clients.where("test").benign.client
    served = run.personal.params(ids)
    setting = run.personal._setting  # the rows that clients keep hold the models of all λ
    assert setting.personal is not None
    where = torch.tensor([setting.data.train.ids.index(name) for name in ids])
    kept = setting.personal.rows.read(run.personal._state.personal.places, where).view(len(ids), len(ditto.strengths), -1)
    same = (kept.to(served) == served.unsqueeze(1)).all(2)  # (n, C)
    return {f"{strength:g}": int(same[:, c].sum()) for c, strength in enumerate(ditto.strengths)}


def weights_on_malicious(run: Result) -> dict[str, Any]:
    """Along the run: training losses of both kinds of clients, and the weight that a tilt gives the malicious."""
    shown: dict[str, list[float]] = {"benign_loss": [], "malicious_loss": [], "tilted_share": []}
    for evaluation in run.history.evaluations:
        rows: ClientTable = evaluation.clients.where("train")
        bad = rows.malicious if rows.malicious is not None else torch.zeros(len(rows), dtype=torch.bool)
        shown["benign_loss"].append(float(rows.loss[~bad].mean()))
        shown["malicious_loss"].append(float(rows.loss[bad].mean()) if bool(bad.any()) else math.nan)
        shown["tilted_share"].append(float(torch.softmax(TILT * rows.loss, 0)[bad].sum()))
    return shown


def run_column(job: Job) -> dict[str, dict[str, Any]]:
    """All methods of one column and seed: by name the mean and deviation of accuracy over benign clients, and more."""
    warnings.simplefilter("ignore", EquipoiseNotice)
    torch.set_num_threads(1)
    if job.device != "cpu" and job.workers > 1:
        torch.cuda.set_per_process_memory_fraction(0.9 / job.workers)
        # Paths are not measured: beside other runs the faster one would be a matter of chance.
        simulator_engine.measured_on_device = lambda *asked: None  # type: ignore[assignment]
    bench, place = Bench(job), job.kept / f"{job.column.title.replace(' ', '-').replace('%', '')}-seed{job.seed}.json"
    if place.exists():
        bench.found = json.loads(place.read_text())
    for name in (m for m in job.methods if m != "Ditto" and m not in bench.found):
        try:
            bench.run(name)
        except Diverged as failure:
            lost = [name] + (["Ditto"] if name == "global" else [])
            lost += [f"Ditto + {name}"] if job.combinations and f"Ditto + {name}" in COMBINATIONS else []
            for each in lost:
                bench.found[each] = {"mean": math.nan, "deviation": math.nan, "diverged": str(failure)}
        write_json(place, bench.found)
        print(f"{job.column.title}, seed {job.seed}: {name}, {bench.found[name].get('seconds', 0):.0f} s", flush=True)
    return bench.found


Table = Mapping[str, Mapping[str, Mapping[str, Any]]]  # column, method, figures


def averaged(seeds: Sequence[Mapping[str, Mapping[str, Any]]]) -> dict[str, dict[str, Any]]:
    """The figures of the first seed, with means and deviations averaged over seeds."""
    merged = {}
    for method in seeds[0]:
        figures = [found[method] for found in seeds]
        both = {key: statistics.fmean(f[key] for f in figures) for key in ("mean", "deviation")}
        merged[method] = {**figures[0], **both, "seeds": [f["mean"] for f in figures]}
    return merged


def cell(mean: float, deviation: float) -> str:
    return f"{mean:.3f} ({deviation:.2f})".replace("(0.", "(.") if math.isfinite(mean) else "diverged"


def markdown(table: Table) -> str:
    """Ours and, below each row, the published one. The best of a column is bold in either."""
    titles = list(table)
    names = [m for m in (*METHODS, *COMBINATIONS) if any(m in table[t] for t in titles)]
    places = [[c.title for c in COLUMNS].index(t) for t in titles]
    lines = [f"| | {' | '.join(titles)} |", "|---" * (len(titles) + 1) + "|"]
    best_ours = {
        t: max((round(f["mean"], 3) for f in table[t].values() if math.isfinite(f["mean"])), default=0) for t in titles
    }
    best_then = {p: max(published(m)[p][0] for m in METHODS) for p in places}
    for name in names:
        ours = [table[t].get(name) for t in titles]
        cells = ["–" if f is None else cell(f["mean"], f["deviation"]) for f in ours]
        bold = [
            f"**{c}**" if f and round(f["mean"], 3) == best_ours[t] else c for t, c, f in zip(titles, cells, ours, strict=True)
        ]
        lines.append(f"| {name} | {' | '.join(bold)} |")
        if name in METHODS:
            then = [published(name)[p] for p in places]
            cells = [
                f"**{cell(*pair)}**" if pair[0] == best_then[p] else cell(*pair) for p, pair in zip(places, then, strict=True)
            ]
            lines.append(f"| *{name}, published* | {' | '.join(cells)} |")
    return "\n".join(lines)


def main() -> None:
    options = options_of(
        __doc__, scale="small", device="cpu", workers=1, seeds=1, rounds=None, clients_per_round=None, columns="",
        methods=",".join(METHODS), combinations=False, precision="float32", out=Path("bench"),
    ).parse_args()  # fmt: skip
    folder = str(options.data) if has(options.data, "fashion_mnist.npz") else None
    scale = SCALES[options.scale] if folder is not None else DIGITS
    per_round = options.clients_per_round or scale.clients_per_round
    scale = replace(scale, rounds=options.rounds or scale.rounds, clients_per_round=per_round)
    wanted = options.columns.split(",") if options.columns else [c.title for c in COLUMNS]
    asked = options.methods.split(",")
    asked = (["global"] if {"finetuning", "Ditto"} & set(asked) else []) + asked
    methods = tuple(dict.fromkeys(m for m in asked if m in METHODS))
    kept = options.out / f"robustness-{options.scale}-{scale.rounds}-rounds"
    kept.mkdir(parents=True, exist_ok=True)
    more = (options.combinations, methods, options.precision, options.workers, kept)
    jobs = [
        Job(column, seed, scale, folder, options.device, *more)
        for column in COLUMNS if column.title in wanted for seed in range(options.seeds)
    ]  # fmt: skip
    began = time.perf_counter()
    if options.workers > 1:
        with ProcessPoolExecutor(options.workers, mp_context=get_context("spawn")) as pool:
            found = list(pool.map(run_column, jobs))
    else:
        found = [run_column(job) for job in jobs]
    seconds = time.perf_counter() - began
    table = {
        title: averaged([f for job, f in zip(jobs, found, strict=True) if job.column.title == title])
        for title in dict.fromkeys(job.column.title for job in jobs)
    }
    data = "Fashion-MNIST" if folder is not None else "scikit-learn's digits (Fashion-MNIST was not found)"
    limits = ", ".join(
        f"{c.title}: {min(round(c.share * per_round), (per_round - 3) // 2)}" for c in COLUMNS if c.title in table
    )
    lines = [
        f"{data}, {scale.clients} clients × {scale.examples} images, {'ConvNet' if scale.network else 'softmax regression'}, "
        f"{scale.rounds} rounds with {per_round} clients each, {options.seeds} seed(s), {options.device}, "
        f"{options.workers} process(es), {seconds:.0f} s. Attackers that Krum and multi-Krum expect of {per_round}: {limits}.",
        "", markdown(table), "",
    ]  # fmt: skip
    for method, key, what in (("FedMGDA+", "epsilon", "ε of FedMGDA+"), ("Ditto", "chosen", "λ that benign clients chose")):
        shown = [f"{title}: {row[method][key]}" for title, row in table.items() if key in row.get(method, {})]
        lines += [f"- {what}: {'; '.join(shown)}."] if shown else []
    text = "\n".join(lines)
    print(text)
    options.out.mkdir(parents=True, exist_ok=True)
    place = options.out / f"robustness-{options.scale}"
    place.with_suffix(".md").write_text(text + "\n")
    record = {"data": data, "scale": asdict(scale), "seconds": seconds, "table": table, "published": PUBLISHED}
    place.with_suffix(".json").write_text(json.dumps(record, indent=1))


if __name__ == "__main__":
    main()
