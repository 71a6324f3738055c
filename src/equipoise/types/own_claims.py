"""What a class claims of its own methods alone."""

from collections.abc import Mapping

OWN: Mapping[str, bool] = {"own": True}
"""Metadata of a field that subclasses do not inherit: `field(default=True, metadata=OWN)`."""
