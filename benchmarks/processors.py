"""Run the test suite as if on other processors, to find tests that depend on the last bits of one of them.

    python benchmarks/processors.py [--only NAME] [--processes N] [--folder FOLDER] [--again] [TESTS ...]

Each setting changes which kernels PyTorch, OpenBLAS or MKL choose, which C compiler is found, or how many cores there are.
TESTS are arguments for pytest (options after --); by default it runs everything. A setting's result is written to
FOLDER/NAME.json and pytest's output to FOLDER/NAME.log. A setting that has a result for this commit and these arguments is
skipped, unless --again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from xml.etree import ElementTree

ROOT = Path(__file__).resolve().parents[1]
ONE_THREAD = {"OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}  # per process, as in `make test`


@dataclass(frozen=True)
class Setting:
    """Changes to the environment (None removes a variable), a command to run under, and the default number of processes."""

    environment: Mapping[str, str | None] = field(default_factory=dict)
    command: tuple[str, ...] = ()
    processes: int = 2


SETTINGS = {
    "plain": Setting(),
    "torch-default": Setting({"ATEN_CPU_CAPABILITY": "default"}),
    "torch-avx2": Setting({"ATEN_CPU_CAPABILITY": "avx2"}),
    "openblas-haswell": Setting({"OPENBLAS_CORETYPE": "Haswell"}),
    "openblas-skylakex": Setting({"OPENBLAS_CORETYPE": "SkylakeX"}),
    "openblas-zen": Setting({"OPENBLAS_CORETYPE": "Zen"}),
    "mkl-compatible": Setting({"MKL_CBWR": "COMPATIBLE"}),
    "cc-unset": Setting({"CC": None}),
    "cc-broken": Setting({"CC": "/bin/false"}),
    "one-core": Setting(command=("taskset", "-c", "0"), processes=1),
    # Settings of different libraries at once: a third of the time, and each setting is in force.
    "old-processor": Setting({"ATEN_CPU_CAPABILITY": "default", "OPENBLAS_CORETYPE": "Haswell", "CC": "/bin/false"}),
    "amd-processor": Setting({"ATEN_CPU_CAPABILITY": "avx2", "OPENBLAS_CORETYPE": "Zen", "MKL_CBWR": "COMPATIBLE"}),
    "one-intel-core": Setting({"OPENBLAS_CORETYPE": "SkylakeX", "CC": None}, ("taskset", "-c", "0"), processes=1),
}

PROBE = """
import json, numpy, scipy.linalg, torch
from threadpoolctl import threadpool_info
kernels = [each["architecture"] for each in threadpool_info() if each["internal_api"] == "openblas"]
print(json.dumps({"torch": torch.backends.cpu.get_cpu_capability(), "openblas": kernels}))
"""


@dataclass(frozen=True)
class Result:
    """What one run of the tests came to; `exit_status` is pytest's, and is above 1 where pytest itself failed."""

    setting: str
    commit: str
    tests: list[str]
    passed: int
    failed: int
    skipped: int
    seconds: float
    failures: list[str]
    exit_status: int
    kernels: dict[str, object]  # what PyTorch and OpenBLAS say they use


def commit_of(root: Path) -> str:
    """The commit of the working tree, with a + where files differ from it."""

    def git(*arguments: str) -> str:
        return subprocess.run(["git", *arguments], cwd=root, check=True, capture_output=True, text=True).stdout.strip()

    return git("rev-parse", "HEAD") + ("+" if git("status", "--porcelain") else "")


def environment_of(setting: Setting, cache: str) -> dict[str, str]:
    """This process's environment with the setting's changes, and a cache folder in which nothing was compiled yet."""
    changed: dict[str, str | None] = {**os.environ, **ONE_THREAD, **setting.environment, "EQUIPOISE_CACHE": cache}
    return {name: value for name, value in changed.items() if value is not None}


def read_report(path: Path) -> tuple[int, int, int, list[str]]:
    """The numbers of passed, failed and skipped tests in pytest's XML file, and the names of those that failed."""
    passed, skipped, failures = 0, 0, []
    for case in ElementTree.parse(path).iter("testcase"):  # noqa: S314 (pytest wrote it just now)
        kinds = {child.tag for child in case}
        if kinds & {"failure", "error"}:
            failures.append(f"{case.get('file') or case.get('classname')}::{case.get('name')}")
        elif "skipped" in kinds:
            skipped += 1
        else:
            passed += 1
    return passed, len(failures), skipped, failures


def run_tests(name: str, tests: Sequence[str], processes: int | None, folder: Path, commit: str) -> Result:
    """Run pytest under a setting, write its output to the folder, and count."""
    setting = SETTINGS[name]
    many = setting.processes if processes is None else processes
    with tempfile.TemporaryDirectory(prefix="equipoise-processors-") as scratch:
        report, environment = Path(scratch) / "report.xml", environment_of(setting, scratch)
        probe = subprocess.run(
            [*setting.command, sys.executable, "-c", PROBE], cwd=ROOT, env=environment, capture_output=True, text=True
        )
        command = [*setting.command, sys.executable, "-m", "pytest", "-n", str(many if many > 1 else 0), "--dist", "worksteal"]
        command += ["-o", "junit_family=xunit1", f"--junitxml={report}", *tests]
        begin = time.perf_counter()
        with (folder / f"{name}.log").open("w") as log:
            status = subprocess.run(command, cwd=ROOT, env=environment, stdout=log, stderr=subprocess.STDOUT).returncode
        seconds = time.perf_counter() - begin
        passed, failed, skipped, failures = read_report(report) if report.exists() else (0, 0, 0, [])
    kernels = json.loads(probe.stdout) if probe.returncode == 0 else {"failed": probe.stderr[-500:]}
    return Result(name, commit, list(tests), passed, failed, skipped, round(seconds, 1), failures, status, kernels)


def kept_result(path: Path, tests: Sequence[str], commit: str) -> Result | None:
    """The result in a file, if it belongs to this commit, with no file changed, and to these tests."""
    if not path.exists() or commit.endswith("+"):
        return None
    found = Result(**json.loads(path.read_text()))
    return found if found.commit == commit and found.tests == list(tests) else None


def table(results: Sequence[Result]) -> str:
    lines = ["| setting | passed | failed | skipped | seconds | failures |", "|---|---|---|---|---|---|"]
    for each in results:
        names = [*each.failures, *([f"pytest ended with status {each.exit_status}"] if each.exit_status > 1 else [])]
        counts = f"{each.passed} | {each.failed} | {each.skipped} | {each.seconds:.0f}"
        lines.append(f"| {each.setting} | {counts} | {'<br>'.join(names) or '–'} |")
    return "\n".join(lines)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("tests", nargs="*", help="arguments for pytest, by default none, which runs everything")
    parser.add_argument("--only", action="append", choices=SETTINGS, help="run this setting; may be given several times")
    parser.add_argument("--processes", type=int, help="test processes; 2 by default, 1 on one core")
    parser.add_argument("--folder", type=Path, default=ROOT / "bench" / "processors")
    parser.add_argument("--again", action="store_true", help="run settings that have a result, too")
    options = parser.parse_args()
    options.folder.mkdir(parents=True, exist_ok=True)
    commit, results = commit_of(ROOT), []
    for name in options.only or SETTINGS:
        if any(shutil.which(program) is None for program in SETTINGS[name].command[:1]):
            print(f"{name} is left out: there is no {SETTINGS[name].command[0]} here.", file=sys.stderr)
            continue
        path = options.folder / f"{name}.json"
        result = None if options.again else kept_result(path, options.tests, commit)
        if result is None:
            print(f"{name} …", file=sys.stderr, flush=True)
            result = run_tests(name, options.tests, options.processes, options.folder, commit)
            path.write_text(json.dumps(asdict(result), indent=1) + "\n")
        results.append(result)
    print(table(results))
    return int(any(each.exit_status != 0 for each in results))


if __name__ == "__main__":
    sys.exit(main())
