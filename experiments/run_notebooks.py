"""``python -m experiments.run_notebooks``: executes the notebooks and keeps what they print.

Each runs from top to bottom in a fresh kernel of this very interpreter, in its own folder, as
Jupyter would run it; its outputs are written back without timings and other noise, so that a
diff shows what changed. An exception in a cell ends the command, and that file stays as it was.
Needs ``requirements-dev.txt``.
"""

import sys
import time
from collections.abc import Sequence
from pathlib import Path

import nbformat
from jupyter_client.kernelspec import NATIVE_KERNEL_NAME, KernelSpecManager
from jupyter_client.manager import AsyncKernelManager
from nbclient import NotebookClient
from nbclient.exceptions import CellExecutionError

from mass_jax.command_line import Parser

FOLDER = Path(__file__).parent / "notebooks"
_CELL_SECONDS = 600
_METADATA = {
    "kernelspec": {"display_name": "Python 3", "language": "python", "name": NATIVE_KERNEL_NAME},
    "language_info": {"name": "python"},
}


def execute(path: Path) -> nbformat.NotebookNode:
    """The notebook with new outputs; nothing is written.

    Raises:
      CellExecutionError: a cell raised; the message has its traceback.
    """
    notebook = nbformat.read(path, as_version=4)
    # Without directories of kernels only the native one is left: that of sys.executable.
    kernels = KernelSpecManager(kernel_dirs=[])
    client = NotebookClient(
        notebook,
        km=AsyncKernelManager(kernel_name=NATIVE_KERNEL_NAME, kernel_spec_manager=kernels),
        resources={"metadata": {"path": str(path.parent)}},
        timeout=_CELL_SECONDS,
        record_timing=False,
        coalesce_streams=True,
    )
    client.execute()
    notebook.metadata = nbformat.from_dict(_METADATA)
    return notebook


def main(argv: Sequence[str] | None = None) -> int:
    """The command line; returns the exit code."""
    parser = Parser(prog="python -m experiments.run_notebooks", description=__doc__)
    parser.add_argument("notebooks", type=Path, nargs="*", help="files; default: all")
    parser.add_argument("--out_dir", type=Path, help="for the results; default: in place")
    options = parser.parse_args(argv)
    for path in options.notebooks or sorted(FOLDER.glob("*.ipynb")):
        start = time.monotonic()
        out = path if options.out_dir is None else options.out_dir / path.name
        try:
            nbformat.write(execute(path), out)
        except (CellExecutionError, OSError) as error:
            print(f"error: {path}: {error}", file=sys.stderr)
            return 1
        seconds = time.monotonic() - start
        print(f"{path.name}  {seconds:.0f} s  {out.stat().st_size / 1000:.0f} kB")
    return 0


if __name__ == "__main__":
    sys.exit(main())
