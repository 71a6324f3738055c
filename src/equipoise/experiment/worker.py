"""The process of one run of a study: `python -m equipoise.experiment.worker FOLDER` trains what the folder's config says.

It goes on from the folder's checkpoint if there is one. With `--without-test`, as a search runs it, the test clients are
dropped before training, so that nothing in the folder can know them. An expected failure is one line on stderr and exit code 2.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path

from equipoise.errors import EquipoiseError


@contextmanager
def in_turn(path: Path) -> Iterator[None]:
    """Wait for another worker in the folder: one that outlived a killed study still writes to it."""
    try:
        import fcntl
    except ImportError:  # Windows has no such lock
        yield
        return
    with (path / "run.log").open("ab") as file:
        with suppress(OSError):  # some network disks have none either
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def main(path: str, *, without_test: bool = False) -> int:
    """Run or resume the run in a folder."""
    from equipoise.experiment import folder
    from equipoise.experiment.build import build
    from equipoise.experiment.config import RunConfig

    try:
        place = folder.RunFolder(Path(path))
        with in_turn(place.path):
            if place.finished:
                return 0
            experiment = build(RunConfig.read(place.config))
            if without_test:
                experiment = replace(experiment, data=replace(experiment.data, test=None))
            folder.run(experiment, place, progress=False, report=False)
    except (EquipoiseError, OSError) as failure:
        print(f"Error: {failure}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1], without_test="--without-test" in sys.argv[2:]))
