"""The commands of `python -m jaxpar`: found in one table, each with its help, each ending with the exit code that it says."""

import subprocess
import sys

import pytest

from jaxpar.__main__ import COMMANDS, command, main, usage
from jaxpar.commands import train
from jaxpar.runtime.exit_codes import ExitCode
from tests.support.waiting import WAIT_SECONDS


def test_every_command_has_a_line_of_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name, about in COMMANDS.items():
        assert callable(command(name))
        assert f"{name} " in usage()
        assert about in usage()


@pytest.mark.parametrize("args", [[], ["--help"], ["-h"]])
def test_without_a_command_the_commands_are_listed(args, capsys, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["jaxpar"])
    assert main(args) == ExitCode.DONE
    assert capsys.readouterr().out.strip() == usage()


def test_a_mistyped_command_is_corrected(capsys):
    assert main(["docter"]) == ExitCode.BAD_CONFIG
    assert "got 'docter'. Did you mean doctor?" in capsys.readouterr().err


def test_an_unknown_flag_ends_with_code_2(capsys):
    with pytest.raises(SystemExit) as stop:
        main(["plot", "runs/a", "--metrik", "loss"])
    assert stop.value.code == ExitCode.BAD_CONFIG
    assert "--metric" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("command", "needs", "example"),
    [
        ("plan", "--model STR", "plan --model llama3-8b --nodes 2 --gpu h100"),
        (
            "launch",
            "-n INT, --num-processes INT",
            "launch -n 2 --devices-per-process 4 recipes/gpt.py --mesh.data 8",
        ),
        ("export", "DIR", "export runs/gpt exported"),
        ("watch", "RUN", "watch runs/gpt"),
        ("serve", "RUN", "serve runs/gpt"),
    ],
)
def test_a_command_without_what_it_needs_says_so_with_an_example(
    command, needs, example, capsys, monkeypatch
):
    monkeypatch.setattr(sys, "argv", ["/usr/bin/jaxpar"])
    with pytest.raises(SystemExit) as stop:
        main([command])
    assert stop.value.code == ExitCode.BAD_CONFIG
    said = capsys.readouterr().err
    assert f"Missing from jaxpar {command}" in said
    assert needs in said
    assert said.endswith(f"for example: jaxpar {example}\n")


@pytest.mark.parametrize(
    ("script", "called"),
    [("/a/bin/jaxpar", "jaxpar"), ("/a/jaxpar/__main__.py", "python -m jaxpar")],
)
def test_usages_have_the_command_by_which_the_user_called(script, called, monkeypatch):
    monkeypatch.setattr(sys, "argv", [script])
    assert usage().startswith(
        f"usage: {called} <command> [--help] ...\n       {called} --version\n"
    )
    assert train.usage().startswith(f"usage: {called} train <recipe>")


def test_a_reader_of_the_list_that_is_gone_is_no_error(monkeypatch):
    class Gone:
        def write(self, _):
            raise BrokenPipeError

    monkeypatch.setattr(sys, "stdout", Gone())
    assert main(["--help"]) == ExitCode.DONE


def test_it_runs_as_a_module(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    monkeypatch.setattr(sys, "argv", ["__main__.py"])
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar", "--help"],
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == usage()
