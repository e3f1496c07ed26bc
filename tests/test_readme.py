"""What the README says is true: its program prints what is shown, its figures are measured, its links lead somewhere."""

import functools
import json
import math
import re
import unicodedata
from pathlib import Path

import pytest
import report
from gpu_day_parts.published import ROWS

from jaxpar.tensor_parallel import EXPERT_RULES
from tests.support import doc_pages

ROOT = Path(__file__).parents[1]
README, CHINESE = ROOT / "README.md", ROOT / "README.zh.md"
TEXT = README.read_text()
LINES_OF_A_SCREEN, COLUMNS = 40, 90


def blocks(language: str) -> list[str]:
    return [block.text for block in doc_pages.blocks(README) if block.language == language]


def columns(line):
    """Returns the columns of a terminal that a line takes as it is shown, without its links: two for a Chinese character."""
    shown = re.sub(r"\]\([^)]*\)", "", line)
    return sum(2 if unicodedata.east_asian_width(each) in "WF" else 1 for each in shown)


def first_screen(text):
    return text.partition("\n## ")[0].splitlines()


@pytest.mark.parametrize("page", [README, CHINESE], ids=lambda page: page.name)
def test_the_first_screen_has_three_claims_with_proofs_a_program_its_output_and_a_picture(page):
    screen = first_screen(page.read_text())
    assert sum(max(1, math.ceil(columns(line) / COLUMNS)) for line in screen) <= LINES_OF_A_SCREEN
    whole = "\n".join(screen)
    for part in ("pip install", "```python", "```text", "same-loss.png", "GPU"):
        assert part in whole, part
    claims = [line for line in screen if line.startswith("- **")]
    assert len(claims) == 3
    proofs = "test_parity.py", "test_planned_memory.py", "test_fine_tuning_page.py"
    assert all(f"](tests/{proof})" in claim for claim, proof in zip(claims, proofs, strict=True))
    assert screen.index("```python") <= 12, "soon"


def test_the_tolerances_of_the_claims_are_those_of_the_tests():
    claims = "\n".join(first_screen(TEXT))
    assert "to 1e-12 in float64" in claims
    oracle = (ROOT / "tests" / "support" / "oracle.py").read_text()
    assert "1e-12" in oracle
    assert "within 10% of the compiler's" in claims
    assert (
        "assert 0.9 < plan.memory_bytes / memory.total_bytes < 1.1"
        in (ROOT / "tests/test_planned_memory.py").read_text()
    )


@pytest.mark.parametrize("page", [README, CHINESE], ids=lambda page: page.name)
def test_readers_learn_when_to_choose_another_library_and_what_is_missing(page):
    text = page.read_text()
    for name in ("MaxText", "torchtitan", "Megatron-LM"):
        assert re.search(rf"^\| \[{name}\]\(https://github.com/", text, flags=re.MULTILINE), name
    axes = {axis for rules in EXPERT_RULES.values() for axis in rules.values()}
    assert axes == {"tensor", None}, "then the page has a limit that is none"
    assert "`context`" in text


# Rows of the Chinese page by the names that the benchmarks have for them.
OF_RESULTS = {
    "`jax.jit` 加切分标注": "jax.jit with shardings",
    "用 `jax.grad` 实现的 GPipe": "GPipe by jax.grad",
}
RESULTS = (ROOT / "benchmarks" / "RESULTS.md").read_text()
LIBRARIES = ("jax.jit", "jaxpar", "PyTorch", "JaxPP")


def rows_of(page, first):
    """Returns the cells of a table's rows, from the beginning of its header."""
    lines = page.read_text().splitlines()
    start = next(at for at, line in enumerate(lines) if line.startswith(first))
    table = lines[start + 2 : next(at for at in range(start, len(lines)) if not lines[at])]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def compared():
    """Returns the fastest time of each library in each table of "How does jaxpar compare?" in which there are several."""
    part = RESULTS.partition("## How does jaxpar compare?")[2].partition("\n## ")[0]
    for table in re.findall(r"(?:^\|.*\n)+", part, flags=re.MULTILINE):
        rows = re.findall(r"^\| ([^|]+?) +\| +([\d.]+) \|", table, flags=re.MULTILINE)
        fastest = [
            min((t for name, t in rows if name.startswith(lib)), key=float, default="")
            for lib in LIBRARIES
        ]
        if any(fastest[2:]):
            yield fastest


@pytest.mark.parametrize("page", [README, CHINESE], ids=lambda page: page.name)
def test_times_are_the_fastest_of_each_library_in_every_comparison(page):
    shown = [
        [re.split(" |（", cell)[0] for cell in row[1:]]
        for row in rows_of(page, "| step | `jax.jit`" if page is README else "| 一步")
    ]
    assert shown == list(compared())
    by_pytorch = [float(row[2]) < min(float(row[0]), float(row[1])) for row in shown if row[2]]
    assert all(by_pytorch), "the page says that its kernels are the fastest here"


@pytest.mark.parametrize("page", [README, CHINESE], ids=lambda page: page.name)
def test_memory_and_traffic_are_those_of_the_benchmarks(page):
    found = rows_of(page, "| step | temporary" if page is README else "| 做法")
    assert len(found) == 3
    for name, memory, sent in found:
        name = OF_RESULTS.get(name, name).replace("`", "")
        row = lambda after, name=name: re.search(
            rf"^\| {after}{re.escape(name)} +\|(.*)\|$", RESULTS, flags=re.MULTILINE
        )[1]
        of_memory, of_traffic = row("").split("|"), row(r"stage 4 +\| ").split("|")
        assert memory == f"{float(of_memory[2]):.0f} MiB"
        assert sent == f"{float(of_traffic[1]) + float(of_traffic[3]):.0f} MiB"
    for axis in ("data 4", "tensor 4", "stage 4"):
        of_axis = re.findall(
            rf"^\| {axis} +\| jaxpar[^|]*\|[^|]*\|[^|]*\| +([\d.]+) \|", RESULTS, flags=re.MULTILINE
        )
        assert set(of_axis) == {"1.0000"}, axis
    assert "1.0000" in page.read_text()


@functools.cache
def on_a_gpu():
    """Returns the tables of the benchmark on a GPU, by title."""
    record = report.Record.read(ROOT / "benchmarks" / "results" / "gpu_day.json")
    return {table.title: table.rows for table in record.tables}


def said(row):
    gib = f", {row['peak GiB']:.1f} GiB" if row["peak GiB"] else ""
    return f"{row['tokens/s']:,.0f}, {row['MFU']:.1%}{gib}"


@pytest.mark.parametrize("page", [README, CHINESE], ids=lambda page: page.name)
def test_speed_on_a_gpu_is_that_of_its_record(page):
    found = rows_of(page, "| job |" if page is README else "| 任务")
    plain = [
        [cell.replace("，", ", ").replace("：", ": ").replace("；", "; ") for cell in row[1:]]
        for row in found
    ]
    steps = on_a_gpu()["Training steps"]
    ours = [row for row in steps if row["run"] == "jaxpar"]
    assert [row[0] for row in plain[:-1]] == [said(row) for row in ours]
    torch, checkpointed = (row for row in steps if row["run"] != "jaxpar")
    assert torch["run"] == "PyTorch 2.11.0, torch.compile"
    assert (
        plain[0][1]
        == f"PyTorch 2.11.0, `torch.compile`: {said(torch)}; `jax.checkpoint`: {said(checkpointed)}"
    )
    one, sixteen = (f"{row['tokens/s']:,.0f}" for row in on_a_gpu()["Greedy decoding in bfloat16"])
    assert re.findall(r"[\d,]+", plain[-1][0]) == [one, sixteen]
    published = {row[2].rpartition(": ")[2] for row in plain if row[2]}
    assert published == {f"{row[3]:,}" for row in ROWS[:2]}
    assert {row["at"] for row in steps} == {"52505c8"}
    assert "52505c8" in page.read_text()
    assert {row["jax"] for row in steps} == {"0.11.2"}


def test_steps_that_the_planner_is_held_against_are_those_of_the_record():
    """``tests/data/measured.json``, whose milliseconds and memory the pages of the planner show."""
    names = {row["job"]: row for row in on_a_gpu()["Training steps"] if row["run"] == "jaxpar"}
    planned = json.loads((ROOT / "tests" / "data" / "measured.json").read_text())["rows"]
    for row in planned:
        measured = names[row["job"]]
        assert (row["milliseconds"], row["gib"]) == (
            round(measured["ms a step"], 1),
            round(measured["peak GiB"], 1),
        )


def test_every_recipe_and_make_target_that_is_named_exists():
    commands = "".join(blocks("sh"))
    makefile = (ROOT / "Makefile").read_text()
    for target in re.findall(r"make (\w+)", commands):
        assert re.search(rf"^{target}:", makefile, flags=re.MULTILINE), f"make {target}"
    for recipe in re.findall(r"recipes/\w+\.py", TEXT):
        assert (ROOT / recipe).is_file(), recipe


@pytest.mark.parametrize(
    "page", [README, CHINESE, ROOT / "CONTRIBUTING.md"], ids=lambda page: page.name
)
def test_every_link_leads_somewhere(page):
    links = doc_pages.LINK.findall(page.read_text())
    assert links
    for link in links:
        assert link.startswith("https://github.com/") or (ROOT / link).exists(), link


def test_the_chinese_readme_has_the_code_of_the_english_one():
    assert doc_pages.blocks(CHINESE) == doc_pages.blocks(README)
    pictures = lambda text: re.findall(r"pictures/(?:zh/)?([\w-]+\.png)", text)
    assert pictures(CHINESE.read_text()) == pictures(TEXT)


def test_the_first_lines_say_what_it_is_for_where_containers_are_run_and_lead_to_the_guide():
    for page, guide, words in (
        (README, "docs/index.md", "If you run containers"),
        (CHINESE, "docs/zh/index.md", "容器"),
    ):
        (line,) = [line for line in page.read_text().splitlines()[:5] if words in line]
        assert f"]({guide})" in line
        assert "Kubernetes" in line


def test_no_row_of_a_table_is_missing_or_english_in_the_chinese_readme():
    cells = lambda page: [
        line.split("|")[1:-1] for line in page.read_text().splitlines() if line.startswith("|")
    ]
    pairs = list(zip(cells(README), cells(CHINESE), strict=True))
    assert len(pairs) > 20
    sentence = re.compile(r"[a-z]+ [a-z]+ [a-z]+")
    in_english = [
        cell for _, row in pairs for cell in row if sentence.search(re.sub(r"`[^`]*`", "", cell))
    ]
    assert not in_english
    assert [len(row) for row, _ in pairs] == [len(row) for _, row in pairs]


def test_jobs_of_the_readme_and_the_guide_save_before_they_end():
    pages = [README, *(ROOT / "docs").glob("*.md")]
    found = [
        c.words
        for page in pages
        for c in doc_pages.commands(page)
        if "--checkpoint-claim" in c.words
    ]
    of_recipes = ("train", *(f"recipes/{path.name}" for path in (ROOT / "recipes").glob("*.py")))
    found = [
        words for words in found if {*of_recipes} & {*words}
    ]  # neither a server nor a script of one's own
    assert len(found) >= 3
    for words in found:
        value = lambda flag, words=words: int(words[words.index(flag) + 1])
        assert 10 * value("--checkpoint-every") <= value("--steps"), words
