"""The dtypes of the tensors in a model's folder, and which of them lose bits as they are read and written again."""

from pathlib import Path

import numpy as np

from jaxpar.huggingface.folder import (
    CONFIG,
    FLOATS,
    INDEX,
    ONE_FILE,
    file_inside,
    open_folder,
    read_json,
)

DTYPE_KEYS = ("dtype", "torch_dtype")  # of transformers 5 and 4


def dtype_of(folder: Path | str) -> np.dtype | None:
    """Returns the dtype of all of a folder's tensors, else that which config.json names; None: jaxpar has none."""
    given = read_json(file_inside(folder, CONFIG))
    named = next((given[key] for key in DTYPE_KEYS if given.get(key) is not None), None)
    dtypes = _dtypes_of(folder)
    if len(dtypes) == 1 and dtypes != {FLOATS["F64"]}:
        return dtypes.pop()
    return next((dtype for dtype in FLOATS.values() if dtype.name == named), None)


def narrowed_dtypes(folder: Path | str) -> list[str]:
    """Returns the dtypes of a folder's tensors in which numbers have more bits than in the one that all are written in.

    Those in float64 count as float32, as which they are read.
    """
    if not (Path(folder) / CONFIG).exists() or (written := dtype_of(folder)) is None:
        return []
    found = _dtypes_of(folder)
    if FLOATS["F64"] in found:
        found = found - {FLOATS["F64"]} | {FLOATS["F32"]}
    return sorted(str(each) for each in found - {written} if each.itemsize >= written.itemsize)


def has_float64(folder: Path | str) -> bool:
    """Returns whether tensors of a folder are in float64."""
    return FLOATS["F64"] in _dtypes_of(folder)


def _dtypes_of(folder: Path | str) -> set[np.dtype]:
    """Returns the dtypes of the floats among a folder's tensors."""
    return {tensor.dtype for tensor in _tensors_of(Path(folder)).values()} & {*FLOATS.values()}


def _tensors_of(folder: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a folder; none of one that describes a model alone."""
    has_tensors = any((folder / name).exists() for name in (ONE_FILE, INDEX))
    return open_folder(folder) if has_tensors else {}
