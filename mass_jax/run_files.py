"""What a finished run left in its directory, read and checked."""

import json
from pathlib import Path
from typing import Any, NamedTuple

from mass_jax import predictions
from mass_jax.predictions import RunPredictions
from mass_jax.run_log import METRICS_FILE


class RunFilesError(ValueError):
    """A file of a run that is missing or damaged; the message is one line that names it."""


class RunFiles(NamedTuple):
    """Contents of a finished run's directory.

    Attributes:
      results, config, environment: of the JSON files of these names.
      rows: of ``metrics.jsonl``, numbers by name, each with its ``step``.
      predictions: of ``predictions.npz``.
    """

    results: dict[str, Any]
    config: dict[str, Any]
    environment: dict[str, Any]
    rows: list[dict[str, float]]
    predictions: RunPredictions


def read_run(workdir: Path) -> RunFiles:
    """Reads the files of a finished run.

    Raises:
      RunFilesError: one is missing or damaged.
    """
    results, config, environment = (
        _parsed_object(_read_text(workdir / name), str(workdir / name))
        for name in ("results.json", "config.json", "environment.json")
    )
    detections = results.get("ood", {})
    levels = [detections, *(detections.values() if isinstance(detections, dict) else ())]
    if not all(isinstance(level, dict) for level in levels):
        raise RunFilesError(f"{workdir / 'results.json'} is damaged (ood is not a table)")
    rows = _read_rows(workdir / METRICS_FILE)
    try:
        seen = predictions.load(workdir / predictions.PREDICTIONS)
    except predictions.PredictionsError as error:
        raise RunFilesError(str(error)) from None
    return RunFiles(results, config, environment, rows, seen)


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except FileNotFoundError:
        raise RunFilesError(f"{path} is missing; is {path.parent} a finished run?") from None
    except (OSError, ValueError) as error:
        raise RunFilesError(f"{path} cannot be read ({error})") from None


def _read_rows(path: Path) -> list[dict[str, float]]:
    lines = _read_text(path).splitlines()
    rows = [_parsed_object(line, f"{path}, line {n}") for n, line in enumerate(lines, 1)]
    for number, row in enumerate(rows, 1):
        # NLL may be infinite; a step may not, nor be too large for a plot's axis.
        numeric = all(type(value) in (int, float) for value in row.values())
        if not numeric or not 0 <= row.get("step", -1) <= 2**53:
            raise RunFilesError(f"{path}, line {number} is damaged (not numbers by step)")
    if not rows:
        raise RunFilesError(f"{path} is empty")
    return rows


def _parse_int(digits: str) -> int | float:
    """An integer, or (beyond what a float holds) infinity: no arithmetic overflows later."""
    return int(digits) if len(digits) < 300 else float(digits)


def _parsed_object(content: str, where: str) -> dict[str, Any]:
    try:
        value = json.loads(content, parse_int=_parse_int)
    except (ValueError, RecursionError) as error:
        raise RunFilesError(f"{where} is damaged ({error})") from None
    if not isinstance(value, dict):
        raise RunFilesError(f"{where} is damaged (not a JSON object)")
    return value
