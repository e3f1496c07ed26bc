"""Errors of the library, which name its parameters, as the commands and the recipes tell them: with the flags of the user."""

from dataclasses import dataclass
from pathlib import Path
from typing import Annotated

import all_reduce
import bloom
import gpt
import pytest
import tyro

from jaxpar.__main__ import main
from jaxpar.commands import recipe as cli
from jaxpar.commands.flag_names import errors_in_flags, flag_names, in_flags
from jaxpar.commands.manifest import Flags
from jaxpar.commands.plan import plan

GPT = flag_names(gpt.Config)


def test_flags_are_named_as_tyro_names_them():
    assert flag_names(plan)["json"] == ("--json",), "its parameter is json_"
    assert flag_names(plan)["gpus_per_node"] == ("--gpus-per-node",)
    assert flag_names(Flags)["tensor"] == ("--mesh.tensor",)
    assert GPT["data"] == ("--data", "--mesh.data"), "the text, and the axis"
    assert GPT["gpu"] == ("--compile-for",)
    assert flag_names(plan)["gpu"] == ("--gpu",)
    assert flag_names(all_reduce.Config)["num_hidden"] == ("--hidden-layers",)
    assert "gpu" not in flag_names(bloom.Config), "--gpu, to plan for, or --compile-for"


def test_positional_arguments_and_inner_groups_with_checks_of_their_own_are_no_flags():
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

    assert flag_names(command) == {"port": ("--port",)}


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("keep must be at least 1; got 0. Give a number.", "--keep must be at least 1; got 0. Give a number."),
        (
            "got 4 layers for stage=8. Choose less, or give layers_per_virtual_stage, with 0 for none.",
            "got 4 layers for --mesh.stage 8. Choose less, or give --layers-per-virtual-stage, with 0 for none.",
        ),
        ("gpu must be one of h100; got 'keep'.", "--compile-for must be one of h100; got 'keep'."),
        (
            "the mesh must fit; got data=-1, stage=1, tensor=3 with 8 devices.",
            "the mesh must fit; got --mesh.data -1, --mesh.stage 1, --mesh.tensor 3 with 8 devices.",
        ),
        (
            "the tensor axis must divide; got num_heads=6, tensor=4. Choose tensor from 1, 2.",
            "the tensor axis must divide; got num_heads=6, --mesh.tensor 4. Choose --mesh.tensor from 1, 2.",
        ),
        ("data must come from plain files; got a.", "--data must come from plain files; got a."),
        (
            "a row must fit; got seq=9. Choose a smaller seq, or",
            "a row must fit; got --seq 9. Choose a smaller --seq, or",
        ),
        ("zero must be 0 to 3; got 7. Write zero=0.", "--zero must be 0 to 3; got 7. Write --zero 0."),
        ("no; got sequence_parallel=True.", "no; got --sequence-parallel."),
    ],
)
def test_parameters_become_flags(said, told):
    assert in_flags(said, GPT) == told


@pytest.mark.parametrize(
    "said",
    [
        "--keep must be at least 1; got --keep 0, --mesh.data 3. Choose --keep 2.",
        "a step needs zero, as in jaxpar.value_and_grad(zero=3); got a file runs/seed=3.txt",
        "a run must continue; got learning_rate=0.1 (saved: 0.2) for 3. Allow these: --allow-change learning_rate",
        "a seed is a number; got 'steps=3', num_heads=6, max_steps=3",
        "the data must be there; got schedule=None",
        "",
    ],
)
def test_other_words_stay(said):
    assert in_flags(said, GPT) == said
    assert in_flags(said, {}) == said


def test_an_error_stays_of_its_kind_and_others_stay_as_they_are():
    with pytest.raises(TypeError, match=r"^--gpu must be text; got 3\.$"), errors_in_flags(plan):
        raise TypeError("gpu must be text; got 3.")
    with pytest.raises(UnicodeDecodeError), errors_in_flags(plan):
        b"\xff".decode()
    with pytest.raises(KeyError, match="gpu must"), errors_in_flags(plan):
        raise KeyError("gpu must be there")


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["plan", "--model", "gpt2", "--gpu", "v100"], "error: --gpu must be one of a100-40gb"),
        (["plan", "--model", "gpt2", "--zero", "7"], "error: --zero must be a ZeRO level, 0 to 3; got 7"),
        (["plan", "--model", "gpt2", "--memory-headroom", "2"], "error: --memory-headroom must be a share"),
        (
            ["manifest", "--mesh.data", "3", "recipes/gpt.py"],
            "got --mesh.data 3, --mesh.stage 1, --mesh.tensor 1, 3 GPUs",
        ),
        (["manifest", "--metrics-port", "6379", "recipes/gpt.py"], "error: --metrics-port must be from 1 to 65535"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_command_tells_errors_with_the_flags_of_the_user(args, said, capsys):
    assert main(args) == 2
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--checkpoint-every", "2", "--keep", "0"], "error: --keep must be at least 1; got 0"),
        (["--model", "gpt2-bytes", "--mesh.tensor", "8"], "got --mesh.tensor 8, num_heads=4"),
        (["--mesh.data", "16"], "got --mesh.data 16, --mesh.stage 1, --mesh.tensor 1, which needs 16 devices"),
        (["--data", "nowhere"], "nowhere"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else None,
)
def test_a_recipe_tells_errors_with_the_flags_of_the_user(args, said, capsys, tmp_path):
    with pytest.raises(SystemExit, match="2"):
        cli.run(
            gpt.main, gpt.Config, [*args, "--steps", "1", "--warmup-steps", "0", "--out-dir", str(tmp_path / "run")]
        )
    assert said in capsys.readouterr().err
