"""Functions of the library that are no parts of an algorithm, on random numbers, each against a law that it must keep."""

from __future__ import annotations

import random
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import numpy as np
import torch

import equipoise as eq
from campaign_drivers import scenes
from campaign_drivers.findings import Finding
from equipoise import attacks, optim, privacy
from equipoise.conformal import conformal_sets
from equipoise.core.task import Task
from equipoise.engines import Loop
from equipoise.errors import EquipoiseError, EquipoiseNotice
from equipoise.heterogeneity import dissimilarity, inexactness
from equipoise.privacy.correlated_noise import BLT, fit_blt
from equipoise.privacy.releases import CohortEvent, NoSampling, PoissonSampling, Release
from equipoise.risk import measures
from equipoise.types import Cohort

Law = Callable[[random.Random], None]


def _need(good: bool, what: str, **case: Any) -> None:
    if not good:
        raise Finding(what, **case)


def order_of_measures(chance: random.Random) -> None:
    """Quantile ≤ mean beyond it ≤ its entropic bound ≤ largest loss; the tilted bound is between the first and the third."""
    count, scale = chance.randint(1, 12), 10 ** chance.uniform(-6, 6)
    losses = torch.tensor([chance.choice([0.0, 1.0, chance.random(), chance.expovariate(1)]) for _ in range(count)]) * scale
    weights = (
        torch.tensor([chance.choice([0.0, 1.0, chance.random()]) for _ in range(count)]) if chance.random() < 0.5 else None
    )
    tail = chance.choice([1.0, 1e-9, 1 / count, chance.uniform(0.01, 1)])
    case = {"losses": losses.tolist(), "weights": weights, "tail": tail}
    if weights is not None and float(weights.sum()) == 0:
        return
    var, cvar, evar, tivar = (
        measure(losses, tail, weights)
        for measure in (
            measures.value_at_risk, measures.superquantile, measures.entropic_value_at_risk, measures.tilted_value_at_risk,
        )
    )  # fmt: skip
    kept = losses if weights is None else losses[weights > 0]
    slack = 1e-6 * max(scale, float(kept.abs().max()))
    _need(var <= tivar + slack, "the quantile exceeds its tilted bound", **case, found=(var, tivar))
    _need(tivar <= evar + slack, "the tilted bound exceeds the entropic one", **case, found=(tivar, evar))
    _need(var <= cvar + slack, "the quantile exceeds the superquantile", **case, found=(var, cvar))
    _need(cvar <= evar + slack, "the superquantile exceeds its entropic bound", **case, found=(cvar, evar))
    _need(evar <= float(kept.max()) + slack, "a bound exceeds the largest loss", **case, found=evar)


def cover(chance: random.Random) -> None:
    """Sets that are judged by the examples that calibrated them cover at least what was asked for, by sums, too."""
    data, model = scenes.plain(), scenes.softmax()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(10 ** chance.uniform(-3, 3))
    miss = chance.choice([0.5, 0.1, 1e-3, chance.uniform(0.01, 0.99)])
    per_client = chance.random() < 0.4
    histogram = privacy.SecureHistogram(1.0, chance.choice([2, 10, 64]))
    quantile = None if per_client or chance.random() < 0.5 else histogram
    found = conformal_sets(model, data, miss=miss, per_client=per_client, quantile=quantile)
    case = {"miss": miss, "per_client": per_client, "quantile": quantile}
    _need(found.overall >= 1 - miss - 1e-9, "sets cover less than was asked for", **case, overall=found.overall)
    _need(bool(((found.set_size >= 0) & (found.set_size <= 3)).all()), "a set with more classes than there are", **case)


def private_steps(chance: random.Random) -> None:
    """A private optimiser that stops and goes on from its state ends where one that went through does."""
    x, y = _examples()
    public = (x[:5], y[:5])
    made: dict[str, Callable[..., Any]] = {
        "DPSGD": optim.DPSGD, "DPAdam": optim.DPAdam, "DPRMSProp": optim.DPRMSProp, "DPAdaGrad": optim.DPAdaGrad,
        "DPRPub": lambda net, **o: optim.DPRPub(net, public=public, public_batch_size=chance.choice([None, 2]), **o),
        "AdaDPS": lambda net, **o: optim.AdaDPS(net, public=public, **o),
        "DP2": lambda net, **o: optim.DP2(net, delay=2, clip_adaptive=0.3, **o),
        "PDADPMD": lambda net, **o: optim.PDADPMD(net, public=public, private_share=0.7, **o),
    }  # fmt: skip
    name = chance.choice(sorted(made))
    options = {"lr": 0.1, "clip": 10 ** chance.uniform(-2, 2), "noise_multiplier": chance.choice([0.0, 0.5, 2.0])}
    options |= {"sample_rate": chance.choice([0.1, 0.5, 1.0]), "expected_batch_size": 6, "noise_seed": chance.randrange(100)}
    steps, stop, state = 6, chance.randint(0, 6), chance.getstate()

    def start() -> tuple[torch.nn.Module, Any]:
        chance.setstate(state)
        net = scenes.softmax()
        return net, made[name](net, **options)

    whole, optimizer = start()
    for batch in optimizer.batches(x, y, steps=steps):
        optimizer.step(*batch)
    stopped, before = start()
    for batch in before.batches(x, y, steps=stop):
        before.step(*batch)
    resumed, after = start()
    resumed.load_state_dict(stopped.state_dict())
    after.load_state_dict(before.state_dict())
    for batch in after.batches(x, y, steps=steps - stop):
        after.step(*batch)
    case = {"optimiser": name, "options": options, "stop": stop}
    pairs = list(zip(whole.parameters(), resumed.parameters(), strict=True))
    _need(all(torch.equal(a, b) for a, b in pairs), "a resumed optimiser ends elsewhere", **case)
    _need(all(bool(torch.isfinite(a).all()) for a, _ in pairs), "a private step is not finite", **case)
    _need(optimizer.epsilon(1e-5, method="rdp") == after.epsilon(1e-5, method="rdp"), "ε differs after resuming", **case)


def _examples() -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(30, 3, generator=generator, dtype=torch.float64)
    return x, torch.randint(0, 3, (30,), generator=generator)


def correlated(chance: random.Random) -> None:
    """Noise of buffers is C⁻¹ z: multiplied by C it is the independent noise again."""
    pairs = chance.randint(0, 3)
    decays = tuple(chance.choice([0.0, chance.random(), 0.999]) for _ in range(pairs))
    scales = tuple(chance.random() / max(pairs, 1) for _ in range(pairs))
    made, rounds = BLT(decays, scales), chance.randint(1, 12)
    if chance.random() < 0.1:
        separation = chance.randint(1, 3)
        made = fit_blt(rounds, pairs=chance.randint(0, 2), separation=separation, participations=1)
    independent = torch.randn(rounds, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(chance.randrange(99)))
    buffers, noises = made.begin(independent[0]), []
    for z in independent:
        noise, buffers = made.step(z, buffers)
        noises.append(noise)
    column = made.coefficients(rounds)
    matrix = np.array([[column[i - j] if i >= j else 0.0 for j in range(rounds)] for i in range(rounds)])
    again = matrix @ torch.stack(noises).numpy()
    _need(np.allclose(again, independent.numpy(), rtol=0, atol=1e-8), "C C⁻¹ is not the identity", made=made, rounds=rounds)


def noise_and_cost(chance: random.Random) -> None:
    """The noise that is found for a budget costs at most it, and not much less."""
    epsilon, delta, rounds = 10 ** chance.uniform(-1, 1.5), 10 ** chance.uniform(-9, -2), chance.choice([1, 3, 50])
    rate = chance.choice([None, 1.0, 0.1, 0.01])
    z = privacy.noise_for(epsilon, delta, rounds=rounds, sampling_rate=rate, method="rdp", tolerance=1e-2)
    event = CohortEvent((Release("all", z),), NoSampling() if rate is None else PoissonSampling(rate))
    found = privacy.epsilon_of([(event, rounds)], delta, method="rdp")
    case = {"epsilon": epsilon, "delta": delta, "rounds": rounds, "rate": rate, "noise": z}
    _need(found <= epsilon * (1 + 1e-9), "the noise costs more than the budget", **case, found=found)
    _need(found >= 0.97 * epsilon or z < 0.06, "the noise costs much less than the budget", **case, found=found)


def differences(chance: random.Random) -> None:
    """How clients' gradients differ is the same on both engines, and not less than nothing."""
    scene = scenes.Scene(chance.choice(["softmax", "regression", "dropout", "trees", "logistic", "MLP"]))
    data = scene.data()
    if scene.kind == "softmax" and chance.random() < 0.5:
        data = attacks.apply(data, chance.choice(scenes.ATTACKS))
    found = [dissimilarity(scene.model(), data, engine=engine) for engine in ("loop", "simulator")]
    case = {"scene": scene.words(), "attack": data.malicious, "found": found}
    _need(abs(found[0].variance - found[1].variance) <= 1e-8 * max(1.0, found[0].variance), "engines differ", **case)
    _need(found[0].variance >= 0 and found[0].ratio >= 1 - 1e-9, "a dissimilarity below that of equal clients", **case)


def progress(chance: random.Random) -> None:
    """A client that computes nothing has made no progress: γ = 1 for a rate near 0."""
    task = Task.around(scenes.softmax())
    engine = Loop().start(task, scenes.plain())
    weights = torch.full((9,), 1 / 9, dtype=torch.float64)
    cohort = Cohort(0, 0, torch.arange(9), weights, torch.ones(9, dtype=torch.float64))
    solver = eq.solvers.SGD(lr=1e-12, batch_size=None, prox=chance.choice([0.0, 1.0]))
    found = inexactness(engine, task.read_model(), cohort, solver)
    _need(torch.allclose(found, torch.ones_like(found), atol=1e-6), "no work, and progress", found=found.tolist())


LAWS: dict[Law, tuple[str, ...]] = {
    order_of_measures: (
        "equipoise.risk.measures:value_at_risk", "equipoise.risk.measures:superquantile",
        "equipoise.risk.measures:entropic_value_at_risk", "equipoise.risk.measures:tilted_value_at_risk",
    ),
    cover: ("equipoise.conformal:conformal_sets",),
    private_steps: tuple(
        f"equipoise.optim:{name}"
        for name in ("DPSGD", "DPAdam", "DPRMSProp", "DPAdaGrad", "DPRPub", "AdaDPS", "DP2", "PDADPMD")
    ),
    correlated: ("equipoise.privacy.correlated_noise:BLT", "equipoise.privacy.correlated_noise:fit_blt"),
    noise_and_cost: ("equipoise.privacy:epsilon_of", "equipoise.privacy:noise_for"),
    differences: ("equipoise.heterogeneity:dissimilarity", "equipoise.attacks:apply"),
    progress: ("equipoise.heterogeneity:inexactness",),
}  # fmt: skip


def try_function(chance: random.Random, counts: Counter[str]) -> None:
    """One law on random numbers; what is refused has a reason."""
    law = chance.choice(list(LAWS))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        try:
            law(chance)
        except EquipoiseError as refusal:
            raise Finding(f"valid numbers were refused: {refusal}", law=law.__name__) from refusal
    counts[f"law: {law.__name__}"] += 1
