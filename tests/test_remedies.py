"""Following an error message's advice resolves the error."""

import contextlib
import io
import re
import shutil
from pathlib import Path
from types import SimpleNamespace

import jax
import numpy as np
import prometheus_client
import pytest

import all_reduce
import bloom
import bloom_jobs
import digits
import gpt
import house_prices
import jaxpar
from jaxpar.__main__ import main as command
from jaxpar.commands import recipe as cli
from jaxpar.run import Run
from tests.support.clusters import SMALL, node
from tests.support.flags import replaced
from tests.support.tiers import without

ROOT = Path(__file__).parents[1]


LLAMA = ROOT / "tests" / "data" / "huggingface" / "llama"


class AcceptedError(Exception):
    """All checks have passed: what follows would compile."""


def accept(*_):
    raise AcceptedError


@pytest.fixture
def recipes(monkeypatch, tmp_path):
    """Runs a recipe up to where it would compile; gives what it says where it refuses, else None."""
    monkeypatch.chdir(tmp_path)
    Path("text.txt").write_text("abcdefghijklmnopqrstuvwxyz, " * 40)
    monkeypatch.setattr(Run, "compile", accept)
    monkeypatch.setattr(all_reduce, "init_params", accept)
    monkeypatch.setattr(bloom_jobs, "make_step", accept)
    monkeypatch.setattr(jaxpar, "use_fake_devices", lambda _: None)
    # Another process of this machine may listen on the port that a message names.
    monkeypatch.setattr(
        prometheus_client,
        "start_http_server",
        lambda port, *_, **__: (SimpleNamespace(server_port=port), None),
    )
    usual = {gpt: ["--data", "text.txt", "--seq", "8"]}

    def said(recipe, flags):
        out, err, code = io.StringIO(), io.StringIO(), None
        try:
            with contextlib.redirect_stdout(out), contextlib.redirect_stderr(err):
                cli.run(recipe.main, recipe.Config, replaced([*usual.get(recipe, []), *flags]))
        except AcceptedError:
            return None
        except SystemExit as end:
            code = end.code
        assert code == 2, f"{code}: {err.getvalue()}"
        return " ".join(err.getvalue().split())

    yield said
    jax.config.update("jax_enable_x64", False)  # all_reduce.py computes in float64 from here on


def with_remedy(flags, remedy):
    """A command line with a flag's values in place of those that it has; "--flag out" leaves it out."""
    name, *values = remedy.split()
    words = re.sub(rf"(?<!\S){re.escape(name)}(?!\S)(?: (?!--)\S+)*", "", " ".join(flags)).split()
    return words if values == ["out"] else [*words, name, *values]


def check_named(message, remedy):
    """A message must say the remedy's values, or to leave the flag out, after what it got."""
    _, *values = remedy.split()
    said = message.partition("; got ")[2] or message.partition("; have ")[2]
    wanted = (
        r"\b[Ll]eave\b" if values == ["out"] else rf"(?<![\w.]){re.escape(' '.join(values))}(?!\w)"
    )
    assert re.search(wanted, said), f"{remedy!r} is not in {said!r}"


@pytest.mark.parametrize(
    ("recipe", "flags", "remedies"),
    without(
        [
            (house_prices, "--features Area", ["--features area_ft2"]),
            (house_prices, "--features size", ["--features bedrooms"]),
            (house_prices, "--features area_ft2,bedrooms", ["--features area_ft2 bedrooms"]),
            (house_prices, "--batch-size 1 --mesh.data 8", ["--batch-size 8", "--mesh.data 1"]),
            (house_prices, "--batch-size 48", ["--batch-size 47", "--batch-size out"]),
            (house_prices, "--learning-rate 0", ["--learning-rate 0.321", "--learning-rate out"]),
            (house_prices, "--folds 48", ["--folds 2", "--folds 47"]),
            (house_prices, "--mesh.stage 2", ["--mesh.stage 1"]),
            (house_prices, "--mesh.tensor 4", ["--mesh.tensor 2"]),
            (house_prices, "--mesh.data 0", ["--mesh.data 1"]),
            (house_prices, "--steps 5 --profile 10:13", ["--profile 2:5"]),
            (house_prices, "--metrics-port 70000", ["--metrics-port 9090"]),
            (house_prices, "--budget.step -1", ["--budget.step 0"]),
            (house_prices, "--steps 0", ["--steps 1"]),
            (house_prices, "--seed -1", ["--seed 0"]),
            (house_prices, "--max-skipped -1", ["--max-skipped 10", "--max-skipped 0"]),
            (house_prices, "--checkpoint-every -1", ["--checkpoint-every out"]),
            (house_prices, "--checkpoint-minutes nan", ["--checkpoint-minutes out"]),
            (house_prices, "--keep 0", []),
            (digits, "--hidden-layers 7", ["--hidden-layers 2", "--hidden-layers 8"]),
            (digits, "--hidden-layers 8 --mesh.stage 3", ["--hidden-layers 12"]),
            (digits, "--hidden-layers 4 --mesh.stage 2 --schedule zb-v", ["--hidden-layers 8"]),
            (digits, "--width 6 --mesh.tensor 4", ["--width 8"]),
            (digits, "--split data --mesh.tensor 2", ["--mesh.tensor 1", "--split mixed"]),
            (digits, "--test-fraction nan", ["--test-fraction 0.2"]),
            (digits, "--test-fraction 0.99", ["--batch-size 18"]),
            (digits, "--batch-size 5000 --mesh.data 8 --num-microbatches 8", ["--batch-size 64"]),
            (digits, "--batch-size 3 --mesh.data 4", ["--batch-size 4"]),
            (
                digits,
                "--batch-size 16 --mesh.data 8 --num-microbatches 4 --test-fraction 0.99",
                ["--num-microbatches 2"],
            ),
            (digits, "--num-microbatches 0", ["--num-microbatches out"]),
            (digits, "--learning-rate nan", ["--learning-rate 0.001"]),
            (digits, "--eval-every 0", ["--eval-every 10"]),
            (digits, "--mesh.stage 2 --schedule 1f1b2", ["--schedule 1f1b"]),
            (gpt, "--steps 10 --warmup-steps 10", ["--warmup-steps 1", "--steps 11"]),
            (gpt, "--batch-size 0 --mesh.data 8 --num-microbatches 8", ["--batch-size 64"]),
            (gpt, "--batch-size 3 --mesh.stage 2", ["--batch-size 4"]),
            (gpt, "--num-chunks 2", ["--num-chunks out"]),
            (
                gpt,
                "--layers-per-virtual-stage 3 1",
                ["--layers-per-virtual-stage out", "--mesh.stage 2"],
            ),
            (gpt, "--num-chunks 2 --mesh.stage 2", ["--num-chunks 1", "--schedule zb-v"]),
            (gpt, "--num-chunks 3 --mesh.stage 2 --schedule zb-v", ["--num-chunks 2"]),
            (gpt, "--mesh.tensor 8 --model gpt2-bytes", ["--mesh.tensor 4"]),
            (gpt, "--model gpt2", ["--model gpt2-bytes"]),
            (gpt, "--model gpt5", ["--model llama-bytes"]),
            (gpt, "--sequence-parallel --seq 15 --mesh.tensor 2", ["--seq 16"]),
            (gpt, "--max-grad-norm 0", ["--max-grad-norm 1", "--max-grad-norm 1e9"]),
            (gpt, "--momentum 1 --optimizer sgd", ["--momentum 0"]),
            (gpt, "--momentum 0.5", ["--momentum out", "--optimizer sgd"]),
            (gpt, "--beta1 0.5 --optimizer sgd", ["--beta1 out", "--optimizer adamw"]),
            (gpt, "--beta2 1", ["--beta2 0.95"]),
            (gpt, "--epsilon 0", ["--epsilon 1e-8"]),
            (gpt, "--weight-decay -1", ["--weight-decay 0.1", "--weight-decay 0"]),
            (gpt, "--final-learning-rate 1", ["--final-learning-rate 0.0003"]),
            (
                gpt,
                "--final-learning-rate 0 --learning-rate-schedule constant",
                ["--final-learning-rate out", "--learning-rate-schedule linear"],
            ),
            (gpt, "--decay-steps 5", ["--decay-steps out", "--learning-rate-schedule wsd"]),
            (gpt, "--decay-steps 290 --learning-rate-schedule wsd", ["--decay-steps 56"]),
            (gpt, "--batch-tokens 100", ["--batch-tokens 96"]),
            (gpt, "--batch-tokens 64 --batch-size 8", ["--batch-tokens out"]),
            (gpt, "--microbatch-tokens 24", ["--microbatch-tokens 16"]),
            (gpt, "--data-weights 1 2", ["--data-weights out"]),
            (gpt, "--temperature -1", ["--temperature 0"]),
            (gpt, "--top-k 0", ["--top-k 1"]),
            (gpt, f"--init-from {LLAMA} --model gpt2", []),
            (all_reduce, "--devices 1", ["--devices 2 4 8"]),
            (all_reduce, "--devices 9", ["--batch-size 837"]),
            (all_reduce, "--devices 7 --batch-size 2000", ["--batch-size 1435"]),
            (all_reduce, "--devices 7 8 9 11", ["--devices 8"]),
            (all_reduce, "--hidden-layers 7", ["--hidden-layers 8"]),
            (bloom, "--mesh.data 3", ["--mesh.data 64"]),
            (bloom, "--gpus-per-node 6", ["--mesh.tensor 3"]),
            (bloom, "--gpus-per-node 0", ["--gpus-per-node 8"]),
            (all_reduce, "--devices 3 --batch-size 100", ["--batch-size 99"]),
        ],
        33,
        35,
        36,
        37,
        38,
        39,
        40,
        41,
        42,
        43,
        44,
        46,
        47,
        49,
        50,
        52,
        53,
    ),
    ids=lambda value: value if isinstance(value, str) else None,
)
def test_a_flag_that_a_recipe_names_is_taken(recipes, recipe, flags, remedies):
    flags = flags.split()
    message = recipes(recipe, flags)
    assert message, "it must be refused"
    for remedy in remedies:
        check_named(message, remedy)
        assert recipes(recipe, with_remedy(flags, remedy)) is None, remedy


@pytest.fixture
def commands(capsys):
    """Runs `python -m jaxpar`; gives what it says where it refuses, else None."""

    def said(line):
        code = command(line if isinstance(line, list) else line.split())
        message = capsys.readouterr().err
        return message if code else None

    return said


@pytest.mark.parametrize(
    ("line", "remedies"),
    [
        pytest.param(  # 12 heads
            "plan --model gpt2 --batch-size 8 --schedule 1f1b --remat no --tensor 5",
            ["--tensor 4"],
            marks=pytest.mark.full,
        ),
        pytest.param("plan --model bloom-176b --top 1", ["--nodes 7"], marks=pytest.mark.slow),
        pytest.param(
            "plan --model bloom-176b --nodes 7 --remat no", ["--remat yes"], marks=pytest.mark.slow
        ),
        pytest.param(
            "plan --model bloom-176b --nodes 8 --data 64", ["--data 16"], marks=pytest.mark.slow
        ),
        ("manifest --image a --mesh.data 12", ["--mesh.data 16"]),
        ("manifest --image a --mesh.data 8 --mesh.tensor 3", ["--mesh.tensor 4"]),
        ("manifest --image a --mesh.data 8 --name Foo_Bar", ["--name gpt-1"]),
        ("manifest --image a --mesh.data 8 --save-seconds 0", ["--save-seconds 60"]),
        (
            "manifest --image a --mesh.data 4 --mesh.stage 2 --replica-topology rack",
            ["--replica-topology out"],
        ),
        ("manifest --mesh.data 8", ["--image registry/name:tag"]),
    ],
)
def test_a_flag_that_a_command_names_is_taken(commands, line, remedies):
    words = line.split()
    program = ["recipes/gpt.py"] if words[0] == "manifest" else []
    message = commands([*words, *program])
    assert message, "it must be refused"
    for remedy in remedies:
        check_named(message, remedy)
        assert commands([*with_remedy(words, remedy), *program]) is None, remedy


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("held", "remedy"),
    [
        ({"tensor": 3}, {"tensor": 4}),
        pytest.param(*({"stage": 16}, {"stage": 4}), marks=pytest.mark.slow),
        pytest.param(*({"data": 8, "tensor": 2}, {"tensor": 1}), marks=pytest.mark.slow),
        ({"stage": 2, "schedule": "zb-v", "num_chunks": 3}, {"num_chunks": None}),
        pytest.param(*({"num_microbatches": 5}, {"num_microbatches": 4}), marks=pytest.mark.slow),
        pytest.param(*({"num_chunks": 0}, {"num_chunks": 1}), marks=pytest.mark.slow),
        ({"zero": 4}, {"zero": 0}),
    ],
    ids=str,
)
def test_a_setting_that_the_planner_names_can_be_held(held, remedy):
    few = {"schedule": "1f1b", "remat": False, "batch_size": 64, "top": 1}  # to search less
    with pytest.raises(ValueError, match="; got ") as refused:
        jaxpar.plan(SMALL, node(), **(few | held))
    [(name, value)] = remedy.items()
    check_named(str(refused.value), f"--{name} {'out' if value is None else value}")
    assert jaxpar.plan(SMALL, node(), **(few | held | remedy))


# -- a run that goes on ------------------------------------------------------------------------------------------------


def refused(capsys, recipe, flags):
    with pytest.raises(SystemExit, match="2"):
        cli.run(recipe.main, recipe.Config, [*map(str, flags)])
    return capsys.readouterr().err


@pytest.fixture(scope="module")
def house(tmp_path_factory):
    """The folder of a run with a checkpoint of step 4, that is to have 8."""
    folder = tmp_path_factory.mktemp("house")
    flags = [
        "--out-dir",
        str(folder),
        "--batch-size",
        "10",
        "--checkpoint-every",
        "4",
        "--max-skipped",
        "4",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(house_prices, "conclude", lambda *_: None)
        cli.run(house_prices.main, house_prices.Config, [*flags, "--steps", "4"])
    return folder


def test_what_a_refused_resume_says_may_change_does(recipes, house):
    flags = ["--out-dir", str(house), "--resume", "--batch-size", "6", "--learning-rate", "0.1"]
    said = recipes(house_prices, flags)
    [remedy] = re.findall(r"\((--allow-change [a-z_ ]+)\), or start", said)
    assert recipes(house_prices, [*flags, *remedy.split()]) is None


def test_a_setting_that_may_change_but_is_not_there_is_told(recipes, house, monkeypatch):
    told = []
    monkeypatch.setattr(
        Run.__init__, "__kwdefaults__", Run.__init__.__kwdefaults__ | {"say": told.append}
    )
    flags = [
        "--out-dir",
        str(house),
        "--batch-size",
        "10",
        "--resume",
        "--allow-change",
        "seed",
        "lr",
    ]
    assert recipes(house_prices, flags) is None
    assert told[-1].startswith(
        "--allow-change has no effect for lr: the settings are batch_size, "
    ), told


def test_a_new_run_in_the_folder_of_another_may_do_each_thing_that_it_is_told(
    recipes, house, tmp_path
):
    said = recipes(house_prices, ["--out-dir", str(house), "--batch-size", "10"])
    assert (
        "Continue it with --resume, choose another --out-dir, or add --overwrite, which deletes the earlier run."
        in said
    )
    assert (
        recipes(house_prices, ["--out-dir", str(house), "--batch-size", "10", "--resume"]) is None
    )
    assert recipes(house_prices, ["--out-dir", str(tmp_path / "another")]) is None
    shutil.copytree(house, tmp_path / "copy")
    assert recipes(house_prices, ["--out-dir", str(tmp_path / "copy"), "--overwrite"]) is None


def test_a_damaged_checkpoint_is_not_recommended(recipes, tmp_path):
    (tmp_path / "out" / "checkpoints" / "4").mkdir(parents=True)
    said = recipes(house_prices, ["--out-dir", "out"])
    assert "got one that is damaged in" in said
    assert said.endswith(
        ". Choose another --out-dir, or add --overwrite, which deletes the earlier run."
    )
    assert recipes(house_prices, ["--out-dir", "out", "--overwrite"]) is None


def test_a_resume_without_a_checkpoint_may_begin(recipes):
    assert "leave --resume out" in recipes(house_prices, ["--resume", "--out-dir", "none"])
    assert recipes(house_prices, ["--out-dir", "none"]) is None


@pytest.fixture(scope="module")
def tuned(tmp_path_factory):
    """The folder of a run from published weights with a checkpoint of step 4 of 4, its text and its flags."""
    folder = tmp_path_factory.mktemp("gpt")
    shutil.copytree(LLAMA, folder / "llama")
    (np.arange(4000) ** 2 % 24).astype(np.uint16).tofile(folder / "tokens.bin")
    flags = [
        "--out-dir",
        "out",
        "--seq",
        "8",
        "--warmup-steps",
        "1",
        "--steps",
        "4",
        "--batch-size",
        "2",
    ]
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(folder)
        patch.setattr(gpt, "conclude", lambda *_: None)
        from_here = ["--init-from", "llama", "--data", "tokens.bin"]
        cli.run(
            gpt.main,
            gpt.Config,
            [*flags, *from_here, "--checkpoint-every", "4", "--eval-rows", "2"],
        )
    return folder, ["--resume", *flags, "--eval-rows", "2"]


@pytest.mark.few(2)
@pytest.mark.parametrize(
    ("model", "text"),
    [
        pytest.param("llama", "tokens.bin", marks=pytest.mark.full),
        pytest.param("./llama/", "../{name}/tokens.bin", marks=pytest.mark.full),
        pytest.param("{folder}/llama", "{folder}/tokens.bin", marks=pytest.mark.full),
        pytest.param("link", "tokens-link.bin", marks=pytest.mark.full),
        pytest.param("copy", "copy.bin", marks=pytest.mark.full),
    ],
)
def test_a_run_resumes_from_the_same_weights_and_text_however_they_are_named(
    recipes, tuned, monkeypatch, model, text
):
    folder, flags = tuned
    monkeypatch.chdir(folder)
    if model == "link" and not Path("link").exists():
        Path("link").symlink_to(folder / "llama")
        Path("tokens-link.bin").symlink_to(folder / "tokens.bin")
    if model == "copy":
        shutil.copytree("llama", "copy", dirs_exist_ok=True)
        shutil.copy("tokens.bin", "copy.bin")
    model, text = (word.format(folder=folder, name=folder.name) for word in (model, text))
    assert recipes(gpt, [*flags, "--init-from", model, "--data", text]) is None


@pytest.mark.parametrize("changed", ["init_from", pytest.param("text", marks=pytest.mark.full)])
def test_a_run_does_not_resume_from_other_weights_or_another_text_unless_told(
    recipes, tuned, changed
):
    folder, flags = tuned
    shutil.copytree(folder / "llama", "llama")
    shutil.copy(folder / "tokens.bin", "tokens.bin")
    path = (
        next(Path("llama").glob("*.safetensors")) if changed == "init_from" else Path("tokens.bin")
    )
    path.write_bytes(path.read_bytes()[:-2] + b"\x01\x00")
    flags = [
        *flags,
        "--out-dir",
        str(folder / "out"),
        "--init-from",
        "llama",
        "--data",
        "tokens.bin",
    ]
    said = recipes(gpt, flags)
    got = "got init_from='crc32 " if changed == "init_from" else "got --data tokens.bin, where"
    assert got in said
    [remedy] = re.findall(r"\((--allow-change [a-z_ ]+)\), or start", said)
    assert recipes(gpt, [*flags, *remedy.split()]) is None


@pytest.mark.parametrize(
    ("changed", "remedy"),
    [
        ("--warmup-steps 4", "--warmup-steps 0 --allow-change warmup_steps"),
        pytest.param(
            "--mesh.data 2 --mesh.stage 2", "--num-microbatches 1", marks=pytest.mark.full
        ),
        pytest.param("--mesh.data 4", "--mesh.data 2", marks=pytest.mark.full),
    ],
)
def test_a_resume_offers_no_change_that_it_refuses(recipes, tuned, monkeypatch, changed, remedy):
    folder, flags = tuned
    monkeypatch.chdir(folder)
    flags = [*flags, "--init-from", "llama", "--data", "tokens.bin", *changed.split()]
    assert f"Choose {remedy}" in recipes(gpt, flags)
    assert recipes(gpt, [*flags, *remedy.split()]) is None


def test_the_steps_that_a_resume_asks_for_are_taken(recipes, tuned, monkeypatch):
    folder, flags = tuned
    monkeypatch.chdir(folder)
    flags = [*flags, "--init-from", "llama", "--data", "tokens.bin"]
    said = recipes(gpt, with_remedy(flags, "--steps 2"))
    assert "got --steps 2, a checkpoint of step 4. Choose --steps 4 or more: " in said
    assert recipes(gpt, with_remedy(flags, "--steps 4")) is None


def test_a_run_resumes_with_more_steps_and_says_how_its_learning_rate_goes_on(
    recipes, tuned, monkeypatch
):
    folder, flags = tuned
    monkeypatch.chdir(folder)
    said: list[str] = []
    monkeypatch.setattr("jaxpar.run.optimizers.say", said.append)
    assert (
        recipes(
            gpt, [*with_remedy(flags, "--steps 8"), "--init-from", "llama", "--data", "tokens.bin"]
        )
        is None
    )
    assert [line for line in said if "now, and had" in line] == [
        "the run has --steps 8 now, and had 4 when it was saved: from here on the learning rate follows the cosine schedule of "
        "8 steps, 0.00195 at step 4 instead of 0.0003"
    ]
