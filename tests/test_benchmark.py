"""The benchmark: its parts work, and the FLOPs of the exact step stay at their floor."""

import json
import os
import subprocess
import sys

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from experiments import benchmark, cost
from experiments.cost import step_flops
from mass_jax.config import apply_overrides, resolve
from mass_jax.options import CONFIG_DIR, load_config

NUMBERS = {"ms", "ratio", "flops_ratio", "peak_share", "peak_mb", "compile_s"}


def flops(network, variant):
    """XLA's count for the whole training step; nothing is compiled or run."""
    method, changes = benchmark.VARIANTS[variant]
    changes = changes | {"train_size": "1000", "data.validation_size": "100"}
    file = load_config(str(CONFIG_DIR / f"{method}_{network}.py"))
    config = resolve(apply_overrides(file, changes))
    return step_flops(config, benchmark._random_dataset())


@pytest.mark.parametrize(
    ("network", "variant", "limit"),
    [
        ("small_mlp", "mass_exact", 2.6),
        ("small_mlp", "mass_exact_paper_bn", 2.6),
        ("small_mlp", "mass_fast", 1.3),
        ("small_mlp", "mass_lazy", 1.3),
        ("resnet20", "mass_exact", 2.75),
        ("resnet20", "mass_exact_paper_bn", 2.75),
        ("resnet20", "mass_fast", 1.3),
    ],
)
def test_flops_of_a_step(network, variant, limit):
    """Oracle: the floors of the cost model: 2.5 (SmallMLP) and 2.6 (ResNet20) at the paper's n,
    61 forward passes per Jacobian example."""
    ratio = flops(network, variant) / flops(network, "softmax_ce")
    assert 1.0 < ratio < limit


@pytest.mark.parametrize(("taken", "rare", "surplus"), [(1, 2, 2 * 8**3), (2, 1, 0)])
def test_flops_are_those_of_branches_taken(taken, rare, surplus):
    """Oracle: a product of two 8 x 8 matrices takes 2 * 8^3; XLA counts the larger branch."""

    def f(x):
        power = lambda count: jnp.linalg.multi_dot([x] * (count + 1))
        return jax.lax.cond(x[0, 0] > 0, lambda: power(taken), lambda: power(rare))

    jaxpr = jax.make_jaxpr(jax.jit(f))(jnp.ones((8, 8))).jaxpr
    assert cost._flops_not_taken(jaxpr) == surplus


def test_the_other_network_is_kept(tmp_path, monkeypatch, capsys):
    """Oracle: what was in the file before."""
    row = {"ms": 1.0, "ratio": 1.0, "flops_ratio": 1.0, "peak_share": 0.5, "peak_mb": 1.0}
    table = {"softmax_ce": row | {"compile_s": 1.0}}
    monkeypatch.setattr(benchmark, "measure", lambda *_: (table, 123.0))
    file = tmp_path / "benchmark.json"
    file.write_text(json.dumps({"small_mlp": "as it was"}))
    assert benchmark.main(["--network=resnet20", f"--json={file}"]) == 0
    made = json.loads(file.read_text())
    assert (made["small_mlp"], made["resnet20"]) == ("as it was", table)
    assert made["environment"]["resnet20"]["matmul_gflops"] == 123.0
    file.write_text("no table")
    with pytest.raises(SystemExit) as ended:
        benchmark.main(["--network=resnet20", f"--json={file}"])
    assert ended.value.code == 2
    assert "holds no benchmark" in capsys.readouterr().err


@pytest.mark.slow
def test_every_variant_is_measured(monkeypatch):
    """Oracle: the keys the table promises; two quick ones stand for all."""
    monkeypatch.setattr(benchmark, "_REPEATS", {"small_mlp": (2, 2)})
    few = {name: benchmark.VARIANTS[name] for name in ("softmax_ce", "mass_exact_full_batch")}
    monkeypatch.setattr(benchmark, "VARIANTS", few)
    table, peak = benchmark.measure("small_mlp", quick=True, peer=False)
    assert table.keys() == few.keys()
    assert all(row.keys() >= NUMBERS for row in table.values())
    assert table["softmax_ce"]["ratio"] == table["softmax_ce"]["flops_ratio"] == 1.0
    assert table["mass_exact_full_batch"]["ratio"] > 1.0
    assert all(0 < row["peak_share"] < 1 for row in table.values())
    assert "mass_exact_full_batch" in benchmark.as_text("small_mlp", table, peak)


def test_largest_memory_is_of_this_program_alone():
    """Oracle: half a gigabyte of the parent, which `getrusage` counts in; 64 MB taken and given
    back."""
    of_the_parent = np.ones(2**26)
    script = """
from experiments.cost import largest_memory_mb
before = largest_memory_mb()
block = b"x" * 2**26
del block
print(before, largest_memory_mb() - before)
"""
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, check=True)
    before, growth = map(float, run.stdout.split())
    assert before < of_the_parent.nbytes / 2**20
    assert growth > 32


@pytest.mark.slow
@pytest.mark.parametrize(
    ("estimator", "chunk_size", "gigabytes"), [("sub_batch", 2, 2.0), ("exact", 4, 4.0)]
)
def test_chunks_bound_the_memory_of_resnet20(estimator, chunk_size, gigabytes):
    """Oracle: the operating system's count of the largest memory of a process that trains.

    Steps with 10 and with all 128 Jacobians of a minibatch, a few at a time; compiled from
    scratch, which takes memory too, and with the compiler as users have it: the flags of this
    suite would leave its optimisations out.
    """
    script = f"""
import jax
from experiments.cost import largest_memory_mb
from mass_jax.working_memory import keep_working_memory, run_in_main_thread
run_in_main_thread()
jax.config.update("jax_enable_compilation_cache", False)
from experiments import benchmark, cost
benchmark.step_flops = lambda *_: 0.0  # not wanted here
benchmark.VARIANTS["chunks"] = ("mass", {{
    "jacobian.batch_stats": "frozen",
    "jacobian.estimator": "{estimator}",
    "jacobian.chunk_size": "{chunk_size}",
}})
subject = benchmark._subject("resnet20", "chunks", benchmark._random_dataset())
keep_working_memory()  # as training does; it costs some
for _ in range(3):
    subject.call()
print(largest_memory_mb() / 1024)
"""
    users = {name: value for name, value in os.environ.items() if name != "XLA_FLAGS"}
    command = [sys.executable, "-c", script]
    run = subprocess.run(command, capture_output=True, text=True, check=True, env=users)
    assert float(run.stdout.split()[-1]) < gigabytes
