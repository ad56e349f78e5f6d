"""``python -m experiments.export WORKDIR --out=FILE``: a finished run as one file.

The file is a zip without pickles: parameters as ``.npy``, configuration, metrics, a model card
and the sha256 of every member. ``mass_jax.load(FILE)`` and ``mass_jax.load_fitted(FILE)`` read
it. The same run gives the same bytes.
"""

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from mass_jax.archive import Archive, ArchiveError, write_archive
from mass_jax.checkpoint import CheckpointError
from mass_jax.command_line import Parser
from mass_jax.config import ConfigError, flatten
from mass_jax.loading import read_run
from mass_jax.model_card import model_card
from mass_jax.training import finished_results


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.export", description=__doc__)
    parser.add_argument("workdir", type=Path, help="of a finished run")
    parser.add_argument("--out", type=Path, required=True, help="the file to write")
    options = parser.parse_args(argv)
    try:
        digest = export(options.workdir, options.out)
    except (ArchiveError, CheckpointError, ConfigError, OSError) as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(f"{options.out}  {options.out.stat().st_size:,} bytes  sha256 {digest}")
    return 0


def export(workdir: Path, out: Path) -> str:
    """Packs the run in ``workdir``; returns the digest the file ends with.

    Args:
      workdir: of ``python -m mass_jax.main`` or `mass_jax.fit`.
      out: replaced in one step.
    """
    run = read_run(workdir)
    results = finished_results(run.config, workdir)
    if results is None or results.get("checkpoint_sha256") != run.digest:
        raise ArchiveError(
            f"{workdir}: not a finished run, its results and its newest checkpoint do not belong "
            "together; run its training command again, then export"
        )
    if run.normalisation is None:
        raise ArchiveError(f"{workdir}: made before runs kept their normalisation; train it again")
    config = flatten(run.config)
    # A path of this machine means nothing elsewhere.
    config["data.dir"] = None
    model: dict[str, Any] = {
        "input_shape": list(run.input_shape),
        "num_classes": run.num_classes,
        "steps": run.steps,
        "normalisation": {
            name: values.tolist() for name, values in run.normalisation._asdict().items()
        },
    }
    try:
        environment = json.loads((workdir / "environment.json").read_text())
    except (OSError, ValueError):
        environment = {}
    metrics = (workdir / "metrics.jsonl").read_text()
    card = model_card(config, results, environment)
    return write_archive(out, Archive(run.arrays, model, config, results, metrics, card))


if __name__ == "__main__":
    sys.exit(main())
