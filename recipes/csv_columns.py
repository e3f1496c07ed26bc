"""Columns of numbers out of a CSV file. What cannot be read is named by its line."""

import csv
import difflib
import math
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np


def read_columns(path: Path, names: Sequence[str]) -> dict[str, np.ndarray]:
    """Returns the named columns of a CSV file in float64, each with a number for every row.

    The first line names the columns, which commas part. Lines that begin with # and empty lines say nothing.

    Raises:
        ValueError: The file cannot be read, has no rows, lacks a column or has one twice, or a line of it has too many or too
            few cells, or something that is not a finite number in a named column. Each message has the line.
    """
    lines = _lines(path)
    header = next(lines, (0, []))[1]
    indices = [_index(name, header, path) for name in names]
    rows = [[_number(cells, header, i, f"line {at} of {path}") for i in indices] for at, cells in lines]
    if not rows:
        raise ValueError(f"a CSV file must have rows below its line of names; got none in {path}. Add a line a row.")
    return dict(zip(names, np.array(rows).T, strict=True))


def _lines(path: Path) -> Iterator[tuple[int, list[str]]]:
    if not path.is_file():
        raise ValueError(f"a CSV must be a file; got {path}, {'a folder' if path.is_dir() else 'which is not there'}.")
    with path.open(newline="", encoding="utf-8-sig") as file:
        reader = csv.reader("\n" if line.startswith("#") else line for line in file)
        try:
            for cells in reader:
                if any(cell.strip() for cell in cells):
                    yield reader.line_num, [cell.strip() for cell in cells]
        except (UnicodeDecodeError, csv.Error) as error:
            raise ValueError(
                f"a CSV file must be UTF-8 text; got {error}, after line {reader.line_num} of {path}. Export it again as CSV."
            ) from error


def _index(name: str, header: list[str], path: Path) -> int:
    count = header.count(name)
    if count > 1:
        raise ValueError(
            f"a column's name must be there once; got {name!r} {count} times in {path}. Rename all but one of them."
        )
    if count == 0:
        raise ValueError(
            f"a column must be in the file; got {name!r} for {path}, whose columns are {header}. {_meant(name, header)}"
        )
    return header.index(name)


def _meant(name: str, header: list[str]) -> str:
    several = [part for part in name.replace(",", " ").split() if part in header]
    if len(several) > 1:
        return f"Part names by spaces: {' '.join(several)}."
    by_name = {column.lower(): column for column in header}
    if near := difflib.get_close_matches(name.lower(), by_name, n=1):
        return f"Did you mean {by_name[near[0]]!r}?"
    return "Choose from these." if len(header) > 1 else "Name columns of the first line, and part them by commas."


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
    if not math.isfinite(number):
        raise ValueError(
            f"each cell of a column in use must be a finite number, such as 1650 or 2.5e3; got {cells[index]!r} for "
            f"{header[index]} in {where}. Correct the cell or remove its row."
        )
    return number
