"""`models.ConvNet` by a gradient that is written by hand: as matrix products on a CPU, as Triton programs on a GPU."""

from __future__ import annotations

from functools import cached_property, partial

import torch
from torch import Tensor

from equipoise.core.task import Task
from equipoise.engines.simulator.batched_steps import Gradients, stacked_gradients, take_batched_steps
from equipoise.engines.simulator.cpu.convnet_gradients import convnet_gradients, why_not_plain_convnet
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ChunkResult, ChunkWork, LocalPath, Workplace
from equipoise.engines.simulator.precision import Precision, why_no_kernels

_MOST_HIDDEN = 512  # units: a program holds the weights of all of them at once


class HandWrittenConvNet(LocalPath):
    """The ConvNet, any solver: gradients by a function written for it, one batched computation per step."""

    name = "hand-written ConvNet"

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self.obstacle = place.clients.why_not_plain or why_not_by_hand(place.task, place.device)

    def supports_rule(self, rule: LocalRule) -> str | None:
        """Model and device decide alone."""
        return self.obstacle

    @cached_property
    def gradients(self) -> Gradients:
        """The gradient for the worker's device."""
        return fastest_gradients(self.place.task, self.place.device, self.place.precision)

    def run(self, work: ChunkWork) -> ChunkResult:
        """Step by step."""
        return take_batched_steps(work, self.gradients)


def why_not_by_hand(task: Task, device: torch.device) -> str | None:
    """Why the hand-written gradient is not for this task on this device; None if it is."""
    reason = why_not_plain_convnet(task, _MOST_HIDDEN if device.type == "cuda" else 0)
    if reason is not None or device.type == "cpu":
        return reason
    if device.type != "cuda":
        return f"there is no such gradient for the device {device}"
    return why_no_kernels("convnet_kernels") if task.layout.dtype == torch.float32 else "its programs for a GPU are for float32"


def fastest_gradients(task: Task, device: torch.device, precision: Precision) -> Gradients:
    """How to get gradients of many clients at once: written by hand where the model is known, else by autograd."""
    if why_not_by_hand(task, device) is not None:
        return stacked_gradients
    if device.type == "cpu":
        return convnet_gradients
    from equipoise.engines.simulator.cuda.kernels.convnet_kernels import convnet_gradients as on_a_gpu

    return partial(on_a_gpu, precision=precision.name)


def logits_of_own_models(task: Task, models: Tensor, x: Tensor, precision: Precision) -> Tensor:
    """Logits (k, b, classes) of examples (k, b, …) under models (k, D) on a GPU, for tasks that `why_not_by_hand` admits."""
    from equipoise.engines.simulator.cuda.kernels.convnet_kernels import convnet_logits

    return convnet_logits(task.layout.unflatten(models), x, precision="tf32" if precision.reduced else "float32")
