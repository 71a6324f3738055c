"""Models of the federated-learning papers, written so that they vectorise over clients with `torch.func.vmap`.

Any other `torch.nn.Module` works as well. Those here keep three promises: their initial parameters are a function of a seed
(or zero) and never draw from the global generator; their forward pass has no branch that depends on the data, so that
`vmap(grad(…))` over stacked parameters gives each client's gradient; and an input of the wrong shape is refused in words.
"""

from equipoise.models import language
from equipoise.models.adapters import freeze_lora_a
from equipoise.models.convnet import ConvNet
from equipoise.models.group_norm import with_group_norm
from equipoise.models.linear import LinearRegression, LinearSVM, Logistic, MeanEstimator, Softmax
from equipoise.models.perceptron import MLP
from equipoise.models.recurrent import CharGRU, CharLSTM, EmbeddingLSTM
from equipoise.models.table_network import Tabular

__all__ = [
    "MLP",
    "CharGRU",
    "CharLSTM",
    "ConvNet",
    "EmbeddingLSTM",
    "LinearRegression",
    "LinearSVM",
    "Logistic",
    "MeanEstimator",
    "Softmax",
    "Tabular",
    "freeze_lora_a",
    "language",
    "with_group_norm",
]
