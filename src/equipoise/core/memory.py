"""How much memory a process has of its own."""

from __future__ import annotations

import os
import resource
from pathlib import Path

_STATUS = Path("/proc/self/status")


def all_memory() -> int:
    """Bytes of memory of this machine.

    >>> all_memory() > own_memory()
    True
    """
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def own_memory() -> int:
    """Bytes of memory that are this process's own, files that are mapped left out; elsewhere than on Linux its peak in all.

    >>> own_memory() > 1_000_000
    True
    """
    if _STATUS.exists():
        fields = dict(line.split(":", 1) for line in _STATUS.read_text().splitlines() if ":" in line)
        if "RssAnon" in fields:
            return 1024 * int(fields["RssAnon"].split()[0])
    return 1024 * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
