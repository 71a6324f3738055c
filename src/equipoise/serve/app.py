"""The server: pages, the HTTP API, and live events. It reads run folders and writes nothing."""

from __future__ import annotations

import csv
import gzip
import hashlib
import io
import json
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO
from urllib.parse import parse_qsl, quote

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel, ConfigDict, Field
from starlette.concurrency import run_in_threadpool
from starlette.exceptions import HTTPException
from starlette.responses import HTMLResponse, JSONResponse, RedirectResponse, Response, StreamingResponse

from equipoise.core.version import VERSION
from equipoise.data.schema import Schema
from equipoise.errors import EquipoiseError, InvalidData
from equipoise.export.model_card import figures
from equipoise.export.onnx_files import MODEL
from equipoise.export.onnx_runs import OnnxModel
from equipoise.report.interactive.knob_section import shown
from equipoise.serve import pages
from equipoise.serve.guard import COOKIE, Access, Guard, Receive, Scope, Send
from equipoise.serve.library import LATEST, Cached, Gone, Library, ModelVersion, Withheld
from equipoise.serve.live import MOST_STREAMS, Streams, update_of
from equipoise.serve.predictions import MOST_ROWS, input_arrays, predict
from equipoise.serve.safe_files import open_below
from equipoise.serve.static_files import static_files

PIECE = 64 * 1024
KINDS = {".json": "application/json", ".md": "text/markdown; charset=utf-8"}
REPORT_POLICY = (
    "sandbox allow-scripts allow-downloads; default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; "
    "img-src data: blob:"
)
PROBLEMS: dict[int | str, dict[str, Any]] = {404: {"description": "There is no such thing, in words."}}


class Question(BaseModel):
    """The body of a prediction: which model, and inputs, or rows of a table for a model on one."""

    model_config = ConfigDict(extra="forbid")
    run: str | None = Field(None, description="The id of a run; not needed if there is one alone.", max_length=500)
    model: str = Field(
        "model", description='A value of the knob, such as "0.5"; "model" for a run that is no family.', max_length=100
    )
    version: str = Field(LATEST, max_length=64)
    inputs: Any = Field(None, description=f"Up to {MOST_ROWS} examples, or a list of them for each input by name.")
    rows: list[dict[str, Any]] | None = Field(None, description="Rows of a table, by column.", max_length=MOST_ROWS)


class Server:
    """The state of a server: its library, its streams, and models that have been asked."""

    def __init__(self, root: Path, access: Access) -> None:
        self.library, self.access = Library(root), access
        self.streams = Streams(self.library)
        self.sessions, self.figures = Cached(8), Cached(256)
        self.asking = threading.Semaphore(2)  # predictions at once

    # ----------------------------------------------------------------------------------------------------------------- pages

    def index(self, everything: bool) -> Response:
        """The list, or the only family there is."""
        library = self.library
        runs = [about for run in library.ids() if (about := self.overview(run)) is not None]
        if len(runs) == 1 and not everything:
            return RedirectResponse(pages.run_address(runs[0]["id"]), status_code=307)
        return HTMLResponse(pages.index_page(library.root.name, runs, library.studies()))

    def overview(self, run: str) -> dict[str, Any] | None:
        """A run in a few fields; None if it has gone meanwhile."""
        with suppress(Gone):
            return self.library.overview(run)
        return None

    def run(self, run: str, url: str) -> Response:
        """The page of a run."""
        library = self.library
        watched, about = library.watched(run), library.overview(run)
        versions = library.versions(run)
        knob, schema, problem = None, None, ""
        if versions and not versions[-1].single:
            schema = self._schema(run, versions[-1])
            try:
                knob = library.knob(run, versions[-1])
            except Gone as failure:
                problem = str(failure)
        links = {}
        if about["status"] == "finished" and not about["private"]:
            links = {"All clients": f"{pages.run_address(run)}/clients", "Full report": f"{pages.run_address(run)}/report"}
        inside = [study for study, runs in library.studies().items() if run in runs]
        return HTMLResponse(
            pages.run_page(
                about, update_of(watched, {}, 0), root=library.root.name, url=url, studies=inside, versions=versions, knob=knob,
                schema=schema, links=links, problem=problem,
            )
        )  # fmt: skip

    def _schema(self, run: str, version: ModelVersion) -> dict[str, Any] | None:
        try:
            with open_below(self.library.path(run), [*version.folder, "schema.json"]) as file:
                text = file.read(16 * 2**20).decode()
            Schema.from_json(text)
            read: dict[str, Any] = json.loads(text)
            return read
        except (OSError, ValueError):
            return None

    def clients_page(self, run: str) -> Response:
        """The page of all clients."""
        about, columns = self.library.overview(run), self.library.clients(run)
        values = [v for name, column in columns.items() if name.startswith("error") for v in column if v is not None]
        percent = not self._error_is_loss(run) and all(0 <= value <= 1 for value in values)
        return HTMLResponse(pages.clients_page(about, columns, root=self.library.root.name, percent=percent))

    def _error_is_loss(self, run: str) -> bool:
        end = self.library.watched(run).log.end or {}
        return bool(end.get("error_is_loss"))

    def report(self, run: str) -> Response:
        """The report of a finished run, in a sandbox: it may be anybody's file."""
        if self.library.overview(run)["private"]:
            raise Withheld("This run protects single clients, and its report may name some, so the server does not show it.")
        try:
            file = open_below(self.library.path(run), ["report.html"])
        except OSError as failure:
            raise Gone("This run has no report.") from failure
        headers = {"content-security-policy": REPORT_POLICY}
        return FileStream(file, media_type="text/html; charset=utf-8", headers=headers)

    def study(self, study: str) -> dict[str, Any]:
        """A study: its runs and the figures of those that have ended."""
        inside = self.library.studies().get(study)
        if inside is None:
            raise Gone(f"There is no study {study[:100]!r} here.")
        runs, loss = [], False
        for run in inside:
            about = self.overview(run)
            if about is None:
                continue
            keys = ("id", "name", "seed", "status", "rounds_done", "rounds")
            row: dict[str, Any] = {key: about[key] for key in keys} | {"figures": None, "shown": {}}
            if about["status"] == "finished":
                with suppress(Gone):
                    row["figures"] = self.metrics(run)["members"][0]["error"]
                    percent = not self._error_is_loss(run)
                    loss = loss or not percent
                    row["shown"] = {key: shown(value, percent) for key, value in row["figures"].items() if key != "clients"}
            runs.append(row)
        ended = sum(row["status"] == "finished" for row in runs)
        return {"id": study, "noun": "loss" if loss else "error", "ended": ended, "runs": runs}

    # ------------------------------------------------------------------------------------------------------------------- API

    def metrics(self, run: str) -> dict[str, Any]:
        """The figures of a run over its clients, for each member."""
        library = self.library
        versions = library.versions(run)
        version = versions[-1] if versions else None
        mark = version.name if version is not None else None
        return (
            library._knobs.get((run, "metrics"), mark, lambda: self._metrics(run, version))
            if mark
            else self._metrics(run, None)
        )

    def _metrics(self, run: str, version: ModelVersion | None) -> dict[str, Any]:
        members = self.library.tables(run, version)
        split = next(name for name in ("test", "validation", "train") if name in members[0].clients.split)
        return {
            "run": run, "judged_on": split, "not_covered_by_epsilon": self.library.watched(run).about.private,
            "members": [
                {"name": member.name, "value": None if version is None or version.single else member.value,
                 "error": figures(member.clients.where(split))}
                for member in members
            ],
        }  # fmt: skip

    def models(self, run: str) -> dict[str, Any]:
        """The versions of a run's models and their files."""
        here = f"/api/runs/{quote(run, safe='')}/models"
        found = self.library.versions(run)
        if not found:
            self.library.version(run, LATEST)  # says why
        manifest = found[-1].manifest
        return {
            "run": run, "latest": found[-1].name, "knob": None if found[-1].single else manifest.knob,
            "signature": None if manifest.signature is None else manifest.signature.to_table(),
            "classes": list(manifest.classes), "judged_on": manifest.judged_on, "error_is_loss": manifest.error_is_loss,
            "schema": not found[-1].single and self._schema(run, found[-1]) is not None,
            "versions": [
                {"version": version.name, "models": [
                    {"model": member.folder or "model", "name": member.name, "value": None if version.single else member.value,
                     "no_onnx": member.no_onnx,
                     "files": {
                         name: {"bytes": file.bytes, "sha256": file.sha256,
                                "url": f"{here}/{quote(member.folder or 'model')}/{version.name}/{quote(name)}"}
                         for name, file in member.files.items()
                     }}
                    for member in version.manifest.members
                ]}
                for version in found
            ],
        }  # fmt: skip

    def model_file(self, run: str, model: str, version: str, file: str, known: str) -> Response:
        """A file of a model, with its checksum as ETag."""
        chosen = self.library.version(run, version)
        member = self.library.member(chosen, model)
        opened, stored = self.library.open_model(run, chosen, member, file)
        tag = f'"{stored.sha256}"'
        headers = {
            "etag": tag, "x-checksum-sha256": stored.sha256, "x-model-version": chosen.name,
            "cache-control": "no-cache" if version == LATEST else "private, max-age=31536000, immutable",
            "content-disposition": f'attachment; filename="{(member.folder or "model").replace(chr(34), "")}-{file}"',
        }  # fmt: skip
        if tag in known or known.strip() == "*":
            opened.close()
            return Response(status_code=304, headers=headers)
        kind = KINDS.get(Path(file).suffix, "application/octet-stream")
        return FileStream(opened, media_type=kind, headers=headers | {"content-length": str(stored.bytes)})

    def schema_file(self, run: str) -> Response:
        """The schema of a table."""
        versions = self.library.versions(run)
        schema = self._schema(run, versions[-1]) if versions else None
        if schema is None:
            raise Gone("The data of this run are no table: there is no schema.")
        return JSONResponse(schema)

    def clients_csv(self, run: str) -> Response:
        """All clients as CSV."""
        columns = self.library.clients(run)
        text = io.StringIO()
        writer = csv.writer(text)
        writer.writerow(columns)
        writer.writerows(zip(*columns.values(), strict=True))
        disposition = {"content-disposition": 'attachment; filename="clients.csv"'}
        return Response(text.getvalue().encode(), media_type="text/csv; charset=utf-8", headers=disposition)

    def answer(self, question: Question) -> dict[str, Any]:
        """A prediction."""
        run = question.run or self._only_run()
        version = self.library.version(run, question.version)
        only = "model" if version.single else question.model
        member = self.library.member(version, only)
        signature = version.manifest.signature
        if signature is None:
            raise Gone("The inputs of this model are not known: it was saved without ONNX.")
        given = question.inputs
        if question.rows is not None:
            given = self._transformed(run, version, question.rows)
        if given is None:
            raise InvalidData("inputs are missing: give a list of examples.")
        arrays = input_arrays(signature, given)
        opened, stored = self.library.open_model(run, version, member, MODEL)
        with opened:
            content = opened.read()
        model = self.sessions.get(stored.sha256, None, lambda: OnnxModel(content, source=MODEL))
        if not self.asking.acquire(timeout=5):
            raise Busy("Too many predictions are asked for at once. Ask again in a moment.")
        try:
            outputs = predict(model, arrays)
        finally:
            self.asking.release()
        about = {"run": run, "model": member.folder or "model", "version": version.name}
        return about | {"outputs": outputs[0] if len(outputs) == 1 else outputs, "classes": list(version.manifest.classes)}

    def _only_run(self) -> str:
        runs = [run for run in self.library.ids() if self.library.versions(run)]
        if len(runs) != 1:
            raise InvalidData(f"run is missing: there are {len(runs)} runs with models here. Name one of /api/runs.")
        return runs[0]

    def _transformed(self, run: str, version: ModelVersion, rows: list[dict[str, Any]]) -> Any:
        import pyarrow as pa

        stored = self._schema(run, version)
        if stored is None:
            raise InvalidData("rows are for models on a table; this model takes inputs.")
        try:
            table = pa.Table.from_pylist(rows)
        except (pa.ArrowException, TypeError, ValueError) as failure:
            raise InvalidData(f"rows cannot be read as a table: {failure}.") from failure
        tree = Schema.from_json(json.dumps(stored)).transform(table, "rows")
        return {name: values.tolist() for name, values in tree.items()} if isinstance(tree, dict) else tree.tolist()


class Busy(Gone):
    """More was asked at once than the server does."""

    status = 503


class FileStream(Response):
    """A file in pieces; it is closed at the end, also if the reader leaves before."""

    def __init__(self, file: BinaryIO, *, media_type: str, headers: dict[str, str]) -> None:
        super().__init__(media_type=media_type, headers=headers)
        self._file = file
        if "content-length" not in headers:
            del self.headers["content-length"]  # that of an empty body

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send it."""
        try:
            await send({"type": "http.response.start", "status": self.status_code, "headers": self.raw_headers})
            while scope["method"] != "HEAD" and (piece := await run_in_threadpool(self._file.read, PIECE)):
                await send({"type": "http.response.body", "body": piece, "more_body": True})
            await send({"type": "http.response.body", "body": b"", "more_body": False})
        finally:
            self._file.close()


def wants_page(scope: Scope) -> bool:
    """Whether a person asks, with a browser, and not a program."""
    accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    return b"text/html" in accept and not scope["path"].startswith("/api/")


def refusal(scope: Scope, status: int, words: str) -> Response:
    """The answer to a request that is refused: a page for a person, JSON for a program."""
    headers = {"www-authenticate": "Bearer"} if status == 401 else {"retry-after": "5"} if status == 503 else None
    if wants_page(scope):
        page = pages.login_page(words) if status == 401 else pages.problem_page(status, words)
        return HTMLResponse(page, status_code=status, headers=headers)
    return JSONResponse({"error": words}, status_code=status, headers=headers)


def tagged(request: Request, content: Any) -> Response:
    """JSON with an ETag; 304 if the asker has it."""
    body = json.dumps(content, ensure_ascii=False, allow_nan=False).encode()
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return Response(body, media_type="application/json", headers=headers)


def make_app(root: Path, access: Access) -> Guard:
    """The application that serves a folder."""
    server = Server(root, access)
    about = "Runs, families and studies as they are on disk. Everything but /predict is read-only, and that keeps nothing."
    app = FastAPI(title="Equipoise", version=VERSION, description=about, docs_url=None, redoc_url=None, responses=PROBLEMS)
    _add_errors(app)
    _add_pages(app, server)
    _add_api(app, server)
    return Guard(app, access=access, refuse=refusal)


def _add_errors(app: FastAPI) -> None:
    @app.exception_handler(EquipoiseError)
    async def known(request: Request, failure: EquipoiseError) -> Response:
        return refusal(request.scope, failure.status if isinstance(failure, Gone) else 422, str(failure))

    @app.exception_handler(RequestValidationError)
    async def malformed(request: Request, failure: RequestValidationError) -> Response:
        first = failure.errors()[0]
        where = ".".join(str(step) for step in first["loc"])
        return refusal(request.scope, 422, f"{where}: {first['msg']}.")

    @app.exception_handler(HTTPException)
    async def unknown(request: Request, failure: HTTPException) -> Response:
        words = (
            "There is nothing at this address. The addresses are at /docs."
            if failure.status_code == 404
            else str(failure.detail)
        )
        return refusal(request.scope, failure.status_code, words)


def _add_pages(app: FastAPI, server: Server) -> None:
    hidden: Any = {"include_in_schema": False}

    @app.get("/", **hidden)
    def index(request: Request) -> Response:
        return server.index("all" in request.query_params)

    @app.get("/run/{run}", **hidden)
    def run_page(run: str, request: Request) -> Response:
        return server.run(run, f"{request.url.scheme}://{request.url.netloc}{pages.run_address(run)}")

    @app.get("/run/{run}/clients", **hidden)
    def clients_page(run: str) -> Response:
        return server.clients_page(run)

    @app.get("/run/{run}/report", **hidden)
    def report(run: str) -> Response:
        return server.report(run)

    @app.get("/study/{study}", **hidden)
    def study_page(study: str) -> Response:
        return HTMLResponse(pages.study_page(server.study(study), root=server.library.root.name))

    @app.get("/docs", **hidden)
    def docs() -> Response:
        return HTMLResponse(pages.docs_page(app.openapi()))

    @app.post("/login", **hidden)
    async def login(request: Request) -> Response:
        given = dict(parse_qsl((await request.body()).decode("latin-1")))
        if not server.access.is_token(given.get("token", "").encode()):
            return HTMLResponse(pages.login_page("That is not the token."), status_code=401)
        answer = RedirectResponse("/", status_code=303)
        answer.set_cookie(COOKIE, server.access.cookie, httponly=True, samesite="strict", secure=server.access.secure)
        return answer

    @app.get("/static/{digest}/{name}", **hidden)
    def static(digest: str, name: str, request: Request) -> Response:
        file = static_files().get(name)
        if file is None or file.digest != digest:
            raise Gone("There is no such file.")
        headers = {"cache-control": "public, max-age=31536000, immutable", "vary": "accept-encoding"}
        if "gzip" in request.headers.get("accept-encoding", ""):
            return Response(file.packed, media_type=file.kind, headers=headers | {"content-encoding": "gzip"})
        return Response(gzip.decompress(file.packed), media_type=file.kind, headers=headers)


def _add_api(app: FastAPI, server: Server) -> None:
    library = server.library

    @app.get("/api/runs")
    def list_runs(request: Request) -> Response:
        """All runs and families, and how each stands."""
        found = [about for run in library.ids() if (about := server.overview(run)) is not None]
        return tagged(request, {"runs": found, "studies": library.studies()})

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
        if server.streams.open >= MOST_STREAMS:
            raise Busy("Too many pages are open at once.")
        headers = {"cache-control": "no-store", "x-accel-buffering": "no"}
        return StreamingResponse(server.streams.follow(run), media_type="text/event-stream", headers=headers)

    @app.get("/api/runs/{run}/metrics")
    def metrics(run: str, request: Request) -> Response:
        """Figures of the error over the clients that a run is judged on, for each member."""
        return tagged(request, server.metrics(run))

    @app.get("/api/runs/{run}/family")
    def family(run: str, request: Request) -> Response:
        """The knob of a family: for each position the figures, the histogram, and who gains and loses."""
        version = library.version(run, LATEST)
        if version.single:
            raise Gone("This run is no family: it has one model.")
        return tagged(request, library.knob(run, version) | {"version": version.name})

    @app.get("/api/runs/{run}/clients", responses={403: {"description": "The run protects single clients."}})
    def clients(run: str, request: Request, format: str = "json") -> Response:
        """All clients with their errors, as JSON by column or as CSV. Refused under secure sums and differential privacy."""
        if format not in ("json", "csv"):
            raise InvalidData("format must be json or csv.")
        return server.clients_csv(run) if format == "csv" else tagged(request, library.clients(run))

    @app.get("/api/runs/{run}/schema")
    def schema(run: str) -> Response:
        """What became of each column, if the data are a table."""
        return server.schema_file(run)

    @app.get("/api/runs/{run}/models")
    def models(run: str, request: Request) -> Response:
        """The versions of a run's models, with the size, SHA-256 and address of every file."""
        return tagged(request, server.models(run))

    @app.get("/api/runs/{run}/models/{model}/{version}/{file}", responses={304: {"description": "The asker has it."}})
    def model_file(run: str, model: str, version: str, file: str, request: Request) -> Response:
        """A file of a model. A version never changes; "latest" is the newest. The ETag is the SHA-256 of the content."""
        return server.model_file(run, model, version, file, request.headers.get("if-none-match", ""))

    @app.get("/api/studies/{study}")
    def study(study: str, request: Request) -> Response:
        """A study: its runs, and the figures of those that have ended."""
        return tagged(request, server.study(study))

    answers: dict[int | str, dict[str, Any]] = {413: {"description": "Too large."}, 503: {"description": "Too many at once."}}

    @app.post("/predict", responses=answers)
    def ask(question: Question) -> Response:
        """The outputs of a model for a few examples, at most 256. Nothing of them is kept."""
        return JSONResponse(server.answer(question))
