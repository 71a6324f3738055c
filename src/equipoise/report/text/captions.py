"""The title of each figure, which says what to see, and the caption, which says how to read it; as plain text, not HTML."""

from __future__ import annotations

from equipoise.absent_clients import changed_clients_words
from equipoise.report.data import series
from equipoise.report.data.over_seeds import trivial_doubts, trivial_name, worse_than_trivial
from equipoise.report.data.results_by_method import MethodResults, Study
from equipoise.report.text.phrases import count_words, listed, plural
from equipoise.report.text.sentences import with_article

WORSE_OFF_NAMES = 10  # clients named that are worse off than with the trivial answer
Caption = tuple[str, str]  # title and caption


def captions(study: Study) -> dict[str, Caption]:
    """Title and caption by the name of the figure."""
    several, noun = len(study.methods) > 1, study.scale.noun
    band = " Lines: mean over seeds; bands: lowest to highest seed." if study.seeds > 1 else ""
    pooled = " All seeds together." if study.seeds > 1 else ""
    ninetieth = "90th percentile, to the left of which nine of ten lie"
    if study.seeds > 1:
        ninetieth = "the 90th percentile, mean over seeds"
    cut = ", cut off at 0 and 100 %" if study.scale.percent else ""
    weighed = f"{study.judged.weighed}," if study.judged.weighed else ""
    logarithmic = " The axis is logarithmic." if study.spans_decades() else ""
    smoothed = f" Averaged over {window} rounds." if (window := _window(study)) > 1 else ""
    benign, model = study.judged.benign_word, served_model(study, brief=True)
    every = "every client evaluated" if study.sample else "every client"
    return {
        "histogram": (
            f"The {noun} of {every}: those at the right are left behind",
            f"Height: the share of the {study.judged}{weighed} that see this {noun}. Solid line: mean; dashed "
            f"line: {ninetieth}.{pooled}{logarithmic}{served_model(study)}",
        ),
        "percentiles": (
            f"The {noun} at every percentile: the tail is at the right end",
            f"Read at 90: nine of ten {benign}clients fare at least this well.{band}{model}",
        ),
        "tradeoff": (
            "Tail against mean: lower left is better",
            f"The 90th percentile over the mean {noun} of each method{', over benign clients' if benign else ''}."
            + (f" Crosses: ± standard deviation over seeds{cut}; small points: single seeds." if study.seeds > 1 else "")
            + model,
        ),
        "own": _own(study),
        "curves": _curves(study, band, smoothed),
        "sizes": (
            f"{noun.capitalize()} by number of examples: if a line falls, clients with few examples fare worse",
            f"Points: {'some of the ' * (study.judged.count[1] > series.MOST_POINTS)}{benign}clients"
            + (f" under {study.methods[0].name}" if len(study.methods) > 2 else "")
            + (", first seed" if study.seeds > 1 else "")
            + f"; lines: mean {noun} of clients of similar size.{model}",
        ),
        "selected": (
            "Clients selected in each round: the fewer, the less work is asked for",
            f"{'A method that trains only the tail selects fewer of the clients drawn.' * several}{band}{smoothed}"
            f"{_dropped_work(study)}"
            or "How many of the clients drawn were trained.",
        ),
        "participation": (
            "Participation against speed: if points fall, fast clients take part more often",
            f"A point per client that came back{', first seed' * (study.seeds > 1)}: how often, over the simulated time of its "
            "work. The axis of time is logarithmic.",
        ),
        "gains": (
            "The change of every client: below 0 it gains, above 0 it pays",
            f"Clients are sorted by their change against {study.methods[0].name}"
            + ("" if len(study.methods) == 2 else ", for each method on its own")
            + f". Where the change reaches 0, read the share of clients that gain.{model}",
        ),
        "privacy": (
            "ε after each round: what the models released so far give away at most",
            f"Before the last round the figures may be upper bounds.{band}",
        ),
    }


def served_model(study: Study, *, brief: bool = False) -> str:
    """A sentence on whose model the errors are of; empty unless clients have models of their own."""
    if not study.personalised:
        return ""
    names = [method.name for method in study.personalised]
    where = "" if len(names) == len(study.methods) else f" under {listed(names)}"
    where += ", where it has one" if any(method.partly_personalised for method in study.personalised) else ""
    detail = "" if brief else f": its own{where}, else the shared one"
    whose = f"the model that a client is served{detail}" if where else "each client's own model"
    return f" The {study.scale.noun} is that of {whose}."


def _own(study: Study) -> Caption:
    """How to read the points, and for how many clients their own model is better."""
    pairs = series.all_error_pairs(study)
    text = f"Points: clients{', first seed' if study.seeds > 1 else ''}"
    text += ", larger where several coincide" if any(len(ids) > 1 for *_, each in pairs for ids in each.clients) else ""
    text += "; crosses: malicious clients" if any(malicious for _, malicious, _ in pairs) else ""
    counts = [_count_better(study, method) for method in study.personalised]
    text += f". Better with their own model: {', '.join(counts)}."
    if study.judged.split == "train":
        text += " Own models were trained on these very examples, which flatters them."
    return "Shared and own model, client by client: below the dashed line, the own model is better", text


def _count_better(study: Study, method: MethodResults) -> str:
    """How many clients of a method fare better with their own model, as text."""
    better, alike, worse = series.better_with_own(method)
    under = f" under {method.name}" if len(study.methods) > 1 else ""
    return (
        f"{better:,} of {better + alike + worse:,} {study.judged.benign_word}clients{under} ({worse:,} worse, {alike:,} alike)"
    )


def _curves(study: Study, band: str, smoothed: str) -> Caption:
    """The curves show errors at evaluations, or training losses where there are too few evaluations."""
    noun, what = study.scale.noun, "Mean" if study.judged.means else "Mean and 90th percentile"
    if study.evaluated:
        return (
            f"{what} over the rounds: where curves are flat, more rounds bring little",
            f"The {noun} over {_evaluated_clients(study)}, evaluated along the way.{band}"
            f"{served_model(study, brief=True)}{_late_own_models(study)}{_changed_clients(study)}",
        )
    return (
        "Training loss over the rounds: where curves are flat, more rounds bring little",
        f"Of the clients drawn in a round: their mean, and the mean of the tenth with the largest loss.{band}{smoothed}"
        f"{_loss_caveat(study)}{_loss_origin(study)}",
    )


def _evaluated_clients(study: Study) -> str:
    """The clients of evaluations during training: small ones were not left out of these."""
    return f"all {study.judged.split} clients, also small ones" if study.judged.at_least else str(study.judged)


def _changed_clients(study: Study) -> str:
    """Sentences on runs whose evaluations are over different clients, so that points of a curve do not compare."""
    sentences = ""
    for method in study.methods:
        for run in method.runs:
            label = f"{run.name}, seed {run.seed}: " * (len(study.runs) > 1)
            words = changed_clients_words(run.history.points, study.judged.split, named=run.epsilon is None)
            sentences += f" {label}{words}" * bool(words)
    return sentences


def _late_own_models(study: Study) -> str:
    """A sentence on methods whose own models are made after training: only the last point of their curve is of own models."""
    late = [
        m.name for m in study.personalised if len(m.evaluations("error")[0]) > len(m.evaluations("shared_error", known=True)[0])
    ]
    if not late:
        return ""
    return f" Under {listed(late)}, own models are made after the last round: earlier points are of the shared model."


def _loss_origin(study: Study) -> str:
    """A sentence on which losses the rounds report: of the shared model, and of malicious clients, too."""
    words = " These are losses of the shared model" if study.personalised else ""
    if study.attacked:
        words += ", with" if words else " These are losses with"
        words += " malicious clients among those drawn"
    return f"{words}." if words else ""


def _window(study: Study) -> int:
    """The rounds that a point of a curve averages, for the longest run."""
    return series.smoothing_window(max(method.over_rounds("trained").shape[1] for method in study.methods))


def _loss_caveat(study: Study) -> str:
    """A sentence for reports with both losses at the start of a round and losses during local work, which are lower."""
    origins = {report.loss_from for m in study.methods for run in m.runs for report in run.history.rounds if report.trained}
    if len(origins) < 2:
        return ""
    return (
        " Methods that ask for losses first show them at the start of the round, the others while clients work, "
        "which is usually lower: compare shapes, not levels."
    )


def _dropped_work(study: Study) -> str:
    """A sentence on selected clients whose work did not arrive; empty if all arrived."""
    dropped = sum(report.dropped for m in study.methods for run in m.runs for report in run.history.rounds)
    return f" Over all runs, the work of {dropped:,} selected {plural('client', dropped)} did not arrive." if dropped else ""


def sample_caption(study: Study) -> str:
    """Sentences on a sample of clients and on the rows of intervals; empty if all clients were evaluated."""
    if not study.sample:
        return ""
    same = ", the same for every method" if len(study.methods) > 1 else ""
    over = ", averaged over seeds" if study.seeds > 1 else ""
    return f" These are {study.sample}{same}. Below each figure: the 95 % interval of the figure over all of them{over}."


def trivial_note(study: Study) -> str:
    """What the trivial answer is, and how many clients fare worse than with it; empty if it is not known."""
    if (known := study.with_trivial) is None:
        return ""
    text = f"The last row ignores the inputs. It is the {trivial_name(known.runs)} of the training examples. "
    text += f"{doubt} " if (doubt := trivial_doubts(known.runs)) else ""
    counts = [(method.name, worse_than_trivial(method.runs)) for method in study.methods]
    several = len(study.methods) > 1
    words = [f"{f'{name}: ' * several}{round(count, 1):,g}" for name, count in counts if count is not None]
    if lacking := [name for name, count in counts if count is None]:
        words.append(f"{listed(lacking)}: not known, as for every private run and federation")
    over = " (mean over seeds)" if study.seeds > 1 else ""
    who = f"{count_words(study.judged.count)} {study.judged.benign_word}{plural('client', study.judged.count[1])}"
    return f"{text}Of the {who}, worse off than with this answer{over}: {'; '.join(words)}{_worse_off(study)}."


def _worse_off(study: Study) -> str:
    """In brackets, who is worse off than with the trivial answer under the only run, the worst first; else empty."""
    if len(study.runs) > 1 or not study.names_clients or study.judged.means:
        return ""
    rows = study.methods[0].rows[0]
    if rows.trivial_error is None:
        return ""
    behind = rows.error - rows.trivial_error
    order = [k for k in behind.argsort(descending=True, stable=True).tolist() if behind[k] > 0]
    return f" ({listed([rows.client[k] for k in order], WORSE_OFF_NAMES)}; some of them by chance)" if order else ""


def nonfinite_note(study: Study) -> str:
    """A note on clients whose error is not finite, which figures leave out; empty if there are none."""
    count = study.nonfinite_clients()
    if not count:
        return ""
    return (
        f"{count:,} {plural('client', count)} (over all runs) {'have' if count > 1 else 'has'} "
        f"{with_article(study.scale.noun)} that is not finite; figures leave them out, and a number that depends on them is "
        "shown as –."
    )
