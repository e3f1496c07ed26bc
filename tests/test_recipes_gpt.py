"""recipes/gpt.py, run as a user runs it: the same numbers on every mesh, what it writes, what it refuses."""

import ast
import contextlib
import dataclasses
import errno
import io
import itertools
import json
import os
import re
import shlex
import shutil
import urllib.request
from functools import partial
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import gpt
import jaxpar
from jaxpar import fp8, huggingface
from jaxpar.__main__ import main as jaxpar_main
from jaxpar.commands import recipe as cli
from jaxpar.data.text import Windows, load_text
from jaxpar.fields import given_by
from jaxpar.metrics.exporters import PrometheusExporter
from jaxpar.models import transformer
from jaxpar.models.transformer import presets
from jaxpar.params import abstract_params, init_params, stack_layers
from jaxpar.run import (
    evaluation,
    language_data,
    language_model,
    model_files,
    optimizers,
    save_folder,
)
from jaxpar.run.evaluation import Evaluation
from jaxpar.run.folder import own_files
from jaxpar.run.language_model import ModelFlags
from jaxpar.run.save_folder import SaveFolder
from jaxpar.runtime import lease as leases
from jaxpar.runtime.launch import free_port
from jaxpar.runtime.lease import HeldError, released_at_end, start_of, this_process
from jaxpar.tensor_parallel import TRANSFORMER_RULES
from tests.support import doc_pages, oracle
from tests.support.flags import replaced
from tests.support.leases import put
from tests.support.oracle import assert_same, assert_same_bits
from tests.support.real_runs import curve, read_lines
from tests.support.tiny_transformer import LLAMA as LLAMA_BLOCK
from tests.support.tiny_transformer import SHAPE, make_params
from tests.support.waiting import WAIT_SECONDS

FEW_STEPS = 16
IN_THREE_DIMENSIONS = ["--mesh.data", "2", "--mesh.stage", "2", "--mesh.tensor", "2"]
SMALL = [
    "--seq",
    "16",
    "--steps",
    str(FEW_STEPS),
    "--warmup-steps",
    "2",
    "--eval-every",
    "8",
    "--eval-rows",
    "16",
]
SMALL += ["--lr", "0.01"]
HALF, LATE = str(FEW_STEPS // 2), str(FEW_STEPS * 3 // 4)


@pytest.fixture(scope="module", autouse=True)
def _narrow():
    """The model of a run without --model is a quarter as wide: programs that are not optimized take long to update params."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(
            presets.PRESETS,
            "llama-bytes",
            transformer.preset("llama-bytes", embed_dim=32, mlp_dim=96, num_kv_heads=2),
        )
        yield


@pytest.fixture(scope="module")
def text(tmp_path_factory):
    """A file that a model can learn in a few steps."""
    path = tmp_path_factory.mktemp("text") / "alphabet.txt"
    path.write_text("abcdefghijklmnopqrstuvwxyz, " * 400)
    return path


@pytest.fixture(scope="module")
def run(text):
    """Runs gpt.py in this process, which has 8 devices, without its sample and pictures unless it is to draw them."""

    def run(out_dir, *flags, draws=False):
        with pytest.MonkeyPatch.context() as patch:
            if not draws:
                patch.setattr(gpt, "conclude", lambda *_: None)
            cli.run(
                gpt.main,
                gpt.Config,
                replaced(["--data", str(text), "--out-dir", str(out_dir), *SMALL, *flags]),
            )

    return run


@pytest.fixture(scope="module")
def trained(run, tmp_path_factory):
    """The folder of a run in three dimensions, with a checkpoint at half time."""
    folder = tmp_path_factory.mktemp("gpt")
    run(folder, *IN_THREE_DIMENSIONS, "--checkpoint-every", HALF, draws=True)
    return folder


@pytest.fixture(scope="module")
def timed(run, tmp_path_factory):
    """The folder of a run on one device, each of whose evaluations takes an hour of the clock, and what it printed."""
    folder, printed = tmp_path_factory.mktemp("gpt"), io.StringIO()
    evaluate, late, ticks = Evaluation.__call__, [], itertools.count()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(Evaluation, "__call__", lambda *args: late.append(3600.0) or evaluate(*args))
        patch.setattr(
            "jaxpar.metrics.log.time", SimpleNamespace(perf_counter=lambda: next(ticks) + sum(late))
        )
        run(folder)
    return folder, printed.getvalue()


@pytest.fixture(scope="module")
def one_device(timed):
    return curve(timed[0])


@pytest.mark.full
def test_three_dimensions_have_the_loss_curve_of_one_device(trained, one_device):
    assert_same(curve(trained), one_device, within=1e-4)


@pytest.mark.slow
def test_a_run_in_fp8_says_so_learns_as_much_and_goes_on_in_fp8_alone(
    run, tmp_path, one_device, monkeypatch, capsys
):
    monkeypatch.setattr(fp8, "LEAST_WIDTH", 16)
    flags = [*IN_THREE_DIMENSIONS, "--products", "fp8", "--checkpoint-every", HALF]
    run(tmp_path, *flags)
    assert (
        "FP8: 4 of 4 products of a layer, with w_qkv 32 x 48, w_out 32 x 32, w_up 32 x 192"
        in capsys.readouterr().out
    )
    got, plain = ([loss for loss, _ in each] for each in (curve(tmp_path), one_device))
    assert got != plain, "values are rounded"
    assert_same(got, plain, within=0.05)
    with pytest.raises(SystemExit):
        run(tmp_path, *flags[:-2], "--products", "compute", "--resume", "--steps", "20")
    assert "products" in capsys.readouterr().err
    assert jaxpar_main(["export", str(tmp_path), str(tmp_path / "exported")]) == 0
    assert "fp8" not in (tmp_path / "exported/config.json").read_text()


@pytest.mark.slow
@pytest.mark.parametrize(
    "flags",
    [
        [*IN_THREE_DIMENSIONS, "--sequence-parallel", "--remat", "full", "--schedule", "1f1b"],
        ["--mesh.data", "2", "--mesh.tensor", "4"],  # twice its key and value heads
        ["--mesh.data", "4", "--mesh.tensor", "2", "--zero", "2", "--remat", "dots"],
        ["--mesh.context", "4", "--mesh.stage", "2", "--zero", "3"],
        ["--mesh.context", "4", "--mesh.data", "2", "--zero", "1"],
    ],
    ids=[
        "sequence-parallel",
        "copied-heads",
        "recomputed",
        "split-sequences-in-stages",
        "split-sequences",
    ],
)
def test_flags_that_save_memory_keep_the_loss_curve(run, tmp_path, one_device, flags):
    run(tmp_path, *flags)
    assert_same(curve(tmp_path), one_device, within=1e-4)


@pytest.mark.full
def test_no_step_s_time_includes_an_evaluation(timed):
    folder, printed = timed
    lines = read_lines(folder)
    assert [line["step"] for line in lines if "test_loss" in line] == [7, 15]
    assert all(0 < line["step_seconds"] < 3600 for line in lines)
    median = float(np.median([line["step_seconds"] for line in lines]))
    said = f"; a step takes {median * 1e3:.0f} ms (median), {16 * 16 / median:,.0f} tokens/s\n"
    assert re.search(
        r"^16 steps in [\d.]+ s, evaluations included" + re.escape(said), printed, re.M
    )


def go_on(run, folder, step, out_dir, *flags):
    """Goes on from a checkpoint of a run in a folder of its own."""
    shutil.copytree(folder / "checkpoints" / step, out_dir / "checkpoints" / step)
    run(out_dir, *flags, "--resume")


def write_until_killed(folder, flags):
    """Leaves a folder as a run does that is killed when its first file of weights is there."""
    saves = SaveFolder(folder, flags)
    saves.begin()
    weights = folder / "model.safetensors"
    weights.write_text("of this run")
    saves.note(weights.name, weights)


def test_a_model_that_a_killed_run_began_to_write_is_written_anew_when_it_is_resumed(tmp_path):
    folder, new = tmp_path / "hf", gpt.Config.of(out_dir=tmp_path, steps=4).common
    SaveFolder(folder, new).check()
    write_until_killed(folder, new)
    for name in ("model.safetensors.part", ".tmpoH0azu", "config.json", "a"):
        (folder / name).touch()
    resumed = dataclasses.replace(new, resume=True)
    others = [
        new,
        dataclasses.replace(resumed, steps=5),
        dataclasses.replace(resumed, out_dir=folder),
    ]
    for other in others:
        with pytest.raises(
            ValueError, match=r"a model is written to a folder without one; got .*hf"
        ):
            SaveFolder(folder, other).check()
    SaveFolder(folder, resumed).check()
    SaveFolder(folder, resumed).begin()
    assert sorted(path.name for path in folder.iterdir()) == [".save_hf.json", "a"]


def write_small_model(folder, seed):
    shape = transformer.preset("gpt2-bytes", num_layers=1)
    params = jax.tree.map(
        lambda leaf: np.full(leaf.shape, seed, leaf.dtype),
        abstract_params(transformer.param_table(shape)),
    )
    huggingface.write_model(folder, shape, params)


def test_a_run_that_is_resumed_writes_over_no_model_but_its_own(tmp_path):
    folder, new = tmp_path / "hf", gpt.Config.of(out_dir=tmp_path / "a", steps=4).common
    new.out_dir.mkdir()
    resumed = dataclasses.replace(new, resume=True)
    saves = SaveFolder(folder, new)
    saves.begin()
    write_small_model(folder, 1)
    saves.end()
    assert not (folder / ".save_hf.json").exists()
    SaveFolder(folder, resumed).claim()  # its own, whole
    with released_at_end():
        pass
    assert not (folder / ".lease").exists(), "a model has no lease of a run that has ended"
    folder.rename(tmp_path / "moved")
    SaveFolder(folder, resumed).check()
    write_small_model(folder, 2)
    for call in ("check", "claim", "begin"):
        with released_at_end(), pytest.raises(ValueError, match="to a folder without one; got"):
            getattr(SaveFolder(folder, resumed), call)()
    huggingface.read_config(folder)

    begun = dataclasses.replace(new, out_dir=tmp_path / "b")  # killed while it wrote
    begun.out_dir.mkdir()
    folder = tmp_path / "begun"
    write_until_killed(folder, begun)
    SaveFolder(folder, dataclasses.replace(begun, resume=True)).check()
    shutil.rmtree(folder)
    folder.mkdir()
    (folder / "model.safetensors").touch()  # of another run, which is writing it
    with pytest.raises(ValueError, match="to a folder without one; got"):
        SaveFolder(folder, dataclasses.replace(begun, resume=True)).check()
    shutil.rmtree(folder)
    third = dataclasses.replace(new, out_dir=tmp_path / "c")
    third.out_dir.mkdir()
    write_until_killed(folder, third)
    with pytest.raises(ValueError, match="to a folder without one; got"):
        SaveFolder(folder, dataclasses.replace(begun, resume=True)).check()


def test_a_model_that_came_where_a_killed_run_had_written_is_not_that_run_s(tmp_path):
    """`rm tuned/*` leaves the hidden note of the run that was killed."""
    folder, new = tmp_path / "hf", gpt.Config.of(out_dir=tmp_path / "a", steps=4).common
    new.out_dir.mkdir()
    resumed = dataclasses.replace(new, resume=True)
    write_until_killed(folder, new)
    (folder / "model.safetensors").unlink()
    SaveFolder(folder, resumed).begin()  # there is no model
    for name, text in [("config.json", "{}"), ("model.safetensors", "of another run")]:
        (folder / name).write_text(text)
        for call in ("check", "claim", "begin"):
            with released_at_end(), pytest.raises(ValueError, match="to a folder without one; got"):
                getattr(SaveFolder(folder, resumed), call)()
        assert (folder / name).read_text() == text


def test_a_run_knows_each_file_of_weights_as_its_own_once_it_has_its_name(tmp_path, monkeypatch):
    shape = transformer.preset("gpt2-bytes", num_layers=2)
    params = init_params(transformer.param_table(shape), jax.random.key(0))
    new = gpt.Config.of(out_dir=tmp_path / "a", steps=4).common
    resumed, folder = dataclasses.replace(new, resume=True), tmp_path / "hf"
    new.out_dir.mkdir()
    begun, replace = [], os.replace

    def replace_and_look(source, target):
        replace(source, target)
        begun.append((Path(target).name, SaveFolder(folder, resumed).is_begun()))

    saves = SaveFolder(folder, new)
    saves.begin()
    monkeypatch.setattr(os, "replace", replace_and_look)
    write = partial(huggingface.write_model, max_file_bytes=10**6, note=saves.note)
    write(folder, shape, params)
    names = [name for name, _ in begun]
    assert sum(name.endswith(".safetensors") for name in names) > 1
    assert names[-1] == "config.json"
    assert all(known for _, known in begun), begun


@pytest.mark.parametrize("process", [0, 1])
def test_all_processes_know_that_the_first_cannot_note_what_it_writes(
    tmp_path, monkeypatch, capsys, process
):
    new, folder = gpt.Config.of(out_dir=tmp_path / "a", steps=4).common, tmp_path / "hf"
    (new.out_dir / "save_hf.json").mkdir(parents=True)  # which process 0 cannot write over
    told = []

    def exchange(name, value):
        told.append((name, value))
        is_told = process == 1 and name == "model to begin"
        return [(errno.EACCES, "Permission denied", "a/save_hf.json") if is_told else value]

    monkeypatch.setattr(save_folder, "exchange", exchange)
    monkeypatch.setattr(jax, "process_index", lambda: process)
    monkeypatch.setattr(jax, "process_count", lambda: 2)
    kept = []
    with pytest.raises(SystemExit, match="74"):
        SaveFolder(folder, new).save(None, None, described_by=folder, keep=lambda: kept.append(1))
    assert kept == [1]
    assert "model to begin" in dict(told)
    assert process == 1 or "save_hf.json': the model was not written" in capsys.readouterr().err


def test_an_error_of_any_kind_of_the_first_process_is_told_to_those_that_wait_for_it(
    tmp_path, monkeypatch
):
    """As where the note of what it wrote is damaged."""
    told = []

    def begin(saves):
        raise ValueError("a note must be JSON; got {. Remove it.")

    monkeypatch.setattr(SaveFolder, "_begin", begin)
    monkeypatch.setattr(save_folder, "exchange", lambda *it: told.append(it) or [it[1]])
    new = gpt.Config.of(out_dir=tmp_path, steps=4).common
    with pytest.raises(save_folder.NotBegunError, match="a note must be JSON"):
        SaveFolder(tmp_path / "hf", new).begin()
    assert dict(told)["model to begin"] == ("a note must be JSON; got {. Remove it",)


def test_one_run_at_a_time_claims_the_folder_of_its_model(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(leases, "PATIENCE_SECONDS", 0.0)
    held, common = tmp_path / "held", gpt.Config.of(out_dir=tmp_path / "a", steps=4).common
    other = os.getppid()
    put(
        held, dataclasses.replace(this_process(), pid=other, start=start_of(other), token="another")
    )
    with given_by({"save_hf": "--save-hf"}), pytest.raises(HeldError) as refused:
        SaveFolder(held, common).claim()
    assert f"held by process {other} on" in str(refused.value)
    assert str(refused.value).endswith("Give another folder (--save-hf), or stop that run first.")
    with released_at_end():
        SaveFolder(tmp_path / "hf", common).claim()
        assert (tmp_path / "hf/.lease").is_dir()
    assert not (tmp_path / "hf").exists(), "nothing is left of a run that wrote no model"


@pytest.mark.parametrize("there", ["a model", "a file"])
def test_a_run_whose_folder_is_taken_at_its_end_saves_its_state_and_says_how_to_export_it(
    run, tmp_path, monkeypatch, capsys, there
):
    """Another program writes to it while the run trains, without a checkpoint."""
    folder, out = tmp_path / "hf", tmp_path / "run"

    def conclude(*_):
        assert (folder / ".lease").is_dir()
        if there == "a model":
            write_small_model(folder, 2)
        else:
            shutil.rmtree(folder)
            folder.write_text("notes")

    monkeypatch.setattr(gpt, "conclude", conclude)
    with pytest.raises(SystemExit, match="74"):
        run(out, "--steps", "3", "--save-hf", str(folder), draws=True)
    err = capsys.readouterr().err
    rule = "to a folder without one; got" if there == "a model" else "to a folder; got"
    assert f"error: a model is written {rule} {folder}" in err
    assert "Traceback" not in err
    command = re.search(r"Write it to a new folder: python -m jaxpar (.*)\.\n", err)[1]
    command = shlex.split(command.replace("DIR", str(tmp_path / "exported")))
    assert jaxpar_main(command) == 0
    huggingface.read_config(tmp_path / "exported")


@pytest.fixture(scope="module")
def uneven(run, trained, tmp_path_factory):
    """The folder of the run in three dimensions as it goes on with layers that its stages do not divide."""
    folder = tmp_path_factory.mktemp("uneven")
    parts = ["--mesh.stage", "3", "--schedule", "1f1b", "--layers-per-virtual-stage", "1", "1", "2"]
    saved = ["--checkpoint-every", str(FEW_STEPS // 4), "--save-hf", str(folder / "hf")]
    go_on(run, trained, HALF, folder, *parts, *saved)
    return folder


@pytest.mark.full
def test_a_run_goes_on_with_layers_that_stages_do_not_divide_and_is_exported(uneven, one_device):
    assert_same(curve(uneven), one_device[FEW_STEPS // 2 :], within=1e-4)
    check_exported(uneven)


@pytest.mark.full
def test_a_run_goes_on_without_stages_with_split_sequences_and_flags_that_save_memory(
    run, uneven, tmp_path, one_device
):
    mesh = ["--mesh.data", "2", "--mesh.context", "2", "--mesh.tensor", "2"]
    go_on(run, uneven, LATE, tmp_path, *mesh, "--zero", "3", "--remat", "dots")
    assert_same(curve(tmp_path), one_device[FEW_STEPS * 3 // 4 :], within=1e-4)


@pytest.mark.slow
def test_a_run_goes_on_on_one_device(run, uneven, tmp_path, one_device):
    go_on(run, uneven, LATE, tmp_path)
    assert_same(curve(tmp_path), one_device[FEW_STEPS * 3 // 4 :], within=1e-4)


@pytest.mark.full
def test_a_run_whose_last_checkpoint_cannot_be_saved_still_writes_its_model(
    run, tmp_path, monkeypatch, capsys
):
    def fail(*_):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    steps = ["--steps", str(FEW_STEPS), "--checkpoint-every", str(FEW_STEPS)]
    run(tmp_path / "saved", *steps, "--save-hf", str(tmp_path / "hf"))
    monkeypatch.setattr("jaxpar.checkpoint.folder.Folder.seal", fail)
    with pytest.raises(SystemExit, match="74"):
        run(tmp_path / "run", *steps, "--save-hf", str(tmp_path / "at least"))
    out, err = capsys.readouterr()
    assert "error: the final state was not saved: " in err
    assert f"written: {tmp_path / 'at least'}/, a model for transformers" in out
    found, wanted = (
        load_file(tmp_path / name / "model.safetensors") for name in ("at least", "hf")
    )
    assert_same(found, wanted, within=0)
    monkeypatch.setattr(SaveFolder, "_write", fail)
    with pytest.raises(SystemExit, match="74"):
        run(tmp_path / "other", *steps, "--save-hf", str(tmp_path / "none"))
    assert f"nor could the model be written in {tmp_path / 'none'}: " in capsys.readouterr().out


def check_exported(out_dir):
    """--save-hf and `export` of the last checkpoint write one model, and that of half time is another."""
    for name, flags in (("exported", []), ("half", ["--step", HALF])):
        assert jaxpar_main(["export", str(out_dir), str(out_dir / name), *flags]) == 0
    saved, exported, half = (
        load_file(out_dir / name / "model.safetensors") for name in ("hf", "exported", "half")
    )
    assert_same_bits(exported, saved)
    assert any(not np.array_equal(half[name], tensor) for name, tensor in saved.items())
    assert (out_dir / "exported/config.json").read_bytes() == (
        out_dir / "hf/config.json"
    ).read_bytes()
    assert huggingface.read_config(out_dir / "hf") == transformer.preset(
        "llama-bytes", max_positions=256
    )


@pytest.mark.full
def test_what_cannot_be_exported_is_refused(trained, tmp_path, capsys):
    within = trained / "checkpoints" / "50"
    assert jaxpar_main(["export", str(trained), str(within)]) == 2
    assert "among the checkpoints of the run. Choose" in capsys.readouterr().err
    assert not within.exists()
    other = tmp_path / "other"
    shutil.copytree(trained / "model", other)
    described = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(described | {"rms_norm_eps": 0.5}))
    cases = [
        (
            [str(tmp_path / "no"), str(tmp_path / "out")],
            "a run must be a folder; got .*no, which is none. Name the --out-dir",
        ),
        (
            [str(tmp_path), str(tmp_path / "out")],
            "must have a description of its model; got no config.json in",
        ),
        (
            [str(tmp_path), str(tmp_path / "out")],
            r"and jaxpar\.checkpoint\.export_safetensors\(path, state\.params\)",
        ),
        (
            [str(trained), str(tmp_path / "out"), "--step", "7"],
            "needs a saved step; got --step 7, saved 8, 16. Choose",
        ),
        (
            [str(trained), str(tmp_path / "out"), "--source", str(LLAMA)],
            r"must be that of its source; got .* that differ from .*\. Leave --source out: .* describes the model of the run",
        ),
        (
            [str(trained), str(tmp_path / "out"), "--source", str(other)],
            r"got 'rms_norm_eps' that differ from .*other.config.json: .* for 0\.5",
        ),
        (
            [str(trained), str(trained / "model")],
            "written to a folder without one; got .*model with 'config.json'",
        ),
    ]
    for args, message in cases:
        assert jaxpar_main(["export", *args]) == 2
        assert re.search(message, capsys.readouterr().err), message
    assert not (tmp_path / "out").exists()
    shutil.copytree(trained, tmp_path / "run")
    export = ["export", str(tmp_path / "run"), str(tmp_path / "out")]

    def damage(step):
        for file in (tmp_path / f"run/checkpoints/{step}/state").glob("**/d/*"):
            file.write_bytes(bytes(file.stat().st_size))

    damage(16)
    assert jaxpar_main([*export, "--step", "16"]) == 65
    remedy = "Give --step 8, which is intact, or leave out --step for the newest that is."
    assert remedy in capsys.readouterr().err
    assert jaxpar_main([*export, "--step", "8"]) == 0
    shutil.rmtree(tmp_path / "out")
    damage(8)
    assert jaxpar_main(export) == 65
    assert "reading params needs an intact checkpoint; got 2 in" in capsys.readouterr().err


@pytest.mark.full
def test_the_loss_falls_below_the_entropy_of_the_frequencies(trained):
    lines = read_lines(trained)
    assert lines[0]["loss"] > 5, "a new model knows nothing of 256 bytes"
    assert lines[-1]["test_loss"] < np.log(28) - 0.3


@pytest.mark.full
def test_the_folder_of_a_run_holds_config_metrics_pictures_and_a_sample(trained):
    config = json.loads((trained / "config.json").read_text())
    assert {
        "mesh": {"data": 2, "stage": 2, "tensor": 2},
        "model": "llama-bytes",
        "schedule": "zb-h1",
    }.items() <= config.items()
    lines = read_lines(trained)
    assert [line["step"] for line in lines] == list(range(FEW_STEPS))
    for name in ("loss", "grad_norm", "step_seconds", "tokens_per_second"):
        assert np.isfinite([line[name] for line in lines]).all(), name
    assert (trained / "sample.txt").read_text().startswith("def ")
    assert (trained / "loss.png").read_bytes().startswith(b"\x89PNG")
    assert "<svg" in (trained / "timeline.svg").read_text()


STEPS_OF_EXPERTS = 8
HALF_OF_EXPERTS = str(STEPS_OF_EXPERTS // 2)


@pytest.fixture(scope="module")
def experts(run, tmp_path_factory):
    """A run with experts over data that goes on with them over tensor: its folder, its flags, what it printed and exported."""
    folder, printed, exported = tmp_path_factory.mktemp("experts"), io.StringIO(), {}
    flags = (
        "--model",
        "moe-bytes",
        "--router-bias-rate",
        "0.01",
        "--learning-rate-schedule",
        "constant",
    )
    flags = *flags, "--eval-every", HALF_OF_EXPERTS
    over_data = (
        "--experts",
        "data",
        "--mesh.data",
        "4",
        "--mesh.stage",
        "2",
        "--expert-buffer",
        "3.9",
    )
    over_tensor = *IN_THREE_DIMENSIONS, "--expert-split", "expert_mlp", "--schedule", "1f1b"
    read = lambda url: urllib.request.urlopen(url, timeout=WAIT_SECONDS).read().decode()
    close = PrometheusExporter.close
    keep = lambda own: (
        exported.update(text=read(f"http://127.0.0.1:{own.port}/metrics")) or close(own)
    )
    run(
        folder,
        *flags,
        *over_data,
        "--schedule",
        "1f1b",
        "--steps",
        HALF_OF_EXPERTS,
        "--checkpoint-every",
        HALF_OF_EXPERTS,
    )
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.setattr(PrometheusExporter, "close", keep)
        run(
            folder,
            *flags,
            *over_tensor,
            "--steps",
            str(STEPS_OF_EXPERTS),
            "--resume",
            "--metrics-port",
            str(free_port()),
        )
    return folder, flags, printed.getvalue(), exported["text"]


@pytest.mark.full
def test_a_run_with_experts_has_their_metrics_and_loads(experts):
    folder, _, printed, exported = experts
    of_page, over_data = [
        each
        for each in doc_pages.commands(doc_pages.ROOT / "docs/experts.md")
        if "moe-bytes" in each.words
    ]
    assert {"--experts", "data", "--mesh.data", "4", "--mesh.stage", "2"} <= set(over_data.words), (
        "as here at first"
    )
    assert {"recipes/gpt.py", *IN_THREE_DIMENSIONS} <= set(of_page.words), (
        "the page trains what is trained here"
    )
    quoted = "^(moe-bytes: .* wide, )([\\d,]+)( parameters; .*, tensor=2, )"
    [(model, num_params, mesh)] = re.findall(quoted, of_page.quoted, re.MULTILINE)
    assert f"\n{model}{int(num_params.replace(',', '')) + 4 * 8:,}{mesh}1f1b\n" in printed, (
        "and biases of its routers"
    )
    lines = read_lines(folder)
    assert lines[-1]["test_loss"] < lines[STEPS_OF_EXPERTS // 2 - 1]["test_loss"] < np.log(256)
    for name, lowest in (("balance_loss", 0.9), ("expert_imbalance", 1.0), ("router_z_loss", 0.0)):
        assert all(lowest <= line[name] < 100 for line in lines), name
        assert f"jaxpar_{name} {lines[-1][name]}" in exported
    found = json.loads((folder / "expert_loads.json").read_text())
    assert found["steps"] == STEPS_OF_EXPERTS
    assert np.shape(found["loads"]) == (4, 8)
    np.testing.assert_allclose(np.mean(found["loads"], 1), 1, atol=1e-3)
    assert 'id="chart-experts"><figure' in (folder / "report.html").read_text()
    assert folder / "expert_loads.json" in set(own_files(folder)), "--overwrite deletes it"


@pytest.mark.full
def test_a_run_with_experts_over_data_goes_on_with_them_over_tensor(run, experts, tmp_path, capsys):
    folder, flags, _, _ = experts
    losses = [line["loss"] for line in read_lines(folder)]
    assert len(losses) == STEPS_OF_EXPERTS
    assert losses[-1] < losses[STEPS_OF_EXPERTS // 2] < losses[0]
    with pytest.raises(SystemExit):
        run(folder, *flags[:2], *flags[4:], "--resume")
    assert (
        "for a run saved with 0.01. Add --router-bias-rate 0.01, or start a run"
        in capsys.readouterr().err
    )
    found = huggingface.export.open_run(folder)
    biases = np.asarray(found.params["layers"]["router"]["bias"][:])
    assert found.config.experts.router_bias
    assert 0.01 < np.abs(biases).max() < 0.01 * (STEPS_OF_EXPERTS + 1)
    with pytest.raises(
        ValueError,
        match=r"must be like mixtral to be read or written; got experts\.router_bias=True",
    ):
        huggingface.write_model(tmp_path / "theirs", found.config, found.params)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            {"experts": "data"},
            "--experts data is for a model with experts; got --model llama-bytes. Leave it out",
        ),
        (
            {"router_bias_rate": 0.1},
            "--router-bias-rate is for a model with experts; got --model llama-bytes.",
        ),
        (
            {"model": "moe-bytes", "expert_buffer": 2.0},
            "--expert-buffer applies to --experts data; got 2 with --experts",
        ),
        (
            {"expert_split": "expert_mlp"},
            "--expert-split expert_mlp is for a model with experts; got --model llama-bytes",
        ),
        (
            {"model": "moe-bytes", "experts": "data", "expert_buffer": 0.5},
            "buffer must be at least 1; got 0.5. Choose such as 1.5",
        ),
        (
            {"model": "moe-bytes", "experts": "data", "expert_split": "expert_mlp"},
            "--expert-split applies to --experts tensor; got expert_mlp with --experts data",
        ),
        ({"window": 0}, "window must be at least 1; got 0"),
        (
            {"temperature": 0.0, "top_k": 5},
            "--top-k applies to a sample that is drawn; got 5 with --temperature 0",
        ),
        (
            {"model": "moe-bytes", "router_bias_rate": -1.0},
            "router_bias_rate must be 0 or more; got -1. Choose 0.001",
        ),
    ],
)
def test_flags_of_a_model_that_do_not_fit_are_refused(flags, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        language_model.check_model(ModelFlags(**flags), 16, needs_weights=False)


@pytest.mark.slow
def test_a_mixture_after_a_dense_layer_is_tuned_goes_on_elsewhere_and_is_exported(run, tmp_path):
    experts = transformer.Experts(count=4, mlp_dim=16, num_dense_layers=1)
    options = {"qk_norm": "head", "experts": experts, "num_layers": 4}
    config = transformer.TransformerConfig(
        **SHAPE | LLAMA_BLOCK | options | {"vocab_size": 256, "tokens": "bytes"}, tied=False
    )
    huggingface.write_model(tmp_path / "model", config, make_params(config, dtype=np.float32))
    flags = (
        "--init-from",
        str(tmp_path / "model"),
        "--seq",
        "8",
        "--lora-rank",
        "2",
        "--lora-targets",
        "w_qkv",
        "w_up",
    )
    flags = *flags, "--learning-rate-schedule", "constant", "--checkpoint-every", "8"
    run(
        tmp_path / "run",
        *flags,
        "--mesh.stage",
        "2",
        "--mesh.tensor",
        "2",
        "--schedule",
        "1f1b",
        "--steps",
        "8",
    )
    run(tmp_path / "run", *flags, "--mesh.data", "2", "--resume", "--save-hf", str(tmp_path / "hf"))
    factors = load_file(tmp_path / "run/adapter/adapter_model.safetensors")
    of = lambda name: f"base_model.model.model.layers.{name}.lora_B.weight"
    assert of("0.mlp.up_proj") in factors, "the leading layer's MLP"
    assert of("1.mlp.up_proj") not in factors, "experts have no factors"
    assert all(np.abs(factors[of(f"{layer}.self_attn.q_proj")]).max() > 0 for layer in range(4))
    assert jaxpar_main(["export", str(tmp_path / "run"), str(tmp_path / "exported")]) == 0
    exported, saved = (
        load_file(tmp_path / name / "model.safetensors") for name in ("exported", "hf")
    )
    assert_same(exported, saved, within=1e-6)
    moved = (
        saved["model.layers.0.mlp.up_proj.weight"]
        - load_file(tmp_path / "model/model.safetensors")["model.layers.0.mlp.up_proj.weight"]
    )
    assert np.abs(moved).max() > 1e-4


@pytest.mark.parametrize(
    ("rate", "saved", "message"),
    [
        (
            None,
            {"router_bias_rate": 0.01},
            "got --router-bias-rate None for a run saved with 0.01. Add --router-bias-rate 0.01",
        ),
        (
            0.1,
            {"seed": 0},
            "got --router-bias-rate 0.1 for a run saved with None. Leave it out, or start a run in another",
        ),
    ],
)
def test_a_run_goes_on_with_biases_of_routers_or_without_them(rate, saved, message):
    with pytest.raises(ValueError, match=re.escape(message)):
        language_model.check_biases(ModelFlags(router_bias_rate=rate), saved)
    language_model.check_biases(ModelFlags(router_bias_rate=rate), {})


def test_no_model_of_transformers_gets_biases_of_routers(run, tmp_path, capsys):
    flags = (
        "--model",
        "moe-bytes",
        "--router-bias-rate",
        "0.1",
        "--save-hf",
        str(tmp_path / "theirs"),
    )
    with pytest.raises(SystemExit):
        run(tmp_path / "run", *flags)
    assert (
        "a model of transformers has no biases of --router-bias-rate; got it with --save-hf"
        in capsys.readouterr().err
    )


@pytest.mark.full
def test_a_dry_run_says_what_a_step_costs_and_writes_nothing(run, tmp_path, capsys):
    run(tmp_path / "none", "--mesh.tensor", "2", "--dry-run")
    assert "all-reduce" in capsys.readouterr().out
    assert not (tmp_path / "none").exists()


LLAMA = Path(__file__).parent / "data" / "huggingface" / "llama"


@pytest.mark.full
def test_training_goes_on_from_published_weights_on_tokens_of_a_bin_in_bfloat16(run, tmp_path):
    tokens = tmp_path / "tokens.bin"
    (np.arange(4000) ** 2 % 24).astype(np.uint16).tofile(tokens)
    source = tmp_path / "source"
    shutil.copytree(LLAMA, source)
    (source / "special_tokens_map.json").write_text("{}")
    flags = [
        "--init-from",
        str(source),
        "--data",
        str(tokens),
        "--dtype",
        "bfloat16",
        "--zero",
        "3",
    ]
    flags += ["--save-hf", str(tmp_path / "tuned")]
    run(tmp_path / "out", *flags, *IN_THREE_DIMENSIONS)
    shape = huggingface.read_config(LLAMA)
    batch = Windows(load_text(tokens).train, 16, vocab_size=24).batch(16, seed=0, step=0)
    loss_of = jax.jit(
        lambda params: gpt.loss(transformer.make_model(shape).apply(params, batch), batch)
    )
    loss_sum, weight_sum = loss_of(huggingface.read_params(LLAMA, shape))
    losses = [line["loss"] for line in read_lines(tmp_path / "out")]
    np.testing.assert_allclose(losses[0], loss_sum / weight_sum, rtol=1e-2)
    assert losses[-1] < losses[0]
    tuned = tmp_path / "tuned"
    assert json.loads((tuned / "config.json").read_text()) == json.loads(
        (LLAMA / "config.json").read_text()
    )
    assert (tuned / "special_tokens_map.json").read_text() == "{}"
    loss_sum, weight_sum = loss_of(huggingface.read_params(tuned, shape))
    assert loss_sum / weight_sum < losses[0]


def test_tokens_of_another_vocabulary_are_refused_before_the_first_step(run, tmp_path, capsys):
    tokens = tmp_path / "tokens.bin"
    np.arange(4000, dtype=np.uint16).tofile(tokens)
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "none", "--init-from", str(LLAMA), "--data", str(tokens))
    assert stop.value.code == 2
    assert (
        "tokens must be from 0 to below the model's vocab_size; got 3599, vocab_size=24"
        in capsys.readouterr().err
    )


def test_bytes_are_not_taken_for_the_tokens_of_a_small_vocabulary(text):
    with pytest.raises(ValueError, match=r"vocabulary of 24; got .*whose tokens are bytes"):
        language_model.model_config(
            ModelFlags(init_from=LLAMA), 128, load_text(text), jaxpar.make_mesh()
        )


def test_bytes_are_read_by_models_that_say_so_and_by_no_others(text, tmp_path):
    shape = transformer.preset("gpt2-bytes", num_layers=1)
    params = jax.tree.map(
        lambda leaf: np.zeros(leaf.shape, leaf.dtype),
        abstract_params(transformer.param_table(shape)),
    )
    huggingface.write_model(tmp_path / "own", shape, params)
    read = ModelFlags(init_from=tmp_path / "own")
    assert (
        language_model.model_config(read, 128, load_text(text), jaxpar.make_mesh()).tokens
        == "bytes"
    )

    file = tmp_path / "own" / "config.json"
    found = json.loads(file.read_text())
    assert found.pop("jaxpar_tokens") == "bytes"
    file.write_text(json.dumps(found))
    with pytest.raises(
        ValueError, match=r'vocabulary of 256; got .* add ("jaxpar_tokens": "bytes") to its config'
    ) as refused:
        language_model.model_config(read, 128, load_text(text), jaxpar.make_mesh())
    key, value = ast.literal_eval(
        "{" + re.search(r"add (.*) to its", str(refused.value))[1] + "}"
    ).popitem()
    file.write_text(json.dumps(found | {key: value}))
    language_model.model_config(read, 128, load_text(text), jaxpar.make_mesh())
    file.write_text(json.dumps(found | {key: value, "vocab_size": 255}))
    with pytest.raises(ValueError, match="vocabulary of 255; got"):
        language_model.model_config(read, 128, load_text(text), jaxpar.make_mesh())


@pytest.mark.full
def test_a_model_whose_scores_are_not_finite_ends_with_code_86_in_place_of_a_sample(text, capsys):
    shape = transformer.preset("gpt2-bytes", num_layers=1, embed_dim=4, num_heads=1)
    params = jax.tree.map(
        lambda leaf: np.full(leaf.shape, np.nan), abstract_params(transformer.param_table(shape))
    )
    data = language_data.load_data(language_data.DataFlags(data=(text,)))
    with pytest.raises(SystemExit) as stop:
        evaluation.write_sample(gpt.Config.of(seq=8), ModelFlags(), shape, data, params)
    assert stop.value.code == 86
    assert "scores must be finite" in capsys.readouterr().err


def test_published_weights_are_packed_for_the_stages():
    shape, mesh = huggingface.read_config(LLAMA), jaxpar.make_mesh(stage=2)
    layout = jaxpar.LayerLayout(shape.num_layers, 2, layers_per_virtual_stage=(2, 0))
    table = transformer.param_table(shape)
    packed = table | {
        "layers": layout.as_packed(stack_layers(table["layers"], layout.num_positions))
    }
    shardings = jaxpar.shardings_from_dims(packed, mesh, TRANSFORMER_RULES)
    init = lambda key: layout.pack_params(init_params(table, key))
    state = jaxpar.abstract_state(init, jax.random.key(0), optax.sgd(0.1), mesh, shardings)
    got = model_files.read_weights(LLAMA, shape, layout, state)
    assert jax.tree.map(lambda leaf: leaf.sharding, got) == shardings
    oracle.assert_same_bits(layout.unpack_params(got), huggingface.read_params(LLAMA, shape))


def test_interleaved_has_the_two_chunks_that_its_help_tells_of():
    timetable = gpt.make_pipeline(
        gpt.Config.of(schedule="interleaved"), jaxpar.make_mesh(stage=2), num_rows=100
    )
    assert timetable.num_chunks == 2


def test_the_learning_rate_rises_and_falls_by_a_cosine():
    config = gpt.Config.of(
        optimizer="sgd", momentum=0.0, learning_rate=0.8, warmup_steps=4, steps=24
    )
    params, grads = {"w_up": np.float32(0)}, {"w_up": np.float32(1)}
    optimizer = optimizers.make_optimizer(config)
    state, rates = optimizer.init(params), []
    for _ in range(25):
        updates, state = optimizer.update(grads, state, params)
        rates.append(-float(updates["w_up"]))
    np.testing.assert_allclose(rates[:5], [0, 0.2, 0.4, 0.6, 0.8], rtol=1e-6)
    cosine = 0.08 + 0.72 * (1 + np.cos(np.pi * np.arange(21) / 20)) / 2
    np.testing.assert_allclose(rates[4:], cosine, rtol=1e-5)


@pytest.mark.parametrize(
    ("flags", "arrays_a_param"),
    [
        ({"optimizer": "sgd", "momentum": 0.0}, 0),
        ({"optimizer": "sgd"}, 1),
        ({"optimizer": "adamw"}, 2),
    ],
)
def test_optimizers_keep_what_they_need(flags, arrays_a_param):
    params = {"w_up": np.ones((3, 5), np.float32)}
    state = optimizers.make_optimizer(gpt.Config.of(**flags)).init(params)
    assert sum(np.shape(leaf) == (3, 5) for leaf in jax.tree.leaves(state)) == arrays_a_param


def test_weight_decay_spares_biases_norms_and_positions():
    optimizer = optimizers.make_optimizer(
        gpt.Config.of(warmup_steps=0, learning_rate=0.5, weight_decay=0.2, steps=10)
    )
    names = ("w_up", "tokens", "head", "b_up", "scale", "shift", "positions")
    params, grads = ({name: np.full(2, value, np.float32) for name in names} for value in (1, 0))
    updates, _ = optimizer.update(grads, optimizer.init(params), params)
    decayed = {name for name, update in updates.items() if np.any(update)}
    assert decayed == {"w_up", "tokens", "head"}
    np.testing.assert_allclose(updates["w_up"], -0.5 * 0.2, rtol=1e-6)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--model", "gpt5"], "no transformer of this name; got 'gpt5'. Choose from gpt2"),
        (
            ["--model", "gpt2"],
            "reads tokens of a vocabulary of 50257; got .*alphabet.txt, whose tokens are bytes. Give a .bin",
        ),
        (["--seq", "1"], "--seq must be at least 2; got 1"),
        (["--seq", "9999999"], "must have a window of seq . 1 tokens; got --seq 9999999"),
        (
            ["--warmup-steps", "16"],
            "less than --steps; got 16 and 16. Choose --warmup-steps 1, or --steps 17 or more.",
        ),
        (["--lr", "0"], "--learning-rate must be positive; got 0"),
        (["--momentum", "1"], "--momentum must be from 0 to less than 1; got 1. 0 is plain SGD"),
        (
            ["--init-from", str(LLAMA), "--model", "gpt2"],
            "--init-from determines the model; got it with --model gpt2",
        ),
        (
            ["--init-from", str(LLAMA)],
            "--init-from must be a folder with the tokenizer .*; got no tokenizer.json in .*llama, and text in .*alphabet.txt. "
            "Download it: hf download ID tokenizer.json tokenizer_config.json --local-dir .*llama; or name .* by --tokenizer, "
            "give a .bin of the model's tokens by --data, or, if they are bytes, add",
        ),
        (
            ["--init-from", str(LLAMA.parent / "gpt2")],
            "must be known and modelled, .*; got attn_pdrop=0.1, .*--ignore-config-keys attn_pdrop embd_pdrop resid_pdrop",
        ),
        (
            ["--mesh.context", "4", "--seq", "20"],
            "divisible by twice the context axis.*; got --seq 20, --mesh.context 4. Use --seq 24, or",
        ),
        (
            ["--ignore-config-keys", "attn_pdrop"],
            "of the config.json in --init-from; got attn_pdrop without a folder. Leave",
        ),
        (
            [
                "--init-from",
                str(LLAMA.parent / "gpt2"),
                "--ignore-config-keys",
                "attn_pdrop",
                "embd_pdrop",
                "resid_pdrop",
            ],
            "longer than a learned table of positions; got 16, and 8 positions in --in",
        ),
        (
            ["--init-from", "Qwen/Qwen2.5-0.5B"],
            "--init-from must be a folder with a model; got Qwen/Qwen2.5-0.5B, which does not exist. .* download it: hf "
            "download Qwen/Qwen2.5-0.5B --local-dir Qwen2.5-0.5B, and give --init-from Qwen2.5-0.5B.",
        ),
        (
            ["--init-from", str(LLAMA), "--ignore-config-keys", "use_cach"],
            r"must name keys of .*config\.json; got 'use_cach', which it lacks\. Did you mean use_cache\?",
        ),
        (
            ["--init-from", "../no/where"],
            "got ../no/where, which does not exist. Name the folder of a model.",
        ),
        (
            ["--init-from", str(Path(__file__))],
            "got .*test_recipes_gpt.py, which is a file. Name the folder of a model.",
        ),
        (
            ["--init-from", str(LLAMA.parent)],
            "must be a folder with config.json and the weights of a model; got no config.json and no model.safetensors or "
            "model.safetensors.index.json in .*huggingface. Name another folder, or download the model again: hf download ID",
        ),
        (["--temperature", "-1"], "--temperature must be 0 or more; got -1"),
        (["--prompt", ""], "--prompt must not be empty"),
        (
            ["--data", str(LLAMA.parent), "--save-hf", str(LLAMA.parent / "tuned")],
            "--save-hf must be outside of the folder of --data, all of whose files are learned; got .*tuned in ",
        ),
        (
            ["--init-from", str(LLAMA), "--window", "4"],
            "--init-from determines the model; got --window 4, and a model of --init-from .* that has none. Leave --window",
        ),
        (["--window", "0"], "--window must be at least 1; got 0. Choose 1 or more"),
        (
            ["--batch-size", "0"],
            "--batch-size must be from 1 to the number of rows to learn from; got 0",
        ),
        (["--num-microbatches", "0"], "--num-microbatches must be at least 1; got 0"),
        (
            ["--mesh.stage", "2", "--batch-size", "2"],
            "must have a row; got --mesh.data 1, 4 microbatches, --batch-size 2. Choose",
        ),
        (
            ["--num-chunks", "2"],
            "--num-chunks and --layers-per-virtual-stage apply to pipelines; got one of them with --mesh.stage 1",
        ),
        (
            ["--mesh.stage", "2", "--schedule", "1f1b", "--layers-per-virtual-stage", "3", "2"],
            r"--layers-per-virtual-stage must have one count .*; got \(3, 2\) for 2 virtual stages and 4 layers",
        ),
        (
            [
                "--model",
                "gpt2-bytes",
                "--mesh.tensor",
                "8",
                "--data",
                "nowhere",
            ],  # before text is read
            "the tensor axis must divide the heads, .*; got --mesh.tensor 8, num_heads=4, .* Choose --mesh.tensor from 1, 2, 4",
        ),
        (
            ["--save-hf", "/proc/tuned"],
            r"--save-hf must be a folder that can be written to; got /proc/tuned, but /proc may not",
        ),
        (
            ["--save-hf", str(LLAMA)],
            "a model is written to a folder without one; got .*llama with 'config.json'",
        ),
        (
            ["--mesh.stage", "8", "--data", "nowhere"],
            "at least one layer for each chunk of each stage; got 4 layers for --mesh.stage 8, --num-chunks 1",
        ),
        (
            ["--mesh.tensor", "1", "--sequence-parallel"],
            "--sequence-parallel splits activations over the tensor axis; got --mesh.tensor 1. Leave it out, or choose --mesh",
        ),
        (
            ["--mesh.tensor", "2", "--sequence-parallel", "--seq", "15"],
            "must divide it; got --seq 15, --mesh.tensor 2. Choose --seq 16",
        ),
        (
            ["--mesh.tensor", "4", "--mesh.context", "2", "--sequence-parallel", "--seq", "12"],
            "--mesh.tensor 4, --mesh.context 2. Choose --seq 16.",
        ),
        (
            ["--mesh.tensor", "2", "--mesh.context", "2", "--sequence-parallel", "--seq", "14"],
            "must twice the context axis; got --seq 14, --mesh.tensor 2, --mesh.context 2. Choose --seq 16",
        ),
        (
            ["--data", "nowhere"],
            "--data must be a file or a folder; got nowhere, which does not exist",
        ),
        (["--schedule", "best"], "best"),
        (
            ["--products", "fp8"],
            r"both at least 1,024 and multiples of 16; got a layer with w_qkv 32 x 48, .*Choose --products compute",
        ),
        (["--resume"], "--resume needs a checkpoint; got none"),
    ],
)
def test_flags_that_do_not_fit_end_with_code_2_and_a_message(run, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as stop:
        run(tmp_path / "none", *flags)
    assert stop.value.code == 2
    assert re.search(message, capsys.readouterr().err), message
    assert not (tmp_path / "none").exists()
