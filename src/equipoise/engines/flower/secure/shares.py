"""Shamir's secret sharing over a prime field: any `threshold` shares give the secret, fewer say nothing about it.

The secret is the constant of a polynomial of degree threshold − 1 whose other coefficients are uniform modulo P = 2^521 − 1;
holder x gets its value at x. Lagrange weights at zero depend on the holders alone, so that a server that puts many secrets
together from the same holders computes them once. Flower has shares too (`flwr.common.secure_aggregation.crypto.shamir`); they
work in GF(2^128) bit by bit, and take about a second for one secret at 67 of 100 holders, where a sum needs a hundred secrets.

Source: Shamir 1979.
"""

from __future__ import annotations

import secrets
from collections.abc import Callable, Mapping
from functools import lru_cache

PRIME = (1 << 521) - 1
SHARE_BYTES = 66


def split(secret: int, threshold: int, holders: tuple[int, ...]) -> list[int]:
    """One share per holder, in order. Holders are distinct numbers ≥ 1, the places at which the polynomial is taken."""
    coefficients = [secret, *(secrets.randbelow(PRIME) for _ in range(threshold - 1))]
    shares = []
    for place in holders:
        value = 0
        for coefficient in reversed(coefficients):
            value = (value * place + coefficient) % PRIME
        shares.append(value)
    return shares


@lru_cache(maxsize=512)
def _weights(places: tuple[int, ...], at: int) -> tuple[int, ...]:
    """Lagrange's weights: a polynomial of degree < len(places) has the value Σ weight · value(place) at `at`."""
    weights = []
    for place in places:
        above = below = 1
        for other in places:
            if other != place:
                above = above * (at - other) % PRIME
                below = below * (place - other) % PRIME
        weights.append(above * pow(below, -1, PRIME) % PRIME)
    return tuple(weights)


def combine(shares: Mapping[int, int], at: int = 0) -> int:
    """The value at `at` (0: the secret) of the polynomial through these shares, by holder: exactly `threshold` of them."""
    places = tuple(shares)
    return sum(weight * shares[place] for weight, place in zip(_weights(places, at), places, strict=True)) % PRIME


def recover(shares: Mapping[int, int], threshold: int, is_right: Callable[[int], bool]) -> tuple[int | None, frozenset[int]]:
    """The secret, and the holders whose shares are wrong: (None, nobody) if it cannot be found.

    `is_right` knows the secret when it sees it. The first `threshold` shares are tried, then those from the second on, and so
    around: with s shares that finds the secret whenever s − threshold neighbours in a row hold all that are wrong, thus always
    with one liar and one share to spare.
    """
    places = sorted(shares)
    for first in range(len(places) if len(places) > threshold else min(1, len(places) // threshold)):
        around = (places * 2)[first : first + threshold]
        chosen = {place: shares[place] for place in sorted(around)}
        secret = combine(chosen)
        if is_right(secret):
            others = () if first == 0 else tuple(place for place in places if place not in chosen)
            return secret, frozenset(place for place in others if combine(chosen, place) != shares[place])
    return None, frozenset()
