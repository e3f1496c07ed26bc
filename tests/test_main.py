"""The commands of `python -m jaxpar`: found in one table, each with its help, each ending with the exit code that it says."""

import importlib
import subprocess
import sys

import pytest
from waiting import WAIT_SECONDS

from jaxpar.__main__ import COMMANDS, main, usage
from jaxpar.runtime.exit_codes import ExitCode


def test_every_command_has_a_line_of_help(monkeypatch):
    monkeypatch.setenv("COLUMNS", "200")
    for name, about in COMMANDS.items():
        assert callable(importlib.import_module(f"jaxpar.commands.{name}").main)
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


def test_it_runs_as_a_module(monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    done = subprocess.run(
        [sys.executable, "-m", "jaxpar", "--help"], capture_output=True, text=True, check=False, timeout=WAIT_SECONDS
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == usage()
