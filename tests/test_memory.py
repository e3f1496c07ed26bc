"""The predicted memory of a pipeline step against the compiler's: the small GPT of the benchmarks, compiled only."""

import jax
import pytest
import small_gpt

import jaxpar
from jaxpar.backward.min_cut import peak_bytes
from jaxpar.backward.split import split_layer
from jaxpar.dtypes import num_bytes
from jaxpar.pipeline import spmd_program
from jaxpar.pipeline.layer import BUFFERS
from jaxpar.schedule import make_schedule

NUM_STAGES, NUM_MICROBATCHES = 4, 8
SHAPE = small_gpt.Shape()


def shapes_of(tree, sharding=None):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


def planned_bytes(program, params, batch):
    """The buffers of a program, the sums of gradients, and the peak of live values while an op runs one layer; no casts."""
    microbatch = shapes_of(jax.tree.map(lambda a: a[: SHAPE.batch // NUM_MICROBATCHES], batch))
    x = jax.eval_shape(small_gpt.MODEL.embed, params["outer"], microbatch)
    one_layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params["layers"])
    split, positions = (
        split_layer(small_gpt.MODEL.layers(1)[0], one_layer, x),
        SHAPE.layers // NUM_STAGES,
    )
    ops = (
        ["backward_input", "backward_weights"] if program.schedule.splits_backward else ["backward"]
    )
    return {
        "inbox": (program.num_slots["inbox"] + 1) * num_bytes(jax.tree.leaves(x)),
        **{
            name: program.num_slots[name] * positions * num_bytes(split.shapes(name))
            for name in BUFFERS
        },
        "layer_grads": positions * num_bytes(jax.tree.leaves(one_layer)),
        "outer_grads": num_bytes(jax.tree.leaves(params["outer"])),
        "one_layer": max(
            peak_bytes(split.graph, *split.plans[op]) for op in ("forward_and_store", *ops)
        ),
    }


@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "form", "remat"),
    [
        ("zb-h1", "unit", False),
        pytest.param("1f1b", "unit", True, marks=pytest.mark.slow),
        pytest.param("1f1b", "unit", False, marks=pytest.mark.slow),
        pytest.param("1f1b", "fused", False, marks=pytest.mark.slow),
    ],
)
def test_planned_bytes_are_within_a_tenth_of_the_compilers(name, form, remat):
    mesh = jaxpar.make_mesh(stage=NUM_STAGES)
    schedule = make_schedule(name, NUM_STAGES, NUM_MICROBATCHES, form=form, remat=remat)
    step = jaxpar.value_and_grad(
        small_gpt.MODEL,
        small_gpt.loss,
        mesh,
        schedule=schedule,
        num_microbatches=NUM_MICROBATCHES,
        remat=remat,
    )
    params, batch = small_gpt.make_params(SHAPE), small_gpt.make_batch(SHAPE)
    shardings = jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with_shardings = jax.tree.map(
        lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, shardings
    )
    with jax.numpy_rank_promotion("allow"):
        compiled = jax.jit(step).lower(with_shardings, shapes_of(batch, rows)).compile()

    with jax.numpy_rank_promotion("allow"):
        planned = planned_bytes(spmd_program(schedule, masks=False), params, batch)
    allotted = compiled.memory_analysis().temp_size_in_bytes
    assert 0.9 <= sum(planned.values()) / allotted <= 1.1, f"planned {planned}, allotted {allotted}"
