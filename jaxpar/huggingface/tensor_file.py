"""Opens one safetensors file as named, memory-mapped arrays: only the bytes that are used are read.

The safetensors package parses the untrusted header. It accepts only tensors that are contiguous, fill the file to its end and
have the sizes of their shapes and dtypes, so their places in the file follow from their order. The package itself would copy a
tensor before it can be transposed; a memory map is not read before a shard needs it.

**Reference**: the format's description at github.com/huggingface/safetensors.
"""

import math
from pathlib import Path

import jax.numpy as jnp
import numpy as np

from jaxpar.huggingface.untrusted import brief, check_file
from jaxpar.runtime.extras import install_extra
from jaxpar.runtime.printable import printable

FLOATS = {"F64": np.dtype("f8"), "F32": np.dtype("f4"), "F16": np.dtype("f2"), "BF16": np.dtype(jnp.bfloat16)}
_INTEGERS = {f"{kind}{bits}": np.dtype(f"{kind.lower()}{bits // 8}") for kind in "IU" for bits in (8, 16, 32, 64)}
DTYPES = FLOATS | _INTEGERS | {"BOOL": np.dtype(bool)}


def open_tensors(path: Path) -> dict[str, np.ndarray]:
    """Returns the tensors of a safetensors file by their names, as read-only views of the file.

    Raises:
        FileNotFoundError: There is no such file.
        ImportError: The extra ``hf`` is not installed.
        ValueError: The file is damaged, or has a dtype that is not supported.
    """
    try:
        from safetensors import SafetensorError, safe_open
    except ImportError as error:
        raise ImportError(
            f"safetensors files need the package safetensors; got {error}. {install_extra('hf')}."
        ) from error
    try:
        with safe_open(check_file(path), "np") as file:
            slices = {name: file.get_slice(name) for name in file.offset_keys()}
            about = [(name, each.get_dtype(), tuple(each.get_shape())) for name, each in slices.items()]
    except SafetensorError as error:
        why = printable(" ".join(str(error).split()))
        raise ValueError(
            f"a safetensors file must hold exactly the tensors of its header; got {why}, in {path}. It is damaged or "
            "truncated: download it again."
        ) from error
    data, tensors = np.memmap(path, np.uint8, "r"), {}
    at = 8 + int.from_bytes(data[:8].tobytes(), "little")  # the length of the header, then the header
    for name, kind, shape in about:
        if kind not in DTYPES:
            raise ValueError(
                f"a tensor's dtype must be one of {', '.join(DTYPES)}; got {brief(kind)} for {brief(name)} in {path}. Convert "
                "the model to one of them: quantised weights are not read."
            )
        end = at + math.prod(shape) * DTYPES[kind].itemsize
        tensors[name], at = data[at:end].view(DTYPES[kind]).reshape(shape), end
    return tensors
