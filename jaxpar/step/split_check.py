"""A check with numbers: one step of all rows, and the same step of parts of them that are added up.

``row_checks.py`` proves from traces what this measures, and says where it cannot.
"""

import math
from collections.abc import Callable, Sequence

import jax
import jax.numpy as jnp
import numpy as np
from jaxtyping import PyTree

from jaxpar.data_parallel import check_batch
from jaxpar.fields import check_at_least
from jaxpar.layered_model import (
    LayeredModel,
    check_unpacked,
    path_string,
)
from jaxpar.step.loss_checks import check_loss

Named = dict[str, np.ndarray]  # loss, metrics and gradients, by name

_GRADS = "the gradients of"
_SMALL = 1e-3  # of the largest gradient; a smaller one is held against this


def check_split(
    model: LayeredModel | Callable[[PyTree, PyTree], PyTree],
    loss: Callable[[PyTree, PyTree], tuple],
    params: PyTree,
    batch: PyTree,
    num_parts: int = 2,
    *,
    within: float | None = None,
) -> float:
    """Returns how far loss, metrics and gradients of a batch are from those of its parts, which are added up.

    It runs the model on one device, or where params and batch are, once with all rows and once with each part. So it tests
    what jaxpar cannot prove from the operations: that no row depends on others, and that the loss is a sum over rows. Use
    params of a few steps and a batch whose rows differ in weight and length, since zeros show nothing.

    Args:
        model: A LayeredModel, or any function ``model(params, batch) -> outputs``.
        loss: ``loss(outputs, batch) -> (loss_sum, weight_sum)``, or with a dict of further sums.
        params: Arrays, in the model's order.
        batch: Arrays ``[rows, ...]``.
        num_parts: In how many parts the rows are split, as into microbatches.
        within: The largest relative distance that is rounding; None: the square root of the precision of params and
            outputs, 3.5e-4 in float32. A model that computes in bfloat16 needs 0.1.

    Returns:
        The largest relative distance: of the loss, of a metric, or of the gradients of a param, |difference| / |gradient|.

    Raises:
        ValueError: They differ by more, or the parts do not divide the rows.
    """
    check_at_least(1, num_parts=num_parts)
    check_unpacked(params)
    num_rows = check_batch(batch, 1)
    if num_rows % num_parts:
        raise ValueError(
            f"num_parts must divide the rows of the batch; got num_parts={num_parts} and {num_rows} rows. Choose another, or "
            "cut the batch."
        )
    forward = model.apply if isinstance(model, LayeredModel) else model
    step = _make_step(forward, loss)
    size = num_rows // num_parts
    rows = lambda start: jax.tree.map(lambda leaf: leaf[start : start + size], batch)
    parts = [rows(start) for start in range(0, num_rows, size)]
    check_loss(loss, jax.eval_shape(forward, params, batch), batch, has_aux=None)
    whole = step(params, [batch])
    split = step(params, parts)
    if not np.isfinite(whole["loss"]):
        raise ValueError(
            f"the loss of a batch must be finite, to be compared with that of its parts; got {whole['loss']:.6g}. Give rows of "
            "which one has a weight that is not 0, and finite inputs and params."
        )
    distances = _distances(split, whole)
    worst = max(distances, key=lambda name: distances[name])
    allowed = within
    if allowed is None:
        allowed = _precision(params, jax.eval_shape(forward, params, batch))
    if not distances[worst] <= allowed:
        raise ValueError(
            f"a step must give the same for a batch and for its parts added up; got loss {whole['loss']:.6g} whole and "
            f"{split['loss']:.6g} in {num_parts} parts, and a relative distance of {distances[worst]:.2g} in {worst}, of which "
            f"{allowed:.2g} may be rounding. Let no row of the model depend on others, and make loss_sum and weight_sum sums "
            "over the rows that the loss is given."
        )
    return distances[worst]


def _make_step(forward: Callable, loss: Callable) -> Callable[..., Named]:
    """Returns ``(params, parts) -> {name: array}``: loss, metrics and gradients of the parts together."""
    sums = lambda params, rows: loss(forward(params, rows), rows)
    weigh = jax.jit(lambda params, rows: sums(params, rows)[1])

    def share(params: PyTree, rows: PyTree, total: jax.Array) -> tuple[jax.Array, PyTree]:
        loss_sum, _, *further = sums(params, rows)
        return loss_sum / total, jax.tree.map(lambda each: jnp.asarray(each) / total, further)

    differentiate = jax.jit(jax.value_and_grad(share, has_aux=True, allow_int=True))

    def step(params: PyTree, parts: Sequence[PyTree]) -> Named:
        total = sum(weigh(params, rows) for rows in parts)
        shares = [differentiate(params, rows, total) for rows in parts]
        return _named(jax.tree.map(lambda *each: sum(map(_wide, each)), *shares))

    return step


def _wide(array: jax.Array) -> np.ndarray:
    """Returns an array on the host, in double precision; gradients of integers are none."""
    found = np.asarray(array)
    if found.dtype == jax.dtypes.float0:
        return np.zeros(found.shape)
    return found.astype(np.complex128 if np.iscomplexobj(found) else np.float64)


def _named(shares: tuple) -> Named:
    (loss, further), grads = shares
    metrics = further[0] if further else {}
    of_metrics = _by_path("metric", metrics)
    of_grads = _by_path(_GRADS, grads)
    return {"loss": loss} | of_metrics | of_grads


def _by_path(kind: str, tree: PyTree) -> Named:
    leaves = jax.tree_util.tree_leaves_with_path(tree)
    return {f"{kind} {path_string(path)}": leaf for path, leaf in leaves}


def _distances(got: Named, want: Named) -> dict[str, float]:
    """Returns the relative distance of each value; infinity where one is not finite."""
    norms = {name: _norm(value) for name, value in want.items()}
    of_grads = [norm for name, norm in norms.items() if name.startswith(_GRADS)]
    tiny = float(np.finfo(np.float64).tiny)
    least = max(_SMALL * max([norms["loss"], *of_grads]), tiny)
    distances = {}
    for name, value in want.items():
        difference = _norm(got[name] - value)
        distance = difference / max(norms[name], least)
        distances[name] = distance if math.isfinite(distance) else math.inf
    return distances


def _norm(value: np.ndarray) -> float:
    return float(np.linalg.norm(value))


def _precision(params: PyTree, outputs: PyTree) -> float:
    """Returns the square root of the precision of the coarsest floats."""
    dtypes = [leaf.dtype for leaf in jax.tree.leaves((params, outputs))]
    floats = [dtype for dtype in dtypes if jnp.issubdtype(dtype, jnp.inexact)]
    precisions = [float(jnp.finfo(dtype).eps) for dtype in floats]
    return max(precisions, default=0.0) ** 0.5
