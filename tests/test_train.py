"""The training step and the state that it changes."""

import logging

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
import tiny
from jax.sharding import NamedSharding, PartitionSpec
from oracle import assert_same, assert_same_bits, distance

import jaxpar
from jaxpar.inspect import inspect_step
from jaxpar.models import mlp
from jaxpar.params import init_params
from jaxpar.train import abstract_state

ADAM = optax.adam(1e-2)
KEY = jax.random.key(3)


@pytest.fixture(scope="module")
def mesh():
    return jaxpar.make_mesh(data=2, tensor=2)


def make_state(mesh, optimizer=ADAM):
    return jaxpar.init_state(tiny.init, KEY, optimizer, mesh, tiny.shardings(mesh, jax.eval_shape(tiny.init, KEY)))


@pytest.fixture(scope="module")
def first_state(mesh):
    """The first state, not to be donated."""
    return make_state(mesh)


@pytest.fixture
def state(first_state):
    """A copy of it, for a test to use up: sparing a compilation."""
    return jaxpar.shard(copy_of(first_state), jax.tree.map(lambda leaf: leaf.sharding, first_state))


def make_step(mesh, optimizer=ADAM, **options):
    return jaxpar.make_train_step(jaxpar.value_and_grad(tiny.MODEL, tiny.loss, mesh), optimizer, **options)


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
    assert all(leaf.sharding.is_fully_replicated for leaf in (state.step, adam.count, state.num_skipped))


def test_no_device_ever_holds_a_split_param_whole(monkeypatch):
    mesh, table = jaxpar.make_mesh(tensor=8), mlp.param_table(8, 4, width=256, num_hidden=4)
    init = lambda key: init_params(table, key)
    compiled, jit = [], jax.jit
    with monkeypatch.context() as patch:
        patch.setattr(jax, "jit", lambda *args, **options: compiled.append(jit(*args, **options)) or compiled[-1])
        jaxpar.init_state(init, KEY, optax.sgd(0.1), mesh, tiny.shardings(mesh, jax.eval_shape(init, KEY)))
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


def test_a_factored_state_is_whole_where_its_shape_is_not_that_of_the_param(mesh):
    optimizer = optax.adafactor(1e-2, min_dim_size_to_factor=4)
    state = abstract_state(tiny.init, KEY, optimizer, mesh, tiny.shardings(mesh, jax.eval_shape(tiny.init, KEY)))
    factored = jax.tree.leaves(state.opt_state[0].v_row["layers"]["w_up"])
    assert [leaf.shape for leaf in factored] == [(2, 8)]
    assert factored[0].sharding.is_fully_replicated


def test_the_abstract_state_is_that_of_init_state(mesh, first_state):
    shardings = tiny.shardings(mesh, jax.eval_shape(tiny.init, KEY))
    abstract = abstract_state(tiny.init, KEY, ADAM, mesh, shardings)
    for want, got in zip(jax.tree.leaves(abstract), jax.tree.leaves(first_state), strict=True):
        assert (want.shape, want.dtype) == (got.shape, got.dtype)
        assert got.sharding.is_equivalent_to(want.sharding, got.ndim)


def test_shardings_of_another_structure_are_refused(mesh):
    message = (
        r"shardings must have the structure of the params; got .* for .*Make them with jaxpar.shardings_from_paths"
    )
    with pytest.raises(ValueError, match=message):
        jaxpar.init_state(tiny.init, KEY, ADAM, mesh, {"outer": NamedSharding(mesh, PartitionSpec())})


# --- the step -----------------------------------------------------------------------------------------------------------


def test_metrics_are_loss_gradient_norm_and_skipped_in_float32(mesh, adam_step, state):
    want_loss, grads = tiny.reference(copy_of(state.params), tiny.make_batch())
    _, metrics = adam_step(state, on_mesh(mesh))
    want = {"loss": want_loss, "grad_norm": optax.tree.norm(grads), "skipped": np.float32(0)}
    assert_same(metrics, want, within=1e-5)


def test_the_state_is_donated(mesh, adam_step, state):
    new, _ = adam_step(state, on_mesh(mesh))
    assert all(leaf.is_deleted() for leaf in jax.tree.leaves((state.params, state.opt_state)))
    assert new.step == 1


def test_the_new_state_keeps_the_shardings_of_the_old_one(mesh, adam_step, state):
    before = jax.tree.map(lambda leaf: leaf.sharding, state)
    after, _ = adam_step(state, on_mesh(mesh))
    assert jax.tree.map(lambda leaf: leaf.sharding, after) == before


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
    assert "donor" in (text := make_step(mesh).lower(abstract, on_mesh(mesh)).as_text()) or "alias" in text


@pytest.mark.parametrize("max_grad_norm", [0.05, 100.0], ids=["clips", "leaves"])
def test_clipping_under_sharding_is_that_of_one_device(mesh, first_state, max_grad_norm):
    optimizer = optax.sgd(1.0)
    params = copy_of(first_state.params)
    state = jaxpar.init_state(
        lambda _: jax.tree.map(jnp.asarray, params), KEY, optimizer, mesh, tiny.shardings(mesh, params)
    )
    _, grads = tiny.reference(params, tiny.make_batch())
    clipped, _ = optax.clip_by_global_norm(max_grad_norm).update(grads, optax.EmptyState())
    want = jax.tree.map(lambda p, g: p - g, params, clipped)
    new, metrics = make_step(mesh, optimizer, max_grad_norm=max_grad_norm)(state, on_mesh(mesh))
    assert_same(new.params, want, within=1e-5)
    assert_same(metrics["grad_norm"], optax.tree.norm(grads), within=1e-5, message="before clipping")


@pytest.mark.parametrize("max_grad_norm", [0.0, -1.0, float("nan")])
def test_a_norm_that_would_clip_all_is_refused(mesh, max_grad_norm):
    with pytest.raises(ValueError, match=r"max_grad_norm must be positive; got .*Leave it out to clip nothing"):
        make_step(mesh, max_grad_norm=max_grad_norm)


@pytest.mark.parametrize("broken", [np.nan, np.inf])
def test_a_gradient_that_is_not_finite_changes_nothing_and_is_counted(mesh, adam_step, state, broken):
    state, _ = adam_step(state, on_mesh(mesh))
    before = copy_of(state)
    features = tiny.make_batch()["features"]
    features[17, 2] = broken  # one number, on one of the replicas
    state, metrics = adam_step(state, on_mesh(mesh, features=features))
    assert_same_bits((state.params, state.opt_state), (before.params, before.opt_state))
    assert (int(state.step), int(state.num_skipped), float(metrics["skipped"])) == (2, 1, 1.0)


def test_training_goes_on_after_a_skipped_step(mesh, adam_step, state):
    state, _ = adam_step(state, on_mesh(mesh, features=np.full_like(tiny.make_batch()["features"], np.nan)))
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
