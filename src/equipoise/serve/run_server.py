"""Starts the server: one process, this machine alone unless told otherwise, and then with a token."""

from __future__ import annotations

import errno
import logging
import secrets
import socket
import threading
import webbrowser
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from equipoise.core.words import clean_record
from equipoise.errors import ConfigError, require

if TYPE_CHECKING:
    from equipoise.serve.guard import Access

PORT = 8642
SHORTEST_TOKEN = 12
MOST_CONNECTIONS = 1000
Say = Callable[[str], None]


@dataclass(frozen=True)
class ServerOptions:
    """Where a server listens, and who may ask. Beyond this machine there is a token; a made one is printed at the start."""

    host: str = "127.0.0.1"
    port: int = PORT
    token: str | None = None
    allow_hosts: Sequence[str] = ()
    certificate: Path | None = None
    key: Path | None = None

    def __post_init__(self) -> None:
        require(0 <= self.port < 65536, "port", "must be a whole number from 0 to 65535", self.port)
        if (self.certificate is None) != (self.key is None):
            raise ConfigError("TLS needs both: --certificate FILE and --key FILE.")
        for file in (self.certificate, self.key):
            if file is not None and not file.is_file():
                raise ConfigError(f"{file} does not exist.")
        if self.token is not None and len(self.token) < SHORTEST_TOKEN:
            raise ConfigError(f"The token must have at least {SHORTEST_TOKEN} characters. Leave --token out, and one is made.")


def serve(folder: Path, options: ServerOptions, *, say: Say, open_browser: bool = False) -> None:
    """Serve a folder until Ctrl-C."""
    try:
        import uvicorn  # noqa: F401

        from equipoise.serve.app import make_app
    except ImportError as failure:
        raise ConfigError('The server is not installed: pip install "equipoise[serve]".') from failure
    if not folder.is_dir():
        raise ConfigError(f"{folder} is no folder. Name one with runs, e.g. equipoise serve runs.")
    run_app(lambda access: make_app(folder, access), options, str(folder), say, open_browser=open_browser)


def run_app(make: Callable[[Access], Any], options: ServerOptions, what: str, say: Say, *, open_browser: bool = False) -> None:
    """Run an application behind its guard until Ctrl-C; every server of the library is begun here."""
    import uvicorn

    from equipoise.serve.guard import Access, is_loopback

    local = is_loopback(options.host)
    token = options.token or (None if local else secrets.token_urlsafe(24))
    own = {options.host.lower(), "127.0.0.1", "localhost", "::1"}
    if options.host in ("0.0.0.0", "::"):  # noqa: S104 — what the user asked for
        own |= {socket.gethostname().lower(), *_own_addresses()}
    access = Access(frozenset(own | {host.lower() for host in options.allow_hosts}), token, options.certificate is not None)
    listening = listen(options.host, options.port)
    port = listening.getsockname()[1]
    scheme = "https" if options.certificate is not None else "http"
    shown = "127.0.0.1" if options.host in ("0.0.0.0", "localhost") else options.host  # noqa: S104
    url = f"{scheme}://{f'[{shown}]' if ':' in shown else shown}:{port}/"
    page = url if token is None else f"{url}?token={token}"
    try:
        config = server_config(make(access), options)
    except ConfigError:
        listening.close()
        raise
    say(f"{what} is at {page}")
    if not local:
        say("Others reach this server, too: whoever has the token reads what it shows.")
        if options.certificate is None:
            say("The token travels as plain text. Encrypt it: --certificate FILE --key FILE, or a tunnel (ssh -L).")
    say("Ctrl-C ends it.")
    if open_browser:
        threading.Timer(0.7, webbrowser.open, (page,)).start()
    logging.getLogger("uvicorn.error").addFilter(clean_record)
    uvicorn.Server(config).run(sockets=[listening])


def server_config(app: Any, options: ServerOptions) -> Any:
    """How uvicorn serves an application: one process, h11, bounded connections that end if nobody goes on with them."""
    import uvicorn

    from equipoise.serve.connections import ImpatientConnection

    config = uvicorn.Config(
        app, log_level="warning", lifespan="off", ws="none", http=ImpatientConnection, loop="asyncio",
        server_header=False, date_header=True, access_log=False,
        limit_concurrency=MOST_CONNECTIONS, timeout_keep_alive=20, timeout_graceful_shutdown=2,
        h11_max_incomplete_event_size=65536,
        ssl_certfile=None if options.certificate is None else str(options.certificate),
        ssl_keyfile=None if options.key is None else str(options.key),
    )  # fmt: skip
    try:
        config.load()
    except (OSError, ValueError) as failure:
        reason = str(failure) or type(failure).__name__
        raise ConfigError(f"The certificate {options.certificate} or its key cannot be used: {reason}.") from failure
    return config


def listen(host: str, port: int) -> socket.socket:
    """A socket that listens; a port in use, or a host that is not of this machine, is refused in words."""
    try:
        kind, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)[0]
        made = socket.socket(kind, socket.SOCK_STREAM)
    except OSError as failure:
        raise ConfigError(f"The host {host!r} is not known: {failure.strerror or failure}.") from failure
    try:
        made.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        made.bind(where)
        made.listen(512)
        return made
    except OSError as failure:
        made.close()
        if failure.errno == errno.EADDRINUSE:
            other = port + 1 if port < 65535 else PORT
            raise ConfigError(f"Port {port} is in use, perhaps by another server. Choose another: --port {other}.") from failure
        raise ConfigError(f"{host}:{port} cannot be listened on: {failure.strerror}.") from failure


def _own_addresses() -> set[str]:
    try:
        return {str(each[4][0]) for each in socket.getaddrinfo(socket.gethostname(), None)}
    except OSError:
        return set()
