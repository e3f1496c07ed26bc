"""The flags of the program in a job: those of recipes are checked by their own parsers; of others it is told."""

import json
import re
from dataclasses import fields

import pytest
import yaml

from jaxpar.__main__ import main as jaxpar_main
from jaxpar.commands.manifest import main
from jaxpar.commands.plan_flags import PlanFlags
from jaxpar.commands.train import load, path_of
from jaxpar.jobs.flags import FLAGS, NOT_OF_PLAN, OPTIONAL
from jaxpar.run.language_data import DataFlags
from jaxpar.run.language_model import ModelFlags
from jaxpar.run.lora_flags import LoraFlags
from jaxpar.run.optimizers import OptimizerFlags
from tests.support import planned as planned_settings
from tests.support.tiers import without

JOB = ("--image", "a:1", "--mesh.data", "8", "--checkpoint-claim", "runs")
KEPT = ("--out-dir", "/checkpoints/gpt", "--checkpoint-every", "9", "--data", "/checkpoints/rows")
SERVICE = (
    "--kind",
    "service",
    "--image",
    "a:1",
    "--checkpoint-claim",
    "runs",
    "jaxpar",
    "serve",
    "/checkpoints/gpt",
)


def code_of(args):
    try:
        return jaxpar_main(args)
    except SystemExit as end:
        return end.code


@pytest.mark.parametrize(
    ("flags", "said"),
    without(
        [
            (
                [*JOB, "recipes/gpt.py", "--stepss", "9"],
                "recipes/gpt.py would refuse these flags",
            ),
            (
                [*JOB, "recipes/gpt.py", "--steps", "1e3"],
                "--steps: a whole number is written in digits alone; got '1e3'. Did you",
            ),
            ([*JOB, "recipes/gpt.py", "--steps", "0"], "error: --steps must be at least 1; got 0"),
            (
                [*JOB, "recipes/digits.py", "--checkpoint-every", "5", "--keep", "0"],
                "--keep must be at least 1; got 0",
            ),
            ([*JOB, "recipes/gpt.py", "--remat", "ful"], "--remat: did you mean full?"),
            (
                [*JOB, "--mesh.stage", "8", "recipes/gpt.py", "--batch-size", "128"],
                "error: a pipeline needs at least one layer for each chunk of each stage; got 4 lay",
            ),
            (
                [*JOB, "--mesh.tensor", "8", "recipes/gpt.py", "--model", "bloom-bytes"],
                "the tensor axis must divide the heads",
            ),
            (
                [*JOB, "--mesh.stage", "4", "recipes/digits.py", "--hidden-layers", "4"],
                "the pairs of hidden layers must be divisible by the stage axis",
            ),
            (
                [*JOB, "/jaxpar/recipes/gpt.py", "--stepss", "9"],
                "/jaxpar/recipes/gpt.py would refuse these flags",
            ),
            (
                [*JOB, "python", "recipes/gpt.py", "--stepss", "9"],
                "recipes/gpt.py would refuse these flags",
            ),
            ([*JOB, "jaxpar", "train", "gpt", "--stepss", "9"], "gpt would refuse these flags"),
            (
                [*JOB, "python", "-m", "jaxpar", "train", "gptt"],
                "the recipe must be one of gpt, house-prices",
            ),
            (
                [*JOB, "recipes/gpt.py", "--help"],
                "a job runs recipes/gpt.py; got a command that asks for its help. Leave -h and",
            ),
            (
                [*JOB, "recipes/gptt.py"],
                "the script must exist; got recipes/gptt.py. Did you mean recipes/gpt.py?",
            ),
            (
                [*JOB, "recipes/all_reduce.py"],
                "does not take --mesh.data. Write it as a program, which gets only its own flags: p",
            ),
            (
                [*JOB, "--check", "job.yaml", "--kind", "trainjob"],
                "--check checks a file, and writes nothing; got --checkpoint-c",
            ),
            (
                [*JOB, "recipes/gpt.py", "--schedule", "foo"],
                "--schedule must be one of gpipe, 1f1b, interleaved, zb-h1, zb-v; got",
            ),
            (
                [*JOB, "recipes/gpt.py", "--quantize", "nf4"],
                "--quantize is for weights that are frozen; got nf4 without --lora-rank",
            ),
            (
                [*JOB, "recipes/gpt.py", "--max-grad-norm", "-1"],
                "--max-grad-norm must be positive; got -1",
            ),
            (
                [*JOB, "recipes/gpt.py", "--warmup-steps", "100", "--steps", "10"],
                "--warmup-steps must be less than --steps; got 100 and 10",
            ),
            (
                [*JOB, "recipes/gpt.py", "--num-chunks", "2"],
                "--num-chunks and --layers-per-virtual-stage apply to pipelines; got one of them",
            ),
            (
                [*JOB, "recipes/gpt.py", "--expert-buffer", "2"],
                "--expert-buffer applies to --experts data; got 2 with --experts tensor",
            ),
            (
                [*JOB, "recipes/gpt.py", "--data-weights", "1", "2"],
                "--data-weights must have one for each --data; got 2 for 0",
            ),
            (
                [*JOB, "recipes/digits.py", "--eval-every", "0"],
                "--eval-every must be at least 1; got 0",
            ),
            (
                [*JOB, "recipes/house_prices.py", "--features"],
                "--features must name at least one column; got none",
            ),
            (
                [*JOB, "recipes/house_prices.py", "--learning-rate", "-1"],
                "--learning-rate must be positive; got -1",
            ),
            (
                [*JOB, "recipes/gpt.py", "--fake-devices", "8"],
                "got --fake-devices 8 for recipes/gpt.py. Leave it out; to rehearse",
            ),
            (
                [*JOB, "recipes/gpt.py", "--model", "gpt-2"],
                "there is no transformer of this name; got 'gpt-2'. Did you mean",
            ),
            (
                [*JOB, "recipes/gpt.py --steps 9"],
                "are words of their own; got 'recipes/gpt.py --steps 9' as one. Leave the quotes",
            ),
            (
                [*JOB, "recipes"],
                "a job runs a script or a program; got the folder recipes. Name a script in it.",
            ),
            (
                [*JOB, "jaxpar", "serve", "/checkpoints/gpt"],
                "got jaxpar serve. Write it with --kind service.",
            ),
            (
                [*JOB, "jaxpar", "train"],
                "the recipe must be one of gpt, house-prices, digits, all-reduce, bloom; got ''.",
            ),
            (
                [*JOB, "gpt", "--steps", "9"],
                "a recipe is started by jaxpar train; got gpt alone. Write jaxpar train gpt, or",
            ),
            (
                [*JOB, "jaxpar", "trian", "gpt"],
                "pods run jaxpar train or jaxpar serve; got trian. Write train.",
            ),
            (
                [*JOB, "python3", "-m", "jaxpar", "serv", "a"],
                "pods run jaxpar train or jaxpar serve; got serv. Write serve.",
            ),
            (
                [*JOB, "python", "recipes/gpt.py", "--mesh.data", "4"],
                "error: a recipe's mesh must have the devices of its job; got --mesh.data 4 in the command of recipes/gpt.py",
            ),
            (
                ["--check", "job.yaml", "recipes/gpt.py"],
                "got recipes/gpt.py too. Leave one of them out.",
            ),
            (
                ["recipes/gpt.py"],
                "1 GPUs on nodes of 8. Choose a mesh of 8, such as --mesh.data 8, or give the actual",
            ),
            (
                [*JOB, "--steps", "9", "recipes/gpt.py"],
                "--steps is no option of manifest: the flags of a script come after the",
            ),
            (
                [*JOB, "--dry-run", "recipes/gpt.py", "--steps", "9"],
                "--dry-run is no option of manifest: the flags of a script",
            ),
            ([*SERVICE, "--max-waitings", "9"], "jaxpar serve would refuse these flags"),
            ([*SERVICE, "--max-waiting", "-1"], "error: --max-waiting must be at least 0; got -1"),
            (
                [*SERVICE, "--help"],
                "a Service runs jaxpar serve; got a command that asks for its help.",
            ),
            (
                [*SERVICE[:-1], "--max-waiting", "9"],
                "a Service runs jaxpar serve; got jaxpar serve --max-waiting 9. Give it and a",
            ),
        ],
        3,
        4,
        5,
        6,
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_flags_that_a_job_s_program_would_refuse_are_refused_before_it_is_written(
    flags, said, capsys
):
    assert code_of(["manifest", *flags]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert "--mesh.data: did you mean" not in printed.err, "it is a flag of the recipe"
    assert printed.out == ""


@pytest.mark.parametrize(
    ("flags", "remedies"),
    [
        ("--batch-size 7", ["--batch-size 8 or more"]),
        (
            "--batch-size 9 --num-microbatches 2",
            ["--batch-size 16 or more", "--num-microbatches 1"],
        ),
        ("--batch-size 9 --num-microbatches 2 --resume", ["--num-microbatches 1"]),
        ("--batch-size 7 --resume", ["--batch-size 8 or more with --allow-change batch_size"]),
    ],
)
def test_a_step_with_too_few_rows_for_a_job_s_mesh_is_refused_with_what_keeps_its_devices(
    flags, remedies, capsys
):
    given = dict(re.findall(r"(--\S+)(?: (\d+))?", flags))
    assert code_of(["manifest", *JOB, "recipes/gpt.py", *KEPT, *flags.split()]) == 2
    assert f". Choose {', or '.join(remedies)}." in capsys.readouterr().err
    for remedy in remedies:
        changed = given | dict(re.findall(r"(--\S+) (\w+)", remedy))
        words = " ".join(f"{flag} {value}" for flag, value in changed.items()).split()
        assert code_of(["manifest", *JOB, "recipes/gpt.py", *KEPT, *words]) in (0, None), remedy


def test_a_plan_with_too_few_rows_is_refused_with_what_keeps_its_devices(tmp_path, capsys):
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([planned_settings.PLAN | {"batch_size": 7}]))
    command = ["--image", "a:1", "--plan", str(path), "recipes/gpt.py", *KEPT]
    assert code_of(["manifest", *command]) == 2
    printed = capsys.readouterr().err
    (rows,) = re.findall(r"Choose --batch-size (\d+) or more\.", printed)
    assert code_of(["manifest", *command, "--batch-size", rows]) in (0, None)


@pytest.mark.parametrize(
    ("command", "said"),
    without(
        [
            (["recipes/gpt.py", *KEPT], ""),
            (["--", "recipes/gpt.py", *KEPT], ""),
            (["/jaxpar/recipes/gpt.py", *KEPT], ""),
            (["jaxpar", "train", "gpt", *KEPT], ""),
            (["recipes/gpt.py", *KEPT[:4]], ""),
            (["python", "recipes/all_reduce.py"], ""),
            (["recipes/gpt.py", *KEPT, "--prompt", "costs $x"], ""),
            (
                ["recipes/gpt.py", "--out-dir", "/checkpoints/${RUN}", "--checkpoint-every", "9"],
                "recipes/gpt.py gets /checkpoints/${RUN} as it is written: no shell reads the command of a job. Write the val",
            ),
            (
                ["python", "train.py"],
                "train.py is not on this machine: its flags are not checked, and it does not get --mesh.data 8\n",
            ),
            (
                ["train.py", *KEPT],
                "train.py is not on this machine: its flags are not checked, and it gets --mesh.data 8 --mesh.st",
            ),
            (
                ["--metrics-port", "9090", "python", "-u", "train.py"],
                "train.py is not on this machine: its flags are not checked, and it does not get --mesh.data 8 --metrics",
            ),
            (
                ["python", "train.py", "--mesh.data", "-1", "--mesh.tensor=3"],
                "train.py is not on this machine: its flags are not checked\n--mesh.data -1 "
                "--mesh.tensor 3 in the command of train.py, another number of devices, and a job of 8: give both one mesh",
            ),
            (
                ["bash", "train.sh"],
                "bash is no recipe of jaxpar: its flags are not checked, and it does not get --mesh",
            ),
            (["python3.12", "-m", "jaxpar", "train", "gpt", *KEPT], ""),
            (["python3", "recipes/gpt.py", "--mesh.data", "8", *KEPT], ""),
            (
                ["--metrics-port", "9090", "python", "recipes/gpt.py", "--mesh.data", "8", *KEPT],
                "written after python, recipes/gpt.py gets its own flags alone, and not --metrics-port 9090",
            ),
            (
                ["python", "recipes/gpt.py", *KEPT],
                "written after python, recipes/gpt.py gets its own flags alone, and not --mesh.data 8: write recipes/gpt.py",
            ),
            (
                ["python", "tests/conftest.py", "--a", "b"],
                "tests/conftest.py is no recipe of jaxpar: its flags are not checked, and it does not get --mesh.data 8\n",
            ),
        ],
        2,
        4,
    ),
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_what_cannot_be_checked_is_told_and_written(command, said, capsys):
    main([*JOB, *command])
    printed = capsys.readouterr()
    assert printed.err.startswith(said)
    assert bool(printed.err) == bool(said)
    assert yaml.safe_load(printed.out)["kind"] == "JobSet"


def test_a_script_with_the_name_of_a_recipe_is_not_run(tmp_path, monkeypatch, capsys):
    (tmp_path / "recipes").mkdir()
    (tmp_path / "recipes" / "gpt.py").write_text("raise SystemExit('it was run')\n")
    monkeypatch.chdir(tmp_path)
    main([*JOB, "recipes/gpt.py", "--my-own", "9", *KEPT])
    assert capsys.readouterr().err.startswith(
        "recipes/gpt.py is no recipe of jaxpar: its flags are not checked, and it gets"
    )


@pytest.mark.parametrize(
    ("flags", "before", "after", "said"),
    [
        (
            [*JOB, "recipes/gpt.py", *KEPT],
            "--checkpoint-every",
            "--checkpoint-evry",
            "recipes/gpt.py would refuse these flags",
        ),
        (
            [*JOB, "recipes/gpt.py", *KEPT, "--model", "gpt2"],
            '"gpt2"',
            '"gpt22"',
            "there is no transformer of this name",
        ),
        (
            [*SERVICE, "--max-waiting", "9"],
            "--max-waiting",
            "--max-waitings",
            "jaxpar serve would refuse these flags",
        ),
        (
            [*JOB, "python", "recipes/gpt.py", "--mesh.data", "8", *KEPT],
            '"--mesh.data"\n              - "8"',
            '"--mesh.data"\n              - "4"',
            "got --mesh.data 4 in the command of recipes/gpt.py, 4 devices, and a job of 8: give both one mesh",
        ),
    ],
)
def test_flags_that_were_edited_in_a_manifest_are_checked_too(
    flags, before, after, said, tmp_path, capsys
):
    main(flags)
    text = capsys.readouterr().out
    assert before in text
    (tmp_path / "job.yaml").write_text(text.replace(before, after))
    assert code_of(["manifest", "--check", str(tmp_path / "job.yaml")]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""


def test_a_recipe_that_another_python_runs_is_checked_too(tmp_path, capsys):
    main([*JOB, "recipes/gpt.py", *KEPT])
    text = capsys.readouterr().out.replace('"python"', '"/venv/bin/python3.12"')
    (tmp_path / "job.yaml").write_text(
        text.replace('"--mesh.data"\n              - "8"', '"--mesh.data"\n              - "4"')
    )
    with pytest.raises(ValueError, match=r"got --mesh\.data 4, .*, 4 devices, and 1 pods"):
        main(["--check", str(tmp_path / "job.yaml")])


def test_a_script_for_slurm_without_checkpoints_is_told(capsys):
    main(["--kind", "sbatch", "--mesh.data", "8", "recipes/gpt.py"])
    assert capsys.readouterr().err.startswith(
        "the command has no --checkpoint-every: a recipe then saves only when asked to stop"
    )
    said = r"--hours must be more than the time to save, 150 s; got --hours 0\.001, 3\.6 s"
    with pytest.raises(ValueError, match=said):
        main(["--kind", "sbatch", "--mesh.data", "8", "--hours", "0.001", "recipes/gpt.py"])
    said = r"SLURM sends .* at most 65,535 s before the end; got --save-seconds 33000.*, for which it would come 66,030 s"
    slow = ["--save-seconds", "33000", "--hours", "48"]
    with pytest.raises(ValueError, match=said):
        main(["--kind", "sbatch", "--mesh.data", "8", *slow, "recipes/gpt.py"])


PLAN = planned_settings.PLAN | {"tensor": 2, "zero": 1, "gpus_per_node": 4}
PLAN |= {"own_model": None, "model": "gpt2", "seq": 1024, "dtype": "bfloat16"}


def planned(tmp_path, **changes):
    (tmp_path / "plan.json").write_text(json.dumps([PLAN | changes]))
    usual = (
        "--image",
        "a:1",
        "--checkpoint-claim",
        "runs",
        "--rdma",
        "rdma/ib=8",
        "--queue",
        "research",
    )
    return "--plan", str(tmp_path / "plan.json"), *usual


def test_a_job_has_the_nodes_of_its_plan(tmp_path, capsys):
    main([*planned(tmp_path), "recipes/gpt.py", *KEPT])
    printed = capsys.readouterr()
    assert "parallelism: 4\n" in printed.out
    assert "nvidia.com/gpu: 4\n" in printed.out
    assert printed.err == ""
    main([*planned(tmp_path, gpus_per_node=None), "recipes/gpt.py", *KEPT])
    assert "nvidia.com/gpu: 8\n" in capsys.readouterr().out
    for flags in (["--gpus-per-node", "8"], ["--gpus-per-node=8"], ["--gpus_per_node", "8"]):
        with pytest.raises(
            ValueError,
            match=r"got 4 in --plan .*, and --gpus-per-node 8\. Plan again with --gpus-per-node 8",
        ):
            main([*planned(tmp_path), *flags, "recipes/gpt.py", *KEPT])
    main(
        [
            *planned(tmp_path),
            "--gpus-per-node",
            "4",
            "--fake-devices-per-node",
            "8",
            "recipes/gpt.py",
            *KEPT,
        ]
    )
    assert "parallelism: 2\n" in capsys.readouterr().out, "a rehearsal has other nodes"


def but_of_random_weights(said):
    """Returns what is said, but for the line about factors of a preset's weights, which are random."""
    lines = said.splitlines(keepends=True)
    return "".join(line for line in lines if "--lora-rank and no --init-from" not in line)


@pytest.mark.parametrize(
    ("flags", "changed"),
    without(
        [
            ([], ""),
            (["--batch-size", "64", "--mesh.data", "-1", "--remat", "none"], ""),
            (["--batch-size", "32"], "--batch-size 32 where it has 64"),
            (["--zero=0", "--seq", "512"], "--seq 512 where it has 1024, --zero 0 where it has 1"),
            (
                ["--remat", "full", "--sequence-parallel"],
                "--remat full where it has none, --sequence-parallel where it has off",
            ),
            (["--lora-rank", "4"], "--lora-rank 4 where it has none"),
            (["--optimizer", "adamw"], ""),
        ],
        0,
        3,
    ),
)
def test_what_a_command_changes_of_a_plan_is_told(flags, changed, tmp_path, capsys):
    main([*planned(tmp_path), "recipes/gpt.py", *KEPT, *flags])
    said = but_of_random_weights(capsys.readouterr().err)
    assert said == (said and f"the command changes the plan: {changed}. Memory and time that were planned are not those of "
                    "this job: leave these flags out, or plan again with them\n")  # fmt: skip
    assert bool(said) == bool(changed)


@pytest.mark.parametrize(
    ("flags", "changed", "missing"),
    without(
        [
            (["--optimizer", "muon"], "--optimizer muon where it has adamw", "--optimizer"),
            (
                ["--optimizer=sgd", "--momentum", "0"],
                "--momentum 0 where it has none, --optimizer sgd where it has adamw",
                "--momentum, --optimizer",
            ),
            (["--window", "1024"], "--window 1024 where it has none", "--window"),
            (["--max-documents", "4"], "--max-documents 4 where it has none", "--max-documents"),
            (
                ["--dtype", "float32", "--zero", "0"],
                "--dtype float32 where it has bfloat16, --zero 0 where it has 1",
                "--dtype",
            ),
        ],
        0,
    ),
)
def test_what_a_command_changes_and_plan_cannot_plan_is_told(
    flags, changed, missing, tmp_path, capsys
):
    main([*planned(tmp_path, dtype="bfloat16"), "recipes/gpt.py", *KEPT, *flags])
    assert capsys.readouterr().err == (
        f"the command changes the plan: {changed}. Memory and time that were planned are not those of this job: leave these "
        f"flags out, or do not rely on those figures: `plan` has no {missing}\n"
    )


def test_a_planned_step_that_is_longer_than_the_limits_of_its_job_is_told_with_limits_that_do(
    tmp_path, capsys
):
    def said(*flags, step, before=()):
        given = planned(tmp_path, model="gpt2", dtype="bfloat16", step_seconds=step)
        main([*given, *before, "recipes/gpt.py", *KEPT, *flags])
        return capsys.readouterr().err

    assert not said(step=80.5)
    stop = "a run that is told to stop ends its step, of 174 s by the plan, and then saves: the 150 s that it has for both"
    assert said(step=173.9) == f"{stop} are too few. Give --save-seconds 144, before the program\n"
    assert not said(step=173.9, before=("--save-seconds", "144"))
    slow = said(step=3166)
    assert slow.startswith(
        "a step of the plan takes 3,166 s, and a run is ended in one of more than --budget.step 600."
    )
    assert "--budget.step 9498\n" in slow
    assert not said("--budget.step", "9498", step=3166, before=("--save-seconds", "3136"))
    assert not said("--budget.step", "0", step=3166, before=("--save-seconds", "3136"))


def test_a_folder_takes_the_place_of_the_model_of_a_plan(tmp_path, capsys):
    given = planned(tmp_path, model="qwen2.5-0.5b", dtype="bfloat16")
    main([*given, "recipes/gpt.py", "--init-from", "/checkpoints/qwen", *KEPT])
    printed = capsys.readouterr()
    assert '"--model"' not in printed.out
    assert printed.err == (
        "the model in --init-from /checkpoints/qwen was not compared with the plan, which is for --model qwen2.5-0.5b: memory "
        "and time that were planned are those of this job if the two have the same sizes\n"
    )
    main([*given, "recipes/gpt.py", *KEPT])
    assert '"--model"' in capsys.readouterr().out


def test_another_folder_than_that_of_a_plan_is_said_not_to_be_compared(tmp_path, capsys):
    given = planned(tmp_path, model=None, init_from="/checkpoints/qwen", dtype="bfloat16")
    for folder in ("/checkpoints/qwen", "/checkpoints/./qwen/"):
        main([*given, "recipes/gpt.py", "--init-from", folder, *KEPT])
        assert not capsys.readouterr().err
    main([*given, "recipes/gpt.py", "--init-from", "/checkpoints/llama", *KEPT])
    assert (
        "in --init-from /checkpoints/llama was not compared with the plan, which is for the one in /checkpoints/qwen"
        in capsys.readouterr().err
    )


def test_a_model_that_is_named_in_two_ways_is_refused(tmp_path):
    named = "recipes/gpt.py", "--init-from", "/checkpoints/qwen"
    said = r"--init-from determines the model; got it with --model gpt2\. Leave out one"
    for job in (JOB, planned(tmp_path, model="gpt2")):
        with pytest.raises(ValueError, match=said):
            main([*job, *named, "--model", "gpt2", *KEPT])
    with pytest.raises(ValueError, match=r"--ignore-config-keys are of the config\.json in"):
        main([*JOB, "recipes/gpt.py", "--ignore-config-keys", "foo", *KEPT])
    with pytest.raises(ValueError, match="--expert-split expert_mlp is for a model with experts"):
        main([*JOB, "recipes/gpt.py", "--expert-split", "expert_mlp", *KEPT])


def test_a_checked_manifest_names_its_model_once(tmp_path, capsys):
    main([*JOB, "recipes/gpt.py", "--init-from", "/checkpoints/qwen", *KEPT])
    path, text = tmp_path / "job.yaml", capsys.readouterr().out
    path.write_text(text)
    main(["--check", str(path)])
    twice = '- "--model"\n              - "gpt2"\n              - "--init-from"'
    path.write_text(text.replace('- "--init-from"', twice))
    with pytest.raises(ValueError, match="--init-from determines the model; got it with --model g"):
        main(["--check", str(path)])


def test_the_targets_and_the_window_of_a_plan_are_those_of_its_job(tmp_path, capsys):
    given = planned(tmp_path, lora_rank=8, lora_targets=["w_qkv", "w_out"], window=4096)
    main([*given, "recipes/gpt.py", *KEPT, "--window", "4096"])
    printed = capsys.readouterr()
    assert [line.split()[-1] for line in re.findall(r".*w_.*", printed.out)] == [
        '"w_qkv"',
        '"w_out"',
    ]
    assert but_of_random_weights(printed.err) == ""
    main([*given, "recipes/gpt.py", *KEPT, "--lora-targets", "w_out", "w_qkv"])
    assert but_of_random_weights(capsys.readouterr().err) == "", "in any order"
    main([*given, "recipes/gpt.py", *KEPT, "--lora-targets", "w_qkv"])
    assert "--lora-targets w_qkv where it has w_qkv w_out. " in capsys.readouterr().err
    main([*planned(tmp_path, lora_rank=8), "recipes/gpt.py", *KEPT, "--lora-targets", "w_qkv"])
    assert "w_qkv where it has w_qkv w_out w_up w_down. " in capsys.readouterr().err


def test_all_flags_of_the_recipe_either_change_a_plan_or_do_not():
    """A new flag belongs among those that are compared with a plan, or here."""
    groups = ModelFlags, LoraFlags, OptimizerFlags, DataFlags, load(path_of("gpt")).Recipe
    names = {f"--{each.name}".replace("_", "-") for of in groups for each in fields(of)}
    compared = {f"--{name}".replace("_", "-") for name in FLAGS} | {*OPTIONAL}
    other_numbers = {"--lora-alpha", "--beta1", "--beta2", "--epsilon", "--weight-decay"}
    other_numbers |= {"--max-grad-norm", "--warmup-steps", "--decay-steps"}
    other_numbers |= {"--final-learning-rate", "--learning-rate-schedule"}
    of_data = {"--data", "--data-weights", "--tokenizer", "--token-cache", "--long-examples"}
    beside_steps = {"--eval-every", "--eval-rows", "--save-hf", "--prompt", "--temperature"}
    # The folder has a line of its own, and the others are answered with the flags that are compared.
    others = {"--top-k", "--init-from", "--ignore-config-keys", "--batch-tokens"}
    others |= {"--microbatch-tokens"}
    assert names - compared == other_numbers | of_data | beside_steps | others
    of_plan = {f"--{each.name}".replace("_", "-") for each in fields(PlanFlags)}
    assert compared - of_plan == {*NOT_OF_PLAN}


def test_a_recipe_and_the_plan_for_a_model_of_one_s_own_are_told_apart(tmp_path, capsys):
    main([*planned(tmp_path, own_model="my_model:SHAPE"), "recipes/gpt.py", *KEPT])
    said = "the plan is for a model of your own, my_model:SHAPE, and recipes/gpt.py trains the model that its flags name."
    assert capsys.readouterr().err.startswith(said)
    main([*planned(tmp_path, own_model="my_model:SHAPE"), "python", "train.py"])
    assert said not in capsys.readouterr().err


def test_keys_that_a_plan_ignores_are_ignored_by_its_job(tmp_path, capsys):
    planned_for = planned(tmp_path, init_from="./hf", ignore_config_keys=["attn_pdrop", "foo"])
    main([*planned_for, "recipes/gpt.py", "--init-from", "/checkpoints/hf", *KEPT])
    command = capsys.readouterr().out.split()
    at = command.index('"--ignore-config-keys"')
    assert command[at : at + 5 : 2] == ['"--ignore-config-keys"', '"attn_pdrop"', '"foo"']


def test_a_program_of_one_s_own_gets_the_nodes_of_a_plan_alone(tmp_path, capsys):
    main([*planned(tmp_path), "python", "train.py"])
    said = capsys.readouterr().err
    assert re.search(
        r"python is a program of your own, which gets only its own flags, and none of --mesh.data 8 .*--zero 1",
        said,
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--steps", "9", "recipes/gpt.py"],
            "--steps is no option of launch: the flags of a script come after the script",
        ),
        (
            ["recipes/gptt.py"],
            "the script must exist; got recipes/gptt.py. Did you mean recipes/gpt.py?",
        ),
        (
            ["--gpus-per-process", "4", "recipes/gpt.py"],
            "got 4 for each of 2 processes, and /dev/nvidia0. Choose fewer, or",
        ),
    ],
)
def test_what_cannot_be_launched_is_refused(flags, said, capsys, monkeypatch):
    monkeypatch.setattr("jaxpar.runtime.program.gpu_nodes", lambda: ["/dev/nvidia0"])
    monkeypatch.setattr("jaxpar.runtime.program.OTHER_GPUS", ())
    assert code_of(["launch", "-n", "2", *flags]) == 2
    assert said in capsys.readouterr().err
