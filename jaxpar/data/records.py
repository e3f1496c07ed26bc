"""Rows that are tokens already, read from ArrayRecord or Parquet by their numbers: for data too large for a cache of tokens.

A record is a row, with these fields:

    input_ids      the tokens: at most ``seq + 1``, of which the model is given all but the last; with targets at most ``seq``
    labels         optional: the tokens to learn, -100 elsewhere; by default all
    targets        instead of labels: the token to predict at each position, -100 where there is none, as ``write_rows`` writes
    segment_ids    optional: the document of each token; by default one
    attention_mask optional: 0 for padding before or after the tokens, which is left out; by default there is none

In ArrayRecord a record is a JSON object, in Parquet a row of lists of integers. ArrayRecord is read through Grain's random
access (``grain.sources``). Of a Parquet file the row group of a row is read, so groups should be small (``write_rows``). A
process reads the rows that it is asked for and no others.
"""

import hashlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache
from itertools import pairwise
from pathlib import Path
from typing import Any, Protocol

import numpy as np

from jaxpar.data.batches import BLOCK, RowSource, check_vocabulary, locate
from jaxpar.data.checksums import checksum, checksum_of_files
from jaxpar.data.packing import IGNORED, empty_rows
from jaxpar.data.readers import (
    format_of,
    import_parquet,
    is_records,
    open_array_record,
    parse_json,
    read_records,
    whole_parquet,
)
from jaxpar.data.text import Sample, held_out
from jaxpar.fields import arg
from jaxpar.runtime.output import printable

NUM_CHECKED = 64  # records that are read before a run begins
MOST_COUNTED = 2**20  # tokens of records whose frequencies are counted
ROW_GROUP = 64  # rows of a group that write_rows writes
GROUPS_KEPT = 64  # row groups that stay decoded
COLUMNS = ("input_ids", "labels", "targets", "segment_ids", "attention_mask")
WRITTEN = ("input_ids", "targets", "segment_ids")


class RandomAccess(Protocol):
    """Records by number: the interface of Grain's data sources."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> Any: ...


class RecordRows(RowSource):
    """Records as rows of ``seq`` tokens, targets and segments.

    Args:
        records: The fields of each record, by number.
        seq: Tokens per row.
        vocab_size: The vocabulary size of the model, which all tokens must be below.
        part: The first record and the one after the last; None: all.
        max_documents: The most documents of a row, its padding included, for a model with such a ``max_documents``: a record
            with more is refused when it is read. None: any number.
    """

    def __init__(
        self,
        records: RandomAccess,
        seq: int,
        *,
        vocab_size: int,
        part: tuple[int, int] | None = None,
        max_documents: int | None = None,
    ) -> None:
        self._records, self._seq, self._vocab_size = records, seq, vocab_size
        self.max_documents = max_documents
        self._first, self._end = part or (0, len(records))
        if self._end <= self._first:
            raise ValueError(
                "a source of records must have at least one; got none. Name files that contain records."
            )

    def __len__(self) -> int:
        return self._end - self._first

    def take(self, rows: np.ndarray) -> dict[str, np.ndarray]:
        """Returns ``tokens``, ``targets`` and ``segments`` ``[len(rows), seq]``, int32, with targets of -100 after a record.

        Raises:
            ValueError: A record cannot be used.
        """
        found = empty_rows(len(rows), self._seq)
        for index in np.argsort(rows).tolist():  # in the order of the file
            number = self._first + int(rows[index])
            try:
                tokens, targets, segments = self._columns(self._records[number])
            except ValueError as error:
                raise ValueError(f"{error} {place_text(self._records, number)}") from error
            count = len(tokens)
            found["tokens"][index, :count] = tokens
            found["targets"][index, :count] = targets
            found["segments"][index, 1:count] = np.cumsum(segments[1:] != segments[:-1])
            found["segments"][index, count:] = count + 1
            self._check_documents(found["segments"][index], number)
        return found

    def _check_documents(self, segments: np.ndarray, number: int) -> None:
        count, most = 1 + np.count_nonzero(np.diff(segments)), self.max_documents
        if most is not None and count > most:
            raise ValueError(
                "a row must not have more documents than the model is told, its padding included; got "
                f"{count}, {arg(max_documents=most)}. Choose {arg(max_documents=int(count))} or more, or leave it out. "
                f"{place_text(self._records, number)}"
            )

    def _columns(self, record: Mapping[str, Any]) -> list[np.ndarray]:
        """Returns the tokens of a record that are given to the model, their targets and their documents."""
        check_has_tokens(record)
        record = _given(record)
        last = "targets" if "targets" in record else "labels"
        defaults = {"labels": record["input_ids"], "segment_ids": [0] * len(record["input_ids"])}
        names = ("input_ids", last, "segment_ids")
        columns = [_integers(record.get(name, defaults.get(name)), name) for name in names]
        if len({len(column) for column in columns}) == 1:
            tokens = _tokens_alone(record, len(columns[0]))
            columns = [column[tokens] for column in columns]
        least, most = (1, self._seq) if last == "targets" else (2, self._seq + 1)
        if not least <= len(columns[0]) <= most or len({len(column) for column in columns}) > 1:
            raise ValueError(
                f"a record of {arg(seq=self._seq)} must have from {least} to {most} input_ids, and as many {last} and "
                f"segment_ids; got {', '.join(str(len(column)) for column in columns)}. Choose another {arg('seq')}, or "
                "write the records again."
            )
        check_vocabulary([columns[0], columns[1][columns[1] != IGNORED]], self._vocab_size)
        if last == "targets":
            return columns
        tokens, labels, segments = columns
        targets = np.where(segments[1:] == segments[:-1], labels[1:], IGNORED)
        return [tokens[:-1], targets, segments[:-1]]

    def check(self) -> None:
        """Raises ValueError if one of 64 records, spread over all, cannot be used; others are checked when they are read."""
        chosen = self._spread()
        if (self.take(chosen)["targets"] != IGNORED).any():
            return
        numbers = (self._first + chosen).tolist()
        split = [number for number in numbers if _has_split_labels(self._records[number])]
        first = place_text(self._records, (split or numbers)[0], "The first")
        if split:
            raise ValueError(
                "a label is learned from the token before it of the same segment; got segment_ids by which no token with a "
                "label follows one of its own segment. Give the tokens of a document, which follow one another, one number, "
                f"or leave segment_ids out. {first}"
            )
        raise ValueError(
            "records must have labels to learn, of tokens that are no padding; got -100 alone there. Write them again. "
            f"{first}"
        )

    def learned_sample(self, most: int = MOST_COUNTED) -> Sample:
        """Returns the targets that are learned in records spread over all.

        Records beside one that cannot be used are left out, unless ``check`` reads it: it is told where a step reads it.

        Args:
            most: About the number of tokens to read, if those of the records that ``check`` reads are fewer.

        Raises:
            ValueError: One of the records that ``check`` reads cannot be used.
        """
        chosen = self._spread()
        found, num_read = [self.take(chosen)["targets"]], len(chosen)
        for rows in self._beside(chosen, most):
            try:
                found.append(self.take(rows)["targets"])
            except ValueError:
                continue
            num_read += len(rows)
        learned = [targets[targets != IGNORED] for targets in found]
        of_record = sum(map(len, learned)) / num_read
        return Sample(learned, of_record * len(self), of_record / self._seq)

    def _beside(self, chosen: np.ndarray, most: int) -> Iterator[np.ndarray]:
        """Yields the numbers of records that follow some others, which have about ``most`` tokens together, a few at a time."""
        places = (self._first + chosen).tolist()
        num_tokens = sum(len(self._records[place]["input_ids"]) for place in places)
        run, at_a_time = most // max(num_tokens, 1), max(1, BLOCK // self._seq)
        for start, after in pairwise([*chosen.tolist(), len(self)]):
            end = min(start + run, after)
            for first in range(start + 1, end, at_a_time):
                yield np.arange(first, min(first + at_a_time, end))

    def checksum(self) -> str:
        """Returns a checksum of the records' files; of records from elsewhere, of as many as ``check`` reads."""
        if isinstance(self._records, Records) and self._records.files:
            return checksum_of_files(self._records.files)
        return checksum([*self.take(self._spread()).values()])

    def _spread(self) -> np.ndarray:
        """Returns the numbers of 64 records, spread over all, or of all."""
        return np.unique(np.linspace(0, len(self) - 1, NUM_CHECKED).astype(np.int64))


def tokens_of(records: RandomAccess, number: int) -> np.ndarray:
    """Returns the tokens of a record; raises ValueError if it has none."""
    record = records[number]
    try:
        check_has_tokens(record)
        record = _given(record)
        tokens = _integers(record["input_ids"], "input_ids")
        return tokens[_tokens_alone(record, len(tokens))]
    except ValueError as error:
        raise ValueError(f"{error} {place_text(records, number)}") from error


def place_text(records: RandomAccess, number: int, subject: str = "It") -> str:
    """Returns a sentence that names a record, and its file if it is known."""
    if isinstance(records, Records) and records.files:
        file, number = records.place(number)
        return f"{subject} is record {number + 1} of {printable(str(file))}."
    return f"{subject} is record {number + 1}."


def check_has_tokens(record: Any) -> None:
    """Raises ValueError unless a record is a mapping with ``input_ids``."""
    if not isinstance(record, Mapping) or not isinstance(
        record.get("input_ids"), list | np.ndarray
    ):
        raise ValueError(
            'a record of tokens must have "input_ids", a list of integers; got another. Write it again.'
        )


def _given(record: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the fields of a record that are not null, as those of rows in Parquet that lack them are."""
    return {name: value for name, value in record.items() if value is not None}


def _has_split_labels(record: Mapping[str, Any]) -> bool:
    """Returns whether only its ``segment_ids`` can keep the labels of a record from being learned."""
    record = _given(record)
    if "targets" in record or "segment_ids" not in record:
        return False
    labels = _integers(record.get("labels", record["input_ids"]), "labels")
    return bool((labels[_tokens_alone(record, len(labels))][1:] != IGNORED).any())


def _integers(values: Any, name: str) -> np.ndarray:
    found = np.asarray(values)
    if found.ndim != 1 or not (np.issubdtype(found.dtype, np.integer) or found.size == 0):
        raise ValueError(
            f'"{name}" of a record must be a list of integers; got {found.dtype} of shape {found.shape}. Write it again.'
        )
    return found.astype(np.int64)


def _tokens_alone(record: Mapping[str, Any], length: int) -> slice:
    """Returns the tokens of a record without the padding that its ``attention_mask`` names.

    Raises:
        ValueError: The mask has another length, or other numbers than 0 and 1, or parts the tokens.
    """
    if "attention_mask" not in record:
        return slice(length)
    mask = _integers(1 * np.asarray(record["attention_mask"]), "attention_mask")  # or bools
    places = np.flatnonzero(mask)
    first, end = (places[0], places[-1] + 1) if len(places) else (0, 0)
    if len(mask) != length or not (mask[first:end] == 1).all():
        raise ValueError(
            f'"attention_mask" of a record must have a number for each of its {length} input_ids: 1 for tokens, 0 for padding '
            f"before or after them; got {printable(str(mask.tolist()))[:80]}. Write it again."
        )
    return slice(first, end)


def holds_tokens(file: Path) -> bool:
    """Returns whether the first record of a file has ``input_ids``."""
    if not is_records(file):
        return False
    first = next(iter(read_records(file)), (0, None))[1]
    return isinstance(first, Mapping) and "input_ids" in first


def open_records(files: Sequence[Path]) -> "Records":
    """Returns the records of files, ``.parquet``, ``.arrayrecord`` or ``.array_record``.

    Raises:
        ImportError: The package that reads the format is not installed.
        ValueError: A file is damaged or of another format.
    """
    return Records([_open(file) for file in files], files)


def open_split(
    files: Sequence[Path], test_fraction: float, most: int
) -> tuple["Records", int, str]:
    """Returns the records of files, the number of those held out, which are the last ones, and a digest of all.

    Held out are files whose names have the word "val" or "test"; if none or all have, a share of the records, ``most`` at most.

    Raises:
        ImportError: The package that reads the format is not installed.
        ValueError: A file is damaged or of another format, or there are fewer than two records.
    """
    sides = list(zip(held_out(files), files, strict=True))
    kept, tested = ([file for is_test, file in sides if is_test == side] for side in (False, True))
    files = [*kept, *tested]
    records = open_records(files)
    count = len(records)
    if count < 2:
        raise ValueError(f"records are split into two; got {count} in {files[0]}. Give 2 or more.")
    digest = digest_of_records(records, files)
    if not (kept and tested):
        return records, min(max(round(test_fraction * count), 1), most), digest
    num_test = len(open_records(tested))
    return records, num_test, f"{digest}, {num_test} held out"


def digest_of_records(records: "Records", files: Sequence[Path]) -> str:
    """Returns a digest of the number of records, the first and the last of them, and the sizes of the files."""
    told = [
        len(records),
        records[0],
        records[len(records) - 1],
        [file.stat().st_size for file in files],
    ]
    return f"sha256 {hashlib.sha256(repr(told).encode()).hexdigest()[:32]}"


# The number of records of a file, and a function that reads one of them.
Opened = tuple[int, Callable[[int], Mapping[str, Any]]]


class Records:
    """The records of several files, one file after another.

    Args:
        opened: Each file, opened.
        files: Their paths.
    """

    def __init__(self, opened: Sequence[Opened], files: Sequence[Path] = ()) -> None:
        self.files = tuple(files)
        self._reads = [read for _, read in opened]
        self._starts = np.cumsum([0, *(count for count, _ in opened)])

    def __len__(self) -> int:
        return int(self._starts[-1])

    def __getitem__(self, index: int) -> Mapping[str, Any]:
        file, place = locate(self._starts, index)
        return self._reads[file](place)

    def place(self, index: int) -> tuple[Path, int]:
        """Returns the file of a record, and its number there."""
        file, place = locate(self._starts, index)
        return self.files[file], place


def _open(file: Path) -> Opened:
    if format_of(file) == ".parquet":
        return _open_parquet(file)
    if format_of(file) in (".arrayrecord", ".array_record"):
        source = open_array_record([file])
        return len(source), lambda index: parse_json(source[index], f"{file}:{index + 1}")
    raise ValueError(
        f"records of tokens are read from .parquet or .arrayrecord; got {printable(str(file))}. Write them by "
        "jaxpar.data.records.write_rows."
    )


def _open_parquet(file: Path) -> Opened:
    """Opens a Parquet file; the row groups that were read last stay decoded."""
    with whole_parquet(file):
        opened = import_parquet().ParquetFile(file)
    sizes = [opened.metadata.row_group(i).num_rows for i in range(opened.metadata.num_row_groups)]
    starts, names = (
        np.cumsum([0, *sizes]),
        [name for name in opened.schema_arrow.names if name in COLUMNS],
    )

    @lru_cache(maxsize=GROUPS_KEPT)
    def read_group(group: int) -> dict[str, Any]:
        table = opened.read_row_group(group, columns=names)
        return {name: table.column(name) for name in names}

    def read(index: int) -> dict[str, Any]:
        group, row = locate(starts, index)
        values = {name: column[row].as_py() for name, column in read_group(group).items()}
        return {name: value for name, value in values.items() if value is not None}

    return int(starts[-1]), read


def write_rows(file: Path, rows: RowSource, *, batch_size: int = 1024) -> None:
    """Writes all rows of a source, such as ``PackedRows``, as records that ``RecordRows`` reads with the same ``seq``.

    Args:
        file: A ``.parquet`` file, which must not exist yet.
        rows: Rows with ``tokens`` and ``targets``, and ``segments`` if a row has several documents.
        batch_size: Rows that are in memory at once.
    """
    import pyarrow

    parquet = import_parquet()
    if file.suffix != ".parquet" or file.exists():
        raise ValueError(f"rows are written to a new .parquet file; got {file}. Name another.")
    schema = pyarrow.schema([(name, pyarrow.list_(pyarrow.int32())) for name in WRITTEN])
    with parquet.ParquetWriter(file, schema) as writer:
        for start in range(0, len(rows), batch_size):
            taken = rows.take(np.arange(start, min(start + batch_size, len(rows))))
            columns = dict(zip(WRITTEN, as_records(taken), strict=True))
            writer.write_table(pyarrow.table(columns, schema=schema), row_group_size=ROW_GROUP)


def as_records(rows: Mapping[str, np.ndarray]) -> list[list]:
    """Returns ``input_ids``, ``targets`` and ``segment_ids`` of rows, lists of lists."""
    segments = rows.get("segments", np.zeros_like(rows["tokens"]))
    return [column.tolist() for column in (rows["tokens"], rows["targets"], segments)]
