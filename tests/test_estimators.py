"""Estimators of the Jacobian term: values and gradients against the exact ones."""

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mass_jax import ResNet20, SmallMLP, make_method
from mass_jax.dense_first_layer import gram_is_cheaper, half_log_det_behind
from mass_jax.estimators import JACOBIAN_ESTIMATORS, num_jacobian_examples
from mass_jax.log_determinant import half_log_det_gram
from mass_jax.networks import TrainContext

BATCH, CLASSES, DIM = 12, 3, 3
SHAPE = (4, 4, 3)
float64_only = pytest.mark.parametrize("tolerance", ["float64"], indirect=True)


def build(outputs):
    return SmallMLP(outputs, hidden=(9, 6))


def setting(**options):
    """Loss and its gradient for one way to estimate; the minibatch is always the same."""
    method = make_method(
        "mass", num_classes=CLASSES, representation_dim=DIM, num_components=2, beta=0.5, **options
    )
    params = method.init(jax.random.key(0), build, SHAPE)
    generator = np.random.default_rng(1)
    x = jnp.asarray(generator.normal(size=(BATCH, *SHAPE)))
    labels = jnp.arange(BATCH) % CLASSES

    def loss(params, key, step):
        keys = jax.random.split(key, BATCH)
        seen = method.loss(params, x, labels, TrainContext(keys=keys, step=step))
        return seen.objective(), {name: term.mean() for name, term in seen.terms.items()}

    return params, jax.jit(jax.value_and_grad(loss, has_aux=True))


def flat(gradient):
    return np.concatenate(
        [np.ravel(leaf) for leaf in jax.tree.leaves((gradient.network, gradient.head))]
    )


@pytest.mark.parametrize("batch_stats", ["frozen", "paper", "running"])
@pytest.mark.parametrize("estimator", ["gram", "auto"])
def test_gram_form_is_exact(batch_stats, estimator, tolerance):
    """Oracle: the plain Jacobian of every example."""
    key, step = jax.random.key(0), jnp.asarray(0)
    params, plain = setting(estimator="exact", batch_stats=batch_stats)
    _, behind = setting(estimator=estimator, batch_stats=batch_stats, sub_batch=BATCH)
    (expected, terms), gradient = plain(params, key, step)
    (actual, our_terms), our_gradient = behind(params, key, step)
    np.testing.assert_allclose(actual, expected, rtol=10 * tolerance.exact)
    np.testing.assert_allclose(our_terms["jacobian"], terms["jacobian"], rtol=10 * tolerance.exact)
    scale = np.abs(flat(gradient)).max()
    np.testing.assert_allclose(
        flat(our_gradient) / scale, flat(gradient) / scale, atol=50 * tolerance.exact
    )


@float64_only
@pytest.mark.parametrize(("estimator", "oracle"), [("probe", "sub_batch"), ("fast", "few")])
def test_probe_is_exact_in_value_and_unbiased_in_gradient(estimator, oracle, tolerance):
    """Oracle: the exact gradient; the mean over 600 keys lies within 5 standard errors of it
    in every parameter, and the values do not depend on the key."""
    key, step = jax.random.key(0), jnp.asarray(0)
    params, exact = setting(estimator=oracle, batch_stats="frozen")
    _, probe = setting(estimator=estimator, batch_stats="frozen")
    (value, _), gradient = exact(params, key, step)
    keys = jax.random.split(jax.random.key(5), 600)
    (values, _), gradients = jax.lax.map(lambda k: probe(params, k, step), keys)
    np.testing.assert_allclose(values, value, rtol=tolerance.exact)
    drawn = np.concatenate(
        [np.reshape(g, (600, -1)) for g in jax.tree.leaves((gradients.network, gradients.head))], 1
    )
    error = drawn.std(axis=0, ddof=1) / np.sqrt(600)
    assert np.all(np.abs(drawn.mean(axis=0) - flat(gradient)) <= 5 * error + 1e-9)
    assert np.max(error) > 1e-4  # it is random indeed


@float64_only
def test_lazy_is_right_on_the_average_of_its_steps(tolerance):
    """Oracle: the gradient with the term in every step."""
    key = jax.random.key(0)
    params, every_step = setting(estimator="sub_batch", batch_stats="frozen")
    _, lazy = setting(estimator="lazy", batch_stats="frozen")
    every = JACOBIAN_ESTIMATORS["lazy"].every
    expected = flat(every_step(params, key, jnp.asarray(0))[1])
    steps = [flat(lazy(params, key, jnp.asarray(step))[1]) for step in range(every)]
    np.testing.assert_allclose(np.mean(steps, axis=0), expected, atol=tolerance.exact)
    assert np.abs(steps[-1] - steps[0]).max() > 1e-3  # only one of them has it
    np.testing.assert_array_equal(steps[0], steps[1])


def test_few_is_an_eighth_of_the_authors():
    """Oracle: by hand from n = 17 and 10."""
    assert num_jacobian_examples("few", 256, 15) == 2
    assert num_jacobian_examples("few", 128, 20) == 1


@pytest.mark.parametrize("singular", ["floor", "-inf"])
@pytest.mark.parametrize("rank", [0, 2])
def test_behind_a_deficient_layer_all_forms_agree(rank, singular, tolerance):
    """Oracle: the Jacobian itself, of rank below its three rows, and its defined answer.

    The floor is made of rounding errors, so its logarithm agrees to a nat or two, not to digits.
    """
    generator = np.random.default_rng(5)
    kernel = jnp.asarray(generator.normal(size=(9, rank)) @ generator.normal(size=(rank, 6)))
    rows = jnp.asarray(generator.normal(size=(4, 3, 6)))
    expected = half_log_det_gram(rows @ kernel.T[None], singular)
    for form in ("rows", "gram"):
        actual = jax.jit(partial(half_log_det_behind, noise=None, form=form, singular=singular))
        np.testing.assert_allclose(actual(rows, kernel), expected, rtol=tolerance.exact, atol=2.0)
    assert bool(jnp.all(jnp.isneginf(expected))) == (singular == "-inf")


@pytest.mark.parametrize("form", ["rows", "gram"])
@pytest.mark.parametrize("spread", [1.0, 1e-4])
def test_behind_a_dense_layer(spread, form, tolerance):
    """Oracle: the Jacobian itself. Rows 1e-4 apart take the way for nearly dependent ones."""
    generator = np.random.default_rng(1)
    rows = generator.normal(size=(4, 3, 6))
    rows[2, 1] = rows[2, 0] + spread * rows[2, 1]
    kernel = jnp.asarray(generator.normal(size=(9, 6)))

    def value_and_gradients(log_det):
        values, pullback = jax.vjp(log_det, jnp.asarray(rows), kernel)
        return values, *pullback(jnp.arange(1.0, 5.0))

    actual = value_and_gradients(
        jax.jit(lambda a, w: half_log_det_behind(a, w, None, form, "floor"))
    )
    expected = value_and_gradients(lambda a, w: half_log_det_gram(a @ w.T[None]))
    for ours, theirs in zip(actual, expected, strict=True):
        scale = np.max(np.abs(theirs))
        np.testing.assert_allclose(ours / scale, theirs / scale, atol=tolerance.exact / spread)


@pytest.mark.parametrize("form", ["rows", "gram"])
@pytest.mark.parametrize("smallest", [1e-2, 1e-5])
def test_behind_an_ill_conditioned_layer(smallest, form, tolerance):
    """Oracle: the Jacobian itself, which is well conditioned: rows undo what the kernel shrinks.

    That loses digits by the kernel's condition where J = A W^T is formed; J J^T may lose no more.
    """
    generator = np.random.default_rng(4)
    left, _ = np.linalg.qr(generator.normal(size=(9, 6)))
    right, _ = np.linalg.qr(generator.normal(size=(6, 6)))
    scales = np.geomspace(1.0, smallest, 6)
    kernel = jnp.asarray(left * scales @ right.T)
    rows = jnp.asarray(generator.normal(size=(4, 3, 6)) / scales @ right.T)
    actual = jax.jit(lambda a, w: half_log_det_behind(a, w, None, form, "floor"))(rows, kernel)
    expected = half_log_det_gram(rows @ kernel.T[None])
    np.testing.assert_allclose(actual, expected, atol=tolerance.exact / smallest)


@pytest.mark.parametrize("scale", [1e-25, 1e25])
def test_behind_a_dense_layer_of_any_scale(scale, tolerance):
    """Oracle: the Jacobian itself, whose products leave the range of float32."""
    generator = np.random.default_rng(2)
    rows, kernel = generator.normal(size=(2, 3, 6)), jnp.asarray(generator.normal(size=(9, 6)))
    rows = jnp.asarray(scale * rows)
    behind = jax.jit(lambda a: half_log_det_behind(a, kernel, None, "rows", "floor"))
    actual, pullback = jax.vjp(behind, rows)
    expected, expected_pullback = jax.vjp(lambda a: half_log_det_gram(a @ kernel.T[None]), rows)
    np.testing.assert_allclose(actual, expected, rtol=tolerance.exact)
    ours, theirs = pullback(jnp.ones(2))[0], expected_pullback(jnp.ones(2))[0]
    np.testing.assert_allclose(scale * ours, scale * theirs, rtol=100 * tolerance.exact)


@pytest.mark.parametrize("spread", [1.0, 1e-3])
def test_a_probe_behind_a_dense_layer(spread, tolerance):
    """Oracle: autodiff of 1/2 |J^T v|^2 at fixed v = (J J^T)^-1 J e, from the Jacobian itself."""
    generator = np.random.default_rng(3)
    rows = generator.normal(size=(4, 3, 6))
    rows[2, 1] = rows[2, 0] + spread * rows[2, 1]
    rows, kernel, noise = map(
        jnp.asarray, (rows, generator.normal(size=(9, 6)), generator.normal(size=(4, 9)))
    )

    fixed = np.asarray(rows, np.float64) @ np.asarray(kernel, np.float64).T
    right = fixed @ np.asarray(noise, np.float64)[:, :, None]
    v = jnp.asarray(np.linalg.solve(fixed @ fixed.swapaxes(1, 2), right)[..., 0])

    def surrogate(a, w):
        return 0.5 * jnp.sum(jnp.square(jnp.einsum("nrd,nr->nd", a @ w.T[None], v)))

    probe = jax.jit(lambda a, w: jnp.sum(half_log_det_behind(a, w, noise, "rows", "floor")))
    value = jnp.sum(half_log_det_gram(rows @ kernel.T[None]))
    np.testing.assert_allclose(probe(rows, kernel), value, rtol=tolerance.exact / spread)
    actual = jax.grad(probe, argnums=(0, 1))(rows, kernel)
    expected = jax.grad(surrogate, argnums=(0, 1))(rows, kernel)
    for ours, theirs in zip(actual, expected, strict=True):
        size = np.max(np.abs(theirs))
        np.testing.assert_allclose(ours / size, theirs / size, atol=tolerance.exact / spread**2)


def test_auto_goes_by_cost():
    """Oracle: counted by hand, n r (3 d - 2 h) against 2 d h: 19.5 examples of SmallMLP."""
    cheaper = partial(gram_is_cheaper, output_dim=15, input_dim=3072, width=400)
    assert not cheaper(19)
    assert cheaper(20)


def test_gram_of_more_outputs_than_the_first_layer_is_wide():
    """Oracle: the Jacobian by rows, which is singular: the documented finite value."""
    x, labels = jax.random.normal(jax.random.key(3), (4, *SHAPE)), jnp.zeros(4, int)
    terms = {}
    for estimator in ("gram", "exact"):
        method = make_method("mass", representation_dim=11, estimator=estimator, num_components=1)
        params = method.init(jax.random.key(0), build, SHAPE)
        context = TrainContext(keys=jax.random.split(jax.random.key(0), 4))
        terms[estimator] = method.loss(params, x, labels, context).terms["jacobian"].mean()
    assert np.isfinite(terms["gram"])
    assert terms["gram"] == terms["exact"]


@pytest.mark.parametrize(
    ("options", "build_network", "message"),
    [
        ({"estimator": "gram", "batch_stats": "frozen"}, ResNet20, "dense first layer"),
        ({"estimator": "probe", "batch_stats": "paper"}, SmallMLP, "this estimator needs 'frozen'"),
        ({"estimator": "few", "batch_stats": "paper"}, ResNet20, "this estimator needs 'frozen'"),
        ({"estimator": "lazy", "batch_stats": "paper"}, SmallMLP, "this estimator needs 'frozen'"),
    ],
)
def test_what_cannot_be_is_refused(options, build_network, message):
    """Oracle: the documented contract."""
    method = make_method("mass", representation_dim=3, **options)
    params = method.init(jax.random.key(0), build_network, (8, 8, 3))
    x, labels = jnp.zeros((4, 8, 8, 3)), jnp.zeros(4, int)
    context = TrainContext(keys=jax.random.split(jax.random.key(0), 4))
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(lambda p: method.loss(p, x, labels, context).objective(), params)
