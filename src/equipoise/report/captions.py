"""What stands over and under each figure: a title that says what to see, and how to read it. Nothing is escaped yet."""

from __future__ import annotations

from equipoise.report import series
from equipoise.report.study import Study
from equipoise.report.words import with_article

Caption = tuple[str, str]


def captions(study: Study) -> dict[str, Caption]:
    """Title and caption by the figure's name."""
    several, noun = len(study.methods) > 1, study.scale.noun
    band = " Lines: mean over seeds; bands: lowest to highest seed." if study.seeds > 1 else ""
    pooled = " All seeds together." if study.seeds > 1 else ""
    weighed = ", weighted by their examples," if study.crowd.weighted else ""
    logarithmic = " The axis is logarithmic." if study.spans_decades() else ""
    smoothed = f" Averaged over {window} rounds." if (window := _window(study)) > 1 else ""
    return {
        "histogram": (
            f"The {noun} of every client: those at the right are left behind",
            f"Height: the share of the {study.crowd}{weighed} that see this {noun}. Solid line: mean; dashed line: 90th "
            f"percentile, to the left of which nine of ten lie.{pooled}{logarithmic}",
        ),
        "percentiles": (
            f"The {noun} at every percentile: the tail is at the right end",
            f"Read at 90: nine of ten clients fare at least this well.{band}",
        ),
        "tradeoff": (
            "Tail against mean: lower left is better",
            f"The 90th percentile over the mean {noun} of each method."
            + (" Crosses: ± standard deviation over seeds; small points: single seeds." if study.seeds > 1 else ""),
        ),
        "curves": _curves(study, band, smoothed),
        "sizes": (
            f"{noun.capitalize()} against data: where a line falls, small clients fare worse",
            ("Points: some of the clients" if study.crowd.count[1] > series.MOST_POINTS else "Points: clients")
            + (f" under {study.methods[0].name}" if len(study.methods) > 2 else "")
            + (", first seed" if study.seeds > 1 else "")
            + f"; lines: mean {noun} of clients of similar size.",
        ),
        "selected": (
            "Clients selected in each round: the fewer, the less work is asked for",
            (
                "A method that trains only the tail selects fewer of the clients drawn." * several
                + band
                + smoothed
                + _lost(study)
            )
            or "How many of the clients drawn were trained.",
        ),
    }


def _curves(study: Study, band: str, smoothed: str) -> Caption:
    noun = study.scale.noun
    if study.evaluated:
        return (
            "Mean and 90th percentile over the rounds: where curves are flat, more rounds bring little",
            f"The {noun} over {study.crowd}, evaluated along the way.{band}",
        )
    return (
        "Training loss over the rounds: where curves are flat, more rounds bring little",
        f"Of the clients drawn in a round: their mean, and the mean of the tenth with the largest loss.{band}{smoothed}"
        f"{_loss_caveat(study)}",
    )


def _window(study: Study) -> int:
    return series.smoothing(max(method.over_rounds("trained").shape[1] for method in study.methods))


def _loss_caveat(study: Study) -> str:
    """Losses at the start of a round and losses during local work are not on one level; say so where both occur."""
    taken = {report.loss_from for m in study.methods for run in m.runs for report in run.history.rounds if report.trained}
    if len(taken) < 2:
        return ""
    return (
        " Methods that ask for losses first show them at the start of the round, the others while clients work, "
        "which is usually lower: compare shapes, not levels."
    )


def _lost(study: Study) -> str:
    """Whether work did not arrive."""
    lost = sum(report.dropped for m in study.methods for run in m.runs for report in run.history.rounds)
    return f" Over all runs, the work of {lost:,} selected client{'s' if lost > 1 else ''} did not arrive." if lost else ""


def left_out(study: Study) -> str:
    """A note on clients that no figure shows; empty if there are none."""
    count = study.left_out()
    if not count:
        return ""
    return (
        f"{count:,} client{'s' if count > 1 else ''} (over all runs) {'have' if count > 1 else 'has'} "
        f"{with_article(study.scale.noun)} that is not finite; figures leave them out, and a number that depends on them is "
        "shown as –."
    )
