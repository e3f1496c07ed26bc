"""Params that are not trained: the gradients of the others on every mesh, and nothing computed for the frozen ones."""

import jax
import pytest

import jaxpar
from jaxpar.trainable import trained_part, where_grads
from tests.support import tiny_gpt
from tests.support.oracle import assert_same

TRAINABLE = ("layers/w_up", "layers/b_*", "outer/scale")
PARAMS = tiny_gpt.make_params(num_layers=4)


def reference(params, batch, trainable=TRAINABLE):
    """The loss of one device, and its gradients where they are asked for."""
    loss, grads = tiny_gpt.reference(params, batch)
    kept = trained_part(params, trainable)
    return loss, where_grads(kept, grads)


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        pytest.param({"data": 2, "tensor": 2}, {}, marks=pytest.mark.slow),
        ({"data": 2, "tensor": 2}, {"remat": True, "zero": 1}),
        ({"data": 2}, {"zero": 3}),
        pytest.param(
            {"data": 2, "stage": 2, "tensor": 2},
            {"schedule": "zb-h1", "zero": 1},
            marks=pytest.mark.slow,
        ),  # test_lora.py has it
        # test_context.py has both: zero=3 where idle ops are masked.
        pytest.param(
            {"data": 2, "stage": 2, "tensor": 2},
            {"schedule": "zb-h1", "mask_idle_ops": True},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            {"data": 2, "stage": 2}, {"schedule": "1f1b", "zero": 3}, marks=pytest.mark.slow
        ),
        pytest.param({"stage": 2}, {"schedule": "zb-v", "remat": True}, marks=pytest.mark.slow),
        ({"stage": 2, "data": 2}, {"schedule": "interleaved", "zero": 2}),
        ({"stage": 2, "data": 2}, {"schedule": "zb-h1", "executor": "mpmd"}),
        pytest.param(
            {"stage": 2, "tensor": 2},
            {"schedule": "1f1b", "executor": "mpmd"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_the_gradients_of_trained_params_are_those_of_one_device_in_float64(x64, axes, settings):
    mesh = jaxpar.make_mesh(**axes)
    batch = tiny_gpt.make_batch()
    params = tiny_gpt.on_mesh(mesh, PARAMS)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, params)
    value_and_grad = jaxpar.value_and_grad(
        tiny_gpt.MODEL,
        tiny_gpt.loss,
        mesh,
        num_microbatches=4,
        trainable=TRAINABLE,
        shardings=shardings,
        **settings,
    )
    got = value_and_grad(params, jaxpar.shard_batch(batch, mesh))
    assert_same(jaxpar.fetch(got), jaxpar.fetch(reference(PARAMS, batch)))
