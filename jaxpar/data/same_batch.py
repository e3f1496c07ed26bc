"""Whether the processes of a run give the same batch, where each of them gives it whole."""

import threading
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar.data.checksums import checksum
from jaxpar.dtypes import is_key
from jaxpar.runtime.coordination import check_agreement

_compared: set[Any] = set()  # the kinds of batches of which the processes have compared the first


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
        check_agreement("shard a whole batch", {"batch": checksum([np.asarray(leaf) for leaf in leaves])})
