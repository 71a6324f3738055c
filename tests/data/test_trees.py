"""Trees of tensors, ragged sequences and ignored targets: the loop engine and the simulator agree, padding changes nothing."""

import warnings

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import equipoise as eq
from equipoise.core.per_example_losses import MaskedCrossEntropy, MaskedMisclassified
from equipoise.core.task import Task
from equipoise.core.task_trial import try_task
from equipoise.data import Ragged
from equipoise.errors import EquipoiseNotice, IncompatibleParts, InvalidData, InvalidParameter


class ByName(nn.Module):
    """Numbers, codes and a sequence, each an argument of its own; the sequence is averaged where its mask is 1."""

    def __init__(self, steps_out=False, classes=3):
        super().__init__()
        self.codes, self.steps = nn.Embedding(5, 2), nn.Embedding(7, 4)
        self.number, self.out, self.steps_out = nn.Linear(2, 2), nn.Linear(8, classes), steps_out

    def forward(self, tokens, attention_mask, code, number):
        steps = self.steps(tokens)  # (B, T, 4)
        mask = attention_mask.unsqueeze(-1).to(steps.dtype)
        mean = (steps * mask).sum(1) / mask.sum(1)
        rest = torch.cat([self.codes(code), self.number(number)], 1)  # (B, 4)
        if not self.steps_out:
            return self.out(torch.cat([mean, rest], 1))
        both = torch.cat([steps, rest.unsqueeze(1).expand(-1, steps.shape[1], -1)], 2)
        return self.out(both).transpose(1, 2)  # (B, C, T)


class InOrder(nn.Module):
    def __init__(self):
        super().__init__()
        self.one, self.two = nn.Linear(3, 2), nn.Linear(2, 2)

    def forward(self, image, meta):
        return self.one(image) + torch.tanh(self.two(meta))


def sequences(generator, count, highest, *, longest=11):
    lengths = torch.randint(1, longest + 1, (count,), generator=generator).tolist()
    return [torch.randint(0, highest, (length,), generator=generator) for length in lengths]


def by_name(seed, sizes, *, steps_out=False, ignored=0.0):
    """Random clients of named inputs; targets are one class, or one per step of which a share is ignored."""
    generator = torch.Generator().manual_seed(seed)
    count = sum(sizes)
    tokens = sequences(generator, count, 7)
    x = {
        "tokens": Ragged.of(tokens),
        "code": torch.randint(0, 5, (count,), generator=generator),
        "number": torch.randint(0, 256, (count, 2), generator=generator, dtype=torch.uint8),
    }
    if steps_out:
        labels = [torch.randint(0, 3, (len(each),), generator=generator) for each in tokens]
        for each in labels:
            each[1:][torch.rand(len(each) - 1, generator=generator) < ignored] = -100
        y = Ragged.of(labels, pad=-100, mask=None)
    else:
        y = torch.randint(0, 3, (count,), generator=generator)
    offsets = torch.tensor([0, *sizes]).cumsum(0)
    ids = tuple(f"c{k}" for k in range(len(sizes)))
    return eq.ClientSet(x, y, offsets, ids, scale={"number": 1 / 255}, shift={"number": -0.5})


def train(model, data, engine, **options):
    algorithm = eq.Algorithm(solver=eq.solvers.SGD(lr=0.2, batch_size=3, epochs=2), **options)
    with torch.random.fork_rng(devices=[]):
        return eq.train(model, data, algorithm, rounds=3, clients_per_round=3, seed=4, engine=engine)


def assert_same(first, second):
    torch.testing.assert_close(first.params, second.params, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(first.clients.loss, second.clients.loss, rtol=2e-4, atol=2e-5)
    torch.testing.assert_close(first.clients.error, second.clients.error, rtol=0.0, atol=1e-6)


@settings(max_examples=12, deadline=None)
@given(
    seed=st.integers(0, 10_000),
    sizes=st.lists(st.integers(1, 9), min_size=3, max_size=5),
    steps_out=st.booleans(),
    ignored=st.sampled_from([0.0, 0.4]),
)
def test_loop_and_simulator_agree_on_trees(seed, sizes, steps_out, ignored):
    clients = by_name(seed, sizes, steps_out=steps_out, ignored=ignored)
    data = eq.FederatedData(clients, test=clients.take([0, 1]), classes=3)
    torch.manual_seed(seed)
    model = ByName(steps_out)
    with warnings.catch_warnings():
        warnings.simplefilter("error", EquipoiseNotice)  # the simulator must not fall back on the loop engine
        runs = [train(model, data, engine) for engine in (eq.engines.Loop(), eq.engines.Simulator(chunk_size=2, workers=1))]
    assert_same(*runs)


@settings(max_examples=25, deadline=None)
@given(seed=st.integers(0, 10_000), wider=st.sampled_from([0, 8, 16, 40]), steps_out=st.booleans())
def test_padding_changes_no_loss_error_or_gradient(seed, wider, steps_out):
    clients = by_name(seed, [4, 3], steps_out=steps_out, ignored=0.3)
    data = eq.FederatedData(clients, classes=3)
    torch.manual_seed(seed)
    task = try_task(Task.of(ByName(steps_out)), data)
    rows = torch.arange(7)
    params = task.layout.read(task.module).requires_grad_()

    def scores(extra):
        losses, errors = task.scores(params, clients.inputs(rows, wider=extra), clients.targets(rows, wider=extra))
        return losses, errors, torch.autograd.grad(losses.sum(), params)[0]

    for narrow, wide in zip(scores(0), scores(wider), strict=True):
        torch.testing.assert_close(narrow, wide, rtol=1e-5, atol=1e-6)


def test_a_batch_of_sequences_by_hand():
    ragged = Ragged.of([[5, 6, 7], [8]], pad=-1)
    clients = eq.ClientSet({"t": ragged}, [0, 1], [0, 1, 2], ("a", "b"))
    batch = clients.inputs(torch.tensor([[1, 0]]))
    assert batch["t"].tolist() == [[[8, *[-1] * 7], [5, 6, 7, *[-1] * 5]]]
    assert batch["attention_mask"].tolist() == [[[1, *[0] * 7], [1, 1, 1, *[0] * 5]]]
    assert clients.inputs(slice(1, 2))["t"].tolist() == [[8, *[-1] * 7]]
    assert clients.take([1]).x["t"].values.tolist() == [8]
    joined = eq.ClientSet.pack([("a", {"t": Ragged.of([[1, 2]])}, [0]), ("b", {"t": Ragged.of([[3], [4, 5, 6]])}, [1, 0])])
    assert joined.x["t"].values.tolist() == [1, 2, 3, 4, 5, 6]
    assert joined.x["t"].offsets.tolist() == [0, 2, 3, 6]
    assert repr(joined) == "ClientSet(2 clients, 3 examples of shape {'t': ('…',)})"


def test_ignored_places_count_nowhere():
    # Three places with classes 0, 1, ignored: losses log(1+e^-2) and log(1+e^2), of which the second is wrong.
    logits = torch.tensor([[[2.0, 2.0, 0.0], [0.0, 0.0, 9.0]]])  # (1, 2, 3)
    targets = torch.tensor([[0, 1, -100]])
    low, high = (torch.tensor(v).exp().add(1).log() for v in (-2.0, 2.0))
    loss, error = MaskedCrossEntropy(-100), MaskedMisclassified(-100)
    torch.testing.assert_close(loss(logits, targets), ((low + high) / 2).reshape(1))
    assert error(logits, targets).tolist() == [0.5]
    assert MaskedMisclassified(255)(logits, targets.masked_fill(targets == -100, 255)).tolist() == [0.5]


def test_segmentation_with_ignored_pixels_trains_and_is_judged_without_them():
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(12, 2, 4, 4, generator=generator)
    y = torch.randint(0, 3, (12, 4, 4), generator=generator)
    y[:, 0] = 255
    owners = [k // 3 for k in range(12)]
    data = eq.data.from_arrays(x, y, owners, test=0.25, ignore_index=255)
    assert data.classes == 3
    assert data.has_ignored
    model = nn.Conv2d(2, 3, 1)
    runs = [train(model, data, engine) for engine in (eq.engines.Loop(), eq.engines.Simulator(chunk_size=2, workers=1))]
    assert_same(*runs)
    with torch.no_grad():
        shown, targets = data.test.client(at=0)
        wrong = (runs[0].model(shown).argmax(1) != targets)[:, 1:].float().mean()
    (row,) = [row for row in runs[0].clients if row["split"] == "test"]
    assert row["error"] == pytest.approx(float(wrong), abs=1e-6)


def test_tuples_and_own_outputs():
    generator = torch.Generator().manual_seed(1)
    x = (torch.randn(10, 3, generator=generator), torch.randn(10, 2, generator=generator))
    y = {"a": torch.randint(0, 2, (10,), generator=generator), "b": torch.randn(10, generator=generator)}
    data = eq.data.from_arrays(x, y, [0] * 4 + [1] * 6, test=0.0)

    def loss(outputs, targets):
        return nn.functional.cross_entropy(outputs, targets["a"], reduction="none") + (outputs[:, 0] - targets["b"]).square()

    options = {"rounds": 2, "clients_per_round": 2, "loss": loss, "seed": 0}
    torch.manual_seed(0)
    model = InOrder()
    first, second = (eq.train(model, data, engine=engine, **options) for engine in ("loop", "simulator"))
    torch.testing.assert_close(first.params, second.params, rtol=1e-4, atol=1e-6)


def test_models_that_read_padding_are_refused_with_the_cure():
    class Last(nn.Module):
        def __init__(self):
            super().__init__()
            self.embed, self.lstm, self.out = nn.Embedding(7, 4), nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3)

        def forward(self, tokens, attention_mask):
            return self.out(self.lstm(self.embed(tokens))[0][:, -1])

    clients = by_name(3, [4, 4])
    tokens = eq.ClientSet({"tokens": clients.x["tokens"]}, clients.y, clients.offsets, clients.ids)
    with pytest.raises(IncompatibleParts, match="padded further"):
        eq.train(Last(), eq.FederatedData(tokens), rounds=1, clients_per_round=2)


class Hidden(nn.Module):
    """Reads padding, but only the gradient shows that at first: what it reads meets zeros."""

    def __init__(self, kind):
        super().__init__()
        self.embed = nn.Embedding(7, 4, padding_idx=0 if kind == "padding_idx" else None)
        self.lstm, self.out, self.kind = nn.LSTM(4, 4, batch_first=True), nn.Linear(4, 3), kind
        with torch.no_grad():
            if kind in ("row", "padding_idx"):
                self.embed.weight[0] = 0
            else:
                self.out.weight.zero_(), self.out.bias.zero_()

    def forward(self, tokens, attention_mask):
        steps = self.embed(tokens)
        if self.kind == "last":
            return self.out(self.lstm(steps)[0][:, -1])
        if self.kind == "mask":
            last = attention_mask.sum(1) - 1
            return self.out(self.lstm(steps)[0][torch.arange(len(tokens)), last])
        return self.out(steps.mean(1) if self.kind == "mean" else steps.sum(1))


@pytest.mark.parametrize("kind", ["last", "mean", "row", "padding_idx", "mask"])
def test_padding_that_only_the_gradient_shows_is_refused(kind):
    tokens = Ragged.of([[1, 2], [3, 4, 5], [6], [1]])
    data = eq.FederatedData(eq.ClientSet({"tokens": tokens}, [0, 1, 2, 0], [0, 2, 4], ("p", "q")))
    torch.manual_seed(0)
    task = Task.of(Hidden(kind))
    if kind in ("padding_idx", "mask"):  # these do not read it: a row of padding_idx has no gradient and stays zero
        assert try_task(task, data)
        return
    with pytest.raises(IncompatibleParts, match=r"gradient of Hidden changes when sequences are padded further"):
        try_task(task, data)


class Pooled(nn.Module):
    """One vector of a sequence, in ways that read the padding and in ways that do not; takes 24 steps at most."""

    def __init__(self, kind):
        super().__init__()
        self.kind, self.embed, self.out = kind, nn.Embedding(50, 8), nn.Linear(8, 2)
        self.lstm = nn.LSTM(8, 8, batch_first=True)
        self.attention, self.places = nn.MultiheadAttention(8, 2, batch_first=True), nn.Embedding(24, 8)
        with torch.no_grad():
            self.embed.weight[0] = 5

    def forward(self, ids, attention_mask):
        steps, mask, lengths = self.embed(ids), attention_mask.unsqueeze(-1), attention_mask.sum(1)
        if self.kind == "attention":
            steps = steps + self.places(torch.arange(ids.shape[1]))
            steps = self.attention(steps, steps, steps, key_padding_mask=attention_mask == 0)[0]
        if self.kind == "max":
            pooled = steps.amax(1)
        elif self.kind == "masked max":
            pooled = steps.masked_fill(mask == 0, -torch.inf).amax(1)
        elif self.kind == "last":
            pooled = self.lstm(steps)[0][torch.arange(len(ids)), lengths - 1]
        elif self.kind == "packed":
            packed = nn.utils.rnn.pack_padded_sequence(steps, lengths.cpu(), batch_first=True, enforce_sorted=False)
            pooled = self.lstm(packed)[1][0][0]
        elif self.kind == "blocks":  # of 8 steps, so that it takes no other number
            pooled = (steps * mask).view(len(ids), -1, 8, 8).sum(2).tanh().sum(1)
        else:
            pooled = (steps * mask).sum(1) / mask.sum(1)
        return self.out(pooled)


@pytest.mark.parametrize("lengths", [[5, 6, 7] * 20 + [8, 16, 24] * 20, [5, 6, 7] * 40, [1, 16] * 60, [24] * 120])
@pytest.mark.parametrize("kind", ["max", "masked max", "mean", "last", "packed", "attention", "blocks"])
def test_padding_is_tried_at_exact_lengths(kind, lengths):
    generator = torch.Generator().manual_seed(0)
    ids = Ragged.of([torch.randint(1, 50, (length,), generator=generator) for length in lengths])
    data = eq.data.from_arrays({"ids": ids}, [0, 1] * 60, [f"h{i % 12:02d}" for i in range(120)], test=0.25)
    torch.manual_seed(0)
    task = Task.of(Pooled(kind))
    if kind != "max":
        assert try_task(task, data)
        return
    with pytest.raises(IncompatibleParts, match="The loss of Pooled changes when sequences are padded further"):
        try_task(task, data)


def test_a_model_that_takes_too_few_steps_is_refused():
    ids = Ragged.of([[1] * length for length in (3, 4, 25, 3)])
    data = eq.FederatedData(eq.ClientSet({"ids": ids}, [0, 1, 0, 1], [0, 2, 4], ("a", "b")))
    with pytest.raises(InvalidParameter, match=r"model must fit the data.*index out of range"):
        try_task(Task.of(Pooled("attention")), data)


def test_rows_for_a_trial_are_the_shortest_the_longest_and_one_without_padding():
    clients = eq.ClientSet({"t": Ragged.of([[1] * n for n in (5, 3, 9, 16, 2, 40)])}, [0] * 6, [0, 6], ("a",))
    assert clients.first_rows(5).tolist() == [3, 4]  # 16 is the longest of five, and a multiple of 8
    assert clients.first_rows(99).tolist() == [3, 4, 5]
    assert clients.first_rows(2).tolist() == [0, 1]
    data = eq.FederatedData(clients)
    assert data.may_pad_further(torch.tensor([3]))
    assert not data.may_pad_further(torch.tensor([0, 5]))


def test_rows_of_sequences_are_those_of_the_user():
    tokens = Ragged.of([[1.0, 2.0]] * 17 + [[1.0, float("nan")]] + [[1.0]] * 2)
    with pytest.raises(InvalidData, match=r"x\['t'\], row 17, step 1 holds nan"):
        eq.data.from_arrays({"t": tokens}, [0, 1] * 10, [k % 3 for k in range(20)])
    y = Ragged.of([[0, -100]] * 17 + [[-100, -100]] + [[1]] * 2, pad=-100, mask=None)
    with pytest.raises(InvalidData, match="row 17 of y has no target that counts"):
        eq.data.from_arrays(torch.zeros(20, 1), y, [k % 3 for k in range(20)])
    with pytest.raises(InvalidData, match="client 'b', row 1 has no target that counts"):
        eq.data.from_dict({"a": ([[1.0]], [0]), "b": ([[1.0], [2.0]], [0, -100])})


def bad_tree(**changed):
    fields = {"x": {"a": torch.zeros(2, 1), "b": torch.zeros(2)}, "y": [0, 1], "offsets": [0, 1, 2], "ids": ("p", "q")}
    return lambda: eq.ClientSet(**fields | changed)


@pytest.mark.parametrize(
    ("make", "error", "words"),
    [
        (bad_tree(x={"a": torch.zeros(3, 1), "b": torch.zeros(2)}), InvalidData, "x['a'] has 3 rows but x['b'] has 2"),
        (bad_tree(x=()), InvalidData, "x has no leaf"),
        (bad_tree(x=(Ragged.of([[1], [2]]),)), InvalidData, "must be a leaf of a dict"),
        (bad_tree(x={"a": Ragged.of([[1], [2]]), "attention_mask": torch.ones(2)}), InvalidData, "'attention_mask'"),
        (bad_tree(scale={"c": 2.0}), InvalidParameter, "scale must be a dict by some of the inputs 'a', 'b'"),
        (bad_tree(x={"a": torch.zeros(2), "b": torch.tensor([0, torch.inf])}), InvalidData, "'q', row 0 (row 1 of x['b'])"),
        (lambda: Ragged(torch.zeros(3), [0, 0, 3]), InvalidData, "do not at sequence 0"),
        (lambda: Ragged(torch.zeros(3), [0, 2]), InvalidData, "must run from 0 to 3"),
        (lambda: Ragged(torch.zeros(5), [0, 3, 2, 5]), InvalidData, "offsets of Ragged must rise"),
        (lambda: Ragged(["a"], [0, 1]), InvalidData, "values of Ragged must hold numbers"),
        (lambda: Ragged.of(["abc", "d"]), InvalidData, "sequence 0 of Ragged must hold numbers in steps of one shape"),
        (lambda: Ragged.of([[1], [2, None]]), InvalidData, "sequence 1 of Ragged must hold numbers"),
        (lambda: Ragged.of([1, 2, 3]), InvalidData, "sequence 0 of Ragged is the single number 1. Give [1]"),
        (lambda: Ragged.of(5), InvalidData, "Ragged.of needs sequences"),
        (lambda: Ragged.of([[1j]]), InvalidData, "sequence 0 of Ragged holds complex numbers"),
        (
            lambda: Ragged.of([torch.zeros(2, 3), torch.zeros(2, 4)]), InvalidData,
            "steps of sequence 1 of Ragged have another shape",
        ),
        (bad_tree(x={"a b": torch.zeros(2)}), InvalidData, "x has the key 'a b', but a model is called as model(**x)"),
        (bad_tree(x={"a": {"b": torch.zeros(2)}}), InvalidData, "but one is a dict that is none"),
        (lambda: eq.FederatedData(bad_tree()(), ignore_index=None), InvalidParameter, "ignore_index must be an integer"),
        (lambda: Ragged.of([]), InvalidData, "at least one sequence"),
        (lambda: Ragged.of([[1]], mask="a b"), InvalidParameter, "mask must be the name"),
        (
            lambda: eq.FederatedData(eq.ClientSet(torch.zeros(2, 1), [[1, -100], [-100, -100]], [0, 1, 2], ("p", "q"))),
            InvalidData, "client 'q', row 0 has no target that counts",
        ),
        (lambda: eq.FederatedData(bad_tree(y=[1, -2])()), InvalidData, "found -2 … 1"),
    ],
)  # fmt: skip
def test_bad_trees_are_refused(make, error, words):
    with pytest.raises(error) as caught:
        make()
    assert words in str(caught.value)


def test_label_attacks_leave_ignored_places():
    clients = by_name(5, [4, 4, 4], steps_out=True, ignored=0.5)
    data = eq.attacks.apply(eq.FederatedData(clients, classes=3), eq.attacks.LabelPoisoning(share=1.0))
    before, after = clients.y.values, data.train.y.values
    assert torch.equal(before == -100, after == -100)
    assert not torch.equal(before, after)


def test_fingerprints_tell_trees_apart_and_keep_those_of_plain_tensors():
    plain = eq.ClientSet(torch.arange(4.0).reshape(2, 2), [0, 1], [0, 1, 2], ("p", "q"))
    prints = {eq.FederatedData(plain).fingerprint}
    for x in ({"a": plain.x}, {"b": plain.x}, (plain.x,), {"a": Ragged.of([[0.0, 1.0], [2.0, 3.0]])}):
        prints.add(eq.FederatedData(eq.ClientSet(x, [0, 1], [0, 1, 2], ("p", "q"))).fingerprint)
    assert len(prints) == 5
    assert eq.FederatedData(plain).fingerprint == "3d035a554321352e"  # of version 0.1


def test_a_client_is_named_by_text_and_a_position_by_at():
    clients = eq.ClientSet.pack([("11", torch.zeros(1, 1), [0]), ("2", torch.ones(1, 1), [0])])
    assert float(clients.client("2")[0]) == 1.0 == float(clients.client(at=1)[0])
    for bad in (lambda: clients.client(2), lambda: clients.client(at=-1), lambda: clients.client(at=2), clients.client):
        with pytest.raises(InvalidParameter):
            bad()
    with pytest.raises(InvalidParameter, match=r"Write client"):
        clients.client(2)
