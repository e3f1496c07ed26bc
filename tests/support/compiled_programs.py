"""Programs of one device that the tests compile are kept for the next run of the tests, in pytest's folder of caches.

Where a program is the same, to the byte, JAX's persistent compilation cache loads it in a tenth of the time; a program that a
change of jaxpar alters is compiled. The key of an entry covers the whole program with the names and lines that it mentions,
the versions of jaxlib and of XLA, the flags and options of the compiler, the devices and what the processor can do; what is
loaded has the same text, costs and planned memory as what was compiled. So no test passes because of a program of an older
jaxpar. A test of what the compiler says while it works asks for the fixture compiled_afresh. `pytest --cache-clear` deletes
them, and `-p no:cacheprovider` runs without them.

Always compiled are programs for GPUs that are not here, which nothing could load, and programs of several devices: the CPU
client of jaxlib 0.10 and 0.11 does not keep the order of the collectives of a program that it loads; that of
tests/test_ring_and_server.py then aborts each time: "Id can't be larger than the number of participating threads".
"""

import contextlib
import os
from pathlib import Path

import jax
import pytest
from jax._src import (
    compiler,
    lru_cache,
)  # which programs it keeps, and its entries, which must be whole, below
from jax.experimental.compilation_cache import compilation_cache

MOST_BYTES = 400 * 2**20  # of each folder; the programs of one run of all tests take about a fifth
LEAST_SECONDS = 0.05  # what compiles in less is not kept: to load it would take as long


def put_whole(cache: lru_cache.LRUCache, key: str, value: bytes) -> None:
    """Adds an entry at once, so that no other worker reads a part of it and one that is killed leaves none."""
    path = Path(cache.path) / f"{key}-cache"
    part = path.with_name(f"{os.getpid()}-part")
    part.write_bytes(value)
    part.replace(path)


def prune(folder: Path) -> None:
    """Removes the oldest half of the programs where all take more than MOST_BYTES."""
    with contextlib.suppress(FileNotFoundError):  # of another run of tests that prunes too
        files = sorted(folder.glob("*-cache"), key=lambda path: path.stat().st_mtime)
        if sum(path.stat().st_size for path in files) > MOST_BYTES:
            for path in files[: -(-len(files) // 2)]:
                path.unlink()


def pytest_configure(config: pytest.Config) -> None:
    compile_or_load = compiler.compile_or_get_cached

    def load_programs_of_one_device(
        backend, computation, devices, options, callbacks, executable_devices, *more
    ):
        if devices.size == 1 and backend.platform == "cpu":
            return compile_or_load(
                backend, computation, devices, options, callbacks, executable_devices, *more
            )
        return compiler.backend_compile_and_load(
            backend, computation, executable_devices, options, callbacks
        )

    compiler.compile_or_get_cached = load_programs_of_one_device
    if (cache := getattr(config, "cache", None)) is None:
        return
    folder = cache.mkdir("programs")
    if not hasattr(config, "workerinput"):
        prune(folder)
    lru_cache.LRUCache.put = put_whole
    jax.config.update("jax_compilation_cache_dir", str(folder))
    jax.config.update(
        "jax_compilation_cache_include_metadata_in_key", True
    )  # tests read names of operations and lines
    jax.config.update("jax_persistent_cache_min_compile_time_secs", LEAST_SECONDS)


@pytest.fixture
def compiled_afresh():
    """Compiles every program of one test, and keeps none."""
    jax.config.update("jax_enable_compilation_cache", False)
    compilation_cache.reset_cache()
    yield
    jax.config.update("jax_enable_compilation_cache", True)
    compilation_cache.reset_cache()
