"""Connections that end if the other side does not go on: if it takes nothing of an answer, or never completes a request."""

from __future__ import annotations

import asyncio
import socket
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SEND_SECONDS = 60.0  # in which a reader must take a piece of an answer
REQUEST_SECONDS = 15.0  # in which the head of a request must arrive
UNSENT = 128 * 1024  # bytes that the system may hold back for a reader: else megabytes hide there how slow it is
UNSENT_OPTION = vars(socket).get("TCP_NOTSENT_LOWAT")  # not on every system


class Deadline:
    """A time at which a connection is ended at once, unless it is lifted before.

    To close a connection would not do: closing waits until the reader has taken what is left.
    """

    def __init__(self) -> None:
        self._timer: asyncio.TimerHandle | None = None

    def set(self, seconds: float, connection: asyncio.Transport) -> None:
        """End a connection after some seconds; a deadline that is already set stays."""
        if self._timer is None:
            self._timer = asyncio.get_running_loop().call_later(seconds, connection.abort)

    def lift(self) -> None:
        """Let the connection be."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None


class ImpatientConnection(H11Protocol):
    """HTTP on one connection of uvicorn, with an end to waiting.

    asyncio says that writing pauses when the reader is behind, and resumes when it has taken all.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._taken, self._asked = Deadline(), Deadline()

    def connection_made(self, transport: Any) -> None:
        """Begin; the first request is awaited."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # every byte counts that a reader has not taken
        if UNSENT_OPTION is not None:
            transport.get_extra_info("socket").setsockopt(socket.IPPROTO_TCP, UNSENT_OPTION, UNSENT)
        self._asked.set(REQUEST_SECONDS, self.transport)

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._asked.lift()
        else:
            self._asked.set(REQUEST_SECONDS, self.transport)

    def pause_writing(self) -> None:
        """The reader is behind."""
        super().pause_writing()
        self._taken.set(SEND_SECONDS, self.transport)

    def resume_writing(self) -> None:
        """The reader has taken all."""
        super().resume_writing()
        self._taken.lift()

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._taken.lift()
        self._asked.lift()
        super().connection_lost(exc)
