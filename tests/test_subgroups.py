"""Subgroups of clients by hand: mean, 90th percentile, gap and intervals; in tables, files, reports and configurations."""

import math
import tomllib

import pytest
import torch

import equipoise as eq
from equipoise.client_table import ClientTable
from equipoise.conformal import conformal_sets
from equipoise.data.clients import FederatedData
from equipoise.errors import ConfigError, EquipoiseNotice, InvalidData, InvalidParameter
from equipoise.experiment.build import build
from equipoise.experiment.config import RunConfig
from equipoise.export.model_card import subgroups
from equipoise.subgroups import read_attributes, subgroups_over_seeds
from made_clients import make_clients


def table(errors, groups, split="test", sizes=None):
    count = len(errors)
    size = torch.tensor(sizes or [1] * count)
    error = torch.tensor(errors, dtype=torch.float64)
    ids = tuple(f"c{k}" for k in range(count))
    return ClientTable(
        ids, (split,) * count, torch.ones(count, dtype=torch.bool), size, error, error, attributes={"land": groups}
    )


def test_figures_and_intervals_by_hand():
    # A: 0.1, 0.3: mean 0.2, the variance of the mean is 2/1 · ¼(0.01 + 0.01) = 0.01, so ± 1.96 · 0.1. B: 0.4, 0.6: mean 0.5 and
    # the same. The gap of A is −0.3 ± 1.96 · √0.02. Two values hold no 95 % interval of a 90th percentile from above.
    b, a = table([0.1, 0.4, 0.3, 0.6], ("A", "B", "A", "B")).subgroups("land", "test")
    assert [b.value, a.value] == ["B", "A"]  # worst first
    assert (a.mean, a.percentile_90, a.gap, a.clients) == pytest.approx((0.2, 0.3, -0.3, 2))
    assert (a.mean_interval.low, a.mean_interval.high) == pytest.approx((0.2 - 0.196, 0.2 + 0.196), abs=1e-4)
    assert (a.gap_interval.low, a.gap_interval.high) == pytest.approx((-0.3 - 0.2772, -0.3 + 0.2772), abs=1e-4)
    assert a.percentile_90_interval.high == math.inf
    assert b.gap == pytest.approx(0.3)


def test_intervals_end_where_no_mean_can_be():
    """Half of 10 examples and none wrong: 0.25 ± 1.96 · 0.25 would begin below 0, and 0.75 ± 0.49 end above 1."""
    high, low = table([0.0, 0.5, 0.5, 1.0], ("A", "A", "B", "B"), sizes=[10] * 4).subgroups("land", "test")
    assert (low.mean_interval.low, low.mean_interval.high) == pytest.approx((0.0, 0.25 + 0.49), abs=1e-3)
    assert (high.mean_interval.low, high.mean_interval.high) == pytest.approx((0.75 - 0.49, 1.0), abs=1e-3)
    negative = table([-2.0, 2.0, 5.0, 5.0], ("A", "A", "B", "B")).subgroups("land", "test")[1]
    assert negative.mean_interval.low == pytest.approx(-1.96 * 2, abs=1e-3)  # a score that can be negative


def test_training_clients_count_by_their_examples():
    # A: 0.1 with 3 examples and 0.5 with 1: 0.2 instead of 0.3.
    groups = {
        each.value: each for each in table([0.1, 0.5, 0.4], ("A", "A", "B"), "train", [3, 1, 2]).subgroups("land", "train")
    }
    assert groups["A"].mean == pytest.approx(0.2)
    assert groups["A"].gap == pytest.approx(-0.2)


def test_a_single_subgroup_has_no_gap_and_a_client_without_a_value_is_one_of_its_own():
    (only,) = table([0.1, 0.2], ("A", "A")).subgroups("land", "test")
    assert math.isnan(only.gap)
    with pytest.warns(EquipoiseNotice, match="'land': .* 2 of 3 clients have no value, e.g. 'client-1'"):
        data = FederatedData(make_clients([4, 5, 6])).with_attributes({"land": {"client-0": "AT"}})
    result = eq.train(eq.models.Softmax(4, 3), data, rounds=1, clients_per_round=2, progress=False)
    assert {each.value for each in result.subgroups("land")} == {"AT", "–"}


def test_seeds_are_averaged():
    data = FederatedData(make_clients([4, 5, 6, 9]), test=make_clients([9, 9, 9, 9], seed=4))
    data = data.with_attributes({"land": dict(zip(data.train.ids, "ABAB", strict=True))})
    options = {"rounds": 2, "clients_per_round": 2, "seeds": 2, "progress": False}
    found = eq.compare({"FedAvg": eq.Algorithm()}, lambda seed: eq.models.Softmax(4, 3), data, **options)
    runs = found.results["FedAvg"]
    both = [{each.value: each for each in run.subgroups("land")} for run in runs]
    for each in subgroups_over_seeds(runs, "land"):
        assert each.mean == pytest.approx(sum(one[each.value].mean for one in both) / 2)
        assert each.gap_interval.low == pytest.approx(sum(one[each.value].gap_interval.low for one in both) / 2)


def test_tables_files_and_reports_have_them(tmp_path):
    data = FederatedData(make_clients([4, 5, 6, 9]), test=make_clients([9, 9, 9, 9], seed=4))
    with pytest.warns(EquipoiseNotice, match="'old': .* 3 of 4 clients have no value"):
        data = data.with_attributes(
            {"land": dict(zip(data.train.ids, ("<AT>", "DE", "DE", "<AT>"), strict=True)), "old": {"client-0": 1}}
        )
    assert data.fingerprint == FederatedData(data.train, test=data.test).fingerprint
    found = eq.compare({"a": eq.Algorithm(), "b": eq.Algorithm(personal=eq.personal.Ditto())}, eq.models.Softmax(4, 3), data,
                       rounds=2, clients_per_round=2, progress=False)  # fmt: skip
    text = found.summary()
    assert "By land: mean, 90th percentile and gap to all other clients, with 95 % intervals" in text
    assert text.count("<AT> (2)") == 2
    page = found.report(tmp_path / "report.html").read_text()
    assert "table-subgroups-0" in page
    assert "table-subgroups-1" in page
    assert "<AT>" not in page.split("</style>")[1].split("<script")[0]
    assert "&lt;AT&gt;" in page
    rows = found.results["a"][0].clients
    again = ClientTable.from_parquet(rows.to_parquet(tmp_path / "clients.parquet", method="a"))
    assert again.attributes == rows.attributes
    assert "land" in rows.to_csv(tmp_path / "clients.csv").read_text().splitlines()[0]
    assert next(iter(rows))["old"] == "1"


def test_a_csv_file_gives_attributes_to_a_configuration(tmp_path):
    path = tmp_path / "clients.csv"
    path.write_text("client,device,age\na,phone,3\nb,,4\n")
    assert read_attributes(path) == {"device": {"a": "phone"}, "age": {"a": "3", "b": "4"}}
    for text, words in (
        ("client\na\n", "column per attribute"),
        ("c,x\na,1\na,2\n", "more than one row"),
        ("c,x\na\n", "line 2"),
    ):
        path.write_text(text)
        with pytest.raises(InvalidData, match=words):
            read_attributes(path)
    with pytest.raises(InvalidData, match="cannot be read"):
        read_attributes(tmp_path / "nowhere.csv")


@pytest.mark.parametrize(
    "wrong", [[], {"error": {"a": 1}}, {"coverage": {"a": 1}}, {"land": ["AT"]}, {"": {}}, {"land": {1: "AT"}}]
)
def test_attributes_that_are_none_are_refused(wrong):
    with pytest.raises(InvalidParameter, match="attributes"):
        FederatedData(make_clients([4, 5])).with_attributes(wrong)


def test_an_unknown_attribute_names_the_known_ones():
    with pytest.raises(InvalidParameter, match="must be one of land"):
        table([0.1], ("A",)).subgroups("country", "test")


def test_the_card_of_a_model_has_subgroups_of_enough_clients():
    data = FederatedData(make_clients([4] * 12), test=make_clients([9] * 12, seed=4))
    data = data.with_attributes({"land": {name: "AT" if k < 8 else "DE" for k, name in enumerate(data.train.ids)}})
    result = eq.train(eq.models.Softmax(4, 3), data, rounds=1, clients_per_round=4, progress=False)
    found = subgroups(result, result.clients.where("test"))
    assert [each["group"] for each in found if "land" in each["group"]] == ["land: AT"]  # four clients are too few
    (only,) = [each for each in result.subgroups("land") if each.value == "AT"]
    assert found[-1]["mean"] == pytest.approx(only.mean)


# --------------------------------------------------------------------------------------------------------- conformal sets


def test_conformal_coverage_of_each_client_is_in_tables_and_reports(tmp_path):
    data = FederatedData(make_clients([9] * 4), make_clients([20] * 4, seed=1), make_clients([30] * 4, seed=2), classes=3)
    plain = eq.train(eq.models.Softmax(4, 3), data, rounds=2, clients_per_round=4, progress=False)
    result = plain.with_conformal(data, miss=0.2)
    sets = conformal_sets(plain.model, data, miss=0.2)
    rows = result.clients.where("test")
    assert rows.metrics["coverage"].tolist() == sets.coverage.tolist()
    assert rows.metrics["set_size"].tolist() == sets.set_size.tolist()
    assert result.clients.where("train").metrics["coverage"].isnan().all()
    assert result.summary().metrics["coverage"].mean == pytest.approx(float(sets.coverage.mean()))
    page = result.report(tmp_path / "report.html").read_text()
    assert 'data-code="conformal"' in page
    assert "coverage, this model" in page
    again = ClientTable.from_parquet(result.clients.to_parquet(tmp_path / "clients.parquet"))
    assert again.miss == 0.2


CONFIG = """
[data]
name = "digits"
clients = 12
split_by = "examples"
validation = 0.2
[model]
name = "softmax"
[train]
rounds = 1
clients_per_round = 4
conformal = 0.2
attributes = "{path}"
"""


def test_a_configuration_asks_for_sets_and_attributes(tmp_path):
    path = tmp_path / "clients.csv"
    prepared = build(RunConfig.of(tomllib.loads(CONFIG.replace('attributes = "{path}"', ""))))
    rows = "".join(f"{name},{'odd' if k % 2 else 'even'}\n" for k, name in enumerate(prepared.data.train.ids))
    path.write_text(f"client,parity\n{rows}")
    result = build(RunConfig.of(tomllib.loads(CONFIG.format(path=path)))).train(progress=False)
    assert {each.value for each in result.subgroups("parity")} == {"odd", "even"}
    assert result.clients.miss == 0.2
    with pytest.raises(ConfigError, match="conformal"):
        RunConfig.of(tomllib.loads(CONFIG.replace("0.2\nattributes", "1.5\nattributes").format(path=path)))


def test_attributes_of_nobody_are_refused_and_unknown_ids_are_told():
    data = FederatedData(make_clients([4, 5, 6]))
    words = r"attributes\['land'\] must map ids of clients to values, but is .'nobody'"
    with pytest.raises(InvalidParameter, match=words):
        data.with_attributes({"land": {"nobody": "AT", "none": "DE"}})
    with pytest.warns(EquipoiseNotice, match="1 of its ids are no clients, 0 of 3 clients have no value, e.g. 'nobody'"):
        data.with_attributes({"land": {**dict.fromkeys(data.train.ids, "AT"), "nobody": "DE"}})
    assert data.with_attributes({"land": dict.fromkeys(data.train.ids, "AT")}).attributes["land"]["client-0"] == "AT"


def test_columns_of_a_table_are_attributes(tmp_path):
    frame = {
        "shop": [f"s{k % 4}" for k in range(24)],
        "region": ["north" if k % 4 < 2 else "south" for k in range(24)],
        "x": [k % 7 for k in range(24)],
        "y": [k // 2 % 2 for k in range(24)],
    }
    options = {"client": "shop", "target": "y", "split_by": "examples", "attributes": ["region"]}
    data = eq.data.from_frame(frame, **options)
    assert data.attributes == {"region": {"s0": "north", "s1": "north", "s2": "south", "s3": "south"}}
    assert data.schema.feature_names == ("x",)
    assert "region=north" in eq.data.from_frame(frame, **options, columns=["x", "region"]).schema.feature_names
    again = eq.data.from_frame(frame, **options, schema=data.schema)
    assert again.attributes == data.attributes
    result = eq.train(eq.models.Tabular(data.schema), data, rounds=1, clients_per_round=2, progress=False)
    assert "By region: mean, 90th percentile and gap" in str(result.summary())
    assert "north (2)" in str(result.summary())
    wrong = {**frame, "region": ["west", *frame["region"][1:]]}
    with pytest.raises(InvalidData, match="differs in row 0 and row 4, both of client 's0'"):
        eq.data.from_frame(wrong, **options)
    with pytest.raises(InvalidParameter, match="attributes must name a column of table"):
        eq.data.from_frame(frame, **{**options, "attributes": ["regoin"]})
    with pytest.raises(InvalidParameter, match="attributes must be other columns than client, target and split"):
        eq.data.from_frame(frame, **{**options, "attributes": ["y"]})
    with pytest.raises(InvalidParameter, match="attributes must be a list"):
        eq.data.from_frame(frame, **{**options, "attributes": "region"})


def test_both_refusals_of_a_property_of_rows_point_to_groups_of_rows():
    rows = {"site": ["a", "a", "b", "b"], "sex": ["f", "m", "f", "m"], "age": [1, 2, 3, 4], "ill": ["no", "yes", "no", "yes"]}
    with pytest.raises(InvalidData, match='see "Groups of rows"'):
        eq.data.from_frame(rows, client="site", target="ill", attributes=["sex"], test=0)
    data = eq.data.from_frame(rows, client="site", target="ill", test=0)
    found = eq.evaluate(eq.models.Tabular(data.schema), data)
    with pytest.raises(InvalidParameter, match='men and women within a client: see "Groups of rows"'):
        found.subgroups("sex")
