"""Documentation pages as tests read them: their code blocks, their commands, and the output that they quote."""

import itertools
import math
import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import jax

READ_WITH_JAX = "0.10."  # the figures on the pages
ROOT = Path(__file__).parents[2]
BLOCK = re.compile(r"^```(\w+)\n(.*?)^```", flags=re.DOTALL | re.MULTILINE)
LINK = re.compile(r"\]\((?!https://)([^)#]+)(?:#[^)]*)?\)")
SECONDS = re.compile(r"\b[\d.,]+ (s|ms)\b")
NUMBER = re.compile(r"-?\d[\d,]*(?:\.\d+)?(?:e[-+]?\d+)?")


class Block(NamedTuple):
    """A fenced block: the language it names, and what is in it."""

    language: str
    text: str


class Command(NamedTuple):
    """A command of a page, and the lines that the page quotes of what its block prints."""

    words: tuple[str, ...]
    quoted: str

    def __str__(self) -> str:
        return shlex.join(self.words)

    def without_redirection(self) -> tuple[tuple[str, ...], str]:
        """Returns the words before a ``>``, and the file after it; "" if there is none."""
        if ">" not in self.words:
            return self.words, ""
        at = self.words.index(">")
        (into,) = self.words[at + 1 :]
        return self.words[:at], into


def blocks(page: Path) -> list[Block]:
    """Returns the fenced blocks of a page."""
    return [Block(*found) for found in BLOCK.findall(page.read_text())]


def commands(page: Path) -> Iterator[Command]:
    """Yields the commands of a page's sh blocks; a text block right after one quotes its last command."""
    found = blocks(page)
    for block, after in itertools.zip_longest(found, found[1:]):
        if block.language != "sh":
            continue
        lines = [
            words for line in block.text.splitlines() if (words := shlex.split(line, comments=True))
        ]
        quoted = after.text if after and after.language == "text" else ""
        for words in lines:
            yield Command(tuple(words), quoted if words is lines[-1] else "")


def check_quoted(quoted: str, printed: str, *, numbers: bool, within: float = 1e-3) -> None:
    """Raises unless each quoted line begins a printed one, in order; a line of three dots stands for any that are left out.

    Args:
        quoted: What a page shows.
        printed: What the program printed.
        numbers: Whether numbers must be the same too; without it only the words. Seconds never need be, and another JAX
            compiles other programs.
        within: How far two such numbers may be apart, in units of the larger.
    """
    numbers = numbers and jax.__version__.startswith(READ_WITH_JAX)
    lines = iter(printed.splitlines())
    for line in quoted.splitlines():
        if line.strip() not in ("", "..."):
            found = any(_begins(line, other, within if numbers else None) for other in lines)
            assert found, f"{line!r} is quoted, but not printed there:\n{printed}"


def _begins(line: str, printed: str, within: float | None) -> bool:
    quoted, there = (" ".join(SECONDS.sub(r"some \1", each).split()) for each in (line, printed))
    if not NUMBER.sub("#", there).startswith(NUMBER.sub("#", quoted)):
        return False
    pairs = zip(
        map(_value, NUMBER.finditer(quoted)), map(_value, NUMBER.finditer(there)), strict=False
    )
    return within is None or all(math.isclose(one, other, rel_tol=within) for one, other in pairs)


def _value(found: re.Match) -> float:
    return float(found[0].replace(",", "").rstrip("."))
