"""What an operator says to a federated run while it goes on, in a file of its folder: pause, resume, stop, extend."""

from __future__ import annotations

import json
import logging
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Literal

from equipoise.core.files import write_atomically
from equipoise.core.plain_text import made_of, parse_json
from equipoise.errors import ConfigError, EquipoiseError, FileGuard

log = logging.getLogger("flwr")  # Flower shows it to whoever watches the run
CONTROL = "control.json"
LOOK = 1.0  # seconds between looks at the file while a run is paused


class StoppedByOperator(EquipoiseError):
    """The run was stopped between two rounds; its folder can be resumed."""


@dataclass(frozen=True)
class Order:
    """What the operator wants: whether the run is to go on, and up to which round (None: as it was begun)."""

    state: Literal["run", "pause", "stop"] = "run"
    rounds: int | None = None


def read_order(folder: Path) -> Order:
    """What the operator has said; an ordinary run where nothing is said."""
    file = folder / CONTROL
    with FileGuard(file, ConfigError, "is no order for a run", "Delete it, or give the order again."):
        if not file.exists():
            return Order()
        order: Order = made_of(Order, parse_json(file))
        if order.rounds is not None and order.rounds < 1:
            raise ValueError(f"it says rounds = {order.rounds}")
        return order


def give_order(folder: Path, *, state: Literal["run", "pause", "stop"] | None = None, rounds: int | None = None) -> Order:
    """Write down an order; what is not said stays as it was."""
    before = read_order(folder)
    order = replace(before, state=state or before.state, rounds=rounds if rounds is not None else before.rounds)
    write_atomically(folder / CONTROL, (json.dumps(asdict(order)) + "\n").encode())
    return order


@dataclass(eq=False)
class RunControl:
    """Obeys the operator between rounds. Without a folder there are no orders."""

    folder: Path | None = None
    told: Callable[[str], None] = lambda state: None  # what the status is now

    def obey(self) -> None:
        """Wait while the run is paused; raises StoppedByOperator if it is to stop."""
        if self.folder is None:
            return
        paused = False
        while (order := read_order(self.folder)).state == "pause":
            if not paused:
                log.info("The run is paused by its operator. Go on: equipoise flower resume %s", self.folder)
                self.told("paused")
                paused = True
            time.sleep(LOOK)
        if order.state == "stop":
            raise StoppedByOperator("The run was stopped by its operator between two rounds. The same command goes on with it.")
        if paused:
            log.info("The run goes on.")
            self.told("running")
