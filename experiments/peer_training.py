"""``python -m experiments.peer_training CELL --json=FILE``: a cell of the tables in PyTorch.

Where our numbers differ from the paper's, is it our code? This trains the plain PyTorch version
(`torch_peer`, written without a look at ours) on the same examples for the same number of
steps, in PyTorch's own order of batches, and puts its test metrics beside ours.
"""

import importlib.util
import json
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from experiments.cells import NETWORKS, RESULTS, Cell, paper_cells, records_by_name
from experiments.cost import step_variant
from mass_jax.command_line import Parser, positive
from mass_jax.data import DataError, Dataset, load_dataset, normalise
from mass_jax.estimators import authors_sub_batch_size
from mass_jax.experiment import make_experiment
from mass_jax.metrics import classification_metrics
from mass_jax.progress import track
from mass_jax.run_log import environment, write_atomically

PEERS = RESULTS / "peer_training.json"
_METRICS = ("accuracy", "nll", "brier", "entropy")
_EVALUATED_AT_ONCE = 500


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.peer_training", description=__doc__)
    parser.add_argument("cell", help="as experiments.sweep --dry_run prints it, without -steps")
    parser.add_argument("--steps", type=positive, help="fewer than the paper's")
    parser.add_argument("--data_dir", help="as --config.data.dir")
    parser.add_argument("--json", type=Path, required=True, help="other cells in it are kept")
    options = parser.parse_args(argv)
    by_name = {cell.name: cell for name in NETWORKS.values() for cell in paper_cells(name)}
    if options.cell not in by_name:
        parser.error(f"{options.cell!r}: no such cell; experiments.sweep --dry_run lists them")
    cell = by_name[options.cell]._replace(steps=options.steps)
    if cell.dropout or cell.weight_decay:
        parser.error(f"{options.cell!r}: the peer has neither dropout nor weight decay")
    if importlib.util.find_spec("torch") is None:
        parser.error("PyTorch is not installed: pip install torch")
    if not options.json.absolute().parent.is_dir():
        parser.error(f"--json={options.json}: no such directory")
    recorded = json.loads(options.json.read_text()) if options.json.exists() else {}
    try:
        made = train_peer(cell, options.data_dir)
    except DataError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    recorded[cell.name] = made
    write_atomically(options.json, json.dumps(recorded, indent=2) + "\n")
    print(f"{cell.name}: " + ", ".join(f"{name} {made[name]:.4f}" for name in _METRICS))
    return 0


def train_peer(cell: Cell, data_dir: str | None) -> dict[str, Any]:
    """Trains the peer of a cell on the cell's own examples; its test metrics."""
    import torch

    from experiments.torch_peer import make_peer

    config = cell.config()
    dataset = load_dataset(config.data.name, data_dir or config.data.dir, ())
    rows = make_experiment(config, dataset).subset.train
    images = torch.from_numpy(_as_nchw(dataset, dataset.train.images[rows]))
    labels = torch.from_numpy(dataset.train.labels[rows].astype(np.int64))
    torch.manual_seed(cell.seed)
    dim = config.representation_dim
    peer = make_peer(
        cell.network, step_variant(cell), cell.beta, authors_sub_batch_size(config.batch_size, dim)
    )
    began = time.perf_counter()
    batches = _batches(len(rows), config.batch_size)
    for _ in track(range(config.steps), "training in PyTorch"):
        batch = next(batches)
        peer.step(images[batch], labels[batch])
    seconds = time.perf_counter() - began
    tested = torch.from_numpy(_as_nchw(dataset, dataset.test.images))
    log_probs = torch.cat([peer.log_probs(part) for part in tested.split(_EVALUATED_AT_ONCE)])
    metrics = classification_metrics(log_probs.numpy(), dataset.test.labels)
    return {
        **{name: metrics[name] for name in _METRICS},
        "steps": config.steps,
        "train_seconds": seconds,
        "torch": torch.__version__,
        "commit": environment()["commit"],
    }


def _as_nchw(dataset: Dataset, images: np.ndarray) -> np.ndarray:
    normalised = np.asarray(normalise(jnp.asarray(images), dataset.normalisation))
    return np.ascontiguousarray(normalised.transpose(0, 3, 1, 2))


def _batches(count: int, size: int) -> Iterator[Any]:
    """Epoch after epoch, a smaller batch at the end of each, as PyTorch's loaders do."""
    import torch

    while True:
        yield from torch.randperm(count).split(size)


def beside_ours(peers: Path = PEERS, results: Path = RESULTS) -> str:
    """The recorded peers and our runs of the same cells, as Markdown."""
    lines = [
        "| cell | accuracy %: PyTorch | ours | NLL: PyTorch | ours | Brier: PyTorch | ours |",
        "|" + "---|" * 7,
    ]
    ours = records_by_name(results)
    for name, peer in json.loads(peers.read_text()).items():
        pairs = [
            form.format(scale * run[metric])
            for metric, scale, form in (
                ("accuracy", 100, "{:.1f}"),
                ("nll", 1, "{:.2f}"),
                ("brier", 1, "{:.4f}"),
            )
            for run in (peer, ours[name])
        ]
        lines.append("| " + " | ".join([name, *pairs]) + " |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    sys.exit(main())
