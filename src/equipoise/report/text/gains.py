"""The section on who gains and who pays: the change of every client's error from the first method to each other one."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from html import escape

import numpy as np

from equipoise.report.data.by_client import (
    Changes,
    ClientErrors,
    changes,
    client_errors,
    interval_over_seeds,
    mean_over_seeds,
)
from equipoise.report.data.results_by_method import Numbers, Study
from equipoise.report.text.captions import served_model
from equipoise.report.text.client_numbers import (
    below,
    differing_clients,
    examples_cell,
    few_words,
    interval_words,
    seeds_words,
    signed,
)
from equipoise.report.text.phrases import count_words, listed, plural
from equipoise.report.text.tables import close_table, header_cell, open_table, row, swatch

MOST_CLIENTS = 5  # rows of a table of clients that gain, or pay, the most
MOST_OPEN = 2  # methods whose clients are listed at once; those of more are folded


def gains_section(study: Study, figure: Iterator[str]) -> Iterator[str]:
    """Counts of clients that gain and pay, the figure of all changes, and the clients at both ends; nothing for one method.

    Clients are not named where a run protects single clients.
    """
    if len(study.methods) < 2:
        return
    first = study.methods[0].name
    yield '<section aria-labelledby="gains"><h2 id="gains">Who gains, who pays</h2>'
    found = client_errors(study)
    made = changes(found)
    left_out = [method.name for index, method in enumerate(study.methods) if index not in found.methods]
    if left_out:
        yield f'<p class="note">{escape(listed(left_out))}: no seed in common with {escape(first)}, so no comparison.</p>'
    if made:
        yield f'<p class="note">{escape(_explained(study, found))}</p>'
        yield from _counts(study, found, made)
        yield from figure
        if study.names_clients:
            yield from _lists(study, found, made)
    yield "</section>"


def _explained(study: Study, found: ClientErrors) -> str:
    """What a change is, over which seeds and clients."""
    noun, first = study.scale.noun, study.methods[0].name
    text = f"The change is a client's {noun} under a method minus its {noun} under {first}{seeds_words(found)}. Below 0 the "
    text += f"client gains, above 0 it pays.{served_model(study, brief=True)}"
    text += differing_clients(found)
    return text + " Some clients are at either end by chance alone: trust the counts more than single names."


def _counts(study: Study, found: ClientErrors, made: list[Changes]) -> Iterator[str]:
    """One row per method: how many clients gain and pay, also in every seed, and by how much."""
    judged = f"{len(found):,} {study.judged.benign_word}{plural('client', len(found))}"
    if found.seed_of_row is not None:
        each_seed = count_words(Counter(found.seed_of_row).values())
        judged = f"{each_seed} {study.judged.benign_word}clients of each of {len(found.seeds)} seeds ({len(found):,} in all)"
    unit = " Changes are in percentage points." if study.scale.percent else ""
    caption = f"How many of the {judged} gain and pay against {study.methods[0].name}{seeds_words(found)}.{unit}"
    unknown = any(each.unknown for each in made)
    heads = ["method", "gain", "pay", "unchanged", *(["not comparable"] if unknown else [])]
    heads += ["gain in every seed", "pay in every seed"] if found.over_seeds else []
    yield from open_table(
        "gains", caption, (*heads, "mean change", *(f"mean change of those that {verb}" for verb in ("gain", "pay")))
    )
    for each in made:
        cells = [f"{int(each.gains.sum()):,}", f"{int(each.pays.sum()):,}", f"{each.alike:,}"]
        cells += [f"{each.unknown:,}"] if unknown else []
        cells += [f"{count:,}" for count in each.always or ()]
        for which in (~np.isnan(each.change), each.gains, each.pays):
            cells.append(signed(study, float(each.change[which].mean())) if which.any() else "–")
        yield row(header_cell(study.methods[each.method].name, swatch(each.method)), cells)
    yield close_table()


def _lists(study: Study, found: ClientErrors, made: list[Changes]) -> Iterator[str]:
    """For each method the clients that gain the most beside those that pay the most; those of many methods are folded."""
    means = {index: mean_over_seeds(found.of(index)) for index in found.methods}
    for each in made:
        name = escape(study.methods[each.method].name)
        fold = len(made) > MOST_OPEN
        title = f"{swatch(each.method)}{name} against {escape(study.methods[0].name)}"
        opened = " open" if study.methods[each.method] is study.best else ""
        yield f"<details{opened}><summary>{title}</summary>" if fold else f'<h3 class="apart">{title}</h3>'
        yield '<div class="pair">'
        yield from _ends(study, found, each, means, paying=False)
        yield from _ends(study, found, each, means, paying=True)
        yield "</div></details>" if fold else "</div>"


def _ends(study: Study, found: ClientErrors, each: Changes, means: dict[int, Numbers], *, paying: bool) -> Iterator[str]:
    """The clients that pay, or gain, the most under one method: their errors and the change with its interval."""
    some = each.most(MOST_CLIENTS, paying=paying)
    verb, unit = "pay" if paying else "gain", ", in %" if study.scale.percent else ""
    first, method = study.methods[0].name, study.methods[each.method].name
    if not some:
        yield f'<div class="card"><p class="caption">No client {verb}s.</p></div>'
        return
    every = int((each.pays if paying else each.gains).sum()) == len(some)
    who = f"The {len(some)} clients that {verb}{' the most' * (not every)}" if len(some) > 1 else f"The client that {verb}s"
    caption = f"{who}: {study.noun}{unit}{seeds_words(found)}.{interval_words(found)}{few_words(study, found, some)}"
    heads = ["client", *(["seed"] if found.seed_of_row else []), "change", first, method, "examples"]
    yield from open_table("ends", caption, tuple(heads), f"{verb}-{each.method}")
    low, high = interval_over_seeds(found.change(each.method))
    for k in some:
        cells = [str(found.seed_of_row[k])] if found.seed_of_row else []
        change = f'<span class="{"up" if paying else "down"}">{signed(study, float(each.change[k]))}</span>'
        cells.append(change + below(study, low[k], high[k], sign=True))
        cells += [*(study.scale.number(float(means[m][k])) for m in (0, each.method)), examples_cell(found.sizes[k])]
        yield row(header_cell(found.keys[k][-1]), cells)
    yield close_table()
