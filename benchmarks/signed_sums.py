"""What signed sums cost beside plain ones: one masked sum over 10, 50 and 100 clients, server and clients in one process.

    python benchmarks/signed_sums.py [--clients 10 50 100] [--length 1000] [--repeat 3]

Plain and signed sums alternate, and the median of each is printed: the seconds of one client and of the server, in processor
time, and the bytes that one client receives and sends.
"""

from __future__ import annotations

import argparse
import statistics
import time

import numpy as np
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey

from equipoise.engines.flower.secure.identities import Identity, default_colluders, signed_threshold
from equipoise.engines.flower.secure.masking_client import MaskingClient
from equipoise.engines.flower.secure.masking_server import MaskingServer
from equipoise.engines.flower.secure.sum_terms import SumTerms


def run_sum(clients: int, length: int, *, signed: bool) -> tuple[float, float, float, float, int]:
    """One sum: seconds of the clients and of the server, bytes to and from one client, and the number of exchanges."""
    names = tuple(sorted(f"client-{k}" for k in range(clients)))
    keys = {name: Ed25519PrivateKey.generate() for name in names}
    public = {name: key.public_key().public_bytes_raw() for name, key in keys.items()}
    known = {name: Identity(keys[name], {n: p for n, p in public.items() if n != name}) if signed else None for name in names}
    colluders = default_colluders(clients) if signed else None
    threshold = signed_threshold(clients, colluders) if colluders is not None else clients // 2 + 1
    terms = SumTerms("run", 0, "update", names, length, 2**48, threshold, threshold, colluders=colluders)
    values, spent, sent, received, exchanges = np.arange(length), [0.0, 0.0], 0, 0, 0

    def timed(who: int, work):  # type: ignore[no-untyped-def]
        began = time.process_time()
        done = work()
        spent[who] += time.process_time() - began
        return done

    server = MaskingServer(terms, public if signed else None)
    requests = timed(1, server.start)
    nodes = {name: timed(0, lambda name=name: MaskingClient(requests[name], name, known[name])) for name in names}
    answers = timed(0, lambda: {name: node.keys() for name, node in nodes.items()})
    while True:
        received, sent, exchanges = received + len(requests[names[0]]), sent + len(answers[names[0]]), exchanges + 1
        requests = timed(1, lambda answers=answers: server.advance(answers))
        if not requests:
            break
        answers = timed(0, lambda r=requests: {name: nodes[name].answer(r[name], values, bytes(32)) for name in names})
    if server.total.tolist() != (values * clients).tolist():
        raise AssertionError("The sum is wrong.")
    return spent[0], spent[1], received, sent, exchanges


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--clients", type=int, nargs="+", default=[10, 50, 100])
    parser.add_argument("--length", type=int, default=1000)
    parser.add_argument("--repeat", type=int, default=3)
    options = parser.parse_args()
    print("| clients | sum | exchanges | s per client | s of the server | bytes to a client | bytes from a client |")
    print("|---:|---|---:|---:|---:|---:|---:|")
    for clients in options.clients:
        runs: dict[bool, list[tuple[float, ...]]] = {False: [], True: []}
        for _ in range(options.repeat):
            for signed in (False, True):
                runs[signed].append(run_sum(clients, options.length, signed=signed))
        for signed, measured in runs.items():
            work, server, received, sent, exchanges = (statistics.median(column) for column in zip(*measured, strict=True))
            kind = "signed" if signed else "plain"
            figures = f"{work / clients:.3f} | {server:.3f} | {received:,.0f} | {sent:,.0f}"
            print(f"| {clients} | {kind} | {exchanges:.0f} | {figures} |", flush=True)


if __name__ == "__main__":
    main()
