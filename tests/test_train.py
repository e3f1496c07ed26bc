"""The training step and the state that it changes."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar.inspect import inspect_step
from jaxpar.models import mlp
from jaxpar.params import init_params
from jaxpar.train import TrainState, abstract_state, clip, norm_and_finite
from tests.support import tiny
from tests.support.oracle import assert_same, assert_same_bits, distance

ADAM = optax.adam(1e-2)
KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def mesh():
    return jaxpar.make_mesh(data=2, tensor=2)


def make_state(mesh, optimizer=ADAM):
    return jaxpar.init_state(
        tiny.init, KEY, optimizer, mesh, tiny.shardings(mesh, jax.eval_shape(tiny.init, KEY))
    )


@pytest.fixture(scope="module")
def first_state(mesh):
    """The first state, not to be donated."""
    return make_state(mesh)


@pytest.fixture
def state(first_state):
    """A copy of it, for a test to use up: sparing a compilation."""
    return jaxpar.shard(copy_of(first_state), jax.tree.map(lambda leaf: leaf.sharding, first_state))


def make_step(mesh, optimizer=ADAM, **options):
    return jaxpar.make_train_step(
        jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh), optimizer, **options
    )


@pytest.fixture(scope="module")
def adam_step(mesh):
    return make_step(mesh)


def on_mesh(mesh, seed=0, **columns):
    return jaxpar.shard_batch(tiny.make_batch(seed) | columns, mesh)


def own_shapes(tree):
    return jax.tree.map(lambda leaf: leaf.addressable_data(0).shape, tree)


def copy_of(state):
    return jax.tree.map(lambda leaf: np.array(leaf), state)


# --- init_state ---------------------------------------------------------------------------------------------------------


def test_every_device_holds_its_own_part_of_params_and_of_the_moments_of_adam(first_state):
    state = first_state
    adam = state.opt_state[0]
    assert own_shapes(state.params)["layers"] == {
        "w_up": (2, 8, 4),
        "b_up": (2, 4),
        "w_down": (2, 4, 8),
        "b_down": (2, 8),
    }
    assert own_shapes(adam.mu) == own_shapes(adam.nu) == own_shapes(state.params)
    assert all(
        leaf.sharding.is_fully_replicated for leaf in (state.step, adam.count, state.num_skipped)
    )


def test_no_device_ever_holds_a_split_param_whole(monkeypatch):
    mesh, table = jaxpar.make_mesh(tensor=8), mlp.param_table(8, 4, width=256, num_hidden=4)
    init = lambda key: init_params(table, key)
    compiled, jit = [], jax.jit
    with monkeypatch.context() as patch:
        patch.setattr(
            jax,
            "jit",
            lambda *args, **options: compiled.append(jit(*args, **options)) or compiled[-1],
        )
        jaxpar.init_state(
            init, KEY, optax.sgd(0.1), mesh, tiny.shardings(mesh, jax.eval_shape(init, KEY))
        )
    report = inspect_step(compiled[0], KEY, mesh=mesh)
    whole = 4 * 256 * 256 * 4
    assert report.memory.output_bytes + report.memory.temp_bytes < 0.5 * whole, report.memory
    assert report.count() == 0, "each device should draw its own part"


def test_plain_jit_of_the_optimizer_would_leave_the_moments_whole(first_state):
    mu = jax.jit(ADAM.init)(first_state.params)[0].mu
    assert own_shapes(mu)["layers"]["w_up"] == (2, 8, 8), "then init_state need not place them"


def test_first_values_do_not_depend_on_the_mesh(first_state):
    alone = make_state(jaxpar.make_mesh())
    assert_same_bits(copy_of(first_state), copy_of(alone))


def test_a_state_is_placed_where_programs_are_not_compiled(mesh, first_state):
    with jax.disable_jit():
        placed = make_state(mesh)
    for got, want in zip(jax.tree.leaves(placed), jax.tree.leaves(first_state), strict=True):
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


def test_a_factored_state_is_cut_along_the_dims_that_it_keeps(mesh):
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    state = abstract_state(
        tiny.init, KEY, optimizer, mesh, tiny.shardings(mesh, jax.eval_shape(tiny.init, KEY))
    )
    v_row, v_col = (
        getattr(state.opt_state[0], name)["layers"]["w_up"] for name in ("v_row", "v_col")
    )
    assert (v_row.shape, v_col.shape) == ((2, 8), (2, 8))
    assert (v_row.sharding.spec, v_col.sharding.spec) == (
        PartitionSpec("stage", None),
        PartitionSpec("stage", "tensor"),
    )


def test_an_optimizer_that_takes_pairs_of_params_is_refused(mesh):
    optimizer = optax.lookahead(ADAM, 5, 0.5)
    step, state = make_step(mesh, optimizer), make_state(mesh, optimizer)
    with pytest.raises(
        TypeError, match=r"must take params as they are, a tree of arrays; got optax.lookahead, "
    ):
        step(state, on_mesh(mesh))


def test_the_abstract_state_is_that_of_init_state(mesh, first_state):
    shardings = tiny.shardings(mesh, jax.eval_shape(tiny.init, KEY))
    abstract = abstract_state(tiny.init, KEY, ADAM, mesh, shardings)
    for want, got in zip(jax.tree.leaves(abstract), jax.tree.leaves(first_state), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


def test_shardings_of_another_structure_are_refused(mesh):
    message = r"shardings must have the structure of the params; got .* for .*Make them with jaxpar.shardings_from_paths"
    with pytest.raises(ValueError, match=message):
        jaxpar.init_state(
            tiny.init, KEY, ADAM, mesh, {"outer": NamedSharding(mesh, PartitionSpec())}
        )


def test_an_average_without_the_params_that_are_not_trained_is_not_evaluated(mesh):
    shardings = {name: NamedSharding(mesh, PartitionSpec()) for name in ("w", "frozen")}
    parallel = jaxpar.Parallel(mesh, shardings, trainable=["w"])
    model = lambda params, batch: batch["x"] @ (params["w"] * params["frozen"])
    loss = lambda outputs, batch: jaxpar.losses.squared_error(outputs, batch["x"][:, 0])
    average = {"w": jnp.ones(4), "frozen": None}  # as in the state of the optimizer
    with pytest.raises(
        ValueError, match=r"an array for each sharding; got None for frozen, .*Take these from st"
    ):
        jaxpar.make_eval_step(model, loss, parallel)(average, {"x": np.ones((8, 4))})


# --- the step -----------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_metrics_are_loss_gradient_norm_and_skipped_in_float32(mesh, adam_step, state):
    want_loss, grads = tiny.reference(copy_of(state.params), tiny.make_batch())
    _, metrics = adam_step(state, on_mesh(mesh))
    want = {"loss": want_loss, "grad_norm": optax.tree.norm(grads), "skipped": np.float32(0)}
    assert_same(metrics, want, within=1e-5)


def test_a_batch_of_another_mesh_is_refused_with_both_named(mesh, adam_step, state):
    other = jaxpar.make_mesh(data=2, devices=jax.devices()[6:])
    message = (
        r"must be on the mesh of the params; got features on data=2, stage=1, tensor=1, devices \[6, 7\], and params on "
        r"data=2, stage=1, tensor=2, devices .*jaxpar.shard_batch\(batch, mesh\)"
    )
    with pytest.raises(ValueError, match=message):
        adam_step(state, on_mesh(other))
    grads = jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh)
    with pytest.raises(ValueError, match=message):
        grads(state.params, on_mesh(other))


def test_a_state_of_an_optimizer_on_one_device_is_refused_with_the_function_that_makes_one(
    mesh, adam_step, state
):
    by_hand = ADAM.init(jaxpar.fetch(state.params))
    with pytest.raises(
        ValueError, match=r"got opt_state/0/count on 1 of 4 devices\. Make .* jaxpar\.init_state"
    ):
        adam_step(TrainState(state.step, state.params, by_hand, state.num_skipped), on_mesh(mesh))


def test_the_state_is_donated(mesh, adam_step, state):
    new, _ = adam_step(state, on_mesh(mesh))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert new.step == 1


def test_the_new_state_keeps_the_shardings_of_the_old_one(mesh, adam_step, state):
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    after, _ = adam_step(state, on_mesh(mesh))
    assert jax.tree.map(lambda leaf: leaf.sharding, after) == before


@pytest.mark.full
def test_nothing_is_compiled_after_the_first_step(mesh, state, caplog):
    train_step = make_step(mesh)
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        state, _ = train_step(state, on_mesh(mesh, 0))
        assert "Compiling jit(step)" in caplog.text, "the first step should be seen to compile"
        caplog.clear()
        for seed in (1, 2):
            state, _ = train_step(state, on_mesh(mesh, seed))
    assert "Compiling" not in caplog.text


def test_a_step_lowers_for_shapes_alone(mesh):
    shardings = tiny.shardings(mesh, jax.eval_shape(tiny.init, KEY))
    abstract = abstract_state(tiny.init, KEY, ADAM, mesh, shardings)
    assert (
        "donor" in (text := make_step(mesh).lower(abstract, on_mesh(mesh)).as_text())
        or "alias" in text
    )


def test_params_of_a_weak_type_do_not_have_the_step_compiled_twice(mesh, caplog):
    init = lambda key: {"w": jnp.full(4, 0.1)}
    assert jax.eval_shape(init, KEY)["w"].weak_type
    shardings = {"w": NamedSharding(mesh, PartitionSpec("tensor"))}
    state = jaxpar.init_state(init, KEY, optax.sgd(0.1), mesh, shardings)
    train_step = jaxpar.make_train_step(
        lambda params, batch: (jnp.float32(0), params), optax.sgd(0.1)
    )
    with jax.log_compiles(), caplog.at_level(logging.WARNING):
        for _ in range(2):
            state, _ = train_step(state, {})
    assert caplog.text.count("Compiling jit(step)") == 1


@pytest.mark.parametrize(
    "update",
    [
        lambda grad, state, params: (grad, state),
        lambda updates, state, params=None, *, value: (
            jax.tree.map(lambda u: u * value, updates),
            state,
        ),
        lambda updates, state, params=None, **more: (
            jax.tree.map(lambda u: u * more["value"], updates),
            state,
        ),
    ],
    ids=["nothing more", "the loss alone", "anything"],
)
def test_an_optimizer_is_given_what_its_update_takes(update):
    optimizer = optax.GradientTransformation(lambda params: (), update)
    state = TrainState(jnp.int32(0), {"w": jnp.zeros(4)}, (), jnp.int32(0))
    train_step = jaxpar.make_train_step(
        lambda *_: (jnp.float32(1), {"w": jnp.full(4, 2.0)}), optimizer
    )
    new, _ = train_step(state, {})
    np.testing.assert_array_equal(new.params["w"], 2)


@pytest.mark.full
def test_a_line_search_beside_programs_without_a_loss_in_them_is_refused_before_any_is_compiled(
    caplog,
):
    mesh, optimizer = jaxpar.make_mesh(stage=2), optax.lbfgs()
    shardings = tiny.shardings(mesh, jax.eval_shape(tiny.init, KEY))
    state = jaxpar.init_state(tiny.init, KEY, optimizer, mesh, shardings)
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL, tiny.loss, mesh, executor="mpmd", num_microbatches=2
    )
    train_step = jaxpar.make_train_step(value_and_grad, optimizer)
    message = r'which then must be one program; got executor="mpmd"\. Use executor="spmd", or an optimizer without a line'
    with (
        jax.log_compiles(),
        caplog.at_level(logging.WARNING),
        pytest.raises(ValueError, match=message),
    ):
        train_step(state, on_mesh(mesh))
    assert "Compiling jit" not in caplog.text


@pytest.mark.full
@pytest.mark.parametrize("max_grad_norm", [0.05, 100.0], ids=["clips", "leaves"])
def test_clipping_under_sharding_is_that_of_one_device(mesh, first_state, max_grad_norm):
    optimizer = optax.sgd(1.0)
    params = copy_of(first_state.params)
    state = jaxpar.init_state(
        lambda _: jax.tree.map(jnp.asarray, params),
        KEY,
        optimizer,
        mesh,
        tiny.shardings(mesh, params),
    )
    _, grads = tiny.reference(params, tiny.make_batch())
    clipped, _ = optax.clip_by_global_norm(max_grad_norm).update(grads, optax.EmptyState())
    want = jax.tree.map(lambda p, g: p - g, params, clipped)
    new, metrics = make_step(mesh, optimizer, max_grad_norm=max_grad_norm)(state, on_mesh(mesh))
    assert_same(new.params, want, within=1e-5)
    assert_same(
        metrics["grad_norm"], optax.tree.norm(grads), within=1e-5, message="before clipping"
    )


@pytest.mark.parametrize("dtype", ["complex64", "float32", "float16", "bfloat16"])
@pytest.mark.parametrize("max_norm", [3e-4, 0.7, 1e9])
def test_norm_and_clipping_of_any_dtype_are_those_of_float64(dtype, max_norm):
    rng, is_complex = np.random.default_rng(0), dtype == "complex64"
    draw = lambda: 100 * (rng.normal(size=1024) + is_complex * 1j * rng.normal(size=1024))
    grads = [jnp.asarray(draw() if is_complex else draw().real, dtype) for _ in range(2)]
    in_one = lambda leaves: np.concatenate([np.asarray(leaf).astype(complex) for leaf in leaves])
    wide, (norm, finite) = in_one(grads), norm_and_finite(grads)
    assert (norm.dtype, bool(finite)) == (jnp.float32, True)
    np.testing.assert_allclose(norm, np.linalg.norm(wide), rtol=1e-6)
    clipped = clip(grads, norm, max_norm)
    assert {leaf.dtype for leaf in clipped} == {jnp.dtype(dtype)}
    got, want_norm = in_one(clipped), min(max_norm, np.linalg.norm(wide))
    np.testing.assert_allclose(np.linalg.norm(got), want_norm, rtol=2e-4)
    np.testing.assert_allclose(np.vdot(got, wide), want_norm * np.linalg.norm(wide), rtol=2e-4)


@pytest.mark.parametrize("broken", [complex(0, np.nan), complex(0, np.inf), complex(np.inf, 0)])
def test_a_complex_gradient_is_finite_if_both_its_parts_are(broken):
    assert norm_and_finite({"w": jnp.ones(3, jnp.complex64)})[1]
    assert not norm_and_finite({"w": jnp.ones(3, jnp.complex64).at[1].set(broken)})[1]


def test_gradients_whose_norm_cannot_be_told_are_skipped_where_it_is_needed():
    grads = {"w": jnp.full(4, 1e30, jnp.float32)}
    state = TrainState(jnp.int32(0), {"w": jnp.zeros(4)}, optax.sgd(0.1).init({}), jnp.int32(0))
    step = lambda **options: jaxpar.make_train_step(
        lambda *_: (jnp.float32(1), grads), optax.sgd(0.1), **options
    )
    new, metrics = step(max_grad_norm=1.0)(jax.tree.map(jnp.copy, state), {})
    assert (metrics["grad_norm"], metrics["skipped"]) == (np.inf, 1)
    np.testing.assert_array_equal(new.params["w"], 0)
    new, metrics = step()(state, {})
    assert metrics["skipped"] == 0
    np.testing.assert_allclose(new.params["w"], -1e29)


@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.full), 1])
def test_complex_params_train_as_on_one_device(zero):
    mesh, optimizer = jaxpar.make_mesh(data=2, tensor=2), optax.adam(1e-2)
    rng = np.random.default_rng(0)
    draw = lambda *shape: (rng.normal(size=shape) + 1j * rng.normal(size=shape)).astype(
        np.complex64
    )
    params, batch = {"w": draw(6, 4)}, {"x": draw(8, 6), "y": draw(8, 4)}
    shardings = {"w": NamedSharding(mesh, PartitionSpec(None, "tensor"))}

    def loss(outputs, batch):
        return jnp.sum(jnp.abs(outputs - batch["y"]) ** 2), jnp.float32(len(batch["y"]))

    model = lambda params, batch: batch["x"] @ params["w"]
    state = jaxpar.init_state(
        lambda key: jax.tree.map(jnp.asarray, params), KEY, optimizer, mesh, shardings, zero=zero
    )
    value_and_grad = jaxpar.value_and_grad(model, loss, mesh, zero=zero, shardings=shardings)
    train_step = jaxpar.make_train_step(value_and_grad, optimizer, max_grad_norm=1.0)
    grad_of = jax.jit(jax.grad(lambda params: jnp.divide(*loss(model(params, batch), batch))))
    opt_state, update = optimizer.init(params), jax.jit(optimizer.update)
    for _ in range(2):
        grad = grad_of(params)["w"]
        norm = np.linalg.norm(grad)
        updates, opt_state = update({"w": grad / max(norm, 1)}, opt_state, params)
        state, metrics = train_step(state, jaxpar.shard_batch(batch, mesh))
        np.testing.assert_allclose(metrics["grad_norm"], norm, rtol=1e-5)
        params = optax.apply_updates(params, updates)
    assert_same(state.params, params, within=1e-5)


@pytest.mark.parametrize(
    ("axes", "zero"),
    [
        ({"data": 2}, 0),
        pytest.param({"data": 2}, 1, marks=pytest.mark.full),
        pytest.param({"stage": 2}, 0, marks=pytest.mark.full),
    ],
)
@pytest.mark.filterwarnings("ignore:a model's outputs must depend on a param")
def test_a_complex_param_that_the_loss_does_not_use_has_no_gradient_on_any_mesh(axes, zero):
    """XLA ends the process where it reduces a constant of complex numbers."""
    mesh = jaxpar.make_mesh(**axes, devices=jax.devices()[:2])
    layer, head = lambda params, x: x @ params["a"], lambda outer, x: x @ outer["a"]
    model = jaxpar.LayeredModel(lambda outer, batch: batch["x"], layer, head)
    params = {
        "outer": {"a": jnp.ones((1, 1)), "z": jnp.ones(4, jnp.complex64)},
        "layers": {"a": jnp.ones((2, 1, 1))},
    }
    sharded = jaxpar.shard(
        params, jaxpar.shardings_from_paths(params, mesh, {"**": jaxpar.replicated()})
    )
    loss = lambda outputs, batch: (jnp.sum(outputs), jnp.float32(len(outputs)))
    grad = jaxpar.value_and_grad(model, loss, mesh, num_microbatches=2, zero=zero)
    value, grads = jax.jit(grad)(
        sharded, jaxpar.shard_batch({"x": np.ones((8, 1), np.float32)}, mesh)
    )
    assert value == 1
    np.testing.assert_array_equal(jaxpar.fetch(grads["outer"]["z"]), np.zeros(4))


@pytest.mark.parametrize("max_grad_norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_would_clip_all_is_refused(mesh, max_grad_norm):
    with pytest.raises(
        ValueError, match=r"max_grad_norm must be positive; got .*Leave it out to clip nothing"
    ):
        make_step(mesh, max_grad_norm=max_grad_norm)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(
    mesh, adam_step, state, broken
):
    state, _ = adam_step(state, on_mesh(mesh))
    before = copy_of(state)
    features = tiny.make_batch()["features"]
    features[17, 2] = broken  # one number, on one of the replicas
    state, metrics = adam_step(state, on_mesh(mesh, features=features))
    assert_same_bits((state.params, state.opt_state), (before.params, before.opt_state))
    assert (int(state.step), int(state.num_skipped), float(metrics["skipped"])) == (2, 1, 1.0)


def test_training_goes_on_after_a_skipped_step(mesh, adam_step, state):
    state, _ = adam_step(
        state, on_mesh(mesh, features=np.full_like(tiny.make_batch()["features"], np.nan))
    )
    before = copy_of(state.params)
    state, metrics = adam_step(state, on_mesh(mesh))
    assert distance(state.params, before) > 0
    assert (int(state.step), int(state.num_skipped), float(metrics["skipped"])) == (2, 1, 0.0)


def test_a_batch_of_no_weight_changes_nothing(mesh, adam_step, state):
    before = copy_of(state.params)
    state, metrics = adam_step(state, on_mesh(mesh, weight=np.zeros(tiny.NUM_ROWS, np.float32)))
    assert_same_bits(state.params, before)
    assert metrics["skipped"] == 1


def test_training_lowers_the_loss(mesh, adam_step, state):
    losses = []
    for _ in range(30):
        state, metrics = adam_step(state, on_mesh(mesh))
        losses.append(float(metrics["loss"]))
    assert losses[-1] < 0.7 * losses[0], losses
