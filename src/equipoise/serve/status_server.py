"""The status of a federated run as a page, as JSON and as metrics, behind the guard of all servers."""

from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

from starlette.responses import PlainTextResponse, Response

from equipoise.engines.flower.operate.run_view import RunView
from equipoise.errors import ConfigError
from equipoise.serve.guard import Access, Guard, Receive, Scope, Send

HEADERS = {  # the page brings its own style
    "cache-control": "no-store",
    "content-security-policy": "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; frame-ancestors 'none'",
}


def status_app(view: RunView, access: Access) -> Guard:
    """An application with the page (/), the status (/status.json) and the metrics (/metrics) of a run.

    Single clients of a run under privacy are not on it, whoever asks.
    """
    view = RunView(view.folder, for_others=True)
    answers: dict[str, tuple[str, Callable[[], str]]] = {
        "/": ("text/html", view.page),
        "/metrics": ("text/plain; version=0.0.4", view.metrics),
        "/status.json": ("application/json", lambda: json.dumps(view.read())),
    }

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        kind, make = answers.get(scope["path"], ("", str))
        try:
            body = make().encode("utf-8", "replace")
            answer = Response(body, media_type=kind, headers=HEADERS) if kind else refused(scope, 404, "Nothing is here.")
        except ConfigError as failure:
            answer = refused(scope, 503, str(failure))
        await answer(scope, receive, send)

    return Guard(app, access=access, refuse=refused)


def refused(_: Any, status: int, words: str) -> Response:
    """The answer to a request that is refused, or cannot be answered now."""
    return PlainTextResponse(words.encode("utf-8", "replace"), status)
