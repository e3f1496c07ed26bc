"""Params that outputs do not depend on are told, also where the layers between hide it."""

import warnings

import jax
import jax.numpy as jnp
import pytest

import jaxpar

NUM_LAYERS = 3
PARAMS = {
    "outer": {"embed": jnp.ones((4, 4)), "head": jnp.ones((4, 1))},
    "layers": {"w": jnp.ones((NUM_LAYERS, 4, 4)), "b": jnp.ones((NUM_LAYERS, 4))},
}
BATCH = {"x": jnp.ones((8, 4)), "y": jnp.ones((8, 1))}


def embed(outer, batch):
    return batch["x"] @ outer["embed"]


def head(outer, x):
    return x @ outer["head"]


def one(layer):
    return jaxpar.LayeredModel(embed, layer, head)


def pair(layer, of_head=lambda outer, x: x["h"] @ outer["head"]):
    """A model of which another array travels with the activations."""
    both = lambda outer, batch: {"h": batch["x"], "also": embed(outer, batch)}
    return jaxpar.LayeredModel(both, layer, of_head)


CASES = {
    "all": (one(lambda p, x: jnp.tanh(x @ p["w"] + p["b"][None])), ""),
    "x": (one(lambda p, x: jnp.broadcast_to(jnp.tanh(p["b"] @ p["w"]), x.shape)), "outer/embed"),
    "w": (one(lambda p, x: jnp.tanh(x + p["b"][None])), "layers/w"),
    "also": (
        pair(lambda p, x: x | {"h": jnp.tanh(x["h"] @ p["w"] + p["b"][None])}),
        "outer/embed",
    ),
    # What the embedding makes reaches the head after one layer.
    "swaps": (
        pair(lambda p, x: {"h": x["also"], "also": jnp.tanh(x["h"] @ p["w"] + p["b"][None])}),
        "",
    ),
    "plain": (
        lambda params, batch: head(params["outer"], batch["x"]),
        "layers/b, layers/w, outer/embed",
    ),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("sizes", [{"data": 2}, {"data": 1, "stage": 3}], ids=["data", "stage"])
def test_params_that_have_no_gradient_are_told(name, sizes):
    model, unread = CASES[name]
    if name == "plain" and "stage" in sizes:
        return
    count = sizes["data"] * sizes.get("stage", 1)
    mesh = jaxpar.make_mesh(**sizes, devices=jax.devices()[:count])
    shardings = jaxpar.shardings_from_paths(PARAMS, mesh, {"**": jaxpar.replicated()})
    loss = lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["y"])
    step = jaxpar.value_and_grad(model, loss, jaxpar.Parallel(mesh, shardings), num_microbatches=2)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        given = jaxpar.shard(PARAMS, shardings), jaxpar.shard_batch(BATCH, mesh)
        _, grads = jax.jit(step)(*given)
    texts = [str(each.message) for each in told]
    assert len([text for text in texts if "none that depends on" in text]) == bool(unread)
    assert not unread or f"none that depends on {unread}" in texts[0]
    zero = {
        jax.tree_util.keystr(path, simple=True, separator="/")
        for path, leaf in jax.tree_util.tree_leaves_with_path(grads)
        if not leaf.any()
    }
    assert zero == set(filter(None, unread.split(", ")))
