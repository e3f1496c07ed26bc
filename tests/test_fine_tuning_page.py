"""docs/fine-tuning.md, followed from end to end with a tiny Qwen: LoRA on eight devices, its files, a killed run, serving."""

import contextlib
import io
import json
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import doc_pages
import jax
import numpy as np
import pytest
import serving
from lora_files import check_merged
from oracle import assert_same
from safetensors.numpy import load_file
from test_tokenizer import write_tokenizer
from tiny_transformer import make_params
from waiting import WAIT_SECONDS, wait_until

import jaxpar
from jaxpar import huggingface
from jaxpar.__main__ import main as jaxpar_main
from jaxpar.checkpoint.lazy_params import open_params
from jaxpar.models import transformer
from jaxpar.models.lora import ADAPTERS, Adapted, Lora
from jaxpar.params import abstract_params, count_params
from jaxpar.trainable import trained_part

ROOT = doc_pages.ROOT
PAGE = ROOT / "docs" / "fine-tuning.md"
sys.path.insert(0, str(ROOT / "recipes"))

import cli  # noqa: E402
import gpt  # noqa: E402
import gpt_model  # noqa: E402

TINY = {"num_layers": 2, "embed_dim": 16, "num_heads": 4, "num_kv_heads": 2, "mlp_dim": 24}
EVERY, STEPS = 3, 6
SHORT = ["--seq", "128", "--batch-size", "8", "--eval-rows", "8", "--warmup-steps", "1", "--lr", "0.2"]
SHORT += ["--steps", str(STEPS), "--checkpoint-every", str(EVERY), "--token-cache", "cache"]
IM_END = 2  # of the tokenizer below
TRAIN, SERVE = (command for command in doc_pages.commands(PAGE) if command.words[0] == "python")
QUESTION = next(json.loads(command.words[-1]) for command in doc_pages.commands(PAGE) if command.words[0] == "curl")


def make_folder(folder):
    """What the page has before the training: qwen/, with random weights, and chat.jsonl, with the page's lines many times."""
    small = transformer.preset("qwen2.5-0.5b", **TINY, vocab_size=352, max_positions=256)
    huggingface.write_model(folder / "qwen", small, make_params(small))
    write_tokenizer(folder / "qwen")
    (folder / "qwen/generation_config.json").write_text(json.dumps({"eos_token_id": [IM_END, 0]}))
    lines = [block.text for block in doc_pages.blocks(PAGE) if block.language == "jsonl"]
    (folder / "chat.jsonl").write_text("".join(lines) * 40)


def follow(folder, *flags):
    """Runs the page's training in a folder; returns what it prints."""
    assert TRAIN.words[:2] == ("python", "recipes/gpt.py")
    printed = io.StringIO()
    with pytest.MonkeyPatch.context() as patch, contextlib.redirect_stdout(printed):
        patch.chdir(folder)
        cli.run(gpt.main, gpt.Config, [*TRAIN.words[2:], *SHORT, *flags])
    return printed.getvalue()


@pytest.fixture(scope="module")
def trained(tmp_path_factory):
    """The folder after the page's training, and what it printed."""
    folder = tmp_path_factory.mktemp("page")
    make_folder(folder)
    return folder, follow(folder)


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
    config = huggingface.read_config(folder / "tuned", vocab_multiple=gpt_model.VOCAB_MULTIPLE)
    stored = {path: np.asarray(leaf) for path, leaf in open_params(folder / "runs/chat/checkpoints")[0].items()}
    table = transformer.param_table(config)

    def of(path, _):
        name = jaxpar.sharding.path_string(path)
        if name in stored:
            return stored[name]
        return Adapted(*(stored[f"{name}/{field}"] for field in ("weight", "lora_a", "lora_b")), scale=1.0)

    return config, jax.tree_util.tree_map_with_path(of, abstract_params(table))


def make_tokens():
    return np.random.default_rng(1).integers(0, 340, (3, 32)).astype(np.int32)


def wanted_logits(folder):
    config, params = adapted_params(folder)
    logits = transformer.make_model(config).apply(params, {"tokens": make_tokens()})
    return np.asarray(logits)[..., : config.vocab_size]


def test_the_loss_falls_and_the_prompt_is_answered(folder):
    losses = [json.loads(line)["loss"] for line in (folder / "runs/chat/metrics.jsonl").read_text().splitlines()]
    assert len(losses) == STEPS
    assert losses[-1] < losses[0] - 0.1
    sample = (folder / "runs/chat/sample.txt").read_text()
    assert sample.startswith("user\nWhat is a mesh?\nassistant\n")


def test_the_page_quotes_what_is_printed_with_the_sizes_of_the_model_that_it_names(trained):
    doc_pages.check_quoted(TRAIN.quoted, trained[1], numbers=False)
    shape = transformer.preset("qwen2.5-0.5b", vocab_multiple=gpt_model.VOCAB_MULTIPLE)
    table = abstract_params(transformer.param_table(shape))
    lora = Lora(8, transformer.LAYER_WEIGHTS)
    factors = trained_part(jax.eval_shape(lora.init, jax.random.key(0), table), ADAPTERS)
    sizes = f"{shape.num_layers} layers, {shape.embed_dim} wide, {count_params(table):,} parameters;"
    assert sizes in TRAIN.quoted
    assert f": {count_params(factors):,} parameters are trained" in TRAIN.quoted


def test_the_tuned_model_has_the_logits_of_the_run_with_its_adapters_beside_the_weights(folder):
    config = huggingface.read_config(folder / "tuned")
    params = huggingface.read_params(folder / "tuned", config)
    got = transformer.make_model(config).apply(params, {"tokens": make_tokens()})
    want = wanted_logits(folder)
    assert_same(np.asarray(got), want, within=1e-5)
    base = huggingface.read_params(folder / "qwen", config)
    untrained = np.asarray(transformer.make_model(config).apply(base, {"tokens": make_tokens()}))
    assert np.abs(untrained - want).max() > 0.01, "training changed the model"


def test_the_adapters_in_the_format_of_peft_are_those_of_the_run(folder):
    about = json.loads((folder / "runs/chat/adapter/adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"]) == (8, 8, "qwen")
    assert "self_attn.q_proj" in about["target_modules"]
    adapters = load_file(folder / "runs/chat/adapter/adapter_model.safetensors")
    base, tuned = (load_file(folder / each / "model.safetensors") for each in ("qwen", "tuned"))
    check_merged(tuned, base, adapters, scale=1)


def test_the_folder_keeps_the_files_of_the_original_beside_the_weights(folder):
    for name in ("tokenizer.json", "tokenizer_config.json", "generation_config.json"):
        assert (folder / "tuned" / name).read_bytes() == (folder / "qwen" / name).read_bytes()
    assert huggingface.stop_tokens(folder / "tuned") == (IM_END, 0)


def test_export_of_the_checkpoint_is_the_same_model(folder, tmp_path):
    assert jaxpar_main(["export", str(folder / "runs/chat"), str(tmp_path / "exported")]) == 0
    exported, tuned = (load_file(each / "model.safetensors") for each in (tmp_path / "exported", folder / "tuned"))
    assert_same(exported, tuned, within=1e-6)


def test_a_run_that_was_killed_and_goes_on_writes_the_same_bytes(folder, tmp_path):
    for name in ("qwen", "chat.jsonl", "cache"):
        (tmp_path / name).symlink_to(folder / name)
    kept = Path("runs/chat/checkpoints") / str(EVERY)
    shutil.copytree(folder / kept, tmp_path / kept)  # as a kill after that step leaves it
    follow(tmp_path, "--resume")
    assert written(tmp_path) == written(folder)


@pytest.mark.slow
def test_a_process_that_is_killed_and_started_again_writes_the_same_bytes(folder, tmp_path):
    make_folder(tmp_path)
    command = [sys.executable, str(ROOT / TRAIN.words[1]), *TRAIN.words[2:], *SHORT, "--fake-devices", "8"]
    kept = tmp_path / "runs/chat/checkpoints" / str(EVERY)
    with subprocess.Popen(command, cwd=tmp_path, stdout=subprocess.DEVNULL) as process:
        wait_until(lambda: kept.is_dir() or process.poll() is not None)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert not (tmp_path / "tuned").exists()
    subprocess.run([*command, "--resume"], cwd=tmp_path, check=True, stdout=subprocess.DEVNULL, timeout=WAIT_SECONDS)
    assert written(tmp_path) == written(folder)


def test_the_server_answers_the_page_s_question_as_the_model_does(folder):
    *command, name = SERVE.words
    assert command == ["python", "-m", "jaxpar", "serve"]
    config = huggingface.read_config(folder / name)
    params, tokenizer = huggingface.read_params(folder / name, config), huggingface.read_tokenizer(folder / name)
    text, _ = tokenizer.render(QUESTION["messages"], ask=True)
    [(prompt, _)] = tokenizer.encode([text], begins=[False])
    [row] = transformer.generate(config, params, [prompt], QUESTION["max_tokens"], eos=(IM_END, 0))
    new = row[len(prompt) :]
    with serving.serving(folder / name) as client:
        assert "/v1/chat/completions" in client.get("/docs").text
        response = client.post("/v1/chat/completions", QUESTION)
    assert response.status == 200, response.text
    [choice] = response.json["choices"]
    assert choice["message"]["content"] == tokenizer.decode(new)
    assert choice["finish_reason"] == ("stop" if new[-1] in (IM_END, 0) else "length")


@pytest.mark.filterwarnings("ignore")  # theirs
def test_transformers_loads_the_tuned_model_with_equal_logits(folder, monkeypatch):
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    torch = pytest.importorskip("torch", reason="the same is tested without it above")
    transformers = pytest.importorskip("transformers", reason="the same is tested without it above")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(folder / "tuned").eval()
    with torch.no_grad():
        logits = theirs(torch.from_numpy(make_tokens()).long()).logits.numpy()
    assert_same(logits, wanted_logits(folder), within=1e-5)
