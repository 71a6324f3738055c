"""The contracts of local solvers and of schedules, and of what clients keep for their solver between rounds."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from torch import Tensor

from equipoise.types.own_claims import OWN
from equipoise.types.round_values import Cohort, LocalWork


class LocalSolver(Protocol):
    """A description of local work. Law: zero steps give a zero update.

    What a step cannot know from one parameter alone is done by the engine: it clips the gradient of a client over all
    parameters (`SolverTraits.clip_norm`), and passes each parameter's own rate to `step`.

    A solver that only has `prepare` (see SolverTraits) makes a round's solver when the round begins.
    """

    @property
    def batch_size(self) -> int | None:
        """Examples of a batch; None for all examples of the client."""

    def local_steps(self, size: int, effort: int | None = None) -> int:
        """How many steps a client with `size` examples takes; `effort` is what it gets done of the epochs (or steps)."""

    def learning_rate(self, round_index: int) -> float:
        """The rate of a round."""

    def begin(self, weights: Tensor) -> tuple[Tensor, ...]:
        """Zeroed memory (e.g. momentum), each tensor shaped like `weights`."""

    def step(self, weights: Tensor, gradient: Tensor, memory: tuple[Tensor, ...], *, anchor: Tensor, lr: float) -> None:
        """One step, in place, element by element: `weights` may be one client's (D,) or many clients' (K, …).

        Engines cut the numbers into tensors in different ways, so that a norm, a mean or a sort in a step is refused.
        Only `weights` and `memory` are written to; `gradient` may share memory with another parameter's. A `numbered` solver
        (SolverTraits) gets one more keyword, `number`: the number of the step, from 1 on, as a number or as one number per
        client in a float64 tensor that broadcasts to `weights`.
        """


class Schedule(Protocol):
    """A factor of the learning rate for each round, or for each local step. Law: positive and finite at 0, 1, …"""

    def __call__(self, index: int) -> float:
        """The factor in round `index`, or at local step `index`; both count from 0."""


class SgdRule(NamedTuple):
    """w ← w − γ (∇F(w) + λw + μ(w − w^t)), or with momentum v ← βv + g and w ← w − γv: what fast paths write out again."""

    momentum: float  # β
    weight_decay: float  # λ
    prox: float  # μ

    @property
    def is_plain(self) -> bool:
        """Whether a step is w ← w − γ∇F(w) and nothing else."""
        return not (self.momentum or self.weight_decay or self.prox)


@dataclass(frozen=True, eq=False)
class SolverTraits:
    """What a solver may offer."""

    prepare: Callable[[Any, Any], tuple[LocalSolver, Any]] | None = None  # (context, state): a round's solver, the next state
    fixed_weights: bool = False  # its correction is for weights that no loss changes (FedDane, SCAFFOLD, FedDyn)
    public_only: bool = field(default=False, metadata=OWN)  # what it prepares a round by is public: it asks no client
    efforts: Callable[[Cohort, Tensor], Tensor | None] | None = None  # (cohort, keys): how much each client gets done, (K,)
    straggler_share: float = 1.0  # 0: all clients get everything done, and `efforts` need not be asked
    sgd: SgdRule | None = field(default=None, metadata=OWN)  # if `step` is the step of SGD
    local_steps_each: Callable[..., Any] | None = field(default=None, metadata=OWN)  # `local_steps` of many clients, as arrays
    prox: float = 0.0  # μ of a proximal term
    with_prox: Callable[[float], LocalSolver] | None = None  # the solver with another μ
    with_epochs: Callable[[int], LocalSolver] | None = None  # the solver with another number of passes over the data
    for_own_model: Callable[[], LocalSolver] | None = None  # the solver for a client's own model
    numbered: bool = False  # whether `step` is told the `number` of the step: since the client's memory began, from 1 on
    clip_norm: float | None = None  # the engine scales the gradient of a client's loss down to this L2 norm, at every step
    step_factor: Callable[[int], float] | None = None  # the factor of the rate at local step 0, 1, … of a round
    weight_decay: float = 0.0  # λ; it also shrinks parameters that get no gradient
    rates: Mapping[str, float] | None = None  # the factor of the rate of parameters, by patterns of their names
    keeps: Callable[[int], int] | None = None  # (D): how many numbers a client keeps between rounds; None: nothing
    # (steps (K,), rate): the sum of these steps under a gradient of 1, in units of the rate, (K,) float64
    normalisers: Callable[[Tensor, float], Tensor] | None = None
    repeats: int = 1  # for how many steps in a row a batch is used
    # whether `step` is told its number, depends on it only by its remainder modulo `repeats`, and never asks a device
    by_turns: bool = field(default=False, metadata=OWN)
    adjusted_sgd: SgdRule | None = None  # if `step` is the step of SGD by a gradient that the engine has shifted or scaled
    split: float | None = None  # the share of a client's examples that all steps but the last see
    adapts: bool = False  # whether risks see the loss after the steps before the last
    adaptation: LocalSolver | None = None  # by which a client adapts the trained model to itself before it uses it
    finish: Callable[..., None] | None = None  # taken instead of the last `step`
    steps: int | None = None  # the number of steps, whatever the number of a client's examples; None: by epochs
    # (state, alpha (K,), change (K, width)): the next state, when a round's clients have changed their rows so
    after_rows: Callable[[Any, Tensor, Tensor], Any] | None = None
    # (state, total (D,), share, scale): the next state by the total alone; its clients have Σ α_k = share, and scale is the
    # rate times the length of their steps
    after_total: Callable[[Any, Tensor, float, float], Any] | None = None
    server_total: Callable[[Any, Tensor], Tensor] | None = (
        None  # (next state, total): what the server steps by instead (FedDyn)
    )
    plain_mean: bool = False  # the total is the plain mean over the cohort, whatever the base weights are
    own_prox: Callable[[Tensor, int], Tensor] | None = None  # (alpha (K,), n): `Cohort.prox` of clients, (K,)
    shift: Tensor | None = None  # c (D,): the engine adds c − row_k to every gradient of client k (SCAFFOLD)
    # (rows (K, D), updates (K, D), steps (K,), rate, prox (K,)): the rows of clients with a `shift` after their steps
    next_rows: Callable[[Tensor, Tensor, Tensor, float, Tensor | None], Tensor] | None = None
    with_sent_clip: Callable[[float], LocalSolver] | None = None  # the solver for clients whose updates are clipped when sent
    shared_gradient: Tensor | None = None  # g (D,): the engine adds g − ∇F_k(w^t) to every gradient of client k (FedDane)
    preconditioner: Tensor | None = None  # A (D,): the engine divides every gradient by it
    solver: LocalSolver | None = None  # the solver that this one wraps


class SolverMemory(Protocol):
    """What clients keep for their solver between rounds: `runs.solver_rows` on this machine, or on the nodes of a network.

    The state that a round hands to the next are the `places` (n,), which say where each client's row is.
    """

    def begin(self, path: Path | None = None) -> Tensor:
        """The places before the first round; rows on this machine go to a new file at `path`, or a temporary one."""

    def resume(self, places: Tensor, path: Path | None) -> None:
        """Go on from a checkpoint that holds these places."""

    def given(self, places: Tensor, clients: Tensor) -> Tensor:
        """What the engine is told of the rows of clients at positions (K,): `Cohort.rows`."""

    def change(self, places: Tensor, clients: Tensor, rows: Tensor) -> Tensor:
        """By what the rows of clients at positions (K,) have changed, (K, width), given the `rows` of their work."""

    def after(self, places: Tensor, workers: Cohort, work: LocalWork) -> Any:
        """The rows after a round's work, not yet written down."""

    def write(self, pending: Any) -> Tensor:
        """Write the rows of a round that is finished: the places after it."""

    def flush(self) -> None:
        """Bring the rows to disk, before a checkpoint is written."""

    def on_saved(self, places: Tensor) -> None:
        """A checkpoint with these places was written."""
