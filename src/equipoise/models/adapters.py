"""Low-rank adapters: which pairs of trained matrices A and B a model has, and freezing A.

An adapter adds B A to a frozen weight. The mean of clients' products B_k A_k is not the product of the means of B_k and of A_k,
and noise on both is multiplied. With A frozen at its random start the mean of the B_k gives the mean of the products exactly.
"""

from __future__ import annotations

import copy
from typing import TypeVar

from torch import nn

from equipoise.errors import InvalidParameter

M = TypeVar("M", bound=nn.Module)
_OTHER = {"lora_A": "lora_B", "lora_a": "lora_b", "A": "B", "a": "b", "lora_embedding_A": "lora_embedding_B"}
WHY_NOT_BOTH = "noise on both matrices of low-rank adapters is multiplied, and means of A and of B do not give the mean of B A"
_KEPT = "trains_lora_a"  # an attribute of models whose A is to be trained, also under differential privacy


def lora_pairs(model: nn.Module) -> list[tuple[str, str]]:
    """The names of A and B of each adapter whose A is trained: parameters that share all of their name but the letter.

    Names are those of peft (`lora_A`, `lora_B`), or `a` and `b`, `A` and `B` in one layer; A is (r, n) and B (m, r), or of an
    embedding (n, r) and (r, m).
    """
    known = dict(model.named_parameters())
    pairs = []
    for name, first in known.items():
        steps = name.split(".")
        for place, step in enumerate(steps):
            other = ".".join([*steps[:place], _OTHER.get(step, ""), *steps[place + 1 :]])
            if step in _OTHER and other in known and first.requires_grad and first.dim() == known[other].dim() == 2:
                second = known[other]
                if first.shape[0] == second.shape[1] or first.shape[1] == second.shape[0]:
                    pairs.append((name, other))
    return pairs


def freeze_lora_a(model: M, freeze: bool = True) -> M:
    """A copy of a model whose adapters train B alone (FFA-LoRA); with `freeze=False` one that trains A, too.

    Under differential privacy `equipoise.train` does this itself, with a notice, unless the model comes from here with
    `freeze=False`. In a federation the server and every node must make the model so.

    Source: Sun, Li, Li and Ding 2024, "Improving LoRA in privacy-preserving federated learning" (FFA-LoRA).
    """
    pairs = lora_pairs(model)
    if not pairs and freeze:
        rule = "must have adapters: matrices lora_A and lora_B, or a and b of one layer, with a trained A"
        raise InvalidParameter("model", rule, type(model).__name__, "Add them by peft.get_peft_model.")
    made = copy.deepcopy(model)
    if not freeze:
        setattr(made, _KEPT, True)
        return made
    known = dict(made.named_parameters())
    for name, _ in pairs:
        known[name].requires_grad_(False)
    return made


def trains_lora_a(model: nn.Module) -> bool:
    """Whether adapters of the model train both of their matrices, and nobody has said that they shall."""
    both = any(dict(model.named_parameters())[second].requires_grad for _, second in lora_pairs(model))
    return both and not vars(model).get(_KEPT, False)
