"""A campaign against the promises of docs/reliability.md: kills, inputs, combinations and attackers, at random and for long.

    python benchmarks/campaign.py --minutes 10 --seed 1                    # all four drivers, one after another
    python benchmarks/campaign.py --driver kills --seed 1 --case 17        # one case again

Every case has a seed of its own, so that a finding can be run again. Findings and a log of counts are in `--findings`.
"""

from __future__ import annotations

import argparse
import gc
import os
import sys
from functools import cache
from pathlib import Path

for name in ("OMP_NUM_THREADS", "MKL_NUM_THREADS"):  # children are forked, and a kill must not wait for threads
    os.environ.setdefault(name, "1")
sys.path.insert(0, str(Path(__file__).parent))

import torch  # noqa: E402 — after the threads are set
from campaign_drivers import killed_runs, scenes  # noqa: E402
from campaign_drivers.attackers import try_attack  # noqa: E402
from campaign_drivers.combinations import try_combination  # noqa: E402
from campaign_drivers.findings import Tally, drive  # noqa: E402
from campaign_drivers.inputs import try_inputs  # noqa: E402
from campaign_drivers.kills import try_kills  # noqa: E402

import equipoise as eq  # noqa: E402

torch.set_num_threads(1)
for name in eq.__all__:  # all is imported before the first child is forked
    getattr(eq, name)
DRIVERS = {"kills": try_kills, "inputs": try_inputs, "combinations": try_combination, "attackers": try_attack}


@cache
def prepare_once() -> None:
    """Make what all cases share before the first child is forked."""
    scenes.prepare()
    killed_runs.prepare_data()
    gc.freeze()  # children do not copy what they only look at


def run(driver: str, *, seconds: float, seed: int, folder: Path, only: int | None = None, most: int | None = None) -> Tally:
    """One driver for some time, or for so many cases."""
    prepare_once()
    return drive(driver, DRIVERS[driver], seconds=seconds, seed=seed, folder=folder, only=only, most=most)


def main() -> int:
    """Run the drivers that are asked for; the exit code says whether something was found."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=1.0, help="for each driver")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--driver", choices=sorted(DRIVERS), help="only this one")
    parser.add_argument("--case", type=int, help="only this case of the driver")
    parser.add_argument("--findings", type=Path, default=Path("campaign"), help="the folder of findings and of the log")
    given = parser.parse_args()
    found = 0
    for driver in [given.driver] if given.driver else list(DRIVERS):
        tally = run(driver, seconds=60 * given.minutes, seed=given.seed, folder=given.findings, only=given.case)
        print(tally.line(), flush=True)
        found += len(tally.findings)
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
