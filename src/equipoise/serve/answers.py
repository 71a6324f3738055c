"""Answers of the server: bodies in pieces, JSON with an ETag, and refusals, as a page for people and as JSON for programs."""

from __future__ import annotations

import hashlib
import io
import json
from typing import Any, BinaryIO

from fastapi import Request
from starlette.concurrency import run_in_threadpool
from starlette.responses import HTMLResponse, JSONResponse, Response

from equipoise.serve import pages
from equipoise.serve.guard import Receive, Scope, Send

PIECE = 64 * 1024  # bytes that are sent at once: what a slow reader can hold in memory


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


def in_pieces(body: bytes, *, media_type: str, headers: dict[str, str]) -> Response:
    """A body; if it is large, in pieces, so that a slow reader holds one of them and not all."""
    if len(body) <= PIECE:
        return Response(body, media_type=media_type, headers=headers)
    return FileStream(io.BytesIO(body), media_type=media_type, headers=headers | {"content-length": str(len(body))})


def tagged(request: Request, content: Any) -> Response:
    """JSON with an ETag; 304 if the asker has it."""
    body = json.dumps(content, ensure_ascii=False, allow_nan=False).encode("utf-8", "replace")
    tag = f'"{hashlib.sha256(body).hexdigest()[:32]}"'
    headers = {"etag": tag, "cache-control": "no-cache"}
    if tag in request.headers.get("if-none-match", ""):
        return Response(status_code=304, headers=headers)
    return in_pieces(body, media_type="application/json", headers=headers)


def page(text: str) -> Response:
    """A page as the answer."""
    return in_pieces(text.encode("utf-8", "replace"), media_type="text/html; charset=utf-8", headers={})


def wants_page(scope: Scope) -> bool:
    """Whether a person asks, with a browser, and not a program."""
    accept = next((value for name, value in scope["headers"] if name == b"accept"), b"")
    return b"text/html" in accept and not scope["path"].startswith("/api/")


def refusal(scope: Scope, status: int, words: str) -> Response:
    """The answer to a request that is refused: a page for a person, JSON for a program."""
    headers = {"www-authenticate": "Bearer"} if status == 401 else {"retry-after": "5"} if status == 503 else None
    if wants_page(scope):
        text = pages.login_page(words) if status == 401 else pages.problem_page(status, words)
        return HTMLResponse(text.encode("utf-8", "replace"), status_code=status, headers=headers)
    return JSONResponse({"error": words.encode("utf-8", "replace").decode()}, status_code=status, headers=headers)
