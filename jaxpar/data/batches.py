"""The rows of each step: a function of seed and step only, the same for every mesh, process count and resume.

A ``Mixture`` of sources draws its samples in blocks of 4096. Each block has as many samples of each source as its weight says,
in an order of its own, so the number of samples of a source before any sample is known without drawing those before it: a run
resumes exactly. Each source is read in epochs of its own, every row once an epoch.
"""

import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import lru_cache
from typing import Any, NamedTuple

import numpy as np

from jaxpar.data.checksums import checksum
from jaxpar.fields import arg, check_at_least, check_kind

WEIGHT = "weight"
MOST_PERMUTED = (
    2**24
)  # more rows than these are permuted by a cipher, which needs no table of all rows
BLOCK = 2**20  # tokens that are checked at a time, to avoid allocating an array of the file's size
SAMPLES_PER_BLOCK = 4096


def num_batches(num_rows: int, batch_size: int) -> int:
    """Returns the number of batches in an epoch; the last one may be short."""
    if not 1 <= batch_size <= num_rows:
        raise ValueError(
            f"{arg('batch_size')} must be from 1 to the number of rows; got {arg(batch_size=batch_size)}, {num_rows} rows. "
            f"Choose {min(max(batch_size, 1), num_rows)}, or give more data."
        )
    return -(-num_rows // batch_size)


class Origin(NamedTuple):
    """Where a batch size starts to apply: a run that resumes with another one has done ``step`` steps on ``samples`` rows."""

    step: int = 0
    samples: int = 0


BEGINNING = Origin()


def batch_rows(
    num_rows: int, batch_size: int, *, seed: int, step: int, origin: Origin = BEGINNING
) -> np.ndarray:
    """Returns the row numbers of the batch of ``step``; each epoch has every row once, in its own order."""
    for name, number in {"batch_size": batch_size, "step": step}.items():
        check_kind((int, np.integer), "a whole number", "Write such as 8.", **{name: number})
    check_at_least(0, step=step)
    before = samples_before(num_rows, batch_size, step, origin)
    epoch, start = divmod(before, num_rows)
    end = min(start + batch_size, num_rows)
    return permuted(np.arange(start, end), num_rows, (seed, epoch))


def samples_before(num_rows: int, batch_size: int, step: int, origin: Origin = BEGINNING) -> int:
    """Returns the number of rows that the steps before ``step`` used: the position in the data."""
    epoch, start = divmod(origin.samples, num_rows)
    ahead = step - origin.step
    per_epoch = num_batches(num_rows, batch_size)
    # Batches left in the epoch at ``origin``, the last may be short.
    left = -(-(num_rows - start) // batch_size)
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
    num_bits = -(-(num_rows - 1).bit_length() // 2)
    half = np.uint64(num_bits)
    low = np.uint64((1 << num_bits) - 1)
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

    Attributes:
        max_documents: The most documents of a row, its padding included; None: that is not known without reading all.
    """

    max_documents: int | None = None

    @abstractmethod
    def __len__(self) -> int:
        """The number of rows of an epoch."""

    @abstractmethod
    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the columns of these rows, of any number of them."""

    def check(self) -> None:  # noqa: B027, rows without tokens have none to check
        """Raises ValueError if a token is outside the model's vocabulary, as far as that can be known before training."""

    def checksum(self) -> str:
        """Returns a checksum of the rows, for processes to compare; by default of the first and the last one."""
        ends = np.array([0, len(self) - 1])
        return checksum([*self.take(ends).values()])

    def describe(self) -> str:
        """Returns a line about the rows, and what becomes of a document longer than one; "" if there is nothing to say."""
        return ""

    def rows(
        self, batch_size: int, *, seed: int, step: int, origin: Origin = BEGINNING
    ) -> np.ndarray:
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
        real = only[only < len(rows)]
        return pad_rows(self.take(rows[real]), len(only))


def check_vocabulary(
    parts: Iterable[np.ndarray],
    vocab_size: int,
    place_of: Callable[[int], str] | None = None,
) -> None:
    """Raises ValueError unless all tokens are in the vocabulary, checked as stored: a cast could turn a large one into -1.

    Args:
        parts: The tokens.
        vocab_size: The size of the vocabulary.
        place_of: ``place_of(index)`` returns where a token of a part comes from, for the message.
    """
    for part in parts:
        for start in range(0, part.size, BLOCK):
            block = part.reshape(-1)[start : start + BLOCK]
            wrong = block.max() if block.max() >= vocab_size else block.min()
            if not 0 <= wrong < vocab_size:
                first = start + int(np.argmax(block == wrong))
                place = "" if place_of is None else f" in {place_of(first)}"
                remedy = (
                    "Write them again."
                    if wrong < 0
                    else "Choose the vocab_size of the tokenizer that wrote them; for tokens that were added to the tokenizer "
                    "of a model of transformers, enlarge its embedding first, by model.resize_token_embeddings(...)."
                )
                raise ValueError(
                    "tokens must be from 0 to below the model's vocab_size; got "
                    f"{wrong}, vocab_size={vocab_size}{place}. {remedy}"
                )


def locate(starts: np.ndarray, index: int) -> tuple[int, int]:
    """Returns the part that holds an item of several parts in a row, given their starts, and the item's place in it."""
    part = int(np.searchsorted(starts, index, side="right")) - 1
    return part, index - int(starts[part])


def check_columns(data: Mapping[str, np.ndarray], *, least: int = 1) -> None:
    """Raises ValueError unless all columns have the same number of rows, at least so many."""
    rows = {}
    for name, column in data.items():
        rows[name] = len(column) if np.ndim(column) else -1  # it has no dims
    if len({*rows.values()}) == 1 and min(rows.values()) >= least:
        return
    got = ", ".join(f"{name} with {max(count, 0)}" for name, count in rows.items()) or "no columns"
    rule = f"all columns must have the same number of rows{', at least one' if least else ''}"
    raise ValueError(f"{rule}; got {got}. Give each row a value in each.")


class Columns(RowSource):
    """Rows in memory.

    Args:
        data: Columns with a common leading dim, the rows.

    Raises:
        TypeError: It is no dict.
        ValueError: They have other numbers of rows, or none.
    """

    def __init__(self, data: Mapping[str, np.ndarray]) -> None:
        check_kind(
            (Mapping,), "a dict of columns", 'Write {"x": array, "y": array}, say.', data=data
        )
        check_columns(data)
        self._data = data

    def __len__(self) -> int:
        return len(next(iter(self._data.values())))

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the columns of these rows."""
        return {name: column[rows] for name, column in self._data.items()}

    def checksum(self) -> str:
        """Returns a checksum of the columns."""
        return checksum([*self._data.values()])


def take_batch(
    data: Mapping[str, np.ndarray], batch_size: int, **where: Any
) -> dict[str, np.ndarray]:
    """Returns the batch of a step, of columns with a common leading dim; takes the arguments of ``RowSource.batch``.

    The last batch of an epoch may have fewer rows than ``batch_size``; ``pad_rows`` fills it up.
    """
    return Columns(data).batch(batch_size, **where)


def pad_rows(batch: Mapping[str, np.ndarray], num_rows: int) -> dict[str, np.ndarray]:
    """Returns ``batch`` padded with zeros to ``num_rows`` rows, and a column "weight": 1 for a real row, 0 for padding.

    A loss weighted by it is independent of the padding: each real row counts once, and none is dropped. A process whose rows
    of a batch are all padding has none to pad.
    """
    check_columns(batch, least=0)
    real = len(next(iter(batch.values())))
    if num_rows < real:
        raise ValueError(
            f"padding must not drop rows; got {real} rows to pad to {num_rows}. Give {real} or more."
        )
    weight = np.asarray(batch.get(WEIGHT, np.ones(real, np.float32)))
    padded = {}
    for name, column in {**batch, WEIGHT: weight}.items():
        padding = np.zeros((num_rows - real, *column.shape[1:]), column.dtype)
        padded[name] = np.concatenate([column, padding])
    return padded


def round_up(count: int, multiple: int) -> int:
    """Returns the smallest multiple of ``multiple`` that is at least ``count``."""
    return -(-count // multiple) * multiple


class Mixture(RowSource):
    """Rows of several sources; a row is a pair ``(source, row)``.

    Args:
        sources: The sources.
        weights: The share of samples of each, in any unit; None: the numbers of their rows.

    Raises:
        ValueError: Weights that are not one positive number for each source, or so unequal that a source has no sample in a
            block.
    """

    def __init__(
        self, sources: Sequence[RowSource], weights: Sequence[float] | None = None
    ) -> None:
        self.sources = tuple(sources)
        most = [source.max_documents for source in sources]
        known = [each for each in most if each is not None]
        self.max_documents = max(known) if len(known) == len(sources) else None
        if weights is None:
            weights = [len(source) for source in sources]
        self._counts = _samples_per_block(weights, len(sources))

    @property
    def shares(self) -> list[float]:
        """The share of the samples of each source."""
        return (self._counts / SAMPLES_PER_BLOCK).tolist()

    def __len__(self) -> int:
        return sum(map(len, self.sources))

    def rows(
        self, batch_size: int, *, seed: int, step: int, origin: Origin = BEGINNING
    ) -> np.ndarray:
        """Returns ``[batch_size, 2]``: the source of each sample and its row in it."""
        first = self.samples_before(batch_size, step, origin)
        samples = np.arange(first, first + batch_size)
        blocks = samples // SAMPLES_PER_BLOCK
        found = []
        for block in np.unique(blocks).tolist():
            own = samples[blocks == block]
            found.append(self._of_block(block, own, seed))
        return np.concatenate(found)

    def first_draws(self, count: int, seed: int) -> np.ndarray:
        """Returns the first ``count`` rows of all, each once, in the order in which they are drawn first: ``[count, 2]``."""
        lengths = np.array([len(source) for source in self.sources])
        found, block = np.empty((0, 2), np.int64), 0
        while len(found) < count:
            samples = np.arange(SAMPLES_PER_BLOCK) + block * SAMPLES_PER_BLOCK
            rows = self._of_block(block, samples, seed)
            of = rows[:, 0]
            before = block * self._counts[of] + _num_equal_before(of)
            found = np.concatenate([found, rows[before < lengths[of]]])
            block += 1
        return found[:count]

    def samples_before(self, batch_size: int, step: int, origin: Origin = BEGINNING) -> int:
        """Returns the position in the data: all batches are full."""
        return origin.samples + (step - origin.step) * batch_size

    def _of_block(self, block: int, samples: np.ndarray, seed: int) -> np.ndarray:
        num_sources = len(self.sources)
        in_order = np.repeat(np.arange(num_sources), self._counts)
        generator = np.random.default_rng((seed, block, num_sources))
        dealt = generator.permutation(in_order)
        places = samples - block * SAMPLES_PER_BLOCK
        rows = np.empty((len(samples), 2), np.int64)
        rows[:, 0] = dealt[places]
        for number, source in enumerate(self.sources):
            own = rows[:, 0] == number
            in_block = np.cumsum(dealt == number)[places[own]] - 1
            before = block * int(self._counts[number]) + in_block
            rows[own, 1] = _in_epochs(before, len(source), seed, number)
        return rows

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the columns of rows, each a pair of a source and a row in it."""
        of_rows, own_rows = rows[:, 0], rows[:, 1]
        taken = []
        for number, source in enumerate(self.sources):
            taken.append(source.take(own_rows[of_rows == number]))
        by_source = np.argsort(of_rows, kind="stable")
        order = np.argsort(by_source, kind="stable")
        found = {}
        for name in sorted(set().union(*taken)):
            # Rows without segments are one segment each.
            parts = [
                each[name] if name in each else np.zeros_like(each["tokens"]) for each in taken
            ]
            found[name] = np.concatenate(parts)[order]
        return found

    def checksum(self) -> str:
        """Returns the checksums of the sources."""
        return " and ".join(source.checksum() for source in self.sources)

    def check(self) -> None:
        """Raises ValueError if a source's check does."""
        for source in self.sources:
            source.check()


class EachOnce(RowSource):
    """The rows of a mixture, each once an epoch, for an evaluation: in the order in which the mixture draws them first.

    Until a source has run out of rows, the shares are those of the mixture.
    """

    def __init__(self, mixture: Mixture) -> None:
        self._mixture, self.max_documents = mixture, mixture.max_documents
        self._drawn: dict[int, np.ndarray] = {}  # the first rows, by seed

    def __len__(self) -> int:
        return len(self._mixture)

    def rows(
        self, batch_size: int, *, seed: int, step: int, origin: Origin = BEGINNING
    ) -> np.ndarray:
        """Returns ``[rows, 2]``, as the mixture does; the order is the same in each epoch."""
        start = self.samples_before(batch_size, step, origin) % len(self)
        end = min(start + batch_size, len(self))
        if len(self._drawn.get(seed, ())) < end:
            self._drawn[seed] = self._mixture.first_draws(min(2 * end, len(self)), seed)
        return self._drawn[seed][start:end]

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns the columns of rows, each a pair of a source and a row in it."""
        return self._mixture.take(rows)

    def checksum(self) -> str:
        """Returns the checksums of the sources."""
        return self._mixture.checksum()

    def check(self) -> None:
        """Raises ValueError if a source's check does."""
        self._mixture.check()


def _num_equal_before(values: np.ndarray) -> np.ndarray:
    """Returns of each value how many before it are equal."""
    found = np.empty(len(values), np.int64)
    for value in np.unique(values):
        is_own = values == value
        found[is_own] = np.arange(np.count_nonzero(is_own))
    return found


def _in_epochs(draws: np.ndarray, num_rows: int, seed: int, number: int) -> np.ndarray:
    rows = np.empty_like(draws)
    epochs, places = np.divmod(draws, num_rows)
    for epoch in np.unique(epochs).tolist():
        is_own = epochs == epoch
        rows[is_own] = permuted(places[is_own], num_rows, (seed, epoch, number))
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
    by_remainder = np.argsort(counts - exact, kind="stable")
    missing = SAMPLES_PER_BLOCK - counts.sum()
    counts[by_remainder[:missing]] += 1
    if not counts.all():
        raise ValueError(
            f"each source of a mixture must have a weight of at least 1/{SAMPLES_PER_BLOCK} of all weights; got "
            f"{list(weights)}. Leave out the smallest, or choose a weight of {2 * math.fsum(weights) / SAMPLES_PER_BLOCK:g} or "
            "more for it."
        )
    return counts
