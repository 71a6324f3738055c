"""Runs that nodes would refuse on the way: by what the nodes say of themselves, they are refused before they begin."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import TYPE_CHECKING, Any

from equipoise.algorithm import Algorithm
from equipoise.engines.flower.apps.members import Member
from equipoise.engines.flower.apps.run_status import read_events
from equipoise.errors import IncompatibleParts
from equipoise.experiment.run_files import RunFolder
from equipoise.privacy.mechanism import SecureAggregation
from equipoise.runs.checkpoint import read_checkpoint

if TYPE_CHECKING:
    from equipoise.engines.flower.apps.server import ServerPlan


def refuse_silent(members: Mapping[str, Member], algorithm: Algorithm, *, signed: bool, minimum: int = 1) -> str:
    """Refuse to begin a run in which too few nodes would answer; what to say of the others, if some would answer nothing."""
    sums = algorithm.traits.privacy.sums_alone
    if sums and (others := [client for client, member in members.items() if bool(member.identity) != signed]):
        names, one = ", ".join(others[:5]), len(others) == 1
        if signed:
            fix = "Make keys (`equipoise flower key`), exchange them, and name them in the nodes' policies."
            raise IncompatibleParts(f"{names} {'has' if one else 'have'} no key to sign sums with.", fix)
        raise IncompatibleParts(f"{names} take{'s' * one} part in signed sums only.", "Add signed=True to server_app.")
    silent = [] if sums else [client for client, member in members.items() if member.only_sums]
    if not silent:
        return ""
    takes = f"take{'s' * (len(silent) == 1)} part in secure sums only"
    why, left = f"{', '.join(silent[:5])} {takes}, and this algorithm asks for single updates", len(members) - len(silent)
    if left < max(1, minimum):
        few = "" if left == 0 else f" {left} of {len(members)} clients are left, and minimum is {minimum}."
        raise IncompatibleParts(f"{why}.{few}", make_secure(algorithm))
    return f"{why} (only_sums in policy.toml): the run goes on without {'it' if len(silent) == 1 else 'them'}."


def make_secure(algorithm: Algorithm) -> str:
    """How to have an algorithm ask for secure sums alone."""
    fix = "Add privacy=privacy.SecureAggregation() to the Algorithm."
    try:
        replace(algorithm, privacy=SecureAggregation())
    except IncompatibleParts as failure:
        return f"{fix} {failure.reason} {failure.fix}"
    return fix


def refuse_unmeasured(members: Mapping[str, Member], metrics: Mapping[str, Any] | None) -> None:
    """Refuse to begin a run with metrics that some node does not compute."""
    for name in metrics or ():
        if lacking := [client for client, member in members.items() if name not in member.metrics]:
            raise IncompatibleParts(
                f"{', '.join(lacking[:5])} cannot compute the metric {name!r}, which is computed where the examples are.",
                f"Give client_app(metrics={{{name!r}: …}}) on these nodes, too, or leave it out.",
            )


def evaluated_rounds(place: RunFolder | None) -> tuple[int, set[int]]:
    """How many rounds a run has behind it, and after which of them it was evaluated: nodes have counted these."""
    if place is None or not place.checkpoint.exists():
        return 0, set()
    run = read_checkpoint(place.checkpoint).runs[0]
    told = {int(event["after_round"]) for event in read_events(place.path) if event.get("event") == "evaluation"}
    return run.state.round, told | {point.round for point in run.history.points}  # which lack that at the end of a run


def refuse_many_evaluations(members: Mapping[str, Member], plan: ServerPlan, behind: tuple[int, set[int]]) -> None:
    """Refuse to begin a run with more evaluations than the policy of some node allows: it would stop on its way.

    Those that the run has `behind` it count: after the end of a run that is extended there was one.
    """
    every = plan.evaluate_every or (1 if plan.stop is not None else plan.rounds)
    done, made = behind
    planned = len(made | {after for after in (*range(every, plan.rounds, every), plan.rounds) if after > done})
    limits = {client: member.evaluations for client, member in members.items() if member.evaluates and member.evaluations}
    if strict := [client for client, most in limits.items() if most < planned]:
        least, one = min(limits[client] for client in strict), len(strict) == 1
        whose = f"polic{'y' if one else 'ies'} of {', '.join(sorted(strict)[:5])} allow{'s' * one}"
        raise IncompatibleParts(
            f"The run has {planned} evaluations{f', {len(made)} of them made' if made else ''}, and the {whose} "
            f"{'only' if one else 'fewer, the strictest only'} {least}.",
            "Raise evaluate-every, or ask the owners to raise `evaluations` in policy.toml.",
        )
