"""Losses and errors of the linear models against closed forms and numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from equipoise.core.per_example_losses import cross_entropy, misclassified
from equipoise.core.task import Task
from equipoise.errors import InvalidParameter
from equipoise.models import LinearRegression, LinearSVM, Logistic, MeanEstimator, Softmax
from equipoise.models.linear import hinge_loss, logistic_loss, squared_distance, squared_error, wrong_sign

DOUBLE = torch.float64


def test_softmax_starts_with_equal_classes_and_uses_the_default_task() -> None:
    task = Task.of(Softmax(12, 4))
    x, y = torch.rand(5, 3, 4), torch.tensor([0, 1, 2, 3, 0])
    assert task.loss is cross_entropy
    assert task.error is misclassified
    losses = task.losses(task.layout.read(task.module), x, y)
    torch.testing.assert_close(losses, torch.full((5,), math.log(4)))


def test_softmax_is_the_formula() -> None:
    model = Softmax(2, 3).double()
    with torch.no_grad():
        model.weight.copy_(torch.tensor([[1.0, 0.0], [0.0, 2.0], [1.0, -1.0]]))
        model.bias.copy_(torch.tensor([0.5, 0.0, -0.5]))
    outputs = model(torch.tensor([[1.0, 2.0]], dtype=DOUBLE))
    torch.testing.assert_close(outputs, torch.tensor([[1.5, 4.0, -1.5]], dtype=DOUBLE))
    expected = math.log(math.exp(1.5) + math.exp(4) + math.exp(-1.5)) - 1.5
    torch.testing.assert_close(cross_entropy(outputs, torch.tensor([0])), torch.tensor([expected], dtype=DOUBLE))


@pytest.mark.parametrize("flat", [True, False])
def test_inputs_are_flattened(flat: bool) -> None:
    model = Softmax(6, 2)
    torch.nn.init.normal_(model.weight, generator=torch.Generator().manual_seed(0))
    x = torch.rand(4, 2, 3)
    torch.testing.assert_close(model(x.flatten(1) if flat else x), x.reshape(4, 6) @ model.weight.T)


def test_single_feature_inputs_may_be_a_vector() -> None:
    model = LinearRegression(1)
    with torch.no_grad():
        model.weight.fill_(2)
        model.bias.fill_(1)
    torch.testing.assert_close(model(torch.tensor([0.0, 3.0])), torch.tensor([1.0, 7.0]))


def test_logistic_loss_by_hand() -> None:
    z, y = torch.tensor([0.0, 2.0, 2.0, -1.0], dtype=DOUBLE), torch.tensor([1, 1, 0, 0])
    expected = [math.log(2), math.log1p(math.exp(-2)), 2 + math.log1p(math.exp(-2)), math.log1p(math.exp(-1))]
    torch.testing.assert_close(logistic_loss(z, y), torch.tensor(expected, dtype=DOUBLE))
    assert wrong_sign(z, y).tolist() == [1, 0, 1, 0]


def test_logistic_loss_is_finite_far_out() -> None:
    z = torch.tensor([1e30, -1e30, 1e30, -1e30], requires_grad=True)
    losses = logistic_loss(z, torch.tensor([1, 0, 0, 1]))
    torch.testing.assert_close(losses, torch.tensor([0.0, 0.0, 1e30, 1e30]))
    losses.sum().backward()
    torch.testing.assert_close(z.grad, torch.tensor([0.0, 0.0, 1.0, -1.0]))


@settings(deadline=None, max_examples=50)
@given(st.lists(st.tuples(st.floats(-50, 50), st.integers(0, 1)), min_size=1, max_size=8))
def test_logistic_is_softmax_on_two_classes(pairs: list[tuple[float, int]]) -> None:
    z = torch.tensor([p[0] for p in pairs], dtype=DOUBLE)
    y = torch.tensor([p[1] for p in pairs])
    logits = torch.stack([torch.zeros_like(z), z], dim=1)
    torch.testing.assert_close(logistic_loss(z, y), cross_entropy(logits, y), rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(wrong_sign(z, y), misclassified(logits, y))


def test_hinge_loss_by_hand() -> None:
    z, y = torch.tensor([0.5, 0.5, 2.0, -2.0, 0.0]), torch.tensor([1, 0, 1, 1, 0])
    assert hinge_loss(z, y).tolist() == [0.5, 1.5, 0.0, 3.0, 1.0]
    assert wrong_sign(z, y).tolist() == [0, 1, 0, 1, 0]  # a score of 0 predicts class 0


def test_squared_error_has_no_half() -> None:
    z, y = torch.tensor([1.0, -2.0]), torch.tensor([4.0, -2.0])
    assert squared_error(z, y).tolist() == [9.0, 0.0]


def test_least_squares_gradient_vanishes_at_the_closed_form() -> None:
    generator = torch.Generator().manual_seed(3)
    x, y = (torch.randn(30, 4, generator=generator, dtype=DOUBLE), torch.randn(30, generator=generator, dtype=DOUBLE))
    solution = torch.linalg.lstsq(torch.cat([x, torch.ones(30, 1, dtype=DOUBLE)], 1), y[:, None]).solution.flatten()
    model = LinearRegression(4).double()
    with torch.no_grad():
        model.weight.copy_(solution[:4])
        model.bias.copy_(solution[4])
    model.loss(model(x), y).mean().backward()
    for parameter in model.parameters():
        torch.testing.assert_close(parameter.grad, torch.zeros_like(parameter), rtol=0, atol=1e-12)


def test_mean_estimator_loss_is_distance_plus_variance() -> None:
    generator = torch.Generator().manual_seed(4)
    x = torch.randn(50, 2, generator=generator, dtype=DOUBLE)
    model = MeanEstimator(2).double()
    with torch.no_grad():
        model.point.copy_(torch.tensor([1.0, -2.0]))
    mean = x.mean(0)
    expected = (model.point - mean).square().sum() + (x - mean).square().sum(1).mean()
    torch.testing.assert_close(model.loss(model(x), x).mean(), expected)
    (gradient,) = torch.autograd.grad(model.loss(model(x), x).mean(), [model.point])
    torch.testing.assert_close(gradient, 2 * (model.point.detach() - mean))


def test_mean_estimator_takes_image_targets() -> None:
    x = torch.rand(3, 2, 2)
    torch.testing.assert_close(squared_distance(MeanEstimator(4)(x), x), x.square().sum((1, 2)))


@pytest.mark.parametrize(
    ("model", "error"),
    [(Logistic(3), wrong_sign), (LinearSVM(3), wrong_sign), (LinearRegression(3), squared_error), (MeanEstimator(3), None)],
)
def test_a_task_uses_the_models_own_loss_and_error(model: torch.nn.Module, error: object) -> None:
    task = Task.of(model)
    assert task.loss is model.loss
    assert task.error is (error or squared_distance)


def test_no_bias_means_no_such_parameter() -> None:
    for model in (
        Softmax(3, 2, bias=False),
        Logistic(3, bias=False),
        LinearSVM(3, bias=False),
        LinearRegression(3, bias=False),
    ):
        assert [name for name, _ in model.named_parameters()] == ["weight"]
        torch.testing.assert_close(model(torch.ones(2, 3)), torch.zeros_like(model(torch.ones(2, 3))))


@pytest.mark.parametrize("targets", [torch.zeros(3, 1), torch.zeros(4), torch.zeros(())])
@pytest.mark.parametrize("loss", [logistic_loss, hinge_loss, wrong_sign, squared_error])
def test_targets_that_would_broadcast_are_refused(loss: object, targets: torch.Tensor) -> None:
    with pytest.raises(InvalidParameter, match=r"targets must have one number per example, shape \(3,\)"):
        loss(torch.zeros(3), targets)


@pytest.mark.parametrize("shape", [(3,), (2, 2), (3, 3), ()])
def test_mean_estimator_refuses_other_targets(shape: tuple[int, ...]) -> None:
    with pytest.raises(InvalidParameter, match=r"targets must have shape \(3, 2\)"):
        squared_distance(torch.zeros(3, 2), torch.zeros(shape))


@pytest.mark.parametrize("loss", [logistic_loss, hinge_loss, wrong_sign])
def test_two_class_losses_refuse_numbers_as_classes(loss):
    with pytest.raises(InvalidParameter, match="must be classes 0 or 1"):
        loss(torch.zeros(3), torch.tensor([-1.0, 1.0, 1.0]))
