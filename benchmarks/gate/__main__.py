"""The command: record what a tree gives, compare two records, list the runs."""

from __future__ import annotations

import argparse
import fnmatch
import json
import math
import os
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

import numpy as np

ROOT = Path(__file__).resolve().parents[2]
HERE = Path(__file__).resolve().parent
LONGEST = 300  # seconds that a run may take, on a busy machine


def record(options: argparse.Namespace) -> int:
    """Train every run by the tree whose sources are given; each leaves an .npz and a .json in the folder."""
    source, out = options.src.resolve(), options.out.resolve()
    if not (source / "equipoise").is_dir():
        raise SystemExit(f"{source} holds no equipoise")
    out.mkdir(parents=True, exist_ok=True)
    for old in out.glob("*.npz"):
        old.unlink()
        old.with_suffix(".json").unlink(missing_ok=True)
    began = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="gate-") as place:
        environment = os.environ | {
            "PYTHONPATH": f"{source}{os.pathsep}{ROOT}", "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1",
            "EQUIPOISE_CACHE": f"{place}/cache", "PYTHONDONTWRITEBYTECODE": "1",
        }  # fmt: skip
        called = [sys.executable, "-m", "benchmarks.gate", "work", "--src", source, "--out", out, "--data", options.data]
        called += ["--only", options.only] if options.only else []
        called += [f"--{name}" for name in ("quick", "verbose") if getattr(options, name)]
        parts = [["--part", f"{part}/{options.jobs}", "--work", f"{place}/{part}"] for part in range(options.jobs)]
        running = [subprocess.Popen(list(map(str, [*called, *part])), env=environment) for part in parts]
        codes = [each.wait() for each in running]
    print(f"{len(list(out.glob('*.json')))} runs in {time.perf_counter() - began:.0f} s")
    return max(map(abs, codes))


def work(options: argparse.Namespace) -> int:
    """One process of `record`: its share of the runs, one after another."""
    import torch

    torch.set_num_threads(1)
    from benchmarks.gate import adapter, cases, doing, made

    import equipoise as eq

    assert Path(eq.__file__).is_relative_to(options.src), f"{eq.__file__} is not of {options.src}"
    made.write_all(options.work)
    adapter.write_stores(options.work)
    every, (part, parts) = cases.all_cases(options.work, str(options.data)), map(int, options.part.split("/"))
    chosen = cases.wanted(every, options.only, options.quick)
    failed = []
    signal.signal(signal.SIGALRM, doing.too_long)
    if part == 0:
        failed += [f"no run has {each}" for each in cases.without_run(adapter.catalogue(), every)]
        if not options.only or "refused" in options.only:
            refused = doing.refusals(options.work)
            write(options.out, "refused", refused)
            failed += [refused.facts["failed"]] if "failed" in refused.facts else []
    for case in chosen[part::parts]:
        began, missing = time.perf_counter(), adapter.why_not(case.given.get("needs", ""), options.data)
        signal.alarm(LONGEST)
        left = doing.Left(about={"skipped": missing}) if missing else doing.do(case)
        signal.alarm(0)
        left.about |= {"seconds": round(time.perf_counter() - began, 3), "name": case.name}
        write(options.out, case.slug, left)
        said = left.facts.get("failed") or (f"skipped: {missing}" if missing else "")
        if said or options.verbose:
            print(f"{left.about['seconds']:6.2f} s  {case.name}  {said}", flush=True)
        failed += [f"{case.name}: {left.facts['failed']}"] if "failed" in left.facts else []
    for each in failed:
        print(f"FAILED  {each}", flush=True)
    return 1 if failed else 0


def write(folder: Path, slug: str, left: Any) -> None:
    """A run's numbers as .npz, its facts as .json."""
    np.savez(folder / f"{slug}.npz", **left.numbers)
    (folder / f"{slug}.json").write_text(json.dumps({"facts": left.facts, "about": left.about}, indent=1), encoding="utf-8")


def compare(options: argparse.Namespace) -> int:
    """Print what differs between two records: the run, which values, the largest difference."""
    exempt = tomllib.loads((HERE / "exceptions.toml").read_text(encoding="utf-8")).get("exempt", [])
    names = [sorted(path.stem for path in folder.glob("*.json")) for folder in (options.old, options.new)]
    wrong = excused = 0
    for name in sorted({*names[0], *names[1]}):
        if name not in names[0] or name not in names[1]:
            _, said = read(options.old if name in names[0] else options.new, name)
            what, shown = {"the run itself, which one of them has not": math.inf}, said["about"].get("name", name)
        else:
            old, new = (read(folder, name) for folder in (options.old, options.new))
            what, shown = difference(old, new), old[1]["about"].get("name", name)
        if options.only is not None and not asked(shown, options.only):
            continue
        left = {value: size for value, size in what.items() if not any(fits(each, shown, value) for each in exempt)}
        excused += len(what) - len(left)
        if left:
            wrong += 1
            named = ", ".join(list(left)[:6]) + " …" * (len(left) > 6)
            print(f"DIFFERS  {shown}: {named}; by at most {max(left.values()):.3g}")
    print(f"{len(names[0])} and {len(names[1])} runs; {wrong} differ; {excused} values exempt.")
    for each in exempt:
        print(f"Exempt: {each['runs']}: {each['reason']}")
    return 1 if wrong or not names[0] else 0


def asked(name: str, only: str) -> bool:
    """Whether a run's name fits a pattern, or holds its words."""
    return fnmatch.fnmatch(name, only) or only.lower() in name.lower()


def fits(exempt: dict[str, Any], name: str, value: str) -> bool:
    """Whether an exception covers a value of a run."""
    pairs = ((name, exempt["runs"]), (value, exempt.get("values", ["*"])))
    return all(any(fnmatch.fnmatchcase(text, pattern) for pattern in patterns) for text, patterns in pairs)


def read(folder: Path, name: str) -> tuple[dict[str, np.ndarray], dict[str, Any]]:
    with np.load(folder / f"{name}.npz") as held:
        return dict(held), json.loads((folder / f"{name}.json").read_text(encoding="utf-8"))


def difference(old: tuple[dict[str, Any], Any], new: tuple[dict[str, Any], Any]) -> dict[str, float]:
    """What differs, by its name, with the largest difference of its numbers."""
    found, close = {}, old[1]["facts"].get("close", 0.0)
    for name in sorted(old[0].keys() | new[0].keys()):
        a, b = old[0].get(name), new[0].get(name)
        if a is None or b is None or (a.dtype, a.shape) != (b.dtype, b.shape):
            found[name] = math.inf
        elif a.tobytes() != b.tobytes():
            with np.errstate(invalid="ignore"):
                size = np.abs(a.astype(float) - b.astype(float)) if a.dtype.kind in "fiub" else np.array(math.inf)
            size = np.where(a == b, 0.0, np.where((a != a) & (b != b), 0.0, size))  # equal infinities, and NaN in both
            largest = float(np.nan_to_num(size, nan=math.inf).max()) if size.size else 0.0
            found |= {name: largest} if not close or largest > close else {}
    facts = [each[1]["facts"] for each in (old, new)]
    for name in facts[0].keys() | facts[1].keys():
        one, other = (each.get(name) for each in facts)
        if name == "notices" and (without_codes(one) or without_codes(other)):
            one, other = len(one or ()), len(other or ())
        if one != other:
            found[f"{name}: {short(one)} → {short(other)}"] = math.inf
    return found


def without_codes(notices: list[str] | None) -> bool:
    """Whether a tree's notices have no codes: then they are counted alone."""
    return not any(" " in each for each in notices or ())


def short(value: Any) -> str:
    return str(value)[:120]


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m benchmarks.gate", description=__doc__)
    commands = parser.add_subparsers(dest="command", required=True)
    recording = {name: commands.add_parser(name) for name in ("record", "work")}
    for each in recording.values():
        each.add_argument("--src", type=Path, required=True, help="the folder src of a tree")
        each.add_argument("--out", type=Path, required=True, help="the folder of the record; it is emptied")
        each.add_argument("--only", help="runs whose name holds this, or fits it as a pattern with *")
        each.add_argument("--quick", action="store_true", help="a quarter of the runs")
        each.add_argument("--verbose", action="store_true", help="say what each run took")
        each.add_argument("--data", type=Path, default=Path(os.environ.get("EQUIPOISE_DATA", ROOT / ".." / "shared" / "data")))
    recording["record"].add_argument("--jobs", type=int, default=1, help="processes that share the runs")
    recording["work"].add_argument("--part", default="0/1")
    recording["work"].add_argument("--work", type=Path)
    both = commands.add_parser("compare")
    both.add_argument("old", type=Path)
    both.add_argument("new", type=Path)
    both.add_argument("--only", help="as for record: the others are not compared")
    options = parser.parse_args()
    sys.exit({"record": record, "work": work, "compare": compare}[options.command](options))


if __name__ == "__main__":
    main()
