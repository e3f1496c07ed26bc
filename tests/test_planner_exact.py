"""The planner against the compiler on 8 fake devices: bytes at rest and traffic exactly, memory within a tenth."""

import dataclasses
import functools
import itertools
import math

import jax
import jax.numpy as jnp
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.dtypes import num_bytes
from jaxpar.models.lora import Lora
from jaxpar.models.transformer import LAYER_WEIGHTS, Experts, TransformerConfig
from jaxpar.planner.compiled import compile_choice
from jaxpar.planner.job import Choice
from jaxpar.planner.memory import step_memory
from jaxpar.planner.model_shape import ModelShape, transformer_shape
from jaxpar.planner.ops import Analysis
from jaxpar.planner.state import AtRest, wide_bytes
from jaxpar.planner.traffic import bytes_by_axis, step_traffic
from jaxpar.sharding import shardings_from_paths
from tests.support import tiny_transformer
from tests.support.tiers import quick

ROWS, OPTIMIZER = 32, optax.adam(1e-3)
WIDE = TransformerConfig(vocab_size=512, num_layers=8, embed_dim=128, num_heads=4, max_positions=64)
# A microbatch has more tokens than a layer has columns, as real ones do.
LONG = dataclasses.replace(WIDE, max_positions=256)

# Its first two layers are part of the embedding.
LEADING = dataclasses.replace(
    WIDE,
    norm="rms",
    mlp="swiglu",
    biases=False,
    num_layers=4,
    experts=Experts(count=4, mlp_dim=64, num_dense_layers=2),
)


def _own_layer(p, x):
    return x + jnp.tanh(x @ p["w_up"]) @ p["w_down"]


def _looped_layer(p, x):
    return jax.lax.fori_loop(0, 3, lambda _, x: _own_layer(p, x), x)


OWN = ModelShape(
    name="own",
    model=jaxpar.LayeredModel(
        lambda outer, batch: batch["x"] @ outer["w_in"],
        _own_layer,
        lambda outer, x: x @ outer["w_out"],
    ),
    loss=lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["y"]),
    params={
        "outer": {
            "w_in": jax.ShapeDtypeStruct((6, 8), jnp.float32),
            "w_out": jax.ShapeDtypeStruct((8, 2), jnp.float32),
        },
        "layers": {
            "w_up": jax.ShapeDtypeStruct((8, 8, 16), jnp.float32),
            "w_down": jax.ShapeDtypeStruct((8, 16, 8), jnp.float32),
        },
    },
    rules={
        "layers/w_up": jaxpar.column_parallel(),
        "layers/w_down": jaxpar.row_parallel(),
        "outer/*": jaxpar.replicated(),
    },
    row={
        "x": jax.ShapeDtypeStruct((1, 6), jnp.float32),
        "y": jax.ShapeDtypeStruct((1, 2), jnp.float32),
    },
)


@functools.cache
def shape_of(model):
    if model == "own":
        return OWN
    if model == "loop":
        looped = dataclasses.replace(OWN.model, layer=_looped_layer)
        return dataclasses.replace(OWN, model=looped, cache={})
    if model == "leading":
        return transformer_shape(LEADING, experts="tensor")
    name, _, lora = model.partition("+")
    factors = Lora(4, LAYER_WEIGHTS) if lora else None
    kind = lora.partition("-")[2] or None  # of "lora-nf4" or "lora-nf4-dq"
    if name in ("wide", "long"):
        return transformer_shape({"wide": WIDE, "long": LONG}[name], lora=factors, quantize=kind)
    return transformer_shape(tiny_transformer.FAMILIES[name], lora=factors, quantize=kind)


def draw(model, data, stage, tensor, schedule, num_microbatches, zero, remat=False):
    chunks = 2 if schedule in ("interleaved", "zb-v") else 1
    choice = Choice(
        data=data,
        stage=stage,
        tensor=tensor,
        schedule=schedule,
        num_microbatches=num_microbatches,
        num_chunks=chunks,
        zero=zero,
        remat=remat,
    )
    return model, choice


def predicted(model, choice):
    shape = shape_of(model)
    rows = ROWS // choice.num_replicas // choice.num_microbatches
    return Analysis(shape, rows, choice.tensor, choice.remat), AtRest(shape, OPTIMIZER, choice)


@functools.cache
def compiled(model, choice):
    """The training step on real devices, its state packed, and its report.

    Idle stages skip ops: what they would exchange in ticks that mask them is no part of a plan.
    """
    shape = shape_of(model)
    mesh = jaxpar.make_mesh(**choice.sizes)
    return compile_choice(shape, choice, mesh, OPTIMIZER, ROWS, mask_idle_ops=False)


# model, data, stage, tensor, schedule, microbatches, ZeRO, remat
# The steps whose memory is compared too, in the fast tier.
MEMORY = [
    ("long", 1, 4, 2, "1f1b", 8, 0, False),
    ("wide", 8, 1, 1, "1f1b", 1, 3, False),
]
DRAWS = [
    *MEMORY,
    ("llama", 4, 1, 2, "1f1b", 2, 3, False),
    ("own", 2, 2, 2, "zb-h1", 4, 3, False),
    ("gpt2+lora", 2, 2, 2, "1f1b", 4, 0, False),
    ("loop", 2, 2, 2, "1f1b", 4, 0, False),
    ("bloom", 4, 1, 2, "1f1b", 1, 3, True),
    ("own", 1, 4, 2, "interleaved", 8, 0, True),  # a layer a chunk: R makes nothing for a next one
]
MORE = [
    ("bloom", 4, 1, 2, "1f1b", 2, 0, "dots"),
    ("leading", 4, 1, 2, "1f1b", 2, 0, False),
    ("leading", 4, 1, 2, "1f1b", 2, 0, True),
    ("leading", 4, 1, 2, "1f1b", 2, 0, "dots"),
    ("leading", 2, 2, 2, "1f1b", 4, 0, False),
    ("gpt2", 2, 2, 2, "1f1b", 4, 0, False),
    ("gpt2", 8, 1, 1, "1f1b", 2, 3, True),
    ("llama", 2, 1, 4, "1f1b", 2, 0, True),
    ("bloom", 2, 2, 2, "zb-h1", 2, 2, True),
    ("llama", 1, 2, 4, "interleaved", 4, 0, False),
    ("llama", 1, 4, 2, "1f1b", 8, 0, True),
    ("bloom", 1, 4, 2, "zb-h1", 8, 0, True),
    ("bloom", 1, 2, 4, "zb-v", 4, 0, False),
    ("own", 2, 4, 1, "gpipe", 4, 1, False),
    ("gpt2", 8, 1, 1, "1f1b", 1, 0, False),
    ("gpt2", 1, 1, 8, "1f1b", 2, 0, False),
    ("gpt2", 2, 2, 2, "zb-h1", 2, 1, False),
    ("gpt2", 2, 2, 2, "zb-h1", 2, 3, False),
    ("gpt2-untied", 1, 4, 2, "1f1b", 8, 0, False),
    ("gpt2-untied", 4, 2, 1, "1f1b", 4, 2, True),
    ("llama", 4, 1, 2, "1f1b", 2, 1, False),
    ("llama", 4, 1, 2, "1f1b", 2, 2, False),
    ("llama-tied", 2, 2, 2, "1f1b", 2, 3, True),
    ("llama", 4, 2, 1, "gpipe", 4, 3, False),
    ("bloom", 2, 4, 1, "zb-h1", 4, 2, True),
    ("bloom", 8, 1, 1, "1f1b", 4, 2, False),
    ("own", 1, 8, 1, "1f1b", 8, 0, True),
    ("own", 1, 4, 2, "zb-v", 8, 0, False),
    ("own", 4, 1, 2, "1f1b", 4, 2, True),
    ("loop", 2, 1, 4, "1f1b", 1, 0, False),
    ("llama+lora", 4, 1, 2, "1f1b", 2, 3, False),
    ("llama+lora", 2, 2, 2, "zb-h1", 4, 2, True),
    ("bloom+lora", 4, 2, 1, "interleaved", 4, 1, False),
    ("wide+lora-nf4", 2, 2, 2, "zb-h1", 4, 3, False),
    ("wide+lora-nf4", 4, 1, 2, "1f1b", 2, 3, True),
    ("wide+lora-nf4-dq", 2, 2, 2, "zb-h1", 4, 3, False),
    ("wide+lora-nf4-dq", 4, 1, 2, "1f1b", 2, 3, True),
]
ALL = [pytest.param(*each) for each in DRAWS] + [
    pytest.param(*each, marks=pytest.mark.slow) for each in MORE
]


@pytest.mark.few(1)
@pytest.mark.parametrize(
    ("model", "data", "stage", "tensor", "schedule", "num_microbatches", "zero", "remat"),
    quick(ALL, 3),
)
def test_bytes_at_rest_and_traffic_are_the_compiled_steps(
    model, data, stage, tensor, schedule, num_microbatches, zero, remat
):
    model, choice = draw(model, data, stage, tensor, schedule, num_microbatches, zero, remat)
    analysis, at_rest = predicted(model, choice)
    state, report = compiled(model, choice)
    on_device = lambda tree: sum(
        jax.ShapeDtypeStruct(leaf.sharding.shard_shape(leaf.shape), leaf.dtype).size
        * leaf.dtype.itemsize
        for leaf in jax.tree.leaves(tree)
    )
    assert at_rest.bytes["params"] == on_device(state.params)
    assert at_rest.bytes["optimizer"] == on_device((state.opt_state, state.step, state.num_skipped))
    moved = {"data": 0, "stage": 0, "tensor": 0} | {
        "+".join(axes): n for axes, n in report.bytes_by_axes().items()
    }
    planned = bytes_by_axis(step_traffic(choice, analysis, at_rest, masks=False))
    assert planned == moved, report.render()


@pytest.mark.full
@pytest.mark.parametrize(
    "run", [("long", 1, 4, 2, "1f1b", 8, 0, False), ("own", 4, 2, 1, "1f1b", 8, 0, False)]
)
def test_idle_stages_that_are_masked_send_no_more_than_the_page_says(run):
    model, choice = draw(*run)
    planned = bytes_by_axis(step_traffic(choice, *predicted(model, choice)))
    mesh = jaxpar.make_mesh(**choice.sizes)
    _, report = compile_choice(shape_of(model), choice, mesh, OPTIMIZER, ROWS, mask_idle_ops=True)
    moved = {"+".join(axes): n for axes, n in report.bytes_by_axes().items()}
    assert moved.get("data", 0) == planned["data"]
    assert 1 < moved["stage"] / planned["stage"] <= 2.1, report.render()
    assert planned["tensor"] <= moved.get("tensor", 0) <= 1.3 * planned["tensor"], report.render()


@pytest.mark.full
@pytest.mark.parametrize(
    ("stage", "exchange", "products"),
    [
        (1, "all_to_all", "ragged"),
        pytest.param(2, "all_to_all", "tiles", marks=pytest.mark.slow),
        pytest.param(1, "gather", "tiles", marks=pytest.mark.slow),
    ],
)
def test_experts_over_data_send_what_is_planned(stage, exchange, products):
    experts = Experts(count=8, mlp_dim=128, buffer=1.5, exchange=exchange, products=products)
    config = dataclasses.replace(
        WIDE, norm="rms", mlp="swiglu", biases=False, experts=experts, num_layers=2
    )
    shape = transformer_shape(config, experts="data")
    choice = Choice(data=4, stage=stage, num_microbatches=4, zero=1, experts="data")
    traffic = step_traffic(choice, Analysis(shape, 2, 1, data=4), AtRest(shape, OPTIMIZER, choice))
    _, report = compile_choice(shape, choice, jaxpar.make_mesh(**choice.sizes), OPTIMIZER, ROWS)
    moved = {"stage": 0, "tensor": 0} | {
        "+".join(axes): n for axes, n in report.bytes_by_axes().items()
    }
    assert bytes_by_axis(traffic) == moved, report.render()


@pytest.mark.full
@pytest.mark.parametrize(
    ("model", "stage", "zero"), [("gpt2", 1, 1), pytest.param("gpt2", 2, 3, marks=pytest.mark.slow)]
)
def test_groups_of_replicas_sum_the_shards_of_their_gradients(model, stage, zero):
    choice = Choice(replica=2, data=4 // stage, stage=stage, num_microbatches=4, zero=zero)
    analysis, at_rest = predicted(model, choice)
    _, report = compiled(model, choice)
    both = {"+".join(axes): n for axes, n in report.bytes_by_axes().items()}
    found = bytes_by_axis(step_traffic(choice, analysis, at_rest, masks=False))
    assert both.pop("replica+data") < 64, "the weight of the batch is summed over both"
    few = pytest.approx({axis: both.get(axis, 0) for axis in found}, abs=64)
    assert found == few, report.render()
    assert found["replica"] < 1.1 * wide_bytes(at_rest.grads)


@pytest.mark.full
@pytest.mark.parametrize(
    ("data", "stage", "tensor", "zero"),
    [
        (4, 1, 2, 2),
        *(
            pytest.param(*each, marks=pytest.mark.slow)
            for each in [(8, 1, 1, 0), (2, 2, 2, 1), (2, 2, 2, 3), (1, 4, 2, 0)]
        ),
    ],
)
def test_gradient_bytes_are_those_of_value_and_grad(data, stage, tensor, zero):
    _, choice = draw("gpt2", data, stage, tensor, "1f1b", 2, zero)
    _, at_rest = predicted("gpt2", choice)
    mesh = jaxpar.make_mesh(data=data, stage=stage, tensor=tensor)
    shape = shape_of("gpt2")
    shardings = shardings_from_paths(shape.params, mesh, shape.rules)
    step = jaxpar.value_and_grad(
        shape.model, shape.loss, mesh, num_microbatches=2, zero=zero, shardings=shardings
    )
    init = lambda key: jax.tree.map(lambda p: jnp.zeros(p.shape, p.dtype), shape.params)
    params = jaxpar.abstract_state(
        init, jax.random.key(0), OPTIMIZER, mesh, shardings, zero=zero
    ).params
    rows = NamedSharding(mesh, PartitionSpec("data"))
    batch = jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=rows), shape.batch(ROWS)
    )
    program = jax.jit(step).lower(params, batch).compile()
    _, grads = program.output_shardings
    sizes = jax.tree.map(lambda p, s: 4 * math.prod(s.shard_shape(p.shape)), shape.params, grads)
    assert num_bytes(at_rest.grads) == sum(jax.tree.leaves(sizes))


MORE_MEMORY = [
    ("long", 1, 8, 1, "1f1b", 16, 0, True),
    ("long", 2, 2, 2, "zb-h1", 4, 2, False),
    ("long", 4, 2, 1, "gpipe", 4, 1, False),
    ("long", 2, 4, 1, "1f1b", 4, 3, True),
    ("wide", 2, 1, 4, "1f1b", 4, 0, True),
    ("long", 1, 2, 4, "zb-v", 4, 0, False),
    ("wide", 2, 1, 4, "1f1b", 4, 0, False),
    ("long", 2, 4, 1, "zb-h1", 8, 0, False),
    ("long+lora", 2, 4, 1, "1f1b", 8, 0, False),
    ("long+lora-nf4", 2, 4, 1, "1f1b", 8, 0, False),
]
REPLICAS_ALONE = [("wide", 8, 1, 1, "1f1b", 2, 0, True)]
MORE_THAN_PLANNED = pytest.mark.xfail(
    strict=True,
    reason="XLA's CPU backend keeps reduced gradients beside what the update makes of them: 14% more than is planned",
)
# For GPUs such steps need what is planned: those in test_planned_memory.py within a hundredth.
BESIDE_FACTORS = [
    ("long+lora", 2, 1, 2, "1f1b", 1, 0, True),
    ("long+lora-nf4", 2, 1, 2, "1f1b", 1, 0, True),
]
MORE_BESIDE_FACTORS = pytest.mark.xfail(
    strict=True,
    reason="XLA's CPU backend adds the products with a weight and with its factors each time that the sum is read, so both "
    "stay, and stores what norms broadcast: the plan is 16% too low",
)


@functools.cache
def needed(model, choice):
    """Bytes of a device: as predicted, and as the compiler has it.

    XLA's CPU backend copies the state of Adam, which the new params and the new state read in two loops; its GPU backend does
    both in one. Beside a pipeline the copies exist from the start of the step.
    """
    analysis, at_rest = predicted(model, choice)
    memory = step_memory(choice, analysis, at_rest, masks=False)
    if choice.stage > 1:
        memory["copies"] = memory["optimizer"]
    _, report = compiled(model, choice)
    return memory, sum(memory.values()), report.memory


@pytest.mark.few(1)
@pytest.mark.parametrize(
    "run",
    [pytest.param(run, marks=pytest.mark.full) for run in MEMORY]
    + [pytest.param(run, marks=pytest.mark.slow) for run in MORE_MEMORY]
    + [pytest.param(run, marks=[pytest.mark.slow, MORE_THAN_PLANNED]) for run in REPLICAS_ALONE]
    + [pytest.param(run, marks=[pytest.mark.slow, MORE_BESIDE_FACTORS]) for run in BESIDE_FACTORS],
    ids=lambda run: "-".join(map(str, run)),
)
def test_memory_of_a_step_is_within_a_tenth_of_the_compilers(run):
    model, choice = draw(*run)
    memory, total, compilers = needed(model, choice)
    temporary = total - memory["params"] - memory["optimizer"]
    assert 0.9 <= total / compilers.total_bytes <= 1.1, memory
    if choice.stage > 1:  # where the buffers are ours
        assert 0.9 <= temporary / compilers.temp_bytes <= 1.1, memory


@pytest.mark.parametrize(
    "runs",
    [
        pytest.param(MEMORY, id="some", marks=pytest.mark.full),
        pytest.param(MEMORY + MORE_MEMORY, id="all", marks=pytest.mark.slow),
    ],
)
def test_ranking_of_memory_is_the_compilers_where_runs_differ_by_a_tenth(runs):
    sizes = {run: needed(*draw(*run))[1:] for run in runs}
    for (a, (mine_a, its_a)), (b, (mine_b, its_b)) in itertools.combinations(sizes.items(), 2):
        if max(its_a.total_bytes, its_b.total_bytes) > 1.1 * min(
            its_a.total_bytes, its_b.total_bytes
        ):
            assert (mine_a < mine_b) == (its_a.total_bytes < its_b.total_bytes), (a, b)
