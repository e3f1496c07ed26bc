"""recipes/digits.py, run as a user runs it: the same numbers however it is split, what it writes, what it refuses."""

import importlib.util
import itertools
import json
import shutil
from types import SimpleNamespace

import jax
import matplotlib.image
import numpy as np
import pytest

import digits
import digits_sweep
from jaxpar.commands import recipe as cli
from tests.support.flags import replaced
from tests.support.oracle import assert_same

FEW_STEPS = 12
STEPS = 200
ON_4_BY_2 = ["--mesh.data", "4", "--mesh.tensor", "2"]


def run(out_dir, *flags):
    """Runs digits.py in this process, which has 8 devices."""
    cli.run(digits.main, digits.Config, replaced(["--out-dir", str(out_dir), *flags]))


def read_lines(out_dir):
    return [json.loads(line) for line in (out_dir / "metrics.jsonl").read_text().splitlines()]


def curve(out_dir):
    return [(line["loss"], line["grad_norm"]) for line in read_lines(out_dir)[:FEW_STEPS]]


def curve_of(out_dir, *flags, evaluate=lambda *_: (np.float32(0), np.float32(0))):
    """The losses of a run that draws nothing, and evaluates nothing unless it is told how."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits, "draw", lambda *_: None)
        patch.setattr(digits, "evaluate", evaluate)
        run(out_dir, "--steps", str(FEW_STEPS), "--eval-every", str(FEW_STEPS), *flags)
    return curve(out_dir)


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder of a run on data=4, tensor=2, with a sweep cut short."""
    folder = tmp_path_factory.mktemp("digits")
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(digits_sweep, "NUM_STEPS", 3)
        run(folder, *ON_4_BY_2, "--steps", str(STEPS), "--checkpoint-every", str(STEPS - 50))
    return folder


@pytest.fixture(scope="module")
def timed(tmp_path_factory):
    """The folder of a run on one device, each of whose evaluations takes an hour of the clock."""
    folder = tmp_path_factory.mktemp("digits")
    evaluate, late, ticks = digits.evaluate, [], itertools.count()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            "jaxpar.metrics.log.time", SimpleNamespace(perf_counter=lambda: next(ticks) + sum(late))
        )
        curve_of(
            folder,
            "--eval-every",
            "5",
            evaluate=lambda *args: late.append(3600.0) or evaluate(*args),
        )
    return folder


@pytest.fixture(scope="module")
def one_device(timed):
    return curve(timed)


@pytest.mark.full
def test_no_step_s_time_includes_an_evaluation(timed):
    lines = read_lines(timed)
    assert [line["step"] for line in lines if "test_loss" in line] == [4, 9, 11]
    assert all(0 < line["step_seconds"] < 3600 for line in lines)


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    "flags",
    [
        ["--mesh.data", "8", "--split", "data"],
        [*ON_4_BY_2, "--split", "column"],
        pytest.param([*ON_4_BY_2, "--split", "row"], marks=pytest.mark.slow),
        ["--mesh.data", "2", "--mesh.stage", "2", "--mesh.tensor", "2", "--schedule", "zb-h1"],
    ],
    ids=["data", "column", "row", "pipeline"],
)
def test_a_split_has_the_loss_curve_of_one_device(tmp_path, one_device, flags):
    assert_same(curve_of(tmp_path, *flags), one_device, within=1e-5)


@pytest.mark.full
def test_the_mixed_split_has_the_loss_curve_of_one_device(trained, one_device):
    assert_same(curve(trained), one_device, within=1e-5)


@pytest.mark.full
def test_more_than_95_of_100_digits_held_out_are_read_right(trained):
    assert read_lines(trained)[-1]["test_accuracy"] > 0.95


@pytest.mark.full
def test_the_folder_of_a_run_holds_config_metrics_and_pictures(trained):
    config = json.loads((trained / "config.json").read_text())
    assert {
        "mesh": {"data": 4, "stage": 1, "tensor": 2},
        "split": "mixed",
        "hidden_layers": 8,
    }.items() <= config.items()
    lines = read_lines(trained)
    assert [line["step"] for line in lines] == list(range(STEPS))
    for name in ("loss", "grad_norm", "step_seconds", "digits_per_second"):
        assert np.isfinite([line[name] for line in lines]).all(), name
    for name in ("loss", "errors", "predictions"):
        pixels = matplotlib.image.imread(trained / f"{name}.png")[::3, ::3]
        assert len(np.unique(pixels.reshape(-1, pixels.shape[2]), axis=0)) > 50, (
            f"{name}.png is blank"
        )


@pytest.mark.full
def test_a_run_resumes_on_another_mesh_and_says_how_well_it_reads(trained, tmp_path, capsys):
    folder = shutil.copytree(trained, tmp_path / "stopped")
    shutil.rmtree(folder / "checkpoints" / str(STEPS))
    run(folder, "--resume", "--mesh.data", "2", "--no-sweep", "--steps", str(STEPS))
    got, said = read_lines(folder)[-1], capsys.readouterr().out
    assert_same(got["test_loss"], read_lines(trained)[-1]["test_loss"], within=1e-3)
    assert len(read_lines(folder)) == STEPS
    for text in (
        "1438 digits to learn from, 359 held out",
        "compiled in",
        "50 steps",
        "a step takes",
        "digits/s",
        "written: ",
    ):
        assert text in said, said
    assert "digits     held out: loss" in said


@pytest.mark.full
def test_a_dry_run_prints_the_cost_of_a_step_and_writes_nothing(tmp_path, capsys):
    run(tmp_path / "new", *ON_4_BY_2, "--dry-run")
    said = capsys.readouterr().out
    assert "on 8 devices, mesh data=4, stage=1, tensor=2" in said
    assert "all-reduce" in said
    assert not (tmp_path / "new").exists()


def refused(capsys, out_dir, *flags):
    """Returns what a run that must be refused says; it must write nothing."""
    with pytest.raises(SystemExit) as end:
        run(out_dir / "new", *flags)
    said = capsys.readouterr().err
    assert end.value.code == 2
    assert not (out_dir / "new").exists(), "a run that is refused writes nothing"
    return said


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            "--hidden-layers 7",
            "--hidden-layers must be even, since hidden layers come in pairs; got 7. Choose 2, 4, 6 or 8.",
        ),
        (
            "--hidden-layers 0",
            "--hidden-layers must be even, since hidden layers come in pairs; got 0",
        ),
        ("--width 0", "--width must be at least 1; got 0. Choose such as 64."),
        (
            "--width 30 --mesh.tensor 4",
            "--width must be divisible by the tensor axis; got --width 30, --mesh.tensor 4. Choose --width 32.",
        ),
        (
            "--mesh.stage 3",
            "must be divisible by the stage axis; got --hidden-layers 8, which are 4 pairs, --mesh.stage 3. Choose "
            "--hidden-layers 12.",
        ),
        (
            "--split data --mesh.tensor 2",
            "--split data leaves the tensor axis nothing to share out; got --mesh.tensor 2, whose devices would all do the",
        ),
        (
            "--mesh.context 2",
            "splits sequences, which these rows are not; got --mesh.context 2. Use --mesh.context 1.",
        ),
        (
            "--mesh.data 16",
            "must be at most the number of devices; got --mesh.data 16, --mesh.stage 1, --mesh.tensor 1, which needs 16",
        ),
        ("--learning-rate 0", "--learning-rate must be positive; got 0. Choose such as 0.001."),
        ("--eval-every 0", "--eval-every must be at least 1; got 0."),
        (
            "--test-fraction 1",
            "--test-fraction must leave digits to learn from and digits to test on; got 1, which holds",
        ),
        ("--test-fraction 0", "got 0, which holds out 0 of 1797. Choose one such as 0.2."),
        (
            "--batch-size 0",
            "--batch-size must be from 1 to the number of digits to learn from; got 0, 1438 digits.",
        ),
        (
            "--batch-size 2000",
            "--batch-size must be from 1 to the number of digits to learn from; got 2000, 1438 digits.",
        ),
        (
            "--batch-size 4 --mesh.data 8",
            "each microbatch of each replica must have a digit; got --mesh.data 8, 1 microbatches, --batch-size 4. Choose",
        ),
        (
            "--num-microbatches 0",
            "--num-microbatches must be at least 1; got 0. Leave it out for the default.",
        ),
        ("--schedule 1g1b", "1g1b"),
        (
            "--schedule interleaved --mesh.stage 4",
            "each chunk of each stage must have a pair of hidden layers; got --hidden-layers 8, which are 4 pairs, "
            "--mesh.stage 4, and 2 chunks a stage by --schedule interleaved. Choose --hidden-layers 16, or --schedule 1f1b.",
        ),
        ("--split colum", "colum"),
        ("--hiden-layers 8", "--hidden-layers"),
    ],
)
def test_flags_that_cannot_be_used_are_refused_before_anything_is_compiled(
    capsys, tmp_path, flags, message
):
    assert message in refused(capsys, tmp_path, *flags.split())


@pytest.mark.parametrize(("library", "extra"), [("sklearn", "data"), ("matplotlib", "plot")])
def test_a_library_that_is_not_installed_is_named_with_its_extra(
    monkeypatch, capsys, tmp_path, library, extra
):
    find = importlib.util.find_spec
    monkeypatch.setattr(
        "importlib.util.find_spec", lambda name: None if name == library else find(name)
    )
    assert f"got none. Install it: pip install -e '.[{extra}]' in the clone of jaxpar." in refused(
        capsys, tmp_path
    )


@pytest.mark.full
def test_a_loss_that_does_not_stay_finite_ends_with_its_own_code(capsys, tmp_path):
    with pytest.raises(SystemExit) as end:
        curve_of(tmp_path, "--learning-rate", "1e30", "--hidden-layers", "2")
    assert end.value.code == 86
    assert (
        "consecutive steps had a loss or gradients that were not finite" in capsys.readouterr().err
    )


@pytest.mark.full
def test_a_narrowed_model_is_a_smaller_one_and_stays_so():
    table = digits.mlp.param_table(64, 10, width=8, num_hidden=4)
    rng = np.random.default_rng(0)
    wide = jax.tree.map(
        lambda leaf: rng.normal(size=leaf.shape).astype(np.float32), digits.abstract_params(table)
    )
    wide["layers"] |= {
        name: np.zeros((2, 8), np.float32) for name in ("b_up", "b_down")
    }  # as they begin
    narrow = jax.tree.map(np.asarray, jax.jit(digits_sweep.narrowed)(wide, np.int32(3)))
    outer, layers = narrow["outer"], narrow["layers"]
    own = {
        "outer": outer | {"w_in": outer["w_in"][:, :3], "w_out": outer["w_out"][:3]},
        "layers": {
            name: leaf[..., :3] if name[0] == "b" else leaf[:, :3, :3]
            for name, leaf in layers.items()
        },
    }
    batch = {
        "features": rng.uniform(size=(5, 64)).astype(np.float32),
        "label": np.arange(5, dtype=np.int32),
    }
    batch["weight"] = np.ones(5, np.float32)
    mean_loss = jax.jit(
        jax.value_and_grad(
            lambda params: digits.loss(digits.mlp.MODEL.apply(params, batch), batch)[0]
        )
    )
    (value, grads), (want, want_grads) = mean_loss(narrow), mean_loss(own)
    assert_same(value, want, within=1e-6)
    sum_of_squares = lambda tree: sum(
        float((leaf**2).sum()) for leaf in jax.tree.leaves(jax.device_get(tree))
    )
    assert sum_of_squares(grads) == pytest.approx(sum_of_squares(want_grads), rel=1e-5), (
        "what it lacks has no gradient"
    )
    assert_same(grads["outer"]["b_out"], want_grads["outer"]["b_out"], within=1e-5)
