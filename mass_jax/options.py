"""Command-line options of `mass_jax.main`: flags, config file, field overrides."""

import argparse
import difflib
import importlib.util
import re
import sys
from pathlib import Path

from ml_collections import ConfigDict

from mass_jax import config as configuration
from mass_jax.command_line import Parser
from mass_jax.config import ConfigError

# A wheel carries the repository's configs/ inside the package (see pyproject.toml).
_INSTALLED = Path(__file__).parent / "installed" / "configs"
CONFIG_DIR = _INSTALLED if _INSTALLED.is_dir() else Path(__file__).parent.parent / "configs"


def parse(argv: list[str]) -> tuple[argparse.Namespace, dict[str, str]]:
    """Flags, and the text of every ``--config.key=value``.

    Args:
      argv: arguments without the program name.
    """
    plain, overrides = [], {}
    rest = iter(argv)
    for argument in rest:
        if not argument.startswith(("--config.", "-config.")):
            plain.append(argument)
            continue
        name, equals, value = argument.partition("=")
        if not equals:
            following = next(rest, None)
            if following is None:
                raise ConfigError(f"{argument}: needs a value, as in {argument}=VALUE")
            value = following
        overrides[name.partition("config.")[2]] = value
    flags, unknown = parser().parse_known_args(plain)
    if unknown:
        raise ConfigError(f"{unknown[0]}: no such flag; {_nearest(unknown[0])}")
    return flags, overrides


def _nearest(flag: str) -> str:
    """What somebody may have meant; most forget that fields are ``--config.FIELD``."""
    name = flag.lstrip("-").partition("=")[0]
    fields = [key for key in configuration.SCHEMA if key.rpartition(".")[2] == name]
    known = re.findall(r"--(\w+)", parser().format_help())
    near = [f"config.{key}" for key in fields] or difflib.get_close_matches(name, known, n=1)
    return f"did you mean --{near[0]}?" if near else "--help lists all"


def parser() -> argparse.ArgumentParser:
    """All flags but ``--config.key=value``, which are as many as there are fields."""
    parser = Parser(
        prog="python -m mass_jax.main",
        description="Train and evaluate one experiment; run again to resume.",
        epilog=f"Config files in {CONFIG_DIR}: {', '.join(config_names())}.\nFields, with the "
        f"defaults of the bundled digits experiment:\n{configuration.help_text()}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--config",
        metavar="FILE",
        help="Python file with get_config(), or the name of one of ours; it is executed",
    )
    parser.add_argument(
        "--workdir", metavar="DIR", help="default: a name made of the config in runs/"
    )
    parser.add_argument(
        "--mode",
        choices=["train", "evaluate"],
        default="train",
        help="evaluate: only evaluate the newest checkpoint of the workdir",
    )
    parser.add_argument("--quiet", action="store_true", help="no progress, only the results")
    cluster = parser.add_argument_group(
        "several hosts", "needed only where the environment does not tell (Slurm and TPU slices do)"
    )
    cluster.add_argument("--coordinator", metavar="HOST:PORT", help="address of process 0")
    cluster.add_argument("--num_processes", type=int, help="how many processes take part")
    cluster.add_argument("--process_id", type=int, help="which of them this is, from 0")
    cluster.add_argument(
        "--distributed", action="store_true", help="join the cluster that JAX itself finds"
    )
    return parser


def config_names() -> list[str]:
    """Names of the experiments in `CONFIG_DIR`, without ``.py``."""
    files = sorted(CONFIG_DIR.glob("[!_]*.py"))
    return [file.stem for file in files if "def get_config" in file.read_text()]


def load_config(path: str | None) -> ConfigDict:
    """The configuration a file's ``get_config`` returns; without a file, the digits one.

    Args:
      path: a file; where there is none, the name of one in `CONFIG_DIR`, with or without
        ``configs/`` and ``.py``.

    Example:
      >>> load_config("mass_resnet20").network
      'resnet20'
    """
    if path is None:
        return configuration.default_config()
    if not Path(path).is_file():
        asked = Path(path)
        here = asked.parent in (Path(), Path("configs")) and asked.suffix in ("", ".py")
        if not here or asked.stem not in config_names():
            near = difflib.get_close_matches(asked.stem, config_names(), n=1)
            hint = f"did you mean {near[0]}? " if near else ""
            known = ", ".join(config_names())
            raise ConfigError(f"--config={path}: no such file; {hint}{CONFIG_DIR} has {known}")
        path = str(CONFIG_DIR / f"{asked.stem}.py")
    spec = importlib.util.spec_from_file_location("mass_jax_config_file", path)
    if spec is None or spec.loader is None:
        raise ConfigError(f"--config={path}: not a Python file")
    module = importlib.util.module_from_spec(spec)
    sys.path.insert(0, str(CONFIG_DIR.parent))  # config files import configs.base
    try:
        spec.loader.exec_module(module)
        config = module.get_config()
    except Exception as error:  # the file is the user's code: it may raise anything
        reason = " ".join(str(error).split())
        raise ConfigError(f"--config={path}: {type(error).__name__}: {reason}") from None
    finally:
        sys.path.pop(0)
    if not isinstance(config, ConfigDict):
        raise ConfigError(f"--config={path}: get_config() must return an ml_collections.ConfigDict")
    return config
