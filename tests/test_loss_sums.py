"""The sums that a loss returns beside its own, with has_aux=True: their means are those of one device, at no collective."""

import collections
import functools
import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar.inspect import inspect_step
from jaxpar.loss_sums import with_float_sums
from jaxpar.schedule import SCHEDULES
from tests.support import tiny
from tests.support.oracle import assert_same, assert_same_bits

NUM_LAYERS = 4


def embed(outer, batch):
    return batch["features"] @ outer["w_in"]


def layer(params, x):
    return jnp.tanh(x @ params["w_up"]) @ params["w_down"]


def head(outer, x):
    return x @ outer["w_out"]


MODEL = jaxpar.LayeredModel(embed, layer, head)
RULES = {
    "layers/w_up": jaxpar.column_parallel(),
    "layers/w_down": jaxpar.row_parallel(),
    "outer/*": jaxpar.replicated(),
}


def loss(outputs, batch):
    """Sums of three dtypes, one of which is NaN where a stage has nothing to do but to run the head on zeros."""
    sums = {
        "accuracy": jaxpar.losses.num_correct(outputs, batch["label"], batch["weight"]),
        "num_rows": jnp.sum(batch["weight"] > 0),
        "square": jnp.sum((outputs * batch["weight"][:, None]) ** 2),
        "sign": jnp.sum(outputs / jnp.abs(outputs), dtype=jnp.float32),
    }
    return *tiny.loss(outputs, batch), sums


def make_params():
    rng = np.random.default_rng(3)
    draw = lambda *shape: 0.5 * rng.normal(size=shape)
    layers = {"w_up": draw(NUM_LAYERS, 8, 16), "w_down": draw(NUM_LAYERS, 16, 8)}
    return {
        "outer": {"w_in": draw(tiny.NUM_FEATURES, 8), "w_out": draw(8, tiny.NUM_CLASSES)},
        "layers": layers,
    }


@functools.cache
def reference():
    """What jax.value_and_grad returns in float64."""
    params, batch = make_params(), tiny.make_batch(dtype=np.float64)

    def mean(params):
        loss_sum, weight_sum, sums = loss(MODEL.apply(params, batch), batch)
        return loss_sum / weight_sum, {name: value / weight_sum for name, value in sums.items()}

    return jaxpar.fetch(jax.jit(jax.value_and_grad(mean, has_aux=True))(params))


def on_mesh(axes, has_aux=True, **options):
    """``value_and_grad`` on a mesh, and its arguments there."""
    params, batch = make_params(), tiny.make_batch(dtype=np.float64)
    mesh = jaxpar.make_mesh(**axes)
    model = MODEL.apply if options.pop("is_plain", False) else MODEL
    if "layout" in options:
        params = options["layout"].pack_params(params)
    shardings = jaxpar.shardings_from_paths(params, mesh, RULES)
    given = jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh)
    options = {"num_microbatches": 4, "shardings": shardings} | options
    return jaxpar.value_and_grad(
        model, loss if has_aux else tiny.loss, mesh, has_aux=has_aux, **options
    ), given


CUBE = {"data": 2, "stage": 2, "tensor": 2}
UNEVEN = jaxpar.LayerLayout(NUM_LAYERS, 2, 1, "loop", (3, 1))


@pytest.mark.few(3)
@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({}, {"is_plain": True, "num_microbatches": 1}),
        ({"data": 2, "tensor": 2}, {"zero": 3, "remat": True}),
        ({"data": 2}, {"overlap_grad_reduce": True, "zero": 1, "num_microbatches": 2}),
        pytest.param(CUBE, {"schedule": "1f1b", "zero": 1}, marks=pytest.mark.slow),
        (CUBE, {"schedule": "gpipe", "mask_idle_ops": True, "zero": 2}),
        pytest.param(
            CUBE, {"schedule": "zb-h1", "mask_idle_ops": True, "zero": 2}, marks=pytest.mark.slow
        ),
        (
            {"stage": 2},
            {"schedule": "1f1b", "layout": UNEVEN, "mask_idle_ops": True, "remat": True},
        ),
        ({"data": 2, "stage": 2}, {"schedule": "1f1b", "executor": "mpmd"}),
    ],
    ids=lambda value: " ".join(f"{k}={v}" for k, v in value.items() if k != "layout"),
)
def test_loss_means_and_gradients_equal_one_device_in_float64(x64, axes, options):
    value_and_grad, given = on_mesh(axes, **options)
    value, grads = value_and_grad(*given)
    layout = options.get("layout")
    assert_same((value, layout.unpack_params(grads) if layout else grads), reference())


@pytest.mark.slow
@pytest.mark.parametrize("executor", ["skips", "masks", "mpmd"])
@pytest.mark.parametrize("schedule", SCHEDULES)
@pytest.mark.parametrize("remat", [False, True], ids=["", "remat"])
@pytest.mark.parametrize("zero", [0, 1, 2, 3])
def test_every_schedule_executor_and_zero_level_has_the_means_of_one_device(
    x64, executor, schedule, remat, zero
):
    if executor == "mpmd" and zero:
        return
    options = (
        {"executor": "mpmd"}
        if executor == "mpmd"
        else {"mask_idle_ops": executor == "masks", "zero": zero}
    )
    value_and_grad, given = on_mesh(CUBE, schedule=schedule, remat=remat, **options)
    assert_same(value_and_grad(*given), reference())


@pytest.mark.full
def test_means_are_reduced_in_their_own_dtype_and_there_for_frozen_params(x64):
    value_and_grad, given = on_mesh(
        {"data": 2, "stage": 2},
        grad_reduce_dtype=jnp.float32,
        trainable=("layers/**",),
        mask_idle_ops=True,
    )
    value, grads = value_and_grad(*given)
    want, want_grads = reference()
    assert_same(value, want, message="float64, whatever the gradients are reduced in")
    assert_same(grads["layers"], want_grads["layers"], within=1e-6)
    assert grads["outer"] == {"w_in": None, "w_out": None}


@pytest.mark.full
def test_without_the_mask_the_sums_of_idle_stages_would_be_found(monkeypatch):
    monkeypatch.setattr("jaxpar.pipeline.stage.masked", lambda mask, arrays: list(arrays))
    value_and_grad, given = on_mesh({"stage": 2}, mask_idle_ops=True, schedule="gpipe")
    (_, means), _ = value_and_grad(*given)
    (_, want), _ = reference()
    assert all(abs(means[name] / want[name] - 1) > 0.1 for name in want)


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("axes", "options"),
    [
        ({"data": 2, "tensor": 2}, {"zero": 1}),
        pytest.param({"data": 2, "stage": 2}, {}, marks=pytest.mark.slow),
        ({"data": 2, "stage": 2}, {"mask_idle_ops": True, "schedule": "gpipe"}),
    ],
)
def test_the_sums_travel_with_the_loss(axes, options, monkeypatch):
    if options.get("mask_idle_ops"):  # the stages share a head whose sums are all floats
        floats = lambda sums: {
            name: value for name, value in sums.items() if jnp.issubdtype(value.dtype, jnp.floating)
        }
        monkeypatch.setitem(
            globals(),
            "loss",
            lambda *args, whole=loss: (*whole(*args)[:2], floats(whole(*args)[2])),
        )

    def collectives(has_aux):
        value_and_grad, given = on_mesh(axes, has_aux, **options)
        report = inspect_step(jax.jit(value_and_grad), *given)
        assert report.count() > 0
        return collections.Counter(
            (each.kind, each.axes, each.times) for each in report.collectives
        )

    assert collectives(has_aux=True) == collectives(has_aux=False)


# --- integers -----------------------------------------------------------------------------------------------------------


def test_integers_are_added_exactly_on_every_mesh():
    large = 2**24 + 1  # the first integer that float32 does not have
    columns = {
        "int32": np.array([large] * 4 + [4, 0, 0, 0], np.int32),
        "negative": np.array([-large] * 4 + [-4, 1, 0, -1], np.int32),
        "uint32": np.array([2**31 + 1, 2**30 + 3, 2**29, 2**29 - 260, 0, 0, 0, 0], np.uint32),
        "int8": np.array([127, 127, 127, 127, -3, 0, 0, 0], np.int8),
        "bool": np.array([True, False] * 4),
    }
    batch = columns | {"first": np.float32([1] + [0] * 7)}
    model = lambda params, batch: {
        name: batch[name] * (params > 0).astype(batch[name].dtype) for name in columns
    }

    def loss(outputs, batch):
        sums = {
            name: jnp.sum(value, dtype=value.dtype)
            for name, value in outputs.items()
            if name != "bool"
        }
        of_one_row = jaxpar.row_wise(jnp.any)  # each microbatch has one
        return jnp.float32(0), jnp.sum(batch["first"]), sums | {"bool": of_one_row(outputs["bool"])}

    for axes, num_microbatches in (({"data": 2}, 4), ({}, 8)):
        mesh = jaxpar.make_mesh(**axes)
        given = jaxpar.value_and_grad(
            model, loss, mesh, num_microbatches=num_microbatches, has_aux=True
        )
        (_, means), _ = given(jnp.float32(1), jaxpar.shard_batch(batch, mesh))
        assert {mean.dtype for mean in means.values()} == {jnp.dtype(np.float32)}
        got = {name: int(mean) for name, mean in means.items()}
        assert got == {name: int(column.sum(dtype=np.int64)) for name, column in columns.items()}


@pytest.mark.parametrize(
    "dtype",
    [
        pytest.param("int64", marks=pytest.mark.full),
        pytest.param("uint64", marks=pytest.mark.full),
        "int32",
        "uint32",
    ],
)
def test_an_integer_of_any_size_is_put_together_again(x64, dtype):
    info = np.iinfo(dtype)
    values = np.array([info.min, info.max, 0, 1, info.max // 3, info.min // 3], dtype)
    for value in values:
        *_, total = with_float_sums(lambda value, _: (jnp.float32(0), jnp.float32(1), value))(
            jnp.asarray(value), None
        )
        assert {part.dtype for part in total.parts} == {jnp.dtype(np.float32)}
        assert_same_bits(total.total(), value)


# --- what is refused ----------------------------------------------------------------------------------------------------

TWO = r"loss must return the tuple \(loss_sum, weight_sum\); got "
THREE = r"loss must return the tuple \(loss_sum, weight_sum, sums\) with has_aux=True; got "
NAMED = r"with has_aux=True the third value of loss must be a dict of sums by name; got "
SCALAR = r"each sum of a loss must be a float, an integer or a boolean; got 'acc' "
WRITE = r'Write: return loss_sum, weight_sum, \{"acc": acc_sum, "n": n_sum\}, each a sum .*pass has_aux=True'


@pytest.mark.parametrize(
    ("has_aux", "returned", "kind", "message"),
    [
        (
            False,
            lambda o: (jnp.sum(o), {"acc": 1, "n": 2.0}),
            TypeError,
            rf"{TWO}.*'acc': int32\[\].*{WRITE}",
        ),
        (
            True,
            lambda o: (jnp.sum(o), {"acc": 1, "n": 2.0}),
            TypeError,
            rf"{THREE}.*'acc': int32\[\].*{WRITE}",
        ),
        (
            False,
            lambda o: (jnp.sum(o), 1.0, {"acc": 1}),
            TypeError,
            rf"{TWO}.*Pass has_aux=True to value_and_grad",
        ),
        (
            True,
            lambda o: (jnp.sum(o), 1.0),
            TypeError,
            rf"{THREE}\(float32\[\], float32\[\]\).*or leave has_aux out",
        ),
        (
            True,
            lambda o: jnp.sum(o),
            TypeError,
            rf"{THREE}float32\[\]\. Return the sum of the losses",
        ),
        (
            True,
            lambda o: (jnp.sum(o), 1.0, [1]),
            TypeError,
            rf"{NAMED}\[int32\[\]\]\. Write such as",
        ),
        (
            True,
            lambda o: (jnp.sum(o), 1.0, {1: 1}),
            TypeError,
            rf"{NAMED}\{{1: int32\[\]\}}\. Write such as",
        ),
        (
            True,
            lambda o: (jnp.sum(o), 1.0, {"acc": o[:, 0]}),
            ValueError,
            r"must be a scalar; got 'acc' float32\[32\]\. Sum it over the rows: jnp\.sum\(acc\)",
        ),
        (
            True,
            lambda o: (jnp.sum(o), 1.0, {"acc": {"top": 1}}),
            TypeError,
            rf"{SCALAR}\{{'top': int32\[\]\}}\. Leave",
        ),
        (
            True,
            lambda o: (jnp.sum(o), 1.0, {"acc": "high"}),
            TypeError,
            rf"{SCALAR}'high'\. Leave it out, or return",
        ),
        (True, lambda o: (jnp.sum(o), 1.0, {"acc": None}), TypeError, rf"{SCALAR}None\. Leave"),
        (
            True,
            lambda o: (jnp.sum(o), 1.0, {"acc": 1j}),
            TypeError,
            rf"{SCALAR}complex64\[\]\. Leave",
        ),
    ],
)
def test_what_a_loss_must_not_return_is_refused_with_what_to_write(
    has_aux, returned, kind, message, caplog
):
    params, batch = tiny.make_params(), tiny.make_batch()
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL, lambda o, b: returned(o), jaxpar.make_mesh(), has_aux=has_aux
    )
    with jax.log_compiles(), caplog.at_level(logging.WARNING), pytest.raises(kind, match=message):
        value_and_grad(params, batch)
    assert "Compiling jit" not in caplog.text


def test_the_weight_must_not_depend_on_the_outputs_beside_sums_either():
    loss = lambda o, b: (jnp.sum(o), jnp.sum(o**2), {"acc": 1})
    with pytest.raises(ValueError, match=r"weight_sum must depend on the batch alone"):
        jaxpar.value_and_grad(tiny.MODEL, loss, jaxpar.make_mesh(), has_aux=True)(
            tiny.make_params(), tiny.make_batch()
        )


# --- metrics of a step --------------------------------------------------------------------------------------------------


def a_step(value_and_grad, mesh, optimizer, **options):
    """The state and metrics after a step."""
    params = make_params()
    init = lambda _: jax.tree.map(jnp.asarray, params)
    shardings = jaxpar.shardings_from_paths(params, mesh, RULES)
    state = jaxpar.init_state(init, jax.random.key(0), optimizer, mesh, shardings)
    train_step = jaxpar.make_train_step(value_and_grad, optimizer, **options)
    return train_step(state, jaxpar.shard_batch(tiny.make_batch(dtype=np.float64), mesh))


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
def test_means_are_metrics_of_a_step_and_change_no_param(executor):
    mesh, optimizer = jaxpar.make_mesh(data=2, stage=2), optax.adam(1e-2)
    of = lambda has_aux: on_mesh(
        {"data": 2, "stage": 2}, has_aux, executor=executor, shardings=None
    )[0]
    state, metrics = a_step(of(True), mesh, optimizer)
    plain, without = a_step(of(False), mesh, optimizer)
    assert set(metrics) == {
        "loss",
        "grad_norm",
        "skipped",
        "accuracy",
        "num_rows",
        "square",
        "sign",
    }
    assert {value.dtype for value in metrics.values()} == {jnp.dtype(np.float32)}
    assert_same(jaxpar.fetch(state.params), jaxpar.fetch(plain.params), within=1e-6)
    assert_same({name: metrics[name] for name in without}, without, within=1e-6)
    with jax.enable_x64(True):
        _, means = reference()[0]
    assert_same(
        {name: metrics[name] for name in means}, jax.tree.map(np.float32, means), within=1e-5
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        pytest.param(optax.lbfgs(), marks=pytest.mark.full),
        optax.chain(optax.sgd(0.1), optax.contrib.reduce_on_plateau()),
    ],
    ids=["lbfgs", "plateau"],
)
def test_an_optimizer_that_takes_the_loss_is_given_it_alone(optimizer):
    mesh, batch = jaxpar.make_mesh(), tiny.make_batch()
    init = lambda _: jnp.full((tiny.NUM_FEATURES, tiny.NUM_CLASSES), 0.1)
    sharding = jax.sharding.NamedSharding(mesh, jax.sharding.PartitionSpec())

    def params_after_a_step(has_aux):
        value_and_grad = jaxpar.value_and_grad(
            lambda params, batch: batch["features"] @ params,
            loss if has_aux else tiny.loss,
            mesh,
            has_aux=has_aux,
        )
        state = jaxpar.init_state(init, jax.random.key(0), optimizer, mesh, sharding)
        return jaxpar.fetch(
            jaxpar.make_train_step(value_and_grad, optimizer)(state, batch)[0].params
        )

    assert_same(params_after_a_step(has_aux=True), params_after_a_step(has_aux=False), within=1e-6)


@pytest.mark.parametrize("executor", [pytest.param("spmd", marks=pytest.mark.full), "mpmd"])
def test_sums_named_like_metrics_of_the_step_are_refused_before_it_is_compiled(executor, caplog):
    mesh, optimizer = jaxpar.make_mesh(stage=2), optax.sgd(0.1)
    named = lambda o, b: (*tiny.loss(o, b), {"grad_norm": 0.0, "step": 1, "fine": 2})
    value_and_grad = jaxpar.value_and_grad(MODEL, named, mesh, executor=executor, has_aux=True)
    state = jaxpar.init_state(
        lambda _: make_params(),
        jax.random.key(0),
        optimizer,
        mesh,
        jaxpar.shardings_from_paths(make_params(), mesh, RULES),
    )
    batch = jaxpar.shard_batch(tiny.make_batch(), mesh)
    message = r"metrics named loss, grad_norm, skipped, step, step_seconds, .*got \['grad_norm', 'step'\]\. Rename them"
    with (
        jax.log_compiles(),
        caplog.at_level(logging.WARNING),
        pytest.raises(ValueError, match=message),
    ):
        jaxpar.make_train_step(value_and_grad, optimizer)(state, batch)
    assert "Compiling jit" not in caplog.text


def test_a_step_takes_the_auxiliary_dict_of_jax_value_and_grad_and_nothing_else():
    mesh, optimizer = jaxpar.make_mesh(), optax.sgd(0.1)

    def mean(params, batch, aux):
        outputs = MODEL.apply(params, batch)
        return jnp.divide(*tiny.loss(outputs, batch)), aux(outputs)

    of = lambda aux: (
        lambda params, batch: jax.value_and_grad(mean, has_aux=True)(params, batch, aux)
    )
    _, metrics = a_step(of(lambda o: {"largest": jnp.max(o)}), mesh, optimizer)
    assert np.isfinite(metrics["largest"])
    for aux in (lambda o: o, lambda o: {"logits": o}, lambda o: {0: jnp.max(o)}):
        with pytest.raises(
            TypeError,
            match=r"must be a dict of scalars by name.*Return such as \{\"accuracy\": accuracy\}",
        ):
            a_step(of(aux), mesh, optimizer)
