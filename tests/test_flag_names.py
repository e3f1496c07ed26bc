"""Errors of the library, which name its parameters, as the commands and the recipes tell them: with the flags of the user."""

import dataclasses
import re
import subprocess
import sys
import typing
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import docstring_parser
import pytest
import tyro

import all_reduce
import bloom
import digits
import gpt
import house_prices
from jaxpar.__main__ import main
from jaxpar.commands import recipe as cli
from jaxpar.commands.cli import flag_names
from jaxpar.commands.manifest import Flags
from jaxpar.commands.plan import plan
from jaxpar.commands.plan_flags import PlanFlags
from jaxpar.commands.runs import export_model, watch_run
from jaxpar.fields import arg, given_by
from jaxpar.serve.open_run import ModelSettings
from jaxpar.serve.requests import Settings
from tests.support.waiting import WAIT_SECONDS

GPT = flag_names(gpt.Config)


def test_flags_are_named_as_tyro_names_them():
    assert flag_names(plan)["json"] == "--json", "its parameter is json_"
    assert flag_names(plan)["gpus_per_node"] == "--gpus-per-node"
    assert flag_names(Flags)["tensor"] == "--mesh.tensor"
    assert (GPT["data files"], GPT["data"]) == ("--data", "--mesh.data")
    assert GPT["gpu"] == "--compile-for"
    assert flag_names(plan)["gpu"] == "--gpu"
    assert flag_names(all_reduce.Config)["num_hidden"] == "--hidden-layers"
    assert "gpu" not in flag_names(bloom.Config), "--gpu, to plan for, or --compile-for"


def flag_classes(of):
    """A dataclass of flags, and those of its groups."""
    yield of
    for kind in typing.get_type_hints(of).values():
        if dataclasses.is_dataclass(kind):
            yield from flag_classes(kind)


def test_the_help_of_a_flag_is_joined_to_whole_lines():
    configs = (
        gpt.Config,
        digits.Config,
        house_prices.Config,
        all_reduce.Config,
        bloom.Config,
        Flags,
        PlanFlags,
    )
    documented = {
        each for config in (*configs, ModelSettings, Settings) for each in flag_classes(config)
    }
    helps = [(each.__name__, docstring_parser.parse_from_object(each)) for each in documented]
    for name, parsed in helps + [
        (f.__name__, docstring_parser.parse(f.__doc__)) for f in (watch_run, export_model)
    ]:
        for flag in parsed.params:
            assert not re.search(r"\n[^A-Za-z]", flag.description), (
                f"tyro breaks the line there: {name}.{flag.arg_name}"
            )
    assert len(helps) > 15


def test_positional_arguments_are_no_flags_and_those_of_groups_have_the_names_of_both():
    @dataclass(frozen=True)
    class Inner:
        step: int = 3

    @dataclass(frozen=True)
    class Flat:
        port: int = 3

    def command(
        run: Annotated[Path, tyro.conf.Positional],
        budget: Inner,
        flat: Annotated[Flat, tyro.conf.arg(name="")],
    ) -> None: ...

    assert flag_names(command) == {"port": "--port", "budget.step": "--budget.step"}


def test_arguments_are_flags_where_a_command_calls_the_library_and_nowhere_else():
    say = lambda: (
        arg("keep"),
        arg(data=-1, tensor=3, num_heads=6),
        arg("data"),
        arg("gpu"),
        arg("no_flag"),
    )
    with given_by(GPT):
        assert say() == (
            "--keep",
            "--mesh.data -1, --mesh.tensor 3, num_heads=6",
            "--mesh.data",
            "--compile-for",
            "no_flag",
        )
        with given_by(flag_names(plan)):
            assert arg("gpu", data=4) == "--gpu, --data 4"
    assert say() == ("keep", "data=-1, tensor=3, num_heads=6", "data", "gpu", "no_flag")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["plan", "--model", "gpt2", "--gpu", "v100"], "error: --gpu must be one of a100-40gb"),
        (
            ["plan", "--model", "gpt2", "--zero", "7"],
            "error: --zero must be a ZeRO level, 0 to 3; got 7",
        ),
        (
            ["plan", "--model", "gpt2", "--memory-headroom", "2"],
            "error: --memory-headroom must be a share",
        ),
        (
            ["manifest", "--mesh.data", "3", "recipes/gpt.py"],
            "got --mesh.data 3, --mesh.stage 1, --mesh.tensor 1, 3 GPUs",
        ),
        (
            ["manifest", "--metrics-port", "6379", "recipes/gpt.py"],
            "error: --metrics-port must be from 1024 to 65535",
        ),
        (
            ["plan", "--model", "gpt2", "--network-efficiency", "0"],
            "figure; got --network-efficiency 0",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_command_tells_errors_with_the_flags_of_the_user(args, said, capsys):
    assert main(args) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["plan", "--model", "gpt2", "--gpu", "H100"], "got 'H100'. Did you mean 'h100'?"),
        (["plan", "--model", "gpt2", "--gpu", "h10"], "got 'h10'. Did you mean 'h100'?"),
        (["plan", "--model", "gpt2", "--gpu", "v9"], "got 'v9'. Choose the nearest one."),
        (["plan", "--model", "gpt2", "--schedule", "1F1B"], "got '1F1B'. Did you mean '1f1b'?"),
        (["plan", "--model", "gpt2", "--remat=yess"], "--remat: did you mean yes?"),
        (
            ["plan", "--model", "gpt2", "--remat", "full"],
            "full is written yes here: complete layers are recomputed",
        ),
        (
            ["train", "gpt", "--remat", "yes"],
            "--remat: yes is written full here: complete layers are recomputed",
        ),
        (
            ["train", "gpt", "--remat=false"],
            "--remat: false is written none here: nothing is recomputed but",
        ),
        (["manifest", "--kind", "jobsett", "recipes/gpt.py"], "--kind: did you mean jobset?"),
        (["manifest", "--kind", "JobSet", "recipes/gpt.py"], "--kind: did you mean jobset?"),
        (
            ["manifest", "--cpus", "1e2", "recipes/gpt.py"],
            "in digits alone; got '1e2'. Did you mean 100?",
        ),
        (["plan", "--model", "gpt2", "--nodes", "1.5"], "digits alone; got '1.5'.\n"),
        (
            ["manifest", "--mesh.data=8x", "recipes/gpt.py"],
            "--mesh.data: a whole number, such as 8, is written in digits",
        ),
        (
            ["manifest", "--service.port", "8k", "jaxpar", "serve"],
            "--service.port: a whole number, such as 8, is",
        ),
        (["tarin", "gpt"], "got 'tarin'. Did you mean train?"),
        (["train", "GPT"], "got 'GPT'. Did you mean gpt?"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_value_that_is_nearly_right_is_corrected(args, said, capsys):
    try:
        code = main(args)
    except SystemExit as end:
        code = end.code
    assert code == 2
    assert said in capsys.readouterr().err


def test_a_plan_that_is_refused_loads_neither_jax_nor_the_planner():
    """Their imports take seconds. This process has them already, so another one is asked."""
    wrong = [["--nodes", "0"], ["--gpu", "h1000"], ["--data", "0"], ["--schedule", "1f2b"]]
    program = (
        "import sys\nfrom jaxpar.__main__ import main\n"
        f"codes = [int(main(['plan', '--model', 'gpt2', *flags])) for flags in {wrong}]\n"
        "print(codes, {'jax', 'optax', 'jaxpar.planner'} & {*sys.modules})"
    )
    done = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, timeout=WAIT_SECONDS
    )
    assert done.stdout == "[2, 2, 2, 2] set()\n", done.stderr


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--checkpoint-every", "2", "--keep", "0"], "error: --keep must be at least 1; got 0"),
        (["--model", "gpt2-bytes", "--mesh.tensor", "8"], "got --mesh.tensor 8, num_heads=4"),
        (
            ["--mesh.data", "16"],
            "got --mesh.data 16, --mesh.stage 1, --mesh.tensor 1, which needs 16 devices",
        ),
        (["--data", "nowhere"], "error: --data must be a file or a folder; got nowhere"),
        (
            ["--tokenizer", "."],
            "error: --tokenizer must be a folder with a tokenizer.json; got none in .",
        ),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_recipe_tells_errors_with_the_flags_of_the_user(args, said, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        cli.run(
            gpt.main,
            gpt.Config,
            [*args, "--steps", "1", "--warmup-steps", "0", "--out-dir", str(tmp_path / "run")],
        )
    assert said in capsys.readouterr().err


def test_a_flag_given_by_its_shorter_name_is_not_taken_for_a_wrong_one(capsys):
    with pytest.raises(SystemExit):
        main(["train", "gpt", "--lr", "1e-3", "--remat=false"])
    said = capsys.readouterr().err
    assert "--remat: false is written none here" in said
    assert "--lr: did you mean" not in said
