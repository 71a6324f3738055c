"""How fast a round is, on a CPU or a GPU: one table, how cost grows, and what a plain PyTorch loop needs for the same work.

    python benchmarks/speed.py [--device cpu|cuda] [--quick]

Rows are medians over passes; a pass is as many rounds in a row as fill some tenths of a second, run as `train` runs them. On a
CPU every contender has a process of its own and those that are compared take turns. A round that takes seconds is timed once:
the column "rounds" says how many were timed. "roofline" is the share of the time that counted products or bytes would need at
the machine's measured rates (benchmarks/roofline.py says what is counted), "padding" the share of computed example slots that
held no example in the last round, "peak MB" the most memory of the whole process with torch and data (CPU), or that torch
took on the device (GPU). Absolute figures are those of this machine and this hour; ratios carry further.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from machine import RateBook
from processes import Effort, Measurement, Process, Spec, one_by_one, processes, take_turns
from roofline import Rates, slope
from workloads import MODELS, SIZES, WORKLOADS, Workload, grid_workload, precisions, scaling_workload

Row = dict[str, Any]
TABLE_SHARE = 0.7  # of the time; the rest is for what comes after the table


@dataclass(frozen=True)
class Plan:
    """What is measured, and for how long."""

    device: str
    cores: int
    quick: bool
    deadline: float  # of the table, on time.monotonic's clock
    end: float  # of everything
    passes: int
    seconds: float

    @property
    def on_gpu(self) -> bool:
        return self.device != "cpu"

    @property
    def clients_per_round(self) -> tuple[int, ...]:
        return (2, 10) if self.quick else (10, 100, 1000)

    def effort(self, deadline: float | None = None, *, passes: int | None = None, with_engine: bool = False) -> Effort:
        longest = 0.5 if self.quick else 5.0
        return Effort(passes or self.passes, self.seconds, longest, deadline or self.end, with_engine)

    def spec(self, workload: Workload, contender: str = "equipoise simulator", threads: int | None = None) -> Spec:
        precision = "float32" if self.on_gpu and contender == "equipoise simulator" and precisions() != (None,) else None
        return Spec(workload, contender, threads or self.cores, self.device, precision)


def shrunk(workload: Workload, plan: Plan) -> Workload:
    """The workload itself, or for --quick one with few clients that says so."""
    if not plan.quick:
        return workload
    return replace(workload, title=f"{workload.title} (here 5 of 20 clients)", clients=20, clients_per_round=5)


def row_of(one: Measurement, rates: Rates | None) -> Row:
    """What was measured, as a row of the table: medians over the passes, each with the work counted in it."""
    spec, workload = one.spec, one.spec.workload
    row: Row = {
        "workload": workload.title, "sizes": workload.sizes, "clients_per_round": workload.clients_per_round,
        "examples": workload.examples, "batch_size": workload.batch_size, "engine": engine_name(one), "threads": spec.threads,
        "precision": spec.precision, "failure": str(one.failure) if one.failure else None,
    }  # fmt: skip
    if one.made is None or not one.timings:
        return row
    passes = one.timings
    row |= {
        "rounds_timed": sum(t.rounds for t in passes),
        "ms_per_round": statistics.median(1000 * t.seconds / t.rounds for t in passes),
        "ms_fastest": min(1000 * t.seconds / t.rounds for t in passes),
        "ms_slowest": max(1000 * t.seconds / t.rounds for t in passes),
        "updates_per_second": statistics.median(t.clients / t.seconds for t in passes),
        "samples_per_second": statistics.median(t.examples / t.seconds for t in passes),
        "peak_mb": passes[-1].peak_mb,
        "padding": passes[-1].waste,
        "parameters": one.made.demand.parameters,
        "flops_per_example": one.made.demand.flops_per_example,
    }
    if one.engine_seconds:
        row["engine_ms"] = 1000 * statistics.median(one.engine_seconds)
    if rates is not None:
        floors = [rates.floor(one.made.demand, t.examples, t.steps, t.rounds) for t in passes]
        row["roofline_share"] = statistics.median(f / t.seconds for (f, _), t in zip(floors, passes, strict=True))
        row["limit"] = floors[-1][1]
    return row


def engine_name(one: Measurement) -> str:
    spec = one.spec
    name = {"equipoise simulator": "simulator", "equipoise loop": "loop", "plain PyTorch loop": "plain PyTorch"}.get(
        spec.contender, spec.contender
    )
    if name == "simulator" and one.made is not None and one.made.works_by == "loop":
        name = "simulator (loop)"  # the model could not be vectorised
    where = spec.precision if spec.device != "cpu" else f"{spec.threads} thr."
    return f"{name}, {where}" if where else name


@dataclass(frozen=True)
class Column:
    heading: str
    key: str
    width: int
    form: str = ""  # of str.format; "" for text, which stands on the left; "ms" for times
    gpu_only: bool = False


COLUMNS = (
    Column("workload", "workload", 16),
    Column("sizes", "sizes", 11),
    Column("clients", "clients_per_round", 7, "{:d}"),
    Column("engine", "engine", 24),
    Column("rounds", "rounds_timed", 7, "{:d}"),
    Column("ms/round", "ms_per_round", 10, "ms"),
    Column("engine ms", "engine_ms", 10, "ms", gpu_only=True),
    Column("updates/s", "updates_per_second", 11, "{:,.0f}"),
    Column("samples/s", "samples_per_second", 13, "{:,.0f}"),
    Column("roofline", "roofline_share", 9, "{:.1%}"),
    Column("limit", "limit", 10, "{:>}"),
    Column("padding", "padding", 8, "{:.1%}"),
    Column("peak MB", "peak_mb", 9, "{:,.0f}"),
    Column("× plain", "times_plain", 8, "{:.2f}"),
)


def shown(value: Any, form: str) -> str:
    """A cell: a dash for what was not measured, and times short enough to read."""
    if value is None:
        return "–"
    if form == "ms":
        return f"{value:.3f}" if value < 10 else f"{value:.1f}"
    return form.format(value) if form else str(value)


def print_row(row: Row | None, *, on_gpu: bool) -> None:
    """A line of the table; its headings for None."""
    cells = []
    for column in COLUMNS:
        if column.gpu_only and not on_gpu:
            continue
        text = column.heading if row is None else shown(row.get(column.key), column.form)
        cells.append(f"{text:>{column.width}}" if column.form else f"{text:<{column.width}}")
        if row is not None and column.key == "engine" and "ms_per_round" not in row:
            cells.append(f"  {row['failure']}")
            break
    print(" ".join(cells).rstrip(), flush=True)


def table(plan: Plan, book: RateBook) -> list[Row]:
    """Every model at three numbers of clients per round, with equal and log-normal sizes."""
    rows: list[Row] = []
    for place, model in enumerate(MODELS):
        now = time.monotonic()
        effort = plan.effort(now + max(0.0, plan.deadline - now) / (len(MODELS) - place), with_engine=plan.on_gpu)
        specs = cells(plan, model)
        with nullcontext() if plan.on_gpu else processes([spec.threads for spec in specs]) as where:
            for one in one_by_one(specs, effort) if where is None else take_turns(specs, effort, where):
                rows.append(row_of(one, book.of(one.spec)))
                print_row(rows[-1], on_gpu=plan.on_gpu)
    return rows


def cells(plan: Plan, model: str) -> list[Spec]:
    """What is measured of one model; on a GPU equal sizes at every precision, log-normal ones in float32 alone."""
    population = 20 if plan.quick else 2000
    equal, uneven = (
        [
            plan.spec(grid_workload(model, count, sizes, clients=population, on_gpu=plan.on_gpu))
            for count in plan.clients_per_round
        ]
        for sizes in SIZES
    )
    others = precisions()[1:] if plan.on_gpu else ()
    return [*equal, *uneven, *(replace(spec, precision=precision) for precision in others for spec in equal)]


def against_plain(plan: Plan, book: RateBook, name: str, where: Sequence[Process] | None) -> list[Row]:
    """The simulator beside a plain loop of PyTorch with one thread and with all (on a GPU there is but one setting)."""
    workload = replace(shrunk(WORKLOADS[name], plan), title={"linear": "linear", "convnet": "ConvNet"}[name])
    if plan.on_gpu:
        specs = [plan.spec(workload, "plain PyTorch loop"), plan.spec(workload)]
    else:
        plain = [plan.spec(workload, "plain PyTorch loop", threads) for threads in sorted({1, plan.cores})]
        specs = [*plain, plan.spec(workload, "equipoise loop", 1), plan.spec(workload)]
    measured = in_turns(plan, specs, where, passes=2 if plan.quick else 5)
    rows = [row_of(one, book.of(one.spec)) for one in measured]
    pairs = list(zip(measured, rows, strict=True))
    plain_times = [r["ms_per_round"] for m, r in pairs if m.spec.contender == "plain PyTorch loop" and "ms_per_round" in r]
    for row in rows:
        if plain_times and "ms_per_round" in row:
            row["times_plain"] = min(plain_times) / row["ms_per_round"]
        print_row(row, on_gpu=plan.on_gpu)
    return rows


def in_turns(
    plan: Plan, specs: Sequence[Spec], where: Sequence[Process] | None, passes: int | None = None
) -> list[Measurement]:
    """Measure in turns: in the processes given, or in new ones."""
    effort = plan.effort(passes=passes)
    if where is not None:
        return take_turns(specs, effort, where[: len(specs)])
    with processes([spec.threads for spec in specs]) as new:
        return take_turns(specs, effort, new)


def many_clients(plan: Plan, book: RateBook, where: Sequence[Process] | None) -> Row:
    workload = shrunk(WORKLOADS["many clients"], plan)
    (one,) = in_turns(plan, [plan.spec(workload)], where, passes=2)
    row = row_of(one, book.of(one.spec))
    said = row["failure"] or f"{shown(row['ms_per_round'], 'ms')} ms/round, peak memory {row['peak_mb']:,.0f} MB"
    print(f"{workload.title}: {said}", flush=True)
    return row


def family(plan: Plan, name: str, where: Sequence[Process] | None) -> Row:
    """What a family of four tails costs, as a share of four runs."""
    workload = shrunk(WORKLOADS[name], plan)
    specs = [plan.spec(workload, contender) for contender in ("four runs", "family of four")]
    apart, together = (row_of(one, None) for one in in_turns(plan, specs, where))
    result: Row = {"workload": workload.title, "four_runs_ms": apart.get("ms_per_round"),
                   "family_ms": together.get("ms_per_round"), "failure": apart["failure"] or together["failure"]}  # fmt: skip
    if result["failure"]:
        print(f"{workload.title}: {result['failure']}", flush=True)
        return result
    result["ratio"] = result["family_ms"] / result["four_runs_ms"]
    both = f"{shown(result['family_ms'], 'ms')} against {shown(result['four_runs_ms'], 'ms')} ms/round"
    print(f"{workload.title}: a family costs {result['ratio']:.2f} of four runs ({both})", flush=True)
    return result


def growth(plan: Plan, rows: Sequence[Row], where: Sequence[Process] | None) -> list[Row]:
    """Slopes of log time over log size, on the linear workload: by clients (from the table), examples and parameters."""
    linear = [
        r for r in rows if r["workload"] == "linear" and r["sizes"] == "equal" and r["precision"] in (None, "float32")
    ]  # fmt: skip
    some = {"clients_per_round": 5, "clients": 10} if plan.quick else {}
    examples, features = ((25, 100), (98, 784)) if plan.quick else ((25, 50, 100, 200, 400), (98, 196, 392, 784, 1568))
    by_examples = [plan.spec(scaling_workload(examples=count, **some)) for count in examples]
    by_features = [plan.spec(scaling_workload(features=count, **some)) for count in features]
    print("\nHow time per round grows, linear workload (time ~ size^slope):", flush=True)
    return [
        slopes("clients per round", [r["clients_per_round"] for r in linear], [r.get("ms_per_round") for r in linear]),
        slopes("examples per client", examples, times(plan, by_examples, where)),
        slopes("parameters", [(count + 1) * 62 for count in features], times(plan, by_features, where)),
    ]


def times(plan: Plan, specs: Sequence[Spec], where: Sequence[Process] | None) -> list[float | None]:
    """Milliseconds per round of each; on a GPU one after another, to start no more processes."""
    if where is None:
        measured = in_turns(plan, specs, None)
    else:
        measured = [take_turns([spec], plan.effort(), where[:1])[0] for spec in specs]
    return [row_of(one, None).get("ms_per_round") for one in measured]


def slopes(what: str, sizes: Sequence[int], milliseconds: Sequence[float | None]) -> Row:
    """The slope over all sizes that were measured, and over the two largest."""
    known = [(size, ms) for size, ms in zip(sizes, milliseconds, strict=True) if ms is not None]
    result: Row = {"over": what, "points": known, "slope": None, "last_slope": None}
    line = "   ".join(f"{size:,}: {shown(ms, 'ms')} ms" for size, ms in known)
    if len(known) > 1:
        result["slope"], result["last_slope"] = slope(*zip(*known, strict=True)), slope(*zip(*known[-2:], strict=True))
        line += f"   slope {result['slope']:.2f}, from {known[-2][0]:,} to {known[-1][0]:,} {result['last_slope']:.2f}"
    print(f"{what:<20} {line or 'not measured: no time was left'}", flush=True)
    return result


def asked() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--quick", action="store_true", help="a small version that only shows that everything runs")
    parser.add_argument("--passes", type=int, default=3)
    parser.add_argument("--seconds", type=float, default=None, help="how long a pass is (0.4 on a CPU, 0.2 on a GPU)")
    parser.add_argument("--budget", type=float, default=None, help="seconds in all (660 on a CPU, 220 on a GPU); what does "
                        "not fit is left out and said so")  # fmt: skip
    parser.add_argument("--out", type=Path, default=None, help="bench/speed.json, or bench/speed-gpu.json")
    return parser.parse_args()


def main() -> None:
    options = asked()
    on_gpu = options.device != "cpu"
    if on_gpu and not torch.cuda.is_available():
        raise SystemExit("no CUDA device on this machine")
    began = time.monotonic()
    budget = options.budget or (220.0 if on_gpu else 660.0)
    plan = Plan(
        device=options.device,
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        quick=options.quick,
        deadline=began + TABLE_SHARE * budget,
        end=began + budget,
        passes=1 if options.quick else options.passes,
        seconds=options.seconds or (0.05 if options.quick else 0.2 if on_gpu else 0.4),
    )
    book = RateBook(plan.device, plan.cores, quick=plan.quick)
    print(*book.lines(), "", sep="\n", flush=True)
    print_row(None, on_gpu=on_gpu)
    rows = table(plan, book)
    result: Row = {"machine": book.machine, "rates": book.as_json(), "rows": rows, "quick": plan.quick}
    # On a GPU two processes serve all that follows: starting one takes longer than measuring in it.
    with processes([plan.cores] * 2) if on_gpu else nullcontext() as where:
        result["against_plain"] = [r for name in ("linear", "convnet") for r in against_plain(plan, book, name, where)]
        print()
        result["many_clients"] = many_clients(plan, book, where)
        result["families"] = [family(plan, name, where) for name in ("tails 10", "tails 100")]
        result["growth"] = growth(plan, rows, where)
    result["seconds"] = time.monotonic() - began
    out = options.out or Path("bench/speed-gpu.json" if on_gpu else "bench/speed.json")
    out.parent.mkdir(parents=True, exist_ok=True)
    out.write_text(json.dumps(result, indent=1))
    print(f"\n{result['seconds']:.0f} s in all. Written to {out}")


if __name__ == "__main__":
    main()
