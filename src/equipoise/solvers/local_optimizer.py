"""What the local optimisers share: how long clients work, at which rate, and what is done to gradients before a step."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import KW_ONLY, MISSING, dataclass, field, fields, replace
from fnmatch import fnmatchcase
from typing import Any, Literal, Self

import numpy as np
import torch
from torch import Tensor

from equipoise.core import rng
from equipoise.core.abilities import solver_traits
from equipoise.core.numbers import Numbers
from equipoise.errors import InvalidParameter, is_number, require, require_integer, require_kind, require_number
from equipoise.types import Cohort, Schedule

_LOOKED_AT = 10_000  # rounds and local steps at which schedules are tried before a run


def stragglers(keys: Tensor, share: float, full: int) -> tuple[Tensor, Tensor]:
    """Who of K clients is slow, (K,) bool, and how much of 1 … `full` each would get done, (K,) int64.

    A share of the cohort is slow, to the nearest client, but never everyone. Both depend on the clients' keys alone. Source:
    Li 2023 (thesis), section 3.4.2; the published code draws 1 … E − 1 epochs, the text says 1 … E.
    """
    count = min(int(share * len(keys) + 0.5), len(keys) - 1)
    bits = rng.random_bits(keys, 0, 2)  # (K, 2)
    slow = torch.zeros(len(keys), dtype=torch.bool)
    slow[bits[:, 0].argsort(stable=True)[:count]] = True
    return slow, 1 + bits[:, 1] % full


def check_local_work(epochs: int, steps: int | None) -> None:
    """Raise InvalidParameter unless the length of local work is given by epochs, or by steps."""
    require_integer("epochs", epochs, 0)
    require_integer("steps", steps, 0, none="work by epochs")
    fix = "Say how long clients work either by epochs or by steps."
    require(steps is None or epochs == 1, "epochs", "must be left alone when steps is given", epochs, fix)


@dataclass(frozen=True, repr=False)
class LocalOptimizer:
    """The options that SGD, Adam and AdamW share. Each subclass gives a step, and is final.

    `epochs` passes over a client's examples, or exactly `steps` steps, with batches of `batch_size` (None: all examples).

    `clip_norm` bounds the gradient of the loss at every local step: the gradient of one client, over all parameters together,
    is scaled down to this L2 norm, as torch.nn.utils.clip_grad_norm_ does. Weight decay and the proximal term are added
    afterwards, and are not clipped. None, or infinity, clips nothing.

    `schedule` multiplies the rate by a factor of the round, `local_schedule` by a factor of the local step, which it counts
    from 0 in every round (solvers.Constant, Step, Cosine, LinearDecay, or any frozen object that maps an integer to a positive
    number). `rates` multiplies the rate of parameters by name: {"head.*": 0.1}; the first pattern that matches a name counts.

    `state="fresh"` begins every round with an empty memory (momentum, moments, number of steps). `state="kept"` keeps the
    memory of each client from one round that it takes part in to the next: as many numbers as memory tensors times parameters,
    and one more, in a file. It never leaves the client, so that privacy and secure sums are not touched by it.

    `prox` μ > 0 is FedProx: μ(w − w^t) is added to every gradient. `straggler_share` of every cohort gets only a uniform number
    of 1 … E epochs (or steps) done; `stragglers` says whether this partial work is taken ("keep") or not ("drop").
    """

    lr: float = 0.1
    batch_size: int | None = 10
    epochs: int = 1
    steps: int | None = None
    _: KW_ONLY
    weight_decay: float = 0.0
    prox: float = 0.0
    straggler_share: float = 0.0
    stragglers: Literal["keep", "drop"] = "keep"
    clip_norm: float | None = None
    schedule: Schedule | None = None
    local_schedule: Schedule | None = None
    rates: Mapping[str, float] = field(default_factory=dict, hash=False)
    state: Literal["fresh", "kept"] = "fresh"

    def __post_init__(self) -> None:
        require_number("lr", self.lr, "(0, ∞)")
        require_integer("batch_size", self.batch_size, 1, none="the full batch")
        check_local_work(self.epochs, self.steps)
        require_number("straggler_share", self.straggler_share, "[0, 1)")
        for name in ("weight_decay", "prox"):
            require_number(name, getattr(self, name), "[0, ∞)")
        require(self.stragglers in ("keep", "drop"), "stragglers", 'must be "keep" or "drop"', self.stragglers)
        share, full = self.straggler_share, self.epochs if self.steps is None else self.steps
        rule = 'needs more than one epoch (or step) with stragglers="keep": whoever gets one done has done all'
        fix = "Give more epochs, count work in steps, or drop stragglers."
        require(share == 0 or self.stragglers == "drop" or full != 1, "straggler_share", rule, share, fix)
        require_number("clip_norm", self.clip_norm, "(0, ∞]", none="no clipping")
        if self.clip_norm == math.inf:
            object.__setattr__(self, "clip_norm", None)
        for name in ("schedule", "local_schedule"):
            check_schedule_factor(name, getattr(self, name))
        check_rates(self.rates)
        object.__setattr__(self, "rates", {pattern: float(rate) for pattern, rate in self.rates.items()})
        require(self.state in ("fresh", "kept"), "state", 'must be "fresh" or "kept"', self.state)
        if self.state == "kept":
            rule, fix = "needs a memory that can be kept", "Give momentum, or use solvers.Adam."
            require(self.memories > 0, "state", rule, f"{self.state} of {type(self).__name__}", fix)

    def __repr__(self) -> str:
        """All options that differ from their defaults, and those that a solver has always had: checkpoints compare this."""
        always = type(self).always_shown()
        defaults: dict[str, Any] = {f.name: {} if f.default is MISSING else f.default for f in fields(self)}
        values = {name: getattr(self, name) for name in (*always, *(name for name in defaults if name not in always))}
        shown = (f"{name}={value!r}" for name, value in values.items() if name in always or value != defaults[name])
        return f"{type(self).__name__}({', '.join(shown)})"

    @classmethod
    def always_shown(cls) -> tuple[str, ...]:
        """The options that are shown also where they have their default, in order."""
        return ("lr", "batch_size", "epochs", "steps")

    @property
    def memories(self) -> int:
        """How many numbers are remembered for each parameter from step to step."""
        return len(self.begin(torch.empty(1)))

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        """The memory before the first step, of zeros; each tensor is shaped like `weights`."""
        raise NotImplementedError

    def local_steps(self, size: int, effort: int | None = None) -> int:
        """Steps that a client with `size` examples takes; `effort` is how many epochs (or steps) it gets done, if not all."""
        if self.steps is not None:
            return self.steps if effort is None else min(effort, self.steps)
        epochs = self.epochs if effort is None else min(effort, self.epochs)
        return epochs * (1 if self.batch_size is None else -(-size // self.batch_size))

    def local_steps_each(self, sizes: Numbers, efforts: Numbers | None) -> Numbers:
        """`local_steps` of many clients with these sizes (K,), as an array (K,)."""
        full = self.epochs if self.steps is None else self.steps
        done = np.full(len(sizes), full) if efforts is None else np.minimum(efforts, full)
        return done * (1 if self.steps is not None or self.batch_size is None else -(-sizes // self.batch_size))

    def learning_rate(self, round_index: int) -> float:
        """The rate of a round: lr times the schedule's factor."""
        if self.schedule is None:
            return self.lr
        rate = self.lr * float(self.schedule(round_index))
        if not 0 <= rate < math.inf:
            rule = "must give a rate that is finite and not negative in every round"
            shown = f"{self.schedule!r}, which gives the rate {rate:g} in round {round_index + 1} (index {round_index})"
            fix = "Bound the factor from below, e.g. max(1 - index / rounds, 0.01), or use solvers.LinearDecay(rounds)."
            raise InvalidParameter("schedule", rule, shown, fix)
        return rate

    @property
    def step_factor(self) -> Callable[[int], float] | None:
        """The factor of the rate at local step 0, 1, …; None where all steps of a round have one rate."""
        return self.local_schedule

    @property
    def keeps(self) -> Callable[[int], int] | None:
        """How many numbers a client keeps between rounds, for a model of D parameters; None where it keeps none."""
        return None if self.state == "fresh" else lambda dimension: self.memories * dimension + 1

    def normalisers(self, steps: Tensor, lr: float) -> Tensor:
        """What τ = `steps` (K,) steps add up to under a gradient of 1, in units of the rate `lr`: a of FedNova, (K,) float64.

        The solver's own steps are taken, from 0 and without weight decay, which belongs to the gradient.
        """
        plain: Any = replace(self, weight_decay=0.0)
        weights, start, one = (torch.full((1,), value, dtype=torch.float64) for value in (0.0, 0.0, 1.0))
        memory, reached = plain.begin(weights), [0.0]
        for number in range(int(steps.max()) if len(steps) else 0):
            rate = lr if self.local_schedule is None else lr * float(self.local_schedule(number))
            told = {"number": number + 1} if solver_traits(plain).numbered else {}
            plain.step(weights, one, memory, anchor=start, lr=rate, **told)
            reached.append(-float(weights) / lr)
        return torch.tensor(reached, dtype=torch.float64)[steps]

    def with_prox(self, prox: float) -> Self:
        """The solver with another μ."""
        return replace(self, prox=prox)

    def with_epochs(self, epochs: int) -> Self:
        """The solver with another number of passes over a client's data."""
        return replace(self, epochs=epochs, steps=None)

    def for_own_model(self) -> Self:
        """The solver for a client's own model: a fresh state in every round, no stragglers, and no proximal term."""
        return replace(self, straggler_share=0.0, prox=0.0, state="fresh")

    def efforts(self, cohort: Cohort, keys: Tensor) -> Tensor | None:
        """Epochs (or steps) that each client of a cohort gets done, 0 for a straggler that is dropped; None without any."""
        full = self.epochs if self.steps is None else self.steps
        if self.straggler_share == 0 or full == 0:
            return None
        own_keys = rng.client_keys(rng.stream_key(cohort.seed, "stragglers", cohort.round), keys)
        slow, done = stragglers(own_keys, self.straggler_share, full)
        return torch.where(slow, done if self.stragglers == "keep" else 0, full)


def check_schedule_factor(parameter: str, schedule: Any) -> None:
    """Raise InvalidParameter unless a schedule is None, or gives a positive factor at 0."""
    if schedule is None:
        return
    rule, fix = "must map 0, 1, … to a positive factor, or be None", "E.g. solvers.Cosine(rounds=200, warmup=10)."
    require(callable(schedule) and not isinstance(schedule, type), parameter, rule, schedule, fix)
    require_kind(parameter, "schedule", schedule)
    first = schedule(0)
    require(is_number(first) and 0 < first < math.inf, parameter, rule, f"{schedule!r}, {first!r} at 0", fix)


def refuse_wrong_rates(solver: Any, rounds: int, largest: int) -> None:
    """Raise InvalidParameter if a schedule gives a rate that is negative or not finite in a round or at a local step.

    `largest` is the number of examples of the largest client. At most 10,000 rounds and steps are looked at.
    """
    while solver is not None:
        if isinstance(solver, LocalOptimizer):
            for index in range(min(rounds, _LOOKED_AT) if solver.schedule is not None else 0):
                solver.learning_rate(index)
            local = solver.local_schedule
            for index in range(min(solver.local_steps(largest), _LOOKED_AT) if local is not None else 0):
                factor = float(local(index)) if local is not None else 1.0
                rule = "must give a factor that is finite and not negative at every local step"
                shown = f"{local!r}, which gives {factor:g} at local step {index + 1} (index {index})"
                require(0 <= factor < math.inf, "local_schedule", rule, shown, "Bound the factor from below.")
        solver = solver_traits(solver).solver


def check_rates(rates: Any) -> None:
    """Raise InvalidParameter unless `rates` maps patterns of names to positive factors."""
    require(isinstance(rates, Mapping), "rates", "must map patterns of parameter names to factors of lr", rates)
    for pattern, rate in rates.items():
        require(isinstance(pattern, str), "rates", 'must name parameters by patterns such as "head.*"', pattern)
        fix = "To train a parameter not at all, call requires_grad_(False) on it." if is_number(rate) and rate == 0 else ""
        good = is_number(rate) and 0 < rate < math.inf
        require(good, f"rates[{pattern!r}]", "must be a positive factor of lr", rate, fix)


def rates_by_name(rates: Mapping[str, float] | None, names: tuple[str, ...]) -> dict[str, float]:
    """The factor of the rate of each parameter, by the first pattern that matches its name, else 1; empty without patterns.

    >>> rates_by_name({"head.*": 0.1}, ("body.weight", "head.weight"))
    {'body.weight': 1.0, 'head.weight': 0.1}
    """
    if not isinstance(rates, Mapping) or not rates:  # a solver of the user's own may mean something else by the name
        return {}
    for pattern in rates:
        if not any(fnmatchcase(name, pattern) for name in names):
            fix = f"They are {', '.join(names)}."
            raise InvalidParameter("rates", "must match names of trained parameters", pattern, fix)
    return {name: next((rate for pattern, rate in rates.items() if fnmatchcase(name, pattern)), 1.0) for name in names}
