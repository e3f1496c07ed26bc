"""The blocks of which the layers of the fuzz test consist, each a small function of params and of x.

A layer is a tuple of nodes, and a node is a block's name with its arguments: names of params, small integers, and tuples of
nodes again. So a layer is a value that can be printed, read back, and made smaller:

    (("norm", "v0"), ("scan", 2, (("matmul", "w0"), ("tanh",))))

A block works on each row by itself, so that no number depends on how rows are cut; those that do not are named LEAKS.
``h`` is ``[rows, T, D]``.
"""

import zlib
from collections.abc import Callable
from dataclasses import dataclass

import jax
import numpy as np

T, D, TABLE, EXPERTS = 4, 8, 6, 2
SHAPES = {"w": (D, D), "v": (D,), "s": (), "t": (TABLE, D), "k": (3, D, D), "e": (EXPERTS, D, D)}
LOW_DTYPES = ("float32", "bfloat16", "float16")
POLICIES = {
    "dots": jax.checkpoint_policies.dots_saveable,
    "weights": jax.checkpoint_policies.dots_with_no_batch_dims_saveable,
    "nothing": jax.checkpoint_policies.nothing_saveable,
    "everything": jax.checkpoint_policies.everything_saveable,
    "named": jax.checkpoint_policies.save_only_these_names("kept"),
}


@dataclass(frozen=True)
class Block:
    """A block.

    Attributes:
        run: ``(p, x, *args) -> x``.
        args: What its arguments are, a letter each: a key of SHAPES for a param, n an integer, P a policy, L a smaller dtype,
            B a body.
        is_exact: Whether small integers stay small integers, forward and back, so that every dtype gives the same numbers.
        needs: Which leaves of x it reads beside ``h``.
    """

    run: Callable
    args: str
    is_exact: bool
    needs: tuple[str, ...]


BLOCKS: dict[str, Block] = {}


def block(args="", *, exact=False, needs=()):
    """Adds a block, which goes by the name of its function."""

    def add(function):
        BLOCKS[function.__name__.strip("_")] = Block(function, args, exact, tuple(needs))
        return function

    return add


def block_of_h(args="", *, exact=False):
    """Adds a block that changes ``h`` alone, and keeps its dtype."""

    def add(function):
        run = lambda p, x, *rest: x | {"h": function(p, x["h"], *rest).astype(x["h"].dtype)}
        BLOCKS[function.__name__.strip("_")] = Block(run, args, exact, ())
        return function

    return add


def run(nodes, p, x):
    """What a layer of these nodes makes of x, a dict."""
    for name, *args in nodes:
        x = BLOCKS[name].run(p, x, *args)
    return x


def walk(nodes):
    """Every node, those inside bodies too."""
    for node in nodes:
        yield node
        for arg in node[1:]:
            if isinstance(arg, tuple):
                yield from walk(arg)


def params_of(nodes):
    """The names of all params that nodes read."""
    names = set()
    for name, *args in walk(nodes):
        names |= {
            arg for letter, arg in zip(BLOCKS[name].args, args, strict=True) if letter in SHAPES
        }
    return names


def needs_of(nodes):
    return {leaf for name, *_ in walk(nodes) for leaf in BLOCKS[name].needs}


def seed_of(*parts):
    return zlib.crc32(repr(parts).encode())


def draw_param(seed, path, shape, *, exact):
    """A param on the host in float64; in exact cases of -1, 0 and 1, a matrix with one of them a column."""
    rng = np.random.default_rng(seed_of(seed, path))
    if not exact:
        return 0.5 * rng.normal(size=shape) + (0.5 if len(shape) < 2 else 0)
    signs = rng.choice([-1.0, 1.0], size=shape)
    if len(shape) < 2:
        return signs
    rows = rng.integers(0, shape[-2], size=(*shape[:-2], 1, shape[-1]))
    is_on = np.arange(shape[-2]).reshape(-1, 1) == rows
    if len(shape) == 3:  # a kernel has one tap
        is_on &= (np.arange(shape[0]) == rng.integers(shape[0])).reshape(-1, 1, 1) | (
            shape[0] == EXPERTS
        )
    return signs * is_on
