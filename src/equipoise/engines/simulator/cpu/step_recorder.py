"""Records the tensor operations of one local step, forward and backward, so that they can be repeated without Python.

The step runs once, on real tensors, while every operation below autograd is written down with the values it takes and gives.
Nothing is asked of the model: whatever it calls ends in such operations. What cannot be repeated is refused: operations that
depend on the values of tensors (`if x.sum() > 0`, `.item()`), or on what no operation of torch made.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode

MOST_OPERATIONS = 20_000
_aten = torch.ops.aten
_SAME = {_aten.detach.default, _aten.alias.default}  # without autograd, the tensor itself
_NEED_VALUES = {"aten::_local_scalar_dense", "aten::item", "aten::is_nonzero", "aten::equal"}


class NotRecordable(Exception):
    """Why a step cannot be recorded, in words."""


@dataclass(frozen=True)
class Value:
    """A tensor of a recording, by number."""

    number: int


@dataclass(frozen=True)
class Operation:
    """One call of an operation: its arguments with `Value`s in place of tensors, and the values it gives, by their places."""

    target: Any  # torch._ops.OpOverload
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    results: dict[int, Value]
    single: bool  # whether it gives one tensor, not a sequence

    @property
    def is_pure(self) -> bool:
        """Whether it does nothing but give its results: it writes to no memory and draws no numbers."""
        random = torch.Tag.nondeterministic_seeded in self.target.tags
        return bool(self.results) and not self.target._schema.is_mutable and not random

    def given(self) -> list[Value]:
        """The values that it takes."""
        return _values((self.args, tuple(self.kwargs.values())))


@dataclass
class Recording:
    """The operations of a step in order, on `inputs` values (0 to inputs − 1) and constants; and what came out of it."""

    inputs: int
    operations: list[Operation] = field(default_factory=list)
    constants: dict[Value, Tensor] = field(default_factory=dict)  # tensors that the step uses and does not make
    outputs: list[Value | None] = field(default_factory=list)
    storages: dict[Value, int] = field(default_factory=dict)  # values in one memory have one number
    shapes: dict[Value, torch.Size] = field(default_factory=dict)
    writes: list[tuple[int, int]] = field(default_factory=list)  # (number of the operation, memory that it writes to)

    def uses(self) -> Counter[Value]:
        """How often each value is an argument or an output."""
        counts: Counter[Value] = Counter(value for value in self.outputs if value is not None)
        for operation in self.operations:
            counts.update(operation.given())
        return counts


def _values(tree: Any) -> list[Value]:
    """All values in nested tuples and lists."""
    if isinstance(tree, Value):
        return [tree]
    return [value for each in tree for value in _values(each)] if isinstance(tree, tuple | list) else []


def record_step(run: Callable[[], Sequence[Tensor | None]], inputs: Sequence[Tensor]) -> Recording:
    """What `run()` does with the inputs; its results are the outputs of the recording."""
    recorder = _Recorder(inputs)
    with recorder:
        outputs = run()
    recorder.recording.outputs = [None if each is None else recorder.value_of(each) for each in outputs]
    return recorder.recording


class _Recorder(TorchDispatchMode):  # type: ignore[no-untyped-call]
    def __init__(self, inputs: Sequence[Tensor]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.recording = Recording(len(inputs))
        self._known: dict[int, Value] = {}
        self._held: list[Tensor] = []  # so that no other tensor gets the identity of one that is gone
        self._made: set[int] = set()  # memory that the step has made
        for tensor in inputs:
            self._name(tensor)

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func._schema.name in _NEED_VALUES:
            raise NotRecordable("its operations depend on values of tensors")
        given, options = self._named(args), {name: self._named(value) for name, value in kwargs.items()}
        result = func(*args, **kwargs)
        if func in _SAME:
            self._known[id(result)] = given[0]
            self._held.append(result)
            return result
        operations = self.recording.operations
        if len(operations) >= MOST_OPERATIONS:
            raise NotRecordable(f"a step has more than {MOST_OPERATIONS} operations")
        self._note_writes(func, args, kwargs)
        single = isinstance(result, Tensor)
        each = [result] if single else list(result) if isinstance(result, tuple | list) else []
        results = {place: self._result(tensor) for place, tensor in enumerate(each) if isinstance(tensor, Tensor)}
        operations.append(Operation(func, given, options, results, single))
        return result

    def _result(self, tensor: Tensor) -> Value:
        value = self._name(tensor)
        if value.number >= self.recording.inputs and value not in self.recording.constants:
            self._made.add(self.recording.storages[value])
        return value

    def _note_writes(self, func: Any, args: Any, kwargs: Any) -> None:
        for place, argument in enumerate(func._schema.arguments):
            if argument.alias_info is None or not argument.alias_info.is_write:
                continue
            given = kwargs.get(argument.name, args[place] if place < len(args) else None)
            for tensor in given if isinstance(given, tuple | list) else [given]:
                if isinstance(tensor, Tensor):
                    self.recording.writes.append((len(self.recording.operations), _memory(tensor)))

    def value_of(self, tensor: Tensor) -> Value:
        """The value that a tensor is; one that nobody has made is a constant."""
        if id(tensor) not in self._known:
            value = self._name(tensor)
            if self.recording.storages[value] in self._made:
                raise NotRecordable("a tensor came about in a way that cannot be followed")
            self.recording.constants[value] = tensor.detach()
        return self._known[id(tensor)]

    def _name(self, tensor: Tensor) -> Value:
        """The value of a tensor, a new one if it was not known."""
        if id(tensor) not in self._known:
            value = self._known[id(tensor)] = Value(len(self._held))
            self._held.append(tensor)
            self.recording.storages[value] = _memory(tensor)
            self.recording.shapes[value] = tensor.shape
        return self._known[id(tensor)]

    def _named(self, given: Any) -> Any:
        """Arguments with values in place of tensors."""
        if isinstance(given, Tensor):
            return self.value_of(given)
        if isinstance(given, tuple | list):
            return type(given)(map(self._named, given)) if type(given) in (tuple, list) else tuple(map(self._named, given))
        return given


def _memory(tensor: Tensor) -> int:
    """What is the same for tensors in one memory."""
    try:
        return int(tensor.untyped_storage()._cdata)
    except (RuntimeError, NotImplementedError):  # a tensor of another layout
        return -id(tensor)
