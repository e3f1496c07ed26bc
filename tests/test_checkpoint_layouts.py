"""A run saved in one layout of layers and devices goes on in any other, from the same values."""

import dataclasses

import jax
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar.checkpoint.checksums import check_arrays
from jaxpar.models import mlp
from jaxpar.params import init_params
from jaxpar.schedule import make_schedule
from tests.support import tiny
from tests.support.oracle import assert_same, assert_same_bits

NUM_LAYERS, STEPS_BEFORE, STEPS_AFTER = 8, 3, 3
OPTIMIZER = optax.adam(1e-2)


class Run:
    """A run of one layout: its packed state, its step, its checkpoints."""

    def __init__(
        self,
        folder,
        schedule="1f1b",
        num_chunks=1,
        zero=0,
        layers_per_virtual_stage=None,
        num_layers=NUM_LAYERS,
        **sizes,
    ):
        self.mesh = jaxpar.make_mesh(**sizes)
        stage = self.mesh.shape["stage"]
        schedule = make_schedule(schedule, stage, 4, num_chunks)
        table = mlp.param_table(
            tiny.NUM_FEATURES, tiny.NUM_CLASSES, width=8, num_hidden=2 * num_layers
        )
        self.layout = jaxpar.LayerLayout(
            num_layers, stage, num_chunks, schedule.placement, layers_per_virtual_stage
        )

        def init(key):
            params = init_params(table, key)
            return params | {"layers": self.layout.pack(params["layers"])}

        packed = jax.eval_shape(init, jax.random.key(0))
        shardings = jaxpar.shardings_from_paths(packed, self.mesh, tiny.RULES)
        self.first = (init, jax.random.key(0), OPTIMIZER, self.mesh, shardings)
        self.zero = zero
        own_layout = None if self.layout.is_canonical else self.layout
        value_and_grad = jaxpar.value_and_grad(
            tiny.MODEL,
            tiny.loss,
            self.mesh,
            schedule=schedule,
            num_microbatches=4,
            layout=own_layout,
            zero=zero,
            shardings=shardings,
        )
        self.step = jaxpar.make_train_step(value_and_grad, OPTIMIZER)
        self.manager = jaxpar.CheckpointManager(folder, self.mesh, layout=self.layout)

    def begin(self):
        self.state = jaxpar.init_state(*self.first, zero=self.zero)
        return self

    def resume(self):
        self.state = self.manager.restore(jaxpar.abstract_state(*self.first, zero=self.zero))
        return self

    def train(self, num_steps):
        losses = []
        for _ in range(num_steps):
            batch = tiny.make_batch(int(self.state.step))
            self.state, metrics = self.step(self.state, jaxpar.shard_batch(batch, self.mesh))
            losses.append(float(metrics["loss"]))
        return losses

    def digests(self):
        from jaxpar.checkpoint.state import to_canonical

        return {p: c.checksum for p, c in check_arrays(to_canonical(self.state), self.mesh).items()}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Digests of a run on 8 devices in a zb-v pipeline of two chunks, saved in the folder, and the losses that followed."""
    folder = tmp_path_factory.mktemp("saved")
    run = Run(folder, "zb-v", num_chunks=2, data=2, stage=4).begin()
    assert not run.layout.is_canonical
    run.train(STEPS_BEFORE)
    run.manager.save(run.state)
    return folder, run.digests(), run.train(STEPS_AFTER)


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    "where",
    [
        {"data": 4, "tensor": 2},
        pytest.param({"tensor": 8}, marks=pytest.mark.slow),
        {"stage": 8},
        pytest.param({}, marks=pytest.mark.slow),
        pytest.param(
            {"data": 2, "stage": 4, "schedule": "zb-v", "num_chunks": 2}, marks=pytest.mark.slow
        ),
        pytest.param(
            {
                "data": 2,
                "stage": 2,
                "tensor": 2,
                "schedule": "interleaved",
                "num_chunks": 2,
                "zero": 3,
            },
            marks=pytest.mark.slow,
        ),
    ],
    ids=str,
)
def test_a_run_goes_on_in_another_layout_from_the_same_values(saved, where):
    folder, digests, losses = saved
    run = Run(folder, **where).resume()
    assert run.digests() == digests
    assert int(run.state.step) == STEPS_BEFORE
    assert_same(run.train(STEPS_AFTER), losses, within=1e-6)


@pytest.mark.full
def test_layers_that_do_not_share_out_evenly_are_saved_in_the_models_order(tmp_path):
    run = Run(tmp_path, stage=4, layers_per_virtual_stage=(1, 2, 2, 2), num_layers=7).begin()

    @jax.jit
    def step(state):  # with the params as gradients, so that every moment has values
        _, opt_state = OPTIMIZER.update(state.params, state.opt_state)
        return dataclasses.replace(state, opt_state=opt_state, step=state.step + 1)

    run.state = step(run.state)
    run.manager.save(run.state)
    assert run.manager.manifest(1).arrays["params/layers/w_up"].shape[0] == 7
    other = Run(tmp_path, num_layers=7, data=2).resume()
    assert other.digests() == run.digests()
    back = Run(tmp_path, stage=4, layers_per_virtual_stage=(1, 2, 2, 2), num_layers=7).resume()
    assert_same_bits(back.state, run.state)


def test_factored_moments_of_packed_layers_are_saved_in_the_models_order(tmp_path):
    mesh, layout = jaxpar.make_mesh(stage=2, devices=jax.devices()[:2]), jaxpar.LayerLayout(3, 2)
    weights = np.float32(np.random.default_rng(0).normal(size=(3, 16, 12)))
    optimizer = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    init = {
        "packed": lambda key: {"layers": layout.pack({"w": weights}), "outer": {}},
        "plain": lambda key: {"layers": {"w": weights}, "outer": {}},
    }

    def of(name, mesh):
        rules = {"layers/w": PartitionSpec("stage" if mesh.shape["stage"] > 1 else None)}
        shardings = jaxpar.shardings_from_paths(jax.eval_shape(init[name], 0), mesh, rules)
        return jaxpar.init_state(init[name], jax.random.key(0), optimizer, mesh, shardings)

    state = of("packed", mesh)
    _, opt_state = optimizer.update(state.params, state.opt_state, state.params)
    state = dataclasses.replace(state, opt_state=opt_state, step=state.step + 1)
    jaxpar.CheckpointManager(tmp_path, mesh, layout=layout).save(state)
    alone = jaxpar.make_mesh(devices=jax.devices()[:1])
    plain = of("plain", alone)
    found = jaxpar.CheckpointManager(tmp_path, alone).restore(plain)
    _, want = optimizer.update(plain.params, plain.opt_state, plain.params)
    for got, wanted in zip(jax.tree.leaves(found.opt_state), jax.tree.leaves(want), strict=True):
        np.testing.assert_allclose(got, wanted, rtol=1e-6)


def _as_leaves(optimizer):
    """The optimizer with the state of a list of the params' leaves, which hides what is of layers."""
    flat = jax.tree.leaves
    return optax.GradientTransformation(
        lambda params: optimizer.init(flat(params)),
        lambda grads, state, params=None: (
            lambda made: (jax.tree.unflatten(jax.tree.structure(grads), made[0]), made[1])
        )(optimizer.update(flat(grads), state, flat(params))),
    )


@pytest.mark.parametrize(
    ("optimizer", "got"),
    [
        (_as_leaves(optax.adam(0.1)), r"\[\d+, 4, 6\] for opt_state/0/mu/0,"),
        (optax.flatten(optax.sgd(0.1, momentum=0.9)), r"\[\d+\] for opt_state/0/trace,"),
        (optax.inject_hyperparams(optax.adam)(0.1), None),
    ],
    ids=["leaves", "flatten", "numbers"],
)
@pytest.mark.parametrize(
    "layout",
    [jaxpar.LayerLayout(8, 4, 2), jaxpar.LayerLayout(7, 4)],
    ids=["reordered", "padded"],
)
def test_state_of_packed_layers_in_a_tree_of_its_own_is_refused_and_kept_in_the_models_order(
    optimizer, got, layout, tmp_path
):
    """Nothing shows that its numbers are of layers: another layout would give each layer the state of another."""
    mesh = jaxpar.make_mesh(stage=4)
    layers = {"w": np.ones((layout.num_layers, 4, 6), np.float32)}
    canonical = {"layers": layers, "outer": {"b": np.ones(6, np.float32)}}
    packed = layout.pack_params(canonical)

    def state_of(params, mesh):
        rules = {"layers/w": PartitionSpec(), "outer/b": PartitionSpec()}
        shardings = jaxpar.shardings_from_paths(params, mesh, rules)
        return jaxpar.init_state(lambda key: params, jax.random.key(0), optimizer, mesh, shardings)

    manager = jaxpar.CheckpointManager(tmp_path, mesh, layout=layout)
    if got is None:
        manager.save(state_of(packed, mesh))
        return
    with pytest.raises(ValueError, match=rf"must have the tree of the params.*; got {got}"):
        manager.save(state_of(packed, mesh))
    alone = jaxpar.make_mesh(devices=jax.devices()[:1])
    plain = jaxpar.CheckpointManager(tmp_path, alone)
    plain.save(state_of(canonical, alone))
    assert_same_bits(plain.restore(state_of(canonical, alone)), state_of(canonical, alone))
    with pytest.raises(ValueError, match="must have the tree of the params"):
        manager.restore(state_of(packed, mesh))


def test_what_cannot_be_put_in_the_models_order_is_refused(tmp_path):
    mesh = jaxpar.make_mesh(stage=4)
    layout = jaxpar.LayerLayout(8, 4, num_chunks=2)
    params = {"layers": layout.pack({"w": np.zeros((8, 4, 6), np.float32)}), "outer": {}}
    shardings = jaxpar.shardings_from_paths(params, mesh, {"layers/w": PartitionSpec()})
    optimizer = optax.scale_by_factored_rms(min_dim_size_to_factor=2)
    state = jaxpar.init_state(lambda key: params, jax.random.key(0), optimizer, mesh, shardings)
    with pytest.raises(
        ValueError,
        match=r"optimizer state of packed layers must be of each layer, \[8, \.\.\.\], .*; got \[4, 6\] for",
    ):
        jaxpar.CheckpointManager(tmp_path, mesh, layout=layout).save(state)
