"""Several sources of rows mixed by weight: which source each sample comes from, as a function of seed and step.

Samples are drawn in blocks of 4096. Each block has as many samples of each source as its weight says, in an order of its own,
so the number of samples of a source before any sample is known without drawing those before it: a run resumes exactly. Each
source is read in epochs of its own, every row once an epoch.
"""

import math
from collections.abc import Sequence

import numpy as np

from jaxpar.data.batches import BEGINNING, Origin, RowSource, permuted

SAMPLES_PER_BLOCK = 4096


class Mixture(RowSource):
    """Rows of several sources; a row is a pair ``(source, row)``.

    Args:
        sources: The sources.
        weights: The share of samples of each, in any unit; None: the numbers of their rows.

    Raises:
        ValueError: Weights that are not one positive number for each source, or so unequal that a source has no sample in a
            block.
    """

    def __init__(self, sources: Sequence[RowSource], weights: Sequence[float] | None = None) -> None:
        self.sources = tuple(sources)
        self._counts = _samples_per_block(
            [len(source) for source in sources] if weights is None else weights, len(sources)
        )

    @property
    def shares(self) -> list[float]:
        """The share of the samples of each source."""
        return (self._counts / SAMPLES_PER_BLOCK).tolist()

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def rows(self, batch_size: int, *, seed: int, step: int, origin: Origin = BEGINNING) -> np.ndarray:
        """Returns ``[batch_size, 2]``: the source of each sample and its row in it."""
        first = self.samples_before(batch_size, step, origin)
        samples = np.arange(first, first + batch_size)
        blocks = samples // SAMPLES_PER_BLOCK
        return np.concatenate([self._of_block(int(b), samples[blocks == b], seed) for b in np.unique(blocks)])

    def samples_before(self, batch_size: int, step: int, origin: Origin = BEGINNING) -> int:
        """Returns the position in the data: all batches are full."""
        return origin.samples + (step - origin.step) * batch_size

    def _of_block(self, block: int, samples: np.ndarray, seed: int) -> np.ndarray:
        in_order = np.repeat(np.arange(len(self.sources)), self._counts)
        dealt = np.random.default_rng((seed, block, len(self.sources))).permutation(in_order)
        places = samples - block * SAMPLES_PER_BLOCK
        rows = np.empty((len(samples), 2), np.int64)
        rows[:, 0] = dealt[places]
        for number, source in enumerate(self.sources):
            own = rows[:, 0] == number
            before = block * int(self._counts[number]) + np.cumsum(dealt == number)[places[own]] - 1
            rows[own, 1] = _in_epochs(before, len(source), seed, number)
        return rows

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the columns of rows, each a pair of a source and a row in it."""
        taken = [source.take(rows[rows[:, 0] == number, 1]) for number, source in enumerate(self.sources)]
        order = np.argsort(np.argsort(rows[:, 0], kind="stable"), kind="stable")
        columns = {name for columns in taken for name in columns}
        return {name: np.concatenate([_column(t, name) for t in taken])[order] for name in sorted(columns)}

    def check(self) -> None:
        """Raises ValueError if a source's check does."""
        for source in self.sources:
            source.check()


def _column(taken: dict[str, np.ndarray], name: str) -> np.ndarray:
    """A column of a source's rows; rows without segments are one segment each."""
    return taken[name] if name in taken else np.zeros_like(taken["tokens"])


def _in_epochs(draws: np.ndarray, num_rows: int, seed: int, number: int) -> np.ndarray:
    rows = np.empty_like(draws)
    epochs, places = np.divmod(draws, num_rows)
    for epoch in np.unique(epochs).tolist():
        rows[epochs == epoch] = permuted(places[epochs == epoch], num_rows, (seed, epoch, number))
    return rows


def _samples_per_block(weights: Sequence[float], num_sources: int) -> np.ndarray:
    """Returns the samples of each source in a block, by largest remainder."""
    if len(weights) != num_sources or not all(0 < weight < math.inf for weight in weights):
        raise ValueError(
            f"a mixture must have one positive weight for each source; got {list(weights)} for {num_sources} sources. Give "
            f"{num_sources}, such as {' '.join(['1'] * num_sources)}."
        )
    exact = np.asarray(weights, float) / math.fsum(weights) * SAMPLES_PER_BLOCK
    counts = np.floor(exact).astype(np.int64)
    counts[np.argsort(counts - exact, kind="stable")[: SAMPLES_PER_BLOCK - counts.sum()]] += 1
    if not counts.all():
        raise ValueError(
            f"each source of a mixture must have a weight of at least 1/{SAMPLES_PER_BLOCK} of all weights; got "
            f"{list(weights)}. Leave out the smallest, or choose a weight of {2 * math.fsum(weights) / SAMPLES_PER_BLOCK:g} or "
            "more for it."
        )
    return counts
