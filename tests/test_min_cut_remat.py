"""A step keeps of each layer what a minimum cut says and no more, on every mesh; what layers print is printed once."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.backward.remat import min_cut_remat
from tests.support import tiny, tiny_gpt
from tests.support.oracle import assert_same


def compiled_temp_bytes(function, *args):
    return jax.jit(function).lower(*args).compile().memory_analysis().temp_size_in_bytes


@pytest.mark.full
def test_one_device_keeps_much_less_than_jax_does():
    made = tiny_gpt.make_params(num_layers=6, embed=64, mlp=256, positions=64, dtype=np.float32)
    params = jax.tree.map(jnp.asarray, made)
    batch = tiny_gpt.make_batch(num_rows=8, num_positions=64, dtype=np.float32)
    mesh = jaxpar.make_mesh(devices=jax.devices()[:1])

    def mean(params, batch):
        total, weight = tiny_gpt.loss(tiny_gpt.MODEL.apply(params, batch), batch)
        return total / weight

    ours = compiled_temp_bytes(
        jaxpar.value_and_grad(tiny_gpt.MODEL, tiny_gpt.loss, mesh), params, batch
    )
    plain = compiled_temp_bytes(jax.value_and_grad(mean), params, batch)
    assert ours < 0.6 * plain, f"{ours} bytes, {plain} by jax.value_and_grad"


def test_params_are_not_kept_once_more():
    """Stacked params go through the scan over layers as they are: what is kept grows with rows, not with their size."""
    wide = {"w": jnp.zeros((16, 256, 256))}

    def loss(params, x):
        layer = min_cut_remat(lambda p, x: jnp.tanh(x @ p["w"]))
        return jax.lax.scan(lambda x, p: (layer(p, x), None), x, params)[0].sum()

    params_bytes = wide["w"].nbytes
    assert compiled_temp_bytes(jax.grad(loss), wide, jnp.zeros((2, 256))) < 0.2 * params_bytes


@pytest.mark.parametrize(
    ("axes", "settings"),
    [
        ({}, {}),
        pytest.param({"data": 2}, {"overlap_grad_reduce": True}, marks=pytest.mark.full),
        pytest.param({"stage": 2}, {}, marks=pytest.mark.full),
        pytest.param({"stage": 2}, {"schedule": "zb-h1"}, marks=pytest.mark.full),
        pytest.param({"stage": 2}, {"executor": "mpmd"}, marks=pytest.mark.full),
        pytest.param({"stage": 2}, {"remat": True}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_what_a_layer_prints_is_printed_once_a_layer_and_microbatch(capfd, axes, settings):
    mesh = jaxpar.make_mesh(**axes, devices=jax.devices()[: max([1, *axes.values()])])

    def layer(params, x):
        jax.debug.print("seen {}", x.sum())
        return jnp.tanh(x @ params["w"])

    model = jaxpar.LayeredModel(
        lambda outer, batch: batch["x"], layer, lambda outer, x: x * outer["scale"][None]
    )
    loss = lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["y"])
    rng = np.random.default_rng(0)
    params = {"outer": {"scale": rng.normal(size=3)}, "layers": {"w": rng.normal(size=(4, 3, 3))}}
    x = rng.normal(size=(8, 3)).astype(np.float32)
    params = jax.tree.map(lambda a: jnp.asarray(a, jnp.float32), params)

    run = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2, **settings)
    jax.block_until_ready(run(params, jaxpar.shard_batch({"x": x, "y": x}, mesh)))
    jax.effects_barrier()
    replicas = axes.get("data", 1)
    again = (
        2 if settings.get("remat") else 1
    )  # jax.checkpoint prints again too, where it computes again
    assert capfd.readouterr().out.count("seen") == 4 * 2 * replicas * again


@pytest.mark.parametrize(
    "axes",
    [
        pytest.param({}, marks=pytest.mark.full),
        {"data": 2},
        pytest.param({"stage": 2}, marks=pytest.mark.full),
    ],
    ids=str,
)
def test_a_model_made_inside_jit_may_close_over_what_is_traced_there(axes):
    mesh = jaxpar.make_mesh(**axes, devices=jax.devices()[: max([1, *axes.values()])])
    rng = np.random.default_rng(0)
    layers = {"w": jnp.asarray(rng.normal(size=(2, 3, 3)), jnp.float32)}
    x = rng.normal(size=(4, 3)).astype(np.float32)
    loss = lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["x"])

    def model(scale):
        layer = lambda p, h: jnp.where(scale.astype(int) > 0, 2.0, jnp.tanh(scale * (h @ p["w"])))
        return jaxpar.LayeredModel(lambda outer, batch: batch["x"], layer, lambda outer, h: h)

    @jax.jit
    def ours(scale, layers, batch):
        run = jaxpar.value_and_grad(model(scale), loss, mesh, num_microbatches=2)
        return run({"outer": {}, "layers": layers}, batch)

    def plain(scale, layers):
        total, weight = loss(
            model(scale).apply({"outer": {}, "layers": layers}, {"x": x}), {"x": x}
        )
        return total / weight

    scale = jnp.float32(0.7)
    value, grads = ours(scale, layers, jaxpar.shard_batch({"x": x}, mesh))
    want, want_grads = jax.value_and_grad(plain, argnums=1)(scale, layers)
    assert_same((value, grads["layers"]), (want, want_grads), within=1e-5)
    if not axes:  # and of what it closes over there is a derivative
        got = jax.grad(lambda scale: ours(scale, layers, {"x": x})[0])(scale)
        assert_same(got, jax.grad(plain)(scale, layers), within=1e-4)


def convolutions(params, image, scale):
    kernel = lambda x, name: jax.lax.conv_general_dilated(x, params[name], (1, 1), "SAME")
    return jax.nn.gelu(kernel(jnp.tanh(kernel(image, "first")) * scale, "second")).sum(axis=(2, 3))


def over_time(params, rows, start):
    return jax.lax.scan(
        lambda h, x: (jnp.tanh(h @ params["first"] + x @ params["second"]),) * 2, start, rows
    )[1]


def with_noise(params, x, key, rows):
    kept = jax.random.bernoulli(key, 0.5, x.shape)
    return {
        "y": jnp.where(kept, jnp.sin(x @ params["first"]), 0) @ params["second"],
        "rows": rows + 1,
    }


@pytest.mark.parametrize(
    ("function", "shape", "inputs"),
    [
        pytest.param(
            convolutions,
            (3, 3, 3, 3),
            lambda rng: (rng.normal(size=(2, 3, 5, 5)), rng.normal(size=())),
            marks=pytest.mark.full,
        ),
        (over_time, (4, 4), lambda rng: (rng.normal(size=(6, 2, 4)), rng.normal(size=(2, 4)))),
        pytest.param(
            with_noise,
            (4, 4),
            lambda rng: (rng.normal(size=(3, 4)), jax.random.key(1), np.arange(3)),
            marks=pytest.mark.full,
        ),
    ],
)
def test_any_function_of_params_and_inputs_keeps_its_results_and_gradients(
    x64, function, shape, inputs
):
    seed = tiny.fresh_seed()
    print(f"seed {seed}")  # shown where the test fails
    rng = np.random.default_rng(seed)
    params, inputs = {name: rng.normal(size=shape) for name in ("first", "second")}, inputs(rng)
    floats = [
        i
        for i, value in enumerate(inputs)
        if getattr(value, "dtype", np.dtype(float)) == np.float64
    ]

    def loss(function):
        def of_floats(params, given):
            filled = [
                given[floats.index(i)] if i in floats else value for i, value in enumerate(inputs)
            ]
            leaves = jax.tree.leaves(function(params, *filled))
            return sum(jnp.sum(jnp.sin(leaf)) for leaf in leaves)

        return jax.jit(jax.value_and_grad(of_floats, argnums=(0, 1)))

    given = [inputs[i] for i in floats]
    got, want = loss(jaxpar.min_cut_remat(function))(params, given), loss(function)(params, given)
    assert_same(jaxpar.fetch(got), jaxpar.fetch(want))
    assert_same(jaxpar.min_cut_remat(function)(params, *inputs), function(params, *inputs))
