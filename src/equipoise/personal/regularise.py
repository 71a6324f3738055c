"""Personal models made after training that stay near the shared one: by their parameters (EWC) or by their predictions (KL)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import grad, vmap
from torch.nn import functional

from equipoise.core import trees
from equipoise.core.per_example_losses import MaskedCrossEntropy, cross_entropy
from equipoise.core.task import Task
from equipoise.data.clients import ClientSet
from equipoise.errors import InvalidParameter, require_number
from equipoise.personal.context import PersonalContext
from equipoise.personal.finetune import FinetuningMethod
from equipoise.personal.interpolate import Pair, detach_model, pair_steps, refuse_all_but_sgd
from equipoise.types import Cohort, LocalSolver, Pull

if TYPE_CHECKING:
    from equipoise.algorithm import Algorithm

_GRADIENT_NUMBERS = 2**24  # of per-example gradients held at once


@dataclass(frozen=True)
class _HeldBack(FinetuningMethod):
    """Finetuning that a term of the given strength keeps near the shared model."""

    strength: float = 1.0  # λ ≥ 0: how strongly v is held; 0 is plain finetuning
    epochs: int = 50  # passes over a client's data after the rounds
    solver: LocalSolver | None = None  # trains the clients' own models; None: the algorithm's solver

    def __post_init__(self) -> None:
        require_number("strength", self.strength, "[0, ∞)", "0 is plain finetuning.")
        super().__post_init__()


@dataclass(frozen=True)
class EWC(_HeldBack):
    """Finetuning held back where the shared model is sure: min F_k(v) + (λ/2) Σ_i Fisher_ii (v_i − w_i)², from v = w.

    `strength` is λ. `solver` (None: the algorithm's) makes `epochs` passes over a client's data. Fisher_ii is the diagonal
    of the client's empirical Fisher information at w, the mean over its training examples of the squared gradient of the
    loss. If the loss is the negative log-likelihood of the labels (cross-entropy, Logistic), this is Fisher information.
    With another loss the same formula only measures how strongly the examples pull at each parameter.

    Steps of length η cannot hold v by more than 1/η: where λ Fisher_ii is larger, the pull is 1/η, which brings v_i back to w_i
    at every step before it goes along the gradient.

    Source: Kirkpatrick et al. 2017; Li 2023 (thesis), sections 5.3.4 and 5.6.2 (50 epochs; there the Fisher information is
    that of one batch).

    >>> import equipoise as eq
    >>> data = eq.data.gaussian_means([[0.0], [4.0]], examples=10, exact=True)  # F_k(w) = (w − μ_k)² + 1, from w^0 = 0
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.25, batch_size=None), personal=EWC(strength=0.01, epochs=2))
    >>> result = eq.train(eq.models.MeanEstimator(1), data, algorithm, rounds=1, clients_per_round=2)
    >>> round(float(result.personal.params(["client-1"])), 3)  # w = 1, Fisher 4(9 + 1); 2.5, then 2.5 − ¼(−3 + 0.4 · 1.5)
    3.1
    """

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        """The models (K, D) after `epochs` passes from w, held back by the diagonal Fisher information.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        work = self.for_epochs(solver)
        pull = None
        if self.strength:
            fisher = diagonal_fisher(context.task, params, context.data.train, cohort.clients)
            pull = Pull(params, (self.strength * fisher).clamp(max=1 / work.learning_rate(cohort.rate_round)))
        start = params.expand(len(cohort), -1).contiguous()
        return context.engine.own_steps(start, context.own_stream(cohort), work, pull)


def diagonal_fisher(task: Task, params: Tensor, clients: ClientSet, which: Tensor) -> Tensor:
    """Mean over the examples of each client of the squared gradients of their losses at `params` (D,): (K, D)."""
    task = task.to(params.device)
    task.scorer.eval()
    fisher = torch.zeros(len(which), len(params), dtype=params.dtype, device=params.device)
    together = max(1, _GRADIENT_NUMBERS // len(params))
    for row, k in zip(fisher, which.tolist(), strict=True):
        owned = clients.rows(k)
        for start in range(owned.start, owned.stop, together):
            part = slice(start, min(start + together, owned.stop))
            x, y = (trees.move(v(part, params.dtype), params.device) for v in (clients.inputs, clients.targets))
            row += summed_squared_gradients(task, params, x, y)
        row /= owned.stop - owned.start
    return fisher


def summed_squared_gradients(task: Task, params: Tensor, x: Any, y: Any) -> Tensor:
    """Σ over examples (B, …) of the squared gradient of the example's loss, (D,)."""

    def loss(flat: Tensor, one_x: Any, one_y: Any) -> Tensor:
        return task.losses(flat, trees.clone(trees.select(one_x, None)), trees.select(one_y, None))[0]

    try:
        gradients: Tensor = vmap(grad(loss), in_dims=(None, 0, 0))(params.detach(), x, y)  # (B, D)
        return gradients.square().sum(0)
    except RuntimeError:  # a model that cannot be vectorised: one example after another
        total, leaf = torch.zeros_like(params), params.detach().requires_grad_()
        with torch.backends.cudnn.flags(enabled=False):  # whose recurrent layers have no gradient in evaluation mode
            for k in range(trees.batch_shape(x)[0]):
                one_x, one_y = trees.select(x, k), trees.select(y, k)
                total += torch.autograd.grad(loss(leaf, one_x, one_y), leaf)[0].square()
        return total


def symmetrised_kl(outputs: Tensor, reference: Tensor) -> Tensor:
    """KL(p‖q) + KL(q‖p) of p = softmax(outputs), q = softmax(reference), logits (B, C, …): one number per example, (B,).

    >>> symmetrised_kl(torch.tensor([[0.0, 0.0]]), torch.log(torch.tensor([[3.0, 1.0]])))  # ¼ log 3
    tensor([0.2747])
    """
    log_p, log_q = functional.log_softmax(outputs, 1), functional.log_softmax(reference, 1)
    both = ((log_p.exp() - log_q.exp()) * (log_p - log_q)).sum(1)
    return both.flatten(1).mean(1) if both.dim() > 1 else both


@dataclass(frozen=True)
class _PredictionPenalty:
    """The loss of a pair's own model plus (λ/2) times the symmetrised KL divergence from the predictions of the shared one."""

    strength: float

    def __call__(self, pair: Pair, x: Any, y: Any) -> Tensor:
        module, training = pair.scorer.module, pair.scorer.training
        outputs = trees.call_with(module, pair.own_model(), trees.clone(x))
        pair.scorer.eval()  # the predictions to stay near are without dropout
        reference = trees.call_with(module, detach_model(pair.shared_model()), x)
        pair.scorer.train(training)
        loss: Tensor = pair.scorer.loss(outputs, y) + self.strength / 2 * symmetrised_kl(outputs, reference)
        return loss


@dataclass(frozen=True)
class SymmetrisedKL(_HeldBack):
    """Finetuning near the shared model's predictions: min F_k(v) + (λ/2)(KL(f(v)‖f(w)) + KL(f(w)‖f(v))), from v = w.

    f are the softmax probabilities of the client's training examples, so the loss must be cross-entropy. `strength` is λ.
    `solver` (None: the algorithm's) makes `epochs` passes over a client's data. Near w the term is (λ/2)(v − w)ᵀI(v − w)
    with the Fisher information I: a strength that is large for the learning rate makes v diverge.

    Source: Li 2023 (thesis), sections 5.3.4 and 5.6.2 (50 epochs).

    >>> import equipoise as eq
    >>> clients = [("a", torch.ones(1, 1), torch.tensor([0])), ("b", torch.ones(1, 1), torch.tensor([1]))]
    >>> data = eq.FederatedData(eq.ClientSet.pack(clients), classes=2)
    >>> personal = SymmetrisedKL(strength=1.0, epochs=2)
    >>> algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=1.0, batch_size=None), personal=personal)
    >>> model = eq.models.Softmax(1, 2, bias=False)
    >>> result = eq.train(model, data, algorithm, rounds=1, clients_per_round=2)  # the shared model stays at (0, 0)
    >>> round(float(result.personal.params(["a"])[0, 0]), 3)  # 0.5, then p = 0.731: 0.5 + 0.269 − ½(p(1 − p) + p − ½)
    0.555
    """

    def check(self, algorithm: Algorithm) -> None:
        """Refuse, in `algorithm`, solvers other than SGD."""
        refuse_all_but_sgd(self, self.solver or algorithm.solver)

    def begin(self, context: PersonalContext, params: Tensor) -> tuple[Tensor, Any]:
        """An empty row, and no shared state; refuses losses other than cross-entropy.

        `context` holds the engine, the task and the data of the run. `params` (D,) is w^0.
        """
        loss = context.task.loss
        if loss is not cross_entropy and not isinstance(loss, nn.CrossEntropyLoss | MaskedCrossEntropy):
            rule = "SymmetrisedKL compares softmax probabilities and needs a model trained by cross-entropy"
            fix = "Use models.Softmax or another classifier, or personal.Ditto()."
            raise InvalidParameter("personal", rule, getattr(loss, "__name__", type(loss).__name__), fix)
        return super().begin(context, params)

    def models(
        self, context: PersonalContext, params: Tensor, cohort: Cohort, rows: Tensor, solver: LocalSolver, shared: Any
    ) -> Tensor:
        """The models (K, D) after `epochs` passes from w, held near its predictions.

        `context` holds the engine, the task and the data of the run. `params` (D,) is the shared model, `cohort` holds the
        clients, `rows` (K, width) is what they keep, `solver` is the algorithm's, and `shared` is the state of all clients
        together.
        """
        work = self.for_epochs(solver)
        start = torch.cat([params.new_zeros(1), params]).expand(len(cohort), -1)  # nothing is mixed
        rule = _PredictionPenalty(self.strength)
        return pair_steps(context, rule, start, params, context.own_stream(cohort), work, "own")[1]
