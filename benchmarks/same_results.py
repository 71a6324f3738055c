"""Whether two versions give the same results, bit for bit: a matrix of small runs, trained by both on this machine.

    python benchmarks/same_results.py --old /tmp/old --new . [--only PATTERN] [--threads 1]

`--old` and `--new` are checkouts with a folder src. Each version trains all runs in a process of its own. Compared are final
parameters, losses and errors of all clients, clients' own models, reports of all rounds, notices, and the text of summaries.
The old version also leaves checkpoints, from which the new one goes on.

Small runs never measure what is fastest, so every run pins its path through the simulator, and calls of the functions on each
path are counted to see that it was taken. The table says: run, path, whether all is equal, and the largest difference. Runs
that may differ stand in EXCEPTIONS with the reason. The exit code is 1 if another run differs, fails, or takes another path.
"""

from __future__ import annotations

import argparse
import fnmatch
import importlib
import math
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import warnings
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, fields, replace
from functools import cache, partial, wraps
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

Values = dict[str, Any]  # tensors and texts by name: what a run leaves

# ------------------------------------------------------------------------------------------------------------------------------
# Runs that may differ, in which values, and why: a path that was removed or added, a bug that was fixed.
# ------------------------------------------------------------------------------------------------------------------------------
FAMILIES = ("tails", "tails, compiled", "qs", "qs, compiled", "tilts", "tilts, compiled", "tails, span", "tails, 2 workers",
            "tails, a network", "tails, loop")  # fmt: skip


@dataclass(frozen=True)
class Exempt:
    """A difference that is meant: in which runs (patterns of names), in which values (patterns), and why."""

    runs: tuple[str, ...]
    values: tuple[str, ...]
    reason: str
    other_path: bool = False  # the new version takes another path, on purpose


EXCEPTIONS = (
    Exempt(
        tuple(f"family: {name}" for name in FAMILIES),
        ("* evaluations",),
        "members go through the loop of `train`: their histories hold the last evaluation, too",
    ),
    Exempt(
        ("tilted: losses and estimators",), ("Tilted*",), "the estimators' last digits are found by exact second derivatives"
    ),
    Exempt(
        ("path: torch LSTM falls back to the loop", "path: dropout falls back to the loop"),
        ("*",),
        "recurrent layers and dropout are batched now; dropout's masks come from counters",
        other_path=True,
    ),
    Exempt(
        ("solver: *MAML*",),
        ("evaluations", "personal_error", "personal_loss"),
        "the final evaluation is of the adapted models; that of the shared model stands beside it",
    ),
    Exempt(("privacy: SecureAggregation*",), ("algorithm",), "the parameter `fewest` is new"),
    Exempt(("privacy: GaussianMechanism without noise",), ("spent",), "ε of seeded noise is called nominal"),
    Exempt(
        (
            "privacy: central noise*", "privacy: a budget*", "privacy: fixed cohorts", "privacy: everybody",
            "privacy: adaptive clip", "privacy: distributed noise*", "privacy: tilted", "privacy: q-fair",
            "privacy: private quantile*", "privacy: GaussianMechanism", "resume: private",
        ),
        ("*",),
        "noise is drawn in float64 from keys that hold the algorithm, so that methods under one seed do not share it",
    ),
    Exempt(("evaluation: figures over clients",), ("summaries",), "summaries have new fields"),
    Exempt(("many: one diverges", "one run diverges"), ("error",), "the text of an error ends in its code"),
    Exempt(("resume: *",), ("notices",), "a notice says from which round a run goes on"),
)  # fmt: skip


def exempt(name: str, values: Sequence[str], other_path: bool) -> Exempt | None:
    """The exception that covers a run's differences in all these values, if there is one."""
    for each in EXCEPTIONS:
        covered = all(any(fnmatch.fnmatchcase(value, pattern) for pattern in each.values) for value in values)
        if covered and other_path <= each.other_path and any(fnmatch.fnmatchcase(name, pattern) for pattern in each.runs):
            return each
    return None


# ------------------------------------------------------------------------------------------------------------------------------
# TO ADJUST when a version moves or renames something. Nothing else here knows names that are not public.
# ------------------------------------------------------------------------------------------------------------------------------
# Where a class may live; the first module that has it counts. If none has, all loaded modules are searched by its name.
HOMES = {
    "Choice": ("equipoise.engines.simulator.calibration", "equipoise.engines.calibration"),
    "Checkpoints": ("equipoise.runs.checkpoint", "equipoise.checkpoint"),
}

# What a version with a field `path` in its Choice calls the paths that are pinned here. None: it is not said, and the version
# decides by its own rule. A version without that field is told `compiled` alone, and the rest follows from the work.
PATH_NAMES: dict[str, str | None] = {
    "compiled": "compiled softmax",
    "span": "example span",
    "linear blocks": "linear blocks",
    "convnet": "hand-written ConvNet",
    "batched": "batched autograd",
    "any": None,
}

# What is called when a path is taken: names of a class and its method, or of a function, wherever they are.
PROBES: dict[str, tuple[str, ...]] = {
    "compiled": ("CompiledSoftmax.train",),
    "compiled scores": ("CompiledSoftmax.scores",),
    "span, in order": ("_Span.in_order",),
    "span, any order": ("_Span.in_any_order",),
    "linear blocks": ("LinearWork._train",),
    "softmax steps": ("SoftmaxSteps.take",),
    "other linear steps": ("_Block.steps", "LinearWork._steps"),
    "convnet": ("convnet_gradients",),
    "batched": ("stacked_gradients",),
    "loop": ("LoopEngine._train_client",),
    "second process": ("_Process.receive",),
}


# Which of the probes belong to a path: a run that pins it calls one of them, and none of another path's.
OF_PATH = {
    "compiled": ("compiled",),
    "span": ("span, in order", "span, any order"),
    "linear blocks": ("linear blocks", "softmax steps", "other linear steps"),
    "convnet": ("convnet",),
    "batched": ("batched",),
    "loop": ("loop",),
}


def said_paths(engine: object) -> list[str]:
    """HOOK: the paths that a running engine itself says that the last call took. The version before says nothing."""
    return sorted(getattr(engine, "paths_taken", ()))


# ----------------------------------------------------------------------------------------------------------------- pinned paths


def found_class(name: str) -> Any:
    """A class of the version that is imported."""
    for home in HOMES[name]:
        try:
            return getattr(importlib.import_module(home), name)
        except (ImportError, AttributeError):
            continue
    for module in list(sys.modules.values()):
        if module.__name__.startswith("equipoise") and hasattr(module, name):
            return getattr(module, name)
    raise LookupError(f"This version has no {name} in {', '.join(HOMES[name])}. Adjust HOMES.")


def choice_of(path: str, chunk_size: int, workers: int) -> Any:
    """A `Choice` that pins a path, as the imported version writes it."""
    kind = found_class("Choice")
    known = {one.name for one in fields(kind)}
    given = {"chunk_size": chunk_size, "workers": workers}
    if "path" in known:
        return kind(**given, path=PATH_NAMES[path])
    return kind(**given, compiled=path == "compiled")


@dataclass
class Pinned:
    """An engine for `train`: the simulator, told by which path, in which chunks and with how many workers it works.

    `started` are the engines that it has started. Models that cannot be vectorised get a loop engine, which is told nothing.
    """

    path: str = "any"
    chunk_size: int = 5
    workers: int = 1
    options: dict[str, Any] = field(default_factory=dict)  # of the simulator, such as device
    started: list[Any] = field(default_factory=list, repr=False)

    def start(self, task: Any, data: Any) -> Any:
        simulator = importlib.import_module("equipoise").engines.Simulator(**self.options)
        with PROBED.paused():  # starting an engine tries the model out
            engine = simulator.start(task, data)
        if hasattr(engine, "use"):
            engine.use(choice_of(self.path, self.chunk_size, self.workers))
        self.started.append(engine)
        return engine


class Probed:
    """Counts calls of the functions in PROBES."""

    def __init__(self) -> None:
        self.counts: Counter[str] = Counter()
        self.missing: list[str] = []
        self._on = True

    @contextmanager
    def paused(self) -> Iterator[None]:
        before, self._on = self._on, False
        try:
            yield
        finally:
            self._on = before

    def place(self) -> None:
        """Wrap the functions; those that the version does not have are `missing`."""
        for path, names in PROBES.items():
            if sum(self._wrap(path, name) for name in names) == 0:
                self.missing.append(path)

    def _wrap(self, path: str, name: str) -> int:
        owner, _, method = name.partition(".")
        modules = [m for n, m in sys.modules.items() if n.startswith("equipoise.engines") and owner in vars(m)]
        if method:
            kinds = {id(vars(m)[owner]): vars(m)[owner] for m in modules}.values()
            places = [(kind, method) for kind in kinds if method in vars(kind)]
        else:
            places = [(module, owner) for module in modules]
        wrapped: dict[int, Any] = {}
        for where, attribute in places:
            function = vars(where)[attribute]
            setattr(where, attribute, wrapped.setdefault(id(function), self._counting(path, function)))
        return len(places)

    def _counting(self, path: str, function: Any) -> Any:
        @wraps(function)
        def counting(*given: Any, **named: Any) -> Any:
            found = function(*given, **named)
            # A process that could not do its part answers with a plain object, and its part is done here.
            if self._on and (path != "second process" or type(found) is not object):
                self.counts[path] += 1
            return found

        return counting


PROBED = Probed()


# ------------------------------------------------------------------------------------------------------------- what is compared


def left_by(result: Any, prefix: str = "") -> Values:
    """What a result of `train` holds, but for seconds."""
    table = result.clients
    found: Values = {"params": result.params, "loss": table.loss, "error": table.error, "sizes": table.size}
    found |= {f"model {name}": value for name, value in result.model.state_dict().items()}
    found["clients"] = " ".join((*table.client, *table.split))
    for name in ("malicious", "personal_loss", "personal_error"):
        if getattr(table, name) is not None:
            found[name] = getattr(table, name)
    if result.personal is not None:
        found["own models"] = result.personal.params(result.personal.ids)
    found |= reports_of(result.history)
    found["summary"] = str(result.summary())
    found["algorithm"] = re.sub(r" at 0x[0-9a-f]+", "", repr(result.algorithm))
    found["spent"] = str(result.epsilon)
    return {prefix + name: value for name, value in found.items()}


def reports_of(history: Any) -> Values:
    """The reports of all rounds, and the evaluations between them."""
    rounds = history.rounds
    numbers = ("round", "loss", "tail_loss", "risk", "cohort", "trained", "dropped", "epsilon")
    found: Values = {
        f"report {name}": torch.tensor([_number(getattr(r, name)) for r in rounds], dtype=torch.float64) for name in numbers
    }
    found["report texts"] = str([(r.loss_from, r.rejected, r.missing) for r in rounds])
    found["evaluations"] = str([(point.round, point.splits) for point in history.points])
    return found


def _number(value: float | None) -> float:
    return math.nan if value is None else float(value)


def difference(old: Values, new: Values) -> tuple[list[str], float]:
    """The names of what is not equal bit for bit, and the largest absolute difference of numbers; infinite between kinds."""
    names, largest = [], 0.0
    for name in sorted(old.keys() | new.keys()):
        a, b = old.get(name), new.get(name)
        if isinstance(a, Tensor) and isinstance(b, Tensor) and (a.dtype, a.shape) == (b.dtype, b.shape):
            if a.contiguous().numpy().tobytes() != b.contiguous().numpy().tobytes():
                names.append(name)
                apart = (a.double() - b.double()).abs()
                apart[a.isnan() & b.isnan()] = 0.0
                largest = max(largest, float(apart.nan_to_num(math.inf).max()))
        elif type(a) is not type(b) or isinstance(a, Tensor) or a != b:
            names.append(name)
            largest = largest if isinstance(a, str) and isinstance(b, str) else math.inf
    return names, largest


# -------------------------------------------------------------------------------------------------------------- data and models


def _gaussian(sizes: Sequence[int], features: int, classes: int, seed: int, dtype: torch.dtype = torch.float32) -> list[Any]:
    """Clients with normal inputs around a centre per class, as (id, x, y)."""
    gen = torch.Generator().manual_seed(seed)
    centres = torch.randn(classes, features, generator=torch.Generator().manual_seed(99), dtype=torch.float64)
    triples = []
    for i, n in enumerate(sizes):
        y = torch.randint(0, classes, (n,), generator=gen)
        x = centres[y] + torch.randn(n, features, generator=gen, dtype=torch.float64)
        triples.append((f"client-{i}", x.to(dtype), y))
    return triples


def _images(sizes: Sequence[int], pixels: int, classes: int) -> list[Any]:
    """Clients with random bytes for images, as (id, x, y)."""
    gen = torch.Generator().manual_seed(7)
    triples = []
    for i, n in enumerate(sizes):
        x = torch.randint(0, 256, (n, pixels, pixels), generator=gen, dtype=torch.uint8)
        triples.append((f"client-{i}", x, torch.randint(0, classes, (n,), generator=gen)))
    return triples


def _made(sizes: Sequence[int], features: int, classes: int, *, dtype: torch.dtype = torch.float32, name: str = "made") -> Any:
    import equipoise as eq

    test = [(f"unseen-{i}", x, y) for i, (_, x, y) in enumerate(_gaussian((9, 14, 5), features, classes, 1, dtype))]
    train = eq.ClientSet.pack(_gaussian(sizes, features, classes, 0, dtype))
    return eq.FederatedData(train, test=eq.ClientSet.pack(test), name=name, classes=classes)


@cache
def data_named(name: str) -> Any:
    """Small data sets: floats and bytes, equal and ragged sizes, tokens and numbers."""
    import equipoise as eq

    gen = torch.Generator().manual_seed(7)
    if name == "ragged":
        return _made((1, 2, 3, 7, 10, 11, 20, 25), 4, 3)
    if name == "double":
        return _made((1, 2, 3, 7, 10, 11, 20, 25), 4, 3, dtype=torch.float64)
    if name == "small, double":
        return _made((20, 9, 17, 1, 21, 12, 20, 5, 16, 11), 30, 10, dtype=torch.float64)
    if name == "large":  # so many examples, in one pass, that the span of the examples does not pay
        return _made((60,) * 10, 30, 10)
    if name == "large, ragged":
        return _made((40, 75, 61, 33, 80, 64, 52, 97, 70, 70), 30, 10)
    if name == "long":
        return _made((1000,) * 5, 3, 2)
    if name == "small":  # so few that it does
        return _made((20,) * 10, 30, 10)
    if name == "small, ragged":
        return _made((20, 9, 17, 1, 21, 12, 20, 5, 16, 11), 30, 10)
    if name == "label shift":
        return eq.data.label_shift(train_clients=12, validation_clients=4, test_clients=5, examples=40, seed=1)
    if name == "digits":
        return eq.data.digits(clients=10, split_by="examples", validation=0.2, test=0.25, seed=2)
    if name == "synthetic":
        return eq.data.synthetic(clients=6, features=8, classes=4, test=0.2, seed=1)
    if name == "bytes":
        clients = _images((30, 64, 41, 70, 55, 64, 28, 90), 6, 5)
        return eq.FederatedData(eq.ClientSet.pack(clients, scale=1 / 255, shift=-0.5), name=name, classes=5)
    if name == "images":
        clients = _images((12, 12, 7, 12, 16, 12), 28, 10)
        return eq.FederatedData(eq.ClientSet.pack(clients, scale=1 / 255), name=name, classes=10)
    if name == "tokens":
        clients = [
            (f"client-{i}", torch.randint(0, 12, (n, 6), generator=gen), torch.randint(0, 4, (n,), generator=gen))
            for i, n in enumerate((8, 12, 5, 10, 9, 12))
        ]
        return eq.FederatedData(eq.ClientSet.pack(clients), name="tokens", classes=4)
    if name == "two classes":
        return _made((18, 22, 9, 30, 25, 16), 6, 2, name=name)
    if name == "tiny":
        return _made((5, 6, 2, 6, 4, 6, 1, 3), 6, 2, name=name)
    if name == "numbers":
        clients = [(i, x, x @ torch.arange(1.0, 7.0) + 0.1 * y) for i, x, y in _gaussian((18, 22, 9, 30, 25, 16), 6, 2, 3)]
        return eq.FederatedData(eq.ClientSet.pack(clients), name=name)
    if name == "means":
        return eq.data.gaussian_means(examples=20, seed=1)
    raise KeyError(name)


class Recurrent(nn.Module):
    """A torch LSTM, which cannot be vectorised over clients."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.lstm, self.readout = nn.Embedding(12, 5), nn.LSTM(5, 6, batch_first=True), nn.Linear(6, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        out: Tensor = self.readout(self.lstm(self.embedding(tokens))[0][:, -1])
        return out


def network(features: int, classes: int, *, dropout: float = 0.0, dtype: torch.dtype = torch.float32) -> nn.Module:
    """Two layers with fixed first values."""
    layers = [
        nn.Flatten(),
        nn.Linear(features, 8),
        nn.Tanh(),
        *([nn.Dropout(dropout)] if dropout else []),
        nn.Linear(8, classes),
    ]
    return with_values(nn.Sequential(*layers).to(dtype))


def with_values(model: nn.Module, seed: int = 5, spread: float = 0.2) -> nn.Module:
    """The model with parameters drawn from a seed."""
    gen = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for value in model.parameters():
            value.copy_(spread * torch.randn(value.shape, generator=gen, dtype=torch.float64))
    return model


def model_for(data: str) -> nn.Module:
    """The linear model of a data set."""
    import equipoise as eq

    held = data_named(data)
    model = eq.models.Softmax(held.features, held.classes)
    return model.double() if held.train.x.dtype == torch.float64 else model


def model_named(name: str) -> nn.Module:
    """Models of other kinds."""
    import equipoise as eq

    makers: dict[str, Callable[[], nn.Module]] = {
        "ConvNet": lambda: eq.models.ConvNet(classes=10, seed=1),
        "CharGRU": lambda: eq.models.CharGRU(vocabulary=12, classes=4, embedding=5, hidden=6, seed=1),
        "CharLSTM": lambda: eq.models.CharLSTM(vocabulary=12, classes=4, embedding=5, hidden=6, seed=1),
        "EmbeddingLSTM": lambda: eq.models.EmbeddingLSTM(
            torch.randn(12, 5, generator=torch.Generator().manual_seed(3)), classes=4, hidden=6, padding=0, seed=1
        ),
        "torch LSTM": lambda: with_values(Recurrent()),
        "Logistic": lambda: eq.models.Logistic(6),
        "LinearSVM": lambda: eq.models.LinearSVM(6),
        "LinearRegression": lambda: eq.models.LinearRegression(6),
        "MeanEstimator": lambda: eq.models.MeanEstimator(2),
    }
    return makers[name]()


# ------------------------------------------------------------------------------------------------------------------- the matrix


@dataclass(frozen=True)
class Small:
    """One small run: the path that it pins, in words; which calls must be seen and which not; what it does with an engine."""

    name: str
    path: str
    seen: tuple[tuple[str, ...], ...]  # of each some
    unseen: tuple[str, ...]
    meant: str | None  # the path by the name of versions that say which they took
    engine: Callable[[], Any]
    work: Callable[[Any], Values]


class Matrix:
    """All runs, in order."""

    def __init__(self, work: Path, old_checkpoints: Path | None) -> None:
        self.runs: dict[str, Small] = {}
        self.work, self.old_checkpoints = work, old_checkpoints

    def add(
        self, name: str, path: str, work: Callable[[Any], Values], *, chunk: int = 5, workers: int = 1,
        seen: Sequence[str] = (), unseen: Sequence[str] = (),
    ) -> None:  # fmt: skip
        """Register a run. `path` is "loop" for the loop engine, and "any" for work of several kinds.

        Besides what belongs to the path, calls of `seen` must be counted, and none of `unseen`.
        """
        assert name not in self.runs, name
        engine = (lambda: "loop") if path == "loop" else partial(Pinned, path.removesuffix(" → loop"), chunk, workers)
        own = path.removeprefix("any → ")
        needed = [(probe,) for probe in seen] + ([OF_PATH[own]] if own in OF_PATH else [])
        needed += [("second process",)] if workers > 1 and path != "compiled" else []
        others = [probe for kind, probes in OF_PATH.items() if kind != own for probe in probes] if own in OF_PATH else []
        shown = path + (f", {workers} {'threads' if path == 'compiled' else 'workers'}" if workers > 1 else "")
        meant = "loop" if own == "loop" else PATH_NAMES[own]
        self.runs[name] = Small(name, shown, tuple(needed), (*others, *unseen), meant, engine, work)

    def train(
        self, name: str, path: str, data: str, algorithm: Any = None, model: Callable[[], nn.Module] | None = None, *,
        chunk: int = 5, workers: int = 1, seen: Sequence[str] = (), unseen: Sequence[str] = (), **options: Any,
    ) -> None:  # fmt: skip
        """Register a run of `train`."""
        work = partial(trained, data, algorithm, model, **options)
        self.add(name, path, work, chunk=chunk, workers=workers, seen=seen, unseen=unseen)


def trained(data: str, algorithm: Any, model: Callable[[], nn.Module] | None, engine: Any, **options: Any) -> Values:
    """What one run of `train` leaves."""
    return left_by(result_of(data, algorithm, model, engine, **options))


def result_of(data: str, algorithm: Any, model: Callable[[], nn.Module] | None, engine: Any, **options: Any) -> Any:
    import equipoise as eq

    held, options = data_named(data), {"rounds": 4, "clients_per_round": 5, "seed": 3, "progress": False} | options
    if algorithm is not None and isinstance(algorithm.sampler, eq.sampling.Full):
        options["clients_per_round"] = None
    if (attack := options.pop("attack", None)) is not None:
        held = eq.attacks.apply(held, attack)
    return eq.train((model or partial(model_for, data))(), held, algorithm, engine=engine, **options)


def matrix(work: Path, old_checkpoints: Path | None) -> Matrix:
    """All runs."""
    found = Matrix(work, old_checkpoints)
    groups = (
        paths, models, risks, solvers, aggregators, servers, samplers, personal_models, privacy, attacks, families, many,
        evaluation, checkpoints, beside_federations,
    )  # fmt: skip
    for group in groups:
        group(found)
    return found


def paths(m: Matrix) -> None:
    """Every path through the simulator on a CPU, with one process and with two."""
    import equipoise as eq

    sgd = eq.solvers.SGD
    tail = eq.Algorithm(risk=eq.risk.Superquantile(0.5), solver=sgd(lr=0.3))
    robust = eq.Algorithm(aggregator=eq.aggregators.Median(), solver=sgd(lr=0.3))
    decay = eq.Algorithm(solver=sgd(lr=0.3, epochs=2, weight_decay=0.01, prox=0.1))
    own = eq.Algorithm(solver=sgd(lr=0.3), personal=eq.personal.Ditto(0.5))
    for workers in (1, 2):
        with_two = f", {workers} threads" if workers > 1 else ""
        scores = ("compiled", "compiled scores")
        m.train(f"path: compiled, floats{with_two}", "compiled", "large", tail, workers=workers, seen=scores)
        m.train(f"path: compiled, bytes{with_two}", "compiled", "bytes", decay, workers=workers, seen=scores)
        m.train(f"path: compiled, each update{with_two}", "compiled", "large", robust, workers=workers, chunk=3)
        m.train(f"path: compiled, own models{with_two}", "compiled", "large, ragged", own, workers=workers)
    for workers in (1, 2):
        with_two = f", {workers} workers" if workers > 1 else ""
        add = partial(m.train, workers=workers)
        add(f"path: span, in order{with_two}", "span", "small", tail, chunk=3, seen=("span, in order",))
        many = eq.Algorithm(solver=sgd(lr=0.3, epochs=3))
        add(f"path: span, any order{with_two}", "span", "small, ragged", many, chunk=3, seen=("span, any order",))
        add(f"path: span, decay and prox{with_two}", "span", "small, ragged", decay, chunk=3, seen=("span, any order",))
        add(f"path: span, each update{with_two}", "span", "small", robust, chunk=3, seen=("span, in order",))
        add(f"path: linear, softmax steps{with_two}", "linear blocks", "large", tail, chunk=3,
            seen=("linear blocks", "softmax steps"), unseen=("batched",))  # fmt: skip
        add(f"path: linear, ragged bytes{with_two}", "linear blocks", "bytes", decay_once(eq), chunk=4,
            seen=("linear blocks", "softmax steps", "other linear steps"))  # fmt: skip
        add(f"path: linear, own models{with_two}", "linear blocks", "large, ragged", own, chunk=3)
        add(f"path: linear, one score{with_two}", "linear blocks", "two classes", pulled(eq), partial(model_named, "Logistic"),
            seen=("linear blocks", "other linear steps"), unseen=("softmax steps",))  # fmt: skip
        add(f"path: ConvNet by hand{with_two}", "convnet", "images", eq.Algorithm(solver=sgd(lr=0.1, batch_size=6)),
            partial(model_named, "ConvNet"), rounds=2, clients_per_round=4, chunk=2, unseen=("batched",))  # fmt: skip
        add(f"path: batched, a network{with_two}", "batched", "ragged", tail, partial(network, 4, 3), chunk=3)
        add(f"path: batched, momentum{with_two}", "batched", "large", eq.Algorithm(solver=sgd(lr=0.1, momentum=0.9)), chunk=3)
    few = eq.solvers.SGD(lr=0.01, batch_size=None, steps=2)
    own_long = eq.Algorithm(solver=few, personal=eq.personal.Local(replace(few, steps=1000)))  # too many batches for one table
    m.train("path: linear, batches step by step", "linear blocks", "long", own_long, rounds=1, seen=("other linear steps",))
    m.train("path: compiled, many steps", "compiled", "long", own_long, rounds=1)
    m.train("path: one chunk of all", "linear blocks", "large", tail, chunk=1000)
    m.train("path: chunks of one", "linear blocks", "large", tail, chunk=1)
    m.train("path: compiled, chunks of one", "compiled", "large, ragged", robust, chunk=1)
    m.add("path: nothing is pinned", "any", lambda _: trained("large", tail, None, "simulator"), seen=("linear blocks",))
    m.add("path: chunks and workers asked for", "any", asked_for, seen=("linear blocks", "second process"))
    m.train("path: loop engine", "loop", "large, ragged", tail)
    m.train("path: loop engine, a network", "loop", "ragged", own, partial(network, 4, 3))
    lstm, drop = partial(model_named, "torch LSTM"), partial(network, 4, 3, dropout=0.3)
    m.train("path: torch LSTM falls back to the loop", "any → loop", "tokens", tail, lstm)
    m.train("path: dropout falls back to the loop", "any → loop", "ragged", tail, drop)


def decay_once(eq: Any) -> Any:
    """One pass with weight decay and FedProx's pull."""
    return eq.Algorithm(solver=eq.solvers.SGD(lr=0.3, weight_decay=0.01, prox=0.1))


def pulled(eq: Any) -> Any:
    """Own models, pulled: work that is not the span's."""
    return eq.Algorithm(solver=eq.solvers.SGD(lr=0.3, batch_size=5), personal=eq.personal.Ditto(0.5))


def asked_for(_: Any) -> Values:
    """Chunks and workers as a user asks for them."""
    import equipoise as eq

    return trained("large", eq.Algorithm(), None, eq.engines.Simulator(chunk_size=3, workers=2, compiled=False))


def models(m: Matrix) -> None:
    """Every model, and types of numbers."""
    import equipoise as eq

    tail = eq.Algorithm(risk=eq.risk.Superquantile(0.5), solver=eq.solvers.SGD(lr=0.05, batch_size=6))
    twice = replace(tail, solver=replace(tail.solver, epochs=2))
    for name in ("CharGRU", "CharLSTM", "EmbeddingLSTM"):
        m.train(f"model: {name}", "batched", "tokens", tail, partial(model_named, name), rounds=3)
    for name in ("Logistic", "LinearSVM"):
        m.train(f"model: {name}", "linear blocks", "two classes", tail, partial(model_named, name))
        m.train(f"model: {name}, span", "span", "tiny", twice, partial(model_named, name))
    m.train("model: LinearRegression", "linear blocks", "numbers", tail, partial(model_named, "LinearRegression"))
    m.train("model: MeanEstimator", "batched", "means", tail, partial(model_named, "MeanEstimator"), clients_per_round=3)
    m.train("model: ConvNet, full batch", "convnet", "images", eq.Algorithm(solver=eq.solvers.SGD(lr=0.1, batch_size=None)),
            partial(model_named, "ConvNet"), rounds=2, clients_per_round=3)  # fmt: skip
    m.train("model: Softmax without bias", "linear blocks", "large", tail, lambda: eq.models.Softmax(30, 10, bias=False))
    m.train("numbers: float64, linear", "linear blocks", "double", eq.Algorithm(solver=eq.solvers.SGD(lr=0.3)))
    m.train("numbers: float64, span", "span", "small, double", eq.Algorithm(solver=eq.solvers.SGD(lr=0.3, epochs=3)))
    m.train("numbers: float64, a network", "batched", "double", tail, partial(network, 4, 3, dtype=torch.float64))
    m.train("numbers: float64, loop", "loop", "double", tail)
    m.train("data: label shift", "linear blocks", "label shift", tail)
    m.train("data: digits", "linear blocks", "digits", tail)
    m.train("data: synthetic", "linear blocks", "synthetic", tail)
    m.train("loss: one of the user's", "batched", "ragged", tail, partial(network, 4, 3), loss=smoothed_loss, error=first_logit)
    m.train("loss: one of the user's, linear", "linear blocks", "large", tail, loss=smoothed_loss, unseen=("softmax steps",))


def smoothed_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """Cross-entropy with smoothed labels, one number per example."""
    return nn.functional.cross_entropy(outputs, targets, reduction="none", label_smoothing=0.1)


def first_logit(outputs: Tensor, targets: Tensor) -> Tensor:
    """Some error of a user's."""
    return (outputs[:, 0] > 0).to(outputs.dtype) * targets


def risks(m: Matrix) -> None:
    """Every risk, with its options."""
    import equipoise as eq

    r, p = eq.risk, eq.privacy
    found = {
        "Mean": r.Mean(),
        "Superquantile 0.5": r.Superquantile(0.5),
        "Superquantile 0.3, exact": r.Superquantile(0.3, rule="exact"),
        "Superquantile, threshold": r.Superquantile(0.4, rule="threshold"),
        "Superquantile, KL": r.Superquantile(0.5, smoothing="kl", nu=0.2),
        "Superquantile, Huber": r.Superquantile(0.5, smoothing="huber", nu=0.1),
        "Superquantile, secure sums": r.Superquantile(0.5, quantile=p.SecureSums(iterations=50)),
        "Superquantile, exact source": r.Superquantile(0.5, rule="threshold", quantile=p.Exact()),
        "Superquantile, eta every 3": r.Superquantile(0.5, eta_every=3),
        "Superquantile, at least 4": r.Superquantile(0.1, at_least=4),
        "Tilted 1": r.Tilted(1.0),
        "Tilted −1": r.Tilted(-1.0),
        "Tilted, tracked": r.Tilted(2.0, tracked=True, rho=0.3),
        "QFair": r.QFair(1.5),
        "Mixture": r.Mixture((0.3, r.Mean()), (0.7, r.Superquantile(0.2, eta_every=2))),
        "HierarchicalTilt": r.HierarchicalTilt(lambda client: str(int(client[-1]) % 3), tilt=2.0, inner_tilt=-1.0),
    }
    for i, (name, risk) in enumerate(found.items()):
        path, data = (("linear blocks", "large, ragged"), ("compiled", "large"), ("span", "small"))[i % 3]
        m.train(f"risk: {name}", path, data, eq.Algorithm(risk=risk, solver=eq.solvers.SGD(lr=0.3)), clients_per_round=7)
    full = eq.sampling.Full()
    m.train("risk: WorstCase", "linear blocks", "large, ragged", eq.Algorithm(risk=r.WorstCase(0.2), sampler=full))
    mixed = r.Mixture((0.5, r.WorstCase(0.1)), (0.5, r.Mean()))
    m.train("risk: Mixture with WorstCase", "linear blocks", "large", eq.Algorithm(risk=mixed, sampler=full))
    m.train("risk: QFair, a network", "batched", "ragged", eq.Algorithm(risk=r.QFair(1.0)), partial(network, 4, 3))
    values = torch.tensor([0.3, 2.0, 1.1, 0.3, 5.0, 0.7], dtype=torch.float64)
    m.add("risk: values and weights alone", "any", lambda _: of_risks(found, values))


def of_risks(found: Mapping[str, Any], losses: Tensor) -> Values:
    """Values and weights of risks at given losses."""
    base = torch.arange(1.0, 7.0, dtype=torch.float64) / 21
    values: Values = {}
    for name, risk in found.items():
        at = risk(losses, base, clients=tuple(f"client-{i}" for i in range(6)))
        values |= {f"{name} value": at.value, f"{name} weights": at.weights}
    return values


def solvers(m: Matrix) -> None:
    """Every solver, with its options."""
    import equipoise as eq

    s = eq.solvers
    linear = {
        "weight decay": s.SGD(lr=0.2, weight_decay=0.05),
        "FedProx": s.SGD(lr=0.2, prox=0.5),
        "FedProx and decay": s.SGD(lr=0.2, prox=0.5, weight_decay=0.05),
        "lr decay": s.SGD(lr=0.4, lr_decay=0.5, lr_decay_every=2),
        "steps": s.SGD(lr=0.2, steps=4),
        "full batch": s.SGD(lr=0.2, batch_size=None),
        "no epochs": s.SGD(lr=0.2, epochs=0),
        "dropped stragglers": s.SGD(lr=0.2, straggler_share=0.4, stragglers="drop"),
    }
    for name, solver in linear.items():
        paths = ("any", "any") if solver.epochs == 0 else ("linear blocks", "compiled")
        m.train(f"solver: SGD, {name}", paths[0], "large, ragged", eq.Algorithm(solver=solver))
        m.train(f"solver: SGD, {name}, compiled", paths[1], "large, ragged", eq.Algorithm(solver=solver))
    kept = eq.Algorithm(solver=s.SGD(lr=0.2, epochs=3, straggler_share=0.4))
    m.train("solver: SGD, kept stragglers", "span", "small", kept, seen=("span, any order",))
    m.train("solver: SGD, kept stragglers, compiled", "compiled", "large", kept)
    general = {
        "SGD, momentum, decay and prox": s.SGD(lr=0.1, momentum=0.9, weight_decay=0.05, prox=0.2),
        "MAML": s.MAML(lr=0.3, inner_lr=0.1, inner_steps=2),
        "PerFedAvg": s.PerFedAvg(lr=0.1, inner_lr=0.1, batch_size=8),
        "AdaDPS": s.AdaDPS({"weight": torch.linspace(0.5, 2.0, 30)}, s.SGD(lr=0.2)),
    }
    for name, solver in general.items():
        m.train(f"solver: {name}", "batched", "large, ragged", eq.Algorithm(solver=solver))
    m.train("solver: AdaptiveProx", "linear blocks", "large, ragged",
            eq.Algorithm(solver=s.AdaptiveProx(s.SGD(lr=1.5, prox=0.1), patience=1)), rounds=6)  # fmt: skip
    m.train("solver: FedDane", "any", "large, ragged", eq.Algorithm(solver=s.FedDane(s.SGD(lr=0.1, prox=0.5))))
    m.train("solver: FedDane, a network", "batched", "ragged", eq.Algorithm(solver=s.FedDane(s.SGD(lr=0.1))),
            partial(network, 4, 3))  # fmt: skip
    meta = eq.Algorithm(risk=eq.risk.QFair(1.0), solver=s.MAML(lr=0.2))
    m.train("solver: q-MAML", "batched", "ragged", meta, partial(network, 4, 3))
    m.train("solver: MAML, loop", "loop", "ragged", meta, partial(network, 4, 3))
    m.train("solver: FedDane, loop", "loop", "ragged", eq.Algorithm(solver=s.FedDane(s.SGD(lr=0.1, prox=0.5))))
    m.train("solver: AdaDPS, loop", "loop", "large", eq.Algorithm(solver=general["AdaDPS"]), rounds=2)


def aggregators(m: Matrix) -> None:
    """Every aggregator."""
    import equipoise as eq

    a = eq.aggregators
    found = (
        a.WeightedMean(), a.Median(), a.TrimmedMean(0.2), a.GeometricMedian(), a.Krum(1), a.MultiKrum(2), a.NormClip(0.5),
        a.NormClip(), a.KNorm(1), a.KLoss(1), a.FedMGDA(0.2),
    )  # fmt: skip
    for i, one in enumerate(found):
        path, data = (("linear blocks", "large, ragged"), ("compiled", "large"), ("span", "small"))[i % 3]
        m.train(f"aggregator: {one!r}", path, data, eq.Algorithm(aggregator=one), clients_per_round=8)
    m.train("aggregator: Median, a network", "batched", "ragged", eq.Algorithm(aggregator=a.Median()), partial(network, 4, 3))
    both = eq.Algorithm(risk=eq.risk.Superquantile(0.6), aggregator=a.NormClip(0.3))
    m.train("aggregator: NormClip of the tail, loop", "loop", "large, ragged", both, clients_per_round=8)


def servers(m: Matrix) -> None:
    """Every server optimiser, and what is reported of the iterates."""
    import equipoise as eq

    s = eq.server_opt
    for one in (s.SGD(0.5), s.Momentum(0.7, 0.8), s.Adagrad(0.05), s.Adam(0.05), s.Yogi(0.05)):
        m.train(f"server: {one!r}", "linear blocks", "large", eq.Algorithm(server=one), rounds=5)
    for mean in (eq.averaging.Last(), eq.averaging.Uniform(), eq.averaging.Geometric(0.2)):
        m.train(f"averaging: {mean!r}", "compiled", "large", eq.Algorithm(averaging=mean), rounds=5)


def samplers(m: Matrix) -> None:
    """Every sampler, and base weights."""
    import equipoise as eq

    s = eq.sampling
    found = (s.Uniform(), s.Uniform(0.6), s.Proportional(), s.Poisson(), s.Full(), s.Availability(day=5, share=0.4))
    for one in found:
        m.train(f"sampler: {one!r}", "linear blocks", "large, ragged", eq.Algorithm(sampler=one), rounds=6)
    m.train(
        "sampler: Poisson, often nobody", "span", "small", eq.Algorithm(sampler=s.Poisson()), clients_per_round=1, rounds=12
    )
    m.train("weights: uniform", "linear blocks", "large, ragged", eq.Algorithm(weights="uniform"))


def personal_models(m: Matrix) -> None:
    """Every personalisation."""
    import equipoise as eq

    p, sgd = eq.personal, eq.solvers.SGD
    found = {
        "Ditto": p.Ditto(0.5),
        "Ditto with choices": p.Ditto(0.5, choices=(0.1, 1.0)),
        "Ditto after training": p.Ditto(0.5, when="finetuning", solver=sgd(lr=0.05, epochs=2)),
        "Local": p.Local(),
        "L2SGD": p.L2SGD(0.5),
        "Finetuning": p.Finetuning(epochs=2),
        "Mapper": p.Mapper((0.25, 0.75)),
        "APFL": p.APFL(0.4),
        "EWC": p.EWC(strength=1.0, epochs=2),
        "SymmetrisedKL": p.SymmetrisedKL(strength=0.5, epochs=2),
    }
    for name, method in found.items():
        algorithm = eq.Algorithm(solver=sgd(lr=0.2), personal=method)
        m.train(f"personal: {name}", "any", "digits", algorithm, evaluate_every=2)
    svm = eq.Algorithm(solver=sgd(lr=0.05, batch_size=5), sampler=eq.sampling.Full(), personal=p.Mocha(0.1, floor=0.2))
    m.train("personal: Mocha", "any", "two classes", svm, partial(model_named, "LinearSVM"))
    net = partial(network, 64, 10)
    for name in ("Ditto", "APFL", "Mapper", "EWC"):
        algorithm = eq.Algorithm(solver=sgd(lr=0.2, weight_decay=0.01, prox=0.1), personal=found[name])
        m.train(f"personal: {name}, a network", "batched", "digits", algorithm, net, rounds=2)
    m.train("personal: Ditto, 2 workers", "any", "digits", eq.Algorithm(personal=found["Ditto"]), workers=2)
    m.train("personal: APFL, loop", "loop", "digits", eq.Algorithm(personal=found["APFL"]), rounds=2)
    robust = eq.Algorithm(risk=eq.risk.QFair(1.0), aggregator=eq.aggregators.MultiKrum(1), personal=found["Ditto"])
    m.train("personal: Ditto, q-fair, MultiKrum", "any", "digits", robust, clients_per_round=7)
    meta = eq.Algorithm(
        solver=eq.solvers.PerFedAvg(lr=0.1, inner_lr=0.05), personal=p.Finetuning(epochs=1, solver=sgd(lr=0.05))
    )
    m.train("personal: Per-FedAvg, then one epoch", "any", "digits", meta, rounds=2)


def privacy(m: Matrix) -> None:
    """Every protection."""
    import equipoise as eq

    p, r, sgd = eq.privacy, eq.risk, eq.solvers.SGD(lr=0.3)
    given = {"delta": 1e-2, "clip": 0.5, "method": "rdp"}
    central = p.DifferentialPrivacy(None, noise_multiplier=0.8, **given)
    private = r.Superquantile(0.5, quantile=p.PrivateQuantile(bound=3.0, bins=4))
    found = {
        "central noise": eq.Algorithm(privacy=central),
        "central noise, Adam": eq.Algorithm(privacy=central, server=eq.server_opt.Adam(0.05)),
        "a budget": eq.Algorithm(privacy=p.DifferentialPrivacy(8.0, **given)),
        "a budget that ends": eq.Algorithm(privacy=p.DifferentialPrivacy(4.0, noise_multiplier=1.0, **given)),
        "fixed cohorts": eq.Algorithm(privacy=central, sampler=eq.sampling.Uniform()),
        "everybody": eq.Algorithm(privacy=central, sampler=eq.sampling.Full()),
        "adaptive clip": eq.Algorithm(privacy=replace(central, clip_rule=p.AdaptiveClip(0.6))),
        "distributed noise": eq.Algorithm(privacy=replace(central, noise="distributed")),
        "distributed noise, tilted": eq.Algorithm(
            privacy=replace(central, noise="distributed", loss_bound=3.0), risk=r.Tilted(0.5)
        ),
        "tilted": eq.Algorithm(privacy=replace(central, loss_bound=3.0), risk=r.Tilted(1.0)),
        "q-fair": eq.Algorithm(privacy=replace(central, loss_bound=3.0), risk=r.QFair(1.0)),
        "private quantile": eq.Algorithm(privacy=central, risk=private),
        "private quantile, distributed": eq.Algorithm(privacy=replace(central, noise="distributed"), risk=private),
        "GaussianMechanism": eq.Algorithm(privacy=p.GaussianMechanism(0.5, 0.7, delta=1e-2)),
        "GaussianMechanism without noise": eq.Algorithm(privacy=p.GaussianMechanism(math.inf, 0.0)),
        "SecureAggregation": eq.Algorithm(privacy=p.SecureAggregation()),
        "SecureAggregation, Δ-FL": eq.Algorithm(
            privacy=p.SecureAggregation(), risk=r.Superquantile(0.5, quantile=p.SecureSums(50), eta_every=2)
        ),
        "SecureAggregation, q-fair": eq.Algorithm(privacy=p.SecureAggregation(loss_bound=3.0), risk=r.QFair(1.0)),
        "SecureAggregation, clipped": eq.Algorithm(
            privacy=p.SecureAggregation(step=2.0**-16), aggregator=eq.aggregators.NormClip(0.4)
        ),
        "central noise, Ditto": eq.Algorithm(privacy=central, personal=eq.personal.Ditto(0.3)),
        "central noise, AdaDPS": eq.Algorithm(
            privacy=central, solver=eq.solvers.AdaDPS({"weight": torch.linspace(0.5, 2.0, 30)}, sgd)
        ),
    }
    for i, (name, algorithm) in enumerate(found.items()):
        algorithm = algorithm if isinstance(algorithm.solver, eq.solvers.AdaDPS) else replace(algorithm, solver=sgd)
        path = "any" if "Ditto" in name or "AdaDPS" in name else ("linear blocks", "compiled")[i % 2]
        m.train(f"privacy: {name}", path, "large, ragged", algorithm, clients_per_round=6)


def attacks(m: Matrix) -> None:
    """Malicious clients."""
    import equipoise as eq

    a = eq.attacks
    found = (
        a.LabelPoisoning(0.3), a.RandomUpdates(0.3, scale=2.0), a.ModelReplacement(0.2),
        a.ModelReplacement(0.2, update="negated", factor=3.0),
    )  # fmt: skip
    for i, attack in enumerate(found):
        path, data = (("linear blocks", "large, ragged"), ("compiled", "large"))[i % 2]
        m.train(f"attack: {attack!r}", path, data, eq.Algorithm(), attack=attack, clients_per_round=7)
    krum = eq.Algorithm(aggregator=eq.aggregators.MultiKrum(2), personal=eq.personal.Ditto(0.5))
    m.train("attack: against MultiKrum and Ditto", "any", "digits", krum, attack=found[2], clients_per_round=8)
    m.train("attack: NaN is left out", "linear blocks", "large", eq.Algorithm(),
            attack=a.ModelReplacement(0.3, update="honest", factor=1e300), clients_per_round=7)  # fmt: skip
    m.train("attack: NaN is left out, compiled, 2 threads", "compiled", "large", eq.Algorithm(), workers=2,
            attack=a.ModelReplacement(0.3, update="honest", factor=1e300), clients_per_round=7)  # fmt: skip
    m.train("attack: loop", "loop", "large, ragged", eq.Algorithm(), attack=found[1], clients_per_round=7)


def families(m: Matrix) -> None:
    """Families along each knob."""
    for name, knob in {"tails": [1.0, 0.5, 0.2], "qs": [0.0, 1.0], "tilts": [-1.0, 0.5, 2.0]}.items():
        m.add(f"family: {name}", "linear blocks", partial(family, "large, ragged", {name: knob}))
        m.add(f"family: {name}, compiled", "compiled", partial(family, "large, ragged", {name: knob}), workers=2)
    m.add("family: tails, span", "span", partial(family, "small", {"tails": [1.0, 0.5]}), seen=("span, in order",))
    m.add("family: tails, 2 workers", "linear blocks", partial(family, "large", {"tails": [1.0, 0.5]}), workers=2)
    m.add("family: tails, a network", "batched", partial(family, "ragged", {"tails": [1.0, 0.5]}, model=partial(network, 4, 3)))
    m.add("family: tails, loop", "loop", partial(family, "large, ragged", {"tails": [1.0, 0.5]}))


def family(data: str, knob: dict[str, list[float]], engine: Any, *, model: Callable[[], nn.Module] | None = None) -> Values:
    """What a family leaves: its members, and what clients choose."""
    import equipoise as eq

    held = data_named(data)
    made = eq.train_family(
        (model or partial(model_for, data))(), held, eq.Algorithm(solver=eq.solvers.SGD(lr=0.3)), **knob, rounds=3,
        clients_per_round=6, seed=2, engine=engine, progress=False,
    )  # fmt: skip
    found: Values = {}
    for value, result in made.results.items():
        found |= left_by(result, f"{value} ")
    first, second = made.values[:2]
    between = made.at((first + second) / 2, interpolate=True)
    found |= {f"between {name}": value for name, value in between.state_dict().items()}
    found["chosen"] = str([made.choose(held.test.take([k])) for k in range(len(held.test))])
    table = made.comparison().results["family"][0].clients
    return found | {"family loss": table.loss, "family error": table.error}


def many(m: Matrix) -> None:
    """Several seeds and algorithms in one batched run, and methods beside each other."""
    import equipoise as eq

    sgd = eq.solvers.SGD(lr=0.3)
    together = {
        "FedAvg": eq.Algorithm(solver=sgd),
        "tail": eq.Algorithm(risk=eq.risk.Superquantile(0.4), solver=sgd),
        "tilted": eq.Algorithm(risk=eq.risk.Tilted(1.0, tracked=True), solver=sgd, server=eq.server_opt.Momentum(0.5)),
    }
    apart = together | {
        "median": eq.Algorithm(aggregator=eq.aggregators.Median(), solver=sgd),
        "Ditto": eq.Algorithm(personal=eq.personal.Ditto(0.5), solver=sgd),
    }
    m.add("many: seeds × algorithms", "linear blocks", partial(many_runs, "large, ragged", together))
    m.add("many: seeds × algorithms, compiled", "compiled", partial(many_runs, "large", together), workers=2)
    m.add("many: seeds × algorithms, 2 workers", "linear blocks", partial(many_runs, "large", together), workers=2)
    m.add("many: a network by seed", "batched", partial(many_runs, "ragged", together, model=partial(seeded_network, 4, 3)))
    m.add("many: some go alone", "linear blocks", partial(many_runs, "large", apart))
    m.add("many: loop", "loop", partial(many_runs, "ragged", together))
    m.add("many: one diverges", "linear blocks", diverging)
    m.add("one run diverges", "linear blocks", diverging_alone)
    m.add("compare: methods × seeds", "linear blocks", partial(compared, "large, ragged", apart))


def seeded_network(features: int, classes: int, seed: int) -> nn.Module:
    """A network whose first values are those of torch, given a seed."""
    return nn.Sequential(nn.Flatten(), nn.Linear(features, 8), nn.Tanh(), nn.Linear(8, classes))


def of_comparison(comparison: Any) -> Values:
    """What a comparison holds."""
    found: Values = {"table": comparison.summary()}
    for name, runs in comparison.results.items():
        for run in runs:
            found |= left_by(run, f"{name}, seed {run.seed} ")
    return found


def many_runs(data: str, algorithms: dict[str, Any], engine: Any, *, model: Any = None) -> Values:
    """Several seeds; `model` may be a function of the seed."""
    import equipoise as eq

    model = model_for(data) if model is None else model
    options = {"seeds": [0, 4], "rounds": 3, "clients_per_round": 5, "evaluate_every": 2, "progress": False}
    return of_comparison(eq.train_many(model, data_named(data), algorithms, engine=engine, **options))


def compared(data: str, algorithms: dict[str, Any], engine: Any) -> Values:
    import equipoise as eq

    options = {"seeds": 2, "rounds": 3, "clients_per_round": 5, "progress": False}
    return of_comparison(eq.compare(algorithms, model_for(data), data_named(data), engine=engine, **options))


def diverging(engine: Any) -> Values:
    """Least squares with three learning rates, one of them far too large: the others end well."""
    import equipoise as eq

    rates = {f"γ {lr}": eq.Algorithm(solver=eq.solvers.SGD(lr=0.01), server=eq.server_opt.SGD(lr)) for lr in (1.0, 0.5, 1e30)}
    options = {"seeds": 2, "rounds": 4, "clients_per_round": 4, "progress": False}
    try:
        eq.train_many(model_named("LinearRegression"), data_named("numbers"), rates, engine=engine, **options)
    except eq.errors.Diverged as failure:
        return of_comparison(failure.finished) | {"error": _said(failure)} | reports_of(failure.history)
    raise AssertionError("no run diverged")


def diverging_alone(engine: Any) -> Values:
    """The same as one run."""
    import equipoise as eq

    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.01), server=eq.server_opt.SGD(1e30))
    try:
        trained("numbers", algorithm, partial(model_named, "LinearRegression"), engine)
    except eq.errors.Diverged as failure:
        return {"error": _said(failure)} | reports_of(failure.history)
    raise AssertionError("the run did not diverge")


def _said(failure: BaseException) -> str:
    return "\n".join((f"{type(failure).__name__}: {failure}", *getattr(failure, "__notes__", ())))


def evaluation(m: Matrix) -> None:
    """Evaluations, and figures over clients."""
    import equipoise as eq

    tail = eq.Algorithm(risk=eq.risk.Superquantile(0.5))
    m.train("evaluation: every round", "linear blocks", "label shift", tail, evaluate_every=1)
    m.train("evaluation: every round, compiled", "compiled", "label shift", tail, evaluate_every=1, workers=2,
            seen=("compiled", "compiled scores"))  # fmt: skip
    m.train("evaluation: no round", "any", "label shift", tail, rounds=0)
    m.train(
        "evaluation: shared by 2 workers", "batched", "digits", tail, lambda: with_values(wide_network()), workers=2, rounds=2
    )
    m.add("evaluation: figures over clients", "any", figures)
    m.add("evaluation: dissimilarity", "any", dissimilarity)


def wide_network() -> nn.Module:
    """So many parameters that an evaluation is worth sharing."""
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 1100), nn.Tanh(), nn.Linear(1100, 10))


def figures(engine: Any) -> Values:
    """Every figure of equipoise.metrics on errors of a run."""
    import equipoise as eq

    result = result_of("label shift", eq.Algorithm(), None, engine)
    metrics, values, sizes = eq.metrics, result.clients.loss, result.clients.size
    found = {
        "mean": metrics.mean(values, sizes.double()), "deviation": metrics.standard_deviation(values),
        "percentile": metrics.percentile(values, 90), "worst": metrics.worst(values, 0.1), "best": metrics.best(values, 0.1),
        "angle": metrics.angle(values), "entropy": metrics.entropy(values), "KL": metrics.kl_to_uniform(values),
        "Gini": metrics.gini(values), "rank": metrics.rank_correlation(values, sizes),
    }  # fmt: skip
    rows = str([{k: v for k, v in row.items() if k != "seconds"} for row in result.clients])
    return {name: torch.tensor(value, dtype=torch.float64) for name, value in found.items()} | {
        "rows": rows,
        "worst rows": str(result.clients.worst(3)),
        "summaries": str(result.clients.summaries()),
    }


def dissimilarity(engine: Any) -> Values:
    import equipoise as eq

    found = eq.heterogeneity.dissimilarity(model_for("large, ragged"), data_named("large, ragged"), engine=engine)
    return {"found": torch.tensor([found.variance, found.ratio], dtype=torch.float64)}


def checkpoints(m: Matrix) -> None:
    """Runs that are killed and go on, also in the version after the one that they began with."""
    import equipoise as eq

    r, p = eq.risk, eq.privacy
    found = {
        "plain": eq.Algorithm(),
        "Adam, slow quantile": eq.Algorithm(
            risk=r.Superquantile(0.5, eta_every=3), server=eq.server_opt.Adam(0.05), averaging=eq.averaging.Geometric(0.1)
        ),
        "tracked tilt, adaptive μ": eq.Algorithm(
            risk=r.Tilted(1.0, tracked=True),
            solver=eq.solvers.AdaptiveProx(eq.solvers.SGD(lr=0.5)),
            server=eq.server_opt.Momentum(),
        ),
        "WorstCase": eq.Algorithm(risk=r.WorstCase(), sampler=eq.sampling.Full()),
        "Ditto": eq.Algorithm(personal=eq.personal.Ditto(0.5)),
        "L2SGD": eq.Algorithm(personal=eq.personal.L2SGD(0.5)),
        "private": eq.Algorithm(
            privacy=p.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=0.8, clip_rule=p.AdaptiveClip(), method="rdp")
        ),
    }
    for name, algorithm in found.items():
        m.add(f"resume: {name}", "any", partial(stopped_and_resumed, m, name, "large, ragged", algorithm))
    tail = eq.Algorithm(risk=r.Superquantile(0.5))
    for path, data, workers in (("compiled", "large", 2), ("linear blocks", "large", 2), ("span", "small", 1)):
        seen = ("span, in order",) if path == "span" else ()
        work = partial(stopped_and_resumed, m, f"path {path}", data, tail)
        m.add(f"resume: {path}", path, work, chunk=3, workers=workers, seen=seen)
    m.add("resume: loop", "loop", partial(stopped_and_resumed, m, "loop", "large, ragged", tail))
    m.add("resume: killed by the system", "any", partial(stopped_and_resumed, m, "kill", "digits", found["Ditto"], kill=True))


class Stops(Exception):
    """Raised by an observer to stop a run."""


def stopped_and_resumed(m: Matrix, name: str, data: str, algorithm: Any, engine: Any, *, kill: bool = False) -> Values:
    """A run of seven rounds in one piece; stopped in round 4 and resumed; and resumed from what the old version left."""
    options = {"rounds": 7, "evaluate_every": 3}

    def again() -> Any:  # an engine for every run
        return replace(engine) if isinstance(engine, Pinned) else engine

    whole = result_of(data, algorithm, None, again(), **options)
    folder = m.work / "checkpoints" / re.sub(r"\W+", "-", name)
    shutil.rmtree(folder, ignore_errors=True)
    folder.mkdir(parents=True)
    file = folder / "state.safetensors"
    stopping = partial(result_of, data, algorithm, None, again(), checkpoint=found_class("Checkpoints")(file, every=1))
    if kill:
        killed_in(4, stopping, **options)
    else:
        stopped_in(4, stopping, **options)
    values = left_by(whole)
    for which, left in (("own", m.work), ("old", m.old_checkpoints or m.work)):
        copied = m.work / f"{which} copies" / folder.name
        shutil.copytree(left / "checkpoints" / folder.name, copied, dirs_exist_ok=True)
        resumed = left_by(result_of(data, algorithm, None, again(), checkpoint=copied / file.name, **options))
        values |= {f"from the {which} version's checkpoint: {name}": value for name, value in resumed.items()}
        apart = difference(left_by(whole), resumed)[0]
        values[f"from the {which} version's checkpoint as if never stopped"] = "yes" if not apart else f"but for {apart}"
    return values


def _stopping(index: int, stop: Callable[[], None]) -> Any:
    """An observer that stops a run after a round."""
    import equipoise as eq

    class Stopping(eq.observers.Observer):
        def on_state(self, state: Any) -> None:
            if state.round == index:
                stop()

    return Stopping()


def stopped_in(index: int, run: Callable[..., Any], **options: Any) -> None:
    """Stop a run by an error of an observer."""
    import equipoise as eq

    def stop() -> None:
        raise Stops

    try:
        run(observers=[_stopping(index, stop)], **options)
    except eq.errors.ObserverFailed:
        return
    raise AssertionError("the run was not stopped")


def killed_in(index: int, run: Callable[..., Any], **options: Any) -> None:
    """Kill a run, which is in a process of its own, as the system does when memory is short."""
    child = os.fork()
    if child == 0:
        torch.set_num_threads(1)
        run(observers=[_stopping(index, lambda: os.kill(os.getpid(), signal.SIGKILL))], **options)
        os._exit(1)
    _, status = os.waitpid(child, 0)
    assert os.WIFSIGNALED(status), status


def beside_federations(m: Matrix) -> None:
    """Tilted losses, estimators and private optimisers, which use no engine."""
    m.add("tilted: losses and estimators", "any", tilted)
    for name in ("DPSGD", "DPAdam", "DPRMSProp", "DPAdaGrad", "DP2", "AdaDPS"):
        m.add(f"optim: {name}", "any", partial(private_steps, name))


def tilted(_: Any) -> Values:
    import equipoise as eq

    gen = torch.Generator().manual_seed(0)
    x = torch.randn(60, 3, generator=gen, dtype=torch.float64)
    y = (x[:, 0] + 0.3 * torch.randn(60, generator=gen, dtype=torch.float64) > 0).long()
    losses, t = x[:, 0].square(), eq.tilted
    found: Values = {
        "loss": t.tilted_loss(losses, 1.5), "weights": t.tilted_weights(losses, -1.0),
        "superquantile": t.superquantile_loss(losses, 0.3),
    }  # fmt: skip
    for kind in (t.TiltedLogisticRegression, t.TiltedSVC, t.TiltedLinearRegression):
        fitted = kind(tilt=0.5).fit(x.numpy(), (y if kind is not t.TiltedLinearRegression else x[:, 1]).numpy())
        found[kind.__name__] = torch.cat([torch.as_tensor(v).double().flatten() for v in (fitted.coef_, fitted.intercept_)])
    fair = t.FairPCA(n_components=2, tilt=1.0).fit(x.numpy(), groups=y.numpy())
    return found | {"FairPCA": torch.as_tensor(fair.components_)}


def private_steps(name: str, _: Any) -> Values:
    """Some steps of a private optimiser."""
    import equipoise as eq

    x, y = (torch.cat([part[i] for part in _gaussian((40, 40), 5, 3, 2)]) for i in (1, 2))
    model = with_values(nn.Linear(5, 3))
    more: Any = {"AdaDPS": {"public": (x[:10], y[:10])}, "DP2": {"delay": 2}}.get(name, {})
    more |= {"sample_rate": 0.2, "expected_batch_size": 16.0, "seed": 1}
    optimizer = getattr(eq.optim, name)(model, lr=0.2, clip=1.0, noise_multiplier=0.7, **more)
    for batch in optimizer.batches(x, y, steps=5):
        optimizer.step(*batch)
    return dict(model.state_dict()) | {"epsilon": str(optimizer.epsilon(delta=1e-3))}


# -------------------------------------------------------------------------------------------------------- one version's process


def one_version(options: argparse.Namespace) -> None:
    """Train all runs by the version that is imported; what they leave goes to a file, run by run."""
    torch.set_num_threads(options.threads)
    import equipoise as eq

    found = matrix(options.work, options.old_checkpoints)
    found_class("Choice")  # loads what the probes look for
    PROBED.place()
    print(f"{eq.__file__}, torch {torch.__version__}, {torch.get_num_threads()} threads", flush=True)
    if PROBED.missing:
        print(f"Nothing to count in this version: {', '.join(PROBED.missing)}", flush=True)
    left: dict[str, dict[str, Any]] = {}
    for name, run in found.runs.items():
        if not wanted(name, options.only):
            continue
        PROBED.counts.clear()
        engine, began = run.engine(), time.perf_counter()
        with warnings.catch_warnings(record=True) as warned:
            warnings.simplefilter("always")
            try:
                values = run.work(engine)
            except Exception as failure:
                values = {"failed": _said(failure)}
        notices = [f"{w.category.__name__}: {w.message}" for w in warned if issubclass(w.category, eq.errors.EquipoiseNotice)]
        values["notices"] = "\n".join(notices)
        held = {n: v.detach().cpu().clone() if isinstance(v, Tensor) else str(v) for n, v in values.items()}
        said = sorted({path for one in getattr(engine, "started", ()) for path in said_paths(one)})
        left[name] = {
            "values": held, "seconds": time.perf_counter() - began, "counts": dict(PROBED.counts), "path": run.path,
            "seen": [list(some) for some in run.seen], "unseen": list(run.unseen), "said": said, "meant": run.meant,
            "missing": PROBED.missing,
        }  # fmt: skip
        if options.verbose:
            print(f"{left[name]['seconds']:6.2f} s  {name}  {dict(PROBED.counts)} {said}", flush=True)
    torch.save(left, options.out)


def wanted(name: str, pattern: str | None) -> bool:
    """Whether a run is asked for: by a pattern with wildcards, or words that its name holds."""
    return pattern is None or fnmatch.fnmatch(name, pattern) or pattern.lower() in name.lower()


def train_by(checkout: Path, label: str, work: Path, old: Path | None, options: argparse.Namespace) -> dict[str, Any]:
    """What one version makes of the runs, in a process of its own."""
    source = checkout.resolve() / "src"
    assert (source / "equipoise").is_dir(), f"{source} holds no equipoise"
    work.mkdir(parents=True)
    threads = str(options.threads)
    environment = os.environ | {
        "PYTHONPATH": str(source), "OMP_NUM_THREADS": threads, "MKL_NUM_THREADS": threads,
        "EQUIPOISE_CACHE": str(work / "cache"), "PYTHONDONTWRITEBYTECODE": "1",
    }  # fmt: skip
    command = [sys.executable, __file__, "--version-of", str(source), "--threads", threads, "--work", str(work)]
    command += ["--out", str(work / "left.pt"), *(["--only", options.only] if options.only else [])]
    command += [*(["--old-checkpoints", str(old)] if old else []), *(["--verbose"] if options.verbose else [])]
    print(f"{label}: {source}", flush=True)
    began = time.perf_counter()
    subprocess.run(command, env=environment, check=True)
    found: dict[str, Any] = torch.load(work / "left.pt", weights_only=True)
    print(f"{label}: {len(found)} runs in {time.perf_counter() - began:.0f} s", flush=True)
    return found


# -------------------------------------------------------------------------------------------------------------------- the table


def path_trouble(run: dict[str, Any]) -> str:
    """What is wrong with the path that a run took, as far as calls were counted; empty if nothing is."""
    known = [some for some in run["seen"] if not set(some) & set(run["missing"])]
    absent = [" or ".join(some) for some in known if not any(run["counts"].get(probe) for probe in some)]
    wrong = [probe for probe in run["unseen"] if run["counts"].get(probe)]
    said = [f"by {path}, as it says" for path in run["said"] if run["meant"] not in (None, path)]
    return "; ".join([f"not by {words}" for words in absent] + [f"by {probe}" for probe in wrong] + said)


def print_table(old: dict[str, Any], new: dict[str, Any]) -> int:
    """The table, the exceptions, and how many runs are wrong."""
    bad, excused = [], []
    width = max(map(len, (*old, *new, "run")), default=3)
    print(f"\n{'run':<{width}}  {'path':<24} {'equal':<6} {'difference':>10}")
    for name in dict.fromkeys((*old, *new)):
        a, b = old.get(name), new.get(name)
        if a is None or b is None:
            where, apart, largest = ["in one version only"], ["all"], math.inf
        else:
            apart, largest = difference(a["values"], b["values"])
            where = [f"{label} went {text}" for label, run in (("old", a), ("new", b)) if (text := path_trouble(run))]
            where += [f"{label}: {text}" for label, run in (("old", a), ("new", b)) if (text := run["values"].get("failed"))]
        good = not apart and not where
        shown = f"{largest:.3g}" if largest else ("0" if not apart else "text")
        print(f"{name:<{width}}  {(a or b)['path']:<24} {'yes' if good else 'NO':<6} {shown:>10}")
        if not good:
            what = "; ".join([*where, f"differs in {', '.join(apart[:6])}{' …' if len(apart) > 6 else ''}" if apart else ""])
            excuse = exempt(name, apart, bool(where))
            excused.append((name, shown, what, excuse)) if excuse else bad.append((name, shown, what))
    print(f"\n{len(old)} runs of the old version, {len(new)} of the new; {len(bad)} unlisted differences.")
    for each in EXCEPTIONS:
        print(f"Exception: {each.reason}")
        for name, shown, what, excuse in excused:
            if excuse is each:
                print(f"    {name} (difference {shown}: {what})")
    for name, shown, what in bad:
        print(f"DIFFERENT  {name} (difference {shown}): {what}")
    return len(bad)


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--old", type=Path, help="the checkout before")
    parser.add_argument("--new", type=Path, default=Path("."), help="the checkout after")
    parser.add_argument("--only", default=None, help="runs whose name holds this, or fits it as a pattern with *")
    parser.add_argument("--threads", type=int, default=1, help="torch threads of each process; paths are checked for 1")
    parser.add_argument("--verbose", action="store_true", help="say what each run took, and which calls were counted")
    parser.add_argument("--version-of", default=None, help=argparse.SUPPRESS)
    parser.add_argument("--work", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--old-checkpoints", type=Path, default=None, help=argparse.SUPPRESS)
    parser.add_argument("--out", type=Path, default=None, help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> None:
    options = asked()
    if options.version_of is not None:
        one_version(options)
        return
    if options.old is None:
        raise SystemExit("give --old, the checkout to compare with")
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="same-results-") as folder:
        work = Path(folder)
        old = train_by(options.old, "old", work / "old", None, options)
        new = train_by(options.new, "new", work / "new", work / "old", options)
        bad = print_table(old, new)
    seen = Counter(path for run in old.values() for path in run["counts"])
    print("Runs of the old version by path:", ", ".join(f"{path} {count}" for path, count in sorted(seen.items())))
    print(f"{time.perf_counter() - began:.0f} s in all.")
    raise SystemExit(1 if bad else 0)


if __name__ == "__main__":
    main()
