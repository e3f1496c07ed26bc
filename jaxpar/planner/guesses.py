"""What a plan does not know of a model: how XLA shards parts of it over ``tensor``, and the work of kernels of libraries.

How XLA shards is known for weights that are split by column and then by row, heads of attention, rows of a vocabulary, and
constraints (``backward/cut_rules.py``). Otherwise XLA chooses for the whole step, the optimizer included: for a weight split by
row that multiplies what every device has, a layer that returns shards, or a gradient that is sharded where its param is not.

Operations are those of products, convolutions, fused attention and experts. Of others, such as an FFT, a factorization or a
kernel of one's own, a plan has the bytes alone.
"""

from collections.abc import Iterator, Mapping, Sequence

import jax

from jaxpar._compat import source_line, with_inner
from jaxpar.backward.cut_rules import Cut
from jaxpar.backward.graph import Node
from jaxpar.backward.partition import Partition
from jaxpar.backward.products import PRODUCTS
from jaxpar.dtypes import is_float
from jaxpar.layered_model import LAYERS, OUTER, path_string
from jaxpar.planner.fused import RULES, grouped_of
from jaxpar.planner.ops import Analysis
from jaxpar.trainable import trained_indices

ACTIVATIONS = "the activations between layers"
# fmt: off
_OF_LIBRARIES = frozenset({
    "fft", "cholesky", "eig", "eigh", "geqrf", "hessenberg", "householder_product", "lu", "qr", "schur", "svd",
    "triangular_solve", "tridiagonal", "tridiagonal_solve", "ragged_dot_general", "pallas_call", "ffi_call", "pure_callback",
    "io_callback",
})
# fmt: on


def guesses_of(analysis: Analysis) -> tuple[str, ...]:
    """Returns what is guessed of a model: operations with their line of code, gradients by the path of their param."""
    if analysis.tensor == 1:
        return ()
    found = [*_of_layer(analysis), *_of_embed(analysis), *_of_head(analysis)]
    return tuple(dict.fromkeys(found))


def uncounted_of(analysis: Analysis) -> tuple[str, ...]:
    """Returns the operations of a model whose work is not counted, with their lines of code."""
    parts = [analysis.layer, *map(analysis.end_part, ("embed", "embed_back", "head"))]
    return tuple(dict.fromkeys(told for part in parts for told in _uncounted(part)))


def _uncounted(part: Partition) -> Iterator[str]:
    for node in part.graph.nodes:
        if bodies := part.bodies.get(node.first, ()):
            for body in bodies:
                yield from _uncounted(body.part)
        elif node.name not in PRODUCTS and grouped_of(node) is None:
            inside = {each.primitive.name for each in with_inner(node.equation)}
            for name in sorted(inside & (_OF_LIBRARIES | PRODUCTS)):
                yield _told(node, name)


def _of_layer(analysis: Analysis) -> Iterator[str]:
    shards, split = analysis.shards, analysis.split
    values = split.values
    part = analysis.layer
    cuts = _between_layers(analysis)
    of_floats = _floats(analysis, cuts)
    if any(cut is not None for cut in cuts):
        # Layers follow each other: each takes what the one before returns, and the cotangent of that.
        taken = dict(zip(values["x"], cuts, strict=True))
        taken |= dict(zip(values["ct"], of_floats, strict=True))
        part = shards.partition(split.graph, values["params"], taken, RULES)
    yield from map(_told, part.guessed)
    given, back = _cuts_of(part, values["y"]), _cuts_of(part, values["dx"])
    if given != cuts or back != of_floats:
        yield ACTIVATIONS
    params = _trained(analysis, LAYERS)
    yield from _gradients(part, values["dp"], params, shards.cuts)


def _of_embed(analysis: Analysis) -> Iterator[str]:
    embed, back = analysis.end_part("embed"), analysis.end_part("embed_back")
    yield from map(_told, (*embed.guessed, *back.guessed))
    if _cuts_of(embed, embed.graph.outputs) != _between_layers(analysis):
        yield ACTIVATIONS
    trained = _trained(analysis, OUTER)
    params = {i: trained[i] for i in analysis.ends.embed_trains}
    yield from _gradients(back, back.graph.outputs, params, analysis.outer_cuts)


def _of_head(analysis: Analysis) -> Iterator[str]:
    part = analysis.end_part("head")
    yield from map(_told, part.guessed)
    trained = _trained(analysis, OUTER)
    params = {i: trained[i] for i in analysis.ends.head_trains}
    _, *after = part.graph.outputs  # the loss
    grads, cts = after[: len(params)], after[len(params) :]
    yield from _gradients(part, grads, params, analysis.outer_cuts)
    if _cuts_of(part, cts) != _floats(analysis, _between_layers(analysis)):
        yield ACTIVATIONS


def _between_layers(analysis: Analysis) -> list[Cut]:
    """Returns how what a layer returns is sharded."""
    return _cuts_of(analysis.layer, analysis.split.values["y"])


def _floats(analysis: Analysis, cuts: Sequence[Cut]) -> list[Cut]:
    """Returns those of ``cuts`` whose activations have a cotangent."""
    pairs = zip(jax.tree.leaves(analysis.x), cuts, strict=True)
    return [cut for leaf, cut in pairs if is_float(leaf)]


def _trained(analysis: Analysis, part: str) -> dict[int, str]:
    """Returns the paths of the params of a part that are trained, by their index."""
    params = analysis.shape.params
    leaves = jax.tree_util.tree_leaves_with_path(params[part])
    indices = trained_indices(analysis.shape.frozen(params)[part])
    return {i: f"{part}/{path_string(leaves[i][0])}" for i in indices}


def _gradients(
    part: Partition, grads: Sequence[int], params: Mapping[int, str], cuts: Sequence[Cut]
) -> Iterator[str]:
    """Yields the gradients that are sharded in another way than their params; a device adds up the rows that it has."""
    of_rows = {node.first for node in part.graph.nodes if node.name == "scatter-add"}
    for grad, (index, path) in zip(grads, params.items(), strict=True):
        if part.cuts.get(grad) != cuts[index] and grad not in of_rows:
            yield f"the gradient of {path}"


def _cuts_of(part: Partition, values: Sequence[int]) -> list[Cut]:
    return [part.cuts.get(value) for value in values]


def _told(node: Node, name: str = "") -> str:
    name = name or node.name
    at = source_line(node.equation)
    return f"{name} at {at}" if at else name
