"""Blocks of the fuzz test that read or change other leaves of x than ``h``, and blocks that hold blocks."""

import functools

import jax
import jax.numpy as jnp

from tests.support.fuzz.block import POLICIES, D, T, block, run

# --- what travels beside h ------------------------------------------------------------------------------------------


def add_to_h(x, more):
    return x | {"h": x["h"] + more.astype(x["h"].dtype)}


@block("ww", needs=["mask"])
def attention(p, x, a, b):
    h = x["h"]
    scores = jnp.einsum("btd,bsd->bts", h @ p[a], h)
    seen = x["mask"][:, None] | jnp.eye(T, dtype=bool)[None]
    return add_to_h(x, jax.nn.softmax(jnp.where(seen, scores, -1e9), axis=-1) @ h @ p[b])


@block(exact=True, needs=["mask"])
def mask(p, x):
    return x | {"h": jnp.where(x["mask"][..., None], x["h"], 0), "mask": ~x["mask"]}


@block("t", exact=True, needs=["position"])
def positions(p, x, t):
    return add_to_h(x, p[t][x["position"]]) | {"position": x["position"][:, ::-1]}


@block(exact=True, needs=["position"])
def take_along(p, x):
    return x | {"h": jnp.take_along_axis(x["h"], x["position"][..., None] % T, axis=1)}


@block(exact=True, needs=["position"])
def scatter(p, x):
    rows = jnp.arange(len(x["h"]))[:, None]
    return x | {"h": jnp.zeros_like(x["h"]).at[rows, x["position"] % T].add(x["h"])}


@block(exact=True, needs=["key"])
def dropout(p, x):
    keep = jax.vmap(lambda key: jax.random.bernoulli(key, 0.7, (T, D)))(x["key"])
    return x | {
        "h": jnp.where(keep, x["h"], 0),
        "key": jax.vmap(lambda key: jax.random.fold_in(key, 1))(x["key"]),
    }


@block("s", needs=["raw"])
def noise(p, x, s):
    """A key as two integers, as JAX once had them."""
    new = jax.vmap(lambda raw: jax.random.split(raw, 2))(x["raw"])
    normal = jax.vmap(lambda raw: jax.random.normal(raw, (T, D), x["h"].dtype))(new[:, 0])
    return add_to_h(x, p[s] * normal) | {"raw": new[:, 1]}


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def picked(sign, h, position):
    return sign * jnp.where(position[..., None] > 2, h, 0)


picked.defvjp(
    lambda sign, h, position: (picked(sign, h, position), position),
    lambda sign, position, g: (sign * jnp.where(position[..., None] > 2, g, 0), None),
)


@block(exact=True, needs=["position"])
def custom_vjp_of_integers(p, x):
    return add_to_h(x, picked(-1, x["h"], x["position"]))


@block("t", exact=True, needs=["counter"])
def count(p, x, t):
    """An integer without rows, which each layer changes."""
    chosen = jax.lax.dynamic_index_in_dim(p[t], x["counter"] % len(p[t]), keepdims=False)
    return add_to_h(x, chosen[None, None]) | {"counter": x["counter"] + 1}


@block("w", exact=True, needs=["second"])
def second(p, x, w):
    new = jnp.where(x["second"] > 0, x["second"], 0) + x["h"].astype(x["second"].dtype) @ p[
        w
    ].astype(x["second"].dtype)
    return add_to_h(x, x["second"]) | {"second": new}


@block(exact=True, needs=["second"])
def swap(p, x):
    return x | {"h": x["second"].astype(x["h"].dtype), "second": x["h"].astype(x["second"].dtype)}


@block(exact=True, needs=["scalar"])
def scalar(p, x):
    return x | {"h": (x["h"] * x["scalar"]).astype(x["h"].dtype), "scalar": -x["scalar"]}


@block("s", exact=True, needs=["scalar"])
def new_scalar(p, x, s):
    """What it was is forgotten."""
    return x | {"scalar": p[s].astype(x["scalar"].dtype)}


@block(exact=True, needs=["second"])
def twice(p, x):
    """One array as two leaves, where they have one dtype."""
    h = x["h"] + x["second"].astype(x["h"].dtype)
    return x | {"h": h, "second": h.astype(x["second"].dtype)}


@block(exact=True, needs=["second", "mask"])
def zeros(p, x):
    return x | {"second": jnp.zeros_like(x["second"]), "mask": jnp.ones_like(x["mask"])}


@block("v", exact=True, needs=["aux"])
def aux(p, x, v):
    """A sum over rows, which the loss adds to its own."""
    return x | {
        "aux": x["aux"]
        + jnp.sum(x["h"].astype(x["aux"].dtype) * p[v].astype(x["aux"].dtype)[None, None])
    }


@block("v", needs=["wave"])
def wave(p, x, v):
    turned = x["wave"] * jnp.exp(1j * p[v])[None, None] + 1j * x["h"]
    return add_to_h(x, x["wave"].real) | {"wave": turned}


# --- what makes the loss depend on how rows are split ---------------------------------------------------------------

LEAKS = (
    *("mean_of_rows", "scalar_of_rows", "counter_of_rows", "aux_of_params"),
    *("batch_norm", "centred_by_the_batch", "balance_of_the_batch"),  # of blocks_of_rows.py
)


@block("v", needs=["aux"])
def mean_of_rows(p, x, v):
    return x | {
        "aux": x["aux"]
        + jnp.mean(x["h"].astype(x["aux"].dtype) * p[v].astype(x["aux"].dtype)[None, None])
    }


@block("v", needs=["scalar"])
def scalar_of_rows(p, x, v):
    return x | {
        "scalar": x["scalar"] + jnp.max(x["h"] * p[v][None, None]).astype(x["scalar"].dtype)
    }


@block("v", exact=True, needs=["counter"])
def counter_of_rows(p, x, v):
    return x | {
        "counter": x["counter"]
        + jnp.any(x["h"] * p[v].astype(x["h"].dtype)[None, None] > 1).astype(jnp.int32)
    }


@block("v", exact=True, needs=["aux"])
def aux_of_params(p, x, v):
    """A number that the loss adds once, and not once a row."""
    return x | {"aux": x["aux"] + jnp.sum(p[v].astype(x["aux"].dtype))}


# --- blocks of blocks -----------------------------------------------------------------------------------------------


@block("B", exact=True)
def residual(p, x, body):
    return add_to_h(run(body, p, x), x["h"])


@block("B", exact=True)
def jit(p, x, body):
    return jax.jit(lambda p, x: run(body, p, x))(p, x)


@block("B", exact=True)
def jit_closing_over(p, x, body):
    return jax.jit(lambda h: run(body, p, x | {"h": h}))(x["h"])


@block("PB", exact=True)
def checkpoint(p, x, policy, body):
    return jax.checkpoint(lambda p, x: run(body, p, x), policy=POLICIES[policy])(p, x)


@block("PB", exact=True)
def checkpoint_closing_over(p, x, policy, body):
    return x | {
        "h": jax.checkpoint(lambda h: run(body, p, x | {"h": h})["h"], policy=POLICIES[policy])(
            x["h"]
        )
    }


@block("nB", exact=True)
def scan(p, x, length, body):
    return jax.lax.scan(lambda x, _: (run(body, p, x), None), x, length=length)[0]


@block("nB", exact=True)
def fori_loop(p, x, length, body):
    return jax.lax.fori_loop(0, length, lambda _, x: run(body, p, x), x)


@block("vBB", exact=True)
def cond_on_param(p, x, v, yes, no):
    return jax.lax.cond(p[v][0] > 0, lambda x: run(yes, p, x), lambda x: run(no, p, x), x)


@block("BB", exact=True, needs=["counter"])
def cond_on_counter(p, x, yes, no):
    x = jax.lax.cond(
        x["counter"] % 2 == 0, lambda p, x: run(yes, p, x), lambda p, x: run(no, p, x), p, x
    )
    return x | {"counter": x["counter"] + 1}


@block("BB", exact=True, needs=["counter"])
def switch(p, x, one, two):
    branches = [lambda x: run(one, p, x), lambda x: x, lambda x: run(two, p, x)]
    return jax.lax.switch((x["counter"] + 2) % 3, branches, x)


WITHOUT_ROWS = ("counter", "scalar", "aux")


def of_each_row(function, x):
    """``function`` of one row, made of one of x, a batch of one row; the rows; and what has no rows, which it leaves."""
    whole = {name: leaf for name, leaf in x.items() if name in WITHOUT_ROWS}
    rows = {name: leaf for name, leaf in x.items() if name not in WITHOUT_ROWS}

    def of_row(row):
        made = function(jax.tree.map(lambda leaf: leaf[None], row) | whole)
        return jax.tree.map(lambda leaf: leaf[0], {name: made[name] for name in row})

    return of_row, rows, whole


@block("B", exact=True)
def vmap(p, x, body):
    of_row, rows, whole = of_each_row(lambda x: run(body, p, x), x)
    return jax.vmap(of_row)(rows) | whole


@block("BB", exact=True)
def cond_on_row(p, x, yes, no):
    one = lambda x: jax.lax.cond(
        x["h"][0, 0, 0] > 0, lambda x: run(yes, p, x), lambda x: run(no, p, x), x
    )
    of_row, rows, whole = of_each_row(one, x)
    return jax.lax.map(of_row, rows) | whole


@block("LB", exact=True)
def low(p, x, dtype, body):
    """The main line in a smaller dtype for a while."""
    made = run(body, p, x | {"h": x["h"].astype(dtype)})
    return made | {"h": made["h"].astype(x["h"].dtype)}


@block("LB", exact=True)
def low_params(p, x, dtype, body):
    """Params that are cast where they are used."""
    return run(body, {name: leaf.astype(dtype) for name, leaf in p.items()}, x)
