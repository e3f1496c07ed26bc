"""Plans, JSON and YAML from files: no setting becomes a flag, and a file of another form ends in one line."""

import json
import random
import re
from pathlib import Path

import pytest
import yaml

from jaxpar.__main__ import main as jaxpar_main
from jaxpar.commands import cli as commands_cli
from jaxpar.commands.manifest import main
from jaxpar.jobs import Job, to_jobset
from jaxpar.jobs.flags import first_plan, plan_flags
from tests.support.planned import PLAN

JOB = {"name": "gpt", "command": ("recipes/gpt.py",), "data": 8, "image": "a:1"}
ESCAPE = "\x1b]0;owned\x07\x1b[2J"


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
    with pytest.raises(
        ValueError, match=rf"^{name}(\[\d\])? of a plan must (be|match|have) "
    ) as error:
        first_plan(PLAN | changed)
    assert str(error.value).isprintable()
    assert len(str(error.value)) < 300
    path = tmp_path / "plan.json"
    path.write_text(json.dumps([PLAN | changed]))
    with pytest.raises(
        ValueError, match=rf"^{name}(\[\d\])? of a plan must (be|match|have) |Exceeds the limit"
    ):
        main(["--plan", str(path), "--image", "a", "recipes/gpt.py"])


def test_flags_of_a_plan_at_random_are_never_more_than_the_plan_s_own():
    rng = random.Random(0)
    values = ["--seed", "gpt2", "a b", 1, -1, 2.5, None, True, [], [1, 2], ["--x"], {}, "1", ESCAPE]
    values += ["1f1b", "float32"]  # of a schedule and a dtype, which have names of their own
    own = re.compile(
        r"--(mesh\.(data|stage|tensor)|model|batch-size|seq|dtype|schedule|num-microbatches|zero|num-chunks|remat|layers-per-virtual-stage)"
    )
    taken = 0
    for _ in range(6000):
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
            flags = plan_flags(first_plan(plan), ())
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
    check = (
        []
        if flag == "--check"
        else ["--check", str(write_job(tmp_path))]
        if flag == "--schema"
        else []
    )
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
        ValueError,
        match=re.escape("a schema of Kubernetes has no $ref; got one to 'http://127.0.0.1:1/evil'"),
    ):
        main(["--check", str(write_job(tmp_path)), "--schema", str(path)])


def test_a_file_that_is_too_large_is_not_read_whole(tmp_path, monkeypatch):
    monkeypatch.setattr(commands_cli, "MAX_FILE_BYTES", 1000)
    for path in (Path("/dev/zero"), tmp_path / "large.json"):
        if path.parent == tmp_path:
            path.write_text("é" * 501)
        with pytest.raises(
            ValueError,
            match=f"--plan must name a file of at most 1000 bytes; got {path}, which has more",
        ):
            main(["--plan", str(path), "--image", "a", "recipes/gpt.py"])
