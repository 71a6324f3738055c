"""The application that serves a folder: pages, the HTTP API, and live events. It reads run folders and writes nothing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from starlette.exceptions import HTTPException
from starlette.responses import Response

from equipoise.core.version import VERSION
from equipoise.errors import EquipoiseError
from equipoise.serve.answers import refusal
from equipoise.serve.api_routes import add_api
from equipoise.serve.guard import Access, Guard
from equipoise.serve.page_routes import add_pages
from equipoise.serve.refusals import Gone
from equipoise.serve.shown import Shown

PROBLEMS: dict[int | str, dict[str, Any]] = {404: {"description": "There is no such thing, in words."}}
ABOUT = "Runs, families and studies as they are on disk. Everything but /predict is read-only, and that keeps nothing."


def make_app(root: Path, access: Access) -> Guard:
    """The application that serves a folder."""
    shown = Shown(root)
    app = FastAPI(title="Equipoise", version=VERSION, description=ABOUT, docs_url=None, redoc_url=None, responses=PROBLEMS)
    _add_errors(app)
    add_pages(app, shown, access)
    add_api(app, shown)
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
        words = str(failure.detail)
        if failure.status_code == 404:
            words = "There is nothing at this address. The addresses are at /docs."
        return refusal(request.scope, failure.status_code, words)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, failure: Exception) -> Response:
        words = "The server met something that it does not understand in this run's files. Its terminal says what."
        return refusal(request.scope, 500, words)
