"""The shardings of an optimizer's state, found from paths and shapes. Nothing is compiled or run."""

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.mesh import abstract_mesh
from jaxpar.step.optimizer_state import optimizer_shardings

MESH = abstract_mesh(data=2, stage=2, tensor=2)
WHOLE = NamedSharding(MESH, PartitionSpec())
PARAMS = {
    "w_up": ((4, 8, 8), PartitionSpec("stage", None, "tensor")),
    "w_down": ((4, 8, 8), PartitionSpec("stage", "tensor")),
    "up": {"w_up": ((4, 8, 8), PartitionSpec("stage"))},
    "bias": ((8,), PartitionSpec("tensor")),
}


def own(init):
    return optax.GradientTransformation(init, lambda updates, state, params=None: (updates, state))


def specs_of(optimizer, params=PARAMS):
    """The specs of the state of an optimizer, as a flat dict by path."""
    is_leaf = lambda x: isinstance(x, tuple)
    shapes = jax.tree.map(
        lambda leaf: jax.ShapeDtypeStruct(leaf[0], jnp.float32), params, is_leaf=is_leaf
    )
    shardings = jax.tree.map(lambda leaf: NamedSharding(MESH, leaf[1]), params, is_leaf=is_leaf)
    leaves = jax.tree_util.tree_leaves_with_path(
        optimizer_shardings(optimizer, shapes, shardings, WHOLE)
    )
    return {jaxpar.sharding.path_string(path): tuple(sharding.spec) for path, sharding in leaves}


def zeros(params):
    return jax.tree.map(jnp.zeros_like, params)


def test_a_part_of_the_state_belongs_to_the_param_with_the_longest_path_in_its_own():
    assert specs_of(optax.trace(0.9)) == {
        "trace/w_up": ("stage", None, "tensor"),
        "trace/w_down": ("stage", "tensor"),
        "trace/up/w_up": ("stage",),
        "trace/bias": ("tensor",),
    }


def test_dims_of_one_size_are_told_apart():
    specs = specs_of(optax.scale_by_factored_rms(min_dim_size_to_factor=8))
    assert (specs["v_row/w_up"], specs["v_col/w_up"]) == (("stage", None), ("stage", "tensor"))
    assert (specs["v_row/w_down"], specs["v_col/w_down"]) == (("stage", "tensor"), ("stage", None))
    specs = specs_of(optax.sm3(1e-2))
    assert [specs[f"0/mu/w_up/{dim}"] for dim in range(3)] == [("stage",), (), ("tensor",)]


def test_copies_stacked_in_front_are_whole_along_the_stack():
    specs = specs_of(optax.scale_by_lbfgs(memory_size=8))
    assert specs["diff_params_memory/w_up"] == (None, "stage", None, "tensor")
    assert specs["diff_params_memory/bias"] == (None, "tensor")
    assert specs["weights_memory"] == ()


def test_an_array_of_params_is_the_whole_tree():
    specs = specs_of(optax.adam(1e-2), params=((8, 4), PartitionSpec("tensor")))
    assert specs == {"0/count": (), "0/mu": ("tensor",), "0/nu": ("tensor",)}


def test_a_state_of_a_part_of_the_params_is_told_from_the_end_of_its_path():
    params = {
        "outer": {"c": PARAMS["w_down"]},
        "layers": {"a": PARAMS["w_up"], "b": PARAMS["up"]["w_up"]},
    }
    specs = specs_of(own(lambda params: {"of layers": zeros(params["layers"])}), params)
    assert specs == {"of layers/a": ("stage", None, "tensor"), "of layers/b": ("stage",)}


def test_a_matrix_of_one_params_shape_is_told_from_its_shape():
    params = {"w": ((4, 8), PartitionSpec("tensor")), "v": ((8, 4), PartitionSpec("stage"))}
    specs = specs_of(own(lambda params: list(map(jnp.zeros_like, jax.tree.leaves(params)))), params)
    assert specs == {"0": ("stage",), "1": ("tensor",)}


def test_a_matrix_that_may_belong_to_params_that_lie_differently_is_refused():
    message = (
        r"must have the path of its param as part of its own; got moments/1 of shape \(4, 8, 8\), which "
        r"\['up/w_up', 'w_down', 'w_up'\] have too, and these are sharded differently\. Make the state with jax\.tree\.map"
    )
    with pytest.raises(ValueError, match=message):
        specs_of(
            own(lambda params: {"moments": list(map(jnp.zeros_like, jax.tree.leaves(params)))})
        )


def test_what_no_param_has_part_in_is_whole():
    optimizer = optax.chain(
        optax.flatten(optax.trace(0.9)),
        own(lambda params: {"rates": jnp.zeros(8), "table": jnp.zeros((3, 5))}),
    )
    assert specs_of(optimizer) == {"0/trace": (), "1/rates": (), "1/table": ()}


def test_an_optimizer_made_for_one_models_shapes_keeps_what_its_own_shapes_tell():
    first = jax.tree.map(
        lambda leaf: jnp.ones(leaf[0]), PARAMS, is_leaf=lambda x: isinstance(x, tuple)
    )

    def init(params):
        from_first = jax.tree.map(lambda param, first: param - first, params, first)
        return {"moved": from_first, "layer": jax.tree.map(lambda leaf: leaf.mean(-1), from_first)}

    specs = specs_of(own(init))
    assert specs["moved/w_up"] == ("stage", None, "tensor")
    assert specs["layer/w_up"] == ("stage", None), (
        "which of two dims of one size is left cannot be told"
    )
