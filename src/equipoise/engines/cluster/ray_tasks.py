"""Whole runs as tasks of a Ray cluster: each where there is room. One whose worker or node is lost can be started again."""

from __future__ import annotations

import secrets
import socket
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

from equipoise.core.files import write_atomically
from equipoise.engines.cluster.ray_extra import connect
from equipoise.errors import EquipoiseError

MOST_STARTS = 3  # of one task, where workers or nodes are lost
TOKEN = ".ray-study"  # noqa: S105 (a file in the folder, by which a node knows that it sees the folder)


@dataclass(frozen=True)
class SharedFolder:
    """A folder of the driver, which some nodes see at the same path."""

    path: str
    token: str

    def is_here(self) -> bool:
        """Whether this process sees the driver's folder, and not another one of the same name."""
        file = Path(self.path) / TOKEN
        return file.exists() and file.read_text() == self.token


class TaskEnd(NamedTuple):
    """How a task ended: with a value from a node, with an error of its own, or lost with its worker or node."""

    value: Any = None
    node: str = ""
    failed: str = ""
    lost: str = ""


class RayTasks:
    """Starts calls of a function as tasks of a cluster, one CPU each, and says how they ended.

    The function is called with the shared folder, then with what `start` was given.
    """

    def __init__(self, address: str, folder: Path, function: Callable[..., Any], *, gpus: float = 0.0) -> None:
        self.ray = connect(address)
        self.shared = SharedFolder(str(folder.absolute()), secrets.token_hex(8))
        cluster = self.ray.cluster_resources()
        if cluster.get("GPU", 0) < gpus:
            raise EquipoiseError("No node of the Ray cluster has a GPU, and each run asks for one. Leave out the device.")
        write_atomically(folder / TOKEN, self.shared.token.encode())
        self.room = max(1, int(min(cluster.get("CPU", 1), cluster.get("GPU", 0) / gpus if gpus else float("inf"))))
        self.task = self.ray.remote(_on_node).options(num_cpus=1, num_gpus=gpus, max_retries=0)
        self.board = self.ray.remote(Board).options(num_cpus=0).remote()
        self.function = function
        self.count = 0
        self.numbers: dict[Any, int] = {}  # of tasks that work, by reference
        self.known: dict[int, str] = {}
        self.asked: Any = None  # the reference to the board's next answer

    def start(self, *given: Any) -> Any:
        """Start a task; the reference to what it will say."""
        number, self.count = self.count, self.count + 1
        reference = self.task.remote(self.board, number, self.function, self.shared, *given)
        self.numbers[reference] = number
        return reference

    def ended(self, reference: Any) -> TaskEnd | None:
        """How a task has ended; None while it works."""
        ready, _ = self.ray.wait([reference], timeout=0)
        if not ready:
            return None
        self.numbers.pop(reference, None)
        try:
            node, value = self.ray.get(reference)
        except self.ray.exceptions.RayTaskError as failure:
            return TaskEnd(failed=f"{type(failure.cause).__name__}: {failure.cause}")
        except self.ray.exceptions.RayError as failure:
            lines = str(failure).strip().splitlines()
            return TaskEnd(lost=lines[0] if lines else type(failure).__name__)
        return TaskEnd(value, node)

    def places(self) -> dict[Any, str]:
        """The name of the node on which each task began, by its reference, as far as nodes have said so; never waits."""
        if self.asked is None:
            self.asked = self.board.read.remote()
        ready, _ = self.ray.wait([self.asked], timeout=0)
        if ready:
            with suppress(self.ray.exceptions.RayError):  # without the board nobody knows where, and that is all
                self.known = self.ray.get(self.asked)
            self.asked = None
        return {reference: self.known[number] for reference, number in self.numbers.items() if number in self.known}

    def stop(self, references: Sequence[Any]) -> None:
        """End tasks that still work, and take the token away."""
        for reference in references:
            with suppress(Exception):  # it has ended by now
                self.ray.cancel(reference, force=True)
        with suppress(Exception):
            self.ray.kill(self.board)
        (Path(self.shared.path) / TOKEN).unlink(missing_ok=True)


def restarts(starts: int) -> str:
    """What is said of a task that was started several times."""
    return f"It was started {starts} times, because its worker or node was lost." if starts > 1 else ""


class Board:
    """Where tasks say on which node they began."""

    def __init__(self) -> None:
        self.nodes: dict[int, str] = {}

    def tell(self, number: int, node: str) -> None:
        """A task has begun on a node."""
        self.nodes[number] = node

    def read(self) -> dict[int, str]:
        """The node of each task, by its number."""
        return self.nodes


def _on_node(board: Any, number: int, function: Callable[..., Any], shared: SharedFolder, *given: Any) -> tuple[str, Any]:
    """The node's name, and what the function says there."""
    import torch

    board.tell.remote(number, socket.gethostname())
    torch.set_num_threads(1)
    return socket.gethostname(), function(shared, *given)
