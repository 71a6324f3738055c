"""Random combinations of parts: refused with a reason, or right on every engine, resumable, and with every part in effect."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import equipoise as eq
from campaign_drivers import random_parts as parts
from campaign_drivers.findings import Finding
from equipoise.engines import Simulator
from equipoise.errors import Diverged, EquipoiseError, EquipoiseNotice
from equipoise.runs.checkpoint import Checkpoints
from equipoise.types import Observer

ROUNDS = 3
TOLERANCE = 1e-6  # of the largest number, in float64

# Changes that may be without effect, by kind of part: each with its reason.
NEUTRAL = {
    "sampler": "on nine clients of nine a sampler may draw everyone, as the default does",
    "weights": "a risk may give every client the same weight, whatever the base weights are",
    "averaging": "of a model that does not move, any average is the model",
    "privacy": "a secure sum is the sum; its rounding may vanish in float64",
}


class Stop(Observer):
    """Stops a run after a round, as a kill would."""

    def __init__(self, after: int) -> None:
        self.after = after

    def on_state(self, state: Any) -> None:
        if state.round == self.after:
            raise RuntimeError("stop")


def train(chosen: parts.Chosen, data: eq.FederatedData | None = None, **more: Any) -> eq.Result:
    """A short run; notices are not what this looks for."""
    given = {"rounds": ROUNDS, "engine": "loop"} | parts.options(chosen) | more
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        return eq.train(parts.model(), data or parts.clients(), chosen.algorithm(), **given)


def numbers(result: eq.Result) -> list[Tensor]:
    """All that a run gives: parameters, own models and the scores of clients."""
    found = [result.params, result.clients.loss, result.clients.error]
    if result.personal is not None:
        found.append(result.personal.params(sorted(result.personal.ids)))
    if result.clients.personal_loss is not None:
        found.append(result.clients.personal_loss.nan_to_num())
    return found


def near(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether all numbers agree up to rounding; errors are counts, and may differ by an example at a tie."""
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        scale = max(float(a.abs().max()), 1.0)
        if number != 2 and not torch.allclose(a, b, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
            return False
    return True


def identical(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether all numbers are the same, bit for bit."""
    return all(torch.equal(a.nan_to_num(), b.nan_to_num()) for a, b in zip(first, second, strict=True))


def try_combination(chance: random.Random, folder: Path, counts: Counter[str]) -> None:
    """One random algorithm."""
    chosen = parts.draw(chance)
    try:
        algorithm = chosen.algorithm()
    except EquipoiseError as refusal:
        if not str(refusal).strip():
            raise Finding("a refusal without a reason", parts=chosen.words()) from refusal
        counts["refused at construction"] += 1
        return
    try:
        loop = train(chosen)
    except Diverged:
        counts["diverged"] += 1
        return
    except EquipoiseError:  # e.g. a privacy budget, or Krum with too few clients in a Poisson cohort
        counts["refused in the run"] += 1
        return
    found = numbers(loop)
    fast = numbers(train(chosen, engine=Simulator(workers=1)))
    if not near(found, fast):
        worst = max(float((a - b).abs().max()) for a, b in zip(found, fast, strict=True))
        raise Finding("loop and simulator differ", parts=chosen.words(), difference=worst)
    counts["engines agree"] += 1
    _resume(chance, chosen, folder, found)
    counts["resumed exactly"] += 1
    if chance.random() < 0.3:
        _many(chosen, found)
        counts["train_many agrees"] += 1
    if algorithm.traits.sampler.everyone and chance.random() < 0.5:
        _permuted(chance, chosen, loop)
        counts["permuted clients agree"] += 1
    _matters(chance, chosen, found, counts)


def _resume(chance: random.Random, chosen: parts.Chosen, folder: Path, whole: list[Tensor]) -> None:
    file = folder / "run.safetensors"
    with suppress(EquipoiseError):
        train(chosen, checkpoint=Checkpoints(file, every=1), observers=[Stop(chance.randint(1, ROUNDS))])
    resumed = numbers(train(chosen, checkpoint=Checkpoints(file, every=1)))
    if not identical(resumed, whole):
        raise Finding("a resumed run ends elsewhere", parts=chosen.words())


def _many(chosen: parts.Chosen, alone: list[Tensor]) -> None:
    given = parts.options(chosen)
    seed = given.pop("seed")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        several = eq.train_many(
            parts.model(), parts.clients(), {"run": chosen.algorithm()}, seeds=[seed, seed + 1], rounds=ROUNDS, engine="loop",
            **given,
        )  # fmt: skip
    if not near(alone[:1], [several.results["run"][0].params]):
        raise Finding("train_many and train differ", parts=chosen.words())


def _permuted(chance: random.Random, chosen: parts.Chosen, whole: eq.Result) -> None:
    order = list(range(9))
    chance.shuffle(order)
    other = train(chosen, parts.clients(tuple(order)))
    if not near([whole.params], [other.params]):
        difference = float((whole.params - other.params).abs().max())
        raise Finding("the order of clients changes the model", parts=chosen.words(), order=order, difference=difference)


def _matters(chance: random.Random, chosen: parts.Chosen, found: list[Tensor], counts: Counter[str]) -> None:
    """Leave one part out: something must change, or the combination should have been refused."""
    if not chosen.parts:
        return
    kind = chance.choice(sorted(chosen.parts))
    try:
        without = numbers(train(chosen.without(kind)))
    except EquipoiseError:
        return
    same = len(without) == len(found) and identical(found, without)
    if same and kind not in NEUTRAL:
        raise Finding(f"the {kind} is without effect", parts=chosen.words(), kind=kind)
    counts["neutral" if same else "a part matters"] += 1
