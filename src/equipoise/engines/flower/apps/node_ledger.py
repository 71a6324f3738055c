"""A node's own ledger and secret: what it has revealed, each (run, round, purpose) once, and what that has cost it.

Both are in a folder of the node, and outlive its processes and the runs that it takes part in. A release is written down, and
is on the disk, before the share that completes it leaves the node.
"""

from __future__ import annotations

import hashlib
import hmac
import math
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

from equipoise.core.files import config_folder, locked, write_atomically
from equipoise.engines.flower.apps.node_policy import PolicyRefusal
from equipoise.engines.flower.secure.sum_terms import SCORES, name_sum
from equipoise.errors import EquipoiseError, NotWritten
from equipoise.privacy.accounting import gaussian_epsilon
from equipoise.privacy.ledger import Ledger, LedgerEntry, new_token
from equipoise.privacy.releases import fold

SECRET_BYTES = 32
EVALUATION = "evaluation "  # how the purposes of evaluations begin that no secure sum hides


class AlreadyReleased(EquipoiseError):
    """The node has answered this release before, in this run or before it went on."""


class BudgetSpent(EquipoiseError):
    """Another release would cost more than the node's owner allows."""


class NodeLedger:
    """What one client has revealed. `epsilon` is for one who knows when it took part, such as the server.

    The adjacency is "the client's contribution zeroed", so a release with multiplier z costs a plain Gaussian; exact releases
    have no ε and are counted by themselves.
    """

    def __init__(self, folder: Path | None, client: str) -> None:
        self.folder = folder if folder is not None else config_folder() / "nodes"
        self._name = hashlib.blake2b(client.encode(), digest_size=12).hexdigest()
        self._path = self.folder / f"{self._name}.ledger.jsonl"
        self._read()

    def _read(self) -> None:
        """Read what is in the file now."""
        self._size = self._path.stat().st_size if self._path.exists() else 0
        self.ledger = Ledger(self._path, durable=True)
        self._answered = {(entry.run, entry.round, entry.purpose) for entry in self.ledger}

    def begin(
        self,
        run: str,
        round_index: int,
        purpose: str,
        multiplier: float | None,
        *,
        epsilon: float | None = None,
        delta: float = 1e-5,
        evaluations: int | None = None,
    ) -> None:
        """Write down a release with this noise multiplier (None: it is exact).

        It is refused if it was answered before, goes beyond the budget `epsilon`, or is one of more `evaluations` of its run.
        Several processes of the node may answer at once, so one of them at a time looks into the file and writes.
        """
        with self._alone():
            if (run, round_index, purpose) in self._answered:
                raise AlreadyReleased(f"{name_sum(purpose, round_index)} in run {run!r} was answered before, and is not again.")
            if purpose.startswith(SCORES):
                self.check_evaluations(run, round_index, evaluations)
            if multiplier is not None:
                self.check_budget(multiplier, epsilon, delta)
            self._write(run, round_index, purpose, multiplier)

    @contextmanager
    def _alone(self) -> Iterator[None]:
        """No other process of the node writes meanwhile, and what others have written is known."""
        with locked(self._path.with_suffix(".lock"), wait=True):
            if self._path.exists() and self._path.stat().st_size != self._size:
                self._read()
            yield

    def _write(self, run: str, round_index: int, purpose: str, multiplier: float | None) -> None:
        kind: Literal["release", "exact"] = "exact" if multiplier is None else "release"
        noise = math.inf if multiplier is None else multiplier
        sampling = () if multiplier is None else ("everyone",)
        self.ledger.write(LedgerEntry(kind, "", run, round_index, purpose, noise, noise, sampling, token=new_token()))
        self._answered.add((run, round_index, purpose))
        self._size = self._path.stat().st_size

    def note_single(self, run: str, round_index: int, purpose: str) -> None:
        """Write down what no sum hides of this client, such as "single update": once for all tries of a round."""
        with self._alone():
            if (run, round_index, purpose) not in self._answered:
                self._write(run, round_index, purpose, None)

    def begin_evaluation(self, run: str, kind: str, subject: str, most: int | None) -> None:
        """Count an evaluation that no secure sum hides, and refuse it if the run has had `most` of its kind, which is one word.

        `subject` is a hash of what is evaluated. The same again tells nothing new: it is not counted again, nor refused.
        """
        start = f"{EVALUATION}{kind} "
        with self._alone():
            known = {entry.purpose for entry in self.ledger if entry.run == run and entry.purpose.startswith(start)}
            if start + subject not in known:
                self.check_evaluations(run, len(known), most)
                self._write(run, len(known), start + subject, None)

    def check_evaluations(self, run: str, round_index: int, most: int | None) -> None:
        """Refuse an evaluation after another round than those of `most` evaluations of the run; None is any number."""
        made = {e.round for e in self.ledger if e.run == run and e.purpose.startswith((SCORES, EVALUATION))} - {round_index}
        if most is not None and len(made) >= most:
            raise PolicyRefusal(f"Run {run!r} has had {len(made)} evaluations, and the policy allows {most}.")

    def epsilon(self, delta: float, *, further: float = math.inf) -> float:
        """ε of all noisy releases so far, and of one more with the multiplier `further`."""
        noisy = [entry.zeroed for entry in self.ledger if entry.kind == "release"]
        return gaussian_epsilon(fold(*noisy, further), delta)

    def check_budget(self, multiplier: float, epsilon: float | None, delta: float) -> None:
        """Refuse a release that the budget does not allow; None is no budget."""
        if epsilon is not None and (spent := self.epsilon(delta, further=multiplier)) > epsilon:
            raise BudgetSpent(f"With this release the node would have spent ε = {spent:.4g} at δ = {delta:g}, of {epsilon:g}.")

    @property
    def secret(self) -> bytes:
        """Random bytes that only this node has, the same after a restart."""
        file = self.folder / f"{self._name}.secret"
        try:
            known = file.read_bytes()
            if len(known) == SECRET_BYTES:
                return known
        except OSError:
            pass
        drawn = os.urandom(SECRET_BYTES)
        try:
            write_atomically(file, drawn)
            file.chmod(0o600)
        except OSError as failure:
            raise NotWritten(f"{file} could not be written: {failure.strerror}.") from failure
        return drawn

    @property
    def mark(self) -> str:
        """What tells this node from all others, the same in every introduction. Only the server sees it."""
        return hmac.new(self.secret, b"the mark of this node", hashlib.sha256).hexdigest()

    def coin(self, run: str, round_index: int) -> float:
        """A number in [0, 1) for a round, uniform to all who do not have this node's secret; the same at every try of it."""
        mark = hmac.new(self.secret, f"participation {round_index} {run}".encode(), hashlib.sha256).digest()
        return (int.from_bytes(mark[:8], "little") >> 11) * 2.0**-53

    def fingerprint(self, data: str) -> str:
        """A keyed hash of the data's fingerprint: it changes with the data, and tells nobody else who has the same."""
        return hmac.new(self.secret, data.encode(), hashlib.sha256).hexdigest()
