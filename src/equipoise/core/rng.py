"""Randomness as an argument: one independent stream per (seed, purpose, round, client).

Local batch orders come from a counter-based hash (the finaliser of SplitMix64, Steele et al. 2014), written in integer
tensor operations. A client's order is then a pure function of its key: the same one by one, in a batch of clients,
in another process and on a GPU. Everything drawn on the server comes from NumPy's Philox under a key made the same way.
"""

from __future__ import annotations

import hashlib
from functools import lru_cache
from typing import Any

import numpy as np
import torch
from numpy.random.bit_generator import ISeedSequence
from torch import Tensor

from equipoise.core.numbers import Numbers

_MASK = (1 << 64) - 1
GOLDEN_GAMMA = 0x9E3779B97F4A7C15
MIX_FACTORS = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
_27, _30, _31 = np.uint64(27), np.uint64(30), np.uint64(31)


def signed(value: int) -> int:
    """The int64 with the same 64 bits."""
    value &= _MASK
    return value - (1 << 64) if value >> 63 else value


def _mix(z: int) -> int:
    z &= _MASK
    z = ((z ^ (z >> 30)) * MIX_FACTORS[0]) & _MASK
    z = ((z ^ (z >> 27)) * MIX_FACTORS[1]) & _MASK
    return z ^ (z >> 31)


def _shift(z: Tensor, bits: int) -> Tensor:
    # torch shifts int64 arithmetically; the mask makes it the unsigned shift that the hash is defined with.
    return (z >> bits) & ((1 << (64 - bits)) - 1)


def _mix_tensor(z: Tensor) -> Tensor:
    z = (z ^ _shift(z, 30)) * signed(MIX_FACTORS[0])
    z = (z ^ _shift(z, 27)) * signed(MIX_FACTORS[1])
    return z ^ _shift(z, 31)


def _mix_array(z: Numbers) -> Numbers:
    z = z ^ (z >> _30)
    z *= np.uint64(MIX_FACTORS[0])
    z ^= z >> _27
    z *= np.uint64(MIX_FACTORS[1])
    z ^= z >> _31
    return z


def name_key(name: str) -> int:
    """A 64-bit key of a name (a client id, a purpose) that is the same on every machine."""
    return int.from_bytes(hashlib.blake2b(name.encode(), digest_size=8).digest(), "little")


@lru_cache(maxsize=256)
def _purpose_key(seed: int, purpose: str) -> int:
    return _mix(_mix(seed + GOLDEN_GAMMA) ^ name_key(purpose))


def stream_key(seed: int, purpose: str, round_index: int = 0) -> int:
    """The key of the stream (seed, purpose, round); `client_keys` splits it further by client."""
    return _mix(_purpose_key(seed, purpose) + (round_index + 1) * GOLDEN_GAMMA)


def client_keys(key: int, clients: Tensor) -> Tensor:
    """One key per client: `clients` are int64 name keys (K,), the result is int64 (K,)."""
    if clients.device.type != "cpu":
        return _keys_by_torch(key, clients)
    names = np.atleast_1d(clients.numpy()).view(np.uint64)
    keys = _mix_array(_mix_array(names) ^ np.uint64(key & _MASK)).view(np.int64)
    return torch.from_numpy(keys).view(clients.shape)


def _keys_by_torch(key: int, clients: Tensor) -> Tensor:
    return _mix_tensor(_mix_tensor(clients) ^ signed(key))


def random_bits(keys: Tensor, first: int | Tensor, count: int) -> Tensor:
    """63 random bits for each counter first, first + 1, … of each key: (K,) keys give (K, count) int64, all ≥ 0."""
    if keys.device.type != "cpu":
        return _bits_by_torch(keys, first, count)
    begin = first.numpy() if isinstance(first, Tensor) else np.array(first)
    counters = (begin[..., None] + np.arange(count)).view(np.uint64)
    bits = _mix_array(keys.numpy()[..., None].view(np.uint64) + counters * np.uint64(GOLDEN_GAMMA))
    bits &= np.uint64((1 << 63) - 1)
    return torch.from_numpy(bits.view(np.int64))


def _bits_by_torch(keys: Tensor, first: int | Tensor, count: int) -> Tensor:
    counters = torch.arange(count, device=keys.device)
    start = first.unsqueeze(-1) if isinstance(first, Tensor) else first
    return _mix_tensor(keys.unsqueeze(-1) + (counters + start) * signed(GOLDEN_GAMMA)) & ((1 << 63) - 1)


class _Key(ISeedSequence):
    """Hands Philox its key as it is. Given the number itself, it would first ask the system for randomness it does not use."""

    def __init__(self, key: int) -> None:
        self.key = key

    def generate_state(self, n_words: int, dtype: Any = np.uint32) -> Numbers:
        return np.array((self.key, 0), dtype=np.uint64)


def generator(seed: int, purpose: str, round_index: int = 0, client: str | None = None) -> np.random.Generator:
    """A NumPy generator for one purpose, round and client."""
    key = stream_key(seed, purpose, round_index)
    if client is not None:
        key = _mix(key ^ _mix(name_key(client)))
    return np.random.Generator(np.random.Philox(_Key(key)))  # type: ignore[arg-type]


def torch_generator(seed: int, purpose: str, round_index: int = 0) -> torch.Generator:
    """A torch generator (on the CPU) for one purpose and round, e.g. the initial parameters of a model."""
    return torch.Generator().manual_seed(stream_key(seed, purpose, round_index) >> 1)
