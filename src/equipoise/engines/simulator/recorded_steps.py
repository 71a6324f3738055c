"""One client after another with recorded steps: a step's operations are recorded once and repeated without Python, on a CPU.

Only full batches are recorded, so that which steps are recorded never depends on what ran before; the last, smaller batch of an
epoch is done by plain autograd on the same parameters.
"""

from __future__ import annotations

import random
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from equipoise.core import rng, trees
from equipoise.core.dropout import StepNoise
from equipoise.core.forward_rules import ForwardRules
from equipoise.engines.simulator.cpu.step_program import StepProgram, first_words
from equipoise.engines.simulator.cpu.step_recorder import NotRecordable, record_step
from equipoise.engines.simulator.local_rule import LocalRule
from equipoise.engines.simulator.local_work import ONLY_FASTEST, ChunkResult, ChunkWork, LocalPath, Workplace
from equipoise.engines.simulator.one_by_one import Batches, OneByOne, take_sgd_step, trained_parameters
from equipoise.types import SgdRule

_RATHER_EXACT = (1e-3, 1e-5)  # what a recorded gradient may differ by from a plain one, of the parameter's and the whole one


class RecordedSteps(LocalPath):
    """Any model whose step can be recorded, trained by SGD in batches of one size; taken where measuring finds it fastest."""

    name = "recorded steps"
    batches = False
    unpadded = True

    def __init__(self, place: Workplace) -> None:
        super().__init__(place)
        self._plain = OneByOne(place)
        self._programs: dict[tuple[SgdRule, int], RecordedBatches | str] = {}

    def supports_rule(self, rule: LocalRule) -> str | None:
        """On a CPU, SGD on full batches of one shape, if a step can be recorded."""
        if self.place.device.type != "cpu":
            return "it is for a CPU; a GPU has step graphs"
        if rule.traits.sgd is None:
            return rule.why_not_sgd()
        if rule.pull != "none":
            return "models are pulled towards anchors"
        if self.place.clients.has_sequences:
            return "batches of sequences are padded to different lengths"
        return self._failure(rule)

    def supports(self, work: ChunkWork) -> str | None:
        """It is never the first choice."""
        if work.chosen == self.name:
            return self.why_not_recorded(work.rule)
        return ONLY_FASTEST

    def why_not_recorded(self, rule: LocalRule) -> str | None:
        """Why steps of a rule that is supported cannot be recorded: tried out the first time."""
        if (rule.sgd, rule.solver.batch_size or 0) not in self._programs:
            self._record(rule)
        return self._failure(rule)

    def _failure(self, rule: LocalRule) -> str | None:
        made = self._programs.get((rule.sgd, rule.solver.batch_size or 0))
        return made if isinstance(made, str) else None

    def run(self, work: ChunkWork) -> ChunkResult:
        """Client by client."""
        made = self._record(work.rule)
        if isinstance(made, str):
            raise TypeError(made)
        return self._plain.run(work, made)

    def _record(self, rule: LocalRule) -> RecordedBatches | str:
        """The programs for a rule, or why there are none."""
        key = (rule.sgd, rule.solver.batch_size or 0)
        if key not in self._programs:
            try:
                self._programs[key] = RecordedBatches(self.place, rule)
            except NotRecordable as reason:
                self._programs[key] = f"a step cannot be recorded: {reason}"
        return self._programs[key]


class RecordedBatches:
    """Programs for batches of the clients at a workplace: full ones, and smaller last ones if most clients have the same."""

    def __init__(self, place: Workplace, rule: LocalRule) -> None:
        if rule.traits.split is not None:
            raise NotRecordable("each client's examples are split")
        sizes, least = place.clients.host_sizes, place.task.smallest_batch
        if rule.solver.batch_size is None and int(sizes.min()) != int(sizes.max()):
            raise NotRecordable("each client has a batch of another size")
        full = int(sizes[0]) if rule.solver.batch_size is None else rule.solver.batch_size
        if int(sizes.max()) < max(full, least):
            raise NotRecordable("no client has a full batch")
        self._each = [RecordedBatch(place, rule.sgd, full)]
        rests = torch.bincount(sizes % full, minlength=full)[1:]  # of 1, 2, … examples
        common = int(rests.argmax()) + 1 if len(rests) else 0
        if common >= least and 2 * int(rests.max()) >= len(sizes):
            self._each.append(RecordedBatch(place, rule.sgd, common))

    def leading(self, batches: Batches) -> tuple[RecordedBatch | None, int]:
        """The program of the first batch, and how many batches in a row it takes; without one None and 1."""
        each = [_shapes(x, y) for x, y in batches]
        for program in self._each:
            count = next((i for i, shapes in enumerate(each) if shapes != program.shapes), len(each))
            if count:
                return program, count
        return None, 1


class RecordedBatch:
    """The program of a batch of some size."""

    def __init__(self, place: Workplace, sgd: SgdRule, size: int) -> None:
        self.place, self.task = place, place.task
        batches = self._examples(size)
        self.shapes = _shapes(*batches[0])
        self._asked: list[tuple[Any, ...]] = []  # what dropout asks for in a step, in order
        training = self.task.scorer.training
        before = {name: value.clone() for name, value in self.task.module.named_buffers()}
        values = [leaf.detach().clone() for leaf in self.leaves]
        try:
            self.task.scorer.train()
            with torch.random.fork_rng(devices=[]):
                self.program = self._recorded(batches[0], sgd)
                self._try(batches, sgd, values)
        except NotRecordable:
            raise
        except Exception as failure:  # a user's model may raise anything, and TorchScript, too
            raise NotRecordable(first_words(failure)) from failure
        finally:
            self.task.scorer.train(training)
            with torch.no_grad():
                torch._foreach_copy_(self.leaves, values)
                for name, value in self.task.module.named_buffers():
                    value.copy_(before[name])

    def _try(self, batches: Batches, sgd: SgdRule, values: list[Tensor]) -> None:
        """Compare the program with plain autograd on two batches."""
        buffers = {name: value.clone() for name, value in self.task.module.named_buffers()}
        try:
            self._compare(batches[0], 0, sgd, values)
        except RuntimeError:
            self.program.inference = False
            for name, value in self.task.module.named_buffers():
                value.copy_(buffers[name])
            self._compare(batches[0], 0, sgd, values)
        self._compare(batches[1], 1, sgd, values)

    @cached_property
    def leaves(self) -> list[Tensor]:
        """The module's trained parameters in the order of the layout."""
        return trained_parameters(self.task)

    def run(
        self, batches: Batches, first: int, noise: StepNoise | None, start: list[Tensor], momentum: list[Tensor],
        rule: LocalRule,
    ) -> list[Tensor]:  # fmt: skip
        """Take a step with each batch."""
        inputs = [[*trees.leaves(x), *trees.leaves(y)] for x, y in batches]
        if noise is not None and self._asked:
            for number, given in enumerate(inputs, start=first):
                draw = noise.at(number)
                given += [draw(*asked) for asked in self._asked]
        leaves = [leaf.detach() for leaf in self.leaves]
        return [loss.clone() for loss in self.program.run(leaves, inputs, start, momentum, rule.lr)]

    def _examples(self, size: int) -> Batches:
        """Two batches of a size, from different clients where there are several that are large enough."""
        clients, dtype = self.place.clients, self.task.layout.dtype
        large, batches = (clients.host_sizes >= size).nonzero().flatten(), []
        for k, backwards in ((int(large[0]), False), (int(large[-1]), True)):
            here = clients.rows(k)
            rows = (
                torch.arange(here.stop - size, here.stop).flip(0) if backwards else torch.arange(here.start, here.start + size)
            )
            batches.append((clients.inputs(rows, dtype), clients.targets(rows, dtype)))
        return batches

    def _loss(self, batch: tuple[Any, Any], number: int, draw: Any = None) -> Tensor:
        """The loss of a batch under masks of a step, drawn from a stream that begins anew."""
        torch.default_generator.manual_seed(number)
        key = rng.step_keys(torch.tensor([7]), number)[0]
        with ForwardRules(key, batched=False, draw=draw):
            losses: Tensor = self.task.scorer(trees.clone(batch[0]), trees.clone(batch[1]), False)[0]
            return losses.mean()

    def _recorded(self, batch: tuple[Any, Any], sgd: SgdRule) -> StepProgram:
        noise = StepNoise(rng.step_keys(torch.tensor([7]), torch.arange(2)))
        draw_first, drawn = noise.at(0), []

        def note(*asked: Any) -> Tensor:
            self._asked.append(asked)
            drawn.append(draw_first(*asked).clone())
            return drawn[-1]

        state = _outside_state(self.task.module)
        self._loss(batch, 0, note)
        if _outside_state(self.task.module) != state:
            raise NotRecordable("the model changes attributes of its own, or draws numbers outside torch")
        x, y = trees.clone(batch[0]), trees.clone(batch[1])
        given, key = iter(drawn), rng.step_keys(torch.tensor([7]), 0)[0]

        def run() -> Sequence[Tensor | None]:
            with ForwardRules(key, batched=False, draw=lambda *_: next(given)):
                loss = self.task.scorer(x, y, False)[0].mean()
            return loss.detach(), *torch.autograd.grad(loss, self.leaves, allow_unused=True)

        recording = record_step(run, [*self.leaves, *trees.leaves(x), *trees.leaves(y), *drawn])
        return StepProgram(recording, len(self.leaves), sgd)

    def _compare(self, batch: tuple[Any, Any], number: int, sgd: SgdRule, values: list[Tensor]) -> None:
        """Refuse a program whose step on a batch is not that of plain autograd, with other masks than it was recorded with."""
        task, leaves = self.task, self.leaves
        buffers = {name: value.clone() for name, value in task.module.named_buffers()}
        noise = StepNoise(rng.step_keys(torch.tensor([7]), torch.arange(2)))
        loss = self._loss(batch, number, noise.at(number))
        gradients = torch.autograd.grad(loss, leaves, allow_unused=True, materialize_grads=True)
        after = {name: value.clone() for name, value in task.module.named_buffers()}
        for name, value in task.module.named_buffers():
            value.copy_(buffers[name])
        whole = float(torch.stack(torch._foreach_norm(gradients)).norm())
        size = float(torch.stack(torch._foreach_norm(values)).norm())
        lr = max(size, 1.0) / max(whole, 1e-30)  # a step as long as the parameters: little is lost to rounding
        momentum = [torch.zeros_like(leaf) for leaf in leaves]
        expected = [value.clone() for value in values]
        with torch.no_grad():
            take_sgd_step(expected, gradients, [each.clone() for each in momentum], values, sgd, lr)
        torch.default_generator.manual_seed(number)
        given = [*trees.leaves(trees.clone(batch[0])), *trees.leaves(trees.clone(batch[1]))]
        given += [noise.at(number)(*asked) for asked in self._asked]
        found = [value.clone() for value in values]
        (seen,) = self.program.run(found, [given], values, momentum, lr)
        good = bool(torch.isclose(seen.clone(), loss.detach(), rtol=1e-4, atol=1e-5, equal_nan=True))
        for value, wanted, had in zip(found, expected, values, strict=True):
            limit = _RATHER_EXACT[0] * float((wanted - had).norm()) + _RATHER_EXACT[1] * lr * whole
            good &= not float((value - wanted).norm()) > limit
        named = dict(task.module.named_buffers())
        good &= all(torch.allclose(named[name], value, equal_nan=True, rtol=1e-4, atol=1e-5) for name, value in after.items())
        if not good:
            raise NotRecordable("repeated on other examples, its result differs from that of the model")
        with torch.no_grad():
            torch._foreach_copy_(leaves, values)


def _shapes(x: Any, y: Any) -> list[tuple[torch.Size, torch.dtype]]:
    return [(leaf.shape, leaf.dtype) for leaf in (*trees.leaves(x), *trees.leaves(y))]


def _outside_state(module: nn.Module) -> list[Any]:
    """What a forward pass may change beside tensors: plain attributes of the module's parts, and generators outside torch."""
    plain = (bool, int, float, str, type(None))
    attributes = [
        (name, key, value)
        for name, part in module.named_modules()
        for key, value in vars(part).items()
        if isinstance(value, plain)
    ]
    return [attributes, random.getstate(), repr(np.random.get_state(legacy=False))]
