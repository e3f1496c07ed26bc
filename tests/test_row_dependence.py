"""Leaves of x and sums of a loss: those that make the loss depend on how rows are split are refused, the others are taken."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import jaxpar
from jaxpar.loss_checks import check_rows
from jaxpar.row_dependence import CONSTANT, ROWS, Kind, trace_dependences
from tests.support.oracle import assert_same
from tests.support.tiers import quick

RNG = np.random.default_rng(0)
PARAMS = {
    "outer": {"w": RNG.normal(size=(3, 4)), "out": RNG.normal(size=(4, 2))},
    "layers": {"w": RNG.normal(size=(2, 4, 4)) / 2},
}
BATCH = {"x": RNG.normal(size=(16, 3)), "y": RNG.normal(size=(16, 2)), "number": np.arange(16, dtype=np.int32)}
FEW = jax.tree.map(lambda a: a[:8], BATCH)


def loss(outputs, batch):
    loss_sum, weight_sum = jaxpar.losses.squared_error(outputs[0], batch["y"])
    return loss_sum + 0.1 * jnp.sum(outputs[1]), weight_sum


def model(layer, *, embed=lambda batch: jnp.zeros(()), change=lambda h, aux: h, head=lambda aux, h: aux):
    """A model whose layers make ``aux`` of params, of ``aux`` and of h, and may change h by it."""
    return jaxpar.LayeredModel(
        lambda outer, batch: {"h": batch["x"] @ outer["w"], "aux": embed(batch)},
        lambda params, x: {
            "h": jnp.tanh(change(x["h"], x["aux"]) @ params["w"]),
            "aux": layer(params["w"], x["aux"], x["h"]),
        },
        lambda outer, x: (x["h"] @ outer["out"], head(x["aux"], x["h"])),
    )


def count_experts(aux, h, weight):
    return aux + jnp.zeros(4).at[jnp.argmax(h, axis=-1)].add(weight)


def over_rows(add):
    """A loop over the rows, which carries what it adds."""
    return lambda w, aux, h: jax.lax.scan(lambda aux, row: (add(aux, row), None), aux, h)[0]


def trips(h, limit):
    """How often each number is halved until it is below the limit."""
    halved = lambda a: jax.lax.while_loop(lambda s: s[0] > limit, lambda s: (s[0] / 2, s[1] + 1), (a, 0.0))[1]
    return jax.vmap(halved)(jnp.abs(h).reshape(-1))


def noise(w, key, h):
    return jax.random.split(key)[0]


drop = lambda h, key: h * jax.random.bernoulli(key, 0.5, (4,))[None]
ignored = lambda aux, h: jnp.zeros(())

TAKEN = {
    "a sum": model(lambda w, aux, h: aux + jnp.sum(h**2)),
    "a mean times the rows": model(lambda w, aux, h: aux + jnp.mean(h**2) * len(h)),
    "a product that adds up rows": model(lambda w, aux, h: aux + jnp.einsum("bd,bd->", h, h) / 4),
    "a sum in a loop": model(lambda w, aux, h: jax.lax.fori_loop(0, 3, lambda i, a: a + i * jnp.sum(h), aux)),
    "a sum in a branch": model(lambda w, aux, h: jax.lax.cond(w[0, 0] > -9, lambda: aux + jnp.sum(h), lambda: aux)),
    "a sum in a while loop": model(
        lambda w, aux, h: jax.lax.while_loop(
            lambda s: s[0] < 3 + w[0, 0], lambda s: (s[0] + 1, s[1] + jnp.sum(h)), (0.0, aux)
        )[1]
    ),
    "a sum under jit, remat and of vmap": model(
        jax.checkpoint(jax.jit(lambda w, aux, h: aux + jnp.sum(jax.vmap(jax.nn.softmax)(h)))),
    ),
    "a sum of what a loop over rows makes": model(lambda w, aux, h: aux + jnp.sum(jax.lax.map(jnp.max, h))),
    "a sum of numbers that each loop as long as they say": model(lambda w, aux, h: aux + jnp.sum(trips(h, 0.1))),
    "a sum of what a loop over rows chooses": model(
        lambda w, aux, h: aux + jnp.sum(jax.lax.map(lambda row: jax.lax.cond(row[0] > 0, jnp.sum, jnp.max, row), h))
    ),
    "counts of experts": model(lambda w, aux, h: count_experts(aux, h, 1.0), embed=lambda batch: jnp.zeros(4)),
    "a sum for each layer": model(
        lambda w, aux, h: (aux[0].at[aux[1]].set(jnp.sum(h)), aux[1] + 1),
        embed=lambda batch: (jnp.zeros(2), 0),
        head=lambda aux, h: aux[0],
    ),
    "a sum that a branch on rows passes on": model(
        lambda w, aux, h: jax.lax.cond(jnp.any(h > 0), lambda a: (h, a), lambda a: (2 * h, a), aux + jnp.sum(h))[1]
    ),
    "a mean that is not read": model(lambda w, aux, h: aux + jnp.mean(h), head=ignored),
    "a mean that layers forget": model(lambda w, aux, h: jnp.zeros(()), embed=lambda batch: jnp.mean(batch["x"])),
    "params that scale rows": model(
        lambda w, aux, h: aux + jnp.sum(w**2), change=lambda h, aux: h * (1 + aux), head=ignored
    ),
    "params for each row": model(lambda w, aux, h: aux + jnp.sum(w**2), head=lambda aux, h: aux * len(h)),
    "a key that is one number": model(noise, embed=lambda batch: jax.random.key(0), change=drop, head=ignored),
    "the shape of rows alone": model(lambda w, aux, h: aux + jnp.sum(jnp.zeros_like(h))),
    "the number of rows": model(lambda w, aux, h: aux + jnp.float32(len(h))),
}
REFUSED = {
    "a mean": model(lambda w, aux, h: aux + jnp.mean(h**2)),
    "a mean of products": model(lambda w, aux, h: aux + jnp.einsum("bd,bd->", h, h) / len(h)),
    "a mean by weights": model(lambda w, aux, h: aux + jnp.sum(h * jnp.full((len(h), 1), 1 / len(h)))),
    "a mean by the sum of a mask": model(lambda w, aux, h: aux + jnp.sum(h) / jnp.sum(h > 0)),
    "a product of means": model(lambda w, aux, h: aux + jnp.sum(jax.nn.softmax(h).mean(0) * (h > 0).mean(0))),
    "a mean in a loop": model(lambda w, aux, h: jax.lax.fori_loop(0, 3, lambda i, a: a + i * jnp.mean(h), aux)),
    "a mean in a branch": model(lambda w, aux, h: jax.lax.cond(w[0, 0] > -9, lambda: aux + jnp.mean(h), lambda: aux)),
    "a mean in a while loop": model(
        lambda w, aux, h: jax.lax.while_loop(lambda s: s[0] < 3, lambda s: (s[0] + 1, s[1] + jnp.mean(h)), (0, aux))[1]
    ),
    "a loop as long as a row says": model(
        lambda w, aux, h: jax.lax.while_loop(
            lambda s: s[0] < 9 + 9 * h[0, 0], lambda s: (s[0] + 1, s[1] + 1), (0, aux)
        )[1]
    ),
    "a sum of numbers that loop as long as the number of rows says": model(
        lambda w, aux, h: aux + jnp.sum(trips(h, 1 / len(h)))
    ),
    "a mean under remat": model(jax.checkpoint(lambda w, aux, h: aux + jnp.mean(h))),
    "shares of experts": model(lambda w, aux, h: count_experts(aux, h, 1 / len(h)), embed=lambda batch: jnp.zeros(4)),
    "a maximum": model(lambda w, aux, h: aux + jnp.max(h)),
    "the last of a loop over rows": model(over_rows(lambda aux, row: aux * 0.5 + jnp.sum(row))),
    "a branch on a row": model(lambda w, aux, h: jax.lax.cond(h[0, 0] > 0, lambda: aux + jnp.sum(h), lambda: aux)),
    "a sum that is squared": model(lambda w, aux, h: aux + jnp.sum(h), head=lambda aux, h: aux**2),
    "a sum that scales rows": model(
        lambda w, aux, h: aux + jnp.sum(h), change=lambda h, aux: h * (1 + aux), head=ignored
    ),
    "a sum beside a number": model(lambda w, aux, h: aux + jnp.sum(h), embed=lambda batch: jnp.ones(())),
    "a mean of the batch": model(lambda w, aux, h: aux, embed=lambda batch: jnp.mean(batch["x"])),
    "a mean without a gradient": model(lambda w, aux, h: jax.lax.stop_gradient(aux + jnp.mean(h))),
    "a key of the first row": model(
        noise,
        embed=lambda batch: jax.random.fold_in(jax.random.key(0), batch["number"][0]),
        change=drop,
        head=ignored,
    ),
    "an integer of the first row": model(
        lambda w, aux, h: aux, embed=lambda batch: batch["number"][0], change=lambda h, aux: h * aux, head=ignored
    ),
    "params that are added once": model(lambda w, aux, h: aux + jnp.sum(w**2)),
}


@pytest.mark.parametrize("name", TAKEN)
def test_a_leaf_that_is_the_same_or_a_sum_is_taken(name):
    check_rows(TAKEN[name], loss, PARAMS, BATCH, 4)


@pytest.mark.parametrize("name", REFUSED)
def test_a_leaf_that_depends_on_how_rows_are_split_is_refused(name):
    with pytest.raises(
        ValueError, match=r"a leaf of x without rows must not make .*; got x\['aux'\] of shape \(4?,?\), wh"
    ):
        check_rows(REFUSED[name], loss, PARAMS, BATCH, 4)


def total(model, *parts):
    return sum(float(loss(model.apply(PARAMS, part), part)[0]) for part in parts)


@pytest.mark.parametrize("name", quick([*TAKEN, *REFUSED], "params that are added once"))
def test_what_is_refused_does_change_with_the_split_and_what_is_taken_does_not(x64, name):
    model = (TAKEN | REFUSED)[name]
    parts = [jax.tree.map(lambda a, part=part: a[part], BATCH) for part in (slice(6), slice(6, None))]
    differs = abs(total(model, *parts) / total(model, BATCH) - 1)
    assert differs > 1e-6 if name in REFUSED else differs < 1e-12


# --- in steps -------------------------------------------------------------------------------------------------------------

RUNS = {
    "microbatches": ({}, {"num_microbatches": 2}),
    "replicas": ({"data": 2}, {"overlap_grad_reduce": True}),
    "1f1b": ({"stage": 2}, {"num_microbatches": 2}),
    "mpmd": ({"stage": 2}, {"num_microbatches": 2, "executor": "mpmd"}),
}
BY_ROW = model(lambda w, aux, h: aux + jnp.mean(h**2, axis=-1), embed=lambda batch: jnp.zeros(len(batch["x"])))


@pytest.mark.parametrize("name", quick(RUNS, "replicas"))
def test_every_executor_refuses_a_mean_and_takes_a_number_for_each_row(x64, name):
    axes, settings = RUNS[name]
    mesh = jaxpar.make_mesh(**axes)
    with pytest.raises(ValueError, match=r"Give it a number for each row, of shape \[rows\], and sum it in the loss"):
        jaxpar.value_and_grad(REFUSED["a mean"], loss, mesh, **settings)(PARAMS, BATCH)
    got = jaxpar.value_and_grad(BY_ROW, loss, mesh, **settings)(PARAMS, BATCH)
    mean = lambda params: jnp.divide(*loss(BY_ROW.apply(params, BATCH), BATCH))
    assert_same(got, jax.value_and_grad(mean)(PARAMS))


@pytest.mark.full
def test_one_part_splits_nothing_and_takes_all(x64):
    mean = REFUSED["a mean"]
    got = jaxpar.value_and_grad(mean, loss, jaxpar.make_mesh(stage=2))(PARAMS, BATCH)
    assert_same(got, jax.value_and_grad(lambda params: jnp.divide(*loss(mean.apply(params, BATCH), BATCH)))(PARAMS))


def in_layers_of_its_own(step):
    """A list of layers; x becomes another tree after the first."""
    first = lambda params, h: (h @ params["w"], jnp.zeros(()))
    return jaxpar.LayeredModel(
        lambda outer, batch: batch["x"] @ outer["w"],
        [first, lambda params, x: (jnp.tanh(x[0] @ params["w"]), step(x[1], x[0]))],
        lambda outer, x: (x[0] @ outer["out"], x[1]),
    )


def test_a_leaf_that_only_later_layers_have_is_checked():
    params = PARAMS | {"layers": [{"w": w} for w in PARAMS["layers"]["w"]]}
    check_rows(in_layers_of_its_own(lambda aux, h: aux + jnp.sum(h)), loss, params, BATCH, 2)
    with pytest.raises(ValueError, match=r"got x\[1\] of shape \(\), which"):
        check_rows(in_layers_of_its_own(lambda aux, h: aux + jnp.mean(h)), loss, params, BATCH, 2)


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.mean])
def test_a_model_that_takes_two_numbers_of_rows_only_is_checked_with_these(reduce):
    def of_known_rows(w, aux, h):
        assert len(h) in (4, 16)
        return aux + reduce(h)

    known = model(of_known_rows)
    if reduce is jnp.sum:
        check_rows(known, loss, PARAMS, BATCH, 4)
    else:
        with pytest.raises(ValueError, match="a leaf of x without rows"):
            check_rows(known, loss, PARAMS, BATCH, 4)


# --- the sums of a loss ---------------------------------------------------------------------------------------------------

WEIGHTS = {"w": RNG.normal(size=(3, 2)), "scale": np.float64(0.3)}
MASKED = BATCH | {"mask": np.where(np.arange(16) < 5, 1.0, np.arange(16) % 2)[:, None]}


def forward(params, batch):
    """Any function, with outputs that have no rows beside those that have."""
    return {"h": batch["x"] @ params["w"], "decay": jnp.sum(params["w"] ** 2), "scale": params["scale"]}


def squares(outputs, batch):
    return (outputs["h"] - batch["y"]) ** 2 * batch["mask"]


def number(batch):
    return jnp.float32(len(batch["y"]))


TAKEN_LOSSES = {
    "a sum and a number": lambda o, b: (jnp.sum(squares(o, b)), number(b)),
    "a sum and its weights": lambda o, b: (jnp.sum(squares(o, b)), jnp.sum(b["mask"])),
    "two means": lambda o, b: (jnp.mean(squares(o, b)), jnp.mean(b["mask"])),
    "a mean and one": lambda o, b: (jnp.mean(squares(o, b)), 1.0),
    "a mean times the rows": lambda o, b: (jnp.mean(squares(o, b)) * len(b["y"]), number(b)),
    "params that scale": lambda o, b: (jnp.sum(squares(o, b)) * o["scale"], number(b)),
    "params in each row": lambda o, b: (jnp.sum(squares(o, b) + o["decay"]), number(b)),
    "params times the rows": lambda o, b: (jnp.sum(squares(o, b)) + o["decay"] * len(b["y"]), number(b)),
    "a part of the batch": lambda o, b: (jnp.sum(squares(o, b)), jnp.float32(len(b["y"]) / 16)),
    "sums of integers": lambda o, b: (jnp.sum(squares(o, b)), number(b), {"n": jnp.sum(b["number"]), "a": len(b["y"])}),
}
SUMS = "loss_sum and weight_sum must be sums over the rows"
ONCE = r"an output without rows must not be added once .*; got outputs\['decay'\] of shape \(\)"
FURTHER = "each sum of a loss must be one over the rows .*; got 'found', "
REFUSED_LOSSES = {
    "one": (
        lambda o, b: (jnp.sum(squares(o, b)), 1.0),
        f"{SUMS}.*loss_sum a sum over rows and weight_sum the same for",
    ),
    "a mean": (lambda o, b: (jnp.mean(squares(o, b)), number(b)), f"{SUMS}.*a mean over rows and .* a multiple of the"),
    "a mean of weights": (
        lambda o, b: (jnp.sum(squares(o, b)), jnp.mean(b["mask"])),
        f"{SUMS}.*weight_sum a mean over",
    ),
    "a masked mean": (
        lambda o, b: (jnp.sum(squares(o, b)) / jnp.sum(b["mask"]), 1.0),
        f"{SUMS}.*loss_sum no sum over rows and weight_sum the same for any number of rows. Return jnp.sum of the losses",
    ),
    "params once": (
        lambda o, b: (jnp.sum(squares(o, b)) + o["decay"], number(b)),
        f"{ONCE}. Give it a number for each",
    ),
    "a mean beside": (
        lambda o, b: (jnp.sum(squares(o, b)), number(b), {"found": jnp.mean(o["h"])}),
        f"{FURTHER}a mean over rows, and weight_sum, a multiple of the number of rows. Return jnp.sum of it",
    ),
    "a number beside": (lambda o, b: (jnp.sum(squares(o, b)), number(b), {"found": 0.1}), f"{FURTHER}the same for any"),
}


@pytest.mark.parametrize("name", TAKEN_LOSSES)
def test_a_loss_that_returns_sums_is_taken(name):
    check_rows(forward, TAKEN_LOSSES[name], WEIGHTS, MASKED, 4)


@pytest.mark.parametrize("name", REFUSED_LOSSES)
def test_a_loss_that_returns_other_than_sums_is_refused(name):
    refused, message = REFUSED_LOSSES[name]
    with pytest.raises(ValueError, match=message):
        check_rows(forward, refused, WEIGHTS, MASKED, 4)
    check_rows(forward, refused, WEIGHTS, MASKED, 1)


@pytest.mark.parametrize("name", [*TAKEN_LOSSES, *REFUSED_LOSSES])
def test_the_ratios_of_a_refused_loss_change_with_the_split_and_those_of_others_do_not(x64, name):
    given = TAKEN_LOSSES[name] if name in TAKEN_LOSSES else REFUSED_LOSSES[name][0]

    def ratios(*parts):
        made = [given(forward(WEIGHTS, part), part) for part in parts]
        loss_sum, weight_sum, *sums = jax.tree.map(lambda *each: sum(map(float, each)), *made)
        return np.array([total / weight_sum for total in (loss_sum, *jax.tree.leaves(sums))])

    halves = [jax.tree.map(lambda a, part=part: a[part], MASKED) for part in (slice(8), slice(8, None))]
    differs = np.max(abs(ratios(*halves) / ratios(MASKED) - 1))
    assert differs > 1e-6 if name in REFUSED_LOSSES else differs < 1e-6


def test_a_step_checks_the_sums_of_its_loss_before_it_is_compiled():
    refused, message = REFUSED_LOSSES["one"]
    mesh = jaxpar.make_mesh(data=2)
    with pytest.raises(ValueError, match=message):
        jaxpar.value_and_grad(forward, refused, mesh)(WEIGHTS, MASKED)


# --- what is read of a jaxpr ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("function", "kind", "degree"),
    [
        (lambda p, h: jnp.sum(h), Kind.SUM, 0),
        (lambda p, h: jnp.mean(h), Kind.SUM, -1),
        (lambda p, h: jnp.mean(h) * len(h) ** 2, Kind.SUM, 1),
        (lambda p, h: jnp.sum(h) / (len(h) - 1), Kind.SUM, None),
        (lambda p, h: jnp.ones(len(h)).sum() * p[0], Kind.CONSTANT, 1),
        (lambda p, h: p * 0, Kind.ZERO, 0),
        (lambda p, h: h @ p, Kind.ROWS, 0),
        (lambda p, h: h[0], Kind.OTHER, None),
        (lambda p, h: h - jnp.mean(h, axis=0, keepdims=True), Kind.OTHER, None),
        (lambda p, h: jnp.concatenate([p, jnp.zeros(1)]), Kind.CONSTANT, 0),
    ],
)
def test_kinds_and_powers_of_the_number_of_rows_are_found(function, kind, degree):
    few, many = ((jnp.ones(4), jax.ShapeDtypeStruct((rows, 4), jnp.float32)) for rows in (8, 16))
    _, read = trace_dependences(function, few, many, 2)
    (found,) = read([CONSTANT, ROWS])
    assert found.kind is kind
    assert kind is Kind.OTHER or found.degree == degree
