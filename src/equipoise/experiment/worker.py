"""The process of one run of a study: `python -m equipoise.experiment.worker FOLDER` trains what the folder's config says.

It goes on from the folder's checkpoint if there is one. An expected failure is one line on stderr and exit code 2.
"""

from __future__ import annotations

import sys
from pathlib import Path

from equipoise.errors import EquipoiseError


def main(path: str) -> int:
    """Run or resume the run in a folder."""
    from equipoise.experiment import folder
    from equipoise.experiment.build import build
    from equipoise.experiment.config import RunConfig

    try:
        place = folder.RunFolder(Path(path))
        folder.run(build(RunConfig.read(place.config)), place, progress=False, report=False)
    except (EquipoiseError, OSError) as failure:
        print(f"Error: {failure}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
