"""The peers' environments: one virtual environment each under `.peers/`, with pinned versions."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

HOME = Path(__file__).resolve().parents[2] / ".peers"
OURS = Path(sys.executable)

TORCH = ("torch==2.13.0", "numpy==2.4.6")
REQUIREMENTS: dict[str, tuple[str, ...]] = {
    "flower": ("flwr[simulation]==1.41.0", "ray==2.55.1", *TORCH),
    "pfl": ("pfl[pytorch]==0.6.0", *TORCH),
    # The fastest jax with which all of FedJAX works: from 0.4.38 at the latest its pmap backend is wrong, and jax.tree_map,
    # which it calls, is gone from the newest.
    "fedjax": ("fedjax==0.0.17", "jax==0.4.31", "jaxlib==0.4.31", "dm-haiku==0.0.13", "optax==0.2.5", "chex==0.1.90",
               "numpy==1.26.4", "scipy==1.17.1"),
    "jax": ("jax==0.10.2", "jaxlib==0.10.2", "numpy==2.4.6", "scipy==1.17.1"),
}  # fmt: skip


class CannotInstall(Exception):
    """Why an environment is not there."""


def python_of(environment: str | None) -> Path:
    """The interpreter of an environment; None is the one that runs this script."""
    return OURS if environment is None else HOME / environment / "bin" / "python"


def ensure(environment: str) -> None:
    """Makes an environment, unless it is there with just these requirements."""
    wanted, place = "\n".join(REQUIREMENTS[environment]), HOME / environment
    ready = place / ".ready"
    if ready.exists() and ready.read_text() == wanted:
        return
    HOME.mkdir(exist_ok=True)
    (HOME / ".gitignore").write_text("*\n")
    print(f"Setting up {place} …", flush=True)
    with (HOME / f"{environment}.log").open("w+") as log:
        for command in (
            [str(OURS), "-m", "venv", "--clear", str(place)],
            [str(python_of(environment)), "-m", "pip", "install", "--disable-pip-version-check", *REQUIREMENTS[environment]],
        ):
            if subprocess.run(command, stdout=log, stderr=subprocess.STDOUT, check=False).returncode:
                log.seek(0)
                raise CannotInstall(last_words(log.read()))
    ready.write_text(wanted)


def installed(environment: str | None) -> list[str]:
    """What is in an environment, as `pip freeze` says."""
    command = [str(python_of(environment)), "-m", "pip", "--disable-pip-version-check", "freeze"]
    return subprocess.run(command, capture_output=True, text=True, check=False).stdout.split("\n")[:-1]


def last_words(log: str) -> str:
    """The line of a log that says best why something failed: the last error, else the last line."""
    lines = [line.strip() for line in log.splitlines() if line.strip()]
    errors = [line for line in lines if re.match(r"[\w.]*(error|exception)\b:?", line, re.IGNORECASE)]
    return ([*lines, *errors] or ["no output"])[-1][:300]
