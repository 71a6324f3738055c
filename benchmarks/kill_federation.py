"""Kills the server, and restarts nodes, at random moments of a private federation: does the ledger stay true?

    python benchmarks/kill_federation.py [--moments 45] [--seed 0]
    python benchmarks/kill_federation.py --processes 5         # SIGKILL to real processes, about a minute each
    python benchmarks/kill_federation.py --processes 5 --evaluating    # the same, during the evaluation after the last round

Each try is a run of Δ-FL under distributed differential privacy over real client apps in memory (tests/engines/fake_grid.py).
The server ends at a random one of its calls to Flower, at most two nodes start anew at others, with or without Flower's state
of the run, and the server is started again until the run has ended. All messages are recorded. After every end of the server:

- ε of its ledger is not below that of the sums that could be unmasked from the messages,
- no node has revealed anything twice.

With `--processes` the run is one of four nodes and a SuperLink as processes of this machine; the process of the server's app,
or of a node, is ended by SIGKILL, a node is started anew, and the run's command is given again. Nodes record every message.
"""

from __future__ import annotations

import argparse
import logging
import sys
import tempfile
import warnings
from collections import Counter
from pathlib import Path

import numpy as np

TESTS = Path(__file__).parents[1] / "tests"
sys.path[:0] = [str(TESTS), str(TESTS / "engines")]

from killed_federation import DELTA, try_kill  # noqa: E402
from killed_processes import kill_real  # noqa: E402

from equipoise.privacy.ledger import server_epsilon  # noqa: E402


def main() -> None:
    asked = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    asked.add_argument("--moments", type=int, default=45)
    asked.add_argument("--seed", type=int, default=0)
    asked.add_argument(
        "--processes", type=int, default=0, help="the number of kills of real processes, in place of those in memory"
    )
    asked.add_argument("--evaluating", action="store_true", help="kill processes during the evaluation after the last round")
    options = asked.parse_args()
    logging.disable(logging.CRITICAL)
    warnings.simplefilter("ignore")
    if options.processes:
        kill_processes(options.processes, np.random.default_rng(options.seed), evaluating=options.evaluating)
        return
    generator, lost = np.random.default_rng(options.seed), Counter[int]()
    for number in range(options.moments):
        moment = int(generator.integers(1, 75))
        with tempfile.TemporaryDirectory() as folder:
            campaign = try_kill(Path(folder), moment, generator)
            entries = campaign.entries
            updates = [e for e in entries if e.kind == "release" and e.purpose == "update"]
            known = [e for e in entries if e.kind == "outcome" and e.purpose == "update"]
            lost[len(updates) - len(known)] += 1
            ledger, shown = server_epsilon(entries, DELTA), campaign.epsilon_of_messages()
            restarts = len(campaign.grid.restart_at)
        about = f"killed at call {moment:2}, {restarts} nodes anew"
        print(f"{number + 1:3}: {about}; ε of ledger {ledger:.3f}, of messages {shown:.3f}", flush=True)
    print(f"{options.moments} kills, every ledger true, nothing revealed twice; sums begun and lost, by run: {dict(lost)}")


def kill_processes(count: int, generator: np.random.Generator, *, evaluating: bool = False) -> None:
    """Kills of the server's and of nodes' processes, by turns."""
    for number in range(count):
        # of about 150 messages that nodes get and send in rounds, or of 32 in the evaluation
        moment = int(generator.integers(1, 30) if evaluating else generator.integers(10, 140))
        victim = "server" if number % 2 == 0 else f"node-{generator.integers(4)}"
        with tempfile.TemporaryDirectory() as folder:
            run = kill_real(Path(folder), moment, victim, evaluating=evaluating)
            ledger, shown = server_epsilon(run.entries, DELTA), run.epsilon_of_messages()
            out = len(run.released())
        about = f"{victim} killed after {moment} messages{' of the evaluation' * evaluating}, {out} sums could be unmasked"
        print(f"{number + 1:3}: {about}; ε of ledger {ledger:.3f}, of messages {shown:.3f}", flush=True)
    print(f"{count} kills of processes, every ledger true, nothing revealed twice")


if __name__ == "__main__":
    main()
