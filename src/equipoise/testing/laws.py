"""What every check says when a law does not hold."""

from __future__ import annotations

from torch import Tensor

from equipoise.errors import EquipoiseError


class LawBroken(EquipoiseError, AssertionError):
    """A part breaks a law of its contract."""


def hold(condition: bool, part: object, law: str, found: object = "") -> None:
    if not condition:
        raise LawBroken(f"{part!r} breaks the law: {law}." + (f" Found: {found}" if found != "" else ""))


def close(a: Tensor, b: Tensor, tolerance: float) -> bool:
    scale = max(1.0, float(b.abs().max()) if b.numel() else 1.0)
    return a.shape == b.shape and bool(((a.double() - b.double()).abs() <= tolerance * scale).all())
