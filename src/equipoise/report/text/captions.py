"""What stands over and under each figure: a title that says what to see, and how to read it. Nothing is escaped yet."""

from __future__ import annotations

from equipoise.report.data import series
from equipoise.report.data.results_by_method import MethodResults, Study
from equipoise.report.text.phrases import listed
from equipoise.report.text.sentences import with_article

Caption = tuple[str, str]


def captions(study: Study) -> dict[str, Caption]:
    """Title and caption by the figure's name."""
    several, noun = len(study.methods) > 1, study.scale.noun
    band = " Lines: mean over seeds; bands: lowest to highest seed." if study.seeds > 1 else ""
    pooled = " All seeds together." if study.seeds > 1 else ""
    weighed = ", weighted by their examples," if study.crowd.weighted else ""
    logarithmic = " The axis is logarithmic." if study.spans_decades() else ""
    smoothed = f" Averaged over {window} rounds." if (window := _window(study)) > 1 else ""
    benign, model = study.crowd.benign_word, whose_model(study)
    return {
        "histogram": (
            f"The {noun} of every client: those at the right are left behind",
            f"Height: the share of the {study.crowd}{weighed} that see this {noun}. Solid line: mean; dashed line: 90th "
            f"percentile, to the left of which nine of ten lie.{pooled}{logarithmic}{served(study)}",
        ),
        "percentiles": (
            f"The {noun} at every percentile: the tail is at the right end",
            f"Read at 90: nine of ten {benign}clients fare at least this well.{band}{model}",
        ),
        "tradeoff": (
            "Tail against mean: lower left is better",
            f"The 90th percentile over the mean {noun} of each method{', over benign clients' if benign else ''}."
            + (" Crosses: ± standard deviation over seeds; small points: single seeds." if study.seeds > 1 else "")
            + model,
        ),
        "own": _own(study),
        "curves": _curves(study, band, smoothed),
        "sizes": (
            f"{noun.capitalize()} against data: where a line falls, small clients fare worse",
            (
                f"Points: some of the {benign}clients"
                if study.crowd.count[1] > series.MOST_POINTS
                else f"Points: {benign}clients"
            )
            + (f" under {study.methods[0].name}" if len(study.methods) > 2 else "")
            + (", first seed" if study.seeds > 1 else "")
            + f"; lines: mean {noun} of clients of similar size.{model}",
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
        "privacy": (
            "ε after each round: what the models released so far give away at most",
            f"Before the last round the figures may be upper bounds.{band}",
        ),
    }


def served(study: Study) -> str:
    """Whose errors these are, where clients have models of their own: in full."""
    if not study.own:
        return ""
    where = "" if len(study.own) == len(study.methods) else f" under {listed([method.name for method in study.own])}"
    if any(method.partly_own for method in study.own):
        where += ", where it has one"
    whose = f"the model that a client is served: its own{where}, else the shared one" if where else "each client's own model"
    return f" The {study.scale.noun} is that of {whose}."


def whose_model(study: Study) -> str:
    """The same, shorter."""
    if not study.own:
        return ""
    every = len(study.own) == len(study.methods) and not any(method.partly_own for method in study.own)
    whose = "each client's own model" if every else "the model that a client is served"
    return f" The {study.scale.noun} is that of {whose}."


def _own(study: Study) -> Caption:
    """How to read the points, and what each method's own models bring."""
    found = [series.pairs(method, malicious=malicious) for method in study.own for malicious in (False, True)]
    text = f"Points: clients{', first seed' if study.seeds > 1 else ''}"
    text += ", larger where several coincide" if any(len(ids) > 1 for each in found for ids in each.clients) else ""
    text += "; crosses: malicious clients" if any(len(each.own) for each in found[1::2]) else ""
    brought = [_brought(study, method) for method in study.own]
    text += f". Better with their own model: {', '.join(brought)}."
    if study.crowd.split == "train":
        text += " Own models were trained on these very examples, which flatters them."
    return "Shared and own model, client by client: below the dashed line, the own model is better", text


def _brought(study: Study, method: MethodResults) -> str:
    better, alike, worse = series.better_with_own(method)
    under = f" under {method.name}" if len(study.methods) > 1 else ""
    return (
        f"{better:,} of {better + alike + worse:,} {study.crowd.benign_word}clients{under} ({worse:,} worse, {alike:,} alike)"
    )


def _curves(study: Study, band: str, smoothed: str) -> Caption:
    noun = study.scale.noun
    if study.evaluated:
        return (
            "Mean and 90th percentile over the rounds: where curves are flat, more rounds bring little",
            f"The {noun} over {study.crowd}, evaluated along the way.{band}{whose_model(study)}{_own_at_the_end(study)}",
        )
    return (
        "Training loss over the rounds: where curves are flat, more rounds bring little",
        f"Of the clients drawn in a round: their mean, and the mean of the tenth with the largest loss.{band}{smoothed}"
        f"{_loss_caveat(study)}{_loss_of(study)}",
    )


def _own_at_the_end(study: Study) -> str:
    """Own models that are made after training are in the last evaluation only: say where a curve changes what it is of."""
    late = [m.name for m in study.own if len(m.evaluations("error")[0]) > len(m.evaluations("shared_error", known=True)[0])]
    if not late:
        return ""
    return f" Under {listed(late)}, own models are made after the last round: earlier points are of the shared model."


def _loss_of(study: Study) -> str:
    """The rounds' losses are those of the shared model, of whoever is drawn."""
    words = " These are losses of the shared model" if study.own else ""
    if study.attacked:
        words += ", with" if words else " These are losses with"
        words += " malicious clients among those drawn"
    return f"{words}." if words else ""


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
