"""What an error measures, in words: of the library's errors, of torch's losses and of a user's own functions."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from inspect import isroutine
from types import MethodType
from typing import Any

ZERO_ONE = "0-1 error"
WRONG_LABELS = "share of wrong labels"  # where an example has several: the 0-1 error counts examples
SHARES = (ZERO_ONE, WRONG_LABELS)  # from 0 to 1
SQUARED, ABSOLUTE = "squared error", "absolute error"
_KNOWN = {
    "misclassified": ZERO_ONE, "MaskedMisclassified": ZERO_ONE, "wrong_sign": ZERO_ONE, "wrong_half": ZERO_ONE,
    "squared_error": SQUARED, "mse_loss": SQUARED, "MSELoss": SQUARED,
    "absolute_error": ABSOLUTE, "l1_loss": ABSOLUTE, "L1Loss": ABSOLUTE,
}  # fmt: skip
_OURS = ("equipoise.", "torch.")  # modules whose functions are named by words
_ABBREVIATIONS = ("mae", "mse", "rmse", "mape")
_MEANT = {
    ZERO_ONE: "the share of a client's examples that the model gets wrong",
    WRONG_LABELS: "an example's wrong labels divided by all its labels, averaged over a client's examples",
    SQUARED: "(prediction − {target})², averaged over a client's examples",
    ABSOLUTE: "|prediction − {target}|, averaged over a client's examples",
}


def error_name(error: Callable[..., Any], model: str = "", *, several_labels: bool = False, is_loss: bool = False) -> str:
    """The name of a function of outputs and targets in words; of the `error` or `loss` of a class, such as `model`, with that.

    With `several_labels` per example the library's errors of classes count wrong labels, not wrong examples. A function of a
    user whose name says nothing is an own error, or an own loss if it `is_loss`.

    >>> def median_error(outputs, targets): ...
    >>> median_error.__module__ = "my_study"  # a function of the library, or of torch, is named by words
    >>> error_name(median_error), error_name(lambda outputs, targets: 0)
    ('median_error', 'own error')
    """
    while isinstance(error, partial):
        error = error.func
    name = error.__name__ if isroutine(error) else type(error).__name__
    model = type(error.__self__).__name__ if isinstance(error, MethodType) else model
    if name in ("error", "loss") and model:
        return f"{model}.{name}"
    if name in ("error", "loss", "<lambda>"):
        return "own loss" if is_loss else "own error"
    words = name.strip("_").replace("_", " ")
    if isroutine(error) and "_" in name and not (error.__module__ or "").startswith(_OURS) and name not in _KNOWN:
        return name  # of a user: as it is in the code
    known = _KNOWN.get(name)
    if known == ZERO_ONE and several_labels:
        return WRONG_LABELS
    return known or (words.upper() if words in _ABBREVIATIONS else words)


def error_words(name: str, target: str = "") -> str:
    """An error and the column that it is of, e.g. "squared error of price"; empty if its name is not known."""
    return f"{name} of {target}" if name and target and name not in SHARES else name


def error_definition(name: str, target: str = "") -> str:
    """What is measured on the examples of a client; "" for a name that says nothing.

    >>> error_definition("squared error", "price")
    "(prediction − price)², averaged over a client's examples"
    """
    if not name:
        return ""
    return _MEANT.get(name, "{name}, averaged over a client's examples").format(name=name, target=target or "target")
