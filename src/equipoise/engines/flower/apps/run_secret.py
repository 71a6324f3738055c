"""What a run keeps secret on the server: the key of its clients' batch seeds. The run's own seed never leaves the server."""

from __future__ import annotations

import hashlib
import hmac
import os
from pathlib import Path

from equipoise.core.files import write_atomically
from equipoise.errors import ConfigError

KEY_FILE = "batches.key"  # in the folder of a run
_BYTES = 32


def open_secret(folder: Path | None) -> bytes:
    """The secret of a run: the one in its folder, or a new one, which is written there."""
    if folder is None:
        return os.urandom(_BYTES)
    file = folder / KEY_FILE
    if file.exists():
        known = file.read_bytes()
        if len(known) != _BYTES:
            raise ConfigError(f"{file} is damaged. Delete it to go on with another secret.")
        return known
    drawn = os.urandom(_BYTES)
    write_atomically(file, drawn).chmod(0o600)
    return drawn


def batch_seed(secret: bytes, client: str, seed: int) -> int:
    """The seed of one client's batches: a pseudo-random function of the run's secret and the client's name."""
    mark = hmac.new(secret, f"{seed} {client}".encode(), hashlib.sha256).digest()
    return int.from_bytes(mark[:8], "little") >> 1


def public_seed(seed: int) -> int:
    """What nodes make their model by where the run's seed is secret. Nothing else is drawn by it."""
    return int.from_bytes(hashlib.blake2b(str(seed).encode(), digest_size=8, person=b"model").digest(), "little") >> 1
