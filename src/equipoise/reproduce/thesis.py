"""Experiments of the thesis: fairness on Synthetic (Tables 4.1 and 4.10), and FedProx (Figure 3.1).

benchmarks/fairness.py and benchmarks/heterogeneity.py have the same settings, and measure more.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from torch import nn

from equipoise.data import synthetic
from equipoise.data.clients import FederatedData
from equipoise.models import Softmax
from equipoise.reproduce import data_sets as sources
from equipoise.reproduce import scores as measures
from equipoise.reproduce.entry import Claim, Experiment, Method, Scale
from equipoise.risk import QFair
from equipoise.sampling import Proportional
from equipoise.solvers import SGD

DATA: dict[str, dict[str, Any]] = {
    "Synthetic IID": {"iid": True},
    "Synthetic(1,1)": {"beta": 1.0},
    "Synthetic(2,2)": {"beta": 2.0},
}
SHARES = (0.0, 0.5, 0.9)


def softmax(data: FederatedData, folder: Path | None, seed: int) -> nn.Module:
    """The linear model on Synthetic data."""
    return Softmax(60, 10)


def with_q(data: str, clients: int, q: int) -> str:
    """The name of a row of Table 4.10."""
    return f"{data}, {clients} clients, q = {q}"


def fairness_claims() -> tuple[Claim, ...]:
    """Q = 1 lowers the variance and raises the worst 10 %, on all data that are not IID."""
    rows = [(data, clients) for data in DATA if data != "Synthetic IID" for clients in (100, 50)]
    return tuple(
        claim
        for data, clients in rows
        for claim in (
            Claim("variance", with_q(data, clients, 1), with_q(data, clients, 0), "Table 4.10: more uniform"),
            Claim("worst", with_q(data, clients, 0), with_q(data, clients, 1), "Table 4.10: the worst 10 % gain"),
        )
    )


fairness = Experiment(
    name="fairness-synthetic",
    title="q-FedAvg on Synthetic data, softmax regression",
    tables=("thesis/fairness-4-1", "thesis/fairness-4-10"),
    methods=tuple(
        Method(with_q(data, clients, q), QFair(float(q)), Proportional(), variant={**options, "clients": clients})
        for data, options in DATA.items()
        for clients in (100, 50)
        for q in (0, 1)
    ),
    model=softmax,
    data=sources.synthetic_with_sizes_of_table_4_4,
    solver=SGD(lr=0.1, batch_size=10, epochs=1),
    scales={
        "small": Scale(rounds=200, clients_per_round=10, seeds=2),
        "paper": Scale(rounds=2000, clients_per_round=10, seeds=5),
    },
    figures=measures.ACCURACIES,
    measure=measures.accuracies,
    unseen=False,
    paper_lr=0.1,
    claims=fairness_claims(),
    differences=(
        "Each seed draws data and split; the thesis has five splits of one draw.",
        "Client sizes are ⌊exp(N(4, 1))⌋ + 50, near those of Table 4.4; the published generator's are ten times as spread out.",
        "The thesis trains until the training loss does not fall for 10 rounds; here the number of rounds is fixed.",
    ),
    rates=(0.03, 0.1, 0.3),
)


def synthetic_30(folder: Path | None, seed: int) -> FederatedData:
    """Synthetic(1,1) with 30 clients; a fifth of the examples of each is for testing."""
    return synthetic(1, 1, clients=30, test=0.2, seed=seed)


def with_stragglers(share: float, name: str) -> str:
    """The name of a row of Figure 3.1."""
    return f"{100 * share:.0f} % stragglers, {name}"


def fedprox_methods() -> tuple[Method, ...]:
    """FedAvg and FedProx with each share of stragglers; without stragglers FedAvg is FedProx with μ = 0, and left out."""
    variants: tuple[tuple[str, dict[str, object]], ...] = (
        ("FedAvg", {"stragglers": "drop"}),
        ("FedProx μ = 0", {"stragglers": "keep"}),
        ("FedProx μ = 1", {"stragglers": "keep", "prox": 1.0}),
    )
    return tuple(
        Method(with_stragglers(share, name), solver={**options, "straggler_share": share})
        for share in SHARES
        for name, options in variants
        if share > 0 or name != "FedAvg"
    )


def fedprox_claims() -> tuple[Claim, ...]:
    """Partial work lowers the loss, and a proximal term steadies it."""
    partial_work = "section 3.4.2: partial work is beneficial"
    proximal = "section 3.4.3: μ > 0 increases stability"
    return (
        *(
            Claim("loss", with_stragglers(s, "FedProx μ = 0"), with_stragglers(s, "FedAvg"), partial_work)
            for s in SHARES
            if s > 0
        ),
        *(Claim("change", with_stragglers(s, "FedProx μ = 1"), with_stragglers(s, "FedProx μ = 0"), proximal) for s in SHARES),
        Claim("accuracy", with_stragglers(0.9, "FedAvg"), with_stragglers(0.9, "FedProx μ = 1"), "section 3.4.3.2"),
    )


fedprox = Experiment(
    name="fedprox-synthetic",
    title="FedProx with stragglers on Synthetic(1,1), softmax regression, 20 local epochs",
    tables=("thesis/fedprox-synthetic",),
    methods=fedprox_methods(),
    model=softmax,
    data=synthetic_30,
    solver=SGD(lr=0.01, batch_size=10, epochs=20),
    # Clients of some seeds are so large that a round takes minutes; seed 3's are not.
    scales={"small": Scale(10, 10, 1, first_seed=3), "paper": Scale(200, 10, 1, first_seed=3)},
    figures=measures.CONVERGENCE,
    measure=measures.convergence,
    unseen=False,
    paper_lr=0.01,
    claims=fedprox_claims(),
    differences=("Published are curves of one run; the change of the loss is ours, to put stability into a number.",),
    evaluate_share=0.05,
    rates=(0.003, 0.01, 0.03),
)

ENTRIES = (fairness, fedprox)
