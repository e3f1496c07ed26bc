"""The rows of each step: a function of seed and step only, the same for every mesh, process count and resume."""

from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

WEIGHT = "weight"
MOST_PERMUTED = 2**24  # more rows than these are permuted by a cipher, which needs no table of all rows
BLOCK = 2**20  # tokens that are checked at a time, to avoid allocating an array of the file's size


def num_batches(num_rows: int, batch_size: int) -> int:
    """Returns the number of batches in an epoch; the last one may be short."""
    if not 1 <= batch_size <= num_rows:
        raise ValueError(
            f"batch_size must be from 1 to the number of rows; got batch_size={batch_size}, {num_rows} rows. "
            f"Choose {min(max(batch_size, 1), num_rows)}, or give more data."
        )
    return -(-num_rows // batch_size)


class Origin(NamedTuple):
    """Where a batch size starts to apply: a run that resumes with another one has done ``step`` steps on ``samples`` rows."""

    step: int = 0
    samples: int = 0


BEGINNING = Origin()


def batch_rows(num_rows: int, batch_size: int, *, seed: int, step: int, origin: Origin = BEGINNING) -> np.ndarray:
    """Returns the row numbers of the batch of ``step``; each epoch has every row once, in its own order."""
    epoch, start = divmod(samples_before(num_rows, batch_size, step, origin), num_rows)
    return permuted(np.arange(start, min(start + batch_size, num_rows)), num_rows, (seed, epoch))


def samples_before(num_rows: int, batch_size: int, step: int, origin: Origin = BEGINNING) -> int:
    """Returns the number of rows that the steps before ``step`` used: the position in the data."""
    epoch, start = divmod(origin.samples, num_rows)
    ahead, per_epoch = step - origin.step, num_batches(num_rows, batch_size)
    left = -(-(num_rows - start) // batch_size)  # batches left in the epoch at ``origin``, the last may be short
    if ahead < left:
        return epoch * num_rows + start + ahead * batch_size
    epochs, batch = divmod(ahead - left, per_epoch)
    return (epoch + 1 + epochs) * num_rows + batch * batch_size


def permuted(places: np.ndarray, num_rows: int, key: tuple[int, ...]) -> np.ndarray:
    """Returns the rows at these places of a permutation of ``num_rows`` rows.

    Args:
        places: Places from 0 to ``num_rows - 1``.
        num_rows: The number of rows; above 2^24 no array of that size is made.
        key: Determines the permutation.
    """
    if num_rows <= MOST_PERMUTED:
        return _order(num_rows, key)[places]
    return _encrypted(places, num_rows, key)


@lru_cache(maxsize=16)
def _order(num_rows: int, key: tuple[int, ...]) -> np.ndarray:
    return np.random.default_rng(key).permutation(num_rows)


def _encrypted(places: np.ndarray, num_rows: int, key: tuple[int, ...]) -> np.ndarray:
    """Permutes by a Feistel cipher on the next power of 4, applied again to what is not below ``num_rows``.

    **Reference**: Black and Rogaway 2002, "Ciphers with arbitrary finite domains", sections 4 and 5.
    """
    half = np.uint64(-(-(num_rows - 1).bit_length() // 2))
    low = np.uint64((1 << int(half)) - 1)
    round_keys = np.random.default_rng(key).integers(0, 2**64, 8, np.uint64)
    rows = places.astype(np.uint64)
    outside = np.arange(len(rows))
    while len(outside):
        left, right = rows[outside] >> half, rows[outside] & low
        for round_key in round_keys:
            left, right = right, left ^ (_scrambled(right ^ round_key) & low)
        rows[outside] = (left << half) | right
        outside = outside[rows[outside] >= num_rows]
    return rows.astype(np.int64)


def _scrambled(x: np.ndarray) -> np.ndarray:
    """The finalizer of SplitMix64 (Steele et al. 2014, figure 20), modulo 2^64."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return x ^ (x >> np.uint64(31))


class RowSource(ABC):
    """Rows that are read by their numbers, and the batches made of them.

    A process may read some rows of a batch only: those that ``jaxpar.local_rows`` names.
    """

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows of an epoch."""

    @abstractmethod
    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the columns of these rows, of any number of them."""

    @abstractmethod
    def check(self) -> None:
        """Raises ValueError if a token is outside the model's vocabulary, as far as that can be known before training."""

    def rows(self, batch_size: int, *, seed: int, step: int, origin: Origin = BEGINNING) -> np.ndarray:
        """Returns the numbers of the rows of a step, in a form that ``take`` understands."""
        return batch_rows(len(self), batch_size, seed=seed, step=step, origin=origin)

    def samples_before(self, batch_size: int, step: int, origin: Origin = BEGINNING) -> int:
        """Returns the position in the data: the number of rows that the steps before ``step`` used."""
        return samples_before(len(self), batch_size, step, origin)

    def batch(
        self,
        batch_size: int,
        *,
        seed: int,
        step: int,
        multiple: int = 1,
        origin: Origin = BEGINNING,
        only: np.ndarray | None = None,
    ) -> dict[str, np.ndarray]:
        """Returns the batch of ``step``: the columns of ``take`` and ``weight``, padded to one shape for all steps.

        Args:
            batch_size: Rows per step.
            seed: The seed of the order of rows.
            step: Counted from 0 over all epochs.
            multiple: Rows are padded to a multiple of this: the data axis times the number of microbatches.
            origin: Where ``batch_size`` starts to apply.
            only: The rows of the padded batch to read, ascending; None: all.
        """
        rows = self.rows(batch_size, seed=seed, step=step, origin=origin)
        if only is None:
            return pad_rows(self.take(rows), round_up(batch_size, multiple))
        return pad_rows(self.take(rows[only[only < len(rows)]]), len(only))


def check_vocabulary(parts: Iterable[np.ndarray], vocab_size: int) -> None:
    """Raises ValueError unless all tokens are in the vocabulary, checked as stored: a cast could turn a large one into -1."""
    for part in parts:
        for start in range(0, part.size, BLOCK):
            block = part.reshape(-1)[start : start + BLOCK]
            wrong = block.max() if block.max() >= vocab_size else block.min()
            if not 0 <= wrong < vocab_size:
                raise ValueError(
                    f"tokens must be below the model's vocab_size; got {wrong}, vocab_size={vocab_size}. Choose the "
                    "vocab_size of the tokenizer that wrote them."
                )


def take_batch(
    data: Mapping[str, np.ndarray],
    batch_size: int,
    *,
    seed: int,
    step: int,
    multiple: int = 1,
    origin: Origin = BEGINNING,
) -> dict[str, np.ndarray]:
    """Returns the batch of ``step`` with a column "weight", padded to one shape for all steps.

    Args:
        data: Columns with a common leading dim, the rows.
        batch_size: Rows per step.
        seed: The seed of the order of rows.
        step: Counted from 0 over all epochs.
        multiple: Rows are padded to a multiple of this: the data axis times the number of microbatches.
        origin: Where ``batch_size`` starts to apply.
    """
    num_rows = len(next(iter(data.values())))
    rows = batch_rows(num_rows, batch_size, seed=seed, step=step, origin=origin)
    return pad_rows({name: column[rows] for name, column in data.items()}, round_up(batch_size, multiple))


def pad_rows(batch: Mapping[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
    """Returns ``batch`` padded with zeros to ``num_rows`` rows, and a column "weight": 1 for a real row, 0 for padding.

    A loss weighted by it is independent of the padding: each real row counts once, and none is dropped.
    """
    real = len(next(iter(batch.values())))
    if num_rows < real:
        raise ValueError(f"padding must not drop rows; got {real} rows to pad to {num_rows}. Give {real} or more.")
    weight = np.asarray(batch.get(WEIGHT, np.ones(real, np.float32)))
    columns = {**batch, WEIGHT: weight}
    return {
        name: np.concatenate([c, np.zeros((num_rows - real, *c.shape[1:]), c.dtype)]) for name, c in columns.items()
    }


def round_up(count: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is at least ``count``."""
    return -(-count // multiple) * multiple
