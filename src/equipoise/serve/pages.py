"""The HTML pages of the server. All text from outside is escaped; tables are there without JavaScript, too."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from html import escape
from typing import Any
from urllib.parse import quote

from equipoise.core.signature import Signature
from equipoise.core.version import VERSION
from equipoise.export.onnx_files import MODEL, SCORE
from equipoise.report.html import embedded
from equipoise.report.knob import clients_table, knob_section
from equipoise.serve.model_store import ModelVersion, file_address, models_address
from equipoise.serve.pages_text import duration, size_words
from equipoise.serve.static_files import address, static_files

SCRIPTS = {"knob": ("charts.js", "knob.js"), "choose": ("own_data.js", "choose.js"), "live": ("charts.js", "watch.js")}


def document(title: str, body: Iterable[str], *, scripts: Sequence[str] = (), refresh: bool = False) -> str:
    """A page; `refresh` loads it again every ten seconds where there is no JavaScript."""
    again = '<noscript><meta http-equiv="refresh" content="10"></noscript>' if refresh else ""
    loaded = "".join(f'<script src="{address(name)}" defer></script>' for name in dict.fromkeys(scripts))
    return (
        '<!DOCTYPE html><html lang="en"><head><meta charset="utf-8">'
        '<meta name="viewport" content="width=device-width, initial-scale=1">'
        f"<title>{escape(title)} – Equipoise</title>{again}"
        f'<link rel="icon" href="data:,"><link rel="stylesheet" href="{address("style.css")}">{loaded}</head>'
        f'<body><main>{"".join(body)}<footer>Equipoise {VERSION} · <a href="/docs">HTTP API</a></footer></main></body></html>'
    )


def crumbs(*steps: tuple[str, str]) -> str:
    """The way back."""
    links = "".join(f'<a href="{escape(where)}">{escape(name)}</a> › ' for name, where in steps)
    return f'<nav class="crumbs" aria-label="Where you are">{links}</nav>' if steps else ""


def run_address(run: str) -> str:
    """The page of a run."""
    return f"/run/{quote(run, safe='')}"


def badge(status: str) -> str:
    """The state of a run in one word."""
    return f'<span class="badge {escape(status)}">{escape(status)}</span>'


def index_page(name: str, runs: Sequence[Mapping[str, Any]], studies: Mapping[str, Sequence[str]]) -> str:
    """All families, runs and studies."""

    def body() -> Iterator[str]:
        yield f'<p class="eyebrow">Equipoise</p><h1>{escape(name)}</h1>'
        if not runs:
            yield '<p class="plain">There is no run in this folder yet. This page shows runs as they appear.</p>'
        for title, kind in (("Families", "family"), ("Runs", "run")):
            chosen = [run for run in runs if run["kind"] == kind]
            if chosen:
                yield f'<section aria-labelledby="{kind}"><h2 id="{kind}">{title}</h2>{"".join(runs_table(chosen))}</section>'
        if studies:
            yield '<section aria-labelledby="studies"><h2 id="studies">Studies</h2><ul>'
            for study, inside in studies.items():
                yield f'<li><a href="/study/{quote(study, safe="")}">{escape(study)}</a>, {len(inside)} runs</li>'
            yield "</ul></section>"

    return document(name, body(), scripts=("list.js",), refresh=True)


def runs_table(runs: Iterable[Mapping[str, Any]]) -> Iterator[str]:
    """Runs with their state."""
    yield '<div class="card scroll" tabindex="0" role="region" aria-label="Runs"><table class="list"><thead><tr>'
    titles = {"run": "", "state": "", "rounds": "", "time left": "", "data": ' class="text"', "seed": ""}
    yield from (f'<th scope="col"{kind}>{title}</th>' for title, kind in titles.items())
    yield "</tr></thead><tbody>"
    for run in runs:
        knob = ""
        if run["knob"]:
            knob = f" <small>{escape(run['knob'])} {', '.join(f'{v:g}' for v in run['values'][:8])}</small>"
        left = duration(run["seconds_left"]) if run["status"] == "running" else "–"
        yield f'<tr data-run="{escape(run["id"])}"><th scope="row"><a href="{run_address(run["id"])}">{escape(run["name"])}</a>'
        yield f'{knob}</th><td>{badge(run["status"])}</td><td class="rounds">{run["rounds_done"]} of {run["rounds"]}</td>'
        yield f'<td class="left">{left}</td>'
        yield f'<td class="text">{escape(run["data"])}</td><td>{"–" if run["seed"] is None else run["seed"]}</td></tr>'
    yield "</tbody></table></div>"


def header(run: Mapping[str, Any], studies: Sequence[str], root: str) -> Iterator[str]:
    """The head of a run's page: where it is, what it is, how it stands."""
    steps = [(root, "/?all"), *((study, f"/study/{quote(study, safe='')}") for study in studies[:1])]
    yield crumbs(*steps)
    what = f"Family · {run['knob']}" if run["kind"] == "family" else "Run"
    yield f'<header><p class="eyebrow">{escape(what)}</p>'
    yield f'<h1>{escape(run["name"])}<span id="badge">{badge(run["status"])}</span></h1>'
    facts = {"data": run["data"], "model": run["model"], "seed": run["seed"]}
    if run["kind"] == "run" and run["method"]:
        facts["risk"] = run["method"]
    if run["private"]:
        facts["privacy"] = run["privacy"] or "yes"
    listed = "".join(f"<li>{name} <b>{escape(str(value))}</b></li>" for name, value in facts.items() if value not in ("", None))
    yield f'<ul class="facts">{listed}</ul></header>'


def state_section(run: Mapping[str, Any]) -> Iterator[str]:
    """How far a run is; if it stopped, why, and the command that goes on with it."""
    done, total = run["rounds_done"], max(run["rounds"], 1)
    hidden = " hidden" if run["status"] == "finished" else ""
    yield f'<section id="state" aria-label="State"{hidden}><p><label for="progress" id="rounds">{done} of'
    yield f" {run['rounds']} rounds</label>"
    left = ""
    if run["status"] == "running" and run["seconds_left"] is not None:
        left = f"· about {duration(run['seconds_left'])} left"
    yield f' <span id="left">{left}</span></p><progress id="progress" max="{total}" value="{min(done, total)}"></progress>'
    stopped = run["status"] in ("stopped", "waiting")
    why = run["why"] or ("It has not begun." if run["status"] == "waiting" else "")
    yield f'<div id="stopped" class="stopped-note"{"" if stopped else " hidden"}><span id="why">{escape(why)}</span>'
    hidden, verb = "" if run["resume"] else " hidden", "start" if run["status"] == "waiting" else "go on with"
    yield f'<span id="how"{hidden}> To {verb} it:</span>'
    yield f'<pre id="resume"{hidden}>{escape(run["resume"])}</pre></div></section>'


def figures_section(figures: Mapping[str, str]) -> Iterator[str]:
    """The figures of a finished run, by name, as they are written."""
    yield '<section aria-labelledby="figures"><h2 id="figures">How clients fare</h2><div class="tiles">'
    for name, value in figures.items():
        yield f'<div class="tile"><span>{escape(name)}</span><output>{escape(value)}</output></div>'
    yield "</div></section>"


def live_section(update: Mapping[str, Any], run: Mapping[str, Any]) -> Iterator[str]:
    """Curves as they grow; without JavaScript, the newest numbers as a table."""
    yield '<section class="live" aria-labelledby="live"><h2 id="live">Over the rounds</h2>'
    yield '<div class="figures" id="live-figures" hidden>'
    figures = {
        "loss": "Loss of the clients at work",
        "trained": "Clients that trained",
        "error": "Error of all clients at each evaluation",
    }
    if not run["private"]:
        figures["spread"] = "How the error is spread over clients"
    if run["private"]:
        figures["epsilon"] = "Privacy spent"
    for name, title in figures.items():
        yield f'<figure id="figure-{name}" hidden><h3>{title}</h3><ul class="legend" id="legend-{name}"></ul>'
        yield f'<svg id="live-{name}" role="img" aria-label="{title}; the newest numbers are in the table below"></svg>'
        if name == "spread":
            yield '<p class="scrub"><label for="scrub">Evaluation</label> <input type="range" id="scrub" min="0" max="0"'
            yield ' value="0">'
            yield ' <output id="scrub-words" for="scrub"></output></p>'
        yield "</figure>"
    yield '</div><h3>Newest numbers</h3><div class="card scroll" tabindex="0" role="region" aria-label="Newest numbers">'
    yield '<table id="newest"><thead><tr><th scope="col">run</th><th scope="col">round</th><th scope="col">loss</th>'
    yield '<th scope="col">worst tenth</th><th scope="col">clients trained</th><th scope="col">ε</th></tr></thead><tbody>'
    for name, rows in update["curves"].items():
        cells = [*(("–" if value is None else f"{value:.4g}") for value in rows[-1][1:3]), str(rows[-1][3])]
        cells.append("–" if rows[-1][4] is None else f"{rows[-1][4]:.4g}")
        yield f'<tr><th scope="row">{escape(name or run["name"])}</th><td>{rows[-1][0]}</td>'
        yield "".join(f"<td>{cell}</td>" for cell in cells) + "</tr>"
    yield "</tbody></table></div>"
    content = {
        "run": run["id"],
        "name": run["name"],
        "events": f"/api/runs/{quote(run['id'], safe='')}/events",
        "update": update,
    }
    yield f'<script type="application/json" id="run-data">{embedded(content)}</script></section>'


def choose_section(run: str, version: ModelVersion, schema: Mapping[str, Any] | None, url: str) -> Iterator[str]:
    """Where a client tries its own examples, which stay in the browser."""
    manifest = version.manifest
    yield '<section class="choose" aria-labelledby="choose"><h2 id="choose">Which model serves you best?</h2>'
    missing = next(
        (member.no_onnx or "it was saved without it" for member in manifest.members if SCORE not in member.files), None
    )
    command = f'<pre class="command">equipoise choose {escape(url)} my-data.csv</pre>'
    if missing is not None or manifest.signature is None or len(manifest.signature.targets) != 1:
        why = missing or "its examples have several targets, or none that is known"
        yield f'<p class="plain">Own examples cannot be tried with this family: {escape(why)}.</p></section>'
        return
    yield '<p class="plain">Give some labelled examples of your own. They are tried here, in your browser; '
    yield "nothing of them is sent anywhere.</p>"
    yield f'<noscript><p class="plain">This needs JavaScript. Without it, on your own machine:</p>{command}</noscript>'
    by_rows = manifest.signature.plain or schema is not None
    kinds, accepted = ("A CSV or npz file", ".csv,.npz,text/csv") if by_rows else ("An npz file", ".npz")
    kinds, accepted = ("A CSV file", ".csv,text/csv") if schema is not None else (kinds, accepted)
    yield f'<div class="card" id="choose-live" hidden><form id="choose-form"><label for="choose-file">{kinds}</label>'
    yield f'<input type="file" id="choose-file" accept="{accepted}" required> <button type="submit">Try all'
    yield " models</button></form>"
    yield '<p id="choose-status" role="status"></p><p id="choose-problem" role="alert"></p><div id="choose-answer" hidden>'
    yield '<p id="choose-verdict"></p><div class="scroll" tabindex="0" role="region" aria-label="Your losses"><table>'
    yield "<thead><tr>"
    titles = (manifest.knob, "your loss", "95 % interval", "more than the best", "wrong", "")
    yield from (f'<th scope="col">{escape(title)}</th>' if title else '<th scope="col">download</th>' for title in titles)
    yield '</tr></thead><tbody id="choose-rows"></tbody></table></div><p class="note" id="choose-note"></p></div>'
    yield f"<details><summary>What the file must hold</summary><p>{escape(file_form(manifest.signature, schema))}</p></details>"
    yield f"<details><summary>On the command line</summary>{command}</details></div>"
    files = static_files()
    content = {
        "knob": manifest.knob, "signature": manifest.signature.to_table(), "classes": list(manifest.classes), "schema": schema,
        "members": [
            {"value": m.value, "name": m.name, "score": file_address(run, version, m, SCORE),
             "model": file_address(run, version, m, MODEL), "sha256": m.files[SCORE].sha256}
            for m in manifest.members
        ],
        "runtime": {
            "script": files["ort.wasm.min.mjs"].address, "mjs": files["ort-wasm-simd-threaded.mjs"].address,
            "wasm": files["ort-wasm-simd-threaded.wasm"].address,
        },
    }  # fmt: skip
    yield f'<script type="application/json" id="choose-data">{embedded(content)}</script></section>'


def file_form(signature: Signature, schema: Mapping[str, Any] | None) -> str:
    """What a file of own examples must hold, in words."""
    if schema is not None:
        names = [rule["name"] for rule in schema["columns"] if rule["becomes"] != "left out"]
        columns = f"{', '.join(names[:12])}{' …' if len(names) > 12 else ''}"
        return f"CSV: a row for each example, with the columns {columns}, and the target {schema['target']['name']}."
    shapes = ", ".join(f"{spec.name} {spec.batch_shape}" for spec in (*signature.inputs, *signature.targets))
    arrays = f"npz: the arrays {shapes}."
    if not signature.plain:
        return arrays
    count = signature.inputs[0].features
    row = f"CSV: a row for each example: {count} numbers, and the target in the column y, target or label, or else the last. "
    return row + arrays


def models_section(run: str, versions: Sequence[ModelVersion]) -> Iterator[str]:
    """The files of every model, of the latest version first."""
    if not versions:
        return
    yield '<section aria-labelledby="models"><h2 id="models">Models to download</h2>'
    for place, version in enumerate(reversed(versions)):
        yield f"<p>Version <code>{version.name}</code>{' (latest)' if place == 0 else ''}</p>"
        yield '<div class="card scroll" tabindex="0" role="region" aria-label="Files"><table class="list"><thead><tr>'
        yield '<th scope="col">model</th><th scope="col" class="text">files</th></tr></thead><tbody>'
        for member in version.manifest.members:
            links = [
                f'<a href="{file_address(run, version, member, name)}" title="SHA-256 {file.sha256}">{escape(name)}</a>'
                f" <small>{size_words(file.bytes)}</small>"
                for name, file in member.files.items()
            ]
            yield f'<tr><th scope="row">{escape(member.name)}</th><td class="text files">{" · ".join(links)}</td></tr>'
        yield "</tbody></table></div>"
        if why := next((member.no_onnx for member in version.manifest.members if member.no_onnx), None):
            yield f'<p class="note">There is no ONNX: {escape(why.rstrip("."))}.</p>'
    where = models_address(run)
    yield f'<p class="note">Sizes and SHA-256 of all files: <a href="{where}">{escape(where)}</a>.</p></section>'


def run_page(
    run: Mapping[str, Any], update: Mapping[str, Any], *, root: str, url: str, studies: Sequence[str] = (),
    versions: Sequence[ModelVersion] = (), knob: Mapping[str, Any] | None = None, schema: Mapping[str, Any] | None = None,
    links: Mapping[str, str] | None = None, problem: str = "", figures: Mapping[str, str] | None = None,
) -> str:  # fmt: skip
    """The page of a run, or of a family with its knob."""
    scripts: list[str] = [*SCRIPTS["live"]]

    def body() -> Iterator[str]:
        yield from header(run, studies, root)
        yield from state_section(run)
        if problem:
            yield f'<p class="stopped-note">{escape(problem)}</p>'
        if knob is not None:
            yield from knob_section(knob)
            yield from choose_section(run["id"], versions[-1], schema, url)
        if figures is not None:
            yield from figures_section(figures)
        if links:
            yield "<p>" + " · ".join(f'<a href="{escape(where)}">{escape(name)}</a>' for name, where in links.items()) + "</p>"
        yield from live_section(update, run)
        yield from models_section(run["id"], versions)

    if knob is not None:
        scripts += [*SCRIPTS["knob"], *SCRIPTS["choose"]]
    return document(run["name"], body(), scripts=scripts, refresh=run["status"] in ("running", "waiting"))


def clients_page(run: Mapping[str, Any], columns: Mapping[str, Any], *, root: str, percent: bool) -> str:
    """All clients of a run."""

    def body() -> Iterator[str]:
        yield crumbs((root, "/?all"), (run["name"], run_address(run["id"])))
        yield f"<h1>Clients of {escape(run['name'])}</h1>"
        yield from clients_table(columns, percent=percent)

    return document(f"Clients of {run['name']}", body(), scripts=("charts.js", "clients.js"))


def study_page(study: Mapping[str, Any], *, root: str) -> str:
    """A study: its runs, and the figures of those that have ended."""

    def body() -> Iterator[str]:
        yield crumbs((root, "/?all"))
        yield f'<p class="eyebrow">Study</p><h1>{escape(study["id"])}</h1><p id="study-status"'
        yield f' role="status">{study_words(study)}</p>'
        yield '<div class="card scroll" tabindex="0" role="region" aria-label="Runs"><table class="list"><thead><tr>'
        titles = ("method", "seed", f"mean {study['noun']}", "90th percentile", "worst tenth", "state", "rounds")
        yield from (f'<th scope="col">{escape(title)}</th>' for title in titles)
        yield '</tr></thead><tbody id="study-rows">'
        for row in study["runs"]:
            numbers = [row["shown"].get(key, "–") for key in ("mean", "percentile_90", "worst_10")]
            yield f'<tr><th scope="row"><a href="{run_address(row["id"])}">{escape(row["name"])}</a></th>'
            yield f"<td>{'–' if row['seed'] is None else row['seed']}</td>"
            yield "".join(f"<td>{escape(number)}</td>" for number in numbers)
            yield f"<td>{badge(row['status'])}</td><td>{row['rounds_done']} of {row['rounds']}</td></tr>"
        address_of = f"/api/studies/{quote(study['id'], safe='')}"
        yield '</tbody></table></div><script type="application/json"'
        yield f' id="study-data">{embedded({"address": address_of})}</script>'

    return document(str(study["id"]), body(), scripts=("study.js",), refresh=study["ended"] < len(study["runs"]))


def study_words(study: Mapping[str, Any]) -> str:
    """How far a study is."""
    return f"{study['ended']} of {len(study['runs'])} runs have ended."


def login_page(words: str) -> str:
    """Asks for the token."""

    def body() -> Iterator[str]:
        yield '<div class="login plain"><h1>This server asks for its token</h1>'
        yield f"<p>{escape(words)} It was printed where the server was started.</p>"
        yield '<form method="post" action="/login"><label for="token">Token</label> '
        yield '<input type="password" id="token" name="token" autocomplete="current-password" required> <button'
        yield ' class="button">Enter</button>'
        yield "</form></div>"

    return document("Token", body())


def problem_page(status: int, words: str) -> str:
    """What went wrong, in words."""
    title = {404: "Not here", 403: "Not shown", 421: "Another host", 413: "Too large"}.get(status, "That did not work")
    return document(title, [crumbs(("All runs", "/?all")), f'<h1>{title}</h1><p class="plain">{escape(words)}</p>'])


def docs_page(openapi: Mapping[str, Any]) -> str:
    """The operations of the HTTP API."""

    def body() -> Iterator[str]:
        yield crumbs(("All runs", "/?all"))
        yield '<h1>HTTP API</h1><p class="plain">'
        yield f'{escape(openapi["info"]["description"])} The same for programs: <a href="/openapi.json">openapi.json</a>.</p>'
        for path, operations in openapi["paths"].items():
            for method, about in operations.items():
                yield f'<div class="card operation"><code>{method.upper()} {escape(path)}</code>'
                yield f"<p>{escape(about.get('description') or about.get('summary', ''))}</p>"
                given = about.get("parameters", [])
                if given:
                    listed = ", ".join(f"<code>{escape(each['name'])}</code> ({escape(each['in'])})" for each in given)
                    yield f'<p class="note">Parameters: {listed}</p>'
                answers = ", ".join(
                    f"{code} {escape(each.get('description', ''))}" for code, each in about["responses"].items()
                )
                yield f'<p class="note">Answers: {answers}</p></div>'

    return document("HTTP API", body())
