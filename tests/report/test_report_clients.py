"""Single clients over seeds: means and intervals, who gains and who pays, and the trivial answer."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from report_cases import EVIL, METHODS, Page, clients, federated, inside, numbers, offline, private, regressed, softmax
from torch import nn

import equipoise as eq
from equipoise.report import write_report
from equipoise.report.data.by_client import changes, client_errors, interval_over_seeds, mean_over_seeds
from equipoise.report.data.over_seeds import seeds_split_again
from equipoise.report.data.results_by_method import Study
from equipoise.runs import trivial_answer


def with_errors(run, errors, **changed):
    """The run as if its test clients had these errors."""
    table = run.clients.where("test").take(torch.arange(len(errors)))
    found = torch.tensor(errors, dtype=torch.float64)
    return replace(run, clients=replace(table, error=found, loss=2 * found), **changed)


def study_of(run, **methods):
    """A study by hand: for each method a list of errors per seed."""
    return [
        with_errors(run, errors, name=name, seed=seed) for name, seeds in methods.items() for seed, errors in enumerate(seeds)
    ]


def test_means_and_intervals_over_seeds_by_hand():
    values = np.array([[0.1, 0.2, 0.3], [0.5, 0.5, 0.5], [0.1, np.nan, 0.3], [0.2, np.inf, 0.2]])
    assert mean_over_seeds(values).tolist() == pytest.approx([0.2, 0.5, 0.2, math.inf])
    low, high = interval_over_seeds(values, 0.0, 1.0)
    # Student's t with 2 degrees of freedom: 4.3027; s = 0.1; 4.3027 · 0.1 / √3 = 0.24842, and below 0 no error lies.
    assert [low[0], high[0]] == pytest.approx([0.0, 0.44842], abs=1e-4)
    assert np.isnan([low[1], high[1]]).all()  # the same in all seeds: no spread, and no interval
    assert np.isnan([*low[2:], *high[2:]]).all()  # two seeds, or an error that is not finite
    low, high = interval_over_seeds(values[:, :2])
    assert [low[0], high[0]] == [0.1, 0.2]
    assert np.isnan(interval_over_seeds(values[:, :1])[0]).all()


def test_gains_are_counted_and_sorted_by_the_mean_over_seeds(run, tmp_path):
    results = study_of(
        run,
        first=[[0.5, 0.5, 0.2, 0.4], [0.6, 0.4, 0.2, 0.4], [0.7, 0.5, 0.2, 0.4]],
        second=[[0.3, 0.6, 0.2, 0.3], [0.3, 0.6, 0.2, 0.5], [0.3, 0.4, 0.2, 0.3]],
    )
    made = changes(client_errors(Study.of(results)))[0]
    assert made.change.tolist() == pytest.approx([-0.3, 0.2 / 3, 0.0, -0.1 / 3])
    assert (int(made.gains.sum()), int(made.pays.sum()), made.alike, made.always) == (2, 1, 1, (1, 0))
    page = Page(write_report(results, tmp_path / "r.html"))
    offline(page)
    header, row = page.rows["table-gains"]
    assert header == ["method", "gain", "pay", "unchanged", "gain in every seed", "pay in every seed", "mean change",
                      "mean change of those that gain", "mean change of those that pay"]  # fmt: skip
    assert row == ["second", "2", "1", "1", "1", "0", "−6.7", "−16.7", "+6.7"]
    gain, pay = page.rows["gain-1"], page.rows["pay-1"]
    assert gain[0] == ["client", "change", "first", "second", "examples"]
    assert [each[0] for each in gain[1:]] == ["t0", "t3"]
    assert [each[0] for each in pay[1:]] == ["t1"]
    assert gain[1][2:4] == ["60.0", "30.0"]
    assert numbers(gain[1][1])[0] == 30.0
    assert "mean over 3 seeds" in page.by_id["gain-1-caption"]
    assert "95 % interval" in page.by_id["gain-1-caption"]


def test_thousands_of_clients_and_two(run, tmp_path):
    table = run.clients.where("test")
    for count in (2, 5000):
        ids = tuple(f"{EVIL if k < 2 else 'c'}{k}" for k in range(count))
        rows = table.take(torch.zeros(count, dtype=torch.int64))
        rows = replace(rows, client=ids, error=torch.linspace(0, 1, count, dtype=torch.float64))
        other = replace(rows, error=rows.error.flip(0))
        results = [replace(run, clients=rows, name="a"), replace(run, clients=other, name="b")]
        page = Page(write_report(results, tmp_path / "r.html"))
        offline(page)
        assert sum(int(cell.replace(",", "")) for cell in page.rows["table-gains"][1][1:4]) == count
        assert page.rows["pay-1"][1][0] == ids[0]  # as it is, and escaped
        assert len(page.rows["pay-1"]) == 1 + min(5, count // 2)
        assert len(page.data["figures"]["gains"]["data"][0]["x"]) == min(count, 1000)


def test_no_client_pays_is_said_and_several_methods_are_folded(run, tmp_path):
    methods = {"a": [[0.5, 0.4]], **{f"better {k}": [[0.4 - k / 100, 0.3]] for k in range(4)}}
    page = Page(write_report(study_of(run, **methods), tmp_path / "r.html"))
    offline(page)
    assert page.source.count("No client pays.") == 4
    assert page.source.split('aria-labelledby="settings"')[0].count("<details") == 4
    assert page.source.count("<details open>") == 1


def test_clients_of_data_that_differ_by_seed_stay_apart(tmp_path):
    made = eq.compare(
        METHODS, softmax(), lambda seed: eq.FederatedData(clients(6, seed=seed), test=clients(8, prefix="t", seed=9 + seed)),
        rounds=2, clients_per_round=4, seeds=3,
    )  # fmt: skip
    assert len({run.data_version for run in made.all_results}) == 3
    found = client_errors(Study.of(made.all_results))
    assert (len(found), found.errors.shape[2]) == (24, 1)
    page = Page(made.report(tmp_path / "r.html"))
    offline(page)
    assert "The data differ from seed to seed" in page.source
    assert page.rows["left-behind"][0][:3] == ["client", "seed", "examples"]
    assert {row[1] for row in page.rows["left-behind"][1:]} <= {"0", "1", "2"}
    counts = page.rows["table-gains"][1]
    assert sum(map(int, counts[1:4])) == 24


def test_the_same_data_for_every_seed_are_one_set_of_clients(comparison):
    assert {run.data_version for run in comparison.all_results} == {""}
    again = eq.compare(METHODS, softmax(), lambda _: federated(), rounds=1, clients_per_round=4, seeds=2)  # made twice, equal
    assert len({run.data_version for run in again.all_results}) == 1
    many = eq.train_many(
        softmax(), lambda seed: eq.FederatedData(clients(6, seed=seed)), METHODS, seeds=2, rounds=1, clients_per_round=4
    )
    assert len({run.data_version for run in many.all_results}) == 2


def test_runs_of_train_on_data_that_differ_by_seed_are_told_apart_by_their_tables():
    def made(data):
        return [eq.train(softmax(), data(seed), rounds=1, clients_per_round=4, seed=seed, progress=False) for seed in (0, 1)]

    def drawn(seed):  # clients of one name and size, with other examples
        return eq.FederatedData(clients(6, seed=seed), test=clients(8, prefix="t", seed=9 + seed))

    def split(seed):  # the same clients, split in another way
        return eq.data.split_clients(clients(12, seed=0), test=0.5, seed=seed)

    for data in (drawn, split):
        runs = made(data)
        assert {run.data_version for run in runs} == {""}
        assert seeds_split_again(runs)
    assert not seeds_split_again(made(lambda seed: drawn(0)))


def test_a_saved_run_keeps_what_tells_its_data_apart(run, tmp_path):
    from equipoise.experiment.folder import read_record

    folder = replace(run, data_version="abc").save(tmp_path / "run")
    assert read_record(folder).data_version == "abc"
    table = read_record(folder).clients
    assert torch.equal(table.trivial_error, run.clients.trivial_error)
    assert table.trivial_answer == "most frequent class"


@pytest.mark.parametrize("own_seed", [True, False])
def test_a_study_of_files_has_other_data_for_each_seed_unless_the_data_have_a_seed_of_their_own(tmp_path, own_seed):
    from equipoise.experiment.build import build
    from equipoise.experiment.config import RunConfig
    from equipoise.experiment.folder import claim, read_record
    from equipoise.experiment.folder import run as run_folder

    data = {"name": "label_shift", "train_clients": 4, "validation_clients": 0, "test_clients": 3, "examples": 10}
    records = []
    for seed in (0, 1):
        table = {
            "data": data | ({"seed": 5} if own_seed else {}), "model": {"name": "softmax"},
            "train": {"rounds": 1, "clients_per_round": 2, "seed": seed, "name": "FedAvg"},
        }  # fmt: skip
        folder = claim(tmp_path / str(seed))
        run_folder(build(RunConfig.of(table)), folder, report=False)
        records.append(read_record(folder.path))
    found = client_errors(Study.of(records))
    assert (len(found), found.errors.shape[2]) == ((3, 2) if own_seed else (6, 1))


def test_a_client_that_is_malicious_in_some_seeds_has_the_mean_of_the_others(run):
    results = study_of(run, a=[[0.1, 0.2], [0.3, 0.4]], b=[[0.1, 0.3], [0.2, 0.2]])
    gone = replace(results[1], clients=results[1].clients.take(torch.tensor([1])))
    found = client_errors(Study.of([results[0], gone, *results[2:]]))
    assert mean_over_seeds(found.of(0)).tolist() == pytest.approx([0.1, 0.3])
    assert mean_over_seeds(found.change(1)).tolist() == pytest.approx([0.0, -0.05])


def test_clients_that_only_one_method_has_are_not_compared(run, tmp_path):
    grown = replace(run, name="grown", clients=replace(run.clients, size=run.clients.size + 1))
    page = Page(write_report([run, grown], tmp_path / "r.html"))
    assert page.rows["table-gains"][0][1:5] == ["gain", "pay", "unchanged", "not comparable"]
    assert page.rows["table-gains"][1][1:5] == ["0", "0", "0", "40"]
    assert page.source.count("No client gains.") == page.source.count("No client pays.") == 1
    assert "gains" not in page.figures


def test_methods_without_a_common_seed_are_not_compared(run, tmp_path):
    other = replace(run, name="other", seed=7)
    page = Page(write_report([run, other], tmp_path / "r.html"))
    assert "other: no seed in common with run, so no comparison." in page.source
    assert "table-gains" not in page.rows
    assert "gains" not in page.figures


def test_clients_of_a_private_run_are_counted_and_not_named(comparison, tmp_path):
    dp = eq.privacy.DifferentialPrivacy(epsilon=5.0, delta=0.01, clip=1.0)
    runs = [replace(private(run), algorithm=replace(run.algorithm, privacy=dp)) for run in comparison.results["FedAvg"]]
    other = [replace(run, name="other") for run in runs]
    page = Page(write_report([*runs, *other], tmp_path / "r.html"))
    assert "table-gains" in page.rows
    assert not any(name.startswith(("gain-", "pay-")) for name in page.rows)
    assert not any("client" in text for text in page.data["figures"]["gains"]["data"][0]["hovertext"])


def test_all_clients_have_their_mean_and_change(comparison, tmp_path):
    import json

    page = Page(comparison.report(tmp_path / "r.html"))
    assert page.by_id["clients-title"] == "All clients, mean over 2 seeds"
    columns = json.loads(page.by_id["clients-data"])["columns"]
    assert list(columns) == [
        "client",
        "split",
        "examples",
        "error, FedAvg",
        "error, Δ-FL 0.5",
        "change, Δ-FL 0.5",
        "trivial error",
    ]
    tables = [[run.clients for run in runs] for runs in comparison.results.values()]
    k = tables[0][0].client.index("t3")
    before, after = (sum(float(table.error[k]) for table in each) / 2 for each in tables)
    at = columns["client"].index("t3")
    assert columns["error, FedAvg"][at] == pytest.approx(before, rel=1e-5)
    assert columns["change, Δ-FL 0.5"][at] == pytest.approx(after - before, abs=1e-6)
    assert columns["trivial error"][at] == pytest.approx(float(tables[0][0].trivial_error[k]), rel=1e-5)


# ---------------------------------------------------------------------------------------------------------- the trivial answer


def test_the_most_frequent_class_of_training_by_hand(comparison, tmp_path):
    data = federated()
    answer = data.train.y.bincount().argmax()
    wanted = [float((data.test.client(at=k)[1] != answer).double().mean()) for k in range(len(data.test))]
    rows = comparison.results["FedAvg"][0].clients.where("test")
    assert rows.trivial_error.tolist() == pytest.approx(wanted)
    last = [line for line in comparison.summary().splitlines() if line.startswith("most frequent class")]
    assert numbers(last[0])[0] == pytest.approx(sum(wanted) / len(wanted), abs=5e-4)
    page = Page(comparison.report(tmp_path / "r.html"))
    assert numbers(page.cell("most frequent class", "mean"))[0] == pytest.approx(100 * sum(wanted) / len(wanted), abs=0.051)
    worse = [int((run.clients.where("test").error > rows.trivial_error).sum()) for run in comparison.results["FedAvg"]]
    assert f"FedAvg: {sum(worse) / 2:.4g}" in page.by_id["trivial"]


def test_test_clients_have_no_say_in_the_trivial_answer():
    data = federated()
    before = eq.train(softmax(), data, rounds=0, clients_per_round=4).clients.where("test").trivial_error
    flipped = replace(data, test=data.test.with_targets(torch.full_like(data.test.y, 2)))
    after = eq.train(softmax(), flipped, rounds=0, clients_per_round=4).clients.where("test").trivial_error
    assert int(data.train.y.bincount().argmax()) != 2
    assert not torch.equal(before, after)
    assert after.tolist() == [1.0] * len(data.test)


def test_a_regression_has_the_mean_of_its_training_targets():
    data = federated(regression=True)
    made = regressed()
    rows = made.results["mean"][0].clients.where("test")
    centre = data.train.y.double().mean()
    wanted = [float((data.test.client(at=k)[1].double() - centre).square().mean()) for k in range(len(data.test))]
    assert rows.trivial_error.tolist() == pytest.approx(wanted, rel=1e-4)
    assert "mean of the targets" in made.summary()


def test_under_the_absolute_error_it_is_the_median_of_the_training_targets(tmp_path):
    """By hand: targets 0, 0, 0, 1 and 9 have the mean 2 and the median 0, whose mean absolute error is 2 and not 2.8."""
    x, y = torch.randn(5, 2, generator=torch.Generator().manual_seed(0)), torch.tensor([0.0, 0.0, 0.0, 1.0, 9.0])
    owner = ["a"] * 5 + ["b"] * 5
    data = eq.data.from_arrays(torch.cat([x, x]), torch.cat([y, y]), owner, test=0.0)
    model = eq.models.LinearRegression(2)

    def own(outputs, targets):
        return (outputs - targets).abs()

    for error, answer, wanted in ((nn.L1Loss(reduction="none"), "median", 2.0), (own, "mean", 2.8), (None, "mean", 12.4)):
        run = eq.train(model, data, rounds=1, clients_per_round=2, error=error, progress=False)
        assert run.clients.trivial_answer == f"{answer} of the targets"
        assert run.clients.trivial_error.tolist() == pytest.approx([wanted] * 2)
        shown = (str(run.summary()), eq.Comparison({"run": [run]}).summary(), Page(run.report(tmp_path / "r.html")).source)
        said = "the mean, which need not be the best constant for this error"
        for text in shown:
            assert f"{answer} of the targets" in text
            assert (said in text.replace("\u00a0", " ")) is (error is own)


def test_the_median_of_an_even_count_is_in_the_middle():
    assert trivial_answer._median(torch.tensor([4.0, 1.0, 2.0, 9.0]).double()) == 3.0


def test_binary_targets_and_a_sample_of_clients():
    base = clients(9, classes=2)
    data = eq.data.split_examples(base.with_targets(base.y.float()), test=0.4)
    result = eq.train(
        nn.Sequential(nn.Linear(4, 1), nn.Flatten(0)), data, rounds=1, clients_per_round=3, evaluate_clients=4,
        loss=lambda outputs, targets: nn.functional.binary_cross_entropy_with_logits(outputs, targets, reduction="none"),
    )  # fmt: skip
    rows, majority = result.clients.where("test"), float(data.train.y.mean() > 0.5)
    assert rows.trivial_answer == "most frequent class"
    wanted = [float((data.test.client(name)[1] != majority).double().mean()) for name in rows.client]
    assert rows.trivial_error.tolist() == pytest.approx(wanted)


def test_where_it_is_not_known_there_is_no_row(tmp_path):
    private_run = eq.Algorithm(privacy=eq.privacy.DifferentialPrivacy(epsilon=5.0, delta=0.01, clip=1.0))
    result = eq.train(softmax(), inside(), private_run, rounds=1, clients_per_round=5)
    assert result.clients.trivial_error is None
    assert "trivial_error" not in result.clients.columns
    several = eq.train(nn.Linear(4, 2), federated(regression=True), rounds=1, clients_per_round=4,
                       loss=lambda out, y: (out.sum(1) - y).square())  # fmt: skip
    assert several.clients.trivial_error is None
    assert "mean of the targets" not in several.report(tmp_path / "r.html").read_text()
