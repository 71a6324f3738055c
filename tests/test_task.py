"""What a model, a loss and an error mean together, and who is blamed when they do not fit."""

import warnings
from functools import partial

import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.core.per_example_losses import misclassified
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data.clients import FederatedData
from equipoise.errors import EquipoiseNotice, IncompatibleParts, InvalidParameter
from made_clients import make_clients


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 3))


LOSSES = [
    None,
    nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1),
    lambda outputs, targets: (1 + outputs - outputs.gather(1, targets[:, None])).clamp(min=0).sum(1),
    lambda outputs, targets: (outputs - nn.functional.one_hot(targets, 3)).square().sum(1),
]


@pytest.mark.parametrize("loss", LOSSES)
def test_with_classes_an_error_is_misclassification_whatever_the_loss(loss, ragged):
    result = eq.train(net(), ragged, rounds=3, clients_per_round=4, loss=loss)
    assert not result.error_is_loss
    for row in result.clients.where("test"):
        x, y = ragged.test.client(row["client"])
        assert row["error"] == pytest.approx(float((result.model(x).argmax(1) != y).double().mean()))


def test_a_models_own_error_and_a_given_one_are_used(ragged):
    class WithError(eq.models.Softmax):
        @staticmethod
        def error(outputs, targets):
            return torch.full_like(targets, 0.25, dtype=outputs.dtype)

    other = nn.CrossEntropyLoss(reduction="none", label_smoothing=0.1)
    assert set(eq.train(WithError(4, 3), ragged, rounds=1, clients_per_round=2, loss=other).clients.error.tolist()) == {0.25}
    half = eq.train(
        WithError(4, 3), ragged, rounds=1, clients_per_round=2, error=lambda outputs, targets: 0.5 + 0 * outputs[:, 0]
    )
    assert set(half.clients.error.tolist()) == {0.5}


def test_without_classes_the_error_is_the_loss():
    gen = torch.Generator().manual_seed(0)
    triples = [(f"c{i}", torch.randn(6, 4, generator=gen), torch.randn(6, generator=gen)) for i in range(3)]
    data = FederatedData(eq.ClientSet.pack(triples))
    result = eq.train(eq.models.LinearRegression(4), data, rounds=1, clients_per_round=2)
    assert result.error_is_loss
    assert torch.equal(result.clients.error, result.clients.loss)


def averaged(outputs, targets):
    return nn.functional.cross_entropy(outputs, targets)


def detached(outputs, targets):
    return nn.functional.cross_entropy(outputs.detach(), targets, reduction="none")


def shouting(outputs, targets):
    raise KeyError("temperature")


def mixing(outputs, targets):
    return nn.functional.cross_entropy(outputs - outputs.mean(0), targets, reduction="none")


class WithScale(nn.Module):
    def __init__(self):
        super().__init__()
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, outputs, targets):
        return self.scale * nn.functional.cross_entropy(outputs, targets, reduction="none")


class Squeezing(nn.Linear):
    def forward(self, x):
        return super().forward(x).squeeze()


class Pair(nn.Linear):
    def forward(self, x):
        return super().forward(x), x


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"loss": averaged}, "loss must give one number per example"),
        ({"loss": detached}, "loss must depend on the model's parameters"),
        ({"loss": shouting}, "loss must fit the data 'data': inputs of shape (4,) and type float32, targets of shape ()"),
        ({"loss": "mse"}, "loss must be a function of (outputs, targets), but is 'mse'"),
        ({"error": averaged}, "error must give one number per example"),
        ({"error": shouting}, "error must fit the data"),
        ({"loss": WithScale()}, "loss must not have trainable parameters outside the model"),
        (
            {"model": Squeezing(4, 1), "loss": lambda o, y: (o - y).square()},
            "model must give a batch of one an output of shape (1,)",
        ),
        ({"model": nn.LazyLinear(3)}, "model must have parameters of known shape"),
        ({"model": Pair(4, 3)}, "model must return one tensor of outputs, unless a loss"),
    ],
)
def test_the_right_part_is_blamed(options, words):
    data = FederatedData(make_clients([5, 6]), classes=3)
    with pytest.raises(InvalidParameter) as caught:
        eq.train(**{"model": net(), "data": data, "rounds": 1, "clients_per_round": 1, **options})
    assert words in str(caught.value)


def test_a_loss_that_mixes_the_batch_is_refused(ragged):
    with pytest.raises(IncompatibleParts, match="The loss of an example depends on the other examples"):
        eq.train(net(), ragged, rounds=1, clients_per_round=2, loss=mixing)


class TwoExperts(nn.Linear):
    """Scores of classes, and in training mode a term of the whole batch for each of its examples."""

    def forward(self, x):
        scores = super().forward(x)
        term = scores.softmax(1).mean(0).square().sum() if self.training else torch.zeros(())
        return scores, term.expand(len(x))


def balanced_loss(outputs, targets):
    return nn.functional.cross_entropy(outputs[0], targets, reduction="none") + 0.5 * outputs[1]


def first_wrong(outputs, targets):
    return (outputs[0].argmax(1) != targets).float()


def test_a_term_of_the_whole_batch_is_trained_where_forward_returns_it(ragged):
    with pytest.raises(IncompatibleParts, match="let forward return it, expanded to one number per example in training mode"):
        eq.train(net(), ragged, rounds=1, clients_per_round=2, loss=mixing, progress=False)
    data = FederatedData(make_clients([6]), classes=3)
    torch.manual_seed(0)
    model, whole = TwoExperts(4, 3), eq.Algorithm(solver=eq.solvers.SGD(lr=0.5, batch_size=None))
    result = eq.train(model, data, whole, rounds=1, clients_per_round=1, loss=balanced_loss, error=first_wrong, progress=False)
    x, y = data.train.client(at=0)
    balanced_loss(model.train()(x), y).mean().backward()
    torch.testing.assert_close(result.model.weight, model.weight.detach() - 0.5 * model.weight.grad)


def test_several_outputs_without_an_error_are_told_that_the_error_is_the_loss(ragged):
    model, options = TwoExperts(4, 3), {"rounds": 0, "clients_per_round": 2, "progress": False}
    with pytest.warns(EquipoiseNotice, match=r"returns a tuple and no error is given, so the error is the loss.*error="):
        eq.train(model, ragged, loss=balanced_loss, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        eq.train(model, ragged, loss=balanced_loss, error=first_wrong, **options)
        eq.train(model, ragged, loss=balanced_loss, error=balanced_loss, **options)  # the user says so


def test_outputs_by_name_are_told_of_with_a_name_of_theirs(ragged):
    class Named(TwoExperts):
        def forward(self, x):
            return {"scores": super().forward(x)[0]}

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs["scores"], targets, reduction="none")

    with pytest.warns(EquipoiseNotice, match=r"returns a dict and no error is given.*outputs\['scores'\]\.argmax"):
        eq.train(Named(4, 3), ragged, loss=loss, rounds=0, clients_per_round=2, progress=False)


def test_a_models_own_loss_given_by_hand_is_the_same():
    class Scaled(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.temperature = nn.Parameter(torch.tensor(1.0))

        def loss(self, outputs, targets):
            return nn.functional.cross_entropy(outputs * self.temperature, targets, reduction="none")

    torch.manual_seed(0)
    model, data = Scaled(), FederatedData(make_clients([9, 12]), classes=3)
    first = eq.train(model, data, rounds=3, clients_per_round=2)
    second = eq.train(model, data, rounds=3, clients_per_round=2, loss=model.loss)
    assert torch.equal(first.params, second.params)
    assert float(second.model.temperature.detach()) != 1.0


def mean_of_logits(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs, targets.float(), reduction="none").mean(1)


def squeezed_logits(outputs, targets):
    return nn.functional.binary_cross_entropy_with_logits(outputs.squeeze(-1), targets.float(), reduction="none")


def probabilities(outputs, targets):
    return nn.functional.binary_cross_entropy(outputs.squeeze(-1), targets.float(), reduction="none")


ONE_LOGIT, ONE_CHANCE = (nn.Linear(4, 1), nn.Flatten(0)), (nn.Linear(4, 1), nn.Sigmoid(), nn.Flatten(0))


@pytest.mark.parametrize(
    ("loss", "layers", "shape", "threshold"),
    [
        (mean_of_logits, (nn.Linear(4, 3),), (6, 3), 0.0),  # a function of the user's own, several labels
        (squeezed_logits, (nn.Linear(4, 1),), (6,), 0.0),
        (probabilities, (nn.Linear(4, 1), nn.Sigmoid()), (6,), 0.5),
        (nn.BCEWithLogitsLoss(reduction="none", pos_weight=torch.tensor(3.0)), ONE_LOGIT, (6,), 0.0),
        (nn.BCELoss(reduction="none"), ONE_CHANCE, (6,), 0.5),
        (partial(nn.functional.binary_cross_entropy_with_logits, reduction="none"), ONE_LOGIT, (6,), 0.0),
    ],
)
@pytest.mark.parametrize("engine", ["loop", "simulator"])
def test_binary_cross_entropy_has_an_error_of_its_own(loss, layers, shape, threshold, engine):
    gen = torch.Generator().manual_seed(0)
    rows = [(f"c{i}", torch.randn(6, 4, generator=gen), torch.randint(0, 2, shape, generator=gen).float()) for i in range(3)]
    data, model = FederatedData(eq.ClientSet.pack(rows)), nn.Sequential(*layers)
    result = eq.train(model, data, rounds=1, clients_per_round=2, loss=loss, engine=engine)
    assert not result.error_is_loss
    for (_, x, y), row in zip(rows, result.clients, strict=True):
        outputs = result.model(x).detach().reshape(y.shape)
        assert row["error"] == pytest.approx(float(((outputs > threshold) != (y > 0.5)).double().mean()))


def test_other_losses_of_two_numbers_keep_their_loss_as_error():
    gen = torch.Generator().manual_seed(0)
    rows = [(f"c{i}", torch.randn(6, 4, generator=gen), torch.randint(0, 2, (6,), generator=gen).float()) for i in range(3)]

    def squared(outputs, targets):
        return (outputs.squeeze(-1) - targets).square()

    result = eq.train(nn.Linear(4, 1), FederatedData(eq.ClientSet.pack(rows)), rounds=1, clients_per_round=2, loss=squared)
    assert result.error_is_loss


def test_pixels_without_a_scale_get_a_hint():
    images = eq.data.from_arrays(torch.zeros(6, 1, 8, 8, dtype=torch.uint8), [0, 1] * 3, [0, 0, 1, 1, 2, 2], test=0.3)
    with pytest.raises(InvalidParameter, match="scale=1/255"):
        eq.train(nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 2)), images, rounds=1, clients_per_round=1)


def test_the_trained_model_predicts_as_it_was_judged(ragged):
    model = nn.Sequential(nn.Linear(4, 16), nn.Dropout(0.5), nn.Linear(16, 3))
    result = eq.train(model, ragged, rounds=2, clients_per_round=3)
    x, y = ragged.test.client(at=0)
    row = next(iter(result.clients.where("test")))
    assert row["error"] == pytest.approx(float((result.model(x).argmax(1) != y).double().mean()))


def test_a_run_that_blew_up_without_infinities_says_so(ragged):
    with pytest.warns(EquipoiseNotice, match="the run diverged"):
        eq.train(eq.models.Softmax(4, 3), ragged, eq.Algorithm(solver=eq.solvers.SGD(lr=1e5)), rounds=3, clients_per_round=4)


def test_a_notice_taken_as_an_error_leaves_nothing_open(ragged, tmp_path):
    log = eq.observers.JsonLines(tmp_path / "rounds.jsonl")
    wild = eq.Algorithm(solver=eq.solvers.SGD(lr=1e9))
    with pytest.raises(EquipoiseNotice):  # the tests take warnings as errors
        eq.train(eq.models.Softmax(4, 3), ragged, wild, rounds=3, clients_per_round=4, observers=[log])
    assert log._file is None


def test_a_task_is_a_copy(ragged):
    model = eq.models.Softmax(4, 3)
    task = try_task(Task.of(model), ragged)
    assert task.error is misclassified
    assert task.module is not model


def examples(seed=0):
    generator = torch.Generator().manual_seed(seed)
    x, classes = torch.randn(40, 4, generator=generator), torch.arange(40) % 3
    return x, classes, torch.arange(40) // 8


def hot(classes):
    return nn.functional.one_hot(classes, 3)


@pytest.mark.parametrize(
    ("form", "words"),
    [
        (lambda y: hot(y).double(), "Targets have shape (3,) per example; for classes give integers: y.argmax(1); for soft"),
        (hot, "Targets have shape (3,) per example; for classes give integers: y.argmax(1); for soft labels pass error=…"),
        (lambda y: y.double(), "for classes write y.astype(int); to predict numbers pass a regression loss, e.g. loss="),
        (lambda y: y + 0.5, "Targets are numbers of type float32; to predict numbers pass a regression loss, e.g. loss="),
        (lambda y: y[:, None], "Targets have shape (1,) per example; for classes write y.squeeze(1)."),
        (lambda y: y[:, None].float(), "for classes write y.squeeze(1).astype(int); to predict numbers pass"),
        (lambda y: y + 1, "No example has class 0: did you mean y − 1?"),
    ],
)
@pytest.mark.parametrize("seed", range(3))
def test_targets_that_are_no_classes_are_refused_with_what_to_write(form, words, seed):
    x, classes, clients = examples()
    torch.manual_seed(seed)
    with pytest.raises(InvalidParameter) as caught:
        eq.train(nn.Linear(4, 3), eq.data.from_arrays(x, form(classes), clients), rounds=1, clients_per_round=4)
    assert words in str(caught.value)


def test_soft_labels_with_an_error_and_classes_that_begin_later_with_enough_scores_are_taken():
    x, classes, clients = examples()
    options = {"rounds": 1, "clients_per_round": 4, "progress": False}
    soft = 0.9 * hot(classes) + 0.1 / 3

    def error(outputs, targets):
        return (outputs.argmax(1) != targets.argmax(1)).float()

    eq.train(net(), eq.data.from_arrays(x, soft, clients), error=error, **options)
    eq.train(nn.Linear(4, 4), eq.data.from_arrays(x, classes + 1, clients), **options)


def test_outputs_that_are_probabilities_before_cross_entropy_are_told(ragged):
    options = {"data": ragged, "rounds": 1, "clients_per_round": 4, "progress": False}
    with pytest.warns(
        EquipoiseNotice, match="The outputs look like probabilities; cross-entropy takes logits. Remove the soft"
    ):
        eq.train(nn.Sequential(net(), nn.Softmax(1)), **options)
    eq.train(nn.Sequential(net(), nn.LogSoftmax(1)), **options)  # notices are errors here
    loss = nn.NLLLoss(reduction="none")
    eq.train(nn.Sequential(net(), nn.Softmax(1)), loss=lambda outputs, targets: loss(outputs.log(), targets), **options)


def test_a_parameter_that_weight_decay_alone_moves_is_told(ragged):
    class Unused(nn.Linear):
        def __init__(self):
            super().__init__(4, 3)
            self.other = nn.Linear(2, 2)

    options = {"data": ragged, "rounds": 1, "clients_per_round": 4, "progress": False}
    decay = eq.Algorithm(solver=eq.solvers.SGD(lr=0.1, weight_decay=0.1))
    with pytest.warns(
        EquipoiseNotice, match=r"'other.weight' and 1 more get no gradient; weight decay still shrinks them; req"
    ):
        eq.train(Unused(), algorithm=decay, **options)
    frozen = Unused()
    frozen.other.requires_grad_(False)
    eq.train(frozen, algorithm=decay, **options)  # notices are errors here
    eq.train(Unused(), **options)
