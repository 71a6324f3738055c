"""`python -m equipoise.reproduce`: the command `equipoise reproduce` for machines with torch and numpy only."""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from equipoise.errors import EquipoiseError
from equipoise.reproduce.runner import listing, reproduce


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; returns the exit code: 0 for success, 2 for a mistake of the user, 130 for Ctrl-C."""
    parser = argparse.ArgumentParser(prog="python -m equipoise.reproduce", description="Run a published experiment again.")
    parser.add_argument("names", nargs="*", metavar="name", help="entries of --list, one after another")
    parser.add_argument("--list", action="store_true", help="list the entries")
    parser.add_argument("--data", type=Path, help="the folder of the data files; default: EQUIPOISE_DATA")
    parser.add_argument("--scale", default="small", help="small (minutes on two cores) or paper (a GPU)")
    parser.add_argument("--seeds", type=int, help="how many, instead of the scale's own number")
    parser.add_argument("--out", type=Path, default=Path("reproduce"), help="where runs and tables go")
    parser.add_argument("--device", help="a torch device, e.g. cuda")
    parser.add_argument("--methods", help="only these, e.g. fedavg,delta-fl-0.5")
    parser.add_argument("--tune", action="store_true", help="first choose the learning rate on FedAvg's training loss")
    parser.add_argument("--show", action="store_true", help="run nothing: print what the folder holds")
    parser.add_argument("--minutes", type=float, help="stop after this number of minutes; the same command resumes")
    parser.add_argument("--precision", default="float32", help="of a GPU's products: float32, tf32 or bf16")
    parser.add_argument("--ray", metavar="ADDRESS", help="a Ray cluster that makes the runs: HOST:PORT, auto, or local")
    given = parser.parse_args(arguments)
    if given.list or not given.names:
        print(listing())
        return 0
    began = time.monotonic()
    try:
        for name in given.names:
            left = None if given.minutes is None else given.minutes - (time.monotonic() - began) / 60
            if left is not None and left <= 0:
                break
            reproduce(
                name, data=given.data, scale=given.scale, seeds=given.seeds, out=given.out, device=given.device,
                methods=given.methods, tune=given.tune, show=given.show, minutes=left,
                precision=given.precision, ray=given.ray,
            )  # fmt: skip
    except EquipoiseError as failure:
        print(f"Error: {failure}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        print("Stopped by Ctrl-C. The same command goes on where it stopped.", file=sys.stderr)
        return 130
    return 0


if __name__ == "__main__":
    sys.exit(main())
