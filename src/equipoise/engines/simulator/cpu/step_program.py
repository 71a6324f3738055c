"""A recorded local step as a TorchScript program: all steps of a client run without Python between their operations.

The update of SGD is a part of the program. Where the gradient of a parameter is a product of two matrices, the product is added
to the parameter at once, and the gradient itself is never written to memory. That rounds in another way than plain autograd. A
step with convolutions is therefore repeated as it is, bit for bit: its units near kinks are many, and another rounding may
move the update of a round by per cents, and its time is not that of these products.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.jit._fuser import optimized_execution

from equipoise.engines.simulator.cpu.narrow_products import is_narrow, narrow_products, turned_call
from equipoise.engines.simulator.cpu.packed_products import PackedProduct, packed_products
from equipoise.engines.simulator.cpu.step_recorder import NotRecordable, Operation, Recording, Value
from equipoise.types import SgdRule

_aten = torch.ops.aten
_CONVOLUTIONS = {_aten.convolution.default, _aten.convolution_backward.default}
_TYPES = {
    torch.uint8: 0, torch.int8: 1, torch.int16: 2, torch.int32: 3, torch.int64: 4, torch.float16: 5, torch.float32: 6,
    torch.float64: 7, torch.bool: 11, torch.bfloat16: 15,
}  # fmt: skip
_FORMATS = {torch.contiguous_format: 0, torch.preserve_format: 1, torch.channels_last: 2, torch.channels_last_3d: 3}
_LAYOUTS = {torch.strided: 0}


class StepProgram:
    """Steps of SGD on `parameters` tensors, by a recording whose inputs are these, then others, and whose outputs are the loss
    and the gradients.
    """

    def __init__(self, recording: Recording, parameters: int, sgd: SgdRule) -> None:
        self.constants = list(recording.constants.values())
        as_it_is = any(operation.target in _CONVOLUTIONS for operation in recording.operations)
        products = {} if as_it_is else packed_products(recording)
        fused = {} if as_it_is or sgd.momentum or sgd.prox else _products(recording, parameters)
        narrow = set() if as_it_is else narrow_products(recording)
        self.source = _source(recording, parameters, sgd, fused, products, narrow)
        self._matrices = [(each, recording.constants[each.matrix]) for each in products.values()]
        self._packed: list[Tensor] = []
        self._versions: list[int] = []  # of the matrices when they were packed
        self.operations = len(recording.operations)
        self.inference = True  # some kernels keep what their backward pass needs only outside of inference mode
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # TorchScript may be said to be old
            try:
                self._unit = torch.jit.CompilationUnit(self.source)
            except Exception as failure:  # an operation or an argument that TorchScript does not know
                raise NotRecordable(f"TorchScript does not take it ({first_words(failure)})") from failure

    def run(
        self, parameters: Sequence[Tensor], inputs: Sequence[Sequence[Tensor]], starts: Sequence[Tensor],
        momentum: Sequence[Tensor], lr: float,
    ) -> list[Tensor]:  # fmt: skip
        """Take a step with each of `inputs`, on the parameters in place: the losses before each step."""
        with torch.inference_mode() if self.inference else torch.enable_grad(), optimized_execution(False):
            given = (list(parameters), self.constants, [list(each) for each in inputs], list(starts), list(momentum), lr)
            losses: list[Tensor] = self._unit.steps(*given, self._packed_matrices())
        return losses

    def _packed_matrices(self) -> list[Tensor]:
        """The matrices of products that are packed, packed again if somebody has changed them."""
        versions = [matrix._version for _, matrix in self._matrices]
        if versions != self._versions:
            self._packed, self._versions = [product.packed(matrix) for product, matrix in self._matrices], versions
        return self._packed


def first_words(failure: BaseException) -> str:
    """What a failure says, in one line."""
    lines = [line.strip() for line in str(failure).splitlines() if line.strip()]
    return (lines or [type(failure).__name__])[0][:200]


def _source(
    recording: Recording, parameters: int, sgd: SgdRule, fused: dict[int, list[Operation]], packed: dict[int, PackedProduct],
    narrow: set[int],
) -> str:  # fmt: skip
    """The program's text."""
    lines = ["losses: List[Tensor] = []", "nothing: List[Optional[number]] = []"]
    places = {number: place for place, number in enumerate(packed)}
    lines += [f"v{i} = p[{i}]" for i in range(parameters)]
    lines += [f"v{value.number} = c[{i}]" for i, value in enumerate(recording.constants)]
    lines += ["for given in x:"]
    body = [f"v{i} = given[{i - parameters}]" for i in range(parameters, recording.inputs)]
    for number in _needed(recording, fused, packed):
        operation = recording.operations[number]
        if number in packed:
            body.append(f"v{operation.results[0].number} = {packed[number].call(places[number])}")
        elif number in narrow:
            body.append(f"v{operation.results[0].number} = {turned_call(operation)}")
        else:
            body += _call(operation, f"r{number}")
    loss, *gradients = recording.outputs
    if loss is None:
        raise NotRecordable("the loss does not depend on the model")
    body.append(f"losses.append(v{loss.number})")
    for i, gradient in enumerate(gradients):
        body += _update(i, gradient, fused.get(i), sgd)
    lines += [f"    {line}" for line in body]
    lists = "p: List[Tensor], c: List[Tensor], x: List[List[Tensor]], s: List[Tensor], m: List[Tensor]"
    return (
        f"def steps({lists}, lr: float, k: List[Tensor]) -> List[Tensor]:\n"
        + "\n".join(f"    {line}" for line in [*lines, "return losses"])
        + "\n"
    )


def _needed(recording: Recording, fused: dict[int, list[Operation]], packed: dict[int, PackedProduct]) -> list[int]:
    """The operations, by number, that the update needs, or that write to memory or draw numbers."""
    wanted = {value for i, value in enumerate(recording.outputs, start=-1) if i not in fused}
    wanted |= {factor for product, *_ in fused.values() for factor in product.args[:2]}
    found: list[int] = []
    for number in reversed(range(len(recording.operations))):
        operation = recording.operations[number]
        results = operation.results.values()
        if operation.is_pure and wanted.isdisjoint(results):
            continue
        found.append(number)
        wanted.update((packed[number].x, packed[number].bias) if number in packed else operation.given())
    return found[::-1]


def _update(i: int, gradient: Value | None, product: list[Operation] | None, sgd: SgdRule) -> list[str]:
    """The step of `solvers.SGD` on parameter i."""
    if product is not None:
        left, right = (f"v{value.number}" for value in product[0].args[:2])
        target = f"torch.ops.aten.t(v{i})" if len(product) % 2 == 0 else f"v{i}"
        keep = f"1.0 - lr * {sgd.weight_decay!r}" if sgd.weight_decay else "1"
        return [f"torch.ops.aten.addmm_({target}, {left}, {right}, beta={keep}, alpha=-lr)"]
    lines, change = [], None if gradient is None else f"v{gradient.number}"
    if sgd.prox:
        lines.append(f"g = torch.ops.aten.mul(torch.ops.aten.sub(v{i}, s[{i}]), {sgd.prox!r})")
        lines += [f"g = torch.ops.aten.add(g, {change})"] if change is not None else []
        change = "g"
    if not sgd.momentum:
        lines += [f"torch.ops.aten.mul_(v{i}, 1.0 - lr * {sgd.weight_decay!r})"] if sgd.weight_decay else []
        return [*lines, f"torch.ops.aten.add_(v{i}, {change}, alpha=-lr)"] if change is not None else lines
    if sgd.weight_decay and change is not None:
        lines.append(f"g = torch.ops.aten.add({change}, v{i}, alpha={sgd.weight_decay!r})")
        change = "g"
    elif sgd.weight_decay:
        lines.append(f"g = torch.ops.aten.mul(v{i}, {sgd.weight_decay!r})")
        change = "g"
    lines.append(f"torch.ops.aten.mul_(m[{i}], {sgd.momentum!r})")
    lines += [f"torch.ops.aten.add_(m[{i}], {change})"] if change is not None else []
    return [*lines, f"torch.ops.aten.add_(v{i}, m[{i}], alpha=-lr)"]


def _products(recording: Recording, parameters: int) -> dict[int, list[Operation]]:
    """The parameters whose gradient is a product that nothing else uses: the product, and transpositions after it."""
    makers = {value: (number, each) for number, each in enumerate(recording.operations) for value in each.results.values()}
    uses, found = recording.uses(), {}
    own = {recording.storages[Value(i)] for i in range(parameters)}
    for i, gradient in enumerate(recording.outputs[1:]):
        chain: list[Operation] = []
        value = gradient
        while value in makers and uses[value] == 1:
            number, operation = makers[value]
            if operation.target is _aten.t.default:
                chain.append(operation)
                value = operation.args[0]
                continue
            if operation.target is _aten.mm.default:
                factors = {recording.storages[factor] for factor in operation.args[:2]}
                written = {memory for when, memory in recording.writes if when > number}
                # A factor that is a parameter may have been updated by then, and one that is written to has changed.
                if not factors & (own | written) and not is_narrow(recording, operation, recording.shapes[Value(i)][1]):
                    found[i] = [operation, *chain]
            break
    return found


def _call(operation: Operation, name: str) -> list[str]:
    """The lines that call an operation and name its results."""
    schema = operation.target._schema
    if operation.target is _aten.lift_fresh.default:  # a constant that the step may write to
        return [f"v{operation.results[0].number} = torch.ops.aten.clone(v{operation.args[0].number})"]
    space, _, function = schema.name.partition("::")
    if not function.isidentifier() or not space.isidentifier():
        raise NotRecordable(f"TorchScript does not take {schema.name}")
    before: list[str] = []
    arguments = [_written(value, schema.arguments[place].type, name, before) for place, value in enumerate(operation.args)]
    kinds = {argument.name: argument.type for argument in schema.arguments}
    arguments += [f"{key}={_written(value, kinds[key], name, before)}" for key, value in operation.kwargs.items()]
    call = f"torch.ops.{space}.{function}({', '.join(arguments)})"
    if operation.single:
        return [*before, f"v{operation.results[0].number} = {call}"]
    parts = [f"v{value.number} = {name}[{place}]" for place, value in operation.results.items()]
    return [*before, f"{name} = {call}", *parts]


def _written(value: Any, kind: Any, call: str, before: list[str]) -> str:
    """An argument of a call in TorchScript; `before` gets the lines that must come before it."""
    if isinstance(value, Value):
        return f"v{value.number}"
    if isinstance(value, tuple | list):
        inner = ", ".join(_written(each, kind, call, before) for each in value)
        if value and None not in value:
            return f"[{inner}]"
        name, text = f"{call}_{len(before)}", str(kind.annotation_str)  # lists whose type does not show
        before.append(f"{name}: {text.removeprefix('Optional[')[:-1] if text.startswith('Optional[') else text} = [{inner}]")
        return name
    if isinstance(value, bool) or value is None or isinstance(value, str):
        return repr(value)
    if isinstance(value, int):
        return str(int(value))
    if isinstance(value, float):
        return repr(value) if math.isfinite(value) else f'float("{value}")'
    for kinds in (_TYPES, _FORMATS, _LAYOUTS):
        if value in kinds:
            return str(kinds[value])
    if isinstance(value, torch.device):
        return f'torch.device("{value}")'
    raise NotRecordable(f"an operation takes a {type(value).__name__}")
