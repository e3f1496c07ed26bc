"""Reads files of examples: JSON Lines, Parquet and ArrayRecord, an example a line, row or record."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from jaxpar.runtime.extras import install_extra
from jaxpar.runtime.printable import printable

MAX_LINE_BYTES = 2**26
FIELDS = ("text", "prompt", "completion", "messages", "input_ids")


def find_files(path: Path) -> list[Path]:
    """Returns the files of examples at a path, a file or a folder, in order of their names; none in hidden folders."""
    if not path.is_dir():
        return [path]
    files = sorted(file for file in path.rglob("*") if file.is_file())
    return [file for file in files if not any(part.startswith(".") for part in file.relative_to(path).parts)]


def is_records(file: Path) -> bool:
    """Returns whether a file holds an example a line, row or record."""
    return file.suffix in RECORD_READERS


def read_records(file: Path) -> Iterator[tuple[int, Any]]:
    """Yields the number of each line, row or record, from 1, and its fields.

    Raises:
        ImportError: The package that reads the format is not installed.
        ValueError: The file is damaged; the message names it and the line.
    """
    yield from RECORD_READERS[file.suffix](file)


def _read_jsonl(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open("rb") as lines:
        for number in range(1, 2**63):
            line = lines.readline(MAX_LINE_BYTES + 1)
            if not line:
                return
            if len(line) > MAX_LINE_BYTES:
                raise ValueError(
                    f"a line of JSON must have at most {MAX_LINE_BYTES} bytes; got more in {printable(f'{file}:{number}')}. "
                    "Split the example."
                )
            if line.strip():
                yield number, parse_json(line, f"{file}:{number}")


def parse_json(text: bytes, place: str) -> Any:
    """Returns the value of a line of JSON; raises ValueError, with its place, if it is none."""
    try:
        return json.loads(text.decode())
    except (ValueError, RecursionError) as error:
        raise ValueError(
            f"a line must be JSON in UTF-8; got {type(error).__name__}: {printable(str(error))[:120]} in {printable(place)}. "
            "Correct or remove the line."
        ) from error


def _read_parquet(file: Path) -> Iterator[tuple[int, Any]]:
    parquet = import_parquet()
    number, wanted = 0, set(FIELDS)
    try:
        opened = parquet.ParquetFile(file)
        names = [name for name in opened.schema_arrow.names if name in wanted] or None
        for batch in opened.iter_batches(batch_size=1024, columns=names):
            for row in batch.to_pylist():
                number += 1
                yield number, {name: value for name, value in row.items() if value is not None}
    except (OSError, ValueError) as error:  # pyarrow's errors are of these kinds
        raise ValueError(
            f"a .parquet must be a whole Parquet file; got {printable(str(error))[:200]} in {printable(str(file))}, after row "
            f"{number}. Write it again."
        ) from error


def import_parquet() -> Any:
    """Returns pyarrow's reader of Parquet; raises ImportError if it is not installed."""
    try:
        from pyarrow import parquet
    except ImportError as error:
        raise ImportError(
            f"reading .parquet needs pyarrow; got no such package. {install_extra('records')}."
        ) from error
    return parquet


def open_array_record(files: Sequence[Path]) -> Any:
    """Returns the records of ArrayRecord files as bytes by number, a data source of Grain.

    Raises:
        ImportError: Grain is not installed.
        ValueError: A file is damaged.
    """
    try:
        from grain.sources import ArrayRecordDataSource
    except ImportError as error:
        raise ImportError(
            f"reading .arrayrecord needs Grain; got no such package. {install_extra('records')}."
        ) from error
    try:
        source: Any = ArrayRecordDataSource([str(file) for file in files])
        len(source)
    except Exception as error:  # the library raises RuntimeError and others
        names = ", ".join(printable(str(file)) for file in files)
        raise ValueError(
            f"a .arrayrecord must be a whole ArrayRecord file; got {printable(str(error))[:200]} in {names}. Write it again."
        ) from error
    return source


def _read_array_record(file: Path) -> Iterator[tuple[int, Any]]:
    source = open_array_record([file])
    for number in range(len(source)):
        yield number + 1, parse_json(source[number], f"{file}:{number + 1}")


RECORD_READERS = {
    ".jsonl": _read_jsonl,
    ".parquet": _read_parquet,
    ".arrayrecord": _read_array_record,
    ".array_record": _read_array_record,
}
