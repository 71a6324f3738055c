"""Plant faults of behaviour in a copy of the sources, one at a time, and see whether the tests notice.

`check` says which faults cannot be planted, because the text that they replace is not there exactly once. `try` runs the tests
of each fault's package, or those that are named, and prints whether they caught it.
"""

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import tomllib
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
SELECTED = "not (long or federation or cluster or campaign or docs)"
Fault = dict[str, Any]


def check(faults: list[Fault]) -> int:
    """Print every place where a fault cannot be planted; 1 if there is one."""
    places = [(ROOT / edit["file"], edit["old"], fault["id"]) for fault in faults for edit in (fault, *fault.get("also", []))]
    wrong = [(name, file) for file, old, name in places if not file.exists() or file.read_text().count(old) != 1]
    for name, file in wrong:
        print(f"{name}: its text is not once in {file.relative_to(ROOT)}")
    return int(bool(wrong))


def plant(fault: Fault, copy: Path, *, back: bool = False) -> None:
    """Write a fault into a copy of the sources, or take it out."""
    for edit in (fault, *fault.get("also", [])):
        file, text = copy / edit["file"], (ROOT / edit["file"]).read_text()
        file.write_text(text if back else text.replace(edit["old"], edit["new"]))
        for cached in file.parent.glob(f"__pycache__/{file.stem}.*"):  # two versions of one second look alike to Python
            cached.unlink()


def run_tests(paths: list[str], copy: Path, limit: float) -> tuple[str, str]:
    """Run tests on a copy up to the first failure: "caught", "missed" or "timeout", and the file of the test that failed."""
    folders = os.pathsep.join(map(str, (copy / "src", ROOT / "tests", ROOT / "tests/engines")))
    environment = os.environ | {"PYTHONPATH": folders, "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1"}
    places = [str(copy / path) if path.startswith("src") else path for path in paths]
    command = [sys.executable, "-m", "pytest", "-c", "pyproject.toml", "--rootdir", ".", "-x", "-m", SELECTED, *places]
    process = subprocess.Popen(command, cwd=ROOT, env=environment, stdout=subprocess.PIPE, text=True, start_new_session=True)
    try:
        said = process.communicate(timeout=limit)[0]
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)  # also what the tests have started
        return "timeout", ""
    failed = re.search(r"^(?:FAILED|ERROR) ([^\s:]+)", said, re.MULTILINE)
    return {0: "missed", 1: "caught"}.get(process.returncode, "broken"), failed[1] if failed else ""


def main() -> int:
    """Read the command line, and do what it asks."""
    parser = argparse.ArgumentParser(prog="python -m benchmarks.faults", description=__doc__)
    parser.add_argument("action", choices=("check", "try"))
    parser.add_argument("--tests", nargs="+", help="tests to run in place of those of each fault's package")
    parser.add_argument("--only", nargs="+", help="ids of faults, or names of packages")
    parser.add_argument("--out", type=Path, default=Path(os.devnull), help="a TOML file that results are appended to")
    parser.add_argument("--limit", type=float, default=600.0, help="seconds for the tests of a fault")
    given = parser.parse_args()
    content: dict[str, Any] = tomllib.loads(Path(__file__).with_name("faults.toml").read_text())
    faults = [f for f in content["fault"] if not given.only or {f["id"], f["package"]} & set(given.only)]
    if given.action == "check":
        return check(faults)
    with tempfile.TemporaryDirectory() as folder:
        copy, began = Path(folder), time.monotonic()
        shutil.copytree(ROOT / "src", copy / "src")
        for fault in faults:
            plant(fault, copy)
            verdict, test = run_tests(given.tests or content["tests"][fault["package"]], copy, given.limit)
            plant(fault, copy, back=True)
            seconds, began = time.monotonic() - began, time.monotonic()
            print(f"{fault['id']:40} {verdict:8} {seconds:6.0f} s  {test}", flush=True)
            with given.out.open("a") as file:
                told = zip(("id", "caught", "test"), (fault["id"], verdict == "caught", test or verdict), strict=True)
                file.write("\n".join(["[[result]]", *(f"{key} = {json.dumps(value)}" for key, value in told), "\n"]))
    return 0


if __name__ == "__main__":
    sys.exit(main())
