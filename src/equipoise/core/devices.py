"""Devices: which of them can be used, and their random generators."""

from __future__ import annotations

import torch

from equipoise.errors import InvalidParameter


def usable_device(name: str | None) -> torch.device:
    """The device by name (None: the CPU), refused if torch does not know it or this machine has none."""
    try:
        device = torch.device(name or "cpu")
        torch.empty(0, device=device)
    except (RuntimeError, AssertionError, TypeError) as failure:  # torch asserts that it was compiled with CUDA
        reason = (str(failure).strip().splitlines() or ["unknown"])[0].rstrip(".")
        raise InvalidParameter("device", "must be a device of this machine", name, f'{reason}. Try "cpu".') from failure
    return device


def seed_generators(seed: int, device: torch.device) -> None:
    """Seed torch's CPU generator, and the device's if there is one; torch.manual_seed would seed every device."""
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)
