"""Fake devices must finish their programs, however many steps are in flight.

A machine with few cores gives XLA's CPU client few threads, and eight devices in an all-reduce then wait for one
another forever as soon as the host runs ahead. On two cores the program below hangs with PJRT_NPROC=8; 16 ends it.
"""

import os
import subprocess
import sys

import jax
import pytest

from jaxpar.runtime import distributed
from jaxpar.runtime.distributed import give_threads
from jaxpar.runtime.launch import Launch, free_port
from tests.support.waiting import WAIT_SECONDS, XLA_WAITS

TWO_HUNDRED_STEPS = """
from jaxpar.runtime.distributed import use_fake_devices

use_fake_devices(8)

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec as P

mesh = jax.make_mesh((8,), ("data",), axis_types=(jax.sharding.AxisType.Auto,))


@jax.jit
@jax.shard_map(mesh=mesh, in_specs=P("data"), out_specs=P("data"))
def step(x):
    return x / 2 + jax.lax.pmean(x, "data") / 2


x = jax.device_put(jnp.arange(8.0), NamedSharding(mesh, P("data")))
for _ in range(200):
    x = step(x)
print(jax.device_count(), float(x[0]))
"""

LOADED = """
import sys

import jax

jax.config.update("jax_compilation_cache_dir", sys.argv[1])
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0.0)

from jaxpar.runtime.distributed import initialize, use_fake_devices

if sys.argv[2] == "launched":
    initialize()
else:
    use_fake_devices(2)
jax.jit(lambda x: x + 1)(1.0).block_until_ready()
print(jax.device_count())
"""


@pytest.mark.parametrize(("given", "is_told"), [("4", True), ("2", False), ("1", False)])
def test_a_number_of_devices_that_the_program_overrides_is_told(
    monkeypatch, capsys, given, is_told
):
    """As `launch --devices-per-process` gives it; 1 is its default."""
    monkeypatch.setenv("JAX_NUM_CPU_DEVICES", given)
    monkeypatch.setattr(distributed.jax.config, "update", lambda name, value: None)
    monkeypatch.setenv("PJRT_NPROC", "64")
    distributed.use_fake_devices(2)
    told = "asks for 2 fake devices in each process: JAX_NUM_CPU_DEVICES=4, which --devices-per-p"
    assert (told in capsys.readouterr().err) == is_told


@pytest.mark.full
def test_200_unsynchronised_steps_end():
    # What pytest's own process has set must not be what saves the child.
    env = {
        name: value
        for name, value in os.environ.items()
        if name not in ("PJRT_NPROC", "JAX_PLATFORMS")
    }
    env |= {"XLA_FLAGS": XLA_WAITS}
    command = [sys.executable, "-c", TWO_HUNDRED_STEPS]
    run = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert run.returncode == 0, run.stderr
    assert run.stdout.split() == ["8", "3.5"], "8 devices should agree on the mean of 0 to 7"


@pytest.mark.parametrize("how", [pytest.param("asked for", marks=pytest.mark.full), "launched"])
def test_programs_of_fake_devices_are_neither_kept_nor_loaded(tmp_path, how):
    """XLA does not keep the order of the collectives of a program that it loads."""
    command = [sys.executable, "-c", LOADED, str(tmp_path), how]
    launch = Launch(("true",), 1, devices_per_process=2)
    env = os.environ | (launch.environment(0, free_port()) if how == "launched" else {})
    run = subprocess.run(
        command, env=env, capture_output=True, text=True, timeout=WAIT_SECONDS, check=False
    )
    assert (run.returncode, run.stdout.split()) == (0, ["2"]), run.stderr
    assert not list(tmp_path.iterdir())


def test_the_threads_are_two_a_device_and_no_fewer_than_cores_or_than_asked_for(monkeypatch):
    monkeypatch.setattr(os, "cpu_count", lambda: 12)
    for asked, num_devices, threads in (
        (None, 8, "16"),
        (None, 2, "12"),
        ("4", 8, "16"),
        ("40", 8, "40"),
        ("4", 2, "4"),
        ("", 2, "12"),
    ):
        if asked is None:
            monkeypatch.delenv("PJRT_NPROC", raising=False)
        else:
            monkeypatch.setenv("PJRT_NPROC", asked)
        give_threads(num_devices)
        assert os.environ["PJRT_NPROC"] == threads


def test_this_process_has_two_threads_a_device():
    assert int(os.environ["PJRT_NPROC"]) >= 2 * jax.device_count()
