"""Joining a run: what initialize does alone, and the XLA flags of GPUs."""

import importlib.util
import multiprocessing
import os
import sys

import jax
import pytest

import jaxpar
from jaxpar.checkpoint import BadCheckpointError
from jaxpar.run import ConfigError
from jaxpar.runtime import distributed, endings
from jaxpar.runtime.lease import LostError
from jaxpar.runtime.process_env import TIMEOUT_VARIABLE
from jaxpar.runtime.uncaught import exit_code_of
from tests.support.fake_service import stand_in
from tests.support.real_runs import run


def test_initialize_joins_nothing_where_nothing_speaks_of_other_processes(monkeypatch):
    for name in list(os.environ):
        if name.startswith(
            ("JAX_COORDINATOR", "JAX_NUM_PROCESSES", "JAX_PROCESS_ID", "SLURM_", "OMPI_")
        ):
            monkeypatch.delenv(name)
    assert jaxpar.initialize() is False
    assert jax.process_count() == 1


@pytest.mark.parametrize(
    ("more", "is_told"),
    [({}, True), ({"SLURM_NTASKS": "1"}, False), ({"SLURM_STEP_NODELIST": "n1"}, False)],
)
def test_a_process_of_a_job_of_several_tasks_that_srun_has_not_started_is_told(
    monkeypatch, capsys, more, is_told
):
    for name, value in ({"SLURM_JOB_ID": "5", "SLURM_NTASKS": "2"} | more).items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("jaxpar.runtime.distributed.read_process_env", lambda environ: None)
    assert jaxpar.initialize() is False
    told = "SLURM gives this job 2 tasks, and srun has not started this process, so it runs alone"
    assert (told in capsys.readouterr().err) == is_told


def test_an_error_of_a_collective_that_is_not_caught_ends_with_the_code_of_the_other_process(
    monkeypatch, capfd
):
    stand_in(monkeypatch, {endings.ENDED: {"process": 1, "code": 2}})
    codes = []
    monkeypatch.setattr(distributed, "leave", codes.append)
    error = jax.errors.JaxRuntimeError("Gloo all-reduce failed: Connection closed by peer")
    distributed._leave_on_error(type(error), error, None)
    assert codes == [2]
    assert "gone: process 1 of 2 has ended with exit code 2." in capfd.readouterr().err


def test_a_part_of_a_place_is_refused():
    with pytest.raises(ValueError, match="and no JAX_COORDINATOR_ADDRESS and no JAX_PROCESS_ID"):
        jaxpar.initialize(num_processes=2)


@pytest.mark.parametrize("given", ["soon", "-5", "0", "inf", "nan"])
def test_a_time_out_that_no_process_could_keep_is_refused(monkeypatch, given):
    monkeypatch.setenv(TIMEOUT_VARIABLE, given)
    with pytest.raises(
        ValueError,
        match=f"JAXPAR_INITIALIZATION_TIMEOUT must be a number of seconds above 0; got '{given}'",
    ):
        jaxpar.initialize(coordinator_address="127.0.0.1:1", num_processes=1, process_id=0)


def test_overlap_is_asked_for_unless_the_user_has_said_otherwise():
    overlap, *others = distributed.GPU_FLAGS
    assert distributed.with_gpu_flags("--xla_a=1").split() == ["--xla_a=1", overlap, *others]
    off = overlap.replace("true", "false")
    assert distributed.with_gpu_flags(off).split() == [off, *others]


def test_flags_of_gpus_are_left_alone_on_cpus(monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: object())
    before = os.environ.get("XLA_FLAGS")
    distributed.set_gpu_flags()
    assert os.environ.get("XLA_FLAGS") == before


# -- scripts of one's own ----------------------------------------------------------------------------------------------

TOLD = {"JAX_COORDINATOR_ADDRESS": "127.0.0.1:1", "JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "1"}


@pytest.fixture
def two_processes(monkeypatch):
    """Makes this process one of two, as ``launch`` does."""
    for name, value in TOLD.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr(sys, "excepthook", sys.excepthook)


def make_step():
    return jaxpar.value_and_grad(
        lambda params, batch: batch, lambda out, batch: (0.0, 0.0), jaxpar.make_mesh()
    )


@pytest.mark.usefixtures("two_processes")
def test_a_process_of_several_that_has_joined_none_makes_no_step(monkeypatch):
    message = r"got process 1 of 2 \(JAX_NUM_PROCESSES=2, JAX_PROCESS_ID=1\) without a call to jaxpar.initialize\(\)"
    with pytest.raises(distributed.NotJoinedError, match=message) as error:
        make_step()
    assert exit_code_of(error.value) == 2
    assert sys.excepthook is distributed._leave_on_error, "which ends it with that code"
    monkeypatch.setattr(jax.distributed, "is_initialized", lambda: True)
    make_step()


@pytest.mark.usefixtures("two_processes")
def test_a_spawned_worker_that_imports_the_script_does_not_join_the_run(monkeypatch):
    monkeypatch.setattr(multiprocessing.current_process(), "_inheriting", True, raising=False)
    message = (
        r'a worker of multiprocessing must not join the run; .* below `if __name__ == "__main__":`'
    )
    with pytest.raises(distributed.NotJoinedError, match=message):
        jaxpar.initialize()


@pytest.mark.usefixtures("two_processes")
def test_a_process_that_joins_after_jax_has_started_is_told_where_to_do_it():
    jax.devices()
    with pytest.raises(
        distributed.NotJoinedError, match="before JAX first uses a device; got process 1 of 2"
    ):
        jaxpar.initialize()


def raised_by(call):
    with pytest.raises(Exception) as error:  # noqa: PT011
        call()
    return error.value


def raise_(error):
    raise error


@pytest.mark.parametrize(
    ("call", "code"),
    [
        (lambda: jaxpar.make_mesh(data=9), 2),  # an error of jaxpar about what it was given
        (lambda: jaxpar.make_mesh(data="two"), 2),  # pyright: ignore[reportArgumentType]
        (lambda: raise_(ConfigError("flags")), 2),
        (lambda: raise_(BadCheckpointError("none is intact")), 65),
        (lambda: raise_(LostError("taken")), 74),
        (lambda: raise_(OSError(28, "No space left on device")), 74),
        (lambda: raise_(ValueError("of the script")), 1),
        (lambda: raise_(TimeoutError("of the script")), 1),
        (lambda: raise_(KeyError("of the script")), 1),
    ],
)
def test_an_uncaught_error_has_the_exit_code_that_it_has_in_a_recipe(call, code):
    assert exit_code_of(raised_by(call)) == code


def test_ctrl_c_has_the_code_of_a_shell():
    assert exit_code_of(KeyboardInterrupt()) == 130


@pytest.mark.full
@pytest.mark.parametrize(
    ("script", "told"),
    [
        (
            "import jaxpar\njaxpar.use_fake_devices(2)\nmesh = jaxpar.make_mesh(data=2)\n"
            "jaxpar.value_and_grad(lambda params, batch: batch, lambda out, batch: (0.0, 0.0), mesh)",
            "Call jaxpar.initialize() first in the script",
        ),
        ("import jaxpar\njaxpar.initialize()\njaxpar.make_mesh(data=3)", "ValueError: "),
    ],
    ids=["not joined", "wrong mesh"],
)
def test_a_script_of_ones_own_that_cannot_train_ends_with_2_on_every_process(
    tmp_path, script, told
):
    path = tmp_path / "script.py"
    path.write_text(script)
    code, out, err = run("-m", "jaxpar", "launch", "-n", 2, "--log-dir", tmp_path, path)
    assert code == 2, out + err
    assert told in out + err


RESTORED = """
import sys
import jaxpar
jaxpar.initialize()
import jax, jax.numpy as jnp, numpy as np, optax
from pathlib import Path
mesh, key = jaxpar.make_mesh(data=-1), jax.random.key(0)
init = lambda key: {"w": jax.random.normal(key, (8,))}
rules = {"**": jaxpar.replicated()}
shardings = jaxpar.shardings_from_paths(jax.eval_shape(init, key), mesh, rules)
parallel = jaxpar.Parallel(mesh, shardings, zero=3)
state = jaxpar.init_state(init, key, optax.adam(0.1), parallel)
manager = jaxpar.CheckpointManager(Path(sys.argv[1]) / "checkpoints", mesh)
manager.save(state)
saved = manager.restore(jaxpar.abstract_state(init, key, optax.adam(0.1), parallel))
assert not saved.params["w"].is_fully_addressable
twice = jnp.float32(2)
new = lambda key: {"w": twice * saved.params["w"]}
new = jaxpar.init_state(new, key, optax.sgd(0.1, momentum=0.9), parallel)
np.testing.assert_array_equal(jaxpar.fetch(new.params["w"]), 2 * jaxpar.fetch(state.params["w"]))
print("begun anew")
"""


def test_restored_params_begin_a_run_of_several_processes_with_another_optimizer(tmp_path):
    path = tmp_path / "script.py"
    path.write_text(RESTORED)
    options = "-n", 2, "--devices-per-process", 2, "--log-dir", tmp_path
    code, out, err = run("-m", "jaxpar", "launch", *options, path, tmp_path)
    assert (code, out.count("begun anew")) == (0, 1), out + err
