"""Group DRO: answers by hand, limits, absent groups, and a run over groups."""

import math

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

import equipoise as eq
from equipoise.errors import IncompatibleParts, InvalidParameter
from equipoise.risk import GroupDRO, HierarchicalTilt
from equipoise.risk.group_dro import GroupMixture

GROUPS = {"a": "north", "b": "north", "c": "south"}


def tensor(*values):
    return torch.tensor(values, dtype=torch.float64)


def shares(state):
    return dict(zip(state.groups, state.log_shares.exp().tolist(), strict=True))


def test_one_step_by_hand():
    # R = (1, 0), q = (½, ½), step ln 2: (½·2, ½·1) normalised is (⅔, ⅓); within north ¼ : ¾ by base weights.
    found = GroupDRO(math.log(2), GROUPS)(tensor(1, 1, 0), tensor(0.1, 0.3, 0.6), clients=("a", "b", "c"))
    assert shares(found.state) == pytest.approx({"north": 2 / 3, "south": 1 / 3})
    assert found.weights.tolist() == pytest.approx([2 / 3 / 4, 2 / 3 * 3 / 4, 1 / 3])
    # The next round starts there: R = (0, 1) takes the step back.
    again = GroupDRO(math.log(2), GROUPS)(tensor(0, 0, 1), tensor(0.1, 0.3, 0.6), clients=("a", "b", "c"), state=found.state)
    assert shares(again.state) == pytest.approx({"north": 1 / 2, "south": 1 / 2})


def test_without_a_step_it_is_the_mean_of_the_groups_means():
    found = GroupDRO(0.0, GROUPS)(tensor(1, 3, 7), tensor(0.5, 0.25, 0.25), clients=("a", "b", "c"))
    assert float(found.value) == pytest.approx(((0.5 * 1 + 0.25 * 3) / 0.75 + 7) / 2)


def test_an_absent_group_keeps_its_share():
    state = GroupMixture(("north", "south", "west"), tensor(0.5, 0.3, 0.2).log())
    groups = GROUPS | {"d": "west"}
    found = GroupDRO(1.0, groups)(tensor(5, 0), tensor(0.5, 0.5), clients=("a", "c"), state=state)
    after = shares(found.state)
    assert after["west"] == pytest.approx(0.2)
    assert after["north"] == pytest.approx(0.8 * 0.5 * math.exp(5) / (0.5 * math.exp(5) + 0.3))
    assert float(found.weights.sum()) == pytest.approx(0.8)


@given(
    st.lists(st.floats(0.01, 1.0), min_size=3, max_size=3),
    st.lists(st.tuples(st.sampled_from("ab"), st.floats(0, 5), st.floats(0.1, 1)), min_size=1, max_size=6),
    st.floats(0, 3),
)
def test_groups_that_are_there_share_what_they_had(before, cohort, step):
    # Groups a, b and c, of which c, and perhaps a or b, has nobody in the cohort: those keep their shares.
    before = tensor(*before) / sum(before)
    names = tuple(f"{group}{k}" for k, (group, _, _) in enumerate(cohort))
    losses, alpha = (tensor(*(row[place] for row in cohort)) for place in (1, 2))
    risk, state = GroupDRO(step, lambda client: client[0]), GroupMixture(("a", "b", "c"), before.log())
    found = risk(losses, alpha, clients=names, state=state)
    after, had = shares(found.state), dict(zip("abc", before.tolist(), strict=True))
    assert sum(after.values()) == pytest.approx(1.0)
    here = {name[0] for name in names}
    assert {g: after[g] for g in after if g not in here} == pytest.approx({g: had[g] for g in had if g not in here})
    inside = {g: torch.tensor([name[0] == g for name in names]) for g in here}
    raised = {g: had[g] * math.exp(step * float((alpha * losses)[m].sum() / alpha[m].sum())) for g, m in inside.items()}
    for g, member in inside.items():  # q_g e^{step R_g}, normalised to what these groups had; then by α within the group
        assert after[g] == pytest.approx(sum(had[h] for h in here) * raised[g] / sum(raised.values()))
        torch.testing.assert_close(found.weights[member], after[g] * alpha[member] / alpha[member].sum())


def test_a_group_that_nobody_knew_starts_with_the_mean_share():
    risk = GroupDRO(0.0, lambda client: client[0])
    first = risk(tensor(1, 1), tensor(0.5, 0.5), clients=("a1", "b1"))
    later = risk(tensor(1, 1), tensor(0.5, 0.5), clients=("a1", "c1"), state=first.state)
    assert shares(later.state) == pytest.approx(dict.fromkeys("abc", 1 / 3))


@given(st.lists(st.floats(0, 5), min_size=3, max_size=3), st.floats(0.01, 5))
def test_one_step_from_the_groups_masses_is_the_hierarchical_tilt(losses, step):
    alpha = tensor(0.2, 0.3, 0.5)
    state = GroupMixture(("north", "south"), tensor(0.5, 0.5).log())
    found = GroupDRO(step, GROUPS)(tensor(*losses), alpha, clients=("a", "b", "c"), state=state)
    other = HierarchicalTilt(GROUPS, tilt=step, inner_tilt=0.0)(tensor(*losses), alpha, clients=("a", "b", "c"))
    torch.testing.assert_close(found.weights, other.weights)
    torch.testing.assert_close(found.value, other.value)


def test_shares_do_not_vanish_over_many_rounds():
    risk, state = GroupDRO(10.0, GROUPS), None
    for _ in range(1000):
        state = risk(tensor(0, 0, 9), tensor(0.25, 0.25, 0.5), clients=("a", "b", "c"), state=state).state
    assert bool(torch.isfinite(state.log_shares).all())
    for _ in range(1000):  # and the way back is as long as the way there
        state = risk(tensor(9, 9, 0), tensor(0.25, 0.25, 0.5), clients=("a", "b", "c"), state=state).state
    assert shares(state) == pytest.approx({"north": 0.5, "south": 0.5})


def test_a_run_over_groups_lowers_the_loss_of_the_group_behind(tmp_path):
    data = eq.data.label_shift(train_clients=30, validation_clients=2, test_clients=10)
    groups = {name: "few" if k % 6 == 0 else "many" for k, name in enumerate(data.train.ids)}
    model = eq.models.Softmax(data.features, data.classes)

    def run(rounds, step=0.5, **given):
        risk = GroupDRO(step, groups)
        return eq.train(model, data, eq.Algorithm(risk=risk), rounds=rounds, clients_per_round=15, progress=False, **given)

    whole = run(8)
    run(4, checkpoint=tmp_path / "run.safetensors")
    resumed = run(8, checkpoint=tmp_path / "run.safetensors")
    loop = run(8, engine="loop")
    for one, two, three in zip(*(each.model.parameters() for each in (whole, resumed, loop)), strict=True):
        assert torch.equal(one, two)
        torch.testing.assert_close(one, three, rtol=1e-4, atol=1e-5)


def test_wrong_parameters_are_refused():
    with pytest.raises(InvalidParameter, match="step must be"):
        GroupDRO(-1.0, GROUPS)
    with pytest.raises(InvalidParameter, match="groups must be a mapping or a function"):
        GroupDRO(0.1, ["x"])
    with pytest.raises(IncompatibleParts):  # secure sums alone go: they need no more than one sum per group
        eq.Algorithm(risk=GroupDRO(0.1, GROUPS), privacy=eq.privacy.DifferentialPrivacy(5.0, 1e-3, 1.0))


def test_small_groups_count_for_more_by_hand():
    """R = (1, 0), N = (4, 1), C = 1: adjusted (3/2, 1). q = (½, ½) and step ln 2: shares √2 : 1 by the difference of ½."""
    risk = GroupDRO(math.log(2), GROUPS, adjustment=1.0, sizes={"north": 4, "south": 1})
    weights = risk(tensor(1, 1, 0), tensor(0.1, 0.3, 0.6), clients=("a", "b", "c")).weights
    north, south = 2**0.5 / (1 + 2**0.5), 1 / (1 + 2**0.5)
    torch.testing.assert_close(weights, tensor(north / 4, 3 * north / 4, south))
    plain = GroupDRO(math.log(2), GROUPS, sizes={"north": 4, "south": 1})
    assert torch.equal(
        plain(tensor(1, 1, 0), tensor(0.1, 0.3, 0.6), clients=("a", "b", "c")).weights,
        GroupDRO(math.log(2), GROUPS)(tensor(1, 1, 0), tensor(0.1, 0.3, 0.6), clients=("a", "b", "c")).weights,
    )
    with pytest.raises(InvalidParameter, match="sizes must give the number"):
        GroupDRO(0.1, GROUPS, adjustment=1.0)
    with pytest.raises(InvalidParameter, match="sizes must have the group 'south'"):
        GroupDRO(0.1, GROUPS, adjustment=1.0, sizes={"north": 4})(
            tensor(1, 1, 0), tensor(0.1, 0.3, 0.6), clients=("a", "b", "c")
        )
