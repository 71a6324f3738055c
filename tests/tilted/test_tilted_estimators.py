"""The estimators: scikit-learn's own checks, equality with its models at tilt 0, and what tilts are for."""

import pickle

import numpy as np
import pytest
import sklearn
import torch
from scipy.optimize import linprog
from sklearn.base import clone
from sklearn.datasets import make_classification
from sklearn.decomposition import PCA
from sklearn.exceptions import ConvergenceWarning
from sklearn.linear_model import LinearRegression, LogisticRegression, Ridge
from sklearn.model_selection import GridSearchCV, cross_val_score
from sklearn.pipeline import make_pipeline
from sklearn.preprocessing import StandardScaler
from sklearn.svm import LinearSVC
from sklearn.utils.estimator_checks import parametrize_with_checks

from equipoise.errors import InvalidParameter
from equipoise.tilted import (
    FairPCA,
    TiltedLinearRegression,
    TiltedLogisticRegression,
    TiltedSVC,
    convex,
    superquantile_loss,
    tilted_loss,
)

LINEAR = [TiltedLinearRegression, TiltedLogisticRegression, TiltedSVC]
ALL = [*LINEAR, FairPCA]


@parametrize_with_checks(
    [
        TiltedLinearRegression(),
        TiltedLinearRegression(-0.5),
        TiltedLinearRegression(risk="superquantile"),
        TiltedLogisticRegression(),
        TiltedLogisticRegression(1.0),
        TiltedLogisticRegression(-0.5),
        TiltedSVC(),
        TiltedSVC(1.0),
        FairPCA(),
        FairPCA(1, tilt=0.1),
    ]
)
def test_scikit_learn_checks(estimator, check):
    check(estimator)


@pytest.fixture(scope="module")
def regression():
    rng = np.random.default_rng(0)
    x = rng.normal(size=(300, 5)) * [1.0, 10.0, 0.1, 1.0, 5.0] + 3
    return x, x @ rng.normal(size=5) + rng.normal(size=300)


@pytest.fixture(scope="module")
def classes():
    x, y = make_classification(400, 8, n_informative=5, n_classes=3, flip_y=0.1, random_state=0)
    return x * np.linspace(0.1, 10, 8), y


@pytest.mark.parametrize("intercept", [True, False])
def test_tilt_zero_is_least_squares_and_ridge(regression, intercept):
    x, y = regression
    weight = np.random.default_rng(1).integers(0, 4, len(y)).astype(float)
    found = TiltedLinearRegression(fit_intercept=intercept).fit(x, y, weight)
    plain = LinearRegression(fit_intercept=intercept).fit(x, y, weight)
    np.testing.assert_allclose(found.coef_, plain.coef_, rtol=1e-7)
    assert found.intercept_ == pytest.approx(plain.intercept_, abs=1e-7)
    found = TiltedLinearRegression(alpha=0.5, fit_intercept=intercept, tol=1e-9).fit(x, y)
    np.testing.assert_allclose(found.coef_, Ridge(0.25 * len(y), fit_intercept=intercept).fit(x, y).coef_, rtol=1e-6)


@pytest.mark.parametrize("intercept", [True, False])
@pytest.mark.parametrize("binary", [True, False])
def test_tilt_zero_is_logistic_regression(classes, binary, intercept):
    x, y = classes
    y = (y > 0) if binary else y
    found = TiltedLogisticRegression(alpha=1e-2, tol=1e-9, fit_intercept=intercept).fit(x, y)
    plain = LogisticRegression(C=1 / (1e-2 * len(y)), tol=1e-9, max_iter=10000, fit_intercept=intercept).fit(x, y)
    np.testing.assert_allclose(found.predict_proba(x), plain.predict_proba(x), atol=1e-5)
    np.testing.assert_allclose(found.coef_, plain.coef_, atol=1e-5)
    np.testing.assert_allclose(found.predict_proba(x).sum(1), 1.0)


def test_tilt_zero_is_the_linear_support_vector_classifier(classes):
    x, y = classes
    found = TiltedSVC(alpha=1e-2, fit_intercept=False, tol=1e-9).fit(x, y)
    plain = LinearSVC(C=1 / (1e-2 * len(y)), dual=False, fit_intercept=False, tol=1e-10, max_iter=10000).fit(x, y)
    np.testing.assert_allclose(found.coef_, plain.coef_, atol=1e-5)
    hinge = TiltedSVC(alpha=1e-2, loss="hinge").fit(x, y)
    assert hinge.score(x, y) == pytest.approx(found.score(x, y), abs=0.05)


def test_tilt_zero_is_principal_component_analysis(regression):
    x, _ = regression
    found, plain = FairPCA(3).fit(x), PCA(3).fit(x)
    np.testing.assert_allclose(np.abs(found.components_ @ plain.components_.T), np.eye(3), atol=1e-9)
    np.testing.assert_allclose(found.explained_variance_, plain.explained_variance_ * (len(x) - 1) / len(x))
    np.testing.assert_allclose(found.inverse_transform(found.transform(x)), plain.inverse_transform(plain.transform(x)))


def losses_of(model, x, y):
    """Per-example losses as the loss functions of PyTorch see them, and the penalty."""
    if isinstance(model, TiltedLinearRegression):
        losses = torch.from_numpy((model.predict(x) - y) ** 2)
    elif isinstance(model, TiltedLogisticRegression):
        losses = torch.from_numpy(-model.predict_log_proba(x)[np.arange(len(y)), np.searchsorted(model.classes_, y)])
    else:
        losses = torch.from_numpy(np.maximum(0, 1 - (2 * (y == model.classes_[1]) - 1) * model.decision_function(x)) ** 2)
    return losses, model.alpha / 2 * float(np.square(model.coef_).sum())


@pytest.mark.parametrize("estimator", LINEAR)
@pytest.mark.parametrize(
    "options",
    [{"tilt": -1.0}, {"tilt": 2.0}, {"tilt": 100.0}, {"tilt": 2.0, "inner_tilt": -1.0}, {"risk": "superquantile", "tail": 0.2}],
    ids=str,
)
@pytest.mark.parametrize("grouped", [False, True])
def test_solutions_are_stationary(regression, classes, estimator, options, grouped):
    # No small step in any direction lowers the objective, computed with the public loss functions.
    x, y = regression if estimator is TiltedLinearRegression else (classes[0], (classes[1] > 0).astype(int))
    x = (x - x.mean(0)) / x.std(0)
    groups = np.arange(len(y)) % 3 if grouped else None
    model = estimator(alpha=1e-2, **options).fit(x, y, groups=groups)
    inner = {"inner_tilt": model.inner_tilt if grouped else ()}

    def value():
        losses, penalty = losses_of(model, x, y)
        if model.risk == "superquantile":
            return float(superquantile_loss(losses, model.tail, groups, **inner)) + penalty
        return float(tilted_loss(losses, model.tilt, groups, **inner)) + penalty

    best = value()
    assert model.objective_ == pytest.approx(best, rel=1e-9)
    rng = np.random.default_rng(0)
    coef = model.coef_.copy()
    for _ in range(10):
        model.coef_ = coef + 1e-2 * rng.normal(size=coef.shape)
        assert value() > best - 1e-8


def bounds_of_the_optimum(model, x, y, groups):
    """The superquantile objective at a model without an intercept, and what no model can be below, by weak duality.

    For any weights π of the groups that sum to 1 and are at most their cap, the optimum is at least the least value of
    Σ π_g F_g(w) + (α/2)‖w‖². That function is α-strongly convex: at most ‖slope‖²/(2α) below its value at the model. A linear
    program finds the weights that bound best.
    """
    w = np.ravel(model.coef_)
    s, z = 2.0 * y - 1, x @ w
    if isinstance(model, TiltedLinearRegression):
        losses, slopes = (z - y) ** 2, 2 * (z - y)
    elif isinstance(model, TiltedLogisticRegression):
        losses, slopes = np.logaddexp(0, -s * z), -s / (1 + np.exp(s * z))
    else:
        losses, slopes = np.maximum(0, 1 - s * z) ** 2, -2 * s * np.maximum(0, 1 - s * z)
    shares = np.eye(len(y)) if groups is None else (groups == np.unique(groups)[:, None]).astype(float)
    masses, shares = shares.sum(1) / len(y), shares / shares.sum(1, keepdims=True)
    tops, jacobian, caps = shares @ losses, shares @ (slopes[:, None] * x), masses / model.tail
    penalty, rest, worst = model.alpha / 2 * w @ w, 1.0, 0.0
    for g in np.argsort(-tops):
        part = min(rest, caps[g])
        rest, worst = rest - part, worst + part * tops[g]
    slack, bounds = np.ones((len(w), 1)), []
    for price in (1e-3, 1e-1, 10.0, 1e3):  # of a slope: every choice of weights is a bound
        found = linprog(
            np.append(-tops, price),
            A_ub=np.block([[jacobian.T, -slack], [-jacobian.T, -slack]]),
            b_ub=np.concatenate([-model.alpha * w, model.alpha * w]),
            A_eq=np.append(np.ones(len(tops)), 0)[None],
            b_eq=[1.0],
            bounds=[*((0, cap) for cap in caps), (0, None)],
            options={"primal_feasibility_tolerance": 1e-10, "dual_feasibility_tolerance": 1e-10},
        ).x[:-1]
        weights = np.clip(found, 0, caps)
        room = caps - weights if weights.sum() < 1 else weights
        weights += room * (1 - weights.sum()) / room.sum()
        slope = jacobian.T @ weights + model.alpha * w
        bounds.append(weights @ tops + penalty - slope @ slope / (2 * model.alpha))
    return worst + penalty, max(bounds)


@pytest.mark.parametrize("estimator", LINEAR)
@pytest.mark.parametrize("tail", [0.05, 0.3, 0.8])
@pytest.mark.parametrize("grouped", [False, True], ids=["examples", "groups"])
@pytest.mark.parametrize(("small", "tol"), [(True, 1e-6), (True, 1e-9), (False, 1e-5), (False, 1e-6), (False, 1e-8)])
def test_superquantiles_are_at_their_optimum_up_to_the_tolerance(estimator, tail, grouped, small, tol, monkeypatch):
    monkeypatch.setattr(convex, "SMALL", 10**6 if small else 0)  # large data are solved by L-BFGS alone
    rng = np.random.default_rng(3)
    x = rng.normal(size=(60, 4)) + 0.3
    y = x @ rng.normal(size=4) + rng.normal(size=60)
    y = y if estimator is TiltedLinearRegression else (y > 0).astype(int)
    groups = np.arange(60) % 7 if grouped else None
    model = estimator(risk="superquantile", tail=tail, alpha=0.1, fit_intercept=False, tol=tol).fit(x, y, groups=groups)
    value, least = bounds_of_the_optimum(model, x, y, groups)
    assert model.objective_ == pytest.approx(value, rel=1e-12)
    assert -1e-9 <= value - least <= 1.01 * tol * value


def test_what_a_superquantile_minimises_is_what_it_says(regression):
    x, _ = regression
    groups = np.arange(len(x)) % 5
    model = FairPCA(2, risk="superquantile", tail=0.5).fit(x, groups=groups)
    assert model.objective_ == pytest.approx(np.sort(model.group_losses_)[::-1] @ [0.4, 0.4, 0.2, 0, 0], rel=1e-9)


def test_the_whole_solution_in_one_dimension():
    # A tilted mean: a model of the intercept alone, against a fine grid.
    y = np.array([0.0, 0.2, 0.5, 3.0])
    grid = torch.linspace(-1, 4, 500_001, dtype=torch.float64)
    for tilt in (-5.0, -0.5, 0.7, 20.0):
        found = TiltedLinearRegression(tilt).fit(np.zeros((4, 1)), y).intercept_
        values = torch.logsumexp(tilt * (grid[:, None] - torch.from_numpy(y)).square(), 1) / tilt
        assert found == pytest.approx(float(grid[values.argmin()]), abs=1e-4)


def test_negative_tilts_ignore_outliers(regression):
    x, y = regression
    bad = y.copy()
    bad[:60] = 100 + 30 * np.random.default_rng(2).normal(size=60)
    clean = LinearRegression().fit(x[60:], y[60:])
    robust = TiltedLinearRegression(-2.0).fit(x, bad)
    assert np.abs(robust.predict(x) - clean.predict(x)).max() < 1.0  # the noise has standard deviation 1
    # The setting of Table 7.3: features × 100 and targets × 10,000, whose losses are 10¹² times the others'.
    wild_x, wild = x.copy(), y.copy()
    wild_x[:15] *= 100
    wild[:15] *= 10_000
    robust = TiltedLinearRegression(-2.0).fit(wild_x, wild)
    assert np.abs(robust.predict(x) - clean.predict(x)).max() < 1.0


def test_groups_within_groups_and_bad_annotators():
    # Five annotators, two of whom answer at random, and mostly 1.
    rng = np.random.default_rng(3)
    x = rng.normal(size=(1000, 5))
    y = (x @ [1.0, -1, 2, 0, 0.5] + 0.5 * rng.normal(size=1000) > 0).astype(int)
    annotator = np.arange(1000) % 5
    given = np.where(annotator < 2, rng.random(1000) < 0.9, y).astype(int)
    plain = TiltedLogisticRegression(alpha=1e-3).fit(x, given).score(x, y)
    robust = TiltedLogisticRegression(-20.0, alpha=1e-3).fit(x, given, groups=annotator).score(x, y)
    genie = TiltedLogisticRegression(alpha=1e-3).fit(x[annotator > 1], y[annotator > 1]).score(x, y)
    assert robust > plain + 0.1
    assert robust == pytest.approx(genie, abs=0.02)
    deep = TiltedLogisticRegression(-20.0, inner_tilt=(0.5, 0.0), alpha=1e-3)
    both = deep.fit(x, given, groups=np.stack([annotator, given], 1))
    other = clone(deep).fit(x, given, groups=[annotator, given])
    np.testing.assert_array_equal(both.coef_, other.coef_)
    assert both.score(x, y) > plain + 0.1


def test_a_tilt_between_classes_serves_the_rare_one():
    x, y = make_classification(1000, 6, weights=[0.95], class_sep=0.7, flip_y=0.0, random_state=4)
    plain = TiltedLogisticRegression(0.0).fit(x, y)
    fair = TiltedLogisticRegression(50.0).fit(x, y, groups=y)
    rare = y == 1
    assert fair.score(x[rare], y[rare]) > plain.score(x[rare], y[rare]) + 0.1
    by_class = [float(losses_of(fair, x, y)[0][torch.from_numpy(y == k)].mean()) for k in (0, 1)]
    assert by_class[0] == pytest.approx(by_class[1], rel=0.2)


def test_warm_starts_follow_the_path(regression):
    x, y = regression
    path = TiltedLinearRegression(warm_start=True)
    for tilt in (0.0, -0.25, -0.5, -1.0):
        path.set_params(tilt=tilt).fit(x, y)
    np.testing.assert_allclose(path.coef_, TiltedLinearRegression(-1.0).fit(x, y).coef_, rtol=1e-3, atol=1e-4)
    again = path.fit(x, y)
    assert again.n_iter_ <= 2
    cold = TiltedLinearRegression(-1.0, anneal=False).fit(x, y)
    assert cold.objective_ >= path.objective_ - 1e-6


def fair_data():
    rng = np.random.default_rng(0)
    first = rng.normal(size=(600, 6)) * [3, 2, 1, 0.1, 0.1, 0.1]
    second = rng.normal(size=(100, 6)) * [0.1, 0.1, 0.1, 2, 1.5, 1]
    return np.concatenate([first, second]), np.repeat(["many", "few"], [600, 100])


def min_max_loss(x, groups, rank):
    """The min-max optimum for two groups by its dual: max over λ of the mixture's minimum, an eigenvalue problem."""
    x = x - x.mean(0)
    moments = [x[groups == g].T @ x[groups == g] / (groups == g).sum() for g in np.unique(groups)]
    kept = [np.linalg.eigvalsh(m)[-rank:].sum() for m in moments]

    def dual(share):
        mixture = share * moments[0] + (1 - share) * moments[1]
        return share * kept[0] + (1 - share) * kept[1] - np.linalg.eigvalsh(mixture)[-rank:].sum()

    return max(dual(share) for share in np.linspace(0, 1, 2001))


def test_fair_components():
    x, groups = fair_data()
    plain = FairPCA(2).fit(x, groups=groups)
    mild = FairPCA(2, tilt=1.0).fit(x, groups=groups)
    fair = FairPCA(2, tilt=200.0).fit(x, groups=groups)
    gaps = [abs(np.subtract(*model.group_losses_)) for model in (plain, mild, fair)]
    assert gaps[0] > gaps[1] > gaps[2]
    assert fair.group_losses_.max() == pytest.approx(min_max_loss(x, groups, 2), rel=5e-3)
    np.testing.assert_allclose(fair.components_ @ fair.components_.T, np.eye(2), atol=1e-10)
    # The loss is the excess over each group's own best approximation.
    center = x - x.mean(0)
    few = center[groups == "few"]
    own = few @ np.linalg.svd(few)[2][:2].T
    excess = np.square(few - few @ fair.components_.T @ fair.components_).sum() - (np.square(few).sum() - np.square(own).sum())
    assert fair.group_losses_[0] == pytest.approx(excess / len(few))
    tail = FairPCA(2, risk="superquantile", tail=0.1).fit(x, groups=groups)
    assert tail.group_losses_.max() == pytest.approx(min_max_loss(x, groups, 2), rel=2e-2)


def test_components_that_ignore_outliers():
    rng = np.random.default_rng(1)
    x = rng.normal(size=(200, 4)) * [2, 0.1, 0.1, 0.1]
    x[:10] += rng.normal(size=(10, 4)) * [0, 20, 0, 0]
    assert abs(FairPCA(1).fit(x).components_[0, 0]) < 0.5
    assert abs(FairPCA(1, tilt=-2.0).fit(x).components_[0, 0]) > 0.99


@pytest.mark.parametrize("estimator", ALL)
def test_cloning_and_pickling(classes, estimator):
    x, y = classes
    model = estimator(tilt=0.5).fit(x, y, groups=y) if estimator is not FairPCA else estimator(2, tilt=0.5).fit(x, groups=y)
    again = pickle.loads(pickle.dumps(model))  # noqa: S301
    method = "transform" if estimator is FairPCA else "predict"
    np.testing.assert_array_equal(getattr(again, method)(x), getattr(model, method)(x))
    assert clone(model).get_params() == model.get_params()


def test_pipelines_grids_and_output_frames(classes):
    x, y = classes
    pipe = make_pipeline(StandardScaler(), FairPCA(3), TiltedLogisticRegression())
    grid = GridSearchCV(pipe, {"fairpca__tilt": [0.0, 0.1], "tiltedlogisticregression__tilt": [-0.5, 0.0]}, cv=2)
    assert grid.fit(x, y).best_score_ > 0.5
    assert len(cross_val_score(TiltedSVC(1.0), x, y, cv=3)) == 3
    pd = pytest.importorskip("pandas")
    frame = FairPCA(2).set_output(transform="pandas").fit(x).transform(x)
    assert isinstance(frame, pd.DataFrame)
    assert list(frame.columns) == ["fairpca0", "fairpca1"]


def test_groups_reach_the_estimator_by_metadata_routing(classes):
    x, y = classes
    with sklearn.config_context(enable_metadata_routing=True):
        model = (
            TiltedLogisticRegression(5.0).set_fit_request(groups=True, sample_weight=True).set_score_request(sample_weight=True)
        )
        pipe = make_pipeline(StandardScaler().set_fit_request(sample_weight=False), model)
        grid = GridSearchCV(pipe, {"tiltedlogisticregression__alpha": [1e-3, 1e-1]}, cv=2)
        grid.fit(x, y, groups=y, sample_weight=np.ones(len(y)))
    scaled = StandardScaler().fit_transform(x)
    alone = TiltedLogisticRegression(5.0, alpha=grid.best_params_["tiltedlogisticregression__alpha"]).fit(scaled, y, groups=y)
    np.testing.assert_allclose(grid.best_estimator_[-1].coef_, alone.coef_, atol=1e-6)
    # Columns of labels are cut into folds like rows of data.
    deep = GridSearchCV(TiltedLogisticRegression(1.0, inner_tilt=(0.5, 0.0)), {"alpha": [1e-2]}, cv=2)
    with sklearn.config_context(enable_metadata_routing=True):
        deep.estimator.set_fit_request(groups=True)
        deep.fit(x, y, groups=np.stack([np.arange(len(y)) % 2, y], 1))
    assert deep.best_estimator_.n_features_in_ == 8


def test_the_same_on_other_scales(regression):
    # A tilt has the unit of 1/loss: scaling targets by 1000 and the tilt by 10⁻⁶ is the same problem.
    x, y = regression
    one = TiltedLinearRegression(-1.0).fit(x, y)
    other = TiltedLinearRegression(-1e-6).fit(1e-3 * x + 7, 1e3 * y)
    np.testing.assert_allclose(other.predict(1e-3 * x + 7), 1e3 * one.predict(x), rtol=1e-4, atol=1e-2)


def test_many_and_constant_columns():
    rng = np.random.default_rng(0)
    x = np.hstack([rng.normal(size=(40, 600)), np.ones((40, 1))])
    y = rng.normal(size=40)
    assert TiltedLinearRegression(-1.0).fit(x, y).score(x, y) > 0.999
    constant = TiltedLinearRegression().fit(np.ones((5, 2)), np.arange(5.0))
    assert constant.intercept_ + constant.coef_.sum() == pytest.approx(2.0)
    assert TiltedLinearRegression(-2.0).fit(x[:, :3], np.full(40, 7.0)).predict(x[:1, :3])[0] == pytest.approx(7.0)


def test_too_few_iterations_are_told(classes):
    x, y = classes
    with pytest.warns(ConvergenceWarning, match="max_iter=1 iterations"):
        TiltedLogisticRegression(max_iter=1).fit(x, y)
    with pytest.warns(ConvergenceWarning, match="max_iter=1 iterations"):
        FairPCA(2, tilt=1.0, max_iter=1).fit(x, groups=y)


@pytest.mark.parametrize(
    ("model", "words"),
    [
        (TiltedLinearRegression(float("nan")), "tilt must be a finite number"),
        (TiltedLinearRegression(risk="cvar"), 'risk must be "tilted" or "superquantile"'),
        (TiltedLinearRegression(1.0, risk="superquantile"), "tilt must be 0 with risk"),
        (TiltedLinearRegression(risk="superquantile", tail=0.0), "tail must lie in"),
        (TiltedLinearRegression(alpha=-1.0), "alpha must be a number ≥ 0"),
        (TiltedLinearRegression(tol=0.0), "tol must be a positive number"),
        (TiltedLinearRegression(max_iter=0), "max_iter must be a whole number"),
        (TiltedSVC(loss="log"), "loss must be"),
        (FairPCA(9), "n_components must be None or a whole number in 1"),
    ],
    ids=str,
)
def test_mistakes_are_named(classes, model, words):
    with pytest.raises(InvalidParameter, match=words):
        model.fit(*classes)


def test_bad_groups_and_weights_are_named(classes):
    x, y = classes
    with pytest.raises(InvalidParameter, match="groups must have one label for each of the 400"):
        TiltedLogisticRegression().fit(x, y, groups=[1, 2])
    for weights in (np.zeros(len(y)), -np.ones(len(y))):
        with pytest.raises(ValueError, match=r"[Ww]eight"):
            TiltedLogisticRegression().fit(x, y, sample_weight=weights)


@pytest.mark.parametrize("options", [{"tilt": 3.0, "inner_tilt": -0.5}, {"risk": "superquantile", "tail": 0.3}], ids=str)
def test_weights_are_repetitions_inside_groups(classes, options):
    x, y = classes
    x, groups = StandardScaler().fit_transform(x), np.arange(len(y)) % 4
    counts = np.random.default_rng(0).integers(0, 3, len(y))
    weighted = TiltedLogisticRegression(alpha=1e-2, tol=1e-8, **options).fit(x, y, sample_weight=counts, groups=groups)
    rows = np.repeat(np.arange(len(y)), counts)
    repeated = TiltedLogisticRegression(alpha=1e-2, tol=1e-8, **options).fit(x[rows], y[rows], groups=groups[rows])
    np.testing.assert_allclose(weighted.coef_, repeated.coef_, atol=1e-4)
    fair = [
        FairPCA(2, tilt=1.0).fit(x, sample_weight=counts, groups=groups),
        FairPCA(2, tilt=1.0).fit(x[rows], groups=groups[rows]),
    ]
    np.testing.assert_allclose(fair[0].group_losses_, fair[1].group_losses_, atol=1e-5)


def test_labels_from_tables(classes):
    pd = pytest.importorskip("pandas")
    x, y = classes
    names = np.array(["a", "b", "c"])[y]
    plain = TiltedLogisticRegression(2.0).fit(x, y, groups=names).coef_
    for groups in (
        pd.Series(names),
        pd.Series(names, dtype="category"),
        list(names),
        torch.from_numpy(y),
        pd.DataFrame({"g": names}),
    ):
        np.testing.assert_array_equal(TiltedLogisticRegression(2.0).fit(x, y, groups=groups).coef_, plain)
        TiltedLogisticRegression(2.0).fit(x, y, sample_weight=np.arange(len(y)), groups=groups)
