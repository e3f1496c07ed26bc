"""The rows of each step: a function of seed and step only, the same for every mesh, process count and resume."""

from collections.abc import Mapping
from functools import lru_cache
from typing import NamedTuple

import numpy as np

WEIGHT = "weight"


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
    return _order(num_rows, seed, epoch)[start : start + batch_size]


def samples_before(num_rows: int, batch_size: int, step: int, origin: Origin = BEGINNING) -> int:
    """Returns the number of rows that the steps before ``step`` used: the position in the data."""
    epoch, start = divmod(origin.samples, num_rows)
    ahead, per_epoch = step - origin.step, num_batches(num_rows, batch_size)
    left = -(-(num_rows - start) // batch_size)  # batches left in the epoch at ``origin``, the last may be short
    if ahead < left:
        return epoch * num_rows + start + ahead * batch_size
    epochs, batch = divmod(ahead - left, per_epoch)
    return (epoch + 1 + epochs) * num_rows + batch * batch_size


@lru_cache(maxsize=4)
def _order(num_rows: int, seed: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([seed, epoch]).permutation(num_rows)


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
