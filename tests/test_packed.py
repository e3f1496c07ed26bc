"""Packed layers are a type of their own: they work as pytrees, and functions that need the model's order refuse them."""

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest

import jaxpar
from jaxpar import LayerLayout, PackedLayers
from jaxpar.checkpoint import CheckpointManager, export_orbax, export_safetensors
from jaxpar.layered_model import open_packed
from jaxpar.models import mlp, transformer
from jaxpar.params import abstract_params, count_params, init_params
from jaxpar.sharding import path_string
from tests.support import oracle, tiny

NUM_LAYERS = 5
TABLE = mlp.param_table(tiny.NUM_FEATURES, tiny.NUM_CLASSES, width=8, num_hidden=2 * NUM_LAYERS)
IN_A_V = LayerLayout(NUM_LAYERS, 2, 2, "v")
IN_A_LOOP = LayerLayout(NUM_LAYERS, 2, 2, layers_per_virtual_stage=(1, 2, 0, 2))
UNEVEN = LayerLayout(NUM_LAYERS, 2)
EVEN = LayerLayout(4, 2)
ABSTRACT = abstract_params(TABLE)


def zeros(table):
    return jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), abstract_params(table))


# Layouts that change the order alone: what takes their layers for the model's has the shapes that it wants.
PERMUTED, PERMUTED_OTHERWISE = LayerLayout(4, 2, 2, "v"), LayerLayout(4, 2, 2)
IN_ORDER = zeros(mlp.param_table(tiny.NUM_FEATURES, tiny.NUM_CLASSES, width=8, num_hidden=8))
PACKED = PERMUTED.pack_params(IN_ORDER)
GPT = transformer.preset("gpt2-bytes", num_layers=4, embed_dim=8, num_heads=2, mlp_dim=8)
PACKED_GPT = PERMUTED.pack_params(zeros(transformer.param_table(GPT)))


def make_params(seed=0, dtype=np.float64):
    return tiny.draw_params(NUM_LAYERS, seed, dtype)


def abstract_batch():
    return jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), tiny.make_batch())


def make_value_and_grad(model=tiny.MODEL, *, stage=2, **options):
    return jaxpar.value_and_grad(
        model, tiny.loss, jaxpar.make_mesh(stage=stage), num_microbatches=2, **options
    )


# The node


@pytest.mark.parametrize(
    "layers",
    [
        {"w": np.ones((5, 2)), "norm": {"scale": np.ones(5)}},
        (np.ones(5), {"b": np.ones((5, 1))}),
        {"w": np.ones(5), "none": None},
        {},
    ],
    ids=["nested", "tuple", "none", "empty"],
)
def test_leaves_of_packed_layers_have_the_paths_that_they_have_unpacked(layers):
    paths = lambda tree: [
        path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path({"layers": tree})
    ]
    packed = UNEVEN.pack(layers)
    assert paths(packed) == paths(layers)
    assert isinstance(jax.tree.map(lambda leaf: leaf, packed), PackedLayers)
    back = UNEVEN.unpack(jax.tree.map(np.asarray, packed))
    assert jax.tree.structure(back) == jax.tree.structure(layers)


def test_layers_that_are_one_array_can_be_packed():
    packed = jax.jit(lambda packed: jax.tree.map(jnp.negative, packed))(UNEVEN.pack(np.arange(5.0)))
    np.testing.assert_array_equal(UNEVEN.unpack(packed), -np.arange(5.0))


def test_trees_packed_by_different_layouts_do_not_mix():
    layers = {"w": np.ones((NUM_LAYERS, 2))}
    one, same, other = (
        layout.pack(layers)
        for layout in (IN_A_V, LayerLayout(5, 2, 2, "v", [2, 1, 1, 1]), IN_A_LOOP)
    )
    assert jax.tree.structure(one) == jax.tree.structure(same)
    jax.tree.map(np.add, one, same)
    with pytest.raises(ValueError, match="PackedLayers"):
        jax.tree.map(np.add, one, other)


def test_layouts_that_place_layers_alike_are_equal():
    assert LayerLayout(6, 2, end_layers=(0, 2)) == LayerLayout(
        6, 2, layers_per_virtual_stage=(4, 2)
    )


@pytest.mark.parametrize(
    "read",
    [
        lambda p: p["w"],
        lambda p: list(p),
        lambda p: "w" in p,
        lambda p: [*p],
        lambda p: {**p},
        lambda p: dict(p),
    ],
)
def test_packed_layers_cannot_be_read_as_layers(read):
    with pytest.raises(
        TypeError, match=r"cannot be indexed; got .* num_stages=2.* Unpack them: layout\.unpack"
    ):
        read(UNEVEN.pack({"w": np.ones((NUM_LAYERS, 2))}))


def test_a_loop_of_ones_own_over_packed_layers_is_refused():
    def apply(params, x):
        return jax.lax.scan(lambda x, layer: (mlp.layer(layer, x), None), x, params["layers"])[0]

    with pytest.raises(
        TypeError, match="packed layers are in the order of the devices and cannot be indexed"
    ):
        jax.eval_shape(apply, PACKED, jnp.ones((3, 8)))


# Functions that need the model's order

REFUSES = {
    "apply": lambda tmp: jax.eval_shape(tiny.MODEL.apply, PACKED, tiny.make_batch()),
    "num_layers": lambda tmp: jaxpar.layered_model.num_layers(PACKED),
    "count_params": lambda tmp: count_params(PACKED),
    "pack": lambda tmp: PERMUTED.pack_params(PACKED),
    "generate": lambda tmp: transformer.generate(GPT, PACKED_GPT, [[1, 2]], 3),
    "safetensors": lambda tmp: export_safetensors(tmp / "new", PACKED),
    "orbax": lambda tmp: export_orbax(tmp / "new", PACKED),
    "a pipeline": lambda tmp: make_value_and_grad()(PACKED, tiny.make_batch()),
    "the MPMD executor": lambda tmp: make_value_and_grad(executor="mpmd")(
        PACKED, tiny.make_batch()
    ),
    "one stage": lambda tmp: make_value_and_grad(stage=1)(PACKED, tiny.make_batch()),
    "layer by layer": lambda tmp: make_value_and_grad(stage=1, overlap_grad_reduce=True)(
        PACKED, tiny.make_batch()
    ),
    "a function": lambda tmp: make_value_and_grad(
        lambda p, b: jnp.ones((len(b["label"]), 5)), stage=1
    )(PACKED, tiny.make_batch()),
    "shardings": lambda tmp: make_value_and_grad(
        shardings=jaxpar.shardings_from_paths(PACKED, jaxpar.make_mesh(stage=2), tiny.RULES)
    ),
}


@pytest.mark.parametrize("case", REFUSES)
def test_what_wants_the_models_order_refuses_packed_layers(tmp_path, case):
    told = r"layers must be in the model's order here; got layers packed for .*num_stages=2, .* at (layers|the top)\. "
    with pytest.raises(
        TypeError, match=rf'{told}Unpack them: layout\.unpack\(params\["layers"\]\)'
    ):
        REFUSES[case](tmp_path)
    assert not (tmp_path / "new").exists()


def test_the_layers_of_an_adapter_refuse_packed_layers():
    linen = pytest.importorskip("flax.linen")
    init, apply = jaxpar.adapters.from_linen(linen.Dense(3), np.ones((2, 3), np.float32))
    shapes = jax.eval_shape(jax.vmap(init), jax.random.split(jax.random.key(0), NUM_LAYERS))
    layers = jax.tree.map(lambda leaf: np.zeros(leaf.shape, leaf.dtype), shapes)
    with pytest.raises(TypeError, match="layers must be in the model's order here"):
        jax.lax.scan(
            lambda x, layer: (apply(layer, x), None), jnp.ones((2, 3)), UNEVEN.pack(layers)
        )


# Functions that need packed layers

GIVEN = {
    "canonical params": (
        lambda: IN_ORDER,
        TypeError,
        r"got dict, not PackedLayers, for .*Pack them: params \| .*layout\.pack",
    ),
    "another layout": (
        lambda: PERMUTED_OTHERWISE.pack_params(IN_ORDER),
        ValueError,
        r"got layers packed by LayerLayout.*'loop'.* for LayerLayout.*'v'.*Give the layout that packed",
    ),
}


@pytest.mark.parametrize("executor", ["spmd", "mpmd"])
@pytest.mark.parametrize("case", GIVEN)
def test_a_step_with_a_layout_takes_what_it_packed_alone(case, executor):
    make, kind, told = GIVEN[case]
    with pytest.raises(
        kind, match=f"layers must be packed by the layout that comes with them; {told}"
    ):
        make_value_and_grad(layout=PERMUTED, schedule="zb-v", executor=executor)(
            make(), tiny.make_batch()
        )


@pytest.mark.parametrize("case", GIVEN)
def test_unpack_takes_what_its_layout_packed_alone(case):
    make, kind, told = GIVEN[case]
    with pytest.raises(kind, match=told):
        PERMUTED.unpack_params(make())


def test_a_step_with_an_even_layout_refuses_what_another_packed():
    params = abstract_params(
        mlp.param_table(tiny.NUM_FEATURES, tiny.NUM_CLASSES, width=8, num_hidden=8)
    )
    packed = jax.eval_shape(LayerLayout(4, 2, 2).pack_params, params)
    with pytest.raises(ValueError, match=r"got layers packed by .*num_chunks=2"):
        make_value_and_grad(layout=EVEN)(packed, abstract_batch())


def test_a_step_refuses_shardings_of_another_layout():
    packed = jax.eval_shape(IN_A_V.pack_params, ABSTRACT)
    shardings = jaxpar.shardings_from_paths(packed, jaxpar.make_mesh(stage=2), tiny.RULES)
    with pytest.raises(
        ValueError, match="layers must be packed by the layout that comes with them"
    ):
        make_value_and_grad(layout=UNEVEN, shardings=shardings)


@pytest.mark.parametrize(
    ("order", "told"), [("pack", "num_layers=5"), ("unpack", "num_positions=6")]
)
def test_layers_of_another_number_are_named(order, told):
    seven = {"w": np.ones((7, 2))}
    given = seven if order == "pack" else UNEVEN.as_packed(seven)
    with pytest.raises(
        ValueError, match=rf"got shape \(7, 2\) for \['w'\], {told} of .*Make a LayerLayout"
    ):
        getattr(UNEVEN, order)(given)


# Training works on them


@pytest.mark.full
@pytest.mark.parametrize(
    ("executor", "schedule", "layout"),
    [
        ("spmd", "interleaved", IN_A_LOOP),
        ("mpmd", "zb-v", IN_A_V),
        pytest.param("spmd", "zb-v", IN_A_V, marks=pytest.mark.slow),
        pytest.param("spmd", "1f1b", UNEVEN, marks=pytest.mark.slow),
        pytest.param("mpmd", "interleaved", IN_A_LOOP, marks=pytest.mark.slow),
        pytest.param("mpmd", "1f1b", UNEVEN, marks=pytest.mark.slow),
    ],
)
def test_packed_params_give_packed_gradients_that_equal_one_device(x64, executor, schedule, layout):
    params, batch, mesh = (
        make_params(),
        tiny.make_batch(dtype=np.float64),
        jaxpar.make_mesh(data=2, stage=2),
    )
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL,
        tiny.loss,
        mesh,
        schedule=schedule,
        num_microbatches=4,
        layout=layout,
        executor=executor,
    )
    packed = tiny.on_mesh(mesh, layout.pack_params(params))
    loss, grads = value_and_grad(packed, jaxpar.shard_batch(batch, mesh))
    assert jax.tree.structure(grads) == jax.tree.structure(packed)
    assert not any(
        leaf[layout.packed_order < 0].any()
        for leaf in jax.tree.leaves(jaxpar.fetch(grads["layers"]))
    )
    oracle.assert_same((loss, layout.unpack_params(grads)), tiny.reference(params, batch))


def test_an_even_layout_leaves_params_as_they_are():
    params = abstract_params(
        mlp.param_table(tiny.NUM_FEATURES, tiny.NUM_CLASSES, width=8, num_hidden=8)
    )
    assert EVEN.pack(params["layers"]) is params["layers"]
    assert EVEN.unpack(params["layers"]) is params["layers"]
    _, grads = jax.eval_shape(make_value_and_grad(layout=EVEN), params, abstract_batch())
    assert jax.tree.structure(grads) == jax.tree.structure(params)


@pytest.mark.full
@pytest.mark.parametrize("zero", [pytest.param(0, marks=pytest.mark.slow), 3])
def test_packed_layers_train_as_one_device_does(x64, zero):
    """A state is packed at birth, its optimizer looks at paths, its step donates it: all through the node."""

    def is_weight(params):
        return jax.tree_util.tree_map_with_path(
            lambda path, _: path[-1].key.startswith("w_"), params
        )

    layout, mesh = IN_A_V, jaxpar.make_mesh(data=2, stage=2, tensor=2)
    params, optimizer = make_params(), optax.adamw(1e-2, weight_decay=0.1, mask=is_weight)
    init = lambda key: layout.pack_params(jax.tree.map(jnp.asarray, params))
    key = jax.random.key(0)
    shardings = jaxpar.shardings_from_paths(jax.eval_shape(init, key), mesh, tiny.RULES)
    assert shardings["layers"].tree["w_up"].spec == jax.P("stage", None, "tensor")
    state = jaxpar.init_state(init, key, optimizer, mesh, shardings, zero=zero)
    value_and_grad = jaxpar.value_and_grad(
        tiny.MODEL,
        tiny.loss,
        mesh,
        schedule="zb-v",
        num_microbatches=4,
        zero=zero,
        layout=layout,
        shardings=shardings,
    )
    step = jaxpar.make_train_step(value_and_grad, optimizer, max_grad_norm=1.0)
    clipping = optax.chain(optax.clip_by_global_norm(1.0), optimizer)
    want, opt_state, update = params, clipping.init(params), tiny.update_on_one_device(clipping)
    for number in range(2):
        batch = tiny.make_batch(number, np.float64)
        state, _ = step(state, jaxpar.shard_batch(batch, mesh))
        want, opt_state = update(tiny.reference(want, batch)[1], opt_state, want)
    moments = open_packed(state.opt_state[0].mu)["layers"]["w_up"]
    assert moments.sharding.spec == jax.P(
        "stage", *(("data", "tensor") if zero else (None, "tensor"))
    )
    oracle.assert_same(layout.unpack_params(state.params), want, within=1e-10)


def test_the_remedy_for_layers_that_the_stages_do_not_divide_works():
    mesh, params = jaxpar.make_mesh(stage=2), make_params(dtype=np.float32)
    told = r"got 5 layers in layers/b_down of shape \(5, 8\), stage=2\. Pack them, .*jaxpar\.LayerLayout\(5, 2\)"
    with pytest.raises(ValueError, match=told):
        jaxpar.shardings_from_paths(params, mesh, tiny.RULES)
    layout = jaxpar.LayerLayout(5, 2)
    shardings = jaxpar.shardings_from_paths(
        jax.eval_shape(layout.pack_params, params), mesh, tiny.RULES
    )
    params = layout.pack_params(params)
    value_and_grad = make_value_and_grad(layout=layout)
    _, grads = jax.eval_shape(value_and_grad, jaxpar.shard(params, shardings), abstract_batch())
    assert jax.tree.structure(grads) == jax.tree.structure(params)


# Checkpoints


def abstract_state(layout, mesh):
    """The shapes of a state in a layout; None: in the model's order."""
    init = lambda key: (
        init_params(TABLE, key) if layout is None else layout.pack_params(init_params(TABLE, key))
    )
    key = jax.random.key(0)
    shardings = jaxpar.shardings_from_paths(jax.eval_shape(init, key), mesh, tiny.RULES)
    return jaxpar.abstract_state(init, key, optax.adam(1e-2), mesh, shardings)


def canonical(state, layout):
    unpack = lambda node: layout.unpack(node) if isinstance(node, PackedLayers) else node
    return jax.tree.map(
        unpack, jaxpar.fetch(state), is_leaf=lambda node: isinstance(node, PackedLayers)
    )


@pytest.mark.full
def test_a_state_goes_from_one_layout_through_the_models_order_to_another(tmp_path):
    mesh, rng = jaxpar.make_mesh(data=2, stage=2), np.random.default_rng(0)
    abstract = abstract_state(IN_A_V, mesh)
    draw = lambda leaf: jax.device_put(
        np.asarray(9 * rng.uniform(size=leaf.shape), leaf.dtype), leaf.sharding
    )
    state = jax.tree.map(draw, abstract)
    step = CheckpointManager(tmp_path, mesh).save(state)
    for layout, onto in (
        (LayerLayout(5, 4), jaxpar.make_mesh(stage=4)),
        (None, jaxpar.make_mesh(data=4)),
    ):
        target = abstract_state(layout, onto)
        manager = CheckpointManager(tmp_path, onto)
        assert manager.manifest(step).arrays["params/layers/w_up"].shape == (5, 8, 8)
        restored = manager.restore(target)
        assert jax.tree.structure(restored) == jax.tree.structure(target)
        oracle.assert_same_bits(canonical(restored, layout), canonical(state, IN_A_V))


@pytest.mark.parametrize(
    ("layout", "kind", "told"),
    [
        (IN_A_LOOP, ValueError, "got layers packed by .* for .*Give the layout that packed them"),
        (None, TypeError, "got dict, not PackedLayers"),
    ],
)
def test_a_manager_with_a_layout_takes_the_states_of_that_layout_alone(
    tmp_path, layout, kind, told
):
    manager = CheckpointManager(tmp_path, jaxpar.make_mesh(stage=2), layout=IN_A_V)
    state = abstract_state(layout, jaxpar.make_mesh(stage=2 if layout else 1))
    for use in (manager.save, manager.restore):
        with pytest.raises(kind, match=told):
            use(state)
