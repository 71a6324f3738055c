"""The common part of all private optimisers: clipped per-example gradients, noise on their sum, and the account of it."""

from __future__ import annotations

import math
import secrets
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, NotRequired, TypedDict

import torch
from torch import Tensor, nn

from equipoise.core.per_example_losses import PerExample
from equipoise.core.rng import stream_key
from equipoise.errors import InvalidParameter, require, require_integer, require_number
from equipoise.optim.gradients import ExampleGradients, Query, check_examples
from equipoise.optim.poisson_batches import Examples, poisson_batches
from equipoise.privacy.random_source import RandomSource, Seeded, SystemSource, gaussian

if TYPE_CHECKING:
    from equipoise.privacy.releases import CohortEvent

Rate = float | Callable[[int], float]  # a learning rate, or a function of the step


class PrivacyOptions(TypedDict):
    """The options that all private optimisers share."""

    clip: float  # C, the largest norm of one example's contribution; math.inf only without noise
    noise_multiplier: float  # z: the noise on the sum has standard deviation z · C per coordinate; 0 is not private
    sample_rate: float  # the probability with which each example enters a batch
    expected_batch_size: float  # b: sums are divided by it, whatever the size of a batch is
    loss: NotRequired[PerExample | None]  # (outputs, targets) → one number per example; None: the model's, or cross-entropy
    noise_seed: NotRequired[int | None]  # of noise and batches that repeat, for tests; None: from the operating system


class PrivateOptimizer(ABC):
    """Trains a module in place from noisy sums of clipped per-example gradients, which are all that it releases.

    One step on a Poisson batch B at w:
        s̃ = (Σ_{i∈B} clip(scale ⊙ ∇f_i(w) + shift, C) + N(0, z² C² I)) / b,  then w moves as a function of s̃ alone,
    with b the *expected* batch size, fixed in advance: the size of B is private. Adding or removing one example moves the sum
    by at most C, so a step is one Gaussian of multiplier z, amplified by sampling; everything else is post-processing.

    A method defines its queries to the examples (`_queries`) and how parameters move by the noisy answers (`_change`).

        optimizer = DPSGD(net, lr=0.5, clip=1.0, noise_multiplier=1.0, sample_rate=1 / 400, expected_batch_size=64)
        for x, y in optimizer.batches(X, Y, steps=1000):
            optimizer.step(x, y)
        optimizer.epsilon(delta=1e-5)

    `model` is trained in place. `clip` is C, the largest norm of one example's contribution. `noise_multiplier` is z; 0 is no
    noise and no privacy. `sample_rate` is the probability with which each example enters a batch. `expected_batch_size` is b.
    `loss` maps (outputs, targets) to one number per example (None: the model's own, or cross-entropy). Noise and batches are
    the operating system's; a `noise_seed` repeats them, for tests, and then no ε holds.

    The number N of private examples is private: with b = `sample_rate` · N the size of the noise would tell it, and so whether
    one example is there. Choose `sample_rate` and b as round numbers that one example more or less would not change.

    ε speaks of examples (add or remove one) and of the parameters only: metrics on the training examples, the batches and
    `state_dict` are not covered, nor are steps that are taken again from a state that was saved before them. Batches must be
    Poisson with `sample_rate`, as `batches` draws them.

    Source: Abadi et al. 2016; Li 2023 (thesis), chapter 6.

    >>> from equipoise.models import Logistic
    >>> from equipoise.optim import DPSGD
    >>> net, x, y = Logistic(2, bias=False), torch.eye(2), torch.tensor([0, 1])
    >>> optimizer = DPSGD(net, lr=1.0, clip=0.25, noise_multiplier=0.0, sample_rate=1.0, expected_batch_size=2)
    >>> for batch in optimizer.batches(x, y, steps=1):
    ...     optimizer.step(*batch)
    >>> net.weight.tolist(), optimizer.epsilon(1e-5)  # gradients of norm ½ are clipped to ¼; without noise there is no privacy
    ([-0.125, 0.125], inf)
    """

    def __init__(
        self,
        model: nn.Module,
        *,
        clip: float,
        noise_multiplier: float,
        sample_rate: float,
        expected_batch_size: float,
        loss: PerExample | None = None,
        noise_seed: int | None = None,
    ) -> None:
        self._examples = ExampleGradients(model, loss)
        self.layout = self._examples.layout
        check_clip("clip", clip, noise_multiplier)
        require_number("sample_rate", sample_rate, "(0, 1]")
        require_number("expected_batch_size", expected_batch_size, "(0, ∞)", "It must not tell how many examples there are.")
        self.model, self.clip, self.noise_multiplier, self.sample_rate = model, clip, noise_multiplier, sample_rate
        self.expected_batch_size = expected_batch_size
        self.steps = 0
        self.spent: dict[tuple[float, tuple[float, ...]], int] = {}  # (sample rate, multipliers of a step) → steps
        self.memory: dict[str, Tensor] = {}
        require_integer("noise_seed", noise_seed, 0, none="noise of the operating system")
        self.noise_seed = noise_seed
        self._generators: dict[str, torch.Generator] = {}  # of public batches

    # ------------------------------------------------------------------------------------------------------ what users call

    def batches(self, x: Tensor, y: Tensor, *, steps: int) -> Iterator[Examples]:
        """The next `steps` Poisson batches of all private examples.

        `x` (N, …) are the inputs, and `y` (N, …) the targets.
        """
        return poisson_batches(x, y, sample_rate=self.sample_rate, steps=steps, seed=self.noise_seed, start=self.steps)

    def step(self, x: Tensor, y: Tensor) -> None:
        """One step on a batch `x` (B, …), `y` (B, …). An empty batch is a batch: its noise is released like any other's."""
        check_examples(x, y)
        params = self.layout.read(self.model)
        queries = self._queries(params)
        totals = self._examples.clipped_sums(params, x, y, queries)
        size = self.expected_batch_size
        source = SystemSource() if self.noise_seed is None else Seeded(self.noise_seed, "optimiser noise", self.steps)
        released = [self._noisy(total, query.clip, source) / size for total, query in zip(totals, queries, strict=True)]
        self.layout.write(self.model, params + self._change(released))
        key = (float(self.sample_rate), (float(self.noise_multiplier),) * len(queries))
        self.spent[key] = self.spent.get(key, 0) + 1
        self.steps += 1

    def events(self) -> list[tuple[CohortEvent, int]]:
        """The releases so far: each kind of step as one event, and the number of such steps."""
        from equipoise.privacy.releases import CohortEvent, PoissonSampling, Release

        return [
            (CohortEvent(tuple(map(Release, self.releases, multipliers)), PoissonSampling(rate)), count)
            for (rate, multipliers), count in self.spent.items()
        ]

    def epsilon(self, delta: float, *, method: Literal["pld", "rdp"] | None = None) -> float:
        """ε at `delta` of the steps taken so far, under adding or removing one example, as `privacy.epsilon_of` judges them.

        Infinite if any step had no noise, or noise from a `noise_seed`. `method` is the accountant's: "rdp", by which the
        thesis's figures are, or "pld", the default, which is tighter.
        """
        return math.inf if self.noise_seed is not None else self.nominal_epsilon(delta, method=method)

    def nominal_epsilon(self, delta: float, *, method: Literal["pld", "rdp"] | None = None) -> float:
        """What ε would be if no noise came from a seed."""
        from equipoise.privacy.accounting import epsilon_of

        return epsilon_of(self.events(), delta, method=method)

    def state_dict(self) -> dict[str, Any]:
        """All that training needs to go on besides the parameters of the model. Keep it as secret as the data."""
        return {
            "method": type(self).__name__,
            "steps": self.steps,
            "spent": dict(self.spent),
            "expected_batch_size": self.expected_batch_size,
            "noise_seed": self.noise_seed,
            "generators": {name: source.get_state() for name, source in self._generators.items()},
            "memory": {name: value.clone() for name, value in self.memory.items()},
        }

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from `state`, the `state_dict` of an optimiser of the same class on a model of the same shapes."""
        if missing := {"method", "steps", "spent", "expected_batch_size", "noise_seed", "generators", "memory"} - set(state):
            rule = "must come from `state_dict` of a private optimiser"
            raise InvalidParameter("state", rule, f"without {sorted(missing)[0]}")
        require(state["method"] == type(self).__name__, "state", f"must be of {type(self).__name__}", state["method"])
        same = set(state["generators"]) == set(self._generators)
        require(same, "state", f"must hold generators {sorted(self._generators)}", sorted(state["generators"]))
        shapes = {name: tuple(value.shape) for name, value in state["memory"].items()}
        own = {name: tuple(value.shape) for name, value in self.memory.items()}
        fix = "Build the same model and options first."
        require(shapes == own, "state", f"must hold memory of shapes {own}", shapes, fix)
        self.steps, self.spent = int(state["steps"]), dict(state["spent"])
        self.expected_batch_size, self.noise_seed = state["expected_batch_size"], state["noise_seed"]
        for name, source in self._generators.items():
            source.set_state(state["generators"][name].cpu())
        self.memory = {name: value.to(self.memory[name]).clone() for name, value in state["memory"].items()}

    # -------------------------------------------------------------------------------------------------- what methods fill in

    releases: ClassVar[tuple[str, ...]] = ("gradient",)  # the names of what a step may release

    def _queries(self, params: Tensor) -> Sequence[Query]:
        """The queries of a step at parameters (D,), by default the gradient; of private data they may use releases only."""
        return (Query(self.clip),)

    @abstractmethod
    def _change(self, released: Sequence[Tensor]) -> Tensor:
        """The change of the parameters (D,), from one noisy mean (D,) per query."""

    # --------------------------------------------------------------------------------------------------------------- helpers

    def _zeros(self) -> Tensor:
        """Zeros like the parameters, (D,)."""
        return torch.zeros_like(self.layout.read(self.model))

    def _generator(self, purpose: str) -> torch.Generator:
        device = next(iter(self.model.parameters())).device
        seed = secrets.randbits(62) if self.noise_seed is None else self.noise_seed
        return torch.Generator(device).manual_seed(stream_key(seed, purpose) >> 1)

    def _noisy(self, total: Tensor, clip: float, source: RandomSource) -> Tensor:
        if self.noise_multiplier == 0:
            return total
        noise = gaussian(total.numel(), source).to(total.device).reshape(total.shape)  # float64: rounded once, with the sum
        return (total.double() + self.noise_multiplier * clip * noise).to(total.dtype)


def rate_at(lr: Rate, step: int) -> float:
    """The learning rate of a step."""
    return lr(step) if callable(lr) else lr


def check_lr(name: str, lr: Rate) -> None:
    """Refuse a learning rate that is neither a positive number nor a function."""
    if not callable(lr):
        require_number(name, lr, "(0, ∞)", "Or give a function of the step.")


def check_clip(name: str, clip: float, noise_multiplier: float) -> None:
    """Refuse a clip that is not positive, and noise without a finite clip."""
    require_number("noise_multiplier", noise_multiplier, "[0, ∞)")
    require_number(name, clip, "(0, ∞]")
    fix = "Give a finite clip, or noise_multiplier=0 for training that is not private."
    require(noise_multiplier == 0 or math.isfinite(clip), name, "must be finite where noise is added", clip, fix)
