"""The page's tables: the numbers of the methods, and the clients that fare worst."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from html import escape

import torch

from equipoise.compare import FIGURES
from equipoise.report.captions import left_out
from equipoise.report.study import Method, Study
from equipoise.report.style import COLOURS

WORST = 10


def numbers_table(study: Study) -> Iterator[str]:
    """One row per method: the figures of the error, clients trained per round, and wall time."""
    seeds = f"; mean ± standard deviation over {study.seeds} seeds" if study.seeds > 1 else "; one seed, so no spread is known"
    unit = ", in %" if study.scale.percent else ""
    weighed = ", weighted by their examples" if study.crowd.weighted else ""
    headers = {**FIGURES, "trained": "trained clients per round", "seconds": "wall time (s)"}
    caption = f"{study.scale.noun.capitalize()} over {study.crowd}{weighed}{unit}{seeds}."
    if len(study.methods) > 1:
        caption += " The lowest of a column is bold."
    yield '<section aria-labelledby="numbers"><h2 id="numbers">In numbers</h2>'
    yield from _begin("numbers", caption, ("method", *headers.values()))
    lowest = {key: _lowest([study.scale.number(method.figures[key].mean) for method in study.methods]) for key in FIGURES}
    for index, method in enumerate(study.methods):
        cells = []
        for key in headers:
            spread = method.figures[key]
            text = study.scale.spread(spread, len(method.runs)) if key in FIGURES else _plain(spread.mean)
            mark = ' class="best"' if key in FIGURES and study.scale.number(spread.mean) == lowest[key] else ""
            cells.append(f'<td{mark} data-key="{key}">{bound(text)}</td>')
        yield f"<tr>{_name(method.name, swatch(index))}{''.join(cells)}</tr>"
    yield _END
    if note := left_out(study):
        yield f'<p class="note">{escape(note)}</p>'
    yield "</section>"


def worst_clients(study: Study) -> Iterator[str]:
    """Who fares worst under the method; with several, under the first and under the best, with each method's error."""
    first, best = study.methods[0], study.best
    yield '<section aria-labelledby="worst"><h2 id="worst">Who fares worst</h2>'
    if len(study.methods) == 1:
        yield from _worst_alone(study, first)
    else:
        noun = study.scale.noun
        yield f'<p class="note">The same clients under each method; small numbers are the change against {escape(first.name)}. '
        yield f"Clients picked for a large {noun} under one method tend to fare less badly under any other, by chance alone: "
        yield "read both tables, and judge by the table of all clients above.</p>"
        yield f'<div class="{"pair" if len(study.methods) <= 3 else "stack"}">'
        yield from _before_and_after(study, first, "left-behind")
        yield from _before_and_after(study, best, "still-behind")
        yield "</div>"
    yield "</section>"


def _worst_alone(study: Study, method: Method) -> Iterator[str]:
    rows, same = method.rows[0], study.scale.noun == "loss"
    worst = method.worst(WORST)
    seed = f", seed {method.runs[0].seed}" if len(method.runs) > 1 else ""
    columns = ("client", "examples", *(() if same else ("error" + " (%)" * study.scale.percent,)), "loss")
    yield from _begin("worst alone", f"The {_clients(len(worst))} with the largest {study.scale.noun}{seed}.", columns)
    finite = rows.loss[torch.isfinite(rows.loss)]
    losses = study.scale.fitting(float(finite.abs().max()) if len(finite) else 1.0, percent=False)
    for k in worst:
        error = "" if same else f"<td>{study.scale.number(float(rows.error[k]))}</td>"
        yield f"<tr>{_name(rows.client[k])}<td>{int(rows.size[k]):,}</td>{error}"
        yield f"<td>{losses.number(float(rows.loss[k]))}</td></tr>"
    yield _END


def _before_and_after(study: Study, chosen: Method, name: str) -> Iterator[str]:
    """The clients that fare worst under `chosen`, with their error under every method that has the same seed."""
    scale, rows, seed = study.scale, chosen.rows[0], chosen.runs[0].seed
    worst = chosen.worst(WORST)
    under = [(index, method, method.errors_by_client(seed)) for index, method in enumerate(study.methods)]
    shown = [(index, method, errors) for index, method, errors in under if errors is not None]
    seeds = f", seed {seed}" if study.seeds > 1 else ""
    caption = f"The {_clients(len(worst))} with the largest {scale.noun} under {chosen.name}{seeds}"
    caption += f"; {scale.noun}{' in %' if scale.percent else ''} under each method."
    yield from _begin("worst", caption, ("client", "examples", *(m.name for _, m, _ in shown)), name, [i for i, _, _ in shown])
    for k in worst:
        key = (rows.client[k], int(rows.size[k]))
        errors = [found.get(key, math.nan) for _, _, found in shown]
        base = errors[0] if shown[0][0] == 0 else math.nan
        cells = (_change(study, base, error) if place else scale.number(error) for place, error in enumerate(errors))
        yield f"<tr>{_name(key[0])}<td>{key[1]:,}</td>{''.join(f'<td>{cell}</td>' for cell in cells)}</tr>"
    yield _END


def _change(study: Study, before: float, after: float) -> str:
    """An error and its change, which is that of the written numbers."""
    change = study.scale.change(before, after)
    text = study.scale.number(after)
    if math.isnan(change):
        return text
    if change == 0:
        return f'{text} <small class="same">±0</small>'
    sign, mark = ("−", "down") if change < 0 else ("+", "up")
    return f'{text} <small class="{mark}">{sign}{study.scale.points(change).removesuffix(" points")}</small>'


def _begin(kind: str, caption: str, columns: tuple[str, ...], name: str = "", methods: Sequence[int] = ()) -> Iterator[str]:
    """A table under its caption, in a box that scrolls where the screen is narrow; the last columns may be `methods`."""
    name = name or f"table-{kind.split()[0]}"
    marks = [""] * (len(columns) - len(methods)) + [swatch(index) for index in methods]
    yield f'<div class="card"><p class="caption" id="{name}-caption">{escape(bound(caption))}</p>'
    yield f'<div class="scroll" tabindex="0" role="region" aria-labelledby="{name}-caption">'
    yield f'<table class="{kind}" id="{name}" aria-labelledby="{name}-caption">'
    heads = (_name(bound(column), mark, "col") for mark, column in zip(marks, columns, strict=True))
    yield f"<thead><tr>{''.join(heads)}</tr></thead><tbody>"


def _name(name: str, mark: str = "", scope: str = "row") -> str:
    """The head of a row or column; only a long name may break."""
    kind = ' class="short"' if len(name) <= 14 else ""
    return f'<th scope="{scope}"{kind}>{mark}{escape(name)}</th>'


_END = "</tbody></table></div></div>"


def swatch(index: int) -> str:
    return f'<span class="swatch" style="background:var(--method-{index % len(COLOURS)})"></span>'


def bound(text: str) -> str:
    """Numbers stay with their unit at the end of a line."""
    return text.replace(" %", "\u00a0%").replace(" ± ", "\u00a0±\u00a0")


def _clients(count: int) -> str:
    return "client" if count == 1 else f"{count} clients"


def _plain(value: float) -> str:
    return f"{value:.1f}" if value < 100 else f"{value:,.0f}"


def _lowest(written: list[str]) -> str | None:
    """The lowest of the numbers as written; None if they are all the same, or none is a number."""
    numbers = [text for text in written if text != "–"]
    return min(numbers, key=float) if len(set(written)) > 1 and numbers else None
