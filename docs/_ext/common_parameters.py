"""Parameters that mean the same in many places: what they are, and the public names of which it is true.

A description here is used where neither the docstring of a name nor a comment behind the parameter says what it is. Names may
hold `*`.
"""

_TRAINING = ("equipoise.train", "equipoise.train_many", "equipoise.train_family", "equipoise.compare", "equipoise.tune")
_EVALUATING = (*_TRAINING, "equipoise.evaluate", "equipoise.explain", "equipoise.heterogeneity.*")

COMMON: dict[str, dict[str, tuple[str, ...]]] = {
    "model": {"The torch module that is trained; it is not changed.": _TRAINING},
}
