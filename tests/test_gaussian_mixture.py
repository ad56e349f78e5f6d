"""Mixtures of Gaussians.

Every test names its oracle: SciPy, scikit-learn, closed form, finite differences, numerical
integration, or invariance.
"""

import subprocess
import sys
from functools import partial

import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
import scipy.stats
from jax.test_util import check_grads
from scipy.special import logsumexp, softmax
from sklearn.mixture import GaussianMixture as SklearnMixture

from mass_jax.gaussian_mixture import (
    INITIALISATIONS,
    GaussianMixture,
    log_marginal,
    log_posterior,
    log_prob,
    sample,
)

LEADS = [(), (3,), (2, 3)]  # one mixture, one per class, any leading axes
float64_only = pytest.mark.parametrize("tolerance", ["float64"], indirect=True)
densities = jax.jit(log_prob)
INITIALISE = {n: jax.jit(f, static_argnums=(1, 2, 3)) for n, f in INITIALISATIONS.items()}


def random_mixture(lead=(3,), components=2, dim=3, seed=0):
    """Well-conditioned factors, in JAX's default dtype."""
    rng = np.random.default_rng(seed)
    shape = (*lead, components, dim)
    below = 0.5 * np.tril(rng.normal(size=(*shape, dim)), -1)
    diagonal = rng.uniform(0.5, 1.5, shape)[..., None] * np.eye(dim)
    return GaussianMixture(
        logits=jnp.asarray(rng.normal(size=shape[:-1])),
        means=jnp.asarray(2.0 * rng.normal(size=shape)),
        scale_tril=jnp.asarray(below + diagonal),
    )


def random_points(count=5, dim=3, seed=1):
    return jnp.asarray(2.0 * np.random.default_rng(seed).normal(size=(count, dim)))


def in_float64(mixture):
    """Logits, means and covariances as NumPy arrays, mixtures along one leading axis."""
    logits, means, factors = (np.asarray(part, np.float64) for part in mixture)
    components, dim = means.shape[-2:]
    factors = factors.reshape(-1, components, dim, dim)
    return (
        logits.reshape(-1, components),
        means.reshape(-1, components, dim),
        factors @ np.swapaxes(factors, -1, -2),
    )


def scipy_log_prob(mixture, z):
    """``[B, ...]`` by SciPy's normal densities, one component at a time."""
    columns = []
    for logits, means, covariances in zip(*in_float64(mixture), strict=True):
        log_weights = logits - logsumexp(logits)
        components = [
            log_weight + scipy.stats.multivariate_normal(mean, covariance).logpdf(np.float64(z))
            for log_weight, mean, covariance in zip(log_weights, means, covariances, strict=True)
        ]
        columns.append(logsumexp(components, axis=0))
    return np.stack(columns, axis=-1).reshape(len(z), *mixture.logits.shape[:-1])


# --- log_prob ----------------------------------------------------------------------


@pytest.mark.parametrize("lead", LEADS)
@pytest.mark.parametrize(("components", "dim"), [(2, 3), (1, 1), (4, 2)])
def test_log_prob_agrees_with_scipy(tolerance, lead, components, dim):
    """Oracle: SciPy, with a class axis, without, and with more axes."""
    mixture, z = random_mixture(lead, components, dim), random_points(dim=dim)
    actual = densities(mixture, z)
    assert actual.shape == (5, *lead)
    np.testing.assert_allclose(actual, scipy_log_prob(mixture, z), rtol=tolerance.exact)


def test_log_prob_agrees_with_scikit_learn(tolerance):
    """Oracle: scikit-learn's ``score_samples`` with the same parameters."""
    mixture, z = random_mixture((), components=4), random_points(20)
    logits, means, covariances = (part[0] for part in in_float64(mixture))
    oracle = SklearnMixture(4, covariance_type="full")
    oracle.weights_, oracle.means_, oracle.covariances_ = softmax(logits), means, covariances
    precision_factors = np.linalg.inv(np.linalg.cholesky(covariances))
    oracle.precisions_cholesky_ = np.swapaxes(precision_factors, -1, -2)
    expected = oracle.score_samples(np.float64(z))
    np.testing.assert_allclose(densities(mixture, z), expected, rtol=tolerance.exact)


def flip_a_column(mixture):
    """``L`` with its second column negated: the same ``L L^T``, a negative diagonal entry."""
    return mixture._replace(scale_tril=mixture.scale_tril * np.asarray([1.0, -1.0, 1.0]).reshape(
        (1,) * (mixture.scale_tril.ndim - 1) + (3,)
    ))  # fmt: skip


SAME_DENSITY = {
    "upper triangle": lambda m: m._replace(
        scale_tril=m.scale_tril + np.triu(np.full(m.scale_tril.shape, 7.0), 1)
    ),
    "sign of a column": flip_a_column,
    "constant added to logits": lambda m: m._replace(logits=m.logits + 5.0),
    "order of components": lambda m: jax.tree.map(lambda part: part[:, ::-1], m),
}


@pytest.mark.parametrize("name", SAME_DENSITY)
def test_equivalent_parameters(tolerance, name):
    """Oracle: invariance; these change the parameters, not the distribution."""
    mixture, z = random_mixture(), random_points()
    actual = densities(SAME_DENSITY[name](mixture), z)
    expected = densities(mixture, z)
    np.testing.assert_allclose(actual, expected, rtol=tolerance.exact, atol=tolerance.exact)


def test_nothing_above_the_diagonal_has_a_gradient():
    """Oracle: closed form, zero; and the lower triangle has one."""
    mixture, z = random_mixture(), random_points()
    gradient = jax.jit(jax.grad(lambda m: log_prob(m, z).sum()))(mixture).scale_tril
    assert (np.triu(gradient, 1) == 0.0).all()
    assert (np.abs(np.tril(gradient)).max(axis=(-2, -1)) > 0.0).all()


@float64_only
@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_log_prob_derivatives(tolerance, mode):
    """Oracle: finite differences to second order, of parameters and points; a negative diagonal."""
    arguments = flip_a_column(random_mixture((2,), 2, 3)), random_points(2)
    check_grads(densities, arguments, order=2, modes=[mode], rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize(("dim", "points_per_axis"), [(1, 801), (2, 301)])
def test_density_integrates_to_one(tolerance, dim, points_per_axis):
    """Oracle: numerical integration; the trapezoid rule is exact for such smooth tails.

    Means lie within 8 and standard deviations below 2.5, so [-30, 30] holds all but 1e-17.
    """
    mixture = random_mixture((2,), 3, dim)
    axis, step = np.linspace(-30.0, 30.0, points_per_axis, retstep=True)
    grid = np.stack(np.meshgrid(*[axis] * dim), axis=-1).reshape(-1, dim)
    mass = np.exp(np.float64(densities(mixture, jnp.asarray(grid)))).sum(axis=0) * step**dim
    np.testing.assert_allclose(mass, 1.0, rtol=max(tolerance.exact, 1e-8))


@pytest.mark.parametrize("offset", [1e3, 1e4])
def test_far_from_the_origin_in_float32(offset):
    """Oracle: SciPy in float64 of the same float32 numbers; no cancellation of large means."""
    mixture, z = random_mixture(), random_points()
    mixture = mixture._replace(means=mixture.means + offset)
    actual, expected = densities(mixture, z + offset), scipy_log_prob(mixture, z + offset)
    np.testing.assert_allclose(actual, expected, rtol=1e-4)


@pytest.mark.parametrize("shape", [(5, 2), (5, 4), (3,), (2, 5, 3)])
def test_points_of_wrong_shape_are_refused(shape):
    """Oracle: the documented contract."""
    with pytest.raises(ValueError, match=r"this mixture needs \(batch, 3\)"):
        log_prob(random_mixture(), jnp.zeros(shape))


def test_no_points():
    """Oracle: the documented shape, ``[B, K]`` with ``B = 0``."""
    assert jax.eval_shape(log_prob, random_mixture(), jnp.zeros((0, 3))).shape == (0, 3)


# --- Bayes' rule -------------------------------------------------------------------

PRIORS = {
    "uniform by default": (None, [1 / 3, 1 / 3, 1 / 3]),
    "explicit": (np.log([0.5, 0.3, 0.2]), [0.5, 0.3, 0.2]),
    "unnormalised": (np.log([5.0, 3.0, 2.0]), [0.5, 0.3, 0.2]),
    "impossible class": (np.asarray([0.0, -np.inf, 0.0]), [0.5, 0.0, 0.5]),
}


@pytest.mark.parametrize("name", PRIORS)
def test_posterior_and_marginal(tolerance, name):
    """Oracle: closed form, Bayes' rule with probabilities, not logarithms."""
    given, prior = PRIORS[name]
    log_prior = None if given is None else jnp.asarray(given)
    likelihood = np.asarray([[0.1, 0.4, 2.0], [1.0, 1.0, 1.0], [1e-6, 3.0, 0.5]])
    joint = likelihood * np.asarray(prior)
    class_log_prob = jnp.asarray(np.log(likelihood))
    posterior = np.exp(jax.jit(log_posterior)(class_log_prob, log_prior))
    marginal = jax.jit(log_marginal)(class_log_prob, log_prior)
    close = partial(np.testing.assert_allclose, rtol=tolerance.exact, atol=tolerance.exact)
    close(posterior, joint / joint.sum(axis=1, keepdims=True))
    close(posterior.sum(axis=1), 1.0)
    close(marginal, np.log(joint.sum(axis=1)))


@pytest.mark.parametrize("function", [log_posterior, log_marginal])
@pytest.mark.parametrize("shape", [(2,), (4,), (1, 3), ()])
def test_prior_of_wrong_shape_is_refused(function, shape):
    """Oracle: the documented contract."""
    with pytest.raises(ValueError, match=r"need \(3,\)"):
        function(jnp.zeros((5, 3)), jnp.zeros(shape))


# --- sample ------------------------------------------------------------------------


@pytest.mark.parametrize("lead", LEADS)
def test_sample_moments(key, lead):
    """Oracle: closed form, the laws of total mean and covariance.

    Errors are compared with their standard errors, estimated from the same ``N`` draws: five of
    them for at most 6 x 12 moments is a false alarm in 4e-5 of all keys, and the key is fixed.
    """
    num_samples, mixture = 20_000, random_mixture(lead)
    draws = np.float64(jax.jit(sample, static_argnums=2)(key, mixture, num_samples))
    assert draws.shape == (num_samples, *lead, 3)
    draws = draws.reshape(num_samples, -1, 3)
    logits, means, covariances = in_float64(mixture)
    weights = softmax(logits, axis=-1)
    mean = np.einsum("cm,cmr->cr", weights, means)
    second = covariances + means[..., :, None] * means[..., None, :]
    covariance = np.einsum("cm,cmrs->crs", weights, second) - mean[:, :, None] * mean[:, None, :]
    centred = draws - mean
    products = centred[..., :, None] * centred[..., None, :]
    for values, expected in [(draws, mean), (products, covariance)]:
        error = values.std(axis=0) / np.sqrt(num_samples)
        assert (np.abs(values.mean(axis=0) - expected) < 5 * error).all()


def test_sample_ignores_the_upper_triangle_and_depends_on_the_key(key):
    """Oracle: invariance."""
    mixture, draw = random_mixture(), jax.jit(sample, static_argnums=2)
    draws = draw(key, mixture, 10)
    np.testing.assert_array_equal(draw(key, SAME_DENSITY["upper triangle"](mixture), 10), draws)
    assert not np.allclose(draw(jax.random.key(1), mixture, 10), draws)


# --- Initialisations ---------------------------------------------------------------


def assert_uniform(values, bound):
    """Within the bounds, and by Kolmogorov and Smirnov's test (SciPy) uniform there."""
    values = np.ravel(values)
    assert np.abs(values).max() <= bound
    assert scipy.stats.kstest(values, scipy.stats.uniform(-bound, 2 * bound).cdf).pvalue > 1e-3


@pytest.mark.parametrize("name", INITIALISATIONS)
def test_initialisations_have_common_structure(tolerance, key, name):
    """Oracle: the authors' shapes; a sound density that differs by key."""
    mixture = INITIALISE[name](key, 4, 2, 3)
    assert [part.shape for part in mixture] == [(4, 2), (4, 2, 3), (4, 2, 3, 3)]
    assert {part.dtype for part in mixture} == {jnp.zeros(()).dtype}
    diagonal = np.diagonal(mixture.scale_tril, axis1=-2, axis2=-1)
    assert (diagonal == 1.0).all()
    assert (np.triu(mixture.scale_tril, 1) == 0.0).all()
    assert np.isfinite(densities(mixture, random_points())).all()
    other = INITIALISE[name](jax.random.key(1), 4, 2, 3)
    assert not np.allclose(other.means, mixture.means, atol=1e-6)


def test_init_zeros(key):
    """Oracle: the authors' ranges: means uniform(-0.001, 0.001), identity scales."""
    mixture = INITIALISE["zeros"](key, 10, 10, 15)
    assert_uniform(mixture.means, 0.001)
    assert (np.asarray(mixture.logits) == 0.0).all()
    np.testing.assert_array_equal(mixture.scale_tril, np.broadcast_to(np.eye(15), (10, 10, 15, 15)))


def test_init_random(key):
    """Oracle: the authors' ranges, and parts that are drawn independently."""
    mixture = INITIALISE["random"](key, 10, 10, 15)
    below = np.asarray(mixture.scale_tril)[..., *np.tril_indices(15, -1)]
    assert_uniform(mixture.logits, 0.1)
    assert_uniform(mixture.means, 10.0)
    assert_uniform(below, 1.0)
    # Independent columns of 100 pairs correlate by less than 4 / sqrt(100).
    first_columns = [
        np.ravel(mixture.logits),
        np.ravel(mixture.means[..., 0]),
        below[..., 0].ravel(),
    ]
    correlations = np.corrcoef(first_columns)
    assert (np.abs(correlations[np.triu_indices(3, 1)]) < 0.4).all()


@pytest.mark.parametrize(("num_classes", "dim"), [(12, 15), (15, 15), (40, 15), (3, 1)])
def test_init_standard_basis(key, num_classes, dim):
    """Oracle: the authors' structure; classes beyond the dimensions are uniform(-10, 10)."""
    mixture = INITIALISE["standard_basis"](key, num_classes, 10, dim)
    means, on_axis = np.asarray(mixture.means), min(num_classes, dim)
    assert (np.asarray(mixture.logits) == 0.0).all()
    assert (np.tril(mixture.scale_tril, -1) == 0.0).all()
    axes = np.arange(on_axis)
    off_axis = means[:on_axis].copy()
    off_axis[axes, :, axes] = 0.0
    assert (off_axis == 0.0).all()
    along = means[axes, :, axes]  # [classes, M]
    assert (along[:, 0] == 10.0).all()
    assert_uniform(along[:, 1:], 5.0)
    if num_classes > dim:
        assert_uniform(means[dim:], 10.0)


# --- Properties --------------------------------------------------------------------

seeds = st.integers(0, 2**31 - 1)


@hypothesis.given(seed=seeds, size=st.floats(0.0, 100.0))
def test_translation_equivariance(seed, size):
    """Oracle: invariance; moving mixture and points together changes nothing."""
    with jax.enable_x64(True):
        mixture, z = random_mixture(seed=seed), random_points(seed=seed)
        shift = size * np.random.default_rng(seed).normal(size=3)
        moved = mixture._replace(means=mixture.means + shift.reshape(1, 1, 3))
        actual, expected = densities(moved, z + shift.reshape(1, 3)), densities(mixture, z)
        np.testing.assert_allclose(actual, expected, rtol=1e-8)


@hypothesis.given(seed=seeds)
def test_affine_change_of_variables(seed):
    """Oracle: closed form; ``A z + t`` has the density of ``z`` over ``|det A|``."""
    rng = np.random.default_rng(seed)
    rotation = np.linalg.qr(rng.normal(size=(3, 3)))[0]
    matrix, shift = rotation * rng.uniform(0.3, 3.0, 3), rng.normal(size=3)
    with jax.enable_x64(True):
        mixture, z = random_mixture(seed=seed), random_points(seed=seed)
        factor = matrix @ np.asarray(mixture.scale_tril)
        transformed = GaussianMixture(
            mixture.logits,
            jnp.asarray(np.asarray(mixture.means) @ matrix.T + shift),
            jnp.asarray(np.linalg.cholesky(factor @ np.swapaxes(factor, -1, -2))),
        )
        expected = densities(mixture, z) - np.linalg.slogdet(matrix)[1]
        actual = densities(transformed, jnp.asarray(np.asarray(z) @ matrix.T + shift))
        np.testing.assert_allclose(actual, expected, rtol=1e-7, atol=1e-7)


# --- Endurance ---------------------------------------------------------------------

MANY_GRADIENTS = """
import jax
from mass_jax.gaussian_mixture import init_random, log_prob
mixture = init_random(jax.random.key(0), 10, 10, 15)
z = jax.random.normal(jax.random.key(1), (256, 15))
gradient = jax.jit(jax.grad(lambda m, z: log_prob(m, z).mean(), argnums=(0, 1)))
for _ in range(300):
    jax.block_until_ready(gradient(mixture, z))
print("done")
"""


def test_repeated_gradients_do_not_hang():
    """Oracle: the clock. Batched triangular solves of this size hang XLA's CPU backend.

    A hang inside XLA cannot be interrupted, so another process does it; 300 calls take 3 s.
    """
    run = subprocess.run(
        [sys.executable, "-c", MANY_GRADIENTS],
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert run.stdout == "done\n", run.stderr
