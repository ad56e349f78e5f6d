r"""Per-example Jacobians and their log-determinants.

Notation: ``f`` maps one example of size ``D`` to a representation of size
``R``; ``J`` is its ``[R, D]`` Jacobian; ``J_f = sqrt(det(J J^T))`` is the
Jacobian determinant of MASS (arXiv:1905.07822, the display below Eq. (1)).

Batch elements must not interact for a Jacobian to be "per example". Networks
with BatchNorm in training mode do interact; `summed_jacobian` names what the
authors compute there, and `losses.py` offers both definitions.
"""

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp

from mass_jax.log_determinant import SingularPolicy, check_not_expanding, half_log_det_gram

ExampleFn = Callable[[jax.Array], jax.Array]  # one example [...] -> [R]
BatchFn = Callable[[jax.Array], tuple[jax.Array, Any]]  # a batch [B, ...] -> [B, R], and more
JacobianMode = Literal["auto", "forward", "reverse"]


def per_example_jacobian(
    f: ExampleFn,
    x: jax.Array,
    mode: JacobianMode = "auto",
    chunk_size: int | None = None,
) -> jax.Array:
    """Jacobian of ``f`` at every example of a batch.

    Cost: ``R`` backward passes per example in reverse mode, ``D`` tangent
    passes in forward mode. ``"auto"`` takes the cheaper one, reverse when
    ``R <= D``.

    Args:
      f: maps one example ``[...]`` (``D`` numbers) to ``[R]``.
      x: ``[B, ...]``.
      mode: ``"auto"``, ``"forward"`` (`jax.jacfwd`) or ``"reverse"``
        (`jax.jacrev`).
      chunk_size: examples worked on at once; bounds memory. ``None`` takes all.

    Returns:
      ``[B, R, D]``, trailing input axes flattened.

    Example:
      >>> import jax.numpy as jnp
      >>> x = jnp.array([[1.0, 2.0]])
      >>> per_example_jacobian(lambda v: jnp.stack([v[0] * v[1]]), x).tolist()
      [[[2.0, 1.0]]]
    """
    output_dim, input_dim = _example_dims(f, x)
    check_mode(mode)
    forward = mode == "forward" or (mode == "auto" and output_dim > input_dim)
    jacobian = jax.jacfwd(f) if forward else jax.jacrev(f)
    return map_examples(lambda v: jacobian(v).reshape(output_dim, input_dim), x, chunk_size)


def half_log_det_jjt(
    f: ExampleFn,
    x: jax.Array,
    mode: JacobianMode = "auto",
    chunk_size: int | None = None,
    singular: SingularPolicy = "floor",
) -> jax.Array:
    r"""``log J_f(x) = 1/2 log det(J J^T)`` of every example, in nats.

    Args:
      f: maps one example ``[...]`` to ``[R]``.
      x: ``[B, ...]``.
      mode, chunk_size: as in `per_example_jacobian`. With a chunk size the
        backward pass recomputes each chunk, so memory stays bounded there too.
      singular: see `half_log_det_gram`.

    Returns:
      ``[B]``.

    Raises:
      ValueError: at trace time, if ``R > D`` (``J J^T`` is then singular for
        every ``f``).

    Example:
      >>> import jax.numpy as jnp
      >>> value = half_log_det_jjt(lambda v: 3.0 * v, jnp.ones((1, 2)))
      >>> f"{value[0]:.3f}"  # 2 log 3
      '2.197'

    References:
      MASS, arXiv:1905.07822, definition of ``J_f`` below Eq. (1).
    """
    output_dim, input_dim = _example_dims(f, x)
    check_not_expanding(output_dim, input_dim)

    if chunk_size is None:
        return half_log_det_gram(per_example_jacobian(f, x, mode), singular)

    def one(v: jax.Array) -> jax.Array:
        return half_log_det_gram(per_example_jacobian(f, v[None], mode), singular)[0]

    return map_examples(one, x, chunk_size)


def summed_jacobian(
    f: BatchFn, x: jax.Array, weights: jax.Array | None = None
) -> tuple[jax.Array, jax.Array, Any]:
    """Outputs of a batch function and its Jacobian summed over the outputs.

    Row ``b`` of the result is ``sum_b' w_b' d f(x)_b' / d x_b``, obtained by
    ``R`` backward passes with a batch-wide one-hot cotangent. Where examples do
    not interact this is the per-example Jacobian; where they do (BatchNorm in
    training mode) it is the quantity the authors differentiate.

    Args:
      f: maps ``[B, ...]`` to ``[B, R]`` and anything else it wants to return.
      x: ``[B, ...]``.
      weights: ``[B]`` zeros and ones; rows of weight zero are padding.

    Returns:
      ``f(x)`` as ``[B, R]``, the Jacobian as ``[B, R, D]``, and what else ``f``
      returned.

    Example:
      >>> import jax.numpy as jnp
      >>> centre = lambda v: (v - v.mean(0, keepdims=True), None)
      >>> outputs, jacobian, _ = summed_jacobian(centre, jnp.eye(2))
      >>> float(abs(jacobian).max())  # subtracting the batch mean forgets the mean
      0.0
    """
    outputs, pullback, auxiliary = jax.vjp(f, x, has_aux=True)
    batch, output_dim = outputs.shape
    one_hot = jnp.eye(output_dim, dtype=outputs.dtype)[:, None, :]  # [R, 1, R]
    cotangents = jnp.broadcast_to(one_hot, (output_dim, batch, output_dim))
    if weights is not None:
        cotangents = cotangents * weights.astype(outputs.dtype)[None, :, None]
    (rows,) = jax.vmap(pullback)(cotangents)  # [R, B, ...]
    return outputs, jnp.moveaxis(rows.reshape(output_dim, batch, -1), 0, 1), auxiliary


def check_mode(mode: str) -> None:
    """Refuses a mode of differentiation that does not exist."""
    if mode not in get_args(JacobianMode):
        raise ValueError(f"mode={mode!r}: choose one of {sorted(get_args(JacobianMode))}")


def map_examples(f: Callable[[Any], jax.Array], x: Any, chunk_size: int | None) -> jax.Array:
    """``vmap(f)(x)``, at most ``chunk_size`` examples at a time.

    Args:
      f: works on one example.
      x: an array, or any pytree of arrays, with a leading batch axis.
      chunk_size: at least 1, or ``None`` for the whole batch at once.
    """
    return map_chunks(jax.vmap(f), x, chunk_size)


def map_chunks(f: Callable[[Any], jax.Array], x: Any, chunk_size: int | None) -> jax.Array:
    """``f(x)`` of a function whose examples do not interact, a chunk at a time.

    Args:
      f: works on a batch of any size.
      x: an array, or any pytree of arrays, with a leading batch axis.
      chunk_size: as in `map_examples`.
    """
    count = jax.tree.leaves(x)[0].shape[0]
    if chunk_size is None or chunk_size >= count:
        return f(x)
    if chunk_size < 1:
        raise ValueError(f"chunk_size={chunk_size}: must be at least 1, or None for no chunks")
    whole = count - count % chunk_size
    chunks = jax.tree.map(lambda a: a[:whole].reshape(-1, chunk_size, *a.shape[1:]), x)
    # Without the checkpoint, the backward pass would keep every chunk's residuals.
    values = jax.lax.map(jax.checkpoint(f), chunks)
    values = values.reshape(whole, *values.shape[2:])
    if whole == count:
        return values
    return jnp.concatenate([values, f(jax.tree.map(lambda a: a[whole:], x))])


def _example_dims(f: ExampleFn, x: jax.Array) -> tuple[int, int]:
    """``(R, D)`` of ``f`` on one example of ``x``."""
    example = jax.ShapeDtypeStruct(x.shape[1:], x.dtype)
    output = jax.eval_shape(f, example)
    if output.ndim != 1:
        raise ValueError(
            f"f must map one example {x.shape[1:]} to a vector (R,), "
            f"but returned shape {output.shape}"
        )
    return output.size, example.size
