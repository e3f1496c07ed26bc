"""Modules of other libraries as pure functions. Each library is imported only when its adapter is called.

    init, apply = jaxpar.adapters.from_linen(module, example_inputs)

    init(key) -> params               nested dicts of floating-point arrays, for ``shardings_from_paths`` and checkpoints
    apply(params, inputs) -> outputs  pure, so ``lambda params, batch: apply(params, batch["x"])`` is a model

Axes with which a module annotates its params, as by ``nn.with_partitioning``, have no effect: they are told with a warning
that has them as rules for ``shardings_from_paths``.

A module that is one layer of a pipeline goes into a LayeredModel: ``apply`` is its layer, and
``jax.vmap(init)(jax.random.split(key, num_layers))`` its params. An adapter refuses modules that it cannot make pure (running
averages, dropout that draws its own keys). jaxpar takes any pure function of params and batch, so call the ``apply`` of such a
module from a function of your own.
"""

import importlib
import inspect
import warnings
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax.sharding import PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import Tracer
from jaxpar.layered_model import check_unpacked
from jaxpar.runtime.output import needing_extra
from jaxpar.sharding import path_string

Call = Callable[[Any, PyTree], PyTree]


class Functions(NamedTuple):
    """The two pure functions of a module.

    Attributes:
        init: ``init(key) -> params``, nested dicts whose keys are the steps of the paths in the module.
        apply: ``apply(params, inputs) -> outputs``.
    """

    init: Callable[[PyTree], PyTree]
    apply: Callable[[PyTree, PyTree], PyTree]


def call(module: Any, inputs: PyTree) -> PyTree:
    """Returns ``module(inputs)``: the default ``call`` of the adapters."""
    return module(inputs)


def from_linen(module: Any, example_inputs: PyTree, *, call: Call = call) -> Functions:
    """Returns the functions of a ``flax.linen.Module``.

    Args:
        module: The module. All its arrays must be in the collection "params".
        example_inputs: Inputs with the shapes and dtypes of later calls, or ShapeDtypeStructs; they fix the shapes of params.
        call: ``call(module, inputs) -> outputs``; by default ``module(inputs)``.

    Raises:
        TypeError: Not a Linen module.
        ValueError: Other collections, random numbers in its call, or params that are not floats.
    """
    linen = _load("flax.linen")
    _check_kind(module, linen.Module, "a flax.linen.Module", "from_linen(Model(), example_inputs)")

    def boxed(key: PyTree, inputs: PyTree) -> PyTree:
        return module.init(key, inputs, method=call)

    def variables(key: PyTree, inputs: PyTree) -> PyTree:
        return linen.meta.unbox(boxed(key, inputs))

    in_boxes = jax.eval_shape(boxed, jax.random.key(0), example_inputs)
    _tell_annotations(linen.get_partition_spec(in_boxes).get("params", {}))
    shapes = linen.meta.unbox(in_boxes)
    if others := sorted(set(shapes) - {"params"}):
        raise _impure(f"the collections {others}")
    try:
        jax.eval_shape(
            lambda variables, x: module.apply(variables, x, method=call), shapes, example_inputs
        )
    except _load("flax.errors").InvalidRngError as error:
        raise _impure("a call that draws random numbers") from error
    init = lambda key: variables(key, _zeros(example_inputs))["params"]
    apply = lambda params, inputs: module.apply({"params": params}, inputs, method=call)
    return _of_dicts(shapes.get("params", {}), init, apply)


def from_nnx(make_module: Callable[[Any], Any], *, call: Call = call) -> Functions:
    """Returns the functions of a ``flax.nnx.Module``.

    Args:
        make_module: ``make_module(rngs) -> module``, such as the module's class; ``rngs`` may be keyword-only. The params of a
            module that is already made would all be on one device.
        call: ``call(module, inputs) -> outputs``; by default ``module(inputs)``.

    Raises:
        TypeError: Not a function that makes an NNX module.
        ValueError: Variables or arrays that are not ``nnx.Param``, or not floats.
    """
    nnx = _load("flax.nnx")
    checked = _making(
        make_module,
        nnx.Module,
        "a flax.nnx.Module",
        "rngs",
        "from_nnx(lambda rngs: Model(..., rngs=rngs))",
    )

    def make(key: PyTree) -> Any:
        with nnx.use_eager_sharding(
            False
        ):  # otherwise a module with sharding annotations requires a mesh
            return checked(nnx.Rngs(key))

    module = nnx.eval_shape(lambda: make(jax.random.key(0)))
    is_array = lambda node: isinstance(node, Tracer | jax.ShapeDtypeStruct)
    arrays = [path for path, node in nnx.iter_graph(module) if is_array(node)]
    if names := sorted(".".join(map(str, path)) for path in arrays):
        raise ValueError(
            "the arrays of a module must be nnx.Param, since a step gets no others; got attributes that are none: "
            f"{', '.join(names)}. Compute a constant in __call__, or close over it."
        )
    graph, state, others = nnx.split(module, nnx.Param, ...)
    if kinds := sorted({type(leaf).__name__ for _, leaf in nnx.to_flat_state(others)}):
        raise _impure(f"variables of the kinds {kinds}")

    _tell_annotations(nnx.to_pure_dict(nnx.get_partition_spec(state)))

    def apply(params: PyTree, inputs: PyTree) -> PyTree:
        own = jax.tree.map(lambda leaf: leaf, state)  # a copy, since the next line writes into it
        nnx.replace_by_pure_dict(own, params)
        return call(nnx.merge(graph, own), inputs)

    init = lambda key: nnx.to_pure_dict(nnx.state(make(key), nnx.Param))
    return _of_dicts(nnx.to_pure_dict(state), init, apply)


def from_equinox(make_module: Callable[[PyTree], Any], *, call: Call = call) -> Functions:
    """Returns the functions of an ``equinox.Module``.

    Equinox's weights are ``[out, in]``: ``row_parallel()`` is the spec of a weight that is split by column.

    Args:
        make_module: ``make_module(key) -> module``. Its floating-point arrays are the params.
        call: ``call(module, inputs) -> outputs``; by default ``module(inputs)``. For a module that takes one example, as many
            Equinox modules do, pass ``call=lambda module, inputs: jax.vmap(module)(inputs)``.

    Raises:
        ImportError: Equinox is not installed.
        TypeError: Not a function that makes an Equinox module.
        ValueError: State (``equinox.nn.StateIndex``), or arrays that are not floats.
    """
    equinox = _load("equinox")
    make = _making(
        make_module,
        equinox.Module,
        "an equinox.Module",
        "key",
        "from_equinox(lambda key: Model(..., key=key))",
    )
    module = equinox.filter_eval_shape(make, jax.random.key(0))
    is_state = lambda node: isinstance(node, equinox.nn.StateIndex)
    if any(map(is_state, jax.tree.leaves(module, is_leaf=is_state))):
        raise _impure("an equinox.nn.StateIndex, as of a BatchNorm")
    is_array = lambda leaf: equinox.is_array(leaf) or isinstance(leaf, jax.ShapeDtypeStruct)
    arrays, static = equinox.partition(module, is_array)
    init = lambda key: equinox.filter(make(key), equinox.is_array)
    return _of_dicts(
        arrays, init, lambda params, inputs: call(equinox.combine(params, static), inputs)
    )


def from_haiku(function: Callable[[PyTree], PyTree], example_inputs: PyTree) -> Functions:
    """Returns the functions of a function of Haiku modules.

    Args:
        function: ``function(inputs) -> outputs``, which makes and calls ``haiku.Module``s; not transformed.
        example_inputs: Inputs with the shapes and dtypes of later calls, or ShapeDtypeStructs; they fix the shapes of params.

    Raises:
        ImportError: Haiku is not installed.
        TypeError: Not a function, or one that is already transformed.
        ValueError: State, random numbers in its call, or params that are not floats.
    """
    haiku = _load("haiku")
    if not callable(function) or isinstance(function, haiku.Module):
        raise TypeError(
            f"from_haiku takes a function of inputs that makes its modules; got {type(function).__name__}, which is "
            "transformed or made already. Write from_haiku(lambda x: haiku.Linear(8)(x), example_inputs)."
        )
    transformed = haiku.transform_with_state(function)
    params, state = jax.eval_shape(transformed.init, jax.random.key(0), example_inputs)
    if state:
        raise _impure(f"the state of {sorted(state)}")
    try:
        jax.eval_shape(
            lambda params, x: transformed.apply(params, {}, None, x), params, example_inputs
        )
    except ValueError as error:
        raise (
            _impure("a call that draws random numbers") if "PRNGKey" in str(error) else error
        ) from error
    init = lambda key: transformed.init(key, _zeros(example_inputs))[0]
    return _of_dicts(
        params, init, lambda params, inputs: transformed.apply(params, {}, None, inputs)[0]
    )


def _zeros(like: PyTree) -> PyTree:
    return jax.tree.map(lambda x: jnp.zeros(jnp.shape(x), jnp.result_type(x)), like)


def _of_dicts(
    shapes: PyTree, init: Callable[[PyTree], PyTree], apply: Callable[[PyTree, PyTree], PyTree]
) -> Functions:
    """Returns a library's functions as functions of nested dicts, which have one level for each step of the paths.

    Args:
        shapes: The shapes of the params, in the structure that the library gives them.
        init: ``init(key) -> params`` of that structure.
        apply: ``apply(params, inputs) -> outputs``, likewise.
    """
    leaves, treedef = jax.tree_util.tree_flatten_with_path(shapes)
    paths = [path_string(path) for path, _ in leaves]
    is_float = lambda leaf: jnp.issubdtype(leaf.dtype, jnp.floating)
    if wrong := {
        path: str(x.dtype) for path, (_, x) in zip(paths, leaves, strict=True) if not is_float(x)
    }:
        raise ValueError(
            f"all arrays of a module must be floating-point, since they are trained; got {wrong}. "
            "Make them constants of the function, or part of its inputs."
        )

    def init_dict(key: PyTree) -> dict:
        nested: dict = {}
        for path, leaf in zip(paths, jax.tree.leaves(init(key)), strict=True):
            *steps, last = path.split("/")
            node = nested
            for step in steps:
                node = node.setdefault(step, {})
            node[last] = leaf
        return nested

    def apply_dict(params: PyTree, inputs: PyTree) -> PyTree:
        check_unpacked(params)
        got = {
            path_string(path): leaf for path, leaf in jax.tree_util.tree_leaves_with_path(params)
        }
        if set(got) != set(paths):
            missing, unknown = sorted(set(paths) - set(got)), sorted(set(got) - set(paths))
            raise ValueError(
                f"params must be those that init gives; got none for {missing}, and unknown ones {unknown}. "
                "Make them with the init of the same adapter."
            )
        return apply(treedef.unflatten(got[path] for path in paths), inputs)

    return Functions(init_dict, apply_dict)


def _load(library: str) -> ModuleType:
    with needing_extra(f"this adapter needs {library}", "adapters"):
        return importlib.import_module(library)


def _tell_annotations(specs: PyTree) -> None:
    """Warns of the axes that a module's params are annotated with: ``shardings_from_paths`` is given them as rules."""
    leaves = jax.tree_util.tree_leaves_with_path(
        specs, is_leaf=lambda node: isinstance(node, PartitionSpec)
    )
    annotated = {
        path_string(path): spec for path, spec in leaves if any(axis is not None for axis in spec)
    }
    if not annotated:
        return
    written = lambda spec: f"PartitionSpec({', '.join(map(repr, spec))})"
    rules = ", ".join(f'"{path}": {written(spec)}' for path, spec in annotated.items())
    warnings.warn(
        "a step shards params by the rules of shardings_from_paths alone; got a module that annotates its params with axes, "
        "which have no effect. Give them as rules, with the axes of a mesh (data, stage, tensor) in place of other names, and "
        f"filter this warning: {{{rules}}}",
        stacklevel=3,
    )


def _making(
    make_module: Any, kind: type, wanted: str, argument: str, example: str
) -> Callable[[Any], Any]:
    """Returns the function that makes a module, of one argument, with a check of what it makes.

    Args:
        make_module: The function of the user, which takes the argument by its name or as its first.
        kind: The class of modules.
        wanted: What it makes, for messages.
        argument: The name of the argument.
        example: A call that is right.
    """
    if isinstance(make_module, kind) or not callable(make_module):
        got = (
            f"a {type(make_module).__name__}, made already"
            if isinstance(make_module, kind)
            else repr(make_module)
        )
        raise TypeError(
            f"a module must be passed as the function that makes it, so that its params are created sharded; got {got}. "
            f"Write {example}."
        )

    by_name = _is_taken_by_name(make_module, argument, example)

    def make(key: Any) -> Any:
        module = make_module(**{argument: key}) if by_name else make_module(key)
        _check_kind(module, kind, f"a function that makes {wanted}", example)
        return module

    return make


def _is_taken_by_name(make_module: Callable, argument: str, example: str) -> bool:
    """Returns whether a function takes the argument by its name; raises TypeError if it needs others."""
    is_class = isinstance(make_module, type)  # a metaclass may hide what the class takes
    try:
        signature = inspect.signature(make_module.__init__ if is_class else make_module)
    except ValueError:  # of a function of C
        return False
    if is_class:
        signature = signature.replace(parameters=list(signature.parameters.values())[1:])
    for args, named in (((), {argument: None}), ((None,), {})):
        with suppress(TypeError):
            signature.bind(*args, **named)
            return bool(named)
    raise TypeError(
        f"a module must be made by a function of {argument} alone; got {getattr(make_module, '__name__', make_module)}"
        f"{signature}. Write {example}."
    )


def _check_kind(module: Any, kind: type, wanted: str, example: str) -> None:
    if not isinstance(module, kind):
        of = type(module)
        made = (
            f"the class {module.__name__}"
            if isinstance(module, type)
            else f"{of.__module__}.{of.__name__}"
        )
        raise TypeError(
            f"this adapter takes {wanted}; got {made}. Write {example}, or use the library's own adapter."
        )


def _impure(got: str) -> ValueError:
    return ValueError(
        f"a module must be a pure function of its params and inputs; got {got}. Use a layer without them (LayerNorm for "
        "BatchNorm, no dropout), or call the module from a function of your own that takes them from params and batch."
    )
