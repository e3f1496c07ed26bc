"""recipes/all_reduce.py, run as a user runs it: equal parameters, and the traffic of the book."""

import re
import subprocess
import sys
from pathlib import Path

import doc_pages
import pytest

ROOT = Path(__file__).parents[1]


def run(*flags):
    command = [sys.executable, str(ROOT / "recipes/all_reduce.py"), *flags]
    return subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)


def test_every_way_moves_what_the_book_says_and_ends_at_the_same_parameters(tmp_path):
    few = ["--devices", "2", "4", "--steps", "3", "--batch-size", "16", "--hidden-layers", "2", "--pushes", "40"]
    done = run(*few, "--out-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^(.{16}) +(\d) +([\d.]+) \(book +([\d.]+)\) +([\d.]+) \(book +([\d.]+)\).* ms +(\S+) apart", done.stdout, re.M
    )
    assert len(rows) == 12, done.stdout
    for way, size, *moved, apart in rows:
        link, link_book, line, line_book = map(float, moved)
        assert link == pytest.approx(link_book, rel=0.01), (way, size)
        assert line == pytest.approx(line_book, rel=0.01), (way, size)
        assert float(apart) < 1e-5, (way, size)
    by_way = {(way.strip(), int(size)): float(line) for way, size, _, _, line, _, _ in rows}
    assert by_way["1 server", 4] == 6, "two times N-1"
    assert "no bound" in done.stdout
    guide = doc_pages.commands(ROOT / "docs" / "ring.md")
    doc_pages.check_quoted(next(c.quoted for c in guide if "all_reduce.py" in str(c)), done.stdout, numbers=False)
    for picture in ("traffic.png", "staleness.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--devices", "3", "--batch-size", "16"],
            "--batch-size must be divisible by every number of devices; got 16 and 3",
        ),
        (["--devices", "1"], r"--devices must be numbers of 2 or more; got \(1,\)"),
        (["--batch-size", "8400"], "--batch-size must be from 1 to 1438, the digits; got 8400"),
        (["--steps", "0"], "--steps must be at least 1; got 0"),
    ],
)
def test_flags_that_do_not_fit_end_with_code_2_and_a_message(flags, message, tmp_path):
    done = run(*flags, "--out-dir", str(tmp_path / "none"))
    assert done.returncode == 2, done.stderr
    assert re.search(message, done.stderr)
    assert not (tmp_path / "none").exists()


def test_one_of_several_processes_is_refused(monkeypatch, tmp_path):
    for name, value in (("COORDINATOR_ADDRESS", "127.0.0.1:1"), ("NUM_PROCESSES", "2"), ("PROCESS_ID", "0")):
        monkeypatch.setenv(f"JAX_{name}", value)
    done = run("--out-dir", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "got one of a run of 2. Start it without a launcher." in done.stderr
