"""Connections that end if the other side does not go on: if it takes nothing of an answer, or never completes a request."""

from __future__ import annotations

import asyncio
from typing import Any

from uvicorn.protocols.http.h11_impl import H11Protocol

SEND_SECONDS = 60.0  # in which a reader must take what has been sent to it, one piece of an answer
REQUEST_SECONDS = 15.0  # in which the head of a request must arrive


class ImpatientConnection(H11Protocol):
    """HTTP on one connection of uvicorn, with an end to waiting.

    asyncio says that writing pauses when the reader is behind, and resumes when it has taken all; a pause that lasts too long
    ends the connection at once. To close it would not do: closing waits until the reader has taken what is left.
    """

    def __init__(self, *given: Any, **named: Any) -> None:
        super().__init__(*given, **named)
        self._reader_behind: asyncio.TimerHandle | None = None
        self._request_open: asyncio.TimerHandle | None = None

    def connection_made(self, transport: Any) -> None:
        """Begin; the first request is awaited."""
        super().connection_made(transport)
        transport.set_write_buffer_limits(high=1, low=0)  # what a reader has not taken counts; TLS would pause for ever at 0
        self._await_request()

    def data_received(self, data: bytes) -> None:
        """Take in a part of a request."""
        super().data_received(data)
        if self.cycle is not None and not self.cycle.response_complete:
            self._request_open = _stopped(self._request_open)
        else:
            self._await_request()

    def pause_writing(self) -> None:
        """The reader is behind."""
        super().pause_writing()
        if self._reader_behind is None:
            self._reader_behind = self.loop.call_later(SEND_SECONDS, self.transport.abort)

    def resume_writing(self) -> None:
        """The reader has taken all."""
        super().resume_writing()
        self._reader_behind = _stopped(self._reader_behind)

    def connection_lost(self, exc: Exception | None) -> None:
        """End."""
        self._reader_behind, self._request_open = _stopped(self._reader_behind), _stopped(self._request_open)
        super().connection_lost(exc)

    def _await_request(self) -> None:
        if self._request_open is None:
            self._request_open = self.loop.call_later(REQUEST_SECONDS, self.transport.abort)


def _stopped(timer: asyncio.TimerHandle | None) -> None:
    if timer is not None:
        timer.cancel()
