"""Wrong input to a public function is refused before anything is compiled, with the rule, the value and the remedy."""

import re

import jax
import jax.numpy as jnp
import numpy as np
import optax
import pytest
from jax.sharding import NamedSharding, PartitionSpec

import jaxpar
from jaxpar import CheckpointManager, LayeredModel, LayerLayout, Parallel, ParamSpec, Pipeline
from jaxpar.fields import check_at_least, check_kind
from jaxpar.planner import cluster, transformer_shape
from jaxpar.schedule import simulate
from tests.support import tiny

NAN = float("nan")
PARAMS = tiny.make_params()
MODEL, LOSS, OPTIMIZER, KEY = tiny.MODEL, tiny.loss, optax.sgd(0.1), jax.random.key(0)
EMBED, LAYER, HEAD = MODEL.embed, MODEL.layer, MODEL.head


def made(mesh, **settings):
    return jaxpar.value_and_grad(MODEL, LOSS, mesh, **settings)


def called(mesh, **settings):
    return jax.eval_shape(made(mesh, **settings), PARAMS, tiny.make_batch())


def state_of(optimizer):
    return jaxpar.TrainState(jnp.int32(0), PARAMS, optimizer.init(PARAMS), jnp.int32(0))


def shardings(mesh):
    return tiny.shardings(mesh, PARAMS)


SETTINGS = [  # of Parallel and Pipeline, with values that each must refuse
    (Parallel, "zero", (True, False, 1.0, "1", None, NAN, -1, np.int64(1)), "a ZeRO level, 0 to 3"),
    (Parallel, "trainable", (1, True, {"a": 1}, "a", ("a", 1)), "a sequence of patterns of paths"),
    (Parallel, "layout", (1, True, "loop", (2, 2)), "a jaxpar.LayerLayout"),
    (Parallel, "overlap_grad_reduce", (1, 0, None, "yes", np.bool_(True)), "a bool"),
    (Parallel, "grad_reduce_dtype", (1, True, NAN, "int8", ()), "a floating-point dtype"),
    (Parallel, "shardings", (1, "x", {"w": PartitionSpec()}, {"w": np.ones(2)}), "NamedShardings"),
    (Pipeline, "schedule", (1, None, True, ("1f1b",)), "one of gpipe, 1f1b"),
    (Pipeline, "num_microbatches", (True, 2.0, "2", None, NAN, (2,)), "an integer"),
    (Pipeline, "num_microbatches", (0, -1), "positive"),
    (Pipeline, "num_chunks", (True, 2.0, "2", NAN), "an integer"),
    (Pipeline, "num_chunks", (0, -1), "positive"),
    (Pipeline, "executor", (None, True, 1, ["spmd"], "SPMD"), '"spmd" or "mpmd"'),
    (Pipeline, "remat", (None, 1, NAN, ["full"], {}, "half"), "one of 'none', 'full', 'dots', or a jax.checkpoint policy"),
    (Pipeline, "mask_idle_ops", (1, 0, NAN, "yes", []), 'True, False or "auto"'),
]  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "name", "value", "rule"),
    [(kind, name, value, rule) for kind, name, values, rule in SETTINGS for value in values],
)
def test_a_setting_of_another_kind_is_refused(kind, name, value, rule):
    mesh = (jaxpar.make_mesh(data=2),) if kind is Parallel else ()
    with tiny.signatures_unchecked(), pytest.raises((TypeError, ValueError)) as error:
        kind(*mesh, **{name: value})
    assert re.match(
        rf"{name} must be {re.escape(rule)}.*; got .*\.|{name} must be one of .*; got ",
        str(error.value),
    )


FUNCTIONS = {
    "no loss": (
        lambda mesh: jaxpar.value_and_grad(MODEL, None, mesh),
        "loss must be a function of (outputs, batch); got None",
    ),
    "a loss that is no function": (
        lambda mesh: jaxpar.make_eval_step(MODEL, 1.0, mesh),
        "loss must be a function of .*; got 1.0",
    ),
    "no model": (
        lambda mesh: jaxpar.make_eval_step(None, LOSS, mesh),
        "model must be a LayeredModel or a function",
    ),
    "no embed": (
        lambda mesh: LayeredModel(None, LAYER, HEAD),
        "embed must be a function; got None. .*embed(outer, batch)",
    ),
    "no layer": (
        lambda mesh: LayeredModel(EMBED, None, HEAD),
        "layer must be a function; got None. .*layer(layer_params, x)",
    ),
    "a layer of many": (
        lambda mesh: LayeredModel(EMBED, [LAYER, 1], HEAD),
        "layer must be a function; got 1",
    ),
    "no head": (
        lambda mesh: LayeredModel(EMBED, LAYER, "head"),
        "head must be a function; got 'head'. .*head(outer, x)",
    ),
    "has_aux of an evaluation": (
        lambda mesh: made(mesh, has_aux=None),
        "has_aux must be a bool; got None",
    ),
    "no devices": (
        lambda mesh: made(mesh.abstract_mesh),
        "a step runs on devices; got a mesh without any",
    ),
    "a misspelt setting": (
        lambda mesh: made(mesh, microbatches=4),
        "value_and_grad takes model, .*; got microbatches. Did you mean num_microbatches?",
    ),
    "a missing mesh": (
        lambda mesh: jaxpar.value_and_grad(MODEL, LOSS),
        "value_and_grad(): missing .*mesh",
    ),
    "microbatches of an evaluation": (
        lambda mesh: jaxpar.make_eval_step(MODEL, LOSS, mesh, num_microbatches=2),
        "got num_microbatches. Write pipeline=jaxpar.Pipeline(num_microbatches=...).",
    ),
    "ZeRO of an evaluation": (
        lambda mesh: jaxpar.make_eval_step(MODEL, LOSS, mesh, zero=1),
        "got zero. Write parallel=jaxpar.Parallel(mesh, zero=...).",
    ),
    "no shardings": (
        lambda mesh: called(mesh, shardings={}),
        "shardings must have the structure of the params; got others for layers/b_down, .* and 4 more",
    ),
    "a sharding too few": (
        lambda mesh: called(mesh, zero=1, shardings=shardings(mesh) | {"layers": {}}),
        "shardings must have the structure",
    ),
    "an initializer that is none": (
        lambda mesh: jaxpar.init_state(PARAMS, KEY, OPTIMIZER, mesh, shardings(mesh)),
        "init_fn must be a function; got {",
    ),
    "an optimizer's function": (
        lambda mesh: jaxpar.init_state(tiny.init, KEY, optax.sgd, mesh, shardings(mesh)),
        "optimizer must be an optax optimizer; got <function sgd",
    ),
    "no optimizer": (
        lambda mesh: jaxpar.make_train_step(made(mesh), None),
        "optimizer must be an optax optimizer; got None",
    ),
    "no gradients": (
        lambda mesh: jaxpar.make_train_step(None, OPTIMIZER),
        "value_and_grad must be a function; got None",
    ),
    "a norm of text": (
        lambda mesh: jaxpar.make_train_step(made(mesh), OPTIMIZER, max_grad_norm="1"),
        "max_grad_norm must be a number; got '1'",
    ),
    "a norm that is a bool": (
        lambda mesh: jaxpar.make_train_step(made(mesh), OPTIMIZER, max_grad_norm=True),
        "max_grad_norm must be a number; got True",
    ),
    "a state of another optimizer": (
        lambda mesh: jaxpar.make_train_step(made(mesh), optax.adam(0.1))(
            state_of(OPTIMIZER), tiny.make_batch()
        ),
        "a step's optimizer must be that of its state; got one with ScaleByAdamState, EmptyState of .* arrays, and a "
        "state with EmptyState of 0 arrays.",
    ),
    "a state of other trained params": (
        lambda mesh: jaxpar.make_train_step(made(mesh, trainable=("layers/*",)), optax.adam(0.1))(
            state_of(optax.adam(0.1)), tiny.make_batch()
        ),
        "a step's optimizer must be that of its state; got .*same optimizer and trainable params",
    ),
    "no folder": (lambda mesh: CheckpointManager(None, mesh), "directory must be a path; got None"),
    "params for a state": (
        lambda mesh: jaxpar.make_train_step(made(mesh), OPTIMIZER)(PARAMS, tiny.make_batch()),
        "a step takes a state; got dict. .*jaxpar.init_state",
    ),
    "a name for devices": (
        lambda mesh: jaxpar.make_mesh(devices="cpu"),
        "devices must be a sequence of devices of JAX; got 'cpu'",
    ),
    "a number of devices": (
        lambda mesh: jaxpar.make_mesh(devices=8),
        "devices must be a sequence of devices of JAX; got 8",
    ),
    "zero devices": (
        lambda mesh: jaxpar.make_mesh(devices=[]),
        "devices must be at least one, and each once; got 0",
    ),
    "a device twice": (
        lambda mesh: jaxpar.make_mesh(data=2, devices=jax.devices()[:1] * 2),
        "each once; got 2, of which 1 differ",
    ),
    "a list of rules": (
        lambda mesh: jaxpar.shardings_from_paths(PARAMS, mesh, ["**"]),
        "rules must be a dict of PartitionSpecs by pattern; got ['**']",
    ),
    "an axis for a rule": (
        lambda mesh: jaxpar.shardings_from_paths(PARAMS, mesh, {"**": "tensor"}),
        "the rule '**' must be a PartitionSpec; got 'tensor'",
    ),
    "a tuple for a rule": (
        lambda mesh: jaxpar.shardings_from_paths(PARAMS, mesh, {"**": (None, "tensor")}),
        "the rule '**' must be a PartitionSpec; got (None",
    ),
    "a number for a pattern": (
        lambda mesh: jaxpar.shardings_from_paths(PARAMS, mesh, {1: PartitionSpec()}),
        "pattern must be a string; got 1",
    ),
    "a layer without a dim": (
        lambda mesh: jaxpar.shardings_from_paths(
            {"outer": 1.0, "layers": 1.0}, mesh, {"**": PartitionSpec()}
        ),
        "the leading dim num_layers; got layers of shape ()",
    ),
    "specs for shardings": (
        lambda mesh: jaxpar.shard({"w": 1.0}, {"w": PartitionSpec()}),
        "the sharding of w must be a jax.sharding.Sharding; got P()",
    ),
    "a mesh for shardings": (
        lambda mesh: jaxpar.shard(PARAMS, mesh),
        "shardings must have the structure of the params",
    ),
    "dims of a string": (lambda mesh: ParamSpec((8, 8), "ab"), "dims must be a tuple; got 'ab'"),
    "a shape of floats": (
        lambda mesh: ParamSpec((8.0,), ("a",)),
        "shape must be of integers; got 8.0",
    ),
    "a negative shape": (lambda mesh: ParamSpec((-8,), ("a",)), "shape must be at least 0; got -8"),
    "dims of no weight": (
        lambda mesh: jaxpar.column_parallel(ndim="2"),
        "ndim must be an integer; got '2'",
    ),
    "counts of a string": (
        lambda mesh: LayerLayout(4, 2, layers_per_virtual_stage="22"),
        "layers_per_virtual_stage must be integers in a tuple; got '22'",
    ),
    "counts of floats": (
        lambda mesh: LayerLayout(4, 2, layers_per_virtual_stage=(2.0, 2)),
        "layers_per_virtual_stage must be .*; got 2.0",
    ),
    "one end for two": (
        lambda mesh: LayerLayout(4, 2, end_layers=1),
        "end_layers must be integers in a tuple; got 1",
    ),
    "no cluster": (
        lambda mesh: jaxpar.plan("gpt2", "h100"),
        "cluster must be a Cluster; got 'h100'",
    ),
    "no shape": (
        lambda mesh: jaxpar.plan(None, cluster("h100")),
        "config must be a preset's name or a TransformerConfig; got None",
    ),
    "rows of no step": (
        lambda mesh: jaxpar.plan("gpt2", cluster("h100"), batch_size=0),
        "batch_size must be at least 1; got 0",
    ),
    "rows of text": (
        lambda mesh: jaxpar.plan("gpt2", cluster("h100"), batch_size="8"),
        "batch_size must be a number; got '8'",
    ),
    "no tokens": (lambda mesh: transformer_shape("gpt2", seq=0), "seq must be at least 1; got 0"),
    "a node that is a bool": (
        lambda mesh: cluster("h100", num_nodes=True),
        "num_nodes of a cluster must be a number; got True",
    ),
    "a schedule's name": (
        lambda mesh: simulate("1f1b"),
        "schedule must be a Schedule; got '1f1b'. Make one with jaxpar.schedule.make_schedule",
    ),
}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_an_argument_of_another_kind_is_refused(name):
    call, message = FUNCTIONS[name]
    with (
        tiny.signatures_unchecked(),
        pytest.raises((TypeError, ValueError), match=re.escape(message).replace(r"\.\*", ".*")),
    ):
        call(jaxpar.make_mesh(data=2))


@pytest.mark.parametrize(
    ("keep", "message"),
    [
        ({"keep": True}, "keep must be a number; got True"),
        ({"keep": "2"}, "keep must be a number; got '2'"),
        ({"keep_every": None}, "keep_every must be a number; got None"),
        ({"keep_best": 1}, "keep_best must be a string; got 1"),
        ({"save_seconds": NAN}, "save_seconds must be at least 0; got nan"),
    ],
)
def test_a_manager_of_checkpoints_checks_itself(tmp_path, keep, message):
    with (
        tiny.signatures_unchecked(),
        pytest.raises((TypeError, ValueError), match=re.escape(message)),
    ):
        CheckpointManager(tmp_path, jaxpar.make_mesh(), **keep)


def test_a_state_is_restored_like_a_state(tmp_path):
    with (
        tiny.signatures_unchecked(),
        pytest.raises(TypeError, match="target must be a TrainState; got None"),
    ):
        CheckpointManager(tmp_path, jaxpar.make_mesh()).restore(None)


@pytest.mark.full
def test_a_state_that_was_donated_is_refused():
    """JAX 0.10 ends the process where it is given to several CPU devices."""
    mesh = jaxpar.make_mesh(data=2)
    state = jaxpar.init_state(tiny.init, KEY, OPTIMIZER, mesh, shardings(mesh))
    step, batch = (
        jaxpar.make_train_step(made(mesh), OPTIMIZER),
        jaxpar.shard_batch(tiny.make_batch(), mesh),
    )
    following, _ = step(state, batch)
    with pytest.raises(
        ValueError,
        match=r"a step donates its state.*got one that an earlier step took.*state, metrics =",
    ):
        step(state, batch)
    assert int(step(following, batch)[0].step) == 2


def test_params_may_be_python_numbers():
    where = jaxpar.shardings_from_paths(
        {"scale": 1.0}, mesh := jaxpar.make_mesh(data=2), {"**": PartitionSpec()}
    )
    assert where == {"scale": NamedSharding(mesh, PartitionSpec())}


def test_numbers_are_no_bools_and_no_text():
    check_at_least(1, keep=np.float32(2), other=None)
    check_kind((int, None), "an integer", "Convert it.", one=1, none=None)
    for value in (True, "2", (2,), jnp.ones(2)):
        with pytest.raises(TypeError, match=r"keep must be a number; got .*Choose 1 or more\."):
            check_at_least(1, keep=value)
    long = "x" * 1000
    with pytest.raises(TypeError, match="got '" + "x" * 59 + r"\.\.\.\. Convert it\.$"):
        check_kind((int,), "an integer", "Convert it.", one=long)
