"""The training step and its sharded state. A step whose loss or gradients are not finite does not change the params."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from numbers import Real

import jax
import jax.numpy as jnp
import optax
from jax.sharding import AbstractMesh, Mesh, NamedSharding
from jaxtyping import PyTree

from jaxpar._compat import PIPELINED_ALL_GATHER, Tracer, evaluate
from jaxpar.devices import are_gpus
from jaxpar.dtypes import widen
from jaxpar.fields import arg, check_kind
from jaxpar.fp8 import check_products
from jaxpar.gradients import with_settings, within_step
from jaxpar.layered_model import LayeredModel, is_packed
from jaxpar.mesh import OF_ZERO, STAGE, TENSOR
from jaxpar.metrics.log import check_further
from jaxpar.pipeline import MpmdExecutor, check_permutes
from jaxpar.runtime.coordination import check_same_program
from jaxpar.sharding import (
    check_batch_on,
    check_not_donated,
    check_same_tree,
    meet_to_evaluate,
    replicated,
)
from jaxpar.step.loss_checks import pair_of
from jaxpar.step.optimizer_state import (
    Optimizer,
    call_update,
    check_optimizer,
    check_state,
    no_value_fn,
    optimizer_shardings,
    value_fn_of,
)
from jaxpar.step.packed_optimizers import check_packed
from jaxpar.step.settings import Parallel, Pipeline, accepts_settings
from jaxpar.step.state_checks import check_as_gradients, check_on_one_mesh, check_zero
from jaxpar.step.traced_loss import once_for_shapes
from jaxpar.trainable import Trainable, only_trained, trained_part, update_trained, where_grads
from jaxpar.zero import shardings_at_rest


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class TrainState:
    """The state that a step updates.

    Attributes:
        step: int32, the number of steps taken, including skipped ones; also the position in the data.
        params: The model's parameters.
        opt_state: The optimizer's state, sharded like the params that it belongs to.
        num_skipped: int32, the number of steps that were skipped because the loss or gradients were not finite.
    """

    step: PyTree
    params: PyTree
    opt_state: PyTree
    num_skipped: PyTree


@accepts_settings
def init_state(
    init_fn: Callable[[PyTree], PyTree],
    key: PyTree,
    optimizer: Optimizer,
    mesh: Mesh | Parallel,
    shardings: PyTree | None = None,
    *,
    zero: int = 0,
    trainable: Trainable = None,
) -> TrainState:
    """Returns the initial TrainState, created sharded: no device ever holds more than its shards.

    Args:
        init_fn: ``init_fn(key) -> params``.
        key: A PRNG key. The values do not depend on the mesh.
        optimizer: An optax optimizer. Its state is sharded like the params (``optimizer_state.py``); counts are replicated.
        mesh: A mesh from ``make_mesh``, or the ``Parallel`` that ``value_and_grad`` has, which holds the settings below.
        shardings: A NamedSharding for each param, from ``shardings_from_paths``.
        zero: The ZeRO level: at 1 and above the optimizer state is sharded, at 3 the params too (``zero.py``).
        trainable: As for ``value_and_grad``. The optimizer has no state for params that are not trained.

    Raises:
        TypeError: No shardings.
        ValueError: Shardings that are not those of the params, an optimizer that packed layers do not fit, or a setting that
            contradicts the ``Parallel``.
    """
    assert isinstance(mesh, Parallel), "made of a mesh and its settings"
    abstract = abstract_state(init_fn, key, optimizer, mesh)
    shardings = jax.tree.map(lambda leaf: leaf.sharding, abstract)
    init = _init(init_fn, optimizer, mesh.trainable)
    with jax.disable_jit(
        False
    ):  # it places each shard, also for a step that is debugged without jax.jit
        if jax.process_count() > 1:
            return _placed_together(init, key, shardings)
        return jax.jit(init, out_shardings=shardings)(key)


def _placed_together(
    init: Callable[[PyTree], TrainState], key: PyTree, shardings: PyTree
) -> TrainState:
    """Returns an initial state that several processes place.

    Arrays with shards of other processes that ``init`` returns, such as restored ones, are arguments: a program takes no
    constants of other processes.
    """
    traced, shapes = jax.make_jaxpr(init, return_shape=True)(key)
    shared = {
        number: array
        for number, array in enumerate(traced.consts)
        if isinstance(array, jax.Array) and not array.is_fully_addressable
    }

    def of_arguments(given: dict[int, jax.Array], leaves: list[jax.Array]) -> TrainState:
        consts = [given.get(number, array) for number, array in enumerate(traced.consts)]
        made = evaluate(traced.replace(consts=consts), leaves)
        return jax.tree.unflatten(jax.tree.structure(shapes), made)

    return jax.jit(of_arguments, out_shardings=shardings)(shared, jax.tree.leaves(key))


def _init(
    init_fn: Callable[[PyTree], PyTree], optimizer: Optimizer, trainable: Trainable
) -> Callable:
    def init(key: PyTree) -> TrainState:
        params = init_fn(key)
        opt_state = _optimizer_state(optimizer, trained_part(params, trainable))
        state = TrainState(jnp.int32(0), params, opt_state, jnp.int32(0))
        # A weak type, such as that of jnp.full(shape, 0.1), may be lost in a step, and the next step would be recompiled.
        return jax.tree.map(lambda leaf: jnp.asarray(leaf, jnp.result_type(leaf)), state)

    return init


def _optimizer_state(optimizer: Optimizer, params: PyTree) -> PyTree:
    """Returns the state of an optimizer; an error with packed layers says how their labels and masks are written."""
    try:
        return optimizer.init(params)
    except Exception as error:
        if any(map(is_packed, jax.tree.leaves(params, is_leaf=is_packed))):
            error.add_note(
                "The layers are packed (jaxpar.PackedLayers), so labels and masks that are written as a dict for each of their "
                "params are no tree of the same kind: make them by jax.tree.map or jax.tree_util.tree_map_with_path of the "
                'params, or give one for all layers: {"layers": "decay"}.'
            )
        raise


@accepts_settings
def abstract_state(
    init_fn: Callable[[PyTree], PyTree],
    key: PyTree,
    optimizer: Optimizer,
    mesh: Mesh | AbstractMesh | Parallel,
    shardings: PyTree | None = None,
    *,
    zero: int = 0,
    trainable: Trainable = None,
) -> TrainState:
    """Returns the result of ``init_state`` as ShapeDtypeStructs with shardings, to compile a step or restore a checkpoint.

    Nothing is compiled or run.

    Args:
        init_fn: As for ``init_state``.
        key: A PRNG key.
        optimizer: The optimizer.
        mesh: As for ``init_state``; an AbstractMesh too.
        shardings: As for ``init_state``.
        zero: As for ``init_state``.
        trainable: As for ``init_state``.

    Raises:
        TypeError: As for ``init_state``.
        ValueError: As for ``init_state``.
    """
    assert isinstance(mesh, Parallel), "made of a mesh and its settings"
    shardings, zero, trainable = mesh.shardings, mesh.zero, mesh.trainable
    if shardings is None:
        raise TypeError(
            "a state needs the sharding of each param; got none. Pass shardings, or a jaxpar.Parallel with them, from "
            "jaxpar.shardings_from_paths."
        )
    check_kind(
        (Callable,), "a function", "Give one that returns the params for a key.", init_fn=init_fn
    )
    check_optimizer(optimizer)
    shapes = jax.eval_shape(_init(init_fn, optimizer, trainable), key)
    check_same_tree(shardings, shapes.params)
    trained = lambda tree: trained_part(tree, trainable)
    check_packed(optimizer, trained(shapes.params))
    on_each = NamedSharding(mesh.mesh, replicated())  # pyright: ignore[reportArgumentType]
    of_zero = shardings_at_rest(shapes.params, shardings)
    opt_shardings = optimizer_shardings(
        optimizer, trained(shapes.params), trained(of_zero if zero else shardings), on_each
    )
    shardings = of_zero if zero == 3 else shardings
    return jax.tree.map(
        lambda leaf, sharding: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding),
        shapes,
        TrainState(on_each, shardings, opt_shardings, on_each),
    )


def make_train_step(
    value_and_grad: Callable[[PyTree, PyTree], tuple[PyTree, PyTree]],
    optimizer: Optimizer,
    *,
    max_grad_norm: float | None = None,
) -> "TrainStep":
    """Returns ``(state, batch) -> (state, metrics)``, a jitted function that donates its state.

    With ``executor="mpmd"`` many programs compute the gradients, and one more updates the state.

    Metrics are float32 scalars on every device: ``loss``, ``grad_norm`` (L2, over all gradients, before clipping) and
    ``skipped`` (1 if the loss or gradients contain a NaN or an infinity). In a skipped step only ``step`` and ``num_skipped``
    change, not the optimizer state, so the counts of ``optax.apply_if_finite`` do not change either. The means that
    ``value_and_grad(..., has_aux=True)`` returns are metrics too, by their names; whether they are finite does not matter.

    Args:
        value_and_grad: From ``jaxpar.value_and_grad``, or any function of that form, such as one of ``jax.value_and_grad``;
            with ``has_aux=True`` it returns a dict of scalars beside the loss. Params whose gradients are None are kept
            unchanged.
        optimizer: An optax optimizer. One whose update takes more than gradients, state and params is given ``value`` (the
            loss), ``grad`` (before clipping) and ``value_fn`` (the loss as a function of the params, for line searches).
        max_grad_norm: Gradients with a larger norm are scaled down to this norm; if the sum of their squares overflows, the
            step is skipped. Unlike ``optax.clip_by_global_norm`` inside ``optimizer`` it reuses the norm in the metrics.

    **Collectives**: those of ``value_and_grad``, and one all-reduce of scalars over the axes that shard the params.
    """
    check_kind(
        (Callable,),
        "a function",
        "Make it with jaxpar.value_and_grad.",
        value_and_grad=value_and_grad,
    )
    check_optimizer(optimizer)
    check_kind(
        (Real, jax.Array, None),
        "a number",
        "Leave it out to clip nothing.",
        max_grad_norm=max_grad_norm,
    )
    if max_grad_norm is not None and not max_grad_norm > 0:
        raise ValueError(
            f"{arg('max_grad_norm')} must be positive; got {max_grad_norm}. Leave it out to clip nothing."
        )

    def update(
        state: TrainState, value: PyTree, grads: PyTree, value_fn: Callable[[PyTree], jax.Array]
    ) -> tuple[TrainState, dict[str, jax.Array]]:
        loss, means = value if isinstance(value, tuple) else (value, {})
        check_further(means)
        grad_norm, finite = norm_and_finite(grads)
        finite &= jnp.isfinite(loss)
        clipped = grads
        if max_grad_norm is not None:
            clipped = clip(grads, grad_norm, max_grad_norm)
            finite &= jnp.isfinite(grad_norm)
        trained = where_grads(grads, state.params)
        check_state(optimizer, trained, state.opt_state)
        further = {"value": loss, "grad": grads, "value_fn": value_fn}
        updates, opt_state = call_update(
            optimizer.update, clipped, state.opt_state, trained, **further
        )
        new = (optax.apply_updates(trained, updates), opt_state)
        trained, opt_state = jax.tree.map(
            lambda new, old: jnp.where(finite, new, old), new, (trained, state.opt_state)
        )
        params = update_trained(state.params, trained)
        skipped = jnp.where(finite, 0, 1)
        metrics = {"loss": loss, "grad_norm": grad_norm, "skipped": skipped, **means}
        metrics = {name: jnp.asarray(value, jnp.float32) for name, value in metrics.items()}
        return TrainState(state.step + 1, params, opt_state, state.num_skipped + skipped), metrics

    if isinstance(value_and_grad, MpmdExecutor):
        of_both = lambda state, both: update(state, *both, value_fn=no_value_fn)
        return TrainStep(of_both, max_grad_norm, before=value_and_grad)

    def step(state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        compute = within_step(value_and_grad)
        of_trained = lambda trained: compute(update_trained(state.params, trained), batch)
        return update(state, *pair_of(compute(state.params, batch)), value_fn_of(of_trained))

    parallel = getattr(value_and_grad, "parallel", None)
    if parallel is None:
        return TrainStep(step, max_grad_norm)

    def check(state: TrainState) -> None:
        check_on_one_mesh(state)
        check_as_gradients(parallel, state.params)
        check_zero(parallel, optimizer, state.params, state.opt_state)

    return TrainStep(step, max_grad_norm, parallel=parallel, check=check)


def norm_and_finite(grads: PyTree) -> tuple[jax.Array, jax.Array]:
    """Returns the L2 norm of all gradients together and whether each of their elements is finite.

    Both are computed from sums in float32 or wider, which XLA can reduce over sharded params in one all-reduce.
    """
    wide = widen(jax.tree.leaves(grads))
    squares = sum(jnp.sum(jnp.real(g * jnp.conj(g))) for g in wide)
    broken = sum(jnp.sum(~jnp.isfinite(g), dtype=jnp.float32) for g in wide)
    return jnp.sqrt(squares), jnp.asarray(broken == 0)


def clip(grads: PyTree, norm: jax.Array, max_norm: float) -> PyTree:
    """Returns ``grads`` scaled so that their norm is at most ``max_norm`` (Pascanu et al. 2013, arXiv 1211.5063).

    They are multiplied in float32 or wider: in 16 bits the scale itself may be 0, or off by 0.4%.
    """
    scale = jnp.minimum(1.0, max_norm / jnp.maximum(norm, jnp.finfo(norm.dtype).tiny))

    def scaled(grad: jax.Array) -> jax.Array:
        wide = widen(grad)
        return (wide * scale.astype(wide.dtype)).astype(grad.dtype)

    return jax.tree.map(scaled, grads)


@accepts_settings
def make_eval_step(
    model: LayeredModel | Callable[[PyTree, PyTree], PyTree],
    loss: Callable[[PyTree, PyTree], tuple],
    parallel: Parallel | Mesh,
    pipeline: Pipeline | None = None,
) -> Callable[[PyTree, PyTree], tuple]:
    """Returns ``(params, batch) -> (loss_sum, weight_sum)``: what ``loss`` returns of a whole batch, for rows held out.

    It is computed as a step of training with these settings computes it, over the whole mesh and in microbatches, but without
    gradients: in a pipeline by the forward passes of its schedule. The mean loss of several batches is the sum of their
    loss_sum over that of their weight_sum.

    Args:
        model: As for ``value_and_grad``.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with a dict of further sums over the rows, arrays of any
            shape, which are then returned too.
        parallel: The Parallel of the run, or a mesh. Nothing is trained, whatever its ``trainable``.
        pipeline: The Pipeline of the run, or one with other microbatches; None: one microbatch.

    Raises:
        TypeError: As for ``value_and_grad``.
        ValueError: As for ``value_and_grad``, or several stages with the mpmd executor. The function that is returned raises
            PeerLostError if other processes do not call it too, and ValueError if they have another program.

    **Collectives**: those of ``value_and_grad`` in the forward pass, and one all-reduce over the replicas of the sums.
    """
    assert isinstance(parallel, Parallel), "made of a mesh"
    assert isinstance(pipeline, Pipeline), "the default or as given"
    num_stages = parallel.mesh.shape[STAGE]
    if num_stages > 1 and pipeline.executor == "mpmd":
        raise ValueError(
            f'an evaluation is one program; got executor="mpmd" and {arg(stage=num_stages)}. Use executor="spmd", which takes '
            "the same params; for layers that differ call model.apply."
        )
    schedule = pipeline.table(num_stages).forward() if num_stages > 1 else "1f1b"
    pipeline = replace(pipeline, schedule=schedule, num_chunks=None, remat="none")
    of_settings = with_settings(
        model, loss, replace(parallel, overlap_grad_reduce=False), pipeline, has_aux=None
    )
    jitted = jax.jit(lambda params, batch: within_step(of_settings)(params, batch)[0])
    check = once_for_shapes(
        lambda params, batch: check_permutes(jitted.lower(params, batch).compile())
    )

    compare = once_for_shapes(
        lambda params, batch: check_same_program(
            "run an evaluation", jitted.lower(params, batch).as_text()
        )
    )
    have_met: set[str] = set()

    def eval_step(params: PyTree, batch: PyTree) -> tuple:
        if meet_to_evaluate(params, have_met):
            compare(params, batch)
        if _has_stages_and_shards(params):
            check(params, batch)
        return jitted(params, batch)

    return eval_step


class TrainStep:
    """A jitted step whose new state keeps the shardings of the old one, so the next step neither recompiles nor moves anything.

    Args:
        step: ``(state, batch) -> (state, metrics)``, to be jitted.
        max_grad_norm: As for ``make_train_step``, for a run that resumes to compare.
        before: ``(params, batch) -> the second argument of step``, called before each step without ``jax.jit``.
        parallel: That of ``value_and_grad``, if it is known; likewise for a run that resumes.
        check: Raises for a state that does not fit the step; called once for each new set of shardings.
    """

    def __init__(
        self,
        step: Callable,
        max_grad_norm: float | None = None,
        before: MpmdExecutor | None = None,
        *,
        parallel: Parallel | None = None,
        check: Callable[[TrainState], None] = lambda state: None,
    ) -> None:
        self._step = step
        self.max_grad_norm = max_grad_norm
        self.parallel = parallel
        self._check = check
        self._before = before
        self._jitted: dict = {}
        self._checked: set = set()

    def __call__(self, state: TrainState, batch: PyTree) -> tuple[TrainState, dict[str, jax.Array]]:
        """Returns the next state and the step's metrics; ``state`` is donated and must not be used again.

        Raises:
            TypeError: ``state`` is no TrainState.
            ValueError: It was donated to an earlier step; its optimizer state is not one of the step's optimizer; the batch is
                on another mesh; or the compiled step would not end (``check_permutes``) or not be in FP8 (``check_products``).
        """
        step = self._for(state, batch)
        if self._before is not None:
            return step(state, self._before(state.params, batch))
        if step not in self._checked and (_has_stages_and_shards(state) or _on_gpus(state)):
            compiled = step.lower(state, batch).compile()  # the call below reuses the compiled step
            check_permutes(compiled)
            check_products(compiled.as_text() if _on_gpus(state) else "")
        self._checked.add(step)
        return step(state, batch)

    def lower(self, state: TrainState, batch: PyTree) -> jax.stages.Lowered:
        """Returns the step lowered for arrays or ShapeDtypeStructs, as ``jax.jit(step).lower`` does."""
        if self._before is not None:
            raise ValueError(
                'only a step that is one program can be lowered; got one with executor="mpmd". Use executor="spmd", which a '
                "Run needs, or write the loop yourself, with jaxpar.CheckpointManager for its checkpoints."
            )
        return self._for(state, batch).lower(state, batch)

    def _for(self, state: TrainState, batch: PyTree) -> jax.stages.Wrapped:
        if not isinstance(state, TrainState):
            raise TypeError(
                f"a step takes a state; got {type(state).__name__}. Make the first one with jaxpar.init_state, which has the "
                "optimizer's state too."
            )
        check_not_donated(state)
        leaves, treedef = jax.tree.flatten(state)
        shardings = tuple(
            None if isinstance(x, Tracer) else getattr(x, "sharding", None) for x in leaves
        )
        if self._before is None and (
            on := next((each for each in shardings if isinstance(each, NamedSharding)), None)
        ):
            check_batch_on(batch, on.mesh)
        if (treedef, shardings) not in self._jitted:
            self._check(state)
            # Errors in the step are raised before the programs that run before it are compiled.
            if self._before is not None:
                grads = only_trained(self._before.frozen(state.params))
                jax.eval_shape(
                    self._step, state, (self._before.value_shape(state.params, batch), grads)
                )
            out = (jax.tree.unflatten(treedef, shardings), None)
            jitted = jax.jit(
                self._step,
                donate_argnums=0,
                out_shardings=out,
                compiler_options=_compiler_options(state),
            )
            self._jitted[treedef, shardings] = jitted
        return self._jitted[treedef, shardings]


def _has_stages_and_shards(state: PyTree) -> bool:
    """Returns whether the mesh of a state, or of its params, has several stages and several tensor shards."""
    sizes = (sharding.mesh.shape for sharding in _shardings(state))
    return any(each.get(STAGE, 1) > 1 and each.get(TENSOR, 1) > 1 for each in sizes)


# Of XLA for GPUs. Otherwise it joins the collectives over `tensor` of F with those of B, beside whose products they could run,
# and estimates their times so that fewer do. By the roofline Llama 3.1 8B on tensor=8 (H100, 16 microbatches of 8,192 tokens)
# takes 1,421 ms with these options and 1,637 without.
_APART: dict[str, bool | str | int] = {
    "xla_gpu_all_gather_combine_threshold_bytes": 1,
    "xla_gpu_reduce_scatter_combine_threshold_bytes": 1,
    "xla_gpu_all_reduce_combine_threshold_bytes": 1 << 16,  # sums of scalars may be joined
    "xla_gpu_experimental_enable_heuristic_collective_combining": False,
    "xla_gpu_enable_analytical_sol_latency_estimator": False,
}


def _compiler_options(state: TrainState) -> dict[str, bool | str | int] | None:
    """Returns XLA's options for a step on GPUs that are not flags for all its programs.

    Where a step gathers params (ZeRO 3), without ``tensor`` and ``stage``, XLA should gather those of the next layer while one
    computes. It would do the same with what sequence parallelism gathers over ``tensor``, for more than twice the temporary
    memory, and may take a fifth more in a pipeline.
    """
    shardings = _on_gpus(state.params)
    if any(each.mesh.shape.get(TENSOR, 1) > 1 for each in shardings):
        return _APART
    is_cut = lambda spec: not set(OF_ZERO).isdisjoint(jax.tree.leaves(tuple(spec)))
    gathers = any(is_cut(each.spec) and each.mesh.shape.get(STAGE, 1) == 1 for each in shardings)
    return dict(PIPELINED_ALL_GATHER) if gathers else None


def _on_gpus(tree: PyTree) -> list[NamedSharding]:
    return [each for each in _shardings(tree) if are_gpus(each.mesh)]


def _shardings(tree: PyTree) -> list[NamedSharding]:
    shardings = (
        getattr(leaf, "sharding", None)
        for leaf in jax.tree.leaves(tree)
        if not isinstance(leaf, Tracer)
    )
    return [sharding for sharding in shardings if isinstance(sharding, NamedSharding)]
