"""Compiled programs on disk: used again, and mended when a kill has left one half-written."""

import warnings

import jax
import jax.numpy as jnp
import pytest

from mass_jax.compilation_cache import compilation_cache


@pytest.fixture
def cache(tmp_path, monkeypatch):
    """A cache directory of this test, and JAX's settings as they were afterwards."""
    monkeypatch.delenv("JAX_COMPILATION_CACHE_DIR", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    before = (
        jax.config.jax_compilation_cache_dir,
        jax.config.jax_persistent_cache_min_compile_time_secs,
    )
    jax.config.update("jax_persistent_cache_min_compile_time_secs", 1.0)  # JAX's own
    jax.experimental.compilation_cache.compilation_cache.reset_cache()
    yield tmp_path / "mass_jax"
    jax.config.update("jax_compilation_cache_dir", before[0])
    jax.config.update("jax_persistent_cache_min_compile_time_secs", before[1])
    jax.experimental.compilation_cache.compilation_cache.reset_cache()


def compute():
    jax.clear_caches()
    return float(jax.jit(lambda v: jnp.sin(v) + 41.0)(jnp.zeros(())))


def test_a_half_written_entry_is_replaced(cache):
    """Oracle: the bytes of the entries an undisturbed run writes."""
    with compilation_cache():
        assert compute() == 41.0
    # It took milliseconds to compile, and is there all the same.
    whole = {path.name: path.read_bytes() for path in cache.glob("*-cache")}
    assert whole
    for path in cache.glob("*-cache"):
        path.write_bytes(path.read_bytes()[:100])
    with warnings.catch_warnings(record=True) as heard:
        warnings.simplefilter("always")
        with compilation_cache():
            assert compute() == 41.0
    assert heard == []
    assert {path.name for path in cache.glob("*-cache")} <= whole.keys()
    assert all(path.stat().st_size > 100 for path in cache.glob("*-cache"))


def test_other_warnings_are_heard(cache):
    with pytest.warns(UserWarning, match="something else"), compilation_cache():
        warnings.warn("something else", stacklevel=1)


def test_a_directory_of_the_user_is_left_alone(cache, monkeypatch):
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", str(cache))
    before = jax.config.jax_compilation_cache_dir
    with compilation_cache():
        assert jax.config.jax_compilation_cache_dir == before
