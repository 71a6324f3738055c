"""The same program in another library and in this one, each in an environment of its own; prints a dated log.

    python benchmarks/side_by_side/run.py > docs/side_by_side.log

The environment of another library is a virtual environment that adds it to the packages installed here; FedJAX needs older
packages and has an environment without ours. PFLlib is not in the package registry.
"""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import sysconfig
import venv
from dataclasses import dataclass
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
PFL = ("pfl==0.6.0", "dp-accounting==0.5.0", "prv-accountant==0.2.0", "multiprocess==0.70.17", "dill==0.3.9")
OLD_JAX = (
    "fedjax==0.0.17", "jax==0.4.31", "jaxlib==0.4.31", "dm-haiku==0.0.13", "optax==0.2.5", "chex==0.1.90", "numpy==1.26.4",
    "scipy==1.17.1", "scikit-learn==1.9.1",
)  # fmt: skip


@dataclass(frozen=True)
class Pair:
    """A program in another library, and the program that does the same here."""

    name: str
    after: str
    requirements: tuple[str, ...] = ()  # what it needs besides the packages installed here; none: all are here
    alone: bool = False  # whether its environment has nothing of ours

    @property
    def shown(self) -> str:
        """The library with its version."""
        installed = {"scikit_learn": "scikit-learn", "flower": "flwr"}.get(self.name)
        return f"{installed}=={version(installed)}" if installed else self.requirements[0]


PAIRS = (
    Pair("flower", "fedavg"),
    Pair(
        "pfl", "fedavg", ("pfl==0.6.0", "dp-accounting==0.5.0", "prv-accountant==0.2.0", "multiprocess==0.70.17", "dill==0.3.9")
    ),
    Pair("fedjax", "fedavg", OLD_JAX, alone=True),
    Pair("scikit_learn", "scikit_learn"),
    Pair("opacus", "opacus", ("opacus==1.6.0", "opt_einsum==3.4.0")),
)


def python_of(pair: Pair) -> str:
    """The Python of the environment in which the other library is installed; it is made if it is not there."""
    if not pair.requirements:
        return sys.executable
    folder = ROOT / ".peers" / f"side_by_side_{pair.name}"
    python, wanted = folder / "bin" / "python", "\n".join(pair.requirements)
    ready = folder / "ready"
    if not ready.exists() or ready.read_text() != wanted:
        venv.create(folder, with_pip=True, clear=True)
        if not pair.alone:
            where = [python, "-c", "import site; print(site.getsitepackages()[0])"]
            place = subprocess.run(where, capture_output=True, text=True, check=True)
            Path(place.stdout.strip(), "here.pth").write_text(sysconfig.get_path("purelib") + "\n")
        more = [] if pair.alone else ["--no-deps"]
        subprocess.run([python, "-m", "pip", "install", "--quiet", *more, *pair.requirements], check=True, stdout=sys.stderr)
        ready.write_text(wanted)
    return str(python)


def last_line(python: str, program: Path) -> str:
    """What a program prints last; of one that fails, the last line of its error."""
    paths = os.pathsep.join((str(ROOT / "src"), str(HERE)))
    silent = {"FLWR_TELEMETRY_ENABLED": "0", "RAY_USAGE_STATS_ENABLED": "0"}
    environment = os.environ | silent | {"PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    done = subprocess.run([python, program], capture_output=True, text=True, env=environment, check=False)
    lines = (done.stdout if done.returncode == 0 else done.stderr).strip().splitlines()
    return next((line for line in reversed(lines) if line.startswith("error")), lines[-1] if lines else "no output")


def main() -> None:
    print(f"{datetime.now(UTC):%Y-%m-%d}, {platform.machine()}, Python {platform.python_version()}, torch {version('torch')}")
    for after in dict.fromkeys(pair.after for pair in PAIRS):
        for pair in PAIRS:
            if pair.after == after:
                print(f"{pair.shown:22s} {last_line(python_of(pair), HERE / f'{pair.name}_before.py')}", flush=True)
        print(f"{'equipoise':22s} {last_line(sys.executable, HERE / f'{after}_after.py')}", flush=True)


if __name__ == "__main__":
    main()
