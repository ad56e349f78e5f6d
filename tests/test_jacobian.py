"""Per-example Jacobians and log-determinants.

Every test names its oracle: closed form, other implementation (numpy in float64, the plain
``slogdet`` route, the other differentiation mode), finite differences, or invariance.
"""

from functools import partial

import chex
import hypothesis
import hypothesis.strategies as st
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

from mass_jax import jacobian as library
from mass_jax.estimators import (
    JACOBIAN_ESTIMATORS,
    authors_sub_batch_size,
    num_jacobian_examples,
)
from mass_jax.jacobian import (
    half_log_det_jjt,
    per_example_jacobian,
    summed_jacobian,
)
from mass_jax.log_determinant import half_log_det_gram, half_log_det_slogdet, inverse_lower

EXAMPLE_SHAPES = [(6,), (2, 3, 1)]  # a vector and an image of the same size
float64_only = pytest.mark.parametrize("tolerance", ["float64"], indirect=True)


def normal(*shape, seed=0):
    """Standard normal numbers in JAX's default dtype; drawn by NumPy, which needs no compiler."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape))


def init_mlp(input_dim=6, output_dim=3, hidden=7, seed=0):
    return {
        "inner": normal(hidden, input_dim, seed=seed) / np.sqrt(input_dim),
        "outer": normal(output_dim, hidden, seed=seed + 1) / np.sqrt(hidden),
        "bias": normal(hidden, seed=seed + 2),
    }


def apply_mlp(params, v):
    """One example of any shape to a vector; curved, so derivatives of all orders matter."""
    return params["outer"] @ jnp.tanh(params["inner"] @ v.ravel() + params["bias"])


# Compiled once per shape for the whole file.
OF_MLP = {
    name: jax.jit(
        lambda params, x, mode="auto", chunk_size=None, function=function: function(
            partial(apply_mlp, params), x, mode, chunk_size
        ),
        static_argnames=("mode", "chunk_size"),
    )
    for name, function in [("jacobians", per_example_jacobian), ("log_dets", half_log_det_jjt)]
}
mlp_jacobians, mlp_log_dets = OF_MLP["jacobians"], OF_MLP["log_dets"]
mlp_outputs = jax.jit(jax.vmap(apply_mlp, in_axes=(None, 0)))


@partial(jax.jit, static_argnums=1)
def gram_and_gradient(jacobian, singular="floor"):
    value, pullback = jax.vjp(lambda j: half_log_det_gram(j, singular), jacobian)
    return value, pullback(jnp.ones_like(value))[0]


def random_orthogonal(dim, seed=0):
    return jnp.asarray(np.linalg.qr(np.random.default_rng(seed).normal(size=(dim, dim)))[0])


def float64_half_log_det(jacobian):
    """Oracle in NumPy's float64, by singular values: never forms ``J J^T``."""
    return np.log(np.linalg.svd(np.asarray(jacobian, np.float64), compute_uv=False)).sum(-1)


def step_size():
    """Central differences err by step^2 and by rounding / step: near the optimum of each."""
    return 1e-5 if jax.config.jax_enable_x64 else 1e-2


def assert_close(actual, expected, rtol):
    """The same tree of arrays, up to ``rtol`` relative or absolute."""
    chex.assert_trees_all_close(actual, expected, rtol=rtol, atol=rtol)


# --- per_example_jacobian ----------------------------------------------------------


@pytest.mark.parametrize("mode", ["forward", "reverse"])
@pytest.mark.parametrize(("example_shape", "output_dim"), [((6,), 8), ((2, 3, 1), 3)])
def test_jacobian_matches_finite_differences(tolerance, mode, example_shape, output_dim):
    """Oracle: central differences, one input coordinate at a time."""
    params, x = init_mlp(output_dim=output_dim), normal(4, *example_shape, seed=9)
    steps = step_size() * np.eye(6).reshape(6, 1, *example_shape)
    columns = [
        (mlp_outputs(params, x + step) - mlp_outputs(params, x - step)) / (2 * step_size())
        for step in steps
    ]
    actual = mlp_jacobians(params, x, mode)
    assert actual.shape == (4, output_dim, 6)
    assert_close(actual, jnp.stack(columns, axis=-1), tolerance.finite_difference)


@pytest.mark.parametrize("example_shape", EXAMPLE_SHAPES)
def test_modes_agree(tolerance, example_shape):
    """Oracle: the other differentiation mode, and flattening before instead of after."""
    params, x = init_mlp(), normal(4, *example_shape, seed=9)
    reverse = mlp_jacobians(params, x, "reverse")
    assert_close(mlp_jacobians(params, x, "forward"), reverse, tolerance.exact)
    assert_close(mlp_jacobians(params, x, "auto"), reverse, tolerance.exact)
    assert_close(mlp_jacobians(params, x.reshape(4, 6), "forward"), reverse, tolerance.exact)


@pytest.mark.parametrize(
    ("mode", "output_dim", "input_dim", "expected"),
    [
        ("auto", 2, 5, "jacrev"),
        ("auto", 5, 5, "jacrev"),
        ("auto", 6, 3, "jacfwd"),
        ("forward", 2, 5, "jacfwd"),
        ("reverse", 6, 3, "jacrev"),
    ],
)
def test_mode_picks_the_differentiation(monkeypatch, mode, output_dim, input_dim, expected):
    """Oracle: the cost rule, the fewer passes of R and D, observed by recording calls."""
    calls = []

    def recording(name):
        original = getattr(jax, name)
        return lambda f: (calls.append(name), original(f))[1]

    for name in ("jacfwd", "jacrev"):
        monkeypatch.setattr(library.jax, name, recording(name))
    f = lambda v: jnp.ones((output_dim, input_dim)) @ v
    x = jax.ShapeDtypeStruct((2, input_dim), jnp.float32)
    jax.eval_shape(lambda x: per_example_jacobian(f, x, mode), x)
    assert calls == [expected]


@partial(jax.jit, static_argnums=(0, 3))
def values_and_gradients(name, params, x, chunk_size):
    of_both = lambda *both: OF_MLP[name](*both, chunk_size=chunk_size)
    values, pullback = jax.vjp(of_both, params, x)
    return values, pullback(jnp.cos(values))  # a different weight for each entry


@float64_only
@pytest.mark.parametrize("chunk_size", [1, 3])  # of 7 examples: 3 does not divide
@pytest.mark.parametrize("name", OF_MLP)
def test_chunks_change_neither_values_nor_gradients(tolerance, name, chunk_size):
    """Oracle: other implementation, the whole batch at once."""
    params, x = init_mlp(), normal(7, 6, seed=9)
    whole = values_and_gradients(name, params, x, None)
    assert_close(values_and_gradients(name, params, x, chunk_size), whole, tolerance.exact)


TRANSFORMS = {
    "vmap": lambda f: (
        lambda x: jax.tree.map(lambda v: v[1], jax.jit(jax.vmap(f))(np.stack([-x, x])))
    ),
    "pmap": lambda f: lambda x: jax.tree.map(lambda v: v[0], jax.pmap(f)(x[None])),
}


@pytest.mark.parametrize(
    ("name", "transform", "chunk_size"),
    [
        ("jacobians", "vmap", None),
        ("jacobians", "pmap", None),
        ("log_dets", "vmap", None),
        ("log_dets", "pmap", 3),
    ],
)
def test_transformations_agree_with_jit(name, transform, chunk_size):
    """Oracle: other implementation, the jitted whole batch; values and gradients."""
    params, x = init_mlp(), normal(4, 6, seed=9)
    transformed = TRANSFORMS[transform](
        lambda x: values_and_gradients.__wrapped__(name, params, x, chunk_size)
    )
    assert_close(transformed(x), values_and_gradients(name, params, x, None), 2e-4)


REFUSING = {"jacobians": per_example_jacobian, "log_dets": half_log_det_jjt}


@pytest.mark.parametrize("function", REFUSING.values(), ids=REFUSING)
@pytest.mark.parametrize(
    ("f", "options", "message"),
    [
        (lambda v: v, {"mode": "sideways"}, r"mode='sideways'.*auto.*forward.*reverse"),
        (lambda v: v, {"chunk_size": 0}, "chunk_size=0: must be at least 1"),
        (lambda v: v, {"chunk_size": -2}, "chunk_size=-2: must be at least 1"),
        (lambda v: v.sum(), {}, r"to a vector \(R,\), but returned shape \(\)"),
        (lambda v: v[None], {}, r"to a vector \(R,\), but returned shape \(1, 3\)"),
    ],
)
def test_bad_arguments_are_refused(function, f, options, message):
    """Oracle: the documented contract."""
    with pytest.raises(ValueError, match=message):
        function(f, jnp.ones((2, 3)), **options)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: half_log_det_gram(x, "ignore"),
        lambda x: half_log_det_jjt(lambda v: v[0], x, singular="ignore"),
    ],
)
def test_unknown_singular_policy_is_refused(function):
    """Oracle: the documented contract."""
    with pytest.raises(ValueError, match=r"singular='ignore': choose 'floor' or '-inf'"):
        function(jnp.ones((1, 2, 3)))


# --- half_log_det: closed forms ----------------------------------------------------


@pytest.mark.parametrize(("mode", "example_shape"), [("forward", (6,)), ("reverse", (2, 3, 1))])
def test_linear_map(tolerance, mode, example_shape):
    """Oracle: closed form, ``1/2 log det(W W^T)`` by NumPy's slogdet in float64."""
    weight, x = normal(4, 6), normal(3, *example_shape, seed=9)
    wide = np.asarray(weight, np.float64)
    expected = np.full(3, 0.5 * np.linalg.slogdet(wide @ wide.T)[1])
    log_dets = jax.jit(lambda x: half_log_det_jjt(lambda v: weight @ v.ravel() + 1.0, x, mode))
    assert_close(log_dets(x), expected, tolerance.exact)


def curved(z):
    """Invertible: the derivative of each coordinate is in (1, 3), plus a small coupling."""
    return 2.0 * z + jnp.sin(z) + 0.3 * jnp.roll(jnp.cos(z), 1)


AFTER = {  # maps of R^3 to itself
    "scaling": lambda z: -2.5 * z,
    "orthogonal": lambda z: random_orthogonal(3) @ z,
    "linear": lambda z: normal(3, 3, seed=4) @ z,
    "nonlinear": curved,
}
ADDED = {"scaling": 3 * np.log(2.5), "orthogonal": 0.0}  # the rest by NumPy's slogdet


@float64_only
@pytest.mark.parametrize("name", AFTER)
def test_composition_adds_the_log_determinant(tolerance, name):
    """Oracle: closed form, the chain rule ``log J_{h o f} = log|det J_h(f(x))| + log J_f``."""
    params, x, h = init_mlp(), normal(4, 6, seed=9), AFTER[name]
    outer_jacobian = jax.jit(jax.vmap(jax.jacfwd(h)))(mlp_outputs(params, x))
    added = np.linalg.slogdet(np.asarray(outer_jacobian, np.float64))[1]
    assert_close(added, np.full(4, ADDED.get(name, added)), tolerance.exact)
    actual = jax.jit(lambda x: half_log_det_jjt(lambda v: h(apply_mlp(params, v)), x))(x)
    assert_close(actual, mlp_log_dets(params, x) + added, tolerance.exact)


def test_rotation_of_the_input_changes_nothing(tolerance):
    """Oracle: invariance, ``log J_{f o Q}(x) = log J_f(Q x)`` for orthogonal ``Q``."""
    params, x, rotation = init_mlp(), normal(4, 6, seed=9), random_orthogonal(6)
    rotated = mlp_log_dets({**params, "inner": params["inner"] @ rotation}, x)
    assert_close(rotated, mlp_log_dets(params, x @ rotation.T), tolerance.exact)
    assert np.abs(rotated - mlp_log_dets(params, x)).max() > 0.01  # the points did move


def test_gram_agrees_with_slogdet(tolerance):
    """Oracle: other implementation, LU factorisation, and NumPy; any leading axes."""
    jacobian = normal(2, 3, 4, 7)
    actual = gram_and_gradient(jacobian)[0]
    assert actual.shape == (2, 3)
    assert_close(actual, jax.jit(half_log_det_slogdet)(jacobian), tolerance.exact)
    assert_close(actual, float64_half_log_det(jacobian), tolerance.exact)


@pytest.mark.parametrize(("example_shape", "mode"), [((1,), "auto"), ((), "forward")])
def test_one_number_to_one_number(tolerance, example_shape, mode):
    """Oracle: closed form, ``d/dx 3 x^2 = 6 x``; also examples that are bare scalars."""
    x = jnp.asarray([2.0, -0.5]).reshape(2, *example_shape)
    log_dets = jax.jit(lambda x: half_log_det_jjt(lambda v: 3.0 * v.reshape(1) ** 2, x, mode))
    assert_close(log_dets(x), np.log([12.0, 3.0]), tolerance.exact)


@pytest.mark.parametrize(
    "function",
    [
        lambda x: half_log_det_jjt(lambda v: jnp.concatenate([v, v]), x),
        lambda x: half_log_det_gram(jnp.swapaxes(x[:, None], 1, 2)),
    ],
)
def test_expanding_maps_are_refused_at_trace_time(function):
    """Oracle: the documented contract; `jax.eval_shape` never computes a number."""
    with pytest.raises(ValueError, match="J J\\^T is singular"):
        jax.eval_shape(function, jax.ShapeDtypeStruct((2, 3), jnp.float32))


def test_bfloat16_is_promoted():
    """Oracle: other implementation, the same rounded numbers in float32."""
    coarse = normal(3, 4, 7).astype(jnp.bfloat16)
    value, gradient = gram_and_gradient(coarse)
    fine_value, fine_gradient = gram_and_gradient(coarse.astype(jnp.float32))
    assert value.dtype == jnp.float32
    assert_close(value, fine_value, 1e-6)
    assert gradient.dtype == jnp.bfloat16
    # bfloat16 keeps 8 bits: rounding the float32 gradient costs 2^-9 of each entry.
    np.testing.assert_allclose(np.float32(gradient), fine_gradient, rtol=2.0**-8)


# --- half_log_det: gradients -------------------------------------------------------


def test_gradient_is_the_pseudo_inverse(tolerance):
    """Oracle: closed form, the gradient is the transposed pseudo-inverse (NumPy, float64)."""
    jacobian = normal(3, 4, 7)
    expected = np.swapaxes(np.linalg.pinv(np.asarray(jacobian, np.float64)), -1, -2)
    assert_close(gram_and_gradient(jacobian)[1], expected, tolerance.exact)


@float64_only
def test_parameter_derivatives_match_finite_differences(tolerance):
    """Oracle: central differences of the value and of the slope along a random direction.

    In forward mode; gradients of reverse mode are compared with other oracles elsewhere.
    """
    params, direction, x = init_mlp(), init_mlp(seed=20), normal(4, 6, seed=9)

    def along(step):
        moved = jax.tree.map(lambda p, d: p + step * d, params, direction)
        return mlp_log_dets(moved, x, "forward").mean()

    value, slope, curvature = along, jax.jit(jax.grad(along)), jax.jit(jax.grad(jax.grad(along)))
    for function, derivative in [(value, slope), (slope, curvature)]:
        expected = (function(step_size()) - function(-step_size())) / (2 * step_size())
        assert abs(expected) > 0.1  # the direction matters
        np.testing.assert_allclose(derivative(0.0), expected, rtol=tolerance.finite_difference)


@float64_only
@pytest.mark.parametrize("mode", ["fwd", "rev"])
def test_first_and_second_derivatives(tolerance, mode):
    """Oracle: finite differences (`jax.test_util.check_grads`) to second order."""
    log_det = jax.jit(half_log_det_gram)
    check_grads(log_det, (normal(2, 3, 5),), order=2, modes=[mode], rtol=1e-4, atol=1e-4)


# --- half_log_det: float32 soundness -----------------------------------------------


def with_singular_values(seed, shape, singular_values):
    rng = np.random.default_rng(seed)
    left = np.linalg.qr(rng.normal(size=(shape[0], shape[0])))[0]
    right = np.linalg.qr(rng.normal(size=(shape[1], shape[0])))[0]
    return (left * singular_values) @ right.T


@pytest.mark.parametrize("shape", [(2, 5), (5, 8), (10, 20), (15, 30)])
def test_ill_conditioned_jacobians_in_float32(shape):
    """Oracle: NumPy's singular values in float64 of the same float32 numbers.

    Singular values spread evenly from 1 to 1e-3: full rank, condition number 1e3.
    """
    values = np.logspace(0, -3, shape[0])
    jacobians = np.float32([with_singular_values(seed, shape, values) for seed in range(50)])
    actual = gram_and_gradient(jnp.asarray(jacobians), "-inf")[0]  # none is rank deficient
    np.testing.assert_allclose(actual, float64_half_log_det(jacobians), rtol=1e-3)


@pytest.mark.parametrize("scale", [1e18, 1e-18])
def test_huge_and_tiny_scales_in_float32(scale):
    """Oracle: closed form, ``R log c`` added, gradient divided by ``c``.

    The products of four such numbers, as a determinant has, are far outside float32's range.
    """
    jacobian = normal(3, 4, 7)
    value, gradient = gram_and_gradient(np.float32(scale) * jacobian)
    expected = float64_half_log_det(jacobian) + 4 * np.log(scale)
    np.testing.assert_allclose(value, expected, rtol=1e-5)
    assert_close(np.float32(scale) * gradient, gram_and_gradient(jacobian)[1], 2e-4)


def test_rows_of_very_different_scale_in_float32():
    """Oracle: closed form, multiplying row ``i`` by ``c_i`` adds ``sum_i log c_i``."""
    jacobian, scales = normal(3, 4, 7), np.float32([1e15, 1.0, 1e-15, 1e5])
    value, _ = gram_and_gradient(jacobian * scales[None, :, None])
    expected = float64_half_log_det(jacobian) + np.log(np.float64(scales)).sum()
    np.testing.assert_allclose(value, expected, rtol=1e-4)


# --- half_log_det: rank deficiency -------------------------------------------------

DEFICIENT = {
    "duplicate rows": [[1.0, 2.0, -1.0], [1.0, 2.0, -1.0]],
    "opposite rows": [[1.0, 2.0, -1.0], [-1.0, -2.0, 1.0]],
    "proportional rows": [[1.0, 2.0, -1.0], [3.0, 6.0, -3.0]],
    "zero row": [[1.0, 2.0, -1.0], [0.0, 0.0, 0.0]],
    "all zero": [[0.0, 0.0, 0.0], [0.0, 0.0, 0.0]],
}


def deficient_and_sound(name):
    """A batch of five, the third one rank deficient, and the same with a sound third one."""
    sound = normal(5, 2, 3)
    return sound.at[2].set(jnp.asarray(DEFICIENT[name])), sound


@pytest.mark.parametrize("name", DEFICIENT)
def test_rank_deficient_floor(tolerance, name):
    """Oracle: the documented contract, finite; and far below any value of a sound Jacobian."""
    jacobians, _ = deficient_and_sound(name)
    value, gradient = (part[2] for part in gram_and_gradient(jacobians, "floor"))
    assert np.isfinite(value)
    assert np.isfinite(gradient).all()
    # Half the log of a ridge of a few rounding errors, at the scale of the rows (< 10).
    assert value < 0.5 * np.log(100 * jnp.finfo(value.dtype).eps) + 2 * np.log(10)
    zero_rows = np.asarray(jacobians[2] == 0.0).all(axis=1)
    assert (np.asarray(gradient)[zero_rows] == 0.0).all()


@pytest.mark.parametrize("name", DEFICIENT)
def test_rank_deficient_minus_infinity(tolerance, name):
    """Oracle: the documented contract."""
    value, gradient = gram_and_gradient(deficient_and_sound(name)[0], "-inf")
    assert value[2] == -np.inf
    assert (np.asarray(gradient[2]) == 0.0).all()


@pytest.mark.parametrize("singular", ["floor", "-inf"])
@pytest.mark.parametrize("name", DEFICIENT)
def test_neighbours_of_a_singular_example_are_untouched(tolerance, name, singular):
    """Oracle: invariance, the same batch with a sound example in the singular one's place."""
    with_singular, without = (
        [np.delete(part, 2, axis=0) for part in gram_and_gradient(batch, singular)]
        for batch in deficient_and_sound(name)
    )
    assert_close(with_singular, without, tolerance.exact)


@pytest.mark.parametrize("zero_rows", [1, 2])
def test_zero_row_counts_with_the_smallest_number(tolerance, zero_rows):
    """Oracle: closed form from the docstring.

    An all-zero row has the smallest positive (normal) number of the dtype as its norm; the scaled
    matrix is diagonal, one where the row is sound and, where it is not, one ridge of 8 R eps in
    each of the two passes.
    """
    jacobian = jnp.asarray([[3.0, 4.0, 0.0], [0.0, 0.0, 0.0]]) * (zero_rows == 1)
    info = jnp.finfo(jacobian.dtype)
    one_row = np.log(float(info.tiny)) + np.log(16 * float(info.eps))
    expected = zero_rows * one_row + (2 - zero_rows) * np.log(5.0)
    np.testing.assert_allclose(gram_and_gradient(jacobian)[0], expected, rtol=1e-5)


@pytest.mark.parametrize("singular", ["floor", "-inf"])
def test_nan_is_never_hidden(singular):
    """Oracle: invariance, a Jacobian with NaN has no determinant under either policy."""
    sound = normal(5, 2, 3)
    value, _ = gram_and_gradient(sound.at[2, 0, 1].set(jnp.nan), singular)
    np.testing.assert_array_equal(np.isnan(value), np.arange(5) == 2)


SINGULAR_AT_ZERO = {  # maps whose Jacobian loses rank exactly where v[1] = 0
    "zero row": lambda v: jnp.stack([v[0], v[1] ** 2]),
    "duplicate rows": lambda v: jnp.stack([v[0] + v[2], v[0] + v[2] + v[1] ** 2]),
}


@pytest.mark.parametrize("singular", ["floor", "-inf"])
@pytest.mark.parametrize("name", SINGULAR_AT_ZERO)
def test_singular_point_of_a_map(name, singular):
    """Oracle: invariance, the other examples as before; the documented answer at the point."""

    @jax.jit
    def both(x):
        log_dets = lambda x: half_log_det_jjt(SINGULAR_AT_ZERO[name], x, singular=singular)
        value, pullback = jax.vjp(log_dets, x)
        return value, pullback(jnp.ones_like(value))[0]

    sound = np.random.default_rng(0).uniform(1.0, 2.0, (4, 3))
    mixed = sound.copy()
    mixed[1, 1] = 0.0
    values, gradients = both(mixed)
    assert (values[1] == -np.inf) == (singular == "-inf")
    assert not np.isnan(values[1])
    assert np.isfinite(gradients).all()
    others = lambda parts: [np.delete(part, 1, axis=0) for part in parts]
    assert_close(others((values, gradients)), others(both(sound)), 2e-4)


# --- summed_jacobian ---------------------------------------------------------------


def test_summed_jacobian_of_independent_rows(tolerance):
    """Oracle: other implementation, `per_example_jacobian`; images, and an auxiliary output."""
    params, x = init_mlp(), normal(4, 2, 3, 1, seed=9)
    f = lambda x: (mlp_outputs(params, x), {"twice": 2 * x})
    outputs, actual, extra = jax.jit(partial(summed_jacobian, f))(x)
    assert_close(outputs, mlp_outputs(params, x), tolerance.exact)
    assert_close(actual, mlp_jacobians(params, x), tolerance.exact)
    assert_close(extra, {"twice": 2 * x}, tolerance.exact)


@pytest.mark.parametrize("weights", [None, [1, 0, 1, 1], [0.0, 0.0, 0.0, 1.0]])
def test_summed_jacobian_of_coupled_rows(tolerance, weights):
    """Oracle: other implementation, the full ``[B, R, B, D]`` Jacobian summed over outputs."""
    params, x = init_mlp(), normal(4, 6, seed=9)

    def standardised(x):  # every row sees every other, as with BatchNorm
        z = mlp_outputs(params, x)
        return (z - z.mean(0, keepdims=True)) / (0.1 + z.std(0, keepdims=True)) + z**2

    full = jax.jit(jax.jacrev(standardised))(x)  # [B', R, B, D]
    expected = np.einsum("crbd,c->brd", full, np.ones(4) if weights is None else weights)
    given = None if weights is None else jnp.asarray(weights)
    summed = jax.jit(partial(summed_jacobian, lambda x: (standardised(x), None)))
    actual = summed(x, given)[1]
    assert_close(actual, expected, tolerance.exact)
    own = np.einsum("brbd->brd", full)
    assert np.abs(actual - own).max() > 0.01  # the coupling matters


# --- inverse_lower -----------------------------------------------------------------


def lower_factors(*shape):
    return jnp.asarray(np.tril(0.4 * np.asarray(normal(*shape)), -1) + 1.5 * np.eye(shape[-1]))


@pytest.mark.parametrize("lead", [(), (2, 3)])
def test_inverse_lower(tolerance, lead):
    """Oracle: NumPy's general inverse in float64; what stands above the diagonal is ignored."""
    factor = lower_factors(*lead, 4, 4)
    expected = np.linalg.inv(np.asarray(factor, np.float64))
    garbage = np.triu(np.full(factor.shape, 1e3), 1)
    invert = jax.jit(inverse_lower)
    assert_close(invert(factor), expected, tolerance.exact)
    assert_close(invert(factor + garbage), expected, tolerance.exact)
    assert (np.triu(invert(factor + garbage), 1) == 0.0).all()


@float64_only
def test_inverse_lower_derivatives(tolerance):
    """Oracle: finite differences; no gradient flows to what stands above the diagonal."""
    factor = lower_factors(3, 4, 4) + np.triu(np.full((3, 4, 4), 0.7), 1)
    invert = jax.jit(inverse_lower)
    check_grads(invert, (factor,), order=2, modes=["fwd", "rev"], rtol=1e-4)
    gradient = jax.jit(jax.grad(lambda f: jnp.sum(jnp.sin(invert(f)))))(factor)
    assert (np.triu(gradient, 1) == 0.0).all()
    assert (np.abs(np.tril(gradient)).max(axis=(1, 2)) > 0.0).all()


# --- Estimators --------------------------------------------------------------------


@float64_only
@pytest.mark.parametrize("name", JACOBIAN_ESTIMATORS)
def test_estimators_are_unbiased(tolerance, name):
    """Oracle: the exact mean over the batch.

    The mean of ``n`` of ``B`` values drawn without replacement has variance
    ``s^2 / n * (1 - n / B)``, ``s^2`` the unbiased variance of the values; the average over ``P``
    independent permutations has ``1 / P`` of it. Four standard errors: chance 6e-5 of a false
    alarm for a fresh key, and the key is fixed. ``exact`` has variance zero: rounding only.
    """
    batch, dim, permutations = 24, 3, 300
    params, x = init_mlp(output_dim=dim), normal(batch, 6, seed=9)
    size = num_jacobian_examples(name, batch, dim)
    exact = mlp_log_dets(params, x)
    keys = jax.random.split(jax.random.key(3), permutations)
    estimate = lambda k: mlp_log_dets(params, jax.random.permutation(k, x)[:size]).mean()
    estimates = jax.jit(jax.vmap(estimate))(keys)
    error = np.sqrt(np.var(exact, ddof=1) / size * (1 - size / batch) / permutations)
    assert abs(estimates.mean() - exact.mean()) < 4 * error + tolerance.exact
    assert (np.std(estimates) > 0.01) == (size < batch)


@pytest.mark.parametrize(
    ("estimator", "batch", "dim", "sub_batch", "expected"),
    [
        ("sub_batch", 256, 15, None, 17),  # the authors' SmallMLP
        ("sub_batch", 128, 20, None, 10),  # the authors' ResNet20
        ("sub_batch", 128, 40, None, 20),  # R // 2 is the larger one
        ("sub_batch", 4, 20, None, 4),  # never more than the batch
        ("sub_batch", 1, 1, None, 1),
        ("exact", 256, 15, None, 256),
        *(("sub_batch", 9, 3, n, n) for n in range(1, 10)),
        ("exact", 256, 15, 7, 7),
    ],
)
def test_number_of_jacobian_examples(estimator, batch, dim, sub_batch, expected):
    """Oracle: closed form, ``max(R // 2, B // R)``, and the authors' own numbers."""
    assert num_jacobian_examples(estimator, batch, dim, sub_batch) == expected


@pytest.mark.parametrize(
    ("estimator", "sub_batch", "message"),
    [
        ("sub_batch", 0, "sub_batch=0: must be from 1 to the batch size, 8"),
        ("sub_batch", -1, "sub_batch=-1"),
        ("exact", 9, "sub_batch=9"),
        ("hutchinson", None, "estimator='hutchinson'.*exact.*sub_batch"),
    ],
)
def test_bad_estimators_are_refused(estimator, sub_batch, message):
    """Oracle: the documented contract."""
    with pytest.raises(ValueError, match=message):
        num_jacobian_examples(estimator, 8, 2, sub_batch)


@hypothesis.given(batch=st.integers(1, 2000), dim=st.integers(1, 200))
def test_sub_batch_size_is_always_possible(batch, dim):
    """Oracle: invariance, between one row and the whole batch, and never under the formula."""
    size = authors_sub_batch_size(batch, dim)
    assert 1 <= size <= batch
    assert size == batch or size >= max(dim // 2, batch // dim)


# --- Compilation -------------------------------------------------------------------


@pytest.mark.parametrize("chunk_size", [None, 2])
def test_one_compilation_per_shape(chunk_size):
    """Oracle: `chex.assert_max_traces`: new numbers of an old shape must not trace again."""
    chex.clear_trace_counter()
    f, x = partial(apply_mlp, init_mlp()), normal(4, 6, seed=9)
    traced = chex.assert_max_traces(lambda x: half_log_det_jjt(f, x, "auto", chunk_size), n=1)
    compiled = jax.jit(traced)
    results = [compiled(x + shift) for shift in range(4)]
    assert_close(results[3], mlp_log_dets(init_mlp(), x + 3), 2e-4)
    with pytest.raises(AssertionError, match="traced > 1 times"):
        compiled(x[:2])  # a new shape does trace: the count is alive


# --- Properties of random small networks -------------------------------------------

seeds = st.integers(0, 2**31 - 1)
dims = st.sampled_from([(1, 1), (3, 2), (4, 4)])  # (D, R): few shapes, so few compilations
float64 = partial(jax.enable_x64, True)


@hypothesis.given(seed=seeds, dims=dims, log_scale=st.floats(-20, 20))
def test_scaling_law(seed, dims, log_scale):
    """Oracle: closed form, ``log J_{c f} = log J_f + R log c``."""
    with float64():
        params, x = init_mlp(*dims, seed=seed), normal(4, dims[0], seed=seed)
        scaled = {**params, "outer": np.exp(log_scale) * params["outer"]}
        expected = mlp_log_dets(params, x) + dims[1] * log_scale
        assert_close(mlp_log_dets(scaled, x), expected, 1e-8)


@hypothesis.given(seed=seeds, order=st.permutations(range(4)))
def test_row_order_is_irrelevant(seed, order):
    """Oracle: invariance of the determinant; the gradient is permuted alike."""
    with float64():
        jacobian = normal(4, 6, seed=seed)
        value, gradient = gram_and_gradient(jacobian)
        assert_close(gram_and_gradient(jacobian[order, :]), (value, gradient[order, :]), 1e-7)


@hypothesis.given(seed=seeds, chunk_size=st.sampled_from([2, 3, 5, 8]))
def test_any_chunk_gives_the_same_values(seed, chunk_size):
    """Oracle: invariance."""
    with float64():
        params, x = init_mlp(3, 2, seed=seed), normal(5, 3, seed=seed)
        chunked = mlp_log_dets(params, x, chunk_size=chunk_size)
        assert_close(chunked, mlp_log_dets(params, x), 1e-9)


@hypothesis.given(seed=seeds, dims=st.sampled_from([(1, 1), (3, 2), (2, 3), (4, 4)]))
def test_forward_equals_reverse(seed, dims):
    """Oracle: the other differentiation mode; wide, square and tall Jacobians."""
    with float64():
        params, x = init_mlp(*dims, seed=seed), normal(4, dims[0], seed=seed)
        assert_close(
            mlp_jacobians(params, x, "forward"), mlp_jacobians(params, x, "reverse"), 1e-12
        )
