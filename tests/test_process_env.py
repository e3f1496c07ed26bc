"""What the environment of each launcher says about a process."""

import re
from pathlib import Path

import pytest

import jaxpar
from jaxpar.run import BasicFlags, Run
from jaxpar.runtime.process_env import OF_TESTS, OWN_VARIABLES, ProcessEnv, read_process_env

OWN = {"JAX_COORDINATOR_ADDRESS": "10.0.0.1:1234", "JAX_NUM_PROCESSES": "4", "JAX_PROCESS_ID": "2"}
SLURM = {
    "SLURM_JOB_ID": "4100",
    "SLURM_STEP_NODELIST": "gpu[003-004,9],login",
    "SLURM_NTASKS": "3",
    "SLURM_PROCID": "1",
    "SLURM_LOCALID": "0",
    "SLURM_STEP_NUM_NODES": "3",
}
OPEN_MPI = {
    "OMPI_COMM_WORLD_SIZE": "4",
    "OMPI_COMM_WORLD_RANK": "3",
    "OMPI_COMM_WORLD_LOCAL_RANK": "1",
    "OMPI_COMM_WORLD_LOCAL_SIZE": "2",
    "OMPI_MCA_orte_hnp_uri": "1531576320.0;tcp://10.96.0.1,10.148.0.1:34911",
}
KUBERNETES = {
    "JAX_COORDINATOR_ADDRESS": "gpt-workers-0-0.gpt:3389",
    "JAX_NUM_PROCESSES": "2",
    "JOB_COMPLETION_INDEX": "1",
}


@pytest.mark.parametrize(
    ("environ", "place"),
    [
        ({}, None),
        (
            {"SLURM_JOB_ID": "1", "SLURM_NTASKS": "8", "SLURM_PROCID": "0"},
            None,
        ),  # sbatch without srun
        ({**SLURM, "SLURM_NTASKS": "1"}, None),
        (OWN, ProcessEnv("10.0.0.1:1234", 4, 2)),
        (KUBERNETES, ProcessEnv("gpt-workers-0-0.gpt:3389", 2, 1)),
        (SLURM, ProcessEnv("gpu003:61444", 3, 1, on_several_hosts=True)),
        (
            {**SLURM, "SLURM_NTASKS": "6", "SLURM_LOCALID": "1"},
            ProcessEnv("gpu003:61444", 6, 1, local_device_ids=(1,), on_several_hosts=True),
        ),
        (
            {**SLURM, "JAX_COORDINATOR_PORT": "99"},
            ProcessEnv("gpu003:99", 3, 1, on_several_hosts=True),
        ),
        (
            {**SLURM, "JAX_COORDINATOR_ADDRESS": "a:9"},
            ProcessEnv("a:9", 3, 1, on_several_hosts=True),
        ),
        (
            OPEN_MPI,
            ProcessEnv("10.96.0.1:62624", 4, 3, local_device_ids=(1,), on_several_hosts=True),
        ),
        (
            {**OWN, "JAX_COORDINATOR_BIND_ADDRESS": "[::]:9", "JAX_LOCAL_DEVICE_IDS": "0,3"},
            ProcessEnv("10.0.0.1:1234", 4, 2, bind="[::]:9", local_device_ids=(0, 3)),
        ),
    ],
)
def test_each_launcher_is_understood(environ, place):
    assert read_process_env(environ) == place


@pytest.mark.parametrize(
    ("environ", "message"),
    [
        (
            {"JAX_NUM_PROCESSES": "2"},
            "got JAX_NUM_PROCESSES=2 and no JAX_COORDINATOR_ADDRESS and no JAX_PROCESS_ID. Set",
        ),
        (
            {**OPEN_MPI, "OMPI_MCA_orte_hnp_uri": ""},
            "and no JAX_COORDINATOR_ADDRESS. Set what is missing",
        ),
        (
            {**OWN, "JAX_PROCESS_ID": "4"},
            "from 0 to one less than their count; got JAX_PROCESS_ID=4, JAX_NUM_PROCESSES=4",
        ),
        ({**OWN, "JAX_PROCESS_ID": "two"}, "JAX_PROCESS_ID must be a number; got 'two'"),
        ({**SLURM, "SLURM_JOB_ID": "seven"}, "SLURM_JOB_ID must be a number; got 'seven'"),
        (
            {**OWN, "JAX_COORDINATOR_ADDRESS": "10.0.0.1"},
            "JAX_COORDINATOR_ADDRESS must be host:port; got '10.0.0.1'",
        ),
        ({**OWN, "JAX_COORDINATOR_ADDRESS": "a:99999"}, "must be host:port; got 'a:99999'"),
        (
            {"JAXPAR_INITIALIZATION_TIMEOUT": "abc"},
            "must be a number of seconds above 0; got 'abc'",
        ),
        ({**OWN, "JAX_LOCAL_DEVICE_IDS": "a"}, "JAX_LOCAL_DEVICE_IDS must be numbers; got 'a'"),
    ],
)
def test_what_is_wrong_is_told(environ, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        read_process_env(environ)


@pytest.mark.parametrize(
    "name", ["JAXPAR_RUN_TOKN", "JAXPAR_TOKEN", "jaxpar_run_token", "JAX_PAR_RUN_TOKEN"]
)
def test_a_misspelt_variable_of_jaxpar_is_refused_and_another_told_once(
    name, monkeypatch, capsys, tmp_path
):
    with pytest.raises(ValueError, match=rf"got {name}\. Did you mean JAXPAR_RUN_TOKEN\?"):
        read_process_env({**OWN, name: "x"})
    monkeypatch.setenv(name, "x")
    with pytest.raises(ValueError, match=rf"got {name}\. Did you mean JAXPAR_RUN_TOKEN\?"):
        Run(BasicFlags.of(out_dir=tmp_path), jaxpar.make_mesh())
    for _ in range(2):
        read_process_env(
            {**OWN, f"JAXPAR_COLOUR_{name}": "red", "JAX_ENABLE_X64": "1", "JAXPAR_TEST_SEED": "3"}
        )
    assert (
        capsys.readouterr().err.count(
            "is ignored: the variables that jaxpar reads are JAXPAR_RUN_TOKEN, "
        )
        == 1
    )


def test_every_variable_that_the_code_names_is_known():
    root = Path(jaxpar.__file__).parent
    texts = [path.read_text() for pattern in ("*.py", "*.sbatch") for path in root.rglob(pattern)]
    named = {name for text in texts for name in re.findall(r"\bJAXPAR_[A-Z_]*[A-Z]", text)}
    assert named - {*OF_TESTS} == {*OWN_VARIABLES}


@pytest.mark.parametrize("written", ["fd00::2:7442", "[fd00::2]:7442"])
def test_an_ipv6_address_of_the_coordinator_gets_the_brackets_that_jax_needs(written):
    env = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": written}
    assert read_process_env(env).coordinator == "[fd00::2]:7442"


@pytest.mark.parametrize("name", ["JAX_COORDINATOR_ADDRESS", "JAX_COORDINATOR_BIND_ADDRESS"])
def test_an_ipv6_address_without_a_port_is_refused(name):
    env = {"JAX_NUM_PROCESSES": "2", "JAX_PROCESS_ID": "0", "JAX_COORDINATOR_ADDRESS": "a:1"}
    with pytest.raises(ValueError, match=rf"^{name} must have an IPv6 .*'fd00::2'. Write such"):
        read_process_env(env | {name: "fd00::2"})
