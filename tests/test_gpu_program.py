"""The program of a training step for GPUs, compiled here, where there are none, and counted.

It needs jaxpar[gpu-compile], which `make check-gpu` installs. Schedules in the form that is the default on GPUs, on two nodes
of four H100: which rings are copied, the host waits nowhere in a steady tick, and products run while a message travels and
beside the collectives over `tensor`.

The programs of the chosen tests compile on two threads from the start, so the tests that wait for something else come first.
"""

import functools
import json
import math
import os
import re
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from pathlib import Path

import jax
import jax.numpy as jnp
import optax
import pytest

import jaxpar
from jaxpar import fp8
from jaxpar.compile_only import CUDNN
from jaxpar.documents import find_documents
from jaxpar.inspect.hlo import parse_module
from jaxpar.models import transformer
from jaxpar.models.grouped_product import TILE, grouped_product
from jaxpar.models.lora import ADAPTERS, Lora, quantize, quantized_shardings
from jaxpar.models.transformer import LAYER_WEIGHTS
from jaxpar.models.transformer.flash_chunks import as_rows, chunked_causal_attention
from jaxpar.models.transformer.generate import _extend, _first
from jaxpar.models.transformer.sampling import make_sampling
from jaxpar.models.transformer.scoring import _score
from jaxpar.params import abstract_params, init_params
from jaxpar.planner import Choice, cluster, price, transformer_shape
from jaxpar.planner.compiled import compile_choice, inspect_pipeline, step_of_choice
from jaxpar.runtime.output import version_of
from jaxpar.shard_map import each_on_its_tensor_shard, manual_over_data_and_stage
from jaxpar.sharding import shardings_from_dims
from jaxpar.tensor_parallel import EXPERT_RULES, EXPERTS_OVER_DATA, TRANSFORMER_RULES
from tests.support.gpu_steps import (
    NUM_LAYERS,
    NUM_MICROBATCHES,
    NUM_ROWS,
    SEQ,
    Program,
    compiles,
    needs_compiler,
    program,
    report,
    shape,
)
from tests.support.tiny_experts import config_of, loss_of
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]


pytestmark = needs_compiler


@pytest.fixture(scope="module")
def gpus():
    return tuple(jaxpar.compile_only_devices("h100", num_nodes=2, devices_per_node=4))


@pytest.fixture(scope="module", autouse=True)
def reports(request, gpus):
    """What returns the report on a program; those of the chosen tests start to compile here, two at a time."""
    values = [
        each.callspec.params.values() for each in request.session.items if hasattr(each, "callspec")
    ]
    chosen = dict.fromkeys(
        value for params in values for value in params if isinstance(value, Program)
    )
    with ThreadPoolExecutor(2) as pool:
        found = {
            each: pool.submit(report, gpus, each.schedule, **dict(each.settings)) for each in chosen
        }
        yield lambda program: found[program].result()
        pool.shutdown(cancel_futures=True)


def test_devices_of_a_node_are_seen(gpus):
    assert [jaxpar.mesh.node_of(gpu) for gpu in gpus] == [0] * 4 + [1] * 4
    with pytest.raises(ValueError, match="the tensor axis must stay inside a node"):
        jaxpar.make_mesh(tensor=8, devices=list(gpus))


# More jobs are in test_planned_memory.py.
@pytest.mark.parametrize(
    "axes",
    [
        {"data": 2, "stage": 2, "tensor": 2},
        pytest.param({"stage": 4, "tensor": 2}, marks=pytest.mark.slow),
    ],
)
def test_a_plan_needs_the_memory_that_it_says(gpus, axes):
    model = transformer_shape(shape(8), seq=SEQ)
    choice = Choice(
        **axes, schedule="1f1b", num_microbatches=NUM_MICROBATCHES, zero=1 if "data" in axes else 0
    )
    rows = 4 * choice.data * NUM_MICROBATCHES
    planned = price(
        model, cluster("h100", num_nodes=2, devices_per_node=4), choice, batch_size=rows
    )
    mesh = jaxpar.make_mesh(**axes, devices=list(gpus))
    _, found = compile_choice(model, choice, mesh, optax.adam(1e-4), rows)
    assert 0.9 < found.memory.total_bytes / planned.memory_bytes < 1.1


@pytest.mark.parametrize(
    ("model", "tensor", "remat", "kind", "most"),
    [
        pytest.param("llama3.1-70b", 1, True, "nf4", 52, marks=pytest.mark.slow),
        ("llama3.1-70b", 1, True, "nf4-dq", 49),
        ("llama3.1-405b", 8, False, "nf4", 75),
    ],
)
def test_giants_in_four_bits_fit_few_gpus_as_planned_and_no_weight_is_gathered(
    model, tensor, remat, kind, most
):
    shape_of = functools.partial(
        transformer_shape, model, seq=2048, lora=Lora(16, LAYER_WEIGHTS), quantize=kind
    )
    choice, optimizer = Choice(tensor=tensor, remat=remat), optax.adamw(1e-4)
    planned = price(shape_of(), cluster("h100", 1, tensor), choice, batch_size=1)
    gpus = jaxpar.compile_only_devices("h100", num_nodes=1, devices_per_node=tensor)
    mesh = jaxpar.make_mesh(tensor=tensor, devices=gpus)
    own = {} if any(map(version_of, CUDNN)) else {"attention": attention}
    step, *shapes = step_of_choice(shape_of(is_planned=False, **own), choice, mesh, optimizer, 1)
    with jax.numpy_rank_promotion("allow"):
        compiled = step.lower(*shapes).compile()
    found = inspect_pipeline(compiled, mesh)
    assert found.memory.total_bytes < most * 2**30
    assert 0.9 < found.memory.total_bytes / planned.memory_bytes < 1.1
    assert found.bytes_moved("all-gather", "tensor") == 0
    config = transformer.preset(model)
    others = {2048, config.vocab_size // tensor}  # rows, and embedding and head
    of_layer = config.embed_dim * 2 * config.mlp_dim // tensor
    for dtype in ("bf16", "f32") if kind == "nf4-dq" else ("bf16",):
        in_text = re.findall(rf"\b{dtype}\[([\d,]+)\]", compiled.as_text())
        arrays = [[*map(int, dims.split(","))] for dims in set(in_text)]
        largest = max(math.prod(dims) for dims in arrays if not others & {*dims})
        assert largest == of_layer, "the largest weight of one layer, and no scales of all layers"


def test_a_recipe_compiles_for_gpus_that_are_not_here(tmp_path):
    command = [
        sys.executable,
        "recipes/gpt.py",
        "--compile-for",
        "h100",
        "--nodes",
        "2",
        "--gpus-per-node",
        "4",
    ]
    command += [
        "--mesh.data",
        "2",
        "--mesh.stage",
        "2",
        "--mesh.tensor",
        "2",
        "--out-dir",
        str(tmp_path / "run"),
    ]
    env = os.environ | {
        "PYTHONPATH": str(ROOT),
        "XLA_FLAGS": "--xla_gpu_memory_limit_slop_factor=116",
        "PYTHONWARNINGS": "error::UserWarning",
    }  # too late: a warning
    end = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert end.returncode == 0, end.stderr
    assert "jit_step on 8 devices, mesh data=2, stage=2, tensor=2" in end.stdout
    assert re.search(r"the host waits \d+ times a step", end.stdout)
    assert re.search(r"highest MFU of this program: \d+\.\d% of the peak", end.stdout)
    assert not (tmp_path / "run").exists(), "nothing is written"


@pytest.mark.slow
def test_the_benchmark_of_these_programs_runs(tmp_path):
    command = [
        sys.executable,
        "benchmarks/gpu_roofline.py",
        "--smoke",
        "--out",
        str(tmp_path / "figures.json"),
    ]
    env = os.environ | {"PYTHONPATH": str(ROOT)}
    end = subprocess.run(
        command,
        cwd=ROOT,
        env=env,
        capture_output=True,
        text=True,
        timeout=WAIT_SECONDS,
        check=False,
    )
    assert end.returncode == 0, end.stderr
    (table,) = json.loads((tmp_path / "figures.json").read_text())["tables"]
    (row,) = table["rows"]
    assert row["host waits a tick"] == 0
    assert row["messages beside products"] == "2 of 2"
    assert 0 < row["useful MFU at most"] < 1


def test_the_programs_of_a_day_with_a_gpu_compile_and_their_waits_are_counted(gpus):
    from gpt_training import TINY, Model, Work, make_batch, make_shape
    from gpu_day_parts import host_waits, pipelines, roofline

    mesh, work = (
        jaxpar.make_mesh(devices=list(gpus[:1])),
        Work(smoke=True, **TINY | {"batch_size": pipelines.NUM_MICROBATCHES}),
    )
    shape = make_shape(work, num_layers=4)
    model = Model(shape, mesh)
    optimizer, step = model.train_step()
    state = jaxpar.abstract_state(model.init, jax.random.key(0), optimizer, mesh, model.shardings())
    batch = jax.eval_shape(lambda: jax.tree.map(jnp.asarray, make_batch(work, shape)))
    bound = roofline.roofline_of(
        step.lower(state, jaxpar.abstract_batch(batch, mesh)).compile(), mesh, "h100"
    )
    assert 0 < bound["products ms"] <= bound["as compiled ms"]
    assert bound["host waits"] == 0
    programs = pipelines.programs(shape, state.params, batch, list(gpus[:1]))
    programs[next(iter(pipelines.ON_ONE))][0]()

    case = host_waits.Case(64, 2**20, ticks=4, per_tick=2)
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    inputs = jax.eval_shape(lambda: host_waits.arrays(case, jax.random.key(0)))
    inputs = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), inputs)
    waits = {
        form: host_waits.waits_of(host_waits.program(case, form), inputs, mesh)
        for form in host_waits.FORMS
    }
    assert waits == {"open": 0, "cond": 8, "loop of one trip": 16}


def steady_messages(found):
    """The messages between stages of a steady tick, and how often a step has them."""
    sends = [each for each in found.transfers if each.kind == "collective-permute"]
    steady = max(each.times for each in sends)
    return [each for each in sends if each.times == steady], steady


MERGED = program("1f1b"), program("1f1b", remat=True), program("interleaved")


@compiles(*MERGED)
def test_f_beside_b_waits_for_nothing_and_sends_beside_the_head(reports, program):
    found = reports(program).gpu
    assert found.host_waits == 0, found.render()
    sends, _ = steady_messages(found)
    assert [each.flops_meanwhile >= flops_of_head_part() for each in sends] == [True, True], (
        found.render()
    )


@compiles(*MERGED)
def test_collectives_over_tensor_of_f_run_beside_products_of_b_and_those_of_b_beside_products_of_f(
    reports, program
):
    found = reports(program)
    # Two column-row pairs have an all-reduce each in F and in B. Those that XLA joins have no name.
    of_layers = [
        each
        for each in found.gpu.transfers
        if "/FB/while/" in each.op_name and each.kind == "all-reduce"
    ]
    assert len(of_layers) == 4, found.render()
    # After R, which has loops of its own, XLA ends the first of F before any product.
    beside = [each for each in of_layers if each.flops_meanwhile > 0]
    assert len(beside) >= (3 if "remat" in dict(program.settings) else 4), found.render()


@compiles(program("zb-h1"))
def test_w_of_its_own_has_the_messages_beside_it(reports, program):
    found = reports(program).gpu
    # A W of a chunk has 8.7 GFLOP for each layer; the head, which XLA may put beside a message instead, 1.7.
    sends, _ = steady_messages(found)
    assert [each.flops_meanwhile > 4e9 for each in sends] == [True, True], found.render()
    assert found.host_waits <= 60  # its stages skip ops at the end


ZERO_3_OF_REPLICAS = {"data": 2, "stage": 4, "tensor": 1, "zero": 3}


@compiles(
    program("interleaved", **ZERO_3_OF_REPLICAS), slow=[program("zb-v", **ZERO_3_OF_REPLICAS)]
)
def test_messages_travel_beside_products_where_params_are_gathered_and_in_branches(
    reports, program
):
    found = reports(program).gpu
    least = 4e9 if program.schedule == "zb-v" else flops_of_head_part(tensor=1)
    sends, _ = steady_messages(found)
    assert [each.flops_meanwhile >= least for each in sends] == [True, True], found.render()


def flops_of_head_part(stage=4, tensor=2):
    """The operations of one stage's part of the head, forward and backward, on a shard."""
    config = shape()
    return 6 * NUM_ROWS * SEQ * config.embed_dim * config.vocab_size // (stage * tensor)


@compiles(program("1f1b", num_layers=NUM_LAYERS + 1))
def test_a_layer_that_one_stage_has_alone_makes_the_host_wait_for_it_and_not_for_the_others(
    reports, program
):
    found = reports(program).gpu
    _, steady = steady_messages(found)
    # Its loop in F and in B, each of a trip or none: two waits. In warm-up and drain as many again.
    assert 0 < found.host_waits <= 2 * 2 * (steady + 4)
    assert not rings(found, 11), found.render()


# In microbatches of one row XLA also merges the dim of rows with others, and may then want another order of the rest.
@compiles(
    *(program("1f1b"), program("1f1b", remat=True), program("interleaved"), program("zb-h1")),
    program("zb-v", rows=1),
    slow=[program("zb-h1", rows=1), program("zb-v")],
)
def test_no_ring_is_copied(reports, program):
    found = reports(program).gpu
    chunks = 2 if program.schedule in ("interleaved", "zb-v") else 1
    assert not rings(found, NUM_LAYERS // (4 * chunks)), found.render()


@compiles(program("1f1b", **ZERO_3_OF_REPLICAS), slow=[program("1f1b", data=2, stage=2, zero=3)])
def test_no_ring_is_copied_where_params_are_gathered(reports, program):
    found = reports(program).gpu
    assert not rings(found, NUM_LAYERS // dict(program.settings)["stage"]), found.render()


@compiles(program("1f1b"))
def test_nothing_is_gathered_over_tensor(reports, program):
    assert not reports(program).select("all-gather", "tensor")


MANY_LAYERS = 97  # are not written out
ONE_STAGE = program("1f1b", data=8, stage=1, tensor=1, zero=3, num_layers=MANY_LAYERS)


@compiles(ONE_STAGE, program("1f1b", **ZERO_3_OF_REPLICAS))
def test_zero_3_gathers_the_next_layer_and_reduces_the_last_one_while_one_computes(
    reports, program
):
    found = reports(program)
    of_layers = [
        each
        for each in found.gpu.transfers
        if each.times > NUM_LAYERS and each.kind != "collective-permute"
    ]
    assert {each.kind for each in of_layers} == {"all-gather", "reduce-scatter"}
    # In a pipeline params are gathered where they are read: XLA would take more memory to gather them ahead.
    late = [each for each in of_layers if program == ONE_STAGE or each.kind == "reduce-scatter"]
    assert all(each.flops_meanwhile > 0 for each in late), found.render()


REDUCTIONS = {0: "all-reduce", 1: "reduce-scatter", 2: "reduce-scatter"}


def late_in_replicas(zero):
    settings = {"overlap_grad_reduce": zero < 2, "zero": zero}  # at ZeRO 2 it changes nothing
    return program("1f1b", data=8, stage=1, tensor=1, num_layers=MANY_LAYERS, **settings)


@compiles(late_in_replicas(0), slow=[late_in_replicas(1), late_in_replicas(2)])
def test_gradients_of_one_layer_are_reduced_while_the_next_computes(reports, program):
    found = reports(program)
    of_layers = [each for each in found.gpu.transfers if each.times > MANY_LAYERS // 2]
    assert {each.kind for each in of_layers} == {REDUCTIONS[program.zero]}
    assert all(each.flops_meanwhile > 0 for each in of_layers), found.render()


def test_branches_have_the_shares_that_are_given_for_them(gpus):
    """From JAX 0.11 on XLA for GPUs makes the index of two branches a predicate, whose true branch is the first in the text."""
    x = jax.ShapeDtypeStruct(
        (256, 256), jnp.float32, sharding=jax.sharding.SingleDeviceSharding(gpus[0])
    )
    step = lambda x, _: (jax.lax.cond(x[0, 0] > 0, lambda x: jnp.tanh(x @ x), jnp.sin, x), None)
    loop = jax.jit(lambda x: jax.lax.scan(step, x, length=4)[0])
    found = jaxpar.inspect_step(loop, x, branch_shares={"cond$": (0.75, 0.25)})
    assert found.flops == 2 * 256**3, found.render()


IN_TURN_LAYERS = 6  # and no other dim


def in_turn(zero, **changes):
    return program(
        "1f1b",
        data=8,
        stage=1,
        tensor=1,
        zero=zero,
        num_layers=IN_TURN_LAYERS,
        remat=True,
        **changes,
    )


def at_levels(of_other, *levels):
    """The cases of a program in turn and another at levels of ZeRO, the later ones slow."""
    marks = [(), *[pytest.mark.slow] * (len(levels) - 1)]
    return [
        pytest.param(*of_other(zero), marks=mark, id=f"zero {zero}")
        for zero, mark in zip(levels, marks, strict=True)
    ]


@pytest.mark.parametrize(
    ("in_turn", "plain"),
    at_levels(lambda zero: (in_turn(zero), in_turn(zero, mask_idle_ops=False)), 1, 3),
)
def test_microbatches_of_one_stage_make_no_stack_of_layers_and_need_less_memory(
    reports, in_turn, plain
):
    found, before = reports(in_turn), reports(plain)
    of_ticks = lambda report: [each for each in report.gpu.work if each.times > 1]
    stacks = lambda report: [
        each
        for each in of_ticks(report)
        if re.search(rf"\[{IN_TURN_LAYERS},|,{IN_TURN_LAYERS},", each.array)
    ]
    moved = lambda report: sum(each.num_bytes * each.times for each in of_ticks(report))
    assert not stacks(found), found.render()
    assert {"slices", "updates"} <= {each.kind for each in stacks(before)}, (
        "what plain accumulation does"
    )
    assert moved(found) < moved(before), (found.render(), before.render())
    assert found.memory.temp_bytes < before.memory.temp_bytes


@pytest.mark.parametrize(
    ("written_out", "loop"),
    at_levels(
        lambda zero: [
            in_turn(zero, num_microbatches=1, mask_idle_ops=masks) for masks in (True, False)
        ],
        0,
        2,
        3,
    ),
)
def test_one_batch_makes_no_stack_of_layers_before_its_gradients_and_needs_less_memory(
    reports, written_out, loop
):
    found, before = reports(written_out), reports(loop)
    assert not [each for each in found.gpu.work if each.times > 1], "no loop: " + found.render()
    assert [each for each in before.gpu.work if each.times == IN_TURN_LAYERS], (
        "what the loop of jax.lax.scan does"
    )
    assert found.memory.temp_bytes < before.memory.temp_bytes


@pytest.mark.parametrize(
    ("early", "at_end"),
    at_levels(lambda zero: (in_turn(zero, overlap_grad_reduce=True), in_turn(zero)), 1, 0),
)
def test_the_last_microbatch_of_one_stage_reduces_each_layer_while_the_next_computes(
    reports, early, at_end
):
    found, after = reports(early), reports(at_end)
    of_data = {each.name for each in found.select(REDUCTIONS[early.zero], "data")}
    reductions = [
        each for each in found.gpu.transfers if each.name in of_data and each.num_bytes > 1 << 18
    ]
    hidden = [each for each in reductions if each.flops_meanwhile]
    moved = lambda transfers: sum(each.num_bytes for each in transfers)
    assert len(hidden) >= IN_TURN_LAYERS - 1, found.render()
    assert moved(hidden) > 0.75 * moved(reductions), (
        "the rest are the last layer and the embedding: " + found.render()
    )
    assert found.memory.temp_bytes < 1.1 * after.memory.temp_bytes


@pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated"
)  # it multiplies rows of experts in float32
def test_experts_over_data_and_tensor_send_what_is_planned(gpus):
    config = transformer.preset("moe-bytes", num_layers=2)
    model = transformer_shape(config, experts="data", seq=128, is_planned=False)
    choice = Choice(data=4, tensor=2, num_microbatches=2, zero=1, experts="data")
    mesh = jaxpar.make_mesh(**choice.sizes, devices=list(gpus))
    _, found = compile_choice(model, choice, mesh, optax.adam(1e-4), 32)
    moved = {"+".join(axes): count for axes, count in found.bytes_by_axes().items()}
    machines = cluster("h100", num_nodes=2, devices_per_node=4)
    planned = price(model, machines, choice, batch_size=32).bytes_moved
    # XLA for GPUs sums a few numbers of all devices, as the norm of the gradients, at once.
    assert moved["tensor"] == pytest.approx(planned["tensor"], abs=256), found.render()
    assert moved["data"] == pytest.approx(planned["data"], abs=256), found.render()


def test_a_layer_that_is_written_out_is_gathered_and_reduced_while_others_compute(gpus):
    config = transformer.preset("tinyllama-1.1b", num_layers=4, compute_dtype="bfloat16")
    model = transformer_shape(config, seq=256)
    choice, rows = Choice(data=8, zero=3, num_microbatches=8, remat=True), 8 * 8 * 16
    mesh = jaxpar.make_mesh(data=8, devices=list(gpus))
    _, found = compile_choice(model, choice, mesh, optax.adam(1e-4), rows)
    of_layers = [each for each in found.gpu.transfers if each.times == choice.num_microbatches]
    assert {each.kind for each in of_layers} == {"all-gather", "reduce-scatter"}
    alone = [each for each in of_layers if not each.flops_meanwhile]
    assert len(alone) <= 3 < len(of_layers) / 4, (
        "the first layer that F reads, and the last one that B has, with the embedding behind it"
    )
    planned = price(
        model, cluster("h100", num_nodes=2, devices_per_node=4), choice, batch_size=rows
    )
    assert 0.9 < found.memory.total_bytes / planned.memory_bytes < 1.1


TENSOR = {"data": 2, "stage": 1, "tensor": 4, "num_layers": 8}


@pytest.mark.parametrize(
    ("whole", "parts"),
    [(program("1f1b", **TENSOR), program("1f1b", **TENSOR, constrain=jaxpar.sequence_parallel))],
    ids=str,
)
def test_sequence_parallelism_needs_less_memory_and_gathers_again_beside_products(
    reports, whole, parts
):
    whole, parts = reports(whole), reports(parts)
    assert parts.memory.temp_bytes < 0.9 * whole.memory.temp_bytes
    of_layers = [
        each for each in parts.gpu.transfers if each.times >= 7 * (NUM_MICROBATCHES - 1)
    ]  # one trip may be apart
    assert {"all-gather", "reduce-scatter"} <= {each.kind for each in of_layers}, parts.render()
    assert [each for each in of_layers if each.kind == "all-gather" and each.flops_meanwhile > 0], (
        parts.render()
    )


def rings(found, layers):
    """The copies in ticks of arrays with a dim for the layers of a chunk and one for a microbatch's rows or all its tokens."""
    dims = lambda each: set(map(int, re.findall(r"\d+", each.array.partition("[")[2])))
    is_ring = lambda each: (
        layers in dims(each) and not dims(each).isdisjoint({NUM_ROWS, NUM_ROWS * SEQ})
    )
    return [each for each in found.copies if each.times > 1 and is_ring(each)]


def test_the_sum_of_the_embeddings_gradients_is_not_turned_round_in_each_tick(gpus):
    """XLA of JAX 0.12 would, where a reduce-scatter after the loop wants it so."""
    sizes = {
        "embed_dim": 1024,
        "num_heads": 8,
        "num_kv_heads": 8,
        "mlp_dim": 1024,
        "vocab_size": 8192,
    }
    config = transformer.preset("llama-7b", num_layers=2, compute_dtype="bfloat16")
    config = transformer.TransformerConfig(**vars(config) | sizes)
    model = transformer_shape(config, seq=1024, sequence_parallel=True)
    mesh = jaxpar.make_mesh(stage=2, tensor=4, devices=list(gpus))
    choice = Choice(stage=2, tensor=4, num_microbatches=4)
    _, found = compile_choice(model, choice, mesh, optax.sgd(0.1), 4)
    table = {"f32[2048,1024]", "f32[1024,2048]"}
    in_ticks = [each for each in found.gpu.copies if each.times > 1]
    assert not [each for each in in_ticks if each.array in table], found.render()


TOKENS, EXPERTS, WIDTH = (
    4 * 256,
    16,
    256,
)  # tokens of a microbatch on a device, experts and their rows' width


def small_mixtral(experts=None, **changes):
    sizes = {"embed_dim": WIDTH, "num_layers": 2, "num_heads": 4, "num_kv_heads": 4, "mlp_dim": 128}
    more = {"vocab_size": 512, "compute_dtype": "bfloat16"}
    of_experts = {"count": EXPERTS, "per_token": 2, "mlp_dim": None} | (experts or {})
    return config_of("mixtral", of_experts, **sizes | more | changes)


def step_with_experts(mesh, rules, num_microbatches, config, *, packed=False):
    """A compiled step of a model with experts, and the most elements of an array of bfloat16 in it, rings aside."""
    table = transformer.param_table(config)
    shardings = shardings_from_dims(table, mesh, TRANSFORMER_RULES | rules)
    run = jaxpar.value_and_grad(
        transformer.make_model(config),
        loss_of(config),
        mesh,
        schedule="1f1b",
        num_microbatches=num_microbatches,
        shardings=shardings,
    )
    rows = 4 * mesh.shape["data"] * num_microbatches
    tokens, weight = (
        jax.ShapeDtypeStruct((rows, 256), dtype) for dtype in (jnp.int32, jnp.float32)
    )
    batch = {"tokens": tokens, "targets": tokens, "weight": weight} | (
        {"segments": tokens} if packed else {}
    )
    batch = jaxpar.abstract_batch(batch, mesh)
    shaped = lambda a, s: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=s)
    compiled = (
        jax.jit(run).lower(jax.tree.map(shaped, abstract_params(table), shardings), batch).compile()
    )
    dims = re.findall(r"bf16\[([\d,]+)\]", compiled.as_text())
    return compiled, max(math.prod(map(int, each.split(",")[-3:])) for each in dims)


def num_kernels(compiled):
    return len(re.findall(r'custom_call_target="mosaic_gpu', compiled.as_text()))


def attention(q, k, v, bias=None):
    """What ``jaxpar.flash_attention`` is, where cuDNN is not installed: the step is also traced where there is no mesh."""
    del k, v, bias
    return q


attention.kernel_of_documents = jaxpar.flash_attention.kernel_of_documents


@pytest.mark.parametrize(
    ("name", "split", "packed"),
    [("olmoe-1b-7b", "experts", False), ("mixtral-8x7b", "expert_mlp", True)],
)
def test_compiled_for_gpus_each_product_is_the_kernel_and_documents_are_told_to_that_of_attention(
    gpus, name, split, packed
):
    mesh = jaxpar.make_mesh(data=4, tensor=2, devices=list(gpus))
    how = {"attention": attention, "max_documents": 5} if packed else {}
    shape = transformer.preset(name, num_layers=2, compute_dtype="bfloat16", vocab_size=1024)
    config = transformer.TransformerConfig(**vars(shape.with_experts(split=split)) | how)
    compiled, _ = step_with_experts(mesh, EXPERT_RULES[split], 1, config, packed=packed)
    assert num_kernels(compiled) == 9, (
        "gate, up and down; their input gradients; their weight gradients"
    )
    text, k = compiled.as_text(), config.experts.per_token
    rows = k * TOKENS + config.experts.count // (2 if split == "experts" else 1) * TILE
    assert re.search(rf"bf16\[(1,)?{rows},{config.embed_dim}\]", text), (
        "rows in groups of whole tiles"
    )
    assert not re.search(rf"bf16\[{config.experts.count},\d*{rows},", text), "rows by all experts"
    calls = re.findall(r'custom_call_target="(__cudnn\$\w+)"', text)
    assert sorted(calls) == (
        ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"] if packed else []
    )
    assert (re.search(r"bf16\[[\d,]*256,256\]", text) is None) is packed, "scores"
    assert not jaxpar.inspect_step(compiled, mesh=mesh).uncounted_calls


@pytest.mark.filterwarnings(
    "ignore:The Pallas Triton backend is deprecated"
)  # by JAX 0.11; these GPUs have no other kernel
def test_on_gpus_before_hopper_a_row_meets_no_weight_of_another_expert_either():
    mesh = jaxpar.make_mesh(devices=jaxpar.compile_only_devices("a100-80gb", devices_per_node=1))
    own = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    shapes = (
        ((1, 8 * TILE, 256), jnp.bfloat16),
        ((1, 4, 256, 128), jnp.bfloat16),
        ((1, 4), jnp.int32),
    )
    given = [jax.ShapeDtypeStruct(*shape, sharding=own) for shape in shapes]
    grouped = partial(grouped_product, lambda kernel, *args: kernel(*args))
    ragged = lambda rows, weights, sizes: jax.lax.ragged_dot(rows[0], weights[0], sizes[0])

    def flops_of(product):
        whole = jax.sharding.PartitionSpec()
        run = jax.jit(manual_over_data_and_stage(product, mesh, in_specs=whole, out_specs=whole))
        return jaxpar.inspect_step(run.lower(*given).compile(), mesh=mesh).flops

    assert flops_of(grouped) == 2 * 8 * TILE * 256 * 128
    assert flops_of(ragged) == 4 * flops_of(grouped), "what XLA does: so the kernel is needed"


def exchanges_before(compiled, exchanges):
    """The names of the exchanges whose results each of them depends on.

    In F what experts return depends on the rows that they got, and on the numbers of their experts; in B the gradients of both
    depend on what arrives first. Names of operations, which would tell F from B, do not do so since JAX 0.12.
    """
    names = {each.name for each in exchanges}
    before = {}
    for _, each in parse_module(compiled.as_text()).walk():
        before[each.name] = set().union(
            *(before.get(name, set()) | ({name} & names) for name in each.operands)
        )
    return {name: before[name] for name in names}


def test_rows_of_f_travel_to_their_experts_beside_products_of_b_and_those_of_b_beside_products_of_f(
    gpus,
):
    mesh = jaxpar.make_mesh(data=4, stage=2, devices=list(gpus))
    compiled, largest = step_with_experts(
        mesh, EXPERTS_OVER_DATA, 4, small_mixtral({"buffer": 1.5}, num_layers=4)
    )
    found = jaxpar.inspect_step(compiled, mesh=mesh, large_bytes=1 << 19)
    assert found.gpu.host_waits == 0, found.render()
    steady = [
        e for e in found.gpu.transfers if e.kind == "all-to-all" and "/FB/while/" in e.op_name
    ]
    before = exchanges_before(compiled, steady)
    (last_of_f,) = (name for name, others in before.items() if len(others) == 2)
    names_of_f = {last_of_f} | before[last_of_f]
    of_f = [each for each in steady if each.name in names_of_f]
    of_b = [each for each in steady if each.name not in names_of_f]
    assert (len(of_f), len(of_b)) == (3, 3), found.render()
    assert sorted(len(before[each.name]) for each in of_b) == [0, 1, 1], (
        "the backward pass reverses the order"
    )
    beside = lambda sent: [each for each in sent if each.flops_meanwhile > 0]
    assert beside(of_f), found.render()
    assert len(beside(of_b)) >= 2, found.render()
    assert num_kernels(compiled) == 2 * 3 + 9 + 6, (
        "in two loops of F, in that of F and B, and in that of B"
    )
    assert largest < TOKENS * EXPERTS * WIDTH


def test_every_stage_runs_leading_dense_layers_and_no_tick_waits_for_the_host(gpus):
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2, devices=list(gpus))
    config = small_mixtral({"num_dense_layers": 1, "mlp_dim": 128}, num_layers=3, mlp_dim=384)
    compiled, _ = step_with_experts(mesh, EXPERT_RULES["experts"], 4, config)
    found = jaxpar.inspect_step(compiled, mesh=mesh)
    assert found.gpu.host_waits == 0, found.render()
    of_leading = [
        each
        for each in found.select("all-reduce", "tensor")
        if "/embed" in each.op_name and each.times > 1
    ]
    assert len(of_leading) >= 2 + 2, found.render()


def on_one_gpu(gpus, config, dtype):
    """A mesh of one GPU, what puts the shapes of arrays on it, and the params of a model there."""
    mesh = jaxpar.make_mesh(devices=list(gpus[:1]))
    whole = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())
    on_gpu = lambda tree: jax.tree.map(
        lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype, sharding=whole), tree
    )
    stored = lambda a: jax.ShapeDtypeStruct(a.shape, dtype)
    return (
        mesh,
        on_gpu,
        on_gpu(jax.tree.map(stored, abstract_params(transformer.param_table(config)))),
    )


def compiled_step(gpus, config, rows, dtype=jnp.bfloat16):
    """The report on a step of greedy generation on one GPU: one token a row, with a cache of 512 positions."""
    mesh, on_gpu, params = on_one_gpu(gpus, config, dtype)
    sampling = make_sampling(config, 0.0, None, None, key=jax.random.key(0), eos=())
    prompts = jax.ShapeDtypeStruct((rows, 64), jnp.int32), jax.ShapeDtypeStruct((rows,), jnp.int32)
    state = jax.eval_shape(
        lambda *args: _first.plain(config, (512, 256), *args, sampling), params, *prompts
    )
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = _extend.for_gpus.lower(config, params, on_gpu(state), on_gpu(sampling), 256)
    return jaxpar.inspect_step(lowered.compile(), mesh=mesh)


@pytest.mark.parametrize(("rows", "most"), [(1, 236), (16, 306)])
def test_a_token_reads_weights_and_cache_where_they_are_by_few_kernels(gpus, rows, most):
    """Of TinyLlama: 527 kernels for one row and 617 for 16, and 2.8 GiB of weights copied, when layers were a loop's inputs."""
    config = transformer.preset("tinyllama-1.1b", compute_dtype="bfloat16")
    found = compiled_step(gpus, config, rows)
    assert sum(each.times for each in found.gpu.work) <= most, found.render()
    moved = [each for each in found.gpu.work if each.kind in ("slices", "updates", "copies")]
    assert sum(each.num_bytes * each.times for each in moved) < 2**21, found.render()
    assert found.memory.temp_bytes < 40 * 2**20, "32 MiB of them are the products' own"


def test_weights_that_a_token_casts_are_cast_layer_by_layer(gpus):
    """Only the head is cast whole: 537 MiB with four layers in a trip, and 245 when layers were a loop's inputs."""
    config = transformer.preset("tinyllama-1.1b", compute_dtype="bfloat16", num_layers=6)
    found = compiled_step(gpus, config, 1, dtype=jnp.float32)
    head = 2 * config.vocab_size * config.embed_dim
    of_cublas = (
        2**25 if jax.__version_info__ < (0, 12) else 0
    )  # which multiplies the head, as XLA's own kernels do since
    assert found.memory.temp_bytes < head + of_cublas + 2**23, found.render()


def test_the_program_that_scores_given_tokens_compiles_for_gpus(gpus):
    config = transformer.preset("tinyllama-1.1b", compute_dtype="bfloat16", num_layers=2)
    mesh, on_gpu, params = on_one_gpu(gpus, config, jnp.bfloat16)
    given = jax.ShapeDtypeStruct((4, 256), jnp.int32), jax.ShapeDtypeStruct((4,), jnp.int32)
    with jax.sharding.use_abstract_mesh(mesh.abstract_mesh):
        lowered = _score.for_gpus.lower(config, 1, params, *on_gpu(given))
    compiled = lowered.compile()
    assert compiled.memory_analysis().temp_size_in_bytes < 256 * 2**20, (
        "not the scores of all positions"
    )


@pytest.mark.parametrize("how", ["whole rows", "documents", "a bias"])
def test_attention_over_a_gathered_sequence_is_flash_kernels_alone_and_stores_no_scores(gpus, how):
    mesh, seq = jaxpar.make_mesh(context=4, tensor=2, devices=list(gpus)), 1 << 15
    rows, heads = (
        jax.sharding.PartitionSpec(None, *axes) for axes in (("context",), (None, "tensor"))
    )

    def on_shard(q, k, v, segments):
        gather = lambda x: jax.lax.all_gather(x, "context", axis=1, tiled=True)
        settings = {"chunk_of_context": (jax.lax.axis_index("context"), 4)}
        settings |= {} if how == "whole rows" else {"segments": (segments, gather(segments))}
        settings |= (
            {"documents": find_documents(as_rows(segments), 8)} if how == "documents" else {}
        )
        return chunked_causal_attention(q, (k, v), (gather(k), gather(v)), **settings)

    def run(q, k, v, segments, ct):
        whole = jax.sharding.PartitionSpec()
        split = each_on_its_tensor_shard(
            on_shard, in_specs=(heads, heads, heads, whole), out_specs=heads
        )
        out, backward = jax.vjp(lambda *qkv: split(*qkv, segments), q, k, v)
        return out, *backward(ct)

    sharding = jax.sharding.NamedSharding(
        mesh, jax.sharding.PartitionSpec(None, "context", "tensor")
    )
    q, k = (jax.ShapeDtypeStruct((2, seq, n, 128), jnp.bfloat16, sharding=sharding) for n in (8, 2))
    segments = jax.ShapeDtypeStruct(
        (2, seq), jnp.int32, sharding=jax.sharding.NamedSharding(mesh, rows)
    )
    run_on_mesh = jax.jit(manual_over_data_and_stage(run, mesh, in_specs=rows, out_specs=rows))
    compiled = run_on_mesh.lower(q, k, k, segments, q).compile()
    text = compiled.as_text()
    own = "ScaleBias" if how == "a bias" else ""
    names = [
        f"__cudnn$fmha{part}Softmax{way}" for part in (own, "", "") for way in ("", "Backward")
    ]
    assert sorted(re.findall(r'custom_call_target="(__cudnn\$\w+)"', text)) == sorted(names)
    found = jaxpar.inspect_step(compiled, mesh=mesh)
    assert found.gpu.host_waits == 0, "the device knows how many keys each chunk sees"
    keys, chunk = 2 * seq * 128, seq // 8  # of the whole sequence, or queries of a device
    largest = max(
        math.prod(map(int, dims.split(",")))
        for dims in re.findall(r"\b(?:bf16|f32|pred)\[([\d,]+)\]", text)
    )
    assert largest == (2 * 2 * chunk**2 if how == "a bias" else keys), (
        "scores of a chunk by a chunk are 16 times the keys"
    )
    bias = 2 * 2 * 2 * chunk**2 if how == "a bias" else 0
    num_copies = (
        8 if how == "whole rows" else 10
    )  # keys and values from the first one on that is seen
    assert found.memory.temp_bytes < num_copies * 2 * keys + 2.1 * bias, found.render()


def step_in(products, mesh, num_layers=4, kind=None, **settings):
    """A compiled step of a Llama with layers 1,024 wide, whose products are those of libraries, and its report.

    With a kind of codes its weights are frozen beside factors of LoRA.
    """
    config = transformer.preset(
        "llama-7b", compute_dtype="bfloat16", products=products, num_layers=num_layers
    )
    sizes = {
        "embed_dim": 1024,
        "num_heads": 8,
        "num_kv_heads": 8,
        "mlp_dim": 2048,
        "vocab_size": 1024,
    }
    config = transformer.TransformerConfig(**vars(config) | sizes | {"attention": attention})
    table = transformer.param_table(config)
    shardings = shardings_from_dims(table, mesh, TRANSFORMER_RULES)
    loss = lambda logits, batch: jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])
    init, trainable = lambda key: init_params(table, key), None
    if kind:
        factors, trainable = Lora(16, LAYER_WEIGHTS), ADAPTERS
        init = lambda key: quantize(factors.init(key, init_params(table, key)), kind)
        shardings = quantized_shardings(
            jax.eval_shape(init, jax.random.key(0)), factors.shardings(shardings)
        )
    model, how = transformer.make_model(config), {"num_microbatches": 2} | settings
    parallel = jaxpar.Parallel(mesh, shardings, trainable=trainable)
    run = jaxpar.value_and_grad(model, loss, parallel, jaxpar.Pipeline(**how))
    state = jaxpar.abstract_state(init, jax.random.key(0), SGD, parallel)
    tokens = jax.ShapeDtypeStruct((8, 1024), jnp.int32)
    batch = jaxpar.abstract_batch({"tokens": tokens, "targets": tokens}, mesh)
    lowered = jaxpar.make_train_step(run, SGD).lower(state, batch)
    compiled = lowered.compile(
        compiler_options={"xla_gpu_enable_triton_gemm": False}
    )  # chosen by measurement otherwise
    return compiled.as_text(), jaxpar.inspect_step(compiled, mesh=mesh, large_bytes=1)


SGD = optax.sgd(0.1)
WEIGHTS = 4  # of a layer


def test_in_fp8_each_weight_has_three_products_of_cublaslt_and_a_layer_transposes_few_tensors_and_needs_no_more_memory(
    gpus,
):
    mesh = jaxpar.make_mesh(devices=list(gpus[:1]))
    text, found = step_in("fp8", mesh)
    assert text.count(fp8.CALL) == fp8.PASSES * WEIGHTS * 4
    assert fp8.products_of(text) == (fp8.PASSES * WEIGHTS * 4, [])
    assert found.fp8_products == fp8.PASSES * WEIGHTS * 4 * 2, "of two microbatches"
    fp8.check_products(text, fp8.PASSES * WEIGHTS)
    alone = [each for each in found.gpu.copies if each.array.startswith("f8")]
    assert len(alone) <= 5 * 4, "others are transposed where they are rounded"
    _, before = step_in("compute", mesh)
    assert before.fp8_products == 0
    assert found.flops == before.flops
    assert found.memory.temp_bytes <= before.memory.temp_bytes


@pytest.mark.parametrize("axes", [pytest.param({}, marks=pytest.mark.slow), {"tensor": 2}])
def test_weights_in_four_bits_are_multiplied_in_fp8_twice_each_since_they_are_frozen(gpus, axes):
    mesh = jaxpar.make_mesh(**axes, devices=list(gpus[: axes.get("tensor", 1)]))
    (text, found), (_, before) = (step_in(each, mesh, kind="nf4") for each in ("fp8", "compute"))
    count, others = fp8.products_of(text)
    assert others == []
    assert count >= (fp8.PASSES - 1) * WEIGHTS
    # Of two microbatches. The embedding is frozen, so the first layer need not give the gradient of what it reads.
    most = (fp8.PASSES - 1) * WEIGHTS * 4 * 2
    assert most - 2 <= found.fp8_products <= most
    assert found.memory.temp_bytes < 1.1 * before.memory.temp_bytes, (found.memory, before.memory)


def test_over_tensor_no_more_memory_is_needed_in_fp8_since_weights_are_kept_in_one_order(gpus):
    mesh = jaxpar.make_mesh(tensor=2, devices=list(gpus[:2]))
    (text, found), (_, before) = (step_in(each, mesh) for each in ("fp8", "compute"))
    assert fp8.products_of(text) == (fp8.PASSES * WEIGHTS * 2, []), (
        "before, in and after the loop of F beside B"
    )
    assert found.memory.temp_bytes < before.memory.temp_bytes


def test_in_a_pipeline_with_b_and_w_apart_products_stay_in_fp8_and_no_more_activations_are_added_over_tensor(
    gpus,
):
    mesh = jaxpar.make_mesh(stage=2, tensor=2, devices=list(gpus[:4]))
    (text, found), (_, before) = (
        step_in(each, mesh, schedule="zb-h1") for each in ("fp8", "compute")
    )
    count, others = fp8.products_of(text)
    assert others == []
    assert count >= fp8.PASSES * WEIGHTS
    large = lambda report: [
        report.count("all-reduce", "tensor", min_bytes=2**16),
        report.count("all-gather", "tensor"),
    ]
    assert large(found) == large(before)
