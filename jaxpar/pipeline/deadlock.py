"""Detects, before it runs, a step that would never end: one with a permutation in a branch that only some stages take.

XLA's collective-permute waits for every device of the program, even for those that take no part in it. The ops of a tick may
be in branches that other stages skip, or in loops that they leave earlier. These may contain all-reduces over ``tensor``, which
name the devices that take part, but no permutation. XLA may insert one where a dim that is sharded over ``tensor`` is sliced,
split, padded or flipped; only the compiled program shows whether it did.
"""

import re

import jax

_PERMUTE = re.compile(r" collective-permute(?:-start)?\(.*op_name=\"([^\"]*)\"")
_SOME_STAGES = re.compile("/cond/|/some_stages/")
_OWN = re.compile("/send_(left|right)/")  # in branches that all devices take together


def check_permutes(compiled: jax.stages.Compiled) -> None:
    """Raises if a compiled step of a pipeline would never end.

    Args:
        compiled: A step from ``make_train_step``, or another function that calls ``value_and_grad``.

    Raises:
        ValueError: It has a permutation in a branch; the message names the operations for which XLA inserted it.
    """
    names = [found[1] for found in map(_PERMUTE.search, (compiled.as_text() or "").splitlines()) if found]
    stuck = {name.rpartition("/")[2] for name in names if _SOME_STAGES.search(name) and not _OWN.search(name)}
    if stuck:
        raise ValueError(
            "a layer, head or loss must not slice, split, pad or flip a dim that the tensor axis cuts: the devices would "
            "exchange the parts in a permutation that other stages never join, and the step would not end; got "
            f"{', '.join(sorted(stuck))}. Cut another dim over tensor, such as heads of a fused projection [embed, 3, heads] "
            'rather than [embed, 3 * heads], or use executor="mpmd".'
        )
