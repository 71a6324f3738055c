"""The trials of a search: their criterion over seeds, and what the seeds tell apart."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from equipoise.errors import InvalidParameter
from equipoise.experiment.search import CRITERIA, Criterion, Values, trial_name
from equipoise.experiment.values import value_text

if TYPE_CHECKING:
    from equipoise.client_table import ClientTable
    from equipoise.report.over_seeds import Spread


@dataclass(frozen=True)
class TrialResult:
    """The criterion of a trial over seeds; None, with a message, if one of its runs failed."""

    values: Values
    criterion: Spread | None
    message: str = ""
    by_seed: tuple[float, ...] = ()  # the criterion of each seed, in the order of the seeds

    @property
    def value(self) -> float:
        """The number that a search minimises; infinite for a failed trial."""
        return self.criterion.mean if self.criterion is not None else math.inf

    @classmethod
    def of(cls, values: Values, by_seed: Sequence[float], criterion: Criterion) -> TrialResult:
        """The result of a trial whose runs all ended."""
        from equipoise.report.over_seeds import Spread

        spread = Spread.of(by_seed)
        if not math.isfinite(spread.mean):
            return cls(values, None, f"the {CRITERIA[criterion]} is not finite.")
        return cls(values, spread, by_seed=tuple(by_seed))


def criterion_of(clients: ClientTable, criterion: Criterion, at_least: int = 0) -> float:
    """The criterion of a run, from its table of clients; the training loss is weighted by examples.

    `at_least` leaves out validation clients with fewer examples.
    """
    if criterion == "train_loss":
        return clients.where("train").summaries()["train"]["loss"].mean
    rows = clients.where("validation")
    kept = rows.take((rows.size >= at_least).nonzero().flatten())
    if not len(kept.benign):
        rule = f"must leave a client, and no validation client has more than {int(rows.size.max())} examples"
        raise InvalidParameter("at_least", rule, at_least, "Lower it.")
    found = kept.summaries()["validation"]["error"]
    figures = {"validation_mean": found.mean, "validation_mean_by_example": found.mean_by_example}
    return figures.get(criterion, found.percentiles[90])


def criterion_words(criterion: Criterion, at_least: int, seeds: int) -> str:
    """What the column of a search is: the criterion, the clients that it is over, and the seeds."""
    large = f" over clients with {at_least} validation examples or more" if at_least else ""
    over = f", mean ± standard deviation over {seeds} seeds" if seeds > 1 else ""
    return f"{criterion}: {CRITERIA[criterion]}{large}{over}"


def cell_text(value: Any) -> str:
    """A value as a cell of a table: numbers with six digits, tables and lists as JSON."""
    return json.dumps(value, ensure_ascii=False) if isinstance(value, Mapping | list) else value_text(value)


def spread_text(spread: Spread | None, seeds: int) -> str:
    """The criterion with five digits, ± standard deviation over seeds to as many places; a dash for None.

    >>> from equipoise.report.over_seeds import Spread
    >>> spread_text(Spread(0.554167, 0.05), 3), spread_text(Spread(12.3456, 0.7), 3), spread_text(Spread(0.5, 0.0), 1)
    ('0.55417 ± 0.05000', '12.346 ± 0.700', '0.5')
    """
    if spread is None:
        return "–"
    if seeds == 1 or not math.isfinite(spread.mean) or not 1e-3 <= abs(spread.mean) < 1e5:
        return f"{spread.mean:.5g}" + (f" ± {spread.deviation:.2g}" if seeds > 1 else "")
    places = 4 - math.floor(math.log10(abs(spread.mean)))
    return f"{spread.mean:.{places}f} ± {spread.deviation:.{places}f}"


def noise_words(
    results: Sequence[TrialResult], criterion: Criterion, where: str = "", name_of: Callable[[Values], str] = trial_name
) -> str:
    """Which trials the seeds do not tell from the best one, by their paired differences; empty if there are none.

    `where` says where seeds are set, and `name_of` names a trial by its values. A criterion that is the same for all trials
    tells none of them apart, with any number of seeds.
    """
    from equipoise.report.formats import listed
    from equipoise.report.paired import LEAST_SEEDS, difference_text, paired

    best, *others = [result for result in results if result.criterion is not None]
    if not others:
        return ""
    name, seeds = name_of(best.values), len(best.by_seed)
    if all(result.by_seed == best.by_seed for result in others):
        other = "validation_90" if criterion == "train_loss" else "train_loss"
        other = "validation_mean" if criterion == "validation_90" else other
        return (
            f"All trials have the same {criterion}, which therefore chooses none: the best, {name}, is only the first. More "
            f'seeds need not help. Try criterion = "{other}", more rounds, or other values.'
        )
    if seeds < LEAST_SEEDS:
        many = "one seed does" if seeds == 1 else f"{seeds} seeds do"
        fix = f"Set seeds = {LEAST_SEEDS} or more {where}".rstrip()
        return f"The best, {name}, may be so by chance: {many} not tell. {fix}."
    first = dict(enumerate(best.by_seed))
    apart = {name_of(result.values): paired(name, first, dict(enumerate(result.by_seed))) for result in others}
    alike = [other for other, found in apart.items() if found.verdict != "lower"]
    if not alike:
        return ""
    found = f"{difference_text(apart[alike[0]])} against {alike[0]}"
    same = apart[alike[0]].constant
    why = "and there is no spread between seeds" if same else "and the 95 % interval of the paired differences contains 0"
    return (
        f"The best is within the noise of the next: {found}, {why}. The "
        f"seeds do not tell {len(alike)} of {len(others)} other trials from the best: {listed(alike, 5)}. Take one of them for "
        f"other reasons, or add seeds {where}".rstrip()
        + "."
    )
