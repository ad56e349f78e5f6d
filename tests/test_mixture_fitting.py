"""Maximum-likelihood mixtures of representations.

Every test names its oracle: the truth the data were drawn from, scikit-learn, closed form, or the
documented contract (a density, finite with finite gradient, whatever a network puts out).
"""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from sklearn.mixture import GaussianMixture as SklearnMixture

from mass_jax.gaussian_mixture import GaussianMixture, log_prob
from mass_jax.mixture_fitting import fit_class_mixtures

float64_only = pytest.mark.parametrize("tolerance", ["float64"], indirect=True)
densities = jax.jit(log_prob)
density_gradient = jax.jit(jax.grad(lambda mixture, z: log_prob(mixture, z).mean(), (0, 1)))


def blobs(num_per_class=300, seed=0):
    """Two classes of two well-separated Gaussians in the plane, and the truth."""
    rng = np.random.default_rng(seed)
    means = np.asarray([[[0.0, 0.0], [12.0, 0.0]], [[0.0, 12.0], [12.0, 12.0]]])
    factors = np.asarray([[[1.0, 0.0], [0.5, 1.0]], [[0.5, 0.0], [-0.3, 2.0]]])
    weights = np.asarray([0.3, 0.7])
    labels = np.repeat([0, 1], num_per_class)
    which = rng.choice(2, p=weights, size=2 * num_per_class)
    noise = rng.normal(size=(2 * num_per_class, 2))
    points = means[labels, which] + np.einsum("nij,nj->ni", factors[which], noise)
    truth = GaussianMixture(
        jnp.log(jnp.asarray(np.stack([weights, weights]))),
        jnp.asarray(means),
        jnp.asarray(np.stack([factors, factors])),
    )
    return points, labels, truth


def mean_log_likelihood(mixture, points, labels):
    return float(jnp.mean(densities(mixture, jnp.asarray(points))[np.arange(len(labels)), labels]))


def assert_density(mixture, points, shape):
    """Finite log-densities and gradients at the points and between and around them."""
    num_classes, num_components, dim = shape
    assert mixture.logits.shape == (num_classes, num_components)
    assert mixture.means.shape == shape
    assert mixture.scale_tril.shape == (*shape, dim)
    rng = np.random.default_rng(0)
    spread = np.std(points) or 1.0
    around = points[:8] + spread * rng.normal(size=points[:8].shape)
    z = jnp.asarray(np.concatenate([points[:8], around, points[:8] + 10 * spread]))
    assert np.isfinite(densities(mixture, z)).all()
    for leaf in jax.tree.leaves(density_gradient(mixture, z)):
        assert np.isfinite(leaf).all()


# --- Against the truth and scikit-learn --------------------------------------------


def test_recovers_a_known_mixture(tolerance):
    """Oracle: the truth. The maximum of the likelihood on the data is at least the truth's.

    Held-out data lose about (parameters / 2) / N = 11 / 600 nats; a tenth is ample.
    """
    points, labels, truth = blobs()
    fitted = fit_class_mixtures(points, labels, num_classes=2, num_components=2)
    assert fitted.means.dtype == truth.means.dtype
    slack = 1e-3  # expectation maximisation stops at a change of 1e-3 (scikit-learn's tol)
    on_train = mean_log_likelihood(fitted, points, labels)
    assert on_train >= mean_log_likelihood(truth, points, labels) - slack
    fresh, fresh_labels, _ = blobs(seed=1)
    on_fresh = mean_log_likelihood(fitted, fresh, fresh_labels)
    assert on_fresh >= mean_log_likelihood(truth, fresh, fresh_labels) - 0.1
    for k in range(2):
        # The mean of 90 or more points has a standard error below 2.1 / sqrt(90) = 0.22.
        order = np.argsort(np.asarray(fitted.means[k, :, 0]))
        np.testing.assert_allclose(fitted.means[k][order], truth.means[k], atol=4 * 0.22)
        # And a share of 300 points one below sqrt(0.21 / 300) = 0.027.
        weights = np.asarray(jax.nn.softmax(fitted.logits[k]))[order]
        np.testing.assert_allclose(weights, [0.3, 0.7], atol=4 * 0.027)


@float64_only
@pytest.mark.parametrize(("scale", "shift"), [(1.0, 0.0), (1e6, 0.0), (1e-6, 0.0), (1.0, 1e3)])
def test_agrees_with_scikit_learn_on_one_class(tolerance, scale, shift):
    """Oracle: scikit-learn fitted directly to points of unit spread, then moved.

    ``log q(s z + t) = log q(z) - R log s``: the fit is equivariant to scale and shift.
    """
    points = blobs()[0]
    unit = (points - points.mean(axis=0)) / np.sqrt(points.var(axis=0).mean())
    labels = np.zeros(len(points), int)
    fitted = fit_class_mixtures(scale * unit + shift, labels, 1, 4, max_iterations=200)
    oracle = SklearnMixture(4, reg_covar=1e-6, max_iter=200, random_state=0).fit(unit)
    expected = oracle.score_samples(unit) - 2 * np.log(scale)
    actual = densities(fitted, jnp.asarray(scale * unit + shift))[:, 0]
    np.testing.assert_allclose(actual, expected, rtol=1e-6, atol=1e-6)


@float64_only
def test_one_component_is_the_sample_gaussian(tolerance):
    """Oracle: closed form, sample mean and (biased) covariance plus the ridge."""
    points, labels, _ = blobs()
    fitted = fit_class_mixtures(points, labels, 2, 1, relative_floor=1e-3)
    ridge = 1e-3 * points.var(axis=0).mean() * np.eye(2)
    for k in range(2):
        own, factor = points[labels == k], np.asarray(fitted.scale_tril[k, 0])
        np.testing.assert_allclose(fitted.means[k, 0], own.mean(axis=0))
        np.testing.assert_allclose(factor @ factor.T, np.cov(own.T, bias=True) + ridge)


# --- Too few points ----------------------------------------------------------------


@pytest.mark.parametrize("num_points", [0, 1, 2, 3])
def test_class_with_few_points(tolerance, num_points):
    """Oracle: the documented contract; as many components as distinct points, at most three."""
    rng = np.random.default_rng(0)
    points = rng.normal(size=(40 + num_points, 3))
    labels = np.r_[np.zeros(40, int), np.ones(num_points, int)]
    mixture = fit_class_mixtures(points, labels, num_classes=2, num_components=3)
    assert_density(mixture, points, (2, 3, 3))
    distinct = np.unique(np.asarray(mixture.means[1]), axis=0)
    assert len(distinct) == max(1, num_points)
    np.testing.assert_allclose(jax.nn.softmax(mixture.logits[1]).sum(), 1.0, rtol=1e-5)
    if num_points > 0:  # each point its own component: the density has a peak at every one
        own = points[40:]
        np.testing.assert_allclose(np.sort(distinct, axis=0), np.sort(own, axis=0), atol=1e-4)
        peaks = np.asarray(densities(mixture, jnp.asarray(own))[:, 1])
        assert (peaks > np.asarray(densities(mixture, jnp.asarray(own + 0.1))[:, 1])).all()


@float64_only
def test_class_without_points_is_the_gaussian_of_all(tolerance):
    """Oracle: closed form, mean and (biased) covariance of all points, plus the ridge."""
    points, labels, _ = blobs()
    mixture = fit_class_mixtures(points, labels, num_classes=3, num_components=2)
    factor = np.asarray(mixture.scale_tril[2, 0])
    ridge = 1e-6 * points.var(axis=0).mean() * np.eye(2)
    np.testing.assert_allclose(mixture.means[2, 0], points.mean(axis=0))
    np.testing.assert_allclose(factor @ factor.T, np.cov(points.T, bias=True) + ridge)


@pytest.mark.parametrize("distance", [0.01, 3.0])
def test_components_without_points_have_no_weight(distance):
    """Oracle: invariance; a class of one point has the same density for any number of components.

    ``distance`` is from that point, in units of the spread of all points.
    """
    points = np.random.default_rng(0).normal(size=(40, 2))
    labels = np.r_[np.zeros(39, int), 1]
    z = jnp.asarray(points[39:] + distance)
    one, three = (
        densities(fit_class_mixtures(points, labels, 2, num_components), z)[0, 1]
        for num_components in (1, 3)
    )
    np.testing.assert_allclose(three, one, rtol=1e-3)


# --- Degenerate outputs ------------------------------------------------------------


def degenerate(name, points):
    line = np.outer(points[:, 0], [1.0, -2.0, 0.5])
    return {
        "duplicates": np.repeat(points[:5], len(points) // 5, axis=0),
        "constant 1": np.full_like(points, 1.0),
        "constant 0.1": np.full_like(points, 0.1),  # whose mean is not exactly 0.1
        "zero": np.zeros_like(points),
        "collinear": line,
        "one constant coordinate": points * np.asarray([1.0, 0.0, 1.0]),
        "huge": 1e6 * points,
        "tiny": 1e-6 * points,
        "huge collinear": 1e6 * line,
        "tiny collinear": 1e-6 * line,
        "far away": points + 1e4,
        "constant classes": np.repeat(points[:2], len(points) // 2, axis=0),
    }[name]


@pytest.mark.parametrize(
    "name",
    [
        "duplicates",
        "constant 1",
        "constant 0.1",
        "zero",
        "collinear",
        "one constant coordinate",
        "huge",
        "tiny",
        "huge collinear",
        "tiny collinear",
        "far away",
        "constant classes",
    ],
)
def test_degenerate_outputs_have_a_density(tolerance, name):
    """Oracle: the documented contract."""
    points = degenerate(name, np.random.default_rng(0).normal(size=(60, 3)))
    labels = np.repeat([0, 1], 30)
    mixture = fit_class_mixtures(points, labels, num_classes=2, num_components=4)
    assert_density(mixture, points, (2, 4, 3))


@pytest.mark.parametrize("value", [0.0, 0.1, 0.3, -7.77])
def test_constant_outputs_get_the_unit_scale(value):
    """Oracle: closed form; without any variance the floor is relative to one.

    The covariance is ``1e-6 I``, so the log-density at the point is
    ``-R / 2 log(2 pi 1e-6)``, whichever the constant.
    """
    points = np.full((10, 3), value)
    mixture = fit_class_mixtures(points, np.zeros(10, int), num_classes=1, num_components=2)
    expected = -1.5 * np.log(2 * np.pi * 1e-6)
    np.testing.assert_allclose(densities(mixture, jnp.asarray(points))[:, 0], expected, rtol=1e-4)


# --- Arguments ---------------------------------------------------------------------


@pytest.mark.parametrize(
    ("points", "labels", "message"),
    [
        (np.zeros((4, 2)), [0, 1, 2, 0], "labels run from 0 to 2; need 0 to 1"),
        (np.zeros((4, 2)), [0, -1, 1, 0], "labels run from -1 to 1; need 0 to 1"),
        (np.asarray([[0.0, np.nan], [0.0, 1.0]]), [0, 1], "NaN or infinity"),
        (np.asarray([[0.0, np.inf], [0.0, 1.0]]), [0, 1], "NaN or infinity"),
        (np.zeros((0, 2)), [], "no representations"),
        (np.zeros((4, 2)), [0, 1], r"\(4, 2\) and labels \(2,\): need \(N, R\) and \(N,\)"),
        (np.zeros((4, 2)), [[0], [1], [0], [1]], "need"),
        (np.zeros(4), [0, 1, 0, 1], "need"),
        (np.zeros((4, 2, 1)), [0, 1, 0, 1], "need"),
    ],
)
def test_bad_arguments_are_refused(points, labels, message):
    """Oracle: the documented contract."""
    with pytest.raises(ValueError, match=message):
        fit_class_mixtures(points, np.asarray(labels), num_classes=2, num_components=1)


def test_fractional_labels_are_refused():
    """Oracle: the documented contract, integers: a label that is no class must not vanish."""
    points = np.random.default_rng(0).normal(size=(4, 2))
    with pytest.raises((ValueError, TypeError)):
        fit_class_mixtures(points, np.asarray([0.0, 0.5, 1.0, 0.5]), 2, 1)


def test_deterministic_by_seed():
    """Oracle: invariance; the same seed gives the same bits, another seed another start."""
    points = np.random.default_rng(0).normal(size=(60, 3))  # one blob, six components: many optima
    labels = np.zeros(60, int)
    first, again, other = (fit_class_mixtures(points, labels, 1, 6, seed=s) for s in (3, 3, 4))
    for one, same in zip(first, again, strict=True):
        np.testing.assert_array_equal(one, same)
    assert not np.allclose(np.sort(first.means, axis=1), np.sort(other.means, axis=1))
