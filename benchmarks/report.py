"""What a benchmark says and writes: machine, versions and commit around its tables, as JSON, and that JSON as Markdown.

A benchmark makes a ``Record`` when it starts, adds tables, and at the end calls ``finish``. ``page`` makes of all that JSON
what ``benchmarks/RESULTS.md`` holds; the prose beside the figures is each script's own docstring.
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
CANNOT_RUN = 77  # the exit code of a benchmark that needs what this machine lacks; automake's for a test left out

HEAD = """\
# Results

Rendered by `make bench` from the JSON in `benchmarks/results/`: what is edited here is lost. What was found in the \
figures, and what they do not show, is in `benchmarks/FINDINGS.md`.

Times are medians over rounds in which every candidate of a table runs in turn, and a ratio is the median over the rounds of a \
figure to that of the table's first row in the same round. Fake devices share the cores: there CPU seconds say what a step \
costs, and wall seconds little. A plus after a commit: files differed from it.
"""


@dataclass(frozen=True)
class Options:
    """What every benchmark takes."""

    out: Path | None = None
    """A JSON file for the figures."""
    smoke: bool = False
    """A tiny run: does it run? Its figures say nothing."""


@dataclass(frozen=True)
class Table:
    """Figures.

    Attributes:
        title: What was run.
        columns: How each column is written, a format such as ".2f", by its name, which holds the unit.
        rows: A value for each column; None leaves the cell empty.
        mesh: Where there is one mesh for all rows: its axes, as ``mesh_text`` writes them.
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
    """All that is known of one run of a benchmark; its fields are those of the JSON."""

    benchmark: str
    smoke: bool
    command: str
    commit: str
    machine: str
    versions: dict[str, str]
    tables: list[Table] = field(default_factory=list)

    @classmethod
    def start(cls, benchmark: str, options: Options) -> Self:
        """Returns a record without tables of the process that runs, at the commit that is checked out now."""
        versions = {"Python": platform.python_version(), **installed("jax", "jaxlib")}
        return cls(benchmark, options.smoke, command(benchmark, sys.argv[1:]), commit(), machine(), versions)

    @classmethod
    def read(cls, path: Path) -> Self:
        """Returns what ``finish`` wrote.

        Raises:
            ValueError: A field is missing.
        """
        found = json.loads(path.read_text())
        known = take(cls, found, path)
        return cls(**known | {"tables": [Table(**take(Table, table, path)) for table in known["tables"]]})

    def finish(self, out: Path | None) -> None:
        """Prints the record, and writes it as JSON where asked."""
        print(f"{self.benchmark}: {render(self)}")
        if out is not None:
            out.write_text(json.dumps(asdict(self), indent=1) + "\n")


def take(cls: type, found: dict, path: Path) -> dict:
    """Returns of what a file holds the fields of a class, all of which must be there."""
    wanted = [field.name for field in fields(cls)]
    if missing := [name for name in wanted if name not in found]:
        raise ValueError(
            f"figures of a benchmark must have the fields {', '.join(wanted)}; {path} lacks {', '.join(missing)}. "
            f"Measure again: python benchmarks/{path.stem}.py --out {path}"
        )
    return {name: found[name] for name in wanted}


def render(record: Record) -> str:
    """Returns the Markdown of one benchmark's figures: where they come from, then its tables."""
    versions = ", ".join(f"{name} {version}" for name, version in record.versions.items())
    warning = "A smoke run, whose figures say nothing: " if record.smoke else ""
    lines = [f"{warning}`{record.command}` at {record.commit}; {record.machine}; {versions}."]
    for table in record.tables:
        mesh = f" Mesh: {table.mesh}." if table.mesh else ""
        lines += ["", f"{table.title}.{mesh}", "", *markdown(table), *(["", table.note] if table.note else [])]
    return "\n".join(lines) + "\n"


def markdown(table: Table) -> list[str]:
    """Returns the lines of a table; columns with a format are figures, and stand to the right."""
    cells = [[cell(row[name], form) for name, form in table.columns.items()] for row in table.rows]
    widths = [max(map(len, (name, *(row[i] for row in cells), "----"))) for i, name in enumerate(table.columns)]
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
    """Returns what RESULTS.md holds: of each benchmark its question, its prose and, from a folder of JSON, its figures."""
    parts = [HEAD]
    for benchmark in benchmarks:
        question, prose = about(HERE / f"{benchmark}.py")
        path = folder / f"{benchmark}.json"
        figures = (
            render(Record.read(path)) if path.exists() else f"`python benchmarks/{benchmark}.py`: not measured yet.\n"
        )
        parts += [f"## {question}\n\n{prose}\n", figures]
    return "\n".join(parts)


def about(script: Path) -> tuple[str, str]:
    """Returns the question that a script's docstring opens with, and the prose after it; indented commands are left out."""
    text = ast.get_docstring(ast.parse(script.read_text())) or ""
    question, mark, rest = text.partition("?")
    paragraphs = [paragraph for paragraph in rest.split("\n\n") if not paragraph.lstrip("\n").startswith("    ")]
    return question + mark, "\n\n".join(" ".join(paragraph.split()) for paragraph in paragraphs)


def command(benchmark: str, flags: Sequence[str]) -> str:
    """Returns what to type for the same figures: without --out, and without the folders of one machine."""
    kept = list(flags)
    if "--out" in kept:
        del kept[kept.index("--out") : kept.index("--out") + 2]
    kept = [Path(flag).name if os.path.isabs(flag) else flag for flag in kept]
    return shlex.join(["python", f"benchmarks/{benchmark}.py", *kept])


def commit() -> str:
    """Returns the commit that runs, with a plus where files differ from it that are not figures."""
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
    """Returns the name that the operating system has for the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or "a processor without a name"


def installed(*packages: str) -> dict[str, str]:
    """Returns the versions of packages that are installed."""
    return {package: importlib.metadata.version(package) for package in packages}


def mesh_text(mesh: Any) -> str:
    """Returns the axes of a mesh that are cut, such as "data 2, stage 4"; "one device" where none is."""
    return ", ".join(f"{axis} {size}" for axis, size in mesh.shape.items() if size > 1) or "one device"
