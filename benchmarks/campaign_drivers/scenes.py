"""Small data and models of every kind, on which random algorithms are tried: a scene is data, a model, and options of a run."""

from __future__ import annotations

import random
import tempfile
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

import equipoise as eq
from equipoise import attacks
from equipoise.data import Ragged

SIZES = (4, 9, 6, 13, 5, 10, 8, 11, 7)
Order = tuple[int, ...]
STRAIGHT: Order = tuple(range(len(SIZES)))
ITSELF = -1  # in the place of a number of classes: the target is the input


# ----------------------------------------------------------------------------------------------------------------------- data


def _numbers(count: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.randn(count, 3, generator=generator, dtype=torch.float64) + 0.3 * k


def _tree(count: int, k: int, generator: torch.Generator) -> dict[str, Any]:
    lengths = torch.randint(1, 6, (count,), generator=generator).tolist()
    words = [torch.randint(0, 7, (length,), generator=generator) for length in lengths]
    return {"words": Ragged.of(words, mask="mask"), "numbers": _numbers(count, k, generator)}


def _characters(count: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.randint(0, 5, (count, 4), generator=generator)


def _pixels(count: int, k: int, generator: torch.Generator) -> Tensor:
    return torch.rand(count, 28, 28, generator=generator, dtype=torch.float64) + 0.1 * k


def _packed(inputs: Callable[[int, int, torch.Generator], Any], order: Order, *, classes: int = 3) -> eq.FederatedData:
    """Nine clients of unequal sizes, and four test examples of each; in another order if given."""
    generator, triples, tests = torch.Generator().manual_seed(1), [], []
    for k, size in enumerate(SIZES):
        for target, count in ((triples, size), (tests, 4)):
            x = inputs(count, k, generator)
            y: Tensor = torch.randint(0, max(classes, 2), (count,), generator=generator)
            if not classes:
                y = x.sum(1) + torch.randn(count, generator=generator, dtype=torch.float64)
            if classes == ITSELF:
                y = x
            target.append((f"client-{k}", x, y))
    triples, tests = ([each[k] for k in order] for each in (triples, tests))
    train, test = eq.ClientSet.pack(triples), eq.ClientSet.pack(tests)
    return eq.FederatedData(train, validation=test, test=test, name="campaign", classes=max(classes, 0))


@cache
def plain(order: Order = STRAIGHT) -> eq.FederatedData:
    """Three features and three classes."""
    return _packed(_numbers, order)


@cache
def regression(order: Order = STRAIGHT) -> eq.FederatedData:
    """Three features and a number."""
    return _packed(_numbers, order, classes=0)


@cache
def two_classes(order: Order = STRAIGHT) -> eq.FederatedData:
    """Three features and two classes."""
    return _packed(_numbers, order, classes=2)


@cache
def points(order: Order = STRAIGHT) -> eq.FederatedData:
    """Three features that are their own target, as for means."""
    return _packed(_numbers, order, classes=ITSELF)


@cache
def characters(order: Order = STRAIGHT) -> eq.FederatedData:
    """Four characters and the next one."""
    return _packed(_characters, order, classes=5)


@cache
def images(order: Order = STRAIGHT) -> eq.FederatedData:
    """Images of 28 × 28 pixels."""
    return _packed(_pixels, order)


@cache
def trees(order: Order = STRAIGHT) -> eq.FederatedData:
    """Sequences of words beside numbers."""
    return _packed(_tree, order)


@cache
def stored(order: Order = STRAIGHT) -> eq.FederatedData:
    """Clients of a store on the disk."""
    place = Path(tempfile.mkdtemp(prefix="campaign-store-"))
    return eq.data.open_store(eq.data.write_store(plain(order), place / "store"))


@cache
def table(order: Order = STRAIGHT) -> eq.FederatedData:
    """A table with numbers, missing values and categories."""
    chance = random.Random(5)
    rows: dict[str, list[Any]] = {"who": [], "age": [], "town": [], "y": []}
    for k in order:
        for row in range(SIZES[k]):
            rows["who"].append(f"client-{k}")
            rows["age"].append(None if chance.random() < 0.1 else chance.gauss(30 + k, 5))
            rows["town"].append(chance.choice("abcdefghijklmnopqrstuvw"))
            rows["y"].append("xyz"[(row + k) % 3 if chance.random() < 0.7 else 0])
    options = {"split_by": "examples", "validation": 0.2, "test": 0.2}
    return eq.data.from_frame(rows, client="who", target="y", classes=["x", "y", "z"], **options)


# --------------------------------------------------------------------------------------------------------------------- models


class WordsAndNumbers(nn.Module):
    """The mean of embedded words beside numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.head = nn.Embedding(7, 2), nn.Linear(5, 3)

    def forward(self, words: Tensor, numbers: Tensor, mask: Tensor) -> Tensor:
        """Scores (B, 3)."""
        weights = mask.to(numbers.dtype).unsqueeze(-1)
        mean = (self.words(words) * weights).sum(1) / weights.sum(1)
        return self.head(torch.cat([mean, numbers], 1))


def _filled(net: nn.Module) -> nn.Module:
    """The network in float64, so that engines agree to many digits, with fixed parameters."""
    net = net.double()
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            values = torch.linspace(-0.2, 0.3, parameter.numel(), dtype=torch.float64) * (1 + number % 3)
            shuffled = values[torch.randperm(parameter.numel(), generator=torch.Generator().manual_seed(number))]
            parameter.copy_(shuffled.view_as(parameter) + (0.9 if parameter.dim() == 1 and number % 4 == 2 else 0.0))
    return net


def softmax() -> nn.Module:
    """Softmax regression."""
    return _filled(eq.models.Softmax(3, 3))


def batch_norm() -> nn.Module:
    """A hidden layer with BatchNorm, whose statistics are carried.

    No bias before it: its gradient is rounding alone, which Adam would blow up to steps of any size.
    """
    return _filled(nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 3)))


def dropout() -> nn.Module:
    """A hidden layer with dropout."""
    return _filled(nn.Sequential(nn.Linear(3, 5), nn.Tanh(), nn.Dropout(0.4), nn.Linear(5, 3)))


def words() -> nn.Module:
    """Of several inputs."""
    return _filled(WordsAndNumbers())


def line() -> nn.Module:
    """Linear regression."""
    return _filled(eq.models.LinearRegression(3))


def logistic() -> nn.Module:
    """Logistic regression."""
    return _filled(eq.models.Logistic(3))


def machine() -> nn.Module:
    """A linear support vector machine."""
    return _filled(eq.models.LinearSVM(3))


def means() -> nn.Module:
    """The mean of points."""
    return _filled(eq.models.MeanEstimator(3))


def perceptron() -> nn.Module:
    """One hidden layer."""
    return _filled(eq.models.MLP(3, 3, hidden=(4,)))


def gated() -> nn.Module:
    """A recurrent network over characters."""
    return _filled(eq.models.CharGRU(vocabulary=5, embedding=2, hidden=3))


def memory() -> nn.Module:
    """A recurrent network with memory, of two layers, over characters of which one is padding."""
    return _filled(eq.models.CharLSTM(vocabulary=5, embedding=2, hidden=3, layers=2, padding=0))


def embedded() -> nn.Module:
    """A recurrent network over fixed vectors."""
    return _filled(eq.models.EmbeddingLSTM(torch.linspace(-1, 1, 10).view(5, 2), classes=5, hidden=3))


def convolutions() -> nn.Module:
    """The convolutional network of EMNIST, whose parameters are drawn and not filled."""
    return eq.models.ConvNet(classes=3).double()


def tabular() -> nn.Module:
    """A network for the table, with dropout."""
    return _filled(eq.models.Tabular(table().schema, hidden=(4,), dropout=0.2))


# --------------------------------------------------------------------------------------------------------------------- scenes

ATTACKS: tuple[Any, ...] = (
    attacks.LabelPoisoning(0.3, 1), attacks.LabelFlip(0.3, 1), attacks.RandomUpdates(0.3, 1), attacks.SignFlip(0.3, 1),
    attacks.ModelReplacement(0.2, 1), attacks.ModelReplacement(0.2, 1, update="negated"), attacks.ALIE(0.3, 1, factor=1.5),
    attacks.Backdoor(0.3, 1, patch=1, boost=2.0),
    attacks.IPM(0.3, 1), attacks.Mimic(0.3, 1), attacks.MinMax(0.3, 1), attacks.MinMax(0.3, 1, direction="sign"),
)  # fmt: skip
KINDS: dict[str, tuple[Callable[..., eq.FederatedData], Callable[[], nn.Module], bool]] = {
    "softmax": (plain, softmax, True),
    "BatchNorm": (plain, batch_norm, True),
    "dropout": (plain, dropout, True),
    "trees": (trees, words, True),
    "regression": (regression, line, True),
    "store": (stored, softmax, True),
    "logistic": (two_classes, logistic, True),
    "SVM": (two_classes, machine, True),
    "means": (points, means, True),
    "MLP": (plain, perceptron, True),
    "GRU": (characters, gated, True),
    "LSTM": (characters, memory, True),
    "word vectors": (characters, embedded, True),
    "ConvNet": (images, convolutions, True),
    "table": (table, tabular, False),  # which examples are for testing depends on the order of rows
}


@dataclass(frozen=True)
class Scene:
    """Data and a model by name, malicious clients, and options of a run."""

    kind: str = "softmax"
    attack: Any = None
    metrics: bool = False
    stop: Any = None
    evaluate_clients: int | None = None
    clients_per_round: int = 9

    @property
    def permutable(self) -> bool:
        """Whether another order of clients means the same data."""
        drawn_by_position = self.attack is not None or self.evaluate_clients is not None
        return KINDS[self.kind][2] and not drawn_by_position

    def data(self, order: Order = STRAIGHT) -> eq.FederatedData:
        """The data, with clients in an order."""
        made = KINDS[self.kind][0](order)
        return made if self.attack is None else attacks.apply(made, self.attack)

    def model(self) -> nn.Module:
        """A new model."""
        return KINDS[self.kind][1]()

    def options(self) -> dict[str, Any]:
        """What `train` needs besides model, data and algorithm."""
        found: dict[str, Any] = {"clients_per_round": self.clients_per_round, "seed": 3, "progress": False}
        if self.metrics:
            found["metrics"] = {"likelihood": _likelihood, "f1": eq.metrics.macro_f1}
        if self.stop is not None:
            found["stop"] = self.stop
        if self.evaluate_clients is not None:
            found["evaluate_clients"] = self.evaluate_clients
        return found

    def words(self) -> dict[str, str]:
        """The scene for a report, without what is usual."""
        return {name: repr(value) for name, value in vars(self).items() if value != getattr(Scene(), name)}


def _likelihood(outputs: Tensor, targets: Tensor) -> float:
    """A metric of one's own."""
    return float(torch.nn.functional.cross_entropy(outputs, targets))


def draw_scene(chance: random.Random) -> Scene:
    """A third of the scenes is softmax regression; large models and options are rarer."""
    often = {"softmax": 14, "ConvNet": 0.3}
    kind = chance.choices(list(KINDS), [often.get(name, 2) for name in KINDS])[0]
    attack = chance.choice(ATTACKS) if chance.random() < 0.2 and kind not in ("regression", "store", "means") else None
    stop = None
    if chance.random() < 0.2:
        figure = chance.choice(["validation.loss", "validation.error_90", "test.loss_worst_10", "train.loss"])
        stop = eq.EarlyStopping(figure, patience=chance.choice([1, 2]), public=chance.random() < 0.5)
    metrics = kind not in ("regression", "means", "logistic", "SVM") and chance.random() < 0.2
    sample = 5 if chance.random() < 0.15 else None
    return Scene(kind, attack, metrics, stop, sample, chance.choice([9, 9, 9, 6]))


def prepare() -> None:
    """Make all data and import all that runs import, before children are forked."""
    from equipoise.engines import Simulator
    from equipoise.errors import EquipoiseNotice

    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        for kind in KINDS:
            scene = Scene(kind)
            for engine in ("loop", Simulator(workers=1)):
                eq.train(scene.model(), scene.data(), rounds=1, engine=engine, **scene.options())
        noise = eq.privacy.DifferentialPrivacy(None, 1e-2, 0.5, noise_multiplier=0.8)
        eq.train(softmax(), plain(), eq.Algorithm(privacy=noise), rounds=1, clients_per_round=9, progress=False)
