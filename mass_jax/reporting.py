"""The report at the end of a run: the run is good without one, whatever goes wrong."""

import logging
from pathlib import Path


def report_if_possible(workdir: Path) -> None:
    """Draws ``report.html``, or says in one line why not."""
    try:
        # Imported here: a broken Matplotlib setup of the user must not keep us from training.
        from mass_jax.report import write_report

        write_report(workdir)
    except Exception as error:
        reason = " ".join(str(error).split()) or type(error).__name__
        logging.warning("no report (python -m mass_jax.report makes one): %s", reason)
