"""inspect_step finds what a hand count finds: collectives by axis, runs and bytes; memory; FLOPs; arrays that are whole."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import nnx
from jax.sharding import NamedSharding
from jax.sharding import PartitionSpec as P

import jaxpar
from jaxpar.inspect import assert_collectives, compare, inspect_step
from jaxpar.inspect.hlo import parse_module
from jaxpar.planner.compiled import inspect_pipeline
from jaxpar.schedule import make_schedule
from tests.support.hlo_text import DATA_TENSOR


def make_mesh(**axes: int) -> jax.sharding.Mesh:
    auto = (jax.sharding.AxisType.Auto,) * len(axes)
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=auto)


def abstract(mesh, shape, *spec, dtype=jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype, sharding=NamedSharding(mesh, P(*spec)))


def manual(fn, mesh, in_specs, out_specs):
    return jax.shard_map(fn, mesh=mesh, in_specs=in_specs, out_specs=out_specs, check_vma=False)


# What compiled programs of ours and of others show. Each count is reasoned in the test.


@pytest.mark.usefixtures("source_lines")
def test_psum_over_one_of_two_axes_moves_its_ring_bytes():
    mesh = make_mesh(data=2, tensor=4)
    psum = manual(lambda x: jax.lax.psum(x, "tensor"), mesh, P("data", "tensor"), P("data"))
    report = inspect_step(psum, abstract(mesh, (16, 64), "data", "tensor"))
    # Each device holds 8 x 16 floats, 512 bytes; a ring of 4 sends 2 * 3/4 of that.
    assert report.count("all-reduce", "tensor") == report.count() == 1
    assert report.bytes_moved("all-reduce", "tensor") == 768
    assert report.count(axis="data") == report.bytes_moved(axis="data") == 0
    (collective,) = report.collectives
    assert (collective.payload_bytes, collective.group_size, collective.whole_axes) == (
        512,
        4,
        True,
    )
    assert "psum" in collective.op_name
    assert "test_inspect.py:" in collective.source


def test_psum_over_both_axes_is_named_by_both():
    mesh = make_mesh(data=2, tensor=4)
    psum = manual(lambda x: jax.lax.psum(x, ("data", "tensor")), mesh, P("data", "tensor"), P())
    report = inspect_step(psum, abstract(mesh, (16, 64), "data", "tensor"))
    assert report.count("all-reduce", ("tensor", "data")) == 1
    assert report.count("all-reduce", "tensor") == report.count("all-reduce", "data") == 0


def test_psum_of_a_tree_is_one_combined_all_reduce():
    mesh = make_mesh(data=8)
    tree = {"w": abstract(mesh, (32, 64)), "b": abstract(mesh, (64,)), "scale": abstract(mesh, ())}
    report = inspect_step(manual(lambda tree: jax.lax.psum(tree, "data"), mesh, P(), P()), tree)
    assert_collectives(report, {("all-reduce", "data"): (1, 2 * 7 * 4 * (32 * 64 + 64 + 1) // 8)})
    assert len(report.collectives[0].shapes) == 3


def test_cpu_devices_move_bfloat16_as_float32_and_float16_as_it_is():
    mesh = make_mesh(data=8)
    gather = manual(lambda x: jax.lax.all_gather(x, "data", tiled=True), mesh, P("data"), P())
    dtypes = (jnp.bfloat16, jnp.float16)
    reports = [inspect_step(gather, abstract(mesh, (64,), "data", dtype=dtype)) for dtype in dtypes]
    assert [report.bytes_moved("all-gather", "data") for report in reports] == [
        7 * 8 * 4,
        7 * 8 * 2,
    ]


def test_collective_in_a_scan_runs_once_a_trip():
    mesh = make_mesh(data=2, tensor=4)

    def steps(x):
        return jax.lax.scan(lambda x, _: (jax.lax.psum(x, "tensor") * 0.1, None), x, length=5)[0]

    report = inspect_step(
        manual(steps, mesh, P("data"), P("data")), abstract(mesh, (2, 32), "data")
    )
    assert report.count("all-reduce", "tensor") == 5
    assert report.bytes_moved("all-reduce") == 5 * 2 * 3 * 128 // 4


def test_trips_of_nested_loops_multiply():
    mesh = make_mesh(data=2, tensor=4)

    def inner(x, _):
        return jax.lax.psum(x, "tensor") * 0.1, None

    def outer(x, _):
        x = jax.lax.psum(x, "data")
        return jax.lax.scan(inner, x, length=4)[0], None

    nested = manual(lambda x: jax.lax.scan(outer, x, length=3)[0], mesh, P(), P())
    report = inspect_step(nested, abstract(mesh, (32,)))
    assert_collectives(report, {("all-reduce", "data"): 3, ("all-reduce", "tensor"): 12})


def test_collective_in_a_branch_counts_as_a_bound_until_its_share_is_given():
    mesh = make_mesh(data=2, tensor=4)

    def step(x, _):
        return jax.lax.cond(
            x.sum() > 0, lambda x: jax.lax.psum(x, "data"), lambda x: x + 1, x
        ), None

    branches = manual(lambda x: jax.lax.scan(step, x, length=10)[0], mesh, P("tensor"), P("tensor"))
    x = abstract(mesh, (32,), "tensor")
    (collective,) = inspect_step(branches, x).collectives
    assert (collective.times, collective.conditional, collective.is_bound) == (10, True, True)
    (collective,) = inspect_step(branches, x, branch_shares={"cond$": (0.7, 0.3)}).collectives
    assert (collective.times, collective.conditional, collective.is_bound) == (3, True, False)
    assert collective.bytes_moved == 3 * 32


def test_ring_shifts_of_a_shard_map_are_told_apart():
    mesh = make_mesh(stage=4, tensor=2)

    def tick(carry, _):
        forward, backward = carry
        forward = jax.lax.ppermute(forward, "stage", [(i, (i + 1) % 4) for i in range(4)])
        backward = jax.lax.ppermute(backward, "stage", [(i, i - 1) for i in range(1, 4)])
        return (forward + 1, backward * 2), None

    def ring(x, y):
        return jax.lax.scan(tick, (x, y), length=6)[0]

    specs = (P("stage"), P("stage"))
    x = abstract(mesh, (4, 8), "stage")
    report = inspect_step(manual(ring, mesh, specs, specs), x, abstract(mesh, (4, 16), "stage"))
    # A device sends its row, 8 floats forward and 16 backward, in each of 6 ticks; stage 0 sends nothing backward.
    assert_collectives(report, {("collective-permute", "stage"): (12, 6 * (32 + 64))})
    assert sorted((each.shift, len(each.senders)) for each in report.collectives) == [
        (-1, 6),
        (1, 8),
    ]


def test_gather_scatter_and_all_to_all_move_their_ring_bytes():
    mesh = make_mesh(data=2, tensor=4)

    def all_three(x):
        gathered = jax.lax.all_gather(x, "tensor", tiled=True)
        scattered = jax.lax.psum_scatter(jnp.sin(gathered), "tensor", tiled=True)
        return jax.lax.all_to_all(jnp.cos(scattered), "tensor", 1, 0)

    exchange = manual(all_three, mesh, P("tensor", "data"), P("data", "tensor"))
    report = inspect_step(exchange, abstract(mesh, (16, 8), "tensor", "data"))
    # Each device holds 4 x 4 floats, 64 bytes, and 256 when gathered; each of the three sends 3/4 of its whole.
    expected = {"all-gather": (1, 192), "reduce-scatter": (1, 192), "all-to-all": (1, 48)}
    assert_collectives(report, {(kind, "tensor"): value for kind, value in expected.items()})


class TwoLinears(nnx.Module):
    def __init__(self, rngs: nnx.Rngs):
        self.up = nnx.Linear(64, 256, rngs=rngs)
        self.down = nnx.Linear(256, 64, rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


def test_column_row_pair_of_a_flax_nnx_model_costs_one_all_reduce():
    mesh = make_mesh(data=2, tensor=4)
    graph, state = nnx.split(nnx.eval_shape(lambda: TwoLinears(nnx.Rngs(0))))
    specs = {
        "up": {"kernel": P(None, "tensor"), "bias": P("tensor")},
        "down": {"kernel": P("tensor"), "bias": P()},
    }
    params = jax.tree.map(
        lambda leaf, spec: abstract(mesh, leaf.shape, *spec), nnx.to_pure_dict(state), specs
    )
    batch = abstract(mesh, (32, 64), "data")

    def apply(params, batch):
        nnx.replace_by_pure_dict(state, params)
        return nnx.merge(graph, state)(batch)

    def loss(params, batch):
        return jnp.mean((apply(params, batch) - batch) ** 2)

    # Forward: the row-parallel product leaves partial sums, 16 x 64 floats on each device.
    one_activation = 2 * 3 * 16 * 64 * 4 // 4
    assert_collectives(
        inspect_step(apply, params, batch), {("all-reduce", "tensor"): (1, one_activation)}
    )
    # Backward: nothing over tensor, since no input needs a gradient; the gradients of a device's parameters and the loss
    # over data, together.
    gradient = 4 * (2 * 64 * 64 + 64 + 64 + 1)
    report = inspect_step(jax.value_and_grad(loss), params, batch)
    assert_collectives(
        report,
        {("all-reduce", "tensor"): (1, one_activation), ("all-reduce", "data"): (1, gradient)},
    )


def test_optax_step_adds_no_collective_and_clipping_adds_scalars():
    mesh = make_mesh(data=2, tensor=4)
    params = {
        "up": abstract(mesh, (64, 256), None, "tensor"),
        "down": abstract(mesh, (256, 64), "tensor"),
    }
    batch = abstract(mesh, (32, 64), "data")

    def loss(params, batch):
        return jnp.mean((jax.nn.relu(batch @ params["up"]) @ params["down"] - batch) ** 2)

    def report_of(optimizer):
        def step(params, opt_state, batch):
            grads = jax.grad(loss)(params, batch)
            updates, opt_state = optimizer.update(grads, opt_state, params)
            return optax.apply_updates(params, updates), opt_state

        opt_state = optax.tree.map_params(
            optimizer,
            lambda moment, param: param,
            jax.eval_shape(optimizer.init, params),
            params,
            transform_non_params=lambda leaf: abstract(mesh, leaf.shape, dtype=leaf.dtype),
        )
        return inspect_step(step, params, opt_state, batch)

    plain = {("all-reduce", "tensor"): 1, ("all-reduce", "data"): 1}
    assert_collectives(report_of(optax.adam(1e-3)), plain)
    # The norm sums the squares of what tensor splits: scalars, of which nothing else in the step is as small.
    clipped = report_of(optax.chain(optax.clip_by_global_norm(1.0), optax.adam(1e-3)))
    assert_collectives(clipped, plain, min_bytes=64)
    assert set(clipped.select(axis="tensor")) > set(clipped.select(axis="tensor", min_bytes=64))


def test_loop_with_unknown_trips_is_flagged_and_never_counted():
    mesh = make_mesh(data=2, tensor=4)

    def until_large(x):
        return jax.lax.while_loop(
            lambda x: jnp.sum(x) < 100, lambda x: jax.lax.psum(x @ x, "data"), x
        )

    loop = manual(until_large, mesh, P(), P())
    x = abstract(mesh, (16, 16))
    report = inspect_step(loop, x)
    assert report.collectives[0].times is None
    assert report.collectives[0].bytes_moved is None
    assert len(report.unknown_loops) == 1
    assert "1 x ?" in report.render()
    with pytest.raises(
        ValueError,
        match="runs a step must be known to be counted; got all-reduce over data in a loop",
    ):
        report.count()
    with pytest.raises(ValueError, match="Pass loop_trips="):
        report.bytes_by_axes()
    report = inspect_step(loop, x, loop_trips=7)
    assert (report.count("all-reduce", "data"), report.flops, report.unknown_loops) == (
        7,
        7 * 2 * 16**3,
        (),
    )


def test_flops_of_a_matmul_in_a_scan_count_every_trip():
    mesh = make_mesh(data=2, tensor=4)

    def steps(w, x):
        return jax.lax.scan(lambda x, _: (x @ w, None), x, length=7)[0]

    report = inspect_step(steps, abstract(mesh, (64, 64)), abstract(mesh, (32, 64), "data"))
    assert report.flops == report.flops_least == 7 * 2 * 16 * 64 * 64
    assert report.compiler_flops == pytest.approx(report.flops / 7, rel=0.01), (
        "XLA has learnt to count trips: drop ours"
    )


def test_flops_of_branches_lie_between_the_cheapest_and_the_dearest():
    def step(x):
        return jax.lax.cond(x[0, 0] > 0, lambda x: x @ x @ x, lambda x: x @ x, x)

    x = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    report = inspect_step(step, x)
    assert (report.flops, report.flops_least) == (4 * 64**3, 2 * 64**3)
    report = inspect_step(step, x, branch_shares={"cond": (0.5, 0.5)})
    assert report.flops == report.flops_least == 3 * 64**3


@pytest.mark.parametrize("padding", ["SAME", pytest.param("VALID", marks=pytest.mark.full)])
def test_flops_of_convolutions_are_those_of_the_compiler(padding):
    def conv(image, kernel):
        return jax.lax.conv_general_dilated(image, kernel, (2, 1), padding, rhs_dilation=(1, 2))

    image, kernel = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 3, 32, 24), (16, 3, 3, 3))
    )
    report = inspect_step(conv, image, kernel)
    assert report.flops == report.compiler_flops


def test_backward_of_a_convolution_costs_two_forwards():
    def loss(image, kernel):
        return jnp.sum(jax.lax.conv(image, kernel, (1, 1), "VALID") ** 2)

    image, kernel = (
        jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((8, 4, 16, 16), (4, 4, 3, 3))
    )
    forward = inspect_step(loss, image, kernel).flops
    assert inspect_step(jax.grad(loss, (0, 1)), image, kernel).flops == 3 * forward


def test_memory_is_what_each_device_holds():
    mesh = make_mesh(data=2, tensor=4)
    w, x = abstract(mesh, (64, 256), None, "tensor"), abstract(mesh, (32, 64), "data")
    step = jax.jit(
        lambda w, x: (w * 0.5, x @ w),
        donate_argnums=0,
        out_shardings=(w.sharding, NamedSharding(mesh, P("data", "tensor"))),
    )
    memory = inspect_step(step, w, x).memory
    whole_w, whole_x, result = 64 * 64 * 4, 16 * 64 * 4, 16 * 64 * 4
    assert memory.argument_bytes == whole_w + whole_x
    # The compiler rounds a tuple's pointers into the outputs on some backends.
    assert whole_w + result <= memory.output_bytes <= whole_w + result + 64
    assert memory.alias_bytes == whole_w
    assert (
        memory.total_bytes
        == sum(memory.by_kind().values()) - memory.total_bytes - 2 * memory.alias_bytes
    )


def test_large_arrays_that_every_device_holds_whole_are_named():
    mesh = make_mesh(data=2, tensor=4)
    params = {
        "whole": abstract(mesh, (256, 256)),
        "split": abstract(mesh, (256, 256), "tensor"),
        "small": abstract(mesh, (8,)),
        "frozen": None,
    }
    key = abstract(mesh, (2,), dtype=jax.random.key(0).dtype)

    def step(params, key, unused):
        bits = jax.random.bits(key[0])
        return {"sum": params["whole"] + params["split"], "small": params["small"], "bits": bits}

    out = {
        "sum": NamedSharding(mesh, P()),
        "small": NamedSharding(mesh, P()),
        "bits": NamedSharding(mesh, P()),
    }
    step = jax.jit(step, out_shardings=out)
    args = (params, key, abstract(mesh, (1024, 1024)))
    whole = inspect_step(step, *args, large_bytes=4 * 256 * 256).whole_arrays
    assert [(each.name, each.num_bytes, each.num_devices) for each in whole] == [
        ("params['whole']", 262144, 8),
        ("output['sum']", 262144, 8),
    ]
    assert len(inspect_step(step, *args, large_bytes=4 * 256 * 256 + 1).whole_arrays) == 0
    assert "params['whole']" in inspect_step(step, *args, large_bytes=1).render()


def test_arrays_beside_static_arguments_are_named_by_place():
    mesh = make_mesh(data=8)
    step = jax.jit(lambda scale, x, y: (scale * x + y).sum(), static_argnums=0)
    report = inspect_step(step, 2.0, abstract(mesh, (8,)), abstract(mesh, (8,)), large_bytes=32)
    assert [each.name for each in report.whole_arrays] == ["args[0]", "args[1]"]


def test_every_stage_of_compilation_gives_the_same_report():
    mesh = make_mesh(data=2, tensor=4)
    w, x = abstract(mesh, (64, 64), "tensor"), abstract(mesh, (32, 64), "data", "tensor")
    jitted = jax.jit(lambda w, x: x @ w)
    report = inspect_step(lambda w, x: x @ w, w, x)
    assert report.count("all-reduce", "tensor") == 1
    for step in (jitted.trace(w, x), jitted.lower(w, x), jitted.lower(w, x).compile()):
        assert compare(report, inspect_step(step)).is_same
        assert inspect_step(step).axis_sizes == DATA_TENSOR
    arrays = (jax.device_put(jnp.ones(each.shape), each.sharding) for each in (w, x))
    assert compare(report, inspect_step(jitted, *arrays)).is_same


def test_program_on_one_device_has_no_collectives():
    report = inspect_step(lambda x: x @ x, np.ones((8, 8), np.float32))
    assert (report.collectives, report.num_devices, report.flops) == ((), 1, 2 * 8**3)
    assert "no collectives" in report.render()


def test_axis_of_size_one_moves_nothing():
    mesh = make_mesh(data=8, stage=1)
    psum = manual(lambda x: jax.lax.psum(x, "stage") * 2, mesh, P("data"), P("data"))
    assert inspect_step(psum, abstract(mesh, (16,), "data")).collectives == ()


def test_links_are_inside_a_node_or_across():
    mesh = make_mesh(data=2, tensor=4)
    both = manual(
        lambda x: jax.lax.psum(jnp.sin(jax.lax.psum(x, "tensor")), "data"),
        mesh,
        P("data", "tensor"),
        P(),
    )
    x = abstract(mesh, (16, 64), "data", "tensor")
    links = {
        each.axes: each.crosses_nodes
        for each in inspect_step(both, x, devices_per_node=4).collectives
    }
    assert links == {("tensor",): False, ("data",): True}
    links = {
        each.axes: each.crosses_nodes
        for each in inspect_step(both, x, devices_per_node=2).collectives
    }
    assert links == {("tensor",): True, ("data",): True}
    assert all(each.crosses_nodes is None for each in inspect_step(both, x).collectives)


def test_nodes_follow_device_ids_and_not_places_in_the_mesh():
    devices = (
        np.array(jax.devices()[:8]).reshape(4, 2).T
    )  # data pairs neighbours: devices 0 and 1, 2 and 3, ...
    mesh = jax.sharding.Mesh(devices, ("data", "tensor"))
    psum = manual(lambda x: jax.lax.psum(x, "data"), mesh, P("data"), P())
    report = inspect_step(psum, abstract(mesh, (16,), "data"), devices_per_node=2)
    assert report.select("all-reduce", "data")[0].crosses_nodes is False


# Questions to a report, and its text.


def report_of_two() -> tuple:
    mesh = make_mesh(data=2, tensor=4)
    psum = manual(lambda x: jax.lax.psum(x, "tensor"), mesh, P("data", "tensor"), P("data"))
    both = manual(
        lambda x: jax.lax.psum(jnp.sin(jax.lax.psum(x, "tensor")), "data"),
        mesh,
        P("data", "tensor"),
        P(),
    )
    x = abstract(mesh, (16, 64), "data", "tensor")
    return inspect_step(psum, x), inspect_step(both, x)


def test_report_reads_as_a_table_with_units():
    _, report = report_of_two()
    text = report.render()
    assert str(report) == text
    assert "8 devices, mesh data=2, tensor=4" in text.splitlines()[0]
    row = next(
        line for line in text.splitlines() if line.startswith("all-reduce") and " tensor " in line
    )
    assert row.split()[:8] == ["all-reduce", "tensor", "1", "4", "512", "B", "768", "B"]
    assert report.bytes_by_axes() == {("tensor",): 768, ("data",): 512}


def test_comparison_names_what_differs_and_nothing_else():
    before, after = report_of_two()
    difference = compare(before, after)
    assert dict(difference.collectives) == {("all-reduce", ("data",)): ((0, 0), (1, 512))}
    assert "all-reduce over data" in str(difference)
    assert "all-reduce over tensor" not in str(difference)
    assert compare(before, before).is_same
    assert str(compare(before, before)) == "no difference"


def test_failed_assertion_says_what_was_expected_and_what_is_there():
    _, report = report_of_two()
    with pytest.raises(
        AssertionError, match=r"all-reduce over data must run 2 times a step; got 1"
    ):
        assert_collectives(report, {("all-reduce", "data"): 2, ("all-reduce", "tensor"): 1})
    with pytest.raises(
        AssertionError, match=r"all-reduce over tensor must move 1 bytes a step; got 768"
    ):
        assert_collectives(report, {("all-reduce", "tensor"): (1, 1)}, allow_others=True)
    with pytest.raises(AssertionError, match=r"nothing else expected; got all-reduce over data"):
        assert_collectives(report, {("all-reduce", "tensor"): 1})
    assert assert_collectives(report, {"all-reduce": 2}) is report


def test_bad_input_is_named():
    mesh, report = make_mesh(data=2, tensor=2), report_of_two()[0]
    with pytest.raises(
        ValueError, match="axis must be one of the mesh's; got 'model', a mesh with axes"
    ):
        report.count("all-reduce", "model")
    with pytest.raises(
        ValueError,
        match="mesh must have the devices of the compiled program; got a mesh of 4, a program for 1",
    ):
        inspect_step(lambda x: x, jnp.ones(4), mesh=mesh)
    with pytest.raises(
        TypeError,
        match="fn must be a function or a traced, lowered or compiled stage of one; got int",
    ):
        inspect_step(3)
    with pytest.raises(ValueError, match="devices_per_node must be at least 1; got 0"):
        inspect_step(lambda x: x, jnp.ones(4), devices_per_node=0)
    with pytest.raises(
        ValueError, match=r"branch_shares must give one share for each branch .* got 3 shares"
    ):
        inspect_step(
            lambda x: jax.lax.cond(x[0] > 0, jnp.sin, jnp.cos, x),
            jnp.ones(4),
            branch_shares={"": (0.5, 0.2, 0.3)},
        )
    with pytest.raises(
        ValueError, match="the text must be an HLO module with an ENTRY computation; got none"
    ):
        parse_module("HloModule nothing")


@pytest.mark.parametrize("shares", [(0.5, 0.9), (1.5, -0.5), ()])
def test_shares_of_branches_that_do_not_add_up_are_refused(shares):
    with pytest.raises(ValueError, match=r"shares of .*, which add up to 1; got .* for 'cond\$'"):
        inspect_step(lambda x: x, 1.0, branch_shares={"cond$": shares})


def test_the_pipeline_of_another_schedule_is_not_inspected():
    mesh, of_three = jaxpar.make_mesh(stage=2), make_schedule("1f1b", 3, 4)
    compiled = jax.jit(lambda x: x).lower(1.0).compile()
    with pytest.raises(ValueError, match="must have the stages of the mesh; got 3 and 2"):
        inspect_pipeline(compiled, mesh, of_three)
    with pytest.raises(TypeError, match=r"a Schedule; got .*1f1b"):
        inspect_pipeline(compiled, mesh, "1f1b")
