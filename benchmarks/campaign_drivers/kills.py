"""Runs that are killed, stopped, cut off from power or out of disk at random moments, and gone on with until they are done.

What they leave in the end must be what an undisturbed run leaves, bit for bit: the model, the history and the client table.
"""

from __future__ import annotations

import errno
import json
import os
import random
import shutil
import signal
import time
import warnings
from collections import Counter
from functools import partial
from pathlib import Path
from typing import Any

import equipoise as eq
from campaign_drivers import random_parts as parts
from campaign_drivers.crash_states import PowerCut, PowerWentOut
from campaign_drivers.findings import Finding, in_child
from equipoise.core import files
from equipoise.engines import Simulator
from equipoise.errors import EquipoiseError, EquipoiseNotice
from equipoise.runs import checkpoint as checkpoint_module
from equipoise.runs.checkpoint import Checkpoints
from equipoise.types import Observer

ROUNDS = 8
PAUSE = 0.01  # seconds after a round, so that kills come at all moments and not only in the first second
LIMIT = 120.0  # seconds that a child may take
TRIES = 40  # after so many disturbances a run is left in peace
POWER_CUT, REFUSED = 75, 76  # exit codes of children


class Pause(Observer):
    """Waits after every round."""

    def on_round(self, report: Any) -> None:
        time.sleep(PAUSE)


def train(mode: str, chosen: parts.Chosen, folder: Path, fast: bool, every: int) -> None:
    """The whole run, or what is left of it; what it ends with goes to a file."""
    folder.mkdir(parents=True, exist_ok=True)
    saving = Checkpoints(folder / "run.safetensors", every=every)
    given = {"rounds": ROUNDS, "observers": [Pause()], "checkpoint": saving, "evaluate_every": 3}
    given |= parts.options(chosen) | {"engine": Simulator(workers=1) if fast else "loop"}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        if mode == "family":
            family = eq.train_family(parts.model(), parts.clients(), chosen.algorithm(), tails=[1.0, 0.5], **given)
            results = list(family.results.values())
        elif mode == "many":
            given.pop("seed")
            many = eq.train_many(parts.model(), parts.clients(), chosen.algorithm(), seeds=2, **given)
            results = [run for runs in many.results.values() for run in runs]
        else:
            results = [eq.train(parts.model(), parts.clients(), chosen.algorithm(), **given)]
    files.write_atomically(folder / "ended.json", json.dumps([left_by(result) for result in results]).encode())


def left_by(result: eq.Result) -> dict[str, Any]:
    """All numbers of a result, exactly, without what clocks say."""
    rows = result.clients
    found: dict[str, Any] = {"params": result.params.double().numpy().tobytes().hex()}
    found["clients"] = [rows.client, rows.loss.numpy().tobytes().hex(), rows.error.numpy().tobytes().hex()]
    if rows.personal_loss is not None:
        found["own"] = rows.personal_loss.numpy().tobytes().hex()
    if result.personal is not None:
        found["models"] = result.personal.params(list(result.personal.ids)).double().numpy().tobytes().hex()
    found["rounds"] = [repr({k: v for k, v in vars(r).items() if k != "seconds"}) for r in result.history.rounds]
    found["points"] = [repr(point) for point in result.history.points]
    return found


def try_kills(chance: random.Random, folder: Path, counts: Counter[str]) -> None:
    """One run of a random configuration, disturbed until it has had enough or is done."""
    mode = chance.choice(["train", "train", "train", "family", "many"])
    fast, every = chance.random() < 0.5, chance.choice([1, 1, 2, 3])
    while True:
        chosen = parts.draw(chance, most=3)
        if mode == "family":
            chosen = parts.Chosen({k: v for k, v in chosen.parts.items() if k not in ("risk", "personal", "privacy")})
        try:
            chosen.algorithm()
        except EquipoiseError:
            continue
        break
    case = {"mode": mode, "fast": fast, "every": every, "parts": chosen.words()}

    def work(place: Path) -> None:
        try:
            train(mode, chosen, place, fast, every)
        except EquipoiseError as refusal:
            if isinstance(refusal, OSError):
                raise
            os._exit(REFUSED)

    began = time.monotonic()
    code = in_child(lambda: work(folder / "whole"), limit=LIMIT)
    if code == REFUSED:
        counts["refused or diverged"] += 1
        return
    if code != 0:
        raise Finding(f"an undisturbed run ended with exit code {code}", **case)
    length = time.monotonic() - began
    place, number = folder / "try-0", 0
    place.mkdir()
    for _ in range(TRIES):
        how = chance.choices(["kill", "interrupt", "terminate", "power", "full", "clock"], [5, 1, 1, 4, 2, 1])[0]
        target = folder / f"try-{number + 1}"
        code = _disturb(how, chance, place, target, work, length)
        counts[how] += code != 0
        if code == REFUSED:
            raise Finding(f"after {how} the run was refused", **case, after=how)
        if how == "power" and code == POWER_CUT:
            target.mkdir(exist_ok=True)
            place, number = target, number + 1
        if code == 0 and (place / "ended.json").exists():
            break
    else:
        code = in_child(partial(work, place), limit=LIMIT)
        if code != 0:
            raise Finding(f"the last run ended with exit code {code}", **case)
    whole, ended = ((at / "ended.json").read_bytes() for at in (folder / "whole", place))
    if whole != ended:
        first, second = json.loads(whole), json.loads(ended)
        differ = sorted({key for a, b in zip(first, second, strict=True) for key in a if a[key] != b.get(key)})
        raise Finding("a disturbed run ended elsewhere", **case, differs=differ)
    counts["ended alike"] += 1
    shutil.rmtree(folder, ignore_errors=True)


def _disturb(how: str, chance: random.Random, place: Path, target: Path, work: Any, length: float) -> int:
    """One attempt at a run: the exit code of the child, 0 if it came to its end before anything happened to it."""
    moment, after, luck = chance.uniform(0, 0.8 * length), chance.randint(1, 60), random.Random(chance.random())
    if how in ("kill", "interrupt", "terminate"):
        by = {"kill": signal.SIGKILL, "interrupt": signal.SIGINT, "terminate": signal.SIGTERM}[how]
        return in_child(lambda: work(place), limit=LIMIT, kill_after=moment, by=by)

    def disturbed() -> None:
        if how == "clock":
            checkpoint_module.time = _Clock(luck)  # type: ignore[attr-defined]
            work(place)
            return
        if how == "full":
            files.recorder = _FullDisk(after)
        else:
            files.recorder = PowerCut(place, target, after, luck)
        try:
            work(place)
        except PowerWentOut:
            os._exit(POWER_CUT)
        except OSError:
            os._exit(errno.ENOSPC)

    return in_child(disturbed, limit=LIMIT)


class _FullDisk:
    """Takes so many primitives, and no more bytes after them."""

    def __init__(self, after: int) -> None:
        self.left = after

    def __call__(self, operation: str, path: Path, *details: Any) -> None:
        self.left -= 1
        if self.left < 0 and operation in ("write", "sync"):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


class _Clock:
    """A clock that jumps by hours, forwards and backwards."""

    def __init__(self, chance: random.Random) -> None:
        self.chance, self.shift = chance, 0.0

    def monotonic(self) -> float:
        self.shift += self.chance.choice([0, 0, 0, 3600, -3600])
        return time.monotonic() + self.shift
