"""The output of a benchmark: its tables with machine, versions and commit, as JSON, and that JSON as Markdown.

A benchmark creates a ``Record`` when it starts, adds tables, and at the end calls ``finish``. ``page`` renders
``benchmarks/RESULTS.md`` from the JSON of all benchmarks; the prose beside the figures is each script's own docstring.
"""

import ast
import importlib.metadata
import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import Any, Self

HERE = Path(__file__).parent
CANNOT_RUN = 77  # the exit code of a benchmark that cannot run on this machine; automake's for a skipped test

HEAD = """\
# Results

Rendered by `make bench` from the JSON in `benchmarks/results/`: edits to this file are lost. `benchmarks/FINDINGS.md` \
explains the figures and states what they do not show.

Times are medians over rounds in which every candidate of a table runs in turn. A ratio is the median over the rounds of a \
figure relative to that of the table's first row in the same round. Fake devices share the cores: there CPU seconds measure \
the work of a step, and wall seconds say little. A plus after a commit: files differed from it.
"""


@dataclass(frozen=True)
class Options:
    """The options of every benchmark."""

    out: Path | None = None
    """JSON file for the figures."""
    smoke: bool = False
    """Run a tiny case, to check that it runs; its figures mean nothing."""


@dataclass(frozen=True)
class Table:
    """A table of figures.

    Attributes:
        title: What was run.
        columns: The format of each column, such as ".2f", by its name, which contains the unit.
        rows: A value for each column; None leaves the cell empty.
        mesh: If all rows have one mesh, its axes as returned by ``mesh_text``.
        note: A line below the table.
    """

    title: str
    columns: dict[str, str]
    rows: list[dict[str, Any]]
    mesh: str = ""
    note: str = ""

    def __post_init__(self) -> None:
        for row in self.rows:
            if set(row) != set(self.columns):
                raise ValueError(
                    f"each row of a table must have the columns {', '.join(self.columns)}; got {', '.join(row)} in "
                    f"'{self.title}'. Write None for a figure that a row lacks."
                )


@dataclass(frozen=True)
class Record:
    """The record of one run of a benchmark; its fields are those of the JSON."""

    benchmark: str
    smoke: bool
    command: str
    commit: str
    machine: str
    versions: dict[str, str]
    tables: list[Table] = field(default_factory=list)

    @classmethod
    def start(cls, benchmark: str, options: Options) -> Self:
        """Returns a record without tables for this process and the commit that is checked out."""
        versions = {"Python": platform.python_version(), **installed("jax", "jaxlib")}
        return cls(
            benchmark,
            options.smoke,
            command(benchmark, sys.argv[1:]),
            commit(),
            machine(),
            versions,
        )

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns the record that ``finish`` wrote.

        Raises:
            ValueError: A field is missing.
        """
        found = json.loads(path.read_text())
        known = take(cls, found, path)
        return cls(
            **known | {"tables": [Table(**take(Table, table, path)) for table in known["tables"]]}
        )

    def finish(self, out: Path | None) -> None:
        """Prints the record, and writes it as JSON where asked."""
        print(f"{self.benchmark}: {render(self)}")
        if out is not None:
            self.write(out)

    def write(self, out: Path) -> None:
        """Writes the record as JSON, complete or not at all."""
        part = out.with_name(f"{out.name}.part")
        part.write_text(json.dumps(asdict(self), indent=1) + "\n")
        part.replace(out)


def take(cls: type, found: dict, path: Path) -> dict:
    """Returns the fields of a class from the contents of a file, which must have all of them."""
    wanted = [field.name for field in fields(cls)]
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(
            f"figures of a benchmark must have the fields {', '.join(wanted)}; {path} lacks {', '.join(missing)}. "
            f"Measure again: python benchmarks/{path.stem}.py --out {path}"
        )
    return {name: found[name] for name in wanted}


def render(record: Record) -> str:
    """Returns the Markdown of one benchmark's figures: their origin, then its tables."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    warning = "A smoke run, whose figures say nothing: " if record.smoke else ""
    lines = [f"{warning}`{record.command}` at {record.commit}; {record.machine}; {versions}."]
    for table in record.tables:
        mesh = f" Mesh: {table.mesh}." if table.mesh else ""
        lines += [
            "",
            f"{table.title}.{mesh}",
            "",
            *markdown(table),
            *(["", table.note] if table.note else []),
        ]
    return "\n".join(lines) + "\n"


def markdown(table: Table) -> list[str]:
    """Returns the lines of a table; columns with a format hold figures and are right-aligned."""
    cells = [[cell(row[name], form) for name, form in table.columns.items()] for row in table.rows]
    widths = [
        max(map(len, (name, *(row[i] for row in cells), "----")))
        for i, name in enumerate(table.columns)
    ]
    right = [bool(form) for form in table.columns.values()]
    columns = list(zip(widths, right, strict=True))
    line = lambda row: (
        f"| {' | '.join(c.rjust(w) if r else c.ljust(w) for c, (w, r) in zip(row, columns, strict=True))} |"
    )
    rule = ["-" * (width - 1) + (":" if is_right else "-") for width, is_right in columns]
    return [line(list(table.columns)), line(rule), *map(line, cells)]


def cell(value: Any, form: str) -> str:
    return "" if value is None else value if isinstance(value, str) else format(value, form)


def page(benchmarks: Sequence[str], folder: Path) -> str:
    """Returns the text of RESULTS.md: for each benchmark its question, its prose and, from a folder of JSON, its figures."""
    parts = [HEAD]
    for benchmark in benchmarks:
        question, prose = about(HERE / f"{benchmark}.py")
        path = folder / f"{benchmark}.json"
        figures = (
            render(Record.read(path))
            if path.exists()
            else f"`python benchmarks/{benchmark}.py`: not measured yet.\n"
        )
        parts += [f"## {question}\n\n{prose}\n", figures]
    return "\n".join(parts)


def about(script: Path) -> tuple[str, str]:
    """Returns the question that opens a script's docstring, and the prose after it; indented commands are left out."""
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    question, mark, rest = text.partition("?")
    paragraphs = [
        paragraph
        for paragraph in rest.split("\n\n")
        if not paragraph.lstrip("\n").startswith("    ")
    ]
    return question + mark, "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def command(benchmark: str, flags: Sequence[str]) -> str:
    """Returns the command that measures the same figures, without --out and without the folders of one machine."""
    kept = list(flags)
    if "--out" in kept:
        del kept[kept.index("--out") : kept.index("--out") + 2]
    kept = [Path(flag).name if os.path.isabs(flag) else flag for flag in kept]
    return shlex.join(["python", f"benchmarks/{benchmark}.py", *kept])


def commit() -> str:
    """Returns the current commit, with a plus if files other than figures differ from it."""
    figures = [f":(exclude){HERE / name}" for name in ("results", "RESULTS.md")]
    if not (found := git("rev-parse", "--short", "HEAD")):
        return "no commit"
    return found + ("+" if git("status", "--porcelain", "-uno", "--", ":/", *figures) else "")


def git(*args: str) -> str:
    try:
        done = subprocess.run(["git", *args], cwd=HERE, capture_output=True, text=True, check=False)
    except FileNotFoundError:
        return ""
    return done.stdout.strip()


def machine() -> str:
    """Returns the processor's name, its architecture and how many of its cores this process may use."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return f"{processor()}, {platform.machine()}, {cores} cores"


def processor() -> str:
    """Returns the processor's name as the operating system reports it."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "a processor without a name"


def installed(*packages: str) -> dict[str, str]:
    """Returns the versions of packages that are installed."""
    return {package: importlib.metadata.version(package) for package in packages}


def mesh_text(mesh: Any) -> str:
    """Returns the axes of a mesh that are larger than 1, such as "data 2, stage 4"; "one device" if there are none."""
    return (
        ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
    )
