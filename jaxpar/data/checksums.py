"""A checksum of data, by which processes of a run find out whether all of them read the same."""

import zlib
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

MOST_BYTES = (
    2**32
)  # of data that are read whole, which takes some seconds; of larger ones as many, evenly spread
BLOCK_BYTES = 2**16


def checksum(parts: Sequence[np.ndarray]) -> str:
    """Returns a checksum of arrays: of their shapes, dtypes and bytes, or of evenly spread blocks above 4 GiB.

    Args:
        parts: Arrays in memory, or memory-mapped ones.
    """
    share, found = MOST_BYTES / max(sum(part.nbytes for part in parts), 1), 0
    for part in parts:
        found = zlib.crc32(f"{part.dtype.str} {part.shape}".encode(), found)
        for block in _blocks(part, share):
            found = zlib.crc32(block, found)
    return f"crc32 {found:08x}"


def checksum_of_files(files: Sequence[Path]) -> str:
    """Returns a checksum of the contents of files, as ``checksum`` does; their names do not count."""
    empty = np.zeros(0, np.uint8)
    return checksum(
        [np.memmap(file, np.uint8, "r") if file.stat().st_size else empty for file in files]
    )


def _blocks(part: np.ndarray, share: float) -> Iterator[bytes]:
    """Yields the bytes of an array a block at a time; where ``share`` is below 1, that share of the blocks."""
    flat = part.reshape(-1)
    size = max(BLOCK_BYTES // part.itemsize, 1)
    count = -(-len(flat) // size)
    kept = max(min(count, int(count * share)), min(count, 2))
    for place in np.linspace(0, count - 1, kept).round().astype(int).tolist() if count else ():
        yield flat[place * size : (place + 1) * size].tobytes()
