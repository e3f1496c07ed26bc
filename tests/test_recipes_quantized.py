"""recipes/gpt.py with LoRA beside weights in four bits: its files, resumed, exported and served; and what it refuses."""

import dataclasses
import json
import shutil

import jax
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file

import gpt
import jaxpar
from jaxpar.__main__ import main as jaxpar_main
from jaxpar.commands import recipe as cli
from jaxpar.huggingface.export import open_run
from jaxpar.models import lora, transformer
from jaxpar.models.quantized import Quantized, dense, is_quantized, quantize_weight
from jaxpar.run import language_model, model_files
from jaxpar.serve.open_run import _on_device
from jaxpar.tensor_parallel import TRANSFORMER_RULES
from tests.support.flags import replaced
from tests.support.gpt_data import make_folder, tuning_flags
from tests.support.oracle import assert_same, assert_same_bits
from tests.support.tiers import quick
from tests.support.tiny_lora import check_merged

SHAPE = {
    "embed_dim": 64,
    "mlp_dim": 128,
    "num_heads": 8,
    "num_kv_heads": 4,
    "explicit_head_dim": 16,
}
LORA = ["--lora-rank", "8", "--lora-alpha", "16"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return make_folder(tmp_path_factory.mktemp("model"), **SHAPE)


@pytest.fixture
def run(folder):
    usual = [*tuning_flags(folder), "--steps", "4", "--checkpoint-every", "2"]
    return lambda out_dir, *flags: cli.run(
        gpt.main, gpt.Config, replaced([*usual, "--out-dir", str(out_dir), *flags])
    )


def in_four_bits(path, kind):
    """The tensors of a folder, with those of layers rounded to a kind: its tensors are [out, in]."""
    tensors = load_file(path / "model.safetensors")

    def rounded(name, tensor):
        if "layers" not in name or tensor.ndim == 1:
            return tensor
        return np.asarray(
            dense(quantize_weight(np.ascontiguousarray(tensor.T), kind, 1, 0, name))
        ).T

    return {name: rounded(name, tensor) for name, tensor in tensors.items()}


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize("kind", ["nf4-dq", "nf4"])  # the first has codes of codes
def test_a_run_in_four_bits_is_resumed_saved_exported_and_served(
    run, folder, tmp_path, capsys, kind
):
    whole, again = tmp_path / "whole", tmp_path / "again"
    mesh = [
        "--mesh.data",
        "2",
        "--mesh.stage",
        "2",
        "--mesh.tensor",
        "2",
        *LORA,
        "--quantize",
        kind,
    ]
    run(whole, *mesh, "--save-hf", str(whole / "hf"))
    assert (
        f"{kind}: w_qkv, w_out, w_up, w_down of each layer, which are frozen"
        in capsys.readouterr().out
    )
    merged = load_file(whole / "hf/model.safetensors")
    adapters = load_file(whole / "adapter/adapter_model.safetensors")
    base = in_four_bits(folder / "llama", kind)
    check_merged(merged, base, adapters, scale=16 / 8)
    changed = "model.layers.1.mlp.down_proj.weight"
    assert (
        np.abs(base[changed] - load_file(folder / "llama/model.safetensors")[changed]).max() > 0.005
    ), "rounded"

    shutil.copytree(
        whole / "checkpoints/2", again / "checkpoints/2"
    )  # as a kill after step 2 leaves it
    run(again, *mesh, "--resume", "--save-hf", str(again / "hf"))
    assert_same_bits(load_file(again / "hf/model.safetensors"), merged)

    assert jaxpar_main(["export", str(whole), str(tmp_path / "exported")]) == 0
    assert_same(load_file(tmp_path / "exported/model.safetensors"), merged, within=1e-6)

    served, exported = open_run(whole, keeps_codes=True), open_run(whole)
    params = _on_device(served.params, transformer.param_table(served.config), "float32")
    of_mlp = params["layers"]["mlp"]
    weights = [of_mlp[name].weight for name in ("w_up", "w_down")]
    assert all(map(is_quantized, weights)), "codes stay codes"
    assert [each.kind for each in weights] == [kind] * 2
    assert [is_quantized(each.scales) for each in weights] == [kind == "nf4-dq"] * 2
    prompt = np.arange(6)[None]
    tokens = transformer.generate(served.config, params, prompt, 8)
    want = transformer.generate(served.config, jax.tree.map(np.asarray, exported.params), prompt, 8)
    assert_same_bits(np.asarray(tokens), np.asarray(want))


@pytest.mark.parametrize("kind", quick(["nf4", "nf4-dq", "int8"], "nf4-dq"))
def test_a_folder_is_read_into_the_codes_of_its_weights(folder, kind):
    config = jaxpar.huggingface.read_config(folder / "llama").for_tensor(2)
    mesh = jaxpar.make_mesh(data=2, tensor=2, devices=jax.devices()[:4])
    table = transformer.param_table(config)
    shardings = jaxpar.shardings_from_dims(table, mesh, TRANSFORMER_RULES)
    params = jaxpar.huggingface.read_params(folder / "llama", config, shardings)
    want = lora.quantize(jaxpar.fetch(params), kind, transformer.LAYER_WEIGHTS)
    in_codes = lora.quantized_shardings(want, shardings)
    got = jaxpar.huggingface.read_params(folder / "llama", config, in_codes)
    assert jax.tree.map(lambda leaf: leaf.sharding.spec, got) == jax.tree.map(
        lambda each: each.spec, in_codes
    )
    assert_same_bits(jaxpar.fetch(got), jax.tree.map(np.asarray, want))
    assert isinstance(got["layers"]["mlp"]["w_down"], Quantized)


@pytest.mark.full
@pytest.mark.parametrize("kind", [None, "nf4-dq"])
def test_a_run_that_reads_weights_begins_with_the_factors_that_it_would_draw_and_no_weights_of_its_own(
    folder, kind
):
    flags = gpt.Config.of(lora_rank=2, lora_targets=("w_up", "w_out"), quantize=kind).lora
    config = jaxpar.huggingface.read_config(folder / "llama").for_tensor(1)
    mesh, layout = jaxpar.make_mesh(data=2, devices=jax.devices()[:2]), jaxpar.LayerLayout(2, 1)
    init, shardings = language_model.make_params(flags, config, layout, mesh, reads_weights=True)
    parallel = jaxpar.Parallel(mesh, shardings, zero=3, trainable=lora.ADAPTERS, layout=layout)
    first = init, jax.random.key(0), optax.adam(0.1), parallel
    whole = jaxpar.init_state(*first)
    weights = model_files.read_weights(folder / "llama", config, layout, whole)
    got = model_files.first_state(weights, *first)
    want = dataclasses.replace(whole, params=lora.with_weights(whole.params, weights))
    assert_same_bits(jaxpar.fetch(got), jaxpar.fetch(want))
    of = lambda state: jax.tree.map(lambda leaf: leaf.sharding, state)
    assert of(got) == of(want)
    read = {id(leaf) for leaf in jax.tree.leaves(weights)}
    assert {id(leaf) for leaf in jax.tree.leaves(lora.without_factors(got.params))} == read, (
        "not copied"
    )


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--quantize", "nf4"],
            "--quantize is for weights that are frozen; got nf4 without --lora-rank",
        ),
        (["--quantize", "nf5", *LORA], "invalid choice 'nf5'"),
        (
            [*LORA, "--quantize", "nf4", "--mesh.tensor", "4"],
            "whole blocks of 64 values of a weight in nf4; got",
        ),
    ],
)
def test_flags_that_do_not_fit_are_refused(run, tmp_path, capsys, flags, message):
    with pytest.raises(SystemExit) as stopped:
        run(tmp_path / "run", *flags)
    assert stopped.value.code == 2
    assert message in " ".join(capsys.readouterr().err.split())
    assert not (tmp_path / "run").exists()


def test_experts_are_not_quantized(tmp_path, capsys):
    flags = [
        "--model",
        "moe-bytes",
        *LORA,
        "--quantize",
        "int8",
        "--out-dir",
        str(tmp_path / "run"),
    ]
    with pytest.raises(SystemExit):
        cli.run(gpt.main, gpt.Config, flags)
    assert "--quantize is for models without experts; got int8 with" in " ".join(
        capsys.readouterr().err.split()
    )


def test_a_run_goes_on_with_the_codes_that_it_began_with():
    of = lambda **flags: gpt.Config.of(lora_rank=4, **flags).lora
    saved = json.loads(json.dumps(of(quantize="nf4").settings))
    assert saved["quantize"] == "nf4"
    gpt.check_factors(of(quantize="nf4"), saved)
    with pytest.raises(
        ValueError,
        match=r"--lora-targets w_down w_out w_qkv w_up --quantize nf4, or start a run in another",
    ):
        gpt.check_factors(of(), saved)
    with pytest.raises(
        ValueError, match=r"w_up and leave --quantize out, or start a run in another"
    ):
        gpt.check_factors(of(quantize="int8"), of().settings)
    with pytest.raises(
        ValueError,
        match=r"nf4-dq for a run saved with .* --quantize nf4\. Give .* --quantize nf4, or",
    ):
        gpt.check_factors(of(quantize="nf4-dq"), saved)
