"""Values of functions beside federations: tilted estimators, private optimisers, measures of losses, accounting."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from benchmarks.gate import adapter, own
from torch import nn

RATE = 0.2  # of Poisson batches


def _table(rows: int = 60, features: int = 3) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    rng = np.random.default_rng(2)
    x = rng.standard_normal((rows, features))
    y = (x[:, 0] + 0.4 * rng.standard_normal(rows) > 0).astype(np.int64)
    return x, y, rng.integers(0, 3, rows)


def tilted() -> dict[str, Any]:
    """Losses, weights, estimators and descents."""
    from equipoise import tilted as t

    x, y, groups = _table()
    losses, parts = torch.from_numpy(x[:, 0] ** 2), torch.from_numpy(groups)
    found: dict[str, Any] = {
        "superquantile": t.superquantile_loss(losses, 0.3),
        "by groups": t.superquantile_loss(losses, 0.4, parts),
    }
    for tilt in (-2.0, 0.5, 3.0):
        found |= {f"loss {tilt}": t.tilted_loss(losses, tilt), f"weights {tilt}": t.tilted_weights(losses, tilt)}
        found[f"groups {tilt}"] = t.tilted_loss(losses, tilt, parts, inner_tilt=-1.0)
        for kind in (t.TiltedLogisticRegression, t.TiltedSVC, t.TiltedLinearRegression):
            fitted = kind(tilt=tilt).fit(x, x[:, 1] + 0.3 * x[:, 2] if kind is t.TiltedLinearRegression else y)
            found |= {f"{kind.__name__} {tilt}": fitted.coef_, f"{kind.__name__} {tilt}, bias": np.asarray(fitted.intercept_)}
    grouped = t.TiltedLogisticRegression(tilt=1.0, inner_tilt=-1.0).fit(x, y, groups=groups)
    tail = t.TiltedLinearRegression(risk="superquantile", tail=0.4).fit(x, x[:, 1])
    found |= {"grouped": grouped.coef_, "tail": tail.coef_}
    found["FairPCA"] = t.FairPCA(n_components=2, tilt=1.0).fit(x, groups=y).components_
    start, points = torch.zeros(3, dtype=torch.float64), torch.from_numpy(x)

    def at(params: torch.Tensor, rows: torch.Tensor | None = None) -> torch.Tensor:
        return ((points if rows is None else points[rows]) - params).square().sum(-1)

    found["batch"] = t.batch_descent(at, start, 0.2, lr=0.02, steps=20).parameters
    found["stochastic"] = t.stochastic_descent(at, start, 60, 0.2, lr=0.02, steps=20, batch_size=4, seed=1).parameters
    found["groups drawn"] = t.hierarchical_stochastic_descent(
        at, start, groups, 0.2, inner_tilt=0.1, lr=0.02, steps=20, batch_size=3, seed=1
    ).parameters
    tracking = t.TiltedLoss(1.0, tracked=True)
    found["tracked"] = torch.stack([tracking(losses[:20]), tracking(losses[20:])])
    return found


def optimiser(name: str, **options: Any) -> Callable[[], dict[str, Any]]:
    """Some steps of a private optimiser of equipoise.optim."""

    def steps() -> dict[str, Any]:
        import equipoise as eq

        kind = getattr(eq.optim, name)
        x, y, _ = _table(80, 6)
        xs, ys = torch.from_numpy(x).float(), torch.from_numpy(y)
        more = {k: (xs[:10], ys[:10]) if v == "public" else v for k, v in ({"expected_batch_size": 14.0} | options).items()}
        net = own.model("network")
        made = kind(
            net, lr=0.2, clip=1.0, noise_multiplier=0.7, sample_rate=RATE, **adapter.seeded(eq.optim.PrivateOptimizer), **more
        )
        for batch in made.batches(xs[10:], ys[10:], steps=5):
            made.step(*batch)
        return dict(net.state_dict()) | {"epsilon": made.epsilon(delta=1e-3)}

    return steps


def measures() -> dict[str, Any]:
    """VaR, CVaR, EVaR and TiVaR of a vector of losses."""
    from equipoise.risk import measures as m

    losses, weights = torch.tensor([0.3, 2.0, 1.1, 0.3, 5.0, 0.7], dtype=torch.float64), torch.arange(1.0, 7.0).double() / 21
    kinds = (m.value_at_risk, m.superquantile, m.entropic_value_at_risk, m.tilted_value_at_risk)
    return {f"{kind.__name__} {tail}": kind(losses, tail, weights) for kind in kinds for tail in (0.2, 0.5, 1.0)}


def accounting() -> dict[str, Any]:
    """Noise for budgets, and correlated noise."""
    import equipoise as eq

    fitted = eq.privacy.fit_blt(20, pairs=2)
    found: dict[str, Any] = {
        "noise, Poisson": eq.privacy.noise_for(3.0, 1e-4, rounds=50, sampling_rate=0.1),
        "noise, fixed": eq.privacy.noise_for(3.0, 1e-4, rounds=50, cohort=10, population=100),
        "noise, all": eq.privacy.noise_for(3.0, 1e-4, rounds=50, method="rdp"),
        "fitted": [*fitted.decays, *fitted.scales],
        "BLT": eq.privacy.BLT((0.5, 0.9), (0.3, 0.1)).coefficients(8),
    }
    return found


def differences() -> dict[str, Any]:
    """How far apart clients are, and how exactly they solve."""
    import equipoise as eq

    data = eq.data.label_shift(train_clients=6, validation_clients=0, test_clients=2, examples=15, seed=1)
    found = eq.heterogeneity.dissimilarity(eq.models.Softmax(20, 10), data)
    watching = eq.heterogeneity.Heterogeneity()
    solver = eq.solvers.SGD(lr=0.1, prox=0.1, epochs=2)
    eq.train(eq.models.Softmax(20, 10), data, eq.Algorithm(solver=solver), rounds=2, clients_per_round=4, observers=[watching])
    return {"variance": found.variance, "ratio": found.ratio}


def figures() -> dict[str, Any]:
    """Figures over clients, and a model's buffers replaced."""
    import equipoise as eq

    m, values, sizes = eq.metrics, torch.linspace(0.05, 0.9, 12, dtype=torch.float64).square(), torch.arange(1, 13)
    found = {name: getattr(m, name)(values) for name in ("standard_deviation", "angle", "entropy", "kl_to_uniform", "gini")}
    found |= {"mean": m.mean(values, sizes.double()), "percentile": m.percentile(values, 90), "worst": m.worst(values, 0.1)}
    found["rank"] = m.rank_correlation(values, sizes)
    torch.manual_seed(3)
    plain = eq.models.with_group_norm(nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8)))
    return found | {f"group norm/{name}": value for name, value in plain.state_dict().items()}


PUBLIC = {"public": "public"}
SCRIPTS: dict[str, Callable[[], dict[str, Any]]] = {
    "tilted": tilted, "equipoise.risk.measures.value_at_risk": measures, "equipoise.privacy.noise_for": accounting,
    "equipoise.heterogeneity.dissimilarity": differences, "figures": figures,
    "equipoise.optim.DPSGD": optimiser("DPSGD"), "equipoise.optim.DPAdam": optimiser("DPAdam"),
    "equipoise.optim.DPRMSProp": optimiser("DPRMSProp"), "equipoise.optim.DPAdaGrad": optimiser("DPAdaGrad"),
    "equipoise.optim.DPRPub": optimiser("DPRPub", public_batch_size=4, **PUBLIC),
    "equipoise.optim.AdaDPS": optimiser("AdaDPS", **PUBLIC),
    "equipoise.optim.DP2": optimiser("DP2", delay=2, clip_adaptive=2.0),
    "equipoise.optim.PDADPMD": optimiser("PDADPMD", private_share=0.7, **PUBLIC),
}  # fmt: skip
