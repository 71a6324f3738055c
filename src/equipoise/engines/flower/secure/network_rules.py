"""Algorithms that work in a simulation and not on real nodes: each reason with its cure, known before any node is asked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from equipoise.core.abilities import read
from equipoise.errors import IncompatibleParts
from equipoise.models.adapters import WHY_NOT_BOTH, trains_lora_a
from equipoise.types import AggregatorTraits

if TYPE_CHECKING:
    from torch import nn

    from equipoise.algorithm import Algorithm

USE_HISTOGRAM = (
    "Use quantile=privacy.SecureHistogram(bound=…, bins=64), or quantile=privacy.PrivateQuantile(bound=…, bins=32) with "
    "privacy=DifferentialPrivacy(…, noise='distributed')."
)
Problem = tuple[str, str]  # the reason, and what to do


def refuse_on_nodes(algorithm: Algorithm, *, signed: bool = False) -> None:
    """Refuse an algorithm that nodes would refuse, or that would not protect them; all problems are in one message."""
    problems = list(find_problems(algorithm, signed=signed))
    if problems:
        reasons, cures = (list(dict.fromkeys(texts)) for texts in zip(*problems, strict=True))
        raise IncompatibleParts(" ".join(reasons), " ".join(cures))


def refuse_both_trained(model: nn.Module, algorithm: Algorithm) -> None:
    """Refuse low-rank adapters that train both matrices under differential privacy: every node makes its model itself."""
    if algorithm.traits.privacy.clip is not None and trains_lora_a(model):
        raise IncompatibleParts(
            f"{type(model).__name__} trains A and B of its adapters, but under differential privacy {WHY_NOT_BOTH}.",
            "Make the model by models.freeze_lora_a(…) on the server and on every node.",
        )


def find_problems(algorithm: Algorithm, *, signed: bool) -> Iterator[Problem]:
    """What does not work over a network."""
    privacy = algorithm.traits.privacy
    if privacy.noise_seed is not None:
        yield "noise_seed draws noise that can be drawn again and taken off: it is for tests.", "Leave noise_seed out."
    if privacy.sums_alone:
        yield from _problems_of_sums(algorithm)
    elif signed:
        reason = "signed=True is for secure sums, and this algorithm asks for single updates."
        yield reason, "Add privacy=privacy.SecureAggregation() to the Algorithm, or drop signed."


def _problems_of_sums(algorithm: Algorithm) -> Iterator[Problem]:
    """What masked sums over a network cannot do."""
    if algorithm.traits.personal.updates is not None:
        yield (
            f"{algorithm.personal!r} has clients send other updates than the solver's, which are not summed securely here.",
            "Use personal.Ditto(): its models stay with the clients.",
        )
    normalised, sampler = algorithm.traits.aggregator, algorithm.traits.sampler
    inner, public = normalised.normalises, normalised.steps is not None
    if inner is not None and not public and not read(AggregatorTraits, inner).weighted_sum:
        yield (
            f"{algorithm.aggregator!r} acts on updates in units of the cohort's mean length of steps, which nobody knows "
            "before the secure sum.",
            "Give a public number: aggregators.FedNova(…, steps=…).",
        )
    if not algorithm.aggregator.linear:
        yield (
            f"{algorithm.aggregator!r} moves its centre from round to round, which nodes are not told.",
            "Use aggregators.NormClip(…), or run it in a simulation.",
        )
    if algorithm.traits.risk.client_form == "groups":
        yield (
            f"{algorithm.risk!r} needs secure sums of losses over groups, which nodes do not make.",
            "Use risk.Superquantile(…, quantile=privacy.SecureHistogram(…)), or run it in a simulation.",
        )
    if algorithm.traits.quantile.iterations is not None:
        yield (
            f"The sums of {algorithm.traits.risk.quantile!r} tell an attentive server who is in the tail, and the losses of "
            "single clients: it is for simulations.",
            USE_HISTOGRAM,
        )
    if algorithm.private and sampler.independent and not sampler.by_nodes:
        # A sum that is refused because a Poisson cohort was small would tell more than the noise hides.
        yield (
            "Poisson cohorts may have fewer clients than a secure sum needs, and refusing such a sum tells who was drawn.",
            "Use sampler=sampling.NodePoisson(), sampling.Uniform() for cohorts of fixed size, or sampling.Full().",
        )
