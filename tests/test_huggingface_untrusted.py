"""Strangers' folders of models: tensors, headers, names and links that do not fit are refused."""

import json
import os
import shutil

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors.numpy import load_file

import jaxpar
from jaxpar.huggingface import read_params
from jaxpar.huggingface.folder import MAX_JSON_BYTES, open_tensors
from tests.support.model_folders import CONFIG, GOLDEN, INDEX, ONE_FILE, change, copy, read_config
from tests.support.oracle import assert_same_bits
from tests.support.tiny_transformer import FAMILIES, shardings

# Strangers' folders.


@pytest.mark.parametrize(
    ("changes", "remove", "message"),
    [
        ({}, ["transformer.h.1.ln_1.bias"], r"every tensor of its model; got none for 'transformer.h.1.ln_1.bias' in .*gpt2"),
        (
            {"_orig_mod.transformer.h.1.ln_1.bias": np.ones(12, np.float32)},
            ["transformer.h.1.ln_1.bias"],
            r"in .*gpt2, which has _orig_mod.transformer.h.1.ln_1.bias. Save the model itself, without the wrapper",
        ),
        ({"transformer.h.2.ln_1.bias": np.ones(12)}, [], r"must belong to the model; got 'transformer.h.2.ln_1.bias' in"),
        ({"lm_head.bias": np.ones(24)}, [], "must belong to the model; got 'lm_head.bias' in"),
        ({"transformer.h.0.attn.bias.x": np.ones(2)}, [], "must belong to the model; got 'transformer.h.0.attn.bias.x' in"),
        (
            {"transformer.h.0.mlp.c_fc.weight": np.ones((48, 12), np.float32)},
            [],
            r"got float32\[48, 12\] for 'transformer.h.0.mlp.c_fc.weight' in .* where the model has \[12, 48\]",
        ),
        ({"transformer.ln_f.bias": np.ones(12, np.int32)}, [], r"got int32\[12\] for 'transformer.ln_f.bias'"),
        ({"transformer.ln_f.bias": np.ones((1, 12), np.float32)}, [], r"got float32\[1, 12\] for 'transformer.ln_f.bias'"),
    ],
)  # fmt: skip
def test_tensors_that_are_not_the_models_are_refused(changes, remove, message, tmp_path):
    folder = copy("gpt2", tmp_path)
    change(folder, changes, remove=remove)
    with pytest.raises(ValueError, match=message):
        read_params(folder, read_config(folder))


def test_a_model_of_more_layers_than_tensors_is_refused_at_once():
    config = read_config(GOLDEN / "gpt2", num_layers=10**9)
    with pytest.raises(
        ValueError,
        match=r"each layer of a model must have tensors; got num_layers=1000000000, 28 tensors",
    ):
        read_params(GOLDEN / "gpt2", config)


def test_shardings_of_another_model_are_refused():
    mesh = jaxpar.make_mesh(tensor=2)
    with pytest.raises(ValueError, match="shardings must have the structure of the params; got"):
        read_params(
            GOLDEN / "gpt2", read_config(GOLDEN / "gpt2"), shardings(FAMILIES["llama"], mesh)
        )


def header_of(**tensors):
    return {
        name: {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]} | about
        for name, about in (tensors or {"a": {}}).items()
    }


def write_file(path, header, data=bytes(8), *, length=None):
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    path.write_bytes((len(text) if length is None else length).to_bytes(8, "little") + text + data)
    return path


TWO = header_of(a={}, b={"data_offsets": [8, 16]})


@pytest.mark.parametrize(
    ("header", "kwargs"),
    [
        (header_of(), {"length": 2**63}),
        (header_of(), {"length": 10**6}),
        (header_of(), {"length": 0}),
        (b"[]", {}),
        (b'{"a": ', {}),
        (b'{"\xff": 1}', {}),
        (b'{"a":' + b"[" * 100_000, {}),
        (b'{"a": {"shape": [' + b"9" * 5000 + b"]}}", {}),
        (header_of(a={"shape": [-2]}), {}),
        (header_of(__metadata__={}), {}),
        ({"a": {"dtype": "F32", "shape": [2]}}, {}),
        ({"a": 3}, {}),
        (header_of(a={"shape": 2}), {}),
        (header_of(a={"shape": [2.0]}), {}),
        (header_of(a={"shape": [True]}), {}),
        (header_of(a={"data_offsets": [0, 8, 8]}), {}),
        (header_of(a={"data_offsets": [8, 0]}), {}),
        (header_of(a={"data_offsets": [0, 4]}), {}),
        (header_of(a={"shape": [10**17, 10**17]}), {}),
        (header_of(), {"data": bytes(7)}),
        (header_of(), {"data": bytes(9)}),
        (header_of(a={"data_offsets": [1, 9]}), {"data": bytes(9)}),
        (header_of(a={}, b={}), {}),
        (header_of(a={}, b={"data_offsets": [4, 12]}), {"data": bytes(12)}),
    ],
)  # fmt: skip
def test_a_header_that_does_not_fit_its_file_is_refused(header, kwargs, tmp_path):
    with pytest.raises(
        ValueError, match=r"must hold exactly the tensors of its header; got .*download it again"
    ) as told:
        open_tensors(write_file(tmp_path / "x.safetensors", header, **kwargs))
    assert len(str(told.value)) < 1000


@pytest.mark.parametrize("kind", ["F8_E4M3", "F8_E5M2"])
def test_quantised_weights_are_refused(kind, tmp_path):
    header = header_of(a={"dtype": kind, "shape": [8]})
    with pytest.raises(
        ValueError, match=rf"dtype must be one of F64, .*; got '{kind}' for 'a' .* quantised"
    ):
        open_tensors(write_file(tmp_path / "x.safetensors", header))


def test_a_tensor_given_twice_is_not_read_past_its_bytes(tmp_path):
    tensor = json.dumps(header_of()["a"])
    path = write_file(tmp_path / "x.safetensors", f'{{"a": {tensor}, "a": {tensor}}}'.encode())
    judge(path)


def test_the_tensors_of_a_good_file_are_views_of_it(tmp_path):
    path = write_file(
        tmp_path / "x.safetensors",
        TWO | {"__metadata__": {"format": "pt"}},
        np.arange(4.0, dtype="f4").tobytes(),
    )
    tensors = open_tensors(path)
    np.testing.assert_array_equal(tensors["b"], [2, 3])
    assert isinstance(tensors["a"], np.memmap)
    assert not tensors["a"].flags.writeable


@pytest.mark.parametrize("size", [0, 7, 8])
def test_a_file_without_a_header_is_refused(size, tmp_path):
    (tmp_path / "x.safetensors").write_bytes(bytes(size))
    with pytest.raises(
        ValueError, match=r"must hold exactly the tensors of its header; got .*header"
    ):
        open_tensors(tmp_path / "x.safetensors")


def judge(path):
    """Ours refuses a file with a ValueError, or gives what the format's own reader gives."""
    try:
        got = open_tensors(path)
    except ValueError:
        return
    assert_same_bits(got, load_file(path))


SOUND = (GOLDEN / "llama" / "model-00003-of-00003.safetensors").read_bytes()
HEADER_BYTES = int.from_bytes(SOUND[:8], "little")
VALUES = st.recursive(
    st.none() | st.booleans() | st.integers() | st.integers(0, 4000) | st.floats() | st.sampled_from(["F32", "BF16", "I64"])
    | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)  # fmt: skip


@settings(max_examples=150)
@given(st.data())
def test_no_change_of_a_header_leads_past_the_checks(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    changed = bytearray(SOUND)
    for _ in range(data.draw(st.integers(1, 3))):
        at = data.draw(st.integers(0, 8 + HEADER_BYTES - 1))
        changed[at : at + data.draw(st.integers(0, 2))] = data.draw(
            st.binary(max_size=2) | st.sampled_from([b"0", b'"', b"}"])
        )
    path.write_bytes(changed)
    judge(path)


@pytest.mark.full
@settings(max_examples=150)
@given(st.data())
def test_no_value_in_a_header_leads_past_the_checks(tmp_path_factory, data):
    path = tmp_path_factory.mktemp("fuzz") / "x.safetensors"
    header = json.loads(SOUND[8 : 8 + HEADER_BYTES])
    name = data.draw(st.sampled_from(sorted(header)))
    where = data.draw(st.sampled_from([None, "dtype", "shape", "data_offsets", "more"]))
    if where is None or name == "__metadata__":
        header[data.draw(st.sampled_from([name, "other"]))] = data.draw(VALUES)
    elif where in ("shape", "data_offsets") and data.draw(st.booleans()):
        values = header[name][where]
        values[data.draw(st.integers(0, len(values) - 1))] = data.draw(VALUES)
    else:
        header[name][where] = data.draw(VALUES)
    write_file(path, header, SOUND[8 + HEADER_BYTES :])
    judge(path)


@pytest.mark.full
@settings(max_examples=100)
@given(st.data())
def test_no_value_in_an_index_or_a_config_leads_past_the_checks(tmp_path_factory, data):
    folder = copy("llama", tmp_path_factory.mktemp("fuzz"))
    file = folder / data.draw(st.sampled_from([CONFIG, INDEX]))
    found = json.loads(file.read_text())
    inner = found["weight_map"] if file.name == INDEX and data.draw(st.booleans()) else found
    paths = st.sampled_from(
        [
            "../llama/model-00001-of-00003.safetensors",
            "/etc/hostname",
            "config.json",
            ".",
            "..",
            "\0",
            "x" * 300,
        ]
    )
    inner[data.draw(st.sampled_from(sorted(inner)) | st.text(max_size=4))] = data.draw(
        VALUES | paths
    )
    file.write_text(json.dumps(found))
    try:
        params = read_params(folder, read_config(folder))
    except (ValueError, FileNotFoundError):
        return
    assert_same_bits(params, read_params(GOLDEN / "llama", read_config(GOLDEN / "llama")))


# Paths.


def with_name_in_index(folder, name):
    index = json.loads((folder / INDEX).read_text())
    index["weight_map"]["lm_head.weight"] = name
    (folder / INDEX).write_text(json.dumps(index))
    return folder


def test_a_part_of_the_weights_that_is_missing_is_to_be_downloaded_again(tmp_path):
    """The folder is the right one."""
    folder = copy("llama", tmp_path)
    (folder / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(FileNotFoundError, match=r"got .*-00002-of-.*, which does not. Download it"):
        read_params(folder, read_config(folder))


@pytest.mark.parametrize(
    "name",
    [
        "../secret.safetensors",
        "/secret.safetensors",
        "..",
        "",
        "a\\b",
        "a\0b",
        "x" * 300,
        "sub/x.safetensors",
    ],
)
def test_names_that_lead_out_of_the_folder_are_refused(name, tmp_path):
    folder = with_name_in_index(copy("llama", tmp_path), name)
    shutil.copy(folder / "model-00003-of-00003.safetensors", tmp_path / "secret.safetensors")
    with pytest.raises(ValueError, match="must be in its folder, under plain names; got"):
        read_params(folder, read_config(folder))


def test_links_may_not_lead_out_of_the_folder_except_to_the_blobs_of_a_cache(tmp_path):
    folder = copy("gpt2", tmp_path)
    (folder / ONE_FILE).rename(tmp_path / "blob")
    (folder / ONE_FILE).symlink_to(tmp_path / "blob")
    with pytest.raises(
        ValueError, match=r"must be in its folder; got 'model.safetensors' in .*, a link to .*blob"
    ):
        read_params(folder, read_config(folder))

    (folder / ONE_FILE).unlink()
    shutil.copy(tmp_path / "blob", folder / ONE_FILE)  # as the message says
    read_params(folder, read_config(folder))

    snapshot, blobs = (
        tmp_path / "models--gpt2" / "snapshots" / "1234",
        tmp_path / "models--gpt2" / "blobs",
    )
    snapshot.mkdir(parents=True)
    blobs.mkdir()
    for name, file in ((CONFIG, folder / CONFIG), (ONE_FILE, tmp_path / "blob")):
        shutil.copy(file, blobs / name)
        (snapshot / name).symlink_to(f"../../blobs/{name}")
    assert_same_bits(
        read_params(snapshot, read_config(snapshot)),
        read_params(GOLDEN / "gpt2", read_config(snapshot)),
    )


def test_what_is_no_regular_file_is_not_opened(tmp_path):
    folder = copy("gpt2", tmp_path)
    (folder / ONE_FILE).unlink()
    os.mkfifo(folder / ONE_FILE)  # opening it would wait for a writer
    with pytest.raises(ValueError, match=r"must be a regular file; got .*model.safetensors"):
        read_params(folder, read_config(folder))
    (folder / CONFIG).unlink()
    (folder / CONFIG).symlink_to(CONFIG)
    with pytest.raises((ValueError, FileNotFoundError), match=r"config.json"):
        read_config(folder)


def test_an_index_must_agree_with_its_files(tmp_path):
    folder = copy("llama", tmp_path)
    config = read_config(folder)
    with_name_in_index(folder, "model-00001-of-00003.safetensors")
    with pytest.raises(
        ValueError, match=r"must name the tensors of its files; got 'lm_head.weight' in only one of"
    ):
        read_params(folder, config)
    with_name_in_index(folder, "model-00009-of-00003.safetensors")
    with pytest.raises(FileNotFoundError, match=r"file must exist; got .*model-00009"):
        read_params(folder, config)
    with_name_in_index(folder, 3)
    with pytest.raises(ValueError, match="must have a weight_map of file by tensor; got none in"):
        read_params(folder, config)
    shutil.copy(GOLDEN / "gpt2" / ONE_FILE, folder)
    with pytest.raises(
        ValueError, match=r"model.safetensors or in the files of .*index.json; got both in"
    ):
        read_params(folder, config)


def test_folders_without_a_model_are_named(tmp_path):
    with pytest.raises(FileNotFoundError, match=r"config.json"):
        read_config(tmp_path)
    (tmp_path / "pytorch_model.bin").touch()
    with pytest.raises(
        FileNotFoundError, match=r"must hold model.safetensors or .*; got 'pytorch_model.bin' in"
    ):
        read_params(tmp_path, FAMILIES["gpt2"])
    (tmp_path / CONFIG).write_text(" " * (MAX_JSON_BYTES + 1))
    with pytest.raises(ValueError, match="must have at most 4194304 bytes; got 4194305"):
        read_config(tmp_path)
    (tmp_path / CONFIG).write_text("[]")
    with pytest.raises(ValueError, match="must be an object; got a list"):
        read_config(tmp_path)
