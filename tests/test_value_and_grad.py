"""The entry point with one stage: a drop-in for jax.value_and_grad, and proofs that its tests would notice a fault."""

import warnings

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.models import linear
from tests.support import tiny
from tests.support.oracle import assert_same, distance


def on(mesh, **options):
    """Loss and gradients on a mesh, and those of one device, for one batch."""
    loss = options.pop("loss", tiny.loss)
    params, batch = tiny.make_params(), tiny.make_batch()
    value_and_grad = jax.jit(jaxpar.value_and_grad(tiny.MODEL, loss, mesh, **options))
    got = value_and_grad(tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))
    return got, tiny.reference(params, batch)


@pytest.fixture(scope="module")
def mesh():
    return jaxpar.make_mesh(data=2, tensor=2)


def test_a_gradient_is_split_as_its_weight_is(mesh):
    params = tiny.on_mesh(mesh, tiny.make_params())
    value_and_grad = jax.jit(jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh))
    value, grads = value_and_grad(params, jaxpar.shard_batch(tiny.make_batch(), mesh))
    assert value.shape == ()
    split = lambda tree: jax.tree.map(lambda leaf: leaf.addressable_data(0).shape, tree)
    assert split(grads) == split(params)
    assert split(grads)["layers"]["w_up"] == (2, 8, 4)


@pytest.mark.parametrize("dims", [("stage",), (None, "stage"), ("stage", "tensor")], ids=str)
def test_a_gradient_of_outer_params_lies_over_stage_along_the_dim_of_its_rule(dims):
    mesh, spec = jaxpar.make_mesh(stage=2, tensor=2, devices=jax.devices()[:4]), jax.P(*dims)
    model = jaxpar.LayeredModel(
        lambda outer, batch: batch["x"],
        lambda w, h: h + jnp.tanh(h @ w),
        lambda outer, h: h @ outer,
    )
    loss = lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["y"])
    draw = np.random.default_rng(0).normal
    params = {"outer": draw(size=(8, 4)), "layers": draw(size=(2, 8, 8)) / 3}
    params = jax.tree.map(np.float32, params)
    batch = {"x": np.float32(draw(size=(8, 8))), "y": np.float32(draw(size=(8, 4)))}
    shardings = jaxpar.shardings_from_paths(
        params, mesh, {"outer": spec, "**": jaxpar.replicated()}
    )
    parallel = jaxpar.Parallel(mesh, shardings)
    value_and_grad = jax.jit(jaxpar.value_and_grad(model, loss, parallel, num_microbatches=2))
    got = value_and_grad(jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh))
    assert got[1]["outer"].sharding.spec[: len(dims)] == dims
    mean = lambda params: jnp.divide(*loss(model.apply(params, batch), batch))
    assert_same(got, jax.value_and_grad(mean)(params), within=1e-5)


@pytest.mark.parametrize("axes", [{"data": 2}, {"stage": 2}], ids=str)
def test_a_weight_in_float32_rounds_no_gradient_in_float64(x64, axes):
    mesh = jaxpar.make_mesh(**axes, devices=jax.devices()[:2])
    layer = lambda w, x: x + jnp.tanh(x @ w)
    head = lambda outer, x: x @ outer
    model = jaxpar.LayeredModel(lambda outer, batch: batch["x"], layer, head)
    loss = lambda outputs, batch: (jnp.sum((outputs - batch["y"]) ** 2), jnp.float32(len(outputs)))
    draw = np.random.default_rng(0).normal
    params = {"outer": draw(size=(4, 4)), "layers": draw(size=(2, 4, 4)) / 2}
    batch = {"x": draw(size=(12, 4)), "y": draw(size=(12, 4))}
    rules = {"layers": jax.P("stage"), "**": jaxpar.replicated()}
    on_mesh = jaxpar.shard(params, jaxpar.shardings_from_paths(params, mesh, rules))
    got = jax.jit(jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2))(
        on_mesh, jaxpar.shard_batch(batch, mesh)
    )
    mean = lambda params: jnp.divide(*loss(model.apply(params, batch), batch))
    assert_same(got, jax.value_and_grad(mean)(params), within=1e-12)


def test_a_plain_function_is_a_model(mesh):
    params = {"weights": np.arange(3, dtype=np.float32), "bias": np.float32(1)}
    rng = np.random.default_rng(0)
    batch = {
        "features": rng.normal(size=(8, 3)).astype(np.float32),
        "y": rng.normal(size=8).astype(np.float32),
    }

    def loss(outputs, batch):
        return jaxpar.losses.squared_error(outputs, batch["y"])

    def mean(params):
        return jnp.mean((batch["features"] @ params["weights"] + params["bias"] - batch["y"]) ** 2)

    replicated = jaxpar.shard(
        params, jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    )
    got = jax.jit(jaxpar.value_and_grad(linear.apply, loss, mesh))(
        replicated, jaxpar.shard_batch(batch, mesh)
    )
    assert_same(got, jax.value_and_grad(mean)(params), within=1e-5)


@pytest.mark.parametrize(
    "remat",
    [pytest.param(True, marks=pytest.mark.full), jax.checkpoint_policies.dots_saveable],
    ids=["all", "policy"],
)
def test_recomputing_activations_changes_no_number(mesh, remat):
    got, want = on(mesh, remat=remat, num_microbatches=2)
    assert_same(got, want, within=1e-5)


def test_recomputing_activations_of_a_plain_function_changes_no_number(mesh):
    params, batch = tiny.make_params(), tiny.make_batch()
    value_and_grad = jaxpar.value_and_grad(tiny.MODEL.apply, tiny.loss, mesh, remat=True)
    got = jax.jit(value_and_grad)(tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))
    assert_same(got, tiny.reference(params, batch), within=1e-5)


def test_it_can_be_called_without_jit(mesh):
    params, batch = tiny.make_params(), tiny.make_batch()
    value_and_grad = jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh)
    got = value_and_grad(tiny.on_mesh(mesh, params), jaxpar.shard_batch(batch, mesh))
    assert_same(got, tiny.reference(params, batch), within=1e-5)


# --- mutations: what parity would look like if a part were wrong -------------------------------------------------------


def test_without_the_gradient_reduction_parity_fails(mesh, monkeypatch):
    monkeypatch.setattr("jaxpar.zero.reduce_gradients", lambda sums, dtype=None, axes=(): sums)
    (_, grads), (_, want) = on(mesh)
    assert distance(grads, want) > 0.1, (
        "a replica alone should not have the gradients of the whole batch"
    )


@pytest.mark.full
def test_a_mean_of_means_is_refused_since_it_fails_parity(mesh, monkeypatch):
    def mean_loss(outputs, batch):
        total, weight = tiny.loss(outputs, batch)
        return total / weight, jnp.ones_like(weight)

    with pytest.raises(
        ValueError,
        match="loss_sum and weight_sum must be sums over the rows that the loss is given",
    ):
        on(mesh, loss=mean_loss, num_microbatches=4)
    monkeypatch.setattr("jaxpar.step.checks.check_rows", lambda *_: None)
    (value, grads), (want_value, want) = on(mesh, loss=mean_loss, num_microbatches=4)
    assert distance(grads, want) > 0.05, "microbatches of unequal weight should not count alike"
    assert abs(value - want_value) > 1e-3 * want_value


def test_without_accumulation_parity_fails(mesh, monkeypatch):
    def first_microbatch(part, batch, num_microbatches):
        return part(jax.tree.map(lambda a: a[: len(a) // num_microbatches], batch))

    monkeypatch.setattr("jaxpar.step.microbatches.accumulate", first_microbatch)
    (_, grads), (_, want) = on(mesh, num_microbatches=4)
    assert distance(grads, want) > 0.1


# --- what is refused ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_microbatches": 0},
            r"num_microbatches must be positive; got 0. Write num_microbatches=1 or more",
        ),
        ({"num_chunks": -1}, r"num_chunks must be positive; got -1"),
        ({"zero": 4}, r"zero must be a ZeRO level, 0 to 3; got 4. Write zero=0"),
        (
            {"layout": jaxpar.LayerLayout(4, 2, 2)},
            r"with one stage layers .* got a layout of num_stages=2, num_chunks=2",
        ),
        (
            {"schedule": "1f1"},
            r"schedule must be one of gpipe, 1f1b, .*; got '1f1'. Did you mean '1f1b'",
        ),
        ({"schedule": None}, r"schedule must be one of gpipe, 1f1b, .*; got None"),
        (
            {"executor": "free"},
            r'executor="free" is now called executor="mpmd"; got "free"\. Write executor="mpmd"\.',
        ),
        ({"executor": "fast"}, r'executor must be "spmd" or "mpmd"; got \'fast\'. Use "spmd"'),
    ],
)
def test_a_setting_out_of_range_is_refused(mesh, options, message):
    with tiny.signatures_unchecked(), pytest.raises(ValueError, match=message):
        jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, **options)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            {"num_microbatches": 2.0},
            r"num_microbatches must be an integer; got 2.0. Write num_microbatches=1",
        ),
        ({"num_microbatches": True}, r"num_microbatches must be an integer; got True"),
        (
            {"remat": "some"},
            r"remat must be one of 'none', 'full', 'dots', or a jax.checkpoint policy; got 'some'. See jax.checkpoint_policies",
        ),
        (
            {"model": {"w": 1}},
            r"model must be a LayeredModel or a function of \(params, batch\); got dict. Wrap a module",
        ),
        ({"mesh": None}, r"mesh must be a jax.sharding.Mesh; got NoneType"),
    ],
)
def test_a_setting_of_the_wrong_kind_is_refused(mesh, options, message):
    given = {"model": tiny.MODEL, "loss": tiny.loss, "mesh": mesh} | options
    with tiny.signatures_unchecked(), pytest.raises(TypeError, match=message):
        jaxpar.value_and_grad(**given)


def test_a_plain_function_in_a_pipeline_is_refused():
    message = r"needs to know a model's layers; got stage=2 and a plain function. Write the model as jaxpar.LayeredModel"
    with pytest.raises(ValueError, match=message):
        jaxpar.value_and_grad(linear.apply, tiny.loss, jaxpar.make_mesh(stage=2))


@pytest.mark.parametrize(
    ("loss", "kind", "message"),
    [
        (
            lambda o, b: jnp.sum(o),
            TypeError,
            r"loss must return the tuple \(loss_sum, weight_sum\); got float32\[\]\. Return the sum of the losses",
        ),
        (
            lambda o, b: (jnp.sum(o), 1.0, {}),
            TypeError,
            r"loss must return the tuple \(loss_sum, weight_sum\)",
        ),
        (
            lambda o, b: (o[:, 0], b["weight"].sum()),
            ValueError,
            r"floating-point scalars; got loss_sum float32\[32\]. Sum it: jnp.sum\(loss_sum\)",
        ),
        (
            lambda o, b: (jnp.sum(o), len(o)),
            ValueError,
            r"floating-point scalars; got weight_sum int32\[\]. Cast it: jnp.float32\(weight_sum\)",
        ),
        (
            lambda o, b: (jnp.sum(o * 1j), b["weight"].sum()),
            ValueError,
            r"floating-point scalars; got loss_sum complex64\[\]. Sum real numbers: of a complex difference its jnp.abs",
        ),
        (
            lambda o, b: (jnp.sum(o), jnp.sum(o**2)),
            ValueError,
            r"weight_sum must depend on the batch alone.*got a loss whose weight_sum depends on the outputs. Compute it",
        ),
        (
            lambda o, b: None,
            TypeError,
            r"loss must return the tuple \(loss_sum, weight_sum\); got None\. Return the sum",
        ),
        (
            lambda o, b: (jnp.sum(o), None),
            TypeError,
            r"two scalars; got None for weight_sum\. Return jnp\.sum of their weights, or their number as a float\.",
        ),
        (
            lambda o, b: ([1.0, 2.0], 3.0),
            TypeError,
            r"got \[float32\[\], float32\[\]\] for loss_sum\. Return jnp\.sum of the",
        ),
        (lambda o, b: ("low", 3.0), TypeError, r"two scalars; got 'low' for loss_sum\."),
        (
            lambda o, b: (jnp.sum(o), object()),
            TypeError,
            r"two scalars; got <object object at .*> for weight_sum\.",
        ),
    ],
    ids=[
        "mean",
        "triple",
        "vector",
        "integer",
        "complex",
        "depends",
        "none",
        "no weight",
        "list",
        "text",
        "object",
    ],
)
def test_a_loss_that_is_not_a_sum_and_its_weight_is_refused(mesh, loss, kind, message):
    value_and_grad = jax.jit(jaxpar.value_and_grad(tiny.MODEL, loss, mesh))
    with pytest.raises(kind, match=message):
        value_and_grad(tiny.make_params(), tiny.make_batch())


def made(part, returned):
    parts = {"embed": tiny.MODEL.embed, "layer": tiny.MODEL.layer, "head": tiny.MODEL.head}
    return jaxpar.LayeredModel(**(parts | {part: lambda params, x: returned(x)}))


def test_a_loss_that_names_an_axis_of_the_mesh_is_refused(mesh):
    loss = lambda outputs, batch: (jax.lax.psum(jnp.sum(outputs), "data"), 1.0)
    model = lambda params, batch: batch["x"] * params
    grad = jaxpar.value_and_grad(model, loss, mesh)
    with pytest.raises(ValueError, match=r"loss must not name an axis .* unbound axis name: data"):
        jax.eval_shape(grad, jnp.ones(()), {"x": np.ones((16, 1), np.float32)})


@pytest.mark.parametrize(
    ("model", "kind", "message"),
    [
        (
            lambda params, batch: None,
            TypeError,
            r"a model must return an array, or a tree of arrays; got None\. Return what",
        ),
        (
            lambda params, batch: "high",
            TypeError,
            r"a model must return an array, or a tree of arrays; got 'high'\.",
        ),
        (
            made("embed", lambda x: None),
            TypeError,
            r"embed must return an array, or a tree of arrays; got None\.",
        ),
        (
            made("layer", lambda x: (x, "high")),
            TypeError,
            r"layer must return an array, or a tree of arrays; got 'high'\.",
        ),
        (
            lambda params, batch: jax.lax.pmean(batch["features"], "data"),
            ValueError,
            r"a model must not name an axis of the mesh, as jax.lax.psum does, .*unbound axis name: data\. Return a number for",
        ),
        (
            made("head", lambda x: ()),
            TypeError,
            r"head must return an array, or a tree of arrays; got \(\)\.",
        ),
        (
            made("head", lambda x: (x,)),
            TypeError,
            r"logits must be an array; got tuple\. A loss is given what the model ret",
        ),
        (
            made("head", lambda x: np.ones((len(x), tiny.NUM_CLASSES), np.float32)),
            ValueError,
            r"outputs must depend on its params; got outputs that depend on none of them, such as numbers of NumPy",
        ),
    ],
    ids=["none", "text", "embed", "layer", "axis", "empty", "tuple", "numbers"],
)
def test_what_a_model_must_not_return_is_refused_with_the_function_that_returned_it(
    mesh, model, kind, message
):
    value_and_grad = jax.jit(jaxpar.value_and_grad(model, tiny.loss, mesh))
    with tiny.signatures_unchecked(), pytest.raises(kind, match=message):
        value_and_grad(tiny.make_params(), tiny.make_batch())


def test_params_that_the_outputs_do_not_depend_on_are_told_unless_they_are_frozen(mesh):
    params = tiny.make_params()
    more = params | {"outer": params["outer"] | {"forgotten": jnp.ones(3)}}
    for trainable, told in ((None, True), (("layers/**",), False)):
        value_and_grad = jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, trainable=trainable)
        with warnings.catch_warnings(record=True) as found:
            warnings.simplefilter("always")
            jax.eval_shape(value_and_grad, more, tiny.make_batch())
        messages = [str(each.message) for each in found if "depend on a param" in str(each.message)]
        assert bool(messages) == told
        assert (
            not told
            or "got none that depends on outer/forgotten, whose gradient is 0. Use it"
            in messages[0]
        )


@pytest.mark.parametrize(
    ("params", "batch", "message"),
    [
        (
            {"outer": {}},
            {},
            r'must be a dict with the keys "outer" and "layers"; got \[\'outer\'\]',
        ),
        (
            None,
            {"features": np.ones((6, 6), np.float32)},
            r"got 6 rows, data=2, num_microbatches=2. Use 8 rows",
        ),
        (None, {"rate": np.float32(1)}, r"must have a leading dim, its rows; got none for rate"),
    ],
)
def test_params_and_batches_that_do_not_fit_are_refused_when_it_is_called(
    mesh, params, batch, message
):
    value_and_grad = jax.jit(jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh, num_microbatches=2))
    batch = batch if "features" in batch else tiny.make_batch() | batch
    with pytest.raises(ValueError, match=message):
        value_and_grad(tiny.make_params() if params is None else params, batch)
