import pytest

from equipoise.errors import InvalidParameter
from equipoise.solvers import SGD


def test_steps_of_a_client():
    assert [SGD(batch_size=10, epochs=2).local_steps(n) for n in (1, 10, 11, 25)] == [2, 2, 4, 6]
    assert SGD(batch_size=None, epochs=3).local_steps(1000) == 3
    assert SGD(steps=7).local_steps(3) == 7


def test_step_decay_lowers_the_rate():
    solver = SGD(lr=0.32, lr_decay=0.5, lr_decay_every=400)
    assert [solver.learning_rate(t) for t in (0, 399, 400, 800)] == [0.32, 0.32, 0.16, 0.08]


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ({"lr": 0}, "lr must be a positive number, but is 0"),
        ({"lr": float("nan")}, "lr must be a positive number"),
        ({"batch_size": 0}, "batch_size must be a whole number of at least 1"),
        ({"epochs": -1}, "epochs must be a whole number of at least 0"),
        ({"steps": -1}, "steps must be a whole number of at least 0"),
        ({"steps": 3, "epochs": 2}, "epochs must be left alone when steps is given"),
        ({"lr": "0.1"}, "lr must be a positive number, but is '0.1'"),
        ({"batch_size": 10.0}, "batch_size must be a whole number"),
        ({"epochs": 1.5}, "epochs must be a whole number"),
        ({"epochs": True}, "epochs must be a whole number"),
        ({"momentum": 1.0}, "momentum must lie in"),
        ({"weight_decay": -0.1}, "weight_decay must be a number ≥ 0"),
        ({"prox": -1.0}, "prox must be a number ≥ 0"),
        ({"lr_decay": 0.0}, "lr_decay must lie in"),
        ({"lr_decay_every": 0}, "lr_decay_every must be a whole number of at least 1"),
        ({"straggler_share": 0.5}, "straggler_share needs more than one epoch"),
        ({"straggler_share": 1.0}, "straggler_share must lie in [0, 1)"),
        ({"stragglers": "wait"}, 'stragglers must be "keep" or "drop"'),
    ],
)
def test_bad_parameters_are_named(wrong, words):
    with pytest.raises(InvalidParameter) as caught:
        SGD(**wrong)
    assert words in str(caught.value)
