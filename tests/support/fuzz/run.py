"""Runs a case of the fuzz test, and holds it against ``jax.value_and_grad`` of the plain composition on one device."""

import functools
import random
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import optax
from jax.sharding import PartitionSpec

import jaxpar
from jaxpar.dtypes import wide_dtype
from jaxpar.pipeline import check_permutes
from jaxpar.schedule import PLACEMENT, make_schedule
from tests.support import oracle
from tests.support.fuzz.block import EXPERTS, LOW_DTYPES, POLICIES, seed_of
from tests.support.fuzz.blocks_of_effects import ASKING, of_no_microbatch
from tests.support.fuzz.blocks_of_x import LEAKS
from tests.support.fuzz.grammar import Model, words_of
from tests.support.fuzz.model import (
    CLOSED_OVER,
    loss_of,
    make_batch,
    make_model,
    make_params,
    over_context,
)
from tests.support.schedules import random_schedule, sends_twice_one_way

LEAKS_OF_X = frozenset(LEAKS)
REFUSALS = ("must treat each row of a batch on its own", "must be sums over the rows")


class LeftOutError(Exception):
    """A case that is inconclusive, or known not to work."""


def check(case):
    """Raises unless a case gives the numbers of one device, or is refused where it must be, or is left out."""
    with jax.enable_x64(True):
        of_no_microbatch.clear()
        if (run := run_or_refusal(case)) is None:
            return
        got, want = run
        jax.effects_barrier()
        assert not of_no_microbatch, (
            f"an idle stage called the host\nto run it again: tests.support.fuzz.run.check({case!r})"
        )
        largest = float(np.max([np.abs(leaf).max(initial=0) for leaf in jax.tree.leaves(want)]))
        leave_out(not np.isfinite(largest), "numbers that are too large")
        floor = (
            1e-3 * largest
        )  # a gradient that is zero but for rounding is held against the others
        try:
            oracle.assert_same(got, want, floor=floor)
        except AssertionError as error:
            if case.trains:
                check(replace(case, trains=False))  # which may be left out
            leave_out(
                case.model.is_exact and not is_exact(case),
                "integers that a small dtype cannot hold",
            )
            leave_out(
                not case.trains and is_ill_conditioned(case, got, want, floor),
                "numbers that rounding moves on one device too",
            )
            raise AssertionError(
                f"{error}\nto run it again: tests.support.fuzz.run.check({case!r})"
            ) from None


def run_or_refusal(case):
    """The numbers of a case, or None for one that is refused as it must be."""
    model = case.model
    leaks = (
        not LEAKS_OF_X.isdisjoint(words_of((model.before, *model.layers)))
        and case.mesh[0] * case.num_microbatches > 1
    )
    leave_out(leaks and case.is_plain, "a plain function, of which no leaf can be seen")
    draws = (
        case.trains
        and not model.is_listed
        and case.parts is not None
        and not layout_of(case).is_canonical
    )
    try:
        made = run_case(case)
    except ValueError as error:
        if leaks and is_refusal(error):
            leave_out(not depends_on_split(case), "numbers that do not show how rows are split")
            return None
        if draws and "an optimizer that draws random numbers" in str(error):
            return None
        raise
    again = f"to run it again: tests.support.fuzz.run.check({case!r})"
    assert not (leaks and depends_on_split(case)), (
        f"rows that are mixed change the loss, and are taken; {again}"
    )
    assert not draws, f"packed layers have noise in the order of the devices; {again}"
    return made


def is_refusal(error):
    """Whether an error says that rows are mixed."""
    return any(rule in str(error) for rule in REFUSALS)


def depends_on_split(case):
    """Whether the losses of the microbatches of all replicas add up to something else than that of the batch."""
    count = case.mesh[0] * case.num_microbatches
    params, batch, _ = reference(case.model, case.seed, count * case.rows)
    apply, loss = make_model(case.model).apply, loss_of(case.model)
    run = jax.jit(lambda params, rows: loss(apply(params, rows), rows)[0])
    parts = [
        jax.tree.map(lambda leaf, i=i: leaf[i * case.rows : (i + 1) * case.rows], batch)
        for i in range(count)
    ]
    each, whole = [float(run(params, part)) for part in parts], float(run(params, batch))
    return abs(sum(each) - whole) > 1e-9 * max(map(abs, [*each, whole]))


def leave_out(condition, why):
    if condition:
        raise LeftOutError(why)


def is_ill_conditioned(case, got, want, floor):
    """Whether ``got`` differs by rounding only: params that differ in the last bit change the numbers of one device as much."""
    off = oracle.distance(got, want, floor=floor)
    if off > 1e-10:
        return False
    rows = case.mesh[0] * case.num_microbatches * case.rows
    moved = [reference(case.model, case.seed, rows, moved=seed)[2] for seed in (1, 2, 3)]
    # Rounding in hundreds of operations adds up.
    return off < 1000 * max(oracle.distance(each, want, floor=floor) for each in moved)


@functools.lru_cache(maxsize=64)
def reference(model, seed, num_rows, *, moved=0):
    """Params, batch, and the loss and gradients of one device; ``moved`` is a seed of changes to the params' last bits."""
    params, batch = make_params(model, seed), make_batch(model, seed, num_rows)
    if moved:
        rng = np.random.default_rng(moved)
        params = jax.tree.map(lambda leaf: with_other_last_bits(leaf, rng), params)
    apply, loss = make_model(model).apply, loss_of(model)

    def mean(params, batch):
        total, weight, *sums = loss(apply(params, batch), batch)
        return total / weight, jax.tree.map(
            lambda each: each / weight.astype(wide_dtype(weight.dtype)), sums
        )

    (value, means), grads = jaxpar.fetch(
        jax.jit(jax.value_and_grad(mean, has_aux=True))(params, batch)
    )
    return params, batch, ((value, *means) if means else value, grads)


def with_other_last_bits(leaf, rng):
    """The leaf with each float64 one step up or down; other dtypes are unchanged."""
    if jnp.asarray(leaf).dtype != jnp.float64:
        return leaf
    return np.nextafter(leaf, rng.choice([-np.inf, np.inf], size=np.shape(leaf)))


def run_case(case):
    """Loss and gradients from the mesh, in canonical order, and those of one device."""
    data, stage, tensor = case.mesh
    names = words_of((case.model.before, *case.model.layers, case.model.after))
    leave_out(
        tensor > 1 and not ASKING.isdisjoint(names),
        "values from the host beside tensor, which are refused",
    )
    mesh = jaxpar.make_mesh(data=data, context=case.context, stage=stage, tensor=tensor)
    params, batch, want = reference(case.model, case.seed, data * case.num_microbatches * case.rows)
    is_trained = any(np.any(grad != 0) for grad in jax.tree.leaves(want[1]))
    leave_out(not is_trained, "a model whose outputs depend on no param, which is refused")
    if case.context > 1:
        batch = {name: leaf for name, leaf in batch.items() if name != "raw"}
    options, layout = {}, layout_of(case)
    if layout is not None:
        options["layout"] = layout
        params = params if case.model.is_listed else layout.pack_params(params)
    if case.cuts == -1:
        params, batch = jax.tree.map(jnp.asarray, (params, batch))
    elif case.cuts is not None:
        shardings = jaxpar.shardings_from_paths(params, mesh, rules_of(params, case))
        sequences = [name for name, leaf in batch.items() if leaf.ndim > 1]
        params, batch = (
            jaxpar.shard(params, shardings),
            jaxpar.shard_batch(batch, mesh, sequences=sequences),
        )
        if case.zero or case.cuts % 2:
            options["shardings"] = shardings

    def on_mesh(closed_over):
        model = make_model(case.model, closed_over)
        model = over_context(model) if case.context > 1 else model
        return jaxpar.value_and_grad(
            model.apply if case.is_plain else model,
            loss_of(case.model, closed_over),
            mesh,
            schedule=schedule_of(case),
            num_chunks=case.num_chunks,
            num_microbatches=case.num_microbatches,
            remat=POLICIES.get(case.remat, case.remat),
            zero=case.zero,
            executor=case.executor,
            overlap_grad_reduce=case.overlap_grad_reduce,
            mask_idle_ops=case.masks,
            has_aux=case.model.has_aux,
            **options,
        )

    if case.trains:
        return trained(
            case, mesh, shardings, params, batch, on_mesh(CLOSED_OVER)
        ), trained_on_one_device(case)
    value_and_grad = lambda closed_over, params, batch: on_mesh(closed_over)(params, batch)
    given = jax.tree.map(jnp.asarray, CLOSED_OVER), params, batch
    if case.executor == "spmd" and (case.is_traced or (stage > 1 and tensor > 1)):
        value_and_grad = jax.jit(value_and_grad).lower(*given).compile()
        try:
            check_permutes(value_and_grad)
        except ValueError:
            leave_out(tensor > 1, "a permutation in a branch")
            raise
    try:
        value, grads = jaxpar.fetch(value_and_grad(*given))
    except jax.errors.JaxRuntimeError as error:
        leave_out(
            "fft_thunk" in str(error), "an FFT that XLA's CPU backend cannot lay out beside tensor"
        )
        raise
    if layout is not None and not case.model.is_listed:
        grads = layout.unpack_params(grads)
    return (value, grads), want


def trained(case, mesh, shardings, params, batch, value_and_grad):
    """Params after a step with noise."""
    optimizer = optax.noisy_sgd(1e-2, key=jax.random.key(case.seed))
    state = jaxpar.init_state(
        lambda key: params, jax.random.key(0), optimizer, mesh, shardings, zero=case.zero
    )
    try:
        state, metrics = jaxpar.make_train_step(value_and_grad, optimizer)(state, batch)
    except ValueError as error:
        leave_out(not is_refusal(error) and min(case.mesh[1:]) > 1, "a permutation in a branch")
        raise
    leave_out(metrics["skipped"], "numbers that are too large")
    return jaxpar.fetch(state.params)


def trained_on_one_device(case):
    params, _, (_, grads) = reference(
        case.model, case.seed, case.mesh[0] * case.num_microbatches * case.rows
    )
    optimizer = optax.noisy_sgd(1e-2, key=jax.random.key(case.seed))
    updates, _ = jax.jit(optimizer.update)(grads, optimizer.init(params), params)
    return jaxpar.fetch(optax.apply_updates(params, updates))


def layout_of(case):
    """The layout of params that come packed, or of a list of layers that are spread as asked."""
    if case.parts is None:
        return None
    placement = PLACEMENT[case.schedule]
    return jaxpar.LayerLayout(
        case.model.num_layers, case.mesh[1], case.num_chunks, placement, case.parts
    )


def owned_of(case):
    """The names of the weights of experts that replicas own: of layers that use them in nothing else, in every microbatch.

    Inside a body a replica might skip the layer that others send rows to.
    """
    layers = [nodes for nodes in case.model.layers if nodes]
    mixtures = {node[2] for nodes in layers for node in nodes if node[0] == "mixture"}
    inside = [
        [arg for arg in node[1:] if isinstance(arg, tuple)] for nodes in layers for node in nodes
    ]
    others = {word for bodies in inside for word in words_of(bodies)}
    others |= {
        word
        for nodes in layers
        for node in nodes
        if node[0] != "mixture"
        for word in node
        if isinstance(word, str)
    }
    return (
        mixtures - others
        if case.mesh[0] == EXPERTS and case.cuts % 2 and case.executor == "spmd"
        else set()
    )


def rules_of(params, case):
    """A spec for each leaf, some cut over ``tensor``, and over ``data`` those of experts that replicas own."""
    tensor, rules, owned = case.mesh[2], {}, owned_of(case)
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        name = jaxpar.sharding.path_string(path)
        shape = (
            leaf.shape[1:]
            if name.startswith("layers/") and not case.model.is_listed
            else leaf.shape
        )
        fitting = [None, *(dim for dim, size in enumerate(shape) if size % tensor == 0)]
        dim = fitting[seed_of(case.cuts, name) % len(fitting)] if case.cuts else None
        entries = [None] * len(shape) if dim is None else [*(None,) * dim, "tensor"]
        if name.startswith("layers/") and name.rpartition("/")[2] in owned:
            entries = ["data", *entries[1:]]
        rules[name] = PartitionSpec(*entries)
    return rules


def schedule_of(case):
    """A name, or a Schedule."""
    if case.form is None:
        return case.schedule
    sizes = case.mesh[1], case.num_microbatches, case.num_chunks
    if isinstance(case.form, str):
        return make_schedule(case.schedule, *sizes, form=case.form, remat=case.remat is True)
    rng, placement = random.Random(case.form), PLACEMENT[case.schedule]
    kinds = "".join(["F", "R" * (case.remat is True), "B", "W" * rng.randint(0, 1)])
    sizes = {"num_stages": sizes[0], "num_microbatches": sizes[1], "num_chunks": sizes[2]}
    while sends_twice_one_way(
        schedule := random_schedule(rng, **sizes, placement=placement, kinds=kinds)
    ):
        pass
    return schedule


def promoted(value):
    """A model in which all that is of a smaller dtype is float64."""
    if isinstance(value, Model):
        nodes = {name: promoted(getattr(value, name)) for name in ("before", "layers", "after")}
        return replace(value, dtypes=("float64",), **nodes)
    return (
        tuple(map(promoted, value))
        if isinstance(value, tuple)
        else "float64"
        if value in LOW_DTYPES
        else value
    )


def is_exact(case):
    """Whether small dtypes give the same as float64 on one device, for all rows and for those of each microbatch.

    A sum over all rows may be a number that a small dtype holds, and the gradient of one microbatch not.
    """
    num_rows = case.mesh[0] * case.num_microbatches * case.rows
    parts = [np.arange(num_rows), *np.arange(num_rows).reshape(-1, case.rows)]
    small, large = (
        [gradients_of(model, case.seed, num_rows, part) for part in parts]
        for model in (case.model, promoted(case.model))
    )
    return all(
        np.array_equal(a.astype(b.dtype), b)
        for a, b in zip(*map(jax.tree.leaves, (small, large)), strict=True)
    )


def gradients_of(model, seed, num_rows, part):
    """The part of some rows in the loss and gradients of one device."""
    params, batch = make_params(model, seed), make_batch(model, seed, num_rows)
    apply, loss = make_model(model).apply, loss_of(model)
    weight = loss(apply(params, batch), batch)[1]
    rows = jax.tree.map(lambda leaf: leaf[part], batch)
    mean = lambda params, rows: loss(apply(params, rows), rows)[0] / weight
    return jaxpar.fetch(jax.jit(jax.value_and_grad(mean))(params, rows))
