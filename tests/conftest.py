"""The setting of every test: eight fake CPU devices, strict rank promotion, and on request float64.

Nothing here imports jaxpar, so that a module which does not import fails its own tests and not all of them.
"""

import gc
import os
import sys

import jax
import pytest
from hypothesis import HealthCheck, settings

from tests.support.compiled_programs import compiled_afresh, pytest_configure  # noqa: F401 (a fixture and a hook of pytest)
from tests.support.tiers import leave_to_slow
from tests.support.waiting import XLA_WAITS

NUM_DEVICES = 8
collect_ignore = [
    "data"
]  # data for tests, and the scripts that made it, with libraries that need not be installed

# Before JAX makes its CPU client, which reads PJRT_NPROC once. With the threads that a machine of few cores gives it,
# fake devices wait for one another without end once dozens of steps are in flight (tests/test_fake_devices.py).
os.environ["PJRT_NPROC"] = str(max(2 * NUM_DEVICES, int(os.environ.get("PJRT_NPROC", "0"))))
# The tests compile hundreds of tiny programs. XLA's own passes, which partition, fuse and allot memory, all run; left out are
# the polish of machine code by LLVM, its split over threads, and the emitters of fusions by way of MLIR, which take as long as
# all else together with JAX 0.10 and four times as long with 0.11.
OWN_FLAGS = (
    f"{XLA_WAITS} --xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1 "
    "--xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"
)
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {OWN_FLAGS}".strip()
# Programs do not say which lines of Python they come from, which would take a tenth of the time to trace and compile them;
# the fixture source_lines is for tests of what shows these lines.
os.environ["JAX_TRACEBACK_IN_LOCATIONS_LIMIT"] = "0"
jax.config.update("jax_traceback_in_locations_limit", 0)
# Sources are compiled once, and not again by each process that a test starts.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False
os.environ["JAX_PLATFORMS"] = "cpu"  # for the processes that tests start
os.environ["JAXPAR_LOG_SECONDS"] = (
    "0"  # recipes print no lines about their runs, unless a test asks for them
)
jax.config.update("jax_platforms", "cpu")
jax.config.update("jax_num_cpu_devices", NUM_DEVICES)
jax.config.update("jax_numpy_rank_promotion", "raise")

# The first example compiles, the others do not; and a busy machine is slow to draw any.
settings.register_profile("jaxpar", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("jaxpar")


# The files that take longest, in order. They are started first, so that no worker has one left when the others are done.
LONGEST = (
    *("docs", "recipes_gpt", "experts_over_data", "experts", "context"),
    *("planner", "padding", "fuzz", "padded_vocabulary"),
    *("benchmarks", "generate", "transformer_meshes", "pipeline", "planner_exact"),
    *("recipes_digits", "loss_sums", "remedies", "gpu_day", "check_on_gpu", "optimizers"),
    *("lora", "recipes", "documents", "owned", "traced_loss"),
    *("overlap", "mpmd_executor", "transformer", "evaluation", "row_checks"),
    *("launch", "serve", "faults", "foreign_models", "zero"),
    *("fine_tuning_page", "executor", "families", "packing", "axes"),
    *("flash_chunks", "parity", "recipes_gpt_data", "recipes_all_reduce"),
)
ORDER = {f"test_{name}.py": number for number, name in enumerate(LONGEST)}


@pytest.hookimpl(tryfirst=True)  # before the cases of other tiers are left out
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Puts the files that take longest first, where the order within a file stays.

    The name of a test must be the same in each worker, or pytest-xdist runs none.
    """
    if addresses := [item.nodeid for item in items if " at 0x" in item.nodeid]:
        raise pytest.UsageError(
            f"names of tests must not have addresses; got {addresses[0]}. Give ids=."
        )
    leave_to_slow(items)
    items.sort(key=lambda item: ORDER.get(item.path.name, len(ORDER)))


def pytest_sessionstart(session: pytest.Session) -> None:
    """Fails the run, rather than skip tests, where the devices are missing."""
    if jax.device_count() < NUM_DEVICES:
        pytest.exit(
            f"the tests need {NUM_DEVICES} devices; got {jax.device_count()} ({jax.default_backend()}). "
            "Take XLA_FLAGS and JAX_* settings for devices out of the environment.",
            returncode=1,
        )


def pytest_collection_finish() -> None:
    """Makes Python's garbage collector look less often, and not at modules: tracing allocates much that is no garbage.

    It would take a tenth of the suite's CPU time.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(200_000, 20, 100)


@pytest.fixture
def source_lines():
    """Lets the programs of one test say which lines of Python they come from, as those of users do."""
    jax.config.update("jax_traceback_in_locations_limit", 10)
    yield
    jax.config.update("jax_traceback_in_locations_limit", 0)


@pytest.fixture
def x64():
    """Runs one test in float64: `def test_parity(x64): ...`."""
    with jax.enable_x64(True):
        yield
