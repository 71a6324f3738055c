"""Load on `equipoise serve`: many clients that ask for metadata and download models; then one idle open page.

    python benchmarks/serve.py                          # 200 clients for 60 seconds, server and generator on a core each
    python benchmarks/serve.py --clients 50 --seconds 20

Each client asks for metadata once per second and downloads 1 MB every ten seconds, at times of its own. Printed are errors,
percentiles of the answers' times, the server's memory before and after, and what an open page (an event stream of a run that
is running) costs of a core.
"""

import argparse
import asyncio
import json
import os
import random
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import httpx
import torch

import equipoise as eq

DOWNLOAD = "/api/runs/family/models/0.5/latest/model.safetensors"
METADATA = ("/api/runs", "/api/runs/family", "/api/runs/family/metrics", "/api/runs/family/family", "/api/runs/family/models")


def make_folder(root):
    """A family whose models are 1 MB each, and a run that is being written."""
    data = eq.data.label_shift(train_clients=60, validation_clients=0, test_clients=100, seed=0)
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(data.features, 8192), torch.nn.ReLU(), torch.nn.Linear(8192, data.classes))
    family = eq.train_family(model, data, tails=[1.0, 0.5], rounds=2, clients_per_round=5, progress=False)
    family.save(root / "family")
    live = root / "live"
    live.mkdir()
    (live / "config.toml").write_text("[train]\nrounds = 100000\n")
    return live / "rounds.jsonl"


def cpu_seconds(pid):
    fields = Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()
    return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


def memory(pid):
    lines = Path(f"/proc/{pid}/status").read_text().splitlines()
    return next(int(line.split()[1]) / 1024 for line in lines if line.startswith("VmRSS"))


class Connection:
    """One connection that asks again and again: a client library would need more of its core than the server of its own."""

    def __init__(self, host, port):
        self.host, self.port, self.streams = host, port, None

    async def get(self, path):
        """The status and the number of bytes of an answer."""
        if self.streams is None:
            self.streams = await asyncio.open_connection(self.host, self.port, limit=2**18)
        reader, writer = self.streams
        writer.write(f"GET {path} HTTP/1.1\r\nHost: {self.host}:{self.port}\r\n\r\n".encode())
        await writer.drain()
        head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").lower()
        size = int(head.split("content-length: ")[1].split("\r\n")[0])
        left = size
        while left:
            part = await reader.read(min(left, 2**18))
            if not part:
                raise ConnectionError("the answer was cut off")
            left -= len(part)
        return int(head.split(" ")[1]), size


async def one_client(connection, number, until, times, errors):
    rng = random.Random(number)
    await asyncio.sleep(rng.random())
    download = time.monotonic() + 10 * rng.random()
    while time.monotonic() < until:
        began = time.monotonic()
        try:
            status, _ = await asyncio.wait_for(connection.get(rng.choice(METADATA)), 30)
            times["metadata"].append(time.monotonic() - began)
            if status != 200:
                errors.append(status)
            if time.monotonic() >= download:
                download += 10
                start = time.monotonic()
                status, size = await asyncio.wait_for(
                    connection.get("/api/runs/family/models/0.5/latest/model.safetensors"), 30
                )
                times["download"].append(time.monotonic() - start)
                if status != 200 or size < 900_000:
                    errors.append(("download", status, size))
        except (OSError, TimeoutError, ValueError, IndexError, asyncio.IncompleteReadError) as failure:
            errors.append(repr(failure))
            connection.streams = None
        await asyncio.sleep(max(0.0, began + 1 - time.monotonic()))


async def load(url, clients, seconds):
    host, port = url.removeprefix("http://").split(":")
    times, errors = {"metadata": [], "download": []}, []
    until = time.monotonic() + seconds
    await asyncio.gather(*(one_client(Connection(host, int(port)), k, until, times, errors) for k in range(clients)))
    return times, errors


def percentile(values, share):
    return sorted(values)[min(len(values) - 1, int(share * len(values)))] if values else float("nan")


def idle_page(url, pid, log, seconds):
    """The share of a core that one open page of a running run costs, while a line a second is written."""
    with httpx.stream("GET", f"{url}/api/runs/live/events", timeout=60) as answer:
        lines = answer.iter_lines()
        next(lines)
        began, before = time.monotonic(), cpu_seconds(pid)
        for number in range(seconds):
            event = {
                "event": "round",
                "round": number,
                "loss": 1.0,
                "tail_loss": 2.0,
                "cohort": 5,
                "trained": 5,
                "seconds": 1.0,
            }
            with log.open("a") as file:
                file.write(json.dumps(event) + "\n")
            time.sleep(1)
        return (cpu_seconds(pid) - before) / (time.monotonic() - began)


def main():
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--clients", type=int, default=200)
    parser.add_argument("--seconds", type=int, default=60)
    parser.add_argument("--idle", type=int, default=20)
    given = parser.parse_args()
    cores = sorted(os.sched_getaffinity(0))
    with tempfile.TemporaryDirectory() as folder:
        log = make_folder(Path(folder))
        log.write_text(json.dumps({"event": "start", "name": "live", "rounds": 100000, "seed": 0, "first_round": 0}) + "\n")
        command = [sys.executable, "-m", "equipoise", "serve", folder, "--port", "0"]
        server = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        os.sched_setaffinity(server.pid, {cores[0]})
        os.sched_setaffinity(0, {cores[-1]})
        try:
            url = server.stdout.readline().rsplit(" ", 1)[1].strip().rstrip("/")
            for path in METADATA:
                httpx.get(url + path, timeout=60).raise_for_status()
            before, work = memory(server.pid), cpu_seconds(server.pid)
            print(f"load average {os.getloadavg()[0]:.1f} on {len(cores)} cores before the test")
            own = time.process_time()
            times, errors = asyncio.run(load(url, given.clients, given.seconds))
            print(f"the generator took {100 * (time.process_time() - own) / given.seconds:.0f} % of a core")
            busy = (cpu_seconds(server.pid) - work) / given.seconds
            for kind, values in times.items():
                shown = ", ".join(
                    f"{name} {1000 * percentile(values, share):.0f} ms" for name, share in (("p50", 0.5), ("p99", 0.99))
                )
                print(f"{kind}: {len(values)} answers, {shown}, longest {1000 * max(values, default=0):.0f} ms")
            print(f"errors: {len(errors)} {errors[:3]}")
            print(f"memory: {before:.0f} MB before, {memory(server.pid):.0f} MB after; {100 * busy:.0f} % of a core under load")
            print(f"one open page of a running run: {100 * idle_page(url, server.pid, log, given.idle):.2f} % of a core")
        finally:
            server.terminate()
            server.wait(10)


if __name__ == "__main__":
    main()
