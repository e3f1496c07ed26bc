"""Optimizers of other libraries: eight devices give the numbers of one, and their state is sharded like the params."""

import functools
import logging
import math
import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from optax import contrib

import jaxpar
from jaxpar.planner.job import Choice
from jaxpar.planner.model_shape import ModelShape
from jaxpar.planner.state import AtRest
from tests.support import oracle, tiny_gpt

KEY = jax.random.key(0)
SHAPES = {
    "outer": {"tokens": (16, 8), "scale": (8,)},
    "layers": {"w_up": (4, 8, 16), "w_out": (4, 8, 8), "b_up": (4, 16)},
}
RULES = {
    "layers/w_up": jaxpar.column_parallel(),
    "layers/w_out": jaxpar.row_parallel(),
    "layers/b_up": jaxpar.column_parallel(ndim=1),
    "outer/tokens": jaxpar.vocab_parallel(),
    "outer/scale": jaxpar.replicated(),
}
# How many parts each dim of a param is in on a mesh of 2, 2, 2; "zero" where ZeRO cuts it over the data axis.
PARTS = {
    "w_up": (2, "zero", 2),
    "w_out": (2, 2, "zero"),
    "b_up": (2, 2),
    "tokens": (2, 2),
    "scale": ("zero",),
}
SIZES = {name: shape for group in SHAPES.values() for name, shape in group.items()}
WHOLE = {name: tuple(range(len(shape))) for name, shape in SIZES.items()}


def copies(count, *names):
    """What an optimizer keeps: of each of these params, or of all, so many arrays with all its dims."""
    return [(name, WHOLE[name]) for name in names or SIZES] * count


def is_matrix(params):
    return jax.tree.map(lambda leaf: leaf.ndim == 3, params)


def muon_dims(params):
    """Of stacked layers [layers, in, out] each is a matrix of its own; all else is left to Adam."""
    dims = contrib.MuonDimensionNumbers(reduction_axis=1, output_axis=2)
    return jax.tree.map(lambda leaf: dims if leaf.ndim == 3 else None, params)


def labels(params):
    return {"outer": "frozen", "layers": jax.tree.map(lambda _: "trained", params["layers"])}


MATRICES = ("w_up", "w_out")
VECTORS = ("b_up", "tokens", "scale")
FACTORED = [
    *[(name, dims) for name in MATRICES for dims in ((0, 1), (0, 2))],
    ("tokens", (0,)),
    ("tokens", (1,)),
    *copies(1, "b_up", "scale"),
]
PER_DIM = [(name, (dim,)) for name, shape in SIZES.items() for dim in range(len(shape))]
ADAM = functools.partial(optax.adam, 1e-2)


def plateau():
    return optax.chain(ADAM(), contrib.reduce_on_plateau(patience=1, rtol=0.9))


# Each optimizer, and the arrays that it must keep beside counts: (a param, the dims of it that the array has).
OPTIMIZERS = {
    "adam": (ADAM, copies(2)),
    "adafactor": (lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8), FACTORED),
    "apply_if_finite": (
        lambda: optax.apply_if_finite(optax.chain(optax.clip_by_global_norm(0.1), ADAM()), 3),
        copies(2),
    ),
    "frozen": (
        lambda: optax.multi_transform({"trained": ADAM(), "frozen": optax.set_to_zero()}, labels),
        copies(2, "w_up", "w_out", "b_up"),
    ),
    "inject_hyperparams": (
        lambda: optax.inject_hyperparams(optax.adamw)(optax.linear_schedule(1e-2, 0, 9)),
        copies(2),
    ),
    "lamb": (lambda: optax.lamb(1e-2), copies(2)),
    "lbfgs": (lambda: optax.lbfgs(memory_size=3), copies(2 + 2 * 3 + 1)),
    "lbfgs of one rate": (
        lambda: optax.lbfgs(1e-2, memory_size=3, linesearch=None),
        copies(2 + 2 * 3),
    ),
    "line search": (
        lambda: optax.chain(
            optax.sgd(1.0), optax.scale_by_backtracking_linesearch(5, store_grad=True)
        ),
        copies(1),
    ),
    "lion": (lambda: optax.lion(1e-2), copies(1)),
    "masked": (
        lambda: optax.chain(optax.masked(optax.scale_by_adam(), is_matrix), optax.sgd(1e-2)),
        copies(2, *MATRICES),
    ),
    "MultiSteps": (
        lambda: optax.MultiSteps(plateau(), 2, accumulator_dtype=jnp.float64),
        copies(3),
    ),
    "muon": (
        lambda: contrib.muon(1e-2, muon_weight_dimension_numbers=muon_dims),
        copies(1) + copies(1, *VECTORS),
    ),
    "noisy_sgd": (lambda: optax.noisy_sgd(1e-2, key=KEY), []),
    "reduce_on_plateau": (lambda: plateau(), copies(2)),
    "rng": (lambda: optax.chain(optax.add_noise(0.1, 0.9, KEY), optax.sgd(1e-2)), []),
    "schedule_free": (lambda: contrib.schedule_free_adamw(1e-2), copies(2)),
    "sm3": (lambda: optax.sm3(1e-2), PER_DIM + copies(1)),
}


def init(key):
    rng = np.random.default_rng(0)
    return jax.tree.map(
        lambda shape: jnp.asarray(rng.normal(size=shape)),
        SHAPES,
        is_leaf=lambda x: isinstance(x, tuple),
    )


def make_targets(step):
    rng = np.random.default_rng(step + 1)
    return jax.tree.map(lambda leaf: rng.normal(size=leaf.shape), jax.eval_shape(init, KEY))


def loss(params, targets):
    """A function with minima of its own in each element, so that gradients depend on the params."""
    each = jax.tree.map(lambda p, t: jnp.sum((p - t) ** 2 + jnp.cos(3 * p)), params, targets)
    return sum(jax.tree.leaves(each)) / 10


@functools.cache
def on_one_device(name):
    """Params and state after three steps of plain optax."""
    optimizer = OPTIMIZERS[name][0]()
    takes_more = isinstance(optimizer, optax.GradientTransformationExtraArgs | optax.MultiSteps)

    @jax.jit
    def step(params, opt_state, targets):
        value, grad = jax.value_and_grad(loss)(params, targets)
        more = (
            {"value": value, "grad": grad, "value_fn": lambda params: loss(params, targets)}
            if takes_more
            else {}
        )
        updates, opt_state = optimizer.update(grad, opt_state, params, **more)
        return optax.apply_updates(params, updates), opt_state

    params = init(KEY)
    opt_state = optimizer.init(params)
    for number in range(3):
        params, opt_state = step(params, opt_state, make_targets(number))
    return params, opt_state


class Compilations(logging.Handler):
    """Counts how often a step is compiled."""

    def __init__(self):
        super().__init__()
        self.count = 0

    def emit(self, record):
        self.count += "Compiling jit(step)" in record.getMessage()

    def __enter__(self):
        logging.getLogger("jax").addHandler(self)
        return self

    def __exit__(self, *_):
        logging.getLogger("jax").removeHandler(self)


class Run:
    """Three steps on eight devices."""

    def __init__(self, name, zero):
        self.name, self.zero, self.mesh = name, zero, jaxpar.make_mesh(data=2, stage=2, tensor=2)
        make, self.kept = OPTIMIZERS[name]
        shardings = jaxpar.shardings_from_paths(jax.eval_shape(init, KEY), self.mesh, RULES)
        self.first = jaxpar.init_state(init, KEY, make(), self.mesh, shardings, zero=zero)
        self.step = jaxpar.make_train_step(jax.value_and_grad(loss), make())
        state = jax.tree.map(jnp.copy, self.first)
        with jax.log_compiles(), Compilations() as compilations:
            for number in range(3):
                state, self.metrics = self.step(
                    state, jaxpar.shard(make_targets(number), shardings)
                )
        self.last, self.num_compilations = state, compilations.count
        nan = jax.tree.map(lambda leaf: np.full_like(leaf, np.nan), make_targets(0))
        self.after_nan, self.metrics_of_nan = self.step(
            jax.tree.map(jnp.copy, state), jaxpar.shard(nan, shardings)
        )


# One level of ZeRO for each; the other levels, and what others have in them or compiles for long, are for the slow run.
LEVELS = dict.fromkeys(OPTIMIZERS, 1) | {"masked": 0, "adafactor": 3, "frozen": 3, "muon": 3}
LEVELS |= dict.fromkeys(
    ("adam", "inject_hyperparams", "lbfgs", "lbfgs of one rate", "lion", "reduce_on_plateau", "rng")
)
# Of these levels, those whose states differ in kind are of `make test`: in parts, factored, per dim, in matrices, in copies.
QUICK = ("adafactor", "muon", "line search")


def marks(name, zero):
    if LEVELS[name] != zero:
        return pytest.mark.slow
    return () if name in QUICK else pytest.mark.full


@pytest.fixture(
    scope="module",
    params=[
        pytest.param((name, zero), id=f"{name}-{zero}", marks=marks(name, zero))
        for name in OPTIMIZERS
        for zero in range(4)
    ],
)
def run(request):
    with jax.enable_x64(True):
        return Run(*request.param)


@pytest.mark.few(3)
@pytest.mark.full
def test_an_optimizer_gives_one_devices_params_and_state(x64, run):
    oracle.assert_same((run.last.params, run.last.opt_state), on_one_device(run.name), within=1e-10)


def test_each_device_holds_its_part_of_the_state_and_no_more(run):
    in_parts = lambda name, dim: (
        (2 if run.zero else 1) if PARTS[name][dim] == "zero" else PARTS[name][dim]
    )
    parts = [
        math.prod(SIZES[name][dim] // in_parts(name, dim) for dim in dims)
        for name, dims in run.kept
    ]
    arrays = [
        leaf.addressable_data(0) for leaf in jax.tree.leaves(run.last.opt_state) if leaf.size > 3
    ]
    assert sum(array.nbytes for array in arrays) == 8 * sum(parts)


def test_the_planner_counts_the_bytes_that_the_state_has(x64, run):
    params = jax.eval_shape(init, KEY)
    shape = ModelShape("own", tiny_gpt.MODEL, tiny_gpt.loss, params=params, rules=RULES, row={})
    at_rest = AtRest(
        shape, OPTIMIZERS[run.name][0](), Choice(data=2, stage=2, tensor=2, zero=run.zero)
    )
    kept = jax.tree.leaves((run.last.opt_state, run.last.step, run.last.num_skipped))
    assert at_rest.bytes["optimizer"] == sum(leaf.addressable_data(0).nbytes for leaf in kept)


def test_every_step_runs_the_first_ones_program_and_keeps_its_shardings(run):
    shardings = lambda state: jax.tree.map(lambda leaf: leaf.sharding, state)
    assert shardings(run.last) == shardings(run.first)
    assert run.num_compilations == 1


def test_gradients_that_are_not_finite_change_nothing_of_the_state(run):
    assert (run.metrics["skipped"], run.metrics_of_nan["skipped"]) == (0, 1)
    before, after = ((state.params, state.opt_state) for state in (run.last, run.after_nan))
    oracle.assert_same_bits(after, before)


# --- with a pipeline ----------------------------------------------------------------------------------------------------


MUON_DIMS = {"w_qkv": (1, (2, 3)), "w_out": ((1, 2), 3), "w_up": (1, 2), "w_down": (1, 2)}
PARTS_OF_GPT = {"tokens": "adafactor", "positions": "frozen"} | dict.fromkeys(MUON_DIMS, "muon")


def by_name(choose):
    return lambda params: jax.tree_util.tree_map_with_path(
        lambda path, _: choose(path[-1].key), params
    )


def optimizer_of_each_part():
    """One optimizer a kind of param, all of them slowed down where the loss does not fall."""
    dims = by_name(lambda name: contrib.MuonDimensionNumbers(*MUON_DIMS[name]))
    each = {
        "muon": contrib.muon(1e-2, muon_weight_dimension_numbers=dims),
        "adafactor": optax.adafactor(1e-2, min_dim_size_to_factor=8),
        "adam": ADAM(),
        "frozen": optax.set_to_zero(),
    }
    kinds = by_name(lambda name: PARTS_OF_GPT.get(name, "adam"))
    return optax.chain(
        optax.multi_transform(each, kinds), contrib.reduce_on_plateau(patience=1, rtol=0.9)
    )


def three_steps_of_a_pipeline(optimizer, zero, max_grad_norm=None, **settings):
    """Params and state of a small GPT, from eight devices and from one."""
    mesh, params = jaxpar.make_mesh(data=2, stage=2, tensor=2), tiny_gpt.make_params(num_layers=4)
    shardings = jaxpar.shardings_from_paths(params, mesh, tiny_gpt.RULES)
    state = jaxpar.init_state(
        lambda key: jax.tree.map(jnp.asarray, params), KEY, optimizer, mesh, shardings, zero=zero
    )
    value_and_grad = jaxpar.value_and_grad(
        tiny_gpt.MODEL,
        tiny_gpt.loss,
        mesh,
        num_microbatches=2,
        zero=zero,
        shardings=shardings,
        **settings,
    )
    train_step = jaxpar.make_train_step(value_and_grad, optimizer, max_grad_norm=max_grad_norm)

    @jax.jit
    def step(params, opt_state, batch):
        value, grad = tiny_gpt.reference(params, batch)
        clipped = grad
        if max_grad_norm is not None:
            clipped, _ = optax.clip_by_global_norm(max_grad_norm).update(grad, optax.EmptyState())
        value_fn = lambda params: tiny_gpt.reference(params, batch)[0]
        updates, opt_state = optimizer.update(
            clipped, opt_state, params, value=value, grad=grad, value_fn=value_fn
        )
        return optax.apply_updates(params, updates), opt_state

    opt_state = optimizer.init(params)
    for number in range(3):
        batch = tiny_gpt.make_batch(seed=number)
        state, metrics = train_step(state, jaxpar.shard_batch(batch, mesh))
        params, opt_state = step(params, opt_state, batch)
        assert metrics["skipped"] == 0
    return (state.params, state.opt_state), (params, opt_state)


@pytest.mark.full
@pytest.mark.parametrize(
    "zero", [pytest.param(zero, marks=[] if zero == 3 else pytest.mark.slow) for zero in range(4)]
)
def test_a_pipeline_whose_parts_have_optimizers_of_their_own_trains_as_one_device_does(x64, zero):
    got, want = three_steps_of_a_pipeline(optimizer_of_each_part(), zero, max_grad_norm=0.1)
    oracle.assert_same(got, want, within=1e-10)


@pytest.mark.slow
@pytest.mark.parametrize("zero", [0, 3])
def test_a_line_search_through_a_pipeline_finds_what_it_finds_on_one_device(x64, zero):
    got, want = three_steps_of_a_pipeline(optax.lbfgs(memory_size=2), zero)
    oracle.assert_same(got, want, within=1e-8)


# --- packed layers ------------------------------------------------------------------------------------------------------


UNEVEN = jaxpar.LayerLayout(3, 2, layers_per_virtual_stage=(2, 1))
TWO_CHUNKS = jaxpar.LayerLayout(4, 2, num_chunks=2)
IN_ORDER = jaxpar.LayerLayout(4, 2)


def init_packed(optimizer, layout=UNEVEN, shape=(8, 8)):
    mesh = jaxpar.make_mesh(stage=2)
    layers = {"w": jnp.ones((layout.num_layers, *shape))}
    pack = lambda key: layout.pack_params({"layers": layers, "outer": {"v": jnp.ones(8)}})
    shardings = jaxpar.shardings_from_paths(
        jax.eval_shape(pack, KEY), mesh, {"**": jaxpar.replicated()}
    )
    return jaxpar.abstract_state(pack, KEY, optimizer, mesh, shardings)


def named_in(error):
    """The optimizer that a message names."""
    return eval(
        re.search(r"\((optax\.adafactor\(.*\))\)\.$", str(error.value))[1],
        {"optax": optax, "rate": 1e-2},
    )


MEANS = {
    "adafactor": lambda: optax.adafactor(1e-2, min_dim_size_to_factor=8),
    "clipping": lambda: optax.adafactor(
        1e-2, min_dim_size_to_factor=8, multiply_by_parameter_scale=False
    ),
    "in a part": lambda: optax.multi_transform(
        {True: optax.adafactor(1e-2), False: ADAM()}, is_matrix
    ),
}


@pytest.mark.parametrize("name", MEANS)
def test_an_optimizer_whose_means_would_count_padding_is_refused_and_the_one_that_the_message_names_is_taken(
    name,
):
    with pytest.raises(
        ValueError, match=r"means over the layers.*got 3 layers in 4 positions. Spread .* evenly"
    ) as error:
        init_packed(MEANS[name]())
    init_packed(MEANS[name](), IN_ORDER)
    init_packed(named_in(error))


of_layers = lambda factors, leaf: factors.reshape((-1,) + (1,) * (leaf.ndim - 1))
NUMBERING = {
    "decay by depth": lambda g: g * of_layers(0.5 ** jnp.arange(len(g)), g),
    "two that are frozen": lambda g: g.at[:2].set(0),
    "the last one": lambda g: g * of_layers(1.0 * (jnp.arange(len(g)) == len(g) - 1), g),
    "shifted": lambda g: g - 0.1 * jnp.roll(g, 1, 0),
    "added up": lambda g: jnp.cumsum(g, 0),
}


@pytest.mark.parametrize("name", NUMBERING)
def test_an_optimizer_that_numbers_packed_layers_is_refused_with_its_line(name):
    each = lambda tree: tree | {"layers": jax.tree.map(NUMBERING[name], tree["layers"])}
    numbering = optax.chain(optax.stateless(lambda updates, _: each(updates)), optax.sgd(1e-3))
    message = r"numbers, takes, moves or sorts them: \w+.* at .*test_optimizers.py"
    with pytest.raises(ValueError, match=message):
        init_packed(numbering)
    init_packed(numbering, IN_ORDER)


def test_an_optimizer_made_for_so_many_layers_is_told_how_many_packed_ones_there_are():
    by_depth = lambda g: g * of_layers(np.linspace(0.1, 1.0, 3), g)
    each = lambda tree: tree | {"layers": jax.tree.map(by_depth, tree["layers"])}
    optimizer = optax.stateless(lambda updates, _: each(updates))
    with pytest.raises(TypeError, match="incompatible shapes") as error:
        init_packed(optimizer)
    note = next(each for each in error.value.__notes__ if "positions" in each)
    assert note.startswith("An optimizer is given 4 positions of 3 layers, layers packed for num_s")
    init_packed(optimizer, IN_ORDER)


COUNTING = {
    "a count": lambda g: g / jnp.sum(jnp.ones_like(g)),
    "the least": lambda g: g * (1 + jnp.min(jnp.abs(g))),
}


@pytest.mark.parametrize("name", COUNTING)
def test_an_optimizer_that_would_count_padding_is_refused(name):
    each = lambda tree: tree | {"layers": jax.tree.map(COUNTING[name], tree["layers"])}
    counting = optax.chain(optax.stateless(lambda updates, _: each(updates)), optax.sgd(1e-3))
    with pytest.raises(
        ValueError, match=r"would count the padding .*; got 3 layers in 4 positions"
    ):
        init_packed(counting)
    init_packed(counting, IN_ORDER)


OTHERWISE = {
    "decay that layers carry": lambda g: jax.lax.scan(
        lambda c, each: (c / 2, c * each), 1.0, g, reverse=True
    )[1],
    "as many trips as layers": lambda g: jax.lax.fori_loop(0, len(g), lambda i, c: c * 0.9, g),
    "no zeros": lambda g: jax.lax.cond((g != 0).all(), lambda c: c / 2, lambda c: c, g),
    "a number of zeros": lambda g: g * (1 + (g == 0).sum()),
}


@pytest.mark.parametrize("name", OTHERWISE)
def test_an_optimizer_that_makes_other_numbers_of_packed_layers_is_refused(name):
    each = lambda tree: tree | {"layers": jax.tree.map(OTHERWISE[name], tree["layers"])}
    other = optax.chain(optax.stateless(lambda updates, _: each(updates)), optax.sgd(1e-3))
    with pytest.raises(ValueError, match=r"got updates that are up to \d+.*% from those of layers"):
        init_packed(other)
    init_packed(other, IN_ORDER)
    init_packed(optax.apply_if_finite(optax.lamb(1e-3), 3))


@pytest.mark.parametrize(
    ("layout", "shape", "state"),
    [
        (jaxpar.LayerLayout(127, 2), (8, 128), r"v_row/layers/w of shape \(128, 8\)"),
        (jaxpar.LayerLayout(129, 2), (128,), r"v_row/layers/w of shape \(128,\)"),
    ],
    ids=["the last position makes it so", "vectors"],
)
def test_state_that_is_factored_over_padded_layers_is_refused_and_a_larger_least_size_is_taken(
    layout, shape, state
):
    without_other_means = optax.adafactor(
        1e-2, clipping_threshold=None, multiply_by_parameter_scale=False
    )
    with pytest.raises(
        ValueError, match=rf"positions, and .*{state} with means over them. .*min_dim_size_to_f"
    ) as error:
        init_packed(without_other_means, layout, shape)
    init_packed(named_in(error), layout, shape)


def test_state_that_one_position_more_would_factor_over_layers_is_taken():
    optimizer = optax.adafactor(
        1e-2, min_dim_size_to_factor=4, clipping_threshold=None, multiply_by_parameter_scale=False
    )
    init_packed(optimizer, shape=(4, 8))


DRAWS = {
    "noisy_sgd": lambda: optax.noisy_sgd(1e-2, key=KEY),
    "add_noise": lambda: optax.chain(optax.add_noise(0.1, 0.9, 7), ADAM()),
    "flatten": lambda: optax.flatten(optax.noisy_sgd(1e-2, key=KEY)),
    "in a part": lambda: optax.multi_transform(
        {True: optax.noisy_sgd(1e-2, key=KEY), False: ADAM()}, is_matrix
    ),
    "in a branch": lambda: optax.apply_if_finite(optax.noisy_sgd(1e-2, key=KEY), 3),
}


@pytest.mark.parametrize("layout", [UNEVEN, TWO_CHUNKS], ids=["padded", "reordered"])
@pytest.mark.parametrize("name", DRAWS)
def test_an_optimizer_that_draws_noise_for_packed_layers_is_refused(name, layout):
    with pytest.raises(
        ValueError,
        match=r"draws random numbers .*; got draws for layers packed for num_stages=2, .*Do not pack them and leave out lay",
    ):
        init_packed(DRAWS[name](), layout)
    init_packed(DRAWS[name](), IN_ORDER)


def one_random_rate():
    """A rate for all params, which is drawn in every step."""

    def update(updates, key, params=None):
        own, following = jax.random.split(key)
        return jax.tree.map(lambda g: g * jax.random.uniform(own), updates), following

    return optax.GradientTransformation(lambda params: KEY, update)


def test_noise_that_no_layer_sees_in_its_order_is_taken():
    of_outer = optax.masked(optax.add_noise(0.1, 0.9, KEY), {"layers": False, "outer": True})
    for optimizer in (
        optax.chain(of_outer, ADAM()),
        optax.chain(one_random_rate(), optax.sgd(1e-2)),
    ):
        init_packed(optimizer, TWO_CHUNKS)


@pytest.mark.slow
def test_noise_on_layers_that_are_not_packed_is_that_of_one_device_with_chunks_too(x64):
    got, want = three_steps_of_a_pipeline(DRAWS["noisy_sgd"](), zero=1, schedule="interleaved")
    oracle.assert_same(got, want, within=1e-10)


TAKEN = [
    name
    for name in OPTIMIZERS
    if name not in ("adafactor", "frozen", "masked", "muon", "noisy_sgd", "rng")
]


@pytest.mark.parametrize("name", TAKEN)
def test_an_optimizer_whose_sums_do_not_see_padding_is_taken(name):
    init_packed(OPTIMIZERS[name][0]())


# --- saved --------------------------------------------------------------------------------------------------------------


@pytest.mark.full
def test_a_state_with_masked_factored_and_random_parts_is_restored_on_another_mesh(tmp_path):
    trained = optax.chain(
        optax.masked(optax.trace(0.9), is_matrix),
        optax.adafactor(1e-2, min_dim_size_to_factor=8),
        optax.add_noise(1, 1, 7),
    )
    optimizer = optax.multi_transform({"trained": trained, "frozen": optax.set_to_zero()}, labels)

    def place(mesh):
        return (
            KEY,
            optimizer,
            mesh,
            jaxpar.shardings_from_paths(jax.eval_shape(init, KEY), mesh, RULES),
        )

    mesh = jaxpar.make_mesh(data=2, stage=2, tensor=2)
    saved = jaxpar.init_state(init, *place(mesh), zero=1)
    jaxpar.CheckpointManager(tmp_path, mesh).save(saved)
    mesh = jaxpar.make_mesh(data=4, tensor=2)
    wanted = jaxpar.abstract_state(init, *place(mesh), zero=3)
    restored = jaxpar.CheckpointManager(tmp_path, mesh).restore(wanted)
    oracle.assert_same_bits(restored, saved)
    assert jax.tree.map(lambda leaf: leaf.sharding, restored) == jax.tree.map(
        lambda leaf: leaf.sharding, wanted
    )
