"""The small GPT's gradient step, compiled in several ways for traffic.py and memory.py, and never run."""

from collections.abc import Callable
from dataclasses import dataclass

import gpipe
import jax
import small_gpt
from jax.sharding import Mesh, NamedSharding, PartitionSpec

import jaxpar
from jaxpar.inspect import StepReport
from jaxpar.pipeline import spmd_program
from jaxpar.schedule import lockstep_form, make_schedule


@dataclass(frozen=True)
class Step:
    """A compiled step.

    Attributes:
        report: The report of ``inspect_step``.
        params: Shapes of the params, with shardings.
        activation_bytes: Bytes of the activation of one microbatch of one replica.
    """

    report: StepReport
    params: dict
    activation_bytes: int


def shapes(tree: dict, shardings: dict) -> dict:
    return jax.tree.map(
        lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s), tree, shardings
    )


def jaxpar_step(
    shape: small_gpt.Shape,
    mesh: Mesh,
    num_microbatches: int,
    name: str = "1f1b",
    *,
    remat: bool = False,
) -> Step:
    """Returns a step of jaxpar on a mesh."""
    schedule = make_schedule(
        name, mesh.shape["stage"], num_microbatches, form=lockstep_form(name), remat=remat
    )
    layout = jaxpar.LayerLayout(
        shape.layers, schedule.num_stages, schedule.num_chunks, schedule.placement
    )
    params = small_gpt.make_params(shape)
    params = params | {"layers": layout.pack(params["layers"])}
    shardings = jaxpar.shardings_from_paths(params, mesh, small_gpt.rules(mesh.shape["tensor"]))
    step = jaxpar.value_and_grad(
        small_gpt.MODEL,
        small_gpt.loss,
        mesh,
        schedule=schedule,
        num_microbatches=num_microbatches,
        remat=remat,
        layout=layout if schedule.num_stages > 1 else None,
        shardings=shardings,
    )
    return compile_step(
        step,
        shape,
        mesh,
        params,
        shardings,
        num_microbatches,
        spmd_program(schedule, masks=False).branch_shares(),
    )


def plain_step(shape: small_gpt.Shape, mesh: Mesh, num_microbatches: int) -> Step:
    """Returns a step of plain JAX: a scan over microbatches and sharded params, partitioned by XLA."""
    params = small_gpt.make_params(shape)
    shardings = jaxpar.shardings_from_paths(params, mesh, small_gpt.rules(mesh.shape["tensor"]))
    if mesh.shape["stage"] > 1:
        shardings["layers"] = jax.tree.map(
            lambda _: NamedSharding(mesh, PartitionSpec("stage")), params["layers"]
        )
    step = lambda params, batch: small_gpt.one_device(params, batch, num_microbatches)
    return compile_step(step, shape, mesh, params, shardings, num_microbatches)


def gpipe_step(shape: small_gpt.Shape, mesh: Mesh, num_microbatches: int) -> Step:
    """Returns a step of GPipe by ``jax.grad``."""
    params = small_gpt.make_params(shape)
    over = lambda *spec: lambda _: NamedSharding(mesh, PartitionSpec(*spec))
    places = {"outer": over(), "layers": over("stage")}
    shardings = {part: jax.tree.map(places[part], params[part]) for part in params}
    step = jax.value_and_grad(gpipe.mean_loss(mesh, num_microbatches))
    return compile_step(step, shape, mesh, params, shardings, num_microbatches)


def compile_step(
    step: Callable,
    shape: small_gpt.Shape,
    mesh: Mesh,
    params: dict,
    shardings: dict,
    num_microbatches: int,
    branch_shares: dict | None = None,
) -> Step:
    """Returns the step compiled, with gradients sharded as its params."""
    like = shapes(params, shardings)
    whole = NamedSharding(mesh, PartitionSpec())
    jitted = jax.jit(step, out_shardings=(whole, shardings))
    compiled = jitted.lower(
        like, jaxpar.abstract_batch(small_gpt.make_batch(shape), mesh)
    ).compile()
    report = jaxpar.inspect_step(compiled, mesh=mesh, branch_shares=branch_shares)
    rows = shape.batch // mesh.shape["data"] // num_microbatches
    return Step(report, like, 4 * rows * shape.positions * shape.embed)
