"""The gradient of `models.ConvNet` for many clients at once on a CUDA device, in nine Triton programs.

What a library does with one set of weights per client is slow: grouped convolutions leave most of the device idle, and
columns of patches for matrix products (im2col) are 25 times the size of the maps they repeat. Here a convolution is a sum over
its 25 taps of products on tensor cores whose operands are read from the maps themselves, shifted by the tap. Bias, pooling and
ReLU happen before a map is written, at a quarter of its size, together with a byte that says which of a window's four numbers
was the largest. Backwards that byte spreads a pooled gradient over its window while it is loaded. The first layer's map before
pooling (24 × 24 × 32 numbers per image, the largest there is) never reaches memory in either direction.

All sums have a fixed order, so that the same inputs give the same bits. A client's numbers come from its own data alone.

Source: the method is implicit matrix multiplication (Chetlur et al., "cuDNN: Efficient primitives for deep learning", 2014);
its use for pooled maps with a byte per window and per client is ours.
"""

from __future__ import annotations

from contextlib import nullcontext
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import triton
from torch import Tensor

from equipoise.core.plain_text import parse_toml
from equipoise.engines.simulator.cuda.kernels import convnet_backward as backward
from equipoise.engines.simulator.cuda.kernels import convnet_programs as programs
from equipoise.engines.simulator.example_batches import ExampleBatch
from equipoise.engines.simulator.precision import Precision
from equipoise.errors import require

if TYPE_CHECKING:
    from equipoise.core.task import Task

_SHAPES = ((784,), (28, 28), (1, 28, 28))
_MOST_CLIENTS = 65535  # CUDA's limit for the second grid axis
_HELD = 512  # outputs × channels of which one program holds the weights


# By precision and program.
SETTINGS: dict[str, dict[str, dict[str, int]]] = parse_toml(Path(__file__).with_name("convnet_sizes.toml"))


@torch.no_grad()
def convnet_gradients(
    task: Task, params: dict[str, Tensor], batch: ExampleBatch, *, precision: str = "float32"
) -> tuple[dict[str, Tensor], Tensor]:
    """Gradient of each client's batch loss in its own parameters (k, …), and the losses (k,), for `is_plain_convnet` tasks.

    It is what `stacked_gradients` gives, for float32 parameters on a CUDA device. Products take their operands as they
    are ("float32", each in two parts of 11 bits), rounded to 11 bits ("tf32") or to 8 ("bf16", but 11 between a hidden layer
    and its neighbours); all sums and results are in float32, also where torch would cast products to a shorter type.
    Gradients have the parameters' shapes; that of `conv2.weight` lies in memory as (k, 5, 5, 32, 64). Parameters in the same
    order are read where they are, others are copied first. Nothing waits for the device, and all memory comes from torch, so
    that a CUDA graph can hold the call.
    """
    x, y, shares = _checked(params, batch, precision)
    names = tuple(params)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext(), torch.autocast(x.device.type, enabled=False):
        gradients, losses = _Step(x, y, shares, batch.scale, params, precision).run()
    return {name: gradients[name] for name in names}, losses


@torch.no_grad()
def convnet_logits(params: dict[str, Tensor], x: Tensor, *, precision: str = "float32") -> Tensor:
    """What each client's own ConvNet, parameters (k, …), gives for its images (k, b, …): logits (k, b, classes)."""
    k, b = x.shape[:2]
    nothing = x.new_zeros(k, b)
    images, classes, shares = _checked(params, ExampleBatch(x, nothing.long(), nothing, last=False), precision)
    with torch.cuda.device(x.device) if x.is_cuda else nullcontext(), torch.autocast(x.device.type, enabled=False):
        return _Step(images, classes, shares, 1.0, params, precision).logits()


def _checked(params: dict[str, Tensor], batch: ExampleBatch, precision: str) -> tuple[Tensor, Tensor, Tensor]:
    """Images (k, b, 784), classes (k, b) and shares (k, b), contiguous."""
    require(precision in SETTINGS, "precision", f"must be one of {', '.join(SETTINGS)}", precision)
    shape = tuple(batch.x.shape)
    require(
        shape[2:] in _SHAPES, "x", "must hold grey images of 28 × 28 pixels for each client and example", shape,
        "Resize the images, or take another engine.",
    )  # fmt: skip
    classes = batch.y.dim() == 2 and batch.y.dtype == torch.int64
    require(classes, "y", "must hold one class per example as int64", (batch.y.dtype, tuple(batch.y.shape)))
    types = {value.dtype for value in params.values()} | {batch.shares.dtype}
    require(types == {torch.float32}, "params", "must be float32, as must the shares", sorted(map(str, types)))
    require(shape[0] <= _MOST_CLIENTS, "clients", f"must be at most {_MOST_CLIENTS} at once", shape[0], "Set a chunk_size.")
    return batch.x.reshape(*shape[:2], 784).contiguous(), batch.y.contiguous(), batch.shares.contiguous()


class _Step:
    """One gradient: its inputs, and the memory that the programs hand to each other."""

    def __init__(self, x: Tensor, y: Tensor, shares: Tensor, scale: float, params: dict[str, Tensor], precision: str) -> None:
        self.x, self.y, self.shares, self.scale = x, y, shares, float(scale)
        self.precision, self.sizes = precision, SETTINGS[precision]
        self.k, self.b = shares.shape
        self.blocks = triton.cdiv(self.b, 16)
        self.classes = params["readout.bias"].shape[1]
        self.first_weight = _in_order(params["conv1.weight"], (0, 1, 2, 3, 4))  # (k, 32, 1, 5, 5)
        self.second_weight = _in_order(params["conv2.weight"], (0, 3, 4, 2, 1))  # (k, 5, 5, 32, 64)
        self.readout_weight = _in_order(params["readout.weight"], (0, 1, 2))  # (k, C, 1024 or hidden units)
        self.first_bias, self.second_bias, self.readout_bias = (
            _in_order(params[name], (0, 1)) for name in ("conv1.bias", "conv2.bias", "readout.bias")
        )
        self.hidden: tuple[Tensor, Tensor] | None = None  # (k, H, 1024) and (k, H)
        if "hidden.bias" in params:
            self.hidden = _in_order(params["hidden.weight"], (0, 1, 2)), params["hidden.bias"]

    def run(self) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients by name and losses; memory is given back as soon as nothing reads it."""
        weight_copy, images = self._turned_inputs()
        pooled, pooled_turned, first_code = self._first_layer()
        features, code, feature_code = self._second_layer(pooled, weight_copy)
        if self.hidden is None:
            slopes, losses = self._readout(features)
            gradients, *turned = self._feature_gradients("readout", self.readout_weight, features, feature_code, slopes, losses)
        else:
            weight, bias = self.hidden
            units = self._hidden_units(features, weight, bias)
            slopes, losses = self._readout(units)
            above, unit_slopes = self._hidden_slopes(units, slopes)
            gradients, *turned = self._feature_gradients("hidden", weight, features, feature_code, unit_slopes, losses)
            gradients |= above
        back, back_turned, code_turned = turned
        gradients["conv2.weight"] = self._second_weights(pooled_turned, back_turned, code_turned)
        weight = weight_copy if self.precision == "bf16" else self.second_weight
        map_gradient = pooled.view(self.k * self.blocks, 144, 32, 16)  # `pooled` itself has been used
        self._launch("first_map_gradient", 9 * self.blocks, back, code, weight, map_gradient, weight.stride(0), self.blocks)
        gradients["conv1.weight"], gradients["conv1.bias"] = self._first_weights(images, map_gradient, first_code)
        return gradients, gradients.pop("losses")

    def logits(self) -> Tensor:
        """The forward pass alone, (k, b, classes)."""
        weight_copy, _ = self._turned_inputs()
        features, _, _ = self._second_layer(self._first_layer()[0], weight_copy)
        units = features.view(self.k, self.b, 1024) if self.hidden is None else self._hidden_units(features, *self.hidden)
        with Precision(self.precision).products():
            return torch.baddbmm(self.readout_bias.unsqueeze(1), units, self.readout_weight.transpose(1, 2))

    def _new(self, *shape: int, dtype: torch.dtype = torch.float32) -> Tensor:
        return torch.empty(shape, dtype=dtype, device=self.x.device)

    def _short(self, *shape: int) -> Tensor:
        """Memory for operands of products, which bf16 halves."""
        return self._new(*shape, dtype=torch.bfloat16 if self.precision == "bf16" else torch.float32)

    def _codes(self, *shape: int) -> Tensor:
        return self._new(*shape, dtype=torch.uint8)

    def _launch(self, name: str, programs_per_client: int, *arguments: Any, **constants: Any) -> None:
        program = getattr(programs, name, None) or getattr(backward, name)
        if name != "first_weights_sum":
            constants["PRECISION"] = self.precision
        program[(programs_per_client, self.k)](*arguments, **(self.sizes[name] | constants))

    def _turned_inputs(self) -> tuple[Tensor, Tensor]:
        copy, images = self._short(self.k, 25, 2048), self._short(self.k * self.blocks, 784, 16)
        inputs = (self.second_weight, copy, self.x, images, self.second_weight.stride(0), self.b, self.blocks, self.scale)
        self._launch("turn_inputs", 25 + 7 * self.blocks, *inputs)
        return copy, images

    def _first_layer(self) -> tuple[Tensor, Tensor, Tensor]:
        block = (self.k * self.blocks, 144, 32, 16)
        pooled, turned, code = self._short(self.k * self.blocks * 16, 144, 32), self._short(*block), self._codes(*block)
        weight, bias, steps = self.first_weight, self.first_bias, self.sizes["first_layer"]["STEPS"]
        strides = (weight.stride(0), bias.stride(0))
        sizes = (self.b, self.blocks, self.scale)
        self._launch("first_layer", 36 * self.blocks // steps, self.x, weight, bias, pooled, turned, code, *strides, *sizes)
        return pooled, turned, code

    def _second_layer(self, pooled: Tensor, weight: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        features, feature_code = self._new(self.k * self.b, 64, 16), self._codes(self.k * self.b, 64, 16)
        code = self._codes(self.k * self.blocks * 16, 16, 64)
        inner, outer = (64, 1) if self.precision == "bf16" else (1, 32)  # the strides of `weight`
        count = triton.cdiv(self.b, self.sizes["second_layer"]["IMAGES"])
        bias, sizes = self.second_bias, (self.second_bias.stride(0), self.b, self.blocks)
        inputs = (pooled, weight, bias, features, code, feature_code, *sizes)
        self._launch("second_layer", count, *inputs, INPUT_STRIDE=inner, OUTPUT_STRIDE=outer)
        return features, code, feature_code

    def _hidden_units(self, features: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        """The hidden layer after ReLU, (k, b, H)."""
        with Precision(self.precision).products():
            return torch.baddbmm(bias.unsqueeze(1), features.view(self.k, self.b, 1024), weight.transpose(1, 2)).relu_()

    def _hidden_slopes(self, units: Tensor, slopes: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        """Gradients of the readout above a hidden layer, and of what the layer has before ReLU, (k, b, H)."""
        own = slopes.view(self.k, self.b, -1)[:, :, : self.classes]
        with Precision(self.precision).products():
            gradients = {"readout.weight": own.transpose(1, 2) @ units, "readout.bias": own.sum(1)}
            return gradients, torch.ops.aten.threshold_backward(own @ self.readout_weight, units, 0)

    def _readout(self, features: Tensor) -> tuple[Tensor, Tensor]:
        padded, wide = _padded(self.classes), self.readout_weight.shape[2]
        slopes, losses = self._new(self.k * self.b, padded), self._new(self.k, self.b)
        weight, bias = self.readout_weight, self.readout_bias
        inputs = (features, weight, bias, self.y, self.shares, slopes, losses, weight.stride(0), bias.stride(0), self.b)
        sizes = self.sizes["readout"] | {"FEATURES": min(wide, self.sizes["readout"]["FEATURES"])}
        self._launch("readout", self.blocks, *inputs, CLASSES=self.classes, PADDED=padded, WIDE=wide, **sizes)
        return slopes, losses

    def _feature_gradients(
        self, layer: str, weight: Tensor, features: Tensor, feature_code: Tensor, slopes: Tensor, losses: Tensor
    ) -> tuple[dict[str, Tensor], Tensor, Tensor, Tensor]:
        """Gradients of the layer that reads the features, with its slopes (k, b, outputs), and of the second map."""
        outputs = weight.shape[1]
        gradients = {
            f"{layer}.weight": self._new(self.k, outputs, 1024), f"{layer}.bias": self._new(self.k, outputs),
            "conv2.bias": self._new(self.k, 64), "losses": self._new(self.k),
        }  # fmt: skip
        back, turned = self._short(self.k * self.blocks * 16, 16, 64), self._short(self.k * self.blocks, 16, 64, 16)
        code = self._codes(self.k * self.blocks, 16, 64, 16)
        inputs = (features, weight, feature_code, slopes, losses, *gradients.values(), back, turned, code)
        padded, sizes = _padded(outputs), self.sizes["readout_gradients"]
        channels = max(1, min(sizes["CHANNELS"], _HELD // padded))
        arguments = (weight.stride(0), self.b, self.blocks)
        sizes = sizes | {"CLASSES": outputs, "PADDED": padded, "CHANNELS": channels}
        self._launch("readout_gradients", 64 // channels, *inputs, *arguments, **sizes)
        return gradients, back, turned, code

    def _second_weights(self, pooled: Tensor, back: Tensor, code: Tensor) -> Tensor:
        gradient = self._new(self.k, 5, 5, 32, 64)
        count = triton.cdiv(25, self.sizes["second_weights"]["TAPS"])
        self._launch("second_weights", count, pooled, back, code, gradient, self.blocks)
        return gradient.permute(0, 4, 3, 1, 2)

    def _first_weights(self, images: Tensor, back: Tensor, code: Tensor) -> tuple[Tensor, Tensor]:
        weight, bias = self._new(self.k, 32, 1, 5, 5), self._new(self.k, 32)
        parts = self.sizes["first_weights"]["PARTS"]
        sums = self._new(self.k, parts, 128, 64)
        self._launch("first_weights", parts, images, back, code, sums, self.blocks)
        self._launch("first_weights_sum", 4, sums, weight, bias, PARTS=parts)
        return weight, bias


def _padded(outputs: int) -> int:
    """Outputs as a power of two, as programs hold them."""
    return max(16, int(triton.next_power_of_2(outputs)))


def _in_order(value: Tensor, order: tuple[int, ...]) -> Tensor:
    """`value` with its dimensions in another order, and each client's part contiguous and aligned in memory: a copy if need be.

    A parameter that all clients share (stride 0 over them) stays shared.
    """
    turned = value.permute(order)
    shared = value.stride(0) == 0 or len(value) == 1
    if turned[0].is_contiguous() and (shared or turned.stride(0) % 16 == 0) and turned.data_ptr() % 16 == 0:
        return turned[:1].expand_as(turned) if shared else turned
    return turned[:1].contiguous().expand_as(turned) if shared else turned.contiguous()
