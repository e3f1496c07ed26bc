"""recipes/gpt.py with LoRA: what is trained and written, runs that go on, flags that are refused."""

import dataclasses
import json
import re
import shutil
import sys
from pathlib import Path
from types import SimpleNamespace

import jax
import pytest
from safetensors.numpy import load_file

import gpt
import jaxpar
from jaxpar.__main__ import main as jaxpar_main
from jaxpar.commands import recipe as cli
from jaxpar.models import transformer
from jaxpar.pipeline import LayerLayout
from jaxpar.run import language_model, lora_flags, model_files, optimizers
from tests.support.flags import replaced
from tests.support.gpt_data import make_folder, tuning_flags
from tests.support.oracle import assert_same, assert_same_bits
from tests.support.tiny_lora import check_merged

LORA = ["--lora-rank", "8", "--lora-alpha", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"))


@pytest.fixture
def run(folder):
    usual = [*tuning_flags(folder), "--steps", "6", "--checkpoint-every", "3", *LORA]
    return lambda out_dir, *flags: cli.run(
        gpt.main, gpt.Config, replaced([*usual, "--out-dir", str(out_dir), *flags])
    )


def written(path):
    return {
        name: load_file(path / name)
        for name in ("adapter/adapter_model.safetensors", "hf/model.safetensors")
    }


@pytest.mark.slow
def test_replicas_and_tensor_learn_a_conversation_by_adapters_and_a_killed_run_resumed_writes_the_same_files(
    run, folder, tmp_path, capsys
):
    """In three dimensions: test_fine_tuning_page.py."""
    mesh = ["--mesh.data", "4", "--mesh.tensor", "2"]
    whole, again = tmp_path / "whole", tmp_path / "again"
    run(whole, *mesh, "--save-hf", str(whole / "hf"))
    assert "LoRA of rank 8 on w_qkv, w_out, w_up, w_down: " in capsys.readouterr().out
    losses = [
        json.loads(line)["loss"] for line in (whole / "metrics.jsonl").read_text().splitlines()
    ]
    assert losses[-1] < losses[0] - 0.02

    about = json.loads((whole / "adapter/adapter_config.json").read_text())
    assert (about["r"], about["lora_alpha"], about["base_model_name_or_path"]) == (
        8,
        16,
        str(folder / "llama"),
    )
    assert "self_attn.q_proj" in about["target_modules"]
    adapters, merged = written(whole).values()
    check_merged(merged, load_file(folder / "llama/model.safetensors"), adapters, scale=16 / 8)

    shutil.copytree(
        whole / "checkpoints/3", again / "checkpoints/3"
    )  # as a kill after step 3 leaves it
    run(again, *mesh, "--resume", "--save-hf", str(again / "hf"))
    assert_same_bits(written(again), written(whole))

    assert jaxpar_main(["export", str(whole), str(tmp_path / "exported")]) == 0
    assert_same(
        load_file(tmp_path / "exported/model.safetensors"),
        load_file(whole / "hf/model.safetensors"),
        within=1e-6,
    )


def test_alpha_over_the_rank_is_the_scale_and_targets_name_the_weights():
    flags = gpt.Config.of(lora_rank=8, lora_alpha=16.0, lora_targets=("w_out", "w_up"))
    lora = lora_flags.make_lora(flags.lora)
    assert (lora.rank, lora.scale, set(lora.targets)) == (8, 2.0, {"w_out", "w_up"})
    assert flags.lora.settings == {
        "lora_rank": 8,
        "lora_targets": ["w_out", "w_up"],
        "lora_alpha": 16.0,
    }


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--lora-rank", "0"], "--lora-rank must be at least 1; got 0. Choose 8"),
        (["--lora-alpha", "-1"], "--lora-alpha must be positive; got -1. Choose 16"),
        (
            ["--lora-targets", "w_up", "w_up"],
            "--lora-targets must name weights, each once; got w_up w_up. Choose among",
        ),
        (["--optimizer", "muon"], "got it with --lora-rank, which trains factors"),
        (
            ["--model", "moe-bytes", "--router-bias-rate", "0.1"],
            "--router-bias-rate updates the biases of routers; got it with",
        ),
        (
            ["--lora-rank", "None"],
            "--lora-targets and --lora-alpha apply to --lora-rank; got one of them without it",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(run, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "run", *flags)
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_factors_beside_random_weights_are_told():
    flags = gpt.Config.of(lora_rank=4).lora
    assert "the weights beside the factors are random" in lora_flags.remark_on_frozen(flags, None)
    assert lora_flags.remark_on_frozen(flags, Path("model")) == ""
    assert lora_flags.remark_on_frozen(gpt.Config.of().lora, None) == ""


def test_a_run_that_goes_on_with_another_optimizer_is_refused_with_a_way_to_change_it(tmp_path):
    flags = gpt.Config.of(optimizer="sgd", out_dir=tmp_path)
    with pytest.raises(
        ValueError,
        match=rf"got --optimizer sgd, and it was saved with adamw\. .* export {tmp_path} FOLDER, and begin a run with --init",
    ):
        optimizers.check_saved(flags, optimizers.settings(gpt.Config.of(optimizer="adamw")))
    optimizers.check_saved(flags, optimizers.settings(flags))
    optimizers.check_saved(flags, {})


def test_a_run_that_goes_on_with_other_factors_is_refused_with_those_that_it_has():
    of = lambda **flags: gpt.Config.of(**flags).lora
    saved = of(lora_rank=4, lora_targets=("w_up", "w_out")).settings
    with pytest.raises(
        ValueError,
        match=r"got --lora-rank 8 on w_down .* saved with --lora-rank 4 on w_out w_up\. Give --lora-rank 4 ",
    ):
        gpt.check_factors(of(lora_rank=8), saved)
    with pytest.raises(
        ValueError,
        match=r"got no --lora-rank for .* Give --lora-rank 4 --lora-targets w_out w_up, or start a run",
    ):
        gpt.check_factors(of(), saved)
    with pytest.raises(
        ValueError,
        match=r"saved with no --lora-rank\. Leave --lora-rank out, or start a run in another",
    ):
        gpt.check_factors(of(lora_rank=8), {"seed": 0})
    gpt.check_factors(of(lora_rank=4, lora_targets=("w_out", "w_up")), saved)
    gpt.check_factors(of(lora_rank=8), {})


def test_a_run_whose_model_is_gone_goes_on_with_the_description_that_it_keeps(tmp_path):
    (tmp_path / "run/model").mkdir(parents=True)
    (tmp_path / "run/model/config.json").write_text("{}")
    flags = gpt.Config.of(out_dir=tmp_path / "run", resume=True)
    check = lambda saved={"init_from": "crc32 0"}, **given: model_files.check_origin(
        flags.replace(**given), saved
    )
    gone = tmp_path / "llama"
    for got, given in ((f"{gone}, which does not exist", {"init_from": gone}), ("none", {})):
        with pytest.raises(FileNotFoundError, match=f"got {got}. Give the folder, or") as raised:
            check(**given)
    remedy = re.search(r"--init-from (\S+) --allow-change (init_from):", str(raised.value))
    check(init_from=Path(remedy[1]), allow_change=(remedy[2],))
    check(saved={})
    check(saved={"seed": 0}, init_from=gone)


def test_a_run_that_goes_on_beside_another_folder_says_whose_weights_it_has(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    flags = gpt.Config.of(out_dir=tmp_path / "run", resume=True, init_from=tmp_path)
    saved = {"init_from": f"crc32 {model_files.checksum_of_model(tmp_path)}"}
    assert not model_files.remark_on_origin(flags, {"init_from": "crc32 0"}), "a description"
    (tmp_path / "model.safetensors").write_bytes(b"other weights")
    assert model_files.remark_on_origin(flags, saved).startswith(
        f"{tmp_path} is not the folder that the run began with"
    )
    saved = {"init_from": f"crc32 {model_files.checksum_of_model(tmp_path)}"}
    assert not model_files.remark_on_origin(flags, saved)
    assert not model_files.remark_on_origin(flags, {})


@pytest.mark.parametrize(
    ("targets", "num_dense_layers", "num_shared", "remark"),
    [
        (("w_up", "w_down"), 1, 0, "w_up, w_down get factors in the leading dense layer"),
        (("w_out", "w_up"), 2, 0, "w_up gets factors in the 2 leading dense layers"),
        (("w_qkv", "w_out"), 1, 0, ""),
        (("w_up",), 1, 1, ""),
    ],
)
def test_a_run_and_a_plan_say_which_factors_the_leading_dense_layers_alone_get(
    targets, num_dense_layers, num_shared, remark, monkeypatch, capsys
):
    shares = {"num_dense_layers": num_dense_layers, "num_shared": num_shared}
    config = transformer.preset("moe-bytes").with_experts(**shares)
    flags = lora_flags.LoraFlags(lora_rank=4, lora_targets=targets)
    mesh = jaxpar.make_mesh(data=1, devices=jax.devices()[:1])
    said = language_model.describe(
        language_model.ModelFlags(), flags, config, mesh, 3520, schedule="1f1b"
    )
    told = said.splitlines()[-1].partition(" parameters are trained")[2]
    assert told.startswith(f"; {remark}") if remark else not told
    monkeypatch.setitem(sys.modules, "of_test", SimpleNamespace(CONFIG=config))
    plan = ["plan", "--model", "of_test:CONFIG", "--gpus-per-node", "2", "--tensor", "2"]
    plan += ["--batch-size", "8", "--num-microbatches", "1", "--top", "1"]
    assert jaxpar_main([*plan, "--lora-rank", "4", "--lora-targets", *targets]) == 0
    printed = " ".join(capsys.readouterr().out.split())
    assert (" factors in the " in printed) == bool(remark)
    assert remark in printed


@pytest.mark.parametrize("quantize", [None, "nf4"])
@pytest.mark.parametrize("layers", [None, (3, 1), (1, 1, 2)])
def test_factors_are_counted_without_what_pads_the_layers_of_a_stage(layers, quantize):
    config = transformer.preset("llama-bytes", num_layers=4, embed_dim=64, num_heads=4)
    flags = lora_flags.LoraFlags(lora_rank=4, lora_targets=("w_out",), quantize=quantize)
    mesh = jaxpar.make_mesh(stage=len(layers or "1"), devices=jax.devices()[: len(layers or "1")])
    layout = LayerLayout(4, len(layers or "1"), layers_per_virtual_stage=layers)
    init, _ = language_model.make_params(flags, config, layout, mesh, None, reads_weights=True)
    shapes = jax.eval_shape(init, jax.random.key(0))
    assert model_files.num_factor_params(shapes, layout) == 4 * 4 * (64 + 64)


@pytest.mark.parametrize(
    ("given", "got"),
    [
        ({}, "w_up w_down for .* these names"),
        ({"lora_targets": ("w_out", "w_up")}, "w_up for .* this name"),
    ],
)
def test_the_targets_of_a_model_with_experts_are_those_that_its_layers_have(given, got):
    config, check = transformer.preset("moe-bytes"), lora_flags.check_targets
    flags = lora_flags.LoraFlags(lora_rank=4, **given)
    with pytest.raises(
        ValueError, match=f"got {got}, whose 8 experts a layer take no factors"
    ) as raised:
        check(flags, config)
    targets = re.search(r"Give --lora-targets ([\w ]+)\.", str(raised.value))[1].split()
    check(dataclasses.replace(flags, lora_targets=tuple(targets)), config)
    check(lora_flags.LoraFlags(), config)
    check(
        flags,
        dataclasses.replace(
            config, experts=dataclasses.replace(config.experts, num_dense_layers=1)
        ),
    )


def test_adapters_keep_the_name_of_their_model_once_its_weights_are_gone(tmp_path):
    origin, described, folder = (tmp_path / name for name in ("origin", "model", "adapter"))
    for each in (origin, described, folder):
        each.mkdir()
    (origin / "model.safetensors").touch()
    assert model_files.base_of_adapters(folder, origin) == str(origin)
    assert model_files.base_of_adapters(folder, described) is None, "none is known"
    (folder / "adapter_config.json").write_text(json.dumps({"base_model_name_or_path": "origin"}))
    assert model_files.base_of_adapters(folder, described) == "origin"
    assert model_files.base_of_adapters(folder, None) is None
