"""The recipes, run as a user runs them: what they learn, what they write, and what they say to bad input."""

import contextlib
import itertools
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace

import matplotlib.image
import numpy as np
import pytest

import house_prices
from jaxpar.commands import recipe as cli
from jaxpar.commands.cli import flag_names
from jaxpar.run import Run
from tests.support.flags import replaced
from tests.support.oracle import assert_same
from tests.support.tiers import quick
from tests.support.waiting import WAIT_SECONDS, XLA_WAITS

ROOT = Path(__file__).parents[1]


LEAST_SQUARES = (139.21067, -8738.0191, 89597.910)  # USD/ft², USD/bedroom, USD
MESHES = {
    "1 device": [],
    "data=8": ["--mesh.data", "8"],
    "data=4, tensor=2": ["--mesh.data", "4", "--mesh.tensor", "2"],
}


def run(out_dir, *flags):
    """Runs house_prices.py in this process, which has 8 devices."""
    cli.run(house_prices.main, house_prices.Config, replaced(["--out-dir", str(out_dir), *flags]))


@pytest.fixture
def _without_pictures(monkeypatch):
    """Runs that hold no rows out and draw nothing, which takes longer than their steps: tests of ``trained`` look at both."""
    monkeypatch.setattr(house_prices, "draw_descent", lambda *_: None)
    monkeypatch.setattr(house_prices.report, "plot_errors", lambda *_: None)
    monkeypatch.setattr(house_prices, "cross_validate", lambda *_: [(1.0, 2.0)])


@pytest.fixture
def _without_end(monkeypatch, _without_pictures):
    """Runs that end with their last step, without the models of other learning rates and of rows held out."""
    monkeypatch.setattr(house_prices, "conclude", lambda *_: None)


def refused(capsys, out_dir, *flags):
    """Returns what a run that must be refused says; it must write nothing."""
    with pytest.raises(SystemExit) as end:
        run(out_dir, *flags)
    said = capsys.readouterr()
    assert end.value.code == 2
    assert said.err.startswith("error: "), said.err
    assert len(said.err.splitlines()) == 1, f"one message, no traceback: {said.err}"
    assert not Path(out_dir).exists() or not any(Path(out_dir).iterdir()), (
        "a run that is refused writes nothing"
    )
    return said.err.removeprefix("error: ").rstrip("\n")


def read_lines(out_dir):
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def learned(out_dir):
    model = json.loads((out_dir / "model.json").read_text())
    return np.array([*model["weights"], model["intercept"]])


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """Folders of default runs, each made when it is first asked for.

    That of data=8 has pictures, and what the run said in said.txt.
    """

    class Runs(dict):
        def __missing__(self, name):
            folder = self[name] = tmp_path_factory.mktemp("house_prices")
            with (
                (folder / "said.txt").open("w") as said,
                contextlib.redirect_stdout(said),
                pytest.MonkeyPatch.context() as patch,
            ):
                if name != "data=8":
                    patch.setattr(house_prices, "conclude", lambda *_: None)
                run(folder, *MESHES[name])
            return folder

    return Runs()


@pytest.mark.few(1)
@pytest.mark.parametrize("mesh", quick(MESHES))
def test_house_prices_end_at_least_squares(trained, mesh):
    table = np.loadtxt(house_prices.HOUSES, delimiter=",", skiprows=3)
    closed_form = np.linalg.lstsq(
        np.column_stack([table[:, :2], np.ones(len(table))]), table[:, 2]
    )[0]
    assert len(table) == 47
    np.testing.assert_allclose(closed_form, LEAST_SQUARES, rtol=1e-6)
    np.testing.assert_allclose(learned(trained[mesh]), LEAST_SQUARES, rtol=1e-5)


@pytest.mark.parametrize("mesh", quick(list(MESHES)[1:], "data=8"))
def test_house_prices_have_the_loss_curve_of_one_device(trained, mesh):
    one, many = (
        [(line["loss"], line["grad_norm"], line["intercept"]) for line in read_lines(trained[name])]
        for name in ("1 device", mesh)
    )
    assert len(one) == 300
    assert_same(many, one, within=1e-5, floor=1e-2)


@pytest.mark.parametrize("mesh", quick(MESHES, "data=8"))
def test_each_of_47_rows_counts_once_on_any_mesh(trained, mesh):
    # The first loss is that of predicting the mean: the mean square of the standardised prices, which is 1 over all rows.
    # Without the weights 48 rows would make 47/48 of it.
    assert read_lines(trained[mesh])[0]["loss"] == pytest.approx(1, abs=1e-6)


def test_the_folder_of_a_run_holds_config_metrics_and_pictures(trained):
    folder = trained["data=8"]
    config = json.loads((folder / "config.json").read_text())
    flags = set(flag_names(house_prices.Config).values())
    names = {flag.removeprefix("--").partition(".")[0].replace("-", "_") for flag in flags}
    assert names | {"budget"} == set(config), "all of them, and whole groups of those with a prefix"
    resolved = {
        "mesh": {"data": 8, "stage": 1, "tensor": 1},
        "batch_size": 47,
        "learning_rate": 0.321,
        "steps": 300,
    }
    assert resolved.items() <= config.items()
    lines = read_lines(folder)
    assert [line["step"] for line in lines] == list(range(300))
    for name in (
        "loss",
        "grad_norm",
        "step_seconds",
        "rows_per_second",
        "weights/area_ft2",
        "weights/bedrooms",
    ):
        assert np.isfinite([line[name] for line in lines]).all(), name
    for name in ("loss", "surface", "errors"):
        pixels = matplotlib.image.imread(folder / f"{name}.png")
        assert pixels.shape[0] > 400, name
        colours = np.unique((pixels * 255).astype(np.uint8).view(np.uint32))
        assert len(colours) > 50, f"{name}.png is blank"


def test_a_run_says_how_it_splits_rows_and_how_near_it_came(trained):
    said = (trained["data=8"] / "said.txt").read_text()
    assert "47 rows of portland_houses.csv: price_usd from area_ft2, bedrooms" in said
    assert (
        "each step takes 47 rows; data=8: 6 on each replica, 48 in all; 1 row of weight 0 at the end of the last, so that "
        "every row counts once and none is dropped"
    ) in said
    assert re.search(r"area_ft2 +139.211 +139.211 +0.00%", said), said
    assert "63,926 on the 47 rows that it was trained on" in said
    assert "70,219 on rows held out, 63,286 on the rows trained on meanwhile (5 folds)" in said


@pytest.mark.usefixtures("_without_end")
def test_no_step_s_time_includes_the_compilation(tmp_path, monkeypatch):
    compile_step, ticks, late = (
        Run.compile,
        itertools.count(),
        [],
    )  # compiling takes an hour of the clock
    monkeypatch.setattr(Run, "compile", lambda *args: late.append(3600.0) or compile_step(*args))
    clock = SimpleNamespace(perf_counter=lambda: next(ticks) + sum(late))
    monkeypatch.setattr("jaxpar.metrics.log.time", clock)
    run(tmp_path, "--steps", "4")
    assert late
    assert all(0 < line["step_seconds"] < 3600 for line in read_lines(tmp_path))


@pytest.mark.usefixtures("_without_pictures")
@pytest.mark.parametrize(
    ("batch_size", "within"), [(1, 0.05), pytest.param(8, 0.01, marks=pytest.mark.full)]
)
def test_descent_on_parts_of_the_rows_comes_near_least_squares(
    tmp_path, capsys, batch_size, within
):
    run(tmp_path, "--batch-size", str(batch_size), "--mesh.data", str(batch_size))
    weight, _, intercept = learned(tmp_path) / LEAST_SQUARES
    assert abs(weight - 1) < within
    assert abs(intercept - 1) < within
    assert (
        "steps on part of the rows end near the least squares, not on it" in capsys.readouterr().out
    )


@pytest.mark.full
@pytest.mark.usefixtures("_without_end")
def test_a_run_resumes_on_another_mesh_as_if_it_had_not_stopped(tmp_path, trained, capsys):
    run(tmp_path, "--mesh.data", "2", "--steps", "6", "--checkpoint-every", "4")
    assert sorted(path.name for path in (tmp_path / "checkpoints").iterdir()) == ["4", "6"]

    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "--steps", "12")
    assert (
        "a new run needs a folder without checkpoints; got one of step 6" in capsys.readouterr().err
    )
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "--steps", "12", "--resume", "--learning-rate", "0.1")
    message = "a run must continue with the config that it was saved with; got learning_rate=0.1 (saved: 0.321)"
    assert message in capsys.readouterr().err
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "--steps", "5", "--resume")
    assert (
        "--steps must be at least the step to resume from; got --steps 5, a checkpoint"
        in capsys.readouterr().err
    )

    run(tmp_path, "--mesh.data", "4", "--steps", "12", "--resume")
    resumed, straight = read_lines(tmp_path), read_lines(trained["1 device"])[:12]
    assert [line["step"] for line in resumed] == list(range(12))
    assert_same([x["loss"] for x in resumed], [x["loss"] for x in straight], within=1e-5)


@pytest.mark.full
@pytest.mark.usefixtures("_without_end")
def test_a_run_resumes_with_what_it_is_told_may_change(tmp_path, capsys):
    run(tmp_path, "--steps", "4", "--checkpoint-every", "4", "--batch-size", "10")
    other = ("--steps", "8", "--resume", "--batch-size", "6", "--learning-rate", "0.1")
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, *other)
    assert "got batch_size=6 (saved: 10), " in capsys.readouterr().err
    run(tmp_path, *other, "--allow-change", "batch_size", "learning_rate", "steps")
    assert [line["step"] for line in read_lines(tmp_path)] == list(range(8))


@pytest.mark.usefixtures("_without_end")
def test_with_no_checkpoint_whole_a_resume_ends_with_exit_code_65(tmp_path, capsys):
    run(tmp_path, "--steps", "4", "--checkpoint-every", "2")
    for step in ("2", "4"):
        (tmp_path / "checkpoints" / step / "_CHECKPOINT_METADATA").write_text("?")
    with pytest.raises(SystemExit, match="65"):
        run(tmp_path, "--steps", "8", "--resume")
    said = capsys.readouterr().err
    assert "NOT USED: checkpoint of step 4: _CHECKPOINT_METADATA has 1 bytes, not " in said
    assert "restoring needs an intact checkpoint; got 2 in" in said
    assert len(read_lines(tmp_path)) == 4, "nothing began anew"


@pytest.mark.usefixtures("_without_end")
def test_a_run_that_a_supervisor_starts_again_resumes_if_there_is_anything(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setenv("JAXPAR_RESUME", "if-any")
    run(tmp_path, "--steps", "4", "--checkpoint-every", "2")
    assert "resumed" not in capsys.readouterr().out
    run(tmp_path, "--steps", "6", "--checkpoint-every", "2")
    assert "resumed from step 4, saved on data=1, stage=1, tensor=1" in capsys.readouterr().out


def test_there_must_be_something_to_resume(tmp_path, capsys):
    message = f"--resume needs a checkpoint; got none in {tmp_path / 'checkpoints'}. Name a run's folder by --out-dir, or"
    assert message in refused(capsys, tmp_path, "--resume")


def test_a_dry_run_says_what_a_step_costs_and_writes_nothing(tmp_path, capsys):
    run(tmp_path / "none", "--dry-run", "--mesh.data", "8")
    over_data = re.findall(r"all-reduce +data +(\d+) +8", capsys.readouterr().out)
    assert over_data == ["1", "1"], "one all-reduce of the weight and one of the gradients a step"
    assert not (tmp_path / "none").exists()


@pytest.mark.parametrize(
    ("flags", "said"),
    [
        (
            ("--compile-for", "h800"),
            "--compile-for must be one of a100-40gb, a100-80gb, h100, h200, b200; got 'h800'.",
        ),
        (
            ("--compile-for", "h100", "--nodes", "0"),
            "--nodes must be an integer of 1 or more; got 0.",
        ),
        (
            ("--nodes", "2"),
            "--nodes applies to --compile-for; got none. Add --compile-for h100, say.",
        ),
        (("--gpus-per-node", "4"), "--gpus-per-node applies to --compile-for; got none."),
        (
            ("--compile-for", "h100", "--fake-devices", "8"),
            "got --fake-devices too. Leave one of the two out.",
        ),
        (("--compile-for", "h100", "--resume"), "got --resume too. Leave one of the two out."),
    ],
)
def test_flags_of_gpus_to_compile_for_are_checked(tmp_path, capsys, monkeypatch, flags, said):
    monkeypatch.setattr("jaxpar.compile_only.set_compiler_flags", lambda: None)  # too late here
    assert said in refused(capsys, tmp_path, *flags)


def test_a_compiler_for_gpus_that_is_missing_is_named_with_its_remedy(
    tmp_path, capsys, monkeypatch
):
    monkeypatch.setattr("jaxpar.compile_only.set_compiler_flags", lambda: None)
    monkeypatch.setattr("jaxpar.compile_only.PLUGINS", ())
    assert (
        "got none. Install it: pip install -e '.[gpu-compile]' in the clone of jaxpar, or"
        in refused(capsys, tmp_path, "--compile-for", "h100")
    )


@pytest.mark.usefixtures("_without_end")
def test_a_learning_rate_that_diverges_ends_with_exit_code_86(tmp_path, capsys):
    (tmp_path / "model.json").write_text("of an earlier run")
    with pytest.raises(SystemExit, match="86"):
        run(tmp_path, "--learning-rate", "8", "--steps", "80")
    said = capsys.readouterr().err
    assert "10 consecutive steps had a loss or gradients that were not finite" in said
    assert (
        "Nothing was saved. --learning-rate 8 is too large, 0.321 is safe. To begin again, add --overwrite."
        in said
    )
    assert read_lines(tmp_path)[-1]["loss"] is None, "JSON has no NaN"
    assert not (tmp_path / "model.json").exists()
    run(tmp_path, "--steps", "3", "--overwrite")


def test_a_run_names_its_files_at_its_end(trained):
    folder = trained["data=8"]
    (names,) = re.findall(
        rf"^in {re.escape(str(folder))}: (.*)$", (folder / "said.txt").read_text(), re.MULTILINE
    )
    assert "model.json" in names.split(", ")
    assert all((folder / name).is_file() for name in names.split(", "))


def test_house_prices_predict_from_a_saved_run(trained, capsys):
    run(trained["data=8"], "--predict", "1650", "3")
    assert capsys.readouterr().out.startswith("price_usd 293,08")
    run(trained["data=8"], "--predict", "1650", "30")
    assert "a guess: the model has only seen bedrooms 1 to 5" in capsys.readouterr().out


def test_predictions_must_have_a_value_a_feature(trained, capsys):
    for values, message in {
        (): "--predict must have one value for each feature, area_ft2, bedrooms; got 0. Give 2.",
        (
            "1650",
        ): "--predict must have one value for each feature, area_ft2, bedrooms; got 1. Give 2.",
        ("1650", "nan"): "--predict must have finite numbers; got 1650.0 nan. Correct them.",
    }.items():
        with pytest.raises(SystemExit, match="2"):
            run(trained["data=8"], "--predict", *values)
        assert capsys.readouterr().err == f"error: {message}\n"


def test_predictions_take_no_flags_of_a_training(trained, capsys):
    given = ("--predict", "1650", "3", "--features", "bedrooms", "area_ft2")
    with pytest.raises(SystemExit, match="2"):
        run(trained["data=8"], *given)
    assert "--predict takes the model of --out-dir, " in (said := capsys.readouterr().err)
    assert "got --features too. Leave them out." in said


def test_predictions_need_a_saved_run(tmp_path, capsys):
    message = f"--predict needs a run that has ended; got no model.json in {tmp_path}. Train first, or name its folder by"
    assert message in refused(capsys, tmp_path, "--predict", "1650", "3")


FLATS = """# Rents of an invented town.
size_m2,floor,"rent, monthly",note

30,1,500,small
50,2,710.5,"with, comma"
60,5,830,
80,1,1000,
90,3,1130,
120,4,1420,
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    "features", [("size_m2", "floor"), pytest.param(("size_m2",), marks=pytest.mark.slow)]
)
def test_house_prices_learn_from_another_table(tmp_path, features):
    table = tmp_path / "flats.csv"
    table.write_text("\ufeff" + FLATS, encoding="utf-8")
    flags = [
        "--csv",
        str(table),
        "--features",
        *features,
        "--target",
        "rent, monthly",
        "--mesh.data",
        "4",
        "--folds",
        "6",
    ]
    run(tmp_path / "out", *flags)
    rows = np.array(
        [[30, 1, 500], [50, 2, 710.5], [60, 5, 830], [80, 1, 1000], [90, 3, 1130], [120, 4, 1420]]
    )
    columns = np.column_stack([rows[:, : len(features)], np.ones(6)])
    np.testing.assert_allclose(
        learned(tmp_path / "out"), np.linalg.lstsq(columns, rows[:, 2])[0], rtol=1e-4
    )


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "a column must be in the file; got 'a' for TABLE, whose columns are []. "),
        (
            "a,b,c\n",
            "a CSV file must have rows below its line of names; got none in TABLE. Add a line a row.",
        ),
        (
            "aa,b,c\n1,2,3\n",
            "got 'a' for TABLE, whose columns are ['aa', 'b', 'c']. Did you mean 'aa'?",
        ),
        (
            "a;b;c\n1;2;3\n",
            "whose columns are ['a;b;c']. Name columns of the first line, and separate them by commas.",
        ),
        (
            "a,b,a\n1,2,3\n",
            "a column's name must occur once; got 'a' 2 times in TABLE. Rename all but one of them.",
        ),
        (
            "a,b,c\n1,2,3\n#\n4,5\n",
            "got 2 cells for 3 columns in line 4 of TABLE. Add or remove cells",
        ),
        (
            "a,b,c\n1,2,3\n4,lots,6\n",
            "must be a number below 1e+18, such as 1650 or 2.5e3; got 'lots' for b in line 3 of TABLE.",
        ),
        (
            "a,b,c\n1,2,3\n4,,6\n",
            "must be a number below 1e+18, such as 1650 or 2.5e3; got '' for b in line 3 of TABLE.",
        ),
        (
            "a,b,c\n1,2,nan\n",
            "must be a number below 1e+18, such as 1650 or 2.5e3; got 'nan' for c in line 2 of TABLE.",
        ),
        (
            "a,b,c\n1,2,3\n-inf,2,3\n",
            "must be a number below 1e+18, such as 1650 or 2.5e3; got '-inf' for a in line 3 of TABLE.",
        ),
        (
            "a,b,c\n1,2,3\n1e300,2,3\n",
            "must be a number below 1e+18, such as 1650 or 2.5e3; got '1e300' for a in line 3 of TABLE.",
        ),
        (
            "a,b,c\n1,2,3\n4,5,6\n",
            "at least as many rows as parameters, one for each feature and the intercept; got 2 rows, 3",
        ),
        (
            "a,b,c\n1,7,3\n2,7,5\n3,7,9\n",
            "a feature must vary to be learned from; got 7 in every row of 'b'. Leave it out.",
        ),
        (
            "a,b,c\n1,7,3\n2,8,3\n3,7,3\n",
            "a target must vary to be learned; got 3 in every row of 'c'. Choose another --target.",
        ),
        (
            "a,b,c\n1,2,3\n2,4,5\n3,6,9\n4,8,9\n",
            "got --features a b, of which one is a weighted sum of others. Leave one out.",
        ),
        (
            "a,b,c\n1,2,3\n2,4,5\n3,7,9\n",
            "there must be more rows than parameters to test on those that are left out; got 3",
        ),
    ],
)
def test_a_bad_table_is_named_by_its_line(tmp_path, capsys, text, message):
    table = tmp_path / "table.csv"
    table.write_text(text)
    said = refused(
        capsys, tmp_path / "out", "--csv", str(table), "--features", "a", "b", "--target", "c"
    )
    assert message.replace("TABLE", str(table)) in said


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        (["1,5,2"], "one for each feature and the intercept; got 1 row, 3 parameters. Add rows"),
        (
            ["1,5,2", "2,7,3", "3,1,9", "4,4,1"],
            "--folds of a cross-validation must be from 4 to the number of rows; got 5, 4 rows. Give --folds 4.",
        ),
    ],
)
def test_a_table_of_few_rows_is_refused_with_the_flag_that_it_needs(
    tmp_path, capsys, rows, message
):
    table = tmp_path / "table.csv"
    table.write_text("\n".join(["a,b,c", *rows]) + "\n")
    flags = ["--csv", str(table), "--features", "a", "b", "--target", "c"]
    assert message in refused(capsys, tmp_path / "out", *flags)


def test_a_table_that_is_no_text_is_refused(tmp_path, capsys):
    table = tmp_path / "table.csv"
    flags = ["--features", "a", "b", "--target", "c"]
    for written in (b"a,b,c\n1,2,\xff\n", "a,b,c\n1,2,3\n".encode("utf-16")):
        table.write_bytes(written)
        said = refused(capsys, tmp_path / "out", "--csv", str(table), *flags)
        assert said.startswith("a CSV file must be UTF-8; got ")
        assert said.endswith('. Save it as UTF-8, in Excel as "CSV UTF-8".')
    missing = refused(capsys, tmp_path / "out", "--csv", str(tmp_path / "none.csv"), *flags)
    assert (
        missing
        == f"--csv must be a file; got {tmp_path / 'none.csv'}, which does not exist. Name one that is there."
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--mesh.data 16",
            "the product of the mesh axes must be at most the number of devices; got --mesh.data 16, --mesh.stage 1,",
        ),
        (
            "--mesh.data 0",
            "mesh axis sizes must be positive, or -1 for the rest; got --mesh.data 0, --mesh.stage 1, --mesh.tensor 1.",
        ),
        (
            "--mesh.tensor 4",
            "dim 0 of weights must be divisible by the tensor axis; got 2 of shape (2,), --mesh.tensor 4.",
        ),
        (
            "--mesh.stage 2",
            "linear regression is one layer and so one stage; got --mesh.stage 2. Use --mesh.stage 1.",
        ),
        (
            "--batch-size 48",
            "--batch-size must be from 1 to the number of rows; got 48, 47 rows. Choose 1 to 47, or leave",
        ),
        ("--batch-size 0", "--batch-size must be from 1 to the number of rows; got 0, 47 rows."),
        (
            "--batch-size 1 --mesh.data 8",
            "each replica must have a row of every step; got 1 row a step, --mesh.data 8. Choose",
        ),
        (
            "--learning-rate 0",
            "--learning-rate must be positive; got 0. Choose 0.321, or leave it out.",
        ),
        ("--learning-rate -0.1", "--learning-rate must be positive; got -0.1."),
        ("--learning-rate nan", "--learning-rate must be positive; got nan."),
        ("--learning-rate inf", "--learning-rate must be positive and finite; got inf."),
        (
            "--keep-every 7",
            "--keep-every keeps some of the checkpoints; got 7, and no checkpoints. Add --checkpoint-every 50",
        ),
        (
            "--folds 1",
            "of a cross-validation must be from 2 to the number of rows; got 1, 47 rows. Give --folds 2 to 47.",
        ),
        (
            "--folds 48",
            "of a cross-validation must be from 2 to the number of rows; got 48, 47 rows. Give --folds 2 to 47.",
        ),
        (
            "--features bedrooms bedrooms",
            "must not name a column twice; got --features bedrooms bedrooms --target price_usd.",
        ),
        (
            "--features price_usd",
            "must not name a column twice; got --features price_usd --target price_usd. Leave one of",
        ),
        (
            "--features",
            "--features must name at least one column; got none. Name the columns to predict from.",
        ),
        (
            "--features size",
            "whose columns are ['area_ft2', 'bedrooms', 'price_usd']. Choose from these.",
        ),
        (
            "--target price",
            "got 'price' for PATH, whose columns are ['area_ft2', 'bedrooms', 'price_usd']. Did you mean",
        ),
        ("--steps 0", "--steps must be at least 1; got 0. Choose 1 or more."),
        ("--seed -1", "--seed must be from 0 to 4294967295; got -1."),
        ("--checkpoint-every -1", "--checkpoint-every must be at least 0; got -1."),
        ("--fake-devices -1", "--fake-devices must be at least 0; got -1."),
    ],
)
def test_a_flag_out_of_range_is_refused(tmp_path, capsys, flags, message):
    said = refused(capsys, tmp_path, *flags.split())
    assert message.replace("PATH", str(house_prices.HOUSES)) in said


def test_a_best_metric_that_no_step_has_is_refused_at_the_first_one(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "--keep-best", "test_loss", "--checkpoint-every", "2")
    assert (
        "--keep-best must name a metric of the run; got test_loss. Choose from grad_norm, loss"
        in capsys.readouterr().err
    )
    assert not (tmp_path / "checkpoints").exists()


def test_an_out_dir_that_is_a_file_is_refused(tmp_path, capsys):
    file = tmp_path / "file"
    file.write_text("")
    with pytest.raises(SystemExit, match="2"):
        run(file / "run")
    message = f"--out-dir must be a folder that can be written to; got {file / 'run'}, but {file} is a file. Name another."
    assert capsys.readouterr().err == f"error: {message}\n"


def test_an_out_dir_that_is_a_link_to_nothing_is_refused_before_anything_is_compiled(
    tmp_path, capsys
):
    link = tmp_path / "volume"
    link.symlink_to(tmp_path / "not-mounted")
    with pytest.raises(SystemExit, match="2"):
        run(link)
    said = capsys.readouterr()
    assert f"got {link}, but {link} is a link to nothing" in said.err
    assert "compiled" not in said.out


def test_an_out_dir_in_which_no_file_can_be_made_is_refused_before_anything_is_compiled(capsys):
    with pytest.raises(SystemExit, match="2"):
        run(Path("/proc/run"))
    said = capsys.readouterr()
    assert "got /proc/run, but /proc may not be written to (" in said.err
    assert "compiled" not in said.out


def test_an_out_dir_that_cannot_hold_the_config_is_refused(tmp_path, capsys):
    (tmp_path / "config.json").mkdir()
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path)
    message = f"--out-dir must be a folder that can be written to; got {tmp_path}: Is a directory. Name another."
    assert capsys.readouterr().err == f"error: {message}\n"


def test_pictures_without_matplotlib_are_refused(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    said = refused(capsys, tmp_path)
    assert (
        said
        == "the recipe's pictures need matplotlib; got none. Install it: pip install -e '.[plot]' in the clone of jaxpar."
    )


def test_pictures_without_a_folder_that_can_be_written_are_refused(tmp_path, capsys, monkeypatch):
    def raises():
        raise OSError("Matplotlib requires access to a writable cache directory")

    monkeypatch.setattr("matplotlib.get_cachedir", raises)
    said = refused(capsys, tmp_path)
    assert said.endswith("Set MPLCONFIGDIR to one, or mount a volume at /tmp.")


def test_an_unknown_flag_is_refused_with_a_suggestion(tmp_path, capsys):
    with pytest.raises(SystemExit, match="2"):
        run(tmp_path, "--mesh.dta", "8")
    said = capsys.readouterr().err
    assert "Unrecognized options: --mesh.dta" in said
    assert "Perhaps you meant" in said
    assert "--mesh.data" in said


def test_a_bug_keeps_its_traceback(tmp_path, monkeypatch):
    def broken(*_):
        raise ValueError("a bug after the checks")

    monkeypatch.setattr(Run, "compile", broken)
    with pytest.raises(ValueError, match="a bug after the checks"):
        run(tmp_path)


def script(*flags, **env):
    command = [sys.executable, "recipes/house_prices.py", *flags]
    clean = {name: value for name, value in os.environ.items() if name != "PJRT_NPROC"}
    env = clean | {"PYTHONPATH": str(ROOT), "XLA_FLAGS": XLA_WAITS}
    return subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )


@pytest.mark.full
def test_house_prices_run_as_a_script_on_8_fake_devices(tmp_path):
    end = script("--fake-devices", "8", "--mesh.data", "8", "--out-dir", str(tmp_path))
    assert end.returncode == 0, end.stderr
    assert end.stderr == ""
    np.testing.assert_allclose(learned(tmp_path), LEAST_SQUARES, rtol=1e-5)
