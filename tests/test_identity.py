"""A checkpoint is gone on from by the run that wrote it, and by no other; what is damaged is refused."""

import collections
import dataclasses
import enum
import functools
import warnings
import weakref
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from torch import nn

import equipoise as eq
from equipoise.core import fingerprints
from equipoise.core.fingerprints import fingerprint
from equipoise.errors import CheckpointError, EquipoiseError, EquipoiseNotice, NotWritten
from equipoise.observers import History
from equipoise.runs.checkpoint import Checkpoint, Checkpoints, SavedRun, read_checkpoint
from equipoise.types import Observer, RoundReport, ServerState

SCALE = 1.0


class Stop(Exception):
    pass


class StopsAt(Observer):
    def __init__(self, round_index):
        self.round_index = round_index

    def on_state(self, state):
        if state.round == self.round_index:
            raise Stop


def network(between, *, frozen=0.0, buffer=0.0, start=0.0, slope=1.0):
    """Two layers, of which the first is frozen, with an activation, a buffer and a plain attribute."""

    class Net(nn.Sequential):
        def forward(self, x):
            return super().forward(x + self.shift) * self.slope

    net = Net(nn.Linear(4, 5), between, nn.Linear(5, 3))
    with torch.no_grad():
        for number, parameter in enumerate(net.parameters()):
            parameter.copy_(torch.linspace(-1, 1, parameter.numel()).view_as(parameter) + 0.1 * number)
        net[0].weight += frozen
        net[2].weight += start
    net[0].requires_grad_(False)
    net.register_buffer("shift", torch.full((4,), buffer))
    net.slope = slope
    return net


def squared(outputs, targets):
    return SCALE * ((outputs - nn.functional.one_hot(targets, 3)) ** 2).sum(1)


def scaled(factor):
    return lambda outputs, targets: factor * squared(outputs, targets)


def scored(factor):
    return lambda outputs, targets: factor * float(outputs.mean())


def wrong(outputs, targets):
    return (outputs.argmax(1) != targets).float()


def run(data, file, *, rounds=4, every=2, stop=None, **changed):
    options = {"model": network(nn.ReLU()), "algorithm": eq.Algorithm(), "loss": squared, "error": wrong} | changed
    return eq.train(
        options.pop("model"), data, options.pop("algorithm"), rounds=rounds, clients_per_round=4, engine="loop",
        checkpoint=Checkpoints(file, every=every), observers=[] if stop is None else [StopsAt(stop)], progress=False, **options,
    )  # fmt: skip


def interrupted(data, file, **changed):
    with pytest.raises(EquipoiseError, match="StopsAt failed"):
        run(data, file, stop=3, **changed)


class OwnRisk(eq.risk.Mean):
    def __call__(self, losses, base_weights, **more):
        return super().__call__(losses, 2 * base_weights, **more)


OTHERS = {
    "another activation": ({"model": network(nn.Tanh())}, "model's structure"),
    "another attribute": ({"model": network(nn.ReLU(), slope=2.0)}, "model's code or attributes"),
    "another frozen backbone": ({"model": network(nn.ReLU(), frozen=0.5)}, "model's frozen parameters"),
    "another buffer": ({"model": network(nn.ReLU(), buffer=0.5)}, "model's buffers"),
    "another lambda as loss": (
        {"loss": lambda outputs, targets: (outputs - nn.functional.one_hot(targets, 3)).abs().sum(1)}, "loss"),
    "another constant in a loss": ({"loss": scaled(3.0)}, "loss's code"),
    "another constant bound to a loss": ({"loss": functools.partial(scaled(2.0))}, "loss"),
    "another error": ({"error": lambda outputs, targets: (outputs.argmax(1) == targets).float()}, "error's code"),
    "another metric": ({"metrics": {"other": scored(1.0)}}, "metrics"),
    "no metric": ({"metrics": None}, "metrics"),
    "another constant in a metric": ({"metrics": {"scored": scored(2.0)}}, "metrics' code"),
    "another own part": ({"algorithm": eq.Algorithm(risk=OwnRisk())}, "algorithm"),
}  # fmt: skip


@pytest.mark.parametrize("what", OTHERS)
def test_another_run_is_refused_by_the_name_of_what_differs(what, ragged, tmp_path):
    change, name = OTHERS[what]
    before = {"loss": scaled(2.0)} if "constant" in what else {}
    before |= {"metrics": {"scored": scored(1.0)}} if "metric" in what else {}
    interrupted(ragged, tmp_path / "run", **before)
    with pytest.raises(CheckpointError, match=f"differs in {name}: "):
        run(ragged, tmp_path / "run", **(before | change))


def smoothed(outputs, targets, label_smoothing=0.1):
    return nn.functional.cross_entropy(outputs, targets, label_smoothing=label_smoothing, reduction="none")


@pytest.mark.parametrize(
    ("before", "after"),
    [
        (
            nn.CrossEntropyLoss(label_smoothing=0.1, reduction="none"),
            nn.CrossEntropyLoss(label_smoothing=0.2, reduction="none"),
        ),
        (functools.partial(smoothed, label_smoothing=0.2), functools.partial(smoothed, label_smoothing=0.3)),
        (
            lambda o, t: nn.functional.cross_entropy(o, t, label_smoothing=0.1, reduction="none"),
            lambda o, t: nn.functional.cross_entropy(o, t, label_smoothing=0.2, reduction="none"),
        ),
        (
            lambda o, t: nn.functional.cross_entropy(o, t, reduction="none"),
            lambda o, t: nn.functional.cross_entropy(2 * o, t, reduction="none").abs(),
        ),
    ],
)
def test_a_constant_of_a_loss_that_differs_is_refused(before, after, ragged, tmp_path):
    interrupted(ragged, tmp_path / "run", loss=before)
    with pytest.raises(CheckpointError, match="differs in loss's code: "):
        run(ragged, tmp_path / "run", loss=after)
    run(ragged, tmp_path / "run", loss=before)


def test_other_data_are_refused(ragged, tmp_path):
    interrupted(ragged, tmp_path / "run")
    other = eq.FederatedData(ragged.train.take(range(7, -1, -1)), test=ragged.test, name="ragged")
    with pytest.raises(CheckpointError, match="differs in data: "):
        run(other, tmp_path / "run")


def test_a_global_constant_is_part_of_a_loss(ragged, tmp_path, monkeypatch):
    interrupted(ragged, tmp_path / "run")
    monkeypatch.setitem(globals(), "SCALE", 5.0)
    with pytest.raises(CheckpointError, match="differs in loss's code: "):
        run(ragged, tmp_path / "run")


def test_the_same_run_goes_on_and_says_so(ragged, tmp_path):
    def again():  # all objects are others, what they compute is the same
        return {"model": network(nn.ReLU()), "loss": scaled(2.0), "algorithm": eq.Algorithm(risk=OwnRisk())}

    whole = run(ragged, tmp_path / "whole", **again())
    interrupted(ragged, tmp_path / "run", **again())
    with pytest.warns(EquipoiseNotice, match=r"^Going on from round 2 of 4, as .*run has it\.$"):
        resumed = run(ragged, tmp_path / "run", **again())
    assert torch.equal(resumed.params, whole.params)


@pytest.mark.filterwarnings("ignore:These clients took no part")
@pytest.mark.parametrize("personal", [None, eq.personal.Ditto(strength=1.0)])
def test_other_start_weights_get_a_notice_and_the_checkpoint_holds(personal, ragged, tmp_path):
    algorithm = eq.Algorithm(personal=personal)
    whole = run(ragged, tmp_path / "whole", algorithm=algorithm)
    interrupted(ragged, tmp_path / "run", algorithm=algorithm)
    with pytest.warns(EquipoiseNotice, match="starts from other weights here than there; those of the checkpoint hold"):
        resumed = run(ragged, tmp_path / "run", algorithm=algorithm, model=network(nn.ReLU(), start=1.0))
    assert torch.equal(resumed.params, whole.params)
    if personal is not None:  # also clients that begin after the checkpoint begin where those before it began
        ids = list(ragged.train.ids)
        assert torch.equal(resumed.personal.params(ids), whole.personal.params(ids))


def test_a_fingerprint_is_of_what_is_computed():
    def made(constant):
        def function(x):
            """Words make no difference."""
            return x * constant

        return function

    def counting(x, seen=[]):  # noqa: B006
        nonlocal calls
        calls += 1
        return x

    calls = 0
    before = fingerprint(counting)
    counting(1)
    assert fingerprint(counting) == before  # what a function notes is no constant of it
    assert fingerprint(made(1.0)) == fingerprint(made(1.0)) != fingerprint(made(2.0))
    assert fingerprint(made(torch.ones(2))) == fingerprint(made(torch.ones(2))) != fingerprint(made(torch.zeros(2)))
    assert fingerprint(nn.functional.mse_loss) != fingerprint(nn.functional.l1_loss)
    assert fingerprint(nn.CrossEntropyLoss(label_smoothing=0.1)) != fingerprint(nn.CrossEntropyLoss())
    loop = [1]
    loop.append(loop)
    assert fingerprint(loop) == fingerprint(loop)


class Holds(nn.Module):
    def __init__(self, held):
        super().__init__()
        self.layer, self.held = nn.Linear(4, 3), held


class Slotted:
    __slots__ = ("held",)

    def __init__(self, held):
        self.held = held


class Plain(list):
    def __init__(self, held):
        super().__init__()
        self.held = held


@dataclasses.dataclass(frozen=True)
class OwnSGD(eq.solvers.SGD):
    def __post_init__(self):
        super().__post_init__()
        object.__setattr__(self, "held", None)


def own_solver(held):
    solver = OwnSGD()
    object.__setattr__(solver, "held", held)
    return solver


def own_class(held):
    return type("Own", (), {"held": held})()


KINDS = {
    "number": lambda k: k,
    "list": lambda k: [k],
    "dictionary": lambda k: {"scale": k},
    "nested": lambda k: {"scale": [(k,)]},
    "set": lambda k: {k},
    "deque": lambda k: collections.deque([k]),
    "tensor": lambda k: torch.full((2,), k),
    "tensors": lambda k: [torch.full((2,), k)],
    "parameter": lambda k: [nn.Parameter(torch.full((2,), k))],
    "module in a list": lambda k: [nn.Embedding.from_pretrained(torch.full((2, 2), k), freeze=False)],
    "function": lambda k: scaled(k),
    "partial": lambda k: functools.partial(scaled, k),
    "object": lambda k: SimpleNamespace(scale=k),
    "slots": Slotted,
    "list of one's own": Plain,
    "weak reference": lambda k: weakref.ref(_kept(own_class(k))),
    "enumeration": lambda k: enum.Enum("Scale", {"only": k}).only,
    "array": lambda k: np.full(2, k),
}
HOLDERS = {
    "module": Holds, "hidden": lambda held: Holds(Holds(held)), "object": lambda held: SimpleNamespace(held=held),
    "slots": Slotted, "solver": own_solver, "class": own_class, "closure": lambda held: lambda outputs: (held, outputs),
}  # fmt: skip
KEPT = []


def _kept(value):
    KEPT.append(value)
    return value


@pytest.mark.parametrize("strict", [False, True])
@pytest.mark.parametrize("holder", HOLDERS)
@pytest.mark.parametrize("kind", KINDS)
def test_a_fingerprint_has_attributes_of_every_kind(kind, holder, strict):
    def made(k):
        torch.manual_seed(0)
        return fingerprint(HOLDERS[holder](KINDS[kind](k)), strict=strict)

    assert made(1.0) == made(1.0) != made(2.0)


def test_what_code_notes_is_part_of_a_strict_fingerprint_and_what_is_trained_is_of_none():
    def counting(x):
        nonlocal calls
        calls += 1
        return x

    calls, layer = 0, nn.Linear(2, 2)
    before = [fingerprint(counting, strict=strict) for strict in (False, True)]
    trained = [fingerprint(part, trained=[layer.weight], strict=True) for part in (layer, [layer.weight])]
    counting(1)
    layer.weight.data.add_(1)
    after = [fingerprint(counting, strict=strict) for strict in (False, True)]
    assert [a == b for a, b in zip(before, after, strict=True)] == [True, False]
    assert trained == [fingerprint(part, trained=[layer.weight], strict=True) for part in (layer, [layer.weight])]
    layer.bias.data.add_(1)
    assert trained[0] != fingerprint(layer, trained=[layer.weight], strict=True)


@pytest.mark.parametrize("private", [False, True])
def test_what_has_no_description_is_another_in_another_process_under_noise_alone(private, ragged, tmp_path, monkeypatch):
    model = network(nn.ReLU())
    model.source = torch.Generator()
    privacy = eq.privacy.GaussianMechanism(1.0, 1.0) if private else None
    given = {"model": model, "algorithm": eq.Algorithm(privacy=privacy)}
    interrupted(ragged, tmp_path / "run", **given)
    monkeypatch.setattr(fingerprints, "_ONCE", "another process")
    if not private:
        assert run(ragged, tmp_path / "run", **given).rounds == 4
        return
    with pytest.raises(CheckpointError, match="differs in model's code or attributes: "):
        run(ragged, tmp_path / "run", **given)


# ----------------------------------------------------------------------------------------------------------------------- damage


def test_every_flipped_byte_of_a_checkpoint_is_noticed(ragged, tmp_path):
    file = tmp_path / "run"
    interrupted(ragged, file)
    content = file.read_bytes()
    length = int.from_bytes(content[:8], "little")
    places = {0, 5, 9, 8 + length // 2, 8 + length - 1, 8 + length, len(content) - 1}
    places |= set(range(8, len(content), max(1, len(content) // 60)))
    for place in sorted(places):
        file.write_bytes(content[:place] + bytes([content[place] ^ 4]) + content[place + 1 :])
        try:
            read_checkpoint(file)
        except CheckpointError:
            continue
        # What is left is a name in the header that nobody reads, or white space.
        assert b"__metadata__" not in file.read_bytes()[:length] or content[place : place + 1].isspace(), place


def test_a_flipped_byte_in_a_row_of_a_client_is_noticed(ragged, tmp_path):
    file, algorithm = tmp_path / "run.safetensors", eq.Algorithm(personal=eq.personal.Ditto(strength=1.0))
    interrupted(ragged, file, algorithm=algorithm)
    rows = tmp_path / "run.clients.npy"
    state = read_checkpoint(file).runs[0].state.personal
    client = int(state.places.nonzero()[0])
    width = 18
    place = 128 + 4 * width * ((int(state.places[client]) - 1) * 8 + client) + 7
    content = bytearray(rows.read_bytes())
    content[place] ^= 1
    rows.write_bytes(content)
    with pytest.raises(EquipoiseError, match=f"run.clients.npy is damaged: what client number {client} keeps"):
        run(ragged, file, algorithm=algorithm)


# -------------------------------------------------------------------------------------------------- long histories, full disks


def test_310_000_rounds_are_saved_and_read(tmp_path):
    report = RoundReport(0, 0.1, 0.2, "work", None, 10, 10, 0.001)
    rounds = [RoundReport(**(vars(report) | {"round": i, "loss": i / 7})) for i in range(310_000)]
    rounds[5] = RoundReport(**(vars(rounds[5]) | {"rejected": ("a", "b"), "loss": float("nan"), "risk": 1 / 3}))
    saved = SavedRun(ServerState(310_000, torch.ones(2)), History(rounds), {})
    file = tmp_path / "long"
    file.write_bytes(Checkpoint([saved], 1.0).bytes())
    found = read_checkpoint(file).runs[0].history.rounds
    assert repr(found[:10]) == repr(rounds[:10])
    assert found[10:] == rounds[10:]
    assert file.stat().st_size < 310_000 * 80


def test_a_full_disk_in_the_middle_says_how_to_go_on(ragged, tmp_path, monkeypatch):
    from equipoise.core import files

    file, written = tmp_path / "run", []

    def full(operation, path, *details):
        written.append(operation)
        if operation == "write" and len(written) > 12:
            raise OSError(28, "No space left on device")

    monkeypatch.setattr(files, "recorder", full)
    with pytest.raises(NotWritten, match=r"No space left on device\. Make room on the disk") as caught:
        run(ragged, file, every=1)
    assert "the same call goes on from there" in " ".join(caught.value.__notes__)
    monkeypatch.setattr(files, "recorder", None)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", EquipoiseNotice)
        assert torch.equal(run(ragged, file).params, run(ragged, tmp_path / "whole").params)
