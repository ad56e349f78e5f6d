"""``python -m experiments.faults.injection FAULT ARGUMENTS``: training with a fault inside.

``FAULT`` is ``signal:POSITION:NAME[:twice]``, ``nan:WHERE:STEP``, ``full:SAVE`` or
``limit:BYTES``. The product has no hooks for this: its functions are wrapped from outside.
"""

import errno
import os
import resource
import signal
import sys
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp

from mass_jax import checkpoint, evaluation, main, train_step, training

# Where a signal is sent, as (module, function, which call of it).
POSITIONS: dict[str, tuple[Any, str, int]] = {
    "load": (main, "load_dataset", 1),
    "initialise": (training, "make_experiment", 1),
    "compile": (training, "make_train_step", 1),
    "step": (training, "_check_finite", 4),
    "validate": (training, "validate", 1),
    "save_arrays": (checkpoint, "_named_leaves", 1),
    "save_verify": (checkpoint, "verify", 2),
    "prune": (checkpoint, "prune", 1),
    "last_save": (checkpoint, "_named_leaves", 6),
    "final_evaluation": (training, "evaluate_run", 1),
    "final_predictions": (evaluation, "classification_metrics", 5),
    "log": (training, "write_atomically", 1),
}


def _wrap(module: Any, name: str, at_call: int, act: Callable[[], None]) -> None:
    original, calls = getattr(module, name), [0]

    def wrapped(*arguments: Any, **keywords: Any) -> Any:
        calls[0] += 1
        if calls[0] == at_call:
            act()
        return original(*arguments, **keywords)

    setattr(module, name, wrapped)


def _signal(position: str, name: str, twice: str = "") -> None:
    signum = getattr(signal, name)

    def act() -> None:
        os.kill(os.getpid(), signum)
        if twice:
            os.kill(os.getpid(), signum)
            time.sleep(5)  # the second one must not need the main thread

    _wrap(*POSITIONS[position], act)


def _nan(where: str, step: str) -> None:
    original = training.make_train_step

    def make(*arguments: Any, **keywords: Any) -> train_step.StepFn:
        take = original(*arguments, **keywords)

        def poisoned(state: Any, batch: Any, key: Any) -> Any:
            factor = jnp.where(state.step + 1 == int(step), jnp.nan, 1.0)
            poison = lambda tree: jax.tree.map(
                lambda a: (a * factor).astype(a.dtype) if a.dtype == jnp.float32 else a, tree
            )
            if where == "opt_state":
                return take(state.replace(opt_state=poison(state.opt_state)), batch, key)
            part = poison(getattr(state.params, where))
            return take(state.replace(params=state.params.replace(**{where: part})), batch, key)

        return poisoned

    training.make_train_step = make


def _full(save: str) -> None:
    def no_space(path: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    def fill_up() -> None:
        checkpoint._fsync = no_space  # the files are there, but not on the disk

    _wrap(checkpoint, "_write_and_verify", int(save), fill_up)


def _limit(size: str) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (int(size), int(size)))


FAULTS: dict[str, Callable[..., None]] = {
    "signal": _signal,
    "nan": _nan,
    "full": _full,
    "limit": _limit,
}

if __name__ == "__main__":
    kind, *details = sys.argv[1].split(":")
    FAULTS[kind](*details)
    sys.exit(main.main(sys.argv[2:]))
