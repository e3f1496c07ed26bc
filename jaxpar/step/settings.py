"""The settings of a run, said once: where its arrays live and how they are reduced, and what its pipeline is.

    parallel = jaxpar.Parallel(mesh, shardings, zero=1)
    pipeline = jaxpar.Pipeline("zb-h1", num_microbatches=8)

    value_and_grad = jaxpar.value_and_grad(model, loss, parallel, pipeline)
    state = jaxpar.init_state(init_fn, key, optimizer, parallel)
    checkpoints = jaxpar.CheckpointManager(folder, parallel)

Each checks itself when it is made. ``value_and_grad``, ``init_state``, ``abstract_state`` and ``CheckpointManager`` also take
the same settings as keywords, beside a plain mesh; ``accepts_settings`` refuses a keyword that contradicts an object.
"""

import functools
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import KW_ONLY, dataclass, fields, replace
from typing import Any, Literal, TypeVar

import jax
import jax.numpy as jnp
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jax.typing import DTypeLike
from jaxtyping import PyTree

from jaxpar.backward.remat import REMAT
from jaxpar.fields import arg, check_kind, check_positive, near_name
from jaxpar.layered_model import LayeredModel
from jaxpar.mesh import CONTEXT, DATA, REPLICA, STAGE, TENSOR, check_mesh, entry_axes, shown_sizes
from jaxpar.pipeline import LayerLayout, masks_idle_ops
from jaxpar.schedule import Schedule, check_schedule_name, lockstep_form, make_schedule
from jaxpar.sharding import path_string
from jaxpar.trainable import Trainable, check_trainable

Remat = bool | Literal["none", "full", "dots"] | Callable[..., bool]
Function = TypeVar("Function", bound=Callable[..., Any])


@dataclass(frozen=True)
class Parallel:
    """Where the arrays of a run live, and how gradients are reduced over the replicas.

    Attributes:
        mesh: A mesh from ``make_mesh``. Params keep their shardings over ``tensor``; the rows of the batch are split over
            ``data``.
        shardings: The NamedShardings of the params, from ``shardings_from_paths`` or ``shardings_from_dims``. A state needs
            them. Gradients need them with a ``tensor`` axis, to be sharded by ZeRO and over ``stage`` (those of outer)
            along dims not sharded over ``tensor``; without them outer's are replicated. A param whose sharding names ``data``
            is owned: layers compute with the replica's part, to which they send rows (``jax.lax.all_to_all`` over "data"), and
            it is neither gathered nor reduced over ``data`` (``zero.py``).
        zero: The ZeRO level (``zero.py``). At 1 and above the optimizer state and the gradients are sharded over ``data`` and
            ``context``; at 3 params are too.
        trainable: Patterns of the paths of the params that are trained, as in ``shardings_from_paths``; None: all. The others
            are frozen: in their place the gradients have None, none is computed, stored or reduced, and the optimizer has no
            state for them.
        layout: Which stage and chunk holds which layers. Layers of params and gradients are then packed by it
            (``LayerLayout.pack``); a layout in the model's order packs nothing. By default params and gradients are in the
            model's order and layers are spread evenly; if the order of the devices differs, weights move between stages in
            each step.
        overlap_grad_reduce: Reduce the gradients of each layer over ``data`` as soon as they are complete, during the backward
            pass of the last microbatch, so that communication overlaps with the backward pass of other layers. As many bytes,
            in one all-reduce a layer and one more (XLA may join those of a list of layers), with ZeRO in a reduce-scatter for
            each sharded gradient of a layer (at level 2 in each microbatch, as without it). It needs a LayeredModel, one stage,
            no ``trainable``, and ``zero`` up to 2 (level 3 does so by itself). Of several microbatches the last one is compiled
            apart from the others on GPUs. There, where ``tensor`` is 1 and layers are stacked, a batch that is not split does
            so by itself at levels 0 and 1, and level 2 in each microbatch if there is no ``replica`` axis; the step is then the
            same with and without it.
        grad_reduce_dtype: The dtype in which gradients are reduced over ``data``, such as bfloat16 for half of the traffic and
            less precision. By default float32, or the gradients' own dtype if it is wider. XLA's CPU backend cannot reduce in
            16 bits. Complex gradients are reduced as their real and imaginary parts.

    Raises:
        TypeError: A setting of the wrong kind.
        ValueError: A setting out of range, or one that does not fit the others.
    """

    mesh: Mesh | AbstractMesh
    shardings: PyTree | None = None
    _: KW_ONLY
    zero: int = 0
    trainable: Trainable = None
    layout: LayerLayout | None = None
    overlap_grad_reduce: bool = False
    grad_reduce_dtype: DTypeLike | None = None

    def __post_init__(self) -> None:
        check_mesh(self.mesh)
        self._check_shardings()
        check_kind(
            (0, 1, 2, 3), "a ZeRO level, 0 to 3", f"Write {arg(zero=0)} for none.", zero=self.zero
        )
        if self.zero and self.mesh.shape[TENSOR] > 1 and self.shardings is None:
            raise ValueError(
                "ZeRO must know which dims the tensor axis cuts; got "
                f"{arg(zero=self.zero, tensor=self.mesh.shape[TENSOR])} and no shardings. Pass shardings=, from "
                "jaxpar.shardings_from_paths."
            )
        check_trainable(self.trainable)
        check_kind(
            (LayerLayout, None),
            "a jaxpar.LayerLayout",
            "Leave it out for equal stages.",
            layout=self.layout,
        )
        self._check_overlap()
        check_reduce_dtype(self.grad_reduce_dtype, self.mesh)

    def _check_shardings(self) -> None:
        """Raises for shardings of another mesh."""
        sizes = dict(self.mesh.shape)
        for path, sharding in jax.tree_util.tree_leaves_with_path(self.shardings):
            where = path_string(path)
            if not isinstance(sharding, NamedSharding):
                raise TypeError(
                    f"shardings must be NamedShardings; got {type(sharding).__name__}{where and ' for ' + where}. Make them "
                    "with jaxpar.shardings_from_paths."
                )
            named = {axis for entry in sharding.spec for axis in entry_axes(entry)}
            if groups := sorted(named & {REPLICA, CONTEXT}):
                raise ValueError(
                    "every group of replicas has all params, which data, stage and tensor may shard; got "
                    f"{where} of {sharding.spec}. Leave {' and '.join(groups)} out of its rule."
                )
            if dict(sharding.mesh.shape) != sizes:
                raise ValueError(
                    "shardings must be those of the mesh; got "
                    f"{where} on {shown_sizes(sharding.mesh.shape)} and a mesh of {shown_sizes(sizes)}. Make them for this "
                    "mesh, with jaxpar.shardings_from_paths."
                )

    def _check_overlap(self) -> None:
        """Raises if gradients cannot be reduced layer by layer."""
        overlap = self.overlap_grad_reduce
        check_kind((bool,), "a bool", "Use False.", overlap_grad_reduce=overlap)
        if overlap and self.trainable is not None:
            raise ValueError(
                "overlap_grad_reduce=True reduces the gradients of all params; got it with "
                f"trainable={tuple(self.trainable)}. Leave one of the two out."
            )
        if overlap and self.zero > 2:
            raise ValueError(
                f"overlap_grad_reduce=True needs zero=0, 1 or 2; got zero={self.zero}. Use overlap_grad_reduce=False; zero=3 "
                "overlaps without it."
            )


@dataclass(frozen=True)
class Pipeline:
    """How a batch goes through the stages of a pipeline, in microbatches, and what is stored for the backward pass.

    With one stage every schedule is plain gradient accumulation over the microbatches. Where idle ops are masked, as on GPUs,
    up to 96 layers are then written out, also in one batch (``pipeline/one_stage.py``). With a ``tensor`` axis the forward pass
    of one microbatch runs beside the backward pass of the one before, whose residuals are stored too.

    Attributes:
        schedule: The schedule: a name, or a table from ``make_schedule`` or of your own. A name gives the "fused" form for the
            spmd executor, whose stages run in lock-step (zb-v: the "unit" form; 1f1b and interleaved where idle ops are
            masked: "merged"), and the "published" form for the mpmd executor (``schedule/orders.py``).
        num_microbatches: The number of microbatches into which each replica splits its rows.
        num_chunks: The number of chunks of layers on each stage; None: what the schedule needs, 2 for interleaved and zb-v.
        executor: "spmd": one jitted program, on any number of hosts. "mpmd": one jitted program for each stage and kind of op,
            dispatched by one process in the order of the schedule, without lock-step. It is called directly, not under
            ``jax.jit``, and also takes layers that differ. With one stage the two are the same.
        remat: What the backward pass recomputes. "none", or False: what elementwise operations recompute from fewer bytes,
            found by a minimum cut (``backward/min_cut.py``). "full", or True: everything from the input of each layer. "dots":
            attention scores too (``backward/remat.py``). Or a ``jax.checkpoint`` policy, which says what else may be
            recomputed.
        mask_idle_ops: Whether an idle stage computes an op and discards the result, where that takes no longer, instead of
            skipping it. "auto", or None: on GPUs, where skipping makes the host wait, and with several stages and ``tensor``
            in schedules that do not split the backward pass. Ops with side effects, calls of the host or loops of unknown
            length are always skipped (``pipeline/control_flow.py``). For the spmd executor alone.

    Raises:
        TypeError: A setting of the wrong kind.
        ValueError: A setting out of range.
    """

    schedule: str | Schedule = "1f1b"
    _: KW_ONLY
    num_microbatches: int = 1
    num_chunks: int | None = None
    executor: Literal["spmd", "mpmd"] = "spmd"
    remat: Remat = "none"
    mask_idle_ops: bool | Literal["auto"] | None = "auto"

    def __post_init__(self) -> None:
        if not isinstance(self.schedule, Schedule):
            check_schedule_name(self.schedule)
        for name, value, kinds in (
            ("num_microbatches", self.num_microbatches, (int,)),
            ("num_chunks", self.num_chunks, (int, None)),
        ):
            check_kind(kinds, "an integer", f"Write {name}=1.", **{name: value})
            check_positive(f"Write {name}=1 or more.", **{name: value})
        if self.executor == "free":
            raise ValueError(
                'executor="free" is now called executor="mpmd"; got "free". Write executor="mpmd".'
            )
        check_kind(("spmd", "mpmd"), '"spmd" or "mpmd"', 'Use "spmd".', executor=self.executor)
        remats = f"one of {', '.join(map(repr, REMAT))}, or a jax.checkpoint policy"
        check_kind(
            (bool, *REMAT, Callable), remats, "See jax.checkpoint_policies.", remat=self.remat
        )
        if isinstance(self.remat, bool):
            object.__setattr__(self, "remat", "full" if self.remat else "none")
        masks = self.mask_idle_ops
        check_kind(
            (bool, "auto", None), 'True, False or "auto"', 'Use "auto".', mask_idle_ops=masks
        )
        if masks is None:
            object.__setattr__(self, "mask_idle_ops", "auto")

    @property
    def policy(self) -> bool | Callable[..., bool]:
        """``remat`` as the functions of ``backward/`` take it: False, True or a ``jax.checkpoint`` policy."""
        return REMAT[self.remat] if isinstance(self.remat, str) else self.remat

    def masks(self, mesh: Mesh) -> bool:
        """Returns whether idle stages of a mesh mask ops."""
        if self.mask_idle_ops == "auto":
            return masks_idle_ops(mesh, self.schedule)
        return bool(self.mask_idle_ops)

    def table(self, num_stages: int, *, masks: bool = False) -> Schedule:
        """Returns the schedule for a number of stages, in the form for the executor; ``masks`` as from the method.

        Raises:
            ValueError: The schedule is a table that was made for other settings.
        """
        if isinstance(self.schedule, Schedule):
            self._check_table(self.schedule, num_stages)
            return self.schedule
        form = "published" if self.executor == "mpmd" else lockstep_form(self.schedule, masks=masks)
        sizes = num_stages, self.num_microbatches, self.num_chunks
        return make_schedule(self.schedule, *sizes, form=form, remat=self.remat == "full")

    def _check_table(self, table: Schedule, num_stages: int) -> None:
        for name, of_table, of_run in (
            ("num_stages", table.num_stages, num_stages),
            ("num_microbatches", table.num_microbatches, self.num_microbatches),
            ("num_chunks", table.num_chunks, self.num_chunks or table.num_chunks),
            (
                "remat",
                table.recomputes,
                self.policy if isinstance(self.policy, bool) else table.recomputes,
            ),
        ):
            if of_table != of_run:
                raise ValueError(
                    "a schedule must be made for the run that uses it; got "
                    f"{name}={of_table} in {table.name} and {name}={of_run} in the run. Make a new schedule, or change the run."
                )


_KINDS = {
    "mesh": Parallel,
    "parallel": Parallel,
    "pipeline": Pipeline,
}  # of what an argument becomes, by its name


def accepts_settings(function: Function) -> Function:
    """Returns ``function``, which gets a Parallel as its ``mesh`` or ``parallel`` and a Pipeline as its ``pipeline``.

    A caller gives these objects, or a mesh and the settings as keywords, of which they are then made. A keyword beside an
    object must agree with it.
    """
    signature = inspect.signature(function)
    kinds = {name: kind for name, kind in _KINDS.items() if name in signature.parameters}

    @functools.wraps(function)
    def with_objects(*args: Any, **kwargs: Any) -> Any:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError as error:
            raise TypeError(
                _misfit(function.__qualname__, kinds, signature.parameters, kwargs, str(error))
            ) from None
        given = bound.arguments
        for name, kind in kinds.items():
            keywords = {
                f.name: given[f.name] for f in fields(kind) if f.name in given and f.name != name
            }
            given[name] = _settings(kind, given.get(name), keywords)
        return function(*bound.args, **bound.kwargs)

    return with_objects  # pyright: ignore[reportReturnType]  # it has the signature of ``function``


def _misfit(
    function: str,
    kinds: Mapping[str, type],
    known: Collection[str],
    given: Collection[str],
    error: str,
) -> str:
    """Returns a message about arguments that a function does not take, with what is meant by one of them."""
    if not (unknown := [name for name in given if name not in known]):
        return f"{function}(): {error}"
    message = f"{function} takes {', '.join(name for name in known if name != 'self')}; got {', '.join(unknown)}."
    for name, kind in kinds.items():
        if unknown[0] in {each.name for each in fields(kind)}:
            return f"{message} Write {name}=jaxpar.{kind.__name__}({'mesh, ' * (kind is Parallel)}{unknown[0]}=...)."
    near = near_name(unknown[0], known)
    return f"{message} Did you mean {near}?" if near else f"{message} Leave it out."


def _settings(kind: type, given: Any, keywords: Mapping[str, Any]) -> Parallel | Pipeline:
    """Returns the object that is given, with which keywords must agree, or one of a mesh and the keywords."""
    if not isinstance(given, kind):
        if kind is Parallel:
            return Parallel(given, **keywords)
        if given is not None:
            schedule = given if isinstance(given, str) else "1f1b"
            raise TypeError(
                f"pipeline must be a jaxpar.Pipeline; got {given!r}. Write jaxpar.Pipeline({schedule!r})."
            )
        return Pipeline(**keywords)
    for name, keyword in keywords.items():
        value, own = getattr(replace(given, **{name: keyword}), name), getattr(given, name)
        if value != own:
            raise ValueError(_contradiction(kind, name, value, own))
    return given


def _contradiction(kind: type, name: str, value: Any, own: Any) -> str:
    """Returns a message about a keyword beside an object that has another value, which may be its default."""
    of_kind, variable = kind.__name__, kind.__name__.lower()
    (default,) = (field.default for field in fields(kind) if field.name == name)
    given = "shardings" if name == "shardings" else f"{name}={value!r}"
    if own != default:
        both = f"{given} and {name}={own!r} in jaxpar.{of_kind}"
        return (
            "a setting must be given once, or the same each time; got "
            f"{'two shardings' if name == 'shardings' else both}. Leave {name} out beside the {of_kind}, or change "
            f"it there: dataclasses.replace({variable}, {name}=...)."
        )
    written = (
        f"{name}={value!r}" if isinstance(value, (int, str, list, tuple)) else f"{name}={name}"
    )
    return (
        f"a setting beside a jaxpar.{of_kind} must be the same in it; got {given} and {name}={own!r} in jaxpar.{of_kind}, its "
        f"default. Give it to the {of_kind} instead: jaxpar.{of_kind}(..., {written}), or "
        f"dataclasses.replace({variable}, {written})."
    )


def check_settings(model: Any, loss: Any, parallel: Parallel, pipeline: Pipeline) -> None:
    """Raises for a model or loss that does not fit the settings, or settings that do not fit each other."""
    if not callable(model) and not isinstance(model, LayeredModel):
        raise TypeError(
            f"model must be a LayeredModel or a function of (params, batch); got {type(model).__name__}. "
            "Wrap a module of another library with jaxpar.adapters."
        )
    if any(base.__module__.partition(".")[0] == "flax" for base in inspect.getmro(type(model))):
        raise TypeError(
            f"model must be a LayeredModel or a function of (params, batch); got {type(model).__name__}, a module of flax, "
            "which is called in another way. Wrap it with jaxpar.adapters, or write lambda params, batch: "
            "module.apply(params, batch[...])."
        )
    check_kind(
        (Callable,),
        "a function of (outputs, batch)",
        "Return (loss_sum, weight_sum) from it.",
        loss=loss,
    )
    if not isinstance(parallel.mesh, Mesh):
        raise TypeError(
            "a step runs on devices; got a mesh without any. Make one with jaxpar.make_mesh."
        )
    num_stages, overlap = parallel.mesh.shape[STAGE], parallel.overlap_grad_reduce
    if overlap and not isinstance(model, LayeredModel):
        raise ValueError(
            f"overlap_grad_reduce=True needs a LayeredModel; got {type(model).__name__}. Use overlap_grad_reduce=False."
        )
    if overlap and num_stages > 1:
        raise ValueError(
            "gradients can be reduced layer by layer on one stage alone, since those of a pipeline are complete in its last "
            f"tick; got overlap_grad_reduce=True and {arg(stage=num_stages)}. Use overlap_grad_reduce=False, or "
            f"{arg(stage=1)}."
        )
    if num_stages == 1:
        if parallel.layout is not None and not parallel.layout.is_canonical:
            raise ValueError(
                f"with one stage layers are in the model's own order; got a layout of num_stages={parallel.layout.num_stages}, "
                f"num_chunks={parallel.layout.num_chunks}. Leave layout out, or use a mesh with stages."
            )
        return
    if not isinstance(model, LayeredModel):
        raise ValueError(
            f"a pipeline needs to know a model's layers; got {arg(stage=num_stages)} and a plain function. Write the model as "
            "jaxpar.LayeredModel(embed, layer, head), with jaxpar.adapters for a block of Flax or Equinox, or use stage=1."
        )
    if pipeline.executor == "spmd" and not callable(model.layer):
        check_equal_layers(list(model.layer))
    if pipeline.executor == "mpmd" and parallel.zero:
        raise ValueError(
            f'executor="mpmd" replicates params and gradients over data; got zero={parallel.zero}. Use executor="spmd".'
        )
    if pipeline.executor == "mpmd" and (context := parallel.mesh.shape[CONTEXT]) > 1:
        raise ValueError(
            f"{arg(executor='mpmd')} splits no sequences; got {arg(context=context, stage=num_stages)}. Use "
            f"{arg(executor='spmd')}, or {arg(context=1)}."
        )
    if pipeline.executor == "mpmd" and (owned := _owned(parallel.shardings)):
        raise ValueError(
            f'executor="mpmd" replicates params over data; got {owned} sharded over it. Use executor="spmd".'
        )


def _owned(shardings: PyTree) -> str:
    """The path of a param that is sharded over ``data``; "" if there is none."""
    leaves = jax.tree_util.tree_leaves_with_path(shardings)
    owned = (path for path, leaf in leaves if any(DATA in entry_axes(entry) for entry in leaf.spec))
    return next(map(path_string, owned), "")


def check_equal_layers(layers: Any) -> None:
    """Raises for a list of layers, which one program for all stages cannot run."""
    if isinstance(layers, list):
        raise ValueError(
            'executor="spmd" runs one program on all stages, so their layers must be equal and stacked along a leading dim; '
            f"got a list of {len(layers)} layers. Stack equal layers: jax.tree.map(lambda *a: jnp.stack(a), *layers). For "
            'others use executor="mpmd", without jax.jit around it, or stage=1.'
        )


def check_reduce_dtype(dtype: Any, mesh: Mesh | AbstractMesh) -> None:
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
    on_cpu = isinstance(mesh, Mesh) and mesh.devices.flat[0].platform == "cpu"
    if jnp.dtype(dtype).itemsize < 4 and on_cpu:
        raise ValueError(
            "XLA's CPU backend cannot reduce in fewer than 32 bits; got "
            f"grad_reduce_dtype={name} on platform 'cpu'. Leave it out on CPU devices."
        )
