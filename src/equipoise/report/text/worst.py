"""The clients that fare worst: by the mean of their error over seeds, under one method or under several."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape

import numpy as np
import torch
from numpy.typing import NDArray

from equipoise.picked_clients import beyond_chance_words, picked_words
from equipoise.report.data.by_client import ClientErrors, client_errors, interval_over_seeds, mean_over_seeds, trivial_column
from equipoise.report.data.over_seeds import trivial_name
from equipoise.report.data.results_by_method import MethodResults, Numbers, Study
from equipoise.report.text.captions import served_model
from equipoise.report.text.client_numbers import (
    below_error,
    differing_clients,
    error_interval_words,
    examples_cell,
    few_words,
    has_example_intervals,
    has_number_intervals,
    number_intervals,
    seeds_words,
    signed,
)
from equipoise.report.text.sentences import ValueFormat
from equipoise.report.text.tables import WORST_CLIENTS, close_table, header_cell, nonbreaking, open_table, row
from equipoise.small_clients import FEW_EXAMPLES

NOT_NAMED = (
    "Single clients are not named here, because a run protects them. Whoever may see the clients' data finds all clients in "
    "clients.parquet in the folder of the run, or in result.clients."
)


def worst_clients(study: Study) -> Iterator[str]:
    """The clients that fare worst under the method; with several methods, under the first and under the best one.

    Where a run protects single clients, one sentence says that none is named.
    """
    first, best = study.methods[0], study.best
    yield '<section aria-labelledby="worst"><h2 id="worst">Who fares worst</h2>'
    if not study.names_clients:
        yield f'<p class="note">{NOT_NAMED}</p>'
    elif len(study.methods) == 1:
        yield from _worst_alone(study, first)
    else:
        noun = study.scale.noun
        yield '<p class="note">The same clients under each method; coloured numbers are the change against '
        yield f"{escape(first.name)}. "
        yield f"Clients picked for a large {noun} under one method tend to fare less badly under any other, and on new rows, "
        yield "by chance alone; no interval allows for this choice. Read both tables, and judge by the figures over all "
        yield "clients above.</p>"
        columns = len(study.methods) + bool(client_errors(study, first).seed_of_row)
        yield f'<div class="{"pair" if columns <= 2 else "stack"}">'  # wider tables do not fit beside each other
        yield from _before_and_after(study, first, "left-behind")
        yield from _before_and_after(study, best, "still-behind")
        yield "</div>"
    yield "</section>"


def _worst_alone(study: Study, method: MethodResults) -> Iterator[str]:
    """The clients that fare worst under the only method, with their error and loss."""
    found = client_errors(study)
    losses = client_errors(study, values_of=lambda rows: rows.served_loss)
    only_loss = study.scale.noun == "loss"
    some = _worst_first(study, found, losses, 0)
    known = torch.cat([rows.loss for rows in method.rows])
    finite = known[torch.isfinite(known)]
    plain = study.scale.fitting(float(finite.abs().max()) if len(finite) else 1.0, percent=False)
    whose = ("served " if method.partly_personalised else "own ") if method.personalised else ""
    columns: list[tuple[str, ClientErrors, ValueFormat]] = []
    if not only_loss:
        columns.append((f"{whose}error{' (%)' * study.scale.percent}", found, study.scale))
        if method.personalised:
            columns.append((f"shared error{' (%)' * study.scale.percent}", _shared(study), study.scale))
        if study.with_trivial is not None:
            columns.append((f"trivial error{' (%)' * study.scale.percent}", _trivial(study), study.scale))
    columns.append((f"{whose}loss", losses, plain))
    if only_loss and method.personalised:
        columns.append(("shared loss", _shared(study), plain))
    large = _large(study, found, 0)
    caption = f"The {_client_count(len(some), study.judged.benign_word)} with the largest {study.noun}"
    caption += f"{large}{seeds_words(found)}{_evaluated(study)}.{served_model(study)}{differing_clients(found)}"
    caption += error_interval_words(study, found)
    by_seeds = _interval(study, found, 0, None)
    judged = len(_listed_from(study, found, 0))
    intervals = by_seeds is None or not bool(np.isnan(by_seeds[0]).all())
    chance = [picked_words(len(some), judged, intervals=intervals)]
    if len(method.runs) == 1:
        rows = method.all_rows[0].benign
        chance.append(beyond_chance_words(rows.take((rows.size >= _limit(study)).nonzero().flatten()) if large else rows))
    if any(chance):
        yield f'<p class="note" id="picked">{escape(nonbreaking(" ".join(filter(None, chance))))}</p>'
    if not only_loss and study.with_trivial is not None:
        caption += f" Trivial error: of the same answer for every example, the {trivial_name(method.runs)} of training."
    caption += few_words(study, found, some)
    seed = ["seed"] if found.seed_of_row else []
    yield from open_table("worst alone", caption, ("client", *seed, "examples", *(title for title, _, _ in columns)))
    means = [mean_over_seeds(errors.of(0)) for _, errors, _ in columns]
    for k in some:
        numbers = [scale.number(float(mean[k])) for mean, (_, _, scale) in zip(means, columns, strict=True)]
        numbers[0] += below_error(study, found, 0, k, by_seeds)
        yield row(header_cell(found.keys[k][-1]), (*_seed(found, k), examples_cell(found.sizes[k]), *numbers))
    yield close_table()


def _before_and_after(study: Study, chosen: MethodResults, name: str) -> Iterator[str]:
    """The clients that fare worst under `chosen`, with their error under every method that has the same seeds."""
    scale, at = study.scale, study.methods.index(chosen)
    found = client_errors(study, chosen)
    some = _worst_first(study, found, client_errors(study, chosen, values_of=lambda rows: rows.served_loss), at)
    who = f"{_client_count(len(some), study.judged.benign_word)} with the largest {study.noun} under {chosen.name}"
    who += f"{_large(study, found, at)}{seeds_words(found)}{_evaluated(study)}"
    unit = " in %" if scale.percent else ""
    caption = f"The {who}; {scale.noun}{unit} under each method.{served_model(study, brief=True)}"
    caption += differing_clients(found) + error_interval_words(study, found) + few_words(study, found, some)
    seed = ["seed"] if found.seed_of_row else []
    columns = ("client", *seed, "examples", *(study.methods[index].name for index in found.methods))
    yield from open_table("worst", caption, columns, name, found.methods)
    means = {index: mean_over_seeds(found.of(index)) for index in found.methods}
    moved = {index: mean_over_seeds(found.change(index)) for index in found.methods}
    intervals = {index: _interval(study, found, index, chosen) for index in found.methods}
    for k in some:
        cells = [*_seed(found, k), examples_cell(found.sizes[k])]
        for index in found.methods:
            error = float(means[index][k])
            changed = index > 0 and found.methods[0] == 0
            text = _changed(study, error, float(moved[index][k])) if changed else scale.number(error)
            cells.append(text + below_error(study, found, index, k, intervals[index]))
        yield row(header_cell(found.keys[k][-1]), cells)
    yield close_table()


def _worst_first(study: Study, found: ClientErrors, losses: ClientErrors, method: int) -> list[int]:
    """Positions of the clients with the largest mean error (then loss) under a method, worst first.

    Clients with few examples, whose error is mostly chance, are left out where enough others are there.
    """
    error, loss = (mean_over_seeds(each.of(method)) for each in (found, losses))
    judged = _listed_from(study, found, method)
    loss = np.nan_to_num(loss, nan=np.inf, posinf=np.inf)
    order = np.lexsort((-loss[judged], -error[judged]))
    return [int(k) for k in judged[order][:WORST_CLIENTS]]


def _limit(study: Study) -> int:
    """The examples that a client needs to be listed among the worst: as was asked for, or a number of our own."""
    return study.judged.at_least or FEW_EXAMPLES


def _listed_from(study: Study, found: ClientErrors, method: int) -> NDArray[np.intp]:
    """Positions of the clients that the worst are picked from: judged ones, and with enough examples if these are enough."""
    judged = np.flatnonzero(~np.isnan(mean_over_seeds(found.of(method))))
    large = judged[np.array(found.sizes)[judged] >= _limit(study)]
    return large if len(large) > WORST_CLIENTS else judged


def _large(study: Study, found: ClientErrors, method: int) -> str:
    """A clause that small clients are not listed; empty if they may be."""
    some, every = len(_listed_from(study, found, method)), int((~np.isnan(mean_over_seeds(found.of(method)))).sum())
    return f", of the {some:,} with {_limit(study)} examples or more" if some < every else ""


def _shared(study: Study) -> ClientErrors:
    """The errors of the shared model, or its losses if there is no error, of a study of one method."""
    return client_errors(
        study, rows_of=lambda method: [rows.benign for rows in method.all_rows], values_of=lambda rows: rows.error
    )


def _trivial(study: Study) -> ClientErrors:
    """The errors of the trivial answer, of a study of one method that knows it."""
    return client_errors(study, values_of=trivial_column)


def _interval(study: Study, found: ClientErrors, method: int, start: MethodResults | None) -> tuple[Numbers, Numbers] | None:
    """The interval of each client's mean over seeds; None where the client's examples give it a better one.

    It is by the spread over a client's examples where the errors are numbers and that is known. Else errors in percent stay
    between 0 and 100, and others above 0 if they must.
    """
    if has_example_intervals(study, found):
        return None
    if has_number_intervals(study, found):
        return number_intervals(study, start, method)
    low = 0.0 if study.never_negative else -np.inf
    ends = (low, 1.0 if study.scale.percent else np.inf)
    return interval_over_seeds(found.of(method), *ends)


def _seed(found: ClientErrors, at: int) -> list[str]:
    """The cell that says of which seed a client is; none where rows stand for all seeds."""
    return [str(found.seed_of_row[at])] if found.seed_of_row else []


def _changed(study: Study, error: float, change: float) -> str:
    """An error and its change against the first method, as the section on who gains writes it."""
    text, written = study.scale.number(error), signed(study, change)
    if written == "–":
        return text
    mark = {"±": "same", "−": "down", "+": "up"}[written[0]]
    return f'{text} <small class="{mark}">{"±0" if mark == "same" else written}</small>'


def _client_count(count: int, kind: str = "") -> str:
    return f"{kind}client" if count == 1 else f"{count} {kind}clients"


def _evaluated(study: Study) -> str:
    """A clause that only a sample of clients was evaluated; empty if all were."""
    return ", of those evaluated" if study.sample else ""
