"""What a local step costs, roughly and always the same: by counting its operations and multiplications, not by a clock."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

from equipoise.core import rng, trees
from equipoise.core.forward_rules import ForwardRules
from equipoise.engines.simulator.local_work import Workplace

_EXAMPLES = 3
_aten = torch.ops.aten


@dataclass(frozen=True)
class StepCost:
    """Operations of a step, forward and backward, and multiplications for each example."""

    operations: int = 0
    products_per_example: float = 0.0


class _CountedOperations(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.operations, self.products = 0, 0.0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        self.operations += 1
        if func.overloadpacket in (_aten.mm, _aten.bmm):
            self.products += result.numel() * args[0].shape[-1]
        elif func.overloadpacket is _aten.addmm:
            self.products += result.numel() * args[1].shape[-1]
        elif func.overloadpacket in (_aten.convolution, _aten.convolution_backward):
            backward = func.overloadpacket is _aten.convolution_backward
            out, weight = (args[0], args[2]) if backward else (result, args[1])
            self.products += (1 + backward) * out.numel() * weight[0].numel()
        elif isinstance(result, Tensor):
            self.products += result.numel()
        return result


def step_cost(place: Workplace) -> StepCost:
    """The cost of a step of the model at a workplace, counted once on a few examples; nothing if it cannot be counted."""
    if place not in _known:
        _known[place] = _counted(place)
    return _known[place]


_known: WeakKeyDictionary[Workplace, StepCost] = WeakKeyDictionary()


def _counted(place: Workplace) -> StepCost:
    task, clients, counter = place.task, place.clients, _CountedOperations()
    rows = torch.arange(_EXAMPLES) % max(1, min(_EXAMPLES, int(clients.host_sizes[0])))
    buffers = {name: value.clone() for name, value in task.module.named_buffers()}
    params = task.layout.read(task.module).requires_grad_()
    key = rng.step_keys(torch.tensor([7]), 0)[0]
    try:
        x, y = clients.inputs(rows, task.layout.dtype), clients.targets(rows, task.layout.dtype)
        with torch.random.fork_rng(devices=[]), ForwardRules(key, batched=False), counter:
            torch.autograd.grad(task.losses(params, trees.clone(x), y).mean(), params)
    except Exception:  # a user's model may raise anything: then nothing is measured
        return StepCost()
    finally:
        with torch.no_grad():
            for name, value in task.module.named_buffers():
                value.copy_(buffers[name])
    return StepCost(counter.operations, counter.products / _EXAMPLES)
