"""Where the random bits of private releases come from: the operating system, or a secret that it has drawn for one run.

Everything private in this package draws from one `RandomSource`, as 64-bit words whose bits are uniform and independent. Noise
that can be drawn again from a seed (`Seeded`) protects nobody who knows the seed: it is for tests.
"""

from __future__ import annotations

import hashlib
import os
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import rng
from equipoise.errors import is_integer, require, require_integer

SECRET_BYTES = 16  # of a run's secret
_BLOCK = 1 << 20  # words of one hash


class RandomSource(Protocol):
    """A stream of random words. Law: all bits are uniform and independent, also of those of earlier calls."""

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` words of the stream."""


class Seeded:
    """A stream that is a pure function of (seed, purpose, round): for simulations, where runs must repeat and resume.

    The words are those of NumPy's Philox, a counter-based generator, under a key made of the three. Two sources with the same
    three give the same words; others are independent for statistical purposes. It is not a cryptographic generator, and its
    key has 64 bits: ε is nominal.

    `seed` is a whole number, `purpose` says what the words are for, and `round_index` is the round.

    >>> Seeded(0, "quantile", 3).words(2) == Seeded(0, "quantile", 3).words(2)
    array([ True,  True])
    """

    def __init__(self, seed: int, purpose: str, round_index: int = 0) -> None:
        require(is_integer(seed), "seed", "must be a whole number", seed)
        require(isinstance(purpose, str), "purpose", "must be a string", purpose, 'E.g. "quantile": what the noise is for.')
        require_integer("round_index", round_index, 0)
        self._described = (int(seed), purpose, int(round_index))
        # The prefix keeps noise apart from whatever else is drawn for a purpose of the same name.
        key = rng.stream_key(int(seed), f"private noise: {purpose}", int(round_index))
        self._stream = np.random.Philox(key=key)

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` words of the seeded stream, (count,) uint64."""
        words: NDArray[np.uint64] = self._stream.random_raw(count)
        return words

    def __repr__(self) -> str:
        return "Seeded(seed={!r}, purpose={!r}, round_index={!r})".format(*self._described)


class SecretStream:
    """A stream that follows from a key of 128 bits: SHAKE-128, an extendable hash, of (key, round, purpose, call, block).

    SHAKE-128 under a secret prefix is held to be a pseudorandom function: without the key nobody is known to tell these words
    from fair coins. Whoever has the key draws them again. `purpose` and `round_index` are as for `Seeded`.

    >>> SecretStream(bytes(16), "quantile", 3).words(2) == SecretStream(bytes(16), "quantile", 3).words(2)
    array([ True,  True])
    """

    def __init__(self, key: bytes, purpose: str, round_index: int = 0) -> None:
        require(len(key) == SECRET_BYTES, "key", f"must have {SECRET_BYTES} bytes", len(key))  # none: it was erased
        self._described, self._drawn = (purpose, round_index), 0
        self._keyed = hashlib.shake_128(b"equipoise" + key + round_index.to_bytes(8, "little") + purpose.encode())

    def words(self, count: int) -> NDArray[np.uint64]:
        """The next `count` words of the stream, (count,) uint64."""
        parts = []
        for start in range(0, count, _BLOCK):
            block = self._keyed.copy()
            block.update(self._drawn.to_bytes(8, "little"))
            parts.append(block.digest(8 * min(_BLOCK, count - start)))
            self._drawn += 1
        return np.frombuffer(b"".join(parts), dtype="<u8").astype(np.uint64, copy=False)

    def __repr__(self) -> str:
        return "SecretStream(…, purpose={!r}, round_index={!r})".format(*self._described)


class SystemSource:
    """The operating system's cryptographic generator: for deployments. Nothing drawn from it can be drawn again.

    >>> len(SystemSource().words(3))
    3
    """

    def words(self, count: int) -> NDArray[np.uint64]:
        """`count` words of the operating system's generator, (count,) uint64."""
        return np.frombuffer(os.urandom(8 * count), dtype=np.uint64)

    def __repr__(self) -> str:
        return "SystemSource()"


def uniforms(count: int, source: RandomSource) -> NDArray[np.float64]:
    """Numbers (count,) in [0, 1), multiples of 2⁻⁵³: fair coins of any chance are numbers below it."""
    return (source.words(count) >> np.uint64(11)).astype(np.float64) * 2.0**-53


def gaussian(count: int, source: RandomSource) -> Tensor:
    """Standard normal numbers (count,) float64: the inverse distribution function of 53 bits each.

    These are floating-point numbers, with the gaps that these have: see "What floating-point noise does not protect" in
    docs/privacy.md.
    """
    drawn: Tensor = torch.special.ndtri(torch.from_numpy(uniforms(count, source) + 2.0**-54))
    return drawn
