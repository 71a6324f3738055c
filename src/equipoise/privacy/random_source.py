"""Where the random bits of private releases come from: a seed in simulation, the operating system in deployment.

Everything private in this package draws from one `RandomSource`, as 64-bit words whose bits are uniform and independent. Noise
that can be drawn again from a seed protects nobody who knows the seed: under `Seeded` a reported ε is nominal, what the
same run would cost with `SystemSource`.
"""

from __future__ import annotations

import os
from typing import Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from equipoise.core import rng
from equipoise.errors import is_integer, require, require_integer


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


def system_gaussian(count: int) -> Tensor:
    """Standard normal numbers (count,) float64 from the operating system: the inverse distribution function of 53 bits each.

    These are floating-point numbers, with the gaps that these have: see "What floating-point noise does not protect" in
    docs/privacy.md.
    """
    uniform = ((SystemSource().words(count) >> np.uint64(11)).astype(np.float64) + 0.5) * 2.0**-53
    drawn: Tensor = torch.special.ndtri(torch.from_numpy(uniform))
    return drawn
