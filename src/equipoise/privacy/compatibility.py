"""What goes together under differential privacy or secure aggregation; all else is refused, with the reason."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise import aggregators, sampling
from equipoise.errors import IncompatibleParts
from equipoise.risk import Mean, QFair, Superquantile, Tilted

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm
    from equipoise.privacy.mechanism import DifferentialPrivacy, SecureAggregation


def refuse_unprotected(algorithm: Algorithm, privacy: DifferentialPrivacy) -> None:
    """Refuse, under differential privacy, whatever releases something that no noise protects."""
    if algorithm.weights == "examples":
        raise IncompatibleParts(
            "weights='examples' lets one client with many examples move the sum by more than the clip bound that the noise is "
            "made for.",
            "Use weights='uniform' (the default under privacy).",
        )
    if type(algorithm.aggregator) is not aggregators.WeightedMean:
        raise IncompatibleParts(
            f"{algorithm.aggregator!r} is no plain sum of updates, which is all that the noise protects.",
            "Use aggregators.WeightedMean(); clipping is part of the privacy mechanism.",
        )
    drawn = algorithm.sampler
    if not (drawn is None or type(drawn) in (sampling.Poisson, sampling.Uniform, sampling.Full)):
        raise IncompatibleParts(
            f"The accountant does not know cohorts drawn by {drawn!r}.",
            "Use sampling.Poisson() (the default), sampling.Uniform() for cohorts of fixed size, or sampling.Full().",
        )
    if isinstance(drawn, sampling.Uniform) and drawn.share != 1:
        raise IncompatibleParts(
            f"{drawn!r} draws fewer clients than clients_per_round says, which the accountant goes by.",
            "Use sampling.Uniform() with a smaller clients_per_round.",
        )
    _refuse_risk(algorithm, privacy.loss_bound, "differential privacy")
    _refuse_looking_around(algorithm, "differential privacy")
    inner = getattr(algorithm.solver, "solver", algorithm.solver)  # of one that wraps another (AdaDPS)
    if getattr(inner, "straggler_share", 1 if hasattr(inner, "efforts") else 0) > 0:
        raise IncompatibleParts(
            f"{inner!r} makes a share of each cohort slow: one client more or less then changes how much another gets done, "
            "and moves the sum by more than the clip bound that the noise is made for.",
            "Use straggler_share=0.",
        )


def refuse_visible(algorithm: Algorithm, privacy: SecureAggregation) -> None:
    """Refuse, under secure aggregation, whatever has to see a single client."""
    if not algorithm.aggregator.linear:
        raise IncompatibleParts(
            f"SecureAggregation reveals only the sum of updates, but {algorithm.aggregator!r} reads each one.",
            "Use aggregators.WeightedMean(), or drop SecureAggregation.",
        )
    _refuse_risk(algorithm, privacy.loss_bound, "SecureAggregation")
    _refuse_looking_around(algorithm, "SecureAggregation")


def _refuse_risk(algorithm: Algorithm, loss_bound: float | None, under: str) -> None:
    risk = algorithm.risk
    if isinstance(risk, Mean):
        return
    if isinstance(risk, Superquantile):
        _refuse_superquantile(risk, under)
    elif isinstance(risk, Tilted | QFair):
        if isinstance(risk, Tilted) and risk.tracked:
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
            "Use Mean, Superquantile with a private quantile, Tilted or QFair.",
        )


def _refuse_superquantile(risk: Superquantile, under: str) -> None:
    private = under == "differential privacy"
    if not risk.filters or getattr(risk.quantile, "reads_losses", True):
        fix = "PrivateQuantile(bound=…, bins=32)" if private else "SecureSums()"
        raise IncompatibleParts(
            f"{risk!r} sets weights by the losses of single clients, which {under} does not let the server see.",
            f"Give it quantile=privacy.{fix}.",
        )
    if private and not hasattr(risk.quantile, "calibrated"):
        raise IncompatibleParts(
            f"{risk.quantile!r} hides single losses, but what it releases is not differentially private.",
            "Give it quantile=privacy.PrivateQuantile(bound=…, bins=32).",
        )
    if private and risk.eta_every > 1:
        raise IncompatibleParts(
            f"eta_every={risk.eta_every} takes a new quantile early when nobody reaches the old one: it depends on the data.",
            "Use eta_every=1.",
        )
    if not private and hasattr(risk.quantile, "calibrated"):
        raise IncompatibleParts(
            f"{risk.quantile!r} sets its noise by a budget, and SecureAggregation has none.",
            "Use quantile=privacy.SecureSums(), or privacy=DifferentialPrivacy(…, noise='distributed').",
        )


def _refuse_looking_around(algorithm: Algorithm, under: str) -> None:
    if hasattr(algorithm.solver, "prepare") and not getattr(algorithm.solver, "public_only", False):
        raise IncompatibleParts(
            f"{type(algorithm.solver).__name__} looks at clients' losses or gradients before the round, which {under} does not "
            "protect.",
            "Use solvers.SGD(…), with prox=… for FedProx.",
        )
    if getattr(algorithm.personal, "sums_models", False):
        raise IncompatibleParts(
            f"{algorithm.personal!r} has the server see clients' own models, or what they add up to, which {under} does not "
            "protect.",
            "Use personal.Ditto(): its models stay with the clients.",
        )
