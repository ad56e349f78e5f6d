"""The estimator study for people: text, Markdown, and the plot of variance against cost."""

import json
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from matplotlib.axes import Axes
from matplotlib.figure import Figure
from matplotlib.lines import Line2D

from experiments.cells import NETWORKS, RESULTS
from mass_jax.plots import BLACK, BLUE, GREEN, GREY, ORANGE, PURPLE, SKY, VERMILLION

RECORD = RESULTS / "estimator_study.json"
_HEADINGS = (
    "network", "at step", "estimator", "n", "FLOPs", "bias %", "variance, one batch",
    "over batches", "at equal cost", "share of noise", "whole noise",
)  # fmt: skip
_DIFFERENCES = {
    "accuracy": ("accuracy, points", 100.0, ".2f"),
    "nll": ("NLL", 1.0, ".3f"),
    "brier": ("Brier", 1.0, ".4f"),
    "cross_entropy": ("cross-entropy term", 1.0, ".3f"),
    "entropy_term": ("entropy term", 1.0, ".2f"),
    "jacobian_term": ("Jacobian term", 1.0, ".2f"),
}
_LOOKS = {
    "exact": (BLACK, "s"),
    "sub_batch": (BLUE, "o"),
    "few": (VERMILLION, "v"),
    "probe": (GREEN, "D"),
    "fast": (ORANGE, "X"),
    "gram": (SKY, "P"),
    "lazy": (PURPLE, "^"),
}
_TITLES = {name: title for title, name in NETWORKS.items()}


def equal_cost(made: Mapping[str, Any], state: str, estimator: str) -> float:
    """Variance if as much were spent on the term as ``sub_batch`` does, over its variance.

    Averaging ``c`` times as many draws costs ``c`` times as much and divides the variance by
    ``c``, so variance times cost does not depend on ``c``. Cost: FLOPs beyond those of a step
    without the term; variance: in the long run, over random batches.
    """

    def product(name: str) -> float:
        seen = made["states"][state]["estimators"][name]["random_batches"]
        return seen["long_run_variance"] * (made["flops"][name] - made["flops"]["none"])

    return product(estimator) / product("sub_batch")


def _gradient_rows(network: str, made: Mapping[str, Any]) -> Iterator[list[str]]:
    for state, seen in made["states"].items():
        for name, row in seen["estimators"].items():
            one, whole = row["one_batch"], row["random_batches"]
            is_exact = one["variance"] < 1e-6  # rounding
            bias = f"{100 * one['bias']:.1f} ± {100 * one['bias_error']:.1f}"
            yield [
                network,
                f"{seen['step']:,}",
                name,
                str(row["num_examples"]),
                f"{made['flops'][name] / made['flops']['none']:.2f}",
                "0 (exact)" if is_exact else bias,
                "0 (exact)" if is_exact else _number(one["variance"]),
                _number(whole["variance"]),
                f"{equal_cost(made, state, name):.2f}",
                _share(row["noise_share"]),
                f"{row['total_noise_over_exact']:.3f}",
            ]


def _number(value: float) -> str:
    """Three digits, never in powers of ten."""
    return f"{value:.3g}" if value < 100 else f"{value:,.0f}"


def _share(value: float) -> str:
    return f"{100 * value:.2g} %" if value >= 1e-6 else "< 0.0001 %"


def _training_rows(network: str, made: Mapping[str, Any]) -> Iterator[list[str]]:
    for name, table in made["differences"].items():
        if table:
            seeds = table["accuracy"]["seeds"]
            yield [network, f"{made['steps']:,}", f"{name} - sub_batch", str(seeds)] + [
                _difference(table[metric], factor, form)
                for metric, (_, factor, form) in _DIFFERENCES.items()
            ]


def _difference(seen: Mapping[str, Any], factor: float, form: str) -> str:
    mean = format(factor * seen["mean"], "+" + form)
    return mean if seen["error"] is None else f"{mean} ± {format(factor * seen['error'], form)}"


def _training_headings() -> list[str]:
    shown = [heading for heading, _, _ in _DIFFERENCES.values()]
    return ["network", "steps", "difference", "seeds", *shown]


def gradient_text(network: str, made: Mapping[str, Any]) -> str:
    """The table of gradients for a terminal."""
    return _as_text([list(_HEADINGS), *_gradient_rows(network, made)])


def training_text(network: str, made: Mapping[str, Any]) -> str:
    """The table of training runs for a terminal."""
    return _as_text([_training_headings(), *_training_rows(network, made)])


def _as_text(lines: Sequence[Sequence[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join(cell.rjust(width) for cell, width in zip(line, widths, strict=True))
        for line in lines
    )


def _as_markdown(headings: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    lines = [headings, ["---"] * len(headings), *rows]
    return "".join("| " + " | ".join(line) + " |\n" for line in lines)


def gradients_markdown() -> str:
    """The recorded gradients, as Markdown."""
    recorded = json.loads(RECORD.read_text())["gradients"]
    networks = [name for name in NETWORKS.values() if name in recorded]
    rows = [row for name in networks for row in _gradient_rows(name, recorded[name])]
    return _as_markdown(_HEADINGS, rows)


def training_markdown() -> str:
    """The recorded training runs, as Markdown."""
    recorded = json.loads(RECORD.read_text()).get("training", {})
    networks = [name for name in NETWORKS.values() if name in recorded]
    rows = [row for name in networks for row in _training_rows(name, recorded[name])]
    return _as_markdown(_training_headings(), rows) if rows else "Not run yet.\n"


def draw(recorded: Mapping[str, Any]) -> Figure:
    """Variance over random batches against the cost of the term; a panel per network and state.

    Args:
      recorded: of `estimator_study.gradients`, by network.
    """
    names = [name for name in NETWORKS.values() if name in recorded]
    figure = Figure(figsize=(9.5, 0.9 + 3.6 * len(names)), layout="constrained")
    grid = figure.subplots(len(names), 2, squeeze=False, sharex="row", sharey="row")
    for network, axes in zip(names, grid, strict=True):
        made = recorded[network]
        for axis, state in zip(axes, made["states"], strict=False):
            _panel(axis, made, state)
            step = made["states"][state]["step"]
            when = "at initialisation" if step == 0 else f"after {step:,} steps"
            axis.set_title(f"{_TITLES[network]}, {when}")
        axes[0].set_ylabel("variance / squared norm of the gradient")
    for axis in grid[-1]:
        axis.set_xlabel("FLOPs of the term / FLOPs of a step without it")
    shown = {name for made in recorded.values() for name in made["flops"]} & set(_LOOKS)
    handles = [
        Line2D([], [], color=colour, marker=marker, ls="", ms=8, label=name)
        for name, (colour, marker) in _LOOKS.items()
        if name in shown
    ]
    handles += [
        Line2D([], [], color=PURPLE, marker="^", mfc="white", ls="", ms=8, label="lazy, one step"),
        Line2D([], [], color=GREY, ls="--", label="as good as sub_batch at its cost"),
    ]
    figure.legend(handles=handles, loc="outside lower center", ncols=4, frameon=False)
    return figure


def _panel(axis: Axes, made: Mapping[str, Any], state: str) -> None:
    seen, base = made["states"][state], made["flops"]["none"]
    cost = {name: made["flops"][name] / base - 1.0 for name in seen["estimators"]}
    axis.set_xscale("log")
    axis.set_yscale("log")
    axis.grid(color="#dddddd", lw=0.6)
    axis.set_axisbelow(True)
    for name, row in seen["estimators"].items():
        colour, marker = _LOOKS[name]
        whole = row["random_batches"]
        if row["every"] > 1:
            axis.plot(
                [cost[name]] * 2,
                [whole["variance"], whole["long_run_variance"]],
                color=colour,
                lw=1,
            )
            axis.plot(cost[name], whole["variance"], marker, color=colour, mfc="white", ms=8)
        # "lazy" lies on "few" in the long run: small on large shows both.
        size = {"few": 11, "lazy": 6}.get(name, 8)
        axis.plot(cost[name], whole["long_run_variance"], marker, color=colour, ms=size)
    reference = seen["estimators"]["sub_batch"]["random_batches"]["variance"]
    ends = [min(cost.values()) / 2, max(cost.values()) * 2]
    line = [reference * cost["sub_batch"] / end for end in ends]
    axis.plot(ends, line, "--", color=GREY, lw=1.2, zorder=1)
    others = seen["rest_variance"] / (made["beta"] * seen["jacobian_gradient_norm"]) ** 2
    axis.text(
        0.97,
        0.95,
        f"the other terms' noise, in this unit: {_number(others)}",
        transform=axis.transAxes,
        ha="right",
        va="top",
        fontsize=9,
    )
