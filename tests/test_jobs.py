"""Jobs for clusters: they fit the schemas of their APIs (tests/data/schemas) and our rules, and mistakes in them are caught."""

import copy
import dataclasses
import inspect
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import yaml
from waiting import WAIT_SECONDS

from jaxpar.__main__ import main as jaxpar_main
from jaxpar.commands.manifest import main, plan_flags
from jaxpar.commands.serve import serve
from jaxpar.jobs import Job, Serving, check_manifest, to_jobset, to_sbatch, to_trainjob
from jaxpar.jobs.job import JobSettings
from jaxpar.jobs.remarks import UNUSED
from jaxpar.runtime.exit_codes import ExitCode
from jaxpar.serve.open_run import ModelSettings
from jaxpar.serve.settings import Settings

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "recipes"))

import cli  # noqa: E402
import compiling  # noqa: E402
import gpt  # noqa: E402

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
)


def schema(name):
    return json.loads((SCHEMAS / name).read_text())


def test_bloom_s_48_nodes_fit_the_schema_of_a_jobset():
    check_manifest(to_jobset(BLOOM), schema(JOBSET))


def test_bloom_s_48_nodes_fit_the_schema_of_a_trainjob():
    check_manifest(to_trainjob(BLOOM), schema(TRAINJOB))


def paths(tree, path=()):
    """Yields the path of every field that the API names; what is in labels, annotations and limits is free."""
    items = tree.items() if isinstance(tree, dict) else enumerate(tree) if isinstance(tree, list) else ()
    for key, value in items:
        if isinstance(tree, dict) and (
            not path or path[-1] not in ("metadata", "annotations", "labels", "limits", "requests")
        ):
            yield (*path, key)
        yield from paths(value, (*path, key))


@pytest.mark.parametrize(("write", "name"), [(to_jobset, JOBSET), (to_trainjob, TRAINJOB)], ids=["jobset", "trainjob"])
def test_a_typo_in_any_field_is_caught(write, name):
    api = schema(name)
    manifest = write(BLOOM)
    fields = [path for path in paths(manifest) if path not in (("apiVersion",), ("kind",), ("metadata",))]
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
        ValueError, match=r"spec.replicatedJobs.0.template.spec.parallelism: 'many' is not of type 'integer'"
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
    assert container["resources"]["limits"] == {"nvidia.com/gpu": 8}
    assert told["JAX_COORDINATOR_ADDRESS"] == "bloom-nodes-0-0.bloom:6379"
    assert told["JAX_NUM_PROCESSES"] == "48"
    assert told["JAX_COORDINATOR_BIND_ADDRESS"] == "$(POD_IP):6379", "its own address, not all of them"
    assert container["command"][-6:] == ["--mesh.data", "8", "--mesh.stage", "12", "--mesh.tensor", "4"]


def test_what_it_says_of_its_place_is_what_initialize_reads():
    from jaxpar.runtime.process_env import read_process_env

    told = {v["name"]: v.get("value", "7") for v in pod(to_jobset(BLOOM))["spec"]["containers"][0]["env"]}
    told["JAX_COORDINATOR_BIND_ADDRESS"] = told["JAX_COORDINATOR_BIND_ADDRESS"].replace("$(POD_IP)", "10.0.0.7")
    place = read_process_env(told)
    assert (place.num_processes, place.process_id, place.bind) == (48, 7, "10.0.0.7:6379")


def test_nodes_of_a_replica_are_kept_close_and_all_start_together():
    manifest = to_jobset(BLOOM)
    assert pod(manifest)["metadata"]["annotations"] == {
        "kueue.x-k8s.io/podset-preferred-topology": "topology.example/block",
        "kueue.x-k8s.io/podset-slice-required-topology": "topology.example/rack",
        "kueue.x-k8s.io/podset-slice-size": "6",
    }, "12 stages of 4 shards are 6 nodes of 8"
    assert manifest["metadata"]["labels"] == {"kueue.x-k8s.io/queue-name": "research"}


def test_a_pod_has_time_to_save_and_room_for_nccl():
    spec = pod(to_jobset(BLOOM))["spec"]
    assert spec["terminationGracePeriodSeconds"] == 230, "twice a save, and 30 s"
    assert {mount["mountPath"] for mount in spec["containers"][0]["volumeMounts"]} == {"/dev/shm", "/checkpoints"}
    assert spec["volumes"][0] == {"name": "shm", "emptyDir": {"medium": "Memory", "sizeLimit": "64Gi"}}


def test_a_pod_ends_on_sigterm_before_it_handles_signals(capsys):
    serving, _ = service(capsys)
    for spec in (pod(to_jobset(BLOOM))["spec"], serving["spec"]["template"]["spec"]):
        assert spec["shareProcessNamespace"] is True, "the kernel ignores SIGTERM for a process 1 without a handler"
    pods = schema(TRAINJOB)["properties"]["spec"]["properties"]["runtimePatches"]["items"]["properties"]
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
            message = (
                f"Container train for pod a/b failed with exit code {code} matching FailJob rule at index {number}"
            )
            break
    for rule in manifest["spec"]["failurePolicy"]["rules"]:
        patterns = rule.get("onJobFailureMessagePatterns", [".*"])
        if reason in rule["onJobFailureReasons"] and any(re.search(pattern, message) for pattern in patterns):
            return rule["action"]
    return "RestartJobSet"


@pytest.mark.parametrize("code", [code for code in ExitCode if code != ExitCode.DONE], ids=lambda code: code.name)
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
        Job(name="gpt", command=("train.py", "--text", "a b"), data=2, tensor=8, hours=30.5, partition="gpu")
    )
    for line in ("--nodes=2", "--ntasks-per-node=1", "--gpus-per-node=8", "--time=1-06:30:00", "--signal=TERM@150"):
        assert f"#SBATCH {line}\n" in text
    assert "--kill-on-bad-exit=1 python -u train.py --text 'a b' --mesh.data 2" in text
    script = tmp_path / "job.sh"
    script.write_text(text)
    (tmp_path / "bin").mkdir()
    for name, body in (("srun", "exit $CODE"), ("scontrol", 'echo "$@" >> $LOG')):
        program = tmp_path / "bin" / name
        program.write_text(f"#!/bin/sh\n{body}\n")
        program.chmod(0o755)
    for code, restarts, requeued in (
        (0, 0, False),
        (2, 0, False),
        (86, 0, False),
        (75, 99, True),
        (70, 0, True),
        (70, 10, False),
    ):
        log = tmp_path / f"log-{code}-{restarts}"
        env = {
            "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}",
            "CODE": str(code),
            "LOG": str(log),
            "SLURM_JOB_ID": "7",
        }
        done = subprocess.run(
            ["bash", script], env=env | {"SLURM_RESTART_COUNT": str(restarts)}, check=False, timeout=WAIT_SECONDS
        )
        assert done.returncode == code
        assert log.exists() == requeued, f"exit code {code} after {restarts} restarts"


def written(capsys, *args):
    main(args)
    return capsys.readouterr().out


FLAGS = ("--image", "a:1", "--mesh.data", "2", "--mesh.tensor", "8")


def test_the_command_writes_yaml_that_reads_back(capsys):
    manifest = yaml.safe_load(written(capsys, *FLAGS, "recipes/gpt.py", "--steps", "9"))
    told = {variable["name"]: variable.get("value") for variable in pod(manifest)["spec"]["containers"][0]["env"]}
    command = ("recipes/gpt.py", "--steps", "9")
    job = Job(name="jaxpar", image="a:1", data=2, tensor=8, command=command, token=told["JAXPAR_RUN_TOKEN"])
    assert manifest == to_jobset(job)


def test_the_best_plan_becomes_the_job_and_the_recipe_s_flags(capsys, tmp_path):
    plan = tmp_path / "plan.json"
    best = {"data": 4, "stage": 2, "tensor": 2, "schedule": "zb-h1", "num_microbatches": 8, "zero": 1, "remat": False}
    best |= {"num_chunks": 2, "layers_per_virtual_stage": [1, 2, 2, 1]}
    plan.write_text(json.dumps([best, {"data": 16, "stage": 1, "tensor": 1}]))
    flags = ("--plan", str(plan), "--image", "a:1", "recipes/gpt.py", "--zero", "0")
    (container,) = pod(yaml.safe_load(written(capsys, *flags)))["spec"]["containers"]
    said = " ".join(container["command"])
    assert "--mesh.data 4 --mesh.stage 2 --mesh.tensor 2 --schedule zb-h1 --num-microbatches 8" in said
    assert "--num-chunks 2 --layers-per-virtual-stage 1 2 2 1" in said
    assert "--zero 0" in said, "what the command says itself stays"
    assert "--zero 1" not in said


@pytest.mark.parametrize(("remat", "flag"), [(True, "full"), ("dots", "dots")])
def test_what_a_plan_recomputes_is_a_flag(remat, flag):
    plan = {"data": 1, "stage": 1, "tensor": 1, "remat": remat}
    assert plan_flags(plan, ())[-2:] == ["--remat", flag]
    with pytest.raises(ValueError, match=r'remat of a plan must be true, false or "dots"; got'):
        plan_flags(plan | {"remat": "some"}, ())


def test_the_rank_of_a_plan_with_lora_is_a_flag():
    plan = {"data": 1, "stage": 1, "tensor": 1, "lora_rank": 8}
    assert plan_flags(plan, ())[-2:] == ["--lora-rank", "8"]
    with pytest.raises(ValueError, match="lora_rank of a plan must be an integer of 1 or more; got 0"):
        plan_flags(plan | {"lora_rank": 0}, ())


def test_a_plan_of_interleaved_in_one_chunk_says_so():
    plan = {"data": 4, "stage": 2, "tensor": 2, "schedule": "interleaved", "num_chunks": 1}
    assert " ".join(plan_flags(plan, ())).endswith("--schedule interleaved --num-chunks 1")


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
    assert jaxpar_main(asked) == 0
    plan = tmp_path / "plan.json"
    plan.write_text(capsys.readouterr().out)
    (container,) = pod(yaml.safe_load(written(capsys, "--plan", str(plan), "--image", "a:1", "recipes/gpt.py")))[
        "spec"
    ]["containers"]
    python, unbuffered, recipe, *flags = container["command"]
    assert (python, unbuffered, recipe) == ("python", "-u", "recipes/gpt.py")
    said = " ".join(flags)
    assert "--model gpt2-bytes --batch-size 32 --seq 64 --dtype bfloat16" in said
    assert "--remat full" in said
    compiled = []
    monkeypatch.setattr(compiling, "compile_step", lambda *_: sys.exit(compiled.append("a step")))
    with pytest.raises(SystemExit):
        cli.run(gpt.main, gpt.Config, [*flags, "--dry-run"])
    assert compiled, "the recipe takes all flags"
    assert "gpt2-bytes: " in capsys.readouterr().out


@pytest.mark.parametrize("flag", ["--plan", "--check", "--schema"])
def test_a_file_that_is_not_there_is_named_with_its_flag(flag):
    message = f"{flag} must name a text file that can be read; got nowhere: No such file or directory. Name one that is there."
    with pytest.raises(ValueError, match=re.escape(message)):
        main([flag, "nowhere", "--image", "a", "recipes/gpt.py"])


def test_a_manifest_edited_by_hand_is_checked(capsys, tmp_path):
    path = tmp_path / "job.yaml"
    path.write_text(written(capsys, *FLAGS, "recipes/gpt.py"))
    assert "nothing wrong found" in written(capsys, "--check", str(path))
    for old, new, message in (
        ("completions: 2", "completions: 3", "parallelism must equal completions"),
        ("value: '2'", "value: '4'", "JAX_NUM_PROCESSES must be the number of pods; got 4"),
        ("replicas: 1", "replicas: 2", "replicas must be 1"),
        ("value: jaxpar-nodes-0-0.", "value: jaxpar-node-0-0.", "must be pod 0's host, jaxpar-nodes-0-0"),
        ("job-completion-index", "index", "JAX_PROCESS_ID must be the pod's number"),
        ("name: jaxpar", "name: Jax_par", "metadata.name must be a host name's label"),
        ("kind: JobSet", "kind: Pod", "must be a JobSet or a TrainJob; got kind Pod"),
    ):
        wrong = tmp_path / "wrong.yaml"
        text = path.read_text()
        assert old in text, old
        wrong.write_text(text.replace(old, new))
        with pytest.raises(ValueError, match=re.escape(message)):
            main(["--check", str(wrong)])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"name": "My_Job"}, "a job's name must be lower-case letters, digits and -"),
        ({"name": "a" * 60}, "at most 49 long; got 'aaa"),
        ({"tensor": 3}, "must stay inside a node; got tensor=3, 8 GPUs a node. Choose tensor from 1, 2, 4, 8."),
        ({"tensor": 16}, "must stay inside a node; got tensor=16"),
        (
            {"data": 1, "stage": 3, "tensor": 4},
            "got data=1, stage=3, tensor=4, 12 GPUs on nodes of 8. Choose a mesh of 16",
        ),
        (
            {"stage": 1, "tensor": 4},
            "replica_topology needs replicas of whole nodes; got data=8, stage=1, tensor=4: 4 GPUs",
        ),
        (
            {"command": ("recipes/gpt.py", "--mesh.data", "16")},
            "the recipe's mesh must be that of the job; got data=8, and --mesh.data 16 for the recipe. Give the mesh once",
        ),
        ({"command": ("jaxpar", "train", "gpt", "--mesh.stage=2")}, "got stage=12, and --mesh.stage 2 for the recipe."),
        (
            {"command": ("recipes/gpt.py", "--metrics-port", "9091"), "metrics_port": 9090},
            "got --metrics-port 9090, and 9091 for the recipe. Leave the second out.",
        ),
        ({"command": ()}, "a job needs a command; got none"),
        ({"data": 0}, "data must be at least 1; got 0"),
        ({"save_seconds": 0.0}, "save_seconds must be positive; got 0.0"),
    ],
)
def test_a_job_that_no_cluster_could_run_is_refused(changes, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        Job(**{**BLOOM.__dict__, **changes})


def test_a_recipe_s_own_mesh_of_the_job_stays_and_is_completed():
    own = ("recipes/gpt.py", "--mesh.data", "-1", "--mesh.tensor=4")
    job = dataclasses.replace(BLOOM, command=own)
    assert job.arguments() == ["python", "-u", *own, "--mesh.stage", "12"]
    program = dataclasses.replace(BLOOM, command=("mine", "--mesh.data", "16"))
    assert program.arguments() == ["mine", "--mesh.data", "16"], "a program of one's own may mean something else"


def test_a_plan_and_another_mesh_for_the_recipe_are_refused(tmp_path):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([{"data": 8, "stage": 1, "tensor": 1}]))
    with pytest.raises(ValueError, match=r"got --mesh.data 8, and --mesh.data 4 for the recipe"):
        main(["--plan", str(path), "--image", "a", "recipes/gpt.py", "--mesh.data", "4"])


OTHERS = {
    "name": "other",
    "gpus_per_node": 16,
    "image": "other:1",
    "namespace": "other",
    "queue": "other",
    "topology": "example.com/other",
    "replica_topology": "example.com/nearer",
    "checkpoint_claim": "other",
    "cache_claim": "another",
    "metrics_port": 9091,
    "shm_gib": 7,
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
    base = Job(command=("recipes/gpt.py",), image="a:1", data=16, metrics_port=9090, tensor=8, token="a")
    assert set(OTHERS) == {field.name for field in dataclasses.fields(JobSettings)}
    same = {name for name, value in OTHERS.items() if write(dataclasses.replace(base, **{name: value})) == write(base)}
    assert same == set(UNUSED[kind]) - {"service"}


def test_the_settings_without_effect_on_a_service_are_those_that_are_named():
    own = {field.name for field in dataclasses.fields(Serving)}
    assert set(UNUSED["service"]) == {name for name in OTHERS if name not in own} | {"mesh", "plan"}


@pytest.mark.parametrize(
    ("kind", "flags", "line"),
    [
        ("sbatch", ["--queue", "a", "--topology", "b"], "not used by --kind sbatch: --queue, --topology"),
        ("trainjob", ["--max-restarts", "3", "--image", "a"], "not used by --kind trainjob: --max-restarts"),
        (
            "jobset",
            ["--hours", "3", "--service.port", "1", "--image", "a"],
            "not used by --kind jobset: --hours, --service.*",
        ),
        ("jobset", ["--image", "a", "--queue", "a"], ""),
    ],
)
def test_flags_without_effect_are_named(capsys, kind, flags, line):
    main(["--kind", kind, "--mesh.data", "8", *flags, "recipes/gpt.py"])
    printed = capsys.readouterr()
    assert printed.err.strip() == line
    assert printed.out, "the job is written"


KEPT = ("--out-dir", "/checkpoints/gpt", "--checkpoint-every", "9")


@pytest.mark.parametrize(
    ("flags", "lines"),
    [
        (KEPT, []),
        (("--out-dir=/checkpoints", "--checkpoint-minutes=5"), []),
        (
            KEPT[2:],
            ["the recipe has no --out-dir and the claim is mounted at /checkpoints: results and checkpoints are lost"],
        ),
        (("--out-dir", "runs/gpt", *KEPT[2:]), ["the recipe has --out-dir runs/gpt and the claim"]),
        (
            KEPT[:2],
            ["the recipe has no --checkpoint-every: it saves only when asked to stop, and after a failure it begins"],
        ),
    ],
)
def test_work_that_would_be_lost_despite_a_claim_is_told(capsys, flags, lines):
    main([*FLAGS, "--checkpoint-claim", "runs", "recipes/gpt.py", *flags])
    told = capsys.readouterr().err.splitlines()
    assert len(told) == len(lines)
    assert all(line.startswith(begins) for line, begins in zip(told, lines, strict=True)), told
    main([*FLAGS, "--checkpoint-claim", "runs", "mine"])
    assert capsys.readouterr().err == "", "a program of one's own has flags of its own"


def test_a_pod_needs_an_image():
    with pytest.raises(ValueError, match="a pod needs a container image; got none"):
        to_jobset(Job(name="a", command=("recipes/gpt.py",), data=8))


def test_a_plan_for_another_executor_than_the_recipes_is_refused(tmp_path):
    path, job = tmp_path / "plan.json", ["--plan", str(tmp_path / "plan.json"), "--image", "a", "recipes/gpt.py"]
    plan = {"data": 4, "stage": 2, "tensor": 1, "executor": "mpmd"}
    path.write_text(json.dumps([plan]))
    with pytest.raises(ValueError, match=r"got a plan for executor=mpmd, .* Plan again with --executor spmd\."):
        main(job)
    for other in ({"executor": "spmd"}, {"stage": 1, "data": 8}):
        path.write_text(json.dumps([plan | other]))
        main(job)


def test_a_plan_that_is_none_is_refused(tmp_path):
    plan = tmp_path / "plan.json"
    for text, message in (
        ("x", "--plan must name a file of JSON; got other text"),
        ("3", "must be what `python -m jaxpar plan --json` writes"),
        ('[{"data": 8}]', "got none for stage"),
    ):
        plan.write_text(text)
        with pytest.raises(ValueError, match=message):
            main(["--plan", str(plan), "--image", "a", "recipes/gpt.py"])


SERVE = ("jaxpar", "serve", "/checkpoints/gpt")


def service(capsys, *flags, command=SERVE):
    code = jaxpar_main(["manifest", "--kind", "service", "--image", "registry.example/jaxpar:1", *flags, *command])
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
    assert found["spec"]["ports"] == [{"name": port["name"], "port": 80, "targetPort": port["name"]}]
    probes = {name: container[name]["httpGet"] for name in ("startupProbe", "livenessProbe", "readinessProbe")}
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
    assert (mount["name"], mount["mountPath"], mount["readOnly"]) == (volume["name"], "/checkpoints", True)
    assert {each["metadata"]["namespace"] for each in (deployment, found)} == {"lab"}


def test_a_pod_that_serves_has_the_flags_of_its_command_and_the_time_to_answer(capsys):
    deployment, _ = service(capsys, "--service.timeout-seconds", "90", command=(*SERVE, "--max-tokens", "64"))
    spec = deployment["spec"]["template"]["spec"]
    words = spec["containers"][0]["command"]
    flags = dict(zip(words[3::2], words[4::2], strict=True))
    assert flags == {"--max-tokens": "64", "--address": "0.0.0.0", "--port": "8000", "--timeout-seconds": "90"}
    assert {name.removeprefix("--").replace("-", "_") for name in flags} <= {
        *inspect.signature(serve).parameters,
        *(field.name for kind in (ModelSettings, Settings) for field in dataclasses.fields(kind)),
    }
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
        (["--service.replicas", "0"], SERVE, "--service.replicas must be at least 1; got 0. Choose 1, say."),
        (["--service.port", "70000"], SERVE, "--service.port must be under 65536"),
        (["--name", "GPT"], SERVE, "a Service's name must be lower-case letters"),
        (["--image", ""], SERVE, "a pod needs a container image"),
        (["--checkpoint-claim", "a b"], SERVE, "--checkpoint-claim must be lower-case letters"),
    ],
)
def test_a_service_that_could_not_work_is_refused(capsys, flags, command, message):
    args = ["manifest", "--kind", "service", "--image", "registry.example/jaxpar:1", *flags, *command]
    assert jaxpar_main(args) == ExitCode.BAD_CONFIG
    assert message in capsys.readouterr().err


@pytest.mark.parametrize("page", ["kubernetes.md", "zh/kubernetes.md"])
def test_the_kustomization_of_the_page_adds_to_what_a_jobset_requests(page, capsys):
    """Its patches are JSON patches (RFC 6902), since kustomize cannot merge lists of a kind that it does not know."""
    (block,) = re.findall(r"```yaml\n(# kustomization.*?)```", (ROOT / "docs" / page).read_text(), re.DOTALL)
    manifest = yaml.safe_load(written(capsys, *FLAGS, "recipes/gpt.py"))
    (patch,) = yaml.safe_load(block)["patches"]
    assert patch["target"] == {"kind": manifest["kind"]}
    for each in yaml.safe_load(patch["patch"]):
        assert each["op"] == "add"
        *parents, last = each["path"].strip("/").split("/")
        found = manifest
        for name in parents:
            found = found[int(name) if isinstance(found, list) else name]
        found[last] = each["value"]
    (container,) = pod(manifest)["spec"]["containers"]
    assert container["resources"]["requests"] == {"nvidia.com/gpu": 8, "cpu": "96", "memory": "800Gi"}
    check_manifest(manifest, schema(JOBSET))
