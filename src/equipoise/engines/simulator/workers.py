"""Processes that train clients side by side on a CPU, each with one torch thread, its own model and its own memory.

They are forked, so that model and data are theirs without a copy; tensors of a round pass through shared memory, and only a
few kilobytes through a pipe. One torch thread each beats several threads inside every small product, which wait for each
other at every step; and processes do not wait for each other's Python.
"""

from __future__ import annotations

import copyreg
import io
import math
import mmap
import multiprocessing
import os
import pickle
import signal
import sys
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from multiprocessing.connection import Connection
from typing import Any, TypeVar

import torch
from torch import Tensor

from equipoise.core.memory import all_memory
from equipoise.engines.simulator.local_work import Worker

T = TypeVar("T")
R = TypeVar("R")


class Workers:
    """`share(work, parts)` calls work(worker, part) for every part, side by side; part 0 is done by this process.

    `work` is a function of a module. If a process cannot do its part, for whatever reason, this one does it.
    """

    def __init__(self, worker: Worker, count: int = 1) -> None:
        self.own, self.count = worker, count
        self._others: list[_Process] | None = None

    def share(self, work: Callable[[Worker, T], R], parts: Sequence[T]) -> list[R]:
        """The results in the order of the parts; tensors of the other processes' are valid until the next call."""
        if len(parts) == 1:
            return [work(self.own, parts[0])]
        others = self._started()
        asked = [i < len(others) and others[i].send((work, part)) for i, part in enumerate(parts[1:])]
        try:
            with one_thread():
                results = [work(self.own, parts[0])]
                for i, part in enumerate(parts[1:]):
                    answer = others[i].receive() if asked[i] else NO_ANSWER
                    results.append(work(self.own, part) if answer is NO_ANSWER else answer)
        except BaseException:  # answers may be under way that nobody will read
            self.stop()
            raise
        if not all(process.alive for process in others):
            self.stop()
            self.count = 1
        return results

    def alone(self) -> AbstractContextManager[None]:
        """For the time of a round with several processes: this one then uses one torch thread. A second one spins for a while
        after every operation, waiting for the next, and would take a core from the others.
        """
        return one_thread() if self.count > 1 else nullcontext()

    def _started(self) -> list[_Process]:
        if self._others is None:
            self._others = []
            for _ in range(self.count - 1):
                process = _Process.start(self.own, self._others)
                if process is None:
                    break
                self._others.append(process)
            self._stop = weakref.finalize(self, _stop_all, self._others)
        return self._others

    def stop(self) -> None:
        """End the other processes; they are started again when there is work to share."""
        if self._others is not None:
            self._stop()
            self._others = None


NO_ANSWER: Any = object()  # stands for an answer that did not come


@contextmanager
def threads(count: int) -> Iterator[None]:
    """Work inside uses `count` torch threads."""
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def one_thread() -> AbstractContextManager[None]:
    """Work inside uses one torch thread."""
    return threads(1)


def can_fork() -> bool:
    """Whether this process can have workers: not on systems without a safe fork, nor beside gRPC, whose threads forbid it."""
    return sys.platform == "linux" and "grpc" not in sys.modules and not multiprocessing.current_process().daemon


class _Process:
    """A forked process that answers calls."""

    def __init__(self, process: Any, pipe: Connection, there: SharedMessages, back: SharedMessages) -> None:
        self.process, self.pipe, self.there, self.back, self.alive = process, pipe, there, back, True

    @classmethod
    def start(cls, worker: Worker, before: Sequence[_Process]) -> _Process | None:
        """A new process; None if this machine refuses it."""
        if not can_fork():
            return None
        try:
            context = multiprocessing.get_context("fork")
            ours, theirs = context.Pipe()
            there, back = SharedMessages(), SharedMessages()
            closed = [ours, *(process.pipe for process in before)]  # or the death of this process would go unnoticed
            process = context.Process(target=_serve, args=(worker, theirs, there, back, closed), daemon=True)
            with warnings.catch_warnings():  # Python ≥ 3.12 warns of threads; the child runs none but its own
                warnings.simplefilter("ignore", DeprecationWarning)
                process.start()
            theirs.close()
        except (OSError, AssertionError):
            return None
        return cls(process, ours, there, back)

    def send(self, message: object) -> bool:
        """Whether the message could be sent."""
        try:
            self.pipe.send_bytes(self.there.dumps(message))
        except Exception:  # what cannot be pickled is done here; a process that is gone is noticed by the caller
            self.alive = self.process.is_alive()
            return False
        return True

    def receive(self) -> Any:
        try:
            good, answer = self.back.loads(self.pipe.recv_bytes())
        except (EOFError, OSError):
            self.alive = False
            return NO_ANSWER
        return answer if good else NO_ANSWER


def _stop_all(processes: list[_Process]) -> None:
    for process in processes:
        process.pipe.close()  # it reads the end of the pipe and ends
    for process in processes:
        process.process.join(timeout=5)
        if process.process.is_alive():
            process.process.kill()
    processes.clear()


def _serve(worker: Worker, pipe: Connection, there: SharedMessages, back: SharedMessages, closed: Sequence[Connection]) -> None:
    """The life of a process: answer calls until the pipe ends."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the main process decides what an interruption means
    for connection in closed:
        connection.close()
    torch.set_num_threads(1)
    worker = worker.renewed()
    while True:
        try:
            message = pipe.recv_bytes()
        except (EOFError, OSError):
            os._exit(0)
        try:
            work, part = there.loads(message)
            answer = back.dumps((True, work(worker, part)))
        except Exception:  # the main process does it again, and so raises what is to be raised
            answer = back.dumps((False, None))
        try:
            pipe.send_bytes(answer)
        except OSError:
            os._exit(0)


class SharedMessages:
    """Messages whose tensors lie in memory that two processes share. One message is valid until the next."""

    def __init__(self) -> None:
        self._memory, self._used = _reserved(), 0
        self._bytes = torch.frombuffer(self._memory, dtype=torch.uint8)

    def dumps(self, message: object) -> bytes:
        """The message without its tensors, which go to the shared memory."""
        self._used = 0
        out = io.BytesIO()
        pickler = pickle.Pickler(out, protocol=5)
        pickler.dispatch_table = copyreg.dispatch_table | {Tensor: self._placed}
        pickler.dump(message)
        return out.getvalue()

    def loads(self, message: bytes) -> Any:
        """The message that the other process has written."""
        _MemoryInUse.memory = self
        return pickle.loads(message)  # noqa: S301 (our own other half wrote it)

    def _placed(self, value: Tensor) -> Any:
        """Put a tensor into the memory; how it is read there."""
        if value.device.type != "cpu" or value.layout is not torch.strided:
            return value.__reduce_ex__(5)  # type: ignore[no-untyped-call]
        if 0 < value.nbytes <= _SMALL and value.dtype in _PLAIN:
            return _read_sent, (value.detach().numpy().tobytes(), tuple(value.shape), value.dtype)
        start, self._used = self._used, -(-(self._used + value.nbytes) // 64) * 64
        if self._used > len(self._bytes):
            raise MemoryError("more than the shared memory holds")
        self.view(start, tuple(value.shape), value.dtype).copy_(value.detach())
        return _read_shared, (start, tuple(value.shape), value.dtype)

    def view(self, start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """The tensor at a place."""
        count = math.prod(shape) * dtype.itemsize
        return self._bytes[start : start + count].view(dtype).view(shape)


class _MemoryInUse:
    """The memory of the message that is being read."""

    memory: SharedMessages


_SMALL = 2**13  # bytes: such a tensor goes with the message, which takes less time
_PLAIN = (torch.int64, torch.float64, torch.float32)


def _read_sent(values: bytes, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return torch.frombuffer(bytearray(values), dtype=dtype).view(shape)


def _read_shared(start: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    return _MemoryInUse.memory.view(start, shape, dtype)


def _reserved() -> mmap.mmap:
    """Shared memory as large as the machine's; it takes only what is used."""
    size = all_memory()
    flags = mmap.MAP_SHARED | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", 0x4000)
    while True:
        try:
            return mmap.mmap(-1, size, flags=flags)
        except OSError:
            if size < 2**24:
                raise
            size //= 2
