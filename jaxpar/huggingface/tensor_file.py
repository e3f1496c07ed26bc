"""Reads one safetensors file as named, memory-mapped arrays: only the bytes that are used are read.

    8 bytes: length of the header | header, JSON: {name: {dtype, shape, data_offsets}} | the tensors' bytes

The header is untrusted. It is accepted only if its tensors are contiguous, fill the file to its end and have the sizes of their
shapes and dtypes; every length is checked before memory is allocated for it.

**Reference**: the format's description at github.com/huggingface/safetensors. Its own reader copies complete tensors, so that
package is used only as the writer, and as the reference in tests.
"""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np

from jaxpar.huggingface.untrusted import MAX_JSON_BYTES, brief, check_file, parse_json

MAX_DIMS = 8
_PREFIX_BYTES = 8
_METADATA = "__metadata__"
FLOATS = {
    name: np.dtype(dtype)
    for name, dtype in {"F64": np.float64, "F32": np.float32, "F16": np.float16, "BF16": jnp.bfloat16}.items()
}
_INTEGERS = {f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)}
DTYPES = FLOATS | _INTEGERS | {"BOOL": np.dtype(bool)}


def open_tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file by name, as read-only views of the file.

    Raises:
        FileNotFoundError: The file does not exist.
        ValueError: The file is damaged, or has a dtype that is not supported.
    """
    header, start = _read_header(path)
    data = np.memmap(path, np.uint8, "r")
    tensors, end = {}, 0
    by_offset = lambda entry: entry[1][2]
    for name, (dtype, shape, begin, stop) in sorted(header.items(), key=by_offset):
        if begin != end:
            raise _damaged(path, f"{brief(name)} from byte {begin} to {stop}, where the tensor before ends at {end}")
        tensors[name] = data[start + begin : start + stop].view(dtype).reshape(shape)
        end = stop
    if start + end != len(data):
        raise _damaged(path, f"tensors of {end} bytes in a file that has {len(data) - start} for them")
    return tensors


def _read_header(path: Path) -> tuple[dict[str, tuple[np.dtype, tuple[int, ...], int, int]], int]:
    """Returns each tensor's dtype, shape, first byte and end, and the offset in the file that these are relative to."""
    size = check_file(path).stat().st_size
    with path.open("rb") as file:
        length = int.from_bytes(file.read(_PREFIX_BYTES), "little")
        if size < _PREFIX_BYTES or not 0 < length <= min(size - _PREFIX_BYTES, MAX_JSON_BYTES):
            raise _damaged(path, f"a header of {length} bytes in a file of {size} (at most {MAX_JSON_BYTES} are read)")
        text = file.read(length)
    if not text.startswith(b"{"):
        raise _damaged(path, f"a header that begins with {text[:1]!r}")
    header = parse_json(text, f"the header of {path}", parse_int=_natural)
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise _damaged(path, f"{_METADATA} that is not text by name")
    start = _PREFIX_BYTES + length
    return {name: _check_tensor(path, name, about, size - start) for name, about in header.items()}, start


def _natural(digits: str) -> int:
    if len(digits) > 18 or digits.startswith("-"):
        raise ValueError(f"the number {digits[:24]}, which is no size")
    return int(digits)


def _check_tensor(path: Path, name: str, about: Any, room: int) -> tuple[np.dtype, tuple[int, ...], int, int]:
    if not isinstance(about, Mapping) or set(about) != {"dtype", "shape", "data_offsets"}:
        raise _damaged(path, f"{brief(name)} with {brief(about)} in place of dtype, shape and data_offsets")
    dtype, shape, offsets = about["dtype"], about["shape"], about["data_offsets"]
    if not isinstance(dtype, str) or dtype not in DTYPES:
        raise ValueError(
            f"a tensor's dtype must be one of {', '.join(DTYPES)}; got {brief(dtype)} for {brief(name)} in {path}. Convert the "
            "model to one of them: quantised weights are not read."
        )
    if not _are_sizes(shape) or len(shape) > MAX_DIMS or not _are_sizes(offsets) or len(offsets) != 2:
        raise _damaged(path, f"shape {brief(shape)} and data_offsets {brief(offsets)} for {brief(name)}")
    num_bytes, (begin, end) = math.prod(shape) * DTYPES[dtype].itemsize, offsets
    if not begin <= end <= room or end - begin != num_bytes:
        raise _damaged(
            path, f"bytes {begin} to {end} of {room} for {brief(name)}, whose {dtype}{shape} takes {num_bytes}"
        )
    return DTYPES[dtype], tuple(shape), begin, end


def _are_sizes(found: Any) -> bool:
    return isinstance(found, list) and all(type(size) is int for size in found)


def _damaged(path: Path, got: str) -> ValueError:
    return ValueError(
        "a safetensors file must hold exactly the tensors of its header; got "
        f"{got}, in {path}. It is damaged or truncated: download it again."
    )
