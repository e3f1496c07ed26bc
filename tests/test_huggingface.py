"""Checkpoints of GPT-2, Llama and BLOOM: the numbers of transformers, the same bytes back, checks before writing."""

import dataclasses
import json
import os
import re
import shutil
import subprocess
import sys
import types

import jax
import ml_dtypes
import numpy as np
import optax
import pytest
from safetensors.numpy import load_file, save_file

import jaxpar
from jaxpar.huggingface import params as reading
from jaxpar.huggingface import read_params, write_description, write_model
from jaxpar.huggingface.config import family_of
from jaxpar.huggingface.dtypes import narrowed_dtypes
from jaxpar.models import transformer
from jaxpar.params import ParamSpec
from jaxpar.run import BasicFlags, model_files
from jaxpar.run.save_folder import SaveFolder
from jaxpar.serve import open_run
from tests.support.model_folders import (
    CONFIG,
    GOLDEN,
    INDEX,
    ONE_FILE,
    all_tensors,
    change,
    copy,
    copy_with,
    read_config,
)
from tests.support.oracle import assert_same_bits
from tests.support.tiers import quick
from tests.support.tiny_transformer import FAMILIES, THREE, make_params, shardings
from tests.support.waiting import WAIT_SECONDS

MODELS = FAMILIES | {
    "bloom": dataclasses.replace(FAMILIES["bloom"], mlp_dim=None)
}  # transformers' is 4 times as wide


# The same numbers.


@pytest.mark.parametrize("family", quick(THREE, "bloom"))
def test_logits_equal_those_of_transformers(family):
    config = read_config(GOLDEN / family)
    expected = np.load(GOLDEN / family / "expected.npz")
    params = read_params(GOLDEN / family, config)
    logits = transformer.make_model(config).apply(params, {"tokens": expected["tokens"]})
    np.testing.assert_allclose(logits, expected["logits"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("family", quick(THREE, "bloom"))
def test_what_is_written_is_what_was_read(family, tmp_path):
    config = read_config(GOLDEN / family)
    params = read_params(GOLDEN / family, config)
    write_model(tmp_path / "new", config, params)
    assert_same_bits(all_tensors(tmp_path / "new"), all_tensors(GOLDEN / family))
    assert read_config(tmp_path / "new") == config
    if (GOLDEN / family / ONE_FILE).exists():
        assert (tmp_path / "new" / ONE_FILE).read_bytes() == (
            GOLDEN / family / ONE_FILE
        ).read_bytes()


@pytest.mark.parametrize("zero", [0, 3])
@pytest.mark.parametrize("family", THREE)
def test_each_device_gets_its_own_part_and_a_host_holds_no_more(
    family, zero, tmp_path, monkeypatch
):
    config = MODELS[family]
    params = make_params(config, dtype=np.float32)
    write_model(tmp_path / "model", config, params)
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    state = jaxpar.abstract_state(
        lambda _: jax.tree.map(jax.numpy.asarray, params),
        jax.random.key(0),
        optax.sgd(0.1),
        mesh,
        shardings(config, mesh),
        zero=zero,
    )
    where = jax.tree.map(lambda leaf: leaf.sharding, state.params)
    blocks = []
    read_block = reading.read_block
    monkeypatch.setattr(
        reading, "read_block", lambda *args: blocks.append(read_block(*args)) or blocks[-1]
    )
    got = read_params(tmp_path / "model", config, where)
    assert jax.tree.map(lambda leaf: leaf.sharding, got) == where
    assert_same_bits(got, params)
    unique = [
        {
            str(index): np.prod(
                [len(range(*at.indices(n))) for at, n in zip(index, leaf.shape, strict=True)]
            )
            for index in leaf.sharding.devices_indices_map(leaf.shape).values()
        }
        for leaf in jax.tree.leaves(got)
    ]
    assert sum(block.size for block in blocks) == sum(sum(parts.values()) for parts in unique)
    assert max(block.size for block in blocks) < max(leaf.size for leaf in jax.tree.leaves(got))


@pytest.mark.parametrize("family", quick(FAMILIES, "gpt2-untied", "llama-tied"))
def test_every_model_comes_back_from_a_mesh_and_several_files(family, tmp_path):
    config = MODELS[family]
    params = make_params(config, dtype=np.float32)
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    write_model(
        tmp_path, config, jaxpar.shard(params, shardings(config, mesh)), max_file_bytes=8000
    )
    files = sorted(tmp_path.glob("*.safetensors"))
    assert [file.name for file in files] == [
        f"model-{i:05d}-of-{len(files):05d}.safetensors" for i in range(1, len(files) + 1)
    ]
    assert len(files) > 1
    assert max(sum(t.nbytes for t in load_file(file).values()) for file in files) <= 8000
    index = json.loads((tmp_path / INDEX).read_text())
    assert index["metadata"]["total_size"] == sum(t.nbytes for t in all_tensors(tmp_path).values())
    assert {file.name: sorted(load_file(file)) for file in files} == {
        file.name: sorted(t for t, name in index["weight_map"].items() if name == file.name)
        for file in files
    }
    assert_same_bits(read_params(tmp_path, read_config(tmp_path)), params)


def test_rows_that_fill_up_the_vocabulary_are_zeros_and_are_not_written(tmp_path):
    config = read_config(GOLDEN / "llama", vocab_multiple=16)
    expected = np.load(GOLDEN / "llama" / "expected.npz")
    params = read_params(GOLDEN / "llama", config)
    assert params["outer"]["tokens"].shape == (32, 16)
    assert not params["outer"]["tokens"][24:].any()
    assert not params["outer"]["head"][:, 24:].any()
    logits = transformer.make_model(config).apply(params, {"tokens": expected["tokens"]})
    np.testing.assert_allclose(logits[..., :24], expected["logits"], rtol=0, atol=1e-5)
    write_model(tmp_path, config, params)
    assert_same_bits(all_tensors(tmp_path), all_tensors(GOLDEN / "llama"))


@pytest.mark.parametrize(
    ("named", "told"),
    [("bfloat16", ["float32"]), ("float32", []), ("float16", ["bfloat16", "float32"])],
)
def test_a_run_says_which_numbers_of_a_model_of_several_dtypes_lose_bits(tmp_path, named, told):
    folder = copy_with("llama", tmp_path, dtype=named)
    tensors = all_tensors(folder)
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    narrow = lambda name, tensor: tensor if "norm" in name else tensor.astype(ml_dtypes.bfloat16)
    save_file(
        {name: narrow(name, tensor) for name, tensor in tensors.items()},
        folder / "model.safetensors",
        {"format": "pt"},
    )
    assert narrowed_dtypes(folder) == told
    of = lambda has_checkpoints: "".join(
        model_files.remarks_on_dtypes(folder, has_checkpoints=has_checkpoints)
    )
    line = f"in {', '.join(told)} are written in {named}, which its config.json names: "
    assert (f"{line}`export --dtype float32` keeps their bits" in of(True)) == bool(told)
    assert (f"{line}to keep their bits save checkpoints" in of(False)) == bool(told)
    config = read_config(folder)
    write_model(tmp_path / "new", config, read_params(folder, config), source=folder)
    assert {str(tensor.dtype) for tensor in all_tensors(tmp_path / "new").values()} == {named}


@pytest.mark.parametrize("named", ["float32", "float64", "bfloat16"])
def test_a_run_says_that_it_reads_float64_as_float32(tmp_path, named):
    folder = copy_with("llama", tmp_path, dtype=named)
    wide = {name: tensor.astype(np.float64) for name, tensor in all_tensors(folder).items()}
    for path in folder.glob("model*.safetensors*"):
        path.unlink()
    save_file(wide, folder / "model.safetensors", {"format": "pt"})
    read, *others = model_files.remarks_on_dtypes(folder, has_checkpoints=True)
    assert read.endswith("in float64 are read as float32, in which a run has its params")
    assert len(others) == (named == "bfloat16")


@pytest.mark.parametrize(
    ("written", "read"), [("bfloat16", "float32"), ("float16", "bfloat16"), ("float32", "float16")]
)
def test_dtypes_are_those_that_are_asked_for(written, read, tmp_path):
    config = read_config(GOLDEN / "gpt2")
    params = read_params(GOLDEN / "gpt2", config)
    write_model(tmp_path, config, params, dtype=written)
    assert {str(tensor.dtype) for tensor in all_tensors(tmp_path).values()} == {written}
    assert json.loads((tmp_path / CONFIG).read_text())["torch_dtype"] == written
    got = read_params(tmp_path, config, dtype=read)
    names = {"float32": np.float32, "float16": np.float16, "bfloat16": ml_dtypes.bfloat16}
    assert_same_bits(
        got,
        jax.tree.map(
            lambda leaf: np.asarray(leaf).astype(names[written]).astype(names[read]), params
        ),
    )


def test_checkpoints_without_a_head_have_no_prefix(tmp_path):
    folder = copy("gpt2", tmp_path)
    tensors = {
        name.removeprefix("transformer."): tensor
        for name, tensor in load_file(folder / ONE_FILE).items()
    }
    save_file(tensors, folder / ONE_FILE)
    assert_same_bits(
        read_params(folder, read_config(folder)), read_params(GOLDEN / "gpt2", read_config(folder))
    )


def test_known_masks_are_no_params(tmp_path):
    folder = copy("gpt2", tmp_path)
    masks = {f"transformer.h.{i}.attn.bias": np.tril(np.ones((1, 1, 8, 8), bool)) for i in range(2)}
    change(folder, masks | {"transformer.h.0.attn.masked_bias": np.full((), -1e4, np.float32)})
    assert_same_bits(
        read_params(folder, read_config(folder)), read_params(GOLDEN / "gpt2", read_config(folder))
    )


def test_a_head_beside_a_tied_embedding_must_be_the_same(tmp_path):
    folder = copy("bloom", tmp_path)
    tokens = load_file(folder / ONE_FILE)["transformer.word_embeddings.weight"]
    change(folder, {"lm_head.weight": tokens})
    read_params(folder, read_config(folder))
    change(folder, {"lm_head.weight": tokens + np.eye(*tokens.shape, dtype=np.float32)})
    with pytest.raises(
        ValueError,
        match=r"'lm_head.weight' that differs in .* write \"tie_word_embeddings\": false in .*/config.json, or .* tied=False",
    ):
        read_params(folder, read_config(folder))
    params = read_params(folder, read_config(folder, tied=False))
    found = json.loads((folder / "config.json").read_text()) | {"tie_word_embeddings": False}
    (folder / "config.json").write_text(json.dumps(found))
    assert_same_bits(read_params(folder, read_config(folder)), params)
    assert not np.array_equal(params["outer"]["head"], params["outer"]["tokens"].T)


# Writing.


def test_writing_is_checked_before_anything_is_written(tmp_path):
    config = FAMILIES["llama"]
    params = make_params(config, dtype=np.float32)
    new = tmp_path / "new"
    other = make_params(dataclasses.replace(config, vocab_size=24), dtype=np.float32)
    with pytest.raises(
        ValueError,
        match=r"must be those of the model; got \(16, 24\) for outer/head, .* has \(16, 16\)",
    ):
        write_model(new, config, other)
    with pytest.raises(
        ValueError,
        match=r"positions='rope' must be like llama to be read or written; got norm='layer'. Choose",
    ):
        write_model(new, dataclasses.replace(config, norm="layer"), params)
    with pytest.raises(ValueError, match=r"must be like gpt2 .*; got num_kv_heads=4"):
        write_model(new, dataclasses.replace(FAMILIES["gpt2"], num_kv_heads=4), params)
    with pytest.raises(ValueError, match=r"must be like bloom .*; got mlp_dim=24"):
        write_model(new, FAMILIES["bloom"], params)
    with pytest.raises(
        ValueError, match=r"dtype must be float32, bfloat16 or float16, .*; got int8"
    ):
        write_model(new, config, params, dtype="int8")
    with pytest.raises(ValueError, match="max_file_bytes must be positive; got 0"):
        write_model(new, config, params, max_file_bytes=0)
    mixed = {**params, "outer": jax.tree.map(lambda leaf: leaf.astype(np.float16), params["outer"])}
    with pytest.raises(
        ValueError, match=r"of one dtype, or be written as one; got float16, float32. Give dtype"
    ):
        write_model(new, config, mixed)
    assert not new.exists()
    write_model(tmp_path / "narrow", config, mixed, dtype="float16")
    write_model(new, config, params)
    with pytest.raises(
        ValueError,
        match=r"to a folder without one; got .*new with 'config.json', 'model.safetensors'. Name",
    ):
        write_model(new, config, params)


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("gpt2", {"num_kv_heads": 4}),
        ("gpt2", {"norm": "rms", "norm_embedding": True}),
        ("llama", {"norm": "layer", "mlp": "gelu"}),
        ("bloom", {"mlp_dim": 24, "biases": False}),
    ],
)
def test_a_model_changed_as_a_refusal_says_belongs_to_its_family(family, changes):
    config = dataclasses.replace(MODELS[family], **changes)
    with pytest.raises(
        ValueError, match=rf"must be like {family} to be read or written; got .*\. Choose "
    ) as refused:
        family_of(config)
    chosen = re.search(r"Choose (.*), or keep it", str(refused.value))[1]
    assert family_of(dataclasses.replace(config, **eval(f"dict({chosen})"))) == family


def test_the_extra_is_named_where_it_is_missing(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "safetensors.numpy", None)
    config = read_config(GOLDEN / "gpt2")
    params = read_params(GOLDEN / "gpt2", config)
    with pytest.raises(
        ImportError,
        match=r"need the package safetensors; got .* Install it: pip install -e '\.\[hf\]'",
    ):
        write_model(tmp_path, config, params)


def test_float64_needs_jax_to_have_it(x64):
    config = read_config(GOLDEN / "gpt2")
    assert {
        leaf.dtype
        for leaf in jax.tree.leaves(read_params(GOLDEN / "gpt2", config, dtype="float64"))
    } == {np.dtype("f8")}


def test_float64_is_refused_where_jax_has_it_not():
    with pytest.raises(ValueError, match="float64 where jax_enable_x64 is set; got float64"):
        read_params(GOLDEN / "gpt2", read_config(GOLDEN / "gpt2"), dtype="float64")


def with_weight(params, value, at=(0, 1, 2)):
    """Params of which one weight of a layer has another value."""
    params = jax.tree.map(np.array, params)
    params["layers"]["mlp"]["w_up"][1][at] = value
    return params


def test_weights_that_a_dtype_cannot_hold_are_refused_when_they_are_written_and_read(tmp_path):
    config = FAMILIES["llama"]
    params = with_weight(make_params(config, dtype=np.float32), 1e5)
    message = (
        "weights must be numbers of the dtype float16; got 100000, where the largest float16 is 65504, in "
        "model.layers.1.mlp.up_proj.weight to be written to {}. Choose bfloat16 or float32."
    )
    for max_file_bytes in (10**6, 8000):
        with pytest.raises(ValueError, match=re.escape(message.format(tmp_path / "new"))):
            write_model(
                tmp_path / "new", config, params, dtype="float16", max_file_bytes=max_file_bytes
            )
        assert not list(tmp_path.rglob("*.safetensors")), "a part of the model is left"
    write_model(tmp_path / "new", config, params, dtype="bfloat16")
    written = load_file(tmp_path / "new" / ONE_FILE)["model.layers.1.mlp.up_proj.weight"]
    assert float(written.T[0, 2]) == float(ml_dtypes.bfloat16(1e5))
    assert float(
        read_params(tmp_path / "new", config)["layers"]["mlp"]["w_up"][1, 0, 1, 2]
    ) == float(written.T[0, 2])
    got = re.escape(
        "got 99840, where the largest float16 is 65504, in model.layers.1.mlp.up_proj.weight of "
    )
    with pytest.raises(ValueError, match=got):
        read_params(tmp_path / "new", config, dtype="float16")


@pytest.mark.parametrize(
    ("value", "text"), [(np.nan, "NaN in 1 of"), (-np.inf, "infinity in 1 of")]
)
def test_weights_that_are_not_finite_are_refused_when_they_are_written_and_read(
    value, text, tmp_path
):
    config = FAMILIES["llama"]
    params = make_params(config, dtype=np.float32)
    for dtype in ("float32", "bfloat16"):
        message = rf"weights must be finite; got {text} .* in model.layers.1.mlp.up_proj.weight .*\. Write a step from before"
        with pytest.raises(ValueError, match=message):
            write_model(tmp_path / "new", config, with_weight(params, value), dtype=dtype)
    assert not (tmp_path / "new").exists()
    write_model(tmp_path / "new", config, params)
    tensors = load_file(tmp_path / "new" / ONE_FILE)
    tensors["model.layers.1.mlp.up_proj.weight"][0, 1] = value
    save_file(tensors, tmp_path / "new" / ONE_FILE)
    with pytest.raises(
        ValueError,
        match=rf"got {text} .* in model.layers.1.mlp.up_proj.weight of .* download it again",
    ):
        read_params(tmp_path / "new", config, dtype="bfloat16")


def save_folder(folder):
    return SaveFolder(folder / "new", BasicFlags.of(out_dir=folder).common)


def test_a_model_is_not_begun_on_a_disk_without_room_for_it(tmp_path, monkeypatch):
    config = FAMILIES["llama"]
    params = make_params(config, dtype=np.float32)
    needed = 4 * sum(leaf.size for leaf in jax.tree.leaves(params))
    usage = lambda free: lambda path: types.SimpleNamespace(free=free)
    monkeypatch.setattr(shutil, "disk_usage", usage(needed - 1))
    message = rf"No space left on device for a model of {needed:,} bytes as float32, with {needed - 1:,} free: .*/new"
    with pytest.raises(OSError, match=message):
        write_model(tmp_path / "new", config, params)
    assert not (tmp_path / "new").exists()
    write_description(tmp_path / "about", config)
    kept, where = [], {"described_by": tmp_path / "about", "keep": lambda: kept.append(True)}
    with pytest.raises(OSError, match=message):
        save_folder(tmp_path).save(config, params, **where)
    assert kept == [True]
    monkeypatch.setattr(shutil, "disk_usage", usage(needed))
    write_model(tmp_path / "new", config, params)


def test_a_run_whose_weights_its_models_dtype_cannot_hold_is_written_as_float32(tmp_path, capsys):
    config = FAMILIES["llama"]
    params = make_params(config, dtype=np.float32)
    write_model(tmp_path / "source", config, params, dtype="float16")
    about = tmp_path / "source"
    save_folder(tmp_path).save(config, with_weight(params, 1e5), described_by=about)
    said = capsys.readouterr().out
    assert (
        "a model for transformers, as float32: weights must be numbers of the dtype float16; got 100000"
        in said
    )
    assert_same_bits(read_params(tmp_path / "new", config), with_weight(params, 1e5))


def test_a_checkpoint_that_is_served_must_fit_the_dtype():
    table = {"a": ParamSpec((2,), ("embed",))}
    with pytest.raises(
        ValueError,
        match="dtype float16; got 100000, where the largest float16 is 65504, in a of the ch",
    ):
        open_run._on_device({"a": np.array([1e5, 1], np.float32)}, table, "float16")
    with pytest.raises(
        ValueError,
        match=r"finite; got NaN in 1 of 2 values, in a of the checkpoint. Serve an earlier step",
    ):
        open_run._on_device({"a": np.array([np.nan, 1], np.float32)}, table, "float32")


ON_TWO_PROCESSES = """
import sys
from pathlib import Path
import jaxpar
from jaxpar.huggingface import read_config, read_params, write_model
from jaxpar.models import transformer
from jaxpar.tensor_parallel import TRANSFORMER_RULES

jaxpar.initialize()
theirs, new = map(Path, sys.argv[1:])
config = read_config(theirs)
mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
shardings = jaxpar.shardings_from_dims(transformer.param_table(config), mesh, TRANSFORMER_RULES)
params = read_params(theirs, config, shardings)
write_model(new, config, params, max_file_bytes=8000)
try:
    write_model(new, config, params)
except ValueError as error:
    print("refused:", error)
params["layers"]["mlp"]["w_up"] = params["layers"]["mlp"]["w_up"].at[1, 0, 1, 2].set(1e5)
try:
    write_model(new.with_name("narrow"), config, params, dtype="float16", max_file_bytes=8000)
except ValueError as error:
    print("refused too:", error)
"""


@pytest.mark.slow
def test_two_processes_read_and_write_one_model(tmp_path):
    (tmp_path / "script.py").write_text(ON_TWO_PROCESSES)
    command = [
        sys.executable,
        "-m",
        "jaxpar",
        "launch",
        "-n",
        "2",
        "--devices-per-process",
        "4",
        "--log-dir",
        tmp_path,
    ]
    root = GOLDEN.parents[2]
    done = subprocess.run(
        [*command, tmp_path / "script.py", GOLDEN / "llama", tmp_path / "new"],
        capture_output=True,
        text=True,
        check=False,
        cwd=root,
        env=os.environ | {"PYTHONPATH": str(root)},
        timeout=WAIT_SECONDS,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert_same_bits(all_tensors(tmp_path / "new"), all_tensors(GOLDEN / "llama"))
    logs = [(tmp_path / f"{process}.log").read_text() for process in range(2)]
    assert all("refused: a model is written to a folder without one" in log for log in logs), logs
    assert all(
        "refused too: weights must be numbers of the dtype float16; got 100000" in log
        for log in logs
    ), logs
    assert not [*(tmp_path / "narrow").glob("*")]
