"""What can be read off a traced function, and what is rewritten in it."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.backward.graph import fold_transposes, trace
from tests.support.oracle import assert_same
from tests.support.tiers import quick


def mlp_loss(params, x):
    """Two products whose weights' gradients JAX makes transposed: of the second the left factor is the larger one."""
    return jnp.sum(jnp.sin(jnp.tanh(x @ params["up"]) @ params["down"]))


def in_scan(params, x):
    return jax.lax.scan(lambda total, row: (total + mlp_loss(params, row[None]), None), 0.0, x)[0]


LOSSES = {
    "plain": mlp_loss,
    "scan": in_scan,
    "jit": jax.jit(mlp_loss),
    "checkpoint": jax.checkpoint(mlp_loss),
    "cond": lambda params, x: jax.lax.cond(
        x[0, 0] > 0, mlp_loss, lambda params, x: -mlp_loss(params, x), params, x
    ),
    "batched": lambda params, x: jnp.sum(
        jnp.einsum("bd,df,bd,fe->be", x, params["up"], x, params["down"])
    ),
    "constant": lambda params, x: (3.0, jnp.float32(2)),
}


def draw_mlp():
    rng = np.random.default_rng(0)
    return {"up": rng.normal(size=(4, 9)), "down": rng.normal(size=(9, 4))}, rng.normal(size=(5, 4))


@pytest.mark.parametrize("name", quick(LOSSES, "batched", "constant"))
def test_direct_products_give_the_same_numbers(x64, name):
    function = LOSSES[name] if name == "constant" else jax.value_and_grad(LOSSES[name])
    params, x = draw_mlp()
    want, got = function(params, x), jax.jit(fold_transposes(function))(params, x)
    assert_same(got, want)


@pytest.mark.parametrize("name", ["plain", "scan", "jit", "checkpoint", "cond"])
def test_a_product_is_not_made_to_be_transposed_where_the_smaller_factor_comes_first_then(name):
    transposed = lambda function: str(jax.make_jaxpr(function)(*draw_mlp())).count("transpose[")
    gradients = jax.grad(LOSSES[name])
    branches = 2 if name == "cond" else 1
    assert transposed(gradients) == 2 * branches
    assert (
        transposed(fold_transposes(gradients)) == 1 * branches
    )  # that of "down", whose left factor is larger


def test_products_are_direct_in_the_program_of_a_pipeline_too():
    """There JAX gives each product a sharding, which is swapped with it."""
    mesh = jaxpar.make_mesh(stage=2)
    layer = lambda params, x: x + jnp.tanh(x @ params["up"]) @ params["down"]
    model = jaxpar.LayeredModel(lambda outer, batch: batch["x"], layer, lambda outer, x: x)
    loss = lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["x"])
    layers = {name: np.stack([p] * 2) for name, p in draw_mlp()[0].items()}
    step = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2)
    text = str(jax.make_jaxpr(step)({"outer": {}, "layers": layers}, {"x": np.ones((4, 4))}))
    assert text.count("transpose[") == 1, "in W; of the two products that make gradients of weights"


@pytest.mark.usefixtures("source_lines")
def test_what_a_graph_runs_is_said_to_stand_where_the_user_wrote_it():
    graph = trace(mlp_loss, *draw_mlp())

    def run(params, x):
        return graph.run(
            graph.nodes,
            dict(zip(graph.inputs, jax.tree.leaves((params, x)), strict=True)),
            graph.outputs,
        )

    text = jax.jit(run).lower(*draw_mlp()).as_text(debug_info=True)
    assert "test_graph.py" in text
    assert "mlp_loss" in text
