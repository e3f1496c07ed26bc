"""The files beside the weights: what a model that is written takes from its source."""

import dataclasses
import json
import re

import jax
import pytest

import jaxpar
from jaxpar import huggingface
from jaxpar.data.readers import find_files
from jaxpar.huggingface import read_config, read_params, write_model
from jaxpar.huggingface.export import check_no_model, open_run
from jaxpar.huggingface.folder import check_model_folder, file_inside
from jaxpar.models import transformer
from jaxpar.pipeline import LayerLayout
from tests.support.model_folders import (
    all_tensors,
    copy_with,
)
from tests.support.oracle import assert_same_bits
from tests.support.tiny_transformer import FAMILIES, make_params

EOS = 3


@pytest.fixture
def source(tmp_path):
    folder = copy_with("mistral", tmp_path, dtype="bfloat16", transformers_version="4.51.0")
    (folder / "tokenizer.json").write_text('{"model": {}}')
    (folder / "chat_template.jinja").write_text("{{ messages }}")
    (folder / "notes.txt").write_text("not part of a model")
    return folder


def test_the_source_gives_all_but_the_weights(source, tmp_path):
    config = read_config(source)
    params = read_params(source, config)
    write_model(tmp_path / "tuned", params, config, source=source)  # in either order
    about = json.loads((source / "config.json").read_text())
    written = json.loads((tmp_path / "tuned/config.json").read_text())
    assert written == about | {"dtype": "float32"}, "what the tensors have, whatever it says"
    for name in ("generation_config.json", "tokenizer.json", "chat_template.jinja"):
        assert (tmp_path / "tuned" / name).read_bytes() == (source / name).read_bytes()
    assert not (tmp_path / "tuned/notes.txt").exists()
    assert huggingface.stop_tokens(tmp_path / "tuned") == (EOS,)
    assert_same_bits(all_tensors(tmp_path / "tuned"), all_tensors(source))
    write_model(tmp_path / "half", config, params, source=source, dtype="bfloat16")
    assert json.loads((tmp_path / "half/config.json").read_text()) == about
    write_model(tmp_path / "again", config, params, source=tmp_path / "half")
    dtypes = {tensor.dtype.name for tensor in all_tensors(tmp_path / "again").values()}
    assert dtypes == {"bfloat16"}


def test_a_model_that_is_not_its_sources_is_refused(source, tmp_path):
    config = dataclasses.replace(read_config(source), rope=transformer.Rope(theta=5.0))
    with pytest.raises(
        ValueError,
        match=r"must be that of its source; got 'rope_theta' that differ from .*: 5.0 for 1000.0",
    ):
        write_model(tmp_path / "new", config, make_params(config), source=source)
    assert not (tmp_path / "new").exists()


def test_a_tokenizer_outside_the_source_is_not_copied(source, tmp_path):
    (tmp_path / "secret").write_text("x")
    (source / "tokenizer.json").unlink()
    (source / "tokenizer.json").symlink_to(tmp_path / "secret")
    config = read_config(source)
    with pytest.raises(
        ValueError, match=r"must be in its folder; got 'tokenizer.json' in .*, a link to .*secret"
    ):
        write_model(tmp_path / "new", config, read_params(source, config), source=source)


@pytest.mark.parametrize(
    ("files", "tokens"),
    [
        ({"config.json": {"eos_token_id": 5}}, (5,)),
        (
            {
                "config.json": {"eos_token_id": 5},
                "generation_config.json": {"eos_token_id": [1, 2]},
            },
            (1, 2),
        ),
        ({"config.json": {"eos_token_id": 5}, "generation_config.json": {}}, (5,)),
        ({"config.json": {}}, ()),
        (
            {
                "config.json": {},
                "tokenizer_config.json": {"eos_token": {"content": "</s>"}},
                "tokenizer.json": {"added_tokens": [{"id": 3, "content": "</s>"}]},
            },
            (3,),
        ),
        (
            {
                "generation_config.json": {},
                "tokenizer_config.json": {"eos_token": "b"},
                "tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}},
            },
            (1,),
        ),
        (
            {
                "config.json": {"eos_token_id": 5},
                "tokenizer_config.json": {"eos_token": "b"},
                "tokenizer.json": {"model": {"vocab": {"a": 0, "b": 1}}},
            },
            (5,),
        ),
        ({"tokenizer_config.json": {}, "tokenizer.json": {"model": {"vocab": [["a", 0.0]]}}}, ()),
    ],
)
def test_texts_end_where_the_files_say(files, tokens, tmp_path):
    for name, found in files.items():
        (tmp_path / name).write_text(json.dumps(found))
    assert huggingface.stop_tokens(tmp_path) == tokens
    (tmp_path / "config.json").write_text('{"eos_token_id": "</s>"}')
    (tmp_path / "generation_config.json").unlink(missing_ok=True)
    with pytest.raises(
        ValueError, match="eos_token_id must be a token or a list of tokens; got '</s>'"
    ):
        huggingface.stop_tokens(tmp_path)
    (tmp_path / "config.json").write_text('{"eos_token_id": [9, 8], "vocab_size": 8}')
    with pytest.raises(
        ValueError,
        match=r"eos_token_id must have a token of the model, .*; got .9, 8. in .*, and vocab_size=8",
    ):
        huggingface.stop_tokens(tmp_path)


def test_packed_layers_are_written_in_the_order_of_the_model(tmp_path):
    config = dataclasses.replace(FAMILIES["llama"], num_layers=5)
    params = make_params(config)
    mesh = jaxpar.make_mesh(stage=2, devices=jax.devices()[:2])
    layout = LayerLayout(5, 2, 2)
    packed = layout.pack_params(params)
    one = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("stage"))
    packed = packed | {"layers": jaxpar.shard(packed["layers"], one)}
    write_model(tmp_path / "packed", config, packed)
    write_model(tmp_path / "plain", config, params)
    assert_same_bits(all_tensors(tmp_path / "packed"), all_tensors(tmp_path / "plain"))


def test_the_folder_of_a_run_is_refused_with_the_command_that_writes_its_model(tmp_path):
    (tmp_path / "checkpoints").mkdir()
    (tmp_path / "config.json").write_text("{}")
    wanted = (
        f"write its model with python -m jaxpar export {tmp_path} DIR, and give --init-from DIR."
    )
    with pytest.raises(FileNotFoundError, match=re.escape(wanted)):
        check_model_folder(tmp_path, "--init-from")


def test_pickled_weights_are_refused_with_the_way_to_write_them_again(tmp_path):
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "pytorch_model.bin").write_bytes(b"a")
    message = r"jaxpar reads no pickles, such as pytorch_model.bin there: write the weights again, by AutoModelForCausalLM"
    with pytest.raises(FileNotFoundError, match=message):
        check_model_folder(tmp_path, "--init-from")


def test_a_model_in_the_cache_of_the_hub_is_named(tmp_path):
    model = tmp_path / "models--a--b" / "snapshots" / "abc"
    model.mkdir(parents=True)
    (model / "config.json").write_text("{}")
    for given in (model.parent, model.parent.parent):
        with pytest.raises(FileNotFoundError, match=rf"has models there: give --init-from {model}"):
            check_model_folder(given, "--init-from")


def test_a_part_of_a_run_and_a_written_model_are_no_runs_to_export(tmp_path):
    run, written = tmp_path / "run", tmp_path / "written"
    for folder in (run / "model", run / "checkpoints" / "6", written):
        folder.mkdir(parents=True)
    (run / "model" / "config.json").write_text("{}")
    (written / "model.safetensors").touch()
    for given, message in (
        (run / "checkpoints" / "6", rf"which is inside of it\. Give {run}, with --step 6\."),
        (run / "checkpoints", rf"which is inside of it\. Give {run}\."),
        (run / "model", rf"which is inside of it\. Give {run}\."),
        (written, "written, a model that transformers reads as it is"),
    ):
        with pytest.raises(ValueError, match=message):
            open_run(given)


def test_no_model_is_written_to_a_file(tmp_path):
    (tmp_path / "a").write_text("b")
    with pytest.raises(
        ValueError, match=r"a model is written to a folder; got .*a, which is a file. Name another."
    ):
        check_no_model(tmp_path / "a")


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_pointer_of_git_lfs_is_named_as_one(tmp_path, name):
    pointer = "version https://git-lfs.github.com/spec/v1\noid sha256:00\nsize 2628840\n"
    (tmp_path / name).write_text(pointer)
    for read in (
        lambda: file_inside(tmp_path, name),
        lambda: find_files(tmp_path),
        lambda: find_files(tmp_path / name),
    ):
        with pytest.raises(
            ValueError,
            match=f"got a pointer of Git LFS in .*{name}. Fetch them: git lfs install and git",
        ):
            read()
    (tmp_path / name).write_text(pointer * 20)
    assert find_files(tmp_path) == [tmp_path / name], "a text about pointers, longer than one"


def test_a_description_keeps_the_tokenizer_that_a_run_reads_by(source, tmp_path):
    other = tmp_path / "other"
    other.mkdir()
    (other / "tokenizer.json").write_text('{"model": {"vocab": {}}}')
    config = read_config(source)
    huggingface.write_description(tmp_path / "run", config, source=source, tokenizer=other)
    written = {path.name for path in (tmp_path / "run").iterdir()}
    assert written == {"config.json", "generation_config.json", "tokenizer.json"}
    assert (tmp_path / "run/tokenizer.json").read_bytes() == (other / "tokenizer.json").read_bytes()
