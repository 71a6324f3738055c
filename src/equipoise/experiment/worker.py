"""The process of one run of a study: `python -m equipoise.experiment.worker FOLDER` trains as the folder's config.toml says.

It goes on from the checkpoint of the folder, if there is one. With `--without-test`, for searches, it drops the test clients
before training, so that nothing in the folder depends on them. An expected failure is one line on stderr and exit code 2.
"""

from __future__ import annotations

import sys
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

from equipoise.core.screen import say
from equipoise.errors import EquipoiseError

SEARCH_AGAIN = "the same equipoise tune"  # `run --resume` would train with the test clients


def main(path: str, *, without_test: bool = False) -> int:
    """Train the run of a folder, or the rest of it; returns the exit code."""
    from equipoise.core.files import locked
    from equipoise.experiment import folder
    from equipoise.experiment.build import build
    from equipoise.experiment.config import RunConfig
    from equipoise.experiment.run_files import RunFolder

    try:
        run_folder = RunFolder(Path(path))
        with locked(run_folder.log, wait=True):  # a worker that outlived a killed study still writes here
            if run_folder.finished:
                return 0
            experiment = build(RunConfig.read(run_folder.config, code="resume"))
            if without_test:
                experiment = replace(experiment, data=replace(experiment.data, test=None))
            again = SEARCH_AGAIN if without_test else None
            folder.run(experiment, run_folder, progress=False, report=False, again=again)
    except (EquipoiseError, OSError) as failure:
        with suppress(OSError):  # standard error goes to run.log, on a disk that may be the full one
            say(" ".join([f"Error: {failure}", *vars(failure).get("__notes__", ())]), err=True)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], without_test="--without-test" in sys.argv[2:]))
