"""Stands before the server: who may ask (Host, Origin, token), how much and how long; adds the headers of every answer."""

from __future__ import annotations

import asyncio
import hashlib
import hmac
import time
from collections.abc import Awaitable, Callable, MutableMapping
from dataclasses import dataclass
from http.cookies import CookieError, SimpleCookie
from ipaddress import ip_address
from typing import Any
from urllib.parse import parse_qsl, quote, urlencode, urlsplit

from starlette.exceptions import HTTPException

Scope = MutableMapping[str, Any]
Receive = Callable[[], Awaitable[MutableMapping[str, Any]]]
Send = Callable[[MutableMapping[str, Any]], Awaitable[None]]

COOKIE = "equipoise"
LARGEST_BODY = 2**20  # bytes of a request
TOO_LARGE = f"The request is larger than {LARGEST_BODY // 2**20} MB. Send less at once."
BODY_SECONDS = 30.0  # in which the body of a request must arrive, whole
TOO_SLOW = f"The request did not arrive within {BODY_SECONDS:.0f} seconds."

POLICY = (
    "default-src 'none'; script-src 'self' 'wasm-unsafe-eval'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "form-action 'self'; base-uri 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "content-security-policy": POLICY,
    "x-content-type-options": "nosniff",
    "referrer-policy": "no-referrer",
    "cross-origin-opener-policy": "same-origin",
    "cross-origin-resource-policy": "same-origin",
    "x-frame-options": "DENY",
}


@dataclass(frozen=True)
class Access:
    """Who may ask: requests to these hosts, and, if there is a token, with it."""

    hosts: frozenset[str]
    token: str | None = None
    secure: bool = False  # TLS: cookies are marked for it

    @property
    def cookie(self) -> str:
        """What a browser keeps after the token was given once; the token cannot be read from it."""
        return hmac.new((self.token or "").encode(), b"equipoise cookie", hashlib.sha256).hexdigest()

    def admits(self, host: str) -> bool:
        """Whether a request may be for this host: a name that an attacker made point here (DNS rebinding) is none of ours."""
        return host_name(host) in self.hosts

    def knows(self, headers: dict[bytes, bytes]) -> bool:
        """Whether a request has the token, in its Authorization header or as a cookie; compared in constant time."""
        if self.token is None:
            return True
        scheme, _, given = headers.get(b"authorization", b"").partition(b" ")
        if scheme.lower() == b"bearer" and self.is_token(given.strip()):
            return True
        try:
            cookie = SimpleCookie(headers.get(b"cookie", b"").decode("latin-1")).get(COOKIE)
        except CookieError:
            return False
        return cookie is not None and same(cookie.value.encode(), self.cookie.encode())

    def is_token(self, given: bytes) -> bool:
        """Whether this is the token, in a time that does not depend on where they differ."""
        return self.token is not None and same(given, self.token.encode())


def same(one: bytes, other: bytes) -> bool:
    """Whether two secrets are equal; their hashes are compared, so that the time tells neither a length nor a first letter."""
    return hmac.compare_digest(hashlib.sha256(one).digest(), hashlib.sha256(other).digest())


def host_name(host: str) -> str:
    """The name in a Host header, without its port.

    >>> host_name("LOCALHOST:80"), host_name("[::1]:80"), host_name("a b:80")
    ('localhost', '::1', '')
    """
    try:
        parts = urlsplit(f"//{host}")
        clean = not parts.path and not parts.query and not parts.fragment and "@" not in host and " " not in host
        return (parts.hostname or "") if clean and (parts.port is None or parts.port >= 0) else ""
    except ValueError:
        return ""


def is_loopback(host: str) -> bool:
    """Whether a host to bind to is this machine alone."""
    try:
        return host == "localhost" or ip_address(host).is_loopback
    except ValueError:
        return False


class Guard:
    """An ASGI application before another. `refuse` makes the answer to a refused request from its status and words."""

    def __init__(self, app: Any, *, access: Access, refuse: Callable[[Scope, int, str], Any]) -> None:
        self.app, self.access, self.refuse = app, access, refuse

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Refuse, or hand on with limits."""
        if scope["type"] != "http":
            if scope["type"] == "lifespan":
                await self.app(scope, receive, send)
            return
        guarded = self._sender(scope, send)
        refusal = self._refusal(scope)
        if refusal is not None:
            await refusal(scope, receive, guarded)
            return
        await self.app(scope, _limited(receive), guarded)

    def _refusal(self, scope: Scope) -> Any:
        headers = dict(scope["headers"])
        hosts = [value.decode("latin-1") for name, value in scope["headers"] if name == b"host"]
        host = hosts[0] if len(hosts) == 1 else ""
        if not self.access.admits(host):
            words = f"This server does not answer for the host {host[:100]!r}. If it should, start it with --allow-host NAME."
            return self.refuse(scope, 421, words)
        origin = headers.get(b"origin")
        if origin is not None and origin.decode("latin-1").lower() != f"{scope['scheme']}://{host}".lower():
            return self.refuse(scope, 403, "Requests from other pages are not answered.")
        if headers.get(b"sec-fetch-site", b"none") == b"cross-site" and scope["method"] != "GET":
            return self.refuse(scope, 403, "Requests from other pages are not answered.")
        length = headers.get(b"content-length", b"0")
        if not length.isdigit() or int(length) > LARGEST_BODY:
            return self.refuse(scope, 413, TOO_LARGE)
        if scope["path"].startswith(("/static/", "/login")):
            return None
        if not self.access.knows(headers):
            given = dict(parse_qsl(scope["query_string"].decode("latin-1")))
            if scope["method"] == "GET" and self.access.is_token(given.pop("token", "").encode()):
                return self._admit(scope, given)
            return self.refuse(scope, 401, "This server asks for its token.")
        return None

    def _admit(self, scope: Scope, rest: dict[str, str]) -> Any:
        """Send the browser to the same page without the token in its address, with a cookie."""
        from starlette.responses import RedirectResponse

        where = quote(scope["path"]) + (f"?{urlencode(rest)}" if rest else "")
        answer = RedirectResponse(f"/{where.lstrip('/')}", status_code=303)
        answer.set_cookie(COOKIE, self.access.cookie, httponly=True, samesite="strict", secure=self.access.secure)
        return answer

    def _sender(self, scope: Scope, send: Send) -> Send:
        async def guarded(message: MutableMapping[str, Any]) -> None:
            if message["type"] == "http.response.start":
                there = {name.lower() for name, _ in message["headers"]}
                message["headers"] = [
                    *message["headers"],
                    *((n.encode(), v.encode()) for n, v in HEADERS.items() if n.encode() not in there),
                ]
            await send(message)

        return guarded


def _limited(receive: Receive) -> Receive:
    """A body that is not too large and does not come too slowly; waiting for the end of a connection is not limited."""
    seen, whole, until = 0, False, 0.0

    async def limited() -> MutableMapping[str, Any]:
        nonlocal seen, whole, until
        if whole:
            return await receive()
        until = until or time.monotonic() + BODY_SECONDS
        try:
            message = await asyncio.wait_for(receive(), max(0.0, until - time.monotonic()))
        except TimeoutError as failure:
            raise HTTPException(408, TOO_SLOW) from failure
        if message["type"] == "http.request":
            seen += len(message.get("body", b""))
            whole = not message.get("more_body", False)
            if seen > LARGEST_BODY:
                raise HTTPException(413, TOO_LARGE)  # applications hand it on as it is
        return message

    return limited
