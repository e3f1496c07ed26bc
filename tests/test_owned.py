"""Params that replicas own, as experts over `data`: layers send rows to them, and nothing of them is gathered or reduced."""

import functools

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import PartitionSpec as P

import jaxpar
from tests.support.oracle import assert_same, assert_same_bits
from tests.support.tiers import quick

ROWS, SEQ, EMBED, HIDDEN, EXPERTS, LAYERS, VOCAB = 16, 4, 8, 16, 4, 4, 16
OWNED = ("w_up", "w_down")
RULES = {"layers/w_up": P("data", None, "tensor"), "layers/w_down": P("data", "tensor"), "**": P()}
OPTIMIZER = optax.adam(1e-2)


def over_experts(p, xs, expert, num_experts):
    """Each row [n, embed] through its expert; ``num_experts`` for none."""
    order = jnp.argsort(expert, stable=True)
    sizes = jnp.bincount(expert, length=num_experts + 1)[:num_experts]
    hidden = jnp.tanh(jax.lax.ragged_dot(xs[order], p["w_up"], sizes))
    return jax.lax.ragged_dot(hidden, p["w_down"], sizes)[jnp.argsort(order)]


def over_owners(p, xs, expert):
    """Each row to the replica that owns its expert, and the result back: a buffer with room for all rows for each replica."""
    data = jax.lax.axis_size("data")
    own = EXPERTS // data
    to = expert // own
    place = jnp.cumsum(to[:, None] == jnp.arange(data)[None], 0)[jnp.arange(len(to)), to] - 1
    put = lambda a, empty: (
        jnp.full((data, len(xs), *a.shape[1:]), empty, a.dtype).at[to, place].set(a)
    )
    move = lambda a: jax.lax.all_to_all(a, "data", 0, 0)
    rows, experts = (
        move(a).reshape(data * len(xs), *a.shape[2:]) for a in (put(xs, 0), put(expert % own, own))
    )
    return move(over_experts(p, rows, experts, own).reshape(data, len(xs), -1))[to, place]


def layer(p, h):
    xs = h.reshape(-1, EMBED)
    scores = jax.nn.softmax(xs @ p["router"], -1)
    expert = jnp.argmax(scores, -1)
    manual = "data" in jax.sharding.get_abstract_mesh().manual_axes
    of_tokens = over_owners if manual else functools.partial(over_experts, num_experts=EXPERTS)
    ys = jaxpar.row_wise(of_tokens)(p, xs, expert)
    return h + (ys * jnp.max(scores, -1, keepdims=True)).reshape(h.shape)


def embed(outer, batch):
    return outer["tokens"][batch["tokens"]]


MODEL = jaxpar.LayeredModel(embed, layer, lambda outer, h: h @ outer["head"])


def loss(logits, batch):
    return jaxpar.losses.softmax_cross_entropy(logits, batch["targets"])


def init(key, num_layers=LAYERS, dtype=jnp.float64):
    keys = jax.random.split(key, 5)
    normal = lambda key, *shape: 0.5 * jax.random.normal(key, shape, dtype)
    layers = {
        "router": normal(keys[0], num_layers, EMBED, EXPERTS),
        "w_up": normal(keys[1], num_layers, EXPERTS, EMBED, HIDDEN),
        "w_down": normal(keys[2], num_layers, EXPERTS, HIDDEN, EMBED),
    }
    return {
        "outer": {"tokens": normal(keys[3], VOCAB, EMBED), "head": normal(keys[4], EMBED, VOCAB)},
        "layers": layers,
    }


def make_batch(step):
    tokens = np.random.default_rng(step).integers(0, VOCAB, (ROWS, SEQ + 1)).astype(np.int32)
    return {"tokens": tokens[:, :-1], "targets": tokens[:, 1:]}


@jax.jit
def reference(params, batch):
    return jax.value_and_grad(lambda params: jnp.divide(*loss(MODEL.apply(params, batch), batch)))(
        params
    )


class Run:
    """A run on a mesh: its state, its step and its checkpoints."""

    def __init__(
        self,
        axes,
        zero=0,
        optimizer=OPTIMIZER,
        trainable=None,
        init=init,
        layout=None,
        *,
        begins=True,
        **settings,
    ):
        self.mesh, self.layout = jaxpar.make_mesh(**axes), layout
        self.init = init if layout is None else lambda key: layout.pack_params(init(key))
        shapes = jax.eval_shape(self.init, jax.random.key(0))
        shardings = jaxpar.shardings_from_paths(shapes, self.mesh, RULES)
        self.parallel = jaxpar.Parallel(
            self.mesh, shardings, zero=zero, trainable=trainable, layout=layout
        )
        self.given = self.init, jax.random.key(0), optimizer, self.parallel
        self.value_and_grad = jaxpar.value_and_grad(
            MODEL, loss, self.parallel, num_microbatches=2, **settings
        )
        self.step = jaxpar.make_train_step(self.value_and_grad, optimizer, max_grad_norm=0.3)
        self.state = (jaxpar.init_state if begins else jaxpar.abstract_state)(*self.given)

    def train(self, num_steps):
        for _ in range(num_steps):
            batch = jaxpar.shard_batch(make_batch(int(self.state.step)), self.mesh)
            self.state, self.metrics = self.step(self.state, batch)
        return self

    def batch(self):
        return jaxpar.shard_batch(make_batch(0), self.mesh)


@functools.cache
def on_one_device(num_steps, optimizer=OPTIMIZER, init=init, trained=lambda path: True):
    """Params, the optimizer's state and the last loss of clipped steps of plain JAX and optax."""
    params = jax.jit(init)(jax.random.key(0))
    mask = jax.tree_util.tree_map_with_path(
        lambda path, _: trained(jax.tree_util.keystr(path)), params
    )

    @jax.jit
    def one_step(params, opt_state, batch):
        value, grads = reference(params, batch)
        grads = jax.tree.map(lambda g, keep: g * keep, grads, mask)
        scale = jnp.minimum(1, 0.3 / optax.tree.norm(grads))
        updates, opt_state = optimizer.update(
            jax.tree.map(lambda g: g * scale, grads), opt_state, params
        )
        return optax.apply_updates(params, updates), opt_state, value

    opt_state = optimizer.init(params)
    for step in range(num_steps):
        params, opt_state, value = one_step(params, opt_state, make_batch(step))
    return params, opt_state, value


BETWEEN = {"replica": 2, "data": 2}
RUNS = [
    (BETWEEN, 1, {}),
    ({"data": 2, "stage": 2, "tensor": 2}, 3, {"schedule": "gpipe", "mask_idle_ops": True}),
]
SLOW_RUNS = [
    ({"data": 2, "stage": 2, "tensor": 2}, 0, {"schedule": "zb-h1", "mask_idle_ops": False}),
    (BETWEEN, 3, {}),
    ({"replica": 2, "data": 2, "stage": 2}, 1, {"schedule": "1f1b", "mask_idle_ops": True}),
    ({"data": 2, "stage": 2, "tensor": 2}, 3, {"schedule": "zb-h1", "mask_idle_ops": True}),
    (BETWEEN, 0, {}),
    ({"replica": 2, "data": 2, "tensor": 2}, 1, {}),
    ({"data": 4, "stage": 2}, 2, {"schedule": "1f1b", "mask_idle_ops": False}),
    ({"replica": 2, "data": 4}, 3, {}),
]


@pytest.mark.parametrize(
    ("axes", "zero", "settings"),
    quick([*RUNS, *(pytest.param(*each, marks=pytest.mark.slow) for each in SLOW_RUNS)], 0),
)
def test_owned_params_have_the_numbers_of_one_device_and_cross_data_in_all_to_alls_alone(
    x64, axes, zero, settings
):
    """The gradients of three steps are in the moments of Adam."""
    few = init if "stage" in axes else functools.partial(init, num_layers=1)
    run = Run(axes, zero, init=few, **settings)
    run.step = run.step.lower(run.state, run.batch()).compile()
    run.train(3)
    params, opt_state, value = on_one_device(3, init=few)
    assert_same(
        jaxpar.fetch((run.state.params, run.state.opt_state)), (params, opt_state), within=1e-10
    )
    assert_same(run.metrics["loss"], np.float32(value), within=1e-6)
    if axes == BETWEEN:
        check_bytes(run)


def check_bytes(run):
    report = jaxpar.inspect_step(run.step, mesh=run.mesh)
    size = {name: leaf.nbytes for name, leaf in run.state.params["layers"].items()}
    dense = (
        sum(leaf.nbytes for leaf in jax.tree.leaves(run.state.params))
        - size["w_up"]
        - size["w_down"]
    )
    over_data = [
        each for each in report.collectives if "data" in each.axes and each.kind != "all-to-all"
    ]
    assert {each.kind for each in report.collectives if each.axes == ("data",)} >= {"all-to-all"}
    assert max(each.payload_bytes for each in over_data) <= dense + 64, (
        "gradients of params that all replicas have"
    )
    between = sum(
        each.payload_bytes * each.known_times
        for each in report.collectives
        if each.axes == ("replica",)
    )
    owned = (size["w_up"] + size["w_down"]) // 2
    assert between >= owned, "the groups must add up the gradients of what each owns"


@pytest.mark.full
def test_each_replica_holds_its_part_of_params_and_optimizer_state(x64):
    state = Run({"replica": 2, "data": 4}, zero=1).state
    for tree in (state.params, state.opt_state[0].mu):
        held = tree["layers"]["w_up"].addressable_shards[0].data.shape
        assert held == (LAYERS, EXPERTS // 4, EMBED, HIDDEN)


@pytest.fixture
def x64_in_threads():
    """Float64 in all threads, since checkpoints are read in some."""
    jax.config.update("jax_enable_x64", True)
    yield
    jax.config.update("jax_enable_x64", False)


@pytest.mark.full
def test_a_run_goes_on_with_its_experts_on_fewer_devices_and_skips_a_step_that_is_not_finite(
    x64_in_threads, tmp_path
):
    run = Run({"data": 4}, zero=1).train(2)
    manager = jaxpar.CheckpointManager(tmp_path, run.mesh)
    manager.save(run.state)
    manager.wait()
    before = jaxpar.fetch(run.state.params)
    for axes, zero in (({"data": 2, "stage": 2}, 2), ({}, 0)):
        other = Run(axes, zero, begins=False)
        other.state = jaxpar.CheckpointManager(tmp_path, other.mesh).restore(other.state)
        assert_same_bits(jaxpar.fetch(other.state.params), before)
    assert_same(jaxpar.fetch(other.train(1).state.params), on_one_device(3)[0], within=1e-10)

    params = run.state.params
    params["outer"]["head"] = params["outer"]["head"].at[0, 0].set(jnp.nan)
    run.train(1)
    assert int(run.state.num_skipped) == 1
    assert_same_bits(jaxpar.fetch(run.state.params)["layers"], before["layers"])


@pytest.mark.slow
def test_packed_layers_accumulated_steps_and_a_frozen_router(x64):
    uneven, optimizer = (lambda key: init(key, num_layers=3)), optax.MultiSteps(OPTIMIZER, 2)
    trainable = ("layers/w_*", "outer/*")
    layout = jaxpar.LayerLayout(3, 2)
    run = Run({"data": 2, "stage": 2, "replica": 2}, 2, optimizer, trainable, uneven, layout).train(
        4
    )
    got = run.state.params | {"layers": layout.unpack(run.state.params["layers"])}
    masked = optax.MultiSteps(
        optax.masked(
            OPTIMIZER, {"outer": True, "layers": {"router": False, "w_up": True, "w_down": True}}
        ),
        2,
    )
    want = on_one_device(4, masked, uneven, lambda path: "router" not in path)[0]
    assert_same(jaxpar.fetch(got), want, within=1e-10)


@pytest.mark.parametrize(
    ("rule", "why"),
    [
        (P(None, "data"), "no collective over data in the model"),
        (P("data"), "dot_general requires contracting dimensions"),
    ],
    ids=["shapes fit", "shapes do not fit"],
)
def test_a_model_that_sends_nothing_over_data_is_refused(rule, why):
    mesh, params = (
        jaxpar.make_mesh(data=2),
        jax.eval_shape(functools.partial(init, dtype=jnp.float32), jax.random.key(0)),
    )
    model = jaxpar.LayeredModel(embed, lambda p, h: h + h @ p["router"] @ p["router"].T, MODEL.head)
    shardings = jaxpar.shardings_from_paths(params, mesh, {"layers/router": rule, "**": P()})
    message = f"layers/router .* of which a replica has .* and: {why}.*zero=3 shards params over it"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(
            jaxpar.value_and_grad(model, loss, mesh, shardings=shardings), params, make_batch(0)
        )


def test_params_over_replica_and_owned_params_in_mpmd_are_refused():
    mesh = jaxpar.make_mesh(replica=2, data=2, stage=2)
    params = jax.eval_shape(functools.partial(init, dtype=jnp.float32), jax.random.key(0))
    over_replica = jaxpar.shardings_from_paths(
        params, mesh, {"layers/w_up": P("replica"), "**": P()}
    )
    with pytest.raises(
        ValueError, match=r"layers/w_up of .*replica.*Leave replica out of its rule"
    ):
        jaxpar.Parallel(mesh, over_replica)
    owned = jaxpar.shardings_from_paths(params, mesh, RULES)
    with pytest.raises(
        ValueError, match=r'replicates params over data; got layers/w_.* Use executor="spmd"'
    ):
        jaxpar.value_and_grad(MODEL, loss, mesh, shardings=owned, executor="mpmd")


def if_split(axis, send, otherwise=0.0):
    """What is sent over an axis where a step splits it, as the page writes layers that send rows to owners."""
    is_split = axis in jax.sharding.get_abstract_mesh().manual_axes
    return send() if is_split else otherwise


SENT = {
    "layer over data": ("data", "layer", lambda h: if_split("data", lambda: jax.lax.psum(h, "data"))),
    "layer by device": ("data", "layer", lambda h: if_split("data", lambda: h * jax.lax.axis_index("data"))),
    "layer over stage": ("stage", "layer", lambda h: if_split("stage", lambda: jax.lax.psum(h, "stage"))),
    "embedding over replica": ("replica", "embed", lambda h: if_split("replica", lambda: jax.lax.pmean(h, "replica"))),
}  # fmt: skip


def sending(part, send):
    plus = lambda function: lambda *given: (lambda h: h + send(h))(function(*given))
    plain = {"embed": embed, "layer": lambda p, h: h + jnp.tanh(h @ p["router"]) @ p["router"].T}
    parts = plain | {part: plus(plain[part])}
    return jaxpar.LayeredModel(**parts, head=MODEL.head)


@pytest.mark.parametrize("name", SENT)
def test_what_is_sent_without_an_owned_param_is_refused_with_its_line(name):
    axis, part, send = SENT[name]
    mesh = jaxpar.make_mesh(**{"data": 2, axis: 2})
    params = init(jax.random.key(0), dtype=jnp.float32)
    step = jaxpar.value_and_grad(sending(part, send), loss, mesh, num_microbatches=2)
    message = rf"must send nothing over {axis}, .*; got \w+ at .*test_owned.py"
    with pytest.raises(ValueError, match=message):
        jax.eval_shape(step, params, jaxpar.shard_batch(make_batch(0), mesh))


def test_a_loss_sends_nothing_beside_params_that_are_owned():
    run = Run({"data": 2}, init=functools.partial(init, dtype=jnp.float32), begins=False)
    total = lambda x: if_split("data", lambda: jax.lax.psum(x, "data"), x)
    summed = lambda *given: tuple(map(total, loss(*given)))
    step = jaxpar.value_and_grad(MODEL, summed, run.parallel)
    with pytest.raises(ValueError, match=r"must send nothing over data, .*; got psum\w* at "):
        jax.eval_shape(step, run.state.params, run.batch())


def test_rows_that_are_sent_without_shardings_are_told_what_value_and_grad_lacks():
    def layer(p, h):
        rows = jnp.broadcast_to(h[None], (EXPERTS // len(p["w_up"]), *h.shape))
        return if_split("data", lambda: jax.lax.all_to_all(rows, "data", 0, 0)[0], h)

    model = jaxpar.LayeredModel(embed, layer, MODEL.head)
    params = init(jax.random.key(0), dtype=jnp.float32)
    mesh = jaxpar.make_mesh(data=2)
    with pytest.raises(ValueError, match="all_to_all") as raised:
        jax.eval_shape(
            jaxpar.value_and_grad(model, loss, mesh),
            params,
            jaxpar.shard_batch(make_batch(0), mesh),
        )
    told = "\n".join(raised.value.__notes__)
    assert "Layers that send rows to the owners of a param need jaxpar.Parallel" in told
