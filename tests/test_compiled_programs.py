"""What tests.support.compiled_programs keeps: what is the same is loaded, and a program in which a name differs is compiled."""

import os

import jax
import numpy as np
import pytest
from jax.experimental.compilation_cache import compilation_cache

from tests.support import compiled_programs


@pytest.fixture
def events(tmp_path):
    """Keeps all programs of one test in a folder of its own, and lists what the cache does."""
    seen = []
    settings = {
        "jax_compilation_cache_dir": str(tmp_path),
        "jax_persistent_cache_min_compile_time_secs": 0.0,
    }
    settings |= {"jax_compilation_cache_include_metadata_in_key": True}
    before = {name: getattr(jax.config, name) for name in settings}
    for name, value in settings.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()
    listen = lambda event, **_: seen.append(event.removeprefix("/jax/compilation_cache/"))
    jax.monitoring.register_event_listener(listen)
    yield seen
    jax.monitoring.unregister_event_listener(listen)
    for name, value in before.items():
        jax.config.update(name, value)
    compilation_cache.reset_cache()


def compile_square(name, value):
    def square(x):
        with jax.named_scope(name):
            return x * x + value

    return jax.jit(square).lower(np.zeros(4, np.float32)).compile()


def test_a_program_is_loaded_only_where_names_and_numbers_are_the_same(events):
    first, again, renamed, other = (
        compile_square(*each)
        for each in [("mean", 1.0), ("mean", 1.0), ("median", 1.0), ("mean", 2.0)]
    )
    assert [event for event in events if event in ("cache_hits", "cache_misses")] == [
        *("cache_misses", "cache_hits", "cache_misses", "cache_misses")
    ]
    assert again.as_text() == first.as_text()
    assert again.memory_analysis() is not None
    assert "median" in renamed.as_text()
    assert other(np.arange(4, dtype=np.float32)).tolist() == [2.0, 3.0, 6.0, 11.0]


def test_programs_of_several_devices_are_neither_loaded_nor_kept(events):
    mesh = jax.make_mesh(
        (2,), ("data",), devices=jax.devices()[:2], axis_types=(jax.sharding.AxisType.Auto,)
    )
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    for _ in range(2):
        jax.jit(lambda x: x.sum(), in_shardings=rows).lower(np.zeros(4, np.float32)).compile()
    assert not {"cache_hits", "cache_misses"} & set(events)


def test_compiled_afresh_neither_loads_nor_keeps(events, compiled_afresh):
    for _ in range(2):
        compile_square("mean", 1.0)
    assert not {"cache_hits", "cache_misses"} & set(events)


def test_the_oldest_half_is_removed_where_all_is_too_much(tmp_path, monkeypatch):
    for number in range(5):
        (tmp_path / f"{number}-cache").write_bytes(bytes(10))
        os.utime(tmp_path / f"{number}-cache", (number, number))
    monkeypatch.setattr(compiled_programs, "MOST_BYTES", 50)
    compiled_programs.prune(tmp_path)
    assert len(list(tmp_path.iterdir())) == 5
    monkeypatch.setattr(compiled_programs, "MOST_BYTES", 49)
    compiled_programs.prune(tmp_path)
    assert sorted(path.name for path in tmp_path.iterdir()) == ["3-cache", "4-cache"]
