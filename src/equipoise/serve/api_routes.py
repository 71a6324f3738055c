"""The addresses of the HTTP API."""

from __future__ import annotations

import csv
import io
from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import JSONResponse, Response, StreamingResponse

from equipoise.errors import InvalidData
from equipoise.serve.answers import FileStream, in_pieces, tagged
from equipoise.serve.live import MOST_STREAMS, update_of
from equipoise.serve.model_store import LATEST
from equipoise.serve.questions import Question
from equipoise.serve.refusals import Busy, Gone
from equipoise.serve.shown import Shown

KINDS = {".json": "application/json", ".md": "text/markdown; charset=utf-8"}


def add_api(app: FastAPI, shown: Shown) -> None:
    """Add the HTTP API to an application."""
    _add_runs(app, shown)
    _add_models(app, shown)


def _add_runs(app: FastAPI, shown: Shown) -> None:
    library = shown.library

    @app.get("/api/runs")
    def list_runs(request: Request) -> Response:
        """All runs and families, and how each stands."""
        return tagged(request, {"runs": shown.overviews(), "studies": library.studies()})

    @app.get("/api/runs/{run}")
    def one_run(run: str, request: Request) -> Response:
        """One run: what it is, how far it is, why it stopped, and the command that goes on with it."""
        return tagged(request, library.overview(run))

    @app.get("/api/runs/{run}/rounds")
    def rounds(run: str, request: Request) -> Response:
        """Curves over the rounds (at most 2000 points each) and evaluations. A point: round, loss, tail loss, trained, ε."""
        return tagged(request, update_of(library.watched(run), {}, 0))

    @app.get("/api/runs/{run}/events", responses={503: {"description": "Too many streams."}})
    async def events(run: str) -> Response:
        """What is new in a run, as server-sent events "update"; "gone" if its folder is."""
        await run_in_threadpool(library.path, run)
        if shown.streams.open >= MOST_STREAMS:
            raise Busy("Too many pages are open at once.")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(shown.streams.follow(run), media_type="text/event-stream", headers=headers)

    @app.get("/api/runs/{run}/metrics")
    def metrics(run: str, request: Request) -> Response:
        """Figures of the error over the clients that a run is judged on, for each member."""
        return tagged(request, shown.tables.metrics(run))

    @app.get("/api/runs/{run}/clients", responses={403: {"description": "The run protects single clients."}})
    def clients(run: str, request: Request, format: str = "json") -> Response:
        """All clients with their errors, as JSON by column or as CSV. Refused under secure sums and differential privacy."""
        if format not in ("json", "csv"):
            raise InvalidData("format must be json or csv.")
        columns = shown.tables.clients(run)
        return clients_csv(columns) if format == "csv" else tagged(request, columns)

    @app.get("/api/studies/{study}")
    def study(study: str, request: Request) -> Response:
        """A study: its runs, and the figures of those that have ended."""
        return tagged(request, shown.study(study))


def _add_models(app: FastAPI, shown: Shown) -> None:
    models = shown.models

    @app.get("/api/runs/{run}/family")
    def family(run: str, request: Request) -> Response:
        """The knob of a family: for each position the figures, the histogram, and who gains and loses."""
        version = models.version(run, LATEST)
        if version.single:
            raise Gone("This run is no family: it has one model.")
        return tagged(request, shown.tables.knob(run, version) | {"version": version.name})

    @app.get("/api/runs/{run}/schema")
    def schema(run: str) -> Response:
        """How each column is read, if the data are a table."""
        found = models.schema(run, models.version(run, LATEST))
        if found is None:
            raise Gone("The data of this run are no table: there is no schema.")
        return JSONResponse(found)

    @app.get("/api/runs/{run}/models")
    def list_models(run: str, request: Request) -> Response:
        """The versions of a run's models, with the size, SHA-256 and address of every file."""
        return tagged(request, models.listing(run))

    @app.get("/api/runs/{run}/models/{model}/{version}/{file}", responses={304: {"description": "The asker has it."}})
    def model(run: str, model: str, version: str, file: str, request: Request) -> Response:
        """A file of a model. A version never changes; "latest" is the newest. The ETag is the SHA-256 of the content."""
        return model_file(shown, run, model, version, file, request.headers.get("if-none-match", ""))

    answers: dict[int | str, dict[str, Any]] = {413: {"description": "Too large."}, 503: {"description": "Too many at once."}}

    @app.post("/predict", responses=answers)
    def ask(question: Question) -> Response:
        """The outputs of a model for a few examples, at most 256. Nothing of them is kept."""
        return JSONResponse(shown.respondent.answer(question))


def model_file(shown: Shown, run: str, model: str, version: str, file: str, known: str) -> Response:
    """A file of a model, with its checksum as ETag; 304 if `known`, the ETags that the asker has, name it."""
    chosen = shown.models.version(run, version)
    member = chosen.member(model)
    opened, stored = shown.models.open(run, chosen, member, file)
    tag = f'"{stored.sha256}"'
    headers = {
        "etag": tag, "x-checksum-sha256": stored.sha256, "x-model-version": chosen.name,
        "cache-control": "no-cache" if version == LATEST else "private, max-age=31536000, immutable",
        "content-disposition": f'attachment; filename="{member.folder}-{file}"',
    }  # fmt: skip
    if tag in known or known.strip() == "*":
        opened.close()
        return Response(status_code=304, headers=headers)
    kind = KINDS.get(Path(file).suffix, "application/octet-stream")
    return FileStream(opened, media_type=kind, headers=headers | {"content-length": str(stored.bytes)})


def clients_csv(columns: dict[str, Any]) -> Response:
    """All clients as CSV."""
    text = io.StringIO()
    writer = csv.writer(text)
    writer.writerow(columns)
    writer.writerows(zip(*columns.values(), strict=True))
    disposition = {"content-disposition": 'attachment; filename="clients.csv"'}
    return in_pieces(text.getvalue().encode("utf-8", "replace"), media_type="text/csv; charset=utf-8", headers=disposition)
