"""The simulator as a user asks for it: its options, their rules, and the engine that they start."""

from __future__ import annotations

from dataclasses import dataclass

from equipoise.core.devices import usable_device
from equipoise.core.task import Task
from equipoise.data.clients import FederatedData
from equipoise.engines.simulator.calibration import Choice
from equipoise.engines.simulator.engine import SimulatorEngine
from equipoise.engines.simulator.precision import PRECISIONS, Precision
from equipoise.errors import IncompatibleParts, is_integer, notify, require


@dataclass(frozen=True)
class Simulator:
    """Train many clients at once. `device` is any torch device.

    `chunk_size` is how many clients are trained as one batch, `workers` how many processes do so side by side on a CPU, each
    with one torch thread. None measures what is fastest before the first round; the choice is kept with a checkpoint, and for
    the next run on this machine. Results depend on neither beyond rounding.

    `compiled` says whether a CPU may train softmax regression by C code, which is compiled once where there is a C compiler; it
    is measured beside the rest, and used if it is the fastest.

    `precision` is the precision of matrix products on a GPU: "float32", or the faster and less exact "tf32" (10 bits of
    each factor) and "bf16" (7 bits in the forward pass, too); parameters, gradients and sums are float32 in any case.

    `resident` says whether the examples of all clients stay on the device, or those of a cohort at a time, the next cohort's
    being read while this one works. None: on a GPU, if they take at most half of its free memory.

    A model that cannot be vectorised over clients is trained one client at a time instead, with one notice.

    Source: ours; vectorising over clients with torch.func.
    """

    chunk_size: int | None = None
    device: str | None = None
    workers: int | None = None
    precision: str = "float32"
    compiled: bool = True
    resident: bool | None = None

    def __post_init__(self) -> None:
        for name in ("chunk_size", "workers"):
            value = getattr(self, name)
            good = value is None or (is_integer(value) and value >= 1)
            require(good, name, "must be a whole number of at least 1, or None", value)
        require(isinstance(self.compiled, bool), "compiled", "must be True or False", self.compiled)
        require(self.resident in (None, True, False), "resident", "must be True, False or None", self.resident)
        on_cpu = self.device is None or str(self.device).startswith("cpu")
        require(self.workers is None or on_cpu, "workers", "must be left alone on a GPU", self.workers)
        rule = f"must be one of {', '.join(map(repr, PRECISIONS))}"
        require(self.precision in PRECISIONS, "precision", rule, self.precision)
        fix = 'Leave it at "float32", or give device="cuda".'
        require(self.precision == "float32" or not on_cpu, "precision", "is for a GPU", self.precision, fix)

    def start(self, task: Task, data: FederatedData) -> SimulatorEngine:
        """The running engine for a task on a data set."""
        refuse_visited(data)
        given = Choice(self.chunk_size, self.workers)
        device, precision = usable_device(self.device), Precision(self.precision)
        engine = SimulatorEngine(task, data, device, given, precision, self.compiled, self.resident)
        reason = engine.why_not_vectorised()
        if reason is not None:
            engine.fall_back(reason)
            text = f"{type(task.module).__name__} cannot be vectorised over clients ({reason}), so each client is trained on"
            how = "a few side by side" if device.type == "cuda" else "one at a time in each process"
            notify(f"{text} its own, {how}. Results are the same; rounds are slower.")
        return engine


def refuse_visited(data: FederatedData) -> None:
    """Refuse data that are read anew at every visit."""
    if any(clients.is_visited for clients in data.splits.values()):
        raise IncompatibleParts(
            "These data read inputs from a Dataset at every visit (random augmentation); the simulator packs data once.",
            'Train with engine="loop", or leave the augmentation out.',
        )
