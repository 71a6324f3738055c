"""Whether noise has left much of a private model: told with the remedies, from what is public alone."""

import math
import warnings

import pytest
import torch

import equipoise as eq
from equipoise.errors import EquipoiseNotice
from equipoise.export.model_card import privacy_words
from equipoise.privacy.drowned_sums import added_noise, drowning_words, noisy_model_words
from equipoise.privacy.observer_table import PrivacyTable
from equipoise.runs.setup import set_up

DATA = eq.data.label_shift(train_clients=40, validation_clients=4, test_clients=4, seed=0)


class Wide(torch.nn.Linear):
    """A model whose first parameters all are 0.5."""

    def __init__(self):
        super().__init__(DATA.features, DATA.classes)
        for each in self.parameters():
            torch.nn.init.constant_(each, 0.5)


D = sum(each.numel() for each in Wide().parameters())
LARGE, SMALL = 1.0, 1e-3


def private(clip, **options):
    privacy = eq.privacy.DifferentialPrivacy(None, 1e-2, clip=clip, noise_multiplier=8.0, method="rdp")
    return eq.Algorithm(solver=eq.solvers.SGD(lr=0.01), privacy=privacy, **options)


def trained(clip, **options):
    return eq.train(Wide(), DATA, private(clip, **options), rounds=6, clients_per_round=10, seed=0, progress=False)


def plan_of(algorithm, rounds=6):
    options = {"loss": None, "error": None, "engine": "simulator"}
    return set_up(Wide(), DATA, algorithm, rounds=rounds, clients_per_round=10, seed=0, **options).protection.noise


def test_the_noise_of_all_rounds_by_hand():
    """z = 8, clip = 0.5 and 10 clients: 0.4 in each parameter and round, so 0.4 √(6 D) after 6 rounds."""
    assert added_noise(plan_of(private(0.5)), D, 6) == pytest.approx(0.4 * math.sqrt(6 * D))
    half = private(0.5, server=eq.server_opt.SGD(lr=0.5))
    assert added_noise(plan_of(half), D, 6) == pytest.approx(0.2 * math.sqrt(6 * D))
    fixed = private(0.5, sampler=eq.sampling.Uniform())  # replacing a client moves the sum by 2 × clip
    assert added_noise(plan_of(fixed), D, 6) == pytest.approx(0.8 * math.sqrt(6 * D))
    assert added_noise(plan_of(private(0.5, averaging=eq.averaging.Last())), D, 6) == pytest.approx(0.4 * math.sqrt(6 * D))
    for other in ({"server": eq.server_opt.Adam(lr=0.01)}, {"averaging": eq.averaging.Uniform()}):
        assert added_noise(plan_of(private(0.5, **other)), D, 6) is None


def test_a_model_that_noise_has_destroyed_is_told_with_the_remedies():
    with pytest.warns(EquipoiseNotice, match="mostly noise") as caught:
        result = trained(LARGE)
    (said,) = [str(each.message) for each in caught if "mostly noise" in str(each.message)]
    first, noise = 0.5 * math.sqrt(D), 0.8 * math.sqrt(6 * D)
    assert f"the noise of 6 rounds has a norm of about {noise:.3g}" in said
    assert f"before training {first:.3g}" in said
    assert f"with clip = {first / noise:.1g} the noise would be as large as the first model" in said
    for remedy in ("Lower clip, which is 1", "more clients in each round", "fewer rounds", "larger ε"):
        assert remedy in said
    assert "Lower the learning rate" not in said
    assert result.privacy.noise in str(result.summary())
    assert result.privacy.noise in privacy_words(result, D)
    assert PrivacyTable.of_plain(result.privacy.plain()).noise == result.privacy.noise


def test_noise_of_half_of_the_squared_norm_is_told_everywhere(tmp_path):
    """Noise of 0.8 of the norm is 64 % of the squared norm; of 0.7 it is 49 %, which is not told."""
    plan = plan_of(private(0.5))
    noise, start = added_noise(plan, D, 6), torch.full((D,), 0.5)
    of_norm = {share: torch.full((D,), noise / share / math.sqrt(D)) for share in (0.7, 0.8)}
    assert noisy_model_words(plan, start, of_norm[0.7], 6) == ""
    assert "mostly noise" in noisy_model_words(plan, start, of_norm[0.8], 6)
    with pytest.warns(EquipoiseNotice, match="mostly noise"):
        result = trained(LARGE)
    page = result.report(tmp_path / "r.html").read_text()
    result.export(tmp_path / "m.safetensors")
    card = (tmp_path / "m.card.md").read_text()
    for text in (str(result.summary()), page, card):
        assert text.count("Noise drowns the sum of updates") == 1


def test_a_small_clip_bound_leaves_the_model(tmp_path):
    with warnings.catch_warnings():
        warnings.simplefilter("error", EquipoiseNotice)
        result = trained(SMALL)
    assert result.privacy.noise == ""
    assert "mostly noise" not in str(result.summary()) + privacy_words(result, D)
    assert "mostly noise" not in result.report(tmp_path / "r.html").read_text()


def test_the_page_tells_of_noise(tmp_path):
    with pytest.warns(EquipoiseNotice, match="mostly noise"):
        page = trained(LARGE).report(tmp_path / "r.html").read_text()
    assert "The model is mostly noise" in page


def test_what_is_said_of_the_sums_depends_on_the_clip_bound():
    """z = 4 and 100 parameters: a norm of 40 × clip, against 10 × clip; in the mean of 10 updates 4 × clip."""
    assert "In a mean of 10 updates that is 0.4 in each round" in drowning_words(4.0, 100, 10, 0.1)
    assert "In a mean of 10 updates that is 4 in each round" in drowning_words(4.0, 100, 10, 1.0)
    assert "learns little" not in drowning_words(4.0, 100, 10, 1.0)


def test_a_private_summary_says_why_it_has_no_trivial_answer():
    said = str(trained(SMALL).summary())
    assert "trivial error: not shown" in said
    assert said.count("eq.evaluate(") == 1
    plain = eq.train(Wide(), DATA, rounds=1, clients_per_round=10, progress=False)
    assert "does not look" not in str(plain.summary())


def test_whole_numbers_are_the_same_settings():
    whole, part = (eq.privacy.DifferentialPrivacy(one, 1e-3, clip=one) for one in (1, 1.0))
    assert repr(whole) == repr(part)
    assert repr(eq.privacy.GaussianMechanism(1, 2)) == repr(eq.privacy.GaussianMechanism(1.0, 2.0))
