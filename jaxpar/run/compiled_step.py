"""The compiled step of a run, which names what of a batch is not as it was compiled for.

JAX would name the arguments of the compiled function, and suggest another mode of x64.
"""

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jaxtyping import PyTree

from jaxpar._compat import CompiledCopy
from jaxpar.data.batches import WEIGHT
from jaxpar.data.same_batch import check_on_mesh
from jaxpar.sharding import check_not_donated, path_string

SHOWN = 3


class CompiledStep(CompiledCopy):
    """A compiled training step ``(state, batch) -> (state, metrics)``.

    Args:
        compiled: What JAX has compiled.
        batch: The batch that it was compiled for, or its shapes.
        mesh: The mesh of the run.

    Raises:
        ValueError: When called, with a batch of other arrays, or with a state that a step has taken.
    """

    def __init__(
        self, compiled: jax.stages.Compiled, batch: PyTree, mesh: jax.sharding.Mesh
    ) -> None:
        super().__init__(compiled)
        self._mesh = mesh
        self._batch = dict(_arrays(batch))

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Returns the next state and the metrics."""
        check_not_donated(args[:1])
        batch = args[1] if len(args) > 1 else kwargs.get("batch", {})
        check_on_mesh(batch, self._mesh)
        try:
            return super().__call__(*args, **kwargs)
        except (TypeError, ValueError) as error:
            if apart := [*_differences(dict(_arrays(batch)), self._batch)]:
                raise ValueError(_refusal(apart)) from error
            raise

    def unread(self) -> str:
        """Returns a line about arrays of a batch that the step does not read; "" if it reads all."""
        _, shardings = self.input_shardings[0]
        read = {name for name, _ in _arrays(shardings)}  # the sharding of what is not read is None
        names = [name for name in self._batch if name not in read]
        if not names:
            return ""
        of_padding = ", which is 0 for rows of padding: multiply their losses by it"
        padding = of_padding if WEIGHT in names else ""
        return f"\nneither the model nor the loss reads {', '.join(names)} of a batch{padding}"


def _refusal(apart: Sequence[str]) -> str:
    more = f" and {len(apart) - SHOWN} more" if len(apart) > SHOWN else ""
    return (
        "every batch of a run must have the arrays, shapes, dtypes and mesh of the one that its step "
        f"was compiled for; got {', '.join(apart[:SHOWN])}{more}. Pad rows "
        "(jaxpar.data.batches.pad_rows) and sequences to one shape, and put each batch on the mesh of "
        "the run by jaxpar.shard_batch."
    )


def _arrays(batch: PyTree) -> Iterator[tuple[str, Any]]:
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        yield path_string(path), leaf


def _shape(leaf: Any) -> str:
    """Returns the dtype that JAX makes of an array, and its shape."""
    dtype = leaf.dtype if hasattr(leaf, "dtype") else np.result_type(leaf)
    if isinstance(leaf, np.ndarray):
        dtype = jax.dtypes.canonicalize_dtype(dtype)
    return f"{dtype}{list(np.shape(leaf))}"


def _differences(given: dict[str, Any], expected: dict[str, Any]) -> Iterator[str]:
    for name in sorted({*given, *expected}):
        if name not in expected:
            yield f"{name}, which that one does not have"
        elif name not in given:
            yield f"no {name}"
        else:
            yield from _difference(name, given[name], expected[name])


def _difference(name: str, given: Any, expected: Any) -> Iterator[str]:
    placed, on = (getattr(leaf, "sharding", None) for leaf in (given, expected))
    if _shape(given) != _shape(expected):
        yield f"{name} {_shape(given)} for {_shape(expected)}"
    elif placed is not None and on is not None and not placed.is_equivalent_to(on, given.ndim):
        yield f"{name} on {_mesh(placed)} for {_mesh(on)}"


def _mesh(sharding: Any) -> str:
    mesh = getattr(sharding, "mesh", None)
    sizes = {} if mesh is None else dict(mesh.shape)
    return "a mesh of " + (
        ", ".join(f"{axis}={size}" for axis, size in sizes.items() if size > 1) or "one device"
    )
