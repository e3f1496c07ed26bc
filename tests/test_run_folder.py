"""A folder with the results of a run: a new run refuses it; with --overwrite it deletes what recipes write, nothing else."""

import json
import os

import pytest

import house_prices
from jaxpar.commands import recipe as cli
from jaxpar.run import Run
from jaxpar.run import folder as run_folder
from tests.support.flags import replaced

FEW = ("--steps", "4", "--batch-size", "10")
OTHER = ("--steps", "4", "--batch-size", "6")


@pytest.fixture(autouse=True)
def _without_the_end(monkeypatch):
    monkeypatch.setattr(house_prices, "conclude", lambda *_: None)
    monkeypatch.setattr(house_prices, "draw_descent", lambda *_: None)


def run(folder, *flags):
    cli.run(house_prices.main, house_prices.Config, replaced(["--out-dir", str(folder), *flags]))


def refused(capsys, folder, *flags):
    """Returns what a run says that must be refused before anything is compiled or written."""
    before = contents(folder)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Run, "compile", lambda *_: pytest.fail("compiled"))
        with pytest.raises(SystemExit, match="2"):
            run(folder, *flags)
    assert contents(folder) == before
    return capsys.readouterr().err


def contents(folder):
    """Returns the files of a folder with their bytes, without the lease."""
    files = (path for path in folder.rglob("*") if path.is_file() and ".lease" not in path.parts)
    return {path.relative_to(folder).as_posix(): path.read_bytes() for path in files}


def first_loss(folder):
    return json.loads((folder / "metrics.jsonl").read_text().splitlines()[0])["loss"]


@pytest.mark.parametrize("name", ["metrics.jsonl", ".lease", "checkpoints", "checkpoints/3/state"])
def test_files_of_another_user_are_named_before_anything_is_compiled(
    tmp_path, capsys, monkeypatch, name
):
    (tmp_path / name).mkdir(parents=True)
    access = os.access
    is_other = lambda path, mode: path == tmp_path / name and mode != os.F_OK
    monkeypatch.setattr(
        os, "access", lambda path, mode, **_: not is_other(path, mode) and access(path, mode)
    )
    said = refused(capsys, tmp_path, *FEW)
    assert f"what is in its --out-dir; got {tmp_path / name} of user " in said
    assert f"chown -R {os.geteuid()} {tmp_path}, or go on as that one." in said


@pytest.mark.full
def test_a_run_writes_only_files_that_overwrite_would_delete(tmp_path):
    run(tmp_path, *FEW, "--checkpoint-every", "2", "--tensorboard", "--profile", "1:3")
    (tmp_path / "checkpoints" / "saving-6").mkdir()
    (tmp_path / "checkpoints" / "2").rename(tmp_path / "checkpoints" / "2.bad")
    assert len(contents(tmp_path)) > 10
    run_folder.delete_run(tmp_path)
    assert not contents(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == [".lease"], "no folder is left either"


def test_results_are_kept_unless_the_run_may_overwrite_them(tmp_path, capsys):
    run(tmp_path, *FEW)
    said = refused(capsys, tmp_path, *OTHER)
    assert "a new run needs a folder without results; got metrics.jsonl of 4 steps in" in said
    assert "Choose another --out-dir, or add --overwrite, which deletes the earlier run." in said
    was = first_loss(tmp_path)
    run(tmp_path, *OTHER, "--overwrite")
    assert f"deleted: the earlier run in {tmp_path}" in capsys.readouterr().out
    assert first_loss(tmp_path) != was
    assert json.loads((tmp_path / "config.json").read_text())["batch_size"] == 6


@pytest.mark.parametrize("flags", [(), ("--overwrite",)])
def test_the_folder_of_a_model_is_no_folder_of_a_run(tmp_path, capsys, flags):
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    said = refused(capsys, tmp_path, *FEW, *flags)
    assert (
        "--out-dir must be a folder of runs, since a run writes its flags to config.json; got"
        in said
    )
    assert (
        f"with a config.json, that of a model. Name another folder, such as {tmp_path}/run." in said
    )


def test_a_run_writes_apart_from_what_it_reads_and_from_its_model(tmp_path):
    texts, out = tmp_path / "texts", tmp_path / "run"
    texts.mkdir()
    (texts / "a.txt").touch()
    run_folder.check_apart(out, [texts, out / "a.txt"], out / "tuned")
    run_folder.check_apart(texts, [texts / "a.txt"], None)
    (tmp_path / "link").symlink_to(texts)
    for path in (texts, texts / "runs", tmp_path / "link" / "runs"):
        with pytest.raises(
            ValueError, match=r"out_dir must be outside of the folder of data files, all"
        ):
            run_folder.check_apart(path, [texts], None)
    with pytest.raises(
        ValueError,
        match=r"save_hf must be outside of the folder of data files, all of whose files are learned",
    ):
        run_folder.check_apart(out, [texts], texts / "tuned")
    with pytest.raises(ValueError, match="token_cache must be outside of the folder of data files"):
        run_folder.check_apart(out, [texts], None, texts / "cache")
    for name in (".", "adapter", "model", "checkpoints"):
        with pytest.raises(
            ValueError,
            match=r"save_hf must be a folder of its own; got .*, where the run writes other",
        ):
            run_folder.check_apart(out, [texts], out / name)


def test_files_of_others_stay(tmp_path):
    run(tmp_path, *FEW, "--checkpoint-every", "2")
    theirs = (
        "notes.txt",
        "hf/config.json",
        "model/model.safetensors",
        "checkpoints/README",
        "checkpoints/4-best/a",
    )
    for name in theirs:
        (tmp_path / name).parent.mkdir(exist_ok=True)
        (tmp_path / name).write_text("mine")
    elsewhere = tmp_path.with_name("elsewhere")
    elsewhere.mkdir()
    (elsewhere / "events.out.tfevents.1.a").write_text("mine")
    (tmp_path / "tensorboard").symlink_to(elsewhere)
    run(tmp_path, *OTHER, "--overwrite")
    assert {name: contents(tmp_path).get(name) for name in theirs} == dict.fromkeys(theirs, b"mine")
    assert not (tmp_path / "checkpoints" / "4").exists()
    assert (elsewhere / "events.out.tfevents.1.a").exists(), "a link is not followed"


def test_nothing_is_deleted_before_the_new_run_is_compiled(tmp_path, monkeypatch):
    run(tmp_path, *FEW)
    before = contents(tmp_path)

    def fail(*_):
        raise RuntimeError("out of memory")

    monkeypatch.setattr(Run, "compile", fail)
    with pytest.raises(RuntimeError, match="out of memory"):
        run(tmp_path, *OTHER, "--overwrite")
    assert contents(tmp_path) == before


@pytest.mark.full
def test_checkpoints_are_continued_or_overwritten(tmp_path, capsys):
    run(tmp_path, *FEW, "--checkpoint-every", "2")
    said = refused(capsys, tmp_path, *FEW)
    assert "got one of step 4 in" in said
    assert (
        "Continue it with --resume, choose another --out-dir, or add --overwrite, which deletes the earlier run"
        in said
    )
    said = refused(capsys, tmp_path, *FEW, "--overwrite", "--resume")
    assert (
        "--overwrite deletes the earlier run, which --resume continues; got both. Leave one of the two out."
        in said
    )
    run(tmp_path, *OTHER[2:], "--steps", "2", "--overwrite", "--checkpoint-every", "2")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["2"]
    run(tmp_path, *FEW, "--overwrite")
    assert not (tmp_path / "checkpoints").exists()


@pytest.mark.full
def test_a_dry_run_needs_no_empty_folder_and_deletes_nothing(tmp_path):
    run(tmp_path, *FEW, "--checkpoint-every", "2")
    before = contents(tmp_path)
    run(tmp_path, *FEW, "--dry-run")
    run(tmp_path, *FEW, "--dry-run", "--overwrite")
    assert contents(tmp_path) == before


def test_a_run_that_did_no_step_left_no_results(tmp_path):
    run(tmp_path, *FEW)
    (tmp_path / "metrics.jsonl").write_text("")
    run(tmp_path, *OTHER)
    assert json.loads((tmp_path / "config.json").read_text())["batch_size"] == 6


def test_a_restarted_run_begins_anew_in_its_own_folder_and_no_other(tmp_path, capsys, monkeypatch):
    run(tmp_path, *FEW)
    monkeypatch.setenv("JAXPAR_RESUME", "if-any")
    run(tmp_path, *FEW, "--mesh.data", "2")
    assert "got metrics.jsonl of 4 steps" in refused(capsys, tmp_path, *OTHER)


def test_a_value_of_the_variable_of_restarts_that_means_nothing_is_refused(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("JAXPAR_RESUME", "always")
    assert "JAXPAR_RESUME must be if-any or not set; got 'always'." in refused(
        capsys, tmp_path, *FEW
    )
    assert not contents(tmp_path)
    monkeypatch.setenv("JAXPAR_RESUME", "")
    run(tmp_path, *FEW)


def test_a_restarted_run_continues_from_its_checkpoint_although_it_may_overwrite(
    tmp_path, capsys, monkeypatch
):
    run(tmp_path, *FEW, "--overwrite", "--checkpoint-every", "2")
    monkeypatch.setenv("JAXPAR_RESUME", "if-any")
    run(tmp_path, *FEW, "--overwrite", "--checkpoint-every", "2")
    assert "resumed from step 4" in capsys.readouterr().out


def test_a_run_that_lost_its_folder_deletes_nothing_in_it(tmp_path, monkeypatch):
    from jaxpar.runtime.lease import LostError

    run(tmp_path, *FEW)
    before = contents(tmp_path)
    compile_step = Run.compile

    def compiled_for_long(*args):
        for path in (tmp_path / ".lease").iterdir():
            path.rename(path.with_name("99.json"))
        (tmp_path / ".lease" / "99.json").write_text("{}")
        return compile_step(*args)

    monkeypatch.setattr(Run, "compile", compiled_for_long)
    with pytest.raises(LostError, match="another run has taken"):
        run(tmp_path, *OTHER, "--overwrite")
    assert contents(tmp_path) == before
