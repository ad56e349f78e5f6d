"""``python -m experiments.sweep``: run the cells of the paper's tables that are not done.

Stop it at any moment and start it again: finished cells are skipped, a broken-off one
resumes from its checkpoint. Each finished run becomes one file in ``experiments/results/``;
``report.html`` in the workdir shows them all. ``--launcher`` says where cells run: one after
another here, on a Ray cluster, or as a Slurm job array.
"""

import argparse
import os
import signal
import sys
from collections.abc import Sequence
from pathlib import Path

from experiments.cells import RESULTS, SEEDS, TRAIN_SIZES, Cell, is_done, paper_cells
from experiments.cost import minutes_by_cell
from experiments.launchers import LAUNCHERS, LauncherError
from experiments.running import duration
from experiments.sweep_report import report_if_possible
from experiments.sweep_state import SweepStateError, remember
from mass_jax.command_line import Parser, comma_separated, not_negative, positive
from mass_jax.data import DataError, load_dataset


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = _parser()
    options = parser.parse_args(argv)
    if unknown := _unknown_values(options):
        parser.error(unknown)
    if options.results.exists() and not options.results.is_dir():
        parser.error(f"--results={options.results}: is not a directory")
    cells = _chosen(options)
    if not cells:
        print("error: no cell of the paper's tables fits these options", file=sys.stderr)
        return 2
    waiting = [cell for cell in cells if not is_done(cell, options.results)]
    print(f"{len(cells)} cells, {len(cells) - len(waiting)} done")
    minutes = minutes_by_cell(waiting)
    if options.dry_run:
        for cell in waiting:
            print(f"{cell.name:<60} {duration(minutes[cell])}")
        print(f"{'all of them, one after another':<60} {duration(sum(minutes.values()))}")
        return 0
    if options.launcher != "local":  # other machines have other current directories, and data
        _make_absolute(options)
    elif waiting and (missing := _what_is_wrong_with_data(waiting[0], options.data_dir)):
        print(f"error: {missing}", file=sys.stderr)
        return 2
    try:
        remember(cells, options.workdir)
        launch = LAUNCHERS[options.launcher]
        failed, signum = launch(waiting, minutes, options) if waiting else ([], 0)
    except (LauncherError, SweepStateError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    report_if_possible(options.workdir, options.results)
    if signum:
        print("stopped; the same command goes on from here", file=sys.stderr)
        return 128 + signum
    return 1 if failed else 0


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="python -m experiments.sweep", description=__doc__)
    parser.add_argument("--network", choices=["small_mlp", "resnet20"], required=True)
    parser.add_argument(
        "--methods", type=comma_separated(str, "vib,mass"), help="e.g. softmax_ce,vib,mass"
    )
    parser.add_argument("--betas", type=comma_separated(float, "0,1e-3"), help="e.g. 0,1e-3")
    parser.add_argument(
        "--train_sizes", type=comma_separated(int, "2500,10000"), help=f"of {TRAIN_SIZES}"
    )
    parser.add_argument("--seeds", type=comma_separated(int, "0,1"), help=f"of {SEEDS}")
    parser.add_argument(
        "--batch_stats",
        choices=["paper", "frozen"],
        default="paper",
        help="definition of the Jacobian in MASS cells; the paper's rows are 'paper'",
    )
    parser.add_argument(
        "--regularised",
        choices=["yes", "no"],
        help="only the rows with dropout or weight decay, or only those without",
    )
    parser.add_argument("--steps", type=positive, help="fewer than the paper's, recorded as such")
    parser.add_argument("--max_minutes", type=not_negative, help="stop then; run again to go on")
    parser.add_argument("--data_dir", help="as --config.data.dir")
    parser.add_argument("--workdir", type=Path, default=Path("runs/sweep"))
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--dry_run", action="store_true", help="only print cells and costs")
    parser.add_argument("--cell", metavar="NAME", help="only the cell of this name")
    parser.add_argument("--launcher", choices=sorted(LAUNCHERS), default="local")
    ray = parser.add_argument_group(
        "--launcher=ray", "every machine sees the workdir and this code"
    )
    ray.add_argument(
        "--ray_address",
        default="local",
        help="HOST:PORT of a cluster, or auto: the one this machine is part of; "
        "local starts one of this machine alone",
    )
    ray.add_argument("--cpus_per_cell", type=float, default=1)
    ray.add_argument("--gpus_per_cell", type=float, default=0, help="0: cells see no GPU")
    slurm = parser.add_argument_group("--launcher=slurm", "writes a job array; submits nothing")
    slurm.add_argument(
        "--slurm_options", default="", help='e.g. "--partition=gpu --gres=gpu:1 --time=04:00:00"'
    )
    return parser


# What is asked for by value: the option, and the field of a cell it means.
_BY_VALUE = {"methods": "method", "betas": "beta", "train_sizes": "train_size", "seeds": "seed"}


def _unknown_values(options: argparse.Namespace) -> str:
    """What no cell of the paper's tables has, and what they have instead."""
    cells = paper_cells(options.network)
    for option, field in _BY_VALUE.items():
        known = sorted({getattr(cell, field) for cell in cells})
        for value in getattr(options, option) or ():
            if value not in known:
                listed = ", ".join(map(str, known))
                return f"--{option}={value}: {options.network} has {listed} in the paper's tables"
    return ""


def _chosen(options: argparse.Namespace) -> list[Cell]:
    """The cells asked for."""
    wanted = {field: getattr(options, option) for option, field in _BY_VALUE.items()}
    return [
        cell
        for cell in paper_cells(options.network, options.steps, options.batch_stats)
        if options.cell in (None, cell.name)
        and all(
            allowed is None or getattr(cell, field) in allowed for field, allowed in wanted.items()
        )
        and options.regularised in (None, "yes" if cell.dropout or cell.weight_decay else "no")
        and (options.batch_stats == "paper" or (cell.method == "mass" and cell.beta != 0))
    ]


def _what_is_wrong_with_data(cell: Cell, data_dir: str | None) -> str:
    """Said once, before hundreds of cells find out one after another."""
    data = cell.config().data
    try:
        load_dataset(data.name, data_dir or data.dir, data.ood)
    except DataError as error:
        return str(error)
    return ""


def _make_absolute(options: argparse.Namespace) -> None:
    options.workdir, options.results = options.workdir.absolute(), options.results.absolute()
    if options.data_dir is not None and Path(options.data_dir).exists():  # else perhaps gs://...
        options.data_dir = str(Path(options.data_dir).absolute())


def _main_in_a_pipe() -> int:
    """As `main`; ends quietly when who reads its output has read enough, as ``head`` does."""
    try:
        code = main()
        sys.stdout.flush()
    except BrokenPipeError:
        # Python flushes once more when it ends: into nothing, instead of the pipe.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 128 + signal.SIGPIPE
    return code


if __name__ == "__main__":
    sys.exit(_main_in_a_pipe())
