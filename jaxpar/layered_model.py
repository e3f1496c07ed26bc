"""A model: three pure functions of one tree of parameters, written as for one device.

params = {"outer": {...}, "layers": {...}}        every leaf of "layers" has a leading dim num_layers
params = {"outer": {...}, "layers": [{...}, ...]} a list of layers that may differ

batch --embed(outer, batch)--> x --layer(layer_params, x)--> x ... x --head(outer, x)--> outputs

Layers in the order of the devices have a type of their own, so that they cannot be confused with layers in the model's order:

    layers --LayerLayout.pack--> PackedLayers --LayerLayout.unpack--> layers

The layout (``pipeline/layout.py``) defines which position holds which layer. Functions that need layers in the model's order
call ``check_unpacked``, which finds packed layers anywhere in a tree.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from typing import Any, NoReturn

import jax
from jax.tree_util import FlattenedIndexKey
from jaxtyping import PyTree

from jaxpar.fields import brief, check_kind

OUTER, LAYERS = "outer", "layers"


@dataclass(frozen=True)
class LayeredModel:
    """A model of layers between an embedding and a head, which a pipeline can split into stages.

    Attributes:
        embed: ``embed(outer, batch) -> x``.
        layer: ``layer(layer_params, x) -> x``, which keeps the structure, shapes and dtypes of ``x``. ``x`` is any pytree:
            masks, positions or PRNG keys may be part of it. No row may depend on others. A leaf without rows must be the same
            for every row or a sum over rows that the loss adds (``row_checks.py``). If layers differ, a sequence of one
            function per layer, or one function for all, with ``params["layers"]`` a list of the params of each layer. Each
            function is then called once, with its item of the list, whose arrays have no leading dim of layers; there may be
            more of them than stages, and the shapes of ``x`` may change from one to the next.
        head: ``head(outer, x) -> outputs``. Both embed and head get ``outer``, so tied weights need no special handling.
    """

    embed: Callable[[PyTree, PyTree], PyTree]
    layer: Callable[[PyTree, PyTree], PyTree] | Sequence[Callable[[PyTree, PyTree], PyTree]]
    head: Callable[[PyTree, PyTree], PyTree]

    def __post_init__(self) -> None:
        layers = self.layer if isinstance(self.layer, Sequence) else (self.layer,)
        functions = [
            ("embed", self.embed),
            *(("layer", layer) for layer in layers),
            ("head", self.head),
        ]
        for name, function in functions:
            form = f"{name}({'layer_params' if name == 'layer' else 'outer'}, {'batch' if name == 'embed' else 'x'})"
            check_kind(
                (Callable,), "a function", f"Write one of the form {form}.", **{name: function}
            )
        if not callable(self.layer):
            object.__setattr__(self, "layer", tuple(layers))

    def apply(self, params: PyTree, batch: PyTree) -> PyTree:
        """Returns the outputs for a batch: the composition of the three functions, which every parallel run must equal.

        Raises:
            TypeError: The params are packed for a pipeline.
        """
        check_unpacked(params)
        x = self.embed(params[OUTER], batch)
        if is_stacked(params):
            (layer,) = self.layers(1)
            x, _ = jax.lax.scan(
                lambda x, layer_params: (layer(layer_params, x), None), x, params[LAYERS]
            )
        else:
            for layer, layer_params in zip(
                self.layers(num_layers(params)), params[LAYERS], strict=True
            ):
                x = layer(layer_params, x)
        return self.head(params[OUTER], x)

    def layers(self, num_layers: int) -> tuple[Callable[[PyTree, PyTree], PyTree], ...]:
        """Returns the function of each layer."""
        return (self.layer,) * num_layers if callable(self.layer) else tuple(self.layer)

    def wrap_layers(self, wrap: Callable[[Callable], Callable]) -> "LayeredModel":
        """Returns the model with each layer function wrapped, for example in ``jax.checkpoint``."""
        layer = wrap(self.layer) if callable(self.layer) else tuple(map(wrap, self.layer))
        return LayeredModel(self.embed, layer, self.head)


def path_string(path: Sequence[Any]) -> str:
    """Returns a key path of ``jax.tree_util`` as "layers/attention/w_out"."""
    return jax.tree_util.keystr(tuple(path), simple=True, separator="/")


def is_layered(params: Any) -> bool:
    """Returns whether ``params`` is a LayeredModel's tree: a dict with exactly the keys "outer" and "layers"."""
    return isinstance(params, dict) and set(params) == {OUTER, LAYERS}


def is_stacked(params: PyTree) -> bool:
    """Returns whether layers are stacked along a leading dim; otherwise "layers" is a list with one item per layer."""
    return not isinstance(params[LAYERS], list)


def outer_stage_dim(shape: Sequence[int], num_stages: int) -> int | None:
    """Returns the dim of an outer param that is sharded over ``stage`` at rest, None if the param is replicated.

    It is the smallest dim that the number of stages divides, so that a vocabulary dim is left to the ``tensor`` axis. Vectors
    are replicated: they are too small to be worth a gather.
    """
    fitting = [dim for dim, size in enumerate(shape) if size and size % num_stages == 0]
    return min(fitting, key=lambda dim: shape[dim]) if len(shape) > 1 and fitting else None


def num_layers(params: PyTree) -> int:
    """Returns the length of a list of layers, or the leading dim of all leaves; raises if they differ."""
    check_unpacked(params)
    if not is_layered(params):
        got = sorted(params) if isinstance(params, dict) else type(params).__name__
        raise ValueError(
            f'the params of a LayeredModel must be a dict with the keys "outer" and "layers"; got {got}. '
            "Put what embed and head use under outer, and the layers, stacked along a leading dim, under layers."
        )
    if not is_stacked(params) and params[LAYERS]:
        return len(params[LAYERS])
    leaves = jax.tree_util.tree_leaves_with_path(params[LAYERS])
    dims = {path_string(path): leaf.shape[:1] for path, leaf in leaves}
    if not leaves or len(set(dims.values())) != 1 or () in dims.values():
        raise ValueError(
            f'every leaf under "layers" must have the same leading dim num_layers; got {dims}. '
            "Stack the layers: jax.vmap(init_layer)(jax.random.split(key, num_layers))."
        )
    return next(iter(dims.values()))[0]


def check_layer(model: LayeredModel, params: PyTree, batch: PyTree) -> None:
    """Raises unless stacked layers keep the shapes and dtypes of their input, and a list has a function for each layer.

    Traces, computes nothing.
    """
    if not is_stacked(params) or not callable(model.layer):
        _check_list(model, params)
        return
    x = shapes_of(model.embed, params[OUTER], batch, of="embed")
    one_layer = jax.eval_shape(lambda layers: jax.tree.map(lambda p: p[0], layers), params[LAYERS])
    y = shapes_of(model.layer, one_layer, x, of="layer")
    rule = "; a layer must keep them, since layers are chained. Cast or reshape at the end of layer, or in embed."
    if jax.tree.structure(x) != jax.tree.structure(y):
        raise ValueError(
            f"layer must return the structure that it takes; got {jax.tree.structure(x)} in, {jax.tree.structure(y)} out{rule}"
        )
    for (path, a), b in zip(
        jax.tree_util.tree_leaves_with_path(x), jax.tree.leaves(y), strict=True
    ):
        if (a.shape, a.dtype) != (b.shape, b.dtype):
            at = jax.tree_util.keystr(path)
            raise ValueError(
                f"layer must return the shapes and dtypes that it takes; got x{at} {a.dtype}{list(a.shape)} in, "
                f"{b.dtype}{list(b.shape)} out{rule}"
            )


def output_shapes(
    model: LayeredModel | Callable[[PyTree, PyTree], PyTree], params: PyTree, batch: PyTree
) -> PyTree:
    """Returns the shapes of a model's outputs, and raises as ``check_layer`` does.

    The functions of a LayeredModel are traced one by one: JAX keeps what it traced of each, and of ``apply`` nothing.
    """
    if not isinstance(model, LayeredModel):
        return shapes_of(model, params, batch, of="a model")
    check_layer(model, params, batch)
    x = shapes_of(model.embed, params[OUTER], batch, of="embed")
    if not is_stacked(params):
        for layer, layer_params in zip(
            model.layers(num_layers(params)), params[LAYERS], strict=True
        ):
            x = shapes_of(layer, layer_params, x, of="layer")
    return shapes_of(model.head, params[OUTER], x, of="head")


def shapes_of(function: Callable[[PyTree, PyTree], PyTree], *given: PyTree, of: str) -> PyTree:
    """Returns the shapes of what a function of a model returns; raises TypeError where that is none of arrays.

    Args:
        function: The function, which is traced.
        *given: Its arguments.
        of: What it is, for the message.

    Raises:
        ValueError: It names an axis of the mesh.
    """
    try:
        with names_no_axis(of):
            shapes = jax.eval_shape(function, *given)
    except TypeError as error:
        wrong = [
            leaf
            for leaf in _returned(function, *given)
            if not hasattr(leaf, "dtype") and not _is_number(leaf)
        ]
        if not wrong:
            raise
        raise TypeError(_none_of_arrays(of, brief(repr(wrong[0])))) from error
    if not jax.tree.leaves(shapes):
        raise TypeError(_none_of_arrays(of, brief(repr(shapes))))
    return shapes


@contextmanager
def names_no_axis(of: str) -> Iterator[None]:
    """Raises ValueError where ``of``, a function of a model, or a loss, that is traced in it names an axis of the mesh."""
    try:
        yield
    except NameError as error:
        if "axis name" not in str(error):
            raise
        remedy = (
            ""
            if of == "loss"
            else " What sends rows to the owners of params that are sharded over data does so if "
            '"data" in jax.sharding.get_abstract_mesh().manual_axes (docs/your_model.md, Experts over data).'
        )
        raise ValueError(
            f"{of} must not name an axis of the mesh, as jax.lax.psum does, since it is given rows of one replica, and sums "
            f"over all are made for it; got: {str(error).partition('.')[0]}. Return a number for each row, which the loss "
            f"sums over all rows, or put numbers of all rows into the batch.{remedy}"
        ) from error


def _none_of_arrays(of: str, got: str) -> str:
    return f"{of} must return an array, or a tree of arrays; got {got}. Return what it has computed of its arguments."


def _returned(function: Callable[[PyTree, PyTree], PyTree], *given: PyTree) -> list[Any]:
    """Returns the leaves of what a function returns, traced but not checked; none where it fails itself."""
    found: list[Any] = []
    with suppress(Exception):
        jax.eval_shape(lambda *given: found.extend(jax.tree.leaves(function(*given))), *given)
    return found


def _is_number(value: Any) -> bool:
    return isinstance(value, (bool, int, float, complex))


def _check_list(model: LayeredModel, params: PyTree) -> None:
    functions = "one function" if callable(model.layer) else f"{len(model.layer)} functions"
    if is_stacked(params):
        raise ValueError(
            f"a model with a function for each layer must have a list of params under {LAYERS!r}, one layer an item; got "
            f"{functions} and {type(params[LAYERS]).__name__}. Unstack the layers into a list, or give one function for all."
        )
    if not callable(model.layer) and len(model.layer) != len(params[LAYERS]):
        raise ValueError(
            f"a list of layers must have as many functions as params; got {functions} and params for {len(params[LAYERS])} "
            "layers. Give each layer both; one without params has {}."
        )


@dataclass(frozen=True)
class PackedLayers:
    """Layers in the order in which the stages of a pipeline hold them, made by ``LayerLayout.pack``.

    It is a pytree, so ``jax.tree.map``, ``jax.jit``, optimizers and shardings work on it. Its leaves have the paths that they
    have in ``tree``: "layers/w_up", packed or not. The layout is part of the tree structure. It cannot be indexed, so a
    loop over layers in the model's order fails on it.

    Attributes:
        tree: The layers, each leaf ``[num_positions, ...]``.
        layout: The LayerLayout that packed them.
    """

    tree: PyTree
    layout: Any

    def __getitem__(self, key: object) -> NoReturn:
        self._refuse(f"[{key!r}]")

    def keys(self) -> NoReturn:
        """Raises TypeError for ``**`` and ``dict``, as an index does."""
        self._refuse("the keys")

    def _refuse(self, what: str) -> NoReturn:
        raise TypeError(
            f"packed layers are in the order of the devices and cannot be indexed; got {what} of layers packed for "
            f"{_brief(self.layout)}. {_UNPACK} Or index packed.tree, which is in packed order."
        )


_UNPACK = 'Unpack them: layout.unpack(params["layers"]).'


def is_packed(node: object) -> bool:
    """Returns whether a node of a tree is packed layers."""
    return isinstance(node, PackedLayers)


def open_packed(tree: PyTree) -> PyTree:
    """Returns a tree with PackedLayers replaced by the trees that they hold, in packed order."""
    return jax.tree.map(
        lambda node: node.tree if is_packed(node) else node, tree, is_leaf=is_packed
    )


def check_unpacked(tree: PyTree, or_else: str = "") -> None:
    """Raises if there are packed layers in a tree.

    Args:
        tree: Params, or a tree of the same structure.
        or_else: A further remedy for the message.
    """
    for path, node in jax.tree_util.tree_leaves_with_path(tree, is_leaf=is_packed):
        if is_packed(node):
            where = path_string(path) or "the top"
            raise TypeError(
                f"layers must be in the model's order here; got layers packed for {_brief(node.layout)} at {where}. "
                f"{_UNPACK}{or_else and ' ' + or_else}"
            )


def _brief(layout: Any) -> str:
    names = ("num_layers", "num_stages", "num_chunks", "layers_per_virtual_stage")
    return ", ".join(f"{name}={getattr(layout, name, None)}" for name in names)


def _flatten_with_keys(packed: PackedLayers) -> tuple[list, tuple]:
    """The children of ``tree`` with their keys; the layout and the outermost node of ``tree`` are static."""
    children, node = jax.tree_util.tree_flatten_with_path(
        packed.tree, is_leaf=lambda node: node is not packed.tree
    )
    keyed = [(path[0] if path else FlattenedIndexKey(0), child) for path, child in children]
    return keyed, (packed.layout, node)


def _unflatten(static: tuple, children: Any) -> PackedLayers:
    layout, node = static
    return PackedLayers(node.unflatten(children), layout)


jax.tree_util.register_pytree_with_keys(PackedLayers, _flatten_with_keys, _unflatten)
