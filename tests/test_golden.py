"""Parity with the authors' PyTorch code, through the public API.

Oracle: values computed by the authors' implementation in float64 (golden/README.md).
``MASS_GOLDEN_DIR`` names another directory of the same form.
"""

import itertools
import os
import re
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mass_jax
from mass_jax import gaussian_mixture, metrics, networks
from mass_jax.gaussian_mixture import GaussianMixture
from mass_jax.methods import vib
from mass_jax.model import ModelParams
from mass_jax.networks import TrainContext
from mass_jax.representation import represent

# The suite compiles without optimisation; second derivatives of convolutions need it.
jit = partial(
    jax.jit,
    compiler_options={"xla_backend_optimization_level": 3, "xla_cpu_use_fusion_emitters": True},
)
GOLDEN = Path(os.environ.get("MASS_GOLDEN_DIR", Path(__file__).parent / "golden"))


def load(name):
    with np.load(GOLDEN / f"{name}.npz") as archive:
        return {key: archive[key] for key in archive.files}


def relative_error(ours, theirs):
    """Largest error relative to the largest entry of the array."""
    ours, theirs = np.asarray(ours, np.float64), np.asarray(theirs, np.float64)
    assert ours.shape == theirs.shape
    scale = np.abs(theirs).max()
    # Below 1e-9 theirs is an exact zero met by rounding: compare absolutely.
    return np.abs(ours - theirs).max() / (scale if scale > 1e-9 else 1.0)


def assert_close(ours, theirs, rtol, name=""):
    error = relative_error(ours, theirs)
    assert error <= rtol, f"{name}: relative error {error:.2e} > {rtol:.0e}"


# --- The authors' names and layouts to ours ---------------------------------------


def our_path(name):
    """``net.layer2.0.bn1.weight`` -> our module path and parameter."""
    parts = name.removeprefix("net.").split(".")
    *module, leaf = parts
    if module[0].startswith("layer"):
        stage, block = int(module[0][5:]) - 1, module[1]
        kind, index = re.fullmatch(r"(conv|bn)(\d)", module[2]).groups()
        layer = f"{ {'conv': 'conv', 'bn': 'norm'}[kind] }_{int(index) - 1}"
        return (f"stage_{stage}_block_{block}", layer), leaf
    if module[0] == "fcout":
        return ("output",), leaf
    kind, index = re.fullmatch(r"(fc|bn|conv)(\d)", module[0]).groups()
    return (kind, int(index) - 1), leaf


def to_ours(golden, prefix, network, image_shape):
    """Network parameters and statistics from the authors' arrays."""
    params, stats = {}, {}
    for name, value in golden.items():
        if not name.startswith(prefix + "net."):
            continue
        (module, leaf) = our_path(name.removeprefix(prefix))
        if module[0] in ("fc", "bn", "conv"):
            kind, index = module
            if network == "resnet20":
                module = ({"conv": "conv", "bn": "norm"}[kind],)
            else:
                module = (f"{ {'fc': 'linear', 'bn': 'norm'}[kind] }_{index}",)
        value = np.asarray(value, np.float64)
        tree = params
        if leaf in ("running_mean", "running_var"):
            tree, leaf = stats, leaf.removeprefix("running_")
        elif leaf == "weight":
            if value.ndim == 4:
                value, leaf = value.transpose(2, 3, 1, 0), "kernel"
            elif value.ndim == 2:
                if module == ("linear_0",):  # channel-major pixels to ours
                    channels, height, width = image_shape
                    value = value.reshape(-1, channels, height, width).transpose(0, 2, 3, 1)
                    value = value.reshape(value.shape[0], -1)
                value, leaf = value.T, "kernel"
            else:
                leaf = "scale"
        for part in module:
            tree = tree.setdefault(part, {})
        tree[leaf] = jnp.asarray(value, float)
    return params, stats


def mixtures(golden, prefix):
    def stack(field):
        names = sorted(
            (n for n in golden if re.fullmatch(rf"{prefix}var_dist\.q\.\d+\.{field}", n)),
            key=lambda n: int(n.split(".")[-2]),
        )
        return jnp.asarray(np.stack([golden[n] for n in names]), float)

    return GaussianMixture(stack("mixture_logits"), stack("loc"), stack("scale_tril"))


def images(golden):
    return jnp.asarray(golden["x"].transpose(0, 2, 3, 1), float)


class MassCase:
    def __init__(self, network):
        self.golden = golden = load(f"mass_{network}")
        self.network, self.image_shape = network, golden["x"].shape[1:]
        self.x, self.labels = images(golden), jnp.asarray(golden["y"])
        self.beta = float(golden["beta"])
        weights, stats = to_ours(golden, "params/", network, self.image_shape)
        q = mixtures(golden, "params/")
        self.dim = q.means.shape[-1]
        init = partial(
            mass_jax.init,
            network=network,
            input_shape=self.x.shape[1:],
            representation_dim=self.dim,
            num_classes=q.means.shape[0],
            num_components=q.means.shape[1],
        )
        ours = jax.eval_shape(init, jax.random.key(0))
        self.params = ours.replace(network=weights, head=q, batch_stats=stats)
        shapes = partial(jax.tree.map, lambda leaf: leaf.shape)
        assert shapes(self.params) == shapes(ours)

    def method(self, **options):
        return mass_jax.make_method("mass", representation_dim=self.dim, beta=self.beta, **options)

    def expected(self, prefix):
        network, _ = to_ours(self.golden, prefix + "grad/", self.network, self.image_shape)
        head = mixtures(self.golden, prefix + "grad/")
        return self.golden[prefix + "loss"], network, head


# --- Kinks ------------------------------------------------------------------------
#
# The parameters were rounded to float32 when they were stored. A ReLU whose input is
# smaller than that rounding has no determined sign, and the gradient jumps by some
# 1e-3 when it flips. So: the sign of every nearly-zero unit is set, to what float64
# says; those below the rounding of the storage are tried both ways. One assignment must
# agree to the full tolerance.

STORED_ROUNDING = 3e-7
FLOAT32_ROUNDING = 2e-5


class SignedRelu:
    """ReLU whose nearly-zero units take their sign from `signs`, in order of calls."""

    def __init__(self):
        self.inputs, self.units, self.signs, self.calls = [], None, None, 0

    def __call__(self, x):
        if self.units is None:  # first pass: look
            self.inputs.append(x)
            return jax.nn.relu(x)
        positive = x > 0
        if self.calls in self.units:
            where, start = self.units[self.calls]
            signs = self.signs[start : start + len(where)]
            positive = positive.ravel().at[where].set(signs).reshape(x.shape)
        self.calls += 1
        return jnp.where(positive, x, 0.0)

    def find_units(self):
        """Nearly-zero units of the recorded pass: their signs, and which are undetermined."""
        self.units, signs, undetermined = {}, [], []
        for call, x in enumerate(self.inputs):
            flat = np.asarray(x).ravel()
            where = np.flatnonzero(np.abs(flat) < FLOAT32_ROUNDING)
            if len(where):
                self.units[call] = (where, len(signs))
                undetermined += list(
                    len(signs) + np.flatnonzero(np.abs(flat[where]) < STORED_ROUNDING)
                )
                signs += list(flat[where] > 0)
        return np.array(signs, bool), undetermined


def assignments_of_signs(network, prefix):
    """The recording ReLU of a case, and every admissible assignment of signs."""
    with jax.enable_x64(True):
        case, relu = MassCase(network), SignedRelu()
        n = int(case.golden["train/n_jacobian_examples"])
        module = case.params.module.clone(nonlinearity=relu)
        variables = (case.params.network, case.params.batch_stats)
        if prefix == "train/":  # sub-batch and rest are forwarded apart
            for part in (case.x[:n], case.x[n:]):
                networks.apply_train(module, *variables, part, TrainContext())
        else:
            # The forward pass, and once more below the Jacobian.
            for _ in range(2):
                networks.apply(module, *variables, case.x)
        signs, undetermined = relu.find_units()
    found = []
    for flips in itertools.product([False, True], repeat=len(undetermined)):
        candidate = signs.copy()
        candidate[undetermined] ^= np.array(flips, bool)
        found.append(candidate)
    return relu, found


def assert_loss_and_gradient(case, prefix, method, rtol):
    loss, network, head = case.expected(prefix)
    params, relu, candidates = case.params, None, [np.zeros(0, bool)]
    if case.network == "resnet20":
        relu, candidates = assignments_of_signs(case.network, prefix)
        params = params.replace(module=params.module.clone(nonlinearity=relu))

    @jit
    def value_and_grad(params, signs):
        if relu is not None:
            relu.signs, relu.calls = signs, 0
        objective = lambda p: method.loss(p, case.x, case.labels, TrainContext()).objective()
        return jax.value_and_grad(objective)(params)

    expected, best = (network, head), {"": np.inf}
    for signs in candidates:
        ours, gradient = value_and_grad(params, signs)
        assert_close(ours, loss, rtol, "loss")
        errors = relative_errors((gradient.network, gradient.head), expected)
        if max(errors.values()) < max(best.values()):
            best, best_signs, best_gradient = errors, signs, gradient
        if max(best.values()) <= rtol:
            return
    # What the rounding of the stored parameters alone does to the gradient, measured.
    _, moved = value_and_grad(moved_by_storage_rounding(params), best_signs)
    storage = relative_errors(
        (moved.network, moved.head), (best_gradient.network, best_gradient.head)
    )
    for name, error in best.items():
        allowed = max(rtol, 4 * storage[name])
        assert error <= allowed, f"{name}: relative error {error:.2e} > {allowed:.0e}"


def moved_by_storage_rounding(params):
    """The same parameters, each moved at random within half a float32 spacing."""
    generator = np.random.default_rng(0)

    def move(value):
        value = np.asarray(value, np.float64)
        spacing = np.spacing(np.abs(value).astype(np.float32)).astype(np.float64)
        return jnp.asarray(value + generator.uniform(-0.5, 0.5, value.shape) * spacing, float)

    return params.replace(network=jax.tree.map(move, params.network))


def relative_errors(ours, theirs):
    """Largest error of each array relative to its largest entry, by name."""
    assert jax.tree.structure(ours) == jax.tree.structure(theirs)
    leaves, _ = jax.tree.flatten_with_path(ours)
    return {
        jax.tree_util.keystr(path): relative_error(value, expected)
        for (path, value), expected in zip(leaves, jax.tree.leaves(theirs), strict=True)
    }


def assert_tree_close(ours, theirs, rtol):
    for name, error in relative_errors(ours, theirs).items():
        assert error <= rtol, f"{name}: relative error {error:.2e} > {rtol:.0e}"


@pytest.fixture(params=["small_mlp", "resnet20"])
def case(request, tolerance):
    return MassCase(request.param)


def test_representation_densities_and_posterior(case, tolerance):
    z = jit(ModelParams.representation)(case.params, case.x)
    assert_close(z, case.golden["eval/z"], tolerance.golden)
    log_q = gaussian_mixture.log_prob(case.params.q, z)
    assert_close(log_q, case.golden["eval/log_q"], tolerance.golden)
    posterior = gaussian_mixture.log_posterior(log_q)
    assert_close(posterior, case.golden["eval/log_posterior"], tolerance.golden)
    method = mass_jax.make_method("mass", representation_dim=case.dim)
    log_probs = jit(method.log_probs)(case.params, case.x)
    assert_close(log_probs, case.golden["eval/log_posterior"], tolerance.golden)
    scores = jit(method.ood_scores)(case.params, case.x)
    assert_close(scores["max_log_q"], -case.golden["eval/log_q"].max(-1), tolerance.golden)


def test_loss_terms_and_per_example_log_determinants(case, tolerance):
    @jit
    def loss_terms(params, x):
        f = lambda v: params.representation(v[None])[0]
        log_q = gaussian_mixture.log_prob(params.q, params.representation(x))
        return mass_jax.mass_loss_terms(log_q, case.labels, mass_jax.half_log_det_jjt(f, x))

    terms = loss_terms(case.params, case.x)
    assert_close(-terms.jacobian, case.golden["eval/half_log_det_jjt"], tolerance.golden)
    assert_close(terms.cross_entropy.mean(), case.golden["eval/cross_entropy"], tolerance.golden)
    assert_close(terms.entropy.mean(), case.golden["eval/entropy_term"], tolerance.golden)
    assert_close(terms.jacobian.mean(), case.golden["eval/jacobian_term"], tolerance.golden)
    cdi = case.golden["eval/entropy_term"] + case.golden["eval/jacobian_term"]
    assert_close(jit(mass_jax.cdi_loss)(case.params, case.x), cdi, tolerance.golden)


def test_full_batch_loss_and_every_gradient(case, tolerance):
    method = case.method(estimator="exact", batch_stats="running")
    assert_loss_and_gradient(case, "eval_full/", method, tolerance.golden)


def test_authors_training_step(case, tolerance):
    """The reduced-Jacobian step in ``"paper"`` mode: loss, outputs, every gradient."""
    n = int(case.golden["train/n_jacobian_examples"])
    seen_by = partial(represent, num_jacobian=n, batch_stats="paper", context=TrainContext())
    seen = jit(seen_by)(case.params, case.x)
    assert_close(seen.z, case.golden["train/z"], tolerance.golden)
    method = case.method(sub_batch=n, batch_stats="paper")
    assert_loss_and_gradient(case, "train/", method, tolerance.golden)


def test_default_sub_batch_is_the_authors(case):
    n = mass_jax.estimators.num_jacobian_examples("sub_batch", case.x.shape[0], case.dim)
    assert n == int(case.golden["train/n_jacobian_examples"])


# --- VIB --------------------------------------------------------------------------


@pytest.mark.parametrize("covariance", ["full", "diagonal"])
def test_vib_with_given_noise(covariance, tolerance):
    golden = load({"full": "vib_full", "diagonal": "vib_diag"}[covariance])
    x, labels, noise = images(golden), jnp.asarray(golden["y"]), jnp.asarray(golden["eps"], float)
    dim, rtol = noise.shape[-1], tolerance.golden

    def head_of(prefix):
        field = lambda name: jnp.asarray(golden[prefix + name], float)
        return vib.VibHead(
            {"kernel": field("decoder.weight").T, "bias": field("decoder.bias")},
            GaussianMixture(
                field("marginal.mixture_logits"),
                field("marginal.loc"),
                field("marginal.scale_tril"),
            ),
        )

    weights, stats = to_ours(golden, "params/", "small_mlp", golden["x"].shape[1:])
    module = networks.SmallMLP(vib.num_outputs(dim, covariance))
    params = ModelParams(weights, head_of("params/"), stats, module)

    def terms(params):
        encoding = vib.encode(params.representation(x), dim, covariance)
        return encoding, vib.bottleneck(encoding, params.head, noise, labels)

    def objective(params):
        _, seen = terms(params)
        return jnp.mean(seen.cross_entropy) + float(golden["beta"]) * jnp.mean(seen.rate)

    encoding, seen = jit(terms)(params)
    assert_close(encoding.mean, golden["eval/mean"], rtol)
    scale = encoding.scale
    if covariance == "diagonal":
        scale = jnp.diagonal(scale, axis1=-2, axis2=-1)
    assert_close(scale, golden["eval/scale"], rtol)
    assert_close(seen.samples, golden["eval/samples"], rtol)
    assert_close(seen.log_probs, golden["eval/log_posterior"], rtol)
    assert_close(seen.rate, golden["eval/rate"], rtol)
    assert_close(seen.rate.mean(), golden["eval/kl"], rtol)

    loss, gradient = jit(jax.value_and_grad(objective))(params)
    assert_close(loss, golden["eval/loss"], rtol)
    network, _ = to_ours(golden, "eval/grad/", "small_mlp", golden["x"].shape[1:])
    expected = (network, head_of("eval/grad/"))
    assert_tree_close((gradient.network, gradient.head), expected, rtol)


# --- Metrics ----------------------------------------------------------------------


def test_metrics():
    golden = load("metrics")
    ours = metrics.classification_metrics(golden["log_probs"], golden["labels"])
    ours |= metrics.detection_metrics(golden["scores_in"], golden["scores_out"])
    for name in ("accuracy", "nll", "brier", "entropy", "auroc", "apr_in", "apr_out"):
        assert_close(ours[name], golden[name], 1e-6, name)
