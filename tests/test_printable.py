"""Names and values from files are printed with the control characters of a terminal escaped."""

import io
import json
import sys

import pytest

from jaxpar.__main__ import main as jaxpar_main
from jaxpar.checkpoint.folder import differences
from jaxpar.checkpoint.manifest import ArrayRecord
from jaxpar.checkpoint.restore import check_arrays_match, check_config
from jaxpar.commands.runs import read_curve
from jaxpar.models import trained_linear
from jaxpar.run.messages import say, stop
from jaxpar.runtime.output import printable, printable_lines, seconds_shown
from tests.support.waiting import wait_until

ESCAPE = "\x1b]0;owned\x07\x1b[2J"


@pytest.mark.parametrize(
    "character",
    ["\x00", "\x07", "\x1b", "\r", "\x7f", "\x85", "\x9b", "\u200f", "\u202e", "\u2028", "\ud800"],
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
    say(f"a column {ESCAPE}")
    with pytest.raises(SystemExit):
        stop(2, f"a file {ESCAPE}")
    said = capsys.readouterr()
    assert said.out.strip().isprintable()
    assert said.err.strip().isprintable()


@pytest.mark.parametrize(
    "text", ["[" * 100_000, "[]", "{}", '{"features": [1], "target": "a", "seen": []}']
)
def test_a_model_that_no_run_has_written_is_refused(tmp_path, text):
    (tmp_path / trained_linear.MODEL).write_text(text)
    with pytest.raises(ValueError, match="must be one that a run has written"):
        trained_linear.describe_prediction(tmp_path, (1.0,))


@pytest.mark.parametrize("encoding", ["latin-1", "ascii"])
def test_characters_that_an_encoding_lacks_end_no_run_and_no_command(
    encoding, tmp_path, monkeypatch, capsys
):
    (tmp_path / "metrics.jsonl").write_text('{"step": 0, "loss": 2.0}\n{"step": 1, "loss": 1.0}\n')
    printed = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding))
    say("a sample \ufffd of a byte model")
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(printed, encoding=encoding))
    assert jaxpar_main(["plot", str(tmp_path), "--out", str(tmp_path / "loss.png")]) == 0
    sys.stdout.flush()
    assert printed.getvalue().startswith(b"a sample ? of a byte model\n")
    assert b"??\nwrote " in printed.getvalue()
    assert (tmp_path / "loss.png").exists()


def test_a_job_that_an_encoding_cannot_hold_is_refused_and_not_written_otherwise(
    monkeypatch, capsys
):
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(io.BytesIO(), encoding="latin-1"))
    job = ["manifest", "--kind", "sbatch", "--mesh.data", "8"]
    assert jaxpar_main([*job, "recipes/gpt.py", "--out-dir", "/\u8dd1"]) == 2
    assert "must have the characters of its encoding, latin-1; got \u8dd1. Set PYTHONUTF8=1" in (
        capsys.readouterr().err
    )


class Terminal(io.StringIO):
    def isatty(self):
        return True


def test_a_long_search_shows_its_seconds_on_a_terminal_and_clears_them(monkeypatch):
    shown = Terminal()
    monkeypatch.setattr(sys, "stderr", shown)
    with seconds_shown("searching for plans", every=0.01):
        wait_until(lambda: "searching for plans: 0 s" in shown.getvalue())
    assert shown.getvalue().endswith("\r\x1b[K"), "the line is gone"
    for stream, every in ((Terminal(), 60), (io.StringIO(), 0)):
        monkeypatch.setattr(sys, "stderr", stream)
        with seconds_shown("searching for plans", every=every):
            pass
        assert stream.getvalue() == ""
