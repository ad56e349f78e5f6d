"""The model card of a finished run, in Markdown: what it is, what made it, what it is not."""

from collections.abc import Mapping
from typing import Any

_HEADLINES = ("accuracy", "nll", "brier", "entropy", "ece", "aurc")
_LIMITS = (
    "Inputs must be preprocessed as the training data were; other units give other answers "
    "without a warning.",
    "`max_log_q` and `entropy` rank strangeness; no threshold was chosen, and the numbers above "
    "hold for the out-of-distribution sets named there only.",
    "One run, one seed: the spread over seeds is not in these numbers.",
    "Digests tell damage, not authors: get the file from whom you trust.",
)


def model_card(
    config: Mapping[str, Any], results: Mapping[str, Any], environment: Mapping[str, Any]
) -> str:
    """The card as text.

    Args:
      config: fields by dotted name.
      results: as in ``results.json``.
      environment: as in ``environment.json``; may be empty.

    Example:
      >>> config = {"method": "mass", "network": "small_mlp", "data.name": "digits"}
      >>> print(model_card(config, {"accuracy": 0.98, "steps": 10}, {}).splitlines()[0])
      # mass, small_mlp, on digits
    """
    lines = [f"# {config['method']}, {config['network']}, on {config['data.name']}", ""]
    lines += [f"{results.get('steps')} steps; made by", "", "```"]
    lines += [str(results.get("command")), "```", ""]
    lines += ["## Results", ""]
    evaluated_on = results.get("evaluated_on", "the test split")
    lines += [f"Measured on {evaluated_on}.", "", "| metric | value |", "|---|---|"]
    lines += [f"| {name} | {results[name]:.4f} |" for name in _HEADLINES if name in results]
    for name, detectors in results.get("ood", {}).items():
        for detector, scores in detectors.items():
            lines.append(f"| AUROC, {name} by {detector} | {scores['auroc']:.4f} |")
    lines += ["", "## Data", "", "sha256 of the decoded arrays:", "", "```"]
    lines += [f"{digest}  {name}" for name, digest in results.get("data_sha256", {}).items()]
    lines += ["```", "", "## Made with", "", "```"]
    lines += [f"python {environment.get('python', 'of unknown version')}"]
    lines += [f"{name} {version}" for name, version in environment.get("packages", {}).items()]
    lines += [f"commit {environment.get('commit')}", "```", "", "## Limits", ""]
    lines += [f"- {limit}" for limit in _limits(config)]
    lines += ["", "## Use", "", "```python", "import mass_jax", ""]
    own = ", network=network" if config["network"] == "own" else ""
    lines += [f'model = mass_jax.load_fitted("FILE"{own})  # predict_proba(x), ood_scores(x)']
    lines += [f'params = mass_jax.load("FILE"{own})  # for mass_jax.cdi_loss(params, x)', "```", ""]
    return "\n".join(lines)


def _limits(config: Mapping[str, Any]) -> list[str]:
    limits = list(_LIMITS)
    if config["method"] == "softmax_ce":
        limits.append("The density behind `max_log_q` was fitted for evaluation and is not here.")
    if config["network"] == "own":
        limits.append(
            f"The network's code is not here: its digest is `{config.get('network_digest')}`; "
            "loading needs it as `network=`."
        )
    return limits
