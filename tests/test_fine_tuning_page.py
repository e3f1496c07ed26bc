"""docs/fine-tuning.md, followed to the letter: the rehearsal as it is, and the published model with a tiny one in its place."""

import contextlib
import io
import json
import os
import re
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import jax
import numpy as np
import pytest
import tyro
from safetensors.numpy import load_file

import gpt
import jaxpar
import untrained_model
from jaxpar import huggingface
from jaxpar.__main__ import main as jaxpar_main
from jaxpar.checkpoint.stored_params import open_stored_params
from jaxpar.commands import recipe as cli
from jaxpar.models import transformer
from jaxpar.models.lora import ADAPTERS, Adapted, Lora
from jaxpar.params import abstract_params, count_params
from jaxpar.run import language_model
from jaxpar.trainable import trained_part
from tests.support import doc_pages, serving
from tests.support.flags import replaced
from tests.support.oracle import assert_same
from tests.support.tiny_lora import check_merged
from tests.support.waiting import WAIT_SECONDS, XLA_WAITS, wait_until

ROOT = doc_pages.ROOT
PAGE = ROOT / "docs" / "fine-tuning.md"


TINY = {
    "num_layers": 2,
    "embed_dim": 16,
    "num_heads": 4,
    "num_kv_heads": 2,
    "mlp_dim": 24,
    "max_positions": 512,
}
MAKE, REHEARSE, SERVE, TUNE, SERVE_TUNED, PLAN, FOUR_BITS, SERVE_FOUR_BITS, TUNE_70B = (
    command for command in doc_pages.commands(PAGE) if command.words[0] == "python"
)
RECIPES = {"recipes/gpt.py": gpt, "recipes/untrained_model.py": untrained_model}
QUESTION = next(
    json.loads(command.words[-1])
    for command in doc_pages.commands(PAGE)
    if command.words[0] == "curl"
)
ANSWER = re.search(r'choices\[0\].message.content`: "(.*?)"', PAGE.read_text())[1]
STEPS, EVERY = 6, 2  # of the tuning: each step is like the others, and the rehearsal learns
FEW = ("--steps", str(STEPS), "--checkpoint-every", str(EVERY))


def link_recipes(folder):
    if not (folder / "recipes").exists():
        (folder / "recipes").symlink_to(ROOT / "recipes")


def follow(folder, command, *flags):
    """Runs a command of the page in a folder; returns what it prints."""
    recipe, printed = RECIPES[command.words[1]], io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        patch.setenv("XDG_CACHE_HOME", str(folder / "cache"))
        patch.setattr(jaxpar, "use_fake_devices", lambda count: None)  # the tests have 8
        link_recipes(folder)
        cli.run(recipe.main, recipe.Config, replaced([*command.words[2:], *flags]))
    return printed.getvalue()


# Compiles in half the time of all optimizations, and the steps are as fast.
OPTIMIZED = f"{XLA_WAITS} --xla_backend_optimization_level=1 --xla_backend_extra_options=xla_cpu_disable_new_fusion_emitters"


def optimized(folder):
    """The environment of a process whose programs are optimized, as those of the tests are not."""
    return os.environ | {
        "XLA_FLAGS": OPTIMIZED,
        "PYTHONPATH": str(ROOT),
        "XDG_CACHE_HOME": str(folder / "cache"),
    }


def train(folder, command, *flags):
    """Trains by a command of the page, in a process of its own, whose steps take most of the time."""
    link_recipes(folder)
    done = subprocess.run(
        [sys.executable, command.words[1], *replaced([*command.words[2:], *flags])],
        env=optimized(folder),
        cwd=folder,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def made(tmp_path_factory):
    """The folder in which the page made the model that its rehearsal trains."""
    folder = tmp_path_factory.mktemp("rehearsal")
    assert "written: small/" in follow(folder, MAKE)
    return folder


@pytest.fixture(scope="module")
def rehearsed(made):
    """That folder after the rehearsal, and what the training printed."""
    return made, train(made, REHEARSE)


def make_qwen(folder):
    """What the page downloads: qwen/, here tiny, with random weights."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(untrained_model, "SIZES", TINY)
        follow(folder, MAKE, "--out-dir", "qwen")


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder after the training of the published model, and what it printed."""
    folder = tmp_path_factory.mktemp("page")
    make_qwen(folder)
    return folder, follow(folder, TUNE, *FEW)


@pytest.fixture(scope="module")
def folder(trained):
    return trained[0]


def written(folder):
    """Every file that the page says is left, with its bytes."""
    return {
        path.relative_to(folder).as_posix(): path.read_bytes()
        for place in ("tuned", "runs/chat/adapter")
        for path in sorted((folder / place).iterdir())
    }


def adapted_params(folder):
    """The model of the run's last checkpoint, with its adapters beside the weights, not merged."""
    config = huggingface.read_config(folder / "tuned", vocab_multiple=language_model.VOCAB_MULTIPLE)
    stored = {
        path: np.asarray(leaf)
        for path, leaf in open_stored_params(folder / "runs/chat/checkpoints")[0].items()
    }
    table = transformer.param_table(config)

    def of(path, _):
        name = jaxpar.sharding.path_string(path)
        if name in stored:
            return stored[name]
        return Adapted(
            *(stored[f"{name}/{field}"] for field in ("weight", "lora_a", "lora_b")), scale=1.0
        )

    return config, jax.tree_util.tree_map_with_path(of, abstract_params(table))


def make_tokens():
    return np.random.default_rng(1).integers(0, 340, (3, 32)).astype(np.int32)


@pytest.fixture(scope="module")
def wanted_logits(folder):
    config, params = adapted_params(folder)
    logits = jax.jit(transformer.make_model(config).apply)(params, {"tokens": make_tokens()})
    return np.asarray(logits)[..., : config.vocab_size]


def test_the_page_shows_conversations_of_the_file_that_it_names():
    [shown] = [block.text for block in doc_pages.blocks(PAGE) if block.language == "jsonl"]
    file = (ROOT / "recipes/data/chats.jsonl").read_text().splitlines()
    assert len(file) == 300
    assert set(shown.splitlines()) <= set(file)


@pytest.mark.slow
def test_the_rehearsal_prints_what_the_page_quotes_and_learns_the_answers(rehearsed):
    folder, printed = rehearsed
    doc_pages.check_quoted(REHEARSE.quoted, printed, numbers=True)
    losses = [
        json.loads(line)["loss"]
        for line in (folder / "runs/rehearsal/metrics.jsonl").read_text().splitlines()
    ]
    assert losses[0] > 5
    assert losses[-1] < 0.5


@pytest.mark.slow
def test_the_server_answers_the_page_s_question_as_the_model_does(rehearsed):
    folder, _ = rehearsed
    *command, name = SERVE.words
    assert command == ["python", "-m", "jaxpar", "serve"]
    config = huggingface.read_config(folder / name)
    params, tokenizer = (
        huggingface.read_params(folder / name, config),
        huggingface.read_tokenizer(folder / name),
    )
    [end] = huggingface.stop_tokens(folder / name)
    text, _ = tokenizer.render(QUESTION["messages"], ask=True)
    [(prompt, _)] = tokenizer.encode([text], begins=[False])
    [row] = transformer.generate(config, params, [prompt], QUESTION["max_tokens"], eos=end)
    with serving.serving(folder / name) as client:
        assert "/v1/chat/completions" in client.get("/docs").text
        response = client.post("/v1/chat/completions", QUESTION)
    assert response.status == 200, response.text
    [choice] = response.json["choices"]
    assert choice["message"]["content"] == tokenizer.decode(row[len(prompt) :]) == ANSWER
    assert choice["finish_reason"] == "stop"


@pytest.fixture(scope="module")
def in_four_bits(rehearsed):
    """The folder after the training beside weights in four bits, and what it printed."""
    folder, _ = rehearsed
    return folder, train(folder, FOUR_BITS)


@pytest.mark.slow
def test_the_model_in_four_bits_gives_the_answer_of_the_page_and_the_server_of_its_run_too(
    in_four_bits,
):
    folder, printed = in_four_bits
    doc_pages.check_quoted(FOUR_BITS.quoted, printed, numbers=True)
    *command, name = SERVE_FOUR_BITS.words
    assert command == ["python", "-m", "jaxpar", "serve"]
    asked = QUESTION | {"model": Path(name).name}
    with serving.serving(folder / name) as client:
        response = client.post("/v1/chat/completions", asked)
    assert response.json["choices"][0]["message"]["content"] == ANSWER


@pytest.mark.full
def test_the_plan_of_the_70b_is_what_the_page_quotes(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "100")
    assert jaxpar_main(list(PLAN.words[3:])) == 0
    printed = capsys.readouterr().out
    assert PLAN.quoted in printed
    doubly = [word if word != "nf4" else "nf4-dq" for word in PLAN.words[3:]]
    assert jaxpar_main(doubly) == 0
    planned = re.search(r"memory  ([\d.]+ GiB) of", capsys.readouterr().out)
    assert planned
    assert f"With `--quantize nf4-dq` {planned[1]} are planned" in PAGE.read_text()


def test_the_command_for_the_70b_has_flags_that_there_are():
    flags = [word for word in TUNE_70B.words if word.startswith("--")]
    assert {"--quantize", "--lora-rank", "--remat"} <= set(flags)
    text = " ".join(TUNE_70B.words[2:]).replace("--init-from llama-70b", "--model llama3.1-70b")
    config = tyro.cli(gpt.Config, args=text.split())
    assert (config.lora.quantize, config.lora.lora_rank, config.recipe.remat) == ("nf4", 16, "full")


@pytest.mark.full
def test_the_page_quotes_what_is_printed_with_the_sizes_of_the_model_that_it_names(trained):
    doc_pages.check_quoted(TUNE.quoted, trained[1], numbers=False)
    shape = transformer.preset("qwen2.5-0.5b", vocab_multiple=language_model.VOCAB_MULTIPLE)
    table = abstract_params(transformer.param_table(shape))
    lora = Lora(8, transformer.LAYER_WEIGHTS)
    factors = trained_part(jax.eval_shape(lora.init, jax.random.key(0), table), ADAPTERS)
    sizes = (
        f"{shape.num_layers} layers, {shape.embed_dim} wide, {count_params(table):,} parameters;"
    )
    assert sizes in TUNE.quoted
    assert f": {count_params(factors):,} parameters are trained" in TUNE.quoted


def test_few_conversations_are_refused_with_all_flags_to_change_in_one_message(
    made, tmp_path, capsys, monkeypatch
):
    """The devices too: on one, the rehearsal's mesh cannot be made."""
    (tmp_path / "small").symlink_to(made / "small")
    lines = (ROOT / "recipes/data/chats.jsonl").read_text().splitlines(keepends=True)
    (tmp_path / "few.jsonl").write_text("".join(lines[:3]))
    flags = [
        "--data",
        "few.jsonl",
        "--out-dir",
        "few",
        "--save-hf",
        "few-tuned",
        "--fake-devices",
        "0",
    ]
    one = jax.devices()[:1]
    monkeypatch.setattr(jax, "devices", lambda: one)
    with pytest.raises(SystemExit):
        follow(tmp_path, REHEARSE, *flags)
    said = capsys.readouterr().err
    assert (
        "which needs 8 devices, with 1 devices. Choose smaller axes, or test on a laptop with 8 fake devices"
        in said
    )
    assert re.search(
        r"Also, each microbatch of each replica must have a row; got --mesh.data 2, 4 microbatches, --batch-size 16, 1 rows to "
        r"learn from of --seq 128. Choose --mesh.data 1 --num-microbatches 1 --batch-size 1, or give more "
        r"rows: 8 or more.$",
        said.strip(),
    ), said


def test_a_model_of_messages_that_are_not_there_is_refused(tmp_path, capsys):
    missing, out = tmp_path / "none.jsonl", tmp_path / "small"
    with pytest.raises(SystemExit) as end:
        cli.run(
            untrained_model.main,
            untrained_model.Config,
            ["--data", str(missing), "--out-dir", str(out)],
        )
    assert end.value.code == 2
    said = capsys.readouterr().err
    assert (
        f"--data must be a file of messages; got {missing}, which is none. Name one that is there."
        in said
    )
    assert not out.exists()


@pytest.mark.full
def test_the_tuned_model_has_the_logits_of_the_run_with_its_adapters_beside_the_weights(
    folder, wanted_logits
):
    config = huggingface.read_config(folder / "tuned")
    apply = jax.jit(transformer.make_model(config).apply)
    got, untrained = (
        np.asarray(apply(huggingface.read_params(folder / name, config), {"tokens": make_tokens()}))
        for name in ("tuned", "qwen")
    )
    assert_same(got, wanted_logits, within=1e-5)
    assert np.abs(untrained - wanted_logits).max() > 1e-3, "training changed the model"


@pytest.mark.full
def test_the_adapters_in_the_format_of_peft_are_those_of_the_run(folder):
    about = json.loads((folder / "runs/chat/adapter/adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"]) == (8, 8, "qwen")
    assert "self_attn.q_proj" in about["target_modules"]
    adapters = load_file(folder / "runs/chat/adapter/adapter_model.safetensors")
    base, tuned = (load_file(folder / each / "model.safetensors") for each in ("qwen", "tuned"))
    check_merged(tuned, base, adapters, scale=1)


@pytest.mark.full
def test_the_folder_keeps_the_files_of_the_original_beside_the_weights(folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / "tuned" / name).read_bytes() == (folder / "qwen" / name).read_bytes()
    assert (
        huggingface.stop_tokens(folder / "tuned") == huggingface.stop_tokens(folder / "qwen") != ()
    )


@pytest.mark.full
def test_export_of_the_checkpoint_is_the_same_model(folder, tmp_path):
    assert jaxpar_main(["export", str(folder / "runs/chat"), str(tmp_path / "exported")]) == 0
    exported, tuned = (
        load_file(each / "model.safetensors") for each in (tmp_path / "exported", folder / "tuned")
    )
    assert_same(exported, tuned, within=1e-6)


@pytest.mark.full
def test_a_run_that_was_killed_and_goes_on_writes_the_same_bytes(folder, tmp_path):
    for name in ("qwen", "cache"):
        (tmp_path / name).symlink_to(folder / name)
    kept = Path("runs/chat/checkpoints") / str(STEPS - EVERY)
    shutil.copytree(folder / kept, tmp_path / kept)  # as a kill after that step leaves it
    follow(tmp_path, TUNE, *FEW, "--resume")
    assert written(tmp_path) == written(folder)


@pytest.mark.slow
def test_a_process_that_is_killed_and_started_again_writes_the_same_bytes(
    tmp_path_factory, tmp_path
):
    whole = tmp_path_factory.mktemp("whole")
    for folder in (whole, tmp_path):
        make_qwen(folder)
    train(whole, TUNE, *FEW)
    command = [sys.executable, str(ROOT / TUNE.words[1]), *replaced([*TUNE.words[2:], *FEW])]
    kept = tmp_path / "runs/chat/checkpoints" / str(EVERY)
    options = {"cwd": tmp_path, "env": optimized(tmp_path), "stdout": subprocess.DEVNULL}
    with subprocess.Popen(command, **options) as process:
        wait_until(lambda: kept.is_dir() or process.poll() is not None)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "tuned/config.json").exists(), "no model, in the folder that it claims"
    subprocess.run([*command, "--resume"], **options, check=True, timeout=WAIT_SECONDS)
    assert written(tmp_path) == written(whole)


@pytest.mark.full
def test_the_tuned_model_is_served_under_the_name_of_its_folder(folder):
    *command, name = SERVE_TUNED.words
    assert command == ["python", "-m", "jaxpar", "serve"]
    with serving.serving(folder / name) as client:
        response = client.post("/v1/chat/completions", QUESTION | {"model": name, "max_tokens": 4})
    assert response.status == 200, response.text


@pytest.mark.full
@pytest.mark.filterwarnings("ignore")  # theirs
def test_transformers_loads_the_tuned_model_with_equal_logits(folder, wanted_logits, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch", reason="the same is tested without it above")
    transformers = pytest.importorskip("transformers", reason="the same is tested without it above")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "tuned").eval()
    with torch.no_grad():
        logits = theirs(torch.from_numpy(make_tokens()).long()).logits.numpy()
    assert_same(logits, wanted_logits, within=1e-5)
