"""What a model is to jaxpar: three pure functions over one tree of parameters. The user writes it as for one device.

params = {"outer": {...}, "layers": {...}}        every leaf of "layers" has a leading dim num_layers

batch --embed(outer, batch)--> x --layer(layer_params, x)--> x ... x --head(outer, x)--> outputs
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jaxtyping import PyTree

OUTER, LAYERS = "outer", "layers"


@dataclass(frozen=True)
class LayeredModel:
    """A model of equal layers between an embedding and a head, ready to be cut into stages.

    Attributes:
        embed: ``embed(outer, batch) -> x``.
        layer: ``layer(layer_params, x) -> x``, which keeps the structure, shapes and dtypes of ``x``. ``x`` is any pytree:
            masks, positions or PRNG keys may travel in it.
        head: ``head(outer, x) -> outputs``. ``outer`` reaches both ends, so tied weights need nothing special.
    """

    embed: Callable[[PyTree, PyTree], PyTree]
    layer: Callable[[PyTree, PyTree], PyTree]
    head: Callable[[PyTree, PyTree], PyTree]

    def apply(self, params: PyTree, batch: PyTree) -> PyTree:
        """Returns the outputs for a batch: the plain composition, against which every parallel run is held."""
        x = self.embed(params[OUTER], batch)
        x, _ = jax.lax.scan(lambda x, layer_params: (self.layer(layer_params, x), None), x, params[LAYERS])
        return self.head(params[OUTER], x)


def is_layered(params: Any) -> bool:
    """Returns whether ``params`` is a LayeredModel's tree: a dict with exactly the keys "outer" and "layers"."""
    return isinstance(params, dict) and set(params) == {OUTER, LAYERS}


def outer_stage_dim(shape: Sequence[int], num_stages: int) -> int | None:
    """Returns the dim of an outer param that lies over the ``stage`` axis at rest, None where the param stays whole.

    It is the smallest that the stages divide, so that a vocabulary dim is left to the ``tensor`` axis; vectors are too small
    to be worth a gather.
    """
    fitting = [dim for dim, size in enumerate(shape) if size % num_stages == 0]
    return min(fitting, key=lambda dim: shape[dim]) if len(shape) > 1 and fitting else None


def num_layers(params: PyTree) -> int:
    """Returns the leading dim that all leaves of ``params["layers"]`` share; raises where they do not."""
    if not is_layered(params):
        got = sorted(params) if isinstance(params, dict) else type(params).__name__
        raise ValueError(
            f'the params of a LayeredModel must be a dict with the keys "outer" and "layers"; got {got}. '
            "Put what embed and head use under outer, and the layers, stacked along a leading dim, under layers."
        )
    leaves = jax.tree_util.tree_leaves_with_path(params[LAYERS])
    dims = {jax.tree_util.keystr(path, simple=True, separator="/"): leaf.shape[:1] for path, leaf in leaves}
    if not leaves or len(set(dims.values())) != 1 or () in dims.values():
        raise ValueError(
            f'every leaf under "layers" must have the same leading dim num_layers; got {dims}. '
            "Stack the layers: jax.vmap(init_layer)(jax.random.split(key, num_layers))."
        )
    return next(iter(dims.values()))[0]


def check_layer(model: LayeredModel, params: PyTree, batch: PyTree) -> None:
    """Raises unless ``model.layer`` gives back the structure, shapes and dtypes that it takes. Traces, computes nothing."""
    x = jax.eval_shape(model.embed, params[OUTER], batch)
    one_layer = jax.tree.map(lambda p: jax.ShapeDtypeStruct(p.shape[1:], p.dtype), params[LAYERS])
    y = jax.eval_shape(model.layer, one_layer, x)
    told = "; a layer must keep them, since layers are chained. Cast or reshape at the end of layer, or in embed."
    if jax.tree.structure(x) != jax.tree.structure(y):
        raise ValueError(
            f"layer must return the structure that it takes; got {jax.tree.structure(x)} in, {jax.tree.structure(y)} out{told}"
        )
    for (path, a), b in zip(jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(y), strict=True):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            at = jax.tree_util.keystr(path)
            raise ValueError(
                f"layer must return the shapes and dtypes that it takes; got x{at} {a.dtype}{list(a.shape)} in, "
                f"{b.dtype}{list(b.shape)} out{told}"
            )
