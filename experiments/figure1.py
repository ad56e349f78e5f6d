"""Figure 1 of the paper: two functions of X with one output law and different CDI.

``X`` is uniform on [0, 1], and so are its images by the identity and by the tent map; but
the tent map forgets which half ``x`` came from: ``C(X, f2(X)) = H(X) - log 2``.

  python -m experiments.figure1 --out_dir=runs/figure1

writes figure1.png and figure1.pdf and prints both CDIs (arXiv:1905.07822, Eq. (1)).
"""

import math
import sys
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from matplotlib.axes import Axes
from matplotlib.figure import Figure

from mass_jax import conserved_differential_information
from mass_jax.command_line import Parser

NUM_DRAWS = 20_000
LEVEL = 0.7  # the output whose preimages are marked
GREY, BLUE, VERMILLION = "#555555", "#0072B2", "#D55E00"  # told apart by any eye


class Example(NamedTuple):
    """A function of one number, what to call it, and the CDI it should have."""

    symbol: str
    kind: str
    f: Callable[[jax.Array], jax.Array]
    preimages: tuple[float, ...]  # of LEVEL
    cdi: float
    closed_form: str
    colour: str


TENT = lambda x: jnp.where(x < 0.5, 2.0 * x, 2.0 - 2.0 * x)
EXAMPLES = (
    Example("f_1", "invertible", lambda x: x, (0.7,), 0.0, "H(X)", BLUE),
    Example("f_2", "two-to-one", TENT, (0.35, 0.65), -math.log(2), r"H(X) - \log 2", VERMILLION),
)


def log_uniform(z: jax.Array) -> jax.Array:
    """Log-density of the uniform law on [0, 1] at ``z`` ``[B, 1]``: ``[B]``."""
    return jnp.where((z >= 0.0) & (z <= 1.0), 0.0, -jnp.inf)[:, 0]


def draw_density(axes: Axes, draws: np.ndarray, symbol: str, colour: str) -> None:
    """Histogram of draws and the exact uniform density."""
    bins = np.linspace(0.0, 1.0, 21).tolist()
    axes.hist(draws, bins=bins, density=True, color=colour, alpha=0.3, label="draws")
    outline = ([-0.2, 0.0, 0.0, 1.0, 1.0, 1.2], [0.0, 0.0, 1.0, 1.0, 0.0, 0.0])
    axes.plot(*outline, color=colour, linewidth=2, label="exact")
    axes.set(xlim=(-0.2, 1.2), ylim=(0.0, 1.5), xticks=[0, 0.5, 1], yticks=[0, 1])
    axes.set(xlabel=f"${symbol}$", title=f"density of ${symbol}$")
    axes.legend(loc="upper center", ncols=2, frameon=False, fontsize=8)


def draw_function(axes: Axes, example: Example) -> None:
    """Graph, with the preimages of one output value."""
    x = jnp.linspace(0.0, 1.0, 201)
    axes.plot(x, example.f(x), color=example.colour, linewidth=2)
    axes.hlines(LEVEL, 0.0, max(example.preimages), color=GREY, linestyle=":", linewidth=1)
    axes.vlines(example.preimages, 0.0, LEVEL, color=GREY, linestyle=":", linewidth=1)
    axes.plot(example.preimages, [LEVEL] * len(example.preimages), "o", color=example.colour)
    axes.set(xlim=(0, 1), ylim=(0, 1.05), xticks=[0, 0.5, 1], yticks=[0, 0.5, 1])
    axes.set(xlabel="$x$", title=f"${example.symbol}(x)$, {example.kind}")


def draw_figure(draws: jax.Array, estimates: list[float]) -> Figure:
    """Density of X on the left; a row for each function on the right."""
    figure = Figure(figsize=(7.2, 4.2), layout="constrained")
    grid = figure.add_gridspec(4, 3)
    draw_density(figure.add_subplot(grid[1:3, 0]), np.asarray(draws[:, 0]), "X", GREY)
    for row, (example, estimate) in enumerate(zip(EXAMPLES, estimates, strict=True)):
        rows = slice(2 * row, 2 * row + 2)
        draw_function(figure.add_subplot(grid[rows, 1]), example)
        axes = figure.add_subplot(grid[rows, 2])
        draw_density(
            axes, np.asarray(example.f(draws[:, 0])), f"{example.symbol}(X)", example.colour
        )
        label = f"$C(X, {example.symbol}(X))$\n$= {example.closed_form}$\n$= {estimate:.3f}$ nats"
        axes.text(0.5, 0.5, label, ha="center", va="center", fontsize=10)
    for axes in figure.axes:
        axes.spines[["top", "right"]].set_visible(False)
        axes.title.set_fontsize(10)
    return figure


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.figure1", description=__doc__)
    parser.add_argument("--out_dir", type=Path, default=Path("runs/figure1"), help="of the figure")
    out_dir = parser.parse_args(argv).out_dir
    try:
        out_dir.mkdir(parents=True, exist_ok=True)
        draws = jax.random.uniform(jax.random.key(0), (NUM_DRAWS, 1))
        cdi = partial(conserved_differential_information, x=draws, log_density=log_uniform)
        estimates = [float(jnp.mean(cdi(example.f))) for example in EXAMPLES]
        print(f"{'function':<10}{'CDI (nats)':>12}{'closed form':>13}")
        for example, estimate in zip(EXAMPLES, estimates, strict=True):
            print(f"{example.symbol.replace('_', ''):<10}{estimate:>12.4f}{example.cdi:>13.4f}")
        figure = draw_figure(draws, estimates)
        for path in (out_dir / "figure1.png", out_dir / "figure1.pdf"):
            figure.savefig(path, dpi=200)
            print(path)
    except OSError as error:
        print(f"error: cannot write to --out_dir={out_dir}: {error.strerror}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
