"""The gradient of `models.ConvNet` by hand, as matrix products on reused memory: autograd's up to rounding, and faster.

On a CPU, much of autograd's time on this model goes to memory rather than to arithmetic. Here one client comes after another, a
few examples at a time, and every intermediate result stays in a small workspace of the calling thread:

- Convolution 1. The 6×6 pixels under a 2×2 pooling window are 36 rows `columns[6i + j]` of length P, one entry per window. The
  window's position p = (u, v) needs the 25 rows 6(u + i) + (v + j), which lie in the 29 rows from s_p = 6u + v on, so that
  z_p = columns[s_p : s_p + 29]ᵀ T with one matrix T for all four positions, whose rows 6i + j hold the 25 taps and whose other
  four rows are zero. Pooling is then an elementwise maximum of four matrices.
- Convolution 2. Only the horizontal taps are unrolled: U[y, n, x] = (h[y, n, x], …, h[y, n, x + 4]), 5·32 numbers, three
  tenths of the usual columns. Rows y = i … i + 7 of U are one matrix U_i (64 per example, 160), and z = Σ_i U_i W_i. Backwards,
  ∂W_i = U_iᵀ ∂z and ∂U[i : i + 8] += ∂z W_iᵀ, and ∂h adds up five shifted slices of ∂U.
- Bias and ReLU come after the pooling, on a quarter of the numbers: both are monotone, so the function is the same.

Ties in a pooling window go to its first position in scan order and ReLU has gradient 0 at 0, as in torch.
"""

from __future__ import annotations

import threading
from collections.abc import Iterable, Iterator
from functools import partial
from typing import TYPE_CHECKING, NamedTuple

import torch
from torch import Tensor, nn

from equipoise.core.per_example_losses import cross_entropy, per_example
from equipoise.core.task import Task
from equipoise.models.convnet import ConvNet, grey_images

if TYPE_CHECKING:
    from equipoise.engines.simulator.example_batches import ExampleBatch

_CHUNK = 32  # most examples in work at once: large matrix products, in a workspace of a few megabytes
_STARTS = (0, 1, 6, 7)  # s_p, the first row of `columns` for each position of a pooling window, in scan order
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")


class _Workspace:
    """One thread's memory, for chunks of up to `_CHUNK` examples. What it holds is overwritten by the next chunk."""

    def __init__(self, classes: int, like: Tensor) -> None:
        self.classes, self.like, self.kind = classes, like.new_empty(0), (classes, like.dtype, like.device)
        self._flat: dict[str, Tensor] = {}
        self._chunks: dict[int, _Chunk] = {}
        self.weight = self.like.new_empty(5, 160, 64)  # W_i, where the parameters have another order in memory
        self.clients: _Clients | None = None

    def chunk(self, n: int) -> _Chunk:
        """The memory as the tensors of n examples."""
        if n not in self._chunks:
            self._chunks[n] = _Chunk(self, n)
        return self._chunks[n]

    def part(self, n: int, name: str, *shape: int) -> Tensor:
        """The beginning of a named stretch of memory, as a tensor whose size is in proportion to n."""
        size = torch.Size(shape).numel()
        if name not in self._flat:
            self._flat[name] = self.like.new_empty(size // n * _CHUNK)
        return self._flat[name][:size].view(shape)

    def for_clients(self, k: int) -> _Clients:
        """Memory for k clients; that of many more is given back."""
        if self.clients is None or not k <= self.clients.count <= 4 * k:
            self.clients = _Clients(self, k)
        return self.clients


class _Clients:
    """The gradients of k clients of a call, in the order in which the products write them."""

    def __init__(self, space: _Workspace, k: int) -> None:
        fresh, C = space.like.new_empty, space.classes
        self.count, self.taps = k, fresh(k, 5, 6, 32)  # ∂T, with a row to spare
        first, second = fresh(k, 5, 5, 32), fresh(k, 5, 5, 32, 64)
        others = {
            "conv1.bias": fresh(k, 32), "conv2.bias": fresh(k, 64),
            "readout.weight": fresh(k, C, 1024), "readout.bias": fresh(k, C),
        }  # fmt: skip
        convolutions = {"conv1.weight": first.permute(0, 3, 1, 2).unsqueeze(2), "conv2.weight": second.permute(0, 4, 3, 1, 2)}
        self.named = convolutions | others  # (k, …): the gradients, in the shapes of the parameters
        matrices = {"taps": self.taps.view(k, 30, 32)[:, :29]} | others
        self.own = [{name: value[i] for name, value in matrices.items()} for i in range(k)]  # as matrices and vectors
        self.second = [one.view(5, 160, 64).unbind() for one in second]  # k × 5 × (160, 64): ∂W_i

    def finish(self, k: int, names: Iterable[str]) -> dict[str, Tensor]:
        """The gradients of the first k clients, once all their chunks are done."""
        self.named["conv1.weight"][:k].squeeze(2).permute(0, 2, 3, 1).copy_(self.taps[:k, :, :5])
        return {name: self.named[name][:k] for name in names}


class _Chunk:
    """A workspace seen as the tensors of n examples; P = 144 n pooling windows in the first layer."""

    def __init__(self, space: _Workspace, n: int) -> None:
        P, part = 144 * n, partial(space.part, n)
        self.pixels = part("pixels", 2, 28, n, 14)  # [v, y, n, x] is pixel (y, 2x + v)
        self.columns = part("columns", 6, 3, 2, 12, n, 12)  # 36 rows of P
        strides = (14 * n, 1, 28 * 14 * n, 28 * n, 14, 1)
        self.windows = self.pixels.as_strided(self.columns.shape, strides)  # `pixels` as they go into `columns`
        self.shifted = [self.columns.view(36, P)[s : s + 29] for s in _STARTS]  # 4 × (29, P): the rows from s_p on
        self.first = part("first", 4, P, 32).unbind()  # 4 × (P, 32): z_p, later its gradient
        self.first_pairs = part("first_pairs", 2, P, 32).unbind()
        self.first_peak = part("first_peak", P, 32)
        self.unrolled = part("unrolled", 12, n, 8, 160)  # U, later its gradient
        self.runs = self.first_peak.as_strided(self.unrolled.shape, (384 * n, 384, 32, 1))  # as it goes into `unrolled`
        self.rows = [self.unrolled[i : i + 8].view(64 * n, 160) for i in range(5)]  # U_i
        self.last_rows = self.unrolled[8:]  # what of U is not in U_0
        self.slices = self.unrolled.view(12, n, 8, 5, 32).unbind(3)  # 5 × (12, n, 8, 32): what `unrolled` holds for tap j
        back = part("back", 12, n, 12, 32)
        self.back = back.view(P, 32)  # ∂h
        self.places = [back[:, :, j : j + 8] for j in range(5)]  # 5 × (12, n, 8, 32): where the slices belong in `back`
        self.beyond = back[:, :, 8:]  # what of `back` tap 0 does not reach
        second = part("second", 4, 2, n, 4, 2, 64)
        self.second = second.view(64 * n, 64)  # z, later its gradient
        self.second_four = [second[:, u, :, :, v] for u in (0, 1) for v in (0, 1)]  # 4 × (4, n, 4, 64): its four positions
        self.second_pairs = part("second_pairs", 2, 4, n, 4, 64).unbind()
        self.second_peak, self.second_back = (part(name, 4, n, 4, 64) for name in ("second_peak", "second_back"))
        self.features, self.feature_gradient = (part(name, n, 1024) for name in ("features", "feature_gradient"))
        self.features_spread, self.feature_gradient_spread = (  # (4, n, 4, 64): in the order of `second_peak`
            value.view(n, 64, 4, 4).permute(2, 0, 3, 1) for value in (self.features, self.feature_gradient)
        )
        self.products, self.logits = part("products", space.classes, n), part("logits", n, space.classes)
        self.ones = part("ones", P).fill_(1)


_held = threading.local()


def _workspace(classes: int, like: Tensor) -> _Workspace:
    """The calling thread's workspace: the latest one, if it fits."""
    space: _Workspace | None = getattr(_held, "space", None)
    if space is None or space.kind != (classes, like.dtype, like.device):
        space = _held.space = _Workspace(classes, like)
    return space


class _Model(NamedTuple):
    """One client's parameters as the matrices of the products."""

    taps: Tensor  # (29, 32): T
    bias1: Tensor  # (32,)
    weight: tuple[Tensor, ...]  # 5 × (160, 64): W_i
    bias2: Tensor  # (64,)
    readout: Tensor  # (C, 1024)
    bias3: Tensor  # (C,)


def _models(space: _Workspace, params: dict[str, Tensor]) -> Iterator[_Model]:
    """Each client's matrices, valid until the next is asked for. What has another order in memory is copied."""
    k = len(params["readout.bias"])
    spread = space.like.new_zeros(k, 5, 6, 32)
    spread[:, :, :5].copy_(params["conv1.weight"].squeeze(2).permute(0, 2, 3, 1))
    taps = spread.view(k, 30, 32)[:, :29].unbind()
    weights = params["conv2.weight"].permute(0, 3, 4, 2, 1).unbind()  # k × (5, 5, 32, 64)
    in_order, shared = weights[0].is_contiguous(), params["conv2.weight"].stride(0) == 0
    vectors = [params[name].unbind() for name in ("conv1.bias", "conv2.bias", "readout.weight", "readout.bias")]
    for i, (bias1, bias2, readout, bias3) in enumerate(zip(*vectors, strict=True)):
        if not in_order and (i == 0 or not shared):
            space.weight.view(5, 5, 32, 64).copy_(weights[i])
        weight = weights[i].view(5, 160, 64) if in_order else space.weight
        yield _Model(taps[i], bias1, weight.unbind(), bias2, readout, bias3)


class _CrossEntropy:
    """The losses of a batch, and their gradient in the logits chunk by chunk: shares · (softmax − onehot)."""

    def __init__(self, task: Task, batch: ExampleBatch, classes: int) -> None:
        self._task, self._batch = task, batch
        y, shares = batch.y, batch.shares
        self._by_class = y.dim() == 2 and y.dtype == torch.int64 and int(y.min()) >= 0
        self._losses = torch.zeros_like(shares)
        if self._by_class:
            self._log_probabilities = shares.new_empty(*y.shape, classes)
            self._aims = torch.zeros_like(self._log_probabilities).scatter_(2, y.unsqueeze(2), shares.unsqueeze(2))

    def gradient(self, logits: Tensor, client: int, part: slice) -> Tensor:
        """The gradient (n, C) of a part of a client's examples."""
        shares = self._batch.shares[client, part]
        if self._by_class:
            probabilities = torch.log_softmax(logits, 1, out=self._log_probabilities[client, part]).exp()
            return probabilities.mul_(shares.unsqueeze(1)).sub_(self._aims[client, part])
        with torch.enable_grad():  # probabilities of classes, or targets that say "ignore me"
            leaf = logits.clone().requires_grad_()
            losses = self._task.loss(leaf, self._batch.y[client, part])
            (gradient,) = torch.autograd.grad((losses * shares).sum(), leaf)
        self._losses[client, part] = losses.detach()
        return gradient

    def of_clients(self) -> Tensor:
        """Σ shares · loss of each client, (k,)."""
        losses = self._losses
        if self._by_class:
            losses = self._log_probabilities.gather(2, self._batch.y.unsqueeze(2)).squeeze(2).neg_()
        return (losses * self._batch.shares).sum(1)


@torch.no_grad()
def convnet_gradients(task: Task, params: dict[str, Tensor], batch: ExampleBatch) -> tuple[dict[str, Tensor], Tensor]:
    """Gradient of each client's batch loss in its own parameters (k, …), and the losses (k,), for `is_plain_convnet` tasks.

    It is what `stacked_gradients` gives. The gradients lie in memory of the calling thread and are valid until its next call.
    Their order in memory is that of the products; parameters in the same order are read without a copy.
    """
    k, b = batch.shares.shape
    classes = params["readout.bias"].shape[1]
    space = _workspace(classes, params["readout.bias"])
    clients, loss = space.for_clients(k), _CrossEntropy(task, batch, classes)
    x, parts = grey_images(batch.x.flatten(0, 1)).view(k, b, 28, 14, 2), _parts(b)
    for i, model in enumerate(_models(space, params)):
        for part in parts:
            own = space.chunk(part.stop - part.start)
            _forward(own, model, x[i, part])
            delta = loss.gradient(own.logits, i, part)
            _backward(own, model, delta, clients.own[i], clients.second[i], keep=float(part.start > 0))
    return clients.finish(k, params), loss.of_clients()


@torch.no_grad()
def convnet_scores(task: Task, params: Tensor | dict[str, Tensor], x: Tensor, y: Tensor) -> tuple[Tensor, Tensor]:
    """Per-example losses and errors (B,) at one model, a vector (D,) or by name: what `task.scores` gives.

    It cuts the examples into chunks itself, so that many of them need no more memory than a few (but for the logits).
    """
    named = task.layout.unflatten(params) if isinstance(params, Tensor) else params
    classes = len(named["readout.bias"])
    space = _workspace(classes, named["readout.bias"])
    model = next(_models(space, {name: value.unsqueeze(0) for name, value in named.items()}))
    images, logits = grey_images(x).view(len(x), 28, 14, 2), space.like.new_empty(len(x), classes)
    for part in _parts(len(x)):
        own = space.chunk(part.stop - part.start)
        _forward(own, model, images[part])
        logits[part] = own.logits
    return per_example("loss", task.loss(logits, y), x), per_example("error", task.error(logits, y), x)


def _parts(count: int) -> list[slice]:
    """Cut `count` examples into the fewest chunks, of nearly equal size."""
    pieces = -(-count // _CHUNK)
    return [slice(i * count // pieces, (i + 1) * count // pieces) for i in range(pieces)]


def _forward(own: _Chunk, model: _Model, x: Tensor) -> None:
    """From images (n, 28, 14, 2) to `own.logits`."""
    own.pixels.copy_(x.permute(3, 1, 0, 2))
    own.columns.copy_(own.windows)
    for pair, peak in enumerate(own.first_pairs):
        for p in (2 * pair, 2 * pair + 1):
            torch.mm(own.shifted[p].t(), model.taps, out=own.first[p])
        torch.maximum(own.first[2 * pair], own.first[2 * pair + 1], out=peak)  # while both are in the cache
    torch.maximum(*own.first_pairs, out=own.first_peak).add_(model.bias1)
    torch.clamp_min(own.runs, 0, out=own.unrolled)

    torch.mm(own.rows[0], model.weight[0], out=own.second)
    for rows, weight in zip(own.rows[1:], model.weight[1:], strict=True):
        own.second.addmm_(rows, weight)
    for pair, peak in enumerate(own.second_pairs):
        torch.maximum(own.second_four[2 * pair], own.second_four[2 * pair + 1], out=peak)
    torch.maximum(*own.second_pairs, out=own.second_peak).add_(model.bias2)
    torch.clamp_min(own.second_peak, 0, out=own.features_spread)

    torch.mm(model.readout, own.features.t(), out=own.products)
    torch.add(own.products.t(), model.bias3, out=own.logits)


def _backward(
    own: _Chunk, model: _Model, delta: Tensor, gradients: dict[str, Tensor], seconds: tuple[Tensor, ...], *, keep: float
) -> None:
    """Add the chunk's gradients, from those of its logits (n, C), to `keep` (0 or 1) times what is there."""
    n = len(delta)
    gradients["readout.weight"].addmm_(delta.t(), own.features, beta=keep)
    gradients["readout.bias"].addmv_(delta.t(), own.ones[:n], beta=keep)
    torch.mm(delta, model.readout, out=own.feature_gradient)

    back = torch.mul(own.feature_gradient_spread, own.second_peak.gt_(0), out=own.second_back)
    gradients["conv2.bias"].addmv_(back.view(16 * n, 64).t(), own.ones[: 16 * n], beta=keep)
    for pair, share in enumerate(_divided(back, own.second_pairs)):
        _hand_on(share, own.second_four[2 * pair], own.second_four[2 * pair + 1])
    for rows, gradient in zip(own.rows, seconds, strict=True):
        gradient.addmm_(rows.t(), own.second, beta=keep)
    own.last_rows.zero_()
    torch.mm(own.second, model.weight[0].t(), out=own.rows[0])
    for rows, weight in zip(own.rows[1:], model.weight[1:], strict=True):
        rows.addmm_(own.second, weight.t())

    own.beyond.zero_()
    own.places[0].copy_(own.slices[0])
    for place, part in zip(own.places[1:], own.slices[1:], strict=True):
        place.add_(part)
    back = own.back.mul_(own.first_peak.gt_(0))
    gradients["conv1.bias"].addmv_(back.t(), own.ones, beta=keep)
    for pair, share in enumerate(_divided(back, own.first_pairs)):
        _hand_on(share, own.first[2 * pair], own.first[2 * pair + 1])
        for p in (2 * pair, 2 * pair + 1):
            gradients["taps"].addmm_(own.shifted[p], own.first[p], beta=1 if p else keep)


def _divided(gradient: Tensor, pairs: tuple[Tensor, ...]) -> tuple[Tensor, Tensor]:
    """What of the gradient the upper pair of a pooling window gets, and what the lower. In place of `gradient` and `pairs`."""
    upper, lower = pairs
    lower.gt_(upper).mul_(gradient)
    return gradient.sub_(lower), lower


def _hand_on(share: Tensor, left: Tensor, right: Tensor) -> None:
    """Put a pair's share of the gradient where the larger of its two values is, and 0 where the other is."""
    right.gt_(left).mul_(share)
    torch.sub(share, right, out=left)


def why_not_plain_convnet(task: Task, most_hidden: int = 0) -> str | None:
    """Why the task is not `models.ConvNet` as written, with all its parameters trained by the library's cross-entropy.

    It may have a hidden layer of at most `most_hidden` units, if they are a power of 2 from 16 on.
    """
    module = task.module
    if type(module) is not ConvNet:
        return f"{type(module).__name__} is not models.ConvNet"
    if task.loss is not cross_entropy:
        return "the loss is not cross-entropy"
    units = 0 if module.hidden is None else module.hidden.out_features
    if units and not (16 <= units <= most_hidden and units & (units - 1) == 0):
        return f"it has a hidden layer of {units} units"
    if len(list(task.scorer.named_parameters(remove_duplicate=False))) != (8 if units else 6):
        return "the loss or the error has parameters of its own"
    hooked = any(getattr(layer, hooks) for layer in module.modules() for hooks in _HOOKS)
    usual = ((1, 1), (0, 0), (1, 1), 1)
    as_made = not hooked and "forward" not in vars(module) and type(module.readout) is nn.Linear
    as_made = as_made and (not units or type(module.hidden) is nn.Linear)
    for layer in (module.conv1, module.conv2):
        as_made = as_made and type(layer) is nn.Conv2d
        as_made = as_made and (layer.stride, layer.padding, layer.dilation, layer.groups) == usual
    classes = module.readout.out_features if as_made else 0
    expected = {
        "conv1.weight": (32, 1, 5, 5), "conv1.bias": (32,), "conv2.weight": (64, 32, 5, 5), "conv2.bias": (64,),
        "readout.weight": (classes, units or 1024), "readout.bias": (classes,),
    }  # fmt: skip
    expected |= {"hidden.weight": (units, 1024), "hidden.bias": (units,)} if units else {}
    trained = {name: tuple(shape) for name, shape in zip(task.layout.names, task.layout.shapes, strict=True)}
    if not as_made or trained != expected:
        return "its layers were changed, have hooks, or are frozen"
    return None if task.layout.dtype in (torch.float32, torch.float64) else "its numbers are neither float32 nor float64"


def is_plain_convnet(task: Task) -> bool:
    """Whether there is nothing against the hand-written gradient."""
    return why_not_plain_convnet(task) is None
