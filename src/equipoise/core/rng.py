"""Randomness as an argument: one independent stream per (seed, purpose, round, client).

Local batch orders come from a counter-based hash (the finaliser of SplitMix64, Steele et al. 2014), written in integer
tensor operations. A client's order is then a pure function of its key: the same one by one, in a batch of clients,
in another process and on a GPU. Everything drawn on the server comes from NumPy's Philox under a key made the same way.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
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


def name_keys(names: Iterable[str]) -> Tensor:
    """The key of each name, (n,) int64."""
    digests = b"".join([hashlib.blake2b(name.encode(), digest_size=8).digest() for name in names])
    return torch.from_numpy(np.frombuffer(bytearray(digests), dtype="<i8").astype(np.int64, copy=False))


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


def step_keys(keys: Tensor, step: int | Tensor) -> Tensor:
    """One key per client for what is drawn inside its forward pass at a local step: `keys` are those of its batches, (K,).

    They differ from the batches' own numbers, whose counters are far smaller than the constant here.
    """
    counters = (step + 1) * signed(GOLDEN_GAMMA) if isinstance(step, Tensor) else signed((step + 1) * GOLDEN_GAMMA)
    return mix_(mix_(keys ^ signed(name_key("forward pass"))) + counters)


def mix_(z: Tensor) -> Tensor:
    """The hash of int64 numbers, written over them: what `client_keys` is made of, without memory for every operation."""
    for shift, factor in ((30, MIX_FACTORS[0]), (27, MIX_FACTORS[1])):
        z.bitwise_xor_((z >> shift).bitwise_and_((1 << (64 - shift)) - 1)).mul_(signed(factor))
    return z.bitwise_xor_((z >> 31).bitwise_and_((1 << 33) - 1))


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


_PHILOX_FACTORS = 0xD2E7470EE14C6C93, 0xCA5A826395121157  # Salmon et al., Parallel Random Numbers: As Easy as 1, 2, 3, 2011
_PHILOX_WEYL = 0x9E3779B97F4A7C15, 0xBB67AE8584CAA73B
_CHUNK = 16_384  # numbers that stay in a core's own memory


def first_uniforms(seed: int, purpose: str, clients: Tensor) -> Numbers:
    """The first number in [0, 1) of each client's generator: `clients` are int64 name keys (n,), the result is float64 (n,).

    `generator(seed, purpose, client=i).random()` gives the same bits for the client i alone, in a hundred times the time.
    """
    keys = client_keys(stream_key(seed, purpose), clients.cpu()).numpy().view(np.uint64)
    drawn = np.empty(len(keys))
    for first in range(0, len(keys), _CHUNK):
        bits = _philox(keys[first : first + _CHUNK])
        drawn[first : first + _CHUNK] = (bits >> np.uint64(11)) * 2.0**-53
    return drawn


def _philox(keys: Numbers) -> Numbers:
    """The first 64 bits of Philox4x64-10 under the keys (key, 0), whose counter NumPy sets to 1 before it draws."""
    a, b, c, d = (np.full_like(keys, first) for first in (1, 0, 0, 0))
    for turn in range(10):
        high, low = _wide_product(_PHILOX_FACTORS[0], a)
        other_high, other_low = _wide_product(_PHILOX_FACTORS[1], c)
        weyl = (np.uint64((turn * step) & _MASK) for step in _PHILOX_WEYL)
        a, b, c, d = other_high ^ b ^ (keys + next(weyl)), other_low, high ^ d ^ next(weyl), low
    return a


def _wide_product(factor: int, values: Numbers) -> tuple[Numbers, Numbers]:
    """The upper and the lower 64 bits of the products, by halves of 32 bits."""
    half, mask = np.uint64(32), np.uint64(0xFFFFFFFF)
    upper, lower = np.uint64(factor >> 32), np.uint64(factor & 0xFFFFFFFF)
    value_low, value_high = values & mask, values >> half
    middle = lower * value_low
    middle >>= half
    middle += upper * value_low
    carry = middle & mask
    carry += lower * value_high
    carry >>= half
    middle >>= half
    value_high *= upper
    value_high += middle
    value_high += carry
    return value_high, values * np.uint64(factor)


def torch_generator(seed: int, purpose: str, round_index: int = 0) -> torch.Generator:
    """A torch generator (on the CPU) for one purpose and round, e.g. the initial parameters of a model."""
    return torch.Generator().manual_seed(stream_key(seed, purpose, round_index) >> 1)
