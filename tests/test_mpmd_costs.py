"""What a step of the MPMD executor stores, compiles and reduces, and what it refuses."""

import math
import re
import types

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.pipeline import mpmd
from jaxpar.pipeline.mpmd_params import RestSharding, submeshes
from jaxpar.schedule import SCHEDULES, Schedule, make_schedule, simulate
from tests.support import tiny
from tests.support.oracle import assert_same, assert_same_bits
from tests.support.tiny_uneven import (
    CLASSES,
    CNN,
    ROWS,
    WIDTH,
    embed,
    head,
    layer,
    loss,
    make_batch,
    make_cnn,
    make_params,
    mpmd_value_and_grad,
    on_mesh,
    reference,
)

# Their models have params that nothing reads.
pytestmark = pytest.mark.filterwarnings("ignore:a model's outputs must depend on a param")

# What a step costs.


class Bookkeeping(mpmd._Step):
    """A step that computes nothing: each op returns names in place of arrays."""

    def __init__(self, schedule):
        self.pipeline = types.SimpleNamespace(schedule=schedule)
        self.arrived, self.stored = {}, [{} for _ in range(schedule.num_stages)]
        self.ran, self.most = [[] for _ in self.stored], [0 for _ in self.stored]

    def run_op(self, stage, op):
        super().run_op(stage, op)
        self.ran[stage].append(op)
        self.most[stage] = max(self.most[stage], len(self.stored[stage]))

    def call(self, op, part, stage, own):
        schedule = self.pipeline.schedule
        last = part == schedule.num_virtual_stages - 1
        stored = {"residuals_b": [op], "residuals_w": [op]}
        needs = {
            "F": {"x"} if part else set(),
            "R": {"x"} if part else set(),
            "B": {"ct", "residuals_b", "residuals_w"},
            "W": {"residuals_w", "cotangents_w"},
        }
        assert set(own) == needs[op.kind], f"{op} of part {part} reads {set(own)}"
        made = {
            "F": ({"ct": [op]} if last else {"x": [op]}) | ({} if schedule.recomputes else stored),
            "R": stored,
            "B": ({"ct": [op]} if part else {})
            | ({"cotangents_w": [op]} if schedule.splits_backward else {}),
            "W": {},
        }
        return made[op.kind]

    def send(self, name, arrays, part, to, microbatch):
        self.arrived[name, to, microbatch] = arrays


@pytest.mark.parametrize("remat", [False, True])
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_stage_stores_what_the_schedule_says_in_its_order_and_lets_go_of_all(name, remat):
    schedule = make_schedule(name, 4, 8, remat=remat)
    step = Bookkeeping(schedule)
    step.walk()
    assert tuple(step.most) == simulate(schedule).peak_residuals
    assert [tuple(order) for order in step.ran] == [schedule.order(stage) for stage in range(4)]
    assert not step.arrived
    assert not any(step.stored)


@pytest.mark.full
def test_live_arrays_do_not_grow_with_microbatches_and_a_second_step_compiles_nothing(monkeypatch):
    compiled, live = [], []
    listen = lambda event, *_, **__: compiled.append(event) if "backend_compile" in event else None
    jax.monitoring.register_event_duration_secs_listener(listen)
    run_op = mpmd._Step.run_op

    def count(step, stage, op):
        run_op(step, stage, op)
        live.append(len(jax.live_arrays()))

    monkeypatch.setattr(mpmd._Step, "run_op", count)
    mesh, params = jaxpar.make_mesh(stage=2), make_params(2, dtype=np.float32)
    peaks = {}
    for num_microbatches in (4, 8):
        batch = make_batch(rows=2 * num_microbatches, dtype=np.float32)
        value_and_grad = mpmd_value_and_grad(
            mesh, schedule="zb-h1", num_microbatches=num_microbatches
        )
        first = value_and_grad(params, batch)
        so_far, before = len(compiled), len(jax.live_arrays())
        live.clear()
        second = value_and_grad(params, batch)
        assert len(compiled) == so_far > 0, "the second step compiled again"
        assert_same_bits(second, first, message="the same step twice must give the same bits")
        peaks[num_microbatches] = max(live) - before
        del first, second, value_and_grad
    assert peaks[4] == peaks[8], f"live arrays at most, by microbatches: {peaks}"


def record_ops(monkeypatch):
    """The compiled text of each op that runs, and the shapes of its arguments."""
    texts, args = {}, {}
    call = mpmd._Step.call

    def record(step, op, part, stage, own):
        if (part, op.kind) not in texts:
            given = step.args(op, part, stage, own)
            compiled = step.pipeline.ops[part, op.kind].lower(*given).compile()
            step.pipeline.ops[part, op.kind] = compiled  # which the call would compile again
            texts[part, op.kind] = compiled.as_text()
            args[part, op.kind] = jax.eval_shape(lambda *trees: trees, *given)
        return call(step, op, part, stage, own)

    monkeypatch.setattr(mpmd._Step, "call", record)
    return texts, args


@pytest.mark.full
@pytest.mark.parametrize(("schedule", "remat"), [("1f1b", False), ("zb-h1", True)])
def test_no_op_copies_the_weights_of_a_layer_out_of_a_stack_or_a_sum_of_gradients(
    monkeypatch, schedule, remat
):
    texts, _ = record_ops(monkeypatch)
    value_and_grad = mpmd_value_and_grad(jaxpar.make_mesh(stage=2), schedule=schedule, remat=remat)
    value_and_grad(make_params(6, dtype=np.float32), make_batch(dtype=np.float32))
    assert {kind for _, kind in texts} == set("FRBW" if remat else "FB")
    for which, text in texts.items():
        shapes = re.findall(r"= \w+\[([\d,]*)\]\S* dynamic-(?:update-)?slice\(", text)
        sizes = [math.prod(map(int, filter(None, shape.split(",")))) for shape in shapes]
        assert max(sizes, default=0) < WIDTH * WIDTH, f"{which} slices arrays of {sizes} elements"
        assert not re.search(rf"= \w+\[1,{WIDTH},{WIDTH}\]\S* copy\(", text), (
            f"{which} copies sums of gradients"
        )


@pytest.mark.full
def test_params_are_cast_once_a_step_and_their_gradients_are_added_in_float32(monkeypatch):
    def narrow(p, x):
        half = lambda tree: jax.tree.map(lambda a: a.astype(jnp.bfloat16), tree)
        h = layer(half(p), x | half({"h": x["h"], "scale": x["scale"]}))["h"]
        return x | {"h": h.astype(jnp.float32)}

    _, args = record_ops(monkeypatch)
    model = jaxpar.LayeredModel(embed, narrow, head)
    params, batch = make_params(4, dtype=np.float32), make_batch(dtype=np.float32)
    got = mpmd_value_and_grad(jaxpar.make_mesh(stage=2), model=model)(params, batch)
    for sums, whole, _, _ in args.values():
        assert {a.dtype for a in jax.tree.leaves(whole["layers"])} == {jnp.dtype(jnp.bfloat16)}
        assert {a.dtype for a in jax.tree.leaves(sums.get("layers", []))} <= {jnp.dtype(np.float32)}
    assert_same(got, reference(model)(params, batch), within=2e-2)


@pytest.mark.full
def test_layers_lie_on_their_stage_as_they_are_sharded_over_tensor(monkeypatch):
    found, call = {}, mpmd._Step.call

    def record(step, op, part, stage, own):
        found[part] = step.whole[stage]["layers"]
        return call(step, op, part, stage, own)

    monkeypatch.setattr(mpmd._Step, "call", record)
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    params, batch = on_mesh(mesh, make_params(4, dtype=np.float32), make_batch(dtype=np.float32))
    mpmd_value_and_grad(mesh)(params, batch)
    for part, layers in found.items():
        assert len(layers) == 2
        for b_up, w_down, w_up in layers:
            own = mesh.devices.take(part, mesh.axis_names.index("stage"))
            assert {shard.device for shard in w_up.addressable_shards} == set(own.flat)
            shapes = [a.addressable_shards[0].data.shape for a in (b_up, w_down, w_up)]
            assert shapes == [(WIDTH // 2,), (WIDTH // 2, WIDTH), (WIDTH, WIDTH // 2)]


@pytest.mark.full
def test_ops_reduce_nothing_over_data_and_each_stage_reduces_once_a_step(monkeypatch):
    texts, _ = record_ops(monkeypatch)
    reductions, jit_grads = [], mpmd.jit_grads

    def counting(*args):
        run = jit_grads(*args)

        def grads(*sums):
            reductions.append(run.lower(*sums).compile().as_text().count("all-reduce("))
            return run(*sums)

        return grads

    monkeypatch.setattr(mpmd, "jit_grads", counting)
    mesh, params = jaxpar.make_mesh(data=2, stage=2), make_params(2, dtype=np.float32)
    mpmd_value_and_grad(mesh, num_microbatches=1)(params, make_batch(dtype=np.float32))
    assert set(texts) == {(0, "F"), (0, "B"), (1, "F"), (1, "B")}
    for which, text in texts.items():
        assert "all-reduce" not in text, f"{which} reduces"
        assert "input_output_alias" in text, f"{which} does not add to its sums in place"
    assert reductions == [1, 1], "all-reduces of the two stages"


def test_params_at_rest_are_used_where_they_lie():
    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    rest = RestSharding(jax.NamedSharding(mesh, jax.P("stage", None, "tensor")))
    array = jax.device_put(np.arange(32.0).reshape(4, 2, 4), rest.given)
    pieces = rest.pieces(array)
    assert [piece.sharding.mesh for piece in pieces] == list(submeshes(mesh))
    for stage, piece in enumerate(pieces):
        np.testing.assert_array_equal(piece, np.asarray(array)[2 * stage : 2 * stage + 2])
    where = lambda a: {shard.data.unsafe_buffer_pointer() for shard in a.addressable_shards}
    assert where(pieces[0]) | where(pieces[1]) == where(array) == where(rest.join(pieces))


@pytest.mark.parametrize(
    "spec", [("stage", "tensor"), (("stage", "tensor"),), (("tensor", "stage"),), (None, "tensor")]
)
def test_what_is_gathered_on_a_stage_and_scattered_again_is_the_same(spec):
    rest = RestSharding(
        jax.NamedSharding(jaxpar.make_mesh(data=2, stage=2, tensor=2), jax.P(*spec))
    )
    host = np.arange(24.0).reshape(4, 6)
    whole = rest.gather(host, 1)
    np.testing.assert_array_equal(whole, host)
    assert whole.sharding.mesh == submeshes(rest.given.mesh)[1]
    back = rest.scatter(whole)
    np.testing.assert_array_equal(back, host)
    assert back.sharding == rest.given


# What is refused.


def test_a_call_under_jit_is_refused():
    value_and_grad = mpmd_value_and_grad(jaxpar.make_mesh(stage=2))
    with pytest.raises(
        TypeError, match=r'executor="mpmd" dispatches .* got a traced argument.*Call it directly'
    ):
        jax.jit(value_and_grad)(make_params(2), make_batch())


def test_a_mesh_over_several_processes_is_refused():
    mesh = types.SimpleNamespace(
        devices=np.array([types.SimpleNamespace(process_index=i) for i in (0, 1)])
    )
    told = r'drives all devices from one process; got .* processes \[0, 1\]. Use executor="spmd"'
    with tiny.signatures_unchecked(), pytest.raises(ValueError, match=told):
        mpmd.check_one_process(mesh)


def test_unlike_layers_are_refused_by_the_one_program_executor():
    params, batch = make_cnn()
    told = r'so their layers must be equal and stacked .*; got a list of 5 layers. Stack equal .* use executor="mpmd", without'
    mesh = jaxpar.make_mesh(stage=2)
    with pytest.raises(ValueError, match=told):
        jaxpar.value_and_grad(CNN, loss, mesh)
    model = jaxpar.LayeredModel(
        CNN.embed, lambda p, x: x, lambda outer, x: x["h"].reshape(ROWS, -1)[:, :CLASSES]
    )
    with pytest.raises(ValueError, match=told):
        jaxpar.value_and_grad(model, loss, mesh)(params, batch)


@pytest.mark.parametrize(
    ("layer", "layers", "message"),
    [
        (
            [layer] * 3,
            [{}] * 2,
            "must have as many functions as params; got 3 functions and params for 2 layers. Give",
        ),
        (
            [layer] * 2,
            {"w": np.ones((2, 3))},
            "must have a list of params under 'layers'.*got 2 functions and dict. Unstack",
        ),
        ([layer] * 2, [], 'every leaf under "layers" must have the same leading dim'),
    ],
)
def test_functions_and_params_of_unlike_layers_that_do_not_fit_are_refused(layer, layers, message):
    model = jaxpar.LayeredModel(embed, layer, head)
    with pytest.raises(ValueError, match=message):
        mpmd_value_and_grad(jaxpar.make_mesh(stage=2), model=model)(
            make_params(2) | {"layers": layers}, make_batch(dtype=np.float32)
        )


def test_rows_that_microbatches_do_not_divide_and_a_layout_of_other_layers_are_refused():
    mesh, params = jaxpar.make_mesh(stage=2), make_params(2)
    with pytest.raises(
        ValueError, match="must be divisible by the data axis times num_microbatches; got 10 rows"
    ):
        mpmd_value_and_grad(mesh)(params, make_batch(rows=10))
    layout = jaxpar.LayerLayout(4, num_stages=2)
    with pytest.raises(
        ValueError, match=r"a layout must fit .* got layers=4 in the layout and 2 in the run"
    ):
        mpmd_value_and_grad(mesh, layout=layout)(params, make_batch())


def test_an_order_that_breaks_a_dependency_is_refused():
    good = make_schedule("1f1b", 2, 2)
    bad = Schedule("backwards", 2, 2, 1, good.ops[::-1])
    with pytest.raises(ValueError, match="an op must come after what it needs"):
        mpmd_value_and_grad(jaxpar.make_mesh(stage=2), schedule=bad, num_microbatches=2)
