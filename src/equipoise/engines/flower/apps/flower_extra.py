"""Flower is an extra of Equipoise, and is imported when an app is made."""

from __future__ import annotations

from equipoise.errors import EquipoiseError


def require_flower() -> None:
    """Say what is missing where Flower is not installed."""
    try:
        import cryptography  # noqa: F401
        import flwr.app  # noqa: F401
    except ImportError as failure:
        raise EquipoiseError(f'{failure}. Install Flower with Equipoise: pip install "equipoise[flower]"') from failure
