"""The passes of a layer in an order for GPUs: the same numbers, and what waits for what."""

import dataclasses

import jax
import jax.numpy as jnp
import pytest

import jaxpar
from jaxpar.backward.order import Barrier, Part, backward_order
from jaxpar.backward.passes import LayerPasses, Pass, run_passes
from jaxpar.backward.split import split_layer
from jaxpar.models import transformer
from jaxpar.params import init_params
from tests.support.oracle import assert_same


def layer_of(constrain):
    shape = transformer.preset("llama3.1-8b", compute_dtype="float64", vocab_multiple=8)
    sizes = {
        "num_layers": 1,
        "embed_dim": 16,
        "num_heads": 4,
        "num_kv_heads": 2,
        "mlp_dim": 24,
        "vocab_size": 64,
    }
    shape = dataclasses.replace(shape, **sizes)
    init = lambda key: jax.tree.map(
        lambda p: p[0], init_params(transformer.param_table(shape), key, jnp.float64)
    )
    params = jax.jit(init)(jax.random.key(0))
    model = transformer.make_model(shape, **({"constrain": constrain} if constrain else {}))
    return model.layers(1)[0], params["layers"]


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize("constrain", [None, jaxpar.sequence_parallel])
def test_passes_in_order_have_the_same_results_alone_and_side_by_side(x64, constrain):
    layer, params = layer_of(constrain)
    draw = lambda key: jax.random.normal(jax.random.key(key), (2, 8, 16), jnp.float64)
    x, ct, ahead = draw(1), draw(2), draw(3)
    with jax.set_mesh(jaxpar.make_mesh(tensor=2, data=4)):
        split = split_layer(layer, params, x)
        passes, leaves = LayerPasses(split, orders=True), jax.tree.leaves(params)

        @jax.jit
        def plain(leaves, x, ct, ahead):
            _, *stored = split.forward_and_store(leaves, [x])
            return split.forward_and_store(leaves, [ahead]), split.backward(leaves, *stored, [ct])

        def steps(leaves, x, ct, ahead):
            _, *stored = split.forward_and_store(leaves, [x])
            forward = passes.forward(leaves, [ahead], store=True)
            return forward, passes.backward(leaves, *stored, [ct], passes.gathered([ct]))

        def finished(passes):
            forward, (dx, made, finish) = passes
            return [forward, (dx, finish(made))]

        beside = jax.jit(lambda *args: finished(run_passes(*steps(*args))))
        alone = jax.jit(lambda *args: finished([run_passes(each)[0] for each in steps(*args)]))
        expected = plain(leaves, x, ct, ahead)
        for found in (beside, alone):
            assert_same(found(leaves, x, ct, ahead), list(map(tuple, expected)), within=1e-13)
        barriers = [
            f.lower(leaves, x, ct, ahead).as_text().count("optimization_barrier")
            for f in (beside, alone)
        ]
    # Alone: two after the MLP and two after attention. Side by side two more, at the gathers of F. Without constraints none.
    assert barriers == ([0, 0] if constrain is None else [6, 4])


def test_what_follows_a_constraint_waits_for_gradients_that_can_be_computed_before(x64):
    layer, params = layer_of(jaxpar.sequence_parallel)
    x = jax.ShapeDtypeStruct((2, 8, 16), jnp.float64)
    with jax.set_mesh(jaxpar.make_mesh(tensor=2, data=4)):
        split = split_layer(layer, params, x)
        order = backward_order(split)
    steps = [step for part in order.parts for step in part.steps if isinstance(step, Barrier)]
    shapes = [[split.graph.avals[i].shape for i in values[1:]] for (values,) in steps]
    w_down, w_up, gathered = (
        (16, 24),
        (16, 2, 24),
        (2, 8, 16),
    )  # the product of w_down is transposed
    assert shapes == [[w_down, gathered], [w_up, gathered], [gathered], [gathered]]


def test_passes_of_unequal_lengths_wait_for_each_other_while_both_run():
    def of_length(count, array):
        """A pass that would wait ``count`` times."""
        return Pass([*[Part([], meets=0)] * count, Part([])], {0: array}, lambda known: (known[0],))

    beside = lambda a, b: run_passes(of_length(1, a), of_length(3, b))
    assert beside(1.0, 2.0) == [(1.0,), (2.0,)]
    (barrier,) = jax.make_jaxpr(beside)(1.0, 2.0).eqns
    assert (barrier.primitive.name, len(barrier.invars)) == ("optimization_barrier", 2)


@pytest.mark.full
def test_gradients_of_weights_that_are_sums_are_made_before_they_are_added(x64):
    layer, params = layer_of(None)
    draw = lambda key: jax.random.normal(jax.random.key(key), (1, 8, 16), jnp.float64)
    split, leaves = split_layer(layer, params, draw(1)), jax.tree.leaves(params)
    _, b, w = jax.jit(split.forward_and_store)(leaves, [draw(1)])
    _, kept = jax.jit(split.backward_input)(leaves, b, w, [draw(2)])
    weights = {
        orders: jax.jit(LayerPasses(split, orders).backward_weights) for orders in (False, True)
    }
    barriers = [
        f.lower(leaves, w, kept).as_text().count("optimization_barrier") for f in weights.values()
    ]
    assert barriers == [0, 2], "the scales of both norms"
    assert_same(weights[True](leaves, w, kept), weights[False](leaves, w, kept), within=0)
