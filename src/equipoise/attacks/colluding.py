"""Attacks of clients that collude and see every honest update of the round before they send theirs."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from equipoise.aggregators.robust import gram_matrix, squared_distances
from equipoise.attacks.malicious import Sent, check_attack_parameters
from equipoise.core import rng
from equipoise.data.clients import ClientSet
from equipoise.errors import require, require_number

WEAK_FACTOR = 0.25  # of ALIE's z; the 5 attackers among 25 clients that papers have give 0.253


def honest_mean(sent: Sent) -> Tensor:
    """The mean μ (D,) of the honest updates, float64; of the attackers' own updates where nobody else is in the round."""
    known = sent.honest if sent.honest is not None and len(sent.honest) else sent.updates
    return known.double().mean(0)


def honest_deviation(sent: Sent) -> Tensor:
    """The standard deviation s (D,) of each coordinate over the honest updates, with n − 1, float64; 0 of a single one."""
    if sent.honest is None or len(sent.honest) < 2:
        return torch.zeros_like(sent.updates[0], dtype=torch.float64)
    return sent.honest.double().std(0)


def alie_factor(clients: int, attackers: int) -> float:
    """How far a majority can be pulled unnoticed: z = Φ⁻¹((K − f − q)/(K − f)) with q = ⌊K/2⌋ + 1 − f, at least 0.

    It is 0 as well where all clients of a round are attackers.

    >>> round(alie_factor(25, 5), 4), alie_factor(10, 1), alie_factor(3, 3)
    (0.2533, 0.0, 0.0)
    """
    honest = clients - attackers
    supporters = clients // 2 + 1 - attackers
    if honest <= max(supporters, 0):  # nobody to hide among, or a majority without any of the honest
        return 0.0
    share = min((honest - supporters) / honest, 1 - 1e-12)
    return max(0.0, float(torch.special.ndtri(torch.tensor(share, dtype=torch.float64))))


@dataclass(frozen=True)
class ALIE:
    """A little is enough: every attacker sends μ − z s, of mean μ and deviation s of the round's honest updates.

    `factor` is z; None is Φ⁻¹((K − f − q)/(K − f)), q = ⌊K/2⌋ + 1 − f, at least 0, for f attackers among K clients. It is 0
    if few clients attack, such as 1 of 10. Then give a factor such as 1.5.

    Source: Baruch, Baruch, Goldberg 2019 (arXiv 1902.06156).

    >>> honest = torch.tensor([[1.0], [3.0], [5.0]])  # μ = 3 and s = 2
    >>> ALIE(factor=1.0).corrupt(Sent(torch.zeros(1, 1), keys=torch.tensor([0]), cohort=4, honest=honest)).tolist()
    [[1.0]]
    """

    share: float = 0.2  # the share of training clients that are malicious, in [0, 1]
    seed: int = 0  # which clients are malicious
    factor: float | None = None  # z ≥ 0; None: by the number of attackers
    omniscient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_attack_parameters(self)
        require_number("factor", self.factor, "[0, ∞)", none="by the number of attackers")

    def corrupt(self, sent: Sent) -> Tensor:
        """μ − z s in place of each update in `sent`, (k, D)."""
        z = self.factor if self.factor is not None else alie_factor(sent.cohort, len(sent.updates))
        return (honest_mean(sent) - z * honest_deviation(sent)).expand(sent.updates.shape)

    def weakness(self, clients: ClientSet, classes: int, attackers: int, cohort: int) -> str:
        """A notice if z follows from the numbers of `attackers` and of clients in a `cohort`, and is nearly 0; else ""."""
        z = alie_factor(cohort, attackers)
        if self.factor is not None or z >= WEAK_FACTOR:
            return ""
        them = "1 attacker" if attackers == 1 else f"{attackers} attackers"
        return (
            f"ALIE's factor z is {z:.2g} for about {them} among the {cohort} clients of a round: they send "
            f"{'nearly ' * (z > 0)}the mean of the honest updates, and the attack hardly acts. Give a factor, e.g. "
            "attacks.ALIE(factor=1.5)."
        )


@dataclass(frozen=True)
class IPM:
    """Inner-product manipulation: every attacker sends −ε μ, of the mean μ of the round's honest updates.

    The weighted mean reverses its direction if ε exceeds the honest weight divided by the malicious weight.

    Source: Xie, Koyejo, Gupta 2019 (arXiv 1903.03936).

    >>> honest = torch.tensor([[1.0], [3.0], [5.0]])  # μ = 3
    >>> IPM(epsilon=0.5).corrupt(Sent(torch.zeros(1, 1), keys=torch.tensor([0]), cohort=4, honest=honest)).tolist()
    [[-1.5]]
    """

    share: float = 0.2  # the share of training clients that are malicious, in [0, 1]
    seed: int = 0  # which clients are malicious
    epsilon: float = 0.5  # ε ≥ 0, the length of what is sent in units of ‖μ‖
    omniscient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_attack_parameters(self)
        require_number("epsilon", self.epsilon, "[0, ∞)")

    def corrupt(self, sent: Sent) -> Tensor:
        """−ε μ in place of each update in `sent`, (k, D)."""
        return (-self.epsilon * honest_mean(sent)).expand(sent.updates.shape)


@dataclass(frozen=True)
class Mimic:
    """Every attacker sends a copy of the honest update that stands out most along the main direction of the honest spread.

    That is the u_k with the largest |⟨z, u_k − μ⟩|, z the top singular vector of the round's centred honest updates. Where all
    honest updates are equal it has no effect. Each round has its own target.

    `hold=True` copies the same honest client in every round instead, as the authors' code does after a warm-up. In each
    round this client then counts as often as there are attackers. Attacks have no memory, so it is not the most unusual
    client of a warm-up: honest clients come in an order drawn by `seed`, and the first of them that is in the round is the
    target.

    Source: Karimireddy, He, Jaggi 2022 (arXiv 2006.09365).

    >>> honest = torch.tensor([[1.0], [3.0], [8.0]])  # μ = 4, so 8 stands out most
    >>> Mimic().corrupt(Sent(torch.zeros(1, 1), keys=torch.tensor([0]), cohort=4, honest=honest)).tolist()
    [[8.0]]
    """

    share: float = 0.2  # the share of training clients that are malicious, in [0, 1]
    seed: int = 0  # which clients are malicious, and what is random in the attack
    hold: bool = False  # copy the same honest client in every round
    omniscient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_attack_parameters(self)
        require(isinstance(self.hold, bool), "hold", "must be True or False", self.hold)

    def corrupt(self, sent: Sent) -> Tensor:
        """One honest update in place of each malicious one in `sent`, (k, D)."""
        if sent.honest is None or len(sent.honest) == 0:
            return sent.updates
        if self.hold and sent.honest_names is not None:
            order = rng.client_keys(rng.stream_key(self.seed, "mimicked client"), sent.honest_names)
            return sent.honest[int(order.argmin())].expand(sent.updates.shape)
        vectors = torch.linalg.eigh(gram_matrix(sent.honest, honest_mean(sent)).cpu()).eigenvectors
        return sent.honest[int(vectors[:, -1].abs().argmax())].expand(sent.updates.shape)


def longest_step(honest: Tensor, mean: Tensor, direction: Tensor) -> float:
    """The largest γ ≥ 0 with ‖μ + γ p − u_k‖ ≤ Δ for every honest u_k (h, D), Δ their diameter; p ≠ 0 is `direction` (D,).

    Each k gives a quadratic in γ whose value at 0 is not positive; γ is the least of the positive roots.
    """
    away = mean - honest.double()  # (h, D)
    diameter = squared_distances(honest.double()).max()
    a, b = direction @ direction, 2 * away @ direction
    c = (away.square().sum(1) - diameter).clamp(max=0.0)
    return float(((-b + (b.square() - 4 * a * c).sqrt()) / (2 * a)).min().clamp(min=0.0))


@dataclass(frozen=True)
class MinMax:
    """Every attacker sends μ + γ p, with the largest γ that stays within the largest distance between honest updates.

    `direction` p is "deviation" (−s, each coordinate's standard deviation), "mean" (−μ/‖μ‖) or "sign" (−sign μ).

    Source: Shejwalkar, Houmansadr 2021 (NDSS). Some published code returns its last trial, which may break the constraint; here
    γ is found in closed form.

    >>> honest = torch.tensor([[1.0], [3.0], [5.0]])  # 3 − γ may be 4 away from 5
    >>> MinMax(direction="mean").corrupt(Sent(torch.zeros(1, 1), keys=torch.tensor([0]), cohort=4, honest=honest)).tolist()
    [[1.0]]
    """

    share: float = 0.2  # the share of training clients that are malicious, in [0, 1]
    seed: int = 0  # which clients are malicious
    direction: Literal["deviation", "mean", "sign"] = "deviation"  # p, the direction in which μ is moved
    omniscient: ClassVar[bool] = True

    def __post_init__(self) -> None:
        check_attack_parameters(self)
        allowed = ("deviation", "mean", "sign")
        require(self.direction in allowed, "direction", 'must be "deviation", "mean" or "sign"', self.direction)

    def corrupt(self, sent: Sent) -> Tensor:
        """μ + γ p in place of each update in `sent`, (k, D)."""
        mean = honest_mean(sent)
        if self.direction == "deviation":
            along = -honest_deviation(sent)
        else:
            along = -mean.sign() if self.direction == "sign" else -mean / mean.norm().clamp(min=1e-300)
        if sent.honest is not None and len(sent.honest) > 1 and bool((along != 0).any()):
            mean = mean + longest_step(sent.honest, mean, along) * along
        return mean.expand(sent.updates.shape)
