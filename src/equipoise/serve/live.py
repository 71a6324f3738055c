"""Server-sent events: what is new in a run, as it is written."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from typing import Any

from starlette.concurrency import run_in_threadpool

from equipoise.serve.library import Library
from equipoise.serve.refusals import Gone
from equipoise.serve.run_states import WatchedRun

EVERY, QUIET = 1.0, 5.0  # seconds between looks at a run that is running, and at one that is not
HEARTBEAT = 15.0  # seconds after which a silent stream says that it is alive
MOST_STREAMS = 300


def update_of(watched: WatchedRun, after: dict[str, int], evaluations: int) -> dict[str, Any]:
    """Curves after given rounds, evaluations after a number of them, and the state; no histogram of a private run."""
    log = watched.log
    new = log.evaluations[evaluations:]
    if watched.about.private:
        new = [{**each, "histogram": None} for each in new]
    return {
        "state": watched.state().table(),
        "generation": log.generation,
        "curves": {name: rows for name, curve in log.curves.items() if (rows := curve.after(after.get(name, 0)))},
        "cohort": max((curve.cohort for curve in log.curves.values()), default=0),
        "evaluations": new,
    }


@dataclass
class Follower:
    """One reader of a run: what it has been sent."""

    library: Library
    run: str
    after: dict[str, int] = field(default_factory=dict)
    evaluations: int = 0
    generation: int = -1
    last_state: Any = None

    def next_update(self) -> dict[str, Any] | None:
        """What is new since the last call; None if nothing is."""
        watched = self.library.watched(self.run)
        log = watched.log
        fresh = log.generation != self.generation or self.evaluations > len(log.evaluations)
        if fresh:
            self.after, self.evaluations, self.generation = {}, 0, log.generation
        update = update_of(watched, self.after, self.evaluations)
        state = {name: value for name, value in update["state"].items() if name != "seconds_left"}
        if not (fresh or update["curves"] or update["evaluations"] or state != self.last_state):
            return None
        self.after |= {name: rows[-1][0] for name, rows in update["curves"].items()}
        self.evaluations, self.last_state = len(log.evaluations), state
        return update | {"reset": fresh}


class Streams:
    """All streams of a server; there is an end to their number."""

    def __init__(self, library: Library) -> None:
        self.library, self.open = library, 0

    async def follow(self, run: str) -> AsyncIterator[bytes]:
        """The events of a run for one reader, until it leaves or the run is gone. A slow reader holds up only itself."""
        follower, spoken = Follower(self.library, run), time.monotonic()
        self.open += 1
        try:
            yield b"retry: 3000\n\n"
            while True:
                try:
                    update = await run_in_threadpool(follower.next_update)
                except Gone as failure:
                    yield event("gone", {"why": str(failure)})
                    return
                if update is not None:
                    yield event("update", update)
                    spoken = time.monotonic()
                elif time.monotonic() - spoken > HEARTBEAT:
                    yield b": alive\n\n"
                    spoken = time.monotonic()
                running = follower.last_state is not None and follower.last_state["status"] == "running"
                await asyncio.sleep(EVERY if running else QUIET)
        finally:
            self.open -= 1


def event(name: str, content: Any) -> bytes:
    """One server-sent event."""
    return f"event: {name}\ndata: {json.dumps(content, allow_nan=False)}\n\n".encode()
