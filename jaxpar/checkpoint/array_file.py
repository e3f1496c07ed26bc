"""Reads the arrays that Orbax has written, with TensorStore, and trusts nothing of what they say of themselves.

    state/                       a key-value store in TensorStore's format OCDBT
        params.w_up/zarr.json    shape, dtype, the shape of a chunk, how chunks are encoded
        params.w_up/c/0/1        a chunk

TensorStore replaces missing chunks by zeros unless told otherwise, and treats a store without its
files as an empty one: a checkpoint that another process deletes meanwhile would be read as zeros.
It allocates whatever the shape of a chunk asks for, and ends the process where there is no such
memory. Both are errors here. Values are compared with their checksums by the callers.
"""

import json
import math
import os
from collections.abc import Iterator, Sequence
from itertools import product
from pathlib import Path
from typing import Any

import numpy as np
import tensorstore

METADATA = "zarr.json"
MAX_METADATA_BYTES = 1 << 20
SHARDED, BYTES = "sharding_indexed", "bytes"
REMEDY = "It is damaged: restore a backup."
OTHER_CODECS = ({"zstd"}, {"crc32c"}, set())  # after those two
Index = tuple[slice, ...]


class ArrayFile:
    """An array in the tree that Orbax has written to a folder.

    Args:
        folder: The folder.
        path: The path of the array in the tree, with slashes.
        shape: The shape that it must have.
        dtype: Its dtype.

    Attributes:
        shape: Its shape.
        chunk_shape: The shape of a chunk, which is read at once.

    Raises:
        ValueError: There is no such array, it has another shape or dtype, or its chunks are not
            such as Orbax writes.
    """

    def __init__(self, folder: Path, path: str, shape: tuple[int, ...], dtype: np.dtype) -> None:
        where = {
            "driver": "ocdbt",
            "base": f"file://{folder.absolute()}/state/",
            "path": path.replace("/", ".") + "/",
        }
        raw = tensorstore.KvStore.open(where).result().read(METADATA).result()
        self._name, self.shape, self.dtype = f"{path} in {folder}", shape, dtype
        if raw.state != "value":
            raise ValueError(
                f"a checkpoint must hold each array of its manifest; got none for {self._name}. {REMEDY}"
            )
        self.chunk_shape = chunk_shape(raw.value, self._name, shape, dtype)
        spec = {"driver": "zarr3", "kvstore": where, "fill_missing_data_reads": False}
        self._store = tensorstore.open(spec, open=True, read=True).result()
        if tuple(self._store.shape) != shape or self._store.dtype.numpy_dtype != dtype:
            raise ValueError(
                f"a checkpoint's array must be that of its manifest; got {self._store.dtype.numpy_dtype}"
                f"{list(self._store.shape)} for {self._name}, where the manifest has {dtype}{list(shape)}. {REMEDY}"
            )

    def start_reading(self, index: Index) -> "tensorstore.Future[np.ndarray]":
        """Starts to read a part; its result raises ValueError if a chunk is missing or damaged."""
        return self._store[index].read()

    def read(self, index: Index) -> np.ndarray:
        """Returns a part; raises ValueError if a chunk is missing or damaged."""
        return self.start_reading(index).result()

    def chunks(self) -> Iterator[Index]:
        """Yields the index of each chunk."""
        along = [
            [slice(at, min(at + each, size)) for at in range(0, size, each)]
            for size, each in zip(self.shape, self.chunk_shape, strict=True)
        ]
        yield from product(*along)


def chunk_shape(raw: bytes, name: str, shape: Sequence[int], dtype: np.dtype) -> tuple[int, ...]:
    """Returns the shape of a chunk in an array's metadata, which is untrusted.

    Args:
        raw: The contents of zarr.json.
        name: The array, for messages.
        shape: The shape that the array must have.
        dtype: Its dtype.

    Raises:
        ValueError: The chunks are larger than the array or than memory, or are encoded in another
            way than Orbax's.
    """
    if len(raw) > MAX_METADATA_BYTES:
        raise ValueError(
            f"an array's {METADATA} must be small; got {len(raw)} bytes for {name}. {REMEDY}"
        )
    try:
        found = json.loads(raw)
        grid, codecs = found["chunk_grid"], found["codecs"]
        chunk = grid["configuration"]["chunk_shape"]
        kinds = [codec["name"] for codec in _innermost(codecs)]
    except (ValueError, KeyError, TypeError, IndexError, RecursionError) as error:
        raise ValueError(
            f"an array's {METADATA} must be as Orbax writes it; got another for {name}. {REMEDY}"
        ) from error
    if kinds[:1] != [BYTES] or set(kinds[1:]) not in OTHER_CODECS:
        raise ValueError(
            f"chunks must be encoded as Orbax does it; got {str(kinds)[:200]} for {name}. {REMEDY}"
        )
    _check_chunk(chunk, name, shape, dtype)
    return tuple(chunk)


def _innermost(codecs: Any) -> list[dict[str, Any]]:
    """Returns the codecs of the values inside the shards that Orbax writes, of one chunk each."""
    if len(codecs) == 1 and codecs[0]["name"] == SHARDED:
        return list(codecs[0]["configuration"]["codecs"])
    return list(codecs)


def _check_chunk(chunk: Any, name: str, shape: Sequence[int], dtype: np.dtype) -> None:
    fits = (
        isinstance(chunk, list)
        and len(chunk) == len(shape)
        and all(
            type(each) is int and 0 < each <= max(1, size)
            for each, size in zip(chunk, shape, strict=True)
        )
    )
    if not fits:
        raise ValueError(
            f"an array's chunks must be no larger than the array, {list(shape)}; got {str(chunk)[:200]} for {name}. {REMEDY}"
        )
    needs, has = (
        math.prod(chunk) * dtype.itemsize,
        os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"),
    )
    if needs > has:
        raise ValueError(
            f"a chunk of an array is read at once, so memory must have room for it; got {needs:,} bytes for {name}, and "
            f"memory of {has:,}. Use a machine with more, or do not trust this checkpoint."
        )
