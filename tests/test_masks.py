"""What a layer, embedding, head or loss may not do with the values of an idle stage is skipped there, also in masked ticks.

Idle stages hold zeros, or what other ops left. A callback that sees them is noticed here by what it was given, and a loop that
does not end on them by the number of its trips.
"""

import sys
from collections import Counter
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar import _compat
from jaxpar.pipeline import build_stage, control_flow, spmd_program
from jaxpar.pipeline.control_flow import is_maskable
from jaxpar.schedule import make_schedule
from tests.support import tiny_gpt
from tests.support.oracle import assert_same

WIDTH, ROWS, NUM_MICROBATCHES = 3, 2, 4
MOST_TRIPS = 100

seen = Counter()


@pytest.fixture
def x64():
    """Float64 in all threads: those that call the host do not see what ``jax.enable_x64`` sets in one."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


def note(kind, place):
    """A function of the host that notes what it is given, and returns it."""

    def on_host(value):
        seen[kind, place, round(float(np.asarray(value).sum()), 9)] += 1
        return value

    return on_host


def calls(place, h):
    """Calls the host in each way; the backward pass needs none of it."""
    h = jax.lax.stop_gradient(h)
    jax.debug.callback(note("debug", place), h)
    return 0.1 * jax.pure_callback(note("pure", place), jax.ShapeDtypeStruct(h.shape, h.dtype), h)


def loops(place, h):
    """A loop that ends when a number that doubles is large enough. Zero never is."""

    def trip(state):
        size, count = state
        tell = note("trip", place)
        return 2 * size, jax.pure_callback(tell, jax.ShapeDtypeStruct((), jnp.int64), count + 1)

    first = jnp.sum(jnp.abs(jax.lax.stop_gradient(h))), jnp.int64(0)
    size, _ = jax.lax.while_loop(
        lambda state: (state[0] < 1e3) & (state[1] < MOST_TRIPS), trip, first
    )
    return jnp.full_like(h, size / 1e4)


def model_and_loss(does):
    def embed(outer, batch):
        h = jnp.tanh(batch["x"] @ outer["w_in"])
        return h + does("embed", h)

    def layer(params, h):
        h = h + jnp.tanh(h @ params["w"])
        return h + does("layer", h)

    def head(outer, h):
        return h @ outer["w_out"] + does("head", h)

    def loss(outputs, batch):
        return jnp.sum(outputs**2 + does("loss", outputs)), jnp.sum(batch["weight"])

    return jaxpar.LayeredModel(embed, layer, head), loss


def params_and_batch(num_layers, num_rows):
    rng = np.random.default_rng(0)
    outer = {"w_in": rng.normal(size=(WIDTH, WIDTH)), "w_out": rng.normal(size=(WIDTH, WIDTH))}
    params = {"outer": outer, "layers": {"w": rng.normal(size=(num_layers, WIDTH, WIDTH))}}
    return params, {"x": rng.normal(size=(num_rows, WIDTH)), "weight": rng.uniform(1, 2, num_rows)}


def on_one_device(model, loss, params, batch):
    """The loss, the gradients, and what the host sees of the microbatches one by one."""
    total = loss(model.apply(params, batch), batch)[1]
    part = jax.jit(
        jax.value_and_grad(lambda params, rows: loss(model.apply(params, rows), rows)[0] / total)
    )
    seen.clear()
    parts = [
        part(params, jax.tree.map(lambda a, at=at: a[at : at + ROWS], batch))
        for at in range(0, len(batch["x"]), ROWS)
    ]
    summed = jaxpar.fetch(jax.tree.map(lambda *numbers: sum(numbers), *parts))
    jax.effects_barrier()
    return summed, Counter(seen)


def check(model, loss, axes, num_layers, *, again=(), **settings):
    """Fails unless the numbers are those of one device, and the host sees the same; ``again``: what it sees once more in R."""
    mesh = jaxpar.make_mesh(**axes, devices=jax.devices()[: int(np.prod(list(axes.values())))])
    params, batch = params_and_batch(num_layers, axes.get("data", 1) * NUM_MICROBATCHES * ROWS)
    want, told = on_one_device(model, loss, params, batch)
    value_and_grad = jaxpar.value_and_grad(
        model, loss, mesh, num_microbatches=NUM_MICROBATCHES, **settings
    )
    seen.clear()
    assert_same(jaxpar.fetch(value_and_grad(params, jaxpar.shard_batch(batch, mesh))), want)
    jax.effects_barrier()
    twice = Counter({key: count for key, count in told.items() if key[:2] in again})
    assert seen == told + twice


RUNS = [
    ({"data": 2, "stage": 2}, 4, {"schedule": "1f1b"}),
    ({"stage": 3}, 5, {"schedule": "1f1b", "remat": True}),
    pytest.param({"stage": 2}, 4, {"schedule": "interleaved"}, marks=pytest.mark.slow),
    pytest.param({"stage": 8}, 9, {"schedule": "zb-h1"}, marks=pytest.mark.slow),
    pytest.param(
        {"data": 4, "stage": 2}, 5, {"schedule": "zb-v", "remat": True}, marks=pytest.mark.slow
    ),
    pytest.param(
        {"data": 2, "stage": 4}, 5, {"schedule": "gpipe", "zero": 3}, marks=pytest.mark.slow
    ),
    pytest.param(
        {"data": 2, "stage": 2},
        5,
        {"remat": jax.checkpoint_policies.dots_saveable},
        marks=pytest.mark.slow,
    ),
]


def again(settings):
    """R runs embedding and layers once more; only the host's part of a number is computed again, not what is only told."""
    kinds = [
        ("pure", "embed"),
        ("pure", "layer"),
        ("debug", "layer"),
        ("trip", "embed"),
        ("trip", "layer"),
    ]
    return kinds if settings.get("remat") is True else []


@pytest.mark.full
@pytest.mark.parametrize(("axes", "num_layers", "settings"), RUNS)
def test_the_host_is_called_for_values_of_microbatches_alone(x64, axes, num_layers, settings):
    check(
        *model_and_loss(calls),
        axes,
        num_layers,
        again=again(settings),
        mask_idle_ops=True,
        **settings,
    )


@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "num_layers", "settings"),
    [RUNS[1], pytest.param(*RUNS[0], marks=pytest.mark.slow), *RUNS[3:]],
)
def test_a_loop_that_ends_for_values_of_microbatches_ends(
    x64, monkeypatch, axes, num_layers, settings
):
    monkeypatch.setattr(
        control_flow, "HOST_CALLBACKS", ()
    )  # the loops are to be seen, not what notes their trips
    of_microbatch = lambda place, h: jaxpar.row_wise(lambda h: loops(place, h))(
        h
    )  # which is held against microbatches
    check(
        *model_and_loss(of_microbatch),
        axes,
        num_layers,
        again=again(settings),
        mask_idle_ops=True,
        **settings,
    )


# --- backward passes --------------------------------------------------------------------------------------------------


def telling(kind, place):
    """The identity, whose cotangent is told to the host, and with "pure" comes from there."""
    identity = jax.custom_vjp(lambda h: h)

    def backward(_, ct):
        if kind == "pure":
            return (
                jax.pure_callback(note(kind, place), jax.ShapeDtypeStruct(ct.shape, ct.dtype), ct),
            )
        jax.debug.callback(note(kind, place), ct)
        return (ct,)

    identity.defvjp(lambda h: (h, None), backward)
    return identity


def telling_backward(kinds):
    """A model whose backward passes tell the host: of x and of the params, of which one layer's alone is told by W."""

    def tell(place, h):
        for kind in kinds:
            h = telling(kind, place)(h)
        return h

    embed = lambda outer, batch: tell("embed", jnp.tanh(batch["x"] @ tell("w_in", outer["w_in"])))
    layer = lambda params, h: h + tell("layer", jnp.tanh(h @ tell("w", params["w"])))
    head = lambda outer, h: tell("head", h) @ outer["w_out"]
    return jaxpar.LayeredModel(embed, layer, head), lambda o, b: (
        jnp.sum(tell("loss", o) ** 2),
        jnp.sum(b["weight"]),
    )


@pytest.mark.few(2)
@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "num_layers", "settings"),
    [
        ({"data": 2, "stage": 2}, 4, {"mask_idle_ops": True, "zero": 1}),
        ({"stage": 3}, 5, {"mask_idle_ops": True, "schedule": "zb-h1", "remat": True}),
        ({"stage": 2}, 2, {}),
        ({"data": 2}, 2, {}),
        ({"stage": 2}, 2, {"executor": "mpmd"}),
        pytest.param(
            {"data": 4, "stage": 2},
            5,
            {"mask_idle_ops": True, "schedule": "zb-v"},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_what_a_backward_pass_tells_the_host_is_told_once(x64, axes, num_layers, settings):
    check(*telling_backward(["debug", "pure"]), axes, num_layers, **settings)


def test_a_backward_pass_that_calls_the_host_beside_a_tensor_axis_is_refused():
    model, loss = telling_backward(["pure"])
    mesh = jaxpar.make_mesh(stage=2, tensor=2, devices=jax.devices()[:4])
    params, batch = params_and_batch(2, 4)
    with pytest.raises(
        ValueError, match=r"no mesh axis is automatic.*got jax.pure_callback and tensor=2"
    ):
        jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2)(params, batch)


# --- what must be skipped ---------------------------------------------------------------------------------------------


NUMBER = jax.ShapeDtypeStruct((), jnp.float32)


@jax.jit
def printing(x):
    jax.debug.print("{}", x)
    return x


def counted(x):
    return jax.lax.while_loop(lambda s: s[0] < 5, lambda s: (s[0] + 1, 2 * s[1]), (0, x))[1]


def cond(branch):
    return lambda x: jax.lax.cond(x > 0, branch, lambda x: x, x)


@pytest.mark.parametrize(
    ("function", "wanted"),
    [
        (jnp.sin, True),
        (counted, True),
        (lambda x: jax.lax.fori_loop(0, 5, lambda _, x: 2 * x, x), True),
        (lambda x: jax.lax.scan(lambda x, _: (2 * x, None), x, length=5)[0], True),
        (cond(jnp.sin), True),
        (lambda x: jax.random.normal(jax.random.key(0)) * x, True),
        (lambda x: jax.lax.while_loop(lambda x: x < 5, lambda x: 2 * x, x), False),
        (lambda x: jax.lax.fori_loop(0, x.astype(int), lambda _, x: 2 * x, x), False),
        (lambda x: jax.random.poisson(jax.random.key(0), x), False),
        (cond(lambda x: jax.lax.while_loop(lambda x: x < 5, lambda x: 2 * x, x)), False),
        (lambda x: jax.pure_callback(np.sin, NUMBER, x), False),
        (jax.jit(lambda x: jax.experimental.io_callback(np.sin, NUMBER, x)), False),
        (cond(lambda x: (jax.debug.print("{}", x), x)[1]), False),
        (lambda x: jax.lax.scan(lambda x, _: (printing(x), None), x, length=5)[0], False),
    ],
)
def test_operations_that_an_idle_stage_must_skip_are_found(function, wanted):
    assert is_maskable(jax.make_jaxpr(function)(jnp.float32(1)).eqns) is wanted


def test_a_collective_names_an_axis_and_has_no_effect():
    mesh = jax.make_mesh(
        (2,), ("rows",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:2]
    )
    spec = jax.sharding.PartitionSpec("rows")
    over_rows = jax.shard_map(
        lambda x: jax.lax.psum(x, "rows"), mesh=mesh, in_specs=spec, out_specs=spec, check_vma=False
    )
    assert is_maskable(jax.make_jaxpr(over_rows)(jnp.ones(2)).eqns)


@pytest.mark.parametrize(
    ("more", "step", "wanted"),
    [
        (lambda n, x: n < 5, lambda n: n + 1, True),
        (lambda n, x: n <= 5, lambda n: n + 2, True),
        (lambda n, x: n > -5, lambda n: n - 1, True),
        (lambda n, x: n > -5, lambda n: n + 1, False),
        (lambda n, x: n < 5, lambda n: n - 1, False),
        (lambda n, x: n < 5, lambda n: n * 2, False),
        (lambda n, x: n != 5, lambda n: n + 1, False),
        (lambda n, x: x < 5, lambda n: n + 1, False),
        (lambda n, x: (n < 5) & (x < 5), lambda n: n + 1, False),
    ],
)
def test_a_loop_that_counts_between_written_numbers_is_known_to_end(more, step, wanted):
    loop = lambda x: jax.lax.while_loop(
        lambda s: more(*s), lambda s: (step(s[0]), 2 * s[1]), (0, x)
    )
    (equation,) = [e for e in jax.make_jaxpr(loop)(1.0).eqns if e.primitive.name == "while"]
    assert _compat.has_known_trips(equation) is wanted


@pytest.mark.full
def test_a_model_that_has_nothing_to_skip_has_no_conditionals():
    params, batch = (
        tiny_gpt.make_params(num_layers=4, dtype=np.float32),
        tiny_gpt.make_batch(dtype=np.float32),
    )
    mesh = jaxpar.make_mesh(stage=4, devices=jax.devices()[:4])
    value_and_grad = jaxpar.value_and_grad(
        tiny_gpt.MODEL, tiny_gpt.loss, mesh, num_microbatches=4, mask_idle_ops=True
    )
    operations = {
        each.primitive.name
        for each in _compat.equations(jax.make_jaxpr(value_and_grad)(params, batch))
    }
    assert "dot_general" in operations
    assert operations.isdisjoint({"cond", "while"})


def test_a_program_knows_what_it_skips():
    schedule = make_schedule("1f1b", 4, 12, form="fused")
    masked, skipping = (
        spmd_program(schedule, masks=True, skips=skips) for skips in ((), ("B", "F", "head"))
    )
    assert [each.ops for each in masked.segments] == [each.ops for each in skipping.segments]
    of_one_stage = make_schedule("1f1b", 1, 3, form="merged")
    reduces, skips_b = (
        spmd_program(of_one_stage, masks=True, overlaps=True, skips=skips) for skips in ((), "B")
    )
    assert reduces.reduces
    assert (reduces.segments[-1].ops, len(reduces.segments[-1].ticks)) == (("B",), 1)
    assert not skips_b.reduces
    shares = lambda program: {
        name: share[1] for name, share in program.branch_shares().items() if "send" not in name
    }
    of = lambda program, name: [
        share for pattern, share in shares(program).items() if pattern.startswith(f"/{name}/")
    ]
    assert of(masked, "F") == of(masked, "B") == []
    ticks = sum(len(each.ticks) for each in skipping.segments if "F" in each.ops)
    assert of(skipping, "F") == of(skipping, "B") == [Fraction(12, ticks)]
    assert of(skipping, "[FRB]") == [1, 1, 1], (
        "embedding, head and the embedding's backward pass, inside the skipped op"
    )
    assert of(spmd_program(schedule, masks=True, skips=("head",)), "head") == [1], (
        "but in the ticks before the first head"
    )
    # A stage that masks idle ops reaches the branch of its head in all ticks but those before the first head.
    chunks = spmd_program(
        make_schedule("interleaved", 2, 4, num_chunks=4, form="merged"), masks=True
    )
    reached = sum(len(each.ticks) for each in chunks.segments if "F" in each.ops and each.has_head)
    assert (of(chunks, "head"), reached) == ([Fraction(4, 10)], 10)
    assert of(chunks, "embed_back") == [Fraction(4, 17)]


def test_only_what_must_be_skipped_is(x64, monkeypatch):
    """The head has a callback; no layer op is skipped for that, and the layers of idle stages run."""
    built = []
    monkeypatch.setattr(
        sys.modules["jaxpar.step.run"],
        "build_stage",
        lambda *args, **given: built.append(build_stage(*args, **given)) or built[-1],
    )
    model, loss = model_and_loss(lambda place, h: calls(place, h) if place == "head" else 0 * h)
    mesh = jaxpar.make_mesh(stage=2, devices=jax.devices()[:2])
    params, batch = params_and_batch(2, 8)
    jax.eval_shape(
        jaxpar.value_and_grad(model, loss, mesh, num_microbatches=4, mask_idle_ops=True),
        params,
        batch,
    )
    assert {each.program.skips for each in built} == {frozenset({"head"})}
