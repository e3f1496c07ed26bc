"""Rows held out: the sums of the loss over the whole mesh, without gradients, with the numbers of one device."""

import dataclasses
import warnings
from functools import cache

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.data.batches import Columns, pad_rows
from jaxpar.models import transformer
from jaxpar.params import abstract_params
from jaxpar.run.batches import held_out_batches
from jaxpar.tensor_parallel import (
    EXPERT_RULES,
    EXPERTS_OVER_DATA,
    TRANSFORMER_RULES,
    sequence_parallel,
)
from tests.support import tiny
from tests.support.oracle import assert_same
from tests.support.tiny_experts import config_of, job, loss_of
from tests.support.tiny_transformer import FAMILIES, ROWS, SEQ, jit

OVER_TENSOR, OVER_DATA = (
    TRANSFORMER_RULES | EXPERT_RULES["experts"],
    TRANSFORMER_RULES | EXPERTS_OVER_DATA,
)
GATHER, ULYSSES = {"attention_over_context": "gather"}, {"attention_over_context": "ulysses"}


def sums_of(config):
    """The loss with its further sums, and the loads of the experts, an array."""
    whole = loss_of(config, metrics=True)

    def sums(outputs, batch):
        loss_sum, weight_sum, *further = whole(outputs, batch)
        loads = transformer.loads_of(outputs, batch["weight"])
        more = {} if loads is None else {"loads": loads}
        return loss_sum, weight_sum, (further[0] if further else {}) | more

    return sums


def make_eval(config, axes, *, rules=OVER_TENSOR, layout=None, constrain=None, zero=0, **pipeline):
    """The step of an evaluation, the mesh and the shardings of the params."""
    mesh = jaxpar.make_mesh(**axes, devices=jax.devices()[: int(np.prod([*axes.values()]))])
    table = transformer.param_table(config)
    shardings = jaxpar.shardings_from_dims(table, mesh, rules)
    model = transformer.make_model(config, **({"constrain": constrain} if constrain else {}))
    parallel = jaxpar.Parallel(mesh, shardings, zero=zero, layout=layout)
    pipeline = jaxpar.Pipeline(**{"num_microbatches": 2} | pipeline)
    return jaxpar.make_eval_step(model, sums_of(config), parallel, pipeline), mesh, shardings


PACKED = np.sort(np.arange(ROWS * SEQ).reshape(ROWS, SEQ) * 7 % 3, axis=1).astype(np.int32)


@pytest.mark.few(1)
@pytest.mark.full
@pytest.mark.parametrize(
    ("name", "axes", "settings"),
    [
        pytest.param(
            "olmoe",
            {"context": 2, "stage": 2, "tensor": 2},
            {"schedule": "zb-h1"},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "qwen3",
            {"data": 2, "context": 2, "stage": 2},
            {"rules": OVER_DATA, "zero": 3, "schedule": "interleaved"},
            marks=pytest.mark.slow,
        ),
        (
            "deepseek",
            {"replica": 2, "data": 2, "context": 2},
            {"rules": OVER_DATA, "zero": 1, "remat": "full"},
        ),
        ("llama", {"context": 4, "tensor": 2}, {"constrain": sequence_parallel, "zero": 2}),
        ("gpt2", {"data": 2, "stage": 2, "tensor": 2}, {"schedule": "zb-v", "mask_idle_ops": True}),
        pytest.param(
            "mixtral",
            {"stage": 4, "data": 2},
            {"schedule": "1f1b", "remat": "full", "num_microbatches": 4},
            marks=pytest.mark.slow,
        ),
        pytest.param(
            "gpt2",
            {"stage": 4, "data": 2},
            {"schedule": "1f1b", "mask_idle_ops": True, "num_microbatches": 4},
            marks=pytest.mark.slow,
        ),
    ],
)
def test_sums_over_the_mesh_are_those_of_one_device(x64, name, axes, settings):
    seed = tiny.fresh_seed()
    over = GATHER if axes.get("context") == 2 else ULYSSES
    if name in FAMILIES:
        config = dataclasses.replace(FAMILIES[name], compute_dtype="float64", **over)
    else:
        config = config_of(name, **over)
    params, batch = job(config, seed=seed)
    batch |= {"segments": PACKED} if seed % 2 else {}
    of_one = jit(
        lambda params, batch: sums_of(config)(
            transformer.make_model(config).apply(params, batch), batch
        )
    )
    step, mesh, shardings = make_eval(config, axes, **settings)
    got = step(jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh))
    assert_same(jaxpar.fetch(got), jaxpar.fetch(of_one(params, batch)), message=f"seed {seed}")


LLAMA = dataclasses.replace(FAMILIES["llama"], **GATHER)


def compiled(axes, **settings):
    """The report of a compiled evaluation, or of the step of training with the same settings."""
    return _compiled(tuple(axes.items()), **settings)


@cache
def _compiled(axes, *, rows=8, seq=256, train=False, **pipeline):
    step, mesh, shardings = make_eval(LLAMA, dict(axes), **pipeline)
    if train:
        parallel, pipeline = (
            jaxpar.Parallel(mesh, shardings),
            jaxpar.Pipeline(**{"num_microbatches": 2} | pipeline),
        )
        step = jaxpar.value_and_grad(
            transformer.make_model(LLAMA), loss_of(LLAMA), parallel, pipeline
        )
    table = abstract_params(transformer.param_table(LLAMA))
    params = jax.tree.map(lambda leaf, to: leaf.update(sharding=to), table, shardings)
    column = lambda dtype: jax.ShapeDtypeStruct((rows, seq), dtype)
    batch = {"tokens": column("int32"), "targets": column("int32"), "weight": column("float32")}
    return jaxpar.inspect_step(jax.jit(step), params, jaxpar.abstract_batch(batch, mesh))


@pytest.mark.full
def test_nothing_is_computed_for_gradients():
    assert 3 * compiled({}).flops == compiled({}, train=True).flops
    kinds = [(each.kind, each.axes) for each in compiled({"context": 2, "stage": 2}).collectives]
    assert kinds.count(("all-reduce", ("context",))) == 1, "of the loss and the weight together"
    assert kinds.count(("collective-permute", ("stage",))) == 2, (
        "h, and the positions beside it, to the next stage alone"
    )


@pytest.mark.slow
def test_microbatches_and_context_bound_the_memory_of_an_evaluation():
    temp = lambda *args, **settings: compiled(*args, **settings).memory.temp_bytes
    whole = temp({})
    assert temp({}, rows=16, num_microbatches=4) < 1.05 * whole, "microbatches of the same size"
    assert temp({"context": 4}) < 0.35 * whole
    of_pipeline = temp({"stage": 2})
    assert temp({"stage": 2}, rows=32, num_microbatches=8) < 1.05 * of_pipeline + 32 * 256 * 16
    assert 3 * of_pipeline < temp({"stage": 2}, train=True)


@pytest.mark.parametrize(
    ("axes", "num_microbatches"), [({}, 1), ({"data": 2, "context": 2}, 4), ({"data": 8}, 3)]
)
def test_each_row_held_out_counts_once_on_every_mesh(capsys, axes, num_microbatches):
    mesh, x = (
        jaxpar.make_mesh(**axes, devices=jax.devices()[: int(np.prod([*axes.values()]))]),
        np.arange(26),
    )
    test = Columns({"x": x.reshape(13, 2).repeat(4, 1)})
    of = lambda num_rows: held_out_batches(6, num_rows, test, mesh, num_microbatches)
    found = [jaxpar.fetch(batch) for batch in of(6) + of(12)]
    assert [len(each["x"]) % (num_microbatches * mesh.shape["data"]) for each in found] == [0, 0, 0]
    rows = [each["x"][each["weight"] > 0].min(1).tolist() for each in found]
    assert rows[0] == rows[1], "the same rows, however many follow"
    assert rows[1:] == [test.batch(6, seed=0, step=step)["x"].min(1).tolist() for step in range(2)]
    assert {each["weight"].sum() for each in found} == {6}
    said = capsys.readouterr().out.splitlines()
    assert said == [f"an evaluation reads {count} of 13 rows held out" for count in (6, 12)]
    of(7)
    assert (
        capsys.readouterr().out
        == "an evaluation reads 12 of 13 rows held out, in whole batches, for the 7 asked for\n"
    )


def test_an_evaluation_is_one_program():
    with pytest.raises(
        ValueError,
        match=r'got executor="mpmd" and stage=2\. Use executor="spmd", which takes the same',
    ):
        make_eval(LLAMA, {"stage": 2}, executor="mpmd")


def test_settings_that_are_no_pipeline_are_refused():
    mesh = jaxpar.make_mesh(data=8)
    with (
        tiny.signatures_unchecked(),
        pytest.raises(TypeError, match=r"got 4\. Write jaxpar\.Pipeline\('1f1b'\)"),
    ):
        jaxpar.make_eval_step(lambda w, batch: batch["x"] * w, lambda y, _: (y.sum(), 1.0), mesh, 4)  # pyright: ignore[reportArgumentType]


@pytest.mark.parametrize("reads", [True, False])
def test_an_evaluation_that_counts_rows_of_padding_is_told(reads):
    mesh = jaxpar.make_mesh(data=2, devices=jax.devices()[:2])
    rows = pad_rows({"x": np.ones((3, 2), np.float32)}, 4)
    of_rows = lambda y, batch: batch["weight"] if reads else jnp.ones(len(y))
    loss = lambda y, batch: ((y.sum(1) * of_rows(y, batch)).sum(), of_rows(y, batch).sum())
    step = jaxpar.make_eval_step(lambda w, batch: batch["x"] * w, loss, mesh)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        _, count = step(np.float32(1), jaxpar.shard_batch(rows, mesh))
    assert float(count) == (3 if reads else 4)
    said = [str(each.message) for each in told]
    assert [each.startswith("a loss should multiply by 'weight' of a batch") for each in said] == (
        [] if reads else [True]
    )


def test_a_loss_that_is_no_sum_is_refused_as_in_training():
    mesh, batch = (
        jaxpar.make_mesh(data=2, devices=jax.devices()[:2]),
        {"x": np.ones((4, 2), np.float32)},
    )
    step = jaxpar.make_eval_step(
        lambda w, batch: batch["x"] * w, lambda y, _: (y.sum(), y.mean() * 0 + 1.0), mesh
    )
    with pytest.raises(ValueError, match="weight_sum must depend on the batch alone"):
        step(np.float32(1), jaxpar.shard_batch(batch, mesh))
    step = jaxpar.make_eval_step(
        lambda w, batch: batch["x"] * w, lambda y, _: (y.sum(), np.float32(1), y), mesh
    )
    with pytest.raises(TypeError, match="the third value of loss must be a dict of sums by name"):
        step(np.float32(1), jaxpar.shard_batch(batch, mesh))
