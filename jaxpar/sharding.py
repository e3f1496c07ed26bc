"""Sharding: rules to NamedShardings, checks of specs, and moving arrays to the mesh and back.

A rule maps the path of a leaf ("layers/attention/w_out", where ``*`` matches one step and ``**`` any number) to a
PartitionSpec, or a dim of a table of params to an axis. For the params of a LayeredModel, rules leave out the ``stage`` axis:

- The leaves under "layers" have a leading dim num_layers, which is always sharded over ``stage``, so their rules describe one
  layer.
- A matrix under "outer" is sharded over ``stage`` at rest if one of its dims is free, so that the embedding is not replicated
  on every stage. The same holds for a matrix in a list of layers ("layers/3/kernel"), which has no leading dim.
"""

import fnmatch
import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AbstractMesh, Mesh, NamedSharding, PartitionSpec
from jaxtyping import PyTree

from jaxpar._compat import Tracer
from jaxpar.dtypes import is_key, is_spread, on_host
from jaxpar.fields import arg, check_kind
from jaxpar.layered_model import (
    LAYERS,
    is_layered,
    is_packed,
    is_stacked,
    num_layers,
    outer_stage_dim,
    path_string,
)
from jaxpar.mesh import STAGE, check_mesh, cut_of, entry_axes, shown_sizes, sizes_text
from jaxpar.params import abstract_params, specs_from_dims
from jaxpar.runtime.meetings import meet

MOST_PARTS = 4  # queries, keys, values and a gate in one weight


def replicated() -> PartitionSpec:
    """Returns the spec of an array that is replicated on every device, for rules: jaxpar does not replicate by default."""
    return PartitionSpec()


def shardings_from_paths(
    params: PyTree,
    mesh: Mesh | AbstractMesh,
    rules: Mapping[str, PartitionSpec],
    *,
    strict: bool = True,
) -> PyTree:
    """Returns the NamedSharding of every leaf of ``params``, by the first rule whose pattern matches its path.

    Args:
        params: Arrays or ShapeDtypeStructs.
        mesh: A mesh from ``make_mesh``.
        rules: Pattern to PartitionSpec, in order. In the tree of a LayeredModel a spec for a leaf under "layers" describes
            one layer, without the leading dim, which is sharded over ``stage``.
        strict: Whether a leaf that no rule matches is an error. If not, such a leaf is replicated.

    Raises:
        ValueError: A pattern that applies to no leaf, an unmatched leaf, an unknown axis, a spec longer than its array, or a
            dim that its axes do not divide.
    """
    check_mesh(mesh)
    check_kind(
        (Mapping,),
        "a dict of PartitionSpecs by pattern",
        'Write {"**": jaxpar.replicated()}, say.',
        rules=rules,
    )
    for pattern, spec in rules.items():
        check_kind(
            (str,),
            "a string",
            'Write the path of a leaf, "layers/w", or "**" for all.',
            pattern=pattern,
        )
        remedy = "Write jaxpar.column_parallel(), jaxpar.replicated() or another PartitionSpec."
        check_kind((PartitionSpec,), "a PartitionSpec", remedy, **{f"the rule {pattern!r}": spec})
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    paths = [path_string(path) for path, _ in leaves]
    check_paths(paths)
    _check_arrays(zip(paths, (leaf for _, leaf in leaves), strict=True))
    chosen = [next((rule for rule in rules if path_matches(path, rule)), None) for path in paths]
    _check_rules_used(rules, paths, chosen)
    if strict and None in chosen:
        unmatched = [path for path, rule in zip(paths, chosen, strict=True) if rule is None]
        raise ValueError(
            f"every parameter must match a sharding rule; got no match for {unmatched} in {list(rules)}. "
            'Add a rule for it, or {"**": jaxpar.replicated()} last, or pass strict=False.'
        )
    specs = [replicated() if rule is None else rules[rule] for rule in chosen]
    return _shardings(params, treedef.unflatten(specs), mesh)


def _check_arrays(leaves: Iterable[tuple[str, Any]]) -> None:
    """Raises TypeError for a leaf of params that is no array or number, such as an activation of an Equinox module."""
    for path, leaf in leaves:
        if not (hasattr(leaf, "dtype") or isinstance(leaf, bool | int | float | complex)):
            raise TypeError(
                f"params must be arrays; got {type(leaf).__name__} at {path}. Take the arrays of an Equinox module by "
                "eqx.partition(module, eqx.is_array), or make init and apply by jaxpar.adapters.from_equinox."
            )


def check_paths(paths: Sequence[str]) -> None:
    """Raises ValueError for two leaves of one path, of which a rule or a checkpoint would know one."""
    if twice := [path for path, count in Counter(paths).items() if count > 1]:
        raise ValueError(
            f"each array must have a path of its own, by which rules and checkpoints know it; got {twice[0]} for two, such as "
            'a["x/y"] and a["x"]["y"]. Rename one.'
        )


def shardings_from_dims(table: PyTree, mesh: Mesh, rules: Mapping[str, str | None]) -> PyTree:
    """Returns the NamedSharding of every parameter of a table, by rules that map the names of dims to axes.

    Args:
        table: ParamSpecs; in a LayeredModel's tree ``stage`` is added as in ``shardings_from_paths``.
        mesh: A mesh from ``make_mesh``.
        rules: The axis of each dim, None for a dim that is not sharded: ``{"embed": None, "mlp": "tensor"}``.

    Raises:
        ValueError: A dim without a rule, an unknown axis, one axis for two dims of a parameter, or a dim that its axis does
            not divide.
    """
    check_mesh(mesh)
    return _shardings(abstract_params(table), specs_from_dims(table, rules), mesh)


def _shardings(params: PyTree, specs: PyTree, mesh: Mesh | AbstractMesh) -> PyTree:
    """The checked shardings of params, with ``stage`` added if the tree is that of a LayeredModel."""
    leaves, treedef = jax.tree_util.tree_flatten_with_path(params)
    layered = is_layered(params)
    stacked = layered and is_stacked(params)
    if (
        stacked
        and len({jnp.shape(leaf)[:1] for leaf in jax.tree.leaves(params[LAYERS])} - {()}) > 1
    ):
        num_layers(params)  # raises
    shardings = []
    for (key_path, leaf), spec in zip(leaves, treedef.flatten_up_to(specs), strict=True):
        path, shape = path_string(key_path), jnp.shape(leaf)
        one_layer = stacked and (path == LAYERS or path.startswith(f"{LAYERS}/"))
        if one_layer and STAGE not in spec and not is_packed(params[LAYERS]):
            _check_layers_divide(path, shape, mesh)
        full = _spec_with_stage(path, shape, spec, mesh, one_layer=one_layer) if layered else spec
        check_spec(path, shape, full, mesh)
        shardings.append(NamedSharding(mesh, full))
    return jax.tree.unflatten(treedef, shardings)


@lru_cache(maxsize=4096)
def path_matches(path: str, pattern: str) -> bool:
    """Returns whether a path matches a pattern: ``*`` matches within one step, ``**`` any number of steps, including none."""
    return _match_steps(tuple(path.split("/")), tuple(pattern.split("/")))


def _match_steps(steps: tuple[str, ...], patterns: tuple[str, ...]) -> bool:
    if not patterns:
        return not steps
    if patterns[0] == "**":
        return any(_match_steps(steps[i:], patterns[1:]) for i in range(len(steps) + 1))
    return (
        bool(steps)
        and fnmatch.fnmatchcase(steps[0], patterns[0])
        and _match_steps(steps[1:], patterns[1:])
    )


def _check_rules_used(
    rules: Mapping[str, PartitionSpec], paths: list[str], chosen: list[str | None]
) -> None:
    lists = sorted({path.split("/")[1] for path in paths if re.match(rf"{LAYERS}/\d+(/|$)", path)})
    stack = (
        f"{len(lists)} equal layers are stacked by jax.tree.map(lambda *a: jnp.stack(a), *layers). "
        if lists
        else ""
    )
    for rule in rules:
        if rule in chosen:
            continue
        shadowed = [path for path in paths if path_matches(path, rule)]
        why = (
            f"{shadowed} are taken by earlier rules" if shadowed else f"no path matches, of {paths}"
        )
        raise ValueError(
            f"every sharding rule must apply to a parameter; got {rule!r}, which applies to none: {why}. "
            f"{stack}Correct the pattern (* is one step of the path, ** any number), move it up, or remove it."
        )


def _spec_with_stage(
    path: str,
    shape: Sequence[int],
    spec: PartitionSpec,
    mesh: Mesh | AbstractMesh,
    *,
    one_layer: bool,
) -> PartitionSpec:
    """Adds the ``stage`` axis: on the leading dim of stacked layers, on a free dim of any other param."""
    at = cut_of(spec, STAGE)
    if at is not None:
        if mesh.shape[STAGE] > 1 and (spec[at] != STAGE or (one_layer and at > 0)):
            raise ValueError(
                "a rule that names the stage axis must give it a dim of its own, the leading one of layers or any of outer "
                f"params; got {spec} for {path} of shape {tuple(shape)}. Leave stage out: it is added."
            )
        return spec
    if one_layer:
        if len(spec) > len(shape) - 1:
            raise ValueError(
                f"a rule for a leaf under layers must describe one layer, without its leading dim; got {spec} for {path}, "
                f"which has {len(shape) - 1} dims a layer. Drop entries of the spec; for a bias write column_parallel(ndim=1)."
            )
        return PartitionSpec(STAGE, *spec)
    dim = outer_stage_dim(shape, mesh.shape[STAGE])
    entries = [*spec, *(None,) * (len(shape) - len(spec))]
    if mesh.shape[STAGE] == 1 or dim is None or entries[dim] is not None:
        return spec
    entries[dim] = STAGE
    return PartitionSpec(*entries)


def _check_layers_divide(path: str, shape: Sequence[int], mesh: Mesh | AbstractMesh) -> None:
    """Raises for layers that the stages do not divide. Fewer layers than stages are not reported here: no layout fits them."""
    if not shape:
        raise ValueError(
            f'every leaf under "layers" must have the leading dim num_layers; got {path} of shape (). Give it a number for '
            "each layer, or put it under outer."
        )
    count, stage = shape[0], mesh.shape[STAGE]
    if count % stage and count > stage:
        raise ValueError(
            f"layers in the model's order must be divisible by the stage axis; got {count} layers in {path} of shape "
            f"{tuple(shape)}, {arg(stage=stage)}. Pack them, which adds padding: layout = jaxpar.LayerLayout({count}, "
            f"{stage}), with num_chunks and placement of the schedule; params = layout.pack_params(params), or of shapes alone "
            "jax.eval_shape(layout.pack_params, params); and give the layout: jaxpar.Parallel(mesh, shardings, layout=layout), "
            "or value_and_grad(..., layout=layout) where that is given a mesh. "
            f"Or choose {arg('stage')} from {_divisors(count, mesh)}."
        )


def _divisors(size: int, mesh: Mesh | AbstractMesh) -> str:
    """Returns the sizes of an axis that divide a dim, as many as there are devices, of which a mesh may leave some idle."""
    most = max(mesh.size, jax.device_count()) if isinstance(mesh, Mesh) else mesh.size
    return ", ".join(str(n) for n in range(1, min(size, most) + 1) if size % n == 0) or "1"


def check_spec(
    path: str, shape: Sequence[int], spec: PartitionSpec, mesh: Mesh | AbstractMesh
) -> None:
    """Raises unless ``spec`` fits an array of ``shape``: known axes, each used once, that divide their dims."""
    if len(spec) > len(shape):
        raise ValueError(
            f"a spec must have at most as many entries as its array has dims; got {spec} for {path} of shape {tuple(shape)}. "
            "Drop entries of the spec."
        )
    seen: list[str] = []
    for dim, entry in enumerate(spec):
        axes = entry_axes(entry)
        for axis in axes:
            if axis not in mesh.shape:
                raise ValueError(
                    f"a spec must name axes of the mesh, {tuple(shown_sizes(mesh.shape))}; got {axis!r} in {spec} for {path}."
                )
            if axis in seen:
                raise ValueError(
                    f"a spec can use an axis once; got {axis!r} twice in {spec} for {path}. Remove one."
                )
            seen.append(axis)
        size = int(np.prod([mesh.shape[axis] for axis in axes]))
        if shape[dim] % size:
            name = " times ".join(axes)
            if name == STAGE and dim == 0 and shape[dim] < size:
                raise ValueError(
                    f"a pipeline needs a layer for each stage; got {shape[dim]} layers in {path} of shape {tuple(shape)}, "
                    f"{arg(stage=size)}. Choose {arg('stage')} from {_divisors(shape[dim], mesh)}, or add layers."
                )
            raise ValueError(
                f"dim {dim} of {path} must be divisible by the {name} axis; got {shape[dim]} of shape {tuple(shape)}, "
                f"{arg(**{name: size})}. {_other_dim(path, shape, spec, dim, size)}"
                f"Choose {arg(name)} from {_divisors(shape[dim], mesh)}."
            )


def _other_dim(path: str, shape: Sequence[int], spec: PartitionSpec, dim: int, size: int) -> str:
    """Returns the rule that splits another dim than one of few parts that is not divisible; "" if there is none.

    A weight of queries, keys and values together ``[embed, 3, heads, head_dim]`` is split by its heads, which come after.
    """
    if shape[dim] > MOST_PARTS:
        return ""
    is_layer = spec[:1] == (STAGE,) and (path == LAYERS or path.startswith(f"{LAYERS}/"))
    entries = [*spec, *(None,) * (len(shape) - len(spec))]
    is_free = lambda at: entries[at] is None and shape[at] > 1 and shape[at] % size == 0
    free = [at for at in (*range(dim + 1, len(shape)), *range(dim)) if is_free(at)]
    if not free:
        return ""
    entries[dim], entries[free[0]] = None, entries[dim]
    rule = [*entries[is_layer:]]
    while rule and rule[-1] is None:
        rule.pop()
    return f"To split dim {free[0]}, of {shape[free[0]]}, write jax.sharding.PartitionSpec{tuple(rule)} as the rule. "


def shard(tree: PyTree, shardings: PyTree) -> PyTree:
    """Returns ``tree``, of which every process has a complete copy on its host, as global arrays with the given shardings.

    Args:
        tree: NumPy arrays, scalars or local JAX arrays, the same on every process.
        shardings: One sharding for all leaves, or a tree with a sharding for each leaf.
    """
    if isinstance(shardings, jax.sharding.Sharding):
        one = shardings
        shardings = jax.tree.map(lambda _: one, tree)
    check_same_tree(shardings, tree)
    return jax.tree.map(_put, tree, shardings)


def check_batch_on(batch: PyTree, mesh: Mesh | AbstractMesh) -> None:
    """Raises ValueError for an array of a batch that is on other devices than those of a mesh, or in another order.

    Args:
        batch: Arrays; those without a NamedSharding can go to any mesh.
        mesh: The mesh of the params.
    """
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        sharding = None if isinstance(leaf, Tracer) else getattr(leaf, "sharding", None)
        other = sharding.mesh if isinstance(sharding, NamedSharding) else mesh
        if other == mesh or isinstance(other, AbstractMesh) or isinstance(mesh, AbstractMesh):
            continue
        ids, of_mesh = ([device.id for device in each.devices.flat] for each in (other, mesh))
        if ids != of_mesh:
            raise ValueError(
                f"a batch must be on the mesh of the params; got {path_string(path) or 'a batch'} on "
                f"{sizes_text(other.shape)}, devices {ids}, and params on {sizes_text(mesh.shape)}, devices {of_mesh}. Shard "
                "it with jaxpar.shard_batch(batch, mesh) on their mesh."
            )


def _check_no_param_is_none(tree: PyTree, differ: Sequence[str]) -> None:
    """Raises where all leaves in which params differ from their shardings are None, as those of an optimizer's state may be."""
    leaves = jax.tree_util.tree_leaves_with_path(tree, is_leaf=lambda leaf: leaf is None)
    missing = [path_string(path) for path, leaf in leaves if leaf is None]
    is_missing = lambda path: any(f"{path}/".startswith(f"{each}/") for each in missing)
    if all(map(is_missing, differ)):
        raise ValueError(
            f"the params must have an array for each sharding; got None for {', '.join(missing[:3])}"
            f"{f' and {len(missing) - 3} more' * (len(missing) > 3)}, as an average in an optimizer's state has it for params "
            "that are not trained. Take these from state.params."
        )


def check_same_tree(shardings: PyTree, tree: PyTree) -> None:
    """Raises unless ``shardings`` has a sharding for each leaf of ``tree``, and no others."""
    if jax.tree.structure(shardings) != jax.tree.structure(tree):
        of, of_tree = (
            [path for path, _ in jax.tree_util.tree_leaves_with_path(each)]
            for each in (shardings, tree)
        )
        differ = sorted(({*map(path_string, of)} ^ {*map(path_string, of_tree)}) - {""}) or [
            "its containers"
        ]
        _check_no_param_is_none(tree, differ)
        raise ValueError(
            f"shardings must have the structure of the params; got others for {', '.join(differ[:3])}"
            f"{f' and {len(differ) - 3} more' * (len(differ) > 3)}. Make them with jaxpar.shardings_from_paths(params, mesh, "
            "rules), before there are params with jaxpar.shardings_from_paths(jax.eval_shape(init_fn, key), mesh, rules)."
        )
    for path, sharding in jax.tree_util.tree_leaves_with_path(shardings):
        remedy = "Write jax.sharding.NamedSharding(mesh, spec), or use jaxpar.shardings_from_paths."
        check_kind(
            (jax.sharding.Sharding,),
            "a jax.sharding.Sharding",
            remedy,
            **{f"the sharding of {path_string(path)}": sharding},
        )


def _put(leaf: Any, sharding: jax.sharding.Sharding) -> jax.Array:
    return (
        jax.device_put(leaf, sharding)
        if sharding.is_fully_addressable
        else from_host(leaf, sharding)
    )


def from_host(
    leaf: Any, sharding: jax.sharding.Sharding, dims: Sequence[tuple[np.ndarray, int]] = ()
) -> jax.Array:
    """Returns a global array from a part of it: for its first dims the ascending places that are here, and the whole size."""
    dims = dims[: np.ndim(leaf)]
    if is_key(leaf):
        words = from_host(jax.random.key_data(leaf), sharding, dims)
        return jax.random.wrap_key_data(words, impl=jax.random.key_impl(leaf))
    host = np.asarray(leaf)

    def of_shard(index: Any) -> np.ndarray:
        here = []
        for (local, size), at in zip(dims, index, strict=False):
            start, stop, _ = at.indices(size)
            first = int(np.searchsorted(local, start))
            here.append(slice(first, first + stop - start))
        return host[(*here, *index[len(dims) :])]

    return jax.make_array_from_callback(
        (*(size for _, size in dims), *host.shape[len(dims) :]), sharding, of_shard
    )


EVALUATE = "evaluate"
FETCHED = "Call it in all of them, also where one alone prints what it returns."


def fetch(tree: PyTree) -> PyTree:
    """Returns the complete arrays of ``tree`` as NumPy on this host, PRNG keys as key data; every process must call it.

    Raises:
        NotTogetherError: An array has parts on several processes, and another process has passed the step without the call.
        PeerLostError: Another process has ended, or does not call it within ten minutes.
        ValueError: A step has donated an array.
    """
    check_not_donated(tree)
    if any(is_spread(leaf) for leaf in jax.tree.leaves(tree)):
        meet(
            "fetch",
            "jaxpar.fetch of arrays that several processes hold must be called by every process",
            FETCHED,
        )
    return jax.tree.map(on_host, tree)


def meet_to_evaluate(params: PyTree, have_met: set[str]) -> bool:
    """Waits once until every process evaluates, if the params are on several; returns whether they are.

    One alone would receive what others send in a step of training, without an error.
    """
    spans_processes = _spans_processes(params)
    if spans_processes and not have_met:
        have_met.add(EVALUATE)
        meet(
            EVALUATE, "an evaluation on several processes must be called by every process", FETCHED
        )
    return spans_processes


def _spans_processes(tree: PyTree) -> bool:
    arrays = (
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    )
    return any(not array.is_fully_addressable for array in arrays)


def check_not_donated(tree: PyTree) -> None:
    """Raises ValueError for an array that a step has taken; JAX 0.10 ends the process where several CPU devices get one."""
    arrays = (
        leaf
        for leaf in jax.tree.leaves(tree)
        if isinstance(leaf, jax.Array) and not isinstance(leaf, Tracer)
    )
    if any(array.is_deleted() for array in arrays):
        raise ValueError(
            "a step donates its state, which cannot be used again; got one that an earlier step took, or that was deleted. "
            "Go on with the state that the step returned: state, metrics = train_step(state, batch). What is needed later, "
            "fetch before the next step: jaxpar.fetch(state.params)."
        )
