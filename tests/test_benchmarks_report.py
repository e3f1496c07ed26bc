"""What benchmarks write becomes the page of results, and a benchmark that cannot run leaves that of the others alone."""

import dataclasses
import json
from pathlib import Path

import pytest
import report
import run

BENCHMARKS = Path(__file__).parents[1] / "benchmarks"


RECORD = report.Record(
    benchmark="traffic",
    smoke=False,
    command="python benchmarks/traffic.py --num-microbatches 16",
    commit="abc1234",
    machine="A processor, x86_64, 2 cores",
    versions={"Python": "3.11.7", "jax": "0.10.2"},
    tables=[
        report.Table(
            title="Two steps",
            columns={"step": "", "sent MiB": ".2f", "ratio": ".3f", "tokens": ",d"},
            rows=[
                {"step": "jaxpar", "sent MiB": 37.756, "ratio": 1.0, "tokens": 12345},
                {"step": "GPipe by jax.grad", "sent MiB": 1.0, "ratio": 1.3754, "tokens": None},
            ],
            mesh="stage 4",
            note="Counted.",
        )
    ],
)

# A benchmark that writes made-up figures, one that cannot run here, one that fails.
WRITES = '''"""What is counted? Sheep.

    python benchmarks/{name}.py

They lie
on two lines.
"""
import pathlib, sys
pathlib.Path(sys.argv[sys.argv.index("--out") + 1]).write_text({text!r})
'''
CANNOT = f'"""How fast? A GPU."""\nprint("needs a GPU")\nraise SystemExit({report.CANNOT_RUN})\n'
FAILS = '"""Does it fail? It does."""\nraise SystemExit(1)\n'


def write(record, path):
    path.write_text(json.dumps(dataclasses.asdict(record)))
    return path


@pytest.fixture
def made_up(tmp_path, monkeypatch):
    """Three benchmarks of which each can do something else; returns the folder that holds them."""
    monkeypatch.setattr(run, "HERE", tmp_path)
    monkeypatch.setattr(report, "HERE", tmp_path)
    monkeypatch.setattr(run, "BENCHMARKS", ("fails", "cannot", "writes"))
    text = json.dumps(dataclasses.asdict(RECORD))
    scripts = {"fails": FAILS, "cannot": CANNOT, "writes": WRITES.format(name="writes", text=text)}
    for name, program in scripts.items():
        (tmp_path / f"{name}.py").write_text(program)
    return tmp_path


def test_a_table_holds_the_figures_below_their_command_and_commit(tmp_path):
    text = report.render(report.Record.read(write(RECORD, tmp_path / "traffic.json")))
    assert text.splitlines() == [
        "`python benchmarks/traffic.py --num-microbatches 16` at abc1234; A processor, x86_64, 2 cores; Python 3.11.7, "
        "jax 0.10.2.",
        "",
        "Two steps. Mesh: stage 4.",
        "",
        "| step              | sent MiB | ratio | tokens |",
        "| ----------------- | -------: | ----: | -----: |",
        "| jaxpar            |    37.76 | 1.000 | 12,345 |",
        "| GPipe by jax.grad |     1.00 | 1.375 |        |",
        "",
        "Counted.",
    ]


def test_a_smoke_run_says_so():
    assert report.render(dataclasses.replace(RECORD, smoke=True)).startswith(
        "A smoke run, whose figures say nothing: `"
    )


@pytest.mark.parametrize(("where", "field"), [("record", "commit"), ("table", "rows")])
def test_a_missing_field_is_named_with_the_file(tmp_path, where, field):
    path = write(RECORD, tmp_path / "traffic.json")
    found = json.loads(path.read_text())
    del (found if where == "record" else found["tables"][0])[field]
    path.write_text(json.dumps(found))
    with pytest.raises(
        ValueError,
        match=rf"{path} lacks {field}. Measure again: python benchmarks/traffic.py --out",
    ):
        report.Record.read(path)


def test_a_row_without_one_of_the_columns_is_refused():
    with pytest.raises(
        ValueError, match="each row of a table must have the columns run, MiB; got run in 'Memory'"
    ):
        report.Table("Memory", {"run": "", "MiB": ".1f"}, [{"run": "1f1b"}])


def test_a_command_names_no_folder_of_this_machine():
    flags = [
        "--out",
        "figures.json",
        "--smoke",
        "--torch-python",
        str(Path("bin", "python").resolve()),
    ]
    assert (
        report.command("gpu_day", flags)
        == "python benchmarks/gpu_day.py --smoke --torch-python python"
    )


def test_one_benchmark_stops_no_other_and_each_that_did_not_run_keeps_its_figures(made_up, capfd):
    results = made_up / "results"
    results.mkdir()
    earlier = dataclasses.replace(RECORD, commit="0123abc")
    for name in ("fails", "cannot"):
        write(earlier, results / f"{name}.json")
    with pytest.raises(SystemExit, match=r"^failed: fails\. "):
        run.main(run.Config(only=("fails", "cannot", "writes")))
    commits = {path.stem: report.Record.read(path).commit for path in results.iterdir()}
    assert commits == {"fails": "0123abc", "cannot": "0123abc", "writes": "abc1234"}
    assert "needs a GPU" in capfd.readouterr().out
    page = (made_up / "RESULTS.md").read_text()
    assert page.count(" at 0123abc; ") == 2
    assert (
        f"## What is counted?\n\nSheep.\n\nThey lie on two lines.\n\n{report.render(RECORD)}"
        in page
    )


def test_what_was_never_measured_is_on_the_page_too(made_up):
    run.main(run.Config(only=("cannot",)))
    assert (
        "## How fast?\n\nA GPU.\n\n`python benchmarks/cannot.py`: not measured yet.\n"
        in (made_up / "RESULTS.md").read_text()
    )


def test_a_smoke_run_of_all_keeps_nothing(made_up, capsys):
    run.main(run.Config(only=("writes",), smoke=True))
    assert report.render(RECORD) in capsys.readouterr().out
    assert not (made_up / "results").exists()
    assert not (made_up / "RESULTS.md").exists()


def test_an_unknown_benchmark_is_refused():
    with pytest.raises(SystemExit, match=r"--only takes traffic, .*; got speed"):
        run.main(run.Config(only=("speed",)))


def test_every_script_that_asks_a_question_is_run():
    asks = {path.stem for path in BENCHMARKS.glob("*.py") if report.about(path)[0].endswith("?")}
    assert asks == set(run.BENCHMARKS)


def test_the_page_is_what_the_figures_render_to():
    """It needs figures, of which a tree may hold none yet."""
    page = report.page(run.BENCHMARKS, BENCHMARKS / "results")
    if any((BENCHMARKS / "results").glob("*.json")):
        assert (BENCHMARKS / "RESULTS.md").read_text() == page, (
            "render it: python benchmarks/run.py --render"
        )
