"""GPipe as in most JAX code: a shard_map over stages, a scan over ticks, and ``jax.grad`` through both.

A baseline for jaxpar's pipelines. Every tick's activations are stored for the backward pass, and a stage computes in every
tick, even if it has no microbatch.
"""

from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import Mesh, PartitionSpec
from small_gpt import MODEL, loss


def mean_loss(mesh: Mesh, num_microbatches: int) -> Callable:
    """Returns ``(params, batch) -> loss``, to be differentiated, with layers sharded over the mesh's ``stage`` axis."""
    num_stages = mesh.shape["stage"]
    ring = [(stage, (stage + 1) % num_stages) for stage in range(num_stages)]

    def run_stage(layers: dict, x: jax.Array) -> jax.Array:
        return jax.lax.scan(lambda x, layer: (MODEL.layers(1)[0](layer, x), None), x, layers)[0]

    def pipeline(layers: dict, x: jax.Array) -> jax.Array:
        stage = jax.lax.axis_index("stage")

        def tick(carry: tuple, number: jax.Array) -> tuple:
            arrived, done = carry
            own = jnp.where(stage == 0, x[jnp.minimum(number, num_microbatches - 1)], arrived)
            y = run_stage(layers, own)
            place = jnp.maximum(number - num_stages + 1, 0)
            is_done = (stage == num_stages - 1) & (number >= num_stages - 1)
            done = done.at[place].set(jnp.where(is_done, y, done[place]))
            return (jax.lax.ppermute(y, "stage", ring), done), None

        blank = jax.lax.pcast((jnp.zeros_like(x[0]), jnp.zeros_like(x)), ("stage",), to="varying")
        (_, done), _ = jax.lax.scan(tick, blank, jnp.arange(num_microbatches + num_stages - 1))
        return jax.lax.psum(jnp.where(stage == num_stages - 1, done, 0), "stage")

    over_stages = jax.shard_map(
        pipeline,
        mesh=mesh,
        in_specs=(PartitionSpec("stage"), PartitionSpec()),
        out_specs=PartitionSpec(),
    )

    def mean(params: dict, batch: dict) -> jax.Array:
        x = MODEL.embed(params["outer"], batch)
        parts = over_stages(params["layers"], x.reshape(num_microbatches, -1, *x.shape[1:]))
        total, weight = loss(MODEL.head(params["outer"], parts.reshape(x.shape)), batch)
        return total / weight

    return mean
