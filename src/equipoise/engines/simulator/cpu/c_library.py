"""C files compiled for this machine's processor on first use, and kept for the next run."""

from __future__ import annotations

import ctypes
import hashlib
import os
import platform
import shutil
import subprocess
import tempfile
from contextlib import suppress
from functools import lru_cache
from pathlib import Path

from equipoise.core.files import cache_folder, write_atomically
from equipoise.errors import NotWritten

_FLAGS = ("-O3", "-march=native", "-std=gnu11", "-shared", "-fPIC")
_SECONDS = 120


@lru_cache(maxsize=8)
def library(name: str) -> ctypes.CDLL | None:
    """The compiled `name`.c of this folder; None where there is no C compiler, or it fails."""
    source = Path(__file__).with_name(f"{name}.c")
    compiler = shutil.which(os.environ.get("CC") or "cc")
    if compiler is None or os.name != "posix":
        return None
    try:
        made = hashlib.sha256("\n".join((source.read_text(), compiler, *_FLAGS, _processor())).encode()).hexdigest()[:16]
        kept = cache_folder() / f"{name}-{made}.so"
        with suppress(OSError):  # there is none yet, or it is damaged
            return ctypes.CDLL(str(kept))
        return _compiled(compiler, source, kept)
    except (OSError, subprocess.SubprocessError):
        return None


def _compiled(compiler: str, source: Path, kept: Path) -> ctypes.CDLL:
    """Compile, load, and keep the file if the folder can be written to."""
    with tempfile.TemporaryDirectory() as folder:
        made = Path(folder) / kept.name
        command = [compiler, *_FLAGS, "-o", str(made), str(source), "-lm", "-lpthread"]
        subprocess.run(command, check=True, capture_output=True, timeout=_SECONDS, stdin=subprocess.DEVNULL)
        loaded = ctypes.CDLL(str(made))
        with suppress(NotWritten):  # a read-only home: the next run compiles again
            write_atomically(kept, made.read_bytes())
        return loaded


def _processor() -> str:
    """What code for this processor depends on: a home folder may be shared by machines with others."""
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        kinds = {line for line in lines if line.startswith(("flags", "model name", "Features", "CPU part"))}
    except OSError:
        kinds = {platform.node(), platform.processor()}
    return " ".join((platform.system(), platform.machine(), *sorted(kinds)))
