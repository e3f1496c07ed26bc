"""The functions, params and batch of a random model of the fuzz test."""

import functools

import jax
import jax.numpy as jnp
import numpy as np

import jaxpar
from jaxpar.context_parallel import gather_sequence, num_parts, places
from tests.support.fuzz.block import SHAPES, D, T, draw_param, params_of, run
from tests.support.fuzz.losses import LOSSES

VOCAB = 16
# What a model closes over: factors, and which of them it takes.
CLOSED_OVER = {"factors": np.array([0.25, 0.5]), "chosen": np.int32(1)}


def dtype_of(model, number):
    """Of h (0), ``second`` (1), the loss (2), and params (from 3 on)."""
    if len(model.dtypes) < 3:
        return model.dtypes[0]
    return (
        model.dtypes[number]
        if number < 3
        else model.dtypes[3 + (number - 3) % (len(model.dtypes) - 3)]
    )


# --- functions ------------------------------------------------------------------------------------------------------


def make_model(model, closed_over=CLOSED_OVER):
    """The LayeredModel, one of whose functions may close over arrays."""

    def layer_of(nodes, number):
        def layer(p, x):
            state = from_x(model, number, x)
            new = run(nodes, from_params(p), state)
            new["h"] = times(model, "layer", new["h"], closed_over)
            if model.is_exact:
                four = jnp.asarray(4, new["h"].dtype)
                new["h"] = jax.lax.clamp(-four, new["h"], four)
            return to_x(model, number + 1, new)

        return layer

    embed, head = (
        functools.partial(function, model, closed_over) for function in (run_embed, run_head)
    )
    if len(model.layers) == 1 and not model.changes:
        return jaxpar.LayeredModel(embed, layer_of(model.layers[0], 0), head)
    layers = [layer_of(model.layers[i % len(model.layers)], i) for i in range(model.num_layers)]
    return jaxpar.LayeredModel(embed, layers, head)


def over_context(model):
    """A model whose functions compute on whole sequences and keep the positions of their device."""

    def whole(tree):
        size = T // num_parts()
        return jax.tree.map(
            lambda a: gather_sequence(a) if a.ndim > 1 and a.shape[1] == size else a, tree
        )

    def own(tree):
        at = places(T // num_parts())
        return jax.tree.map(lambda a: a[:, at] if a.ndim > 1 and a.shape[1] == T else a, tree)

    wrap = lambda function: lambda params, given: own(function(params, whole(given)))
    return jaxpar.LayeredModel(wrap(model.embed), model.wrap_layers(wrap).layer, wrap(model.head))


def to_x(model, number, state):
    """What travels into a layer, the last of which is the head."""
    rest = {name: state[name] for name in model.extras}
    if model.changes and number % 2 == 1:
        return {"flat": state["h"].reshape(-1, T * D).astype(jnp.float64), "rest": (rest,)}
    x = {"h": state["h"]} | rest
    return x if model.structure == "dict" else tuple(x.values())


def from_x(model, number, x):
    if model.changes and number % 2 == 1:
        return {"h": x["flat"].reshape(-1, T, D).astype(dtype_of(model, 0)), **x["rest"][0]}
    return dict(x) if model.structure == "dict" else dict(zip(["h", *model.extras], x, strict=True))


def from_params(p):
    return (
        {name: leaf for group in p for name, leaf in group.items()} if isinstance(p, tuple) else p
    )


def run_embed(model, closed_over, outer, batch):
    h = {
        "plain": lambda: batch["features"],
        "lookup": lambda: outer["table"][batch["token"]],
        "dense": lambda: batch["features"] @ outer["w_in"] * outer["both"][None, None],
    }[model.embed]()
    state = {
        "h": times(model, "embed", h, closed_over).astype(dtype_of(model, 0)),
        "aux": jnp.zeros((), jnp.float64),
        "second": jnp.flip(h, axis=1).astype(dtype_of(model, 1)),
        "wave": h * (1 + 0.5j),
        "counter": jnp.int32(0),
        "scalar": outer.get("scalar"),
        "none": None,
        "alive": jnp.ones(len(h), jnp.int32),
        "empty": jnp.zeros((len(h), 0)),
    }
    state |= {name: batch[name] for name in model.extras if name in batch}
    return to_x(
        model, 0, run(model.before, outer, {name: state[name] for name in ("h", *model.extras)})
    )


def run_head(model, closed_over, outer, x):
    state = run(model.after, outer, from_x(model, model.num_layers, x))
    h = times(model, "head", state["h"], closed_over).astype(dtype_of(model, 2))
    for name in {"second", "wave"}.intersection(model.extras):
        h = h + state[name].real.astype(h.dtype)
    if "scalar" in model.extras:
        h = h * state["scalar"]
    if model.embed == "dense":
        h = h * outer["both"][None, None]
    out = {
        "none": lambda: h,
        "dense": lambda: h @ outer["w_out"],
        "tied": lambda: h @ outer["table"].T,
    }[model.head]()
    beside = {name: state[name] for name in ("mask", "counter", "aux") if name in model.extras}
    return {"out": out.astype(dtype_of(model, 2))} | beside


def times(model, name, array, closed_over):
    """An array, times a factor where this function closes over arrays."""
    return (
        (array * jnp.asarray(closed_over["factors"])[closed_over["chosen"]]).astype(array.dtype)
        if model.closes_over == name
        else array
    )


def loss_of(model, closed_over=CLOSED_OVER):
    """The loss of a model, which may close over arrays."""

    def loss(outputs, batch):
        loss_sum, weight_sum = loss_of_rows(outputs, batch)
        aux = jnp.asarray(outputs.get("aux", 0)).astype(loss_sum.dtype)
        sums = {
            "square": jnp.sum(outputs["out"].astype(jnp.float64) ** 2),
            "rows": jnp.sum(batch["weight"] > 0),
        }
        return (
            times(model, "loss", loss_sum, closed_over) + aux,
            weight_sum,
            *[sums] * model.has_aux,
        )

    def loss_of_rows(outputs, batch):
        out, weight = outputs["out"], batch["weight"].astype(outputs["out"].dtype)
        y = batch["y" if model.head != "none" else "small_y"].astype(out.dtype)
        if model.loss == "by mask":
            weight = weight * (1 + outputs["mask"].sum(axis=1))
        if model.loss in LOSSES:
            return jnp.sum(LOSSES[model.loss](out, y, batch["target"]) * weight), jnp.sum(weight)
        if model.loss == "by position":
            return jnp.sum(out * y * weight[:, None, None]), jnp.sum(
                weight[:, None] * jnp.ones_like(out[..., 0])
            )
        if model.loss in ("linear", "by mask"):
            return jnp.sum(out * y * weight[:, None, None]), jnp.sum(weight)
        if model.loss == "squared":
            return jaxpar.losses.squared_error(out, y, weight)
        return jaxpar.losses.softmax_cross_entropy(
            out, batch["target"], weight if model.loss == "cross entropy" else None
        )

    return loss


# --- params and batches ---------------------------------------------------------------------------------------------


def make_params(model, seed):
    """Params on the host."""
    draw = functools.partial(draw_param, exact=model.is_exact)
    number = iter(range(3, 1000))
    cast = lambda array: np.asarray(array, np.dtype(jnp.dtype(dtype_of(model, next(number)))))

    def one_layer(at):
        names = params_of(model.layers[at % len(model.layers)]) | (
            {"v1", "w1"} if model.unread else set()
        )
        names = names or (
            {"v0"} if not model.is_listed else set()
        )  # layers are stacked by their params
        return {name: draw(seed, (at, name), SHAPES[name[0]]) for name in sorted(names)}

    layers = list(map(one_layer, range(model.num_layers)))
    if not model.is_listed:
        layers = [{name: np.stack([layer[name] for layer in layers]) for name in layers[0]}]
    layers = [
        in_structure(model, {name: cast(leaf) for name, leaf in layer.items()}) for layer in layers
    ]
    outer = {name: cast(draw(seed, name, shape)) for name, shape in outer_shapes(model).items()}
    return {"outer": outer, "layers": layers if model.is_listed else layers[0]}


def outer_shapes(model):
    shapes = {
        "lookup": {"table": (VOCAB, D)},
        "dense": {"w_in": (D, D), "both": (D,)},
        "plain": {},
    }[model.embed]
    shapes |= {"w_out": (D, VOCAB)} if model.head == "dense" else {}
    shapes |= {
        name: SHAPES[name[0]] for name in sorted(params_of(model.before) | params_of(model.after))
    }
    shapes |= {"scalar": ()} if "scalar" in model.extras else {}
    return shapes | ({"unread": (D, D), "unread_number": ()} if model.unread else {})


def in_structure(model, params):
    """Params as a dict, or as a tuple of dicts."""
    if model.structure == "dict":
        return params
    names = sorted(params)
    return tuple({name: params[name] for name in names[start::2]} for start in (0, 1))


def make_batch(model, seed, num_rows):
    """Rows of uneven weight, some of weight 0. In exact cases the weights add up to a power of two."""
    rng = np.random.default_rng([seed, num_rows])

    def numbers(*shape):
        return (
            rng.integers(-1, 2, shape).astype(np.float64)
            if model.is_exact
            else rng.normal(size=shape)
        )

    weight = rng.uniform(0, 2, num_rows) * (rng.uniform(size=num_rows) < 0.7)
    weight[rng.integers(num_rows)] += 1
    if model.is_exact:
        weight = np.round(weight)
        weight[0] += 2 ** np.ceil(np.log2(weight.sum())) - weight.sum()
    keys = jax.random.split(jax.random.key(seed), num_rows)
    return {
        "features": numbers(num_rows, T, D),
        "y": numbers(num_rows, T, VOCAB),
        "small_y": numbers(num_rows, T, D),
        "token": rng.integers(0, VOCAB, (num_rows, T)).astype(np.int32),
        "target": rng.integers(0, D, (num_rows, T)).astype(np.int32),
        "weight": weight,
        "mask": rng.uniform(size=(num_rows, T)) < 0.7,
        "position": rng.integers(0, 6, (num_rows, T)).astype(np.int32),
        "key": keys,
        "raw": np.asarray(jax.random.key_data(keys)),
    }
