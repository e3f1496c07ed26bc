"""How shardings over tensor propagate through a traced function: shapes on a device, collectives, operations."""

import jax
import jax.numpy as jnp
import pytest
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar.backward.graph import trace
from jaxpar.backward.partition import Collective, partition
from jaxpar.mesh import cut_of

X, UP, DOWN = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((2, 6, 8), (8, 16), (16, 8)))


def of(function, args, cuts, num_shards=4):
    graph = trace(function, *args)
    given = dict(zip(graph.inputs, cuts, strict=True))
    return graph, partition(graph, given, num_shards)


def test_a_column_split_sends_nothing_and_a_row_split_adds_up_its_result():
    graph, part = of(lambda x, up, down: jnp.tanh(x @ up) @ down, (X, UP, DOWN), (None, 1, 0))
    assert part.collectives_of(graph.nodes) == [Collective("all-reduce", 4 * 2 * 6 * 8)]
    assert part.cuts.get(graph.outputs[0]) is None
    assert part.flops_of(graph.nodes) == 2 * (2 * 2 * 6 * 8 * 16) // 4
    hidden = next(node for node in graph.nodes if node.name == "tanh").outputs[0]
    assert part.graph.avals[hidden].shape == (2, 6, 4)


def test_one_shard_is_the_whole():
    graph, part = of(
        lambda x, up, down: jnp.tanh(x @ up) @ down, (X, UP, DOWN), (None, 1, 0), num_shards=1
    )
    assert not part.collectives
    assert part.flops_of(graph.nodes) == 2 * (2 * 2 * 6 * 8 * 16)


@pytest.mark.parametrize(
    ("function", "cut", "after", "crosses"),
    [
        (lambda x: x.reshape(2, 6, 4, 2), 2, 2, None),  # a head goes with its shard
        (
            lambda x: x.reshape(12, 8),
            1,
            None,
            "all-gather",
        ),  # the lesser of two dims that are joined
        (lambda x: x.transpose(2, 0, 1), 2, 0, None),
        (lambda x: x.sum(-1), 2, None, "all-reduce"),
        (lambda x: x.max(0), 2, 1, None),
        (lambda x: jnp.exp(x) + 1, 2, 2, None),
        (lambda x: x[:, :3], 2, 2, None),
        (lambda x: x[..., :4], 2, None, "all-gather"),
        (lambda x: jnp.take(x, jnp.array([1, 0]), axis=0), 2, 2, None),
        (lambda x: jnp.take_along_axis(x, jnp.ones((2, 3, 1), int), axis=1), 2, 2, None),
        (lambda x: jnp.take_along_axis(x, jnp.ones((2, 3, 8), int), axis=1), 0, 0, None),
    ],
)
def test_a_cut_goes_where_its_dim_goes(function, cut, after, crosses):
    shards = 2
    graph, part = of(function, (X,), (cut,), shards)
    assert part.cuts.get(graph.outputs[0]) == after
    assert {each.kind for each in part.collectives.values()} == ({crosses} if crosses else set())


def test_a_param_that_is_gathered_over_another_axis_keeps_its_cut():
    spec = PartitionSpec(None, "tensor")
    twice = lambda param: jnp.concatenate([param, param])
    gather = jax.custom_vjp(
        lambda param: jax.shard_map(twice, in_specs=spec, out_specs=spec, check_vma=False)(param)
    )
    gather.defvjp(lambda param: (gather(param), None), lambda _, grad: (grad[: len(grad) // 2],))
    with jax.set_mesh(jaxpar.make_mesh(tensor=2, devices=jax.devices()[:2])):
        graph, part = of(gather, (UP,), (1,), num_shards=2)
    assert part.graph.avals[graph.outputs[0]].shape == (16, 8)
    assert not part.guessed


def test_a_lookup_in_rows_that_are_cut_is_added_up():
    table, rows = (
        jax.ShapeDtypeStruct((16, 8), jnp.float32),
        jax.ShapeDtypeStruct((2, 6), jnp.int32),
    )
    graph, part = of(lambda table, rows: jnp.take(table, rows, axis=0), (table, rows), (0, None))
    assert part.collectives_of(graph.nodes) == [Collective("all-reduce", 4 * 2 * 6 * 8)]


def test_what_is_not_known_is_named_and_taken_whole():
    graph, part = of(
        lambda x: jax.lax.top_k(x, 2)[0], (jax.ShapeDtypeStruct((4, 8), jnp.float32),), (0,)
    )
    assert [node.name for node in part.guessed] == ["top_k"]
    assert part.cuts.get(graph.outputs[0]) is None


def over_rows(x, up, down):
    """A loop over the leading dim, which is that of x."""
    return jax.lax.scan(lambda carry, row: (carry + row @ up @ down, None), x[0], x)[0]


@pytest.mark.parametrize(
    ("function", "cuts", "guessed"),
    [
        (lambda x, up, down: jnp.tanh(x @ up) @ down, (None, 1, 0), []),
        (lambda x, up, down: x @ up, (2, 0, None), []),
        (lambda x, up, down: x @ up, (None, 0, None), ["dot_general"]),
        (lambda x, up, down: x @ up, (2, None, None), ["dot_general"]),
        (lambda x, up, down: x @ up, (2, 1, None), ["dot_general"]),
        (lambda x, up, down: x @ up, (1, 1, None), ["dot_general"]),
        (lambda x, up, down: x @ up, (1, None, None), []),
        (lambda x, up, down: x + x.swapaxes(0, 0), (1, None, None), []),
        (lambda x, up, down: up + down.T, (None, 1, 1), ["add"]),
        (lambda x, up, down: up + down.T, (None, 1, 0), []),
        (lambda x, up, down: jnp.concatenate([up, down.T]), (None, 1, 0), []),
        (lambda x, up, down: jnp.concatenate([up, down.T], 1), (None, 0, 0), ["concatenate"]),
        (lambda x, up, down: up[:, :8], (None, 1, None), ["slice"]),
        (lambda x, up, down: up.reshape(-1), (None, 1, None), ["reshape"]),
        (
            lambda x, up, down: jnp.zeros((4, 8)).at[jnp.array([0, 1])].add(x[:, 0]),
            (2, None, None),
            ["scatter-add"],
        ),
        (over_rows, (None, 1, 0), []),
        (over_rows, (0, 1, 0), ["scan", "slice"]),
        (
            lambda x, up, down: jax.lax.fori_loop(0, 3, lambda _, x: x @ up @ down, x),
            (2, 0, None),
            ["scan"],
        ),
        (
            lambda x, up, down: jax.lax.cond(x[0, 0, 0] > 0, lambda: up, lambda: down.T),
            (None, 1, 1),
            ["cond"],
        ),
        (
            lambda x, up, down: jax.lax.cond(x[0, 0, 0] > 0, lambda: up, lambda: down.T),
            (None, 1, 0),
            [],
        ),
    ],
)
def test_a_choice_that_is_xlas_is_a_guess(function, cuts, guessed):
    _, part = of(function, (X, UP, DOWN), cuts, num_shards=2)
    assert {node.name for node in part.guessed} == set(guessed)


def test_the_dim_that_an_axis_cuts_is_found():
    spec = jax.sharding.PartitionSpec
    assert cut_of(spec(None, "tensor"), "tensor") == 1
    assert cut_of(spec(("data", "tensor")), "tensor") == 0
    assert cut_of(spec("data"), "tensor") is None


def block(x, up, down):
    return x + jnp.tanh(x @ up) @ down


def written_out(x, up, down):
    for _ in range(5):
        x = block(x, up, down)
    return x


def by_scan(x, up, down):
    return jax.lax.scan(lambda x, _: (block(x, up, down), None), x, None, 5)[0]


def by_fori_loop(x, up, down):
    return jax.lax.fori_loop(0, 5, lambda _, x: block(x, up, down), x)


def by_while_loop(x, up, down):
    goes_on = lambda carry: carry[0] <= 8
    step = lambda carry: (carry[0] + 2, block(carry[1], up, down))
    return jax.lax.while_loop(goes_on, step, (0, x))[1]


def by_cond(x, up, down):
    run = lambda: written_out(x, up, down)
    return jax.lax.cond(x[0, 0, 0] > 0, lambda: x, run)


def in_both_passes(function):
    def passes(x, up, down):
        y, vjp = jax.vjp(function, x, up, down)
        return y, vjp(y)

    return passes


@pytest.mark.parametrize("shards", [1, 4])
@pytest.mark.parametrize("function", [by_scan, by_fori_loop, by_cond])
def test_a_loop_counts_as_often_as_it_runs_and_of_branches_the_one_with_the_most_work(
    function, shards
):
    cuts = (None, 1, 0)
    for passes in (lambda function: function, in_both_passes):
        whole, expected = of(passes(written_out), (X, UP, DOWN), cuts, shards)
        graph, part = of(passes(function), (X, UP, DOWN), cuts, shards)
        assert part.flops_of(graph.nodes) == expected.flops_of(whole.nodes)
        sent = expected.collectives_of(whole.nodes)
        assert part.collectives_of(graph.nodes) == sent
        assert bool(sent) == (shards > 1)
        assert part.shapes(graph.outputs) == expected.shapes(whole.outputs)
        assert not part.guessed


def test_a_while_loop_counts_where_its_numbers_are_written():
    whole, expected = of(written_out, (X, UP, DOWN), (None, 1, 0))
    graph, part = of(by_while_loop, (X, UP, DOWN), (None, 1, 0))
    assert part.flops_of(graph.nodes) == expected.flops_of(whole.nodes)
    assert part.collectives_of(graph.nodes) == expected.collectives_of(whole.nodes)


def test_a_loop_within_a_loop_counts_as_often_as_both_run():
    def twice(x, up, down):
        return jax.lax.fori_loop(0, 2, lambda _, x: by_scan(x, up, down), x)

    whole, expected = of(written_out, (X, UP, DOWN), (None, 1, 0))
    graph, part = of(twice, (X, UP, DOWN), (None, 1, 0))
    assert part.flops_of(graph.nodes) == 2 * expected.flops_of(whole.nodes)
    assert part.collectives_of(graph.nodes) == 2 * expected.collectives_of(whole.nodes)


def test_a_sum_in_a_loop_is_sharded_as_its_terms():
    def of_rows(x, up):
        add = lambda total, row: (total + row @ up, row @ up)
        return jax.lax.scan(add, jnp.zeros((6, 16)), x)

    graph, part = of(of_rows, (X, UP), (None, 1))
    assert [each.shape for each in part.shapes(graph.outputs)] == [(6, 4), (2, 6, 4)]
    assert part.flops_of(graph.nodes) == 2 * 2 * (2 * 6 * 8 * 16) // 4
