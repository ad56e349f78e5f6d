"""The paper's theory of CDI as executable checks, in float64.

Oracles: closed-form entropies, and densities from scipy.stats that know nothing of
Jacobians. Where the change-of-variables formula makes an identity hold at every point,
it is checked at every point. Means over draws of ``X`` are compared with expectations to
four standard errors of the sample mean (`assert_mean`).
"""

import math

import hypothesis
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from scipy import stats

from mass_jax import conditional_entropy, conserved_differential_information

pytestmark = pytest.mark.parametrize("tolerance", ["float64"], indirect=True)

NUM_DRAWS = 4000
CORRELATED = stats.multivariate_normal(
    [0.5, -1.0, 0.2], [[2, 0.6, 0.1], [0.6, 1, 0.3], [0.1, 0.3, 0.5]]
)
PLANE = stats.multivariate_normal([0.5, -1.0], [[2.0, 0.6], [0.6, 1.0]])
ISOTROPIC = stats.multivariate_normal([0.0, 0.0])
LINE = stats.multivariate_normal([0.0])


def draws(law, count=NUM_DRAWS):
    return jnp.asarray(law.rvs(count, random_state=0).reshape(count, -1))


def assert_mean(values, expectation):
    """Four standard errors of the mean, plus rounding where the values are constant."""
    values = np.asarray(values)
    error = values.std(ddof=1) / math.sqrt(len(values))
    assert abs(values.mean() - expectation) <= 4 * error + 1e-9 * (1 + abs(expectation))


def log_pdf(law):
    """Log-density of ``[B, R]`` points, from a univariate or multivariate SciPy law."""
    if hasattr(law, "cov_object"):
        return lambda z: law.logpdf(np.asarray(z)).reshape(len(z))
    return lambda z: law.logpdf(np.asarray(z)[:, 0])


def gaussian_image(law, matrix, shift=0.0):
    """The law of ``A X + b``."""
    return stats.multivariate_normal(
        matrix @ law.mean + shift, matrix @ np.asarray(law.cov) @ matrix.T
    )


# --- Invertible functions ---------------------------------------------------------

GENERAL = np.array([[1.0, 2.0, 0.0], [0.3, -1.0, 0.5], [0.0, 0.7, 3.0]])
ORTHOGONAL = np.linalg.qr(GENERAL)[0]


def coupling_log_density(z):
    """Law of ``(x_1, x_2 exp(tanh x_1) + x_1^2)``: a marginal and a conditional Gaussian."""
    (mean_1, mean_2), ((var_1, cov), (_, var_2)) = PLANE.mean, np.asarray(PLANE.cov)
    first, second = np.asarray(z).T
    scale, slope = np.exp(np.tanh(first)), cov / var_1
    centre = scale * (mean_2 + slope * (first - mean_1)) + first**2
    spread = scale * math.sqrt(var_2 - slope * cov)
    return stats.norm(mean_1, math.sqrt(var_1)).logpdf(first) + stats.norm(centre, spread).logpdf(
        second
    )


INVERTIBLE = {
    "identity": (CORRELATED, lambda v: v, log_pdf(CORRELATED)),
    "linear": (
        CORRELATED,
        lambda v: jnp.asarray(GENERAL) @ v + 2.0,
        log_pdf(gaussian_image(CORRELATED, GENERAL, 2.0)),
    ),
    "scaled": (
        CORRELATED,
        lambda v: 1e3 * v,
        log_pdf(gaussian_image(CORRELATED, 1e3 * np.eye(3))),
    ),
    "orthogonal": (
        CORRELATED,
        lambda v: jnp.asarray(ORTHOGONAL) @ v,
        log_pdf(gaussian_image(CORRELATED, ORTHOGONAL)),
    ),
    "coupling": (
        PLANE,
        lambda v: jnp.stack([v[0], v[1] * jnp.exp(jnp.tanh(v[0])) + v[0] ** 2]),
        coupling_log_density,
    ),
    "sinh": (
        LINE,
        lambda v: jnp.sinh((v - 0.4) / 1.7),
        log_pdf(stats.johnsonsu(0.4, 1.7)),
    ),
    "exp": (LINE, lambda v: jnp.exp(0.5 * v + 1.0), log_pdf(stats.lognorm(0.5, scale=math.e))),
}


@pytest.mark.parametrize("name", INVERTIBLE)
def test_invertible_functions_conserve_everything(name, tolerance):
    """Oracle: ``C(X, f(X)) = H(X)``, at every point and in the mean."""
    law, f, log_density = INVERTIBLE[name]
    x = draws(law)
    conserved = conserved_differential_information(f, x, log_density)
    np.testing.assert_allclose(conserved, -log_pdf(law)(x), rtol=tolerance.exact, atol=1e-9)
    assert_mean(conserved, law.entropy())


def test_invertible_post_map_changes_nothing(tolerance):
    """Oracle: invariance, from three dimensions to two and on through a bijection of R^2."""
    matrix, mixing = GENERAL[:2], np.array([[1.0, -2.0], [0.5, 3.0]])
    image = gaussian_image(CORRELATED, matrix)
    f = lambda v: jnp.asarray(matrix) @ v
    # z -> exp(M z) has the law of a multivariate log-normal.
    g = lambda z: jnp.exp(jnp.asarray(mixing) @ z / 4)
    normal = gaussian_image(image, mixing / 4)
    log_normal = lambda z: normal.logpdf(np.log(z)) - np.log(np.asarray(z)).sum(-1)
    x = draws(CORRELATED)
    before = conserved_differential_information(f, x, log_pdf(image))
    after = conserved_differential_information(lambda v: g(f(v)), x, log_normal)
    np.testing.assert_allclose(after, before, rtol=tolerance.exact, atol=1e-9)


# --- Non-invertible functions -----------------------------------------------------


def complex_square(v):
    return jnp.stack([v[0] ** 2 - v[1] ** 2, 2 * v[0] * v[1]])


def complex_square_log_density(z):
    """``|Z|^2`` is exponential of mean 2 and its angle uniform."""
    radius = np.linalg.norm(np.asarray(z), axis=-1)
    return stats.expon(scale=2).logpdf(radius) - np.log(2 * np.pi * radius)


TWO_TO_ONE = {
    "absolute value": (LINE, jnp.abs, log_pdf(stats.halfnorm())),
    "square": (LINE, jnp.square, log_pdf(stats.chi2(1))),
    "one coordinate folded": (
        ISOTROPIC,
        lambda v: jnp.stack([jnp.abs(v[0]), 3 * v[1]]),
        lambda z: stats.halfnorm.logpdf(z[:, 0]) + stats.norm(scale=3).logpdf(z[:, 1]),
    ),
    "complex square": (ISOTROPIC, complex_square, complex_square_log_density),
}


@pytest.mark.parametrize("name", TWO_TO_ONE)
def test_folding_a_symmetric_density_loses_one_bit(name, tolerance):
    """Oracle: ``C(X, f(X)) = H(X) - log 2``: which of two equal sheets is forgotten."""
    law, f, log_density = TWO_TO_ONE[name]
    x = draws(law)
    conserved = conserved_differential_information(f, x, log_density)
    expected = -log_pdf(law)(x) - math.log(2)
    np.testing.assert_allclose(conserved, expected, rtol=tolerance.exact, atol=1e-9)
    assert_mean(conserved, law.entropy() - math.log(2))


@pytest.mark.parametrize("scale", [0.01, 1.0, 50.0])
@pytest.mark.parametrize("rows", [1, 2])
def test_projection_of_a_gaussian(rows, scale, tolerance):
    """Oracles: entropy of the marginal on an orthonormal frame; of the conditional on fibres.

    ``W = L Q`` with orthonormal rows ``Q``: ``C`` is the entropy of ``Q X``, however ``L``
    stretches it. ``X`` given ``W X`` is Gaussian on the null space ``N`` of ``W`` with
    precision ``N^T Sigma^-1 N``; its entropy there is ``H(X | W X)``.
    """
    matrix = scale * GENERAL[:rows]
    frame = np.linalg.qr(matrix.T, mode="complete")[0].T
    kept, null = frame[:rows], frame[rows:].T
    image = log_pdf(gaussian_image(CORRELATED, matrix))
    f, x = lambda v: jnp.asarray(matrix) @ v, draws(CORRELATED)

    conserved = conserved_differential_information(f, x, image)
    marginal = gaussian_image(CORRELATED, kept)
    expected = -np.reshape(marginal.logpdf(np.asarray(x) @ kept.T), -1)
    np.testing.assert_allclose(conserved, expected, rtol=tolerance.exact, atol=1e-9)
    assert_mean(conserved, marginal.entropy())

    precision = null.T @ np.linalg.inv(CORRELATED.cov) @ null
    on_fibre = stats.multivariate_normal(cov=np.linalg.inv(precision)).entropy()
    forgotten = conditional_entropy(f, x, log_pdf(CORRELATED), image)
    assert_mean(forgotten, on_fibre)


@pytest.mark.parametrize("sigma", [0.5, 3.0])
def test_norm_of_a_gaussian(sigma, tolerance):
    """Oracle: given its norm, ``X`` is uniform on a circle: ``H(X | |X|) = E log(2 pi |X|)``.

    And ``C`` is the Rayleigh entropy ``1 + log(sigma / sqrt 2) + gamma / 2``, as ``J_f = 1``.
    """
    law, rayleigh = stats.multivariate_normal([0, 0], sigma**2), stats.rayleigh(scale=sigma)
    f, x = lambda v: jnp.linalg.norm(v)[None], draws(law)
    radius = np.linalg.norm(np.asarray(x), axis=-1)
    forgotten = conditional_entropy(f, x, log_pdf(law), log_pdf(rayleigh))
    np.testing.assert_allclose(
        forgotten, np.log(2 * np.pi * radius), rtol=tolerance.exact, atol=1e-9
    )
    # E log |X| = log sigma + (log 2 - gamma) / 2.
    assert_mean(forgotten, math.log(2 * math.pi * sigma) + (math.log(2) - np.euler_gamma) / 2)
    conserved = conserved_differential_information(f, x, log_pdf(rayleigh))
    assert_mean(conserved, 1 + math.log(sigma / math.sqrt(2)) + np.euler_gamma / 2)


# --- Data processing inequality ---------------------------------------------------

# The fixture only sets the precision, the same for every example.
same_precision = hypothesis.settings(
    suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture]
)
SCALES = st.floats(0.1, 10.0)
SHIFTS = st.floats(-3.0, 3.0)  # in units of the scale: further away nothing folds
X_LINE = stats.norm.rvs(size=(500, 1), random_state=0)


@same_precision
@hypothesis.given(scale=SCALES, shift=SHIFTS)
def test_data_processing_inequality_is_strict_for_a_fold(tolerance, scale, shift):
    """Oracle: the proof's integrand ``log(1 + p(-z) / p(z))``, positive at every point."""
    x = jnp.asarray(X_LINE)
    f = lambda v: scale * (v + shift)
    law = stats.norm(scale * shift, scale)
    folded = stats.foldnorm(abs(shift), scale=scale)
    before = conserved_differential_information(f, x, log_pdf(law))
    after = conserved_differential_information(lambda v: jnp.abs(f(v)), x, log_pdf(folded))
    z = scale * (X_LINE[:, 0] + shift)
    lost = np.log1p(np.exp(law.logpdf(-z) - law.logpdf(z)))
    np.testing.assert_allclose(before - after, lost, rtol=1e-6, atol=1e-8)
    assert float(jnp.mean(before)) > float(jnp.mean(after))
    # On average at most the one bit that says which side z came from.
    error = lost.std(ddof=1) / math.sqrt(len(lost))
    assert lost.mean() <= math.log(2) + 4 * error + 1e-9


@same_precision
@hypothesis.given(scale=SCALES, shift=SHIFTS, exponent=st.sampled_from([-2.0, 0.5, 3.0]))
def test_data_processing_equality_for_invertible_maps(tolerance, scale, shift, exponent):
    """Oracle: equality of the theorem, for ``g(z) = exp(exponent z / scale)``."""
    x = jnp.asarray(X_LINE)
    f = lambda v: scale * (v + shift)
    g = lambda z: jnp.exp(exponent * z / scale)
    image = stats.lognorm(abs(exponent), scale=math.exp(exponent * shift))
    before = conserved_differential_information(f, x, log_pdf(stats.norm(scale * shift, scale)))
    after = conserved_differential_information(lambda v: g(f(v)), x, log_pdf(image))
    np.testing.assert_allclose(after, before, rtol=1e-8, atol=1e-8)


@same_precision
@hypothesis.given(weights=st.lists(st.floats(0.1, 0.9), min_size=1, max_size=3))
def test_each_further_fold_of_the_interval_loses_more(tolerance, weights):
    """Oracle: skew tent maps keep the uniform law and lose ``H(w)`` nats each.

    ``g_w`` rises on ``[0, w]`` and falls on ``[w, 1]``; given its value the branch is
    rising with probability ``w``, so the loss is the entropy of that coin.
    """
    x = jnp.asarray(stats.uniform.rvs(size=(1000, 1), random_state=0))
    uniform = log_pdf(stats.uniform())
    f, previous, lost = (lambda v: v), 0.0, 0.0
    for w in weights:
        f = lambda v, f=f, w=w: jnp.where(f(v) < w, f(v) / w, (1 - f(v)) / (1 - w))
        conserved = np.asarray(conserved_differential_information(f, x, uniform))
        lost += -w * math.log(w) - (1 - w) * math.log1p(-w)
        assert_mean(conserved, -lost)
        assert conserved.mean() < previous
        previous = conserved.mean()
