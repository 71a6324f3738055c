"""What does not go with parts that correct the drift of clients (FedNova, SCAFFOLD, FedDyn), and with FedBuff."""

from __future__ import annotations

from typing import TYPE_CHECKING

from equipoise.core.abilities import read
from equipoise.errors import IncompatibleParts, brief
from equipoise.types import SolverTraits

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm


def refuse_unfit_for_normalising(algorithm: Algorithm) -> None:
    """Refuse FedNova with solvers whose steps have no single length, and where the mean length would have to be public."""
    traits, aggregator = algorithm.traits, algorithm.aggregator
    if traits.aggregator.normalises is None:
        return
    inner = read(SolverTraits, traits.solver.solver) if traits.solver.prepare is not None else traits.solver
    reason = (
        "does not say what its steps add up to" if inner.normalisers is None
        else "has rates by name, so that each parameter has a length of its own" if inner.rates
        else "keeps its state between rounds, so that steps depend on rounds before" if traits.solver.keeps is not None
        else None
    )  # fmt: skip
    if reason is not None:
        fix = "Use solvers.SGD(…), Adam or AdamW with a fresh state and one rate, or aggregators.WeightedMean()."
        raise IncompatibleParts(
            f"{aggregator!r} divides updates by the length of their steps, but {algorithm.solver!r} {reason}.", fix
        )
    if traits.personal.updates is not None:
        raise IncompatibleParts(
            f"{aggregator!r} divides updates by the length of the solver's steps, but with {algorithm.personal!r} clients send "
            "other updates.",
            "Use personal.Ditto(), or aggregators.WeightedMean().",
        )
    if algorithm.private and traits.aggregator.steps is None:
        raise IncompatibleParts(
            f"{aggregator!r} scales updates by the mean number of steps in a cohort, which tells how much data clients have.",
            "Give a public number instead: aggregators.FedNova(steps=…).",
        )


def refuse_unfit_for_correction(algorithm: Algorithm) -> None:
    """Refuse SCAFFOLD and FedDyn with parts that their common correction does not go with."""
    traits = algorithm.traits
    if traits.solver.after_total is None:
        return
    name, dynamic = type(algorithm.solver).__name__, traits.solver.after_rows is None
    if traits.risk.needs_losses:
        why = "integrates fixed weights in what clients keep, which those of" if dynamic else (
            "corrects every client towards the mean over all clients, which cancels the weights of"
        )  # fmt: skip
        change = " change in every round" if dynamic else ""
        raise IncompatibleParts(
            f"{algorithm.solver!r} {why} {algorithm.risk!r}{change}.",
            f"Use risk.Mean() with {name}, or aggregators.FedNova() with this risk.",
        )
    if traits.personal.updates is not None:
        raise IncompatibleParts(
            f"{algorithm.solver!r} moves its common correction by every client's own, but {algorithm.personal!r} has "
            "clients send other updates.",
            "Use personal.Ditto(), or solvers.SGD(prox=…) instead.",
        )
    if dynamic:
        refuse_unfit_for_dynamic(algorithm)
    elif algorithm.privacy is not None:
        inner = read(SolverTraits, traits.solver.solver)
        if inner.steps is None or inner.straggler_share > 0:
            raise IncompatibleParts(
                f"{algorithm.solver!r} divides the sum of updates by the length of their steps, which must be public where "
                f"{algorithm.privacy!r} hides single clients; here it depends on how many examples clients have.",
                "Count local work in steps: solvers.Scaffold(solvers.SGD(steps=…)), without stragglers.",
            )


def refuse_unfit_for_dynamic(algorithm: Algorithm) -> None:
    """Refuse FedDyn with what is no plain mean of updates, with noise, and with a server step other than its own."""
    traits = algorithm.traits
    reason = (
        f"{algorithm.aggregator!r} is no mean of updates: h keeps the difference for ever" if not traits.aggregator.weighted_sum
        else f"the noise of {algorithm.privacy!r} would add up in h from round to round" if algorithm.private
        else f"{algorithm.server!r} is another" if traits.server.linear_rate != 1.0
        else None
    )  # fmt: skip
    if reason is not None:
        raise IncompatibleParts(
            f"{algorithm.solver!r} keeps the sum of all updates so far in h, and has a server step of its own, but {reason}.",
            "Use it with aggregators.WeightedMean(), server_opt.SGD(1) and no noise, or solvers.Scaffold() instead.",
        )


def _why_not_summed(algorithm: Algorithm) -> tuple[str, str] | None:
    """Why the updates of a buffer cannot be added by secure sums, and the cure; None if they can."""
    rule, fewest = algorithm.traits.sampler.buffered, algorithm.traits.privacy.fewest or 2
    if rule.damped:
        return f"{brief(algorithm.privacy)} masks updates before anybody knows how stale they will be", "Set damped=False"
    few = f"{brief(algorithm.privacy)} unmasks no sum over fewer than {fewest} clients", f"Set buffer={fewest} or more"
    return few if rule.buffer < fewest else None


def _why_not_private(algorithm: Algorithm) -> tuple[str, str] | None:
    """Why noise does not cover what a buffer releases, and the cure; None if it does.

    It does if the noise is correlated, and contributions of a client are held apart.
    """
    sampler, solver = algorithm.traits.sampler, algorithm.traits.solver
    rule, privacy = sampler.buffered, brief(algorithm.privacy)
    apart = "Set apart=…, the least number of steps between two contributions of a client"
    if not algorithm.traits.privacy.correlated:
        reason = f"{privacy} counts on random cohorts, and arrivals are none"
        return reason, "Use privacy.DPFTRL(…) with apart=…, the least number of steps between two contributions of a client"
    if rule.apart is None or sampler.separation != rule.apart:
        return f"{privacy} goes by how far apart contributions of a client are, and these may be any", apart
    if rule.loss_bound is not None:
        return f"{privacy} has no noise for weights by losses", "Leave out loss_bound"
    if rule.durations is None and rule.per_step > 0 and solver.steps is None:
        reason = "with per_step it depends on how many examples clients have when everybody works, which no noise covers"
        return reason, "Set per_step=0 or durations, or count local work in steps"
    return None


def refuse_unfit_for_buffer(algorithm: Algorithm) -> None:
    """Refuse FedBuff with parts that compare clients of one round, or remember clients or rounds."""
    if algorithm.traits.sampler.buffered is not None and (found := _unfit_for_buffer(algorithm)) is not None:
        reason, fix = found
        text = f"With {brief(algorithm.sampler)} clients come and go at any time, but {reason}."
        raise IncompatibleParts(text, f"{fix}, or another sampler, e.g. sampling.Uniform().")


def _unfit_for_buffer(algorithm: Algorithm) -> tuple[str, str] | None:
    """Why a part does not go with FedBuff, and what to use in its place; None if all do."""
    traits = algorithm.traits
    solver, aggregator, rule = traits.solver, traits.aggregator, traits.sampler.buffered
    alone = traits.risk.client_form == "loss" and traits.risk.server_step is None
    known = alone and rule.loss_bound is not None and algorithm.privacy is None
    ranked = "compares losses, and those of different versions of the model cannot be ranked"
    mean = "Use aggregators.WeightedMean(), or a median or trimmed mean"
    if alone and not known:
        reason = f"a client finds its weight by {brief(algorithm.risk)} from a public bound on losses (set loss_bound, without"
        return f"{reason} privacy)", "Use risk.Mean()"
    if traits.risk.needs_losses and not known:
        return f"{brief(algorithm.risk)} {ranked}", "Use risk.Mean(), or risk.Tilted(…) with loss_bound"
    if aggregator.needs_losses:
        return f"{brief(algorithm.aggregator)} {ranked}", mean
    if algorithm.privacy is not None:
        why = _why_not_summed(algorithm) if traits.privacy.only_sums else _why_not_private(algorithm)
        if why is not None:
            return why[0], f"{why[1]}, leave out privacy"
    if algorithm.personal is not None:
        return f"{brief(algorithm.personal)} trains clients' own models in rounds", "Leave out personal"
    if solver.prepare is not None or solver.keeps is not None or solver.after_rows is not None:
        reason = f"{brief(algorithm.solver)} prepares rounds or keeps a state of each client between them"
        return reason, "Use solvers.SGD(…), or Adam or AdamW with a fresh state"
    if solver.straggler_share > 0:
        reason = f"{brief(algorithm.solver)} has stragglers, and slow clients are what the clock is for"
        return reason, "Leave out straggler_share"
    if aggregator.keeps_total:
        return f"{brief(algorithm.aggregator)} clips around the total of the round before", mean
    if aggregator.normalises is not None:
        return f"{brief(algorithm.aggregator)} divides updates by the length of steps", mean
    return None
