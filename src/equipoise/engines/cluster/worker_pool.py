"""The workers of a cluster: Ray places and watches them; here they are given pieces, and what they lose is given to others."""

from __future__ import annotations

import logging
import statistics
import time
import weakref
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from equipoise.core.numbers import Numbers
from equipoise.engines.cluster.packing import (
    INLINE_BYTES,
    Letter,
    arguments,
    in_store,
    message,
    opened,
    pack,
    pack_numbers,
    part_bytes,
)
from equipoise.engines.cluster.pieces import Node, share_out
from equipoise.engines.cluster.pooled_worker import FIRST_SECONDS, PooledWorker
from equipoise.engines.cluster.ray_extra import connection
from equipoise.engines.cluster.ray_worker import Answer, RayWorker, versions
from equipoise.errors import EquipoiseError, IncompatibleParts, notify

_LOOK_SECONDS = 1.0  # between two looks at the cluster for new nodes and lost workers
_START_SECONDS = 120.0  # for the first worker to be there
_OTHERS_SECONDS = 10.0  # for the others, after it
_MOST_LOST = 3  # workers of a node that may end without an answer, one after the other


@dataclass(eq=False)
class Asked:
    """Pieces that a worker was asked for."""

    worker: PooledWorker
    pieces: Node
    cost: float
    references: list[Any]
    until: float


@dataclass(frozen=True, eq=False)
class Work:
    """A phase to be shared out: its kind, what each piece costs, what is sent for some pieces, and how large the answer is."""

    kind: str
    costs: Numbers
    head: bytes  # what all workers are told, besides models
    models: Callable[[], list[Any]]  # the models, as arguments
    model_number: int  # a worker that has the models of this number from the phase before is not sent them again
    own: Callable[[int, int], object]  # what a worker is told of pieces first … last − 1
    answer_bytes: Callable[[int, int], int]


@dataclass(frozen=True, eq=False)
class Session:
    """A run that workers work for: what they are opened with, how many work for it, and how long one may be silent."""

    opening: tuple[Any, ...]
    limit: int | None
    patience: float

    def of(self, limit: int) -> Session:
        """The session with another number of workers."""
        return replace(self, limit=limit)


class WorkerPool:
    """Long-lived workers on the nodes of a cluster."""

    def __init__(self, ray: Any, per_worker: dict[str, float]) -> None:
        self.ray, self.per_worker, self.connection = ray, dict(per_worker), connection(ray)
        self.workers: list[PooledWorker] = []  # ready to work
        self.starting: list[PooledWorker] = []
        self.sessions: dict[int, Session] = {}
        self.others: dict[tuple[int, str], Any] = {}  # further sets of clients
        self.lost_in_turn: dict[str, int] = {}  # workers of a node that ended without an answer
        self.left_out: dict[str, str] = {}  # nodes that get no work, and why
        self.told: set[str] = set()
        self._sent: weakref.WeakKeyDictionary[Any, Any] = weakref.WeakKeyDictionary()  # data in the object store
        self._looked = 0.0
        self._next = 0
        self._actors: list[Any] = []
        weakref.finalize(self, _kill_all, self.ray, self._actors)
        self.answers: dict[str, int] = {}  # calls that each node has answered

    # ------------------------------------------------------------------------------------------------------ workers and nodes

    def look(self, *, now: bool = False) -> None:
        """Take in workers that are ready; about once a second, ask for more where nodes have room."""
        if self.starting:
            self._take_in(0.0)
        if not now and time.monotonic() - self._looked < _LOOK_SECONDS:
            return
        self._looked = time.monotonic()
        limits = [session.limit for session in self.sessions.values()]
        most = None if None in limits else max((limit for limit in limits if limit is not None), default=0)
        for node in self.ray.nodes():
            name = node["NodeID"]
            if not node["Alive"] or name in self.left_out:
                continue
            here = sum(worker.node == name for worker in (*self.workers, *self.starting))
            for _ in range(_room(node["Resources"], self.per_worker) - here):
                if most is None or len(self.workers) + len(self.starting) < most:
                    self._start(name)

    def _start(self, node: str) -> None:
        """Ask Ray for a worker on a node."""
        from ray.util.scheduling_strategies import NodeAffinitySchedulingStrategy

        place = NodeAffinitySchedulingStrategy(node_id=node, soft=False)
        threads = max(1, int(self.per_worker.get("num_cpus", 1)))
        kind = self.ray.remote(RayWorker).options(
            **self.per_worker, scheduling_strategy=place, max_restarts=0, enable_task_events=False
        )
        actor = kind.remote(threads, logging.getLogger().level)
        self._actors.append(actor)
        self.starting.append(PooledWorker(actor, node, actor.hello.remote()))

    def _wait_for_workers(self, wanted: int | None) -> None:
        """Wait until there is a worker, and a while for the others."""
        began = time.monotonic()
        until = began + (_OTHERS_SECONDS if self.workers else _START_SECONDS)
        self.look(now=True)
        while self.starting and (wanted is None or len(self.workers) < wanted) and time.monotonic() < until:
            had = len(self.workers)
            self._take_in(0.2, first=True)
            if self.workers and not had:
                until = min(until, time.monotonic() + _OTHERS_SECONDS)
        if not self.workers:
            asked = ", ".join(f"{value:g} {name}" for name, value in self.per_worker.items())
            all_of_it = self.ray.cluster_resources()
            has = ", ".join(f"{all_of_it[name]:g} {name}" for name in ("CPU", "GPU") if name in all_of_it)
            why = "; ".join(self.left_out.values())
            raise EquipoiseError(
                f"No worker of the Ray cluster became ready in {time.monotonic() - began:.0f} s. Each asks for {asked}; the "
                f"cluster has {has or 'nothing'} in all, part of which others may use.{f' {why}.' if why else ''} Give less in "
                "per_worker, or add nodes."
            )

    def _take_in(self, seconds: float, *, first: bool = False) -> None:
        """Move workers that have answered from `starting` to `workers`; `first`: before the run, where versions must agree."""
        waiting = [worker.hello for worker in self.starting]
        ready, _ = self.ray.wait(waiting, num_returns=len(waiting), timeout=seconds)
        there = set(ready)
        for worker in [each for each in self.starting if each.hello in there]:
            self.starting.remove(worker)
            try:
                found = self.ray.get(worker.hello)
            except Exception as failure:
                text = str(failure).strip().splitlines()
                self._left(worker, f"a worker could not start on node {worker.node[:8]}: {text[-1] if text else failure!r}")
                continue
            worker.name, worker.process = f"{found['node']} ({worker.node[:6]})", int(found["process"])
            if wrong := [f"{name} {found[name]}" for name, version in versions().items() if found[name] != version]:
                here = ", ".join(f"{name} {version}" for name, version in versions().items() if found[name] != version)
                self._forget(worker)
                reason = f"Node {worker.name} has {', '.join(wrong)}, but the driver has {here}."
                fix = "Install the same versions on every node: results depend on them."
                if first:
                    raise IncompatibleParts(reason, fix)
                self.left_out[worker.node] = reason
                self.tell(f"{reason} It gets no work. {fix}")
                continue
            self.workers.append(worker)
            for session in self.sessions:
                self._open(worker, session)

    def _left(self, worker: PooledWorker, why: str) -> None:
        """A worker is gone; a node that loses several in turn, without an answer from any, gets no more work."""
        self._forget(worker)
        count = self.lost_in_turn[worker.node] = self.lost_in_turn.get(worker.node, 0) + 1
        if count >= _MOST_LOST:
            self.left_out[worker.node] = why
            self.tell(f"Node {worker.name or worker.node[:8]} is left out from now on: {why}.")
        self._looked = 0.0  # there may be room for another

    def _forget(self, worker: PooledWorker) -> None:
        for group in (self.workers, self.starting):
            if worker in group:
                group.remove(worker)
        if worker.actor in self._actors:
            self._actors.remove(worker.actor)
        _kill_all(self.ray, [worker.actor])

    def leave_out(self, node: str, why: str) -> None:
        """Give a node no more work."""
        self.left_out[node] = why
        for worker in [each for each in (*self.workers, *self.starting) if each.node == node]:
            self._forget(worker)

    def tell(self, text: str) -> None:
        """Warn of something, once."""
        if text not in self.told:
            self.told.add(text)
            notify(text)

    # --------------------------------------------------------------------------------------------------------------- sessions

    def open_session(self, simulator: Any, task: Any, data: Any, limit: int | None, patience: float) -> int:
        """A session for a task on data: every worker makes its simulator, and later ones do so when they come."""
        if data not in self._sent:
            self._sent[data] = self.ray.put(in_store(pack(data)))
        session, self._next = self._next, self._next + 1
        known = list(self.workers)
        self.sessions[session] = Session((simulator, self._sent[data], *message(task)), limit, patience)
        for worker in known:
            self._open(worker, session)
        try:
            self._wait_for_workers(limit)
            self._opened(self.workers[0], session)  # what is wrong with the task shows here
        except BaseException:
            self.close_session(session)
            raise
        return session

    def _open(self, worker: PooledWorker, session: int) -> None:
        worker.opening[session] = worker.actor.open.remote(session, *self.sessions[session].opening)
        for (owner, name), reference in self.others.items():
            if owner == session:
                worker.actor.add_clients.remote(session, name, reference)

    def _opened(self, worker: PooledWorker, session: int) -> bool:
        """Whether a worker has opened a session; what it said then is passed on."""
        reference = worker.opening.pop(session, None)
        if reference is None:
            return True
        try:
            answer: Answer = self.ray.get(reference, timeout=FIRST_SECONDS)
        except Exception as failure:
            self._left(worker, f"it was lost when it opened the data: {_first_line(failure)}")
            return False
        for text in answer.notices:
            self.tell(text)
        answer.log_here(worker.name)
        if answer.failure is not None:
            raise _named(answer, worker)
        return True

    def add_clients(self, session: int, name: str, clients: Any) -> None:
        """Send a further set of clients to the workers."""
        reference = self.others[session, name] = self.ray.put(in_store(pack(clients)))
        for worker in self.workers:
            worker.actor.add_clients.remote(session, name, reference)

    def close_session(self, session: int) -> None:
        """The run is over."""
        self.sessions.pop(session, None)
        self.others = {key: reference for key, reference in self.others.items() if key[0] != session}
        if self.ray.is_initialized() and connection(self.ray) == self.connection:  # else all workers have ended with it
            for worker in self.workers:
                worker.opening.pop(session, None)
                worker.models.pop(session, None)
                worker.actor.close.remote(session)

    # ------------------------------------------------------------------------------------------------------------------- work

    def share(self, session: int, work: Work) -> list[tuple[Node, Answer]]:
        """The answers for all pieces of a phase, each for a stretch of them, in no particular order."""
        self.look()
        waiting: list[Node] = [(0, len(work.costs))]
        asked: list[Asked] = []
        done: list[tuple[Node, Answer]] = []
        while waiting or asked:
            if waiting:
                asked += self._ask(session, work, waiting, busy={each.worker for each in asked})
                waiting = []
            answered, lost = self._collect(work.kind, asked)
            done += [(each.pieces, answer) for each, answer in answered]
            waiting += [each.pieces for each in lost]
            ended = {id(each) for each in (*lost, *(each for each, _ in answered))}
            asked = [each for each in asked if id(each) not in ended]
        return done

    def _ask(self, session: int, work: Work, waiting: Iterable[Node], busy: set[PooledWorker]) -> list[Asked]:
        """Give stretches of pieces to workers; those that have nothing to do come first."""
        asked, about = [], self.sessions[session]
        for first, last in waiting:
            ready: list[PooledWorker] = []
            while not ready:
                if not self.workers:
                    self._wait_for_workers(about.limit)
                mine = self.workers[: about.limit]
                idle = [worker for worker in mine if worker not in busy]
                ready = [worker for worker in idle or mine if self._opened(worker, session)]
            costs = work.costs[first:last]
            for worker, (begin, end) in zip(ready, share_out(costs, self._speeds(ready, work.kind)), strict=True):
                if begin == end:
                    continue
                pieces, cost = (first + begin, first + end), float(costs[begin:end].sum())
                size = work.answer_bytes(*pieces)
                parts = -(-size // (part_bytes() - 2_000))
                count = parts if size <= INLINE_BYTES else 1
                own = arguments(pack_numbers(work.own(*pieces)))
                models = [] if worker.models.get(session) == work.model_number else work.models()
                worker.models[session] = work.model_number
                references = worker.call(count).remote(*Letter(count, [work.head], models, own).arguments())
                until = time.monotonic() + worker.most_seconds(work.kind, cost, about.patience)
                asked.append(Asked(worker, pieces, cost, references if count > 1 else [references], until))
        return asked

    def _speeds(self, workers: Sequence[PooledWorker], kind: str) -> list[float]:
        known = [worker.speeds[kind] for worker in workers if kind in worker.speeds]
        usual = statistics.median(known) if known else 1.0
        return [worker.speeds.get(kind, usual) for worker in workers]

    def _collect(self, kind: str, asked: Sequence[Asked]) -> tuple[list[tuple[Asked, Answer]], list[Asked]]:
        """Wait for all, or until one is lost: the answers that came, and what is lost."""
        try:
            soonest = max(0.0, min(each.until for each in asked) - time.monotonic())
            parts = self.ray.get([reference for each in asked for reference in each.references], timeout=soonest)
            values = iter(parts)
            return self._sorted(kind, [(each, [next(values) for _ in each.references]) for each in asked])
        except self.ray.exceptions.RayError:
            pass
        answered, lost = [], []
        for each in asked:  # one at least is late or lost: look at each
            ready, _ = self.ray.wait(each.references, num_returns=len(each.references), timeout=0)
            if len(ready) == len(each.references):
                try:
                    answered.append((each, self.ray.get(each.references)))
                except self.ray.exceptions.RayError as failure:
                    self.tell(f"A worker on {each.worker.name} was lost: {_first_line(failure)} Its pieces go to others.")
                    self._left(each.worker, _first_line(failure))
                    lost.append(each)
            elif time.monotonic() >= each.until:
                self.tell(f"A worker on {each.worker.name} does not answer, and is given up. Its pieces go to others.")
                self._left(each.worker, "it did not answer in time")
                lost.append(each)
        good, bad = self._sorted(kind, answered)
        return good, [*lost, *bad]

    def _sorted(self, kind: str, parts: Iterable[tuple[Asked, list[Any]]]) -> tuple[list[tuple[Asked, Answer]], list[Asked]]:
        """Answers with values, and work that must be given to others; an error of the work itself is raised."""
        good, lost = [], []
        for each, values in parts:
            answer: Answer = opened(values)
            worker = each.worker
            for text in answer.notices:
                self.tell(f"{worker.name}: {text}")
            answer.log_here(worker.name)
            if answer.chunk_size is not None:
                self.tell(
                    f"Node {worker.name} ran out of memory, and works in chunks of {answer.chunk_size} clients from now on. "
                    "The last bits of the result may differ from those of a run with other workers."
                )
            if answer.out_of_memory and len(set(self.nodes())) > 1:
                self.tell(f"Node {worker.name} has too little memory for one client. It gets no more work.")
                self.leave_out(worker.node, "it ran out of memory")
                lost.append(each)
                continue
            if answer.failure is not None:
                raise _named(answer, worker)
            worker.took(kind, each.cost, answer.seconds)
            self.lost_in_turn.pop(worker.node, None)
            self.answers[worker.node] = self.answers.get(worker.node, 0) + 1
            good.append((each, answer))
        return good, lost

    def nodes(self) -> list[str]:
        """Ray's name of each worker's node."""
        return [worker.node for worker in self.workers]

    def worker_memory(self) -> int:
        """Bytes of memory that a worker has of its own: the most of all."""
        found: list[int] = self.ray.get([worker.actor.memory.remote() for worker in self.workers])
        return max(found)


def _room(resources: dict[str, float], per_worker: dict[str, float]) -> int:
    """How many workers a node with these resources has room for.

    >>> _room({"CPU": 4.0, "GPU": 2.0}, {"num_cpus": 1}), _room({"CPU": 4.0, "GPU": 2.0}, {"num_cpus": 1, "num_gpus": 1})
    (4, 2)
    """
    names = {"num_cpus": "CPU", "num_gpus": "GPU"}
    return int(min(resources.get(names[name], 0.0) / count for name, count in per_worker.items() if count))


def _kill_all(ray: Any, actors: list[Any]) -> None:
    """End workers, if Ray is still there."""
    if ray.is_initialized():
        for actor in actors:
            with suppress(Exception):  # it may be gone already
                ray.kill(actor, no_restart=True)
    actors.clear()


def _first_line(failure: BaseException) -> str:
    """An error of Ray's in one line."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return lines[0] if lines else type(failure).__name__


def _named(answer: Answer, worker: PooledWorker) -> BaseException:
    """The error of remote work, which also says where it was."""
    failure = answer.failure or RuntimeError("no answer")
    failure.add_note(f"This happened in a worker on {worker.name}:\n{answer.trace}")
    return failure
