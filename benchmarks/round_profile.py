"""What a round of many small clients consists of on a GPU: `python benchmarks/round_profile.py [--models …] [--all]`.

For each model: ms per round by turns with the careful loop, after a short sleep and in a row, each cut into what the host does
before it starts the graph, how long the device works, and the rest; the device's kernels; and the same rounds without the
techniques that can be turned off. `--all` adds every model of the zoo: ms per round in a row, and by how much an update of a
few clients differs from the loop engine's in float64. `--minutes` ends it in time: what is left is named.
"""

from __future__ import annotations

import argparse
import statistics
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
import zoo

import equipoise as eq
from equipoise.engines.simulator.cuda import deferred_products, step_buffers
from models import OurRounds, agreement, alternated, careful_rounds, interval, seconds

QUICK = ("MLP", "MLP, dropout", "LSTM, 2 layers", "Transformer, dropout", "tabular", "LoRA decoder")
STAMPS: dict[str, list[float]] = {}


@contextmanager
def stamped() -> Iterator[None]:
    """Notes when a round's host is where, and how long its graph takes on the device."""
    buffers = step_buffers.StepBuffers
    load, whole, answer = buffers.load, buffers.whole_chunk, step_buffers.ChunkAnswer.answer
    begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))

    def stamped_load(self: Any, *args: Any) -> None:
        STAMPS["load"].append(time.perf_counter())
        load(self, *args)
        STAMPS["loaded"].append(time.perf_counter())

    def stamped_whole(self: Any, plan: Any) -> Any:
        begin.record()
        result = whole(self, plan)
        end.record()
        STAMPS["started"].append(time.perf_counter())
        return result

    def stamped_answer(self: Any) -> Any:
        result = answer(self)
        STAMPS["answered"].append(time.perf_counter())
        STAMPS["device"].append(begin.elapsed_time(end) / 1e3)
        return result

    try:
        buffers.load, buffers.whole_chunk = stamped_load, stamped_whole
        step_buffers.ChunkAnswer.answer = stamped_answer
        yield
    finally:
        buffers.load, buffers.whole_chunk, step_buffers.ChunkAnswer.answer = load, whole, answer


def stages(ours: OurRounds, before: Callable[[], None] | None, rounds: int) -> str:
    """Medians of the stages of rounds, in ms, each after something else."""
    parts: dict[str, list[float]] = {name: [] for name in ("all", "until load", "load", "start", "wait", "after", "device")}
    for _ in range(rounds):
        STAMPS.update({name: [] for name in ("load", "loaded", "started", "answered", "device")})
        if before is not None:
            before()
        torch.cuda.synchronize()
        began = time.perf_counter()
        ours()
        torch.cuda.synchronize()
        done = time.perf_counter()
        times = [began, *(STAMPS[name][-1] for name in ("load", "loaded", "started", "answered")), done]
        for name, first, second in zip(list(parts)[1:6], times, times[1:], strict=False):
            parts[name].append(1e3 * (second - first))
        parts["all"].append(1e3 * (done - began))
        parts["device"].append(1e3 * STAMPS["device"][-1])
    return "  ".join(f"{name} {statistics.median(values):.3f}" for name, values in parts.items())


def in_a_row(ours: OurRounds, rounds: int = 50) -> float:
    """Mean ms of rounds in a row."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(rounds):
        ours()
    torch.cuda.synchronize()
    return 1e3 * (time.perf_counter() - began) / rounds


def kernels(ours: OurRounds) -> None:
    """The device's work in three rounds, by kernel."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as seen:
        for _ in range(3):
            ours()
        torch.cuda.synchronize()
    rows: dict[str, list[float]] = {}
    for event in seen.events():
        if str(event.device_type).endswith("CUDA"):
            rows.setdefault(event.name, []).append(event.time_range.elapsed_us())
    everything = sum(map(sum, rows.values())) / 3
    print(f"  kernels: {sum(map(len, rows.values())) / 3:.0f} per round, together {everything:.0f} us")
    for name, times in sorted(rows.items(), key=lambda row: -sum(row[1]))[:28]:
        print(f"    {sum(times) / 3:8.1f} us  {len(times) / 3:6.1f} x {statistics.median(times):6.2f}  {name[:150]}")


def warm(name: str, precision: str = "float32") -> OurRounds:
    """Rounds of a model, after those that measure and capture."""
    entry = zoo.ZOO[name]
    ours = OurRounds(entry, "cuda", entry.on_gpu, precision)
    for _ in range(5):
        ours()
    return ours


def without(name: str) -> None:
    """Rounds in a row with techniques turned off, one after another and together."""
    seen, at_once = deferred_products.ProductsSeen.gradients, step_buffers._AT_ONCE
    for label, deferred, gathered in (("all", 1, 1), ("no deferral", 0, 1), ("no gathering", 1, 0), ("neither", 0, 0)):
        try:
            if not deferred:
                deferred_products.ProductsSeen.gradients = lambda self, gradients: frozenset()
            if not gathered:
                step_buffers._AT_ONCE = 0
            ours = warm(name)
            found = min(in_a_row(ours) for _ in range(3))
            products = {key: len(value) for key, value in ours.engine.step_graphs.buffers.products.items()}
            print(f"  in a row, {label}: {found:.3f} ms, deferred products {products}", flush=True)
        finally:
            deferred_products.ProductsSeen.gradients, step_buffers._AT_ONCE = seen, at_once


def by_turns(name: str, budget: float, precision: str = "float32") -> None:
    """As benchmarks/models.py has it."""
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = precision == "tf32"
    ours, entry = warm(name, precision), zoo.ZOO[name]
    careful, _ = careful_rounds(entry, "cuda", entry.on_gpu)
    mine, theirs, *_ = alternated(ours, careful, "cuda", budget)
    ratio, low, high = interval(mine, theirs)
    print(
        f"{name} {precision}: by turns {1e3 * statistics.median(mine):.2f} ms (of {len(mine)}: "
        f"{', '.join(f'{1e3 * each:.2f}' for each in sorted(mine)[:12])}), careful {1e3 * statistics.median(theirs):.0f} ms, "
        f"ratio {ratio:.2f} [{low:.2f}, {high:.2f}]", flush=True,
    )  # fmt: skip
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False


def profiled(name: str, budget: float) -> None:
    """All about one model."""
    by_turns(name, budget)
    few = zoo.careful_round(zoo.ZOO[name], "cuda", 10)
    few()
    ours = warm(name)
    with stamped():
        print("  after the careful loop:", stages(ours, few, 15), flush=True)
        print("  after a sleep of 10 ms:", stages(ours, lambda: time.sleep(0.01), 15), flush=True)
        print("  in a row:              ", stages(ours, None, 30), flush=True)
    without(name)
    kernels(ours)


def regression(name: str, until: float) -> None:
    """Whether a model is as fast as it was, and right."""
    ours = warm(name)
    found = [seconds(ours, "cuda") for _ in range(6)]
    text = f"{name}: {1e3 * statistics.median(found):.2f} ms in a row, {' and '.join(ours.engine.paths_taken)}"
    del ours
    torch.cuda.empty_cache()
    if name in QUICK and time.perf_counter() < until:
        text += f", differs by {agreement(zoo.ZOO[name], 'cuda', torch.float32, 'float32'):.1e}"
    print(text, flush=True)


def tried(run: Callable[..., None], *args: Any) -> None:
    """Go on with the rest if one figure fails."""
    try:
        run(*args)
    except Exception:
        traceback.print_exc()


def main() -> None:
    """Measure and print."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--models", default="MLP|MLP, dropout", help="names of the zoo, separated by |")
    parser.add_argument("--seconds", type=float, default=10.0, help="for the turns of one model")
    parser.add_argument("--minutes", type=float, default=4.0)
    parser.add_argument("--all", action="store_true")
    options = parser.parse_args()
    until = time.perf_counter() + 60 * options.minutes
    torch.backends.cuda.matmul.allow_tf32 = torch.backends.cudnn.allow_tf32 = False
    warnings.simplefilter("ignore", eq.errors.EquipoiseNotice)
    for name in options.models.split("|"):
        tried(profiled, name, options.seconds)
    if options.all:
        for precision in ("float32", "tf32"):
            for name in ("ResNet-18, GroupNorm", "ResNet-18, BatchNorm"):
                tried(by_turns, name, 2.5, precision)
        for name in zoo.ZOO:
            if time.perf_counter() > until:
                print("no time for", name)
            else:
                tried(regression, name, until)


if __name__ == "__main__":
    main()
