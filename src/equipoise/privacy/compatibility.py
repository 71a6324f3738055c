"""What goes together under differential privacy or secure aggregation; all else is refused, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.core.abilities import is_of_user, read, solver_traits
from equipoise.errors import IncompatibleParts
from equipoise.types import AggregatorTraits

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.privacy.dp_ftrl import DPFTRL
    from equipoise.privacy.mechanism import DifferentialPrivacy, SecureAggregation


def refuse_unprotected(algorithm: Algorithm, privacy: DifferentialPrivacy | DPFTRL) -> None:
    """Refuse, under differential privacy, whatever releases something that no noise protects."""
    if algorithm.weights == "examples":
        raise IncompatibleParts(
            "weights='examples' lets one client with many examples move the sum by more than the clip bound that the noise is "
            "made for.",
            "Use weights='uniform' (the default under privacy).",
        )
    traits = algorithm.traits
    summed = traits.aggregator.normalises or algorithm.aggregator  # FedNova scales updates before they are clipped
    if not read(AggregatorTraits, summed).weighted_sum or traits.aggregator.needs_losses:
        raise IncompatibleParts(
            f"{algorithm.aggregator!r} is no plain sum of updates, which is all that the noise protects.",
            "Use aggregators.WeightedMean(); clipping is part of the privacy mechanism.",
        )
    _refuse_risk(algorithm, privacy.loss_bound, "differential privacy")
    _refuse_looking_around(algorithm, "differential privacy")
    inner = traits.solver.solver or algorithm.solver  # of one that wraps another (AdaDPS)
    slow = solver_traits(inner)
    if slow.efforts is not None and slow.straggler_share > 0:
        raise IncompatibleParts(
            f"{inner!r} makes a share of each cohort slow: one client more or less then changes how much another gets done, "
            "and moves the sum by more than the clip bound that the noise is made for.",
            "Use straggler_share=0.",
        )


def refuse_unaccounted(algorithm: Algorithm) -> None:
    """Refuse cohorts that the accountant does not know."""
    drawn, traits = algorithm.drawn_by, algorithm.traits
    if not traits.sampler.accounted or is_of_user(drawn):
        raise IncompatibleParts(
            f"The accountant does not know cohorts drawn by {drawn!r}.",
            "Use sampling.Poisson() (the default), sampling.Uniform() for cohorts of fixed size, or sampling.Full().",
        )
    if traits.sampler.share != 1:
        raise IncompatibleParts(
            f"{drawn!r} draws fewer clients than clients_per_round says, which the accountant goes by.",
            "Use sampling.Uniform() with a smaller clients_per_round.",
        )


def refuse_uncorrelated(algorithm: Algorithm) -> None:
    """Refuse, under noise that is correlated over rounds, clients whose rounds may be any, and releases beside the sum."""
    if algorithm.traits.sampler.separation is None or is_of_user(algorithm.drawn_by):
        raise IncompatibleParts(
            "Noise that is correlated over rounds goes by how far apart the rounds of a client are, which "
            f"{algorithm.drawn_by!r} does not promise.",
            "Use sampling.MinSeparation(rounds=…), sampling.Full(), or sampling.FedBuff(apart=…).",
        )
    if algorithm.traits.risk.client_form != "base":
        raise IncompatibleParts(
            f"The weights of {algorithm.risk!r} need a second release in every round (a quantile, or a sum of weights), which "
            "correlated noise does not cover.",
            "Use risk.Mean(), or privacy.DifferentialPrivacy(…).",
        )


def refuse_visible(algorithm: Algorithm, privacy: SecureAggregation) -> None:
    """Refuse, under secure aggregation, whatever has to see a single client."""
    traits = algorithm.traits.aggregator
    if traits.needs_losses or (not algorithm.aggregator.linear and traits.around is None):
        raise IncompatibleParts(
            f"SecureAggregation reveals only the sum of updates, but {algorithm.aggregator!r} reads each one.",
            "Use aggregators.WeightedMean(), or drop SecureAggregation.",
        )
    _refuse_risk(algorithm, privacy.loss_bound, "SecureAggregation")
    _refuse_looking_around(algorithm, "SecureAggregation")


def _refuse_risk(algorithm: Algorithm, loss_bound: float | None, under: str) -> None:
    risk, traits = algorithm.risk, algorithm.traits.risk
    alone = traits.client_form == "loss" and traits.client_weight is not None
    if is_of_user(risk) and not alone and (traits.client_form != "base" or traits.needs_losses):
        raise IncompatibleParts(
            f"Under {under} each client finds its weight alone, from its own loss and a public bound, and {risk!r} has no such "
            "client-side form.",
            'If its weights are a function of a client\'s own loss, set client_form = "loss" in the class, add the method '
            "client_weight(loss, base_weight, public) with values between 0 and base_weight, and give the privacy part a "
            "loss_bound, which is `public`. Otherwise use risk.Mean(), risk.Superquantile(0.5, "
            f"quantile=privacy.{_hidden_quantile(under)}), risk.Tilted(1.0) or risk.QFair(1.0).",
        )
    if traits.client_form == "base" or (traits.client_form == "groups" and under == "SecureAggregation"):
        return
    if traits.client_form == "filter":
        _refuse_filter(algorithm, under)
    elif traits.client_form == "loss":
        if traits.tracked:
            raise IncompatibleParts(
                f"{risk!r} steps by a risk that the server tracks from losses, which {under} does not let it see.",
                "Use tracked=False.",
            )
        if loss_bound is None:
            raise IncompatibleParts(
                f"The weights of {risk!r} grow with the loss without bound, so that one client could outweigh all others.",
                "Give the privacy part a loss_bound: losses above it count as the bound.",
            )
    else:
        raise IncompatibleParts(
            f"The weights of {risk!r} depend on losses of other clients, which {under} does not let anybody see.",
            f"Use risk.Mean(), risk.Superquantile(0.5, quantile=privacy.{_hidden_quantile(under)}), or risk.Tilted(1.0) or "
            f"risk.QFair(1.0) and give the privacy part a loss_bound.",
        )


def _hidden_quantile(under: str) -> str:
    """The source of quantiles that a protection goes with, as it is written."""
    return "SecureHistogram(bound=…, bins=64)" if under == "SecureAggregation" else "PrivateQuantile(bound=…, bins=32)"


def _refuse_filter(algorithm: Algorithm, under: str) -> None:
    risk, traits, quantile = algorithm.risk, algorithm.traits.risk, algorithm.traits.quantile
    private = under == "differential privacy"
    if not traits.filters or quantile.reads_losses or is_of_user(traits.quantile):
        raise IncompatibleParts(
            f"{risk!r} sets weights by the losses of single clients, which {under} does not let the server see.",
            f"Give it quantile=privacy.{_hidden_quantile(under)}.",
        )
    if private and quantile.calibrated is None:
        raise IncompatibleParts(
            f"{traits.quantile!r} hides single losses, but what it releases is not differentially private.",
            "Give it quantile=privacy.PrivateQuantile(bound=…, bins=32).",
        )
    if private and traits.eta_every > 1:
        raise IncompatibleParts(
            f"eta_every={traits.eta_every} takes a new quantile early when nobody reaches the old one: it depends on the data.",
            "Use eta_every=1.",
        )
    if quantile.histogram is not None and traits.eta_every > 1:
        raise IncompatibleParts(
            f"eta_every={traits.eta_every} keeps an old quantile, and without a new histogram nobody knows whether the tail is "
            "large enough to hide a client.",
            "Use eta_every=1.",
        )
    if not private and quantile.calibrated is not None:
        raise IncompatibleParts(
            f"{traits.quantile!r} sets its noise by a budget, and SecureAggregation has none.",
            "Use quantile=privacy.SecureHistogram(bound=…, bins=64), or privacy=DifferentialPrivacy(…, noise='distributed').",
        )


def _refuse_looking_around(algorithm: Algorithm, under: str) -> None:
    traits = algorithm.traits
    if traits.solver.prepare is not None and not traits.solver.public_only:
        raise IncompatibleParts(
            f"{type(algorithm.solver).__name__} looks at clients' losses or gradients before the round, which {under} does not "
            "protect.",
            "Use solvers.SGD(…), with prox=… for FedProx.",
        )
    personal, sums = algorithm.personal, traits.personal.sums_models
    if sums or (sums is None and personal is not None and is_of_user(personal)):
        raise IncompatibleParts(
            f"{personal!r} has the server see clients' own models, or what they add up to, which {under} does not protect.",
            "Use personal.Ditto(): its models stay with the clients. A class of your own says so by sums_models = False.",
        )
