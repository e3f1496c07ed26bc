"""Random models, run in random ways, give the numbers of one device: `support/fuzz/grammar.py` draws them, `run.py` runs them.

A failure is made smaller, and its message has a line that runs it again. The long form draws JAXPAR_FUZZ_CASES cases, by
default 400 or about ten minutes, from JAXPAR_FUZZ_SEED, by default a seed that no run had before, which pytest shows.
"""

import functools
import itertools
import os
from dataclasses import fields, replace

import jax
import jax.numpy as jnp
import pytest
from hypothesis import HealthCheck, Phase, given, reject, seed, settings

import jaxpar
from jaxpar.pipeline import executor
from tests.support import tiny
from tests.support.fuzz import run as fuzz_run
from tests.support.fuzz.grammar import Case, Model, cases
from tests.support.fuzz.losses import LOSSES

# Their models have params that nothing reads, and losses that do not read the weights of rows.
pytestmark = [
    pytest.mark.filterwarnings("ignore:a model's outputs must depend on a param"),
    pytest.mark.filterwarnings("ignore:a loss should multiply by 'weight'"),
]

NUM_CASES = int(os.environ.get("JAXPAR_FUZZ_CASES", "400"))
SEED = int(os.environ.get("JAXPAR_FUZZ_SEED", tiny.fresh_seed()))
quiet = functools.partial(settings, database=None, suppress_health_check=list(HealthCheck))


def check(case):
    """Fails where a case does not give the numbers of one device; tells hypothesis of one that is left out."""
    try:
        fuzz_run.check(case)
    except fuzz_run.LeftOutError:
        reject()


@pytest.mark.full
@quiet(max_examples=5, derandomize=True)
@given(cases())
def test_random_models_run_in_random_ways_give_the_numbers_of_one_device(case):
    check(case)


@pytest.mark.slow
def test_evaluations_of_random_models_give_the_loss_of_one_device(monkeypatch):
    of_training = jaxpar.value_and_grad

    def with_evaluated_loss(model, loss, mesh, **settings):
        value_and_grad = of_training(model, loss, mesh, **settings)
        if settings["executor"] == "mpmd" and mesh.shape["stage"] > 1:
            return value_and_grad
        of = lambda kind: {f.name: settings[f.name] for f in fields(kind) if f.name in settings}
        parallel, pipeline = (
            jaxpar.Parallel(mesh, **of(jaxpar.Parallel)),
            jaxpar.Pipeline(**of(jaxpar.Pipeline)),
        )
        eval_step = jaxpar.make_eval_step(model, loss, parallel, pipeline)

        def with_value(params, batch):
            value, grads = value_and_grad(params, batch)
            loss_sum, weight_sum, *sums = eval_step(params, batch)
            with jax.numpy_dtype_promotion("standard"):
                means = jax.tree.map(lambda each: jnp.divide(each, weight_sum), (loss_sum, *sums))
                found = means if settings["has_aux"] else means[0]
                return jax.tree.map(lambda new, old: new.astype(old.dtype), found, value), grads

        return with_value

    monkeypatch.setattr(jaxpar, "value_and_grad", with_evaluated_loss)
    print(f"JAXPAR_FUZZ_SEED={SEED}")

    @seed(SEED)
    @quiet(max_examples=max(NUM_CASES // 10, 1), phases=(Phase.generate,))
    @given(cases())
    def check_many(case):
        check(case)

    check_many()


@pytest.mark.slow
def test_many_random_models_give_the_numbers_of_one_device():
    print(f"JAXPAR_FUZZ_SEED={SEED}")
    number = itertools.count(1)

    @seed(SEED)
    @quiet(max_examples=NUM_CASES)
    @given(cases())
    def check_many(case):
        check(case)
        if next(number) % 50 == 0:
            jax.clear_caches()  # else compiled programs fill the memory

    check_many()


MIXTURE = ("mixture", "w0", "e0", 3)
BOTH = MIXTURE, ("mixture", "w0", "e1", 2), ("scan", 2, (("experts", "w1", "e1"),))


@pytest.mark.parametrize(
    ("layer", "mesh"),
    [
        pytest.param((MIXTURE,), (2, 2, 1), marks=pytest.mark.slow),
        pytest.param(BOTH, (2, 2, 1), marks=pytest.mark.slow),
        pytest.param(BOTH, (2, 1, 2), marks=pytest.mark.slow),
    ],
)
def test_replicas_own_the_experts_of_a_drawn_case(layer, mesh):
    case = Case(
        model=Model(layers=(layer,), embed="dense"),
        mesh=mesh,
        cuts=1,
        num_microbatches=2,
        zero=2,
        masks=True,
    )
    assert fuzz_run.owned_of(case) == {"e0"}
    assert fuzz_run.owned_of(replace(case, model=replace(case.model, layers=(BOTH,)))) == {"e0"}, (
        "others route to e1"
    )
    check(case)


# Layers, routers and losses that mix the positions of a row, each pair on another mesh.
OF_ROWS = (
    (("group_norm", "v0"), ("squeeze_and_excite", "w0"), ("matmul", "w1")),
    (("instance_norm", "v0"), ("rotary",), ("linear_attention", "w0", "w1")),
    (("expert_choice", "w0", "e0"), ("tanh",)),
    (("soft_experts", "w0", "e0"), ("group_norm", "v0")),
    (("hashed_experts", "w0", "e0"), ("balanced_experts", "w1", "e1"), ("tanh",)),
    (("some_depths", "v0", "w0"), ("norm", "v1")),
    (("squeeze_and_excite", "w0"), ("expert_choice", "w1", "e0"), ("norm", "v0")),
)
ROW_MESHES = ((2, 2, 1), (1, 2, 2), (4, 1, 1), (4, 2, 1), (1, 4, 1), (2, 1, 1), (2, 1, 2))
BY_ROWS = [*zip(OF_ROWS, LOSSES, ROW_MESHES, strict=True)]


@pytest.mark.parametrize(
    ("layer", "loss", "mesh"),
    [
        pytest.param(*case, marks=pytest.mark.full if at % 2 else pytest.mark.slow)
        for at, case in enumerate(BY_ROWS)
    ],
)
def test_layers_routers_and_losses_of_rows_have_the_numbers_of_one_device(layer, loss, mesh):
    model = Model(layers=(layer,), embed="dense", num_layers=2 * mesh[1], loss=loss)
    check(Case(model=model, mesh=mesh, num_chunks=1, num_microbatches=2, cuts=1))


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize("leak", ["batch_norm", "centred_by_the_batch", "balance_of_the_batch"])
def test_layers_that_read_the_batch_are_refused_on_every_mesh(x64, leak):
    model = Model(layers=((("matmul", "w0"), (leak, "v0")),), embed="dense", extras=("aux",))
    for mesh in ((2, 1, 1), (1, 2, 1)):
        assert (
            fuzz_run.run_or_refusal(Case(model=model, mesh=mesh, num_chunks=1, num_microbatches=2))
            is None
        )


# --- mutations: a fault that must be found ----------------------------------------------------------------------------

PIPELINE = Case(
    model=Model(layers=((("matmul", "w0"), ("bias", "v0")),), embed="dense", head="dense"),
    mesh=(2, 2, 1),
    schedule="zb-h1",
    num_microbatches=2,
)


@pytest.mark.full
def test_a_wrong_sign_in_a_weights_gradient_is_found(monkeypatch):
    split_layer = executor.split_layer

    def wrong(*args, **how):
        split = split_layer(*args, **how)
        wrong = type(
            "Wrong",
            (type(split),),
            {"backward_weights": lambda _, *given: [-g for g in split.backward_weights(*given)]},
        )
        return wrong(split.graph, split.values, split.plans)

    monkeypatch.setattr(executor, "split_layer", wrong)
    with pytest.raises(AssertionError, match=r"\['layers'\]\['w0'\]: relative L2 distance 2"):
        fuzz_run.check(PIPELINE)


@pytest.mark.full
def test_a_missing_reduction_over_the_replicas_is_found(monkeypatch):
    monkeypatch.setattr("jaxpar.zero.reduce_gradients", lambda sums, *dtype, axes=(): sums)
    with pytest.raises(AssertionError, match="relative L2 distance"):
        fuzz_run.check(PIPELINE)


def test_a_failure_names_a_case_that_can_be_read_back():
    case = replace(PIPELINE, num_microbatches=3)
    assert eval(repr(case), {"Case": Case, "Model": Model}) == case


LEAKING = replace(
    PIPELINE,
    model=replace(
        PIPELINE.model, layers=((("matmul", "w0"), ("mean_of_rows", "v1")),), extras=("aux",)
    ),
)
TRAINING = replace(
    PIPELINE,
    num_chunks=1,
    cuts=0,
    zero=1,
    parts=(2, 1),
    model=replace(PIPELINE.model, num_layers=3),
    trains=True,
)
# As the message of the refusal says: neither packed nor with a layout, as many layers on each stage.
FOLLOWING = replace(
    TRAINING,
    schedule="interleaved",
    num_chunks=2,
    parts=None,
    model=replace(PIPELINE.model, num_layers=4),
)


@pytest.mark.full
def test_a_leaf_that_the_split_of_rows_changes_is_found_where_it_is_taken(monkeypatch):
    fuzz_run.check(LEAKING)
    monkeypatch.setattr("jaxpar.step.checks.check_rows", lambda *args: None)
    with pytest.raises(
        AssertionError, match="rows that are mixed change the loss, and are taken; to run it again"
    ):
        fuzz_run.check(LEAKING)


@pytest.mark.slow
def test_noise_on_packed_layers_is_found_where_it_is_taken_and_is_that_of_one_device_on_others(
    monkeypatch,
):
    fuzz_run.check(TRAINING)
    fuzz_run.check(FOLLOWING)
    monkeypatch.setattr("jaxpar.train.check_packed", lambda *args: None)
    with pytest.raises(
        AssertionError,
        match="packed layers have noise in the order of the devices; to run it again",
    ):
        fuzz_run.check(TRAINING)
