"""What goes together: one table of facts that exclude each other (compatibility.toml), and the one function that compares."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from equipoise.core.abilities import is_of_user, read
from equipoise.core.plain_text import parse_toml
from equipoise.errors import IncompatibleParts, brief
from equipoise.types import AggregatorTraits, QuantileTraits, RiskTraits, SolverTraits

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

_HIDDEN = {
    True: ("differential privacy", "privacy.PrivateQuantile(bound=…, bins=32)"),
    False: ("SecureAggregation", "privacy.SecureHistogram(bound=…, bins=64)"),
}


class Row(NamedTuple):
    """Facts that exclude each other, why, and what to do."""

    rule: str
    facts: tuple[str, ...]
    reason: str
    cure: str


@cache
def rows() -> tuple[Row, ...]:
    """The table."""
    table = parse_toml(Path(__file__).with_suffix(".toml"))
    return tuple(Row(rule, tuple(row["facts"]), row["reason"], row["cure"]) for rule, row in table.items())


def problems(algorithm: Algorithm, **around: Any) -> Iterator[IncompatibleParts]:
    """Each row that holds, as its error; what is `around` an algorithm are further facts, and names for the texts.

    Rows that name a fact about something that is not around (a model, a network) do not hold.
    """
    facts = {**facts_of(algorithm), **around}
    names: dict[str, str] = {}
    for row in rows():
        if all(facts.get(fact) if not fact.startswith("no ") else not facts.get(fact[3:]) for fact in row.facts):
            names = names or _names(algorithm) | {name: str(value) for name, value in around.items()}
            yield IncompatibleParts(row.reason.format(**names), row.cure.format(**names), row.rule)


def refuse(algorithm: Algorithm, **around: Any) -> None:
    """Raise IncompatibleParts with the first row that holds."""
    for problem in problems(algorithm, **around):
        raise problem


def refuse_on_nodes(algorithm: Algorithm, **around: Any) -> None:
    """Refuse an algorithm that nodes would refuse, or that would not protect them; all problems are in one message."""
    if found := list(problems(algorithm, network=True, **around)):
        reasons, cures = ([*dict.fromkeys(texts)] for texts in zip(*((each.reason, each.fix) for each in found), strict=True))
        raise IncompatibleParts(" ".join(reasons), " ".join(cures), found[0].rule)


def _names(algorithm: Algorithm) -> dict[str, str]:
    """The parts as they are shown in texts."""
    traits, parts = algorithm.traits, {name: brief(part) for name, part in vars(algorithm).items() if name != "traits"}
    under, hidden = _HIDDEN[algorithm.private]
    return parts | {
        "drawn": brief(algorithm.drawn_by), "quantile": brief(traits.risk.quantile), "under": under, "hidden_quantile": hidden,
        "fewest": str(traits.privacy.fewest or 2), "eta_every": str(traits.risk.eta_every),
    }  # fmt: skip


def facts_of(algorithm: Algorithm) -> Mapping[str, Any]:
    """What is so of the parts of an algorithm: the facts that rows of the table name."""
    a, t = algorithm, algorithm.traits
    risk, quantile, solver, aggregator, sampler, privacy = t.risk, t.quantile, t.solver, t.aggregator, t.sampler, t.privacy
    inner = read(SolverTraits, solver.solver) if solver.prepare is not None else solver
    summed = read(AggregatorTraits, aggregator.normalises or a.aggregator)
    own_risk, form, rule = is_of_user(a.risk), risk.client_form, sampler.buffered
    has_form = risk.client_weight is not None if form == "loss" else form == "base" and not risk.needs_losses
    alone = form == "loss" and risk.server_step is None
    slow = read(SolverTraits, solver.solver or a.solver)
    sums_models = t.personal.sums_models
    return {
        "sampler draws by weight": sampler.by_weight,
        "uniform weights given": a.weights == "uniform",
        "weights by examples": a.weights == "examples",
        "coins": sampler.independent,
        "coins of nodes": sampler.by_nodes,
        "noise by clients": a.private and privacy.sums_alone,
        "everyone takes part": sampler.everyone,
        "accounted cohorts": sampler.accounted and not is_of_user(a.drawn_by),
        "smaller cohorts": sampler.share != 1,
        "clients stay apart": sampler.separation is not None and not is_of_user(a.drawn_by),
        "risk needs everyone": risk.full_participation,
        "risk weighs by losses": risk.needs_losses,
        "risk scales the step": risk.server_step is not None,
        "risk leaves nobody out": risk.keeps_everyone,
        "risk keeps the largest": _keeps_largest(risk),
        "risk keeps base weights": form == "base",
        "risk is tracked": risk.tracked,
        "risk filters": form == "filter",
        "own risk": own_risk,
        "own risk has a form": has_form,
        "risk has a hidden form": form in ("base", "filter", "loss") or (form == "groups" and not a.private),
        "weights by own loss": form == "loss",
        "weights by groups": form == "groups",
        "weights found alone": alone,
        "weights by a public bound": alone and rule is not None and rule.loss_bound is not None and a.privacy is None,
        "quantile is hidden": risk.filters and not quantile.reads_losses and not is_of_user(risk.quantile),
        "quantile has noise": quantile.calibrated is not None,
        "quantile of several rounds": (a.private or quantile.histogram is not None) and risk.eta_every > 1,
        "quantile by many sums": quantile.iterations is not None,
        "quantile needs a budget": _sets_noise_by_budget(risk),
        "histogram of losses": quantile.histogram is not None,
        "solver needs fixed weights": solver.fixed_weights or solver.after_total is not None,
        "solver remembers": solver.prepare is not None or solver.keeps is not None or solver.after_rows is not None,
        "solver looks at clients": solver.prepare is not None and not solver.public_only,
        "stragglers": solver.straggler_share > 0 and solver.efforts is not None,
        "stragglers of this solver": slow.straggler_share > 0 and slow.efforts is not None,
        "steps have a length": inner.normalisers is not None,
        "rates by name": isinstance(inner.rates, Mapping) and len(inner.rates) > 0,  # others may mean something else by it
        "clients keep rows": solver.keeps is not None,
        "common correction": solver.after_total is not None,
        "sum of all updates": solver.after_total is not None and solver.after_rows is None,
        "work in public steps": inner.steps is not None and not (inner.straggler_share > 0 and inner.efforts is not None),
        "linear aggregator": a.aggregator.linear,
        "aggregator reads losses": aggregator.needs_losses,
        "aggregator reads updates": aggregator.needs_losses or (not a.aggregator.linear and aggregator.around is None),
        "aggregator takes one update": aggregator.picks_one,
        "aggregator takes large losses": aggregator.picks_large_loss,
        "aggregator keeps the total": aggregator.keeps_total,
        "plain sum of updates": summed.weighted_sum and not aggregator.needs_losses,
        "updates by length of steps": aggregator.normalises is not None,
        "public length": aggregator.steps is not None,
        "server steps by the update": t.server.linear_rate == 1.0,
        "buffer": rule is not None,
        "buffer damps stale work": rule is not None and rule.damped,
        "buffer below the fewest": rule is not None and rule.buffer < (privacy.fewest or 2),
        "buffer holds clients apart": rule is not None and rule.apart is not None and sampler.separation == rule.apart,
        "buffer has a loss bound": rule is not None and rule.loss_bound is not None,
        "clock by examples": rule is not None and rule.durations is None and rule.per_step > 0 and solver.steps is None,
        "personal": a.personal is not None,
        "clients send other updates": t.personal.updates is not None,
        "own models keep statistics": t.personal.keeps_carried,
        "server sees own models": sums_models or (sums_models is None and a.personal is not None and is_of_user(a.personal)),
        "protected": a.privacy is not None,
        "noise": a.private,
        "noise of a seed": privacy.noise_seed is not None,
        "correlated noise": privacy.correlated,
        "only sums": privacy.only_sums,
        "sums alone": privacy.sums_alone,
        "loss bound": privacy.loss_bound is not None,
    }


def _keeps_largest(risk: RiskTraits) -> bool:
    """Whether the clients that a risk leaves out are those with the smallest losses."""
    terms = [read(RiskTraits, inner) for _, inner in risk.terms]
    return risk.tail < 1.0 or (len(terms) > 0 and all(map(_keeps_largest, terms)))


def _sets_noise_by_budget(risk: RiskTraits) -> bool:
    """Whether a risk, or a term of it, takes its quantile from a source whose noise a privacy budget sets."""
    calibrated = read(QuantileTraits, risk.quantile).calibrated is not None
    return calibrated or any(_sets_noise_by_budget(read(RiskTraits, inner)) for _, inner in risk.terms)
