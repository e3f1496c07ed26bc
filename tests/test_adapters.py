"""Modules of other libraries, and a model of one's own, train on data=2, tensor=2 with the numbers of one device."""

import subprocess
import sys

import equinox as eqx
import haiku as hk
import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from flax import linen, nnx

import jaxpar
from jaxpar import adapters
from tests.support import tiny
from tests.support.oracle import assert_same, assert_same_bits
from tests.support.waiting import WAIT_SECONDS

FEATURES, HIDDEN, OUT = 3, 8, 2
COLUMN, ROW, WHOLE = jaxpar.column_parallel(), jaxpar.row_parallel(), jaxpar.replicated()
COLUMN_BIAS = jaxpar.column_parallel(ndim=1)


def dtype():
    return jnp.float64 if jax.config.jax_enable_x64 else jnp.float32


class LinenMLP(linen.Module):
    @linen.compact
    def __call__(self, x):
        hidden = linen.relu(linen.Dense(HIDDEN, name="up", param_dtype=dtype())(x))
        return linen.Dense(OUT, name="down", param_dtype=dtype())(hidden)


class NNXMLP(nnx.Module):
    def __init__(self, rngs):
        self.up = nnx.Linear(FEATURES, HIDDEN, param_dtype=dtype(), rngs=rngs)
        self.down = nnx.Linear(HIDDEN, OUT, param_dtype=dtype(), rngs=rngs)

    def __call__(self, x):
        return self.down(nnx.relu(self.up(x)))


class EquinoxMLP(eqx.Module):
    up: eqx.nn.Linear
    down: eqx.nn.Linear

    def __init__(self, key):
        up, down = jax.random.split(key)
        self.up = eqx.nn.Linear(FEATURES, HIDDEN, dtype=dtype(), key=up)
        self.down = eqx.nn.Linear(HIDDEN, OUT, dtype=dtype(), key=down)

    def __call__(self, x):
        return self.down(jax.nn.relu(self.up(x)))


def haiku_mlp(x):
    return hk.Linear(OUT, name="down")(jax.nn.relu(hk.Linear(HIDDEN, name="up")(x)))


def own_init(key):
    up, down = jax.random.split(key)
    return {
        "up": {
            "w": jax.random.normal(up, (FEATURES, HIDDEN), dtype()),
            "b": jnp.zeros(HIDDEN, dtype()),
        },
        "down": {
            "w": jax.random.normal(down, (HIDDEN, OUT), dtype()),
            "b": jnp.zeros(OUT, dtype()),
        },
    }


def own_apply(params, x):
    hidden = jax.nn.relu(x @ params["up"]["w"] + params["up"]["b"][None])
    return hidden @ params["down"]["w"] + params["down"]["b"][None]


def example():
    return jax.ShapeDtypeStruct((1, FEATURES), dtype())


def vmapped(module, inputs):
    return jax.vmap(module)(inputs)


def rules(weight, bias, column=COLUMN, row=ROW):
    return {
        f"up/{weight}": column,
        f"up/{bias}": COLUMN_BIAS,
        f"down/{weight}": row,
        f"down/{bias}": WHOLE,
    }


MODELS = {
    "linen": (lambda: adapters.from_linen(LinenMLP(), example()), rules("kernel", "bias")),
    "nnx": (lambda: adapters.from_nnx(NNXMLP), rules("kernel", "bias")),
    "equinox": (
        lambda: adapters.from_equinox(EquinoxMLP, call=vmapped),
        rules("weight", "bias", ROW, COLUMN),
    ),
    "haiku": (lambda: adapters.from_haiku(haiku_mlp, example()), rules("w", "b")),
    "own": (lambda: (own_init, own_apply), rules("w", "b")),
}
each_library = pytest.mark.parametrize("library", list(MODELS))


def make_batch(seed):
    rng = np.random.default_rng(seed)
    x = rng.normal(size=(8, FEATURES)).astype(dtype())
    return {"x": x, "y": rng.normal(size=(8, OUT)).astype(dtype())}


def loss(outputs, batch):
    return jaxpar.losses.squared_error(outputs, batch["y"])


def mean_loss(apply, params, batch):
    return mean_square(apply(params, batch["x"]), batch)


def mean_square(outputs, batch):
    return jnp.mean((outputs - batch["y"]) ** 2)


@pytest.mark.few(2)
@pytest.mark.full
@each_library
def test_three_steps_on_data_2_tensor_2_give_the_losses_of_one_device(library):
    make, sharding_rules = MODELS[library]
    init, apply = make()
    mesh, optimizer, key = (
        jaxpar.make_mesh(data=2, tensor=2),
        optax.sgd(0.1, momentum=0.9),
        jax.random.key(0),
    )
    shardings = jaxpar.shardings_from_paths(jax.eval_shape(init, key), mesh, sharding_rules)
    state = jaxpar.init_state(init, key, optimizer, mesh, shardings)
    split = {
        leaf.addressable_data(0).size / leaf.size
        for leaf in jax.tree.leaves(state.params)
        if leaf.ndim == 2
    }
    assert split == {0.5}, "both weights should be split"
    value_and_grad = jaxpar.value_and_grad(
        lambda params, batch: apply(params, batch["x"]), loss, mesh
    )
    train_step = jaxpar.make_train_step(value_and_grad, optimizer)

    params = jaxpar.fetch(state.params)
    opt_state, update = optimizer.init(params), tiny.update_on_one_device(optimizer)
    reference = jax.jit(jax.value_and_grad(lambda params, batch: mean_loss(apply, params, batch)))
    for step in range(3):
        state, metrics = train_step(state, jaxpar.shard_batch(make_batch(step), mesh))
        value, grads = reference(params, make_batch(step))
        params, opt_state = update(grads, opt_state, params)
        assert_same(metrics["loss"], value, within=1e-5)
    assert_same(state.params, params, within=1e-5)


@each_library
def test_gradients_in_float64_are_those_of_one_device(x64, library):
    make, sharding_rules = MODELS[library]
    init, apply = make()
    params, mesh = (
        jaxpar.fetch(jax.jit(init)(jax.random.key(0))),
        jaxpar.make_mesh(data=2, tensor=2),
    )
    assert {leaf.dtype for leaf in jax.tree.leaves(params)} == {np.dtype(np.float64)}
    value_and_grad = jax.jit(
        jaxpar.value_and_grad(lambda params, batch: apply(params, batch["x"]), loss, mesh)
    )
    split = jaxpar.shard(params, jaxpar.shardings_from_paths(params, mesh, sharding_rules))
    got = value_and_grad(split, jaxpar.shard_batch(make_batch(0), mesh))
    want = jax.jit(jax.value_and_grad(lambda params: mean_loss(apply, params, make_batch(0))))(
        params
    )
    assert_same(got, want)


@pytest.mark.parametrize("library", ["linen", "nnx", "equinox", "haiku"])
def test_params_are_nested_dicts_of_arrays(library):
    init, _ = MODELS[library][0]()
    params = jax.eval_shape(init, jax.random.key(0))
    assert {type(node) for node in (params, *params.values())} == {dict}
    assert set(params) == {"up", "down"}


class KeywordMLP(NNXMLP):
    def __init__(self, *, rngs):
        super().__init__(rngs)


class SizedMLP(NNXMLP):
    def __init__(self, hidden, rngs):
        super().__init__(rngs)


class DefaultMLP(NNXMLP):
    def __init__(self, hidden=HIDDEN, rngs=None):
        assert hidden == HIDDEN
        super().__init__(rngs)


class KeywordEquinox(EquinoxMLP):
    def __init__(self, *, key):
        super().__init__(key)


def test_a_class_may_take_its_random_numbers_by_name():
    pairs = (
        (adapters.from_nnx, KeywordMLP, NNXMLP),
        (adapters.from_nnx, DefaultMLP, NNXMLP),
        (adapters.from_equinox, KeywordEquinox, EquinoxMLP),
    )
    for adapter, by_name, plain in pairs:
        got, want = (adapter(each).init(jax.random.key(0)) for each in (by_name, plain))
        assert_same_bits(got, want)


def test_a_class_that_takes_more_than_its_random_numbers_is_refused():
    message = r"must be made by a function of rngs alone; got SizedMLP\(hidden, rngs\). Write from_nnx\(lambda rngs: Model"
    with pytest.raises(TypeError, match=message):
        adapters.from_nnx(SizedMLP)


class Annotated(linen.Module):
    @linen.compact
    def __call__(self, x):
        init, of = linen.initializers.lecun_normal(), linen.with_partitioning
        hidden = linen.Dense(HIDDEN, name="up", kernel_init=of(init, (None, "tensor")))(x)
        return linen.Dense(OUT, name="down", kernel_init=of(init, ("mlp", None)))(hidden)


class AnnotatedNNX(NNXMLP):
    def __init__(self, rngs):
        super().__init__(rngs)
        init = nnx.with_partitioning(nnx.initializers.lecun_normal(), (None, "tensor"))
        self.up = nnx.Linear(FEATURES, HIDDEN, kernel_init=init, rngs=rngs)


def test_axes_that_a_module_annotates_its_params_with_are_told_as_rules():
    of_up = r'"up/kernel": PartitionSpec\(None, \'tensor\'\)'
    with pytest.warns(UserWarning, match=rf'which have no effect. .*"down/kernel": .*, {of_up}\}}'):
        init, _ = adapters.from_linen(Annotated(), example())
    with pytest.warns(UserWarning, match=rf"Give them as rules, .*: \{{{of_up}\}}$"):
        adapters.from_nnx(AnnotatedNNX)
    rules = {"up/kernel": COLUMN, "**": WHOLE}
    shapes = jax.eval_shape(init, jax.random.key(0))
    jaxpar.shardings_from_paths(shapes, jaxpar.make_mesh(tensor=2), rules)


def test_params_are_those_that_the_library_makes_itself():
    key = jax.random.key(0)
    from_library = LinenMLP().init(key, np.zeros((1, FEATURES), np.float32))["params"]
    got = adapters.from_linen(LinenMLP(), example()).init(key)
    assert_same_bits(got, from_library)


def test_modules_are_stacked_as_the_layers_of_a_model():
    init, apply = adapters.from_nnx(lambda rngs: nnx.Linear(FEATURES, FEATURES, rngs=rngs))
    model = jaxpar.LayeredModel(lambda outer, batch: batch["x"], apply, lambda outer, x: x)
    params = {"outer": {}, "layers": jax.vmap(init)(jax.random.split(jax.random.key(0), 3))}
    assert params["layers"]["kernel"].shape == (3, FEATURES, FEATURES)
    assert model.apply(params, make_batch(0)).shape == (8, FEATURES)


@pytest.mark.full
def test_stacked_modules_run_in_a_pipeline_with_the_numbers_of_one_device():
    init, apply = adapters.from_linen(linen.Dense(FEATURES), example())
    model = jaxpar.LayeredModel(
        lambda outer, batch: batch["x"],
        lambda params, x: jnp.tanh(apply(params, x)),
        lambda outer, x: x @ outer["w"],
    )
    params = {
        "outer": {"w": jnp.ones((FEATURES, OUT))},
        "layers": jax.vmap(init)(jax.random.split(jax.random.key(0), 4)),
    }
    mesh = jaxpar.make_mesh(data=2, stage=2)
    split = jaxpar.shard(params, jaxpar.shardings_from_paths(params, mesh, {"**": WHOLE}))
    value_and_grad = jax.jit(jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2))
    got = value_and_grad(split, jaxpar.shard_batch(make_batch(0), mesh))
    want = jax.jit(
        jax.value_and_grad(
            lambda params: mean_square(model.apply(params, make_batch(0)), make_batch(0))
        )
    )(params)
    assert_same(got, want, within=1e-5)


@pytest.mark.parametrize("module", [linen.Dense(FEATURES), LinenMLP()])
def test_a_module_of_flax_is_no_function_of_params_and_batch(module):
    with pytest.raises(
        TypeError,
        match=r"a module of flax, which is called in another way\. Wrap it with jaxpar\.adapters",
    ):
        jaxpar.value_and_grad(module, lambda y, batch: (y.sum(), 1.0), jaxpar.make_mesh())


def test_lists_of_modules_are_found_by_their_numbers():
    init, apply = adapters.from_equinox(
        lambda key: eqx.nn.MLP(FEATURES, OUT, HIDDEN, 1, key=key), call=vmapped
    )
    params = init(jax.random.key(0))
    assert set(params["layers"]) == {"0", "1"}
    assert apply(params, make_batch(0)["x"]).shape == (8, OUT)


# --- what is refused ----------------------------------------------------------------------------------------------------


class LinenWith(linen.Module):
    layer: linen.Module

    @linen.compact
    def __call__(self, x):
        return self.layer(x)


class LinenCount(linen.Module):
    @linen.compact
    def __call__(self, x):
        return x * self.param("count", lambda _: jnp.int32(3))


class NNXCount(nnx.Module):
    def __init__(self, rngs):
        self.count = nnx.Param(jnp.arange(3))


class EquinoxCount(eqx.Module):
    count: jax.Array

    def __init__(self, key):
        self.count = jnp.arange(3)


def noisy(x):
    return x + jax.random.normal(hk.next_rng_key(), x.shape)


class NNXTable(nnx.Module):
    def __init__(self, rngs):
        self.linear = nnx.Linear(3, 3, rngs=rngs)
        self.slopes, self.mask = jnp.arange(3.0), np.ones(3)


def test_arrays_of_an_nnx_module_that_are_no_params_are_refused_by_name():
    with pytest.raises(
        ValueError, match=r"must be nnx\.Param.* that are none: mask, slopes\. Compute"
    ):
        adapters.from_nnx(NNXTable)


@pytest.mark.parametrize(
    ("adapt", "got"),
    [
        (
            lambda: adapters.from_linen(
                LinenWith(linen.BatchNorm(use_running_average=False)), example()
            ),
            r"the collections \['batch_stats'\]",
        ),
        (
            lambda: adapters.from_linen(
                LinenWith(linen.Dropout(0.5, deterministic=False)), example()
            ),
            "a call that draws random numbers",
        ),
        (
            lambda: adapters.from_nnx(lambda rngs: nnx.BatchNorm(3, rngs=rngs)),
            r"variables of the kinds \['BatchStat'\]",
        ),
        (
            lambda: adapters.from_nnx(lambda rngs: nnx.Dropout(0.5, rngs=rngs)),
            r"variables of the kinds \['RngCount', 'RngKey'\]",
        ),
        (
            lambda: adapters.from_equinox(
                lambda key: eqx.nn.BatchNorm(3, axis_name="batch", mode="ema")
            ),
            "an equinox.nn.StateIndex, as of a BatchNorm",
        ),
        (
            lambda: adapters.from_haiku(
                lambda x: hk.BatchNorm(True, True, 0.9)(x, True), example()
            ),
            r"the state of \['batch_norm",
        ),
        (lambda: adapters.from_haiku(noisy, example()), "a call that draws random numbers"),
    ],
    ids=[
        "linen-state",
        "linen-rng",
        "nnx-state",
        "nnx-rng",
        "equinox-state",
        "haiku-state",
        "haiku-rng",
    ],
)
def test_a_module_that_is_not_pure_is_refused(adapt, got):
    message = (
        f"must be a pure function of its params and inputs; got {got}.*Use a layer without them"
    )
    with pytest.raises(ValueError, match=message):
        adapt()


@pytest.mark.parametrize(
    ("adapt", "got"),
    [
        (lambda: adapters.from_linen(LinenCount(), example()), r"\{'count': 'int32'\}"),
        (lambda: adapters.from_nnx(NNXCount), r"\{'count': 'int32'\}"),
        (lambda: adapters.from_equinox(EquinoxCount), r"\{'count': 'int32'\}"),
        (
            lambda: adapters.from_haiku(
                lambda x: x * hk.get_parameter("n", (), jnp.int32, jnp.ones), example()
            ),
            r"\{'~/n': 'int32'\}",
        ),
    ],
    ids=["linen", "nnx", "equinox", "haiku"],
)
def test_params_that_are_not_floats_are_refused(adapt, got):
    with pytest.raises(
        ValueError,
        match=f"must be floating-point, since they are trained; got {got}. Make them constants",
    ):
        adapt()


@pytest.mark.parametrize(
    ("adapt", "message"),
    [
        (
            lambda: adapters.from_linen(NNXMLP(nnx.Rngs(0)), example()),
            rf"this adapter takes a flax.linen.Module; got {__name__}.NNXMLP. Write from_linen\(Model\(\), example_inputs\)",
        ),
        (
            lambda: adapters.from_linen(LinenMLP, example()),
            "takes a flax.linen.Module; got the class LinenMLP",
        ),
        (
            lambda: adapters.from_nnx(NNXMLP(nnx.Rngs(0))),
            r"must be passed as the function that makes it.*got a NNXMLP, made already. Write from_nnx\(lambda rngs",
        ),
        (lambda: adapters.from_nnx(3), "must be passed as the function that makes it.*got 3"),
        (
            lambda: adapters.from_nnx(lambda rngs: nnx.relu),
            "takes a function that makes a flax.nnx.Module; got",
        ),
        (
            lambda: adapters.from_equinox(EquinoxMLP(jax.random.key(0))),
            r"got a EquinoxMLP, made already. Write from_equinox\(lambda key: Model\(..., key=key\)\)",
        ),
        (
            lambda: adapters.from_equinox(lambda key: eqx.nn.make_with_state(EquinoxMLP)(key)),
            "takes a function that makes an equinox.Module; got builtins.tuple",
        ),
        (
            lambda: adapters.from_haiku(hk.transform(haiku_mlp), example()),
            "from_haiku takes a function of inputs that makes its modules; got Transformed, which is transformed",
        ),
    ],
)
def test_what_is_not_of_the_library_is_refused(adapt, message):
    with tiny.signatures_unchecked(), pytest.raises(TypeError, match=message):
        adapt()


def test_params_of_another_module_are_refused():
    _, apply = adapters.from_nnx(NNXMLP)
    with pytest.raises(
        ValueError,
        match=r"must be those that init gives; got none for \['down/bias', 'up/bias', 'up/kernel'\], and unknown ones \['x'\]",
    ):
        apply({"down": {"kernel": np.ones((8, 2))}, "x": np.ones(3)}, np.ones((1, 3)))


@pytest.mark.parametrize(
    ("library", "adapt"),
    [
        ("equinox", lambda: adapters.from_equinox(EquinoxMLP)),
        ("haiku", lambda: adapters.from_haiku(haiku_mlp, example())),
    ],
)
def test_a_library_that_is_not_installed_is_named_with_its_extra(monkeypatch, library, adapt):
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        ImportError, match=rf"this adapter needs {library}.*pip install -e '\.\[adapters\]'"
    ):
        adapt()


def test_importing_the_adapters_imports_none_of_the_libraries():
    program = "import sys, jaxpar.adapters; print(*{'flax', 'equinox', 'haiku'} & set(sys.modules))"
    run = subprocess.run(
        [sys.executable, "-c", program],
        capture_output=True,
        text=True,
        check=True,
        timeout=WAIT_SECONDS,
    )
    assert run.stdout.split() == []
