"""The JAX API that jaxpar/_compat/ holds: each test names what broke when JAX moves."""

import re
from contextlib import contextmanager, nullcontext
from pathlib import Path
from types import SimpleNamespace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar import _compat
from tests.support import tiny
from tests.support.oracle import assert_same

ROOT = Path(__file__).parents[1]
MODULES = sorted((ROOT / "jaxpar").rglob("*.py"))
PRIVATE = re.compile(r"\bjax\._src\b|(?:from|import) jax\.(?:core|extend|interpreters|_)")


def equation(function, *args, name):
    """The first equation of a primitive in a traced function."""
    found = [
        e for e in _compat.equations(jax.make_jaxpr(function)(*args)) if e.primitive.name == name
    ]
    assert found, f"JAX has no primitive {name!r} here: {jax.make_jaxpr(function)(*args)}"
    return found[0]


def names(function, *args):
    return [e.primitive.name for e in _compat.equations(jax.make_jaxpr(function)(*args))]


def test_private_api_is_used_in_one_package_only():
    found = {path.relative_to(ROOT): PRIVATE.findall(path.read_text()) for path in MODULES}
    users = {path for path, uses in found.items() if uses}
    outside = {path.as_posix() for path in users if path.parent != Path("jaxpar/_compat")}
    assert users, "the package uses it"
    assert not outside, f"give each a name in jaxpar/_compat: {outside}"


def test_the_check_for_private_api_finds_it():
    assert PRIVATE.search("from jax._src import core")
    assert PRIVATE.search("from jax.extend.core import Jaxpr")
    assert not PRIVATE.search("from jax.sharding import Mesh")


def test_a_traced_value_is_a_tracer():
    seen = []
    jax.jit(lambda x: seen.append(x) or x)(1.0)
    assert isinstance(seen[0], _compat.Tracer)


def test_the_state_of_a_run_has_a_client_an_id_and_a_count():
    state = _compat.coordination()
    assert state.client is None, "one process"
    assert (state.process_id, state.num_processes or 1) == (0, 1)


def test_jaxprs_open_and_closed_are_known_and_opened():
    closed = jax.make_jaxpr(jnp.sin)(1.0)
    assert _compat.is_jaxpr(closed)
    assert _compat.is_jaxpr(_compat.opened(closed))
    assert not _compat.is_jaxpr(jnp.sin)
    assert len(_compat.opened(closed).eqns) == 1


@pytest.mark.parametrize(
    ("wrapped", "inner"),
    [
        (jax.jit(jnp.sin), "sin"),
        (jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))), "cos"),
        (lambda x: jax.lax.cond(x > 0, jnp.sin, jnp.cos, x), "sin"),
        (lambda x: jax.lax.scan(lambda c, _: (jnp.sin(c), None), x, None, length=3)[0], "sin"),
        (lambda x: jax.lax.while_loop(lambda c: c > 0, jnp.sin, x), "sin"),
    ],
    ids=["jit", "checkpoint", "cond", "scan", "while"],
)
def test_equations_inside_others_are_found(wrapped, inner):
    assert inner in names(wrapped, 1.0)


def test_calls_are_inlined_unless_they_set_shardings():
    call = lambda function: [_compat.called(e) for e in jax.make_jaxpr(function)(1.0).eqns]
    assert len(_compat.opened(call(jax.jit(jnp.sin))[0]).eqns) == 1, "jit"
    assert len(_compat.opened(call(jax.checkpoint(jnp.sin))[0]).eqns) == 1, "checkpoint"
    for name in ("closed_call", "eval_jaxpr"):  # before JAX 0.11 and since
        of_jax = SimpleNamespace(
            primitive=SimpleNamespace(name=name),
            params={"call_jaxpr": jax.make_jaxpr(jnp.sin)(1.0)},
        )
        assert len(_compat.opened(_compat.called(of_jax)).eqns) == 1, name
    here = jax.sharding.SingleDeviceSharding(jax.devices()[0])
    assert call(jax.jit(jnp.sin, out_shardings=here)) == [None]
    assert call(jnp.sin) == [None]


def test_a_checkpoint_is_known_as_such():
    (outer,) = jax.make_jaxpr(jax.checkpoint(jnp.sin))(1.0).eqns
    assert _compat.is_remat(outer)
    assert not _compat.is_remat(equation(jnp.sin, 1.0, name="sin"))


@contextmanager
def remat3():
    """Another kind of checkpoint, of JAX 0.12: a primitive inside another one's parameters."""
    jax.config.update("jax_remat3", True)
    yield
    jax.config.update("jax_remat3", False)


CHECKPOINTS = [nullcontext, *([remat3] if hasattr(jax.config, "jax_remat3") else [])]


@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_a_checkpoint_of_each_kind_is_one_equation_that_holds_a_jaxpr(kind):
    with kind():
        closed = jax.make_jaxpr(jax.checkpoint(lambda x: jnp.sin(jnp.cos(x))))(jnp.float32(0.3))
        (outer,) = closed.eqns
        assert _compat.is_remat(outer)
        assert [each.primitive.name for each in _compat.called(outer).eqns] == ["cos", "sin"]
        assert [each.primitive.name for each in _compat.equations(closed)][1:] == ["cos", "sin"]
        only_first = lambda equations, outputs: [
            each.replace(outvars=outputs) for each in equations[:1]
        ]
        shorter = _compat.rewrite(
            closed, lambda e, outputs: e if e[0] is outer else only_first(e, outputs)
        )
    assert [each.primitive.name for each in _compat.equations(shorter)][1:] == ["cos"]


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize("kind", CHECKPOINTS)
def test_layers_of_each_kind_of_checkpoint_have_the_gradients_of_one_device(x64, kind):
    params, batch = tiny.draw_params(4, 0, np.float64), tiny.make_batch()
    mesh = jaxpar.make_mesh(stage=2)
    how = {"schedule": "zb-h1", "num_microbatches": 4, "remat": True}
    with kind():
        run = jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, **how)
        got = jax.jit(run)(params, jaxpar.shard_batch(batch, mesh))
    assert_same(got, tiny.reference(params, batch))


def test_an_operation_that_runs_eagerly_is_compiled_once_for_each_of_its_parameters():
    traced = []

    def add(x, *, number):
        traced.append(number)
        return x + number

    operation = _compat.operation("add_number", add, lambda x, **_: x)
    assert [float(operation.bind(jnp.float32(1), number=number)) for number in (1, 2, 1, 2)] == [
        2,
        3,
        2,
        3,
    ]
    assert traced == [1, 2]


def test_references_are_seen_by_their_effects():
    def with_ref(x):
        ref = jax.new_ref(x)
        ref[...] = ref[...] * 2
        return ref[...]

    assert any(map(_compat.has_reference_effects, _compat.equations(jax.make_jaxpr(with_ref)(1.0))))
    assert not any(
        map(_compat.has_reference_effects, _compat.equations(jax.make_jaxpr(jnp.sin)(1.0)))
    )


def test_an_equation_is_bound_to_other_inputs_under_the_mesh_that_is_set():
    matmul = equation(jnp.matmul, jnp.ones((2, 3)), jnp.ones((3, 4)), name="dot_general")
    (made,) = _compat.bind(matmul, [jnp.full((2, 3), 2.0), jnp.ones((3, 4))])
    np.testing.assert_array_equal(made, np.full((2, 4), 6.0))


@pytest.mark.usefixtures("source_lines")
def test_a_profile_names_the_line_of_the_user():
    traced = equation(lambda x: jnp.sin(x), 1.0, name="sin")
    again = jax.make_jaxpr(lambda x: _compat.bind(traced, [x])[0])(1.0)
    line = lambda e: jax.jit(lambda x: _compat.bind(e, [x])[0]).lower(1.0).as_text(debug_info=True)
    assert "test_compat.py" in line(again.eqns[0])


def test_literals_have_values_of_their_dtype():
    product = equation(lambda x: x * 2, np.float32(1), name="mul")
    (literal,) = [atom for atom in product.invars if isinstance(atom, _compat.Literal)]
    value = _compat.literal_value(literal)
    assert (value, value.dtype) == (2, np.float32)


def test_an_array_tells_whether_it_is_computed():
    array = jnp.ones(3) * 2
    assert hasattr(array, "is_ready"), "JAX has renamed it: the log would take all steps for ended"
    assert _compat.is_computed(array.block_until_ready())
    assert _compat.is_computed(1.0)
    assert not _compat.is_computed(SimpleNamespace(is_ready=lambda: False))


def test_dims_are_kept_in_order_in_memory():
    x = np.arange(6.0, dtype=np.float32).reshape(2, 3)
    lowered = jax.jit(lambda x: _compat.row_major(x.T) * 2).lower(x)
    assert "LayoutConstraint" in lowered.as_text()
    np.testing.assert_array_equal(lowered.compile()(x), x.T * 2)


def test_values_that_a_policy_offloads_are_known_by_their_memory():
    offload = jax.checkpoint_policies.offload_dot_with_no_batch_dims("device", "pinned_host")
    function = jax.checkpoint(lambda x: jnp.tanh(x @ x), policy=offload)
    traced = jax.make_jaxpr(lambda x: jax.vjp(function, x)[1](x))(jnp.ones((3, 3)))
    places = [_compat.is_on_host(v.aval) for eqn in traced.eqns for v in eqn.outvars]
    assert places.count(True) == 1


def test_an_empty_array_is_written_on_devices_other_than_cpus_only():
    traced = jax.jit(lambda: _compat.empty((1 << 20,), np.float32, 0)).trace()
    lowered = {
        platform: traced.lower(lowering_platforms=(platform,)).as_text()
        for platform in ("cpu", "cuda")
    }
    assert "dce_sink" in lowered["cpu"], "JAX has no custom call that does nothing"
    assert "broadcast" not in lowered["cpu"]
    assert "broadcast" in lowered["cuda"]
    assert "dce_sink" not in lowered["cuda"]
    assert jax.jit(lambda: _compat.empty((1 << 20,), np.float32, 0).at[7].set(3)[7])() == 3, (
        "XLA:CPU does not know it"
    )


@pytest.mark.parametrize("mask", [pytest.param("CAUSAL", marks=pytest.mark.full), "PADDING"])
@pytest.mark.parametrize(
    "has_bias", [False, pytest.param(True, marks=pytest.mark.full)], ids=["plain", "bias"]
)
def test_cudnns_attention_gives_and_takes_the_logarithm_of_the_sum_of_exponentials(mask, has_bias):
    q, k, bias = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16)
        for shape in ((2, 128, 4, 64), (2, 128, 2, 64), (2, 1, 128, 128))
    )
    lse, number = (
        jax.ShapeDtypeStruct((2, 4, 128), jnp.float32),
        jax.ShapeDtypeStruct((2,), jnp.int32),
    )
    others = None if mask == "CAUSAL" else (number, number), bias if has_bias else None
    forward = lambda *arrays: _compat.cudnn_attention(*arrays[:-2], 0.5, *arrays[-2:])
    backward = lambda *arrays: _compat.cudnn_attention_gradients(*arrays[:-2], 0.5, *arrays[-2:])
    like = lambda made: [(each.shape, each.dtype) for each in made]
    assert like(jax.eval_shape(forward, q, k, k, *others)) == like([q, lse]), "output and lse"
    assert like(jax.eval_shape(backward, q, k, k, q, lse, q, *others)) == like([q, k, k]), (
        "gradients of q, k and v"
    )

    def kernel(function, *arrays):
        text = jax.jit(function).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
        (line,) = (line for line in text.splitlines() if "custom_call @" in line)
        found = re.search(r"mask_type\\22: \\22(\w+)\\22", line)[1]
        return (
            re.search(r"@([\w$]+)\(", line)[1],
            found,
            re.findall(r"tensor<([\dx]*)x\w+>", line.rpartition(" : ")[2]),
        )

    name = "__cudnn$fmhaScaleBiasSoftmax" if has_bias else "__cudnn$fmhaSoftmax"
    lengths, added = [] if mask == "CAUSAL" else ["2", "2"], ["2x1x128x128"] if has_bias else []
    of_q, of_k, of_out, of_lse = "2x128x4x64", "2x128x2x64", "2x4x128x64", "2x4x128"
    operands, results = [of_q, of_k, of_k, *added, *lengths], [of_out, of_lse, "0"]
    assert kernel(forward, q, k, k, *others) == (name, mask, [*operands, *results])
    operands = [of_q, of_k, of_k, of_lse, of_q, *added, of_q, *lengths]
    results = [of_out, "2x2x128x64", "2x2x128x64", "0"]
    assert kernel(backward, q, k, k, q, lse, q, *others) == (
        f"{name}Backward",
        mask,
        [*operands, *results],
    )


def test_a_primitive_of_ones_own_is_traced_by_its_shapes():
    halve = _compat.Primitive("halve_for_a_test")
    halve.def_abstract_eval(lambda x: x.update(shape=(x.shape[0] // 2,)))
    assert jax.eval_shape(halve.bind, jax.ShapeDtypeStruct((6,), np.float32)).shape == (3,)


def test_equations_are_rewritten_in_loops_and_calls_too():
    def sines_to_cosines(equations, outputs):
        cosine = equation(jnp.cos, np.float32(1), name="cos")
        return [
            cosine.replace(invars=e.invars, outvars=e.outvars) if e.primitive.name == "sin" else e
            for e in equations
        ]

    def function(x):
        return jax.lax.fori_loop(0, 2, lambda _, c: jax.jit(jnp.sin)(c), jnp.sin(x))

    x = jnp.float32(0.3)
    got = _compat.rewritten(function, sines_to_cosines, x)
    assert got == pytest.approx(float(jnp.cos(jnp.cos(jnp.cos(x)))), abs=1e-6)


def test_a_function_is_given_the_tracers_that_it_closes_over():
    def outer(scale):
        converted, tracers = _compat.closure_converted(
            lambda x: x * scale + np.float32(1), jnp.float32(2)
        )
        assert len(tracers) == 1
        return converted([scale * 10], jnp.float32(2))

    assert jax.jit(outer)(jnp.float32(3)) == 61


def test_outputs_that_are_inputs_are_found_through_calls_branches_and_choices():
    def through(a, b, c):
        taken = jax.lax.cond(c > 0, lambda a, b: (a, b + 1), lambda a, b: (a, b - 1), a, b)
        chosen = jax.jit(lambda a, b: jnp.where(b > 0, a, a))(a, b)
        return *taken, chosen, jnp.where(c > 0, a, b), a + 0, c, 1.0

    assert _compat.forwarded(jax.make_jaxpr(through)(1.0, 2.0, 3.0)) == [
        0,
        None,
        0,
        None,
        None,
        2,
        None,
    ]


def test_numbers_in_equations_are_read():
    assert 8.0 in map(
        float, _compat.literals(jax.make_jaxpr(lambda x: jnp.sum(x) / 8)(jnp.ones(8)))
    )
    assert _compat.literals(jax.make_jaxpr(jnp.sin)(1.0)) == []


def test_inputs_and_carries_of_a_scan_are_counted():
    def loop(carry, factor, xs):
        return jax.lax.scan(lambda c, x: ((c[0] * factor + x, -c[1]), c[0]), carry, xs)

    (scan,) = jax.make_jaxpr(loop)((1.0, 2.0), 3.0, jnp.ones(4)).eqns
    assert _compat.scan_counts(scan) == (1, 2)


@pytest.mark.parametrize(
    "wrap",
    [jax.jit, jax.checkpoint, jax.custom_jvp, jax.custom_vjp],
    ids=lambda wrap: wrap.__name__,
)
def test_calls_are_read_with_derivatives_of_their_own_too(wrap):
    function = wrap(lambda x: jnp.sin(x))
    if hasattr(function, "defjvps"):
        function.defjvps(lambda tangent, out, x: tangent)
    elif hasattr(function, "defvjp"):
        function.defvjp(lambda x: (x, None), lambda _, g: (g,))
    (call,) = jax.make_jaxpr(function)(1.0).eqns
    assert [equation.primitive.name for equation in _compat.equations(_compat.inlined(call))] == [
        "sin"
    ]
    (sin,) = jax.make_jaxpr(jnp.sin)(1.0).eqns
    assert _compat.inlined(sin) is None


@pytest.mark.parametrize("impl", ["threefry2x32", "rbg"])
def test_the_shapes_of_random_numbers_are_found_inside_calls(impl):
    draw = lambda key: jax.lax.map(
        lambda key: jax.random.normal(key, (3,)), jax.random.split(key, 2)
    )
    assert _compat.drawn_shapes(jax.make_jaxpr(draw)(jax.random.key(0, impl=impl))) == [(3,)]


def test_a_copy_of_a_compiled_function_runs_and_tells_its_cost_as_it_does():
    compiled = jax.jit(lambda x: x + 1).lower(1.0).compile()
    copy = _compat.CompiledCopy(compiled)
    assert copy(1.0) == 2
    assert copy.as_text() == compiled.as_text()
    assert copy.input_shardings == compiled.input_shardings


def test_what_crashes_in_this_version_is_refused():
    assert (jax.__version_info__ >= (0, 11)) == _compat.EMPTY_ARRAYS_CRASH


def test_a_function_that_sends_over_axes_is_traced_by_their_sizes():
    with _compat.axes_named({"context": 4}):
        traced = jax.make_jaxpr(lambda x: jax.lax.all_gather(x, "context", tiled=True))(jnp.ones(2))
    assert [each.aval.shape for each in traced.jaxpr.outvars] == [(8,)]


def test_no_trace_is_cached_for_another_value_of_a_setting():
    times = _compat.trace_context(default_value=1)
    scaled = jax.jit(lambda x: x * times.value)
    assert scaled(2.0) == 2
    with times(3):
        assert scaled(2.0) == 6
    assert scaled(2.0) == 2
