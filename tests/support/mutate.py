"""Tries each fault of tests/mutations.txt in a copy of the tree, and fails where the tests that should find it pass.

python -m tests.support.mutate [WORD ...]       only the lines that have one of the words
"""

import os
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import NamedTuple

from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[2]
LIST = ROOT / "tests" / "mutations.txt"
FOLDERS = ("jaxpar", "recipes", "tests", "benchmarks", "docs")
FOUND = 1  # pytest's exit code where tests failed


class Mutation(NamedTuple):
    """A fault: in a file of jaxpar/ a text that it has once becomes another, and these tests must fail."""

    path: str
    old: str
    new: str
    tests: tuple[str, ...]

    def apply(self, text: str) -> str:
        assert text.count(self.old) == 1, f"{self.path} must have this once: {self.old}"
        return text.replace(self.old, self.new)


def read_mutations() -> list[Mutation]:
    lines = [line for line in LIST.read_text().splitlines() if not line.startswith("#")]
    fields = [line.split("  ::  ") for line in lines]
    return [
        Mutation(f"jaxpar/{path}", old, new, tuple(tests.split()))
        for path, old, new, tests in fields
    ]


def run_tests(root: Path, tests: tuple[str, ...]) -> subprocess.CompletedProcess:
    """Runs tests of a tree until one fails."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-x",
        "-q",
        "-p",
        "no:cacheprovider",
        *(f"tests/{name}" for name in tests),
    ]
    env = os.environ | {"PYTHONPATH": str(root)}
    return subprocess.run(
        command,
        cwd=root,
        env=env,
        capture_output=True,
        text=True,
        check=False,
        timeout=WAIT_SECONDS,
    )


def main(words: list[str]) -> int:
    """Returns the number of mutations that survive."""
    chosen = [
        each for each in read_mutations() if not words or any(word in repr(each) for word in words)
    ]
    survived = 0
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        for name in FOLDERS:
            shutil.copytree(ROOT / name, root / name, ignore=shutil.ignore_patterns("__pycache__"))
        for path in ROOT.iterdir():
            if path.is_file() and path.name != ".git":
                shutil.copy(path, root)
        for mutation in chosen:
            file = root / mutation.path
            before = file.read_text()
            file.write_text(mutation.apply(before))
            done = run_tests(root, mutation.tests)
            file.write_text(before)
            is_found = done.returncode == FOUND
            survived += not is_found
            print(
                f"{'found   ' if is_found else 'SURVIVED'} {mutation.path}: {mutation.old} -> {mutation.new}",
                flush=True,
            )
            if not is_found and done.returncode != 0:
                print(done.stdout[-2000:], done.stderr[-2000:])
    print(f"{survived} of {len(chosen)} mutations survived")
    return survived


if __name__ == "__main__":
    sys.exit(min(main(sys.argv[1:]), 1))
