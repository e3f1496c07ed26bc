"""Random models and random ways to run them, as values that can be printed, read back, and made smaller."""

import functools
from dataclasses import dataclass, replace

import hypothesis.strategies as st

import tests.support.fuzz.blocks_of_h
import tests.support.fuzz.blocks_of_loops
import tests.support.fuzz.blocks_of_rows  # noqa: F401
from jaxpar.schedule import NAMED, NUM_CHUNKS, SCHEDULES
from tests.support.fuzz.block import BLOCKS, LOW_DTYPES, POLICIES, SHAPES, needs_of, walk
from tests.support.fuzz.blocks_of_effects import ASKING
from tests.support.fuzz.blocks_of_x import LEAKS, WITHOUT_ROWS
from tests.support.fuzz.losses import LOSSES
from tests.support.schedules import WITHOUT

SIMPLEST_FIRST = sorted(SCHEDULES, key=lambda name: name != "1f1b")
MESHES = (
    *(
        (1, 2, 1),
        (2, 1, 1),
        (1, 1, 1),
        (2, 2, 1),
        (1, 2, 1),
        (1, 1, 2),
        (1, 2, 2),
        (1, 4, 1),
        (1, 3, 1),
        (2, 2, 1),
    ),
    *(
        (2, 2, 2),
        (4, 2, 1),
        (3, 2, 1),
        (2, 1, 2),
        (1, 2, 4),
        (2, 4, 1),
        (1, 4, 2),
        (1, 8, 1),
        (8, 1, 1),
    ),
)
EXTRAS = (
    "second",
    "mask",
    "position",
    "key",
    "raw",
    *WITHOUT_ROWS,
    "wave",
    "empty",
    "none",
    "alive",
)
INEXACT_EXTRAS = ("wave", "raw")
COMPLEX = frozenset({"fft", "rfft", "wave"})
# A mask that passes through these may depend on params or on h, as far as can be seen.
OVER_MASKS = frozenset(
    {
        "mask",
        "zeros",
        "cond_on_param",
        "cond_on_row",
        "cond_on_counter",
        "switch",
        "scan",
        "fori_loop",
        "vmap",
    }
)
DTYPES = ("float64", *LOW_DTYPES)


@dataclass(frozen=True)
class Model:
    """A model and its loss.

    Attributes:
        layers: The nodes of the layer; several for layers that are unlike each other.
        num_layers: How many layers.
        before: The nodes that the embedding ends with; their params are those of outer.
        after: The nodes that the head begins with, likewise.
        is_listed: Whether the layers are a list, not stacked.
        is_exact: Whether all numbers are small integers, in dtypes of any size.
        dtypes: The dtypes of h, ``second``, the loss, and in turn of the params.
        extras: What travels in x beside h.
        structure: Of x and of the params: dict, or tuple.
        embed: "lookup", "dense" or "plain", which reads no params.
        head: "tied", "dense" or "none", which reads no params.
        loss: "cross entropy", "squared", "linear", or one of LOSSES; "unweighted", "by mask", whose weight passes through the
            model, or "by position", where each position has a weight.
        unread: Whether there are params that nothing reads.
        changes: Whether x has another structure, shape and dtype before every second layer of a list.
        closes_over: Which of its functions, "layer", "embed", "head" or "loss", closes over an array; "" for none.
        has_aux: Whether the loss returns further sums.
    """

    layers: tuple = ((),)
    num_layers: int = 2
    before: tuple = ()
    after: tuple = ()
    is_listed: bool = False
    is_exact: bool = False
    dtypes: tuple = ("float64",)
    extras: tuple = ()
    structure: str = "dict"
    embed: str = "plain"
    head: str = "none"
    loss: str = "linear"
    unread: bool = False
    changes: bool = False
    closes_over: str = ""
    has_aux: bool = False


@dataclass(frozen=True)
class Case:
    """A model and how it is run.

    Attributes:
        model: The model.
        seed: Of params and batch.
        mesh: Sizes of data, stage and tensor.
        schedule: By name.
        form: None for the name alone, else the form of a Schedule; a number is the seed of a table of random order.
        num_chunks: None for what the schedule needs.
        num_microbatches: Of a replica.
        rows: Of a microbatch.
        remat: False, True or the name of a policy.
        zero: The ZeRO level.
        executor: "spmd" or "mpmd".
        parts: None for canonical params, else the layers of each part, for params that come packed.
        cuts: None for params from the host, -1 for params on one device; else they come sharded, over ``tensor`` as this seed
            says.
        overlap_grad_reduce: Whether gradients are reduced layer by layer, on one stage.
        is_plain: Whether the model is given as a plain function.
        is_traced: Whether what the model closes over is traced.
        masks: Whether idle stages compute ops and discard the results.
        trains: Whether an optimizer that draws noise takes a step.
        context: The devices that share each sequence.
    """

    model: Model = Model()
    seed: int = 0
    mesh: tuple = (1, 1, 1)
    schedule: str = "1f1b"
    form: str | int | None = None
    num_chunks: int | None = None
    num_microbatches: int = 1
    rows: int = 2
    remat: bool | str = False
    zero: int = 0
    executor: str = "spmd"
    parts: tuple | None = None
    cuts: int | None = None
    overlap_grad_reduce: bool = False
    is_plain: bool = False
    is_traced: bool = False
    masks: bool = False
    trains: bool = False
    context: int = 1


def _args(letters, exact, depth):
    policy, low = st.sampled_from(tuple(POLICIES)), st.sampled_from(LOW_DTYPES)
    known = {"n": st.integers(1, 3), "P": policy, "L": low}
    known |= {letter: st.sampled_from([f"{letter}0", f"{letter}1"]) for letter in SHAPES}
    return [nodes(exact, depth - 1) if letter == "B" else known[letter] for letter in letters]


@functools.cache
def nodes(exact, depth):
    """Strategies of the nodes of a body."""
    allowed = [
        (name, block.args)
        for name, block in BLOCKS.items()
        if (block.is_exact or not exact)
        and (depth > 0 or "B" not in block.args)
        and name not in LEAKS
        if exact or name not in ("low", "low_params")
    ]
    node = st.sampled_from(allowed).flatmap(
        lambda pick: st.tuples(st.just(pick[0]), *_args(pick[1], exact, depth))
    )
    return st.lists(node, min_size=1, max_size=2).map(tuple)


@st.composite
def leaks(draw, exact):
    """Mostly nothing, else a last node that makes a leaf without rows of rows, or the loss of a number for no row."""
    if draw(st.integers(0, 7)) < 7:
        return ()
    leak = (
        draw(st.sampled_from([name for name in LEAKS if BLOCKS[name].is_exact or not exact])),
        "v1",
    )
    wrap = draw(
        st.sampled_from(
            [
                None,
                ("jit",),
                ("checkpoint", "dots"),
                ("scan", 2),
                ("fori_loop", 2),
                ("cond_on_param", "v1"),
            ]
        )
    )
    return (leak if wrap is None else (*wrap, (leak,), *[()] * (wrap[0] == "cond_on_param")),)


def words_of(layers):
    """All names in layers: of blocks, params and policies."""
    return {
        word for layer in layers for node in walk(layer) for word in node if isinstance(word, str)
    }


def with_dots(nodes):
    """Nodes with another policy than "everything", by which JAX cannot keep complex numbers."""
    return (
        tuple(map(with_dots, nodes))
        if isinstance(nodes, tuple)
        else "dots"
        if nodes == "everything"
        else nodes
    )


@st.composite
def models(draw, num_layers, is_listed):
    """Random models of so many layers."""
    exact = draw(st.sampled_from([False, False, True]))
    num_kinds = draw(st.integers(1, min(num_layers, 3))) if is_listed else 1
    ends = st.sampled_from([(), (("matmul", "w0"),), (("bias", "v0"),)])
    layers = tuple(
        (*draw(nodes(exact, 2)), *draw(ends), *draw(leaks(exact))) for _ in range(num_kinds)
    )
    before, after = (
        draw(nodes(exact, 1)) if draw(st.integers(0, 4)) == 4 else () for _ in range(2)
    )
    before = (*before, *draw(leaks(exact)))
    words = words_of((before, *layers, after))
    if not COMPLEX.isdisjoint(words):
        before, layers, after = map(with_dots, (before, layers, after))
    needed = {leaf for own in (before, *layers, after) for leaf in needs_of(own)}
    spare = [leaf for leaf in EXTRAS if not (exact and leaf in INEXACT_EXTRAS)]
    extras = needed | draw(st.sets(st.sampled_from(spare), max_size=2))
    dtypes = ("float64",)
    if exact:
        kinds, wide = st.sampled_from(DTYPES), st.sampled_from(("float64", "float32"))
        of_params = draw(st.lists(st.sampled_from(DTYPES), min_size=1, max_size=3))
        dtypes = (draw(kinds), draw(kinds), draw(wide), *of_params)
    embed = draw(st.sampled_from(["plain", "lookup", "dense"]))
    losses = ["linear", "squared", *["cross entropy", "unweighted", *LOSSES] * (not exact)]
    if not exact and "mask" in extras and OVER_MASKS.isdisjoint(words):
        losses.append("by mask")
    return Model(
        layers=layers,
        num_layers=num_layers,
        before=before,
        after=after,
        is_listed=is_listed,
        is_exact=exact,
        dtypes=dtypes,
        extras=tuple(sorted(extras)),
        structure=draw(st.sampled_from(["dict", "tuple"])),
        embed=embed,
        head=draw(st.sampled_from(["none", "dense", *["tied"] * (embed == "lookup")])),
        loss=draw(st.sampled_from(losses)),
        unread=draw(st.booleans()),
        changes=is_listed and draw(st.booleans()),
        closes_over=draw(st.sampled_from(["", "", "layer", "embed", "head", "loss"])),
        has_aux=draw(st.booleans()),
    )


@st.composite
def cases(draw):
    """Random cases."""
    mesh = draw(st.sampled_from(MESHES))
    staged = draw(pipelines(mesh)) if mesh[1] > 1 else draw(one_stage())
    is_listed, num_layers = staged.pop("is_listed"), staged.pop("num_layers")
    num_parts = mesh[1] * (staged["num_chunks"] or 1)
    model = draw(models(num_layers, is_listed))
    parts = None
    if mesh[1] > 1 and draw(st.booleans()):
        bounds = sorted(draw(st.integers(0, num_layers)) for _ in range(num_parts - 1))
        parts = tuple(b - a for a, b in zip([0, *bounds], [*bounds, num_layers], strict=True))
    can_lie_on_mesh = parts is not None or num_layers % mesh[1] == 0 or is_listed
    cuts = draw(st.sampled_from([None, -1, 0, 1, 2, 3] if can_lie_on_mesh else [None, -1]))
    knows_cuts = mesh[2] == 1 or cuts in (0, 1, 2, 3)
    zero = draw(st.integers(0, highest_zero(staged))) if knows_cuts else 0
    trains = cuts in (0, 1, 2, 3) and model.dtypes == ("float64",) and draw(st.integers(0, 5)) == 5
    remat = draw(st.sampled_from([False, True, *POLICIES]))
    if remat == "everything" and not COMPLEX.isdisjoint(words_of(model.layers)):
        remat = False
    context = (
        draw(st.sampled_from([1, 2]))
        if cuts in (0, 1, 2, 3) and can_be_over_context(model, mesh, staged)
        else 1
    )
    if context > 1:
        model = replace(model, loss="by position", has_aux=False)
    return Case(
        model=model,
        seed=draw(st.integers(0, 2**16)),
        mesh=mesh,
        context=context,
        num_microbatches=draw(st.sampled_from([2, 1, 3, 4])),
        rows=draw(st.sampled_from([2, 1, 4])),
        remat=remat,
        zero=zero,
        parts=parts,
        cuts=cuts,
        trains=trains,
        is_traced=not trains
        and model.closes_over != ""
        and staged.get("executor") != "mpmd"
        and draw(st.booleans()),
        **staged,
    )


def can_be_over_context(model, mesh, staged):
    """Whether the sequences of a model can be split: nothing that travels in x is of several positions together.

    Whole sequences are computed on each device, whose cotangents add up: a backward pass must be linear in them.
    """
    words, leaves = (
        words_of((model.before, *model.layers, model.after)),
        {"raw", "aux"}.intersection(model.extras),
    )
    alone = (
        words.isdisjoint({*LEAKS, *ASKING, "clipped_cotangent", "rounded_cotangent"})
        and not leaves
        and not model.changes
        and not staged.get("is_plain")
    )
    return alone and staged.get("executor") != "mpmd" and mesh[0] * mesh[1] * mesh[2] <= 4


def highest_zero(staged):
    """The highest ZeRO level that is there for it."""
    if staged.get("executor") == "mpmd":
        return 0
    return 2 if staged.get("overlap_grad_reduce") else 3


@st.composite
def pipelines(draw, mesh):
    """What is only asked of several stages."""
    executor = draw(st.sampled_from(["spmd", "spmd", "spmd", "mpmd"]))
    schedule = draw(st.sampled_from(SIMPLEST_FIRST))
    counts = [2, 1, 3] if mesh[1] < 4 else [2, 1]
    of_any = draw(st.sampled_from(counts))
    chunks = of_any if NAMED[schedule].takes_any_chunks else NUM_CHUNKS[schedule]
    forms = [None, "published", "unit", *["fused"] * ((schedule, "fused") not in WITHOUT)]
    return {
        "executor": executor,
        "schedule": schedule,
        "num_chunks": chunks,
        "form": draw(st.one_of(st.sampled_from(forms), st.integers(0, 2**16))),
        "num_layers": mesh[1] * chunks + draw(st.integers(0, 2)),
        "is_listed": executor == "mpmd" and draw(st.booleans()),
        "masks": executor == "spmd" and draw(st.booleans()),
    }


@st.composite
def one_stage(draw):
    """What is only asked of one stage."""
    is_plain, overlap = draw(
        st.sampled_from([(False, False), (False, False), (False, True), (True, False)])
    )
    is_listed = draw(st.booleans())
    return {
        "num_chunks": None,
        "num_layers": draw(st.integers(1, 3)),
        "is_listed": is_listed,
        "is_plain": is_plain,
        "masks": not is_plain and draw(st.booleans()),
        "overlap_grad_reduce": overlap,
    }
