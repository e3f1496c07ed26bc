"""Reads files of examples: JSON, JSON Lines, CSV, Parquet and ArrayRecord, an example an object, line, row or record.

Every format but Parquet's row groups is read an example at a time, so files may be larger than memory. `forms.py` has the forms
of examples.
"""

import codecs
import csv
import json
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, suppress
from pathlib import Path
from typing import Any

from jaxpar.data.forms import FIELDS, KINDS, NOT_BY_LINE, OTHER_KINDS, kind_of
from jaxpar.data.json_text import MAX_LINE_BYTES, JsonError, JsonText, once
from jaxpar.runtime.output import needing_extra, printable, refusing

OTHER_NAMES = {".ndjson": ".jsonl"}
UTF_16 = (codecs.BOM_UTF16_LE, codecs.BOM_UTF16_BE)
POINTER, MOST_OF_POINTER = b"version https://git-lfs", 1024  # bytes
SNIFFED = (
    ".json",
    ".csv",
    ".tsv",
)  # formats of other things too: examples are known by the fields of the first


def find_files(path: Path) -> list[Path]:
    """Returns the files of examples at a path, a file or a folder, in order of their names; none that are hidden.

    Raises:
        ValueError: A link in the folder leads to a folder, or to nothing; or a file is a pointer of Git LFS.
    """
    if not path.is_dir():
        check_not_pointer(path)
        return [path]
    is_hidden = lambda file: any(part.startswith(".") for part in file.relative_to(path).parts)
    found = sorted(file for file in path.rglob("*") if not is_hidden(file))
    for file in found:
        if file.is_symlink() and not file.is_file():
            raise ValueError(
                f"a folder of data must hold its files itself; got {printable(str(file))}, a link to "
                f"{'a folder' if file.is_dir() else 'nothing'}. Copy the files, or remove the link."
            )
    files = [file for file in found if file.is_file()]
    for file in files:
        check_not_pointer(file)
    return files


def check_not_pointer(file: Path) -> None:
    """Raises ValueError for a file that Git LFS has not fetched: a clone without git-lfs has a few lines in its place."""
    if not file.is_file() or file.stat().st_size > MOST_OF_POINTER:
        return
    with file.open("rb") as opened:
        if opened.read(len(POINTER)) != POINTER:
            return
    raise ValueError(
        f"a file must have its contents; got a pointer of Git LFS in {printable(str(file))}. Fetch them: git lfs install and "
        "git lfs pull in that clone, or hf download."
    )


def format_of(file: Path) -> str:
    """Returns the end of a file's name that tells its format, such as ".jsonl", also of "A.JSONL" and "a.ndjson"."""
    suffix = file.suffix.lower()
    return OTHER_NAMES.get(suffix, suffix)


def is_records(file: Path) -> bool:
    """Returns whether a file holds an example a line, object, row or record; a .json or .csv may be plain text instead."""
    if format_of(file) not in SNIFFED:
        return format_of(file) in RECORD_READERS
    try:
        kind_of(next(iter(read_records(file)), (0, None))[1])
    except (ValueError, OSError):
        return False
    return True


def read_records(file: Path) -> Iterator[tuple[int, Any]]:
    """Yields the number of each line, object, row or record, from 1, and its fields.

    Raises:
        ImportError: The package that reads the format is not installed.
        ValueError: The file is damaged; the message names it and the line.
    """
    yield from RECORD_READERS[format_of(file)](file)


def unread_fields(file: Path, read: Collection[str] = ()) -> set[str]:
    """Returns the names of columns that are not read; none where examples are read with all their fields.

    Args:
        file: A file of examples.
        read: The names that are read; by default those of ``read_records``.
    """
    if format_of(file) != ".parquet":
        return set()
    with whole_parquet(file):
        names = import_parquet().read_schema(file).names
    return set(names) - {*(read or _columns_read(names))}


def is_of_lines(file: Path) -> bool:
    """Returns whether the numbers of ``read_records`` are those of lines; elsewhere they count examples."""
    if format_of(file) != ".json":
        return format_of(file) in (".jsonl", ".csv", ".tsv")
    with suppress(OSError, ValueError), file.open(encoding="utf-8-sig") as opened:
        return JsonText(opened).peek() != "["
    return False


def _read_jsonl(file: Path) -> Iterator[tuple[int, Any]]:
    with file.open("rb") as lines:
        for number, line in enumerate(iter(lambda: lines.readline(MAX_LINE_BYTES + 1), b""), 1):
            if number == 1 and line.startswith(UTF_16):
                raise ValueError(
                    f"a {file.suffix} must be in UTF-8; got UTF-16 in {printable(str(file))}. Save it as UTF-8: "
                    "iconv -f UTF-16 -t UTF-8."
                )
            if number == 1:
                line = line.removeprefix(
                    codecs.BOM_UTF8
                )  # some editors begin a file of UTF-8 with it
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
        return json.loads(text.decode().rstrip(), object_pairs_hook=once)
    except (ValueError, RecursionError) as error:
        is_part = text.lstrip()[:1] == b"[" or text.strip() == b"{"
        why, remedy = str(error), NOT_BY_LINE if is_part else "Correct or remove the line."
        if isinstance(error, UnicodeDecodeError):
            remedy = "Save the file as UTF-8, or remove the line."
        if isinstance(error, json.JSONDecodeError):
            why = f"{error.msg.removesuffix(' at')} at column {error.pos + 1}"
        got = f"{type(error).__name__}: {printable(why)[:120]} in {printable(place)}"
        raise ValueError(f"a line must be JSON in UTF-8; got {got}. {remedy}") from error


def _read_json(file: Path) -> Iterator[tuple[int, Any]]:
    """Yields the objects of one list, each read when it is asked for; a file that begins otherwise is JSON Lines."""
    with file.open(encoding="utf-8-sig") as opened:
        number, text = 0, JsonText(opened)
        kinds, rule = (
            (JsonError, UnicodeDecodeError),
            "a .json must be a list of objects, or JSON Lines, in UTF-8",
        )
        with refusing(kinds, rule, lambda: f"{file}, example {number + 1}", "Correct the file."):
            if text.peek() != "[":
                yield from _read_json_lines(file)
                return
            before = text.take()
            while before in "[," and not (before == "[" and text.peek() == "]"):
                value = text.read_value()
                number += 1
                yield number, value
                if (before := text.take()) not in ",]":
                    raise JsonError(f"{before!r} between two values")
            if before == "[":  # an empty list
                text.take()
            if text.peek():
                raise JsonError("text after the end of the list")


def _read_json_lines(file: Path) -> Iterator[tuple[int, Any]]:
    number = 0
    try:
        for number, value in _read_jsonl(file):
            yield number, value
    except ValueError as error:
        if number:
            raise
        raise ValueError(
            "a .json must be a list of objects, or an object a line; got another value in "
            f"{printable(str(file))}. Write the examples as a list, or as .jsonl."
        ) from error


def _read_csv(file: Path) -> Iterator[tuple[int, Any]]:
    """Yields the last line of each row, and its fields by the names in the first row."""
    with file.open(encoding="utf-8-sig", newline="") as opened:
        delimiter = "\t" if format_of(file) == ".tsv" else ","
        rows = csv.DictReader(opened, delimiter=delimiter, strict=True)
        rule = f"a {file.suffix} must have a row of names, then rows of as many fields"
        place = lambda: f"{file}, near line {rows.line_num}"
        save = "Save it as UTF-8: spreadsheets call it CSV UTF-8."
        with (
            refusing(UnicodeDecodeError, f"a {file.suffix} must be in UTF-8", file, save),
            refusing(csv.Error, rule, place, "Correct the file, or write it as .jsonl."),
        ):
            names = rows.fieldnames or ()
            others = {";", "\t", ","} - {delimiter}
            if len(names) == 1 and (given := [each for each in sorted(others) if each in names[0]]):
                raise csv.Error(f"{given[0]!r} between the names, and not {delimiter!r}")
            if repeated := [name for name in names if names.count(name) > 1]:
                raise csv.Error(f"the name {repeated[0]!r} twice")
            for row in rows:
                if None in row or None in row.values():
                    raise csv.Error(
                        f"a row of another length than the {len(rows.fieldnames or ())} names"
                    )
                yield rows.line_num, row


def _read_parquet(file: Path) -> Iterator[tuple[int, Any]]:
    parquet, number = import_parquet(), 0
    with whole_parquet(lambda: f"{file}, after row {number}"):
        opened = parquet.ParquetFile(file)
        names = opened.schema_arrow.names
        num_at_once = 1024 if _has_form(names) else 1  # for the first one is refused
        for batch in opened.iter_batches(num_at_once, columns=_columns_read(names)):
            for row in batch.to_pylist():
                number += 1
                yield number, _without_nulls(row)


def _columns_read(names: Sequence[str]) -> list[str]:
    """Returns the columns that examples may have; if they are of no form, all columns, for a message to name them."""
    if not _has_form(names):
        return [*names]
    return [name for name in names if name in FIELDS or name == "input_ids"]


def _has_form(names: Collection[str]) -> bool:
    """Returns whether there are all fields of a form among names."""
    return any(set(kind) <= set(names) for kind in (*KINDS, *OTHER_KINDS, ("input_ids",)))


def _without_nulls(row: dict[str, Any]) -> dict[str, Any]:
    """Returns a row without the nulls that stand in Parquet for what other rows have: fields, and keys of objects in them.

    If no form is left, all fields stay, for messages to name the null.
    """
    given = _without_null_keys(row)
    return given if _has_form(given) else row


def _without_null_keys(value: Any) -> Any:
    if isinstance(value, list):
        return [_without_null_keys(each) for each in value]
    if isinstance(value, dict):
        return {key: _without_null_keys(each) for key, each in value.items() if each is not None}
    return value


def whole_parquet(place: object) -> AbstractContextManager[None]:
    """Returns a context in which an error of pyarrow is that of a damaged file at a place, as ``refusing`` takes it."""
    rule = "a .parquet must be a whole Parquet file"
    return refusing(
        (OSError, ValueError), rule, place, "Write it again."
    )  # pyarrow's errors are of these kinds


def import_parquet() -> Any:
    """Returns pyarrow's reader of Parquet; raises ImportError if it is not installed."""
    with needing_extra("reading .parquet needs pyarrow", "records"):
        from pyarrow import parquet
    return parquet


def open_array_record(files: Sequence[Path]) -> Any:
    """Returns the records of ArrayRecord files as bytes by number, a data source of Grain.

    Raises:
        ImportError: Grain is not installed.
        ValueError: A file is damaged.
    """
    with needing_extra("reading .arrayrecord needs Grain", "records"):
        from grain.sources import ArrayRecordDataSource
    names, rule = [str(file) for file in files], "a .arrayrecord must be a whole ArrayRecord file"
    with refusing(
        Exception, rule, ", ".join(names), "Write it again."
    ):  # the library raises RuntimeError and others
        source: Any = ArrayRecordDataSource(names)
        len(source)
    return source


def _read_array_record(file: Path) -> Iterator[tuple[int, Any]]:
    source = open_array_record([file])
    for number in range(len(source)):
        yield number + 1, parse_json(source[number], f"{file}, example {number + 1}")


RECORD_READERS = {
    **{
        ".jsonl": _read_jsonl,
        ".json": _read_json,
        ".csv": _read_csv,
        ".tsv": _read_csv,
        ".parquet": _read_parquet,
    },
    **dict.fromkeys((".arrayrecord", ".array_record"), _read_array_record),
}
