"""``python -m mass_jax.completion``: Tab completes flags, configs, fields and values in bash.

    eval "$(python -m mass_jax.completion)"

works on ``mass-jax`` and on ``python -m mass_jax.main``; other uses of ``python`` complete file
names. The script is made of the parser and the schema and holds all words itself: no Python
runs at a keystroke.
"""

import sys

from mass_jax.command_line import Parser
from mass_jax.options import config_names, parser
from mass_jax.schema import OWN, SCHEMA

# bash takes `=` for a separator of words: what it replaces is what stands behind the last one.
_SCRIPT = """\
_mass_jax() {
  local line="${COMP_LINE:0:$COMP_POINT}" word values=""
  word="${line##* }"
  case "$word" in
@CASES@
    --*=*) ;;
    *) values="@FLAGS@" ;;
  esac
  [[ "$word" == --*=* ]] && local typed="${word#*=}" || local typed="$word"
  COMPREPLY=($(compgen -W "$values" -- "$typed"))
  case "$word" in
    --config=*|--workdir=*|--config.data.dir=*)
      compopt -o filenames
      COMPREPLY+=($(compgen -f -- "$typed")) ;;
  esac
  [[ ${#COMPREPLY[@]} == 1 && "${COMPREPLY[0]}" == *= ]] && compopt -o nospace
}
_mass_jax_python() {
  COMPREPLY=()
  [[ "$COMP_LINE" == *" -m mass_jax.main "* ]] && _mass_jax
}
complete -o bashdefault -o default -F _mass_jax mass-jax
complete -o bashdefault -o default -F _mass_jax_python python python3
"""


def values_by_flag() -> dict[str, list[str]]:
    """Every flag that takes a value, with the values that are known.

    Example:
      >>> values_by_flag()["--config.optimizer.name"]
      ['adam', 'sgd']
    """
    found = {
        action.option_strings[-1]: list(action.choices or ())
        for action in parser()._actions
        if action.nargs != 0
    }
    found["--config"] = config_names()
    for key, field in SCHEMA.items():
        values = ["True", "False"] if field.kind is bool else list(field.choices)
        found[f"--config.{key}"] = values + ["None"] * field.optional
    found["--config.network"].remove(OWN)  # a network of mass_jax.fit has no command line
    return found


def script() -> str:
    """The completion script, for bash to evaluate."""
    flags = values_by_flag()
    switches = [a.option_strings[-1] for a in parser()._actions if a.nargs == 0]
    cases = [f'    {flag}=*) values="{" ".join(known)}" ;;' for flag, known in flags.items()]
    words = [*switches, *(f"{flag}=" for flag in flags)]
    return _SCRIPT.replace("@CASES@", "\n".join(cases)).replace("@FLAGS@", " ".join(words))


def main(argv: list[str] | None = None) -> int:
    """The command line; returns the exit code."""
    Parser(
        prog="python -m mass_jax.completion",
        description='Print a completion script; eval "$(python -m mass_jax.completion)" loads it.',
    ).parse_args(argv)
    print(script(), end="")
    return 0


if __name__ == "__main__":
    sys.exit(main())
