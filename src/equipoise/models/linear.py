"""Linear models and the mean: convex problems, all started at zero."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn import functional

from equipoise.errors import InvalidParameter, require
from equipoise.models.layers import positive, refuse_integers


def logistic_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """log(1 + e^z) − y z of log-odds z (B,) against classes y (B,) in {0, 1}: (B,), finite for any finite z."""
    _require_one_target_per_output(outputs, targets)
    # functional.softplus drops its logarithm above 20, which float64 would notice.
    return -functional.logsigmoid(_signs(outputs, targets) * outputs)


def hinge_loss(outputs: Tensor, targets: Tensor) -> Tensor:
    """max(0, 1 − s z) of scores z (B,) against classes y (B,) in {0, 1}, with s = 2y − 1: (B,)."""
    _require_one_target_per_output(outputs, targets)
    return functional.relu(1 - _signs(outputs, targets) * outputs)


def wrong_sign(outputs: Tensor, targets: Tensor) -> Tensor:
    """1 where the score z (B,) is on the wrong side of 0 for the class y in {0, 1}, else 0; z = 0 predicts class 0: (B,)."""
    _require_one_target_per_output(outputs, targets)
    _refuse_floating_classes(targets)
    return ((outputs > 0) != (targets > 0)).to(outputs.dtype)


def squared_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """(z − y)² of predictions z (B,) against numbers y (B,), without a factor ½: (B,)."""
    _require_one_target_per_output(outputs, targets)
    return (outputs - targets).square()


def absolute_error(outputs: Tensor, targets: Tensor) -> Tensor:
    """|z − y| of predictions z (B,) against numbers y (B,): (B,), in the unit of y."""
    _require_one_target_per_output(outputs, targets)
    return (outputs - targets).abs()


ERRORS_OF_NUMBERS = {each.__name__: each for each in (absolute_error, squared_error)}  # which a configuration may name


def squared_distance(outputs: Tensor, targets: Tensor) -> Tensor:
    """‖w − y‖² of points w (B, F) against points y (B, …) with as many entries, without a factor ½: (B,)."""
    batch, features = outputs.shape
    same = targets.shape[:1] == outputs.shape[:1] and targets.shape[1:].numel() == features
    fix = "The target of an example is the example itself: pass the same tensor as x and y."
    require(same, "targets", f"must have shape ({batch}, {features})", tuple(targets.shape), fix)
    return (outputs - targets.reshape(batch, features)).square().sum(1)


class LinearModel(nn.Module):
    """⟨w, x⟩ + b of flattened inputs: one score per example for weights (F,), C for weights (C, F)."""

    bias: nn.Parameter | None

    def __init__(self, features: int, outputs: tuple[int, ...], bias: bool) -> None:
        super().__init__()
        self.features = positive("features", features)
        self.weight = nn.Parameter(torch.zeros(*outputs, self.features))
        self.register_parameter("bias", nn.Parameter(torch.zeros(outputs or 1)) if bias else None)

    def forward(self, x: Tensor) -> Tensor:
        """The scores (B,) or (B, C) of inputs (B, …)."""
        weight = self.weight.t() if self.weight.dim() > 1 else self.weight  # ONNX's exporter fails on .t() of a vector
        scores = _rows(x, self.features) @ weight  # (B,) or (B, C)
        return scores if self.bias is None else scores + self.bias

    def extra_repr(self) -> str:
        """The sizes and whether there is a bias, for `repr`."""
        return f"{', '.join(map(str, reversed(self.weight.shape)))}, bias={self.bias is not None}"


class Softmax(LinearModel):
    """Multinomial logistic regression: p(c | x) ∝ exp(⟨w_c, x⟩ + b_c), trained by cross-entropy − log p(y | x).

    Inputs (B, …) with `features` entries each are flattened; the outputs are the logits (B, classes), targets are classes
    (B,) and the error is misclassification. The parameters start at zero, so that every class is equally likely. With
    `bias=False` it is the linear model of the superquantile papers on EMNIST (Laguel, Pillutla, Malick and Harchaoui, 2020).

    Source: the linear model of Laguel et al. 2020 and Pillutla et al. 2023 on EMNIST.

    >>> import torch
    >>> Softmax(784, 62, bias=False)(torch.rand(5, 28, 28)).shape
    torch.Size([5, 62])
    """

    def __init__(self, features: int, classes: int, *, bias: bool = True) -> None:
        super().__init__(features, (positive("classes", classes),), bias)


class _OneScore(LinearModel):
    """A linear model with one score per example."""

    def __init__(self, features: int, *, bias: bool = True) -> None:
        super().__init__(features, (), bias)


class Logistic(_OneScore):
    """Logistic regression on two classes: p(1 | x) = 1/(1 + e^{−z}) with z = ⟨w, x⟩ + b.

    Outputs are the log-odds z (B,), targets the integers 0 or 1 (B,). The loss is log(1 + e^z) − y z; the error is 1 where
    the likelier class is wrong, that is at probability 0.5, and z = 0 predicts class 0. It equals Softmax on two classes with
    z the difference of its logits. It is the linear model of the superquantile papers on Sent140 (Laguel, Pillutla, Malick and
    Harchaoui, 2020), over the mean of 50-dimensional GloVe vectors and with `bias=False`. The parameters start at zero.

    Source: the linear model of Laguel et al. 2020 and Pillutla et al. 2023 on Sent140.

    >>> import torch
    >>> model = Logistic(50)
    >>> model.loss(model(torch.rand(2, 50)), torch.tensor([0, 1]))  # log 2
    tensor([0.6931, 0.6931], grad_fn=<NegBackward0>)
    """

    classes = 2
    loss = staticmethod(logistic_loss)
    error = staticmethod(wrong_sign)


class LinearSVM(_OneScore):
    """Linear support vector machine on two classes: hinge loss max(0, 1 − s z) with z = ⟨w, x⟩ + b.

    Targets are the integers 0 or 1 (B,), which stand for the signs s = 2y − 1; outputs are the scores z (B,); the error is 1
    where the sign of z is wrong, and z = 0 predicts class 0. The quadratic term of the usual SVM is not part of the loss: give
    it as L2 regularisation to the solver. It is the model of the Vehicle experiments of Smith et al. (Federated Multi-Task
    Learning, 2017), q-FFL (Li et al., 2020) and Ditto (Li et al., 2021). The parameters start at zero.

    Source: the Vehicle experiments of Smith et al. 2017, Li et al. 2020 (q-FFL) and Li et al. 2021 (Ditto).

    >>> import torch
    >>> LinearSVM.loss(torch.tensor([0.5, 0.5]), torch.tensor([0, 1]))
    tensor([1.5000, 0.5000])
    """

    classes = 2
    loss = staticmethod(hinge_loss)
    error = staticmethod(wrong_sign)


class LinearRegression(_OneScore):
    """Least squares: predictions z = ⟨w, x⟩ + b (B,) of numbers y (B,), with loss (z − y)², without a factor ½.

    The error is the same squared error, so that a mean over examples is the mean squared error. The parameters start at zero.

    Source: the least-squares toy of the Δ-FL slides (Laguel, Pillutla, Malick, Harchaoui).

    >>> import torch
    >>> LinearRegression.loss(torch.tensor([1.0, 3.0]), torch.tensor([0.0, 5.0]))
    tensor([1., 4.])
    """

    loss = staticmethod(squared_error)
    error = staticmethod(squared_error)


class MeanEstimator(nn.Module):
    """A point w with loss ‖y − w‖², without a factor ½, where the target y of an example is the example x itself.

    The mean loss of a client is then ‖w − x̄‖² plus its variance: the mean-estimation problem with which the superquantile
    papers show what a tail risk does (Laguel, Pillutla, Malick and Harchaoui, 2020). Outputs are w once per example,
    (B, features); inputs only count the examples. The error is the loss. The point starts at zero.

    Source: the mean-estimation toy of Laguel et al. 2020, section 3.

    >>> import torch
    >>> x = torch.tensor([[3.0, 4.0], [0.0, 1.0]])
    >>> model = MeanEstimator(2)
    >>> model.loss(model(x), x)
    tensor([25.,  1.], grad_fn=<SumBackward1>)
    """

    loss = staticmethod(squared_distance)
    error = staticmethod(squared_distance)

    def __init__(self, features: int) -> None:
        super().__init__()
        self.features = positive("features", features)
        self.point = nn.Parameter(torch.zeros(self.features))

    def forward(self, x: Tensor) -> Tensor:
        """The point once per example, (B, features)."""
        return self.point.expand(_rows(x, self.features).shape)

    def extra_repr(self) -> str:
        """The dimension of the point, for `repr`."""
        return str(self.features)


def _rows(x: Tensor, features: int) -> Tensor:
    """Inputs (B, …) as rows (B, features)."""
    if x.dim() == 0 or x.shape[1:].numel() != features:
        raise InvalidParameter(
            "x",
            f"must hold {features} features per example, shape (B, {features}) or (B, …) with {features} entries",
            tuple(x.shape),
            "Build the model with the number of features of the data, e.g. features=data.features.",
        )
    refuse_integers(x, "Convert it, e.g. x.float(), or give integer data a scale such as 1 / 255.")
    return x.reshape(x.shape[0], features)


def _signs(outputs: Tensor, targets: Tensor) -> Tensor:
    """Classes 0 and 1 as −1 and +1, in the type of the outputs."""
    _refuse_floating_classes(targets)
    return targets.to(outputs.dtype) * 2 - 1


def _refuse_floating_classes(targets: Tensor) -> None:
    # −1.0 and 1.0 would be taken for the classes −1 and 1, and their signs for −3 and 1.
    rule = "must be classes 0 or 1 as integers"
    require(not targets.is_floating_point(), "targets", rule, str(targets.dtype), "Use targets.long().")


def _require_one_target_per_output(outputs: Tensor, targets: Tensor) -> None:
    # (B, 1) against (B,) would broadcast to (B, B) without a word.
    rule = f"must have one number per example, shape {tuple(outputs.shape)}"
    fix = "Drop other dimensions, e.g. targets.squeeze(1)."
    require(targets.shape == outputs.shape, "targets", rule, tuple(targets.shape), fix)
