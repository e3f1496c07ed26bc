"""One way to train the small GPT in JAX: with jaxpar, or with plain JAX by shardings, GPipe or one jitted function a stage.

python benchmarks/peers/jax_peer.py jaxpar --stage 4 --schedule zb-h1
"""

import argparse
import os
import sys
from collections.abc import Callable

sys.path[:0] = [os.path.dirname(__file__), os.path.dirname(os.path.dirname(__file__))]

import protocol


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("peer", choices=tuple(PEERS))
    parser.add_argument("--schedule", default="1f1b")
    parser.add_argument("--form")
    parser.add_argument("--executor", default="spmd")
    parser.add_argument("--num-microbatches", type=int, default=protocol.NUM_MICROBATCHES)
    for axis in ("data", "stage", "tensor"):
        parser.add_argument(f"--{axis}", type=int, default=1)
    parser.add_argument("--smoke", action="store_true")
    args = parser.parse_args()

    is_walked = args.executor == "mpmd" or args.peer == "stages"
    num_devices = args.data * args.stage * args.tensor
    devices_of_a_program = num_devices // args.stage if is_walked else num_devices
    protocol.use_cpu_devices(num_devices, wait_for_one_another=devices_of_a_program > 1)
    import jax
    import small_gpt

    import jaxpar

    shape = small_gpt.Shape(**small_gpt.SMOKE) if args.smoke else small_gpt.Shape()
    mesh = jaxpar.make_mesh(data=args.data, stage=args.stage, tensor=args.tensor)
    params, batch, value_and_grad = PEERS[args.peer](
        args, mesh, small_gpt.make_params(shape), small_gpt.make_batch(shape)
    )
    gradients, descend = value_and_grad if is_walked else jax.jit(value_and_grad), descent(params)

    def step() -> float:
        nonlocal params
        loss, grads = gradients(params, batch)
        params = jax.block_until_ready(descend(params, grads))
        return float(loss)

    protocol.serve(step, versions=f"jax {jax.__version__}")


def descent(params: dict | list) -> Callable:
    """SGD that keeps the shardings of params: one jitted function, or one for each item of a list."""
    import jax

    if isinstance(params, list):
        updates = [descent(own) for own in params]
        return lambda params, grads: [
            f(p, g) for f, p, g in zip(updates, params, grads, strict=True)
        ]
    return jax.jit(
        lambda params, grads: jax.tree.map(
            lambda p, g: p - protocol.LEARNING_RATE * g, params, grads
        ),
        donate_argnums=0,
        out_shardings=jax.tree.map(lambda p: p.sharding, params),
    )


def jaxpar_peer(
    args: argparse.Namespace, mesh, params: dict, batch: dict
) -> tuple[dict, dict, Callable]:
    import small_gpt

    import jaxpar
    from jaxpar.schedule import lockstep_form, make_schedule

    layout, schedule = None, args.schedule
    if args.stage > 1 and args.executor == "spmd":
        form = args.form or lockstep_form(args.schedule)
        schedule = make_schedule(args.schedule, args.stage, args.num_microbatches, form=form)
        num_layers = len(params["layers"]["w_up"])
        layout = jaxpar.LayerLayout(num_layers, args.stage, schedule.num_chunks, schedule.placement)
        params = params | {"layers": layout.pack(params["layers"])}
    shardings = jaxpar.shardings_from_paths(params, mesh, small_gpt.rules(args.tensor))
    value_and_grad = jaxpar.value_and_grad(
        small_gpt.MODEL,
        small_gpt.loss,
        mesh,
        schedule=schedule,
        num_microbatches=args.num_microbatches,
        executor=args.executor,
        layout=layout,
        shardings=None if args.executor == "mpmd" else shardings,
    )
    return jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh), value_and_grad


def plain_peer(
    args: argparse.Namespace, mesh, params: dict, batch: dict
) -> tuple[dict, dict, Callable]:
    """``jax.jit`` alone: on one device, or with shardings from which XLA makes DP and TP."""
    import small_gpt

    import jaxpar

    params = jaxpar.shard(
        params, jaxpar.shardings_from_paths(params, mesh, small_gpt.rules(args.tensor))
    )
    value_and_grad = lambda params, batch: small_gpt.one_device(
        params, batch, args.num_microbatches
    )
    return params, jaxpar.shard_batch(batch, mesh), value_and_grad


def gpipe_peer(
    args: argparse.Namespace, mesh, params: dict, batch: dict
) -> tuple[dict, dict, Callable]:
    import gpipe
    import jax
    from jax.sharding import NamedSharding, PartitionSpec

    import jaxpar

    over = lambda *spec: lambda _: NamedSharding(mesh, PartitionSpec(*spec))
    shardings = {
        "outer": jax.tree.map(over(), params["outer"]),
        "layers": jax.tree.map(over("stage"), params["layers"]),
    }
    value_and_grad = jax.value_and_grad(gpipe.mean_loss(mesh, args.num_microbatches))
    return jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh), value_and_grad


def stages_peer(
    args: argparse.Namespace, mesh, params: dict, batch: dict
) -> tuple[list, dict, Callable]:
    import jit_a_stage

    on_stages = jit_a_stage.cut_params(params, list(mesh.devices.flat))
    return on_stages, batch, jit_a_stage.value_and_grad(args.stage, args.num_microbatches)


PEERS = {"jaxpar": jaxpar_peer, "plain": plain_peer, "gpipe": gpipe_peer, "stages": stages_peer}

if __name__ == "__main__":
    main()
