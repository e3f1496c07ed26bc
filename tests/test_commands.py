"""The commands plot and doctor: what they say of files and machines, and what they refuse."""

import contextlib
import json
import os
import subprocess
import sys
from typing import Annotated

import pytest
import tyro
import yaml

from jaxpar.__main__ import COMMANDS, main
from jaxpar.commands.cli import call
from jaxpar.commands.doctor import advice, report
from jaxpar.runtime.distributed import GPU_FLAGS
from tests.support import doc_pages
from tests.support.waiting import WAIT_SECONDS


def write_run(folder, losses, **others):
    folder.mkdir(parents=True)
    lines = [json.dumps({"step": step, "loss": loss, **others}) for step, loss in enumerate(losses)]
    (folder / "metrics.jsonl").write_text("\n".join(lines) + "\n")
    return str(folder)


def test_plot_puts_runs_side_by_side(tmp_path, capsys):
    runs = [write_run(tmp_path / "a", [3.0, 2.0, 1.0]), write_run(tmp_path / "b", [3.0, None])]
    assert main(["plot", *runs, "--out", str(tmp_path / "loss.png")]) == 0
    head, a, b, wrote = capsys.readouterr().out.splitlines()
    assert head.split() == ["run", "points", "first", "loss", "lowest", "at", "step", "last"]
    assert a.split() == ["a", "3", "3", "1", "3", "1", "█▅▁"]
    assert b.split() == ["b", "2", "3", "3", "1", "nan", "█!"], (
        "a loss that was not finite is marked"
    )
    assert wrote == f"wrote {tmp_path / 'loss.png'}"
    assert (tmp_path / "loss.png").read_bytes().startswith(b"\x89PNG")


def test_a_link_to_write_to_stays_one(tmp_path, capsys):
    run, link = tmp_path / "run", tmp_path / "newest.svg"
    run.mkdir()
    (run / "metrics.jsonl").write_text('{"step": 1, "loss": 2.0}\n')
    link.symlink_to(tmp_path / "loss.svg")
    for _ in range(2):  # the second time it is there
        assert main(["plot", str(run), "--out", str(link)]) == 0
        assert link.is_symlink()
        assert "<svg" in (tmp_path / "loss.svg").read_text()


def test_plot_names_runs_apart(tmp_path, capsys):
    runs = [write_run(tmp_path / name / "gpt", [1.0]) for name in "ab"]
    assert main(["plot", *runs]) == 0
    out = capsys.readouterr().out
    assert all(run in out for run in runs)


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["nowhere"],
            "a run must be a folder with a metrics.jsonl, which its first step begins; got nowhere, which",
        ),
        (["a", "--metric", "accuracy"], "got 'accuracy'. It has grad_norm, loss."),
        ([], "plot must get one run or more; got none."),
        (
            ["a", "--out", "loss.jpg"],
            "a plot's suffix must be one of svg, png, pdf; got --out 'loss.jpg'.",
        ),
    ],
)
def test_plot_refuses(tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", [1.0], grad_norm=1.0)
    assert main(["plot", *args]) == 2
    assert message in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (
            ["plan", "--model", ""],
            "--model must not be empty; got ''. Give a value, or leave it out; a variable of the shell",
        ),
        (["plan", "--model", "gpt2", "--out-dir="], "--out-dir must not be empty; got ''."),
        (["export", "runs/gpt", ""], "an argument must not be empty; got ''."),
        (["serve", ""], "an argument must not be empty; got ''."),
        (["train", "gpt", "--save-hf", ""], "--save-hf must not be empty; got ''."),
        (
            ["train", "gpt", "--data", "x", "--data=y"],
            "--data must be given once; got --data x and --data y. Give all values at once: --data x y.",
        ),
        (["plot", "a", "--out", "/proc/loss.png"], "got No such file or directory: /proc/loss.png"),
    ],
)
def test_words_that_mean_nothing_and_places_that_take_nothing_are_refused(
    tmp_path, capsys, monkeypatch, args, message
):
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", [1.0])
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(args))
    assert message in capsys.readouterr().err
    assert [path.name for path in tmp_path.iterdir()] == ["a"]


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["train", "gpt", "--steps", "5", "--steps=9"], "--steps must be given once; got --steps 5 and --steps 9. Leave all"),
        (["train", "gpt", "--mesh.data", "2", "--mesh.data=-1"], "got --mesh.data 2 and --mesh.data -1. Leave all but one"),
        (["train", "digits", "--batch_size", "8", "--batch-size", "9"], "got --batch-size 8 and --batch-size 9. Leave all"),
        (["plan", "--model", "gpt2", "--model=bloom"], "--model must be given once; got --model gpt2 and --model bloom."),
        (["serve", "runs/gpt", "--port", "1", "--port=2", "--port", "3"], "got --port 1 and --port 2 and --port 3. Leave"),
        (["serve", "--port", "1", "a", "--port", "2"], "--port must be given once; got --port 1 and --port 2. Leave all"),
        (["serve", "a", "--allowed-hosts", "b", "c", "--allowed-hosts", "d"], "values at once: --allowed-hosts b c d."),
        (["launch", "-n", "2", "--num-processes", "3", "a.py"], "got --num-processes 2 and --num-processes 3. Leave all"),
        (["plot", "a", "--metric", "loss", "--metric", "b"], "--metric must be given once; got --metric loss and --metric b"),
        (["manifest", "--name", "a", "--name", "b", "x.py"], "--name must be given once; got --name a and --name b. Leave"),
        (["train", "gpt", "--overwrite", "--no-overwrite"], "Unrecognized options: --no-overwrite"),
    ],
)  # fmt: skip
def test_a_flag_that_is_given_twice_with_other_values_is_refused(capsys, args, message):
    with pytest.raises(SystemExit, match="2"):
        sys.exit(main(args))
    printed = capsys.readouterr()
    assert message in printed.out + printed.err


def test_values_that_are_the_same_or_are_no_flags_may_be_given_again():
    def program(
        words: Annotated[tuple[str, ...], tyro.conf.Positional] = (),
        *,
        steps: int = 1,
        text: str = "",
        fast: bool = False,
    ) -> tuple:
        """A program."""
        return words, steps, text, fast

    parse = lambda *args: call(program, args, "program")
    assert parse("--steps", "5", "--fast", "--steps=5", "--fast") == ((), 5, "", True)
    assert parse("--steps", "5", "--text=--steps=9") == ((), 5, "--steps=9", False)
    assert parse("--steps", "5", "--", "--steps", "9") == (("--steps", "9"), 5, "", False)


def test_a_list_of_a_manifest_may_be_given_a_part_at_a_time(capsys):
    given = [
        "--toleration",
        "a",
        "--toleration",
        "b",
        "--image",
        "a:1",
        "--checkpoint-claim",
        "c",
        "--mesh.data",
        "8",
    ]
    assert main(["manifest", *given, "python", "train.py"]) == 0
    (job,) = yaml.safe_load_all(capsys.readouterr().out)
    pod = job["spec"]["replicatedJobs"][0]["template"]["spec"]["template"]["spec"]
    assert [each["key"] for each in pod["tolerations"]] == ["a", "b"]


def test_plot_refuses_a_place_where_no_picture_can_lie(tmp_path, capsys):
    run = write_run(tmp_path / "a", [1.0])
    assert main(["plot", run, "--out", f"{run}/metrics.jsonl/loss.png"]) == 2
    assert "--out's folder must be a folder that can be written to; got " in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "message"),
    [
        (["--nodes", "0"], "--nodes must be at least 1; got 0. Choose 1 or more."),
        (["--gpus-per-node", "-8"], "--gpus-per-node must be at least 1; got -8."),
        (["--seq", "0"], "--seq must be at least 1; got 0."),
        (["--top", "0"], "--top must be at least 1; got 0."),
        (["--batch-size", "0"], "--batch-size must be at least 1; got 0."),
        (
            ["--out-dir", "file/plan"],
            "--out-dir must be a folder that can be written to; got file/plan: ",
        ),
    ],
)
def test_plan_refuses(tmp_path, capsys, monkeypatch, args, message):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "file").write_text("")
    assert main(["plan", "--model", "gpt2", *args]) == 2
    assert message in capsys.readouterr().err


def test_doctor_fits_a_page_and_tells_what_was_found(capsys):
    assert main(["doctor"]) == 0
    page = capsys.readouterr().out
    for section in (
        "versions",
        "machine",
        "devices",
        "collectives",
        "set",
        "to look at",
        "disk",
        "cluster",
    ):
        assert f"\n{section}\n" in f"\n{page}"
    assert "backend cpu: 8 of 8 devices are here, each a cpu\n" in page
    assert len(page.splitlines()) < 70


def test_doctor_shows_the_settings_by_which_xla_ends_the_process():
    words = [sys.executable, "-m", "jaxpar", "doctor"]
    env = os.environ | {"XLA_FLAGS": "--xla_none_such=1"}
    done = subprocess.run(
        words,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        cwd=doc_pages.ROOT,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode
    assert "  XLA_FLAGS=--xla_none_such=1\n" in done.stdout
    assert "Unknown flag in XLA_FLAGS" in done.stderr


def test_doctor_shows_the_cluster_and_no_secret():
    page = report(
        {
            "SLURM_JOB_ID": "42",
            "SLURM_NTASKS": "8",
            "API_TOKEN": "secret",
            "XLA_FLAGS": "--xla_dump_to=x",
        }
    )
    assert "SLURM: SLURM_JOB_ID=42, SLURM_NTASKS=8" in page
    assert "XLA_FLAGS=--xla_dump_to=x" in page
    assert "secret" not in page


@pytest.mark.parametrize(
    ("environment", "backend", "num_devices", "told"),
    [
        ({}, "gpu", 8, ["XLA_FLAGS without --xla_gpu_enable_latency_hiding_scheduler=true"]),
        ({"XLA_FLAGS": " ".join(GPU_FLAGS)}, "gpu", 8, []),
        (
            {"XLA_FLAGS": " ".join(GPU_FLAGS[:-1])},
            "gpu",
            8,
            [f"XLA_FLAGS without {GPU_FLAGS[-1]}: "],
        ),
        ({"NCCL_P2P_DISABLE": "1"}, "gpu", 1, ["NCCL_P2P_DISABLE or NCCL_IB_DISABLE is 1"]),
        ({"PJRT_NPROC": "4"}, "cpu", 8, ["PJRT_NPROC under 16"]),
        ({"PJRT_NPROC": "many"}, "cpu", 8, ["PJRT_NPROC under 16"]),
        ({"PJRT_NPROC": "16"}, "cpu", 8, []),
    ],
)
def test_doctor_names_what_is_not_set(monkeypatch, environment, backend, num_devices, told):
    monkeypatch.setattr("shutil.which", lambda name: None)
    found = advice(environment, backend, num_devices)
    assert len(found) == len(told)
    assert all(line.startswith(start) for line, start in zip(found, told, strict=True))


BLOOM = (
    "--model bloom-176b --nodes 48 --gpu a100-80gb-jeanzay --data 4 --stage 12 --zero 1 --remat yes "
    "--batch-size 2048 --top 2"
)
HELP = tuple(COMMANDS)


@pytest.mark.parametrize(
    ("columns", "args"),
    [
        *(
            (columns, args)
            for columns in (80, 100)
            for args in (["--help"], ["doctor"], *([n, "--help"] for n in HELP))
        ),
        pytest.param(
            80,
            [
                "plan",
                *BLOOM.split(),
                "--schedule",
                "interleaved",
                "--num-microbatches",
                "128",
                "--num-chunks",
                "2",
            ],
            marks=pytest.mark.full,
        ),
    ],
    ids=lambda value: " ".join(value[:2]) if isinstance(value, list) else str(value),
)
def test_lines_fit_the_terminal(monkeypatch, capsys, columns, args):
    monkeypatch.setenv("COLUMNS", str(columns))
    monkeypatch.delenv("XLA_FLAGS")  # doctor shows such a value whole
    with contextlib.suppress(SystemExit):  # of --help
        main(args)
    said = capsys.readouterr().out.splitlines()
    assert len(said) > 2
    assert not [line for line in said if len(line) > columns and not line.startswith("scripts: ")]


def test_help_for_a_terminal_of_one_column_ends(monkeypatch, capsys):
    monkeypatch.setenv("COLUMNS", "1")
    with pytest.raises(SystemExit, match="0"):
        main(["plot", "-h"])
    assert "usage:" in capsys.readouterr().out


def test_a_usage_that_is_wrapped_is_whole_and_breaks_between_flags(monkeypatch, capsys):
    said = {}
    for columns in (60, 200):
        monkeypatch.setenv("COLUMNS", str(columns))
        with pytest.raises(SystemExit, match="0"):
            main(["plot", "-h"])
        said[columns] = capsys.readouterr().out.partition("\n\n")[0].splitlines()
    assert len(said[200]) == 1
    assert len(said[60]) > 1
    assert " ".join(line.strip() for line in said[60]) == said[200][0]
    for line in said[60]:
        assert len(line) <= 60
        assert line.count("[") == line.count("]"), "a flag and its value stay on one line"


def test_a_run_that_is_given_by_a_flag_is_answered_with_how_to_give_it(capsys):
    for given in (["--run", "runs/a"], ["--run=runs/a"]):
        with pytest.raises(SystemExit, match="2"):
            main(["watch", *given])
        assert "--run is no flag: give runs/a alone, without --run" in capsys.readouterr().err


@pytest.mark.parametrize("given", [["--json", "plans.json"], ["--json=plans.json"]])
def test_a_file_after_json_is_answered_with_how_to_write_one(given, capsys):
    assert main(["plan", "--model", "gpt2", *given, "--nodes", "2"]) == 2
    assert capsys.readouterr().err == (
        "error: --json is a switch, which prints the plans; got --json plans.json. To write them to a file, redirect them: "
        "--json > plans.json\n"
    )


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ["--schedule", "interleaved", "--stage", "1"],
            "has no schedule and no chunks; got --stage 1, --schedule interl",
        ),
        (
            ["--num-chunks", "2", "--stage", "1"],
            "has no schedule and no chunks; got --stage 1, --num-chunks 2. Leave one",
        ),
        (
            ["--num-chunks", "2", "--schedule", "1f1b"],
            "stages have 1 chunk with --schedule 1f1b; got --num-chunks 2. Leave",
        ),
        (
            ["--report", "."],
            "--report must name a file; got the folder .. Name a page in it: plan.html",
        ),
        (
            ["--expert-buffer", "2"],
            "--expert-buffer is for a model with experts; got --expert-buffer 2.0 and llama-tiny.",
        ),
        (
            ["--model", "moe-bytes", "--experts", "tensor", "--expert-buffer", "2"],
            "--expert-buffer applies to --experts data; got it with --experts tensor. Leave one",
        ),
    ],
)
def test_settings_that_no_plan_can_have_are_refused_before_the_search(flags, said, capsys):
    model = [] if "--model" in flags else ["--model", "llama-tiny"]
    assert main(["plan", *model, *flags]) == 2
    printed = capsys.readouterr()
    assert said in printed.err
    assert printed.out == ""
