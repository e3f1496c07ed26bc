"""Jobs for clusters: they fit the schemas of their APIs (tests/data/schemas) and our rules, and mistakes in them are caught."""

import copy
import dataclasses
import json
import os
import re
import subprocess
import sys
import typing
from pathlib import Path

import pytest
import yaml

import gpt
from jaxpar.__main__ import main as jaxpar_main
from jaxpar.commands import recipe as cli
from jaxpar.commands.manifest import main
from jaxpar.jobs import (
    Job,
    Serving,
    check_manifest,
    to_jobset,
    to_sbatch,
    to_service,
    to_trainjob,
    unsaved,
)
from jaxpar.jobs.flags import UNUSED, first_plan, plan_flags, plan_remarks
from jaxpar.jobs.job import JobSettings
from jaxpar.models.quantized import Kind
from jaxpar.models.transformer.config import COMPUTE_DTYPES
from jaxpar.run import Run
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.schedule import SCHEDULES
from tests.support import doc_pages
from tests.support.cluster import expand, started
from tests.support.planned import PLAN
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]


SCHEMAS = ROOT / "tests" / "data" / "schemas"
JOBSET, TRAINJOB = "jobset.v1alpha2.json", "trainjob.v1alpha1.json"
# BLOOM's own: 48 nodes of 8 GPUs (Le Scao et al. 2022, arXiv 2211.05100, section 3.4.1).
BLOOM = Job(
    name="bloom",
    command=("recipes/gpt.py", "--model", "bloom-176b"),
    data=8,
    stage=12,
    tensor=4,
    image="registry.example/jaxpar:1",
    queue="research",
    topology="topology.example/block",
    replica_topology="topology.example/rack",
    checkpoint_claim="bloom",
    save_seconds=100.0,
    cpus=96,
    memory_gib=800,
    toleration=("nvidia.com/gpu:NoSchedule", "team=research:NoExecute", "example.com/spot"),
    rdma="rdma/ib=8",
    env=("NCCL_IB_HCA=mlx5", "LD_PRELOAD="),
)


def schema(name):
    return json.loads((SCHEMAS / name).read_text())


def test_bloom_s_48_nodes_fit_the_schema_of_a_jobset():
    check_manifest(to_jobset(BLOOM), schema(JOBSET))


def crd(kind="JobSet", version="v1alpha2"):
    """A CustomResourceDefinition as a cluster writes it, of the fields that its admission reads."""
    of_version = {"name": version, "schema": {"openAPIV3Schema": schema(JOBSET)}}
    names = {"names": {"kind": kind}, "versions": [of_version]}
    return {"kind": "CustomResourceDefinition", "spec": names}


def test_the_schema_may_be_the_definition_that_a_cluster_writes():
    manifest = to_jobset(BLOOM)
    check_manifest(manifest, crd())
    manifest["spec"]["zzz"] = 1
    with pytest.raises(ValueError, match="'zzz' was unexpected"):
        check_manifest(manifest, crd())


@pytest.mark.parametrize(
    ("given", "message"),
    [
        (crd("TrainJob"), "must be that of the manifest, JobSet v1alpha2; got TrainJob v1alpha2"),
        (crd(version="v1"), "must be that of the manifest, JobSet v1alpha2; got JobSet v1\\."),
        (
            {"kind": "CustomResourceDefinition"},
            "must have spec.names.kind .*; got one without 'spec'",
        ),
        ({}, "with its spec; got one of nothing, which allows everything"),
        ({"kind": "List", "items": []}, "with its spec; got one of kind, items, which allows"),
        ({"type": "object"}, "with its spec; got one of type, which allows everything"),
    ],
)
def test_a_schema_that_allows_everything_is_refused(given, message):
    with pytest.raises(ValueError, match=message):
        check_manifest(to_jobset(BLOOM), given)


def test_a_recipe_that_trains_nothing_is_no_job():
    with pytest.raises(ValueError, match=r"got recipes/bloom.py, which computes on this machine"):
        main(["--mesh.data", "16", "--image", "a:1", "recipes/bloom.py"])


def test_bloom_s_48_nodes_fit_the_schema_of_a_trainjob():
    check_manifest(to_trainjob(BLOOM), schema(TRAINJOB))


def paths(tree, path=()):
    """Yields the path of every field that the API names; what is in labels, annotations and limits is free."""
    items = (
        tree.items()
        if isinstance(tree, dict)
        else enumerate(tree)
        if isinstance(tree, list)
        else ()
    )
    for key, value in items:
        if isinstance(tree, dict) and (
            not path or path[-1] not in ("metadata", "annotations", "labels", "limits", "requests")
        ):
            yield (*path, key)
        yield from paths(value, (*path, key))


@pytest.mark.parametrize(
    ("write", "name"),
    [pytest.param(to_jobset, JOBSET, marks=pytest.mark.full), (to_trainjob, TRAINJOB)],
    ids=["jobset", "trainjob"],
)
def test_a_typo_in_any_field_is_caught(write, name):
    api = schema(name)
    manifest = write(BLOOM)
    fields = [
        path for path in paths(manifest) if path not in (("apiVersion",), ("kind",), ("metadata",))
    ]
    assert len(fields) > 25
    for path in fields:
        wrong = copy.deepcopy(manifest)
        inner = wrong
        for key in path[:-1]:
            inner = inner[key]
        inner[path[-1] + "x"] = inner.pop(path[-1])
        with pytest.raises(ValueError, match="must fit its API's schema"):
            check_manifest(wrong, api)


def test_a_wrong_kind_of_value_is_caught():
    wrong = to_jobset(BLOOM)
    wrong["spec"]["replicatedJobs"][0]["template"]["spec"]["parallelism"] = "many"
    with pytest.raises(
        ValueError,
        match=r"spec.replicatedJobs.0.template.spec.parallelism: 'many' is not of type 'integer'",
    ):
        check_manifest(wrong, schema(JOBSET))


def pod(manifest):
    return manifest["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]


def test_a_pod_is_a_node_and_knows_its_place():
    manifest = to_jobset(BLOOM)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    (container,) = pod(manifest)["spec"]["containers"]
    told = {variable["name"]: variable.get("value") for variable in container["env"]}
    assert (job["parallelism"], job["completions"], job["completionMode"]) == (48, 48, "Indexed")
    assert container["resources"] == {
        "requests": {"cpu": "96", "memory": "800Gi", "nvidia.com/gpu": 8, "rdma/ib": 8},
        "limits": {"memory": "800Gi", "nvidia.com/gpu": 8, "rdma/ib": 8},
    }, "no limit on CPU, which would slow a process down"
    assert container["securityContext"]["capabilities"] == {"add": ["IPC_LOCK"]}, (
        "RDMA locks the memory that it reads"
    )
    assert (told["NCCL_IB_HCA"], told["LD_PRELOAD"]) == ("mlx5", "")
    assert told["JAX_COORDINATOR_ADDRESS"] == "bloom-nodes-0-0.bloom-nodes:6379"
    assert (
        manifest["spec"]["network"]["subdomain"]
        == pod(manifest)["spec"]["subdomain"]
        == "bloom-nodes"
    )
    assert told["JAX_NUM_PROCESSES"] == "48"
    assert told["JAX_COORDINATOR_BIND_ADDRESS"] == "$(POD_IP):6379", (
        "its own address, not all of them"
    )
    assert container["command"][-6:] == [
        "--mesh.data",
        "8",
        "--mesh.stage",
        "12",
        "--mesh.tensor",
        "4",
    ]


def test_what_it_says_of_its_place_is_what_initialize_reads():
    from jaxpar.runtime.process_env import read_process_env

    told = {
        v["name"]: v.get("value", "7")
        for v in pod(to_jobset(BLOOM))["spec"]["containers"][0]["env"]
    }
    told["JAX_COORDINATOR_BIND_ADDRESS"] = told["JAX_COORDINATOR_BIND_ADDRESS"].replace(
        "$(POD_IP)", "10.0.0.7"
    )
    place = read_process_env(told)
    assert (place.num_processes, place.process_id, place.bind) == (48, 7, "10.0.0.7:6379")


DOLLARS = (
    "costs $$5, see $(JAX_NUM_PROCESSES)",
    "pa$$word",
    "$",
    "$$$",
    "$(",
    "$(X",
    "$($(POD_IP))",
    "a$b${C}$$(D)$",
)


def containers(job, serving):
    """The container of each kind of manifest that has one."""
    (jobset,) = pod(to_jobset(job))["spec"]["containers"]
    (served,) = to_service(serving)[0]["spec"]["template"]["spec"]["containers"]
    return {"JobSet": jobset, "TrainJob": to_trainjob(job)["spec"]["trainer"], "Deployment": served}


def test_words_and_variables_arrive_in_a_container_as_they_were_given():
    env = {f"V{i}": text for i, text in enumerate(DOLLARS)}
    given = {"image": "a:1", "env": tuple(f"{name}={text}" for name, text in env.items())}
    job = Job(command=("run", *DOLLARS), data=8, **given)
    serving = Serving(command=("jaxpar", "serve", *DOLLARS), name="gpt", **given)
    for kind, container in containers(job, serving).items():
        command, variables = started(container, JAX_PROCESS_ID="0", POD_IP="10.0.0.7")
        assert command[command.index(DOLLARS[0]) :][: len(DOLLARS)] == [*DOLLARS], kind
        assert {name: variables[name] for name in env} == env, kind
        if kind == "JobSet":
            assert variables["JAX_COORDINATOR_BIND_ADDRESS"] == "10.0.0.7:6379", (
                "the manifest's own reference"
            )
    assert expand(DOLLARS[0], {"JAX_NUM_PROCESSES": "1"}) == "costs $5, see 1", (
        "what the kubelet does to it otherwise"
    )


def test_nodes_of_a_stage_are_kept_close_and_all_start_together():
    manifest = to_jobset(BLOOM)
    assert pod(manifest)["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-preferred-topology": "topology.example/block",
        "kueue.x-k8s.io/podset-slice-required-topology": "topology.example/rack",
        "kueue.x-k8s.io/podset-slice-size": "4",
    }, "a stage of 8 replicas of 4 shards has 4 nodes of 8"
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}


def test_a_pod_has_time_to_save_and_room_for_nccl():
    spec = pod(to_jobset(BLOOM))["spec"]
    assert spec["terminationGracePeriodSeconds"] == 230, "twice a save, and 30 s"
    assert {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]} == {
        "/dev/shm",
        "/checkpoints",
    }
    assert spec["volumes"][0] == {
        "name": "shm",
        "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"},
    }


def test_a_pod_ends_on_sigterm_before_it_handles_signals(capsys):
    serving, _ = service(capsys)
    for spec in (pod(to_jobset(BLOOM))["spec"], serving["spec"]["template"]["spec"]):
        assert spec["shareProcessNamespace"] is True, (
            "the kernel ignores SIGTERM for a process 1 without a handler"
        )
    pods = schema(TRAINJOB)["properties"]["spec"]["properties"]["runtimePatches"]["items"][
        "properties"
    ]
    assert "shareProcessNamespace" not in json.dumps(pods), (
        "to_trainjob could set it, and the page need not say otherwise"
    )


def answer(code):
    """Returns what a JobSet does about a pod that ends with ``code``, as its and the Job's controllers decide."""
    manifest = to_jobset(BLOOM)
    job = manifest["spec"]["replicatedJobs"][0]["template"]["spec"]
    reason, message = "BackoffLimitExceeded", "Job has reached the specified backoff limit"
    for number, rule in enumerate(job["podFailurePolicy"]["rules"]):
        if code in rule.get("onExitCodes", {}).get("values", []):
            reason = "PodFailurePolicy"
            message = f"Container train for pod a/b failed with exit code {code} matching FailJob rule at index {number}"
            break
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [".*"])
        if reason in rule["onJobFailureReasons"] and any(
            re.search(pattern, message) for pattern in patterns
        ):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize(
    "code", [code for code in ExitCode if code != ExitCode.DONE], ids=lambda code: code.name
)
def test_the_restart_policy_fits_the_exit_codes(code):
    expected = {
        ExitCode.PEER_LOST: "RestartJobSet",
        ExitCode.STUCK: "RestartJobSet",
        ExitCode.PREEMPTED: "RestartJobSetAndIgnoreMaxRestarts",
    }
    assert answer(code) == expected.get(code, "FailJobSet")
    assert answer(134) == "RestartJobSet", "an abort is another's death"


def test_a_batch_script_is_one_that_bash_reads_and_slurm_obeys(tmp_path):
    text = to_sbatch(
        Job(
            name="gpt",
            command=("train.py", "--text", "a b"),
            data=2,
            tensor=8,
            hours=30.5,
            partition="gpu",
            max_restarts=2,
        )
    )
    for line in (
        "--nodes=2",
        "--ntasks-per-node=1",
        "--gpus-per-node=8",
        "--time=1-06:30:00",
        "--signal=TERM@150",
    ):
        assert f"#SBATCH {line}\n" in text
    # After another signal than that of a code srun reports the signal: a drain would count as a failure.
    assert "--kill-on-bad-exit=0 --wait=150 python -u train.py --text 'a b' --mesh.data 2" in text
    script = tmp_path / "job.sh"
    script.write_text(text)
    (tmp_path / "bin").mkdir()
    for name, body in (("srun", "exit $CODE"), ("scontrol", 'echo "$@" >> $LOG')):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    log = tmp_path / "log"
    env = {
        "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
        "LOG": str(log),
        "SLURM_JOB_ID": "7",
        "SLURM_RESTART_COUNT": "99",  # of which those after 75 are no failures
    }
    drained, failed = (75, True), (70, True)
    for code, requeued in (
        (0, False),
        (2, False),
        (86, False),
        drained,
        failed,
        failed,
        (70, False),
    ):
        log.unlink(missing_ok=True)
        done = subprocess.run(
            ["bash", script],
            env=env | {"CODE": str(code)},
            cwd=tmp_path,
            check=False,
            timeout=WAIT_SECONDS,
        )
        assert done.returncode == code
        assert log.exists() == requeued, f"exit code {code}"
    failures = tmp_path / "slurm-7.failures"
    assert failures.read_text().count("exit code 70") == 3
    failures.unlink()
    failures.mkdir()  # the folder takes no file: SLURM's own count of all restarts is used
    for restarts, requeued in ((1, True), (2, False)):
        log.unlink(missing_ok=True)
        told = {"CODE": "70", "SLURM_RESTART_COUNT": str(restarts)}
        done = subprocess.run(
            ["bash", script], env=env | told, cwd=tmp_path, check=False, timeout=WAIT_SECONDS
        )
        assert (done.returncode, log.exists()) == (70, requeued)


def written(capsys, *args):
    main(args)
    return capsys.readouterr().out


FLAGS = ("--image", "a:1", "--mesh.data", "2", "--mesh.tensor", "8")


def test_the_command_writes_yaml_that_reads_back(capsys):
    manifest = yaml.safe_load(written(capsys, *FLAGS, "recipes/gpt.py", "--steps", "9"))
    told = {
        variable["name"]: variable.get("value")
        for variable in pod(manifest)["spec"]["containers"][0]["env"]
    }
    command = ("recipes/gpt.py", "--steps", "9")
    job = Job(
        name="jaxpar",
        image="a:1",
        data=2,
        tensor=8,
        command=command,
        token=told["JAXPAR_RUN_TOKEN"],
    )
    assert manifest == to_jobset(job)


def test_the_best_plan_becomes_the_job_and_the_recipe_s_flags(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    best = PLAN | {
        "data": 4,
        "stage": 2,
        "tensor": 2,
        "schedule": "interleaved",
        "num_microbatches": 8,
        "zero": 1,
        "remat": False,
    }
    best |= {"num_chunks": 2, "layers_per_virtual_stage": [1, 2, 1, 0]}
    plan.write_text(json.dumps([best, PLAN | {"data": 16}]))
    flags = (
        "--plan",
        str(plan),
        "--image",
        "a:1",
        "recipes/gpt.py",
        "--zero",
        "0",
        "--batch-size",
        "32",
    )
    (container,) = pod(yaml.safe_load(written(capsys, *flags)))["spec"]["containers"]
    said = " ".join(container["command"])
    assert (
        "--mesh.data 4 --mesh.stage 2 --mesh.tensor 2 --schedule interleaved --num-microbatches 8"
        in said
    )
    assert "--num-chunks 2 --layers-per-virtual-stage 1 2 1 0" in said
    assert "--zero 0" in said, "what the command says itself stays"
    assert "--zero 1" not in said


@pytest.mark.parametrize(("remat", "flag"), [(True, "full"), ("dots", "dots")])
def test_what_a_plan_recomputes_is_a_flag(remat, flag):
    plan = PLAN | {"data": 1, "stage": 1, "tensor": 1, "remat": remat}
    assert plan_flags(first_plan(plan), ())[-2:] == ["--remat", flag]
    with pytest.raises(
        ValueError,
        match=r"^remat of a plan must be True, False or 'dots'; got \"some\"\. Write it by",
    ):
        first_plan(plan | {"remat": "some"})


def test_a_plan_with_a_field_that_plan_does_not_write_is_refused(capsys):
    jaxpar_main(["plan", "--model", "gpt2", "--top", "1", "--json"])
    (written,) = json.loads(capsys.readouterr().out)
    first_plan([written])
    with pytest.raises(ValueError, match=r"^a plan must have no other fields; got 'microbatches'"):
        first_plan([written | {"microbatches": 4}])


NEEDED = sorted({*PLAN} - {"own_model"})


def test_a_plan_may_have_each_schedule_each_code_and_each_dtype():
    values = {"schedule": SCHEDULES, "quantize": typing.get_args(Kind), "dtype": COMPUTE_DTYPES}
    for name, value in [(name, each) for name, of_it in values.items() for each in of_it]:
        assert getattr(first_plan(PLAN | {name: value}), name) == value


def test_a_plan_without_a_field_that_every_plan_has_is_refused(capsys):
    jaxpar_main(["plan", "--model", "gpt2", "--top", "1", "--json"])
    (written,) = json.loads(capsys.readouterr().out)
    assert {*NEEDED} <= {*written}
    for name in NEEDED:
        without = {key: value for key, value in written.items() if key != name}
        with pytest.raises(ValueError, match=rf"^a plan must have the field '{name}'; got '"):
            first_plan(without)
        with pytest.raises(ValueError, match=rf"^{name} of a plan must be .*; got null\. Write"):
            first_plan(written | {name: None})
    for name in ("seq", "dtype"):
        with pytest.raises(
            ValueError, match=rf"fields seq and dtype; got model gpt2, and no {name}"
        ):
            first_plan(written | {name: None})
    with pytest.raises(ValueError, match="one of the fields model, init_from, own_model; got none"):
        first_plan(written | {"model": None})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("executor", "z"),
        ("zero", 4),
        ("experts", "stage"),
        ("attention", "f"),
        ("products", "fp4"),
        ("schedule", "zigzag"),
        ("quantize", "nf5"),
        ("dtype", "float8"),
    ],
)
def test_a_setting_of_a_plan_that_is_none_of_its_values_is_refused(name, value):
    with pytest.raises(ValueError, match=rf"^{name} of a plan must be .*; got "):
        first_plan(PLAN | {name: value})


def test_a_mesh_that_splits_sequences_is_the_job_s_and_the_recipe_s():
    planned = first_plan(PLAN | {"data": 2, "tensor": 2, "context": 4})
    assert plan_flags(planned, ())[:8] == [
        "--mesh.data",
        "2",
        "--mesh.context",
        "4",
        "--mesh.stage",
        "1",
        "--mesh.tensor",
        "2",
    ]
    job = Job(
        command=("recipes/gpt.py",), image="a:1", data=2, context=4, tensor=2, gpus_per_node=8
    )
    assert (job.num_nodes, job.devices_per_stage) == (2, 16)


def test_the_axis_of_a_plans_experts_is_a_flag():
    plan = PLAN | {"data": 4, "stage": 1, "tensor": 1, "experts": "data"}
    assert plan_flags(first_plan(plan), ())[-2:] == ["--experts", "data"]
    assert "--experts" not in plan_flags(first_plan(plan | {"experts": None}), ())
    roomy = plan | {"expert_buffer": 1.5}
    assert plan_flags(first_plan(roomy), ())[-4:] == ["--experts", "data", "--expert-buffer", "1.5"]


def test_the_rank_of_a_plan_with_lora_and_the_codes_of_its_weights_are_flags():
    plan = PLAN | {"data": 1, "stage": 1, "tensor": 1, "lora_rank": 8}
    assert plan_flags(first_plan(plan), ())[-2:] == ["--lora-rank", "8"]
    in_codes = plan_flags(first_plan(plan | {"quantize": "nf4"}), ())
    assert in_codes[-4:] == ["--lora-rank", "8", "--quantize", "nf4"]
    with pytest.raises(ValueError, match="lora_rank of a plan must be at least 1; got 0"):
        first_plan(plan | {"lora_rank": 0})


def test_what_the_command_gives_in_tokens_takes_the_place_of_rows_of_the_plan():
    sizes = {"data": 4, "stage": 1, "tensor": 1, "seq": 64, "dtype": "bfloat16"}
    plan = first_plan(PLAN | sizes | {"batch_size": 64, "num_microbatches": 4})
    tokens = plan.seq * plan.batch_size
    a_replica = tokens // 4 // plan.num_microbatches
    command = ["gpt.py", "--batch-tokens", str(tokens), "--microbatch-tokens", str(a_replica)]
    flags = plan_flags(plan, command)
    assert not {"--batch-size", "--num-microbatches"} & {*flags}
    assert plan_remarks(plan, ["recipes/gpt.py", *command[1:]]) == []
    (told,) = plan_remarks(plan, ["recipes/gpt.py", "--batch-tokens", str(2 * tokens)])
    assert f"--batch-tokens {2 * tokens} where it has {tokens}" in told


def test_a_plan_of_other_machines_than_its_mesh_has_is_refused():
    plan = PLAN | {"data": 8, "stage": 1, "tensor": 2, "nodes": 2, "gpus_per_node": 8}
    assert first_plan(plan).nodes == 2
    with pytest.raises(
        ValueError,
        match=r"must have its devices; got nodes=3 of gpus_per_node=8, and a mesh of 16\. Write",
    ):
        first_plan(plan | {"nodes": 3})


def test_a_plan_of_interleaved_in_one_chunk_says_so():
    plan = PLAN | {"data": 4, "stage": 2, "tensor": 2, "schedule": "interleaved", "num_chunks": 1}
    said = " ".join(plan_flags(first_plan(plan), ()))
    assert " --schedule interleaved " in said
    assert said.endswith(" --num-chunks 1")


@pytest.mark.full
def test_the_job_of_a_plan_trains_the_model_that_was_planned(capsys, tmp_path, monkeypatch):
    asked = [
        "plan",
        "--model",
        "gpt2-bytes",
        "--batch-size",
        "32",
        "--seq",
        "64",
        "--stage",
        "2",
        "--remat",
        "yes",
        "--json",
    ]
    asked += [
        "--data",
        "4",
        "--schedule",
        "1f1b",
        "--num-microbatches",
        "4",
        "--zero",
        "0",
    ]  # which leave little to search
    assert jaxpar_main(asked) == 0
    plan = tmp_path / "plan.json"
    plan.write_text(capsys.readouterr().out)
    (container,) = pod(
        yaml.safe_load(written(capsys, "--plan", str(plan), "--image", "a:1", "recipes/gpt.py"))
    )["spec"]["containers"]
    python, unbuffered, recipe, *flags = container["command"]
    assert (python, unbuffered, recipe) == ("python", "-u", "recipes/gpt.py")
    said = " ".join(flags)
    assert "--model gpt2-bytes --batch-size 32 --seq 64 --dtype bfloat16" in said
    assert "--remat full" in said
    compiled = []
    monkeypatch.setattr(Run, "compile", lambda *_: sys.exit(compiled.append("a step")))
    with pytest.raises(SystemExit):
        cli.run(gpt.main, gpt.Config, [*flags, "--dry-run"])
    assert compiled, "the recipe takes all flags"
    assert "gpt2-bytes: " in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--plan", "--check", "--schema"])
def test_a_file_that_is_not_there_is_named_with_its_flag(flag):
    message = f"{flag} must name a text file that can be read; got nowhere: No such file or directory. Name one that is there."
    with pytest.raises(ValueError, match=re.escape(message)):
        main([flag, "nowhere", *([] if flag == "--check" else ["--image", "a", "recipes/gpt.py"])])


def test_a_manifest_edited_by_hand_is_checked(capsys, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(written(capsys, *FLAGS, "recipes/gpt.py"))
    assert "no error found" in written(capsys, "--check", str(path))
    for old, new, message in (
        ("completions: 2", "completions: 3", "parallelism must equal completions"),
        ('value: "2"', 'value: "4"', "JAX_NUM_PROCESSES must be the number of pods; got 4"),
        ("replicas: 1", "replicas: 2", "replicas must be 1"),
        (
            path.read_text().partition("  replicatedJobs:")[2],
            " []\n",
            "replicatedJobs of a JobSet must have a job",
        ),
        (
            'value: "jaxpar-nodes-0-0.',
            'value: "jaxpar-node-0-0.',
            "must be pod 0's host, jaxpar-nodes-0-0.jaxpar-nodes;",
        ),
        (
            '    subdomain: "jaxpar-nodes"\n  fail',
            '    subdomain: "gpt"\n  fail',
            "subdomain of spec.replicatedJobs.0 must be that of spec.network; got 'jaxpar-nodes' and 'gpt'",
        ),
        (
            '- name: "train"',
            '- name: "trainer"',
            "containerName in spec.replicatedJobs.0.podFailurePolicy must be a container of",
        ),
        ("job-completion-index", "index", "JAX_PROCESS_ID must be the pod's number"),
        ('name: "jaxpar"', 'name: "Jax_par"', "metadata.name must be a host name's label"),
        ('kind: "JobSet"', 'kind: "Jobset"', "Service; got kind Jobset. Did you mean JobSet?"),
        (
            'name: "jaxpar"',
            'name: "1jaxpar"',
            "metadata.name of a JobSet must begin with a letter; got '1jaxpar'.",
        ),
        (
            'kind: "JobSet"',
            'kind: "Pod"',
            "PodMonitor, Deployment, Service; got kind Pod. Check a file that has one of these.",
        ),
        (
            'apiVersion: "jobset.x-k8s.io/v1alpha2"',
            'apiVersion: "v1"',
            "apiVersion of a JobSet must be jobset.x-k8s.io/v1alpha2",
        ),
        (
            '- name: "shm"\n                mountPath',
            '- name: "shn"\n                mountPath',
            "must be of its volumes; got 'shn'",
        ),
    ):
        wrong = tmp_path / "wrong.yaml"
        text = path.read_text()
        assert old in text, old
        wrong.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=re.escape(message)):
            main(["--check", str(wrong)])


KINDS = {
    "jobset": (*FLAGS, "--metrics-port", "9090", "recipes/gpt.py"),
    "trainjob": (*FLAGS, "--metrics-port", "9090", "recipes/gpt.py"),
    "podmonitor": ("--metrics-port", "9090"),
    "service": (
        "--image",
        "a:1",
        "--checkpoint-claim",
        "runs",
        "jaxpar",
        "serve",
        "/checkpoints/gpt",
    ),
}


def test_every_kind_that_is_written_passes_its_own_check(capsys, tmp_path):
    text = {kind: written(capsys, "--kind", kind, *flags) for kind, flags in KINDS.items()}
    text["all in one"] = "---\n".join(text.values()) + "---\n"
    path = tmp_path / "job.yaml"
    for kind, manifest in text.items():
        path.write_text(manifest)
        assert "no error found" in written(capsys, "--check", str(path)), kind
    wrong = {
        "all in one": [
            (
                'kind: "PodMonitor"',
                'kind: "PodMonitors"',
                "document 3: a manifest must be of a kind that `manifest` writes",
            ),
            (
                "completions: 2",
                "completions: 3",
                "document 1: spec.replicatedJobs.0.parallelism must equal completions",
            ),
        ],
        "podmonitor": [("matchLabels", "labels", "a PodMonitor must have labels to select")],
        "service": [
            (
                'matchLabels:\n      app.kubernetes.io/name: "jaxpar"',
                "matchLabels:\n      app: a",
                "must be labels of its pods",
            ),
            (
                'targetPort: "http"',
                'targetPort: "grpc"',
                "targetPort of a Service must be a named port of its pods; got 'grpc'",
            ),
            (
                'selector:\n    app.kubernetes.io/name: "jaxpar"',
                "selector:\n    app: a",
                "spec.selector of a Service must be labels",
            ),
            (
                'path: "/readyz"\n            port: "http"',
                'path: "/"\n            port: "grpc"',
                "readinessProbe must ask a named port",
            ),
            (
                'ports:\n  - name: "http"',
                'ports: []\n  unused:\n  - name: "http"',
                "a Service must have a selector and ports",
            ),
            (
                'ports:\n  - name: "http"\n    port: 80\n    targetPort: "http"',
                "ports: [80]",
                "document 2: spec.ports.0 must be an object; got 80. Write its fields, each with its name.",
            ),
            (
                'kind: "Service"',
                'kind: "Deployment"',
                "document 2: apiVersion of a Deployment must be apps/v1; got 'v1'",
            ),
        ],
    }
    for kind, changes in wrong.items():
        for old, new, message in changes:
            assert old in text[kind], (kind, old)
            path.write_text(text[kind].replace(old, new, 1))
            with pytest.raises(ValueError, match=re.escape(message)):
                main(["--check", str(path)])


@pytest.mark.parametrize(
    ("old", "new", "message"),
    [
        (
            'effect: "NoSchedule"',
            'effect: "NoShedule"',
            "spec.replicatedJobs.0.template.spec.template.spec.tolerations.0.effect must be NoSchedule, PreferNoSchedule, "
            "NoExecute; got 'NoShedule'. Did you mean NoSchedule?",
        ),
        (
            'operator: "Exists"',
            "operator: exist",
            "tolerations.0.operator must be Exists, Equal, Gt, Lt; got 'exist'.",
        ),
        (
            '- key: "nvidia.com/gpu"\n              operator: "Exists"',
            '- operator: "Equal"',
            "must have the key of a taint; got",
        ),
        (
            'operator: "Exists"',
            'operator: "Exists"\n              value: "1"',
            "must have no value, since its operator",
        ),
        (
            'operator: "In"',
            'operator: "in"',
            "onExitCodes.operator must be In, NotIn; got 'in'. Did you mean In?",
        ),
        (
            'action: "FailJob"',
            'action: "FailPod"',
            "action must be FailJob, FailIndex, Ignore, Count; got 'FailPod'.",
        ),
        (
            'action: "FailJobSet"',
            'action: "FailJob"',
            "failurePolicy.rules.0.action must be FailJobSet, RestartJobSet",
        ),
        (
            'type: "RuntimeDefault"',
            'type: "Default"',
            "seccompProfile.type must be RuntimeDefault, Unconfined",
        ),
        (
            '- name: "train"',
            '- imagePullPolicy: "IfNotPresnt"\n              name: "train"',
            "Did you mean IfNotPresent?",
        ),
    ],
)
def test_a_value_that_the_api_does_not_know_is_told_with_those_that_it_knows(
    capsys, tmp_path, old, new, message
):
    path = tmp_path / "job.yaml"
    text = written(capsys, *FLAGS, "--toleration", "nvidia.com/gpu:NoSchedule", "recipes/gpt.py")
    assert old in text, old
    path.write_text(text.replace(old, new))
    with pytest.raises(ValueError, match=re.escape(message)):
        main(["--check", str(path)])


def test_labels_may_have_the_names_of_fields(capsys, tmp_path):
    path = tmp_path / "job.yaml"
    text = written(capsys, *FLAGS, "recipes/gpt.py")
    path.write_text(
        text.replace(
            "metadata:\n", "metadata:\n  labels: {protocol: any, restartPolicy: mine}\n", 1
        )
    )
    assert "no error found" in written(capsys, "--check", str(path))


@pytest.mark.parametrize(("value", "is_told"), [("cpu", True), ("cuda", False)])
def test_a_batch_script_whose_variables_keep_jax_from_its_gpus_is_told(capsys, value, is_told):
    main(["--kind", "sbatch", *FLAGS, "--env", f"JAX_PLATFORMS={value}", "recipes/gpt.py"])
    told = f"the script has JAX_PLATFORMS={value} and 8 GPUs a node: the program does not use them"
    assert (told in capsys.readouterr().err) == is_told


def test_files_that_hold_no_manifest_or_several_apis_are_refused(capsys, tmp_path):
    path = tmp_path / "job.yaml"
    for text, flags, message in (
        ("---\n", (), "a manifest must hold a document; got none"),
        ("kind: [JobSet]\n", (), "a manifest must be of a kind that `manifest` writes, JobSet"),
        (
            written(capsys, "--kind", "sbatch", *FLAGS, "recipes/gpt.py"),
            (),
            "got a script. Leave its check to sbatch.",
        ),
        (
            written(capsys, "--kind", "service", *KINDS["service"]),
            ("--schema", str(SCHEMAS / JOBSET)),
            "a schema is that of one kind; got a file of Deployment, Service. Check them in files of their own.",
        ),
    ):
        path.write_text(text)
        with pytest.raises(ValueError, match=re.escape(message)):
            main(["--check", str(path), *flags])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "My_Job"}, "a job's name must be lower-case letters, digits and -"),
        ({"name": "a" * 60}, "at most 43 long; got 'aaa"),
        (
            {"tensor": 3},
            "must stay inside a node; got tensor=3, 8 GPUs a node. Choose tensor from 1, 2, 4, 8.",
        ),
        ({"tensor": 16}, "must stay inside a node; got tensor=16"),
        (
            {"data": 1, "stage": 3, "tensor": 4},
            "got data=1, stage=3, tensor=4, 12 GPUs on nodes of 8. Choose a mesh of 16",
        ),
        (
            {"data": 1, "tensor": 4},
            "replica_topology needs stages on whole nodes; got data=1, stage=12, tensor=4: 4 GPUs a stage on nodes of 8",
        ),
        (
            {"command": ("recipes/gpt.py", "--mesh.data", "16")},
            "the recipe's mesh must be that of the job; got data=8, and --mesh.data 16 for the recipe. Give the mesh once",
        ),
        (
            {"command": ("jaxpar", "train", "gpt", "--mesh.stage=2")},
            "got stage=12, and --mesh.stage 2 for the recipe.",
        ),
        (
            {"command": ("recipes/gpt.py", "--metrics-port", "9091"), "metrics_port": 9090},
            "got --metrics-port 9090, and 9091 for the recipe. Leave the second out.",
        ),
        ({"command": ()}, "a job needs a command; got none"),
        ({"data": 0}, "data must be at least 1; got 0"),
        ({"save_seconds": 0.0}, "save_seconds must be above 0; got 0.0"),
        ({"cpus": -1}, "cpus must be at least 0; got -1"),
        (
            {"rdma": "rdma/ib"},
            "rdma must be a resource with its domain, its name at most 63 long, and how many of it a node has, as in "
            "rdma/ib=8, at most 253 long; got "
            '"rdma/ib". Give such a value, and nothing else.',
        ),
        (
            {"rdma": "nvidia.com/gpu=4"},
            "rdma names a resource beside the GPUs; got nvidia.com/gpu=4. Name that of the",
        ),
        ({"rdma": "amd.com/gpu=8"}, "rdma names a resource beside the GPUs; got amd.com/gpu=8."),
        (
            {"toleration": ("a:Never",)},
            "toleration must be a taint whose effect is NoSchedule, PreferNoSchedule or NoExecute, its name and value at most "
            "63 long, as in nvidia.com/gpu=present:NoSchedule, at most 253",
        ),
        (
            {"toleration": ("nvidia.com/gpu=NoSchedule",)},
            "toleration must be a taint whose effect is NoSchedule, PreferNoSchedule or NoExecute, its name and value at most "
            "63 long, as in nvidia.com/gpu=present:NoSchedule, at most 253",
        ),
        (
            {"env": ("NCCL_DEBUG",)},
            "env must be a variable without line ends, as in NCCL_DEBUG=INFO, at most 32768 long",
        ),
        (
            {"env": ("JAX_PROCESS_ID=3",)},
            "env may not have the variables that a job sets itself; got JAX_PROCESS_ID. Leave",
        ),
        ({"env": ("A=1", "A=2")}, "env must have each variable once; got A twice. Leave one out."),
        (
            {"fake_devices_per_node": 5},
            "must stay inside a node; got tensor=4, 5 fake devices a node. Choose tensor from 1, 5.",
        ),
        (
            {
                "fake_devices_per_node": 4,
                "data": 1,
                "stage": 3,
                "tensor": 2,
                "replica_topology": "",
            },
            "6 fake devices on nodes of 4. Choose a mesh of 8, or give the actual --fake-devices-per-node.",
        ),
    ],
)
def test_a_job_that_no_cluster_could_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Job(**{**BLOOM.__dict__, **changes})


LONGEST = {  # that Kubernetes takes; a pod of a JobSet is called NAME-nodes-0-NUMBER-xxxxx, which must fit a host name's label
    "name": "a" * 43,
    "namespace": "a" * 63,
    "queue": "a" * 63,
    "checkpoint_claim": "a" * 253,
    "topology": f"example.com/{'a' * 63}",
    "rdma": f"example.com/{'a' * 63}=8",
    "toleration": (f"example.com/{'a' * 63}={'b' * 63}:NoSchedule",),
    "env": (f"XLA_FLAGS={'a' * 4000}",),
}
LONGER = LONGEST | {
    "topology": f"example.com/{'a' * 64}",
    "rdma": f"example.com/{'a' * 64}=8",
    "toleration": (f"example.com/a={'b' * 64}:NoSchedule",),
    "env": (f"XLA_FLAGS={'a' * 32768}",),
}


@pytest.mark.parametrize("name", LONGEST)
def test_a_name_is_as_long_as_kubernetes_takes_it(name):
    dataclasses.replace(BLOOM, **{name: LONGEST[name]})
    longer = LONGER[name] if LONGER[name] != LONGEST[name] else LONGER[name] + "a"
    with pytest.raises(
        ValueError, match=rf"{name} must be .*at most|a job's name must be .* at most 43 long"
    ):
        dataclasses.replace(BLOOM, **{name: longer})


def test_a_recipe_s_own_mesh_of_the_job_stays_and_is_completed():
    own = ("recipes/gpt.py", "--mesh.data", "-1", "--mesh.tensor=4")
    job = dataclasses.replace(BLOOM, command=own)
    assert job.arguments() == ["python", "-u", *own, "--mesh.stage", "12"]
    program = dataclasses.replace(BLOOM, command=("mine", "--mesh.data", "16"))
    assert program.arguments() == ["mine", "--mesh.data", "16"], (
        "a program of one's own may mean something else"
    )


def test_a_plan_and_another_mesh_for_the_recipe_are_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([PLAN]))
    with pytest.raises(ValueError, match=r"got --mesh.data 8, and --mesh.data 4 for the recipe"):
        main(["--plan", str(path), "--image", "a", "recipes/gpt.py", "--mesh.data", "4"])


@pytest.mark.parametrize("mesh", [("--mesh.data", "1", "--mesh.tensor=1"), ("--mesh.data", "8")])
def test_a_plan_and_a_mesh_are_refused_whatever_the_mesh_is(mesh, tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([PLAN]))
    with pytest.raises(ValueError, match=r"a plan has its own mesh; .*, and --mesh\.data.* too\."):
        main(["--plan", str(path), "--image", "a", *mesh, "recipes/gpt.py"])


@pytest.mark.parametrize(
    ("dtype", "attention", "flags", "told"),
    [
        ("bfloat16", "flash", [], None),
        ("float32", "xla", [], None),
        ("float32", "flash", ["--dtype", "bfloat16"], None),
        ("bfloat16", "xla", [], "recipes in bfloat16 run flash attention .* --attention flash"),
        ("float32", "flash", [], "recipes in float32 run XLA's attention .* --attention xla"),
        ("bfloat16", "flash", ["--dtype", "float32"], "in float32 run XLA's attention"),
    ],
)
def test_a_plan_has_the_attention_that_the_recipe_runs_in_its_dtype(
    dtype, attention, flags, told, tmp_path, capsys
):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([PLAN | {"dtype": dtype, "attention": attention}]))
    command = ["--plan", str(path), "--image", "a", "recipes/gpt.py", *flags]
    if told is None:
        main(command)
        assert f'- "{flags[1] if flags else dtype}"\n' in capsys.readouterr().out
    else:
        with pytest.raises(ValueError, match=told):
            main(command)


def test_a_flag_without_effect_is_told_though_it_has_its_default(capsys):
    main(["--kind", "trainjob", *FLAGS, "--max-restarts", "10", "recipes/gpt.py"])
    assert "not used by --kind trainjob: --max-restarts" in capsys.readouterr().err


OTHERS = {
    "name": "other",
    "gpus_per_node": 16,
    "fake_devices_per_node": 8,
    "cpus": 7,
    "memory_gib": 77,
    "image": "other:1",
    "namespace": "other",
    "queue": "other",
    "topology": "example.com/other",
    "replica_topology": "example.com/nearer",
    "toleration": ("example.com/other:NoSchedule",),
    "rdma": "rdma/other=1",
    "env": ("OTHER=1",),
    "checkpoint_claim": "other",
    "cache_claim": "another",
    "metrics_port": 9091,
    "shm_gib": 7,
    "run_as_user": 7,
    "save_seconds": 7.0,
    "max_restarts": 7,
    "start_seconds": 7,
    "hours": 7.0,
    "partition": "other",
    "account": "other",
}


@pytest.mark.parametrize("kind", ["jobset", "trainjob", "sbatch"])
def test_the_settings_without_effect_on_a_job_are_those_that_are_named(kind):
    write = {"jobset": to_jobset, "trainjob": to_trainjob, "sbatch": to_sbatch}[kind]
    base = Job(
        command=("recipes/gpt.py",), image="a:1", data=16, metrics_port=9090, tensor=8, token="a"
    )
    assert set(OTHERS) == {field.name for field in dataclasses.fields(JobSettings)}
    same = {
        name
        for name, value in OTHERS.items()
        if write(dataclasses.replace(base, **{name: value})) == write(base)
    }
    assert same == set(UNUSED[kind]) - {"service"}


def test_the_settings_without_effect_on_a_service_are_those_that_are_named():
    own = {field.name for field in dataclasses.fields(Serving)}
    assert set(UNUSED["service"]) == {name for name in OTHERS if name not in own} | {
        "cpus",
        "memory_gib",
        "mesh",
        "plan",
    }, "a service has --service.cpus and --service.memory-gib"


@pytest.mark.parametrize(
    ("kind", "flags", "line"),
    [
        (
            "sbatch",
            ["--queue", "a", "--topology", "b"],
            "not used by --kind sbatch: --queue, --topology",
        ),
        (
            "trainjob",
            ["--max-restarts", "3", "--image", "a"],
            "not used by --kind trainjob: --max-restarts",
        ),
        (
            "jobset",
            ["--hours", "3", "--service.port", "1", "--image", "a"],
            "not used by --kind jobset: --hours, --service.*",
        ),
        ("jobset", ["--image", "a", "--queue", "a"], ""),
        *(
            (
                kind,
                [
                    *("--gpus-per-node", "4", "--fake-devices-per-node", "8"),
                    *(["--image", "a"] if kind != "sbatch" else []),
                ],
                "not used with --fake-devices-per-node: --gpus-per-node",
            )
            for kind in ("jobset", "trainjob", "sbatch")
        ),
    ],
)
def test_flags_without_effect_are_named(capsys, kind, flags, line):
    main(["--kind", kind, "--mesh.data", "8", *flags, *(SAVED if kind != "sbatch" else SAVED[2:])])
    printed = capsys.readouterr()
    assert printed.err.strip() == line
    assert printed.out, "the job is written"


SERVE = ("jaxpar", "serve", "/checkpoints/gpt")
SAVED = (
    "--checkpoint-claim",
    "runs",
    "recipes/gpt.py",
    "--out-dir",
    "/checkpoints/gpt",
    "--checkpoint-every",
    "9",
)
KEPT = ("--out-dir", "/checkpoints/gpt", "--checkpoint-every", "9")


def test_flags_that_do_not_do_what_was_meant_in_a_job_of_slurm_are_told(capsys):
    main(
        [
            "--kind",
            "sbatch",
            "--mesh.data",
            "8",
            "recipes/gpt.py",
            "--overwrite",
            "--dry-run",
            "--checkpoint-every",
            "9",
        ]
    )
    ends, keeps = capsys.readouterr().err.splitlines()
    assert ends.startswith("the command has --dry-run: the job trains nothing")
    assert keeps.startswith(
        "the command has --overwrite: JAXPAR_RESUME=if-any, which a job sets, goes on from the checkpoint"
    )


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (KEPT, []),
        (("--out-dir=/checkpoints", "--checkpoint-minutes=5"), []),
        (
            KEPT[2:],
            [
                "the command has no --out-dir and the claim is mounted at /checkpoints: results and checkpoints are lost"
            ],
        ),
        (
            ("--out-dir", "runs/gpt", *KEPT[2:]),
            ["the command has --out-dir runs/gpt and the claim"],
        ),
        (
            (*KEPT, "--dry-run"),
            [
                "the command has --dry-run: the job trains nothing, and ends as if it had. Leave --dry-run"
            ],
        ),
        ((*KEPT, "--save-hf", "/checkpoints/tuned"), []),
        (
            (*KEPT, "--save-hf", "tuned"),
            [
                "the command has --save-hf tuned, which no claim holds: the model is lost with the po"
            ],
        ),
        (
            (*KEPT[:3], "0"),
            ["the command has --checkpoint-every 0: a recipe then saves only when asked to stop"],
        ),
        (
            KEPT[:2],
            [
                "the command has no --checkpoint-every: a recipe then saves only when asked to stop, and after a failure it be"
            ],
        ),
    ],
)
def test_work_that_would_be_lost_despite_a_claim_is_told(capsys, flags, lines):
    main(
        [
            *FLAGS,
            "--queue",
            "q",
            "--rdma",
            "rdma/ib=8",
            "--checkpoint-claim",
            "runs",
            "recipes/gpt.py",
            *flags,
        ]
    )
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(lines)
    assert all(line.startswith(begins) for line, begins in zip(told, lines, strict=True)), told
    main([*FLAGS, "--queue", "q", "--rdma", "rdma/ib=8", "--checkpoint-claim", "runs", "mine"])
    said = "mine is no recipe of jaxpar: its flags are not checked, and it does not get --mesh.data 2 --mesh.tensor 8\n"
    assert capsys.readouterr().err == said


@pytest.mark.parametrize(
    ("flags", "line"),
    [
        (
            ["recipes/gpt.py"],
            "the command has no --out-dir and there is no --checkpoint-claim: results and checkpoints are lost",
        ),
        (
            ["recipes/gpt.py", *KEPT],
            "the command has --out-dir /checkpoints/gpt and there is no --checkpoint-claim: results",
        ),
        (
            ["python", "-m", "jaxpar", "train", "gpt"],
            "the command has no --out-dir and there is no --checkpoint-claim",
        ),
        (
            ["mine", "/checkpoints/mine"],
            "the command names /checkpoints/mine and there is no --checkpoint-claim: what",
        ),
        (
            ["--kind", "service", *SERVE],
            "the folder to serve is /checkpoints/gpt and there is no --checkpoint-claim: it must",
        ),
        (
            ["--kind", "service", "--checkpoint-claim", "runs", "jaxpar", "serve", "runs/gpt"],
            "the folder to serve is runs/gpt and the claim is mounted at /checkpoints: it must be in the image",
        ),
        (
            ["--fake-devices-per-node", "8", "--rdma", "rdma/ib=8", *SAVED],
            "fake devices communicate by TCP, and rdma/ib is",
        ),
        (
            ["--topology", "example.com/rack", *SAVED],
            "--topology or --replica-topology, and no --queue: Kueue places the",
        ),
    ],
)
def test_what_no_claim_holds_and_no_queue_places_is_told_when_written_and_when_checked(
    flags, line, capsys, tmp_path
):
    given = ["--image", "a:1"] if "service" in flags else ["--image", "a:1", "--mesh.data", "8"]
    main([*given, *flags])
    printed = capsys.readouterr()
    unchecked = "mine is no recipe of jaxpar: its flags are not checked"
    told = printed.err.replace(f"{unchecked}, and it does not get --mesh.data 8\n", "")
    assert told.startswith(line)
    assert told.count("\n") == 1
    (tmp_path / "job.yaml").write_text(printed.out)
    main(["--check", str(tmp_path / "job.yaml")])
    checked = capsys.readouterr()
    assert checked.err.replace(f"{unchecked}\n", "") == told
    assert checked.out.endswith(": no error found; read what follows\n")


def test_a_pod_tolerates_the_taints_that_are_named(capsys):
    expected = [
        {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"},
        {"key": "team", "operator": "Equal", "value": "research", "effect": "NoExecute"},
        {"key": "example.com/spot", "operator": "Exists"},
    ]
    (patch,) = to_trainjob(BLOOM)["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    flags = [word for taint in BLOOM.toleration for word in ("--toleration", taint)]
    deployment, _ = service(capsys, *flags, "--env", "XLA_FLAGS=--a=1 --b")
    specs = [pod(to_jobset(BLOOM))["spec"], replicated["template"]["spec"]["template"]["spec"]]
    for spec in (*specs, deployment["spec"]["template"]["spec"]):
        assert spec["tolerations"] == expected
    assert (
        specs[1]["containers"][0]["securityContext"] == specs[0]["containers"][0]["securityContext"]
    )
    (container,) = deployment["spec"]["template"]["spec"]["containers"]
    assert container["env"] == [{"name": "XLA_FLAGS", "value": "--a=1 --b"}]


def test_memory_of_a_pod_holds_its_shared_memory():
    small = dataclasses.replace(BLOOM, memory_gib=64)
    with pytest.raises(
        ValueError,
        match=r"must be more than the shared memory, .* got memory_gib=64, shm_gib=64. Choose a larger",
    ):
        to_jobset(small)
    assert "#SBATCH --mem=64G\n" in to_sbatch(small), "SLURM mounts none"


def test_a_batch_script_has_the_resources_and_variables_of_the_job():
    job = dataclasses.replace(BLOOM, env=("A=x y", "B=$HOME"), fake_devices_per_node=8)
    text = to_sbatch(job)
    assert "#SBATCH --cpus-per-task=96\n#SBATCH --mem=800G\n" in text
    assert "--gpus-per-node" not in text
    assert " --cpus-per-task=96 python" in text, "srun does not take it from sbatch"
    assert "export A='x y'\nexport B='$HOME'\n" in text
    assert "export JAX_PLATFORMS=cpu\nexport JAX_NUM_CPU_DEVICES=8\n" in text


def test_a_rehearsal_needs_no_gpus_and_has_the_devices_of_a_launched_process():
    from jaxpar.runtime.launch import Launch

    job = Job(
        command=("recipes/gpt.py",), image="a:1", data=2, stage=2, tensor=2, fake_devices_per_node=4
    )
    assert job.num_nodes == 2
    for manifest in (to_jobset(job), to_trainjob(job)):
        assert "nvidia.com/gpu" not in json.dumps(manifest)
    (container,) = pod(to_jobset(job))["spec"]["containers"]
    told = {variable["name"]: variable.get("value") for variable in container["env"]}
    launched = Launch(command=("true",), num_processes=2, devices_per_process=4).environment(0, 1)
    same = ("JAX_PLATFORMS", "JAX_NUM_CPU_DEVICES", "PJRT_NPROC", "JAX_NUM_PROCESSES")
    assert {name: told[name] for name in same} == {name: launched[name] for name in same}


def test_nodes_without_rdma_are_told(capsys):
    line = "2 nodes and no --rdma: NCCL uses TCP between pods. If the nodes have InfiniBand or RoCE, give the resource"
    main([*FLAGS, *SAVED])
    assert capsys.readouterr().err.startswith(line)
    for flags in (
        (*FLAGS, "--queue", "q", "--rdma", "rdma/ib=8"),
        (*FLAGS, "--gpus-per-node", "16"),
        (*FLAGS, "--fake-devices-per-node", "8"),
    ):
        main([*flags, *SAVED])
        assert capsys.readouterr().err == ""


RESTRICTED = {  # what a namespace with pod-security.kubernetes.io/enforce: restricted asks of a pod and of each container
    "pod": {"runAsNonRoot": True, "seccompProfile": {"type": "RuntimeDefault"}},
    "container": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
}


def pods(job, serving):
    """The pods of each kind that has them."""
    (patch,) = to_trainjob(job)["spec"]["runtimePatches"]
    (replicated,) = patch["trainingRuntimeSpec"]["template"]["spec"]["replicatedJobs"]
    of_trainjob = replicated["template"]["spec"]["template"]["spec"]
    return [
        pod(to_jobset(job))["spec"],
        of_trainjob,
        to_service(serving)[0]["spec"]["template"]["spec"],
    ]


def test_pods_run_in_a_namespace_that_is_restricted():
    job = dataclasses.replace(BLOOM, rdma="", cache_claim="programs", metrics_port=9090)
    serving = Serving(command=SERVE, name="gpt", image="a:1", checkpoint_claim="runs")
    for spec in pods(job, serving):
        of_pod, (container,) = spec["securityContext"], spec["containers"]
        assert {name: of_pod[name] for name in RESTRICTED["pod"]} == RESTRICTED["pod"]
        assert container["securityContext"] == RESTRICTED["container"]
        assert of_pod["runAsUser"] == of_pod["fsGroup"] == 1000, (
            "volumes are made writable for the user"
        )
        assert of_pod["fsGroupChangePolicy"] == "OnRootMismatch", (
            "without touching each checkpoint at each start"
        )
        assert not re.search(r'"host(Network|PID|IPC|Path|Port)"|"privileged"', json.dumps(spec))
        kinds = {kind for volume in spec["volumes"] for kind in volume if kind != "name"}
        assert kinds <= {"emptyDir", "persistentVolumeClaim"}
    check_manifest(to_trainjob(job), schema(TRAINJOB))
    check_manifest(to_jobset(job), schema(JOBSET))


def test_rdma_needs_root_unless_the_nodes_lock_memory_for_all(capsys):
    serving = Serving(command=SERVE, name="gpt", image="a:1", run_as_user=0)
    for spec, rights in zip(pods(BLOOM, serving), ("add", "add", "drop"), strict=True):
        assert spec["securityContext"] == {
            "runAsUser": 0,
            "seccompProfile": {"type": "RuntimeDefault"},
        }
        assert list(spec["containers"][0]["securityContext"]["capabilities"]) == [rights]
    other, *_ = pods(dataclasses.replace(BLOOM, run_as_user=2000), serving)
    assert other["securityContext"]["runAsUser"] == 2000
    assert other["containers"][0]["securityContext"] == RESTRICTED["container"]
    main([*FLAGS, "--rdma", "rdma/ib=8", "--run-as-user", "2000", *SAVED])
    assert capsys.readouterr().err.startswith(
        "rdma/ib and --run-as-user 2000: only root gets IPC_LOCK"
    )


def test_a_pod_needs_an_image():
    with pytest.raises(ValueError, match="a pod needs a container image; got none"):
        to_jobset(Job(name="a", command=("recipes/gpt.py",), data=8))


def test_a_plan_for_another_executor_than_the_recipes_is_refused(tmp_path):
    path, job = (
        tmp_path / "plan.json",
        ["--plan", str(tmp_path / "plan.json"), "--image", "a", "recipes/gpt.py"],
    )
    plan = PLAN | {"data": 4, "stage": 2, "tensor": 1, "executor": "mpmd"}
    path.write_text(json.dumps([plan]))
    with pytest.raises(
        ValueError, match=r"got a plan for executor=mpmd, .* Plan again with --executor spmd\."
    ):
        main(job)
    for other in ({"executor": "spmd"}, {"stage": 1, "data": 8}):
        path.write_text(json.dumps([plan | other]))
        main(job)


@pytest.mark.parametrize("steps", [None, 1, 2, 3, 10, 600, 20_000])
def test_the_checkpoints_that_a_remark_names_leave_no_remark(steps):
    command = ["recipes/gpt.py", *(() if steps is None else ("--steps", str(steps)))]
    every = [[], ["--checkpoint-every", "0"]]
    if (steps or 0) > 1:
        every += [["--checkpoint-every", str(steps)], ["--checkpoint-every", str(5 * steps)]]
    for given in every:
        (said,) = unsaved([*command, *given])
        (remedy,) = re.findall(r"Give it such as (--checkpoint-every (\d+))", said)
        assert not [*unsaved([*command, *remedy[0].split()])], said
        assert int(remedy[1]) <= 500


def test_a_plan_of_what_the_recipe_would_not_run_is_refused(tmp_path, capsys):
    path, job = (
        tmp_path / "plan.json",
        ["--plan", str(tmp_path / "plan.json"), "--image", "a", "recipes/gpt.py"],
    )
    plan = PLAN | {"data": 8, "stage": 1, "tensor": 1, "dtype": "bfloat16", "attention": "flash"}
    path.write_text(json.dumps([plan | {"attention": "xla"}]))
    with pytest.raises(
        ValueError,
        match=r"recipes in bfloat16 run flash attention .* attention=xla\. Plan again with --attention flash",
    ):
        main(job)
    path.write_text(json.dumps([plan | {"init_from": "./llama", "seq": 512}]))
    with pytest.raises(
        ValueError,
        match=r"needs a command with --init-from, .* got a plan for \./llama and none\. Add it",
    ):
        main(job)
    main([*job, "--init-from", "/models/llama"])
    said = capsys.readouterr().out
    assert "--model" not in said
    assert "bfloat16" in said


def test_a_plan_that_is_none_is_refused(tmp_path):
    plan = tmp_path / "plan.json"
    for text, message in (
        ("x", "--plan must name a file of JSON; got other text"),
        ("3", "a plan must be an object; got 3. Write it by `python -m jaxpar plan --json`."),
        ('[{"data": 8}]', "a plan must have the field 'stage'; got 'data'"),
    ):
        plan.write_text(text)
        with pytest.raises(ValueError, match=message):
            main(["--plan", str(plan), "--image", "a", "recipes/gpt.py"])


def service(capsys, *flags, command=SERVE):
    code = jaxpar_main(
        ["manifest", "--kind", "service", "--image", "registry.example/jaxpar:1", *flags, *command]
    )
    printed = capsys.readouterr()
    assert code == 0, printed.err
    return list(yaml.safe_load_all(printed.out))


def test_a_service_leads_to_the_port_at_which_its_pods_answer(capsys):
    flags = ["--name", "gpt", "--checkpoint-claim", "runs", "--namespace", "lab"]
    deployment, found = service(
        capsys, *flags, "--service.port", "9000", "--service.replicas", "2", "--service.gpus", "1"
    )
    assert [deployment["kind"], found["kind"]] == ["Deployment", "Service"]
    template = deployment["spec"]["template"]
    (container,) = template["spec"]["containers"]
    labels = template["metadata"]["labels"]
    assert deployment["spec"]["selector"]["matchLabels"] == found["spec"]["selector"] == labels
    assert deployment["spec"]["replicas"] == 2
    (port,) = container["ports"]
    assert found["spec"]["ports"] == [
        {"name": port["name"], "port": 80, "targetPort": port["name"]}
    ]
    probes = {
        name: container[name]["httpGet"]
        for name in ("startupProbe", "livenessProbe", "readinessProbe")
    }
    assert {name: probe["path"] for name, probe in probes.items()} == {
        "startupProbe": "/healthz",
        "livenessProbe": "/healthz",
        "readinessProbe": "/readyz",
    }
    assert {probe["port"] for probe in probes.values()} == {port["name"]}
    assert template["metadata"]["annotations"] == {
        "prometheus.io/scrape": "true",
        "prometheus.io/port": "9000",
        "prometheus.io/path": "/metrics",
    }
    assert container["resources"]["limits"]["nvidia.com/gpu"] == 1
    (mount,), (volume,) = container["volumeMounts"], template["spec"]["volumes"]
    assert (mount["name"], mount["mountPath"], mount["readOnly"]) == (
        volume["name"],
        "/checkpoints",
        True,
    )
    assert {each["metadata"]["namespace"] for each in (deployment, found)} == {"lab"}


def test_a_pod_that_serves_has_the_flags_of_its_command_and_the_time_to_answer(capsys):
    deployment, _ = service(
        capsys, "--service.timeout-seconds", "90", command=(*SERVE, "--max-tokens", "64")
    )
    spec = deployment["spec"]["template"]["spec"]
    words = spec["containers"][0]["command"]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags == {
        "--max-tokens": "64",
        "--address": "0.0.0.0",
        "--port": "8000",
        "--timeout-seconds": "90",
    }
    with pytest.raises(SystemExit):
        jaxpar_main(["serve", "--help"])
    told = capsys.readouterr().out
    assert all(f"{name} " in told for name in flags), "jaxpar serve has them"
    assert spec["terminationGracePeriodSeconds"] > 90


@pytest.mark.parametrize(
    ("flags", "command", "message"),
    [
        ([], (), "a Service runs jaxpar serve; got no command"),
        (
            [],
            ("recipes/gpt.py",),
            "a Service runs jaxpar serve; got recipes/gpt.py. Give it and a folder after the options",
        ),
        ([], ("jaxpar", "serve"), "a Service runs jaxpar serve; got jaxpar serve"),
        ([], (*SERVE, "--port=1"), "got --port in the command. Leave them out; --service.port"),
        (
            ["--service.replicas", "0"],
            SERVE,
            "--service.replicas must be at least 1; got 0. Leave it out for the default.",
        ),
        (["--service.port", "70000"], SERVE, "--service.port must be under 65536; got 70000"),
        (
            ["--service.port", "80"],
            SERVE,
            "--service.port must be at least 1024; got 80. Leave it out for the default.",
        ),
        (["--name", "GPT"], SERVE, "a Service's name must be lower-case letters"),
        (
            ["--image", ""],
            SERVE,
            "--image must not be empty; got ''. Give a value, or leave it out",
        ),
        (["--checkpoint-claim", "a b"], SERVE, "--checkpoint-claim must be lower-case letters"),
    ],
)
def test_a_service_that_could_not_work_is_refused(capsys, flags, command, message):
    args = [
        "manifest",
        "--kind",
        "service",
        "--image",
        "registry.example/jaxpar:1",
        *flags,
        *command,
    ]
    assert jaxpar_main(args) == ExitCode.BAD_CONFIG
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("page", ["kubernetes.md", "zh/kubernetes.md"])
def test_the_queue_and_the_volume_of_the_page_are_those_of_its_job(page, capsys):
    """Not against Kueue's schemas, which are not here: their names, their resources and their quotas against the job's."""
    text = (ROOT / "docs" / page).read_text()
    (block,) = re.findall(r"```yaml\n(# queue.yaml.*?)```", text, re.DOTALL)
    parts = {each["kind"]: each for each in yaml.safe_load_all(block)}
    assert set(parts) == {"ResourceFlavor", "ClusterQueue", "LocalQueue", "PersistentVolumeClaim"}
    (group,) = parts["ClusterQueue"]["spec"]["resourceGroups"]
    (flavor,) = group["flavors"]
    assert flavor["name"] == parts["ResourceFlavor"]["metadata"]["name"]
    assert parts["LocalQueue"]["spec"]["clusterQueue"] == parts["ClusterQueue"]["metadata"]["name"]
    quotas = {each["name"]: each["nominalQuota"] for each in flavor["resources"]}
    assert list(quotas) == group["coveredResources"]
    (command,) = (
        c
        for c in doc_pages.commands(ROOT / "docs" / page)
        if c.words[-1] == "job.yaml" and ">" in c.words
    )
    printed = written(capsys, *command.without_redirection()[0][4:])
    (listing,) = re.findall(r"```text\n( +kueue.*?)```", text, re.DOTALL)
    assert [part for part in listing.split("...\n") if part not in printed] == [], (
        "lines of the page that are not printed"
    )
    manifest = yaml.safe_load(printed)
    assert (
        manifest["metadata"]["labels"]["kueue.x-k8s.io/queue-name"]
        == parts["LocalQueue"]["metadata"]["name"]
    )
    claims = {
        v["persistentVolumeClaim"]["claimName"]
        for v in pod(manifest)["spec"]["volumes"]
        if "persistentVolumeClaim" in v
    }
    assert claims == {parts["PersistentVolumeClaim"]["metadata"]["name"]}
    (container,) = pod(manifest)["spec"]["containers"]
    (loader,) = re.findall(r"```yaml\n(# loader.yaml.*?)```", text, re.DOTALL)
    mounted = yaml.safe_load(loader)["spec"]
    assert {volume["persistentVolumeClaim"]["claimName"] for volume in mounted["volumes"]} == claims
    assert mounted["containers"][0]["volumeMounts"][0]["mountPath"] == "/checkpoints"
    number = lambda value: int(str(value).removesuffix("Gi"))
    for name, asked in container["resources"]["requests"].items():
        assert number(quotas[name]) >= 2 * number(asked), f"Kueue would never admit the job: {name}"
    check_manifest(manifest, schema(JOBSET))


def test_a_job_and_the_service_of_its_model_may_have_one_name(capsys):
    """JobSet takes a Service of its subdomain's name as the headless one of its pods, whoever made it."""
    flags = ["--name", "gpt", "--image", "registry.example/jaxpar:1"]
    job = yaml.safe_load(written(capsys, *flags, "--mesh.data", "16", "recipes/gpt.py"))
    _, serving = service(capsys, *flags)
    assert job["metadata"]["name"] == serving["metadata"]["name"] == "gpt"
    assert job["spec"]["network"]["subdomain"] != serving["metadata"]["name"]


@pytest.mark.parametrize(
    "page", ["kubernetes.md", "watching.md", "zh/kubernetes.md", "zh/watching.md"]
)
def test_the_log_that_a_page_shows_is_that_of_process_0(page):
    """Of a Job's pods `kubectl logs job/...` takes the one that was ready first."""
    wanted = re.compile(
        r"-f --tail=-1 -l jobset\.sigs\.k8s\.io/jobset-name=\w+,batch\.kubernetes\.io/job-completion-index=0"
    )
    shown = re.findall(r"^kubectl logs (.*)", (ROOT / "docs" / page).read_text(), re.MULTILINE)
    assert all(wanted.fullmatch(each) for each in shown), shown
    assert len(shown) == (2 if "kubernetes" in page else 0)
