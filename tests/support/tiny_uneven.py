"""Two small models for the MPMD executor: one with what a pipeline must carry, and a CNN of layers unlike each other."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar

ROWS, WIDTH, CLASSES = 16, 8, 4


def embed(outer, batch):
    return {
        "h": outer["table"][batch["token"]] + outer["start"][None],
        "row": batch["row"],
        "scale": outer["start"].sum(),
    }


def layer(p, x):
    h = jnp.tanh(x["h"] @ p["w_up"] + p["b_up"][None]) @ p["w_down"]
    return x | {"h": x["h"] * x["scale"] + jnp.where(x["row"] % 2 == 0, 1, 0.5)[:, None] * h}


def head(outer, x):
    return x["h"] @ outer["table"].T


MODEL = jaxpar.LayeredModel(embed, layer, head)
RULES = {
    "layers/w_up": jaxpar.column_parallel(),
    "layers/b_up": jaxpar.column_parallel(ndim=1),
    "layers/w_down": jaxpar.row_parallel(),
    "outer/*": jaxpar.replicated(),
}


def make_params(num_layers, seed=0, dtype=np.float64):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: (0.5 * rng.normal(size=shape)).astype(dtype)
    up, down = draw(num_layers, WIDTH, WIDTH), draw(num_layers, WIDTH, WIDTH)
    return {
        "outer": {"table": draw(CLASSES, WIDTH), "start": draw(WIDTH), "unread": draw(4, 4)},
        "layers": {"w_up": up, "b_up": draw(num_layers, WIDTH), "w_down": down},
    }


def make_batch(seed=0, rows=ROWS, dtype=np.float64):
    rng = np.random.default_rng(seed)
    token, label = rng.integers(0, CLASSES, (2, rows)).astype(np.int32)
    weight = (rng.uniform(0, 2, rows) * (rng.uniform(size=rows) < 0.7) + 1e-3).astype(dtype)
    return {
        "token": token,
        "label": label,
        "weight": weight,
        "row": np.arange(rows, dtype=np.int32),
    }


def loss(outputs, batch):
    return jaxpar.losses.softmax_cross_entropy(outputs, batch["label"], batch["weight"])


@functools.cache
def reference(model):
    def mean(params, batch):
        total, weight = loss(model.apply(params, batch), batch)
        return total / weight

    return jax.jit(jax.value_and_grad(mean))


def mpmd_value_and_grad(mesh, *, num_microbatches=4, model=MODEL, loss=loss, **settings):
    return jaxpar.value_and_grad(
        model, loss, mesh, num_microbatches=num_microbatches, executor="mpmd", **settings
    )


def on_mesh(mesh, params, batch, rules=RULES):
    shardings = jaxpar.shardings_from_paths(params, mesh, rules)
    return jaxpar.shard(params, shardings), jaxpar.shard_batch(batch, mesh)


def conv(p, x):
    h = jax.lax.conv_general_dilated(
        x["h"], p["kernel"], (1, 1), "SAME", dimension_numbers=("NHWC", "HWIO", "NHWC")
    )
    return x | {"h": jnp.tanh(h)}


def pool(p, x):
    return x | {
        "h": jax.lax.reduce_window(x["h"], 0.0, jax.lax.add, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")
    }


def flatten(p, x):
    return x["h"].reshape(len(x["h"]), -1), x["row"]


def dense(p, x):
    h, row = x
    return jnp.tanh(h @ p["w"] + p["b"][None]) * p["scale"], row


CNN = jaxpar.LayeredModel(
    lambda outer, batch: {"h": batch["image"] * outer["gain"], "row": batch["row"]},
    [conv, pool, flatten, dense, dense],
    lambda outer, x: x[0] @ outer["w"] * outer["gain"],
)


def make_cnn(seed=0):
    rng = np.random.default_rng(seed)
    draw = lambda *shape: 0.5 * rng.normal(size=shape)
    layers = [
        {"kernel": draw(3, 3, 1, 2)},
        {},
        {},
        {"w": draw(8, 6), "b": draw(6), "scale": draw()},
        {"w": draw(6, 4), "b": draw(4), "scale": draw()},
    ]
    batch = {"image": draw(ROWS, 4, 4, 1), "row": np.arange(ROWS, dtype=np.int32)}
    batch |= {
        "label": rng.integers(0, CLASSES, ROWS).astype(np.int32),
        "weight": rng.uniform(0.5, 2, ROWS),
    }
    return {"outer": {"gain": draw(), "w": draw(4, CLASSES)}, "layers": layers}, batch
