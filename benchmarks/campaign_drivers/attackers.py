"""Byzantine updates against every robust aggregator: the total must keep the bound that is stated for it.

The attackers know the rule and what honest clients send. Bounds are those of docs/howto/attacks.md and of the docstrings.
"""

from __future__ import annotations

import math
import random
import warnings
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

import equipoise as eq
from campaign_drivers import random_parts as parts
from campaign_drivers import scenes
from campaign_drivers.findings import Finding
from equipoise import aggregators, attacks, sampling
from equipoise.attacks import Sent
from equipoise.errors import Diverged, EquipoiseError, EquipoiseNotice

ROUNDING = 1e-5  # of the largest honest number, in float32
TOGETHER = 40  # attacks per case


def adversarial(chance: random.Random, honest: Tensor, count: int) -> tuple[str, Tensor]:
    """What attackers send who see all honest updates (H, D): the name of the attack and (count, D)."""
    mean, spread = honest.mean(0), honest.std(0, correction=0)
    high, low = honest.max(0).values, honest.min(0).values
    direction = torch.randn(honest.shape[1], generator=torch.Generator().manual_seed(chance.randrange(2**31))).to(honest)
    size = 10.0 ** chance.uniform(-3, 30 if honest.dtype == torch.float32 else 100)
    single = {
        "not a number": torch.full_like(mean, math.nan),
        "infinite": torch.full_like(mean, chance.choice([math.inf, -math.inf])),
        "huge": direction * size,
        "largest number": torch.full_like(mean, torch.finfo(honest.dtype).max),
        "smallest number": torch.full_like(mean, 5e-324 if honest.dtype == torch.float64 else 1e-45),
        "a little is enough": mean - chance.uniform(0, 3) * spread,
        "inner product": -chance.uniform(0.1, 10) * mean,
        "just inside": low + 1e-6 * (high - low),
        "just outside": high + chance.uniform(0, 1) * (high - low),
        "copy of a client": honest[chance.randrange(len(honest))].clone(),
        "zero": torch.zeros_like(mean),
        "one coordinate": torch.where(torch.arange(len(mean)) == chance.randrange(len(mean)), size, mean),
    }
    name = chance.choice(sorted(single))
    together = single[name].expand(count, -1).clone()
    if chance.random() < 0.3:  # not all alike
        kinds = [chance.choice(sorted(single)) for _ in range(count)]
        together = torch.stack([single[kind] for kind in kinds]) if count else together
        name = " and ".join(sorted(set(kinds)))
    return name, together


def bounded(chance: random.Random, weights: Tensor, bad: int) -> list[tuple[object, str]]:
    """Aggregators that must withstand the last `bad` of the clients, and the kind of their bound."""
    clients, share = len(weights), float(weights[len(weights) - bad :].sum()) if bad else 0.0
    equal = bool((weights == weights[0]).all())
    found: list[tuple[object, str]] = [(aggregators.NormClip(chance.uniform(0.01, 10)), "clip")]
    found.append((aggregators.CentredClipping(10 ** chance.uniform(-2, 1), chance.randint(1, 4)), "centred"))
    if share < 0.5 - 1e-6:
        found += [(aggregators.Median(), "range"), (aggregators.GeometricMedian(), "centre")]
        found += [(aggregators.NormClip(None), "norm"), (aggregators.CentredClipping(None, 2), "doubling")]
        for fraction in (share, max(share, chance.uniform(0, 0.499))):
            found += [(aggregators.TrimmedMean(fraction), "range"), (aggregators.MeaMed(fraction), "width")]
            found.append((aggregators.NNM(aggregators.Median(), fraction), "mixed"))
    size = chance.randint(1, 3)
    if equal and 2 * bad * size < clients:
        found.append((aggregators.Bucketing(aggregators.Median(), size), "range"))
    if equal and bad:
        found.append((aggregators.KNorm(bad), "norm"))
    if equal and clients >= 2 * bad + 3:
        found += [(aggregators.Krum(bad), "krum"), (aggregators.MultiKrum(bad), "krum")]
    if clients >= 4 * bad + 3:
        found.append((aggregators.Bulyan(bad), "width"))
    if clients > bad:
        found.append((aggregators.DnC(max(bad, 1)), "finite"))
    return found


def try_attack(chance: random.Random, folder: Path, counts: Counter[str]) -> None:
    """Some attacks on one aggregator each, and now and then one on a whole run."""
    for _ in range(TOGETHER):
        _attack_aggregator(chance, counts)
    if chance.random() < 0.5:
        _attack_run(chance, counts)
    if chance.random() < 0.2:
        _attack_any_run(chance, counts)


def _attack_aggregator(chance: random.Random, counts: Counter[str]) -> None:
    clients, width = chance.randint(3, 25), chance.randint(1, 12)
    bad = chance.randint(0, (clients - 1) // 2)
    dtype = chance.choice([torch.float32, torch.float64])
    generator = torch.Generator().manual_seed(chance.randrange(2**31))
    scale, shift = 10.0 ** chance.uniform(-4, 4), chance.uniform(-3, 3)
    honest = (torch.randn(clients - bad, width, generator=generator, dtype=torch.float64) + shift).mul(scale).to(dtype)
    name, sent = adversarial(chance, honest, bad)
    weights = torch.full((clients,), 1 / clients, dtype=torch.float64)
    if chance.random() < 0.4:
        weights = torch.rand(clients, generator=generator, dtype=torch.float64) + 0.05
        weights = weights / weights.sum()
    rule, kind = chance.choice(bounded(chance, weights, bad))
    rows = torch.cat([honest, sent])
    order = torch.randperm(clients, generator=generator)
    if kind == "clip":  # a linear rule: the round leaves out what is not finite before it
        rows = torch.where(torch.isfinite(rows.double().square().sum(1, keepdim=True)), rows, 0.0)
    total, _ = rule(rows[order], weights[order], losses=torch.ones(clients, dtype=torch.float64))  # type: ignore[operator]
    problem = broken(kind, rule, total.double(), honest.double(), weights, bad)
    counts["attacks"] += 1
    if problem:
        case = {"clients": clients, "bad": bad, "width": width, "dtype": dtype, "attack": name, "rule": rule}
        raise Finding(problem, **case, honest=honest.tolist(), sent=sent.tolist(), total=total.tolist())


def broken(kind: str, rule: object, total: Tensor, honest: Tensor, weights: Tensor, bad: int) -> str | None:
    """Which bound a total breaks; None if it keeps all."""
    slack, clients = ROUNDING * max(float(honest.abs().max()), 1e-30), len(weights)
    if not bool(torch.isfinite(total).all()):
        return "the total is not finite"
    norms = honest.norm(dim=1)
    diameter = float(torch.cdist(honest, honest).max())
    if kind == "finite":
        return None
    if kind in ("range", "width", "mixed"):
        low, high = honest.min(0).values, honest.max(0).values
        room = slack + {"range": 0.0, "width": high - low, "mixed": diameter}[kind]
        low, high = low - room, high + room
        return None if bool(((total >= low) & (total <= high)).all()) else f"a coordinate is outside the honest range ({kind})"
    if kind == "clip":
        return None if float(total.norm()) <= rule.bound * (1 + ROUNDING) else "longer than the bound"  # type: ignore[attr-defined]
    if kind == "norm":
        return None if float(total.norm()) <= float(norms.max()) * (1 + ROUNDING) + slack else "longer than every honest update"
    if kind == "krum":
        reach = (math.sqrt(clients - bad - 2) + 1) * diameter + slack
        return None if float((total - honest.mean(0)).norm()) <= reach else "farther than Krum's bound"
    if kind == "doubling":  # a step is no longer than the farthest honest update, which is then at most twice as far
        return None if float(total.norm()) <= (2**rule.iterations - 1) * float(norms.max()) * 1.001 + slack else "a long step"  # type: ignore[attr-defined]
    share = float(weights[clients - bad :].sum()) if bad else 0.0
    if kind == "centred":
        without = torch.zeros_like(total)
        for _ in range(rule.iterations):  # type: ignore[attr-defined]
            away = honest - without
            shrink = (rule.radius / away.norm(dim=1).clamp(min=1e-300)).clamp(max=1.0)  # type: ignore[attr-defined]
            without = without + (weights[: clients - bad] * shrink) @ away
        reach = rule.iterations * share * rule.radius  # type: ignore[attr-defined]
        return None if float((total - without).norm()) <= reach * 1.001 + slack else "moved farther than its bound"
    own = weights[: clients - bad] / weights[: clients - bad].sum()
    centre = own @ honest
    radius = float((honest - centre).norm(dim=1).max())
    reach = 2 * (1 - share) / (1 - 2 * share) * radius
    return None if float((total - centre).norm()) <= 1.01 * reach + slack else "farther than the geometric median's bound"


@dataclass(frozen=True)
class Absurd:
    """Malicious clients send something that is no step."""

    share: float
    seed: int
    value: float

    def corrupt(self, sent: Sent) -> Tensor:
        """The same absurd number everywhere."""
        return torch.full_like(sent.updates, self.value)


def _attack_run(chance: random.Random, counts: Counter[str]) -> None:
    """A linear aggregator rejects what is absurd, names who sent it, and goes on as if they had not been there."""
    value = chance.choice([math.nan, math.inf, -math.inf, 1e30, -1e200, 1e308])
    attacked = attacks.apply(scenes.plain(), Absurd(chance.choice([0.1, 0.3, 0.5]), chance.randrange(1000), value))
    engine = chance.choice(["loop", "simulator"])
    algorithm = eq.Algorithm(sampler=eq.sampling.Full(), solver=parts.SGD)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        found = eq.train(scenes.softmax(), attacked, algorithm, rounds=1, engine=engine, progress=False)
        keep = [k for k, name in enumerate(attacked.train.ids) if name not in attacked.malicious]
        alone = eq.FederatedData(scenes.plain().train.take(keep), name="campaign", classes=3)
        clean = eq.train(scenes.softmax(), alone, algorithm, rounds=1, engine="loop", progress=False)
    counts["attacks on a run"] += 1
    if set(found.history.rounds[0].rejected) != attacked.malicious:
        raise Finding("absurd updates are not named", value=value, engine=engine, rejected=found.history.rounds[0].rejected)
    if not torch.allclose(found.params, clean.params, rtol=1e-6, atol=1e-9):
        raise Finding("absurd updates leave a trace", value=value, engine=engine)


def _attack_any_run(chance: random.Random, counts: Counter[str]) -> None:
    """Whatever the parts, absurd updates leave the model and the own models of benign clients finite, on both engines."""
    chosen, value = parts.draw(chance, most=3), chance.choice([math.nan, math.inf, -math.inf, 1e30, -1e200, 1e308])
    malicious = Absurd(chance.choice([0.1, 0.2, 0.3]), chance.randrange(1000), value)
    scene = scenes.Scene(chance.choice(["softmax", "softmax", "BatchNorm", "dropout", "logistic"]), attack=malicious)
    engine = chance.choice(["loop", "simulator"])
    case = {"parts": chosen.words(), "scene": scene.words(), "engine": engine}
    data = scene.data()
    try:
        algorithm = chosen.algorithm()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", EquipoiseNotice)
            found = eq.train(scene.model(), data, algorithm, rounds=3, engine=engine, **scene.options())
    except Diverged as failure:
        # A cohort, or a tail of it, may be malicious clients alone: then there is nobody to go on with.
        if chosen.parts.get("sampler", sampling.Full()) != sampling.Full() or "risk" in chosen.parts:
            counts["attacks on any run, alone"] += 1
            return
        raise Finding(f"absurd updates end a run: {failure}", **case) from failure
    except EquipoiseError:
        counts["attacks on any run, refused"] += 1
        return
    counts["attacks on any run"] += 1
    if not bool(torch.isfinite(found.params).all()):
        raise Finding("an absurd update made the model not finite", **case)
    if found.personal is not None:
        benign = [name for name in found.personal.ids if name not in data.malicious]
        if not bool(torch.isfinite(found.personal.params(benign)).all()):
            raise Finding("an absurd update made own models of benign clients not finite", **case)
