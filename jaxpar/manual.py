"""The one call to ``jax.shard_map``, whose interface still moves: code inside sees its own shard of ``data`` and ``stage``.

``data`` and ``stage`` are manual, both and always: with ``data`` automatic XLA reduces gradients once a microbatch, and two
automatic axes under a manual one can abort the process. ``tensor`` stays automatic, so XLA places tensor parallelism's
collectives. ``check_vma`` is off, so differentiation inside gives a shard's own gradients, and each sum is written out.
"""

from collections.abc import Callable

import jax
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar.mesh import DATA, STAGE


def manual_over_data_and_stage(function: Callable, mesh: Mesh, *, in_specs: PyTree, out_specs: PyTree) -> Callable:
    """Returns ``function`` run once a (data, stage) shard, with its arguments cut by ``in_specs``."""
    return jax.shard_map(
        function, mesh=mesh, in_specs=in_specs, out_specs=out_specs, axis_names={DATA, STAGE}, check_vma=False
    )
