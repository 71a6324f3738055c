"""The model of a federation: how server and nodes make it, and how they see that they have made the same one."""

from __future__ import annotations

import hashlib
import inspect
import threading
from collections.abc import Callable

import torch
from torch import nn

from equipoise.core.task import Task
from equipoise.errors import InvalidParameter

ModelSource = nn.Module | Callable[..., nn.Module]
_SEEDED = threading.Lock()  # torch has one generator for all threads


def make_model(model: ModelSource, seed: int) -> nn.Module:
    """A module: the one that is given, or what its class, or a function of nothing or of the seed, makes under the seed."""
    if isinstance(model, nn.Module):
        return model
    rule = "must be a torch module, its class, or a function of nothing (or of the seed) that makes one"
    if not callable(model):
        raise InvalidParameter("model", rule, model)
    needed = [
        p for p in inspect.signature(model).parameters.values()
        if p.default is p.empty and p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD)
    ]  # fmt: skip
    if len(needed) > 1:
        fix = "Write model=lambda: Net(…)."
        raise InvalidParameter("model", rule, f"a function of {', '.join(p.name for p in needed)}", fix)
    with _SEEDED, torch.random.fork_rng(devices=[]):
        torch.default_generator.manual_seed(seed)
        made = model(seed) if needed else model()
    if not isinstance(made, nn.Module):
        raise InvalidParameter("model", rule, type(made).__name__)
    return made


def digest_layout(task: Task) -> str:
    """A short hash of the names, shapes and type of the trained parameters: server and nodes must agree on it."""
    layout = task.layout
    text = repr((layout.names, [tuple(shape) for shape in layout.shapes], str(layout.dtype)))
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def digest_frozen(task: Task) -> str:
    """A short hash of what the model holds besides trained parameters: it does not travel, so all machines must agree on it."""
    digest = hashlib.blake2b(digest_size=8)
    held = [*task.module.named_parameters(), *task.module.named_buffers()]
    for name, value in sorted((name, value) for name, value in held if name not in task.layout.names):
        plain = value.detach().cpu()
        digest.update(f"{name} {plain.dtype} {tuple(plain.shape)}".encode() + plain.double().numpy().tobytes())
    return digest.hexdigest()
