"""The predicted memory of a pipeline step against the compiler's: the small GPT of the benchmarks, compiled only."""

import jax
import pytest
import small_gpt

import jaxpar
from jaxpar.pipeline import buffer_bytes, spmd_program
from jaxpar.schedule import make_schedule

NUM_STAGES, NUM_MICROBATCHES = 4, 8
SHAPE = small_gpt.Shape()


def shapes_of(tree, sharding=None):
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=sharding), tree)


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
        small_gpt.MODEL, small_gpt.loss, mesh, schedule=schedule, num_microbatches=NUM_MICROBATCHES, remat=remat
    )
    params, batch = small_gpt.make_params(SHAPE), small_gpt.make_batch(SHAPE)
    shardings = jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    rows = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec("data"))
    with_shardings = jax.tree.map(lambda p, s: jax.ShapeDtypeStruct(p.shape, p.dtype, sharding=s), params, shardings)
    with jax.numpy_rank_promotion("allow"):
        compiled = jax.jit(step).lower(with_shardings, shapes_of(batch, rows)).compile()

    microbatch = shapes_of(jax.tree.map(lambda a: a[: SHAPE.batch // NUM_MICROBATCHES], batch))
    layout = jaxpar.LayerLayout(SHAPE.layers, NUM_STAGES)
    with jax.numpy_rank_promotion("allow"):
        planned = buffer_bytes(small_gpt.MODEL, spmd_program(schedule, masks=False), layout, params, microbatch)
    allotted = compiled.memory_analysis().temp_size_in_bytes
    assert 0.9 <= sum(planned.values()) / allotted <= 1.1, f"planned {planned}, allotted {allotted}"
