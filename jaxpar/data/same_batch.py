"""Whether a batch can be given to devices as it is, and whether the processes of a run give the same, each the whole of it."""

import threading
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.data.checksums import checksum
from jaxpar.dtypes import is_key
from jaxpar.runtime.coordination import check_agreement

REMEDY = (
    "If each process gives its own rows, those of jaxpar.local_rows(num_rows, mesh), add num_rows, the rows "
    "of the whole batch: jaxpar.shard_batch(batch, mesh, num_rows=...). If each gives the whole batch, read "
    "the same data in the same order in all."
)
_compared: set[Any] = set()  # the kinds of batches of which the processes have compared the first


def check_kept(batch: PyTree) -> None:
    """Raises where an array of NumPy is none of numbers, or has integers that JAX, without x64, would cut to 32 bits."""
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if not isinstance(leaf, np.ndarray):
            continue
        name = jax.tree_util.keystr(path, simple=True, separator="/") or "the batch"
        if leaf.dtype.kind in "OSUMm":
            raise TypeError(
                f"the arrays of a batch must be numbers; got {name} of dtype {leaf.dtype}. Make numbers of it, such as the "
                "tokens of a text, or leave it out of the batch."
            )
        kept = jax.dtypes.canonicalize_dtype(leaf.dtype)
        if leaf.dtype.kind not in "iu" or kept == leaf.dtype or not leaf.size:
            continue
        least, most = int(leaf.min()), int(leaf.max())
        if least < np.iinfo(kept).min or most > np.iinfo(kept).max:
            raise ValueError(
                f"integers of a batch must fit in {kept}, which JAX makes of {leaf.dtype}; got {name} from {least} to {most}. "
                'Number them anew, or set jax.config.update("jax_enable_x64", True) first.'
            )


def check_same_everywhere(batch: PyTree) -> None:
    """Raises ValueError if the first whole batch of its shapes differs between the processes of a run.

    A thread other than the main one may come to its first batch in another order on each process, so its batches are not
    compared.
    """
    if jax.process_count() == 1 or threading.current_thread() is not threading.main_thread():
        return
    leaves = [jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(batch)]
    kind = jax.tree.structure(batch), *((np.shape(leaf), str(getattr(leaf, "dtype", ""))) for leaf in leaves)
    if kind not in _compared:
        _compared.add(kind)
        given = checksum([np.asarray(leaf) for leaf in leaves])
        check_agreement("shard a whole batch", {"batch": given}, REMEDY)
