"""Measures of a finished run: figures in %, as the papers print them."""

from __future__ import annotations

from itertools import pairwise
from typing import cast

import torch
from torch import Tensor

from equipoise import metrics
from equipoise.algorithm import Algorithm
from equipoise.core.carried import move_model
from equipoise.data.clients import ClientSet, FederatedData, split_examples
from equipoise.engines import Simulator
from equipoise.errors import InvalidData
from equipoise.reproduce.entry import Figure, FinishedRun, Measure
from equipoise.runs.setup import set_up
from equipoise.sampling import Full
from equipoise.solvers import SGD
from equipoise.types import Cohort

ERRORS = {"mean": Figure("mean error"), "percentile_90": Figure("90th percentile")}
TAIL = {
    "mean": Figure("mean error"),
    "percentile_90": Figure("90th percentile"),
    "interpolated": Figure("… interpolated"),
    "by_examples": Figure("… by examples"),
    "worst_half": Figure("mean of the worst half"),
    "spread": Figure("deviation over clients"),
    "sampling": Figure("… from few images alone"),
}
FINETUNED = {
    "mean_before": Figure("mean before"),
    "mean_after": Figure("mean after"),
    "percentile_90_before": Figure("90th percentile before"),
    "percentile_90_after": Figure("90th percentile after"),
}
ACCURACIES = {
    "example": Figure("accuracy", 1),
    "client": Figure("accuracy by client", 1),
    "worst": Figure("worst 10 %", 1),
    "best": Figure("best 10 %", 1),
    "variance": Figure("variance", 0),
}
CONVERGENCE = {
    "loss": Figure("training loss", 3),
    "change": Figure("change of the loss", 3),
    "accuracy": Figure("test accuracy", 1),
}
LEADERBOARD = {
    "best": Figure("best round on test"),
    "last": Figure("last round", unpublished=True),
    "client": Figure("mean over clients", unpublished=True),
    "percentile_10": Figure("10th percentile of clients", unpublished=True),
    "worst": Figure("worst client", unpublished=True),
}
UNDER_ATTACK = {"last_five": Figure("last five evaluations", 1), "last": Figure("last round", 1)}
_CHUNK_SIZE = 50  # clients whose finetuned models are in memory together


def errors(trained: FinishedRun) -> dict[str, float]:
    """Mean and 90th percentile of the error over test clients, each counting the same."""
    error = trained.result.clients.where("test").error
    return {"mean": 100 * metrics.mean(error), "percentile_90": 100 * metrics.percentile(error, 90)}


def tail_errors(trained: FinishedRun) -> dict[str, float]:
    """Errors of test clients with several rules for the 90th percentile, and how much of their spread chance would make.

    "Interpolated" takes the average of neighbours (NumPy's rule), "by examples" weighs clients by their images. If all clients
    had the mean error p, the error of one with n images would still deviate by √(p(1 − p)/n).
    """
    rows = trained.result.clients.where("test")
    error, size = rows.error.double(), rows.size.double()
    p = metrics.mean(error)
    figures = {
        "mean": p,
        "percentile_90": metrics.percentile(error, 90),
        "interpolated": float(torch.quantile(error, 0.9)),
        "by_examples": metrics.percentile(error, 90, size),
        "worst_half": metrics.worst(error, 0.5),
        "spread": metrics.standard_deviation(error),
        "sampling": float((p * (1 - p) / size).mean().sqrt()),
    }
    return {name: 100 * value for name, value in figures.items()}


def accuracies(trained: FinishedRun) -> dict[str, float]:
    """Accuracy over all test examples and over clients, its extremes and its variance over clients."""
    rows = trained.result.clients.where("test")
    accuracy = 100 * (1 - rows.error)
    return {
        "example": metrics.mean(accuracy, rows.size),
        "client": metrics.mean(accuracy),
        "worst": metrics.best(accuracy, 0.1),  # the smallest accuracies
        "best": metrics.worst(accuracy, 0.1),
        "variance": metrics.standard_deviation(accuracy) ** 2,
    }


def leaderboard(trained: FinishedRun) -> dict[str, float]:
    """Accuracy over all test examples: of the best evaluation, chosen on the test examples, and of the last; and over clients.

    Each client is judged with the model that it is served: its own if it has one.
    """
    rows = trained.result.clients.where("test")
    accuracy = 100 * (1 - rows.served_error)
    last = metrics.mean(accuracy, rows.size)
    return {
        "best": max([last, *trained.curve.values()]),
        "last": last,
        "client": metrics.mean(accuracy),
        "percentile_10": metrics.percentile(accuracy, 10),
        "worst": float(accuracy.min()),
    }


def under_attack(trained: FinishedRun) -> dict[str, float]:
    """Accuracy on the test examples: the mean of the last five evaluations, and that of the last round."""
    rows = trained.result.clients.where("test")
    last = 100 * (1 - metrics.mean(rows.served_error, rows.size))
    evaluations = [*(trained.curve[after] for after in sorted(trained.curve) if after < trained.result.rounds), last]
    return {"last_five": sum(evaluations[-5:]) / len(evaluations[-5:]), "last": last}


def convergence(trained: FinishedRun) -> dict[str, float]:
    """The training loss at the end, its mean absolute change between evaluations in the second half, and the test accuracy."""
    rows = trained.result.clients.where("test")
    losses = [point.splits["train"]["loss"] for point in trained.result.history.points]
    half = losses[len(losses) // 2 :] if len(losses) > 2 else losses
    changes = [abs(b - a) for a, b in pairwise(half)]
    return {
        "loss": losses[-1],
        "change": sum(changes) / max(1, len(changes)),
        "accuracy": 100 * (1 - metrics.mean(rows.error, rows.size)),
    }


def finetuned(trained: FinishedRun, epochs: int = 10) -> dict[str, float]:
    """Errors on one half of each test client's examples, before and after finetuning on the other half.

    The learning rate is that of the last round. Source: Pillutla et al. 2023, section 7.5 (the share of examples is ours).
    """
    result, solver = trained.result, cast(SGD, trained.solver)  # entries with finetuning have no other
    if trained.data.test is None:
        raise InvalidData("There is no test client to finetune on.")
    halves = split_examples(trained.data.test, test=0.5, seed=result.seed)
    if halves.test is None or halves.test.ids != halves.train.ids:
        raise InvalidData("A test client has too few examples to finetune and to be judged by.")
    local = SGD(
        lr=solver.learning_rate(max(0, result.rounds - 1)), batch_size=solver.batch_size, epochs=epochs,
        weight_decay=solver.weight_decay,
    )  # fmt: skip
    before, after = errors_of_finetuning(
        result.model, halves.train, halves.test, local, seed=result.seed, device=trained.device
    )
    figures = {"mean_before": metrics.mean(before), "mean_after": metrics.mean(after)}
    figures |= {"percentile_90_before": metrics.percentile(before, 90), "percentile_90_after": metrics.percentile(after, 90)}
    return {name: 100 * value for name, value in figures.items()}


def errors_of_finetuning(
    model: torch.nn.Module, own: ClientSet, judging: ClientSet, solver: SGD, *, seed: int, device: str | None
) -> tuple[Tensor, Tensor]:
    """Errors (n,) on `judging` before, and (n,) after each client trains the model on its own examples."""
    setting = set_up(
        model, FederatedData(own, test=judging), Algorithm(solver=solver, sampler=Full()), rounds=0, clients_per_round=None,
        seed=seed, loss=None, error=None, engine=Simulator(device=device),
    )  # fmt: skip
    start = setting.first_model
    _, before = setting.engine.evaluate(start, judging)
    after = []
    for chunk in torch.split(torch.arange(len(own)), _CHUNK_SIZE):
        ones = torch.ones(len(chunk), dtype=torch.float64)
        updates = setting.engine.updates(start, Cohort(0, seed, chunk, ones / len(chunk), ones), solver).update
        after += [
            setting.engine.evaluate(move_model(start, u), judging.take([int(k)]))[1]
            for k, u in zip(chunk, updates, strict=True)
        ]
    return before, torch.cat(after)


MEASURES: dict[str, tuple[dict[str, Figure], Measure]] = {  # with the figures that each gives
    "errors": (ERRORS, errors),
    "tail_errors": (TAIL, tail_errors),
    "accuracies": (ACCURACIES, accuracies),
    "convergence": (CONVERGENCE, convergence),
    "finetuned": (FINETUNED, finetuned),
    "leaderboard": (LEADERBOARD, leaderboard),
    "under_attack": (UNDER_ATTACK, under_attack),
}
