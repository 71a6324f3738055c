"""The addresses of pages."""

from __future__ import annotations

import gzip
from contextlib import suppress
from typing import Any
from urllib.parse import parse_qsl

from fastapi import FastAPI, Request
from starlette.responses import HTMLResponse, RedirectResponse, Response

from equipoise.serve import pages
from equipoise.serve.answers import FileStream, in_pieces, page
from equipoise.serve.guard import COOKIE, Access
from equipoise.serve.live import update_of
from equipoise.serve.refusals import Gone, Withheld
from equipoise.serve.safe_files import open_below
from equipoise.serve.shown import Shown
from equipoise.serve.static_files import static_files

REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)


def add_pages(app: FastAPI, shown: Shown, access: Access) -> None:
    """Add the pages to an application."""
    hidden: Any = {"include_in_schema": False}
    library = shown.library

    @app.get("/", **hidden)
    def index(request: Request) -> Response:
        runs = shown.overviews()
        if len(runs) == 1 and "all" not in request.query_params:
            return RedirectResponse(pages.run_address(runs[0]["id"]), status_code=307)
        return page(pages.index_page(library.title, runs, library.studies()))

    @app.get("/run/{run}", **hidden)
    def one_run(run: str, request: Request) -> Response:
        return page(run_page(shown, run, f"{request.url.scheme}://{request.url.netloc}{pages.run_address(run)}"))

    @app.get("/run/{run}/clients", **hidden)
    def clients(run: str) -> Response:
        columns = shown.tables.clients(run)
        values = [v for name, column in columns.items() if name.startswith("error") for v in column if v is not None]
        percent = not shown.tables.error_is_loss(run) and all(0 <= value <= 1 for value in values)
        return page(pages.clients_page(library.overview(run), columns, root=library.title, percent=percent))

    @app.get("/run/{run}/report", **hidden)
    def report(run: str) -> Response:
        return report_file(shown, run)

    @app.get("/study/{study}", **hidden)
    def study(study: str) -> Response:
        return page(pages.study_page(shown.study(study), root=library.title))

    @app.get("/docs", **hidden)
    def docs() -> Response:
        return page(pages.docs_page(app.openapi()))

    @app.post("/login", **hidden)
    async def login(request: Request) -> Response:
        given = dict(parse_qsl((await request.body()).decode("latin-1")))
        if not access.is_token(given.get("token", "").encode()):
            return HTMLResponse(pages.login_page("That is not the token."), status_code=401)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(COOKIE, access.cookie, httponly=True, samesite="strict", secure=access.secure)
        return answer

    @app.get("/static/{digest}/{name}", **hidden)
    def static(digest: str, name: str, request: Request) -> Response:
        file = static_files().get(name)
        if file is None or file.digest != digest:
            raise Gone("There is no such file.")
        headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return in_pieces(file.packed, media_type=file.kind, headers=headers | {"content-encoding": "gzip"})
        return in_pieces(gzip.decompress(file.packed), media_type=file.kind, headers=headers)


def run_page(shown: Shown, run: str, url: str) -> str:
    """The page of a run, or of a family with its knob."""
    library = shown.library
    watched, about = library.watched(run), library.overview(run)
    versions = shown.models.versions(run)
    knob, problem = None, ""
    if versions and not versions[-1].single:
        try:
            knob = shown.tables.knob(run, versions[-1])
        except Gone as failure:
            problem = str(failure)
    links, figures = {}, None
    if about["status"] == "finished" and knob is None:
        with suppress(Gone):
            figures = shown.figures(run)
    if about["status"] == "finished" and not about["private"]:
        links = {"All clients": f"{pages.run_address(run)}/clients", "Full report": f"{pages.run_address(run)}/report"}
    return pages.run_page(
        about, update_of(watched, {}, 0), root=library.title, url=url, versions=versions, knob=knob,
        studies=[study for study, runs in library.studies().items() if run in runs],
        schema=shown.models.schema(run, versions[-1]) if versions else None, links=links, problem=problem,
        figures=figures,
    )  # fmt: skip


def report_file(shown: Shown, run: str) -> Response:
    """The report of a finished run, in a sandbox: it may be anybody's file."""
    if shown.library.overview(run)["private"]:
        raise Withheld("This run protects single clients, and its report has a point for each, so the server does not show it.")
    try:
        file = open_below(shown.library.path(run), ["report.html"])
    except OSError as failure:
        raise Gone("This run has no report.") from failure
    return FileStream(file, media_type="text/html; charset=utf-8", headers={"content-security-policy": REPORT_POLICY})
