"""The sections of a page: from a study to HTML, in the order of the page. Sections without content are left out."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from equipoise.conformal import COVERAGE
from equipoise.core.abilities import read
from equipoise.core.version import VERSION
from equipoise.metrics import Interval
from equipoise.privacy.observer_table import composed_words
from equipoise.report import by_client, notices, over_seeds, paired, series
from equipoise.report.by_client import ClientErrors, client_errors, mean_over_seeds
from equipoise.report.formats import ValueFormat, capital, count_words, listed, minus
from equipoise.report.html import Html, definitions, figure_cell, named, notes, section, shown, small, table
from equipoise.report.knob import clients_table
from equipoise.report.notices import Notice, notice
from equipoise.report.over_seeds import FIGURES, metric_figures, trivial_name
from equipoise.report.paired import PairedDifference
from equipoise.report.study import MethodResults, Numbers, Study
from equipoise.runs.standing_out import of_record
from equipoise.subgroups import attributes_of, subgroups_over_seeds
from equipoise.types import SamplerTraits

if TYPE_CHECKING:
    from equipoise.run_record import RunRecord

WORST_CLIENTS = 10  # rows of the tables of clients that fare worst
MOST_NAMED = 10  # clients that are named in a row of a table, or a note
MOST_CLIENTS = 50_000  # rows of the table of all clients: a page of some megabytes
MOST_CHANGES = 4  # methods in the table of all clients; of more, it has no columns of by_client.changes
MOST_INPUTS = 20  # columns of a table that are named
_SHOWN = ("mean", "percentile_90", "worst_10")


def headline(study: Study) -> list[Notice]:
    """What the page says first: how the tail fares under the method, or under the best method against the first."""
    scale, noun, who, first = study.scale, study.scale.noun, study.judged, study.methods[0]
    row = first.figures

    def value(key: str, of: MethodResults = first) -> str:
        return scale.value(of.figures[key].mean)

    if who.means:
        each = listed([f"{method.name} {value('mean', method)}" for method in study.methods])
        return [notice("headline-means", noun=noun, who=who, each=each), notice("means-only")]
    trivial = list(notices.trivial_notices({first.name: row}, trivial_name(first.runs), first.runs[0].error_name, scale))
    if len(study.methods) == 1:
        middle = scale.value(first.median())
        found = [notice("headline", noun=capital(study.noun), who=who, seeds=study.seeds, median=middle,
                        tail=value("percentile_90"), worst=value("worst_10"))]  # fmt: skip
        if first.personalised:
            median, worst = scale.value(first.median(shared=True)), value("shared_worst_10")
            found.append(notice("headline-shared", median=median, worst=worst))
        return [*found, *trivial]
    best = study.best
    change = next(each for each in study.paired_differences("percentile_90") if each.method == best.name)
    found = [notice(
        "headline-comparison", best=best.name, first=first.name, noun=noun, who=who, before=value("percentile_90"),
        after=value("percentile_90", best), verdict=change.verdict_words, lower=change.lower, seeds=change.seeds,
        interval=change.interval.text(scale.end), mean_before=value("mean"), mean_after=value("mean", best),
    )]  # fmt: skip
    if study.validation is not None and best is study.chosen:
        reached, before = (scale.value(study.validation.table[name]["percentile_90"].mean) for name in (best.name, first.name))
        found.append(
            notice("headline-chosen", who=study.validation.judged, reached=reached, first=first.name, first_reached=before)
        )
    elif len(study.methods) > 2:
        found.append(notice("headline-optimistic", count=len(study.methods) - 1))
    return [*found, *trivial]


def header_notices(study: Study) -> Iterator[Notice]:
    """What a reader must know before any figure: the table, own models, attacks, clients that are left out, small ones."""
    first = study.runs[0]
    if first.target and first.inputs:
        inputs = listed(first.inputs, MOST_INPUTS)
        yield notice("trained-on", data=study.data_name, target=first.target, inputs=inputs)
    yield from notices.about_runs(study.runs_by_method)


def numbers(study: Study) -> Iterator[str]:
    """One row per method, with rows below it of intervals and of the shared model, and one of the trivial answer."""
    values, seeds, unit = study.figures_by_seed, study.seeds, ", in %" * study.scale.percent
    bold = {key: paired.separated_methods(values[key]) for key in FIGURES}
    heads = ("method", *FIGURES.values(), "trained clients per round", "wall time (s)")
    caption = f"{capital(study.measured)} over {study.judged}{unit}; mean ± standard deviation over seeds ({seeds})."
    rows: list[list[object]] = []
    kinds: list[str] = []

    def figures(method: MethodResults, prefix: str = "", best: Iterable[str] = ()) -> list[object]:
        texts = {key: study.scale.spread(method.figures[prefix + key], len(method.runs)) for key in FIGURES}
        return [figure_cell(prefix + key, text, best=key in best) for key, text in texts.items()]

    def add_intervals(found: Mapping[str, Interval]) -> None:
        if found:
            texts = [found[key].text(lambda v: minus(study.scale.number(v))) if key in found else "" for key in FIGURES]
            rows.append(["95 % interval", *texts, "", ""])
            kinds.append("below")

    for index, method in enumerate(study.methods):
        best = [key for key in FIGURES if method.name in bold[key]]
        work = [figure_cell(key, f"{method.figures[key].mean:,.1f}") for key in ("trained", "seconds")]
        rows.append([named(index, method.name), *figures(method, best=best), *work])
        kinds.append("")
        add_intervals(method.intervals)
        if method.personalised:
            rows.append(["shared model", *figures(method, "shared_"), "", ""])
            kinds.append("below")
            add_intervals(method.shared_intervals)
    if (known := study.with_trivial) is not None:
        rows.append([trivial_name(known.runs), *figures(known, "trivial_"), "–", "–"])
        kinds.append("trivial")
    said = [notice("served", noun=study.scale.noun)] if study.personalised else []
    said += [notice("sample")] if study.judged.drawn else []
    said += paired.bold_notices(any(bold.values()), values["mean"])
    tables = table("table-numbers", caption, heads, rows, notices=said, kind="numbers", kinds=kinds)
    yield from section("numbers", "In numbers", tables, notes(_trivial_notes(study), "trivial"))


def _trivial_notes(study: Study) -> Iterator[Notice]:
    """What the trivial answer is, how many clients are worse off, and who; and errors that are not finite."""
    if (known := study.with_trivial) is not None:
        counts = [(method.name, over_seeds.worse_than_trivial(method.runs)) for method in study.methods]
        each = listed([f"{name} {'not known' if count is None else f'{count:,.4g}'}" for name, count in counts])
        yield notice("trivial-row", answer=trivial_name(known.runs), each=each, count=count_words(study.judged.counts))
        rows = known.rows[0]
        if len(study.runs) == 1 and study.names_clients and not study.judged.means and rows.trivial_error is not None:
            behind = rows.error - rows.trivial_error
            order = [k for k in behind.argsort(descending=True, stable=True).tolist() if behind[k] > 0]
            if order:
                yield notice("trivial-behind", names=listed([rows.client[k] for k in order], MOST_NAMED))
    if count := study.nonfinite_clients():
        yield notice("nonfinite", noun=study.scale.noun, count=f"{count:,}")


def differences(study: Study) -> Iterator[str]:
    """For each method its paired differences from the first one, with intervals; nothing for one method, or for one seed."""
    if len(study.methods) < 2 or study.judged.means:
        return
    found = {figure: study.paired_differences(figure) for figure in _SHOWN}
    if max(each.seeds for each in found["mean"]) < 2:
        return
    first, scale = study.methods[0].name, study.scale

    def cell(each: PairedDifference) -> Html:
        signed = [scale.signed(each.spread.mean).removeprefix("±"), scale.number(each.spread.deviation)]
        verdict = f"{each.verdict_words} (lower in {paired.lower_text(each)})"
        return small(" ± ".join(signed), each.interval.text(lambda v: scale.end(v).removeprefix("±")), verdict)

    rows = [
        [
            named(k, method.name),
            *(cell(found[figure][k - 1]) for figure in _SHOWN),
        ]
        for k, method in enumerate(study.methods)
        if k
    ]
    caption = f"Figures minus those of {first}{' (points)' * scale.percent}: mean ± standard deviation, 95 % interval, verdict."
    said = [notice("interval-rule"), notices.covered(study.runs), *paired.uncorrected(len(study.methods) - 1, len(_SHOWN))]
    said += paired.cohort_notices(study.runs_by_method, first)
    heads = ("method", *(FIGURES[figure] for figure in _SHOWN))
    yield from section(
        "differences", "Differences, seed by seed",
        table("table-differences", caption, heads, rows, notices=said, kind="differences"),
    )  # fmt: skip


def validation(study: Study) -> Iterator[str]:
    """The figures of every method on validation data, by which the headline's method is chosen; nothing without such data."""
    if (found := study.validation) is None or study.chosen is None:
        return
    caption = f"{capital(study.scale.noun)} over {found.judged}{', in %' * study.scale.percent}. Lowest 90th percentile: "
    rows = [
        [named(k, method.name), *(figure_cell(f"validation_{key}", study.scale.spread(method.figures[key], len(method.runs)))
                                  for key in FIGURES)]
        for k, method in enumerate(found.methods)
    ]  # fmt: skip
    heads = ("method", *FIGURES.values())
    yield from section(
        "validation", "On validation data", table("table-validation", f"{caption}{study.chosen.name}.", heads, rows)
    )


def subgroups(study: Study) -> Iterator[str]:
    """A table of each attribute of clients: mean, 90th percentile and gap of its subgroups; nothing without attributes."""
    attributes, scale = attributes_of(study.runs), study.scale

    def number(value: float) -> str:
        return minus(scale.number(value))

    def rows(attribute: str) -> Iterator[list[object]]:
        for index, method in enumerate(study.methods):
            for each in subgroups_over_seeds(method.runs, attribute):
                pairs = ((each.mean, each.mean_interval), (each.percentile_90, each.percentile_90_interval),
                         (each.gap, each.gap_interval))  # fmt: skip
                cells = [small(number(figure), between.text(number)) for figure, between in pairs]
                yield [named(index, method.name), each.value, f"{each.clients:,}", *cells]

    tables = (
        line
        for k, attribute in enumerate(attributes)
        for line in table(
            f"table-subgroups-{k}", f"By {attribute}", ("method", attribute, "clients", "mean", "90th percentile", "gap"),
            rows(attribute),
        )
    )  # fmt: skip
    noun = f"{capital(scale.noun)}{', in %,' * scale.percent}"
    said = notes([notice("subgroups", noun=noun, who=study.judged)] if attributes else [])
    yield from section("subgroups", "Subgroups", said, tables)


def metrics(study: Study) -> Iterator[str]:
    """A table of each metric over the clients that methods are judged on; nothing for runs without metrics."""
    rows: list[list[object]] = []
    for name in dict.fromkeys(name for run in study.runs for name in run.clients.metrics):
        for index, method in enumerate(study.methods):
            if (found := metric_figures(method.runs, name)) is not None:
                values = [abs(found.figures[key].mean) for key in FIGURES]
                scale = ValueFormat.fitting(max((v for v in values if math.isfinite(v)), default=1.0), percent=False)
                texts = [scale.spread(found.figures[key], len(method.runs)) for key in FIGURES]
                better = "more" if found.higher_is_better else "less"
                rows.append([name, better, named(index, method.name), *texts, count_words(found.missing)])
    heads = ("metric", "better", "method", *FIGURES.values(), "clients without a value")
    misses = {run.clients.miss for run in study.runs if run.clients.miss is not None}
    more = [notice("conformal", wanted=listed([f"{100 * (1 - miss):g} %" for miss in sorted(misses)]))] if misses else []
    more += [notice("backdoor")] if any(row[0] == notices.BACKDOOR for row in rows) else []
    caption = str(notice("metrics", who=study.judged))
    yield from section("metrics", "Metrics", table("table-metrics", caption, heads, rows, notices=more))


def stopped(study: Study) -> Iterator[str]:
    """When and why runs were stopped early, and which round is reported; nothing if none was."""
    found = [(f"{run.name}, seed {run.seed}", run.history.stopped) for run in study.runs if run.history.stopped]
    yield from section("stopped", "Stopped early", definitions("stops", found))


def attack(study: Study) -> Iterator[str]:
    """How many clients are malicious, their mean error, and their names; nothing without an attack."""
    about = notices.about_runs(study.runs_by_method, sizes=False)
    found = [each for each in about if each.code in ("attack", "malicious-error")]
    sets = {over_seeds.malicious_clients(run) for run in study.runs}
    if found and len(sets) == 1 and study.names_clients:
        found.append(notice("attack-names", names=listed(next(iter(sets)), MOST_NAMED)))
    yield from section("attack", "Under attack", notes(found))


def rejected(study: Study) -> Iterator[str]:
    """The clients whose updates were left out, and the rounds; nothing if none was."""
    rows: list[list[object]] = []
    for index, method in enumerate(study.methods):
        found = [(run, client, report.round + 1) for run in method.runs for report in run.history.rounds
                 for client in report.rejected]  # fmt: skip
        bad = sum(client in over_seeds.malicious_clients(run) for run, client, _ in found)
        who = [client for client, _ in Counter(client for _, client, _ in found).most_common()]
        names = listed(who, MOST_NAMED) if study.names_clients else "not named"
        rounds = listed([str(number) for number in sorted({number for *_, number in found})], MOST_NAMED)
        rows.append([named(index, method.name), f"{len(found):,}", f"{bad:,}", f"{len(who):,}", names or "–", rounds or "–"])
    heads = ("method", "updates left out", "of malicious clients", "clients", "who", "rounds")
    caption = "Updates that were not finite or absurdly large, over all seeds."
    if any(report.rejected for run in study.runs for report in run.history.rounds):
        yield from section("rejected", "Updates left out", table("table-rejected", caption, heads, rows, kind="rejected"))


def network(study: Study) -> Iterator[str]:
    """Bytes over the network and failures, by node; nothing for simulations.

    Of a run that protects clients the totals alone: who took part in which rounds is the operator's to know.
    """
    rows: list[list[object]] = []
    said: list[tuple[object, object]] = []
    runs = [run for run in study.runs if any(report.bytes_sent or report.missing for report in run.history.rounds)]
    for run in runs:
        label, reports = f"{run.name}, seed {run.seed}", run.history.rounds
        totals = sum(r.bytes_sent for r in reports), sum(r.bytes_received for r in reports)
        rows.append([label, "all", *map(_bytes_text, totals), "", ""])
        sent: Counter[str] = Counter()
        back: Counter[str] = Counter()
        for report in reports:
            for node, (to, from_it) in report.bytes_by_client.items():
                sent[node] += to
                back[node] += from_it
        failed = Counter(node for report in reports for node in report.missing)
        reason = {node: why for report in reports for node, why in report.missing.items()}
        for node in sorted({*sent, *failed}) if not run.protects_clients else ():
            texts = _bytes_text(sent[node]), _bytes_text(back[node]), failed[node], reason.get(node, "")
            rows.append([label, node, *texts])
        said += [(label, each) for each in (*notices.skipped_rounds(run), *of_record(run))]
    heads = ("run", "node", "sent to it", "received", "rounds it failed in", "the last reason")
    hidden = [notice("operator")] if any(run.protects_clients for run in runs) else []
    traffic = table("traffic", str(notice("traffic")), heads, rows)
    yield from section("network", "Over the network", traffic, definitions("by-round", said), notes(hidden))


def _bytes_text(count: float) -> str:
    """A number of bytes with its unit, e.g. 1.2 kB or 3.4 MB."""
    for unit in ("B", "kB", "MB", "GB"):
        if count < 1000 or unit == "GB":
            break
        count /= 1000
    return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"


def gains(study: Study, figure: Iterable[str]) -> Iterator[str]:
    """How many clients gain and pay against the first method, and the figure of all changes; nothing for one method."""
    if len(study.methods) < 2 or study.judged.means:
        return
    found, first = client_errors(study), study.methods[0].name
    apart = [method.name for index, method in enumerate(study.methods) if index not in found.methods]
    rows: list[list[object]] = []
    for each in by_client.changes(found):
        always = [f"; in every seed: {count:,}" for count in each.always or ()] or ["", ""]
        means = [study.scale.signed(float(each.change[some].mean())) if some.any() else "–" for some in (each.gains, each.pays)]
        counts = [
            small(f"{int(some.sum()):,}", f"mean {change}{seeds}")
            for some, change, seeds in zip((each.gains, each.pays), means, always, strict=True)
        ]
        every = study.scale.signed(float(np.nanmean(each.change))) if each.unknown < len(found) else "–"
        name = named(each.method, study.methods[each.method].name)
        rows.append([name, *counts, f"{each.alike:,}", f"{each.unknown:,}", every])
    heads = ("method", "gain", "pay", "unchanged", "not comparable", "mean change")
    said = [notice("gains", noun=study.scale.noun, first=first), *_client_notices(study, found)]
    said += [notice("no-common-seed", first=first, methods=listed(apart))] if apart else []
    caption = f"Clients ({len(found):,}) against {first}{'; by_client.changes in points' * study.scale.percent}."
    shown = table("table-gains", caption, heads, rows, notices=said, kind="gains")
    yield from section("gains", "Who gains, who pays", shown if rows else notes(said), figure if rows else ())


def _client_notices(study: Study, found: ClientErrors) -> list[Notice]:
    """That the data differ from seed to seed, if they do."""
    return [notice("clients-by-seed", seeds=len(found.seeds))] if found.seed_of_row is not None else []


def privacy(study: Study, figure: Iterable[str]) -> Iterator[str]:
    """ε of each method, what it does not cover, and its curve over the rounds; nothing without privacy."""
    drawn, spent = list(figure), [(method, _spent(method)) for method in study.methods]
    if not drawn and not any(text for _, text in spent):
        return
    none = str(notice("no-privacy"))
    pairs = [(named(index, method.name), text or none) for index, (method, text) in enumerate(spent)]
    observers: list[str] = []
    for index, method in enumerate(study.methods):
        tables = [run.privacy for run in method.runs if run.privacy is not None and run.privacy.delta is not None]
        if tables:
            most = max(tables, key=lambda each: each["public"].epsilon or 0.0)
            rows = [[row.observer, row.shown, row.adjacency, row.assumes] for row in most.rows]
            caption, heads = (
                f"{method.name}: ε by observer, at δ = {most.delta:.4g}",
                ("observer", "ε", "neighbours differ by", "assuming"),
            )
            observers += table(f"table-observers-{index}", caption, heads, rows, kind="observers")
    noise = {run.privacy.noise for run in study.runs if run.privacy is not None and run.privacy.noise}
    together = composed_words(run.privacy for run in study.runs)
    said = [("together", together)] if together else []
    said += [("noise", each) for each in sorted(noise)]
    more = definitions("composed", said)
    yield from section(
        "privacy", "Privacy spent", definitions("epsilon", pairs), observers, more, notes([notice("not-covered")]), drawn
    )


def _spent(method: MethodResults) -> str:
    """The privacy that a method has spent; if seeds differ, the largest ε. Empty unless all runs are private."""
    spent = [run.epsilon for run in method.runs if run.epsilon is not None]
    if len(spent) < len(method.runs):
        return ""
    most = max(spent, key=lambda each: (each.epsilon, each.epsilon_server))
    return str(notice("most-spent", spent=most, seeds=len(spent))) if len(set(map(str, spent))) > 1 else str(most)


def worst(study: Study) -> Iterator[str]:
    """The clients that fare worst under the method; with several methods, under the first and under the best one.

    Where a run protects single clients, one sentence says that none is named.
    """
    if study.judged.means:
        return
    if not study.names_clients:
        yield from section("worst", "Who fares worst", notes([notice("not-named")]))
        return
    first, several = study.methods[0], len(study.methods) > 1
    tables = list(_worst_table(study, first, "left-behind" if several else "table-worst"))
    tables += _worst_table(study, study.best, "still-behind") if several and study.best is not first else []
    said = notes([notice("picked-before-after", first=first.name)] if several else [])
    yield from section("worst", "Who fares worst", said, tables)


def _worst_table(study: Study, chosen: MethodResults, key: str) -> Iterator[str]:
    """The clients that fare worst under `chosen`, with their error under every method that has the same seeds.

    Clients with few examples, whose error is mostly chance, are left out where enough others are there.
    """
    scale, at, alone = study.scale, study.methods.index(chosen), len(study.methods) == 1
    found, losses = client_errors(study, chosen), client_errors(study, chosen, values_of=lambda rows: rows.served_loss)
    error, loss = (mean_over_seeds(each.of(at)) for each in (found, losses))
    limit, judged = study.judged.at_least or notices.FEW_EXAMPLES, np.flatnonzero(~np.isnan(error))
    large = judged[np.array(found.sizes)[judged] >= limit]
    among = large if len(large) > WORST_CLIENTS else judged
    order = np.lexsort((-np.nan_to_num(loss[among], nan=np.inf, posinf=np.inf), -error[among]))
    some = [int(k) for k in among[order][:WORST_CLIENTS]]
    columns: list[tuple[object, Numbers, ValueFormat]] = []
    if alone:
        if chosen.personalised:
            rows_of = lambda method: [rows.benign for rows in method.all_rows]  # noqa: E731
            shared = client_errors(study, rows_of=rows_of, values_of=lambda rows: rows.error)
            columns.append(("shared model", mean_over_seeds(shared.of(0)), scale))
        if study.with_trivial is not None:
            trivial = client_errors(study, values_of=by_client.trivial_column)
            columns.append((trivial_name(chosen.runs), mean_over_seeds(trivial.of(0)), scale))
        if scale.noun != "loss":
            top = float(np.abs(loss[np.isfinite(loss)]).max(initial=0.0)) or 1.0
            columns.append(("loss", loss, scale.fitting(top, percent=False)))
    intervals = {index: by_client.error_intervals(study, found, chosen, index) for index in found.methods}

    def cells(k: int) -> Iterator[object]:
        if found.seed_of_row:
            yield found.seed_of_row[k]
        yield f"{found.sizes[k]:,}{' *' * (found.sizes[k] < notices.FEW_EXAMPLES)}"
        for index in found.methods:
            number = scale.number(float(mean_over_seeds(found.of(index))[k]))
            low, high = (float(end[k]) for end in intervals[index])
            between = f"{minus(scale.number(low))} to {minus(scale.number(high))}" if math.isfinite(low + high) else ""
            moved = float(mean_over_seeds(found.change(index))[k])
            if index > 0 and found.methods[0] == 0 and math.isfinite(moved):
                change = scale.signed(moved)
                mark = {"±": "same", "−": "down", "+": "up"}[change[0]]
                number = f'{number} <small class="{mark}">{"±0" if mark == "same" else change}</small>'
            yield small(Html(number), between)
        for _, values, how in columns:
            yield how.number(float(values[k]))

    clause = f" with {limit} examples or more" if len(among) < len(judged) else ""
    unit, under = " (%)" * scale.percent, "" if alone else f" under {chosen.name}"
    caption = f"Largest {study.noun}{unit}{under}, clients{clause}: {len(some)} of {len(among):,}."
    heads = ["client", *(["seed"] if found.seed_of_row else []), "examples"]
    heads += [study.noun if alone else study.methods[index].name for index in found.methods]
    said = [notice("served", noun=scale.noun)] if study.personalised else []
    said += [*_client_notices(study, found), *_interval_notices(study, found, intervals)]
    said += (
        [notice("few-examples", limit=notices.FEW_EXAMPLES)] if any(found.sizes[k] < notices.FEW_EXAMPLES for k in some) else []
    )
    said += [notice("picked", shown=len(some), all=f"{len(among):,}")] if alone and len(some) < len(among) else []
    if alone and len(chosen.runs) == 1:
        rows = chosen.all_rows[0].benign
        said += notices.chance_notices(rows.take((rows.size >= limit).nonzero().flatten()) if clause else rows)
    rows_shown = ([found.keys[k][-1], *cells(k)] for k in some)
    yield from table(key, caption, [*heads, *(title for title, _, _ in columns)], rows_shown, notices=said, kind="worst")


def _interval_notices(study: Study, found: ClientErrors, intervals: Mapping[int, tuple[Numbers, Numbers]]) -> list[Notice]:
    """What the intervals of clients' errors cover; nothing where there is none."""
    if not any(np.isfinite(ends[0]).any() for ends in intervals.values()):
        return []
    how = by_client.interval_kind(study, found)
    return [notice("interval-examples", how=how)] if how else [notice("interval-seeds")]


def all_clients(study: Study) -> Iterator[str]:
    """All benign clients with their error under each method, mean over seeds; none where a run protects single clients."""
    if not study.names_clients:
        return

    def errors(values_of: Any = lambda rows: rows.served_error) -> ClientErrors:
        rows_of = lambda method: [run.clients.benign for run in method.runs]  # noqa: E731
        return client_errors(study, rows_of=rows_of, values_of=values_of, by_split=True)

    found, shared = errors(), errors(lambda rows: rows.error)
    judged = study.methods[0].runs[0].judged_on
    order = sorted(range(len(found)), key=lambda row: found.keys[row][0] != judged)[:MOST_CLIENTS]  # those judged first
    keys = [(found.keys[row][0], found.keys[row][1]) for row in order]
    columns: dict[str, Sequence[Any]] = {"client": [client for _, client in keys]}
    if len({split for split, _ in keys}) > 1:
        columns["split"] = [split for split, _ in keys]
    if found.seed_of_row is not None:
        columns["seed"] = [found.seed_of_row[row] for row in order]
    columns["examples"] = [found.sizes[row] for row in order]

    def add(name: str, values: Numbers) -> None:
        columns[name] = [float(f"{value:.6g}") if math.isfinite(value) else None for value in values[order].tolist()]

    noun, several = study.scale.noun, len(study.methods) > 1
    for index in found.methods:
        name = f"{noun}, {study.methods[index].name}" if several else noun
        add(name, mean_over_seeds(found.of(index)))
        if study.methods[index].personalised:
            add(f"{name}, shared model", mean_over_seeds(shared.of(index)))
    for index in found.methods[1:] if len(found.methods) <= MOST_CHANGES else ():
        add(f"change, {study.methods[index].name}", mean_over_seeds(found.change(index)))
    if (known := study.with_trivial) is not None and study.methods.index(known) in found.methods:
        add(f"trivial {noun}", mean_over_seeds(errors(by_client.trivial_column).of(study.methods.index(known))))
    for method in study.methods if found.seed_of_row is None else ():
        if method.runs[0].clients.miss is not None:
            rows = method.runs[0].clients.where("test")
            covered_shares = dict(zip(rows.client, rows.metrics[COVERAGE].tolist(), strict=True))
            shares = [covered_shares.get(client, math.nan) if split == "test" else math.nan for split, client in found.keys]
            add(f"{COVERAGE}, {method.name}", np.array(shares))
    each = [word for word in ("split", "seed") if word in columns]
    clients = len(set(columns["client"]))
    said = str(notice("one-row-each", clients=f"{clients:,}", rows=f"{len(order):,}", each=f"client, {listed(each)}"))
    title = "All clients" if len(found) <= MOST_CLIENTS else f"The first {MOST_CLIENTS:,} of {len(found):,} clients"
    yield from clients_table(columns, percent=study.scale.percent, title=title, note=said if clients < len(order) else "")


def settings(study: Study) -> Iterator[str]:
    """Algorithms, seeds, data, rounds, cohorts and versions."""
    pairs: list[tuple[object, object]] = []
    for index, method in enumerate(study.methods):
        code = shown(repr(method.runs[0].algorithm))
        folded = Html(f"<details><summary>The algorithm, as code</summary><code>{code}</code></details>")
        pairs.append((named(index, method.name), folded))
    values = {
        "seeds": [listed([str(run.seed) for run in method.runs]) for method in study.methods],
        "data": [method.runs[0].data for method in study.methods],
        "rounds": [count_words(len(run.history.rounds) for run in method.runs) for method in study.methods],
        "clients per round": [_cohorts(method.runs) for method in study.methods],
    }
    for what, each in values.items():
        texts = [f"{method.name}: {value}" for method, value in zip(study.methods, each, strict=True)]
        pairs.append((what, each[0] if len(set(each)) == 1 else "; ".join(texts)))
    pairs.append(("versions", f"equipoise {VERSION}, torch {torch.__version__}"))
    yield from section("settings", "Settings", definitions("values", pairs))


def _cohorts(runs: Sequence[RunRecord]) -> str:
    """How many clients were drawn per round; where clients come and go, how many updates fill the buffer of a step."""
    sizes = count_words({report.cohort for run in runs for report in run.history.rounds} or {0})
    return f"{sizes} updates (buffer)" if read(SamplerTraits, runs[0].algorithm.sampler).buffered is not None else sizes


def glossary(study: Study) -> Iterator[str]:
    """What the words of the page mean."""
    fields = {"noun": study.scale.noun, "measured": study.measured, "definition": study.definition}
    words = ("client", "error", "mean", "percentile", "worst", "deviation", "trained", "time")
    found = [notice(f"word-{word}", **fields) for word in words]
    yield from section("words", "Words", definitions("meanings", ((each.title, each) for each in found)))


def figure(study: Study, name: str, kind: str = "wide") -> Iterator[str]:
    """A figure with its title, caption and notices; the script draws it."""
    caption, *said = captions(study, name)
    yield f'<figure id="figure-{name}" class="{kind}"><h3 id="title-{name}">{shown(caption.title)}</h3>'
    yield f'<div class="plot" data-figure="{name}" role="group" aria-labelledby="title-{name}"></div>'
    yield f"<figcaption>{' '.join(map(shown, (caption, *said)))}</figcaption></figure>"


def captions(study: Study, name: str) -> list[Notice]:
    """Title and caption of a figure, and what limits it."""
    first, noun, said = study.methods[0].name, study.scale.noun, list[Notice]()
    fields: dict[str, Any] = {"noun": capital(noun) if name == "sizes" else noun, "first": first, "who": study.judged}
    reports = [report for run in study.runs for report in run.history.rounds]
    if name == "own":
        each = [(method.name, *series.better_with_own(method)) for method in study.personalised]
        fields["each"] = listed([f"{method} {better:,} of {better + alike + worse:,} ({worse:,} worse)"
                                 for method, better, alike, worse in each])  # fmt: skip
        said += [notice("trained-examples")] if study.judged.weighted else []
    elif name == "curves" and study.evaluated:
        fields["what"] = f"{capital(noun)} over {study.judged.kind}, evaluated along the way"
        late = [m.name for m in study.personalised
                if len(m.evaluations("error")[0]) > len(m.evaluations("shared_error", known=True)[0])]  # fmt: skip
        said += [notice("late-own-models", methods=listed(late))] if late else []
        for run in study.runs:
            said += notices.changing_clients(run.history.points, run.judged_on, named=not run.protects_clients)
    elif name == "curves":
        fields["what"] = "Training loss of the shared model for the clients drawn in a round"
        said += [notice("loss-origin")] if len({report.loss_from for report in reports if report.trained}) > 1 else []
    elif name == "selected" and (count := sum(report.dropped for report in reports)):
        said.append(notice("dropped", count=f"{count:,}"))
    of_error = name in ("histogram", "percentiles", "tradeoff", "sizes", "gains") or (name == "curves" and study.evaluated)
    if study.personalised and of_error:
        said.append(notice("served", noun=noun))
    return [notice(f"figure-{name}", **fields), *said]
