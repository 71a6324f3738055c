"""The same program in another library and in this one, each in an environment of its own; prints a dated log.

    python benchmarks/side_by_side/run.py > docs/side_by_side.log

The environment of another library is a virtual environment that adds it to the packages installed here. Flower, pfl-research
and FedJAX run the same program beside ours in benchmarks/peers. PFLlib is not in the package registry.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import venv
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
LIBRARIES = {"scikit_learn": [], "opacus": ["opacus==1.6.0", "opt_einsum==3.4.0"]}


def python_with(name: str, requirements: list[str]) -> str:
    """The Python of an environment that has what is installed here, and the requirements."""
    if not requirements:
        return sys.executable
    folder = ROOT / ".peers" / f"side_by_side_{name}"
    if not (folder / "ready").exists():
        venv.create(folder, with_pip=True, clear=True)
        python = folder / "bin" / "python"
        where = [python, "-c", "import site; print(site.getsitepackages()[0])"]
        place = subprocess.run(where, capture_output=True, text=True, check=True)
        Path(place.stdout.strip(), "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
        subprocess.run([python, "-m", "pip", "install", "--quiet", "--no-deps", *requirements], check=True, stdout=sys.stderr)
        (folder / "ready").touch()
    return str(folder / "bin" / "python")


def main() -> None:
    print(f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}, torch {version('torch')}")
    environment = os.environ | {"PYTHONPATH": str(ROOT / "src"), "OMP_NUM_THREADS": "1"}
    for name, requirements in LIBRARIES.items():
        shown = " ".join(requirements[:1]) or f"scikit-learn=={version('scikit-learn')}"
        for side, python in (("before", python_with(name, requirements)), ("after", sys.executable)):
            program = [python, HERE / f"{name}_{side}.py"]
            done = subprocess.run(program, capture_output=True, text=True, env=environment, check=False)
            last = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()[-1]
            print(f"{shown if side == 'before' else 'equipoise':22s} {last}")


if __name__ == "__main__":
    main()
