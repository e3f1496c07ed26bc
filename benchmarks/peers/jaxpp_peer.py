"""One way to train the small GPT with JaxPP (NVIDIA) on CPU: a pipeline over fake devices, with one of JaxPP's schedules.

    ../jaxpp/bin/python benchmarks/peers/jaxpp_peer.py Std1F1B

It needs an environment of its own, since JaxPP takes an older JAX than jaxpar does, and imports nothing of jaxpar. The step is
written as JaxPP's examples write it: layers one by one, `mark_stage_end` after the last of each stage, `treduce` over the
microbatches, and the update in the same function, which donates the params.
"""

import argparse
import os
import sys
from collections.abc import Callable
from functools import partial

sys.path[:0] = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]

import protocol

CHUNKS = {"Std1F1B": 1, "Eager1F1B": 1, "ZeroBubble": 1, "Interleaved1F1B": 2, "DualPipeV": 2}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("schedule", choices=tuple(CHUNKS))
    parser.add_argument("--stage", type=int, default=4)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()

    protocol.use_cpu_devices(args.stage, wait_for_one_another=False)
    import jax
    import jaxpp.api as jaxpp
    import numpy as np
    import plain_gpt

    shape = plain_gpt.Shape(**plain_gpt.SMOKE) if args.smoke else plain_gpt.Shape()
    mesh = jaxpp.MpmdMesh(jax.sharding.Mesh(np.array(jax.devices()), ("stage",)), "stage")
    params, batch = listed_layers(plain_gpt.make_params(shape)), plain_gpt.make_batch(shape)
    cut = lambda rows: rows.reshape(protocol.NUM_MICROBATCHES, -1, *rows.shape[1:])
    params, batch = jax.tree.map(jax.numpy.asarray, (params, jax.tree.map(cut, batch)))
    train = make_train_step(mesh, args.schedule, args.stage, shape.layers)

    def step() -> float:
        nonlocal params
        params, loss = jax.block_until_ready(train(params, batch))
        return float(loss.first_mpmd_replica)

    protocol.serve(step, versions=f"JaxPP {jaxpp.__version__} (jax {jax.__version__})")


def listed_layers(params: dict) -> dict:
    """Returns the params with a list of layers, each on its own."""
    layers = params["layers"]
    return params | {
        "layers": [{k: v[n] for k, v in layers.items()} for n in range(len(layers["w_up"]))]
    }


def make_train_step(
    mesh, schedule: str, num_stages: int, num_layers: int
) -> Callable[[dict, dict], tuple]:
    """Returns ``(params, microbatches) -> (params, loss)``."""
    import jax
    import jaxpp.api as jaxpp

    virtual_stages = num_stages * CHUNKS[schedule]
    args = (virtual_stages,) if CHUNKS[schedule] == 1 else (virtual_stages, num_stages)
    table = getattr(jaxpp, schedule)(*args)
    loss = jax.value_and_grad(partial(mean_loss, layers_per_stage=num_layers // virtual_stages))

    @partial(jaxpp.mpmd_jit_with_loop, mpmd_mesh=mesh, donate_argnums=0)
    def train(params: dict, microbatches: dict) -> tuple:
        total, grads = jaxpp.treduce(
            partial(loss, params), microbatches, schedule=table, operation=jaxpp.Add
        )
        return jax.tree.map(lambda p, g: p - protocol.LEARNING_RATE * g, params, grads), total

    return train


def mean_loss(params: dict, microbatch: dict, layers_per_stage: int):
    """The mean cross-entropy of one microbatch, divided by the number of microbatches."""
    import jax
    import jaxpp.api as jaxpp
    import plain_gpt

    x = plain_gpt.embed(params["outer"], microbatch)
    for number, layer in enumerate(params["layers"], 1):
        x = plain_gpt.layer(layer, x)
        if number % layers_per_stage == 0:
            x = jaxpp.mark_stage_end(x)
    logits = plain_gpt.head(params["outer"], x)
    picked = jax.numpy.take_along_axis(logits, microbatch["targets"][..., None], axis=-1)[..., 0]
    return (jax.nn.logsumexp(logits, axis=-1) - picked).mean() / protocol.NUM_MICROBATCHES


if __name__ == "__main__":
    main()
