"""The machine that a benchmark runs on: what it is, how busy it was, and its measured rates."""

from __future__ import annotations

import os
import platform
import time
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from processes import Spec, processes
from roofline import Rates


class RateBook:
    """The machine's rates, by number of threads and precision."""

    def __init__(self, device: str, cores: int, *, quick: bool = False) -> None:
        self.found: dict[tuple[int, str | None], Rates] = {}
        self.machine = describe_machine(device, cores)
        precisions: tuple[str | None, ...] = (None,) if device == "cpu" else ("float32", "tf32", "bf16")
        for threads in sorted({1, cores}) if device == "cpu" else (cores,):
            with processes([threads]) as (process,):
                self.machine |= process.ask("machine", device)
                for precision in precisions:
                    self.found[threads, precision] = process.ask("rates", device, precision, quick)
        if device == "cpu":  # on a busy machine more threads may do less, but the machine can do what one of them can
            one, every = self.found[1, None], self.found[cores, None]
            best = replace(every, flops=max(one.flops, every.flops), bytes=max(one.bytes, every.bytes))
            self.found[cores, None] = best

    def of(self, spec: Spec) -> Rates | None:
        """The rates for a row; None for other people's code on a GPU, whose precision is not ours to say."""
        if spec.device == "cpu":
            return self.found.get((spec.threads, None))
        return self.found[spec.threads, spec.precision or "float32"] if spec.contender.startswith("equipoise") else None

    def lines(self) -> list[str]:
        name = self.machine.get("gpu") or self.machine["processor"]
        lines = [f"{name}, {self.machine['cores']} CPU cores, torch {self.machine['torch']}, Python {self.machine['python']}"]
        for (threads, precision), rates in self.found.items():
            what = f"in {precision}" if precision else f"with {threads} thread{'s' if threads > 1 else ''}"
            lines.append(
                f"  {what}: products {rates.flops / 1e9:,.0f} GFLOP/s, copy {rates.bytes / 1e9:,.1f} GB/s, "
                f"a core's own memory {rates.core_bytes // 1024} KiB"
            )
        if (self.machine["load_before"] or 0) > self.machine["cores"] / 4:
            lines.append(
                f"  The machine was busy before (load {self.machine['load_before']:.1f}): expect slow and uneven figures."
            )
        return lines

    def as_json(self) -> list[dict[str, Any]]:
        return [{"threads": threads, "precision": p} | asdict(rates) for (threads, p), rates in self.found.items()]


def describe_machine(device: str, cores: int) -> dict[str, Any]:
    """The machine as far as the operating system tells; the process that measures rates adds torch and the GPU."""
    processor, memory = platform.processor() or platform.machine(), None
    try:
        lines = Path("/proc/cpuinfo").read_text().splitlines()
        processor = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), processor)
        memory = round(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 1e9, 1)
    except (OSError, ValueError):
        pass
    return {
        "processor": processor,
        "cores": cores,
        "memory_gb": memory,
        "system": platform.platform(),
        "python": platform.python_version(),
        "device": device,
        "load_before": load(),
        "date": time.strftime("%Y-%m-%d %H:%M UTC", time.gmtime()),
    }


def load() -> float | None:
    """How many processes wanted to run in the last minute; None where the system does not say."""
    try:
        return os.getloadavg()[0]
    except (AttributeError, OSError):
        return None
