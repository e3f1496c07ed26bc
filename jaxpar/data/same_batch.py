"""Whether a batch can be given to devices as it is, and whether the processes of a run give the same, each the whole of it."""

import json
import threading
import zlib
from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh
from jaxtyping import PyTree

from jaxpar.data.checksums import checksum
from jaxpar.dtypes import is_key
from jaxpar.runtime import coordination
from jaxpar.runtime.coordination import check_agreement, exchange
from jaxpar.runtime.output import tell

REMEDY = (
    "If each process gives its own rows, those of jaxpar.local_rows(num_rows, mesh), add num_rows, the rows "
    "of the whole batch: jaxpar.shard_batch(batch, mesh, num_rows=...). If each gives the whole batch, read "
    "the same data in the same order in all."
)
SAMPLE = 4096  # numbers of an array
_later = {"batches": 0, "crc32": 0}  # whole batches after the first of their kind
# The same of rows that several processes hold, by a checksum of the rows' numbers.
_later_of_places: dict[str, dict[str, int]] = {}
MOST_LOOKS, MOST_PROCESSES = (
    8,
    64,
)  # that the first process takes for the first rows of others, and of which it asks
FIRST_ROWS = "jaxpar/first rows"
_looks = {"done": 0}
LEAST_STEPS = 4096  # to which values may be rounded without a word
_rounded: set[str] = set()  # the arrays whose first values were looked at
_compared: set[Any] = set()  # the kinds of batches of which the processes have compared the first


def check_one_batch(batch: PyTree) -> None:
    """Raises TypeError for what yields batches, in place of one."""
    if isinstance(batch, Iterator):
        raise TypeError(
            f"a batch must be arrays; got a {type(batch).__name__}, which yields some. Give one batch of it: next(batches)."
        )


def check_on_mesh(batch: PyTree, mesh: Mesh) -> None:
    """Raises TypeError for what yields batches, and for an array of one process where the mesh has devices of several.

    JAX would take such an array for the whole of it, the same everywhere, and each process would train on its own.
    """
    check_one_batch(batch)
    if _is_of_one(mesh):
        return
    for path, leaf in jax.tree_util.tree_leaves_with_path(batch):
        if isinstance(leaf, np.ndarray) or (
            isinstance(leaf, jax.Array) and leaf.is_fully_addressable
        ):
            name = jax.tree_util.keystr(path, simple=True, separator="/") or "a batch"
            raise TypeError(
                f"a batch must be on the mesh, whose devices several processes have; got {name}, an array of this process "
                "alone. Put it there: jaxpar.shard_batch(batch, mesh), with num_rows=... if each process gives its own rows."
            )


def check_kept(batch: PyTree) -> None:
    """Raises where a batch yields others, or an array has no numbers, or integers that JAX without x64 would cut to 32 bits.

    Of floats that JAX rounds until few differ, such as times in seconds since 1970, it tells once.
    """
    check_one_batch(batch)
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
        if leaf.dtype.kind == "f" and kept != leaf.dtype and name not in _rounded:
            _rounded.add(name)
            _remark_on_rounding(name, leaf, kept)
        if leaf.dtype.kind not in "iu" or kept == leaf.dtype or not leaf.size:
            continue
        least, most = int(leaf.min()), int(leaf.max())
        if least < np.iinfo(kept).min or most > np.iinfo(kept).max:
            raise ValueError(
                f"integers of a batch must fit in {kept}, which JAX makes of {leaf.dtype}; got {name} from {least} to {most}. "
                'Number them anew, or set jax.config.update("jax_enable_x64", True) first.'
            )


def _remark_on_rounding(name: str, values: np.ndarray, kept: np.dtype) -> None:
    """Tells that values are rounded until few of them differ."""
    finite = values[np.isfinite(values)]
    if not finite.size:
        return
    least, most = float(finite.min()), float(finite.max())
    with np.errstate(over="ignore"):
        step = float(np.spacing(np.asarray(max(-least, most), kept)))
    if 0 < most - least < LEAST_STEPS * step:
        tell(
            f"{name} of a batch is {values.dtype}, of which JAX makes {kept}. That has steps of {step:g} from {least:.17g} to "
            f"{most:.17g}, so values closer than this become equal. Subtract the least of all, or set "
            'jax.config.update("jax_enable_x64", True) first.'
        )


def check_same_everywhere(batch: PyTree, mesh: Mesh) -> None:
    """Raises ValueError if the first whole batch of its shapes differs between the processes of a run.

    Of later ones a sample is added to what ``check_same_since`` compares. A thread other than the main one may come to its
    batches in another order on each process, so those are not compared, nor are those on a mesh of one process alone.
    """
    if not _is_compared(mesh):
        return
    kind, arrays = _kind_and_arrays(batch)
    if kind not in _compared:
        _compared.add(kind)
        check_agreement("shard a whole batch", {"batch": checksum(arrays)}, REMEDY)
        return
    _add_sample(_later, arrays)


def check_same_rows(
    batch: PyTree,
    mesh: Mesh,
    *,
    rows: np.ndarray,
    num_rows: int,
    num_parts: int,
    columns: Sequence[np.ndarray] = (),
) -> None:
    """Raises ValueError if processes that hold the same rows differ in the first batch of its shapes.

    Later batches are compared as those of ``check_same_everywhere`` are.

    Args:
        batch: The rows of this process, arrays of the host.
        mesh: The mesh.
        rows: The numbers of its rows in the whole batch.
        num_rows: The rows of the whole batch.
        num_parts: The replicas whose rows it has.
        columns: The numbers of its columns, if it has some of them alone.
    """
    if not _is_compared(mesh):
        return
    kind, arrays = _kind_and_arrays(batch)
    ids = np.array([device.id for device in mesh.devices.flat])
    whole = [ids, np.array([num_rows]), *columns]
    of_each = {
        checksum([*whole, rows[part]]): [array[part] for array in arrays]
        for part in np.array_split(np.arange(len(rows)), num_parts)
    }
    kind = "rows", *kind, num_rows, ids.tobytes()
    if kind not in _compared:
        _compared.add(kind)
        own = {places: checksum(parts) for places, parts in of_each.items()}
        _check_places("shard their first batch", own)
        return
    for places, parts in of_each.items():
        _add_sample(_later_of_places.setdefault(places, {"batches": 0, "crc32": 0}), parts)


def check_same_since() -> None:
    """Raises ValueError if batches after the first differ that must not; every process must call it after the same step."""
    if jax.process_count() == 1:
        return
    told = lambda later: f"{later['batches']} of crc32 {later['crc32']:08x}"
    check_agreement("train on", {"batches after the first": told(_later)}, REMEDY)
    if _later_of_places:
        of_each = {places: told(later) for places, later in _later_of_places.items()}
        _check_places("go on", of_each)


def _is_compared(mesh: Mesh) -> bool:
    """Whether the processes compare the batches that this thread shards over a mesh."""
    is_main = threading.current_thread() is threading.main_thread()
    return jax.process_count() > 1 and is_main and _is_of_all(mesh)


def _kind_and_arrays(batch: PyTree) -> tuple[tuple, list[np.ndarray]]:
    """Returns the tree, shapes and dtypes of a batch, and its arrays, keys as numbers."""
    leaves = [
        jax.random.key_data(leaf) if is_key(leaf) else leaf for leaf in jax.tree.leaves(batch)
    ]
    kind = (
        jax.tree.structure(batch),
        *((np.shape(leaf), str(getattr(leaf, "dtype", ""))) for leaf in leaves),
    )
    return kind, [np.asarray(leaf) for leaf in leaves]


def _add_sample(later: dict[str, int], arrays: Sequence[np.ndarray]) -> None:
    """Adds a sample of a batch to the checksum of later ones."""
    later["batches"] += 1
    for array in arrays:
        sample = array.reshape(-1)[:: max(array.size // SAMPLE, 1)]
        later["crc32"] = zlib.crc32(sample.tobytes(), later["crc32"])


def _check_places(what: str, own: dict[str, str]) -> None:
    """Raises ValueError if a process has other bytes for some places than an earlier one."""
    first: dict[str, tuple[int, str]] = {}
    for process, answer in enumerate(exchange(f"check rows/{what}", own)):
        for places, found in answer.items():
            earlier, same = first.setdefault(places, (process, found))
            if found != same:
                raise ValueError(
                    f"processes that hold the same rows, as stages of one replica do, must agree on them before they {what}; "
                    f"got {found} on process {process}, {same} on process {earlier}. Read the same data and shard as many "
                    "batches in both, and draw what is random, such as noise and masks, from a seed that they share. If "
                    "each gives other columns of its rows, those of jaxpar.local_rows(num_rows, mesh, seq=...), give "
                    "shard_batch the same seq."
                )


def look_for_equal_rows(batch: PyTree, places: Sequence[np.ndarray]) -> None:
    """Says on the first process where two of the first processes give the same bytes for unlike rows or columns.

    Each tells the checksum of its first batch of this kind, and the first process looks for them when it comes to a few of its
    later ones, so that no process waits for another.

    Args:
        batch: The rows of this process, arrays of the host.
        places: The numbers of its rows in the whole batch, and of its columns if it has some of them alone.
    """
    if (service := coordination.client()) is None or _looks["done"] > MOST_LOOKS:
        return
    _looks["done"] += 1
    if _looks["done"] == 1:
        arrays = [np.asarray(leaf) for leaf in jax.tree.leaves(batch) if not is_key(leaf)]
        if any(
            (array != array[:1]).any() for array in arrays
        ):  # rows that are all equal, such as zeros, may be meant
            told = [checksum(list(places)), checksum(arrays)]
            service.key_value_set(
                f"{FIRST_ROWS}/{jax.process_index()}", json.dumps(told), allow_overwrite=True
            )
    elif jax.process_index() == 0:
        told = [
            coordination.try_get(f"{FIRST_ROWS}/{i}")
            for i in range(min(jax.process_count(), MOST_PROCESSES))
        ]
        if told := remark_on_equal_rows([each and json.loads(each) for each in told]):
            _looks["done"] = MOST_LOOKS + 1
            tell(told)


def remark_on_equal_rows(told: Sequence[Sequence[str] | None]) -> str:
    """Returns what to say of processes that give the same bytes for unlike rows; "" if none do.

    Args:
        told: Of each process the checksums of its places and of its arrays; None: not known.
    """
    processes: dict[str, dict[str, int]] = defaultdict(
        dict
    )  # the first process of each place, by the bytes
    for process, each in enumerate(told):
        if each:
            processes[each[1]].setdefault(each[0], process)
    equal = next((sorted(found.values()) for found in processes.values() if len(found) > 1), None)
    if equal is None:
        return ""
    return (
        f"processes {', '.join(map(str, equal))} give shard_batch the same bytes for unlike rows of its first batch: rows are "
        "trained on more than once, and others never. Give each those of jaxpar.local_rows(num_rows, mesh)."
    )


def _is_of_all(mesh: Mesh) -> bool:
    return {device.process_index for device in mesh.devices.flat} == {*range(jax.process_count())}


def _is_of_one(mesh: Mesh) -> bool:
    return len({device.process_index for device in mesh.devices.flat}) == 1
