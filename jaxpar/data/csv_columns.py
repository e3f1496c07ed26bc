"""Reads columns of numbers from a CSV file. Errors name the line."""

import csv
import difflib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TextIO

import numpy as np

from jaxpar.fields import arg
from jaxpar.runtime.output import printable, refusing

LARGEST = 1e18  # whose square is finite in float32
MOST_NAMED = 20  # columns in a message
MOST_LETTERS = 60  # of a name or a cell in a message
MOST_IN_A_LINE = 2**20
AS_UTF_8 = 'Save it as UTF-8, in Excel as "CSV UTF-8".'


def read_columns(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the named columns of a CSV file in float64, each with a number for every row.

    The first line holds the names of the columns, separated by commas. Empty lines and lines that begin with # are ignored.

    Raises:
        ValueError: The file cannot be read, has no rows, lacks a column or has one twice, or a line of it has too many or too
            few cells, or a value that is no number below 1e18 in a named column.
    """
    lines = _lines(path)
    header = next(lines, (0, []))[1]
    indices = [_index(name, header, path) for name in names]
    rows = [
        [_number(cells, header, i, f"line {at} of {path}") for i in indices] for at, cells in lines
    ]
    if not rows:
        raise ValueError(
            f"a CSV file must have rows below its line of names; got none in {path}. Add a line a row."
        )
    return dict(zip(names, np.array(rows).T, strict=True))


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    if not path.is_file():
        raise ValueError(
            f"{arg('a CSV')} must be a file; got {path}, {'a folder' if path.is_dir() else 'which does not exist'}. Name one "
            "that is there."
        )
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader(_short_lines(file, path))
        place = lambda: f"{path}, after line {reader.line_num}"
        other_kind = refusing(csv.Error, "a file must be CSV", place, "Export it again as CSV.")
        with refusing(UnicodeDecodeError, "a CSV file must be UTF-8", place, AS_UTF_8), other_kind:
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    yield reader.line_num, [cell.strip() for cell in cells]


def _short_lines(file: TextIO, path: Path) -> Iterator[str]:
    """Yields the lines of a file, empty for comments; raises for one too long for a table, before all of it is read."""
    for number, line in enumerate(iter(lambda: file.readline(MOST_IN_A_LINE), ""), 1):
        if len(line) == MOST_IN_A_LINE:
            raise ValueError(
                f"a line of a CSV file must be shorter than {MOST_IN_A_LINE:,} characters; got line {number} of {path}. "
                "Is this a CSV file with one row per line?"
            )
        yield "\n" if line.startswith("#") else line


def _quoted(text: str) -> str:
    """Returns a name or a cell for a message: control characters escaped, the end of a long one left out."""
    return (
        repr(text)
        if len(text) <= MOST_LETTERS
        else f"{text[:MOST_LETTERS]!r}... ({len(text):,} characters)"
    )


def _index(name: str, header: list[str], path: Path) -> int:
    count = header.count(name)
    if count > 1:
        raise ValueError(
            f"a column's name must occur once; got {_quoted(name)} {count} times in {path}. Rename all but one of them."
        )
    if count == 0:
        more = f" and {len(header) - MOST_NAMED:,} more" if len(header) > MOST_NAMED else ""
        raise ValueError(
            f"a column must be in the file; got {_quoted(name)} for {path}, whose columns are "
            f"[{', '.join(map(_quoted, header[:MOST_NAMED]))}]{more}. {_meant(name, header)}"
        )
    return header.index(name)


def _meant(name: str, header: list[str]) -> str:
    several = [part for part in name.replace(",", " ").split() if part in header]
    if len(several) > 1:
        return f"Separate names by spaces: {printable(' '.join(each[:MOST_LETTERS] for each in several[:MOST_NAMED]))}."
    by_name = {column.lower(): column for column in header if len(column) <= MOST_LETTERS}
    if near := difflib.get_close_matches(name[:MOST_LETTERS].lower(), by_name, n=1):
        return f"Did you mean {by_name[near[0]]!r}?"
    return (
        "Choose from these."
        if len(header) > 1
        else "Name columns of the first line, and separate them by commas."
    )


def _number(cells: list[str], header: list[str], index: int, where: str) -> float:
    if len(cells) != len(header):
        raise ValueError(
            f"each row must have a cell for each column; got {len(cells)} cells for {len(header)} columns in {where}. "
            "Add or remove cells; put a cell that has a comma in double quotes."
        )
    try:
        number = float(cells[index])
    except ValueError:
        number = math.nan
    if not abs(number) < LARGEST:
        raise ValueError(
            f"each cell of a column in use must be a number below {LARGEST:g}, such as 1650 or 2.5e3; got "
            f"{_quoted(cells[index])} for {printable(header[index][:MOST_LETTERS])} in {where}. Correct the cell or remove its "
            "row."
        )
    return number
