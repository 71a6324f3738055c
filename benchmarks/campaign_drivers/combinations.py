"""Random combinations of parts: refused with a reason, or right on every engine, resumable, and with every part in effect."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import equipoise as eq
from campaign_drivers import random_parts as parts
from campaign_drivers.findings import Finding
from campaign_drivers.functions import try_function
from campaign_drivers.scenes import STRAIGHT, Order, Scene, draw_scene
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


@dataclass(frozen=True)
class Case:
    """An algorithm on a scene."""

    chosen: parts.Chosen
    scene: Scene

    def train(self, order: Order = STRAIGHT, **more: Any) -> eq.Result:
        """A short run; notices are not what this looks for."""
        given = {"rounds": ROUNDS, "engine": "loop"} | self.scene.options() | more
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EquipoiseNotice)
            return eq.train(self.scene.model(), self.scene.data(order), self.chosen.algorithm(), **given)

    def words(self) -> dict[str, Any]:
        """The case for a report."""
        return {"parts": self.chosen.words(), "scene": self.scene.words()}


def numbers(result: eq.Result) -> list[Tensor]:
    """All that a run gives: parameters and buffers, scores of clients, own models, and the reports of its rounds."""
    rows = result.clients
    found = [result.params.double(), rows.error, rows.loss, *rows.metrics.values(), *rows.personal_metrics.values()]
    found += [value.double() for value in result.model.state_dict().values() if value.is_floating_point()]
    if result.personal is not None:
        found.append(result.personal.params(sorted(result.personal.ids)).double())
    if rows.personal_loss is not None:
        found.append(rows.personal_loss)
    reports = [[r.loss, r.tail_loss, r.risk or 0.0, r.cohort, r.trained, r.dropped] for r in result.history.rounds]
    return [*found, torch.tensor(reports, dtype=torch.float64)]


def near(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether all numbers agree up to rounding; errors are counts, and may differ by an example at a tie."""
    if [a.shape for a in first] != [b.shape for b in second]:
        return False
    for number, (a, b) in enumerate(zip(first, second, strict=True)):
        scale = max(float(a.nan_to_num().abs().max()), 1.0) if a.numel() else 1.0
        if number != 1 and not torch.allclose(a, b, rtol=0, atol=TOLERANCE * scale, equal_nan=True):
            return False
    return True


def identical(first: list[Tensor], second: list[Tensor]) -> bool:
    """Whether all numbers are the same, bit for bit."""
    pairs = zip(first, second, strict=False)
    return len(first) == len(second) and all(torch.equal(a.nan_to_num(nan=-1e9), b.nan_to_num(nan=-1e9)) for a, b in pairs)


def try_combination(chance: random.Random, folder: Path, counts: Counter[str]) -> None:
    """One random algorithm on one random scene; now and then one with absurd numbers, or a function of the library."""
    what = chance.random()
    if what < 0.08:
        try_function(chance, counts)
        return
    if what < 0.16:
        _absurd(chance, counts)
        return
    case = Case(parts.draw(chance), draw_scene(chance))
    try:
        algorithm = case.chosen.algorithm()
    except EquipoiseError as refusal:
        if not str(refusal).strip():
            raise Finding("a refusal without a reason", **case.words()) from refusal
        counts["refused at construction"] += 1
        return
    simulator = Simulator(workers=1, chunk_size=chance.choice([None, None, 1, 4]), compiled=chance.random() < 0.8)
    try:
        loop = case.train()
    except EquipoiseError as refusal:  # e.g. a privacy budget, or Krum with too few clients in a Poisson cohort
        _refused_alike(case, simulator, refusal)
        counts["diverged" if isinstance(refusal, Diverged) else "refused in the run"] += 1
        return
    found = numbers(loop)
    fast = numbers(case.train(engine=simulator))
    if not near(found, fast):
        apart = [
            float((a - b).nan_to_num().abs().max()) if a.shape == b.shape else -1 for a, b in zip(found, fast, strict=False)
        ]
        raise Finding("loop and simulator differ", **case.words(), engine=repr(simulator), differences=apart)
    counts["engines agree"] += 1
    counts[f"on {case.scene.kind}"] += 1
    _resume(chance, case, folder, found)
    counts["resumed exactly"] += 1
    if chance.random() < 0.3:
        _many(case, found)
        counts["train_many agrees"] += 1
    drawn_by_position = "noise='distributed'" in repr(algorithm.privacy)  # the noise of each client
    if algorithm.traits.sampler.everyone and not drawn_by_position and case.scene.permutable and chance.random() < 0.5:
        _permuted(chance, case, loop)
        counts["permuted clients agree"] += 1
    _matters(chance, case, found, counts)


def _absurd(chance: random.Random, counts: Counter[str]) -> None:
    """A part with an absurd number is refused, or a short run ends in a result or in an error of our own, on both engines."""
    chosen, scene = parts.draw(chance, most=2), draw_scene(chance)
    kind = chance.choice(sorted(chosen.parts) or ["solver"])
    about: dict[str, Any] = {"kind": kind, "before": chosen.words(), "scene": scene.words()}
    try:
        part = parts.wildly(chance, chosen.parts.get(kind, parts.SGD))
        case = Case(parts.Chosen(chosen.parts | {kind: part}), scene)
        about = case.words()
        for engine in ("loop", Simulator(workers=1)):
            case.train(engine=engine, rounds=2)
    except EquipoiseError as refusal:
        if not str(refusal).strip():
            raise Finding("a refusal without a reason", **about) from refusal
        counts["absurd numbers refused"] += 1
        return
    except Exception as failure:
        raise Finding(f"an absurd number ended in {type(failure).__name__}: {str(failure)[:300]}", **about) from failure
    counts["absurd numbers run"] += 1


def _refused_alike(case: Case, simulator: Simulator, refusal: EquipoiseError) -> None:
    """What one engine refuses, or finds to diverge, the other does, too, with the same words; distances may be rounded."""
    if not str(refusal).strip():
        raise Finding("a refusal without a reason", **case.words()) from refusal
    try:
        case.train(engine=simulator)
    except EquipoiseError as other:
        if type(other) is not type(refusal):
            raise Finding("engines refuse differently", **case.words(), loop=repr(refusal), simulator=repr(other)) from other
        return
    raise Finding("the loop refuses, the simulator trains", **case.words(), loop=repr(refusal))


def _resume(chance: random.Random, case: Case, folder: Path, whole: list[Tensor]) -> None:
    file = folder / "run.safetensors"
    with suppress(EquipoiseError):
        case.train(checkpoint=Checkpoints(file, every=1), observers=[Stop(chance.randint(1, ROUNDS))])
    resumed = numbers(case.train(checkpoint=Checkpoints(file, every=1)))
    if not identical(resumed, whole):
        raise Finding("a resumed run ends elsewhere", **case.words())


def _many(case: Case, alone: list[Tensor]) -> None:
    given = case.scene.options()
    seed = given.pop("seed")
    model, data, algorithm = case.scene.model(), case.scene.data(), case.chosen.algorithm()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        several = eq.train_many(model, data, {"run": algorithm}, seeds=[seed, seed + 1], rounds=ROUNDS, engine="loop", **given)
    if not near(alone[:1], [several.results["run"][0].params.double()]):
        raise Finding("train_many and train differ", **case.words())


def _permuted(chance: random.Random, case: Case, whole: eq.Result) -> None:
    order = list(STRAIGHT)
    chance.shuffle(order)
    other = case.train(tuple(order))
    if not near([whole.params], [other.params]):
        difference = float((whole.params - other.params).abs().max())
        raise Finding("the order of clients changes the model", **case.words(), order=order, difference=difference)


def _matters(chance: random.Random, case: Case, found: list[Tensor], counts: Counter[str]) -> None:
    """Leave one part out: something must change, or the combination should have been refused."""
    if not case.chosen.parts:
        return
    kind = chance.choice(sorted(case.chosen.parts))
    try:
        without = numbers(Case(case.chosen.without(kind), case.scene).train())
    except EquipoiseError:
        return
    same = identical(found, without)
    if same and kind == "aggregator" and case.scene.kind == "table" and "FedNova" in repr(case.chosen.parts[kind]):
        counts["neutral"] += 1  # there every client takes one step, and FedNova is FedAvg
        return
    if same and kind not in NEUTRAL and not case.chosen.varied:
        raise Finding(f"the {kind} is without effect", **case.words(), kind=kind)
    counts["neutral" if same else "a part matters"] += 1
