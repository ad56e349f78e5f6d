"""Maximum-likelihood fit of class-conditional mixtures to representations."""

import warnings

import jax.numpy as jnp
import numpy as np

from mass_jax.gaussian_mixture import GaussianMixture
from mass_jax.progress import track


def fit_class_mixtures(
    representations: np.ndarray,
    labels: np.ndarray,
    num_classes: int,
    num_components: int,
    *,
    seed: int = 0,
    max_iterations: int = 100,
    relative_floor: float = 1e-6,
) -> GaussianMixture:
    """Fits one mixture per class by expectation maximisation (scikit-learn).

    Robust to what untrained and saturated networks produce:

    * a class with fewer points than components gets as many as it can support,
      repeated with their weights shared out: the density is that of the fewer;
    * every covariance gets a ridge of ``relative_floor`` times the mean variance
      of all representations, so constant or collinear outputs have a density;
    * a class without points gets the Gaussian of all points.

    Args:
      representations: ``[N, R]``.
      labels: ``[N]`` integers in ``[0, K)``.
      num_classes: ``K``.
      num_components: ``M``.
      seed: of scikit-learn's initialisation.
      max_iterations: of expectation maximisation.
      relative_floor: ridge relative to the mean variance of the outputs.

    Returns:
      A mixture with leading axes ``[K, M]``, in JAX's default float dtype.

    Example:
      >>> import numpy as np
      >>> z, labels = np.array([[0.0], [2.0], [10.0], [14.0]]), np.array([0, 0, 1, 1])
      >>> [f"{mean:.3f}" for mean in fit_class_mixtures(z, labels, 2, 1).means.ravel()]
      ['1.000', '12.000']

    References:
      MASS, arXiv:1905.07822, section 5.2 and supplement: the density detector
      of SoftmaxCE; the authors' ``MLE_from_training_data`` initialisation.
    """
    points = np.asarray(representations, np.float64)
    classes = np.asarray(labels)
    if points.ndim != 2 or classes.shape != points.shape[:1]:
        raise ValueError(
            f"representations {points.shape} and labels {classes.shape}: need (N, R) and (N,)"
        )
    if not np.isfinite(points).all():
        raise ValueError("representations hold NaN or infinity; nothing was fitted")
    if len(points) == 0:
        raise ValueError("no representations to fit a mixture to")
    if not np.issubdtype(classes.dtype, np.integer):
        raise ValueError(f"labels have type {classes.dtype}; need integers")
    if classes.min() < 0 or classes.max() >= num_classes:
        raise ValueError(
            f"labels run from {classes.min()} to {classes.max()}; need 0 to {num_classes - 1}"
        )
    # EM runs on points of unit spread: its own thresholds are absolute numbers.
    centre, spread = points.mean(axis=0), float(np.sqrt(points.var(axis=0).mean()))
    if spread <= 1e-12 * np.abs(points).max():
        spread = 1.0  # a constant network, up to rounding
    scaled = (points - centre) / spread
    fitted = [
        _fit_one(
            scaled[classes == k] if (classes == k).any() else scaled,
            num_components if (classes == k).any() else 1,
            num_components,
            seed,
            max_iterations,
            relative_floor,
        )
        for k in track(range(num_classes), "fitting a mixture per class")
    ]
    logits, means, scales = (np.stack(part) for part in zip(*fitted, strict=True))
    return GaussianMixture(
        jnp.asarray(logits, float),
        jnp.asarray(means * spread + centre, float),
        jnp.asarray(scales * spread, float),
    )


def _fit_one(
    points: np.ndarray,
    wanted_components: int,
    num_components: int,
    seed: int,
    max_iterations: int,
    floor: float,
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Logits ``[M]``, means ``[M, R]`` and factors ``[M, R, R]`` of one class."""
    # Here, not above: training starts seconds earlier without scikit-learn.
    from sklearn.exceptions import ConvergenceWarning
    from sklearn.mixture import GaussianMixture as SklearnMixture

    supported = min(wanted_components, len(np.unique(points, axis=0)))
    if len(points) == 1:  # scikit-learn wants two points; doubling one changes nothing
        points = np.repeat(points, 2, axis=0)
    model = SklearnMixture(
        supported,
        covariance_type="full",
        reg_covar=floor,
        max_iter=max_iterations,
        random_state=seed,
    )
    with warnings.catch_warnings():
        # Stopping at max_iterations is a choice of the caller, not a fault.
        warnings.simplefilter("ignore", ConvergenceWarning)
        model.fit(points)
    # Component j repeats component j mod `supported`.
    source = np.arange(num_components) % supported
    share = model.weights_ / np.bincount(source, minlength=supported)
    logits = np.log(np.maximum(share, np.finfo(np.float32).tiny))
    factors = np.linalg.cholesky(model.covariances_)
    return logits[source], model.means_[source], factors[source]
