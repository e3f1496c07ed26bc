"""LoRA: low-rank factors next to frozen weights; only the factors are trained (Hu et al. 2021, arXiv 2106.09685, section 4.1).

    y = x W + scale (x A) B        W [in, out]   A [in, rank]   B [rank, out]   scale = alpha / rank

    lora = Lora(rank=8, targets={"w_up": 1, "w_down": 1})
    params = lora.init(key, params)                    "layers/w_up" becomes "layers/w_up/weight", ".../lora_a", ".../lora_b"
    shardings = lora.shardings(shardings)
    value_and_grad = jaxpar.value_and_grad(model, loss, mesh, trainable=ADAPTERS, shardings=shardings)
    merged = merge(params)                             W + scale A B, with the structure that params had before init

The product A B is never formed in a step, so no gradient of the size of W is. A model needs no change where it computes
``x @ weight``; in place of ``jnp.einsum(spec, x, weight)`` it calls ``einsum`` of this file.

    params = quantize(params, "nf4")                   the weights in four bits, decoded in each layer (``quantized.py``)
    shardings = quantized_shardings(params, shardings)

A column-parallel W [in, out/2] has all of A and B [rank, out/2], a row-parallel W [in/2, out] has A [in/2, rank] and all of B.
No weight is gathered. Each pair of factors adds one all-reduce of [..., rank] over ``tensor``: in the forward pass if W is
row-parallel, in the backward pass if it is column-parallel.
"""

import math
import string
import zlib
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import jax
import jax.numpy as jnp
from jax.sharding import NamedSharding, PartitionSpec
from jax.tree_util import DictKey
from jaxtyping import PyTree

from jaxpar.fields import arg, is_flag
from jaxpar.layered_model import LAYERS, is_layered, is_stacked, path_string
from jaxpar.models.quantized import check_kind, dense, is_quantized, quantize_weight

ADAPTERS = ("**/lora_a", "**/lora_b")
FIELDS = ("weight", "lora_a", "lora_b")
REMEDY = (
    "write x @ weight or lora.einsum(spec, x, weight); for others, such as jnp.dot, weight.T or a Flax layer, call "
    "lora.merge(params) in the layer"
)


@dataclass(frozen=True)
class Adapted:
    """A weight with its factors, as a pytree node. The three array fields may also hold shardings or shapes.

    Attributes:
        weight: ``[*in, *out]``; several dims may be summed over (in), and the product may have several new ones (out). It is an
            array, or ``Quantized``.
        lora_a: A, ``[*in, rank]``.
        lora_b: B, ``[rank, *out]``.
        scale: Factor of x A B: alpha / rank.
    """

    weight: Any
    lora_a: Any
    lora_b: Any
    scale: float

    __array_ufunc__ = None  # a NumPy array, too, leaves ``x @ weight`` to __rmatmul__

    def __repr__(self) -> str:
        """Returns a line without the values: JAX and Flax put it into their errors where they cannot read the weight."""
        shape = getattr(self.weight, "shape", None)
        return f"a weight {shape} with factors of LoRA ({REMEDY})"

    def __getattr__(self, name: str) -> Any:
        """Raises AttributeError, with what can be done for an attribute of arrays."""
        of_arrays = not name.startswith("_") and hasattr(jax.Array, name)
        raise AttributeError(f"{self!r} has no {name}" if of_arrays else name)

    def __jax_array__(self) -> "Adapted":
        """Returns itself, which is no array: ``x @ weight`` is left to __rmatmul__, and JAX's other errors show __repr__."""
        return self

    def _refuse(self, *_: Any, **__: Any) -> NoReturn:
        raise TypeError(f"an operation on arrays must be given an array; got {self!r}")

    __array__ = __getitem__ = __matmul__ = __mul__ = __rmul__ = _refuse

    def astype(self, dtype: Any) -> "Adapted":
        """Returns the weight and its factors in another dtype."""
        return replace(self, **{name: getattr(self, name).astype(dtype) for name in FIELDS})

    def map_out(self, function: Callable[[Any], Any]) -> "Adapted":
        """Returns the weight after a linear ``function`` of its out dims, such as one that copies heads."""
        return replace(self, weight=function(self.weight), lora_b=function(self.lora_b))

    def merged(self, num_stacked: int = 0) -> Any:
        """Returns W + scale A B, summed in float32 or wider and rounded to the dtype of W.

        Args:
            num_stacked: The number of leading dims that index stacked weights: 1 for stacked layers, else 0.
        """
        wide = jnp.promote_types(self.weight.dtype, jnp.float32)
        weight, a, b = (getattr(self, name).astype(wide) for name in FIELDS)
        stack, rank = weight.shape[:num_stacked], a.shape[-1]
        product = a.reshape(*stack, -1, rank) @ b.reshape(*stack, rank, -1)
        return (weight + self.scale * product.reshape(weight.shape)).astype(self.weight.dtype)

    def __rmatmul__(self, x: Any) -> jax.Array:
        low = (x @ self.lora_a) * self.scale
        return x @ dense(self.weight, x.dtype) + low @ self.lora_b


jax.tree_util.register_pytree_with_keys(
    Adapted,
    lambda node: (tuple((DictKey(name), getattr(node, name)) for name in FIELDS), node.scale),
    lambda scale, children: Adapted(**dict(zip(FIELDS, children, strict=True)), scale=scale),
)


def is_adapted(node: object) -> bool:
    """Returns whether a node of a tree is a weight with its factors."""
    return isinstance(node, Adapted)


def einsum(
    spec: str,
    x: jax.Array,
    weight: Any,
    product: Callable[[str, jax.Array, jax.Array], jax.Array] = jnp.einsum,
) -> jax.Array:
    """Returns ``jnp.einsum(spec, x, weight)``, with the factors of a weight that has any.

    Args:
        spec: Such as "btd,df->btf", for two arrays. The dims of the weight that are summed over come first.
        x: The input.
        weight: An array, an Adapted of arrays, or either with a Quantized weight.
        product: Computes the product with the weight in place of ``jnp.einsum``; not those with its factors.

    Raises:
        ValueError: The summed dims of the weight are not first in ``spec``, or not those that its factors were made for.
    """
    if not is_adapted(weight):
        return product(spec, x, dense(weight, x.dtype))
    inputs, arrow, y_dims = spec.replace(" ", "").partition("->")
    if not arrow or inputs.count(",") != 1:
        raise ValueError(
            f'spec must name the dims of x, the weight and the result; got {spec!r}. Write such as "btd,df->btf".'
        )
    x_dims, w_dims = inputs.split(",")
    ins = "".join(dim for dim in w_dims if dim not in y_dims)
    outs, rank = (
        w_dims[len(ins) :],
        next(letter for letter in string.ascii_letters if letter not in spec),
    )
    if not w_dims.startswith(ins) or weight.lora_a.ndim != len(ins) + 1:
        raise ValueError(
            f"the dims of a weight that are summed over must come first, and be those that its factors were made for; got "
            f"{spec!r} for a weight of shape {weight.weight.shape} with lora_a of shape {weight.lora_a.shape}. Give Lora the "
            "number of these dims in targets."
        )
    low_dims = "".join(dim for dim in x_dims if dim not in ins) + rank
    low = jnp.einsum(f"{x_dims},{ins}{rank}->{low_dims}", x, weight.lora_a) * weight.scale
    y = product(spec, x, dense(weight.weight, x.dtype))
    return y + jnp.einsum(f"{low_dims},{rank}{outs}->{y_dims}", low, weight.lora_b)


@dataclass(frozen=True)
class Lora:
    """Which weights get factors, and the rank. Raises ValueError for a rank, alpha or targets out of range.

    Attributes:
        rank: The rank of A B.
        targets: For each weight to adapt its number of dims that a product sums over: 1 for a matrix [in, out]. Weights are
            named by the last part of their paths, such as "w_up", or by all of it. In the tree of a LayeredModel they are
            among its layers, or in a list of ``outer`` whose name ends in "layers".
        alpha: The scale is alpha / rank; None: rank.
    """

    rank: int
    targets: Mapping[str, int]
    alpha: float | None = None

    def __post_init__(self) -> None:
        if not isinstance(self.rank, int) or self.rank < 1:
            raise ValueError(f"rank must be a positive integer; got {self.rank!r}. Choose 8, say.")
        if self.alpha is not None and not 0 < self.alpha < math.inf:
            raise ValueError(
                f"alpha must be positive; got {self.alpha!r}. Choose the rank, {self.rank}, or twice that."
            )
        if not isinstance(self.targets, Mapping):
            raise TypeError(
                f'targets must be a dict by name; got {self.targets!r}. Choose such as {{"w_up": 1}}.'
            )
        if not self.targets:
            raise ValueError('targets must name weights; got none. Choose such as {"w_up": 1}.')

    @property
    def scale(self) -> float:
        """Factor of x A B: alpha / rank."""
        return 1.0 if self.alpha is None else self.alpha / self.rank

    def init(self, key: PyTree, params: PyTree) -> PyTree:
        """Returns params with factors: A drawn from a normal distribution of variance 1 / in, B zero, so that A B is zero.

        The values depend only on the key and the paths of the weights. Factors have the dtype of their weight.

        Args:
            key: A PRNG key.
            params: Params in the model's order.

        Raises:
            ValueError: A target names no weight, or one with too few dims, or with fewer inputs or outputs than the rank.
        """

        def adapt(path: str, weight: Any, num_stacked: int, num_in: int) -> Adapted:
            stack, ins, outs = _cut(weight.shape, num_stacked, num_in)
            if not ins or not outs:
                raise ValueError(
                    f"a weight must have dims that a product sums over, and others; got {path} of shape {weight.shape} and "
                    f"{num_in} to sum over. Correct the number in targets, or leave it out."
                )
            rank = arg("lora_rank") if is_flag("lora_rank") else "rank"
            if self.rank > (most := min(math.prod(ins), math.prod(outs))):
                raise ValueError(
                    f"{rank} must be at most the number of inputs and of outputs of each weight, since A B has "
                    f"no higher rank; got {self.rank}, {path} of {math.prod(ins)} inputs and {math.prod(outs)} "
                    f"outputs. Choose {most} or less; 8, say."
                )
            own = jax.random.fold_in(key, zlib.crc32(path.encode()) & 0x7FFFFFFF)
            a = (
                jax.random.normal(own, (*stack, *ins, self.rank), weight.dtype)
                * math.prod(ins) ** -0.5
            )
            return Adapted(
                weight, a, jnp.zeros((*stack, self.rank, *outs), weight.dtype), self.scale
            )

        return self._at_targets(adapt, params)

    def shardings(self, shardings: PyTree) -> PyTree:
        """Returns the NamedShardings of params with factors, from those without.

        A keeps the sharding of W's in dims, B that of its out dims, and both that of the stacked layers. Raises ValueError if a
        target names no weight.
        """

        def adapt(path: str, sharding: NamedSharding, num_stacked: int, num_in: int) -> Adapted:
            del path
            entries = (*sharding.spec, *(None,) * (num_stacked + num_in - len(sharding.spec)))
            stack, ins, outs = _cut(entries, num_stacked, num_in)
            of = lambda *entries: NamedSharding(sharding.mesh, PartitionSpec(*entries))
            return Adapted(sharding, of(*stack, *ins), of(*stack, None, *outs), self.scale)

        return self._at_targets(adapt, shardings)

    def _at_targets(self, adapt: Callable[[str, Any, int, int], Adapted], tree: PyTree) -> PyTree:
        layered = is_layered(tree)
        found: set[str] = set()

        def at(path: tuple, leaf: Any) -> Any:
            name = path_string(path)
            if layered and f"{LAYERS}/" not in name:
                return leaf
            target = next(
                (target for target in self.targets if target in (name, name.split("/")[-1])), None
            )
            if target is None:
                return leaf
            found.add(target)
            return adapt(name, leaf, num_stacked(name, tree), self.targets[target])

        adapted = jax.tree_util.tree_map_with_path(at, tree)
        if missing := sorted(set(self.targets) - found):
            paths = [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(tree)]
            raise ValueError(
                f"each target must name a weight{' of the layers' * layered}; got {missing[0]!r}, where the params are "
                f"{paths}. Choose among them."
            )
        return adapted


def _cut(dims: tuple, num_stacked: int, num_in: int) -> tuple[tuple, tuple, tuple]:
    """Splits per-dim entries of a weight into those of stacked layers, in and out."""
    return (
        dims[:num_stacked],
        dims[num_stacked : num_stacked + num_in],
        dims[num_stacked + num_in :],
    )


def num_stacked(path: str, params: PyTree) -> int:
    """Returns 1 for a path in the stacked layers of a LayeredModel's tree, else 0."""
    return int(is_layered(params) and is_stacked(params) and path.startswith(f"{LAYERS}/"))


def merge(params: PyTree) -> PyTree:
    """Returns params with W + scale A B in place of each weight with factors; stacked and packed layers too."""

    def of(path: tuple, node: Any) -> Any:
        name = path_string(path)
        return node.merged(num_stacked(name, params)) if is_adapted(node) else node

    return jax.tree_util.tree_map_with_path(of, params, is_leaf=is_adapted)


def without_factors(params: PyTree) -> PyTree:
    """Returns params, or a tree of their structure, with the weights alone, unchanged."""
    return jax.tree.map(
        lambda node: node.weight if is_adapted(node) else node, params, is_leaf=is_adapted
    )


def with_weights(params: PyTree, weights: PyTree) -> PyTree:
    """Returns params with other weights, given in a tree like ``without_factors(params)``; the factors are kept.

    Where params has None it gets what ``weights`` has.
    """
    change = lambda node, weight: replace(node, weight=weight) if is_adapted(node) else weight
    return jax.tree.map(
        change, params, weights, is_leaf=lambda node: node is None or is_adapted(node)
    )


# -- weights in four or eight bits -------------------------------------------------------------------------------------


def quantize(params: PyTree, kind: str, weights: Mapping[str, int] | None = None) -> PyTree:
    """Returns params with weights in codes, each of which is decoded where a product reads it.

    Args:
        params: Params with factors, from ``Lora.init``: arrays in the model's order or packed for a pipeline.
        kind: "nf4": four bits, with a scale for each 64 values; "nf4-dq": likewise, with these scales in a byte each; "int8": a
            byte, with a scale for each output; "fp8": a byte, with a scale for each weight.
        weights: Further weights, without factors, named as in ``Lora.targets``, each with its number of dims that a product
            sums over. They must not be trained.

    Raises:
        ValueError: Neither has a weight factors nor are there further ones, a name is of no weight, or blocks of 64 do not
            divide what a product with it sums over.
    """
    kind, further, found = check_kind(kind), dict(weights or {}), set()

    def of(path: tuple, node: Any) -> Any:
        name = path_string(path)
        target = next((target for target in further if target in (name, name.split("/")[-1])), None)
        found.update([target] if target else [])
        stacked = num_stacked(name, params)
        if is_adapted(node):
            num_in = node.lora_a.ndim - 1 - stacked
            return replace(node, weight=quantize_weight(node.weight, kind, num_in, stacked, name))
        return (
            node if target is None else quantize_weight(node, kind, further[target], stacked, name)
        )

    quantized = jax.tree_util.tree_map_with_path(of, params, is_leaf=is_weight)
    if missing := sorted(set(further) - found):
        raise ValueError(
            f"each of weights must name one; got {missing[0]!r}. Choose among {_names(params)}."
        )
    if not any(map(_has_codes, jax.tree.leaves(quantized, is_leaf=_has_codes))):
        raise ValueError(
            f"weights are quantized where they are frozen, beside factors of LoRA; got params without factors: "
            f"{_names(params)}. Make factors first: Lora.init."
        )
    return quantized


def quantized_shardings(params: PyTree, shardings: PyTree) -> PyTree:
    """Returns the NamedShardings of params from ``quantize``, given those with weights that are not in codes.

    Args:
        params: Arrays or ShapeDtypeStructs, with weights in codes.
        shardings: ``Lora.shardings(shardings)``.

    Raises:
        ValueError: A device would have a part of a block.
    """

    def of(path: tuple, node: Any, sharding: Any) -> Any:
        name = path_string(path)
        if is_adapted(node) and is_quantized(node.weight):
            return replace(sharding, weight=node.weight.shardings(sharding.weight, name))
        return node.shardings(sharding, name) if is_quantized(node) else sharding

    return jax.tree_util.tree_map_with_path(of, params, shardings, is_leaf=_has_codes)


def is_weight(node: object) -> bool:
    """Returns whether a node of a tree is a weight with factors, or one in codes."""
    return is_adapted(node) or is_quantized(node)


def _has_codes(node: object) -> bool:
    return is_quantized(node.weight if isinstance(node, Adapted) else node)


def _names(params: PyTree) -> list[str]:
    return [path_string(path) for path, _ in jax.tree_util.tree_leaves_with_path(params)]
