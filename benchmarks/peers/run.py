"""The same two workloads in other systems, each in its own environment, run alternately with ours.

    python benchmarks/peers/run.py [--only NAME …] [--workload linear|convnet] [--passes 5] [--seconds 1.0] [--setup-only]

Every system lives in processes of its own. One at a time runs a few rounds, in turn, all others stopped, so that whatever
else the machine does hits all of them alike. Ratios are medians over the passes; absolute figures are those of this machine.
What each system does, and where it differs, is in README.md beside this file.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import signal
import statistics
import sys
from pathlib import Path
from typing import Any

from contenders import Failed, System, Worker, systems
from environments import REQUIREMENTS, CannotInstall, ensure, installed
from problem import PROBLEMS

CHECKED_ROUNDS = (1, 5)  # after so many rounds the losses of all systems are compared
LOSS_TOLERANCE = 0.03  # relative; cohorts are drawn at random
OURS = "equipoise"


def cores() -> int:
    return len(os.sched_getaffinity(0))


def set_up(chosen: list[System]) -> dict[str, str]:
    """Makes the environments; gives the reason for each that could not be made."""
    failures = {}
    for name in dict.fromkeys(s.environment for s in chosen if s.environment is not None):
        try:
            ensure(name)
        except CannotInstall as why:
            failures[name] = f"not installed: {why}"
    return failures


def warm_up(worker: Worker, seconds: float) -> None:
    """Starts a worker, lets it learn a little, notes its losses, and finds how many rounds fill a turn."""
    worker.start()
    done = 0
    for target in CHECKED_ROUNDS:
        worker.count = target - done
        worker.run()
        worker.losses[target], done = float(worker.ask("loss")["loss"]), target
    worker.count = 1
    worker.count = max(1, round(seconds / worker.run()))


def attempt(worker: Worker, work: Any, *arguments: Any) -> Any:
    """Does something with a worker unless it has failed before; if it fails now, notes why and ends it."""
    if worker.reason is not None:
        return None
    try:
        return work(worker, *arguments)
    except Failed as why:
        worker.reason = str(why)
        worker.end()
        return None


def take_turn(worker: Worker) -> None:
    worker.thaw()
    worker.seconds.append(worker.run())
    worker.freeze()


def prepare(worker: Worker, seconds: float) -> None:
    warm_up(worker, seconds)
    worker.freeze()


def measure(workload: str, chosen: list[System], failures: dict[str, str], passes: int, seconds: float) -> list[Worker]:
    workers = [Worker(system, setting, workload) for system in chosen for setting in system.settings]
    try:
        for worker in workers:
            worker.reason = failures.get(worker.system.environment or "")
            attempt(worker, prepare, seconds)
        for _ in range(passes):
            for worker in workers:
                attempt(worker, take_turn)
    finally:
        for worker in workers:
            worker.end()
    return workers


def rows_of(workload: str, workers: list[Worker]) -> list[dict[str, Any]]:
    """One row for each setting of each system, with the ratio of our best setting to it, pass by pass."""
    problem = PROBLEMS[workload]
    ours = fastest([w for w in workers if w.system.name == OURS])
    rows = []
    for w in workers:
        row: dict[str, Any] = {
            "workload": workload, "system": w.system.name, "version": w.version, "cores": w.setting.cores,
            "setting": w.setting.words,
        }  # fmt: skip
        if w.reason is not None:
            rows.append(row | {"reason": w.reason})
            continue
        median = statistics.median(w.seconds)
        row |= {
            "rounds_per_second": 1 / median, "slowest": 1 / max(w.seconds), "fastest": 1 / min(w.seconds),
            "client_updates_per_second": problem.clients_per_round / median, "rounds_a_turn": w.count,
            "seconds_per_round": w.seconds, "peak_mb": w.peak_mb, "losses": w.losses,
            "best_of_its_system": w is fastest([v for v in workers if v.system is w.system]),
        }  # fmt: skip
        if ours is not None:
            ratios = [theirs / mine for theirs, mine in zip(w.seconds, ours.seconds, strict=True)]
            row |= {
                "ours_over_this": statistics.median(ratios), "least_ratio": min(ratios), "greatest_ratio": max(ratios),
                "same_loss": all(abs(w.losses[r] / ours.losses[r] - 1) <= LOSS_TOLERANCE for r in CHECKED_ROUNDS),
            }  # fmt: skip
        rows.append(row)
    return rows


def fastest(workers: list[Worker]) -> Worker | None:
    well = [w for w in workers if w.reason is None]
    return min(well, key=lambda w: statistics.median(w.seconds), default=None)


def show(workload: str, rows: list[dict[str, Any]]) -> None:
    print(f"\n{PROBLEMS[workload].title}  (* the best setting of a system; loss after {CHECKED_ROUNDS[-1]} rounds)")
    print(f"{'':<15}{'setting':<18}{'cores':>6}{'rounds/s':>11}{'(range)':>17}{'updates/s':>11}{'ours/this':>11}"
          f"{'loss':>8}{'peak MB':>9}  version")  # fmt: skip
    for row in rows:
        start = f"{row['system']:<15}{row['setting']:<18}{row['cores']:>6}"
        if "reason" in row:
            print(f"{start}  failed: {row['reason']}")
            continue
        rate = f"{row['rounds_per_second']:.2f}" + ("*" if row["best_of_its_system"] else " ")
        spread = f"({row['slowest']:.2f}–{row['fastest']:.2f})"
        ratio = f"{row['ours_over_this']:.2f}" if "ours_over_this" in row else "–"
        loss = f"{row['losses'][CHECKED_ROUNDS[-1]]:.3f}" + ("" if row.get("same_loss", True) else "!")
        print(f"{start}{rate:>11}{spread:>17}{row['client_updates_per_second']:>11.0f}{ratio:>11}{loss:>8}"
              f"{row['peak_mb']:>9.0f}  {row['version']}", flush=True)  # fmt: skip
    if not all(row.get("same_loss", True) for row in rows):
        print(f"! its loss is not ours within {LOSS_TOLERANCE:.0%}: it does not do the same work")


def machine() -> dict[str, Any]:
    try:
        models = [line for line in Path("/proc/cpuinfo").read_text().splitlines() if line.startswith("model name")]
        memory = Path("/proc/meminfo").read_text().split("\n")[0].split()[1]
    except OSError:
        models, memory = [], "0"
    return {
        "processor": models[0].partition(":")[2].strip() if models else platform.machine(), "cores": cores(),
        "memory_gb": round(int(memory) / 2**20, 1), "system": platform.platform(), "python": platform.python_version(),
    }  # fmt: skip


def parsed(names: list[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--only", action="append", choices=names, help="this system beside ours; may be given several times")
    parser.add_argument(
        "--workload", action="append", choices=sorted(PROBLEMS), help="may be given several times; default both"
    )
    parser.add_argument("--passes", type=int, default=5)
    parser.add_argument("--seconds", type=float, default=1.0, help="how long each system runs in each pass")
    parser.add_argument("--setup-only", action="store_true", help="make the environments and stop")
    parser.add_argument("--out", type=Path, default=Path("bench/peers.json"))
    return parser.parse_args()


def main() -> None:
    every = systems(cores())
    options = parsed([s.name for s in every])
    chosen = [s for s in every if options.only is None or s.name in {OURS, *options.only}]
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended by SIGTERM"))  # so that stopped workers are ended, too
    failures = set_up(chosen)
    for name, reason in failures.items():
        print(f"{name}: {reason}")
    if options.setup_only:
        return
    rows = []
    for workload in options.workload or list(PROBLEMS):
        part = rows_of(workload, measure(workload, chosen, failures, options.passes, options.seconds))
        show(workload, part)
        rows += part
    kept = [s.environment for s in chosen if s.environment not in failures]
    environments = {
        name or "project": {"asked": list(REQUIREMENTS.get(name or "", ())), "installed": installed(name)} for name in kept
    }
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps({"machine": machine(), "rows": rows, "environments": environments}, indent=1))
    print(f"\nWritten to {options.out}")


if __name__ == "__main__":
    main()
