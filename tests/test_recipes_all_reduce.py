"""recipes/all_reduce.py, run as a user runs it: equal parameters, and the traffic of textbook formulas."""

import html
import json
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest

import all_reduce
import all_reduce_report
import jaxpar
from jaxpar.commands import recipe as cli
from jaxpar.run import folder as run_folder
from tests.support import doc_pages
from tests.support.waiting import WAIT_SECONDS

ROOT = Path(__file__).parents[1]


def run(*flags):
    command = [sys.executable, str(ROOT / "recipes/all_reduce.py"), *flags]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=WAIT_SECONDS
    )


@pytest.mark.slow
def test_every_way_moves_what_the_book_says_and_ends_at_the_same_parameters(tmp_path):
    few = [
        "--devices",
        "2",
        "4",
        "--steps",
        "2",
        "--batch-size",
        "16",
        "--hidden-layers",
        "2",
        "--pushes",
        "40",
    ]
    done = run(*few, "--out-dir", str(tmp_path))
    assert done.returncode == 0, done.stderr
    rows = re.findall(
        r"^(.{16}) +(\d) +([\d.]+) \(book +([\d.]+)\) +([\d.]+) \(book +([\d.]+)\).* ms +(\S+) apart",
        done.stdout,
        re.M,
    )
    assert len(rows) == 11, done.stdout
    assert len([size for way, size, *_ in rows if way.startswith("4 servers")]) == 1, "on 4 devices"
    for way, size, *moved, apart in rows:
        link, link_book, line, line_book = map(float, moved)
        assert link == pytest.approx(link_book, rel=0.01), (way, size)
        assert line == pytest.approx(line_book, rel=0.01), (way, size)
        assert float(apart) < 1e-12, (way, size)
    by_way = {(way.strip(), int(size)): float(line) for way, size, _, _, line, _, _ in rows}
    assert by_way["1 server", 4] == 6, "two times N-1"
    assert "no bound" in done.stdout
    guide = doc_pages.commands(ROOT / "docs" / "ring.md")
    doc_pages.check_quoted(
        next(c.quoted for c in guide if "all_reduce.py" in str(c)), done.stdout, numbers=False
    )
    page = (tmp_path / "report.html").read_text()
    charts = dict(re.findall(r'<div class="chart" id="chart-([\w-]+)"><figure(.*?)</figure>', page))
    assert set(charts) == {"line-bytes", "way-seconds", "staleness"}
    widths = [
        float(width)
        for width in re.findall(
            r'<path d="[^"]*" stroke="[^"]*" stroke-width="([\d.]+)"', charts["line-bytes"]
        )
    ]
    assert widths == sorted(set(widths), reverse=True), (
        "ways that send as much are drawn on one another"
    )
    curves = json.loads(html.unescape(re.search(r'data-curves="([^"]*)"', charts["line-bytes"])[1]))
    assert next(curve["y"] for curve in curves if curve["name"] == "1 server")[1] == pytest.approx(
        6
    )
    assert {path for path in tmp_path.iterdir() if path.is_file()} == set(
        run_folder.own_files(tmp_path)
    )
    for picture in ("traffic.png", "staleness.png"):
        assert (tmp_path / picture).read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize(("size", "is_way"), [(2, False), (3, False), (4, True), (8, True)])
def test_there_are_no_more_servers_than_devices(size, is_way):
    ways = all_reduce.optimizers(all_reduce.Config(), size)
    assert ("4 servers" in ways) == is_way
    assert "1 server" in ways


def test_every_line_of_the_picture_of_staleness_is_in_its_legend(tmp_path, monkeypatch):
    drawn, two_panels = [], all_reduce_report._two_panels
    monkeypatch.setattr(
        all_reduce_report, "_two_panels", lambda: drawn.append(two_panels()) or drawn[-1]
    )
    losses = [3.0, 2.0, 1.0]
    run = {"losses": losses, "seconds": [1.0, 2.0, 3.0], "mean": 0.5}
    all_reduce_report.plot_staleness(
        tmp_path / "staleness.png",
        dict.fromkeys(map(all_reduce_report.bound_name, all_reduce.BOUNDS), run),
    )
    for axes in drawn[0][1]:
        named = dict(
            zip([text.get_text() for text in axes.get_legend().texts], axes.lines, strict=True)
        )
        assert sum("mean of the last 20 losses" in name for name in named) == len(all_reduce.BOUNDS)
        assert list(named["bound 4; 0.5 stale in the mean"].get_ydata()) == losses


def test_params_that_are_not_finite_end_the_comparison_with_its_exit_code(capsys):
    all_reduce.check_finite(all_reduce.Config(), [{"w": np.ones(2)}, [1.0]])
    with pytest.raises(SystemExit, match="86"):
        all_reduce.check_finite(all_reduce.Config(), [{"w": np.array([1.0, np.nan])}])
    assert "Choose a smaller one than --learning-rate 0.02." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            ["--devices", "3", "--batch-size", "16"],
            "--batch-size must be divisible by every number of devices; got 16 and 3",
        ),
        (["--devices", "1"], "--devices must be numbers of 2 or more; got (1,)"),
        (["--batch-size", "8400"], "--batch-size must be from 1 to 1438, the digits; got 8400"),
        (["--steps", "0"], "--steps must be at least 1; got 0"),
    ],
)
def test_flags_that_do_not_fit_end_with_code_2_and_a_message(
    flags, message, tmp_path, monkeypatch, capsys
):
    monkeypatch.setattr(jaxpar, "use_fake_devices", lambda _: None)  # this process has its own
    monkeypatch.setattr(
        all_reduce,
        "init_params",
        lambda *_: pytest.fail("it must be refused before params are made"),
    )
    with pytest.raises(SystemExit, match="2"):
        cli.run(all_reduce.main, all_reduce.Config, [*flags, "--out-dir", str(tmp_path / "none")])
    assert message in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_several_processes_compare_on_all_their_devices_and_refuse_other_numbers(monkeypatch):
    """Here they are one process with eight; two real ones are slow, below."""
    joined = []
    monkeypatch.setattr(cli, "read_process_env", lambda _: object())
    monkeypatch.setattr(cli, "join_run", lambda: joined.append(True))
    assert (
        cli.numbers_of_devices((), usual=range(2, 9))
        == cli.numbers_of_devices((8,), usual=())
        == (8,)
    )
    assert len(joined) == 2
    with pytest.raises(
        ValueError,
        match=r"all their devices; got --devices 2 4, a run of 8\. Leave --devices out, or",
    ):
        cli.numbers_of_devices((2, 4), usual=())


FEW = ("--steps", "2", "--batch-size", "16", "--hidden-layers", "2", "--pushes", "20")


def launch(tmp_path, *flags):
    command = [sys.executable, "-m", "jaxpar", "launch", "-n", "2", "--devices-per-process", "2"]
    command += [
        "--log-dir",
        str(tmp_path / "log"),
        str(ROOT / "recipes/all_reduce.py"),
        *FEW,
        *flags,
    ]
    return subprocess.run(
        command, capture_output=True, text=True, check=False, cwd=ROOT, timeout=WAIT_SECONDS
    )


@pytest.mark.slow
def test_two_processes_compare_on_all_their_devices(tmp_path):
    done = launch(tmp_path, "--out-dir", str(tmp_path / "out"))
    assert done.returncode == 0, done.stdout + done.stderr
    apart = re.findall(r"ms +(\S+) apart", done.stdout)
    assert len(apart) == 6
    assert max(map(float, apart)) < 1e-12
    assert (tmp_path / "out" / "traffic.png").exists()


@pytest.mark.slow
def test_two_processes_refuse_other_numbers_of_devices(tmp_path):
    done = launch(tmp_path, "--devices", "2", "--out-dir", str(tmp_path / "out"))
    assert done.returncode == 2
    assert (
        "several processes compare on all their devices; got --devices 2, a run of 4"
        in done.stdout + done.stderr
    )
