"""Whether a run went well: divergence that stops it, and notices about what a user should know."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import replace

import torch

from equipoise.client_table import NOT_EVALUATED
from equipoise.core.abilities import read
from equipoise.core.words import counted
from equipoise.errors import AFTER_THE_LAST, Diverged
from equipoise.metrics import mean
from equipoise.observers import Evaluation, History
from equipoise.privacy.lookers import may_look
from equipoise.report.notices import about_runs, said
from equipoise.result import Result
from equipoise.runs.crowded_tail import crowded_tail
from equipoise.runs.input_scales import cause_of_divergence
from equipoise.runs.setup import Setting
from equipoise.runs.standing_out import blame, is_lost
from equipoise.types import PersonalTraits, RoundReport

FEWEST_ROUNDS = 5  # by which a run can be said to stand still


def stop_if_lost(final: Evaluation, *, named: bool = True) -> None:
    """Raise Diverged if a training client's loss after the last round is not finite; it is `named` unless it is protected."""
    trained_on = final.clients.where("train")
    asked = torch.tensor([client != NOT_EVALUATED for client in trained_on.client])
    finite = torch.isfinite(trained_on.loss) | ~asked
    if not bool(finite.all()):
        lost = [client for client, good in zip(trained_on.client, finite.tolist(), strict=True) if not good]
        raise Diverged(final.round, lost if named else (), AFTER_THE_LAST)


def notices(setting: Setting, result: Result, who: str = "the run") -> Iterator[str]:
    """What to tell the user after a run that ended."""
    if not may_look("notices", setting.algorithm):
        result = replace(result, history=History())
    if result.privacy is not None and (noise := result.privacy.noise):
        yield noise if who == "the run" else f"{who}: {noise}"
    yield from divergence(setting, result, who)
    yield from idle_rounds(result)
    yield from rejected_updates(result.history.rounds)
    yield from crowded_tail(setting.algorithm, result.history.rounds)
    if result.personal is not None and not result.clients.where(result.judged_on).has_own:
        found = about_runs({result.data: [result]}, sizes=False)  # named by the data, so that several methods say it once
        yield said(each for each in found if each.code in ("no-own-models", "untrained-layers"))
    if setting.protection.rounds_allowed < setting.rounds:
        allowed = f"{setting.protection.rounds_allowed} of the {setting.rounds} rounds"
        yield (
            f"The privacy budget allows {allowed} with this noise; the run stopped there. Raise noise_multiplier, or leave it "
            "out to have it set for all rounds."
        )


def divergence(setting: Setting, result: Result, who: str) -> Iterator[str]:
    """A loss of a thousand times its start (or, with classes, of a thousand) is finite, but no result.

    Layers that clients keep stay as they began in the shared model, so such runs are judged by the models that clients have.
    Where inputs are far from the scale that training needs, that is named, also of a loss that never falls.
    """
    first = next((report.loss for report in result.history.rounds if math.isfinite(report.loss)), None)
    lost, reason, last = False, None, math.nan
    if first is not None:
        trained_on = result.clients.where("train")
        keeps_layers = read(PersonalTraits, setting.algorithm.personal).keeps_layers
        last = mean(trained_on.served_loss if keeps_layers else trained_on.loss, trained_on.size)
        lost = is_lost(last, first, classes=setting.data.classes > 0)
        reason = cause_of_divergence(setting) if lost or stands_still(result) else None
    if lost:
        advice = f"{reason or 'Lower the learning rate.'} {blame(result.history.rounds)}".rstrip()
        yield f"The training loss ended at {last:.3g}: {who} diverged. {advice}"
    elif reason is not None:
        yield f"The training loss did not fall: {who} stood still. {reason}"


def stands_still(result: Result) -> bool:
    """Whether losses at the end are not below those at the beginning, over a few rounds each; the fewest are five."""
    losses = [report.loss for report in result.history.rounds if math.isfinite(report.loss)]
    few = max(1, len(losses) // 5)
    return len(losses) >= FEWEST_ROUNDS and sum(losses[-few:]) >= 0.999 * sum(losses[:few])


def idle_rounds(result: Result) -> Iterator[str]:
    """Rounds may train nobody (an empty cohort, a tail whose clients were all dropped); most of them should not."""
    rounds = result.history.rounds
    idle = sum(report.trained == 0 for report in rounds)
    if 2 * idle > len(rounds):
        share = f"{idle} of {len(rounds)} rounds"
        yield f"Nobody was trained in {share}: cohorts were empty, or all clients with a weight dropped out."


def rejected_updates(rounds: Iterable[RoundReport]) -> Iterator[str]:
    """Whose updates were left out: honest clients may have diverged."""
    counts = Counter(client for report in rounds for client in report.rejected)
    if counts:
        shown = ", ".join(client for client, _ in counts.most_common(5)) + (", …" if len(counts) > 5 else "")
        text = f"{counted(counts.total(), 'update')} of {counted(len(counts), 'client')}"
        verb = "was" if counts.total() == 1 else "were"
        yield f"{text} {verb} not finite or absurdly large, and {verb} left out: {shown}."
