import tomllib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

import pytest

import equipoise as eq
from equipoise import averaging
from equipoise.errors import ConfigError, require
from equipoise.experiment import catalog
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.experiment.config_tables import override, read_toml
from equipoise.types import LocalSolver, QuantileSource

SMALL = """
[data]
name = "label_shift"
train_clients = 12
validation_clients = 2
test_clients = 3
examples = 20
[model]
name = "softmax"
[algorithm.risk]
name = "superquantile"
tail = 0.5
[algorithm.solver]
lr = 0.1
batch_size = 10
[train]
rounds = 2
clients_per_round = 6
seed = 4
"""


def small(*overrides):
    return RunConfig.of(override(tomllib.loads(SMALL), overrides))


def refusal(*overrides):
    with pytest.raises(ConfigError) as caught:
        build(small(*overrides))
    return str(caught.value)


def test_a_config_is_what_the_code_would_be():
    experiment = build(small())
    algorithm = experiment.algorithm
    assert algorithm.risk == eq.risk.Superquantile(tail=0.5)
    assert algorithm.solver == eq.solvers.SGD(lr=0.1, batch_size=10)
    assert algorithm.server == eq.server_opt.SGD()
    assert (experiment.model.weight.shape, len(experiment.data.train)) == ((10, 20), 12)
    data = eq.data.label_shift(train_clients=12, validation_clients=2, test_clients=3, examples=20, seed=4)
    by_code = eq.train(eq.models.Softmax(20, 10), data, algorithm, rounds=2, clients_per_round=6, seed=4)
    assert experiment.train(progress=False).params.equal(by_code.params)


@pytest.mark.parametrize(
    "written_out", [{}, {"sampler": eq.sampling.Poisson(), "averaging": averaging.Last(), "weights": "uniform"}]
)
def test_a_private_config_draws_the_noise_of_the_code(written_out):
    private = ['algorithm.risk.name="mean"', 'algorithm.privacy.name="differential_privacy"']
    private += ["algorithm.privacy.epsilon=3.0", "algorithm.privacy.delta=1e-3", "algorithm.privacy.clip=1.0"]
    private += ["algorithm.privacy.noise_seed=0"]
    table = override(tomllib.loads(SMALL.replace("tail = 0.5", "")), private)
    experiment = build(RunConfig.of(table))
    data = eq.data.label_shift(train_clients=12, validation_clients=2, test_clients=3, examples=20, seed=4)
    privacy = eq.privacy.DifferentialPrivacy(epsilon=3.0, delta=1e-3, clip=1.0, noise_seed=0)
    algorithm = eq.Algorithm(privacy=privacy, solver=eq.solvers.SGD(lr=0.1, batch_size=10), **written_out)
    by_code = eq.train(eq.models.Softmax(20, 10), data, algorithm, rounds=2, clients_per_round=6, seed=4)
    assert experiment.train(progress=False).params.equal(by_code.params)


def test_the_complete_config_reads_back_as_the_same():
    complete = build(small("algorithm.solver.batch_size=none", "train.evaluate_every=1")).config
    written = complete.text()
    again = RunConfig.of(tomllib.loads(written))
    assert again == complete
    assert again.text() == written
    assert build(again).config == complete
    table = tomllib.loads(written)
    assert table["algorithm"]["server"] == {"name": "sgd", "lr": 1.0}
    assert table["algorithm"]["solver"]["batch_size"] == "none"
    assert table["model"] == {"name": "softmax", "features": 20, "classes": 10, "bias": True}
    assert table["data"]["seed"] == 4  # one seed for all, unless a section has its own
    assert set(again.versions) == {"equipoise", "torch", "numpy", "python"}


def test_a_mixture_is_a_list_of_terms():
    terms = '[{coefficient = 0.3, name = "mean"}, {coefficient = 1, name = "superquantile", tail = 0.2}]'
    config = small(f'algorithm.risk={{name = "mixture", terms = {terms}}}')
    assert config.algorithm().risk == eq.risk.Mixture((0.3, eq.risk.Mean()), (1.0, eq.risk.Superquantile(tail=0.2)))
    assert RunConfig.of(tomllib.loads(config.text())) == config


@pytest.mark.parametrize(
    ("terms", "words"),
    [
        ("3", "algorithm.risk.terms must be a list of tables"),
        ("[]", "algorithm.risk.terms must hold at least one"),
        ('[{name = "mean"}]', "algorithm.risk.terms[0].coefficient is missing"),
        ('[{coefficient = true, name = "mean"}]', "algorithm.risk.terms[0].coefficient must be a number, but is true"),
        ('[{coefficient = -1.0, name = "mean"}]', "positive coefficient"),
        ('[{coefficient = 1.0, name = "mean", tail = 1}]', "algorithm.risk.terms[0].tail: Unknown key 'tail'"),
        (
            "[{coefficient = 1.0}]",
            "algorithm.risk.terms[0].name is missing. Allowed: group_dro, hierarchical_tilt, mean, mixture, qfair,",
        ),
        (
            '[{coefficient = 1.0, name = "superquantile", tail = 2}]',
            "algorithm.risk.terms[0].tail must lie in (0, 1], but is 2",
        ),
    ],
)
def test_bad_terms_are_named(terms, words):
    assert words in refusal(f'algorithm.risk={{name = "mixture", terms = {terms}}}')


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("trian.rounds=3", "trian: Unknown key 'trian'. Did you mean 'train'? Allowed: algorithm, attack, code, data, f"),
        ("train.round=3", "train.round: Unknown key 'round'. Did you mean 'rounds'? Allowed: attributes, checkpoint_every"),
        ("data.clients=3", "data.clients: Unknown key 'clients'."),
        ("algorithm.risc.tail=1", "algorithm.risc: Unknown key 'risc'. Did you mean 'risk'?"),
        ("algorithm.risk.tial=1", "algorithm.risk.tial: Unknown key 'tial'. Did you mean 'tail'? Allowed: "),
        ("algorithm.risk.name=superquantil", "algorithm.risk.name: Unknown risk 'superquantil'. Did you mean 'superquantile'?"),
        ("algorithm.risk.name=3", "algorithm.risk.name must be text, but is 3"),
        ("algorithm.risk=[1]", "algorithm.risk must be a table with a name and parameters, but is [1]"),
        ("data.name=label_shfit", "data.name: Unknown data 'label_shfit'. Did you mean 'label_shift'?"),
        ("model.name=softmx", "model.name: Unknown model 'softmx'. Did you mean 'softmax'?"),
        ("train.engine=gpu", "train.engine: Unknown engine 'gpu'. Allowed: loop, ray, simulator."),
        ("algorithm.risk.tail=0", "algorithm.risk.tail must lie in (0, 1], but is 0.0."),
        ("algorithm.risk.tail=1.01", "algorithm.risk.tail must lie in (0, 1], but is 1.01."),
        ("algorithm.risk.tail=abc", 'algorithm.risk.tail must be a number, but is "abc".'),
        ("algorithm.risk.tail=true", "algorithm.risk.tail must be a number, but is true."),
        ("algorithm.risk.rule=best", 'algorithm.risk.rule must be "exact" or "threshold" or "none", but is "best".'),
        ("algorithm.solver.epochs=1.5", "algorithm.solver.epochs must be a whole number, but is 1.5."),
        ("algorithm.solver.lr=-1", "algorithm.solver.lr must be a positive number, but is -1.0."),
        ("algorithm.solver.batch_size=0", "algorithm.solver.batch_size must be a whole number of at least 1"),
        ("algorithm.weights=size", 'algorithm.weights must be "examples" or "uniform", but is "size".'),
        ("model.bias=1", "model.bias must be true or false, but is 1."),
        ("train.rounds=-1", "train.rounds must not be negative, but is -1."),
        ("train.rounds=true", "train.rounds must be a whole number, but is true."),
        ("train.rounds={a=1}", "train.rounds must be a whole number, but is a table with a."),
        ("train.evaluate_every=0", "train.evaluate_every must be at least 1"),
        ("train.clients_per_round=0", "train.clients_per_round must be at least 1, but is 0."),
        ("train.clients_per_round=13", "train.clients_per_round must be a whole number between 1 and the number of"),
        ("train.chunk_size=0", "train.chunk_size must be a whole number of at least 1"),
        ("train.compiled=1", 'train.compiled must be true or false or "none", but is 1.'),
        ("train.device=abacus", 'train.device must be a device of this machine, but is "abacus"'),
        ("data.train_clients=0", "data.train_clients must be a finite number, at least 1, but is 0."),
        ("train=3", "train must be a section, [train], but is 3."),
        ("versions.torch=2", "versions.torch must be text, but is 2."),
        ("model=logistic", "The model 'logistic' does not fit the data 'label_shift': model must tell the 10 classes"),
        ("model=convnet", "The model 'convnet' does not fit the data 'label_shift'"),
        ("model=char_gru", "model.vocabulary cannot be read from the data 'label_shift', which hold no tokens."),
        ("model=embedding_lstm", "reads embeddings, which the data"),
        ("model.features=7", "does not fit the data"),
    ],
)  # fmt: skip
def test_what_is_wrong_is_named_with_its_key_rule_and_value(setting, words):
    assert words in refusal(setting)


def test_options_that_the_engine_does_not_use_are_refused():
    assert "train.chunk_size is not used by the engine 'loop', but is 3." in refusal("train.engine=loop", "train.chunk_size=3")


def test_missing_sections_and_keys_are_named():
    table = tomllib.loads(SMALL)
    for section in ("data", "model", "train"):
        with pytest.raises(ConfigError, match=rf"no \[{section}\] section"):
            RunConfig.of({k: v for k, v in table.items() if k != section})
    with pytest.raises(ConfigError, match=r"train\.rounds is missing: it must be a whole number"):
        RunConfig.of({**table, "train": {"clients_per_round": 3}})
    with pytest.raises(ConfigError, match=r"data\.name is missing\. Allowed: adult, "):
        RunConfig.of({**table, "data": {}})
    with pytest.raises(ConfigError, match=r"data\.path is missing: npz needs it"):
        RunConfig.of({**table, "data": "npz"})


def test_overrides_are_toml_or_else_text():
    table = override(
        {"a": {"b": 1}, "c": "mean"}, ["a.b=2.5", "a.d=plain text", 'a.e="3"', "a.f=[1, 2]", "c.tail=1", "g= true"]
    )
    assert table == {"a": {"b": 2.5, "d": "plain text", "e": "3", "f": [1, 2]}, "c": {"name": "mean", "tail": 1}, "g": True}
    assert override({}, ['data.kinds."Visit No."=left out']) == {"data": {"kinds": {"Visit No.": "left out"}}}
    assert override({}, ["a=1\nb = 2"]) == {"a": "1\nb = 2"}  # one value, whatever is in it


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("a", "must have the form key=value"),
        ("=3", "must have the form"),
        ("a.b.c=3", "a is|b is 1"),
        ("a.Visit No.=left out", "a dot in it needs double quotes"),
    ],
)
def test_bad_overrides_are_refused(setting, words):
    with pytest.raises(ConfigError, match=words):
        override({"a": {"b": 1}}, [setting])


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"[train\nrounds = 3", r"is not valid TOML: .*line 1"),
        (b"[train]\nrounds = = 3", r"is not valid TOML: .*line 2"),
        (b"\xff\xfe", "not a text in UTF-8"),
    ],
)
def test_unreadable_files_are_refused_with_the_path(tmp_path, content, words):
    path = tmp_path / "bad.toml"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=words) as caught:
        RunConfig.read(path)
    assert str(path) in str(caught.value)


def test_a_missing_file_and_a_folder_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"no\.toml does not exist"):
        RunConfig.read(tmp_path / "no.toml")
    with pytest.raises(ConfigError, match="cannot be read"):
        RunConfig.read(tmp_path)


def test_a_parameter_without_its_part_says_which_part_has_it():
    table = tomllib.loads(SMALL)
    with pytest.raises(ConfigError, match=r'algorithm\.risk\.tail is a parameter of superquantile: add name = "superquantile"'):
        RunConfig.of({**table, "algorithm": {"risk": {"tail": 0.5}}})


def test_nested_defaults_survive_a_round_trip():
    config = small("data=gaussian_means", "model=mean_estimator", "train.clients_per_round=2")
    assert RunConfig.of(tomllib.loads(config.text())) == config


# --------------------------------------------------------------------------------------------- parts inside parts, and tables


@dataclass(frozen=True)
class Sorted:
    """A quantile of the tests."""

    reads_losses = True


@dataclass(frozen=True)
class Repeated:
    """Another one, with parameters."""

    iterations: int = 20
    steps: tuple[float, ...] = (0.5, 0.25)

    def __post_init__(self):
        require(self.iterations >= 1, "iterations", "must be a whole number of at least 1", self.iterations)


@dataclass(frozen=True)
class Nested(eq.risk.Mean):
    """A risk that takes a part and tables."""

    quantile: QuantileSource = field(default_factory=lambda: Repeated(iterations=7))
    other: QuantileSource | None = None
    groups: Mapping[str, str] | Callable[[str], str] = field(default_factory=lambda: MappingProxyType({"a": "north"}))
    averaged = True


@dataclass(frozen=True)
class Wrapped(eq.solvers.SGD):
    """A solver around a solver."""

    solver: LocalSolver = eq.solvers.SGD(lr=0.5, epochs=3)  # noqa: RUF009 — frozen


@dataclass(frozen=True)
class Around:
    """A risk around a solver that must be given."""

    solver: LocalSolver

    def __call__(self, losses, base_weights, *, clients=None, state=None): ...


@pytest.fixture
def own_parts(monkeypatch):
    for kind, name, part in (
        ("quantile", "sorted", Sorted),
        ("quantile", "repeated", Repeated),
        ("risk", "nested", Nested),
        ("risk", "around", Around),
        ("solver", "wrapped", Wrapped),
    ):
        monkeypatch.setitem(catalog.CATALOG[kind], name, f"{__name__}:{part.__name__}")


def nested(*settings):
    return small("algorithm.risk=nested", *settings)


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ([], Repeated(iterations=7, steps=[0.5, 0.25])),
        (["algorithm.risk.quantile=sorted"], Sorted()),
        (["algorithm.risk.quantile=repeated"], Repeated(steps=[0.5, 0.25])),
        (['algorithm.risk.quantile={name = "repeated", iterations = 3}'], Repeated(3, [0.5, 0.25])),
        (["algorithm.risk.quantile=repeated", "algorithm.risk.quantile.steps=[1]"], Repeated(steps=[1.0])),
        (["algorithm.risk.quantile.steps=[1]"], Repeated(7, [1.0])),  # without a name, the default part is changed
    ],
)
@pytest.mark.usefixtures("own_parts")
def test_a_parameter_can_be_a_part_with_parameters_of_its_own(settings, expected):
    config = nested(*settings)
    risk = config.algorithm().risk
    assert risk.quantile == expected
    assert risk.other is None
    assert RunConfig.of(tomllib.loads(config.text())) == config


@pytest.mark.usefixtures("own_parts")
def test_parts_inside_parts_are_written_complete():
    text = nested('algorithm.risk.other={name = "repeated"}', 'algorithm.risk.groups={"b c" = "south"}').text()
    table = tomllib.loads(text)["algorithm"]["risk"]
    assert table == {
        "name": "nested",
        "quantile": {"name": "repeated", "iterations": 7, "steps": [0.5, 0.25]},
        "other": {"name": "repeated", "iterations": 20, "steps": [0.5, 0.25]},
        "groups": {"b c": "south"},
    }
    assert "[algorithm.risk.quantile]\n" in text
    assert tomllib.loads(nested("algorithm.risk.other=none").text())["algorithm"]["risk"]["other"] == "none"


@pytest.mark.usefixtures("own_parts")
def test_parts_inside_parts_inside_terms():
    terms = '[{coefficient = 1.0, name = "nested", quantile = {name = "repeated", iterations = 2}}]'
    config = small(f'algorithm.risk={{name = "mixture", terms = {terms}}}')
    assert config.parts["risk"].parameters["terms"][0][1].parameters["quantile"].parameters["iterations"] == 2
    assert RunConfig.of(tomllib.loads(config.text())) == config
    wrong = terms.replace("= 2", "= 0")
    assert "algorithm.risk.terms[0].quantile.iterations must be" in refusal(
        f'algorithm.risk={{name = "mixture", terms = {wrong}}}'
    )


@pytest.mark.usefixtures("own_parts")
def test_a_default_part_keeps_the_values_it_was_made_with():
    solver = small('algorithm.solver={name = "wrapped"}').algorithm().solver.solver
    assert solver == eq.solvers.SGD(lr=0.5, epochs=3)
    assert small('algorithm.solver={name = "wrapped", solver = {lr = 1}}').algorithm().solver.solver.epochs == 3
    deep = small('algorithm.solver={name = "wrapped", solver = {name = "wrapped", solver = "sgd"}}')
    assert deep.algorithm().solver.solver.solver == eq.solvers.SGD()
    assert RunConfig.of(tomllib.loads(deep.text())) == deep
    assert "algorithm.solver.solver.solver is a parameter of " in refusal(
        'algorithm.solver={name="wrapped", solver={solver=1}}'
    )


@pytest.mark.parametrize(
    ("setting", "words"),
    [
        ("quantile.iterations=0", "algorithm.risk.quantile.iterations must be a whole number of at least 1, but is 0."),
        ("quantile.iterations=1.5", "algorithm.risk.quantile.iterations must be a whole number, but is 1.5."),
        ("quantile.iteration=3", "algorithm.risk.quantile.iteration: Unknown key 'iteration'. Did you mean 'iterations'?"),
        ("quantile=sortde", "algorithm.risk.quantile.name: Unknown quantile 'sortde'. Did you mean 'sorted'? Allowed: exact,"),
        ("quantile=none", "algorithm.risk.quantile.name: Unknown quantile 'none'."),
        ("quantile=3", "algorithm.risk.quantile must be a table with a name and parameters, but is 3."),
        ('other={iterations = 3}', "algorithm.risk.other.name is missing. Allowed: exact, private, repeated,"),
        ("groups=north", 'algorithm.risk.groups must be a table, each value text, but is "north".'),
        ("groups={a = 1}", "algorithm.risk.groups must be a table, each value text, but is a table with a."),
    ],
)  # fmt: skip
@pytest.mark.usefixtures("own_parts")
def test_what_is_wrong_inside_a_part_is_named_with_its_whole_key(setting, words):
    assert words in refusal("algorithm.risk=nested", f"algorithm.risk.{setting}")


@pytest.mark.usefixtures("own_parts")
def test_a_part_that_must_be_given_says_so():
    assert "algorithm.risk.solver is missing: around needs it, the name of a solver, or a table with its name" in refusal(
        "algorithm.risk=around"
    )
    made = small("algorithm.risk=around", "algorithm.risk.solver.lr=0.3").algorithm().risk
    assert made.solver == eq.solvers.SGD(lr=0.3)


@pytest.mark.usefixtures("own_parts")
def test_a_risk_that_is_averaged_reports_the_mean_of_the_iterates_unless_told_otherwise():
    assert small().algorithm().averaging == averaging.Last()
    assert nested().algorithm().averaging == averaging.Uniform()
    assert nested("algorithm.averaging=last").algorithm().averaging == averaging.Last()
    chosen = nested("algorithm.averaging=geometric", "algorithm.averaging.rate=0.1")
    assert chosen.algorithm().averaging == averaging.Geometric(0.1)
    assert RunConfig.of(tomllib.loads(chosen.text())) == chosen


def test_the_worst_case_needs_everyone_and_reports_the_mean_model():
    assert refusal("algorithm.risk=worst_case").startswith("algorithm (parts): WorstCase()")
    algorithm = small("algorithm.risk=worst_case", "algorithm.sampler=full").algorithm()
    assert (algorithm.risk, algorithm.averaging) == (eq.risk.WorstCase(), averaging.Uniform())


def test_a_solver_with_a_schedule_and_rates():
    config = small(
        'algorithm.solver={name="adamw", lr=1e-3, clip_norm=1.0, schedule={name="cosine", rounds=200, warmup=10}, '
        'local_schedule="constant", rates={"head.*" = 0.1}}'
    )
    expected = eq.solvers.AdamW(
        lr=1e-3, clip_norm=1.0, schedule=eq.solvers.Cosine(200, warmup=10), local_schedule=eq.solvers.Constant(),
        rates={"head.*": 0.1},
    )  # fmt: skip
    assert config.algorithm().solver == expected
    assert RunConfig.of(tomllib.loads(config.text())) == config
    words = refusal('algorithm.solver={name="adam", schedule={name="cosine", rounds=5, warmup=9}}')
    assert "algorithm.solver.schedule.warmup must be shorter than the 5 rounds" in words
    assert "Unknown schedule 'cosin'. Did you mean 'cosine'?" in refusal('algorithm.solver={schedule={name="cosin"}}')


def test_a_byte_order_mark_as_editors_on_windows_write_it_is_no_error(tmp_path):
    plain, marked = tmp_path / "plain.toml", tmp_path / "marked.toml"
    plain.write_text('[data]\nname = "digits"\n', encoding="utf-8")
    marked.write_bytes(b"\xef\xbb\xbf" + plain.read_bytes().replace(b"\n", b"\r\n"))
    assert read_toml(marked) == read_toml(plain)


def test_a_table_in_the_place_of_a_configuration_is_told_where_it_belongs(tmp_path):
    path = tmp_path / "visits.csv"
    path.write_text("visit no,age\n1,20\n")
    with pytest.raises(ConfigError, match=r'by \[data\] with name = "csv" and path = '):
        RunConfig.read(path)
