"""The checks of the arguments of ``value_and_grad``, before anything is compiled."""

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar._compat import EMPTY_ARRAYS_CRASH
from jaxpar.layered_model import LayeredModel
from jaxpar.mesh import STAGE, TENSOR
from jaxpar.pipeline import LayerLayout
from jaxpar.schedule import Schedule
from jaxpar.sharding import path_string


def check_settings(
    model: Any, mesh: Mesh, num_microbatches: Any, num_chunks: Any, remat: Any, zero: Any, executor: Any
) -> None:
    """Raises for an argument of the wrong kind or out of range, or that does not fit the others."""
    if not callable(model) and not isinstance(model, LayeredModel):
        raise TypeError(
            f"model must be a LayeredModel or a function of (params, batch); got {type(model).__name__}. "
            "Wrap a module of another library with jaxpar.adapters."
        )
    for name, value in (
        ("num_microbatches", num_microbatches),
        ("num_chunks", 1 if num_chunks is None else num_chunks),
    ):
        if not isinstance(value, int) or isinstance(value, bool):
            raise TypeError(f"{name} must be an integer; got {value!r}. Write {name}=1.")
        if value < 1:
            raise ValueError(f"{name} must be positive; got {value}. Write {name}=1 or more.")
    if mesh.shape[STAGE] > 1 and not isinstance(model, LayeredModel):
        raise ValueError(
            f"a pipeline needs to know a model's layers; got stage={mesh.shape[STAGE]} and a plain function. Write the model "
            "as jaxpar.LayeredModel(embed, layer, head), with jaxpar.adapters for a block of Flax or Equinox, or use stage=1."
        )
    if not isinstance(remat, bool) and not callable(remat):
        raise TypeError(f"remat must be a bool or a jax.checkpoint policy; got {remat!r}. See jax.checkpoint_policies.")
    if zero not in (0, 1, 2, 3):
        raise ValueError(f"zero must be a ZeRO level, 0 to 3; got {zero!r}. Write zero=0 for none.")
    if executor == "free":
        raise ValueError('executor="free" is now called executor="mpmd"; got "free". Write executor="mpmd".')
    if executor not in ("spmd", "mpmd"):
        raise ValueError(f'executor must be "spmd" or "mpmd"; got {executor!r}. Use "spmd".')
    if executor == "spmd" and mesh.shape[STAGE] > 1 and isinstance(model, LayeredModel) and not callable(model.layer):
        check_equal_layers(list(model.layer))


def check_schedule(
    schedule: Schedule, num_stages: int, num_microbatches: int, num_chunks: int | None, remat: bool | Callable
) -> None:
    """Raises unless a schedule was made for this run."""
    for name, own, asked in (
        ("num_stages", schedule.num_stages, num_stages),
        ("num_microbatches", schedule.num_microbatches, num_microbatches),
        ("num_chunks", schedule.num_chunks, num_chunks or schedule.num_chunks),
        ("remat", schedule.recomputes, schedule.recomputes if callable(remat) else remat),
    ):
        if own != asked:
            raise ValueError(
                f"a schedule must be made for the run that uses it; got {name}={own} in {schedule.name} and {name}={asked} "
                "in the run. Make a new schedule, or change the run."
            )


def check_zero(zero: int, mesh: Mesh, executor: str, shardings: PyTree | None) -> None:
    """Raises if ZeRO cannot know which dims to shard, or the executor does not support it."""
    if zero and mesh.shape[TENSOR] > 1 and shardings is None:
        raise ValueError(
            f"ZeRO must know which dims the tensor axis cuts; got zero={zero}, tensor={mesh.shape[TENSOR]} and no shardings. "
            "Pass shardings=, from jaxpar.shardings_from_paths."
        )
    if zero and executor == "mpmd" and mesh.shape[STAGE] > 1:
        raise ValueError(
            f'executor="mpmd" replicates params and gradients over data; got zero={zero}. Use executor="spmd".'
        )


def check_overlap_grad_reduce(overlap: bool, model: Any, mesh: Mesh, zero: int, executor: str, trainable: Any) -> None:
    """Raises if gradients cannot be reduced layer by layer."""
    if not isinstance(overlap, bool):
        raise TypeError(f"overlap_grad_reduce must be a bool; got {overlap!r}. Use False.")
    if overlap and trainable is not None:
        raise ValueError(
            f"overlap_grad_reduce=True reduces the gradients of all params; got it with trainable={tuple(trainable)}. Leave "
            "one of the two out."
        )
    if overlap and (not isinstance(model, LayeredModel) or zero > 2):
        raise ValueError(
            "overlap_grad_reduce=True needs a LayeredModel and zero=0, 1 or 2; got "
            f"{type(model).__name__}, zero={zero}. Use overlap_grad_reduce=False; zero=3 overlaps without it."
        )
    if overlap and executor == "mpmd" and mesh.shape[STAGE] > 1:
        raise ValueError(
            'executor="mpmd" reduces the gradients of each stage as soon as they are complete; got it with '
            f'overlap_grad_reduce=True, stage={mesh.shape[STAGE]}. Use overlap_grad_reduce=False, or executor="spmd".'
        )


def check_reduce_dtype(dtype: Any, mesh: Mesh) -> None:
    """Raises for a dtype of reductions that is not a float, or in which the devices cannot add."""
    if dtype is None:
        return
    try:
        name, is_float = jnp.dtype(dtype).name, jnp.issubdtype(dtype, jnp.floating)
    except TypeError:
        name, is_float = repr(dtype), False
    if not is_float:
        raise ValueError(
            f"grad_reduce_dtype must be a floating-point dtype; got {name}. Use jnp.bfloat16, or leave it out."
        )
    platform = mesh.devices.flat[0].platform
    if jnp.dtype(dtype).itemsize < 4 and platform == "cpu":
        raise ValueError(
            "XLA's CPU backend cannot reduce in fewer than 32 bits; got "
            f"grad_reduce_dtype={name} on platform {platform!r}. Leave it out on CPU devices."
        )


def check_params(params: PyTree) -> None:
    """Raises for params that have no gradient, or that XLA cannot compile."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(params):
        if not jnp.issubdtype(jnp.result_type(leaf), jnp.inexact):
            raise TypeError(
                "params must be floating-point or complex arrays, since each is given a gradient; got "
                f"{path_string(path)} of dtype {jnp.result_type(leaf)}. Put it into the batch, or close over it."
            )
        if EMPTY_ARRAYS_CRASH and jnp.size(leaf) == 0:
            raise ValueError(
                f"XLA as of JAX 0.11 crashes on sums of arrays without elements inside shard_map; got {path_string(path)} of "
                f"shape {jnp.shape(leaf)} with JAX {jax.__version__}. Leave it out of the params, or use JAX 0.10."
            )


def check_one_stage(layout: LayerLayout | None, mesh: Mesh) -> None:
    """Raises for a layout that one stage would ignore, since it runs the layers in the model's order."""
    if layout is not None and mesh.shape[STAGE] == 1 and not layout.is_canonical:
        raise ValueError(
            "with one stage layers are in the model's own order; got a layout of "
            f"num_stages={layout.num_stages}, num_chunks={layout.num_chunks}. Leave layout out, or use a mesh with stages."
        )


def check_equal_layers(layers: Any) -> None:
    """Raises for a list of layers, which one program for all stages cannot run."""
    if isinstance(layers, list):
        raise ValueError(
            'executor="spmd" runs one program on all stages, so their layers must be equal and stacked along a leading dim; '
            f"got a list of {len(layers)} layers. Stack equal layers: jax.tree.map(lambda *a: jnp.stack(a), *layers). For "
            'others use executor="mpmd", without jax.jit around it, or stage=1.'
        )


def check_loss(loss: Callable, outputs: PyTree, batch: PyTree, *, has_aux: bool) -> None:
    """Raises unless ``loss`` returns two real scalars, and with ``has_aux`` a dict of further ones."""
    found = []
    jax.eval_shape(lambda *given: found.append(jax.tree.map(_abstract, loss(*given))), outputs, batch)
    (given,) = found
    count = len(given) if isinstance(given, tuple) else 1
    if count != 2 + has_aux or (count == 2 and isinstance(given[1], dict)):
        form = "(loss_sum, weight_sum, sums) with has_aux=True" if has_aux else "(loss_sum, weight_sum)"
        remedy = _remedy(given, count, has_aux)
        raise TypeError(f"loss must return the tuple {form}; got {jax.tree.map(_Told, given)}. {remedy}")
    for name, value in zip(("loss_sum", "weight_sum"), given[:2], strict=True):
        shape, dtype = jnp.shape(value), jnp.result_type(value)
        if shape != () or not jnp.issubdtype(dtype, jnp.floating):
            remedy = f"Sum it: jnp.sum({name})." if shape else f"Cast it: jnp.float32({name})."
            raise ValueError(f"loss must return floating-point scalars; got {name} {dtype}{list(shape)}. {remedy}")
    if has_aux:
        _check_sums(given[2])


def _remedy(given: PyTree, count: int, has_aux: bool) -> str:
    """What a loss should return in place of ``given``."""
    if count == 2 and isinstance(given[1], dict):
        sums = ", ".join(f'"{name}": {name}_sum' for name in given[1])
        return (
            f"Write: return loss_sum, weight_sum, {{{sums}}}, each a sum over the rows that loss is given, not a mean, and "
            "pass has_aux=True to value_and_grad."
        )
    if count == 3 and not has_aux:
        return "Pass has_aux=True to value_and_grad for the sums of the third, a dict, or leave it out."
    if count == 2:
        return "Return a dict of further sums too, or leave has_aux out."
    return (
        "Return the sum of the losses of the rows that it is given, one microbatch, and what to divide it by, such as the "
        "number of these rows."
    )


def _check_sums(sums: PyTree) -> None:
    if not isinstance(sums, dict) or not all(isinstance(name, str) for name in sums):
        raise TypeError(
            "with has_aux=True the third value of loss must be a dict of sums by name; got "
            f'{jax.tree.map(_Told, sums)}. Write such as {{"accuracy": jnp.sum(is_right)}}.'
        )
    for name, value in sums.items():
        if getattr(value, "shape", ()) != ():
            raise ValueError(
                f"each sum of a loss must be a scalar; got {name!r} {_Told(value)}. Sum it over the rows: jnp.sum({name}); "
                "give the numbers of several classes a name each."
            )
        dtype = getattr(value, "dtype", None)
        is_real = dtype is not None and any(jnp.issubdtype(dtype, kind) for kind in (jnp.floating, jnp.integer, bool))
        if not is_real:
            raise TypeError(
                f"each sum of a loss must be a float, an integer or a boolean; got {name!r} {jax.tree.map(_Told, value)}. "
                "Leave it out, or return its numbers, each by a name of its own."
            )


def _abstract(leaf: Any) -> Any:
    """The shape and dtype of an array or a number; other leaves are unchanged."""
    is_number = isinstance(leaf, (bool, int, float, complex)) or hasattr(leaf, "dtype")
    return jax.ShapeDtypeStruct(jnp.shape(leaf), jnp.result_type(leaf)) if is_number else leaf


class _Told(str):
    """A leaf as messages print it: float32[32]."""

    def __new__(cls, leaf: Any) -> "_Told":
        is_array = isinstance(leaf, jax.ShapeDtypeStruct)
        return super().__new__(cls, f"{leaf.dtype}{list(leaf.shape)}" if is_array else repr(leaf))

    __repr__ = str.__str__
