"""Idle ops: skipped by branches, or masked; and the loops of a stage.

A mask selects a result by ``where`` and never multiplies it by 0, since that of an idle op may be NaN: it computes with values
that no microbatch has, from slots that were not written, or were written for another op. Most operations may do so, and what
they return is discarded. ``is_maskable`` finds those that may not.

Branches and loops have the form that is fast where the program masks idle ops: on GPUs. ``check_permutes`` finds a step that
would never end: one with a permutation in a branch that only some stages take. XLA's collective-permute waits for every device
of the program, even for those that take no part in it. The ops of a tick may be in branches that other stages skip, or in loops
that they leave earlier. These may contain all-reduces over ``tensor``, which name the devices that take part, but no
permutation. One that a model writes is refused when a stage is built (``permutes``). XLA may insert one where a dim that is
sharded over ``tensor`` is sliced, split, padded or flipped; only the compiled program shows whether it did.
"""

import re
from collections.abc import Callable, Iterable, Sequence
from contextlib import nullcontext
from typing import Any

import jax
import jax.numpy as jnp

from jaxpar._compat import COND_COPIES_ON_GPU, has_known_trips, has_side_effects, with_inner
from jaxpar.fields import arg
from jaxpar.mesh import STAGE

Mask = jax.Array | bool  # True: known to be on when the step is traced

HOST_CALLBACKS = ("pure_callback", "io_callback", "debug_callback")
SOME_STAGES = (
    "some_stages"  # in the names of operations that other stages do not run at the same time
)
ONCE = f"{SOME_STAGES}/once"  # in those of a loop of one trip or none

_PERMUTE = re.compile(r" collective-permute(?:-start)?\(.*op_name=\"([^\"]*)\"")
_OF_SOME_STAGES = re.compile(f"/cond/|/{SOME_STAGES}/")
_PIPELINE = "/shard_map/"  # what follows it in a name is inside
_MESSAGE = re.compile("/send_(left|right)/")  # in branches that all devices take together


def is_maskable(equations: Iterable[Any]) -> bool:
    """Returns whether an idle stage may run jaxpr equations and discard what they return; otherwise it must skip them.

    It must skip side effects and calls of the host, which others would see and which may raise, and a ``while`` loop whose
    number of trips depends on values, which may never end. A kernel is taken to do nothing of the kind.
    """

    def must_be_skipped(equation: Any) -> bool:
        if equation.primitive.name == "while" and not has_known_trips(equation):
            return True
        return equation.primitive.name in HOST_CALLBACKS or has_side_effects(equation)

    return not any(
        must_be_skipped(inner) for equation in equations for inner in with_inner(equation)
    )


def permutes(equations: Iterable[Any]) -> bool:
    """Returns whether jaxpr equations send to other devices by a permutation, which all devices must run together."""
    return any(
        inner.primitive.name == "ppermute"
        for equation in equations
        for inner in with_inner(equation)
    )


def both(a: Mask, b: Mask) -> Mask:
    """Returns the mask that is on where both are."""
    return b if a is True else a if b is True else a & b


def where(mask: Mask, new: Sequence, old: Sequence) -> list:
    """Returns the arrays ``new`` where the mask is on, else ``old``."""
    return (
        list(new)
        if mask is True
        else [jnp.where(mask, n, o) for n, o in zip(new, old, strict=True)]
    )


def masked(mask: Mask, arrays: Sequence) -> list:
    """Returns the arrays where the mask is on, else zeros."""
    return where(mask, arrays, [jnp.zeros((), a.dtype) for a in arrays])


def stage_index() -> Any:
    """Returns the index of this stage, 0 if there is one: XLA aborts at operations over a manual axis of size 1."""
    return jax.lax.axis_index(STAGE) if jax.lax.axis_size(STAGE) > 1 else jnp.int32(0)


def do_if(on: Mask, op: Callable[[Any], Any], carry: Any, *, masks: bool) -> Any:
    """Returns ``op(carry)`` where ``on``, else ``carry``."""
    if on is True:
        return op(carry)
    if masks and COND_COPIES_ON_GPU:  # a loop of one trip or none updates its carry in place
        once = lambda pending: (jnp.zeros((), bool), op(pending[1]))
        with jax.named_scope(ONCE):
            return jax.lax.while_loop(lambda pending: pending[0], once, (on, carry))[1]
    return jax.lax.cond(on, op, lambda carry: carry, carry)


def for_range(
    start: int, stop: Any, body: Callable[[Any, Any], Any], carry: Any, *, back: bool
) -> Any:
    """Returns the carry after ``carry = body(i, carry)`` for each i from ``start`` to ``stop``, or back from its end."""
    if isinstance(stop, int) and start >= stop:
        return carry
    at = lambda i, carry: body(start + stop - 1 - i if back else i, carry)
    with nullcontext() if isinstance(stop, int) else jax.named_scope(SOME_STAGES):
        return jax.lax.fori_loop(start, stop, at, carry)


def _is_stuck(name: str) -> bool:
    """Whether stages without work skip an operation, by its name. All take a branch around a pipeline, as of a line search."""
    before, is_inside, inside = name.partition(_PIPELINE)
    if not is_inside and not before.startswith("jit("):
        inside = name  # of a computation that is named on its own
    return bool(_OF_SOME_STAGES.search(inside)) and not _MESSAGE.search(inside)


def check_permutes(compiled: jax.stages.Compiled) -> None:
    """Raises if a compiled step of a pipeline would never end.

    Args:
        compiled: A step from ``make_train_step``, or another function that calls ``value_and_grad``.

    Raises:
        ValueError: It has a permutation in a branch; the message names the operations for which XLA inserted it.
    """
    lines = (compiled.as_text() or "").splitlines()
    names = [found[1] for found in map(_PERMUTE.search, lines) if found]
    stuck = {name.rpartition("/")[2] for name in names if _is_stuck(name)}
    if stuck:
        raise ValueError(
            "where stages skip the ops of others, a layer, head or loss must not slice, split, pad or flip a dim that is cut "
            "over tensor, by a rule or by XLA: the devices would exchange the parts in a permutation that other stages never "
            f"join, and the step would not end; got {', '.join(sorted(stuck))}. Use {arg('schedule')} gpipe, 1f1b or "
            f"interleaved with as many layers on each stage and {arg(mask_idle_ops='auto')}, which skip none; or do without "
            f"{arg('sequence_parallel')}; or cut another dim over tensor, such as heads of a fused projection "
            f"[embed, 3, heads] rather than [embed, 3 * heads]; or use {arg(executor='mpmd')}."
        )
