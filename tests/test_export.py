"""Params for other programs: what is written is read by the libraries alone, and is what was trained."""

import builtins

import jax
import jax.numpy as jnp
import numpy as np
import pytest
import safetensors.numpy
from orbax.checkpoint import v1 as ocp

import jaxpar
from jaxpar.checkpoint import export_orbax, export_safetensors
from tests.support import tiny
from tests.support.oracle import assert_same_bits


def params_on(layout=None, **sizes):
    params = tiny.make_params()
    whole = params if layout is None else params | {"layers": layout.pack(params["layers"])}
    return params, tiny.on_mesh(jaxpar.make_mesh(**sizes), whole)


def flat(params):
    return {
        jaxpar.sharding.path_string(path): leaf
        for path, leaf in jax.tree_util.tree_leaves_with_path(params)
    }


def read_orbax(path, like):
    one = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    return ocp.load(
        str(path),
        jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=one), like),
    )


def test_safetensors_hold_each_param_by_its_path(tmp_path):
    host, params = params_on(data=2, stage=2, tensor=2)
    export_safetensors(tmp_path / "new" / "params.safetensors", params, metadata={"step": "7"})
    read = safetensors.numpy.load_file(tmp_path / "new" / "params.safetensors")
    assert_same_bits(read, flat(host))
    with safetensors.safe_open(tmp_path / "new" / "params.safetensors", framework="numpy") as file:
        assert file.metadata() == {"format": "jaxpar", "step": "7"}
    assert [path.name for path in (tmp_path / "new").iterdir()] == ["params.safetensors"]


def test_bfloat16_stays_bfloat16(tmp_path):
    params = {"w": jnp.arange(6, dtype=jnp.bfloat16).reshape(2, 3), "n": jnp.float32(2)}
    export_safetensors(tmp_path / "x", params)
    assert_same_bits(safetensors.numpy.load_file(tmp_path / "x"), params)


def test_orbax_reads_the_tree_alone(tmp_path):
    host, params = params_on(data=4, tensor=2)
    export_orbax(tmp_path / "params", params)
    assert_same_bits(read_orbax(tmp_path / "params", host), host)


@pytest.mark.parametrize(
    "export", [export_safetensors, pytest.param(export_orbax, marks=pytest.mark.full)]
)
def test_packed_layers_are_written_in_the_models_order(tmp_path, export):
    layout = jaxpar.LayerLayout(
        tiny.NUM_LAYERS, 1, tiny.NUM_LAYERS, layers_per_virtual_stage=(2, 0)
    )
    host, params = params_on(layout)
    assert params["layers"].tree["w_up"].shape[0] == 4
    export(tmp_path / "out", params, layout=layout)
    if export is export_orbax:
        read = flat(read_orbax(tmp_path / "out", host))
    else:
        read = safetensors.numpy.load_file(tmp_path / "out")
    assert_same_bits(read, flat(host))


@pytest.mark.parametrize("export", [export_safetensors, export_orbax])
def test_an_export_replaces_nothing(tmp_path, export):
    (tmp_path / "there").write_text("mine")
    with pytest.raises(FileExistsError, match="an export must not replace anything; got"):
        export(tmp_path / "there", {"w": jnp.zeros(3)})
    assert (tmp_path / "there").read_text() == "mine"


def test_without_safetensors_the_extra_is_named(tmp_path, monkeypatch):
    real = builtins.__import__

    def missing(name, *rest):
        if name.startswith("safetensors"):
            raise ImportError(name)
        return real(name, *rest)

    monkeypatch.setattr(builtins, "__import__", missing)
    with pytest.raises(
        ImportError, match=r"got safetensors.*Install it: pip install -e '\.\[hf\]'"
    ):
        export_safetensors(tmp_path / "x", {"w": np.zeros(3)})


def test_two_params_of_one_path_are_not_written_as_one(tmp_path):
    params = {"a/b": np.zeros(1), "a": {"b": np.ones(1)}}
    with pytest.raises(ValueError, match=r"must have a path of its own, .* got a/b for two"):
        export_safetensors(tmp_path / "x", params)
    assert not (tmp_path / "x").exists()
